"""Embeddings, cosine scores of listed and of all pairs, and similarity by hyperplanes, against plain loops."""

import math

import pytest
import torch
from helpers.largest_tensor import Largest
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dcnet
from dcnet.training.evaluation import batches_of
from dcnet.verification import (
    HyperplaneSimilarity,
    ScoreHistogram,
    embed,
    nearest,
    normalized,
    pair_scores,
    score_histogram,
)


class Small(nn.Module):
    """The mean of each channel of the left half, which differs for the mirror image."""

    def __init__(self, scale: float = 1.0):
        super().__init__()
        self.drop, self.frozen = nn.Dropout(0.5), nn.BatchNorm2d(3)
        self.scale = scale
        self.modes: list[bool] = []

    def features(self, images: Tensor) -> Tensor:
        self.modes.append(self.training or self.drop.training)
        return self.drop(images[..., : images.shape[-1] // 2].mean((2, 3))) * self.scale


def images(count: int = 5) -> Tensor:
    return torch.randint(1, 256, (count, 3, 4, 6), dtype=torch.uint8)


def by_hand(pixels: Tensor) -> list[list[float]]:
    """The sum of the means of both halves, by plain loops."""
    found = []
    for image in pixels.tolist():
        halves = [[sum(row[c] for row in channel) / len(channel) / 255 for c in range(6)] for channel in image]
        found.append([sum(channel) / 3 for channel in halves])
    return found


def test_embed_adds_the_mirror_image(device):
    pixels = images()
    found = embed(Small(), pixels.split(2), device)
    assert found.dtype == torch.float32
    assert found.device.type == device
    torch.testing.assert_close(found.cpu(), torch.tensor(by_hand(pixels)))


def test_embed_takes_floats_bytes_and_batches_with_labels():
    pixels = images()
    expected = embed(Small(), [pixels])
    assert torch.equal(embed(Small(), [pixels.float() / 255]), expected)
    split = dcnet.data.Split(pixels, torch.arange(5))
    assert torch.equal(embed(Small(), batches_of(split, 2)), expected)
    assert torch.equal(embed(Small(), [(pixels.float() / 255).double()]), expected)


def test_embed_without_flip_and_with_concatenation():
    pixels = images()
    plain = embed(Small(), [pixels], flip=False)
    mirrored = embed(Small(), [pixels.flip(-1)], flip=False)
    assert not torch.equal(plain, mirrored)
    assert torch.equal(embed(Small(), [pixels], join="concatenate"), torch.cat([plain, mirrored], 1))
    assert torch.equal(embed(Small(), [pixels]), plain + mirrored)


def test_embed_restores_modes_and_keeps_no_graph():
    model = Small().train()
    model.frozen.eval()
    found = embed(model, [images()])
    assert model.modes == [False, False]
    assert (model.training, model.drop.training, model.frozen.training) == (True, True, False)
    assert not found.requires_grad
    with pytest.raises(ValueError, match="batch 0"):
        embed(model, [images().float()])
    assert (model.training, model.drop.training, model.frozen.training) == (True, True, False)


def test_embed_matches_features_of_a_network():
    model = dcnet.create_model("cnn9", "tanh-cos", 10, width=0.05)
    with torch.no_grad():
        model(torch.rand(8, 3, 32, 32))
    pixels = torch.rand(3, 3, 32, 32)
    found = embed(model, [pixels], flip=False)
    assert not found.requires_grad
    with torch.no_grad():
        assert torch.equal(found, model.eval().features(pixels))


@pytest.mark.parametrize(
    ("value", "message"), [(0.0, "zero"), (float("nan"), "not finite"), (float("inf"), "not finite")]
)
def test_embed_names_zero_and_nonfinite_embeddings(value, message):
    class Broken(nn.Module):
        def features(self, batch: Tensor) -> Tensor:
            found = torch.ones(len(batch), 2)
            found[batch[:, 0, 0, 0] == 0] = value
            return found

    pixels = images(6)
    pixels[[3, 5]] = 0
    with pytest.raises(ValueError, match=rf"embedding 3 is {message}; 2 of 6 embeddings are invalid"):
        embed(Broken(), pixels.split(2))
    with pytest.raises(ValueError, match=rf"embedding 3 \(d\.jpg\) is {message}"):
        embed(Broken(), pixels.split(2), names=[f"{letter}.jpg" for letter in "abcdef"])


@pytest.mark.parametrize("pixels", [torch.full((1, 3, 4, 4), 2.0), torch.full((1, 3, 4, 4), -0.5)])
def test_embed_rejects_images_of_another_range(pixels):
    with pytest.raises(ValueError, match=r"images must be uint8, or float in \[0, 1\]"):
        embed(Small(), [pixels])


def test_embed_rejects_images_in_place_of_batches():
    """A convolution also accepts a single image, whose channels would become rows."""

    class Pooled(nn.Sequential):
        def features(self, batch: Tensor) -> Tensor:
            return self(batch)

    model = Pooled(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(1))
    with pytest.raises(ValueError, match=r"batch 0 must be images \[B, C, H, W\], not \[3, 4, 6\]: give batches, such"):
        embed(model, images())


def test_embed_rejects_invalid_arguments():
    with pytest.raises(ValueError, match="unknown join 'add': known are sum, concatenate"):
        embed(Small(), [images()], join="add")
    with pytest.raises(ValueError, match="Linear has no method `features`"):
        embed(nn.Linear(2, 2), [images()])
    with pytest.raises(ValueError, match="there are no images to embed"):
        embed(Small(), [])
    flat = Small()
    flat.features = lambda batch: batch
    with pytest.raises(ValueError, match=r"`features` must return \[N, D\], not \[5, 3, 4, 6\]"):
        embed(flat, [images()])


def test_normalized_has_norm_one_in_the_whole_range_of_float32():
    found = normalized(torch.tensor([[3.0, 4.0], [3e30, 4e30], [3e-30, 4e-30], [-3e38, 0.0]]))
    torch.testing.assert_close(found, torch.tensor([[0.6, 0.8], [0.6, 0.8], [0.6, 0.8], [-1.0, 0.0]]))
    with pytest.raises(ValueError, match="embedding 1 is zero"):
        normalized(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    with pytest.raises(ValueError, match=r"embeddings must be \[N, D\] and not empty, not \[0, 4\]"):
        normalized(torch.empty(0, 4))


def cosine(first: list[float], second: list[float]) -> float:
    product = sum(a * b for a, b in zip(first, second, strict=True))
    return product / math.sqrt(sum(a * a for a in first)) / math.sqrt(sum(b * b for b in second))


class Precisions(TorchDispatchMode):
    """Records the precisions of matrix products."""

    def __init__(self):
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            self.seen.add(torch.get_float32_matmul_precision())
        return func(*args, **(kwargs or {}))


def brute_force_histogram(embeddings, labels, bins):
    genuine, impostor = [0] * bins, [0] * bins
    rows = embeddings.double().tolist()
    for i in range(len(rows)):
        for j in range(i):
            place = min(int((cosine(rows[i], rows[j]) + 1) / 2 * bins), bins - 1)
            (genuine if labels[i] == labels[j] else impostor)[place] += 1
    return genuine, impostor


def test_pair_scores_match_plain_loops(device):
    embeddings = torch.randn(7, 5) * torch.logspace(-3, 3, 7)[:, None]
    first, second = torch.tensor([0, 6, 3, 3]), torch.tensor([1, 2, 3, 0])
    found = pair_scores(embeddings.to(device), first, second)
    rows = embeddings.double().tolist()
    expected = [cosine(rows[i], rows[j]) for i, j in zip(first, second, strict=True)]
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    assert found.max() <= 1


def test_pair_scores_are_equal_in_several_blocks(monkeypatch):
    embeddings = torch.randn(20, 5)
    first, second = torch.randint(20, (2, 50))
    expected = pair_scores(embeddings, first, second)
    monkeypatch.setattr("dcnet.verification.embeddings.PAIR_BLOCK", 7)
    assert torch.equal(pair_scores(embeddings, first, second), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_pair_scores_take_indices_of_any_integer_type(dtype):
    # As many pairs as embeddings, so that uint8 indices could be taken for a mask.
    embeddings, first, second = torch.randn(4, 5), torch.tensor([0, 1, 1, 3]), torch.tensor([3, 0, 2, 3])
    expected = pair_scores(embeddings, first, second)
    assert torch.equal(pair_scores(embeddings, first.to(dtype), second.to(dtype)), expected)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ([0, 3], [1, 1], "from 0 to 2, not 3"),
        ([0, -1], [1, 1], "from 0 to 2, not -1"),
        ([0, 1], [1], "equally many first and second images, not 2 and 1"),
        ([0.5], [1.0], "must be integers"),
        ([], [], "P > 0"),
    ],
)
def test_pair_scores_reject_invalid_indices(first, second, message):
    with pytest.raises(ValueError, match=message):
        pair_scores(torch.randn(3, 2), torch.tensor(first), torch.tensor(second))


@pytest.mark.parametrize("block", [1, 3, 7, 100])
@pytest.mark.parametrize("bins", [2, 64])
def test_score_histogram_counts_each_pair_once(block, bins, device):
    embeddings, labels = torch.randn(23, 4), torch.randint(4, (23,))
    found = score_histogram(embeddings.to(device), labels, bins, block)
    assert (found.genuine.tolist(), found.impostor.tolist()) == brute_force_histogram(embeddings, labels, bins)
    assert int((found.genuine + found.impostor).sum()) == 23 * 22 // 2


def test_extreme_scores_are_in_the_first_and_last_bin():
    found = score_histogram(torch.tensor([[1.0, 0.0], [2.0, 0.0], [-3.0, 0.0]]), torch.tensor([0, 0, 0]), bins=10)
    assert found.genuine.tolist() == [2, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    assert found.impostor.sum() == 0
    assert found.edges().tolist() == pytest.approx([-1 + 0.2 * i for i in range(10)])


def test_histograms_can_be_added():
    embeddings, labels = torch.randn(9, 3), torch.randint(2, (9,))
    one = score_histogram(embeddings, labels, 50)
    assert torch.equal((one + one).genuine, 2 * one.genuine)
    assert torch.equal((one + one).impostor, 2 * one.impostor)
    with pytest.raises(ValueError, match="histograms of 50 and 2 bins"):
        one + ScoreHistogram(torch.zeros(2), torch.zeros(2))


@pytest.mark.parametrize("block", [1, 4, 100])
@pytest.mark.parametrize("count", [1, 3, 10])
def test_nearest_matches_plain_loops(block, count, device):
    probes, gallery = torch.randn(9, 4), torch.randn(11, 4)
    found = nearest(probes.to(device), gallery.to(device), count, block)
    for probe, scores, indices in zip(probes.double().tolist(), found.scores, found.indices, strict=True):
        all_scores = [cosine(probe, one) for one in gallery.double().tolist()]
        order = sorted(range(11), key=lambda at: -all_scores[at])[:count]
        assert indices.tolist() == order
        assert scores.tolist() == pytest.approx([all_scores[at] for at in order], abs=1e-6)


@pytest.mark.parametrize("block", [1, 4, 100])
def test_nearest_excludes_the_probe_itself(block):
    embeddings = torch.randn(10, 3)
    rows = embeddings.double().tolist()
    found = nearest(embeddings, count=9, block=block)
    for at in range(10):
        order = sorted(set(range(10)) - {at}, key=lambda other: -cosine(rows[at], rows[other]))
        assert found.indices[at].tolist() == order
    with pytest.raises(ValueError, match="count must be a whole number from 1 to 9, not 10"):
        nearest(embeddings, count=10)


def test_nearest_rejects_embeddings_of_different_sizes():
    with pytest.raises(ValueError, match="embeddings must have the same number of values, not 3 and 2"):
        nearest(torch.randn(4, 3), torch.randn(5, 2))


def test_scores_use_full_float32_precision():
    embeddings, labels = torch.randn(60, 64), torch.randint(2, (60,))
    expected = score_histogram(embeddings, labels)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", torch.bfloat16), Precisions() as precisions:
            found = score_histogram(embeddings, labels)
            scores = nearest(embeddings).scores
        assert torch.get_float32_matmul_precision() == "medium"
        # A CPU gives equal results in all precisions, a GPU does not.
        assert precisions.seen == {"highest"}
    finally:
        torch.set_float32_matmul_precision(before)
    assert scores.dtype == torch.float32
    assert torch.equal(found.genuine, expected.genuine)
    assert torch.equal(scores, nearest(embeddings).scores)


def test_scores_of_all_pairs_are_computed_in_blocks():
    count, block = 20_000, 1024
    embeddings, labels = torch.randn(count, 64), torch.randint(100, (count,))
    with Largest() as largest:
        found = score_histogram(embeddings, labels, block=block)
    assert int((found.genuine + found.impostor).sum()) == count * (count - 1) // 2
    assert block * block <= largest.elements <= max(2 * block * block, embeddings.numel())
    with Largest() as largest:
        nearest(embeddings[:2000], embeddings, 5, block)
    assert largest.elements <= max(2 * block * block, embeddings.numel())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": torch.zeros(3).long()}, r"labels must be integers \[4\], not torch.int64 \[3\]"),
        ({"labels": torch.zeros(4)}, r"labels must be integers \[4\], not torch.float32"),
        ({"bins": 1}, "bins must be a whole number, 2 or more, not 1"),
        ({"block": 0}, "block must be a whole number, 1 or more, not 0"),
    ],
)
def test_score_histogram_rejects_invalid_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        score_histogram(torch.randn(4, 2), **{"labels": torch.zeros(4).long(), **options})


def background(count=200, features=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.tensor([3.0, 1.0, 1.0, 0.5, 0.2, 0.1])[:features]
    return torch.randn(count, features, generator=generator) * spread + 1.0


def centred():
    return torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]], dtype=torch.float64)


