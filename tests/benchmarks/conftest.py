# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the benchmark programs' tests."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("timm", reason="networks need the extra 'models'")
pytest.importorskip("poselib", reason="estimators need the extra 'models'")
pytest.importorskip("pytorch_lightning", reason="training needs the extra 'train'")

from benchmarks import measure
from benchmarks.__main__ import main
from benchmarks.result import check, read_all
from tests.conftest import ROOT
from tests.support.processes import CONTEXT

TURNS = 2


@pytest.fixture(autouse=True)
def from_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """`benchmarks` is a folder of the repository, not part of the installed package."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setattr(measure, "FRESH", CONTEXT)  # new processes start within milliseconds
    monkeypatch.setattr(measure, "TURNS", TURNS)
    monkeypatch.setattr(measure, "WARM_UP_CALLS", 1)


def command(*arguments: Any) -> int:
    """Runs a command of `python -m benchmarks`; returns the exit code."""
    words = [arguments[0].split(), arguments[1:]] if arguments else []
    return main([str(word) for part in words for word in part])


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """The one line with which a command ends, with exit code 2."""
    try:
        code = command(*arguments)
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr().err
    assert code == 2 and said.startswith("python -m benchmarks") and said.count("\n") == 1
    return said


def read(path: Path) -> dict[str, Any]:
    """A result file, checked."""
    result = json.loads(path.read_text())
    check(result)
    return result


@pytest.fixture
def result(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs a command; returns the result that it writes, which holds no path of this machine."""

    def result(words: str, *places: Any) -> dict[str, Any]:
        path = tmp_path / "result.json"
        assert command(words, *places, "--out", path) == 0
        assert not list(tmp_path.glob("*.partial")) and str(tmp_path) not in path.read_text()
        return read(path)

    return result


def stored(kind: str) -> dict[str, Any]:
    """A committed result of a kind, which a test may change."""
    return next(iter(read_all(kind).values()))


def write_graf(data: Path) -> None:
    """A set of one pair, two views of a small picture that are the same."""
    folder = data / "oxford_affine" / "graf"
    folder.mkdir(parents=True)
    picture = np.random.default_rng(0).integers(0, 255, (24, 32), np.uint8)
    image = Image.fromarray(picture).resize((160, 120), Image.Resampling.BICUBIC)
    for number in (1, 2):
        image.save(folder / f"img{number}.jpg", quality=95)
    np.savetxt(folder / "H1to2p.txt", np.eye(3))


def run_of(**settings: Any) -> dict[str, Any]:
    """What a result says about a command."""
    return {
        "date": "2030-01-02T03:04:05+00:00", "command": "python -m benchmarks speed x",
        "commit": "0123456789abcdef",
        "machine": {"device": "cuda", "device_name": "NVIDIA X", "cpu": "Y", "cores": 8,
                    "threads": 1, "load": 0.5},
        "versions": {"python": "3.12.0", "torch": "2.11.0", "cuda": None}, "settings": settings,
    }  # fmt: skip


def result_of(kind: str, *rows: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """A checked result with one run."""
    rows = [{"run": 0} | row for row in rows]
    runs = [run_of(**settings)]
    result = {"schema": 2, "kind": kind, "complete": True, "runs": runs, "rows": rows}
    check(result)
    return json.loads(json.dumps(result))


def times(ms: float, mib: float | None = 1.5) -> dict[str, Any]:
    """Values of a row that was timed."""
    return {"median_ms": ms, "q25_ms": ms, "q75_ms": ms, "repeats": 3, "peak_mib": mib}
