# SPDX-License-Identifier: Apache-2.0
"""`quadtree match`: two images, many pairs, and all that can be wrong with them."""

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("timm", reason="weights need timm")
pytest.importorskip("poselib", reason="estimators need the extra 'models'")
typer_testing = pytest.importorskip("typer.testing", reason="the command needs typer")

from quadtree_attention.cli.main import app  # noqa: E402
from quadtree_attention.tasks import Matcher, Matches  # noqa: E402
from tests.cli.test_info import command  # noqa: E402
from tests.conftest import ROOT  # noqa: E402
from tests.tasks.match.test_predictor import write_weights  # noqa: E402

pytestmark = pytest.mark.usefixtures("only_reference")

EXAMPLES = ROOT / "examples" / "images"
CAMERAS = ("--K0", "120,120,64,48", "--K1", "120 0 64 0 120 48 0 0 1")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("weights") / "tiny.safetensors")


@pytest.fixture(scope="module")
def photos() -> tuple[Image.Image, Image.Image]:
    pair = (Image.open(EXAMPLES / f"scene{i}.jpg") for i in range(2))
    first, second = (image.convert("RGB").resize((128, 96)) for image in pair)
    return first, second


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch, photos):
    monkeypatch.chdir(tmp_path)
    for name, photo in zip(("a.png", "b.png"), photos, strict=True):
        photo.save(name)


@pytest.fixture
def run(weights):
    def run(*options: object):
        arguments = ["match", *map(str, options), "--weights", str(weights), "--device", "cpu"]
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


def row(text: str, name: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name:11}  "))
    return line.removeprefix(name).strip()


# ---- two images


def test_in_a_process(tmp_path, weights, photos):
    paths = [str(tmp_path / name) for name in ("a.png", "b.png", "m.png", "m.npz")]
    done = command(
        "match", *paths[:2], "--out", paths[2], "--save", paths[3], "--weights", str(weights),
        "--device", "cpu", "--threshold", "0", *CAMERAS, QUADTREE_BACKEND="reference",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    expected = Matcher.from_pretrained(weights, device="cpu", threshold=0.0)(*photos)
    assert row(done.stdout, "matches").startswith(f"{len(expected)}, mean confidence 0.")
    assert row(done.stdout, "time").endswith(" s") and row(done.stdout, "device") == "cpu"
    assert row(done.stdout, "matched at") == "128x96 and 128x96"
    assert row(done.stdout, "written") == f"{paths[2]}, {paths[3]}"
    for estimator in ("poselib", "opencv"):
        found = row(done.stdout, f"by {estimator}")
        assert found.startswith("rotation ") and f" of {len(expected)} inliers" in found
    stored = Matches.load(paths[3])
    np.testing.assert_allclose(stored.keypoints0, expected.keypoints0, atol=1e-3)
    np.testing.assert_allclose(stored.keypoints1, expected.keypoints1, atol=1e-3)
    with Image.open(paths[2]) as picture:
        assert picture.width > 600
    assert sorted(os.listdir()) == ["a.png", "b.png", "m.npz", "m.png"]


def test_mistake_in_a_process(tmp_path, weights):
    paths = str(tmp_path / "a.png"), str(tmp_path / "none.png")
    done = command("match", *paths, "--weights", str(weights))
    line = f"quadtree: cannot read {paths[1]}: No such file or directory; check the path\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


def test_debugging_shows_where_a_mistake_arises(run):
    result = run("a.png", "none.png", "--debug")
    assert result.exit_code == 2
    assert result.stderr.startswith("Traceback (most recent call last)")
    assert result.stderr.endswith(
        "\nquadtree: cannot read none.png: No such file or directory; check the path\n"
    )


def test_without_options_a_picture_is_drawn(run):
    result = run("a.png", "b.png")
    assert (result.exit_code, result.stderr) == (0, "")
    assert row(result.stdout, "written") == "matches.png"
    assert sorted(os.listdir()) == ["a.png", "b.png", "matches.png"]


def test_json(run, weights, photos):
    result = run("a.png", "b.png", "--json", "--threshold", "0", "--max", "5", "--size", "64")
    found = json.loads(result.stdout)
    matches = Matcher.from_pretrained(weights, threshold=0.0, size=64)(*photos).best(5)
    assert found["matches"] == len(matches) == len(found["confidence"]) > 0
    assert found["matched_at"] == [[64, 48], [64, 48]] and found["written"] == []
    np.testing.assert_allclose(found["keypoints1"], matches.keypoints1, atol=2e-3)
    assert sorted(os.listdir()) == ["a.png", "b.png"] and "poses" not in found
    posed = json.loads(run("a.png", "b.png", "--json", "--threshold", "0", *CAMERAS).stdout)
    for pose in posed["poses"].values():
        turn = np.array(pose["rotation"])
        np.testing.assert_allclose(turn @ turn.T, np.eye(3), atol=1e-6)
        assert np.linalg.norm(pose["translation"]) == pytest.approx(1)


def test_no_matches(run):
    result = run("a.png", "b.png", "--threshold", "0.99", "--save", "m.npz", *CAMERAS)
    assert (result.exit_code, result.stderr) == (0, "")
    assert row(result.stdout, "matches").startswith("none: the images have nothing in common")
    assert row(result.stdout, "by opencv") == "no pose: the matches do not determine one"
    stored = Matches.load("m.npz")
    assert stored.keypoints0.shape == stored.keypoints1.shape == (0, 2) and len(stored) == 0


def unusual(photo: Image.Image) -> dict[str, Image.Image]:
    grey = np.asarray(photo.convert("L"), np.uint16)
    return {
        "one": Image.new("L", (1, 1), 200),
        "black": Image.new("RGB", (96, 64)),
        "wide": photo.resize((20_000, 60)),
        "palette": photo.convert("P"),
        "alpha": photo.convert("RGBA"),
        "grey_alpha": photo.convert("LA"),
        "deep": Image.fromarray(grey * 257),
    }


@pytest.mark.parametrize("kind", ["one", "black", "wide", "palette", "alpha", "grey_alpha", "deep"])
def test_unusual_images(run, photos, kind):
    unusual(photos[0])[kind].save("odd.png")
    result = run("odd.png", "b.png", "--threshold", "0", "--size", "128", "--save", "m.npz")
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    found = Matches.load("m.npz")
    if kind in ("alpha", "deep"):  # the same picture in more bits
        photos[0].convert("L" if kind == "deep" else "RGB").save("plain.png")
        assert run("plain.png", "b.png", "--threshold", "0", "--save", "n.npz").exit_code == 0
        assert np.array_equal(found.keypoints1, Matches.load("n.npz").keypoints1) and len(found)
    if kind in ("one", "black"):
        assert len(found) == 0


# ---- what is refused


def damaged() -> bytes:
    file = io.BytesIO()
    Image.effect_noise((96, 64), 50).save(file, "JPEG")
    return file.getvalue()[:900]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read bad.jpg: No such file or directory; check the path"),
        (b"", "cannot decode bad.jpg: it is empty; get it again"),
        (b"hello", "cannot decode bad.jpg: it is not an image"),
        (damaged(), "cannot decode bad.jpg: image file is truncated"),
    ],
)
def test_images_that_cannot_be_read(refused, content, words):
    if content is not None:
        Path("bad.jpg").write_bytes(content)
    assert words in refused("bad.jpg", "a.png")
    assert words in refused("a.png", "bad.jpg", "--out", "m.png", "--save", "m.npz")


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
        (["--threshold", "1"], "threshold must be from 0 to below 1, got 1.0"),
        (["--max", "0"], "max must be at least 1, got 0"),
        (["--K0", "1,1,1,1"], "the pose needs both cameras, got no --K1; give both or none"),
        (["--K0", "1,1,1", "--K1", "1,1,1,1"], "--K0 must be fx,fy,cx,cy in pixels, nine numbers"),
        (["--K0", "1,1,1,1", "--K1", "0,1,1,1"], "K1 must be a camera matrix (3, 3), [[fx, 0, cx"),
        (["--force"], "--force is for --pairs FILE; leave it out"),
        (["--save", "m.npz", "--images", "x"], "--images is for --pairs FILE; leave it out"),
        (["--pairs", "p.txt"], "--pairs excludes A, B; leave out one or the other"),
    ],
)
def test_options_that_do_not_do(refused, options, words):
    Path("folder.png").mkdir()
    assert words in refused("a.png", "b.png", *options)


