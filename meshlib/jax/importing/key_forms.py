"""Derivations of random keys, with the numbers and indices of all trips, to find keys that are equal in some trip.

The third of several keys equals one that a loop over them reads in its third trip, and `fold_in(key, 3)` one of
`fold_in(key, n)` in a loop over n, or for an argument n. Both are derived alike, from sets of numbers that intersect.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from meshlib.jax.importing.code import CodeStep, Var, numpy_type
from meshlib.jax.importing.table import RULES
from meshlib.jax.importing.trips import elements_of

# The possible values of each number; None: any.
Numbers: TypeAlias = tuple[frozenset[int] | None, ...]
# The numbers themselves, as values of the traced function; None if a key also depends on other things.
Terms: TypeAlias = tuple[Var | int, ...] | None

NUMBER, CHILDREN = "number", "children"  # kinds of forms that others are derived from in special ways


class Form(NamedTuple):
    """A derivation without its numbers, and the possible values of each number.

    kind    how it is derived; parts: the value itself, or numbers that stand for the forms of operands
    """

    kind: str
    parts: tuple[Hashable, ...]
    numbers: Numbers = ()
    terms: Terms = None


class Ancestor(NamedTuple):
    """A key from which another is derived: by a split or fold (`following` is None), or carried on by a loop.

    children    which of its children come next in the line, or are carried on; None if not known
    carried     whether a loop carries on this key or one before
    """

    key: tuple[int, Numbers]
    following: str | None
    children: frozenset[int] | None
    before: Ancestor | None
    carried: bool

    def line(self) -> Iterator[Ancestor]:
        """This ancestor and all before it; children of a carried key in its first trip are children of the key."""
        one = self
        later: frozenset[int] | None = frozenset()
        while True:
            both = None if one.children is None or later is None else one.children | later
            yield one if one.following is None else one._replace(children=both)
            if one.before is None:
                return
            one, later = one.before, one.children

    def may_meet(self, other: Ancestor) -> bool:
        """True if a loop carries on a key of one line, and the other may derive a key alike in another way."""
        return (self.carried or other.carried) and any(
            a.key[0] == b.key[0]
            and a.following != b.following
            and meet(a.key[1], b.key[1])
            and meet((a.children,), (b.children,))
            for a in self.line()
            for b in other.line()
        )


@dataclass(eq=False)
class Forms:
    """The forms of keys and of the numbers in them, and the levels of the loops whose trips determine them."""

    _forms: dict[Var, Form] = field(default_factory=dict)
    _rows: dict[Var, tuple[Form, frozenset[int]]] = field(default_factory=dict)  # array -> (whose rows it has, which)
    _elements: dict[Var, Form] = field(default_factory=dict)  # of stacked results of loops
    _levels: dict[Var, frozenset[int]] = field(default_factory=dict)
    _standing: dict[Hashable, int] = field(default_factory=dict)
    _ancestors: dict[Var, Ancestor | None] = field(default_factory=dict)

    def _what(self, form: Form) -> int:
        """A number that stands for a form without its numbers: a chain of splits would otherwise hold all before it."""
        return self._standing.setdefault((form.kind, form.parts), len(self._standing))

    def levels(self, x: Var) -> frozenset[int]:
        """The levels of the loops whose trips determine a value; all levels around it where that is not known."""
        if x not in self._levels:
            maker, is_array = x.maker, bool(x.shape) and not x.key
            if x.const is not None or (is_array and elements_of(x) is not None):
                self._levels[x] = frozenset()
            elif maker is None or maker.bodies or is_array:
                self._levels[x] = frozenset(range(1, x.level + 1))
            else:
                self._levels[x] = frozenset[int]().union(*map(self.levels, maker.ins))
        return self._levels[x]

    def of(self, keys: Sequence[Var]) -> tuple[tuple[Hashable, ...], Numbers, Terms]:
        """The derivations of keys without their numbers, and all numbers."""
        forms = [self.form(x) for x in keys]
        return tuple(map(self._what, forms)), *_joined(forms)

    def ancestors(self, x: Var) -> Ancestor | None:
        """The keys from which a key is derived, the last one first."""
        if x not in self._ancestors:
            if x.maker is None or x.maker.bodies or not x.key:
                return None
            parent = x.maker.ins[0]
            derives = x.maker.kind in ("random_split", "random_fold_in")
            self._descend(x, self._ancestor(parent, None, None) if derives else self.ancestors(parent))
        return self._ancestors[x]

    def _descend(self, x: Var, line: Ancestor | None) -> None:
        form = self.form(x)
        self._ancestors[x] = line if line is None or form.kind != "child" else line._replace(children=form.numbers[-1])

    def _ancestor(self, x: Var, following: str | None, children: frozenset[int] | None) -> Ancestor:
        before = self.ancestors(x)
        carried = following is not None or (before is not None and before.carried)
        return Ancestor(self._known(x), following, children, before, carried)

    def _known(self, x: Var) -> tuple[int, Numbers]:
        form = self.form(x)
        return self._what(form), form.numbers

    def form(self, x: Var) -> Form:
        """The derivation of a key, or of a number in one."""
        if x not in self._forms:
            self._forms[x] = self._form(x)
        return self._forms[x]

    def exact(self, x: Var) -> Hashable | None:
        """The form of a key that is the same in all trips: equal for equal keys. None for others."""
        form = self.form(x)
        return self._known(x) if all(values is not None and len(values) == 1 for values in form.numbers) else None

    def _form(self, x: Var) -> Form:
        values, maker = self._values(x), x.maker
        if values is not None or (not x.key and not x.shape and "int" in x.dtype):
            return Form(NUMBER, (), (values,), (x,))
        if maker is None or maker.bodies or not x.key:
            return Form("value", (x,), (), None if self.levels(x) else ())
        parts = [self.form(y) for y in maker.ins]
        numbers = _joined(parts)
        of = tuple(map(self._what, parts))
        match maker.kind:
            case "random_wrap" | "random_unwrap" | "random_clone":
                if maker.ins[0] in self._rows:
                    self._rows[x] = self._rows[maker.ins[0]]
                return parts[0]
            case "random_fold_in":
                is_child = parts[1].kind == NUMBER and _splits_like_folds(maker)
                return Form("child", of[:1], *numbers) if is_child else Form("fold", of, *numbers)
            case "random_split" if len(x.shape) == len(maker.ins[0].shape) + 1 == 1 and _splits_like_folds(maker):
                return Form(CHILDREN, of, *numbers)
            case "slice" | "dynamic_slice" if self._select(x, maker):
                return Form("value", (x,))
            case "squeeze" if maker.params["dimensions"] == (0,) and maker.ins[0] in self._rows:
                return self._element(maker.ins[0])
        return Form(maker.kind, (maker.outs.index(x), str(maker.params), *of), *numbers)

    def _values(self, x: Var) -> frozenset[int] | None:
        """The possible values of an integer, if known."""
        if x.key or x.shape or "int" not in x.dtype:
            return None
        if x.const is not None:
            return _integers(x.const)
        if x.trips is not None:
            return _integers(x.trips[1])
        rule = None if x.maker is None else RULES.get(x.maker.kind)
        if x.maker is None or rule is None or rule.fold is None or not rule.by_element:
            return None
        operands = [self.form(y) for y in x.maker.ins]
        known = [form.numbers[0] for form in operands if form.kind == NUMBER and form.numbers[0] is not None]
        if len(known) < len(operands) or sum(len(values) > 1 for values in known) > 1:
            return None
        arrays = [np.array(sorted(n), numpy_type(y.dtype)) for n, y in zip(known, x.maker.ins, strict=True)]
        return _integers(rule.fold(x.maker, *arrays))

    def _select(self, x: Var, maker: CodeStep) -> bool:
        """Record the rows of an array that a slice of it has; False where they are not known, or not whole."""
        whole, *starts = maker.ins
        if x.shape[1:] != whole.shape[1:]:
            return False
        of, rows = self._rows_of(whole)
        if maker.kind == "slice":
            first, end = maker.params["start_indices"][0], maker.params["limit_indices"][0]
            step = (maker.params["strides"] or (1,))[0]
            if len(rows) != whole.shape[0]:
                return False
            self._rows[x] = of, frozenset(sorted(rows)[first:end:step])
            return True
        at = self._values(starts[0])
        if at is None or len(rows) != whole.shape[0]:
            return False
        last, ordered = whole.shape[0] - x.shape[0], sorted(rows)
        begins = [min(max(n, 0), last) for n in at]
        self._rows[x] = of, frozenset([ordered[n + k] for n in begins for k in range(x.shape[0])])
        return True

    def _rows_of(self, x: Var) -> tuple[Form, frozenset[int]]:
        """The array whose rows an array has, and which."""
        form = self.form(x)
        return self._rows.get(x, (form, frozenset(range(x.shape[0]))))

    def _element(self, array: Var) -> Form:
        of, rows = self._rows_of(array)
        numbers = (*of.numbers, rows)
        terms = None if of.terms is None or len(rows) > 1 else (*of.terms, *rows)
        kind, parts = ("child", of.parts) if of.kind == CHILDREN else ("row", (self._what(of),))
        return Form(kind, parts, numbers, terms)

    def slice(self, x: Var, stack: Var) -> None:
        """The argument of a loop's body that is an element of a stack in each trip."""
        self._levels[x] = self.levels(stack) | {x.level}
        elements = None if x.shape or x.key else elements_of(stack)
        if elements is not None and elements.dtype.kind in "iu":
            self._forms[x] = Form(NUMBER, (), (_integers(elements),), (x,))
        elif x.key:
            self._forms[x] = self._elements.get(stack) or self._element(stack)
            self._descend(x, self.ancestors(stack))

    def counter(self, x: Var, first: Var, step: object, length: int) -> None:
        """The argument of a loop's body that grows by `step` in each trip."""
        self._levels[x] = self.levels(first) | {x.level}
        begin = self._values(first)
        if begin is not None and len(begin) == 1:
            (value,) = begin
            values = frozenset([value + n * int(np.asarray(step)) for n in range(length)])
            self._forms[x] = Form(NUMBER, (), (values,), (x,))

    def carry(self, x: Var, first: Var, following: Any) -> None:
        """The argument of a loop's body that is a key, computed from that of the trip before by `following`."""
        self._levels[x] = self.levels(first) | {x.level}
        begin = self.form(first)
        self._forms[x] = Form("carry", (self._what(begin), str(following)), begin.numbers)
        self._ancestors[x] = self._ancestor(first, str(following), _child(following))

    def stack(self, whole: Var, element: Var) -> None:
        """The result of a loop that stacks a key of its body."""
        if element.key:
            self._elements[whole] = self.form(element)
            self._ancestors[whole] = self.ancestors(element)


