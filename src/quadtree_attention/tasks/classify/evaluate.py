# SPDX-License-Identifier: Apache-2.0
"""How well a classifier does, in two loops: `predict` runs the model, `score` reads what it wrote.

So a number can be worked out again, or another one from the same answers, without the model.
"""

import hashlib
import json
import math
import os
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from quadtree_attention.errors import CheckpointError, DataError, OptionError
from quadtree_attention.files import replacing
from quadtree_attention.tasks.classify.metrics import per_class_accuracy, topk_accuracy

if TYPE_CHECKING:  # scoring needs neither models nor images
    from quadtree_attention.tasks.classify.predictor import Classifier, Precision
    from quadtree_attention.tasks.classify.sources import ImageSource

Array = np.ndarray[Any, Any]
Sample = tuple[int, Tensor | str]  # index; the image, or why there is none
FEW = 512  # images up to which starting processes takes longer than reading
SETTINGS = {  # what predictions depend on; else they are not those asked for
    "weights_sha256": "weights",
    "model": "model",
    "image_size": "image size",
    "crop": "crop",
    "data": "data",
    "data_sha256": "images and labels",
    "device": "device",
    "dtype": "dtype",
}


@dataclass(frozen=True)
class Predictions:
    """Answers of a model to the images of a split, as they lie in a file."""

    logits: Array  # (N, classes), float32
    labels: Array  # (N,), int64
    names: Array  # (N,), of the images
    info: dict[str, Any]


@dataclass(frozen=True)
class Predicted:
    """What `predict` did."""

    path: Path
    reused: bool  # the file was there, with the same settings
    skipped: tuple[str, ...]  # images without an answer, with the reason


@dataclass(frozen=True)
class ClassScore:
    """Top-1 accuracy of the images of one class, in percent; None where it has no images."""

    label: int
    name: str
    images: int
    top1: float | None


@dataclass(frozen=True)
class Scores:
    """Accuracies in percent, and the settings they were reached with."""

    top1: float
    top5: float
    images: int
    skipped: int
    images_per_second: float
    classes: tuple[ClassScore, ...]
    settings: dict[str, Any]


def predict(
    weights: str | os.PathLike[str],
    source: "ImageSource",
    out: str | os.PathLike[str],
    *,
    data: str = "",
    image_size: int | None = None,
    batch_size: int = 64,
    device: str | torch.device | None = None,
    dtype: "Precision" = "float32",
    workers: int | None = None,
    strict: bool = False,
    force: bool = False,
) -> Predicted:
    """Runs a classifier over images and writes its answers, in full or not at all.

    A file that is there already is used as it is if it was made by the same call: the same weights
    and settings, and images of the same names and labels.

    Args:
        weights: Weights that `Classifier` takes.
        source: Labelled images. Their classes are matched with those of the weights by name.
        out: File to write, `.npz`.
        data: What to call the images, in the file and in messages.
        image_size: Pixels of a side of what the model sees; None takes that of the weights.
        batch_size: Images that go through the model together.
        device: Where to run; None takes a GPU if there is one.
        dtype: "float32", or "bfloat16" for automatic mixed precision.
        workers: Processes that read images; None: one per core, 8 at most, none for few images.
        strict: Fail at the first image that cannot be read, instead of leaving it out.
        force: Replace predictions that are there.

    Raises:
        OptionError: An option is not accepted, or other predictions are there already.
        CheckpointError: The weights cannot be read, or belong to other classes.
        DataError: The images cannot be read, or the file not be written.
    """
    from quadtree_attention.tasks.classify.predictor import Classifier

    out = _target(out)
    _check_source(source, strict=strict)
    classifier = Classifier(
        weights, device=device, image_size=image_size, batch_size=batch_size, dtype=dtype
    )
    labels_of = match_classes(source.classes, classifier)
    settings = _settings(classifier, source, data)
    if out.exists() and _reusable(out, settings, strict=strict, force=force):
        return Predicted(out, reused=True, skipped=())
    classifier.logits(torch.zeros(1, 3, classifier.image_size, classifier.image_size))
    began = time.perf_counter()  # after a call that has compiled what needs compiling
    answers, skipped = _answers(classifier, source, _workers(workers, source), strict=strict)
    seconds = time.perf_counter() - began
    indices = list(answers)
    info = {
        **settings,
        "weights": Path(weights).name,
        "classes": classifier.names,
        "skipped": len(skipped),
        "batch_size": batch_size,
        "images_per_second": len(indices) / seconds,
    }
    arrays = {
        "logits": np.stack([answers[i] for i in indices]),
        "labels": np.array([labels_of[source.label(i)] for i in indices], dtype=np.int64),
        "names": np.array([source.name(i) for i in indices]),
        "info": np.array(json.dumps(info)),
    }
    _write(out, arrays)
    return Predicted(out, reused=False, skipped=tuple(skipped))


