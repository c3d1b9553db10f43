"""One image file as networks see it: upright and on black, and in prediction as in training."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from dcnet.cli.image_options import read_images
from dcnet.data import load_dataset
from dcnet.data.image import seen_image
from dcnet.verification import ImageFiles

UPRIGHT = np.random.default_rng(0).integers(0, 255, (6, 8, 3), np.uint8)
# What lies in a file whose image is to be seen as UPRIGHT, by the orientation in it.
LYING = {
    1: UPRIGHT,
    2: UPRIGHT[:, ::-1],
    3: UPRIGHT[::-1, ::-1],
    4: UPRIGHT[::-1],
    5: UPRIGHT.transpose(1, 0, 2),
    6: np.rot90(UPRIGHT),
    7: UPRIGHT[::-1, ::-1].transpose(1, 0, 2),
    8: np.rot90(UPRIGHT, -1),
}


def noted(orientation: int) -> Image.Exif:
    notes = Image.Exif()
    notes[ExifTags.Base.Orientation] = orientation
    return notes


def half_clear(mode: str) -> Image.Image:
    """White that is there in the left half, and in the right one only below what is transparent."""
    image = Image.new("RGBA", (8, 8), (255, 255, 255, 255))
    image.paste((255, 255, 255, 0), (4, 0, 8, 8))
    return image.convert(mode)


def seen_in_training(root: Path, file: str) -> torch.Tensor:
    """The image [3, 14, 14] of a file that is the only one of the test of a folder."""
    for part in ("train", "val"):
        (root / part / "one").mkdir(parents=True)
        (root / part / "one" / file).write_bytes((root / file).read_bytes())
    ((images, _),) = load_dataset("imagefolder", root).test_loader(1, size=14, workers=0)
    return images[0]


@pytest.mark.parametrize("suffix", ["png", "tif", "webp"])
@pytest.mark.parametrize("orientation", LYING)
def test_a_camera_that_was_turned_gives_upright_images(orientation: int, suffix: str, tmp_path: Path):
    file = tmp_path / f"photo.{suffix}"
    image = Image.fromarray(np.ascontiguousarray(LYING[orientation]))
    image.save(file, exif=noted(orientation), **({"lossless": True} if suffix == "webp" else {}))
    assert np.array_equal(np.asarray(seen_image(file)), UPRIGHT)
    scaled = np.asarray(Image.fromarray(UPRIGHT).resize((8, 8), Image.Resampling.BILINEAR))
    assert np.array_equal(ImageFiles(tmp_path, (file.name,), size=8)[0].permute(1, 2, 0).numpy(), scaled)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("notes", [b"", b"nothing", b"MM\x00*\x00\x00", b"Exif\x00\x00MM\x00*\xff\xff\xff\xff"])
def test_damaged_notes_leave_the_image_as_it_lies(notes: bytes, tmp_path: Path):
    Image.fromarray(UPRIGHT).save(tmp_path / "photo.png", exif=notes)
    assert np.array_equal(np.asarray(seen_image(tmp_path / "photo.png")), UPRIGHT)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P"])
def test_what_is_transparent_is_black(mode: str, tmp_path: Path):
    file = tmp_path / ("image.tif" if mode == "PA" else "image.png")
    if mode == "P":
        image = Image.new("P", (8, 8), 0)
        image.putpalette([255] * 6)
        image.paste(1, (4, 0, 8, 8))
        image.save(file, transparency=1)
    else:
        half_clear(mode).save(file)
    seen = np.asarray(seen_image(file))
    assert (seen[:, :4] == 255).all()
    assert (seen[:, 4:] == 0).all()


def test_half_transparent_is_half_as_bright(tmp_path: Path):
    Image.new("RGBA", (2, 2), (200, 100, 50, 51)).save(tmp_path / "glass.png")
    assert seen_image(tmp_path / "glass.png").getpixel((0, 0)) == (40, 20, 10)


def test_pixels_that_are_fractions_are_refused(tmp_path: Path):
    """They would be black, or white, by what the program that wrote them takes for the largest."""
    Image.fromarray(np.full((4, 4), 0.5, np.float32)).save(tmp_path / "half.tif")
    with pytest.raises(ValueError, match=r"half.tif' cannot be read as an image: its pixels are fractions, and not"):
        read_images([tmp_path / "half.tif"], {"data": {"channels": 1, "image_size": 4}}, invert=False)
    with pytest.raises(ValueError, match=r"half.tif cannot be read as an image: its pixels are fractions.* replace"):
        ImageFiles(tmp_path, ("half.tif",), 4)[0]


@pytest.mark.parametrize("file", ["turned.jpg", "clear.png", "deep.png"])
def test_prediction_sees_what_training_saw(file: str, tmp_path: Path):
    if file == "turned.jpg":
        Image.fromarray(UPRIGHT.repeat(8, 0).repeat(8, 1)).save(tmp_path / file, exif=noted(6))
    elif file == "clear.png":
        half_clear("RGBA").save(tmp_path / file)
    else:
        Image.fromarray(UPRIGHT[..., 0].astype(np.uint16) * 257).save(tmp_path / file)
    record = {"data": {"channels": 3, "image_size": 14}, "config": {"dataset": "imagefolder"}}
    (predicted,) = read_images([tmp_path / file], record, invert=False)
    assert torch.equal(predicted, seen_in_training(tmp_path, file))
    assert predicted.std() > 0.1