def test_devices_and_weights_that_are_not_there():
    def refused(*options: str) -> str:
        arguments = ["match", "a.png", "b.png", *options]
        result = typer_testing.CliRunner().invoke(app, arguments, prog_name="quadtree")
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert sorted(os.listdir()) == ["a.png", "b.png"]
        return result.stderr

    assert "there is no file 'x.safetensors'; check the path" in refused(
        "--weights", "x.safetensors"
    )
    assert "there is no device 'gpu' here" in refused("--device", "gpu")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folders_that_may_not_be_written(refused):
    Path("locked").mkdir(mode=0o500)
    assert "'locked' may not be written to" in refused("a.png", "b.png", "--out", "locked/m.png")


def test_fewer_images_than_two(refused):
    assert "matching needs two images, got only 'a.png'; quadtree match" in refused("a.png")
    assert "matching needs two images, got none; " in refused()


# ---- many pairs


PAIRS = ("--pairs", "pairs.txt", "--save", "out", "--threshold", "0")


def test_pairs(run, weights, photos):
    Path("images").mkdir()
    Path("a.png").rename("images/a.png")
    Path("b.png").rename("images/b.png")
    Path("images/bad.png").write_bytes(damaged())
    Path("pairs.txt").write_text("a.png b.png\n\na.png bad.png\nb.png a.png 0 1\nnone.png a.png\n")
    result = run(*PAIRS, "--images", "images")
    assert result.exit_code == 1
    assert row(result.stdout, "pairs") == "2 done, 2 failed"
    assert row(result.stdout, "written") == "out"
    lines = result.stderr.splitlines()
    assert lines[0].startswith("quadtree: a__bad: cannot decode images/bad.png: image file is trun")
    assert lines[1].startswith("quadtree: none__a: cannot read images/none.png: No such file")
    assert len(lines) == 2
    assert sorted(os.listdir("out")) == ["a__b.npz", "b__a.npz", "settings.json"]
    matcher = Matcher.from_pretrained(weights, threshold=0.0)
    plain = matcher(*photos)
    assert np.array_equal(Matches.load("out/a__b.npz").keypoints1, plain.keypoints1)
    turned = matcher(photos[1], Image.fromarray(np.rot90(np.asarray(photos[0]), k=1)))
    assert np.array_equal(Matches.load("out/b__a.npz").keypoints1, turned.keypoints1)


