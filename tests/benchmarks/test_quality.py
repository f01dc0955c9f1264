# SPDX-License-Identifier: Apache-2.0
"""Networks beside SIFT and SGBM: real runs, weights of one's own, and mistakes."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_model

from benchmarks import vit
from benchmarks.quality.matching import RATIO, nearest
from benchmarks.quality.stereo import fill_holes
from benchmarks.speed import calibration
from quadtree_attention import models
from quadtree_attention.tasks.stereo import predictor
from tests.benchmarks.conftest import command, read, refused, write_graf
from tests.conftest import ROOT
from tests.support import tiny
from tests.support.tiny import write_weights
from tests.tasks.stereo.test_result import write_pairs

DATA = ROOT.parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="there are no pairs in ../shared/data")


@needs_data
def test_sift_on_real_pairs(result, tmp_path, capsys):
    """SIFT copes with blurred bikes and with the room, whose frames are not far apart."""
    options = "--methods sift --sets bikes,rgbd --features 2048 --threads 1"
    places = ["--data", DATA / "matching", "--work", work := tmp_path / "work"]
    bikes, room = result(f"quality matching {options}", *places)["rows"]
    told = capsys.readouterr().out
    assert "bikes  SIFT" in told and f"written: {tmp_path}" in told
    truths = [(row["values"]["truth"], row["values"]["pairs"]) for row in (bikes, room)]
    assert truths == [("homography", 3), ("pose", 3)]
    for name in ("opencv", "poselib"):
        assert bikes["values"]["estimators"][name]["auc"]["3"] > 75
        assert room["values"]["estimators"][name]["auc"]["10"] > 70
    assert bikes["values"]["precision"] > 85 and room["values"]["precision"] > 75
    with np.load(work / "rgbd" / "sift" / "3__4.npz") as stored:
        assert len(stored["keypoints0"]) == room["details"]["pairs"][0]["matches"] > 50
        assert (stored["confidence"] > 1 - RATIO).all()
    assert (work / "bikes" / "pairs.txt").read_text().count("\n") == 3


def test_neighbours_are_mutual_and_pass_the_ratio_test():
    d = np.random.default_rng(0).integers(0, 255, (4, 128)).astype(np.float32)
    rows, columns, ratio = nearest(d, d[[2, 0, 1]])
    assert (rows.tolist(), columns.tolist(), ratio.tolist()) == ([0, 1, 2], [1, 2, 0], [0, 0, 0])
    rows, columns, _ = nearest(np.stack([d[0] + 1, d[0]]), d[:2])  # both are nearest to 0
    assert (rows.tolist(), columns.tolist()) == ([1], [0])
    rows, _, _ = nearest(d, np.concatenate([d + 1, d - 1]))  # two are as near
    assert rows.size == 0
    assert nearest(d[:0], d)[0].size == 0


def test_a_matcher_of_ones_own(result, tmp_path):
    """Weights of a tiny model, which finds what it finds, beside SIFT."""
    weights = write_weights("match", tmp_path / "tiny.safetensors")
    write_graf(tmp_path / "data")
    places = ["--data", tmp_path / "data", "--weights", f"tiny={weights}"]
    made = result("quality matching --sets graf --threads 1", *places)
    methods = [row["case"]["method"] for row in made["rows"]]
    assert methods == ["tiny", "tiny guided", "SIFT"]
    sift = made["rows"][-1]
    assert sift["details"]["pairs"][0]["errors"]["poselib"] < 0.1
    assert sift["values"]["precision"] == 100
    settings = made["runs"][0]["settings"]["methods"]["tiny"]
    assert (settings["model"], settings["longer_side"]) == ("loftr_quadtree_small", 640)


@needs_data
def test_sgbm_on_real_pairs(result, tmp_path, capsys):
    """SGBM copes with Middlebury's first pairs; every pixel gets an answer."""
    data = DATA / "stereo" / "MIDDLEBURY_2001_2003"
    places = ["--data", data, "--work", work := tmp_path / "work"]
    (row,) = result("quality stereo --methods sgbm --threads 1", *places)["rows"]
    assert "SGBM EPE px" in capsys.readouterr().out
    names = [pair["name"] for pair in row["details"]["pairs"]]
    assert names == ["cones", "teddy", "tsukuba", "venus"]
    mean = row["values"]["mean"]
    assert mean["epe_all"] < 0.8 and mean["d1_noc"] < 4
    assert mean["d1_all"] < 7 and mean["occlusion_iou_both"] > 0.8
    with np.load(work / "sgbm" / "venus.npz") as stored:
        assert (stored["disparity"] >= 0).all() and 0.02 < stored["occlusion"].mean() < 0.2


