# SPDX-License-Identifier: Apache-2.0
"""Recorded attention as an HTML page that shows the selection of every query, at any K.

The page contains queries and keys in 8 bits and computes scores from them. Softmax is invariant to
a vector subtracted from all keys, and to transforms of queries and keys that preserve their
products. Therefore the mean key is subtracted, and each head uses the basis in which queries and
keys have equal variance along every axis: axes with small variance then need few bits.
"""

import html
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from quadtree_attention import checks
from quadtree_attention.errors import OptionError
from quadtree_attention.images import Array, ImageLike
from quadtree_attention.inspect.attention import Attention
from quadtree_attention.inspect.still import (
    check_point,
    default_layers,
    draw_record,
    images_of,
    query_of,
    rows_of,
)
from quadtree_attention.viz.page import Page, data_uri, make_page
from quadtree_attention.viz.palette import CONFIDENCE

if TYPE_CHECKING:
    from quadtree_attention.inspect.recorder import Layer, Record

SHOWN = 768  # maximum longer side of images in the page, in pixels
STILL = 1100  # width of the still picture
MOST_ROWS_BYTES = 2**22  # bytes of queries and keys of rows, before compression
LARGEST = 127  # largest 8-bit code
OCCLUDED = 0.5
MODULES = ("codec.js", "attention.js", "paint.js", "app.js")


