"""all_gather, reduce_scatter and all_reduce as messages over the links of a torus.

Each function takes one array per node and returns a `Collective`, whose messages `hardware.events` runs,
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hardware.checks import amount, one_of, wholes
from hardware.collectives import ALGORITHMS, Algorithm, count_parts
from hardware.errors import HardwareError
from hardware.events import Links, Message, Plan, Region, Traffic, simulate
from hardware.numerics import COMBINE
from hardware.torus import Torus

Array = NDArray[Any]
Arrivals = dict[int, tuple[int, ...]]


@dataclass
class Collective:
    """Messages of one collective, and how to read every node's result from its memory afterwards."""

    torus: Torus
    plan: Plan
    read: Callable[[int, Array], Array]

    def run(self, links: Links) -> Traffic:
        """Simulate it alone; `results` then holds what every node ends with."""
        return simulate(self.torus, links, [self.plan])

    @property
    def results(self) -> list[Array]:
        """One array per node (after a simulation)."""
        return [self.read(node, memory) for node, memory in enumerate(self.plan.memory)]


def run_together(links: Links, collectives: Sequence[Collective]) -> Traffic:
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
    if not isinstance(collectives, (list, tuple)) or not all(isinstance(c, Collective) for c in collectives):
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
) -> Collective:
    """Every node obtains the blocks of its group, the nodes that differ only along `axes`.

    Args:
      blocks: one array per node, equal shapes.
      axes: torus axes of the group (default all); order does not matter.
      algorithm: "oneway", "halves" or "shortest" on wrapped axes; others are lines.
      parts: 1, or one per axis (default).
      barrier: stages begin together everywhere; else each node goes on when it can.
      element_bytes: size of an element on the wire (default its own).
    Returns: Collective; results are [nodes of the group in row-major order, *block shape].
    Raises: HardwareError for a wrong number or unequal shapes of blocks, or unknown axes.
    Example:
      >>> gather = all_gather(Torus((3,)), [np.array([i, -i]) for i in range(3)])
      >>> gather.run(Links(8e6, 0)).seconds, gather.results[2].tolist()
      (2e-06, [[0, 0], [1, -1], [2, -2]])
    """
    build = _Builder(torus, blocks, axes, algorithm, parts, barrier, element_bytes, blocks=1)
    for node in range(torus.nodes):
        build.memory[node][build.own(node)] = build.pad(np.asarray(blocks[node]))[0]
    build.gather({}, first_stage=0)
    shape = np.asarray(blocks[0]).shape
    return Collective(torus, build.plan, lambda _, memory: build.unpad(memory).reshape(build.group, *shape))


def reduce_scatter(
    torus: Torus,
    data: Sequence[Array],
    axes: Sequence[int] | None = None,
    algorithm: Algorithm = "shortest",
    parts: int | None = None,
    barrier: bool = True,
    element_bytes: float | None = None,
    op: str = "sum",
) -> Collective:
    """Combine the operands of a group; node i of the group keeps block i.

    Args:
      data: one array per node, [nodes of the group, ...].
      op: "sum", "max" or "min".
      The others as `all_gather`.
    Returns: Collective; results have the shape of one block.
    Example:
      >>> scatter = reduce_scatter(Torus((2,)), [np.array([1.0, 2.0]), np.array([10.0, 20.0])])
      >>> _ = scatter.run(Links(1e9))
      >>> [float(result) for result in scatter.results]
      [11.0, 22.0]
    """
    build = _Builder(torus, data, axes, algorithm, parts, barrier, element_bytes, blocks=None)
    shape = np.asarray(data[0]).shape
    if not shape or shape[0] != build.group:
        raise HardwareError(f"reduce_scatter: operands must be [{build.group}, ...] for this group, not {shape}")
    build.fill(data)
    build.scatter(_combine(op), {})
    count = math.prod(shape[1:])

    def read(node: int, memory: Array) -> Array:
        return memory[build.own(node)].reshape(-1)[:count].reshape(shape[1:])

    return Collective(torus, build.plan, read)


