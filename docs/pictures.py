# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of the site into docs/images.

python docs/pictures.py                  # charts and diagrams, from benchmarks/results
python docs/pictures.py walk             # candidates of one query per level, by the packaged matcher
python docs/pictures.py site             # screenshots of the site built by docs/make.py, with Chromium
"""

import argparse
import base64
import io
import json
import shutil
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
OURS, DENSE, OTHER = "#3949ab", "#e65100", "#757575"
FONT = "font-family='system-ui, sans-serif'"


def rows(name: str) -> list[dict[str, Any]]:
    """Rows with values of a result file."""
    text = (ROOT / "benchmarks" / "results" / f"{name}.json").read_text()
    return [row for row in json.loads(text)["rows"] if "values" in row]


# Charts --------------------------------------------------------------------------------------


def chart(width: float, height: float, panels: int) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {
        "svg.hashsalt": "quadtree",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    import matplotlib.pyplot as plt

    return plt.subplots(1, panels, figsize=(width, height), layout="constrained")


def svg(figure: Any) -> bytes:
    import matplotlib.pyplot as plt

    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return file.getvalue()


def speed() -> bytes:
    """Time and memory of one call against tokens, and of a detector beside PVTv2."""
    figure, (time, memory, bars) = chart(10, 3, 3)
    found = rows("speed/ops--nvidia-h200-growth")
    for axes, value, title in (
        (time, "median_ms", "Time of a call in ms"),
        (memory, "peak_mib", "Memory of a call in MiB"),
    ):
        for name, label, colour in (
            ("quadtree", "quadtree", OURS),
            ("sdpa", "dense (SDPA)", DENSE),
        ):
            for which, style in (("forward", "-"), ("forward+backward", "--")):
                points = [
                    (int(row["case"]["case"].removeprefix("growth_")) ** 2, row["values"][value])
                    for row in found
                    if (row["case"]["implementation"], row["case"]["pass"]) == (name, which)
                ]
                told = label if which == "forward" else f"{label}, with backward"
                axes.loglog(*zip(*points, strict=True), style, marker="o", markersize=3,
                            color=colour, label=told)  # fmt: skip
        axes.set(title=title, xlabel="tokens (K 8)")
    time.set_ylim(top=30 * time.get_ylim()[1])  # above the lines
    time.legend(frameon=False, fontsize=7, loc="upper left", labelspacing=0.3)
    cases = {
        "quadtree": ("quadtree", OURS),
        "sr": ("PVTv2, fused", DENSE),
        "held": ("PVTv2", OTHER),
    }
    values = detector()
    for i, (name, (_, colour)) in enumerate(cases.items()):
        ms, mib = values[name]
        bars.barh([i], [ms], color=colour, height=0.55)
        bars.text(1.03 * ms, i, f"{ms:.1f} ms, {mib:.0f} MiB", va="center")
    bars.set(title="RetinaNet b0, 800 x 1333", xlabel="ms (K 32)")
    bars.set_yticks(range(len(cases)), [label for label, _ in cases.values()])
    bars.set_xlim(0, 1.7 * max(ms for ms, _ in values.values()))
    figure.suptitle("NVIDIA H200, bfloat16, CUDA graphs", fontsize=9, color=OTHER)
    return svg(figure)


def detector() -> dict[str, tuple[float, float]]:
    """Milliseconds and MiB of RetinaNet's network by attention, in a CUDA graph."""
    wanted = {"part": "network", "mode": "graph", "precision": "bfloat16"}
    return {
        row["case"]["attention"]: (row["values"]["median_ms"], row["values"]["peak_mib"])
        for row in rows("speed/detectors--nvidia-h200")
        if wanted.items() <= row["case"].items()
    }


def topk() -> bytes:
    """Score against K, in classification and in matching."""
    figure, (left, right) = chart(9, 3, 2)
    panels = (
        (left, "training/attentions--nvidia-h200", "top1", (1, 4, 8, 16),
         "Top-1 in %, 20 classes of Tiny ImageNet", {"sr": "spatial reduction (PVTv2)"}),
        (right, "training/match-attentions--nvidia-h200", "fscore", (1, 4, 8),
         "F-score of matches in %, synthetic scenes", {"full": "dense", "linear": "linear"}),
    )  # fmt: skip
    for axes, file, score, ks, title, others in panels:
        scores: dict[str, list[float]] = {}
        for row in rows(file):
            if row["kind"] == "run":
                scores.setdefault(row["case"]["recipe"], []).append(row["values"]["final"][score])
        names = {k: f"quadtree-b-k{k}" if k != 8 else "quadtree-b" for k in ks}
        means = [fmean(scores[names[k]]) for k in ks]
        axes.plot(ks, means, "-o", color=OURS, label="QuadTree-B")
        for k in ks:
            axes.plot([k] * len(scores[names[k]]), scores[names[k]], ".", color=OURS, alpha=0.4)
        for (name, label), style in zip(others.items(), ("--", ":"), strict=False):
            if name in scores:
                axes.axhline(fmean(scores[name]), color=DENSE, linestyle=style, label=label)
        centre = fmean(means)
        axes.set(title=title, xlabel="K", xticks=ks, ylim=(centre - 4, centre + 4))
        axes.legend(frameon=False, fontsize=8, loc="lower right")
    return svg(figure)


