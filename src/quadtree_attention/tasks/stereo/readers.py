# SPDX-License-Identifier: Apache-2.0
"""Readers of rectified pairs with true disparity, in several folder layouts.

Occlusion is read from a mask if there is one, or computed by comparing the disparities of both
views if both exist. Otherwise it is known only for pixels whose corresponding point is outside of
the right view.
"""

import inspect
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from PIL import Image

from quadtree_attention import checks
from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.files import StrPath
from quadtree_attention.images import Array, image_size, to_image
from quadtree_attention.tasks.contract import Source, file_identity
from quadtree_attention.tasks.readers import check_folder, reading, summary
from quadtree_attention.tasks.stereo.formats import READ, DisparityMap, read_disparity

TORCHVISION = "torchvision:"  # prefix of the name of one of its classes
LOSE_WHAT_IS_HIDDEN = ("ETH3DStereo", "Middlebury2014Stereo")  # classes of torchvision
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".ppm", ".tif", ".tiff")  # in this order
VALIDATION = {"val", "validation", "test", "testing", "TEST"}  # folders of that split
PASSES = (  # folders of Scene Flow's images; final ones where there are no clean ones
    "frames_cleanpass", "RGB_cleanpass", "image_clean",
    "frames_finalpass", "RGB_finalpass", "image_final",
)  # fmt: skip
MASKS = ("occlusion", "disparity_occlusions")  # of Scene Flow
CONSISTENT = 1.0  # pixels by which the disparities of both views may differ
VISIBLE, HIDDEN = 255, 128  # in mask0nocc.png of Middlebury and ETH3D
_DEEPEST = 6  # maximum depth of folders below the root


@dataclass(frozen=True)
class StereoTruth:
    """The truth about the left view of a rectified pair."""

    disparity: Array  # (H, W) float32 pixels, 0 where not known
    known: Array  # (H, W) bool
    occluded: Array  # (H, W) bool: known to be occluded in, or outside of, the right view
    visible: Array  # (H, W) bool: disparity is known, and not known to be occluded


@dataclass(frozen=True)
class StereoFiles:
    """The files of one pair."""

    name: str
    left: Path
    right: Path
    disparity: Path
    disparity1: Path | None = None  # of the right view
    occlusion: Path | None = None  # not 0: hidden
    visibility: Path | None = None  # `VISIBLE`, `HIDDEN`, or 0: not known
    visible_disparity: Path | None = None  # of what is visible in both views only
    scale: float | None = None  # of the disparity; None: as the format has it


Found: TypeAlias = "StereoFiles | Incomplete"
Finder: TypeAlias = Callable[[Path, Path], list[Found] | None]


class Incomplete(NamedTuple):
    """An item that was found but cannot be used as a pair."""

    name: str
    reason: str


class FileSource(Source[StereoTruth]):
    """Pairs by their listed files, and the reasons why other pairs are skipped."""

    def __init__(self, files: Sequence[StereoFiles], skipped: Sequence[str] = ()) -> None:
        self.files, self.skipped = list(files), list(skipped)
        self.names = [pair.name for pair in files]

    def identity(self, index: int) -> list[Any]:
        return file_identity(self.files[index].left, self.files[index].right)

    def images(self, index: int) -> tuple[Image.Image, Image.Image]:
        files = self.files[index]
        left, right = to_image(files.left), to_image(files.right)
        _same_size(files.right, right.size[::-1], files.left, left.size[::-1])
        return left, right

    def truth(self, index: int) -> StereoTruth:
        files = self.files[index]
        truth = read_disparity(files.disparity, files.scale)
        _same_size(files.disparity, truth.values.shape, files.left, image_size(files.left)[::-1])
        if not truth.known.any():
            raise DataError(
                f"{files.disparity} has no known disparity, all values are zero, infinite or NaN; "
                "get it again"
            )
        occluded, unsure = _occlusion(files, truth)
        visible = truth.known & ~occluded & ~unsure
        return StereoTruth(truth.values, truth.known, occluded, visible)