class Block:
    """Binary data of the page, and the offsets of its parts."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0

    def add(self, array: Array) -> int:
        start = self.size
        self.parts.append(np.ascontiguousarray(array).tobytes())
        self.size += len(self.parts[-1])
        return start


def make_explorer(
    records: Mapping[str, "Record"],
    images: "ImageLike | Sequence[ImageLike]",
    *,
    layers: Sequence[str] | None = None,
    at: tuple[float, float] | None = None,
    matches: tuple[Array, Array, Array] | None = None,
    disparity: Array | None = None,
    names: Sequence[str] | None = None,
    credits: str = "",  # noqa: A002
) -> Page:
    """Return the page of `Record.show`, for one record or several records of the same images.

    Args:
        records: Records by name of the network.
        images: As for `Record.show`.
        layers: Layers of the first record; the other records show their default layers.
        at: As for `Record.show`.
        matches: As for `Record.show`.
        disparity: As for `Record.show`.
        names: Names of the images.
        credits: HTML below the page.
    """
    given = images_of(images)
    shown = [_shrunk(image) for image in given]
    scales = [np.array(s.size) / np.array(g.size) for s, g in zip(shown, given, strict=True)]
    names = [f"image {'AB'[i]}" for i in range(len(given))] if names is None else list(names)
    point = _start(given[0], at, matches)
    check_point(point, given[0])
    block, described = Block(), []
    for number, (network, record) in enumerate(records.items()):
        wanted = default_layers(record, len(given))
        if layers is not None and number == 0:
            wanted = list(layers)
        for name in wanted:
            checks.known(name, list(record), "a recorded layer")
        rows = _rows_that_fit([record[name] for name in wanted], len(given))
        shared = _shared(list(record))
        for name in wanted:
            about = _layer(record[name], len(given), block, rows, name[shared:])
            about["id"] = f"{number}.{name}" if number else name
            about["label"] += f" ({network})" if len(records) > 1 else ""
            described.append(about)
    if disparity is not None:
        for about in described:
            for sample in about["samples"]:
                if sample["flat"]:
                    columns = _at_columns(disparity, sample, scales[0][0])
                    sample["disparity"] = {"at": block.add(columns), "count": len(columns)}
    packed = None
    if matches is not None:
        found = [points * scale for points, scale in zip(matches[:2], scales, strict=True)]
        table = np.concatenate([*found, np.asarray(matches[2])[:, None]], axis=1)
        packed = {"at": block.add(table.astype(np.float32)), "count": table.size}
    first = next(iter(records.values()))
    own = [about["name"] for about in described if about["id"] in first]
    name, head = _sharpest([first[name] for name in own], given, point)
    still = draw_record(first, given, point, layers=[name], head=head)
    still = still.resize((STILL, max(1, round(still.height * STILL / still.width))))
    start = {"layer": name, "head": head, "image": 0}
    start |= dict(zip("xy", (np.array(point) * scales[0]).tolist(), strict=True))
    about = {
        "images": [{"name": n, "source": data_uri(i)} for n, i in zip(names, shown, strict=True)],
        "ramp": CONFIDENCE.tolist(),
        "layers": described,
        "matches": packed,
        "start": start,
    }
    return make_page(
        "explorer", "explorer.html", ["explorer.css"], MODULES,
        _words(described, name, given, names, data_uri(still), credits),
        about, b"".join(block.parts),
    )  # fmt: skip


def _shrunk(image: Image.Image) -> Image.Image:
    scale = SHOWN / max(image.size)
    if scale >= 1:
        return image
    width, height = (max(1, round(side * scale)) for side in image.size)
    return image.resize((width, height), Image.Resampling.LANCZOS, reducing_gap=3.0)


def _start(
    image: Image.Image,
    at: tuple[float, float] | None,
    matches: tuple[Array, Array, Array] | None,
) -> tuple[float, float]:
    """Return the initial query: a confident match near the centre of the image, or the centre."""
    if at is not None:
        return at
    middle = np.array(image.size) / 2
    if matches is None or not len(matches[2]):
        return float(middle[0]), float(middle[1])
    off = np.linalg.norm((matches[0] - middle) / middle, axis=1)
    best = int(np.argmax(matches[2] - 0.3 * off))
    x, y = (
        min(max(0.0, float(p)), n - 1.0) for p, n in zip(matches[0][best], image.size, strict=True)
    )
    return x, y


def _sharpest(
    layers: Sequence["Layer"], images: Sequence[Image.Image], at: tuple[float, float]
) -> tuple[str, int]:
    """Return layer and head with the most concentrated scores of a query; cross attention first.

    The measure is the sum of squared scores of all keys, times the number of keys.
    """
    crossing = [layer for layer in layers if layer.cross] or layers
    found = []
    for layer in crossing:
        one, cell, _ = query_of(layer, images, at)
        number = int(np.ravel_multi_index(cell, one.grid))
        scores = one.dense(torch.tensor([number]))[0].flatten(1)  # (N, S)
        sharpness = scores.square().sum(dim=1) * scores.shape[1]
        head = int(sharpness.argmax())
        found.append((float(sharpness[head]), layer.name, head))
    _, name, head = max(found)
    return name, head


def _rows_that_fit(layers: Sequence["Layer"], images: int) -> int:
    """Return the rows of the first image that the page contains, per layer."""
    size = rows = 0
    for layer in layers:
        if len(layer[0].grid) == 1:
            rows = len(layer) // images
            size += layer[0].q.numel() + layer[0].k.numel()
    return min(rows, max(1, MOST_ROWS_BYTES // max(1, size)))


def _shared(names: Sequence[str]) -> int:
    """Return the length of the common prefix of modules of all names, without the innermost one."""
    columns = zip(*(name.split(".") for name in names), strict=False)
    start = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]
    return len(".".join(start[:-1])) + 1 if len(start) > 1 else 0


def _layer(layer: "Layer", images: int, block: Block, rows: int, short: str) -> dict[str, Any]:
    """Return options and samples of a layer; queries and keys are added to the block."""
    if not len(layer):
        raise OptionError(f"{layer.name} was not called while record(model) was open; call it")
    first = layer[0]
    samples = []
    count = rows_of(layer, images)
    if len(first.grid) == 1:  # rows of the first image
        for i in range(rows):
            row = int((i + 0.5) * count / rows)
            band = [row / count, (row + 1) / count]
            samples.append(_sample(layer[row], 0, 1 if layer.cross else 0, block, band))
    else:
        for i in range(min(images, len(layer))):
            keys = 1 - i if layer.cross else i
            samples.append(_sample(layer[i], i, keys, block, [0.0, 1.0]))
    what = "cross attention" if layer.cross else "self-attention"
    kind = {"softmax": "dense ", "linear": "linear "}.get(layer.kind, "")
    return {
        "name": layer.name,
        "label": f"{kind}{what}, {short.removesuffix('.attn') or 'layer'}",
        "kind": layer.kind,
        "cross": layer.cross,
        "variant": layer.variant,
        "levels": first.num_levels,
        "topk": list(layer.topk),
        "scale": first.scale,
        "weights": _weights(first),
        "heads": first.heads,
        "channels": first.q.shape[-1],
        "rows": count,
        "samples": samples,
    }


def _weights(one: Attention) -> list[float]:
    """Return the shares of levels in the message; equal if the layer has no level weights."""
    if len(one.level_weights) == one.num_levels:
        return list(one.level_weights)
    return [1 / one.num_levels] * one.num_levels


def _sample(
    one: Attention, query: int, keys: int, block: Block, band: Sequence[float]
) -> dict[str, Any]:
    flat = len(one.grid) == 1
    q, k = (x[0].flatten(0, -3).movedim(1, 0).double() for x in (one.q, one.k))  # (N, S, D)
    if one.kind != "linear":
        q, k = balanced(q, k)
    about: dict[str, Any] = {
        "query": query,
        "keys": keys,
        "flat": flat,
        "grid": [1, *one.grid] if flat else list(one.grid),
        "keyGrid": [1, *one.key_grid] if flat else list(one.key_grid),
        "band": list(band),
    }
    for name, x in (("q", q), ("k", k)):
        codes, steps = quantised(x)
        place = block.add(codes.mT.contiguous().numpy())  # heads, channels, cells
        about[name] = {
            "at": place,
            "steps": [float(f"{step:.5g}") for step in steps.tolist()],
        }
    for name, mask in (("queryMask", one.query_mask), ("keyMask", one.key_mask)):
        if mask is not None:
            about[name] = {"at": block.add(mask[0].numpy().astype(np.uint8))}
    return about


def balanced(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Transform queries and keys (N, S, D) to equal diagonal second moments, with the same softmax.

    Products change by a constant per query, since the mean of the keys is subtracted.
    """
    k = k - k.mean(dim=1, keepdim=True)
    lower = []
    for x in (q, k):
        moment = x.mT @ x / x.shape[1]
        size = moment.diagonal(dim1=-2, dim2=-1).mean(dim=-1).clamp(min=1e-30)
        eye = torch.eye(x.shape[-1], dtype=x.dtype)
        lower.append(torch.linalg.cholesky(moment + 1e-9 * size[:, None, None] * eye))
    u, s, vt = torch.linalg.svd(lower[0].mT @ lower[1])
    root = s.clamp(min=1e-30).sqrt()[:, None]
    turn_q = torch.linalg.solve_triangular(lower[0].mT, u * root, upper=True)
    turn_k = torch.linalg.solve_triangular(lower[1].mT, vt.mT * root, upper=True)
    return q @ turn_q, k @ turn_k


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return 8-bit codes (N, S, D) and the step (N,) of each head."""
    steps = x.abs().amax(dim=(1, 2)).clamp(min=1e-12) / LARGEST
    return (x / steps[:, None, None]).round().to(torch.int8), steps


def _at_columns(disparity: Array, sample: Mapping[str, Any], scale: float) -> Array:
    """Return disparities at the cells of a row, in pixels of the page's image; NaN if occluded."""
    height, width = disparity.shape
    row = min(height - 1, int(np.mean(sample["band"]) * height))
    columns = sample["grid"][1]
    places = np.minimum((np.arange(columns) + 0.5) / columns * width, width - 1).astype(int)
    return (disparity[row, places] * scale).astype(np.float32)


