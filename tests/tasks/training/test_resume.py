# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed and go on, and runs on several processes: the same weights in the end."""

import subprocess
import sys
import time

import pytest
import torch

from quadtree_attention.tasks.training.run import run_command
from tests.support import processes
from tests.support.commands import environment
from tests.support.training import history
from tests.tasks.training.test_run import write_recipe

RANDOM = (  # 3 epochs of 8 steps, with all that draws random numbers in training
    "--seed_everything=3", "--save_every=3", "--trainer.max_epochs=3", "--data.generated_count=64",
    "--data.augment=timm", "--data.workers=2", "--model.drop_path=0.2", "--model.mixup=0.5",
    "--model.cutmix=0.5",
)  # fmt: skip
PLAIN = (
    "--model.drop_path=0", "--model.mixup=0", "--model.cutmix=0", "--data.workers=0",
    "--trainer.max_epochs=2",
)  # fmt: skip


def options_of(folder, *options):
    recipe = write_recipe(folder.parent)
    return ["--config", str(recipe), "--run_dir", str(folder), *RANDOM, *options]


def start(folder, *options):
    output = folder.parent / "output.txt"
    return processes.start(run_command, "classify", options_of(folder, *options), output=output)


def run(folder, *options):
    processes.finish(start(folder, *options), folder.parent / "output.txt")
    return torch.load(folder / "last.ckpt", weights_only=True)


def kill_after_step(folder, step):
    """Kills a run as soon as a checkpoint of this step or a later one is there."""
    process = start(folder)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert process.exitcode is None, (folder.parent / "output.txt").read_text()
        checkpoint = folder / "last.ckpt"
        if checkpoint.exists():
            found = torch.load(checkpoint, weights_only=True)["global_step"]
            if found >= step:
                process.kill()
                process.join()
                return found
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"no checkpoint of step {step} in time")


def assert_same_run(resumed, whole, steps=24, atol=0.0):
    assert resumed["global_step"] == whole["global_step"] == steps
    for name, tensor in whole["state_dict"].items():
        torch.testing.assert_close(resumed["state_dict"][name], tensor, rtol=0, atol=atol)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    return run(folder), folder


@pytest.mark.parametrize("step", [3, 8, 11])
def test_killed_run_goes_on_as_if_it_had_not_been(whole, tmp_path, step):
    folder = tmp_path / "run"
    found = kill_after_step(folder, step)
    assert found < 24, "killed too late to show anything"
    before = torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]
    resumed = run(folder, "--resume")
    assert_same_run(resumed, whole[0])
    assert any(not torch.equal(before[name], x) for name, x in resumed["state_dict"].items())
    assert [row["epoch"] for row in history(folder)] == ["1", "2", "3"]


def test_two_processes_train_like_one(tmp_path):
    one = run(tmp_path / "one", *PLAIN, "--data.batch_size=8")
    parallel = ("--data.batch_size=4", "--trainer.devices=2", "--trainer.strategy=ddp")
    options = options_of(tmp_path / "two", *PLAIN, *parallel)
    words = [sys.executable, "-m", "quadtree_attention.cli", "train", "classify", *options]
    subprocess.run(words, env=environment(OMP_NUM_THREADS="1"), check=True, timeout=300)
    two = torch.load(tmp_path / "two" / "last.ckpt", weights_only=True)
    assert_same_run(two, one, steps=16, atol=1e-5)
