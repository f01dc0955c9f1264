# SPDX-License-Identifier: Apache-2.0
"""Weights of matchers that were trained for a comparison: kept, and scored on pairs."""

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torchvision.utils import save_image

from benchmarks.measure import use_threads
from benchmarks.options import working_folder
from benchmarks.quality import Method, matching, without_truth
from benchmarks.result import ROOT, ResultFile, ResultFileError, Row, describe
from benchmarks.tables.views import ESTIMATORS, stored_views
from benchmarks.training import comparison as compared
from benchmarks.training.comparison import SIFT, SYNTHETIC, Comparison
from benchmarks.training.runs import Job, RunFailedError, find_recipes, tell
from quadtree_attention.errors import QuadtreeAttentionError
from quadtree_attention.files import file_sha256
from quadtree_attention.models import weights as files
from quadtree_attention.tasks.match.predictor import Matcher
from quadtree_attention.tasks.match.readers import PairsSource

LIBRARIES = ("timm", "pytorch_lightning", "opencv", "poselib")
HELD_OUT = 20_260_101  # seed of the scenes to score on; runs take small ones
SETS = (SYNTHETIC, *matching.SETS)


def keep_weights(job: Job, folder: Path, *, target: Path) -> dict[str, Any]:
    """Puts the weights of a run's best epoch aside in half precision, in one file.

    Raises:
        RunFailedError: There are none, or they cannot be written.
    """
    best, path = folder / "best.safetensors", target / f"{job.name}.safetensors"
    try:
        target.mkdir(parents=True, exist_ok=True)
        card, state = files.read_card(best), files.read_checkpoint(best)
        half = {name: x.half() if x.is_floating_point() else x for name, x in state.items()}
        stored = files.save_weights(path, half, card, overwrite=True)
        files.card_path(path).unlink()  # the weights hold what is needed to use them
    except (QuadtreeAttentionError, OSError) as error:
        raise RunFailedError(str(error)) from error
    size = path.stat().st_size
    return {"weights": {"sha256": stored["sha256"], "bytes": size, "epoch": card["epoch"]}}


def check_options(parser: ArgumentParser, options: Namespace) -> None:
    if not options.comparison.weights:
        kept = ", ".join(name for name, other in compared.comparisons().items() if other.weights)
        parser.error(f"{options.name} keeps no weights to score; those that do: {kept}")
    if options.sets != [SYNTHETIC] and not options.data.is_dir():
        parser.error(f"argument --data: there is no folder {options.data} of real pairs")
    if not options.weights.is_dir():
        parser.error(f"argument --weights: there is no folder {options.weights}")


def evaluate(options: Namespace, argv: Sequence[str]) -> int:
    """Score runs that have no scores, and SIFT; weights other than those of the runs are refused.

    Scores of other settings, or of runs that were made again, are removed.
    """
    use_threads(options.threads, opencv=True)
    comparison: Comparison = options.comparison
    file = options.recipe_file or ROOT / "recipes" / f"{comparison.recipe}.yaml"
    options.scenes = next(iter(find_recipes(comparison, file).values())).settings["data"]
    textures = Path(options.textures).resolve().name if options.textures else None
    scenes = {"pairs": options.pairs, "seed": HELD_OUT, "textures": textures}
    scenes |= {key: options.scenes[key] for key in ("height", "width")}
    path = comparison.find_result(options.results)
    results = ResultFile(path, comparison.kind, grows=True)
    candidates = find_candidates(options.weights, results.read(), comparison)
    settings = {"size": options.size, "synthetic": scenes}
    results.begin(describe(argv, options, libraries=LIBRARIES, **settings))
    with working_folder(options.work) as work:
        for name in options.sets:
            there = [row["case"] for row in _current(results)]
            missing = {file: case | {"set": name} for file, case in candidates.items()}
            missing = {file: case for file, case in missing.items() if case not in there}
            source = prepare(name, options, work / name) if missing else None
            for file, case in missing.items():
                method = Method(SIFT, partial(without_truth, matching.sift), {})
                if file is not None:
                    network = Matcher.from_pretrained(file, device="cpu", size=options.size)
                    method = Method(file.stem, partial(without_truth, network), {})
                row = {"kind": "score", "case": case, **_scores(method, source, work / name)}
                scores = [r for r in results.read()["rows"] if r["kind"] == "score"]
                kept = _current(results)
                stale = [r for r in scores if r not in kept]
                results.add(row, replaces=stale.__contains__)
                tell(f"{name}: {case['recipe']} done")
    labels = [(row, comparison.label(row["case"]["recipe"])) for row in _current(results)]
    shown = [row | {"case": row["case"] | {"method": label}} for row, label in labels]
    views = stored_views()["quality/matching"]
    print("\n\n".join(view.text(shown) for view in views if view.of(shown)))
    print(f"written: {path}")
    return 0


