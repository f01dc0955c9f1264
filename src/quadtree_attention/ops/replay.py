# SPDX-License-Identifier: Apache-2.0
"""Replay of the kernel launches of a call, recorded at its second occurrence.

All arguments of a launch except the addresses of tensors are functions of shapes, strides, dtypes
and options of a call. Computing them in Python takes longer than most kernels, so a repeated call
only allocates its tensors and passes them to compiled kernels. Settings of Triton (debugging,
instrumentation, hooks of a function) are assumed not to change.
"""

import os
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

from quadtree_attention.errors import OptionError
from quadtree_attention.ops import launches

Run = Callable[..., object]
ENVIRONMENT_VARIABLE = "QUADTREE_REPLAY"
STREAM = 3  # index of the stream among the arguments of a launch
ALIGNMENT = 256  # of tensors in memory, in bytes
MOST_PLANS = 512  # at this number all plans are dropped, for calls with changing sizes


def is_asked_for() -> bool:
    """Return True if the environment variable enables replay."""
    value = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise OptionError(
            f"the environment variable {ENVIRONMENT_VARIABLE} must be 0 or 1, got {value!r}; "
            "1 replays kernel launches, 0 does not"
        )
    return value != "0"


SWITCHED_ON = is_asked_for()


class Noted(NamedTuple):
    """A recorded launch.

    Attributes:
        run: Function that launches a compiled kernel, or runs a function; None: not repeatable.
        arguments: Its arguments.
        by_address: True if it takes addresses instead of tensors, and a stream at `STREAM`.
        kernel: Kernel to keep alive as long as the launch may be replayed.
    """

    run: Run | None
    arguments: list[Any]
    by_address: bool
    kernel: object


class Slot(NamedTuple):
    """Source of the tensor of an argument.

    Attributes:
        argument: Index of the argument.
        tensor: Index of the tensor among inputs, outputs and temporary tensors, in this order.
        offset: Offset of the argument in bytes.
        dtype: Dtype of the argument; parts of one buffer may have different dtypes.
    """

    argument: int
    tensor: int
    offset: int
    dtype: torch.dtype


