# SPDX-License-Identifier: Apache-2.0
"""Weights files: safe reading of checkpoints, and safetensors with a card.

A card is a JSON file next to the weights, `b2.json` for `b2.safetensors`: the name of the network,
all its options, the origin of the weights. All entries needed for loading are also stored inside
the weights file, which can be used without its card.

Example:
    >>> import tempfile
    >>> from pathlib import Path
    >>> from quadtree_attention import models
    >>> model = models.create("test_quadtree", num_classes=5, topk=2)
    >>> path = Path(tempfile.mkdtemp()) / "tiny.safetensors"
    >>> card = {"model": "test_quadtree", "kwargs": {"num_classes": 5, "topk": 2}}
    >>> _ = save_weights(path, model.state_dict(), card)
    >>> models.load(path).stages[0].blocks[0].attn.topk
    (2, 2, 2)
"""

import argparse
import hashlib
import json
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from quadtree_attention import __version__, checks, files
from quadtree_attention.errors import CheckpointError, OptionError
from quadtree_attention.files import file_sha256
from quadtree_attention.models import registry
from quadtree_attention.models.convert import check_fit, is_official_backbone

with checks.needs("models", "reading and writing weights"):
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file, save

_numpy_scalar: Callable[..., Any] = np.float64().__reduce__()[0]  # type: ignore[assignment]
# Besides tensors, training scripts store their arguments and numpy scalars. Constructing these
# executes no code of the file. (numpy has moved `scalar`; files refer to its old module.)
_PLAIN_DATA: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    argparse.Namespace,
    np.dtype,
    *(type(np.dtype(name)) for name in ("float64", "float32", "int64", "int32", "bool")),
    *((_numpy_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
]
_WRAPPERS = ("module.", "_orig_mod.")  # DistributedDataParallel, torch.compile
# Entries of a card also stored inside the weights: network, preprocessing and output
_FROM_INSIDE = ("model", "kwargs", "task", "topk")  # entries that a card cannot override
_INSIDE = (*_FROM_INSIDE, "classes", "palette", "image_size", "eval_crop", "base_size")


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint, on the CPU; code in a pickle is never executed.

    Reads files with the suffix `.safetensors`, and files of `torch.save`: a state dict, alone or as
    the entry `state_dict` or `model` of a larger file. Prefixes of wrappers around the whole model
    (`module.`) are removed.

    Raises:
        CheckpointError: The file does not exist, or its tensors cannot be read safely.
    """
    path = _existing_file(path)
    tensors = _unwrap(_load(path), path)
    while prefix := next((w for w in _WRAPPERS if all(n.startswith(w) for n in tensors)), ""):
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def save_weights(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    card: Mapping[str, Any],
    *,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write weights and their card atomically.

    Args:
        path: File to write, `.safetensors`; the card has the same name with `.json`.
        tensors: Tensors by name.
        card: JSON metadata: `model`, one of `names()`, its options `kwargs`, and any further
            entries. Options missing in `kwargs`, task, counts, checksum and version are
            added. An entry `topk` is passed to `set_topk` on loading.
        overwrite: Replace existing files.

    Returns:
        The card as written.

    Raises:
        OptionError: The path is not accepted, a file exists, or the card has no network or
            invalid options.
        CheckpointError: Writing failed; existing files are unchanged.
    """
    path = check_target(path, overwrite=overwrite)
    own = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    model = registry.current_name(card["model"], card.get("task"))
    full = {
        **card,
        "model": model,
        "kwargs": registry.complete(model, card["kwargs"]),
        "task": registry.SPECS[model].task,
    }
    inside = {key: full[key] for key in _INSIDE if full.get(key) is not None}
    # A single entry, because safetensors does not preserve the order of several.
    data = save(own, metadata={"card": json.dumps(inside)})
    full |= {
        "tensors": len(own),
        "sha256": hashlib.sha256(data).hexdigest(),
        "version": __version__,
    }
    text = json.dumps(full, indent=2) + "\n"
    try:
        files.write_all({path: data, card_path(path): text.encode()})
    except OptionError as error:
        raise CheckpointError(str(error)) from error
    return cast(dict[str, Any], json.loads(text))


def check_target(path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Return the path; raise `OptionError` if weights and card cannot be written there."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise OptionError(f"weights are written as .safetensors, got {str(path)!r}; name it so")
    for target in (path, card_path(path)):
        files.check_writable(target)
        if os.path.exists(target) and not overwrite:
            raise OptionError(
                f"{str(target)!r} is there already; write to another name, or overwrite it "
                "(overwrite=True, --force)"
            )
    return path


def card_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of the card of weights."""
    return Path(path).with_suffix(".json")


def read_card(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the card of weights; without a card file, the entries inside the weights.

    Raises:
        CheckpointError: The weights have no metadata, or the card is of other weights.
    """
    path = _existing_file(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"weights must be a .safetensors file, got {str(path)!r}; pass the run's "
            "best.safetensors, which training writes when it ends; quadtree convert "
            f"{path.name} --save {path.stem}.safetensors makes one of an official checkpoint"
        )
    inside = _inside(path)
    beside = card_path(path)
    if not beside.is_file():
        return inside
    try:
        card = json.loads(beside.read_bytes())
        checksum = card["sha256"]
    except (OSError, ValueError, RecursionError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{beside} is not a card: {error}; delete it or restore it"
        ) from error
    if checksum != (found := file_sha256(path)):
        raise CheckpointError(
            f"{beside} is the card of other weights: it has sha256={checksum!r}, {path} has "
            f"{found!r}; restore the one that belongs to it, or delete it"
        )
    return {**inside, **card} | {key: inside[key] for key in _FROM_INSIDE if key in inside}


def fill(
    model: nn.Module, path: str | os.PathLike[str], tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Load weights, which may be stored in half precision, into a float32 model.

    Args:
        model: The network.
        path: Weights file.
        tensors: Tensors of the file to load; None: all.

    Raises:
        CheckpointError: The weights do not fit, or are not finite.
    """
    tensors = read_checkpoint(path) if tensors is None else tensors
    own = {name: x.float() if x.is_floating_point() else x for name, x in tensors.items()}
    check_fit(model, own)
    if broken := [name for name, tensor in own.items() if not tensor.isfinite().all()]:
        raise CheckpointError(
            f"{path} holds numbers that are not finite, in {', '.join(broken[:3])}; training "
            "diverged, or they did not fit into half precision; take other weights"
        )
    model.load_state_dict(own)


def fill_backbone(backbone: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load weights of a classifier or backbone; only classifier tensors may be unused.

    Raises:
        CheckpointError: The file cannot be read, does not fit, or is not finite.
    """
    tensors = read_checkpoint(path)
    if is_official_backbone(tensors):
        raise CheckpointError(
            f"{path} is an official checkpoint, whose tensors have other names; convert it "
            f"first: quadtree convert {path} --save backbone.safetensors"
        )
    try:
        fill(backbone, path, {k: x for k, x in tensors.items() if not k.startswith("head.")})
    except CheckpointError as error:
        raise CheckpointError(f"{path} holds no weights of this backbone: {error}") from error


def _existing_file(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    if not os.path.exists(path):  # Path.exists raises for folders without permission
        raise CheckpointError(f"there is no file {str(path)!r}; check the path")
    if not os.path.isfile(path):
        raise CheckpointError(f"{str(path)!r} is not a file; pass the checkpoint file")
    if not os.access(path, os.R_OK):
        raise CheckpointError(f"{str(path)!r} may not be read; change its permissions")
    if path.stat().st_size == 0:
        raise CheckpointError(f"{str(path)!r} is empty; get or write it again")
    return path


def _load(path: Path) -> object:
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, "safetensors") from error
    _check_unpacked(path)
    try:
        with torch.serialization.safe_globals(_PLAIN_DATA), warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # warnings about pickles, which fail with an error anyway
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if asked := re.search(r"GLOBAL (\S+)", str(error)):
            raise CheckpointError(
                f"{path} holds more than tensors and plain data: loading it would call {asked[1]}; "
                "nothing was run; if you trust the file, save only its tensors with torch.save "
                "where it was created"
            ) from error
        raise _unreadable(path, "torch.save") from error
    except Exception as error:  # decoders raise many kinds of errors for damaged files
        raise _unreadable(path, "torch.save") from error


def _check_unpacked(path: Path) -> None:
    """Raise for a file with an implausible compression ratio, before it is unpacked."""
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, OSError):
        return  # an older format, which is not compressed, or damaged
    if unpacked > 10 * (packed := path.stat().st_size) + 2**26:  # no weights compress so well
        raise CheckpointError(
            f"{path} has {packed / 2**20:.1f} MiB and unpacks to {unpacked / 2**20:,.0f} MiB, as "
            "no weights do; nothing was unpacked; torch.save does not compress, so save it again "
            "where it was created"
        )


def _unreadable(path: Path, kind: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is not a checkpoint, or a damaged one: it cannot be read as a file of {kind}; "
        "download it again, and compare its size or checksum with the source"
    )


def _unwrap(data: object, path: Path) -> dict[str, Tensor]:
    if isinstance(data, Mapping):
        for entry in ("state_dict", "model"):
            if isinstance(data.get(entry), Mapping):
                data = data[entry]
                break
    if not isinstance(data, Mapping) or not data:
        found = "nothing" if isinstance(data, Mapping) else f"a {type(data).__name__}"
    elif others := [str(name) for name, x in data.items() if not _is_tensor(name, x)]:
        found = f"{len(others)} other entries, such as {', '.join(others[:3])}"
    else:
        return dict(data)
    raise CheckpointError(
        f"{path} must hold tensors by name, alone or under 'state_dict' or 'model', got {found}; "
        "save its state dict with torch.save"
    )


def _is_tensor(name: object, value: object) -> bool:
    return isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided


def _inside(path: Path) -> dict[str, Any]:
    """Return the card inside the weights."""
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("card", "no card")
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, "safetensors") from error
    try:
        match json.loads(text):
            case {"model": str(), "kwargs": dict(), **others} as card:
                task, topk = others.get("task", ""), others.get("topk", {})
                if isinstance(task, str) and isinstance(topk, dict):
                    return {key: card[key] for key in _INSIDE if key in card}
    except (ValueError, RecursionError):  # not JSON
        pass
    raise CheckpointError(
        f"{path} has no model name: its metadata must have a card with model "
        f"and kwargs, got {text[:200]}; write it with save_weights, or pass it to "
        "timm.create_model(name, checkpoint_path=...)"
    )
