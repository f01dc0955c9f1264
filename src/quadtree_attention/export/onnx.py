# SPDX-License-Identifier: Apache-2.0
"""ONNX files of whole networks, checked with ONNX Runtime."""

import dataclasses
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import quadtree_attention
from quadtree_attention import checks
from quadtree_attention.errors import ExportError, OptionError
from quadtree_attention.export.layers import (
    Body,
    Operator,
    SharedLayers,
    as_function,
    merge_sizes,
    name_sizes,
)
from quadtree_attention.export.networks import Exportable, Sizes, exportable
from quadtree_attention.files import StrPath, check_writable, write_whole
from quadtree_attention.images import Array

OPSET = 20
TOLERANCE = 1e-3  # of a value, relative to the largest one of its output
PIXELS = 0.1  # the same for points and corners of boxes
LEAST_AGREEMENT = 0.99  # share of values within the tolerance
# The same of matches and detections. Rounding decides between candidates with almost equal scores
LEAST_COMMON = 0.95
SMALLEST = 64  # pixels of a side of a fixed size


@dataclass(frozen=True)
class Check:
    """Comparison of an exported file with PyTorch on images of one size.

    Attributes:
        batch: Batch size.
        sizes: (height, width) of every image.
        agreement: Share of values (of results, for matches and detections) that are equal within
            the tolerance.
        results: Number of values or results in PyTorch.
        largest: Largest difference of the equal ones.
    """

    batch: int
    sizes: Sizes
    agreement: float
    results: int
    largest: float


