"""Bytes of a block in HBM: whole tiles, in the densest order of dims.

Source: `hardware.memory`.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, prod

from hardware.memory import densest_bytes
from meshlib.core.dtypes import DType
from meshlib.program.instructions import Value


def tiled_value_bytes(v: Value) -> int:
    """Bytes of a value's block."""
    return tiled_bytes(v.local_shape.sizes, v.tensor.dtype.itemsize)


def tiled_bytes(sizes: tuple[int, ...], itemsize: float) -> int:
    """Bytes of a block of these sizes; a scalar takes its own bytes."""
    return densest_bytes(sizes, itemsize) if sizes else ceil(itemsize)


@lru_cache(maxsize=1 << 14)
def padding_ratio(sizes: tuple[int, ...], dtype: DType) -> float:
    """Ratio of the bytes of a block in whole tiles to its own; 1 for a scalar."""
    return tiled_bytes(sizes, dtype.itemsize) / max(1, dtype.size_bytes(prod(sizes))) if sizes else 1.0