def all_reduce(
    torus: Torus,
    data: Sequence[Array],
    axes: Sequence[int] | None = None,
    algorithm: Algorithm = "shortest",
    parts: int | None = None,
    barrier: bool = True,
    element_bytes: float | None = None,
    op: str = "sum",
) -> Collective:
    """Combine the operands of a group; every node obtains all of it.

    Args: as `reduce_scatter`, data of any shape.
    Returns: Collective; results have the shape of the operand.
    Example:
      >>> reduce = all_reduce(Torus((2, 2)), [np.full(3, i) for i in range(4)], op="max")
      >>> _ = reduce.run(Links(1e9))
      >>> reduce.results[0].tolist()
      [3, 3, 3]
    """
    build = _Builder(torus, data, axes, algorithm, parts, barrier, element_bytes, blocks=None)
    build.fill(data)
    after = build.scatter(_combine(op), {})
    build.gather(after, first_stage=len(build.axes))
    shape = np.asarray(data[0]).shape
    count = math.prod(shape)

    def read(_: int, memory: Array) -> Array:
        return build.unpad(memory).reshape(-1)[:count].reshape(shape)

    return Collective(torus, build.plan, read)


def _combine(op: str) -> Callable[[Array, Array], Array]:
    return COMBINE[one_of("reduction", op, COMBINE)]


