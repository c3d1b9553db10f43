"""A report card in plain words: robust to what, up to which epsilon, and whether the number is to be trusted."""

from collections.abc import Mapping, Sequence
from typing import Any

from dcnet.robustness.checks import Check, Results, black_box, percent, words_for
from dcnet.robustness.subject import STANDARD, Effort

# The share of the clean accuracy that must be left for a network to be called robust to an attack.
LEFT = 0.5
# And the share that must be left by all of them for it to be called robust without reserve.
MOST = 0.9
# Below so many times the accuracy of guessing there is nothing to attack.
GUESSING = 1.5
# By which share an epsilon of the curve may be above that of the card by rounding alone.
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
    """What a report card comes to, as plain values, and in "words" as sentences.

    "robust_to" are the attacks within epsilon that leave at least half of the clean accuracy, the curve being one of
    them where it has come below PGD by then, and "strongest" the one that leaves least; "robust_up_to" is the largest
    epsilon of the curve at which that much is left, "broken_from" the first that leaves nothing, None if none does.
    "trusted" is False where a check has failed, and None where one could not be made, or where the attacks were fewer
    or weaker than the standard ones.
    """
    clean, left = results["clean"]["accuracy"], accuracies(results, epsilon)
    strongest = min(left, key=lambda name: left[name])
    held = [name for name, share in left.items() if share >= LEFT * clean]
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
        **_reach(results),
        "worst_corruption": _worst(results),
        "trusted": False if failed else True if complete else None,
        "failed_checks": failed,
        "missing_checks": missing,
        "better_than_guessing": clean > GUESSING / results["clean"]["classes"],
        "standard": effort == STANDARD,
    }
    return found | {"words": _words(found, results, len(checks))}


def accuracies(results: Results, epsilon: float) -> dict[str, float]:
    """What each attack within epsilon leaves, by its name."""
    known = {WHITE_BOX[name]: results[name].get("accuracy") for name in WHITE_BOX}
    found = {name: left for name, left in known.items() if left is not None}
    return found | _of_curve(results, epsilon) | black_box(results)


def _of_curve(results: Results, epsilon: float) -> dict[str, float]:
    """The least of the curve up to epsilon, within which the smaller ones lie; nothing where PGD leaves no more."""
    within = [left for at, left in _points(results) if 0 < at <= epsilon * (1 + ROUNDING)]
    least = min(within, default=results["pgd"]["accuracy"])
    return {GROWING: least} if least < results["pgd"]["accuracy"] else {}


def _points(results: Results) -> list[tuple[float, float]]:
    """Each epsilon of the curve with what is left there."""
    curve = results["by_epsilon"]
    return list(zip(curve["epsilons"], curve["accuracies"], strict=True))


def _reach(results: Results) -> dict[str, float | None]:
    points, clean = _points(results), results["clean"]["accuracy"]
    return {
        "robust_up_to": max((epsilon for epsilon, left in points if left >= LEFT * clean), default=0.0),
        "broken_from": next((epsilon for epsilon, left in points if left == 0), None),
    }


def _worst(results: Results) -> dict[str, Any]:
    """The corruption at its highest severity that leaves least."""
    last = {kind: left[-1] for kind, left in results["corrupted"]["accuracies"].items()}
    kind = min(last, key=lambda name: last[name])
    return {"kind": kind, "severity": len(results["corrupted"]["accuracies"][kind]), "accuracy": last[kind]}


def _words(found: dict[str, Any], results: Results, checks: int) -> list[str]:
    images = f"{percent(found['clean'])} of {results['clean']['images']:,} images"
    if not found["better_than_guessing"]:
        return [f"Nothing to attack: the network is right about {images}, hardly more than guessing."]
    return [
        f"{_headline(found)} within {words_for(found['epsilon'])} of each pixel: the network is right about {images} "
        f"without an attack, and about {percent(found['accuracy'])} under {found['strongest']}.",
        _robust(found),
        _reach_in_words(found, results),
        "Of what happens without an attacker, {kind} is worst, and leaves {left} at severity {severity}.".format(
            left=percent(found["worst_corruption"]["accuracy"]), **found["worst_corruption"]
        ),
        _certificate(results["certified"]),
        _trust(found, results, checks),
    ]


def _certificate(found: Mapping[str, Any]) -> str:
    if "skipped" in found:
        return f"What no attack can do is not known: {found['skipped']}."
    return f"By its weights alone: {found['words']}"


def _headline(found: dict[str, Any]) -> str:
    if found["not_robust_to"]:
        return "Not robust"
    kind = "robust" if found["accuracy"] >= MOST * found["clean"] else "partly robust"
    return kind.capitalize() if found["trusted"] else f"Apparently {kind}"


def _robust(found: dict[str, Any]) -> str:
    held, lost = listed(found["robust_to"]), listed(found["not_robust_to"])
    if not lost:
        return (
            f"Within that epsilon it is robust to all attacks, {held}: each leaves at least half of the clean accuracy."
        )
    if not held:
        return f"Within that epsilon it is robust to none of them: {lost} leave less than half of the clean accuracy."
    leaves = "leaves" if len(found["robust_to"]) == 1 else "leave"
    return (
        f"Within that epsilon it is robust to {held}, which {leaves} at least half of the clean accuracy, but not to "
        f"{lost}."
    )


def _reach_in_words(found: dict[str, Any], results: Results) -> str:
    reach, end = found["robust_up_to"], found["broken_from"]
    first = results["by_epsilon"]["epsilons"][1]
    held = (
        f"PGD leaves at least half of it up to epsilon {words_for(reach)}"
        if reach > 0
        else f"PGD leaves less than half of it from epsilon {words_for(first)} on, the smallest that was tried"
    )
    rest = f"and nothing from {words_for(end)} on" if end is not None else "and something even at epsilon 1"
    return f"{held}, {rest}."


def _trust(found: dict[str, Any], results: Results, checks: int) -> str:
    if found["failed_checks"]:
        failed = found["failed_checks"]
        many = f"{len(failed)} of {checks} checks for masked gradients failed ({', '.join(failed)})"
        return f"Do not trust these numbers: {many}, so that a better attack would probably leave less."
    if found["trusted"]:
        return f"These numbers can be trusted as far as attacks tell: all {checks} checks for masked gradients passed."
    limits = []
    if not found["standard"]:
        limits.append("the attacks were weaker than the standard ones, for a first look and not for a report")
    elif "skipped" in results["autoattack"]:
        limits.append(f"AutoAttack {results['autoattack']['skipped']}")
    if found["missing_checks"]:
        limits.append(f"these checks could not be made: {', '.join(found['missing_checks'])}")
    return f"Trust these numbers with care: no check for masked gradients failed, but {' and '.join(limits)}."


def listed(names: Sequence[str]) -> str:
    """Names as one says them: a, b and c."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1] if names else "") if part)
