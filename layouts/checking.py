"""Check of a layout against all tensors of a program: every fault at once.

`LayoutRules.sharding` checks one tensor. `check` covers all tensors of a program under one layout and groups the
faults: a dimension that does not divide is reported once, with the tensors that have it. Waste (an unused rule, an
unused axis) is a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat

from layouts.dims import Shape, ShapeLike
from layouts.errors import LayoutError, nearest
from layouts.mesh import Mesh, MeshLike
from layouts.rules import LayoutRules, Rule, RuleFault, RulesLike, place, unknown_axis

SHOWN_TENSORS = 3  # tensors listed per fault; the rest are counted


@dataclass(frozen=True, slots=True)
class Report:
    """Result of `check`: with faults the layout is invalid, notes are warnings.

    Example:
      >>> from layouts import check
      >>> report = check("batch:data", "data:4", [("x", "batch:6", "activations")])
      >>> report.ok, len(report.faults), len(report.notes)
      (False, 1, 0)
    """

    faults: tuple[str, ...]
    notes: tuple[str, ...]
    found: tuple[tuple[RuleFault, tuple[str, ...]], ...] = ()  # each fault, with the labels of its tensors

    @property
    def ok(self) -> bool:
        """True if there is no fault."""
        return not self.faults

    def raise_for_faults(self) -> None:
        """Raise one LayoutError with all faults, if there are any."""
        if self.faults:
            raise LayoutError.listing("the layout", self.faults, most=len(self.faults))

    def __str__(self) -> str:
        lines = [f"fault: {text}" for text in self.faults] + [f"note: {text}" for text in self.notes]
        return "\n".join(lines) or "no faults, no notes"


def check(
    rules: RulesLike,
    mesh: MeshLike,
    tensors: Iterable[tuple[object, ShapeLike, str]],
    known_dims: Iterable[str] | None = None,
    inner: Iterable[tuple[object, ShapeLike, str]] = (),
    splitting: Iterable[str] = (),
    derived: Iterable[str] = (),
) -> Report:
    """Check all tensors of a program under one layout.

    Args:
      rules: the layout.
      mesh: the mesh.
      tensors: (label, shape, scope) of each tensor; labels are made text only where a fault or note names them.
      known_dims: further names that rules may have; none by default.
      inner: tensors that need not fit, such as those internal to a library function. A rule that does not fit them is a
        note, since `LayoutRules.fitting` drops it, unless its dim occurs only in such tensors and it fits none of them.
      splitting: axes that split something without a rule.
      derived: dims whose sizes nobody chose, so that rules need not fit any tensor that has them.

    >>> from layouts import check
    >>> print(check("vocab:cols", "rows:2;cols:4", [("logits", "batch:6;vocab:10", "activations")]))
    fault: dim 'vocab' does not divide over axis 'cols': 10 % 4 = 2. Pad vocab to 12 (+20.00 %), or remove vocab:cols. In: logits.
    note: axis 'rows' splits nothing: every tensor is held 2 times over
    """  # noqa: E501
    rules = rules if isinstance(rules, LayoutRules) else LayoutRules(rules)
    mesh = mesh if isinstance(mesh, Mesh) else Mesh(mesh)
    usage = _usage(rules, mesh, tensors, inner, splitting, {*derived})
    known = dict.fromkeys([*usage.dims, *(known_dims or ())])
    foreign = _unknown_names(rules, mesh, known, usage.faults)
    notes = [f"{text}; it splits nothing here, as its '?' allows" for text in dict.fromkeys(foreign)]
    notes += _notes(rules, mesh, usage, known)
    faults_with_labels = tuple((fault, _texts(labels)) for fault, labels in usage.faults.items())
    return Report(tuple(_with_tensors(*item) for item in faults_with_labels), tuple(notes), faults_with_labels)


@dataclass
class _Usage:
    """Faults of a program's tensors under a layout, with labels of the tensors; and the rules, axes and dims in use."""

    faults: dict[RuleFault, list[object]] = field(default_factory=dict)
    misfits: dict[RuleFault, list[object]] = field(default_factory=dict)  # faults of inner tensors
    rules: set[Rule] = field(default_factory=set)
    axes: set[str] = field(default_factory=set)
    dims: dict[str, None] = field(default_factory=dict)  # names, in order


def _unknown_axes(rules: LayoutRules, mesh: Mesh) -> list[RuleFault]:
    """Faults of unknown axes of required rules, even where no tensor has the dim."""
    required = [rule for rule in rules.rules if not rule.optional]
    return [unknown_axis(rule, axis, mesh) for rule in required for axis in rule.axes if axis not in mesh]


