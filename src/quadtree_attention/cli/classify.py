# SPDX-License-Identifier: Apache-2.0
"""`quadtree classify`: what images show."""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from quadtree_attention.cli.evaluate import printable
from quadtree_attention.cli.inputs import STDIN, complain, expand
from quadtree_attention.errors import OptionError, QuadtreeAttentionError
from quadtree_attention.tasks.classify.predictor import Classifier, Prediction

BAR_WIDTH = 20
BLOCKS = " ▏▎▍▌▋▊▉█"  # a bar grows by eighths of a character
Outcome = list[Prediction] | QuadtreeAttentionError


def run(
    images: Sequence[str], weights: Path | None, *, topk: int, device: str | None, as_json: bool
) -> bool:
    """Prints what every image shows; whether all could be read."""
    if weights is None:
        raise OptionError(
            "classifying needs weights, got no --weights; train some with quadtree train classify "
            "--config RECIPE, which writes best.safetensors, or turn an official checkpoint into "
            "some with quadtree convert CHECKPOINT -o b2.safetensors"
        )
    classifier = Classifier(weights, device=device, topk=topk)
    paths, failed = expand(images)
    results: list[dict[str, Any]] = []
    for name, outcome in _with_bar(_outcomes(classifier, paths), len(paths), as_json=as_json):
        if isinstance(outcome, QuadtreeAttentionError):
            failed = True
            complain(outcome)
            results.append({"image": name, "error": str(outcome)})
        elif as_json:
            results.append({"image": name, "predictions": [asdict(p) for p in outcome]})
        else:
            print(printable(as_text(name, outcome)), flush=True)
    if as_json:
        print(json.dumps(results, indent=2))
    return not failed


def as_text(name: str, predictions: Sequence[Prediction]) -> str:
    draw = block_bar if _can_print(BLOCKS) else ascii_bar
    lines = (
        f"  {p.probability * 100:5.1f} %  {draw(p.probability):{BAR_WIDTH}}  {p.name}"
        for p in predictions
    )
    return "\n".join([name, *lines])


def block_bar(share: float) -> str:
    whole, eighths = divmod(round(share * BAR_WIDTH * 8), 8)
    return (BLOCKS[-1] * whole + BLOCKS[eighths]).rstrip()


def ascii_bar(share: float) -> str:
    return "#" * round(share * BAR_WIDTH)


def _outcomes(classifier: Classifier, paths: Sequence[str]) -> Iterator[tuple[str, Outcome]]:
    # One by one, as all of them may be more than fits into memory
    images = (sys.stdin.buffer.read() if path == STDIN else path for path in paths)
    return zip(paths, classifier.each(images), strict=True)


def _with_bar(
    outcomes: Iterator[tuple[str, Outcome]], count: int, *, as_json: bool
) -> Iterable[tuple[str, Outcome]]:
    """Shows a progress bar in a terminal, unless the answers appear there anyway."""
    shown = not as_json and sys.stdout.isatty()
    return tqdm(outcomes, total=count, unit="image", leave=False, disable=True if shown else None)


def _can_print(text: str) -> bool:
    return printable(text) == text
