# SPDX-License-Identifier: Apache-2.0
"""`quadtree segment`: semantic segmentation of images."""

import typer

HELP = """Predict the class of every pixel of images.

An IMAGE is a file, a folder of images, or - for standard input. --out writes pictures in the
colours of the classes, with a legend: a file for one image, a folder for several. --save writes
label maps, PNG files of class indices. Unreadable images are reported on standard error, all others
are processed, and the exit code is 1.

--weights takes best.safetensors of quadtree train segment. --window uses a sliding window, for
images that are too large for memory.

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


def run(context: typer.Context) -> None:
    from quadtree_attention.cli.predict import predict_images

    own = ("shorter_side", "window", "stride")
    predict_images(context, "segment", own=own, picture="segments")
