"""All that is wrong with a layout, at once.

`LayoutRules.sharding` looks at one tensor and must stop there. `check` looks at all tensors of a program
under one layout and groups what it finds: a dimension that does not divide is reported once, with the
tensors that have it. What is merely wasteful (an unused rule, an unused axis) is a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

from layouts.dims import Shape, ShapeLike
from layouts.errors import LayoutError, nearest
from layouts.mesh import Mesh, MeshLike
from layouts.rules import Fault, LayoutRules, Rule, RulesLike, place, unknown_axis

SHOWN_TENSORS = 3  # of one fault; the rest are counted


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of `check`: faults make the layout impossible, notes make it worth a second look."""

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
            count = "1 fault" if len(self.faults) == 1 else f"{len(self.faults)} faults"
            raise LayoutError("\n  ".join([f"{count} in the layout", *self.faults]))

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
        out, unless the rule fits no tensor at all.
      splitting: axes that split something without a rule.

    >>> print(check("vocab:cols", "rows:2;cols:4", [("logits", "batch:6;vocab:10", "activations")]))
    fault: dim 'vocab' does not divide over axis 'cols': 10 % 4 = 2. Pad vocab to 12 (+20.00 %), or remove vocab:cols. In: logits.
    note: axis 'rows' splits nothing: every tensor is held 2 times over
    """  # noqa: E501
    rules = rules if isinstance(rules, LayoutRules) else LayoutRules(rules)
    mesh = mesh if isinstance(mesh, Mesh) else Mesh(mesh)
    faults: dict[Fault, list[str]] = {}  # with the labels of the tensors concerned
    misfits: dict[Fault, list[str]] = {}  # the same of inner tensors
    followed: set[Rule] = set()  # by some tensor
    present: dict[str, None] = {}  # ordered names of dims
    used_rules: set[Rule] = set()
    used_axes = set(splitting)
    for rule in rules.rules:  # an axis is unknown whether or not a tensor meets the rule
        for axis in rule.axes:
            if axis not in mesh and not rule.optional:
                faults.setdefault(unknown_axis(rule, axis, mesh), [])
    seen: dict[tuple[Shape, str], tuple[Fault, ...]] = {}  # most tensors are laid out like one before
    for into, (label, given, scope) in chain(zip(repeat(faults), tensors), zip(repeat(misfits), inner)):
        shape = given if isinstance(given, Shape) else Shape(given)
        if (shape, scope) not in seen:
            present.update(dict.fromkeys(shape.names))
            holding = {rule for name in shape.names for rule in rules.for_dim(name, scope)}
            used_rules |= holding
            axes, wrong = place(rules, shape, mesh, scope)
            used_axes.update(axis for entry in axes for axis in entry)
            followed |= holding - {fault.rule for fault in wrong}
            seen[shape, scope] = wrong
        for fault in seen[shape, scope]:
            into.setdefault(fault, []).append(label)
    for fault in [f for f in misfits if f in faults or f.rule not in followed]:
        faults.setdefault(fault, []).extend(misfits.pop(fault))
    used_axes.update(axis for fault in faults if fault.rule for axis in fault.rule.axes)
    known = dict.fromkeys([*present, *(known_dims or ())])
    foreign: list[str] = []
    for name in rules.dims:
        if name not in known:
            which = ", ".join(str(rule) for rule in rules.rules if rule.dim == name)
            text = f"rule {which}: no dimension {name!r} in the program{nearest(name, known)}"
            if not all(rule.optional for rule in rules.rules if rule.dim == name):
                faults[Fault(text + _swapped(rules, name, mesh, known), of_rule=True)] = []
                continue
            foreign.append(text)
    foreign += [
        unknown_axis(rule, axis, mesh).what
        for rule in rules.rules
        for axis in rule.axes
        if rule.optional and axis not in mesh
    ]
    notes = [f"{text}; it splits nothing here, as its '?' allows" for text in dict.fromkeys(foreign)]
    notes += [
        f"rule {rule} is not used: {_why_unused(rule, present)}"
        for rule in rules.rules
        if rule.dim in known and rule not in used_rules and not (rule.optional and set(rule.axes).isdisjoint(mesh.axes))
    ]
    notes += [
        f"axis {axis!r} splits nothing: every tensor is held {size} times over"
        for axis, size in zip(mesh.axes, mesh.sizes, strict=True)
        if size > 1 and axis not in used_axes
    ]
    notes += [
        f"{fault.what}: {fault.remedy.partition('. ')[0]}. The library made these tensors itself and splits them as "
        f"far as it fits: {some(list(dict.fromkeys(labels)))}"
        for fault, labels in misfits.items()
    ]
    found = tuple((fault, tuple(dict.fromkeys(labels))) for fault, labels in faults.items())
    return Report(tuple(_with_tensors(*item) for item in found), tuple(notes), found)


def _swapped(rules: LayoutRules, name: str, mesh: Mesh, known: dict[str, None]) -> str:
    """A hint where a rule names an axis first, then a dim."""
    found = [rule for rule in rules.rules if rule.dim == name and name in mesh and set(rule.axes) & set(known)]
    return f"; rules are dim:axis, so write {found[0].axes[0]}:{name}" if found else ""


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
