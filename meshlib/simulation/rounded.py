"""Rounded copies of MXU operands that are reused from step to step.

A variable that the program does not update, such as the weights in decoding, is rounded to bfloat16 in the first step
alone. Of a cache, only the rows that the step wrote are rounded.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hardware.numerics import round_to_bfloat16
from meshlib.core.arrays import new_array
from meshlib.core.spare_arrays import SpareArrays, same_elements

Array = np.ndarray[Any, Any]


@dataclass
class RoundedCopies:
    """For each operand of a body and trip: the array that was rounded (kept alive), and its rounded copy."""

    _copies: dict[Hashable, tuple[Array, Array]] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget all copies: their source arrays may have been overwritten."""
        self._copies.clear()

    def of(self, key: Hashable, x: Array, spare: SpareArrays) -> Array | None:
        """The rounded copy of `x`; None unless `x` is a constant of the program or was updated by rows."""
        source, rounded = self._copies.pop(key, (None, None))
        pair = spare.written_in_this_step(x)
        if pair is None and not spare.is_constant(x):
            return None
        before = x if pair is None else pair.x
        if rounded is None:
            rounded = new_array(x.shape, x.dtype)
        if source is None or not same_elements(source, before):
            round_to_bfloat16(x, out=rounded)
        elif pair is not None:
            rounded.transpose(pair.order)[pair.rows] = round_to_bfloat16(x.transpose(pair.order)[pair.rows])
        self._copies[key] = x, rounded
        return rounded
