"""Rings around failed chips and links, and the cost of collectives on them.

A ring through all remaining chips, neighbour to neighbour, is composed of rings of 2 x 2 chips, such as those of a
host: two adjacent rings are merged by exchanging two links, failed links first. Where a host's four chips fail, the
remaining chips still form such blocks. A torus with a failed link and no failed chip has an alternative: the axis of
that link becomes a line, all other axes stay rings.

An all_reduce round a ring of n chips sends half of the data each way: 2 (n-1) (L + S / 2nB).

Source: Kumar and Jouppi, "Highly available data parallel ML training on mesh networks", arXiv:2011.03605; Itai,
Papadimitriou, Szwarcfiter 1982 for cycles of grids.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hardware import collectives
from hardware.checks import HardwareError, amount, whole
from hardware.events import Links, Message, MessagePlan
from hardware.ring_plans import CollectivePlan, check_data, check_torus
from hardware.torus import Torus

Array = NDArray[Any]


def ring_around(
    torus: Torus, failed: Collection[int] = (), failed_links: Collection[int] = ()
) -> tuple[int, ...] | None:
    """A ring through all remaining nodes, each next to the one before it.

    Args:
      failed: nodes that are left out; failed_links: links that are not used, in either direction.
    Returns: nodes in order, or None where the construction finds no ring.
    Raises: HardwareError for nodes or links that the torus does not have.
    Example:
      >>> torus = Torus((4, 4), wrap=False)
      >>> ring_around(torus, [torus.node(place) for place in ((0, 0), (0, 1), (1, 0), (1, 1))])
      (2, 6, 10, 9, 8, 12, 13, 14, 15, 11, 7, 3)

    Source: module docstring.
    """
    check_torus(torus)
    gone = {whole("failed node", node) for node in failed}
    if not gone <= set(range(torus.nodes)):
        raise HardwareError(f"failed nodes {sorted(gone)} are not all in a torus of {torus.nodes} nodes {torus.shape}")
    cut = {frozenset(torus.ends(link)) for link in failed_links}
    around = {
        node: {there for there in _neighbours(torus, node) if there not in gone and frozenset((node, there)) not in cut}
        for node in range(torus.nodes) if node not in gone
    }  # fmt: skip
    for offset in itertools.product(*[range(2 if n > 2 else 1) for n in torus.shape]):
        for pair in itertools.combinations(range(torus.rank), 2):
            rings = _blocks(torus, around, offset, pair)
            ring = None if rings is None else _joined(rings, around, cut)
            if ring is not None:
                return ring
    return None


def all_reduce_seconds(payload_bytes: float, nodes: int, links: Links) -> float:
    """Seconds of an all_reduce on one ring of `nodes` nodes, half of the data each way.

    Raises: HardwareError for negative or non-finite bytes, or no node.
    Example:
      >>> full = collectives.all_reduce_seconds(1e8, [(16, True), (16, True)], Links(45e9))
      >>> f"{all_reduce_seconds(1e8, 252, Links(45e9)) / full:.1f}"  # one ring uses two of a chip's four links
      '2.4'
    """
    own_bytes = amount("payload_bytes", payload_bytes) / whole("nodes", nodes, low=1)
    return 2 * collectives.ring_stage_seconds(own_bytes, (nodes, True), links, "halves")


def all_reduce(
    torus: Torus, ring: Sequence[int], data: Sequence[Array], element_bytes: float | None = None
) -> CollectivePlan:
    """The all_reduce round a ring, as messages: every node of the ring ends with the sum, others are unchanged.

    Args:
      ring: as `ring_around` returns it; data: one array per node of the torus, equal shapes.
      element_bytes: size of an element on the wire (default its own).
    Raises: HardwareError for wrong arrays, or a ring whose nodes are not neighbours.
    Example:
      >>> torus = Torus((2, 2), wrap=False)
      >>> reduce = all_reduce(torus, ring_around(torus), [np.array([node]) for node in range(4)])
      >>> _ = reduce.run(Links(1e9))
      >>> [int(result[0]) for result in reduce.results]
      [6, 6, 6, 6]
    """
    arrays = check_data(torus, data)
    n, shape, size = len(ring), arrays[0].shape, arrays[0].size
    if n < 2 or len(set(ring)) < n:
        raise HardwareError(f"a ring has two or more nodes, each once; got {list(ring)!r:.80}")
    unit = -(-size // (2 * n))
    piece = Fraction(arrays[0].itemsize if element_bytes is None else element_bytes) * Fraction(size, 2 * n)
    memory = []
    for array in arrays:
        cells = np.zeros(2 * n * unit, array.dtype)
        cells[:size] = array.reshape(-1)
        memory.append(cells.reshape(n, 2, unit))
    plan = MessagePlan(memory)
    onward = {1: [link_between(torus, a, b) for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)]}
    onward[-1] = [link_between(torus, ring[i], ring[i - 1]) for i in range(n)]
    for step, half in ((1, 0), (-1, 1)):
        last: dict[int, int] = {}
        for hop in range(2 * (n - 1)):  # n - 1 hops reduce block c, n - 1 hops distribute it
            for i in range(n):
                block = (i - step * hop) % n
                target = (i + step) % n
                region = (block, half)
                before = last.get(block)
                last[block] = len(plan.messages)
                plan.messages.append(
                    Message(
                        ring[i], ring[target], (onward[step][i],), region, region, piece,
                        () if before is None else (before,), np.add if hop < n - 1 else None,
                    )
                )  # fmt: skip
    return CollectivePlan(torus, plan, lambda _, cells: cells.reshape(-1)[:size].reshape(shape))


def link_between(torus: Torus, source: int, target: int) -> int:
    """Number of the link from one node to a neighbour.

    Raises: HardwareError where there is none.
    Example:
      >>> torus = Torus((4, 4))
      >>> torus.describe_link(link_between(torus, 0, 3))
      '0->3 axis1-'
    """
    for axis, step in itertools.product(range(torus.rank), (1, -1)):
        if torus.neighbour(source, axis, step) == target:
            return torus.link(source, axis, step)
    raise HardwareError(f"nodes {source} and {target} of the ring are not neighbours in a torus of {torus.shape}")


def _neighbours(torus: Torus, node: int) -> Iterator[int]:
    for axis, step in itertools.product(range(torus.rank), (1, -1)):
        there = torus.neighbour(node, axis, step)
        if there is not None and there != node:
            yield there


def _blocks(
    torus: Torus, around: dict[int, set[int]], offset: Sequence[int], pair: tuple[int, int]
) -> list[tuple[int, ...]] | None:
    """Rings of 2 x 2 nodes along two axes that cover all remaining nodes; None if some node is in no such ring."""
    rings, covered = [], set[int]()
    one, other = pair
    for node in sorted(around):
        place = torus.coordinates(node)
        if node in covered or (place[one] - offset[one]) % 2 or (place[other] - offset[other]) % 2:
            continue
        right = torus.neighbour(node, one, 1)
        below = torus.neighbour(node, other, 1)
        far = None if right is None else torus.neighbour(right, other, 1)
        ring = (node, right, far, below)
        if any(there not in around for there in ring):
            return None
        nodes = tuple(n for n in ring if n is not None)
        if covered & set(nodes):
            return None
        covered.update(nodes)
        rings.append(nodes)
    return rings if len(covered) == len(around) else None


def _joined(
    rings: list[tuple[int, ...]], around: dict[int, set[int]], cut: Collection[frozenset[int]]
) -> tuple[int, ...] | None:
    """Merge rings into one, replacing failed edges (`cut`) first; None if one cannot be replaced, or rings remain."""
    merging = _Rings(rings, around)
    broken = [edge for edge in cut if any(b in merging.beside.get(a, ()) for a, b in itertools.permutations(edge))]
    for a, b in broken:
        if b in merging.beside[a] and not merging.join(a, b):  # a replacement may be a failed edge, too
            return None
    if rings:
        merging.grow(rings[0])
    return merging.path() if len(merging.owners) == 1 else None


class _Rings:
    """Rings that can be merged: neighbouring edges (a, b) and (c, d) of two rings become a - c and b - d."""

    def __init__(self, rings: list[tuple[int, ...]], around: dict[int, set[int]]) -> None:
        self.around = around
        self.beside: dict[int, list[int]] = {}  # both neighbours on its ring
        self._parent = {node: ring[0] for ring in rings for node in ring}
        for ring in rings:
            for a, b, before in zip(ring, (*ring[1:], ring[0]), (ring[-1], *ring[:-1]), strict=True):
                self.beside[a] = [before, b]

    @property
    def owners(self) -> set[int]:
        """One representative node per ring."""
        return {self._owner(node) for node in self._parent}

    def _owner(self, node: int) -> int:
        parent = self._parent
        while parent[node] != node:
            parent[node] = node = parent[parent[node]]
        return node

    def join(self, a: int, b: int) -> list[int]:
        """Merge the ring of edge (a, b) with a neighbouring ring; returns the four end nodes, or []."""
        for c in self.around[a]:
            if self._owner(c) != self._owner(a):
                d = next((d for d in self.beside[c] if d in self.around[b]), None)
                if d is not None:
                    for node, old, new in ((a, b, c), (b, a, d), (c, d, a), (d, c, b)):
                        self.beside[node][self.beside[node].index(old)] = new
                    self._parent[self._owner(c)] = self._owner(a)
                    return [a, b, c, d]
        return []

    def grow(self, ring: tuple[int, ...]) -> None:
        """Merge a ring with all rings reachable from it."""
        queue = list(reversed(ring))
        seen = set(queue)
        while queue:
            a = queue.pop()
            for b in tuple(self.beside[a]):
                ends = self.join(a, b) if b in self.beside[a] else []
                fresh = [node for node in (*ends, *self.beside[a]) if ends or node not in seen]
                seen.update(fresh)
                queue += fresh

    def path(self) -> tuple[int, ...]:
        """The nodes of the ring that holds the first node, in order."""
        start = min(self.around)
        path, before = [start], self.beside[start][0]
        while True:
            here = path[-1]
            onward = self.beside[here][1] if self.beside[here][0] == before else self.beside[here][0]
            if onward == start:
                return tuple(path)
            path.append(onward)
            before = here
