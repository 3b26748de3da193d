"""all_to_all, collective_permute and broadcast as messages over the links of a torus.

As in `hardware.ring_plans`, each function takes arrays and returns a `CollectivePlan` to be simulated. Memories
are flat vectors; a region is the addresses of its elements.

all_to_all "phased" moves along one axis after the other. In phase j a node passes on what its j-1st
neighbour behind it still has to send further, each way; blocks for the antipode travel half each way.
"rotated" cuts every block in one part per axis, and each part takes the axes in another rotation: round a ring
in phases, along a line block by block, the farthest first, so that no link on the way ever waits for a
bundle. "routed" sends every block of the torus by itself over shortest ways, in equal pieces.

Source: `hardware.collectives`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hardware.checks import HardwareError, one_of, whole
from hardware.collectives import EXCHANGES, Axis
from hardware.events import Message, MessagePlan
from hardware.ring_plans import CollectivePlan, Group, check_data, check_torus, wire_bytes
from hardware.torus import Torus

Array = NDArray[Any]
Addresses = NDArray[np.int64]


def all_to_all(
    torus: Torus,
    data: Sequence[Array],
    axes: Sequence[int] | None = None,
    algorithm: Literal["rotated", "phased", "routed"] = "rotated",
    element_bytes: float | None = None,
) -> CollectivePlan:
    """all_to_all as messages: node i of a group sends row j of its operand to node j, which stores it as row i.

    Args:
      data: one array per node, [nodes of the group in row-major order, ...].
      axes: torus axes of the group (default all).
      algorithm: "rotated" or "phased" (with closed forms), or "routed" (whose time depends on the order of
        messages).
      element_bytes: size of an element on the wire (default its own).
    Returns: CollectivePlan; results have the shape of the operand.
    Raises: HardwareError for wrong arrays or axes, or an unknown algorithm.
    Example:
      >>> from hardware.events import Links
      >>> exchange = all_to_all(Torus((2,)), [np.array([1, 2]), np.array([3, 4])])
      >>> _ = exchange.run(Links(1e9))
      >>> [result.tolist() for result in exchange.results]
      [[1, 3], [2, 4]]
    """
    one_of("all_to_all algorithm", algorithm, (*EXCHANGES, "routed"))
    build = _Exchange(torus, data, axes, algorithm == "rotated", element_bytes)
    if algorithm == "routed":
        build.routed()
    else:
        build.staged(by_block=algorithm == "rotated")
    shape = build.arrays[0].shape

    def read(node: int, memory: Array) -> Array:
        result = np.empty((build.group, build.width), memory.dtype)
        result[build.ends(node, -1)] = memory[build.buffers[-1]].reshape(build.group, -1)[:, : build.width]
        return result.reshape(shape)

    return CollectivePlan(torus, build.plan, read)


class _Exchange(Group):
    """Buffers before and after every stage, and two for blocks in transit, as addresses in flat memory.

    A block is known by its displacement, how far apart its source and target are along each axis: a buffer is
    [displacements, parts, 2 halves, elements], and a block keeps its cells in it at whatever node it is.
    """

    def __init__(
        self,
        torus: Torus,
        data: Sequence[Array],
        axes: Sequence[int] | None,
        rotated: bool,
        element_bytes: float | None,
    ) -> None:
        super().__init__(torus, data, axes, element_bytes)
        shape, dtype = self.arrays[0].shape, self.arrays[0].dtype
        if not shape or shape[0] != self.group:
            raise HardwareError(f"all_to_all: operands must be [{self.group}, ...] for this group, not {shape}")
        self.moving = [i for i, size in enumerate(self.sizes) if size > 1]
        self.parts = max(len(self.moving), 1) if rotated else 1
        self.width = math.prod(shape[1:])
        unit = -(-self.width // (2 * self.parts))
        self.piece = self.wire * Fraction(self.width, 2 * self.parts)
        self.walks = np.indices(self.sizes).reshape(len(self.sizes), -1).T  # block displacements
        stages = len(self.moving) + 1
        block = (self.group, self.parts, 2, unit)
        addresses = np.arange((stages + 2) * math.prod(block)).reshape(stages + 2, *block)
        self.buffers, self.transit = addresses[:stages], addresses[stages:]
        memory = []
        for node, array in enumerate(self.arrays):
            cells = np.zeros((stages + 2, self.group, 2 * self.parts * unit), dtype)
            cells[0, :, : self.width] = array.reshape(self.group, self.width)[self.ends(node, 1)]
            memory.append(cells.reshape(-1))
        self.plan = MessagePlan(memory, barrier=True)

    def ends(self, node: int, sign: int) -> Addresses:
        """For each displacement, the group member reached from a node (sign 1), or the one that reaches it (-1)."""
        return self._members(np.array(self.own(node)) + sign * self.walks)

    def _members(self, places: NDArray[Any]) -> Addresses:
        """Member numbers for positions [..., axes of the group], which wrap around."""
        members: Addresses = np.ravel_multi_index(tuple(np.moveaxis(self._normalised(places), -1, 0)), self.sizes)
        return members

    def _normalised(self, places: NDArray[Any]) -> NDArray[Any]:
        if self.boxes:
            inside: NDArray[Any] = np.mod(places, self.sizes)
            return inside
        everywhere = np.zeros((*places.shape[:-1], self.torus.rank), np.int64)
        everywhere[..., self.axes] = places
        return self.torus.normalised(everywhere)[..., self.axes]

    def staged(self, by_block: bool) -> None:
        """Messages of "phased" and "rotated": each part takes the axes in its own rotation, one axis per stage."""
        left = [np.repeat(self.walks[:, None], 2, axis=1) for _ in range(self.parts)]  # [displacements, halves, axes]
        for stage in range(len(self.moving)):
            for part in range(self.parts):
                order = [self.moving[(part + j) % len(self.moving)] for j in range(len(self.moving))]
                index, later = order[stage], [self.axes[i] for i in order[stage + 1 :]]
                ring = self.ring(self.axes[index], later)
                hops = self._hops(left[part], index, ring, later)
                # blocks that stay at their position on this axis move to the next buffer at once
                for node, place in enumerate(self.places):
                    self._send(stage, part, index, node, 0, hops[place[self.axes[index]]] == 0)
                if by_block and not ring[1]:
                    self._send_blocks(stage, part, index, hops)
                else:
                    self._pass_on(stage, part, index, ring, hops)
                left[part][..., index] -= hops[0] if ring[1] else left[part][..., index]
                left[part] = self._normalised(left[part])

    def _hops(self, left: NDArray[Any], index: int, ring: Axis, later: Sequence[int]) -> list[NDArray[Any]]:
        """For each position along an axis, the signed hops of every half block in this stage: [displacements, 2]."""
        n, places = ring[0], range(self.sizes[index])
        if not ring[1]:
            return [(place + left[..., index]) % n - place for place in places]
        steps = left[..., index] % n
        if not self.boxes:  # as many hops as put the target within reach of the later axes
            rest = {int(self._members(np.array(self.own(node)))) for node in self.coset(0, later)}
            ends = np.stack([self._members(left - h * np.eye(len(self.sizes), dtype=int)[index]) for h in range(n)])
            steps = np.isin(ends, list(rest)).argmax(axis=0)
        antipode = np.where(2 * steps == n, [0, n], 0)  # the second half goes round the other way
        return [np.where(2 * steps > n, steps - n, steps - antipode)] * len(places)

    def _send_blocks(self, stage: int, part: int, index: int, hops: list[NDArray[Any]]) -> None:
        """On a line, send each block as its own message, the farthest first; links keep that order."""
        n = self.sizes[index]
        for node, place in enumerate(self.places):
            here = place[self.axes[index]]
            for by in (*range(n - 1 - here, 0, -1), *range(-here, 0)):
                self._send(stage, part, index, node, by, hops[here] == by)

    def _send(self, stage: int, part: int, index: int, source: int, by: int, chosen: NDArray[np.bool_]) -> None:
        """Send the chosen half blocks of a part directly to the next buffer of the node `by` steps along an axis."""
        read, write = (buffer[:, part][chosen].ravel() for buffer in self.buffers[stage : stage + 2])
        axis, route, target = self.axes[index], [], source
        for _ in range(abs(by)):
            route.append(self.torus.link(target, axis, 1 if by > 0 else -1))
            target = self.torus.ends(route[-1])[1]
        size = self.piece * (int(chosen.sum()) if by else 0)
        self.plan.messages.append(Message(source, target, tuple(route), (read,), (write,), size, stage=stage))

    def _pass_on(self, stage: int, part: int, index: int, ring: Axis, hops: list[NDArray[Any]]) -> None:
        """In phase j every node forwards by one hop, each way, the blocks that travel j hops or more."""
        axis = self.axes[index]
        last: dict[tuple[int, int], int] = {}
        for phase in range(1, ring[0] // 2 + 1 if ring[1] else ring[0]):
            for origin, place in enumerate(self.places):
                for step in (1, -1):
                    far = step * hops[place[axis]] >= phase
                    if not far.any():
                        continue
                    source, target = (self.torus.shifted(origin, axis, step * h) for h in (phase - 1, phase))
                    lane = self.transit[0 if step > 0 else 1][:, part]
                    read = (self.buffers[stage][:, part] if phase == 1 else lane)[far]
                    there = step * hops[place[axis]][far] == phase
                    write = np.where(there[:, None], self.buffers[stage + 1][:, part][far], lane[far])
                    after = (last[origin, step],) if phase > 1 else ()
                    last[origin, step] = len(self.plan.messages)
                    route, size = (self.torus.link(source, axis, step),), self.piece * int(far.sum())
                    regions = (read.ravel(),), (write.ravel(),)
                    self.plan.messages.append(Message(source, target, route, *regions, size, after, stage=stage))

    def routed(self) -> None:
        """Messages of "routed": each pair of nodes by itself, farthest first, split equally over its shortest paths."""
        outside = [tuple(c for axis, c in enumerate(place) if axis not in self.axes) for place in self.places]
        pairs = itertools.permutations(range(self.torus.nodes), 2)
        others = [(-self.torus.distance(a, b), a, b) for a, b in pairs if outside[a] == outside[b]]
        for _, source, target in sorted([*others, *((0, node, node) for node in range(self.torus.nodes))]):
            apart = int(self._members(np.subtract(self.own(target), self.own(source))))
            ways = self.torus.routes(source, target)
            read, write = (np.array_split(buffer[apart, 0].ravel(), len(ways)) for buffer in self.buffers[[0, -1]])
            for route, from_, to in zip(ways, read, write, strict=True):
                size = 2 * self.piece / len(ways) if route else Fraction(0)
                self.plan.messages.append(Message(source, target, route, (from_,), (to,), size))


def permute(
    torus: Torus,
    data: Sequence[Array],
    target: Callable[[int], int | None],
    chunks: int = 1,
    element_bytes: float | None = None,
) -> CollectivePlan:
    """permute as messages: every node sends its operand to another, dimension-ordered, in pipelined chunks.

    Args:
      data: one array per node, equal shapes.
      target: node -> the node that receives its operand, or None to send nothing; no node receives two.
      chunks: pieces, >= 1.
      element_bytes: size of an element on the wire (default its own).
    Returns: CollectivePlan; nodes that receive nothing end with zeros.
    Raises: HardwareError for wrong arrays, chunks below 1, targets outside the torus or met twice.
    Example:
      >>> from hardware.events import Links
      >>> shift = permute(Torus((3,)), [np.array([i]) for i in range(3)], lambda node: (node + 1) % 3)
      >>> _ = shift.run(Links(1e9))
      >>> [int(result[0]) for result in shift.results]
      [2, 0, 1]
    """
    arrays = check_data(torus, data)
    whole("chunks", chunks, low=1)
    if not callable(target):
        raise HardwareError(f"target must be a function of a node's number, not {target!r}")
    targets = {node: aim for node in range(torus.nodes) if (aim := target(node)) is not None}
    for node, aim in targets.items():
        if whole(f"target of node {node}", aim) >= torus.nodes:
            raise HardwareError(f"target {aim} of node {node} is not in a torus of {torus.nodes} nodes")
    if len(set(targets.values())) < len(targets):
        raise HardwareError("a node receives from two nodes; a permute has one source for every target")
    size, shape = arrays[0].size, arrays[0].shape
    memory = [np.concatenate([array.reshape(-1), np.zeros(size, array.dtype)]) for array in arrays]
    plan, element = MessagePlan(memory), wire_bytes(arrays[0], element_bytes)
    for low, high in _pieces(size, chunks):
        for node, aim in targets.items():
            read, write = (slice(low, high),), (slice(size + low, size + high),)
            message = Message(node, aim, torus.route(node, aim), read, write, element * (high - low))
            plan.messages.append(message)
    return CollectivePlan(torus, plan, lambda _, memory: memory[size:].reshape(shape))


def broadcast(
    torus: Torus,
    data: Array,
    root: int = 0,
    algorithm: Literal["tree", "halves"] = "tree",
    chunks: int = 16,
    element_bytes: float | None = None,
) -> CollectivePlan:
    """broadcast as messages: by a tree both ways along each axis, or one half each way round all rings.

    Args:
      data: the array at `root`.
      algorithm: "tree" (any torus) or "halves" (all axes wrapped).
      chunks: pieces that follow each other, >= 1.
      element_bytes: size of an element on the wire (default its own).
    Returns: CollectivePlan; results have the shape of `data`.
    Raises: HardwareError for a root outside, chunks below 1, an unknown algorithm, halves without wrap.
    Example:
      >>> from hardware.events import Links
      >>> spread = broadcast(Torus((2, 3)), np.array([5, 6]), root=4)
      >>> _ = spread.run(Links(1e9))
      >>> spread.results[0].tolist()
      [5, 6]
    """
    check_torus(torus)
    data = check_data(Torus((1,)), [data])[0]
    torus.coordinates(root)
    one_of("broadcast algorithm", algorithm, ("tree", "halves"))
    whole("chunks", chunks, low=1)
    if algorithm == "tree":
        trees = [_tree(torus, root, step=None)]
    else:
        if not all(wrap or n == 1 for n, wrap in zip(torus.shape, torus.wrap, strict=True)):
            raise HardwareError(f"broadcast by halves needs rings; {torus.shape} wraps only {torus.wrap}")
        trees = [_tree(torus, root, step=1), _tree(torus, root, step=-1)]
    memory = [np.zeros(data.size, data.dtype) for _ in range(torus.nodes)]
    memory[root][...] = data.reshape(-1)
    plan, element = MessagePlan(memory), wire_bytes(data, element_bytes)
    pieces = _pieces(data.size, len(trees) * chunks)
    for chunk in range(chunks):
        for tree, (low, high) in zip(trees, pieces[chunk::chunks], strict=True):
            region, size = (slice(low, high),), element * (high - low)
            arrival: dict[int, int] = {}
            for source, target, link in tree:
                after = (arrival[source],) if source in arrival else ()
                arrival[target] = len(plan.messages)
                plan.messages.append(Message(source, target, (link,), region, region, size, after))
    return CollectivePlan(torus, plan, lambda _, memory: memory.reshape(data.shape))


def _pieces(size: int, count: int) -> list[tuple[int, int]]:
    """(begin, end) of `count` nearly equal pieces."""
    return list(itertools.pairwise(n * size // count for n in range(count + 1)))


def _tree(torus: Torus, root: int, step: int | None) -> list[tuple[int, int, int]]:
    """(source, target, link) of a spanning tree from the root: axis by axis, both ways or all in direction `step`."""
    edges, reached = [], [root]
    for axis in range(torus.rank):
        n, wrap = torus.shape[axis], torus.wrap[axis]
        for start in list(reached):
            place = torus.coordinates(start)[axis]
            forth = (n // 2 if wrap else n - 1 - place) if step is None else (n - 1 if step > 0 else 0)
            back = (n - 1 - forth if wrap else place) if step is None else n - 1 - forth
            for direction, hops in ((1, forth), (-1, back)):
                here = start
                for _ in range(hops):
                    link = torus.link(here, axis, direction)
                    there = torus.ends(link)[1]
                    edges.append((here, there, link))
                    reached.append(there)
                    here = there
    return edges