# Diagrams ------------------------------------------------------------------------------------


def architecture() -> bytes:
    """The path of a call through the package."""
    boxes = [  # x, y, width, text, its second line, colour
        (20, 16, 220, "Predictors and commands", "Matcher, quadtree sfm, train, ...", "#e8eaf6"),
        (260, 16, 220, "Networks", "timm backbones, LoFTR, STTR, ...", "#e8eaf6"),
        (500, 16, 220, "Your network", "or accelerate(yours)", "#fff3e0"),
        (20, 106, 460, "QuadtreeAttention, QuadtreeBlock", "projections, learned value pyramid, position encoding", "#c5cae9"),
        (500, 106, 220, "quadtree_sdpa", "sequences, prefix tokens, masks", "#c5cae9"),
        (20, 196, 700, "quadtree_attention(q, k, v, num_levels, topk)", "checks once: a frozen Problem with sizes, levels, K, masks", "#9fa8da"),
        (20, 286, 220, "triton", "fused CUDA kernels, cached launches", "#c5cae9"),
        (260, 286, 220, "cpu", "fused Numba kernels", "#c5cae9"),
        (500, 286, 220, "reference", "PyTorch: any device, any derivative", "#c5cae9"),
    ]  # fmt: skip
    arrows = [
        *((x, 66, 106) for x in (130, 370, 610)),
        *((x, 156, 196) for x in (250, 610)),
        *((x, 246, 286) for x in (130, 370, 610)),
    ]
    parts = [
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 740 366' role='img'>",
        "<rect width='740' height='366' fill='#fff'/>",
        "<defs><marker id='a' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' "
        "orient='auto'><path d='M0 0 8 4 0 8z' fill='#555'/></marker></defs>",
    ]
    for x, start, end in arrows:
        parts.append(
            f"<path d='M{x} {start}V{end - 1}' stroke='#555' fill='none' marker-end='url(#a)'/>"
        )
    for x, y, width, first, second, colour in boxes:
        middle = x + width / 2
        parts.append(
            f"<rect x='{x}' y='{y}' width='{width}' height='50' rx='6' fill='{colour}' stroke='#5c6bc0'/>"
            f"<text x='{middle}' y='{y + 21}' text-anchor='middle' {FONT} font-size='14'>{first}</text>"
            f"<text x='{middle}' y='{y + 39}' text-anchor='middle' {FONT} font-size='11' fill='#444'>{second}</text>"
        )
    note = '"auto" takes the first backend that can run the call; a named one never falls back'
    parts.append(
        f"<text x='370' y='358' text-anchor='middle' {FONT} font-size='10' fill='#555'>{note}</text></svg>"
    )
    return ("\n".join(parts) + "\n").encode()


# Candidates of one query ----------------------------------------------------------------------

PHOTOS = [ROOT / "examples" / "images" / f"street{i}.jpg" for i in (0, 1)]
SECONDS = 3.0  # per level


def walk(layer: str, at: tuple[float, float]) -> bytes:
    """Draw the candidates of the query at a pixel (x, y) of the first photograph, per level."""
    from PIL import Image

    from quadtree_attention import record
    from quadtree_attention.tasks import Matcher

    matcher = Matcher.from_pretrained(guided="never")
    with record(matcher.network, layers=layer) as seen:
        found = matcher(*PHOTOS)
    attention = seen[layer][0]
    photos = [Image.open(path).convert("RGB") for path in PHOTOS]
    scale = found.seen[0][0] / photos[0].width  # of the network's input
    cell = tuple(int(i * scale / 8) for i in reversed(at))
    looks = max(
        (attention.look(cell, head) for head in range(attention.heads)),
        key=lambda looks: float(looks[-1].scores.max()),
    )
    width, height = 340, round(340 * photos[0].height / photos[0].width)
    return _animation(photos, looks, attention, at, (width, height), scale)


