"""Collectives of a program as demands on the network, and their prices under the placements of its mesh on the slice.

A collective reshard is one demand, merged ones are one demand with the sum of their bytes; an exchange within an
instruction (a halo, a summary) is a demand before its computation. Placements are priced for all demands of the program
together, loops counted as often as they run.

Source: `hardware.network` prices demands on placements.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple, TypeAlias

from hardware.checks import HardwareError
from hardware.chips import Chip
from hardware.collective_kinds import COLLECTIVE_KINDS
from hardware.network import Cost, Demand, collective_cost, priced_factorings
from hardware.placement import DCN, Placement, placements
from hardware.slices import Slice
from layouts import Mesh
from layouts.step_kinds import STEP_KINDS
from meshlib.program.instructions import Instruction, Transfer
from meshlib.program.records import Program, walk

ROUNDING = 1 + 1e-12
# Three or more mesh axes have thousands of placements on a large torus. Each cut of a torus axis makes groups share
# links, so above this number only placements with at most one cut more than necessary are priced.
MANY_PLACEMENTS = 100

ALL_REDUCE = COLLECTIVE_KINDS["all_reduce"]


@dataclass(frozen=True, slots=True)
class Communication:
    """One run of one collective of a program, as seen by the network.

    Attributes:
      kind, axes: the collective and its mesh axes; group: devices that take part.
      payload_bytes: operand on one device; sent_bytes: bytes sent by a device on a ring (busiest sender). Exact.
      larger_bytes: the larger of operand and result, by which the network is priced.
      tensor, tensors, reason: the first tensor sent, how many are sent together, and the cause.
    """

    kind: str
    axes: tuple[str, ...]
    group: int
    payload_bytes: int
    sent_bytes: float
    larger_bytes: int
    tensor: str
    reason: str
    tensors: int = 1

    @property
    def name(self) -> str:
        """The first tensor sent, and how many others."""
        return self.tensor if self.tensors == 1 else f"{self.tensor} and {self.tensors - 1} more"


KindOverAxes: TypeAlias = tuple[str, tuple[str, ...]]  # the kind of a collective, and its mesh axes
# Instruction -> the collectives that a compiler sends for it.
CompiledCollectives = Mapping[Instruction, tuple[Communication, ...]]


def moves_of(program: Program, instruction: Instruction) -> tuple[Communication, ...]:
    """The collectives that an instruction starts, in order; () for a computation without exchanges."""
    mesh, transfers = program.mesh, instruction.transfers
    if not transfers:
        return ()
    if not instruction.is_collective:
        return tuple(_move(mesh, (t,), instruction.operation.name) for t in transfers)
    return (_move(mesh, transfers, instruction.inputs[0].tensor.name),)


def _move(mesh: Mesh, transfers: Sequence[Transfer], tensor: str) -> Communication:
    """The collective of one launch."""
    first = transfers[0].sent
    group = mesh.group_size(first.axes)
    payload = sum(t.sent.payload_bytes for t in transfers)
    larger = STEP_KINDS[first.kind].larger_bytes(payload, group)
    sent = sum(t.sent.sent_bytes for t in transfers)
    reason = transfers[0].reason.why
    return Communication(first.kind, first.axes, group, payload, sent, larger, tensor, reason, len(transfers))


def all_moves(program: Program) -> Iterator[tuple[Communication, int]]:
    """Every collective of a program and its loops, with its runs per step."""
    for i, holder, times in walk(program):
        for move in moves_of(holder, i):
            yield move, times


def launch_seconds(cost: Cost, chip: Chip) -> float:
    """Seconds to start a collective, besides wire and hops; 0 for a group of one device."""
    return chip.collective_launch_seconds if cost.seconds else 0.0


class Network:
    """A mesh on a slice, and the price of collectives there."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self._prices: dict[tuple[str, tuple[str, ...], int], Cost] = {}

    def as_sum(self, move: Communication) -> Communication:
        """An all_gather or reduce_scatter over a whole torus of three axes that wrap as an all_reduce, any other
        collective as it is; see `Compiler.torus_sums`."""
        slice_ = self.placement.slice
        half = {*COLLECTIVE_KINDS[move.kind].phases} < {*ALL_REDUCE.phases}
        if not half or len(slice_.wrap) < 3 or not all(slice_.wrap):
            return move
        factors = self.placement.of(move.axes)
        chips = prod(f.size for f in factors if f.place >= 0)
        whole = chips == prod(slice_.torus_shape) and all(f.place != DCN for f in factors)
        return replace(move, kind=ALL_REDUCE.name) if whole else move

    def cost(self, move: Communication) -> Cost:
        """Modelled time of a collective alone on the network."""
        key = (move.kind, move.axes, move.larger_bytes)
        price = self._prices.get(key)
        if price is None:
            price = self._prices[key] = collective_cost(self.placement, *key)
        return price


