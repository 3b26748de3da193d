"""Products and fused attention as a bound sees them: what no lowering makes faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from hardware.chips import Chip
from hardware.core import Matmul, Work, time_of
from hardware.vpu import vpu_rate
from layouts import Shape
from meshlib.estimation.physics import Physics
from meshlib.estimation.products import Attention, matmul_of
from meshlib.estimation.times import Times
from meshlib.graph import TensorType
from meshlib.program.instructions import Compute
from meshlib.program.records import Program
from meshlib.searching.passages import Names


@dataclass(frozen=True)
class Kernel:
    """All products of one kind: what they multiply in, or their attention; the dims by which they can be split."""

    dims: Names | None
    dtype: str
    attention: Attention | None = None

    def seconds(self, chip: Chip, physics: Physics, count: int, flops: float) -> tuple[float, float] | None:
        """Of so many on one device, without launches; and by how much scores are rounded down where they are split.

        None where the chip has no rate for them, as its estimate will say.
        """
        if chip.peak(self.dtype) is None:
            return None
        if self.attention is not None:
            mxu, vpu, bare = Times(chip, physics).attention_seconds(self.attention)
            seconds = max(mxu, vpu) + bare
            return count * seconds, count * seconds / max(1, self.attention.scores)
        rate = chip.peak_flops(self.dtype) / chip.devices_per_chip * chip.mxu_efficiency * physics.product_rate
        return flops / max(rate, vpu_rate(chip)), 0.0  # what is faster on the vector unit runs there


@dataclass(frozen=True, eq=False)
class Contraction:
    """A product by its sizes, with those of its parts."""

    instruction: Compute
    whole: Matmul
    _parts: dict[object, Matmul | None] = field(default_factory=dict)

    @staticmethod
    def of(program: Program, instruction: Compute) -> Contraction:
        """Of a program on one device."""
        return Contraction(instruction, matmul_of(program, instruction))

    def part(self, cuts: Mapping[int, int]) -> Matmul | None:
        """One device's part where factors, by their numbers, are cut in so many; None: they do not divide."""
        key = tuple(sorted(cuts.items()))
        if key not in self._parts:
            self._parts[key] = self._part(cuts)
        return self._parts[key]

    def _part(self, cuts: Mapping[int, int]) -> Matmul | None:
        op = self.instruction.operation
        factors = op.kind.roles(op)
        if any(factors[n].size % parts for n, parts in cuts.items()):
            return None
        inputs, (out, *_) = self.instruction.inputs, self.instruction.outputs
        types = [
            _cut(x.local, {factors[n].operands[place]: parts for n, parts in cuts.items()})
            for place, x in enumerate(inputs)
        ]
        made = _cut(out.local, {factors[n].outputs[0]: parts for n, parts in cuts.items()})
        assert op.kind.product is not None
        p = op.kind.product(tuple(types), made, op.attrs)
        return replace(self.whole, m=p.rows, k=p.contracted, n=p.columns, batch=p.batch)

    def seconds(self, chip: Chip, physics: Physics, cuts: Mapping[int, int]) -> float:
        """Of one device's part, at least, without its launch; infinite where there is no such part."""
        part = self.part(cuts)
        if part is None:
            return float("inf")
        mxu, vpu = _product_seconds(chip, part)
        return max(mxu / physics.product_rate, vpu)


@lru_cache(maxsize=1 << 16)
def _product_seconds(chip: Chip, product: Matmul) -> tuple[float, float]:
    time = time_of(chip, Work((product,)))
    return time.mxu_seconds, time.vpu_seconds


def _cut(t: TensorType, parts: Mapping[str | None, int]) -> TensorType:
    """A type of which dims are cut."""
    shape = Shape([(d.name, -(-d.size // parts.get(d.name, 1))) for d in t.shape])
    return TensorType(shape, t.dtype)
