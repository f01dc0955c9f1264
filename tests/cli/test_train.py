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
from tests.support.commands import command

pytest.importorskip("pytorch_lightning", reason="training needs the extra 'train'")
typer_testing = pytest.importorskip("typer.testing", reason="the command needs typer")
resource = pytest.importorskip("resource", reason="limits of a process are those of Unix")

from quadtree_attention.cli.main import app  # noqa: E402
from quadtree_attention.files import Lock  # noqa: E402
from tests.tasks.training.test_run import RECIPE  # noqa: E402

DETECT = str(ROOT / "recipes" / "detect" / "debug.yaml")
LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
from quadtree_attention.cli import main
main()
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of one epoch."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "tiny.yaml").write_text(RECIPE)
    options = ["--config", str(folder / "tiny.yaml"), "--run_dir", str(folder / "run")]
    result = run("classify", *options, "--trainer.max_epochs", "1")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == [
        f"weights  {folder}/run/best.safetensors",
        f"history  {folder}/run/history.csv, {folder}/run/curves.png",
    ]
    return folder / "run"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(RECIPE)


def run(*options):
    return typer_testing.CliRunner().invoke(app, ["train", *options], prog_name="quadtree")


def files():
    return {
        os.path.join(folder, name): os.stat(os.path.join(folder, name)).st_mtime_ns
        for folder, _, names in os.walk(".")
        for name in names
    }


def refused(*options):
    """The one line that says why not; no file appears or changes."""
    before = files()
    result = run(*options)
    assert isinstance(result.exception, SystemExit | None), result.exception
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("quadtree: ") and result.stderr.count("\n") == 1
    assert files() == before and not os.path.exists("runs")
    return result.stderr.removeprefix("quadtree: ").rstrip("\n")


def changed(old, new):
    assert RECIPE.count(old) == 1
    with open("changed.yaml", "w") as file:
        file.write(RECIPE.replace(old, new))
    return refused("classify", "--config", "changed.yaml")


def test_unknown_task():
    assert refused("clasify") == (
        "the task must be one of classify, match, stereo, detect, segment, got 'clasify'; did you "
        "mean classify?"
    )


def test_no_task():
    result = run()
    assert result.exit_code == 2 and "Usage: quadtree train" in result.stdout


def test_help():
    result = run("--help")
    assert result.exit_code == 0
    assert "quadtree train classify --config recipes/classify/" in result.stdout


def test_help_of_a_task_lists_its_options():
    result = run("classify", "--help")
    assert result.exit_code == 0
    for option in ("--model.lr", "--data.root", "--run_dir", "--resume", "--trainer.max_epochs"):
        assert option in result.stdout
    assert "Learning rate at a batch of 1024 images" in result.stdout
    shown = run("detect", "--help").stdout  # options of the classes that its data are derived from
    for option in ("--data.root", "--data.flip", "--data.workers", "--data.strict"):
        assert option in shown


def test_unknown_model():
    told = refused("classify", "--config", "tiny.yaml", "--model.model", "quadtree_c_b0")
    assert "got 'quadtree_c_b0'; did you mean quadtree_b_b0" in told


def test_model_of_another_task():
    told = refused("stereo", "--model.model", "loftr_lite", "--trainer.accelerator", "cpu")
    assert told == (
        "loftr_lite is a network of the task match, not of stereo; pass one of sttr, "
        "sttr_quadtree, sttr_quadtree_small"
    )


def test_unknown_attention():
    told = changed("{backend: reference}", "{attention: windw}")
    assert told.endswith("got 'windw'; did you mean 'window'?")


def test_unknown_option_of_the_model():
    assert "'topkk'" in changed("{backend: reference}", "{topkk: 3}")


def test_option_of_the_model_that_has_its_own_place():
    told = changed("{backend: reference}", "{drop_path_rate: 0.1}")
    assert "must not name drop_path_rate, which is set by --model.drop_path" in told


def test_misspelt_key_on_the_command_line():
    assert refused("classify", "--config", "tiny.yaml", "--model.drop_pth", "0.2") == (
        "there is no option model.drop_pth, in the recipe or on the command line; "
        "did you mean model.drop_path?"
    )


@pytest.mark.parametrize(
    ("old", "new", "meant"),
    [
        ("warmup_epochs", "warmup_epoch", "model.warmup_epochs"),
        ("batch_size", "bacth_size", "data.batch_size"),
        ("accelerator", "acelerator", "trainer.accelerator"),
    ],
)
def test_misspelt_key_in_the_recipe(old, new, meant):
    assert changed(old, new).endswith(f"did you mean {meant}?")


