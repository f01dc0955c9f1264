# SPDX-License-Identifier: Apache-2.0
"""Draws the two example photographs: one street, seen from two places under two exposures.

The street is painted on three layers (sky, houses, foreground), and each view projects the layers
by its own perspective, so that near layers move more than far ones.

    python examples/make_images.py            # writes examples/images/left.jpg and right.jpg
"""

import argparse
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageFont

Color = tuple[int, int, int]
Box = tuple[int, int, int, int]

WIDTH, HEIGHT, GROUND = 1900, 1200, 850  # the painted world, in its own pixels
VIEW = (480, 360)
INK: Color = (52, 46, 50)
CREAM: Color = (247, 240, 222)


def text(
    draw: ImageDraw.ImageDraw, at: tuple[int, int], words: str, size: int, fill: Color
) -> None:
    draw.text(at, words, fill=fill, font=ImageFont.load_default(size), anchor="mm", stroke_width=1)


def stones(
    rng: np.random.Generator,
    size: tuple[int, int],
    color: Color,
    stone: tuple[int, int],
    grow: float = 1,
) -> Image.Image:
    """A wall or a pavement: rows of stones, each of a slightly different colour.

    Args:
        grow: How much higher each row is than the one above; over 1 it looks like the ground.
    """
    image = Image.new("RGB", size, tuple(int(c * 0.74) for c in color))
    draw = ImageDraw.Draw(image)
    y, (width, height) = 0.0, (float(stone[0]), float(stone[1]))
    while y < size[1]:
        x = -width * rng.uniform(0.1, 0.9)
        while x < size[0]:
            wide = width * rng.uniform(0.85, 1.15)
            tone = np.clip(np.array(color) * rng.normal(1, 0.075) + rng.normal(0, 4, 3), 0, 255)
            box = (x + 1, y + 1, x + wide - 1, y + height - 1)
            draw.rounded_rectangle(box, 2 + height / 8, tuple(tone.astype(int).tolist()))
            x += wide
        y, width, height = y + height, width * grow, height * grow
    return image


