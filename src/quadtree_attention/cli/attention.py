# SPDX-License-Identifier: Apache-2.0
"""`quadtree attention`: draws the scores of one query at every level."""

from pathlib import Path

import typer

from quadtree_attention.cli.explore import NETWORKS
from quadtree_attention.cli.options import INT, option
from quadtree_attention.cli.output import say, say_json
from quadtree_attention.tasks.contract import table

HELP = """Draw the attention of one query at every level.

Every row is a layer: the query's cell at each level, its scores at every level of the quadtree with
the selected cells outlined and cells that are not candidates dark, and full attention of the same
queries and keys. The share of full attention inside the selected cells of each layer is printed,
over all queries of the images.

The default network is the packaged matcher, or with --task stereo the packaged stereo network.
--beside adds a second network of the same task, such as one with full, spatial reduction or
linear attention. --layers selects layers, with * for any characters.

\b
Examples:
  quadtree attention a.jpg b.jpg --at 320,240
  quadtree attention a.jpg b.jpg --at 320,240 --layers "coarse*" --head 2 --out all.png
  quadtree attention left.png right.png --at 200,120 --task stereo
  quadtree attention a.jpg b.jpg --at 320,240 --weights tree.safetensors --beside linear.safetensors
"""
PICTURE = Path("attention.png")
OPTIONS = "weights size device json debug"
OWN = {
    **NETWORKS,
    "at": option(str, "The query, in pixels of A.", ..., metavar="X,Y", show_default=False),
    "out": option(Path, "Picture to write, .png or .jpg.", PICTURE, metavar="FILE"),
    "head": option(INT, "One head, from 0.", metavar="N", show_default="mean of all"),
}


def run(context: typer.Context) -> None:
    from quadtree_attention.cli.predict import check_targets
    from quadtree_attention.cli.recording import look, patterns, point_of
    from quadtree_attention.inspect.still import default_layers, draw_records

    o = context.params
    inputs = [image for image in (o["image0"], o["image1"]) if image is not None]
    at = point_of(o["at"])
    check_targets([o["out"]], [], inputs)
    seen = look(o, inputs, at)
    layers = patterns(o["layers"], seen.records)
    draw_records(seen.records, seen.images, at, o["out"], layers=layers, head=o["head"])
    first = next(iter(seen.records.values()))
    names = default_layers(first, len(seen.images)) if layers is None else layers
    mass = {
        name: [round(share, 4) for share in first[name].mass(queries=128)]
        for name in names
        if first[name].topk
    }
    if o["json"]:
        say_json({"at": list(at), "written": str(o["out"]), "mass": mass})
        return
    rows = {
        f"mass of {name}": ", ".join(f"{100 * share:.1f} %" for share in shares)
        for name, shares in mass.items()
    }
    say(table(rows | {"written": str(o["out"])}))
