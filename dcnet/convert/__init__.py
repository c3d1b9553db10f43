"""Any network made a decoupled one: which layers, what they start from, how gradually, and the way back."""

from dcnet.convert.apply import decouple, recouple
from dcnet.convert.blend import BlendSchedule, blended_layers, finish_blend_
from dcnet.convert.choice import Choice, plan
from dcnet.convert.conversion import Conversion, Row

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
