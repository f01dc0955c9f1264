# SPDX-License-Identifier: Apache-2.0
"""Weights of matchers that were trained for a comparison: kept, and scored on pairs."""

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.options import add_threads, at_least_one, list_of, working_folder
from benchmarks.result import ROOT, ResultFile, ResultFileError, Row, describe, slug
from benchmarks.tables.views import TRUTHS, matching_view
from benchmarks.training.comparison import (
    SIFT,
    SYNTHETIC,
    Comparison,
    comparisons,
    rows_of,
    scored_rows,
)
from benchmarks.training.runs import Job, RunFailedError, find_recipes, tell
from quadtree_attention.errors import QuadtreeAttentionError
from quadtree_attention.files import file_sha256
from quadtree_attention.models.weights import (
    card_path,
    read_card,
    read_checkpoint,
    save_weights,
)

DATA = ROOT.parent / "shared" / "data" / "matching"
REAL = ("scannet", "graf", "bikes", "rgbd")  # sets of `quality matching`
HELD_OUT = 20_260_101  # seed of the scenes to score on; runs take small ones
_NAME = re.compile(r"(?P<recipe>.+)-s(?P<seed>\d+)")


def keep_weights(job: Job, folder: Path, *, target: Path) -> dict[str, Any]:
    """Puts the weights of a run's best epoch aside in half precision, in one file.

    Raises:
        RunFailedError: There are none, or they cannot be written.
    """
    try:
        target.mkdir(parents=True, exist_ok=True)
        best, path = folder / "best.safetensors", target / f"{job.name}.safetensors"
        card = read_card(best)
        half = {
            name: tensor.half() if tensor.is_floating_point() else tensor
            for name, tensor in read_checkpoint(best).items()
        }
        stored = save_weights(path, half, card, overwrite=True)
        card_path(path).unlink()  # the weights hold what is needed to use them
    except (QuadtreeAttentionError, OSError) as error:
        raise RunFailedError(str(error)) from error
    size = path.stat().st_size
    return {"weights": {"sha256": stored["sha256"], "bytes": size, "epoch": card["epoch"]}}


def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--results", type=Path, help="file to add scores to; default: the only one there is")
    add("--weights", type=Path, help="folder that `train` has filled; default: runs/NAME")
    add("--data", type=Path, default=DATA, help="folder of the real pairs")
    known = (SYNTHETIC, *REAL)
    add("--sets", type=list_of(known), default=list(known), help="separated by commas")
    add("--pairs", type=at_least_one, default=100, help="synthetic pairs")
    add("--textures", help="folder of photographs for them; default: procedural ones")
    add("--size", type=at_least_one, default=640, help="longer side that a matcher sees")
    add("--recipe-file", type=Path, help="whose scenes are rendered; default: of the comparison")
    add("--work", help="folder that keeps scenes and matches; default: a temporary one")
    add_threads(parser)
    parser.set_defaults(device="cpu")


def check_options(parser: ArgumentParser, options: Namespace) -> None:
    if not options.comparison.weights:
        kept = ", ".join(name for name, other in comparisons().items() if other.weights)
        parser.error(f"{options.name} keeps no weights to score; those that do: {kept}")
    if any(name in REAL for name in options.sets) and not options.data.is_dir():
        parser.error(f"argument --data: there is no folder {options.data} of real pairs")
    if not options.weights.is_dir():
        parser.error(f"argument --weights: there is no folder {options.weights}")


@dataclass(frozen=True)
class Candidate:
    """Something to score: the weights of a run, or SIFT, which has none."""

    recipe: str
    seed: int | None = None
    weights: str | None = None  # sha256
    path: Path | None = None

    def case(self, set_: str) -> dict[str, Any]:
        return {"recipe": self.recipe, "seed": self.seed, "weights": self.weights, "set": set_}


def evaluate(options: Namespace, argv: Sequence[str], path: Path) -> int:
    """Scores what has no scores yet, row by row; other weights than those of the runs are refused.

    Scores of other settings, or of runs that were made again, are removed.
    """
    import cv2

    from benchmarks.measure import use_threads

    use_threads(options.threads)
    cv2.setNumThreads(options.threads)
    comparison: Comparison = options.comparison
    file = ROOT / "recipes" / f"{comparison.recipe}.yaml"
    options.scenes = find_recipes(comparison, options.recipe_file or file)[0].content["data"]
    results = ResultFile(path, comparison.kind, grows=True)
    candidates = find_candidates(options.weights, rows_of(results.read(), "run"), comparison)
    settings = {"size": options.size, "synthetic": _scenes(options)}
    libraries = ("timm", "pytorch_lightning", "opencv", "poselib")
    results.begin(describe(argv, options, libraries=libraries, **settings))
    with working_folder(options.work) as work:
        for row in _new_rows(candidates, results, options, work):
            result = results.read()
            kept = [r for r in scored_rows(result)
                    if result["runs"][r["run"]]["settings"] == settings]  # fmt: skip
            results.change(
                lambda rows, kept=kept, row=row: [
                    *(r for r in rows if r["kind"] != "score" or r in kept), row
                ]
            )  # fmt: skip
    shown = [
        row | {"case": row["case"] | {"method": comparison.label(row["case"]["recipe"])}}
        for row in scored_rows(results.read())
    ]
    views = [matching_view(truth) for truth in TRUTHS]
    print("\n\n".join(view.text(shown) for view in views if view.rows(shown)))
    print(f"written: {path}")
    return 0


