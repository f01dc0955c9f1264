# SPDX-License-Identifier: Apache-2.0
"""Interfaces of the five tasks, implemented per task and used by shared code.

`quadtree_attention/tasks/<name>/__init__.py` defines `TASK` with strings only; the classes are
imported on first use. This module imports no torch.
"""

import math
import os
import reprlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from quadtree_attention.checks import known
from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.files import StrPath, write_whole

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from quadtree_attention.images import ImageLike

BLOCKS, BAR_WIDTH = " ▏▎▍▌▋▊▉█", 20  # of `share_lines`
NAMES = ("classify", "match", "stereo", "detect", "segment")

Truth = TypeVar("Truth")
ResultT = TypeVar("ResultT", bound="Result")


@dataclass(frozen=True)
class Task:
    """A task. Its classes are imported on first use."""

    name: str  # name of the folder and the command, and `task` in cards, recipes and stores
    images: tuple[str, ...]  # the images of one sample: `("left", "right")`
    predictor: str  # the class in predictor.py
    result: str  # the class in result.py, beside its codec, `<result>Codec`
    data: Mapping[str, str]  # `file:Class` of data modules by `data.source`, default first

    @property
    def item(self) -> str:
        """Word for a sample in messages and progress bars."""
        return "image" if len(self.images) == 1 else "pair"

    def load(self, part: str, source: str | None = None) -> Any:
        """Import the predictor, codec, metric, module, open_source, or data of a `data.source`."""
        source = source or next(iter(self.data))
        if part == "data":
            known(source, self.data, "data.source")
        file, name = {
            "predictor": f"predictor:{self.predictor}",
            "codec": f"result:{self.result}Codec",
            "metric": f"metrics:{self.name.title()}Metric",
            "module": f"module:{self.name.title()}Module",
            "open_source": "readers:open_source",  # (root, *, split, strict, **layout) -> Source
            "data": self.data.get(source, ""),
        }[part].split(":")
        return getattr(import_module(f"quadtree_attention.tasks.{self.name}.{file}"), name)


def get_task(name: str) -> Task:
    """Return the task with this name; raise `OptionError` if it does not exist."""
    known(name, NAMES, "the task")
    return import_module(f"quadtree_attention.tasks.{name}").TASK


class Source(Generic[Truth]):
    """Samples of one split. The images of a command are a source without ground truth.

    A source can be pickled. Names are unique; slashes in them separate folders.
    """

    names: Sequence[str] = ()
    classes: Sequence[str] | None = None
    skipped: Sequence[str] = ()  # a reason per unusable sample; an error if strict

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return self.names[index]

    def identity(self, index: int) -> list[Any]:
        """Identity of a sample as JSON; a stored prediction is reused only if it is equal."""
        raise NotImplementedError

    def images(self, index: int) -> "tuple[ImageLike, ...]":
        """Return the images of a sample. Raises a `DataError` with the path of the file."""
        raise NotImplementedError

    def truth(self, index: int) -> Truth:
        """Return the ground truth of a sample, without decoding images if possible."""
        raise DataError(f"{self.name(index)} has no ground truth")


def file_identity(*paths: StrPath) -> list[Any]:
    """Return the identity of files: their paths and sizes."""
    return [[os.path.abspath(p), os.path.getsize(p) if os.path.isfile(p) else None] for p in paths]


class Items(Source[Any]):
    """Source of a list of items; `read` converts an item to images, None: items are images."""

    def __init__(
        self,
        names: Sequence[str],
        images: Sequence[tuple[Any, ...]],
        read: Callable[[Any], "ImageLike"] | None = None,
    ) -> None:
        self.names, self._images, self._read = list(names), list(images), read

    def identity(self, index: int) -> list[Any]:
        given = self._images[index]
        return file_identity(*(image for image in given if isinstance(image, str | Path)))

    def images(self, index: int) -> "tuple[ImageLike, ...]":
        given = self._images[index]
        return given if self._read is None else tuple(map(self._read, given))


