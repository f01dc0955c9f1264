# SPDX-License-Identifier: Apache-2.0
"""The paper's counting rule, and the page that puts its numbers beside ours."""

import pytest
import torch
import yaml
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.measure import StoragePeak
from benchmarks.paper.count import measure_row
from benchmarks.paper.memory import measure_row as memory_row
from benchmarks.paper.page import ROWS, STATES, cells_of, train_command
from benchmarks.paper.rule import count
from benchmarks.result import ResultFileError, read_all
from benchmarks.speed.ops import GROWTH
from benchmarks.suite import Work
from benchmarks.tables.write import DOCS, updated
from quadtree_attention.nn import QuadtreeAttention
from quadtree_attention.tasks.training.recipe import read_recipe
from tests.conftest import ROOT

DIFFER = [  # counts that are not the paper's, or of which it is not public what it counted
    ("STTR, GFLOPs", "839"), ("QuadTree-B, GFLOPs", "434"),
    ("QuadTree-B, GFLOPs of STTR's", "52 %"), ("QuadTree-A-b0, parameters M", "3.2"),
    ("QuadTree-B-b0, parameters M", "3.6"), ("QuadTree-B-b0, GFLOPs", "0.6"),
    ("QuadTree-B-b1, parameters M", "13.7"), ("QuadTree-B-b2, parameters M", "25.1"),
    ("QuadTree-A-b0, GFLOPs", "16.5"), ("QuadTree-B-b0, GFLOPs", "17.4"),
    ("QuadTree-B-b1, GFLOPs", "57.8"), ("QuadTree-B-b2, GFLOPs", "111.9"),
    ("QuadTree-B-b2, parameters M", "44.7"), ("QuadTree-B-b3, parameters M", "65.9"),
    ("QuadTree-B, parameters M", "28"), ("QuadTree-B, GFLOPs", "4.5"),
    ("QuadTree-B-b2 with, GFLOPs", "4.5"), ("QuadTree-B-b2 without, GFLOPs", "4.5"),
    ("64x64 map, K 8, 64 channels: GMACs of attention", "0.029"),
    ("256x256 map, K 8, 64 channels: GMACs of attention", "0.365"),
    ("1024x1024 map, K 8, 64 channels: GMACs of attention", "5.734"),
]  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return read_all("paper/count")["paper/count"]["rows"]


def values(rows, task):
    """By model."""
    return {row["case"]["model"]: row["values"] for row in rows if row["case"]["task"] == task}


def test_rule_counts_layers_as_the_authors_do():
    layers = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),  # 27 products and a bias for each of 4 x 5 x 6 values
        nn.GroupNorm(1, 4),
        nn.ReLU(),
        nn.GELU(),
        nn.Conv2d(4, 2, 1, bias=False),
        nn.Flatten(),
        nn.Linear(60, 7),  # whose bias does not count
    )
    assert count(layers, (5, 6)) == {
        "products": 120 * 27 + 60 * 4 + 60 * 7, "norms": 240, "biases": 120, "relu": 120,
        "attention": 0,
    }  # fmt: skip
    assert not any(layer._forward_hooks for layer in layers)


def test_rule_counts_attention_by_the_formula():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = QuadtreeAttention(8, num_heads=2, num_levels=3, topk=(3, 2), qkv_bias=True)

        def forward(self, x):
            return self.attn(nn.functional.avg_pool2d(x.mean(1, True), 4).repeat(1, 8, 1, 1)
                             .movedim(1, -1))  # fmt: skip

    found = count(Net(), (64, 96))  # maps of 16 x 24, 8 x 12 and 4 x 6 cells
    fine, middle, coarse = 16 * 24, 8 * 12, 4 * 6
    assert found["attention"] == 2 * 8 * (coarse**2 + 4 * 3 * middle + 4 * 2 * fine)
    assert found["biases"] == 3 * 8 * fine  # of q, k and v, 1x1 convolutions in the official code
    assert found["products"] == 4 * 8 * 8 * fine


def test_counts_have_the_digits_that_the_paper_prints():
    cells = [cells_of(row) for row in all_rows() if "count" in row]
    assert [(what, ours) for what, _, ours, state, *_ in cells if state != "reproduced"] == DIFFER
    assert len(cells) == len(DIFFER) + 29


def test_torchvision_has_background_heads(rows):
    """It regresses boxes of the background too, and predicts its mask."""
    for found in values(rows, "mask_rcnn").values():
        assert found["torchvision_params"] - found["params"] == 1025 * 4 + 257


def test_closed_form_leaves_out_the_finest_level(rows):
    for case in GROWTH:
        found = values(rows, "complexity")[case.name]
        coarsest = 2 * (16 * 16) ** 2 * case.head_dim
        assert found["macs"] - coarsest == 4 * (found["closed_form"] - coarsest)


