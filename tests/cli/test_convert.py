# SPDX-License-Identifier: Apache-2.0
"""`quadtree convert`: official checkpoints in, weights and a card out, mistakes on one line."""

import argparse
import json
import os
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

import quadtree_attention
from quadtree_attention.files import file_sha256
from quadtree_attention.models.convert import convert_backbone
from quadtree_attention.models.matcher_convert import convert_matcher
from quadtree_attention.models.registry import complete, load
from quadtree_attention.models.stereo_convert import convert_stereo
from quadtree_attention.models.weights import read_card, read_checkpoint
from tests.conftest import Golden, golden_files
from tests.support import Hostile, commands
from tests.support.commands import invoke, printed, row
from tests.support.official import golden_image, load_official, recipe_state, shapes_of

pytestmark = pytest.mark.usefixtures("only_reference")

OUT = ("official.pth", "--save", "out.safetensors")
NAMED = "--model quadtree_b_b0"
ONE, STEM = torch.ones(1), "matcher.backbone.conv1.weight"
PARAMETERS = 3_589_468  # of the classifier b0, from its manifest


@pytest.fixture(scope="module")
def classifier() -> dict[str, torch.Tensor]:
    return recipe_state("classification_quadtree_b0")


@pytest.fixture(scope="module")
def detector() -> dict[str, torch.Tensor]:
    return recipe_state("detection_quadtree_b0")


def converted(state: object, *options: str) -> str:
    """What converting prints; the result is out.safetensors."""
    torch.save(state, "official.pth")
    return printed("convert", *OUT, *options)


def refused(*options: str) -> str:
    return commands.refused("convert", *options)


def holds(path: str, expected: dict[str, torch.Tensor]) -> bool:
    got = read_checkpoint(path)
    return got.keys() == expected.keys() and all(torch.equal(got[k], expected[k]) for k in got)


# ---- what comes out


def test_card(tmp_path, classifier):
    torch.save({"model": classifier, "args": argparse.Namespace(lr=1.0)}, "official.pth")
    paths = tmp_path / "official.pth", "--save", tmp_path / "b0.safetensors"
    card = json.loads(printed("convert", *paths, "--json"))
    assert card == read_card("b0.safetensors") == json.loads(Path("b0.json").read_text())
    assert card == {
        "model": "quadtree_b_b0",
        "kwargs": card["kwargs"],
        "task": "classify",
        "parameters": PARAMETERS,
        "source": {
            "file": "official.pth",
            "sha256": file_sha256("official.pth"),
            "tensors_left_out": 0,
            "left_out": "nothing",
        },
        "command": "quadtree convert official.pth --save b0.safetensors",
        "licence": "of the source checkpoint; see its authors",
        "tensors": 314,
        "sha256": file_sha256("b0.safetensors"),
        "version": quadtree_attention.__version__,
    }
    given = {"num_classes": 1000, "topk": 8, "value_act": "gelu"}
    assert card["kwargs"] == json.loads(json.dumps(complete("quadtree_b_b0", given)))
    assert str(tmp_path) not in Path("b0.json").read_text()
    assert holds("b0.safetensors", convert_backbone(classifier))


@pytest.mark.parametrize("path", golden_files("models/det_quadtree_b0_256x320.npz"))
def test_official_numbers_of_a_detector(path, detector):
    """K and the activation leave no trace in the tensors; the defaults must be right."""
    converted({"state_dict": {f"backbone.{name}": x for name, x in detector.items()}})
    golden = Golden(path)
    model = load("out.safetensors", dtype=torch.float64).eval()
    with torch.no_grad():
        *_, last = model.forward_intermediates(
            golden_image(golden.meta).double(), intermediates_only=True
        )
    expected = golden.tensor("map4_f64", torch.float64)
    torch.testing.assert_close(last, expected, rtol=0, atol=2e-6)


def test_same_outputs_as_loading_directly(classifier):
    converted(classifier, "--topk", "3", "--act", "relu")
    options = {"topk": 3, "value_act": "relu"}
    direct = timm.create_model("quadtree_b_b0", **options).eval()
    load_official(direct, convert_backbone(classifier))
    through_timm = timm.create_model(
        "quadtree_b_b0", checkpoint_path="out.safetensors", **options
    ).eval()
    defaults = timm.create_model("quadtree_b_b0", checkpoint_path="out.safetensors").eval()
    x = torch.randn(1, 3, 97, 130)
    with torch.no_grad():
        expected = direct(x)
        assert torch.equal(load("out.safetensors").eval()(x), expected)
        assert torch.equal(through_timm(x), expected)
        assert not torch.allclose(defaults(x), expected, atol=1e-3)


