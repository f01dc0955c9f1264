# SPDX-License-Identifier: Apache-2.0
"""The shape of the package: the same files in every task, nothing written twice, lazy imports."""

import io
import keyword
import pkgutil
import tokenize
from collections import defaultdict
from importlib import import_module
from pathlib import Path

import pytest

import quadtree_attention
from quadtree_attention.tasks.contract import NAMES
from tests.support.commands import python

SOURCE = Path(quadtree_attention.__file__).parent
TASKS = SOURCE / "tasks"
EVERY_TASK = {  # files that each task has
    "__init__", "data", "draw", "metrics", "module", "predictor", "readers", "result",
}  # fmt: skip
SOME_TASKS = {"augment", "losses"}
OWN = {  # what one task alone has
    "classify": set(),
    "detect": {"generated", "rle"},
    "match": {"guided", "megadepth", "npz", "pose", "posed", "scannet", "truth"},
    "segment": set(),
    "stereo": {"checks", "filling", "formats"},
}
MOST_EQUAL_LINES = 12
LAZY = ("", "models", "tasks")  # packages whose names are imported on first access


def files(task: str) -> set[str]:
    return {path.stem for path in (TASKS / task).glob("*.py")}


@pytest.mark.parametrize("task", NAMES)
def test_tasks_have_the_same_files(task):
    assert files(task) >= EVERY_TASK
    assert files(task) - EVERY_TASK - SOME_TASKS == OWN[task]


def shapes(path: Path) -> list[tuple[str, int]]:
    """The code lines of a file with their numbers, names and values replaced by their kind.

    Comments, docstrings, blank lines, lone brackets and imports are left out.
    """
    lines: dict[int, list[str]] = defaultdict(list)
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    for token in tokens:
        if token.type in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT):
            continue
        if token.type in (tokenize.DEDENT, tokenize.ENDMARKER):
            continue
        if token.type == tokenize.STRING and token.line.strip().startswith(('"""', "'''", 'r"""')):
            continue
        word = token.string
        if token.type == tokenize.NAME and not keyword.iskeyword(word):
            word = "name"
        elif token.type in (tokenize.STRING, tokenize.NUMBER):
            word = "value"
        lines[token.start[0]].append(word)
    found = [(" ".join(words), number) for number, words in sorted(lines.items())]
    return [
        (text, number)
        for text, number in found
        if ("name" in text or "value" in text) and not text.startswith(("import", "from"))
    ]


def test_tasks_share_no_long_run_of_equal_lines():
    """Equal but for names and values; parameter lists, one name a line, say nothing."""
    length = MOST_EQUAL_LINES + 1
    seen: dict[tuple[str, ...], tuple[str, str, int]] = {}
    for task in NAMES:
        for path in sorted((TASKS / task).glob("*.py")):
            code = shapes(path)
            for start in range(len(code) - length + 1):
                window = tuple(text for text, _ in code[start : start + length])
                if len(set(window)) < 5:  # a list, one entry a line
                    continue
                where = (task, path.name, code[start][1])
                other = seen.setdefault(window, where)
                assert other[0] == task, f"{where} repeats {other}"


@pytest.mark.parametrize("package", LAZY)
def test_lazy_names_are_no_submodules(package):
    module = import_module(f"quadtree_attention.{package}".rstrip("."))
    submodules = {info.name for info in pkgutil.iter_modules(module.__path__)}
    assert not submodules & set(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        module.nothing  # noqa: B018


HELP = """
import sys, time
from typer.testing import CliRunner
from quadtree_attention.cli.main import app
def commands(group, prefix=()):
    for info in group.registered_commands:
        yield (*prefix, info.name)
    for info in group.registered_groups:
        yield (*prefix, info.name)
        yield from commands(info.typer_instance, (*prefix, info.name))
asked = [[], *commands(app)]
assert len(asked) > 14, asked
for words in asked:
    result = CliRunner().invoke(app, [*words, "--help"], prog_name="quadtree")
    assert result.exit_code == 0 and len(result.stdout) > 200, words
result = CliRunner().invoke(app, ["--version"])
assert result.exit_code == 0, result.output
heavy = [name for name in ("torch", "numpy", "PIL", "timm", "numba", "cv2") if name in sys.modules]
print(heavy, time.process_time() / len(asked))
"""


def test_help_imports_no_torch():
    assert python(HELP).startswith("[] ")


def test_help_of_one_command_is_quick():
    """CPU seconds of a whole process; 0.5 allowed, 0.2 measured."""
    code = """
import os, sys
from quadtree_attention.cli import main
sys.argv = ["quadtree", "match", "--help"]
try:
    main()
finally:
    print(sum(os.times()[:2]))
"""
    assert float(python(code).split()[-1]) < 0.5
