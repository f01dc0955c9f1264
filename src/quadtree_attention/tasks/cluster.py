# SPDX-License-Identifier: Apache-2.0
"""Prediction on a Ray cluster, with one network per actor.

The driver, the process that connects, sends the predictor and the source to every actor. It
receives the results, and only the driver writes files. Each actor receives a group of batches at a
time; if the actor fails, its batches are sent to another one. Ray places the actors, and starts
further actors on machines that join the cluster.
"""

import os
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from quadtree_attention import __version__, checks
from quadtree_attention.errors import OptionError
from quadtree_attention.tasks.contract import Result, Source
from quadtree_attention.tasks.predictor import Predictor, prepare

Outcome = tuple[int, Result | Exception]
Chunk = Sequence[int]  # samples of one batch

DEVICES = ("auto", "cpu", "cuda")
AHEAD = 2  # groups assigned to an actor: the current and the next one
SHARES = 4  # minimum number of groups per actor, if there are enough batches
LARGEST = 8  # maximum number of samples in a group, to limit the work lost with an actor
RETRIES = 3  # attempts for a group whose actor failed
CONNECTING, PATIENCE = 5.0, 300.0  # timeouts in seconds: of the address, and of the first actor


@dataclass(frozen=True)
class Cluster:
    """A connection to a Ray cluster; see `connect`.

    Attributes:
        device: Device of the actors, "cpu" or "cuda".
        threads: CPU threads per actor.
    """

    device: str
    threads: int

    @classmethod
    def connect(cls, address: str, device: str = "auto") -> "Cluster":
        """Connect this process to a cluster, or reuse an existing connection.

        Args:
            address: "HOST:PORT" of the head node; "auto": the cluster of this machine; "local":
                start one here.
            device: Device of the actors; "auto": GPUs if the cluster has any.

        Raises:
            OptionError: There is no cluster at this address, or it has no such device.
            MissingDependencyError: Ray is not installed.
        """
        checks.one_of(DEVICES, device=device)
        _connect(address)
        nodes = _resources()
        if device == "auto":
            device = "cuda" if any(node.get("GPU") for node in nodes) else "cpu"
        most = int(max((node.get("CPU", 0) for node in nodes), default=0))
        if not most or (device == "cuda" and not any(node.get("GPU") for node in nodes)):
            lacking = "CPU" if device == "cpu" or not most else "GPU"
            raise OptionError(
                f"the Ray cluster at {address} has no {lacking} for actors; start its nodes with "
                f"ray start --num-{lacking.lower()}s N"
            )
        return cls(device, max(1, min(torch.get_num_threads(), most)))

    def settings(self, predictor: Predictor[Any]) -> dict[str, Any]:
        """Settings of the predictor that results depend on, with the device of the actors."""
        return {**predictor.settings(), "device": self.device}

    def run(
        self, predictor: Predictor[Any], source: Source[Any], chunks: Sequence[Chunk]
    ) -> Iterator[list[Outcome]]:
        """Yield results without images, or errors, of chunks in the order of completion.

        Args:
            predictor: The predictor, on any device.
            source: The samples; all machines must have their files under the same path.
            chunks: Samples of each batch.

        Raises:
            OptionError: No actor could be started, or batches were lost several times.
        """
        yield from _Run(self, predictor, source, chunks)

    def room(self) -> str:
        """Description of the number of actors and the resources of each."""
        each = "a GPU" if self.device == "cuda" else f"{self.threads} CPU threads"
        each = each.removesuffix("s") if self.threads == 1 else each
        count = self.places()
        return f"{count} actor{'s' * (count != 1)} with {each} each"

    def places(self) -> int:
        """Number of actors that fit on the cluster."""
        name, share = ("GPU", 1) if self.device == "cuda" else ("CPU", self.threads)
        return sum(int(node.get(name, 0) // share) for node in _resources())


@dataclass(frozen=True)
class _Task:
    """A task of an actor: a group of chunks; an empty group starts the actor."""

    actor: Any
    group: Sequence[Chunk] = ()
    lost: int = 0  # number of actors that failed with this group


class _Run:
    """The actors of one call of `Cluster.run`."""

    def __init__(
        self, cluster: Cluster, predictor: Any, source: Source[Any], chunks: Sequence[Chunk]
    ) -> None:
        ray = _ray()
        self.cluster = cluster
        self.waiting = deque((group, 0) for group in _groups(chunks, cluster.places()))
        self.running: dict[Any, _Task] = {}  # tasks by the reference of their result
        self.actors = dict[Any, bool]()  # True if the actor runs
        self.unstarted = 0  # consecutive actors that failed before they ran
        resources = {"num_cpus": cluster.threads}
        if cluster.device == "cuda":
            resources = {"num_cpus": 1, "num_gpus": 1}
        self.create = ray.remote(**resources, max_restarts=0, max_task_retries=0)(_Worker).remote
        held = ray.put((predictor, source))
        self.arguments = ([held], cluster.device, cluster.threads, os.getcwd(), __version__)

    def __iter__(self) -> Iterator[list[Outcome]]:
        ray = _ray()
        try:
            while self.waiting or any(task.group for task in self.running.values()):
                groups = len(self.waiting) + sum(bool(task.group) for task in self.running.values())
                while len(self.actors) < max(1, min(self.cluster.places(), groups)):
                    actor = self.create(*self.arguments)
                    self.actors[actor] = False
                    self.running[actor.start.remote()] = _Task(actor)
                patience = None if any(self.actors.values()) else PATIENCE
                done, _ = ray.wait(list(self.running), timeout=patience)
                if not done:
                    raise OptionError(
                        f"the Ray cluster started no actor within {PATIENCE:.0f} seconds: its "
                        "CPUs or GPUs are in use, or its nodes are gone; what is done is kept"
                    )
                actor = self.running[done[0]].actor
                try:
                    found = ray.get(done[0])
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                except ray.exceptions.RayError as error:
                    self._lose(actor, error)
                    continue
                del self.running[done[0]]
                self.unstarted, self.actors[actor] = 0, True
                has = sum(task.actor == actor for task in self.running.values())
                for _ in range(min(AHEAD - has, len(self.waiting))):
                    group, lost = self.waiting.popleft()
                    self.running[actor.run.remote(group)] = _Task(actor, group, lost)
                yield from found
        finally:
            for actor in self.actors:
                ray.kill(actor)

    def _lose(self, actor: Any, error: Exception) -> None:
        """Reassign the groups of an actor that failed."""
        started = self.actors.pop(actor)
        _ray().kill(actor)
        theirs = [ref for ref, task in self.running.items() if task.actor == actor]
        first, *others = map(self.running.pop, theirs)  # the first one was being computed
        times = first.lost + 1 if started else self.unstarted + 1
        if times > RETRIES:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise OptionError(
                f"{times} actors of the Ray cluster ended "
                f"{'at the same samples' if started else 'while they started'}, the last because: "
                f"{reason}; pass a smaller --size or --batch if their memory is too small; what is "
                "done is kept"
            ) from error
        self.unstarted += not started
        self.waiting.extendleft((task.group, task.lost) for task in others)
        if started:
            self.waiting.appendleft((first.group, times))


class _Worker:
    """Actor with a predictor on its device."""

    def __init__(self, held: Any, device: str, threads: int, folder: str, version: str) -> None:
        if os.path.isdir(folder):  # paths of the driver may be relative
            os.chdir(folder)
        torch.set_num_threads(threads)
        self.held, self.device, self.version = held, device, version

    def start(self) -> list[list[Outcome]]:
        if self.version != __version__:
            raise OptionError(
                f"node {socket.gethostname()} has quadtree-attention {__version__}, the driver "
                f"{self.version}; install the same version on all nodes"
            )
        (held,) = _ray().get(self.held)
        self.predictor, self.source = held
        self.predictor.to(self.device)
        return []

    def run(self, group: Sequence[Chunk]) -> list[list[Outcome]]:
        return [self._predict(chunk) for chunk in group]

    def _predict(self, chunk: Chunk) -> list[Outcome]:
        items = {i: prepare(self.predictor.preprocess, self.source, i) for i in chunk}
        return [
            (i, replace(found, images=()) if isinstance(found, Result) else found)
            for i, found in self.predictor.run_good(items)
        ]


def _groups(chunks: Sequence[Chunk], actors: int) -> list[Sequence[Chunk]]:
    """Groups of consecutive chunks, which often share images whose features an actor caches."""
    if not chunks:
        return []
    most = max(1, LARGEST // len(chunks[0]))
    step = min(most, max(1, len(chunks) // (SHARES * max(1, actors))))
    return [chunks[i : i + step] for i in range(0, len(chunks), step)]


def _ray() -> Any:
    with checks.needs("cluster", "--cluster"):
        import ray
    return ray


def _connect(address: str) -> None:
    ray = _ray()
    if ray.is_initialized():
        there = ray.get_runtime_context().gcs_address
        if address not in ("auto", "local", there):
            raise OptionError(
                f"this process is connected to the Ray cluster at {there}, got {address}; call "
                "ray.shutdown() first"
            )
        return
    if address not in ("auto", "local"):  # fail at once; Ray would retry for a minute
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or "/" in address:
            raise OptionError(
                f"the address of a Ray cluster is HOST:PORT, auto or local, got {address!r}; pass "
                "that of ray start --head, such as 10.0.0.1:6379"
            )
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECTING).close()
        except (OSError, OverflowError) as error:
            raise OptionError(
                f"there is no Ray cluster at {address}: {error}; start one with ray start --head"
            ) from error
    # Otherwise actors without a GPU could use all GPUs of their machine; Ray warns of this
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    own = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address, log_to_driver=False, logging_level="ERROR", **own)
    except Exception as error:  # Ray raises several types, such as RuntimeError
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise OptionError(
            f"cannot join the Ray cluster at {address}: {reason[:200]}; run ray start "
            "--address=HOST:PORT on this machine first, or check the address"
        ) from error


def _resources() -> list[dict[str, float]]:
    """Resources of the available machines."""
    return [node["Resources"] for node in _ray().nodes() if node["Alive"]]
