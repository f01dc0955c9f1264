# SPDX-License-Identifier: Apache-2.0
"""The Lightning module that all tasks share: draws, schedules, scores of several processes."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.models.registry import create
from quadtree_attention.tasks.contract import get_task
from quadtree_attention.tasks.training.module import TaskModule, run_length
from tests.support import raises, tiny


class Tiny(TaskModule):
    task = SimpleNamespace(name="classify")
    monitor = "val/top1"
    batch_of_lr = 4
    schedules = ("cosine", "step", "poly", "onecycle")
    heads = ("head.",)

    def __init__(
        self, lr=0.1, min_lr=0.0, warmup_epochs=0, weight_decay=0.0, seed=0, schedule="cosine",
        decay_epochs=(2, 3), power=0.5, grad_checkpointing=False, decay=0.1, warmup_start=None,
        no_decay="vectors", head_lr=1.0,
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


def test_weights_and_draws_follow_the_seed():
    module = Tiny(seed=3)
    first = drawn(module, 0)
    assert drawn(module, 1) != first
    assert drawn(module, 0) == first
    assert drawn(Tiny(seed=4), 0) != first
    for place in ({"current_epoch": 1}, {"global_rank": 1}):
        module._trainer = SimpleNamespace(**{"current_epoch": 0, "global_rank": 0} | place)
        assert drawn(module, 0) != first
    one, same, other = (Tiny(seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], tensor) for name, tensor in same.items())
    assert any(not torch.equal(one[name], tensor) for name, tensor in other.items())


def test_checkpointing_reaches_the_network():
    stages = Tiny(grad_checkpointing=True).model.stages
    assert all(stage.grad_checkpointing for stage in stages)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"lr": -1}, "lr must be above 0, got -1"),
        ({"lr": float("nan")}, "lr must be above 0, got nan"),
        ({"min_lr": -1e-3}, "min_lr must be at least 0, got -0.001"),
        ({"warmup_epochs": -1}, "warmup_epochs must be at least 0, got -1"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0, got -0.1"),
        ({"schedule": "setp"}, "schedule must be one of cosine, step, poly, onecycle, got 'setp'"),
        ({"no_decay": "biases"}, "no_decay must be one of vectors, norms, nothing, got 'biases'"),
        ({"head_lr": 0}, "head_lr must be above 0, got 0"),
        ({"decay": 0}, "decay must be above 0, got 0"),
        ({"warmup_start": 2}, r"warmup_start must be in \[0, 1\], got 2"),
        ({"decay_epochs": (3, 2)}, r"decay_epochs must be above 0 and increase, got \[3, 2\]"),
    ],
)
def test_hyper_parameters_out_of_range(options, told):
    raises(OptionError, told, Tiny, **options)


RUN = {"world_size": 1, "accumulate_grad_batches": 1, "limit_train_batches": 1.0,
       "max_epochs": 4, "max_steps": -1}  # fmt: skip


def optimizer_of(module, samples=8, **options):
    """Optimizer and scheduler of a run of 10 batches per epoch."""
    data = SimpleNamespace(batch_size=samples, batches_per_epoch=10)
    module._trainer = SimpleNamespace(datamodule=data, **RUN | options)
    (optimizer,), (entry,) = module.configure_optimizers()
    return optimizer, entry["scheduler"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (40, 4)),
        ({"accumulate_grad_batches": 4}, (12, 4)),  # the last step of an epoch has two batches
        ({"limit_train_batches": 0.5}, (20, 4)),
        ({"limit_train_batches": 3}, (12, 4)),
        ({"limit_train_batches": 30}, (40, 4)),
        ({"max_steps": 15}, (15, 1.5)),
        ({"max_steps": 50}, (40, 4)),
        ({"max_epochs": -1, "max_steps": 25}, (25, 2.5)),
        ({"max_epochs": None}, (10, 1)),
    ],
)
def test_length_of_a_run_of_10_batches_per_epoch(options, expected):
    assert run_length(SimpleNamespace(**RUN | options), 10) == expected
    with pytest.raises(OptionError, match="got a run without one"):
        run_length(SimpleNamespace(**RUN | {"max_epochs": -1}), 10)


def test_the_rate_is_scaled_with_the_batch_of_all_processes():
    several = {"world_size": 2, "accumulate_grad_batches": 3}
    optimizer, scheduler = optimizer_of(Tiny(min_lr=0.01), samples=8, **several)
    first, last = (rate for rate, *_ in rates(optimizer, scheduler, 0, 16))
    assert (first, last) == pytest.approx((0.1 * 12, 0.01 * 12))  # `batch_of_lr` is 4


def rates(optimizer, scheduler, *steps):
    found = []
    for step in steps:
        scheduler.step_update(step)
        found.append([group["lr"] for group in optimizer.param_groups])
    return found


def test_one_cycle():
    """As PyTorch's: lr / 25 at first, up along a cosine for 3 of 10 epochs, down to min_lr."""
    module = Tiny(schedule="onecycle", warmup_epochs=3, warmup_start=0.04, min_lr=1e-6)
    optimizer, scheduler = optimizer_of(module, samples=4, max_epochs=10)
    other = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        other, 0.1, 100, pct_start=0.3, final_div_factor=0.004 / 1e-6, cycle_momentum=False
    )
    expected = []
    for _ in range(100):
        expected.append(other.param_groups[0]["lr"])
        other.step()
        theirs.step()
    found = [rate for rate, *_ in rates(optimizer, scheduler, *range(100))]
    assert found == pytest.approx(expected)
    assert (found[0], found[29], found[99]) == pytest.approx((0.004, 0.1, 1e-6))
    assert rates(optimizer, scheduler, 0)[0][0] == pytest.approx(0.004)  # it follows from the step
    assert rates(optimizer, scheduler, 100)[0][0] == pytest.approx(1e-6)
    assert scheduler.state_dict() == {}