def test_holes_get_what_is_farther_away():
    values = np.array([[5, -1, -1, 9, -1], [-1, 4, -1, 2, 7], [-1, -1, -1, -1, -1]], np.float32)
    filled = fill_holes(values, values >= 0)
    assert filled.tolist() == [[5, 5, 5, 9, 9], [4, 4, 2, 2, 7], [5, 5, 5, 5, 5]]
    assert filled.dtype == np.float32
    assert (fill_holes(values, np.zeros(values.shape, bool)) == 0).all()


@pytest.mark.usefixtures("only_reference")
def test_a_stereo_network_of_ones_own_beside_sgbm(result, tmp_path):
    weights = write_weights("stereo", tmp_path / "tiny.safetensors")
    places = ["--data", write_pairs(tmp_path / "data", ["a"]), "--weights", f"tiny={weights}"]
    made = result("quality stereo --size 64 --max-disparity 40 --threads 1", *places)
    tiny, sgbm = made["rows"]
    assert (tiny["case"]["method"], sgbm["case"]["method"]) == ("tiny", "SGBM")
    assert tiny["values"]["pairs"] == 1
    assert tiny["values"]["mean"] != sgbm["values"]["mean"]
    settings = made["runs"][0]["settings"]["methods"]["tiny"]
    assert (settings["max_disparity"], settings["longer_side"]) == (40, 64)


@pytest.mark.usefixtures("only_reference")
def test_attention_near_the_true_partner(result, tmp_path, capsys):
    """Weights whose cross attention is known: keys of zeros make it equal for all cells."""
    card = {"model": "loftr_quadtree_small", "kwargs": tiny.NETWORKS["match"][1]}
    network = models.create(card["model"], **card["kwargs"])
    for layer in network.coarse_transformer.layers:
        torch.nn.init.zeros_(layer.attn.k_proj.weight)
    models.save_weights(tmp_path / "even.safetensors", network.state_dict(), card)
    options = "--pairs 2 --queries 8 --image 64x96 --threads 1 --weights"
    made = result(f"quality attention {options}", f"even={tmp_path / 'even.safetensors'}")
    assert "within 4 cells" in capsys.readouterr().out
    rows = {(r["case"]["layer"], r["case"]["level"]): r["values"] for r in made["rows"]}
    uniform = rows.pop(("any", "uniform"))
    assert uniform["pairs"] == 2 and uniform["queries"] == 16
    levels = {level for _, level in rows}
    assert levels == {"0", "1", "2", "message", "full attention"}
    layer = next(name for name, _ in rows)
    shares = [rows[layer, str(level)]["share"] for level in range(3)]
    assert sum(shares) == pytest.approx(1, abs=1e-5)
    for level in ("0", "full attention"):  # which look at all cells
        for radius, value in uniform["within"].items():
            assert rows[layer, level]["within"][radius] == pytest.approx(value, abs=1e-5)
    near = [rows[layer, "message"]["within"][radius] for radius in ("1", "2", "4")]
    assert 0 < near[0] < near[1] < near[2] <= 1


