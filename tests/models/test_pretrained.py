# SPDX-License-Identifier: Apache-2.0
"""Weights that come with the package have a card each."""

import pytest

from quadtree_attention.files import file_sha256
from quadtree_attention.models.registry import PRETRAINED, weights_path
from quadtree_attention.models.weights import read_card
from tests.conftest import ROOT


@pytest.mark.parametrize("name", PRETRAINED)
def test_card_tells_what_the_weights_are(name):
    path = weights_path(name)
    card = read_card(path)
    assert card["sha256"] == file_sha256(path)
    assert path.stat().st_size < 12e6
    assert {"recipe", "commands", "commit", "data", "metrics"} <= card.keys()
    assert all(data["terms"] for data in card["data"])
    assert (ROOT / card["recipe"]).is_file()
