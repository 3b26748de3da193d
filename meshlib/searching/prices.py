"""The least that a collective can take, wherever the mesh lies on the slice."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from hardware.errors import HardwareError
from hardware.network import collective_cost
from hardware.placement import Placement, placements
from hardware.slices import Slice

GATHER, SCATTER, REDUCE, SWAP = "all_gather", "reduce_scatter", "all_reduce", "all_to_all"


@lru_cache(maxsize=4096)
def _placed(slice_: Slice, sizes: tuple[int, ...], axes: tuple[int, ...]) -> tuple[Placement, ...]:
    """Placements of a mesh of these sizes, one of each way in which some of its axes can lie."""
    mesh = {f"a{n}": size for n, size in enumerate(sizes)}
    chosen = [f"a{n}" for n in axes]
    return tuple({p.of(chosen): p for p in placements(slice_, mesh)}.values())


@lru_cache(maxsize=1 << 17)
def _seconds(slice_: Slice, sizes: tuple[int, ...], axes: tuple[int, ...], kind: str, size: float) -> float:
    names = [f"a{n}" for n in axes]
    found = _placed(slice_, sizes, axes)
    return min((collective_cost(p, kind, names, size).seconds for p in found), default=0.0)


def least_seconds(slice_: Slice, sizes: Sequence[int], axes: Sequence[int], kind: str, size_bytes: float) -> float:
    """Of one collective on some axes of a mesh, its launch included.

    Args:
      sizes: of all axes of the mesh; axes: the numbers of those that take part.
      kind: "all_to_all" stands for whatever turns a value split along one dim into one split along another.
      size_bytes: of the value on a device, as if these axes did not split it.
    """
    mesh, where, group = _ordered(sizes, axes)
    ways = [(kind, size_bytes)]
    if kind == SWAP:
        block = size_bytes / group
        ways = [(SWAP, block), ("collective_permute", block), (GATHER, size_bytes)]
    try:
        least = min(_seconds(slice_, mesh, where, *way) for way in ways)
    except HardwareError:  # no links: refused when it is looked at
        return 0.0
    return least + slice_.chip.collective_launch_seconds


SIZES = tuple(2.0**n for n in range(10, 39, 4))  # bytes, over which the best way to send changes


@lru_cache(maxsize=4096)
def _wire(slice_: Slice, sizes: tuple[int, ...], axes: tuple[int, ...], kind: str) -> float:
    least = float("inf")
    for p in _placed(slice_, sizes, axes):
        for size in SIZES:
            cost = collective_cost(p, kind, [f"a{n}" for n in axes], size)
            least = min(least, max((busy for _, busy in cost.busy_seconds), default=0.0) / size)
    return 0.0 if least == float("inf") else least


def wire_seconds(slice_: Slice, sizes: Sequence[int], axes: Sequence[int], kind: str) -> float:
    """Per byte of a value, for how long a collective keeps its busiest links busy, at least.

    Args as of `least_seconds`.
    """
    mesh, where, group = _ordered(sizes, axes)
    try:
        if kind != SWAP:
            return _wire(slice_, mesh, where, kind)
        return min(_wire(slice_, mesh, where, way) for way in (SWAP, "collective_permute")) / group
    except HardwareError:  # no links: refused when it is looked at
        return 0.0


def _ordered(sizes: Sequence[int], axes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """The mesh in order of size, since another name costs the same; the axes there; how many devices they join."""
    order = sorted(range(len(sizes)), key=lambda n: (sizes[n], n))
    return tuple(sizes[n] for n in order), tuple(sorted(map(order.index, axes))), prod(sizes[n] for n in axes)
