"""Bytes of a block in HBM: whole tiles, in the densest order of dims.

Source: `hardware.memory`.
"""

from __future__ import annotations

from math import ceil

from hardware.memory import densest_bytes
from meshlib.program.instructions import Value


def tiled_value_bytes(v: Value) -> int:
    """Bytes of a value's block."""
    return tiled_bytes(v.local_shape.sizes, v.tensor.dtype.itemsize)


def tiled_bytes(sizes: tuple[int, ...], itemsize: float) -> int:
    """Bytes of a block of these sizes; a scalar takes its own bytes."""
    return densest_bytes(sizes, itemsize) if sizes else ceil(itemsize)
