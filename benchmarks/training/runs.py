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
from pathlib import Path
from typing import Any

from benchmarks.result import ROOT, ResultFile, Row, hide_paths
from benchmarks.tables.table import number
from benchmarks.training.comparison import Comparison, rows_of, short
from quadtree_attention.errors import OptionError
from quadtree_attention.files import write_whole
from quadtree_attention.tasks.training.recipe import read_recipe

LAST = "last.ckpt"  # as training calls the checkpoint that a run continues from
TRAIN = (
    "import sys; from quadtree_attention.tasks.training.run import run_command; "
    "*options, task = sys.argv[1:]; run_command(task, options)"
)
POLL_SECONDS = 0.2
GRACE_SECONDS = 5.0  # for a run that was asked to end
PRINTED_LINES, RECORDED_LINES = 15, 5  # of the output of a run that failed


@dataclass(frozen=True)
class Recipe:
    """A variant of a recipe."""

    name: str
    path: Path
    content: dict[str, Any] = field(hash=False)

    @property
    def arguments(self) -> list[str]:
        """Options of training."""
        return ["--config", str(self.path), "--variant", self.name]

    def fingerprint(self, *, data: str | None, extra: Sequence[str]) -> str:
        """Changes with whatever changes a result, comments and seed apart."""
        content = {key: value for key, value in self.content.items() if key != "seed_everything"}
        text = json.dumps([content, data, list(extra)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def find_recipes(comparison: Comparison, path: Path, names: str | None = None) -> list[Recipe]:
    """Variants of a recipe: those named, in that order; else those of the comparison if the recipe
    has them, or all, the most important first.

    Raises:
        OptionError: There is no such recipe or variant, or it cannot be read.
    """
    known = sorted(read_recipe(path).variants, key=comparison.rank)
    if set(comparison.variants) <= set(known):
        known = [name for name in known if name in comparison.variants]
    wanted = list(dict.fromkeys(names.split(","))) if names is not None else known
    recipes = [Recipe(name, path, read_recipe(path, name).settings) for name in wanted]
    if not recipes:
        raise OptionError(f"{path} has no variants to compare; add them to the recipe")
    return recipes


@dataclass(frozen=True)
class Job:
    """One training run: a recipe, what tells it from other runs, and options on top of the recipe.

    `case` has recipe, seed, epochs, fingerprint of the recipe with all options, and the name of the
    data, None for those of the recipe.
    """

    recipe: Recipe
    case: dict[str, Any]
    options: Sequence[str] = ()

    def __str__(self) -> str:
        return f"{self.recipe.name} seed {self.case['seed']}"

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.recipe.name}-s{self.case['seed']}"


@dataclass
class Running:
    """A run under way.

    Attributes:
        job: What runs.
        process: Its process.
        folder: Where it writes; its output and its state are beside it.
        before: Seconds that it ran before it was stopped, if it is continued.
        began: When, on the clock of `time.monotonic`.
        beside: Most runs that there were beside it at any time.
    """

    job: Job
    process: "subprocess.Popen[bytes]"
    folder: Path
    before: float
    began: float = field(default_factory=time.monotonic)
    beside: int = 0

    @property
    def seconds(self) -> float:
        return round(self.before + time.monotonic() - self.began, 1)

    def note(self) -> None:
        """Notes what it is and how long it ran, for a command that continues it."""
        state = {"case": self.job.case, "seconds": self.seconds}
        write_whole(_beside(self.folder, "json"), json.dumps(state).encode())


def _beside(folder: Path, suffix: str) -> Path:
    return folder.with_name(f"{folder.name}.{suffix}")


class RunFailedError(Exception):
    """A run that ended without a result; its arguments are the last lines of its output."""


@dataclass
class Trainer:
    """Runs jobs side by side, and records each as it ends.

    Attributes:
        comparison: What they are of.
        results: Where they are recorded.
        jobs: How many run at the same time.
        deadline: When those still running are stopped, on the clock of `time.monotonic`.
        work: Folder for what they write.
        resume: Continue a run that was stopped from its last checkpoint in `work`. All are started
            then, whether or not they would be ready in time.
        keep: Given a job that is done and its folder, puts aside what is to be kept of it; what it
            returns is recorded with the run.
        running, waiting, failed: Jobs.
    """

    comparison: Comparison
    results: ResultFile
    jobs: int
    deadline: float
    work: Path
    resume: bool = False
    keep: Callable[[Job, Path], dict[str, Any]] = lambda job, folder: {}
    running: list[Running] = field(default_factory=list)
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
                for run in [run for run in self.running if run.process.poll() is not None]:
                    self.running.remove(run)
                    done += 1
                    self._record(run, f"[{done}/{len(planned)}]")
        finally:
            self._stop()
        return [*(run.job for run in self.running), *self.waiting]

    def has(self, job: Job) -> bool:
        """Whether this very run is recorded."""
        return any(row["case"] == job.case for row in rows_of(self.results.read(), "run"))

    def expected_seconds(self, job: Job) -> float:
        """How long a run may take, judged by those there are; 0 if there are none."""
        result = self.results.read()
        rows = [r for r in rows_of(result, "run") if r["case"]["epochs"] == job.case["epochs"]]
        own = [r["values"]["seconds"] for r in rows if r["case"]["recipe"] == job.recipe.name]
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
            self.running.append(self._start(job))
            for run in self.running:
                run.beside = max(run.beside, len(self.running) - 1)

    def _start(self, job: Job) -> Running:
        folder = self.work / job.name
        before = seconds_before(job, folder) if self.resume else None
        if before is None:
            shutil.rmtree(folder, ignore_errors=True)  # training does not overwrite a run
        options = [*job.recipe.arguments, "--seed_everything", str(job.case["seed"]), *job.options]
        options += ["--run_dir", str(folder), "--trainer.enable_progress_bar", "false"]
        options += [] if before is None else ["--resume"]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # for callbacks
        with _beside(folder, "log").open("wb") as output:
            process = subprocess.Popen(  # runs share the cores
                [sys.executable, "-c", TRAIN, *options, self.comparison.task],
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        run = Running(job, process, folder, before or 0.0)
        run.note()
        return run

    def _stop(self) -> None:
        for run in self.running:
            run.process.terminate()
        end = time.monotonic() + GRACE_SECONDS
        for run in self.running:
            run.note()
            try:
                run.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                run.process.kill()
                run.process.wait()

    def _record(self, run: Running, progress: str) -> None:
        """Records a run that has ended, and says so."""
        seconds, job = run.seconds, run.job
        row: Row = {"kind": "run", "case": job.case}
        try:
            scores, history = outcome(run, self.comparison)
            row["values"] = {"seconds": seconds, "beside": run.beside, **scores}
            row["details"] = {"history": history, **self.keep(job, run.folder)}
            metric = self.comparison.score
            name, score = self.comparison.scores[metric], short(metric)
            final, best = scores["final"], scores["best"]
            told = f"{name} {final[score]:.1f} (best {best[score]:.1f} in epoch {best['epoch']}), "
            tell(f"{progress} {job}: {told}{number(seconds)} s with {run.beside} beside it")
        except RunFailedError as error:
            self.failed.append(job)
            _beside(run.folder, "json").unlink(missing_ok=True)  # another try starts over
            row = {"kind": "run", "case": job.case}
            row["error"] = "\n".join(hide_paths(line) for line in error.args[-RECORDED_LINES:])
            tell(f"{progress} {job}: failed after {number(seconds)} s, its last output:")
            for line in error.args:
                tell(f"    {line}")
        complete = not (self.waiting or self.running or self.failed)
        self.results.change(
            lambda rows: [*(r for r in rows if not _replaced(r, row)), row], complete=complete
        )


def _replaced(row: Row, new: Row) -> bool:
    """Whether a new run replaces a row: of the same run, or of the recipe as it was before."""
    if row["kind"] != "run" or row["case"]["recipe"] != new["case"]["recipe"]:
        return False
    same_seed = row["case"]["seed"] == new["case"]["seed"]
    if "error" in new:
        return same_seed and "error" in row
    return same_seed or any(row["case"][k] != new["case"][k] for k in ("epochs", "fingerprint"))


def seconds_before(job: Job, folder: Path) -> float | None:
    """How long this very run went on before it was stopped; None if it cannot be continued.

    Recipe, options and length must be the same, as noted beside its folder.
    """
    state = _beside(folder, "json")
    if not (folder / LAST).exists() or not state.exists():
        return None
    found = json.loads(state.read_text())
    return found["seconds"] if found["case"] == job.case else None


def outcome(run: Running, comparison: Comparison) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Scores and history of a run.

    Raises:
        RunFailedError: It has none.
    """
    log = _beside(run.folder, "log").read_text(errors="replace")
    lines = [line for line in log.splitlines() if line.strip()][-PRINTED_LINES:]
    if (code := run.process.returncode) != 0:
        told = code > 0 and lines  # one that was killed could not say why
        raise RunFailedError(*lines, *([] if told else [f"exit code {code}"]))
    try:
        history = read_history(run.folder / "history.csv", run.job.case["epochs"], comparison)
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
    names = ["seconds", *comparison.metrics]
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
