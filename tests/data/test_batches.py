"""Augmentation against plain loops with numpy's padding; batches as a function of seed and step."""

import dataclasses

import numpy as np
import pytest
import torch
from helpers.data_files import sentence_of
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from dcnet.data import Augmentation, BatchDraws, Batches, Draws, Split, augment, draw
from dcnet.data.batches import LEVELS, hash_seed

IN_NUMPY = {"symmetric": "symmetric", "reflect": "reflect", "replicate": "edge", "zeros": "constant"}


def plain(image: np.ndarray, shift, flip: bool, center, levels, how: Augmentation):
    """One image [C, H, W], padded, cropped, flipped, with other contrast and brightness, and cut out, in this order."""
    _, height, width = image.shape
    pad = [(0, 0), (how.pad, how.pad), (how.pad, how.pad)]
    padded = np.pad(image, pad, mode=IN_NUMPY[how.pad_mode])
    found = padded[:, shift[0] : shift[0] + height, shift[1] : shift[1] + width]
    if how.flip and flip:
        found = found[:, :, ::-1]
    found = found.astype(np.float32) / np.float32(255)
    for channel in found if how.brightness or how.contrast else ():
        mean = sum(float(value) for value in channel.flat) / channel.size
        for place in np.ndindex(height, width):
            added, factor = how.brightness * levels[0] / LEVELS, 1 + how.contrast * levels[1] / LEVELS
            channel[place] = min(max(mean + factor * (channel[place] - mean) + added, 0), 1)
    top, left = center[0] - how.cutout // 2, center[1] - how.cutout // 2
    for y in range(top, top + how.cutout):
        for x in range(left, left + how.cutout):
            if 0 <= y < height and 0 <= x < width:
                found[:, y, x] = 127.5 / 255
    return found


def in_loops(images: torch.Tensor, index: torch.Tensor, draws: Draws, how: Augmentation) -> torch.Tensor:
    parts = (index, draws.shifts, draws.flips, draws.centers, draws.levels)
    rows = zip(*(part.tolist() for part in parts), strict=True)
    found = [plain(images[number].numpy(), *drawn, how) for number, *drawn in rows]
    return torch.from_numpy(np.stack(found))


def random_images(count: int, channels: int, height: int, width: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8)


@given(
    mode=st.sampled_from(sorted(IN_NUMPY)),
    pad=st.integers(0, 12),
    flip=st.booleans(),
    cutout=st.integers(0, 9),
    channels=st.sampled_from([1, 3]),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
)
def test_augment_matches_plain_loops(
    mode: str, pad: int, flip: bool, cutout: int, channels: int, height: int, width: int
):
    torch.manual_seed(0)
    how = Augmentation(pad, mode, flip, cutout)
    images, index = random_images(7, channels, height, width), torch.tensor([3, 0, 6, 6, 1])
    draws = draw(how, 5, (height, width), torch.Generator().manual_seed(1))
    found = augment(images, index, draws, how)
    assert found.dtype == torch.float32
    assert torch.equal(found, in_loops(images, index, draws, how))


@pytest.mark.parametrize("mode", sorted(IN_NUMPY))
def test_augment_with_every_shift(mode: str, device: str):
    how = Augmentation(pad=4, pad_mode=mode, flip=True, cutout=3)
    images = random_images(2, 3, 7, 5)
    shifts = torch.cartesian_prod(torch.arange(9), torch.arange(9)).repeat(2, 1)
    flips = torch.arange(len(shifts)) >= 81
    centers = torch.stack([torch.arange(len(shifts)) % 7, torch.arange(len(shifts)) % 5], dim=1)
    draws, index = Draws(shifts, flips, centers, torch.zeros_like(shifts)), torch.arange(len(shifts)) % 2
    found = augment(images.to(device), index.to(device), draws.to(device), how).cpu()
    torch.testing.assert_close(found, in_loops(images, index, draws, how), rtol=0, atol=1e-7)


