# SPDX-License-Identifier: Apache-2.0
"""Scores of disparities in files, and the files themselves."""

import json

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("timm", reason="weights need timm")
pytest.importorskip("cv2", reason="checking pairs needs the extra 'models'")

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.tasks.stereo.evaluate import evaluate, predict
from quadtree_attention.tasks.stereo.formats import write_disparity
from quadtree_attention.tasks.stereo.predictor import StereoMatcher
from quadtree_attention.tasks.stereo.results import (
    file_name,
    prediction_path,
    prepare_folder,
    read_prediction,
    read_settings,
)
from quadtree_attention.tasks.stereo.sources import open_stereo
from tests.conftest import ROOT
from tests.tasks.stereo.test_predictor import rendered, write_weights

pytestmark = pytest.mark.usefixtures("only_reference")

SIZE = (50, 90)  # height, width


def write_pairs(root, names=("a", "b")):
    """Pairs of the layout "folder": true disparity 8, but 20 in the lower half; none at the top."""
    left, right = rendered(SIZE)
    for folder in ("left", "right", "disparity", "occlusion"):
        (root / folder).mkdir(parents=True)
    truth = np.full(SIZE, 8.0, np.float32)
    truth[25:] = 20
    truth[:5] = np.nan
    hidden = np.zeros(SIZE, np.uint8)
    hidden[:, :20] = 255
    for name in names:
        left.save(root / "left" / f"{name}.png")
        right.save(root / "right" / f"{name}.png")
        write_disparity(root / "disparity" / f"{name}.pfm", truth)
        Image.fromarray(hidden).save(root / "occlusion" / f"{name}.png")
    return root


def write_answer(path, values, occlusion=None):
    more = {} if occlusion is None else {"occlusion": occlusion}
    np.savez(path, disparity=values, **more)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("weights") / "tiny.safetensors")


@pytest.fixture(scope="module")
def matcher(weights):
    return StereoMatcher(weights, size=64)


# ---- scores


def test_scores(data, tmp_path):
    truth = np.full(SIZE, 8.0, np.float32)
    truth[25:] = 20
    wrong = truth.copy()
    wrong[:, :20] += 10  # what is hidden
    wrong[:, 20:40] += 1.5  # 20 of the 70 columns that are not
    half = np.zeros(SIZE, np.float32)
    half[:, :10] = 1
    write_answer(tmp_path / "a.npz", truth, half)
    write_answer(tmp_path / "b.npz", wrong, half)
    scores = evaluate(open_stereo(data), tmp_path)
    a, b = scores.pairs
    assert (a.name, b.name) == ("a", "b")
    assert a.scores["epe_all"] == 0 and a.scores["d1_all"] == 0 and a.scores["bad1_noc"] == 0
    assert b.scores["epe_noc"] == pytest.approx(1.5 * 20 / 70)
    assert b.scores["epe_all"] == pytest.approx((10 * 20 + 1.5 * 20) / 90)
    assert b.scores["bad1_all"] == pytest.approx(100 * 40 / 90)
    assert b.scores["bad2_noc"] == b.scores["bad3_noc"] == b.scores["d1_noc"] == 0
    assert b.scores["d1_all"] == b.scores["bad3_all"] == pytest.approx(100 * 20 / 90)
    assert a.scores["occlusion_iou"] == pytest.approx(0.5)
    assert scores.mean["epe_all"] == pytest.approx(b.scores["epe_all"] / 2)
    assert (scores.missing, scores.skipped, scores.settings) == ((), (), None)
    assert json.loads(json.dumps(scores.as_dict(), allow_nan=False))["mean"]["epe_all"] > 0


def test_answers_of_other_programs(data, tmp_path):
    """Without occlusion; what they leave out counts as a disparity of zero."""
    truth = np.full(SIZE, 8.0, np.float32)
    truth[25:] = 20
    write_disparity(tmp_path / "a.png", truth)
    truth[25:] = np.nan
    write_disparity(tmp_path / "b.pfm", truth)
    a, b = evaluate(open_stereo(data), tmp_path).pairs
    assert a.scores["epe_all"] == 0 and "occlusion_iou" not in a.scores
    assert b.scores["epe_noc"] == pytest.approx(20 * 25 / 45)  # of 45 rows that are known


def test_missing_pairs_are_told_and_damaged_ones_left_out(tmp_path):
    root = write_pairs(tmp_path / "data", ("a", "b", "c"))
    (root / "right" / "c.png").write_bytes(b"no image")
    out = tmp_path / "out"
    out.mkdir()
    for name in ("a", "c"):
        write_answer(out / f"{name}.npz", np.full(SIZE, 8.0, np.float32))
    scores = evaluate(open_stereo(root), out)
    assert [pair.name for pair in scores.pairs] == ["a"] and scores.missing == ("b",)
    assert len(scores.skipped) == 1 and "c.png" in scores.skipped[0]


