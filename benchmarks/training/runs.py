# SPDX-License-Identifier: Apache-2.0
"""Many training runs, several at once, within a time limit, recorded as they end.

A small model leaves a GPU idle while the host launches kernels, so runs share it.
"""

import csv
import hashlib
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.result import ROOT, ResultFile, Row, hide_paths
from benchmarks.tables.table import number
from benchmarks.training.comparison import Comparison, rows_of, short
from quadtree_attention.errors import OptionError
from quadtree_attention.files import write_whole
from quadtree_attention.tasks.training.recipe import Recipe, read_recipe

LAST = "last.ckpt"  # as training calls the checkpoint that a run continues from
TRAIN = (
    "import sys; from quadtree_attention.tasks.training.run import run_command; "
    "*options, task = sys.argv[1:]; run_command(task, options)"
)
POLL_SECONDS = 0.2
GRACE_SECONDS = 5.0  # for a run that was asked to end
PRINTED_LINES, RECORDED_LINES = 15, 5  # of the output of a run that failed


def fingerprint(recipe: Recipe, *, data: str | None, extra: Sequence[str]) -> str:
    """Changes with whatever changes a result, comments and seed apart."""
    content = {key: value for key, value in recipe.settings.items() if key != "seed_everything"}
    text = json.dumps([content, data, list(extra)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def find_recipes(comparison: Comparison, path: Path, names: str | None = None) -> dict[str, Recipe]:
    """Variants of a recipe by name: those named, in that order; else those of the comparison if the
    recipe has them, or all, the most important first.

    Raises:
        OptionError: There is no such recipe or variant, or it cannot be read.
    """
    known = sorted(read_recipe(path).variants, key=comparison.rank)
    if set(comparison.variants) <= set(known):
        known = [name for name in known if name in comparison.variants]
    wanted = known if names is None else names.split(",")
    recipes = {name: read_recipe(path, name) for name in wanted}
    if not recipes:
        raise OptionError(f"{path} has no variants to compare; add them to the recipe")
    return recipes


@dataclass
class Job:
    """One training run.

    `case` tells it from other runs: variant of the recipe, seed, epochs, fingerprint of the recipe
    with all options, and the name of the data, None for those of the recipe.
    """

    case: dict[str, Any]
    options: Sequence[str]  # of training
    process: Any = None  # once it is started
    began: float = 0.0  # when it would have begun without a break, by `time.monotonic`
    beside: int = 0  # most runs that there were beside it at any time

    def __str__(self) -> str:
        return f"{self.case['recipe']} seed {self.case['seed']}"

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.case['recipe']}-s{self.case['seed']}"

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self.began, 1)

    def note(self, folder: Path) -> None:
        """Notes what it is and how long it ran, for a command that continues it."""
        state = {"case": self.case, "seconds": self.seconds}
        write_whole(_beside(folder, "json"), json.dumps(state).encode())


def _beside(folder: Path, suffix: str) -> Path:
    return folder.with_name(f"{folder.name}.{suffix}")


class RunFailedError(Exception):
    """A run that ended without a result; its arguments are the last lines of its output."""


