# SPDX-License-Identifier: Apache-2.0
"""`quadtree evaluate TASK`: the commands and their options."""

from pathlib import Path
from typing import Annotated

import typer

from quadtree_attention.cli.options import (
    Debug,
    DetectorSize,
    Device,
    Json,
    JsonOfPairs,
    SegmenterSize,
    Stride,
    Window,
    mistakes_on_one_line,
)
from quadtree_attention.cli.texts import (
    EVALUATE_CLASSIFY_HELP,
    EVALUATE_DETECT_HELP,
    EVALUATE_MATCH_HELP,
    EVALUATE_SEGMENT_HELP,
    EVALUATE_STEREO_HELP,
)

evaluate_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


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
        typer.Option(
            help="Most pixels of the longer side pairs are matched at.", show_default="800"
        ),
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
    size: SegmenterSize = None,
    window: Window = None,
    stride: Stride = None,
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
    size: DetectorSize = None,
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
