"""What both executors share: running one computation on given arrays, and checking what comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hardware.numerics import round_to_bfloat16
from meshlib.dtypes import BFLOAT16
from meshlib.errors import ProgramError
from meshlib.graph import Operation, TensorType
from meshlib.operation import Block, Kind
from meshlib.simulate.engine import Engine

Array = np.ndarray[Any, Any]

# Results that are bfloat16 already when their operands are.
_EXACT_IN_BFLOAT16 = ("relu", "negative", "maximum", "minimum", "where", "abs", "sign", "relu_grad")


def compute(
    op: Operation,
    inputs: tuple[TensorType, ...],
    out: TensorType,
    arrays: Sequence[Array],
    offsets: Mapping[str, int],
    engine: Engine,
    buffer: Array | None,
) -> Array:
    """Run `local` on one block: the result has the local type, rounded if it is bfloat16."""
    block = Block(op, inputs, out, offsets, engine, buffer)
    with np.errstate(all="ignore"):  # overflow and NaN are values here; the NaN report finds them
        y = op.kind.local(block, *arrays)
    if y.shape != out.shape.sizes or y.dtype != out.dtype.storage:
        raise ProgramError(f"{op} made {y.dtype}{list(y.shape)}, not the declared {out}")
    if out.dtype is BFLOAT16 and op.kind.kind is not Kind.VIEW and op.kind.name not in _EXACT_IN_BFLOAT16:
        return round_to_bfloat16(y, out=y if y.flags.writeable else None)
    return y
