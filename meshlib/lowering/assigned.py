"""Assigned sharding: the sharding that the layout rules give a tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from layouts import Dimension, LayoutRules, Mesh, Report, Shape, Sharding, check
from layouts.checking import some
from layouts.rules import Rule, RuleFault
from layouts.sharding import Axes
from meshlib.core.errors import LayoutError
from meshlib.core.graph import UPDATE, Graph, Operation, Tensor
from meshlib.core.opdef import Home, Kind, Role
from meshlib.core.replay import all_operations

if TYPE_CHECKING:
    from meshlib.lowering.accumulators import Destination

Region: TypeAlias = str | None  # None: all regions
NO_RULES = LayoutRules()
Entry: TypeAlias = tuple[object, Shape, str]  # (label, shape, scope) of a tensor


class Traits(NamedTuple):
    """The scope of the rules that apply to a tensor, and whether it is a weight, or internal to the library."""

    scope: str
    is_weight: bool
    is_inner: bool


@dataclass(eq=False)
class Homes:
    """Assigned shardings of one graph's tensors under one layout, computed on demand."""

    graph: Graph
    mesh: Mesh
    rules: LayoutRules
    regather: bool = True
    destinations: dict[Tensor, Destination] = field(default_factory=dict)  # accumulators of a loop's body
    known_traits: dict[Tensor, Traits] = field(default_factory=dict)  # independent of the layout
    _made: dict[Tensor, Sharding] = field(default_factory=dict)
    _held: dict[Tensor, tuple[Sharding, Axes] | None] = field(default_factory=dict)

    def held(self, t: Tensor) -> tuple[Sharding, Axes] | None:
        """Assigned sharding of a variable and the axes over which it is stationary; None if there are none."""
        if not self.traits(t).is_weight:
            return None
        if t not in self._held:
            axes = tuple([axis for d in t.shape for axis in stationary_axes(self.rules, d)])
            self._held[t] = (self.of(t), axes) if axes else None
        return self._held[t]

    def bind(self, t: Tensor, sharding: Sharding) -> None:
        """Assign a sharding that rules do not determine: to tensors that a loop's body takes from outside or stacks."""
        self._made[t] = sharding

    def reach(self, t: Tensor, s: Sharding, region: str) -> Region:
        """The region that may use a copy of a tensor under `s`; None if all regions may.

        All may, unless the copy takes more memory than the assigned sharding and is to be gathered again.
        """
        return region if self.regather and s.local_size > self.of(t).local_size else None

    def inside(self, body: Graph) -> Homes:
        """Assigned shardings inside a loop's body, under the same layout."""
        return Homes(body, self.mesh, self.rules, self.regather, known_traits=self.known_traits)

    def scope(self, t: Tensor) -> str:
        """Scope of the rules that apply to a tensor: cached `scope_of`."""
        return self.traits(t).scope

    def traits(self, t: Tensor) -> Traits:
        """Everything but the layout that determines a tensor's assigned sharding."""
        traits = self.known_traits.get(t)
        if traits is None:
            traits = self.known_traits[t] = Traits(scope_of(t), is_weight(t), is_inner(t))
        return traits

    def of(self, t: Tensor) -> Sharding:
        """Assigned sharding of a tensor."""
        sharding = self._made.get(t)
        if sharding is None:
            sharding = self._made[t] = self._make(t)
        return sharding

    def _make(self, t: Tensor) -> Sharding:
        op = t.operation
        if op.opdef.home is Home.GIVEN:
            rules: LayoutRules = op.attrs["layout"]
            return rules.sharding(t.shape, self.mesh, "activations")
        if op.opdef.home is Home.OPERAND and t not in op.graph.gradient_of:
            return self.of(op.inputs[0])
        if op.opdef.kind is Kind.VIEW and is_constrained(t, self.rules):
            before, names = self.of(op.inputs[0]), {f.outputs[0]: str(f.operands[0]) for f in op.opdef.roles(op)}
            return Sharding(t.shape, self.mesh, [before.of(names[d.name]) for d in t.shape])
        scope, _, inner = self.traits(t)
        if inner:
            return self.rules.fitting(t.shape, self.mesh, scope)
        try:
            return self.rules.sharding(t.shape, self.mesh, scope)
        except LayoutError as fault:
            if unfit_dims(t.graph, t.shape, scope, self.rules, self.mesh):
                return self.rules.fitting(t.shape, self.mesh, scope)  # as noted by the check
            raise LayoutError(f"{op}: {t}\n{fault}") from None


def is_weight(t: Tensor) -> bool:
    """True if a tensor is a variable other than an optimizer slot, or a cast of one."""
    op = _outermost(t).operation
    if op.opdef.home is Home.OPERAND:
        return is_weight(op.inputs[0])
    return op.opdef.kind is Kind.VARIABLE and not op.attrs["slot_of"]


