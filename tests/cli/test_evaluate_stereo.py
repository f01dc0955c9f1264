# SPDX-License-Identifier: Apache-2.0
"""`quadtree evaluate stereo`: what is printed and written, mistakes on one line."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("timm", reason="weights need timm")
pytest.importorskip("cv2", reason="checking pairs needs the extra 'models'")
typer_testing = pytest.importorskip("typer.testing", reason="the command needs typer")

from quadtree_attention.cli.main import app  # noqa: E402
from tests.tasks.stereo.test_evaluate import SIZE, write_answer, write_pairs  # noqa: E402
from tests.tasks.stereo.test_predictor import write_weights  # noqa: E402

pytestmark = pytest.mark.usefixtures("only_reference")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("weights") / "tiny.safetensors")


@pytest.fixture(autouse=True)
def _in_a_folder_with_pairs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_pairs(Path("data"))
    Path("answers").mkdir()
    answer = np.full(SIZE, 8.0, np.float32)
    answer[25:] = 20
    write_answer("answers/a.npz", answer, np.zeros(SIZE, np.float32))
    write_answer("answers/b.npz", answer + 4, np.zeros(SIZE, np.float32))


def run(*options: object):
    arguments = ["evaluate", "stereo", *map(str, options)]
    return typer_testing.CliRunner().invoke(app, arguments, prog_name="quadtree")


def test_answers_in_files():
    result = run("--predictions", "answers", "--data", "data")
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["not", "occluded", "all", "known", "pixels", "occluded"]
    columns = [*["EPE", "bad-1", "bad-2", "bad-3", "D1"] * 2, "IoU", "as", "STTR"]
    assert lines[1].split() == ["pair", *columns]
    ious = lines[2].split()[-2:], lines[3].split()[-2:], lines[5].split()[-2:]
    assert all(strict == "0.00" and 0 < float(both) <= 1 for strict, both in ious)
    assert lines[2].split()[:-2] == ["a", *["0.00", "0.0", "0.0", "0.0", "0.0"] * 2]
    assert lines[3].split()[:-2] == ["b", *["4.00", "100.0", "100.0", "100.0", "100.0"] * 2]
    assert lines[5].split()[:-2] == ["mean", *["2.00", "50.0", "50.0", "50.0", "50.0"] * 2]
    assert lines[7] == "2 pairs, EPE in pixels, bad-N and D1 in percent, answers"


def test_a_network_in_two_loops(weights):
    first = run(weights, "--data", "data", "--out", "out", "--size", 48, "--scores", "s.json")
    assert first.exit_code == 0, first.output
    assert sorted(os.listdir("out")) == ["a.npz", "b.npz", "settings.json"]
    assert "sttr_quadtree_small, sha256 " in first.stdout and "at most 48 pixels" in first.stdout
    scores = json.loads(Path("s.json").read_text())
    assert scores["settings"]["size"] == 48 and scores["mean"]["epe_all"] > 0
    again = run(weights, "--data", "data", "--out", "out", "--size", 48, "--json")
    assert (
        again.stderr == "quadtree: out holds 2 of these pairs already; --force makes them again\n"
    )
    assert json.loads(again.stdout) == scores
    only = run("--predictions", "out", "--data", "data", "--json")
    assert json.loads(only.stdout) == scores
    other = run(weights, "--data", "data", "--out", "out", "--size", 64)
    assert other.exit_code == 2 and "made with other weights or options" in other.stderr


def test_what_is_left_out_is_told():
    Path("answers/b.npz").unlink()
    Path("data/right/c.png").write_bytes(Path("data/right/a.png").read_bytes())
    Path("data/left/c.png").write_bytes(Path("data/left/a.png").read_bytes())  # has no truth
    result = run("--predictions", "answers", "--data", "data")
    assert result.exit_code == 0, result.output
    skipped, missing = result.stderr.splitlines()
    assert skipped.startswith("quadtree: left out 1 pairs: ") and "c.png" in skipped
    assert missing == "quadtree: 1 pair has no prediction and is left out of the means: b"
    strict = run("--predictions", "answers", "--data", "data", "--strict")
    assert strict.exit_code == 2 and "c.png" in strict.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "nowhere"], "nowhere"),
        (["--data", "answers"], "answers"),
        (["--data", "data", "--layout", "moon"], "layout must be one of"),
        (["--data", "data", "--split", "mars"], "split must be train or val, got 'mars'"),
        (["--data", "data", "--scores", "no/s.json"], "there is no directory 'no' to write to"),
        (["--data", "data", "--predictions", "none"], "there is no folder none of predictions"),
        (["--data", "data", "--predictions", "data"], "data has predictions for none of 2 pairs"),
        (
            ["--data", "data", "--predictions", "answers", "--size", 64, "--force"],
            "got --size, --force as well; leave out one or the other",
        ),
        (["w.safetensors", "--data", "data", "--predictions", "answers"], "got WEIGHTS as well"),
        (["w.safetensors", "--data", "data"], "there is no file 'w.safetensors'"),
    ],
)
def test_mistakes(options, message):
    before = sorted(os.listdir())
    result = run(*options)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("quadtree: ") and result.stderr.count("\n") == 1
    assert message in result.stderr
    assert sorted(os.listdir()) == before


def test_what_is_needed():
    result = run()
    assert result.exit_code == 2 and "--data" in result.stderr


def test_a_pair_that_cannot_be_read_is_told(weights):
    damaged = Path("data/disparity/b.pfm")
    damaged.write_bytes(damaged.read_bytes()[:20])
    result = run(weights, "--data", "data", "--out", "told", "--size", 48)
    assert result.exit_code == 0 and "quadtree: skipped: " in result.stderr
    assert str(damaged) in result.stderr
    strict = run(weights, "--data", "data", "--out", "strict", "--size", 48, "--strict")
    assert strict.exit_code == 2 and "1 pairs cannot be read; mend them" in strict.stderr
