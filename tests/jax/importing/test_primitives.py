"""Rows of the table of primitives: values and gradients equal JAX's; what has no row is named, all at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshlib as mtf
from meshlib.jax.importing.code import NotImported
from tests.effort import some
from tests.jax.importing.checks import compared
from tests.jax.importing.models import tokens, weights

S = jax.ShapeDtypeStruct
X, Y = weights(4, 6, 8, scale=1.0), weights(4, 6, 8, scale=1.0)
I = tokens(4, 6, below=8)  # noqa: E741

# Each takes x and y [4, 6, 8] and indices [4, 6] below 8.
TABLE = np.arange(64, dtype="float32").reshape(4, 2, 8) % 7
FUNCTIONS = {
    "reshapes that reorder": lambda x, y, i: (
        lax.reshape(x, (4, 48), (2, 0, 1)).sum(-1)
        + jax.vmap(lambda a, b: lax.conv(a[:, None], b[:, None, :3], (1,), [(2, 0)]), (2, 2), 3)(x, y).sum((0, 1, 2))[
            :4
        ]
    ),
    "curves": lambda x, y, i: (
        jnp.log1p(jnp.abs(x))
        + jnp.expm1(x)
        + lax.rsqrt(x * x + 1)
        + jnp.cbrt(x)
        + jnp.exp2(y)
        + jax.lax.erf(x)
        + jnp.sinh(x) * jnp.cosh(y)
        + jnp.tan(y * 0.1)
        + x**3
        + x**-2
        + jnp.square(y)
        + jnp.abs(x) ** y
    ),
    "activations": lambda x, y, i: (
        jax.nn.relu(x)
        + jax.nn.gelu(x)
        + jax.nn.gelu(y, approximate=False)
        + jax.nn.silu(x)
        + jax.nn.softplus(y)
        + jax.nn.elu(x)
        + jax.nn.leaky_relu(y)
        + jax.nn.hard_tanh(x)
        + jax.nn.relu6(y)
        + jax.nn.log_sigmoid(x)
    ),
    "integers": lambda x, y, i: ((i // 3) * 2 + i % 3 - (-i) // 2 + jnp.sign(i - 3) + abs(i - 4)) * x[..., 0],
    "rounding": lambda x, y, i: jnp.round(x * 3) + jnp.floor(y) + jnp.ceil(x) + jnp.fmod(x, 0.7) + y % 0.6 + x // 1,
    "logic": lambda x, y, i: jnp.where((x > 0) & ~(y < 0) | jnp.isnan(x) ^ jnp.isfinite(y), x, y) + jnp.clip(x, -1, 1),
    "selection": lambda x, y, i: lax.select_n(i % 3, x[..., 0], x[..., 1], y[..., 2]) + jnp.nan_to_num(x[..., 3]),
    "reductions": lambda x, y, i: (
        x.max(-1)
        + y.min(-1)
        + x.std(-1)
        + jnp.prod(jnp.abs(y) + 0.5, -1)
        + jnp.linalg.norm(x, axis=-1)
        + jnp.any(x > 1, -1)
        + jnp.all(y < 3, -1)
        + jax.nn.logsumexp(x, -1)
        + jnp.mean(y, (0, 2))
    ),
    "order": lambda x, y, i: (
        jnp.sort(x, -1) * jnp.arange(8)
        + jnp.take_along_axis(y, jnp.argsort(x, -1), -1)
        + lax.top_k(x, 3)[0].sum(-1)[..., None]
        + (jnp.argmax(x, -1) + jnp.argmin(y, 1).sum(-1)[:, None] + lax.top_k(x, 2)[1].sum(-1))[..., None]
    ),
    "running": lambda x, y, i: (
        jnp.cumsum(x, 1) + jnp.cumprod(y, 2) + lax.cumlogsumexp(x, 2) + lax.cumsum(y, 1, reverse=True)
    ),
    "shapes": lambda x, y, i: (
        x.reshape(4, 3, 2, 8).transpose(1, 0, 3, 2).reshape(3, 4, 16).sum(0)
        + jnp.tile(y, (1, 1, 2)).sum(1)
        + jnp.repeat(x, 2, -1)[:, 0]
        + jnp.squeeze(jnp.expand_dims(x, 1), 1).reshape(4, -1)[:, :16]
    ),
    "no common factors": lambda x, y, i: x.reshape(3, 64).cumsum(0).reshape(4, 6, 8) * y,
    "windows": lambda x, y, i: (
        jnp.concatenate([x[:, 1:], y[:, :1]], 1)
        + jnp.roll(x, 2, -1)
        + jnp.flip(y, (1, 2))
        + jnp.pad(x[:, ::2, :], ((0, 0), (2, 1), (0, 0)))
        + jnp.stack([x, y], 1).mean(1)
        + sum(jnp.split(y, 2, -1)[0][..., :1] for _ in range(2))
        + x[:, -1:]
    ),
    "updates": lambda x, y, i: (
        x.at[:, 2].set(0.5)
        + lax.dynamic_update_slice_in_dim(y, x[:, :2], 3, 1)
        + lax.dynamic_update_slice(y, jnp.full((4, 2, 3), 0.5), (0, i[0, 0], 7))
        + lax.dynamic_update_slice_in_dim(x, TABLE, i[0, 1], 2)
        + lax.dynamic_slice_in_dim(x, i[0, 0], 1, 1)
        + jnp.zeros((4, 6, 8)).at[jnp.arange(4), :, 1].add(x[..., 0])
    ),
    "lookups": lambda x, y, i: (
        jnp.take_along_axis(x, i[..., None], -1)[..., 0]
        + y[jnp.arange(4)[:, None], jnp.arange(6)[None], i]
        + x[0, 0][i]
        + jnp.take(y[0], jnp.minimum(i, 5), axis=0).sum(-1)
        + jax.nn.one_hot(i, 8).sum(-1)
        + x[..., 0][:, jnp.array([5, 0, 1, 2, 3, 4])]
    ),
    "several indices": lambda x, y, i: (
        x[:, jnp.array([5, 0, 1, 2, 3, 4]), 0] + y[i // 2, i % 6, i] + x[i[0] // 2, :, i[1]].T[:4]
    ),
    "sums by index": lambda x, y, i: (
        jax.ops.segment_sum(x.reshape(24, 8), i.reshape(24), 8) + jnp.zeros((8, 8)).at[i].add(y).T
    ),
    "products": lambda x, y, i: (
        jnp.einsum("abc,adc->abd", x, y) @ jnp.einsum("abc,dbc->abd", x, y)[..., :1]
        + x @ jnp.ones((8, 1))
        + jnp.outer(x[0, 0], y[0, 0]).sum()
        + jnp.matmul(x, x.swapaxes(1, 2)).sum((1, 2), keepdims=True)
        + jnp.tensordot(x, y, 3)
    ),
    "scans": lambda x, y, i: lax.scan(
        lambda c, v: (jnp.tanh(c + v[0]), c * v[1]), x[:, 0], (x.swapaxes(0, 1), y.swapaxes(0, 1)), reverse=True
    )[1],
    "scan without slices": lambda x, y, i: lax.fori_loop(0, 3, lambda n, c: jnp.sin(c) + n * y, x),
    "scan of one trip": lambda x, y, i: lax.scan(lambda c, v: (c + v, c * 2), x[0], y[:1])[1],
    "associative scan": lambda x, y, i: (
        lax.associative_scan(jnp.add, x, axis=1) + lax.associative_scan(jnp.multiply, y, axis=2)
    ),
    "branches": lambda x, y, i: (
        lax.cond(x[0, 0, 0] > 0, lambda a: a + 1, lambda a: a * 2, x)
        + lax.switch(i[0, 0] % 3, [jnp.sin, jnp.cos, jnp.tanh], y)
        + lax.platform_dependent(x, tpu=lambda a: a * a, default=lambda a: a * 3)  # of where the function is traced
        + lax.platform_dependent(y, tpu=jnp.sin, cpu=jnp.cos, cuda=jnp.cos, default=jnp.tanh)
    ),
    "checkpoints": lambda x, y, i: (
        jax.checkpoint(lambda a: jnp.sin(a @ a.swapaxes(1, 2)) @ a, policy=jax.checkpoint_policies.dots_saveable)(x)
        + jax.checkpoint(jnp.tanh)(y)
    ),
    "derivatives that JAX has rules for": lambda x, y, i: (
        jax.nn.relu(x)
        + jax.nn.relu6(y)
        + jnp.logaddexp(x, y)
        + jnp.sinc(x)
        + jax.scipy.special.xlogy(x * x, y * y + 1)
        + jax.nn.softmax(x) * jax.scipy.special.logsumexp(y, axis=-1, keepdims=True)
        + jax.jit(lambda a: a * 2)(y)
    ),
    "maps": lambda x, y, i: (
        jax.vmap(jax.vmap(lambda a, b: a[b], (0, 0)), (0, 0))(x, i) + lax.map(lambda a: a.sum(-1), y)
    ),
    "diagonals": lambda x, y, i: (
        jnp.trace(x @ y.swapaxes(1, 2), axis1=1, axis2=2)
        + jnp.tril(x @ x.swapaxes(1, 2)).sum((1, 2))
        + jnp.eye(4).sum(0)
    ),
}


# Compiling what they are compared with takes longest.
SAMPLE = (
    "activations", "logic", "reductions", "order", "running", "shapes", "windows", "updates", "lookups",
    "reshapes that reorder", "several indices", "sums by index", "scans", "branches", "checkpoints",
    "no common factors",
)  # fmt: skip


@pytest.mark.parametrize("name", some([*FUNCTIONS], SAMPLE))
def test_values_and_gradients(name):
    def loss(x, y, i):
        made = FUNCTIONS[name](x, y, i)
        return jnp.mean(made * jnp.arange(1, made.size + 1).reshape(made.shape) / made.size), made

    layouts = some([("device:1", ""), ("data:2", "batch:data")], [("data:2", "batch:data")])
    compared(loss, X, Y, I, names={"x": "batch time features"}, layouts=layouts)


# ---------------------------------------------------------------- random numbers


# Kinks and ties, where each function has a gradient by JAX's own rule.
AT_KINKS = {
    "maximum": (lambda x: jnp.maximum(x, 0), [0, 1]),
    "minimum": (lambda x: jnp.minimum(x, x[::-1]), [2, 2]),
    "clip": (lambda x: jnp.clip(x, 0, 1), [0, 1, 0.5]),
    "clamp": (lambda x: lax.clamp(0.0, x, 1.0), [0, 1, 0.5]),
    "abs": (jnp.abs, [0, -1]),
    "softplus": (jax.nn.softplus, [0, 1]),
    "log_sigmoid": (jax.nn.log_sigmoid, [0, 1]),
    "logaddexp": (lambda x: jnp.logaddexp(x, x[::-1]), [2, 2]),
    "relu6": (jax.nn.relu6, [0, 6]),
    "celu": (jax.nn.celu, [0, 1]),
    "hard_sigmoid": (jax.nn.hard_sigmoid, [-3, 3]),
    "xlogy": (lambda x: jax.scipy.special.xlogy(x, x + 2), [0, 1]),
    "cummax": (lambda x: lax.cummax(x), [1, 2, 2, 0]),
    "fmod": (lambda x: jnp.fmod(x, 3.0), [0, -2, 2]),
    "power": (lambda x: x**1.0 + x**2.0, [0, 1]),
    "hinge": (lambda x: jnp.maximum(0, 1 - x), [1, 2]),
}
# Arguments at which a formula by other functions would lose all digits.
FAR_AND_NEAR = {
    "log1p": (jnp.log1p, 1e-8),
    "expm1": (jnp.expm1, 1e-8),
    "sinh": (jnp.sinh, 1e-6),
    "erfc": (jax.scipy.special.erfc, 6.0),
    "log_ndtr": (jax.scipy.special.log_ndtr, -8.0),
    "acosh": (jnp.arccosh, 1.0001),
}


@pytest.mark.parametrize("table", [AT_KINKS, FAR_AND_NEAR], ids=["kinks", "far and near"])
def test_values_and_gradients_at(table):
    params = {name: np.asarray(x, np.float32) for name, (_, x) in table.items()}
    values = jax.jit(lambda: {name: table[name][0](x) for name, x in params.items()})()
    sizes = {name: float(np.abs(value).max()) or 1.0 for name, value in values.items()}

    def each(params):
        results = {name: jnp.sum(table[name][0](x)) / sizes[name] for name, x in params.items()}
        return [sum(results.values()), results]

    compared(each, params, loss_close=1e-5)


def test_draws_are_the_librarys():
    def drop(x, key):
        a, b = jax.random.split(key)
        kept = jax.random.bernoulli(a, 0.75, x.shape)
        return (
            jnp.where(kept, x / 0.75, 0),
            jax.random.normal(b, x.shape),
            jax.random.uniform(key, x.shape, minval=2.0, maxval=3.0),
        )

    graph = mtf.from_jax(drop, np.ones((64, 64), "float32"), jax.random.key(0))
    assert not graph.inputs
    made = [*mtf.simulate(mtf.lower(graph.outputs)).step().values()]
    assert {*np.unique(made[0]).tolist()} == {0.0, np.float32(1 / 0.75)}
    assert made[0].mean() == pytest.approx(1.0, abs=0.05)
    assert (made[1].mean(), made[1].std()) == (pytest.approx(0.0, abs=0.05), pytest.approx(1.0, abs=0.05))
    assert made[2].min() >= 2.0
    raw = mtf.from_jax(drop, np.ones((64, 64), "float32"), jax.random.PRNGKey(0))
    assert not raw.inputs


# ---------------------------------------------------------------- faults


def test_all_that_is_missing_is_named_at_once_with_its_lines():
    def loss(w, x):
        y = jnp.tanh(1j * x).real
        z = lax.while_loop(lambda v: v.sum() < 3, lambda v: v * 2, x)
        return (jnp.linalg.eigh(w)[1] @ y).sum() + z.sum() + jnp.sum(w.astype(jnp.float16))

    with pytest.raises(NotImported) as caught:
        mtf.from_jax(loss, S((4, 4), "float32"), S((4, 4), "float32"))
    text = str(caught.value)
    first = loss.__code__.co_firstlineno
    for what, line in (("complex tanh", 1), ("while", 2), ("eigh", 3), ("convert_element_type", 3)):
        assert f"{what} (test_primitives.py:{first + line})" in text
    assert "float16; use bfloat16 or float32" in text


def test_what_is_not_needed_need_not_be_known():
    def loss(w, x):
        jnp.tanh(1j * x)
        return (w * x).sum()

    mtf.from_jax(loss, S((4,), "float32"), S((4,), "float32"))


@pytest.mark.parametrize("empty", [np.ones((0, 8), "float32"), S((0, 8), "float32")])
def test_arguments_without_elements_are_no_inputs(empty):
    def loss(params, x):
        rows = jnp.concatenate([params["prompt"], params["w"] * x])
        return rows.sum() + params["prompt"].sum() + params["prompt"].sum(0) @ jnp.ones(8)

    w, x = np.ones((3, 8), "float32"), np.full((3, 8), 2.0, "float32")
    graph = mtf.from_jax(loss, {"prompt": empty, "w": w}, x)
    assert (list(graph.variables), graph.unused) == (["params/w"], ("params/prompt",))
    assert mtf.simulate(mtf.lower(graph.outputs)).step(graph.feeds({"prompt": empty, "w": w}, x))["output"] == 48
    with pytest.raises(NotImported, match=r"result output, \[0, 8\]: of no elements"):
        mtf.from_jax(lambda x: x * 2, empty)


def test_reasons_point_to_the_lines_of_the_function():
    def loss(w, x):
        h = jnp.tanh(x @ w["a"])
        return jnp.mean(h @ w["b"])

    graph = mtf.from_jax(loss, {"a": S((4, 8), "float32"), "b": S((8, 2), "float32")}, S((4, 4), "float32"))
    program = mtf.lower(graph.outputs, mesh="model:2", layout="a_1:model")
    (found,) = program.collectives
    assert found.source == f"test_primitives.py:{loss.__code__.co_firstlineno + 2}"


@pytest.mark.skipif(not hasattr(lax, "polynomial"), reason="this JAX writes them as several primitives")
@pytest.mark.parametrize(
    "function",
    [
        lambda x: lax.polynomial(x, [1.0, 2.0, 3.0]),
        lambda x: jax.jvp(jnp.tanh, (x,), (x,))[1],
        lambda x: lax.mul(x.astype(jnp.bfloat16), x.astype(jnp.bfloat16), out_dtype=jnp.float32),
        lambda x: jnp.searchsorted(jnp.linspace(-1.0, 1.0, 9), x) * x,
    ],
    ids=["polynomial", "one_minus_square", "wide_product", "high_level"],
)
def test_primitives_of_newer_versions(function):
    compared(lambda x: function(x).sum(), np.linspace(-1.3, 1.2, 8, dtype=np.float32).reshape(2, 4), names={"x": "a b"})
