# SPDX-License-Identifier: Apache-2.0
"""pytest in a process that was forked with torch and its friends already imported."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ENDED = 100  # added to the exit codes of pytest, to tell them from those of other failures


def run(copy: Path, tests: Sequence[str], output: Path, environment: Mapping[str, str]) -> None:
    """Run tests of the checkout `copy`, as the leader of a process group; prints go to `output`."""
    os.setpgid(0, 0)
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    os.chdir(copy)
    sys.dont_write_bytecode = True
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # of this checkout
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    if folder := environment.get("NUMBA_CACHE_DIR"):
        import numba

        numba.config.CACHE_DIR = folder
    import pytest

    sys.argv = ["pytest"]
    arguments = ["-x", "-q", "-p", "no:cacheprovider", *tests]
    sys.exit(ENDED + pytest.main(arguments))