def stationary_axes(rules: LayoutRules, dim: Dimension) -> Axes:
    """Axes of a dim over which weights with that dim are stationary: those of a rule that activations follow too."""
    axes = rules.required_axes(dim, "variables")
    return axes if axes and axes == rules.required_axes(dim, "activations") else ()


def scope_of(t: Tensor) -> str:
    """Scope of the rules that apply to a tensor: variables, slots (gradients and updates too) or activations."""
    t = _outermost(t)
    op = t.operation
    if op.opdef.kind is Kind.VARIABLE:
        return "slots" if op.attrs["slot_of"] else "variables"
    if t in op.graph.gradient_of or (op.region == UPDATE and op.owner is not None):
        return "slots"
    return "activations"


def is_constrained(t: Tensor, rules: LayoutRules) -> bool:
    """True if a constraint determines a tensor's sharding: its own, or that of a tensor it renames or transposes.

    A new dim name with a rule of its own is meant to be sharded differently.
    """
    op = t.operation
    if op.opdef.home is Home.GIVEN:
        return True
    if t in op.graph.gradient_of or not (op.opdef.home is Home.OPERAND or _only_renames(op)):
        return False
    new = [d.name for d in t.shape if d not in op.inputs[0].shape]
    return is_constrained(op.inputs[0], rules) and not any(rules.for_dim(n, scope_of(t)) for n in new)


def _only_renames(op: Operation) -> bool:
    """True if an operation only renames or reorders its operand's dims."""
    if op.opdef.kind is not Kind.VIEW or len(op.inputs[0].shape) != len(op.output.shape):
        return False
    x, alone = op.inputs[0].shape, [f for f in op.opdef.roles(op) if f.role is Role.PARALLEL]
    sizes = {f.outputs[0]: x.dim(f.operands[0]).size for f in alone if f.operands[0] is not None}
    return all(sizes.get(d.name) == d.size for d in op.output.shape)


def _outermost(t: Tensor) -> Tensor:
    """`t`, or the outer tensor that it stands for (whole or sliced) in a loop's body."""
    while t.graph.loop_body is not None and (outer := t.graph.outer_of(t)) is not None:
        t = outer
    return t


def unfit_dims(graph: Graph, shape: Shape, scope: str, rules: LayoutRules, mesh: Mesh) -> list[Dimension]:
    """Unnamed dims of an imported program that do not divide over their axes."""
    while graph.parent is not None:
        graph = graph.parent
    if graph.named_dims is None:
        return []
    free = [d for d in shape if d not in graph.named_dims]
    return [d for d in free if any(d.size % _blocks(rule, mesh) for rule in rules.for_dim(d.name, scope))]


def _blocks(rule: Rule, mesh: Mesh) -> int:
    return mesh.group_size([axis for axis in rule.axes if axis in mesh])


class Subjects:
    """Everything a layout is checked against: the operations to lower, and all names of the graph."""

    def __init__(self, graph: Graph, operations: Iterable[Operation]) -> None:
        self.operations = list(all_operations(operations))
        self.names = {d.name for op in all_operations(graph.operations) for y in op.public_outputs for d in y.shape}
        self._graph = graph
        chosen = self.names if graph.named_dims is None else {d.name for d in graph.named_dims}
        self.derived = self.names - chosen
        self._judged = [
            ((_Label(op, y), y.shape, scope_of(y)), is_inner(y), op.output if self._follows(op) else None)
            for op, y in _judged(self.operations)
        ]

    @staticmethod
    def _follows(op: Operation) -> bool:
        """True if a constraint propagates to an operation's result: not if a rule names a new dim of it."""
        return is_constrained(op.output, NO_RULES)

    def judged(self, rules: LayoutRules, mesh: Mesh) -> tuple[list[Entry], list[Entry]]:
        """(label, shape, scope) entries checked against the rules: (tensors that must fit, tensors that need not).

        The latter are internal tensors, and tensors with dims that the user has not named.
        """
        strict, free = list[Entry](), list[Entry]()
        for entry, own, follows in self._judged:
            if follows is not None and is_constrained(follows, rules):
                continue
            label, shape, scope = entry
            unfit = [] if own else unfit_dims(self._graph, shape, scope, rules, mesh)
            if own or unfit:
                free.append(entry)
            if not own:
                strict.append((label, Shape([d for d in shape if d not in unfit]), scope) if unfit else entry)
        return strict, free


