# SPDX-License-Identifier: Apache-2.0
"""What the five tasks have in common: a task says what is done, shared code says how.

`quadtree_attention/tasks/<name>/__init__.py` holds `TASK`, strings only; the classes behind them
are imported when they are needed. This module imports no torch.
"""

import math
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

from quadtree_attention.checks import known
from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.files import StrPath, write_whole

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from quadtree_attention.images import ImageLike

BLOCKS, BAR_WIDTH = " ▏▎▍▌▋▊▉█", 20  # of `share_lines`
NAMES = ("classify", "match", "stereo", "detect", "segment")

Truth_co = TypeVar("Truth_co", covariant=True)
Truth_contra = TypeVar("Truth_contra", contravariant=True)
Result_contra = TypeVar("Result_contra", bound="Result", contravariant=True)
ResultT = TypeVar("ResultT", bound="Result")


@dataclass(frozen=True)
class Task:
    """One task. Classes are named as `"file:Class"`, relative to the folder of the task.

    Attributes:
        name: The folder, the command, `task` in cards, recipes and stores.
        item: What one sample is called in messages and progress bars: "image" or "pair".
        images: The images of one item: `("left", "right")`.
        predictor: The `Predictor`.
        codec: The `Codec` of its results.
        metric: The `Metric`.
        module: The Lightning module.
        open_source: A function `(root, *, split, strict, **layout) -> Source`.
        data: The data modules by `data.source`; the first is the default.
    """

    name: str
    item: str
    images: tuple[str, ...]
    predictor: str
    codec: str
    metric: str
    module: str
    open_source: str
    data: Mapping[str, str]

    def load(self, field: str, key: str | None = None) -> Any:
        """The object behind a field; `key` selects an entry of `data`."""
        value = getattr(self, field)
        if isinstance(value, Mapping):
            key = next(iter(value)) if key is None else key
            known(key, value, f"{field}.source")
            value = value[key]
        file, name = value.split(":")
        return getattr(import_module(f"quadtree_attention.tasks.{self.name}.{file}"), name)


def get_task(name: str) -> Task:
    """The task of that name.

    Raises:
        OptionError: There is no such task.
    """
    known(name, NAMES, "the task")
    return import_module(f"quadtree_attention.tasks.{name}").TASK


class Source(Protocol[Truth_co]):
    """Samples of one split. What a command makes of its arguments is a source without truth.

    A source can be pickled. Names are unique; slashes in them are folders.
    """

    @property
    def classes(self) -> Sequence[str] | None: ...

    @property
    def skipped(self) -> Sequence[str]:
        """Found but unusable, one reason each; with strict=True opening raises instead."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str: ...

    def identity(self, index: int) -> list[Any]:
        """JSON; a stored prediction of that name is reused only if this is equal."""

    def images(self, index: int) -> "tuple[ImageLike, ...]":
        """The images of a sample. Raises `DataError` naming the file."""

    def truth(self, index: int) -> Truth_co:
        """The truth of a sample, without decoding images where that is possible."""


@dataclass(frozen=True)
class Prepared:
    """A sample as the network takes it, made by a picklable `Preprocess`, in a worker if asked for.

    Attributes:
        images: The images as given, upright and RGB.
        inputs: What the network sees, on the CPU, without a batch axis.
        key: Samples of equal keys may share a batch; nothing is padded to make keys equal.
        warnings: Sentences about what looks wrong.
    """

    images: "tuple[Image.Image, ...]"
    inputs: "tuple[Tensor, ...]"
    key: Hashable
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Result:
    """What a predictor found in one sample. Arrays are numpy arrays.

    Attributes:
        images: The images as given, upright and RGB; empty after `load`.
        seen: (width, height) of each image as the network saw it.
        seconds: Time of the prediction, reading of files excluded.
        warnings: Sentences about what looks wrong with the sample or the result.
    """

    task: ClassVar[str]

    images: "tuple[Image.Image, ...]" = field(default=(), repr=False)
    seen: tuple[tuple[int, int], ...] = ()
    seconds: float = 0.0
    warnings: tuple[str, ...] = ()

    def draw(
        self, path: StrPath | None = None, *, title: str | None = None, **options: Any
    ) -> "Image.Image":
        """A picture of the result; also written to `path`, whose suffix selects the format.

        Args:
            path: File to write, all or nothing.
            title: Text above the picture; None: a summary of the result.
            **options: Those of `quadtree_attention.tasks.<task>.draw.draw`.

        Raises:
            OptionError: The file cannot be written, or the result has no images.
        """
        from quadtree_attention.viz.canvas import save_picture

        drawn = import_module(f"quadtree_attention.tasks.{self.task}.draw")
        picture: Image.Image = drawn.draw(self, title=title, **options)
        if path is not None:
            save_picture(picture, path)
        return picture

    def save(self, path: StrPath) -> None:
        """Writes the result, all or nothing; `load` reads it again.

        Raises:
            OptionError: The suffix is none of the task's formats, or the file cannot be written.
        """
        codec = get_task(self.task).load("codec")()
        write_whole(path, codec.encode({Path(path).stem: self}, checked_suffix(path, codec)))

    @classmethod
    def load(cls, path: StrPath) -> Self:
        """The result in a file, of this package or of another program that writes the format.

        Raises:
            DataError: The file cannot be read, or holds no result, or several.
        """
        found = get_task(cls.task).load("codec")().decode(Path(path))
        if len(found) != 1:
            raise DataError(f"{path} must hold one result, got {len(found)}; pass another file")
        return next(iter(found.values()))

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, for JSON."""
        raise NotImplementedError

    def to_text(self) -> str:
        """The result in lines of text, as the command prints it."""
        raise NotImplementedError


