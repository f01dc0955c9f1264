# SPDX-License-Identifier: Apache-2.0
"""Records what one checkout does: `python driver.py CHECKOUT SECTION`, in the folder of the record.

The package is that of the checkout; these tests, which make the inputs, are those of the command.
"""

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.numpy import load_file

from quadtree_attention import models, synthetic, use_backend
from quadtree_attention.tasks.contract import get_task
from quadtree_attention.tasks.training.recipe import read_recipe
from tests.support import tiny
from tests.support.official import recipe_state

INPUTS = "inputs"
RECORD = "record-{}.json"  # of a section
ARRAYS = "arrays-{}.npz"
SECTIONS = ("predictions", "synthetic", "commands", "recipes", "training")
MASKS = {  # a card of weights
    "model": "mask_rcnn_test_quadtree",
    "kwargs": tiny.NETWORKS["detect"][1] | {"detections_per_img": 10},
}
VOLATILE = {  # keys of JSON: times, versions, names of files
    "seconds", "images_per_second", "version", "date", "written", "machine", "saved", "command",
}  # fmt: skip
SCALE = {  # options of the debug recipes, for runs of about 15 steps
    "classify": ["--trainer.max_epochs=2"],
    "match": [],
    "stereo": [],
    "detect": ["--trainer.max_epochs=2", "--data.generated_count=32"],
    "segment": ["--trainer.max_epochs=2"],
}

Record = tuple[dict[str, Any], dict[str, np.ndarray]]  # plain data, and arrays by name


def make_inputs(checkout: Path) -> None:
    """Images, and tiny weights and data of all tasks; made once, by the older checkout."""
    shutil.rmtree(INPUTS, ignore_errors=True)
    inputs = Path(INPUTS)
    shutil.copytree(checkout / "examples" / "images", inputs / "images")
    (inputs / "photos").mkdir()
    for i, name in enumerate("abc"):
        tiny.picture(i, (90 - 20 * i, 60 + 10 * i)).save(inputs / "photos" / f"{name}.png")
    for task in tiny.NETWORKS:
        tiny.write_weights(task, inputs / f"{task}.safetensors")
        tiny.write_data(task, inputs / task)
    tiny.write_weights("detect", inputs / "masks.safetensors", **MASKS)
    official = recipe_state("classification_quadtree_b0")
    torch.save({"model": official}, inputs / "official.pth")


# ---- sections


def record_predictions(checkout: Path) -> Record:
    """Initial weights of the tiny networks, and results of these and of the packaged ones."""
    arrays: dict[str, np.ndarray] = {}
    for task, (name, options) in tiny.NETWORKS.items():
        torch.manual_seed(1)
        for key, tensor in models.create(name, **options).state_dict().items():
            arrays[f"initial/{task}/{key}"] = tensor.numpy()
    folder = Path(INPUTS, "images")
    scene = [folder / f"{side}.jpg" for side in ("left", "right")]
    pair = [folder / f"stereo_{side}.jpg" for side in ("left", "right")]
    calls: list[tuple[str, str, dict[str, Any], list[list[Path]]]] = [
        ("match", "packaged", {"size": 320}, [scene]),
        ("stereo", "packaged", {"size": 256}, [pair]),
        ("stereo", "packaged-near", {"size": 192, "max_disparity": 60}, [pair]),
    ]
    photos = sorted(Path(INPUTS, "photos").iterdir())
    items = {"match": [photos[:2], photos[1:]]}
    items["stereo"] = [[Path(INPUTS, "stereo", side, "0.png") for side in ("left", "right")]]
    for kind in (*tiny.NETWORKS, "masks"):
        task = "detect" if kind == "masks" else kind
        own = items.get(kind, [[photo] for photo in photos])
        calls.append((task, kind, tiny.OWN.get(task, {}), own))
    for backend in ("cpu", "reference"):
        with use_backend(backend):
            for task, kind, own, items in calls:
                path = None if "packaged" in kind else Path(INPUTS, f"{kind}.safetensors")
                predictor = get_task(task).load("predictor")
                call = predictor.from_pretrained(path, device="cpu", **own)
                for i, images in enumerate(items):
                    for key, value in vars(call(*images)).items():
                        if isinstance(value, np.ndarray):
                            arrays[f"{backend}/{task}/{kind}/{i}/{key}"] = value
    return {}, arrays


def record_synthetic(checkout: Path) -> Record:
    textures = synthetic.ProceduralTextures(4, size=64)
    arrays = {}
    for kind in ("homography_pairs", "scene_pairs", "stereo_pairs"):
        pairs = getattr(synthetic, kind)(textures, [3, 4], size=(48, 64))
        for field, value in vars(pairs).items():
            if isinstance(value, torch.Tensor):
                arrays[f"{kind}/{field}"] = value.numpy()
    return {}, arrays


