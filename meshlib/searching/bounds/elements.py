"""Lower bound on the HBM traffic of element-wise kernels in a step, from the program on one device.

Kernels of a sharded program are those of the program on one device, or parts of them if a collective intervenes. So the
intermediate values of element-wise kernels, and the results of products, are moved under any layout, divided by all
axes that could split them. Variables, inputs and slices of stacks may be prefetched, or still be on the chip, and are
left out; so are values that may stay on the chip between kernels.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from meshlib.core.opdef import Kind
from meshlib.estimation.work.hbm_traffic import boundary_of
from meshlib.estimation.work.plan import kernels_of
from meshlib.estimation.work.stored_values import Stored
from meshlib.program.analysis.buffers import written_inside
from meshlib.program.instructions import Compute, Instruction, Loop, Value
from meshlib.program.records import Program
from meshlib.searching.renamed_dims import Names, Passages


@dataclass(frozen=True)
class Passing:
    """Values passed between kernels: total bytes, and bytes of the smallest."""

    bytes: int = 0
    smallest_bytes: float = inf

    def with_value(self, size_bytes: int) -> Passing:
        """With another value."""
        return Passing(self.bytes + size_bytes, min(self.smallest_bytes, size_bytes))

    def joined(self, other: Passing, times: int) -> Passing:
        """With other values that are passed `times` times."""
        return Passing(self.bytes + times * other.bytes, min(self.smallest_bytes, other.smallest_bytes))


NOTHING = Passing()


@dataclass(frozen=True)
class ElementTraffic:
    """HBM traffic between kernels on one device.

    Attributes:
      elements: traffic of all element-wise kernels in a step, by the dims along which a value may be split, and its
        bytes.
      beside: for one run of each product or attention, its results for other kernels, and the operands of element-wise
        work in its kernel.
    """

    elements: dict[tuple[Names | None, int], int] = field(default_factory=dict)
    beside: dict[Instruction, Passing] = field(default_factory=dict)

    @staticmethod
    def of(whole: Program, passages: Passages, full: Container[Value]) -> ElementTraffic:
        """Traffic of a program on one device; only values in `full`, which have no smaller factors, are counted."""
        traffic = ElementTraffic()
        for product, uses, times in _kernels(whole, whole.memory_plan.in_place, 1):
            for v, size_bytes in uses:
                if v not in full:
                    continue
                if product is None:
                    kind = passages.split(v.tensor.shape), size_bytes
                    traffic.elements[kind] = traffic.elements.get(kind, 0) + times * size_bytes
                else:
                    traffic.beside[product] = traffic.beside.get(product, NOTHING).with_value(size_bytes)
        return traffic


def is_product(i: Instruction) -> bool:
    """True if it is a product or fused attention."""
    return isinstance(i, Compute) and (i.operation.opdef.kind is Kind.CONTRACTION or bool(i.operation.opdef.scores))


def _kernels(
    program: Program, in_place: frozenset[Value], times: int, loop: Loop | None = None
) -> Iterator[tuple[Instruction | None, list[tuple[Value, int]], int]]:
    """For each kernel, those in loops included: its product, if any; values passed through HBM besides the product's
    operands, with bytes; and runs per step."""
    stored = Stored(program, loop)
    for members in kernels_of(program):
        first = members[0]
        if isinstance(first, Loop):
            yield from _kernels(first.body, written_inside(first, in_place), first.runs(times), first)
        elif all(isinstance(i, Compute) for i in members):
            product = next((i for i in members if is_product(i)), None)
            operands = _operands(product, members, stored) if product is not None else frozenset()
            uses = boundary_of(members, stored, in_place)
            yield product, [(u.buffer, u.exact_bytes) for u in uses if u.passes and u.buffer not in operands], times


def temporaries_of(program: Program, loop: Loop | None = None) -> dict[Instruction, float]:
    """For each product of a program, or of the body of `loop`, bytes of the largest temporary that its kernel reads for
    its operands, from wherever a collective may bring them: an operand, or the values from which it is computed."""
    stored, largest_of = Stored(program, loop), {}
    for members in kernels_of(program):
        maker = {y: i for i in members for y in i.outputs}
        known: dict[Value, float] = {}
        for product in filter(is_product, members):
            largest_of[product] = max(_largest_temporary(x, maker, stored, known) for x in product.inputs[:2])
    return largest_of


def _largest_temporary(
    x: Value, maker: Mapping[Value, Instruction], stored: Stored, known: dict[Value, float]
) -> float:
    """Bytes of the largest temporary that a kernel reads for a value; `maker`: value -> instruction of the kernel.

    Axes that do not split the value may split what it sums, each into as many parts as there are summands at most.
    """
    if x not in known:
        sources = maker[x].inputs if x in maker else stored.recomputed[x].of if x in stored.recomputed else None
        own = 0.0 if stored.of(x) in stored.held else float(stored.sizes(x)[0])
        if sources is not None:
            shares = {y: min(1.0, x.local_size / max(1, y.local_size)) for y in sources}
            own = min(own, max((shares[y] * _largest_temporary(y, maker, stored, known) for y in shares), default=0.0))
        known[x] = own
    return known[x]


def _operands(product: Instruction, members: Sequence[Instruction], stored: Stored) -> frozenset[Value]:
    """Buffers that a product reads directly, or through computations of its own kernel."""
    behind = set(product.inputs)
    for i in reversed(members):
        if not behind.isdisjoint(i.outputs):
            behind.update(i.inputs)
    behind.update(x for v in [*behind] if v in stored.recomputed for x in stored.recomputed[v].of)
    return frozenset(stored.of(v) for v in behind)
