# SPDX-License-Identifier: Apache-2.0
"""Weights that come with the package have a card each."""

import pytest

from quadtree_attention.models.weights import file_sha256, read_card
from quadtree_attention.tasks.pretrained import PRETRAINED, pretrained_path
from tests.conftest import ROOT


@pytest.mark.parametrize("kind", PRETRAINED)
def test_card_tells_what_the_weights_are(kind):
    path = pretrained_path(kind)
    card = read_card(path)
    assert card["sha256"] == file_sha256(path)
    assert path.stat().st_size < 12e6
    assert {"recipe", "commands", "commit", "data", "metrics"} <= card.keys()
    assert all(data["terms"] for data in card["data"])
    assert (ROOT / card["recipe"]).is_file()
