"""Threefry-2x32: random words as a pure function of (key, counter), independent of the layout.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); 20 rounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Words = np.ndarray[Any, np.dtype[np.uint32]]

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA


def threefry2x32(key: tuple[int, int], high: Words, low: Words) -> tuple[Words, Words]:
    """Encrypt the counters (high, low) under `key`: two independent 32-bit words per counter.

    >>> x, y = threefry2x32((0, 0), np.zeros(1, np.uint32), np.zeros(1, np.uint32))
    >>> hex(x[0]), hex(y[0])  # published test vector
    ('0x6b200159', '0x99ba4efe')
    """
    words = (key[0], key[1], key[0] ^ key[1] ^ PARITY)
    # asarray: NumPy makes scalars of sums without dims, which `out=` does not take.
    x, y = np.asarray(high + np.uint32(words[0])), np.asarray(low + np.uint32(words[1]))
    scratch = np.empty_like(y)
    for group in range(5):
        for r in ROTATIONS[group % 2]:
            np.add(x, y, out=x)
            np.left_shift(y, np.uint32(r), out=scratch)
            np.right_shift(y, np.uint32(32 - r), out=y)
            np.bitwise_or(y, scratch, out=y)
            np.bitwise_xor(y, x, out=y)
        np.add(x, np.uint32(words[(group + 1) % 3]), out=x)
        np.add(y, np.uint32((words[(group + 2) % 3] + group + 1) & 0xFFFFFFFF), out=y)
    return x, y