class TorchvisionSource(Source[StereoTruth]):
    """Pairs of one of torchvision's stereo data sets; nothing is downloaded.

    Args:
        kind: Name of its class, such as "CREStereo".
        root: Folder that holds the folder of the data set, as that class wants it.
        split: For classes that have splits; "val" is their "test".
    """

    def __init__(self, kind: str, root: Path, split: str | None = None) -> None:
        from torchvision import datasets

        options: dict[str, Any] = {"root": root}
        if kind in LOSE_WHAT_IS_HIDDEN:
            raise OptionError(
                f"torchvision takes what is hidden in the other view for visible, got {kind!r}; "
                "take the layout middlebury2014 or auto, which tell them apart"
            )
        base = datasets.Kitti2015Stereo.__base__
        every = {name: getattr(datasets, name) for name in sorted(datasets.__all__)}
        known = [n for n, x in every.items() if isinstance(x, type) and issubclass(x, base)]
        checks.known(kind, known, f"NAME of the layout {TORCHVISION}NAME")
        made = every[kind]
        if "split" in inspect.signature(made).parameters:
            options["split"] = "test" if split == "val" else "train"
        elif split == "val":
            raise DataError(f"torchvision's {kind} has no pairs of the split 'val' in {root}")
        try:
            self._data: Any = made(**options)
        except Exception as error:  # errors of files, patterns and values
            reason = " ".join(str(error).split())
            raise DataError(
                f"torchvision's {kind} finds no data in {root}: {reason}; see its documentation "
                "for the folders that it expects there"
            ) from error
        if self._data._disparities[0][0] is None:
            raise DataError(
                f"torchvision's {kind} has no disparity of the split {split!r} in {root}"
            )
        self.kind, self.root = kind, root
        lefts = (Path(left).relative_to(root) for left, _ in self._data._images)
        self.names = [left.with_suffix("").as_posix() for left in lefts]

    def identity(self, index: int) -> list[Any]:
        return file_identity(*self._data._images[index])

    def images(self, index: int) -> tuple[Image.Image, Image.Image]:
        left, right, *_ = self._read(index)
        name = f"the right image of {self.name(index)}"
        _same_size(name, right.size[::-1], "the left one", left.size[::-1])
        return left.convert("RGB"), right.convert("RGB")

    def truth(self, index: int) -> StereoTruth:
        left, _, stored, *masks = self._read(index)
        values = np.asarray(stored, np.float32)[0]
        known = np.isfinite(values) & (values > 0)
        mask = np.asarray(masks[0], bool) if masks and masks[0] is not None else None
        occluded = np.zeros_like(known)
        if mask is not None and self.kind == "SintelStereo":
            occluded = ~mask  # invalid pixels are occluded or outside in this data set
        elif mask is not None:
            known &= mask
        name = f"the disparity of {self.name(index)}"
        _same_size(name, values.shape, "the image", left.size[::-1])
        values = np.where(known, values, np.float32(0))
        occluded |= _outside(values, known)
        return StereoTruth(values, known, occluded, known & ~occluded)

    def _read(self, index: int) -> Any:
        with reading(f"the pair {self.name(index)} in {self.root} by torchvision", "get it again"):
            return self._data[index]


def open_source(
    root: StrPath, *, split: str | None = None, strict: bool = True, layout: str = "auto"
) -> Source[StereoTruth]:
    """Open the pairs in a folder and its subfolders.

    Layouts:

    - "folder": `left/`, `right/`, `disparity/` and, optionally, `disparity_right/` and `occlusion/`
      (not 0: hidden), with files of the same name but for the suffix. PNG of 8 bits needs
      `meta.json` with `disparity_scale` beside the folders.
    - "scenes": `<scene>/` with `im0`, `im1`, `disp0` and, optionally, `disp1` and `meta.json`.
    - "middlebury2014": the same with `disp0GT.pfm` or `disp0.pfm` and `mask0nocc.png`; ETH3D, too,
      whose truth is in `two_view_training_gt/` beside `two_view_training/`.
    - "kitti2015", "kitti2012": `training/` with `image_2`, `disp_occ_0`, or `colored_0`, `disp_occ`
      and so on.
    - "sceneflow": `frames_cleanpass/.../left/`, `disparity/.../left/` and so on; FlyingThings3D,
      its subset, Monkaa and Driving.
    - "torchvision:NAME": a class of torchvision, such as `torchvision:CREStereo`.

    Args:
        root: Folder.
        split: "val": pairs in a folder val, validation, test or testing; "train": the rest;
            None or "all": everything.
        strict: Raise an error if a file of a pair is missing; otherwise such pairs are left out
            and listed in `skipped`.
        layout: One of them; "auto" takes all but torchvision's.

    Raises:
        OptionError: There is no such layout or split.
        DataError: There are no pairs, or, if strict, some are incomplete.
    """
    folder = Path(root)
    checks.one_of(("all", "train", "val"), split=split)
    split = None if split == "all" else split
    if not layout.startswith(TORCHVISION):
        checks.one_of(("auto", *_FINDERS, f"{TORCHVISION}NAME"), layout=layout)
    check_folder(folder, "pass the one that holds the pairs")
    if layout.startswith(TORCHVISION):
        return TorchvisionSource(layout.removeprefix(TORCHVISION), folder, split)
    finders = list(_FINDERS.values()) if layout == "auto" else [_FINDERS[layout]]
    found = _search(folder, folder, finders)
    if split is not None:  # pairs inside or outside of validation folders
        held_out = (not VALIDATION.isdisjoint(Path(entry.name).parts[:-1]) for entry in found)
        found = [e for e, val in zip(found, held_out, strict=True) if val == (split == "val")]
    pairs = [entry for entry in found if isinstance(entry, StereoFiles)]
    skipped = [entry.reason for entry in found if isinstance(entry, Incomplete)]
    if skipped and strict:
        raise DataError(
            f"{len(skipped)} pairs in {folder} are not whole: {summary(skipped)}; complete or "
            "remove them"
        )
    if not pairs:
        among = f" of the split {split!r}" if split else ""
        reasons = f" ({summary(skipped)})" if skipped else ""
        raise DataError(
            f"there are no pairs{among} with disparity in {folder} in the layout {layout!r}"
            f"{reasons}; pass the folder that holds them, or another layout"
        )
    return FileSource(pairs, skipped)


