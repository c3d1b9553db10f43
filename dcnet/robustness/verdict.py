"""The verdict of a report card: checks for masked gradients, and the results as sentences."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcnet.robustness.subject import STANDARD, Effort
from dcnet.robustness.task import format_epsilon

# Accuracies that differ by less, or by one image, count as equal.
TOLERANCE = 0.01
# The largest share of images without a gradient.
MOST_ZEROS = 0.01
Results = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Check:
    """A condition that holds unless gradients are masked.

    Args:
        name: a short name.
        claim: the condition.
        passed: whether it holds; None if it could not be checked.
        words: the measurements as a text.
    """

    name: str
    claim: str
    passed: bool | None
    words: str


# Takes results and returns `passed` and `words`; None if the check does not apply to the network.
Examine = Callable[[Results], tuple[bool | None, str] | None]
_checks: dict[str, tuple[str, Examine]] = {}


def check(name: str, claim: str) -> Callable[[Examine], Examine]:
    """A decorator that adds a check."""

    def add(examine: Examine) -> Examine:
        _checks[name] = (claim, examine)
        return examine

    return add


def run_checks(results: Results) -> list[Check]:
    """All checks that apply to the results of a complete report card."""
    found = [(name, claim, examine(results)) for name, (claim, examine) in _checks.items()]
    return [Check(name, claim, *answer) for name, claim, answer in found if answer is not None]


@check("iterative", "many steps mislead at least as many images as one")
def _iterative(results: Results) -> tuple[bool | None, str]:
    single = results["fgsm"]["accuracy"]
    many = {"BIM": results["bim"]["accuracy"], "PGD": results["pgd"]["accuracy"]}
    words = ", ".join(f"{name} leaves {percent(left)}" for name, left in {"FGSM": single, **many}.items())
    return all(left <= single + tolerance(results) for left in many.values()), words


@check("white box", "attacks with gradients are at least as strong as attacks without")
def _white_box(results: Results) -> tuple[bool | None, str]:
    black = black_box(results)
    if not black:
        return None, "neither Square nor a transfer was run"
    white = min(results[name]["accuracy"] for name in ("bim", "pgd"))
    name, least = min(black.items(), key=lambda item: item[1])
    words = f"the strongest with gradients leaves {percent(white)}, {name} {percent(least)}"
    return white <= least + tolerance(results), words


@check("unbounded", "an attack without a limit misleads all images")
def _unbounded(results: Results) -> tuple[bool | None, str]:
    found = results["by_epsilon"]
    last, left = found["epsilons"][-1], found["accuracies"][-1]
    return left == 0, f"PGD leaves {percent(left)} at epsilon {format_epsilon(last)}"


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


@check("zero gradients", "almost no image has a zero gradient")
def _zeros(results: Results) -> tuple[bool | None, str]:
    share = results["gradients"]["zero"]
    return share <= MOST_ZEROS, f"{percent(share)} of the images have a zero gradient"


@check("smoothed", "the smoothed gradient, which does not saturate, misleads no more images than the gradient")
def _smoothed(results: Results) -> tuple[bool | None, str] | None:
    if "skipped" in results["smoothed_pgd"]:
        return None
    own, other = results["pgd"]["accuracy"], results["smoothed_pgd"]["accuracy"]
    words = f"PGD leaves {percent(own)}, with the smoothed gradient {percent(other)}"
    return own <= other + tolerance(results), words


def black_box(results: Results) -> dict[str, float]:
    """The accuracy under each black-box attack."""
    found = {}
    if "accuracy" in results["square"]:
        found["Square"] = results["square"]["accuracy"]
    for name, left in results["transfer"].get("accuracies", {}).items():
        found[f"{name.upper()} from the source"] = left
    return found


def tolerance(results: Results) -> float:
    """The largest difference of accuracies that counts as equal, with a margin for rounding."""
    return max(TOLERANCE, 1 / results["clean"]["images"]) + 1e-9


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


# The share of the clean accuracy that must remain under an attack for a network to be robust to it.
ROBUST = 0.5
# The share that must remain under all attacks for a network to be robust, not only partly robust.
FULLY_ROBUST = 0.9
# An accuracy below this multiple of guessing leaves nothing to attack.
GUESSING = 1.5
# An epsilon of the curve may exceed that of the card by this share, because of rounding.
ROUNDING = 1e-9
GROWING = "PGD at growing epsilons"
WHITE_BOX = {
    "fgsm": "FGSM",
    "bim": "BIM",
    "pgd": "PGD",
    "smoothed_pgd": "PGD with the smoothed gradient",
    "autoattack": "AutoAttack",
}


def verdict(results: Results, checks: Sequence[Check], epsilon: float, effort: Effort = STANDARD) -> dict[str, Any]:
    """The conclusions of a report card as plain values; "words" has them as sentences.

    "robust_to" lists the attacks within epsilon under which at least half of the clean accuracy remains. The curve, PGD
    at growing epsilons, counts as another attack if it is below PGD. "strongest" is the attack with the lowest
    accuracy. "robust_up_to" is the largest epsilon of the curve at which half of the clean accuracy remains, and
    "broken_from" the first with an accuracy of 0, or None. "trusted" is False if a check failed, and None if one could
    not be run or attacks were weaker than the standard.
    """
    clean, left, points = results["clean"]["accuracy"], accuracies(results, epsilon), _points(results)
    strongest = min(left, key=lambda name: left[name])
    held = [name for name, share in left.items() if share >= ROBUST * clean]
    failed = [check.name for check in checks if check.passed is False]
    missing = [check.name for check in checks if check.passed is None]
    complete = not missing and effort == STANDARD and "skipped" not in results["autoattack"]
    found = {
        "epsilon": epsilon,
        "clean": clean,
        "strongest": strongest,
        "accuracy": left[strongest],
        "robust_to": held,
        "not_robust_to": [name for name in left if name not in held],
        "robust_up_to": max((at for at, accuracy in points if accuracy >= ROBUST * clean), default=0.0),
        "broken_from": next((at for at, accuracy in points if accuracy == 0), None),
        "worst_corruption": _worst_corruption(results),
        "trusted": False if failed else True if complete else None,
        "failed_checks": failed,
        "missing_checks": missing,
        "better_than_guessing": clean > GUESSING / results["clean"]["classes"],
        "standard": effort == STANDARD,
    }
    return found | {"words": _sentences(found, results, len(checks))}


def accuracies(results: Results, epsilon: float) -> dict[str, float]:
    """The accuracy under each attack within epsilon, by its name."""
    found = {WHITE_BOX[name]: results[name]["accuracy"] for name in WHITE_BOX if "accuracy" in results[name]}
    within = [left for at, left in _points(results) if 0 < at <= epsilon * (1 + ROUNDING)]
    # The curve counts if it is below PGD.
    if within and min(within) < results["pgd"]["accuracy"]:
        found[GROWING] = min(within)
    return found | black_box(results)


def _points(results: Results) -> list[tuple[float, float]]:
    curve = results["by_epsilon"]
    return list(zip(curve["epsilons"], curve["accuracies"], strict=True))


def _worst_corruption(results: Results) -> dict[str, Any]:
    """The corruption with the lowest accuracy at its highest severity."""
    last = {kind: left[-1] for kind, left in results["corrupted"]["accuracies"].items()}
    kind = min(last, key=lambda name: last[name])
    return {"kind": kind, "severity": len(results["corrupted"]["accuracies"][kind]), "accuracy": last[kind]}


def _sentences(found: dict[str, Any], results: Results, checks: int) -> list[str]:
    clean = f"{percent(found['clean'])} on {results['clean']['images']:,} clean images"
    if not found["better_than_guessing"]:
        return [f"Nothing to attack: accuracy {clean}, hardly better than guessing."]
    worst, certified = found["worst_corruption"], results["certified"]
    return [
        f"{_headline(found)} within {format_epsilon(found['epsilon'])} of each pixel: accuracy {clean}, "
        f"{percent(found['accuracy'])} under {found['strongest']}.",
        _robust(found),
        _reach_sentence(found, results),
        f"Worst corruption: {worst['kind']}, {percent(worst['accuracy'])} accuracy at severity {worst['severity']}.",
        f"No certificate: {certified['skipped']}." if "skipped" in certified else f"Certificate: {certified['words']}",
        _trust(found, results, checks),
    ]


def _headline(found: dict[str, Any]) -> str:
    if found["not_robust_to"]:
        return "Not robust"
    kind = "robust" if found["accuracy"] >= FULLY_ROBUST * found["clean"] else "partly robust"
    return kind.capitalize() if found["trusted"] else f"Apparently {kind}"


def _robust(found: dict[str, Any]) -> str:
    held, lost = listed(found["robust_to"]), listed(found["not_robust_to"])
    if not lost:
        return f"Every attack leaves at least half of the clean accuracy: {held}."
    if not held:
        return f"No attack leaves half of the clean accuracy: {lost}."
    return f"At least half of the clean accuracy remains under {held}, but not under {lost}."


def _reach_sentence(found: dict[str, Any], results: Results) -> str:
    reach, end = found["robust_up_to"], found["broken_from"]
    first = results["by_epsilon"]["epsilons"][1]
    held = (
        f"PGD leaves at least half of the clean accuracy up to epsilon {format_epsilon(reach)}"
        if reach > 0
        else f"PGD leaves less than half of the clean accuracy at epsilon {format_epsilon(first)}, the smallest tried"
    )
    rest = f"0 % from epsilon {format_epsilon(end)}" if end is not None else "more than 0 % even at epsilon 1"
    return f"{held}, and {rest}."


def _trust(found: dict[str, Any], results: Results, checks: int) -> str:
    if failed := found["failed_checks"]:
        many = f"{len(failed)} of {checks} checks for masked gradients failed ({', '.join(failed)})"
        return f"Do not trust these numbers: {many}, so a better attack would probably be stronger."
    if found["trusted"]:
        return f"No sign of masked gradients: all {checks} checks passed."
    limits = []
    if not found["standard"]:
        limits.append("the attacks were weaker than the standard, for a first look and not for a report")
    elif "skipped" in results["autoattack"]:
        limits.append(f"AutoAttack {results['autoattack']['skipped']}")
    if found["missing_checks"]:
        limits.append(f"these checks could not be run: {', '.join(found['missing_checks'])}")
    return f"Trust these numbers with care: no check for masked gradients failed, but {' and '.join(limits)}."


def listed(names: Sequence[str]) -> str:
    """Names in a sentence: a, b and c."""
    return " and ".join([", ".join(names[:-1]), *names[-1:]] if len(names) > 1 else names)