@dataclass(frozen=True)
class Prepared:
    """A preprocessed sample, computed by a picklable callable, possibly in a worker."""

    images: "tuple[Image.Image, ...]"  # original images, upright and RGB
    inputs: "tuple[Tensor, ...]"  # input of the network, on the CPU, without a batch axis
    key: Hashable  # samples with equal keys may share a batch; there is no padding
    warnings: tuple[str, ...] = ()  # sentences about suspected problems


@dataclass(frozen=True, eq=False, kw_only=True)
class Result:
    """Prediction for one sample. Arrays are numpy arrays.

    Attributes:
        images: Original images, upright and RGB; empty after `load`.
        seen: (width, height) of each image at the network's input size.
        seconds: Time of the prediction without reading files.
        warnings: Sentences about suspected problems of the sample or the result.
    """

    task: ClassVar[str]

    images: "tuple[Image.Image, ...]" = field(default=(), repr=False)
    seen: tuple[tuple[int, int], ...] = ()
    seconds: float = 0.0
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Fields but images; arrays by dtype and shape, long values shortened."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.repr}
        arrays = {k: f"{x.dtype}{list(x.shape)}" for k, x in values.items() if hasattr(x, "dtype")}
        shown = (f"{k}={arrays.get(k) or reprlib.repr(x)}" for k, x in values.items())
        return f"{type(self).__name__}({', '.join(shown)})"

    def draw(
        self, path: StrPath | None = None, *, title: str | None = None, **options: Any
    ) -> "Image.Image":
        """Draw the result; also write it to `path`, whose suffix selects the format.

        Args:
            path: File to write atomically.
            title: Text above the picture; None: a summary of the result.
            **options: Options of `quadtree_attention.tasks.<task>.draw.draw`.

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
        """Write the result atomically, in a format that `load` reads.

        Raises:
            OptionError: The suffix is not a format of the task, or the file cannot be written.
        """
        codec = get_task(self.task).load("codec")()
        write_whole(path, codec.encode({Path(path).stem: self}, checked_suffix(path, codec)))

    @classmethod
    def load(cls, path: StrPath) -> Self:
        """Read a result from a file, of this package or of another program.

        Raises:
            DataError: The file cannot be read, or does not contain exactly one result.
        """
        found = get_task(cls.task).load("codec")().decode(Path(path))
        if len(found) != 1:
            raise DataError(f"{path} must hold one result, got {len(found)}; pass another file")
        return next(iter(found.values()))

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data for JSON."""
        raise NotImplementedError

    def to_text(self) -> str:
        """Return the result as text, as printed by the command."""
        raise NotImplementedError


def share_lines(shares: Iterable[tuple[str, float]]) -> list[str]:
    """Lines of a table of names and shares (0 to 1): percentages, bars and names."""
    lines = []
    for name, share in shares:
        whole, eighths = divmod(round(share * BAR_WIDTH * 8), 8)
        bar = (BLOCKS[-1] * whole + BLOCKS[eighths]).rstrip()
        lines.append(f"  {share * 100:5.1f} %  {bar:{BAR_WIDTH}}  {name}")
    return lines


def table(rows: Mapping[str, Any]) -> str:
    """Names and values in two columns; empty values are left out."""
    return "\n".join(f"{name:11}  {value}" for name, value in rows.items() if value)


def checked_suffix(path: StrPath, codec: "Codec[Any]") -> str:
    """Return the suffix of a results file; raise `OptionError` if it is not supported."""
    suffix = Path(path).suffix.lower()
    if suffix not in codec.suffixes:
        raise OptionError(
            f"results are written as {', '.join(codec.suffixes)}, got {os.fspath(path)!r}; use one "
            "of these suffixes"
        )
    return suffix


