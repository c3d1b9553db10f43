from dcnet.convert.blend import BlendSchedule, blended_layers, finish_blend_
from dcnet.convert.replace import decouple, recouple
from dcnet.convert.selection import Choice, Conversion, Row, plan

__all__ = [
    "BlendSchedule",
    "Choice",
    "Conversion",
    "Row",
    "blended_layers",
    "decouple",
    "finish_blend_",
    "plan",
    "recouple",
]