def share_lines(shares: Mapping[str, float]) -> list[str]:
    """Lines of a table: the share in percent, a bar that grows by eighths of a character, a name.

    Args:
        shares: From 0 to 1, by name.
    """
    lines = []
    for name, share in shares.items():
        whole, eighths = divmod(round(share * BAR_WIDTH * 8), 8)
        bar = (BLOCKS[-1] * whole + BLOCKS[eighths]).rstrip()
        lines.append(f"  {share * 100:5.1f} %  {bar:{BAR_WIDTH}}  {name}")
    return lines


def checked_suffix(path: StrPath, codec: "Codec[Any]") -> str:
    """The suffix of a file that results are written to; else raises `OptionError`."""
    suffix = Path(path).suffix.lower()
    if suffix not in codec.suffixes:
        raise OptionError(
            f"results are written as {', '.join(codec.suffixes)}, got {os.fspath(path)!r}; use one "
            "of these suffixes"
        )
    return suffix


class Codec(Protocol[ResultT]):
    """The file formats of a task's results.

    It is made with the source of the samples and the class names of the predictor, both None where
    they are not known (`Result.save`, files of other programs).
    """

    suffixes: tuple[str, ...]  # the default first
    together: bool  # one file for all samples, as COCO has it

    def __init__(
        self, source: Source[Any] | None = None, classes: Sequence[str] | None = None
    ) -> None: ...

    def encode(self, found: Mapping[str, ResultT], suffix: str) -> bytes:
        """Results by the name of their sample; exactly one unless `together`."""

    def decode(self, path: Path) -> Mapping[str, ResultT]:
        """The results in a file; one under any name unless `together`.

        Raises:
            DataError: The file cannot be read, or holds something else.
        """


class Metric(Protocol[Truth_contra, Result_contra]):
    """Scores results against the truth: files of them, and batches in validation.

    It is made with the source (for its classes), the class names of the predictions (None: those of
    the source) and thresholds as keyword arguments.
    """

    def update(self, name: str, truth: Truth_contra, found: Result_contra | None) -> None:
        """Adds one sample; None: there is no prediction."""

    def state(self) -> Any:
        """What was added so far, as plain data that can be pickled."""

    def merge(self, states: Sequence[Any]) -> None:
        """Replaces the state by that of several metrics together."""

    def compute(self) -> "Scores": ...


@dataclass(frozen=True)
class Column:
    """A column of a table of scores.

    Attributes:
        key: Key of a row.
        title: Heading.
        digits: Digits behind the decimal point; None: text or an integer.
    """

    key: str
    title: str
    digits: int | None = 2

    def text(self, row: Mapping[str, Any]) -> str:
        value = row.get(self.key)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return "-"
        if self.digits is None:
            return f"{value:,}" if isinstance(value, int) else str(value)
        return f"{value:.{self.digits}f}"


