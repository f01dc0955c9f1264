# SPDX-License-Identifier: Apache-2.0
"""LoFTR-lite trained with every attention on synthetic scenes, from `loftr-lite.yaml`.

`train`: several runs at once; repeat the command until all are there, stopped ones go on.
`measure`: speed and memory of a training step, and parameters.
`evaluate`: pose and homography scores on scenes kept aside and on real pairs, on a CPU.
`figures`: the pictures of docs/results/matching-attentions.md, whose tables `benchmarks.tables`
makes.
"""

import argparse
import re
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from timm.optim import create_optimizer_v2

from benchmarks.attention_program import (
    add_recipes,
    add_runs,
    add_steps,
    available,
    check_recipes,
    describe,
    draw_result,
    find_result,
    measure_recipes,
    measure_step,
    plan,
    train_missing,
)
from benchmarks.attention_results import samples_per_second
from benchmarks.attention_runs import (
    Job,
    Recipe,
    ResultFile,
    ResultFileError,
    RunFailedError,
    Suite,
    find_recipes,
    working_folder,
)
from benchmarks.match_attention_tables import (
    METRICS,
    OPTIONAL,
    ORDER,
    SIFT,
    SYNTHETIC,
    check_result,
    empty_result,
    scored_rows,
    text_scores,
)
from benchmarks.measure import Call, use_threads
from benchmarks.models import SEED
from benchmarks.program import OneLineParser, at_least_one, list_of, version_of
from benchmarks.tables import MATCH_ATTENTIONS, ROOT, number
from quadtree_attention.errors import QuadtreeAttentionError
from quadtree_attention.models.weights import (
    card_path,
    file_sha256,
    read_card,
    read_checkpoint,
    save_weights,
)

if TYPE_CHECKING:  # training goes without OpenCV, which these need
    from benchmarks.matching import Method
    from quadtree_attention.tasks.match.readers import PairLine