def window(
    layer: Image.Image, rng: np.random.Generator, box: Box, frame: Color, arch: bool
) -> None:
    """One window: frame, sill, panes that mirror the sky, perhaps light, shutters or flowers."""
    draw = ImageDraw.Draw(layer)
    x0, y0, x1, y1 = box
    mid, top = (x0 + x1) // 2, (-(x1 - x0) // 3 if arch else 0)
    if rng.random() < 0.35:  # shutters
        shutter = tuple(rng.integers(60, 150, 3).tolist())
        for left in (x0 - 25, x1 + 5):
            draw.rectangle((left, y0, left + 20, y1), shutter, INK)
            for y in range(y0 + 6, y1 - 3, 9):
                draw.line((left + 3, y, left + 17, y), tuple(c // 2 + 10 for c in shutter), 2)
    if arch:
        draw.pieslice((x0 - 5, y0 + top - 5, x1 + 5, y0 - top + 5), 180, 360, frame)
        draw.pieslice((x0 + 2, y0 + top + 2, x1 - 2, y0 - top), 180, 360, (104, 132, 156))
    draw.rectangle((x0 - 5, y0 - 5 * (not arch), x1 + 5, y1 + 5), frame)
    lit = rng.random() < 0.3
    for i, y in enumerate(np.linspace(y0, y1, 4).astype(int)[:-1]):
        for left, right in ((x0 + 2, mid - 3), (mid + 3, x1 - 2)):
            base = np.array((255, 214, 130) if lit else (96 + 22 * i, 128 + 20 * i, 156 + 14 * i))
            pane = tuple(np.clip(base + rng.normal(0, 11, 3), 0, 255).astype(int).tolist())
            draw.rectangle((left, y + 3, right, y + (y1 - y0) // 3 - 3), pane)
    draw.line((x0 + 6, y1 - 8, x1 - 10, y0 + 12), (206, 222, 232), 3)
    draw.rectangle((x0 - 11, y1 + 5, x1 + 11, y1 + 13), CREAM, INK)
    if rng.random() < 0.45:  # flower box
        petals = [(222, 62, 84), (250, 196, 60), (240, 130, 170), (180, 96, 200)]
        draw.rectangle((x0 - 6, y1 - 6, x1 + 6, y1 + 7), (130, 84, 60), INK)
        for _ in range(30):
            x, y = rng.uniform(x0 - 8, x1 + 8), rng.normal(y1 - 12, 6)
            color = petals[rng.integers(4)] if rng.random() < 0.5 else (84, 134, 66)
            draw.ellipse((x - 5, y - 5, x + 5, y + 5), color)


def house(
    layer: Image.Image,
    rng: np.random.Generator,
    *,
    box: tuple[int, int, int],
    wall: Color,
    roof: str,
    rows: int,
    columns: int,
    shop: str,
    accent: Color,
    arch: bool = False,
) -> None:
    """One house front with a gable, windows and a shop; `box` is (left, eaves, right)."""
    left, eaves, right = box
    mid, width = (left + right) // 2, right - left
    mask = Image.new("L", layer.size)
    shape = ImageDraw.Draw(mask)
    shape.rectangle((left, eaves, right, GROUND), 255)
    if roof == "steps":
        for i in range(5):
            inset = width * i // 11
            shape.rectangle((left + inset, eaves - 34 * (i + 1), right - inset, eaves), 255)
    elif roof == "point":
        shape.polygon((left, eaves, mid, eaves - width * 6 // 10, right, eaves), 255)
    elif roof == "bell":
        shape.ellipse((left + 46, eaves - 130, right - 46, eaves + 130), 255)
        shape.rectangle((left, eaves - 22, right, eaves), 255)
    bricks = stones(rng, layer.size, wall, (26, 12))
    layer.paste(bricks, (0, 0), mask)
    edge = ImageChops.subtract(mask.filter(ImageFilter.MaxFilter(9)), mask)
    layer.paste(CREAM if roof != "flat" else INK, (0, 0), edge)
    draw = ImageDraw.Draw(layer)
    if roof == "flat":
        draw.rectangle((left - 6, eaves - 16, right + 6, eaves + 16), accent, INK)
        for x in range(left + 8, right - 8, 26):
            draw.rectangle((x, eaves + 16, x + 11, eaves + 30), CREAM, INK)
    # The shop: door, show window, striped awning, name.
    draw.rectangle((left + 8, GROUND - 158, right - 8, GROUND - 122), accent, INK, 2)
    text(draw, (mid, GROUND - 141), shop, 27, CREAM)
    door = right - 76
    draw.rectangle(
        (door, GROUND - 104, right - 20, GROUND), tuple(c * 7 // 10 for c in accent), INK, 3
    )
    draw.rectangle((door + 12, GROUND - 92, right - 32, GROUND - 52), (244, 210, 140), INK, 2)
    draw.ellipse((door + 6, GROUND - 42, door + 14, GROUND - 34), (236, 200, 80))
    draw.rectangle((left + 20, GROUND - 104, door - 14, GROUND - 26), (78, 92, 104), CREAM, 5)
    for x in range(left + 34, door - 34, 22):
        tall = int(rng.integers(14, 46))
        draw.rectangle(
            (x, GROUND - 31 - tall, x + 15, GROUND - 31), tuple(rng.integers(90, 250, 3).tolist())
        )
    stripes = np.linspace(left + 8, right - 8, 2 * (width // 36) + 2).astype(int).tolist()
    for i, (x, after) in enumerate(pairwise(stripes)):
        color = accent if i % 2 else CREAM
        draw.rectangle((x, GROUND - 121, after, GROUND - 96), color)
        draw.pieslice((x, GROUND - 107, after, GROUND - 85), 0, 180, color)
    # The floors above.
    floors = np.linspace(eaves + 34, GROUND - 178, rows + 1).astype(int)
    for floor, below in pairwise(floors):
        for x in np.linspace(left, right, columns + 2).astype(int)[1:-1]:
            half = min(30, width // columns // 4)
            window(
                layer,
                rng,
                (int(x) - half, int(floor) + 14, int(x) + half, int(below) - 26),
                CREAM,
                arch,
            )


def tree(
    draw: ImageDraw.ImageDraw, rng: np.random.Generator, x: int, base: int, size: int, leaf: Color
) -> None:
    draw.polygon(
        (x - 13, base, x - 6, base - 2 * size, x + 6, base - 2 * size, x + 14, base), (96, 70, 54)
    )
    for shade, lift in ((0.62, 0.0), (0.82, 0.16), (1.0, 0.3), (1.2, 0.44)):
        for _ in range(230):
            angle, radius = rng.uniform(0, 2 * np.pi), size * np.sqrt(rng.random()) * (1.05 - lift)
            cx = x + radius * np.cos(angle) - size * lift * 0.35
            cy = base - 2.2 * size + radius * np.sin(angle) * 1.08 - size * lift * 0.5
            r = rng.uniform(0.05, 0.12) * size
            tone = np.clip(np.array(leaf) * shade + rng.normal(0, 9, 3), 0, 255).astype(int)
            draw.ellipse((cx - r, cy - r, cx + r, cy + r), tuple(tone.tolist()))


def paint_sky(rng: np.random.Generator) -> Image.Image:
    ramp = np.linspace(0, 1, HEIGHT)[:, None, None] ** 1.2
    colors = (1 - ramp) * np.array((92, 160, 222)) + ramp * np.array((255, 226, 190))
    layer = Image.fromarray(np.broadcast_to(colors, (HEIGHT, WIDTH, 3)).astype(np.uint8))
    mask = Image.new("L", layer.size)
    puffs = ImageDraw.Draw(mask)
    for cx, cy in ((230, 210), (700, 120), (1180, 235), (1560, 110), (1800, 260)):
        for _ in range(26):
            x, y, r = rng.normal(cx, 85), rng.normal(cy, 15), rng.uniform(14, 40)
            puffs.ellipse((x - 1.7 * r, y - r, x + 1.7 * r, y + r), int(rng.integers(120, 235)))
    layer.paste((255, 252, 246), (0, 0), mask.filter(ImageFilter.GaussianBlur(7)))
    draw = ImageDraw.Draw(layer)
    for cx, cy, r, hues in (
        (1010, 150, 62, ((226, 74, 62), (250, 196, 72), (40, 118, 146))),
        (330, 130, 34, ((70, 96, 170), (244, 236, 214), (232, 120, 60))),
    ):  # balloons
        draw.polygon(
            (cx - r * 0.62, cy + r * 0.7, cx, cy + 1.7 * r, cx + r * 0.62, cy + r * 0.7), hues[0]
        )
        for i, wide in enumerate((1.0, 0.72, 0.42, 0.14)):
            draw.ellipse((cx - r * wide, cy - r, cx + r * wide, cy + r), hues[i % 3])
        draw.rectangle((cx - r * 0.2, cy + 1.6 * r, cx + r * 0.2, cy + 1.9 * r), (120, 80, 50), INK)
    return layer


def paint_houses(rng: np.random.Generator) -> Image.Image:
    layer = Image.new("RGBA", (WIDTH, HEIGHT))
    for box, wall, roof, rows, columns, shop, accent, arch in (
        ((-20, 330, 232), (196, 170, 130), "flat", 3, 2, "TAILOR", (70, 88, 120), False),
        ((240, 380, 508), (186, 92, 72), "steps", 2, 2, "BAKERY", (52, 104, 92), True),
        ((516, 420, 738), (232, 190, 104), "bell", 2, 2, "CAFE", (150, 54, 58), False),
        ((746, 350, 1060), (122, 150, 160), "flat", 3, 3, "OLD BOOKS", (44, 70, 104), False),
        ((1068, 420, 1300), (226, 150, 132), "point", 2, 2, "FLOWERS", (96, 122, 58), True),
        ((1308, 340, 1560), (150, 74, 66), "steps", 3, 2, "CLOCKS", (74, 58, 96), False),
        ((1568, 400, 1920), (214, 206, 178), "bell", 2, 3, "MARKET", (170, 92, 44), True),
    ):
        house(layer, rng, box=box, wall=wall, roof=roof, rows=rows, columns=columns, shop=shop,
              accent=accent, arch=arch)  # fmt: skip
    draw = ImageDraw.Draw(layer)
    for cx, cy, r in ((374, 300, 34), (1184, 360, 30), (1434, 262, 32)):  # gable ornaments
        draw.ellipse((cx - r, cy - r, cx + r, cy + r), CREAM, INK, 5)
    for angle, long in ((-60, 20), (80, 26)):  # the hands of the clock
        tip = np.array((1434, 262)) + long * np.array(
            (np.sin(np.radians(angle)), -np.cos(np.radians(angle)))
        )
        draw.line((1434, 262, *tip.tolist()), INK, 5)
    draw.regular_polygon((374, 300, 24), 5, 18, (196, 70, 60), INK)
    draw.regular_polygon((1184, 360, 20), 4, 0, (64, 120, 150), INK)
    draw.line((627, 300, 627, 366), INK, 4)  # the cup that hangs at the cafe
    draw.ellipse((587, 320, 667, 400), (44, 70, 104), CREAM, 5)
    draw.pieslice((603, 330, 645, 386), 0, 180, CREAM)
    draw.arc((634, 352, 656, 374), 250, 110, CREAM, 5)
    layer.paste(stones(rng, (WIDTH, 46), (200, 186, 164), (64, 22), 1.04), (0, GROUND))
    draw.rectangle((0, GROUND + 44, WIDTH, GROUND + 56), (150, 142, 134))
    layer.paste(stones(rng, (WIDTH, 330), (148, 140, 142), (34, 15), 1.085), (0, GROUND + 56))
    return layer


def paint_foreground(rng: np.random.Generator) -> Image.Image:
    layer = Image.new("RGBA", (WIDTH, HEIGHT))
    draw = ImageDraw.Draw(layer)
    tree(draw, rng, 506, GROUND + 40, 84, (112, 156, 70))
    tree(draw, rng, 1302, GROUND + 44, 92, (206, 136, 52))
    tree(draw, rng, 1700, GROUND + 40, 100, (90, 142, 84))
    x, top = 742, GROUND - 316  # street lamp
    draw.rectangle((x - 5, top + 66, x + 5, GROUND + 62), INK)
    draw.rectangle((x - 13, GROUND + 20, x + 13, GROUND + 64), INK)
    glass = (x - 17, top + 66, x - 26, top, x + 26, top, x + 17, top + 66)
    draw.polygon(glass, (255, 232, 160), INK, 5)
    draw.polygon((x - 34, top, x, top - 30, x + 34, top), INK)
    for x, color in ((630, (196, 58, 54)), (960, (40, 112, 128))):  # bicycles
        y, r = GROUND + 44, 33
        for hub in (x - 48, x + 48):
            draw.ellipse((hub - r, y - r, hub + r, y + r), None, INK, 5)
            for a in np.arange(0, np.pi, np.pi / 5):
                dx, dy = r * np.cos(a), r * np.sin(a)
                draw.line((hub - dx, y - dy, hub + dx, y + dy), (130, 126, 128), 1)
        frame = (
            x - 48,
            y,
            x - 8,
            y,
            x + 34,
            y - 50,
            x - 22,
            y - 50,
            x - 48,
            y,
            x - 8,
            y,
            x - 27,
            y - 66,
        )
        draw.line(frame, color, 7, joint="curve")
        draw.line((x + 48, y, x + 30, y - 66, x + 48, y - 76), color, 7, joint="curve")
        draw.rounded_rectangle((x - 44, y - 74, x - 14, y - 65), 4, INK)
    box = (1098, GROUND - 40, 1146, GROUND + 66)  # letter box
    draw.rounded_rectangle(box, 12, (196, 44, 44), INK, 3)
    draw.rectangle((1108, GROUND - 18, 1136, GROUND - 11), INK)
    draw.rectangle((1108, GROUND + 2, 1136, GROUND + 24), CREAM)
    return layer


def look(layers: list[Image.Image], corners: np.ndarray, shift: float, gain: float, warmth: float,
         rng: np.random.Generator) -> Image.Image:  # fmt: skip
    """One photograph of the layers.

    Args:
        layers: Far to near.
        corners: (4, 2) points of the world seen in the corners: top left, top right, bottom right,
            bottom left.
        shift: How far the nearest layer slides sideways against the houses, in world pixels.
        gain, warmth: The exposure and the white balance.
    """
    size = (2 * VIEW[0], 2 * VIEW[1])  # drawn twice as large, for smooth edges
    photo = Image.new("RGBA", size)
    pixels = np.array([(0, 0), (size[0], 0), size, (0, size[1])], dtype=float)
    for layer, depth in zip(layers, (-0.6, 0.0, 1.0), strict=True):
        world = corners - np.array((shift * depth, 0))
        rows = [
            row
            for (x, y), (u, v) in zip(pixels, world, strict=True)
            for row in ((x, y, 1, 0, 0, 0, -u * x, -u * y), (0, 0, 0, x, y, 1, -v * x, -v * y))
        ]
        homography = np.linalg.solve(np.array(rows), world.reshape(-1))
        seen = layer.convert("RGBA").transform(
            size, Image.Transform.PERSPECTIVE, homography.tolist(), Image.Resampling.BICUBIC
        )
        photo.alpha_composite(seen)
    light = np.asarray(photo.convert("RGB").resize(VIEW, Image.Resampling.LANCZOS)) / 255
    y, x = np.mgrid[-1 : 1 : VIEW[1] * 1j, -1 : 1 : VIEW[0] * 1j]
    light = light * (gain * (1 - 0.10 * (x * x + y * y)))[..., None] * (1 + warmth, 1, 1 - warmth)
    light = light + rng.normal(0, 0.008, light.shape)
    return Image.fromarray((np.clip(light, 0, 1) * 255).round().astype(np.uint8))


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws examples/images/left.jpg and right.jpg.")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images")
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    layers = [paint_sky(rng), paint_houses(rng), paint_foreground(rng)]
    left = np.array([(230, 40), (1500, 40), (1500, 992), (230, 992)], dtype=float)
    right = np.array([(420, 120), (1560, 40), (1560, 1020), (420, 920)], dtype=float)
    args.out.mkdir(parents=True, exist_ok=True)
    look(layers, left, 0, 1.06, 0.0, rng).save(args.out / "left.jpg", quality=90)
    look(layers, right, 40, 0.86, 0.06, rng).save(args.out / "right.jpg", quality=90)


if __name__ == "__main__":
    main()