def _current(results: ResultFile) -> list[Row]:
    """Scores with these settings, of runs that are there."""
    result = results.read()
    same = [run["settings"] == results.run["settings"] for run in result["runs"]]
    return [row for row in compared.scored_rows(result) if same[row["run"]]]


def find_candidates(
    folder: Path, result: dict[str, Any], comparison: Comparison
) -> dict[Path | None, dict[str, Any]]:
    """Cases by files of weights, which must be those of the runs; some may be missing. None: SIFT.

    Raises:
        ResultFileError: A file belongs to none of the runs, or there are no files.
    """
    known = {
        (row["case"]["recipe"], row["case"]["seed"]): row["details"].get("weights", {})
        for row in compared.rows_of(result, "run")
    }
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        name = re.fullmatch(r"(.+)-s(\d+)", path.stem)
        recipe, seed = (name[1], int(name[2])) if name else ("", 0)
        checksum = file_sha256(path)
        if known.get((recipe, seed), {}).get("sha256") != checksum:
            raise ResultFileError(f"{path} holds weights of no run in the result file; remove it")
        found.append((path, {"recipe": recipe, "seed": seed, "weights": checksum}))
    if not found:
        raise ResultFileError(f"there are no weights in {folder}; train fills it")
    found.sort(key=lambda item: comparison.rank(item[1]["recipe"]))
    return {None: {"recipe": SIFT, "seed": None, "weights": None}, **dict(found)}


def _scores(method: Method, source: PairsSource | None, folder: Path) -> dict[str, Any]:
    assert source is not None
    values = matching.measure(method, source, folder)
    details = values.pop("details")
    found = {name: [pair["errors"][name] for pair in details["pairs"]] for name in ESTIMATORS}
    errors = {name: [e and round(e, 3) for e in found[name]] for name in found}  # None: failed
    return {"values": values, "details": {"errors": errors}}


def prepare(name: str, options: Namespace, work: Path) -> PairsSource:
    """The pairs of a set; synthetic scenes are rendered under a seed that training does not use."""
    from quadtree_attention.tasks.match.data import MatchData

    if name != SYNTHETIC:
        return matching.prepare(name, options.data, work)
    work.mkdir(parents=True, exist_ok=True)
    more = {"textures": options.textures, "val_pairs": options.pairs, "batch_size": 1}
    data = MatchData(**options.scenes | more, seed=HELD_OUT)
    data.setup()
    lines = []
    for i, batch in enumerate(data.val_dataloader()):
        pair = data.on_after_batch_transfer(batch, 0)
        names = [f"{i:04d}_{k}.png" for k in range(2)]
        for k, file in enumerate(names):
            save_image(pair[f"image{k}"], work / file)
        matrices = (pair[key][0].double().numpy() for key in ("K0", "K1", "T_0to1"))
        lines.append(f"{' '.join(names)} 0 0 {matching.words_of(*matrices)}")
    return matching.write_pairs(work, work, lines)