class PricedPlacements(NamedTuple):
    """Placements of a mesh, and the time of a program's collectives under each.

    `collectives`: kinds and mesh axes; `prices`: of each placement, the seconds of all runs of each collective.
    """

    collectives: tuple[KindOverAxes, ...]
    placements: tuple[Placement, ...]
    prices: tuple[tuple[float, ...], ...]

    @property
    def cheapest(self) -> int:
        """Number of the placement with the least time of all collectives in sequence; of equals the first."""
        totals = [sum(prices) for prices in self.prices]
        least = min(totals) * ROUNDING
        return next(n for n, total in enumerate(totals) if total <= least)

    def cheaper_for_some(self, number: int) -> set[int]:
        """Numbers of the placements under which some collective takes less time than under this one."""
        here = self.prices[number]
        return {n for n, prices in enumerate(self.prices) if any(map(operator.lt, prices, here))}

    def least_change(self, exposed_seconds: Mapping[KindOverAxes, float], before: int, after: int) -> float:
        """Predicted change of a step in seconds, at the best.

        Of a collective that takes less time, what it saves is saved from what is exposed. Of one that takes more, the
        same share is exposed; if it is little more, half of that, for which there may be other work to hide behind.
        """
        change = 0.0
        for collective, paid, price in zip(self.collectives, self.prices[before], self.prices[after], strict=False):
            seconds = exposed_seconds.get(collective, 0.0)
            if price > paid:
                change += seconds * (price / paid - 1) * (1 - paid / price / 2)
            else:
                change += max(price - paid, -seconds)
        return change


def priced_placements(
    slice_: Slice, program: Program, whole_axes: bool = False, across: Sequence[tuple[str, int]] = ()
) -> PricedPlacements:
    """The placements of a program's mesh on a slice, priced for its own collectives.

    `whole_axes`: within slices, restrict to placements of each mesh axis on whole torus axes, if there are any: the
    default of `jax.experimental.mesh_utils.create_device_mesh`. `across`: the factor of each mesh axis that spans
    slices (`create_hybrid_device_mesh`); by default any.
    """
    totals: dict[KindOverAxes, tuple[int, int]] = {}
    for move, times in all_moves(program):
        count, size = totals.get((move.kind, move.axes), (0, 0))
        totals[move.kind, move.axes] = count + times, size + times * move.larger_bytes
    demands = tuple(Demand(kind, axes, size / n, n) for (kind, axes), (n, size) in totals.items())
    mesh = tuple((axis, program.mesh.axis_size(axis)) for axis in program.mesh.axes)
    return priced_for(slice_, mesh, demands, whole_axes, tuple(across))


@lru_cache(maxsize=256)
def priced_for(
    slice_: Slice, mesh: tuple[tuple[str, int], ...], demands: tuple[Demand, ...], whole_axes: bool,
    across: tuple[tuple[str, int], ...] = (),
) -> PricedPlacements:  # fmt: skip
    """The placements of a mesh, priced for these demands; cached because layers and sweeps repeat them."""
    sizes = dict(mesh)
    placements = possible_placements(slice_, sizes, whole_axes, dict(across))
    prices = tuple(seconds for _, seconds in priced_factorings(slice_, sizes, demands, placements))
    return PricedPlacements(tuple((d.kind, d.axes) for d in demands), tuple(placements), prices)


def possible_placements(
    slice_: Slice, sizes: Mapping[str, int], whole_axes: bool, across: Mapping[str, int]
) -> list[Placement]:
    """The placements of which `placed` takes the best: all if there are few, otherwise those that cut the torus least.

    Arguments as of `placed`; `sizes`: those of the mesh axes.
    """
    all_placements = list(placements(slice_, sizes))
    if across:
        all_placements = [p for p in all_placements if _over_dcn(p) == across]
        if not all_placements:
            raise HardwareError(
                f"no placement of mesh {dict(sizes)} on {slice_.name} joins its slices as {dict(across)}"
            )
    if whole_axes:  # for each division over DCN: whole torus axes never justify another division
        shape = slice_.torus_shape
        uncut = [p for p in all_placements if all(f.place < 0 or f.size == shape[f.place] for f in p.all_factors())]
        divisions = {tuple(_over_dcn(p).items()) for p in uncut}
        all_placements = uncut + [p for p in all_placements if tuple(_over_dcn(p).items()) not in divisions]
    if len(all_placements) <= MANY_PLACEMENTS:
        return all_placements
    pieces = [sum(1 for _ in p.all_factors()) for p in all_placements]
    least = min(pieces)
    return [p for p, count in zip(all_placements, pieces, strict=True) if count <= least + 1]


def _over_dcn(placement: Placement) -> dict[str, int]:
    """For each mesh axis, its part over DCN."""
    return {axis: f.size for axis, factors in placement.factors for f in factors if f.place == DCN}
