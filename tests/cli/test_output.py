# SPDX-License-Identifier: Apache-2.0
"""How commands end: exit codes, full disks, closed pipes, Ctrl-C, renamed options, progress."""

import fcntl
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from quadtree_attention.cli.main import run
from quadtree_attention.cli.options import RENAMED
from tests.support.commands import START, command, environment, invoke, refused

pytestmark = pytest.mark.usefixtures("pair")
TASK = "match"
MATCH = ("match", "a.png", "b.png", "--guided", "never")
FULL = Path("/dev/full")


def start(*options, stdout=subprocess.PIPE, **more):
    return subprocess.Popen(
        [sys.executable, "-c", START, *map(str, options)],
        env=environment(QUADTREE_BACKEND="reference", **more),
        stdout=stdout,
        stderr=subprocess.PIPE,
    )


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("options", ["info", "--version", "--help"])
def test_standard_output_that_is_full(options):
    with FULL.open("w") as full, start(*options.split(), stdout=full) as process:
        said = process.stderr.read().decode()
    assert process.returncode == 2
    assert said.startswith("quadtree: ") and said.count("\n") == 1 and "No space" in said


def test_streams_that_the_caller_closed(weights):
    def closed(which, *options):
        code = f"import os; os.close({which}); os.execv({sys.executable!r}, {[*options]!r})"
        return command(code=code, QUADTREE_BACKEND="reference")

    run = [sys.executable, "-c", START, *MATCH, "--weights", str(weights)]
    assert closed(1, *run).returncode == 0
    assert Path("matches.png").exists()
    done = closed(0, sys.executable, "-c", START, "classify", "-", "--weights", str(weights))
    assert done.returncode and "Traceback" not in done.stderr


def test_whoever_reads_may_stop():
    with start("info") as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.parametrize("seconds", [0.2, 1.5])
def test_ctrl_c_at_any_time(weights, seconds):
    """Also while modules are imported."""
    with start("match", "a.png", "b.png", "--weights", weights, "--size", "4000") as process:
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read().decode()
    if process.returncode != -signal.SIGINT:  # Python itself was still starting
        assert (process.returncode, said) in ((130, "quadtree: interrupted\n"), (0, ""))
    assert not [name for name in os.listdir() if "unfinished" in name]


@pytest.mark.usefixtures("only_reference")
def test_ctrl_c_while_the_network_runs(weights, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("quadtree_attention.tasks.match.predictor.Matcher.forward", interrupt)
    result = invoke("match", "a.png", "b.png", "--weights", weights)
    assert (result.exit_code, result.stderr) == (130, "quadtree: interrupted\n")
    assert sorted(os.listdir()) == ["a.png", "b.png"]


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_options_of_earlier_versions_name_the_new_one(old, capsys):
    words = old.split() if " " in old else ["match", old]
    with pytest.raises(SystemExit) as ended:
        run([words[0], *(["stereo"] if words[0] == "evaluate" else []), words[-1], "x"])
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert f"{words[-1]} was renamed to {RENAMED[old]};" in said.err


def test_an_output_that_cannot_be_written(weights):
    os.mkdir("closed", mode=0o500)
    options = ("match", "a.png", "b.png", "--weights", weights)
    if os.geteuid():  # root may write everywhere
        assert "may not be written to" in refused(*options, "--out", "closed/m.png")
    os.symlink("a.png", "other.png")
    assert "'other.png' is an input" in refused(*options, "--out", "other.png")


def test_debug_shows_where_an_error_arises():
    result = invoke("match", "a.png", "none.png", "--debug")
    assert result.exit_code == 2 and "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("quadtree: cannot read none.png")


def on_a_terminal(*options):
    """What a command writes to a terminal."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", START, *map(str, options)],
        env=environment(QUADTREE_BACKEND="reference"),
        stdin=follower, stdout=follower, stderr=follower,
    )  # fmt: skip
    os.close(follower)
    shown = b""
    while True:
        try:
            shown += os.read(leader, 4096)
        except OSError:  # the other end is closed
            break
    os.close(leader)
    assert process.wait() == 0, shown
    return shown.decode()


def test_many_pairs_show_progress_on_a_terminal(weights):
    Path("pairs.txt").write_text("a.png b.png\nb.png a.png\n")
    options = ("--guided", "never", "--save", "out", "--weights", weights)
    shown = on_a_terminal("match", "--pairs", "pairs.txt", *options)
    assert "0/2" in shown and "pair" in shown
    assert "2 done, 0 failed" in shown


FIRST = (*MATCH, "--json", "--weights")


@pytest.mark.usefixtures("only_reference")
def test_a_run_says_that_it_compiles(weights, monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert invoke(*FIRST, weights).stderr == ""  # the reference has no kernels
    monkeypatch.setattr("quadtree_attention.cli.predict.default_backend", lambda: "auto")
    assert invoke(*FIRST, weights).stderr.startswith("quadtree: compiling kernels")
    Path("a.nbi").touch()
    assert invoke(*FIRST, weights).stderr == ""


@pytest.mark.slow  # it compiles all kernels; the test above has the same line, without Numba
def test_the_first_run_in_an_environment_compiles(tmp_path, weights):
    pytest.importorskip("numba", reason="the cpu backend needs numba")
    cache = tmp_path / "cache"
    said = [command(*FIRST, weights, NUMBA_CACHE_DIR=str(cache)).stderr for _ in range(2)]
    assert said[0].startswith("quadtree: compiling kernels") and said[1] == ""
    shutil.rmtree(cache)
