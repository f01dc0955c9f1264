# SPDX-License-Identifier: Apache-2.0
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from quadtree_attention import files
from quadtree_attention.errors import OptionError
from tests.support import raises


def test_a_failed_write_keeps_what_was_there(tmp_path):
    path = tmp_path / "a.txt"
    files.write_whole(path, b"old")
    with pytest.raises(ZeroDivisionError), files.replacing(path) as file:
        file.write(b"new" * (1 // 0))
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_links_and_modes_stay(tmp_path):
    path, link = tmp_path / "a.txt", tmp_path / "link.txt"
    path.write_bytes(b"old")
    path.chmod(0o640)
    link.symlink_to(path)
    files.write_whole(link, b"new")
    assert link.is_symlink() and path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("write", [files.check_writable, lambda path: files.write_whole(path, b"")])
def test_what_is_no_file_is_not_replaced(tmp_path, write):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    raises(OptionError, "is a device or a pipe; write to another name", write, path)
    assert path.is_fifo()


def test_several_files_are_replaced_together_or_not_at_all(tmp_path):
    first, second = tmp_path / "a", tmp_path / "none" / "b"
    first.write_bytes(b"old")
    both = {first: b"new", second: b"new"}
    raises(OptionError, "cannot be written: No such file", files.write_all, both)
    assert first.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_an_input_is_not_replaced_by_any_of_its_names(tmp_path):
    source = tmp_path / "a.png"
    source.write_bytes(b"x")
    (tmp_path / "link.png").symlink_to(source)
    (tmp_path / "hard.png").hardlink_to(source)
    for name in ("a.png", "link.png", "hard.png"):
        raises(OptionError, "is an input", files.check_writable, tmp_path / name, source)
    files.check_writable(tmp_path / "b.png", source)


OWNER = """
    import os, sys, time
    from pathlib import Path
    from quadtree_attention.files import Lock
    with Lock(Path(sys.argv[1]), "a run"):
        if sys.argv[2] == "alone" or os.fork() == 0:
            print("held", flush=True)
        time.sleep(60)
"""


def owned(folder, how):
    """A process that holds the lock of a folder, alone or with a fork of it."""
    command = [sys.executable, "-c", textwrap.dedent(OWNER), str(folder), how]
    options = {"text": True, "start_new_session": True}
    return subprocess.Popen(command, stdout=subprocess.PIPE, **options)


def locked(folder):
    with files.Lock(folder, "a run"):
        pass


def test_a_lock_has_one_owner_and_ends_with_its_process(tmp_path):
    with owned(tmp_path, "alone") as owner:
        assert owner.stdout.readline() == "held\n"
        raises(OptionError, "in use by a run", locked, tmp_path)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    with files.Lock(tmp_path, "a run"):
        raises(OptionError, "in use by a run", locked, tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_worker_does_not_keep_the_lock_of_its_killed_parent(tmp_path):
    with owned(tmp_path, "forked") as owner:
        assert owner.stdout.readline() == "held\n"
        raises(OptionError, "in use by a run", locked, tmp_path)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        try:
            locked(tmp_path)
        finally:
            os.killpg(owner.pid, signal.SIGKILL)
