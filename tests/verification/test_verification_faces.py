"""What is reported of strangers' faces: of which pairs, and each image once."""

import json
from pathlib import Path

import pytest
import torch
from lfw_folder import write_image
from torch import Tensor, nn

from dcnet.verification import LfwData, evaluate_faces, fold_accuracy, make_folds, pair_scores, roc

# The first two are trained on; the others are not, one of them since there is one image.
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
    """Features of few pixels; counts the images that it is given."""

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


def test_all_of_it_is_from_pairs_of_strangers(folder: Path):
    model = Seen()
    found = evaluate_faces(model, folder)
    assert found == json.loads(json.dumps(found))
    counts = ("pairs", "same", "different")
    assert [found["development"][key] for key in counts] == [6, 3, 3]
    assert [found["development_all"][key] for key in counts] == [21, 5, 16]
    # Cy has one image, and was not trained on.
    assert [found["unseen"][key] for key in (*counts, "left_out")] == [6, 3, 3, 2]
    assert found["images"] == 9
    assert model.images == 2 * 9


def test_faces_are_measured_as_pairs_are(folder: Path):
    found = evaluate_faces(Seen(), folder)["development"]
    data = LfwData(folder / "lfw")
    pairs = data.pairs("pairsDevTest")
    pixels = data.images(pairs.names, 96).stacked().float() / 255
    embeddings = Seen().features(pixels) + Seen().features(pixels.flip(-1))
    scores = pair_scores(embeddings, pairs.first, pairs.second)
    curve = roc(scores, pairs.same)
    assert (found["auc"], found["eer"]) == pytest.approx((curve.auc(), curve.eer()))
    folds = fold_accuracy(scores, pairs.same, make_folds(pairs.same))
    assert found["accuracy"]["mean"] == pytest.approx(folds.mean)
    assert found["accuracy"]["standard_error"] == pytest.approx(folds.standard_error)
    assert [at["far"] for at in found["tar_at_far"]] == [0.1, 0.01, 0.001, 0.0001]
    assert "too few" in found["tar_at_far"][1]["note"]


def test_a_missing_list_of_pairs_is_told(folder: Path):
    (folder / "lfw" / "pairsDevTest.txt").unlink()
    with pytest.raises(ValueError, match=r"there is no list 'pairsDevTest\.txt'"):
        evaluate_faces(Seen(), folder)


def test_all_images_at_once_are_those_one_by_one(folder: Path):
    data = LfwData(folder / "lfw")
    files = data.images(data.pairs().names, 8)
    assert torch.equal(files.stacked(), torch.cat(list(files.batches(2))))
