# SPDX-License-Identifier: Apache-2.0
"""Training from a recipe: what stands behind `quadtree train`."""

import argparse
import difflib
import importlib
import logging
import re
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from quadtree_attention.errors import (
    CheckpointError,
    MissingDependencyError,
    OptionError,
    QuadtreeAttentionError,
)
from quadtree_attention.models.convert import check_fit
from quadtree_attention.models.weights import save_weights

try:
    import pytorch_lightning as pl
    import yaml  # type: ignore[import-untyped]  # comes with jsonargparse
    from jsonargparse import ArgumentError, Namespace
    from lightning_fabric.utilities.exceptions import MisconfigurationException
    from pytorch_lightning.callbacks import Callback, ModelCheckpoint
    from pytorch_lightning.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        f"training needs pytorch-lightning and jsonargparse, got {error}; "
        "pip install 'quadtree-attention[train]'"
    ) from error

from quadtree_attention.tasks.training.callbacks import History, Progress
from quadtree_attention.tasks.training.checkpoints import (
    BEST,
    LAST,
    LastCheckpoint,
    SafeCheckpointIO,
    read_training_checkpoint,
)
from quadtree_attention.tasks.training.module import TaskModule

TASKS = {
    "classify": "ClassifyModule",
    "match": "MatchModule",
    "stereo": "StereoModule",
    "detect": "DetectModule",
    "segment": "SegmentModule",
}
DATA: dict[str, str | dict[str, str]] = {  # by data.source where that decides, the default first
    "classify": "data.ClassifyData",
    "match": {
        "synthetic": "data.MatchData",
        "scannet": "scannet.ScanNetData",
        "megadepth": "megadepth.MegaDepthData",
    },
    "stereo": {"synthetic": "data.StereoData", "files": "data.FilesStereoData"},
    "detect": "data.DetectData",
    "segment": "data.SegmentData",
}
LATEST = "latest"  # --resume without a path
_UNKNOWN = (  # the ways in which the parser speaks of a name it does not know
    re.compile(r"""[Kk]ey ["']?(?P<name>[\w.]+)["']? is not expected"""),
    re.compile(r"nrecognized arguments: --(?P<name>[\w.]+)"),
    re.compile(r"Group '(?P<group>[\w.]+)' does not accept option '(?P<name>[\w.]+)'"),
    re.compile(r"Option '(?P<name>[\w.]+)' is not accepted"),
)


class TrainCLI(LightningCLI):
    """Options and recipe files of a task, and the trainer that runs them."""

    task: type[TaskModule]

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--run_dir",
            type=str | None,
            default=None,
            help="Folder for checkpoints, history.csv and curves.png (default: runs/<recipe>).",
        )
        parser.add_argument(
            "--resume",
            type=str | None,
            nargs="?",
            const=LATEST,
            default=None,
            help=f"Go on with the run in the folder, or with a given checkpoint. The run's "
            f"{LAST} is as new as --save_every steps.",
        )
        parser.add_argument(
            "--save_every", type=int, default=500, help="Steps between checkpoints in an epoch."
        )
        parser.link_arguments("seed_everything", "data.seed")
        parser.link_arguments("seed_everything", "model.seed")
        for source, (target, compute) in self.task.links.items():
            parser.link_arguments(source, target, compute_fn=compute, apply_on="instantiate")

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        own = self.config_init.trainer.callbacks or []
        return super().instantiate_trainer(
            callbacks=[*own, *self._callbacks()],
            plugins=[*(self.config_init.trainer.plugins or []), SafeCheckpointIO()],
            default_root_dir=str(run_dir(self.config)),
            logger=False,  # History writes what there is to log, and goes on after a resume
            use_distributed_sampler=False,  # samplers share the work themselves
            **kwargs,
        )

    def _callbacks(self) -> list[Callback]:
        best = ModelCheckpoint(
            dirpath=run_dir(self.config),
            filename=Path(BEST).stem,
            monitor=self.task.monitor,
            mode="max",
            enable_version_counter=False,
        )
        # Last of all, so that what the others store about the epoch is in it
        last = LastCheckpoint(self.config.save_every)
        bar = [Progress()] if self.config.trainer.enable_progress_bar is not False else []
        return [*bar, History(), best, last]


