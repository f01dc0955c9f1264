# SPDX-License-Identifier: Apache-2.0
"""Many training runs, several at once, within a time limit; and the file that keeps their results.

A small model leaves a GPU idle while the host launches kernels, so runs share it.
"""

import csv
import hashlib
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.attention_tables import METRICS, ORDER, check_result, empty_result
from benchmarks.tables import number

PREFIX = "tiny20-"
LEFT_OUT = ("debug",)  # recipes of the family that compare nothing
TRAIN = (
    "import sys; from quadtree_attention.tasks.training.command import train; "
    "train('classify', sys.argv[1:])"
)
POLL_SECONDS = 0.2
GRACE_SECONDS = 5.0  # for a run that was asked to end
PRINTED_LINES, RECORDED_LINES = 15, 5  # of the output of a run that failed
_PATH = re.compile(r"(?<![\w:/.])(?:/[\w.+@-]+)+/?")
_NUMBERS = re.compile(r"\[\s+([-+\d.eE,\s]+?)\s+\]")


@dataclass(frozen=True)
class Recipe:
    """A recipe file; `name` is that of the file without prefix and ending."""

    name: str
    path: Path
    content: dict[str, Any] = field(hash=False)

    @property
    def epochs(self) -> int:
        return self.content["trainer"]["max_epochs"]

    def fingerprint(self, *, data: str | None, extra: Sequence[str]) -> str:
        """Changes with whatever changes a result, comments and seed apart."""
        content = {key: value for key, value in self.content.items() if key != "seed_everything"}
        text = json.dumps([content, data, list(extra)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def find_recipes(folder: Path, names: str | None = None) -> list[Recipe]:
    """Recipes of a folder: those named, in that order, or all, the most important first.

    Raises:
        ValueError: There is no such recipe, or it cannot be read.
    """
    known = [path.stem.removeprefix(PREFIX) for path in sorted(folder.glob(f"{PREFIX}*.yaml"))]
    known = [name for name in known if name not in LEFT_OUT]
    known.sort(key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
    wanted = list(dict.fromkeys(names.split(","))) if names is not None else known
    for name in wanted:
        if name not in known:
            raise ValueError(f"there is no recipe {name!r} in {folder}; known: {', '.join(known)}")
    if not wanted:
        raise ValueError(f"there are no recipes {PREFIX}*.yaml in {folder}")
    return [_read_recipe(name, folder / f"{PREFIX}{name}.yaml") for name in wanted]


def _read_recipe(name: str, path: Path) -> Recipe:
    try:
        recipe = Recipe(name, path, yaml.safe_load(path.read_text()))
        if not isinstance(recipe.epochs, int):
            raise TypeError("trainer.max_epochs is no number")
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name} is no recipe: {error}") from error
    return recipe


@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        recipe: What is trained.
        seed: Its seed.
        epochs: How long.
        data: Name of the data set, None for what the recipe says.
        fingerprint: That of the recipe with all options.
        options: Options on top of the recipe.
    """

    recipe: Recipe
    seed: int
    epochs: int
    data: str | None
    fingerprint: str
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.recipe.name} seed {self.seed}"

    @property
    def key(self) -> dict[str, Any]:
        """What tells it from other runs."""
        return {
            "recipe": self.recipe.name,
            "seed": self.seed,
            "epochs": self.epochs,
            "fingerprint": self.fingerprint,
        }


class ResultFile:
    """A result file that grows run by run, over several commands.

    It is read again before every change, so that commands may take turns.

    Args:
        path: Of the file; made with the first change.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.session: dict[str, Any] = {}
        self.seeds: list[int] = []

    def begin(self, session: dict[str, Any], *, seeds: Sequence[int]) -> None:
        """What is recorded from now on was made by this command, which wants these seeds."""
        self.session, self.seeds = session, list(seeds)
        self.read()  # a file that is not ours is refused before any work

    def read(self) -> dict[str, Any]:
        """The content.

        Raises:
            ValueError: The file is something else.
        """
        if not self.path.exists():
            return empty_result()
        result = json.loads(self.path.read_text())
        check_result(result)
        return result

    def has(self, job: Job) -> bool:
        """Whether this very run is there."""
        return any(job.key.items() <= run.items() for run in self.read()["runs"])

    def expected_seconds(self, job: Job) -> float:
        """How long the run may take, judged by those there are; 0 if there are none."""
        same = [run for run in self.read()["runs"] if run["epochs"] == job.epochs]
        own = [run["seconds"] for run in same if run["recipe"] == job.recipe.name]
        now = [run["seconds"] for run in same if run["session"] == self.session["date"]]
        return max(own) if own else statistics.median(now) if now else 0.0

    def add_run(self, job: Job, outcome: dict[str, Any]) -> None:
        """Records a finished run, in place of those of the recipe as it was before."""
        result = self.read()
        same = ("epochs", "fingerprint")
        result["runs"] = [
            run
            for run in result["runs"]
            if run["recipe"] != job.recipe.name
            or (run["seed"] != job.seed and all(run[key] == job.key[key] for key in same))
        ]
        result["runs"].append(job.key | {"data": job.data} | outcome | self._session_key())
        result["failures"] = _without(result["failures"], job)
        self._write(result)

    def add_failure(self, job: Job, lines: Sequence[str]) -> None:
        """Records why a run has no result."""
        result = self.read()
        failure = job.key | {"lines": list(lines)} | self._session_key()
        result["failures"] = [*_without(result["failures"], job), failure]
        self._write(result)

    def set_measurement(self, measurement: dict[str, Any]) -> None:
        """Records what `measure` found, in place of what it found before."""
        self._write(self.read() | {"measurement": measurement})

    def _session_key(self) -> dict[str, str]:
        return {"session": self.session["date"]}

    def _write(self, result: dict[str, Any]) -> None:
        sessions = {session["date"]: session for session in result["sessions"]}
        if self.session:
            sessions[self.session["date"]] = self.session
        used = {entry["session"] for key in ("runs", "failures") for entry in result[key]}
        result["sessions"] = [sessions[date] for date in sorted(used)]
        result["seeds"] = sorted({*result["seeds"], *self.seeds})
        check_result(result)
        write_atomically(self.path, dumps(result))


def _without(failures: Sequence[dict[str, Any]], job: Job) -> list[dict[str, Any]]:
    this = {"recipe": job.recipe.name, "seed": job.seed}
    return [failure for failure in failures if not this.items() <= failure.items()]


def dumps(result: dict[str, Any]) -> str:
    """JSON with every list of numbers on one line: a history is read in columns."""
    text = json.dumps(result, indent=1, allow_nan=False)
    return _NUMBERS.sub(lambda match: f"[{' '.join(match[1].split())}]", text) + "\n"


def write_atomically(path: Path, text: str) -> None:
    """The file has the old content or all of the new, whatever happens meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.partial")
    unfinished.write_text(text)
    os.replace(unfinished, path)


@dataclass
class Running:
    """A run under way.

    Attributes:
        job: What runs.
        process: Its process.
        folder: Where it writes.
        log: Its output.
        began: When, on the clock of `time.monotonic`.
        beside: Most runs that there were beside it at any time.
    """

    job: Job
    process: subprocess.Popen[bytes]
    folder: Path
    log: Path
    began: float
    beside: int = 0


class RunFailedError(Exception):
    """A run that ended without a result; its arguments are the last lines of its output."""


def run_jobs(
    queue: Sequence[Job],
    results: ResultFile,
    *,
    jobs: int,
    deadline: float,
    work: Path,
    total: int,
) -> tuple[list[Job], list[Job]]:
    """Runs jobs side by side, and records each as it ends.

    Args:
        queue: Jobs, the first first.
        results: Where they are recorded.
        jobs: How many run at the same time.
        deadline: When those still running are stopped, on the clock of `time.monotonic`.
        work: Folder for what they write.
        total: How many there are with those done before, for the progress lines.

    Returns:
        Those that failed, and those that were stopped or not started.
    """
    waiting, running, failed = list(queue), [], []
    done = total - len(waiting)
    try:
        while (waiting or running) and time.monotonic() < deadline:
            _start_more(waiting, running, results, jobs=jobs, deadline=deadline, work=work)
            if not running:
                break  # none of those waiting would be ready in time
            time.sleep(POLL_SECONDS)
            for run in [run for run in running if run.process.poll() is not None]:
                running.remove(run)
                done += 1
                if not _record(run, results, f"[{done}/{total}]"):
                    failed.append(run.job)
    finally:
        _stop(running)
    return failed, [*(run.job for run in running), *waiting]


def _start_more(
    waiting: list[Job],
    running: list[Running],
    results: ResultFile,
    *,
    jobs: int,
    deadline: float,
    work: Path,
) -> None:
    while len(running) < jobs:
        left = deadline - time.monotonic()
        ready = (job for job in waiting if results.expected_seconds(job) < left)
        if (job := next(ready, None)) is None:
            return
        waiting.remove(job)
        running.append(_start(job, work))
        for run in running:
            run.beside = max(run.beside, len(running) - 1)


def _start(job: Job, work: Path) -> Running:
    folder = work / f"{job.recipe.name}-s{job.seed}"
    shutil.rmtree(folder, ignore_errors=True)  # an earlier try; training refuses to write over it
    log = work / f"{folder.name}.log"
    options = [
        *("--config", str(job.recipe.path)),
        *("--seed_everything", str(job.seed)),
        *("--run_dir", str(folder)),
        *("--trainer.enable_progress_bar", "false"),
        *job.options,
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # runs share the cores
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", TRAIN, *options],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    return Running(job, process, folder, log, time.monotonic())


def _stop(running: Sequence[Running]) -> None:
    for run in running:
        run.process.terminate()
    end = time.monotonic() + GRACE_SECONDS
    for run in running:
        try:
            run.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            run.process.kill()
            run.process.wait()


def _record(run: Running, results: ResultFile, progress: str) -> bool:
    """Records a run that has ended, and says so; whether it has a result."""
    seconds = round(time.monotonic() - run.began, 1)
    try:
        outcome = {"seconds": seconds, "beside": run.beside} | _outcome(run)
    except RunFailedError as error:
        results.add_failure(run.job, [hide_paths(line) for line in error.args[-RECORDED_LINES:]])
        _tell(f"{progress} {run.job}: failed after {number(seconds)} s, its last output:")
        for line in error.args:
            _tell(f"    {line}")
        return False
    results.add_run(run.job, outcome)
    final, best = outcome["final"], outcome["best"]
    _tell(
        f"{progress} {run.job}: top-1 {final['top1']:.1f} (best {best['top1']:.1f} in epoch "
        f"{best['epoch']}), {number(seconds)} s with {run.beside} beside it"
    )
    return True


def _outcome(run: Running) -> dict[str, Any]:
    """Accuracy and history of a run.

    Raises:
        RunFailedError: It has none.
    """
    lines = [line for line in run.log.read_text(errors="replace").splitlines() if line.strip()]
    if (code := run.process.returncode) != 0:
        said = code > 0 and lines  # one that was killed did not get to say why
        raise RunFailedError(*lines[-PRINTED_LINES:], *([] if said else [f"exit code {code}"]))
    try:
        history = read_history(run.folder / "history.csv", run.job.epochs)
    except (OSError, ValueError) as error:
        raise RunFailedError(*lines[-PRINTED_LINES:], str(error)) from error
    top1 = history["val/top1"]
    best = max(range(len(top1)), key=top1.__getitem__)
    final = {name.removeprefix("val/"): history[name][-1] for name in METRICS if "val/" in name}
    return {
        "final": final,
        "best": {"epoch": history["epoch"][best], "top1": top1[best]},
        "history": history,
    }


def read_history(path: Path, epochs: int) -> dict[str, list[Any]]:
    """The columns of a run's history.

    Raises:
        ValueError: Epochs or columns are missing, or a number is not finite.
    """
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if len(rows) != epochs:
        raise ValueError(f"history.csv has {len(rows)} epochs, expected {epochs}")
    try:
        history: dict[str, list[Any]] = {
            name: [round(float(row[name]), 4) for row in rows] for name in ("seconds", *METRICS)
        }
    except (KeyError, TypeError) as error:
        raise ValueError(f"history.csv lacks a column or a value: {error}") from error
    for name, column in history.items():
        if not all(map(math.isfinite, column)):
            raise ValueError(f"{name} is not finite: {column}")
    return {"epoch": [int(row["epoch"]) for row in rows], **history}


def hide_paths(text: str) -> str:
    """The text with the last names of absolute paths in their place."""
    return _PATH.sub(lambda match: Path(match[0]).name, text)


@contextmanager
def working_folder(path: str | None) -> Iterator[Path]:
    """The folder asked for, or one that is gone afterwards."""
    if path is None:
        with tempfile.TemporaryDirectory(prefix="attentions-") as name:
            yield Path(name)
    else:
        Path(path).mkdir(parents=True, exist_ok=True)
        yield Path(path)


@contextmanager
def exits_when_terminated() -> Iterator[None]:
    """Lets a SIGTERM raise, so that the runs that were started end too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
