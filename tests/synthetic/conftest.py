# SPDX-License-Identifier: Apache-2.0
import pytest

from quadtree_attention.synthetic import ProceduralTextures, Textures


@pytest.fixture(scope="session")
def textures() -> Textures:
    """One of each family, and small."""
    return ProceduralTextures(16, size=128)
