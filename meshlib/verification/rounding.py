"""Bounds on the effect of rounding on every value of a program.

Layouts differ only in rounding, so the tolerance can be derived. A sum of n terms, added in any order, is the exact sum
of terms each perturbed by a relative n u at most, where u is half the dtype's eps (backward error analysis). So the
unsharded program runs in float64 once unchanged, and a few times with every operand of every operation randomly
perturbed by the bound of its rounding error:

    operands   of sums, n u32 for n terms; in bfloat16 also u16 for each partial sum on the mesh;
               u16 for float32 operands of the MXU unless the precision is "highest"
    results    4 u32 (NumPy's functions are not exact to the last bit), also u16 if they are bfloat16

Operations that only select elements of their operands do not round and are not perturbed. Here u32 and u16 are the
units of float32 (float64 for float64) and bfloat16. The tolerance of a tensor is `SAFETY` times the largest resulting
change of any element, plus 4 u32 of its largest element. Cancellation and steep functions need no special rules: they
amplify perturbations like rounding. Integers and booleans must be equal, unless perturbations change them too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from meshlib.core.dtypes import BFLOAT16, E4M3, E5M2, FLOAT32, FLOAT64, DType
from meshlib.core.engine import Engine
from meshlib.core.graph import Operation, Tensor, TensorType
from meshlib.core.opdef import ON_MXU, Block, Kind, Role
from meshlib.program.instructions import Compute, Instruction, Loop, Move, Value
from meshlib.program.interpreter import Interpreter
from meshlib.program.records import Program

Array = np.ndarray[Any, Any]

Key = tuple[Tensor, int]  # a tensor, and the number of its previous computations in the step, as in loops

SAFETY = 4.0
SAMPLES = 4  # runs with perturbed operands


class TripCounts:
    """The number of computations of each value so far, which identifies the trips of enclosing loops."""

    def __init__(self) -> None:
        self.counts: dict[Value, int] = {}

    def next(self, v: Value) -> int:
        n = self.counts.get(v, 0)
        self.counts[v] = n + 1
        return n


def _unit(dtype: DType) -> float:
    return {FLOAT64: 2.0**-53, FLOAT32: 2.0**-24, BFLOAT16: 2.0**-8, E4M3: 2.0**-4, E5M2: 2.0**-3}.get(dtype, 0.0)


def accumulated(dtype: DType) -> float:
    """The unit roundoff of sums: bfloat16 and fp8 values are accumulated in float32."""
    return _unit(FLOAT32) if dtype.is_rounded else _unit(dtype)


def _terms(op: Operation) -> int:
    """The largest number of terms summed into an element of the result."""
    none: tuple[Role, ...] = (Role.PARALLEL, Role.MAX, Role.MIN)
    if op.opdef.kind is Kind.CONTRACTION:  # along a spatial dim it sums over the window's dim
        none += (Role.HALO,)
    # Alternative splits of one dim are the same sum.
    return prod({f.operands: f.size for f in op.opdef.roles(op) if f.role not in none}.values())


def _only_selects(op: Operation, y: Array, inputs: Sequence[Array]) -> bool:
    """True if a result has elements of the operands, of either sign, zeros, ones and given numbers alone."""
    if op.opdef.kind in ON_MXU:
        return False
    given = [x for a in op.attrs.values() for x in (a if isinstance(a, tuple) else (a,)) if isinstance(x, int | float)]
    known = np.concatenate(
        [np.array([0, 1, *given], np.float64), *(np.ravel(x) for x in inputs if x.dtype.kind != "b")]
    )
    if not y.size:
        return True
    magnitudes, known = np.abs(y), np.abs(known)
    return bool((known == magnitudes.flat[0]).any() and np.isin(magnitudes, known).all())  # usually sufficient


@dataclass(eq=False)
class Wide(Interpreter[Array, Engine]):
    """The unsharded program in float64; with `rng`, operands are perturbed by the bounds of their rounding errors."""

    highest: bool
    parts: int  # largest number of partial sums: cores of the largest mesh
    rng: np.random.Generator | None
    trips: TripCounts = field(default_factory=TripCounts)
    values: dict[Key, Array] = field(default_factory=dict)

    def run(self, program: Program, given: Mapping[Value, Array], context: Engine) -> dict[Value, Array]:
        """Run the program in float64."""
        return super().run(program, {v: self._widened(x, v.tensor.dtype) for v, x in given.items()}, context)

    def observe(self, i: Instruction, y: Value, value: Array) -> None:
        self.values.setdefault((y.tensor, self.trips.next(y)), value)

    def move(self, i: Move, inputs: Sequence[Array]) -> Sequence[Array]:
        return inputs

    def sliced(self, x: Array, trip: int, axis: int) -> Array:
        return np.asarray(np.take(x, trip, axis=axis))

    def stacked(self, i: Loop, n: int, parts: Sequence[Array]) -> Array:
        return np.stack(parts)

    def goes_on(self, going: Array) -> bool:
        return bool(going)

    def compute(self, program: Program, i: Compute, inputs: Sequence[Array], context: Engine) -> list[Array]:
        op = i.operation
        types = tuple(_wide_type(v.tensor) for v in i.inputs)
        zeros = {f.name: 0 for f in op.opdef.roles(op)}
        block = Block(op, types, _wide_type(op.output), zeros, context)

        def local(arrays: Sequence[Array]) -> list[Array]:
            with np.errstate(all="ignore"):
                results: Any = op.opdef.local(block, *arrays)
            results = results if isinstance(results, tuple) else (results,)
            return [self._widened(np.asarray(y), t.dtype) for y, t in zip(results, op.outputs, strict=True)]

        plain = local(inputs)
        if self.rng is None or op.opdef.exact:
            return plain
        changed = local(
            [self._perturbed(x, self._perturbation(op, v.tensor.dtype)) for v, x in zip(i.inputs, inputs, strict=True)]
        )
        units = [_unit(v.tensor.dtype) for v in i.inputs if v.tensor.dtype.is_float]
        results = []
        for t, y, other in zip(op.outputs, plain, changed, strict=True):
            if not t.dtype.is_float:
                results.append(y)  # a selection: it flips if the compared values change
            elif _only_selects(op, y, inputs):
                results.append(self._perturbed(y, _unit(t.dtype) if units and _unit(t.dtype) > max(units) else 0))
            else:
                by = 4 * accumulated(t.dtype) + (_unit(t.dtype) if t.dtype.is_rounded else 0)
                results.append(self._perturbed(other, by))
        return results

    def _perturbation(self, op: Operation, dtype: DType) -> float:
        terms, change = _terms(op), 0.0
        if terms > 1:
            change = terms * accumulated(dtype) + (self.parts * _unit(dtype) if dtype is BFLOAT16 else 0)
        if op.opdef.kind in ON_MXU and dtype is FLOAT32 and not self.highest:
            change += _unit(BFLOAT16)
        return change

    def _perturbed(self, x: Array, by: float) -> Array:
        if self.rng is None or not by or x.dtype.kind != "f":
            return x
        with np.errstate(all="ignore"):
            return np.asarray(x * (1 + by * self.rng.uniform(-1, 1, x.shape)))

    @staticmethod
    def _widened(x: Array, dtype: DType) -> Array:
        return np.asarray(x, np.float64) if dtype.is_float else np.asarray(x)


def _wide_type(t: Tensor) -> TensorType:
    return TensorType(t.shape, FLOAT64) if t.dtype.is_float else t.type


def difference(a: Array, b: Array) -> Array:
    """|a - b|; equal infinities and NaNs at the same position differ by 0, others by infinity."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    with np.errstate(all="ignore"):
        d = np.abs(x - y)
    d = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, d)
    return np.where(np.isnan(d), np.inf, d)


def largest(x: Array) -> float:
    """The largest finite magnitude."""
    magnitudes = np.abs(np.asarray(x, np.float64))
    return float(np.max(magnitudes, initial=0.0, where=np.isfinite(magnitudes)))
