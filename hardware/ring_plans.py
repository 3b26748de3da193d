"""all_gather, reduce_scatter and all_reduce as messages over the links of a torus.

Each function takes one array per node and returns a `CollectivePlan`, whose messages `hardware.events` runs,
alone or with others that share the links. Closed forms of the same algorithms: `hardware.collectives`.

A node's memory is [sizes of the group's axes ..., parts, 2 halves, elements]: the block of every node of
its group, each block cut in parts (which take the axes in rotated orders) and halves (for the two ways round
a ring). Blocks that do not divide are padded with zeros in memory; on the wire every piece is charged its
equal share of the bytes without padding.

A reduce_scatter is an all_gather backwards in time: where that sends block o from x to y, this one sends
the partial sum of block o from y to x, later hops first.

Source: `hardware.collectives`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hardware.checks import HardwareError, amount, one_of, wholes
from hardware.collectives import ALGORITHMS, Algorithm, Axis, count_parts
from hardware.events import Links, Message, MessagePlan, Region, Traffic, simulate
from hardware.numerics import COMBINE
from hardware.torus import Torus
from hardware.unknown_names import Attributes

Array = NDArray[Any]
Arrivals = dict[int, tuple[int, ...]]
Combine = Callable[[Array, Array], Array]

BOTH = slice(0, 2)
HALVES = {1: slice(0, 1), -1: slice(1, 2)}  # half of a block by direction


@dataclass
class CollectivePlan(Attributes):
    """Messages of one collective, and how to read every node's result from its memory afterwards."""

    torus: Torus
    plan: MessagePlan
    read: Callable[[int, Array], Array]

    def run(self, links: Links, record: bool = False) -> Traffic:
        """Simulate the collective alone; `results` then has every node's result. `record` keeps all link crossings."""
        return simulate(self.torus, links, [self.plan], record)

    @property
    def results(self) -> list[Array]:
        """One array per node (after a simulation)."""
        return [self.read(node, memory) for node, memory in enumerate(self.plan.memory)]


def run_together(links: Links, collectives: Sequence[CollectivePlan]) -> Traffic:
    """Simulate several collectives at once on one torus; they share its links.

    Raises: HardwareError for an empty list or different tori.
    Example:
      >>> torus = Torus((4,))
      >>> data = [np.ones(8) for _ in range(4)]
      >>> alone = all_reduce(torus, data).run(Links(1e6, 0))
      >>> both = run_together(Links(1e6, 0), [all_reduce(torus, data), all_reduce(torus, data)])
      >>> both.seconds / alone.seconds
      2.0
    """
    if not isinstance(collectives, (list, tuple)) or not all(isinstance(c, CollectivePlan) for c in collectives):
        raise HardwareError(f"run_together needs a list of collectives, not {collectives!r}")
    tori = {collective.torus for collective in collectives}
    if len(tori) != 1:
        raise HardwareError(f"run_together needs collectives on one torus, not on {len(tori)}")
    return simulate(tori.pop(), links, [collective.plan for collective in collectives])


def all_gather(
    torus: Torus,
    blocks: Sequence[Array],
    axes: Sequence[int] | None = None,
    algorithm: Algorithm = "shortest",
    parts: int | None = None,
    barrier: bool = True,
    element_bytes: float | None = None,
) -> CollectivePlan:
    """all_gather as messages: every node obtains the blocks of its group, the nodes that differ only along `axes`.

    Args:
      blocks: one array per node, equal shapes.
      axes: torus axes of the group (default all); order does not matter.
      algorithm: "oneway", "halves" or "shortest" on wrapped axes; others are lines.
      parts: 1, or one per axis (default).
      barrier: stages begin together everywhere; else each node continues when it can.
      element_bytes: size of an element on the wire (default its own).
    Returns: CollectivePlan; results are [nodes of the group in row-major order, *block shape].
    Raises: HardwareError for a wrong number or unequal shapes of blocks, or unknown axes.
    Example:
      >>> gather = all_gather(Torus((3,)), [np.array([i, -i]) for i in range(3)])
      >>> gather.run(Links(8e6, 0)).seconds, gather.results[2].tolist()
      (2e-06, [[0, 0], [1, -1], [2, -2]])
    """
    build = _Builder(torus, blocks, axes, algorithm, parts, barrier, element_bytes, blocks=1)
    for node, array in enumerate(build.arrays):
        build.memory[node][build.own(node)] = build.pad(array)[0]
    build.stages()
    shape = build.arrays[0].shape
    return CollectivePlan(torus, build.plan, lambda _, memory: build.unpad(memory).reshape(build.group, *shape))


