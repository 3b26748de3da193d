"""The least that a collective can take, wherever the mesh lies on the slice."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

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
    order = sorted(range(len(sizes)), key=lambda n: (sizes[n], n))  # the same mesh by another name costs the same
    mesh = tuple(sizes[n] for n in order)
    where = tuple(sorted(order.index(n) for n in axes))
    group = 1
    for n in axes:
        group *= sizes[n]
    ways = [(kind, size_bytes)]
    if kind == SWAP:
        block = size_bytes / group
        ways = [(SWAP, block), ("collective_permute", block), (GATHER, size_bytes)]
    try:
        least = min(_seconds(slice_, mesh, where, *way) for way in ways)
    except HardwareError:  # no links: refused when it is looked at
        return 0.0
    return least + slice_.chip.collective_launch_seconds
