"""Time of collectives over mesh axes under a placement on a slice, and the placement with the least time.

A collective over one or more mesh axes is staged by the speed of its levels: first the devices of a chip, then the
torus, then DCN between slices (all_gather the other way round). On the torus it runs along all axes with rotated parts,
or axis by axis, or on one snake through all nodes, or for an all_to_all, block by block on direct paths; the fastest is
chosen and named. Axes that differ get unequal parts. On a twisted torus a group may also have rings across its axes
(`hardware.twisted`). Over several slices the data is cut in chunks, so that ICI works on one while DCN works on
another (`hardware.chunks`).

Shares: in one program all groups run the same collective at the same time, so a factor of stride s has
1/s of its links, and the devices of one chip divide the chip's links and NIC among them. Assumed: two devices of a chip
exchange data through HBM, at half its bandwidth each way.

Sources: `hardware.collectives`; Kumar et al., arXiv:2011.03641 (hierarchical summation on multipods).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from hardware import collectives
from hardware.checks import HardwareError, amount, names, one_of
from hardware.chips import Chip
from hardware.chunks import best_chunks, dcn_rate, dcn_seconds, dcn_wire_seconds
from hardware.collective_kinds import COLLECTIVE_KINDS, Phase
from hardware.collectives import StagedTime
from hardware.events import Links, check_links
from hardware.placement import CORES, DCN, Factors, Placement, PlacementFactor, check_mesh, factorings, join, wraps
from hardware.slices import Slice, as_slice
from hardware.snakes import closes
from hardware.twisted_groups import TwistedRings, twisted_exchanges, twisted_rings, twisted_ways

KINDS = tuple(COLLECTIVE_KINDS)


@dataclass(frozen=True)
class Demand:
    """One collective of a program: its kind, mesh axes, bytes on one device, and count.

    `payload_bytes` is the operand; of an all_gather the result (the larger side).

    Raises: HardwareError for an unknown kind, axes that are not names, or an amount that is negative or not finite.
    Example:
      >>> from hardware import Demand, Slice, best_placement
      >>> demands = [Demand("all_reduce", ("data",), 2.0**30), Demand("all_gather", ("model",), 2.0**20, count=80)]
      >>> _, seconds = best_placement(Slice("v5e-16"), {"data": 4, "model": 4}, demands)
      >>> f"{seconds * 1e3:.1f} ms"
      '19.6 ms'
    """

    kind: str
    axes: tuple[str, ...]
    payload_bytes: float
    count: float = 1.0

    def __post_init__(self) -> None:
        one_of("collective", self.kind, KINDS)
        object.__setattr__(self, "axes", names("Demand axes", self.axes))
        amount("Demand payload_bytes", self.payload_bytes)
        amount("Demand count", self.count)


@dataclass(frozen=True)
class Cost:
    """Modelled time of one collective.

    Attributes:
      seconds: from start to end, alone on the network.
      busy_seconds: place (torus axis, CORES, DCN) -> time for which the busiest link there is occupied.
      hops: longest chain of links that a byte travels in sequence.
      algorithm: how the torus part runs: "rotated", "in turn", "routed", "twisted", "twisted, routed", "snake ring",
        "snake line" or "-".
      chunks: number of chunks that cross ICI and DCN at the same time; 1 within a slice.
    Example:
      >>> from hardware import Slice, best_placement, collective_cost
      >>> placement, _ = best_placement(Slice("v5e-16"), {"x": 4, "y": 4})
      >>> cost = collective_cost(placement, "all_reduce", ["x"], 2.0**20)
      >>> cost.algorithm, cost.hops, f"{cost.seconds * 1e6:.1f} us"
      ('rotated', 4, '21.5 us')
    """

    seconds: float
    busy_seconds: tuple[tuple[int, float], ...]
    hops: int
    algorithm: str
    chunks: int = 1

    @cached_property
    def on_wire(self) -> Cost:
        """The part that loads links, without the latency of its hops."""
        return replace(self, seconds=max((busy for _, busy in self.busy_seconds), default=0.0))


def collective_cost(
    placement: Placement, kind: str, axes: Sequence[str], payload_bytes: float, links: Links | None = None
) -> Cost:
    """Modelled time of a collective over mesh axes.

    Args:
      placement: position of the mesh on the slice.
      kind: one of KINDS.
      axes: the mesh axes of the group.
      payload_bytes: bytes of the operand on one device; of the result for an all_gather.
      links: rates of an ICI link (default: the chip's, at the share that is reached).
    Returns: Cost; zero for a group of one.
    Raises: HardwareError for an unknown kind or axis, or a negative size.
    Example:
      >>> from hardware import Slice, best_placement, collective_cost
      >>> placement, _ = best_placement(Slice("v5e-16"), {"x": 4, "y": 4})
      >>> cost = collective_cost(placement, "all_gather", ["y"], 2048 * 8192 * 2)
      >>> f"{cost.seconds * 1e6:.0f} us"  # a line of 4: no wrap
      '563 us'

    Source: module docstring.
    """
    amount("payload_bytes", payload_bytes)
    one_of("collective", kind, KINDS)
    if not isinstance(placement, Placement):
        raise HardwareError(f"a collective is priced on a Placement, such as best_placement finds, not {placement!r}")
    return _price(placement.slice, placement.of(axes), kind, payload_bytes, links)


def _price(
    slice_: Slice, factors: tuple[PlacementFactor, ...], kind: str, payload_bytes: float, links: Links | None
) -> Cost:
    """`collective_cost` over joined factors."""
    chip = slice_.chip
    share = chip.devices_per_chip
    if links is None:
        links = ici_links(slice_) if any(f.place >= 0 for f in factors) else Links(1.0)
    check_links(links)
    group = tuple([(f, wraps(slice_, f)) for f in factors if f.size > 1])
    route = _route(group, share, links, twisted_rings(slice_, factors) if slice_.twisted else None)
    record = COLLECTIVE_KINDS[kind]
    if not record.is_staged:
        return _point_cost(chip, record.phases[0], route, payload_bytes)
    # an all_to_all moves all of its bytes at every level, others what the level before has left
    times, whole = len(record.phases), record.moves_all
    busy, seconds, hops, algorithm, size = {}, 0.0, 0, "-", payload_bytes
    if route.cores > 1:
        seconds = (
            times
            * collectives.ring_sent_bytes("all_gather", 1.0, route.cores)
            * size
            / (chip.hbm_bytes_per_second / 2 / share)
        )
        busy[CORES] = seconds
        size = size if whole else size / route.cores
    ways = route.exchanges if whole else route.ways
    chunks, between = 1, size if whole else size / route.torus_size
    if route.torus and route.slices > 1:
        chunks, both = best_chunks(chip, kind, ways, (route.torus_size, route.slices), size)
        seconds += both
    elif route.slices > 1:
        seconds += times * dcn_seconds(chip, route.slices, size)
    if route.torus:
        fastest = min(ways, key=lambda candidate: candidate.seconds(size / chunks))
        hops, algorithm = times * fastest.hops, fastest.name
        busy |= {place: times * per_byte * size for place, per_byte in fastest.busy}
        seconds += times * fastest.seconds(size) if route.slices == 1 else 0.0
    if route.slices > 1:
        busy[DCN] = times * dcn_wire_seconds(chip, route.slices, between)
    return Cost(seconds, tuple(sorted(busy.items())), hops, algorithm, chunks)


def best_placement(
    slice_: Slice | str,
    mesh: Mapping[str, int],
    demands: Sequence[Demand] = (),
    among: Sequence[Placement] | None = None,
) -> tuple[Placement, float]:
    """The placement that minimises the total time of the demands.

    Args:
      slice_: the slice, or its name.
      mesh: axis name -> size; the product is the number of devices.
      demands: collectives of the program (default: an all_reduce of 1 MiB over every axis).
      among: placements of this mesh on this slice to choose from (default: all).
    Returns: (placement, seconds of all demands one after the other); of equals the first found.
    Raises: HardwareError as `placements`, and for demands on unknown axes.
    Example:
      >>> from hardware import Slice, best_placement
      >>> placement, _ = best_placement(Slice("v5e-8x16"), {"data": 8, "model": 16})
      >>> print(placement)
      mesh data:8;model:16 on v5e-8x16: 128 chips (8x16, axis 1 wraps), 128 cores, 128 devices, 16 hosts
        data: 8 on torus axis 0 (line, hops 1, link load 1)
        model: 16 on torus axis 1 (ring, hops 1, link load 1)

    Source: exhaustive over `among`, or `hardware.placement.placements`.
    """
    slice_ = as_slice(slice_)
    sizes = check_mesh(slice_, mesh)
    best, least = None, math.inf
    for factors, parts in priced_factorings(slice_, sizes, demands, among):
        if sum(parts) < least * (1 - 1e-12):
            best, least = factors, sum(parts)
    if best is None:
        raise HardwareError(f"mesh {sizes} cannot be laid over {slice_}: no split of its axes fits")
    return Placement(slice_, best), least


def priced_factorings(
    slice_: Slice, sizes: Mapping[str, int], demands: Sequence[Demand], among: Sequence[Placement] | None = None
) -> Iterator[tuple[Factors, tuple[float, ...]]]:
    """The factors of each placement, and the seconds of each demand, all runs. Arguments, errors: `best_placement`."""
    if not isinstance(demands, (list, tuple)) or not all(isinstance(demand, Demand) for demand in demands):
        raise HardwareError(f"demands must be a list of Demand(kind, axes, payload_bytes), not {demands!r}")
    wanted = list(demands) or [Demand("all_reduce", (name,), 2.0**20) for name in sizes]
    for demand in wanted:
        if not set(demand.axes) <= set(sizes) or len(set(demand.axes)) < len(demand.axes):
            raise HardwareError(f"axes {list(demand.axes)} are not distinct axes of the mesh {sizes}")
    prices: dict[tuple[object, ...], float] = {}  # the price of a group depends on its factors alone
    for factors in factorings(slice_, sizes) if among is None else _checked_placements(among, slice_, sizes):
        lies, parts = dict(factors), []
        for number, demand in enumerate(wanted):
            key = (number, *[lies[axis] for axis in demand.axes])
            if key not in prices:
                group = join(factor for axis in demand.axes for factor in lies[axis])
                alone = _price(slice_, group, demand.kind, demand.payload_bytes, None).seconds
                prices[key] = demand.count * alone
            parts.append(prices[key])
        yield factors, tuple(parts)


def _checked_placements(among: Sequence[Placement], slice_: Slice, sizes: Mapping[str, int]) -> list[Factors]:
    for placement in among if isinstance(among, (list, tuple)) else [among]:
        if not isinstance(placement, Placement) or placement.slice != slice_ or placement.mesh != sizes:
            raise HardwareError(f"among must hold placements of mesh {sizes} on {slice_.name}, not {placement!r:.80}")
    return [placement.factors for placement in among]


def ici_links(slice_: Slice) -> Links:
    """Rates of the links of a slice, at the share of the nominal rate that is reached.

    Raises: HardwareError for a chip without links.
    Example:
      >>> ici_links(Slice("v5e-16"))
      Links(bytes_per_second=45000000000.0, hop_seconds=1e-06)
    """
    chip = as_slice(slice_).chip
    if not chip.ici_links:
        raise HardwareError(f"chip {chip.name!r} has no links between chips")
    return Links(chip.ici_bytes_per_second * chip.ici_efficiency, chip.ici_hop_seconds)


class _Leg(NamedTuple):
    """A torus factor as a ring or line, with the share of a link that one of its groups gets."""

    factor: PlacementFactor
    ring: collectives.Axis
    link: Links


@dataclass(frozen=True)
class _Route:
    """The levels that a group of mesh axes crosses: devices of a chip, torus factors with their algorithms, slices."""

    cores: int
    torus: tuple[_Leg, ...]
    slices: int
    torus_size: int
    ways: tuple[StagedTime, ...]
    exchanges: tuple[StagedTime, ...]


@lru_cache(maxsize=8192)
def _route(
    group: tuple[tuple[PlacementFactor, bool], ...], share: int, links: Links, rings: TwistedRings | None = None
) -> _Route:
    """The route of a group, a function of its joined factors, their wraps, the rates and the twist alone."""
    torus = tuple(_Leg(f, (f.size, wrap), _thinned(links, f, share)) for f, wrap in group if f.place >= 0)
    cores, slices = (math.prod(f.size for f, _ in group if f.place == place) for place in (CORES, DCN))
    size = math.prod(leg.factor.size for leg in torus)
    ways, exchanges = _staged_times(torus), _exchanges(torus)
    if rings is not None:
        whole = Links(links.bytes_per_second / share, links.hop_seconds)
        ways += twisted_ways(rings, whole)
        exchanges += twisted_exchanges(rings, whole)
    return _Route(cores, torus, slices, size, ways, exchanges)


def _on_distinct_axes(torus: Sequence[_Leg]) -> bool:
    """True if parts of the data can take the factors in rotated orders: no two factors share a torus axis."""
    return len({leg.factor.place for leg in torus}) == len(torus) > 1


def _hops(torus: Sequence[_Leg]) -> int:
    return sum(leg.factor.stride * _steps(*leg.ring) for leg in torus)


def _staged_times(torus: Sequence[_Leg]) -> tuple[StagedTime, ...]:
    """Candidate algorithms for a reduce_scatter over torus factors."""
    if not torus:
        return ()
    count = range(len(torus))
    # Order by an exchange argument: i before j pays if t_i (1 - 1/n_j) < t_j (1 - 1/n_i), t being seconds per byte.
    weight = [_affine(leg.ring, leg.link)[1] / (leg.ring[0] - 1) for leg in torus]
    ways = [_staged("in turn", [sorted(count, key=lambda axis: weight[axis])], torus)]
    if _on_distinct_axes(torus):
        ways.append(_staged("rotated", [tuple((part + j) % len(torus) for j in count) for part in count], torus))
    if len(torus) > 1 and all(leg.factor.stride == 1 for leg in torus):
        rings = tuple(leg.ring for leg in torus)
        whole = (math.prod(n for n, _ in rings), closes(rings))
        a, b = _affine(whole, torus[0].link)
        name = "snake ring" if whole[1] else "snake line"
        per_byte = b / whole[0]
        busy = tuple((leg.factor.place, per_byte) for leg in torus)
        ways.append(StagedTime(name, _steps(*whole), (((a, per_byte),),), busy))
    return tuple(ways)


def _staged(name: str, orders: Sequence[Sequence[int]], torus: Sequence[_Leg]) -> StagedTime:
    """Stage times along the factors: each part of the data takes them in its own order; stages end together.

    Where factors differ, parts are unequal: the sizes that minimise the sum of the stages.
    """
    lines = [_affine(leg.ring, leg.link) for leg in torus]
    # Seconds per byte of the whole payload, for each part in each stage, if the part were all of it.
    whole = [[lines[order[n]][1] / math.prod(torus[i].ring[0] for i in order[: n + 1]) for order in orders]
             for n in range(len(torus))]  # fmt: skip
    shares = _shares(whole)
    stages, busy = [], {leg.factor.place: 0.0 for leg in torus}
    for n, per_byte in enumerate(whole):
        parts = []
        for share, order, seconds in zip(shares, orders, per_byte, strict=True):
            parts.append((lines[order[n]][0], share * seconds))
            busy[torus[order[n]].factor.place] += share * seconds
        stages.append(tuple(parts))
    return StagedTime(name, _hops(torus), tuple(stages), tuple(busy.items()))


def _shares(whole: Sequence[Sequence[float]]) -> list[float]:
    """Fractions of the data that take each order: equal ones, or those that balance one stage; the fastest."""
    candidates = [[1.0] * len(whole[0]), *([1 / seconds for seconds in stage] for stage in whole)]
    candidates = [[part / sum(parts) for part in parts] for parts in candidates]
    return min(
        candidates, key=lambda parts: sum(max(map(math.prod, zip(parts, stage, strict=True))) for stage in whole)
    )


def _exchanges(torus: Sequence[_Leg]) -> tuple[StagedTime, ...]:
    """Candidate algorithms for an all_to_all over torus factors."""
    per_axis, busy = [], {leg.factor.place: 0.0 for leg in torus}
    for factor, ring, link in torus:
        byte = 1 / (ring[0] * link.bytes_per_second)
        paths = [(hops * link.hop_seconds, blocks * byte) for hops, blocks in collectives.exchange_paths(ring)]
        per_axis.append(tuple(paths))
        busy[factor.place] += max([b for _, b in paths])
    ways = [StagedTime("in turn", _hops(torus), tuple(per_axis), tuple(busy.items()))]
    if len(torus) > 1:
        # Every block takes a direct path, without barriers between axes. Fitted to events (`point_plans.all_to_all`,
        # "routed"): the longest path plus half of the busiest link's time, or that link's time at 5/6 utilisation.
        longest = sum(leg.link.hop_seconds * _steps(*leg.ring) for leg in torus)
        busiest = max(busy.values())
        straight = ((float(longest), busiest / 2), (0.0, 1.2 * busiest))
        ways.append(StagedTime("routed", _hops(torus), (straight,), tuple(busy.items())))
    if _on_distinct_axes(torus):  # at any time, each axis serves a different part
        stage = tuple((a, b / len(torus)) for paths in per_axis for a, b in paths)
        ways.append(StagedTime("rotated", _hops(torus), (stage,) * len(torus), tuple(busy.items())))
    return tuple(ways)


def _affine(ring: collectives.Axis, link: Links) -> tuple[float, float]:
    """(a, b) of a + b * bytes for one stage, where bytes is what each node contributes."""
    fixed = collectives.ring_stage_seconds(0.0, ring, link)
    return fixed, collectives.ring_stage_seconds(1.0, ring, Links(link.bytes_per_second, 0.0))


def _thinned(links: Links, factor: PlacementFactor, share: int) -> Links:
    """The share of a link that one of a factor's interleaved groups gets."""
    return Links(links.bytes_per_second / (factor.stride * share), links.hop_seconds * factor.stride)


def _steps(n: int, wrap: bool) -> int:
    return n // 2 if wrap else n - 1


def _point_cost(chip: Chip, phase: Phase, route: _Route, size: float) -> Cost:
    """Cost of a cyclic shift by one position, whose levels overlap, or of a broadcast, level by level."""
    share, spreads = chip.devices_per_chip, phase is Phase.SPREAD
    busy, seconds, hops = {}, 0.0, 0
    if route.cores > 1:
        busy[CORES] = seconds = size / (chip.hbm_bytes_per_second / 2 / share)
    for f, (_, wrap), thin in route.torus:
        # on a line, the wrap of a cyclic shift travels back over the whole line
        steps = _steps(f.size, wrap) if spreads else (1 if wrap else f.size - 1)
        chunks = 16 if steps > 1 else 1
        busy[f.place] = busy.get(f.place, 0.0) + size / thin.bytes_per_second
        time = collectives.permute_seconds(size, steps, thin, chunks)
        seconds = seconds + time if spreads else max(seconds, time, busy[f.place])
        hops += steps * f.stride
    if route.slices > 1:
        busy[DCN] = size / dcn_rate(chip)
        time = busy[DCN] + chip.dcn_hop_seconds
        seconds = seconds + time if spreads else max(seconds, time)
    return Cost(seconds, tuple(sorted(busy.items())), hops, "-")
