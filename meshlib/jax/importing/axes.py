"""Unification of the axes of a traced program into dims: union-find over axes that may be products of dims.

Arrays have axes, programs have dims. Two axes aligned by an operation are one dim, unless a tensor would then have it
twice: then they stay two, and the importer of the operation renames one of them. An axis that is reshaped into several
is their product everywhere, so that splitting and merging heads costs nothing. An axis of length 1 is the empty
product.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod


@dataclass(eq=False, repr=False)
class Axis:
    """One axis: its length, and either a dim, a product of `parts` (major first), or an alias of `same_as`."""

    size: int
    name: str | None = None  # given by the user
    same_as: Axis | None = None
    parts: tuple[Axis, ...] = ()
    holders: set[int] = field(default_factory=set)  # index spaces that contain it


@dataclass
class Axes:
    """All axes of a program."""

    named: dict[str, list[Axis]] = field(default_factory=dict)
    # pairs that an operation would unify, but that stayed separate
    apart: list[tuple[Axis, Axis]] = field(default_factory=list)
    # (part, whole) pairs: an axis cut, padded or concatenated from another
    kin: list[tuple[Axis, Axis]] = field(default_factory=list)
    # (number, tile) pairs: the factors of an axis that is cut into equal tiles
    tiles: list[tuple[Axis, Axis]] = field(default_factory=list)
    _spaces: int = 0

    # ------------------------------------------------------------ queries

    def find(self, axis: Axis) -> Axis:
        """The representative of an axis."""
        while axis.same_as is not None:
            if axis.same_as.same_as is not None:
                axis.same_as = axis.same_as.same_as
            axis = axis.same_as
        return axis

    def dims(self, axis: Axis) -> list[Axis]:
        """The dims whose product an axis is, major first; [] for length 1."""
        root = self.find(axis)
        if root.parts:
            return [d for part in root.parts for d in self.dims(part)]
        return [root] if root.size > 1 else []

    def flat(self, axes: Iterable[Axis]) -> list[Axis]:
        """The dims of several axes, in row-major order."""
        return [d for axis in axes for d in self.dims(axis)]

    # ------------------------------------------------------------ construction

    def new(self, size: int) -> Axis:
        """A new, unconstrained axis."""
        return Axis(size)

    def space(self) -> int:
        """A new index space, within which all axes stay distinct."""
        self._spaces += 1
        return self._spaces

    def hold(self, space: int, axes: Iterable[Axis]) -> None:
        """Record that an index space contains these axes."""
        for axis in axes:
            for one in self._all(axis):
                one.holders.add(space)

    def _all(self, axis: Axis) -> Iterator[Axis]:
        root = self.find(axis)
        yield root
        for part in root.parts:
            yield from self._all(part)

    def assign_name(self, axis: Axis, name: str) -> Axis | None:
        """Give a dim the user's name; this unifies it with dims of the same name and length.

        Returns: None, or a dim of that name that must stay distinct from it.
        """
        root = self.find(axis)
        same = next((a for a in self.named.get(name, []) if self.find(a).size == root.size), None)
        if same is not None and self.find(same) is root:
            return None
        for other in self.named.get(name, []):
            if self.find(other).holders & root.holders:
                return self.find(other)
        root.name = name
        self.named.setdefault(name, []).append(root)
        if same is not None:
            self.tie(root, same)
        return None

    def split(self, axis: Axis, sizes: Sequence[int]) -> tuple[Axis, ...]:
        """Make a dim the product of new ones; the major one keeps the user's name."""
        root = self.find(axis)
        assert not root.parts
        assert prod(sizes) == root.size
        root.parts = tuple(Axis(n, holders=set(root.holders)) for n in sizes)
        if root.name is not None:
            major = next((p for p in root.parts if p.size > 1), root.parts[0])
            major.name, self.named[root.name] = (
                root.name,
                [major if self.find(a) is root else a for a in self.named[root.name]],
            )
        return root.parts

    # ------------------------------------------------------------ unification

    def may_be_one(self, a: Axis, b: Axis) -> bool:
        """True if two axes can be unified without a repeated dim or name in any index space."""
        a, b = self.find(a), self.find(b)
        if a is b:
            return True
        if a.holders & b.holders or (a.name and b.name and a.name != b.name):
            return False
        name, strangers = (a.name, b) if a.name else (b.name, a)
        rivals = self.named.get(name, []) if name else []
        return not any(self.find(r).holders & strangers.holders for r in rivals if self.find(r) not in (a, b))

    def tie(self, a: Axis, b: Axis) -> None:
        """Unify two axes of equal length where possible."""
        self.tie_runs([a], [b])

    def tie_runs(self, left: Sequence[Axis], right: Sequence[Axis]) -> bool:
        """Unify two axis lists of equal total size dim by dim; False if they have no common factorisation."""
        olds, news = self.flat(left), self.flat(right)
        if [d.size for d in olds] != [d.size for d in news]:
            cuts = sorted({*_cuts(olds), *_cuts(news)})
            if any(high % low for low, high in pairwise(cuts)):
                return False
            for d in {*olds, *news}:
                self._refine(d, olds if d in olds else news, cuts)
            olds, news = self.flat(left), self.flat(right)
            if [d.size for d in olds] != [d.size for d in news]:
                return False  # a dim that occurs on both sides is cut at two different places
        for a, b in zip(olds, news, strict=True):
            self._unite(a, b)
        return True

    def _refine(self, d: Axis, run: Sequence[Axis], cuts: Sequence[int]) -> None:
        if self.find(d).parts:
            return
        low = prod(e.size for e in run[run.index(d) + 1 :])
        inside = [c // low for c in cuts if low <= c <= low * d.size and not c % low]
        sizes = [high // low for low, high in pairwise(inside)][::-1]
        if len(sizes) > 1:
            self.split(d, sizes)

    def _unite(self, a: Axis, b: Axis) -> None:
        a, b = self.find(a), self.find(b)
        if a is b:
            return
        if a.parts or b.parts:  # split from the other side meanwhile
            self.tie_runs([a], [b])
            return
        if not self.may_be_one(a, b):
            self.apart.append((a, b))
            return
        if len(a.holders) < len(b.holders):
            a, b = b, a
        b.same_as, a.name = a, a.name or b.name
        a.holders |= b.holders
        b.holders = set()


def equal_groups(olds: Sequence[Axis], news: Sequence[Axis]) -> Iterator[tuple[list[Axis], list[Axis]]]:
    """Cut both lists, left to right, into the smallest groups of equal size."""
    left, right = list(olds), list(news)
    while left or right:
        a, b = [left.pop(0)], [right.pop(0)]
        while (m := prod(x.size for x in a)) != (n := prod(x.size for x in b)):
            (a if m < n else b).append((left if m < n else right).pop(0))
        yield a, b


def _cuts(run: Sequence[Axis]) -> list[int]:
    """The strides at the boundaries of a list of dims, from 1 to its size."""
    cuts = [1]
    for d in reversed(run):
        cuts.append(cuts[-1] * d.size)
    return cuts
