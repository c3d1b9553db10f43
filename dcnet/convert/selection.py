"""Selects the layers of a network to convert, and reports why the others stay."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from rich.console import Console
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from dcnet.attention import check_operator
from dcnet.convert.attention_modules import (
    Scored,
    attention_obstacle,
    describe_attention,
    head_count,
    is_attention,
    lacks_heads,
)
from dcnet.layers import Decoupled, DecoupledConv1d, DecoupledConv2d, DecoupledConv3d, DecoupledLinear
from dcnet.operator import Operator, as_operator, is_plain
from dcnet.table import Column, Table

TEXT_WIDTH = 160

# The decoupled class for each of torch's classes.
TWINS: dict[type[nn.Module], type[Decoupled]] = {
    nn.Conv1d: DecoupledConv1d,
    nn.Conv2d: DecoupledConv2d,
    nn.Conv3d: DecoupledConv3d,
    nn.Linear: DecoupledLinear,
}


@dataclass(frozen=True)
class Row:
    """One layer before and after conversion; `after` is None if it stays, and `note` says why."""

    layer: str
    shape: str
    before: str
    after: str | None
    note: str = ""
    is_attention: bool = False


@dataclass(frozen=True)
class Conversion:
    """The conversion of every convolution and linear layer of a network, in the order of definition; also of attention.

    `print` shows it as text, `rich.print` as a table.
    """

    rows: tuple[Row, ...]

    @property
    def changed(self) -> list[str]:
        """The names of the converted layers."""
        return [row.layer for row in self.rows if row.after is not None]

    @property
    def left(self) -> dict[str, str]:
        """The layers that stay, with the reason for each."""
        return {row.layer: row.note for row in self.rows if row.after is None}

    def __rich__(self) -> Table:
        columns = [Column(heading, wraps=True) for heading in ("layer", "shape", "before", "after", "note")]
        rows = [(row.layer or "(the model)", row.shape, row.before, row.after or "", row.note) for row in self.rows]
        unchanged = [i for i, row in enumerate(self.rows) if row.after is None]
        return Table(columns, rows, f"layers changed: {len(self.changed)}, left: {len(self.left)}", dim=unchanged)

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=TEXT_WIDTH).print(self)
        return text.getvalue().rstrip("\n")


ALREADY = "has this operator already"

Patterns = str | Sequence[str] | None

# Usual names of shortcuts around a block; a 1x1 layer is a shortcut if a part of its name matches one.
SHORTCUTS = ("*shortcut*", "*downsample*", "*skip*", "*identity*", "project")

# Modules that read the weights of their layers without calling the layers.
BYPASSING = nn.MultiheadAttention

# Modules with weights that no decoupled layer can replace, and why.
NO_EQUIVALENT: dict[type[nn.Module], str] = {
    nn.MultiheadAttention: "attention projects queries, keys and values with its own weights, not with layers",
    nn.RNNBase: "a recurrent layer multiplies by its weights inside torch",
    nn.RNNCellBase: "a recurrent layer multiplies by its weights inside torch",
    nn.Bilinear: "a bilinear layer has two inputs, so there is no patch to compare filters with",
}


@dataclass(frozen=True)
class Choice:
    """Which layers to convert: all convolutions by default.

    Args:
        include: only layers whose full name matches, as in "layer3.*" or ["*.conv1", "*.conv2"]. A shared layer has
            several names. `include`, `exclude` and `where` also select attention modules.
        exclude: no layers whose full name matches.
        where: only layers for which `where(name, module)` is true.
        linear: also linear layers.
        first: also the layer that the network defines first.
        last: also the layer that the network defines last, of convolutions and linear layers together.
        shortcuts: also 1x1 convolutions on a path whose name matches one of `SHORTCUTS`.
        depthwise: also convolutions in which every input channel is its own group.
        also: subclasses of torch's layers that compute the same as torch's; other subclasses stay. For attention, other
            classes that call `scaled_dot_product_attention`.
    """

    include: Patterns = None
    exclude: Patterns = None
    where: Callable[[str, nn.Module], bool] | None = None
    linear: bool = False
    first: bool = True
    last: bool = True
    shortcuts: bool = True
    depthwise: bool = True
    also: Sequence[type[nn.Module]] = ()

    def __post_init__(self) -> None:
        for option in ("include", "exclude"):
            given = getattr(self, option)
            listed = isinstance(given, Sequence) and all(isinstance(pattern, str) for pattern in given)
            if given is not None and not listed:
                raise TypeError(f"{option} must be a pattern such as 'layer3.*', or a list of them, not {given!r}")
        if self.where is not None and not callable(self.where):
            raise TypeError(f"where must be a function of name and layer, not {self.where!r}")
        if not isinstance(self.also, Sequence) or not all(isinstance(kind, type) for kind in self.also):
            raise TypeError(f"also must be a list of classes, such as [MyConv2d], not {self.also!r}")

    def reason_to_skip(self, names: Sequence[str], layer: nn.Module) -> str:
        """Why a convertible layer is not selected, or ""; `names` are all its names."""
        if not self.linear and isinstance(layer, nn.Linear):
            return "linear layers stay unless linear=True"
        if self.include is not None and not _matches(names, self.include):
            return "not in include"
        if _matches(names, self.exclude):
            return "in exclude"
        if not self.shortcuts and any(is_shortcut(name, layer) for name in names):
            return "shortcut"
        if not self.depthwise and is_depthwise(layer):
            return "depthwise"
        return "" if self.where is None or self.where(names[0], layer) else "not in where"

    def check_patterns(self, names: Sequence[str]) -> None:
        """Raises ValueError for a pattern that matches no layer."""
        for pattern in (*_as_list(self.include), *_as_list(self.exclude)):
            if not any(fnmatchcase(name, pattern) for name in names):
                known = f"names such as {', '.join(map(repr, names[:3]))}" if names else "no layers to choose from"
                below = f"{pattern}.*"
                hint = f"; did you mean {below!r}?" if any(fnmatchcase(name, below) for name in names) else ""
                raise ValueError(f"pattern {pattern!r} matches no layer; the network has {known}{hint}")


Target = Operator | str | None


def plan(
    model: nn.Module, operator: Target = None, choice: Choice | None = None, attention: Target = None
) -> Conversion:
    """The conversion that `decouple` would do, without doing it."""
    choice, target, scores = choice or Choice(), parse_target(operator), parse_target(attention)
    if isinstance(scores, Operator):
        check_operator(scores)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, _ConvNd | nn.Linear)}
    names, attentions = _all_names(model), _attention_modules(model, scores, choice)
    known = layers if target is not None else {}
    choice.check_patterns([name for layer in (known | attentions).values() for name in names[layer]])
    ends = _excluded_ends(list(layers), choice)
    bypassed = {id(child) for module in model.modules() if isinstance(module, BYPASSING) for child in module.children()}
    rows = []
    for name, layer in model.named_modules():
        if name in attentions and scores is not None:
            rows.append(_attention_row(name, names[layer], layer, scores, choice))
        elif target is not None and name in layers:
            reason = _obstacle(layer, choice.also, id(layer) in bypassed) or ends.get(name, "")
            reason = reason or choice.reason_to_skip(names[layer], layer) or _already_converted(layer, target)
            after = None if reason else describe(layer, target)
            rows.append(Row(name, _format_shape(_shape(layer)), describe(layer), after, reason))
        elif target is not None:
            rows.extend(_rows_without_equivalent(name, layer))
    return Conversion(tuple(rows))


def parse_target(operator: Target) -> Target:
    """The operator of a spec; None and "conv" stay."""
    return operator if operator is None or is_plain(operator) else as_operator(operator)


def _rows_without_equivalent(name: str, layer: nn.Module) -> list[Row]:
    reason = next((NO_EQUIVALENT[kind] for kind in NO_EQUIVALENT if isinstance(layer, kind)), "")
    shape = next((tuple(weight.shape) for weight in layer.parameters(recurse=False)), ())
    return [Row(name, _format_shape(shape), type(layer).__name__, None, reason)] if reason else []


def _attention_modules(model: nn.Module, scores: Target, choice: Choice) -> dict[str, nn.Module]:
    """The attention modules in the report: all, only converted ones if `scores` is plain, or none if it is None."""
    found = {name: module for name, module in model.named_modules() if is_attention(module, choice.also)}
    if scores is None:
        return {}
    return {name: module for name, module in found.items() if isinstance(module, Scored) or not is_plain(scores)}


def _attention_row(name: str, names: Sequence[str], module: nn.Module, scores: Operator | str, choice: Choice) -> Row:
    reason = attention_obstacle(module, choice.also) or lacks_heads(module, scores)
    reason = reason or choice.reason_to_skip(names, module)
    if isinstance(module, Scored) and not reason:
        reason = ALREADY if module.scores.operator == scores else ""
    heads = head_count(module)
    shape = "" if heads is None else f"heads: {heads}"
    after = None if reason else describe_attention(module, scores)
    return Row(name, shape, describe_attention(module), after, reason, is_attention=True)


def plain_class(layer: nn.Module) -> type[nn.Module]:
    """torch's own class of a layer."""
    return next(plain for plain in TWINS if isinstance(layer, plain))


