"""Measures for records: faces of unseen people, and unseen classes."""

import json
import math
from pathlib import Path

import pytest
import torch
from helpers.lfw_folder import write_image
from torch import Tensor, nn

from dcnet.data import Dataset, Split, load_dataset
from dcnet.data.cifar import OpenSet, split_classes
from dcnet.verification import (
    LfwData,
    Pairs,
    discard_errors,
    evaluate_faces,
    evaluate_open_set,
    fit_quality,
    fold_accuracy,
    make_folds,
    open_set_measures,
    pair_scores,
    roc,
)
from dcnet.verification.measures import first_of_each, quality_measures

# The first two people are in the training set; Cy_Three is not, with only one image.
COUNTS = {"Ada_One": 3, "Bob_Two": 5, "Cy_Three": 1, "Di_Four": 3, "Eve_Five": 3, "Flo_Six": 2}
PAIRS = """2\t2
Di_Four\t1\t2
Ada_One\t1\t2
Di_Four\t1\tEve_Five\t1
Di_Four\t2\tCy_Three\t1
Eve_Five\t1\t2
Flo_Six\t1\t2
Flo_Six\t1\tBob_Two\t1
Flo_Six\t2\tEve_Five\t3
"""
DEV_TEST = """3
Di_Four\t1\t3
Eve_Five\t1\t3
Flo_Six\t1\t2
Di_Four\t3\tEve_Five\t1
Di_Four\t1\tFlo_Six\t1
Eve_Five\t2\tFlo_Six\t2
"""


class Seen(nn.Module):
    """Features from averaged pixels; counts its input images."""

    def __init__(self) -> None:
        super().__init__()
        self.images = 0

    def features(self, input: Tensor) -> Tensor:
        self.images += len(input)
        return nn.functional.adaptive_avg_pool2d(input, 3).flatten(1) - 0.5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "lfw"
    for place, (person, count) in enumerate(COUNTS.items()):
        for number in range(1, count + 1):
            write_image(root / person / f"{person}_{number:04d}.png", 10 * place + number, 8, 8)
    people = "".join(f"{person}\t{COUNTS[person]}\n" for person in ("Ada_One", "Bob_Two", "Cy_Three"))
    for name, text in {"pairs": PAIRS, "pairsDevTest": DEV_TEST, "peopleDevTrain": f"3\n{people}"}.items():
        (root / f"{name}.txt").write_text(text)
    return tmp_path


def test_evaluate_faces_counts_pairs_of_unseen_people(folder: Path):
    model = Seen()
    found = evaluate_faces(model, folder)
    assert found == json.loads(json.dumps(found))
    counts = ("pairs", "same", "different")
    assert [found["development"][key] for key in counts] == [6, 3, 3]
    assert [found["development_all"][key] for key in counts] == [21, 5, 16]
    # Cy_Three has one image, and is not in the training set.
    assert [found["unseen"][key] for key in (*counts, "left_out")] == [6, 3, 3, 2]
    assert found["images"] == 9
    assert model.images == 2 * 9


def test_evaluate_faces_matches_measures_of_pairs(folder: Path):
    found = evaluate_faces(Seen(), folder)["development"]
    data = LfwData(folder / "lfw")
    pairs = data.pairs("pairsDevTest")
    pixels = data.images(pairs.names, 96).stack().float() / 255
    embeddings = Seen().features(pixels) + Seen().features(pixels.flip(-1))
    scores = pair_scores(embeddings, pairs.first, pairs.second)
    curve = roc(scores, pairs.same)
    assert (found["auc"], found["eer"]) == pytest.approx((curve.auc(), curve.eer()))
    folds = fold_accuracy(scores, pairs.same, make_folds(pairs.same))
    assert found["accuracy"]["mean"] == pytest.approx(folds.mean)
    assert found["accuracy"]["standard_error"] == pytest.approx(folds.standard_error)
    assert [at["far"] for at in found["tar_at_far"]] == [0.1, 0.01, 0.001, 0.0001]
    assert "too few" in found["tar_at_far"][1]["note"]


def test_evaluate_faces_requires_the_list_of_pairs(folder: Path):
    (folder / "lfw" / "pairsDevTest.txt").unlink()
    with pytest.raises(ValueError, match=r"there is no list 'pairsDevTest\.txt'"):
        evaluate_faces(Seen(), folder)


def test_stack_matches_batches(folder: Path):
    data = LfwData(folder / "lfw")
    files = data.images(data.pairs().names, 8)
    assert torch.equal(files.stack(), torch.cat(list(files.batches(2))))


COLOURS = 12


class Pixel(nn.Module):
    """One direction per color, plus noise."""

    def __init__(self, blur: float = 0.0):
        super().__init__()
        self.blur, self.images = blur, 0

    def features(self, input: Tensor) -> Tensor:
        self.images += len(input)
        colour = (input[:, 0].mean((1, 2)) * 255).round().long()
        noise = torch.randn(len(input), COLOURS, generator=torch.Generator().manual_seed(len(input)))
        return nn.functional.one_hot(colour, COLOURS) + self.blur * noise


