"""Layout rules: mesh axes that split named dimensions.

A rule for a name applies to every tensor with that name. Two refinements serve fully sharded training: an optional
rule (`d_model:data?`) takes an axis only if no other dimension of the same tensor has it, and a scoped rule
(`variables/d_model:data`) replaces the unscoped rule for variables, optimizer slots or activations alone. An
optional rule with several axes takes those that are free; in brackets, `d_model:(data+fsdp)?`, all or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import TypeAlias, Union

from layouts.cells import clipped, rules_cell
from layouts.dims import Dimension, Shape, ShapeLike
from layouts.errors import LayoutError, nearest
from layouts.frozen import Interned
from layouts.mesh import Mesh, MeshLike
from layouts.parsing import caret, checked_name, is_iterable, read_pairs
from layouts.sharding import Axes, Sharding, laid

# Scopes in which each scope looks up the rules of a dim, in order; None is the unscoped rules.
SCOPES: dict[str, tuple[str | None, ...]] = {
    "variables": ("variables", None),
    "slots": ("slots", "variables", None),
    "activations": ("activations", None),
}


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a layout; without axes the dim is explicitly unsplit.

    `whole`: an optional rule with several axes takes all or none.

    >>> from layouts import Rule
    >>> print(Rule("d_model", ("data",), optional=True, scope="variables"))
    variables/d_model:data?
    """

    dim: str
    axes: Axes
    optional: bool = False
    scope: str | None = None
    whole: bool = False

    def __str__(self) -> str:
        scope, axes = f"{self.scope}/" if self.scope else "", "+".join(self.axes)
        return f"{scope}{self.dim}:{f'({axes})' if self.whole else axes}{'?' if self.optional else ''}"


@dataclass(frozen=True, slots=True)
class RuleFault:
    """A fault of one tensor under the rules; equal for tensors with the same cause."""

    what: str
    remedy: str = ""  # begins with the numbers
    of_rule: bool = False  # the rule itself is at fault, whatever the tensors
    rule: Rule | None = None  # the rule that can't be followed

    @property
    def text(self) -> str:
        """Fault and remedy as one sentence."""
        return f"{self.what}: {self.remedy}" if self.remedy else self.what


AxesLike: TypeAlias = str | Sequence[str] | None
RulesLike: TypeAlias = Union["LayoutRules", str, Mapping[str, AxesLike], Iterable[Rule | tuple[str, AxesLike]], None]


class LayoutRules(Interned):
    """An ordered collection of rules.

    Args:
      rules: text like "batch:rows;hidden:cols", a dict {"batch": "rows", "hidden": ("x", "y")}, pairs,
        `Rule`s, other rules, or nothing.

    >>> from layouts import LayoutRules
    >>> rules = LayoutRules("batch:data; d_model:data?; activations/d_model:")
    >>> print(rules)
    batch:data;d_model:data?;activations/d_model:
    >>> print(rules.sharding("d_model:512;d_ff:2048", "data:4", scope="variables"))
    [d_model:512@data, d_ff:2048]
    """

    __slots__ = ("_table", "rules")

    rules: tuple[Rule, ...]
    _table: dict[tuple[str | None, str], tuple[Rule, ...]]

    def __init__(self, rules: RulesLike = None) -> None:
        own_rules = _read(rules)
        table: dict[tuple[str | None, str], tuple[Rule, ...]] = {}
        for rule in own_rules:
            table[rule.scope, rule.dim] = (*table.get((rule.scope, rule.dim), ()), rule)
        for same in table.values():
            required = [str(rule) for rule in same if not rule.optional]
            if len(required) > 1:
                raise LayoutError(
                    f"two required rules for dim {same[0].dim!r}: {' and '.join(required)}; remove one, "
                    f"join their axes with '+', or mark the alternative optional with '?'"
                )
        self._fill(own_rules, rules=own_rules, _table=table)

    @property
    def dims(self) -> tuple[str, ...]:
        """The names of dimensions that have a rule, in order."""
        return tuple(dict.fromkeys(rule.dim for rule in self.rules))

    @property
    def axes(self) -> Axes:
        """The mesh axes that occur in a rule, in order."""
        return tuple(dict.fromkeys(axis for rule in self.rules for axis in rule.axes))

    def for_dim(self, dim: str | Dimension, scope: str = "activations") -> tuple[Rule, ...]:
        """The rules that apply to a dimension in a scope.

        >>> from layouts import LayoutRules
        >>> rules = LayoutRules("d:x;variables/d:y")
        >>> [str(rule) for scope in ("slots", "activations") for rule in rules.for_dim("d", scope)]
        ['variables/d:y', 'd:x']
        """
        name = dim.name if isinstance(dim, Dimension) else dim
        for place in SCOPES[checked_scope(scope)]:
            if (place, name) in self._table:
                return self._table[place, name]
        return ()

    def required_axes(self, dim: str | Dimension, scope: str = "activations") -> Axes:
        """The axes that a required rule gives to a dimension in a scope.

        >>> from layouts import LayoutRules
        >>> LayoutRules("d:x+y;d:z?").required_axes("d")
        ('x', 'y')
        """
        return next((rule.axes for rule in self.for_dim(dim, scope) if not rule.optional), ())

    def sharding(self, shape: ShapeLike, mesh: MeshLike, scope: str = "activations") -> Sharding:
        """The sharding of a tensor under these rules.

        Args:
          shape: the global shape; rules for other dimensions are ignored.
          mesh: the mesh.
          scope: "variables", "slots" or "activations".
        Raises: LayoutError with all faults of this tensor at once.

        >>> from layouts import LayoutRules
        >>> LayoutRules("d:model").sharding("d:6", "model:4")
        Traceback (most recent call last):
        layouts.errors.LayoutError: activation [d:6] cannot be laid out: dim 'd' does not divide over axis 'model': 6 % 4 = 2. Pad d to 8 (+33.33 %), or remove d:model.
          mesh model:4    layout d:model
        """  # noqa: E501
        shape = shape if isinstance(shape, Shape) else Shape(shape)
        mesh = mesh if isinstance(mesh, Mesh) else Mesh(mesh)
        return _sharding(self, shape, mesh, scope)

    def fitting(self, shape: Shape, mesh: Mesh, scope: str = "activations") -> Sharding:
        """The sharding of a tensor without the axes that do not fit: those already taken, and those that do not divide.

        >>> from layouts import LayoutRules, Mesh, Shape
        >>> print(LayoutRules("d:model+data").fitting(Shape("d:6"), Mesh("model:4;data:2")))
        [d:6@data]
        """
        return _fitting(self, shape, mesh, scope)

    def __len__(self) -> int:
        return len(self.rules)

    def _repr_html_(self) -> str:
        return rules_cell(self)

    def __str__(self) -> str:
        return ";".join(map(str, self.rules))

    def __repr__(self) -> str:
        return clipped(f"LayoutRules({str(self)!r})")