def is_unmodified(layer: Decoupled) -> bool:
    """Whether a decoupled layer computes what its class in dcnet does: no subclass overrides a method."""
    methods = [twin.decoupled for twin in TWINS.values()]
    return type(layer).forward is Decoupled.forward and type(layer).decoupled in methods


def is_shortcut(name: str, layer: nn.Module) -> bool:
    """Whether a layer is a 1x1 convolution on a path named like a shortcut."""
    if not isinstance(layer, _ConvNd) or any(size != 1 for size in layer.kernel_size):
        return False
    return any(fnmatchcase(part.lower(), pattern) for part in name.split(".") for pattern in SHORTCUTS)


def is_depthwise(layer: nn.Module) -> bool:
    """Whether every input channel of a convolution is its own group."""
    return isinstance(layer, _ConvNd) and layer.groups == layer.in_channels > 1


def describe(layer: nn.Module, operator: Operator | str | None = None) -> str:
    """The class of a layer, with its operator if it is decoupled; or what it would be with the given operator."""
    if operator is None:
        operator = layer.operator if isinstance(layer, Decoupled) else ""
        return f"{type(layer).__name__} {operator}".strip()
    plain = plain_class(layer)
    return plain.__name__ if is_plain(operator) else f"{TWINS[plain].__name__} {operator}"


