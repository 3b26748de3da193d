"""All faults of a layout at once.

`LayoutRules.sharding` looks at one tensor and must stop there. `check` looks at all tensors of a program
under one layout and groups what it finds: a dimension that does not divide is reported once, with the
tensors that have it. What is merely wasteful (an unused rule, an unused axis) is a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat

from layouts.dims import Shape, ShapeLike
from layouts.errors import LayoutError, nearest
from layouts.mesh import Mesh, MeshLike
from layouts.rules import Fault, LayoutRules, Rule, RulesLike, place, unknown_axis

SHOWN_TENSORS = 3  # of one fault; the rest are counted


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of `check`: faults make the layout impossible, notes make it worth a second look.

    Example:
      >>> report = check("batch:data", "data:4", [("x", "batch:6", "activations")])
      >>> report.ok, len(report.faults), len(report.notes)
      (False, 1, 0)
    """

    faults: tuple[str, ...]
    notes: tuple[str, ...]
    found: tuple[tuple[Fault, tuple[str, ...]], ...] = ()  # each fault, with the labels of the tensors it concerns

    @property
    def ok(self) -> bool:
        """Whether there is no fault."""
        return not self.faults

    def raise_for_faults(self) -> None:
        """Raise one LayoutError that holds all faults, if there are any."""
        if self.faults:
            raise LayoutError.listing("the layout", self.faults, most=len(self.faults))

    def __str__(self) -> str:
        lines = [f"fault: {text}" for text in self.faults] + [f"note: {text}" for text in self.notes]
        return "\n".join(lines) or "no faults, no notes"


def check(
    rules: RulesLike,
    mesh: MeshLike,
    tensors: Iterable[tuple[str, ShapeLike, str]],
    known_dims: Iterable[str] | None = None,
    inner: Iterable[tuple[str, ShapeLike, str]] = (),
    splitting: Iterable[str] = (),
) -> Report:
    """Look at all tensors under one layout.

    Args:
      rules: the layout.
      mesh: the mesh.
      tensors: (label, shape, scope) of each tensor.
      known_dims: names that a rule may have without a tensor here; none by default.
      inner: such tensors that nobody asked for. What does not fit them is a note, as `LayoutRules.fitting` leaves it
        out, unless the rule is about a dim that none but such tensors have and fits none of them.
      splitting: axes that split something without a rule.

    >>> print(check("vocab:cols", "rows:2;cols:4", [("logits", "batch:6;vocab:10", "activations")]))
    fault: dim 'vocab' does not divide over axis 'cols': 10 % 4 = 2. Pad vocab to 12 (+20.00 %), or remove vocab:cols. In: logits.
    note: axis 'rows' splits nothing: every tensor is held 2 times over
    """  # noqa: E501
    rules = rules if isinstance(rules, LayoutRules) else LayoutRules(rules)
    mesh = mesh if isinstance(mesh, Mesh) else Mesh(mesh)
    met = _met(rules, mesh, tensors, inner, splitting)
    known = dict.fromkeys([*met.dims, *(known_dims or ())])
    foreign = _foreign(rules, mesh, known, met.faults)
    notes = [f"{text}; it splits nothing here, as its '?' allows" for text in dict.fromkeys(foreign)]
    notes += _notes(rules, mesh, met, known)
    faults_with_labels = tuple((fault, tuple(dict.fromkeys(labels))) for fault, labels in met.faults.items())
    return Report(tuple(_with_tensors(*item) for item in faults_with_labels), tuple(notes), faults_with_labels)


@dataclass
class _Met:
    """What the tensors of a program meet under a layout: faults with the labels of the tensors concerned, what of the
    rules, axes and dims is there."""

    faults: dict[Fault, list[str]] = field(default_factory=dict)
    misfits: dict[Fault, list[str]] = field(default_factory=dict)  # the same of inner tensors
    rules: set[Rule] = field(default_factory=set)
    axes: set[str] = field(default_factory=set)
    dims: dict[str, None] = field(default_factory=dict)  # names, in order


