# SPDX-License-Identifier: Apache-2.0
"""Commands and their options; what a command does is imported when it runs."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from quadtree_attention.errors import QuadtreeAttentionError

# \b keeps the lines of the paragraph that follows as they are
INFO_HELP = """Show versions, devices, and which backends can run a call, and why others cannot.

The options describe the call; without them it is one of a feature matcher on 640 x 480 images. With
--plan also its FLOPs, bytes and memory, level by level and next to dense attention, and which of
the two to use. Nothing is run, and the device need not be present.

\b
Examples:
  quadtree info
  quadtree info --plan --grid 200x336 --heads 1 --levels 4 --topk 32
  quadtree info --grid 60x80 --key-grid 45x100 --topk 32,16 --device cuda
  quadtree info --plan --json --grid 4096 --levels 6 --topk 8 --variant A
"""

CONVERT_HELP = """Turn an official backbone checkpoint into weights for this package.

Reads classification, detection and segmentation checkpoints, also whole detectors and segmenters,
of which it takes the backbone. Code in the file is never run, and every tensor of the backbone is
accounted for. Writes OUT.safetensors, and beside it OUT.json, which says what it is.

\b
Examples:
  quadtree convert quadtree_b2.pth -o b2.safetensors
  quadtree convert retinanet.pth -o b1_det.safetensors --json
  quadtree convert mine.pth -o mine.safetensors --model quadtree_b_b2 --act gelu --topk 16
  quadtree convert quadtree_b2.pth -o b2_features.safetensors --num-classes 0 --force
"""

TRAIN_HELP = """Train a model from a recipe file.

TASK is classify or match. All options of a recipe can be given on the command line as well, and
override it: quadtree train TASK --help lists them. Ctrl-C or a kill loses at most --save_every
steps; go on with --resume. Writes last.ckpt, best.ckpt, best.safetensors, history.csv and
curves.png to --run_dir.

\b
Examples:
  quadtree train classify --config recipes/classify/generated-debug.yaml
  quadtree train classify --config recipes/classify/imagenet-b2.yaml --data.root imagenet
  quadtree train classify --config recipes/classify/imagenet-b2.yaml --resume
  quadtree train classify --config my.yaml --trainer.devices 8 --trainer.num_nodes 2
"""

CLASSIFY_HELP = """Tell what images show, with a trained classifier.

An IMAGE is a file, a folder, which stands for the images in it, or - for a file on standard input.
WEIGHTS are best.safetensors of a training run, or what quadtree convert has written; the names of
the classes come from their card. An image that cannot be read gets a line on standard error, the
others are classified, and the exit code is 1.

