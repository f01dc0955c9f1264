# SPDX-License-Identifier: Apache-2.0
"""Kernel launches of a call, noted once and repeated for every later call that looks the same.

Everything about a launch follows from shapes, strides, dtypes and options of a call, but for the
addresses of its tensors. What Python works out for each launch takes longer than most kernels run,
so a call that was seen before only makes its tensors anew, and hands them to kernels that are
compiled already. Triton's own settings (debugging, instrumentation, hooks of a function) are taken
to stay as they were.
"""

import os
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quadtree_attention.errors import OptionError

Run = Callable[..., object]
ENVIRONMENT_VARIABLE = "QUADTREE_REPLAY"
MOST_PLANS = 512  # then all are forgotten: sizes that change all the time are not worth keeping


def is_asked_for() -> bool:
    """What the environment says."""
    value = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise OptionError(
            f"the environment variable {ENVIRONMENT_VARIABLE} must be 0 or 1, got {value!r}; "
            "1 repeats kernel launches, 0 makes them anew"
        )
    return value == "1"


SWITCHED_ON = is_asked_for()


class Noted(NamedTuple):
    """A launch as it happened: a compiled kernel with its grid, if there is one, and arguments."""

    run: Run | None
    arguments: list[Any]


class Slot(NamedTuple):
    """Where the tensor of an argument comes from.

    Attributes:
        argument: Its number.
        tensor: Number of the tensor: of those that come in, go out and lie between, in this order.
        offset: Entries before the first one that the kernel gets.
    """

    argument: int
    tensor: int
    offset: int


