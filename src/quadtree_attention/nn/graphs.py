# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of a model, one per shape of its inputs."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)
Replay = Callable[[], Any]  # replays the graph and returns its results
Capture = Callable[[Callable[[], Any]], Replay]
MOST = 8  # maximum number of graphs of a model
WARM_UP = 2  # runs before the capture, in which libraries are initialised


class Graphs:
    """A function of tensors, captured as a CUDA graph at the second call with an input shape.

    The first call with a shape runs the function. A new graph replaces the least recently used one.
    Inputs are copied to the memory of the graph, and results are copied from it.

    Args:
        run: The function. Its results are tensors, or lists, tuples and dicts of them.
        owner: Module with the parameters and buffers; if one has moved, the graphs are dropped.
        capture: Function that captures a function without arguments; default: a CUDA graph.
        most: Maximum number of graphs.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        owner: nn.Module,
        capture: Capture | None = None,
        most: int = MOST,
    ) -> None:
        self.run, self.owner, self.most = run, owner, most
        self.capture = capture or capture_cuda()
        self.graphs: OrderedDict[Hashable, tuple[list[Tensor], Replay] | None] = OrderedDict()
        self.places: list[tuple[int, torch.dtype]] = []
        self.lock = threading.Lock()

    def __call__(self, *inputs: Tensor) -> Any:
        """Return the results of `run(*inputs)`, in new memory."""
        with self.lock:
            places = [(x.data_ptr(), x.dtype) for x in _state(self.owner)]
            if places != self.places:
                self.graphs.clear()
                self.places = places
            key = _key(inputs)
            found = self.graphs.get(key)
            if found is None:
                if key not in self.graphs:
                    self._keep(key, None)
                    return self.run(*inputs)
                copies = [x.clone() for x in inputs]
                found = copies, self.capture(lambda: self.run(*copies))
            self._keep(key, found)
            copies, replay = found
            for copy, x in zip(copies, inputs, strict=True):
                copy.copy_(x)
            return _cloned(replay())

    def _keep(self, key: Hashable, graph: tuple[list[Tensor], Replay] | None) -> None:
        self.graphs[key] = graph
        self.graphs.move_to_end(key)
        while len(self.graphs) > self.most:
            self.graphs.popitem(last=False)


def capture_cuda() -> Capture:
    """Return a function that captures CUDA graphs, which share one memory pool."""
    pool: list[Any] = []

    def capture(run: Callable[[], Any]) -> Replay:
        if not pool:
            pool.append(torch.cuda.graph_pool_handle())
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool[0]):
            results = run()

        def replay() -> Any:
            graph.replay()
            return results

        return replay

    return capture


def graphed(model: Model, capture: Capture | None = None) -> Model:
    """Make a model replay CUDA graphs, see `Graphs`, and return it.

    Graphs are used in eval mode without gradients, if all arguments are tensors on a GPU.
    """
    without_graphs(model)
    run = model.forward
    graphs = Graphs(run, model, capture)
    on_any_device = capture is not None

    def forward(*arguments: Any, **named: Any) -> Any:
        may = not (named or model.training or torch.is_grad_enabled()) and all(
            isinstance(x, Tensor) and (x.is_cuda or on_any_device) for x in arguments
        )
        return graphs(*arguments) if may and arguments else run(*arguments, **named)

    model.forward = forward
    return model


def without_graphs(model: nn.Module) -> None:
    """Undo `graphed`."""
    model.__dict__.pop("forward", None)


def _state(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _key(inputs: Sequence[Tensor]) -> Hashable:
    """Key of a captured graph."""
    device = inputs[0].device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    looks = tuple((x.shape, x.stride(), x.dtype, x.device) for x in inputs)
    return looks, autocast, torch.is_inference_mode_enabled()


def _cloned(results: Any) -> Any:
    if isinstance(results, Tensor):
        return results.clone()
    if isinstance(results, dict):
        return {key: _cloned(value) for key, value in results.items()}
    if isinstance(results, list | tuple):
        return type(results)([_cloned(value) for value in results])
    return results
