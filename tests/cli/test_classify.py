# SPDX-License-Identifier: Apache-2.0
"""`quadtree classify`: answers with bars, pictures, results in one file."""

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


def test_in_a_process(weights, tmp_path):
    image = str(tmp_path / "photos" / "0.png")
    options = [image, "--weights", weights, "--device", "cpu"]
    variables = {"QUADTREE_BACKEND": "reference", "PYTHONIOENCODING": "utf-8"}
    done = command("classify", *options, code=WITHOUT_TRAINING, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    first, *answers = done.stdout.splitlines()
    best = Classifier.from_pretrained(weights, device="cpu")(image)
    assert first == image and len(answers) == 2
    for line, wanted in zip(answers, best.to_text().splitlines(), strict=True):
        assert line.strip() == wanted.strip()


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
    # The labels of these images are unknown
    assert "has no label" in refused("evaluate", "classify", "--predictions", "answers.npz")
    answers = run("photos/0.png", "--json", "--top", "2").stdout
    assert answers.count('"probability"') == answers.count('"label"') == 2
