# SPDX-License-Identifier: Apache-2.0
"""How good disparities are, in two loops: `predict` runs the network, `evaluate` reads what it
wrote.

So a number can be worked out again, or another one from the same disparities, without the network,
and disparities of other programs are scored in the same way.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.tasks.stereo.metrics import mean_scores, scores
from quadtree_attention.tasks.stereo.results import (
    OTHERS,
    SUFFIX,
    file_name,
    prediction_path,
    prepare_folder,
    read_prediction,
    read_settings,
    write_prediction,
)
from quadtree_attention.tasks.stereo.sources import StereoSample, StereoSource

if TYPE_CHECKING:  # scoring needs no models
    from quadtree_attention.tasks.stereo.predictor import StereoMatcher


@dataclass(frozen=True)
class Predicted:
    """What `predict` did."""

    folder: Path
    made: int  # pairs that the network ran on
    there: int  # pairs whose file was there already, with the same settings
    skipped: tuple[str, ...]  # pairs that cannot be read, with the reason


@dataclass(frozen=True)
class PairScore:
    """How good the disparities of one pair are.

    Attributes:
        name: Of the pair.
        scores: By name, as `metrics.scores` makes them.
    """

    name: str
    scores: dict[str, float]


@dataclass(frozen=True)
class Scores:
    """Scores of a set of pairs.

    Attributes:
        pairs: Of every pair that has a prediction and can be read.
        mean: Means over these pairs, large or small.
        missing: Names of the pairs without predictions; no mean counts them.
        skipped: Reasons why pairs cannot be read.
        settings: What the predictions were made with; None where nobody noted it.
    """

    pairs: tuple[PairScore, ...]
    mean: dict[str, float]
    missing: tuple[str, ...]
    skipped: tuple[str, ...]
    settings: dict[str, Any] | None

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON, which has no NaN: None in its place."""
        found = asdict(self)
        found["mean"] = _numbers(self.mean)
        found["pairs"] = [{"name": p.name, "scores": _numbers(p.scores)} for p in self.pairs]
        return found


def predict(
    matcher: "StereoMatcher",
    source: StereoSource,
    out: str | os.PathLike[str],
    *,
    data: str = "",
    force: bool = False,
) -> Predicted:
    """Runs a stereo matcher over pairs and writes one npz per pair; the folder says how.

    What is there already is left as it is if it was made with the same weights and options.

    Args:
        matcher: What to run.
        source: The pairs.
        out: Folder to write to.
        data: What to call the data, to tell pairs of the same name apart.
        force: Make again what is there.

    Raises:
        OptionError: The folder cannot be written to, or holds disparities of other settings.
        DataError: No pair can be read.
    """
    from tqdm import tqdm

    names = [source.name(index) for index in range(len(source))]
    pairs = {name: [data, name] for name in names}
    folder = prepare_folder(Path(out), settings_of(matcher), pairs, force=force)
    made = there = 0
    skipped: list[str] = []
    for index in tqdm(range(len(source)), unit="pair", leave=False, disable=None):
        # Looked up now and not before, so that several processes can share the work
        target = folder / f"{file_name(names[index])}{SUFFIX}"
        if target.exists():
            there += 1
            continue
        try:
            sample = source.read(index)
            found = matcher(sample.left, sample.right)
        except DataError as error:
            skipped.append(str(error))
            continue
        write_prediction(target, found)
        made += 1
    if not made + there:
        raise DataError(f"none of {len(source)} pairs can be read, the first because: {skipped[0]}")
    return Predicted(folder, made, there, tuple(skipped))


def settings_of(matcher: "StereoMatcher") -> dict[str, Any]:
    """What disparities depend on beside the pair."""
    from quadtree_attention.files import file_sha256

    return {
        "weights_sha256": file_sha256(matcher.path),
        "model": matcher.card["model"],
        "size": matcher.size,
        "max_disparity": matcher.max_disparity,
    }


def evaluate(source: StereoSource, predictions: str | os.PathLike[str]) -> Scores:
    """Scores the disparities that a folder holds.

    Args:
        source: The pairs with their truth.
        predictions: Folder with a file for every pair, `<name>.npz` of `predict`, or .npy, .pfm or
            16-bit .png of other programs; slashes in names are folders, or `__`.

    Raises:
        DataError: A file is broken or of another size, or the folder has none of the pairs.
    """
    from tqdm import tqdm

    folder = Path(predictions)
    _check_folder(folder, source)
    found: list[PairScore] = []
    missing: list[str] = []
    skipped: list[str] = []
    for index in tqdm(range(len(source)), unit="pair", leave=False, disable=None):
        name = source.name(index)
        if (path := prediction_path(folder, name)) is None:
            missing.append(name)
            continue
        try:
            sample = source.read(index)
        except DataError as error:
            skipped.append(str(error))
            continue
        found.append(PairScore(name, _score(sample, path)))
    if not found:
        raise DataError(f"no pair can be read, the first because: {skipped[0]}")
    return Scores(
        pairs=tuple(found),
        mean=mean_scores(pair.scores for pair in found),
        missing=tuple(missing),
        skipped=tuple(skipped),
        settings=read_settings(folder),
    )


def _score(sample: StereoSample, path: Path) -> dict[str, float]:
    prediction = read_prediction(path)
    if prediction.disparity.shape != sample.disparity.shape:
        height, width = prediction.disparity.shape
        raise DataError(
            f"{path} must have the size of its pair, {sample.left.width}x{sample.left.height}, got "
            f"{width}x{height}; predict again at that size"
        )
    return scores(
        prediction.disparity,
        sample.disparity,
        sample.known,
        sample.occluded,
        prediction.occlusion,
        visible=sample.visible,
    )


def _check_folder(folder: Path, source: StereoSource) -> None:
    if not folder.is_dir():
        raise DataError(
            f"there is no folder {folder} of predictions; quadtree evaluate stereo WEIGHTS --data "
            f"ROOT --out {folder} makes it"
        )
    if not len(source):
        raise OptionError("there are no pairs to score; pass a folder that has some")
    if all(prediction_path(folder, name) is None for name in _names(source)):
        raise DataError(
            f"{folder} has predictions for none of {len(source)} pairs, such as "
            f"{file_name(source.name(0))}{SUFFIX} (or {', '.join(OTHERS)}); pass the folder that "
            "quadtree evaluate stereo --out has filled"
        )


def _names(source: StereoSource) -> Iterator[str]:
    return (source.name(index) for index in range(len(source)))


def _numbers(values: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
