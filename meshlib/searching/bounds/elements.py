"""Lower bound on the HBM traffic of element-wise kernels in a step, from the program on one device.

Kernels of a sharded program are those of the program on one device, or parts of them if a collective intervenes. So the
intermediate values of element-wise kernels, and the results of products, are moved under any layout, divided by all
axes that could split them. Variables, inputs and slices of stacks may be prefetched, or still be on the chip, and are
left out; so are values that may stay on the chip between kernels.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from meshlib.core.opdef import Kind
from meshlib.estimation.work.hbm_traffic import boundary_of
from meshlib.estimation.work.plan import kernels_of
from meshlib.estimation.work.stored_values import Stored
from meshlib.program.analysis.buffers import written_inside
from meshlib.program.instructions import Compute, Instruction, Loop, Value
from meshlib.program.records import Program
from meshlib.searching.renamed_dims import Names, Passages

# Traffic by the dims along which a value may be split, its bytes, and whether its kernel may run after all products of
# a trip, beside the collectives that end it.
ElementTraffic: TypeAlias = dict[tuple[Names | None, int, bool], int]


def element_traffic(whole: Program, passages: Passages, full: Container[Value]) -> ElementTraffic:
    """Traffic of element-wise kernels in a step of a program on one device: of values in `full`, which have no smaller
    factors."""
    traffic: ElementTraffic = {}
    for v, size_bytes, times, trails in _passed(whole, whole.memory_plan.in_place, 1):
        if v in full:
            kind = passages.split(v.tensor.shape), size_bytes, trails
            traffic[kind] = traffic.get(kind, 0) + times * size_bytes
    return traffic


def is_product(i: Instruction) -> bool:
    """True if it is a product or fused attention."""
    return isinstance(i, Compute) and (i.operation.opdef.kind is Kind.CONTRACTION or bool(i.operation.opdef.scores))


def _passed(
    program: Program, in_place: frozenset[Value], times: int, loop: Loop | None = None
) -> Iterator[tuple[Value, int, int, bool]]:
    """For each element-wise kernel, those in loops included: values passed to or from others, bytes, runs per step, and
    whether it may trail all products of a trip and what its carries are computed from."""
    stored = Stored(program, loop)
    before = set() if loop is None else leading(program, loop)
    for members in kernels_of(program):
        first = members[0]
        if isinstance(first, Loop):
            yield from _passed(first.body, written_inside(first, in_place), first.runs(times), first)
        elif all(isinstance(i, Compute) and not is_product(i) for i in members):
            trails = loop is not None and all(before.isdisjoint(i.outputs) for i in members)
            uses = (use for use in boundary_of(members, stored, in_place) if use.passes)
            yield from ((use.buffer, use.exact_bytes, times, trails) for use in uses)


def leading(body: Program, loop: Loop) -> set[Value]:
    """Values of a trip that some product or loop depends on, or all carries do."""
    of_carries = [_needed(body, {body.outputs[after]}) for _, after in loop.carries]
    large = {x for i in body.instructions if isinstance(i, Loop) or is_product(i) for x in i.inputs}
    return _needed(body, large) | (set.intersection(*of_carries) if of_carries else set())


def _needed(program: Program, values: set[Value]) -> set[Value]:
    """These values, and those that they are computed from."""
    needed = {*values}
    for i in reversed(program.instructions):
        if not needed.isdisjoint(i.outputs):
            needed.update(i.inputs)
    return needed


@dataclass(frozen=True)
class Temporaries:
    """Temporaries that a product's kernel reads: `operands`: bytes of all from which it computes each; `others`: of the
    rest; `largest_bytes`: of the largest for operands, from wherever a collective may bring them."""

    largest_bytes: float
    operands: Sequence[Mapping[Value, int]]
    others: Mapping[Value, int]

    def further_bytes(self, full: Container[Value]) -> list[int]:
        """Of those in `full`, bytes of each but the largest for each operand; none if operands have some in common."""
        first, second = ([size for v, size in own.items() if v in full] for own in self.operands)
        others = [size for v, size in self.others.items() if v in full]
        common = not self.operands[0].keys().isdisjoint(self.operands[1])
        return [] if common else [*sorted(first)[:-1], *sorted(second)[:-1], *others]


def temporaries_of(program: Program, loop: Loop | None = None) -> dict[Instruction, Temporaries]:
    """For each product of a program, or of the body of `loop`, the temporaries that its kernel reads."""
    stored, of_product = Stored(program, loop), {}
    in_place = (program if loop is None else loop).memory_plan.in_place
    for members in kernels_of(program):
        maker = {y: i for i in members for y in i.outputs}
        known: dict[Value, float] = {}
        products = [*filter(is_product, members)]
        uses = boundary_of(members, stored, in_place) if products else []
        left = {u.buffer: u.exact_bytes for u in uses if u.passes and not u.written}
        for product in products:
            largest = max(_largest_temporary(x, maker, stored, known) for x in product.inputs[:2])
            behind = [_behind(x, members, stored) for x in product.inputs[:2]]
            operands = [{v: size for v, size in left.items() if v in own} for own in behind]
            left = {v: size for v, size in left.items() if not any(v in own for own in behind)}
            of_product[product] = Temporaries(largest, operands, left if product is products[-1] else {})
    return of_product


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


def _behind(value: Value, members: Sequence[Instruction], stored: Stored) -> frozenset[Value]:
    """Buffers that a kernel reads for a value, directly or through computations of its own."""
    behind = {value}
    for i in reversed(members):
        if not behind.isdisjoint(i.outputs):
            behind.update(i.inputs)
    behind.update(x for v in [*behind] if v in stored.recomputed for x in stored.recomputed[v].of)
    return frozenset(stored.of(v) for v in behind)
