"""Decoding: upright images on black, the same for prediction and training; untrusted files."""

import io
import os
import random
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.data_files import sentence_of
from helpers.lfw_folder import write_image
from PIL import EpsImagePlugin, ExifTags, Image

from dcnet.data import decode, load_dataset
from dcnet.data.decode import open_image, read_rgb
from dcnet.training.image_input import ImageInput
from dcnet.verification import ImageFiles

UPRIGHT = np.random.default_rng(0).integers(0, 255, (6, 8, 3), np.uint8)
# The stored pixels of an image that is UPRIGHT when displayed, by EXIF orientation.
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
    """White, opaque in the left half and transparent in the right."""
    image = Image.new("RGBA", (8, 8), (255, 255, 255, 255))
    image.paste((255, 255, 255, 0), (4, 0, 8, 8))
    return image.convert(mode)


def seen_in_training(root: Path, file: str) -> torch.Tensor:
    """The image [3, 14, 14] of the only test file of a folder."""
    for part in ("train", "val"):
        (root / part / "one").mkdir(parents=True)
        (root / part / "one" / file).write_bytes((root / file).read_bytes())
    ((images, _),) = load_dataset("imagefolder", root).test_loader(1, size=14, workers=0)
    return images[0]


@pytest.mark.parametrize("suffix", ["png", "tif", "webp"])
@pytest.mark.parametrize("orientation", LYING)
def test_exif_orientation_is_applied(orientation: int, suffix: str, tmp_path: Path):
    file = tmp_path / f"photo.{suffix}"
    image = Image.fromarray(np.ascontiguousarray(LYING[orientation]))
    image.save(file, exif=noted(orientation), **({"lossless": True} if suffix == "webp" else {}))
    assert np.array_equal(np.asarray(open_image(file)), UPRIGHT)
    scaled = np.asarray(Image.fromarray(UPRIGHT).resize((8, 8), Image.Resampling.BILINEAR))
    assert np.array_equal(ImageFiles(tmp_path, (file.name,), size=8)[0].permute(1, 2, 0).numpy(), scaled)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("notes", [b"", b"nothing", b"MM\x00*\x00\x00", b"Exif\x00\x00MM\x00*\xff\xff\xff\xff"])
def test_damaged_exif_is_ignored(notes: bytes, tmp_path: Path):
    Image.fromarray(UPRIGHT).save(tmp_path / "photo.png", exif=notes)
    assert np.array_equal(np.asarray(open_image(tmp_path / "photo.png")), UPRIGHT)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P"])
def test_transparent_pixels_are_black(mode: str, tmp_path: Path):
    file = tmp_path / ("image.tif" if mode == "PA" else "image.png")
    if mode == "P":
        image = Image.new("P", (8, 8), 0)
        image.putpalette([255] * 6)
        image.paste(1, (4, 0, 8, 8))
        image.save(file, transparency=1)
    else:
        half_clear(mode).save(file)
    seen = np.asarray(open_image(file))
    assert (seen[:, :4] == 255).all()
    assert (seen[:, 4:] == 0).all()


def test_alpha_scales_brightness(tmp_path: Path):
    Image.new("RGBA", (2, 2), (200, 100, 50, 51)).save(tmp_path / "glass.png")
    assert open_image(tmp_path / "glass.png").getpixel((0, 0)) == (40, 20, 10)


def test_floating_point_pixels_are_rejected(tmp_path: Path):
    """Their range is unknown: they could become black or white."""
    Image.fromarray(np.full((4, 4), 0.5, np.float32)).save(tmp_path / "half.tif")
    with pytest.raises(ValueError, match=r"half.tif' cannot be read as an image: its pixels are floating"):
        ImageInput("L", 1, size=4, side=4, faces=False).read([tmp_path / "half.tif"])
    with pytest.raises(ValueError, match=r"half.tif cannot be read as an image: its pixels are floating.* replace"):
        ImageFiles(tmp_path, ("half.tif",), 4)[0]