PROGRAM = "python -m benchmarks.match_attentions"
RECIPES = ROOT / "recipes" / "match"
PICTURES = ROOT / "docs" / "results"
WEIGHTS = ROOT / "runs" / MATCH_ATTENTIONS
DATA = ROOT.parent / "shared" / "data" / "matching"
REAL = ("scannet", "graf", "bikes", "rgbd")  # sets of `benchmarks.matching`
SAVE_EVERY = 200  # steps; what is lost of a run that is stopped
HELD_OUT = 20_260_101  # seed of the scenes to score on; runs take small ones
SUITE = Suite(
    task="match",
    prefix="loftr-lite-",
    order=ORDER,
    metrics=METRICS,
    score="val/fscore",
    score_name="F-score",
    empty_result=empty_result,
    check_result=check_result,
    optional=OPTIONAL,
)
_WEIGHTS_NAME = re.compile(r"(?P<recipe>.+)-s(?P<seed>\d+)")
_KEPT = (
    "set", "kind", "pairs", "missing", "matches", "precision", "median_seconds", "estimators",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the options ask for."""
    argv = sys.argv[1:] if argv is None else list(argv)
    options = parse(argv)
    try:
        return options.run(argv, options)
    except (QuadtreeAttentionError, ResultFileError, OSError) as error:
        print(f"{PROGRAM}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def parse(argv: Sequence[str]) -> Namespace:
    """The checked options; a bad one ends the program with one line and exit code 2."""
    parser = OneLineParser(prog=PROGRAM, description=__doc__)
    names = "train|measure|evaluate|figures"
    commands = parser.add_subparsers(required=True, metavar=names, parser_class=OneLineParser)
    _add_train(commands)
    _add_measure(commands)
    _add_evaluate(commands)
    _add_figures(commands)
    options = parser.parse_args(argv)
    if "recipes" in options:
        check_recipes(parser, options, SUITE, MATCH_ATTENTIONS)
    if "sets" in options:
        _check_sets(parser, options)
    return options


def _add_train(commands: Any) -> None:
    parser = commands.add_parser("train", help="every attention, alike")
    add = parser.add_argument
    add_recipes(parser, SUITE, RECIPES, MATCH_ATTENTIONS)
    add("--data.textures", dest="textures", help="folder of photographs; default: procedural ones")
    add_runs(parser, seeds="0")
    add("--weights", type=Path, default=WEIGHTS, help="folder for the weights, in float16")
    parser.set_defaults(run=train, device=available(), threads=1)


def _add_measure(commands: Any) -> None:
    parser = commands.add_parser("measure", help="speed, memory and parameters")
    add_recipes(parser, SUITE, RECIPES, MATCH_ATTENTIONS)
    add_steps(parser)
    parser.set_defaults(run=measure_all)


def _add_evaluate(commands: Any) -> None:
    parser = commands.add_parser("evaluate", help="scores on scenes kept aside and on real pairs")
    add = parser.add_argument
    add("--results", type=Path, help="file to add scores to; default: the only one there is")
    add("--weights", type=Path, default=WEIGHTS, help="folder that `train` has filled")
    add("--data", type=Path, default=DATA, help="folder of the real pairs")
    known = (SYNTHETIC, *REAL)
    add("--sets", type=list_of(known), default=list(known), help="separated by commas")
    add("--pairs", type=at_least_one, default=100, help="synthetic pairs")
    add("--textures", help="folder of photographs for them; default: procedural ones")
    add("--size", type=at_least_one, default=640, help="longer side that a matcher sees")
    add("--folder", type=Path, default=RECIPES, help="folder of the recipes")
    add("--threads", type=at_least_one, default=torch.get_num_threads(), help="CPU threads")
    add("--work", help="folder that keeps scenes and matches; default: a temporary one")
    parser.set_defaults(run=evaluate, device="cpu")


def _check_sets(parser: argparse.ArgumentParser, options: Namespace) -> None:
    if any(name in REAL for name in options.sets) and not options.data.is_dir():
        parser.error(f"argument --data: there is no folder {options.data} of real pairs")
    if not options.weights.is_dir():
        parser.error(f"argument --weights: there is no folder {options.weights}")


def _add_figures(commands: Any) -> None:
    parser = commands.add_parser("figures", help="pictures from a result file")
    parser.add_argument("--results", type=Path, help="default: the only file there is")
    parser.add_argument("--out", type=Path, default=PICTURES, help="folder to draw into")
    parser.set_defaults(run=draw)


# ---- training


def train(argv: Sequence[str], options: Namespace) -> int:
    """Trains what is not in the result file yet; exit code 1 if a run failed."""
    settings = ["--save_every", str(SAVE_EVERY)]
    settings += ["--data.textures", options.textures] if options.textures else []
    jobs = plan(options, options.textures, settings)
    options.weights.mkdir(parents=True, exist_ok=True)
    keep = partial(keep_weights, target=options.weights)
    about = describe(PROGRAM, argv, options)
    return train_missing(jobs, options, SUITE, about, keep=keep, resume=True)


def keep_weights(job: Job, folder: Path, *, target: Path) -> dict[str, Any]:
    """Puts the weights of a run's best epoch aside in half precision, one file that says it all.

    Raises:
        RunFailedError: There are none, or they cannot be written.
    """
    try:
        best, path = folder / "best.safetensors", target / f"{job.name}.safetensors"
        card = read_card(best)
        half = {
            name: tensor.half() if tensor.is_floating_point() else tensor
            for name, tensor in read_checkpoint(best).items()
        }
        stored = save_weights(path, half, card, overwrite=True)
        card_path(path).unlink()  # of which the weights hold what it takes to use them
    except (QuadtreeAttentionError, OSError) as error:
        raise RunFailedError(str(error)) from error
    about = {"sha256": stored["sha256"], "bytes": path.stat().st_size, "epoch": card["epoch"]}
    return {"weights": about}


# ---- measuring


def measure_all(argv: Sequence[str], options: Namespace) -> int:
    """Measures every recipe, one after the other, and records what was found."""
    use_threads(options.threads)
    data = options.recipes[0].content["data"]
    about = describe(PROGRAM, argv, options) | {
        "batch": data["batch_size"],
        "image": [data["height"], data["width"]],
        "precision": "bfloat16 autocast",
    }
    tell = partial(one_line, batch=data["batch_size"])
    return measure_recipes(options, SUITE, about, measure_recipe, tell)


def measure_recipe(recipe: Recipe, options: Namespace) -> dict[str, Any]:
    """One row; one that fails says so instead."""
    return measure_step(recipe, lambda: training_step(recipe, options.device), options)


def training_step(recipe: Recipe, device: str) -> tuple[Call, int]:
    """Forward, losses, backward and a step of AdamW on a batch that was rendered before.

    The second is the number of parameters.
    """
    from quadtree_attention.tasks.match.data import MatchData
    from quadtree_attention.tasks.match.module import MatchModule

    warnings.filterwarnings("ignore", message=".*self.log")  # nobody listens here
    settings = recipe.content["data"] | {"textures": None, "procedural": 16}
    data = MatchData(**settings, seed=SEED)
    data.setup()
    numbers = torch.arange(data.batch_size, device=device)
    batch = data.on_after_batch_transfer({"indices": numbers, "training": True}, 0)
    module = MatchModule(**recipe.content["model"], seed=SEED).to(device).train()
    optimizer = create_optimizer_v2(module.model, opt="adamw", lr=1e-4, weight_decay=0.1)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16):
            loss = module.training_step(batch, batch_idx=1)  # 0 would look at the loss and wait
        loss.backward()
        optimizer.step()

    return step, sum(parameter.numel() for parameter in module.model.parameters())


def one_line(row: dict[str, Any], batch: int) -> str:
    """A row in one line."""
    if "error" in row:
        return f"{row['recipe']}: failed: {row['error']}"
    speed = number(samples_per_second(row, batch))
    memory = f"{number(row['peak_mib'])} MiB, {number(row['params'] / 1e6)} M"
    return f"{row['recipe']}: {speed} pairs/s, {memory}"


# ---- scores


@dataclass(frozen=True)
class Candidate:
    """Something to score: the weights of a run, or SIFT, which has none."""

    recipe: str
    seed: int | None = None
    weights: str | None = None  # sha256
    path: Path | None = None

    @property
    def key(self) -> dict[str, Any]:
        return {"recipe": self.recipe, "seed": self.seed, "weights": self.weights}


def evaluate(argv: Sequence[str], options: Namespace) -> int:
    """Scores what has no scores yet, row by row; exit code 2 if the weights are not of the runs."""
    import cv2

    use_threads(options.threads)
    cv2.setNumThreads(options.threads)
    path = find_result(PROGRAM, options.results, MATCH_ATTENTIONS)
    if path is None:
        return 2
    results = ResultFile(path, SUITE)
    candidates = find_candidates(options.weights, results.read()["runs"])
    about = describe(PROGRAM, argv, options)
    about["versions"] |= {"opencv": cv2.__version__, "poselib": version_of("poselib")}
    about |= {"size": options.size, "synthetic": _scenes(options)}
    rows = _rows_to_keep(results.read(), about)
    with working_folder(options.work) as work:
        for row in _new_rows(candidates, rows, options, work):
            rows.append(row)
            results.set(evaluation=about | {"rows": rows})
    print(text_scores(rows))
    print(f"written: {path}")
    return 0


def find_candidates(folder: Path, runs: Sequence[dict[str, Any]]) -> list[Candidate]:
    """SIFT, and the weights in a folder, which must be those of the runs; others may be missing.

    Raises:
        OSError: A file belongs to none of the runs, or there are no files.
    """
    known = {(run["recipe"], run["seed"]): run["weights"] for run in runs}
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        name = _WEIGHTS_NAME.fullmatch(path.stem)
        key = (name["recipe"], int(name["seed"])) if name else ("", 0)
        stored, checksum = known.get(key), file_sha256(path)
        if stored is None or stored["sha256"] != checksum:
            raise OSError(f"{path} holds weights of no run in the result file; take it away")
        found.append(Candidate(*key, checksum, path))
    if not found:
        raise OSError(f"there are no weights in {folder}; train fills it")
    found.sort(key=lambda c: ORDER.index(c.recipe) if c.recipe in ORDER else len(ORDER))
    return [Candidate(SIFT), *found]


def _scenes(options: Namespace) -> dict[str, Any]:
    """What the synthetic set depends on."""
    data = _scene_recipe(options).content["data"]
    textures = Path(options.textures).resolve().name if options.textures else None
    size = {"height": data["height"], "width": data["width"]}
    return {"pairs": options.pairs, "seed": HELD_OUT, **size, "textures": textures}


def _scene_recipe(options: Namespace) -> Recipe:
    """The recipe whose scenes are those to score on: any, because all have the same."""
    return find_recipes(options.folder, SUITE)[0]


def _rows_to_keep(result: dict[str, Any], about: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an earlier command that has asked for the same; others would not compare."""
    before = result["evaluation"]
    same = before is not None and all(before[key] == about[key] for key in ("size", "synthetic"))
    return scored_rows(result) if same else []


def _new_rows(
    candidates: Sequence[Candidate],
    rows: Sequence[dict[str, Any]],
    options: Namespace,
    work: Path,
) -> Iterator[dict[str, Any]]:
    from benchmarks.matching import measure as match_and_score

    there = [(row["set"], row["recipe"], row["seed"], row["weights"]) for row in rows]
    for name in options.sets:
        missing = [c for c in candidates if (name, *c.key.values()) not in there]
        if not missing:
            continue
        images, pairs = _prepare(name, options, work / name)
        for candidate in missing:
            row = match_and_score(name, _method(candidate, options.size), images, pairs, work)
            print(f"{name}: {candidate.recipe} done", file=sys.stderr, flush=True)
            yield candidate.key | {key: row[key] for key in _KEPT} | {"errors": _errors(row)}


def _errors(row: dict[str, Any]) -> dict[str, list[float | None]]:
    """Errors of all pairs by estimator, None for failures."""
    errors: dict[str, list[float | None]] = {}
    for name in row["estimators"]:
        each = (pair["errors"][name] for pair in row["details"])
        errors[name] = [None if error is None else round(error, 3) for error in each]
    return errors


def _method(candidate: Candidate, size: int) -> "Method":
    from benchmarks.matching import Method, sift
    from quadtree_attention.tasks import Matcher

    if candidate.path is None:
        return Method(SIFT, sift, {})
    return Method(
        candidate.path.stem, Matcher.from_pretrained(candidate.path, device="cpu", size=size), {}
    )


def _prepare(name: str, options: Namespace, work: Path) -> "tuple[Path, list[PairLine]]":
    from benchmarks.matching import prepare

    if name in REAL:
        return prepare(name, options.data, work)
    return prepare_scenes(_scene_recipe(options), options, work)


def prepare_scenes(recipe: Recipe, options: Namespace, work: Path) -> "tuple[Path, list[PairLine]]":
    """Renders the scenes of a recipe under a seed that training does not use; images and pairs."""
    from benchmarks.matching import _words
    from quadtree_attention.tasks.match.data import MatchData
    from quadtree_attention.tasks.match.readers import read_pairs

    work.mkdir(parents=True, exist_ok=True)
    more = {"textures": options.textures, "val_pairs": options.pairs, "batch_size": 1}
    data = MatchData(**recipe.content["data"] | more, seed=HELD_OUT)
    data.setup()
    lines = []
    for i, batch in enumerate(data.val_dataloader()):
        pair = data.on_after_batch_transfer(batch, 0)
        names = [f"{i:04d}_{k}.png" for k in range(2)]
        for k, name in enumerate(names):
            _write_image(pair[f"image{k}"][0], work / name)
        matrices = (_words(pair[key][0].double().numpy()) for key in ("K0", "K1", "T_0to1"))
        lines.append(f"{' '.join(names)} 0 0 {' '.join(matrices)}")
    (work / "pairs.txt").write_text("\n".join(lines) + "\n")
    return work, read_pairs(work / "pairs.txt")


def _write_image(image: torch.Tensor, path: Path) -> None:
    from PIL import Image

    pixels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0)
    Image.fromarray(pixels.cpu().numpy()).save(path)


def draw(argv: Sequence[str], options: Namespace) -> int:
    """Draws the pictures of a result file."""
    from benchmarks.match_attention_figures import draw_all  # needs matplotlib

    return draw_result(PROGRAM, options, SUITE, MATCH_ATTENTIONS, draw_all)


if __name__ == "__main__":
    sys.exit(main())