def _usage(
    rules: LayoutRules,
    mesh: Mesh,
    tensors: Iterable[tuple[object, ShapeLike, str]],
    inner: Iterable[tuple[object, ShapeLike, str]],
    splitting: Iterable[str],
    own: set[str],
) -> _Usage:
    usage = _Usage(axes=set(splitting))
    for fault in _unknown_axes(rules, mesh):
        usage.faults.setdefault(fault, [])
    followed: set[Rule] = set()  # rules used by some tensor
    seen: dict[tuple[Shape, str], tuple[RuleFault, ...]] = {}  # most tensors have the layout of an earlier one
    for into, (label, given, scope) in chain(zip(repeat(usage.faults), tensors), zip(repeat(usage.misfits), inner)):
        shape = given if isinstance(given, Shape) else Shape(given)
        wrong = seen.get((shape, scope))
        if wrong is None:
            if into is usage.faults:  # these come first
                own.update(shape.names)
            usage.dims.update(dict.fromkeys(shape.names))
            holding = {rule for name in shape.names for rule in rules.for_dim(name, scope)}
            usage.rules |= holding
            axes, wrong = place(rules, shape, mesh, scope)
            usage.axes.update(axis for entry in axes for axis in entry)
            followed |= holding - {fault.rule for fault in wrong}
            seen[shape, scope] = wrong
        for fault in wrong:
            into.setdefault(fault, []).append(label)
    for fault in [f for f in usage.misfits if f in usage.faults or (f.rule not in followed and _dim(f) not in own)]:
        usage.faults.setdefault(fault, []).extend(usage.misfits.pop(fault))
    usage.axes.update(axis for fault in usage.faults if fault.rule for axis in fault.rule.axes)
    return usage


def _dim(fault: RuleFault) -> str | None:
    return fault.rule.dim if fault.rule is not None else None


def _unknown_names(
    rules: LayoutRules, mesh: Mesh, known: dict[str, None], faults: dict[RuleFault, list[object]]
) -> list[str]:
    """Unknown names in optional rules, as notes; unknown names in other rules are added to the faults."""
    foreign: list[str] = []
    for name in rules.dims:
        if name not in known:
            which = ", ".join(str(rule) for rule in rules.rules if rule.dim == name)
            text = f"rule {which}: no dimension {name!r} in the program{nearest(name, known)}"
            if not all(rule.optional for rule in rules.rules if rule.dim == name):
                hint = _swapped(rules, name, mesh, known)
                if not hint and "did you mean" not in text:
                    hint = f"; there are {some(list(known), 8)}"
                faults[RuleFault(text + hint, of_rule=True)] = []
                continue
            foreign.append(text)
    return foreign + [
        unknown_axis(rule, axis, mesh).what
        for rule in rules.rules
        for axis in rule.axes
        if rule.optional and axis not in mesh
    ]


def _notes(rules: LayoutRules, mesh: Mesh, usage: _Usage, known: dict[str, None]) -> list[str]:
    """Notes on rules and axes without effect, and on inner tensors that a rule does not fit."""
    notes = [
        f"rule {rule} is not used: {_why_unused(rule, usage.dims)}"
        for rule in rules.rules
        if rule.dim in known
        and rule not in usage.rules
        and not (rule.optional and set(rule.axes).isdisjoint(mesh.axes))
    ]
    notes += [
        f"axis {axis!r} splits nothing: every tensor is held {size} times over"
        for axis, size in zip(mesh.axes, mesh.sizes, strict=True)
        if size > 1 and axis not in usage.axes
    ]
    return notes + [
        f"{fault.what}: {fault.remedy.partition('. ')[0]}. Nobody named this size of these tensors, which are "
        f"split as far as it fits: {some(_texts(labels))}"
        for fault, labels in usage.misfits.items()
    ]


def _swapped(rules: LayoutRules, name: str, mesh: Mesh, known: dict[str, None]) -> str:
    """A hint for a rule that names an axis first, then a dim."""
    swapped_rules = [rule for rule in rules.rules if rule.dim == name and name in mesh and set(rule.axes) & set(known)]
    return f"; rules are dim:axis, so write {swapped_rules[0].axes[0]}:{name}" if swapped_rules else ""


def _why_unused(rule: Rule, present: dict[str, None]) -> str:
    if rule.dim not in present:
        return f"no tensor here has dimension {rule.dim!r}"
    if rule.scope is None:
        return f"scoped rules replace it wherever {rule.dim!r} occurs"
    return f"no tensor in its scope has dimension {rule.dim!r}"


def _texts(labels: Iterable[object]) -> tuple[str, ...]:
    """Labels as text, each once."""
    return tuple(dict.fromkeys(map(str, labels)))


def _with_tensors(fault: RuleFault, labels: tuple[str, ...]) -> str:
    return fault.text if fault.of_rule else f"{fault.text} In: {some(labels)}."


def some(labels: Sequence[object], most: int = SHOWN_TENSORS) -> str:
    """The first few items of a list, and the number of the others.

    >>> some(["a", "b", "c", "d"]), some(["a", "b", "c"], 1)
    ('a, b, c and 1 more', 'a and 2 more')
    """
    more = f" and {len(labels) - most} more" if len(labels) > most else ""
    return f"{', '.join(map(str, labels[:most]))}{more}"
