# SPDX-License-Identifier: Apache-2.0
"""`quadtree stereo`: one pair, two folders, and all that can be wrong with them."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("timm", reason="weights need timm")
pytest.importorskip("cv2", reason="checking pairs needs the extra 'models'")
typer_testing = pytest.importorskip("typer.testing", reason="the command needs typer")

from quadtree_attention.cli.main import app  # noqa: E402
from quadtree_attention.cli.stereo import pair_up  # noqa: E402
from quadtree_attention.errors import DataError  # noqa: E402
from quadtree_attention.tasks import Disparity, StereoMatcher  # noqa: E402
from quadtree_attention.tasks.stereo.formats import read_disparity  # noqa: E402
from tests.cli.test_info import command  # noqa: E402
from tests.tasks.stereo.test_predictor import rendered, write_weights  # noqa: E402

pytestmark = pytest.mark.usefixtures("only_reference")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("weights") / "tiny.safetensors")


@pytest.fixture(scope="module")
def photos() -> tuple[Image.Image, Image.Image]:
    return rendered((50, 90))


@pytest.fixture(scope="module")
def expected(weights, photos):
    return StereoMatcher.from_pretrained(weights, device="cpu")(*photos)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch, photos):
    monkeypatch.chdir(tmp_path)
    for name, photo in zip(("l.png", "r.png"), photos, strict=True):
        photo.save(name)


@pytest.fixture
def run(weights):
    def run(*options: object):
        arguments = ["stereo", *map(str, options), "--weights", str(weights), "--device", "cpu"]
        return typer_testing.CliRunner().invoke(app, arguments, prog_name="quadtree")

    return run


@pytest.fixture
def refused(run):
    """The one line that says why not; no file appears or changes."""

    def refused(*options: object) -> str:
        before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
        result = run(*options)
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        assert result.stderr.startswith("quadtree: ") and result.stderr.count("\n") == 1
        assert before == {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
        return result.stderr

    return refused


@pytest.fixture
def folders(photos):
    """Three pairs of the same names, one of which is damaged."""
    for side, photo in zip(("left", "right"), photos, strict=True):
        Path(side).mkdir()
        for name in ("a", "b", "c"):
            photo.save(f"{side}/{name}.png")
    Path("right/b.png").write_bytes(b"no image")
    return "left", "right", "--save", "out"


def row(text: str, name: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name:11}  "))
    return line.removeprefix(name).strip()


# ---- one pair


def test_in_a_process(tmp_path, weights, expected):
    paths = [str(tmp_path / name) for name in ("l.png", "r.png", "d.jpg", "d.pfm")]
    done = command(
        "stereo", *paths[:2], "--out", paths[2], "--save", paths[3], "--weights", str(weights),
        "--device", "cpu", QUADTREE_BACKEND="reference",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert row(done.stdout, "disparity").endswith(f"median {np.median(expected.disparity):.1f}")
    assert row(done.stdout, "time").endswith(" s") and row(done.stdout, "device") == "cpu"
    assert row(done.stdout, "matched at") == "180x100 (of 90x50)"
    assert row(done.stdout, "written") == f"{paths[2]}, {paths[3]}"
    stored = read_disparity(paths[3]).values
    np.testing.assert_allclose(stored, expected.disparity, atol=1e-3)
    assert sorted(os.listdir()) == ["d.jpg", "d.pfm", "l.png", "r.png"]


def test_a_picture_is_drawn_if_nothing_else_is_asked_for(run, expected):
    assert run("l.png", "r.png").exit_code == 0
    with Image.open("disparity.png") as picture:
        assert picture.width == expected.draw().width
    assert sorted(os.listdir()) == ["disparity.png", "l.png", "r.png"]


def test_all_files(run, expected):
    options = ["--save", "d.npy", "--occlusion", "o.png", "--depth", "z.npy", "--size", "180"]
    result = run("l.png", "r.png", *options, "--focal", 100, "--baseline", 0.5, "--offset", 2)
    assert result.exit_code == 0, result.output
    assert sorted(os.listdir()) == ["d.npy", "l.png", "o.png", "r.png", "z.npy"]
    np.testing.assert_allclose(np.load("d.npy"), expected.disparity)
    depth = expected.depth(100, 0.5, offset=2)
    np.testing.assert_allclose(np.load("z.npy"), depth)
    said = row(result.stdout, "depth")
    assert said == f"{depth.min():.4g} to {depth.max():.4g}, median {np.median(depth):.4g}"
    with Image.open("o.png") as picture:
        assert picture.tobytes() == expected.draw_occlusion().tobytes()


def test_json(run, expected):
    result = run("l.png", "r.png", "--json", "--size", "45", "--max-disparity", "500")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["left"], found["right"], found["written"]) == ("l.png", "r.png", [])
    assert (found["width"], found["height"], found["matched_at"]) == (90, 50, [45, 25])
    assert 0 <= found["disparity"]["min"] <= found["disparity"]["median"] <= 90
    assert any("max_disparity is 500" in said for said in found["warnings"])
    assert result.stderr.count("quadtree: warning: ") == len(found["warnings"])
    assert sorted(os.listdir()) == ["l.png", "r.png"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["l.png", "none.png"], "cannot read none.png: No such file or directory"),
        (["l.png", "small.png"], "same size, got 90x50 on the left, 45x25 on the right"),
        (["tiny.png", "tiny.png"], "at least 16 pixels a side, got 90x9"),
        (["l.png", "."], "must be two images or two folders, got 'l.png' and '.'"),
        (["l.png", "r.png", "--out", "d.txt"], "pictures are written as .png"),
        (["l.png", "r.png", "--save", "d.jpg"], "results are written as .npz, .npy, .pfm, .png"),
        (["l.png", "r.png", "--occlusion", "o.npy"], "pictures are written as .png"),
        (["l.png", "r.png", "--depth", "z.pfm", "--focal", 1, "--baseline", 1], "as .npy, got"),
        (["l.png", "r.png", "--depth", "z.npy"], "got no --focal and no --baseline; give both"),
        (["l.png", "r.png", "--focal", "9"], "got no --baseline; give both"),
        (["l.png", "r.png", "--focal", "-9", "--baseline", 1], "focal must be above 0, got -9"),
        (["l.png", "r.png", "--offset", "9"], "got no --focal and no --baseline; give both"),
        (["l.png", "r.png", "--out", "no/d.png"], "there is no directory 'no' to write to"),
        (["l.png", "r.png", "--out", "l.png"], "'l.png' is an input, it must not be replaced"),
        (["l.png", "r.png", "--out", "d.png", "--save", "d.png"], "two results would be 'd.png'"),
        (["l.png", "r.png", "--max-disparity", "0"], "max_disparity must be above 0"),
        (["l.png", "r.png", "--size", "3"], "size must be at least 16"),
        (["l.png", "r.png", "--save", "out"], "results are written as .npz"),
        (["l.png", "r.png", "--force"], "--force has no effect for one pair; leave it out"),
    ],
)
def test_mistakes(refused, photos, weights, options, words):
    photos[1].resize((45, 25)).save("small.png")
    photos[1].resize((90, 9)).save("tiny.png")
    assert words in refused(*options)


def test_what_does_not_fit_into_the_format_is_not_written(run, tmp_path, photos):
    """A 16-bit PNG ends at 256 pixels."""
    for name, photo in zip(("wl.png", "wr.png"), photos, strict=True):
        photo.resize((9000, 90)).save(name)
    result = run("wl.png", "wr.png", "--save", "d.png", "--out", "p.png", "--size", "100")
    assert result.exit_code == 2 and "a PNG of 16 bits holds disparities from 0 to" in result.stderr
    assert not Path("d.png").exists() and not Path("p.png").exists()


# ---- folders


def test_folders(run, folders, expected):
    result = run(*folders)
    assert result.exit_code == 1
    assert row(result.stdout, "pairs") == "2 done, 1 failed"
    assert row(result.stdout, "written") == "out"
    lines = [line for line in result.stderr.splitlines() if "warning" not in line]
    assert lines[0].startswith("quadtree: b: cannot decode right/b.png") and len(lines) == 1
    assert sorted(os.listdir("out")) == ["a.jpg", "a.npz", "c.jpg", "c.npz", "settings.json"]
    stored = Disparity.load("out/c.npz")
    np.testing.assert_allclose(stored.disparity, expected.disparity, atol=1e-4)

    Image.open("left/b.png").save("right/b.png")
    written = os.stat("out/a.npz").st_mtime_ns
    result = run(*folders)
    assert result.exit_code == 0, result.output
    assert row(result.stdout, "pairs") == (
        "1 done, 0 failed, 2 there already (--force computes them again)"
    )
    assert os.stat("out/a.npz").st_mtime_ns == written
    result = run(*folders, "--size", "45")
    assert result.exit_code == 2 and "size None there, 45 now" in result.stderr
    result = run(*folders, "--size", "45", "--force", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [pair["name"] for pair in found] == ["a", "b", "c"]
    assert all(pair["error"] is None and pair["median"] > 0 for pair in found)


def test_other_formats(run, folders):
    assert run(*folders, "--format", "png").exit_code == 1
    assert sorted(os.listdir("out")) == ["a.jpg", "a.png", "c.jpg", "c.png", "settings.json"]
    assert read_disparity("out/a.png").known.mean() > 0


def test_images_without_a_partner(run, folders, photos):
    Path("right/b.png").unlink()
    photos[0].save("right/z.png")
    result = run(*folders)
    assert result.exit_code == 1 and row(result.stdout, "pairs") == "2 done, 0 failed"
    assert "quadtree: 2 image(s) without a partner: left/b.png, right/z.png\n" in result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "two folders need --save OUT"),
        (["--save", "left"], "left holds the images, results beside them could replace some"),
        (["--save", "out", "--out", "p.png"], "--out has no effect for two folders"),
        (["--save", "out", "--format", "tif"], "format must be one of npz, npy, pfm, png"),
        (["--save", "l.png"], "the folder l.png cannot be made: File exists"),
    ],
)
def test_mistakes_with_folders(refused, folders, options, words):
    assert words in refused(*folders[:2], *options)
    assert not Path("out").exists()


def test_folders_without_pairs(refused, folders):
    Path("empty").mkdir()
    assert "no images in the folder empty" in refused("left", "empty", "--save", "out")
    for name in ("a", "b", "c"):
        os.rename(f"right/{name}.png", f"right/{name}{name}.png")
    assert "no image in left has a partner in right" in refused(*folders)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (["l/a.png", "l/b.jpg"], ["r/b.png", "r/a.png"], ["a", "b"]),
        (
            ["x/left_1.png", "x/left_2.png"],
            ["y/right_2.png", "y/right_1.png"],
            ["left_1", "left_2"],
        ),
        (["x/1_L.png"], ["x/1_R.png"], ["1_L"]),
        (["x/im0.png"], ["x/im1.png"], ["im0"]),
        (["x/cam2.png"], ["x/cam3.png"], ["cam2"]),
        (["x/Left-7.png"], ["x/Right-7.png"], ["Left-7"]),
        (["x/10.png"], ["x/11.png"], []),  # numbers of frames, not of cameras
        (["x/lion.png"], ["x/rion.png"], []),
    ],
)
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
    with pytest.raises(DataError, match=r"x/a.png and x/a.jpg have the same name but for the suff"):
        pair_up(["x/a.png", "x/a.jpg"], ["y/a.png"])


def test_help():
    result = typer_testing.CliRunner().invoke(app, ["stereo", "--help"], prog_name="quadtree")
    for word in ("--max-disparity", "--format", "--occlusion", "--baseline", "differ only"):
        assert word in result.stdout