def reduce_scatter(
    torus: Torus,
    data: Sequence[Array],
    axes: Sequence[int] | None = None,
    algorithm: Algorithm = "shortest",
    parts: int | None = None,
    barrier: bool = True,
    element_bytes: float | None = None,
    op: str = "sum",
) -> CollectivePlan:
    """reduce_scatter as messages: combine the operands of a group; node i of the group gets block i.

    Args:
      data: one array per node, [nodes of the group, ...].
      op: "sum", "max" or "min".
      The others as `all_gather`.
    Returns: CollectivePlan; results have the shape of one block.
    Example:
      >>> scatter = reduce_scatter(Torus((2,)), [np.array([1.0, 2.0]), np.array([10.0, 20.0])])
      >>> _ = scatter.run(Links(1e9))
      >>> [float(result) for result in scatter.results]
      [11.0, 22.0]
    """
    build = _Builder(torus, data, axes, algorithm, parts, barrier, element_bytes, blocks=None)
    shape = build.arrays[0].shape
    if not shape or shape[0] != build.group:
        raise HardwareError(f"reduce_scatter: operands must be [{build.group}, ...] for this group, not {shape}")
    build.fill()
    build.stages(_combine(op))
    count = math.prod(shape[1:])

    def read(node: int, memory: Array) -> Array:
        block: Array = memory[build.own(node)].reshape(-1)[:count]
        return block.reshape(shape[1:])

    return CollectivePlan(torus, build.plan, read)


def all_reduce(
    torus: Torus,
    data: Sequence[Array],
    axes: Sequence[int] | None = None,
    algorithm: Algorithm = "shortest",
    parts: int | None = None,
    barrier: bool = True,
    element_bytes: float | None = None,
    op: str = "sum",
) -> CollectivePlan:
    """all_reduce as messages: combine the operands of a group; every node obtains the result.

    Args: as `reduce_scatter`, data of any shape.
    Returns: CollectivePlan; results have the shape of the operand.
    Example:
      >>> reduce = all_reduce(Torus((2, 2)), [np.full(3, i) for i in range(4)], op="max")
      >>> _ = reduce.run(Links(1e9))
      >>> reduce.results[0].tolist()
      [3, 3, 3]
    """
    build = _Builder(torus, data, axes, algorithm, parts, barrier, element_bytes, blocks=None)
    build.fill()
    build.stages(after=build.stages(_combine(op)), first=len(build.axes))
    shape = build.arrays[0].shape
    count = math.prod(shape)

    def read(_: int, memory: Array) -> Array:
        return build.unpad(memory).reshape(-1)[:count].reshape(shape)

    return CollectivePlan(torus, build.plan, read)


def _combine(op: str) -> Combine:
    return COMBINE[one_of("reduction", op, COMBINE)]


