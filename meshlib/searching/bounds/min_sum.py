"""Minimum of a sum of tables over choices: exact while tables stay small, otherwise a lower bound.

Choices are eliminated one by one: the tables that depend on a choice are added, and minimised over it. Where the sum
would be too large, the tables are added in several groups, each minimised separately, which may lower the result
(Dechter and Rish, "Mini-buckets", JACM 50(2), 2003): it remains a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
LARGEST = 1 << 12  # entries of a table of one sum


@dataclass(eq=False)
class Table:
    """A sum of tables, each over some choices, which are node numbers; `count` such sums at once, in the first dim.

    Example:
      >>> t = Table()
      >>> t.add((0,), np.array([[0.0, 2.0]]))
      >>> t.add((0, 1), np.array([[[5.0, 1.0], [0.0, 4.0]]]))
      >>> t.add((1,), np.array([[0.0, 3.0]]))
      >>> t.least().tolist()
      [2.0]
    """

    count: int = 1
    parts: list[tuple[tuple[int, ...], Array]] = field(default_factory=list)
    constant: Array = field(init=False)

    def __post_init__(self) -> None:
        self.constant = np.zeros(self.count)

    def add(self, scope: Sequence[int], values: Array) -> None:
        """Add a table, [count, a dim for each choice]; choices with one entry are dropped."""
        sizes = values.shape[1:]
        wide_scope = tuple(n for n, size in zip(scope, sizes, strict=True) if size > 1)
        if not wide_scope:
            self.constant = self.constant + values.reshape(len(values))
        elif values.any():
            self.parts.append((wide_scope, values.reshape([len(values), *(size for size in sizes if size > 1)])))

    def least(self) -> Array:
        """The minimum of each sum, or a lower bound if tables became too large."""
        left, total = [*self.parts], self.constant
        while left:
            met: dict[int, set[int]] = {}
            for scope, _ in left:
                for n in scope:
                    met.setdefault(n, set()).update(scope)
            chosen = min(met, key=lambda n: (len(met[n]), n))
            mine = [part for part in left if chosen in part[0]]
            left = [part for part in left if chosen not in part[0]]
            for scope, values in _grouped(mine):
                minima = values.min(axis=1 + scope.index(chosen))
                others = tuple(n for n in scope if n != chosen)
                if others:
                    left.append((others, minima))
                else:
                    total = total + minima
        return total


def _grouped(parts: Sequence[tuple[tuple[int, ...], Array]]) -> list[tuple[tuple[int, ...], Array]]:
    """The sum, in as few groups as table sizes allow."""
    groups: list[tuple[tuple[int, ...], Array]] = []
    for scope, values in sorted(parts, key=lambda part: -part[1].size):
        for n, (other, before) in enumerate(groups):
            union = (*other, *(x for x in scope if x not in other))
            sizes = dict(zip(other, before.shape[1:], strict=True)) | dict(zip(scope, values.shape[1:], strict=True))
            if prod(sizes[x] for x in union) <= LARGEST:
                groups[n] = union, _over(other, before, union) + _over(scope, values, union)
                break
        else:
            groups.append((scope, values))
    return groups


def _over(scope: tuple[int, ...], values: Array, union: tuple[int, ...]) -> Array:
    """A table broadcast to more choices."""
    order = [0, *(1 + scope.index(n) for n in union if n in scope)]
    ordered = values.transpose(order)
    shape = iter(ordered.shape[1:])
    return ordered.reshape([len(values), *(next(shape) if n in scope else 1 for n in union)])