def test_pairs_that_are_there_are_skipped(run, refused):
    Path("pairs.txt").write_text("a.png b.png\nb.png a.png\na.png b.png\n")
    assert row(run(*PAIRS).stdout, "pairs").startswith("2 done, 0 failed, 1 there already")
    os.unlink("out/b__a.npz")
    Path("out/a__b.npz").write_bytes(b"mine")
    result = run(*PAIRS, "--json")
    (found,) = json.loads(result.stdout)
    assert found["name"] == "b__a" and found["line"] == 2 and found["matches"] > 0
    assert Path("out/a__b.npz").read_bytes() == b"mine"
    message = refused(*PAIRS, "--size", "64")
    assert "out holds results of other settings: size None there, 64 now" in message
    assert run(*PAIRS, "--size", "64", "--force").exit_code == 0
    assert len(Matches.load("out/a__b.npz")) and "64" in Path("out/settings.json").read_text()


def test_nothing_by_other_settings_stays(run):
    """A later run of all pairs would take it for its own."""
    Path("pairs.txt").write_text("a.png b.png\nb.png a.png\n")
    assert run(*PAIRS).exit_code == 0
    Path("pairs.txt").write_text("a.png b.png\n")
    assert run(*PAIRS, "--size", "64", "--force").exit_code == 0
    assert sorted(os.listdir("out")) == ["a__b.npz", "settings.json"]


def test_matches_of_other_images_are_not_taken_for_those_asked_for(run, refused):
    for name in ("x", "y"):
        Path(name).mkdir()
    for source, copies in (("a.png", ("x/1.png", "y/2.png")), ("b.png", ("x/2.png", "y/1.png"))):
        for copy in copies:
            Path(copy).write_bytes(Path(source).read_bytes())
    Path("pairs.txt").write_text("1.png 2.png\n")
    Path("more.txt").write_text("1.png 2.png\n2.png 1.png\n")
    Path("turned.txt").write_text("1.png 2.png 0 1\n")
    assert run(*PAIRS, "--images", "x").exit_code == 0
    before = Path("out/1__2.npz").read_bytes()
    other = "out holds results of other data as 1__2; write to another name, or replace them"
    assert other in refused(*PAIRS, "--images", "y")
    assert other in refused("--pairs", "turned.txt", *PAIRS[2:], "--images", "x")
    assert run("--pairs", "more.txt", *PAIRS[2:], "--images", "./x").exit_code == 0
    assert Path("out/1__2.npz").read_bytes() == before
    assert run(*PAIRS, "--images", "y", "--force").exit_code == 0
    assert Path("out/1__2.npz").read_bytes() != before
    assert "2__1" in refused("--pairs", "more.txt", *PAIRS[2:], "--images", "y")  # still of x


@pytest.mark.parametrize(
    ("pairs", "options", "words"),
    [
        ("a.png b.png\na.png b.png 0 7\n", PAIRS, "pairs.txt, line 2: rotation1 must be 0, 1, 2"),
        ("a.png b.png\na.png\n", PAIRS, "pairs.txt, line 2: a line must have 2 (image0 image1), 4"),
        ("\n", PAIRS, "pairs.txt lists no pairs"),
        (f"{'a' * 200}.png {'b' * 200}.png", PAIRS, "line 1: the names of the images are too long"),
        ("a.png b.png", [*PAIRS, "--images", "none"], "there is no folder of images 'none'; check"),
        ("a.png b.png", PAIRS[:2], "--pairs needs --save OUT"),
        (
            "a.png b.png",
            [*PAIRS[:2], "--save", "a.png"],
            "the folder a.png cannot be made: Fil",
        ),
        (
            "a.png b.png",
            [*PAIRS, *CAMERAS],
            "--pairs excludes --K0, --K1; leave out one or the other",
        ),
        ("a.png b.png", ["--pairs", "none.txt", *PAIRS[2:]], "cannot read none.txt: No such file"),
    ],
)
def test_files_of_pairs_that_do_not_do(refused, pairs, options, words):
    Path("pairs.txt").write_text(pairs)
    assert words in refused(*options)
    assert not Path("out").exists()


def test_help():
    result = typer_testing.CliRunner().invoke(app, ["match", "--help"], prog_name="quadtree")
    for word in ("--K0", "--pairs", "--save", "--threshold", "quarters counter-clockwise"):
        assert word in result.stdout
