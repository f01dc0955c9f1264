# SPDX-License-Identifier: Apache-2.0
"""Training from a recipe: `train()` in Python, and the implementation of `quadtree train`."""

import difflib
import inspect
import json
import logging
import os
import re
import signal
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from quadtree_attention.checks import needs
from quadtree_attention.errors import CheckpointError, OptionError, QuadtreeAttentionError
from quadtree_attention.files import Lock, StrPath, make_folder
from quadtree_attention.models.convert import check_fit
from quadtree_attention.models.weights import save_weights
from quadtree_attention.tasks.contract import Task, get_task

with needs("train", "training"):
    import pytorch_lightning as pl
    from jsonargparse import ArgumentError
    from lightning_fabric.utilities.exceptions import MisconfigurationException
    from pytorch_lightning.accelerators import CPUAccelerator
    from pytorch_lightning.callbacks import Callback, ModelCheckpoint
    from pytorch_lightning.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

from quadtree_attention.tasks.training import checkpoints
from quadtree_attention.tasks.training.callbacks import History, Progress, Row
from quadtree_attention.tasks.training.checkpoints import BEST, LAST
from quadtree_attention.tasks.training.module import TaskModule
from quadtree_attention.tasks.training.recipe import Recipe, merged, read_recipe

LATEST = "latest"  # --resume without a path
_UNKNOWN = (  # messages of the parser about an unknown name
    re.compile(r"""[Kk]ey ["']?(?P<name>[\w.]+)["']? is not expected"""),
    re.compile(r"nrecognized arguments: --(?P<name>[\w.]+)"),
    re.compile(r"Group '(?P<group>[\w.]+)' does not accept option '(?P<name>[\w.]+)'"),
    re.compile(r"Option '(?P<name>[\w.]+)' is not accepted"),
)


@dataclass(frozen=True)
class Run:
    """The files and the history of a training run.

    Attributes:
        folder: The folder of the run: checkpoints, `config.yaml`, `history.csv`, `curves.png`.
        weights: The best weights, for `from_pretrained` and `evaluate`; None without validation.
        history: Metrics of every epoch.
    """

    folder: Path
    weights: Path | None
    history: list[Row]


def train(
    recipe: StrPath,
    variant: str | Sequence[str] | None = None,
    *,
    run_dir: StrPath | None = None,
    resume: bool | StrPath | None = None,
    **overrides: Any,
) -> Run:
    """Train a network from a recipe.

    Args:
        recipe: A file, such as `recipes/stereo/synthetic.yaml`.
        variant: Its variants, in a list or separated by commas; None: the first.
        run_dir: Folder to write to; None: `runs/<task>-<recipe>[-variant]`.
        resume: Continue the run in the folder, or from a checkpoint.
        overrides: Settings that replace those of the recipe, one by one:
            `data={"textures": "photos"}, trainer={"max_epochs": 2}`.

    Raises:
        OptionError: Something in the recipe or the settings is not accepted; nothing was done.
        CheckpointError: A checkpoint cannot be read or written.

    Example:
        run = train("recipes/classify/debug.yaml", trainer={"max_epochs": 1})
        print(run.history[-1]["val/top1"], run.weights)
    """
    task = read_recipe(recipe, variant).task
    if task is None:
        raise OptionError(f"{recipe} does not say what it trains; add a line such as task: detect")
    args = ["--config", os.fspath(recipe)]
    if variant:
        args += ["--variant", variant if isinstance(variant, str) else ",".join(variant)]
    if run_dir is not None:
        args += ["--run_dir", os.fspath(run_dir)]
    if resume:
        args += ["--resume"] if resume is True else [f"--resume={os.fspath(resume)}"]
    return _run(task, [*args, *_flattened(overrides)])


def run_command(task: str, args: Sequence[str]) -> None:
    """Train with options as on the command line, such as `["--config", "recipe.yaml"]`.

    Raises:
        OptionError: Something in the recipe or the options is not accepted; nothing was done.
        CheckpointError: A checkpoint cannot be read or written.
        KeyboardInterrupt: With how to continue.
    """
    _run(task, args, tell=True)


def _run(task: str, args: Sequence[str], *, tell: bool = False) -> Run:
    cli = prepare(task, args)
    folder = cli.run_dir()
    checkpoint = _checkpoint(cli.config.resume, folder)
    if checkpoint:  # checked before any work
        check_fit(cli.model, checkpoints.read_training_checkpoint(checkpoint)["state_dict"])
    with ExitStack() as stack:
        if cli.trainer.is_global_zero:
            stack.enter_context(_folder(folder))
            stack.enter_context(Lock(folder, "a training run"))
        with _interrupts(cli.trainer, folder):
            cli.trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=checkpoint)
        run = _finish(cli.trainer, cli.model, folder, ["quadtree", "train", task, *args])
    if tell and run.weights and cli.trainer.is_global_zero:
        print(f"weights  {run.weights}")
        print(f"history  {folder / 'history.csv'}, {folder / 'curves.png'}")
    return run