class Made(NamedTuple):
    """A dense tensor to allocate."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class Launch(NamedTuple):
    """A launch that can be replayed.

    Attributes:
        run: Function that launches the compiled kernel, or runs a function.
        by_address: True if it takes addresses instead of tensors, and a stream: reading the
            address of every tensor takes a kernel longer than its launch.
        arguments: Its arguments, with placeholders for tensors.
        slots: Sources of these tensors.
    """

    run: Run
    by_address: bool
    arguments: list[Any]
    slots: list[Slot]


@dataclass(frozen=True)
class Plan:
    """All launches of a call, and the tensors to allocate for them.

    Attributes:
        outputs: The results.
        between: Temporary tensors, each with a single axis.
        offsets: Offsets of temporary tensors in one buffer, in bytes. Tensors with disjoint
            lifetimes may share memory.
        nbytes: Size of this buffer.
        launches: The launches, in order.
        kernels: References to the kernels, of which launches have only handles: Triton unloads a
            kernel without a reference.
    """

    outputs: list[Made]
    between: list[Made]
    offsets: list[int]
    nbytes: int
    launches: list[Launch]
    kernels: list[object]

    def __call__(self, inputs: Sequence[Tensor], addresses: Sequence[int]) -> list[Tensor]:
        """Return the results for inputs at these addresses."""
        new_empty = inputs[0].new_empty
        outputs = [new_empty(shape, dtype=dtype) for shape, dtype in self.outputs]
        memory = new_empty(self.nbytes, dtype=torch.uint8) if self.nbytes else None
        start = 0 if memory is None else memory.data_ptr()
        addresses = [
            *addresses,
            *[x.data_ptr() for x in outputs],
            *[start + offset for offset in self.offsets],
        ]
        with torch.cuda.device_of(inputs[0]):
            stream = _stream_of(inputs[0])
            for run, by_address, arguments, slots in self.launches:
                arguments = arguments.copy()
                if by_address:
                    arguments[STREAM] = stream
                    for number, i, offset, _ in slots:
                        arguments[number] = addresses[i] + offset
                else:
                    for number, i, offset, dtype in slots:
                        whole = self._tensor(i, [*inputs, *outputs], memory)
                        arguments[number] = _part(whole, offset, dtype)
                run(*arguments)
        return outputs

    def _tensor(self, i: int, others: Sequence[Tensor], memory: Tensor | None) -> Tensor:
        """Return the tensor with this index, which may be temporary."""
        if i < len(others):
            return others[i]
        assert memory is not None
        offset, made = self.offsets[i - len(others)], self.between[i - len(others)]
        return memory[offset : offset + made.nbytes].view(made.dtype)


def _part(whole: Tensor, offset: int, dtype: torch.dtype) -> Tensor:
    """Return the part of a dense tensor from a byte offset, or the whole tensor if it equals it."""
    if offset == 0 and whole.dtype == dtype:
        return whole
    size = (whole.nbytes - offset) // dtype.itemsize * dtype.itemsize
    return whole.view(-1).view(torch.uint8)[offset : offset + size].view(dtype)


def _stream_of(x: Tensor) -> Any:
    """Return the current stream."""
    return driver.active.get_current_stream(x.get_device()) if x.is_cuda else None


class _Here(threading.local):
    """The active recording of this thread, or None."""

    noted: list[Noted] | None = None


class CannotRepeatError(Exception):
    """A launch of a call cannot be replayed."""


_here = _Here()
_NEVER_SEEN, _SEEN_ONCE = object(), object()
_plans: dict[Hashable, Plan | object] = {}  # None: the call cannot be replayed


def is_noting() -> bool:
    """Return True if launches are being recorded for replay."""
    return _here.noted is not None


def note(run: Run | None, arguments: list[Any], *, by_address: bool, kernel: object = None) -> None:
    """Record a launch, see `Noted`."""
    assert _here.noted is not None
    _here.noted.append(Noted(run, arguments, by_address, kernel))


def note_kernel(compiled: Any, grid: Sequence[int], arguments: list[Any]) -> None:
    """Record the launch of a compiled kernel.

    Replay launches it as Triton does, but without checking for hooks, which takes longer than the
    rest of a launch. If hooks are registered, nothing is replayed.
    """
    if not isinstance(compiled, CompiledKernel):  # Triton may compile asynchronously
        note(None, arguments, by_address=True)
        return
    run = compiled.run  # loads the kernel
    no_hooks = (None, None, None)
    launch = [*grid, None, compiled.function, compiled.packed_metadata, *no_hooks, *arguments]
    note(run, launch, by_address=True, kernel=compiled)


def noted(function: Callable[..., object], *tensors: Tensor) -> None:
    """Run a function between launches, and record it.

    When it is replayed, temporary tensors have a single axis.
    """
    if launches.is_recording() and tensors[0].is_meta:  # meta tensors: nothing to run
        return
    function(*tensors)
    if is_noting():
        note(function, list(tensors), by_address=False)


def replayed(
    call: Callable[[], list[Tensor]],
    inputs: Sequence[Tensor],
    options: Hashable,
    only_launches: Callable[[], bool] = lambda: True,
) -> list[Tensor]:
    """Return the result of `call`; from its third call on, replay cached launches if enabled.

    Args:
        call: Function that launches kernels. Its results are dense.
        inputs: All tensors that it reads. Kernels get parts of inputs and results only if these
            have a single axis.
        options: All other values that the result depends on.
        only_launches: Function that returns True if nothing else runs on the device without being
            recorded, which cannot be checked; called once per call signature.
    """
    if not SWITCHED_ON or launches.is_recording() or _has_hooks():
        return call()
    addresses = [x.data_ptr() for x in inputs]
    key = (_looks_of(inputs, addresses), options)
    plan = _plans.get(key, _NEVER_SEEN)
    if isinstance(plan, Plan):
        return plan(inputs, addresses)
    if plan is _NEVER_SEEN:
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        _plans[key] = _SEEN_ONCE if only_launches() else None
    if plan is not _SEEN_ONCE:  # a plan is made at the second call
        return call()
    assert not is_noting(), "a call inside of one that is noted"
    told: list[Noted] = []
    _here.noted = told
    try:
        outputs = call()
    finally:
        _here.noted = None
    try:
        _plans[key] = _Planner(inputs, outputs).plan(told)
    except CannotRepeatError:
        _plans[key] = None
    return outputs


def _has_hooks() -> bool:
    """Return True if launch hooks are registered, for example by a profiler."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)


