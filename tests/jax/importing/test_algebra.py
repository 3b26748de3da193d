"""Linear algebra, grouped products, complex numbers, lookups out of range and narrow draws, as JAX computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp, lax = jax.numpy, jax.lax

import meshlib as mtf  # noqa: E402
from meshlib.core.errors import GraphError  # noqa: E402
from tests.effort import some  # noqa: E402
from tests.jax.importing.checks import compared  # noqa: E402

rng = np.random.default_rng(2)
W = rng.normal(0, 0.5, (3, 4, 4)).astype(np.float32)
X = rng.normal(0, 1, (6, 4)).astype(np.float32)
POSITIVE = np.stack([a @ a.T + np.eye(4, dtype=np.float32) for a in W])
Z = (X + 1j * X[::-1]).astype(np.complex64)
SIZES = np.array([2, 0, 3], np.int32)
OF_EACH = np.array([[3, 2, 1], [0, 4, 1]], np.int32)
AT = np.array([[-1, 7], [12, 3]], np.int32)
gmres = jax.scipy.sparse.linalg.gmres
solve_triangular = jax.scipy.linalg.solve_triangular


def of_batch(x: Any, w: Any, sizes: Any) -> Any:
    """Grouped products, each element of the batch with groups of its own."""
    return jax.vmap(lax.ragged_dot)(jnp.stack([x, x**2]), jnp.stack([w, jnp.sin(w)]), sizes)


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "cholesky": (lambda s: (jnp.linalg.cholesky(s) ** 2 * W).sum(), (POSITIVE,)),
    "cholesky of one": (lambda s: (jnp.linalg.cholesky(s) * W[0]).sum(), (POSITIVE[0],)),
    "cho_solve": (lambda s, x: (jax.scipy.linalg.cho_solve((s, True), x.T) ** 2).sum(), (POSITIVE[0], X)),
    "triangular": (lambda s, x: (solve_triangular(s, x.T, lower=True) ** 2).sum(), (POSITIVE[0], X)),
    "triangular, transposed": (
        lambda s, x: (solve_triangular(s, x.T, trans=1, unit_diagonal=True) ** 2).sum(),
        (POSITIVE[0] / 4, X),
    ),
    "triangular from the right": (
        lambda s, x: (lax.linalg.triangular_solve(s, x, lower=True) ** 2).sum(),
        (POSITIVE[0], X),
    ),
    "solve with pivots": (lambda s, x: (jnp.linalg.solve(s[::-1], x.T) ** 2).sum(), (POSITIVE[0], X)),
    "solve several": (lambda s, x: (jnp.linalg.solve(s, x.T) ** 2).sum(), (POSITIVE, X)),
    "inverse": (lambda s: (jnp.linalg.inv(s) * W[1]).sum(), (POSITIVE[0],)),
    "determinant": (lambda s: jnp.linalg.slogdet(s)[1].sum(), (POSITIVE,)),
    "qr": (lambda x: (jnp.linalg.qr(x)[0] @ W[0] + jnp.linalg.qr(x)[1]).sum() + (x[2:] ** 2).sum(), (X[:4],)),
    "thin qr": (lambda x: (jnp.linalg.qr(x)[0] * X[::-1]).sum(), (X,)),
    "qr of other forms": (
        lambda x: (x.sum(), jnp.linalg.qr(x, mode="complete"), jnp.linalg.qr(jnp.stack([x.T, x.T**2]), mode="r")),
        (X,),
    ),
    "tridiagonal": (
        lambda w, x: (lax.linalg.tridiagonal_solve(w[0, 0], w[0, 1] + 4, w[0, 2], x.T) ** 2).sum(),
        (W * (1 - np.eye(4, dtype=np.float32)), X),
    ),
    "order of pivots": (
        lambda w, x: (x[:, lax.linalg.lu_pivots_to_permutation(lax.linalg.lu(w)[1], 4)[1]] * x).sum(),
        (W, X),
    ),
    "krylov space": (
        lambda w, x: (
            jax.scipy.sparse.linalg.gmres(lambda v: w[0] @ v + 4 * v, x[0], restart=3, maxiter=2)[0] ** 2
        ).sum(),
        (W, X),
    ),
    "bessel": (
        lambda x: (jax.scipy.special.i0e(x * 6) * jnp.sin(x) + jax.scipy.special.i1e(x * 6)).sum(),
        (X,),
    ),
    "polygamma": (lambda x: (x.sum(), jax.scipy.special.polygamma(jnp.array([0, 1, 2, 3]), x * x + 0.5)), (X,)),
    "subtracted rows": (lambda w, x: (x.at[np.array([0, 1, 1])].subtract(w[:, 0] * x[:3]) ** 2).sum(), (W, X)),
    "grouped product": (lambda w, x, n: (lax.ragged_dot(x, w, n) ** 2).sum(), (W, X, SIZES)),
    "gradient of a grouped product": (
        lambda w, n: (jax.vjp(lambda v: lax.ragged_dot(X, v, n), w)[1](jnp.asarray(X))[0] * w).sum(),
        (W, SIZES),
    ),
    "grouped products of a batch": (lambda w, x, n: (of_batch(x, w, n) ** 2).sum(), (W, X, OF_EACH)),
    "their gradients": (
        lambda w, x, n: (jax.grad(lambda v: (of_batch(x, v, n) ** 2).sum())(w) * lax.stop_gradient(w)).sum(),
        (W, X, OF_EACH),
    ),
    "complex by real": (lambda w, x: jnp.abs(x @ lax.complex(w[0], w[1]) @ w[2]).sum(), (W, X)),
    "complex argument": (lambda z, x: (jnp.abs(z * x).sum(), z * 2), (Z, X)),
    "complex functions": (
        lambda z, x: (
            jnp.abs(jnp.sqrt(z) * jnp.sin(z) + lax.rsqrt(z) ** 2 - jnp.cos(z * x)).sum()
            + jnp.abs(jnp.cumprod(z * 0.5, 1) + z ** (0.3 + 0.2j) + z**1.5).sum()
        ),
        (Z, X),
    ),
    "complex recurrence": (  # whose gradients have many sums over the split rows
        lambda v, x: jnp.abs(
            lax.associative_scan(
                lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (jnp.broadcast_to(v[0], x.shape), x + 0j)
            )[1]
        ).sum(),
        (Z, np.concatenate([X, X[:2]])),
    ),
    "wrap and clip": (
        lambda w, x, i: (
            jnp.take(x, i, axis=0, mode="wrap").sum() * 0.1
            + (jnp.take(w, i, axis=0, mode="clip") ** 2).sum()
            + (jnp.take(w, i, axis=1, mode="fill", fill_value=0) ** 3).sum()
            + (jnp.take(x, i, axis=0, mode="fill", fill_value=0.5) ** 2).sum()
        ),
        (W, X, AT),
    ),
}
LAYOUTS = [("m:3", "a:m?"), ("m:2", "b:m;r:m?"), ("m:2;n:2", "c:m;r:n")]


@pytest.mark.parametrize(
    "name",
    some(
        [*CASES],
        ["solve with pivots", "grouped product", "complex functions", "qr", "subtracted rows", "complex recurrence"],
    ),
)
def test_as_jax(name: str) -> None:
    function, args = CASES[name]
    names = {3: "a b c", 2: "r c"}
    parameters = ["s", "w", "z", "x"]
    own = function.__code__.co_varnames[: len(args)]
    given = {p: names[np.ndim(x)] for p, x in zip(own, args, strict=True) if p in parameters and np.shape(x) != (4, 4)}
    has = set(" ".join(given.values()).split())
    layouts = [(m, ";".join(r for r in layout.split(";") if r[0] in has)) for m, layout in LAYOUTS]
    compared(function, *args, names=given, layouts=layouts, gradients=name != "their gradients")  # JAX has no second


def test_draws_of_gamma_and_of_words_have_their_moments() -> None:
    def drawn(x: Any) -> dict[str, Any]:
        key = jax.random.key(0)
        return {
            "half": jax.random.bits(key, (20000,)) >> np.uint32(1),
            "low": jax.random.bits(key, (20000,)) & 7,
            "above_1": jax.random.gamma(key, 2.5, (20000,)),
            "below_1": jax.random.gamma(key, 0.5, (20000,)),
            "beta": jax.random.beta(key, 2.0, 3.0, (20000,)),
            "sum": x.sum(),
        }

    made = mtf.simulate(mtf.lower(mtf.from_jax(drawn, X).outputs)).step()
    moments = {
        "half": (2**30, 2**31 / 12**0.5),
        "low": (3.5, 5.25**0.5),
        "above_1": (2.5, 2.5**0.5),
        "below_1": (0.5, 0.5**0.5),
        "beta": (0.4, 0.2),
    }
    for name, (mean, deviation) in moments.items():
        assert abs(made[name].mean() - mean) < 4 * deviation / 20000**0.5, name
        assert abs(made[name].std() / deviation - 1) < 0.05, name


def test_float16_is_refused_unless_it_may_be_bfloat16() -> None:
    def loss(x: Any) -> Any:
        return (x.astype("float16") @ jnp.float16(0.1 * W[0])).astype("float32").sum()

    with pytest.raises(GraphError, match=r"float16; use bfloat16.*float16='bfloat16'"):
        mtf.from_jax(loss, X)
    with pytest.raises(GraphError, match=r"or left out, got 'float32'"):
        mtf.from_jax(loss, X, float16="float32")
    graph = mtf.from_jax(loss, X, float16="bfloat16")
    made = mtf.simulate(mtf.lower(graph.outputs)).step()["output"]
    assert abs(made - loss(jnp.asarray(X, "float32"))) < 0.1


def test_keys_are_no_results() -> None:
    """As modules of NNX return those that their scans went over."""

    def loss(w: Any, x: Any, key: Any) -> Any:
        y, keys = lax.scan(lambda h, s: (jnp.tanh(h @ s[0]), s[1]), x, (w, jax.random.split(key, 3)))
        return (lax.scan(lambda h, s: (h @ s[0], s[1]), y, (w, keys))[0] ** 2).sum(), keys

    graph = mtf.from_jax(loss, W, X, jax.random.key(0))
    assert [*graph.outputs] == ["output.0"]
    want = loss(W, X, jax.random.key(0))[0]
    made = mtf.simulate(mtf.lower(graph.outputs, precision="highest")).step(x=X)["output.0"]
    np.testing.assert_allclose(made, want, rtol=1e-5)
