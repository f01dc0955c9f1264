# SPDX-License-Identifier: Apache-2.0
"""The Lightning module of all tasks: network, optimizer, schedules, logging, scores."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast, get_args

import pytorch_lightning as pl
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch import Tensor, nn

from quadtree_attention.checks import above, at_least, between, one_of
from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.files import file_sha256
from quadtree_attention.models.registry import SPECS, create, names, weights_path
from quadtree_attention.models.weights import fill
from quadtree_attention.tasks.readers import summary
from quadtree_attention.tasks.training.data import Batch, tell
from quadtree_attention.tasks.training.loader import seed_from, set_seed

if TYPE_CHECKING:
    from quadtree_attention.tasks.contract import Metric, Task

CHECK_EVERY = 20  # batches; reading the loss synchronises with the GPU
DECAY = 0.1  # factor of the learning rate at each of `decay_epochs`, unless `decay` is given
WARMUP_START = 1e-6  # learning rate that warm-up begins with, unless `warmup_start` is given
# Parameters without weight decay; vectors are norms, biases and level weights
NoDecay = Literal["vectors", "norms", "nothing"]


class OneCycle(Scheduler):
    """The learning rates of PyTorch's OneCycleLR, in runs of any length; momentum stays.

    Args:
        optimizer: Its learning rates are the highest ones.
        steps: Of the run.
        warmup_t: Steps in which rates rise along a cosine; in the rest they fall along another.
        warmup_lr_init: Where they start.
        min_lr: Where they end.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        steps: int,
        *,
        warmup_t: int,
        warmup_lr_init: float,
        min_lr: float,
    ) -> None:
        super().__init__(optimizer, "lr", t_in_epochs=False)
        self.last = max(1, steps - 1)
        self.peak = min(max(0, warmup_t - 1), self.last)
        self.first_lr, self.last_lr = warmup_lr_init, min_lr
        self.step_update(0)

    def _get_lr(self, t: int) -> list[float]:
        rises = t < self.peak
        end, length = (self.first_lr, self.peak) if rises else (self.last_lr, self.last - self.peak)
        away = min(1.0, abs(t - self.peak) / max(1, length))  # from the peak
        share = (1 + math.cos(math.pi * away)) / 2
        return [end + (highest - end) * share for highest in self.base_values]


# Schedules without state: they follow from the step, so a longer run has a longer one
STATELESS = {"state_dict": lambda _: {}, "load_state_dict": lambda *_: None}
CosineSchedule, DecaySchedule, PolySchedule, OneCycleSchedule = (
    cast(Any, type(kind.__name__, (kind,), STATELESS))
    for kind in (CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler, OneCycle)
)


