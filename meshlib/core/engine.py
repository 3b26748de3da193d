"""The arithmetic of a simulated core: rounding and accumulation of the MXU, and random keys."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hardware.exact_products import OperandCache
from hardware.numerics import mxu_matmul, round_to_bfloat16
from meshlib.core.initializers import Key, fold, make_key
from meshlib.core.spare_arrays import SpareArrays

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Engine:
    """Context in which `local` functions compute during one step.

    seed, step    seed and step of the simulation, which with an operation's name make its random key
    highest       whether MXU operands stay in float32
    trips         trip index of each enclosing loop
    in_order      whether matmuls accumulate in the MXU's order (exact) or in that of BLAS (fast)
    rounded       whether float32 operands are already rounded
    shared        results shared by operations on the same arrays in this step; None: nothing is shared
    spare         pairs of arrays of variables that differ only in the rows of the last step; None: copy whole arrays
    operands      of one instruction's products, for devices that hold the same array; they do not change meanwhile
    """

    seed: int
    step: int
    highest: bool
    in_order: bool
    rounded: bool = False
    trips: tuple[int, ...] = ()
    shared: dict[Hashable, Any] | None = None
    spare: SpareArrays | None = None
    operands: OperandCache | None = None

    def key(self, name: str, trips: Iterable[int]) -> Key:
        """The random key of the operation `name` in this step and these trips of the loops around it."""
        return fold(make_key(self.seed, name), self.step, *trips)

    def in_trip(self, trip: int) -> Engine:
        """This engine inside one trip of a loop."""
        return replace(self, trips=(*self.trips, trip))

    def mxu_operand(self, x: Array, precise: bool) -> Array:
        """A float32 operand as the MXU reads it: rounded to bfloat16, unless the precision is highest."""
        if self.rounded or self.highest or precise or x.dtype != np.float32:
            return x
        return round_to_bfloat16(x)

    def shared_operand(self, x: Array, precise: bool) -> Array:
        """`mxu_operand` of a value of the program, rounded once for all devices that hold the same array."""
        if self.operands is None:
            return self.mxu_operand(x, precise)
        return self.operands.of(("rounded", precise), x, lambda x: self.mxu_operand(x, precise))

    def made_inside(self, x: Array) -> Array:
        """A float32 intermediate of a kernel that feeds the MXU: rounded in place, unless the precision is highest."""
        return x if self.highest or x.dtype != np.float32 else round_to_bfloat16(x, out=x)

    def matmul(self, a: Array, b: Array, out: Array, operands: OperandCache | None = None) -> None:
        """out[i] = a[i] @ b[i]: float32 products and sums (float64 for float64)."""
        if self.in_order:
            if out.flags.c_contiguous and out.dtype == a.dtype:
                mxu_matmul(a, b, operands=operands, out=out)
            else:
                np.copyto(out, mxu_matmul(a, b, operands=operands))
        elif a.shape[0] == 1:
            np.matmul(a[0], b[0], out=out[0])
        else:
            np.matmul(a, b, out=out)
