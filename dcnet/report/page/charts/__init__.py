"""Charts as SVG, in the colours of the page, and legible at the width of a phone."""

from dcnet.report.page.charts.bars import Bars, bar_chart
from dcnet.report.page.charts.frame import Axis, Words
from dcnet.report.page.charts.lines import Line, line_chart
from dcnet.report.page.charts.points import Cloud, point_chart

__all__ = ["Axis", "Bars", "Cloud", "Line", "Words", "bar_chart", "line_chart", "point_chart"]
