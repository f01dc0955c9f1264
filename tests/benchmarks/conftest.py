# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the benchmark programs' tests."""

import os

import pytest

from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def from_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """`benchmarks` is a folder of the repository, not part of the installed package."""
    monkeypatch.syspath_prepend(str(ROOT))
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
