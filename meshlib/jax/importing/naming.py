"""Names of dims: those given by the user for axes of arguments, and generated ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from meshlib.core.arguments import at
from meshlib.core.errors import GraphError, nearest
from meshlib.core.text import counted
from meshlib.jax.importing.axes import Axes, Axis
from meshlib.jax.importing.code import Code, Var

WHAT = "from_jax"
# Names of one axis (several if it is a product, None if unnamed), each with its size if stated.
Part = tuple[str, int | None]
Token = tuple[Part, ...] | None


@dataclass(eq=False)
class Leaf:
    """One array among the arguments: its path, as in "params.layers.wq", and whether it is a variable."""

    path: str
    var: Var
    variable: bool
    tokens: Sequence[Token] | None = None
    part: bool = False  # half of a complex array
    of_user: bool = False  # its axes were named by the user, not by the model

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths that match this leaf; half of a complex array also matches the path of the whole."""
        whole = self.path.removesuffix(".real").removesuffix(".imag")
        return (self.path,) if whole == self.path or not self.part else (self.path, whole)

    @property
    def name(self) -> str:
        """Name of the variable or input."""
        return self.path.replace(".", "/")


# ---------------------------------------------------------------- the user's names


def assign_names(names: object, leaves: Sequence[Leaf]) -> None:
    """Assign names to the leaves: `names` maps paths or patterns to axis names in order.

    Raises: GraphError for an unknown path, a wrong number of names, and an invalid name.
    """
    if names is None:
        return
    if not isinstance(names, Mapping):
        raise GraphError(f"{at(WHAT)}: names must be a dict of paths to names of axes, got {names!r:.80}")
    for key, given in names.items():
        if not isinstance(key, str):
            raise GraphError(f"{at(WHAT)}: names must have paths such as 'params.wq' as keys, got {key!r:.80}")
        pattern = key.replace("/", ".")
        matching = [leaf for leaf in leaves if any(fnmatchcase(path, pattern) for path in leaf.paths)]
        if not matching:
            paths = [leaf.path for leaf in leaves]
            hint = nearest(pattern, paths) or f"; there are {', '.join(paths[:8])}{', ...' if len(paths) > 8 else ''}"
            raise GraphError(f"{at(WHAT)}: names: no argument is called {key!r}{hint}")
        tokens = _tokens(given, key)
        for leaf in matching:
            if len(tokens) != len(leaf.var.shape):
                raise GraphError(
                    f"{at(WHAT)}: names: {key!r} has {counted(len(tokens), 'name')}, {given!r:.80}, but {leaf.path} "
                    f"has {counted(len(leaf.var.shape), 'axis', 'axes')}, {list(leaf.var.shape)}"
                )
            leaf.tokens, leaf.of_user = tokens, True


def _tokens(given: object, key: str) -> list[Token]:
    if isinstance(given, str):
        words: list[object] = re.findall(r"\([^()]*\)|[^\s,()]+", given)
    elif isinstance(given, Sequence):
        words = list(given)
    else:
        raise GraphError(f"{at(WHAT)}: names: {key!r} has {given!r:.80}; write 'batch length', a name for each axis")
    return [_token(word, key) for word in words]


def _token(word: object, key: str) -> Token:
    if word is None or word in ("_", "None"):
        return None
    if isinstance(word, str):
        parts = word.strip("()").replace(",", " ").split()
        factors = []
        for part in parts:
            name, _, size = part.partition(":")
            if not name.isidentifier() or (size and not size.isdecimal()):
                break
            factors.append((name, int(size) if size else None))
        else:
            if factors:
                return tuple(factors)
    raise GraphError(
        f"{at(WHAT)}: names: {word!r:.40} in {key!r} is not a name of an axis: letters, digits and _; '(heads "
        "head_dim)' for a product, '_' for none"
    )


def _sizes_by_name(named: Iterable[tuple[Axis, tuple[Part, ...]]]) -> dict[str, set[int]]:
    """Name -> sizes given by the user, or of axes with that name alone."""
    sizes: dict[str, set[int]] = {}
    for axis, token in named:
        for name, size in token:
            known = axis.size if size is None and len(token) == 1 else size
            if known is not None:
                sizes.setdefault(name, set()).add(known)
    return sizes


