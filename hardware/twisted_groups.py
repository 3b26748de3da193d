"""Groups of mesh axes whose rings cross several axes of a twisted torus.

On a twisted slice a short axis alone is a line: the links at its ends lead k positions further along the long axes. A
group has rings of its own where walks along its short axes stay in it:

    all of some short axes and all of every long axis             rings of 2k, then the others of 2k or k
    k x k x 2k: all of some short axes, and of the long axis      rings of 2k, then of k
    the two positions that are k apart

Source: `hardware.twisted`; the rings of the second kind are walks along one axis until they come back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from hardware import collectives
from hardware.collectives import StagedTime
from hardware.events import Links
from hardware.placement import PlacementFactor
from hardware.slices import Slice
from hardware.twisted import TwistedTorus, ring_lengths, total_distance

ROUTED = 1.07  # all_to_all of large blocks on 4x4x8, relative to the busiest link: simulated by events, block by block


@dataclass(frozen=True)
class TwistedRings:
    """Rings of a group across axes of a twisted torus.

    Attributes:
      places: torus axes along which the data moves, one part of it along each.
      lengths: ring length of each stage of an all_gather.
      shape: shape of the twisted torus that the group forms, or () where it has only the rings of short axes.
    """

    places: tuple[int, ...]
    lengths: tuple[int, ...]
    shape: tuple[int, ...]


def twisted_rings(slice_: Slice, factors: Sequence[PlacementFactor]) -> TwistedRings | None:
    """The rings of a group with these joined factors on a twisted slice; None where it has plain rings and lines only.

    Example:
      >>> factors = [PlacementFactor(0, 4, 1), PlacementFactor(2, 8, 1)]
      >>> twisted_rings(Slice("v4-4x4x8_twisted"), factors)
      TwistedRings(places=(0, 2), lengths=(8, 4), shape=(4, 8))
      >>> twisted_rings(Slice("v4-4x4x8_twisted"), factors[:1]) is None
      True
    """
    torus = slice_.torus
    if not isinstance(torus, TwistedTorus):
        return None
    shape, k = torus.shape, torus.twist
    lying = {f.place: f for f in factors if f.place >= 0 and f.size > 1}
    short = tuple(a for a in lying if a not in torus.long_axes)
    if len(lying) < sum(f.place >= 0 and f.size > 1 for f in factors) or not short:
        return None  # two factors on one axis, with another group in between
    if any(lying[axis].size < k for axis in short) or not set(torus.long_axes) <= set(lying):
        return None
    if all(lying[axis].size == shape[axis] for axis in torus.long_axes):
        places = tuple(sorted(lying))
        sides = tuple(shape[axis] for axis in places)
        return TwistedRings(places, ring_lengths(sides), sides)
    if len(torus.long_axes) == 1 and lying[torus.long_axes[0]][1:] == (2, k):
        return TwistedRings(short, (2 * k, *[k] * (len(short) - 1)), ())
    return None


def twisted_ways(rings: TwistedRings, links: Links) -> tuple[StagedTime, ...]:
    """Stage times of a reduce_scatter or all_gather: one part per axis in rotated orders, all stages alike."""
    parts = len(rings.places)
    stages, contributed = [], 1 / parts / math.prod(rings.lengths)
    for n in rings.lengths:
        fixed, per_byte = ((n // 2) * links.hop_seconds, (n - 1) / 2 / links.bytes_per_second)
        stages.append(((fixed, contributed * per_byte),))
        contributed *= n
    busy = sum(per_byte for ((_, per_byte),) in stages)
    hops = sum(n // 2 for n in rings.lengths)
    return (StagedTime("twisted", hops, tuple(stages), tuple((place, busy) for place in rings.places)),)


def twisted_exchanges(rings: TwistedRings, links: Links) -> tuple[StagedTime, ...]:
    """Candidate algorithms for an all_to_all: ring after ring, or every block along a direct path."""
    parts, stages = len(rings.places), []
    for n in rings.lengths:
        byte = 1 / (parts * n * links.bytes_per_second)
        stages.append(tuple((hops * links.hop_seconds, b * byte) for hops, b in collectives.exchange_paths((n, True))))
    busy = sum(max(b for _, b in stage) for stage in stages)
    hops = sum(n // 2 for n in rings.lengths)
    ways = [StagedTime("twisted", hops, tuple(stages), tuple((place, busy) for place in rings.places))]
    if rings.shape:
        diameter, per_byte = _straight(rings.shape)
        per_byte /= links.bytes_per_second
        straight = ((diameter * links.hop_seconds, per_byte / 2), (0.0, ROUTED * per_byte))
        ways.append(
            StagedTime("twisted, routed", diameter, (straight,), tuple((place, per_byte) for place in rings.places))
        )
    return tuple(ways)


@lru_cache(maxsize=64)
def _straight(shape: tuple[int, ...]) -> tuple[int, float]:
    """Diameter of a twisted torus, and bytes on each link per byte that a node sends."""
    return TwistedTorus(shape).diameter, total_distance(shape) / (2 * len(shape) * math.prod(shape))