def prepare(task: str, args: Sequence[str]) -> "TrainCLI":
    """Create model, data and trainer of a recipe without running it; arguments of `run_command`."""
    found = get_task(task)
    # Advice of libraries that does not apply to recipes
    for name in ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for text in ("does not have many workers", "LeafSpec", "lr_scheduler.step", "is not empty"):
        warnings.filterwarnings("ignore", message=f".*{text}")
    logging.getLogger("timm.scheduler").setLevel(logging.ERROR)
    expanded, recipes, source = _expanded(task, args)
    cli = _parse(found, source, expanded, recipes)
    trainer = cli.trainer
    if 0 in (trainer.max_epochs, trainer.max_steps):
        raise OptionError(
            "training must last at least one epoch, got max_epochs or max_steps 0; pass more with "
            "--trainer.max_epochs"
        )
    asked = cli.config.trainer
    if asked.max_epochs is None and asked.max_steps == -1 and asked.max_time is None:
        raise OptionError(
            "nothing says how long to train; pass --config with a recipe, or --trainer.max_epochs"
        )
    cores = os.cpu_count() or 1
    if isinstance(trainer.accelerator, CPUAccelerator) and trainer.num_devices > cores:
        raise OptionError(
            f"training on a CPU must have at most one process per core, {cores} here, got "
            f"{trainer.num_devices}; pass fewer --trainer.devices"
        )
    return cli


class TrainCLI(LightningCLI):
    """Parser of the options and recipe files of a task, with its trainer."""

    module: type[TaskModule]
    recipes: Sequence[Recipe]

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        add = partial(parser.add_argument, type=str | None, default=None)
        add("--variant", help="Variants of the recipe, separated by commas (default: its first).")
        folder = "Folder for checkpoints, history.csv and curves.png"
        add("--run_dir", help=f"{folder} (default: runs/<task>-<recipe>[-variant]).")
        last = f"The run's {LAST} is as new as --save_every steps."
        resume = f"Continue the run in the folder, or from a given checkpoint. {last}"
        add("--resume", nargs="?", const=LATEST, help=resume)
        steps = "Steps between checkpoints in an epoch."
        parser.add_argument("--save_every", type=int, default=500, help=steps)
        parser.link_arguments("seed_everything", "data.seed")
        parser.link_arguments("seed_everything", "model.seed")
        if "num_classes" in inspect.signature(self.module).parameters:
            parser.link_arguments("data.classes", "model.num_classes", len, "instantiate")

    def run_dir(self) -> Path:
        """Folder of a run: the given one, or named after its last recipe."""
        if self.config.run_dir is None:
            name = self.recipes[-1].name if self.recipes else "run"
            return Path("runs") / f"{self.module.task.name}-{name}"
        folder = Path(self.config.run_dir)
        if folder.exists() and not folder.is_dir():
            raise OptionError(f"--run_dir must be a folder, got the file {folder}; pass another")
        return folder

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        own = self.config_init.trainer.callbacks or []
        return super().instantiate_trainer(
            callbacks=[*own, *self._callbacks()],
            plugins=[*(self.config_init.trainer.plugins or []), checkpoints.SafeCheckpointIO()],
            default_root_dir=str(self.run_dir()),
            logger=False,  # History writes the log, also after a resume
            use_distributed_sampler=False,  # samplers divide the work
            **kwargs,
        )

    def _callbacks(self) -> list[Callback]:
        best = ModelCheckpoint(
            dirpath=self.run_dir(),
            filename=Path(BEST).stem,
            monitor=self.module.monitor,
            mode="max",
            enable_version_counter=False,
        )
        # Last, so that it contains the state of the other callbacks
        last = checkpoints.LastCheckpoint(self.config.save_every)
        bar = [Progress()] if self.config.trainer.enable_progress_bar is not False else []
        return [*bar, History(), best, last]


class RunConfig(SaveConfigCallback):
    """Writes the recipe as it was run to `config.yaml`."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.overwrite = True
        self.config.resume = None  # an option of this call, not of the recipe
        self.config.variant = None  # merged already
        super().setup(trainer, pl_module, stage)


def _flattened(settings: Mapping[str, Any], prefix: str = "--") -> Iterator[str]:
    """Nested settings as options: `{"data": {"flip": 0.5}}` -> `--data.flip=0.5`."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, f"{prefix}{name}.")
        else:
            text = os.fspath(value) if isinstance(value, str | os.PathLike) else json.dumps(value)
            yield f"{prefix}{name}={text}"