@dataclass(frozen=True)
class Scores:
    """Scores of a set of samples.

    Attributes:
        task: Name of the task.
        mean: Scores over all samples, by name.
        rows: Scores per sample, or per class.
        columns: How rows are printed.
        facts: Counts and other facts, by name.
        skipped: Samples that could not be used, one reason each.
        missing: Names of samples without a prediction.
        settings: What the predictions were made with; None if unknown.
        listed: Most rows that `to_text` prints, the first ones; `to_dict` has all of them.
    """

    task: str
    mean: Mapping[str, float | None]
    rows: Sequence[Mapping[str, Any]] = ()
    columns: Sequence[Column] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    skipped: Sequence[str] = ()
    missing: Sequence[str] = ()
    settings: Mapping[str, Any] | None = None
    listed: int = 50

    def to_dict(self) -> dict[str, Any]:
        """The scores as plain data; None replaces what JSON has no number for."""
        return finite(
            {
                "task": self.task,
                "mean": dict(self.mean),
                "facts": dict(self.facts),
                "rows": [dict(row) for row in self.rows],
                "skipped": list(self.skipped),
                "missing": list(self.missing),
                "settings": self.settings,
            }
        )

    def to_text(self) -> str:
        """The scores as a table."""
        rows = list(self.rows[: self.listed]) if self.columns else []
        in_table = {column.key for column in self.columns} if rows else set()
        above = [name for name in self.mean if name not in in_table]
        width = max((len(name) for name in [*self.facts, *above]), default=0)
        lines = [f"{name:{width}}  {value}" for name, value in self.facts.items()]
        lines += [f"{name:{width}}  {Column(name, name).text(self.mean)}" for name in above]
        if rows:
            if len(above) < len(self.mean):
                rows.append({self.columns[0].key: "mean", **self.mean})
            table = [[c.title for c in self.columns]]
            table += [[c.text(row) for c in self.columns] for row in rows]
            widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
            lines.append("")
            for cells in table:  # names to the left, numbers to the right
                padded = [
                    f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}"
                    for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
                ]
                lines.append("  ".join(padded).rstrip())
            if len(self.rows) > self.listed:
                lines.append(f"... and {len(self.rows) - self.listed} more; --json lists all")
        return "\n".join(lines)

    def with_context(
        self,
        *,
        skipped: Sequence[str],
        missing: Sequence[str],
        settings: Mapping[str, Any] | None,
    ) -> Self:
        """The same scores, with how they came about."""
        return replace(self, skipped=skipped, missing=missing, settings=settings)


def finite(value: Any) -> Any:
    """Plain data with None in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Preprocess(Protocol):
    """Makes a `Prepared` of the images of a sample. It can be pickled."""

    def __call__(self, *images: Any) -> Prepared: ...


def file_identity(*paths: StrPath) -> list[Any]:
    """The identity of a sample that is read from files: where they are, and how large."""
    return [[os.path.abspath(p), os.path.getsize(p) if os.path.isfile(p) else None] for p in paths]


class Items:
    """A source without truth: items that were named one by one.

    Args:
        names: Of every item; unique.
        images: Of every item.
        read: Turns what `images` holds into images; None: it holds them.
    """

    classes: Sequence[str] | None = None
    skipped: Sequence[str] = ()

    def __init__(
        self,
        names: Sequence[str],
        images: Sequence[tuple[Any, ...]],
        read: Callable[[Any], "ImageLike"] | None = None,
    ) -> None:
        self._names, self._images, self._read = list(names), list(images), read

    def __len__(self) -> int:
        return len(self._names)

    def name(self, index: int) -> str:
        return self._names[index]

    def identity(self, index: int) -> list[Any]:
        given = self._images[index]
        return file_identity(*(image for image in given if isinstance(image, str | Path)))

    def images(self, index: int) -> "tuple[ImageLike, ...]":
        given = self._images[index]
        return given if self._read is None else tuple(map(self._read, given))

    def truth(self, index: int) -> Any:
        raise DataError(f"{self.name(index)} has no truth to compare with")