def test_committed_counts_are_those_of_this_code(rows):
    wanted = ("quadtree_b_b0", "pvt_v2_b0", "growth_64")
    some = [row for row in rows if row["case"]["model"] in wanted]
    assert len(some) == 7
    for row in some:
        assert measure_row(Work(row["case"], "cpu"), None) == row["values"]


def peak_of(device):
    with StoragePeak() as storages:
        x = torch.zeros(100, 25, device=device)  # 10,000 bytes
        view = x.T[3:]  # no storage of its own
        y = torch.cat([x, view.reshape(-1, 25)])  # 8,800 bytes copied, then 18,800
        del view
        z = x.half()  # 5,000
        del x, y
        last = z + 1
    assert storages.live == 10_000, last
    return storages.peak


def test_peak_of_storages_is_that_of_a_hand_count():
    """Live tensors at the widest point; fake tensors have the same sizes."""
    assert peak_of("cpu") == 10_000 + 8_800 + 18_800
    with FakeTensorMode():
        assert peak_of("cuda") == peak_of("cpu")


def test_committed_memory_is_that_of_this_code():
    stored = read_all("paper/memory")["paper/memory"]["rows"]
    case = {"model": "sttr_quadtree", "pass": "forward"}
    (row,) = (row for row in stored if case.items() <= row["case"].items())
    assert memory_row(Work(row["case"], "cpu"), None) == row["values"]
    peaks = {(r["case"]["model"], r["case"]["pass"]): r["values"]["peak_mib"] for r in stored[:6]}
    for kind in ("forward", "training", "checkpointed"):
        assert peaks["sttr_quadtree", kind] < peaks["sttr", kind]
    assert peaks["sttr", "forward"] < peaks["sttr", "checkpointed"] < peaks["sttr", "training"]


def test_command_counts(result, capsys):
    rows = result("paper count --tasks complexity")["rows"]
    assert [row["case"]["image"][0] for row in rows] == [64, 128, 256, 512, 1024]
    assert "complexity" in capsys.readouterr().out


# ---- docs/paper.md


def all_rows() -> list[dict]:
    return [row for part in yaml.safe_load(ROWS.read_text()) for row in part["rows"]]


def test_page_is_up_to_date_and_covers_the_paper():
    text = (DOCS / "paper.md").read_text()
    assert updated(text) == text
    for part in [*(f"Table {i}:" for i in range(1, 13)), "Figures 3 to 5", "Complexity", "Running"]:
        assert f"\n## {part}" in text


def test_every_row_has_something_of_ours():
    for row in all_rows():
        cells = cells_of(row)
        assert cells[2] and cells[3] in STATES and cells[4] and cells[6], row
        assert cells[3] in ("reproduced", "ready") or cells[5], row  # says why it differs
        assert cells[3] != "reproduced" or cells[1] in (cells[2], f"linear ({cells[2]})")
    with pytest.raises(ResultFileError, match="nothing of ours beside 'x'"):
        cells_of({"what": "x", "paper": "1"})
    with pytest.raises(ResultFileError, match="0 rows of"):
        cells_of({"what": "x", "paper": "1", "count": {"model": "y"}, "value": "macs"})


def test_states_follow_the_numbers():
    row = next(row for row in all_rows() if row["what"] == "QuadTree-B-b4, GFLOPs")
    assert cells_of(row)[1:4] == ["11.5", "11.5", "reproduced"]
    assert cells_of(row | {"paper": "11.4"})[2:4] == ["11.5", "differs"]
    assert cells_of(row | {"unknowable": True})[3] == "unknowable"
    ratio = next(row for row in all_rows() if row["what"] == "QuadTree-B, GFLOPs of STTR's")
    assert cells_of(ratio)[1:4] == ["52 %", "52 %", "unknowable"]
    assert cells_of(ratio | {"paper": "52.0 %"})[2] == "51.8 %"


def test_rows_name_all_variants_of_the_paper():
    """Recipes of the paper have no other variants; tests/test_recipes.py builds them."""
    named = {}
    for row in (row for row in all_rows() if "recipe" in row):
        recipe = read_recipe(ROOT / "recipes" / f"{row['recipe']}.yaml", row["variant"])
        named.setdefault(recipe.path, set()).update(recipe.variant)
        assert f"recipes/{row['recipe']}.yaml --variant {row['variant']}" in train_command(row)
        assert row.keys() <= {"what", "paper", "recipe", "variant", "near", "why"}
    others = {path.stem: set(read_recipe(path).variants) - found for path, found in named.items()}
    assert {name: found for name, found in others.items() if found} == {
        "coco-maskrcnn": {"1x"},  # nothing to change
        "sceneflow": {"sttr-schedule"},  # STTR's own
    }
