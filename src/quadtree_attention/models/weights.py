# SPDX-License-Identifier: Apache-2.0
"""Files of weights: checkpoints read without running their code, safetensors written with a card.

A card is JSON beside the weights, `b2.json` for `b2.safetensors`: the model, the keyword arguments
that rebuild it, where the weights come from. Model and arguments are also inside the weights file,
so that it can travel alone.

Example:
    >>> import tempfile, timm
    >>> from pathlib import Path
    >>> model = timm.create_model("test_quadtree", num_classes=5, topk=2)
    >>> path = Path(tempfile.mkdtemp()) / "tiny.safetensors"
    >>> card = {"model": "test_quadtree", "kwargs": {"num_classes": 5, "topk": 2}}
    >>> _ = save_weights(path, model.state_dict(), card)
    >>> load_model(path).stages[0].blocks[0].attn.topk
    (2, 2, 2)
"""

import argparse
import difflib
import hashlib
import inspect
import json
import os
import pickle
import re
import secrets
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quadtree_attention import __version__
from quadtree_attention.errors import CheckpointError, MissingDependencyError, OptionError
from quadtree_attention.models.convert import check_fit

try:
    import timm
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file, save
    from timm.models import model_entrypoint
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        f"weights need timm and safetensors, got {error}; pip install 'quadtree-attention[models]'"
    ) from error

_numpy_scalar: Callable[..., Any] = np.float64().__reduce__()[0]  # type: ignore[assignment]
# Beside tensors, training scripts store their arguments and numpy numbers. These are data: to make
# them runs no code of the file's choosing. (numpy has moved `scalar`; files name its old place.)
_PLAIN_DATA: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    argparse.Namespace,
    np.dtype,
    *(type(np.dtype(name)) for name in ("float64", "float32", "int64", "int32", "bool")),
    *((_numpy_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
]
_WRAPPERS = ("module.", "_orig_mod.")  # DistributedDataParallel, torch.compile


def known_models() -> list[str]:
    """Names of the models that this package has registered with timm."""
    ours = __name__.split(".")[0] + "."
    return [
        name for name in timm.list_models() if model_entrypoint(name).__module__.startswith(ours)
    ]


def build_model(name: str, **options: Any) -> nn.Module:
    """One of this package's models, by the name it has in timm; nothing is downloaded.

    Raises:
        OptionError: There is no such model, or it has no such option.
    """
    if name not in (known := known_models()):
        close = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "take one of them"
        raise OptionError(f"the model must be one of {', '.join(known)}, got {name!r}; {hint}")
    # timm's own arguments could make it fetch or open other files, as a card should not.
    if reserved := options.keys() & inspect.signature(timm.create_model).parameters.keys():
        raise OptionError(
            f"options must be those of the model {name}, got {', '.join(sorted(reserved))}; "
            "call timm.create_model for what timm does"
        )
    try:
        return timm.create_model(name, **options)
    except TypeError as error:
        raise OptionError(
            f"{name} cannot be built with {options}: {error}; leave out what it does not know"
        ) from error


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Tensors of a checkpoint, by name, on the CPU; code that a pickle asks for is never run.

    Reads safetensors by that suffix, else what `torch.save` writes: a state dict, alone or as the
    entry `state_dict` or `model` of a larger file. Prefixes of wrappers around the whole model
    (`module.`) are taken off.

    Raises:
        CheckpointError: There is no such file, or no tensors can be read from it safely.
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
    """Writes weights and their card: both in full, or neither.

    Args:
        path: File to write, `.safetensors`; the card gets the same name with `.json`.
        tensors: Tensors by name.
        card: What to tell about them as JSON: `model`, a name in timm, `kwargs` that rebuild it,
            and whatever else. Counts, checksum and version are added.
        overwrite: Replace files that are there.

    Returns:
        The card as written.

    Raises:
        OptionError: The path does not do, or something is there already.
        CheckpointError: Writing failed; what was there before is unchanged.
    """
    path = check_target(path, overwrite=overwrite)
    own = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    essentials = {"model": card["model"], "kwargs": card["kwargs"]}
    # One entry, because safetensors shuffles several, and with them the checksum.
    data = save(own, metadata={"card": json.dumps(essentials)})
    full = {
        **card,
        "tensors": len(own),
        "sha256": hashlib.sha256(data).hexdigest(),
        "version": __version__,
    }
    text = json.dumps(full, indent=2) + "\n"
    try:
        _replace_all({path: data, card_path(path): text.encode()})
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror or error}; what was there before is "
            "unchanged; make room or write elsewhere"
        ) from error
    return full


