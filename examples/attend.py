# SPDX-License-Identifier: Apache-2.0
"""Draw the cells of one image that a point of another image attends to.

Both images are divided into cells of 4 pixels with hand-made features (gradients and colours), so
that nothing is trained or downloaded. Every cell of IMAGE0 attends to IMAGE1; the values are the
positions of the cells, so that the result of a query is a position in IMAGE1.

    python examples/attend.py
    python examples/attend.py left.jpg right.jpg --point 320 200 --topk 16 --out where.png
"""

import argparse
import io
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PatchCollection
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from PIL import Image, ImageOps
from torch import Tensor

from quadtree_attention import LevelSelection, quadtree_attention

IMAGES = Path(__file__).resolve().parent / "images"
POINT = (337.0, 311.0)  # the letter box in the shipped pair
WORKING_SIDE = 512  # larger images are downscaled
STRIDE = 4  # pixels per finest cell
SCALE = 60.0  # of products of unit vectors; large, for a concentrated softmax
CYAN = "#00e5ff"
RIM = withStroke(linewidth=3, foreground="black", alpha=0.6)
FRAME: dict[str, Any] = {"fill": False, "ec": CYAN, "lw": 1.3, "path_effects": [RIM]}
HEAT = LinearSegmentedColormap.from_list("heat", ["#9a2cff", "#ff2f92", "#ff9d00", "#fff200"])
SHARE = PowerNorm(0.5, 0, 1)  # shows small shares, too


def fail(message: str) -> NoReturn:
    """Ends the program with one line about an invalid input."""
    print("attend:", " ".join(message.split()), file=sys.stderr)
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(f"{message}; see --help")


class Picture(NamedTuple):
    name: str
    size: Tensor  # (2,) width and height of the file
    working_size: Tensor  # (2,) the same after downscaling
    rgb: Tensor  # (H, W, 3) in [0, 1], of the working size


class Look(NamedTuple):
    """Candidates of one query at one level; cells are (n, 2) in (y, x) order."""

    grid: tuple[int, ...]
    cell: int  # its side in pixels
    candidates: Tensor  # cells that the query is compared with
    kept: Tensor  # kept cells; at the finest level all candidates
    scores: Tensor  # (n,) attention of the kept cells

    def __str__(self) -> str:
        compared, total = len(self.candidates), math.prod(self.grid)
        count = f"all {total:,}" if compared == total else f"{compared:,} of {total:,}"
        return f"{count} compared" + (f", {len(self.kept)} kept" if self.cell > STRIDE else "")


def load(path: Path) -> Picture:
    """Reads an image of any size and mode, with its EXIF orientation, on a white background."""
    try:
        with Image.open(path) as file:
            image = ImageOps.exif_transpose(file)
        if image.mode.startswith(("I", "F")):  # 16 or 32 bits: stretched from black to white
            deep = np.nan_to_num(np.asarray(image, dtype=np.float64))
            deep = (deep - deep.min()) / max(np.ptp(deep), 1e-12)
            image = Image.fromarray((255 * deep).astype(np.uint8))
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("RGB")
    except FileNotFoundError:
        fail(f"no image file at {path}; give the path of a JPEG or PNG file")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        fail(f"cannot read {path} as an image ({error}); give a JPEG or PNG file")
    size = torch.tensor(image.size)
    image.thumbnail((WORKING_SIDE, WORKING_SIDE), Image.Resampling.LANCZOS)
    rgb = torch.from_numpy(np.array(image)).float() / 255
    return Picture(path.name, size, torch.tensor(image.size), rgb)