def checked_scope(scope: str) -> str:
    """`scope`, which must be one of the three."""
    if scope not in SCOPES:
        raise LayoutError(f"no scope {scope!r}; the scopes are {', '.join(SCOPES)}{nearest(scope, SCOPES)}")
    return scope


@lru_cache(maxsize=1 << 16)
def _sharding(rules: LayoutRules, shape: Shape, mesh: Mesh, scope: str) -> Sharding:
    axes, faults = place(rules, shape, mesh, scope)
    if faults:
        head = f"{scope[:-1]} {shape} cannot be laid out"
        raise LayoutError.listing(head, [fault.text for fault in faults], f"mesh {mesh}    layout {rules}")
    return laid(shape, mesh, axes)


@lru_cache(maxsize=1 << 16)
def _fitting(rules: LayoutRules, shape: Shape, mesh: Mesh, scope: str) -> Sharding:
    return laid(shape, mesh, place(rules, shape, mesh, scope)[0])


def _active_rules(rules: LayoutRules, shape: Shape, scope: str) -> list[Rule]:
    """The rules for dims of a tensor: required first, otherwise as written."""
    holding = {rule for dim in shape for rule in rules.for_dim(dim, scope)}
    return sorted([rule for rule in rules.rules if rule in holding], key=lambda rule: rule.optional)


def _left_for_optional(rule: Rule, wanted: Axes, taken: Sequence[str]) -> Axes:
    """The axes that an optional rule gets: those that are not taken; none where it needs all of them."""
    left = tuple(axis for axis in wanted if axis not in taken)
    return () if rule.whole and len(left) < len(rule.axes) else left


def place(rules: LayoutRules, shape: Shape, mesh: Mesh, scope: str) -> tuple[tuple[Axes, ...], tuple[RuleFault, ...]]:
    """The axes of each dimension of a tensor as far as they fit, and the faults of the rest.

    >>> place(LayoutRules("a:x;b:x?"), Shape("b:4;a:4"), Mesh("x:2"), "activations")
    (((), ('x',)), ())
    """
    active = _active_rules(rules, shape, scope)
    chosen: dict[str, Axes] = {}
    owner: dict[str, Rule] = {}
    faults: list[RuleFault] = []
    for rule in active:
        if rule.dim in chosen:
            continue  # an unneeded alternative
        if not rule.optional:
            faults += [unknown_axis(rule, axis, mesh) for axis in rule.axes if axis not in mesh]
        wanted = tuple(axis for axis in rule.axes if axis in mesh)
        taken = [axis for axis in wanted if axis in owner]
        if rule.optional:
            wanted = _left_for_optional(rule, wanted, taken)
            if not wanted:
                continue
        else:
            faults += [_clash(owner[axis], rule, axis) for axis in taken]
        size = shape.dim(rule.dim).size
        if size % mesh.group_size(wanted):
            faults.append(_indivisible(rule, wanted, size, mesh.group_size(wanted)))
        chosen[rule.dim] = wanted = _dividing(size, [axis for axis in wanted if axis not in taken], mesh)
        for axis in wanted:
            owner.setdefault(axis, rule)
    return tuple(chosen.get(name, ()) for name in shape.names), tuple(faults)