@dataclass
class Trainer:
    """Runs jobs side by side, and records each as it ends.

    `keep`, given a job that is done and its folder, puts aside what is to be kept of it; what it
    returns is recorded with the run. With `resume`, a run that was stopped is continued from its
    last checkpoint in `work`; all are started then, whether or not they would be ready in time.
    """

    comparison: Comparison
    results: ResultFile
    jobs: int  # at the same time
    deadline: float  # when those still running are stopped, by `time.monotonic`
    work: Path  # for what they write: a folder each, with output and state beside it
    keep: Callable[[Job, Path], dict[str, Any]]
    resume: bool = False
    running: list[Job] = field(default_factory=list)
    waiting: list[Job] = field(default_factory=list)
    failed: list[Job] = field(default_factory=list)

    def run(self, planned: Sequence[Job]) -> list[Job]:
        """Runs the jobs that are not recorded yet; returns those stopped or not started."""
        self.waiting = [job for job in planned if not self.has(job)]
        done = len(planned) - len(self.waiting)
        try:
            while (self.waiting or self.running) and time.monotonic() < self.deadline:
                self._start_more()
                if not self.running:
                    break  # none of those waiting would be ready in time
                time.sleep(POLL_SECONDS)
                for job in [job for job in self.running if job.process.poll() is not None]:
                    self.running.remove(job)
                    done += 1
                    self._record(job, f"[{done}/{len(planned)}]")
        finally:
            self._stop()
        return [*self.running, *self.waiting]

    def has(self, job: Job) -> bool:
        """Whether this very run is recorded."""
        return any(row["case"] == job.case for row in rows_of(self.results.read(), "run"))

    def expected_seconds(self, job: Job) -> float:
        """How long a run may take, judged by those there are; 0 if there are none."""
        result = self.results.read()
        rows = [r for r in rows_of(result, "run") if r["case"]["epochs"] == job.case["epochs"]]
        own = [r["values"]["seconds"] for r in rows if r["case"]["recipe"] == job.case["recipe"]]
        rows = [r for r in rows if result["runs"][r["run"]] == self.results.run]
        now = [r["values"]["seconds"] for r in rows]
        return max(own) if own else statistics.median(now) if now else 0.0

    def _start_more(self) -> None:
        while len(self.running) < self.jobs:
            left = self.deadline - time.monotonic()
            ready = (j for j in self.waiting if self.resume or self.expected_seconds(j) < left)
            if (job := next(ready, None)) is None:
                return
            self.waiting.remove(job)
            self._start(job)
            self.running.append(job)
            for other in self.running:
                other.beside = max(other.beside, len(self.running) - 1)

    def _start(self, job: Job) -> None:
        folder = self.work / job.name
        before = seconds_before(job.case, folder) if self.resume else None
        if before is None:
            shutil.rmtree(folder, ignore_errors=True)  # training does not overwrite a run
        options = [*job.options, "--run_dir", str(folder), "--trainer.enable_progress_bar", "false"]
        options += [] if before is None else ["--resume"]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # for callbacks
        with _beside(folder, "log").open("wb") as output:
            job.process = subprocess.Popen(  # runs share the cores
                [sys.executable, "-c", TRAIN, *options, self.comparison.task],
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        job.began = time.monotonic() - (before or 0.0)
        job.note(folder)

    def _stop(self) -> None:
        for job in self.running:
            job.process.terminate()
        end = time.monotonic() + GRACE_SECONDS
        for job in self.running:
            job.note(self.work / job.name)
            try:
                job.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                job.process.kill()
                job.process.wait()

    def _record(self, job: Job, progress: str) -> None:
        """Records a run that has ended, and says so."""
        seconds, folder = job.seconds, self.work / job.name
        row: Row = {"kind": "run", "case": job.case}
        try:
            scores, history = outcome(job, folder, self.comparison)
            row["values"] = {"seconds": seconds, "beside": job.beside, **scores}
            row["details"] = {"history": history, **self.keep(job, folder)}
            metric = self.comparison.score
            name, score = self.comparison.scores[metric], short(metric)
            final, best = scores["final"], scores["best"]
            told = f"{name} {final[score]:.1f} (best {best[score]:.1f} in epoch {best['epoch']}), "
            tell(f"{progress} {job}: {told}{number(seconds)} s with {job.beside} beside it")
        except RunFailedError as error:
            self.failed.append(job)
            _beside(folder, "json").unlink(missing_ok=True)  # another try starts over
            row = {"kind": "run", "case": job.case}
            row["error"] = "\n".join(hide_paths(line) for line in error.args[-RECORDED_LINES:])
            tell(f"{progress} {job}: failed after {number(seconds)} s, its last output:")
            for line in error.args:
                tell(f"    {line}")
        complete = not (self.waiting or self.running or self.failed)
        self.results.add(row, replaces=partial(_replaces, row), complete=complete)


def _replaces(new: Row, row: Row) -> bool:
    """Whether a new run replaces a row: of the same run, or of the recipe as it was before."""
    if row["kind"] != "run" or row["case"]["recipe"] != new["case"]["recipe"]:
        return False
    same_seed = row["case"]["seed"] == new["case"]["seed"]
    if "error" in new:
        return same_seed and "error" in row
    return same_seed or any(row["case"][k] != new["case"][k] for k in ("epochs", "fingerprint"))


def seconds_before(case: dict[str, Any], folder: Path) -> float | None:
    """How long this very run went on before it was stopped; None if it cannot be continued.

    Recipe, options and length must be the same, as noted beside its folder.
    """
    state = _beside(folder, "json")
    if not (folder / LAST).exists() or not state.exists():
        return None
    found = json.loads(state.read_text())
    return found["seconds"] if found["case"] == case else None


def outcome(
    job: Job, folder: Path, comparison: Comparison
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Scores and history of a run.

    Raises:
        RunFailedError: It has none.
    """
    log = _beside(folder, "log").read_text(errors="replace")
    lines = [line for line in log.splitlines() if line.strip()][-PRINTED_LINES:]
    if (code := job.process.returncode) != 0:
        told = code > 0 and lines  # one that was killed could not say why
        raise RunFailedError(*lines, *([] if told else [f"exit code {code}"]))
    try:
        history = read_history(folder / "history.csv", job.case["epochs"], comparison)
    except (OSError, ValueError) as error:
        raise RunFailedError(*lines, str(error)) from error
    score = history[comparison.score]
    sign = comparison.sign(comparison.score)
    best = max(range(len(score)), key=lambda epoch: sign * score[epoch])
    return {
        "final": {short(name): history[name][-1] for name in history if name.startswith("val/")},
        "best": {"epoch": history["epoch"][best], short(comparison.score): score[best]},
    }, history


def read_history(path: Path, epochs: int, comparison: Comparison) -> dict[str, list[Any]]:
    """The columns of a run's history, of all epochs that have a score.

    None is what an optional column lacks.

    Raises:
        ValueError: Epochs or columns are missing, or a number is not finite.
    """
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if len(rows) != epochs:
        raise ValueError(f"history.csv has {len(rows)} epochs, expected {epochs}")
    if not rows[-1].get(comparison.score):
        raise ValueError(f"history.csv has no {comparison.score} of its last epoch")
    rows = [row for row in rows if row[comparison.score]]
    names = ["seconds", *comparison.losses, *comparison.scores]
    try:
        history: dict[str, list[Any]] = {n: [round(float(r[n]), 4) for r in rows] for n in names}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"history.csv lacks a column or a value: {error}") from error
    for name in (name for name in comparison.optional if name in rows[0]):
        history[name] = [round(float(row[name]), 4) if row[name] else None for row in rows]
    for name, column in history.items():
        if not all(value is None or math.isfinite(value) for value in column):
            raise ValueError(f"{name} is not finite: {column}")
    return {"epoch": [int(row["epoch"]) for row in rows], **history}


@contextmanager
def exits_when_terminated() -> Iterator[None]:
    """Lets a SIGTERM raise, so that the runs that were started end too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def tell(line: str) -> None:
    """A line about the progress."""
    print(line, file=sys.stderr, flush=True)
