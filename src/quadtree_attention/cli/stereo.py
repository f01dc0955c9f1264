# SPDX-License-Identifier: Apache-2.0
"""`quadtree stereo`: how near everything is in a rectified pair, or in the pairs of two folders."""

import io
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from quadtree_attention.cli.evaluate import printable
from quadtree_attention.errors import DataError, OptionError, QuadtreeAttentionError
from quadtree_attention.files import check_writable, write_whole
from quadtree_attention.images import images_inside, to_image
from quadtree_attention.tasks.stereo.evaluate import settings_of
from quadtree_attention.tasks.stereo.formats import disparity_format
from quadtree_attention.tasks.stereo.predictor import (
    Disparity,
    StereoMatcher,
    check_cameras,
    check_pair,
)
from quadtree_attention.tasks.stereo.results import DRAWN, prepare_folder, write_prediction
from quadtree_attention.viz.canvas import picture_format, save_picture

PICTURE = Path("disparity.png")
FORMATS = ("npz", "npy", "pfm", "png")  # of the files in --save-dir
OCCLUDED = 0.5  # probability from which pixels count as occluded
NAMED = 5  # images without a partner that are named


@dataclass(frozen=True)
class Request:
    """Which pairs are asked for, as it was typed; None is what was not."""

    left: str
    right: str
    out: Path | None = None
    save: Path | None = None
    occlusion: Path | None = None
    depth: Path | None = None
    focal: float | None = None
    baseline: float | None = None
    offset: float = 0.0
    save_dir: Path | None = None
    format: str = FORMATS[0]
    force: bool = False
    weights: Path | None = None
    size: int | None = None
    max_disparity: float | None = None
    device: str | None = None

    def matcher(self) -> StereoMatcher:
        return StereoMatcher(
            self.weights, device=self.device, size=self.size, max_disparity=self.max_disparity
        )


@dataclass(frozen=True)
class PairResult:
    """What became of one pair of two folders: disparities, or why there are none."""

    name: str
    left: str
    right: str
    median: float | None = None
    occluded: float | None = None
    seconds: float | None = None
    warnings: tuple[str, ...] = ()
    error: str | None = None


ONLY_ONE = ("out", "save", "occlusion", "depth", "focal", "baseline", "offset")
ONLY_MANY = ("save_dir", "format", "force")


def run(request: Request, *, as_json: bool) -> bool:
    """Finds the disparities of one pair or of all of two folders; whether all could be read."""
    folders = [Path(name).is_dir() for name in (request.left, request.right)]
    if all(folders):
        _check_without(request, ONLY_ONE, "the pairs of two folders; --save-dir gets all results")
        return _find_many(request, as_json=as_json)
    if any(folders):
        raise OptionError(
            f"LEFT and RIGHT must be two images or two folders, got {request.left!r} and "
            f"{request.right!r}; pass two of a kind"
        )
    _check_without(request, ONLY_MANY, "one pair; LEFT and RIGHT may be folders of many")
    _find_one(request, as_json=as_json)
    return True


def _check_without(request: Request, names: Iterable[str], what: str) -> None:
    options = {f.name: f for f in fields(request)}
    if given := [n for n in names if getattr(request, n) != options[n].default]:
        words = ["--" + name.replace("_", "-") for name in given]
        raise OptionError(f"this is {what}; got {', '.join(words)} as well; leave that out")


# ---- one pair


def _find_one(request: Request, *, as_json: bool) -> None:
    inputs = request.left, request.right
    out = request.out
    others = request.save, request.occlusion, request.depth
    if out is None and others == (None, None, None) and not as_json:
        out = PICTURE
    targets = [path for path in (out, *others) if path is not None]
    _check_targets(request, out, targets)
    images = to_image(inputs[0]), to_image(inputs[1])  # before the slow part
    check_pair(*images)
    matcher = request.matcher()
    found = matcher(*images)
    depth = None
    if request.focal is not None and request.baseline is not None:
        depth = found.depth(request.focal, request.baseline, offset=request.offset)
    if request.save is not None:
        found.save(request.save)
    if request.depth is not None and depth is not None:
        content = io.BytesIO()
        np.save(content, depth)
        write_whole(request.depth, content.getvalue())
    if request.occlusion is not None:
        found.draw_occlusion(request.occlusion)
    if out is not None:
        found.draw(out)
    for sentence in found.warnings:
        print(f"quadtree: warning: {sentence}", file=sys.stderr)
    written = [str(path) for path in targets]
    if as_json:
        print(json.dumps(_as_dict(inputs, found, depth, written), indent=2))
    else:
        print(printable(as_text(found, depth, written, str(matcher.device))))


