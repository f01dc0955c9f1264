# SPDX-License-Identifier: Apache-2.0
"""Many training runs, several at once, within a time limit; and the file that keeps their results.

A small model leaves a GPU idle while the host launches kernels, so runs share it. A `Suite` says
what is trained and what is kept of it: `benchmarks.attentions` and `benchmarks.match_attentions`
each have one.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.tables import number
from quadtree_attention.errors import OptionError
from quadtree_attention.tasks.training.recipe import read_recipe

LAST = "last.ckpt"  # as training calls the checkpoint to go on with
LEFT_OUT = ("debug",)  # recipes of a family that compare nothing
TRAIN = (
    "import sys; from quadtree_attention.tasks.training.run import run_command as train; "
    "*options, task = sys.argv[1:]; train(task, options)"
)
POLL_SECONDS = 0.2
GRACE_SECONDS = 5.0  # for a run that was asked to end
PRINTED_LINES, RECORDED_LINES = 15, 5  # of the output of a run that failed
_PATH = re.compile(r"(?<![\w:/.])(?:/[\w.+@-]+)+/?")
_NUMBERS = re.compile(r"\[\s+((?:null|[-+\d.eE,\s])+?)\s+\]")


@dataclass(frozen=True)
class Suite:
    """A comparison of attentions by training.

    Attributes:
        task: What `quadtree train` trains.
        prefix: How the names of its recipes begin.
        order: Recipes without the prefix, the most important first.
        metrics: Columns of the history of every run.
        score: The one of them that tells the best epoch.
        score_name: What a reader calls it.
        empty_result: Makes a result without runs.
        check_result: Raises `ValueError` for what is no result of this suite.
        optional: Columns that a run may lack, altogether or in some epochs.
    """

    task: str
    prefix: str
    order: Sequence[str]
    metrics: Sequence[str]
    score: str
    score_name: str
    empty_result: Callable[[], dict[str, Any]]
    check_result: Callable[[dict[str, Any]], None]
    optional: Sequence[str] = ()


@dataclass(frozen=True)
class Recipe:
    """A recipe file; `name` is that of the file without prefix and ending."""

    name: str
    path: Path
    content: dict[str, Any] = field(hash=False)
    variant: str | None = None

    @property
    def options(self) -> list[str]:
        """The options of training that stand for it."""
        return ["--config", str(self.path), *(["--variant", self.variant] if self.variant else [])]

    @property
    def epochs(self) -> int:
        return self.content["trainer"]["max_epochs"]

    def fingerprint(self, *, data: str | None, extra: Sequence[str]) -> str:
        """Changes with whatever changes a result, comments and seed apart."""
        content = {key: value for key, value in self.content.items() if key != "seed_everything"}
        text = json.dumps([content, data, list(extra)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def find_recipes(folder: Path, suite: Suite, names: str | None = None) -> list[Recipe]:
    """Recipes of a suite: those named, in that order, or all, the most important first.

    Raises:
        ValueError: There is no such recipe, or it cannot be read.
    """
    prefix, order = suite.prefix, suite.order
    files: dict[str, tuple[Path, str | None]] = {
        path.stem.removeprefix(prefix): (path, None) for path in folder.glob(f"{prefix}*.yaml")
    }
    for stem in (prefix.rstrip("-"), prefix.split("-")[0]):
        if not files and (folder / f"{stem}.yaml").is_file():
            path = folder / f"{stem}.yaml"
            files = {name: (path, name) for name in read_recipe(path).variants}
    known = sorted(name for name in files if name not in LEFT_OUT)
    known.sort(key=lambda name: order.index(name) if name in order else len(order))
    wanted = list(dict.fromkeys(names.split(","))) if names is not None else known
    for name in wanted:
        if name not in known:
            raise ValueError(f"there is no recipe {name!r} in {folder}; known: {', '.join(known)}")
    if not wanted:
        raise ValueError(f"there are no recipes {prefix}*.yaml in {folder}")
    return [_read_recipe(name, *files[name]) for name in wanted]


def _read_recipe(name: str, path: Path, variant: str | None) -> Recipe:
    try:
        recipe = Recipe(name, path, read_recipe(path, variant).settings, variant)
        if not isinstance(recipe.epochs, int):
            raise TypeError("trainer.max_epochs is no number")
    except (OptionError, KeyError, TypeError) as error:
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
    def name(self) -> str:
        """Of its files."""
        return f"{self.recipe.name}-s{self.seed}"

    @property
    def key(self) -> dict[str, Any]:
        """What tells it from other runs."""
        return {
            "recipe": self.recipe.name,
            "seed": self.seed,
            "epochs": self.epochs,
            "fingerprint": self.fingerprint,
        }


class ResultFileError(ValueError):
    """A file that is not the result file it should be."""


class ResultFile:
    """A result file that grows run by run, over several commands.

    It is read again before every change, so that commands may take turns.

    Args:
        path: Of the file; made with the first change.
        suite: What it is about.
    """

    def __init__(self, path: Path, suite: Suite) -> None:
        self.path = path
        self.suite = suite
        self.session: dict[str, Any] = {}
        self.seeds: list[int] = []

    def begin(self, session: dict[str, Any], *, seeds: Sequence[int]) -> None:
        """What is recorded from now on was made by this command, which wants these seeds."""
        self.session, self.seeds = session, list(seeds)
        self.read()  # a file that is not ours is refused before any work

    def read(self) -> dict[str, Any]:
        """The content.

        Raises:
            ResultFileError: The file is something else.
        """
        if not self.path.exists():
            return self.suite.empty_result()
        try:
            result = json.loads(self.path.read_text())
            self.suite.check_result(result)
        except ValueError as error:
            raise ResultFileError(f"{self.path} is no result of this program: {error}") from error
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

    def set(self, **entries: Any) -> None:
        """Records what is not about runs, in place of what was there before."""
        self._write(self.read() | entries)

    def _session_key(self) -> dict[str, str]:
        return {"session": self.session["date"]}

    def _write(self, result: dict[str, Any]) -> None:
        sessions = {session["date"]: session for session in result["sessions"]}
        if self.session:
            sessions[self.session["date"]] = self.session
        used = {entry["session"] for key in ("runs", "failures") for entry in result[key]}
        result["sessions"] = [sessions[date] for date in sorted(used)]
        result["seeds"] = sorted({*result["seeds"], *self.seeds})
        self.suite.check_result(result)
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
        before: Seconds that it ran before it was stopped, if it goes on.
    """

    job: Job
    process: subprocess.Popen[bytes]
    folder: Path
    log: Path
    began: float
    beside: int = 0
    before: float = 0.0

    @property
    def seconds(self) -> float:
        return round(self.before + time.monotonic() - self.began, 1)

    @property
    def state(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.json")


Keep = Callable[[Job, Path], dict[str, Any]]


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
    keep: Keep | None = None,
    resume: bool = False,
) -> tuple[list[Job], list[Job]]:
    """Runs jobs side by side, and records each as it ends.

    Args:
        queue: Jobs, the first first.
        results: Where they are recorded.
        jobs: How many run at the same time.
        deadline: When those still running are stopped, on the clock of `time.monotonic`.
        work: Folder for what they write.
        total: How many there are with those done before, for the progress lines.
        keep: Given a run that is done and its folder, puts aside what is to be kept of it; what it
            returns is recorded with the run.
        resume: Goes on with a run that was stopped, from its last checkpoint in `work`. All start
            then, whether or not they would be ready in time.

    Returns:
        Those that failed, and those that were stopped or not started.
    """
    waiting, running, failed = list(queue), [], []
    done = total - len(waiting)
    try:
        while (waiting or running) and time.monotonic() < deadline:
            _start_more(
                waiting, running, results, jobs=jobs, deadline=deadline, work=work, resume=resume
            )
            if not running:
                break  # none of those waiting would be ready in time
            time.sleep(POLL_SECONDS)
            for run in [run for run in running if run.process.poll() is not None]:
                running.remove(run)
                done += 1
                if not _record(run, results, f"[{done}/{total}]", keep):
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
    resume: bool,
) -> None:
    while len(running) < jobs:
        left = deadline - time.monotonic()
        ready = (job for job in waiting if resume or results.expected_seconds(job) < left)
        if (job := next(ready, None)) is None:
            return
        waiting.remove(job)
        running.append(_start(job, work, results.suite.task, resume=resume))
        for run in running:
            run.beside = max(run.beside, len(running) - 1)


