"""PartitionSpecs of a JAX program's arguments, converted to layout rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from layouts import LayoutRules
from layouts.errors import LayoutError
from layouts.readers import from_partition_specs
from meshlib.core.text import counted
from meshlib.jax.importing.leaves import words

if TYPE_CHECKING:
    from meshlib.jax.importing.imported import Argument

Specs = Any


def rules_of(
    arguments: Mapping[str, Argument], names: Sequence[str], specs: Sequence[Specs], scope: str | None
) -> LayoutRules:
    """Layout rules under which each argument is sharded by its spec; see `ImportedGraph.layout`."""
    spec_of: dict[str, tuple[Any, ...]] = {}
    dims_covered: dict[str, int] = {}  # number of dims that a spec covers
    for name, tree in zip(names, specs, strict=True):
        for prefix, spec in _leaves(name, tree):
            below = [a for path, a in arguments.items() if path == prefix or path.startswith(f"{prefix}/")]
            for argument in below:
                spec_of[argument.name] = _of_dims(argument, spec)
                dims_covered[argument.name] = sum(map(len, argument.axes[: len(spec)]))
    dims: dict[str, Any] = {name: arguments[name].shape.names for name in spec_of}
    return from_partition_specs(dict[Any, Any](_completed(spec_of, dims_covered, dims)), dims, scope)


def _completed(
    specs: Mapping[str, tuple[Any, ...]], dims_covered: Mapping[str, int], dims: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[Any, ...]]:
    """Short specs, such as `P()` for a bias of a split kernel, completed from other arrays' specs of these dims."""
    # complete specs first, so that errors name them
    first = sorted(specs, key=lambda n: dims_covered[n] < len(dims[n]))
    split: dict[str, Any] = {}
    for n in first:
        for d, entry in zip(dims[n], specs[n], strict=True):
            if _axes(entry):
                split.setdefault(d, entry)
    completed = {}
    for n in first:
        spec = specs[n]
        entries = list(spec[: dims_covered[n]])
        for d in dims[n][dims_covered[n] :]:
            entry, taken = split.get(d), {a for e in entries for a in _axes(e)}
            entries.append(None if taken & {*_axes(entry)} else entry)  # a rule for this dim would use the axis twice
        completed[n] = tuple(entries)
    return completed


def _axes(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _leaves(name: str, tree: Specs) -> list[tuple[str, tuple[Any, ...]]]:
    def is_spec(x: object) -> bool:
        return isinstance(x, jax.sharding.PartitionSpec) or hasattr(x, "spec")

    specs_of_leaves = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_spec)[0]:
        if not is_spec(leaf):
            raise LayoutError(f"layout: expected a PartitionSpec or a NamedSharding, got {leaf!r:.80}")
        specs_of_leaves.append(("/".join((name, *words(path))), tuple(getattr(leaf, "spec", leaf))))
    return specs_of_leaves


def _of_dims(argument: Argument, spec: tuple[Any, ...]) -> tuple[Any, ...]:
    """The entries of a spec per dim; axes on a product go to its major dim."""
    if len(spec) > len(argument.axes):
        raise LayoutError(
            f"layout: {spec} has {counted(len(spec), 'entry', 'entries')} for the "
            f"{counted(len(argument.axes), 'axis', 'axes')} of {argument.name}"
        )
    entries: list[Any] = []
    for n, dims in enumerate(argument.axes):
        entry = spec[n] if n < len(spec) else None
        entries += [entry if m == 0 else None for m in range(len(dims))]
    return tuple(entries)
