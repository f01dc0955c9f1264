# SPDX-License-Identifier: Apache-2.0
"""`quadtree explore`, `attention` and `calibrate`: pictures of what networks keep, and their K."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from quadtree_attention import models
from quadtree_attention.models.weights import read_card
from quadtree_attention.tasks import Matcher
from tests.conftest import ROOT
from tests.support import tiny
from tests.support.commands import invoke, refused

SIZE = (128, 96)
pytestmark = pytest.mark.usefixtures("only_reference", "pair")


@pytest.fixture
def pair():
    """Images that are too different for the search over rotations."""
    for seed, name in enumerate("ab"):
        tiny.picture(seed, SIZE).save(f"{name}.png")


def about(path):
    text = Path(path).read_text("utf-8")
    start = text.index('<script id="about" type="application/json">') + 43
    return json.loads(text[start : text.index("</script>", start)])


def run(command, *options):
    result = invoke(command, *options, "--device", "cpu")
    assert result.exit_code == 0, result.output
    return result


def weights(all_weights, task):
    return ("--weights", all_weights / f"{task}.safetensors")


def test_explore_two_images(all_weights):
    tiny.sample("match", size=SIZE)[1].save("b.png")  # with matches
    result = run("explore", "a.png", "b.png", *weights(all_weights, "match"), "--json")
    told = json.loads(result.stdout)
    assert told == {"written": "explore.html", "bytes": os.path.getsize("explore.html")}
    held = about("explore.html")
    assert [layer["cross"] for layer in held["layers"]] == [False, True]
    assert [image["name"] for image in held["images"]] == ["a.png", "b.png"]
    assert held["matches"]["count"] > 0
    samples = held["layers"][1]["samples"]
    assert [(s["query"], s["keys"]) for s in samples] == [(0, 1), (1, 0)]


def test_matches_are_those_of_the_pass_that_is_shown():
    """Guided matching would add those of turned images, here seven times as many."""
    photograph = Image.open(ROOT / "examples" / "images" / "street0.jpg").resize((256, 192))
    views = photograph, photograph.rotate(90, expand=True)
    for view, name in zip(views, ("a.png", "b.png"), strict=True):
        view.save(name)
    run("explore", "a.png", "b.png")
    found = Matcher.from_pretrained(guided="never", device="cpu")(*views)
    numbers = about("explore.html")["matches"]["count"]
    assert numbers == 5 * len(found) > 0  # two points and a score each


def test_explore_one_image(all_weights):
    options = ("--out", "a.html", "--at", "3,5", "--credits", "(c) <me>")
    run("explore", "a.png", *weights(all_weights, "match"), *options)
    assert "(c) &lt;me&gt;" in Path("a.html").read_text("utf-8")
    held = about("a.html")
    assert [layer["cross"] for layer in held["layers"]] == [False]
    assert held["start"]["x"] == 3 and held["start"]["y"] == 5


@pytest.mark.parametrize("task", ["classify", "detect", "segment"])
def test_explore_a_backbone(all_weights, task):
    run("explore", "a.png", *weights(all_weights, task), "--layers", "stages.0.*")
    (layer,) = about("explore.html")["layers"]
    assert layer["name"].startswith("stages.0.") and layer["samples"][0]["grid"] == [24, 32]


def test_explore_rows(all_weights):
    run("explore", "a.png", "a.png", *weights(all_weights, "stereo"), "--layers", "*cross*")
    (layer,) = about("explore.html")["layers"]
    assert layer["cross"] and layer["levels"] == 4
    sample = layer["samples"][0]
    assert sample["flat"] and sample["disparity"]["count"] == sample["grid"][1]
    rows = f"{len(layer['samples'])} of {layer['rows']} rows of {sample['keyGrid'][1]} cells"
    assert rows in Path("explore.html").read_text("utf-8")


def test_a_second_network_beside(all_weights, tmp_path):
    narrow = tiny.NETWORKS["match"][1] | {"attention": "linear"}
    tiny.write_weights("match", Path("linear.safetensors"), kwargs=narrow)
    both = (*weights(all_weights, "match"), "--beside", "linear.safetensors")
    run("explore", "a.png", "b.png", *both)
    kinds = [layer["kind"] for layer in about("explore.html")["layers"]]
    assert kinds == ["quadtree", "quadtree", "linear", "linear"]
    run("attention", "a.png", "b.png", *both, "--at", "30,40")
    with Image.open("attention.png") as two:
        height = two.height
    run("attention", "a.png", "b.png", *weights(all_weights, "match"), "--at", "30,40")
    with Image.open("attention.png") as one:
        assert height == pytest.approx(2 * one.height, rel=0.05)


def test_attention(all_weights):
    options = (*weights(all_weights, "match"), "--out", "x.png", "--json")
    told = json.loads(run("attention", "a.png", "b.png", "--at", "30,40", *options).stdout)
    assert len(told["mass"]) == 2 and told["written"] == "x.png"
    assert all(0 < share <= 1 for shares in told["mass"].values() for share in shares)
    pixels = np.asarray(Image.open("x.png"))
    run("attention", "a.png", "b.png", "--at", "100,40", *options, "--head", "1")
    assert not np.array_equal(pixels, np.asarray(Image.open("x.png")))


def test_calibrate(all_weights):
    os.mkdir("pairs")
    for name in ("a", "b"):
        os.rename(f"{name}.png", f"pairs/{name}.png")
    options = (*weights(all_weights, "match"), "--images", "pairs", "--mass", "0.7")
    told = json.loads(run("calibrate", *options, "--save", "k.safetensors", "--json").stdout)
    assert told["mass"] == 0.7 and told["images"] == 1 and told["written"] == ["k.safetensors"]
    network = models.load("k.safetensors")
    for name, layer in told["layers"].items():
        assert list(network.get_submodule(name).topk) == layer["topk"]
        assert layer["mass"][-1] >= 0.7 - 1e-3
    assert read_card("k.safetensors")["calibrated"] == {"mass": 0.7, "images": 1}
    text = run("calibrate", *options, "--out", "curves.png").stdout
    assert all(name in text for name in told["layers"]) and os.path.getsize("curves.png") > 1000
    os.rename("pairs/a.png", "left.png")
    assert "two images" in refused("calibrate", *options)


def test_calibrate_stereo(all_weights):
    os.mkdir("pairs")
    os.rename("a.png", "pairs/x_left.png")
    os.rename("b.png", "pairs/x_right.png")
    options = (*weights(all_weights, "stereo"), "--images", "pairs", "--mass", "0.5", "--json")
    told = json.loads(run("calibrate", *options).stdout)
    assert told["images"] == 1 and any("cross_attn" in name for name in told["layers"])
    os.rename("pairs/x_right.png", "b.png")
    assert "no pairs" in refused("calibrate", *options)


@pytest.mark.parametrize("task", ["classify", "detect", "segment"])
def test_calibrate_others(all_weights, task):
    os.mkdir("photos")
    os.rename("a.png", "photos/a.png")
    options = (*weights(all_weights, task), "--images", "photos", "--mass", "0.5", "--json")
    told = json.loads(run("calibrate", *options).stdout)
    assert any("stages.0" in name for name in told["layers"])


def test_bad_input(all_weights):
    ours = weights(all_weights, "match")
    Path("bad.png").write_bytes(b"no image")
    there = sorted(os.listdir())
    cases = {
        ("explore", "bad.png"): "bad.png",
        ("explore", "a.png", "--out", "a.png"): "html",
        ("explore", "a.png", "--out", "missing/a.html"): "no directory",
        ("explore", "a.png", "--at", "500,2"): "outside",
        ("explore", "a.png", "--at", "here"): "x,y",
        ("explore", "a.png", "b.png", "--layers", "nothing"): "no attention layer",
        ("explore", "a.png", "--task", "stereo"): "holds weights for the task match",
        ("attention", "a.png", "b.png", "--at", "500,2"): "outside",
        ("attention", "a.png", "b.png", "--at", "5,2", "--out", "a.gif"): "pictures are written",
        ("attention", "a.png", "b.png", "--at", "5,2", "--head", "9"): "head must be",
        ("calibrate", "--images", "missing"): "missing",
        ("calibrate", "--images", ".", "--mass", "2"): "mass must be",
        ("calibrate", "--images", ".", "--out", "a.png"): "'a.png' is an input",
        ("calibrate", "--images", ".", "--save", "a.pt"): "written as .safetensors",
    }
    for options, words in cases.items():
        assert words in refused(*options, *ours), options
    backbone = weights(all_weights, "classify")
    assert "size must be at least 1" in refused("explore", "a.png", "--size", "0", *backbone)
    assert "one image" in refused("explore", "a.png", "b.png", *backbone)
    assert "two images" not in refused("explore", "a.png", *weights(all_weights, "stereo"))
    full = tiny.NETWORKS["match"][1] | {"attention": "full"}
    tiny.write_weights("match", Path("full.safetensors"), kwargs=full)
    full = ("explore", "a.png", "b.png", "--weights", "full.safetensors")
    assert "no quadtree layers" in refused(*full)
    assert set(os.listdir()) - set(there) <= {"full.safetensors", "full.json"}
