# SPDX-License-Identifier: Apache-2.0
"""`quadtree stereo`: disparity of a rectified pair, or of the pairs of two folders."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from quadtree_attention import checks
from quadtree_attention.cli.options import FILE, FLOAT, argument, option
from quadtree_attention.cli.output import is_given, say, say_json, tell, written
from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.tasks.contract import table

if TYPE_CHECKING:
    from quadtree_attention.tasks import Disparity

HELP = """Estimate disparity from a rectified stereo pair.

LEFT and RIGHT are a rectified pair of images of the same size. The left pixel (x, y) corresponds to
(x - disparity, y) on the right; disparities are in pixels of the original images. --out writes a
colour picture with occluded pixels hatched, --save writes the disparities as .npz, .npy, .pfm or
16-bit .png (times 256), --occlusion writes a grey picture, white where occluded; without any of
these and --json, the picture is written to disparity.png. With --focal (pixels) and --baseline (any
unit), depth is printed; --depth writes it, and --points writes coloured points of non-occluded
pixels. A warning on standard error is given for pairs that seem swapped or not rectified. Without
--weights, the packaged weights are used; nothing is downloaded.

LEFT and RIGHT may be folders. Their images are paired by equal names, or by names that differ only
in left and right, l and r, 0 and 1 or 2 and 3. For every pair, NAME.npz with disparity and
occlusion (or the format of --format) and a picture NAME.jpg are written to --save. Existing results
are skipped. Unreadable pairs are listed at the end, all others are processed, and the exit code is
1.

\b
Examples:
  quadtree stereo left.png right.png
  quadtree stereo left.png right.png --out near.jpg --save disparity.pfm --max-disparity 128
  quadtree stereo left.png right.png --depth depth.npy --focal 994.98 --baseline 193 --offset 31
  quadtree stereo left.png right.png --points room.ply --focal 994.98 --baseline 193 --offset 31
  quadtree stereo image_2 image_3 --save OUT --format png --device cuda
