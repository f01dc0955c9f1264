# SPDX-License-Identifier: Apache-2.0
"""`quadtree sfm`: structure from motion on a folder of photographs."""

from pathlib import Path

import typer

from quadtree_attention import checks
from quadtree_attention.cli.options import FILE, FLOAT, INT, TEXT, argument, option
from quadtree_attention.cli.output import FAILED, exclusive, say, say_json, tell

HELP = """Reconstruct cameras and coloured points from a folder of photographs.

PHOTOS is a folder of photographs of one scene, in any order, size and orientation. They are matched
in pairs, matches are merged into tracks over many photographs, and COLMAP's mapper (pip install
'quadtree-attention[sfm]') estimates cameras and points. Files written to OUT:

\b
  report.html       interactive view of the model, and why photographs were left out
  sparse/0          the model in COLMAP's format; further models are sparse/1, ...
  database.db       COLMAP's database: keypoints, matches, two-view geometries
  points.ply        the coloured points
  transforms.json   the cameras for NeRF and Gaussian splatting
  report.json       the numbers of the report
  matches           the matches of each pair, from which an interrupted run continues

All pairs of up to 40 photographs are matched; for more, every photograph is matched with the 20
most similar ones (--nearest N). --sequential N is for video frames: every frame is matched with the
next N frames, and with some later ones. --pairs reads a list of pairs: two file names per line.

Focal lengths are read from EXIF or set by --focal; otherwise the mapper starts from 1.2 times the
longer side. It refines them, with one term of radial distortion. --camera fx,fy,cx,cy sets a
calibrated camera without distortion, which is kept fixed. Photographs of the same size and camera
share intrinsics; with --cameras each, every photograph has its own.

--cluster matches pairs on the machines of a Ray cluster (pip install
'quadtree-attention[cluster]'), which read PHOTOS under the same path.

Photographs that are turned against each other by more than 45 degrees are matched again, turned
back by quarters (--guided).

Unreadable photographs and duplicates are left out and listed in the report. The exit code is 1 if
there is no model.

\b
Examples:
  quadtree sfm photos model
  quadtree sfm frames model --sequential 10 --focal 1450
  quadtree sfm photos model --size 1024 --device cuda --batch 8
"""
OPTIONS = "weights size threshold device dtype batch cluster force json debug"
OWN = {
    "photos": argument(Path, "PHOTOS", "Folder of photographs.", ...),
    "out": argument(Path, "OUT", "Folder of the results.", ...),
    "pairs": option(FILE, "List of pairs to match.", metavar="FILE"),
    "sequential": option(INT, "Video frames: match the next N frames.", metavar="N"),
    "nearest": option(
        INT, "Match the N most similar.", metavar="N", show_default="20, above 40 photographs"
    ),
    "camera": option(TEXT, "Calibrated camera: fx,fy,cx,cy, or a file.", metavar="K"),
    "focal": option(FLOAT, "Focal length in pixels.", metavar="F", show_default="EXIF"),
    "cameras": option(str, "Shared intrinsics: auto, one (per size) or each.", "auto"),
    "guided": option(str, "Match turned photographs again: auto, always or never.", "auto"),
    "mapper": option(str, "incremental or global.", "incremental"),
}


def run(context: typer.Context) -> None:
    o = context.params
    exclusive(context, "pairs", "sequential", "nearest")
    exclusive(context, "sequential", "nearest")
    exclusive(context, "camera", "focal")
    checks.at_least(1, batch=o["batch"])

    from quadtree_attention.cli.predict import join_cluster, make_pair_matcher
    from quadtree_attention.sfm.database import colmap
    from quadtree_attention.sfm.pipeline import Chosen, build_model
    from quadtree_attention.tasks.match.pose import read_camera

    colmap()
    chosen = Chosen(
        pairs=o["pairs"],
        sequential=o["sequential"],
        nearest=o["nearest"],
        mapper=o["mapper"],
        sharing=o["cameras"],
        focal=o["focal"],
        camera=None if o["camera"] is None else read_camera("--camera", o["camera"]),
    )
    cluster = join_cluster(context)
    report = build_model(
        o["photos"],
        o["out"],
        matcher=make_pair_matcher(context),
        chosen=chosen,
        batch=o["batch"],
        force=o["force"],
        cluster=cluster,
    )
    for warning in report.warnings:
        tell(f"warning: {warning}")
    if o["json"]:
        say_json(report.to_dict())
    else:
        say(report.to_text())
    if not report.registered:
        tell(f"no model was found; see {o['out']}/report.html for the reasons")
        raise typer.Exit(FAILED)