def _looks_of(inputs: Sequence[Tensor], addresses: Sequence[int]) -> Hashable:
    """Return the part of the cache key that depends on tensors: all properties but addresses.

    Of addresses, it contains whether they are multiples of 16, and which are equal.
    """
    looks = tuple([(x.shape, x.stride(), x.dtype, x.get_device()) for x in inputs])
    distinct = len(set(addresses)) == len(addresses)
    same = () if distinct else tuple(map(addresses.index, addresses))
    return looks, same, tuple([address % 16 == 0 for address in addresses])


class _Planner:
    """Creates a plan from recorded launches, whose tensors are still alive."""

    def __init__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.places = {x.data_ptr(): i for i, x in reversed(list(enumerate(inputs)))}
        self.wholes: dict[int, list[int]] = {}  # by storage, the inputs in it
        for i, x in enumerate(inputs):
            self.wholes.setdefault(_storage(x), []).append(i)
        self.made = [Made(x.shape, x.dtype) for x in outputs]
        self.storages = {_storage(x): i for i, x in enumerate(outputs) if x.numel()}
        _check(all(x.is_contiguous() for x in outputs))

    def plan(self, launches: Sequence[Noted]) -> Plan:
        repeated = [self._launch(launch) for launch in launches]
        start, count = len(self.inputs), len(self.outputs)
        users: dict[int, list[int]] = {}  # by tensor, the launches that use it
        for n, launch in enumerate(repeated):
            for slot in launch.slots:
                users.setdefault(slot.tensor - start, []).append(n)
        _check(all(i in users for i in self.storages.values()))
        between = self.made[count:]
        spans = [(users[i][0], users[i][-1]) for i in range(count, len(self.made))]
        offsets = _offsets([made.nbytes for made in between], spans)
        ends = [offset + made.nbytes for offset, made in zip(offsets, between, strict=True)]
        kernels = [launch.kernel for launch in launches]
        return Plan(self.made[:count], between, offsets, max(ends, default=0), repeated, kernels)

    def _launch(self, launch: Noted) -> Launch:
        if launch.run is None:
            raise CannotRepeatError
        arguments, slots = list(launch.arguments), []
        for i, x in enumerate(launch.arguments):
            if isinstance(x, Tensor) and x.numel() > 0:
                arguments[i] = None
                slots.append(Slot(i, *self._origin(x), x.dtype))
        return Launch(launch.run, launch.by_address, arguments, slots)

    def _origin(self, x: Tensor) -> tuple[int, int]:
        """Return the index of the tensor that contains x, and the byte offset of x in it."""
        if (number := self.places.get(x.data_ptr())) is not None:
            return number, 0
        if wholes := self.wholes.get(_storage(x)):
            _check(len(wholes) == 1)  # ambiguous otherwise
            return wholes[0], self._part_of_input(x, self.inputs[wholes[0]])
        number = self.storages.setdefault(_storage(x), len(self.made))
        if number == len(self.made):  # a temporary tensor: the base of the view x
            entries = x.untyped_storage().nbytes() // x.itemsize
            self.made.append(Made(torch.Size([entries]), x.dtype))
        offset = int(x.storage_offset()) * x.itemsize
        _check(offset == 0 or len(self.made[number].shape) == 1)
        return len(self.inputs) + number, offset

    @staticmethod
    def _part_of_input(x: Tensor, whole: Tensor) -> int:
        begin = x.data_ptr() - whole.data_ptr()
        _check(whole.ndim == 1 and whole.is_contiguous())
        _check(0 <= begin < whole.nbytes)
        return begin


def _offsets(sizes: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[int]:
    """Offsets of tensors of these sizes in one buffer, given their lifetimes.

    Each gets the first offset that is free during its lifetime.
    """
    placed: list[tuple[int, int, int, int]] = []  # begin, end, first launch, last launch
    for size, (first, last) in zip(sizes, spans, strict=True):
        begin = 0
        for other_begin, end, since, until in sorted(placed):
            if since <= last and until >= first and begin + size > other_begin:
                begin = max(begin, -(-end // ALIGNMENT) * ALIGNMENT)
        placed.append((begin, begin + size, first, last))
    return [begin for begin, *_ in placed]


def _check(condition: bool) -> None:
    if not condition:
        raise CannotRepeatError


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
