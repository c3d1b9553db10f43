"""Embeddings: what is computed, in which mode, and what is refused."""

import pytest
import torch
from torch import Tensor, nn

import dcnet
from dcnet.training.evaluate import batches_of
from dcnet.verification import embed, normalized


class Small(nn.Module):
    """The mean of each channel of the left half, which tells an image from its mirror image."""

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


def test_the_mirrored_image_is_added(device):
    pixels = images()
    found = embed(Small(), pixels.split(2), device)
    assert found.dtype == torch.float32
    assert found.device.type == device
    torch.testing.assert_close(found.cpu(), torch.tensor(by_hand(pixels)))


def test_floats_are_the_same_as_bytes_and_labels_are_left_aside():
    pixels = images()
    expected = embed(Small(), [pixels])
    assert torch.equal(embed(Small(), [pixels.float() / 255]), expected)
    split = dcnet.data.Split(pixels, torch.arange(5))
    assert torch.equal(embed(Small(), batches_of(split, 2)), expected)
    assert torch.equal(embed(Small(), [(pixels.float() / 255).double()]), expected)


def test_without_flip_and_with_both_side_by_side():
    pixels = images()
    plain = embed(Small(), [pixels], flip=False)
    mirrored = embed(Small(), [pixels.flip(-1)], flip=False)
    assert not torch.equal(plain, mirrored)
    assert torch.equal(embed(Small(), [pixels], join="concatenate"), torch.cat([plain, mirrored], 1))
    assert torch.equal(embed(Small(), [pixels]), plain + mirrored)


def test_every_module_keeps_its_mode_and_no_graph_is_kept():
    model = Small().train()
    model.frozen.eval()
    found = embed(model, [images()])
    assert model.modes == [False, False]
    assert (model.training, model.drop.training, model.frozen.training) == (True, True, False)
    assert not found.requires_grad
    with pytest.raises(ValueError, match="batch 0"):
        embed(model, [images().float()])
    assert (model.training, model.drop.training, model.frozen.training) == (True, True, False)


def test_a_network_of_the_library():
    model = dcnet.create_model("cnn9", "tanh-cos", 10, width=0.05)
    with torch.no_grad():
        model(torch.rand(8, 3, 32, 32))
    pixels = torch.rand(3, 3, 32, 32)
    found = embed(model, [pixels], flip=False)
    assert not found.requires_grad
    with torch.no_grad():
        assert torch.equal(found, model.eval().features(pixels))


@pytest.mark.parametrize(("value", "says"), [(0.0, "zero"), (float("nan"), "not finite"), (float("inf"), "not finite")])
def test_an_embedding_without_direction_is_named(value, says):
    class Broken(nn.Module):
        def features(self, batch: Tensor) -> Tensor:
            found = torch.ones(len(batch), 2)
            found[batch[:, 0, 0, 0] == 0] = value
            return found

    pixels = images(6)
    pixels[[3, 5]] = 0
    with pytest.raises(ValueError, match=rf"embedding 3 is {says}, and of 2 of 6"):
        embed(Broken(), pixels.split(2))
    with pytest.raises(ValueError, match=rf"embedding 3 \(d\.jpg\) is {says}"):
        embed(Broken(), pixels.split(2), names=[f"{letter}.jpg" for letter in "abcdef"])


@pytest.mark.parametrize("pixels", [torch.full((1, 3, 4, 4), 2.0), torch.full((1, 3, 4, 4), -0.5)])
def test_images_in_another_range_are_refused(pixels):
    with pytest.raises(ValueError, match="images must be uint8, or float from 0 to 1"):
        embed(Small(), [pixels])


def test_images_in_place_of_batches_are_refused():
    """A convolution takes one image as well, and its channels would be rows."""

    class Pooled(nn.Sequential):
        def features(self, batch: Tensor) -> Tensor:
            return self(batch)

    model = Pooled(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(1))
    with pytest.raises(ValueError, match=r"batch 0 must be images \[B, C, H, W\], not \[3, 4, 6\]: give batches, such"):
        embed(model, images())


def test_what_cannot_be_embedded_is_said():
    with pytest.raises(ValueError, match="join must be one of sum, concatenate, not 'add'"):
        embed(Small(), [images()], join="add")
    with pytest.raises(ValueError, match="Linear has no method `features`"):
        embed(nn.Linear(2, 2), [images()])
    with pytest.raises(ValueError, match="there are no images to embed"):
        embed(Small(), [])
    flat = Small()
    flat.features = lambda batch: batch
    with pytest.raises(ValueError, match=r"`features` must give \[N, D\], not \[5, 3, 4, 6\]"):
        embed(flat, [images()])


def test_normalized_has_norm_one_over_the_whole_range_of_float32():
    found = normalized(torch.tensor([[3.0, 4.0], [3e30, 4e30], [3e-30, 4e-30], [-3e38, 0.0]]))
    torch.testing.assert_close(found, torch.tensor([[0.6, 0.8], [0.6, 0.8], [0.6, 0.8], [-1.0, 0.0]]))
    with pytest.raises(ValueError, match="embedding 1 is zero"):
        normalized(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    with pytest.raises(ValueError, match=r"embeddings must be \[N, D\] and not empty, not \[0, 4\]"):
        normalized(torch.empty(0, 4))
