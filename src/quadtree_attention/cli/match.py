# SPDX-License-Identifier: Apache-2.0
"""`quadtree match`: corresponding points of two images, or of many pairs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from quadtree_attention import checks
from quadtree_attention.cli.options import FILE, INT, TEXT, argument, option
from quadtree_attention.cli.output import exclusive, is_given, say, say_json, tell, written
from quadtree_attention.errors import OptionError
from quadtree_attention.tasks.contract import table

if TYPE_CHECKING:
    from quadtree_attention.tasks import Matches
    from quadtree_attention.tasks.match.readers import PairLine

HELP = """Find corresponding points of two images, and the relative camera pose.

A and B are images of any size and format. Points are (x, y) pixels of the images after EXIF
rotation. --out writes a picture of the matches, --save writes keypoints0, keypoints1 and confidence
as npz; without --out, --save and --json, the picture is written to matches.png. With --K0 and --K1
(fx,fy,cx,cy or 9 numbers, or a text file with them), the relative pose is estimated by two
estimators, and the picture shows inliers in colour. Without --weights, the packaged weights are
used; nothing is downloaded.

--guided aligns images with a large relative rotation or scale and matches them again. "auto" does
so if the first pass has few inliers.

--pairs matches many pairs: one pair of images in --images per line, in the format of SuperGlue
(image0 image1 [rotation0 rotation1 [K0 K1 [T_0to1]]]; quote names with spaces). Matches are written
to --save, as STEM0__STEM1.npz. Rotations are counter-clockwise quarter turns, applied first; points
are pixels of the rotated image. Existing results are skipped. Unreadable images are listed at the
end, all other pairs are matched, and the exit code is 1. --cluster matches them on the machines of
a Ray cluster.

--colmap DB adds the matches to a COLMAP database that contains the images, as keypoints shared by
all pairs of an image, with verified two-view geometries; existing keypoints are kept.
--export hloc writes features.h5 and matches.h5 to --save. Both options match pairs as quadtree sfm:
every match is refined twice, from the cell of either image.

\b
Examples:
  quadtree match a.jpg b.jpg
  quadtree match a.jpg b.jpg --out matches.jpg --save matches.npz --size 1024 --threshold 0.5
  quadtree match a.jpg b.jpg --K0 1165,1165,649,484 --K1 camera1.txt
  quadtree match a.jpg b.jpg --json --max 500 > matches.json
  quadtree match --pairs pairs.txt --images photos --save OUT --device cuda
  quadtree match --pairs pairs.txt --images photos --save OUT --colmap database.db
