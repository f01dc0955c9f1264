# SPDX-License-Identifier: Apache-2.0
"""`quadtree classify`: answers with bars, images that cannot be read, JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("timm", reason="models need timm")

from PIL import Image

from quadtree_attention.tasks import Classifier
from tests.support.commands import START, command, environment, invoke, refused
from tests.tasks.classify.test_predictor import (
    CLASSES,
    jpeg,
    pixels,
    random_model,
    write_weights,
)

pytestmark = pytest.mark.usefixtures("only_reference")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_weights(Path("best.safetensors"))
    Path("photos").mkdir()
    for i in range(3):
        Image.fromarray(pixels(60 + i, 45, seed=i)).save(f"photos/{i}.png")
    Path("photos/notes.txt").write_text("hello")
    Path("bad.jpg").write_bytes(jpeg()[:600])


def run(*options):
    return invoke("classify", *options, "--weights", "best.safetensors", "--device", "cpu")


def best(image):
    return Classifier.from_pretrained("best.safetensors", device="cpu")(image)


# ---- in a process


def test_in_a_process(tmp_path):
    image = str(tmp_path / "photos" / "0.png")
    options = [image, "--weights", str(tmp_path / "best.safetensors"), "--device", "cpu"]
    done = command("classify", *options, QUADTREE_BACKEND="reference", PYTHONIOENCODING="utf-8")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == image and len(lines) == 1 + len(CLASSES)
    assert [line.strip() for line in lines[1:]] == [
        line.strip() for line in best("photos/0.png").to_text().splitlines()
    ]
    plain = command("classify", *options, QUADTREE_BACKEND="reference", PYTHONIOENCODING="ascii")
    assert (plain.returncode, plain.stderr) == (0, "")
    assert plain.stdout.isascii() and "#" in plain.stdout


def test_bad_images_in_a_process(tmp_path):
    names = [
        str(tmp_path / name) for name in ("photos/0.png", "bad.jpg", "none.png", "photos/1.png")
    ]
    options = ["--weights", str(tmp_path / "best.safetensors"), "--top", "1"]
    done = command("classify", *names, *options, QUADTREE_BACKEND="reference")
    assert done.returncode == 1
    assert [line for line in done.stdout.splitlines() if not line.startswith(" ")] == [
        names[0],
        names[3],
    ]
    bad, none = done.stderr.splitlines()
    assert bad.startswith(f"quadtree: cannot decode {names[1]}: ")
    assert none == f"quadtree: cannot read {names[2]}: No such file or directory; check the path"


def test_standard_input(tmp_path):
    options = ["classify", "-", "--weights", str(tmp_path / "best.safetensors"), "--json"]
    done = subprocess.run(
        [sys.executable, "-c", START, *options],
        input=Path("photos/0.png").read_bytes(),
        env=environment(QUADTREE_BACKEND="reference"),
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    (answer,) = json.loads(done.stdout)
    assert answer["image"] == "-"
    assert answer["predictions"][0]["name"] == best("photos/0.png").names[0]


# ---- what is printed


def test_json():
    result = run("photos/0.png", "bad.jpg", "photos/2.png", "--top", "2", "--json")
    assert result.exit_code == 1
    first, bad, last = json.loads(result.stdout)
    assert [first["image"], bad["image"], last["image"]] == [
        "photos/0.png",
        "bad.jpg",
        "photos/2.png",
    ]
    assert bad["error"].startswith("cannot decode bad.jpg: ") and "predictions" not in bad
    assert len(first["predictions"]) == 2
    assert set(first["predictions"][0]) == {"label", "name", "probability"}
    assert result.stderr == f"quadtree: {bad['error']}\n"


def test_a_folder_stands_for_its_images():
    result = run("photos", "--top", "1", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    names = [answer["image"] for answer in json.loads(result.stdout)]
    assert names == ["photos/0.png", "photos/1.png", "photos/2.png"]


def test_a_folder_without_images():
    Path("empty/inner").mkdir(parents=True)
    result = run("empty", "photos/0.png", "--json")
    assert result.exit_code == 1
    assert result.stderr.startswith("quadtree: there are no images in the folder empty: names must")
    assert [answer["image"] for answer in json.loads(result.stdout)] == ["photos/0.png"]


def test_names_that_the_output_has_no_characters_for(tmp_path):
    names = ["Ameise", "Käfer", "猫", "犬"]
    path = str(write_weights(tmp_path / "umlauts.safetensors", classes=names))
    options = [str(tmp_path / "photos/0.png"), "--weights", path]
    done = command("classify", *options, QUADTREE_BACKEND="reference", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(line.split()[-1] for line in done.stdout.splitlines()[1:]) == [
        "?",
        "?",
        "Ameise",
        "K?fer",
    ]


def test_pictures_and_one_file_for_all():
    result = run("photos", "--out", "drawn", "--save", "answers.npz", "--top", "2")
    assert result.exit_code == 0, result.output
    assert sorted(p.name for p in Path("drawn").iterdir()) == ["0.png", "1.png", "2.png"]
    again = run("photos", "--save", "answers.npz", "--top", "2")
    assert "3 there already" in again.stdout
    # The labels of these images are unknown
    assert "has no label" in refused("evaluate", "classify", "--predictions", "answers.npz")


# ---- mistakes


def test_without_weights():
    message = refused("classify", "photos/0.png")
    assert "no weights of the task classify come with the package" in message


def test_weights_that_do_not_do(tmp_path):
    photo = ("classify", "photos/0.png", "--weights")
    assert "there is no file 'none'" in refused(*photo, "none")
    write_weights(tmp_path / "backbone.safetensors", random_model(0), classes=None)
    assert "no classifier, only a backbone" in refused(*photo, "backbone.safetensors")
    Path("official.pth").write_bytes(b"anything")
    assert "quadtree convert official.pth" in refused(*photo, "official.pth")


def test_options_that_are_not_accepted():
    photos = ("classify", "photos", "--weights", "best.safetensors")
    assert "top must be at least 1, got 0" in refused(*photos, "--top", "0")
    assert "no device 'abacus'" in refused(*photos, "--device", "abacus")


def test_help():
    result = invoke("classify", "--help")
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: quadtree classify [OPTIONS] {IMAGE}...")
    assert "Examples:\n    quadtree classify cat.jpg" in result.stdout
