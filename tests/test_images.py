# SPDX-License-Identifier: Apache-2.0
"""Images from files, bytes, arrays and tensors: every kind becomes the same RGB image."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="images need the extra 'models'")

from PIL import Image

from quadtree_attention.errors import DataError, DTypeError, ShapeError
from quadtree_attention.images import image_size, to_image
from tests.support import raises


def pixels(height: int = 70, width: int = 45, channels: int = 3) -> np.ndarray:
    """Coarse blocks of colour."""
    shape = (height // 10 + 1, width // 10 + 1, channels)
    blocks = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    return blocks.repeat(10, 0).repeat(10, 1)[:height, :width]


def saved(path: Path, image: Image.Image, **options: object) -> Path:
    image.save(path, **options)
    return path


def test_every_way_to_pass_an_image(tmp_path):
    array = pixels()
    path, tensor = saved(tmp_path / "a.png", Image.fromarray(array)), torch.from_numpy(array)
    tensor = tensor.permute(2, 0, 1)
    ways = [str(path), path, path.read_bytes(), array, array / 255, (array / 255).astype("f4")]
    ways += [array.astype(np.uint16) * 257, array.astype(">u2") * 257]
    ways += [tensor, tensor / 255, (tensor / 255).double()]
    ways += [np.dstack([array, np.full((70, 45), 255, np.uint8)]), Image.fromarray(array)]
    for way in ways:
        assert np.array_equal(np.asarray(to_image(way)), array)


UPRIGHT = {  # what an EXIF tag asks a viewer to do with the rows and columns that are stored
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a),
}


@pytest.mark.parametrize("tag", UPRIGHT)
def test_photos_are_turned_upright(tmp_path, tag):
    exif = Image.Exif()
    exif[0x0112] = tag
    for name in ("turned.png", "turned.jpg"):
        path = saved(tmp_path / name, Image.fromarray(pixels()), exif=exif)
        with Image.open(path) as opened:
            upright = UPRIGHT[tag](np.asarray(opened))
            assert np.array_equal(np.asarray(to_image(opened)), upright)
        assert np.array_equal(np.asarray(to_image(path)), upright)
        assert image_size(path) == upright.shape[1::-1]


def test_grey_of_8_16_and_32_bits_and_floats(tmp_path):
    grey = pixels(channels=1)[..., 0]
    deep = grey.astype(np.uint16) * 257
    paths = [
        saved(tmp_path / "grey.png", Image.fromarray(grey)),
        saved(tmp_path / "deep.png", Image.fromarray(deep)),
        saved(tmp_path / "wide.tiff", Image.fromarray(deep.astype(np.int32))),
        saved(tmp_path / "floats.tiff", Image.fromarray((grey / 255).astype(np.float32))),
    ]
    with Image.open(paths[1]) as opened:
        assert opened.mode.startswith("I")
    tensor = torch.from_numpy(grey)
    for way in (*paths, grey, grey[..., None], tensor, tensor[None]):
        assert np.array_equal(np.asarray(to_image(way)), np.stack([grey] * 3, axis=2))
    between = np.array([[0, 128, 129, 257, 32767, 65407, 65535]], np.uint16)
    assert np.asarray(to_image(between))[0, :, 0].tolist() == [0, 0, 1, 1, 127, 255, 255]
    bright = saved(tmp_path / "bright.tiff", Image.fromarray(grey.astype(np.float32)))
    raises(DataError, r"bright\.tiff: .* between 0 and 1, got \d", to_image, bright)
    for mode in ("1", "CMYK", "YCbCr", "LA"):
        assert to_image(Image.fromarray(pixels()).convert(mode)).mode == "RGB"


def test_transparent_becomes_white(tmp_path):
    colours = pixels(20, 30)
    alpha = np.zeros((20, 30), np.uint8)
    alpha[:, :10], alpha[:, 10:20] = 255, 128
    path = saved(tmp_path / "alpha.png", Image.fromarray(np.dstack([colours, alpha])))
    got = np.asarray(to_image(path)).astype(int)
    assert np.array_equal(got[:, :10], colours[:, :10])
    half = (colours[:, 10:20] * 128.0 + 255 * 127) / 255
    assert np.abs(got[:, 10:20] - half).max() <= 1
    assert (got[:, 20:] == 255).all()
    assert np.array_equal(np.asarray(to_image(np.dstack([colours, alpha]))), got)


def test_palette(tmp_path):
    image = Image.fromarray(pixels()).quantize(16)
    plain = saved(tmp_path / "plain.png", image)
    assert np.array_equal(np.asarray(to_image(plain)), np.asarray(image.convert("RGB")))
    first = image.getpixel((0, 0))
    holes = saved(tmp_path / "holes.png", image, transparency=first)
    got, hole = np.asarray(to_image(holes)), np.asarray(image) == first
    assert (got[hole] == 255).all()
    assert np.array_equal(got[~hole], np.asarray(image.convert("RGB"))[~hole])


@pytest.mark.parametrize(
    ("image", "error", "message"),
    [
        (np.zeros((3, 20, 30), np.uint8), ShapeError, r"\(H, W\), .*got \(3, 20, 30\)"),
        (torch.zeros(20, 30, 3), ShapeError, r"\(3, H, W\), got \(20, 30, 3\)"),
        (np.zeros(5, np.uint8), ShapeError, r"got \(5,\)"),
        (np.zeros((0, 4, 3), np.uint8), ShapeError, r"got \(0, 4, 3\)"),
        (np.zeros((5, 4, 3), np.int64), DTypeError, "uint8, uint16 or float, got int64"),
        (np.full((5, 4, 3), 255.0), DataError, "got 255 to 255; divide by 255"),
        (np.full((5, 4, 3), -0.5), DataError, "got -0.5 to -0.5"),
        (np.full((5, 4, 3), np.nan), DataError, "got nan to nan"),
        (7, DTypeError, "a path, bytes, a PIL image, an array or a tensor, got int"),
        (None, DTypeError, "got NoneType"),
    ],
)
def test_what_is_no_image(image, error, message):
    raises(error, message, to_image, image)


def jpeg() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels(200, 300)).save(buffer, "JPEG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it is empty"),
        (b"hello, this is no image\n", "it is not an image"),
        (jpeg()[:600], "damaged"),
        (jpeg()[:20], "it is not an image|damaged"),
    ],
)
def test_damaged_files_are_named(tmp_path, data, message):
    path = tmp_path / "bad.jpg"
    path.write_bytes(data)
    with pytest.raises(DataError, match=message) as caught:
        to_image(path)
    assert str(path) in str(caught.value) and "0x" not in str(caught.value)
    raises(DataError, "Is a directory", to_image, tmp_path)
