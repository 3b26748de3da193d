"""What no schedule of a candidate can beat: counted from the program on one device, before it is lowered.

* Time: every product at the peak of the chip, divided by the axes that could split it. An axis may split an operation
  only along a dim for which the layout has a rule (rule 2 of the lowering), so that an axis with none for any of its
  dims computes it again on every device. Kernels follow each other, so their times add up.
* Memory: variables and slots lie where the layout puts them, all the time. Exact.

Both are sound: no estimate is below them, which tests try on small spaces against all candidates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from layouts import Shape
from meshlib.estimation.physics import CALIBRATED
from meshlib.lowering.homes import scope_of
from meshlib.ops.einsum import EIGHT_BIT
from meshlib.program.instructions import Compute
from meshlib.program.records import Program, walk
from meshlib.program.work import local_work
from meshlib.searching.space import Candidate


@dataclass(frozen=True)
class Bounds:
    """Of one program: flops by the dims of the operations that do them and their dtype, variables by shape and scope.

    `rate`: the share of the peak that products reach at most.
    """

    flops: Mapping[tuple[frozenset[str], str], int]
    variables: Mapping[tuple[Shape, str, float], int]
    rate: float

    @staticmethod
    def of(whole: Program) -> Bounds:
        """From the program lowered for one device."""
        flops: Counter[tuple[frozenset[str], str]] = Counter()
        products = set()
        for i, program, times in walk(whole):
            work = local_work(program, i)
            if isinstance(i, Compute) and work.mxu_flops:
                names = frozenset(name for v in (*i.inputs, *i.outputs) for name in v.tensor.shape.names)
                precision = i.operation.attrs.get("precision")
                flops[names, precision if precision in EIGHT_BIT else "bf16"] += work.mxu_flops * times
                products.add(i.operation)
        held: Counter[tuple[Shape, str, float]] = Counter()
        for v in whole.variables.values():
            held[v.tensor.shape, scope_of(v.tensor), v.local_bytes / max(1, v.local_size)] += 1
        # A kernel that is alone in its program is measured alone, and loses nothing.
        plain = not any(op.kind.scores for op in products)
        return Bounds(flops, held, CALIBRATED.product_rate if plain and len(products) > 2 else 1.0)

    def seconds(self, c: Candidate) -> float:
        """Of one step, at least."""
        total = 0.0
        for (names, dtype), flops in self.flops.items():
            ways = prod(size for dims, size in c.splits if not dims.isdisjoint(names))
            if c.slice.chip.peak(dtype) is None:  # it can't run there, as its estimate will say
                return 0.0
            total += flops / ways * c.slice.devices / c.slice.peak_flops(dtype)
        return total / self.rate

    def state_bytes(self, c: Candidate) -> float:
        """What variables and slots take on a device, without padding.

        Raises: LayoutError where a variable cannot lie so.
        """
        total = 0.0
        for (shape, scope, width), count in self.variables.items():
            total += count * width * c.layout.sharding(shape, c.mesh, scope).local_size
        return total
