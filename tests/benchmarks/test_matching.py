# SPDX-License-Identifier: Apache-2.0
"""The matcher and SIFT compared: a real run of SIFT, its file, its tables, and mistakes."""

import json
from types import ModuleType

import numpy as np
import pytest

pytest.importorskip("cv2", reason="SIFT needs the extra 'models'")
pytest.importorskip("poselib", reason="estimators need the extra 'models'")
pytest.importorskip("timm")
pytest.importorskip("yaml")

from tests.benchmarks.test_run import program
from tests.conftest import ROOT

DATA = ROOT.parent / "shared" / "data" / "matching"
needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason="the pairs of ../shared/data/matching are not here"
)


@pytest.fixture
def matching() -> ModuleType:
    from benchmarks import matching

    return matching


@pytest.fixture
def tables() -> ModuleType:
    from benchmarks import matching_tables

    return matching_tables


def row(**changes) -> dict:
    score = {"auc": {"5": 10.0, "10": 40.0, "20": 60.5}, "median": None, "failed": 1}
    return {
        "set": "scannet",
        "method": "SIFT",
        "median_seconds": 0.5,
        "kind": "pose",
        "pairs": 2,
        "missing": 0,
        "matches": 12.0,
        "precision": 33.333,
        "estimators": {"opencv": score, "poselib": score},
        "settings": {},
        "details": [
            {"name": "a", "matches": 24, "precision": 66.6,
             "errors": {"opencv": 4.0, "poselib": 20.5}},
            {"name": "b", "matches": 0, "precision": 0.0,
             "errors": {"opencv": None, "poselib": None}},
        ],
        **changes,
    }  # fmt: skip


def result(*rows: dict) -> dict:
    return {
        "kind": "matching",
        "command": "python -m benchmarks.matching",
        "schema": 1,
        "date": "2030-01-02T03:04:05+00:00",
        "commit": "0123456789abcdef",
        "device": "cpu",
        "machine": {"device_name": "CPU", "cpu": "CPU", "cores": 2, "threads": 1, "load": 0.5},
        "versions": {
            "python": "3.11", "torch": "2.9", "cuda": None, "triton": None, "numba": None,
            "quadtree_attention": "0.1", "opencv": "4.13", "poselib": "2.0",
        },
        "complete": True,
        "methods": {"SIFT": {"features": 100, "ratio": 0.8}, "quadtree": {"longer_side": 640}},
        "rows": list(rows),
    }  # fmt: skip


@needs_data
def test_sift_on_real_pairs(tmp_path, matching, tables):
    """SIFT copes with blurred bikes and with the room, whose frames are not far apart."""
    out, work = tmp_path / "matching--here.json", tmp_path / "work"
    options = ["--methods", "sift", "--sets", "bikes,rgbd", "--data", str(DATA), "--threads", "1"]
    options += ["--out", str(out), "--work", str(work), "--features", "2048"]
    done = program("matching", *options)
    assert done.returncode == 0, done.stderr
    assert "bikes  SIFT" in done.stdout and f"written: {out}" in done.stdout
    found = json.loads(out.read_text())
    tables.check_result(found)
    assert not list(tmp_path.glob("*.partial")) and str(tmp_path) not in out.read_text()
    bikes, room = found["rows"]
    assert (bikes["kind"], bikes["pairs"], room["kind"], room["pairs"]) == (
        "homography", 3, "pose", 3,
    )  # fmt: skip
    for name in ("opencv", "poselib"):
        assert bikes["estimators"][name]["auc"]["3"] > 75
        assert room["estimators"][name]["auc"]["10"] > 70
    assert bikes["precision"] > 85 and room["precision"] > 75
    with np.load(work / "rgbd" / "sift" / "3__4.npz") as stored:
        assert len(stored["keypoints0"]) == room["details"][0]["matches"] > 50
        assert (stored["confidence"] > 1 - matching.RATIO).all()
    assert (work / "bikes" / "pairs.txt").read_text().count("\n") == 3


def test_neighbours_are_mutual_and_pass_the_ratio_test(matching):
    d = np.random.default_rng(0).integers(0, 255, (4, 128)).astype(np.float32)
    rows, columns, ratio = matching.nearest(d, d[[2, 0, 1]])
    assert (rows.tolist(), columns.tolist(), ratio.tolist()) == ([0, 1, 2], [1, 2, 0], [0, 0, 0])
    rows, columns, _ = matching.nearest(np.stack([d[0] + 1, d[0]]), d[:2])  # both are nearest to 0
    assert (rows.tolist(), columns.tolist()) == ([1], [0])
    rows, _, _ = matching.nearest(d, np.concatenate([d + 1, d - 1]))  # two are as near
    assert rows.size == 0
    assert matching.nearest(d[:0], d)[0].size == 0


