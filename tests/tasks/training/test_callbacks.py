# SPDX-License-Identifier: Apache-2.0
"""The table, the curves and the progress bar of a run."""

import re
from types import SimpleNamespace

import torch
from PIL import Image

from quadtree_attention.tasks.training.callbacks import History, draw_curves, write_table
from quadtree_attention.tasks.training.run import run_command
from tests.support.training import history, train
from tests.tasks.training.test_run import write_recipe


def test_a_run_that_went_on(tmp_path):
    """One epoch, and two more."""
    recipe, folder = write_recipe(tmp_path), tmp_path / "run"
    first = train("classify", recipe, folder, "--trainer.max_epochs=1")
    rows = train("classify", recipe, folder, "--trainer.max_epochs=3", "--resume")
    assert [row["epoch"] for row in rows] == ["1", "2", "3"] and rows[:1] == first
    names = {"epoch", "seconds", "train/loss", "val/loss", "val/top1", "val/top5"}
    assert names <= rows[0].keys()
    for row in rows:
        assert 0 < float(row["seconds"]) < 60
        assert 0.3 < float(row["train/loss"]) < 3 and 0 < float(row["val/loss"]) < 5
        assert 0 <= float(row["val/top1"]) <= float(row["val/top5"]) == 100
    with Image.open(folder / "curves.png") as image:
        image.load()
        assert image.format == "PNG" and image.width > 600 and image.height > 200
        assert image.convert("L").entropy() > 0.3  # not blank
    assert not list(folder.glob("*.unfinished"))


def test_epochs_without_validation_have_no_scores(tmp_path):
    options = ("--trainer.max_epochs=4", "--trainer.check_val_every_n_epoch=2")
    rows = train("classify", write_recipe(tmp_path), tmp_path / "run", *options)
    assert [bool(row["val/top1"]) for row in rows] == [False, True, False, True]
    assert all(row["train/loss"] for row in rows)


def test_history_goes_on():
    history = History()
    history.load_state_dict({"rows": [{"epoch": 1, "val/top1": 50.0}]})
    again = History()
    again.load_state_dict(history.state_dict())
    assert again.rows == [{"epoch": 1, "val/top1": 50.0}]
    again.rows[0]["val/top1"] = 0.0
    assert history.rows[0]["val/top1"] == 50.0
    history = History()
    history.load_state_dict({"rows": [{"epoch": epoch, "seconds": 1.0} for epoch in (1, 2, 3)]})
    device = SimpleNamespace(root_device=torch.device("cpu"))
    trainer = SimpleNamespace(
        callback_metrics={}, current_epoch=1, is_global_zero=False, strategy=device
    )
    history.on_train_epoch_start()
    history.on_train_epoch_end(trainer)
    assert [row["epoch"] for row in history.rows] == [1, 2]


def test_tables_and_curves_with_gaps(tmp_path):
    write_table([{"epoch": 1, "train/loss": 2.0}], tmp_path / "history.csv")
    rows = [{"epoch": 1, "train/loss": 2.0}, {"epoch": 2, "train/loss": 1.0, "val/top1": 50.0}]
    write_table(rows, tmp_path / "history.csv")
    assert history(tmp_path) == [
        {"epoch": "1", "train/loss": "2.0", "val/top1": ""},
        {"epoch": "2", "train/loss": "1.0", "val/top1": "50.0"},
    ]
    rows = [{"epoch": 1, "train/loss": 2.0}, {"epoch": 2, "val/loss": float("nan")}]
    draw_curves(rows, tmp_path / "curves.png")
    with Image.open(tmp_path / "curves.png") as image:
        image.verify()
    draw_curves([{"epoch": 1, "seconds": 2.0}], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_progress_shows_speed_and_time_left(tmp_path, capfd):
    recipe = write_recipe(tmp_path)
    options = ["--config", str(recipe), "--run_dir", str(tmp_path / "run")]
    run_command("classify", [*options, "--trainer.enable_progress_bar=true"])
    shown = "".join(capfd.readouterr())
    assert re.search(r"images/s=\d+", shown)
    left = re.findall(r"left=(\d+)m(\d\d)s", shown)
    assert left[-1] == ("0", "00")
    assert "train/loss=" in shown and "val/top1=" in shown
