"""`shard_map` as a global function: blocks become an array axis, over which the body is mapped.

A mesh axis becomes a leading array axis, the major part of each axis that it splits; collectives of the body become
reductions, permutations and broadcasts along this named `vmap` axis. A layout may split it over the same mesh axis, or
over any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from meshlib.jax.importing.code import CodeStep
from meshlib.jax.importing.passing import split_by
from meshlib.jax.importing.rewrites.ragged import batched_ragged_dot
from meshlib.jax.importing.rewrites.table import Function, rewrite
from meshlib.jax.importing.table import rule, same_axes

Axes = tuple[str, ...]
_NO_MESH = jax.sharding.AbstractMesh((), ())


# Mesh axes that split each axis of an array, in the form of a constraint.
SPLIT = core.Primitive("mesh_split")
SPLIT.def_abstract_eval(lambda x, spec: x)
rule(SPLIT.name, axes=same_axes, write=lambda w, step: split_by(w, step, step.params["spec"]), by_element=True)


def mapped_axes(params: Mapping[str, Any]) -> dict[str, int]:
    """The mesh axes over which the body of a `shard_map` is manual, with their sizes."""
    mesh = params["mesh"]
    return {a: int(mesh.shape[a]) for a in mesh.axis_names if a in params["newly_manual_axes"]}


def _axes_of(spec: Any, rank: int) -> list[Axes]:
    """The mesh axes that split each axis of an array."""
    entries = [(e,) if isinstance(e, str) else tuple(e or ()) for e in tuple(spec)]
    return entries + [()] * (rank - len(entries))


def _mapped(step: CodeStep) -> Function:
    p = step.params
    body, sizes = p["jaxpr"], mapped_axes(p)
    manual = [*sizes]

    def run(*operands: Any) -> list[Any]:
        ins = [_axes_of(spec, x.ndim) for spec, x in zip(p["in_specs"], operands, strict=True)]
        outs = [_axes_of(spec, v.aval.ndim) for spec, v in zip(p["out_specs"], body.outvars, strict=True)]
        blocks = [_cut(x, axes, sizes) for x, axes in zip(operands, ins, strict=True)]
        function: Callable[..., Any] = _in_blocks(body, _Over(tuple(sizes.items()), bool(p["check_vma"])))
        for axis in reversed(manual):
            where = tuple(0 if axis in [a for e in axes for a in e] else None for axes in ins)
            function = jax.vmap(function, where, 0, axis_name=axis, axis_size=sizes[axis])
        with jax.sharding.use_abstract_mesh(_NO_MESH):  # blocks are not split over axes of the mesh around them
            local_results = function(*blocks)
        return [
            _joined(y, axes, manual, sizes, bool(p["check_vma"])) for y, axes in zip(local_results, outs, strict=True)
        ]

    return run


def _cut(x: Any, axes: Sequence[Axes], sizes: Mapping[str, int]) -> Any:
    """Move an array's blocks to leading axes, in mesh order."""
    shape: list[int] = []
    places: dict[str, int] = {}
    for n, names in zip(x.shape, axes, strict=True):
        for a in names:
            places[a] = len(shape)
            shape.append(sizes[a])
        shape.append(n // prod(sizes[a] for a in names))
    front = [a for a in sizes if a in places]
    if not front:
        return x
    x = x.reshape(shape)
    entries = [next((a for a, at in places.items() if at == n), None) for n in range(len(shape))]
    x = SPLIT.bind(x, spec=tuple(entries))
    return jnp.moveaxis(x, [places[a] for a in front], range(len(front)))


def _joined(y: Any, axes: Sequence[Axes], manual: Sequence[str], sizes: Mapping[str, int], one: bool) -> Any:
    """Assemble an array from all blocks' results; along axes without a split, blocks are equal.

    `one`: JAX has checked that they are. Otherwise each gets an equal share of the cotangent, as in a mean.
    """
    used = [a for e in axes for a in e]
    if one or not jnp.issubdtype(y.dtype, jnp.floating):
        y = y[tuple(slice(None) if a in used else 0 for a in manual)]
    else:
        y = y.mean(tuple(n for n, a in enumerate(manual) if a not in used))
    front = [a for a in manual if a in used]
    order: list[int] = []
    shape: list[int] = []
    for n, names in enumerate(axes):
        order += [front.index(a) for a in names] + [len(front) + n]
        shape.append(y.shape[len(front) + n] * prod(sizes[a] for a in names))
    return jnp.transpose(y, order).reshape(shape)


# ---------------------------------------------------------------- the body, without annotations of varying axes


@dataclass(frozen=True)
class _Over:
    """The axes over which a body is mapped, with sizes; whether JAX has checked which values vary along them."""

    sizes: tuple[tuple[str, int], ...]
    checked: bool


def _in_blocks(jaxpr: Any, over: _Over) -> Callable[..., list[Any]]:
    """The body as a function of one block each, with axes known by name."""
    inner, consts = getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())

    def run(*operands: Any) -> list[Any]:
        values: dict[Any, Any] = dict(zip(inner.invars, operands, strict=True))
        values.update((v, _plain(x, v.aval)) for v, x in zip(inner.constvars, consts, strict=True))

        def read(atom: Any) -> Any:
            return _plain(atom.val, atom.aval) if hasattr(atom, "val") else values[atom]

        for eqn in inner.eqns:
            outs = _bound(eqn, [read(v) for v in eqn.invars], over)
            values.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in inner.outvars]

    return run


