# SPDX-License-Identifier: Apache-2.0
"""What tests of the contract share: every task with tiny weights."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("timm", reason="networks need the extra 'models'")
pytest.importorskip("cv2", reason="checking pairs needs the extra 'models'")

from quadtree_attention.tasks.contract import NAMES, get_task
from tests.support import tiny

collect_ignore = ["toy"]  # imported as a task by the test of a sixth one


@pytest.fixture(params=NAMES)
def task(request: pytest.FixtureRequest) -> Any:
    return get_task(request.param)


@pytest.fixture
def weights(all_weights: Path, task: Any) -> Path:
    return all_weights / f"{task.name}.safetensors"


@pytest.fixture
def predictor(weights: Path, task: Any) -> Any:
    return task.load("predictor").from_pretrained(weights, **tiny.OWN.get(task.name, {}))
