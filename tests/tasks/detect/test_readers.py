# SPDX-License-Identifier: Apache-2.0
"""COCO files: boxes, masks in all their forms, and everything that can be wrong with them."""

import json
import shutil

import numpy as np
import pytest
from faster_coco_eval.core import mask as library
from PIL import Image

from quadtree_attention.errors import DataError
from quadtree_attention.tasks.detect.readers import CocoFile, counted, open_source
from quadtree_attention.tasks.detect.rle import (
    compressed,
    decode_mask,
    encode_mask,
    mask_problem,
    run_lengths,
)
from tests.support import raises
from tests.tasks.detect.files import SHARED, entry, with_mask, write_split

SQUARE = [[4, 3, 12, 3, 12, 9, 4, 9]]  # a polygon


def opened(path, **options):
    return CocoFile(path, path.parents[1] / "images" / "val", **options)


def kinds_of(path, **options):
    return {p.kind: p.reason for p in opened(path, **options).problems}


def test_boxes_and_labels(tmp_path):
    annotations = [
        entry(5, [2, 3, 10.5, 8], category=7),
        entry(6, [0, 0, 40, 30], category=90, iscrowd=1, area=77),
        entry(9, [30, 20, 10.4, 5], category=3),  # sticks out by rounding: clipped, no problem
    ]
    coco = opened(write_split(tmp_path, annotations=annotations))
    assert coco.classes == ["square", "disc", "star"]  # by id: 3, 7, 90
    assert coco.label_of == {3: 1, 7: 2, 90: 3}
    assert coco.category_of == {1: 3, 2: 7, 3: 90}
    assert coco.problems == []
    (image,), target = coco.images(0), coco.truth(0).target()
    assert image.size == (40, 30)
    assert target["boxes"].tolist() == [[2, 3, 12.5, 11], [0, 0, 40, 30], [30, 20, 40, 25]]
    assert target["labels"].tolist() == [2, 3, 1]
    assert target["iscrowd"].tolist() == [0, 1, 0]
    assert target["area"].tolist() == [84, 77, 52]
    assert [coco.truth(0).objects, coco.truth(1).objects] == [2, 0]
    assert [coco.name(0), coco.name(1)] == ["1.png", "2.png"]
    empty = coco.truth(1).target()  # an image without objects is kept
    assert empty["boxes"].shape == (0, 4) and empty["labels"].shape == (0,)


BROKEN = {
    "negative width": (entry(1, [5, 5, -3, 4]), "empty box"),
    "zero height": (entry(1, [5, 5, 3, 0]), "empty box"),
    "outside": (entry(1, [41, 3, 5, 5]), "box outside"),
    "left of it": (entry(1, [-9, 3, 5, 5]), "box outside"),
    "NaN": (entry(1, [5, float("nan"), 3, 4]), "broken box"),
    "beyond floats": (entry(1, [5, 5, 10**400, 4]), "broken box"),
    "infinite": (entry(1, [5, 5, float("inf"), 4]), "broken box"),
    "three numbers": (entry(1, [5, 5, 3]), "broken box"),
    "no box": ({"id": 1, "image_id": 1, "category_id": 3}, "broken box"),
    "other category": (entry(1, [5, 5, 3, 3], category=4), "unknown category"),
    "category as a list": (entry(1, [5, 5, 3, 3], category=[3]), "unknown category"),
    "other image": (entry(1, [5, 5, 3, 3], image=12), "unknown image"),
    "iscrowd of 2": (entry(1, [5, 5, 3, 3], iscrowd=2), "broken entry"),
    "no object": ("hello", "broken entry"),
    "no id": (entry(None, [5, 5, 3, 3]), "broken entry"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_annotation_is_named_and_left_out(tmp_path, case):
    annotation, kind = BROKEN[case]
    path = write_split(tmp_path, annotations=[annotation, entry(2, [1, 1, 4, 4])])
    coco = opened(path)
    assert [a.id for a in coco.truths[0].annotations] == [2]
    assert counted(coco.problems) == f"1 {kind}"
    (problem,) = coco.problems
    assert problem.reason.startswith(f"{path}: annotation ")
    with pytest.raises(DataError, match=r"1 entries of .* cannot be used as they are: .*leave out"):
        opened(path, strict=True)


def test_clipped_boxes_and_duplicates(tmp_path):
    path = write_split(tmp_path, annotations=[entry(1, [-5, 20, 10, 30])])
    coco = opened(path)
    assert coco.truths[0].annotations[0].box == (0, 20, 5, 30)
    assert coco.truths[0].annotations[0].given == (-5, 20, 10, 30)  # what scores compare with
    assert counted(coco.problems) == "1 box clipped"
    twice = [entry(1, [1, 1, 4, 4]), entry(1, [2, 2, 4, 4])]
    path = write_split(tmp_path, annotations=twice)
    content = json.loads(path.read_text())
    content["images"].append({**content["images"][0], "file_name": "2.png"})
    content["categories"].append({"id": 3, "name": "other"})
    path.write_text(json.dumps(content))
    coco = opened(path)
    assert counted(coco.problems) == "3 duplicate id"
    assert [a.box for a in coco.truths[0].annotations] == [(1, 1, 5, 5)]
    assert coco.truths[0].path.name == "1.png"
    assert coco.categories[3] == "square"


def test_images_that_are_missing_or_of_another_size(tmp_path):
    path = write_split(tmp_path, annotations=[entry(1, [1, 1, 4, 4]), entry(2, [1, 1, 4, 4])])
    folder = tmp_path / "images" / "val"
    Image.new("RGB", (50, 30)).save(folder / "1.png")
    (folder / "2.png").unlink()
    coco = opened(path)
    assert counted(coco.problems) == "1 missing image"
    assert str(folder / "2.png") in coco.problems[0].reason
    assert len(coco) == 1  # opening does not read the other
    raises(DataError, r"1\.png is 50x30, .* says 40x30 of image 1", coco.images, 0)
    assert len(CocoFile(path)) == 2  # images are not needed for scores


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read .*; pass the JSON file"),
        ("[]", "must be an object with images, annotations and categories, got a list"),
        ('{"images": []}', "must have a list of categories"),
        ('{"images": [], "annotations": [], "categories": []}', "names no categories"),
    ],
)
def test_files_that_are_none(tmp_path, content, message):
    path = tmp_path / "a.json"
    path.write_text(content)
    raises(DataError, message, CocoFile, path)
    raises(DataError, "there is no file", CocoFile, tmp_path / "b.json")


