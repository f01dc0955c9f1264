# SPDX-License-Identifier: Apache-2.0
"""The network and SGBM compared: a real run, its file, its tables, and mistakes."""

import json
from types import ModuleType

import numpy as np
import pytest

pytest.importorskip("cv2", reason="SGBM needs the extra 'models'")
pytest.importorskip("timm")

from tests.conftest import ROOT

DATA = ROOT.parent / "shared" / "data" / "stereo"
SCORES = {
    f"{name}_{region}": 1.25
    for region in ("noc", "all")
    for name in ("epe", "bad1", "bad2", "bad3", "d1")
} | {"occlusion_iou": None, "occlusion_iou_both": None}


@pytest.fixture
def stereo() -> ModuleType:
    from benchmarks import stereo

    return stereo


@pytest.fixture
def tables() -> ModuleType:
    from benchmarks import stereo_tables

    return stereo_tables


def row(**changes) -> dict:
    scores = SCORES | {"epe_all": 2.5, "d1_all": 30.0}
    return {
        "method": "SGBM",
        "pairs": 2,
        "median_seconds": 0.5,
        "mean": SCORES | {"occlusion_iou": 0.625},
        "details": [{"name": name, "scores": scores, "seconds": 0.5} for name in ("a", "b")],
        **changes,
    }


def result(*rows: dict) -> dict:
    return {
        "kind": "stereo",
        "command": "python -m benchmarks.stereo",
        "schema": 1,
        "date": "2030-01-02T03:04:05+00:00",
        "commit": "0123456789abcdef",
        "device": "cpu",
        "machine": {"device_name": "CPU", "cpu": "CPU", "cores": 2, "threads": 1, "load": 0.5},
        "versions": {
            "python": "3.11", "torch": "2.9", "cuda": None, "triton": None, "numba": None,
            "quadtree_attention": "0.1", "opencv": "4.13",
        },
        "complete": True,
        "methods": {
            "SGBM": {"block": 3, "holes": "filled from the farther side"},
            "mine": {"longer_side": 960, "max_disparity": None, "weights_sha256": "0123456789abcd"},
        },
        "rows": list(rows),
    }  # fmt: skip


def test_sgbm_on_real_pairs(tmp_path, stereo, tables, capsys):
    """SGBM copes with Middlebury's first pairs; every pixel gets an answer."""
    data = DATA / "MIDDLEBURY_2001_2003"
    if not data.is_dir():
        pytest.skip("the pairs of ../shared/data/stereo are not here")
    out, work = tmp_path / "stereo--here.json", tmp_path / "work"
    options = ["--only", "sgbm", "--data", str(data), "--threads", "1", "--out", str(out)]
    assert stereo.main([*options, "--work", str(work)]) == 0
    told = capsys.readouterr()
    assert "SGBM EPE px" in told.out and f"written: {out}" in told.out
    found = json.loads(out.read_text())
    tables.check_result(found)
    assert not list(tmp_path.glob("*.partial")) and str(tmp_path) not in out.read_text()
    (mine,) = found["rows"]
    assert [pair["name"] for pair in mine["details"]] == ["cones", "teddy", "tsukuba", "venus"]
    assert mine["mean"]["epe_all"] < 0.8 and mine["mean"]["d1_noc"] < 4
    assert mine["mean"]["d1_all"] < 7 and mine["mean"]["occlusion_iou_both"] > 0.8
    with np.load(work / "sgbm" / "venus.npz") as stored:
        assert (stored["disparity"] >= 0).all() and 0.02 < stored["occlusion"].mean() < 0.2


def test_holes_get_what_is_farther_away(stereo):
    values = np.array([[5, -1, -1, 9, -1], [-1, 4, -1, 2, 7], [-1, -1, -1, -1, -1]], np.float32)
    filled = stereo.fill_holes(values, values >= 0)
    assert filled.tolist() == [[5, 5, 5, 9, 9], [4, 4, 2, 2, 7], [5, 5, 5, 5, 5]]
    assert filled.dtype == np.float32
    assert (stereo.fill_holes(values, np.zeros(values.shape, bool)) == 0).all()


