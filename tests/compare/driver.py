# SPDX-License-Identifier: Apache-2.0
"""Records what one checkout does: `python driver.py CHECKOUT SECTION`, in the folder of the record.

It imports the package of that checkout and nothing else of it, so it runs in old checkouts too;
where interfaces were renamed, it takes the one that is there.
"""

import csv
import importlib
import io
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

INPUTS = "inputs"
SECTIONS = ("predictions", "synthetic", "commands", "recipes", "training")
TINY = {  # model, its options, what else is in the card
    "match": ("quadtree_small", {"dims": [16, 24, 32], "num_pairs": 1, "num_heads": 2,
                                 "fine_heads": 2, "topk": 4, "threshold": 0.0}, {}),
    "stereo": ("quadtree_small", {"dims": [8, 8, 8, 8], "dim": 16, "num_layers": 1, "num_heads": 2,
                                  "refine_dim": 4, "context": [8, 8, 8, 8]}, {}),
    "classify": ("test_quadtree", {"num_classes": 3}, {"image_size": 48, "eval_crop": 0.9}),
    "detect": ("retinanet_test_quadtree", {"num_classes": 3, "score_thresh": 0.0, "min_size": 48,
                                           "max_size": 64, "channels": 16,
                                           "detections_per_img": 20}, {}),
    "detect-masks": ("mask_rcnn_test_quadtree", {"num_classes": 3, "score_thresh": 0.0,
                                                 "min_size": 48, "max_size": 64, "channels": 16,
                                                 "detections_per_img": 10}, {}),
    "segment": ("semfpn_test_quadtree", {"num_classes": 3, "channels": 8, "head_channels": 8,
                                         "topk": 4}, {"base_size": None}),
}  # fmt: skip
CLASSES = ["disc", "square", "star"]
PREDICTORS = {
    "match": "Matcher",
    "stereo": "StereoMatcher",
    "classify": "Classifier",
    "detect": "Detector",
    "segment": "Segmenter",
}
RENAMED = {  # networks, by task and old name
    ("match", "quadtree_small"): "loftr_quadtree_small",
    ("match", "quadtree_indoor"): "loftr_quadtree_indoor",
    ("match", "quadtree_outdoor"): "loftr_quadtree_outdoor",
    ("stereo", "quadtree_small"): "sttr_quadtree_small",
    ("stereo", "quadtree"): "sttr_quadtree",
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
DEBUG = {  # recipes of old checkouts
    "classify": "generated-debug",
    "match": "synthetic-debug",
    "stereo": "synthetic-debug",
    "detect": "retinanet-debug",
    "segment": "semfpn-debug",
}


def has(module: str) -> bool:
    """Whether the checkout has a module, which tells its interfaces apart."""
    return find_spec(f"quadtree_attention.{module}") is not None


# ---- inputs, made once, by the older checkout


def make_inputs(checkout: Path) -> None:
    shutil.rmtree(INPUTS, ignore_errors=True)
    inputs = Path(INPUTS)
    shutil.copytree(checkout / "examples" / "images", inputs / "images")
    _make_data(inputs)
    _make_weights(inputs / "weights")
    _make_official(checkout, inputs / "official.pth")


def _blocks(height: int, width: int, seed: int) -> np.ndarray:
    shape = (height // 8 + 1, width // 8 + 1, 3)
    blocks = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return blocks.repeat(8, 0).repeat(8, 1)[:height, :width]


def _make_data(inputs: Path) -> None:
    from PIL import Image

    def save(pixels: np.ndarray, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)

    for i, name in enumerate(["a", "b", "c"]):
        save(_blocks(60 + 10 * i, 90 - 20 * i, i), inputs / "photos" / f"{name}.png")
    for i, name in enumerate(CLASSES):
        for j in range(2):
            save(_blocks(50, 70, 10 + 2 * i + j), inputs / "classes" / "val" / name / f"{j}.png")
    images, objects = [], []
    for i in (1, 2):
        save(_blocks(40, 60, 20 + i), inputs / "objects" / "images" / "val" / f"{i}.png")
        images.append({"id": i, "file_name": f"{i}.png", "width": 60, "height": 40})
        for j, box in enumerate([[2, 3, 20, 18], [30, 9, 17, 18]], start=1):
            x, y, w, h = box
            outline = [[x, y, x + w, y, x + w, y + h, x, y + h]]
            about = {"id": 2 * i + j, "image_id": i, "category_id": 10 * j, "bbox": box}
            objects.append({**about, "area": w * h, "iscrowd": 0, "segmentation": outline})
    categories = [{"id": 10 * i, "name": name} for i, name in enumerate(CLASSES, start=1)]
    path = inputs / "objects" / "annotations" / "instances_val.json"
    path.parent.mkdir()
    path.write_text(
        json.dumps({"images": images, "annotations": objects, "categories": categories})
    )
    for i in range(2):
        save(_blocks(40, 56, 30 + i), inputs / "labels" / "images" / "val" / f"{i}.png")
        labels = np.repeat(np.arange(56)[None] * 3 // 56, 40, axis=0).astype(np.uint8)
        labels[:8, :8] = 9
        save(labels, inputs / "labels" / "labels" / "val" / f"{i}.png")
    about = {"classes": CLASSES, "ignore_index": 9}
    (inputs / "labels" / "classes.json").write_text(json.dumps(about))
    pairs = inputs / "pairs"
    for side in ("left", "right"):
        with Image.open(inputs / "images" / f"stereo_{side}.jpg") as whole:
            for i in range(2):
                save(np.asarray(whole)[100 * i : 100 * i + 96, :160], pairs / side / f"{i}.png")
    (pairs / "disparity").mkdir()
    for i in range(2):
        truth = np.full((96, 160), 8.0 + i, np.float32)
        truth[:10] = np.nan
        np.save(pairs / "disparity" / f"{i}.npy", truth)
    found = [
        {"image_id": one["image_id"], "category_id": one["category_id"], "score": 0.1 * one["id"],
         "bbox": [one["bbox"][0] + 2, *one["bbox"][1:]], "segmentation": one["segmentation"]}
        for one in objects[1:]
    ]  # fmt: skip
    (inputs / "found.json").write_text(json.dumps(found))
    with Image.open(inputs / "images" / "left.jpg") as photo:  # from pixels there to those here
        warp = photo.transform((400, 300), Image.Transform.AFFINE, (1, 0.1, 20, -0.1, 1, 40))
        warp.save(inputs / "images" / "warped.png")
    (a, b), (c, d) = np.linalg.inv([[1, 0.1], [-0.1, 1]])
    near = f"{a} {b} {-a * 20 - b * 40} {c} {d} {-c * 20 - d * 40} 0 0 1"
    camera = "500 0 240 0 500 180 0 0 1"
    motion = "1 0 0 0.1 0 1 0 0 0 0 1 0.02 0 0 0 1"
    (inputs / "pairs.txt").write_text(
        f"left.jpg warped.png {near}\nleft.jpg right.jpg 0 0 {camera} {camera} {motion}\n"
        f"scene0.jpg scene1.jpg 0 1 {camera} {camera} {motion}\n"
    )


def _make_weights(folder: Path) -> None:
    import torch

    from quadtree_attention.models.weights import save_weights

    folder.mkdir()
    for name in TINY:
        model, kwargs, more = TINY[name]
        task = name.partition("-")[0]
        state = _network(name).state_dict()
        if task in ("match", "stereo"):
            state = {n: t.half() if t.is_floating_point() else t for n, t in state.items()}
        card = {"model": model, "kwargs": kwargs, "task": task, **more}
        if "num_classes" in kwargs:
            card["classes"] = CLASSES
        save_weights(folder / f"{name}.safetensors", state, card)
        torch.manual_seed(0)


def _network(name: str) -> Any:
    """A tiny network, initialised by the checkout, with outputs that differ between inputs."""
    import torch

    model, kwargs, _ = TINY[name]
    task = name.partition("-")[0]
    torch.manual_seed(1)
    if has("models.registry"):
        from quadtree_attention import models

        network = models.create(RENAMED.get((task, model), model), **kwargs)
    else:
        place, function = {
            "match": ("matcher", "matcher"),
            "stereo": ("stereo", "stereo_network"),
            "classify": ("weights", "build_model"),
            "detect": ("detection", "detector"),
            "segment": ("segmentation", "segmenter"),
        }[task]
        module = importlib.import_module(f"quadtree_attention.models.{place}")
        network = getattr(module, function)(model, **kwargs)
    heads = {"classify": ("head.",), "segment": ("classifier.",)}.get(task, ())
    for parameter_name, parameter in network.named_parameters():
        if parameter_name.startswith(heads) and heads:
            parameter.data = torch.randn(parameter.shape)
    return network


def _make_official(checkout: Path, path: Path) -> None:
    """A checkpoint under the official names, with weights by name (tests/golden/README.md)."""
    import torch

    name = "manifests/classification_quadtree_b0.json"
    places = [checkout / "tests" / "golden", checkout.parent / "shared" / "golden"]
    manifest = next(place / name for place in places if (place / name).exists())
    state = {}
    for key, shape in json.loads(manifest.read_text())["state_dict"].items():
        numbers = np.random.Generator(np.random.PCG64(zlib.crc32(key.encode())))
        scale = 1 / math.sqrt(max(1, math.prod(shape[1:])))
        state[key] = torch.from_numpy((numbers.standard_normal(shape) * scale).astype(np.float32))
    torch.save({"model": state}, path)


# ---- sections: plain data, and arrays by name


def predictions(checkout: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    from quadtree_attention import use_backend

    arrays: dict[str, np.ndarray] = {}
    for name in TINY:
        for key, tensor in _network(name).state_dict().items():
            arrays[f"initial/{name}/{key}"] = tensor.numpy()
    photos = sorted(Path(INPUTS, "photos").iterdir())
    stereo = [Path(INPUTS, "images", f"stereo_{side}.jpg") for side in ("left", "right")]
    scene = [Path(INPUTS, "images", f"{name}.jpg") for name in ("left", "right")]
    for backend in ("cpu", "reference"):
        with use_backend(backend):
            calls = [
                ("match", "packaged", None, {"size": 320}, [scene]),
                ("stereo", "packaged", None, {"size": 256}, [stereo]),
                ("stereo", "packaged-near", None, {"size": 192, "max_disparity": 60}, [stereo]),
                ("match", "tiny", "match", {}, [photos[:2], photos[1:]]),
                ("stereo", "tiny", "stereo", {"size": 160}, [stereo]),
                ("classify", "tiny", "classify", {}, [[photo] for photo in photos]),
                ("detect", "tiny", "detect", {}, [[photo] for photo in photos]),
                ("detect", "masks", "detect-masks", {}, [[photo] for photo in photos]),
                ("segment", "tiny", "segment", {}, [[photo] for photo in photos]),
            ]
            for task, kind, weights, own, items in calls:
                path = weights and Path(INPUTS, "weights", f"{weights}.safetensors")
                call = _predictor(task, path, own)
                for i, images in enumerate(items):
                    for key, value in _arrays(task, call(*map(str, images))).items():
                        arrays[f"{backend}/{task}/{kind}/{i}/{key}"] = value
    return {}, arrays


def _predictor(task: str, path: Path | None, own: dict[str, Any]) -> Any:
    if has(f"tasks.{task}.result"):
        tasks = importlib.import_module("quadtree_attention.tasks")
        if task == "detect":
            own = {**own, "threshold": 0.001}
        return getattr(tasks, PREDICTORS[task]).from_pretrained(path, device="cpu", **own)
    module = importlib.import_module(f"quadtree_attention.tasks.{task}.predictor")
    if task == "detect":
        own = {**own, "score": 0.001}
    return getattr(module, PREDICTORS[task])(path, device="cpu", **own)


def _arrays(task: str, found: Any) -> dict[str, np.ndarray]:
    if task == "classify" and isinstance(found, list):  # of an old checkout
        return {
            "labels": np.array([answer.label for answer in found]),
            "scores": np.array([answer.probability for answer in found]),
        }
    names = {
        "match": ("keypoints0", "keypoints1", "confidence"),
        "stereo": ("disparity", "occlusion"),
        "classify": ("labels", "scores"),
        "detect": ("boxes", "labels", "scores", "masks"),
        "segment": ("labels", "confidence"),
    }[task]
    values = {n: np.asarray(getattr(found, n)) for n in names if getattr(found, n) is not None}
    if task == "classify":
        values = {"labels": values["labels"].astype(np.int64),
                  "scores": values["scores"].astype(np.float64)}  # fmt: skip
    return values


def synthetic(checkout: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    where = "synthetic" if has("synthetic") else "data"
    package = importlib.import_module(f"quadtree_attention.{where}")
    textures = package.ProceduralTextures(4, size=64)
    arrays = {}
    for kind in ("homography_pairs", "scene_pairs", "stereo_pairs"):
        pairs = getattr(package, kind)(textures, [3, 4], size=(48, 64))
        for field, value in vars(pairs).items():
            if hasattr(value, "numpy"):
                arrays[f"{kind}/{field}"] = value.numpy()
    return {}, arrays


def commands(checkout: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    record: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    shutil.rmtree("out", ignore_errors=True)
    Path("out").mkdir()
    new = has("cli.predict")
    save, score = ("--save", "--threshold") if new else ("--save-dir", "--score")
    out, convert = ("--save", "--save") if new else ("--out", "-o")
    weights = {name: f"{INPUTS}/weights/{name}.safetensors" for name in TINY}
    photos, images = f"{INPUTS}/photos", f"{INPUTS}/images"
    stereo = [f"{images}/stereo_left.jpg", f"{images}/stereo_right.jpg", "--size", "192"]
    cameras = ["--K0", "500,500,240,180", "--K1", "500,500,240,180"]
    evaluated = ["--device", "cpu", "--json"]
    calls = {
        "info": ["info", "--grid", "30x40", "--device", "cpu", "--json"],
        "info-plan": ["info", "--plan", "--grid", "200x336", "--heads", "1", "--levels", "4",
                      "--topk", "32", "--json", "--device", "cpu"],
        "convert": ["convert", f"{INPUTS}/official.pth", convert, "out/b0.safetensors", "--json"],
        "match": ["match", f"{images}/left.jpg", f"{images}/right.jpg", "--size", "320",
                  "--max", "50", "--save", "out/match.npz", *cameras, *evaluated],
        "match-tiny": ["match", f"{photos}/a.png", f"{photos}/b.png", "--weights",
                       weights["match"], *evaluated],
        "match-pairs": ["match", "--pairs", f"{INPUTS}/pairs.txt", "--images", images, save,
                        "out/matches", "--size", "320", *evaluated],
        "stereo": ["stereo", *stereo, "--save", "out/stereo.pfm", "--depth", "out/depth.npy",
                   "--focal", "500", "--baseline", "0.1", *evaluated],
        "stereo-folders": ["stereo", f"{INPUTS}/pairs/left", f"{INPUTS}/pairs/right", save,
                           "out/disparities", "--size", "160", *evaluated],
        "classify": ["classify", photos, "--weights", weights["classify"], *evaluated],
        "detect": ["detect", photos, "--weights", weights["detect"], score, "0.001", *evaluated],
        "detect-masks": ["detect", photos, "--weights", weights["detect-masks"], score, "0.05",
                         *evaluated],
        "segment": ["segment", photos, "--weights", weights["segment"], "--save", "out/labels",
                    *evaluated],
        "segment-window": ["segment", f"{photos}/a.png", "--weights", weights["segment"],
                           "--window", "32", "--save", "out/window.png", *evaluated],
        "evaluate-classify": ["evaluate", "classify", weights["classify"], "--data",
                              f"{INPUTS}/classes", out, "out/classes.npz", *evaluated],
        "evaluate-detect": ["evaluate", "detect", weights["detect-masks"], "--data",
                            f"{INPUTS}/objects", out, "out/objects.json", *evaluated],
        "evaluate-found": ["evaluate", "detect", "--predictions", f"{INPUTS}/found.json", "--data",
                           f"{INPUTS}/objects", "--json"],
        "evaluate-segment": ["evaluate", "segment", weights["segment"], "--data",
                             f"{INPUTS}/labels", out, "out/segments", *evaluated],
        "evaluate-stereo": ["evaluate", "stereo", weights["stereo"], "--data", f"{INPUTS}/pairs",
                            out, "out/scored", "--size", "160", *evaluated],
        "evaluate-match": ["evaluate", "match", "--data" if new else "--pairs",
                           f"{INPUTS}/pairs.txt", "--images", images, "--predictions",
                           "out/matches", "--json"],
    }  # fmt: skip
    for name, words in calls.items():
        command = [sys.executable, "-P", "-m", "quadtree_attention.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True)
        record[name] = {"exit": done.returncode}
        try:
            record[name]["json"] = _steady(json.loads(done.stdout))
        except ValueError:
            record[name]["printed"] = (done.stdout + done.stderr)[-1000:]
    for path in sorted(Path("out").rglob("*")):
        for key, value in _file_arrays(path).items():
            arrays[f"{path}/{key}"] = value
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
        from PIL import Image

        with Image.open(path) as picture:
            return {"pixels": np.asarray(picture)}
    if path.suffix == ".safetensors":
        from safetensors.numpy import load_file

        return load_file(path)
    if path.suffix == ".pfm":
        return {"bytes": np.frombuffer(path.read_bytes(), np.uint8)}
    return {}


def recipes(checkout: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Contents by file, or by file and variants, with the old names of networks."""
    import yaml

    record = {}
    for path in sorted((checkout / "recipes").glob("*/*.yaml")):
        content = yaml.safe_load(path.read_text())
        task = content.pop("task", path.parent.name)
        variants = content.pop("variants", None) or {"": {}}
        content.pop("results", None)
        names = list(variants)
        chosen = [(name,) for name in names] + list(itertools.permutations(names, 2))
        for combination in chosen:
            merged = content
            for name in combination:
                merged = _merged(merged, variants[name] or {})
            text = ",".join(combination)
            record[f"{task}/{path.stem}" + (f":{text}" if text else "")] = _old(task, merged)
    return record, {}


def _merged(base: Any, change: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(change, dict):
        return change
    return base | {key: _merged(base.get(key), value) for key, value in change.items()}


def _old(task: str, content: dict[str, Any]) -> dict[str, Any]:
    """The recipe of a task with the old name of its network."""
    named = {new: old for (of, old), new in RENAMED.items() if of == task}
    name = content["model"].get("model")
    renamed = {**content["model"], "model": named.get(name, name)}
    return {"task": task, **content, "model": renamed}


def training(checkout: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Weights and history of runs that were killed and resumed."""
    import torch

    record: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    shutil.rmtree("runs", ignore_errors=True)
    for task, options in SCALE.items():
        recipe = checkout / "recipes" / task / "debug.yaml"
        if not recipe.exists():
            recipe = recipe.with_stem(DEBUG[task])
        folder = Path("runs", task)
        command = [sys.executable, "-P", "-m", "quadtree_attention.cli", "train", task, "--config",
                   str(recipe), "--run_dir", str(folder), "--save_every=3", *options,
                   "--trainer.enable_progress_bar=false"]  # fmt: skip
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
        for name, tensor in _file_arrays(folder / "best.safetensors").items():
            arrays[f"{task}/best/{name}"] = tensor
    return record, arrays


def _kill_at_checkpoint(command: list[str], checkpoint: Path) -> int:
    """Kills a run (SIGKILL) as soon as it has a checkpoint; the step of that."""
    import torch

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
    record, arrays = globals()[section](Path(checkout))
    content = io.BytesIO()
    np.savez(content, **arrays)
    Path(f"arrays-{section}.npz").write_bytes(content.getvalue())
    Path(f"record-{section}.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    os.environ.setdefault("TQDM_DISABLE", "1")
    main(*sys.argv[1:])
