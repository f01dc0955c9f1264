# SPDX-License-Identifier: Apache-2.0
"""Pictures of classifications: the image, and a bar chart of its best classes."""

from PIL import Image, ImageDraw, ImageFont

from quadtree_attention.errors import OptionError
from quadtree_attention.tasks.classify.result import Classification
from quadtree_attention.viz import canvas as viz
from quadtree_attention.viz.canvas import HEADER, LEGEND, MARGIN
from quadtree_attention.viz.palette import FAINT, TEXT, vivid

ROW, BAR = 40, 10  # height of a row and of its bar, in pixels
TRACK = (52, 55, 62)  # colour of the rest of a bar


def draw(found: Classification, *, title: str | None = None) -> Image.Image:
    """Draw the image, enlarged if small, and the probabilities of its best classes on the right.

    Args:
        found: The result to draw.
        title: Text above the picture; None: the best class.

    Raises:
        OptionError: The result has no image.
    """
    if not found.images:
        raise OptionError(
            "classifications of a file have no image; draw those that a classifier returns"
        )
    (image,) = found.images
    panels = viz.lay_out([image.size], legend=True)
    canvas = viz.Canvas(panels, legend=True)
    canvas.paste(0, viz.resized(image, panels[0].size))
    facts = [f"{len(found.classes)} classes", f"{found.seconds:.2f} s"]
    canvas.header(found.names[0] if title is None else title, facts)
    pen, font = ImageDraw.Draw(canvas.picture), ImageFont.load_default(15)
    left, right = canvas.picture.width - LEGEND + MARGIN, canvas.picture.width - MARGIN
    rows = (canvas.picture.height - HEADER) // ROW
    answers = list(zip(found.labels.tolist(), found.names, found.scores.tolist(), strict=True))
    for i, (label, name, score) in enumerate(answers[:rows]):
        top = HEADER + i * ROW
        share = viz.percent(score)
        pen.text((right, top + 12), share, fill=FAINT, font=font, anchor="rm")
        room = right - left - 8 - pen.textlength(share, font=font)
        pen.text((left, top + 12), viz.cut(name, room, font), fill=TEXT, font=font, anchor="lm")
        pen.rectangle([left, top + 24, right, top + 24 + BAR], fill=TRACK)
        end = left + round(score * (right - left))
        pen.rectangle([left, top + 24, end, top + 24 + BAR], fill=vivid(label))
    return canvas.picture
