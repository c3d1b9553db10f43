"""Augmentation against plain loops over images, with numpy's own padding."""

import numpy as np
import pytest
import torch
from data_files import sentence_of
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from dcnet.data import Augmentation, Draws, augmented, draw

IN_NUMPY = {"symmetric": "symmetric", "reflect": "reflect", "replicate": "edge", "zeros": "constant"}


def plain(image: np.ndarray, shift: tuple[int, int], flip: bool, centre: tuple[int, int], how: Augmentation):
    """One image [C, H, W], padded, cropped, flipped and cut out, one after the other."""
    _, height, width = image.shape
    pad = [(0, 0), (how.pad, how.pad), (how.pad, how.pad)]
    padded = np.pad(image, pad, mode=IN_NUMPY[how.pad_mode])
    found = padded[:, shift[0] : shift[0] + height, shift[1] : shift[1] + width]
    if how.flip and flip:
        found = found[:, :, ::-1]
    found = found.astype(np.float32) / np.float32(255)
    top, left = centre[0] - how.cutout // 2, centre[1] - how.cutout // 2
    for y in range(top, top + how.cutout):
        for x in range(left, left + how.cutout):
            if 0 <= y < height and 0 <= x < width:
                found[:, y, x] = 127.5 / 255
    return found


def in_loops(images: torch.Tensor, index: torch.Tensor, draws: Draws, how: Augmentation) -> torch.Tensor:
    rows = zip(index.tolist(), draws.shifts.tolist(), draws.flips.tolist(), draws.centres.tolist(), strict=True)
    found = [plain(images[number].numpy(), shift, flip, centre, how) for number, shift, flip, centre in rows]
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
def test_any_augmentation_is_what_the_loops_give(
    mode: str, pad: int, flip: bool, cutout: int, channels: int, height: int, width: int
):
    torch.manual_seed(0)
    how = Augmentation(pad, mode, flip, cutout)
    images, index = random_images(7, channels, height, width), torch.tensor([3, 0, 6, 6, 1])
    draws = draw(how, 5, (height, width), torch.Generator().manual_seed(1))
    found = augmented(images, index, draws, how)
    assert found.dtype == torch.float32
    assert torch.equal(found, in_loops(images, index, draws, how))


@pytest.mark.parametrize("mode", sorted(IN_NUMPY))
def test_every_shift_of_an_image(mode: str, device: str):
    how = Augmentation(pad=4, pad_mode=mode, flip=True, cutout=3)
    images = random_images(2, 3, 7, 5)
    shifts = torch.cartesian_prod(torch.arange(9), torch.arange(9)).repeat(2, 1)
    flips = torch.arange(len(shifts)) >= 81
    centres = torch.stack([torch.arange(len(shifts)) % 7, torch.arange(len(shifts)) % 5], dim=1)
    draws, index = Draws(shifts, flips, centres), torch.arange(len(shifts)) % 2
    found = augmented(images.to(device), index.to(device), draws.to(device), how).cpu()
    torch.testing.assert_close(found, in_loops(images, index, draws, how), rtol=0, atol=1e-7)


def test_no_augmentation_gives_the_images():
    images = random_images(4, 3, 5, 5)
    index = torch.tensor([2, 2, 0])
    draws = draw(Augmentation(), 3, (5, 5), torch.Generator())
    assert torch.equal(augmented(images, index, draws, Augmentation()), images[index].float() / 255)


def test_draws_reach_everything_and_nothing_else():
    draws = draw(Augmentation(pad=2), 4000, (6, 3), torch.Generator().manual_seed(0))
    for column in (0, 1):
        assert draws.shifts[:, column].unique().tolist() == [0, 1, 2, 3, 4]
    assert draws.centres[:, 0].unique().tolist() == [0, 1, 2, 3, 4, 5]
    assert draws.centres[:, 1].unique().tolist() == [0, 1, 2]
    assert draws.flips.dtype == torch.bool
    assert 0.45 < draws.flips.float().mean() < 0.55
    # Down and right are drawn apart.
    assert not torch.equal(draws.shifts[:, 0], draws.shifts[:, 1])


def test_crops_stay_where_flips_and_cutouts_come_and_go():
    found = [
        draw(how, 50, (8, 8), torch.Generator().manual_seed(3)).shifts
        for how in (Augmentation(pad=3), Augmentation(pad=3, flip=True, cutout=4))
    ]
    assert torch.equal(*found)


def test_draws_are_cut_by_rows():
    draws = draw(Augmentation(pad=3), 10, (8, 8), torch.Generator())
    part = draws[2:5]
    assert (len(draws), len(part)) == (10, 3)
    assert torch.equal(part.shifts, draws.shifts[2:5])
    assert torch.equal(part.flips, draws.flips[2:5])
    assert torch.equal(part.centres, draws.centres[2:5])


@pytest.mark.parametrize("mode", sorted(IN_NUMPY))
def test_no_shape_and_no_operation_depends_on_values(mode: str):
    how = Augmentation(4, mode, True, 3)
    with FakeTensorMode():
        # Without values, whatever asks for one is an error.
        images = torch.empty(10, 3, 8, 8, dtype=torch.uint8)
        index, shifts = torch.empty(4, dtype=torch.long), torch.empty(4, 2, dtype=torch.long)
        found = augmented(images, index, Draws(shifts, torch.empty(4, dtype=torch.bool), shifts), how)
    assert found.shape == (4, 3, 8, 8)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pad": -1}, "pad must be at least 0, not -1"),
        ({"cutout": -2}, "cutout must be at least 0, not -2"),
        ({"pad_mode": "mirror"}, "pad_mode must be one of symmetric, reflect, replicate, zeros, not 'mirror'"),
    ],
)
def test_values_are_checked(values: dict[str, object], message: str):
    assert sentence_of(lambda: Augmentation(**values)) == message
