"""A torus or mesh of chips: coordinates, links, wrap-around, routes.

Nodes are numbered row-major, the last axis fastest. Every axis of more than one node has a link each way
between neighbours (full duplex: two links); a wrapped axis also joins its ends. A wrapped axis of two
nodes has two links each way. A link has a number: (node * rank + axis) * 2 + (0 for +1, 1 for -1).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hardware.checks import HardwareError, whole, wholes
from hardware.unknown_names import Attributes

Coordinates = tuple[int, ...]


@dataclass(frozen=True)
class Torus(Attributes):
    """A grid of `shape` nodes in which axis i wraps around where `wrap[i]`.

    Args:
      shape: nodes along each axis, each >= 1.
      wrap: one bool for all axes, or one per axis (default: all wrap).
    Raises: HardwareError for an empty shape, sizes below 1, or another number of wraps than axes.
    Example:
      >>> from hardware import Torus
      >>> torus = Torus((8, 4), wrap=(True, False))
      >>> torus.nodes, torus.coordinates(6), torus.node((7, 0)), torus.neighbour(0, axis=0, step=-1)
      (32, (1, 2), 28, 28)
      >>> torus.distance(0, 28), torus.distance(0, 3), torus.diameter
      (1, 3, 7)

    Source: module docstring.
    """

    shape: tuple[int, ...]
    wrap: tuple[bool, ...] = True  # type: ignore[assignment]  # one bool is spread over the axes

    def __post_init__(self) -> None:
        shape = wholes("torus shape", self.shape, low=1)
        if not shape:
            raise HardwareError("torus shape must have at least one axis")
        given: object = self.wrap
        wrap = (given,) * len(shape) if isinstance(given, bool) else given
        if not isinstance(wrap, Sequence) or any(not isinstance(flag, bool) for flag in wrap):
            raise HardwareError(f"torus wrap must be a bool, or one bool per axis, not {given!r}")
        if len(wrap) != len(shape):
            raise HardwareError(
                f"torus wrap {tuple(wrap)} has {len(wrap)} entries, shape {shape} has {len(shape)} axes"
            )
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "wrap", tuple(wrap))

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return math.prod(self.shape)

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def diameter(self) -> int:
        """Hops between the two nodes furthest apart."""
        return sum(n // 2 if wrap else n - 1 for n, wrap in zip(self.shape, self.wrap, strict=True))

    def coordinates(self, node: int) -> Coordinates:
        """Coordinates of a node number."""
        if whole("node", node) >= self.nodes:
            raise HardwareError(f"node {node} is not in a torus of {self.nodes} nodes {self.shape}")
        out = []
        for size in reversed(self.shape):
            node, c = divmod(node, size)
            out.append(c)
        return tuple(reversed(out))

    def node(self, coordinates: Sequence[int]) -> int:
        """Number of the node at `coordinates`."""
        place = wholes("coordinates", coordinates)
        if len(place) != self.rank or any(c >= size for c, size in zip(place, self.shape, strict=True)):
            raise HardwareError(f"coordinates {place} are not in a torus of shape {self.shape}")
        number = 0
        for c, size in zip(place, self.shape, strict=True):
            number = number * size + c
        return number

    def neighbour(self, node: int, axis: int, step: int) -> int | None:
        """The next node along `axis` in direction `step` (+1 or -1); None where the mesh ends."""
        given: object = step
        if not isinstance(given, Integral) or given not in (1, -1):
            raise HardwareError(f"step must be 1 or -1, not {step!r}")
        size = self.shape[self._axis(axis)]
        moved = self.coordinates(node)[axis] + step
        if size == 1 or not (0 <= moved < size or self.wrap[axis]):
            return None
        return self.shifted(node, axis, step)

    def shifted(self, node: int, axis: int, by: int) -> int:
        """The node `by` positions further along `axis`, modulo its size (wrapped or not)."""
        stride = math.prod(self.shape[self._axis(axis) + 1 :])
        place = node // stride % self.shape[axis]
        return node + ((place + by) % self.shape[axis] - place) * stride

    def normalised(self, coordinates: NDArray[Any]) -> NDArray[np.int64]:
        """Coordinates [..., rank] modulo the torus."""
        nodes: NDArray[np.int64] = coordinates % np.array(self.shape)
        return nodes

    def closes(self, axis: int, within: Sequence[int]) -> bool:
        """True if walks along `axis` return to their start within nodes that differ only along the axes `within`."""
        return self.wrap[axis] and axis in within

    def link(self, node: int, axis: int, step: int) -> int:
        """Number of the link that leaves `node` along `axis` in direction `step`."""
        if self.neighbour(node, axis, step) is None:
            raise HardwareError(
                f"no link leaves node {node} {self.coordinates(node)} along axis {axis} by {step:+d}: "
                f"shape {self.shape}, wrap {self.wrap}"
            )
        return (node * self.rank + axis) * 2 + (step < 0)

    def links(self) -> Iterator[int]:
        """All links by number."""
        for node, axis, step in itertools.product(range(self.nodes), range(self.rank), (1, -1)):
            if self.neighbour(node, axis, step) is not None:
                yield self.link(node, axis, step)

    def ends(self, link: int) -> tuple[int, int]:
        """The nodes that a link leaves and reaches."""
        rest, backward = divmod(whole("link", link), 2)
        node, axis = divmod(rest, self.rank)
        target = self.neighbour(node, axis, -1 if backward else 1)
        if target is None:
            raise HardwareError(f"link {link} does not exist in a torus of shape {self.shape}, wrap {self.wrap}")
        return node, target

    def distance(self, source: int, target: int) -> int:
        """Hops of a shortest path."""
        pairs = zip(self.coordinates(source), self.coordinates(target), self.shape, self.wrap, strict=True)
        return sum(min(abs(a - b), n - abs(a - b)) if wrap else abs(a - b) for a, b, n, wrap in pairs)

    def steps(self, source: int, target: int, axis: int) -> int:
        """Signed hops along one axis in the shorter direction; ties go in the + direction."""
        a, b = self.coordinates(source)[self._axis(axis)], self.coordinates(target)[axis]
        size = self.shape[axis]
        if not self.wrap[axis]:
            return b - a
        forward = (b - a) % size
        return forward if forward <= size - forward else forward - size

    def routes(self, source: int, target: int) -> tuple[tuple[int, ...], ...]:
        """Links of the shortest paths that share the traffic between two nodes: two paths where ties are split.

        Each is dimension-ordered; at ties, the first path goes in the + direction of every axis, the second in the -
        direction.

        Example:
          >>> from hardware import Torus
          >>> torus = Torus((4, 4))
          >>> [[torus.ends(link)[1] for link in route] for route in torus.routes(0, 9)]
          [[4, 8, 9], [12, 8, 9]]
        """
        hops = [self.steps(source, target, axis) for axis in range(self.rank)]
        other = [-h if wrap and 2 * h == n else h for h, n, wrap in zip(hops, self.shape, self.wrap, strict=True)]
        ways = [hops] if hops == other else [hops, other]
        return tuple(self._walk(source, path) for path in ways)

    def route(self, source: int, target: int, backward_ties: bool = False) -> tuple[int, ...]:
        """Links of a shortest path, axis by axis in order.

        Args:
          backward_ties: take the last of `routes`: the - direction where both ways round are equally long.
        Example:
          >>> from hardware import Torus
          >>> torus = Torus((4, 4))
          >>> [torus.ends(link) for link in torus.route(0, 15)]
          [(0, 12), (12, 15)]
        """
        return self.routes(source, target)[-1 if backward_ties else 0]

    def _walk(self, source: int, hops: Sequence[int]) -> tuple[int, ...]:
        """Links of a walk of signed hops along each axis."""
        path, here = [], source
        for axis, count in enumerate(hops):
            for _ in range(abs(count)):
                path.append(self.link(here, axis, 1 if count > 0 else -1))
                here = self.ends(path[-1])[1]
        return tuple(path)

    def describe_link(self, link: int) -> str:
        """Text of a link, such as `0->3 axis1-`."""
        source, target = self.ends(link)
        return f"{source}->{target} axis{link // 2 % self.rank}{'-' if link % 2 else '+'}"

    def _axis(self, axis: int) -> int:
        if whole("axis", axis) >= self.rank:
            raise HardwareError(f"axis {axis} is not one of the {self.rank} axes of shape {self.shape}")
        return axis
