"""Values that are certainly in memory while an operation runs, in whatever order, from the graph alone.

Of a path from a result that nothing recomputes, computed before an operation, to what the operation or a later one
reads, some tensor is in memory while the operation runs. Paths without a common tensor take separate buffers. A loop's
body may write the results of a trip into the memory of the loop's, so paths within a body avoid its results. Sums that
a layout may derive from other sums count for nothing, nor does what they read.

An axis splits a product along one of its factors. Along others it splits neither operands nor result: a weight that it
splits in memory is then gathered for the product, into new memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from itertools import count
from operator import or_
from typing import TYPE_CHECKING

from layouts import Shape
from meshlib.core.graph import Operation, Tensor
from meshlib.core.laid_dims import LaidDimension
from meshlib.core.opdef import ON_MXU, RESIDENT, THROUGH, Kind, PowerProduct, Role, Storage
from meshlib.lowering.shared_sums import shared_sums
from meshlib.lowering.simplification import Simplified, simplify
from meshlib.program.analysis.memory import inside_bytes
from meshlib.program.instructions import Loop

if TYPE_CHECKING:
    from meshlib.searching.bounds.least_memory import ShardBytes

MOST = 4
SMALL = 1 / 128  # of the largest start of a path, and of a path's start: what is narrower is left out

Path = tuple[Tensor, ...]
Names = frozenset[str]
Along = Mapping[str, Names]  # of mesh axes, the dims of the factor along which each splits a product


@dataclass(frozen=True)
class LiveSet:
    """What is in memory while an operation runs.

    Attributes:
      op: the operation.
      paths: of each, one tensor at least; ending: those whose tensor may be read last by the operation's kernel.
      fresh: a loop's results in new memory; product: a path from the result of a product to a kernel, one tensor of
      which is in memory too, possibly written over that of an ending path.
      stored: the variables and inputs that a product reads, each with the tensors from it to the product.
      inside: what is in memory within a trip of a loop.
    """

    op: Operation
    paths: Sequence[Path]
    ending: Sequence[Path] = ()
    fresh: Sequence[Tensor] = ()
    product: Path = ()
    stored: Mapping[Tensor, Path] = field(default_factory=dict)
    inside: LiveSets | None = None

    def least_bytes(self, shards: ShardBytes, inside: bool) -> float:
        """The fewest bytes; `inside`: with those of a loop's body."""
        part_bytes = shards.part_bytes
        if self.op in shards.lowered:
            return self._lowered_bytes(shards, shards.lowered[self.op])
        ending = [min(map(part_bytes, path)) for path in self.ending]
        total = sum(min(map(part_bytes, path)) for path in self.paths) + sum(ending) + sum(map(part_bytes, self.fresh))
        if self.op.loop is None:
            over = max(ending, default=0.0)
            total += min(self._beside(shards, along, over) for along in shards.splits(self.op))
        return total + (self.inside.least_bytes(shards, True) if inside and self.inside is not None else 0.0)

    def _lowered_bytes(self, shards: ShardBytes, loop: Loop) -> float:
        """The fewest bytes with a lowered loop, whose operands and results have their shardings."""
        own = {v.tensor: float(v.local_bytes) for v in (*loop.inputs, *loop.outputs) if not v.tensor.on_host}
        total = sum(max(own.get(t, 0.0) for t in path) or min(map(shards.part_bytes, path)) for path in self.paths)
        return total + sum(own.get(t) or shards.part_bytes(t) for t in self.fresh) + inside_bytes(loop)

    def _beside(self, shards: ShardBytes, along: Along, over: float) -> float:
        """Bytes of gathered operands, and of a product's result beyond the `over` bytes that it may be written over."""
        gathered = [path for t, path in self.stored.items() if shards.is_gathered(t, along)]
        sizes = [min(shards.bytes_along(t, along) for t in path) for path in (*gathered, self.product) if path]
        return sum(sizes) - (min(sizes[-1], over) if self.product else 0.0)


