# SPDX-License-Identifier: Apache-2.0
"""The benchmark of synthetic scenes measures every part, and refuses what it cannot measure."""

import json

import pytest
import torch

from benchmarks import scenes

QUICK = ["--device", "cpu", "--size", "16x20", "--batch", "2", "--seconds", "0.05"]


def test_parts_add_up(tmp_path, capsys):
    out = tmp_path / "scenes.json"
    threads = str(torch.get_num_threads())
    assert scenes.main([*QUICK, "--threads", threads, "--out", str(out)]) == 0
    assert "2 pairs of 16x20" in capsys.readouterr().out
    rows = json.loads(out.read_text())["rows"]
    parts = [rows[name]["ms"] for name in rows if name.startswith("  ")]
    assert len(parts) == 3 and min(parts) > 0
    assert rows["scenes"]["ms"] > max(parts) / 2  # times of busy machines vary
    assert rows["scenes"]["pairs/s"] == pytest.approx(2e3 / rows["scenes"]["ms"])


@pytest.mark.parametrize("size", ["7x20", "20", "axb"])
def test_bad_size(size, capsys):
    with pytest.raises(SystemExit) as end:
        scenes.main(["--device", "cpu", "--size", size])
    assert end.value.code == 2
    assert f"must be HEIGHTxWIDTH, at least 8x8, got '{size}'" in capsys.readouterr().err
