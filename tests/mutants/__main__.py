# SPDX-License-Identifier: Apache-2.0
"""Apply every mutant in a copy of the tree and run its tests: `python -m tests.mutants`.

A mutant whose tests pass has survived. By hand, not in CI: all of them take about an hour.

    python -m tests.mutants --list
    python -m tests.mutants ops nn:2 src/quadtree_attention/tasks -j 2
"""

import argparse
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutants import ROOT, Mutant, child, mutants

PASSED, FAILED = 0, 1  # exit codes of pytest; others are no verdict
LONGEST = 900  # seconds: a mutant that hangs is noticed
FORKS = multiprocessing.get_context("forkserver")  # from a process that has imported these
FORKS.set_forkserver_preload(
    ["torch", "torchvision.models.detection", "timm", "pytorch_lightning", "jsonargparse", "numba",
     "cv2", "typer.testing", "pytest"]
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("which", nargs="*", help="lists, names or files; all if left out")
    parser.add_argument("-j", type=int, default=1, metavar="N", help="mutants at a time")
    parser.add_argument("--list", action="store_true", help="only list them")
    parser.add_argument("--unchecked", action="store_true", help="do not run the tests unchanged")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # read by torch when it is imported
    chosen = [m for m in mutants() if not options.which or any(_is(m, w) for w in options.which)]
    if not chosen:
        parser.error(f"no mutant is called {', '.join(options.which)}; see --list")
    if options.list:
        print("\n".join(f"{m.name:14} {m.file}: {m.what}" for m in chosen))
        return 0
    if mistakes := [mistake for m in chosen if (mistake := m.mistake())]:
        print("\n".join(mistakes))
        return 2
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        return run(chosen, Path(folder), workers=options.j, unchecked=options.unchecked)


def _is(mutant: Mutant, which: str) -> bool:
    listed = which in (mutant.name, mutant.name.partition(":")[0])
    return listed or ("/" in which and mutant.file.startswith(which))


def run(chosen: Sequence[Mutant], folder: Path, *, workers: int, unchecked: bool) -> int:
    copies: SimpleQueue[Path] = SimpleQueue()
    for i in range(workers):
        copies.put(copied(folder / str(i)))
    if not unchecked:
        tests = list(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
        copy = copies.get()
        if (code := pytest(copy, tests, shown=True)) != PASSED:
            print(f"without any mutant, pytest ends with {code}; mend that first")
            return 2
        copies.put(copy)

    def one(mutant: Mutant) -> str:
        copy = copies.get()
        try:
            verdict = judged(mutant, copy)
        finally:
            copies.put(copy)
        print(f"{verdict:9} {mutant.name:14} {mutant.file}: {mutant.what}", flush=True)
        return verdict

    with ThreadPoolExecutor(workers) as pool:
        verdicts = list(pool.map(one, chosen))
    bad = len(verdicts) - verdicts.count("killed")
    print(f"{len(verdicts)} mutants, {verdicts.count('killed')} killed, {bad} not")
    return 1 if bad else 0


def copied(folder: Path) -> Path:
    """A copy of all files that git does not ignore, with `shared` beside it where there is one."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    copy = folder / "checkout"
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    if (shared := ROOT.parent / "shared").exists():
        (folder / "shared").symlink_to(shared.resolve())
    return copy


def judged(mutant: Mutant, copy: Path) -> str:
    """killed, survived, or what else came of it."""
    path = copy / mutant.file
    text, times = path.read_text(), path.stat()
    with tempfile.TemporaryDirectory() as kernels:
        path.write_text(text.replace(mutant.old, mutant.new))
        try:
            # Compiled kernels of the mutant are its own
            compiled = {"NUMBA_CACHE_DIR": kernels} if "/cpu/" in mutant.file else {}
            code = pytest(copy, mutant.tests, **compiled)
        finally:
            path.write_text(text)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    return {PASSED: "SURVIVED", FAILED: "killed", None: "killed"}.get(code, f"PYTEST {code}")


def pytest(copy: Path, tests: Sequence[str], *, shown: bool = False, **more: str) -> int | None:
    """Exit code of pytest; None if it did not end in time. Failures are printed if `shown`."""
    # Without .pyc files, whose dates have seconds only
    environment = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"} | more
    environment["PYTHONPATH"] = os.pathsep.join([str(copy / "src"), str(copy)])
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(copy.parent / "inductor")
    output = copy.parent / "output.txt"
    process = FORKS.Process(target=child.run, args=(copy, tests, output, environment))
    process.start()
    process.join(None if shown else LONGEST)
    if process.exitcode is None:
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        return None
    code = process.exitcode - child.ENDED
    if code not in (PASSED, *([] if shown else [FAILED])):
        print(output.read_text(errors="replace")[-2000:])
    return code


if __name__ == "__main__":
    sys.exit(main())