def _known_sizes(leaf: Leaf, axis: Axis, token: tuple[Part, ...], sizes: Mapping[str, set[int]]) -> list[int | None]:
    """The sizes of a product axis's factors: given, known by name, or the remaining quotient; None if unknown."""
    known_sizes = [size or (next(iter(sizes[n])) if len(sizes.get(n, ())) == 1 else None) for n, size in token]
    known = prod(size for size in known_sizes if size)
    if axis.size % known:
        raise GraphError(
            f"{at(WHAT)}: names: {leaf.path} {list(leaf.var.shape)}: an axis of {axis.size} can't be the product "
            f"({' '.join(n for n, _ in token)}), of which {known} is known: {axis.size} % {known} = "
            f"{axis.size % known}"
        )
    if known_sizes.count(None) == 1:
        known_sizes = [size or axis.size // known for size in known_sizes]
    return known_sizes


def name_arguments(axes: Axes, leaves: Sequence[Leaf]) -> list[tuple[Leaf, Axis, tuple[Part, ...]]]:
    """Name the arguments' axes before unification; returns products whose factors are still unknown."""
    named = [
        (leaf, axis, token)
        for leaf in leaves
        for axis, token in zip(leaf.var.axes, leaf.tokens or (), strict=False)
        if token is not None
    ]
    for leaf, axis, token in named:
        if len(token) == 1:
            _check_size(leaf, axis, [token[0][1]])
            _call(axes, leaf, axis, token[0][0])
    sizes = _sizes_by_name((axis, token) for _, axis, token in named)
    waiting = []
    for leaf, axis, token in named:
        if len(token) == 1:
            continue
        known_sizes = _known_sizes(leaf, axis, token, sizes)
        if None in known_sizes:
            waiting.append((leaf, axis, token))
            continue
        _check_size(leaf, axis, known_sizes)
        for part, (name, _) in zip(axes.split(axis, [size or 1 for size in known_sizes]), token, strict=True):
            _call(axes, leaf, part, name)
    return waiting


def _check_size(leaf: Leaf, axis: Axis, sizes: Sequence[int | None]) -> None:
    known = [n for n in sizes if n is not None]
    if len(known) == len(sizes) and prod(known) != axis.size:
        raise GraphError(
            f"{at(WHAT)}: names: {' x '.join(map(str, known))} is not {axis.size}, the length of that axis of "
            f"{leaf.path} {list(leaf.var.shape)}"
        )


def _call(axes: Axes, leaf: Leaf, axis: Axis, name: str) -> None:
    if axis.size == 1:
        return
    clash = axes.assign_name(axis, name)
    if clash is not None:
        raise GraphError(
            f"{at(WHAT)}: names: {leaf.path} {list(leaf.var.shape)} would have two axes '{name}', of {clash.size} and "
            f"{axis.size}; rename one, as in '{name}_out'"
        )


def name_factors(axes: Axes, waiting: Iterable[tuple[Leaf, Axis, tuple[Part, ...]]]) -> None:
    """Name the factors of products, which unification has determined by now."""
    for leaf, axis, token in waiting:
        dims = axes.dims(axis)
        names = [name for name, _ in token]
        if len(dims) != len(names):
            raise GraphError(
                f"{at(WHAT)}: names: {leaf.path}: an axis of {axis.size} is called ({' '.join(names)}), but the "
                f"function takes it as {' x '.join(str(d.size) for d in dims)}; say sizes, as in "
                f"({names[0]}:{dims[0].size if dims else axis.size} ...)"
            )
        for d, name in zip(dims, names, strict=True):
            if d.name is None:
                _call(axes, leaf, d, name)


def name_tiles(axes: Axes) -> None:
    """Move the user's name of an axis that is cut into tiles to the tiles, unless those have one.

    Under a rule for that name, each index of all tiles is then on one device.
    """
    for number, tile in axes.tiles:
        old, new = axes.find(number), axes.find(tile)
        if old.name is None or new.name is not None or new.parts:
            continue
        name = old.name
        others = [a for a in axes.named[name] if axes.find(a) is not old]
        if not any(axes.find(a).holders & new.holders for a in others):
            old.name, new.name, axes.named[name] = None, name, [*others, new]


# ---------------------------------------------------------------- generated names


def name_all(axes: Axes, code: Code, leaves: Sequence[Leaf]) -> None:
    """Give every dim a name.

    A slice of a dim has the dim's name, with another size, unless one tensor would have both. Where a tensor would have
    one dim twice, the second is `memory_<name>`, such as the keys' dim of attention, or `<name>_out` in a variable.
    Others are named after the first argument that has them, as in `wq_1`.
    """
    _NameCandidates(axes, leaves).give(code)


# Words that mark a variable without identifying it.
_PLAIN = ("kernel", "weight", "bias", "scale", "value", "array", "embedding", "w", "b")


def _word(path: str) -> str:
    """Word that names an axis: the last informative part of the path."""
    parts = [re.sub(r"\W", "_", part) for part in path.split(".")]
    telling = [part for part in parts if part.isidentifier()]
    return next((part for part in reversed(telling) if part not in _PLAIN), telling[-1] if telling else "argument")


class _NameCandidates:
    def __init__(self, axes: Axes, leaves: Sequence[Leaf]) -> None:
        self.axes, self.leaves = axes, leaves
        self.of_variables = {d for leaf in leaves if leaf.variable for d in axes.flat(leaf.var.axes)}
        self.near: dict[Axis, list[tuple[str, Axis]]] = {}
        for pairs, how in ((axes.kin, "kin"), (axes.apart, "apart")):
            for a, b in pairs:
                left, right = axes.dims(a), axes.dims(b)
                if len(left) == len(right) == 1 and left[0] is not right[0]:
                    self.near.setdefault(right[0], []).append((how, left[0]))
                    self.near.setdefault(left[0], []).append((how, right[0]))
        self.taken = {name for name, there in axes.named.items() if there}

    def give(self, code: Code) -> None:
        known = [d for leaf in self.leaves for d in self.axes.flat(leaf.var.axes)]
        for d in known:
            if d.name is not None:
                self._spread(d)
        for leaf in self.leaves:
            word = _word(leaf.path)
            for n, axis in enumerate(leaf.var.axes):
                dims = self.axes.dims(axis)
                for m, d in enumerate(dims):
                    self._call(d, f"{word}_{n}" if len(dims) == 1 else f"{word}_{n}_{m}")
        for x in (*code.vars(), *code.outs):  # results may be known constants
            for d in self.axes.flat(x.axes):
                self._call(d, "axis")
        for step in code.walk():
            tables = [a for x in step.ins if x.const is not None for a in x.axes]
            for d in self.axes.flat([*step.labels, *tables]):
                self._call(d, "axis")

    def _call(self, d: Axis, name: str, shared: bool = False) -> None:
        if d.name is not None:
            return
        if not shared:
            name = self._free(name)
        d.name = name
        self.taken.add(name)
        self.axes.named.setdefault(name, []).append(d)
        self._spread(d)

    def _free(self, name: str) -> str:
        free_name, n = name, 2
        while free_name in self.taken:
            free_name, n = f"{name}_{n}", n + 1
        return free_name

    def _spread(self, named: Axis) -> None:
        assert named.name is not None
        for how, d in self.near.get(named, ()):
            d = self.axes.find(d)
            if d.name is not None or d.parts:
                continue
            if how == "kin" and self._may_share(d, named.name):
                self._call(d, named.name, shared=True)
            elif how == "apart" and d.size == named.size:
                name = f"{named.name}_out" if d in self.of_variables else f"memory_{named.name}"
                self._call(d, name, shared=d not in self.of_variables and self._may_be_same(d, name))

    def _may_be_same(self, d: Axis, name: str) -> bool:
        """True if a dim may share the name with others, as the keys' dim of attention in several layers."""
        there = [self.axes.find(a) for a in self.axes.named.get(name, ())]
        return bool(there) and all(a.size == d.size for a in there) and self._may_share(d, name)

    def _may_share(self, d: Axis, name: str) -> bool:
        there = [self.axes.find(a) for a in self.axes.named.get(name, ())]
        return not any(a.holders & d.holders for a in there)
