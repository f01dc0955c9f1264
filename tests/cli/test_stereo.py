# SPDX-License-Identifier: Apache-2.0
"""`quadtree stereo`: one pair, two folders, and all that can be wrong with them."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from quadtree_attention.cli.stereo import pair_up
from quadtree_attention.errors import DataError
from quadtree_attention.tasks import Disparity, StereoMatcher
from quadtree_attention.tasks.stereo.formats import read_disparity
from tests.support import tiny
from tests.support.commands import row

pytestmark = pytest.mark.usefixtures("only_reference", "pair")
TASK = "stereo"
PAIR = ("a.png", "b.png")


@pytest.fixture(scope="module")
def expected(weights):
    return StereoMatcher.from_pretrained(weights, device="cpu")(*tiny.sample("stereo"))


@pytest.fixture
def folders(pair):
    """Three pairs of the same names, one of which is damaged."""
    for side, image in zip(("left", "right"), pair, strict=True):
        Path(side).mkdir()
        for name in ("a", "b", "c"):
            image.save(f"{side}/{name}.png")
    Path("right/b.png").write_bytes(b"no image")
    return "left", "right", "--save", "out"


# ---- one pair


def test_text_and_files(run, expected):
    result = run(*PAIR, "--out", "d.jpg", "--save", "d.pfm")
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert row(text, "disparity").endswith(f"median {np.median(expected.disparity):.1f}")
    assert row(text, "time").endswith(" s") and row(text, "device") == "cpu"
    assert row(text, "matched at") == "144x112 (of 72x56)"
    assert row(text, "written") == "d.jpg, d.pfm"
    np.testing.assert_allclose(read_disparity("d.pfm").values, expected.disparity, atol=1e-3)
    assert sorted(os.listdir()) == ["a.png", "b.png", "d.jpg", "d.pfm"]
    assert run(*PAIR).exit_code == 0
    with Image.open("disparity.png") as picture:  # if nothing else is asked for
        assert picture.width == expected.draw().width


def test_all_files(run, expected):
    options = ["--save", "d.npy", "--occlusion", "o.png", "--depth", "z.npy", "--size", "144"]
    options += ["--points", "p.ply"]
    result = run(*PAIR, *options, "--focal", 100, "--baseline", 0.5, "--offset", 2)
    assert result.exit_code == 0, result.output
    assert sorted(os.listdir()) == ["a.png", "b.png", "d.npy", "o.png", "p.ply", "z.npy"]
    np.testing.assert_allclose(np.load("d.npy"), expected.disparity)
    depth = expected.depth(100, 0.5, offset=2)
    np.testing.assert_allclose(np.load("z.npy"), depth)
    said = row(result.stdout, "depth")
    assert said == f"{depth.min():.4g} to {depth.max():.4g}, median {np.median(depth):.4g}"
    with Image.open("o.png") as picture:
        assert picture.tobytes() == expected.draw_occlusion().tobytes()


def test_json(run):
    result = run(*PAIR, "--json", "--size", "36", "--max-disparity", "500")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["left"], found["right"], found["written"]) == (*PAIR, [])
    assert (found["width"], found["height"], found["matched_at"]) == (72, 56, [36, 28])
    assert 0 <= found["disparity"]["min"] <= found["disparity"]["median"] <= 72
    assert any("max_disparity is 500" in said for said in found["warnings"])
    assert result.stderr.count("quadtree: warning: ") == len(found["warnings"])
    assert sorted(os.listdir()) == [*PAIR]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["a.png", "none.png"], "cannot read none.png: No such file or directory"),
        (["a.png", "small.png"], "same size, got 72x56 on the left, 45x25 on the right"),
        (["thin.png", "thin.png"], "at least 16 pixels a side, got 90x9"),
        (["a.png", "."], "must be two images or two folders, got 'a.png' and '.'"),
        ([*PAIR, "--out", "d.txt"], "pictures are written as .png"),
        ([*PAIR, "--save", "d.jpg"], "results are written as .npz, .npy, .pfm, .png"),
        ([*PAIR, "--occlusion", "o.npy"], "pictures are written as .png"),
        ([*PAIR, "--depth", "z.pfm", "--focal", 1, "--baseline", 1], "as .npy, got"),
        ([*PAIR, "--points", "z.obj", "--focal", 1, "--baseline", 1], "as .ply, got"),
        ([*PAIR, "--depth", "z.npy"], "got no --focal and no --baseline; give both"),
        ([*PAIR, "--focal", "9"], "got no --baseline; give both"),
        ([*PAIR, "--focal", "-9", "--baseline", 1], "focal must be above 0, got -9"),
        ([*PAIR, "--offset", "9"], "got no --focal and no --baseline; give both"),
        ([*PAIR, "--out", "no/d.png"], "there is no directory 'no' to write to"),
        ([*PAIR, "--out", "a.png"], "'a.png' is an input, it must not be replaced"),
        ([*PAIR, "--out", "d.png", "--save", "d.png"], "two results would be 'd.png'"),
        ([*PAIR, "--max-disparity", "0"], "max_disparity must be above 0"),
        ([*PAIR, "--size", "3"], "size must be at least 16"),
        ([*PAIR, "--force"], "--force has no effect for one pair; leave it out"),
    ],
)
def test_mistakes(fails, pair, options, words):
    pair[1].resize((45, 25)).save("small.png")
    pair[1].resize((90, 9)).save("thin.png")
    assert words in fails(*options)


def test_what_does_not_fit_into_the_format_is_not_written(fails, pair):
    """A 16-bit PNG ends at 256 pixels."""
    for name, image in zip(("wl.png", "wr.png"), pair, strict=True):
        image.resize((9000, 90)).save(name)
    message = fails("wl.png", "wr.png", "--save", "d.png", "--out", "p.png", "--size", "100")
    assert "a PNG of 16 bits holds disparities from 0 to" in message


# ---- folders


def test_folders(run, folders, expected):
    result = run(*folders)
    assert result.exit_code == 1
    assert row(result.stdout, "pairs") == "2 done, 1 failed"
    assert row(result.stdout, "written") == "out"
    (said,) = (line for line in result.stderr.splitlines() if "warning" not in line)
    assert said.startswith("quadtree: b: cannot decode right/b.png")
    assert sorted(os.listdir("out")) == ["a.jpg", "a.npz", "c.jpg", "c.npz", "settings.json"]
    stored = Disparity.load("out/c.npz")
    np.testing.assert_allclose(stored.disparity, expected.disparity, atol=1e-4)

    Image.open("left/b.png").save("right/b.png")
    result = run(*folders, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [pair["name"] for pair in found] == ["b"]  # the others are there
    assert found[0]["error"] is None and found[0]["median"] > 0


def test_other_formats_and_images_without_a_partner(run, folders, pair):
    Path("right/b.png").unlink()
    pair[0].save("right/z.png")
    result = run(*folders, "--format", "png")
    assert result.exit_code == 1 and row(result.stdout, "pairs") == "2 done, 0 failed"
    assert "quadtree: 2 image(s) without a partner: left/b.png, right/z.png\n" in result.stderr
    assert sorted(os.listdir("out")) == ["a.jpg", "a.png", "c.jpg", "c.png", "settings.json"]
    assert read_disparity("out/a.png").known.mean() > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["left", "right"], "two folders need --save OUT"),
        (["left", "right", "--save", "left"], "left contains the input images, which results"),
        (["left", "right", "--save", "out", "--out", "p.png"], "--out has no effect for two folde"),
        (["left", "right", "--save", "out", "--format", "tif"], "format must be one of npz, npy,"),
        (["left", "right", "--save", "a.png"], "the folder a.png cannot be made: File exists"),
        (["left", "empty", "--save", "out"], "no images in the folder empty"),
        (["left", "other", "--save", "out"], "no image in left has a partner in other"),
    ],
)
@pytest.mark.usefixtures("folders")
def test_mistakes_with_folders(fails, pair, options, words):
    for name in ("empty", "other"):
        Path(name).mkdir()
    pair[0].save("other/aa.png")
    assert words in fails(*options)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (["l/a.png", "l/b.jpg"], ["r/b.png", "r/a.png"], ["a", "b"]),
        (["x/left_1.png", "x/left_2.png"], ["y/right_2.png", "y/right_1.png"],
         ["left_1", "left_2"]),
        (["x/1_L.png"], ["x/1_R.png"], ["1_L"]),
        (["x/im0.png"], ["x/im1.png"], ["im0"]),
        (["x/cam2.png"], ["x/cam3.png"], ["cam2"]),
        (["x/Left-7.png"], ["x/Right-7.png"], ["Left-7"]),
        (["x/10.png"], ["x/11.png"], []),  # numbers of frames, not of cameras
        (["x/lion.png"], ["x/rion.png"], []),
    ],
)  # fmt: skip
def test_partners(left, right, expected):
    pairs, alone = pair_up(left, right)
    assert sorted(pairs) == expected
    for stem, (first, second) in pairs.items():
        assert Path(first).stem == stem and first in left and second in right
    assert len(alone) == len(left) + len(right) - 2 * len(pairs)


def test_partners_in_one_folder():
    both = ["x/a_left.png", "x/a_right.png", "x/b_left.png", "x/b_right.png", "x/c.png"]
    pairs, alone = pair_up(both, both)
    assert pairs == {"a_left": (both[0], both[1]), "b_left": (both[2], both[3])}
    assert alone == ["x/c.png"]
    with pytest.raises(DataError, match=r"x/a.png and x/a.jpg have the same name except for"):
        pair_up(["x/a.png", "x/a.jpg"], ["y/a.png"])