def describe(rgb: Tensor) -> Tensor:
    """Unit vectors (h, w, 63) for the cells of an image (H, W, 3): the gradients and colours at
    3x3 places around each.
    """
    red, green, blue = rgb.unbind(-1)
    grey = rgb.mean(dim=-1)
    padded = F.pad(grey[None, None], (1, 1, 1, 1), mode="replicate")[0, 0]
    dx = padded[1:-1, 2:] - padded[1:-1, :-2]
    dy = padded[2:, 1:-1] - padded[:-2, 1:-1]
    edges = torch.stack([dx, -dx, dy, -dy]).clamp(min=0).sqrt()  # (4, H, W): a soft histogram
    colors = torch.stack([red - green, blue - (red + green) / 2, grey])  # (3, H, W)
    parts = []
    for maps in (edges, colors):
        cells = F.avg_pool2d(maps[None], STRIDE, ceil_mode=True)  # (1, C, h, w)
        for width in (5, 3):  # smooth, so that means of several cells remain distinctive
            cells = F.avg_pool2d(F.pad(cells, (width // 2,) * 4, mode="replicate"), width, 1)
        around = F.unfold(F.pad(cells, (6,) * 4, mode="replicate"), 3, dilation=6)[0]  # (9C, hw)
        around = around - around.mean(dim=1, keepdim=True)  # invariant to exposure and tint
        parts.append(around / around.norm(dim=0).mean().clamp(min=1e-6))
    return F.normalize(torch.cat(parts), dim=0).T.view(*cells.shape[-2:], -1)


def centers(rgb: Tensor) -> Tensor:
    """Centres of the cells: (h, w, 2) as (x, y), relative to the image's width and height."""
    y, x = ((torch.arange(n) + 0.5) / n for n in rgb.shape[:2])
    pixels = torch.stack(torch.meshgrid(x, y, indexing="xy"))  # (2, H, W)
    return F.avg_pool2d(pixels, STRIDE, ceil_mode=True).movedim(0, -1)


def follow(
    q: Tensor, k: Tensor, selection: tuple[LevelSelection, ...], at: tuple[int, int], variant: str
) -> list[Look]:
    """Candidates of the query at the finest cell `at` (y, x), coarse -> fine."""
    finest = len(selection)
    grids = [tuple(-(-n >> up) for n in k.shape[:2]) for up in range(finest, -1, -1)]
    # Candidates with the same parent are a family: (families, members, 2).
    families = torch.ones(grids[0]).nonzero()[None]
    inside = torch.ones(families.shape[:2], dtype=torch.bool)
    parent_scores = torch.ones(1)
    looks = []
    for level, (cells, scores) in enumerate(selection):
        up = finest - level  # a query shares the selection of its ancestor
        kept, parent_scores = (x[0, at[0] >> up, at[1] >> up, 0] for x in (cells, scores))
        kept, parent_scores = (x[kept[:, 0] >= 0] for x in (kept, parent_scores))
        looks.append(Look(grids[level], STRIDE << up, families[inside], kept, parent_scores))
        families = 2 * kept[:, None] + torch.ones(2, 2).nonzero()
        inside = (families < torch.tensor(grids[level + 1])).all(dim=-1)
    # The operator returns the scores of kept cells; those of the finest level are computed here.
    candidates = families[inside]
    logits = torch.full(inside.shape, -torch.inf)
    logits[inside] = SCALE * k[tuple(candidates.T)] @ q[at]
    if variant == "A":
        scores = (logits.softmax(dim=1) * parent_scores[:, None])[inside]
    else:
        scores = logits[inside].softmax(dim=0)
    return [*looks, Look(grids[finest], STRIDE, candidates, candidates, scores)]


def show(axes: Axes, rgb: Tensor, title: str = "", note: str = "") -> None:
    axes.imshow(rgb.numpy(), extent=(0, rgb.shape[1], rgb.shape[0], 0), interpolation="bilinear")
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.set_title(note, loc="right", fontsize=10, color="#444444")


def close_up(axes: Axes, x: float, y: float, aspect: float) -> Rectangle:
    """Marks a point, zooms the panel to its neighbourhood and returns the frame of it."""
    width, height = 17 * STRIDE, 17 * STRIDE * aspect
    axes.plot(x, y, "o", color=CYAN, markersize=7, markeredgecolor="black")
    axes.set(xlim=(x - width / 2, x + width / 2), ylim=(y + height / 2, y - height / 2))
    return Rectangle((x - width / 2, y - height / 2), width, height, **FRAME)


def draw_kept(axes: Axes, look: Look, size: Tensor, alpha: float) -> None:
    """The kept cells, clipped to the image and coloured by score, the best on top."""
    share, order = (look.scores / look.scores.max().clamp(min=1e-12)).sort()
    if len(share) > 1000:  # dense attention: thousands of cells with almost no attention
        share, order = share[share > 0.01], order[share > 0.01]
    start = look.kept[order].flip(-1) * look.cell  # (n, 2) as (x, y)
    sides = (size - start).clamp(max=look.cell)
    pairs = zip(start.tolist(), sides.tolist(), strict=True)
    boxes = [Rectangle((x, y), width, height) for (x, y), (width, height) in pairs]
    colors = HEAT(SHARE(share.numpy()))
    axes.add_collection(PatchCollection(boxes, facecolor=colors, alpha=alpha))
    axes.add_collection(PatchCollection(boxes, facecolor="none", edgecolor=colors, linewidth=1.5))


def draw(
    source: Picture, target: Picture, point: Tensor, result: Tensor, looks: list[Look]
) -> Figure:
    """Draws the query, candidates and kept cells of each level, and the result close up.

    `point` and `result` are (x, y) relative to the width and the height of their images.
    """
    columns = {1: 3, 2: 2}.get(len(looks), 3 if len(looks) <= 4 else 4)
    rows = -(-(len(looks) + 2) // columns)
    aspects = [float(picture.size[1] / picture.size[0]) for picture in (source, target)]
    height = rows * (3.86 * min(max(*aspects, 0.3), 2) + 0.36) + 0.42
    figure = Figure(figsize=(4 * columns + 0.7, height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    first, *panels = grid.flat

    x, y = (point * source.size).tolist()
    show(first, source.rgb, f"query at ({x:.0f}, {y:.0f})", "its cell at every level")
    corner = (0.02 if point[0] > 0.5 else 0.58, 0.58 if point[1] > 0.5 else 0.02)
    inset = first.inset_axes((*corner, 0.4, 0.4), xticks=[], yticks=[])
    inset.spines[:].set(color="white", linewidth=2)
    show(inset, source.rgb)
    x, y = (point * source.working_size).tolist()
    close_up(inset, x, y, aspects[0])
    for axes, side in [(first, looks[0].cell), *((inset, look.cell) for look in looks)]:
        axes.add_patch(Rectangle((x // side * side, y // side * side), side, side, **FRAME))

    faded = 0.55 * target.rgb.mean(dim=-1, keepdim=True) + 0.4
    for level, (axes, look) in enumerate(zip(panels, looks, strict=False)):
        seen = torch.zeros(look.grid)
        seen[tuple(look.candidates.T)] = 0.7
        seen = seen.repeat_interleave(look.cell, 0).repeat_interleave(look.cell, 1)[..., None]
        seen = seen[: target.rgb.shape[0], : target.rgb.shape[1]]
        lit = seen * target.rgb + (1 - seen) * faded
        show(axes, lit, f"level {level}: {look.cell} px cells", str(look))
        draw_kept(axes, look, target.working_size, alpha=0.45)

    last, close = panels[len(looks) - 1 : len(looks) + 1]
    x, y = (result * target.size).tolist()
    show(close, target.rgb, f"result at ({x:.0f}, {y:.0f})", f"level {len(looks) - 1} close up")
    draw_kept(close, looks[-1], target.working_size, alpha=0.3)
    x, y = (result * target.working_size).tolist()
    last.add_patch(close_up(close, x, y, aspects[1]))
    bar = figure.colorbar(ScalarMappable(SHARE, HEAT), ax=grid, shrink=0.5, aspect=24, pad=0.015)
    bar.set_ticks([0, 0.25, 1], labels=["0", "¼", "1"])
    bar.set_label("attention, best cell of the level = 1")
    compared, total = sum(len(look.candidates) for look in looks), math.prod(looks[-1].grid)
    headline = f"One query is compared with {compared:,} cells"
    headline += f" instead of {total:,}" if compared < total else ""
    figure.suptitle(headline, fontsize=15, fontweight="bold")
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes the picture atomically."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=130, bbox_inches="tight")
    image = Image.open(buffer).convert("RGB")
    # A palette of 256 colours reduces the size of the file to a third.
    palette = image.reduce(3).quantize(256, method=Image.Quantize.MAXCOVERAGE, kmeans=3)
    part = path.with_name(f".{os.getpid()}.part.png")
    try:
        image.quantize(palette=palette).save(part, optimize=True)
        part.replace(path)
    except OSError as error:
        fail(f"cannot write {path} ({error.strerror or error}); choose another --out")
    finally:
        if part.is_file():
            part.unlink()


def parse() -> argparse.Namespace:
    """Reads the options and checks those that need no image."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="attend", description=__doc__, formatter_class=raw)
    option = parser.add_argument
    text = "the image with the query (default: the pair in examples/images)"
    option("image0", nargs="?", type=Path, metavar="IMAGE0", help=text)
    text = "the image it attends to; the sizes may differ"
    option("image1", nargs="?", type=Path, metavar="IMAGE1", help=text)
    text = "the query, in pixels of IMAGE0 (default: its centre; in the default pair a box)"
    option("--point", nargs=2, type=float, metavar=("X", "Y"), help=text)
    text = "cells that a query keeps at each level, 1 or more (default: 8)"
    option("--topk", type=int, default=8, metavar="K", help=text)
    text = "levels, 1 (dense attention) to 7; the coarsest cells have 4 * 2**(L-1) px (default: 4)"
    option("--num-levels", type=int, default=4, choices=range(1, 8), metavar="L", help=text)
    text = "B: the result is that of the finest level; A: cells that are not kept contribute, too, "
    text += "which moves the result towards the centre (default: B)"
    option("--variant", choices=("A", "B"), default="B", help=text)
    text = "the picture to write, a .png file (default: selection.png)"
    option("--out", type=Path, default=Path("selection.png"), metavar="FILE", help=text)
    args = parser.parse_args()
    if args.image0 and not args.image1:
        fail(f"got one image, {args.image0}; give two, or none for the shipped pair")
    if args.topk < 1:
        fail(f"--topk must be 1 or more, got {args.topk}")
    folder = os.path.isdir(args.out) or not os.path.isdir(args.out.parent)
    if args.out.suffix.lower() != ".png" or folder:
        fail(f"--out must be a .png file in a folder that exists, got {args.out}")
    return args


def main() -> None:
    args = parse()
    shipped = args.image0 is None
    source = load(IMAGES / "left.jpg" if shipped else args.image0)
    target = load(IMAGES / "right.jpg" if shipped else args.image1)
    point = torch.tensor(args.point or (POINT if shipped else (source.size / 2).tolist()))
    if not bool(((point >= 0) & (point < source.size)).all()):
        (x, y), (width, height) = point.tolist(), source.size.tolist()
        accepted = f"0 <= X < {width} and 0 <= Y < {height}"
        fail(f"--point {x:g} {y:g} is outside {source.name}; accepted: {accepted}")
    share = point / source.size

    q, k, v = describe(source.rgb), describe(target.rgb), centers(target.rgb)
    finest_only = torch.tensor([-50.0] * (args.num_levels - 1) + [0.0])  # logits of the mix
    start = time.perf_counter()
    with torch.inference_mode():
        out, selection = quadtree_attention(
            *(maps[None, :, :, None] for maps in (q, k, v)),  # (1, h, w, 1, D)
            num_levels=args.num_levels,
            topk=args.topk,
            variant=args.variant,
            level_weights=finest_only if args.variant == "B" else None,
            scale=SCALE,
            return_selection=True,
        )
    seconds = time.perf_counter() - start

    column, row = (share * source.working_size / STRIDE).long().tolist()
    result = out[0, row, column, 0]
    looks = follow(q, k, selection, (row, column), args.variant)
    save(draw(source, target, share, result, looks), args.out)
    for picture, (rows, columns, _) in ((source, q.shape), (target, k.shape)):
        width, height = picture.size.tolist()
        print(f"{picture.name}: {width}x{height} px, {columns}x{rows} cells")
    for level, look in enumerate(looks):
        print(f"level {level}: {look.cell} px cells, {look}")
    compared = sum(len(look.candidates) for look in looks)
    print(f"together: {compared:,} compared, {math.prod(looks[-1].grid):,} by dense attention")
    (x, y), (to_x, to_y) = point.tolist(), (result * target.size).tolist()
    print(f"result: ({x:.1f}, {y:.1f}) attends to ({to_x:.1f}, {to_y:.1f})")
    print(f"time: {seconds:.2f} s for all {math.prod(q.shape[:2]):,} queries")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
