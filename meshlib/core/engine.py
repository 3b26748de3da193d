"""The arithmetic of a simulated core: rounding and accumulation of the MXU, and random keys."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hardware.numerics import mxu_matmul, round_to_bfloat16
from meshlib.core.initializers import Key, fold, make_key
from meshlib.core.spare_arrays import SpareArrays

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Engine:
    """What `local` functions compute with during one step.

    seed, step    of the simulation: with the name of an operation they make its random key
    highest       whether float32 stays float32 into the MXU
    trips         which trip of each loop around the operation
    in_order      whether matmuls add in the MXU's own order (exact) or as BLAS does (fast)
    rounded       whether float32 operands arrive already rounded
    shared        what operations on the same arrays leave for each other in this step; None: each does its own work
    spare         which arrays of variables are equal but for the rows that the last step wrote; None: copy them whole
    """

    seed: int
    step: int
    highest: bool
    in_order: bool
    rounded: bool = False
    trips: tuple[int, ...] = ()
    shared: dict[Hashable, Any] | None = None
    spare: SpareArrays | None = None

    def key(self, name: str) -> Key:
        """The random key of the operation `name` in this step."""
        return fold(make_key(self.seed, name), self.step, *self.trips)

    def in_trip(self, trip: int) -> Engine:
        """The same inside one trip of a loop."""
        return replace(self, trips=(*self.trips, trip))

    def mxu_operand(self, x: Array, precise: bool) -> Array:
        """A float32 operand as the MXU takes it: rounded to bfloat16, unless the precision is highest."""
        if self.rounded or self.highest or precise or x.dtype != np.float32:
            return x
        return round_to_bfloat16(x)

    def made_inside(self, x: Array) -> Array:
        """A float32 value that a kernel makes and puts back into the MXU: rounded in place, unless to be kept."""
        return x if self.highest or x.dtype != np.float32 else round_to_bfloat16(x, out=x)

    def matmul(self, a: Array, b: Array, out: Array) -> None:
        """out[i] = a[i] @ b[i]: float32 products and sums (float64 for float64)."""
        if self.in_order:
            np.copyto(out, mxu_matmul(a, b))
        elif a.shape[0] == 1:
            np.matmul(a[0], b[0], out=out[0])
        else:
            np.matmul(a, b, out=out)
