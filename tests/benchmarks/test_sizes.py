# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from benchmarks.__main__ import main


def test_first_calls(tmp_path, capsys):
    file = tmp_path / "sizes.json"
    options = ["--networks", "pvt_v2_b0", "--sizes", "2", "--device", "cpu", "--out", str(file)]
    assert main(["speed", "sizes", *options]) == 0
    new_size, new_process = (row["values"] for row in json.loads(file.read_text())["rows"])
    assert new_size["repeats"] == 2 and new_size["first_ms"] > 0 and new_size["again_ms"] > 0
    assert min(new_process[key] for key in ("first_ms", "cached_ms", "again_ms")) > 0
    assert "the same size again" in capsys.readouterr().out


def test_a_process_that_fails_says_why(monkeypatch, tmp_path):
    from benchmarks.speed import sizes

    with pytest.raises(RuntimeError, match=r"KeyError|unknown|Unknown"):
        sizes._new_process("pvt_v2_b99", "cpu", str(tmp_path))
