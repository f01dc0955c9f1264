# SPDX-License-Identifier: Apache-2.0
"""`quadtree match`: what two images have in common, or the images of many pairs."""

import json
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args

import numpy as np
from tqdm import tqdm

from quadtree_attention.cli.evaluate import printable
from quadtree_attention.errors import (
    DataError,
    OptionError,
    QuadtreeAttentionError,
    ShapeError,
)
from quadtree_attention.files import check_writable, file_sha256, make_folder, write_whole
from quadtree_attention.images import to_image
from quadtree_attention.tasks.match.estimate import Estimator, Pose, check_camera
from quadtree_attention.tasks.match.metrics import Array, rotation_error
from quadtree_attention.tasks.match.pairs import PairLine, read_pairs
from quadtree_attention.tasks.match.predictor import SIZE, Matcher, Matches
from quadtree_attention.viz.canvas import picture_format

PICTURE = Path("matches.png")
SETTINGS = "settings.json"  # in a folder of matches: what they were made with


@dataclass(frozen=True)
class Request:
    """What is to be matched, as it was typed; None is what was not."""

    image0: str | None = None
    image1: str | None = None
    out: Path | None = None
    save: Path | None = None
    K0: str | None = None
    K1: str | None = None
    pairs: Path | None = None
    images: Path | None = None
    save_dir: Path | None = None
    force: bool = False
    weights: Path | None = None
    size: int = SIZE
    threshold: float | None = None
    max_matches: int | None = None
    device: str | None = None

    def matcher(self) -> Matcher:
        return Matcher(self.weights, device=self.device, size=self.size, threshold=self.threshold)

    def best(self, matches: Matches) -> Matches:
        return matches if self.max_matches is None else matches.best(self.max_matches)


@dataclass(frozen=True)
class PairResult:
    """What became of one pair of a file: matches, or why there are none."""

    name: str
    line: int
    image0: str
    image1: str
    matches: int | None = None
    seconds: float | None = None
    error: str | None = None


ARGUMENTS = {"image0": "A", "image1": "B"}
ONLY_TWO = ("image0", "image1", "out", "save", "K0", "K1")
ONLY_MANY = ("pairs", "images", "save_dir", "force")


def run(request: Request, *, as_json: bool) -> bool:
    """Matches two images or all pairs of a file; whether all could be read."""
    if request.max_matches is not None and request.max_matches < 1:
        raise OptionError(f"--max must be at least 1, got {request.max_matches}; pass a larger one")
    if request.pairs is None:
        _check_without(request, ONLY_MANY, "two images; --pairs FILE matches many")
        _match_two(request, as_json=as_json)
        return True
    _check_without(request, ONLY_TWO, "the pairs of --pairs, and every result to --save-dir")
    return _match_many(request, request.pairs, as_json=as_json)


def _check_without(request: Request, names: Iterable[str], matched: str) -> None:
    options = {f.name: f for f in fields(request)}
    if given := [n for n in names if getattr(request, n) != options[n].default]:
        words = [ARGUMENTS.get(n) or "--" + n.replace("_", "-") for n in given]
        raise OptionError(
            f"this matches {matched}; got {', '.join(words)} as well; leave out one or the other"
        )


# ---- two images


def _match_two(request: Request, *, as_json: bool) -> None:
    if request.image0 is None or request.image1 is None:
        given = "none" if request.image0 is None else f"only {request.image0!r}"
        raise OptionError(
            f"matching needs two images, got {given}; quadtree match a.jpg b.jpg, or --pairs FILE"
        )
    inputs = request.image0, request.image1
    out = request.out
    if out is None and request.save is None and not as_json:
        out = PICTURE
    _check_targets(out, request.save, inputs)
    cameras = _cameras(request.K0, request.K1)
    images = to_image(inputs[0]), to_image(inputs[1])  # before the slow part
    matcher = request.matcher()
    matches = request.best(matcher(*images))
    poses = {} if cameras is None else _poses(matches, *cameras)
    if request.save is not None:
        matches.save(request.save)
    if out is not None:
        matches.draw(out)
    written = [str(path) for path in (out, request.save) if path is not None]
    if as_json:
        print(json.dumps(_as_dict(inputs, matches, poses, written)))
    else:
        print(printable(as_text(matches, poses, written, str(matcher.device))))


def _check_targets(out: Path | None, save: Path | None, inputs: tuple[str, str]) -> None:
    """Before the slow part: what would stop the writing at its end."""
    if out is not None:
        picture_format(out)
        check_writable(out, *inputs)
    if save is not None:
        if save.suffix != ".npz":
            raise OptionError(f"matches are written as .npz, got {str(save)!r}; name it so")
        check_writable(save, *inputs)


