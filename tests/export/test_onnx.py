# SPDX-License-Identifier: Apache-2.0
"""The module in a real ONNX runtime, at sizes other than the exported one."""

import pytest
import torch

from quadtree_attention import QuadtreeAttention

onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra 'export'")

OTHER_SIZES = [(9, 14), (12, 16), (7, 5), (1, 3), (33, 18)]


@pytest.mark.parametrize(("kind", "first"), [("backbone", (16, 24)), ("variant A", (8, 8))])
def test_dynamic_sizes(kind, first, tmp_path):
    """Exported where nothing is padded, and run where something is."""
    options = {"variant": "A"} if kind == "variant A" else {"value_pyramid": "conv", "lepe": True}
    module = QuadtreeAttention(16, 2, num_levels=3, topk=4, backend="reference", **options).eval()
    dynamic = {1: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC}
    program = torch.onnx.export(
        module, (torch.randn(1, *first, 16),), dynamo=True, dynamic_shapes=(dynamic,), verbose=False
    )
    program.save(tmp_path / "module.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "module.onnx")
    (name,) = (x.name for x in session.get_inputs())
    for grid in [first, *OTHER_SIZES]:
        x = torch.randn(1, *grid, 16)
        (got,) = session.run(None, {name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(got), module(x), rtol=0, atol=1e-5)
