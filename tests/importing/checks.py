"""A JAX function and what was imported of it, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import meshlib as mtf


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
    wanted = [np.asarray(x) for x in jax.tree_util.tree_leaves(fn(*args))]
    outputs = dict(graph.outputs)
    variables = [op for op in graph.variables.values() if op.attrs["trainable"]] if gradients else []
    if variables:
        with graph:
            made = mtf.gradients([graph.loss], [v.output for v in variables])
        outputs |= {f"gradient of {v.name}": dy for v, dy in zip(variables, made, strict=True) if dy is not None}
        slopes = by_path(jax.grad(lambda *a: first(fn(*a)), allow_int=True)(*args), graph, args)
    for mesh, layout in layouts:
        program = mtf.lower(outputs, mesh=mesh, layout=layout, precision="highest")
        found = mtf.simulate(program).step(**graph.feeds(*args))
        for name, want in zip(graph.outputs, wanted, strict=True):
            (have,) = graph.to_jax({name: found[name]}).values()
            scale = max(1e-3, float(np.abs(want[np.isfinite(want)]).max(initial=0)))
            np.testing.assert_allclose(have, want, rtol=loss_close, atol=loss_close * scale, err_msg=f"{name} {layout}")
        steepest = max((float(np.abs(x).max(initial=0)) for x in slopes.values()), default=0.0) if variables else 0.0
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


def by_path(tree: Any, graph: Any, args: Sequence[Any]) -> dict[str, Any]:
    """Gradients for the first argument by the names of variables."""
    from meshlib.jax.importing.leaves import leaves_of

    return {name: np.asarray(x) for name, x in leaves_of(graph._parameters[:1], [tree])}
