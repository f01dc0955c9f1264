# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind, and how the parser's words are put."""

import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from quadtree_attention.errors import OptionError
from quadtree_attention.models.registry import load
from quadtree_attention.models.weights import read_card
from quadtree_attention.tasks.training.run import prepare, run_command, train
from tests.support import raises, tiny, training
from tests.support.training import history as rows

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


def run(folder, *options, text=RECIPE):
    """The rows of a run of the recipe."""
    return training.train("classify", write_recipe(folder, text), folder / "run", *options)


def last(folder):
    return torch.load(folder / "last.ckpt", weights_only=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run that came to its end."""
    folder = tmp_path_factory.mktemp("finished")
    run(folder)
    return folder / "run"


def test_files_of_a_run(finished):
    names = ["best.ckpt", "best.json", "best.safetensors", "config.yaml", "curves.png"]
    assert sorted(os.listdir(finished)) == [*names, "history.csv", "last.ckpt"]
    assert last(finished)["global_step"] == 8
    assert [row["epoch"] for row in rows(finished)] == ["1", "2"]
    for row in rows(finished):
        assert 0 < float(row["seconds"]) < 60
        assert 0.3 < float(row["train/loss"]) < 3 and 0 < float(row["val/loss"]) < 5
        assert 0 <= float(row["val/top1"]) <= float(row["val/top5"]) == 100
    with Image.open(finished / "curves.png") as image:
        assert image.format == "PNG" and image.width > 600 and image.height > 200
        assert image.convert("L").entropy() > 0.3  # not blank
    best = torch.load(finished / "best.ckpt", weights_only=True)["state_dict"]
    for name, tensor in load(finished / "best.safetensors").state_dict().items():
        assert torch.equal(tensor, best[f"model.{name}"])
    card = read_card(finished / "best.safetensors")
    assert card["model"] == "test_quadtree"
    expected = {"num_classes": 4, "depths": [1, 1, 2, 1], "topk": 4}
    assert expected.items() <= card["kwargs"].items() and "backend" not in card["kwargs"]
    assert card["classes"] == ["0 degrees", "45 degrees", "90 degrees", "135 degrees"]
    assert (card["task"], card["image_size"]) == ("classify", 32)
    assert card["command"][:3] == ["quadtree", "train", "classify"]
    assert card == json.loads((finished / "best.json").read_text())
    assert run(finished.parent, "--resume") == rows(finished)  # nothing is left to do


def test_averaged_weights_by_lightnings_callback(tmp_path):
    averaging = "pytorch_lightning.callbacks.EMAWeightAveraging"
    callbacks = f"  callbacks: [{{class_path: {averaging}, init_args: {{decay: 0.9}}}}]\n"
    run(tmp_path, "--trainer.max_epochs=1", text=RECIPE + callbacks)
    run(tmp_path, "--resume", text=RECIPE + callbacks)
    stored = last(tmp_path / "run")
    averaged, current = stored["state_dict"], stored["current_model_state"]
    assert stored["global_step"] == 8
    assert any(not torch.equal(averaged[name], current[name]) for name in averaged)


def test_config_can_be_run_again(finished, tmp_path):
    """The recipe as it was run, all defaults written out, gives the same run."""
    stored = yaml.safe_load((finished / "config.yaml").read_text())
    assert stored["model"]["lr"] == 0.05
    assert stored["model"]["label_smoothing"] == 0.1  # a default
    training.train("classify", finished / "config.yaml", tmp_path / "again")
    again, before = (last(folder)["state_dict"] for folder in (tmp_path / "again", finished))
    assert all(torch.equal(again[name], tensor) for name, tensor in before.items())


def test_run_that_ended_inside_an_epoch_goes_on_there(tmp_path):
    run(tmp_path, "--trainer.max_steps=3")
    found = run(tmp_path, "--resume")
    assert last(tmp_path / "run")["global_step"] == 8
    assert [row["epoch"] for row in found] == ["1", "2"]
    assert all(row["val/top1"] for row in found)


def test_runs_are_named_after_recipe_and_variants(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path, RECIPE + "variants: {b0: {}, b2: {}, 3x: {}}\n")
    for options, name in (([], "tiny"), (["--variant", "b2,3x"], "tiny-b2-3x")):
        cli = prepare("classify", ["--config", "tiny.yaml", *options])
        assert str(cli.run_dir()) == cli.trainer.default_root_dir == f"runs/classify-{name}"
    cli = prepare("classify", ["--config=tiny.yaml", "--variant=3x", "--run_dir", "there"])
    assert str(cli.run_dir()) == "there"
    assert not (tmp_path / "runs").exists()
    write_recipe(tmp_path, "trainer: {max_epochs: 1}\n", "short.yaml")
    run_command("classify", ["--config", "tiny.yaml", "--config", "short.yaml"])
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["classify-short"]
    assert len(rows(tmp_path / "runs" / "classify-short")) == 1


def test_training_from_python(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    short, wide = "short: {trainer: {max_epochs: 1}}", "wide: {data: {generated_classes: 3}}"
    write_recipe(tmp_path, f"task: classify\n{RECIPE}variants: {{{short}, {wide}}}\n")
    done = train("tiny.yaml")
    assert done.folder == Path("runs/classify-tiny")
    assert done.weights == Path("runs/classify-tiny/best.safetensors")
    assert [row["epoch"] for row in done.history] == [1]
    assert done.history[0]["val/top1"] == float(rows(done.folder)[0]["val/top1"])
    changes = {"data": {"generated_count": 16}, "model": {"options": {"topk": 2}}}
    done = train("tiny.yaml", ["wide"], run_dir="other", save_every=2, **changes)
    assert len(done.history) == 2 and done.folder == Path("other")
    stored = yaml.safe_load(Path("other/config.yaml").read_text())
    assert (stored["data"]["generated_count"], stored["save_every"]) == (16, 2)
    assert stored["model"]["options"] == {"backend": "reference", "topk": 2}
    assert "variants" not in stored and stored["variant"] is None
    card = read_card(done.weights)
    assert len(card["classes"]) == 3
    assert card["command"][2:] == [
        "classify", "--config", "tiny.yaml", "--variant", "wide", "--run_dir", "other",
        "--save_every=2", "--data.generated_count=16", "--model.options.topk=2",
    ]  # fmt: skip
    done = train("tiny.yaml", "short,wide", run_dir="other", resume=True, trainer={"max_epochs": 3})
    assert [row["epoch"] for row in done.history] == [1, 2, 3]
    assert capfd.readouterr().out == ""  # that is for the command


def test_mistakes_in_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    raises(OptionError, "does not say what it trains; add a line", train, "tiny.yaml")
    write_recipe(tmp_path, f"task: classify\n{RECIPE}")
    with pytest.raises(OptionError, match=r"did you mean data.batch_size\?$"):
        train("tiny.yaml", data={"batchsize": 3})
    write_recipe(tmp_path, f"task: classify\n{RECIPE.replace('max_epochs', 'min_epochs')}")
    with pytest.raises(OptionError, match="nothing says how long to train"):
        prepare("classify", ["--config", "tiny.yaml"])
    assert os.listdir() == ["tiny.yaml"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--model.options.topk", "2"], {"backend": "reference", "topk": 2}),
        (["--model.options", "{topk: 2}"], {"topk": 2}),
        (["--model.options.lepe=false", "--model.options.topk=2"],
         {"backend": "reference", "lepe": False, "topk": 2}),
    ],
)  # fmt: skip
def test_one_option_of_the_network_or_all(tmp_path, given, expected):
    """`--model.options.topk 2` sets one entry, `--model.options '{topk: 2}'` replaces all."""
    cli = prepare("classify", ["--config", str(write_recipe(tmp_path)), *given])
    assert cli.model.hparams["options"] == expected


def test_loss_that_is_not_finite_stops_the_run(tmp_path):
    with pytest.raises(OptionError, match=r"the loss is \w+ at step \d+.*lower --model.lr"):
        run(tmp_path, "--model.lr=1e30", "--trainer.max_epochs=12")


def test_source_of_the_command_line_replaces_that_of_the_recipe(tmp_path):
    """The class of the data follows the option, and the recipe does not contradict it."""
    for split, name in (("train", "cat"), ("train", "dog"), ("val", "cat"), ("val", "dog")):
        place = tmp_path / "pets" / split / name
        place.mkdir(parents=True)
        tiny.picture(0).save(place / "a.jpg")
    recipe = write_recipe(tmp_path, RECIPE.replace("  generated_count: 32\n", ""))
    options = ["--data.source", "folder", "--data.root", str(tmp_path / "pets")]
    args = ["--config", str(recipe), *options, "--run_dir", str(tmp_path / "run")]
    assert prepare("classify", args).datamodule.classes == ["cat", "dog"]


@pytest.mark.parametrize(
    ("args", "option"),
    [
        ([], "textures"),
        (["--data.source", "megadepth"], "size"),
        (["--data.source=scannet"], "pairs_per_scene"),
        (["--config", "first.yaml"], "pairs_per_scene"),
        (["--config", "first.yaml", "--config", "second.yaml"], "size"),
        (["--config", "second.yaml", "--config", "first.yaml", "--data.root", "x"], "width"),
    ],
)
def test_the_last_source_given_is_taken(args, option, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path, "data: {source: scannet}\n", "first.yaml")
    write_recipe(tmp_path, "data: {source: megadepth}\n", "second.yaml")
    with pytest.raises(SystemExit):
        run_command("match", [*args, "--print_config"])
    shown = yaml.safe_load(capsys.readouterr().out)["data"]
    assert option in shown and "source" in shown