class RunConfig(SaveConfigCallback):
    """Writes the recipe as it was run to `config.yaml`."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.overwrite = True
        self.config.resume = None  # belongs to this start, not to the recipe
        super().setup(trainer, pl_module, stage)


def train(task: str, args: list[str]) -> None:
    """Runs a recipe.

    Args:
        task: Key of `TASKS`.
        args: Options as on the command line, such as `["--config", "recipe.yaml"]`.

    Raises:
        OptionError: Something in the recipe or the options is not accepted; nothing was done.
        CheckpointError: A checkpoint cannot be read or written.
    """
    cli = prepare(task, args)
    folder = run_dir(cli.config)
    checkpoint = _checkpoint(cli.config.resume, folder)
    if checkpoint:  # looked at before any work
        check_fit(cli.model, read_training_checkpoint(checkpoint)["state_dict"])
    cli.trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=checkpoint)
    if cli.trainer.is_global_zero and cli.trainer.state.finished:
        _finish(cli.trainer, cli.model, folder, command=["quadtree", "train", task, *args])


def prepare(task: str, args: list[str]) -> TrainCLI:
    """Model, data and trainer of a recipe; nothing has run yet.

    Args:
        task, args: As for `train`.

    Raises:
        OptionError: Something in the recipe or the options is not accepted.
    """
    if task not in TASKS:
        raise OptionError(f"the task must be one of {', '.join(TASKS)}, got {task!r}; take one")
    _quiet()
    return _parse(_named(task, f"module.{TASKS[task]}"), _data_class(task, args), args)


def _named(task: str, name: str) -> Any:
    """A class of a task by `file.Class`."""
    file, kind = name.split(".")
    return getattr(importlib.import_module(f"quadtree_attention.tasks.{task}.{file}"), kind)


def _data_class(task: str, args: list[str]) -> Any:
    """The data of a task: of some, the recipe says which, and has the options of that class."""
    choices = DATA[task]
    if isinstance(choices, str):
        return _named(task, choices)
    source = _source(args) or next(iter(choices))
    if source not in choices:
        close = difflib.get_close_matches(str(source), choices, n=1)
        hint = f"did you mean {close[0]}?" if close else "take one of them"
        raise OptionError(f"data.source must be {', '.join(choices)}, got {source!r}; {hint}")
    return _named(task, choices[source])


def _source(args: list[str]) -> str | None:
    """`data.source` of the options and recipes, of which later ones win; None if it is nowhere.

    What cannot be read is left to the parser to speak of.
    """
    given: list[tuple[str, str]] = []

    class Collect(argparse.Action):
        def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
            given.append((option, values))

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-c", "--config", "--data.source", action=Collect)
    with suppress(argparse.ArgumentError):
        parser.parse_known_args(args)
    found = None
    for option, value in given:
        if option == "--data.source":
            found = value
            continue
        with suppress(OSError, ValueError, yaml.YAMLError):
            recipe = yaml.safe_load(Path(value).read_text())
            data = recipe.get("data") if isinstance(recipe, dict) else None
            found = str(data["source"]) if isinstance(data, dict) and "source" in data else found
    return found


def run_dir(config: Namespace) -> Path:
    """Where a run writes: as asked for, or named after its last recipe."""
    if config.run_dir is not None:
        folder = Path(config.run_dir)
        if folder.exists() and not folder.is_dir():
            raise OptionError(f"--run_dir must be a folder, got the file {folder}; pass another")
        return folder
    recipes = [str(recipe) for recipe in config.config or []]
    return Path("runs") / (Path(recipes[-1]).stem if recipes else "run")


def _parse(module: type[TaskModule], data: type, args: list[str]) -> TrainCLI:
    known: list[str] = []

    class TaskCLI(TrainCLI):
        def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
            known.extend(parser.get_defaults().keys())
            self.config = parser.parse_args(args)

    TaskCLI.task = module
    try:
        return TaskCLI(
            module,
            data,
            args=args,
            run=False,
            auto_configure_optimizers=False,
            seed_everything_default=0,
            save_config_callback=RunConfig,
            parser_kwargs={"exit_on_error": False, "prog": "quadtree train", "allow_abbrev": False},
            trainer_defaults={"enable_model_summary": False},
        )
    except QuadtreeAttentionError:
        raise
    except ArgumentError as error:
        raise OptionError(_explain(str(error), known)) from error
    except (ValueError, TypeError, MisconfigurationException) as error:  # what Trainer refuses
        raise OptionError(_explain(str(error), known)) from error


def _explain(message: str, known: list[str]) -> str:
    """One line for what the parser said, with the right name where one was misspelt."""
    message = " ".join(message.split())
    found = next((match for rule in _UNKNOWN if (match := rule.search(message))), None)
    if found is None:
        return f"the recipe or an option is not accepted: {message}"
    parts = found.groupdict()
    name = ".".join(part for part in (parts.get("group"), parts["name"]) if part)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else "see --help for the names there are"
    return f"there is no option {name}, in the recipe or on the command line; {hint}"


def _checkpoint(resume: str | None, folder: Path) -> str | None:
    """The checkpoint to go on with, or None for a new run in a folder that holds none."""
    last = folder / LAST
    if resume is None:
        if last.exists():
            raise OptionError(
                f"{folder} holds a run already ({LAST}); go on with it by --resume, or write "
                "elsewhere with --run_dir"
            )
        return None
    path = last if resume == LATEST else Path(resume)
    if not path.exists():
        raise CheckpointError(
            f"there is no checkpoint {path} to go on with; leave out --resume for a new run"
        )
    return str(path)


def _finish(trainer: pl.Trainer, module: Any, folder: Path, command: list[str]) -> None:
    """Writes the best weights on their own, and says where everything is."""
    best = folder / BEST
    if not best.exists():  # no validation, no best
        return
    state = read_training_checkpoint(best)
    epoch = state["epoch"] + 1  # as the history counts
    rows = [row for c in cast(Any, trainer).callbacks if isinstance(c, History) for row in c.rows]
    metrics = next((row for row in rows if row["epoch"] == epoch), {})
    card = {**module.card(), "command": command, "epoch": epoch, "metrics": metrics}
    weights = folder / "best.safetensors"
    save_weights(weights, module.weights(state["state_dict"]), card, overwrite=True)
    print(f"weights  {weights}\nhistory  {folder / 'history.csv'}, {folder / 'curves.png'}")


def _quiet() -> None:
    """Hides advice of libraries that a user of a recipe can do nothing about."""
    for name in ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for text in ("does not have many workers", "LeafSpec", "lr_scheduler.step", "is not empty"):
        warnings.filterwarnings("ignore", message=f".*{text}")
    logging.getLogger("timm.scheduler").setLevel(logging.ERROR)
