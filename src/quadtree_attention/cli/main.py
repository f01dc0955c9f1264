# SPDX-License-Identifier: Apache-2.0
"""Commands and their options; what a command does is imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from quadtree_attention.cli.evaluations import evaluate_app
from quadtree_attention.cli.options import (
    Debug,
    DetectorSize,
    Device,
    Images,
    Json,
    JsonList,
    SegmenterSize,
    Stride,
    Window,
    mistakes_on_one_line,
)
from quadtree_attention.cli.texts import (
    CLASSIFY_HELP,
    CONVERT_HELP,
    DETECT_HELP,
    EVALUATE_HELP,
    INFO_HELP,
    MATCH_HELP,
    SEGMENT_HELP,
    STEREO_HELP,
    TRAIN_HELP,
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain text reads the same in a terminal, in a pipe and in a log
    pretty_exceptions_enable=False,
)
app.add_typer(evaluate_app, name="evaluate", help=EVALUATE_HELP)


@app.callback()
def _quadtree() -> None:
    """QuadTree attention: train and use models, and see what attention costs."""


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
        from quadtree_attention.tasks.training.run import run_command

        run_command(task, context.args)


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
        int | None,
        typer.Option(
            help="Most pixels of the longer side; those below 640 are enlarged.", show_default="800"
        ),
    ] = None,
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
    size: SegmenterSize = None,
    window: Window = None,
    stride: Stride = None,
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
    size: DetectorSize = None,
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
