# SPDX-License-Identifier: Apache-2.0
"""Disparities of many pairs in a folder: one file per pair, and a note of how they were made."""

import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.files import check_writable, make_folder, write_whole
from quadtree_attention.images import Array
from quadtree_attention.tasks.stereo.formats import read_disparity

if TYPE_CHECKING:  # scoring needs no models
    from quadtree_attention.tasks.stereo.predictor import Disparity

SETTINGS = "settings.json"
SUFFIX = ".npz"
OTHERS = (".npy", ".pfm", ".png")  # disparity alone, also of other programs
DRAWN = ".jpg"  # pictures beside them, so that no suffix says two things


@dataclass(frozen=True)
class Prediction:
    """What was predicted for a pair.

    Attributes:
        disparity: (H, W) float32 pixels; 0 where the file has nothing.
        occlusion: (H, W), from 0 to 1; None if the file does not tell.
    """

    disparity: Array
    occlusion: Array | None


def file_name(name: str) -> str:
    """What files of a pair are called, without suffix; all of them lie in one folder."""
    return name.replace("/", "__")


def write_prediction(path: str | os.PathLike[str], found: "Disparity") -> None:
    """Writes `disparity` and `occlusion` as npz, all or nothing."""
    content = io.BytesIO()
    np.savez(content, disparity=found.disparity, occlusion=found.occlusion.astype(np.float16))
    write_whole(path, content.getvalue())


def prediction_path(folder: Path, name: str) -> Path | None:
    """The file with the prediction for a pair, flat or in folders of its own; None without one."""
    places = (
        folder / f"{place}{suffix}"
        for place in (file_name(name), name)
        for suffix in (SUFFIX, *OTHERS)
    )
    return next((place for place in places if place.is_file()), None)


def read_prediction(path: Path) -> Prediction:
    """The prediction in a file of this package, or in one of disparity alone.

    Raises:
        DataError: The file cannot be read, or does not hold a prediction.
    """
    disparity = read_disparity(path, truth=False).values
    occlusion = _occlusion(path) if path.suffix == SUFFIX else None
    if occlusion is None:
        return Prediction(disparity, None)
    if occlusion.shape != disparity.shape or occlusion.dtype.kind not in "fbiu":
        raise DataError(
            f"{path} must hold an occlusion {disparity.shape} as its disparity, got "
            f"{occlusion.shape} of {occlusion.dtype}; write it again"
        )
    return Prediction(disparity, occlusion.astype(np.float32))


def _occlusion(path: Path) -> Array | None:
    try:
        with np.load(path, allow_pickle=False) as stored:
            return stored.get("occlusion")
    except Exception as error:  # damaged files fail in every possible way
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"cannot read {path}: {reason}; write it again") from error


def prepare_folder(
    folder: Path,
    settings: Mapping[str, Any],
    pairs: Mapping[str, list[str]],
    *,
    force: bool,
    suffix: str = SUFFIX,
) -> Path:
    """The folder, with settings and pairs noted: results of different ones must not get mixed.

    Args:
        folder: Made where it is not there.
        settings: What results depend on beside the pair, for JSON.
        pairs: What the results of each name are of.
        force: Delete what is there of these pairs, and all that other settings have made.
        suffix: Of the files of results.

    Raises:
        OptionError: It cannot be made or written to, or holds other results.
    """
    make_folder(folder)
    note = folder / SETTINGS
    check_writable(note)
    before, noted = _read_note(note) if note.is_file() else (dict(settings), {})
    same = before == settings
    targets = {name: folder / (file_name(name) + suffix) for name in pairs}
    if not force:
        _check_unmixed(note, same, [p for n, p in targets.items() if noted.get(n) != pairs[n]])
    else:  # all now: what is left of an interrupted run is then of this one
        for target in targets.values():
            target.unlink(missing_ok=True)
        for name in () if same else noted:
            _remove(folder, name, [SUFFIX, *OTHERS, DRAWN])
    content = {"settings": settings, "pairs": (noted if same else {}) | dict(pairs)}
    write_whole(note, (json.dumps(content, indent=2) + "\n").encode())
    return folder


def _check_unmixed(note: Path, same: bool, others: Sequence[Path]) -> None:
    """Raises `OptionError` where results are there that are not those asked for.

    Args:
        note: Where settings and pairs are noted.
        same: The settings are those asked for.
        others: Where results go of pairs that the note does not have, or has of other images.
    """
    instead = "--force makes them again, or write to another folder"
    if not same:
        raise OptionError(
            f"{note.parent} holds disparities that were made with other weights or options "
            f"({note.name} there tells); {instead}"
        )
    if there := next((path.name for path in others if path.exists()), None):
        raise OptionError(
            f"{note.parent} holds {there} of other images, or of unknown ones ({note.name} would "
            f"tell); {instead}"
        )


def _remove(folder: Path, name: str, suffixes: Sequence[str]) -> None:
    for suffix in suffixes:
        (folder / Path(file_name(name) + suffix).name).unlink(missing_ok=True)


def read_settings(folder: Path) -> dict[str, Any] | None:
    """How the results in a folder were made; None where nobody noted it."""
    note = folder / SETTINGS
    return _read_note(note)[0] if note.is_file() else None


def _read_note(note: Path) -> tuple[dict[str, Any] | None, dict[str, list[str]]]:
    """Settings and pairs of the results in a folder; no settings if the note is damaged."""
    try:
        content = json.loads(note.read_bytes())
        return dict(content["settings"]), dict(content["pairs"])
    except (OSError, ValueError, TypeError, LookupError):
        return None, {}
