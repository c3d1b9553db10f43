"""Checks and verdicts of made-up results."""

import copy
from typing import Any

import pytest

from dcnet.robustness.subject import QUICK, STANDARD
from dcnet.robustness.task import format_epsilon
from dcnet.robustness.verdict import _robust, listed, run_checks, verdict

SOUND: dict[str, Any] = {
    "clean": {"accuracy": 0.9, "images": 1000, "classes": 10},
    "gradients": {"images": 900, "zero": 0.0, "zero_pixels": 0.0},
    "surface": {
        "images": 200,
        "amounts": [-0.1, 0.0, 0.1],
        "epsilon": 0.1,
        "gradient": [0, 1, 3],
        "random": [1, 1, 1.1],
    },
    "fgsm": {"accuracy": 0.5},
    "bim": {"accuracy": 0.3},
    "pgd": {"accuracy": 0.28},
    "smoothed_pgd": {"accuracy": 0.31},
    "transfer": {"accuracies": {"fgsm": 0.7, "bim": 0.72, "pgd": 0.71}},
    "square": {"accuracy": 0.4},
    "by_epsilon": {"epsilons": [0.0, 4 / 255, 8 / 255, 16 / 255], "accuracies": [0.9, 0.5, 0.3, 0.0]},
    "corrupted": {"accuracies": {"noise": [0.8, 0.7], "blur": [0.9, 0.6]}},
    "certified": {"certified": 0.0, "vacuous": True, "words": "Nothing is certified."},
    "autoattack": {"accuracy": 0.25},
}


def changed(**parts: dict[str, Any]) -> dict[str, Any]:
    results = copy.deepcopy(SOUND)
    for name, part in parts.items():
        results[name] = part if "skipped" in part else results[name] | part
    return results


def failed(results: dict[str, Any]) -> list[str]:
    return [check.name for check in run_checks(results) if check.passed is False]


def said(results: dict[str, Any], effort: Any = STANDARD) -> dict[str, Any]:
    return verdict(results, run_checks(results), 8 / 255, effort)


def test_sound_results_pass_all_checks():
    assert failed(SOUND) == []
    assert [check.passed for check in run_checks(SOUND)] == [True] * 6


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ({"bim": {"accuracy": 0.52}}, "iterative"),
        ({"fgsm": {"accuracy": 0.26}}, "iterative"),
        ({"square": {"accuracy": 0.26}}, "white box"),
        ({"transfer": {"accuracies": {"bim": 0.2}}}, "white box"),
        ({"by_epsilon": {"accuracies": [0.9, 0.5, 0.3, 0.001]}}, "unbounded"),
        ({"surface": {"random": [1, 1, 3.1]}}, "loss"),
        ({"surface": {"gradient": [1, 1, 1], "random": [1, 1, 0.9]}}, "loss"),
        ({"surface": {"gradient": [0, 1, None]}}, "loss"),
        ({"gradients": {"zero": 0.02}}, "zero gradients"),
        ({"smoothed_pgd": {"accuracy": 0.2}}, "smoothed"),
    ],
)
def test_each_check_fails_alone(parts: dict[str, Any], name: str):
    assert failed(changed(**parts)) == [name]
    found = said(changed(**parts))
    assert found["trusted"] is False
    assert found["words"][-1].startswith(
        f"Do not trust these numbers: 1 of 6 checks for masked gradients failed ({name})"
    )


def test_checks_tolerate_one_percent_or_one_image():
    assert failed(changed(pgd={"accuracy": 0.31}, bim={"accuracy": 0.32}, smoothed_pgd={"accuracy": 0.3})) == []
    few = changed(pgd={"accuracy": 0.5}, bim={"accuracy": 0.5}, square={"accuracy": 0.4}, clean={"images": 10})
    assert failed(few) == ["smoothed"]


def test_verdict_lists_attacks_and_epsilons():
    found = said(SOUND)
    assert (found["strongest"], found["accuracy"], found["trusted"]) == ("AutoAttack", 0.25, True)
    assert found["robust_to"] == ["FGSM", *(f"{name} from the source" for name in ("FGSM", "BIM", "PGD"))]
    assert found["not_robust_to"] == ["BIM", "PGD", "PGD with the smoothed gradient", "AutoAttack", "Square"]
    assert (found["robust_up_to"], found["broken_from"]) == (4 / 255, 16 / 255)
    assert found["worst_corruption"] == {"kind": "blur", "severity": 2, "accuracy": 0.6}
    text = " ".join(found["words"])
    assert text.startswith(
        "Not robust within 8/255 of each pixel: accuracy 90.00 % on 1,000 clean images, 25.00 % under AutoAttack."
    )
    assert "PGD leaves at least half of the clean accuracy up to epsilon 4/255, and 0 % from epsilon 16/255." in text
    assert "Worst corruption: blur, 60.00 % accuracy at severity 2." in text
    assert "No sign of masked gradients: all 6 checks passed." in text


@pytest.mark.parametrize(("names", "held"), [(["FGSM"], "FGSM"), (["FGSM", "BIM"], "FGSM and BIM")])
def test_verdict_names_the_attacks_of_both_kinds(names: list[str], held: str):
    sentence = _robust({"robust_to": names, "not_robust_to": ["PGD"]})
    assert sentence == f"At least half of the clean accuracy remains under {held}, but not under PGD."


