"""A report card as pictures: accuracy by epsilon, and the loss along the gradient and in a random direction."""

import textwrap
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dcnet.escapes import literal
from dcnet.report.robustness import attack_rows
from dcnet.robustness.checks import words_for

Card = Mapping[str, Any]
CURVE, CLEAN, BUDGET = "tab:blue", "0.45", "tab:red"
MARKERS = "os^DvP*X<>"
WIDTH = 90


def accuracy_plot(card: Card) -> Figure:
    """Draws the accuracy that PGD leaves by epsilon, and what the other attacks leave at that of the card."""
    figure, axes = _drawing()
    curve, epsilon = card["results"]["by_epsilon"], 255 * card["settings"]["epsilon"]
    points = [(255 * at, 100 * left) for at, left in zip(curve["epsilons"], curve["accuracies"], strict=True) if at]
    if points:
        # None of a network that is right about nothing, where the curve ends before the first epsilon.
        axes.plot(*zip(*points, strict=True), ".-", color=CURVE, label=f"PGD, {curve['steps']} steps", zorder=2)
    clean = 100 * card["results"]["clean"]["accuracy"]
    axes.axhline(clean, color=CLEAN, linestyle="--", label=f"no attack, {clean:.1f} %")
    axes.axvline(epsilon, color=BUDGET, linestyle=":", label=f"epsilon of the other attacks, {_steps(epsilon)}")
    _draw_attacks(axes, card, epsilon)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(ylim=(-2, 102), title=_title(card, "Accuracy under attack"))
    axes.set(xlabel="epsilon: largest change of a pixel, in steps of 255 (log scale)")
    axes.set(ylabel=f"accuracy, % of {card['settings']['images']:,} images")
    return _finished(figure, axes)


def _draw_attacks(axes: Axes, card: Card, epsilon: float) -> None:
    rows = [row for row in attack_rows(card["results"])[1:] if row["accuracy"] is not None]
    for at, row in enumerate(rows):
        left = 100 * row["accuracy"]
        # Hollow, since several attacks may leave the same.
        style: dict[str, Any] = {
            "marker": MARKERS[at % len(MARKERS)],
            "color": f"C{at + 1}",
            "fillstyle": "none",
            "markersize": 9,
        }
        axes.plot([epsilon], [left], linestyle="", label=f"{row['attack']}, {left:.1f} %", zorder=3, **style)


def loss_plot(card: Card) -> Figure:
    """Draws the mean loss by how far images are moved, along the sign of the gradient and along random signs."""
    figure, axes = _drawing()
    found = card["results"]["surface"]
    amounts = [255 * at for at in found["amounts"]]
    axes.plot(amounts, _numbers(found["gradient"]), ".-", color=BUDGET, label="along the sign of the gradient")
    axes.plot(amounts, _numbers(found["random"]), ".-", color=CURVE, label="along random signs")
    edge = 255 * found["epsilon"]
    for side in (-edge, edge):
        name = f"epsilon, {_steps(edge)}" if side > 0 else None
        axes.axvline(side, color=CLEAN, linestyle=":", label=name)
    axes.set(title=_title(card, "Loss around the images"))
    axes.set(xlabel="change of each pixel, in steps of 255")
    axes.set(ylabel=f"cross entropy, mean of {found['images']:,} images, nats")
    return _finished(figure, axes)


def _drawing() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8.6, 6.2), layout="constrained")
    return figure, figure.subplots()


def _finished(figure: Figure, axes: Axes) -> Figure:
    axes.set_axisbelow(True)
    axes.grid(color="0.92")
    # Below, since a curve may lie in any corner.
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def _title(card: Card, what: str) -> str:
    return f"{what}\n" + literal(textwrap.fill(card["network"], WIDTH))


def _steps(amount: float) -> str:
    return words_for(amount / 255)


def _numbers(values: list[float | None]) -> list[float]:
    """A gap where there is no number."""
    return [float("nan") if value is None else value for value in values]