@given(
    brightness=st.floats(0, 1),
    contrast=st.floats(0, 1),
    cutout=st.integers(0, 3),
    channels=st.sampled_from([1, 3]),
    height=st.integers(1, 6),
)
def test_brightness_and_contrast_match_plain_loops(
    brightness: float, contrast: float, cutout: int, channels: int, height: int
):
    torch.manual_seed(0)
    how = Augmentation(1, "reflect", True, cutout, brightness, contrast)
    images, index = random_images(4, channels, height, 5), torch.tensor([3, 0, 1, 1])
    draws = draw(how, 4, (height, 5), torch.Generator().manual_seed(1))
    expected = in_loops(images, index, draws, how)
    torch.testing.assert_close(augment(images, index, draws, how), expected, atol=1e-5, rtol=0)


def test_a_draw_at_its_limit_has_the_largest_change():
    """Contrast 0 leaves the mean of each channel, and the brightness is added to it."""
    images, nothing = random_images(2, 3, 4, 4), torch.zeros(2, 2, dtype=torch.long)
    levels = torch.tensor([[LEVELS, -LEVELS], [0, 0]])
    draws = Draws(nothing, nothing[:, 0].bool(), nothing, levels)
    found = augment(images, torch.arange(2), draws, Augmentation(brightness=0.1, contrast=1.0))
    pixels = images.float() / 255
    wanted = (pixels[:1].mean((2, 3), keepdim=True) + 0.1).expand(1, 3, 4, 4).clamp(0, 1)
    torch.testing.assert_close(found, torch.cat([wanted, pixels[1:]]), atol=1e-6, rtol=0)


def test_no_augmentation_returns_the_images():
    images = random_images(4, 3, 5, 5)
    index = torch.tensor([2, 2, 0])
    draws = draw(Augmentation(), 3, (5, 5), torch.Generator())
    assert torch.equal(augment(images, index, draws, Augmentation()), images[index].float() / 255)


def test_draws_cover_their_ranges():
    draws = draw(Augmentation(pad=2), 4000, (6, 3), torch.Generator().manual_seed(0))
    for column in (0, 1):
        assert draws.shifts[:, column].unique().tolist() == [0, 1, 2, 3, 4]
    assert draws.centers[:, 0].unique().tolist() == [0, 1, 2, 3, 4, 5]
    assert draws.centers[:, 1].unique().tolist() == [0, 1, 2]
    assert draws.flips.dtype == torch.bool
    assert 0.45 < draws.flips.float().mean() < 0.55
    # Both shifts are drawn independently, and so are brightness and contrast.
    for pair in (draws.shifts, draws.levels):
        assert not torch.equal(pair[:, 0], pair[:, 1])
    levels = draws.levels / LEVELS
    assert levels.abs().max() <= 1
    assert (levels.min(0).values < -0.99).all()
    assert (levels.max(0).values > 0.99).all()


def test_crops_do_not_depend_on_flips_and_cutouts():
    found = [
        draw(how, 50, (8, 8), torch.Generator().manual_seed(3)).shifts
        for how in (Augmentation(pad=3), Augmentation(pad=3, flip=True, cutout=4, contrast=0.5))
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("mode", sorted(IN_NUMPY))
def test_augment_does_not_synchronize(mode: str):
    how = Augmentation(4, mode, True, 3, 0.1, 0.1)
    with FakeTensorMode():
        # Fake tensors have no values, so that reading one is an error.
        images = torch.empty(10, 3, 8, 8, dtype=torch.uint8)
        index, shifts = torch.empty(4, dtype=torch.long), torch.empty(4, 2, dtype=torch.long)
        found = augment(images, index, Draws(shifts, torch.empty(4, dtype=torch.bool), shifts, shifts), how)
    assert found.shape == (4, 3, 8, 8)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pad": -1}, "pad must be a whole number, 0 or more, not -1"),
        ({"cutout": -2}, "cutout must be a whole number, 0 or more, not -2"),
        ({"brightness": -0.1}, "brightness must be in [0, 1], not -0.1"),
        ({"contrast": 1.5}, "contrast must be in [0, 1], not 1.5"),
        ({"pad_mode": "mirror"}, "pad_mode must be one of symmetric, reflect, replicate, zeros, not 'mirror'"),
    ],
)
def test_values_are_checked(values: dict[str, object], message: str):
    assert sentence_of(lambda: Augmentation(**values)) == message