@pytest.mark.parametrize("file", ["turned.jpg", "clear.png", "deep.png"])
def test_prediction_and_training_decode_alike(file: str, tmp_path: Path):
    if file == "turned.jpg":
        Image.fromarray(UPRIGHT.repeat(8, 0).repeat(8, 1)).save(tmp_path / file, exif=noted(6))
    elif file == "clear.png":
        half_clear("RGBA").save(tmp_path / file)
    else:
        Image.fromarray(UPRIGHT[..., 0].astype(np.uint16) * 257).save(tmp_path / file)
    (predicted,) = ImageInput("RGB", 3, size=14, side=16, faces=False).read([tmp_path / file])
    assert torch.equal(predicted, seen_in_training(tmp_path, file))
    assert predicted.std() > 0.1


# --- untrusted files: raster formats only, whatever the file name, and one sentence for damaged ones ---


PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 24, 3), np.uint8))
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
STRANGE = {
    "AVIF": b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miaf" + bytes(99),
    "BLP": b"BLP2" + b"\1\0\0\0\1\1\1\1" + b"\xff" * 200,
    "DDS": b"DDS \x7c\0\0\0" + b"\xff" * 200,
    "SPIDER": np.array([1, 1, 1, 0, 1] + [1] * 22, ">f4").tobytes() + b"\xff" * 200,
    "EPS": EPS,
    "text": b"no image",
    "nothing": b"",
}


def saved(form: str, mode: str = "RGB", **options: object) -> bytes:
    content = io.BytesIO()
    PICTURE.convert(mode).save(content, form, **options)
    return content.getvalue()


def test_decoding_starts_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mark, photo, program = tmp_path / "ran", tmp_path / "photo.jpg", tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n: > {mark}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    photo.write_bytes(EPS)
    in_training = sentence_of(lambda: read_rgb(photo))
    in_prediction = sentence_of(lambda: ImageInput("RGB", 3, size=8, side=9, faces=False).read([photo]))
    for message in (in_training, in_prediction):
        assert "photo.jpg" in message
        assert "it is not a valid image in one of the formats JPEG, PNG, BMP, GIF, PPM, TIFF, WEBP" in message
    assert not mark.exists()


@pytest.mark.parametrize("name", STRANGE)
def test_other_formats_are_rejected_in_one_sentence(name: str, tmp_path: Path):
    (tmp_path / "photo.jpg").write_bytes(STRANGE[name])
    assert "photo.jpg cannot be read as an image: it is not a valid image" in sentence_of(
        lambda: read_rgb(tmp_path / "photo.jpg")
    )


@pytest.mark.parametrize("form", ["JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP"])
def test_formats_are_detected_by_content(form: str, tmp_path: Path):
    (tmp_path / "photo.jpg").write_bytes(saved(form))
    assert open_image(tmp_path / "photo.jpg").size == (24, 20)


def test_a_pipe_is_rejected_without_waiting(tmp_path: Path):
    os.mkfifo(tmp_path / "photo.jpg")
    assert "it is not a regular file" in sentence_of(lambda: read_rgb(tmp_path / "photo.jpg"))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP"])
def test_damaged_files_raise_one_sentence_or_decode(form: str, tmp_path: Path):
    chance, file = random.Random(form), tmp_path / "photo.jpg"
    whole = [saved(form), saved(form, "L"), saved(form, compression="tiff_lzw") if form == "TIFF" else saved(form)]
    for _ in range(150):
        content = bytearray(chance.choice(whole))
        for _ in range(chance.choice((1, 2, 20))):
            content[chance.randrange(min(len(content), chance.choice((40, 5000))))] = chance.choice((0, 127, 128, 255))
        file.write_bytes(content[: chance.choice((len(content), chance.randrange(len(content))))])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            message = outcome(file)
        assert message == "RGB" or message.startswith(f"{file} cannot be read as an image: ")
        assert "\n" not in message


def outcome(file: Path) -> str:
    try:
        return read_rgb(file).mode
    except ValueError as error:
        return str(error)


