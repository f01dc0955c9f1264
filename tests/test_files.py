# SPDX-License-Identifier: Apache-2.0
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from quadtree_attention import files
from quadtree_attention.errors import OptionError


def test_a_failed_write_keeps_what_was_there(tmp_path):
    path = tmp_path / "a.txt"
    files.write_whole(path, b"old")
    with pytest.raises(ZeroDivisionError), files.replacing(path) as file:
        file.write(b"new" * (1 // 0))
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_several_files_are_replaced_together_or_not_at_all(tmp_path):
    first, second = tmp_path / "a", tmp_path / "none" / "b"
    first.write_bytes(b"old")
    with pytest.raises(OptionError, match="cannot be written: No such file"):
        files.write_all({first: b"new", second: b"new"})
    assert first.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_an_input_is_not_replaced_by_any_of_its_names(tmp_path):
    source = tmp_path / "a.png"
    source.write_bytes(b"x")
    (tmp_path / "link.png").symlink_to(source)
    (tmp_path / "hard.png").hardlink_to(source)
    for name in ("a.png", "link.png", "hard.png"):
        with pytest.raises(OptionError, match="is an input"):
            files.check_writable(tmp_path / name, source)
    files.check_writable(tmp_path / "b.png", source)


HOLD = """
    import sys, time
    from pathlib import Path
    from quadtree_attention.files import Lock
    with Lock(Path(sys.argv[1]), "a run"):
        print("held", flush=True)
        time.sleep(60)
"""


def test_a_lock_has_one_owner_and_ends_with_its_process(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(HOLD), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout.readline() == "held\n"
        with pytest.raises(OptionError, match="in use by a run"), files.Lock(tmp_path, "a run"):
            pass
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    with files.Lock(tmp_path, "a run"), pytest.raises(OptionError), files.Lock(tmp_path, "a run"):
        pass
    assert os.listdir(tmp_path) == []


FORK = """
    import os, sys, time
    from pathlib import Path
    from quadtree_attention.files import Lock
    with Lock(Path(sys.argv[1]), "a run"):
        if os.fork() == 0:
            print("held", flush=True)
        time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_worker_does_not_keep_the_lock_of_its_killed_parent(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(FORK), str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as owner:
        assert owner.stdout.readline() == "held\n"
        with pytest.raises(OptionError, match="in use by a run"), files.Lock(tmp_path, "a run"):
            pass
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        try:
            with files.Lock(tmp_path, "a run"):
                pass
        finally:
            os.killpg(owner.pid, signal.SIGKILL)
