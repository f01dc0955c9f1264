# SPDX-License-Identifier: Apache-2.0
"""Kernel launches of a call, noted once and repeated for every later call that looks the same.

Everything about a launch follows from shapes, strides, dtypes and options of a call, but for the
addresses of its tensors. What Python works out for each launch takes longer than most kernels run,
so a call that was seen before only makes its tensors anew, and hands them to kernels that are
compiled already.
"""

import os
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Run = Callable[..., object]
MOST_PLANS = 512  # then all are forgotten: sizes that change all the time are not worth keeping
SWITCHED_ON = os.environ.get("QUADTREE_REPLAY", "0") == "1"


@dataclass(frozen=True)
class Noted:
    """A launch as it happened: a compiled kernel with its grid, and all arguments."""

    run: Run
    arguments: list[Any]


@dataclass(frozen=True)
class Slot:
    """Where the tensor of an argument comes from.

    Attributes:
        argument: Its number.
        tensor: Number of the tensor: of those that come in, go out and lie between, in this order.
        offset: Entries before the first one that the kernel gets.
    """

    argument: int
    tensor: int
    offset: int


@dataclass(frozen=True)
class Launch:
    """A launch as it can be repeated: its arguments, with room for tensors."""

    run: Run
    arguments: list[Any]
    slots: list[Slot]

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        arguments = self.arguments.copy()
        for slot in self.slots:
            tensor = tensors[slot.tensor]
            arguments[slot.argument] = tensor[slot.offset :] if slot.offset else tensor
        self.run(*arguments)


class Made(NamedTuple):
    """A dense tensor to make."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class Plan:
    """All launches of a call, and the tensors to make for them."""

    made: list[Made]
    outputs: int  # the first of those that are made
    launches: list[Launch]

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        new_empty = inputs[0].new_empty
        made = [new_empty(shape, dtype=dtype) for shape, dtype in self.made]
        tensors = [*inputs, *made]
        with torch.cuda.device_of(inputs[0]):
            for launch in self.launches:
                launch(tensors)
        return made[: self.outputs]


class _Here(threading.local):
    """What this thread notes at the moment; None: nothing."""

    noted: list[Noted] | None = None


_here = _Here()
_plans: dict[Hashable, Plan] = {}


def note(run: Run, arguments: list[Any]) -> None:
    """Tells of a launch that just happened; `run(*arguments)` would be the same one."""
    if _here.noted is not None:
        _here.noted.append(Noted(run, arguments))


def is_noted() -> bool:
    """Whether launches are to be told of."""
    return _here.noted is not None


def replayed(
    call: Callable[[], list[Tensor]], inputs: Sequence[Tensor], options: Hashable
) -> list[Tensor]:
    """What `call` gives, by repeating its launches if one like it was seen before.

    Args:
        call: Launches kernels, and nothing else that runs on the device. Its results are dense, and
            kernels get parts of them only where they have a single axis.
        inputs: All tensors that it reads; kernels get each from its first entry on.
        options: Whatever else it depends on.
    """
    key = (_looks_of(inputs), options)
    plan = _plans.get(key)
    if plan is not None:
        return plan(inputs)
    _here.noted = []
    try:
        outputs = call()
        noted = _here.noted
    finally:
        _here.noted = None
    if len(_plans) >= MOST_PLANS:
        _plans.clear()
    _plans[key] = _planned(noted, inputs, outputs)
    return outputs


def _looks_of(inputs: Sequence[Tensor]) -> Hashable:
    """All that kernels are compiled for and launched by, but the addresses themselves.

    Addresses count for being multiples of 16, and for being the same.
    """
    addresses = [x.data_ptr() for x in inputs]
    looks = tuple((x.shape, x.stride(), x.dtype) for x in inputs)
    same = tuple(addresses.index(address) for address in addresses)
    return inputs[0].device, looks, same, tuple(address % 16 for address in addresses)


def _planned(noted: Sequence[Noted], inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Plan:
    places = {x.data_ptr(): i for i, x in reversed(list(enumerate(inputs)))}
    made = [Made(x.shape, x.dtype) for x in outputs]
    storages = {_storage(x): i for i, x in enumerate(outputs) if x.numel()}
    launches = []
    for launch in noted:
        arguments, slots = list(launch.arguments), []
        for i, x in enumerate(launch.arguments):
            if not isinstance(x, Tensor) or x.numel() == 0:
                continue
            arguments[i] = None
            if (number := places.get(x.data_ptr())) is not None:
                slots.append(Slot(i, number, 0))
                continue
            number = storages.setdefault(_storage(x), len(made))
            if number == len(made):  # one that lies between: all of what the view x is of
                entries = x.untyped_storage().nbytes() // x.itemsize
                made.append(Made(torch.Size([entries]), x.dtype))
            slots.append(Slot(i, len(inputs) + number, int(x.storage_offset())))
        launches.append(Launch(launch.run, arguments, slots))
    return Plan(made, len(outputs), launches)


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
