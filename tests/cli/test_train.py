# SPDX-License-Identifier: Apache-2.0
"""`quadtree train`: mistakes are told on one line, and leave nothing behind."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.support import commands
from tests.support.commands import invoke

pytest.importorskip("pytorch_lightning", reason="training needs the extra 'train'")

from quadtree_attention.files import Lock
from quadtree_attention.tasks.classify.module import ClassifyModule
from tests.tasks.training.test_checkpoints import files_of_at_most
from tests.tasks.training.test_run import RECIPE

DEBUG = ("detect", "--config", ROOT / "recipes" / "detect" / "debug.yaml")
TINY = ("classify", "--config", "tiny.yaml")
VARIANTS = ("classify", "--config", "variants.yaml", "--variant")
STEREO = ("stereo", "--trainer.accelerator", "cpu")


def run(*options):
    return invoke("train", *options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of one epoch."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "tiny.yaml").write_text(RECIPE)
    options = ["--config", folder / "tiny.yaml", "--run_dir", folder / "run"]
    result = run("classify", *options, "--trainer.max_epochs", "1")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == [
        f"weights  {folder}/run/best.safetensors",
        f"history  {folder}/run/history.csv, {folder}/run/curves.png",
    ]
    return folder / "run"


@pytest.fixture(autouse=True)
def _recipe():
    Path("tiny.yaml").write_text(RECIPE)


def refused(*options):
    """The one line that says why not; no file appears or changes."""
    told = commands.refused("train", *options)
    assert not os.path.exists("runs")
    return told.removeprefix("quadtree: ").rstrip("\n")


def test_help():
    result = run()
    assert result.exit_code == 2 and "Usage: quadtree train" in result.stdout
    shown = run("classify", "--help").stdout
    for option in ("--model.lr", "--data.root", "--run_dir", "--resume", "--trainer.max_epochs"):
        assert option in shown
    assert "Learning rate at a batch of 1024 images" in shown
    shown = run("detect", "--help").stdout  # options of the classes that its data are derived from
    for option in ("--data.root", "--data.flip", "--data.workers", "--data.strict"):
        assert option in shown


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["clasify"], "one of classify, match, stereo, detect, segment, got 'clasify'; did you m"),
        ([*TINY, "--model.model", "quadtree_c_b0"], "'quadtree_c_b0'; did you mean quadtree_b_b0"),
        ([*STEREO, "--model.model", "loftr_lite"], "of the task match, not of stereo; pass one of"),
        ([*TINY, "--model.drop_pth", "0.2"], "command line; did you mean model.drop_path?"),
        ([*TINY, "--modle.lr", "0.1"], "did you mean model.lr?"),
        ([*TINY, "--data.zzzzzzzzzzzzz", "3"], "see --help for the names there are"),
        ([*TINY, "--model.lr", "fast"], "model.lr\": Expected a <class 'float'>. Got value: fast"),
        ([*TINY, "--data.batch_size", "2.5"], 'Parser key "data.batch_size": '),
        ([*TINY, "--data.augment", "everything"], 'Parser key "data.augment": '),
        (["classify", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["classify", "--config", "broken.yaml"], "line 2"),
        (["classify", "--config", "bytes.yaml"], "bytes.yaml"),
        (["classify", "--config", "group.yaml"], "did you mean trainer.max_epochs?"),
        (["classify", "--config", "other.yaml"], "other.yaml is a recipe of detect, got quadtree "),
        ([*TINY, "--data.batch_size", "0"], "batch_size must be at least 1, got 0; pass a larger "),
        ([*TINY, "--save_every", "0"], "--save_every must be at least 1, got 0; pass more"),
        ([*DEBUG, "--model.lr", "-1"], "got -1.0; pass a larger one"),
        ([*DEBUG, "--data.root", "coco"], "with data.source generated; leave it out, or pass --da"),
        ([*TINY, "--data.root", "pets"], "leave it out, or pass --data.source auto"),
        (["detect", "--data.generated_count", "8"], "no effect with data.source files; leave it "),
        (["classify", "--data.generated_count", "8"], "with data.source auto; leave it out, or p"),
        (["segment", "--data.generated_size", "8"], "generated_size has no effect with data.sourc"),
        (["match", "--data.source", "scannet", "--data.min_overlp", "0.3"], "n data.min_overlap?"),
        (["match", "--data.source=scanet"], "synthetic, scannet, megadepth, got 'scanet'; did you"),
        (["classify", "--data.source", "npz"], "data from a 'npz' source need a root, got none; "),
        (["classify", "--data.root", "nowhere"], "there is no folder nowhere; pass the one that "),
        ([*TINY, "--resume"], "runs/classify-tiny/last.ckpt to go on with; leave out --resume for"),
        ([*TINY, "--resume", "other.ckpt"], "there is no checkpoint other.ckpt to go on with"),
        ([*TINY, "--resume", "weights.pth"], "weights.pth is not the checkpoint of a training run"),
        ([*TINY, "--run_dir", "tiny.yaml/run"], "the folder tiny.yaml/run cannot be made: Not a "),
        ([*TINY, "--run_dir", "tiny.yaml"], "--run_dir must be a folder, got the file tiny.yaml"),
        ([*TINY, "--trainer.max_epochs", "0"], "training must last at least one epoch, got max_e"),
        ([*TINY, "--trainer.max_steps", "0"], "training must last at least one epoch, got max_e"),
        ([*TINY, "--trainer.devices", "999"], "a CPU must have at most one process per core, "),
        ([*TINY, "--variant", "b2"], "no recipe here has variants, got --variant b2; leave it out"),
        ([*VARIANTS, "b3"], "the variant of variants.yaml must be one of b0, b2, got 'b3'; "),
        ([*VARIANTS, "b0,b9"], "got 'b9'"),
        ([*TINY, "--trainer.accelerator", "abacus"], "abacus"),
        ([*TINY, "--trainer.devices", "-5"], ""),
        ([*TINY, "--trainer.max_epochs", "-3"], ""),
        ([*TINY, "--seed_everything", "-1"], ""),
    ],
)
def test_mistakes(options, told):
    Path("broken.yaml").write_text("model: [1,\n lr: }")
    Path("bytes.yaml").write_bytes(bytes(range(256)))
    Path("group.yaml").write_text(RECIPE.replace("trainer:", "trianer:"))
    Path("other.yaml").write_text(f"task: detect\n{RECIPE}")
    Path("variants.yaml").write_text(f"{RECIPE}variants: {{b0: {{}}, b2: {{}}}}\n")
    torch.save({"head.weight": torch.zeros(3)}, "weights.pth")
    assert told in refused(*options)


def test_runs_that_are_there(finished):
    shutil.copytree(finished, "run")
    assert refused(*TINY, "--run_dir", "run") == (
        "run holds a run already (last.ckpt); go on with it by --resume, or write elsewhere "
        "with --run_dir"
    )
    told = refused(*TINY, "--run_dir", "run", "--resume", "--data.generated_classes", "7")
    assert "model.head.weight is (4, 32), must be (7, 32)" in told
    for content in (b"", b"garbage\n" * 9, b"PK\x03\x04 and more"):
        Path("run/last.ckpt").write_bytes(content)
        told = refused(*TINY, "--run_dir", "run", "--resume")
        assert told.startswith("cannot read the checkpoint run/last.ckpt: it is damaged")


def test_run_dir_that_cannot_be_written_to(monkeypatch):
    os.mkdir("sealed")
    os.chmod("sealed", 0o500)
    if os.access("sealed", os.W_OK):  # a superuser may write anywhere
        monkeypatch.setattr(Lock, "NAME", "missing/.lock")
    told = refused(*TINY, "--run_dir", "sealed")
    assert told.startswith("the folder sealed cannot be written: ")


def test_two_runs_in_one_folder():
    os.mkdir("run")
    with Lock(Path("run"), "a training run"):
        told = refused(*TINY, "--run_dir", "run")
    assert told == (
        "run is in use by a training run of another process; wait for its end, or write elsewhere"
    )


# ---- runs that end early


def test_full_disk_keeps_the_checkpoint_and_says_so(finished):
    shutil.copytree(finished, "run")
    with files_of_at_most(400_000):
        result = run(*TINY, "--run_dir", "run", "--resume")
    assert result.exit_code == 2 and "Traceback" not in result.stderr
    told = result.stderr.splitlines()[-1]
    assert told.startswith("quadtree: cannot save the checkpoint ")
    assert told.endswith("; make room there and go on from last.ckpt with --resume")
    assert Path("run/last.ckpt").read_bytes() == (finished / "last.ckpt").read_bytes()
    assert not [name for name in os.listdir("run") if name.endswith(".unfinished")]


def test_advice_after_a_full_disk_in_a_new_run_works():
    options = [*TINY, "--trainer.max_epochs", "1"]
    with files_of_at_most(60_000):
        full = run(*options)
    assert full.exit_code == 2
    assert full.stderr.splitlines()[-1].endswith("; make room there and start again")
    assert run(*options).exit_code == 0


def test_interrupted_run_says_how_to_go_on():
    """By a signal, in a process of its own."""
    line = [sys.executable, "-m", "quadtree_attention.cli", "train", *TINY]
    process = subprocess.Popen(
        [*line, "--trainer.max_epochs", "1000"], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 300
    checkpoint = Path("runs/classify-tiny/last.ckpt")
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    last = told.splitlines()[-1]
    assert "Traceback" not in told and process.returncode == 130
    assert last.startswith("quadtree: interrupted at step ")
    assert last.endswith("; runs/classify-tiny/last.ckpt is kept, go on with it by --resume")
    more = torch.load(checkpoint, weights_only=True)["epoch"] + 2
    resumed = run(*TINY, "--trainer.max_epochs", more, "--resume")
    assert resumed.exit_code == 0, resumed.stderr


def test_run_that_is_interrupted_before_its_first_checkpoint(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ClassifyModule, "training_step", interrupt)
    result = run(*TINY)
    assert result.exit_code == 130
    assert result.stderr.endswith("; no checkpoint was written yet, start again\n")
