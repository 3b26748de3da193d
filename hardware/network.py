"""Time of collectives over mesh axes as they lie on a slice, and the best placement.

A collective over one or more mesh axes is staged by the speed of its levels: first the devices of a chip,
then the torus, then DCN between slices (all_gather the other way round). On the torus it runs either along
all its axes with rotated parts, or one part after the other, or round one snake through all its nodes;
the fastest is taken and named.

Shares: in one program all groups run the same collective at the same time, so a factor of stride s has
1/s of its links, and the devices of one chip divide the chip's links and NIC among them.

Assumed: two devices of a chip exchange data through HBM, at half its bandwidth each way.

Sources: `hardware.collectives`; Kumar et al., arXiv:2011.03641 (hierarchical summation on multipods).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hardware import collectives
from hardware.checks import amount
from hardware.errors import HardwareError
from hardware.events import Links
from hardware.placement import CORES, DCN, Factor, Placement, placements
from hardware.slices import Slice
from hardware.snakes import snakes

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute", "broadcast")


@dataclass(frozen=True)
class Demand:
    """A collective of a program: what, over which mesh axes, how many bytes on one device, how often.

    `payload_bytes` is the operand; of an all_gather the result (the larger side).
    """

    kind: str
    axes: tuple[str, ...]
    payload_bytes: float
    count: float = 1.0


@dataclass(frozen=True)
class Cost:
    """Modelled time of one collective.

    Attributes:
      seconds: from start to end, alone on the network.
      busy_seconds: place (torus axis, CORES, DCN) -> time for which the busiest link there is occupied.
      hops: longest chain of links that a byte travels in sequence.
      algorithm: how the torus part runs: "rotated", "in turn", "snake ring", "snake line" or "-".
    """

    seconds: float
    busy_seconds: tuple[tuple[int, float], ...]
    hops: int
    algorithm: str


def collective_cost(
    placement: Placement, kind: str, axes: Sequence[str], payload_bytes: float, links: Links | None = None
) -> Cost:
    """Time of a collective over mesh axes.

    Args:
      placement: where the mesh lies.
      kind: one of KINDS.
      axes: the mesh axes of the group.
      payload_bytes: operand on one device; for an all_gather the result.
      links: rates of an ICI link (default: the chip's, at the share that is reached).
    Returns: Cost; zero for a group of one.
    Raises: HardwareError for an unknown kind or axis, or a negative size.
    Example:
      >>> placement, _ = best_placement(Slice("v5e-16"), {"x": 4, "y": 4})
      >>> cost = collective_cost(placement, "all_gather", ["y"], 2048 * 8192 * 2)
      >>> f"{cost.seconds * 1e6:.0f} us"  # a line of 4: no wrap
      '563 us'

    Source: module docstring.
    """
    amount("payload_bytes", payload_bytes)
    if kind not in KINDS:
        raise HardwareError(f"unknown collective {kind!r}; use one of {', '.join(KINDS)}")
    chip = placement.slice.chip
    links = links or ici_links(placement.slice)
    factors = placement.of(axes)
    share = chip.devices_per_chip
    levels = _Levels(
        cores=math.prod(f.size for f in factors if f.place == CORES),
        torus=tuple(f for f in factors if f.place >= 0),
        slices=math.prod(f.size for f in factors if f.place == DCN),
    )
    if kind in ("collective_permute", "broadcast"):
        return _point_cost(placement, kind, levels, payload_bytes, links)
    times = 2 if kind == "all_reduce" else 1
    form = "all_to_all" if kind == "all_to_all" else "reduce_scatter"
    busy, seconds, hops, algorithm, size = {}, 0.0, 0, "-", payload_bytes
    if levels.cores > 1:
        wire = times * _share_sent(levels.cores) * size / (chip.hbm_bytes_per_second / 2 / share)
        busy[CORES], seconds = wire, wire
        size = size if form == "all_to_all" else size / levels.cores
    if levels.torus:
        way = _torus_way(placement, form, levels.torus, size, links)
        seconds, hops, algorithm = seconds + times * way.seconds, times * way.hops, way.name
        busy |= {place: times * wire for place, wire in way.busy.items()}
        size = size if form == "all_to_all" else size / math.prod(f.size for f in levels.torus)
    if levels.slices > 1:
        wire = times * _share_sent(levels.slices) * size / (chip.dcn_bytes_per_second / share)
        busy[DCN] = wire
        seconds += wire + times * chip.dcn_hop_seconds * math.ceil(math.log2(levels.slices))
    return Cost(seconds, tuple(sorted(busy.items())), hops, algorithm)


def together_seconds(costs: Sequence[Cost]) -> float:
    """Several collectives at once: links are shared, so a place is busy for the sum of their times there.

    Example:
      >>> placement, _ = best_placement(Slice("v5e-256"), {"x": 16, "y": 16})
      >>> x, y = (collective_cost(placement, "all_gather", [axis], 1e9) for axis in "xy")
      >>> [round(together_seconds(pair) / x.seconds, 1) for pair in ([x, y], [x, x])]
      [1.0, 2.0]
    """
    busy: dict[int, float] = {}
    for cost in costs:
        for place, seconds in cost.busy_seconds:
            busy[place] = busy.get(place, 0.0) + seconds
    return max([*busy.values(), *(cost.seconds for cost in costs)], default=0.0)


def best_placement(
    slice_: Slice, mesh: Mapping[str, int], demands: Sequence[Demand] = ()
) -> tuple[Placement, float]:
    """The placement on which the demands take the least time in all.

    Args:
      mesh: axis name -> size; the product is the number of devices.
      demands: collectives of the program (default: an all_reduce of 1 MiB over every axis).
    Returns: (placement, seconds of all demands one after the other); of equals the first found.
    Raises: HardwareError as `placements`, and for demands on unknown axes.
    Example:
      >>> placement, _ = best_placement(Slice("v5e-8x16"), {"data": 8, "model": 16})
      >>> print(placement)
      mesh data:8;model:16 on v5e-8x16: 128 chips (8x16, axis 1 wraps), 128 cores, 128 devices, 16 hosts
        data: 8 on torus axis 0 (line, hops 1, link load 1)
        model: 16 on torus axis 1 (ring, hops 1, link load 1)

    Source: exhaustive over `hardware.placement.placements`.
    """
    wanted = list(demands) or [Demand("all_reduce", (name,), 2.0**20) for name in mesh]
    best: tuple[Placement, float] | None = None
    for placement in placements(slice_, mesh):
        seconds = sum(
            d.count * collective_cost(placement, d.kind, d.axes, d.payload_bytes).seconds for d in wanted
        )
        if best is None or seconds < best[1] * (1 - 1e-12):
            best = placement, seconds
    if best is None:
        raise HardwareError(f"mesh {dict(mesh)} cannot be laid over {slice_}: no way to cut its axes fits")
    return best


def ici_links(slice_: Slice) -> Links:
    """Rates of the links of a slice, at the share of the nominal rate that is reached.

    Raises: HardwareError for a chip without links.
    Example:
      >>> ici_links(Slice("v5e-16"))
      Links(bytes_per_second=45000000000.0, hop_seconds=1e-06)
    """
    chip = slice_.chip
    if not chip.ici_links:
        raise HardwareError(f"chip {chip.name!r} has no links between chips")
    return Links(chip.ici_bytes_per_second * chip.ici_efficiency, chip.ici_hop_seconds)


@dataclass(frozen=True)
class _Levels:
    cores: int
    torus: tuple[Factor, ...]
    slices: int


def _share_sent(n: int) -> float:
    return (n - 1) / n


@dataclass(frozen=True)
class _Way:
    """One way through the torus: time, name, hops in sequence, time for which each place's links are busy."""

    seconds: float
    name: str
    hops: int
    busy: dict[int, float]


def _torus_way(placement: Placement, form: str, factors: Sequence[Factor], size: float, links: Links) -> _Way:
    """The fastest way on the torus."""
    share = placement.slice.chip.devices_per_chip
    axes = [(f.size, placement.wraps(f)) for f in factors]
    thin = [_thinned(links, f, share) for f in factors]
    deep = sum(f.stride * _steps(*axis) for f, axis in zip(factors, axes, strict=True))
    if form == "all_to_all":
        busy: dict[int, float] = {}
        free = [Links(link.bytes_per_second, 0.0) for link in thin]
        for f, axis, link in zip(factors, axes, free, strict=True):
            busy[f.place] = busy.get(f.place, 0.0) + collectives.all_to_all_seconds(size, [axis], link)
        times = (
            collectives.all_to_all_seconds(size, [axis], link) for axis, link in zip(axes, thin, strict=True)
        )
        return _Way(sum(times), "in turn", deep, busy)
    count = range(len(factors))
    orders = list(itertools.permutations(count))
    ways = [_staged("in turn", [order], factors, axes, thin, size, deep) for order in orders]
    if len({f.place for f in factors}) == len(factors) > 1:  # two factors on one axis would meet there
        rotations = [tuple((part + j) % len(factors) for j in count) for part in count]
        ways.append(_staged("rotated", rotations, factors, axes, thin, size, deep))
    if len(factors) > 1 and all(f.stride == 1 for f in factors):
        whole = (math.prod(n for n, _ in axes), snakes(tuple(axes)) is not None)
        name = "snake ring" if whole[1] else "snake line"
        wire = collectives.ring_stage_seconds(size / whole[0], whole, Links(thin[0].bytes_per_second, 0.0))
        seconds = collectives.ring_stage_seconds(size / whole[0], whole, thin[0])
        ways.append(_Way(seconds, name, _steps(*whole), {f.place: wire for f in factors}))
    return min(ways, key=lambda way: way.seconds)


def _staged(
    name: str,
    orders: Sequence[Sequence[int]],
    factors: Sequence[Factor],
    axes: Sequence[tuple[int, bool]],
    thin: Sequence[Links],
    size: float,
    hops: int,
) -> _Way:
    """A reduce_scatter in stages: each part takes the axes in its own order; stages end together."""
    own = [size / len(orders)] * len(orders)
    seconds, busy = 0.0, {f.place: 0.0 for f in factors}
    for stage in range(len(axes)):
        slowest = 0.0
        for part, order in enumerate(orders):
            axis = order[stage]
            own[part] /= axes[axis][0]
            slowest = max(slowest, collectives.ring_stage_seconds(own[part], axes[axis], thin[axis]))
            wire = Links(thin[axis].bytes_per_second, 0.0)
            busy[factors[axis].place] += collectives.ring_stage_seconds(own[part], axes[axis], wire)
        seconds += slowest
    return _Way(seconds, name, hops, busy)


def _thinned(links: Links, factor: Factor, share: int) -> Links:
    """A link as one of the groups of a factor sees it."""
    return Links(links.bytes_per_second / (factor.stride * share), links.hop_seconds * factor.stride)


def _steps(n: int, wrap: bool) -> int:
    return n // 2 if wrap else n - 1


def _point_cost(placement: Placement, kind: str, levels: _Levels, size: float, links: Links) -> Cost:
    """A shift by one position (cyclic), or one device's data to all."""
    chip = placement.slice.chip
    share = chip.devices_per_chip
    busy, seconds, hops = {}, 0.0, 0
    if levels.cores > 1:
        busy[CORES] = seconds = size / (chip.hbm_bytes_per_second / 2 / share)
    for f in levels.torus:
        thin = _thinned(links, f, share)
        wrap = placement.wraps(f)
        # a cyclic shift on a line comes back over all of it, the other way
        steps = _steps(f.size, wrap) if kind == "broadcast" else (1 if wrap else f.size - 1)
        chunks = 16 if steps > 1 else 1
        busy[f.place] = size / thin.bytes_per_second
        time = collectives.permute_seconds(size, steps, thin, chunks)
        seconds = seconds + time if kind == "broadcast" else max(seconds, time)
        hops += steps * f.stride
    if levels.slices > 1:
        busy[DCN] = size / (chip.dcn_bytes_per_second / share)
        time = busy[DCN] + chip.dcn_hop_seconds
        seconds = seconds + time if kind == "broadcast" else max(seconds, time)
    return Cost(seconds, tuple(sorted(busy.items())), hops, "-")
