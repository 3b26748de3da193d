"""A JAX function and what was imported of it, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import meshlib as mtf
from meshlib.jax.importing.leaves import is_array, leaves_of


def compared(
    fn: Callable[..., Any],
    *args: Any,
    names: Mapping[str, Any] | None = None,
    layouts: Sequence[tuple[str, str]] = (("device:1", ""),),
    gradients: bool = True,
    loss_close: float = 1e-5,
    close: float = 1e-4,
) -> mtf.Graph:
    """Assert that outputs, and gradients of the first, equal JAX's under each mesh and layout; returns the graph."""
    import jax

    graph = mtf.from_jax(fn, *args, names=names)
    arrays, rest = _parted(args)
    floats = [jax.numpy.issubdtype(x.dtype, jax.numpy.inexact) for x in arrays]

    def of(moving: list[Any]) -> tuple[Any, Any]:
        given = iter(moving)
        result = fn(*_joined([next(given) if f else x for x, f in zip(arrays, floats, strict=True)], rest))
        return first(result), result

    moving = [x for x, f in zip(arrays, floats, strict=True) if f]
    function = jax.value_and_grad(of, has_aux=True) if gradients else lambda xs: (of(xs), ())
    # Little is computed, so that optimising the code would take longest.
    compiled = jax.jit(function).lower(moving).compile(compiler_options={"xla_backend_optimization_level": 0})
    (_, result), slope = compiled(moving)
    wanted = [np.asarray(x) for _, x in leaves_of(["output"], [result])]
    outputs = dict(graph.outputs)
    variables = [op for op in graph.variables.values() if op.attrs["trainable"]] if gradients else []
    slopes: dict[str, Any] = {}
    if variables:
        with graph:
            made = mtf.gradients([graph.loss], [v.output for v in variables])
        outputs |= {f"gradient of {v.name}": dy for v, dy in zip(variables, made, strict=True) if dy is not None}
        sloped = iter(slope)
        placed = _joined([next(sloped) if f else x for x, f in zip(arrays, floats, strict=True)], rest)
        # The gradient of a complex number is its conjugate in JAX.
        slopes = {
            n: np.asarray(x) * (-1 if n.endswith("/imag") else 1)
            for n, x in leaves_of(graph._parameters, placed)
            if n in graph.variables
        }
    steepest = max((float(np.abs(x).max(initial=0)) for x in slopes.values()), default=0.0)
    for mesh, layout in layouts:
        program = mtf.lower(outputs, mesh=mesh, layout=layout, precision="highest")
        found = mtf.simulate(program).step(**graph.feeds(*args))
        for name, want in zip(graph.outputs, wanted, strict=True):
            (have,) = graph.to_jax({name: found[name]}).values()
            scale = max(1e-3, float(np.abs(want[np.isfinite(want)]).max(initial=0)))
            np.testing.assert_allclose(have, want, rtol=loss_close, atol=loss_close * scale, err_msg=f"{name} {layout}")
        for v in variables:
            want = slopes[v.name]
            have = found.get(f"gradient of {v.name}")
            if have is None:
                assert not np.abs(want).max(initial=0), v.name
                continue
            (have,) = graph.to_jax({v.name: have}).values()
            scale = max(1e-3 * steepest, float(np.abs(want).max(initial=0)))
            np.testing.assert_allclose(have, want, rtol=close, atol=close * scale, err_msg=f"{v.name} {layout}")
    return graph


def first(result: Any) -> Any:
    """The first array of a result."""
    import jax

    return jax.tree_util.tree_leaves(result)[0]


def _parted(args: Any) -> tuple[list[Any], tuple[Any, list[Any]]]:
    """The arrays among arguments, and the rest."""
    import jax

    leaves, tree = jax.tree_util.tree_flatten(args)
    return [x for x in leaves if is_array(x)], (tree, [None if is_array(x) else (x,) for x in leaves])


def _joined(arrays: Sequence[Any], rest: tuple[Any, list[Any]]) -> Any:
    import jax

    tree, others = rest
    given = iter(arrays)
    return jax.tree_util.tree_unflatten(tree, [next(given) if x is None else x[0] for x in others])
