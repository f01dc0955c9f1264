# SPDX-License-Identifier: Apache-2.0
"""Where a matcher's cross attention is: its mass near to the true partner, on held-out scenes.

Synthetic scenes of a seed that training does not use. Queries are cells whose partner in the other
image is visible, chosen at random; a score is spread evenly over the finest cells that its cell
holds. `within` is the share at most r finest cells away along x and y, as a mean over queries and
heads of a pair, then over pairs. Errors are standard errors over pairs: queries of a pair are not
independent. `share` is the part of the message that a level gives: its learned weight in variant B,
in variant A what its cells that are not kept (and all of the finest) carry. The row "uniform" is
equal scores for all cells.
"""

import sys
from argparse import Namespace
from math import prod
from typing import Any

import torch
from torch import Tensor

from benchmarks.suite import Work
from quadtree_attention.errors import OptionError
from quadtree_attention.inspect import Record, record
from quadtree_attention.inspect.attention import Attention
from quadtree_attention.models.matcher import COARSE_STRIDE
from quadtree_attention.synthetic import (
    PhotoTextures,
    ProceduralTextures,
    SceneOptions,
    Textures,
    scene_pairs,
)
from quadtree_attention.tasks.match.data import grey
from quadtree_attention.tasks.match.predictor import Matcher
from quadtree_attention.tasks.match.truth import true_matches, view_from_flow

HELD_OUT = 20_260_102  # seed of the scenes
RADII = (1, 2, 4)  # finest cells
SCENE = {"baseline": (0.05, 0.8), "rotation": (0.0, 20.0), "roll": (0.0, 35.0)}
PROCEDURAL, PHOTOS, TEXTURE = 32, 96, 256  # textures without photographs, with; pixels of a side
LAYERS = "coarse_transformer.*"  # of the whole images, not of windows around matches
FULL, ALL = "full attention", "message"
UNIFORM = ("any", "uniform")  # layer and level of equal scores for all cells, to compare with


def plan(options: Namespace) -> list[list[Work]]:
    """One row per weights, cross layer and level; all are measured by the first one."""
    options.folder_of_textures, found = options.textures, []
    if options.textures is not None:
        options.textures = options.textures.resolve().parent.name
    for name, path in options.weights or [("quadtree", None)]:
        matcher = Matcher.from_pretrained(path, device="cpu")
        with record(matcher.network, layers=LAYERS) as seen:
            layers = [n for n, layer in seen.items() if layer.cross]
            levels = {n: seen[n].num_levels if seen[n].kind == "quadtree" else 0 for n in layers}
        shown = [
            (layer, level)
            for layer in layers
            for level in [*map(str, range(levels[layer])), *([ALL] if levels[layer] else []), FULL]
        ]
        more: dict[str, Any] = {"matcher": matcher, "measured": {}}
        for layer, level in [*shown, UNIFORM]:
            found.append(Work({"weights": name, "layer": layer, "level": level}, "cpu", more))
    return [found]


def measure_row(work: Work, options: Namespace) -> dict[str, Any]:
    measured = work.more["measured"]
    if not measured:
        _measure(work.more["matcher"], options, measured)
    pairs = torch.stack(measured[work["layer"], work["level"]])  # (pairs, share and radii)
    mean, error = pairs.mean(dim=0), pairs.std(dim=0) / len(pairs) ** 0.5
    radii = [str(r) for r in RADII]
    return {
        "pairs": len(pairs),
        "queries": measured["queries"],
        "share": float(mean[0]),
        "within": dict(zip(radii, mean[1:].tolist(), strict=True)),
        "errors": dict(zip(radii, error[1:].tolist(), strict=True)),
    }


@torch.inference_mode()
def _measure(matcher: Matcher, options: Namespace, measured: dict[Any, Any]) -> None:
    textures: Textures = ProceduralTextures(PROCEDURAL, size=TEXTURE)
    if options.textures is not None:
        textures = PhotoTextures(options.folder_of_textures, size=TEXTURE, limit=PHOTOS)
    made = {"size": tuple(options.image), "seed": HELD_OUT, "options": SceneOptions(**SCENE)}
    chosen = torch.Generator().manual_seed(0)
    total = 0
    for index in range(options.pairs):
        pair = vars(scene_pairs(textures, [index], **made))
        view0 = view_from_flow(pair["flow0to1"], pair["visible0"])
        view1 = view_from_flow(pair["flow1to0"], pair["visible1"])
        truth, _ = true_matches(view0, view1, COARSE_STRIDE)
        some = torch.randperm(len(truth), generator=chosen)[: options.queries]
        if not len(some):
            continue
        total += len(some)
        with record(matcher.network, layers=LAYERS) as seen:
            matcher.network({f"image{i}": grey(pair[f"image{i}"]) for i in range(2)})
        print(f"{total} queries", file=sys.stderr, flush=True)
        _add(seen, truth.cells0[some], truth.cells1[some], measured)
    if not total:
        raise OptionError("no scene has visible partners; render larger ones")
    measured["queries"] = total


def _add(seen: Record, at: Tensor, partner: Tensor, measured: dict[Any, Any]) -> None:
    """Appends the values of a pair."""
    sizes = next(layer for layer in seen.values() if layer.cross)[0].key_grid
    equal = torch.full((len(at), 1, *sizes), 1 / prod(sizes))
    measured.setdefault(UNIFORM, []).append(_values(equal, 1.0, partner))
    for name, layer in seen.items():
        if not layer.cross:
            continue
        one = layer[0]
        measured.setdefault((name, FULL), []).append(_values(one.dense(at), 1.0, partner))
        if one.kind != "quadtree":
            continue
        message = torch.zeros(())
        for level, given in enumerate(_messages(one, at)):
            total = given.flatten(2).sum(dim=-1)
            share = float(total.mean())
            part = given / total.clamp(min=1e-12)[..., None, None]
            measured.setdefault((name, str(level)), []).append(_values(part, share, partner))
            message = message + given
        measured.setdefault((name, ALL), []).append(_values(message, 1.0, partner))


def _messages(one: Attention, at: Tensor) -> list[Tensor]:
    """What every level gives to the message (Q, N, H, W), spread over the finest cells."""
    found = []
    for level, (values, kept, _) in enumerate(one.levels(at)):
        if one.variant == "A":
            values = values.flatten(2).scatter(-1, kept, 0.0).view_as(values)
        elif one.variant == "B":
            values = values * one.level_weights[level]
        side = 2 ** (one.num_levels - 1 - level)
        rows, columns = (torch.arange(cells) // side for cells in one.key_grid)
        cells = rows.bincount()[rows][:, None] * columns.bincount()[columns]  # of the finest level
        found.append(values[..., rows[:, None], columns] / cells)
    return found


def _values(scores: Tensor, share: float, partner: Tensor) -> Tensor:
    """The share, and the means over queries and heads of what is near to the partners."""
    rows, columns = (axis.view(-1, 1, 1) for axis in torch.unravel_index(partner, scores.shape[2:]))
    y = torch.arange(scores.shape[2]).view(1, -1, 1)
    x = torch.arange(scores.shape[3]).view(1, 1, -1)
    away = torch.maximum((y - rows).abs(), (x - columns).abs())[:, None]
    near = [float((scores * (away <= r)).flatten(2).sum(dim=-1).mean()) for r in RADII]
    return torch.tensor([share, *near])
