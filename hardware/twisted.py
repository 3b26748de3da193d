"""Twisted tori: wrap-around links of the short axes that also shift along the long ones.

On a torus of k x k x 2k nodes the long axis is the bottleneck of whatever crosses all of it. Twisting lets the links
that close a short axis arrive k positions further along each long axis. Then a walk along any axis comes back after 2k
steps, all axes look alike, and the bytes of an all_to_all spread over all links equally:

    shape         node reached from the end of the short axes    all_to_all over the untwisted torus, large k
    k x k x 2k    (x, y, z + k), from x and from y                 12/7 = 1.71 times as fast
    k x 2k x 2k   (x, y + k, z + k), from x                        48/35 = 1.37 times as fast

A walk of n steps along an axis, counted up to the subgroup that other axes span, closes like a ring of n nodes:
that is what collectives along all axes of a group use. An axis whose twist leads out of its group is a line there.

Sources: Camara, Moreto, Vallejo, Beivide, Miguel-Alonso, Martinez, Navaridas, "Twisted torus topologies for enhanced
interconnection networks", IEEE TPDS 21(12), 2010; Jouppi et al., "TPU v4", ISCA 2023 (arXiv:2304.01433), section 2.8.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hardware import collectives
from hardware.checks import HardwareError, amount
from hardware.events import Links, check_links
from hardware.torus import Coordinates, Torus

Displacement = tuple[int, ...]


class TwistedTorus(Torus):
    """A torus of two or more axes, of k and of 2k nodes, with the twist of the module docstring.

    Args:
      shape: nodes along each axis: k on at least one, 2k on at least one, k >= 2.
    Raises: HardwareError for other shapes.
    Example:
      >>> torus = TwistedTorus((4, 4, 8))
      >>> torus.coordinates(torus.neighbour(torus.node((3, 1, 2)), axis=0, step=1))
      (0, 1, 6)
      >>> torus.diameter, Torus((4, 4, 8)).diameter
      (6, 8)

    Source: module docstring.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__(tuple(shape) if isinstance(shape, Iterable) else shape)
        if not is_twistable(self.shape):
            raise HardwareError(
                f"a torus of shape {self.shape} has no twist; its axes must have k and 2k nodes, such as (4, 4, 8)"
            )

    @property
    def twist(self) -> int:
        """Offset along each long axis of a short axis's wrap-around link: k."""
        return min(self.shape)

    @property
    def long_axes(self) -> tuple[int, ...]:
        """The axes of 2k nodes."""
        return tuple(axis for axis, n in enumerate(self.shape) if n > self.twist)

    def normalised(self, coordinates: NDArray[Any]) -> NDArray[np.int64]:
        """Coordinates [..., rank] modulo the twisted torus."""
        crossed = sum(coordinates[..., axis] // n for axis, n in enumerate(self.shape) if n == self.twist)
        places = np.array(coordinates, np.int64)
        for axis in self.long_axes:
            places[..., axis] += crossed * self.twist
        nodes: NDArray[np.int64] = places % np.array(self.shape)
        return nodes

    def shifted(self, node: int, axis: int, by: int) -> int:
        """The node `by` steps further along `axis`."""
        place = np.array(self.coordinates(node))
        place[self._axis(axis)] += by
        return self.node(self.normalised(place).tolist())

    def closes(self, axis: int, within: Sequence[int]) -> bool:
        """True if walks along `axis` stay in a group of nodes that differ only along the axes `within`."""
        return axis in self.long_axes or set(self.long_axes) <= set(within)

    @property
    def diameter(self) -> int:
        """Hops between the two nodes furthest apart."""
        return max(sum(map(abs, ways[0])) for ways in _displacements(self.shape).values())

    def distance(self, source: int, target: int) -> int:
        """Hops of a shortest path."""
        return sum(map(abs, self.displacements(source, target)[0]))

    def displacements(self, source: int, target: int) -> tuple[Displacement, ...]:
        """Signed hops along each axis of every shortest path.

        Example:
          >>> TwistedTorus((2, 4)).displacements(0, 2)
          ((-2, 0), (0, -2), (0, 2), (2, 0))
        """
        apart = np.subtract(self.coordinates(target), self.coordinates(source))
        return _displacements(self.shape)[tuple(self.normalised(apart).tolist())]

    def steps(self, source: int, target: int, axis: int) -> int:
        """Signed hops along one axis of the first shortest path."""
        return self.displacements(source, target)[-1][self._axis(axis)]

    def routes(self, source: int, target: int) -> tuple[tuple[int, ...], ...]:
        """Links of every shortest path, axis by axis; splitting bytes evenly among them loads all links equally."""
        return tuple(self._walk(source, hops) for hops in reversed(self.displacements(source, target)))


def is_twistable(shape: Sequence[int]) -> bool:
    """True if a torus of `shape` has axes of k and of 2k nodes and no others, k >= 2.

    Example:
      >>> is_twistable((4, 4, 8)), is_twistable((4, 8, 8)), is_twistable((4, 4, 4)), is_twistable((4, 8, 16))
      (True, True, False, False)
    """
    short = min(shape, default=0)
    return short >= 2 and set(shape) == {short, 2 * short}


@lru_cache(maxsize=16)
def _displacements(shape: tuple[int, ...]) -> dict[Coordinates, tuple[Displacement, ...]]:
    """For each target, as seen from node 0: the signed hops of every shortest path."""
    k = min(shape)
    ways = {}
    for place in itertools.product(*map(range, shape)):
        short = [(c - k, c, c + k) if n == k else (c,) for c, n in zip(place, shape, strict=True)]
        candidates = set[Displacement]()
        for walk in itertools.product(*short):
            crossed = sum((c - w) // k for w, c, n in zip(walk, place, shape, strict=True) if n == k)
            longs = [
                (w,) if n == k else {(w + crossed * k) % n, (w + crossed * k) % n - n}
                for w, n in zip(walk, shape, strict=True)
            ]
            candidates.update(itertools.product(*longs))
        least = min(sum(map(abs, walk)) for walk in candidates)
        ways[place] = tuple(sorted(walk for walk in candidates if sum(map(abs, walk)) == least))
    return ways


def ring_lengths(shape: Sequence[int]) -> tuple[int, ...]:
    """Lengths of the rings of an all_gather along all axes, stage by stage, whatever the order of the axes.

    Raises: HardwareError as `TwistedTorus`.
    Example:
      >>> ring_lengths((4, 4, 8)), ring_lengths((4, 8, 8)), ring_lengths((4, 8))
      ((8, 4, 4), (8, 8, 4), (8, 4))
    """
    return tuple(sorted(TwistedTorus(shape).shape, reverse=True))


def all_gather_seconds(
    gathered_bytes: float, shape: Sequence[int], links: Links, algorithm: collectives.Algorithm = "shortest"
) -> float:
    """Seconds of an all_gather on a twisted torus: one part per axis, in rotated orders.

    Args:
      gathered_bytes: size of the result on one node.
      shape: of the torus; links, algorithm: as `hardware.collectives.all_gather_seconds`.
    Returns: seconds; a reduce_scatter of an operand of that size takes the same, an all_reduce twice as long.
    Example:
      >>> axes = [(4, True), (4, True), (8, True)]
      >>> plain = collectives.all_gather_seconds(2**28, axes, Links(45e9))
      >>> f"{all_gather_seconds(2**28, (4, 4, 8), Links(45e9)) / plain:.2f}"
      '0.86'

    Source: module docstring; `hardware.collectives` for one ring.
    """
    amount("gathered_bytes", gathered_bytes)
    own, total = gathered_bytes / len(shape) / math.prod(shape), 0.0
    for n in ring_lengths(shape):
        total += collectives.ring_stage_seconds(own, (n, True), links, algorithm)
        own *= n
    return total


def all_to_all_seconds(payload_bytes: float, shape: Sequence[int], links: Links) -> float:
    """Seconds of an all_to_all on a twisted torus: one part per axis, in rotated orders.

    Args:
      payload_bytes: what one node sends in all, its own block included.
    Example:
      >>> plain = collectives.all_to_all_seconds(2**28, [(4, True), (4, True), (8, True)], Links(45e9, 0))
      >>> f"{plain / all_to_all_seconds(2**28, (4, 4, 8), Links(45e9, 0)):.2f}"
      '1.50'

    Source: as `all_gather_seconds`.
    """
    parts = len(shape)
    return sum(
        collectives.all_to_all_seconds(payload_bytes / parts, [(n, True)], links, "phased") for n in ring_lengths(shape)
    )


def total_distance(shape: Sequence[int]) -> int:
    """Sum of the distances from one node of a twisted torus to all others.

    For even k: 4/3 k^3 - k/3 of k x 2k, 7/4 k^4 - k^2/2 of k x k x 2k, 35/8 k^4 - k^2 of k x 2k x 2k.

    Example:
      >>> total_distance((4, 4, 8)), total_distance((4, 8, 8))
      (440, 1104)
    """
    return sum(sum(map(abs, ways[0])) for ways in _displacements(TwistedTorus(shape).shape).values())


def all_to_all_bound_seconds(payload_bytes: float, shape: Sequence[int], links: Links) -> float:
    """Lower bound on the time of an all_to_all on a twisted torus: all hops spread over all links equally.

    Example:
      >>> plain = collectives.all_to_all_bound_seconds(2**28, [(4, True), (4, True), (8, True)], Links(45e9))
      >>> f"{plain / all_to_all_bound_seconds(2**28, (4, 4, 8), Links(45e9)):.2f}"  # TPU v4 reached 1.63
      '1.75'

    Source: Jouppi et al. 2023, figure 6.
    """
    amount("payload_bytes", payload_bytes)
    check_links(links)
    block = payload_bytes / math.prod(shape)
    return total_distance(shape) * block / (2 * len(shape)) / links.bytes_per_second


def bisection_links(torus: Torus) -> int:
    """Links that cross the worst bisection of a torus by parallel planes.

    Args:
      torus: twisted or wrapped along all axes, an even number of nodes.
    Raises: HardwareError for another torus.
    Example:
      >>> bisection_links(Torus((4, 4, 8))), bisection_links(TwistedTorus((4, 4, 8)))
      (32, 64)
    """
    if not all(torus.wrap) or torus.nodes % 2:
        raise HardwareError(f"planes halve only a torus with an even number of nodes and all wraps, not {torus}")
    places = np.array([torus.coordinates(node) for node in range(torus.nodes)])
    ends = np.array([torus.ends(link) for link in torus.links()])
    period, least = 2 * math.lcm(*torus.shape), torus.nodes * torus.rank
    for weights in itertools.product(*[range(-2 * period // n, 2 * period // n + 1, period // n) for n in torus.shape]):
        phase = places @ np.array(weights) % period  # phase of a plane wave; its sign defines the halves
        beyond = phase >= period // 2
        if 2 * beyond.sum() == torus.nodes:
            crossing = beyond[ends]
            least = min(least, int((~crossing[:, 0] & crossing[:, 1]).sum()))
    return least
