"""Decisions and calibrations: error rates, verdicts, and files."""

import dataclasses
import hashlib
import json
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcnet.verification import (
    Calibration,
    Decision,
    Pairs,
    ScoreHistogram,
    calibrate,
    calibrate_curve,
    fingerprint,
    fold_transfer,
    roc,
    roc_of_histogram,
    score_histogram,
    transfer,
)
from dcnet.verification.quality import QualityScore

scores = st.lists(st.one_of(st.sampled_from([-0.5, 0.0, 0.25, 0.5]), st.floats(-1, 1)), min_size=1, max_size=30)
rates = st.sampled_from([0.01, 0.1, 0.3, 0.5, 0.9])


def calibrated(genuine, impostor, **rates) -> Decision:
    return calibrate(*(torch.tensor(part, dtype=torch.float64) for part in (genuine, impostor)), **rates)


@given(scores, scores, rates, rates)
def test_calibrated_rates_hold_and_match_the_verdicts(genuine, impostor, far, frr):
    found = calibrated(genuine, impostor, far=far, frr=frr)
    said = {kind: [found.decide(score).same for score in part] for kind, part in (("g", genuine), ("i", impostor))}
    assert said["i"].count(True) / len(impostor) == found.far <= far
    assert said["g"].count(False) / len(genuine) == found.frr <= frr
    assert said["i"].count(None) / len(impostor) == pytest.approx(found.open_impostor)
    assert said["g"].count(None) / len(genuine) == pytest.approx(found.open_genuine)
    for verdict in map(found.decide, genuine + impostor):
        assert verdict.rate == {True: found.far, False: found.frr, None: None}[verdict.same]
    assert found.lower <= found.upper
    assert (found.genuine, found.impostor) == (len(genuine), len(impostor))


@given(scores, scores, rates, rates)
def test_range_between_thresholds_is_as_narrow_as_possible(genuine, impostor, far, frr):
    found = calibrated(genuine, impostor, far=far, frr=frr)
    if found.lower == found.upper:
        return
    inside = [score for score in genuine + impostor if found.lower <= score < found.upper]
    highest, lowest = max(inside), min(inside)
    assert sum(score >= highest for score in impostor) / len(impostor) > far
    above = [score for score in genuine + impostor if score > lowest] or [float("inf")]
    assert sum(score < min(above) for score in genuine) / len(genuine) > frr


def test_well_separated_scores_have_one_threshold_in_the_middle():
    found = calibrated([0.8, 0.9], [0.0, 0.2], far=0.4, frr=0.4)
    assert found.lower == found.upper == pytest.approx(0.5)
    found = calibrated([0.5, 0.7, 0.8, 0.9], [-0.2, 0.0, 0.2, 0.3], far=0.25, frr=0.25)
    # A threshold above 0.2 accepts one impostor pair of four, one up to 0.7 rejects one genuine pair of four.
    # The middle of this range is between 0.3 and 0.5.
    assert found.lower == found.upper == pytest.approx(0.4)
    assert (found.far, found.frr, found.open_genuine, found.open_impostor) == (0, 0, 0, 0)


def test_two_thresholds_are_between_scores():
    found = calibrated([0.1, 0.5, 0.6, 0.7], [0.0, 0.1, 0.2, 0.6], far=0.1, frr=0.1)
    assert (found.lower, found.upper) == (pytest.approx(0.05), pytest.approx(0.65))
    assert (found.far, found.frr) == (0, 0)
    assert (found.open_genuine, found.open_impostor) == (0.75, 0.75)


def test_rounding_moves_no_pair_across_a_threshold():
    genuine, impostor = [0.1, 0.5, 0.6, 0.7], [0.0, 0.1, 0.2, 0.6]
    found = calibrated(genuine, impostor, far=0.1, frr=0.1)
    for score in genuine + impostor:
        assert len({found.decide(score + moved).words for moved in (-1e-6, 0.0, 1e-6)}) == 1


on_a_grid = st.lists(st.integers(-4, 4).map(lambda score: score / 4), min_size=1, max_size=30)


@given(on_a_grid, on_a_grid, rates, rates)
def test_thresholds_are_not_scores(genuine, impostor, far, frr):
    """Other than the lowest score, from which on all pairs are accepted."""
    found = calibrated(genuine, impostor, far=far, frr=frr)
    lowest = min(genuine + impostor)
    assert not {found.lower, found.upper} & {*genuine, *impostor} - {lowest}