def _search(place: Path, root: Path, finders: Sequence[Finder], depth: int = 0) -> list[Found]:
    """Items of a folder, or if it has none, of its subfolders."""
    for finder in finders:
        within = place.relative_to(root)
        try:
            found = finder(place, within)
        except DataError as error:  # of a file that describes the folder
            return [Incomplete((within / place.resolve().name).as_posix(), str(error))]
        if found is not None:
            return found
    if depth == _DEEPEST:  # links may be cyclic
        return []
    try:
        children = sorted(p for p in place.iterdir() if p.is_dir() and p.name[0] != ".")
    except OSError as error:
        raise DataError(f"cannot look into {place}: {error.strerror or error}") from error
    return [entry for child in children for entry in _search(child, root, finders, depth + 1)]


def _find_folder(place: Path, within: Path) -> list[Found] | None:
    if not all((place / name).is_dir() for name in ("left", "right", "disparity")):
        return None
    scale = _scale(place / "meta.json")
    names = {"left": IMAGES, "right": IMAGES, "disparity": READ}
    names |= {"disparity_right": READ, "occlusion": IMAGES}
    by_stem = {name: _stems(place / name, suffixes) for name, suffixes in names.items()}
    found: list[Found] = []
    for stem, left in by_stem["left"].items():
        name = (within / stem).as_posix()
        if missing := [kind for kind in ("right", "disparity") if stem not in by_stem[kind]]:
            found.append(Incomplete(name, f"{left} has no partner in {place / missing[0]}"))
            continue
        right, disparity = by_stem["right"][stem], by_stem["disparity"][stem]
        others = by_stem["disparity_right"].get(stem), by_stem["occlusion"].get(stem)
        found.append(StereoFiles(name, left, right, disparity, *others, scale=scale))
    return found


def _find_scene(place: Path, within: Path) -> list[Found] | None:
    left, right = (_first(place, (f"im{view}",), IMAGES) for view in (0, 1))
    if left is None and right is None:
        return None
    name = within.as_posix() if within.parts else place.resolve().name
    elsewhere = Path(f"{place.parent}_gt") / place.name  # ETH3D
    truth = elsewhere if elsewhere.is_dir() else place
    disparity, disparity1 = (_first(truth, (f"disp{v}GT", f"disp{v}"), READ) for v in (0, 1))
    if left is None or right is None or disparity is None:
        wanted = (("im0", left), ("im1", right), ("disp0", disparity))
        missing = next(stem for stem, path in wanted if path is None)
        return [Incomplete(name, f"{place} has no {missing}")]
    mask = truth / "mask0nocc.png"
    return [
        StereoFiles(
            *(name, left, right, disparity, disparity1),
            visibility=mask if mask.exists() else None,
            scale=_scale(place / "meta.json"),
        )
    ]


def _find_kitti(
    images: tuple[str, str], all_known: str, visible: str, place: Path, within: Path
) -> list[Found] | None:
    """Find pairs with disparity; other frames and the test images have none."""
    left, right = (place / name for name in images)
    if not (left.is_dir() and right.is_dir()):
        return None
    with_hidden, without = (_stems(place / name, (".png",)) for name in (all_known, visible))
    found: list[Found] = []
    for stem, disparity in (with_hidden or without).items():
        name = (within / stem).as_posix()
        pair = left / disparity.name, right / disparity.name
        if missing := [path for path in pair if not path.exists()]:
            found.append(Incomplete(name, f"{disparity} has no image {missing[0]}"))
            continue
        seen = without.get(stem) if with_hidden else None
        found.append(StereoFiles(name, *pair, disparity, visible_disparity=seen))
    return found