def check_target(path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """The path, where weights and card can be written to it; else raises `OptionError`."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise OptionError(f"weights are written as .safetensors, got {str(path)!r}; name it so")
    if not os.path.isdir(path.parent):
        raise OptionError(f"there is no directory {str(path.parent)!r} to write to; make it first")
    for target in (path, card_path(path)):
        if os.path.isdir(target):
            raise OptionError(f"{str(target)!r} is a directory; write to another name")
        if os.path.exists(target) and not overwrite:
            raise OptionError(
                f"{str(target)!r} is there already; write to another name, or overwrite it "
                "(overwrite=True, --force)"
            )
    return path


def card_path(path: str | os.PathLike[str]) -> Path:
    """Where the card of these weights lies."""
    return Path(path).with_suffix(".json")


def read_card(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The card of weights; without the file beside them, its entries `model` and `kwargs`.

    Raises:
        CheckpointError: The weights name no model, or the card beside them is of other weights.
    """
    path = _existing_file(path)
    essentials = _essentials(path)
    beside = card_path(path)
    if not beside.is_file():
        return essentials
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
    return {**card, **essentials}


def load_model(path: str | os.PathLike[str], **overrides: Any) -> nn.Module:
    """The model that weights belong to, with the weights in it.

    Args:
        path: Weights from `save_weights` or `quadtree convert`; the card beside is not needed.
        **overrides: Options of the model that replace or join those it was saved with, such as
            `topk`, `backend` or `drop_path_rate`. For other classes, call the model's
            `reset_classifier` afterwards.

    Raises:
        CheckpointError: The file cannot be read, or does not fit its model.
        OptionError: The model has no such option.
    """
    path = _existing_file(path)
    card = _essentials(path)
    model = build_model(card["model"], **{**card["kwargs"], **overrides})
    tensors = read_checkpoint(path)
    check_fit(model, tensors)
    model.load_state_dict(tensors)
    return model


def fill(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Loads weights, which may be stored in half precision, into a model of float32.

    Raises:
        CheckpointError: They do not fit, or are not finite.
    """
    tensors = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in read_checkpoint(path).items()
    }
    check_fit(model, tensors)
    if broken := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise CheckpointError(
            f"{path} holds numbers that are not finite, in {', '.join(broken[:3])}; training "
            "diverged, or they did not fit into half precision; take other weights"
        )
    model.load_state_dict(tensors)


def file_sha256(path: str | os.PathLike[str]) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _existing_file(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    if not os.path.exists(path):  # Path.exists raises where a folder may not be looked into
        raise CheckpointError(f"there is no file {str(path)!r}; check the path")
    if not os.path.isfile(path):
        raise CheckpointError(f"{str(path)!r} is not a file; name the checkpoint itself")
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
    try:
        with torch.serialization.safe_globals(_PLAIN_DATA), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickles that fail with an error anyway
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if asked := re.search(r"GLOBAL (\S+)", str(error)):
            raise CheckpointError(
                f"{path} holds more than tensors and plain data: loading it would call {asked[1]}; "
                "nothing was run; if you trust the file, save its tensors alone with torch.save "
                "where it was made"
            ) from error
        raise _unreadable(path, "torch.save") from error
    except Exception as error:  # damaged files fail in every possible way
        raise _unreadable(path, "torch.save") from error


def _unreadable(path: Path, kind: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is not a checkpoint, or a damaged one: it cannot be read as a file of {kind}; "
        "get it again, and compare its size or checksum with that of the source"
    )


def _unwrap(data: object, path: Path) -> dict[str, Tensor]:
    if isinstance(data, Mapping):
        for entry in ("state_dict", "model"):
            if isinstance(data.get(entry), Mapping):
                data = data[entry]
                break
    if not isinstance(data, Mapping) or not data:
        found = "nothing" if isinstance(data, Mapping) else f"a {type(data).__name__}"
    elif others := [str(name) for name, value in data.items() if not _is_tensor(name, value)]:
        found = f"{len(others)} entries that are none, such as {', '.join(others[:3])}"
    else:
        return dict(data)
    raise CheckpointError(
        f"{path} must hold tensors by name, alone or under 'state_dict' or 'model', got {found}; "
        "save its state dict with torch.save"
    )


def _is_tensor(name: object, value: object) -> bool:
    return isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided


def _essentials(path: Path) -> dict[str, Any]:
    """The model and its arguments, from the weights file itself."""
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("card", "no card")
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, "safetensors") from error
    try:
        match json.loads(text):
            case {"model": str(model), "kwargs": dict(kwargs)}:
                return {"model": model, "kwargs": kwargs}
    except (ValueError, RecursionError):  # not JSON
        pass
    raise CheckpointError(
        f"{path} does not say which model it belongs to: its metadata must have a card with model "
        f"and kwargs, got {text[:200]}; write it with save_weights, or hand it to "
        "timm.create_model(name, checkpoint_path=...)"
    )


def _replace_all(contents: Mapping[Path, bytes]) -> None:
    """Writes every file beside its place, and moves them there when all are on the disk."""
    written: dict[Path, Path] = {}
    try:
        for path, data in contents.items():
            written[path] = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
            with open(written[path], "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        for path, temporary in written.items():
            os.replace(temporary, path)
    finally:
        for temporary in written.values():
            temporary.unlink(missing_ok=True)
