# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by all tests."""

import atexit
import gc
import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quadtree_attention import use_backend
from tests.interpreter import Interpreter
from tests.support.poison import poisoned

ROOT = Path(__file__).parents[1]
GOLDEN = (ROOT / "tests" / "golden", ROOT.parent / "shared" / "golden")  # a selection, and all

CHROMIUM = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-sync", "--disable-background-networking", "--disable-component-update"),
]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser of this process; Playwright allows one at a time."""
    api = pytest.importorskip("playwright.sync_api", reason="needs the extra 'dev'")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM)
        yield browser
        browser.close()


def pytest_configure(config: pytest.Config) -> None:
    """Tests that run side by side (pytest -n) share the cores, and so do their processes."""
    gc.disable()  # until the tests are collected: imports leave next to no garbage
    if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
        threads = max(1, (os.cpu_count() or 1) // int(workers))
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end: no collection of garbage looks through them."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)


class Golden:
    """One stored file of numbers from the official implementation."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as arrays:
            self.arrays = dict(arrays)
        self.name = path.stem
        self.meta = json.loads(str(self.arrays.pop("meta")))

    def tensor(self, key: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(self.arrays[key]).to(dtype)

    def with_prefix(self, prefix: str) -> dict[str, torch.Tensor]:
        return {
            key.removeprefix(prefix): torch.from_numpy(value)
            for key, value in self.arrays.items()
            if key.startswith(prefix)
        }


def golden_files(*patterns: str) -> list[object]:
    """Parameters for `pytest.mark.parametrize`; one skipped entry where the files are absent."""
    found = {
        path.relative_to(place): path
        for place in reversed(GOLDEN)  # those of the repository replace those beside it
        for pattern in patterns
        for path in place.glob(pattern)
    }
    if not found:
        reason = f"golden files {patterns} are not at ../shared/golden beside the checkout"
        return [pytest.param(None, marks=pytest.mark.skip(reason=reason))]
    return [pytest.param(found[name], id=name.stem) for name in sorted(found)]


def golden_path(name: str) -> Path:
    """A golden file by its path in `tests/golden` or `../shared/golden`."""
    return next(path for place in GOLDEN if (path := place / name).exists())


@pytest.fixture(scope="session")
def all_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny weights of all tasks, TASK.safetensors."""
    from quadtree_attention.tasks.contract import NAMES
    from tests.support import tiny

    folder = tmp_path_factory.mktemp("weights")
    for name in NAMES:
        tiny.write_weights(name, folder / f"{name}.safetensors")
    return folder


@pytest.fixture(autouse=True)
def _poison_empty_memory() -> Iterator[None]:
    with poisoned():
        yield


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """Runs checks of kernels where Triton interprets them."""
    process = Interpreter()
    yield process
    process.close()


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Callable[[], None]:
    """A check of `tests.interpreter.kernels`, where its kernels run."""
    if request.param[-1] == "cuda":
        return partial(*request.param)
    return partial(request.getfixturevalue("interpreter"), *request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module", params=["reference", "cpu"])
def each_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the tests of a module once with each backend that needs no GPU as "auto"."""
    if request.param == "cpu":
        pytest.importorskip("numba", reason="the cpu backend needs numba")
    with use_backend(request.param):
        yield request.param


@pytest.fixture(scope="module")
def only_reference() -> Iterator[None]:
    with use_backend("reference"):
        yield
