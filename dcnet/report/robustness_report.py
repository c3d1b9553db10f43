"""Tables, plots and the Markdown page of a robustness report."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dcnet.report.drawing import legend_below, literal
from dcnet.robustness.task import format_epsilon
from dcnet.table import Cells, Table

Card = Mapping[str, Any]
RESULTS = {True: "passed", False: "FAILED", None: "not made"}
NOTHING = "-"


def attacks(card: Card) -> Table:
    """The accuracy under each attack."""
    cells: Cells = {"attack": "attack", "how": "how", "accuracy, %": lambda row: percent(row["accuracy"])}
    title = f"attacks within {format_epsilon(card['settings']['epsilon'])} of each pixel"
    return Table.of_records(attack_rows(card["results"]), cells, title=title, right=("accuracy, %",), wraps=("how",))


def attack_rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row per attack; the accuracy of a skipped attack is None."""
    return [
        {"attack": "none", "how": "clean images", "accuracy": results["clean"]["accuracy"]},
        _row("FGSM", "one step", results["fgsm"]),
        _row("BIM", "{steps} steps from the image", results["bim"]),
        _row("PGD", "{steps} steps, random starts: {restarts}", results["pgd"]),
        _row("PGD, smoothed", "{steps} steps, gradient of a smoothed network", results["smoothed_pgd"]),
        _row("Square", "{queries:,} queries, no gradient", results["square"]),
        *_transferred(results["transfer"]),
        _row("AutoAttack", "four attacks in sequence", results["autoattack"]),
    ]


def _row(name: str, how: str, found: Mapping[str, Any]) -> dict[str, Any]:
    return {"attack": name, "how": found.get("skipped") or how.format(**found), "accuracy": found.get("accuracy")}


def _transferred(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "skipped" in found:
        return [_row("transfer", "", found)]
    how = f"transferred from {found.get('source', {}).get('run', 'another network')}"
    left = found["accuracies"].items()
    return [{"attack": f"{name.upper()}, transferred", "how": how, "accuracy": share} for name, share in left]


def checks(card: Card) -> Table:
    """The checks for masked gradients."""
    cells: Cells = {"check": "claim", "found": "words", "result": lambda row: RESULTS[row["passed"]]}
    return Table.of_records(card["checks"], cells, title="checks for masked gradients", wraps=("check", "found"))


def by_epsilon(card: Card) -> Table:
    """The accuracy at each epsilon."""
    curve = card["results"]["by_epsilon"]
    points = zip(curve["epsilons"], curve["accuracies"], strict=True)
    rows = [[format_epsilon(epsilon), percent(accuracy)] for epsilon, accuracy in points]
    title = f"accuracy by epsilon, under PGD with {curve['steps']} steps"
    return Table.of_rows(["epsilon", "accuracy, %"], rows, names=0, title=title)


def corruptions(card: Card) -> Table:
    """The accuracy by corruption and severity."""
    found = card["results"]["corrupted"]["accuracies"]
    rows = [[kind, *map(percent, accuracies)] for kind, accuracies in found.items()]
    headings = ["corruption", *(f"severity {i}" for i in range(1, len(rows[0])))]
    return Table.of_rows(headings, rows, title="accuracy under corruptions, %")


def page(card: Card, pictures: Sequence[str], command: str) -> str:
    """The report in Markdown; `pictures` are the paths of the plots of accuracy and loss, relative to it."""
    settings = card["settings"]
    curve, loss = pictures
    about = f"{card['network']}; {settings['images']:,} test images of {card['dataset']}, on {card['device']}"
    parts = [
        f"# Robustness of {card['run']}",
        f"{about}. Made by `{command}`.",
        "## Verdict",
        "\n".join(f"- {sentence}" for sentence in card["verdict"]["words"]),
        f"## Attacks within {format_epsilon(settings['epsilon'])} of each pixel",
        attacks(card).markdown(),
        "## Checks for masked gradients",
        checks(card).markdown(),
        f"![Mean loss by how far images are moved along the gradient and in a random direction]({loss})",
        f"## {by_epsilon(card).title.capitalize().replace('pgd', 'PGD')}",
        by_epsilon(card).markdown(),
        f"![Accuracy by epsilon]({curve})",
        "## Corruptions, accuracy in %",
        corruptions(card).markdown(),
    ]
    return "\n\n".join(parts) + "\n"


def percent(share: float | None) -> str:
    """A share as percent, without the sign."""
    return NOTHING if share is None else f"{100 * share:.2f}"


CURVE, CLEAN, BUDGET = "tab:blue", "0.45", "tab:red"
MARKERS = "os^DvP*X<>"
WIDTH = 90


def accuracy_plot(card: Card) -> Figure:
    """Draws the accuracy under PGD by epsilon, and under the other attacks at the epsilon of the report."""
    figure, axes = _drawing()
    curve, epsilon = card["results"]["by_epsilon"], 255 * card["settings"]["epsilon"]
    points = [(255 * at, 100 * left) for at, left in zip(curve["epsilons"], curve["accuracies"], strict=True) if at]
    if points:
        # Empty if the clean accuracy is 0.
        axes.plot(*zip(*points, strict=True), ".-", color=CURVE, label=f"PGD, {curve['steps']} steps", zorder=2)
    clean = 100 * card["results"]["clean"]["accuracy"]
    axes.axhline(clean, color=CLEAN, linestyle="--", label=f"no attack, {clean:.1f} %")
    axes.axvline(
        epsilon,
        color=BUDGET,
        linestyle=":",
        label=f"epsilon of the other attacks, {format_epsilon(card['settings']['epsilon'])}",
    )
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
        # Hollow markers, as attacks may coincide.
        style: dict[str, Any] = {
            "marker": MARKERS[at % len(MARKERS)],
            "color": f"C{at + 1}",
            "fillstyle": "none",
            "markersize": 9,
        }
        axes.plot([epsilon], [left], linestyle="", label=f"{row['attack']}, {left:.1f} %", zorder=3, **style)


def loss_plot(card: Card) -> Figure:
    """Draws the mean loss along the sign of the gradient and along random signs."""
    figure, axes = _drawing()
    found = card["results"]["surface"]
    amounts = [255 * at for at in found["amounts"]]
    axes.plot(amounts, _numbers(found["gradient"]), ".-", color=BUDGET, label="along the sign of the gradient")
    axes.plot(amounts, _numbers(found["random"]), ".-", color=CURVE, label="along random signs")
    edge, name = 255 * found["epsilon"], f"epsilon, {format_epsilon(found['epsilon'])}"
    axes.axvline(-edge, color=CLEAN, linestyle=":")
    axes.axvline(edge, color=CLEAN, linestyle=":", label=name)
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
    # Below the axes, as a curve may be in any corner.
    legend_below(figure, 3)
    return figure


def _title(card: Card, what: str) -> str:
    return f"{what}\n" + literal(textwrap.fill(card["network"], WIDTH))


def _numbers(values: list[float | None]) -> list[float]:
    """NaN, a gap in the line, for None."""
    return [float("nan") if value is None else value for value in values]
