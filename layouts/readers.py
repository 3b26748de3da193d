"""Conversion of layouts from and to the notations of Flax, Haliax and JAX.

    from_flax              ordered (name, axes) rules of Flax Linen and MaxText      to_flax
    from_haliax            a dict of axis names to mesh axes, of Haliax and Levanter
    from_partition_specs   PartitionSpec-shaped tuples, one per tensor               to_partition_spec

The result is ordinary `LayoutRules` that give every tensor its original sharding; if that is impossible it is a
`LayoutError`. One difference is intended: a size that its axes do not divide is an error here, never padded.

Sources: google/flax: flax/linen/spmd.py, `_logical_to_mesh_axes`; stanford-crfm/haliax:
src/haliax/partitioning.py, `pspec_for_axis`; jax-ml/jax: jax/_src/partition_spec.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import TypeAlias

from layouts.dims import Shape
from layouts.errors import LayoutError, nearest
from layouts.parsing import is_iterable
from layouts.rules import SCOPES, LayoutRules, Rule, RulesLike, checked_scope
from layouts.sharding import Axes, Sharding

Entry: TypeAlias = str | Sequence[str] | None  # entry of a PartitionSpec
Spec: TypeAlias = Sequence[Entry]
NamesOfDims: TypeAlias = Shape | Sequence[str]


def from_flax(rules: Iterable[tuple[str, Entry]], dims: Iterable[str] | None = None) -> LayoutRules:
    """Rules equivalent to the ordered rules of Flax Linen and MaxText.

    For each tensor the rules are applied in order: a dim gets the axes of its first rule none of whose axes another dim
    of the tensor already has. A rule without axes ends the search.

    Args:
      rules: (dim, axes) pairs; axes are a name, several names major first, or None.
      dims: names in the program; rules for others are dropped. By default all rules are kept.
    Raises: LayoutError for an invalid rule, with its number.

    >>> from layouts import from_flax
    >>> rules = from_flax([("batch", "x"), ("features", "x"), ("heads", ("x", "y")), ("heads", "y"), ("batch", "z")])
    >>> print(rules)
    batch:x?;features:x?;heads:(x+y)?;heads:y?;batch:z?
    >>> print(rules.sharding("batch:4;length:4;heads:4;features:4", "x:2;y:2;z:2"))
    [batch:4@x, length:4, heads:4@y, features:4]
    """
    given: object = rules
    if isinstance(given, str) or not is_iterable(given):
        raise LayoutError(f"Flax rules are a list of (dim, axes) pairs, not {rules!r:.80}")
    known_dims = None if dims is None else set(dims)
    layout_rules: list[Rule] = []
    closed: set[str] = set()  # dims whose search has ended
    for number, item in enumerate(rules):
        if not isinstance(item, tuple | list) or len(item) != 2 or not isinstance(item[0], str):
            raise LayoutError(f"Flax rule {number}: expected a (dim, axes) pair, not {item!r:.80}")
        dim, axes = item[0], _axes(item[1], f"Flax rule {number}, {item!r:.80}")
        if dim in closed or (known_dims is not None and dim not in known_dims):
            continue
        if axes:
            layout_rules.append(Rule(dim, axes, optional=True, whole=len(axes) > 1))
            continue
        closed.add(dim)
        if not any(rule.dim == dim for rule in layout_rules):
            layout_rules.append(Rule(dim, ()))
    return LayoutRules(layout_rules)


def to_flax(rules: RulesLike, scope: str | None = None) -> list[tuple[str, str | Axes | None]]:
    """Ordered rules by which Flax Linen gives every tensor the sharding that `rules` give it.

    Args:
      rules: a layout.
      scope: "variables", "slots" or "activations": the scope to convert. Flax has no scopes, so a layout with scoped
        rules needs one list per scope.
    Raises: LayoutError for scoped rules without `scope`.

    An optional rule with several axes, which takes those that are free, becomes one rule per subset of them.

    >>> from layouts import to_flax
    >>> to_flax("d:data+fsdp?;batch:data")
    [('batch', 'data'), ('d', ('data', 'fsdp')), ('d', 'data'), ('d', 'fsdp')]
    """
    rules = rules if isinstance(rules, LayoutRules) else LayoutRules(rules)
    if scope is None:
        scoped = [str(rule) for rule in rules.rules if rule.scope]
        if scoped:
            raise LayoutError(
                f"Flax rules have no scopes, but the layout has {', '.join(scoped)}; write one list for each of "
                f"scope={' and scope='.join(map(repr, SCOPES))}"
            )
    where = checked_scope(scope or "activations")
    holding = [rule for rule in rules.rules if rule in rules.for_dim(rule.dim, where)]
    written: list[tuple[str, str | Axes | None]] = []
    for rule in sorted(holding, key=lambda rule: rule.optional):  # stable: required rules come first here too
        count = len(rule.axes)
        least = 1 if rule.optional and not rule.whole else count
        choices = [c for n in range(count, least - 1, -1) for c in combinations(rule.axes, n)]
        written += [(rule.dim, _entry(choice)) for choice in choices]
    return written


def from_haliax(mapping: Mapping[str, Entry], params: Mapping[str, Entry] | None = None) -> LayoutRules:
    """The rules of a Haliax axis mapping, in which a named axis always has the same mesh axes.

    Args:
      mapping: dim -> a mesh axis, several major first, or None; the compute mapping if there are two.
      params: the mapping of parameters, if different (fully sharded training). It replaces `mapping` entirely for
        variables and optimizer slots.

    >>> from layouts import from_haliax
    >>> print(from_haliax({"batch": "data", "mlp": "model"}))
    batch:data;mlp:model
    >>> print(from_haliax({"batch": "data", "mlp": "model"}, params={"embed": "data", "mlp": "model"}))
    batch:data;mlp:model;variables/batch:;variables/embed:data
    """
    computed, stored = (_mapping(m, what) for m, what in ((mapping, "mapping"), (params, "params")))
    layout_rules = [Rule(dim, axes) for dim, axes in computed.items()]
    if params is not None:
        dims = dict.fromkeys([*computed, *stored])
        changed = [dim for dim in dims if stored.get(dim, ()) != computed.get(dim, ())]
        layout_rules += [Rule(dim, stored.get(dim, ()), scope="variables") for dim in changed]
    return LayoutRules(layout_rules)


def from_partition_specs(
    specs: Mapping[str | NamesOfDims, Spec], dims: Mapping[str, NamesOfDims] | None = None, scope: str | None = None
) -> LayoutRules:
    """The rules of PartitionSpec-shaped tuples: each dim must have the same axes in every tensor.

    Args:
      specs: tensor -> spec. The tensor is a name in `dims`, a tuple of names of dims, or a Shape. The spec has per dim a
        mesh axis, several major first, or None; dims beyond its end are not split.
      dims: tensor name -> the names of its dims, in the order of the spec.
      scope: scope of the rules; by default all. If parameters and activations have different layouts, read them
        separately and join the rules: `LayoutRules([*a.rules, *b.rules])`.
    Raises: LayoutError with all faults at once, naming both tensors that disagree on a dim.

    >>> from layouts import from_partition_specs
    >>> shapes = {"w1": ("pixels", "hidden"), "w2": ("hidden", "classes")}
    >>> print(from_partition_specs({"w1": (None, "cols"), "w2": ("cols",)}, shapes))
    pixels:;hidden:cols;classes:
    >>> from_partition_specs({"w1": (None, "cols"), "w2": ("rows",)}, shapes)
    Traceback (most recent call last):
    layouts.errors.LayoutError: the specs: dim 'hidden' is split over cols in 'w1' (None, 'cols'), but over rows in 'w2' ('rows',): one rule holds for all tensors. Rename the dim in one of them, or read the two apart with scope=.
    """  # noqa: E501
    if not isinstance(specs, Mapping):
        raise LayoutError(f"expected a dict of tensors to specs, not {specs!r:.80}")
    if scope is not None:
        checked_scope(scope)
    faults: list[str] = []
    axes_of_dim: dict[str, tuple[Axes, str]] = {}  # dim -> its axes, and the first tensor with them
    for tensor, spec in specs.items():
        try:
            placed, what = _placed(tensor, spec, dims or {})
        except LayoutError as fault:
            faults.append(str(fault))
            continue
        for dim, axes in placed.items():
            known, first = axes_of_dim.setdefault(dim, (axes, what))
            if known != axes:
                faults.append(
                    f"dim {dim!r} is split over {_shown(known)} in {first}, but over {_shown(axes)} in {what}: one "
                    "rule holds for all tensors. Rename the dim in one of them, or read the two apart with scope=."
                )
    if faults:
        raise LayoutError.listing("the specs", faults, most=len(faults))
    return LayoutRules([Rule(dim, axes, scope=scope) for dim, (axes, _) in axes_of_dim.items()])


def to_partition_spec(sharding: Sharding) -> tuple[str | Axes | None, ...]:
    """The arguments of `jax.sharding.PartitionSpec(*...)` for a tensor of that sharding, one per dim.

    Raises: LayoutError for a pending reduction, which a PartitionSpec cannot express.

    >>> from layouts import Sharding, to_partition_spec
    >>> to_partition_spec(Sharding("batch:8;length:4;d:6", "x:2;y:2;z:3", [("y", "x"), (), ("z",)]))
    (('y', 'x'), None, 'z')
    """
    if not isinstance(sharding, Sharding):
        raise LayoutError(f"expected a Sharding, not {type(sharding).__name__} {sharding!r:.80}")
    if sharding.pending:
        raise LayoutError(f"a PartitionSpec has no pending reductions: {sharding}; write sharding.drop_pending()")
    return tuple(_entry(axes) for axes in sharding.axes)


def _entry(axes: Axes) -> str | Axes | None:
    return axes[0] if len(axes) == 1 else axes or None


def _axes(entry: object, what: str) -> Axes:
    """The axes of an entry: none, one or several."""
    several = (entry,) if isinstance(entry, str) else () if entry is None else entry
    if not isinstance(several, tuple | list) or not all(isinstance(axis, str) for axis in several):
        raise LayoutError(f"{what}: the axes are a name, several names or None, not {entry!r:.80}")
    twice = next((axis for axis in several if several.count(axis) > 1), None)
    if twice is not None:
        raise LayoutError(f"{what}: axis {twice!r} occurs {several.count(twice)} times")
    return tuple(several)


def _mapping(mapping: object, what: str) -> dict[str, Axes]:
    if mapping is None and what == "params":
        return {}
    if not isinstance(mapping, Mapping) or not all(isinstance(dim, str) for dim in mapping):
        raise LayoutError(f"Haliax {what}: expected a dict of names to mesh axes, not {mapping!r:.80}")
    return {dim: _axes(entry, f"Haliax {what}, {dim!r}") for dim, entry in mapping.items()}


def _placed(tensor: object, spec: object, dims: Mapping[str, NamesOfDims]) -> tuple[dict[str, Axes], str]:
    """The axes of each dim of a tensor, and the tensor's name in messages."""
    given = dims.get(tensor) if isinstance(tensor, str) else tensor
    if given is None:
        raise LayoutError(f"no dims given for tensor {tensor!r}{nearest(tensor, dims)}; add it to dims=")
    names = given.names if isinstance(given, Shape) else given
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise LayoutError(f"the dims of {tensor!r:.80} are a Shape or names, not {given!r:.80}")
    what = f"{tensor!r} {spec!r}" if isinstance(tensor, str) else f"[{', '.join(names)}] {spec!r}"
    if not isinstance(spec, tuple | list):
        raise LayoutError(f"{what}: a spec is a tuple with an entry for each dim")
    if len(spec) > len(names):
        raise LayoutError(f"{what}: {len(spec)} entries for {len(names)} dims, {', '.join(names)}")
    entries = [_axes(entry, what) for entry in spec] + [()] * (len(names) - len(spec))
    _axes([axis for entry in entries for axis in entry], what)
    repeated = next((name for name in names if list(names).count(name) > 1), None)
    if repeated is not None:
        raise LayoutError(f"{what}: dim {repeated!r} occurs twice; rename one")
    return dict(zip(names, entries, strict=True)), what


def _shown(axes: Axes) -> str:
    return "+".join(axes) or "no axis"
