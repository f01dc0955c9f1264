# SPDX-License-Identifier: Apache-2.0
"""Images that were named on the command line."""

import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from quadtree_attention.errors import DataError, QuadtreeAttentionError
from quadtree_attention.images import images_inside

STDIN = "-"


def expand(images: Sequence[str]) -> tuple[list[str], bool]:
    """The images that were named, those of a folder one by one; whether a folder has none."""
    paths: list[str] = []
    failed = False
    for image in images:
        folder = Path(image)
        try:
            paths += images_inside(folder) if image != STDIN and folder.is_dir() else [image]
        except DataError as error:
            failed = True
            complain(error)
    return paths, failed


def complain(error: QuadtreeAttentionError) -> None:
    tqdm.write(f"quadtree: {' '.join(str(error).split())}", file=sys.stderr)
