# SPDX-License-Identifier: Apache-2.0
"""`torch.export` and AOTInductor: a backbone and an attention layer as shared libraries."""

import re
import shutil

import pytest
import torch

from quadtree_attention import QuadtreeAttention
from tests.conftest import ROOT

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="there is no C++ compiler"
)


def compiled(module, x, path):
    """The module in a library, loaded again."""
    with torch.no_grad():
        program = torch.export.export(module, (x,))
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return torch._inductor.aoti_load_package(str(path))


@pytest.mark.slow
@needs_compiler
def test_attention_layer(tmp_path):
    torch.manual_seed(0)
    layer = QuadtreeAttention(16, 2, num_levels=2, topk=4, value_pyramid="conv", lepe=True).eval()
    x = torch.randn(2, 9, 14, 16)
    run = compiled(layer, x, tmp_path / "layer.pt2")
    torch.testing.assert_close(run(x), layer(x), rtol=0, atol=1e-5)
    other = torch.randn(2, 9, 14, 16)
    torch.testing.assert_close(run(other), layer(other), rtol=0, atol=1e-5)


@pytest.mark.slow
@needs_compiler
def test_backbone_of_the_documentation(tmp_path, monkeypatch):
    """The code of docs/export.md, with a tiny backbone and an image of odd size."""
    pytest.importorskip("timm", reason="networks need the extra 'models'")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    text = (ROOT / "docs/export.md").read_text()
    code = re.search(r"## AOTInductor\n.*?```python\n(.*?)```", text, flags=re.DOTALL)[1]
    for old, new in (("quadtree_b_b0", "test_quadtree"), ("1, 3, 224, 224", "1, 3, 70, 45")):
        assert old in code
        code = code.replace(old, new)
    found: dict[str, object] = {}
    exec(code, found)
    with torch.no_grad():
        wanted = found["backbone"](found["image"])
    torch.testing.assert_close(found["features"], wanted, rtol=0, atol=1e-4)