def _start(job: Job, work: Path, task: str, *, resume: bool) -> Running:
    folder, log = work / job.name, work / f"{job.name}.log"
    before = _seconds_before(job, folder) if resume else None
    if before is None:
        shutil.rmtree(folder, ignore_errors=True)  # training refuses to write over an earlier try
    options = [
        *job.recipe.options,
        *("--seed_everything", str(job.seed)),
        *("--run_dir", str(folder)),
        *("--trainer.enable_progress_bar", "false"),
        *job.options,
        *([] if before is None else ["--resume"]),
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # runs share the cores
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", TRAIN, *options, task],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    run = Running(job, process, folder, log, time.monotonic(), before=before or 0.0)
    _write_state(run)
    return run


def _seconds_before(job: Job, folder: Path) -> float | None:
    """How long this very run went on before it was stopped; None if there is nothing to go on with.

    Recipe, options and length must be the same, which `_write_state` has noted beside its folder.
    """
    state = folder.with_name(f"{folder.name}.json")
    if not (folder / LAST).exists() or not state.exists():
        return None
    found = json.loads(state.read_text())
    return found["seconds"] if found["key"] == job.key else None


def _write_state(run: Running) -> None:
    state = {"key": run.job.key, "seconds": run.seconds}
    write_atomically(run.state, json.dumps(state) + "\n")


def _stop(running: Sequence[Running]) -> None:
    for run in running:
        run.process.terminate()
    end = time.monotonic() + GRACE_SECONDS
    for run in running:
        _write_state(run)
        try:
            run.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            run.process.kill()
            run.process.wait()


def _record(run: Running, results: ResultFile, progress: str, keep: Keep | None) -> bool:
    """Records a run that has ended, and says so; whether it has a result."""
    seconds, suite = run.seconds, results.suite
    try:
        outcome = {"seconds": seconds, "beside": run.beside} | _outcome(run, suite)
        outcome |= keep(run.job, run.folder) if keep else {}
    except RunFailedError as error:
        run.state.unlink(missing_ok=True)  # another try begins anew
        results.add_failure(run.job, [hide_paths(line) for line in error.args[-RECORDED_LINES:]])
        _tell(f"{progress} {run.job}: failed after {number(seconds)} s, its last output:")
        for line in error.args:
            _tell(f"    {line}")
        return False
    results.add_run(run.job, outcome)
    final, best, score = outcome["final"], outcome["best"], _short(suite.score)
    _tell(
        f"{progress} {run.job}: {suite.score_name} {final[score]:.1f} (best {best[score]:.1f} in "
        f"epoch {best['epoch']}), {number(seconds)} s with {run.beside} beside it"
    )
    return True


def _outcome(run: Running, suite: Suite) -> dict[str, Any]:
    """Scores and history of a run.

    Raises:
        RunFailedError: It has none.
    """
    lines = [line for line in run.log.read_text(errors="replace").splitlines() if line.strip()]
    if (code := run.process.returncode) != 0:
        said = code > 0 and lines  # one that was killed did not get to say why
        raise RunFailedError(*lines[-PRINTED_LINES:], *([] if said else [f"exit code {code}"]))
    try:
        history = read_history(run.folder / "history.csv", run.job.epochs, suite)
    except (OSError, ValueError) as error:
        raise RunFailedError(*lines[-PRINTED_LINES:], str(error)) from error
    score = history[suite.score]
    best = max(range(len(score)), key=score.__getitem__)
    columns = (name for name in history if name.startswith("val/"))
    return {
        "final": {_short(name): history[name][-1] for name in columns},
        "best": {"epoch": history["epoch"][best], _short(suite.score): score[best]},
        "history": history,
    }


def _short(metric: str) -> str:
    return metric.removeprefix("val/")


def read_history(path: Path, epochs: int, suite: Suite) -> dict[str, list[Any]]:
    """The columns of a run's history, of all epochs that have a score.

    None is what an optional column lacks.

    Raises:
        ValueError: Epochs or columns are missing, or a number is not finite.
    """
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if len(rows) != epochs:
        raise ValueError(f"history.csv has {len(rows)} epochs, expected {epochs}")
    if not rows[-1].get(suite.score):
        raise ValueError(f"history.csv has no {suite.score} of its last epoch")
    rows = [row for row in rows if row[suite.score]]
    names = ("seconds", *suite.metrics)
    try:
        history: dict[str, list[Any]] = {
            name: [round(float(row[name]), 4) for row in rows] for name in names
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"history.csv lacks a column or a value: {error}") from error
    for name in suite.optional:
        if name in rows[0]:
            history[name] = [round(float(row[name]), 4) if row[name] else None for row in rows]
    for name, column in history.items():
        if not all(value is None or math.isfinite(value) for value in column):
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
