# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: whole or not there, and read without running anything."""

import os
import pickle
from contextlib import contextmanager

import pytest
import torch

from quadtree_attention.errors import CheckpointError, OptionError
from quadtree_attention.tasks.training.checkpoints import (
    LastCheckpoint,
    SafeCheckpointIO,
    read_training_checkpoint,
)

resource = pytest.importorskip("resource", reason="limits of a process are those of Unix")


def state(size=10):
    return {"state_dict": {"weight": torch.arange(size)}, "loops": {}, "epoch": 3}


@contextmanager
def files_of_at_most(size):
    """As on a full disk: no file may grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def refused(path):
    with pytest.raises(CheckpointError) as caught:
        read_training_checkpoint(path)
    return str(caught.value)


def test_round_trip(tmp_path):
    path = tmp_path / "new" / "last.ckpt"
    SafeCheckpointIO().save_checkpoint(state(), path)
    read = SafeCheckpointIO().load_checkpoint(path)
    assert torch.equal(read["state_dict"]["weight"], torch.arange(10))
    assert read["epoch"] == 3
    assert os.listdir(path.parent) == ["last.ckpt"]


def test_full_disk_keeps_the_previous_file(tmp_path):
    path = tmp_path / "last.ckpt"
    SafeCheckpointIO().save_checkpoint(state(), path)
    before = path.read_bytes()
    with files_of_at_most(20_000), pytest.raises(CheckpointError) as caught:
        SafeCheckpointIO().save_checkpoint(state(100_000), path)
    text = str(caught.value)
    assert text.startswith(f"cannot save the checkpoint {path}: ") and "\n" not in text
    assert text.endswith("; make room there and go on from last.ckpt with --resume")
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_full_disk_without_a_previous_file(tmp_path):
    for name in ("last.ckpt", "best.ckpt"):
        path = tmp_path / name
        with (
            files_of_at_most(20_000),
            pytest.raises(CheckpointError, match=r"room there and start again$"),
        ):
            SafeCheckpointIO().save_checkpoint(state(100_000), path)
        assert os.listdir(tmp_path) == []


def test_advice_after_a_full_disk_is_about_the_checkpoint_to_resume_from(tmp_path):
    SafeCheckpointIO().save_checkpoint(state(), tmp_path / "last.ckpt")
    with files_of_at_most(20_000), pytest.raises(CheckpointError, match="go on from last"):
        SafeCheckpointIO().save_checkpoint(state(100_000), tmp_path / "best.ckpt")
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(CheckpointError, match="cannot save the checkpoint"):
        SafeCheckpointIO().save_checkpoint(state(), tmp_path / "run" / "last.ckpt")


class Hostile:
    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_checkpoint_is_not_run(tmp_path, zipped):
    ran = tmp_path / "ran"
    path = tmp_path / "hostile.ckpt"
    torch.save({**state(), "hostile": Hostile(ran)}, path, _use_new_zipfile_serialization=zipped)
    assert refused(path).endswith(
        "nothing in it was executed; pass one that a run has written, such as its last.ckpt"
    )
    assert not ran.exists()
    path.write_bytes(pickle.dumps(Hostile(ran)))
    refused(path)
    assert not ran.exists()


def damaged(whole):
    return {
        "truncated": whole[: len(whole) // 2],
        "nearly whole": whole[:-30],
        "empty": b"",
        "text": b"seed_everything: 0\nmodel:\n",
        "zeros": bytes(500),
        "html": b"<html><body>404</body></html>",
    }


@pytest.mark.parametrize("kind", damaged(b""))
@pytest.mark.parametrize("zipped", [True, False])
def test_damaged_checkpoint(tmp_path, kind, zipped):
    path = tmp_path / "last.ckpt"
    torch.save(state(), path, _use_new_zipfile_serialization=zipped)
    path.write_bytes(damaged(path.read_bytes())[kind])
    assert refused(path).startswith(f"cannot read the checkpoint {path}: it is damaged")


def test_checkpoint_of_something_else(tmp_path):
    path = tmp_path / "weights.pth"
    for other in (torch.zeros(3), {"weight": torch.zeros(3)}, {"state_dict": {}}, [1, 2]):
        torch.save(other, path)
        assert refused(path) == (
            f"{path} is not the checkpoint of a training run; pass one that a run has written, "
            "such as its last.ckpt"
        )


def test_no_checkpoint(tmp_path):
    path = tmp_path / "none.ckpt"
    assert refused(path).startswith(f"there is no checkpoint {path}; pass one")
    assert refused(tmp_path).startswith(f"cannot read the checkpoint {tmp_path} (Is a directory)")


def test_steps_between_checkpoints():
    with pytest.raises(OptionError, match="--save_every must be at least 1, got 0"):
        LastCheckpoint(0)