@pytest.mark.usefixtures("only_reference")
def test_a_network_of_ones_own_beside_sgbm(tmp_path, stereo):
    from tests.tasks.stereo.test_evaluate import write_pairs
    from tests.tasks.stereo.test_predictor import write_weights

    weights = write_weights(tmp_path / "tiny.safetensors")
    data = write_pairs(tmp_path / "data", ["a"])
    options = ["--data", str(data), "--weights", f"tiny={weights}", "--threads", "1"]
    options += ["--out", str(tmp_path / "out.json"), "--size", "64", "--max-disparity", "40"]
    found = stereo.run(options, stereo.parse(options))
    assert found == json.loads((tmp_path / "out.json").read_text())
    tiny, sgbm = found["rows"]
    assert (tiny["method"], sgbm["method"], tiny["pairs"]) == ("tiny", "SGBM", 1)
    assert tiny["details"][0]["scores"] != sgbm["details"][0]["scores"]
    assert found["methods"]["tiny"]["max_disparity"] == 40
    assert found["methods"]["tiny"]["longer_side"] == 64
    assert str(tmp_path) not in json.dumps(found)


def test_tables(tables):
    found = result(row(), row(method="mine"))
    tables.check_result(found)
    lines = tables.markdown({"stereo--cpu": found}).splitlines()
    assert lines[0] == "### CPU: `stereo--cpu.json`"
    assert "- SGBM: block 3, holes filled from the farther side" in lines
    assert "- mine: longer side 960, weights sha256 0123456789ab" in lines
    assert "| SGBM | 1.25 | 1.25 | 1.25 | 1.25 | 1.25 | 1.25 | 0.62 | 0.50 |" in lines
    assert "| a | 2.50 | 1.25 | 30.00 | 2.50 | 1.25 | 30.00 |" in lines
    (head,) = (line for line in lines if line.startswith("| pair |"))
    assert head.count("SGBM") == head.count("mine") == 3
    assert tables.markdown({}) == "Not measured yet."
    assert "mine D1 %" in tables.text_table(found["rows"])


def test_results_that_are_not_right_are_refused(tables, tmp_path):
    other = [{"name": name, "scores": SCORES, "seconds": 1.0} for name in ("b", "a")]
    for bad, message in (
        (result() | {"kind": "else"}, "kind is 'else'"),
        (result(row(method="ORB")), "method is 'ORB'"),
        (result(row(pairs=3)), "details has 2 pairs of 3"),
        (result(row(mean={})), "must have the fields"),
        (result(row(), row(method="mine", details=other)), "rows must be of the same pairs"),
    ):
        with pytest.raises(ValueError, match=message):
            tables.check_result(bad)
    (tmp_path / "stereo--x.json").write_text(json.dumps(result(row(method="flow"))))
    with pytest.raises(ValueError, match=r"stereo--x.json: rows\[0\].method is 'flow'"):
        tables.read_results(tmp_path)


def test_committed_results_are_valid(tables):
    for found in tables.read_results().values():
        assert found["complete"] and found["rows"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "nowhere"], "--data: there is no folder nowhere"),
        (["--only", "orb"], "unknown 'orb'; known: network, sgbm"),
        (["--weights", "mine=none.safetensors"], "there is no file 'none.safetensors'"),
        (["--max-disparity", "0"], "must be more than 0, got 0"),
    ],
)
def test_mistakes(stereo, capsys, options, message):
    with pytest.raises(SystemExit) as ended:
        stereo.main(options)
    told = capsys.readouterr().err
    assert ended.value.code == 2 and message in told and told.count("\n") == 1


def test_a_folder_without_pairs(stereo, tmp_path, capsys):
    assert stereo.main(["--data", str(tmp_path), "--out", str(tmp_path / "o.json")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("python -m benchmarks.stereo: ") and told.count("\n") == 1
    assert not list(tmp_path.iterdir())
