# SPDX-License-Identifier: Apache-2.0
"""Options and cards out of range: of predictors, data and modules of every task."""

import math

import pytest

pytest.importorskip("pytorch_lightning", reason="training needs the extra 'train'")

from quadtree_attention.errors import CheckpointError, DataError, OptionError
from quadtree_attention.tasks.contract import get_task
from tests.support import raises, tiny

FILES = {"root": "."}
OPTIONS = [  # task, part, options, message
    ("match", "predictor", {"top": 0}, "top must be at least 1, got 0"),
    ("match", "predictor", {"guided": "sometimes"}, "guided must be one of auto, always, never"),
    ("stereo", "predictor", {"max_disparity": -1}, "max_disparity must be above 0, got -1"),
    ("stereo", "predictor", {"max_disparity": math.nan}, "max_disparity must be above 0, got nan"),
    ("stereo", "predictor", {"max_disparity": math.inf}, "max_disparity must be above 0, got inf"),
    ("detect", "predictor", {"shorter_side": 0}, "shorter_side must be at least 1"),
    ("segment", "predictor", {"shorter_side": 0}, "shorter_side must be at least 1"),
    ("segment", "predictor", {"window": 0}, "window must be at least 1"),
    ("segment", "predictor", {"window": 8, "stride": 9}, "stride must be .*, got stride 9 and"),
    ("classify", "predictor", {"top": 0}, "top must be at least 1, got 0"),
    ("classify", "generated", {"augment": "all"}, "augment must be one of timm, batch, none, got"),
    ("classify", "generated", {"image_size": 0}, "image_size must be at least 1, got 0"),
    ("classify", "generated", {"generated_classes": 0}, "generated_classes must be at least 1"),
    ("classify", "generated", {"generated_count": 3}, "generated_count must be at least 4, got 3"),
    ("classify", "generated", {"limit_images": 0}, "limit_images must be at least 1, got 0"),
    ("classify", "generated", {"crop_scale": 0.0}, "crop_scale must be above 0, got 0.0"),
    ("classify", "generated", {"eval_crop": 1.5}, r"eval_crop must be in \[0, 1\], got 1.5"),
    ("classify", "generated", {"auto_augment": "rnd-m9"}, "timm cannot augment with .*'rnd-m9'"),
    ("match", "synthetic", {"scene": {"basline": [0, 1]}}, "one of objects, .* got 'basline'"),
    ("match", "synthetic", {"planes": 2}, r"planes must be in \[0, 1\], got 2"),
    ("match", "synthetic", {"textures": "nowhere"}, "no folder of photographs at nowhere"),
    ("match", "synthetic", {"procedural": 0}, "textures must be at least one"),
    ("match", "scannet", {}, r"ScanNet needs the folder .* pass --data\.root"),
    ("match", "scannet", FILES | {"min_overlap": 1}, "0 <= min_overlap < max_overlap <= 1"),
    ("match", "scannet", FILES | {"min_overlap": 0.5, "max_overlap": 0.5}, r"got min_overlap=0\."),
    ("match", "scannet", FILES | {"scenes": 0}, "scenes must be at least 1, got 0"),
    ("match", "scannet", FILES | {"pairs_per_scene": 0}, "pairs_per_scene must be at least 1"),
    ("match", "scannet", {"root": "nowhere"}, "there is no folder nowhere; pass the one of ScanNe"),
    ("match", "scannet", FILES, r"no folder .*scannet_indices or .*index; put LoFTR's"),
    ("match", "megadepth", FILES | {"size": 100}, "size must be a multiple of 8, got 100"),
    ("match", "megadepth", FILES, r"no folder .*index or .*megadepth_indices; put LoFTR's"),
    ("stereo", "synthetic", {"pairs": 0}, "pairs must be at least 1, got 0"),
    ("stereo", "synthetic", {"scene": {"baseline": [0, 1]}}, "of scene must .* got 'baseline'"),
    ("stereo", "synthetic", {"scene": {"thin": 2}}, "thin must lie between 0 and 1, got 2"),
    ("stereo", "files", {}, "pass --data.root FOLDER"),
    ("stereo", "files", {"root": "nowhere"}, "there is no folder nowhere"),
    ("stereo", "files", FILES | {"jitter": -1}, r"jitter must be in \[0, 1\], got -1"),
    ("detect", "files", {}, r"pass --data\.root"),
    ("detect", "generated", {"flip": 1.5}, r"flip must be in \[0, 1\], got 1.5"),
    ("detect", "generated", {"crop": 1.5}, r"crop must be in \[0, 1\], got 1.5"),
    ("detect", "generated", {"jitter": 1.5}, r"jitter must be in \[0, 1\], got 1.5"),
    ("segment", "folder", FILES | {"height": 0}, "height must be at least 1, got 0"),
    ("segment", "folder", FILES | {"scale_min": 2.0, "scale_max": 1.0}, "scale_max must be at lea"),
    ("segment", "folder", FILES | {"flip": 1.5}, r"flip must be in \[0, 1\], got 1.5"),
    ("segment", "folder", FILES | {"workers": -1}, "workers must be at least 0"),
    ("classify", "module", {"model": "quadtre_b_b0"}, "got .*; did you mean quadtree_b_b0"),
    ("classify", "module", {"options": {"attention": "windows"}}, r"did you mean 'window'\?"),
    ("classify", "module", {"options": {"drop_path_rate": 0.1}}, "is set by --model.drop_path;"),
    ("classify", "module", {"options": {"topkk": 3}}, r"got 'topkk'; did you mean topk\?"),
    ("detect", "module", {"options": {"num_classes": 3}}, "must not name .* set by the data; "),
    ("detect", "module", {"options": {"backbone_weights": "a"}}, "by --model.backbone_weights; "),
    ("detect", "module", {"schedule": "poly"}, "schedule must be one of step, cosine, got 'poly'"),
    ("detect", "module", {"model": "retinanet_quadtree_b_b00"}, "mean retinanet_quadtree_b_b0"),
    ("segment", "module", {"options": {"num_classes": 7}}, "num_classes, which .* by the data"),
    ("segment", "module", {"options": {"weights": "a"}}, r"set by --model\.backbone_weights;"),
    ("segment", "module", {"options": {"drop_path_rate": 0.2}}, r"is set by --model\.drop_path;"),
    ("segment", "module", {"options": {"grad_checkpointing": 1}}, r"--model\.grad_checkpointing;"),
    ("segment", "module", {"options": {"name": "a"}}, r"name, which is set by --model\.model;"),
    ("segment", "module", {"schedule": "step"}, "schedule must be one of poly, cosine, got 'step'"),
]
CARDS = [  # task, entries of the card, message
    ("classify", {"classes": ["ant"]}, "have names of the 2 classes of the model, got 1 names"),
    ("classify", {"classes": 4}, "2 classes of the model, got no list"),
    ("classify", {"image_size": 0}, "image_size .* must be a int above 0, got 0"),
    ("classify", {"image_size": "48"}, "got '48'"),
    ("classify", {"eval_crop": True}, "eval_crop .* got True"),
    ("detect", {"classes": ["one"]}, "have names of the 2 classes of the model, got 1 names"),
    ("segment", {"classes": ["a"]}, "have names of the 2 classes of the model, got 1 names"),
    ("segment", {"palette": [[1, 2, 3]]}, "a colour of three bytes for each of 2 classes"),
    ("segment", {"palette": [[1, 2], [3]]}, "a colour of three bytes for each of 2 classes"),
    ("segment", {"base_size": "big"}, "base_size in the card .* pixels or null, got 'big'"),
]


@pytest.mark.parametrize(("name", "part", "options", "told"), OPTIONS)
def test_options_out_of_range(name, part, options, told, all_weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = get_task(name)

    def use() -> None:
        if part == "predictor":
            task.load(part).from_pretrained(all_weights / f"{name}.safetensors", **options)
        elif part == "module":
            task.load(part)(**options)
        else:
            task.load("data", part)(**options).setup()

    raises((OptionError, DataError), told, use)


@pytest.mark.parametrize(("name", "card", "told"), CARDS)
def test_cards_that_do_not_fit(name, card, told, tmp_path):
    path = tiny.write_weights(name, tmp_path / "odd.safetensors", **card)
    raises(CheckpointError, told, get_task(name).load("predictor").from_pretrained, path)