def check_layout(subjects: Subjects, mesh: Mesh, rules: LayoutRules) -> Report:
    """All faults of a layout over a program at once, and notes on what it leaves unused."""
    constrained = [op for op in subjects.operations if op.opdef.home is Home.GIVEN]
    splitting = {axis for op in constrained for rule in op.attrs["layout"].rules for axis in rule.axes}
    strict, free = subjects.judged(rules, mesh)
    report = check(rules, mesh, strict, subjects.names, free, splitting, subjects.derived)
    bound = [_check_constrained(op, mesh) for op in constrained]
    faults = (*report.faults, *(text for r in bound for text in r.faults))
    return Report(faults, report.notes, (*report.found, *(fact for r in bound for fact in r.found)))


def _check_constrained(op: Operation, mesh: Mesh) -> Report:
    return check(op.attrs["layout"], mesh, [(_Label(op, op.output), op.output.shape, "activations")])


def refuse_faults(report: Report, subjects: Subjects, mesh: Mesh, rules: LayoutRules) -> None:
    """Raise one LayoutError that lists all faults, each with the first operation concerned and a remedy."""
    if report.ok:
        return
    known = {str(_Label(op, y)): op for op in subjects.operations for y in op.public_outputs}
    texts = [_fault_text(fault, labels, known, mesh, rules) for fault, labels in report.found]
    if len(texts) == 1:
        raise LayoutError(texts[0])
    numbered = [f"{n}. {text}".replace("\n", "\n   ") for n, text in enumerate(texts, start=1)]
    raise LayoutError("\n".join([f"{len(texts)} faults in the layout", *numbered]))


def _fault_text(
    fault: RuleFault, labels: tuple[str, ...], known: Mapping[str, Operation], mesh: Mesh, rules: LayoutRules
) -> str:
    first = known[labels[0]] if labels else None
    bound = first is not None and first.opdef.home is Home.GIVEN
    place = f"mesh {mesh}   layout {(first.attrs['layout'] if first and bound else rules) or '(none)'}"
    if first is None or (fault.of_rule and not bound):
        return f"{fault.what}\n  {place}"
    lines = [f"{first}: {fault.what}", "   ".join(map(str, (*first.inputs, *first.outputs))), place]
    remedy = _remedy_of_argument(fault, first) or _remedy_of_new_size(fault, first) or fault.remedy
    lines += [remedy] if remedy else []
    if len(labels) > 1:
        lines.append(f"The same in {some([str(known[x]) for x in labels[1:]])}.")
    return "\n  ".join(lines)


def _remedy_of_argument(fault: RuleFault, op: Operation) -> str:
    """Remedy for a dim whose size comes from an argument, such as a model's."""
    numbers = re.match(r"\d+ % (\d+) = \d+\.", fault.remedy)
    advice = op.graph.around[-1].remedies.get(fault.rule.dim) if fault.rule is not None else None
    if numbers is None or advice is None:
        return ""
    return f"{numbers.group(0)} {advice.format(blocks=numbers.group(1))}, or remove {fault.rule}."


def _remedy_of_new_size(fault: RuleFault, op: Operation) -> str:
    """Remedy for a dim whose size an operation changes (slice, pad): padding the dim everywhere would not help."""
    numbers = re.match(r"(\d+) % (\d+) = \d+\.", fault.remedy)
    changed = [
        d for d in op.output.shape for x in op.inputs if d.name in x.shape and x.shape.dim(d.name).size != d.size
    ]
    if numbers is None or not changed or f"'{changed[0].name}'" not in fault.what:
        return ""
    size, blocks = (int(n) for n in numbers.groups())
    name = changed[0].name
    fitting = [n for n in (size // blocks * blocks, -(-size // blocks) * blocks) if n]
    return (
        f"{numbers.group(0)} Make the result {' or '.join(map(str, fitting))} long, or rename '{name}' of its operands "
        f"first (mtf.rename_dimension), so that the rule does not reach it"
    )


class _Label(NamedTuple):
    """A result as messages name it."""

    op: Operation
    y: Tensor

    def __str__(self) -> str:
        return f"{self.op}: {self.y.type}"


def is_inner(t: Tensor) -> bool:
    """True if a tensor is internal to the library: no variable, no input, and not bound."""
    op = t.operation
    resident = op.opdef.kind is Kind.VARIABLE or (op.opdef.kind is Kind.INPUT and op.graph.parent is None)
    return op in op.graph.inner and not resident and t not in op.graph.gradient_of


def _judged(operations: Iterable[Operation]) -> Iterator[tuple[Operation, Tensor]]:
    for op in operations:
        if op.opdef.home is not Home.RULES:
            continue
        if op.opdef.kind is Kind.INPUT and op.graph.parent is not None:
            continue  # a stand-in for a tensor that is checked outside
        for y in op.public_outputs:
            if y is op.output or y.shape != op.output.shape:
                yield op, y
