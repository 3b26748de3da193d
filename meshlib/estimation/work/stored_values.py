"""Storage of values in HBM, as decided by the program's memory plan.

The plan distinguishes stored values from those recomputed by their readers (`MemoryPlan.stored`); time and memory use
the same decision. A value that is not stored is read as its sources: the bfloat16 weight of a float32 copy, the int8
numbers and the scales of a dequantised one. Inputs and outputs of a program, or of a loop trip, are always stored.

Each block is padded to whole tiles in its densest layout (`tiles`).
"""

from __future__ import annotations

from collections.abc import Iterator

from meshlib.core.opdef import RESIDENT, Kind
from meshlib.estimation.work.tiles import tiled_bytes
from meshlib.program.instructions import Compute, Instruction, Loop, Value
from meshlib.program.records import Program


class Origins:
    """The value at most as wide from which each value follows by casts, scalings and shifts, stored or not."""

    def __init__(self, program: Program) -> None:
        self._maker: dict[Value, Instruction] = {y: i for i in program.instructions for y in i.outputs}

    def least_itemsize(self, v: Value) -> float:
        """Bytes per element of the narrowest value from which `v` follows."""
        source, scale = self.source(v)
        if source is None or (scale is not None and source.tensor.dtype.itemsize >= v.tensor.dtype.itemsize):
            return v.tensor.dtype.itemsize
        return self.least_itemsize(source)

    def source(self, v: Value) -> tuple[Value | None, Value | None]:
        """(the operand of `v`'s shape that is no wider, a smaller operand that scales it); None where there is none."""
        i = self._maker.get(v)
        if not isinstance(i, Compute) or not i.operation.opdef.repeated:
            return None, None
        sources = [x for x in i.inputs if not _is_small(x, v)]
        scales = [x for x in sources if _is_part(x, v)]
        rest = [x for x in sources if x not in scales]
        if len(rest) != 1 or len(scales) > 1 or rest[0].tensor.shape != v.tensor.shape:
            return None, None
        if rest[0].tensor.dtype.itemsize > v.tensor.dtype.itemsize:
            return None, None
        return rest[0], scales[0] if scales else None

    def uncast(self, v: Value) -> Value:
        """The value behind a chain of casts, which readers recompute."""
        i = self._maker.get(v)
        while isinstance(i, Compute) and i.operation.opdef.repeated and len(i.inputs) == 1:
            (v,) = i.inputs
            i = self._maker.get(v)
        return v


class Stored:
    """Storage of the values of a program, or of the body of `loop`.

    Attributes:
      held: values that are resident throughout.
      recomputed: values recomputed by their readers, each with its recipe.
    """

    def __init__(self, program: Program, loop: Loop | None = None) -> None:
        decision = (program if loop is None else loop).memory_plan.stored
        self.held = held_values(program)
        self.recomputed = decision.again
        self._unstored = decision.unstored - decision.written
        self._origins = Origins(program)
        self._known: dict[Value, Value] = {}
        self._sizes: dict[Value, tuple[int, int]] = {}

    def is_written(self, v: Value) -> bool:
        """True if the group that produces a value writes it to memory."""
        return v not in self._unstored

    def of(self, v: Value) -> Value:
        """The stored value that is read for a value: itself, or the one that it follows from."""
        stored = self._known.get(v)
        if stored is None:
            source = self._source(v)
            stored = self._known[v] = v if source is None else self.of(source)
        return stored

    def _source(self, v: Value) -> Value | None:
        """The value from which an unstored value follows, narrower if it is scaled."""
        if self.is_written(v):
            return None
        source, scale = self._origins.source(v)
        if source is None or (scale is not None and self.itemsize(source) >= v.tensor.dtype.itemsize):
            return None
        return source

    def scales(self, v: Value) -> Iterator[Value]:
        """Stored scales that are read together with `of(v)`."""
        while self.of(v) is not v:
            source, scale = self._origins.source(v)
            assert source is not None
            if scale is not None:
                yield self._origins.uncast(scale)
            v = source

    def itemsize(self, v: Value) -> float:
        """Bytes per element, as stored."""
        return self.of(v).tensor.dtype.itemsize

    def sizes(self, v: Value) -> tuple[int, int]:
        """Bytes read for a value's block: exact, and in whole tiles."""
        sizes = self._sizes.get(v)
        if sizes is None:
            dtype = self.of(v).tensor.dtype
            sizes = dtype.size_bytes(v.local_size), tiled_bytes(v.local_shape.sizes, dtype.itemsize)
            self._sizes[v] = sizes
        return sizes


def _is_part(x: Value, v: Value) -> bool:
    small, large = x.tensor.shape, v.tensor.shape
    return small.size < large.size and set(small) <= set(large)


def _is_small(x: Value, beside: Value) -> bool:
    """True if an operand is almost free for its readers: generated, or a small input that is broadcast."""
    kind = x.tensor.operation.opdef.kind
    return kind is Kind.SOURCE or (kind in RESIDENT and x.tensor.shape.size < beside.tensor.shape.size)


def held_values(program: Program) -> set[Value]:
    """Values that must be in memory: inputs and results of a program or of a loop's trip."""
    faces = (program.inputs, program.variables, program.outputs, program.updates)
    loops = [v for i in program.instructions if isinstance(i, Loop) for v in (*i.inputs, *i.outputs)]
    return {*loops, *(v for face in faces for v in face.values())}
