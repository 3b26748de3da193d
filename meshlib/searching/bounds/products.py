"""Lower bounds on the time of products and fused attention."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import TypeAlias

from hardware.blocking import matmul_blocks
from hardware.chips import Chip
from hardware.core import Matmul, time_of
from hardware.core import Work as Engines
from hardware.memory import hbm_rate, hbm_seconds
from layouts import Shape
from meshlib.core.graph import TensorType
from meshlib.core.opdef import Factor, Product
from meshlib.estimation.time.kernel_times import Times
from meshlib.estimation.time.physics import Physics
from meshlib.estimation.work.kernels import Kernel as Work
from meshlib.estimation.work.products import (
    Attention,
    at_hand,
    matmul_of,
    operand_itemsizes,
    rows_first,
    with_shared_tiles,
)
from meshlib.estimation.work.stored_values import Origins, held_values
from meshlib.ops.contraction.einsum import EIGHT_BIT
from meshlib.program.instructions import Compute, Instruction, Value
from meshlib.program.records import Program
from meshlib.searching.renamed_dims import Names, Passages

# (exposed HBM bytes, the part of them that may be prefetched), one pair for each storage width of the operands.
Pieces: TypeAlias = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Operands:
    """A product and the bytes per element of its rows and columns, at the narrowest width in memory.

    `at_hand`: which of them are in HBM from the start, so that blocks are re-read from there; `temporary_bytes`: the
    largest value from another kernel that its kernel reads at least for them.
    """

    product: Matmul
    itemsizes: tuple[float, float]
    at_hand: tuple[bool, bool]
    temporary_bytes: float = 0.0

    @staticmethod
    def of(program: Program, instruction: Compute, origins: Origins, temporary_bytes: float) -> Operands | None:
        """The operands in a program on one device; None if its kernel may compute one from fewer elements."""
        maker = {y: i for i in program.instructions if i.group == instruction.group for y in i.outputs}
        for x in instruction.inputs[:2]:
            if x in maker and not any(z.local_size >= x.local_size for z in _read_for(x, maker)):
                return None
        stored_sizes = operand_itemsizes(instruction, origins.least_itemsize)
        dtypes = (x.tensor.dtype.itemsize for x in rows_first(instruction))
        first, second = (min(size, own) for size, own in zip(stored_sizes, dtypes, strict=True))
        here = at_hand(
            instruction, [i for i in program.instructions if i.group == instruction.group], held_values(program)
        )
        return Operands(matmul_of(program, instruction), (first, second), here, temporary_bytes)

    def cut(self, product: Matmul, parts: int) -> Operands:
        """The operands of one device's part, if the product is cut into so many parts."""
        return Operands(product, self.itemsizes, self.at_hand, self.temporary_bytes / parts)

    @property
    def bytes(self) -> tuple[float, float]:
        """Bytes of each operand, read once."""
        p, (first, second) = self.product, self.itemsizes
        return first * p.batch * p.m * p.k, second * p.batch * p.taps * p.k * p.n

    def read_seconds(self, times: Times) -> float:
        """HBM seconds of the operand reads. Blocks are re-read of both operands if a temporary is not on the chip
        (`meshlib.estimation.work.vmem_reuse.finds_operand`), otherwise of a weight, unless it may be gathered to it."""
        elsewhere = self.temporary_bytes > times.held_bytes
        again = [
            elsewhere or (here and part > times.held_bytes) for here, part in zip(self.at_hand, self.bytes, strict=True)
        ]
        bare = Work(
            name="", opcode="", source="", region="", matmuls=((self.product, self.itemsizes),), mxu_flops=0,
            useful_flops=0.0, vpu_ops=0, padded_vpu_ops=0.0, narrow_vpu_ops=0.0, hbm_bytes=0,
            padded_bytes=round(sum(self.bytes)), free=False, at_hand=(again[0], again[1]),
        )  # fmt: skip
        return times.of(bare).hbm_seconds

    def awaited_seconds(self, times: Times) -> float:
        """`read_seconds` without what half of VMEM may prefetch, and without operands that may still be on the chip."""
        on_chip_bytes = sum(part for part in self.bytes if part <= times.held_bytes)
        return self.read_seconds(times) - times.ahead_seconds - hbm_seconds(times.chip, on_chip_bytes)


