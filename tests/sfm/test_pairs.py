# SPDX-License-Identifier: Apache-2.0
"""Which pairs are matched."""

import torch

from quadtree_attention.errors import DataError
from quadtree_attention.sfm import PairMatcher, pairs
from quadtree_attention.sfm.photos import read_photos
from tests.support.commands import refusal
from tests.support.scene import write_photographs
from tests.support.tiny import picture


def test_exhaustive_and_sequential():
    assert pairs.exhaustive(3) == [(0, 1), (0, 2), (1, 2)]
    assert pairs.sequential(6, 1) == [
        (0, 1), (0, 2), (0, 4), (1, 2), (1, 3), (1, 5), (2, 3), (2, 4), (3, 4), (3, 5), (4, 5),
    ]  # fmt: skip
    assert (0, 3) in pairs.sequential(9, 3) and (0, 4) not in pairs.sequential(9, 3)


def test_nearest_by_descriptor():
    descriptors = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
    assert pairs.nearest(descriptors, 1) == [(0, 1), (2, 3)]
    assert len(pairs.nearest(descriptors, 9)) == 6


def test_photographs_of_the_same_ground_are_alike(tmp_path):
    write_photographs(tmp_path, 3, arc=0.6)
    for i in range(3):
        picture(i, (256, 192)).save(tmp_path / f"x{i}.png")
    matcher = PairMatcher.from_pretrained(device="cpu")
    descriptors = pairs.describe(matcher, read_photos(tmp_path).used)
    torch.testing.assert_close(descriptors.norm(dim=1), torch.ones(6))
    assert set(pairs.nearest(descriptors[:4], 2)) >= {(0, 1), (0, 2), (1, 2)}
    again = pairs.describe(matcher, read_photos(tmp_path).used)
    assert torch.equal(descriptors, again)


def test_a_file_of_pairs(tmp_path):
    write_photographs(tmp_path / "photos", 3)
    photos = read_photos(tmp_path / "photos").used
    listed = tmp_path / "pairs.txt"
    listed.write_text("02.png 00.png\n00.png 02.png\n01.png 02.png\n")
    assert pairs.listed(photos, listed, tmp_path / "photos") == [(0, 2), (1, 2)]
    listed.write_text("00.png 07.png\n")
    told = refusal(DataError, pairs.listed, photos, listed, tmp_path / "photos")
    assert "names 07.png" in told
