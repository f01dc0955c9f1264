# SPDX-License-Identifier: Apache-2.0
"""Files of pairs: every format, names of pairs, and lines that are wrong."""

import pickle

import numpy as np
import pytest
from PIL import Image

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.tasks.match.readers import PairLine, open_source, read_pairs
from tests.conftest import ROOT
from tests.support import raises

CAMERA = "500 0 320 0 510. 240 0 0 1"
MOTION = "0 -1 0 0.5 1 0 0 -2 0 0 1 3e-1 0 0 0 1"
HOMOGRAPHY = "1 0.1 3 0 1 -2 0 1e-4 1"


@pytest.fixture
def read(tmp_path):
    def read(text: str) -> list[PairLine]:
        (tmp_path / "pairs.txt").write_text(text)
        return read_pairs(tmp_path / "pairs.txt")

    return read


def test_every_format(read):
    pairs = read(
        "\ufeff# a comment\n"
        "a/1.jpg a/2.jpg\n"
        "\n"
        "  # indented\n"
        "b/3.jpg b/4.jpg 1 3\r\n"
        f"c/5.jpg\tc/6.jpg {HOMOGRAPHY}\n"
        f"d/7.jpg d/8.jpg 0 2 {CAMERA} {CAMERA}\n"
        f"e/9.jpg e/0.jpg 0 0 {CAMERA} {CAMERA} {MOTION}"
    )
    assert [p.line for p in pairs] == [2, 5, 6, 7, 8]
    names, turned, plane, cameras, motion = pairs
    assert (names.image0, names.image1, names.name) == ("a/1.jpg", "a/2.jpg", "1__2")
    assert (names.rotation0, names.rotation1, names.K0, names.H_0to1) == (0, 0, None, None)
    assert (turned.rotation0, turned.rotation1, turned.K1) == (1, 3, None)
    assert plane.H_0to1.tolist() == [[1, 0.1, 3], [0, 1, -2], [0, 1e-4, 1]]
    assert plane.T_0to1 is None and plane.K0 is None
    assert cameras.rotation1 == 2 and cameras.T_0to1 is None
    assert cameras.K1.tolist() == [[500, 0, 320], [0, 510, 240], [0, 0, 1]]
    assert motion.T_0to1[:, 3].tolist() == [0.5, -2, 0.3, 1] and motion.T_0to1[1, 0] == 1


def test_names_with_spaces_are_quoted(read):
    pairs = read(
        "\"my desk/1.jpg\" 'your desk/2.jpg'\n"
        f'"my desk/a b.jpg" c.jpg 0 1 {CAMERA} {CAMERA}\n'
        '"l\'eau de/3.jpg" C:\\4.jpg 0 1\n'
        "l'eau.jpg d'or.jpg\n"
        "'tis.jpg b.jpg 0 2\n"
    )
    assert [(p.image0, p.image1, p.rotation1) for p in pairs] == [
        ("my desk/1.jpg", "your desk/2.jpg", 0),
        ("my desk/a b.jpg", "c.jpg", 1),
        ("l'eau de/3.jpg", "C:\\4.jpg", 1),
        ("l'eau.jpg", "d'or.jpg", 0),  # as ever
        ("'tis.jpg", "b.jpg", 2),
    ]
    assert pairs[0].name == "1__2" and pairs[1].K0[0, 2] == 320
    with pytest.raises(DataError, match=r"line 1: a quotation is not closed, got \"a b.jpg c.jpg"):
        read('"a b.jpg c.jpg\n')


def test_a_source_of_pairs(read, tmp_path):
    Image.new("RGB", (6, 4), "red").save(tmp_path / "a.png")
    Image.new("RGB", (5, 3)).save(tmp_path / "b c.png")
    line = f'a.png "b c.png" 0 1 {CAMERA} {CAMERA} {MOTION}\n'
    read(line)
    source = pickle.loads(pickle.dumps(open_source(tmp_path / "pairs.txt")))
    assert (len(source), source.name(0), source.classes) == (1, "a__b c", None)
    sizes = [[str(p), p.stat().st_size] for p in (tmp_path / "a.png", tmp_path / "b c.png")]
    assert source.identity(0) == [*sizes, 0, 1]
    assert [image.size for image in source.images(0)] == [(6, 4), (3, 5)]
    assert source.truth(0).sizes() == ((6, 4), (5, 3))
    (tmp_path / "photos").mkdir()
    elsewhere = open_source(tmp_path / "pairs.txt", images=tmp_path / "photos")
    raises(DataError, r"cannot read .*photos/a.png", elsewhere.images, 0)
    with pytest.raises(DataError, match="there is no folder of images 'nowhere'"):
        open_source(tmp_path / "pairs.txt", images="nowhere")
    with pytest.raises(OptionError, match="split must be one of val, got 'train'"):
        open_source(tmp_path / "pairs.txt", split="train")
    read(f"{line}x0.png x1.png 0 0 {CAMERA} {CAMERA}\n")
    with pytest.raises(DataError, match="line 2 of the pairs, x0__x1, has no truth"):
        open_source(tmp_path / "pairs.txt")
    assert len(open_source(tmp_path / "pairs.txt", truth=False)) == 2