# --- batches ---


HOW = Augmentation(pad=2, flip=True, cutout=3, brightness=0.3, contrast=0.8)


def split(count: int = 23) -> Split:
    images = torch.randint(0, 256, (count, 3, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Split(images, torch.arange(count) * 7 % 10)


def tables(batches: Batches, steps: range) -> list[list[list[int]]]:
    return [batches.draws(step).table.tolist() for step in steps]


def test_hash_seed_is_fixed():
    # `printf 3/5 | sha256sum` starts with e8692ca200b54dda; the lowest byte comes first, and the lowest bit is dropped.
    assert hash_seed(3, 5) == 0xDA4DB500A22C69E8 >> 1


def test_sizes():
    batches = Batches(split(23), 4, HOW, seed=0)
    assert (batches.steps_per_epoch, batches.batch_size) == (5, 4)
    images, labels = batches.images(batches.draws(0))
    assert (images.shape, images.dtype) == ((4, 3, 6, 6), torch.float32)
    assert (labels.shape, labels.dtype) == ((4,), torch.int64)


def test_every_image_is_seen_once_in_an_epoch():
    batches = Batches(split(20), 4, HOW, seed=0)
    for epoch in range(3):
        seen = torch.cat([batches.draws(epoch * 5 + step).index for step in range(5)])
        assert sorted(seen.tolist()) == list(range(20))


def test_incomplete_batches_are_dropped_and_differ_by_epoch():
    batches = Batches(split(23), 4, HOW, seed=0)
    left = []
    for epoch in range(4):
        seen = {number for step in range(5) for number in batches.draws(epoch * 5 + step).index.tolist()}
        assert len(seen) == 20
        left.append(frozenset(range(23)) - seen)
    assert len(set(left)) > 1


def test_a_step_does_not_depend_on_earlier_steps():
    straight = tables(Batches(split(), 4, HOW, seed=5), range(15))
    assert tables(Batches(split(), 4, HOW, seed=5), range(7, 15)) == straight[7:]
    batches = Batches(split(), 4, HOW, seed=5)
    batches.draws(12)
    assert tables(batches, range(3, 4)) == straight[3:4]


def test_seeds_epochs_and_steps_differ():
    batches = Batches(split(), 4, HOW, seed=0)
    found = tables(batches, range(10)) + tables(Batches(split(), 4, HOW, seed=1), range(10))
    assert len({str(table) for table in found}) == 20
    first, second = (torch.tensor(found[start : start + 5]).flatten(0, 1) for start in (0, 5))
    # Neither the order nor the augmentation repeats in the next epoch.
    for columns in (slice(0, 1), slice(1, 3), slice(3, 4), slice(4, 6), slice(6, 8)):
        assert not torch.equal(first[:, columns], second[:, columns])


def test_alternate_flips_show_each_image_in_both_forms():
    how = dataclasses.replace(HOW, alternate_flips=True)
    batches = Batches(split(20), 4, how, seed=0)
    by_epoch = []
    for epoch in range(4):
        tables = [batches.draws(5 * epoch + step) for step in range(5)]
        flips = {int(i): bool(flip) for one in tables for i, flip in zip(one.index, one.draws.flips, strict=True)}
        by_epoch.append([flips[i] for i in range(20)])
    assert by_epoch[0] == by_epoch[2] == [not flip for flip in by_epoch[1]] == [not flip for flip in by_epoch[3]]
    assert 0 < sum(by_epoch[0]) < 20
    # Everything else is drawn as without alternation, and another seed flips other images.
    usual = Batches(split(20), 4, HOW, seed=0).draws(7).table
    assert torch.equal(batches.draws(7).table[:, [0, 1, 2, 4, 5]], usual[:, [0, 1, 2, 4, 5]])
    other = Batches(split(20), 20, how, seed=1).draws(0)
    assert [bool(flip) for _, flip in sorted(zip(other.index, other.draws.flips, strict=True))] != by_epoch[0]


@pytest.mark.parametrize("world", [2, 4])
def test_processes_split_the_global_batch(world: int):
    alone = Batches(split(), 8, HOW, seed=2)
    together = [Batches(split(), 8, HOW, seed=2, rank=rank, world=world) for rank in range(world)]
    assert {(part.batch_size, part.steps_per_epoch) for part in together} == {(8 // world, 2)}
    for step in range(5):
        images, labels = alone.images(alone.draws(step))
        parts = [part.images(part.draws(step)) for part in together]
        assert torch.equal(torch.cat([part[0] for part in parts]), images)
        assert torch.equal(torch.cat([part[1] for part in parts]), labels)


def test_images_and_labels_match_the_draws(device: str):
    batches = Batches(split().to(device), 4, HOW, seed=0)
    draws = batches.draws(3)
    assert draws.table.device.type == device
    images, labels = batches.images(draws)
    index = draws.index.cpu()
    assert torch.equal(labels.cpu(), split().labels[index])
    expected = augment(split().images, index, draws.draws.to("cpu"), HOW)
    torch.testing.assert_close(images.cpu(), expected, rtol=0, atol=1e-6)


def test_batches_do_not_depend_on_the_device(device: str):
    found = tables(Batches(split().to(device), 4, HOW, seed=0), range(7))
    assert found == tables(Batches(split(), 4, HOW, seed=0), range(7))


def test_draws_are_in_their_ranges():
    batches = Batches(split(), 4, HOW, seed=0)
    draws = [batches.draws(step).draws for step in range(50)]
    shifts, centers = (torch.cat([getattr(each, name) for each in draws]) for name in ("shifts", "centers"))
    assert (shifts.min(), shifts.max()) == (0, 4)
    assert (centers.min(), centers.max()) == (0, 5)
    assert {flip for each in draws for flip in each.flips.tolist()} == {True, False}


def test_copy_into_static_draws_leaves_the_epoch_unchanged():
    batches = Batches(split(), 4, HOW, seed=0)
    expected = tables(Batches(split(), 4, HOW, seed=0), range(2))
    static = batches.draws(0)
    memory = static.table.data_ptr()
    static.copy_(batches.draws(1))
    assert static.table.data_ptr() == memory
    assert static.table.tolist() == expected[1]
    assert batches.draws(0).table.tolist() == expected[0]
    other = static.clone()
    other.table.zero_()
    assert static.table.tolist() == expected[1]


def test_batch_draws_round_trip():
    batches = Batches(split(), 4, HOW, seed=0)
    draws = batches.draws(0)
    assert BatchDraws.of(draws.index, draws.draws).table.tolist() == draws.table.tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_cuda_graph_replays_batches():
    batches = Batches(split().to("cuda"), 4, HOW, seed=0)
    static = batches.draws(0).clone()
    batches.images(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        images, labels = batches.images(static)
    for step in (4, 6):
        static.copy_(batches.draws(step))
        graph.replay()
        expected = batches.images(batches.draws(step))
        assert torch.equal(images, expected[0])
        assert torch.equal(labels, expected[1])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_size": 24}, "batch_size must be from 1 to 23, the number of images, not 24"),
        ({"batch_size": 0}, "batch_size must be from 1 to 23, the number of images, not 0"),
        ({"world": 3}, "batch_size must be a multiple of the number of processes, 3, not 4"),
        ({"rank": 2, "world": 2}, "rank must be a whole number from 0 to 1, not 2"),
        ({"rank": -1}, "rank must be a whole number from 0 to 0, not -1"),
    ],
)
def test_sizes_are_checked(values: dict[str, int], message: str):
    given = {"split": split(), "batch_size": 4, "augmentation": HOW, "seed": 0, **values}
    assert sentence_of(lambda: Batches(**given)) == message


def test_steps_are_counted_from_zero():
    with pytest.raises(ValueError, match="step must be a whole number, 0 or more, not -1"):
        Batches(split(), 4, HOW, seed=0).draws(-1)
