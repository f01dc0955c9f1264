# SPDX-License-Identifier: Apache-2.0
"""`quadtree sfm`: a 3-D model of a folder of photographs."""

from pathlib import Path

import typer

from quadtree_attention.cli.options import FILE, FLOAT, INT, TEXT, argument, option
from quadtree_attention.cli.output import FAILED, command, exclusive, say, say_json, tell

HELP = """Make a 3-D model of the photographs in a folder: cameras and coloured points.

PHOTOS is a folder of photographs of one scene, in any order, size and orientation. They are matched
in pairs, matches become tracks over many photographs, and COLMAP's mapper (pip install
'quadtree-attention[sfm]') finds the cameras and the points. OUT gets

\b
  report.html       cameras and points to turn, and why photographs were left out
  sparse/0          the model as COLMAP writes it; further models are sparse/1, ...
  database.db       COLMAP's database: keypoints, matches, two-view geometries
  points.ply        the coloured points
  transforms.json   the cameras for NeRF and Gaussian splatting
  report.json       the numbers of the report
  matches           the matches of each pair: a run that was stopped continues from there

All pairs of up to 40 photographs are matched; of more, every photograph with the 20 that look most
alike (--nearest N). --sequential N is for frames of a video: every frame with the N next ones, and
with some farther away. --pairs names them: two file names to a line.

Focal lengths are those of EXIF, or --focal; without either 1.2 times the longer side is where the
mapper begins. It refines them, with one term of radial distortion. --camera fx,fy,cx,cy is a
calibrated camera without distortion, which stays as it is. Photographs of the same size and camera
share one; --cameras each gives every photograph its own.

Photographs that cannot be read, and copies of others, are left out and named in the report. The
exit code is 1 if there is no model.

\b
Examples:
  quadtree sfm photos model
  quadtree sfm frames model --sequential 10 --focal 1450
  quadtree sfm photos model --size 1024 --device cuda --batch 8
"""
OPTIONS = "weights size threshold device dtype batch force json debug"
OWN = {
    "photos": argument(Path, "PHOTOS", "Folder of photographs.", ...),
    "out": argument(Path, "OUT", "Folder of the results.", ...),
    "pairs": option(FILE, "File of pairs to match.", metavar="FILE"),
    "sequential": option(INT, "Frames of a video: match N next ones.", metavar="N"),
    "nearest": option(
        INT, "Match the N most alike.", metavar="N", show_default="20, above 40 photographs"
    ),
    "camera": option(TEXT, "Calibrated camera: fx,fy,cx,cy, or a file.", metavar="K"),
    "focal": option(FLOAT, "Focal length in pixels.", metavar="F", show_default="EXIF"),
    "cameras": option(str, "auto, one (of a size) or each: who shares a camera.", "auto"),
    "mapper": option(str, "incremental or global.", "incremental"),
}


def register(app: typer.Typer) -> None:
    command(app, "sfm", sfm, HELP, OPTIONS, OWN)


def sfm(context: typer.Context) -> None:
    o = context.params
    exclusive(context, "pairs", "sequential", "nearest")
    exclusive(context, "sequential", "nearest")
    exclusive(context, "camera", "focal")

    from quadtree_attention.cli.predict import announce_compiling
    from quadtree_attention.sfm.database import colmap
    from quadtree_attention.sfm.matching import PairMatcher
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
    given = {name: o[name] for name in ("size", "threshold", "device", "dtype")}
    matcher = PairMatcher.from_pretrained(o["weights"], **given)
    announce_compiling(matcher)
    report = build_model(
        o["photos"],
        o["out"],
        matcher=matcher,
        chosen=chosen,
        batch=o["batch"],
        force=o["force"],
    )
    for warning in report.warnings:
        tell(f"warning: {warning}")
    if o["json"]:
        say_json(report.to_dict())
    else:
        say(report.to_text())
    if not report.registered:
        tell(f"no model was found; {o['out']}/report.html says why")
        raise typer.Exit(FAILED)
