"""all_to_all, collective_permute and broadcast as messages over the links of a torus.

As in `hardware.ring_plans`, each function takes arrays and returns a `Collective` to be simulated. Memories
are flat vectors; a region is the addresses of its elements.

all_to_all "phased" moves along one axis after the other. In phase j a node passes on what its j-1st
neighbour behind it still has to send further, each way; blocks for the antipode travel half each way.
"routed" sends every block by itself over a shortest way, farthest first, ties split in halves.

Source: `hardware.collectives`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hardware.checks import amount, whole
from hardware.errors import HardwareError
from hardware.events import Message, Plan, Region
from hardware.ring_plans import Collective, check_axes, check_data
from hardware.torus import Torus

Array = NDArray[Any]
Addresses = NDArray[np.int64]


def all_to_all(
    torus: Torus,
    data: Sequence[Array],
    axes: Sequence[int] | None = None,
    algorithm: Literal["phased", "routed"] = "phased",
    element_bytes: float | None = None,
) -> Collective:
    """Node i of a group sends row j of its operand to node j, which stores it as row i.

    Args:
      data: one array per node, [nodes of the group in row-major order, ...].
      axes: torus axes of the group (default all).
      algorithm: "phased" (has a closed form) or "routed" (whose time depends on the order of messages).
      element_bytes: size of an element on the wire (default its own).
    Returns: Collective; results have the shape of the operand.
    Raises: HardwareError for wrong arrays or axes, or an unknown algorithm.
    Example:
      >>> from hardware.events import Links
      >>> exchange = all_to_all(Torus((2,)), [np.array([1, 2]), np.array([3, 4])])
      >>> _ = exchange.run(Links(1e9))
      >>> [result.tolist() for result in exchange.results]
      [[1, 3], [2, 4]]
    """
    build = _Exchange(torus, data, axes, element_bytes)
    if algorithm == "phased":
        build.phased()
    elif algorithm == "routed":
        build.routed()
    else:
        raise HardwareError(f"unknown all_to_all algorithm {algorithm!r}; use phased or routed")
    shape = np.asarray(data[0]).shape
    last = build.buffers[-1].reshape(build.group, -1)
    width = math.prod(shape[1:])
    return Collective(torus, build.plan, lambda _, memory: memory[last][:, :width].reshape(shape))


class _Exchange:
    """Buffers before and after every axis, and two for blocks in transit, as addresses in flat memory."""

    def __init__(
        self, torus: Torus, data: Sequence[Array], axes: Sequence[int] | None, element_bytes: float | None
    ) -> None:
        arrays = check_data(torus, data)
        self.torus, self.axes = torus, check_axes(torus, axes)
        self.sizes = tuple(torus.shape[axis] for axis in self.axes)
        self.group = math.prod(self.sizes)
        shape = arrays[0].shape
        if not shape or shape[0] != self.group:
            raise HardwareError(f"all_to_all: operands must be [{self.group}, ...] for this group, not {shape}")
        width = math.prod(shape[1:])
        self.unit = -(-width // 2)
        self.element = wire_bytes(arrays[0], element_bytes)
        count = len(self.axes) + 1
        block = (*self.sizes, 2, self.unit)
        size = math.prod(block)
        addresses = np.arange((count + 2) * size).reshape(count + 2, *block)
        self.buffers, self.transit = addresses[:count], addresses[count:]
        memory = []
        for array in arrays:
            cells = np.zeros((count + 2, self.group, 2 * self.unit), array.dtype)
            cells[0, :, :width] = array.reshape(self.group, width)
            memory.append(cells.reshape(-1))
        self.plan = Plan(memory)
        self.places = [torus.coordinates(node) for node in range(torus.nodes)]

    def phased(self) -> None:
        waits: dict[int, list[int]] = {node: [] for node in range(self.torus.nodes)}
        for number, axis in enumerate(self.axes):
            arrived: dict[int, list[int]] = {node: [] for node in range(self.torus.nodes)}
            self._keep_own(number, axis, waits, arrived)
            n, wrap = self.torus.shape[axis], self.torus.wrap[axis]
            last: dict[tuple[int, int], int] = {}
            for phase in range(1, n // 2 + 1 if wrap else n):
                for node in range(self.torus.nodes):
                    for step in (1, -1):
                        self._pass_on(number, axis, node, step, phase, last, waits, arrived)
            waits = arrived

    def _keep_own(self, number: int, axis: int, waits: dict[int, list[int]], arrived: dict[int, list[int]]) -> None:
        """The blocks that stay at their node on this axis move to the next buffer at once."""
        for node, place in enumerate(self.places):
            own = (slice(None),) * number + (place[axis],)
            read, write = self.buffers[number][own].ravel(), self.buffers[number + 1][own].ravel()
            arrived[node].append(len(self.plan.messages))
            message = Message(node, node, (), (read,), (write,), Fraction(0), tuple(waits[node]))
            self.plan.messages.append(message)

    def _pass_on(
        self,
        number: int,
        axis: int,
        origin: int,
        step: int,
        phase: int,
        last: dict[tuple[int, int], int],
        waits: dict[int, list[int]],
        arrived: dict[int, list[int]],
    ) -> None:
        """Phase j of the blocks of `origin` in one direction: all that travel j hops or more go on by one."""
        n, place = self.torus.shape[axis], self.places[origin][axis]
        far = [(place + step * hops, half) for hops, half in self._spread(n, place, axis, step) if hops >= phase]
        if not far:
            return
        source, target = (
            self._moved(origin, axis, step * (phase - 1)),
            self._moved(origin, axis, step * phase),
        )
        read, write = [], []
        for column, half in far:
            to = (slice(None),) * number + (column % n,)
            come = (slice(None),) * number + (place,)
            lane = self.transit[0 if step > 0 else 1]
            start = self.buffers[number] if phase == 1 else lane
            end = self.buffers[number + 1][come] if column % n == self.places[target][axis] else lane[to]
            read.append(start[to][..., half, :].ravel())
            write.append(end[..., half, :].ravel())
        before = last.get((origin, step))
        after = tuple(waits[source]) if before is None else (before,)
        last[origin, step] = len(self.plan.messages)
        arrived[target].append(len(self.plan.messages))
        cells: Region = (np.concatenate(read),)
        size = self.element * sum(part.size for part in read)
        link = self.torus.link(source, axis, step)
        message = Message(source, target, (link,), cells, (np.concatenate(write),), size, after, stage=number)
        self.plan.messages.append(message)

    def _spread(self, n: int, place: int, axis: int, step: int) -> list[tuple[int, slice]]:
        """(hops, halves) of the blocks that a node sends in one direction."""
        both = slice(0, 2)
        if not self.torus.wrap[axis]:
            return [(h, both) for h in range(1, (n - place) if step > 0 else place + 1)]
        out = [(h, both) for h in range(1, (n - 1) // 2 + 1)]
        if n % 2 == 0:
            out.append((n // 2, slice(0, 1) if step > 0 else slice(1, 2)))
        return out

    def _moved(self, node: int, axis: int, by: int) -> int:
        place = list(self.places[node])
        place[axis] = (place[axis] + by) % self.torus.shape[axis]
        return self.torus.node(place)

    def routed(self) -> None:
        """Every pair by itself, farthest first."""
        pairs = []
        for source in range(self.torus.nodes):
            for target in range(self.torus.nodes):
                same = all(
                    a == b
                    for axis, (a, b) in enumerate(zip(self.places[source], self.places[target], strict=True))
                    if axis not in self.axes
                )
                if same:
                    pairs.append((-self.torus.distance(source, target), source, target))
        for _, source, target in sorted(pairs):
            there = tuple(self.places[target][axis] for axis in self.axes)
            here = tuple(self.places[source][axis] for axis in self.axes)
            forth, back = (
                self.torus.route(source, target),
                self.torus.route(source, target, backward_ties=True),
            )
            ways = [(forth, slice(0, 2))] if forth == back else [(forth, slice(0, 1)), (back, slice(1, 2))]
            for way, half in ways:
                read, write = self.buffers[0][there][half].ravel(), self.buffers[-1][here][half].ravel()
                size = self.element * read.size if way else Fraction(0)
                self.plan.messages.append(Message(source, target, way, (read,), (write,), size))


def permute(
    torus: Torus,
    data: Sequence[Array],
    target: Callable[[int], int | None],
    chunks: int = 1,
    element_bytes: float | None = None,
) -> Collective:
    """Every node sends its operand to another, dimension-ordered, in chunks that follow each other.

    Args:
      data: one array per node, equal shapes.
      target: node -> the node that receives its operand, or None to send nothing; no node receives two.
      chunks: pieces, >= 1.
      element_bytes: size of an element on the wire (default its own).
    Returns: Collective; nodes that receive nothing end with zeros.
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
    targets = {node: aim for node in range(torus.nodes) if (aim := target(node)) is not None}
    for node, aim in targets.items():
        if whole(f"target of node {node}", aim) >= torus.nodes:
            raise HardwareError(f"target {aim} of node {node} is not in a torus of {torus.nodes} nodes")
    if len(set(targets.values())) < len(targets):
        raise HardwareError("a node receives from two nodes; a permute has one source for every target")
    size, shape = arrays[0].size, arrays[0].shape
    memory = [np.concatenate([array.reshape(-1), np.zeros(size, array.dtype)]) for array in arrays]
    plan, element = Plan(memory), wire_bytes(arrays[0], element_bytes)
    for chunk in range(chunks):
        low, high = chunk * size // chunks, (chunk + 1) * size // chunks
        for node, aim in targets.items():
            read, write = (slice(low, high),), (slice(size + low, size + high),)
            message = Message(node, aim, torus.route(node, aim), read, write, element * (high - low))
            plan.messages.append(message)
    return Collective(torus, plan, lambda _, memory: memory[size:].reshape(shape))


