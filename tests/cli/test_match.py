# SPDX-License-Identifier: Apache-2.0
"""`quadtree match`: two images, many pairs, and all that can be wrong with them."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("poselib", reason="estimators need the extra 'models'")

from quadtree_attention.tasks import Matcher, Matches
from tests.support.commands import refused, row

pytestmark = pytest.mark.usefixtures("only_reference", "pair")
TASK, SIZE = "match", (128, 96)
CAMERAS = ("--K0", "120,120,64,48", "--K1", "120 0 64 0 120 48 0 0 1")
ALL = ("--threshold", "0", "--guided", "never")


# ---- two images


def test_text_and_files(run, weights, pair):
    result = run("a.png", "b.png", "--out", "m.png", "--save", "m.npz", *ALL, *CAMERAS)
    assert result.exit_code == 0, result.output
    expected = Matcher.from_pretrained(weights, device="cpu", threshold=0.0, guided="never")(*pair)
    text = result.stdout
    assert row(text, "matches").startswith(f"{len(expected)}, mean confidence 0.")
    assert row(text, "time").endswith(" s") and row(text, "device") == "cpu"
    assert row(text, "matched at") == "128x96 and 128x96"
    assert row(text, "written") == "m.png, m.npz"
    for estimator in ("poselib", "opencv"):
        found = row(text, f"by {estimator}")
        assert found.startswith("rotation ") and f" of {len(expected)} inliers" in found
    stored = Matches.load("m.npz")
    np.testing.assert_allclose(stored.keypoints0, expected.keypoints0, atol=1e-3)
    np.testing.assert_allclose(stored.keypoints1, expected.keypoints1, atol=1e-3)
    with Image.open("m.png") as picture:
        assert picture.width > 600
    assert sorted(os.listdir()) == ["a.png", "b.png", "m.npz", "m.png"]


def test_without_options_a_picture_is_drawn(run):
    result = run("a.png", "b.png")
    assert (result.exit_code, result.stderr) == (0, "")
    assert row(result.stdout, "written") == "matches.png"
    assert sorted(os.listdir()) == ["a.png", "b.png", "matches.png"]


def test_json(run, weights, pair):
    result = run("a.png", "b.png", "--json", *ALL, "--max", "5", "--size", "64")
    found = json.loads(result.stdout)
    matcher = Matcher.from_pretrained(weights, threshold=0.0, guided="never", size=64)
    matches = matcher(*pair).best(5)
    assert found["matches"] == len(matches) == len(found["confidence"]) > 0
    assert found["matched_at"] == [[64, 48], [64, 48]] and found["written"] == []
    np.testing.assert_allclose(found["keypoints1"], matches.keypoints1, atol=2e-3)
    assert sorted(os.listdir()) == ["a.png", "b.png"] and "poses" not in found
    posed = json.loads(run("a.png", "b.png", "--json", *ALL, *CAMERAS).stdout)
    for pose in posed["poses"].values():
        turn = np.array(pose["rotation"])
        np.testing.assert_allclose(turn @ turn.T, np.eye(3), atol=1e-6)
        assert np.linalg.norm(pose["translation"]) == pytest.approx(1)


def test_no_matches(run):
    nothing = ("--threshold", "0.99", "--guided", "never")
    result = run("a.png", "b.png", *nothing, "--save", "m.npz", *CAMERAS)
    assert (result.exit_code, result.stderr) == (0, "")
    assert row(result.stdout, "matches").startswith("none: the images have nothing in common")
    assert row(result.stdout, "by opencv") == "no pose: the matches do not determine one"
    stored = Matches.load("m.npz")
    assert stored.keypoints0.shape == stored.keypoints1.shape == (0, 2) and len(stored) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--out", "none/m.png"], "there is no directory 'none' to write to; make it first"),
        (["--out", "m.txt"], "pictures are written as .png, .jpg, .jpeg, .webp, got 'm.txt'"),
        (["--out", "folder.png"], "'folder.png' is a directory; write to another name"),
        (["--out", "./a.png"], "'a.png' is an input, it must not be replaced; write elsewhere"),
        (["--save", "m.txt"], "results are written as .npz, got 'm.txt'"),
        (["--save", "none/m.npz"], "there is no directory 'none' to write to"),
        (["--size", "8"], "size must be at least 16, got 8"),
        (["--threshold", "1"], "threshold must be in [0, 1), got 1.0"),
        (["--max", "0"], "max must be at least 1, got 0"),
        (["--K0", "1,1,1,1"], "the pose needs both cameras, got no --K1; give both or none"),
        (["--K0", "1,1,1", "--K1", "1,1,1,1"], "--K0 must be fx,fy,cx,cy in pixels, nine numbers"),
        (["--K0", "1,1,1,1", "--K1", "0,1,1,1"], "K1 must be a camera matrix (3, 3), [[fx, 0, cx"),
        (["--force"], "--force is for --pairs FILE; leave it out"),
        (["--save", "m.npz", "--images", "x"], "--images is for --pairs FILE; leave it out"),
        (["--pairs", "p.txt"], "--pairs excludes A, B; pass only one of them"),
    ],
)
def test_options_that_are_refused(fails, options, words):
    Path("folder.png").mkdir()
    assert words in fails("a.png", "b.png", *options)


def test_images_and_weights_that_are_refused(fails):
    Path("bad.jpg").write_bytes(b"hello")
    told = fails("a.png", "bad.jpg", "--out", "m.png", "--save", "m.npz")
    assert "cannot decode bad.jpg: it is not an image" in told
    assert "matching needs two images, got only 'a.png'; use quadtree match" in fails("a.png")
    assert "matching needs two images, got none; " in fails()
    missing = refused("match", "a.png", "b.png", "--weights", "x.safetensors")
    assert "there is no file 'x.safetensors'; check the path" in missing


# ---- many pairs


PAIRS = ("--pairs", "pairs.txt", "--save", "out", *ALL)


def test_pairs(run, weights, pair):
    Path("images").mkdir()
    for name in ("a.png", "b.png"):
        Path(name).rename(f"images/{name}")
    Path("images/bad.png").write_bytes(b"no image")
    Path("pairs.txt").write_text("a.png b.png\n\na.png bad.png\nb.png a.png 0 1\nnone.png a.png\n")
    result = run(*PAIRS, "--images", "images")
    assert result.exit_code == 1
    assert row(result.stdout, "pairs") == "2 done, 2 failed"
    assert row(result.stdout, "written") == "out"
    bad, none = result.stderr.splitlines()
    assert bad.startswith("quadtree: a__bad: cannot decode images/bad.png: it is not an image")
    assert none.startswith("quadtree: none__a: cannot read images/none.png: No such file")
    assert sorted(os.listdir("out")) == ["a__b.npz", "b__a.npz", "settings.json"]
    matcher = Matcher.from_pretrained(weights, threshold=0.0, guided="never")
    plain = matcher(*pair)
    assert np.array_equal(Matches.load("out/a__b.npz").keypoints1, plain.keypoints1)
    turned = matcher(pair[1], Image.fromarray(np.rot90(np.asarray(pair[0]), k=1)))
    assert np.array_equal(Matches.load("out/b__a.npz").keypoints1, turned.keypoints1)


def test_pairs_that_are_there_are_skipped(run, fails):
    Path("pairs.txt").write_text("a.png b.png\nb.png a.png\na.png b.png\n")
    assert row(run(*PAIRS).stdout, "pairs").startswith("2 done, 0 failed, 1 already done")
    os.unlink("out/b__a.npz")
    Path("out/a__b.npz").write_bytes(b"mine")
    (found,) = json.loads(run(*PAIRS, "--json").stdout)
    assert found["name"] == "b__a" and found["line"] == 2 and found["matches"] > 0
    assert Path("out/a__b.npz").read_bytes() == b"mine"
    message = fails(*PAIRS, "--size", "64")
    assert "out holds results of other settings: size None there, 64 now" in message
    # Nothing of other settings stays, as a later run of all pairs would take it for its own
    Path("pairs.txt").write_text("a.png b.png\n")
    assert run(*PAIRS, "--size", "64", "--force").exit_code == 0
    assert len(Matches.load("out/a__b.npz")) and "64" in Path("out/settings.json").read_text()
    assert sorted(os.listdir("out")) == ["a__b.npz", "settings.json"]


@pytest.mark.parametrize(
    ("pairs", "options", "words"),
    [
        ("a.png b.png\na.png b.png 0 7\n", PAIRS, "pairs.txt, line 2: rotation1 must be 0, 1, 2"),
        ("\n", PAIRS, "pairs.txt lists no pairs"),
        (f"{'a' * 200}.png {'b' * 200}.png", PAIRS, "line 1: the names of the images are too long"),
        ("a.png b.png", [*PAIRS, "--images", "none"], "there is no folder of images 'none'; check"),
        ("a.png b.png", PAIRS[:2], "--pairs needs --save OUT"),
        ("a.png b.png", [*PAIRS, "--batch", "0"], "batch must be at least 1, got 0"),
        ("a.png b.png", [*PAIRS, "--save", "a.png"], "the folder a.png cannot be made: File exist"),
        ("a.png b.png", [*PAIRS, *CAMERAS], "--pairs excludes --K0, --K1; pass only one of"),
        ("a.png b.png", ["--pairs", "none.txt", *PAIRS[2:]], "there is no file 'none.txt'"),
    ],
)
def test_files_of_pairs_that_are_refused(fails, pairs, options, words):
    Path("pairs.txt").write_text(pairs)
    assert words in fails(*options)
    assert not Path("out").exists()
