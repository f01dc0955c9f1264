# SPDX-License-Identifier: Apache-2.0
"""`quadtree info`: what it prints, its JSON, its mistakes."""

import json

import pytest
import torch

import quadtree_attention
from quadtree_attention import available_backends, plan
from tests.support import commands
from tests.support.commands import START, command, invoke, refused

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without GPU")


def printed(options: str = "") -> str:
    return commands.printed("info", *options.split())


def line_of(text: str, start: str) -> str:
    return next(line.strip() for line in text.splitlines() if line.strip().startswith(start))


@NO_GPU
def test_without_a_gpu():
    done = command("info")
    assert (done.returncode, done.stderr) == (0, "")
    text = done.stdout
    assert line_of(text, "quadtree_attention").split()[1] == quadtree_attention.__version__
    assert line_of(text, "torch").split()[1] == torch.__version__
    assert "threads used" in line_of(text, "cpu ")
    assert "no device: torch " in line_of(text, "cuda  no")
    assert "it needs a CUDA device, the tensors are on cpu" in line_of(text, "triton     cannot: ")
    assert "query grid (60, 80), key grid (60, 80), 8 heads, head dim 32" in text
    assert "plan" not in text
    text = printed("--device cuda --plan")
    for name in ("triton", "cpu", "reference"):
        assert f"  {name:9}  cannot: this machine has no device cuda" in text
    assert "Times are estimates for an NVIDIA H200" in text


def test_without_typer():
    done = command("info", code=f"import sys; sys.modules['typer'] = None; {START}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "quadtree: the command needs typer, which is not installed; "
        'pip install "quadtree-attention[models]"\n'
    )


def test_help_shows_options_and_examples():
    text = printed("--help")
    for option in (
        "--grid", "--key-grid", "--heads", "--dim", "--value-dim", "--levels", "--topk",
        "--variant", "--dtype", "--device", "--batch", "--plan", "--json",
    ):  # fmt: skip
        assert option in text
    examples = [line.strip() for line in text.splitlines() if line.startswith("    quadtree info")]
    assert len(examples) >= 4
    for example in examples:
        assert printed(example.removeprefix("quadtree info"))


def test_backends_are_those_of_the_call(monkeypatch):
    shape, key_shape = (1, 9, 14, 3, 300), (1, 5, 20, 3, 300)
    q, k, v = torch.zeros(shape), torch.zeros(key_shape), torch.zeros(*key_shape[:-1], 4)
    options = {"num_levels": 3, "topk": (200, 16), "variant": "A"}
    sizes = "--grid 9x14 --key-grid 5x20 --heads 3 --dim 300 --value-dim 4 --levels 3"
    report = json.loads(printed(f"{sizes} --topk 200,16 --variant A --device cpu --json"))
    assert report["backends"] == available_backends(q, k, v, **options) and report["plan"] is None
    assert any("head dims go up to" in reason for reason in report["backends"]["triton"])
    text = printed("--device cpu")
    assert line_of(text, "cpu        ") == "cpu        can run it and is selected by auto"
    assert line_of(text, "reference") == "reference  can run it"
    assert "QUADTREE_BACKEND" not in text
    monkeypatch.setenv("QUADTREE_BACKEND", "reference")
    assert "QUADTREE_BACKEND=reference replaces auto" in printed()


def test_plan_as_a_table():
    options = "--grid 200x336 --heads 1 --levels 4 --topk 32 --dtype bfloat16 --device cuda --plan"
    text = printed(options)
    lines = [line.split() for line in text[text.index("\nplan\n") :].splitlines()]
    assert ["level", "queries", "keys", "candidates", "kept", "FLOPs"] in lines
    assert ["0", "25x42", "25x42", "1,050", "32", "141", "M"] in lines
    assert ["3", "200x336", "200x336", "128", "-", "1.10", "G"] in lines
    assert ["FLOPs,", "forward", "1.59", "G", "578", "G"] in lines
    assert ["FLOPs,", "forward", "+", "backward", "5.55", "G", "2.02", "T"] in lines
    expected = plan((200, 336), dim=32, num_levels=4, topk=32, dtype=torch.bfloat16, device="cuda")
    memory = f"{expected.dense.training_memory / 2**20:.1f}"
    assert lines[[line[:2] for line in lines].index(["memory,", "training"])][4:] == [memory, "MiB"]
    assert any(line[:2] == ["bytes", "moved,"] for line in lines)
    assert any(line[:5] == ["time,", "forward,", "no", "CUDA", "graph"] for line in lines)
    assert text.endswith(f"  {expected.advice}\n")


def test_plan_as_json():
    options = "--grid 14x15 --key-grid 8x30 --levels 2 --topk 8 --device cpu --plan --json"
    report = json.loads(printed(options))
    expected = plan((14, 15), (8, 30), heads=8, dim=32, num_levels=2, topk=8)
    assert report["plan"]["cheaper"] == expected.cheaper == "dense"
    assert report["plan"]["advice"] == expected.advice
    assert report["plan"]["quadtree"]["flops"] == expected.quadtree.flops
    assert report["plan"]["dense"]["training_memory"] == expected.dense.training_memory
    assert report["problem"] == expected.problem
    assert report["devices"]["cpu"]["threads"] == torch.get_num_threads()
    assert set(report["versions"]) == {
        "quadtree_attention", "python", "torch", "cuda", "triton", "numba",
    }  # fmt: skip
    row = "--grid 31 --levels 3 --topk 5,2 --dtype bfloat16 --device cpu --batch 2 --plan --json"
    levels = json.loads(printed(row))["plan"]["levels"]
    assert [level["grid"] for level in levels] == [[8], [16], [31]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--grid 0x8", "every axis of q but the batch must have at least one entry"),
        ("--grid 8x", "--grid must be the size of every axis, joined by x, got '8x'; write 200x3"),
        ("--key-grid -4", "--key-grid must be the size of every axis, joined by x, got '-4'"),
        ("--key-grid 12", "q and k must have the same number of grid axes, got 2 and 1"),
        ("--topk many", "--topk must be a number, or one per level with a selection, got 'many'"),
        ("--topk 0", "topk must be at least 1 at every level, got topk=0"),
        ("--topk 1,2,3", "topk must have one entry per level that selects, coarse -> fine: 2 for"),
        ("--levels 0", "num_levels must be an integer of at least 1, got num_levels=0"),
        ("--heads -1", "heads must be an integer of at least 1, got -1"),
        ("--variant D", "variant must be 'A', 'B' or 'C', got variant='D'"),
        ("--dtype int8", "--dtype must be one of float32, float64, float16, bfloat16, got 'int8'"),
        ("--device tpu", "device must be of type cuda or cpu, got 'tpu'"),
        ("--batch 9999999999999999", "a tensor can hold less than 2**63 bytes, got the shape"),
    ],
)
def test_mistakes_end_with_one_line(options, words):
    for extra in ([], ["--plan", "--json"]):
        assert words in refused("info", *options.split(), *extra)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--bogus"], "No such option: --bogus"),
        (["--heads", "two"], "Invalid value for '--heads'"),
        (["extra"], "unexpected extra argument"),
    ],
)
def test_wrong_usage(options, words):
    result = invoke("info", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr and "Try 'quadtree info --help'" in result.stderr
