# SPDX-License-Identifier: Apache-2.0
"""`quadtree detect`: detects objects in images."""

import typer

from quadtree_attention.cli.options import option

HELP = """Detect objects in images with a trained detector.

An IMAGE is a file, a folder of images, or - for standard input. WEIGHTS is best.safetensors of
quadtree train detect; class names are read from its card. Boxes, and masks if the model has them,
are drawn to --out, by default detections.png for one image and the folder detections for several.
--save writes them in COCO's result format. Boxes are x0, y0, x1, y1 in pixels of the image after
EXIF rotation. With --json or --save pictures are written only if --out is given. Unreadable images
are reported on standard error, all others are processed, and the exit code is 1.

\b
Examples:
  quadtree detect street.jpg --weights runs/detect-coco-retinanet-b2/best.safetensors
  quadtree detect photos/ --weights best.safetensors --out found --threshold 0.3
  quadtree detect photos/*.png --weights best.safetensors --json > objects.json
"""

OPTIONS = "images weights out save size shorter_side device dtype batch force json debug"
OWN = {"threshold": option(float, "Minimum score, 0 to 1.", 0.5)}


def run(context: typer.Context) -> None:
    from quadtree_attention.cli.predict import predict_images

    own = ("threshold", "shorter_side")
    predict_images(context, "detect", own=own, picture="detections")
