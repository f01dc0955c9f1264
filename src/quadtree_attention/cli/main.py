# SPDX-License-Identifier: Apache-2.0
"""Commands and their options; what a command does is imported when it runs."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from quadtree_attention.cli.texts import (
    CLASSIFY_HELP,
    CONVERT_HELP,
    DETECT_HELP,
    EVALUATE_CLASSIFY_HELP,
    EVALUATE_DETECT_HELP,
    EVALUATE_HELP,
    EVALUATE_MATCH_HELP,
    EVALUATE_SEGMENT_HELP,
    EVALUATE_STEREO_HELP,
    INFO_HELP,
    MATCH_HELP,
    SEGMENT_HELP,
    STEREO_HELP,
    TRAIN_HELP,
)
from quadtree_attention.errors import QuadtreeAttentionError

# Options that several commands have
Device = Annotated[
    str | None, typer.Option(help="cpu or cuda.", show_default="cuda if there is one")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JsonList = Annotated[bool, typer.Option("--json", help="Print a list as JSON.")]
JsonOfPairs = Annotated[bool, typer.Option("--json", help="Print JSON, with every pair.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show where mistakes arise.")]
Images = Annotated[list[str], typer.Argument(metavar="IMAGE", help="Files, folders, or -.")]

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
    device: Device = None,
    batch: Annotated[int, typer.Option(help="Maps per call.")] = 1,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Also print what the call costs, next to dense attention."),
    ] = False,
    json: Json = False,
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
    task: Annotated[
        str, typer.Argument(metavar="TASK", help="classify, match, stereo, detect or segment.")
    ] = "",
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
    json: Json = False,
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
    device: Device = None,
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
    debug: Debug = False,
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
    images: Images,
    weights: Annotated[
        Path | None, typer.Option(help="Weights of a classifier, .safetensors.", show_default=False)
    ] = None,
    top: Annotated[int, typer.Option(help="Answers per image.")] = 5,
    device: Device = None,
    json: JsonList = False,
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
    device: Device = None,
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
    json: Json = False,
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
            show_default="that of PAIRS",
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
    json: JsonOfPairs = False,
    debug: Debug = False,
) -> None:
    with mistakes_on_one_line(debug=debug):
        from quadtree_attention.cli.evaluate_match import run
        from quadtree_attention.tasks.match.evaluate import Settings

        settings = Settings(pose_pixels=pose_pixels, epipolar=epipolar, side=side)
        run(pairs, predictions, images=images, out=out, settings=settings, as_json=json)


@app.command(help=STEREO_HELP)
def stereo(
    left: Annotated[str, typer.Argument(metavar="LEFT", help="Left image, or a folder of them.")],
    right: Annotated[str, typer.Argument(metavar="RIGHT", help="Right image, or a folder.")],
    out: Annotated[
        Path | None, typer.Option(help="Picture to draw, .png or .jpg.", show_default=False)
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="Disparities to write, .npy, .pfm or .png.", show_default=False),
    ] = None,
    occlusion: Annotated[
        Path | None, typer.Option(help="Picture of what is hidden.", show_default=False)
    ] = None,
    depth: Annotated[
        Path | None, typer.Option(help="Depth to write, .npy.", show_default=False)
    ] = None,
    focal: Annotated[
        float | None, typer.Option(help="Focal length in pixels.", show_default=False)
    ] = None,
    baseline: Annotated[
        float | None, typer.Option(help="Way between the cameras.", show_default=False)
    ] = None,
    offset: Annotated[
        float, typer.Option(help="Added to disparities for depth (doffs of Middlebury).")
    ] = 0.0,
    max_disparity: Annotated[
        float | None,
        typer.Option(help="Largest disparity in pixels.", show_default="that of the weights"),
    ] = None,
    size: Annotated[
        int, typer.Option(help="Pixels of the longer side that pairs are matched at.")
    ] = 960,
    device: Device = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            help="Weights of a stereo network, .safetensors.", show_default="of the package"
        ),
    ] = None,
    save_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for results of folders.", metavar="OUT", show_default=False),
    ] = None,
    file_format: Annotated[
        str, typer.Option("--format", help="Of its files: npz, npy, pfm or png.")
    ] = "npz",
    force: Annotated[
        bool, typer.Option("--force", help="Make again what is there; other settings' results go.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    with mistakes_on_one_line(debug=debug):
        from quadtree_attention.cli.stereo import Request, run

        all_read = run(
            Request(
                left=left,
                right=right,
                out=out,
                save=save,
                occlusion=occlusion,
                depth=depth,
                focal=focal,
                baseline=baseline,
                offset=offset,
                save_dir=save_dir,
                format=file_format,
                force=force,
                weights=weights,
                size=size,
                max_disparity=max_disparity,
                device=device,
            ),
            as_json=json,
        )
    if not all_read:
        raise typer.Exit(1)


@evaluate_app.command("stereo", help=EVALUATE_STEREO_HELP)
def evaluate_stereo(
    data: Annotated[Path, typer.Option(metavar="ROOT", help="Folder of pairs with their truth.")],
    weights: Annotated[
        Path | None,
        typer.Argument(
            metavar="WEIGHTS",
            help="Weights of a stereo network, .safetensors.",
            show_default="of the package",
        ),
    ] = None,
    predictions: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Only score this folder.", show_default=False)
    ] = None,
    layout: Annotated[
        str, typer.Option(help="Of ROOT: auto, folder, scenes, kitti2015, sceneflow, ...")
    ] = "auto",
    split: Annotated[
        str | None, typer.Option(help="train or val.", show_default="everything")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for disparities.", show_default="predictions"),
    ] = None,
    scores: Annotated[
        Path | None, typer.Option(help="JSON to write, with every pair.", show_default=False)
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(help="Pixels of the longer side pairs are matched at.", show_default="960"),
    ] = None,
    max_disparity: Annotated[
        float | None,
        typer.Option(help="Largest disparity in pixels.", show_default="that of the weights"),
    ] = None,
    device: Device = None,
    force: Annotated[bool, typer.Option("--force", help="Make again what is there.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail where a file of a pair is missing.")
    ] = False,
    json: JsonOfPairs = False,
    debug: Debug = False,
) -> None:
    with mistakes_on_one_line(debug=debug):
        from quadtree_attention.cli.evaluate_stereo import Request, run

        run(
            Request(
                data=data,
                weights=weights,
                predictions=predictions,
                layout=layout,
                split=split,
                out=out,
                scores=scores,
                size=size,
                max_disparity=max_disparity,
                device=device,
                force=force,
                strict=strict,
            ),
            as_json=json,
        )


@app.command(help=SEGMENT_HELP)
def segment(
    images: Images,
    weights: Annotated[
        Path | None, typer.Option(help="Weights of a segmenter, .safetensors.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Picture to draw, .png or .jpg, or a folder for several.",
            metavar="PATH",
            show_default="segments.png, or the folder segments",
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            help="Label map to write, .png, or a folder for several.",
            metavar="PATH",
            show_default=False,
        ),
    ] = None,
    json: JsonList = False,
    device: Device = None,
    size: Annotated[
        int | None,
        typer.Option(
            help="Pixels of the shorter side.", metavar="N", show_default="as in training"
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(help="Slide a window of N pixels.", metavar="N", show_default="whole images"),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(help="From a window to the next.", metavar="N", show_default="2/3 of it"),
    ] = None,
    debug: Debug = False,
) -> None:
    with mistakes_on_one_line(debug=debug):
        from quadtree_attention.cli.segment import Request, run

        all_read = run(
            Request(
                images=images,
                weights=weights,
                out=out,
                save=save,
                device=device,
                size=size,
                window=window,
                stride=stride,
            ),
            as_json=json,
        )
    if not all_read:
        raise typer.Exit(1)


@evaluate_app.command("segment", help=EVALUATE_SEGMENT_HELP)
def evaluate_segment(
    weights: Annotated[
        Path | None,
        typer.Argument(
            metavar="WEIGHTS", help="Weights of a segmenter, .safetensors.", show_default=False
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="ROOT", help="Folder of the data.", show_default=False)
    ] = None,
    split: Annotated[str, typer.Option(help="Folder in images and labels of ROOT.")] = "val",
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for label maps.", show_default="label_maps"),
    ] = None,
    predictions: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Only score the label maps in it.", show_default=False),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(
            help="Pixels of the shorter side.", metavar="N", show_default="as in training"
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(help="Slide a window of N pixels.", metavar="N", show_default="whole images"),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(help="From a window to the next.", metavar="N", show_default="2/3 of it"),
    ] = None,
    device: Device = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail where an image or label map is bad or missing.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Make label maps again that are there.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    with mistakes_on_one_line(debug=debug):
        from quadtree_attention.cli.evaluate_segment import Request, run

        run(
            Request(
                weights=weights,
                predictions=predictions,
                data=data,
                split=split,
                out=out,
                size=size,
                window=window,
                stride=stride,
                device=device,
                strict=strict,
                force=force,
            ),
            as_json=json,
        )


@app.command(help=DETECT_HELP)
def detect(
    images: Images,
    weights: Annotated[
        Path | None, typer.Option(help="Weights of a detector, .safetensors.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Picture to draw, or a folder for several.",
            show_default="detections.png, or the folder detections",
        ),
    ] = None,
    score: Annotated[float, typer.Option(help="Least score, 0 to 1.")] = 0.5,
    size: Annotated[
        int | None,
        typer.Option(help="Pixels of the shorter side.", show_default="that of the weights"),
    ] = None,
    device: Device = None,
    json: JsonList = False,
) -> None:
    with mistakes_on_one_line():
        from quadtree_attention.cli.detect import Request, run

        all_read = run(
            Request(images=images, weights=weights, out=out, score=score, size=size, device=device),
            as_json=json,
        )
    if not all_read:
        raise typer.Exit(1)


@evaluate_app.command("detect", help=EVALUATE_DETECT_HELP)
def evaluate_detect(
    weights: Annotated[
        Path | None,
        typer.Argument(
            metavar="WEIGHTS", help="Weights of a detector, .safetensors.", show_default=False
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="ROOT", help="Folder of images and objects.", show_default=False),
    ] = None,
    split: Annotated[str, typer.Option(help="Which of its splits.")] = "val",
    out: Annotated[
        Path | None, typer.Option(help="Results to write, .json.", show_default="results.json")
    ] = None,
    predictions: Annotated[
        Path | None, typer.Option(help="Only score this file.", show_default=False)
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Images per call of the model.")] = 1,
    size: Annotated[
        int | None,
        typer.Option(help="Pixels of the shorter side.", show_default="that of the weights"),
    ] = None,
    device: Device = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail at the first thing that cannot be used.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace results that are there.")] = False,
    json: Json = False,
) -> None:
    with mistakes_on_one_line():
        from quadtree_attention.cli.evaluate_detect import DetectRequest, run

        run(
            DetectRequest(
                weights=weights,
                predictions=predictions,
                data=data,
                split=split,
                out=out,
                batch_size=batch_size,
                size=size,
                device=device,
                strict=strict,
                force=force,
            ),
            as_json=json,
        )
