# SPDX-License-Identifier: Apache-2.0
"""`quadtree segment`: pictures, label maps, JSON, images that cannot be read."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("timm", reason="models need timm")
typer_testing = pytest.importorskip("typer.testing", reason="the command needs typer")

from PIL import Image  # noqa: E402

from quadtree_attention.cli.main import app  # noqa: E402
from quadtree_attention.tasks.segment.predictor import Segmenter  # noqa: E402
from quadtree_attention.tasks.segment.readers import read_label_map  # noqa: E402
from tests.tasks.segment.files import photo, write_weights  # noqa: E402

pytestmark = pytest.mark.usefixtures("only_reference")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("segment")
    write_weights(folder / "best.safetensors")
    (folder / "photos").mkdir()
    for i in range(2):
        Image.fromarray(photo(30 + i, 44, seed=i)).save(folder / "photos" / f"{i}.png")
    (folder / "bad.jpg").write_bytes(b"hello")
    return folder


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("best.safetensors", "best.json", "photos", "bad.jpg"):
        Path(name).symlink_to(folder / name)


def run(*options: str):
    arguments = ["segment", *options, "--weights", "best.safetensors", "--device", "cpu"]
    return typer_testing.CliRunner().invoke(app, arguments, prog_name="quadtree")


def refused(*options: str, weights: bool = True) -> str:
    given = ["--weights", "best.safetensors", "--device", "cpu"] if weights else []
    arguments = ["segment", *options, *given]
    result = typer_testing.CliRunner().invoke(app, arguments, prog_name="quadtree")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("quadtree: ") and result.stderr.count("\n") == 1
    return result.stderr


def files(folder: str = ".") -> list[str]:
    return sorted(
        str(path) for path in Path(folder).rglob("*") if path.is_file() and not path.is_symlink()
    )


def expected():
    return Segmenter.from_pretrained("best.safetensors", device="cpu")("photos/0.png")


def test_one_image():
    done = run("photos/0.png")
    assert (done.exit_code, done.stderr) == (0, "")
    name, *shares, facts, written = done.stdout.splitlines()
    found = expected()
    assert name == "photos/0.png"
    assert [line.split()[-1] for line in shares] == list(found.shares())
    assert [float(line.split()[0]) for line in shares] == pytest.approx(
        [100 * share for share in found.shares().values()], abs=0.06
    )
    assert f"mean confidence {found.confidence:.2f}" in facts
    assert written == "  written  segments.png"
    with Image.open("segments.png") as picture:
        assert picture.width > 44


def test_picture_and_label_map_of_one_image():
    result = run("photos/0.png", "--out", "a.jpg", "--save", "labels.png")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.endswith("  written  a.jpg, labels.png\n")
    assert files() == ["a.jpg", "labels.png"]
    assert np.array_equal(read_label_map("labels.png"), expected().labels)


def test_many_images_go_to_folders():
    result = run("photos", "--out", "deep/pictures", "--save", "labels")
    assert (result.exit_code, result.stderr) == (0, "")
    labels = ["labels/0.png", "labels/1.png", "labels/settings.json"]
    assert files() == ["deep/pictures/0.png", "deep/pictures/1.png", *labels]
    assert np.array_equal(read_label_map("labels/0.png"), expected().labels)
    names = [line for line in result.stdout.splitlines() if line[0] != " "]
    assert names == ["photos/0.png", "photos/1.png", "saved        labels"]
    assert run("photos").exit_code == 0
    assert files("segments") == ["segments/0.png", "segments/1.png"]


def test_json_and_bad_images():
    result = run("photos/0.png", "bad.jpg", "none.png", "photos/1.png", "--json")
    assert result.exit_code == 1
    first, bad, none, last = json.loads(result.stdout)
    assert result.stderr.splitlines() == [f"quadtree: {r['error']}" for r in (bad, none)]
    assert bad["error"].startswith("cannot decode bad.jpg: ") and none["image"] == "none.png"
    found = expected()
    assert (first["size"], first["seen"], first["written"]) == ([44, 30], [44, 30], [])
    assert {c["name"]: c["share"] for c in first["classes"]} == pytest.approx(
        found.shares(), abs=1e-6
    )
    assert first["classes"][0]["label"] == found.names.index(first["classes"][0]["name"])
    assert last["image"] == "photos/1.png" and files() == []


def test_a_bad_image_leaves_nothing_behind():
    result = run("bad.jpg", "photos/1.png", "--out", "out", "--save", "labels")
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert files() == ["labels/1.png", "labels/settings.json", "out/1.png"]


def test_windows_and_size():
    assert run("photos/0.png", "--save", "whole.png").exit_code == 0
    assert run("photos/0.png", "--save", "covered.png", "--window", "64").exit_code == 0
    options = ("--window", "24", "--stride", "20", "--shorter-side", "40")
    result = run("photos/0.png", "--save", "sliding.png", *options)
    assert "seen at 59x40" in result.stdout
    assert "seen at 40x27" in run("photos/0.png", "--size", "40").stdout
    assert Path("whole.png").read_bytes() == Path("covered.png").read_bytes()
    assert Path("whole.png").read_bytes() != Path("sliding.png").read_bytes()


def test_a_folder_without_images():
    Path("empty").mkdir()
    result = run("empty", "--json", "--out", "out")
    assert (result.exit_code, json.loads(result.stdout)) == (1, [])
    assert "there are no images in the folder empty" in result.stderr
    assert not Path("out").exists()


def test_without_weights():
    told = refused("photos/0.png", weights=False)
    assert "no weights of the task segment come with the package" in told
    assert "quadtree train" in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["photos", "--out", "a.png"], "--out must be a folder for 2 images, got 'a.png'"),
        (["photos", "--save", "a.png"], "--save must be a folder for 2 images, got 'a.png'"),
        (["photos/0.png", "--out", "a.gif"], "pictures are written as .png"),
        (["photos/0.png", "--save", "a.jpg"], "results are written as .png, got 'a.jpg'"),
        (["photos/0.png", "--out", "no/a.png"], "there is no directory 'no' to write to"),
        (["photos", "--out", "photos"], "'photos/0.png' is an input, it must not be replaced"),
        (["photos", "--out", "x", "--save", "x"], "--out and --save are both 'x'"),
        (["photos/0.png", "photos/0.png", "--out", "x"], "have the same name"),
        (["photos/0.png", "--out", "x.png", "--save", "x.png"], "two results would be 'x.png'"),
        (["photos/0.png", "--stride", "8"], "got stride 8 and window None"),
        (["photos/0.png", "--window", "8", "--stride", "9"], "stride must be from 1 to the window"),
        (["photos/0.png", "--size", "0"], "size must be at least 1, got 0"),
        (["photos", "--out", "bad.jpg/x"], "cannot be made: Not a directory"),
    ],
)
def test_mistakes(options, message):
    before = os.listdir()
    assert message in refused(*options)
    assert os.listdir() == before


def test_bars_without_blocks():
    arguments = ["segment", "photos/0.png", "--weights", "best.safetensors", "--device", "cpu"]
    result = typer_testing.CliRunner(charset="ascii").invoke(app, arguments)
    (line, *_) = (line for line in result.stdout.splitlines() if "%" in line)
    share = max(expected().shares().values())
    assert "?" not in line and line.count("#") == pytest.approx(20 * share, abs=0.51)


def test_help():
    result = typer_testing.CliRunner().invoke(app, ["segment", "--help"], prog_name="quadtree")
    assert result.exit_code == 0
    assert "Examples:\n    quadtree segment street.jpg" in result.stdout