def _met(
    rules: LayoutRules,
    mesh: Mesh,
    tensors: Iterable[tuple[str, ShapeLike, str]],
    inner: Iterable[tuple[str, ShapeLike, str]],
    splitting: Iterable[str],
) -> _Met:
    met = _Met(axes=set(splitting))
    for rule in rules.rules:  # an axis is unknown whether or not a tensor meets the rule
        for axis in rule.axes:
            if axis not in mesh and not rule.optional:
                met.faults.setdefault(unknown_axis(rule, axis, mesh), [])
    followed: set[Rule] = set()  # by some tensor
    own: set[str] = set()  # dims of tensors that are not inner
    seen: dict[tuple[Shape, str], tuple[Fault, ...]] = {}  # most tensors are laid out like one before
    for into, (label, given, scope) in chain(zip(repeat(met.faults), tensors), zip(repeat(met.misfits), inner)):
        shape = given if isinstance(given, Shape) else Shape(given)
        if into is met.faults:
            own.update(shape.names)
        if (shape, scope) not in seen:
            met.dims.update(dict.fromkeys(shape.names))
            holding = {rule for name in shape.names for rule in rules.for_dim(name, scope)}
            met.rules |= holding
            axes, wrong = place(rules, shape, mesh, scope)
            met.axes.update(axis for entry in axes for axis in entry)
            followed |= holding - {fault.rule for fault in wrong}
            seen[shape, scope] = wrong
        for fault in seen[shape, scope]:
            into.setdefault(fault, []).append(label)
    for fault in [f for f in met.misfits if f in met.faults or (f.rule not in followed and _dim(f) not in own)]:
        met.faults.setdefault(fault, []).extend(met.misfits.pop(fault))
    met.axes.update(axis for fault in met.faults if fault.rule for axis in fault.rule.axes)
    return met


def _dim(fault: Fault) -> str | None:
    return fault.rule.dim if fault.rule is not None else None


def _foreign(rules: LayoutRules, mesh: Mesh, known: dict[str, None], faults: dict[Fault, list[str]]) -> list[str]:
    """What optional rules name that there is not; where others do, it is added to the faults."""
    foreign: list[str] = []
    for name in rules.dims:
        if name not in known:
            which = ", ".join(str(rule) for rule in rules.rules if rule.dim == name)
            text = f"rule {which}: no dimension {name!r} in the program{nearest(name, known)}"
            if not all(rule.optional for rule in rules.rules if rule.dim == name):
                faults[Fault(text + _swapped(rules, name, mesh, known), of_rule=True)] = []
                continue
            foreign.append(text)
    return foreign + [
        unknown_axis(rule, axis, mesh).what
        for rule in rules.rules
        for axis in rule.axes
        if rule.optional and axis not in mesh
    ]


def _notes(rules: LayoutRules, mesh: Mesh, met: _Met, known: dict[str, None]) -> list[str]:
    """Of rules and axes that do nothing, and of inner tensors that a rule does not fit."""
    notes = [
        f"rule {rule} is not used: {_why_unused(rule, met.dims)}"
        for rule in rules.rules
        if rule.dim in known and rule not in met.rules and not (rule.optional and set(rule.axes).isdisjoint(mesh.axes))
    ]
    notes += [
        f"axis {axis!r} splits nothing: every tensor is held {size} times over"
        for axis, size in zip(mesh.axes, mesh.sizes, strict=True)
        if size > 1 and axis not in met.axes
    ]
    return notes + [
        f"{fault.what}: {fault.remedy.partition('. ')[0]}. Nobody named this size of these tensors, which are "
        f"split as far as it fits: {some(list(dict.fromkeys(labels)))}"
        for fault, labels in met.misfits.items()
    ]


def _swapped(rules: LayoutRules, name: str, mesh: Mesh, known: dict[str, None]) -> str:
    """A hint where a rule names an axis first, then a dim."""
    swapped_rules = [rule for rule in rules.rules if rule.dim == name and name in mesh and set(rule.axes) & set(known)]
    return f"; rules are dim:axis, so write {swapped_rules[0].axes[0]}:{name}" if swapped_rules else ""


def _why_unused(rule: Rule, present: dict[str, None]) -> str:
    if rule.dim not in present:
        return f"no tensor here has dimension {rule.dim!r}"
    if rule.scope is None:
        return f"scoped rules replace it wherever {rule.dim!r} occurs"
    return f"no tensor in its scope has dimension {rule.dim!r}"


def _with_tensors(fault: Fault, labels: tuple[str, ...]) -> str:
    return fault.text if fault.of_rule else f"{fault.text} In: {some(labels)}."


def some(labels: Sequence[str]) -> str:
    """The first few of a list, and how many more there are.

    >>> some(["a", "b", "c", "d"])
    'a, b, c and 1 more'
    """
    more = f" and {len(labels) - SHOWN_TENSORS} more" if len(labels) > SHOWN_TENSORS else ""
    return f"{', '.join(labels[:SHOWN_TENSORS])}{more}"
