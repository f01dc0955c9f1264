# SPDX-License-Identifier: Apache-2.0
"""`quadtree explore`: writes an HTML page with the selections of every query of a network."""

import html
from pathlib import Path

import typer

from quadtree_attention.cli.options import FILE, TEXT, argument, option
from quadtree_attention.cli.output import say, say_json, tell
from quadtree_attention.tasks.contract import table

HELP = """Write an interactive HTML page with the selection of every query, at every level.

The page is one file, opened from disk, without a server or network. It shows the self attention of
a network on image A, and with B also its cross attention; for the stereo network, attention along
rows of a rectified pair. K, head, layer and level are chosen in the page, and two layers, or full
attention of the same queries and keys, can be compared side by side. It starts with the layer and
the head whose scores are most concentrated.

The default network is the packaged matcher, or with --task stereo the packaged stereo network.
Weights of classifiers, detectors and segmenters show the self attention of their backbone.
--beside adds a second network of the same task, such as one with full, spatial reduction or linear
attention. --layers selects the layers of the page, with * for any characters; by default the last
self and the last cross attention.

\b
Examples:
  quadtree explore a.jpg b.jpg
  quadtree explore left.png right.png --task stereo --out rows.html
  quadtree explore a.jpg b.jpg --layers "*.2.attn,*.3.attn" --at 320,200
  quadtree explore photo.jpg --weights b2.safetensors --layers "stages.0.*"
"""
PAGE = Path("explore.html")
OPTIONS = "weights size device json debug"
NETWORKS = {  # options that `attention` has, too
    "image0": argument(str, "A", "An image.", ...),
    "image1": argument(TEXT, "[B]", "Another one."),
    "beside": option(FILE, "Weights of a second network.", metavar="FILE"),
    "task": option(
        TEXT, "match or stereo.", metavar="TASK", show_default="task of the weights, else match"
    ),
    "layers": option(
        TEXT, "Layers, by names or patterns.", metavar="NAMES", show_default="last self and cross"
    ),
}
OWN = {
    **NETWORKS,
    "out": option(Path, "Page to write, .html.", PAGE, metavar="FILE"),
    "at": option(TEXT, "Initial query.", metavar="X,Y", show_default="a confident match"),
    "credits": option(TEXT, "Text below the page, such as the licence of images.", metavar="TEXT"),
}


def run(context: typer.Context) -> None:
    o = context.params
    from quadtree_attention.cli.recording import look, patterns, point_of
    from quadtree_attention.files import check_writable
    from quadtree_attention.inspect.explorer import make_explorer
    from quadtree_attention.viz.page import check_suffix

    inputs = [image for image in (o["image0"], o["image1"]) if image is not None]
    check_suffix(o["out"])
    check_writable(o["out"], *inputs)
    at = None if o["at"] is None else point_of(o["at"])
    seen = look(o, inputs, at)
    page = make_explorer(
        seen.records,
        seen.images,
        layers=patterns(o["layers"], seen.records),
        at=at,
        names=[Path(name).name for name in inputs],
        credits=html.escape(o["credits"] or ""),
        **seen.found,
    )
    page.save(o["out"])
    size = len(page.html.encode())
    if size > LARGE:
        tell(f"the page has {size / 1e6:.1f} MB; select fewer --layers for a smaller one")
    if o["json"]:
        say_json({"written": str(o["out"]), "bytes": size})
    else:
        say(table({"size": f"{size / 1e6:.1f} MB", "written": str(o["out"])}))


LARGE = 6_000_000  # bytes
