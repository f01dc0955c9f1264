# SPDX-License-Identifier: Apache-2.0
"""Banks of textures."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from quadtree_attention.errors import DataError, OptionError, ShapeError
from quadtree_attention.synthetic import MixedTextures, PhotoTextures, ProceduralTextures, Textures
from quadtree_attention.synthetic.textures import level_sizes
from tests.support import raises


def sample(textures, index, u, v, footprint=1.0):
    u, v = torch.as_tensor(u), torch.as_tensor(v)
    index = torch.full(u.shape, index)
    return textures.look_up(index, u, v, torch.full(u.shape, footprint))


@pytest.fixture
def bank():
    return Textures(torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8))


def test_between_texels_as_torch_does_it(bank):
    """Beyond the edges, too, where the mirror image follows."""
    image = bank.images()[2:].float() / 255
    u, v = torch.rand(2, 500) * 96 - 32
    grid = torch.stack([u, v], dim=-1)[None, None] / 16 - 1
    expected = F.grid_sample(image, grid, padding_mode="reflection", align_corners=False)[0, :, 0]
    assert torch.allclose(sample(bank, 2, u, v), expected, atol=1e-4)


def test_coarse_levels_are_means(bank):
    assert bank.sizes == level_sizes(32) == [32, 16, 8]
    image = bank.images()[1].float() / 255
    found = sample(bank, 1, [2.0], [6.0], footprint=4.0)
    assert torch.allclose(found[:, 0], image[:, 4:8, 0:4].mean(dim=(1, 2)), atol=2 / 255)
    fine, coarse = (sample(bank, 1, [3.1], [7.2], footprint=f) for f in (1.0, 2.0))
    between = sample(bank, 1, [3.1], [7.2], footprint=2**0.5)
    assert torch.allclose(between, (fine + coarse) / 2, atol=1e-5)


def test_not_textures():
    raises(OptionError, "count=0", ProceduralTextures, 0)
    for images in (torch.zeros(2, 3, 8, 9, dtype=torch.uint8), torch.zeros(2, 3, 8, 8)):
        raises(ShapeError, "square uint8 images", Textures, images)


def test_procedural_textures_follow_the_seed():
    few, many = ProceduralTextures(9, size=32), ProceduralTextures(17, size=32)
    assert torch.equal(few.images(), many.images()[:9])
    other = ProceduralTextures(9, size=32, seed=1)
    assert (few.images() != other.images()).float().flatten(1).mean(dim=1).min() > 0.5
    contrast = few.images().float().flatten(1).std(dim=1)
    assert contrast.min() > 1 and contrast.median() > 20


def test_mixed(bank):
    other = ProceduralTextures(2, size=32)
    mixed = MixedTextures(bank, other, other)
    assert len(mixed) == 7 and torch.equal(mixed.images()[3:5], other.images())
    message, small = r"one size to be mixed, got \[16, 32\]", ProceduralTextures(2, size=16)
    raises(OptionError, message, MixedTextures, bank, small)


def test_photographs(tmp_path):
    (tmp_path / "below").mkdir()
    left, right = (200, 10, 10), (10, 10, 200)
    wide = Image.new("RGB", (80, 40), left)
    wide.paste(right, (40, 0, 80, 40))
    wide.save(tmp_path / "a_wide.png")
    Image.new("L", (50, 50), 77).save(tmp_path / "below" / "b_grey.PNG")
    (tmp_path / "notes.txt").write_text("no photograph")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bank = PhotoTextures(tmp_path, size=16)
    assert len(bank) == 3 and bank.skipped == []
    assert bank.images()[0, :, 8, 8].tolist() == list(left)
    assert bank.images()[1, :, 8, 8].tolist() == list(right)
    assert (bank.images()[2] == 77).all()
    assert len(PhotoTextures(tmp_path, size=16, limit=1)) == 2


def test_damaged_photographs_are_reported_and_left_out(tmp_path):
    Image.new("RGB", (40, 40)).save(tmp_path / "good.jpg")
    (tmp_path / "empty.jpg").touch()
    cut = (tmp_path / "good.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(cut[: len(cut) // 2])
    with pytest.warns(UserWarning, match="2 photographs cannot be read and are left out"):
        bank = PhotoTextures(tmp_path, size=16)
    assert len(bank) == 1
    assert [line.split(":")[0].rsplit("/")[-1] for line in bank.skipped] == ["cut.jpg", "empty.jpg"]


def test_nothing_to_read(tmp_path):
    raises(DataError, "no photographs that can be read", PhotoTextures, tmp_path)
    (tmp_path / "bad.png").write_bytes(b"no image")
    raises(DataError, r"1 with a known suffix .* 1 of them unreadable", PhotoTextures, tmp_path)
    raises(DataError, "no folder of photographs at", PhotoTextures, tmp_path / "missing")