def test_run_lengths_as_the_library_writes_them():
    """Odd and unequal sides, empty and full masks, runs that need several characters."""
    rng = np.random.default_rng(0)
    masks = [rng.random((h, w)) < p for h, w, p in ((7, 5, 0.5), (61, 33, 0.02), (3, 1, 0.9))]
    masks += [np.zeros((9, 4), bool), np.ones((4, 9), bool), np.eye(300, 211, dtype=bool)]
    for mask in masks:
        theirs = library.encode(np.asfortranarray(mask, dtype=np.uint8))
        ours = encode_mask(mask)
        assert ours == {"size": list(mask.shape), "counts": theirs["counts"].decode()}
        runs = run_lengths(ours["counts"])
        assert compressed(runs) == ours["counts"]
        for segmentation in (ours, {"size": list(mask.shape), "counts": runs}):
            assert (decode_mask(segmentation, *mask.shape) == mask).all()


def test_masks_in_all_forms(tmp_path):
    mask = np.zeros((30, 40), bool)
    mask[3:9, 4:12] = True
    string = encode_mask(mask)
    runs = {"size": [30, 40], "counts": run_lengths(string["counts"])}
    forms = [SQUARE, string, runs]
    annotations = [entry(i, [4, 3, 8, 6], segmentation=f) for i, f in enumerate(forms)]
    coco = opened(write_split(tmp_path, annotations=annotations), masks=True)
    found = coco.truth(0).target(masks=True)["masks"]
    assert found.dtype.is_floating_point is False
    assert all((one.numpy() == mask).all() for one in found)
    assert coco.truth(1).target(masks=True)["masks"].shape == (0, 36, 32)
    assert "masks" not in opened(coco.path).truth(0).target()
    # As far as is accepted, in every direction; the part inside is all that is left.
    around = [[-40, -30, 80, -30, 80, 60, -40, 60]]
    assert mask_problem(around, 30, 40) is None and decode_mask(around, 30, 40).all()


@pytest.mark.parametrize(
    ("segmentation", "reason"),
    [
        (None, "there is no segmentation"),
        ([], "there is no segmentation"),
        ([[1, 2, 3, 4]], "pairs of x and y, 3 or more, got 4 numbers"),
        ([[1, 2, 3, 4, 5, 6, 7]], "got 7 numbers"),
        ([[1, 2, 3, 4, 5, float("nan")]], "finite numbers"),
        ([[1, 2, 3, 4, 5, 10**400]], "finite numbers"),
        ([[1, 2, 1e9, 4, 5, 6]], "by more than its size, got 1000000000.0"),
        ([[1, 2, 3, -31, 5, 6]], "by more than its size, got -31"),
        ({"size": [40, 30], "counts": [1200]}, r"size \[40, 30\], the image is \[30, 40\]"),
        ({"size": [30, 40], "counts": [1199]}, "cover 1199 pixels, the image has 1200"),
        ({"size": [30, 40], "counts": [-1, 1201]}, "whole numbers from 0 on"),
        ({"size": [30, 40], "counts": "~~\x7f"}, "cannot be read"),
        ({"size": [30, 40], "counts": "P"}, "ends in the middle"),
        ({"size": [30, 40]}, "whole numbers from 0 on, or a string"),
    ],
)
def test_broken_masks(tmp_path, segmentation, reason):
    bad = entry(1, [4, 3, 8, 6], segmentation=segmentation)
    path = write_split(tmp_path, annotations=[bad, with_mask(entry(2, [1, 1, 4, 4]))])
    coco = opened(path, masks=True)
    assert counted(coco.problems) == "1 broken mask"
    assert [a.id for a in coco.truths[0].annotations] == [2]
    raises(DataError, f"annotation 1: .*{reason}", opened, path, masks=True, strict=True)
    assert opened(path, strict=True).truth(0).objects == 2  # boxes alone are in order