@pytest.fixture
def smaller_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a quarter of the picture's pixels and all of them; above Pillow's own limit, which warns."""
    monkeypatch.setattr(decode, "MAX_PIXELS", 200)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300)


@pytest.mark.usefixtures("smaller_limit")
@pytest.mark.filterwarnings("error")
def test_large_jpegs_are_decoded_at_half_size_and_others_rejected(tmp_path: Path):
    for form in ("JPEG", "PNG"):
        (tmp_path / form).write_bytes(saved(form))
    assert open_image(tmp_path / "JPEG").size == (12, 10)
    message = sentence_of(lambda: read_rgb(tmp_path / "PNG"))
    assert "PNG cannot be read as an image: it has 24 x 20 pixels, and 200 is the limit: give a smaller one" in message


def test_tiles_count_as_pixels(tmp_path: Path):
    """Tiles are decoded as a whole, however small the image is."""
    tags = {256: 4, 257: 4, 258: 8, 259: 8, 262: 1, 277: 1, 322: 30000, 323: 30000, 324: 8, 325: 1}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    (tmp_path / "a.tif").write_bytes(b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + entries + bytes(4))
    message = sentence_of(lambda: read_rgb(tmp_path / "a.tif"))
    assert "it has tiles of 30000 x 30000 pixels, and 100,000,000 is the limit" in message


def test_image_files_are_read_on_access(tmp_path):
    write_image(tmp_path / "a/1.png", 1)
    files = ImageFiles(tmp_path, ("a/1.png", "a/2.png"), 12)
    expected = torch.from_numpy(np.array(Image.open(tmp_path / "a/1.png"))).permute(2, 0, 1)
    assert torch.equal(files[0], expected)
    write_image(tmp_path / "a/2.png", 2)
    (batch,) = files.batches()
    assert batch.shape == (2, 3, 12, 12)
    assert batch.dtype == torch.uint8
    assert [len(part) for part in files.batches(1)] == [1, 1]
    assert len(files) == 2


def test_image_files_crop_the_center(tmp_path):
    write_image(tmp_path / "a.png", 1, width=13, height=10)
    whole = np.array(Image.open(tmp_path / "a.png"))
    found = ImageFiles(tmp_path, ("a.png",), size=4, crop=4)[0]
    assert np.array_equal(found.permute(1, 2, 0).numpy(), whole[3:7, 4:8])
    resized = ImageFiles(tmp_path, ("a.png",), size=2, crop=4)[0]
    expected = Image.fromarray(whole[3:7, 4:8]).resize((2, 2), Image.Resampling.BILINEAR)
    assert np.array_equal(resized.permute(1, 2, 0).numpy(), np.array(expected))


def test_image_files_reject_images_smaller_than_the_crop(tmp_path):
    write_image(tmp_path / "a.png", 1, width=13, height=10)
    with pytest.raises(ValueError, match=r"a.png has 13 x 10 pixels: expected at least 11 x 11"):
        ImageFiles(tmp_path, ("a.png",), size=4, crop=11)[0]


def test_image_files_convert_grey_images_and_reject_broken_ones(tmp_path):
    Image.new("L", (4, 4), 7).save(tmp_path / "grey.png")
    (tmp_path / "broken.png").write_bytes(b"nothing")
    files = ImageFiles(tmp_path, ("grey.png", "broken.png", "missing.png"), 4)
    assert torch.equal(files[0], torch.full((3, 4, 4), 7, dtype=torch.uint8))
    for at in (1, 2):
        with pytest.raises(ValueError, match=f"{files.names[at]} cannot be read as an image"):
            files[at]


@pytest.mark.parametrize("options", [{"size": 0}, {"size": 4, "crop": 0}])
def test_image_files_reject_invalid_sizes(tmp_path, options):
    with pytest.raises(ValueError, match="must be a whole number, 1 or more, not 0"):
        ImageFiles(tmp_path, (), **options)