def _obstacle(layer: nn.Module, also: Sequence[type[nn.Module]], bypassed: bool) -> str:
    """Why a layer cannot be converted, or ""."""
    if bypassed:
        return "nn.MultiheadAttention uses its weight without calling it"
    if isinstance(layer, _ConvTransposeNd):
        return "a transposed convolution has no patches to compare filters with"
    if isinstance(layer, LazyModuleMixin):
        return "lazy: run a batch through the network first"
    if is_parametrized(layer):
        return "parametrized: its weight is computed, not stored"
    if not (is_unmodified(layer) if isinstance(layer, Decoupled) else type(layer) in (*TWINS, *also)):
        return f"{type(layer).__name__} may compute something else; name it in `also` if it does not"
    if layer._parameters.get("weight") is None:
        return "its weight is computed by a hook, not stored"
    if "forward" in vars(layer):
        return "its forward was replaced"
    return ""


def _already_converted(layer: nn.Module, operator: Operator | str) -> str:
    if isinstance(layer, Decoupled):
        return ALREADY if layer.operator == operator else ""
    return ALREADY if is_plain(operator) else ""


def _excluded_ends(names: Sequence[str], choice: Choice) -> dict[str, str]:
    ends = {} if choice.last else dict.fromkeys(names[-1:], "last layer")
    return ends if choice.first else {**ends, **dict.fromkeys(names[:1], "first layer")}


def _shape(layer: nn.Module) -> Sequence[int]:
    # Not from the weight: a lazy layer has none yet, and a parametrized one would compute it.
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    assert isinstance(layer, _ConvNd)
    channels = (layer.in_channels, layer.out_channels) if layer.transposed else (layer.out_channels, layer.in_channels)
    return channels[0], channels[1] // layer.groups, *layer.kernel_size


def _format_shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _all_names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Every module with its names; a shared module has several."""
    found: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(module, []).append(name)
    return found


def _matches(names: Sequence[str], patterns: Patterns) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in _as_list(patterns))


def _as_list(patterns: Patterns) -> Sequence[str]:
    return [patterns] if isinstance(patterns, str) else patterns or []
