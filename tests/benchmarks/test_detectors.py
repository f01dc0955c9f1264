# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.detectors`: a small run."""

import json
import random
from contextlib import nullcontext

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import nn
from torch.profiler import profile

pytest.importorskip("torchvision", reason="detectors need the extra 'models'")


def test_run_on_a_cpu(tmp_path, capsys):
    from benchmarks.detector_tables import check_result, markdown
    from benchmarks.detectors import main

    out = tmp_path / "result.json"
    options = "--device cpu --model retinanet_test_quadtree --images 96x64 --modes eager"
    options += " --batch 2 --precisions float32 --threads 1 --seconds-per-row 0.01"
    assert main([*options.split(), "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    check_result(result)
    assert [(row["part"], row["attention"]) for row in result["rows"]] == [
        (part, name) for part in ("network", "detector") for name in ("held", "sr", "quadtree")
    ]
    assert not any("error" in row for row in result["rows"])
    text = markdown({"detectors--test": result})
    (ours,) = (line for line in text.splitlines() if "| network |" in line and "QuadTree" in line)
    *_, of_held, of_fused, peak, of_held_peak, of_fused_peak = ours.strip("| ").split(" | ")
    assert float(of_held.removesuffix("x")) > 0 and float(of_fused.removesuffix("x")) > 0
    assert peak == of_held_peak == of_fused_peak == "-"  # nothing is known of memory on a CPU
    assert "detector  float32" in capsys.readouterr().out


def test_bad_options(capsys):
    from benchmarks.detectors import main

    with pytest.raises(SystemExit) as ended:
        main(["--device", "cpu", "--modes", "graph"])
    assert ended.value.code == 2
    assert "graph means CUDA graphs" in capsys.readouterr().err


@torch._functorch.config.patch(enable_autograd_cache=True)  # and as it was, afterwards
def test_attentions_are_compiled_apart():
    from benchmarks.detectors import compiled
    from benchmarks.measure import scores_held

    x, shift = torch.rand(1, 2, 32, 16), random.random()
    for held in (True, False, True):
        network = compiled(Attention(shift))
        with torch.no_grad(), scores_held() if held else nullcontext():
            network(x)
            with profile() as kernels:
                network(x)
        names = " ".join(event.key for event in kernels.key_averages())
        assert ("flash_attention" in names) != held
        assert ("bmm" in names) == held


class Attention(nn.Module):
    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift  # a number that no run before has left a compiled network for

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x) + self.shift
