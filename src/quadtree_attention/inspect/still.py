# SPDX-License-Identifier: Apache-2.0
"""Pictures of recorded attention: scores of a query at every level, and curves of mass over K."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import nn

from quadtree_attention import checks
from quadtree_attention.errors import OptionError
from quadtree_attention.files import StrPath
from quadtree_attention.images import Array, ImageLike, to_image
from quadtree_attention.inspect.attention import Attention
from quadtree_attention.models.topk import quadtree_layers
from quadtree_attention.viz.canvas import cut, save_picture
from quadtree_attention.viz.palette import BACKGROUND, CONFIDENCE, FAINT, TEXT, ramp, text_on

if TYPE_CHECKING:
    from quadtree_attention.inspect.calibrate import Calibration
    from quadtree_attention.inspect.recorder import Layer, Record

WIDTH, GAP, TITLE, MARGIN = 300, 8, 24, 14  # width of panels in pixels
BARS, ROW = 900, 26  # width and row height of the bars of level weights
QUERY = (255, 255, 255)
DIMMED = 0.25  # brightness of cells that are not candidates
BAND = 12  # half the height of a row of the stereo network, in pixels


def images_of(images: "ImageLike | Sequence[ImageLike]") -> list[Image.Image]:
    """Return one or two RGB images."""
    given: list[Any] = list(images) if isinstance(images, list | tuple) else [images]
    if len(given) not in (1, 2):
        raise OptionError(f"images must be one image or two, got {len(given)}; pass one or two")
    return [to_image(image) for image in given]


def default_layers(record: "Record", images: int) -> list[str]:
    """Return the names of the last self and, for two images, cross attention; quadtree first.

    Raises:
        OptionError: Nothing was recorded.
    """
    seen = [name for name, layer in record.items() if len(layer) and not _is_window(layer)]
    if not seen:
        raise OptionError("nothing was recorded; call the model while record(model) is open")
    quadtree = [name for name in seen if record[name].kind == "quadtree"] or seen
    most = max(record[name].num_levels for name in quadtree)  # coarse stages have few levels
    quadtree = [name for name in quadtree if record[name].num_levels == most]
    selves = [name for name in quadtree if not record[name].cross]
    crosses = [name for name in quadtree if record[name].cross]
    return selves[-1:] + (crosses[-1:] if images == 2 else [])


def _is_window(layer: "Layer") -> bool:
    """Return True for a layer on windows around matches, not on maps of the images."""
    return layer.name.startswith("fine_transformer")


def sample_of(layer: "Layer", place: int, rows: int, row: int) -> Attention:
    """Return the attention of an image, or of one of its rows."""
    first = layer[0]
    return layer[place * rows + row] if len(first.grid) == 1 else layer[place]


def rows_of(layer: "Layer", images: int) -> int:
    """Return the number of rows of an image whose rows are samples, otherwise 1."""
    return len(layer) // images if len(layer[0].grid) == 1 else 1


def draw_record(
    record: "Record",
    images: "ImageLike | Sequence[ImageLike]",
    at: tuple[float, float],
    path: StrPath | None = None,
    *,
    layers: Sequence[str] | None = None,
    head: int | None = None,
    sample: int = 0,
) -> Image.Image:
    """See `Record.draw`."""
    return draw_records({"": record}, images, at, path, layers=layers, head=head, sample=sample)


def draw_records(
    records: "Mapping[str, Record]",
    images: "ImageLike | Sequence[ImageLike]",
    at: tuple[float, float],
    path: StrPath | None = None,
    *,
    layers: Sequence[str] | None = None,
    head: int | None = None,
    sample: int = 0,
) -> Image.Image:
    """Draw several records of the same images, one below the other.

    Args:
        records: Records by name of the network.
        images: As for `Record.draw`.
        at: As for `Record.draw`.
        path: As for `Record.draw`.
        layers: Layers of the first record; the other records show their default layers.
        head: As for `Record.draw`.
        sample: As for `Record.draw`.
    """
    shown = images_of(images)
    check_point(at, shown[0])
    rows = []
    for number, (network, record) in enumerate(records.items()):
        names = default_layers(record, len(shown))
        if layers is not None and number == 0:
            names = list(layers)
        for name in names:
            checks.known(name, list(record), "a recorded layer")
            title, panels = _row(record[name], shown, at, head, sample)
            rows.append((f"{network}   {title}" if len(records) > 1 else title, panels))
    picture = stacked(rows)
    if path is not None:
        save_picture(picture, path)
    return picture


def check_point(at: tuple[float, float], image: Image.Image) -> None:
    """Raise `OptionError` for a point outside the image."""
    x, y = at
    if not (0 <= x < image.width and 0 <= y < image.height):
        raise OptionError(
            f"the point {x:g},{y:g} is outside of the image of {image.width}x{image.height} pixels;"
            f" x must be from 0 to {image.width - 1}, y from 0 to {image.height - 1}"
        )


def _row(
    layer: "Layer",
    images: Sequence[Image.Image],
    at: tuple[float, float],
    head: int | None,
    sample: int,
) -> tuple[str, list[tuple[str, Image.Image]]]:
    """Return title and panels of a layer."""
    if not len(layer):
        raise OptionError(f"{layer.name} was not called while record(model) was open; call it")
    one, cell, band = query_of(layer, images, at, sample)
    if head is not None and not 0 <= head < one.heads:
        raise OptionError(f"head must be from 0 to {one.heads - 1}, got {head}; leave it out")
    target = images[-1] if layer.cross else images[0]
    panels = [("query", _query_panel(images[0], one, cell, band))]
    if one.kind == "quadtree":
        for level, (scores, looked, kept) in enumerate(one.maps(cell, head)):
            sizes = " x ".join(map(str, scores.shape))
            words = f"level {level}: {sizes} cells"
            if level < len(one.level_weights) and one.variant == "B":
                words += f", {100 * one.level_weights[level]:.0f} % of the message"
            side = 2 ** (one.num_levels - 1 - level)
            full = [n / side for n in one.key_grid]
            panels.append((words, _panel(target, scores, looked, kept, band, full)))
    number = int(np.ravel_multi_index(cell, one.grid))
    dense = one.dense(torch.tensor([number]))[0]  # (N, *key_grid)
    dense = dense.mean(dim=0) if head is None else dense[head]
    words = "full attention, same queries and keys"
    if one.kind != "quadtree":
        sizes = " x ".join(map(str, one.key_grid))
        words = f"{'linear attention' if one.kind == 'linear' else 'attention'}: {sizes} cells"
    whole = torch.ones_like(dense)
    panels.append((words, _panel(target, dense, whole, None, band, one.key_grid)))
    what = "mean of heads" if head is None else f"head {head}"
    title = f"{layer.name}   {'cross' if layer.cross else 'self'} attention   {what}"
    return title + (f"   K = {', '.join(map(str, one.topk))}" if one.topk else ""), panels


def query_of(
    layer: "Layer", images: Sequence[Image.Image], at: tuple[float, float], sample: int = 0
) -> tuple[Attention, tuple[int, ...], float | None]:
    """Return the attention at a point, its finest cell, and the height of its row in [0, 1]."""
    rows = rows_of(layer, max(1, len(images)))
    row = min(rows - 1, int(at[1] / images[0].height * rows))
    one = sample_of(layer, sample, rows, row)
    places = (at[1] / images[0].height, at[0] / images[0].width)[2 - len(one.grid) :]
    cell = tuple(min(n - 1, int(place * n)) for place, n in zip(places, one.grid, strict=True))
    return one, cell, None if len(one.grid) == 2 else (row + 0.5) / rows


def _query_panel(
    image: Image.Image, one: Attention, cell: Sequence[int], band: float | None
) -> Image.Image:
    """Return the image with the cells of the query at every level outlined."""
    picture = _shrunk(image)
    pen = ImageDraw.Draw(picture)
    for level in range(one.num_levels):
        side = 2 ** (one.num_levels - 1 - level)
        edges = [
            ((i // side) * side / n, min(1.0, (i // side + 1) * side / n))
            for i, n in zip(cell, one.grid, strict=True)
        ]
        if band is not None:
            edges.insert(0, _band_edges(band, picture.height))
        box = _box(edges, picture)
        pen.rectangle([box[0] - 1, box[1] - 1, box[2] + 1, box[3] + 1], outline=(0, 0, 0))
        pen.rectangle(box, outline=QUERY)
    return picture


def _band_edges(band: float, height: int) -> tuple[float, float]:
    return max(0.0, band - BAND / height), min(1.0, band + BAND / height)


def _panel(
    image: Image.Image,
    scores: torch.Tensor,
    looked: torch.Tensor,
    kept: torch.Tensor | None,
    band: float | None,
    full: Sequence[float],
) -> Image.Image:
    """Return the image, dark outside the candidates, with cells in the colours of their scores."""
    picture = _shrunk(image)
    grey = np.asarray(picture.convert("L"), np.float32)[..., None].repeat(3, axis=-1)
    width, height = picture.size
    maps = [_spread(x.numpy(), (height, width), band, full) for x in (scores, looked)]
    top = max(float(scores.max()), 1e-12)
    share = np.sqrt(maps[0] / top)[..., None]  # small scores stay visible
    colours = ramp(CONFIDENCE, share[..., 0]).astype(np.float32)
    bright = grey * (DIMMED + (1 - DIMMED) * (maps[1][..., None] > 0))
    mixed = bright * (1 - 0.85 * share) + colours * 0.85 * share
    drawn = Image.fromarray(mixed.clip(0, 255).astype(np.uint8))
    if kept is not None and kept.any():
        _outline(drawn, kept.numpy(), band, full)
    return drawn


def _spread(
    values: Array, size: tuple[int, int], band: float | None, full: Sequence[float]
) -> Array:
    """Enlarge a map of cells to the size of a picture; a row fills a band, the rest is 0.

    `full` is the size of the image in cells, fractional if the last cell is cropped.
    """
    height, width = size
    columns = ((np.arange(width) + 0.5) / width * full[-1]).astype(int)
    if band is None:
        rows = ((np.arange(height) + 0.5) / height * full[0]).astype(int)
        return values[rows][:, columns]
    top, bottom = (round(edge * height) for edge in _band_edges(band, height))
    spread = np.zeros(size, np.float32)
    spread[top:bottom] = values[columns]
    return spread


def _outline(picture: Image.Image, kept: Array, band: float | None, full: Sequence[float]) -> None:
    pen = ImageDraw.Draw(picture)
    for cell in np.argwhere(kept > 0):
        edges = [(i / n, min(1.0, (i + 1) / n)) for i, n in zip(cell, full, strict=True)]
        if band is not None:
            edges.insert(0, _band_edges(band, picture.height))
        pen.rectangle(_box(edges, picture), outline=QUERY)


def _box(edges: Sequence[tuple[float, float]], picture: Image.Image) -> list[float]:
    """Return the corners of a cell in pixels; a cell covers at least one pixel."""
    (top, bottom), (left, right) = edges
    x, y = left * picture.width, top * picture.height
    return [x, y, max(x, right * picture.width - 1), max(y, bottom * picture.height - 1)]


def _shrunk(image: Image.Image) -> Image.Image:
    height = max(1, round(image.height * WIDTH / image.width))
    return image.resize((WIDTH, height), Image.Resampling.LANCZOS, reducing_gap=3.0)


def stacked(rows: Sequence[tuple[str, list[tuple[str, Image.Image]]]]) -> Image.Image:
    """Stack rows of panels with their titles."""
    columns = max(len(panels) for _, panels in rows)
    heights = [max(panel.height for _, panel in panels) + 2 * TITLE + GAP for _, panels in rows]
    size = (2 * MARGIN + columns * (WIDTH + GAP) - GAP, MARGIN + sum(heights))
    picture = Image.new("RGB", size, BACKGROUND)
    pen = ImageDraw.Draw(picture)
    large, small = ImageFont.load_default(15), ImageFont.load_default(12)
    y = MARGIN // 2
    for (title, panels), height in zip(rows, heights, strict=True):
        room = size[0] - 2 * MARGIN
        pen.text((MARGIN, y + TITLE / 2), cut(title, room, large), TEXT, large, anchor="lm")
        for i, (words, panel) in enumerate(panels):
            x = MARGIN + i * (WIDTH + GAP)
            middle = y + 1.5 * TITLE
            pen.text((x, middle), cut(words, WIDTH, small), FAINT, small, anchor="lm")
            picture.paste(panel, (x, y + 2 * TITLE))
        y += height
    return picture


def draw_level_weights(model: nn.Module, path: StrPath | None = None) -> Image.Image:
    """Draw the learned level weights, one bar per layer.

    Args:
        model: A network with layers of variant B.
        path: Picture to write, .png, .jpg or .webp.

    Raises:
        OptionError: The network has no learned level weights.

    Example:
        >>> from quadtree_attention import models
        >>> from quadtree_attention.inspect import draw_level_weights
        >>> draw_level_weights(models.create("loftr_quadtree_small", num_pairs=1)).width
        900
    """
    weights: dict[str, list[float]] = {}
    for name, layer in quadtree_layers(model).items():
        logits = cast(torch.Tensor | None, getattr(layer, "level_logits", None))
        if logits is not None:
            weights[name] = logits.detach().float().softmax(dim=0).tolist()
    if not weights:
        raise OptionError(f"{type(model).__name__} has no learned level weights; pass one that has")
    levels = max(map(len, weights.values()))
    colours = [tuple(c) for c in ramp(CONFIDENCE, np.linspace(0.1, 0.95, levels)).tolist()]
    left, right, height = 320, BARS - MARGIN, 2 * TITLE + ROW * len(weights) + MARGIN
    picture = Image.new("RGB", (BARS, height), BACKGROUND)
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(13)
    for level, colour in enumerate(colours):
        start = left + 140 * level
        pen.rectangle([start, 16, start + 14, 30], fill=colour)
        words = "coarsest" if level == 0 else "finest" if level == levels - 1 else ""
        pen.text((start + 20, 23), f"level {level} {words}".strip(), FAINT, font, anchor="lm")
    for row, (name, shares) in enumerate(weights.items()):
        top = 2 * TITLE + ROW * row
        middle = top + ROW / 2
        pen.text((MARGIN, middle), cut(name, left - 2 * MARGIN, font), TEXT, font, anchor="lm")
        x: float = left
        for share, colour in zip(shares, colours, strict=False):
            wide = share * (right - left)
            pen.rectangle([x, top + 2, x + wide - 1, top + ROW - 3], fill=colour)
            if wide > 36:
                label = f"{100 * share:.0f} %"
                pen.text((x + wide / 2, middle), label, text_on(colour), font, anchor="mm")
            x += wide
    if path is not None:
        save_picture(picture, path)
    return picture


def draw_curves(calibration: "Calibration", path: StrPath | None = None) -> Image.Image:
    """See `Calibration.draw`."""
    panels = []
    colours = ramp(CONFIDENCE, np.linspace(0.15, 0.9, 4)).tolist()
    for name, curves in calibration.curves.items():
        panel = Image.new("RGB", (WIDTH, 180), (32, 35, 42))
        pen, font = ImageDraw.Draw(panel), ImageFont.load_default(11)
        left, right, top, bottom = 30, WIDTH - 10, 10, 160
        for share in (0.0, 0.5, 1.0):
            y = bottom - share * (bottom - top)
            pen.line([left, y, right, y], fill=(70, 74, 84))
            pen.text((left - 4, y), f"{share:g}", FAINT, font, anchor="rm")
        for level, (curve, k) in enumerate(zip(curves, calibration[name], strict=True)):
            places = np.linspace(0, 1, len(curve)) if len(curve) > 1 else np.ones(1)
            points = [
                (left + x * (right - left), bottom - y * (bottom - top))
                for x, y in zip(places, curve, strict=True)
            ]
            colour = tuple(colours[level % len(colours)])
            pen.line(points, fill=colour, width=2)
            x, y = points[min(k, len(points)) - 1]
            pen.ellipse([x - 4, y - 4, x + 4, y + 4], fill=colour, outline=TEXT)
            words = f"level {level}: K = {k} of {len(curve)}"
            pen.text((right, bottom - 14 * (len(curves) - level)), words, colour, font, anchor="rm")
        pen.text((right, 170), "K, as a share of the candidates", FAINT, font, anchor="rm")
        panels.append((name, panel))
    heading = (
        f"Share of full attention over K; chosen to carry {calibration.target:g}, "
        f"{calibration.images} image(s)"
    )
    rows = [(heading if i == 0 else "", panels[i : i + 4]) for i in range(0, len(panels), 4)]
    picture = stacked(rows)
    if path is not None:
        save_picture(picture, path)
    return picture
