"""The explorer in a real browser: what it shows is what the layers kept, and it can be used."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from axe_playwright_python.sync_playwright import Axe

from quadtree_attention import OptionError, QuadtreeAttention, models, record
from quadtree_attention.inspect.explorer import MODULES, balanced, quantised
from quadtree_attention.models.parts.row_attention import RowAttention
from quadtree_attention.tasks import Matcher
from quadtree_attention.viz.page import inlined
from tests.conftest import ROOT
from tests.support import raises

QUERIES = 50
EQUAL = 0.98  # share of kept cells


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def smooth(*shape, seed=0):
    """Maps (B, C, H, W) whose neighbours are alike, so that means over cells tell something."""
    maps = torch.nn.functional.avg_pool2d(noise(*shape, seed=seed), 5, 1, 2)
    return (maps / maps.std()).movedim(1, -1)


def photographs(count, size=(320, 240)):
    generator = np.random.default_rng(0)
    shape = (count, size[1] // 16, size[0] // 16, 3)
    cells = generator.integers(0, 255, shape, dtype=np.uint8)
    return [np.kron(image, np.ones((16, 16, 1), np.uint8)) for image in cells]


def of_maps(variant):
    torch.manual_seed(0)
    layer = QuadtreeAttention(32, 2, num_levels=3, topk=(6, 9), variant=variant, scale=1.0)
    with record(layer) as seen:
        layer(smooth(1, 32, 31, 41))
    return seen, photographs(1)


def of_rows(_):
    torch.manual_seed(0)
    layer = RowAttention(32, 2, num_levels=4, topk=5)
    x = smooth(2, 32, 20, 75) * 6
    with record(layer) as seen:
        layer(x, x.flip(0))
    seen[""].cross = True
    return seen, photographs(2)


@pytest.fixture(scope="module")
def matcher_page(tmp_path_factory):
    """A page of a small matcher of two images of unequal sizes, with matches."""
    torch.manual_seed(0)
    options = {"dims": (16, 24, 32), "num_pairs": 1, "num_heads": 2}
    network = models.create("loftr_quadtree_small", **options).eval()
    images = photographs(1) + photographs(1, (256, 256))
    grey = [torch.from_numpy(x.mean(axis=-1) / 255).float()[None, None] for x in images]
    with torch.no_grad(), record(network, layers="coarse*") as seen:
        network({"image0": grey[0], "image1": grey[1]})
    points = np.array([[160.0, 120], [40, 40]]), np.array([[100.0, 130], [60, 30]])
    path = tmp_path_factory.mktemp("page") / "explore.html"
    page = seen.show(images, matches=(*points, np.array([0.9, 0.4])))
    page.save(path)
    return path


@torch.no_grad()
def of_packaged(_):
    """The packaged matcher on two photographs."""
    folder = ROOT / "examples" / "images"
    matcher = Matcher.from_pretrained(size=320, guided="never")
    with record(matcher.network, layers="*.3.attn") as seen:
        found = matcher(folder / "street0.jpg", folder / "street1.jpg")
    return seen, found.images


MAKERS = [(of_maps, "B"), (of_maps, "A"), (of_rows, "B"), (of_packaged, "B")]


@pytest.mark.parametrize(("make", "variant"), MAKERS)
@torch.no_grad()
def test_cells_are_those_of_the_layer(opened, tmp_path, make, variant):
    seen, images = make(variant)
    seen.show(images).save(tmp_path / "a.html")
    ((name, layer),) = seen.items()
    own, other = layer.topk, tuple(k + 3 for k in layer.topk)
    chosen, equal, total = random.Random(0), 0, 0
    with opened(tmp_path / "a.html") as page:
        samples = page.evaluate("JSON.parse(document.getElementById('about').textContent)")
        samples = samples["layers"][0]["samples"]
        sizes = page.evaluate("explorer.images().map(i => [i.naturalHeight, i.naturalWidth])")
        queries = []
        for i in range(QUERIES):
            number = chosen.randrange(len(samples))
            sample = samples[number]
            height, width = sizes[sample["query"]]
            rows, columns = sample["grid"]
            y, x = chosen.randrange(rows), chosen.randrange(columns)
            top, bottom = sample["band"]
            place = [(x + 0.5) / columns * width - 0.5]
            place.append((top + (y + 0.5) / rows * (bottom - top)) * height - 0.5)
            state = {"x": place[0], "y": place[1], "image": sample["query"]}
            state |= {"head": chosen.randrange(layer[0].heads), "topk": {name: (own, other)[i % 2]}}
            row = int(np.mean(sample["band"]) * len(layer) / 2) if sample["flat"] else number
            queries.append((state, row, (x,) if sample["flat"] else (y, x)))
        states = [state for state, _, _ in queries]
        shown = page.evaluate(
            "states => states.map(s => { explorer.set(s); return explorer.kept(); })", states
        )
    for (state, row, at), kept in zip(queries, shown, strict=True):
        exact = layer[row].look(at, state["head"], state["topk"][name])
        coded = as_stored(layer[row]).look(at, state["head"], state["topk"][name])
        same = True  # children of other parents are not candidates at all
        for level, cells in enumerate(kept):
            found = {tuple(cell[2 - len(at) :]) for cell in cells}
            wanted = set(map(tuple, exact[level].cells[exact[level].kept].tolist()))
            equal += len(found & wanted)
            total += len(wanted)
            if same and found != wanted:
                assert_close(exact[level], coded[level], found, wanted)
                same = False
    assert equal >= EQUAL * total


def as_stored(one):
    """Attention with the queries and keys that the page holds."""
    maps = [x[0].flatten(0, -3).movedim(1, 0).double() for x in (one.q, one.k)]
    restored = []
    for x, like in zip(balanced(*maps), (one.q, one.k), strict=True):
        codes, steps = quantised(x)
        restored.append((codes * steps[:, None, None]).movedim(0, 1).float().view_as(like))
    return replace(one, q=restored[0], k=restored[1])


def assert_close(exact, coded, found, wanted):
    """Scores of exchanged cells differ by at most the error of quantisation at both."""
    logs, changed = (
        {tuple(cell): score for cell, score in zip(
            look.cells.tolist(), look.scores.double().log().tolist(), strict=True)}
        for look in (exact, coded)
    )  # fmt: skip
    error = max(abs(logs[cell] - changed[cell]) for cell in logs)
    lost, gained = wanted - found, found - wanted
    assert max(logs[c] for c in lost) - min(logs[c] for c in gained) <= 2 * error + 1e-6


def test_the_picture_of_all_levels(opened, tmp_path):
    """Bright where the finest level compares, darker where only the coarsest one does."""
    seen, images = of_maps("B")
    seen.show(images).save(tmp_path / "a.html")
    with opened(tmp_path / "a.html") as page:
        alphas = page.evaluate(
            """() => {
              const { attention, maps } = explorer.shown();
              const depth = attention.depth(maps);
              return [Array.from(depth), Array.from(maps[2].looked), Array.from(maps[1].looked)];
            }"""
        )
    depth, finest, middle = map(np.array, alphas)
    assert set(np.unique(depth).round(3)) == {0.333, 0.667, 1.0}
    assert np.array_equal(depth == 1, finest > 0)
    above = middle.reshape(16, 21).repeat(2, 0).repeat(2, 1)[:31, :41].ravel() > 0
    assert np.array_equal(depth > 0.6, above)


def test_the_page_starts_with_the_sharpest_head(tmp_path):
    torch.manual_seed(0)
    layer = QuadtreeAttention(32, 4, num_levels=3, topk=4)
    layer.q_proj.weight.data[16:24] *= 6  # head 2
    with record(layer) as seen:
        layer(smooth(1, 32, 16, 24))
    page = seen.show(photographs(1))
    assert '"head":2' in page.html and 'id="about"' in page.html


def test_controls(opened, matcher_page):
    with opened(matcher_page) as page:
        state = lambda: page.evaluate("explorer.state")  # noqa: E731
        page.select_option("#head", "-1")
        canvas = page.locator("#query")
        box = canvas.bounding_box()
        first = page.locator("#readout").inner_text()
        page.mouse.move(box["x"] + 20, box["y"] + 30)
        page.wait_for_function("t => document.getElementById('readout').innerText !== t", arg=first)
        hovered = state()
        assert hovered["x"] == pytest.approx(20 / box["width"] * 320, abs=2)
        page.mouse.click(box["x"] + 100, box["y"] + 80)
        page.mouse.move(box["x"] + 150, box["y"] + 90)
        assert state()["held"] and state()["x"] == pytest.approx(100 / box["width"] * 320, abs=2)
        page.mouse.click(box["x"] + 100, box["y"] + 80)
        assert not state()["held"]
        canvas.focus()
        page.mouse.move(0, 0)
        before = state()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Shift+ArrowDown")
        assert state()["x"] == pytest.approx(before["x"] + 8)
        assert state()["y"] == pytest.approx(before["y"] + 32)
        page.keyboard.press("h")
        page.keyboard.press("1")
        assert (state()["head"], state()["level"]) == (0, 1)
        cross = state()["layer"]
        page.keyboard.press("l")
        assert state()["layer"] != cross
        page.select_option("#layer", cross)
        page.keyboard.press("a")
        shown = page.evaluate("explorer.kept().map(level => level.length)")
        assert shown == [16, 8]
        slider = page.locator("#sliders input").first
        slider.fill("5")
        assert page.evaluate("explorer.kept()[0].length") == 5
        page.click("#sliders button")
        assert page.evaluate("explorer.kept()[0].length") == 16
        page.select_option("#beside", "full")
        assert page.locator("#second").is_visible()
        assert "Full attention" in page.locator("#second-title").inner_text()
        page.click("#swap")
        assert state()["image"] == 1
        with page.expect_download() as download:
            page.click("#save")
        assert download.value.suggested_filename == "attention.png"


def test_a_link_restores_the_view(opened, matcher_page):
    with opened(matcher_page) as page:
        page.evaluate("explorer.set({x: 200, y: 64, head: 1, level: 0, beside: 'full'})")
        page.locator("#sliders input").first.fill("7")
        page.wait_for_function("() => location.hash.includes('k=7')")
        fragment = page.evaluate("location.hash")
        kept = page.evaluate("explorer.kept()")
    with opened(matcher_page, fragment=fragment) as page:
        assert page.evaluate("explorer.kept()") == kept
        state = page.evaluate("explorer.state")
        assert (state["x"], state["y"], state["head"], state["level"]) == (200, 64, 1, 0)
        assert page.locator("#second").is_visible()
        assert page.locator("#head").input_value() == "1"
    wrong = "#layer=x&image=7&x=a&y=&head=99&level=-3&k=1,b&beside=y"
    with opened(matcher_page, fragment=wrong) as page:
        assert page.evaluate("explorer.kept()[0].length") >= 16


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1280])
def test_sizes_and_accessibility(opened, matcher_page, scheme, width):
    viewport = {"width": width, "height": 720}
    with opened(matcher_page, viewport=viewport, color_scheme=scheme, has_touch=True) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        box = page.locator("#query").bounding_box()
        assert box["width"] > 0.4 * width
        page.touchscreen.tap(box["x"] + 50, box["y"] + 40)
        state = page.evaluate("explorer.state")
        assert state["x"] == pytest.approx(50 / box["width"] * 320, abs=2)
        page.set_viewport_size({"width": 375, "height": 720})
        page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.scrollWidth") <= 375
        found = Axe().run(page).response["violations"]
        serious = [v["id"] for v in found if v["impact"] in ("serious", "critical")]
        assert not serious, json.dumps(found)[:2000]


def test_the_example_of_the_docs(opened):
    """Of this version's sources, small enough, soon there, and fast while the pointer moves."""
    example = ROOT / "docs" / "explore.html"
    text = example.read_text("utf-8")
    assert len(text.encode()) <= 6_000_000
    sources = ROOT / "src" / "quadtree_attention" / "viz" / "explorer"
    assert (sources / "explorer.css").read_text("utf-8") in text
    for module in MODULES:
        assert inlined((sources / module).read_text("utf-8")) in text
    with opened(example, viewport={"width": 1280, "height": 900}) as page:
        (painted,) = page.evaluate(
            "performance.getEntriesByName('first-contentful-paint').map(e => e.startTime)"
        )
        assert painted < 1000  # milliseconds
        box = page.locator("#query").bounding_box()
        page.evaluate("explorer.frames.length = 0")
        for i in range(60):
            page.mouse.move(box["x"] + 20 + 4 * i, box["y"] + 30 + 3 * i)
        frames = page.evaluate("explorer.frames")
        assert len(frames) > 20 and sorted(frames)[len(frames) // 2] < 33  # milliseconds


def test_without_javascript(opened, matcher_page):
    with opened(matcher_page, script=False) as page:
        assert page.locator("#still img").is_visible()
        assert "not compared" in page.locator(".lead").inner_text()
        assert page.locator("#still img").evaluate("i => i.naturalWidth") > 500


def test_in_a_notebook(opened, matcher_page, tmp_path):
    seen, images = of_maps("B")
    frame = seen.show(images)._repr_html_()
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><title>cell</title>{frame}", "utf-8")
    with opened(path, embedded=True) as page:
        assert "Query at" in page.frame_locator("iframe").locator("#readout").inner_text()


def test_bad_input(tmp_path):
    seen, images = of_maps("B")
    page = seen.show(images)
    raises(OptionError, r"written as \.html", page.save, tmp_path / "a.png")
    raises(OptionError, "cannot be written", page.save, tmp_path / "missing" / "a.html")
    raises(OptionError, "outside", seen.show, images, at=(400, 10))
    raises(OptionError, "recorded layer", seen.show, images, layers=["x"])
    raises(OptionError, "one image or two", seen.show, images * 3)
    assert not list(tmp_path.iterdir())
