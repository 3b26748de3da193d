"""PartitionSpecs for the arrays of an imported function, whose axes may be products of the program's dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from layouts import Shape, Sharding
from meshlib.core.graph import Tensor
from meshlib.jax.importing.imported import ImportedGraph
from meshlib.jax.importing.leaves import COMPLEX, words
from meshlib.program.instructions import Commit, Value
from meshlib.program.records import Program


@dataclass(frozen=True)
class ArraySpec:
    """The PartitionSpec of one of the user's arrays, and the split dims that it cannot express."""

    spec: PartitionSpec
    unsaid: tuple[str, ...] = ()


def graph_of(program: Program) -> ImportedGraph | None:
    """The imported graph that a program was lowered from, if any."""
    named: Sequence[Value] = (*program.variables.values(), *program.inputs.values(), *program.outputs.values())
    graph = next((v.tensor.graph for v in named), None)
    return graph if isinstance(graph, ImportedGraph) else None


def array_spec(axes: Sequence[Shape], sharding: Sharding) -> ArraySpec:
    """The spec of an array whose axes are products of dims.

    An axis is cut into contiguous blocks: mesh axes of a minor dim can be expressed only where all
    dims before it are split down to single elements.

    >>> sharding = Sharding("heads:4;head_dim:8;out:6", "x:4;y:2", [("x",), ("y",), ()])
    >>> tuple(array_spec([Shape("heads:4;head_dim:8"), Shape("out:6")], sharding).spec)
    (('x', 'y'),)
    """
    entries: list[Any] = []
    unsaid: list[str] = []
    for dims in axes:
        names: list[str] = []
        may_go_on = True
        for d in dims:
            split = sharding.axes[sharding.shape.names.index(d.name)]
            if split and not may_go_on:
                unsaid.append(d.name)
            elif split:
                names += split
            may_go_on = may_go_on and sharding.mesh.group_size(split) == d.size
        entries.append(names[0] if len(names) == 1 else tuple(names) or None)
    while entries and entries[-1] is None:
        entries.pop()
    return ArraySpec(PartitionSpec(*entries), tuple(unsaid))


def specs_of(graph: ImportedGraph, program: Program) -> dict[str, dict[str, ArraySpec]]:
    """Specs of a program's variables, inputs and outputs, in terms of the user's arrays."""

    def of(name: str, v: Value) -> ArraySpec:
        axes = _axes_of(graph, v.tensor)
        return array_spec([Shape([d]) for d in v.tensor.shape] if axes is None else axes, v.sharding)

    parts = {"variables": program.variables, "inputs": program.inputs, "outputs": program.outputs}
    return {kind: {name: of(name, v) for name, v in named.items()} for kind, named in parts.items()}


def _axes_of(graph: ImportedGraph, t: Tensor) -> Sequence[Shape] | None:
    """The dims of each axis of the user's array behind a tensor; None if there is no such array."""
    variable = t.operation if t.operation.name in graph.arguments else graph.gradient_of.get(t)
    if variable is not None and variable.name in graph.arguments:
        return graph.arguments[variable.name].axes
    return next((graph.result_axes[name] for name, y in graph.outputs.items() if y is t), None)


def argument_shardings(
    graph: ImportedGraph, specs: Mapping[str, PartitionSpec], mesh: jax.sharding.Mesh, args: Sequence[Any]
) -> tuple[Any, ...]:
    """A tree of shardings for each argument of the function, in the structure of that argument."""
    shardings = []
    for name, arg in zip(graph._names(len(args)), args, strict=True):
        flat, tree = jax.tree_util.tree_flatten_with_path(arg)
        leaf_specs = [_of_leaf(specs, "/".join((name, *words(path)))) for path, _ in flat]
        shardings.append(jax.tree_util.tree_unflatten(tree, [NamedSharding(mesh, spec) for spec in leaf_specs]))
    return tuple(shardings)


def _of_leaf(specs: Mapping[str, PartitionSpec], name: str) -> PartitionSpec:
    return next((specs[n] for n in (name, *(name + part for part in COMPLEX)) if n in specs), PartitionSpec())


def compiled(
    graph: ImportedGraph, program: Program, specs: Mapping[str, Mapping[str, PartitionSpec]], mesh: jax.sharding.Mesh
) -> Any | None:
    """The user's function (with its gradient if the program needs it), compiled under `jit` with these specs.

    None if the program does more: it updates variables, or has operations added after the import.
    """
    if graph.call is None or any(isinstance(i, Commit) for i in program.instructions):
        return None
    wanted = {name: _result_of(graph, v.tensor) for name, v in program.outputs.items()}
    if None in wanted.values():
        return None
    call = graph.call
    if len(jax.tree_util.tree_leaves(jax.eval_shape(call.function, *call.shapes))) != len(graph.outputs):
        return None  # keys and complex numbers are results in another form
    sloped = sorted({n for kind, n in wanted.values() if kind == "gradient"})
    given = specs["variables"] | specs["inputs"]  # type: ignore[operator]

    def step(*arrays: Any) -> dict[str, Any]:
        def first(*moving: Any) -> tuple[Any, Any]:
            whole = list(arrays)
            for n, x in zip(sloped, moving, strict=True):
                whole[n] = x
            results = jax.tree_util.tree_leaves(call.function(*whole))
            return results[0], results

        moving = [arrays[n] for n in sloped]
        slopes: Sequence[Any] = ()
        if sloped:
            (_, results), slopes = jax.value_and_grad(first, tuple(range(len(sloped))), has_aux=True)(*moving)
        else:
            results = first()[1]
        by_number = dict(zip(sloped, slopes, strict=True))
        return {name: results[n] if kind == "result" else by_number[n] for name, (kind, n) in wanted.items()}

    ins = [NamedSharding(mesh, _of_leaf(given, name)) for name in call.names]
    outs = {name: NamedSharding(mesh, specs["outputs"][name]) for name in wanted}
    return jax.jit(step, in_shardings=ins, out_shardings=outs).lower(*call.shapes).compile()


def _result_of(graph: ImportedGraph, t: Tensor) -> Any:
    """("result", n) for the function's n-th result, ("gradient", n) for that of its n-th argument; None for others."""
    assert graph.call is not None
    for n, y in enumerate(graph.outputs.values()):
        if y is t:
            return "result", n
    variable = graph.gradient_of.get(t)
    return None if variable is None else ("gradient", graph.call.names.index(variable.name))