\b
Examples:
  quadtree classify cat.jpg --weights runs/imagenet-b2/best.safetensors
  quadtree classify photos/ --weights b2.safetensors --top 1
  quadtree classify photos/*.png --weights b2.safetensors --json > answers.json
  curl -s https://example.org/cat.jpg | quadtree classify - --weights b2.safetensors
"""

EVALUATE_HELP = """Measure how well trained models do.

The model runs once and its answers are kept in a file; the numbers are worked out from that file,
and can be again without the model. quadtree evaluate TASK --help tells more.
"""

EVALUATE_CLASSIFY_HELP = """Measure the accuracy of a classifier on labelled images.

ROOT holds a folder per split and in it one per class (val/cat/1.jpg), or an npz file per split.
Classes are matched with those of WEIGHTS by name. The answers go to --out; if that file is there
and was made from the same weights, images and settings, it is used and the model does not run.
With --predictions such a file is scored, and nothing else is needed. Images that cannot be read are
named on standard error, counted and left out.

\b
Examples:
  quadtree evaluate classify runs/imagenet-b2/best.safetensors --data imagenet
  quadtree evaluate classify b2.safetensors --data imagenet --size 288 --dtype bfloat16 --force
  quadtree evaluate classify b2.safetensors --data pets --split test --out pets.npz --strict
  quadtree evaluate classify --predictions pets.npz --json
"""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain text reads the same in a terminal, in a pipe and in a log
    pretty_exceptions_enable=False,
)
evaluate_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(evaluate_app, name="evaluate", help=EVALUATE_HELP)


@app.callback()
def _quadtree() -> None:
    """QuadTree attention: train and use models, and see what attention costs."""


@contextmanager
def mistakes_on_one_line() -> Iterator[None]:
    """Ends the command with the message alone where the user can put something right."""
    try:
        yield
    except QuadtreeAttentionError as error:
        print("quadtree:", " ".join(str(error).split()), file=sys.stderr)
        raise typer.Exit(2) from None


@app.command(help=INFO_HELP)
def info(
    grid: Annotated[str, typer.Option(help="Query map: 200x336, 4096 or 8x24x40.")] = "60x80",
    key_grid: Annotated[str | None, typer.Option(help="Key map.", show_default="as --grid")] = None,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 8,
    dim: Annotated[int, typer.Option(help="Width of queries and keys, per head.")] = 32,
    value_dim: Annotated[
        int | None, typer.Option(help="Width of values, per head.", show_default="as --dim")
    ] = None,
    levels: Annotated[int, typer.Option(help="Levels of the pyramids.")] = 3,
    topk: Annotated[
        str,
        typer.Option(help="Cells kept per query: 32, or one per level that selects: 32,16."),
    ] = "16",
    variant: Annotated[str, typer.Option(help="A or B.")] = "B",
    dtype: Annotated[str, typer.Option(help="float32, float64, float16 or bfloat16.")] = "float32",
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda.", show_default="cuda if there is one")
    ] = None,
    batch: Annotated[int, typer.Option(help="Maps per call.")] = 1,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Also print what the call costs, next to dense attention."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    from quadtree_attention.cli.info import Question, show

    with mistakes_on_one_line():
        show(
            Question(
                grid=grid,
                key_grid=key_grid,
                heads=heads,
                dim=dim,
                value_dim=value_dim,
                levels=levels,
                topk=topk,
                variant=variant,
                dtype=dtype,
                device=device,
                batch=batch,
            ),
            with_plan=plan,
            as_json=json,
        )


@app.command(help=CONVERT_HELP)
def convert(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="Official .pth, .pt or .safetensors file."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Weights to write, a .safetensors file.")
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Name of the model, checked.", show_default="by its tensors"),
    ] = None,
    act: Annotated[
        str | None,
        typer.Option(
            help="Activation of the value branches, gelu or relu.",
            show_default="gelu with a classifier, else relu",
        ),
    ] = None,
    topk: Annotated[
        int | None,
        typer.Option(help="Cells kept per query.", show_default="8 with a classifier, else 32"),
    ] = None,
    num_classes: Annotated[
        str, typer.Option(help="auto, or 0 to leave out the classifier.")
    ] = "auto",
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that are there.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the card as JSON.")] = False,
) -> None:
    with mistakes_on_one_line():
        from quadtree_attention.cli.convert import Request, run

        run(
            Request(
                checkpoint=checkpoint,
                output=output,
                model=model,
                act=act,
                topk=topk,
                num_classes=num_classes,
                force=force,
            ),
            as_json=json,
        )


@app.command(
    help=TRAIN_HELP,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,  # the options of a task are listed by the task
)
def train(
    context: typer.Context,
    task: Annotated[str, typer.Argument(metavar="TASK", help="classify or match.")] = "",
) -> None:
    if not task or task in ("--help", "-h"):
        print(context.get_help())
        raise typer.Exit(0 if task else 2)
    with mistakes_on_one_line():
        from quadtree_attention.tasks.training.command import train

        train(task, context.args)


@app.command(help=CLASSIFY_HELP)
def classify(
    images: Annotated[list[str], typer.Argument(metavar="IMAGE", help="Files, folders, or -.")],
    weights: Annotated[
        Path | None, typer.Option(help="Weights of a classifier, .safetensors.", show_default=False)
    ] = None,
    top: Annotated[int, typer.Option(help="Answers per image.")] = 5,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda.", show_default="cuda if there is one")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a list as JSON.")] = False,
) -> None:
    with mistakes_on_one_line():
        from quadtree_attention.cli.classify import run

        all_read = run(images, weights, topk=top, device=device, as_json=json)
    if not all_read:
        raise typer.Exit(1)


@evaluate_app.command("classify", help=EVALUATE_CLASSIFY_HELP)
def evaluate_classify(
    weights: Annotated[
        Path | None,
        typer.Argument(
            metavar="WEIGHTS", help="Weights of a classifier, .safetensors.", show_default=False
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="ROOT", help="Folder of the images.", show_default=False)
    ] = None,
    split: Annotated[str, typer.Option(help="Folder or npz file in ROOT.")] = "val",
    out: Annotated[
        Path | None,
        typer.Option(help="Predictions to write, .npz.", show_default="predictions.npz"),
    ] = None,
    predictions: Annotated[
        Path | None, typer.Option(help="Only score this file.", show_default=False)
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Images per call of the model.")] = 64,
    size: Annotated[
        int | None,
        typer.Option(help="Pixels of a side the model sees.", show_default="as in training"),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda.", show_default="cuda if there is one")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    workers: Annotated[
        int | None,
        typer.Option(help="Processes that read images.", show_default="one per core, at most 8"),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail at the first image that cannot be read.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace predictions that are there.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    with mistakes_on_one_line():
        from quadtree_attention.cli.evaluate import ClassifyRequest, classify

        classify(
            ClassifyRequest(
                weights=weights,
                predictions=predictions,
                data=data,
                split=split,
                out=out,
                batch_size=batch_size,
                size=size,
                device=device,
                dtype=dtype,
                workers=workers,
                strict=strict,
                force=force,
            ),
            as_json=json,
        )
