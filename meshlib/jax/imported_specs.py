"""PartitionSpecs for the arrays of an imported function, whose axes may be products of the program's dims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from layouts import Shape, Sharding
from meshlib.core.graph import Tensor
from meshlib.jax.importing.imported import Call, ImportedGraph
from meshlib.jax.importing.leaves import COMPLEX, words
from meshlib.program.instructions import Value
from meshlib.program.records import Program

Origin: TypeAlias = tuple[str, int, int]  # as of `_result_of`


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
    outputs, _ = program.asked

    def of(name: str, v: Value) -> ArraySpec:
        axes = _axes_of(graph, outputs[name] if v is program.outputs.get(name) else v.tensor)
        return array_spec([Shape([d]) for d in v.tensor.shape] if axes is None else axes, v.sharding)

    parts = {"variables": program.variables, "inputs": program.inputs, "outputs": program.outputs}
    return {kind: {name: of(name, v) for name, v in named.items()} for kind, named in parts.items()}


def _axes_of(graph: ImportedGraph, t: Tensor) -> Sequence[Shape] | None:
    """The dims of each axis of the user's array behind a tensor; None if there is no such array."""
    variable = graph.gradient_of.get(t, t.operation)
    argument = graph.arguments.get(variable.attrs.get("slot_of") or variable.name)
    if argument is not None:  # slots may lack axes of their variable
        axes = [axis for axis in argument.axes if all(d in t.shape for d in axis)]
        return axes if [d for axis in axes for d in axis] == [*t.shape] else None
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
    outputs, updates = program.asked
    call = graph.call
    origins = {name: _result_of(graph, t) for name, t in outputs.items()}
    wanted = {name: origin for name, origin in origins.items() if origin is not None}
    if call is None or updates or len(wanted) < len(origins):
        return None
    results = jax.tree_util.tree_leaves(jax.eval_shape(call.function, *call.shapes))
    sloped = sorted({n for kind, n, _ in wanted.values() if kind == "gradient"})
    if len(_parts(results)) != len(graph.outputs) or (sloped and (results[0].shape or results[0].dtype.kind != "f")):
        return None  # random keys are among the results, or the gradient is that of another result
    given = specs["variables"] | specs["inputs"]  # type: ignore[operator]

    ins = [NamedSharding(mesh, _of_leaf(given, name)) for name in call.names]
    outs = {name: NamedSharding(mesh, specs["outputs"][name]) for name in wanted}
    return jax.jit(_step_of(call, wanted, sloped), in_shardings=ins, out_shardings=outs).lower(*call.shapes).compile()


def _step_of(call: Call, wanted: Mapping[str, Origin], sloped: Sequence[int]) -> Callable[..., dict[str, Any]]:
    """The function of the arrays that computes what is wanted; `sloped`: the arguments whose gradients are."""

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
        parts = _parts(results)
        # the gradient of a complex number is its conjugate in JAX
        slopes_of = {n: _parts([jnp.conj(dx)]) for n, dx in zip(sloped, slopes, strict=True)}
        return {name: parts[n] if kind == "result" else slopes_of[n][part] for name, (kind, n, part) in wanted.items()}

    return step


def _parts(arrays: Sequence[Any]) -> list[Any]:
    """Arrays with complex ones as two, as they are among a graph's outputs; without random keys."""
    real = [x for x in arrays if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    return [part for x in real for part in ((x.real, x.imag) if jnp.issubdtype(x.dtype, jnp.complexfloating) else (x,))]


def _result_of(graph: ImportedGraph, t: Tensor) -> Origin | None:
    """("result", n, 0) for the n-th output, ("gradient", n, part) for the n-th argument's gradient; None for others."""
    for n, y in enumerate(graph.outputs.values()):
        if y is t:
            return "result", n, 0
    variable = graph.gradient_of.get(t)
    if graph.call is None or variable is None:
        return None
    for part, suffix in enumerate(COMPLEX):
        if (name := variable.name.removesuffix(suffix)) in graph.call.names:
            return "gradient", graph.call.names.index(name), part if name != variable.name else 0
    return None