def test_whole_detector(detector):
    state = {f"module.backbone.{name}": x for name, x in detector.items()}
    state |= {f"module.neck.{i}.weight": torch.zeros(2) for i in range(3)}
    state["module.bbox_head.fc.bias"] = torch.ones(1)
    text = converted({"meta": {"epoch": 12, "CLASSES": ("cat", "dog")}, "state_dict": state})
    assert row(text, "model") == "quadtree_b_b0, by its blocks and channels"
    assert row(text, "parameters") == "3,332,468 in 312 tensors"
    assert row(text, "num_classes") == "0, no classifier"
    assert row(text, "left out") == "4 tensors of neck, bbox_head"
    why = "as for checkpoints without a classifier; not stored in the tensors"
    assert row(text, "topk") == f"32, {why}, --topk changes it"
    assert row(text, "value_act") == f"relu, {why}, --act changes it"
    assert row(text, "written") == "out.safetensors and out.json"
    card = read_card("out.safetensors")
    expected = {"num_classes": 0, "topk": 32, "value_act": "relu"}
    assert card["kwargs"].items() >= expected.items()
    assert card["source"]["tensors_left_out"] == 4
    assert holds("out.safetensors", convert_backbone(detector))


def test_the_printed_lines_of_python_run(classifier, detector):
    for state, name, shape in ((classifier, "logits", (1, 1000)), (detector, "maps", None)):
        text = converted(state, "--force")
        scope = {"images": torch.randn(1, 3, 64, 96)}
        exec("\n".join(text.splitlines()[-3:]), scope)
        result = scope[name]
        assert result.shape == shape if shape else [len(m[0]) for m in result] == [32, 64, 160, 256]


def test_variant_a_from_safetensors():
    save_file(recipe_state("classification_quadtreeA_b0"), "official.safetensors")
    text = printed("convert", "official.safetensors", "--save", "out.safetensors")
    assert row(text, "model") == "quadtree_a_b0, by its blocks and channels"
    assert "value_act" not in text
    kwargs = read_card("out.safetensors")["kwargs"]
    assert (kwargs["num_classes"], kwargs["topk"], kwargs["value_act"]) == (1000, 8, None)
    assert load("out.safetensors").num_classes == 1000
    message = refused("official.safetensors", "--save", "b.safetensors", "--act", "relu")
    assert "value_act belongs to value_pyramid='conv'" in message


def test_options_are_kept_in_the_card(classifier):
    options = ["--model", "quadtree_b_b0", "--act", "relu", "--topk", "16", "--num-classes", "0"]
    text = converted(classifier, *options)
    assert row(text, "model") == "quadtree_b_b0"
    assert row(text, "topk") == "16, as given by --topk"
    assert row(text, "value_act") == "relu, as given by --act"
    assert row(text, "left out") == "2 tensors of head"
    card = read_card("out.safetensors")
    expected = {"num_classes": 0, "topk": 16, "value_act": "relu"}
    assert card["kwargs"].items() >= expected.items()
    assert card["command"] == (
        "quadtree convert official.pth --save out.safetensors --model quadtree_b_b0 --act relu "
        "--topk 16 --num-classes 0"
    )
    assert load("out.safetensors").num_classes == 0
    # Without it, the defaults stay those of a checkpoint with a classifier
    text = converted(classifier, "--num-classes", "0", "--force")
    assert row(text, "topk").startswith("8, as for checkpoints with a classifier; ")
    assert read_card("out.safetensors")["kwargs"]["value_act"] == "gelu"


