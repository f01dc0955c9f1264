# SPDX-License-Identifier: Apache-2.0
"""The Lightning module that all tasks share: draws, schedules, scores of several processes."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("pytorch_lightning", reason="training needs the extra 'train'")

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.tasks.training.module import TaskModule


class Tiny(TaskModule):
    task = SimpleNamespace(name="classify")
    monitor = "val/top1"
    batch_of_lr = 4
    schedules = ("cosine", "step", "poly")

    def __init__(
        self, lr=0.1, min_lr=0.0, warmup_epochs=0, weight_decay=0.0, seed=0, schedule="cosine",
        decay_epochs=(2, 3), power=0.5, grad_checkpointing=False,
    ):  # fmt: skip
        super().__init__()
        self.save_hyperparameters()
        self.build("test_quadtree", {"backend": "reference"}, num_classes=2, drop_path_rate=0.1)

    def new_metric(self):
        return Sum()


class Sum:
    """Adds numbers up."""

    def __init__(self):
        self.values = []

    def state(self):
        return self.values

    def merge(self, states):
        self.values = [value for state in states for value in state]

    def compute(self):
        return SimpleNamespace(mean={"sum": float(sum(self.values))} if self.values else {})


def drawn(module, batch_idx):
    module.on_train_batch_start({}, batch_idx)
    return torch.rand(4).tolist()


def test_every_batch_of_an_epoch_draws_its_own_numbers():
    module = Tiny(seed=3)
    first = drawn(module, 0)
    assert drawn(module, 1) != first
    assert drawn(module, 0) == first
    assert drawn(Tiny(seed=4), 0) != first


def test_build_is_a_function_of_the_seed():
    one, same, other = (Tiny(seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], tensor) for name, tensor in same.items())
    assert any(not torch.equal(one[name], tensor) for name, tensor in other.items())


def test_build_keeps_what_the_card_needs():
    module = Tiny(grad_checkpointing=True)
    assert module.kwargs == {"num_classes": 2, "backend": "reference"}
    assert all(stage.grad_checkpointing for stage in module.model.stages)
    module._trainer = SimpleNamespace(datamodule=SimpleNamespace(classes=["cat", "dog"]))
    module.hparams["model"] = "test_quadtree"
    assert module.card() == {
        "model": "test_quadtree",
        "kwargs": module.kwargs,
        "task": "classify",
        "classes": ["cat", "dog"],
    }


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"lr": -1}, "lr must be above 0, got -1"),
        ({"lr": float("nan")}, "lr must be above 0, got nan"),
        ({"min_lr": -1e-3}, "min_lr must be at least 0, got -0.001"),
        ({"warmup_epochs": -1}, "warmup_epochs must be at least 0, got -1"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0, got -0.1"),
        ({"schedule": "setp"}, "schedule must be one of cosine, step, poly, got 'setp'"),
        ({"decay_epochs": (3, 2)}, r"decay_epochs must be above 0 and rise, got \[3, 2\]"),
    ],
)
def test_hyper_parameters_out_of_range(options, told):
    with pytest.raises(OptionError, match=told):
        Tiny(**options)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("cosine", [0.1, 0.1 * 0.853553, 0.05, 0.1 * 0.146447]),
        ("step", [0.1, 0.1, 0.01, 0.001]),
        ("poly", [0.1, 0.1 * 0.75**0.5, 0.1 * 0.5**0.5, 0.05]),
    ],
)
def test_schedules(schedule, expected):
    """The learning rate at the start of each of 4 epochs of 10 steps."""
    module = Tiny(schedule=schedule)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = module.schedule(
        optimizer, 40, 10, min_lr=0.0, warmup_t=0, warmup_lr_init=0.0, t_in_epochs=False
    )
    rates = []
    for epoch in range(4):
        scheduler.step_update(10 * epoch)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx(expected, rel=1e-5)
    assert scheduler.state_dict() == {}  # it follows from the step


def validated(module, world=1, sanity=False, seen=()):
    """What a validation logs."""
    logged = {}
    module._trainer = SimpleNamespace(world_size=world, sanity_checking=sanity)
    module.log = lambda name, value, **options: logged.__setitem__(name, value)
    module.on_validation_epoch_start()
    module.metric.values += seen
    module.on_validation_epoch_end()
    return logged


def test_metrics_of_all_processes_are_merged(monkeypatch):
    def gather(states, mine):
        states[:] = [mine, [10.0]]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    module = Tiny()
    assert validated(module, seen=[1.0, 2.0]) == {"val/sum": 3.0}
    assert validated(module, world=2, seen=[1.0, 2.0]) == {"val/sum": 13.0}


def test_validation_without_any_usable_sample():
    module = Tiny()
    module.note_skipped({"skipped": ["cannot decode a.png"]})
    assert validated(module, sanity=True) == {}
    with pytest.raises(DataError, match=r"can be scored: cannot decode a\.png; check the files"):
        validated(module)