def _find_sceneflow(place: Path, within: Path) -> list[Found] | None:
    images = next((place / name for name in PASSES if (place / name).is_dir()), None)
    if images is None:
        return None
    masks = next((place / name for name in MASKS if (place / name).is_dir()), None)
    found: list[Found] = []
    for left in sorted(p for p in images.rglob("*") if p.suffix.lower() in IMAGES):
        if left.parent.name != "left":
            continue
        path = left.relative_to(images)
        path1 = path.parents[1] / "right" / path.name
        name = (within / path.parents[1] / path.stem).as_posix()
        disparity, disparity1 = (place / "disparity" / p.with_suffix(".pfm") for p in (path, path1))
        pair = images / path1, disparity
        if missing := [p for p in pair if not p.exists()]:
            found.append(Incomplete(name, f"{left} has no partner {missing[0]}"))
            continue
        mask = _first((masks / path).parent, (path.stem,), IMAGES) if masks else None
        other = disparity1 if disparity1.exists() else None
        found.append(StereoFiles(name, left, *pair, other, mask))
    return found


_FINDERS: dict[str, Finder] = {
    "folder": _find_folder,
    "scenes": _find_scene,
    "middlebury2014": _find_scene,
    "kitti2015": partial(_find_kitti, ("image_2", "image_3"), "disp_occ_0", "disp_noc_0"),
    "kitti2012": partial(_find_kitti, ("colored_0", "colored_1"), "disp_occ", "disp_noc"),
    "sceneflow": _find_sceneflow,
}


def _stems(folder: Path, suffixes: Sequence[str]) -> dict[str, Path]:
    """Return the files of a folder by their names without suffixes."""
    if not folder.is_dir():
        return {}
    files = sorted(p for p in folder.iterdir() if p.suffix.lower() in suffixes)
    return {path.stem: path for path in files if path.name[0] != "."}


def _first(folder: Path, stems: Iterable[str], suffixes: Sequence[str]) -> Path | None:
    paths = (folder / f"{stem}{suffix}" for stem in stems for suffix in suffixes)
    return next((path for path in paths if path.exists()), None)


def _scale(path: Path) -> float | None:
    """Read `disparity_scale` from the metadata file of a folder."""
    if not path.exists():
        return None
    advice = "it must be an object with disparity_scale, by which stored values are divided"
    with reading(path, advice):
        scale = json.loads(path.read_text()).get("disparity_scale")
        if scale is not None and not 0 < float(scale) < np.inf:
            raise ValueError(f"disparity_scale is {scale}")
        return None if scale is None else float(scale)


def _occlusion(files: StereoFiles, truth: DisparityMap) -> tuple[Array, Array]:
    """Return pixels that are occluded or outside, and pixels that may be, (H, W) bool each."""
    shape = truth.values.shape
    unsure = np.zeros(shape, bool)
    if files.visibility is not None:
        mask = _mask(files.visibility, shape)
        hidden, unsure = mask == HIDDEN, mask != VISIBLE
    elif files.occlusion is not None:
        hidden = _mask(files.occlusion, shape) > 0
    elif files.visible_disparity is not None:
        seen = read_disparity(files.visible_disparity)
        _same_size(files.visible_disparity, seen.known.shape, files.disparity, shape)
        hidden = truth.known & ~seen.known
    elif files.disparity1 is not None:
        other = read_disparity(files.disparity1, files.scale)
        _same_size(files.disparity1, other.known.shape, files.disparity, shape)
        hidden, unsure = _compare(truth, other)
    else:
        hidden = np.zeros(shape, bool)
    return hidden | _outside(truth.values, truth.known), unsure


def _outside(values: Array, known: Array) -> Array:
    """Return pixels whose corresponding point is left of the right view."""
    return known & (np.arange(values.shape[1]) < values)


def _compare(truth: DisparityMap, other: DisparityMap) -> tuple[Array, Array]:
    """Return pixels with another disparity in the right view, and with an unknown one.

    The corresponding point lies between two pixels; one of them must agree.
    """
    column = np.arange(truth.values.shape[1]) - truth.values
    agrees, there = np.zeros_like(truth.known), np.zeros_like(truth.known)
    for rounded in (np.floor(column), np.ceil(column)):
        at = rounded.clip(0, column.shape[1] - 1).astype(np.int64)
        known = np.take_along_axis(other.known, at, axis=1)
        differs = np.abs(np.take_along_axis(other.values, at, axis=1) - truth.values)
        agrees |= known & (differs <= CONSISTENT)
        there |= known
    return truth.known & there & ~agrees, truth.known & ~there


def _mask(path: Path, shape: tuple[int, ...]) -> Array:
    mask = np.asarray(to_image(path).convert("L"))
    _same_size(path, mask.shape, "the disparity", shape)
    return mask


def _same_size(
    what: Path | str, got: Sequence[int], other: Path | str, wanted: Sequence[int]
) -> None:
    if tuple(got) != tuple(wanted):
        raise DataError(
            f"{what} has {got[1]}x{got[0]} pixels, {other} has {wanted[1]}x{wanted[0]}; they must "
            "be of one size"
        )
