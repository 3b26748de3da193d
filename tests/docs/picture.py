"""Draws the picture of the front page: blocks of a tensor on a mesh, and one step on the engines of a device.

`python -m tests.docs.picture` writes it again.
"""

from __future__ import annotations

import re
from pathlib import Path

import meshlib as mtf
from meshlib.report.links import PageAnchors
from meshlib.report.memory import area
from meshlib.report.shards import shards
from meshlib.report.timeline import timeline
from meshlib.report.torus import torus_picture
from tests.paths import ROOT

PICTURE = ROOT / "meshlib" / "report" / "step.svg"
WIDTH, LINE = 1000, 20
BESIDE, RIGHT, BELOW = 320, 560, 232  # where pictures begin


def step() -> tuple[mtf.Tensor, mtf.Program]:
    """The network of the front page: its hidden activations, and the program of a training step on 2x4 cores."""
    batch, pixels = mtf.Dimension("batch", 512), mtf.Dimension("pixels", 784)
    hidden, classes = mtf.Dimension("hidden", 1024), mtf.Dimension("classes", 10)
    with mtf.Graph():
        images, labels = mtf.input("images", [batch, pixels]), mtf.input("labels", [batch], dtype="int32")
        w1, w2 = mtf.variable("w1", [pixels, hidden]), mtf.variable("w2", [hidden, classes])
        h = mtf.relu(mtf.einsum([images, w1], output_shape=[batch, hidden], name="hidden"))
        logits = mtf.einsum([h, w2], output_shape=[batch, classes], name="logits")
        targets = mtf.one_hot(labels, classes)
        loss = mtf.reduce_mean(mtf.layers.softmax_cross_entropy_with_logits(logits, targets, classes))
        updates = mtf.optimize.SgdOptimizer(lr=0.1).minimize(loss)
    return h, mtf.lower({"loss": loss}, updates, mesh="rows:2;cols:4", layout="batch:rows;hidden:cols")


def style() -> str:
    """The rules of the report's style sheet that pictures use."""
    sheet = (ROOT / "meshlib" / "report" / "page.css").read_text().split("@media")[0]
    rules = re.findall(r"\.meshlib ((?:svg |\.[ukl]-)[^{]*\{[^}]*\})", sheet)
    return "".join(rule.replace("svg ", "", 1) for rule in rules if not rule.startswith("svg {"))


def drawn() -> str:
    """The picture as SVG."""
    hidden, program = step()
    sharding = mtf.LayoutRules("batch:rows;hidden:cols").sharding(hidden.shape, "rows:2;cols:4")
    estimate = mtf.estimate(program, "v3-8")
    memory = area(estimate, linked=False, size=(WIDTH - RIGHT, BELOW - LINE))
    pictures = [  # title, page, x, y, scale
        ("hidden activations: a block on each of 8 cores", shards(sharding, "hidden"), 0, LINE, 1.0),
        ("the mesh on a v3-8's chips", torus_picture(estimate), BESIDE, LINE, 2.2),
        ("memory of a core", memory, RIGHT, LINE, 1.0),
        ("one training step on one core (modelled)", timeline(estimate, PageAnchors.of(estimate)), 0, BELOW, 1.0),
    ]
    parts, height = [], 0.0
    for title, page, x, y, scale in pictures:
        picture = re.search(r'<svg viewBox="0 0 ([\d.]+) ([\d.]+)"[^>]*>(.*?)</svg>', page, re.S)
        assert picture is not None
        inner = re.sub(r"</?a\b[^>]*>| data-op=\"[^\"]*\"|<title>.*?</title>", "", picture[3])
        parts.append(f'<text x="{x + 14}" y="{y}" style="font-weight: 600">{title}</text>')
        parts.append(f'<g transform="translate({x} {y + 4}) scale({scale:g})">{inner}</g>')
        height = max(height, y + scale * float(picture[2]) + 4)
    bottom = round(height)
    size = f'viewBox="0 0 {WIDTH} {bottom}" width="{WIDTH}"'
    ground = f'<rect width="{WIDTH}" height="{bottom}" fill="#fff"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} color="#1c2330"><style>{style()}</style>'
        f"{ground}{''.join(parts)}</svg>\n"
    )


if __name__ == "__main__":
    Path(PICTURE).write_text(drawn())
