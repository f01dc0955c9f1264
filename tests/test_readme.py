# SPDX-License-Identifier: Apache-2.0
"""What the documents show is what happens."""

import doctest
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()


def test_python_blocks_run(capsys):
    namespace: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        exec(block, namespace)
    assert "torch.Size([1, 60, 80, 8, 32])" in capsys.readouterr().out


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
