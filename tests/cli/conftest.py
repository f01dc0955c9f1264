# SPDX-License-Identifier: Apache-2.0
"""What tests of commands share: a folder of their own, and tiny weights of the module's `TASK`."""

from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command needs typer")
pytest.importorskip("timm", reason="networks need the extra 'models'")
pytest.importorskip("cv2", reason="checking pairs needs the extra 'models'")

from tests.support import tiny
from tests.support.commands import invoke, refused


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def task(request):
    return request.module.TASK


@pytest.fixture(scope="module")
def weights(task, all_weights):
    return all_weights / f"{task}.safetensors"


@pytest.fixture
def run(task, weights):
    """Runs the command of the task with its tiny weights."""

    def run(*options, **more):
        return invoke(task, *options, "--weights", weights, "--device", "cpu", **more)

    return run


@pytest.fixture
def fails(task, weights):
    """The line of the command of the task where it refuses to run."""
    return lambda *options: refused(task, *options, "--weights", weights)


@pytest.fixture
def photos():
    """Two images in a folder, beside a file that is no image; and a damaged image."""
    Path("photos").mkdir()
    for i in range(2):
        tiny.picture(i, (60 + i, 45)).save(f"photos/{i}.png")
    Path("photos/notes.txt").write_text("hello")
    Path("bad.jpg").write_bytes(b"\xff\xd8 no more")


@pytest.fixture
def pair(request):
    """The two images of a pair, `a.png` and `b.png`, of the module's `SIZE`."""
    images = tiny.sample("match", size=getattr(request.module, "SIZE", (72, 56)))
    for name, image in zip(("a.png", "b.png"), images, strict=True):
        image.save(name)
    return images
