"""Primitives that other libraries define: what they compute, the derivatives that they define, and run-time checks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
eqx = pytest.importorskip("equinox")
import equinox.internal as eqxi  # noqa: E402
from jax.extend.core import Primitive  # noqa: E402
from jax.interpreters import ad, mlir  # noqa: E402

import meshlib as mtf  # noqa: E402
from meshlib.core.errors import GraphError, NotFiniteError  # noqa: E402
from meshlib.jax.importing.code import NotImported  # noqa: E402
from tests.effort import some  # noqa: E402
from tests.jax.importing.checks import compared  # noqa: E402

jnp = jax.numpy
X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
NAMES = {"w": "rows cols"}
LAYOUTS = [("m:2", "rows:m"), ("m:3", "cols:m")]


def primitive(name: str, function: Any, jvp: Any = None) -> Any:
    """A primitive of a library's own, as JAX's documentation has it."""
    own = Primitive(name)
    own.def_impl(function)
    own.def_abstract_eval(lambda x, **params: x)
    mlir.register_lowering(own, mlir.lower_fun(function, multiple_results=False))
    if jvp is not None:
        ad.primitive_jvps[own] = jvp
    return own


def test_a_primitive_is_the_function_that_computes_it() -> None:
    scaled = primitive("scaled", lambda x, *, by: jnp.sin(x) * by)
    compared(lambda w: scaled.bind(w, by=3.0).sum(), X, names=NAMES, layouts=LAYOUTS, gradients=False)


def test_a_primitive_has_the_derivative_that_its_library_defines() -> None:
    steep = primitive("steep", lambda x: x * x, lambda xs, ts: (steep.bind(*xs), 5 * ts[0]))
    compared(lambda w: (steep.bind(w) * w).sum(), X, names=NAMES, layouts=LAYOUTS)


def test_a_primitive_of_numpy_is_refused_by_name() -> None:
    host = primitive("of_numpy", lambda x: np.asarray(x) * 2)
    with pytest.raises(NotImported, match=r"of_numpy \(test_library_primitives.py:\d+\): an unknown primitive"):
        mtf.from_jax(lambda w: host.bind(w).sum(), X)


def test_a_check_at_run_time_is_a_nan() -> None:
    """Where Equinox raises, the result is NaN, which is an error of a checked step."""

    def loss(w: Any, limit: Any) -> Any:
        return (eqx.error_if(w, jnp.any(w > limit), "too large") ** 2).sum()

    graph = compared(loss, X, np.float32(9), names=NAMES, layouts=LAYOUTS)
    program = mtf.lower(graph.outputs, mesh="m:2", layout="rows:m")
    with pytest.raises(NotFiniteError, match="first makes a NaN"):
        mtf.simulate(program).step(**graph.feeds(X, np.float32(0)))


@pytest.mark.parametrize("kind", some(["bounded", "checkpointed"], ["bounded"]))
def test_loops_of_equinox(kind: str) -> None:
    def loss(w: Any) -> Any:
        last = eqxi.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, w), max_steps=4, kind=kind)
        return (last[1] ** 2).sum()

    graph = mtf.from_jax(loss, X, names=NAMES, most_trips=12)
    with graph:
        (dw,) = mtf.gradients([graph.loss], [graph.variables["w"].output])
    made = mtf.simulate(mtf.lower({"loss": graph.loss, "dw": dw}, mesh="m:2", layout="rows:m")).step(**graph.feeds(X))
    value, slope = jax.value_and_grad(loss)(X)
    np.testing.assert_allclose(made["loss"], value, rtol=1e-5)
    np.testing.assert_allclose(made["dw"], slope, rtol=1e-4, atol=1e-6)


def test_the_bound_of_a_loop_is_read_through_primitives_of_a_library() -> None:
    def loss(w: Any) -> Any:
        return eqxi.while_loop(lambda c: (c**2).sum() < 50, lambda c: c * 2, w, max_steps=3, kind="lax").sum()

    compared(loss, X, names=NAMES, layouts=LAYOUTS, gradients=False)


def test_what_must_not_be_differentiated_is_imported_and_refuses_gradients() -> None:
    def loss(w: Any) -> Any:
        return (w * jax.lax.stop_gradient(eqxi.nondifferentiable_backward(w * 2, name="this"))).sum()

    compared(loss, X, names=NAMES, layouts=LAYOUTS)
    graph = mtf.from_jax(lambda w: eqxi.nondifferentiable_backward(w * 2, name="this").sum(), X)
    with graph, pytest.raises(GraphError, match=r"this cannot be reverse-mode .* \(test_library_primitives.py:\d+\)"):
        mtf.gradients([graph.loss], [graph.variables["w"].output])


def test_a_rule_is_not_asked_for_gradients_that_cannot_pass() -> None:
    """As Lineax's, whose factors of a matrix are behind `stop_gradient`."""

    def jvp(xs: Any, ts: Any) -> Any:
        assert type(ts[1]) is ad.Zero
        return product.bind(*xs), ts[0] * xs[1]

    product = primitive("product", lambda x, y: x * y, jvp)
    product.def_abstract_eval(lambda x, y: x)
    compared(lambda w: product.bind(w, jnp.exp(jax.lax.stop_gradient(w))).sum(), X, names=NAMES, layouts=LAYOUTS)