class Made(NamedTuple):
    """A dense tensor to make."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class Launch:
    """A launch as it can be repeated.

    Attributes:
        run: The compiled kernel with its grid.
        arguments: What it gets, with room for tensors.
        slots: What goes there.
        first: Tensors between that it is the first to get.
        last: Those that it is the last to get.
    """

    run: Run
    arguments: list[Any]
    slots: list[Slot]
    first: list[int]
    last: list[int]

    def __call__(self, tensors: Sequence[Any]) -> None:
        arguments = self.arguments.copy()
        for number, i, offset in self.slots:
            arguments[number] = tensors[i][offset:] if offset else tensors[i]
        self.run(*arguments)


@dataclass(frozen=True)
class Plan:
    """All launches of a call, and the tensors to make for them."""

    made: list[Made]
    outputs: int  # the first of those that are made
    launches: list[Launch]

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        new_empty, start = inputs[0].new_empty, len(inputs)
        outputs = [new_empty(shape, dtype=dtype) for shape, dtype in self.made[: self.outputs]]
        tensors: list[Any] = [*inputs, *outputs, *self.made[self.outputs :]]
        with torch.cuda.device_of(inputs[0]):
            for launch in self.launches:
                for i in launch.first:
                    shape, dtype = self.made[i - start]
                    tensors[i] = new_empty(shape, dtype=dtype)
                launch(tensors)
                for i in launch.last:
                    tensors[i] = None
        return outputs


class _Here(threading.local):
    """What this thread notes at the moment; None: nothing."""

    noted: list[Noted] | None = None


class CannotRepeatError(Exception):
    """Launches of a call that a plan cannot hold."""


_here = _Here()
_plans: dict[Hashable, Plan | None] = {}  # None: of calls that cannot be repeated


def is_noting() -> bool:
    """Whether launches are to be told of."""
    return _here.noted is not None


def note(run: Run | None, arguments: list[Any]) -> None:
    """Tells of a launch that just happened; None: it could not be repeated."""
    assert _here.noted is not None
    _here.noted.append(Noted(run, arguments))


def noted(function: Callable[..., object], *tensors: Tensor) -> None:
    """Runs a function between launches, and tells of it.

    When it is repeated, tensors that are neither inputs nor results come as a single axis.
    """
    function(*tensors)
    if is_noting():
        note(function, list(tensors))


def replayed(
    call: Callable[[], list[Tensor]], inputs: Sequence[Tensor], options: Hashable
) -> list[Tensor]:
    """What `call` gives, by repeating its launches if one like it was seen before.

    Args:
        call: Launches kernels, and runs nothing else on the device without telling, which nobody
            can check. Its results are dense.
        inputs: All tensors that it reads. Of these and of the results, kernels get parts only where
            they have a single axis.
        options: Whatever else it depends on.
    """
    key = (_looks_of(inputs), options)
    if key in _plans:
        plan = _plans[key]
        return call() if plan is None else plan(inputs)
    assert not is_noting(), "a call inside of one that is noted"
    launches: list[Noted] = []
    _here.noted = launches
    try:
        outputs = call()
    finally:
        _here.noted = None
    if len(_plans) >= MOST_PLANS:
        _plans.clear()
    try:
        _plans[key] = _Planner(inputs, outputs).plan(launches)
    except CannotRepeatError:
        _plans[key] = None
    return outputs


def _looks_of(inputs: Sequence[Tensor]) -> Hashable:
    """What kernels are compiled for and launched by, but the addresses themselves.

    Of those it counts whether they are multiples of 16, and which are the same.
    """
    addresses = [x.data_ptr() for x in inputs]
    looks = tuple((x.shape, x.stride(), x.dtype) for x in inputs)
    same = tuple(addresses.index(address) for address in addresses)
    return inputs[0].device, looks, same, tuple(address % 16 == 0 for address in addresses)


class _Planner:
    """Makes a plan of launches that were noted, whose tensors are all still there."""

    def __init__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.places = {x.data_ptr(): i for i, x in reversed(list(enumerate(inputs)))}
        self.made = [Made(x.shape, x.dtype) for x in outputs]
        self.storages = {_storage(x): i for i, x in enumerate(outputs) if x.numel()}
        _check(all(x.is_contiguous() for x in outputs))

    def plan(self, launches: Sequence[Noted]) -> Plan:
        parts = [self._launch(launch) for launch in launches]
        users: dict[int, list[int]] = {}  # by tensor, the launches that get it
        for n, (_, _, slots) in enumerate(parts):
            for slot in slots:
                users.setdefault(slot.tensor, []).append(n)
        _check(all(len(self.inputs) + i in users for i in self.storages.values()))
        between = range(len(self.inputs) + len(self.outputs), len(self.inputs) + len(self.made))
        repeated = []
        for n, part in enumerate(parts):
            first = [i for i in between if users[i][0] == n]
            last = [i for i in between if users[i][-1] == n]
            repeated.append(Launch(*part, first, last))
        return Plan(self.made, len(self.outputs), repeated)

    def _launch(self, launch: Noted) -> tuple[Run, list[Any], list[Slot]]:
        if launch.run is None:
            raise CannotRepeatError
        arguments, slots = list(launch.arguments), []
        for i, x in enumerate(launch.arguments):
            if isinstance(x, Tensor) and x.numel() > 0:
                arguments[i] = None
                slots.append(Slot(i, *self._origin(x)))
        return launch.run, arguments, slots

    def _origin(self, x: Tensor) -> tuple[int, int]:
        """The number of the tensor that x is, or is a part of; and where the part begins."""
        if (number := self.places.get(x.data_ptr())) is not None:
            return number, 0
        wholes = [i for i, whole in enumerate(self.inputs) if _storage(whole) == _storage(x)]
        if wholes:
            _check(len(wholes) == 1)  # which one it is of cannot be told
            return wholes[0], self._part_of_input(x, self.inputs[wholes[0]])
        number = self.storages.setdefault(_storage(x), len(self.made))
        if number == len(self.made):  # one that lies between: all of what the view x is of
            entries = x.untyped_storage().nbytes() // x.itemsize
            self.made.append(Made(torch.Size([entries]), x.dtype))
        shape, dtype = self.made[number]
        offset = int(x.storage_offset())
        _check(dtype == x.dtype and (offset == 0 or len(shape) == 1))
        return len(self.inputs) + number, offset

    @staticmethod
    def _part_of_input(x: Tensor, whole: Tensor) -> int:
        offset = int(x.storage_offset() - whole.storage_offset())
        _check(whole.ndim == 1 and whole.is_contiguous() and whole.dtype == x.dtype)
        _check(0 <= offset < len(whole))
        return offset


def _check(condition: bool) -> None:
    if not condition:
        raise CannotRepeatError


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