def as_text(
    matches: Matches, poses: dict[str, Pose | None], written: list[str], device: str
) -> str:
    counted = (
        f"{len(matches):,}, mean confidence {matches.confidence.mean():.2f}"
        if len(matches)
        else "none: the images have nothing in common that is sure enough; lower --threshold"
    )
    rows = {"matches": counted, "time": f"{matches.seconds:.2f} s on {device}"}
    if matches.sizes is not None and matches.images is not None:
        rows["matched at"] = " and ".join(
            _by(size) + ("" if size == image.size else f" (of {_by(image.size)})")
            for size, image in zip(matches.sizes, matches.images, strict=True)
        )
    for name, pose in poses.items():
        rows[f"by {name}"] = _pose_text(pose, len(matches))
    rows["written"] = " and ".join(written)
    return "\n".join(f"{name:11}  {value}" for name, value in rows.items() if value)


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def _pose_text(pose: Pose | None, count: int) -> str:
    if pose is None:
        return "no pose: the matches do not determine one"
    direction = ", ".join(f"{value:.3f}" for value in pose.translation)
    return (
        f"rotation {_degrees(pose):.2f} degrees, translation along ({direction}), "
        f"{pose.inliers.sum():,} of {count:,} inliers"
    )


def _degrees(pose: Pose) -> float:
    return rotation_error(pose.rotation, np.eye(3))


def _as_dict(
    inputs: tuple[str, str], matches: Matches, poses: dict[str, Pose | None], written: list[str]
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "image0": inputs[0],
        "image1": inputs[1],
        "matches": len(matches),
        "seconds": round(matches.seconds, 4),
        "matched_at": matches.sizes,
        "written": written,
    }
    if poses:
        found["poses"] = {name: pose and _pose_dict(pose) for name, pose in poses.items()}
    found["keypoints0"] = matches.keypoints0.round(3).tolist()
    found["keypoints1"] = matches.keypoints1.round(3).tolist()
    found["confidence"] = matches.confidence.astype(float).round(4).tolist()
    return found


def _pose_dict(pose: Pose) -> dict[str, Any]:
    return {
        "rotation_degrees": _degrees(pose),
        "rotation": pose.rotation.tolist(),
        "translation": pose.translation.tolist(),
        "inliers": int(pose.inliers.sum()),
    }


# ---- cameras


def _cameras(given0: str | None, given1: str | None) -> tuple[Array, Array] | None:
    if given0 is None and given1 is None:
        return None
    if given0 is None or given1 is None:
        missing = "--K0" if given0 is None else "--K1"
        raise OptionError(f"the pose needs both cameras, got no {missing}; give both or none")
    return read_camera("--K0", given0), read_camera("--K1", given1)


def read_camera(option: str, given: str) -> Array:
    """A camera (3, 3) from "fx,fy,cx,cy", from nine numbers, or from a file of either.

    Raises:
        OptionError: It is none of these.
    """
    text = given
    if os.path.isfile(given):
        try:
            text = Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise OptionError(f"{option}: cannot read {given}: {reason}; pass a text") from error
    accepted = "fx,fy,cx,cy in pixels, nine numbers row by row, or a text file with either"
    try:
        numbers = [float(word) for word in re.split(r"[\s,;]+", text.strip("[]() \t\r\n,;"))]
    except ValueError as error:
        raise OptionError(
            f"{option} must be {accepted}, got {given!r}, which is neither numbers nor a file; "
            "pass such"
        ) from error
    if len(numbers) == 4:
        fx, fy, cx, cy = numbers
        numbers = [fx, 0, cx, 0, fy, cy, 0, 0, 1]
    if len(numbers) != 9:
        raise OptionError(f"{option} must be {accepted}, got {len(numbers)} numbers; pass such")
    camera = np.array(numbers).reshape(3, 3)
    try:
        check_camera(option.strip("-"), camera)
    except ShapeError as error:
        raise OptionError(str(error)) from error
    if camera[2].tolist() != [0, 0, 1]:
        raise OptionError(
            f"{option} must end in 0, 0, 1, got {camera[2].tolist()}; pass it row by row"
        )
    return camera


def _poses(matches: Matches, K0: Array, K1: Array) -> dict[str, Pose | None]:  # noqa: N803
    return {name: matches.relative_pose(K0, K1, name) for name in get_args(Estimator)}


# ---- many pairs


