"""Lower bounds of a candidate before it is lowered, from the program on one device.

* Time: every product and every fused attention at its kernel's peak or its HBM bandwidth, split in the best way over
  all axes that could split it (`split_products`), with its launch; and the HBM time of element-wise kernels
  (`elements`). Kernels are serial, so their times add up. An axis may split an operation only along a dim for which the
  layout has a rule (strategies of the lowering), under any later name of the dim; an axis without a rule for any of its
  dims duplicates the operation on every device.
* Memory: variables, slots and inputs are resident, sharded as the layout says: exact. The stacked outputs of one loop
  (activations for the backward pass) are live while their consumer loop runs, besides that loop's own stacked outputs,
  each divided by all axes that could split it.

Both are sound: no estimate is below them, which tests verify on small spaces for all candidates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any, TypeAlias

import numpy as np

from hardware.chips import Chip
from hardware.memory import hbm_seconds
from hardware.slices import Slice
from layouts import Shape
from meshlib.core.compiler import Compiler
from meshlib.core.graph import Operation
from meshlib.estimation.time.kernel_times import Times
from meshlib.estimation.time.physics import CALIBRATED, Physics
from meshlib.estimation.work.products import attention_of, mxu_dtype
from meshlib.lowering.assigned import scope_of
from meshlib.program.instructions import Compute, Loop, Value
from meshlib.program.records import Program, walk
from meshlib.searching.bounds.core_time import CoreTime
from meshlib.searching.bounds.critical_path import CriticalPath
from meshlib.searching.bounds.dataflow import Flow
from meshlib.searching.bounds.elements import element_traffic, is_product
from meshlib.searching.bounds.flow_tracing import flow_of, is_gradient
from meshlib.searching.bounds.node_splits import NodeSplits
from meshlib.searching.bounds.products import ProductKernel
from meshlib.searching.bounds.shared_splits import Batch
from meshlib.searching.bounds.split_products import SplitProducts
from meshlib.searching.renamed_dims import Names, Passages
from meshlib.searching.space import Candidate

Bools: TypeAlias = np.ndarray[tuple[int], np.dtype[np.bool_]]
BATCH = 128  # candidates whose core time is bounded at once
Floats: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, eq=False)
class _Times:
    """Seconds on one chip.

    `attention`: seconds of each kind; `rounded`: the part of it lost when a split rounds its scores down; `elements`:
    HBM seconds of element-wise kernels, by kinds of values; `sizes`: bytes of one, which stays on the chip up to
    `held_bytes`; `launch_seconds`: seconds of all launches.
    """

    products: SplitProducts
    attention: Floats
    rounded: Floats
    elements: Floats
    sizes: Floats
    held_bytes: int
    launch_seconds: float


@dataclass(frozen=True, eq=False)
class Bounds:
    """Lower bounds for all layouts of one program.

    Attributes:
      kernels: for each kind of product, its runs per step, their HBM traffic besides operands, and its smallest use.
      elements: HBM traffic of element-wise kernels per step, by the dims that can split a value, its bytes, and whether
        its kernel may run after the products of a trip.
      resident: number of variables, slots and inputs of each shape, scope and width in bytes.
      moments: bytes of stacked values by the dims that can split them, at several times; the peak is at least each.
      placed: among them, for each moment, bytes of those that the layout shards, by the shape and scope under which it
        does: gradients, and carries before each trip. A carry is whole over an axis that does not split it, and then a
        copy of which the axis has only a part saves no collective: the stack keeps the carry.
      alone: whether there is a single product, which runs without the losses of a whole program.
    """

    kernels: Mapping[ProductKernel, tuple[int, float, float]]
    elements: Mapping[tuple[Names | None, int, bool], int]
    resident: Mapping[tuple[Shape, str, float], int]
    moments: Sequence[Mapping[Names | None, int]]
    placed: Sequence[Mapping[tuple[Shape, str], int]]
    alone: bool
    flow: Flow
    passages: Passages
    compiler: Compiler
    _hits: dict[Names, np.ndarray[tuple[int], np.dtype[np.bool_]]] = field(default_factory=dict)
    _times: dict[tuple[Chip, int], _Times | None] = field(default_factory=dict)
    _parts_of: dict[object, Floats] = field(default_factory=dict)
    _seconds_of: dict[object, float] = field(default_factory=dict)  # seconds of all kernels, by chip and splits
    _named: dict[object, Bools] = field(default_factory=dict)
    _known: dict[Chip, dict[object, Any]] = field(default_factory=dict)  # shared by the closer bounds of all candidates

    @staticmethod
    def of(whole: Program, operations: Iterable[Operation], settled: bool = False) -> Bounds:
        """Bounds from the program lowered for one device, and all its operations; `settled` as of `Passages`."""
        passages = Passages.of(operations, settled)
        kernels: dict[ProductKernel, tuple[int, float, float]] = {}
        products = 0
        flow = flow_of(whole, passages)
        contractions = {of.instruction: (of, node.smaller, uses) for node, of, uses in flow.products}
        for i, program, times in walk(whole):
            if not isinstance(i, Compute) or not is_product(i):
                continue
            products += 1
            dims, beside = passages.split(*(v.tensor.shape for v in (*i.inputs, *i.outputs))), list[float]()
            if i in contractions:
                of, smaller, uses = contractions[i]
                if smaller:
                    continue
                factors = of.factors(passages)
                kind = ProductKernel(dims, mxu_dtype(i), None, of.untiled, factors, of.operands, of.sorted_rows)
                beside = [min(use.sizes.values()) for use in uses]
            else:
                kind = ProductKernel(dims, "bf16", attention_of(program, i))
            count, moved, smallest = kernels.get(kind, (0, 0.0, inf))
            kernels[kind] = count + times, moved + times * sum(beside), min([smallest, *beside])
        held: Counter[tuple[Shape, str, float]] = Counter()
        for v in (*whole.variables.values(), *whole.inputs.values()):
            if not v.tensor.on_host:
                held[v.tensor.shape, scope_of(v.tensor), v.local_bytes / max(1, v.local_size)] += 1
        moments, placed = [], []
        for values in _moments(whole):
            sizes: Counter[Names | None] = Counter()
            homes: Counter[tuple[Shape, str]] = Counter()
            for v, carry in values.items():
                sizes[passages.split(v.tensor.shape)] += v.local_bytes
                if carry is not None:
                    homes[carry.tensor.shape, scope_of(carry.tensor)] += v.local_bytes
                elif is_gradient(v):
                    homes[v.tensor.shape, "slots"] += v.local_bytes
            moments.append(sizes)
            placed.append(homes)
        elements = element_traffic(whole, passages, flow.full)
        return Bounds(kernels, elements, held, moments, placed, products < 2, flow, passages, whole.compiler)

    # ------------------------------------------------------------ time

    def seconds(self, c: Candidate) -> float:
        """Lower bound on the seconds of a step."""
        times = self._times_on(c.slice)
        if times is None:
            return 0.0
        chip_splits = c.slice.chip, c.splits
        seconds = self._seconds_of.get(chip_splits)
        if seconds is None:
            parts, ends = self._most_parts(c), self._ends
            attention = np.maximum(times.attention / parts[: ends[0]] - times.rounded, 0.0).sum()
            moved, _ = self._element_seconds(c)
            seconds = times.launch_seconds + float(attention) + moved + times.products.seconds(c.splits)
            self._seconds_of[chip_splits] = seconds
        return self._whole_step(c, seconds)

    @property
    def physics(self) -> Physics:
        """The constants of the estimate."""
        return CALIBRATED.without_losses() if self.alone else CALIBRATED

    def critical_path_seconds(self, c: Candidate) -> float:
        """A lower bound from the chain of products and collectives, at a hundred times the cost of `seconds`."""
        shared = self._known.setdefault(c.slice.chip, {})
        splits = NodeSplits(c, self.passages, self.physics, self.compiler, shared)
        return self._whole_step(c, CriticalPath(splits).seconds(self.flow))

    def core_time_seconds(self, candidates: Sequence[Candidate]) -> list[float]:
        """Lower bounds that include what collectives take of the core, for many candidates at once."""
        batches: dict[tuple[Chip, int], list[int]] = {}
        for n, c in enumerate(candidates):
            count = sum(size > 1 for _, size in c.splits)
            batches.setdefault((c.slice.chip, count), []).append(n)
        seconds = [0.0] * len(candidates)
        for (chip, count), numbers in batches.items():
            for at in range(0, len(numbers) if count else 0, BATCH):
                own = [candidates[n] for n in numbers[at : at + BATCH]]
                shared = self._known.setdefault(chip, {})
                batch = Batch(own, self.passages, self.physics, self.compiler, shared)
                elements, trailing = np.array([self._element_seconds(c) for c in own]).T
                core = CoreTime(batch).seconds(self.flow, elements, trailing)
                for n, c, value in zip(numbers[at : at + BATCH], own, core.tolist(), strict=True):
                    seconds[n] = self._whole_step(c, value)
        return seconds

    def _element_seconds(self, c: Candidate) -> tuple[float, float]:
        """Lower bounds on the seconds of element-wise kernels in a step, and of those that may end a trip."""
        times = self._times_on(c.slice)
        if times is None:
            return 0.0, 0.0
        cuts = self._most_parts(c)[self._ends[0] : self._ends[1]]
        moved = np.where(times.sizes / cuts > times.held_bytes, times.elements / cuts, 0.0)
        return float(moved.sum()), float(moved @ [trails for *_, trails in self.elements])

    def _whole_step(self, c: Candidate, seconds: float) -> float:
        """Seconds plus jitter between slices and the overhead of a step."""
        jitter = CALIBRATED.jitter(c.slice.slices) * self.compiler.slice_jitter
        return seconds * (1 + jitter) + self.compiler.step_overhead_seconds

    def _times_on(self, where: Slice) -> _Times | None:
        """Kernel times on a slice's chip, cached."""
        key = where.chip, where.slices
        if key not in self._times:
            self._times[key] = self._timed(where)
        return self._times[key]

    def _timed(self, where: Slice) -> _Times | None:
        """Kernel times on a slice's chip; None if the chip cannot run a kernel, which the estimate will report."""
        chip = where.chip
        rounded, attention = [], []
        for kernel, (count, *_) in self.kernels.items():
            if chip.peak(kernel.dtype) is None:
                return None
            seconds = kernel.seconds(chip, self.physics) if kernel.attention is not None else (0.0, 0.0)
            assert seconds is not None
            attention.append(count * seconds[0])
            rounded.append(count * seconds[1])
        passing = [hbm_seconds(chip, size) for size in self.elements.values()] if self._moves(chip) else []
        elements = np.array(passing or [0.0] * len(self.elements))
        sizes = np.array([size for _, size, _ in self.elements], float)
        launches = sum(count for count, *_ in self.kernels.values())
        kinds = [(k, *own) for k, own in self.kernels.items() if k.attention is None]
        chip_times = Times(chip, self.physics)
        products = SplitProducts(chip_times, kinds, self._moves(chip))
        return _Times(
            products, np.array(attention), np.array(rounded), elements, sizes, chip_times.held_bytes,
            launches * chip.launch_seconds,
        )  # fmt: skip

    def _moves(self, chip: Chip) -> bool:
        """True if values between kernels are known to pass through HBM; a common memory (CMEM of v4) may hold some."""
        return not (self.alone or chip.cmem_bytes)

    # ------------------------------------------------------------ memory

    def held_bytes(self, c: Candidate) -> float:
        """Lower bound on a device's peak bytes, without padding.

        Raises: LayoutError if the layout cannot shard a variable.
        """
        total = 0.0
        for (shape, scope, width), count in self.resident.items():
            total += count * width * c.layout.sharding(shape, c.mesh, scope).local_size
        parts = [c.layout.fitting(shape, c.mesh, scope).local_size / shape.size for shape, scope in self._homes]
        return total + self._stacked(c, self._excess_bytes(c, parts))

    def _excess_bytes(self, c: Candidate, parts: Sequence[float] | Floats) -> Floats:
        """For each moment, the bytes of placed values beyond what they take where all axes split them that could.

        `parts`: the part that a device has of each of `_homes`.
        """
        most = self._most_parts(c)[len(self._bytes) :]
        excess = np.maximum(0.0, np.asarray(parts) - 1 / most)
        total: Floats = (self._placed_bytes * excess).sum(axis=1)
        return total

    @cached_property
    def _placed_bytes(self) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        """Bytes on one device of [moment, each of `_homes`]."""
        sizes = [[float(own.get(home, 0)) for home in self._homes] for own in self.placed]
        return np.array(sizes).reshape(len(self.placed), len(self._homes))

    def least_bytes(self, c: Candidate) -> float:
        """At most `held_bytes`, at a fraction of its cost: assumes that every axis splits whatever it could split."""
        _, begin, end = self._ends
        return float((self._bytes[begin:end] / self._most_parts(c)[begin:end]).sum()) + self._stacked(c)

    def placed_bytes(self, c: Candidate) -> float:
        """At most `held_bytes`, at a fraction of its cost: sizes are those of the roles, where all divide."""
        _, begin, end = self._ends
        parts = np.ones(end - begin + len(self._homes))
        for dims, size in c.splits[: len(c.given)]:
            parts[self._named_by(dims)] *= size
        required = {dim for part in c.parts for dim in part.base}
        optional: dict[str, Floats] = {}  # of several optional rules for a dim, one counts
        for part in c.parts:
            in_base = self._named_by(part.base)
            parts[in_base] *= part.size
            if part.role.beside is not None and part.role.beside[1] not in required:
                scope, dim = part.role.beside
                sizes = np.where(self._named_by((dim,), scope) & ~in_base, part.size, 1.0)
                optional[dim] = np.maximum(optional.get(dim, 1.0), sizes)
        for sizes in optional.values():
            parts *= sizes
        residents, homes = parts[: end - begin], parts[end - begin :]
        return float((self._bytes[begin:end] / residents).sum()) + self._stacked(c, self._excess_bytes(c, 1 / homes))

    def _named_by(self, dims: Iterable[str], scope: str | None = None) -> Bools:
        """Which residents and placed values have any of these dims, in a scope or in all."""
        key = frozenset(dims), scope
        named = self._named.get(key)
        if named is None:
            placed = [*((shape, scope) for shape, scope, _ in self.resident), *self._homes]
            hits = [not key[0].isdisjoint(shape.names) and scope in (None, own) for shape, own in placed]
            named = self._named[key] = np.array(hits, bool)
        return named

    @cached_property
    def _homes(self) -> list[tuple[Shape, str]]:
        """The distinct shapes and scopes of placed values."""
        return [*dict.fromkeys(home for sizes in self.placed for home in sizes)]

    def _stacked(self, c: Candidate, excess_bytes: Floats | float = 0.0) -> float:
        if not self._starts.size:
            return 0.0
        least = self._bytes / self._most_parts(c)[: len(self._bytes)]
        return float((np.add.reduceat(least, self._starts) + excess_bytes).max())

    # ------------------------------------------------------------ what axes may split

    @cached_property
    def _cut(self) -> list[Names | None]:
        """Dims that can split kernels, element-wise traffic, residents, stacked values by moment, and `_homes`."""
        resident = [frozenset(shape.names) for shape, _, _ in self.resident]
        stacked = (names for sizes in self.moments for names in sizes)
        homes = (self.passages.split(shape) for shape, _ in self._homes)
        return [*(k.dims for k in self.kernels), *(names for names, *_ in self.elements), *resident, *stacked, *homes]

    @cached_property
    def _bytes(self) -> Floats:
        """Bytes on one device of each entry but those of `_homes`."""
        resident = [count * width * shape.size for (shape, _, width), count in self.resident.items()]
        stacked = [size for sizes in self.moments for size in sizes.values()]
        return np.array([0.0] * self._ends[1] + resident + stacked)

    @cached_property
    def _ends(self) -> tuple[int, int, int]:
        """Ends of kernels, element-wise traffic and residents among the entries."""
        ends = np.cumsum([len(self.kernels), len(self.elements), len(self.resident)])
        return int(ends[0]), int(ends[1]), int(ends[2])

    @cached_property
    def _starts(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Index of each moment's first entry."""
        counts = [self._ends[2], *map(len, self.moments)]
        return np.cumsum(counts)[:-1]

    def _most_parts(self, c: Candidate) -> Floats:
        """The largest number of parts into which each entry can be split."""
        parts = self._parts_of.get(c.splits)
        if parts is None:
            parts = self._parts_of[c.splits] = np.ones(len(self._cut))
            for dims, size in c.splits:
                hits = self._hits.get(dims)
                if hits is None:
                    can = [names is None or not names.isdisjoint(dims) for names in self._cut]
                    hits = self._hits[dims] = np.array(can, bool)
                parts[hits] *= size
        return parts


def _moments(program: Program) -> Iterator[dict[Value, Value | None]]:
    """Stacked values that are in memory at once, in separate buffers: at the end of each loop, the stacks of earlier
    loops that it reads, and its own; plus those of a nested loop at its end. With the carry that they are copies of."""
    stacks: dict[Value, Value | None] = {}
    for i in program.instructions:
        if isinstance(i, Loop):
            own = _stacked_by(i, program)
            there = {x: stacks[x] for x in i.inputs if x in stacks} | own
            if there:
                yield there
            for inner in _moments(i.body):
                yield there | inner
            stacks.update(own)


def _stacked_by(loop: Loop, program: Program) -> dict[Value, Value | None]:
    """The results that a loop stacks in new memory, not in that of a slice, a variable or a carry; with the carry of
    which each is a copy before every trip, None for others."""
    placed = {*program.updates.values(), *(program.outputs.values() if program.is_body else ())}
    over, body = loop.rewritten, loop.body
    carries = {body.inputs[before] for before, _ in loop.carries}
    stacks = zip(loop.stacks, loop.outputs[len(loop.carries) :], strict=True)
    return {
        y: body.outputs[name] if body.outputs[name] in carries else None
        for name, y in stacks if name not in over and y not in placed and not y.tensor.on_host
    }  # fmt: skip
