"""The result of an all_reduce in ring order."""

from __future__ import annotations

import numpy as np

from hardware.numerics import ring_reduce_scatter


def ring_reduce(parts, op="sum", carry=None):
    """The result of an all_reduce of arrays in ring order: the flattened data in k chunks, each in its own order.

    >>> ring_reduce([np.int32([1, 2, 3]), np.int32([10, 20, 30])]).tolist()
    [11, 22, 33]
    """
    chunks = ring_reduce_scatter([np.reshape(part, -1) for part in parts], 0, op, carry)
    return np.concatenate(chunks).reshape(np.shape(parts[0]))
