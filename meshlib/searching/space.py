"""The declared space of a search: all meshes of a slice with a role for each axis.

Meshes have up to `axes` axes with different roles, in all sizes whose product is the slice. Of three axes or more at
most one splits the model: the others split dims that variables lack. A dim that an axis does not divide is not split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, permutations
from math import prod

from hardware.slices import Slice
from layouts import LayoutRules, Mesh, joined
from layouts.rules import Rule
from meshlib.core.canonical_keys import key_of
from meshlib.searching.roles import AxisRole

Choices = tuple[tuple[str, object], ...]  # builder arguments by name


@dataclass(frozen=True)
class AxisPart:
    """One axis: its role, its size, and the base dims that divide by it."""

    role: AxisRole
    size: int
    base: tuple[str, ...]

    @property
    def dims(self) -> tuple[str, ...]:
        """All dims that it may split."""
        return self.base if self.role.beside is None else (*self.base, self.role.beside[1])


@dataclass(frozen=True)
class Fixed:
    """The user's fixed choices: rules of every layout, with sizes of their axes if given.

    `named`: axes in the program's constraints, which every mesh has, possibly with one device.
    """

    rules: LayoutRules
    sizes: Mapping[str, int]
    named: tuple[str, ...] = ()

    def factors(self, devices: int) -> Iterator[tuple[dict[str, int], int]]:
        """Sizes of the fixed axes, and the number of devices left for other axes."""
        free = [axis for axis in self.rules.axes if axis not in self.sizes]
        taken = prod(self.sizes.values())
        if devices % taken:
            return
        for sizes in _ordered(devices // taken, len(free)):
            sizes_of_axes = {**self.sizes, **dict(zip(free, sizes, strict=True))}
            yield sizes_of_axes, devices // prod(sizes_of_axes.values())

    def left(self, sizes: Mapping[str, int], given: Mapping[str, int]) -> dict[str, int]:
        """The number of parts into which each dim can still be cut."""
        remaining = dict(sizes)
        for rule in self.rules.rules:
            for axis in rule.axes:
                if (
                    not rule.optional
                    and rule.scope is None
                    and rule.dim in remaining
                    and remaining[rule.dim] % given[axis] == 0
                ):
                    remaining[rule.dim] //= given[axis]
        return remaining


@dataclass(frozen=True, eq=False)
class Candidate:
    """One point of the space: builder arguments, a slice, and the roles of axes, which give a mesh and a layout."""

    choices: Choices
    slice: Slice
    fixed: Fixed
    given: tuple[tuple[str, int], ...]  # sizes of the fixed axes
    parts: tuple[AxisPart, ...]

    @cached_property
    def _names(self) -> list[str]:
        """Names of all axes, including those of one device."""
        names = [axis for axis, _ in self.given]
        for part in self.parts:
            axis, n = part.role.name, 2
            while axis in names:
                axis, n = f"{part.role.name}{n}", n + 1
            names.append(axis)
        return names

    @cached_property
    def _laid(self) -> tuple[Mesh, LayoutRules]:
        sizes, layouts = dict(self.given), [self.fixed.rules]
        for part, axis in zip(self.parts, self._names[len(self.given) :], strict=True):
            sizes[axis] = part.size
            layouts.append(part.role.rules(axis, part.base))
        split_axes = {axis: size for axis, size in sizes.items() if size > 1}
        mesh = Mesh(split_axes | {axis: 1 for axis in self.fixed.named if axis not in split_axes} or {"device": 1})
        return mesh, _only(joined(*layouts), split_axes)

    @property
    def mesh(self) -> Mesh:
        """The mesh, without axes of one device."""
        return self._laid[0]

    @property
    def layout(self) -> LayoutRules:
        """The layout on the mesh."""
        return self._laid[1]

    @property
    def named_splits(self) -> list[tuple[str, frozenset[str], int]]:
        """(name, dims that it may split, size) of each axis."""
        return [(name, dims, size) for name, (dims, size) in zip(self._names, self.splits, strict=True)]

    @cached_property
    def splits(self) -> tuple[tuple[frozenset[str], int], ...]:
        """(dims that it may split, size) of each axis."""
        fixed = [
            (frozenset(rule.dim for rule in self.fixed.rules.rules if axis in rule.axes), size)
            for axis, size in self.given
        ]
        return (*fixed, *((frozenset(part.dims), part.size) for part in self.parts))

    @cached_property
    def identity(self) -> str:
        """Canonical key of arguments, slice, mesh and layout, unique across processes and files."""
        return key_of("search", self.choices, self.slice, self.mesh, self.layout)

    @cached_property
    def key(self) -> str:
        """Slice, mesh, layout and arguments as text."""
        chosen = ",".join(f"{name}={value}" for name, value in self.choices)
        return f"{self.slice.name} {self.mesh} {self.layout} {chosen}".rstrip()

    def __str__(self) -> str:
        return self.key


def laid(choices: Choices, where: Slice, mesh: Mesh, rules: LayoutRules, named: tuple[str, ...]) -> Candidate:
    """The candidate of a given mesh and layout; `named` as in `Fixed`."""
    sizes = dict(mesh.sizes_by_axis)
    return Candidate(choices, where, Fixed(rules, sizes, named), tuple(sizes.items()), ())


def lighter_ones(space: Sequence[Candidate], argument: str, order: Sequence[object]) -> dict[int, list[int]]:
    """For each candidate, those of the same mesh and layout with an earlier value of an argument in `order`.

    By their numbers in the space, the first value first.
    """
    families: dict[object, list[tuple[int, int]]] = {}
    for n, c in enumerate(space):
        given = dict(c.choices)
        value = given.pop(argument, None)
        if value in order:
            family = c.slice, c.parts, c.given, c.fixed.rules, tuple(given.items())
            families.setdefault(family, []).append((order.index(value), n))
    return {n: [m for rank, m in sorted(own) if rank < place] for own in families.values() for place, n in own}


def candidates(
    choices: Choices, where: Slice, roles: Sequence[AxisRole], sizes: Mapping[str, int], fixed: Fixed, most: int
) -> Iterator[Candidate]:
    """All candidates with at most `most` axes beyond the fixed ones; fewer axes first.

    Args:
      sizes: dim -> the largest number of parts into which it may be split.
    """
    for given, devices in fixed.factors(where.devices):
        left = fixed.left(sizes, given)
        for count in range(most + 1):
            orders = sorted({order for f in _factorisations(devices, count) for order in permutations(f)})
            for chosen in combinations(roles, count) if orders else ():
                if count > 2 and sum(role.holds for role in chosen) > 1:
                    continue
                for order in orders:
                    parts = _parts(chosen, order, dict(left))
                    if parts is not None:
                        yield Candidate(choices, where, fixed, tuple(given.items()), parts)


def _parts(roles: Sequence[AxisRole], sizes: Sequence[int], left: dict[str, int]) -> tuple[AxisPart, ...] | None:
    """The roles with the sizes of their axes; None if one does not divide."""
    parts = []
    for role, size in zip(roles, sizes, strict=True):
        base = role.split(size, left)
        if base is None:
            return None
        parts.append(AxisPart(role, size, base))
    return tuple(parts)


def _only(rules: LayoutRules, mesh: Mapping[str, int]) -> LayoutRules:
    """The rules restricted to the axes of a mesh."""
    if all(axis in mesh for axis in rules.axes):
        return rules
    rules_left = []
    for rule in rules.rules:
        axes = tuple(axis for axis in rule.axes if axis in mesh)
        if axes or not rule.axes:
            rules_left.append(Rule(rule.dim, axes, rule.optional, rule.scope, rule.whole))
    return LayoutRules(rules_left)


def _factorisations(number: int, count: int, least: int = 2) -> Iterator[tuple[int, ...]]:
    """Factorisations of a number into that many factors of at least two, ascending.

    >>> list(_factorisations(24, 2))
    [(2, 12), (3, 8), (4, 6)]
    """
    if count == 0:
        if number == 1:
            yield ()
        return
    for first in range(least, number + 1):
        if number % first == 0 and ((count == 1 and first == number) or (count > 1 and first**count <= number)):
            for rest in _factorisations(number // first, count - 1, first):
                yield (first, *rest)


def _ordered(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Ordered factorisations, factors of 1 included, of all divisors of a number over that many axes.

    >>> list(_ordered(4, 1))
    [(1,), (2,), (4,)]
    """
    if count == 0:
        yield ()
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _ordered(number // first, count - 1):
                yield (first, *rest)