def test_calibrated_networks_are_scored_and_timed(tmp_path, capsys, monkeypatch):
    """The packaged network on small images: fixed K first, then K of a mass."""
    monkeypatch.setitem(calibration.IMAGES, "stereo", (96, 64))
    monkeypatch.setattr(predictor, "SMALL", 1)  # images are not enlarged
    for name in ("2001_2003", "2005_2006"):
        write_pairs(tmp_path / "stereo" / f"MIDDLEBURY_{name}", ["a"])
    found = tmp_path / "calibration--here.json"
    options = "--tasks stereo --masses 0.6 --samples 1 --threads 1"
    assert command(f"quality calibration {options}", "--data", tmp_path, "--out", found) == 0
    told = capsys.readouterr().out
    assert "fixed K" in told and "0.6" in told and "EPE px" in told
    fixed, calibrated = read(found)["rows"]
    assert (fixed["case"]["mass"], calibrated["case"]["mass"]) == (None, 0.6)
    assert fixed["details"]["topk"].keys() == calibrated["details"]["topk"].keys()
    assert fixed["values"]["k"] != calibrated["values"]["k"]
    assert fixed["values"]["score"] != calibrated["values"]["score"]
    options = "--seconds-per-row 0.01 --threads 1"
    assert command(f"speed calibration {options}", "--results", found, "--out", tmp_path / "s") == 0
    assert "fixed K" in capsys.readouterr().out
    times = [row["values"]["median_ms"] for row in read(tmp_path / "s")["rows"]]
    assert len(times) == 2 and min(times) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("attention --textures nowhere", "--textures: there is no folder nowhere"),
        ("calibration --data nowhere", "--data: there is no folder nowhere/free_multiview"),
        ("calibration --masses 0.9,x", "--masses: must be numbers with commas, got '0.9,x'"),
        ("matching --data nowhere", "--data: there is no folder nowhere/scannet_sample"),
        ("matching --sets mars", "unknown 'mars'; known: scannet, graf"),
        ("matching --methods orb", "unknown 'orb'; known: matcher, guided, sift"),
        ("matching --weights mine=none.safetensors", "there is no file 'none.safetensors'"),
        ("matching --features 0", "must be at least 1, got 0"),
        ("stereo --data nowhere", "--data: there is no folder nowhere"),
        ("stereo --methods orb", "unknown 'orb'; known: network, sgbm"),
        ("stereo --max-disparity 0", "must be more than 0, got 0"),
    ],
)
def test_mistakes(options, message, capsys):
    assert message in refused(capsys, f"quality {options}")


def test_names_of_methods_differ(tmp_path, capsys):
    weights = tmp_path / "x.safetensors"
    weights.write_bytes(b"")
    options = ["--data", tmp_path, "--weights", f"SGBM={weights}"]
    assert "names must differ, got SGBM, and SGBM" in refused(capsys, "quality stereo", *options)


def test_a_folder_without_pairs(tmp_path, capsys):
    refused(
        capsys, "quality stereo --methods sgbm", "--data", tmp_path, "--out", tmp_path / "o.json"
    )
    assert not list(tmp_path.iterdir())


def write_classes(root):
    """Three images of two classes, to train on and to validate with."""
    tiny.write_data("classify", root)
    shutil.copytree(root / "val", root / "train")


def test_training_of_the_vision_transformer(tmp_path, monkeypatch):
    """At 14x14 tokens, then at 28x28, of some of the patches; weights move from where they were."""
    write_classes(tmp_path)
    out = tmp_path / "vit.safetensors"
    words = ["--data", tmp_path, "--out", out, "--device", "cpu", "--batch", 2]
    words += ["--minutes", "0.005,0.005", "--keep", "0.2,0.05"]
    monkeypatch.setattr("sys.argv", ["vit", *map(str, words)])
    vit.main()
    history = json.loads(out.with_suffix(".json").read_text())
    assert list(dict.fromkeys(row["tokens"] for row in history)) == [196, 784]
    assert all(row["loss"] > 0 and 0 <= row["top1"] <= 100 for row in history)
    torch.manual_seed(0)
    before, after = vit.make_vit().state_dict(), vit.load_vit(out).state_dict()
    moved = [not torch.equal(before[name], after[name]) for name in before if "qkv.w" in name]
    assert len(moved) == 6 and all(moved)
    torch.testing.assert_close(before, after, rtol=0, atol=0.1)


def test_variant_c_in_a_vision_transformer(result, tmp_path, capsys):
    """Random weights: all cells are dense attention, and few are nearer to it with means."""
    save_model(vit.make_vit(), weights := tmp_path / "vit.safetensors")
    write_classes(tmp_path)
    options = "--parts vit --sides 28 --topk 4,784 --images 2 --threads 1"
    made = result(f"quality accelerate {options}", "--vit", weights, "--tiny", tmp_path)
    assert "error of features" in capsys.readouterr().out
    rows = {(r["case"]["attention"], r["case"]["topk"]): r["values"] for r in made["rows"]}
    assert rows["dense", None]["feature_error"] == 0 == rows["dense", None]["top1"] % 50
    assert rows["C", 784]["feature_error"] < 1e-5
    assert 0 < rows["C", 4]["feature_error"] < rows["top-k", 4]["feature_error"]
    assert rows["calibrated", None]["mean_topk"] is not None
    assert "no folder" in refused(capsys, "quality accelerate --parts disk --data", tmp_path / "no")
    assert "part vit" in refused(capsys, "quality accelerate --parts vit")
