# SPDX-License-Identifier: Apache-2.0
"""`quadtree classify`: answers with bars, images that cannot be read, JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("timm", reason="models need timm")
typer_testing = pytest.importorskip("typer.testing", reason="the command needs typer")

from PIL import Image  # noqa: E402

import quadtree_attention  # noqa: E402
from quadtree_attention.cli.classify import ascii_bar, block_bar  # noqa: E402
from quadtree_attention.cli.main import app  # noqa: E402
from quadtree_attention.tasks.classify.predictor import Classifier  # noqa: E402
from tests.cli.test_info import START, command  # noqa: E402
from tests.tasks.classify.test_predictor import (  # noqa: E402
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


def run(*options: str, weights: str = "best.safetensors", **kwargs: object):
    arguments = ["classify", *options, "--weights", weights, "--device", "cpu"]
    return typer_testing.CliRunner().invoke(app, arguments, prog_name="quadtree", **kwargs)


def refused(*options: str) -> str:
    result = typer_testing.CliRunner().invoke(app, ["classify", *options], prog_name="quadtree")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("quadtree: ") and result.stderr.count("\n") == 1
    return result.stderr


# ---- in a process


def test_in_a_process(tmp_path):
    image = str(tmp_path / "photos" / "0.png")
    options = [image, "--weights", str(tmp_path / "best.safetensors"), "--device", "cpu"]
    environment = {"QUADTREE_BACKEND": "reference", "PYTHONIOENCODING": "utf-8"}
    done = command("classify", *options, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    expected = Classifier("best.safetensors", device="cpu")("photos/0.png")
    lines = done.stdout.splitlines()
    assert lines[0] == image and len(lines) == 1 + len(CLASSES)
    for line, prediction in zip(lines[1:], expected, strict=True):
        bar = block_bar(prediction.probability)
        assert line == f"  {prediction.probability * 100:5.1f} %  {bar:20}  {prediction.name}"
    plain = command("classify", *options, **environment | {"PYTHONIOENCODING": "ascii"})
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
    source = str(Path(quadtree_attention.__file__).parents[1])
    options = ["classify", "-", "--weights", str(tmp_path / "best.safetensors"), "--json"]
    done = subprocess.run(
        [sys.executable, "-c", START, *options],
        input=Path("photos/0.png").read_bytes(),
        env=os.environ | {"PYTHONPATH": source, "QUADTREE_BACKEND": "reference"},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    (answer,) = json.loads(done.stdout)
    assert answer["image"] == "-"
    best = Classifier("best.safetensors", device="cpu")("photos/0.png")[0]
    assert answer["predictions"][0]["name"] == best.name


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
    environment = {"QUADTREE_BACKEND": "reference", "PYTHONIOENCODING": "ascii"}
    done = command("classify", *options, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(line.split()[-1] for line in done.stdout.splitlines()[1:]) == [
        "?",
        "?",
        "Ameise",
        "K?fer",
    ]


@pytest.mark.parametrize(
    ("share", "blocks", "plain"),
    [
        (0.0, "", ""),
        (1.0, "█" * 20, "#" * 20),
        (0.5, "█" * 10, "#" * 10),
        (0.525, "█" * 10 + "▌", "#" * 10),
        (1 / 160, "▏", ""),
        (0.999, "█" * 20, "#" * 20),
    ],
)
def test_bars(share, blocks, plain):
    assert block_bar(share) == blocks
    assert ascii_bar(share) == plain


# ---- mistakes


def test_without_weights():
    message = refused("photos/0.png")
    assert "quadtree train classify --config RECIPE" in message
    assert "quadtree convert CHECKPOINT -o" in message


def test_weights_that_do_not_do(tmp_path):
    assert "there is no file 'none'" in refused("photos/0.png", "--weights", "none")
    write_weights(tmp_path / "backbone.safetensors", random_model(0), classes=None)
    message = refused("photos/0.png", "--weights", "backbone.safetensors")
    assert "no classifier, only a backbone" in message
    Path("official.pth").write_bytes(b"anything")
    message = refused("photos/0.png", "--weights", "official.pth")
    assert "quadtree convert official.pth -o official.safetensors" in message


def test_options_that_are_not_accepted():
    weights = ["--weights", "best.safetensors"]
    assert "topk must be at least 1, got 0" in refused("photos", *weights, "--top", "0")
    assert "no device 'abacus'" in refused("photos", *weights, "--device", "abacus")


def test_help():
    result = typer_testing.CliRunner().invoke(app, ["classify", "--help"], prog_name="quadtree")
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: quadtree classify [OPTIONS] {IMAGE}...")
    assert "Examples:\n    quadtree classify cat.jpg" in result.stdout