"""
PICTURE = Path("matches.png")
ONLY_TWO = ("image0", "image1", "out", "camera0", "camera1")
ONLY_MANY = ("images", "force", "batch", "cluster", "colmap", "export")

OPTIONS = "weights out size threshold device dtype batch cluster force json debug"


OWN = {
    "image0": argument(TEXT, "A", "An image."),
    "image1": argument(TEXT, "B", "Another one."),
    "save": option(FILE, "Write matches, .npz; a folder for --pairs.", metavar="PATH"),
    "top": option(INT, "Keep the N best matches.", None, "--max", metavar="N"),
    "guided": option(
        str, "Align rotated or scaled images and match again: auto, always or never.", "auto"
    ),
    "camera0": option(TEXT, "Camera of A.", None, "--K0", metavar="K"),
    "camera1": option(TEXT, "Camera of B.", None, "--K1", metavar="K"),
    "pairs": option(FILE, "List of pairs.", metavar="FILE"),
    "images": option(FILE, "Folder of the images.", metavar="DIR", show_default="folder of FILE"),
    "colmap": option(FILE, "Add the matches to a COLMAP database.", metavar="DB"),
    "export": option(TEXT, "Export format: hloc (h5 files).", metavar="NAME"),
}


def run(context: typer.Context) -> None:
    o = context.params
    checks.at_least(1, max=o["top"])
    exclusive(context, "pairs", *ONLY_TWO)
    if o["pairs"] is not None:
        checks.at_least(1, batch=o["batch"])
        _match_many(context)
        return
    for name in ONLY_MANY:
        if is_given(context, name):
            raise OptionError(f"--{name} is for --pairs FILE; leave it out")
    _match_two(context)


def _match_two(context: typer.Context) -> None:
    from quadtree_attention.cli.predict import check_targets, make_predictor
    from quadtree_attention.images import to_image
    from quadtree_attention.tasks.contract import checked_suffix
    from quadtree_attention.tasks.match.pose import read_camera
    from quadtree_attention.tasks.match.result import MatchesCodec

    o = context.params
    if o["image0"] is None or o["image1"] is None:
        given = "none" if o["image0"] is None else f"only {o['image0']!r}"
        raise OptionError(
            f"matching needs two images, got {given}; use quadtree match A B, or --pairs FILE"
        )
    inputs = o["image0"], o["image1"]
    out, save = o["out"], o["save"]
    if out is None and save is None and not o["json"]:
        out = PICTURE
    if save is not None:
        checked_suffix(save, MatchesCodec())
    check_targets([out], [save], inputs)
    cameras = [o["camera0"], o["camera1"]]
    if cameras.count(None) == 1:
        missing = "--K0" if o["camera0"] is None else "--K1"
        raise OptionError(f"the pose needs both cameras, got no {missing}; give both or none")
    posed = None not in cameras
    if posed:
        cameras = [read_camera(f"--K{i}", camera) for i, camera in enumerate(cameras)]
    images = to_image(inputs[0]), to_image(inputs[1])  # before the slow part
    predictor = make_predictor(context, "match", ("threshold", "top", "guided"))
    matches: Matches = predictor(*images)
    if posed:
        matches = matches.with_poses(*cameras)
    if save is not None:
        matches.save(save)
    if out is not None:
        matches.draw(out)
    files = [str(path) for path in (out, save) if path is not None]
    if o["json"]:
        for sentence in matches.warnings:  # which the text has in its rows
            tell(f"warning: {sentence}")
        about: dict[str, Any] = {"image0": inputs[0], "image1": inputs[1], "written": files}
        say_json(about | matches.to_dict())
        return
    rows = {"device": str(predictor.device), "written": written(files)}
    say(matches.to_text() + "\n" + table(rows))


def _match_many(context: typer.Context) -> None:
    import numpy as np

    from quadtree_attention.cli.predict import join_cluster, make_predictor, predict_pairs
    from quadtree_attention.tasks.match.readers import open_source

    o = context.params
    if o["save"] is None:
        raise OptionError("--pairs needs --save OUT, a folder for the matches; add it")
    source = open_source(o["pairs"], images=o["images"], truth=False)
    if o["colmap"] is not None or o["export"] is not None:
        _match_for_programs(context, source.pairs)
        return
    cluster = join_cluster(context)
    predictor = make_predictor(context, "match", ("threshold", "top", "guided"))

    def facts(rows: "Sequence[Mapping[str, Any]]") -> dict[str, str]:
        counts = [row["matches"] for row in rows]
        mean = f"{np.mean(counts):,.0f} on average"
        return {"matches": f"{mean}, {counts.count(0):,} pairs with none"}

    predict_pairs(
        context,
        predictor,
        source,
        cluster=cluster,
        facts=facts,
        describe=lambda i: {
            "line": source.pairs[i].line,
            "image0": source.pairs[i].image0,
            "image1": source.pairs[i].image1,
        },
        numbers=lambda found: {"matches": len(found)},
    )


def _match_for_programs(context: typer.Context, pairs: "Sequence[PairLine]") -> None:
    from quadtree_attention.cli.predict import join_cluster, make_pair_matcher
    from quadtree_attention.sfm.exchange import export_pairs

    o = context.params
    cluster = join_cluster(context)
    matcher = make_pair_matcher(context)
    found = export_pairs(
        pairs,
        o["save"],
        matcher,
        database=o["colmap"],
        export=o["export"],
        batch=o["batch"],
        force=o["force"],
        cluster=cluster,
    )
    files = [str(path) for path in found.written]
    if o["json"]:
        facts = {"pairs": found.pairs, "tracks": found.tracks, "points": found.points}
        say_json(facts | {"written": files})
        return
    rows = {"tracks": f"{found.tracks:,} of {found.points:,} points, in {found.pairs:,} pairs"}
    say(table(rows | {"written": written([o["save"], *files])}))
