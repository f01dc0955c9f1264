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


def test_epochs_without_validation_have_no_scores(tmp_path):
    every = "--trainer.check_val_every_n_epoch=2"
    rows = train("classify", write_recipe(tmp_path), tmp_path / "run", every)
    assert [bool(row["val/top1"]) for row in rows] == [False, True]
    assert all(row["train/loss"] for row in rows)


def test_rows_of_an_epoch_that_is_trained_again_are_replaced():
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
    options += ["--trainer.enable_progress_bar=true", "--trainer.max_epochs=1"]
    run_command("classify", options)
    shown = "".join(capfd.readouterr())
    assert re.search(r"images/s=\d+", shown)
    left = re.findall(r"left=(\d+)m(\d\d)s", shown)
    assert left[-1] == ("0", "00")
    assert "train/loss=" in shown and "val/top1=" in shown