# ---- what is refused


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({"block3.1.attn.proj.bias": None}, "", "not fit PyramidTransformer: 1 missing: stages.2."),
        ({"extra": ONE}, "", "1 tensors are not part of an official backbone: extra; pass"),
        ({"block1.5.norm1.bias": ONE}, NAMED, "1 unexpected: stages.0.blocks.5.norm1.bias; build"),
        ({"norm2.weight": ONE}, "", "1 mismatched: stages.1.norm.weight is (1,), must be (64,); b"),
        ({"head.weight": None}, "", "1 missing: head.weight; build"),
        ({}, "--num-classes 10", "head.weight is (1000, 256), must be (10, 256)"),
        ({}, "--num-classes ten", "must be auto or a number, got 'ten'; 0 omits"),
        ({}, "--model quadtree_b_b1", "mismatched: patch_embed.proj.weight is (32,"),
        ({}, "--model quadtree_a_b0", "144 unexpected: stages.0.blocks.0.attn.level"),
        ({}, "--model quadtree_b0", "got 'quadtree_b0'; did you mean quadtree_b_b0"),
        ({}, "--model resnet50", "one of quadtree_a_b0, quadtree_a_b1, quadtree_a_b"),
        ({}, "--act tanh", "value_act must be one of gelu, relu, got 'tanh'"),
        ({}, "--topk 0", "topk must be at least 1 at every level, got topk=0"),
        ({}, "--position legacy", "--position is for a matcher, and official.pth ho"),
    ],
)
def test_checkpoints_and_options_that_do_not_fit(classifier, change, options, words):
    state = {name: x for name, x in (classifier | change).items() if x is not None}
    torch.save(state, "official.pth")
    assert words in refused(*OUT, *options.split())


def test_hostile_checkpoint(classifier):
    torch.save({"model": classifier, "hook": Hostile("was_run")}, "official.pth")
    message = refused(*OUT)
    assert f"loading it would call {os.mkdir.__module__}.mkdir; nothing was run;" in message
    assert not Path("was_run").exists()