def _match_many(request: Request, path: Path, *, as_json: bool) -> bool:
    pairs = read_pairs(path)
    images = path.parent if request.images is None else request.images
    if not images.is_dir():
        raise DataError(f"there is no folder of images {str(images)!r}; check --images")
    if request.save_dir is None:
        raise OptionError("--pairs needs --save-dir OUT, a folder for the matches; name one")
    matcher = request.matcher()
    settings = _settings(matcher, request)
    folder = _prepared(request.save_dir, settings, _sources(pairs, images), force=request.force)
    targets = {pair.name: folder / f"{pair.name}.npz" for pair in pairs}
    if request.force:  # all of them now: what is left of an interrupted run is then of this one
        for target in targets.values():
            target.unlink(missing_ok=True)
    results: list[PairResult] = []
    there = 0
    for pair in tqdm(pairs, unit="pair", leave=False, disable=None):
        # Looked up now and not before, so that several processes can share the work
        if targets[pair.name].exists():
            there += 1
            continue
        results.append(_match_pair(matcher, pair, images, targets[pair.name], request))
    failed = [result for result in results if result.error is not None]
    _report(results, there, folder, as_json=as_json)
    if failed:
        count = f"{len(failed)} of {len(pairs)} pairs"
        print(f"quadtree: {count} could not be matched:", file=sys.stderr)
        for result in failed:
            print(f"  line {result.line}: {' '.join(str(result.error).split())}", file=sys.stderr)
    return not failed


def _match_pair(
    matcher: Matcher, pair: PairLine, images: Path, target: Path, request: Request
) -> PairResult:
    asked = pair.name, pair.line, pair.image0, pair.image1
    try:
        matches = request.best(matcher(*pair.read_images(images)))
    except QuadtreeAttentionError as error:
        return PairResult(*asked, error=str(error))
    matches.save(target)  # where this fails, it will for all
    return PairResult(*asked, len(matches), round(matches.seconds, 4))


def _settings(matcher: Matcher, request: Request) -> dict[str, Any]:
    return {
        "weights_sha256": file_sha256(matcher.path),
        "size": matcher.size,
        "threshold": matcher.model.coarse_matching.threshold,
        "max": request.max_matches,
    }


def _sources(pairs: Iterable[PairLine], images: Path) -> dict[str, list[Any]]:
    """What the matches of each name are of."""
    folder = images.absolute()
    return {
        p.name: [str(folder / p.image0), str(folder / p.image1), p.rotation0, p.rotation1]
        for p in pairs
    }


def _prepared(
    folder: Path, settings: dict[str, Any], sources: dict[str, list[Any]], *, force: bool
) -> Path:
    """The folder, with settings and images noted: matches of different ones must not get mixed."""
    make_folder(folder)
    note = folder / SETTINGS
    check_writable(note)
    before, noted = _read_note(note) if note.is_file() else (settings, {})
    if not force:
        instead = f"({SETTINGS} there tells); --force makes them again, or write to another folder"
        if before != settings:
            raise OptionError(
                f"{folder} holds matches that were made with other weights or options {instead}"
            )
        changed = (f"{n}.npz" for n, of in sources.items() if noted.get(n, of) != of)
        if other := next((name for name in changed if (folder / name).exists()), None):
            raise OptionError(f"{folder} holds matches of other images as {other} {instead}")
    if before == settings:
        sources = noted | sources
    else:  # nothing that other settings have made stays, or a later run would take it for its own
        for name in noted:
            if Path(name).name == name:
                (folder / f"{name}.npz").unlink(missing_ok=True)
    content = json.dumps(settings | {"pairs": sources}, indent=2)
    write_whole(note, (content + "\n").encode())
    return folder


def _read_note(note: Path) -> tuple[dict[str, Any] | None, dict[str, list[Any]]]:
    """Settings and images of the matches in a folder; no settings if the note is damaged."""
    try:
        before = json.loads(note.read_bytes())
        return before, before.pop("pairs", {})
    except (OSError, ValueError, AttributeError):
        return None, {}


def _report(results: list[PairResult], there: int, folder: Path, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=2))
        return
    counts = [r.matches for r in results if r.matches is not None]
    times = [r.seconds for r in results if r.seconds is not None]
    rows = {"pairs": f"{len(counts):,} matched, {len(results) - len(counts):,} failed"}
    if there:
        rows["pairs"] += f", {there:,} there already (--force makes them again)"
    if counts:
        rows["matches"] = f"{np.mean(counts):,.0f} on average, {counts.count(0):,} pairs with none"
        rows["time"] = f"{np.mean(times):.2f} s per pair"
    rows["written"] = str(folder)
    print(printable("\n".join(f"{name:11}  {value}" for name, value in rows.items())))
