"""The splits of one candidate at each node of a dataflow, by axis: forms of values, times, and collectives between.

Each mesh axis splits a product along one of its dims, or not at all. Over a dim by which a weight is stationary
(`meshlib.lowering.balance`) it splits the product along that dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from meshlib.core.compiler import Compiler
from meshlib.estimation.time.kernel_times import Times
from meshlib.estimation.time.physics import Physics
from meshlib.lowering.assigned import stationary_axes
from meshlib.searching.bounds.collectives import GATHER, REDUCE, SCATTER, SWAP, Machine
from meshlib.searching.bounds.dataflow import Bytes, Edge, Flow, HbmUse, Node, Placed, Split
from meshlib.searching.renamed_dims import Names, Passages
from meshlib.searching.space import Candidate

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Ints: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
# Form of a value over one axis: the dim along which it is split, or one of these.
WHOLE, SUM, ANY, FREE = "", "+", "*", "?"  # replicated; pending sum; any form accepted; unknown
KINDS = ("", GATHER, SCATTER, REDUCE, SWAP)


class ProductTraffic(NamedTuple):
    """Lower bounds on the HBM traffic of a product, in bytes: all; what the program computes; what is no operand."""

    moved_bytes: float
    late_bytes: float
    beside_bytes: float


@dataclass(frozen=True, eq=False)
class Options:
    """The splits of a node over an axis, None for no split: numbers of its factors, and the form of its result."""

    splits: tuple[Split | None, ...]
    numbers: tuple[int | None, ...]
    results: tuple[str, ...]

    @staticmethod
    def of(node: Node, chosen: Sequence[Split | None]) -> Options:
        """Options from some of a node's splits."""
        numbers = tuple(None if s is None or node.splits is None else node.splits.index(s) for s in chosen)
        forms = [WHOLE if s is None else FREE if s.free else SUM if s.output is None else s.output for s in chosen]
        return Options(tuple(chosen), numbers, tuple(forms) if node.splits is not None else (FREE,))

    def required(self, operand: int) -> tuple[str, ...]:
        """The form that each option requires of an operand."""
        return tuple(ANY if s is None else FREE if s.free else s.operands[operand] or WHOLE for s in self.splits)