def meet(a: Numbers, b: Numbers) -> bool:
    """True if numbers with these possible values may be equal."""
    return all(m is None or n is None or m & n for m, n in zip(a, b, strict=True))


def _joined(forms: Sequence[Form]) -> tuple[Numbers, Terms]:
    """The numbers of several forms, and their terms."""
    terms = [f.terms for f in forms if f.terms is not None]
    joined = tuple([t for own in terms for t in own]) if len(terms) == len(forms) else None
    return tuple([n for f in forms for n in f.numbers]), joined


def _child(following: Any) -> frozenset[int] | None:
    """Which child of its key a jaxpr returns, if it splits the key and takes one."""
    names = [eqn.primitive.name for eqn in following.eqns if eqn.primitive.name not in ("random_wrap", "random_unwrap")]
    folds = "fry" in str(following) and bool(jax.config.jax_threefry_partitionable)
    known = names == ["random_split", "slice", "squeeze"] and folds
    return frozenset([following.eqns[-2].params["start_indices"][0]]) if known else None


def _splits_like_folds(maker: CodeStep) -> bool:
    """True if the n-th of the keys that a key is split into is `fold_in(key, n)`, however many there are."""
    return "fry" in maker.ins[0].dtype and bool(jax.config.jax_threefry_partitionable)


def _integers(values: np.ndarray) -> frozenset[int]:
    return frozenset(np.asarray(values).reshape(-1).tolist())