def painted(per_class: int = 20) -> OpenSet:
    """Images in the color of their class."""
    labels = torch.arange(COLOURS * per_class) % COLOURS
    images = labels.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 2, 2).contiguous()
    split = Split(images, labels)
    return split_classes(Dataset("colours", split, split, tuple("abcdefghijkl")), 4)


def test_open_set_measures_of_perfect_embeddings():
    model, parts = Pixel(), painted()
    found = open_set_measures(model, parts, pairs=400, enrolled=5, known=3)
    assert found == json.loads(json.dumps(found))
    assert found["unseen_classes"] == list(parts.unseen_classes)
    verification, identification, detection = (found[key] for key in ("verification", "identification", "detection"))
    assert [verification[key] for key in ("pairs", "same", "different")] == [400, 200, 200]
    assert verification["auc"] == verification["balanced_accuracy"]["mean"] == 1
    assert verification["eer"] == 0
    assert [identification[key] for key in ("gallery", "probes")] == [20, 140]
    assert identification["ranks"] == [1.0] * 5
    assert [rate["tpir"] for rate in identification["open"]] == [None, 1]
    assert [identification["open"][1][key] for key in ("known", "unknown")] == [70, 70]
    assert [detection[key] for key in ("gallery", "known", "unknown")] == [24, 160, 160]
    assert detection["auc"] == detection["rank_1_of_known"] == 1
    assert [rate["tpir"] for rate in detection["open"]] == [1, 1]
    # Each image and its mirror image once.
    assert model.images == 2 * (160 + 160 + 24)


def test_open_set_measures_of_random_embeddings():
    found = open_set_measures(Pixel(blur=100.0), painted(40), pairs=4000, enrolled=5, known=3)
    assert 0.4 < found["verification"]["auc"] < 0.6
    assert found["identification"]["ranks"][0] < 0.45
    assert 0.35 < found["detection"]["auc"] < 0.65
    assert found["detection"]["rank_1_of_known"] < 0.3


def test_first_of_each():
    labels = torch.tensor([2, 0, 2, 1, 2, 0, 0])
    assert first_of_each(labels, 2).tolist() == [0, 1, 2, 3, 5]
    assert first_of_each(labels, 1).tolist() == [0, 1, 3]


def test_open_set_measures_of_digits():
    parts = split_classes(load_dataset("digits"), 4)

    class Pixels(nn.Module):
        def features(self, input: Tensor) -> Tensor:
            return input.flatten(1)

    found = open_set_measures(Pixels(), parts, pairs=1000)
    assert 0.7 < found["verification"]["auc"] < 1
    assert 0.7 < found["identification"]["ranks"][0] < 1
    assert 0.5 < found["detection"]["auc"] < 1


def test_evaluate_open_set_requires_the_dataset(tmp_path):
    with pytest.raises(ValueError, match="cifar100 is not in"):
        evaluate_open_set(Pixel(), tmp_path, download=False)


def test_scores_are_corrected_by_the_weights_of_other_folds():
    """Pairs without a fold count for discards alone."""
    generator = torch.Generator().manual_seed(0)
    norms = torch.rand(40, generator=generator).double() + 0.5
    first, second = torch.randint(40, (2, 300), generator=generator)
    same, folds = torch.rand(300, generator=generator) < 0.5, torch.arange(300) % 4 - 1
    scores = torch.rand(300, generator=generator) + 0.3 * same + 0.2 * torch.minimum(norms[first], norms[second]).log()
    found = quality_measures(scores, Pairs(first, second, same), folds, norms)
    corrected, answers, weights = [], [], []
    for fold in (0, 1, 2):
        others = [at for at in range(300) if folds[at] not in (fold, -1)]
        smaller = [math.log(min(norms[i], norms[j])) for i, j in zip(first.tolist(), second.tolist(), strict=True)]
        fitted = fit_quality(scores[others], same[others], [smaller[at] for at in others])
        own = [at for at in range(300) if folds[at] == fold]
        corrected += [float(scores[at]) + fitted.weight * (smaller[at] - fitted.center) for at in own]
        answers += same[own].tolist()
        weights.append(fitted.weight)
    assert found["weights"] == pytest.approx(weights)
    assert len(set(weights)) == 3
    for at, rate in zip(found["tar_at_far"], (0.1, 0.01), strict=False):
        assert at["corrected"] == roc(corrected, answers).tar_at_far(rate).tar
        assert at["cosine"] == roc(scores[folds >= 0], same[folds >= 0]).tar_at_far(rate).tar
    assert found["discard"] == discard_errors(scores, same, (first, second), norms)
    assert found["norms"] == pytest.approx([float(norms.min()), float(norms.median()), float(norms.max())], abs=0.05)
