# SPDX-License-Identifier: Apache-2.0
"""Compare two checkouts bit by bit: `python -m tests.compare OLD NEW`.

OLD and NEW are checkouts, or folders that an earlier comparison has recorded with `--keep`. Each
checkout runs in processes of its own, on the same inputs, which OLD makes. Compared are predictions
of the packaged and of tiny weights of all five tasks, synthetic scenes, what every command prints
as JSON and writes, the contents of recipes, and the weights of runs that were killed and resumed.

    python -m tests.compare ../old . --keep /tmp/record      records OLD once: /tmp/record/old
    python -m tests.compare /tmp/record/old . --only recipes,commands
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.compare.driver import ARRAYS, INPUTS, RECORD, SECTIONS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compare", description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, nargs="?", help="leave it out to record OLD alone")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, by commas")
    parser.add_argument("--keep", type=Path, help="folder for the records")
    options = parser.parse_args()
    sections = options.only.split(",")
    if unknown := set(sections) - set(SECTIONS):
        parser.error(f"sections are {', '.join(SECTIONS)}, got {', '.join(sorted(unknown))}")
    folder = options.keep or Path(tempfile.mkdtemp(prefix="compare-"))
    old = recorded(options.old, folder / "old", None, sections)
    if options.new is None:
        return 0
    new = recorded(options.new, folder / "new", old, sections)
    return report([line for name in sections for line in differences(name, old, new)])


def recorded(source: Path, folder: Path, first: Path | None, sections: list[str]) -> Path:
    """The folder of the record of a checkout, made where `source` is none itself."""
    if not (source / "pyproject.toml").exists():
        return source.absolute()
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if first is None:
        _drive(source, folder, INPUTS)
    elif not (folder / INPUTS).exists():
        shutil.copytree(first / INPUTS, folder / INPUTS)
    for section in sections:
        print(f"{source}: {section}", flush=True)
        _drive(source, folder, section)
    return folder


def _drive(checkout: Path, folder: Path, section: str) -> None:
    driver = Path(__file__).with_name("driver.py")
    path = os.pathsep.join([str(checkout.absolute() / "src"), str(driver.parents[2])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    command = [sys.executable, "-P", str(driver), str(checkout.absolute()), section]
    subprocess.run(command, cwd=folder, env=environment, check=True)


def differences(section: str, old: Path, new: Path) -> list[str]:
    """One line for everything that differs."""
    then, now = (json.loads((f / RECORD.format(section)).read_text()) for f in (old, new))
    lines = [f"{section}: {line}" for line in _unlike(then, now, "")]
    a, b = (dict(np.load(folder / ARRAYS.format(section))) for folder in (old, new))
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            lines.append(f"{section}: {name} is only in {'NEW' if name in b else 'OLD'}")
        elif said := _bits(a[name], b[name]):
            lines.append(f"{section}: {name}: {said}")
    return lines


def _bits(a: np.ndarray, b: np.ndarray) -> str:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype} {a.shape} before, {b.dtype} {b.shape} now"
    if a.tobytes() == b.tobytes():
        return ""
    most = np.nanmax(np.abs(a.astype(np.float64) - b.astype(np.float64)))
    return f"{(a != b).sum()} of {a.size} numbers differ, by {most:.3g} at most"


def _unlike(a: Any, b: Any, where: str) -> list[str]:
    """What of `a` is missing in `b` or differs there; `b` may have more."""
    if isinstance(a, dict) and isinstance(b, dict):
        lines = [f"{where}/{key} is only in OLD" for key in a if key not in b]
        both = (key for key in a if key in b)
        return lines + [line for key in both for line in _unlike(a[key], b[key], f"{where}/{key}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [line for i, (x, y) in pairs for line in _unlike(x, y, f"{where}/{i}")]
    return [] if a == b else [f"{where}: {str(a)[:80]} before, {str(b)[:80]} now"]


def report(lines: list[str]) -> int:
    print("\n".join(lines) or "no difference")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