@dataclass(frozen=True)
class Exported:
    """An exported file.

    Attributes:
        path: The file.
        task: The task of the network.
        inputs: Inputs with their shapes; letters are sizes that may vary.
        outputs: Outputs with their shapes and contents.
        fixed: Sizes that may not vary, in words; empty if all may.
        seconds: Duration of the export without checks.
        bytes: Size of the file.
        checks: Comparisons with PyTorch; empty if there were none.
    """

    path: str
    task: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    fixed: str
    seconds: float
    bytes: int
    checks: tuple[Check, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data."""
        return dataclasses.asdict(self)


def to_onnx(
    network_or_predictor: Any,
    path: StrPath,
    *,
    fixed: tuple[int, int] | None = None,
    threshold: float | None = None,
    check: bool = True,
    progress: bool = False,
) -> Exported:
    """Exports a whole network to an ONNX file.

    Images are inputs of any size, in batches of any size (detectors: of one image), and a score
    threshold is an optional input. The metadata of the file contain the task, the classes and the
    preprocessing. The file is compared with PyTorch before it is written.

    Args:
        network_or_predictor: A network of `models`, or a predictor of `tasks`.
        path: The file to write, `.onnx`.
        fixed: (height, width) of all images; the batch size is then 1. For runtimes that need fixed
            sizes. None: sizes may vary.
        threshold: Default score threshold of a matcher or detector; None: that of the predictor or
            network.
        check: Compare the file with PyTorch at three other sizes, by ONNX Runtime.
        progress: Show a progress bar in a terminal.

    Raises:
        OptionError: It is not a network of this package, or an option is not accepted.
        ExportError: The network cannot be exported, or the file disagrees with PyTorch.
        MissingDependencyError: onnx, onnxscript or onnxruntime is not installed.

    Example:
        >>> import tempfile
        >>> from quadtree_attention import models
        >>> classifier = models.create("test_quadtree", num_classes=2)
        >>> file = tempfile.mkdtemp() + "/tiny.onnx"
        >>> to_onnx(classifier, file).inputs  # doctest: +SKIP
        {'image': '(B, 3, H, W)'}
    """
    with checks.needs("export", "exporting"):
        import onnx_ir
        import onnxscript  # noqa: F401

        if check:
            import onnxruntime  # noqa: F401
    network, predictor = _taken_apart(network_or_predictor)
    if threshold is None:
        threshold = getattr(predictor, "threshold", None)
    checks.between(0, 1, threshold=threshold)
    if fixed is not None:
        checks.at_least(SMALLEST, height=fixed[0], width=fixed[1])
    check_writable(path)
    wrapped = exportable(network, threshold)
    began = time.perf_counter()
    with _steps(6 if check else 3, progress) as step, _on_cpu(wrapped), torch.inference_mode():
        step("tracing")
        layers = SharedLayers(wrapped.network)
        with layers.replaced():
            traced = _traced(wrapped, fixed)
        step("translating")
        model = _translated(wrapped, traced)
        for operator in layers.operators:  # the list grows: a block contains an attention
            with layers.replaced(body=operator.layer):
                function = as_function(operator, _body(wrapped, operator))
            model.functions[function.identifier()] = function
        step("simplifying")
        _simplify(model)
        _add_threshold(model, wrapped.threshold)
        about = _metadata(wrapped, predictor, fixed)
        model.metadata_props.update({k: _text(v) for k, v in about.items()})
        data = onnx_ir.to_proto(model).SerializeToString()
        seconds = time.perf_counter() - began
        found = list(_checks(wrapped, data, fixed, step)) if check else []
    write_whole(path, data)
    return Exported(
        path=str(path),
        task=wrapped.task,
        inputs=about["inputs"],
        outputs=about["outputs"],
        fixed=about["fixed"],
        seconds=seconds,
        bytes=len(data),
        checks=tuple(found),
    )


def pictures(sizes: Sizes, channels: int, batch: int, seed: int) -> tuple[Tensor, ...]:
    """Blurred noise (batch, channels, height, width) in [0, 1]; further images are shifted."""
    generator = torch.Generator().manual_seed(seed)
    largest = [max(size[axis] for size in sizes) + 16 for axis in range(2)]
    noise = torch.rand(batch, channels, *(side // 4 + 1 for side in largest), generator=generator)
    big = nn.functional.interpolate(noise, largest, mode="bicubic").clamp(0, 1)
    return tuple(
        big[:, :, : size[0], 4 * i : 4 * i + size[1]].contiguous() for i, size in enumerate(sizes)
    )


def _taken_apart(network_or_predictor: Any) -> tuple[nn.Module, Any]:
    """The network, and the predictor if there is one."""
    if isinstance(network_or_predictor, nn.Module):
        return network_or_predictor, None
    network = getattr(network_or_predictor, "network", None)
    if not isinstance(network, nn.Module):
        raise OptionError(
            f"to_onnx takes a network or a predictor, got {type(network_or_predictor).__name__}; "
            "pass models.create(...) or Matcher.from_pretrained()"
        )
    return network, network_or_predictor


def _traced(wrapped: Exportable, fixed: tuple[int, int] | None) -> torch.export.ExportedProgram:
    """The operators of a network, with symbolic sizes unless they are fixed."""
    sizes = wrapped.example if fixed is None else (fixed,) * len(wrapped.images)
    batch = 2 if wrapped.dynamic_batch and fixed is None else 1
    images = pictures(sizes, wrapped.channels, batch, 0)
    inputs = (*images, *_threshold(wrapped))
    dynamic: tuple[dict[int, Any], ...] | None = None
    if fixed is None:
        axes = (0, 2, 3) if wrapped.dynamic_batch else (2, 3)
        of_images = dict.fromkeys(axes, torch.export.Dim.DYNAMIC)
        dynamic = (of_images,) * len(images) + ({},) * (len(inputs) - len(images))
    return _exported(wrapped, wrapped, inputs, dynamic)


def _translated(wrapped: Exportable, traced: torch.export.ExportedProgram) -> Any:
    """The ONNX model of traced operators."""
    names = [*wrapped.images, *(["threshold"] if wrapped.threshold is not None else [])]
    return _in_onnx(wrapped, traced, input_names=names, output_names=tuple(wrapped.outputs))


def _body(wrapped: Exportable, operator: Operator) -> Any:
    """The ONNX model of a layer that represents several."""
    inputs, dynamic = operator.example()
    traced = _exported(wrapped, Body(operator.layer), inputs, (dynamic,))
    return _in_onnx(wrapped, traced)


def _exported(
    wrapped: Exportable, module: nn.Module, inputs: tuple[Tensor, ...], dynamic: Any
) -> torch.export.ExportedProgram:
    with _as_export_error(wrapped), torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        # The cache takes longer to fill than it saves: no operator has the same sizes twice
        return torch.export.export(module, inputs, dynamic_shapes=dynamic)


def _in_onnx(wrapped: Exportable, traced: torch.export.ExportedProgram, **names: Any) -> Any:
    with _as_export_error(wrapped), torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        program = torch.onnx.export(
            traced, dynamo=True, verbose=False, optimize=False, opset_version=OPSET, **names
        )
    assert program is not None
    return program.model


@contextmanager
def _as_export_error(wrapped: Exportable) -> Iterator[None]:
    """Turns errors of the exporter into `ExportError`, and hides its warnings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise ExportError(
            f"{type(wrapped.network).__name__} cannot be exported with these options: {reason}"
        ) from error


def _simplify(model: Any) -> None:
    """Inlines layers, folds constants and merges equal nodes; ONNX Runtime fuses operators itself.

    PyTorch's `optimize=True` also rewrites patterns, in a time quadratic in the number of nodes.
    """
    import onnx_ir.passes.common as passes
    from onnxscript import optimizer

    passes.ClearMetadataAndDocStringPass()(model)  # where operators come from, half of a file
    name_sizes(model)
    passes.InlinePass()(model)
    merge_sizes(model)
    for _ in range(2):
        optimizer.fold_constants(model)
        passes.RemoveUnusedNodesPass()(model)
        passes.CommonSubexpressionEliminationPass()(model)
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    passes.DeduplicateInitializersPass()(model)
    passes.RemoveUnusedNodesPass()(model)


def _threshold(wrapped: Exportable) -> tuple[Tensor, ...]:
    return () if wrapped.threshold is None else (torch.tensor(wrapped.threshold),)


def _add_threshold(model: Any, threshold: float | None) -> None:
    """Gives the last input a default value: an initializer of the same name."""
    import onnx_ir

    if threshold is not None:
        value = model.graph.inputs[-1]
        value.const_value = onnx_ir.tensor(np.float32(threshold), name=value.name)
        model.graph.register_initializer(value)


def _metadata(wrapped: Exportable, predictor: Any, fixed: tuple[int, int] | None) -> dict[str, Any]:
    """Metadata for programs that run the file."""
    batch = "B" if wrapped.dynamic_batch and fixed is None else "1"
    inputs = {}
    for i, name in enumerate(wrapped.images):
        letters = f"H{i}, W{i}" if wrapped.task == "match" else "H, W"
        sides = letters if fixed is None else f"{fixed[0]}, {fixed[1]}"
        inputs[name] = f"({batch}, {wrapped.channels}, {sides})"
    if wrapped.threshold is not None:
        inputs["threshold"] = f"(), {wrapped.threshold} by default"
    fixed_sizes = "" if batch == "B" else "batch size 1"
    if fixed is not None:
        fixed_sizes += f", images of {fixed[0]}x{fixed[1]}"
    about: dict[str, Any] = {
        "task": wrapped.task,
        "producer": f"quadtree-attention {quadtree_attention.__version__}",
        "inputs": inputs,
        "outputs": dict(wrapped.outputs),
        "fixed": fixed_sizes,
        "preprocessing": {
            "channels": "grey" if wrapped.channels == 1 else "RGB",
            "range": [0, 1],
            "layout": "BCHW",
        },
    }
    if predictor is not None:
        about["model"] = predictor.card["model"]
        if dataclasses.is_dataclass(predictor.preprocess):
            about["preprocessing"] |= dataclasses.asdict(predictor.preprocess)  # type: ignore[arg-type]
        if hasattr(predictor, "sides"):
            about["preprocessing"]["sides"] = list(predictor.sides)
        if hasattr(predictor, "names"):
            about["classes"] = list(predictor.names)
        about["weights_sha256"] = predictor.settings()["weights_sha256"]
    return about


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# ---- comparison with PyTorch


def _checks(
    wrapped: Exportable, data: bytes, fixed: tuple[int, int] | None, step: Callable[[str], None]
) -> Iterator[Check]:
    """Compares at three sizes.

    Raises:
        ExportError: The results differ.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    threshold = () if wrapped.threshold is None else (torch.tensor(0.0),)
    names = (*wrapped.images, "threshold")
    for i in range(3):
        sizes = wrapped.checked[i] if fixed is None else (fixed,) * len(wrapped.images)
        batch = i + 1 if wrapped.dynamic_batch and fixed is None else 1
        step(f"checking at {_shown(sizes)}")
        inputs = (*pictures(sizes, wrapped.channels, batch, i + 1), *threshold)
        wanted = [x.numpy() for x in wrapped(*inputs)]
        feed = {name: x.numpy() for name, x in zip(names, inputs, strict=False)}
        try:
            found = session.run(list(wrapped.outputs), feed)
        except Exception as error:  # onnxruntime has many classes of errors
            reason = str(error).strip().splitlines()[0][:200]
            raise ExportError(f"ONNX Runtime fails at {_shown(sizes)}: {reason}") from error
        has_rows = wrapped.threshold is not None
        compare = compare_rows if has_rows else compare_values
        agreement, results, largest = compare(
            dict(zip(wrapped.outputs, found, strict=True)),
            dict(zip(wrapped.outputs, wanted, strict=True)),
        )
        if agreement < (LEAST_COMMON if has_rows else LEAST_AGREEMENT):
            raise ExportError(
                f"the exported network disagrees with PyTorch at {_shown(sizes)}: "
                f"{100 * agreement:.1f} % of {results} results are equal; nothing was written"
            )
        yield Check(batch, sizes, agreement, results, largest)


def compare_values(
    found: Mapping[str, Array], wanted: Mapping[str, Array]
) -> tuple[float, int, float]:
    """Share of equal values of dense outputs, their number, and the largest difference of these."""
    equal, largest, count = 0, 0.0, 0
    for name, theirs in wanted.items():
        if found[name].shape != theirs.shape:
            return 0.0, theirs.size, 0.0
        scale = max(1.0, float(np.abs(theirs).max(initial=0)))
        difference = np.abs(found[name] - theirs) / scale
        close = difference <= TOLERANCE
        equal, count = equal + int(close.sum()), count + theirs.size
        largest = max(largest, float(difference[close].max(initial=0)))
    return equal / max(1, count), count, largest


def compare_rows(
    found: Mapping[str, Array], wanted: Mapping[str, Array]
) -> tuple[float, int, float]:
    """Share of results of either that the other has, their number, and the largest difference.

    Two are the same if their integers are equal, their coordinates are within `PIXELS` and other
    numbers within `TOLERANCE`.
    """
    if {len(x) for x in found.values()} == {0} == {len(x) for x in wanted.values()}:
        return 1.0, 0, 0.0
    if not all(len(x) for x in (*found.values(), *wanted.values())):
        return 0.0, max(len(x) for x in wanted.values()), 0.0
    nearest = np.full((len(next(iter(wanted.values()))), len(next(iter(found.values())))), 0.0)
    for name, theirs in wanted.items():
        ours = found[name]
        if np.issubdtype(theirs.dtype, np.integer):
            difference = np.where(theirs[:, None] == ours[None], 0.0, np.inf)
        else:
            tolerance = PIXELS if name in ("boxes", "keypoints0", "keypoints1") else TOLERANCE
            flat0, flat1 = theirs.reshape(len(theirs), -1), ours.reshape(len(ours), -1)
            difference = np.zeros((len(theirs), len(ours)))
            for column in range(flat0.shape[1]):
                one = np.abs(flat0[:, None, column] - flat1[None, :, column]) / tolerance
                difference = np.maximum(difference, one)
        nearest = np.maximum(nearest, difference)
    closest = nearest.min(axis=1), nearest.min(axis=0)
    agreement = min(float((side <= 1).mean()) for side in closest)
    equal = closest[0][closest[0] <= 1]
    return agreement, len(nearest), float(equal.max(initial=0)) * TOLERANCE


def _shown(sizes: Sizes) -> str:
    return " and ".join(dict.fromkeys(f"{height}x{width}" for height, width in sizes))


@contextmanager
def _on_cpu(wrapped: Exportable) -> Iterator[None]:
    """Moves the network to the CPU in evaluation mode, and back."""
    network = wrapped.network
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    training = network.training
    wrapped.to("cpu").eval()
    try:
        yield
    finally:
        network.to(device).train(training)


@contextmanager
def _steps(count: int, progress: bool) -> Iterator[Callable[[str], None]]:
    """A progress bar with the name of the current step."""
    from tqdm import tqdm

    with tqdm(total=count, leave=False, disable=None if progress else True) as bar:
        started = False

        def step(name: str) -> None:
            nonlocal started
            bar.update(int(started))
            started = True
            bar.set_description(name)

        yield step


def summary(exported: Exported) -> dict[str, str]:
    """Rows of text about an exported file."""
    rows = dict(exported.inputs)
    rows |= {f"-> {name}": text for name, text in exported.outputs.items()}
    rows["fixed"] = exported.fixed or "nothing: batch size and image sizes may vary"
    for check in exported.checks:
        rows[f"check {check.batch} x {_shown(check.sizes)}"] = (
            f"{100 * check.agreement:.2f} % of {check.results} equal, "
            f"largest difference {check.largest:.1g}"
        )
    if not exported.checks:
        rows["check"] = "none"
    rows["exported"] = f"{exported.seconds:.0f} s, {exported.bytes / 2**20:.1f} MiB"
    rows["written"] = exported.path
    return rows
