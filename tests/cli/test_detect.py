# SPDX-License-Identifier: Apache-2.0
"""`quadtree detect`: pictures and text, folders, images that cannot be read, JSON."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("timm", reason="models need timm")
pytest.importorskip("typer", reason="the command needs typer")

from quadtree_attention.cli.detect import Request, run
from quadtree_attention.errors import OptionError
from tests.tasks.detect.files import write_weights

pytestmark = pytest.mark.usefixtures("only_reference")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.manual_seed(1)
    return write_weights(tmp_path_factory.mktemp("weights") / "w.safetensors")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    for i in range(2):
        noise = np.random.default_rng(i).integers(0, 255, (45, 60 + i, 3), dtype=np.uint8)
        Image.fromarray(noise).save(f"photos/{i}.png")
    Path("bad.jpg").write_bytes(b"\xff\xd8 no more")


def detect(weights, *images, as_json=False, **options):
    request = Request(images=images, weights=weights, device="cpu", **{"score": 0.0, **options})
    return run(request, as_json=as_json)


def test_one_image_is_drawn_and_told(weights, capsys):
    assert detect(weights, "photos/0.png")
    out = capsys.readouterr().out
    first, *objects, written = out.splitlines()
    assert first.startswith("photos/0.png  ") and first.endswith(" s)")
    assert len(objects) > 0 and all(" %  " in line and "  x " in line for line in objects)
    assert written == "  written  detections.png"
    assert Image.open("detections.png").size == (180, 135)  # small images are enlarged


def test_nothing_found(weights, capsys):
    assert detect(weights, "photos/0.png", score=1.0)
    assert "photos/0.png  nothing found" in capsys.readouterr().out


def test_json(weights, capsys):
    assert detect(weights, "photos", as_json=True)
    first, second = json.loads(capsys.readouterr().out)
    assert (first["image"], first["width"], first["height"]) == ("photos/0.png", 60, 45)
    assert second["width"] == 61
    assert first["objects"][0].keys() == {"name", "label", "score", "box"}
    assert first["written"] is None and not Path("detections").exists()


def test_several_images_go_to_a_folder_and_bad_ones_are_named(weights, capsys):
    Path("more").mkdir()
    Image.new("RGB", (50, 40)).save("more/0.jpg")
    assert not detect(weights, "photos", "bad.jpg", "more/0.jpg", "none.png", out=Path("out"))
    captured = capsys.readouterr()
    assert sorted(p.name for p in Path("out").iterdir()) == ["0-2.png", "0.png", "1.png"]
    complaints = captured.err.splitlines()
    assert len(complaints) == 2
    assert complaints[0].startswith("quadtree: cannot decode bad.jpg")
    assert complaints[1].startswith("quadtree: cannot read none.png")
    assert captured.out.count("written") == 3


def test_thin_images_do_not_end_the_run(weights, capsys):
    for name, size in (("thin", (4000, 2)), ("tall", (1, 1400))):
        Image.new("RGB", size, "red").save(f"{name}.png")
    assert detect(weights, "thin.png", "tall.png", "photos/0.png", out=Path("out"))
    assert capsys.readouterr().out.count("written") == 3
    assert sorted(p.name for p in Path("out").iterdir()) == ["0.png", "tall.png", "thin.png"]


def test_images_are_never_replaced(weights, capsys):
    before = Path("photos/0.png").read_bytes()
    assert detect(weights, "photos", out=Path("photos"))
    assert Path("photos/0.png").read_bytes() == before
    assert sorted(p.name for p in Path("photos").glob("*-2.png")) == ["0-2.png", "1-2.png"]
    with pytest.raises(OptionError, match="is an input, it must not be replaced"):
        detect(weights, "photos/0.png", out=Path("photos/0.png"))


def test_refusals(weights):
    with pytest.raises(
        OptionError, match="got no --weights; train some with quadtree train detect"
    ):
        run(Request(images=["photos/0.png"]), as_json=False)
    with pytest.raises(OptionError, match=r"2 images go to a folder, got the file 'a\.png'"):
        detect(weights, "photos", out=Path("a.png"))
    with pytest.raises(OptionError, match="pictures are written as"):
        detect(weights, "photos/0.png", out=Path("a.gif"))
    with pytest.raises(OptionError, match="score must be between 0 and 1"):
        detect(weights, "photos/0.png", score=2.0)
    assert not Path("a.gif").exists()