class TaskModule(pl.LightningModule):
    """A network in `model`, trained by AdamW with warm-up and a decaying learning rate.

    Subclasses save their arguments as hyper-parameters, among them `seed`, `lr`, `min_lr`,
    `warmup_epochs` and `weight_decay`, then call `build`, and define `losses` and `validate`. Those
    that score with a `Metric` define `new_metric` and `scores`, too. Further hyper-parameters that
    a subclass may have: `schedule`, `decay_epochs` and `decay` (steps), `power` (poly),
    `warmup_start`, `no_decay` and `head_lr`.
    """

    task: ClassVar["Task"]
    monitor: ClassVar[str]  # the metric whose highest value marks the best epoch
    batch_of_lr: ClassVar[int]  # total batch size of all processes that `lr` refers to
    schedules: ClassVar[tuple[str, ...]] = ("cosine",)  # values of the hyper-parameter `schedule`
    heads: ClassVar[tuple[str, ...]] = ()  # prefixes of parameters with `head_lr`
    bar: ClassVar[tuple[str, ...]] = ()  # scores on the progress bar beside `monitor`
    set_by: ClassVar[dict[str, str]] = {}  # what sets arguments of the network; no options are

    model: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.skipped: dict[str, None] = {}  # unusable files, in order of occurrence
        self._told = 0
        self.kwargs: dict[str, Any] = {}  # of the network, for the card
        self.start: str | None = None  # checksum of the initial weights
        self.metric: Metric[Any, Any] | None = None

    def build(
        self,
        model: str,
        options: Mapping[str, Any] | None = None,
        *,
        weights: str | None = None,
        num_classes: int | None = None,
        **unsaved: Any,
    ) -> None:
        """Check the hyper-parameters and create the network.

        Args:
            model: Name of the network.
            options: Keyword arguments of the network.
            weights: File to start from, or "default" for the packaged weights.
            num_classes: Of the data.
            unsaved: Further arguments of the network that its weights do not depend on.

        Raises:
            OptionError: A hyper-parameter is out of range, or an option does not exist.
        """
        for name in self.set_by.keys() & (options or {}).keys():
            raise OptionError(
                f"options must not name {name}, which is set by {self.set_by[name]}; leave it out "
                "of --model.options"
            )
        h = self.hparams
        above(0, lr=h["lr"])
        at_least(0, min_lr=h["min_lr"], warmup_epochs=h["warmup_epochs"])
        at_least(0, weight_decay=h["weight_decay"])
        one_of(self.schedules, schedule=h.get("schedule"))
        one_of(get_args(NoDecay), no_decay=h.get("no_decay"))
        above(0, decay=h.get("decay"), head_lr=h.get("head_lr"))
        between(0, 1, warmup_start=h.get("warmup_start"))
        decays = list(h.get("decay_epochs", ()))
        if decays != sorted(decays) or any(epoch <= 0 for epoch in decays):
            raise OptionError(f"decay_epochs must be above 0 and increase, got {decays}")
        task = self.task.name
        if model in SPECS and SPECS[model].task != task:
            raise OptionError(
                f"{model} is a network of the task {SPECS[model].task}, not of {task}; pass one of "
                f"{', '.join(names(task))}"
            )
        set_seed(seed_from(h["seed"]))  # the same first weights on every process
        self.kwargs = {} if num_classes is None else {"num_classes": num_classes}
        self.kwargs |= options or {}
        self.model = create(model, **unsaved, **self.kwargs)
        if weights is not None:
            path = weights_path(weights, task)
            fill(self.model, path)
            self.start = file_sha256(path)
        if h.get("grad_checkpointing"):
            cast(Any, self.model).set_grad_checkpointing(True)
        if h.get("compile"):
            self.compile_model()

    def compile_model(self) -> None:
        """Compile the network in place, without changing the names of its weights."""
        self.model.compile()

    def losses(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch, and its parts to log, by name."""
        raise NotImplementedError

    def validate(self, batch: Batch) -> None:
        """Score a validation batch: log it, or update `metric`."""
        raise NotImplementedError

    def new_metric(self) -> "Metric[Any, Any] | None":
        """The metric of a validation; None if `validate` logs by itself."""
        return None

    def scores(self, metric: Any) -> Mapping[str, float]:
        """Scores of a validation to log, without `val/`; empty if no sample was scored."""
        return cast(Mapping[str, float], metric.compute().mean)

    @property
    def data(self) -> Any:
        """The data module of the run."""
        return cast(Any, self.trainer).datamodule

    def card(self) -> dict[str, Any]:
        """The card of the weights."""
        card = {"model": self.hparams["model"], "kwargs": self.kwargs, "task": self.task.name}
        if classes := getattr(self.data, "classes", None):
            card["classes"] = classes
        return card if self.start is None else card | {"started_from": {"sha256": self.start}}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, parts = self.losses(batch)
        if batch_idx % CHECK_EVERY == 0 and not torch.isfinite(loss.detach()):
            raise OptionError(
                f"the loss is {loss.item()} at step {self.global_step}; training cannot go on: "
                "lower --model.lr, clip gradients with --trainer.gradient_clip_val, or use "
                "--trainer.precision bf16-mixed"
            )
        self.log_mean("train/loss", loss.detach(), size_of(batch), prog_bar=True)
        for name, part in parts.items():
            self.log_mean(f"train/{name}", part.detach(), size_of(batch))
        self.note_skipped(batch)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.note_skipped(batch)
        if size_of(batch):  # empty if none of its samples could be read
            self.validate(batch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # All random numbers of a step depend on the number of its batch only, so that a run that
        # was resumed equals one that was not interrupted.
        numbers = (self.hparams["seed"], self.current_epoch, batch_idx, self.global_rank)
        set_seed(seed_from(*numbers))

    def on_validation_epoch_start(self) -> None:
        self.metric = self.new_metric()

    def on_validation_epoch_end(self) -> None:
        if self.metric is None:
            return
        self.gather(self.metric)
        found = self.scores(self.metric)
        if not found and not self.trainer.sanity_checking:  # its few samples may all be unreadable
            raise DataError(
                f"none of the validation samples can be scored: {summary(list(self.skipped))}; "
                "check the files"
            )
        for name, value in found.items():  # equal on all processes
            on_bar = name in self.bar or f"val/{name}" == self.monitor
            self.log(f"val/{name}", value, prog_bar=on_bar, sync_dist=False)

    def gather(self, metric: "Metric[Any, Any]") -> None:
        """Merge the states of the metric of all processes into the metric of each."""
        if self.trainer.world_size > 1:
            states: list[Any] = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(states, metric.state())
            metric.merge(states)

    def note_skipped(self, batch: Mapping[str, Any]) -> None:
        """Record the skipped files of a batch, to be reported after the epoch."""
        self.skipped |= dict.fromkeys(batch.get("skipped", ()))

    def on_train_epoch_end(self) -> None:
        if new := list(self.skipped)[self._told :]:
            self._told = len(self.skipped)
            tell(f"skipped {self._told} unusable files so far: {summary(new)}")

    def configure_optimizers(self) -> Any:
        trainer, h = self.trainer, self.hparams
        samples = self.data.batch_size * trainer.world_size * trainer.accumulate_grad_batches
        scale = samples / self.batch_of_lr
        plain = h.get("no_decay", "vectors") == "vectors" and h.get("head_lr", 1) == 1
        optimizer = create_optimizer_v2(
            self.model,
            opt="adamw",
            lr=h["lr"] * scale,
            weight_decay=h["weight_decay"],
            param_group_fn=None if plain else self.parameter_groups,
        )
        steps, epochs = run_length(trainer, self.data.batches_per_epoch)
        start = h.get("warmup_start")
        scheduler = self.schedule(
            optimizer,
            steps,
            steps / epochs,
            min_lr=h["min_lr"] * scale,
            warmup_t=min(steps, round(h["warmup_epochs"] * steps / epochs)),
            warmup_lr_init=(WARMUP_START if start is None else start * h["lr"]) * scale,
            warmup_prefix=False,
            t_in_epochs=False,
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Parameters by weight decay and factor of the learning rate, for `no_decay`, `head_lr`."""
        h = self.hparams
        kept: set[str] = getattr(model, "no_weight_decay", set)()
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            free = {
                "vectors": parameter.ndim <= 1 or name in kept,
                "norms": "norm" in name,
                "nothing": False,
            }[h.get("no_decay", "vectors")]
            factor = h.get("head_lr", 1) if name.startswith(self.heads) else 1
            groups.setdefault((0.0 if free else h["weight_decay"], factor), []).append(parameter)
        return [
            {"params": parameters, "weight_decay": decay, "lr_scale": factor}
            for (decay, factor), parameters in groups.items()
        ]

    def schedule(
        self,
        optimizer: torch.optim.Optimizer,
        steps: int,
        steps_per_epoch: float,
        *,
        min_lr: float,
        **warmup: Any,
    ) -> Any:
        """The learning rate over the steps of a run; `warmup` are options of timm's schedulers."""
        h = self.hparams
        if h.get("schedule") == "step":
            # timm's scheduler decays one step before the given one
            decays = [round(epoch * steps_per_epoch) + 1 for epoch in h["decay_epochs"]]
            return DecaySchedule(optimizer, decays, decay_rate=h.get("decay", DECAY), **warmup)
        if h.get("schedule") == "onecycle":
            rise = {name: warmup[name] for name in ("warmup_t", "warmup_lr_init")}
            return OneCycleSchedule(optimizer, steps, min_lr=min_lr, **rise)
        if h.get("schedule") == "poly":
            return PolySchedule(optimizer, steps, power=h["power"], lr_min=min_lr, **warmup)
        return CosineSchedule(optimizer, t_initial=steps, lr_min=min_lr, **warmup)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step_update(self.global_step)

    def weights(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of the network from the state dict of this module."""
        own = {name: tensor for name, tensor in state.items() if name.startswith("model.")}
        return {name.removeprefix("model."): tensor for name, tensor in own.items()}

    def log_mean(self, name: str, value: Tensor | float, count: int, **options: Any) -> None:
        """Log the mean over an epoch and all processes."""
        options = {"sync_dist": True, "on_step": False, "on_epoch": True, **options}
        self.log(name, value, batch_size=count, **options)


def size_of(batch: Batch) -> int:
    """Samples of a batch."""
    return len(batch["images"] if "images" in batch else batch["image0"])


def run_length(trainer: pl.Trainer, batches_per_epoch: int) -> tuple[int, float]:
    """Optimizer steps and epochs of a whole run with `max_epochs` or `max_steps`.

    Unlike `Trainer.estimated_stepping_batches`, it creates no loader: a loader created before the
    checkpoint is read would not resume at the batch of the checkpoint.

    Raises:
        OptionError: Nothing ends the run.
    """
    limit = trainer.limit_train_batches
    batches = int(batches_per_epoch * limit) if isinstance(limit, float) else limit
    batches = min(batches_per_epoch, batches)
    per_epoch = max(1, math.ceil(batches / trainer.accumulate_grad_batches))
    epochs = trainer.max_epochs or 1
    if epochs > 0:
        steps = per_epoch * epochs
        steps = min(steps, trainer.max_steps) if trainer.max_steps > 0 else steps
        return steps, steps / per_epoch
    if trainer.max_steps < 1:
        raise OptionError(
            "the schedule needs an end, got a run without one; pass --trainer.max_epochs or "
            "--trainer.max_steps"
        )
    return trainer.max_steps, trainer.max_steps / per_epoch
