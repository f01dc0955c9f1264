# SPDX-License-Identifier: Apache-2.0
"""`quadtree classify`: answers with bars, images that cannot be read, JSON."""

import json
from pathlib import Path

import pytest

from quadtree_attention.tasks import Classifier
from tests.support import tiny
from tests.support.commands import START, command, invoke, refused

pytestmark = pytest.mark.usefixtures("only_reference", "photos")
TASK = "classify"


WITHOUT_TRAINING = f"""
import sys
for name in ("pytorch_lightning", "lightning", "jsonargparse", "torchmetrics"):
    sys.modules[name] = None  # an import of it fails
{START}
"""


def best(weights, image="photos/0.png"):
    return Classifier.from_pretrained(weights, device="cpu")(image)


def test_in_a_process(weights, tmp_path):
    image = str(tmp_path / "photos" / "0.png")
    options = [image, "--weights", weights, "--device", "cpu"]
    variables = {"QUADTREE_BACKEND": "reference", "PYTHONIOENCODING": "utf-8"}
    done = command("classify", *options, code=WITHOUT_TRAINING, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    first, *answers = done.stdout.splitlines()
    assert first == image
    assert [line.strip() for line in answers] == [
        line.strip() for line in best(weights).to_text().splitlines()
    ]


def test_bad_images_are_named_and_the_others_classified(run):
    images = ["photos/0.png", "bad.jpg", "none.png", "photos/1.png"]
    result = run(*images, "--top", "1")
    assert result.exit_code == 1
    assert [line for line in result.stdout.splitlines() if line[0] != " "] == images[::3]
    bad, none = result.stderr.splitlines()
    assert bad.startswith("quadtree: cannot decode bad.jpg: ")
    assert none == "quadtree: cannot read none.png: No such file or directory; check the path"
    result = run(*images, "--top", "2", "--json")
    answers = json.loads(result.stdout)
    assert result.exit_code == 1 and [answer["image"] for answer in answers] == images
    assert result.stderr.splitlines() == [f"quadtree: {a['error']}" for a in answers[1:3]]
    assert "predictions" not in answers[1] and len(answers[0]["predictions"]) == 2
    assert set(answers[0]["predictions"][0]) == {"label", "name", "probability"}


def test_standard_input(run, weights):
    result = run("-", "--json", input=Path("photos/0.png").read_bytes())
    assert (result.exit_code, result.stderr) == (0, "")
    (answer,) = json.loads(result.stdout)
    assert answer["image"] == "-"
    assert answer["predictions"][0]["name"] == best(weights).names[0]


def test_a_folder_stands_for_its_images(run):
    Path("empty/inner").mkdir(parents=True)
    result = run("photos", "--top", "1", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    names = [answer["image"] for answer in json.loads(result.stdout)]
    assert names == ["photos/0.png", "photos/1.png"]
    result = run("empty", "photos/0.png", "--json")
    assert result.exit_code == 1
    assert result.stderr.startswith("quadtree: there are no images in the folder empty: names must")
    assert [answer["image"] for answer in json.loads(result.stdout)] == ["photos/0.png"]


def test_an_output_without_the_characters():
    tiny.write_weights(TASK, Path("umlauts.safetensors"), classes=["Käfer", "猫"])
    options = ("photos/0.png", "--weights", "umlauts.safetensors")
    result = invoke("classify", *options, charset="ascii")
    assert (result.exit_code, result.stderr) == (0, "") and "#" in result.stdout
    names = [line.split()[-1] for line in result.stdout.splitlines()[1:]]
    assert sorted(names) == ["?", "K?fer"]


def test_pictures_and_one_file_for_all(run):
    result = run("photos", "--out", "drawn", "--save", "answers.npz", "--top", "2")
    assert result.exit_code == 0, result.output
    assert sorted(p.name for p in Path("drawn").iterdir()) == ["0.png", "1.png"]
    assert "2 there already" in run("photos", "--save", "answers.npz", "--top", "2").stdout
    # The labels of these images are unknown
    assert "has no label" in refused("evaluate", "classify", "--predictions", "answers.npz")


def test_refusals(fails):
    assert "top must be at least 1, got 0" in fails("photos", "--top", "0")
    assert "no device 'abacus'" in fails("photos", "--device", "abacus")
    assert "are both 'x.npz'" in fails("photos", "--out", "x.npz", "--save", "x.npz")
    photo = ("classify", "photos/0.png")
    assert "no weights of the task classify come with the package" in refused(*photo)
    assert "there is no file 'none'" in refused(*photo, "--weights", "none")
    Path("official.pth").write_bytes(b"anything")
    message = refused(*photo, "--weights", "official.pth")
    assert "quadtree convert official.pth" in message