def test_a_matcher_of_ones_own(tmp_path, matching, tables):
    """Weights of a tiny model, which finds what it finds, beside SIFT."""
    from PIL import Image

    from quadtree_attention.models.registry import create
    from quadtree_attention.models.weights import save_weights

    kwargs = {"dims": [16, 24, 32], "num_pairs": 1, "num_heads": 2, "fine_heads": 2}
    card = {"model": "loftr_quadtree_small", "kwargs": kwargs, "task": "match"}
    weights = tmp_path / "tiny.safetensors"
    save_weights(weights, create("loftr_quadtree_small", **kwargs).state_dict(), card)
    folder = tmp_path / "data" / "oxford_affine" / "graf"
    folder.mkdir(parents=True)
    picture = np.random.default_rng(0).integers(0, 255, (24, 32), np.uint8)
    image = Image.fromarray(picture).resize((160, 120), Image.Resampling.BICUBIC)
    for number in (1, 2):
        image.save(folder / f"img{number}.jpg", quality=95)
    np.savetxt(folder / "H1to2p.txt", np.eye(3))
    options = ["--data", str(tmp_path / "data"), "--sets", "graf", "--threads", "1"]
    options += ["--weights", f"tiny={weights}", "--out", str(tmp_path / "out.json")]
    found = matching.run(options, matching.parse(options))
    assert found == json.loads((tmp_path / "out.json").read_text())
    tiny, sift = found["rows"]
    assert (tiny["method"], sift["method"]) == ("tiny", "SIFT")
    assert sift["details"][0]["errors"]["poselib"] < 0.1 and sift["precision"] == 100
    assert found["methods"]["tiny"]["model"] == "loftr_quadtree_small"
    assert str(tmp_path) not in json.dumps(found)


def test_tables(tables):
    other = {"auc": {"3": 1.0, "5": 2.0, "10": 3.25}, "median": 2.5, "failed": 0}
    estimators = {"opencv": other, "poselib": other}
    plane = row(set="graf", method="quadtree", kind="homography", estimators=estimators)
    found = result(row(), plane)
    tables.check_result(found)
    lines = tables.markdown({"matching--cpu": found}).splitlines()
    assert lines[0] == "### CPU: `matching--cpu.json`"
    assert "- SIFT: features 100, ratio 0.8" in lines
    assert (
        "| scannet | SIFT | 12 | 33.3 | 10.0 / 40.0 / 60.5 | 1 of 2 | 10.0 / 40.0 / 60.5 | 0 of 2 "
        "| 0.50 |"
    ) in lines
    (head,) = (line for line in lines if "px" in line)
    assert "poselib AUC@3/5/10 px" in head and lines.index(head) > lines.index("#### Homographies")
    assert (
        "| graf | quadtree | 12 | 33.3 | 1.0 / 2.0 / 3.2 | 1 of 2 | 1.0 / 2.0 / 3.2 | 0 of 2 "
        "| 0.50 |"
    ) in lines
    assert tables.markdown({}) == "Not measured yet."


def test_results_that_are_not_right_are_refused(tables, tmp_path):
    score = {"auc": {"5": 1.0}, "median": None, "failed": 0}
    for bad, message in (
        (result() | {"kind": "else"}, "kind is 'else'"),
        (result(row(method="ORB")), "method is 'ORB'"),
        (result(row(pairs=3)), "details has 2 pairs of 3"),
        (result(row(estimators={"opencv": score, "poselib": score})), "must have the fields"),
    ):
        with pytest.raises(ValueError, match=message):
            tables.check_result(bad)
    (tmp_path / "matching--x.json").write_text(json.dumps(result(row(kind="flow"))))
    with pytest.raises(ValueError, match=r"matching--x.json: rows\[0\].kind is 'flow'"):
        tables.read_results(tmp_path)


def test_committed_results_are_valid(tables):
    for found in tables.read_results().values():
        assert found["complete"] and found["rows"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "nowhere"], "--data: there is no folder nowhere/scannet_sample of the set"),
        (["--sets", "mars"], "unknown 'mars'; known: scannet, graf"),
        (["--methods", "orb"], "unknown 'orb'; known: matcher, sift"),
        (["--weights", "mine=none.safetensors"], "there is no file 'none.safetensors'"),
        (["--features", "0"], "must be at least 1, got 0"),
    ],
)
def test_mistakes(matching, capsys, options, message):
    with pytest.raises(SystemExit) as ended:
        matching.main(options)
    told = capsys.readouterr().err
    assert ended.value.code == 2 and message in told and told.count("\n") == 1