class Codec(Generic[ResultT]):
    """The file formats of a task's results.

    It is created with the source of the samples and the class names of the predictor, both None if
    unknown (`Result.save`, files of other programs).
    """

    suffixes: ClassVar[tuple[str, ...]]  # the default first
    together: ClassVar[bool] = False  # one file for all samples, as in COCO

    def __init__(
        self, source: Source[Any] | None = None, classes: Sequence[str] | None = None
    ) -> None:
        self.source, self.classes = source, classes

    def encode(self, found: Mapping[str, ResultT], suffix: str) -> bytes:
        """Encode results, given by sample name; exactly one unless `together`."""
        raise NotImplementedError

    def decode(self, path: Path) -> Mapping[str, ResultT]:
        """Decode the results of a file; one with any name unless `together`."""
        raise NotImplementedError

    def nothing(self) -> ResultT | None:
        """Return the result of a sample without an entry in a file for all; None: missing."""
        return None


class Metric(Generic[Truth, ResultT]):
    """Scores results against the ground truth, from files or in validation.

    It is created with the source (for its classes), the class names of the predictions (None: as in
    the source) and thresholds as keyword arguments.
    """

    def __init__(
        self, source: Source[Truth] | None = None, classes: Sequence[str] | None = None
    ) -> None:
        self.rows: list[Any] = []  # one per sample

    def update(self, name: str, truth: Truth, found: ResultT | None) -> None:
        """Add one sample; None: there is no prediction."""
        raise NotImplementedError

    def state(self) -> Any:
        """Return the accumulated state as plain data that can be pickled."""
        return self.rows

    def merge(self, states: Sequence[Any]) -> None:
        """Replace the state by the merged state of several metrics."""
        self.rows = [row for rows in states for row in rows]

    def compute(self) -> "Scores":
        raise NotImplementedError


@dataclass(frozen=True)
class Column:
    """A column of a table of scores."""

    key: str  # key of a row
    title: str
    digits: int | None = 2  # decimal places; None: text or an integer

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
        columns: Columns of printed rows.
        facts: Counts and other facts, by name.
        skipped: Unusable samples, one reason each.
        missing: Names of samples without a prediction.
        settings: Settings of the predictions; None if unknown.
        listed: Maximum number of rows printed by `to_text`; `to_dict` has all rows.
        groups: Prefixes of names in `mean`; `to_text` prints each group as a row of a table.

    Example:
        scores = evaluate("stereo", data="middlebury")
        print(scores.mean["epe_all"], len(scores.rows), scores.missing)
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
    groups: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the scores as plain data; NaN and infinities become None."""
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
        """Return the scores as a table."""
        rows = list(self.rows[: self.listed]) if self.columns else []
        in_table = {column.key for column in self.columns} if rows else set()
        tables: dict[tuple[str, ...], list[dict[str, Any]]] = {}  # groups by their scores
        for group in self.groups:
            values = {k: v for k, v in self.mean.items() if k.startswith(f"{group}_")}
            row = {key.removeprefix(f"{group}_"): value for key, value in values.items()}
            tables.setdefault(tuple(row), []).append({"": group.replace("_", " by "), **row})
            in_table |= set(values)
        above = [name for name in self.mean if name not in in_table]
        width = max((len(name) for name in [*self.facts, *above]), default=0)
        lines = [f"{name:{width}}  {value}" for name, value in self.facts.items()]
        lines += [f"{name:{width}}  {Column(name, name).text(self.mean)}" for name in above]
        for names, group_rows in tables.items():
            columns = [Column("", "", None), *(Column(name, name) for name in names)]
            lines += ["", *_table(columns, group_rows)]
        if rows:
            if set(self.mean) & {column.key for column in self.columns}:
                rows.append({self.columns[0].key: "mean", **self.mean})
            lines += ["", *_table(self.columns, rows)]
            if len(self.rows) > self.listed:
                lines.append(f"... and {len(self.rows) - self.listed} more; --json lists all")
        return "\n".join(lines)


def _table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of a table with left-aligned names and right-aligned numbers."""
    cells = [[c.title for c in columns], *([c.text(row) for c in columns] for row in rows)]
    (first, *widths) = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = (
        [f"{name:<{first}}", *(f"{x:>{w}}" for x, w in zip(rest, widths, strict=True))]
        for name, *rest in cells
    )
    return ["  ".join(line).rstrip() for line in padded]


def finite(value: Any) -> Any:
    """Replace NaN and infinities by None for JSON."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
