from dcnet.models import blocks as blocks
from dcnet.models import create as create
from dcnet.models.blocks import Network
from dcnet.models.create import Entry, create_model, networks, register, register_prefix
from dcnet.models.settings import Settings

__all__ = [
    "Entry",
    "Network",
    "Settings",
    "create_model",
    "networks",
    "register",
    "register_prefix",
]