def test_one_threshold_is_beside_a_score_in_the_middle():
    found = calibrated([0.2, 0.4, 0.8], [-0.1, 0.0], far=0.4, frr=0.7)
    # The middle of the range from 0 to 0.8 is a score.
    assert found.lower == found.upper == pytest.approx(0.3)
    assert [found.decide(score).same for score in (0.4, 0.2)] == [True, False]
    assert (found.far, found.frr) == (0, pytest.approx(1 / 3))


def test_thresholds_at_the_ends_of_the_scores():
    found = calibrated([0.25, 0.5], [0.25, 0.75], far=0.1, frr=0.1)
    assert found.lower == 0.25
    assert 0.75 < found.upper < 0.7500001
    assert (found.far, found.frr) == (0, 0)


def test_rates_of_a_histogram_hold_for_its_scores():
    # In bins of 0.1, only the edge separates scores of adjacent bins.
    scores = {"genuine": [-0.46, 0.02, 0.15, 0.55], "impostor": [-0.52, 0.03, 0.08, 0.12]}
    counts = [torch.histc(torch.tensor(part), 20, -1, 1).long() for part in scores.values()]
    found = calibrate_curve(roc_of_histogram(ScoreHistogram(*counts)), far=0.3, frr=0.2)
    assert found.lower < found.upper
    said = [found.decide(score).same for score in scores["impostor"]]
    assert (said.count(True) / 4, said.count(None) / 4) == (found.far, found.open_impostor)
    said = [found.decide(score).same for score in scores["genuine"]]
    assert (said.count(False) / 4, said.count(None) / 4) == (found.frr, found.open_genuine)


@pytest.mark.parametrize("bins", [7, 10, 20_000])
def test_score_one_is_below_the_first_threshold_of_a_histogram(bins):
    """The cosine of an image with its copy is exactly 1, the upper end of the last bin."""
    embeddings, people = torch.eye(4).repeat(3, 1), torch.tensor([0, 1, 2, 3, 0, 5, 6, 7, 8, 9, 10, 11])
    curve = roc_of_histogram(score_histogram(embeddings, people, bins))
    assert curve.thresholds[0] > 1
    found = calibrate_curve(curve, far=0.1, frr=0.1)
    # 11 of 65 impostor pairs have a cosine of 1, so no pair is accepted.
    assert (found.far, found.decide(1.0).same) == (0, None)


def test_verdicts():
    found = calibrated([0.1, 0.5, 0.6, 0.7], [0.0, 0.1, 0.2, 0.6], far=0.25, frr=0.25)
    assert found.lower == found.upper == pytest.approx(0.35)
    strict = calibrated([0.1, 0.5, 0.6, 0.7], [0.0, 0.1, 0.2, 0.6], far=0.1, frr=0.1)
    same, close, different = strict.decide(0.7), strict.decide(0.6), strict.decide(0.04)
    assert (same.words, same.same, same.rate) == ("same", True, 0)
    assert (close.words, close.same, close.rate) == ("too close to call", None, None)
    assert (different.words, different.same, different.rate) == ("different", False, 0)
    assert str(close) == "too close to call (score 0.600)"
    assert str(found.decide(0.7)) == "same (score 0.700; wrong for 25 % of impostor pairs)"
    assert str(found.decide(0.2)) == "different (score 0.200; wrong for 25 % of genuine pairs)"
    for score in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="a score must be a finite number"):
            found.decide(score)


def test_notes_report_too_few_pairs():
    genuine, impostor = torch.linspace(0.5, 1, 300), torch.linspace(-1, 0.6, 3000)
    assert calibrate(genuine, impostor, far=1e-3, frr=1e-2).notes == ()
    notes = calibrate(genuine[:299], impostor[:2999], far=1e-3, frr=1e-2).notes
    assert len(notes) == 2
    assert notes[0] == (
        "2,999 impostor pairs are too few to support a rate of 0.001: without an error it may still be 0.001 "
        "(rule of three, 95 %); 3,000 are needed"
    )
    assert notes[1].startswith("299 genuine pairs are too few to support a rate of 0.01")


def test_notes_report_verdicts_that_never_occur():
    found = calibrated([0.0] * 300, [0.5] * 300, far=0.01, frr=0.01)
    assert "no genuine pair is accepted at a false accept rate of at most 0.01" in found.notes
    assert "no impostor pair is rejected at a false reject rate of at most 0.01" in found.notes
    assert found.decide(0.5).same is None
    assert (found.open_genuine, found.open_impostor) == (1, 1)