def _check_targets(request: Request, out: Path | None, targets: Sequence[Path]) -> None:
    """Before the slow part: what would stop the writing at its end."""
    if out is not None:
        picture_format(out)
    if request.occlusion is not None:
        picture_format(request.occlusion)
    if request.save is not None:
        disparity_format(request.save)
    if request.depth is not None and request.depth.suffix != ".npy":
        raise OptionError(f"depth is written as .npy, got {str(request.depth)!r}; name it so")
    _check_cameras(request)
    for path in targets:
        check_writable(path, request.left, request.right)
    if len({path.absolute() for path in targets}) < len(targets):
        raise OptionError(
            f"every file must have a name of its own, got {', '.join(map(str, targets))}; rename "
            "one"
        )


def _check_cameras(request: Request) -> None:
    given = {"--focal": request.focal, "--baseline": request.baseline}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == 1 or (missing and request.depth is not None):
        raise OptionError(
            f"depth needs the focal length and the baseline of the cameras, got no "
            f"{' and no '.join(missing)}; give both, or leave out depth"
        )
    if missing and request.offset:
        raise OptionError("--offset is for depth, got no --focal and no --baseline; give both")
    if request.focal is not None and request.baseline is not None:
        check_cameras(request.focal, request.baseline, request.offset)


def as_text(found: Disparity, depth: Any, written: Sequence[str], device: str) -> str:
    low, middle, high = _spread(found.disparity)
    rows = {
        "disparity": f"{low:.1f} to {high:.1f} px, median {middle:.1f}",
        "occluded": f"{100 * _occluded(found):.1f} % of the left image",
    }
    if depth is not None:
        finite = depth[np.isfinite(depth)]
        near, middle, far = _spread(finite)
        rows["depth"] = f"{near:.4g} to {far:.4g}, median {middle:.4g}, in the unit of --baseline"
        if not finite.size:
            rows["depth"] = "infinite: no disparity is above 0"
    rows["time"] = f"{found.seconds:.2f} s on {device}"
    height, width = found.disparity.shape
    if found.size is not None:
        at = f"{found.size[0]}x{found.size[1]}"
        rows["matched at"] = at + (
            "" if found.size == (width, height) else f" (of {width}x{height})"
        )
    rows["written"] = ", ".join(written)
    return "\n".join(f"{name:11}  {value}" for name, value in rows.items() if value)


def _as_dict(
    inputs: tuple[str, str], found: Disparity, depth: Any, written: Sequence[str]
) -> dict[str, Any]:
    names = "min", "median", "max"
    about: dict[str, Any] = {
        "left": inputs[0],
        "right": inputs[1],
        "width": found.disparity.shape[1],
        "height": found.disparity.shape[0],
        "disparity": dict(zip(names, _spread(found.disparity), strict=True)),
        "occluded": round(_occluded(found), 4),
    }
    if depth is not None:
        finite = depth[np.isfinite(depth)]
        spread = _spread(finite) if finite.size else (None, None, None)
        about["depth"] = dict(zip(names, spread, strict=True))
    return about | {
        "seconds": round(found.seconds, 4),
        "matched_at": found.size,
        "warnings": list(found.warnings),
        "written": list(written),
    }


def _spread(values: Any) -> tuple[float, float, float]:
    """Least, middle and largest value; 0 without any."""
    if not values.size:
        return 0.0, 0.0, 0.0
    return float(values.min()), float(np.median(values)), float(values.max())


def _occluded(found: Disparity) -> float:
    return float((found.occlusion >= OCCLUDED).mean())


# ---- two folders


