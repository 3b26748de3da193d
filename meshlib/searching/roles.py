"""Roles: what an axis of a mesh may be for, read from the program.

A role is a *base*, dims of which no two meet in a tensor, so that all may take the axis at once, and at most one dim
that takes it where no dim of the base does: in all tensors (`length:model?`, Megatron's sequence; `d_model:data?`,
fully sharded), or in slots alone (`slots/d_model:data?`, ZeRO-1). Data parallelism, fully sharded data
parallelism, tensor, sequence and context parallelism are such roles of a Transformer; those of other programs are
found in the same way, as sets of dims that never share a tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from layouts import LayoutRules, Shape
from layouts.rules import Rule

MOST_BASES = 24  # independent sets beyond the single dims: of many small layers there are exponentially many


@dataclass(frozen=True)
class Role:
    """What an axis is for.

    `base` takes it wherever it occurs; `beside`, a scope (None: all tensors) and a dim, where no dim of the base does.
    `name` is that of the axis. `holds`: whether variables have a dim of the base, so that it splits the model.
    """

    base: tuple[str, ...]
    beside: tuple[str | None, str] | None
    name: str
    holds: bool

    def split(self, size: int, left: dict[str, int]) -> tuple[str, ...] | None:
        """The dims of the base that divide by an axis of that size, and of all dims what is `left` then.

        None where no dim of the base divides, or the one beside does not.
        """
        found = tuple(dim for dim in self.base if left[dim] % size == 0)
        if not found or (self.beside is not None and left[self.beside[1]] % size):
            return None
        for dim in (*found, self.beside[1]) if self.beside is not None else found:
            left[dim] //= size
        return found

    def rules(self, axis: str, base: Sequence[str]) -> LayoutRules:
        """Its rules for an axis, where those dims of the base divide."""
        found = [Rule(dim, (axis,)) for dim in base]
        if self.beside is not None:
            scope, dim = self.beside
            found.append(Rule(dim, (axis,), optional=True, scope=scope))
        return LayoutRules(found)

    def __str__(self) -> str:
        return str(self.rules(self.name, self.base))


@dataclass(frozen=True)
class Tensors:
    """The tensors of a program that a layout lays out: shape, scope, and how many are alike."""

    counts: Mapping[tuple[Shape, str], int]

    @staticmethod
    def of(judged: Iterable[tuple[str, Shape, str]]) -> Tensors:
        """From what `Subjects.judged` says."""
        return Tensors(Counter((shape, scope) for _, shape, scope in judged))

    @property
    def sizes(self) -> dict[str, int]:
        """Each dim with the greatest number of parts that all its sizes can be cut into."""
        found: dict[str, int] = {}
        for shape, _ in self.counts:
            for d in shape:
                found[d.name] = gcd(found.get(d.name, 0), d.size)
        return found

    def meeting(self, dim: str) -> set[str]:
        """The dims that share a tensor with it."""
        return {name for shape, _ in self.counts if dim in shape.names for name in shape.names} - {dim}

    def without(self, base: Iterable[str], scope: str) -> Counter[str]:
        """Bytes-like weights: elements of tensors in a scope that no dim of `base` splits, by the dims they have."""
        taken, found = set(base), Counter[str]()
        for (shape, where), count in self.counts.items():
            if where == scope and taken.isdisjoint(shape.names):
                for name in shape.names:
                    found[name] += count * shape.size
        return found


def roles_of(tensors: Tensors, dims: Sequence[str], batch: str | None = None) -> list[Role]:
    """The roles of a program's dims, the plain ones first. `dims` are those that an axis may split.

    A base that variables do not have (a batch) may have a dim of theirs beside it, or of the slots; one that they have
    may have a dim of the activations. Axes are called "data", "fsdp" and "zero1" where they split the `batch`, "model"
    where they split variables, and else as the dim.
    """
    made: list[Role] = []
    held = {name for (shape, scope) in tensors.counts if scope == "variables" for name in shape.names}

    def beside(base: tuple[str, ...], where: str, among: set[str], most: int) -> list[str]:
        ranked = [name for name, _ in tensors.without(base, where).most_common() if name in among]
        return ranked[:most]

    for base in _bases(tensors, dims):
        if not held.isdisjoint(base):
            made.append(Role(base, None, "model", True))
            made += [Role(base, (None, dim), "model", True) for dim in beside(base, "activations", set(dims) - held, 2)]
            continue
        names = ("data", "fsdp", "zero1") if batch in base else (base[0],) * 3
        made.append(Role(base, None, names[0], False))
        made += [Role(base, (None, dim), names[1], False) for dim in beside(base, "variables", set(dims), 1)]
        made += [Role(base, ("slots", dim), names[2], False) for dim in beside(base, "slots", set(dims), 1)]
    return made


def _bases(tensors: Tensors, dims: Sequence[str]) -> list[tuple[str, ...]]:
    """Each dim alone, and the largest sets of dims that never meet."""
    order = {name: n for n, name in enumerate(dims)}
    apart = {name: set(dims) - tensors.meeting(name) - {name} for name in dims}
    found: dict[tuple[str, ...], None] = {(name,): None for name in dims}
    for most in _cliques(apart):
        if len(found) >= len(dims) + MOST_BASES:
            break
        found[tuple(sorted(most, key=order.__getitem__))] = None
    return list(found)


def _cliques(beside: Mapping[str, set[str]]) -> Iterator[set[str]]:
    """The maximal sets in which each is beside each (Bron and Kerbosch, CACM 16(9), 1973), in a fixed order."""
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