def _expanded(task: str, args: Sequence[str]) -> tuple[list[str], list[Recipe], str | None]:
    """Replace paths of recipes by their content; return options, recipes and `data.source`.

    Later options and recipes take precedence.
    """
    options: list[tuple[str, Any]] = []  # names and values
    rest = iter(args)
    for arg in rest:
        name, equals, value = arg.partition("=")
        takes = name in ("-c", "--config", "--variant", "--data.source")
        options.append((name, value if equals else next(rest, None)) if takes else (arg, None))
    variant = dict(options).get("--variant")
    recipes: list[Recipe] = []
    source = None
    for place, (name, given) in enumerate(options):
        if name == "--data.source":
            source = given
        elif name in ("-c", "--config") and given is not None:
            recipe = read_recipe(given)
            recipe = read_recipe(given, variant) if recipe.variants else recipe
            if recipe.task not in (None, task):
                raise OptionError(
                    f"{given} is a recipe of {recipe.task}, got quadtree train {task}; pass "
                    f"{recipe.task} instead"
                )
            data = recipe.settings.get("data")
            source = data.get("source", source) if isinstance(data, dict) else source
            recipes.append(recipe)
            options[place] = name, recipe
    expanded: list[str] = []
    for name, one in options:  # a recipe, or the value of another option
        if isinstance(one, Recipe):
            data = one.settings.get("data")
            if isinstance(data, dict) and "source" in data:  # its class accepts no other one
                one = replace(one, settings=merged(one.settings, {"data": {"source": source}}))
            one = one.to_text()
        expanded += [name] if one is None else [name, one]
    if variant and not any(recipe.variants for recipe in recipes):
        raise OptionError(f"no recipe here has variants, got --variant {variant}; leave it out")
    return expanded, recipes, source


def _parse(task: Task, source: str | None, args: list[str], recipes: Sequence[Recipe]) -> TrainCLI:
    """Create model, data (class selected by `source`) and trainer from the options."""
    names: list[str] = []

    class TaskCLI(TrainCLI):
        def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
            names.extend(parser.get_defaults().keys())
            self.config = parser.parse_args(args)

    TaskCLI.module, TaskCLI.recipes = task.load("module"), recipes
    try:
        return TaskCLI(
            TaskCLI.module,
            task.load("data", None if source is None else str(source)),
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
    except (ArgumentError, ValueError, TypeError, MisconfigurationException) as error:
        raise OptionError(_explain(str(error), names, task, source)) from error


def _explain(message: str, names: list[str], task: Task, source: str | None) -> str:
    """Convert an error of the parser or the trainer to one line, with a suggested name."""
    message = " ".join(message.split())
    found = next((match for rule in _UNKNOWN if (match := rule.search(message))), None)
    if found is None:
        return f"the recipe or an option is not accepted: {message}"
    parts = found.groupdict()
    name = ".".join(part for part in (parts.get("group"), parts["name"]) if part)
    for other in task.data:
        # of the class or of a base class
        kinds = task.load("data", other).__mro__[:-1]
        options = {option for kind in kinds for option in inspect.signature(kind).parameters}
        if name.startswith("data.") and name.split(".")[1] in options:
            return (
                f"{name} has no effect with data.source {source or next(iter(task.data))}; leave "
                f"it out, or pass --data.source {other}"
            )
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else "see --help for the names there are"
    return f"there is no option {name}, in the recipe or on the command line; {hint}"


def _checkpoint(resume: str | None, folder: Path) -> str | None:
    """Return the checkpoint to resume from, or None for a new run in a folder without one."""
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


@contextmanager
def _folder(folder: Path) -> Iterator[None]:
    """Create a folder for a run; remove it if nothing was written to it."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    make_folder(folder)
    try:
        yield
    finally:
        with suppress(OSError):  # the folder is not empty
            for path in new:
                path.rmdir()


@contextmanager
def _interrupts(trainer: pl.Trainer, folder: Path) -> Iterator[None]:
    """Turn the exit of Lightning after Ctrl-C into `KeyboardInterrupt` with how to continue."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit:
        if not trainer.interrupted:
            raise
        signal.signal(signal.SIGINT, before)  # Lightning leaves it ignored
        step, last = trainer.global_step, folder / LAST
        kept = f"{last} is kept, go on with it by --resume"
        none = "no checkpoint was written yet, start again"
        advice = kept if last.exists() else none
        raise KeyboardInterrupt(f"interrupted at step {step}; {advice}") from None


def _finish(trainer: pl.Trainer, module: Any, folder: Path, command: list[str]) -> Run:
    """Write the best weights to a file of their own."""
    best, weights = folder / BEST, folder / "best.safetensors"
    rows = [row for c in cast(Any, trainer).callbacks if isinstance(c, History) for row in c.rows]
    if not best.exists():  # without validation there is no best epoch
        return Run(folder, None, rows)
    if trainer.is_global_zero and trainer.state.finished:
        state = checkpoints.read_training_checkpoint(best)
        epoch = state["epoch"] + 1  # as the history counts
        metrics = next((row for row in rows if row["epoch"] == epoch), {})
        card = {**module.card(), "command": command, "epoch": epoch, "metrics": metrics}
        save_weights(weights, module.weights(state["state_dict"]), card, overwrite=True)
    return Run(folder, weights, rows)
