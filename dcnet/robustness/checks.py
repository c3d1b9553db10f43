"""Whether an attack may have failed for want of a gradient: checks of what a report card has measured.

They are those of Athalye, Carlini and Wagner (2018), and of Carlini et al. (2019): a network that hides its gradients
passes for robust until somebody finds another way to it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# What chance may account for, as a share of images; one image at least.
TOLERANCE = 0.01
MOST_ZEROS = 0.01
Results = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Check:
    """What has to hold if gradients are not masked.

    Args:
        name: in one word.
        claim: what has to hold.
        passed: whether it does; None where it could not be looked at.
        words: what was found.
    """

    name: str
    claim: str
    passed: bool | None
    words: str


# From results to what was found; None where the check does not apply to the network.
Examine = Callable[[Results], tuple[bool | None, str] | None]
_checks: dict[str, tuple[str, Examine]] = {}


def check(name: str, claim: str) -> Callable[[Examine], Examine]:
    """A decorator that enters a check under its name."""

    def enter(examine: Examine) -> Examine:
        _checks[name] = (claim, examine)
        return examine

    return enter


def examined(results: Results) -> list[Check]:
    """All checks that apply, of a whole report card."""
    found = [(name, claim, examine(results)) for name, (claim, examine) in _checks.items()]
    return [Check(name, claim, *answer) for name, claim, answer in found if answer is not None]


@check("iterative", "many steps break at least as many images as one")
def _iterative(results: Results) -> tuple[bool | None, str]:
    single = results["fgsm"]["accuracy"]
    many = {"BIM": results["bim"]["accuracy"], "PGD": results["pgd"]["accuracy"]}
    words = ", ".join(f"{name} leaves {percent(left)}" for name, left in {"FGSM": single, **many}.items())
    return all(left <= single + tolerance(results) for left in many.values()), words


@check("white box", "knowing the gradient helps at least as much as not knowing it")
def _white_box(results: Results) -> tuple[bool | None, str]:
    black = black_box(results)
    if not black:
        return None, "neither Square nor a transfer was possible"
    white = min(results[name]["accuracy"] for name in ("bim", "pgd"))
    name, least = min(black.items(), key=lambda item: item[1])
    words = f"the best with gradients leaves {percent(white)}, {name} without {percent(least)}"
    return white <= least + tolerance(results), words


@check("unbounded", "an attack that may do anything to an image breaks all of them")
def _unbounded(results: Results) -> tuple[bool | None, str]:
    found = results["by_epsilon"]
    last, left = found["epsilons"][-1], found["accuracies"][-1]
    return left == 0, f"PGD leaves {percent(left)} at epsilon {words_for(last)}"


@check("loss", "the loss rises more along the gradient than in a random direction")
def _loss(results: Results) -> tuple[bool | None, str]:
    found = results["surface"]
    at = {name: dict(zip(found["amounts"], found[name], strict=True)) for name in ("gradient", "random")}
    start, end = at["gradient"][0.0], found["epsilon"]
    ends = at["gradient"][end], at["random"][end]
    if start is None or None in ends:
        return False, "the loss is not finite"
    rises = [value - start for value in ends]
    words = f"within epsilon it rises by {rises[0]:.3g} along the gradient, by {rises[1]:.3g} in a random direction"
    return rises[0] > max(rises[1], 0), words


@check("zero gradients", "next to no image has a gradient that is zero")
def _zeros(results: Results) -> tuple[bool | None, str]:
    share = results["gradients"]["zero"]
    return share <= MOST_ZEROS, f"{percent(share)} of the images have none"


@check("smoothed", "a gradient that does not saturate breaks no more images than the network's own")
def _smoothed(results: Results) -> tuple[bool | None, str] | None:
    if "skipped" in results["smoothed_pgd"]:
        return None
    own, other = results["pgd"]["accuracy"], results["smoothed_pgd"]["accuracy"]
    words = f"PGD leaves {percent(own)}, and {percent(other)} with the smoothed gradient"
    return own <= other + tolerance(results), words


def black_box(results: Results) -> dict[str, float]:
    """What attacks leave that do not know the network, by their names."""
    found = {}
    if "accuracy" in results["square"]:
        found["Square"] = results["square"]["accuracy"]
    for name, left in results["transfer"].get("accuracies", {}).items():
        found[f"{name.upper()} from the source"] = left
    return found


def tolerance(results: Results) -> float:
    """By how much two accuracies may differ by chance; rounding is not to decide about one image."""
    return max(TOLERANCE, 1 / results["clean"]["images"]) + 1e-9


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def words_for(epsilon: float) -> str:
    """An epsilon as one writes it: 8/255 where it is a whole number of steps of 255, else in those steps."""
    steps = 255 * epsilon
    if epsilon in (0, 1):
        return f"{epsilon:g}"
    return f"{round(steps)}/255" if abs(steps - round(steps)) < 1e-6 else f"{steps:.3g}/255"
