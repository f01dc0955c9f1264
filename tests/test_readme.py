# SPDX-License-Identifier: Apache-2.0
"""What the documents show is what happens."""

import doctest
import re
import shlex
import subprocess
import sys

import pytest
import typer

from benchmarks.__main__ import parse
from quadtree_attention.cli.main import app
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()
APP = typer.main.get_command(app)


COMMAND = re.compile(r"^(?:srun )?quadtree ([a-z].*)$|`quadtree ([a-z]+ [^`]*)`", re.MULTILINE)
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


def test_recipes_of_the_documents_exist():
    for path in PAGES:
        for recipe in re.findall(r"recipes/[\w./-]+\.yaml", path.read_text()):
            assert (ROOT / recipe).is_file(), f"{path.name}: {recipe}"


def unknown(line):
    """Words of a command that the program does not accept."""
    if line.startswith("train "):
        return []  # its options are the keys of recipes, see tests/test_recipes.py
    words, command = shlex.split(re.sub(r"[\[\]]", "", line), comments=True), APP
    while words and words[0] in getattr(command, "commands", ()):
        command = command.commands[words.pop(0)]
    if command is APP:
        return words[:1]
    parameters = command.get_params(command.make_context("", [], resilient_parsing=True))
    known = {option for one in parameters for option in (*one.opts, *one.secondary_opts)}
    options = [word.partition("=")[0] for word in words if re.match(r"--?[A-Za-z]", word)]
    return [option for option in options if option not in known]


def test_commands_of_the_documents_exist():
    """With all of their options."""
    count = 0
    for path in PAGES:
        for first, second in COMMAND.findall(path.read_text()):
            for line in re.split(r" \| | && ", (first or second).rstrip("\\")):
                assert unknown(line.removeprefix("quadtree ")) == [], f"{path.name}: {line}"
                count += 1
    assert count > 60
    assert unknown("match a.jpg --colour 1 -x") == ["--colour", "-x"]
    assert unknown("mtach a.jpg") == ["mtach"]


def test_benchmarks_of_the_documents_exist(capsys):
    """Commands outside of provenance, which is indented, have options that there are."""
    lines = [
        line
        for path in (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md")
        for line in re.findall(r"(?<! {4})python -m benchmarks ([a-z][^`\n#|]*)", path.read_text())
    ]
    for line in {*lines, "speed ops --modes --colour", "speed colours", "training x --colour 1"}:
        known = "colour" not in line
        try:
            parse(shlex.split(line))
            refused = False
        except SystemExit:  # also without a GPU or data, which options are checked against
            message = capsys.readouterr().err
            refused = bool(re.search("unrecognized arguments|invalid choice|expected", message))
        assert refused != known, line
    assert len(lines) > 60


def test_worked_example_of_the_mathematics():
    path = ROOT / "src/quadtree_attention/ops/README.md"
    result = doctest.testfile(str(path), module_relative=False)
    assert result.attempted > 3
    assert result.failed == 0


def test_linked_files_exist():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.slow
def test_main_command_in_an_empty_environment(tmp_path):
    """As a new user would: clone, fresh virtual environment, the command under "Try it"."""
    block = re.search(r"<!-- main command -->\n```bash\n(.*?)\n```", README, flags=re.DOTALL)
    subprocess.run(["git", "clone", "--quiet", ROOT, tmp_path / "checkout"], check=True)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    command = f"source {tmp_path}/venv/bin/activate && {block[1]}"
    subprocess.run(["bash", "-euc", command], check=True, cwd=tmp_path / "checkout")
    assert (tmp_path / "checkout/matches.png").stat().st_size > 50_000
