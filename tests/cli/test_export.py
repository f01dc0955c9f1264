# SPDX-License-Identifier: Apache-2.0
"""`quadtree export`."""

import json
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime", reason="needs the extra 'export'")

import onnxruntime

from tests.support import tiny
from tests.support.commands import invoke, refused

OPTIONS = {"num_classes": 2, "depths": [1, 1, 1, 1], "num_levels": 1}


@pytest.fixture
def classifier():
    """Weights with one level per stage, so that an export takes seconds."""
    tiny.write_weights("classify", Path("c.safetensors"), kwargs=OPTIONS)


def test_a_fixed_size_is_exported_and_said(classifier):
    options = ("--weights", "c.safetensors", "--save", "c.onnx", "--fixed", "64x96", "--json")
    done = invoke("export", "classify", *options)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["task"], report["fixed"]) == ("classify", "batch size 1, images of 64x96")
    assert [check["agreement"] for check in report["checks"]] == [1.0] * 3
    (image,) = onnxruntime.InferenceSession("c.onnx").get_inputs()
    assert (image.name, image.shape) == ("image", [1, 3, 64, 96])
    assert sorted(path.suffix for path in Path().iterdir()) == [".json", ".onnx", ".safetensors"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["matches", "--save", "a.onnx"], "did you mean match"),
        (["match", "--save", "a.pt"], "--save must end in .onnx"),
        (["match", "--save", "no/a.onnx"], "no directory"),
        (["match", "--save", "a.onnx", "--fixed", "640"], "--fixed must be like 480x640"),
        (["match", "--save", "a.onnx", "--fixed", "40x640"], "height must be at least 64"),
        (["match", "--save", "a.onnx", "--threshold", "1.5"], "threshold must be"),
        (["stereo", "--save", "a.onnx", "--threshold", "0"], "--threshold is no option of stereo"),
        (["classify", "--save", "a.onnx"], "no weights of the task classify"),
        (["detect", "--save", "a.onnx", "--weights", "no.safetensors"], "no.safetensors"),
    ],
)
def test_mistakes(options, text):
    assert text in refused("export", *options)
