"""The mesh on the torus of its slice: chips, links coloured by load, one replica group of the busiest mesh axis."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass

from hardware.placement import CORES, DCN, Placement, place_name, places
from meshlib.core.text import bytes_text, seconds_text
from meshlib.estimation import Estimate
from meshlib.estimation.result import engine_name
from meshlib.report.markup import EXACT, MODELLED, legend, paragraph, section, table, tag, text
from meshlib.report.svg import Picture

LOADS = ((0.5, "over 50 %"), (0.2, "20 to 50 %"), (0.05, "5 to 20 %"), (0.0, "under 5 %"))  # share of the step
MOST_SIDE, MOST_PLANES = 16, 4  # largest part of a torus that is drawn
STEP = 26.0  # pixels between chips


@dataclass(frozen=True)
class Link:
    """A link between the chips at two coordinates on torus axis `axis`; `wraps` marks a wrap-around link.

    `load` is the share of the step for which links of this axis are busy. Modelled.
    """

    axis: int
    begin: tuple[int, ...]
    end: tuple[int, ...]
    wraps: bool
    load: float


def loads(est: Estimate) -> dict[int, float]:
    """Share of the step for which each place of the network (torus axis, CORES, DCN) is busy. Modelled."""
    seconds = est.engine_seconds
    step = est.step_seconds or 1.0
    return {place: seconds.get(engine_name(place), 0.0) / step for place, size in places(est.slice) if size > 1}


def links_of(est: Estimate, shape: tuple[int, ...]) -> list[Link]:
    """Links within the corner of that `shape`, and wrap-around links that close rings in it."""
    whole, wrap, busy = est.slice.torus_shape, est.slice.wrap, loads(est)
    links = []
    for at in itertools.product(*map(range, shape)):
        for axis, size in enumerate(whole):
            after = at[axis] + 1
            if after < shape[axis]:
                links.append(Link(axis, at, (*at[:axis], after, *at[axis + 1 :]), False, busy.get(axis, 0.0)))
            elif after == size and wrap[axis] and size > 2:
                links.append(Link(axis, at, (*at[:axis], 0, *at[axis + 1 :]), True, busy.get(axis, 0.0)))
    return links


def position(placement: Placement, torus: tuple[int, ...]) -> dict[str, int]:
    """Mesh coordinates of the first device of the chip at a torus coordinate, in the first slice.

    The inverse of `Placement.device`.
    """
    at = {**dict(enumerate(torus)), CORES: 0, DCN: 0}
    indices = {}
    for name, factors in placement.factors:
        index = 0
        for factor in factors:
            index = index * factor.size + at[factor.place] // factor.stride % factor.size
        indices[name] = index
    return indices


def sent_by_axes(est: Estimate) -> dict[str, float]:
    """Mesh axis -> bytes that a device sends over it per step; one over several axes counts for each. Exact."""
    sent: dict[str, float] = defaultdict(float)
    for collective in est.program.collectives:
        for axis in collective.axes:
            sent[axis] += collective.sent_bytes * collective.count
    return dict(sent)


def torus(est: Estimate) -> str:
    """The section of the mesh on its torus."""
    keys = legend([(f"l-{n}", name) for n, (_, name) in enumerate(LOADS)])
    head = paragraph(f"{text(est.slice)}. Links are coloured by the share of the step for which they are busy ≈.")
    sent, group = sent_by_axes(est), busiest_axis(est)
    if group:
        size = est.program.mesh.axis_size(group)
        head += paragraph(
            f"Filled: the chips of one group of mesh axis '{text(group)}' (size {size}), which sends most."
        )
    tables = tag("div", _axes(est, sent) + _network_table(est), class_="beside")
    return section("torus", "Mesh on the torus", head, keys, tag("div", torus_picture(est) + tables, class_="row"))


def busiest_axis(est: Estimate) -> str:
    """The mesh axis over which most is sent; "" if nothing is sent."""
    sent = sent_by_axes(est)
    return max(sent, key=lambda axis: sent[axis]) if sent else ""


def corner(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The corner of a large torus that is drawn."""
    sides = [min(side, MOST_SIDE) for side in shape[:2]]
    planes = [min(side, MOST_PLANES) for side in shape[2:]]
    return (*sides, *planes)


