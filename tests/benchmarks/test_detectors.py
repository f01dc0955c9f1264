# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.detectors`: a small run."""

import json

import pytest

pytest.importorskip("torchvision", reason="detectors need the extra 'models'")


def test_run_on_a_cpu(tmp_path, capsys):
    from benchmarks.detector_tables import check_result, markdown
    from benchmarks.detectors import main

    out = tmp_path / "result.json"
    options = "--device cpu --model retinanet_test_quadtree --images 96x64 --modes eager"
    options += " --precisions float32 --threads 1 --seconds-per-row 0.01"
    assert main([*options.split(), "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    check_result(result)
    assert [(row["part"], row["attention"]) for row in result["rows"]] == [
        ("network", "sr"), ("network", "quadtree"), ("detector", "sr"), ("detector", "quadtree"),
    ]  # fmt: skip
    assert not any("error" in row for row in result["rows"])
    text = markdown({"detectors--test": result})
    assert "| 96x64 | network | float32 | eager | QuadTree-B, K 32 |" in text
    assert text.count("x | - |") == 2  # of time; nothing is known of memory
    assert "detector  float32" in capsys.readouterr().out


def test_bad_options(capsys):
    from benchmarks.detectors import main

    with pytest.raises(SystemExit) as ended:
        main(["--device", "cpu", "--modes", "graph"])
    assert ended.value.code == 2
    assert "graph means CUDA graphs" in capsys.readouterr().err
