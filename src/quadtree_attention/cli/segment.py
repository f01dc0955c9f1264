# SPDX-License-Identifier: Apache-2.0
"""`quadtree segment`: the class of every pixel of images."""

import typer

from quadtree_attention.cli.output import command

HELP = """Segment images: a class for every pixel.

Draws every image in the colours of its classes, with a legend: --out, a file for one image, a
folder for several. --save writes label maps, PNG files whose pixels are class numbers. A folder
stands for the images in it, - for standard input. Images that cannot be read are named and left
out, and the exit code is 1.

--weights takes best.safetensors of quadtree train segment. For images that are too large for
memory, --window slides a window over them.

\b
Examples:
  quadtree segment street.jpg --weights best.safetensors
  quadtree segment street.jpg --weights best.safetensors --out street.png --save labels.png
  quadtree segment photos --weights best.safetensors --out pictures --save labels
  quadtree segment huge.jpg --weights best.safetensors --window 512 --stride 384
  quadtree segment street.jpg --weights best.safetensors --json
"""

OPTIONS = (
    "images weights out save size shorter_side window stride device dtype batch force json debug"
)


def register(app: typer.Typer) -> None:
    command(app, "segment", segment, HELP, OPTIONS)


def segment(context: typer.Context) -> None:
    from quadtree_attention.cli.predict import predict_images

    own = ("shorter_side", "window", "stride")
    predict_images(context, "segment", own=own, picture="segments")