@dataclass(frozen=True)
class LiveSets:
    """What is in memory while some operations of a graph run.

    `sets`: those of all loops, of the products with the most live bytes, and of those that read the largest variables;
    `products`: the number of products that run, those of loops included; `derives`: whether a layout may derive sums.
    """

    sets: Sequence[LiveSet]
    products: int
    derives: bool

    @staticmethod
    def of(simple: Simplified, results: Collection[Tensor], stored: Mapping[Tensor, Tensor]) -> LiveSets:
        """Live sets of a graph.

        Args:
          results: tensors whose memory is counted elsewhere, or which are written over a variable.
          stored: of each tensor that is a variable or input, or a slice of one, that variable or input.
        """
        flow = _Flow(simple, {simple.of(t) for t in results}, stored)
        loops = [n for n, op in enumerate(flow.operations) if op.loop is not None]
        products = [n for n, op in enumerate(flow.operations) if op.opdef.kind is Kind.CONTRACTION and flow.runs(op)]
        live_bytes = flow.live_bytes(products) if len(products) > MOST else {}
        others = sorted(products, key=lambda n: live_bytes.get(n, 0.0), reverse=True)[:MOST]
        read_bytes = {n: sum(map(whole_bytes, flow.stored_before(n))) for n in products}
        heavy = sorted(products, key=lambda n: read_bytes[n], reverse=True)[: MOST // 2]
        sets = [flow.live_set(n) for n in dict.fromkeys((*loops, *others, *heavy))]
        bodies = {live.op.loop.body: live.inside for live in sets if live.op.loop is not None}
        count = len(products) + sum(body.products for body in bodies.values() if body is not None)
        return LiveSets(sets, count, bool(flow.derived))

    def least_bytes(self, shards: ShardBytes, inside: bool) -> float:
        """The fewest bytes at the peak; `inside`: with what is live within trips of loops."""
        return max((live.least_bytes(shards, inside) for live in self.sets), default=0.0)


@dataclass(eq=False)
class _Flow:
    """The dataflow of a graph; sets of operations are bits of an integer, by their numbers."""

    simple: Simplified
    results: set[Tensor]
    stored: Mapping[Tensor, Tensor]
    later: list[int] = field(init=False)  # operations that depend on one, and itself
    inlined: set[Operation] = field(init=False)  # whose results others may compute
    readers: dict[Tensor, int] = field(init=False)
    loops: dict[Tensor, int] = field(default_factory=dict)  # the loops among the readers of inlined tensors
    starts: dict[Tensor, list[tuple[Path, float]]] = field(init=False)  # with the paths from them, and their bytes

    def __post_init__(self) -> None:
        self.operations = self.simple.operations
        self.number = {op: n for n, op in enumerate(self.operations)}
        self.root: dict[Tensor, Tensor] = {}  # of the tensors that share its memory
        for op in self.operations:
            inputs = self.simple.inputs[op]
            alias = inputs[0] if _shares_memory(op) and inputs else None
            self.root.update((y, y if alias is None else self.root.get(alias, alias)) for y in op.outputs)
        self.elsewhere = {self.root.get(t, t) for t in self.results}
        self.elsewhere.update(y for op in self.operations if op.opdef.kind in RESIDENT for y in op.outputs)
        uses = self.simple.uses
        self.inlined = {op for op in self.operations if _is_inlined(op)}
        self.derived = _derived(self.simple, self.results)
        self.readers = {
            t: sum({1 << self.number[op] for op, _ in users if op not in self.derived})
            for t, users in uses.items()
            if t.operation not in self.derived
        }
        self.kernels = sum(1 << n for n, op in enumerate(self.operations) if op.opdef.kind in (*ON_MXU, Kind.LOOP))
        self.later = [0] * len(self.operations)
        for n in reversed(range(len(self.operations))):
            self.later[n] = 1 << n
            for y in self.operations[n].outputs:
                for op, _ in uses.get(y, ()) if y in self.readers else ():
                    self.later[n] |= self.later[self.number[op]]
        starts = {y: whole_bytes(y) for op in self.operations for y in op.outputs if self._is_start(op, y)}
        least = SMALL * max(starts.values(), default=0)
        self.starts = {y: [*self._paths(y, set())] for y, size in starts.items() if size > least}

    def runs(self, op: Operation) -> bool:
        """True if an operation runs by itself, under every layout."""
        return op not in self.inlined and op not in self.derived

    def _is_start(self, op: Operation, y: Tensor) -> bool:
        """True if a result is in memory for all that read it, or for loops: others may compute it from its operands."""
        if y.on_host or y in self.simple.again or self.root[y] in self.elsewhere:
            return False
        if op not in self.inlined:
            return y in self.readers
        self.loops[y] = sum(
            {1 << self.number[user] for user, _ in self.simple.uses.get(y, ()) if user.loop is not None}
        )
        return bool(self.loops[y])

    def _paths(self, start: Tensor, avoided: Collection[Tensor]) -> Iterator[tuple[Path, float]]:
        """Paths to what is computed from a result without being a start, each the widest, widest first."""
        order = count()
        least = SMALL * whole_bytes(start)
        heap: list[tuple[float, int, Path]] = [(-whole_bytes(start), next(order), (start,))]
        seen: set[Tensor] = set()
        while heap:
            negative, _, path = heapq.heappop(heap)
            t = path[-1]
            if t in seen:
                continue
            seen.add(t)
            yield path, -negative
            if t is start and t.operation in self.inlined:
                return
            for op, _ in self.simple.uses.get(t, ()):
                for y in op.outputs if op.opdef.kind in THROUGH and op not in self.derived else ():
                    size = min(-negative, whole_bytes(y))
                    if size > least and self.root[y] not in self.elsewhere and self.root[y] not in avoided:
                        heapq.heappush(heap, (-size, next(order), (*path, y)))

    def _crosses(self, path: Path, n: int) -> bool:
        """True if the end of a path is computed without operation `n`, and read by it or by what depends on it."""
        return bool(self._readers_of(path) & self.later[n]) and not self.later[n] >> self.number[path[-1].operation] & 1

    def _readers_of(self, path: Path) -> int:
        """What reads the end of a path."""
        t = path[-1]
        return (self.loops if len(path) == 1 and t.operation in self.inlined else self.readers).get(t, 0)

    def _before(self, n: int) -> Iterator[Tensor]:
        """The starts that an operation depends on."""
        for y in self.starts:
            number = self.number[y.operation]
            if number != n and self.later[number] >> n & 1:
                yield y

    def live_bytes(self, numbers: Sequence[int]) -> dict[int, float]:
        """For each of these operations, about the bytes of the widest paths across it, and of its results."""
        total = {n: sum(map(whole_bytes, self.operations[n].outputs)) for n in numbers}
        asked = sum(1 << n for n in numbers)
        earlier = [0] * len(self.operations)  # the asked operations that one depends on, and itself
        for n, op in enumerate(self.operations):
            earlier[n] = (1 << n) & asked
            for x in self.simple.inputs[op]:
                if op not in self.derived and x.operation in self.number and x.operation not in self.derived:
                    earlier[n] |= earlier[self.number[x.operation]]
        across: dict[int, int] = {}  # the asked operations that some of these readers depend on
        for y, paths in self.starts.items():
            left = self.later[self.number[y.operation]] & asked & ~(1 << self.number[y.operation])
            for path, size in paths if left else ():
                readers = self._readers_of(path)
                if readers not in across:
                    across[readers] = reduce(or_, (earlier[n] for n in _bits(readers)), 0)
                crossed = left & across[readers] & ~earlier[self.number[path[-1].operation]]
                for n in _bits(crossed):
                    total[n] += size
                left &= ~crossed
                if not left:
                    break
        return total

    def live_set(self, n: int) -> LiveSet:
        """The live set of an operation, with paths from the largest starts first."""
        op, used, paths = self.operations[n], set[Tensor](), list[Path]()
        for y in sorted(self._before(n), key=whole_bytes, reverse=True):
            if self.root[y] in used:
                continue
            path = next((path for path, _ in self._paths(y, used) if self._crosses(path, n)), None)
            if path is not None:
                paths.append(path)
                used.update(self.root[t] for t in path)
        if op.loop is not None:
            return LiveSet(op, paths, fresh=self._fresh(op, used), inside=self._inside(op))
        kernels = self.kernels & self.later[n] & ~(1 << n)  # which read what survives the operation
        lasting = {path: bool(self.readers[path[-1]] & kernels) for path in paths}
        ending = [path for path, lasts in lasting.items() if not lasts]
        kept = self._paths(op.output, set()) if self.root[op.output] not in self.elsewhere else ()
        product = next((path for path, _ in kept if self.readers.get(path[-1], 0) & kernels), ())
        stored = {x: path for x, path in self.stored_before(n).items() if used.isdisjoint(self.root[t] for t in path)}
        return LiveSet(op, [p for p, lasts in lasting.items() if lasts], ending, product=product, stored=stored)

    def stored_before(self, n: int) -> dict[Tensor, Path]:
        """The variables and inputs that a product reads, whole or sliced, each with the tensors from it to there."""
        op, paths = self.operations[n], dict[Tensor, Path]()
        plain = all(f.role in (Role.PARALLEL, Role.SUM) for f in op.opdef.roles(op))
        for x in self.simple.inputs[op] if plain else ():
            path = [x]
            while x.operation.opdef.kind in THROUGH and len(self.simple.inputs[x.operation]) == 1:
                (x,) = self.simple.inputs[x.operation]
                path.append(x)
            if x in self.stored:
                paths[self.stored[x]] = tuple(path)
        return paths

    def _fresh(self, op: Operation, used: Collection[Tensor]) -> list[Tensor]:
        """The results of a loop in new memory: no carries over initial values, no stacks over those that it reads."""
        loop = op.loop
        assert loop is not None
        carried = zip(op.outputs, self.simple.inputs[op][: loop.carries], strict=False)
        stacked = zip(op.outputs[loop.carries :], loop.stacked, strict=True)
        fresh = [y for y, begin in carried if self.root[begin] not in used]
        fresh += [y for y, t in stacked if not _shares_memory(t.operation)]
        return [y for y in fresh if self.simple.uses.get(y) and self.root[y] not in self.elsewhere | {*used}]

    def _inside(self, op: Operation) -> LiveSets:
        """The live sets of a loop's body, without results that nothing uses."""
        loop = op.loop
        assert loop is not None
        stacked = zip(op.outputs[loop.carries :], loop.stacked, strict=True)
        results = [*loop.made.finals, *(t for y, t in stacked if self.simple.uses.get(y) or y in self.results)]
        begins, given = self.simple.inputs[op], loop.operands(loop.stand_ins)
        whole = zip((*given.slices, *given[2]), begins[loop.carries :], strict=True)
        stored = {t: self.stored[x] for t, x in whole if x in self.stored}
        return LiveSets.of(simplify(loop.body, results, ()), results, stored)


def _bits(numbers: int) -> Iterator[int]:
    """The numbers in a set of operations."""
    while numbers:
        lowest = numbers & -numbers
        yield lowest.bit_length() - 1
        numbers ^= lowest


def _derived(simple: Simplified, results: Collection[Tensor]) -> set[Operation]:
    """The sums that are computed from others under some layout, as `shared_sums` has it if all dims are split."""
    sums = [op for op in simple.operations if op.opdef.kind in (Kind.REDUCTION, Kind.CONTRACTION)]
    summed = {op.output: frozenset(d.name for x in simple.inputs[op] for d in x.shape) for op in sums}
    sharing = shared_sums(simple, {y: names.difference(y.shape.names) for y, names in summed.items()}, results)
    return {y.operation for y in sharing.terms} if sharing is not None else set()


def _shares_memory(op: Operation) -> bool:
    """True if a result may have the memory of operand 0: another name, a partial update, a branch."""
    branch = op.loop is not None and op.loop.branch is not None
    return op.opdef.storage is Storage.ALIAS or op.opdef.writes_part or branch


def _is_inlined(op: Operation) -> bool:
    """True if kernels that read a result may compute it themselves."""
    looked_up = op.opdef.kind is Kind.INDEXED and op.opdef.reads_part
    return looked_up or op.opdef.kind in (*THROUGH, Kind.COPY) or isinstance(op.opdef.form(op), PowerProduct)


def whole_bytes(t: Tensor) -> float:
    """Bytes on the device, by which paths are compared; 0 where a size follows from the layout."""
    return 0.0 if t.on_host else t.dtype.size_bytes(_elements(t.shape))


@lru_cache(maxsize=1 << 12)
def _elements(shape: Shape) -> int:
    """Number of elements; 0 where a size follows from the layout."""
    return 0 if any(isinstance(d, LaidDimension) for d in shape) else shape.size