def test_files_that_are_no_checkpoints(classifier):
    Path("empty.pth").touch()
    torch.save(classifier, "cut.pth")
    os.truncate("cut.pth", os.path.getsize("cut.pth") // 2)
    for name, words in {
        "none.pth": "there is no file 'none.pth'; check the path",
        ".": "'.' is not a file; pass the checkpoint file",
        "empty.pth": "'empty.pth' is empty; get or write it again",
        "cut.pth": "cut.pth is not a checkpoint, or a damaged one: it cannot be read as a file of",
    }.items():
        assert words in refused(name, "--save", "out.safetensors")
    message = refused("none.pth", "--save", "out.pth")
    assert "weights are written as .safetensors, got 'out.pth'; name it so" in message
    message = refused("none.pth", "--save", "none/out.safetensors")
    assert "there is no directory 'none' to write to; make it first" in message
    result = invoke("convert", "official.pth")
    assert result.exit_code == 2 and "Missing option '--save'" in result.stderr


def test_nothing_is_overwritten_unasked(classifier):
    converted(classifier)
    before = Path("out.safetensors").read_bytes()
    message = refused(*OUT, "--topk", "5")
    assert "'out.safetensors' is there already; write to another name, or overwrite it" in message
    assert Path("out.safetensors").read_bytes() == before
    converted(classifier, "--topk", "5", "--force")
    assert read_card("out.safetensors")["kwargs"]["topk"] == 5
    # A checkpoint that turns out not to fit does not cost what was there.
    before = Path("out.safetensors").read_bytes()
    torch.save(dict(list(classifier.items())[:-1]), "official.pth")
    assert "1 missing" in refused(*OUT, "--force")
    assert Path("out.safetensors").read_bytes() == before


def test_what_is_already_ours(classifier):
    converted(classifier)
    message = refused("out.safetensors", "--save", "./out.safetensors", "--force")
    assert "--save must not be the checkpoint itself, got 'out.safetensors'" in message
    message = refused("out.safetensors", "--save", "again.safetensors")
    assert "has no tensors of an official backbone, such as patch_embed1.proj.weight" in message


# ---- matchers


@pytest.fixture(scope="module")
def loftr() -> dict[str, torch.Tensor]:
    return matcher_state("loftr_linear_ds")


def matcher_state(name: str) -> dict[str, torch.Tensor]:
    """Small numbers in the shapes of an official matcher."""
    counts = {key for key in shapes_of(name) if key.endswith("num_batches_tracked")}
    return {
        key: torch.zeros(x.shape, dtype=torch.int64) if key in counts else torch.rand(x.shape) / 50
        for key, x in shapes_of(name).items()
    }


def test_matcher_from_a_lightning_checkpoint(loftr):
    text = converted({"epoch": 3, "pytorch-lightning_version": "1.3.5", "state_dict": loftr})
    assert row(text, "model") == "loftr, by its blocks and channels"
    assert row(text, "left out") == "nothing"
    assert row(text, "position").startswith("fixed, as in most checkpoints; not stored")
    card = read_card("out.safetensors")
    assert (card["model"], card["task"]) == ("loftr", "match")
    assert card["kwargs"] == json.loads(json.dumps(complete("loftr", {})))
    assert card["command"] == "quadtree convert official.pth --save out.safetensors"
    assert card["licence"] == "of the source checkpoint; see its authors"
    assert holds("out.safetensors", convert_matcher(loftr))
    # Without texture, so that no alignment is searched for
    scope = {"image0": torch.zeros(48, 64), "image1": torch.zeros(64, 48)}
    exec("\n".join(text.splitlines()[-2:]), scope)
    assert scope["matches"].keypoints0.shape[1] == 2


def test_quadtree_matchers_must_be_named():
    torch.save({"state_dict": matcher_state("loftr_quadtree_indoor")}, "indoor.ckpt")
    message = refused("indoor.ckpt", "--save", "out.safetensors")
    both = "loftr_quadtree_indoor (K 32, 16) and loftr_quadtree_outdoor (K 16, 8)"
    assert f"fit {both} equally" in message
    assert message.endswith("pass the name that the file was published as by --model\n")
    options = ["--model", "loftr_quadtree_outdoor", "--position", "legacy", "--topk", "6"]
    text = printed("convert", "indoor.ckpt", "--save", "out.safetensors", *options)
    assert row(text, "position") == "legacy, as given by --position"
    card = read_card("out.safetensors")
    assert card["kwargs"].items() >= {"topk": 6, "position": "legacy"}.items()
    assert card["command"].endswith("--model loftr_quadtree_outdoor --topk 6 --position legacy")
    model = load("out.safetensors")
    assert model.position == "legacy" and model.coarse_transformer.layers[0].attn.topk == (6, 6)


def test_optimal_transport_is_told_by_its_tensor(loftr):
    converted(loftr | {"matcher.coarse_matching.bin_score": torch.ones(())})
    assert read_card("out.safetensors")["kwargs"]["matching"] == "optimal_transport"
    assert load("out.safetensors").coarse_matching.method == "optimal_transport"


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({"matcher.fine_preprocess.merge_feat.bias": None}, "", "fit LoFTR: 1 missing: fine_win"),
        ({"loss.weight": ONE}, "", "are not part of an official matcher: loss.weight; pass"),
        ({STEM: ONE}, "", "1 mismatched: backbone.stem.weight is (1,), must be (128, 1, 7, 7)"),
        ({}, "--model loftr_quadtree_indoor", "does not fit LoFTR: "),
        ({}, "--model lofter", "got 'lofter'; did you mean loftr"),
        ({}, "--act gelu", "--act is for a backbone, and official.pth holds a match"),
        ({}, "--num-classes 0", "--num-classes is for a backbone, and official.pth"),
        ({}, "--topk 8", "topk"),
        ({}, "--position odd", "position must be"),
    ],
)
def test_matchers_and_options_that_do_not_fit(loftr, change, options, words):
    state = {name: x for name, x in (loftr | change).items() if x is not None}
    torch.save({"state_dict": state}, "official.pth")
    assert words in refused(*OUT, *options.split())


# ---- stereo


def test_sttr():
    state = recipe_state("sttr")
    torch.save({"epoch": 15, "state_dict": state}, "sceneflow_pretrained_model.pth.tar")
    text = printed("convert", "sceneflow_pretrained_model.pth.tar", "--save", "sttr.safetensors")
    assert row(text, "parameters").startswith("2,513,811 in ")
    count = sum("running" in name or "tracked" in name for name in state)
    assert row(text, "left out") == f"{count} tensors of backbone, tokenizer"
    assert "StereoMatcher.from_pretrained('sttr.safetensors')(left, right)" in text
    assert holds("sttr.safetensors", convert_stereo(state)[0])
    card = read_card("sttr.safetensors")
    assert (card["model"], card["task"]) == ("sttr", "stereo")
    model = load("sttr.safetensors", task="stereo").eval()
    view = torch.rand(1, 3, 32, 48)
    with torch.no_grad():
        assert model({"image0": view, "image1": view}).disparity.isfinite().all()
    told = refused("sceneflow_pretrained_model.pth.tar", "--save", "x.safetensors", "--topk", "8")
    assert "--topk is for quadtree attention" in told and "holds STTR, got 8; leave it out" in told
