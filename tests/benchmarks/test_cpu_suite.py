# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from benchmarks.__main__ import main
from benchmarks.speed import cpu


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(cpu.BACKBONES, "b2 forward", ("quadtree_b_b0", [1, 3, 64, 64], "forward"))
    monkeypatch.setattr(cpu, "SIZE", (96, 64))
    monkeypatch.setattr(cpu, "LATER", 1)


def rows(tmp_path, parts):
    file = tmp_path / "cpu.json"
    options = ["--parts", parts, "--seconds-per-row", "0.1", "--out", str(file)]
    assert main(["speed", "cpu", *options]) == 0
    return json.loads(file.read_text())["rows"]


def test_backbone_beside_its_baseline(tmp_path, capsys, small):
    ours, baseline = rows(tmp_path, "b2 forward")
    assert (ours["case"]["baseline"], baseline["case"]["model"]) == ("pvt_v2_b0", "pvt_v2_b0")
    assert ours["values"]["median_ms"] > 0 and "first_ms" not in ours["values"]
    assert "pvt_v2_b0" in capsys.readouterr().out


@pytest.mark.slow  # compiles all kernels
def test_command_in_new_processes(tmp_path, small):
    (match,) = rows(tmp_path, "match")
    assert match["values"]["first_ms"] > match["values"]["median_ms"] > 0
    assert match["values"]["peak_mib"] > 100 and match["values"]["repeats"] == 1


def test_it_measures_the_cpu_only(capsys):
    with pytest.raises(SystemExit):
        main(["speed", "cpu", "--device", "cuda"])
    assert "this suite measures the CPU" in capsys.readouterr().err
