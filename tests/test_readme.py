# SPDX-License-Identifier: Apache-2.0
"""What the documents show is what happens."""

import doctest
import re
import subprocess
import sys

import pytest

from quadtree_attention.cli.options import RENAMED
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()


def test_recipes_and_options_of_the_documents_exist():
    """Commands in README and docs name recipes, variants and options that there are."""
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        text = path.read_text()
        for recipe in re.findall(r"recipes/[\w./-]+\.yaml", text):
            assert (ROOT / recipe).is_file(), f"{path.name}: {recipe}"
        for line in re.findall(r"^quadtree (?!train)(.*)$", text, flags=re.MULTILINE):
            words = re.sub(r"#.*", "", line).split()
            bad = [w for w in words if w in RENAMED or f"{words[0]} {w}" in RENAMED]
            assert not bad, f"{path.name}: quadtree {line}"


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
