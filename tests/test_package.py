# SPDX-License-Identifier: Apache-2.0
"""What is published: the archives, and the first command from an environment that has only them."""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from quadtree_attention import __version__
from tests.conftest import ROOT

MIB = 2**20
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_versions_agree():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
    assert f"## {__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_constraints_cover_the_extras():
    """Every requirement of the test environment has an exact version."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()[1:]
    pinned = {normal(line.partition("==")[0]) for line in lines}
    assert lines == sorted(lines, key=str.lower)
    asked = PROJECT["optional-dependencies"]
    for extra in ("models", "train", "export", "sfm", "docs", "dev"):
        for line in [*PROJECT["dependencies"], *asked[extra]]:
            name = normal(line.partition("[")[0].split(">")[0].split("<")[0])
            assert name == "quadtree-attention" or name in pinned, f"{extra}: {line}"


def normal(name: str) -> str:
    return name.strip().lower().replace("_", "-")


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """The wheel and the source archive of the committed files."""
    folder = tmp_path_factory.mktemp("archives")
    subprocess.run(["git", "clone", "--quiet", ROOT, folder / "checkout"], check=True)
    run("-m", "build", "--quiet", "--outdir", folder, folder / "checkout")
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    run("-m", "twine", "check", "--strict", wheel, source)
    return wheel, source


def run(*arguments, python=sys.executable):
    """Runs Python; a package on its path would count as installed."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [python, *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_archives_hold_the_package_and_its_data(archives):
    wheel, source = archives
    assert wheel.stat().st_size < 16 * MIB
    assert source.stat().st_size < 16 * MIB
    names = zipfile.ZipFile(wheel).namelist()
    for part in ("py.typed", "weights/matcher.safetensors", "viz/explorer/app.js", "ops/README.md"):
        assert f"quadtree_attention/{part}" in names
    assert all(name.startswith("quadtree_attention") for name in names)
    with tarfile.open(source) as packed:
        folders = {name.split("/")[1] for name in packed.getnames() if "/" in name}
    assert {"src", "pyproject.toml", "LICENSE"} <= folders
    assert "tests" not in folders


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1], ids=["wheel", "sdist"])
def test_first_command_of_an_installed_archive(archives, tmp_path, which):
    run("-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    run("-m", "pip", "install", "--quiet", f"{archives[which]}[models]", python=python)
    images = [ROOT / "examples/images" / f"street{i}.jpg" for i in (0, 1)]
    command = [tmp_path / "venv/bin/quadtree", "match", *images]
    subprocess.run(command, check=True, cwd=tmp_path)
    assert Path(tmp_path / "matches.png").stat().st_size > 50_000