def with_nan():
    features = torch.ones(3, 6)
    features[1, 2] = torch.nan
    return features


def test_hyperplane_solves_least_squares():
    """w x + c = 1 for the feature and -1 for the background, each with half of the weight."""
    others, x = background().double(), torch.tensor([4.0, -1.0, 0.5, 2.0, 1.0, 0.3], dtype=torch.float64)
    similarity = HyperplaneSimilarity(others, ridge=1e-9)
    rows = torch.cat([torch.cat([others, x[None]]), torch.ones(201, 1, dtype=torch.float64)], 1)
    weights = torch.cat([torch.full((200,), 1 / 200, dtype=torch.float64), torch.ones(1, dtype=torch.float64)]).sqrt()
    wanted = torch.cat([-torch.ones(200, dtype=torch.float64), torch.ones(1, dtype=torch.float64)])
    solved = torch.linalg.lstsq(rows * weights[:, None], wanted * weights).solution[:-1]
    assert torch.allclose(similarity.normals(x[None])[0], solved / solved.norm(), atol=1e-6)


def test_hyperplane_separates_a_feature_from_the_background():
    others, x = background(), torch.full((1, 6), 5.0)
    similarity = HyperplaneSimilarity(others)
    assert similarity.distances(x, x) > 0
    mean = others.mean(0, keepdim=True)
    assert torch.allclose(similarity.distances(x, mean), -similarity.distances(x, x))


