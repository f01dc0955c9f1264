# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind, and how the parser's words are put."""

import csv
import json
import os
from pathlib import Path

import pytest
import torch
import yaml

from quadtree_attention.errors import OptionError
from quadtree_attention.models.registry import load
from quadtree_attention.models.weights import read_card
from quadtree_attention.tasks.training.run import prepare, run_command, train

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
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["classify-short"]
    assert len(rows(tmp_path / "runs" / "classify-short")) == 1


def test_command_line_overrides_the_recipe(tmp_path):
    options = ["--config", str(write_recipe(tmp_path)), "--run_dir", str(tmp_path / "run")]
    run_command("classify", [*options, "--trainer.max_epochs=1", "--data.generated_classes=3"])
    card = read_card(tmp_path / "run" / "best.safetensors")
    assert card["kwargs"]["num_classes"] == len(card["classes"]) == 3


def test_training_from_python(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    variants = (
        "variants: {short: {trainer: {max_epochs: 1}}, wide: {data: {generated_classes: 3}}}\n"
    )
    write_recipe(tmp_path, f"task: classify\n{RECIPE}{variants}")
    done = train("tiny.yaml")
    assert (done.folder, done.weights) == (
        Path("runs/classify-tiny"),
        Path("runs/classify-tiny/best.safetensors"),
    )
    assert [row["epoch"] for row in done.history] == [1]
    assert done.history[0]["val/top1"] == float(rows(done.folder)[0]["val/top1"])
    done = train("tiny.yaml", ["wide"], run_dir="other", data={"generated_count": 16}, save_every=2)
    assert len(done.history) == 2 and done.folder == Path("other")
    stored = yaml.safe_load(Path("other/config.yaml").read_text())
    assert (stored["data"]["generated_count"], stored["save_every"]) == (16, 2)
    assert "variants" not in stored and stored["variant"] is None
    card = read_card(done.weights)
    assert len(card["classes"]) == 3
    assert card["command"][2:] == [
        "classify", "--config", "tiny.yaml", "--variant", "wide", "--run_dir", "other",
        "--data.generated_count=16", "--save_every=2",
    ]  # fmt: skip
    done = train("tiny.yaml", "short,wide", run_dir="other", resume=True, trainer={"max_epochs": 3})
    assert [row["epoch"] for row in done.history] == [1, 2, 3]
    assert capfd.readouterr().out == ""  # that is for the command


def test_mistakes_in_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    with pytest.raises(OptionError, match="does not say what it trains; add a line"):
        train("tiny.yaml")
    write_recipe(tmp_path, f"task: classify\n{RECIPE}")
    with pytest.raises(OptionError, match=r"did you mean data.batch_size\?$"):
        train("tiny.yaml", data={"batchsize": 3})
    assert os.listdir() == ["tiny.yaml"]


def test_run_is_named_after_recipe_and_variants(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path, RECIPE + "variants: {b0: {}, b2: {}, 3x: {}}\n")
    for options, name in (([], "tiny"), (["--variant", "b2,3x"], "tiny-b2-3x")):
        cli = prepare("classify", ["--config", "tiny.yaml", *options])
        assert str(cli.run_dir()) == cli.trainer.default_root_dir == f"runs/classify-{name}"
    cli = prepare("classify", ["--config=tiny.yaml", "--variant=3x", "--run_dir", "there"])
    assert str(cli.run_dir()) == "there"
    assert not (tmp_path / "runs").exists()


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


def test_overrides_set_one_option_of_the_network(tmp_path):
    recipe = write_recipe(tmp_path, f"task: classify\n{RECIPE}")
    train(
        recipe, run_dir=tmp_path / "run", model={"options": {"topk": 2}}, trainer={"max_steps": 1}
    )
    stored = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert stored["model"]["options"] == {"backend": "reference", "topk": 2}


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