def _animation(
    photos: Any, looks: Any, attention: Any, at: Any, size: tuple[int, int], scale: float
) -> bytes:
    (width, height), gap, top = size, 16, 8
    total = len(looks) * SECONDS
    share = 100 / len(looks)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {2 * width + 3 * gap} {height + 46}' role='img'>",
        "<style>"
        f".f{{opacity:0;animation:s {total}s infinite step-end}}"
        f"@keyframes s{{0%{{opacity:1}}{share:.3f}%{{opacity:0}}}}"
        "@media (prefers-reduced-motion:reduce){.f{animation:none}.f:last-of-type{opacity:1}}"
        "</style>",
        f"<rect width='{2 * width + 3 * gap}' height='{height + 46}' fill='#fff'/>",
    ]
    for i, photo in enumerate(photos):
        x = gap + i * (width + gap)
        parts.append(
            f"<image x='{x}' y='{top}' width='{width}' height='{height}' href='{_jpeg(photo, size)}'/>"
        )
    x, y = (gap + at[0] * width / photos[0].width, top + at[1] * height / photos[0].height)
    finest = 8 / scale * width / photos[0].width  # side of a cell of the finest map
    left = 2 * gap + width
    for level, look in enumerate(looks):
        side = finest * 2 ** (len(looks) - 1 - level)
        peak = float(look.scores.max())
        shade = [f"M{left} {top}h{width}v{height}h-{width}z"]
        cells, kept = [], []
        for (cy, cx), score, keep in zip(
            look.cells.tolist(), look.scores.tolist(), look.kept.tolist(), strict=True
        ):
            box = _box(left + cx * side, top + cy * side, side, left + width, top + height)
            if box is None:
                continue
            shade.append("M{0:.1f} {1:.1f}v{3:.1f}h{2:.1f}v-{3:.1f}z".format(*box))
            where = "x='{:.1f}' y='{:.1f}' width='{:.1f}' height='{:.1f}'".format(*box)
            if score > 0.03 * peak:
                cells.append(
                    f"<rect {where} fill='#ffd600' fill-opacity='{0.75 * score / peak:.2f}'/>"
                )
            if keep:
                kept.append(f"<rect {where}/>")
        delay = (level - len(looks)) * SECONDS
        count, last = len(look.cells), level == len(looks) - 1
        text = (
            f"level {level}: {count} cells compared, "
            + ("the finest level" if last else f"{int(look.kept.sum())} kept")
        )  # fmt: skip
        home = (x - (x - gap) % side, y - (y - top) % side)
        parts.append(
            f"<g class='f' style='animation-delay:{delay % total:.1f}s'>"
            f"<path d='{''.join(shade)}' fill='#101428' fill-opacity='.72' fill-rule='evenodd'/>"
            f"{''.join(cells)}<g fill='none' stroke='#ff3d00' stroke-width='1.2'>{''.join(kept)}</g>"
            f"<rect x='{home[0]:.1f}' y='{home[1]:.1f}' width='{side:.1f}' height='{side:.1f}' "
            "fill='#ffd600' fill-opacity='.35' stroke='#ffd600' stroke-width='2'/>"
            f"<text x='{left}' y='{height + top + 22}' {FONT} font-size='14'>{text}</text></g>"
        )
    dense = attention.key_grid[0] * attention.key_grid[1]
    compared = sum(len(look.cells) for look in looks)
    parts.append(
        f"<text x='{gap}' y='{height + top + 22}' {FONT} font-size='14'>one query, {compared} comparisons (dense: {dense})</text></svg>"
    )
    return ("\n".join(parts) + "\n").encode()


def _box(
    x: float, y: float, side: float, right: float, bottom: float
) -> tuple[float, float, float, float] | None:
    """A cell, cut at the border of the picture."""
    width, height = min(side, right - x), min(side, bottom - y)
    return (x, y, width, height) if width > 0.5 and height > 0.5 else None


def _jpeg(photo: Any, size: tuple[int, int]) -> str:
    file = io.BytesIO()
    photo.resize((size[0] * 3 // 2, size[1] * 3 // 2)).save(file, "JPEG", quality=68, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


# Screenshots ---------------------------------------------------------------------------------

PAGES = ("index", "guides/network", "api/ops", "results/index")
SIZES = {"wide": (1280, 900), "narrow": (375, 812)}


def screenshots(site: Path) -> dict[str, bytes]:
    """Pages of the built site, opened from disk."""
    from playwright.sync_api import sync_playwright

    found = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name, (width, height) in SIZES.items():
            page = browser.new_page(viewport={"width": width, "height": height})
            for path in PAGES:
                page.goto((site / f"{path}.html").as_uri())
                page.wait_for_timeout(1000)
                shown = path.replace("/index", "").replace("/", "-")
                found[f"site-{shown}-{name}.jpg"] = page.screenshot(type="jpeg", quality=70)
        browser.close()
    return found


CHARTS = {"architecture": architecture, "speed": speed, "topk": topk}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=["charts", "walk", "site"], default="charts")
    parser.add_argument("--layer", default="coarse_transformer.layers.3.attn")
    parser.add_argument("--at", type=float, nargs=2, default=(497.7, 334.0), help="pixel x y")
    options = parser.parse_args()
    if options.what == "site":
        for name, content in screenshots(ROOT / "site").items():
            (IMAGES / name).write_bytes(content)
            print(f"docs/images/{name}, {len(content) // 1000} kB")
        return 0
    made = CHARTS
    if options.what == "walk":
        made = {"walk": lambda: walk(options.layer, tuple(options.at))}
    for name, draw in made.items():
        (IMAGES / f"{name}.svg").write_bytes(draw())
        print(f"docs/images/{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