def torus_picture(est: Estimate) -> str:
    """Chips and links; the filled chips are one replica group of the busiest mesh axis."""
    group = busiest_axis(est)
    whole = est.slice.torus_shape
    shape = corner(whole)
    flat = (*shape, 1, 1)[:3] if len(shape) < 3 else shape
    rows, columns, planes = flat[0], flat[1], math.prod(flat[2:])
    side = STEP if rows * columns <= 144 else STEP * 0.7
    plane_width, links = columns * side + 2 * side, links_of(est, shape)
    edge = 1.5 * side if any(link.wraps for link in links) or planes > 1 else 0.75 * side  # room around the chips
    height = (rows - 1) * side + 2 * edge + 22 * (planes > 1)
    picture = Picture(max(160.0, planes * plane_width + 10), height, label="chips and links of the torus")
    picture.wide = picture.width > 480

    def spot(at: tuple[int, ...]) -> tuple[float, float]:
        full = (*at, 0, 0)[:3] if len(at) < 3 else at
        return 5 + full[2] * plane_width + (full[1] + 1.5) * side, edge + full[0] * side

    for link in links:
        _draw_link(picture, link, spot, side)
    chosen = position(est.placement, (0,) * len(whole))
    for at in itertools.product(*map(range, shape)):
        x, y = spot(at)
        indices = position(est.placement, at)
        mine = bool(group) and all(indices[name] == chosen[name] for name in indices if name != group)
        about = f"chip {at}: " + ", ".join(f"{name} {index}" for name, index in indices.items())
        picture.circle(x, y, side * 0.22, "chip mine" if mine else "chip", about)
    for plane in range(planes if len(shape) > 2 else 0):
        middle = 5 + plane * plane_width + (columns + 2) / 2 * side
        picture.text(middle, picture.height - 4, f"plane {plane}", anchor="middle")
    left_out = math.prod(whole) - math.prod(shape)
    note = f"{left_out:,} more chips look alike and are not drawn. " if left_out else ""
    if est.slice.slices > 1:
        note += f"{est.slice.slices} such slices are joined by the data-centre network (DCN)."
    return tag("div", str(picture) + (paragraph(text(note)) if note else ""))


def _draw_link(picture: Picture, link: Link, spot: object, side: float) -> None:
    assert callable(spot)
    (x1, y1), (x2, y2) = spot(link.begin), spot(link.end)
    class_ = f"link l-{level(link.load)}"
    title = f"link on {place_name(link.axis)}, busy {link.load:.1%} of the step"
    if not link.wraps:
        if link.axis == 2:  # a link to the next plane is a stub, so that planes stay readable
            picture.line(x1, y1, x1 + side * 0.5, y1 - side * 0.5, class_, title)
            return
        picture.line(x1, y1, x2, y2, class_, title)
        return
    dx, dy = ((0.0, side * 0.8) if link.axis == 0 else (side * 0.8, 0.0)) if link.axis < 2 else (0.0, 0.0)
    if link.axis < 2:
        picture.line(x1, y1, x1 + dx, y1 + dy, f"{class_} wraps", f"{title}, closes the ring")
        picture.line(x2, y2, x2 - dx, y2 - dy, f"{class_} wraps", f"{title}, closes the ring")


def level(load: float) -> int:
    """Colour class of a load."""
    return next(n for n, (least, _) in enumerate(LOADS) if load >= least)


def _axes(est: Estimate, sent: dict[str, float]) -> str:
    described = dict(line.strip().split(": ", 1) for line in str(est.placement).splitlines()[1:])
    rows = [
        (
            text(name), f"{est.program.mesh.axis_size(name):,}", text(described.get(name, "")),
            text(bytes_text(sent.get(name, 0))),
        )
        for name in est.program.mesh.axes
    ]  # fmt: skip
    several = any(len(row.axes) > 1 for row in est.rows if row.kind == "collective")
    note = paragraph("A collective over several axes counts for each of them.") if several else ""
    return note + table(
        ("mesh axis", f"size {EXACT}", "placed on", f"sent in a step {EXACT}"),
        rows,
        right=(1, 3),
        long=(2,),
    )


def _network_table(est: Estimate) -> str:
    seconds = est.engine_seconds
    rows = [
        (text(place_name(place)), f"{size:,}", text(seconds_text(seconds.get(engine_name(place), 0.0))),
         f'<i class="key l-{level(load)}"></i>{load:.1%}')
        for (place, size), load in zip([p for p in places(est.slice) if p[1] > 1], loads(est).values(), strict=True)
    ]  # fmt: skip
    head = ("network", "size", f"busy {MODELLED}", f"of the step {MODELLED}")
    return table(head, rows, right=(1, 2, 3)) if rows else ""