def _plain(value: Any, aval: Any) -> Any:
    """A constant without the mesh annotation of the body."""
    return value if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) else np.asarray(value, aval.dtype)


_SAME = ("pvary", "pcast", "sharding_constraint", "reshard", "mesh_cast")


def _params_without(params: Mapping[str, Any], over: _Over) -> dict[str, Any]:
    """The parameters of an equation, without references to the mesh of the body."""
    outside = dict(params)
    for key, value in params.items():
        if key in ("sharding", "out_sharding"):
            outside[key] = None
        elif isinstance(value, tuple) and value and all(isinstance(part, core.ClosedJaxpr) for part in value):
            outside[key] = tuple(_without(part, over) for part in value)
        elif isinstance(value, core.ClosedJaxpr | core.Jaxpr):
            outside[key] = _without(value, over)
    return outside


def _bound(eqn: Any, operands: Sequence[Any], over: _Over) -> Sequence[Any]:
    name, params = eqn.primitive.name, dict(eqn.params)
    if name in _SAME:
        return operands
    if name == "psum_invariant":
        return [lax.psum(x, params["axes"]) for x in operands]
    if name in ("all_gather_invariant", "all_gather_reduced"):
        (x,) = operands
        return [lax.all_gather(x, params["axis_name"], axis=params["all_gather_dimension"], tiled=params["tiled"])]
    if name == "ragged_dot_general":
        return [batched_ragged_dot(params, eqn.primitive)(*operands)]
    if name == "ppermute":
        return [_permuted(x, params["axis_name"], params["perm"], dict(over.sizes)) for x in operands]
    params = _params_without(params, over)
    shapes = [jax.typeof(x) for x in operands]
    # An equation's context would refer to the mesh of the body.
    plain = jax.make_jaxpr(lambda *xs: ([*xs], lax.neg(0.0)), axis_env=list(over.sizes))(
        *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in shapes)
    )
    outs = [core.Var(v.aval.update(vma=frozenset()) if hasattr(v.aval, "vma") else v.aval) for v in eqn.outvars]
    call = eqn.replace(invars=plain.jaxpr.invars, outvars=outs, params=params, ctx=plain.jaxpr.eqns[0].ctx)
    alone = core.ClosedJaxpr(plain.jaxpr.replace(eqns=[call], outvars=outs), ())
    function: Callable[..., Sequence[Any]] = core.jaxpr_as_fun(alone)
    if name.startswith("custom_vjp") and not over.checked:
        return _ruled(function, over)(*(_varying(x, over) for x in operands))
    return function(*operands)


def _ruled(function: Callable[..., Sequence[Any]], over: _Over) -> Callable[..., Sequence[Any]]:
    """A call with a derivative rule and one cotangent per block of its results.

    Without it, a sum over blocks would be one value whose rule receives the sum of the cotangents.
    """

    def primal(*operands: Any) -> Sequence[Any]:
        return [_varying(y, over) for y in function(*operands)]

    def forward(*operands: Any) -> tuple[Sequence[Any], Any]:
        results, pull = jax.vjp(function, *operands)
        return [_varying(y, over) for y in results], pull

    call: Any = jax.custom_vjp(primal)
    call.defvjp(forward, lambda pull, cotangents: pull(cotangents))
    ruled: Callable[..., Sequence[Any]] = call
    return ruled


def _varying(x: Any, over: _Over) -> Any:
    """The value, marked as varying over blocks."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    for axis, _ in over.sizes:
        x = x + (0 * lax.axis_index(axis)).astype(x.dtype)
    return x


def _without(held: Any, over: _Over) -> Any:
    """A nested jaxpr (loop or branch) under the same conversion."""
    inner = getattr(held, "jaxpr", held)
    specs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in inner.invars]
    jaxpr = jax.make_jaxpr(_in_blocks(held, over), axis_env=list(over.sizes))(*specs)
    return jaxpr if isinstance(held, core.ClosedJaxpr) else jaxpr.jaxpr


def _permuted(x: Any, axis: Any, perm: Sequence[tuple[int, int]], sizes: Mapping[str, int]) -> Any:
    """The values that each block receives in a permute; zeros if it has no source."""
    names = (axis,) if isinstance(axis, str) else tuple(axis)
    count = prod(sizes[a] for a in names)
    if len(perm) == count:
        return lax.ppermute(x, names, perm)
    senders, receivers = {a for a, _ in perm}, {b for _, b in perm}
    rest = zip(
        [n for n in range(count) if n not in senders], [n for n in range(count) if n not in receivers], strict=True
    )
    moved = lax.ppermute(x, names, [*perm, *rest])
    there = jnp.isin(lax.axis_index(names), jnp.asarray(sorted(receivers)))
    return jnp.where(there, moved, jnp.zeros_like(moved))


rewrite("shard_map", _mapped, own_lines=True)
