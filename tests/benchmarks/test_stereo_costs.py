# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.stereo_costs`: counts, and a small run."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measure import scores_held

pytest.importorskip("timm", reason="models need the extra 'models'")


class Seen(TorchDispatchMode):
    """Notes which operations ran, and the dtype of what they gave."""

    def __init__(self):
        super().__init__()
        self.dtypes = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.dtypes[function.overloadpacket.__name__] = result.dtype
        return result


def test_scores_are_held_in_the_precision_of_queries():
    q = torch.rand(1, 2, 8, 16, dtype=torch.bfloat16)
    with Seen() as fused:
        F.scaled_dot_product_attention(q, q, q)
    with scores_held(), Seen() as held:
        F.scaled_dot_product_attention(q, q, q)
    assert not any("softmax" in name for name in fused.dtypes)
    products = [dtype for name, dtype in held.dtypes.items() if name in ("bmm", "_safe_softmax")]
    assert products == [torch.bfloat16] * 2
    assert not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()


def test_attention_is_counted_as_worked_out_by_hand():
    from benchmarks.stereo_costs import count

    full, explicit = count("full-2", (64, 32)), count("explicit-2", (64, 32))
    # scores and messages: 16 rows of 32 cells, of both views, 12 attentions of 128 channels
    assert full.attention_macs == explicit.attention_macs == 2 * 16 * 32 * 32 * 128 * 2 * 12
    ours = count("quadtree-2", (64, 32))
    assert ours.attention_macs < full.attention_macs
    assert ours.macs - ours.attention_macs == full.macs - full.attention_macs
    assert ours.params - full.params == 12 * 4  # weights of the levels


def test_run_on_a_cpu(tmp_path, capsys):
    from benchmarks.stereo_cost_tables import check_result, markdown
    from benchmarks.stereo_costs import main

    out = tmp_path / "result.json"
    options = "--device cpu --networks quadtree-2 --images 48x32 --large 64x32 --threads 1"
    assert main([*options.split(), "--seconds-per-row", "0.01", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    check_result(result)
    assert [row["pass"] for row in result["rows"]] == ["forward", "training", "forward"]
    assert not any("error" in row for row in result["rows"])
    text = markdown({"stereo-costs--test": result})
    assert "| 48x32 | training | float32 | QuadTree-B, 1/2 |" in text
    assert "QuadTree-B, 1/2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--networks", "half"], "unknown 'half'; known: explicit-3"),
        (["--images", "wide"], "must be like 640x480"),
    ],
)
def test_bad_options(options, message, capsys):
    from benchmarks.stereo_costs import main

    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
