# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind, and how the parser's words are put."""

import csv
import json

import pytest
import torch
import yaml

pl = pytest.importorskip("pytorch_lightning", reason="training needs the extra 'train'")

from quadtree_attention.errors import OptionError  # noqa: E402
from quadtree_attention.models.registry import load  # noqa: E402
from quadtree_attention.models.weights import read_card  # noqa: E402
from quadtree_attention.tasks.training.run import run_command  # noqa: E402

# 2 epochs of 4 steps, in a second
RECIPE = """\
seed_everything: 1
model:
  model: test_quadtree
  options: {backend: reference}
  lr: 0.05
  warmup_epochs: 1
  mixup: 0.0
  cutmix: 0.0
data:
  source: generated
  generated_count: 32
  image_size: 32
  stored_size: 32
  batch_size: 8
  augment: batch
trainer:
  max_epochs: 2
  accelerator: cpu
  enable_progress_bar: false
"""


def write_recipe(folder, text=RECIPE, name="tiny.yaml"):
    path = folder / name
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run that came to its end."""
    folder = tmp_path_factory.mktemp("finished")
    recipe = write_recipe(folder)
    run_command("classify", ["--config", str(recipe), "--run_dir", str(folder / "run")])
    return folder / "run"


def rows(folder):
    return list(csv.DictReader((folder / "history.csv").open()))


def test_files_of_a_run(finished):
    assert sorted(path.name for path in finished.iterdir()) == [
        "best.ckpt",
        "best.json",
        "best.safetensors",
        "config.yaml",
        "curves.png",
        "history.csv",
        "last.ckpt",
    ]
    last = torch.load(finished / "last.ckpt", weights_only=True)
    assert last["global_step"] == 8
    assert [row["epoch"] for row in rows(finished)] == ["1", "2"]


def test_averaged_weights_by_lightnings_callback(tmp_path):
    averaging = "pytorch_lightning.callbacks.EMAWeightAveraging"
    callbacks = f"  callbacks: [{{class_path: {averaging}, init_args: {{decay: 0.9}}}}]\n"
    recipe = str(write_recipe(tmp_path, RECIPE + callbacks))
    options = ["--config", recipe, "--run_dir", str(tmp_path / "run")]
    run_command("classify", [*options, "--trainer.max_epochs", "1"])
    run_command("classify", [*options, "--resume"])
    last = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)
    averaged, current = last["state_dict"], last["current_model_state"]
    assert last["global_step"] == 8
    assert any(not torch.equal(averaged[name], current[name]) for name in averaged)


def test_weights_are_those_of_the_best_epoch(finished):
    best = torch.load(finished / "best.ckpt", weights_only=True)["state_dict"]
    model = load(finished / "best.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, best[f"model.{name}"])


def test_card(finished):
    card = read_card(finished / "best.safetensors")
    assert card["model"] == "test_quadtree"
    expected = {"num_classes": 4, "depths": [1, 1, 2, 1], "topk": 4}
    assert expected.items() <= card["kwargs"].items() and "backend" not in card["kwargs"]
    assert card["classes"] == ["0 degrees", "45 degrees", "90 degrees", "135 degrees"]
    assert (card["task"], card["image_size"]) == ("classify", 32)
    assert card["command"][:3] == ["quadtree", "train", "classify"]
    assert card == json.loads((finished / "best.json").read_text())


def test_config_can_be_run_again(finished, tmp_path):
    """The recipe as it was run, all defaults written out, gives the same run."""
    stored = yaml.safe_load((finished / "config.yaml").read_text())
    assert stored["model"]["lr"] == 0.05
    assert stored["model"]["label_smoothing"] == 0.1  # a default
    config = str(finished / "config.yaml")
    run_command("classify", ["--config", config, "--run_dir", str(tmp_path / "again")])
    again, before = (
        torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]
        for folder in (tmp_path / "again", finished)
    )
    assert all(torch.equal(again[name], tensor) for name, tensor in before.items())


def test_resume_of_a_finished_run_goes_on_to_more_epochs(tmp_path):
    options = ["--config", str(write_recipe(tmp_path)), "--run_dir", str(tmp_path / "run")]
    run_command("classify", [*options, "--trainer.max_epochs", "1"])
    first = rows(tmp_path / "run")
    run_command("classify", [*options, "--trainer.max_epochs", "3", "--resume"])
    assert rows(tmp_path / "run")[:1] == first
    assert [row["epoch"] for row in rows(tmp_path / "run")] == ["1", "2", "3"]


def test_resume_of_a_finished_run_with_nothing_left(finished):
    before = rows(finished)
    recipe = str(finished.parent / "tiny.yaml")
    run_command("classify", ["--config", recipe, "--run_dir", str(finished), "--resume"])
    assert rows(finished) == before


def test_run_that_ended_inside_an_epoch_goes_on_there(tmp_path):
    options = ["--config", str(write_recipe(tmp_path)), "--run_dir", str(tmp_path / "run")]
    run_command("classify", [*options, "--trainer.max_steps", "3"])
    run_command("classify", [*options, "--resume"])
    assert torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)["global_step"] == 8
    assert [row["epoch"] for row in rows(tmp_path / "run")] == ["1", "2"]
    assert all(row["val/top1"] for row in rows(tmp_path / "run"))


def test_run_is_named_after_its_last_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    write_recipe(tmp_path, "trainer: {max_epochs: 1}\n", "short.yaml")
    run_command("classify", ["--config", "tiny.yaml", "--config", "short.yaml"])
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["short"]
    assert len(rows(tmp_path / "runs" / "short")) == 1


def test_command_line_overrides_the_recipe(tmp_path):
    options = ["--config", str(write_recipe(tmp_path)), "--run_dir", str(tmp_path / "run")]
    run_command("classify", [*options, "--trainer.max_epochs=1", "--data.generated_classes=3"])
    card = read_card(tmp_path / "run" / "best.safetensors")
    assert card["kwargs"]["num_classes"] == len(card["classes"]) == 3


def test_loss_that_is_not_finite_stops_the_run(tmp_path):
    options = ["--config", str(write_recipe(tmp_path)), "--run_dir", str(tmp_path / "run")]
    with pytest.raises(OptionError, match=r"the loss is \w+ at step \d+.*lower --model.lr"):
        run_command("classify", [*options, "--model.lr=1e30", "--trainer.max_epochs=12"])


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--model.droppath=0.1", "there is no option model.droppath, in the recipe or on the "
         "command line; did you mean model.drop_path?"),
        ("--modle.lr=0.1", "did you mean model.lr?"),
        ("--trainer.max_epcohs=3", "did you mean trainer.max_epochs?"),
        ("--data.zzzzzzzzzzzzz=3", "see --help for the names there are"),
        ("--model.lr=fast", 'Parser key "model.lr": Expected a <class \'float\'>. Got value: fast'),
    ],
)  # fmt: skip
def test_words_about_options(tmp_path, monkeypatch, option, expected):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError) as caught:
        run_command("classify", ["--config", str(write_recipe(tmp_path)), option])
    assert str(caught.value).endswith(expected)
