# SPDX-License-Identifier: Apache-2.0
"""`quadtree detect`: objects in images."""

import typer

from quadtree_attention.cli.options import option
from quadtree_attention.cli.output import command

HELP = """Find objects in images with a trained detector.

An IMAGE is a file, a folder, which stands for the images in it, or - for a file on standard input.
WEIGHTS are best.safetensors of quadtree train detect; the names of the classes come from their
card. Boxes, and masks where the model has them, are drawn: for one image to detections.png, for
several into the folder detections, or to --out. --save writes them in COCO's result format. Boxes
are x0, y0, x1, y1 in pixels of the image as it is seen, that is, rotated as its EXIF tag says. With
--json or --save nothing is drawn unless --out is given. An image that cannot be read gets a line on
standard error, the others are processed, and the exit code is 1.

\b
Examples:
  quadtree detect street.jpg --weights runs/detect-coco-retinanet-b2/best.safetensors
  quadtree detect photos/ --weights best.safetensors --out found --threshold 0.3
  quadtree detect photos/*.png --weights best.safetensors --json > objects.json
"""

OPTIONS = "images weights out save size shorter_side device dtype batch force json debug"
OWN = {"threshold": option(float, "Least score, 0 to 1.", 0.5)}


def register(app: typer.Typer) -> None:
    command(app, "detect", detect, HELP, OPTIONS, OWN)


def detect(context: typer.Context) -> None:
    from quadtree_attention.cli.predict import predict_images

    own = ("threshold", "shorter_side")
    predict_images(context, "detect", own=own, picture="detections")