class Group:
    """The participants of a collective: nodes that differ only along `axes`, with their coordinates."""

    def __init__(
        self, torus: Torus, data: Sequence[Array], axes: Sequence[int] | None, element_bytes: float | None
    ) -> None:
        self.arrays = check_data(torus, data)
        self.torus, self.axes = torus, check_axes(torus, axes)
        self.sizes = tuple(torus.shape[axis] for axis in self.axes)
        self.group = math.prod(self.sizes)
        self.wire = wire_bytes(self.arrays[0], element_bytes)
        self.places = [torus.coordinates(node) for node in range(torus.nodes)]

        # On a twisted torus a walk along a short axis may stay in the group but leave its row: regions are not boxes.
        self.boxes = not any(torus.closes(a, self.axes) and not torus.closes(a, (a,)) for a in self.axes)
        self.cosets: dict[tuple[int, frozenset[int]], tuple[int, ...]] = {}

    def own(self, node: int) -> tuple[int, ...]:
        """A node's position within its group."""
        return tuple(self.places[node][axis] for axis in self.axes)

    def coset(self, node: int, axes: Collection[int]) -> tuple[int, ...]:
        """Nodes reachable from a node by walks along `axes`, in ascending order. Each axis closes in the group."""
        key = node, frozenset(axes)
        if key not in self.cosets:
            reached = {node}
            for axis in key[1]:
                for start in tuple(reached):
                    here = self.torus.shifted(start, axis, 1)
                    while here not in reached:
                        reached.add(here)
                        here = self.torus.shifted(here, axis, 1)
            self.cosets |= dict.fromkeys([(member, key[1]) for member in reached], tuple(sorted(reached)))
        return self.cosets[key]

    def ring(self, axis: int, others: Collection[int]) -> Axis:
        """(length, whether it closes) of a walk along an axis; nodes connected through `others` count as one."""
        if self.boxes:
            return self.torus.shape[axis], self.torus.closes(axis, self.axes)
        same, n, here = self.coset(0, others), 1, self.torus.shifted(0, axis, 1)
        while here not in same:
            n, here = n + 1, self.torus.shifted(here, axis, 1)
        return n, True

    def spread(self, place: int, ring: Axis, step: int) -> list[tuple[int, slice]]:
        """(hops, halves) of a block's shortest paths in one direction; the antipode gets one half from each."""
        n, wrap = ring
        if not wrap:
            return [(h, BOTH) for h in range(1, (n - place) if step > 0 else place + 1)]
        out = [(h, BOTH) for h in range(1, (n - 1) // 2 + 1)]
        return out if n % 2 else [*out, (n // 2, HALVES[step])]


class _Builder(Group):
    """Lays out the memories and writes the messages, stage by stage."""

    def __init__(
        self,
        torus: Torus,
        data: Sequence[Array],
        axes: Sequence[int] | None,
        algorithm: str,
        parts: int | None,
        barrier: bool,
        element_bytes: float | None,
        blocks: int | None,
    ) -> None:
        super().__init__(torus, data, axes, element_bytes)
        self.algorithm = one_of("ring algorithm", algorithm, ALGORITHMS)
        self.parts = count_parts(parts, len(self.axes))
        size, dtype = self.arrays[0].size, self.arrays[0].dtype
        self.block = -(-size // (blocks or self.group))  # elements of a block
        self.unit = max(1, -(-self.block // (2 * self.parts)))
        self.piece = self.wire * Fraction(size, (blocks or self.group) * 2 * self.parts)
        shape = (*self.sizes, self.parts, 2, self.unit)
        self.memory = [np.zeros(shape, dtype) for _ in range(torus.nodes)]
        self.plan = MessagePlan(self.memory, barrier=barrier)

    def fill(self) -> None:
        for memory, array in zip(self.memory, self.arrays, strict=True):
            memory[...] = self.pad(array, self.group).reshape(memory.shape)

    def pad(self, array: Array, blocks: int = 1) -> Array:
        """[blocks, parts, 2, unit], each block followed by zeros."""
        flat = np.zeros(blocks * self.block, array.dtype)
        flat[: array.size] = array.reshape(-1)
        out = np.zeros((blocks, 2 * self.parts * self.unit), array.dtype)
        out[:, : self.block] = flat.reshape(blocks, self.block)
        return out.reshape(blocks, self.parts, 2, self.unit)

    def unpad(self, memory: Array) -> Array:
        return memory.reshape(self.group, -1)[:, : self.block]

    def stages(
        self, combine: Combine | None = None, after: Mapping[int, Arrivals] = MappingProxyType({}), first: int = 0
    ) -> dict[int, Arrivals]:
        """Write a reduce_scatter, or an all_gather if `combine` is None: each part takes the axes in its own rotation.

        A gather after a scatter takes the axes in reverse. Axes that are still (or already) whole are free. Returns,
        like `after`: for each part, the last messages to arrive at each node.
        """
        count, after = len(self.axes), dict(after)
        for stage in range(count):
            for part in range(self.parts):
                order = [self.axes[(part + j) % count] for j in range(count)][:: -1 if first else 1]
                free = set(order[:stage] if combine is None else order[stage + 1 :])
                arrivals = after.get(part, {})
                after[part] = self._ring_stage(part, order[stage], free, arrivals, first + stage, combine)
        return after

    def _ring_stage(
        self, part: int, axis: int, free: set[int], after: Arrivals, stage: int, combine: Combine | None
    ) -> Arrivals:
        """Write one stage along one axis, hop by hop. Regions span `free` axes, and one position of each other axis."""
        ring = self.ring(axis, free)
        number: dict[tuple[int, int, int], int] = {}  # (origin, direction, hop) -> message
        arrived: dict[int, list[int]] = {node: [] for node in range(self.torus.nodes)}
        hops = [
            (hop, step, node, half)
            for node in range(self.torus.nodes)
            for step, reach in self._reach(self.places[node][axis], ring, combine is not None)
            for hop, half in reach
        ]
        for hop, step, origin, half in sorted(hops, key=lambda h: (-h[0] if combine else h[0], h[2], -h[1])):
            near, far = (self.torus.shifted(origin, axis, step * h) for h in (hop - 1, hop))
            region = self._region(part, free, origin, half)
            source, target = (near, far) if combine is None else (far, near)
            link = self.torus.link(source, axis, step if combine is None else -step)
            before = number.get((origin, step, hop - 1 if combine is None else hop + 1))
            waits = after.get(source, ()) if combine is not None or hop == 1 else ()
            number[origin, step, hop] = len(self.plan.messages)
            if combine is None or hop == 1:
                arrived[target].append(len(self.plan.messages))
            self.plan.messages.append(
                Message(
                    source, target, (link,), region, region, self._bytes(free, half),
                    (*waits, *(() if before is None else (before,))), combine, stage,
                )
            )  # fmt: skip
        return {node: tuple(messages) or after.get(node, ()) for node, messages in arrived.items()}

    def _reach(self, place: int, ring: Axis, backwards: bool) -> list[tuple[int, list[tuple[int, slice]]]]:
        """[(direction, [(hops, halves)])] by which a block spreads from a position."""
        hops = range(1, ring[0])
        if ring[1] and self.algorithm == "oneway":
            return [(-1 if backwards else 1, [(h, BOTH) for h in hops])]
        if ring[1] and self.algorithm == "halves":
            return [(step, [(h, half) for h in hops]) for step, half in HALVES.items()]
        return [(step, self.spread(place, ring, step)) for step in HALVES]

    def _region(self, part: int, free: set[int], origin: int, half: slice) -> Region:
        place = self.places[origin]
        if self.boxes:
            return (*(slice(None) if a in free else place[a] for a in self.axes), part, half)
        members = np.array([self.own(node) for node in self.coset(origin, free)])
        return (*members.T, part, half)

    def _bytes(self, free: set[int], half: slice) -> Fraction:
        blocks = math.prod(self.torus.shape[axis] for axis in free) if self.boxes else len(self.coset(0, free))
        return self.piece * (blocks * len(range(*half.indices(2))))


def wire_bytes(array: Array, element_bytes: float | None) -> Fraction:
    """Bytes of one element on the wire: as given, by default its dtype's."""
    return Fraction(array.itemsize if element_bytes is None else amount("element_bytes", element_bytes))


def check_data(torus: Torus, data: Sequence[Array]) -> list[Array]:
    """Check one array per node, all of one shape and dtype and not empty."""
    check_torus(torus)
    try:
        arrays = [np.asarray(array) for array in data]
    except (TypeError, ValueError) as fault:
        raise HardwareError(f"data must be one array per node: {fault}") from None
    if len(arrays) != torus.nodes:
        raise HardwareError(f"need one array per node: {torus.nodes} for shape {torus.shape}, not {len(arrays)}")
    kinds = {(array.shape, str(array.dtype)) for array in arrays}
    if len(kinds) > 1:
        listing = "; ".join(f"{shape} {dtype}" for shape, dtype in sorted(kinds))
        raise HardwareError(f"the arrays of all nodes must have one shape and dtype; got {listing}")
    if arrays[0].size == 0 or arrays[0].dtype.kind not in "iufb":
        raise HardwareError(f"the arrays must hold numbers; got shape {arrays[0].shape}, dtype {arrays[0].dtype}")
    return arrays


def check_torus(torus: object) -> None:
    """Refuse anything but a `Torus`."""
    if not isinstance(torus, Torus):
        raise HardwareError(f"messages travel over a Torus(shape, wrap), not {torus!r}")


def check_axes(torus: Torus, axes: Sequence[int] | None) -> tuple[int, ...]:
    """Check the axes of a group: distinct axes of the torus, by default all."""
    chosen = tuple(range(torus.rank)) if axes is None else wholes("axes", axes)
    if not chosen or len(set(chosen)) != len(chosen) or any(axis not in range(torus.rank) for axis in chosen):
        raise HardwareError(f"axes {chosen} are not distinct axes of shape {torus.shape} (0 .. {torus.rank - 1})")
    return tuple(sorted(chosen))