def _dividing(size: int, axes: Sequence[str], mesh: Mesh) -> Axes:
    """The axes, or the largest subset of them that divides `size`."""
    if size % mesh.group_size(axes) == 0:
        return tuple(axes)
    parts = (part for n in range(len(axes), -1, -1) for part in combinations(axes, n))
    return max((p for p in parts if size % mesh.group_size(p) == 0), key=mesh.group_size)


def unknown_axis(rule: Rule, axis: str, mesh: Mesh) -> RuleFault:
    """The fault of a rule with an axis that the mesh lacks."""
    return RuleFault(f"rule {rule}: no axis {axis!r} in mesh {mesh}{nearest(axis, mesh.axes)}", of_rule=True)


def _clash(first: Rule, second: Rule, axis: str) -> RuleFault:
    return RuleFault(
        f"dims {first.dim!r} and {second.dim!r} of one tensor are both split over axis {axis!r}",
        f"an axis splits one dim of a tensor. Make one optional ({second}?), or put it on another axis.",
        rule=second,
    )


def _indivisible(rule: Rule, axes: Axes, size: int, blocks: int) -> RuleFault:
    over = " x ".join(f"{axis!r}" for axis in axes)
    padded = -(-size // blocks) * blocks
    return RuleFault(
        f"dim {rule.dim!r} does not divide over {'axis' if len(axes) == 1 else 'axes'} {over}",
        f"{size} % {blocks} = {size % blocks}. "
        f"Pad {rule.dim} to {padded} (+{100 * (padded - size) / size:.2f} %), or remove {rule}.",
        rule=rule,
    )


def _read(source: RulesLike) -> tuple[Rule, ...]:
    if source is None:
        return ()
    if isinstance(source, LayoutRules):
        return source.rules
    if isinstance(source, str):
        return tuple(_rule(left, right, source, at) for left, right, at in read_pairs(source))
    if not is_iterable(source):
        raise LayoutError(
            f"expected a layout as text like 'batch:rows;hidden:cols', a dict or pairs, not {source!r:.80}"
        )
    read_rules = []
    for item in source.items() if isinstance(source, Mapping) else source:
        if not isinstance(item, Rule) and not (isinstance(item, tuple | list) and len(item) == 2):
            raise LayoutError(f"expected a (dim, axes) pair, not {item!r:.80}")
        left, right = (str(item).split(":")) if isinstance(item, Rule) else item
        if not isinstance(left, str):
            raise LayoutError(f"the left side of a rule is the name of a dimension, not {left!r}")
        right = _joined(left, right)
        read_rules.append(_rule(left, right, f"{left}:{right}", 0))
    return tuple(read_rules)


def _joined(dim: str, axes: object) -> str:
    if axes is None or isinstance(axes, str):
        return axes or ""
    if is_iterable(axes):
        names = list(axes)
        if all(isinstance(name, str) for name in names):
            return "+".join(names)
    raise LayoutError(f"the axes of dim {dim!r} are a name or several names, not {axes!r:.80}")


def _rule(left: str, right: str, text: str, at: int) -> Rule:
    """One rule from both sides of its colon; `text` and `at` position the caret."""
    scope, slash, dim = left.rpartition("/")
    if slash and scope not in SCOPES:
        hint = nearest(scope, SCOPES)
        raise LayoutError(f"no scope {scope!r}; the scopes are {', '.join(SCOPES)}{hint}", caret(text, at))
    if not dim.isidentifier():
        where = at + len(left) - len(dim)
        raise LayoutError(f"dimension name {dim!r} is not an identifier", caret(text, where))
    checked_name(dim, "dimension")
    optional = right.endswith("?")
    written = right.removesuffix("?")
    axes: list[str] = []
    where = at + len(left) + 1
    whole = written.startswith("(") and written.endswith(")")
    if whole:
        if not optional:
            message = f"brackets are for optional axes: write {written}? or {written[1:-1]}"
            raise LayoutError(message, caret(text, where))
        written, where = written[1:-1], where + 1
    for axis in written.split("+") if right else []:
        if not axis.isidentifier():
            raise LayoutError(f"axis name {axis!r} is not an identifier", caret(text, where))
        if axis in axes:
            raise LayoutError(f"axis {axis!r} occurs twice for dim {dim!r}", caret(text, where))
        axes.append(axis)
        where += len(axis) + 1
    return Rule(dim, tuple(axes), optional, scope or None, whole and len(axes) > 1)