@dataclass(eq=False)
class NodeSplits:
    """The splits of one candidate.

    `physics`: constants of the estimate; `compiler`: decides whether weights are stationary;
    `shared`: cache for all candidates with the same program and chip.
    """

    candidate: Candidate
    passages: Passages
    physics: Physics
    compiler: Compiler
    shared: dict[object, Any] = field(default_factory=dict)
    _homes: dict[Placed, Sequence[str]] = field(default_factory=dict)
    _known: dict[object, Any] = field(default_factory=dict)

    @cached_property
    def axes(self) -> Sequence[tuple[str, frozenset[str], int]]:
        """The axes of more than one device: name, dims that they may split, size."""
        return [axis for axis in self.candidate.named_splits if axis[2] > 1]

    @cached_property
    def _beyond_slots(self) -> Sequence[frozenset[str]]:
        """For each of these axes, the dims for which it has rules beyond slots."""
        rules = [rule for rule in self.candidate.layout.rules if rule.scope != "slots"]
        return [frozenset(rule.dim for rule in rules if name in rule.axes) for name, *_ in self.axes]

    @cached_property
    def group(self) -> Sequence[int]:
        """The sizes of these axes."""
        return [size for _, _, size in self.axes]

    @cached_property
    def machine(self) -> Machine:
        """The axes on the slice."""
        return Machine(self.candidate.slice, tuple(self.group), self.compiler.whole_torus_axes)

    # ------------------------------------------------------------ options

    def options(self, node: Node, axis: int) -> Options:
        """The splits of a product or attention over an axis; other nodes have one option."""
        key = node, axis
        options: Options | None = self._known.get(key)
        if options is None:
            options = self._known[key] = self._shared_options(node, axis)
        return options

    def _shared_options(self, node: Node, axis: int) -> Options:
        _, dims, size = self.axes[axis]
        staying = self._stationary(node, axis)
        key = node, dims, self._beyond_slots[axis], size, staying
        options: Options | None = self.shared.get(key)
        if options is None:
            options = self.shared[key] = Options.of(node, _possible(*key))
        return options

    def _stationary(self, node: Node, axis: int) -> tuple[int, str] | None:
        """(operand, dim) of a weight that an axis splits along this dim, if it is stationary over the axis."""
        if not self.compiler.stationary_weights or len(node.held) != 1:  # two weights may not both stay
            return None
        ((operand, placed),) = node.held
        dim = self.home(placed, axis)
        return (operand, dim) if dim and self._stays(placed, axis) else None

    def _stays(self, placed: Placed, axis: int) -> bool:
        """True if a weight is stationary over an axis, through any of its dims."""
        layout, name = self.candidate.layout, self.axes[axis][0]
        return any(name in stationary_axes(layout, d) for d in placed.shape)

    def home(self, placed: Placed, axis: int) -> str:
        """The dim along which an axis splits a placed value, or WHOLE."""
        homes = self._homes.get(placed)
        if homes is None:
            c = self.candidate
            sharding = c.layout.fitting(placed.shape, c.mesh, placed.scope)
            dim_of = {name: dim for dim in placed.shape.names for name in sharding.of(dim)}
            homes = self._homes[placed] = [dim_of.get(name, WHOLE) for name, *_ in self.axes]
        return homes[axis]

    # ------------------------------------------------------------ times

    def seconds(self, flow: Flow, number: int) -> tuple[Floats, Floats]:
        """For each joint option of all axes: seconds of a product or attention, and its earliest end if the program
        starts at 0; zeros for other nodes."""
        node = flow.nodes[number]
        if node.attention is None and node.product is None:
            return _NOTHING
        traffic = self.traffic(flow, number)
        each = [self.options(node, n) for n in range(len(self.axes))]
        key = node, traffic, *each, *self.group
        seconds: tuple[Floats, Floats] | None = self.shared.get(key)
        if seconds is None:
            joint = [*product(*(o.numbers for o in each))]
            seconds = self.shared[key] = self.joint_seconds(node, joint, lambda summed: traffic)
        return seconds

    def traffic(self, flow: Flow, number: int, devices: int | None = None, summed: int = 1) -> ProductTraffic:
        """The HBM traffic of a product; given `devices`, its part if all of them split every operand and result.

        summed: the number of devices among them that have parts of one sum, and so the same elements of the result.
        """
        node = flow.nodes[number]
        if node.product is None:
            return ProductTraffic(0.0, 0.0, 0.0)
        beside = sum(self._moved_bytes(use, devices and devices // summed) for use in flow.written[number])
        beside += sum(self._moved_bytes(use, devices) for use in node.beside)
        late = beside + sum(self._moved_bytes(use, devices) for use in node.reads if not use.early)
        moved = late + sum(self._moved_bytes(use, devices) for use in node.reads if use.early)
        return ProductTraffic(moved, late, beside)

    def joint_seconds(
        self, node: Node, joint: Sequence[Sequence[int | None]], traffic: Callable[[int], ProductTraffic]
    ) -> tuple[Floats, Floats]:
        """Seconds of a product or attention under joint options of all axes, and its earliest end if the program starts
        at 0. `traffic`: given the number of devices that have parts of one sum."""
        cuts = [self._cuts(numbers) for numbers in joint]
        chip = self.candidate.slice.chip
        if node.attention is not None:
            attention_seconds = node.attention.seconds(chip, self.physics)
            if attention_seconds is None:  # no rate: the candidate will be refused
                return np.zeros(len(cuts)), np.zeros(len(cuts))
            whole, rounded = attention_seconds
            own = np.array([max(0.0, whole / prod(c.values()) - rounded) + chip.launch_seconds for c in cuts])
            return own, own
        assert node.product is not None
        unknown = node.smaller or (node.laid and node.product.sides_of_factors is None)
        if unknown or chip.peak(node.product.whole.dtype) is None:
            return np.zeros(len(cuts)), np.zeros(len(cuts))
        sums = [n for n, s in enumerate(node.splits or ()) if s.output is None and not s.free]
        summed = [prod(c.get(n, 1) for n in sums) for c in cuts]
        traffic_of = {n: traffic(n) for n in set(summed)}
        parts = [self._part_seconds(node, c, traffic_of[n]) for c, n in zip(cuts, summed, strict=True)]
        busy, since_start = np.array(parts).T
        return busy + chip.launch_seconds, since_start + chip.launch_seconds

    def _part_seconds(self, node: Node, cuts: Mapping[int, int], traffic: ProductTraffic) -> tuple[float, float]:
        """Seconds of one device's part of a product, and its earliest end if the program starts at 0; no launch."""
        key = node, frozenset(cuts.items()), traffic
        seconds: tuple[float, float] | None = self.shared.get(key)
        if seconds is None:
            assert node.product is not None
            chip = self.candidate.slice.chip
            moves = self.physics.block_edge > 0 and not chip.cmem_bytes
            part = node.product.timed(chip, self.physics, cuts, moves, node.laid)
            seconds = self.shared[key] = part.seconds(*traffic)
        return seconds

    def _cuts(self, numbers: Sequence[int | None]) -> dict[int, int]:
        """Factor number -> number of parts, for one joint option."""
        cuts: dict[int, int] = {}
        for number, size in zip(numbers, self.group, strict=True):
            if number is not None:
                cuts[number] = cuts.get(number, 1) * size
        return cuts

    def _moved_bytes(self, use: HbmUse, devices: int | None) -> float:
        """HBM bytes of one operand or result, without what may stay on the chip between its uses.

        A value passed between kernels stays whole or not at all, except for a part in CMEM.
        """
        least = self.least_bytes(use.sizes, ()) if devices is None else min(use.sizes.values()) / devices
        if use.early or self.candidate.slice.chip.cmem_bytes:
            return max(0.0, least - self._held_bytes)
        return least if least > self._held_bytes else 0.0

    @cached_property
    def _held_bytes(self) -> int:
        """Bytes that a chip can keep between kernels."""
        return Times(self.candidate.slice.chip, self.physics).held_bytes

    # ------------------------------------------------------------ edges

    def kinds(self, source: Node, target: Node, edge: Edge, axis: int) -> Ints:
        """Collectives (as indices into KINDS) for each pair of options of both ends."""
        left = self.options(source, axis) if source.placed is None else self.home(source.placed, axis)
        needed = self.options(target, axis) if edge.home is None else self.home(edge.home, axis)
        key = edge, left, needed
        kinds: Ints | None = self.shared.get(key)
        if kinds is None:
            results = left.results if isinstance(left, Options) else (left,)
            required: tuple[str, ...] = (FREE,)
            if not isinstance(needed, Options):
                required = (needed,)
            elif target.splits is not None:
                required = needed.required(edge.operand)
            kinds = self.shared[key] = np.array([[self.kind(a, b, edge) for b in required] for a in results], np.int64)
        return kinds

    def kind(self, left: str, needed: str, edge: Edge) -> int:
        """Collective (as an index into KINDS) that converts one form into another."""
        if left in (FREE, WHOLE):
            return 0
        if left == SUM:
            if edge.linear and edge.taken and needed in (ANY, FREE):
                return 0
            return KINDS.index(REDUCE if needed in (ANY, WHOLE) and not edge.of_sums else SCATTER)
        if edge.of_sums:
            return 0
        if needed in (ANY, WHOLE):
            return KINDS.index(GATHER)
        return 0 if needed == FREE or self.passages.same(left, needed) else KINDS.index(SWAP)

    def least_bytes(self, sizes: Bytes, axes: Sequence[int]) -> float:
        """Smallest bytes on a device if all other axes split whatever they may."""
        others = [(dims, size) for n, (_, dims, size) in enumerate(self.axes) if n not in axes]
        least = float("inf")
        for names, whole in sizes.items():
            parts = 1
            for dims, size in others:
                if names is None or not names.isdisjoint(dims):
                    parts *= size
            least = min(least, whole / parts)
        return least


_NOTHING = (np.zeros(1), np.zeros(1))


def _possible(
    node: Node, dims: Names, beyond_slots: Names, size: int, staying: tuple[int, str] | None
) -> Sequence[Split | None]:
    """The splits of a node by an axis of that size, which has rules for these dims, and for some `beyond_slots`; None
    for no split.

    If a weight is stationary, only those that leave it split as it is, unless there are none.
    """
    if node.splits is None:
        return (None,)
    splits = [
        s for s in node.splits
        if s.size % size == 0 and (s.reached is None or s.reached & (dims if s.of_slots else beyond_slots))
    ]  # fmt: skip
    if staying is not None and not any(s.free for s in splits):
        operand, dim = staying
        left = [s for s in splits if s.operands[operand] == dim]
        if left:
            return left
    return [*splits, None]
