"""Margins as curves: what is asked of the angle to one's own class, how annealing lets it in, and how hard it pulls."""

import math
from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from dcnet.losses import ASoftmax, Margin, as_margin, registry

DASHES = ("-", "--", ":", "-.")
EASINGS = (1000, 100, 20, 5, 0)


def margin_curves(specs: Sequence[str] = (), m: float = 4.0) -> Figure:
    """Draws psi of these margins, or of all, psi of A-softmax under annealing, and the slopes of psi."""
    margins = [as_margin(spec) for spec in specs or registry]
    figure = Figure(figsize=(15, 5.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    theta = torch.linspace(0, math.pi, 721, dtype=torch.float64)
    for i, margin in enumerate(margins):
        _draw(left, theta, margin.target(theta.cos()), _label(margin), i)
        _draw(right, theta, _pull(margin, theta), _label(margin), i)
    angular = ASoftmax(m=m)
    for i, easing in enumerate(EASINGS):
        cos = theta.cos()
        _draw(middle, theta, (easing * cos + angular.target(cos)) / (1 + easing), f"λ = {easing}", i)
    _finish(left, "The target's logit over s", "ψ(θ)")
    _finish(middle, f"{angular.name}, m = {m:g}, under annealing", "(λ cos θ + ψ(θ)) / (1 + λ)")
    _finish(right, "How hard it pulls", "-dψ/dθ")
    middle.legend()
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return figure


def _pull(margin: Margin, theta: Tensor) -> Tensor:
    """The slope as the gradient has it: a margin without a gradient of its own has that of the cosine."""
    theta = theta.clone().requires_grad_()
    (slope,) = torch.autograd.grad(margin.target(theta.cos()).sum(), theta)
    return -slope


def _label(margin: Margin) -> str:
    """The spec, which tells margins of one name apart; the m of a margin as it is by default besides."""
    spec, given = str(margin), getattr(margin, "m", None)
    return spec if given is None or spec != margin.name else f"{spec}, m = {given:g}"


def _draw(axes: Axes, theta: Tensor, values: Tensor, label: str, i: int) -> None:
    # Margins without a margin lie on each other: the dashes of one show the other.
    style = DASHES[i // 5 % len(DASHES)]
    axes.plot(theta.tolist(), values.detach().tolist(), label=label, color=f"C{i % 10}", linestyle=style, linewidth=2)


def _finish(axes: Axes, title: str, ylabel: str) -> None:
    axes.set(title=title, xlabel="angle between feature and the weights of its class, θ", ylabel=ylabel)
    axes.set_xticks([i * math.pi / 4 for i in range(5)], ["0", "π/4", "π/2", "3π/4", "π"])
    axes.grid(color="0.9")