def test_names_are_told_apart(read):
    pairs = read(
        "a/1.jpg a/2.jpg\n"
        "b/1.jpg b/2.jpg\n"
        "b/1.png b/2.png\n"
        "/top/3.jpg ../3.jpg\n"
        "x/7.jpg x/8.jpg 0 0\n"
        "x/7.jpg x/8.jpg 0 1\n"
        "y/9.jpg y/8.jpg\n"
        f"y/9.jpg y/8.jpg {HOMOGRAPHY}\n"
    )
    names = ["a-1__a-2", "b-1__b-2-2", "b-1__b-2-3", "3__3", "x-7__x-8-5", "x-7__x-8-6"]
    assert [p.name for p in pairs] == [*names, "9__8", "9__8"]
    names = [p.name for p in read("/top/1.jpg 2.jpg\n../1.jpg 2.jpg\n../1.jpg 2.jpg 0 0")]
    assert names == ["top-1__2", "..-1__2", "..-1__2"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a.jpg", "a line must have 2 (image0 image1), 4 (and rotation0"),
        ("a.jpg b.jpg 0", "got 3; quote paths with spaces"),
        (f"a.jpg b.jpg 0 0 {CAMERA}", "or 38 (and T_0to1) words, got 13;"),
        ("a.jpg b.jpg 0 4", "rotation1 must be 0, 1, 2 or 3 quarter turns, got '4'; write 0"),
        ("a.jpg b.jpg 0.0 1", "rotation0 must be 0, 1, 2 or 3 quarter turns, got '0.0'"),
        ("a.jpg b.jpg 1 0 0 0 1 0 0 0 z", "the homography must be 9 numbers, got 'z'"),
        ("a.jpg b.jpg 1 0 0 0 1 0 0 0 nan", "the homography must be finite, got 1 0"),
        ("a.jpg b.jpg 1 0 0 1 0 0 0 0 1", "the homography has no inverse, got 1 0 0 1"),
        (f"a.jpg b.jpg 0 0 {CAMERA} -{CAMERA}", "K1 must be fx 0 cx 0 fy cy 0 0 1 with fx"),
        (f"a.jpg b.jpg 0 0 1{CAMERA[:-1]}2 {CAMERA}", "K0 must be fx 0 cx"),
        (f"a.jpg b.jpg 0 0 {CAMERA} {CAMERA} 9{MOTION[1:]}", "T_0to1 must be a rotation and a"),
        (f"a.jpg b.jpg 0 0 {CAMERA} {CAMERA} {MOTION[:-1]}0", "a translation over 0 0 0 1, got"),
    ],
)
def test_lines_that_are_wrong(read, line, words):
    with pytest.raises(DataError) as error:
        read(f"# names\nfine0.jpg fine1.jpg\n{line}\n")
    assert "pairs.txt, line 3: " in str(error.value) and words in str(error.value)


def test_files_that_are_wrong(read, tmp_path):
    raises(DataError, r"pairs.txt lists no pairs; write one to a line", read, "# nothing\n\n")
    raises(DataError, r"there is no file .*none.txt", read_pairs, tmp_path / "none.txt")
    raises(DataError, r"cannot read .*: Is a directory", read_pairs, tmp_path)
    (tmp_path / "photo.txt").write_bytes(b"\xff\xd8\xff\xe0")
    raises(DataError, "pass a file of pairs, text in UTF-8", read_pairs, tmp_path / "photo.txt")


SCANNET = ROOT.parent / "shared/data/matching/scannet_sample/pairs_with_gt.txt"


@pytest.mark.skipif(not SCANNET.is_file(), reason="../shared/data is not beside the checkout")
def test_pairs_of_scannet():
    pairs = read_pairs(SCANNET)
    assert len(pairs) == 15 and all(p.T_0to1 is not None for p in pairs)
    assert pairs[0].name == "scene0711_00_frame-001680__scene0711_00_frame-001995"
    assert np.allclose(pairs[0].K0[0], [1163.45, 0, 653.626])