def _maps(layer: Mapping[str, Any]) -> str:
    """Return HTML: number and size of the maps or rows of a layer in the page."""
    samples = layer["samples"]
    rows, columns = samples[0]["keyGrid"]
    if samples[0]["flat"]:
        return f"{len(samples)} of {layer['rows']} rows of {columns} cells"
    return f"{len(samples)} of {rows} &times; {columns} cells"


def _words(
    layers: Sequence[Mapping[str, Any]],
    begin: str,
    images: Sequence[Image.Image],
    names: Sequence[str],
    still: str,
    credits: str,  # noqa: A002
) -> dict[str, str]:
    """Return HTML for the fields of the template."""
    one = next(layer for layer in layers if layer["name"] == begin)
    flat = any(sample["flat"] for layer in layers for sample in layer["samples"])
    cells = int(np.prod(one["samples"][0]["keyGrid"]))
    lead = f"Point at a place in the first picture to see its scores for {cells:,} cells."
    if one["kind"] == "quadtree" and one["levels"] > 1:
        side = 2 ** (one["levels"] - 1)
        place = f"{'its row in ' * flat}the {'other' if one['cross'] else 'same'} picture"
        coarse = int(np.prod([-(-n // side) for n in one["samples"][0]["keyGrid"]]))
        lead = (
            f"Point at a place in the first picture. Full attention compares it with all {cells:,} "
            f"cells of {place}. Quadtree attention compares it with {coarse:,} coarse cells, "
            f"keeps the best {one['topk'][0]}, compares it with their children only, and so on. "
            "Dark cells were not compared."
        )
    rows = "".join(
        f"<tr><td>{html.escape(layer['label'])}</td><td>{_maps(layer)}</td>"
        f"<td>{layer['heads']}</td><td>{layer['levels']}</td>"
        f"<td>{', '.join(map(str, layer['topk'])) or '&ndash;'}</td>"
        f"<td>{', '.join(f'{100 * w:.0f} %' for w in layer['weights'])}</td></tr>"
        for layer in layers
    )
    heads = "".join(f"<th scope=col>{h}</th>" for h in ("Layer", "Maps", "Heads", "Levels", "K",
        "Level weights, coarse to fine"))  # fmt: skip
    return {
        "title": "Quadtree attention of " + html.escape(", ".join(names)),
        "heading": "What quadtree attention compares",
        "lead": lead,
        "still": still,
        "still_alt": "One query, and its scores at every level of the quadtree",
        "still_caption": "One query of the first image: the cells that were compared and kept at "
        "every level, and full attention of the same queries and keys. With JavaScript, this page "
        "shows any other query.",
        "of_rows": "" if flat else " hidden",
        "holds": f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>",
        "credits": f'<p class="credits">{credits}</p>' if credits else "",
    }