def broadcast(
    torus: Torus,
    data: Array,
    root: int = 0,
    algorithm: Literal["tree", "halves"] = "tree",
    chunks: int = 16,
    element_bytes: float | None = None,
) -> Collective:
    """One node's array to all: by a tree both ways along each axis, or one half each way round all rings.

    Args:
      data: the array at `root`.
      algorithm: "tree" (any torus) or "halves" (all axes wrapped).
      chunks: pieces that follow each other, >= 1.
      element_bytes: size of an element on the wire (default its own).
    Returns: Collective; results have the shape of `data`.
    Raises: HardwareError for a root outside, chunks below 1, an unknown algorithm, halves without wrap.
    Example:
      >>> from hardware.events import Links
      >>> spread = broadcast(Torus((2, 3)), np.array([5, 6]), root=4)
      >>> _ = spread.run(Links(1e9))
      >>> spread.results[0].tolist()
      [5, 6]
    """
    data = check_data(Torus((1,)), [data])[0]
    torus.coordinates(root)
    whole("chunks", chunks, low=1)
    if algorithm == "tree":
        trees = [_tree(torus, root, step=None)]
    elif algorithm == "halves":
        if not all(wrap or n == 1 for n, wrap in zip(torus.shape, torus.wrap, strict=True)):
            raise HardwareError(f"broadcast by halves goes round rings; {torus.shape} wraps only {torus.wrap}")
        trees = [_tree(torus, root, step=1), _tree(torus, root, step=-1)]
    else:
        raise HardwareError(f"unknown broadcast algorithm {algorithm!r}; use tree or halves")
    memory = [np.zeros(data.size, data.dtype) for _ in range(torus.nodes)]
    memory[root][...] = data.reshape(-1)
    plan, element = Plan(memory), wire_bytes(data, element_bytes)
    pieces = len(trees) * chunks
    for chunk in range(chunks):
        for number, tree in enumerate(trees):
            piece = number * chunks + chunk
            region = (slice(piece * data.size // pieces, (piece + 1) * data.size // pieces),)
            size = element * (region[0].stop - region[0].start)
            arrival: dict[int, int] = {}
            for source, target, link in tree:
                after = (arrival[source],) if source in arrival else ()
                arrival[target] = len(plan.messages)
                plan.messages.append(Message(source, target, (link,), region, region, size, after))
    return Collective(torus, plan, lambda _, memory: memory.reshape(data.shape))


def _tree(torus: Torus, root: int, step: int | None) -> list[tuple[int, int, int]]:
    """(source, target, link) from the root outwards: axis by axis, both ways or all in direction `step`."""
    edges, reached = [], [root]
    for axis in range(torus.rank):
        n, wrap = torus.shape[axis], torus.wrap[axis]
        for start in list(reached):
            place = torus.coordinates(start)[axis]
            forth = (n // 2 if wrap else n - 1 - place) if step is None else (n - 1 if step > 0 else 0)
            back = (n - 1 - forth if wrap else place) if step is None else n - 1 - forth
            for way, hops in ((1, forth), (-1, back)):
                here = start
                for _ in range(hops):
                    link = torus.link(here, axis, way)
                    there = torus.ends(link)[1]
                    edges.append((here, there, link))
                    reached.append(there)
                    here = there
    return edges


def wire_bytes(array: Array, element_bytes: float | None) -> Fraction:
    """Bytes of one element on the wire."""
    if element_bytes is None:
        return Fraction(array.itemsize)
    return Fraction(amount("element_bytes", element_bytes))
