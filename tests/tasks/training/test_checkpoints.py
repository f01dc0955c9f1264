# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: whole or not there, and read without running anything."""

import os
import pickle
from contextlib import contextmanager

import pytest
import torch

from quadtree_attention.errors import CheckpointError
from quadtree_attention.tasks.training.checkpoints import (
    SafeCheckpointIO,
    read_training_checkpoint,
)
from tests.support import Hostile, raises
from tests.support.commands import refusal

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
    return refusal(CheckpointError, read_training_checkpoint, path)


def save(path, size=10):
    SafeCheckpointIO().save_checkpoint(state(size), path)


def test_round_trip(tmp_path):
    path = tmp_path / "new" / "last.ckpt"
    save(path)
    read = SafeCheckpointIO().load_checkpoint(path)
    assert torch.equal(read["state_dict"]["weight"], torch.arange(10))
    assert read["epoch"] == 3
    assert os.listdir(path.parent) == ["last.ckpt"]
    (tmp_path / "run").write_text("a file")
    raises(CheckpointError, "cannot save the checkpoint", save, tmp_path / "run" / "last.ckpt")


def test_full_disk_keeps_the_previous_file(tmp_path):
    path = tmp_path / "last.ckpt"
    for name in ("last.ckpt", "best.ckpt"):
        with files_of_at_most(20_000):
            told = refusal(CheckpointError, save, tmp_path / name, 100_000)
        assert told.endswith("room there and start again") and os.listdir(tmp_path) == []
    save(path)
    before = path.read_bytes()
    for name in ("last.ckpt", "best.ckpt"):
        with files_of_at_most(20_000):
            text = refusal(CheckpointError, save, tmp_path / name, 100_000)
        assert text == (
            f"cannot save the checkpoint {tmp_path / name}: File too large; make room there and "
            "go on from last.ckpt with --resume"
        )
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["last.ckpt"]


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


@pytest.mark.parametrize("zipped", [True, False])
def test_damaged_checkpoint(tmp_path, zipped):
    path = tmp_path / "last.ckpt"
    torch.save(state(), path, _use_new_zipfile_serialization=zipped)
    whole = path.read_bytes()
    damaged = [whole[: len(whole) // 2], whole[:-30], b"", b"seed_everything: 0\nmodel:\n"]
    for content in (*damaged, bytes(500), b"<html><body>404</body></html>"):
        path.write_bytes(content)
        assert refused(path).startswith(f"cannot read the checkpoint {path}: it is damaged")
    for other in (torch.zeros(3), {"weight": torch.zeros(3)}, {"state_dict": {}}, [1, 2]):
        torch.save(other, path, _use_new_zipfile_serialization=zipped)
        assert refused(path) == (
            f"{path} is not the checkpoint of a training run; pass one that a run has written, "
            "such as its last.ckpt"
        )
    path.unlink()
    assert refused(path).startswith(f"there is no checkpoint {path}; pass one")
    assert refused(tmp_path).startswith(f"cannot read the checkpoint {tmp_path} (Is a directory)")