class _Builder:
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
        self.torus, self.algorithm = torus, algorithm
        arrays = check_data(torus, data)
        self.axes = check_axes(torus, axes)
        one_of("ring algorithm", algorithm, ALGORITHMS)
        self.sizes = tuple(torus.shape[axis] for axis in self.axes)
        self.group = math.prod(self.sizes)
        self.parts = count_parts(parts, len(self.axes))
        self.block = -(-arrays[0].size // (blocks or self.group))  # elements of a block
        self.unit = max(1, -(-self.block // (2 * self.parts)))
        pieces = (blocks or self.group) * 2 * self.parts
        self.piece = wire_bytes(arrays[0], element_bytes) * Fraction(arrays[0].size, pieces)
        shape = (*self.sizes, self.parts, 2, self.unit)
        self.memory = [np.zeros(shape, arrays[0].dtype) for _ in range(torus.nodes)]
        self.plan = Plan(self.memory, barrier=barrier)
        self.places = [torus.coordinates(node) for node in range(torus.nodes)]

    def fill(self, data: Sequence[Array]) -> None:
        for node in range(self.torus.nodes):
            self.memory[node][...] = self.pad(np.asarray(data[node]), self.group).reshape(self.memory[node].shape)

    def pad(self, array: Array, blocks: int = 1) -> Array:
        """[blocks, parts, 2, unit], each block followed by zeros."""
        flat = np.zeros(blocks * self.block, array.dtype)
        flat[: array.size] = array.reshape(-1)
        out = np.zeros((blocks, 2 * self.parts * self.unit), array.dtype)
        out[:, : self.block] = flat.reshape(blocks, self.block)
        return out.reshape(blocks, self.parts, 2, self.unit)

    def unpad(self, memory: Array) -> Array:
        return memory.reshape(self.group, -1)[:, : self.block]

    def own(self, node: int) -> Region:
        return tuple(self.places[node][axis] for axis in self.axes)

    def gather(self, after: dict[int, Arrivals], first_stage: int) -> None:
        """All parts, stage by stage; where a scatter went before, its axes in reverse."""
        self._stages(after, first_stage, None, backwards=first_stage > 0)

    def scatter(self, combine: Callable[[Array, Array], Array], after: dict[int, Arrivals]) -> dict[int, Arrivals]:
        return self._stages(after, 0, combine, backwards=False)

    def _stages(
        self, after: dict[int, Arrivals], first: int, combine: Callable[[Array, Array], Array] | None, backwards: bool
    ) -> dict[int, Arrivals]:
        """Every part along its own rotation of the axes; the axes still (or already) held whole are free."""
        count = len(self.axes)
        for stage in range(count):
            for part in range(self.parts):
                order = [self.axes[(part + j) % count] for j in range(count)]
                if backwards:
                    order.reverse()
                free = set(order[:stage] if combine is None else order[stage + 1 :])
                arrivals = after.get(part, {})
                after[part] = self._ring_stage(part, order[stage], free, arrivals, first + stage, combine)
        return after

    def _ring_stage(
        self,
        part: int,
        axis: int,
        free: set[int],
        after: Arrivals,
        stage: int,
        combine: Callable[[Array, Array], Array] | None,
    ) -> Arrivals:
        """One axis; messages are numbered hop by hop. `free` axes are taken whole, others at one place."""
        number: dict[tuple[int, int, int], int] = {}  # (origin, direction, hop) -> message
        arrived: dict[int, list[int]] = {node: [] for node in range(self.torus.nodes)}
        hops = [
            (hop, step, node, half)
            for node in range(self.torus.nodes)
            for step, count in self._reach(self.places[node][axis], axis, combine is not None)
            for hop, half in count
        ]
        for hop, step, origin, half in sorted(hops, key=lambda h: (-h[0] if combine else h[0], h[2], -h[1])):
            near, far = self.torus.shifted(origin, axis, step * hop), self.torus.shifted(origin, axis, step * (hop + 1))
            region = self._region(part, axis, free, origin, half)
            source, target = (near, far) if combine is None else (far, near)
            link = self.torus.link(source, axis, step if combine is None else -step)
            before = number.get((origin, step, hop - 1 if combine is None else hop + 1))
            waits = after.get(source, ()) if combine is not None or hop == 0 else ()
            number[origin, step, hop] = len(self.plan.messages)
            if combine is None or hop == 0:
                arrived[target].append(len(self.plan.messages))
            self.plan.messages.append(
                Message(
                    source, target, (link,), region, region, self._bytes(free, half),
                    (*waits, *(() if before is None else (before,))), combine, stage,
                )
            )  # fmt: skip
        return {node: tuple(messages) or after.get(node, ()) for node, messages in arrived.items()}

    def _reach(self, place: int, axis: int, backwards: bool) -> list[tuple[int, list[tuple[int, int | None]]]]:
        """[(direction, [(hop, half or None for both)])] in which a block spreads from `place`."""
        n = self.torus.shape[axis]
        if not self.torus.wrap[axis]:
            return [(1, [(h, None) for h in range(n - 1 - place)]), (-1, [(h, None) for h in range(place)])]
        if self.algorithm == "oneway":
            return [(-1 if backwards else 1, [(h, None) for h in range(n - 1)])]
        if self.algorithm == "halves":
            return [(1, [(h, 0) for h in range(n - 1)]), (-1, [(h, 1) for h in range(n - 1)])]
        forth: list[tuple[int, int | None]] = [(h, None) for h in range((n - 1) // 2)]
        back = list(forth)
        if n % 2 == 0:
            forth.append((n // 2 - 1, 0))
            back.append((n // 2 - 1, 1))
        return [(1, forth), (-1, back)]

    def _region(self, part: int, axis: int, free: set[int], origin: int, half: int | None) -> Region:
        place = self.places[origin]
        blocks = tuple(slice(None) if a in free else place[a] for a in self.axes)
        return (*blocks, part, slice(None) if half is None else half)

    def _bytes(self, free: set[int], half: int | None) -> Fraction:
        blocks = math.prod(self.torus.shape[axis] for axis in free)
        return self.piece * (blocks * (2 if half is None else 1))


def wire_bytes(array: Array, element_bytes: float | None) -> Fraction:
    """Bytes of one element on the wire: as given, or its own."""
    return Fraction(array.itemsize if element_bytes is None else amount("element_bytes", element_bytes))


def check_data(torus: Torus, data: Sequence[Array]) -> list[Array]:
    """One array per node, all of one shape and dtype, at least one element."""
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
    """The axes of a group: all, or some of them without repetition."""
    chosen = tuple(range(torus.rank)) if axes is None else wholes("axes", axes)
    if not chosen or len(set(chosen)) != len(chosen) or any(axis not in range(torus.rank) for axis in chosen):
        raise HardwareError(f"axes {chosen} are not distinct axes of shape {torus.shape} (0 .. {torus.rank - 1})")
    return tuple(sorted(chosen))
