# SPDX-License-Identifier: Apache-2.0
"""Base class of all predictors: weights, devices, batches, memory."""

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Self

import torch
from torch import Tensor, nn

from quadtree_attention import checks
from quadtree_attention.errors import DataError, DTypeError, OptionError, ShapeError
from quadtree_attention.files import StrPath, file_sha256
from quadtree_attention.tasks.contract import Prepared, ResultT, Source, Task

DTYPES = ("float32", "bfloat16", "float16")
BAD_SAMPLE = (DataError, ShapeError, DTypeError)  # errors of single samples


class Predictor(ABC, Generic[ResultT]):
    """A network with its preprocessing, for images of any size and format.

    Subclasses set `task`, set `preprocess` in their constructor, and define `forward` and `finish`.

    Args:
        network: The network, in float32.
        card: Its card: `model`, `kwargs`, and options of the preprocessing.
        path: Weights file, for messages and settings.
        device: "auto" selects a GPU if available.
        dtype: None or "float32"; "bfloat16" or "float16" for automatic mixed precision.
        compile: Compile the network with `torch.compile`.
        options: Options of the task that results depend on.

    Attributes:
        task: The task.
        batch: Default batch size.
        scored_with: Default options of `evaluate`.
    """

    task: ClassVar[Task]
    batch: ClassVar[int] = 1
    scored_with: ClassVar[Mapping[str, Any]] = {}
    preprocess: Callable[..., Prepared]

    def __init__(
        self,
        network: nn.Module,
        card: dict[str, Any],
        *,
        path: StrPath | None = None,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype | None = None,
        compile: bool = False,  # noqa: A002 (what users call it)
        **options: Any,
    ) -> None:
        made = [vars(k)["__init__"] for k in type(self).__mro__[:-1] if "__init__" in vars(k)]
        for name in options:
            checks.known(name, checks.keywords(*made), f"an option of {type(self).__name__}")
        self.dtype = "float32" if dtype is None else str(dtype).removeprefix("torch.")
        checks.one_of(DTYPES, dtype=self.dtype)
        self.card, self.options = card, options
        self.path = None if path is None else Path(path)
        self.device = usable_device(device)
        self.network = network.to(self.device).eval()
        if compile:
            self.network.compile()

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: StrPath | None = None,
        *,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype | None = None,
        size: int | None = None,
        compile: bool = False,  # noqa: A002
        **own: Any,
    ) -> Self:
        """Create a predictor with packaged weights or a weights file; nothing is downloaded.

        Args:
            name_or_path: A `.safetensors` file with its card, as written by training and `quadtree
                convert`, or the name of packaged weights; None: the packaged default.
            device: "auto" selects a GPU if available.
            dtype: None or "float32"; "bfloat16" or "float16" for automatic mixed precision.
            size: Longer side of the network's input in pixels; None: as trained.
            compile: Compile the network with `torch.compile`.
            **own: Options of the task, see the class.

        Raises:
            CheckpointError: The weights do not exist, cannot be read, or are of another task.
            OptionError: An option does not exist, or its value is not accepted.
        """
        from quadtree_attention.models import registry

        checks.count(1, size=size)
        path = registry.weights_path(name_or_path, cls.task.name)
        card, network = registry.load_with_card(path, task=cls.task.name)
        return cls(
            network, card, path=path, device=device, dtype=dtype, size=size, compile=compile, **own
        )

    def __call__(self, *images: Any) -> ResultT:
        """Return the result of one sample.

        Args:
            *images: The images of the sample. Each is a path, the bytes of a file, a PIL image, an
                array (H, W[, 3 or 4]) or a tensor (3, H, W) of uint8, uint16, or floats in [0, 1].
                The EXIF orientation is applied; transparent pixels become white.

        Raises:
            DataError: A file cannot be read as an image.
            ShapeError: The shape of an array or tensor is not an image's.
            DTypeError: Its dtype is not supported.
            OptionError: The memory is too small.
        """
        return self.run([self.preprocess(*self._checked(images))])[0]

    def many(
        self,
        items: Iterable[Any],
        *,
        batch: int | None = None,
        progress: bool = False,
        errors: Literal["raise", "return"] = "raise",
    ) -> Iterator[Any]:
        """Yield the results of many samples, in order.

        Args:
            items: Images; tuples of images for tasks that take several.
            batch: Batch size, for samples of equal size. Results of batch size 1 are bit-identical
                to single calls, others are equal up to rounding.
            progress: Show a progress bar in a terminal.
            errors: "raise", or "return" to yield the error of a sample in place of its result.
        """
        from tqdm import tqdm

        checks.count(1, batch=batch)
        checks.one_of(("raise", "return"), errors=errors)
        if isinstance(items, str | bytes | os.PathLike) or not isinstance(items, Iterable):
            kind = type(items).__name__
            raise OptionError(f"many() takes a list of {self.task.item}s, got {kind}; pass [...]")
        total = len(items) if isinstance(items, Sized) else None
        remaining, hidden = iter(items), None if progress else True
        with tqdm(total=total, unit=self.task.item, leave=False, disable=hidden) as bar:
            while chunk := list(islice(remaining, batch or self.batch)):
                prepared = {i: self._prepared(item, errors) for i, item in enumerate(chunk)}
                for _, found in self.run_good(prepared):
                    yield found
                    bar.update()

    def run(self, items: Sequence[Prepared]) -> list[ResultT]:
        """Return the results of prepared samples; samples with equal keys share a batch.

        Raises:
            OptionError: The memory is too small for a single sample.
        """
        found: dict[int, ResultT] = {}
        for key in dict.fromkeys(item.key for item in items):
            places = [place for place, item in enumerate(items) if item.key == key]
            results = self._run_batch([items[place] for place in places])
            found.update(zip(places, results, strict=True))
        return [found[place] for place in range(len(items))]

    def run_good(
        self, items: Mapping[int, Prepared | Exception]
    ) -> list[tuple[int, ResultT | Exception]]:
        """Return the results of prepared samples, by number, and the errors among the items."""
        good = {i: item for i, item in items.items() if isinstance(item, Prepared)}
        found: dict[int, Any] = dict(zip(good, self.run(list(good.values())), strict=True))
        return [(i, found.get(i, item)) for i, item in items.items()]

    @abstractmethod
    def forward(self, batch: Sequence[Prepared]) -> Sequence[Any]:
        """Run the network on samples with equal keys; return one raw result each, on the CPU."""

    @abstractmethod
    def finish(self, raw: Any, item: Prepared) -> ResultT:
        """Convert a raw result; `run` adds images, sizes, warnings and seconds."""

    def advice(self) -> str:
        """Advice of the out-of-memory error."""
        return "pass a smaller size, or another device"

    def settings(self) -> dict[str, Any]:
        """Return the settings that results depend on, as plain data.

        `from_pretrained(path, dtype=..., **options)` rebuilds the predictor.
        """
        return {
            "model": self.card["model"],
            "weights_sha256": None if self.path is None else file_sha256(self.path),
            "dtype": self.dtype,
            "device": self.device.type,
            "options": self.options,
        }

    def to(self, device: str | torch.device) -> Self:
        """Move the network to another device; return self."""
        self.device = usable_device(device)
        self.network.to(self.device)
        return self

    def stack(self, batch: Sequence[Prepared]) -> list[Tensor]:
        """Return the inputs of samples with equal keys as batches (B, ...) on the device."""
        columns = zip(*(item.inputs for item in batch), strict=True)
        return [torch.stack(column).to(self.device) for column in columns]

    def _checked(self, images: Sequence[Any]) -> Sequence[Any]:
        if len(images) != len(self.task.images):
            wanted = ", ".join(self.task.images)
            raise DataError(
                f"{type(self).__name__} takes {len(self.task.images)} image(s) ({wanted}), got "
                f"{len(images)}; use many() for several {self.task.item}s"
            )
        return images

    def _prepared(self, item: Any, errors: str) -> Prepared | Exception:
        several = len(self.task.images) > 1 and isinstance(item, tuple | list)
        images = item if several else (item,)
        try:
            return self.preprocess(*self._checked(images))
        except BAD_SAMPLE as error:
            if errors == "raise":
                raise
            return error

    def _run_batch(self, batch: Sequence[Prepared]) -> list[ResultT]:
        began = time.perf_counter()
        try:
            with torch.inference_mode():
                with self._precision():
                    raws = self.forward(batch)
                results = [self.finish(raw, item) for raw, item in zip(raws, batch, strict=True)]
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            if len(batch) == 1:
                sizes = " and ".join(f"{i.width}x{i.height}" for i in batch[0].images)
                raise OptionError(
                    f"{'an' if self.task.item[0] in 'aeiou' else 'a'} {self.task.item} of {sizes} "
                    f"pixels does not fit into the memory of {self.device}; {self.advice()}"
                ) from error
        else:
            seconds = (time.perf_counter() - began) / len(batch)
            return [
                replace(
                    result,
                    images=item.images,
                    seen=result.seen or tuple((x.shape[-1], x.shape[-2]) for x in item.inputs),
                    seconds=seconds,
                    warnings=item.warnings + result.warnings,
                )
                for result, item in zip(results, batch, strict=True)
            ]
        half = math.ceil(len(batch) / 2)  # outside of the handler, whose traceback keeps memory
        return self._run_batch(batch[:half]) + self._run_batch(batch[half:])

    def _precision(self) -> Any:
        if self.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, getattr(torch, self.dtype))


def prepare(
    preprocess: Callable[..., Prepared], source: Source[Any], index: int
) -> Prepared | Exception:
    """Return a preprocessed sample of a source, or why it cannot be used."""
    try:
        return preprocess(*source.images(index))
    except BAD_SAMPLE as error:
        return error


def usable_device(device: str | torch.device | None) -> torch.device:
    """Return the device with this name; "auto" or None selects a GPU if available.

    Raises:
        OptionError: The device does not exist or cannot be used.
    """
    auto = device is None or device == "auto"
    try:
        chosen = torch.device("cuda" if torch.cuda.is_available() else "cpu") if auto else device
        chosen = torch.device(chosen)  # type: ignore[arg-type]
        torch.zeros(1, device=chosen).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].split(". ")[0][:100]
        raise OptionError(
            f"there is no device {str(device)!r} on this machine: {reason}; pass cpu, or omit it"
        ) from error
    return chosen


def out_of_memory(error: Exception) -> bool:
    """True for an out-of-memory error; torch has a class for it on GPUs only."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or "can't allocate memory" in str(error)