CYCLE = {"schedule": "onecycle", "warmup_start": 0.04, "min_lr": 1e-6}
WARM = {"warmup_epochs": 1, "warmup_start": 0.1}


@pytest.mark.parametrize(
    ("options", "length", "steps", "expected"),
    [
        ({"schedule": "cosine"}, 40, (0, 10, 20, 30), [0.1, 0.1 * 0.853553, 0.05, 0.1 * 0.146447]),
        ({"schedule": "step"}, 40, (0, 19, 20, 30), [0.1, 0.1, 0.01, 0.001]),
        ({"schedule": "poly", "min_lr": 0.02}, 40, (0, 30), [0.1, 0.06]),
        ({"schedule": "step", "decay": 0.5} | WARM, 40, (0, 5, 15, 20), [0.01, 0.055, 0.1, 0.05]),
        (CYCLE, 1, (0, 1), [0.1, 1e-6]),  # a single step
        (CYCLE | {"warmup_epochs": 0.1}, 2, (0, 1), [0.1, 1e-6]),
        (CYCLE | {"warmup_epochs": 0.3}, 3, (0, 1, 2), [0.004, 0.052, 0.1]),
        (CYCLE, 3, (0, 1, 2), [0.1, 0.0500005, 1e-6]),
    ],
)
def test_schedules(options, length, steps, expected):
    optimizer, scheduler = optimizer_of(Tiny(**options), samples=4, max_steps=length)
    found = [rate for rate, *_ in rates(optimizer, scheduler, *steps)]
    assert found == pytest.approx(expected, rel=1e-5)
    assert scheduler.state_dict() == {}  # it follows from the step


@pytest.mark.parametrize("schedule", ["cosine", "step", "poly", "onecycle"])
def test_the_head_learns_faster(schedule):
    options = {"head_lr": 10.0, "warmup_epochs": 1, "no_decay": "nothing", "min_lr": 1e-3}
    module = Tiny(schedule=schedule, **options)
    optimizer, scheduler = optimizer_of(module)
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    head = [p for name, p in module.model.named_parameters() if name.startswith("head.")]
    assert sizes == [len(list(module.model.parameters())) - len(head), len(head)] and head
    for step in (0, 5, 10, 25, 39):
        scheduler.step_update(step)
        body, head_group = optimizer.param_groups
        assert head_group["lr"] == pytest.approx(10 * body["lr"]) and body["lr"] > 0


@pytest.mark.parametrize(("name", "batch", "body"), [
    ("classify", 1024, None), ("detect", 16, None), ("match", 16, None),
    ("segment", 16, {"backbone", "pyramid"}), ("stereo", 8, {"features", "transformer"}),
])  # fmt: skip
def test_batch_and_head_that_the_rates_of_a_task_are_for(name, batch, body):
    """As documented; without a head there is no `head_lr`."""
    module = get_task(name).load("module")
    assert module.batch_of_lr == batch
    assert f"Learning rate at a batch of {batch} " in module.__doc__
    network, options = tiny.NETWORKS[name]
    with torch.device("meta"):
        parameters = [key for key, _ in create(network, **options).named_parameters()]
    others = {key.partition(".")[0] for key in parameters if not key.startswith(module.heads)}
    assert others == (body or {key.partition(".")[0] for key in parameters})
    assert ("head_lr" in inspect.signature(module).parameters) == (body is not None)


@pytest.mark.parametrize("no_decay", ["vectors", "norms", "nothing"])
def test_parameters_without_decay(no_decay):
    module = Tiny(weight_decay=0.05, no_decay=no_decay)
    optimizer, _ = optimizer_of(module)
    names = {id(parameter): name for name, parameter in module.model.named_parameters()}
    decay = {
        names[id(parameter)]: group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert decay.keys() == set(names.values())
    kinds = ("patch_embed.norm.weight", "patch_embed.proj.bias", "patch_embed.proj.weight")
    expected = {"vectors": [0, 0, 0.05], "norms": [0, 0.05, 0.05], "nothing": [0.05] * 3}
    assert [decay[name] for name in kinds] == expected[no_decay]
    levels = [decay[name] for name in decay if name.endswith("level_logits")]
    assert levels and set(levels) == {0 if no_decay == "vectors" else 0.05}


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
    raises(DataError, r"can be scored: cannot decode a\.png; check the files", validated, module)