def record_commands(checkout: Path) -> Record:
    """Exit codes, JSON and written files of the commands."""
    record: dict[str, Any] = {}
    shutil.rmtree("out", ignore_errors=True)
    Path("out").mkdir()
    photos, images = f"{INPUTS}/photos", f"{INPUTS}/images"
    scene = [f"{images}/left.jpg", f"{images}/right.jpg"]
    pair = [f"{images}/stereo_left.jpg", f"{images}/stereo_right.jpg"]
    cameras = ["--K0", "500,500,240,180", "--K1", "500,500,240,180"]
    weights = {
        name: ["--weights", f"{INPUTS}/{name}.safetensors"] for name in (*tiny.NETWORKS, "masks")
    }
    calls = {
        "info": ["info", "--grid", "30x40"],
        "info-plan": ["info", "--plan", "--grid", "200x336", "--heads", "1", "--levels", "4",
                      "--topk", "32"],
        "match": ["match", *scene, "--size", "320", "--max", "50", "--save", "out/match.npz",
                  *cameras],
        "match-pairs": ["match", "--pairs", f"{INPUTS}/match/pairs.txt", "--images",
                        f"{INPUTS}/match", "--save", "out/matches", *weights["match"]],
        "stereo": ["stereo", *pair, "--size", "192", "--save", "out/stereo.pfm", "--depth",
                   "out/depth.npy", "--focal", "500", "--baseline", "0.1"],
        "stereo-folders": ["stereo", f"{INPUTS}/stereo/left", f"{INPUTS}/stereo/right", "--save",
                           "out/disparities", *weights["stereo"]],
        "classify": ["classify", photos, *weights["classify"]],
        "detect": ["detect", photos, *weights["detect"], "--threshold", "0.001"],
        "detect-masks": ["detect", photos, *weights["masks"], "--threshold", "0.05"],
        "segment": ["segment", photos, *weights["segment"], "--save", "out/labels"],
        "segment-window": ["segment", f"{photos}/a.png", *weights["segment"], "--window", "32",
                           "--save", "out/window.png"],
    }  # fmt: skip
    suffixes = {"classify": ".npz", "detect": ".json"}  # one file for all samples
    for task in tiny.NETWORKS:
        data = [f"{INPUTS}/{task}"]
        if task == "match":
            data = [f"{INPUTS}/match/pairs.txt", "--images", f"{INPUTS}/match"]
        file = [f"{INPUTS}/{task}.safetensors", "--data", *data]
        out = f"out/scored-{task}{suffixes.get(task, '')}"
        calls[f"evaluate-{task}"] = ["evaluate", task, *file, "--save", out]
    for words in calls.values():
        words += ["--device", "cpu", "--json"]
    calls["convert"] = ["convert", f"{INPUTS}/official.pth", "--save", "out/b0.safetensors",
                        "--json"]  # fmt: skip
    for name, words in calls.items():
        command = [sys.executable, "-P", "-m", "quadtree_attention.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True)
        record[name] = {"exit": done.returncode}
        try:
            record[name]["json"] = _steady(json.loads(done.stdout))
        except ValueError:
            record[name]["printed"] = (done.stdout + done.stderr)[-1000:]
    arrays = {
        f"{path}/{key}": value
        for path in sorted(Path("out").rglob("*"))
        for key, value in _file_arrays(path).items()
    }
    return record, arrays


def _steady(value: Any) -> Any:
    """JSON without times and the like."""
    if isinstance(value, dict):
        return {key: _steady(x) for key, x in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [_steady(x) for x in value]
    return value


def _file_arrays(path: Path) -> dict[str, np.ndarray]:
    """Numbers of a file that a command has written; of pictures of results, the pixels."""
    if path.suffix == ".npz":
        with np.load(path) as stored:
            return {key: stored[key] for key in stored if stored[key].dtype.kind in "fiub"}
    if path.suffix == ".npy":
        return {"values": np.load(path)}
    if path.suffix == ".png":
        with Image.open(path) as picture:
            return {"pixels": np.asarray(picture)}
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix == ".pfm":
        return {"bytes": np.frombuffer(path.read_bytes(), np.uint8)}
    return {}


def record_recipes(checkout: Path) -> Record:
    """Contents by file and variant."""
    record = {}
    for path in sorted((checkout / "recipes").glob("*/*.yaml")):
        for variant in read_recipe(path).variants or [None]:
            recipe = read_recipe(path, variant)
            record[f"{recipe.task}/{path.stem}:{variant}"] = recipe.settings
    return record, {}


def record_training(checkout: Path) -> Record:
    """Weights and history of runs that were killed and resumed."""
    record: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    shutil.rmtree("runs", ignore_errors=True)
    for task, options in SCALE.items():
        folder = Path("runs", task)
        command = [sys.executable, "-P", "-m", "quadtree_attention.cli", "train", task, "--config",
                   str(checkout / "recipes" / task / "debug.yaml"), "--run_dir", str(folder),
                   "--save_every=3", *options, "--trainer.enable_progress_bar=false"]  # fmt: skip
        killed = _kill_at_checkpoint(command, folder / "last.ckpt")
        subprocess.run([*command, "--resume"], check=True, stdout=subprocess.DEVNULL)
        end = torch.load(folder / "last.ckpt", weights_only=True)
        if killed >= end["global_step"]:
            raise RuntimeError(f"{task}: the run had ended before it was killed")
        record[task] = {"steps": end["global_step"]}
        with (folder / "history.csv").open() as file:
            record[task]["history"] = _steady(list(csv.DictReader(file)))
        for name, tensor in end["state_dict"].items():
            arrays[f"{task}/{name}"] = tensor.numpy()
        for name, values in load_file(folder / "best.safetensors").items():
            arrays[f"{task}/best/{name}"] = values
    return record, arrays


def _kill_at_checkpoint(command: list[str], checkpoint: Path) -> int:
    """Kills a run (SIGKILL) as soon as it has a checkpoint; the step of that."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        if checkpoint.exists():
            process.send_signal(signal.SIGKILL)
            process.wait()
            return torch.load(checkpoint, weights_only=True)["global_step"]
        time.sleep(0.02)
    raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}, no checkpoint")


def main(checkout: str, section: str) -> None:
    if section == INPUTS:
        make_inputs(Path(checkout))
        return
    record, arrays = globals()[f"record_{section}"](Path(checkout))
    content = io.BytesIO()
    np.savez(content, **arrays)
    Path(ARRAYS.format(section)).write_bytes(content.getvalue())
    Path(RECORD.format(section)).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    os.environ.setdefault("TQDM_DISABLE", "1")
    main(*sys.argv[1:])