def _read_for(value: Value, maker: Mapping[Value, Instruction]) -> Iterator[Value]:
    """The values that a kernel reads to compute a value; `maker`: value -> instruction inside the kernel."""
    producer = maker.get(value)
    if producer is None:
        yield value
        return
    for x in producer.inputs:
        yield from _read_for(x, maker)


GROUPS, RUNS = "groups", "runs"
SIDES = ("m", "k", "n", "batch", GROUPS, RUNS)


@dataclass(frozen=True)
class SplitFactor:
    """A factor that may split a product: the dims whose rules may bring an axis to it (None: any), its size (0 if that
    depends on the layout), and the side of the product that it is part of, one of `SIDES`: of rows sorted by group, the
    groups and the runs are sides too."""

    names: Names | None
    size: int
    side: str


@dataclass(frozen=True)
class ProductKernel:
    """All products of one kind, or all attention of one kind.

    `dims`: that can split them; `dtype`: of the MXU; `product`: on one device, each row computed once; `factors`: of
    it, None where it is unknown which side of the product they belong to; `operands`: if they are known to be read;
    `sorted_rows`: the product if its rows are sorted by group.
    """

    dims: Names | None
    dtype: str
    attention: Attention | None = None
    product: Matmul | None = None
    factors: tuple[SplitFactor, ...] | None = None
    operands: Operands | None = None
    sorted_rows: Product | None = None

    def cut(self, parts: Mapping[str, int], tiles: bool = True) -> Matmul:
        """At most the product of one device, if the sides are cut into so many parts; `tiles` as of `_cut_sides`."""
        known = tiles and (max(parts.values()) == 1 or all(f.size for f in self.factors or ()))
        assert self.product is not None
        return _cut_sides(self.product, self.sorted_rows, tuple(parts[side] for side in SIDES), known)

    def seconds(self, chip: Chip, physics: Physics) -> tuple[float, float] | None:
        """Seconds of one attention on one device without launch, and the part lost when a split rounds its scores down.

        None if the chip has no rate for them, which the estimate will report.
        """
        assert self.attention is not None
        if chip.peak(self.dtype) is None:
            return None
        mxu, vpu, bare = Times(chip, physics).attention_seconds(self.attention)
        seconds = max(mxu, vpu) + bare
        return seconds, seconds / max(1, self.attention.scores)


def _sized(matmul: Matmul, product: Product) -> Matmul:
    """A product with other sizes."""
    return replace(matmul, m=product.rows, k=product.contracted, n=product.columns, batch=product.batch)