def test_missing_recipe():
    assert "nowhere.yaml" in refused("classify", "--config", "nowhere.yaml")


def test_recipe_that_is_no_yaml():
    with open("broken.yaml", "w") as file:
        file.write("model: [1,\n lr: }")
    assert "line 2" in refused("classify", "--config", "broken.yaml")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--model.lr", "fast"),
        ("--data.batch_size", "2.5"),
        ("--data.augment", "everything"),
        ("--trainer.max_epochs", "many"),
    ],
)
def test_wrong_type(option, value):
    told = refused("classify", "--config", "tiny.yaml", option, value)
    assert option.removeprefix("--") in told and value in told


def test_values_out_of_range():
    told = refused("classify", "--config", "tiny.yaml", "--data.batch_size", "0")
    assert told == "batch_size must be at least 1, got 0; pass a larger one"
    told = refused("classify", "--config", "tiny.yaml", "--save_every", "0")
    assert told == "--save_every must be at least 1, got 0; pass more"


@pytest.mark.parametrize("option", ["lr", "min_lr", "warmup_epochs", "weight_decay"])
def test_hyper_parameters_out_of_range(option):
    told = refused("detect", "--config", DETECT, f"--model.{option}", "-1")
    assert told.startswith(f"{option} must be ") and "got -1.0; pass a larger one" in told


def test_option_without_effect():
    assert refused("detect", "--config", DETECT, "--data.root", "coco") == (
        "data.root has no effect with data.source generated; leave it out, or pass --data.source "
        "files"
    )
    told = refused("detect", "--data.generated_count", "8")
    assert told.startswith("data.generated_count has no effect with data.source files; leave it ")


def test_no_data():
    told = changed("source: generated", "source: npz")
    assert told.startswith("data from a 'npz' source need a root, got none; pass --data.root")
    told = changed("source: generated", "root: nowhere")
    assert told == "there is no folder nowhere; pass the one that holds train and val"


def test_existing_run_without_resume(finished):
    shutil.copytree(finished, "run")
    assert refused("classify", "--config", "tiny.yaml", "--run_dir", "run") == (
        "run holds a run already (last.ckpt); go on with it by --resume, or write elsewhere "
        "with --run_dir"
    )


def test_resume_without_a_checkpoint():
    assert refused("classify", "--config", "tiny.yaml", "--resume") == (
        "there is no checkpoint runs/tiny/last.ckpt to go on with; leave out --resume for a new run"
    )
    told = refused("classify", "--config", "tiny.yaml", "--resume", "other.ckpt")
    assert told.startswith("there is no checkpoint other.ckpt to go on with")


@pytest.mark.parametrize("content", [b"", b"garbage\n" * 9, b"PK\x03\x04 and more"])
def test_resume_from_garbage(content):
    os.mkdir("run")
    with open("run/last.ckpt", "wb") as file:
        file.write(content)
    told = refused("classify", "--config", "tiny.yaml", "--run_dir", "run", "--resume")
    assert told.startswith("cannot read the checkpoint run/last.ckpt: it is damaged")


def test_resume_from_weights_alone():
    torch.save({"head.weight": torch.zeros(3)}, "weights.pth")
    told = refused("classify", "--config", "tiny.yaml", "--resume", "weights.pth")
    assert told.startswith("weights.pth is not the checkpoint of a training run")


def test_full_disk_keeps_the_checkpoint_and_says_so(finished):
    shutil.copytree(finished, "run")
    before = (finished / "last.ckpt").read_bytes()
    options = ["--config", "tiny.yaml", "--run_dir", "run", "--resume"]
    done = command("train", "classify", *options, code=LIMITED)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    told = done.stderr.splitlines()[-1]
    assert told.startswith("quadtree: cannot save the checkpoint ")
    assert told.endswith("; make room there and go on from last.ckpt with --resume")
    with open("run/last.ckpt", "rb") as file:
        assert file.read() == before
    assert not [name for name in os.listdir("run") if name.endswith(".unfinished")]


def test_advice_after_a_full_disk_in_a_new_run_works():
    options = ["--config", "tiny.yaml", "--trainer.max_epochs", "1"]
    full = command("train", "classify", *options, code=LIMITED.replace("400_000", "60_000"))
    assert full.returncode == 2
    assert full.stderr.splitlines()[-1].endswith("; make room there and start again")
    assert run("classify", *options).exit_code == 0


def test_run_dir_that_cannot_be_made():
    told = refused("classify", "--config", "tiny.yaml", "--run_dir", "tiny.yaml/run")
    assert told == ("the folder tiny.yaml/run cannot be made: Not a directory; write elsewhere")


