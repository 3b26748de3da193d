"""A text drawing of the blocks of a sharding and their devices."""

from __future__ import annotations

from layouts.sharding import Sharding

SHOWN_DEVICES = 8  # devices listed per cell; the rest are counted


def draw(sharding: Sharding) -> str:
    """The blocks of the first two split dimensions as a grid, each with its devices.

    Rows are blocks of the first dimension, columns of the second. If more dimensions are split, a cell
    lists the devices of all their blocks.

    >>> from layouts import Sharding, draw
    >>> print(draw(Sharding("batch:8;hidden:6", "rows:2;cols:2", [("rows",), ("cols",)])))
    [batch:8@rows, hidden:6@cols]  on  rows:2;cols:2
              | hidden 0:3 | hidden 3:6
    batch 0:4 | 0          | 1
    batch 4:8 | 2          | 3
    """
    split = [d for d, blocks in enumerate(sharding.block_counts) if blocks > 1]
    others = [d for d in range(sharding.shape.ndim) if d not in split]
    # With fewer than two split dims, unsplit ones fill the grid as a single row or column.
    picked = sorted((split + others)[:2])
    spans = []
    for d in picked:
        dim, blocks = sharding.shape.dims[d], sharding.block_counts[d]
        width = dim.size // blocks
        spans.append([f"{dim.name} {i * width}:{(i + 1) * width}" for i in range(blocks)])
    cells: dict[tuple[int, ...], list[int]] = {}
    for device, coordinate in enumerate(sharding.mesh.coordinates()):
        block = sharding.block_index(coordinate)
        cells.setdefault(tuple(block[d] for d in picked), []).append(device)
    rows = spans[0] if spans else ["scalar"]
    columns = spans[1] if len(spans) > 1 else ["devices"]
    texts = {cell: _devices(held) for cell, held in cells.items()}
    table = [["", *columns]]
    for i, row in enumerate(rows):
        table.append([row, *(texts[(i, j)[: len(picked)]] for j in range(len(columns)))])
    widths = [max(len(line[c]) for line in table) for c in range(len(table[0]))]
    lines = [" | ".join(text.ljust(w) for text, w in zip(line, widths, strict=True)) for line in table]
    return "\n".join([f"{sharding}  on  {sharding.mesh}", *(line.rstrip() for line in lines)])


def _devices(held: list[int]) -> str:
    more = f" +{len(held) - SHOWN_DEVICES}" if len(held) > SHOWN_DEVICES else ""
    return " ".join(map(str, held[:SHOWN_DEVICES])) + more