@lru_cache(maxsize=1 << 16)
def _cut_sides(untiled: Matmul, sorted_rows: Product | None, each: tuple[int, ...], tiles: bool) -> Matmul:
    """A product whose sides are cut into so many parts `each`, rounded up; with `tiles` sorted rows are rounded down,
    and have those that are computed twice, where groups share tiles. Cached."""
    parts = dict(zip(SIDES, each, strict=True))
    side = "k" if sorted_rows is not None and sorted_rows.groups_summed else "m"
    cuts = {name: parts[name] for name in SIDES[:4]}
    cuts[side] *= parts[GROUPS] * parts[RUNS]
    m, k, n, batch = (-(-getattr(untiled, name) // cut) for name, cut in cuts.items())
    part = replace(untiled, m=m, k=k, n=n, batch=batch)
    if sorted_rows is None or not tiles:
        return part
    rows = max(1, getattr(untiled, side) // cuts[side])
    groups, runs = (max(1, getattr(sorted_rows, name) // parts[name]) for name in (GROUPS, RUNS))
    tiled = with_shared_tiles(replace(sorted_rows, rows=rows, contracted=rows, groups=groups, runs=runs))
    return replace(part, k=tiled.contracted) if sorted_rows.groups_summed else replace(part, m=tiled.rows)


@dataclass(frozen=True)
class Side:
    """Rows or columns of a product: possible bytes per element in HBM, ascending; `early`: whether they may be
    prefetched before the product starts, since they depend on nothing computed before it."""

    itemsizes: tuple[float, ...]
    early: bool


@dataclass(frozen=True, slots=True)
class Timed:
    """A product on one device without its launch: core seconds; exposed bytes of its first pieces and last block, and
    the part of them that may be prefetched, for each storage width; HBM bytes per second; seconds for which operands
    are awaited over HBM."""

    core_seconds: float
    exposed: Pieces
    rate: float
    awaited_seconds: float = 0.0

    def seconds(self, moved_bytes: float, late_bytes: float, beside_bytes: float) -> tuple[float, float]:
        """Lower bounds on the seconds from launch to end, and from the start of a program to the end, without prefetch.

        Args:
          moved_bytes: lower bound on its HBM traffic; late_bytes: the part of it that the program computes, of which
            beside_bytes are no operands.
        """
        if not self.exposed:
            return self.core_seconds, self.core_seconds
        late, bare = float("inf"), moved_bytes
        for exposed, early in self.exposed:
            late, bare = min(late, min(exposed, moved_bytes) - early), min(bare, exposed)
        over_hbm = max(late_bytes / self.rate, self.awaited_seconds + beside_bytes / self.rate)
        busy = max(self.core_seconds + max(0.0, late) / self.rate, over_hbm)
        return busy, self.core_seconds + bare / self.rate


@dataclass(frozen=True, eq=False)
class Contraction:
    """A product by sizes, with the parts of it under splits. `sides` are unknown if it quantises its operands, and
    `operands` if it may read less than them."""

    instruction: Compute
    whole: Matmul
    sides: tuple[Side, Side] | None = None
    operands: Operands | None = None

    @staticmethod
    def of(
        program: Program, instruction: Compute, origins: Origins, early: Container[Value], temporary_bytes: float
    ) -> Contraction:
        """A product in a program on one device; `early`: values that may be present when the program starts;
        `temporary_bytes` as of `Operands`."""
        sides = None
        if instruction.operation.attrs.get("precision") not in EIGHT_BIT:
            first, second = (
                Side(tuple(sorted({origins.least_itemsize(x), float(x.tensor.dtype.itemsize)})), x in early)
                for x in rows_first(instruction)
            )
            sides = first, second
        operands = Operands.of(program, instruction, origins, temporary_bytes)
        return Contraction(instruction, matmul_of(program, instruction), sides, operands)

    def factors(self, passages: Passages) -> tuple[SplitFactor, ...] | None:
        """The factors that may split it; None if a factor is no whole part of rows, columns, depth or batch."""
        op, sides = self.instruction.operation, self.sides_of_factors
        if sides is None:
            return None
        laid = passages.laid(x.shape for x in (*op.inputs, *op.outputs))
        factors = []
        for n, f in enumerate(op.opdef.roles(op)):
            if n not in sides:
                continue
            names = [name for name in (*f.operands, *f.outputs) if name is not None]
            known = laid.isdisjoint(names)  # otherwise any axis may split it, and every size divides 0
            factors.append(SplitFactor(passages.reached(names) if known else None, f.size if known else 0, sides[n]))
        return tuple(factors)

    @cached_property
    def sides_of_factors(self) -> Mapping[int, str] | None:
        """The side of the product, one of `SIDES`, that each factor of more than one element is a part of; None if one
        is no whole part of a side."""
        sides, whole = {}, self.untiled
        for n, f in enumerate(self._factors):
            if f.size == 1:
                continue
            product = self._product({n: f.size})
            part = _sized(self.whole, product)
            changed = [side for side in SIDES[:4] if getattr(whole, side) != getattr(part, side)]
            if len(changed) != 1 or getattr(whole, changed[0]) != f.size * getattr(part, changed[0]):
                return None
            fewer = [side for side in (GROUPS, RUNS) if getattr(product, side) != getattr(self._uncut, side)]
            sides[n] = (fewer or changed)[0]
        return sides

    @cached_property
    def _uncut(self) -> Product:
        return self._product({})

    @cached_property
    def untiled(self) -> Matmul:
        """The whole product without the rows that are computed twice, where groups share tiles."""
        return _sized(self.whole, self._uncut)

    @property
    def sorted_rows(self) -> Product | None:
        """The whole product if it has groups of rows, without the rows that are computed twice."""
        return self._uncut if self._uncut.groups > 1 else None

    @cached_property
    def _factors(self) -> Sequence[Factor]:
        return self.instruction.operation.opdef.roles(self.instruction.operation)

    def _part(self, cuts: Mapping[int, int], rounds: bool) -> Matmul | None:
        """The product of one device if factors (by number) are cut into these many parts; None if sizes do not divide,
        unless it `rounds` them.

        Where sizes divide, those of operands are known, and with them the tiles that groups of sorted rows share.
        """
        if not rounds and any(self._factors[n].size % parts for n, parts in cuts.items()):
            return None
        if self.sides_of_factors is None:
            product = self._product(cuts)
            return _sized(self.whole, product if rounds else with_shared_tiles(product))
        parts = dict.fromkeys(SIDES, 1)
        for n, count in cuts.items():
            if n in self.sides_of_factors:
                parts[self.sides_of_factors[n]] *= count
        return _cut_sides(self.untiled, self.sorted_rows, tuple(parts.values()), not rounds)

    def _product(self, cuts: Mapping[int, int]) -> Product:
        """The product of operands and a result with some factors cut into parts, each row computed once."""
        op, factors = self.instruction.operation, self._factors
        inputs, (out, *_) = self.instruction.inputs, self.instruction.outputs
        types = [
            _cut(x.local, {factors[n].operands[place]: parts for n, parts in cuts.items()})
            for place, x in enumerate(inputs)
        ]
        result = _cut(out.local, {factors[n].outputs[0]: parts for n, parts in cuts.items()})
        assert op.opdef.product is not None
        return op.opdef.product(tuple(types), result, op.attrs)

    def timed(self, chip: Chip, physics: Physics, cuts: Mapping[int, int], moves: bool, rounds: bool) -> Timed:
        """One device's part if factors (by number) are cut into these many parts; infinite if sizes do not divide.

        `moves`: whether values between kernels pass through HBM unless they fit on the chip; `rounds`: whether sizes
        are rounded up, because they depend on the layout.
        """
        part = self._part(cuts, rounds)
        if part is None:
            return Timed(float("inf"), (), hbm_rate(chip) * chip.hbm_efficiency)
        operands, stored = None, self._part(cuts, True)  # a row in two tiles is read once
        if self.operands is not None and moves and stored is not None:
            operands = self.operands.cut(stored, prod(cuts.values()))
        return _timed(chip, physics, part, self.sides, operands)


@lru_cache(maxsize=1 << 16)
def _timed(
    chip: Chip, physics: Physics, part: Matmul, sides: tuple[Side, Side] | None, operands: Operands | None
) -> Timed:
    """A product on one device; `operands`: if it is known how they are read. Cached: many products are alike."""
    times = Times(chip, physics)
    mxu, vpu = product_seconds(chip, part)
    pieces = _exposed_bytes(chip, part, *sides) if sides is not None and mxu else ()
    awaited = operands.awaited_seconds(times) if operands is not None else 0.0
    core_seconds = max(mxu and times.in_step_seconds([part], mxu), vpu)
    return Timed(core_seconds, pieces, hbm_rate(chip) * chip.hbm_efficiency, max(0.0, awaited))


@lru_cache(maxsize=1 << 16)
def product_seconds(chip: Chip, product: Matmul) -> tuple[float, float]:
    """(MXU seconds, VPU seconds) of a product alone on one device, cached."""
    time = time_of(chip, Engines((product,)))
    return time.mxu_seconds, time.vpu_seconds


@lru_cache(maxsize=1 << 16)
def _exposed_bytes(chip: Chip, product: Matmul, rows: Side, columns: Side) -> Pieces:
    """(exposed bytes, prefetchable bytes) of a product's first pieces and last block, for all operand widths."""
    exposed = []
    for first in rows.itemsizes:
        for second in columns.itemsizes:
            blocks = matmul_blocks(chip, product, first, second)
            early = blocks.depth * (first * blocks.rows * rows.early + second * blocks.columns * columns.early)
            exposed.append((blocks.exposed_bytes, early))
    return tuple(exposed)


def _cut(t: TensorType, parts: Mapping[str | None, int]) -> TensorType:
    """A type with some dims cut into parts."""
    shape = Shape([(d.name, -(-d.size // parts.get(d.name, 1))) for d in t.shape])
    return TensorType(shape, t.dtype)
