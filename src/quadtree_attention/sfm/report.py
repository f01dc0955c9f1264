# SPDX-License-Identifier: Apache-2.0
"""The report of a reconstruction as a single HTML file."""

import html
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quadtree_attention.images import Array
from quadtree_attention.sfm.photos import Photo
from quadtree_attention.sfm.reconstruct import Cloud
from quadtree_attention.viz.page import make_page

if TYPE_CHECKING:
    from quadtree_attention.sfm.pipeline import Report

MOST_POINTS = 40_000  # maximum number of drawn points
FRUSTUM = 0.08  # depth of a drawn camera, over the size of the model
BAR = 16  # length of the longest bar in em


def page(report: "Report", model: Any, photos: Sequence[Photo]) -> bytes:
    """Return the HTML page; `model` is None if there is no model."""
    cloud = Cloud.of(model) if model is not None else None
    about: dict[str, Any] = {"count": 0, "cameras": [], "turn": np.eye(3).tolist()}
    data, shown = b"", "There is no model."
    if cloud is not None and len(cloud.points):
        chosen = np.argsort(-cloud.lengths, kind="stable")[:MOST_POINTS]
        centre, scale = _frame(cloud.points)
        placed = ((cloud.points[chosen] - centre) / scale).astype("<f4")
        data = placed.tobytes() + cloud.colours[chosen].tobytes()
        numbers = sorted(model.reg_image_ids())
        views = [(photos[n - 1].name, model.images[n]) for n in numbers]
        about = {
            "count": len(chosen),
            "cameras": [
                {"name": name, "frustum": _frustum(model, image, centre, scale)}
                for name, image in views
            ],
            "turn": _turn(model, numbers),
        }
        part = "All" if len(chosen) == len(cloud.points) else f"{len(chosen):,} of"
        shown = f"{part} {len(cloud.points):,} points and {len(views)} cameras."
    fields = {
        "title": "Reconstruction",
        "facts": _facts(report),
        "shown": shown,
        "body": _body(report),
    }
    made = make_page("report", "report.html", ["report.css"], ["report.js"], fields, about, data)
    return made.html.encode()


def _frame(points: Array) -> tuple[Array, float]:
    """Return centre and size of a cloud, without its outermost points."""
    centre = np.median(points, axis=0)
    apart = np.linalg.norm(points - centre, axis=1)
    return centre, float(np.quantile(apart, 0.9)) or 1.0


def _frustum(model: Any, image: Any, centre: Array, scale: float) -> list[list[float]]:
    """Return the centre of a camera and the four corners of its image."""
    camera = model.cameras[image.camera_id]
    wide, high = camera.width / camera.focal_length_x / 2, camera.height / camera.focal_length_y / 2
    corners = np.array([[0, 0, 0], [-wide, -high, 1], [wide, -high, 1], [wide, high, 1],
                        [-wide, high, 1]])  # fmt: skip
    motion = image.cam_from_world().inverse()
    local = corners * FRUSTUM * scale
    world = local @ motion.rotation.matrix().T + motion.translation
    return ((world - centre) / scale).round(5).tolist()


def _turn(model: Any, numbers: Sequence[int]) -> list[list[float]]:
    """Return the rotation of the middle camera of the sequence."""
    image = model.images[numbers[len(numbers) // 2]]
    return image.cam_from_world().rotation.matrix().round(6).tolist()


def _facts(report: "Report") -> str:
    count = len(report.registered) + len(report.left_out)
    rows: list[tuple[str, str]] = [
        ("Registered", f"{len(report.registered)} of {count} photographs"),
        ("Pairs", f"{report.verified:,} of {report.pairs:,} agree on a geometry"),
    ]
    if report.points:
        rows += [
            ("Points", f"{report.points:,}"),
            ("Mean track length", f"{report.track_length:.2f} photographs"),
            ("Mean reprojection error", f"{report.error:.3f} pixels"),
            ("Focal length", ", ".join(f"{f:.1f}" for f in report.focal[:5]) + " pixels"),
        ]
    rows += [("Time", ", ".join(f"{name} {time:.1f} s" for name, time in report.seconds.items()))]
    rows += [("Note", warning) for warning in report.warnings]
    return _table((), rows)


def _body(report: "Report") -> str:
    parts = []
    if report.left_out:
        parts += ["<h2>Left out</h2>", _table(("photograph", "why"), report.left_out.items())]
    if report.views:
        rows = [
            (name, f"{view['points']:,.0f}", f"{view['error']:.2f}")
            for name, view in report.views.items()
        ]
        parts += [
            "<h2>Registered</h2>",
            _table(("photograph", "points", "error, pixels"), rows, numbers=2),
        ]
    if report.lengths:
        parts += ["<h2>Track lengths</h2>", _bars(report.lengths)]
    return "\n".join(parts)


def _bars(lengths: Any) -> str:
    most = max(lengths.values())
    rows = "".join(
        f'<tr><td class="number">{length}</td><td class="number">{count:,}</td><td>'
        f'<span class="bar" style="width:{BAR * count / most:.2f}em"></span></td></tr>'
        for length, count in lengths.items()
    )
    head = '<tr><th class="number">photographs</th><th class="number">points</th><td></td></tr>'
    return f'<div class="scroll"><table>{head}{rows}</table></div>'


def _table(head: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: int = 0) -> str:
    """Return an HTML table; the last columns are numbers."""

    def line(tag: str, cells: Sequence[object]) -> str:
        words = len(cells) - numbers
        opened = [tag] * words + [f'{tag} class="number"'] * numbers
        inside = zip(opened, map(str, cells), strict=True)
        row = "".join(f"<{start}>{html.escape(cell)}</{tag}>" for start, cell in inside)
        return f"<tr>{row}</tr>"

    lines = [line("th", head)] if head else []
    lines += [line("td", row) for row in rows]
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'