def test_run_dir_that_cannot_be_written_to(monkeypatch):
    os.mkdir("sealed")
    os.chmod("sealed", 0o500)
    if os.access("sealed", os.W_OK):  # a superuser may write anywhere
        monkeypatch.setattr(Lock, "NAME", "missing/.lock")
    told = refused("classify", "--config", "tiny.yaml", "--run_dir", "sealed")
    assert told.startswith("the folder sealed cannot be written: ")


def test_two_runs_in_one_folder():
    os.mkdir("run")
    with Lock(Path("run"), "a training run"):
        told = refused("classify", "--config", "tiny.yaml", "--run_dir", "run")
    assert told == (
        "run is in use by a training run of another process; wait for its end, or write elsewhere"
    )


@pytest.mark.parametrize("option", ["--trainer.max_epochs", "--trainer.max_steps"])
def test_training_of_no_length(option):
    told = refused("classify", "--config", "tiny.yaml", option, "0")
    assert told.startswith("training must last at least one epoch, got max_epochs or max_steps 0")


def test_more_processes_than_cores():
    told = refused("classify", "--config", "tiny.yaml", "--trainer.devices", "999")
    assert told.startswith("training on a CPU must have at most one process per core, ")
    assert told.endswith("got 999; pass fewer --trainer.devices")


def test_recipe_of_another_task():
    with open("other.yaml", "w") as file:
        file.write("task: detect\n" + RECIPE)
    assert refused("classify", "--config", "other.yaml") == (
        "other.yaml is a recipe of detect, got quadtree train classify; pass detect instead"
    )


def test_variant_that_is_not_there():
    assert refused("classify", "--config", "tiny.yaml", "--variant", "b2") == (
        "no recipe here has variants, got --variant b2; leave it out"
    )
    with open("variants.yaml", "w") as file:
        file.write(RECIPE + "variants: {b0: {}, b2: {}}\n")
    told = refused("classify", "--config", "variants.yaml", "--variant", "b3")
    assert told.startswith("the variant of variants.yaml must be one of b0, b2, got 'b3'; ")
    told = refused("classify", "--config", "variants.yaml", "--variant", "b0,b9")
    assert "got 'b9'" in told


def interrupted(ready, *options):
    """Exit code and last line of a run that gets Ctrl-C as soon as `ready()`."""
    line = [sys.executable, "-m", "quadtree_attention.cli", "train", "classify", *options]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while not ready() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert "Traceback" not in told
    return process.returncode, told.splitlines()[-1]


def test_interrupted_run_says_how_to_go_on():
    options = ("--config", "tiny.yaml", "--trainer.max_epochs", "1000")
    code, told = interrupted(lambda: os.path.exists("runs/tiny/last.ckpt"), *options)
    assert code == 130 and told.startswith("quadtree: interrupted at step ")
    assert told.endswith("; runs/tiny/last.ckpt is kept, go on with it by --resume")
    last = torch.load("runs/tiny/last.ckpt", weights_only=True)
    more = last["epoch"] + 2
    resumed = run("classify", *options[:2], "--trainer.max_epochs", str(more), "--resume")
    assert resumed.exit_code == 0, resumed.stderr


def test_run_that_is_interrupted_before_its_first_checkpoint():
    options = ("--config", "tiny.yaml", "--data.augment", "none", "--data.generated_count", "9999")
    code, told = interrupted(lambda: os.path.exists("runs/tiny/config.yaml"), *options)
    assert code == 130
    assert told.endswith("; no checkpoint was written yet, start again")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--trainer.accelerator", "abacus"),
        ("--trainer.devices", "-5"),
        ("--trainer.max_epochs", "-3"),
        ("--seed_everything", "-1"),
    ],
)
def test_value_that_the_trainer_refuses(option, value):
    assert refused("classify", "--config", "tiny.yaml", option, value)


def test_recipe_of_bytes():
    with open("bytes.yaml", "wb") as file:
        file.write(bytes(range(256)))
    assert refused("classify", "--config", "bytes.yaml")


def test_run_dir_that_is_a_file():
    told = refused("classify", "--config", "tiny.yaml", "--run_dir", "tiny.yaml")
    assert told == "--run_dir must be a folder, got the file tiny.yaml; pass another"


def test_misspelt_group_in_the_recipe():
    assert changed("trainer:", "trianer:").endswith("?")


def test_going_on_with_another_number_of_classes(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    told = refused(
        "classify", "--config", "tiny.yaml", "--run_dir", "run", "--resume",
        "--data.generated_classes", "7",
    )  # fmt: skip
    assert "model.head.weight is (4, 32), must be (7, 32)" in told
