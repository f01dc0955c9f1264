# SPDX-License-Identifier: Apache-2.0
"""`quadtree segment`: pictures, label maps, JSON, windows."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from quadtree_attention.tasks import Segmenter
from quadtree_attention.tasks.segment.readers import read_label_map
from tests.support.commands import contents

pytestmark = pytest.mark.usefixtures("only_reference", "photos")
TASK = "segment"


@pytest.fixture
def expected(weights):
    return Segmenter.from_pretrained(weights, device="cpu")("photos/0.png")


def files() -> list[str]:
    given = ("photos", "bad.jpg")
    return sorted(str(path) for path in contents() if path.parts[0] not in given)


def test_one_image(run, expected):
    done = run("photos/0.png")
    assert (done.exit_code, done.stderr) == (0, "")
    name, *shares, facts, written = done.stdout.splitlines()
    assert name == "photos/0.png" and written == "  written  segments.png"
    assert [line.split()[-1] for line in shares] == list(expected.shares())
    assert f"mean confidence {expected.confidence:.2f}" in facts
    with Image.open("segments.png") as picture:
        assert picture.width > 60


def test_pictures_and_label_maps(run, expected):
    result = run("photos/0.png", "--out", "a.jpg", "--save", "labels.png")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.endswith("  written  a.jpg, labels.png\n")
    assert files() == ["a.jpg", "labels.png"]
    assert np.array_equal(read_label_map("labels.png"), expected.labels)
    result = run("photos", "--out", "deep/pictures", "--save", "labels")
    assert (result.exit_code, result.stderr) == (0, "")
    names = [line for line in result.stdout.splitlines() if line[0] != " "]
    assert names == ["photos/0.png", "photos/1.png", "saved        labels"]
    labels = ["labels/0.png", "labels/1.png", "labels/settings.json"]
    assert files() == ["a.jpg", "deep/pictures/0.png", "deep/pictures/1.png", "labels.png", *labels]
    assert np.array_equal(read_label_map("labels/0.png"), expected.labels)
    assert run("photos").exit_code == 0
    assert sorted(os.listdir("segments")) == ["0.png", "1.png"]


def test_windows_and_size(run, fails):
    assert run("photos/0.png", "--save", "whole.png").exit_code == 0
    assert run("photos/0.png", "--save", "covered.png", "--window", "64").exit_code == 0
    options = ("--window", "24", "--stride", "20", "--shorter-side", "40")
    assert "seen at 53x40" in run("photos/0.png", "--save", "sliding.png", *options).stdout
    assert "seen at 40x30" in run("photos/0.png", "--size", "40").stdout
    assert Path("whole.png").read_bytes() == Path("covered.png").read_bytes()
    assert Path("whole.png").read_bytes() != Path("sliding.png").read_bytes()
    assert "got stride 8 and window None" in fails("photos/0.png", "--stride", "8")
