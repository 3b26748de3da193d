"""Roles of mesh axes: the dims that an axis may split, read from the program.

A role is a *base*, dims of which no two share a tensor, so that all may take the axis at once, and at most one
*companion*, a dim that takes the axis in tensors that have no dim of the base: in all tensors (`length:model?`,
Megatron's sequence parallelism; `d_model:data?`, fully sharded), or in slots alone (`slots/d_model:data?`, ZeRO-1).

Programs of at most `SMALL` dims get every base and every companion. Larger ones get each dim alone and the largest
bases, with the companions that split most of the activations, variables and slots that the base leaves whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import gcd
from typing import TypeAlias

from layouts import LayoutRules, Shape
from layouts.rules import Rule
from meshlib.core.laid_dims import LaidDimension

SMALL = 6  # programs with at most this many dims are searched over all roles
MOST_BASES = 24  # multi-dim bases: many small layers have exponentially many sets of dims that never meet
# For larger programs: companions per base, and the scope whose elements rank them.
RANKED = {"activations": 2, "variables": 1, "slots": 1}
LEAST_SHARE = 0.01  # share of a scope's elements that a companion must split in larger programs


@dataclass(frozen=True)
class AxisRole:
    """The use of an axis.

    `base` dims take the axis wherever they occur; `beside`, a scope (None: all tensors) and a dim, in others.
    `name` is that of the axis. `holds`: whether variables have a dim of the base, so that it splits the model.
    """

    base: tuple[str, ...]
    beside: tuple[str | None, str] | None
    name: str
    holds: bool

    def split(self, size: int, left: dict[str, int]) -> tuple[str, ...] | None:
        """The base dims divisible by an axis of that size; updates `left`, the parts into which dims can still be cut.

        None where no dim of the base divides, or the one beside does not.
        """
        dividing = tuple(dim for dim in self.base if left[dim] % size == 0)
        if not dividing or (self.beside is not None and left[self.beside[1]] % size):
            return None
        for dim in (*dividing, self.beside[1]) if self.beside is not None else dividing:
            left[dim] //= size
        return dividing

    def rules(self, axis: str, base: Sequence[str]) -> LayoutRules:
        """Rules for an axis, with the base dims that divide."""
        own_rules = [Rule(dim, (axis,)) for dim in base]
        if self.beside is not None:
            scope, dim = self.beside
            own_rules.append(Rule(dim, (axis,), optional=True, scope=scope))
        return LayoutRules(own_rules)

    def __str__(self) -> str:
        return str(self.rules(self.name, self.base))


@dataclass(frozen=True)
class TensorClasses:
    """Classes of tensors that a layout shards: shape, scope, and count."""

    counts: Mapping[tuple[Shape, str], int]

    @staticmethod
    def of(judged: Iterable[tuple[object, Shape, str]]) -> TensorClasses:
        """Classes from `Subjects.judged`."""
        return TensorClasses(Counter((shape, scope) for _, shape, scope in judged))

    @property
    def sizes(self) -> dict[str, int]:
        """Dim -> largest number of parts that divides all its sizes.

        Sizes that depend on the layout impose no limit, because they adapt to it.
        """
        size_of: dict[str, int] = {}
        for shape, _ in self.counts:
            for d in shape:
                if isinstance(d, LaidDimension):
                    continue
                size_of[d.name] = gcd(size_of.get(d.name, 0), d.size)
        return size_of

    def meeting(self, dim: str) -> set[str]:
        """Dims that share a tensor with it."""
        return {name for shape, _ in self.counts if dim in shape.names for name in shape.names} - {dim}

    def elements(self, scope: str) -> int:
        """Elements of all tensors in a scope."""
        return sum(count * shape.size for (shape, where), count in self.counts.items() if where == scope)

    def without(self, base: Iterable[str], scope: str) -> Counter[str]:
        """Elements of tensors in a scope without dims of `base`, by the dims that they have."""
        taken, elements_of = set(base), Counter[str]()
        for (shape, where), count in self.counts.items():
            if where == scope and taken.isdisjoint(shape.names):
                for name in shape.names:
                    elements_of[name] += count * shape.size
        return elements_of


def roles_of(tensors: TensorClasses, dims: Sequence[str], batch: str | None = None) -> list[AxisRole]:
    """The roles of a program's dims, plain ones first. `dims` are those that an axis may split.

    Axes are called "data", "fsdp" and "zero1" where they split the `batch`, "model" where the base has dims of
    variables, and otherwise as the first dim.
    """
    held = {name for (shape, scope) in tensors.counts if scope == "variables" for name in shape.names}
    roles: list[AxisRole] = []
    for base in _bases(tensors, dims):
        holds = not held.isdisjoint(base)
        names = ("model",) * 3 if holds else ("data", "fsdp", "zero1") if batch in base else (base[0],) * 3
        roles.append(AxisRole(base, None, names[0], holds))
        companions = _all_companions if is_small(dims) else _ranked_companions
        for scope, dim in companions(tensors, base, dims, held):
            roles.append(AxisRole(base, (scope, dim), names[2 if scope else 1], holds))
    return roles


def is_small(dims: Sequence[str]) -> bool:
    """True if every role is tried for a program with these dims."""
    return len(dims) <= SMALL


def space_of(dims: Sequence[str], axes: int) -> str:
    """Description of the space searched for a program with these dims."""
    most = ", ".join(f"{count} of {scope}" for scope, count in RANKED.items())
    bases, companions = "each one and the largest sets", f"one of those that split most ({most})"
    if is_small(dims):
        bases, companions = "every set", "any companion"
    at_most = "one such axis" if axes == 1 else f"up to {axes} such axes"
    return (
        f"meshes of {at_most}; bases: {bases} of {len(dims)} dims of which no two share a tensor; beside: {companions}"
    )


Companion: TypeAlias = tuple[str | None, str]


def _all_companions(
    tensors: TensorClasses, base: Sequence[str], dims: Sequence[str], held: set[str]
) -> list[Companion]:
    """Every other dim that shares a tensor with a base dim, for all tensors; and for slots, if it splits any.

    A dim that never shares a tensor with the base extends the base instead.
    """
    meeting = set[str]().union(*(tensors.meeting(dim) for dim in base))
    slots = tensors.without(base, "slots")
    others = [dim for dim in dims if dim not in base and dim in meeting]
    return [*((None, dim) for dim in others), *(("slots", dim) for dim in others if slots[dim])]


def _ranked_companions(
    tensors: TensorClasses, base: Sequence[str], dims: Sequence[str], held: set[str]
) -> list[Companion]:
    """Companions that split the most elements of each scope: at most `RANKED[scope]` dims, in slots or everywhere."""
    companions: dict[Companion, None] = {}
    for scope, most in RANKED.items():
        if held.isdisjoint(base) and scope == "activations":
            continue
        split = tensors.without(base, scope)
        least = LEAST_SHARE * tensors.elements(scope)
        among = [d for d, size in split.most_common() if d in dims and size >= least]
        if scope == "activations":
            among = [dim for dim in among if dim not in held]
        companions.update(dict.fromkeys((("slots" if scope == "slots" else None), dim) for dim in among[:most]))
    return list(companions)


def _bases(tensors: TensorClasses, dims: Sequence[str]) -> list[tuple[str, ...]]:
    """Each dim alone, then sets of dims that never share a tensor: all for a small program, otherwise the largest."""
    order = {name: n for n, name in enumerate(dims)}
    apart = {name: set(dims) - tensors.meeting(name) - {name} for name in dims}
    bases: dict[tuple[str, ...], None] = {(name,): None for name in dims}
    for most in _cliques(apart):
        if len(bases) >= len(dims) + MOST_BASES:
            break
        largest = tuple(sorted(most, key=order.__getitem__))
        sizes = range(2, len(largest) + 1) if is_small(dims) else (len(largest),)
        bases.update((part, None) for size in sizes for part in combinations(largest, size))
    return list(bases)


def _cliques(beside: Mapping[str, set[str]]) -> Iterator[set[str]]:
    """The maximal cliques (Bron and Kerbosch, CACM 16(9), 1973), in a fixed order."""
    order = {name: n for n, name in enumerate(beside)}

    def grown(taken: set[str], free: set[str], done: set[str]) -> Iterator[set[str]]:
        if not free and not done:
            yield taken
            return
        pivot = max(sorted(free | done, key=order.__getitem__), key=lambda name: len(beside[name] & free))
        for name in sorted(free - beside[pivot], key=order.__getitem__):
            yield from grown(taken | {name}, free & beside[name], done & beside[name])
            free, done = free - {name}, done | {name}

    if beside:
        yield from grown(set(), set(beside), set())