"""
PICTURE = Path("disparity.png")
FORMATS = ("npz", "npy", "pfm", "png")  # of the files of two folders
ONLY_ONE = ("out", "occlusion", "depth", "points", "focal", "baseline", "offset")
ONLY_MANY = ("file_format", "force", "batch")
NAMED = 5  # images without a partner listed in a message

OPTIONS = "weights out size max_disparity device dtype batch force json debug"


OWN = {
    "left": argument(str, "LEFT", "Left image, or a folder.", ...),
    "right": argument(str, "RIGHT", "Right image, or a folder.", ...),
    "save": option(
        FILE,
        "Write disparities, .npz, .npy, .pfm or .png; a folder for two folders.",
        metavar="PATH",
    ),
    "occlusion": option(FILE, "Write a picture of occluded pixels."),
    "depth": option(FILE, "Write depth, .npy."),
    "points": option(FILE, "Write coloured points, .ply."),
    "focal": option(FLOAT, "Focal length in pixels."),
    "baseline": option(FLOAT, "Distance between the cameras."),
    "offset": option(float, "Offset of disparities for depth (Middlebury's doffs).", 0.0),
    "file_format": option(str, "Format for folders: npz, npy, pfm or png.", "npz", "--format"),
}


def run(context: typer.Context) -> None:
    left, right = context.params["left"], context.params["right"]
    folders = [Path(name).is_dir() for name in (left, right)]
    if any(folders) and not all(folders):
        raise OptionError(
            f"LEFT and RIGHT must be two images or two folders, got {left!r} and {right!r}; "
            "pass two files or two folders"
        )
    unused, kind = (ONLY_ONE, "two folders") if all(folders) else (ONLY_MANY, "one pair")
    if given := [name for name in unused if is_given(context, name)]:
        flags = ", ".join(f"--{name.removeprefix('file_')}" for name in given)
        raise OptionError(f"{flags} has no effect for {kind}; leave it out")
    (_find_many if all(folders) else _find_one)(context)


def _find_one(context: typer.Context) -> None:
    import numpy as np

    from quadtree_attention.cli.predict import check_targets, make_predictor
    from quadtree_attention.images import to_image
    from quadtree_attention.tasks.contract import checked_suffix
    from quadtree_attention.tasks.stereo.predictor import check_pair
    from quadtree_attention.tasks.stereo.result import SPREAD, DisparityCodec, spread

    o = context.params
    inputs = o["left"], o["right"]
    out, save, occlusion = o["out"], o["save"], o["occlusion"]
    depth, points = o["depth"], o["points"]
    if (out, save, occlusion, depth, points) == (None,) * 5 and not o["json"]:
        out = PICTURE
    if save is not None:
        checked_suffix(save, DisparityCodec())
    if depth is not None and depth.suffix != ".npy":
        raise OptionError(f"depth is written as .npy, got {str(depth)!r}; change the suffix")
    if points is not None and points.suffix != ".ply":
        raise OptionError(f"points are written as .ply, got {str(points)!r}; change the suffix")
    cameras = _cameras(o["focal"], o["baseline"], o["offset"], depth or points)
    check_targets((out, occlusion), (save, depth, points), inputs)
    images = to_image(inputs[0]), to_image(inputs[1])  # before the slow part
    check_pair(*images)
    predictor = make_predictor(context, "stereo", ("max_disparity",))
    found: Disparity = predictor(*images)
    if save is not None:
        found.save(save)
    if depth is not None and cameras is not None:
        found.save_depth(depth, **cameras)
    if points is not None and cameras is not None:
        found.save_points(points, **cameras)
    if occlusion is not None:
        found.draw_occlusion(occlusion)
    if out is not None:
        found.draw(out)
    for sentence in found.warnings:
        tell(f"warning: {sentence}")
    files = [str(path) for path in (out, save, occlusion, depth, points) if path is not None]
    about: dict[str, Any] = {}
    if cameras is not None:
        far = found.depth(**cameras)
        far = far[np.isfinite(far)]
        about["depth"] = dict(zip(SPREAD, spread(far) if far.size else (None,) * 3, strict=True))
    if o["json"]:
        given = {"left": inputs[0], "right": inputs[1]}
        say_json({**given, **found.to_dict(), **about, "written": files})
        return
    rows = {"device": str(predictor.device), "written": written(files)}
    if about:
        rows = {"depth": "infinite: no disparity is above 0"} | rows
        if far.size:
            rows["depth"] = "{min:.4g} to {max:.4g}, median {median:.4g}".format(**about["depth"])
    say(found.to_text() + "\n" + table(rows))


def _cameras(
    focal: float | None, baseline: float | None, offset: float, depth: Path | None
) -> dict[str, float] | None:
    """Options of `Disparity.depth`; None if depth is not requested."""
    from quadtree_attention.tasks.stereo.result import check_cameras

    missing = [n for n, v in (("--focal", focal), ("--baseline", baseline)) if v is None]
    if len(missing) == 1 or (missing and (depth is not None or offset)):
        raise OptionError(
            f"depth needs the focal length and the baseline of the cameras, got no "
            f"{' and no '.join(missing)}; give both, or leave out --depth, --points and --offset"
        )
    if focal is None or baseline is None:
        return None
    check_cameras(focal, baseline, offset)
    return {"focal": focal, "baseline": baseline, "offset": offset}


def _find_many(context: typer.Context) -> None:
    import numpy as np

    from quadtree_attention.cli.predict import make_predictor, predict_pairs
    from quadtree_attention.images import images_inside
    from quadtree_attention.tasks.contract import Items

    o = context.params
    save: Path | None = o["save"]
    if save is None:
        raise OptionError("two folders need --save OUT, a folder for the results; add it")
    checks.one_of(FORMATS, format=o["file_format"])
    for name in (o["left"], o["right"]):
        if save.exists() and save.samefile(name):
            raise OptionError(
                f"{name} contains the input images, which results could overwrite; write to "
                "another folder"
            )
    pairs, alone = pair_up(*(images_inside(Path(name)) for name in (o["left"], o["right"])))
    if not pairs:
        raise DataError(
            f"no image in {o['left']} has a partner in {o['right']}: names must be equal, or "
            "differ only in left and right, l and r, 0 and 1 or 2 and 3; rename them"
        )
    names = list(pairs)
    predictor = make_predictor(context, "stereo", ("max_disparity",))
    more = ", ..." if len(alone) > NAMED else ""
    missing = f"{len(alone)} image(s) without a partner: {', '.join(alone[:NAMED])}{more}"
    predict_pairs(
        context,
        predictor,
        Items(names, list(pairs.values())),
        suffix=f".{o['file_format']}",
        after=lambda i, found: found.draw(save / f"{names[i]}.jpg", title=names[i]),
        describe=lambda i: dict(zip(("left", "right"), pairs[names[i]], strict=True)),
        numbers=lambda found: {
            "median": round(float(np.median(found.disparity)), 3),
            "occluded": round(found.occluded, 4),
        },
        facts=lambda rows: {
            "disparity": f"median {np.mean([r['median'] for r in rows]):.1f} px on average",
            "occluded": f"{100 * np.mean([r['occluded'] for r in rows]):.1f} % on average",
        },
        note=missing if alone else None,
    )


def pair_up(
    left: Sequence[str], right: Sequence[str]
) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Return pairs by the name of the left image, and images without a partner.

    Partners have the same stem. If there are none, the stems of partners differ in one
    place only: left and right, l and r, 0 and 1 or 2 and 3; both lists may then be of one folder.

    Raises:
        DataError: Two images of a folder have the same stem.
    """
    lefts, rights = _by_stem(left), _by_stem(right)
    same = [stem for stem, path in lefts.items() if rights.get(stem, path) != path]
    pairs = {stem: (lefts[stem], rights[stem]) for stem in same}
    if not pairs:
        for stem, path in lefts.items():
            if partner := next((rights[s] for s in _partners(stem) if s in rights), None):
                pairs[stem] = path, partner
    taken = {path for pair in pairs.values() for path in pair}
    return pairs, [path for path in dict.fromkeys([*left, *right]) if path not in taken]


# Parts of names of left and right images; a digit denotes a camera only if it has no adjacent
# digit, as in im0 and 000046_10_0
_SIDES = (
    (r"left", "right"),
    (r"(?<![a-z])l(?![a-z])", "r"),
    (r"(?<!\d)0(?!\d)", "1"),
    (r"(?<!\d)2(?!\d)", "3"),
)


def _partners(stem: str) -> Iterator[str]:
    """Yield candidate names of the right image, the most likely first."""
    for pattern, other in _SIDES:
        for match in re.finditer(pattern, stem, re.IGNORECASE):
            word = match[0]
            new = other.upper() if word.isupper() else other.title() if word.istitle() else other
            yield stem[: match.start()] + new + stem[match.end() :]


def _by_stem(paths: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in paths:
        stem = Path(path).stem
        if stem in found:
            raise DataError(
                f"{found[stem]} and {path} have the same name except for the suffix, so that "
                "their results would too; rename or remove one"
            )
        found[stem] = path
    return found
