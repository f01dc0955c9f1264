# SPDX-License-Identifier: Apache-2.0
"""The example script, run as a user runs it."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.support.commands import environment

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("matplotlib")

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPT = EXAMPLES / "attend.py"
SHIFT = np.array([61, 38])  # where the crop starts in the larger image, (x, y)


def result_of(printed: str) -> np.ndarray:
    """The position (x, y) that the script says the query attends to."""
    found = re.search(r"attends to \((-?[\d.]+), (-?[\d.]+)\)", printed)
    assert found, printed
    return np.array([float(found[1]), float(found[2])])


def check_picture(path: Path) -> None:
    with Image.open(path) as picture:
        picture.load()
        assert picture.format == "PNG"
        assert 800 <= picture.width <= 3000 and 400 <= picture.height <= 3000
        assert len(picture.convert("RGB").getcolors(picture.width * picture.height)) > 100


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("attend_example", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A folder with whole.png and crop.png, of odd and different sizes: a crop of the other."""
    rng = np.random.default_rng(3)
    size = (331, 243)
    scene = np.zeros((size[1], size[0], 3))
    for blocks in (6, 17, 45):
        coarse = rng.integers(0, 256, (blocks, blocks + 3, 3), dtype=np.uint8)
        scene += np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)) / 3
    whole = Image.fromarray(scene.astype(np.uint8))
    whole.save(tmp_path / "whole.png")
    x, y = SHIFT.tolist()
    whole.crop((x, y, x + 227, y + 181)).save(tmp_path / "crop.png")
    return tmp_path


@pytest.fixture
def main_in(example, monkeypatch):
    """Runs the script in a folder, in this process."""

    def call(folder: Path, *arguments: object) -> None:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["attend.py", *map(str, arguments)])
        example.main()

    return call


def test_shipped_pair(tmp_path: Path) -> None:
    """As a process of its own."""
    options = {"cwd": tmp_path, "env": environment(), "timeout": 120}
    words = [sys.executable, str(SCRIPT)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    check_picture(tmp_path / "selection.png")
    assert [path.name for path in tmp_path.iterdir()] == ["selection.png"]
    # The letter box; its label is at 331 to 342 in the left image and 327 to 340 in the right one.
    assert np.abs(result_of(done.stdout) - (333, 312)).max() < 8
    assert "level 0: 32 px cells, all 180 compared, 8 kept" in done.stdout
    assert "276 compared, 10,800 by dense attention" in done.stdout


def test_finds_the_place_in_a_crop_of_another_size(main_in, pair, capsys):
    main_in(pair, "whole.png", "crop.png", "--point", 240, 80, "--out", "where.png")
    check_picture(pair / "where.png")
    said = capsys.readouterr().out
    assert np.abs(result_of(said) - (np.array([240, 80]) - SHIFT)).max() < 5
    assert "whole.png: 331x243 px, 83x61 cells" in said
    assert "crop.png: 227x181 px, 57x46 cells" in said


@pytest.mark.parametrize(
    ("point", "options"),
    [
        ((100, 185), []),
        ((250, 85), ["--num-levels", 3, "--topk", 5]),
        ((233, 77), ["--num-levels", 1]),
        ((233, 77), ["--num-levels", 3, "--topk", 16, "--variant", "A"]),
    ],
)
def test_options(main_in, pair, point, options, capsys):
    main_in(pair, "whole.png", "crop.png", "--point", *point, *options)
    near = 25 if "A" in options else 5  # in variant A all the image has a share in the result
    assert np.abs(result_of(capsys.readouterr().out) - (np.array(point) - SHIFT)).max() < near
    check_picture(pair / "selection.png")


def test_any_image_is_read(example: ModuleType, pair: Path) -> None:
    with Image.open(pair / "crop.png") as file:
        crop = file.convert("RGB")
    turned = Image.Exif()
    turned[0x0112] = 6  # to be shown a quarter turn clockwise
    crop.save(pair / "turned.jpg", exif=turned)
    crop.convert("L").save(pair / "grey.png")
    Image.fromarray(np.asarray(crop.convert("L")).astype(np.uint16) * 100).save(pair / "deep.png")
    clear = Image.new("RGBA", (5, 3), (0, 0, 0, 0))
    clear.save(pair / "clear.png")
    Image.new("RGB", (2048, 64)).save(pair / "long.png")

    assert example.load(pair / "turned.jpg").size.tolist() == [181, 227]
    grey, deep = example.load(pair / "grey.png").rgb, example.load(pair / "deep.png").rgb
    assert grey.std() > 0.02 and deep.std() > 0.02
    assert np.corrcoef(grey.flatten(), deep.flatten())[0, 1] > 0.99
    assert example.load(pair / "clear.png").rgb.min() == 1
    assert example.load(pair / "long.png").rgb.shape == (16, 512, 3)


def test_picture_of_a_single_pixel(main_in, tmp_path):
    Image.new("RGB", (1, 1)).save(tmp_path / "dot.png")
    Image.new("RGB", (37, 3), "red").save(tmp_path / "line.png")
    main_in(tmp_path, "dot.png", "line.png")
    check_picture(tmp_path / "selection.png")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["whole.png", "nowhere.png"], "no image file at nowhere.png; give the path of a JPEG or"),
        (["whole.png"], "got one image, whole.png; give two"),
        (["whole.png", "notes.txt"], "cannot read notes.txt as an image"),
        (["half.png", "crop.png"], "cannot read half.png as an image"),
        (["whole.png", "."], "cannot read . as an image"),
        (["whole.png", "crop.png", "--point", "331", "3"], "whole.png; accepted: 0 <= X < 331"),
        (["whole.png", "crop.png", "--point", "9", "-1"], "9 -1 is outside whole.png"),
        (["whole.png", "crop.png", "--point", "nan", "1"], "nan 1 is outside whole.png"),
        (["whole.png", "crop.png", "--point", "9"], "--point: expected 2 arguments"),
        (["--topk", "0"], "--topk must be 1 or more, got 0"),
        (["--topk", "many"], "--topk: invalid int value: 'many'"),
        (["--num-levels", "8"], "--num-levels: invalid choice: 8"),
        (["--variant", "C"], "--variant: invalid choice: 'C'"),
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["--out", "picture.bmp"], "--out must be a .png file in a folder that exists"),
        (["--out", "nowhere/a.png"], "a .png file in a folder that exists, got nowhere"),
        (["whole.png", "crop.png", "--out", 300 * "a" + ".png"], "cannot write aaa"),
    ],
)  # fmt: skip
def test_mistakes(main_in, pair, arguments, words, capsys):
    (pair / "notes.txt").write_text("no image\n")
    (pair / "half.png").write_bytes((pair / "whole.png").read_bytes()[:20_000])
    before = sorted(pair.iterdir())
    with pytest.raises(SystemExit) as ended:
        main_in(pair, *arguments)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("attend: ") and err.count("\n") == 1 and words in err
    assert sorted(pair.iterdir()) == before