def score(path: str | os.PathLike[str]) -> Scores:
    """Scores of the predictions in a file.

    Raises:
        DataError: There is no such file, or it holds no predictions.
    """
    predictions = read_predictions(path)
    logits, labels = torch.from_numpy(predictions.logits), torch.from_numpy(predictions.labels)
    info = dict(predictions.info)
    names = info.pop("classes")
    classes = tuple(
        ClassScore(label, name, images, None if math.isnan(top1) else top1)
        for label, (name, (images, top1)) in enumerate(
            zip(names, per_class_accuracy(logits, labels), strict=True)
        )
    )
    return Scores(
        top1=topk_accuracy(logits, labels, 1),
        top5=topk_accuracy(logits, labels, 5),
        images=len(labels),
        skipped=info.pop("skipped"),
        images_per_second=info.pop("images_per_second"),
        classes=classes,
        settings=info,
    )


def read_predictions(path: str | os.PathLike[str]) -> Predictions:
    """The predictions in a file that `predict` has written.

    Raises:
        DataError: There is no such file, or it holds no predictions.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            info = json.loads(str(arrays["info"]))
            found = Predictions(arrays["logits"], arrays["labels"], arrays["names"], info)
        _check_predictions(found)
    except FileNotFoundError:
        raise DataError(
            f"there is no file {str(path)!r}; quadtree evaluate classify WEIGHTS --data ROOT "
            f"--out {path} writes it"
        ) from None
    except (OSError, ValueError, LookupError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{str(path)!r} holds no predictions: {error}; pass a file that quadtree evaluate "
            "classify has written"
        ) from error
    return found


def match_classes(theirs: list[str], classifier: "Classifier") -> list[int]:
    """The model's label for every class of the data: by name, or by number where one has none.

    Raises:
        CheckpointError: The data have classes that the model does not know.
    """
    ours = classifier.names
    if theirs == ours:
        return list(range(len(ours)))
    place = {name: label for label, name in enumerate(ours)}
    unknown = [name for name in theirs if name not in place]
    if not unknown and len(place) == len(ours):
        return [place[name] for name in theirs]
    numbers = [str(label) for label in range(len(ours))]
    if theirs == numbers[: len(theirs)] or (ours == numbers and len(theirs) == len(ours)):
        return list(range(len(theirs)))
    raise CheckpointError(
        f"the data have {len(theirs)} classes, {_few(theirs)}; the model of {classifier.path} "
        f"tells {len(ours)} apart, {_few(ours)}; it does not know {_few(unknown)}, or has a name "
        "twice; take weights and data of the same classes"
    )


# ---- running the model


def _answers(
    classifier: "Classifier", source: "ImageSource", workers: int, *, strict: bool
) -> tuple[dict[int, Array], list[str]]:
    """Scores by the index of the image, and what could not be read."""
    from tqdm import tqdm

    answers: dict[int, Array] = {}
    skipped: list[str] = []
    with tqdm(total=len(source), unit="image", leave=False, disable=None) as bar:
        for samples in _batches(classifier, source, workers):
            readable = {i: x for i, x in samples if isinstance(x, Tensor)}
            skipped += [x for _, x in samples if isinstance(x, str)]
            if strict and skipped:
                raise DataError(f"{skipped[0]}; remove it, or leave out --strict")
            if readable:
                logits = classifier.logits(torch.stack(list(readable.values())))
                answers.update(zip(readable, logits.numpy(), strict=True))
            bar.update(len(samples))
    if not answers:
        raise DataError(
            f"none of {len(source)} images can be read, the first because: {skipped[0]}"
        )
    return answers, skipped


def _batches(
    classifier: "Classifier", source: "ImageSource", workers: int
) -> Iterator[list[Sample]]:
    samples = _Samples(source, classifier.transform)
    return iter(
        DataLoader(
            samples, batch_size=classifier.batch_size, num_workers=workers, collate_fn=_as_it_is
        )
    )


class _Samples(Dataset[Sample]):
    """Images as the model sees them. What cannot be read is a value, as errors of workers come
    back with their traceback in the message.
    """

    def __init__(self, source: "ImageSource", transform: Any) -> None:
        self.source = source
        self.transform = transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        try:
            return index, self.transform(self.source.read(index))
        except DataError as error:
            return index, str(error)


def _as_it_is(samples: list[Sample]) -> list[Sample]:
    return samples


def _workers(workers: int | None, source: "ImageSource") -> int:
    if workers is None:
        return min(8, os.cpu_count() or 1) if len(source) > FEW else 0
    if workers < 0:
        raise OptionError(f"workers must be 0 or more, got {workers}; 0 reads in the process")
    return workers


def _check_source(source: "ImageSource", *, strict: bool) -> None:
    if strict and source.skipped:
        raise DataError(
            f"{len(source.skipped)} files are no images, such as {source.skipped[0]}; remove them, "
            "or leave out --strict"
        )


# ---- the file


def _settings(classifier: "Classifier", source: "ImageSource", data: str) -> dict[str, Any]:
    from quadtree_attention.files import file_sha256

    listing = [[source.name(i), source.classes[source.label(i)]] for i in range(len(source))]
    return {
        "weights_sha256": file_sha256(classifier.path),
        "model": classifier.card["model"],
        "image_size": classifier.image_size,
        "crop": classifier.crop,
        "data": data,
        "data_sha256": hashlib.sha256(json.dumps(listing).encode()).hexdigest(),
        "device": classifier.device.type,
        "dtype": classifier.dtype,
    }


def _target(out: str | os.PathLike[str]) -> Path:
    """The path, where predictions can be written to it."""
    out = Path(out)
    if out.suffix != ".npz":
        raise OptionError(f"predictions are written as .npz, got {str(out)!r}; name it so")
    if not os.path.isdir(out.parent):
        raise OptionError(f"there is no directory {str(out.parent)!r} to write to; make it first")
    if os.path.isdir(out):
        raise OptionError(f"{str(out)!r} is a directory; write to another name")
    return out


def _reusable(out: Path, settings: dict[str, Any], *, strict: bool, force: bool) -> bool:
    """Whether the file holds what would be computed; raises where it must not be replaced."""
    try:
        info = read_predictions(out).info
    except DataError as error:  # also with force: it may be the data themselves
        raise OptionError(
            f"{str(out)!r} is there already and holds no predictions; write to another name"
        ) from error
    if force:
        return False
    differing = [key for key in SETTINGS if info.get(key) != settings[key]]
    if differing:
        changes = "; ".join(
            f"{SETTINGS[key]} {_shown(info.get(key))} there, {_shown(settings[key])} now"
            for key in differing
        )
        raise OptionError(
            f"{str(out)!r} holds predictions of other settings: {changes}; write to another name, "
            "or replace it with --force"
        )
    if strict and info["skipped"]:
        raise OptionError(
            f"{str(out)!r} was made without --strict and leaves out {info['skipped']} images; "
            "write to another name, or replace it with --force"
        )
    return True


def _write(path: Path, arrays: dict[str, Any]) -> None:
    try:
        with replacing(path) as file:
            np.savez(file, **arrays)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror or error}; what was there before is "
            "unchanged; make room or write elsewhere"
        ) from error


def _check_predictions(found: Predictions) -> None:
    logits, labels, info = found.logits, found.labels, found.info
    count = len(info["classes"])
    if logits.dtype != np.float32 or labels.dtype != np.int64:
        raise ValueError(f"logits are {logits.dtype} and labels {labels.dtype}")
    if logits.shape != (len(labels), count) or found.names.shape != labels.shape:
        raise ValueError(
            f"logits {logits.shape}, labels {labels.shape}, names {found.names.shape} and {count} "
            "classes do not belong together"
        )
    if not len(labels) or labels.min() < 0 or labels.max() >= count:
        raise ValueError(f"there are no labels, or some outside 0 to {count - 1}")
    if missing := {"skipped", "images_per_second", *SETTINGS} - info.keys():
        raise ValueError(f"it does not say {', '.join(sorted(missing))}")


def _shown(value: object) -> str:
    """Checksums are told apart by their start."""
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more if names else "none"