def test_headline_depends_on_accuracy_and_trust():
    strong = {name: {"accuracy": 0.6} for name in ("fgsm", "bim", "pgd", "smoothed_pgd", "square", "autoattack")}
    strong["by_epsilon"] = {"accuracies": [0.9, 0.8, 0.6, 0.0]}
    robust = changed(**strong)
    assert said(robust)["words"][0].startswith("Partly robust within 8/255")
    assert said(robust)["not_robust_to"] == []
    masked = changed(**strong, gradients={"zero": 0.9})
    assert said(masked)["words"][0].startswith("Apparently partly robust within 8/255")
    most = {name: {"accuracy": 0.85} for name in strong} | {"transfer": {"skipped": "no source"}}
    most["by_epsilon"] = {"accuracies": [0.9, 0.88, 0.85, 0.0]}
    assert said(changed(**most))["words"][0].startswith("Robust within 8/255")


ROBUST = {name: {"accuracy": 0.85} for name in ("fgsm", "bim", "pgd", "smoothed_pgd", "square", "autoattack")}


@pytest.mark.parametrize(
    ("curve", "epsilons", "headline"),
    [
        ([0.9, 0.86, 0.85, 0.0], [4, 8, 16], "Robust within 8/255"),
        ([0.9, 0.7, 0.6, 0.0], [4, 8, 16], "Partly robust within 8/255"),
        ([0.9, 0.4, 0.4, 0.0], [4, 8, 16], "Not robust within 8/255"),
        # Smaller epsilons count, and so does one that exceeds 8/255 by rounding.
        ([0.9, 0.4, 0.3, 0.0], [4, 12, 16], "Not robust within 8/255"),
        ([0.9, 0.88, 0.4, 0.0], [4, 8 * (1 + 1e-12), 16], "Not robust within 8/255"),
        ([0.9, 0.86, 0.4, 0.0], [4, 8.01, 16], "Robust within 8/255"),
    ],
)
def test_curve_within_epsilon_counts_as_an_attack(curve: list[float], epsilons: list[float], headline: str):
    at = {"epsilons": [0.0, *(steps / 255 for steps in epsilons)], "accuracies": curve}
    found = said(changed(**ROBUST, transfer={"skipped": "no source"}, by_epsilon=at))
    assert found["trusted"] is True
    assert found["words"][0].startswith(headline)
    assert ("PGD at growing epsilons" in found["not_robust_to"]) == headline.startswith("Not")
    if not headline.startswith("Robust"):
        least = min(left for steps, left in zip(epsilons, curve[1:], strict=True) if steps < 8.001)
        assert (found["strongest"], found["accuracy"]) == ("PGD at growing epsilons", least)
        assert f"{100 * least:.2f} % under PGD at growing epsilons." in found["words"][0]


def test_curve_without_points_within_epsilon_is_ignored():
    found = said(changed(by_epsilon={"epsilons": [0.0], "accuracies": [0.0]}, clean={"accuracy": 0.0}))
    assert found["strongest"] == "AutoAttack"


@pytest.mark.parametrize(
    ("parts", "effort", "words"),
    [
        ({}, QUICK, "the attacks were weaker than the standard"),
        ({"autoattack": {"skipped": "needs the package"}}, STANDARD, "AutoAttack needs the package"),
        (
            {"square": {"skipped": "no"}, "transfer": {"skipped": "no"}},
            STANDARD,
            "these checks could not be run: white box",
        ),
    ],
)
def test_missing_results_limit_the_trust(parts: dict[str, Any], effort: Any, words: str):
    found = said(changed(**parts), effort)
    assert found["trusted"] is None
    assert found["words"][-1].startswith("Trust these numbers with care: no check")
    assert words in found["words"][-1]


def test_curve_below_half_at_once_and_never_zero():
    curve = {"accuracies": [0.9, 0.2, 0.1, 0.05]}
    found = said(changed(by_epsilon=curve))
    assert (found["robust_up_to"], found["broken_from"]) == (0, None)
    assert found["words"][2] == (
        "PGD leaves less than half of the clean accuracy at epsilon 4/255, the smallest tried, and more than 0 % even "
        "at epsilon 1."
    )


def test_network_at_chance_level_is_not_judged():
    found = said(changed(clean={"accuracy": 0.12}))
    assert found["words"] == ["Nothing to attack: accuracy 12.00 % on 1,000 clean images, hardly better than guessing."]
    assert found["better_than_guessing"] is False


@pytest.mark.parametrize(("epsilon", "words"), [(8 / 255, "8/255"), (0.05, "12.8/255"), (0, "0"), (1.0, "1")])
def test_format_epsilon(epsilon: float, words: str):
    assert format_epsilon(epsilon) == words


def test_listed_joins_names_with_and():
    assert [listed(names) for names in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and b", "a, b and c"]


def test_verdict_includes_the_certificate():
    assert "Certificate: Nothing is certified." in said(SOUND)["words"]
    found = said(changed(certified={"skipped": "layer3 is a GELU"}))["words"]
    assert "No certificate: layer3 is a GELU." in found