def find_candidates(folder: Path, runs: Sequence[Row], comparison: Comparison) -> list[Candidate]:
    """SIFT, and the weights in a folder, which must be those of the runs; others may be missing.

    Raises:
        ResultFileError: A file belongs to none of the runs, or there are no files.
    """
    known = {(r["case"]["recipe"], r["case"]["seed"]): r["details"].get("weights") for r in runs}
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        name = _NAME.fullmatch(path.stem)
        key = (name["recipe"], int(name["seed"])) if name else ("", 0)
        stored, checksum = known.get(key), file_sha256(path)
        if stored is None or stored["sha256"] != checksum:
            raise ResultFileError(f"{path} holds weights of no run in the result file; remove it")
        found.append(Candidate(*key, checksum, path))
    if not found:
        raise ResultFileError(f"there are no weights in {folder}; train fills it")
    return [Candidate(SIFT), *sorted(found, key=lambda c: comparison.rank(c.recipe))]


def _scenes(options: Namespace) -> dict[str, Any]:
    """What the synthetic set depends on."""
    textures = Path(options.textures).resolve().name if options.textures else None
    size = {key: options.scenes[key] for key in ("height", "width")}
    return {"pairs": options.pairs, "seed": HELD_OUT, **size, "textures": textures}


def _new_rows(
    candidates: Sequence[Candidate], results: ResultFile, options: Namespace, work: Path
) -> Iterator[Row]:
    from benchmarks.quality.matching import measure, prepare

    result = results.read()
    there = [
        row["case"] for row in scored_rows(result)
        if result["runs"][row["run"]]["settings"] == results.run["settings"]
    ]  # fmt: skip
    for name in options.sets:
        missing = [c for c in candidates if c.case(name) not in there]
        if not missing:
            continue
        synthetic = name == SYNTHETIC
        folder = work / name
        samples = prepare_scenes(options, folder) if synthetic else prepare(
            name, options.data, folder)  # fmt: skip
        for candidate in missing:
            method = _method(candidate, options.size)
            place = folder / slug(method.name)
            place.mkdir(parents=True, exist_ok=True)
            values, details = measure(method, samples, place)
            errors = {
                estimator: [_rounded(pair["errors"][estimator]) for pair in details["pairs"]]
                for estimator in values["estimators"]
            }
            tell(f"{name}: {candidate.recipe} done")
            yield {"kind": "score", "case": candidate.case(name), "values": values,
                   "details": {"errors": errors}}  # fmt: skip


def _rounded(error: float | None) -> float | None:
    return None if error is None else round(error, 3)


def _method(candidate: Candidate, size: int) -> Any:
    from benchmarks.quality import Method, without_truth
    from benchmarks.quality.matching import sift
    from quadtree_attention.tasks import Matcher

    if candidate.path is None:
        return Method(SIFT, partial(without_truth, sift), {})
    matcher = Matcher.from_pretrained(candidate.path, device="cpu", size=size)
    return Method(candidate.path.stem, partial(without_truth, matcher), {})


def prepare_scenes(options: Namespace, work: Path) -> Any:
    """Pairs of scenes of a recipe, rendered under a seed that training does not use."""
    from PIL import Image

    from benchmarks.quality.matching import words_of, write_pairs
    from quadtree_attention.tasks.match.data import MatchData

    work.mkdir(parents=True, exist_ok=True)
    more = {"textures": options.textures, "val_pairs": options.pairs, "batch_size": 1}
    data = MatchData(**options.scenes | more, seed=HELD_OUT)
    data.setup()
    lines = []
    for i, batch in enumerate(data.val_dataloader()):
        pair = data.on_after_batch_transfer(batch, 0)
        names = [f"{i:04d}_{k}.png" for k in range(2)]
        for k, name in enumerate(names):
            pixels = (pair[f"image{k}"][0].clamp(0, 1) * 255).round().byte().permute(1, 2, 0)
            Image.fromarray(pixels.cpu().numpy()).save(work / name)
        matrices = (pair[key][0].double().numpy() for key in ("K0", "K1", "T_0to1"))
        lines.append(f"{' '.join(names)} 0 0 {words_of(*matrices)}")
    return write_pairs(work, work, lines)
