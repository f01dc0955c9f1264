# SPDX-License-Identifier: Apache-2.0
"""Matches of listed pairs as tracks, for COLMAP and hloc."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quadtree_attention import checks
from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.images import image_size
from quadtree_attention.sfm.database import add_to_database, colmap, write_hloc
from quadtree_attention.sfm.matching import PairMatcher, match_pairs, seen_size
from quadtree_attention.sfm.pairs import Pair
from quadtree_attention.sfm.reconstruct import SPACING, verified
from quadtree_attention.sfm.tracks import Tracks, build
from quadtree_attention.tasks.cluster import Cluster
from quadtree_attention.tasks.contract import Items
from quadtree_attention.tasks.match import TASK
from quadtree_attention.tasks.match.readers import PairLine
from quadtree_attention.tasks.match.result import Matches
from quadtree_attention.tasks.store import Store

EXPORTS = ("hloc",)


@dataclass(frozen=True, eq=False)
class Exchanged:
    """Summary of the written tracks and files."""

    tracks: int
    points: int
    pairs: int
    written: Sequence[Path]


def export_pairs(
    lines: Sequence[PairLine],
    save: Path,
    matcher: PairMatcher,
    *,
    database: Path | None = None,
    export: str | None = None,
    batch: int | None = None,
    force: bool = False,
    progress: bool | None = None,
    cluster: Cluster | None = None,
) -> Exchanged:
    """Match pairs into a store, and write their tracks for other programs.

    Args:
        lines: The pairs, without rotations.
        save: Folder of the matches; hloc's files are written there, too.
        matcher: The matcher.
        database: Database of COLMAP to add to; it contains the images, named as in the pairs.
        export: "hloc": write features.h5 and matches.h5.
        batch: Batch size of the network.
        force: Match again, and replace matches of other settings.
        progress: Show progress bars; None: in a terminal.
        cluster: Cluster that matches the pairs; None: this process.

    Raises:
        OptionError: A pair has a rotation, or `save` contains other files.
        DataError: An image cannot be read, or the database lacks it.
    """
    checks.one_of(EXPORTS, export=export)
    if turned := [line.name for line in lines if line.rotation0 or line.rotation1]:
        raise OptionError(
            f"COLMAP and hloc have no turned images, got rotations for {checks.few(turned)}; leave "
            "them out of the pairs"
        )
    if database is not None:
        colmap()
        if not database.is_file():
            raise DataError(f"there is no database {str(database)!r}; make it with COLMAP first")
    names = sorted({name for line in lines for name in (line.image0, line.image1)})
    folder = lines[0].folder
    sizes = [image_size(folder / name) for name in names]  # before the slow part
    numbers = {name: i for i, name in enumerate(names)}
    chosen: dict[Pair, PairLine] = {}
    for line in lines:
        i, j = numbers[line.image0], numbers[line.image1]
        if i != j and (j, i) not in chosen:
            chosen.setdefault((i, j), line)
    found = list(chosen.values())
    source = Items([line.name for line in found], [line.paths for line in found])
    settings = matcher.settings() if cluster is None else cluster.settings(matcher)
    store = Store.create(save, TASK, settings, source, force=force)
    match_pairs(matcher, source, store, batch=batch, progress=progress, cluster=cluster)
    longer: int = matcher.preprocess.size  # type: ignore[attr-defined]
    scales = [max(size) / max(seen_size(size, longer)) for size in sizes]
    tracks = build(verified(_stored(chosen, store), scales), [SPACING * s for s in scales])
    written = []
    if database is not None:
        add_to_database(database, names, tracks)
        written.append(database)
    if export == "hloc":
        written += write_hloc(save, names, tracks)
    return Exchanged(len(tracks), len(tracks.images), _pairs(tracks), written)


def _stored(chosen: dict[Pair, PairLine], store: Store) -> Iterator[tuple[Pair, Matches]]:
    for pair, line in chosen.items():
        matches = store.get(line.name)
        if isinstance(matches, Matches):
            yield pair, matches


def _pairs(tracks: Tracks) -> int:
    return int(np.sum([len(rows) > 0 for _, _, rows in tracks.pairs()]))
