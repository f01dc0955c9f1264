# SPDX-License-Identifier: Apache-2.0
"""`quadtree classify`: classifies images."""

import typer

from quadtree_attention.cli.options import option

HELP = """Classify images with a trained classifier.

An IMAGE is a file, a folder of images, or - for standard input. WEIGHTS is best.safetensors of a
training run, or a file of quadtree convert; class names are read from its card. --out draws every
image with its top classes. Unreadable images are reported on standard error, all others are
classified, and the exit code is 1.

\b
Examples:
  quadtree classify cat.jpg --weights runs/classify-imagenet-b2/best.safetensors
  quadtree classify photos/ --weights b2.safetensors --top 1
  quadtree classify photos/*.png --weights b2.safetensors --json > answers.json
  curl -s https://example.org/cat.jpg | quadtree classify - --weights b2.safetensors
"""

OPTIONS = "images weights out save size device dtype batch force json debug"
OWN = {"top": option(int, "Classes per image.", 5)}


def run(context: typer.Context) -> None:
    from quadtree_attention.cli.predict import predict_images

    predict_images(context, "classify", own=("top",))
