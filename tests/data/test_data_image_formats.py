"""Image files from strangers: raster formats alone, whatever a file is called, and one sentence for damaged ones."""

import io
import os
import random
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
from data_files import sentence_of
from PIL import EpsImagePlugin, Image

from dcnet.cli.image_options import read_images
from dcnet.data import image as of_images
from dcnet.data.decode import read_rgb
from dcnet.data.image import seen_image

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


def test_no_program_is_started_for_a_file_that_is_called_a_photo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mark, photo, program = tmp_path / "ran", tmp_path / "photo.jpg", tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n: > {mark}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    photo.write_bytes(EPS)
    record = {"data": {"channels": 3, "image_size": 8}, "config": {"dataset": "imagefolder"}}
    in_training = sentence_of(lambda: read_rgb(photo))
    in_prediction = sentence_of(lambda: read_images([photo], record, invert=False))
    for told in (in_training, in_prediction):
        assert "photo.jpg" in told
        assert (
            "it is not an image, or a damaged one, in one of the formats JPEG, PNG, BMP, GIF, PPM, TIFF, WEBP" in told
        )
    assert not mark.exists()


@pytest.mark.parametrize("name", STRANGE)
def test_other_formats_are_one_sentence(name: str, tmp_path: Path):
    (tmp_path / "photo.jpg").write_bytes(STRANGE[name])
    assert "photo.jpg cannot be read as an image: it is not an" in sentence_of(lambda: read_rgb(tmp_path / "photo.jpg"))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP"])
def test_raster_formats_are_read_by_what_is_in_them(form: str, tmp_path: Path):
    (tmp_path / "photo.jpg").write_bytes(saved(form))
    assert seen_image(tmp_path / "photo.jpg").size == (24, 20)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "photo.jpg")
    assert "it is not a regular file" in sentence_of(lambda: read_rgb(tmp_path / "photo.jpg"))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP"])
def test_damaged_files_are_one_sentence_or_an_image(form: str, tmp_path: Path):
    chance, file = random.Random(form), tmp_path / "photo.jpg"
    whole = [saved(form), saved(form, "L"), saved(form, compression="tiff_lzw") if form == "TIFF" else saved(form)]
    for _ in range(150):
        content = bytearray(chance.choice(whole))
        for _ in range(chance.choice((1, 2, 20))):
            content[chance.randrange(min(len(content), chance.choice((40, 5000))))] = chance.choice((0, 127, 128, 255))
        file.write_bytes(content[: chance.choice((len(content), chance.randrange(len(content))))])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            told = outcome(file)
        assert told == "RGB" or told.startswith(f"{file} cannot be read as an image: ")
        assert "\n" not in told


def outcome(file: Path) -> str:
    try:
        return read_rgb(file).mode
    except ValueError as error:
        return str(error)


@pytest.fixture
def smaller_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than the pixels of the picture, and more than a quarter of them; Pillow's own limit warns before."""
    monkeypatch.setattr(of_images, "LARGEST", 200)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300)


@pytest.mark.usefixtures("smaller_limit")
@pytest.mark.filterwarnings("error")
def test_a_jpeg_beyond_the_limit_is_decoded_at_half_its_size_and_others_are_refused(tmp_path: Path):
    for form in ("JPEG", "PNG"):
        (tmp_path / form).write_bytes(saved(form))
    assert seen_image(tmp_path / "JPEG").size == (12, 10)
    told = sentence_of(lambda: read_rgb(tmp_path / "PNG"))
    assert "PNG cannot be read as an image: it has 24 x 20 pixels, and 200 is the limit: give a smaller one" in told


def test_tiles_count_as_pixels_do(tmp_path: Path):
    """They are decoded whole, however little of them the image shows."""
    tags = {256: 4, 257: 4, 258: 8, 259: 8, 262: 1, 277: 1, 322: 30000, 323: 30000, 324: 8, 325: 1}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    (tmp_path / "a.tif").write_bytes(b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + entries + bytes(4))
    told = sentence_of(lambda: read_rgb(tmp_path / "a.tif"))
    assert "it has tiles of 30000 x 30000 pixels, and 100,000,000 is the limit" in told