def test_decisions_can_be_saved_and_loaded(tmp_path):
    found = calibrated([0.1, 0.5, 0.6, 0.7], [0.0, 0.1, 0.2, 0.6], far=0.1, frr=0.1)
    assert Decision.from_json(json.loads(json.dumps(found.to_json()))) == found
    found.save(tmp_path / "run" / "decision.json")
    assert Decision.load(tmp_path / "run" / "decision.json") == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"more": 1}, "a decision has the keys lower, upper"),
        ({"lower": "0.5"}, "lower of a decision must be a finite number, not '0.5'"),
        ({"upper": float("nan")}, "upper of a decision must be a finite number, not nan"),
        ({"far": True}, "far of a decision must be a finite number, not True"),
        ({"lower": 0.9, "upper": 0.1}, "lower of a decision must not be above upper, not 0.9 and 0.1"),
        ({"wanted_far": 1e-309}, "wanted_far of a decision must be 1e-12 or more, not 1e-309"),
        ({"wanted_frr": 1.0}, "wanted_frr of a decision must be above 0 and below 1, not 1.0"),
        ({"notes": "none"}, "notes of a decision must be a list of sentences, not 'none'"),
        ({"notes": [1]}, "notes of a decision must be a list of sentences"),
    ],
)
def test_decision_rejects_invalid_values(change, message):
    values = calibrated([0.5], [0.1]).to_json()
    with pytest.raises(ValueError, match=message):
        Decision.from_json({**values, **change})


def test_decision_rejects_invalid_files(tmp_path):
    file = tmp_path / "decision.json"
    with pytest.raises(ValueError, match=r"is not a decision: No such file or directory$"):
        Decision.load(file)
    for content in ("{", "[]", "{}"):
        file.write_text(content)
        with pytest.raises(ValueError, match="is not a decision"):
            Decision.load(file)


def test_calibration_by_a_histogram_is_close_to_that_by_scores():
    labels = torch.arange(200) % 5
    embeddings = torch.eye(5)[labels] + 0.5 * torch.randn(200, 5)
    unit = embeddings / embeddings.norm(dim=1, keepdim=True)
    first, second = torch.triu_indices(200, 200, 1)
    all_scores, same = (unit[first] * unit[second]).sum(1), labels[first] == labels[second]
    exact = calibrate(all_scores[same], all_scores[~same], far=0.01, frr=0.05)
    found = calibrate_curve(roc_of_histogram(score_histogram(embeddings, labels)), far=0.01, frr=0.05)
    assert (found.lower, found.upper) == pytest.approx((exact.lower, exact.upper), abs=1e-3)
    assert found.far <= 0.01
    assert found.frr <= 0.05


@pytest.mark.parametrize(("name", "rate"), [("far", 0), ("frr", 1), ("far", 2)])
def test_calibrate_rejects_invalid_rates(name, rate):
    with pytest.raises(ValueError, match=f"{name} must be above 0 and below 1, not {rate}"):
        calibrated([0.5], [0.1], **{name: rate})


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_adjacent_floats_keep_the_wanted_rates(steps):
    """The middle of two adjacent floats is rounded to one of them."""
    impostor = 0.5
    for _ in range(steps):
        impostor = math.nextafter(impostor, 1.0)
    genuine = math.nextafter(impostor, 1.0)
    found = calibrate([genuine], [impostor], far=0.4, frr=0.4)
    assert (found.far, found.frr) == (0, 0)
    assert impostor < found.lower == found.upper <= genuine


def test_calibrate_takes_lists_in_float64():
    assert calibrate([0.7], [0.1]).upper == 0.4


@pytest.mark.parametrize("shape", [[], [3, 1]])
def test_calibrate_rejects_scores_of_other_shapes(shape):
    with pytest.raises(ValueError, match=re.escape(f"scores of genuine pairs must be [P], not {shape}")):
        calibrate(torch.ones(shape), torch.zeros(2))


def test_calibrate_requires_both_kinds_of_pairs():
    with pytest.raises(ValueError, match="there is no impostor pair"):
        calibrated([0.5], [])


def test_notes_on_the_smallest_rate():
    found = calibrated([0.5, 0.6], [0.1, 0.2], far=1e-12, frr=0.1)
    assert "; 3,000,000,000,000 are needed" in found.notes[0]


def made() -> Calibration:
    decision = calibrate(torch.tensor([0.5, 0.75]), torch.tensor([0.0, 0.25]), far=0.1, frr=0.1)
    return Calibration(decision, {"list": "pairs.csv", "pairs": 4}, "abc", flip=False)


def test_calibrations_can_be_saved_and_loaded(tmp_path):
    made().save(tmp_path / "new" / "verification.json")
    assert Calibration.load(tmp_path / "new" / "verification.json") == made()
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["verification.json"]


def test_failed_save_keeps_the_old_file(tmp_path):
    made().save(tmp_path / "kept.json")
    with pytest.raises(ValueError, match="JSON"):
        dataclasses.replace(made(), data={"pairs": float("nan")}).save(tmp_path / "kept.json")
    assert Calibration.load(tmp_path / "kept.json") == made()


