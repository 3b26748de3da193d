"""A drawing of the blocks of a tensor, with those of one device filled."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from layouts import Sharding
from meshlib.report.markup import text
from meshlib.report.svg import LETTER, Picture

MOST_BLOCKS = 16  # blocks drawn per dim at most
WIDTH, HEIGHT = 250.0, 150.0


@dataclass(frozen=True)
class Grid:
    """Arrangement of a tensor's blocks in a picture: dims down, across, and over separate panels.

    Attributes:
      down, across: numbers of the dims along the two sides of a panel, None where there are none.
      panels: numbers of the other split dims.
      counts: blocks of each dim; shown: as many of them as are drawn.
    """

    down: int | None
    across: int | None
    panels: tuple[int, ...]
    counts: tuple[int, ...]
    shown: tuple[int, ...]


def grid_of(sharding: Sharding) -> Grid:
    """The arrangement for a tensor of any rank: its two most split dims on the sides, other split dims as panels.

    Example:
      >>> from layouts import Sharding
      >>> grid_of(Sharding("batch:8;length:4;d:6", "x:2;y:2", [("x",), (), ("y",)]))
      Grid(down=0, across=2, panels=(), counts=(2, 1, 2), shown=(2, 1, 2))
    """
    counts = tuple(sharding.block_counts)
    order = sorted(range(len(counts)), key=lambda d: (-counts[d], -sharding.shape.dims[d].size, d))
    sides = sorted(order[:2])
    down, across = (*sides, None, None)[:2] if len(sides) == 2 else (None, *sides, None)[:2]
    panels = tuple(d for d in range(len(counts)) if counts[d] > 1 and d not in sides)
    limit = max(2, math.floor(8 ** (1 / max(1, len(panels)))))
    shown = tuple(min(n, limit if d in panels else MOST_BLOCKS) for d, n in enumerate(counts))
    return Grid(down, across, panels, counts, shown)


def shards(sharding: Sharding, name: str = "", device: int = 0) -> str:
    """The picture of a tensor's blocks, with that of `device` filled."""
    plan = grid_of(sharding)
    mesh = sharding.mesh
    own = sharding.block_index(mesh.coordinate(device))
    indices = list(itertools.product(*(range(plan.shown[d]) for d in plan.panels)))
    few = [
        f"{plan.shown[d]} of {n} blocks along {sharding.shape.dims[d].name}"
        for d, n in enumerate(plan.counts)
        if plan.shown[d] < n
    ]
    columns = min(len(indices), 4)
    rows = math.ceil(len(indices) / columns)
    scale = 1.0 if len(indices) == 1 else 0.5
    width, height = (
        max(side * scale, 0.0 if d is None else LETTER * len(_side(sharding, d)))
        for side, d in ((WIDTH, plan.across), (HEIGHT, plan.down))
    )
    picture = Picture(
        columns * (width + 14) + 14, rows * (height + 34) + 8 + 16 * bool(few), label=f"blocks of {name or sharding}"
    )
    if few:
        picture.text(14, picture.height - 6, f"drawn: {', '.join(few)}")
    for n, index in enumerate(indices):
        x, y = 14 + n % columns * (width + 14), 18 + n // columns * (height + 34)
        mine = all(own[d] == k for d, k in zip(plan.panels, index, strict=True))
        _panel(picture, sharding, plan, (x, y, width, height), own if mine else None)
        if plan.down is not None and n % columns == 0:
            middle = y + height / 2
            picture.add(
                "text", "", content=text(_side(sharding, plan.down)), x=x - 5, y=middle, text_anchor="middle",
                transform=f"rotate(-90 {x - 5:.0f} {middle:.0f})",
            )  # fmt: skip
        if index:
            label = ", ".join(
                f"{sharding.shape.dims[d].name} {k + 1}/{plan.counts[d]}"
                for d, k in zip(plan.panels, index, strict=True)
            )
            picture.text(x + width / 2, y - 4, label, anchor="middle")
    return str(picture)


def _panel(
    picture: Picture,
    sharding: Sharding,
    plan: Grid,
    box: tuple[float, float, float, float],
    own: tuple[int, ...] | None,
) -> None:
    x, y, width, height = box
    rows = 1 if plan.down is None else plan.shown[plan.down]
    columns = 1 if plan.across is None else plan.shown[plan.across]
    for row, column in itertools.product(range(rows), range(columns)):
        mine = own is not None and all(
            d is None or own[d] == k for d, k in ((plan.down, row), (plan.across, column))
        )  # fmt: skip
        picture.rect(
            x + column * width / columns, y + row * height / rows, width / columns, height / rows,
            "block mine" if mine else "block", _span(sharding, plan, row, column),
        )  # fmt: skip
    if plan.across is not None:
        picture.text(x + width / 2, y + height + 13, _side(sharding, plan.across), anchor="middle")


def _side(sharding: Sharding, d: int) -> str:
    dim, axes = sharding.shape.dims[d], "+".join(sharding.axes[d])
    return f"{dim.name}:{dim.size}" + (f"@{axes}" if axes else "")


def _span(sharding: Sharding, plan: Grid, row: int, column: int) -> str:
    spans = []
    for d, k in ((plan.down, row), (plan.across, column)):
        if d is not None:
            size = sharding.shape.dims[d].size // plan.counts[d]
            spans.append(f"{sharding.shape.dims[d].name} {k * size}:{(k + 1) * size}")
    return ", ".join(spans) or "all of it"
