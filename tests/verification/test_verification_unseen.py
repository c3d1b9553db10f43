"""What is reported of classes that were not trained on: pairs, identification, and whether they are known at all."""

import json

import pytest
import torch
from torch import Tensor, nn

from dcnet.data import Dataset, Split, load_dataset
from dcnet.data.open_set import OpenSet, split_classes
from dcnet.verification import evaluate_open_set, open_set_measures
from dcnet.verification.open_set import first_of_each

COLOURS = 12


class Pixel(nn.Module):
    """The first pixel as a direction, one for each colour, and a little of the second."""

    def __init__(self, blur: float = 0.0):
        super().__init__()
        self.blur, self.images = blur, 0

    def features(self, input: Tensor) -> Tensor:
        self.images += len(input)
        colour = (input[:, 0].mean((1, 2)) * 255).round().long()
        noise = torch.randn(len(input), COLOURS, generator=torch.Generator().manual_seed(len(input)))
        return nn.functional.one_hot(colour, COLOURS) + self.blur * noise


def painted(per_class: int = 20) -> OpenSet:
    """Every image in the colour of its class."""
    labels = torch.arange(COLOURS * per_class) % COLOURS
    images = labels.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 2, 2).contiguous()
    split = Split(images, labels)
    return split_classes(Dataset("colours", split, split, tuple("abcdefghijkl")), 4)


def test_a_network_that_tells_all_classes_apart_makes_no_mistake():
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


def test_a_network_that_knows_nothing_is_told_so():
    found = open_set_measures(Pixel(blur=100.0), painted(40), pairs=4000, enrolled=5, known=3)
    assert 0.4 < found["verification"]["auc"] < 0.6
    assert found["identification"]["ranks"][0] < 0.45
    assert 0.35 < found["detection"]["auc"] < 0.65
    assert found["detection"]["rank_1_of_known"] < 0.3


def test_the_first_images_of_each_class():
    labels = torch.tensor([2, 0, 2, 1, 2, 0, 0])
    assert first_of_each(labels, 2).tolist() == [0, 1, 2, 3, 5]
    assert first_of_each(labels, 1).tolist() == [0, 1, 3]


def test_digits_that_nobody_trained_on():
    parts = split_classes(load_dataset("digits"), 4)

    class Pixels(nn.Module):
        def features(self, input: Tensor) -> Tensor:
            return input.flatten(1)

    found = open_set_measures(Pixels(), parts, pairs=1000)
    assert 0.7 < found["verification"]["auc"] < 1
    assert 0.7 < found["identification"]["ranks"][0] < 1
    assert 0.5 < found["detection"]["auc"] < 1


def test_an_open_set_that_is_not_there_is_told(tmp_path):
    with pytest.raises(ValueError, match="cifar100 is not in"):
        evaluate_open_set(Pixel(), tmp_path, download=False)
