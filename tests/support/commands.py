# SPDX-License-Identifier: Apache-2.0
"""Running the command `quadtree` in tests."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import quadtree_attention
from tests.conftest import ROOT

START = "from quadtree_attention.cli import main; main()"  # what the installed script runs


def environment(**more: str) -> dict[str, str]:
    """The environment of a process that imports the package under test."""
    source = str(Path(quadtree_attention.__file__).parents[1])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path} | more


def command(*options: object, code: str = START, timeout: float = 120, **more: str) -> Any:
    """The command in a process of its own; `more` are variables of its environment."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, options)],
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def python(code: str, *arguments: object, **more: str) -> str:
    """What a program prints in a new interpreter; it ends without an error."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment(**more), cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def invoke(*options: object, charset: str = "utf-8", **more: Any) -> Any:
    """The command in this process; `more` are arguments of typer's, such as `input`."""
    testing = pytest.importorskip("typer.testing", reason="the command needs typer")
    from quadtree_attention.cli.main import app

    runner = testing.CliRunner(charset=charset)
    return runner.invoke(app, [*map(str, options)], prog_name="quadtree", **more)


def printed(*options: object) -> str:
    """What a command prints that has nothing to complain about."""
    result = invoke(*options)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


def contents(folder: Path | str = ".") -> dict[Path, bytes]:
    """All files below a folder."""
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def refused(*options: object) -> str:
    """The one line of a command that refuses to run; no file below the current folder changes."""
    before = contents()
    result = invoke(*options)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("quadtree: ") and result.stderr.count("\n") == 1, result.stderr
    assert contents() == before
    return result.stderr


def row(text: str, name: str) -> str:
    """What stands beside a name in a table that a command prints."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name}  "))
    return line.removeprefix(name).strip()


def refusal(error: type[Exception], call: Any, *args: Any, **options: Any) -> str:
    """The message of the error that a call raises."""
    with pytest.raises(error) as caught:
        call(*args, **options)
    return str(caught.value)
