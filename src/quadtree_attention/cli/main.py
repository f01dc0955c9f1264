# SPDX-License-Identifier: Apache-2.0
"""Commands and their options; what a command does is imported when it runs."""

import sys
import traceback
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

CONVERT_HELP = """Turn an official checkpoint into weights for this package.

Reads classification, detection and segmentation checkpoints, also whole detectors and segmenters,
of which it takes the backbone, and matchers: LoFTR and its quadtree form. Code in the file is never
run, and every tensor of the backbone or matcher is accounted for. Writes OUT.safetensors, and
beside it OUT.json, which says what it is.

\b
Examples:
  quadtree convert quadtree_b2.pth -o b2.safetensors
  quadtree convert retinanet.pth -o b1_det.safetensors --json
  quadtree convert mine.pth -o mine.safetensors --model quadtree_b_b2 --act gelu --topk 16
  quadtree convert quadtree_b2.pth -o b2_features.safetensors --num-classes 0 --force
  quadtree convert indoor.ckpt -o indoor.safetensors --model quadtree_indoor
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

MATCH_HELP = """Find what two images have in common, and how the camera moved.

A and B are images of any size and kind. Points are (x, y) pixels of the images as they are seen,
that is, turned as their EXIF tag says. --out draws the matches, --save writes keypoints0,
keypoints1 and confidence as npz; without either, and without --json, the picture goes to
matches.png. With --K0 and --K1, each fx,fy,cx,cy or 9 numbers or a text file with them, the
relative pose is printed, by two estimators. Weights come with the package.

--pairs matches many: every line of the file names two images in --images, as in SuperGlue's files
(image0 image1 [rotation0 rotation1 [K0 K1 [T_0to1]]]), and gets one STEM0__STEM1.npz in --save-dir.
A rotation turns the image by so many quarters counter-clockwise first, and points are pixels of the
turned image. Pairs that are there already are skipped. An image that cannot be read is named at the
end, the others are matched, and the exit code is 1.

\b
Examples:
  quadtree match a.jpg b.jpg
  quadtree match a.jpg b.jpg --out matches.jpg --save matches.npz --size 1024 --threshold 0.5
  quadtree match a.jpg b.jpg --K0 1165,1165,649,484 --K1 camera1.txt
  quadtree match a.jpg b.jpg --json --max 500 > matches.json
  quadtree match --pairs pairs.txt --images photos --save-dir OUT --device cuda
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

EVALUATE_MATCH_HELP = """Score matches in files against true poses and homographies.

PAIRS lists pairs of images, one to a line, in the format of SuperGlue: image0 image1 rotation0
rotation1 K0 K1 T_0to1 for a pose, or image0 image1 and 9 numbers of a homography. OUT is a folder
that quadtree match --pairs PAIRS --save-dir OUT has filled, or another program in the same way:
STEM0__STEM1.npz per pair, with keypoints0, keypoints1 and confidence. A pair without such a file
counts as failed.

Shows the area under the curve of recall over error (AUC), for poses up to 5, 10 and 20 degrees,
for the corners of homographies up to 3, 5 and 10 pixels, the median error, the share of correct
matches and their number; AUC always with two estimators, as the choice can move it by more than a
better matcher does.

\b
Examples:
  quadtree evaluate match --pairs pairs.txt --predictions OUT
  quadtree evaluate match --pairs graf.txt --predictions OUT --images graf --json
  quadtree evaluate match --pairs outdoor.txt --predictions OUT --epipolar 1e-4 --out scores.json
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
def mistakes_on_one_line(*, debug: bool = False) -> Iterator[None]:
    """Ends the command with the message alone where the user can put something right."""
    try:
        yield
    except QuadtreeAttentionError as error:
        if debug:
            traceback.print_exc()
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
        typer.Argument(
            metavar="CHECKPOINT", help="Official .pth, .pt, .ckpt or .safetensors file."
        ),
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
    position: Annotated[
        str | None,
        typer.Option(
            help="Position encoding of a matcher, fixed, or legacy for some old ones.",
            show_default="fixed",
        ),
    ] = None,
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
                position=position,
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


@app.command(help=MATCH_HELP)
def match(
    image0: Annotated[
        str | None, typer.Argument(metavar="A", help="An image.", show_default=False)
    ] = None,
    image1: Annotated[
        str | None, typer.Argument(metavar="B", help="Another one.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Picture to draw, .png or .jpg.", show_default=False)
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Matches to write, .npz.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    size: Annotated[
        int, typer.Option(help="Pixels of the longer side that images are matched at.")
    ] = 640,
    threshold: Annotated[
        float | None,
        typer.Option(help="Least confidence, 0 to 1.", show_default="that of the weights"),
    ] = None,
    max_matches: Annotated[
        int | None, typer.Option("--max", help="Keep the N best.", metavar="N", show_default="all")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda.", show_default="cuda if there is one")
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="Weights of a matcher, .safetensors.", show_default="of the package"),
    ] = None,
    camera0: Annotated[
        str | None, typer.Option("--K0", help="Camera of A.", metavar="K", show_default=False)
    ] = None,
    camera1: Annotated[
        str | None, typer.Option("--K1", help="Camera of B.", metavar="K", show_default=False)
    ] = None,
    pairs: Annotated[
        Path | None, typer.Option(help="File of pairs.", metavar="FILE", show_default=False)
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(help="Folder of their images.", metavar="DIR", show_default="that of FILE"),
    ] = None,
    save_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for their matches.", metavar="OUT", show_default=False),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Match pairs again; matches by other settings go.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where mistakes arise.")] = False,
) -> None:
    with mistakes_on_one_line(debug=debug):
        from quadtree_attention.cli.match import Request, run

        all_read = run(
            Request(
                image0=image0,
                image1=image1,
                out=out,
                save=save,
                K0=camera0,
                K1=camera1,
                pairs=pairs,
                images=images,
                save_dir=save_dir,
                force=force,
                weights=weights,
                size=size,
                threshold=threshold,
                max_matches=max_matches,
                device=device,
            ),
            as_json=json,
        )
    if not all_read:
        raise typer.Exit(1)


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


@evaluate_app.command("match", help=EVALUATE_MATCH_HELP)
def evaluate_match(
    pairs: Annotated[Path, typer.Option(metavar="PAIRS", help="File of pairs with their truth.")],
    predictions: Annotated[
        Path, typer.Option(metavar="OUT", help="Folder of the matches, an .npz per pair.")
    ],
    images: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the images; homographies and turned images need it.",
            show_default=False,
        ),
    ] = None,
    pose_pixels: Annotated[
        float, typer.Option(help="Threshold of the estimators of poses, in pixels.")
    ] = 0.5,
    epipolar: Annotated[
        float,
        typer.Option(
            help="Matches are correct below this squared distance from epipolar lines, normalised; "
            "outdoors 1e-4 is usual."
        ),
    ] = 5e-4,
    side: Annotated[
        int,
        typer.Option(
            help="Measure homographies at this shorter side of image 1, as LoFTR does; 0: at the "
            "size it has."
        ),
    ] = 480,
    out: Annotated[
        Path | None, typer.Option(help="JSON to write, with every pair.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with every pair.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where mistakes arise.")] = False,
) -> None:
    with mistakes_on_one_line(debug=debug):
        from quadtree_attention.cli.evaluate_match import run
        from quadtree_attention.tasks.match.evaluate import Settings

        settings = Settings(pose_pixels=pose_pixels, epipolar=epipolar, side=side)
        run(pairs, predictions, images=images, out=out, settings=settings, as_json=json)
