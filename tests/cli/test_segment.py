# SPDX-License-Identifier: Apache-2.0
"""`quadtree segment`: pictures, label maps, JSON, images that cannot be read."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from quadtree_attention.tasks import Segmenter
from quadtree_attention.tasks.segment.readers import read_label_map
from tests.support.commands import contents, refused

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
    assert [float(line.split()[0]) for line in shares] == pytest.approx(
        [100 * share for share in expected.shares().values()], abs=0.06
    )
    assert f"mean confidence {expected.confidence:.2f}" in facts
    with Image.open("segments.png") as picture:
        assert picture.width > 60
    plain = run("photos/0.png", charset="ascii")
    (line, *_) = (line for line in plain.stdout.splitlines() if "%" in line)
    share = max(expected.shares().values())
    assert "?" not in line and line.count("#") == pytest.approx(20 * share, abs=0.51)


def test_pictures_and_label_maps(run, expected):
    result = run("photos/0.png", "--out", "a.jpg", "--save", "labels.png")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.endswith("  written  a.jpg, labels.png\n")
    assert files() == ["a.jpg", "labels.png"]
    assert np.array_equal(read_label_map("labels.png"), expected.labels)
    result = run("photos", "bad.jpg", "--out", "deep/pictures", "--save", "labels")
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    names = [line for line in result.stdout.splitlines() if line[0] != " "]
    assert names == ["photos/0.png", "photos/1.png", "saved        labels"]
    labels = ["labels/0.png", "labels/1.png", "labels/settings.json"]
    assert files() == ["a.jpg", "deep/pictures/0.png", "deep/pictures/1.png", "labels.png", *labels]
    assert np.array_equal(read_label_map("labels/0.png"), expected.labels)
    assert run("photos").exit_code == 0
    assert sorted(os.listdir("segments")) == ["0.png", "1.png"]


def test_json_and_bad_images(run, expected):
    result = run("photos/0.png", "bad.jpg", "none.png", "photos/1.png", "--json")
    assert result.exit_code == 1
    first, bad, none, last = json.loads(result.stdout)
    assert result.stderr.splitlines() == [f"quadtree: {r['error']}" for r in (bad, none)]
    assert bad["error"].startswith("cannot decode bad.jpg: ") and none["image"] == "none.png"
    assert (first["size"], first["seen"], first["written"]) == ([60, 45], [60, 45], [])
    assert {c["name"]: c["share"] for c in first["classes"]} == pytest.approx(
        expected.shares(), abs=1e-6
    )
    assert first["classes"][0]["label"] == expected.names.index(first["classes"][0]["name"])
    assert last["image"] == "photos/1.png" and files() == []
    Path("empty").mkdir()
    result = run("empty", "--json", "--out", "out")
    assert (result.exit_code, json.loads(result.stdout)) == (1, [])
    assert "there are no images in the folder empty" in result.stderr and files() == []


def test_windows_and_size(run):
    assert run("photos/0.png", "--save", "whole.png").exit_code == 0
    assert run("photos/0.png", "--save", "covered.png", "--window", "64").exit_code == 0
    options = ("--window", "24", "--stride", "20", "--shorter-side", "40")
    assert "seen at 53x40" in run("photos/0.png", "--save", "sliding.png", *options).stdout
    assert "seen at 40x30" in run("photos/0.png", "--size", "40").stdout
    assert Path("whole.png").read_bytes() == Path("covered.png").read_bytes()
    assert Path("whole.png").read_bytes() != Path("sliding.png").read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["photos", "--out", "a.png"], "--out must be a folder for 2 images, got 'a.png'"),
        (["photos", "--save", "a.png"], "--save must be a folder for 2 images, got 'a.png'"),
        (["photos/0.png", "--save", "a.jpg"], "results are written as .png, got 'a.jpg'"),
        (["photos/0.png", "--out", "no/a.png"], "there is no directory 'no' to write to"),
        (["photos", "--out", "photos"], "'photos/0.png' is an input, it must not be replaced"),
        (["photos", "--out", "x", "--save", "x"], "--out and --save are both 'x'"),
        (["photos/0.png", "photos/0.png", "--out", "x"], "have the same name"),
        (["photos/0.png", "--out", "x.png", "--save", "x.png"], "two results would be 'x.png'"),
        (["photos/0.png", "--stride", "8"], "got stride 8 and window None"),
        (["photos/0.png", "--size", "0"], "size must be at least 1, got 0"),
        (["photos", "--out", "bad.jpg/x"], "cannot be made: Not a directory"),
    ],
)
def test_mistakes(fails, options, message):
    assert message in fails(*options)


def test_without_weights():
    told = refused("segment", "photos/0.png")
    assert "no weights of the task segment come with the package" in told
    assert "quadtree train" in told
