# SPDX-License-Identifier: Apache-2.0
"""The module in a real ONNX runtime, at sizes other than the exported one."""

import pytest
import torch

from quadtree_attention import QuadtreeAttention

onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra 'export'")

DYNAMIC = ({1: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC},)
OTHER_SIZES = [(9, 14), (12, 16), (7, 5), (1, 3), (33, 18)]


def check(program, module, grids, path):
    """The file gives what the module gives, at every one of these sizes."""
    program.save(path)
    session = onnxruntime.InferenceSession(path)
    (name,) = (x.name for x in session.get_inputs())
    for grid in grids:
        x = torch.randn(1, *grid, module.dim)
        (got,) = session.run(None, {name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(got), module(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "first"), [("backbone", (16, 24)), ("variant A", (8, 8))])
def test_dynamic_sizes(kind, first, tmp_path):
    """Exported where nothing is padded, and run where something is."""
    options = {"variant": "A"} if kind == "variant A" else {"value_pyramid": "conv", "lepe": True}
    module = QuadtreeAttention(16, 2, num_levels=3, topk=4, backend="reference", **options).eval()
    program = torch.onnx.export(
        module, (torch.randn(1, *first, 16),), dynamo=True, dynamic_shapes=DYNAMIC, verbose=False
    )
    check(program, module, [first, *OTHER_SIZES], tmp_path / "module.onnx")


def test_fewer_cells_than_k(tmp_path):
    """Guards of the example give its coarsest map at least 2 x 2 cells; the file has no guards."""
    torch.manual_seed(0)
    options = {"num_levels": 2, "topk": 4, "value_pyramid": "conv", "backend": "reference"}
    module = QuadtreeAttention(8, 2, **options).eval()
    traced = torch.export.export(module, (torch.randn(1, 8, 12, 8),), dynamic_shapes=DYNAMIC)
    program = torch.onnx.export(traced, dynamo=True, optimize=False, verbose=False)
    # 2, 3, 4 and 8 cells
    check(program, module, [(1, 3), (5, 2), (3, 4), (7, 3)], tmp_path / "module.onnx")