def test_answers_that_do_not_do(data, tmp_path):
    source = open_stereo(data)
    with pytest.raises(DataError, match=r"there is no folder .*none of predictions"):
        evaluate(source, tmp_path / "none")
    with pytest.raises(DataError, match=r"has predictions for none of 2 pairs, such as a.npz"):
        evaluate(source, tmp_path)
    write_answer(tmp_path / "a.npz", np.ones((50, 91)))
    with pytest.raises(DataError, match=r"a.npz must have the size of its pair, 90x50, got 91x50"):
        evaluate(source, tmp_path)
    write_answer(tmp_path / "a.npz", np.ones(SIZE), np.ones((2, 2)))
    with pytest.raises(DataError, match=r"a.npz must hold an occlusion \(50, 90\).* got \(2, 2\)"):
        evaluate(source, tmp_path)
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 broken")
    with pytest.raises(DataError, match=r"cannot read .*a.npz"):
        evaluate(source, tmp_path)


# ---- predictions


def test_predictions_are_written_once_and_scored(data, tmp_path, matcher, weights):
    source, out = open_stereo(data), tmp_path / "out"
    done = predict(matcher, source, out, data="here")
    assert (done.made, done.there, done.skipped) == (2, 0, ())
    assert sorted(p.name for p in out.iterdir()) == ["a.npz", "b.npz", "settings.json"]
    expected = matcher(data / "left" / "a.png", data / "right" / "a.png")
    stored = read_prediction(out / "a.npz")
    assert np.array_equal(stored.disparity, expected.disparity)
    assert np.abs(stored.occlusion - expected.occlusion).max() < 1e-3
    settings = read_settings(out)
    assert settings["size"] == 64 and len(settings["weights_sha256"]) == 64
    assert evaluate(source, out).settings == settings

    written = (out / "a.npz").stat().st_mtime_ns
    (out / "b.npz").unlink()  # as after an interruption
    done = predict(matcher, source, out, data="here")
    assert (done.made, done.there) == (1, 1)
    assert (out / "a.npz").stat().st_mtime_ns == written
    with pytest.raises(OptionError, match=r"holds a.npz of other images, or of unknown"):
        predict(matcher, source, out, data="there")
    other = StereoMatcher(weights, size=48)
    with pytest.raises(OptionError, match=r"made with other weights or options .*--force"):
        predict(other, source, out, data="here")
    assert read_settings(out)["size"] == 64 and (out / "a.npz").stat().st_mtime_ns == written
    assert predict(other, source, out, data="here", force=True).made == 2
    assert read_settings(out)["size"] == 48


def test_pairs_that_cannot_be_read(tmp_path, matcher):
    root = write_pairs(tmp_path / "data")
    (root / "left" / "a.png").write_bytes(b"no image")
    done = predict(matcher, open_stereo(root), tmp_path / "out")
    assert done.made == 1 and len(done.skipped) == 1 and "a.png" in done.skipped[0]
    (root / "left" / "b.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"none of 2 pairs can be read, the first because: .*a.png"):
        predict(matcher, open_stereo(root), tmp_path / "other")


def test_folders_that_do_not_do(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=r"the folder .*file cannot be made: File exists"):
        prepare_folder(tmp_path / "file", {}, {}, force=False)
    (tmp_path / "settings.json").write_text("{broken")
    with pytest.raises(OptionError, match="made with other weights or options"):
        prepare_folder(tmp_path, {"size": 1}, {}, force=False)
    prepare_folder(tmp_path, {"size": 1}, {}, force=True)
    assert read_settings(tmp_path) == {"size": 1}
    (tmp_path / "a.npz").write_bytes(b"of another program")
    with pytest.raises(OptionError, match=r"holds a.npz of other images, or of unknown ones"):
        prepare_folder(tmp_path, {"size": 1}, {"a": ["1"]}, force=False)
    assert (tmp_path / "a.npz").read_bytes() == b"of another program"


def test_what_other_settings_made_goes_and_nothing_else_does(tmp_path):
    folder = prepare_folder(tmp_path / "out", {"size": 1}, {"x/a": ["1"], "b": ["2"]}, force=False)
    for name in ("x__a.npz", "b.npz", "b.jpg", "mine.npz", "c.npz", "c.pfm"):
        (folder / name).write_bytes(b"")
    prepare_folder(folder, {"size": 2}, {"c": ["3"]}, force=True, suffix=".pfm")
    assert sorted(p.name for p in folder.iterdir()) == ["c.npz", "mine.npz", "settings.json"]


def test_names_with_folders(tmp_path):
    assert file_name("training/000046_10") == "training__000046_10"
    assert prediction_path(tmp_path, "training/1") is None
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "1.pfm").write_bytes(b"")
    assert prediction_path(tmp_path, "training/1") == tmp_path / "training" / "1.pfm"
    (tmp_path / "training__1.npz").write_bytes(b"")
    assert prediction_path(tmp_path, "training/1") == tmp_path / "training__1.npz"


def test_the_truth_of_real_pairs_scores_best(tmp_path):
    root = ROOT.parent / "shared" / "data" / "stereo"
    if not root.is_dir():
        pytest.skip("the pairs of ../shared/data/stereo are not here")
    source = open_stereo(root / "MIDDLEBURY_2001_2003")
    for index in range(len(source)):
        sample = source.read(index)
        path = tmp_path / f"{file_name(sample.name)}.npz"
        write_answer(path, sample.disparity, sample.occluded.astype(np.float32))
    scores = evaluate(source, tmp_path)
    assert len(scores.pairs) == 4
    assert scores.mean["epe_all"] == scores.mean["d1_noc"] == 0
    assert scores.mean["occlusion_iou"] == 1