def test_hyperplane_similarity_is_symmetric_and_ignores_common_directions():
    """The background varies in the first feature and hardly in the last; a cosine ignores that."""
    similarity = HyperplaneSimilarity(background() - 1.0)
    one = torch.tensor([[3.0, 0.0, 0.0, 0.0, 0.0, 1.0]])
    same, other = torch.tensor([[-3.0, 0, 0, 0, 0, 1.0]]), torch.tensor([[3.0, 0, 0, 0, 0, -1.0]])
    assert torch.nn.functional.cosine_similarity(one, same) < torch.nn.functional.cosine_similarity(one, other)
    assert similarity(one, same) > 0 > similarity(one, other)
    assert torch.equal(similarity(one, other), similarity(other, one))


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: HyperplaneSimilarity(torch.ones(1, 3)), "with N >= 2"),
        (lambda: HyperplaneSimilarity(torch.full((4, 3), torch.nan)), "finite"),
        (lambda: HyperplaneSimilarity(background(), ridge=0), "ridge must be above 0 and finite, not 0"),
        (lambda: HyperplaneSimilarity(background(), ridge=math.inf), "ridge must be above 0 and finite, not inf"),
        (lambda: HyperplaneSimilarity(background())(torch.ones(2, 5), torch.ones(2, 5)), r"features must be \[N, 6\]"),
        (lambda: HyperplaneSimilarity(background())(torch.ones(2, 6), torch.ones(3, 6)), "of one shape"),
        (lambda: HyperplaneSimilarity(centred())(torch.zeros(1, 2), torch.ones(1, 2)), "has no hyperplane"),
        (lambda: HyperplaneSimilarity(torch.full((7, 3), 0.1)), "must differ, but all 7 are the same"),
        (lambda: HyperplaneSimilarity(1e-200 * centred()), "variance of the background must be a finite number above"),
        (lambda: HyperplaneSimilarity(1e200 * centred()), "variance of the background must be a finite number above"),
        (lambda: HyperplaneSimilarity(background())(with_nan(), torch.ones(3, 6)), "finite, but 1 of 3 are not"),
        (lambda: HyperplaneSimilarity(background())(torch.ones(3, 6), with_nan()), "finite, but 1 of 3 are not"),
    ],
)
def test_hyperplane_similarity_rejects_invalid_arguments(call, problem):
    with pytest.raises(ValueError, match=problem):
        call()
