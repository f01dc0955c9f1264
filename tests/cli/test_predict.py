# SPDX-License-Identifier: Apache-2.0
"""The driver of `classify`, `detect` and `segment`: folders, bad images, files, mistakes."""

import json
import os
from pathlib import Path

import pytest

from tests.support.commands import refused

pytestmark = pytest.mark.usefixtures("only_reference", "photos")
OWN = {"classify": ("--top", "1"), "detect": ("--threshold", "0"), "segment": ()}
SAVED = {"classify": "all.npz", "detect": "all.json", "segment": "all"}


@pytest.fixture(scope="module", params=OWN)
def task(request):
    return request.param


def test_images_that_cannot_be_read(run, task):
    images = ["photos/0.png", "bad.jpg", "none.png", "photos/1.png"]
    result = run(*images, *OWN[task], "--out", "deep/out")
    assert result.exit_code == 1
    assert [line for line in result.stdout.splitlines() if line[0] != " "] == images[::3]
    bad, none = result.stderr.splitlines()
    assert bad.startswith("quadtree: cannot decode bad.jpg: ")
    assert none == "quadtree: cannot read none.png: No such file or directory; check the path"
    assert sorted(os.listdir("deep/out")) == ["0.png", "1.png"]
    result = run(*images, *OWN[task], "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 1 and [one["image"] for one in found] == images
    assert result.stderr.splitlines() == [f"quadtree: {one['error']}" for one in found[1:3]]
    assert found[1].keys() == {"image", "error"} and found[0]["written"] == []
    assert sorted(os.listdir()) == ["bad.jpg", "deep", "photos"]


def test_a_folder_stands_for_its_images(run, task):
    Path("empty/inner").mkdir(parents=True)
    result = run("photos", *OWN[task], "--save", SAVED[task], "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert [one["image"] for one in json.loads(result.stdout)] == ["photos/0.png", "photos/1.png"]
    assert "2 already done" in run("photos", *OWN[task], "--save", SAVED[task]).stdout
    for others in ([], ["photos/0.png"]):
        result = run("empty", *others, "--json", "--out", "out")
        message = "quadtree: there are no images in the folder empty: names must"
        assert result.exit_code == 1 and result.stderr.startswith(message)
        assert [one["image"] for one in json.loads(result.stdout)] == others


def test_standard_input(run, task):
    result = run("-", "--json", *OWN[task], input=Path("photos/0.png").read_bytes())
    assert (result.exit_code, result.stderr) == (0, "")
    (found,) = json.loads(result.stdout)
    (same,) = json.loads(run("photos/0.png", "--json", *OWN[task]).stdout)
    assert found.pop("image") == "-" and same.pop("image") == "photos/0.png"
    found.pop("seconds", None), same.pop("seconds", None)
    assert found == same


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("photos --out a.png", "--out must be a folder for 2 images, got 'a.png'"),
        ("photos/0.png --out no/a.png", "there is no directory 'no' to write to"),
        ("photos/0.png --out a.gif", "pictures are written as"),
        ("photos --out bad.jpg/x", "cannot be made: Not a directory"),
        ("photos --out photos", "'photos/0.png' is an input, it must not be replaced"),
        ("photos/0.png --out photos/0.png", "'photos/0.png' is an input, it must not be replaced"),
        ("photos 0.jpg --out x", "have the same name"),
        ("photos/0.png --save a.doc", "results are written as"),
        ("photos --device abacus", "no device 'abacus'"),
        ("photos --size 0", "size must be at least"),
        ("photos --batch 0", "batch must be at least 1"),
    ],
)
def test_mistakes(fails, options, message):
    Path("0.jpg").write_bytes(Path("photos/0.png").read_bytes())
    assert message in fails(*options.split())


def test_one_name_for_two_results(fails, task):
    name = SAVED[task]
    assert f"--out and --save are both '{name}'" in fails("photos", "--out", name, "--save", name)
    if task == "segment":  # whose results are pictures, too
        told = fails("photos/0.png", "--out", "x.png", "--save", "x.png")
        assert "two results would be 'x.png'" in told
        assert "--save must be a folder for 2 images" in fails("photos", "--save", "x.png")


def test_weights(task):
    photo = (task, "photos/0.png")
    told = refused(*photo)
    assert f"no weights of the task {task} come with the package" in told
    assert "quadtree train" in told
    assert "there is no file 'none'" in refused(*photo, "--weights", "none")
    Path("official.pth").write_bytes(b"anything")
    assert "quadtree convert official.pth" in refused(*photo, "--weights", "official.pth")
