"""The pictures of the report on matplotlib Axes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from textwrap import fill
from typing import Any

from layouts import Sharding
from meshlib.core.arguments import choice
from meshlib.core.drawing import plotted
from meshlib.core.errors import GraphError
from meshlib.core.text import bytes_text
from meshlib.estimation import DeviceMemory, Estimate
from meshlib.program.analysis.memory import KINDS, Memory
from meshlib.report.alternatives import Alternative, pareto_front
from meshlib.report.markup import asset
from meshlib.report.memory import FAR, memory_over_time
from meshlib.report.shards import grid_of
from meshlib.report.stages import TASK_CLASSES, pipelines_of
from meshlib.report.timeline import bars_of, lanes_of
from meshlib.report.torus import corner, links_of

BYTES = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))
SECONDS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def unit_of(value: float, units: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """The largest unit not above the value, otherwise the smallest; its name and size.

    >>> unit_of(0.02, SECONDS), unit_of(0, BYTES)
    (('ms', 0.001), ('B', 1.0))
    """
    return next((unit for unit in units if value >= unit[1]), units[-1])


@cache
def colour(class_: str) -> str:
    """The colour of a class of shapes in the page's style sheet.

    >>> colour("u-mxu")
    '#4e79a7'
    """
    fill = re.search(rf"\.{class_} {{[^}}]*?(#\w+)", asset("page.css"))
    assert fill is not None, class_
    return fill[1]


def plot_estimate(est: Estimate, ax: Any, what: str) -> Any:
    """`Estimate.plot`."""
    draw: dict[str, tuple[Callable[[Estimate, Any], None], tuple[float, float]]] = {
        "timeline": (_timeline, (10, 3)),
        "memory": (_memory, (10, 3.5)),
        "roofline": (_roofline, (6, 4)),
        "torus": (_torus, (6, 6)),
        "stages": (_stages, (12, 4)),
    }
    panel, size = draw[choice(what, "Estimate.plot", "what", tuple(draw))]
    return plotted("Estimate.plot", ax, [lambda axes: panel(est, axes)], size)


def _timeline(est: Estimate, axes: Any) -> None:
    lanes = lanes_of(est)
    labelled: set[str] = set()
    name, size = unit_of(est.schedule.seconds, SECONDS)
    for bar in bars_of(est.schedule, est.slice.chip):
        row, below = lanes.index(bar.lane), 0.1
        begin, end = bar.begin / size, bar.end / size
        for unit, share in bar.parts or ((bar.unit, 1.0),):
            label = None if unit in labelled else unit
            labelled.add(unit)
            spans, face = [(begin, end - begin)], colour(f"u-{unit.lower()}")
            axes.broken_barh(spans, (row + below, 0.8 * share), facecolors=face, label=label)
            below += 0.8 * share
        if bar.parts and bar.lane == lanes[0]:
            axes.text((begin + end) / 2, row + 0.5, bar.name, ha="center", va="center", color="white", fontsize=8)
    axes.set_yticks([n + 0.5 for n in range(len(lanes))], lanes)
    axes.set(ylim=(len(lanes), 0), xlim=(0, est.schedule.seconds / size), xlabel=f"{name} of the step (modelled)")
    axes.legend(fontsize=7, frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.2))


def _memory(est: Estimate, axes: Any) -> None:
    moments = memory_over_time(est)
    name, size = unit_of(est.schedule.seconds, SECONDS)
    times = [t / size for m in moments for t in (m.begin, m.end)]
    _stack(axes, times, [m.kinds for m in moments for _ in (0, 1)], est.memory.capacity_bytes)
    axes.set_xlabel(f"{name} of the step (modelled)")


def _stack(axes: Any, times: Sequence[float], usage: Sequence[tuple[int, ...]], capacity: int) -> None:
    shown = [n for n in range(len(KINDS)) if any(kinds[n] for kinds in usage)]
    totals = [sum(kinds) for kinds in usage]
    peak = totals.index(max(totals))
    name, size = unit_of(totals[peak], BYTES)
    heights = [[kinds[n] / size for kinds in usage] for n in shown]
    axes.stackplot(times, *heights, labels=[KINDS[n] for n in shown], colors=[colour(f"k-{n}") for n in shown])
    if totals[peak] * FAR < capacity:  # what is live would be a line at the bottom
        axes.plot([], [], " ", label=f"capacity {bytes_text(capacity)}, above this picture")
    else:
        axes.axhline(capacity / size, color="#d64545", linestyle="--", label=f"capacity {bytes_text(capacity)}")
    axes.plot([times[peak]], [totals[peak] / size], "o", color="#d64545", label=f"peak {bytes_text(totals[peak])}")
    axes.set_ylabel(f"{name} of one device (exact)")
    axes.legend(fontsize=7, ncols=3, loc="lower right")


def plot_device_memory(memory: DeviceMemory, ax: Any) -> Any:
    """`DeviceMemory.plot`: over the instructions, by kind."""

    def panel(axes: Any) -> None:
        _stack(axes, range(len(memory.timeline_by_kind)), memory.timeline_by_kind, memory.capacity_bytes)
        axes.set_xlabel("instruction")

    return plotted("DeviceMemory.plot", ax, [panel], (10, 3.5))


def plot_memory(memory: Memory, ax: Any) -> Any:
    """`Memory.plot`: over the instructions."""

    def panel(axes: Any) -> None:
        name, size = unit_of(memory.peak_bytes, BYTES)
        usage = [held / size for held in memory.timeline_bytes]
        axes.fill_between(range(len(usage)), usage, color=colour("k-0"), step="mid")
        axes.axhline(
            memory.peak_bytes / size, color="#d64545", linestyle="--", label=f"peak {bytes_text(memory.peak_bytes)}"
        )
        axes.set(xlabel="instruction", ylabel=f"{name} of one device (exact)")
        axes.legend(fontsize=8)

    return plotted("Memory.plot", ax, [panel], (10, 3))


def _roofline(est: Estimate, axes: Any) -> None:
    seconds = {row.name: row.total_seconds for row in est.rows if row.mxu_flops}
    points = [p for p in est.roofline() if p.hbm_bytes]
    rate, peak = est.slice.hbm_bytes_per_second_per_device, est.slice.peak_flops_per_device
    ridge = peak / rate
    low = min([ridge / 8, *(p.intensity for p in points)])
    high = max([ridge * 8, *(p.intensity for p in points)])
    axes.plot([low, ridge, high], [low * rate, peak, peak], color="0.3")
    longest = max(seconds.values(), default=1.0)
    sizes = [12 + 150 * seconds.get(p.name, 0.0) / longest for p in points]
    axes.scatter([p.intensity for p in points], [p.flops_per_second for p in points], sizes, alpha=0.6)
    axes.set(xscale="log", yscale="log", xlabel="flops per byte of HBM (exact)", ylabel="flops per second (modelled)")


def _torus(est: Estimate, axes: Any) -> None:
    shape = corner(est.slice.torus_shape)
    flat = (*shape, 1, 1)[:3] if len(shape) < 3 else shape
    links = links_of(est, shape)

    def spot(at: tuple[int, ...]) -> tuple[float, float]:
        full = (*at, 0, 0)[:3] if len(at) < 3 else at
        return full[1] + full[2] * (flat[1] + 1.0), -float(full[0])

    most = max((link.load for link in links), default=0.0) or 1.0
    from matplotlib import colormaps

    heat = colormaps["YlOrRd"]
    for link in links:
        (x1, y1), (x2, y2) = spot(link.begin), spot(link.end)
        shade = heat(0.15 + 0.8 * link.load / most)
        if not link.wraps and link.axis < 2:
            axes.plot([x1, x2], [y1, y2], color=shade, linewidth=3, zorder=1)
        elif link.axis < 2:
            dx, dy = (0.0, -0.4) if link.axis == 0 else (0.4, 0.0)
            axes.plot([x1, x1 + dx], [y1, y1 + dy], ":", color=shade, linewidth=2, zorder=1)
            axes.plot([x2, x2 - dx], [y2, y2 - dy], ":", color=shade, linewidth=2, zorder=1)
    spots = [spot(at) for at in product(*map(range, shape))]
    axes.scatter([x for x, _ in spots], [y for _, y in spots], 30, color="#4e79a7", zorder=2)
    axes.set(aspect="equal", title=f"{est.slice.name}: the busiest links {most:.1%} of the step (modelled)")
    axes.axis("off")


def _stages(est: Estimate, axes: Any) -> None:
    pipelines = pipelines_of(est)
    if not pipelines:
        raise GraphError('Estimate.plot: what="stages" needs a pipeline with idle stages, and the program has none')
    _tasks(axes, pipelines[0].stages, pipelines[0].summary)
    axes.set_xlabel("seconds (modelled)")


def plot_alternatives(options: Sequence[Alternative], capacity_bytes: float, ax: Any, what: str) -> Any:
    """`plot` of a search: step time against memory, with the Pareto front."""

    def panel(axes: Any) -> None:
        most = max((a.needed_bytes for a in options), default=0.0)
        time, second = unit_of(max((a.step_seconds for a in options), default=0.0), SECONDS)
        name, byte = unit_of(most, BYTES)

        def places(some: Sequence[Alternative]) -> tuple[list[float], list[float]]:
            return [a.step_seconds / second for a in some], [a.needed_bytes / byte for a in some]

        for fits, colour, label in ((True, "#4e79a7", "fits"), (False, "#d64545", "does not fit")):
            if some := [a for a in options if a.fits == fits]:
                axes.scatter(*places(some), 20, color=colour, label=label)
        axes.step(*places(pareto_front(options)), where="post", color="#3f9a4b", label="Pareto front")
        chosen = places([a for a in options if a.chosen])
        axes.scatter(*chosen, 90, facecolors="none", edgecolors="black", label="chosen")
        if most * FAR >= capacity_bytes:
            axes.axhline(capacity_bytes / byte, color="#d64545", linestyle="--", label="capacity")
        axes.set(xlabel=f"{time} of a step (modelled)", ylabel=f"{name} that the compiled step needs (modelled)")
        axes.legend(fontsize=7)

    return plotted(what, ax, [panel], (6, 4))


def plot_tasks(runs: Sequence[Sequence[tuple[Any, float, float]]], title: str, ax: Any, what: str) -> Any:
    """Tasks of each stage over time, as (start, end) bars; gaps are idle."""
    return plotted(what, ax, [lambda axes: _tasks(axes, runs, title)], (12, 0.6 + 0.35 * len(runs)))


def _tasks(axes: Any, runs: Sequence[Sequence[tuple[Any, float, float]]], title: str) -> None:
    labelled: set[str] = set()
    for stage, row in enumerate(runs):
        for task, start, end in row:
            label = None if task.kind in labelled else task.kind
            labelled.add(task.kind)
            face = colour(TASK_CLASSES[task.kind])
            axes.broken_barh([(start, end - start)], (stage, 0.9), facecolors=face, edgecolors="white", label=label)
            axes.text(
                (start + end) / 2, stage + 0.45, task.microbatch, ha="center", va="center", color="white", fontsize=7
            )
    axes.set_yticks([n + 0.45 for n in range(len(runs))], [f"stage {n}" for n in range(len(runs))])
    axes.set(ylim=(len(runs), 0), xlim=(0, max(row[-1][2] for row in runs)), xlabel="time")
    axes.set_title(title, loc="left", fontsize=9)
    axes.legend(fontsize=7, frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))


def plot_sharding(sharding: Sharding, ax: Any, device: int, what: str) -> Any:
    """The blocks of a tensor, with that of `device` filled; split dims beyond two become panels side by side."""
    plan = grid_of(sharding)
    own = sharding.block_index(sharding.mesh.coordinate(device))

    def panel(axes: Any) -> None:
        from matplotlib.patches import Rectangle

        rows = 1 if plan.down is None else plan.shown[plan.down]
        columns = 1 if plan.across is None else plan.shown[plan.across]
        for n, index in enumerate(product(*(range(plan.shown[d]) for d in plan.panels))):
            left = n * (columns + 1)
            here = all(own[d] == k for d, k in zip(plan.panels, index, strict=True))
            for row, column in product(range(rows), range(columns)):
                sides = ((plan.down, row), (plan.across, column))
                mine = here and all(d is None or own[d] == k for d, k in sides)
                face = "#4e79a7" if mine else "0.95"
                axes.add_patch(Rectangle((left + column, row), 1, 1, facecolor=face, edgecolor="0.5"))
            if index:
                label = ", ".join(
                    f"{sharding.shape.dims[d].name} {k + 1}" for d, k in zip(plan.panels, index, strict=True)
                )
                axes.text(left + columns / 2, -0.1, label, ha="center", va="bottom", fontsize=7)
        count = math.prod(plan.shown[d] for d in plan.panels)
        axes.set(xlim=(-0.2, count * (columns + 1) - 0.8), ylim=(rows + 0.1, -0.6), xticks=[], yticks=[])
        axes.set_xlabel(_side(sharding, plan.across))
        axes.set_ylabel(_side(sharding, plan.down))
        axes.set_title(fill(f"{sharding} on {sharding.mesh}, device {device}", 72), fontsize=8)

    return plotted(what, ax, [panel], (6, 4))


def _side(sharding: Sharding, d: int | None) -> str:
    if d is None:
        return ""
    dim, axes = sharding.shape.dims[d], "+".join(sharding.axes[d])
    return f"{dim.name}:{dim.size}" + (f"@{axes}" if axes else "")
