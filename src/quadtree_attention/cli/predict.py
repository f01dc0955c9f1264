# SPDX-License-Identifier: Apache-2.0
"""Implementation of commands that run a predictor on images, one pair, or many pairs.

Importing this imports torch.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import typer

from quadtree_attention import checks
from quadtree_attention.cli.output import FAILED, imported, say, say_json, tell, written
from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.files import check_writable, make_folder
from quadtree_attention.images import images_inside
from quadtree_attention.ops.attention.cpu import is_compiled
from quadtree_attention.ops.backends import default_backend
from quadtree_attention.tasks.cluster import Cluster
from quadtree_attention.tasks.contract import Items, Result, Source, checked_suffix, get_task, table
from quadtree_attention.tasks.evaluation import make_store, predict
from quadtree_attention.tasks.predictor import Predictor
from quadtree_attention.viz.canvas import FORMATS, picture_format

if TYPE_CHECKING:
    from quadtree_attention.sfm.matching import PairMatcher

STDIN = "-"
COMMON = ("device", "dtype", "size")  # options that `from_pretrained` of all tasks takes


@dataclass(frozen=True)
class Job:
    """Output files of one item."""

    picture: Path | None = None
    saved: Path | None = None


def make_predictor(
    context: typer.Context, task: str, own: Sequence[str], kind: Any = None
) -> Predictor[Any]:
    """Create the predictor of a task, or of a class, from the options of a command."""
    given, made = context.params, kind or get_task(task).load("predictor")
    chosen = {name: given[name] for name in (*COMMON, *own) if name in given}
    if given.get("cluster") is not None:
        chosen["device"] = "cpu"  # that of the actors is the cluster's
    predictor: Predictor[Any] = made.from_pretrained(given["weights"], **chosen)
    imported()
    compiles = predictor.device.type == "cpu" and default_backend() != "reference"
    if compiles and not is_compiled():
        tell("compiling kernels for this machine once; later runs use a cache")
    return predictor


def join_cluster(context: typer.Context) -> Cluster | None:
    """Connect to the cluster of a command, if it was given one."""
    given = context.params
    if given["cluster"] is None:
        return None
    cluster = Cluster.connect(given["cluster"], given["device"])
    tell(f"the cluster has room for {cluster.room()}")
    return cluster


def make_pair_matcher(context: typer.Context) -> "PairMatcher":
    """Create the matcher of reconstructions from the options of a command."""
    from quadtree_attention.sfm.matching import PairMatcher

    return cast(PairMatcher, make_predictor(context, "match", ("threshold", "guided"), PairMatcher))


def predict_images(
    context: typer.Context,
    task: str,
    *,
    own: Sequence[str] = (),
    picture: str | None = None,
) -> None:
    """Run a predictor on images, write the requested files, and print the results.

    Args:
        context: Context with the options of the command.
        task: Task of the predictor.
        own: Names of options specific to the task.
        picture: Name of the default picture and default folder, without suffix.
    """
    options = context.params
    checks.at_least(1, batch=options["batch"])
    images: list[str] = options["images"]  # files, folders, or -
    paths, failed = expand(images)
    many = len(paths) > 1 or any(i != STDIN and Path(i).is_dir() for i in images)
    out, save = options["out"], options["save"]
    if out is None and save is None and picture is not None and not options["json"]:
        out = Path(picture) if many else Path(f"{picture}.png")
    codec = get_task(task).load("codec")()
    stored = save is not None and many  # in a store
    if save is not None and (not many or codec.together):
        checked_suffix(save, codec)
    elif save is not None and save.suffix.lower() in codec.suffixes and not save.is_dir():
        raise _no_folder("--save", save, paths)
    if stored and out is not None and os.path.realpath(out) == os.path.realpath(save):
        raise OptionError(f"--out and --save are both {str(out)!r}; use two names")
    jobs = plan_jobs(paths, out, None if stored else save, many=many)
    predictor = make_predictor(context, task, own)
    source = Items(names_of(paths), [(path,) for path in paths], read=read_image)
    store = None
    if save is not None and stored:
        store = make_store(predictor, source, save, force=options["force"])
    results: list[dict[str, Any]] = []
    done = 0
    shown = not options["json"] and sys.stdout.isatty()  # results are printed there anyway
    progress = False if shown or not many else None
    outcomes = predict(predictor, source, store=store, batch=options["batch"], progress=progress)
    for index, found in outcomes:
        done += 1
        if not isinstance(found, Result):
            failed = True
            tell(str(found))
            results.append({"image": paths[index], "error": str(found)})
            continue
        job, path = jobs[index], paths[index]
        if job.saved is not None:
            found.save(job.saved)
        if job.picture is not None:
            found.draw(job.picture, title=None if path == STDIN else Path(path).name)
        files = [str(file) for file in (job.picture, job.saved) if file is not None]
        for sentence in found.warnings:
            tell(f"warning: {path}: {sentence}")
        if options["json"]:
            results.append({"image": path, **found.to_dict(), "written": files})
        else:
            lines = [path, *(f"  {line}" for line in found.to_text().splitlines())]
            say("\n".join(lines + ([f"  written  {written(files)}"] if files else [])))
    if options["json"]:
        say_json(results)
    elif store is not None:
        say(table({"saved": f"{save}{_there(len(paths) - done)}"}))
    if failed:
        raise typer.Exit(FAILED)


def predict_pairs(
    context: typer.Context,
    predictor: Predictor[Any],
    source: Source[Any],
    *,
    describe: Callable[[int], Mapping[str, Any]],
    numbers: Callable[[Any], Mapping[str, Any]],
    facts: Callable[[Sequence[Mapping[str, Any]]], dict[str, str]],
    cluster: Cluster | None = None,
    suffix: str | None = None,
    after: Callable[[int, Any], None] | None = None,
    note: str | None = None,
) -> None:
    """Run a predictor on many pairs into a store, and print a summary.

    The exit code is 1 if some pairs failed or are missing.

    Args:
        context: Context with the options of the command.
        predictor: The predictor.
        source: The pairs.
        describe: Returns entries of the row of a pair.
        numbers: Returns further entries from a result.
        facts: Returns lines of the summary from the rows of all results.
        cluster: Where the network runs; None: here.
        suffix: Format of the files.
        after: Called with the index and the result of every pair.
        note: Message about missing pairs; None if there are none.
    """
    o = context.params
    checks.at_least(1, batch=o["batch"])  # before anything is written
    store = make_store(
        predictor, source, o["save"], force=o["force"], suffix=suffix, cluster=cluster
    )
    found_rows: dict[int, dict[str, Any]] = {}
    for index, found in predict(predictor, source, store=store, batch=o["batch"], cluster=cluster):
        row = {"name": source.name(index), **describe(index)}
        if isinstance(found, Result):
            if after is not None:
                after(index, found)
            seconds = round(found.seconds, 4)
            row |= {**numbers(found), "seconds": seconds, "warnings": list(found.warnings)}
        found_rows[index] = row | {"error": None if isinstance(found, Result) else str(found)}
    rows = [found_rows[index] for index in sorted(found_rows)]
    if note is not None:
        tell(note)
    failed = [row for row in rows if row["error"] is not None]
    done = [row for row in rows if row["error"] is None]
    if o["json"]:
        say_json(rows)
    else:
        there = _there(len(source) - len(rows))
        lines = {"pairs": f"{len(done):,} done, {len(failed):,} failed{there}"}
        if done:
            lines |= facts(done)
            lines["time"] = f"{np.mean([row['seconds'] for row in done]):.2f} s per pair"
        say(table({**lines, "written": o["save"]}))
    for row in done:
        for sentence in row["warnings"]:
            tell(f"warning: {row['name']}: {sentence}")
    for row in failed:
        tell(f"{row['name']}: {row['error']}")
    if failed or note is not None:
        raise typer.Exit(FAILED)


def _there(count: int) -> str:
    return f", {count:,} already done (--force recomputes them)" if count else ""


def expand(images: Sequence[str]) -> tuple[list[str], bool]:
    """Return the images, with folders expanded; True if a folder has none."""
    paths: list[str] = []
    failed = False
    for image in images:
        try:
            inside = image != STDIN and Path(image).is_dir()
            paths += images_inside(Path(image)) if inside else [image]
        except DataError as error:
            failed = True
            tell(str(error))
    return paths, failed


def read_image(path: str) -> Any:
    if path != STDIN:
        return path
    if sys.stdin is None:
        raise DataError("there is no standard input to read; pass a file")
    return sys.stdin.buffer.read()


def names_of(paths: Sequence[str]) -> list[str]:
    """Return unique names of results from the names of the images.

    Raises:
        OptionError: Two images have the same name.
    """
    names = ["stdin" if path == STDIN else Path(path).stem for path in paths]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        both = [path for path, name in zip(paths, names, strict=True) if name == twice]
        raise OptionError(
            f"{both[0]} and {both[1]} have the same name, so that their results would too; rename "
            "one, or run them one after the other"
        )
    return names


def plan_jobs(
    paths: Sequence[str], out: Path | None, save: Path | None, *, many: bool
) -> list[Job]:
    """Return the output files of every image, checked before the network runs.

    Raises:
        OptionError: One cannot be written, would replace an image, or is used twice.
    """
    if not paths:
        return []
    names = names_of(paths) if many and out is not None else []
    if out is not None and many:
        if out.suffix.lower() in FORMATS and not out.is_dir():
            raise _no_folder("--out", out, paths)
        make_folder(out)
        jobs = [Job(picture=out / f"{name}.png") for name in names]
    elif out is not None and out.is_dir():
        jobs = [Job(out / f"{names_of(paths)[0]}.png", save)]
    else:
        jobs = [Job(out, save) for _ in paths]
    inputs = [path for path in paths if path != STDIN]
    check_targets([job.picture for job in jobs], [save], inputs)
    return jobs


def _no_folder(option: str, given: Path, paths: Sequence[str]) -> OptionError:
    return OptionError(
        f"{option} must be a folder for {len(paths)} images, got {str(given)!r}; pass one"
    )


def check_targets(
    pictures: Iterable[Path | None], others: Iterable[Path | None], inputs: Sequence[str]
) -> None:
    """Raise `OptionError` for files that cannot be written, are inputs, or are used twice."""
    drawn = [path for path in pictures if path is not None]
    for path in drawn:
        picture_format(path)
    targets = [*drawn, *(path for path in others if path is not None)]
    for target in targets:
        check_writable(target, *inputs)
    places = [os.path.realpath(target) for target in targets]
    if len(set(places)) < len(places):
        twice = next(t for t, place in zip(targets, places, strict=True) if places.count(place) > 1)
        raise OptionError(f"two results would be {str(twice)!r}; use different names")