def test_names_of_folders(tmp_path):
    ours = write_split(tmp_path / "a", "val", annotations=[entry(1, [1, 1, 4, 4])])
    assert open_source(tmp_path / "a", split="val").path == ours
    theirs = write_split(tmp_path / "b", "val2017", annotations=[entry(1, [1, 1, 4, 4])])
    (tmp_path / "b" / "images" / "val2017").rename(tmp_path / "b" / "val2017")
    for split in ("val", "val2017"):
        found = open_source(tmp_path / "b", split=split)
        assert (found.path, found.folder) == (theirs, tmp_path / "b" / "val2017")
    with pytest.raises(DataError, match="no JSON file of the train objects"):
        open_source(tmp_path / "b", split="train")
    raises(DataError, r"pass --data\.root", open_source, None, split="train", images=tmp_path)
    paths = {"images": tmp_path / "b" / "val2017", "annotations": theirs}
    assert len(open_source(None, split="train", **paths)) == 2


def test_images_are_needed_for_training_only(tmp_path):
    """Scores count all images of the file; a network cannot run without them."""
    write_split(tmp_path, annotations=[entry(1, [1, 1, 4, 4])])
    (tmp_path / "images" / "val" / "2.png").unlink()
    found = open_source(tmp_path, split="val")
    assert (len(found), found.skipped) == (2, [])
    raises(DataError, r"cannot read .*2\.png", found.images, 1)
    assert len(open_source(tmp_path, split="val", check_images=True)) == 1
    shutil.rmtree(tmp_path / "images")
    assert len(open_source(tmp_path, split="val")) == 2
    with pytest.raises(DataError, match="no folder of the val images"):
        open_source(tmp_path, split="val", check_images=True)


def test_names_are_unique_and_identities_follow_the_file(tmp_path):
    path = write_split(tmp_path, annotations=[entry(1, [1, 1, 4, 4])])
    content = json.loads(path.read_text())
    content["images"][1]["file_name"] = "1.png"
    path.write_text(json.dumps(content))
    coco = CocoFile(path)
    assert [coco.name(0), coco.name(1)] == ["1.png (image 1)", "1.png (image 2)"]
    assert coco.identity(0)[-4:-1] == [1, 40, 30]
    content["categories"][0]["id"] = 8  # results have these ids
    path.write_text(json.dumps(content))
    assert CocoFile(path).identity(0) != coco.identity(0)


@pytest.mark.parametrize(
    ("name", "objects", "classes", "crowds"),
    [("bccd", 1137, 3, 0), ("nuclei", 1468, 1, 0), ("coco_mini", 624, 80, None)],
)
def test_real_files(name, objects, classes, crowds):
    if not (SHARED / name).is_dir():
        pytest.skip(f"there is no ../shared/data/{name} beside the checkout")
    coco = open_source(SHARED / name, split="val", masks=name != "bccd", strict=True)
    found = [a for image in coco.truths for a in image.annotations]
    assert (len(found), len(coco.classes)) == (objects, classes)
    assert any(a.crowd for a in found) == (crowds is None)
    (image,), target = coco.images(3), coco.truth(3).target(masks=name != "bccd")
    assert len(target["boxes"]) == len(coco.truths[3].annotations) > 0
    if name != "bccd":  # masks lie in their boxes, and cover most of their area
        for mask, (x0, y0, x1, y1) in zip(target["masks"], target["boxes"].tolist(), strict=True):
            rows, columns = np.nonzero(mask.numpy())
            assert columns.min() >= x0 - 1 and columns.max() <= x1 + 1
            assert rows.min() >= y0 - 1 and rows.max() <= y1 + 1
        assert np.isclose(target["masks"].sum((1, 2)), target["area"], rtol=0.2, atol=8).all()
    assert image.mode == "RGB"
