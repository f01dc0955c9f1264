# SPDX-License-Identifier: Apache-2.0
"""The site builds without a warning, has no broken link, and works from disk."""

import importlib.util
import json
import os
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from threading import Thread

import pytest

from tests.conftest import ROOT


def load(name):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make, pictures = load("make"), load("pictures")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, "docs/make.py", "--site", folder]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_site_has_every_command_and_public_name(site):
    from quadtree_attention.cli.main import COMMANDS

    commands = make.Page((site / "commands.html").read_text()).anchors
    assert set(COMMANDS) <= commands
    for name, public in make.api().items():
        module = f"quadtree_attention.{name}".rstrip(".")
        page = (site / "api" / f"{(name or 'ops').replace('.', '-')}.html").read_text()
        assert {f"{module}.{x}" for x in public} <= make.Page(page).anchors


def test_formulas_are_mathml(site):
    page = (site / "how-it-works.html").read_text()
    assert page.count('display="block"') >= 4
    assert "arithmatex" not in page


def test_every_public_name_has_an_example():
    """In its docstring, or in the code beside it."""
    for name, public in make.api().items():
        module = import_module(f"quadtree_attention.{name}".rstrip("."))
        for key in public:
            value = getattr(module, key)
            if callable(value) and not key.endswith("Error"):
                found = make.EXAMPLE.search(value.__doc__ or "") or make.example(name, key)
                assert found, f"{module.__name__}.{key} has no example"


def test_broken_links_are_found(tmp_path):
    (tmp_path / "a.html").write_text(
        "<h1 id=here></h1><a href='#here'></a><a href='#gone'></a><a href='b.html#x'></a>"
        "<a href='c.html'></a><a href='https://example.org'></a>"
        '<script src="https://example.org/x.js"></script>'
    )
    (tmp_path / "b.html").write_text("<p id=y></p><img src='a.html'>")
    assert make.broken(tmp_path) == [
        "a.html: #gone",
        "a.html: b.html#x",
        "a.html: c.html",
        "a.html loads https://example.org/x.js",
    ]


def test_external_links_are_requested(tmp_path):
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "there.txt").write_text("here")
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path / "served")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        root = f"http://127.0.0.1:{server.server_port}"
        (tmp_path / "a.html").write_text(
            f"<a href='{root}/there.txt#x'></a><a href='{root}/gone'></a><a href='b.html'></a>"
        )
        found = make.external(tmp_path)
        server.shutdown()
    assert len(found) == 1
    assert found[0].startswith(f"{root}/gone: HTTP Error 404")


def test_arguments_described_together_have_one_row_each():
    text = "Args:\n    q, k: Maps\n        (B, H, W).\n    topk: Cells.\n"
    split = make.TOGETHER.sub(make._one_by_one, text)
    row = "Maps\n        (B, H, W).\n"
    assert split == f"Args:\n    q: {row}    k: {row}    topk: Cells.\n"


def test_signatures_have_the_values_of_constants(site):
    page = (site / "api" / "ops.html").read_text()
    assert "MIN_TOKENS" not in page
    assert "1024" in page


@pytest.mark.parametrize(("letters", "name"), [(19, None), (20, "medium"), (60, "long")])
def test_cells_have_a_class_by_length(letters, name):
    text = f"<b>{'a' * (letters - 2)}</b>\n  &amp;"  # markup and spaces do not count
    cell = f'<td style="">{text}</td>'
    expected = cell if name is None else f'<td class="{name}" style="">{text}</td>'
    assert make.CELL.sub(make._with_length, cell) == expected


def test_no_refused_phrases():
    assert make.phrases() == []


def test_refused_phrases_are_found(tmp_path, monkeypatch):
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / "a.md").write_text("One.\nMust be from 0 to below 1; pass such.\n")
    (tmp_path / "b.md").write_text("A baseline.\n\nThe cells that a query looked at.\n")
    subprocess.run(["git", "-C", tmp_path, "add", "."], check=True)
    monkeypatch.setattr(make, "ROOT", tmp_path)
    found = make.phrases()
    assert [line.partition(" ")[0] for line in found] == ["a.md:2:", "a.md:2:", "b.md:3:"]


@pytest.mark.parametrize(
    ("path", "count"),
    [(f"{make.PACKAGE}/cli/match.py", 1), (f"{make.PACKAGE}/checks.py", 1), ("benchmarks/a.py", 0)],
    ids=["help", "module", "outside"],
)
def test_phrases_of_pages_are_refused_in_the_package(path, count, tmp_path, monkeypatch):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text('"""The file that was asked for."""\n')
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    subprocess.run(["git", "-C", tmp_path, "add", "."], check=True)
    monkeypatch.setattr(make, "ROOT", tmp_path)
    assert len(make.phrases()) == count


@pytest.mark.parametrize("name", pictures.CHARTS)
def test_charts_show_the_results(name):
    """`python docs/pictures.py` draws the committed pictures again."""
    assert pictures.CHARTS[name]() == (ROOT / "docs/images" / f"{name}.svg").read_bytes()


def test_search_works_from_disk(site, chromium):
    page = chromium.new_page()
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((site / "index.html").as_uri())
    page.click("[data-md-component=search-query]")
    page.keyboard.type("calibrate_topk")
    page.wait_for_selector(".md-search-result__item a", state="attached", timeout=20_000)
    found = page.locator(".md-search-result__item a").evaluate_all("all => all.map(a => a.href)")
    page.close()
    assert any("#quadtree_attention.calibrate_topk" in link for link in found), found
    assert all(url.startswith(("file:", "data:")) for url in asked)


def test_search_index_covers_the_pages(site):
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = {Path(entry["location"].partition("#")[0]).name for entry in index["docs"]}
    assert {"install.html", "tour.html", "commands.html", "matching.html", "ops.html"} <= found