def _find_many(request: Request, *, as_json: bool) -> bool:
    if request.save_dir is None:
        raise OptionError("two folders need --save-dir OUT, a folder for the results; name one")
    if request.format not in FORMATS:
        raise OptionError(
            f"--format must be one of {', '.join(FORMATS)}, got {request.format!r}; choose one"
        )
    for name in (request.left, request.right):
        if request.save_dir.exists() and request.save_dir.samefile(name):
            raise OptionError(
                f"{name} holds the images, results beside them could replace some; write to "
                "another folder"
            )
    pairs, alone = pair_up(*(images_inside(Path(name)) for name in (request.left, request.right)))
    if not pairs:
        raise DataError(
            f"no image in {request.left} has a partner in {request.right}: names must be the same, "
            "or differ only by left and right, l and r, 0 and 1 or 2 and 3; rename them"
        )
    matcher = request.matcher()
    suffix = f".{request.format}"
    noted = {name: [str(Path(p).absolute()) for p in pair] for name, pair in pairs.items()}
    settings = settings_of(matcher) | {"format": request.format}
    folder = prepare_folder(request.save_dir, settings, noted, force=request.force, suffix=suffix)
    results: list[PairResult] = []
    there = 0
    for name, pair in tqdm(pairs.items(), unit="pair", leave=False, disable=None):
        # Looked up now and not before, so that several processes can share the work
        if (target := folder / f"{name}{suffix}").exists():
            there += 1
            continue
        results.append(_find_pair(matcher, name, pair, target))
    _report(results, there, folder, as_json=as_json)
    return _complain(results, alone, len(pairs))


def _find_pair(
    matcher: StereoMatcher, name: str, pair: tuple[str, str], target: Path
) -> PairResult:
    try:
        found = matcher(*pair)
        # The numbers last: a pair that has them is taken for done
        save_picture(found.draw(title=name), target.with_name(name + DRAWN))
        if target.suffix == ".npz":
            write_prediction(target, found)
        else:
            found.save(target)
    except QuadtreeAttentionError as error:
        return PairResult(name, *pair, error=str(error))
    middle, hidden = float(np.median(found.disparity)), _occluded(found)
    numbers = round(middle, 3), round(hidden, 4), round(found.seconds, 4)
    return PairResult(name, *pair, *numbers, warnings=found.warnings)


def pair_up(
    left: Sequence[str], right: Sequence[str]
) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Pairs by the name of the left image, and images that have no partner.

    Partners have the same name but for the suffix. Where no two have, partners' names differ in one
    place only: left and right, l and r, 0 and 1 or 2 and 3; both lists may then be of one folder.

    Raises:
        DataError: Two images of a folder have the same name but for the suffix.
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


# What a left image has in its name, and the right one instead; a digit stands for a camera only if
# no other is beside it, as in im0 and 000046_10_0
_SIDES = (
    (r"left", "right"),
    (r"(?<![a-z])l(?![a-z])", "r"),
    (r"(?<!\d)0(?!\d)", "1"),
    (r"(?<!\d)2(?!\d)", "3"),
)


def _partners(stem: str) -> Iterator[str]:
    """Names that the right image may have, the likeliest first."""
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
                f"{found[stem]} and {path} have the same name but for the suffix, which results "
                "would share; rename or remove one"
            )
        found[stem] = path
    return found


def _report(results: list[PairResult], there: int, folder: Path, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=2))
        return
    done = [result for result in results if result.error is None]
    rows = {"pairs": f"{len(done):,} done, {len(results) - len(done):,} failed"}
    if there:
        rows["pairs"] += f", {there:,} there already (--force makes them again)"
    if done:
        rows["disparity"] = f"median {np.mean([r.median for r in done]):.1f} px on average"
        rows["occluded"] = f"{100 * np.mean([r.occluded for r in done]):.1f} % on average"
        rows["time"] = f"{np.mean([r.seconds for r in done]):.2f} s per pair"
    rows["written"] = str(folder)
    print(printable("\n".join(f"{name:11}  {value}" for name, value in rows.items())))


def _complain(results: Sequence[PairResult], alone: Sequence[str], pairs: int) -> bool:
    """Tells of all that is not as it should be; whether nothing failed."""
    for result in results:
        for sentence in result.warnings:
            print(f"quadtree: warning: {result.name}: {sentence}", file=sys.stderr)
    if alone:
        more = ", ..." if len(alone) > NAMED else ""
        count = "1 image has" if len(alone) == 1 else f"{len(alone)} images have"
        names = ", ".join(alone[:NAMED])
        print(f"quadtree: {count} no partner: {names}{more}", file=sys.stderr)
    if failed := [result for result in results if result.error is not None]:
        print(f"quadtree: {len(failed)} of {pairs} pairs failed:", file=sys.stderr)
        for result in failed:
            print(f"  {result.name}: {' '.join(str(result.error).split())}", file=sys.stderr)
    return not failed and not alone
