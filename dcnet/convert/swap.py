"""One layer made decoupled or plain where it stands.

The layer stays the same object and its parameters too: only its class changes, as it does when torch's lazy layers are
filled. So optimizers, tied weights, hooks, device, dtype, memory format and training flag are kept.
"""

from typing import cast

from torch import nn

from dcnet.layers import Decoupled, DecoupledConv1d, DecoupledConv2d, DecoupledConv3d, DecoupledLinear
from dcnet.opaque import unmark_
from dcnet.operator import Operator, as_operator, is_plain

TWINS: dict[type[nn.Module], type[Decoupled]] = {
    nn.Conv1d: DecoupledConv1d,
    nn.Conv2d: DecoupledConv2d,
    nn.Conv3d: DecoupledConv3d,
    nn.Linear: DecoupledLinear,
}


def plain_class(layer: nn.Module) -> type[nn.Module]:
    """torch's own class that a layer belongs to."""
    return next(plain for plain in TWINS if isinstance(layer, plain))


def change_(layer: nn.Module, operator: Operator | str, eps: float, blend: float | None) -> None:
    """Gives a layer the operator, or makes it torch's own for "conv"; weight and bias are kept."""
    plain = plain_class(layer)
    if isinstance(layer, Decoupled):
        _drop_state_(layer)
    if is_plain(operator):
        # Whom a decoupled layer shares its mean norm with.
        vars(layer).pop("sync", None)
        unmark_(layer)
        layer.__class__ = plain
        return
    layer.__class__ = TWINS[plain]
    cast(Decoupled, layer)._take(as_operator(operator), eps, blend)


def _drop_state_(layer: Decoupled) -> None:
    drop_blend_(layer)
    for name in ("mean_norm", "num_batches_tracked"):
        layer._buffers.pop(name, None)
    for name in layer.operator.learned:
        delattr(layer, name)
    del layer.operator, layer.eps, layer.initial_blend


def drop_blend_(layer: Decoupled) -> None:
    """Makes a layer that blends purely decoupled."""
    layer._buffers.pop("blend", None)
