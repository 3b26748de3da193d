"""Snake orders: rings that visit every node of a box of a torus, neighbour to neighbour.

A group that spans several axes may be used as one ring. A snake through the axes in any nesting order
moves one hop at a time; it closes to a ring if its ends are neighbours, across a wrap-around link or, where a
side is even, by keeping one column free for the way back.

Source: Hamiltonian cycles of grid graphs: Itai, Papadimitriou, Szwarcfiter, SIAM J. Comput. 11(4), 1982.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

from hardware.collectives import Axis


@lru_cache(maxsize=1024)
def closes(axes: tuple[Axis, ...]) -> bool:
    """True if a snake through all nodes of a box closes to a ring, decided from path ends alone.

    Example:
      >>> closes(((16, False), (20, False), (28, False))), closes(((3, False), (3, False)))
      (True, False)
    """
    for order in itertools.permutations(axes):
        sizes = [n for n, _ in order]
        if sizes[0] > 1 and sizes[-1] > 2 and math.prod(sizes[:-1]) % 2 == 0:
            return True  # one column leads back
        last, whole = [], True  # ends of the snake; an even axis returns all axes inside it to their start
        for n in sizes:
            last.append(n - 1 if whole else 0)
            whole = whole and n % 2 == 1
        if hop_length(last, [0] * len(last), order) <= 1:
            return True
    return False


def hop_length(a: Sequence[int], b: Sequence[int], axes: Sequence[Axis]) -> int:
    """Hops between two nodes of a box."""
    total = 0
    for x, y, (n, wrap) in zip(a, b, axes, strict=True):
        apart = abs(x - y)
        total += min(apart, n - apart) if wrap else apart
    return total
