"""Snake orders: rings and paths that visit every node of a box of a torus, neighbour to neighbour.

A group that spans several axes may be used as one ring. A snake through the axes in any nesting order
moves one hop at a time; it closes to a ring if its ends are neighbours, across a wrap-around link or, where a
side is even, by keeping one column free for the way back.

Source: Hamiltonian cycles of grid graphs: Itai, Papadimitriou, Szwarcfiter, SIAM J. Comput. 11(4), 1982.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

from hardware.checks import HardwareError, wholes
from hardware.collectives import Axis

Path = tuple[tuple[int, ...], ...]


def snakes(axes: tuple[Axis, ...]) -> Path | None:
    """A ring through all nodes of a box whose neighbours are one hop apart, or None.

    Args:
      axes: (size, wrap) of each axis.
    Returns: coordinates in ring order; None where no snake closes.
    Example:
      >>> snakes(((2, False), (3, False)))
      ((0, 0), (0, 1), (0, 2), (1, 2), (1, 1), (1, 0))
      >>> snakes(((3, False), (3, False))) is None
      True
    """
    for path in snake_orders([n for n, _ in axes]):
        if hop_length(path[-1], path[0], axes) <= 1:
            return path
    return None


@lru_cache(maxsize=1024)
def closes(axes: tuple[Axis, ...]) -> bool:
    """True if `snakes` returns a ring, decided from path ends alone.

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


def snake_orders(sizes: Sequence[int]) -> Iterator[Path]:
    """All snake orders of a box: every nesting of its axes, plain and with a column for the way back.

    Args:
      sizes: of each axis, >= 1.
    Returns: paths of coordinates, each node once, neighbours one hop apart.
    Raises: HardwareError for no axis or a size below 1.
    Example:
      >>> next(snake_orders([2, 2]))
      ((0, 0), (0, 1), (1, 1), (1, 0))
    """
    box = wholes("sizes", sizes, low=1)
    if not box:
        raise HardwareError("a snake needs at least one axis")
    for order in itertools.permutations(range(len(box))):
        nested = [box[axis] for axis in order]
        yield _unpermuted(_snake(nested), order)
        if len(nested) > 1 and nested[0] > 1 and nested[-1] > 2:
            yield _unpermuted(_with_way_back(nested), order)


def hop_length(a: Sequence[int], b: Sequence[int], axes: Sequence[Axis]) -> int:
    """Hops between two nodes of a box."""
    total = 0
    for x, y, (n, wrap) in zip(a, b, axes, strict=True):
        apart = abs(x - y)
        total += min(apart, n - apart) if wrap else apart
    return total


def _snake(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Boustrophedon order: the last axis runs fastest and reverses at its ends."""
    path: list[tuple[int, ...]] = [()]
    for size in reversed(sizes):
        path = [(i, *rest) for i in range(size) for rest in (path if i % 2 == 0 else reversed(path))]
    return path


def _with_way_back(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """A snake over all but position 0 of the last axis, then back along position 0."""
    outer, last = list(sizes[:-1]), sizes[-1]
    rows = _snake(outer)
    path = []
    for i, row in enumerate(rows):
        inner = range(1, last) if i % 2 == 0 else range(last - 1, 0, -1)
        path += [(*row, j) for j in inner]
    if math.prod(outer) % 2:  # the snake ends at the far side, away from position 0
        return _snake(sizes)
    return path + [(*row, 0) for row in reversed(rows)]


def _unpermuted(path: list[tuple[int, ...]], order: Sequence[int]) -> Path:
    """The path with its coordinates back in the original order of axes."""
    return tuple(tuple(place[order.index(axis)] for axis in range(len(order))) for place in path)
