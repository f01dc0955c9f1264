# SPDX-License-Identifier: Apache-2.0
"""Recipe files: variants, how they merge, and what is said about bad ones."""

import pytest

from quadtree_attention.errors import OptionError
from quadtree_attention.tasks.training.recipe import merged, read_recipe
from tests.support.commands import refusal

TEXT = """\
task: detect
model: {model: small, options: {size: 800, topk: 32}, lr: 1e-4}
trainer: {max_epochs: 12}
variants:
  b0:
  b2: {model: {model: large}}
  3x: {model: {options: {size: [480, 800]}}, data: {crop: 0.5}, trainer: {max_epochs: 36}}
results: {b0: {ap: {published: 38.4}}}
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "coco.yaml"
    path.write_text(TEXT)
    return path


def test_first_variant_is_the_default(path):
    recipe = read_recipe(path)
    assert (recipe.task, recipe.variant, recipe.variants) == ("detect", (), ("b0", "b2", "3x"))
    assert recipe.results == {"b0": {"ap": {"published": 38.4}}}
    assert recipe.name == "coco"
    assert recipe.settings == {
        "model": {"model": "small", "options": {"size": 800, "topk": 32}, "lr": 1e-4},
        "trainer": {"max_epochs": 12},
    }


@pytest.mark.parametrize("variant", ["b2,3x", ["b2", "3x"], "3x,b2"])
def test_variants_merge_deeply(path, variant):
    recipe = read_recipe(path, variant)
    assert recipe.settings == {
        "model": {"model": "large", "options": {"size": [480, 800], "topk": 32}, "lr": 1e-4},
        "data": {"crop": 0.5},
        "trainer": {"max_epochs": 36},
    }
    assert recipe.name == "-".join(["coco", *recipe.variant])


def test_later_variants_win(path, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(read_recipe(path, "3x").to_text())
    assert read_recipe(other).settings == read_recipe(path, "3x").settings
    path.write_text("variants: {a: {x: {y: 1, z: 1}}, b: {x: {y: 2}}, c: {x: 3}}\n")
    assert read_recipe(path).settings == read_recipe(path, "a").settings == {"x": {"y": 1, "z": 1}}
    assert read_recipe(path, "a,b").settings == {"x": {"y": 2, "z": 1}}
    assert read_recipe(path, "b,a").settings == {"x": {"y": 1, "z": 1}}
    assert read_recipe(path, "a,c").settings == {"x": 3}
    base, change = {"a": {"b": 1}}, {"a": {"c": 2}}
    assert merged(base, change) == {"a": {"b": 1, "c": 2}}
    assert (base, change) == ({"a": {"b": 1}}, {"a": {"c": 2}})


@pytest.mark.parametrize(
    ("text", "variant", "told"),
    [
        (TEXT, "b1", r"must be one of b0, b2, 3x, got 'b1'"),
        ("model: {}\n", "b1", "has no variants, got b1; leave out --variant"),
        ("- 1\n", None, "is no recipe, which has settings by name"),
        ("just text\n", None, "is no recipe"),
        ("variants: [b0]\n", None, "variants and results of .* must be mappings"),
        ("model: [1,\n lr: }", None, "cannot be read as a recipe: .* line 2"),
    ],
)
def test_bad_recipes(path, text, variant, told):
    path.write_text(text)
    with pytest.raises(OptionError, match=told) as caught:
        read_recipe(path, variant)
    assert "\n" not in str(caught.value)


def test_missing_recipe(tmp_path, path):
    told = refusal(OptionError, read_recipe, tmp_path / "nowhere.yaml")
    assert told == f"there is no recipe {tmp_path}/nowhere.yaml; check the path"
    told = refusal(OptionError, read_recipe, tmp_path / "coco-retinanet-b2-3x.yaml")
    assert told.endswith("/coco.yaml --variant b2,3x")