@pytest.mark.parametrize("text", ["", "[]", '{"decision": {}}', '{"decision": 1, "data": 1, "weights": 1, "flip": 1}'])
def test_calibration_rejects_invalid_files(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match=r"other\.json' is not a calibration: "):
        Calibration.load(tmp_path / "other.json")
    with pytest.raises(ValueError, match=r"none\.json' is not a calibration: .*No such file"):
        Calibration.load(tmp_path / "none.json")


def test_fingerprint_is_the_sha256_of_the_file(tmp_path):
    (tmp_path / "weights").write_bytes(b"weights")
    assert fingerprint(tmp_path / "weights") == hashlib.sha256(b"weights").hexdigest()


def accepted_share(scores, threshold):
    return sum(score >= threshold for score in scores) / len(scores)


@given(scores, scores, st.floats(-1.5, 1.5), rates)
def test_transfer_applies_a_threshold_of_other_pairs(genuine, impostor, threshold, far):
    same = [True] * len(genuine) + [False] * len(impostor)
    found = transfer(genuine + impostor, same, threshold, far)
    assert (found.wanted_far, found.threshold) == (far, threshold)
    assert (found.genuine, found.impostor) == (len(genuine), len(impostor))
    assert found.far == accepted_share(impostor, threshold)
    assert found.tar == accepted_share(genuine, threshold)
    assert found.own_tar == roc(genuine + impostor, same).tar_at_far(far).tar
    assert found.loss == (None if found.own_tar is None else found.own_tar - found.tar)


def test_folds_use_the_threshold_of_the_others():
    generator = torch.Generator().manual_seed(0)
    values, same = torch.rand(300, generator=generator).double(), torch.arange(300) < 150
    values, folds = values + 0.3 * same, torch.arange(300) % 3
    found = fold_transfer(values, same, folds, 0.1)
    accepted, thresholds = [], []
    for at in range(300):
        others = [i for i in range(300) if folds[i] != folds[at]]
        impostors = sorted(float(values[i]) for i in others if not same[i])
        allowed = int(0.1 * len(impostors))
        # Between the highest impostor that must be rejected, and the next higher score.
        rejected = impostors[-allowed - 1]
        above = min(float(values[i]) for i in others if values[i] > rejected)
        thresholds.append((rejected + above) / 2)
        accepted.append(bool(values[at] >= thresholds[-1]))
    accepted = torch.tensor(accepted)
    assert found.tar == pytest.approx(accepted[same].double().mean().item())
    assert found.far == pytest.approx(accepted[~same].double().mean().item())
    assert found.threshold == pytest.approx(sum(thresholds) / 300)
    assert (found.genuine, found.impostor) == (150, 150)
    assert fold_transfer(values, same, folds, 0.001) is None


def test_calibration_with_norms_is_stored_and_used(tmp_path):
    decision = calibrated([0.8, 0.9], [0.1, 0.2], far=0.5, frr=0.5)
    kept = Calibration(decision, {}, "abc", True, QualityScore(0.5, 1.0))
    kept.save(tmp_path / "kept.json")
    assert Calibration.load(tmp_path / "kept.json") == kept
    embeddings, pair = torch.tensor([[0.0, 2.0], [3.0, 4.0]]), Pairs([0], [1], [True])
    assert kept.scores(embeddings, pair).tolist() == pytest.approx([0.8 + 0.5 * (math.log(2) - 1)])
    plain = dataclasses.replace(kept, quality=None)
    assert plain.scores(embeddings, pair).tolist() == pytest.approx([0.8])
    assert "quality" not in plain.to_json()
    for quality in ({"weight": 1.0}, {"weight": "1", "center": 0}, 3):
        (tmp_path / "kept.json").write_text(json.dumps(kept.to_json() | {"quality": quality}))
        with pytest.raises(ValueError, match="is not a calibration"):
            Calibration.load(tmp_path / "kept.json")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: fold_transfer([0.9, 0.1], [1, 0], [0, 1, 0], 0.5),
            r"folds must be \[2\], one number per pair",
        ),
        (lambda: fold_transfer([0.9, 0.1], [1, 0], [3, 3], 0.5), "needs two folds or more, not 1"),
        (lambda: transfer([0.9, 0.1], [1, 0], math.nan, 0.5), "threshold must be finite, not nan"),
        (lambda: transfer([0.9, 0.1], [1, 0], 0.5, "0.5"), "far must be above 0 and below 1, not 0.5"),
    ],
)
def test_transfer_rejects_invalid_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
