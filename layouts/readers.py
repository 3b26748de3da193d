"""Layouts in the notation of Flax, Haliax and JAX, read and written.

    from_flax              ordered (name, axes) rules of Flax Linen and MaxText      to_flax
    from_haliax            a dict of axis names to mesh axes, of Haliax and Levanter
    from_partition_specs   PartitionSpec-shaped tuples, one for each tensor          to_partition_spec

What is read is ordinary `LayoutRules`; it gives every tensor the sharding that the original gives it, or a
`LayoutError` where that is impossible. One difference stays on purpose: a size that its axes do not divide
is an error here, never padded.

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

Entry: TypeAlias = str | Sequence[str] | None  # what a PartitionSpec holds for a dim
Spec: TypeAlias = Sequence[Entry]
NamesOfDims: TypeAlias = Shape | Sequence[str]


def from_flax(rules: Iterable[tuple[str, Entry]], dims: Iterable[str] | None = None) -> LayoutRules:
    """Ordered rules with the meaning they have in Flax Linen and MaxText.

    For each tensor the rules are tried in order, and the first one for a dim whose axes no other dim of the
    tensor has yet is the dim's; one taken axis leaves the whole rule unused, and no axes end the search.

    Args:
      rules: (dim, axes) pairs; axes are a name, several names major first, or None.
      dims: the names that the program has; rules for others are left out. All are kept unless given.
    Raises: LayoutError for what is no rule, with its number.

    >>> rules = from_flax([("batch", "x"), ("features", "x"), ("heads", ("x", "y")), ("heads", "y"), ("batch", "z")])
    >>> print(rules)
    batch:x?;features:x?;heads:(x+y)?;heads:y?;batch:z?
    >>> print(rules.sharding("batch:4;length:4;heads:4;features:4", "x:2;y:2;z:2"))
    [batch:4@x, length:4, heads:4@y, features:4]
    """
    given: object = rules
    if isinstance(given, str) or not is_iterable(given):
        raise LayoutError(f"Flax rules are a list of (dim, axes) pairs, not {rules!r:.80}")
    kept = None if dims is None else set(dims)
    layout_rules: list[Rule] = []
    closed: set[str] = set()  # their search has ended
    for number, item in enumerate(rules):
        if not isinstance(item, tuple | list) or len(item) != 2 or not isinstance(item[0], str):
            raise LayoutError(f"Flax rule {number}: expected a (dim, axes) pair, not {item!r:.80}")
        dim, axes = item[0], _axes(item[1], f"Flax rule {number}, {item!r:.80}")
        if dim in closed or (kept is not None and dim not in kept):
            continue
        if axes:
            layout_rules.append(Rule(dim, axes, optional=True, whole=len(axes) > 1))
            continue
        closed.add(dim)
        if not any(rule.dim == dim for rule in layout_rules):
            layout_rules.append(Rule(dim, ()))
    return LayoutRules(layout_rules)


def to_flax(rules: RulesLike, scope: str | None = None) -> list[tuple[str, str | Axes | None]]:
    """The ordered rules by which Flax Linen gives every tensor the sharding that `rules` give it.

    Args:
      rules: a layout.
      scope: "variables", "slots" or "activations": the rules that hold there. Flax has no scopes, so a layout with
        scoped rules needs a list for each.
    Raises: LayoutError for scoped rules without `scope`.

    An optional rule of several axes, which takes those that are free, becomes one rule for every choice of them.

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
    for rule in sorted(holding, key=lambda rule: rule.optional):  # stable: required ones come first here, too
        count = len(rule.axes)
        least = 1 if rule.optional and not rule.whole else count
        choices = [c for n in range(count, least - 1, -1) for c in combinations(rule.axes, n)]
        written += [(rule.dim, _entry(choice)) for choice in choices]
    return written


def from_haliax(mapping: Mapping[str, Entry], params: Mapping[str, Entry] | None = None) -> LayoutRules:
    """A Haliax axis mapping: each named axis always lies on the same mesh axes.

    Args:
      mapping: dim -> a mesh axis, several major first, or None; the compute mapping if there are two.
      params: the mapping of parameters, where it is another one (fully-sharded training). It replaces `mapping`
        for variables and optimizer slots altogether.

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
    specs: Mapping[str | NamesOfDims, Spec],
    dims: Mapping[str, NamesOfDims] | None = None,
    scope: str | None = None,
) -> LayoutRules:
    """The rules behind PartitionSpec-shaped tuples: each dim must lie on the same axes in every tensor.

    Args:
      specs: tensor -> spec. The tensor is a name in `dims`, a tuple of names of dims, or a Shape. The spec has for
        each dim a mesh axis, several major first, or None; dims beyond its end are not split.
      dims: tensor name -> the names of its dims, in the order of the spec.
      scope: for which the rules are to hold; all unless given. Where parameters and activations are laid out
        differently, read them apart and join the rules: `LayoutRules([*a.rules, *b.rules])`.
    Raises: LayoutError with all faults at once; for two tensors that disagree on a dim it names both.

    >>> shapes = {"w1": ("pixels", "hidden"), "w2": ("hidden", "classes")}
    >>> print(from_partition_specs({"w1": (None, "cols"), "w2": ("cols",)}, shapes))
    pixels:;hidden:cols;classes:
    >>> from_partition_specs({"w1": (None, "cols"), "w2": ("rows",)}, shapes)
    Traceback (most recent call last):
    layouts.errors.LayoutError: the specs: dim 'hidden' lies on cols in 'w1' (None, 'cols'), but on rows in 'w2' ('rows',): one rule holds for all tensors. Rename the dim in one of them, or read the two apart with scope=.
    """  # noqa: E501
    if not isinstance(specs, Mapping):
        raise LayoutError(f"expected a dict of tensors to specs, not {specs!r:.80}")
    if scope is not None:
        checked_scope(scope)
    faults: list[str] = []
    axes_of_dim: dict[str, tuple[Axes, str]] = {}  # dim -> axes and the tensor that says so
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
                    f"dim {dim!r} lies on {_shown(known)} in {first}, but on {_shown(axes)} in {what}: one rule holds "
                    "for all tensors. Rename the dim in one of them, or read the two apart with scope=."
                )
    if faults:
        raise LayoutError.listing("the specs", faults, most=len(faults))
    return LayoutRules([Rule(dim, axes, scope=scope) for dim, (axes, _) in axes_of_dim.items()])


def to_partition_spec(sharding: Sharding) -> tuple[str | Axes | None, ...]:
    """What `jax.sharding.PartitionSpec(*...)` takes for a tensor of that sharding, an entry for each dim.

    Raises: LayoutError for a pending reduction, which a PartitionSpec can not say.

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
    """The axes of each dim of a tensor, and how to call the tensor in a message."""
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
