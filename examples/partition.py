# SPDX-License-Identifier: Apache-2.0
"""Draw the cells that one query attends to with variant C: small near the target, large elsewhere.

    python examples/partition.py                       # writes partition.png
    python examples/partition.py --point 337 311 --topk 6 --out where.png

Queries and keys are the hand-made features of attend.py. Every cell contributes its mean key and
value, weighted by its number of tokens; the cells cover the image exactly once.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from attend import IMAGES, POINT, STRIDE, describe
from PIL import Image, ImageDraw
from torch import Tensor

from quadtree_attention import LevelSelection, quadtree_attention

LEVELS, SCALE, ENLARGED = 4, 30.0, 2
LOW, HIGH = np.array([154, 44, 255]), np.array([255, 242, 0])


def read(path: Path) -> tuple[Image.Image, Tensor]:
    """An image, cut to whole cells of the coarsest level, and features (1, h, w, 1, D)."""
    image = Image.open(path).convert("RGB")
    cell = STRIDE << (LEVELS - 1)
    image = image.crop((0, 0, image.width // cell * cell, image.height // cell * cell))
    rgb = torch.from_numpy(np.array(image)).float() / 255
    return image, describe(rgb)[None, :, :, None]


def partition(
    q: Tensor, k: Tensor, selection: tuple[LevelSelection, ...], at: tuple[int, int]
) -> list[tuple[int, int, int, float]]:
    """The cells (y, x, side, share) that the query `at` attends to, in cells of the finest map."""
    cells = [(int(y), int(x)) for y, x in torch.ones(*_mean(k, LEVELS - 1).shape[:2]).nonzero()]
    found = []
    for level in range(LEVELS):
        side = 2 ** (LEVELS - 1 - level)
        query = _mean(q, LEVELS - 1 - level)[at[0] // side, at[1] // side]
        keys = _mean(k, LEVELS - 1 - level)
        kept: set[tuple[int, int]] = set()
        if level < LEVELS - 1:
            own = selection[level].cells[0, at[0] // side, at[1] // side, 0]
            kept = {(y, x) for y, x in own.tolist() if y >= 0}
        for y, x in cells:
            if (y, x) not in kept:
                score = SCALE * float(query @ keys[y, x]) + 2 * float(np.log(side))
                found.append((y * side, x * side, side, score))
        cells = [(2 * y + i, 2 * x + j) for y, x in sorted(kept) for i in (0, 1) for j in (0, 1)]
    shares = torch.tensor([score for *_, score in found]).softmax(dim=0).tolist()
    return [(y, x, side, s) for (y, x, side, _), s in zip(found, shares, strict=True)]


def _mean(x: Tensor, up: int) -> Tensor:
    """Means (h, w, D) over cells of side 2**up of a map (1, H, W, 1, D)."""
    return F.avg_pool2d(x[0, :, :, 0].movedim(-1, 0), 2**up).movedim(0, -1)


def draw(image: Image.Image, cells: list[tuple[int, int, int, float]]) -> Image.Image:
    """The cells over the image, coloured by their share per token."""
    unit = STRIDE * ENLARGED
    picture = image.resize((image.width * ENLARGED, image.height * ENLARGED)).convert("RGBA")
    layer = Image.new("RGBA", picture.size)
    pen = ImageDraw.Draw(layer)
    densest = max(share / side**2 for *_, side, share in cells)
    for y, x, side, share in cells:
        warmth = (share / side**2 / densest) ** 0.3
        colour = tuple(int(c) for c in LOW + (HIGH - LOW) * warmth)
        box = (x * unit, y * unit, (x + side) * unit, (y + side) * unit)
        pen.rectangle(box, fill=(*colour, int(20 + 150 * warmth)), outline=(255, 255, 255, 150))
    return Image.alpha_composite(picture, layer).convert("RGB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--point", type=float, nargs=2, default=POINT, help="of the left image")
    parser.add_argument("--topk", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("partition.png"))
    options = parser.parse_args()
    (_, q), (image, k) = read(IMAGES / "left.jpg"), read(IMAGES / "right.jpg")
    at = int(options.point[1]) // STRIDE, int(options.point[0]) // STRIDE
    _, selection = quadtree_attention(
        q, k, k, num_levels=LEVELS, topk=options.topk, variant="C", scale=SCALE,
        return_selection=True,
    )  # fmt: skip
    draw(image, partition(q, k, selection, at)).save(options.out)
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
