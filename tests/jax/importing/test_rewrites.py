"""Primitives in other words: loops, windows, places, curves, complex numbers; values and gradients equal JAX's."""

from __future__ import annotations

from itertools import product

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

X, Y = weights(4, 6, 8, scale=1.0), weights(4, 6, 8, scale=1.0)
I = tokens(4, 6, below=8)  # noqa: E741
IMAGE = ("NHWC", "HWIO", "NHWC")


def convolved(x, kernel, strides, pads, **of):
    return lax.conv_general_dilated(x, kernel, strides, pads, dimension_numbers=IMAGE, **of)


def rotated(x, y):
    z = lax.complex(x[..., ::2], x[..., 1::2]) * jnp.exp(1j * jnp.outer(jnp.arange(6), 10.0 ** -jnp.arange(4)))
    both = jnp.concatenate([z, z.conj() / (2 + y[..., :4])], -1)
    product = jnp.prod(1 + 0.1 * z, axis=(0, 2))[:, None]
    return jnp.stack([both.real, both.imag], -1).sum(-1) + jnp.abs(both) + product.real * product.imag


def recurrent(x, y):
    """A linear recurrence with a complex state, by scan and by associative scan."""
    decay = jnp.exp(-jnp.exp(y[0, 0]) + 1j * y[0, 1])
    xs = (x * (1 + 0.5j)).swapaxes(0, 1)
    _, slow = lax.scan(lambda h, v: (h * decay + v, h * decay + v), jnp.zeros((4, 8), jnp.complex64), xs)
    _, fast = lax.associative_scan(
        lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (jnp.broadcast_to(decay, xs.shape), xs)
    )
    return (slow.real + fast.imag).swapaxes(0, 1)


# Each takes x and y [4, 6, 8] and indices [4, 6] below 8.
FUNCTIONS = {
    "convolutions": lambda x, y, i: (
        convolved(x[..., None], y[:3, :3, None, :4], (1, 2), "SAME").sum((2, 3))
        + convolved(x[:, :, None], y[:3, :1, :1, None].repeat(8, 3), (1, 1), "SAME", feature_group_count=8).sum((2, 3))
    ),
    "convolutions with gaps": lambda x, y, i: (
        convolved(x[..., None], y[:2, :3, None, :4], (1, 1), [(1, 0), (2, -1)], rhs_dilation=(1, 2)).sum((2, 3))
        + convolved(x[:, :, None], y[:3, :1, :4, None] * y[0, 0, :4], (1, 1), [(1, 1), (0, 1)], lhs_dilation=(2, 1),
                    feature_group_count=2).sum((2, 3))[:, :6]
    ),
    "convolutions of groups of the batch": lambda x, y, i: convolved(
        x[..., None], y[:2, :3, None, :4], (2, 1), [(1, 0), (0, 2)], batch_group_count=2
    ).sum((2, 3)),
    "pools": lambda x, y, i: (
        lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 2), (1, 2, 1), "SAME").sum((1, 2))
        + lax.reduce_window(y, 0.0, lax.add, (1, 2, 2), (1, 2, 2), "VALID").sum((1, 2)) ** 2
        + lax.reduce_window(y, jnp.inf, lax.min, (1, 3, 1), (1, 1, 1), "SAME").sum((1, 2))
    ),
    "running extremes": lambda x, y, i: lax.cummax(x, 1) + lax.cummin(y, 2, reverse=True) ** 2,
    "scattered": lambda x, y, i: (
        jnp.zeros((8, 6, 2)).at[i, i % 6].add(x[..., :2]).sum((0, 1))[0]
        + x.at[i[:, 0] // 2, 2:4].set(y[:, :2])
        + y.at[:, i[0]].set(x, mode="drop")
    ),
    "scattered together": lambda x, y, i: (
        x.at[1, 2, 3].set(5.0).at[:, ::2].multiply(2.0)
        + y.at[:, jnp.array([1, 1, 4])].max(x[:, :3])
        + jax.ops.segment_min(x.reshape(24, 8), i.reshape(24), 8)[:6]
    ),
    "cut at places": lambda x, y, i: (
        lax.dynamic_update_slice(x, y[:, :2, :3], (0, i[0, 0], i[0, 1]))
        + jax.vmap(lambda row, at: lax.dynamic_slice(row, (at // 2, at), (3, 2)))(y, i[:, 0]).sum()
        + jax.vmap(lambda row, part, at: lax.dynamic_update_slice(row, part, (at // 2, at)))(x, y[:, 1:3, 2:4], i[:, 1])
    ),
    "curves": lambda x, y, i: (
        jnp.arctan(x) + jnp.arctan2(y, x) + jnp.arcsin(jnp.tanh(x)) + jnp.arccos(jnp.tanh(y)) + jnp.arcsinh(x)
        + jnp.arccosh(1.1 + jnp.abs(y)) + jnp.arctanh(jnp.tanh(y)) + lax.erf_inv(jnp.tanh(x))
        + lax.lgamma(1.5 + jnp.abs(x)) + 0.1 * lax.lgamma(0.3 - jnp.abs(y)) + lax.digamma(0.6 + jnp.abs(y))
        + lax.erf(jnp.array([0.5])) + jnp.sinc(x) + jnp.logaddexp(x, y)
    ),
    "complex numbers": lambda x, y, i: rotated(x, y),
    "complex states": lambda x, y, i: recurrent(x, y),
    "Fourier transforms": lambda x, y, i: (
        jnp.real(jnp.fft.fft2(x, norm="ortho")) * jnp.imag(jnp.fft.ifftn(x + 1j * y)) + jnp.abs(jnp.fft.rfft2(y)).sum()
        + jnp.fft.irfft(jnp.fft.rfft(x) * jnp.fft.rfft(y)) + jnp.fft.irfftn(jnp.fft.rfftn(y) * (1 + 2j), y.shape)
    ),
    "words": lambda x, y, i: (
        ((i & 3) + (i << 2) + (i >> 1) + lax.shift_right_logical(i - 4, 30) + (i.astype(jnp.uint32) * 3).astype(int))
        * x[..., 0]
        + jnp.searchsorted(jnp.linspace(-1.0, 1.0, 7), y[..., 0])
        + jnp.interp(x[..., 1], jnp.linspace(-2.0, 2.0, 5), jnp.linspace(0.0, 1.0, 5) ** 2)
        + x[..., 0] * (x[..., :0] @ y[0, 0, :0])  # a sum of nothing
    ),
    "several checkpoints in a loop": lambda x, y, i: lax.scan(
        lambda c, v: (jax.checkpoint(jnp.sin)(c * v) + jnp.tanh(c) + jax.checkpoint(jnp.cos)(c + v), None), x[0], y
    )[0],
}  # fmt: skip
SAMPLE = ("convolutions", "scattered", "complex numbers", "Fourier transforms", "words")


@pytest.mark.parametrize("name", some([*FUNCTIONS], SAMPLE))
def test_values_and_gradients(name):
    def loss(x, y, i):
        made = FUNCTIONS[name](x, y, i)
        return jnp.mean(made * jnp.arange(1, made.size + 1).reshape(made.shape) / made.size), made

    layouts = some([("device:1", ""), ("data:2;t:2", "batch:data;time:t")], [("data:2;t:2", "batch:data;time:t")])
    compared(loss, X, Y, I, names={"x": "batch time features"}, layouts=layouts, loss_close=2e-5)


POOLS = {  # windows, strides, padding
    "sliding": ((3, 3), (2, 1), "SAME"),
    "tiled": ((2, 2), (2, 2), "VALID"),
    "tiled along one": ((2, 3), (2, 1), "SAME"),
    "with a rest": ((3, 2), (3, 3), "VALID"),
}


def pooled(x, windows, strides, padding, reduction="max"):
    join, start = (lax.max, -jnp.inf) if reduction == "max" else (lax.min, jnp.inf)
    return lax.reduce_window(x, start, join, (1, *windows, 1), (1, *strides, 1), padding)


def weighed(y):
    return (y * jnp.arange(1, y.size + 1).reshape(y.shape)).sum()


def test_gradients_of_equal_maxima_go_to_the_first_as_in_jax():
    """Integers, so that most windows have several maxima; ours, split over rows or columns, and imported ones."""
    dims = [mtf.Dimension(n, s) for n, s in zip("nhwc", (2, 8, 12, 3), strict=True)]
    image = np.random.default_rng(1).integers(0, 3, [d.size for d in dims]).astype("float32")
    for reduction, (windows, strides, padding) in product(("max", "min"), POOLS.values()):
        of = (windows, strides, padding, reduction)
        with mtf.Graph():
            x = mtf.variable("x", dims)
            y = mtf.pool(x, {"w": windows[1], "h": windows[0]}, reduction, {"h": strides[0], "w": strides[1]},
                         padding=padding)  # fmt: skip
            weights = mtf.constant(np.arange(1, y.shape.size + 1, dtype="float32").reshape(y.shape.sizes), y.shape)
            (dx,) = mtf.gradients([mtf.reduce_sum(y * weights)], [x])
        wanted = jax.jit(jax.grad(lambda x, of=of: weighed(pooled(x, *of))))(image)
        for layout in [f"{d.name}:a" for d in y.shape.dims[:3] if d.size % 2 == 0]:
            for executor in ("exact", "fast"):
                simulation = mtf.simulate(mtf.lower({"dx": dx}, mesh="a:2", layout=layout), executor=executor)
                simulation.state["x"] = image
                np.testing.assert_array_equal(simulation.step()["dx"], wanted)
    compared(lambda x: [sum(weighed(pooled(x, *of)) for of in POOLS.values())], image, names={"x": "n h w c"}, close=0)


# ---------------------------------------------------------------- loops


def until(limit, change, start=0):
    """A loop with a counter."""
    return lambda x, w: lax.while_loop(
        lambda c: (c[0] < limit) & change[1](c[1]), lambda c: (c[0] + 1, change[0](c[1], w)), (start, x)
    )


LOOPS = {
    "counted": until(3, (lambda x, w: jnp.tanh(x @ w), lambda x: True)),
    "not once": until(0, (lambda x, w: jnp.tanh(x @ w), lambda x: True)),
    "ended early": until(9, (lambda x, w: x * 0.5, lambda x: jnp.max(jnp.abs(x)) > 0.2)),
    "downwards, by a number of another loop": lambda x, w: lax.while_loop(
        lambda c: c[0] > c[1],
        lambda c: (c[0] - lax.fori_loop(0, c[2], lambda n, s: s + 1, 0), c[1], c[2], jnp.sin(c[3]) @ w + c[0]),
        (jnp.int32(7), 0, 2, x),
    )[3],
    "inside": lambda x, w: lax.scan(
        lambda c, v: (v + lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, s[1] @ w), (0, c))[1], None), x,
        x[None],
    )[0],
}  # fmt: skip


def test_loops_whose_end_is_known():
    def all_of_them(w, x):
        return [jnp.mean(leaf) for loop in LOOPS.values() for leaf in jax.tree.leaves(loop(x, w))]

    names = {"x": "batch features"}
    graph = compared(
        all_of_them, weights(8, 8), weights(4, 8), names=names, layouts=[("d:2", "batch:d")], gradients=False
    )
    lengths = [op.loop.dim.size for op in graph.operations if op.loop is not None]
    assert lengths[:2] == [3, 9]


def step_of(x, w):
    return jnp.tanh(x @ w) + 1


BOUNDED = {  # trips that depend on data, of which a number is known that they do not exceed
    "minimum": (3, lambda x, w, n: lax.fori_loop(0, jnp.minimum(n, 3), lambda i, c: step_of(c, w), x)),
    "clip": (4, lambda x, w, n: lax.fori_loop(jnp.clip(n, 1, 9), 5, lambda i, c: step_of(c, w), x)),
    "largest": (7, lambda x, w, n: lax.fori_loop(0, jnp.argmax(x[0]), lambda i, c: step_of(c, w), x)),
    "remainder, by two": (5, lambda x, w, n: lax.while_loop(
        lambda c: c[0] < n % 5, lambda c: (c[0] + 2, step_of(c[1], w)), (0, x))[1]),
    "downwards": (6, lambda x, w, n: lax.while_loop(
        lambda c: c[0] > 0, lambda c: (c[0] - 1, step_of(c[1], w)), (jnp.minimum(n, 6), x))[1]),
    "rows of their own": (5, lambda x, w, n: jax.vmap(
        lambda row, m: lax.fori_loop(0, jnp.minimum(m, 5), lambda i, c: step_of(c, w), row))(x, n - jnp.arange(4))),
    "rows that are known": (4, lambda x, w, n: jax.vmap(
        lambda row, m: lax.fori_loop(0, m, lambda i, c: step_of(c, w), row))(x, jnp.array([4, 1, 0, 2]))),
}  # fmt: skip


def test_loops_whose_end_has_a_bound():
    def all_of_them(w, x, n):
        return [jnp.mean(loop(x, w, n) * x) for _, loop in BOUNDED.values()]

    args = weights(8, 8), weights(4, 8), np.int32(2)
    graph = compared(all_of_them, *args, names={"x": "batch d"}, layouts=[("d:2", "batch:d")], gradients=False)
    lengths = [op.loop.dim.size for op in graph.operations if op.loop is not None]
    assert sorted(lengths) == sorted(n for n, _ in BOUNDED.values())


def test_a_loop_whose_end_depends_on_data_is_named():
    def loss(w, x):
        return jnp.sum(lax.while_loop(lambda v: v.sum() < 3, lambda v: v * w, x))

    with pytest.raises(
        NotImported, match=r"while \(test_rewrites.py:\d+\): a loop whose number of trips depends on data"
    ):
        mtf.from_jax(loss, np.ones(4, "float32"), np.ones(4, "float32"))


def test_order_by_several_keys_known_results_and_the_axis_of_a_map():
    x, y = np.round(X[:, :, 0]), np.round(Y[:, :, 1] * 2)

    def loss(w, x, y):
        centred = jax.vmap(lambda row: row - jax.lax.pmean(row, "rows") + jax.lax.pmax(row, "rows"), axis_name="rows")
        return [(w * centred(x)).sum(), *lax.sort((x, y, x * y), num_keys=2), jnp.lexsort((y, x)), jnp.ones((2, 3))]

    graph = mtf.from_jax(loss, np.float32(1), x, y, names={"x": "batch time"})
    found = mtf.simulate(mtf.lower(graph.outputs, mesh="d:2", layout="batch:d;time:d?")).step(x=x, y=y)
    for have, want in zip(found.values(), loss(np.float32(1), x, y), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5)


def test_a_loop_that_data_ends_is_bounded_by_whoever_imports_it():
    """Newton's square root, each element until it is there."""

    def root(x):
        return lax.while_loop(lambda y: jnp.max(jnp.abs(y * y - x)) > 1e-5, lambda y: 0.5 * (y + x / y), x)

    x = np.linspace(1.0, 9.0, 6, dtype=np.float32)
    for trips, reached in ((2, False), (40, True)):
        graph = mtf.from_jax(lambda w, x: w * root(x), np.float32(1), x, most_trips=trips)
        (found,) = mtf.simulate(mtf.lower(graph.outputs)).step(x=x).values()
        assert np.allclose(found, np.sqrt(x), rtol=1e-6) is reached
    with pytest.raises(NotImported, match=r"from_jax\(\.\.\., most_trips=100\)"):
        mtf.from_jax(lambda w, x: w * root(x), np.float32(1), x)
    with pytest.raises(mtf.GraphError, match="most_trips must be at least 1, got 0"):
        mtf.from_jax(lambda w, x: w * root(x), np.float32(1), x, most_trips=0)
    with pytest.raises(mtf.GraphError, match="most_trips must be an integer"):
        mtf.from_jax(lambda w, x: w * root(x), np.float32(1), x, most_trips=2.5)  # type: ignore[arg-type]


# ---------------------------------------------------------------- Fourier transforms


@pytest.mark.parametrize("n", some([1, 2, 7, 8, 255, 257, 263, 768, 1000, 1024, 2310], [1, 2, 7, 257, 1000, 1024]))
def test_transforms_of_any_length_against_numpy(n):
    """One product, or rounds of smaller ones; forth and back, of real and complex numbers."""
    rng = np.random.default_rng(n)
    x, y = (rng.normal(size=(3, n)).astype(np.float32) for _ in range(2))
    half = rng.normal(size=(2, 3, n // 2 + 1)).astype(np.float32)

    def all_of_them(w, x, y, a, b):
        forth, back, real = jnp.fft.fft(w * x + 1j * y), jnp.fft.ifft(x + 1j * y), jnp.fft.rfft(x)
        again = jnp.fft.irfft(a + 1j * b, n)
        return forth.real, forth.imag, back.real, back.imag, real.real, real.imag, again

    fed = {"x": x, "y": y, "a": half[0], "b": half[1]}
    graph = mtf.from_jax(all_of_them, np.float32(1), *fed.values())
    program = mtf.lower(graph.outputs)
    found = mtf.simulate(program).step(graph.feeds(np.float32(1), *fed.values()))
    forth, back, real = np.fft.fft(x + 1j * y), np.fft.ifft(x + 1j * y), np.fft.rfft(x)
    again = np.fft.irfft(half[0] + 1j * half[1], n)
    wanted = (forth.real, forth.imag, back.real, back.imag, real.real, real.imag, again)
    for have, want in zip(found.values(), wanted, strict=True):
        np.testing.assert_allclose(np.reshape(have, want.shape), want, atol=2e-6 * max(1.0, np.abs(want).max()))
    if n == 1024:  # 32 x 32: two rounds with 32 terms in place of one with 1,024, in 14 products at most, six passes
        assert program.work.mxu_flops <= 14 * 6 * 2 * 3 * n * (32 + 32)


# ---------------------------------------------------------------- what can't be, and what is drawn


def test_complex_numbers_that_have_no_words_are_named():
    def loss(w, x):
        return jnp.sum(jnp.tanh(w + 1j * x).real) + jnp.sum(jnp.arcsinh(1j * x).real)

    with pytest.raises(NotImported) as caught:
        mtf.from_jax(loss, np.ones(4, "float32"), np.ones(4, "float32"))
    assert "complex tanh (test_rewrites.py:" in str(caught.value)
    assert "complex asinh (test_rewrites.py:" in str(caught.value)


def test_more_draws():
    def draw(w, key):
        a, b, c, d = jax.random.split(key, 4)
        return (
            jax.random.randint(a, (4096,), -3, 5),
            jax.random.truncated_normal(b, -1.0, 2.0, (4096,)),
            jax.random.permutation(c, 64),
            jax.random.uniform(d, (4096, 2), minval=jnp.array([0.0, 10.0]), maxval=20.0) * w,
            jax.random.bits(a, (4096,), "uint8"),
            jax.random.bits(key, (4096,)).astype("float32"),
            jax.random.normal(d, (4096,), "complex64"),
        )

    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        graph = mtf.from_jax(draw, np.ones(2, "float32"), key)
        assert not graph.inputs
        whole, normal, order, uniform, few, words, *parts = mtf.simulate(mtf.lower(graph.outputs)).step().values()
        assert np.bincount(whole + 3).min() > 4096 / 8 * 0.8
        assert (whole.min(), whole.max()) == (-3, 4)
        assert -1 <= normal.min() < -0.95
        assert 1.8 < normal.max() <= 2
        assert normal.mean() == pytest.approx(0.2296, abs=0.03)  # (phi(-1) - phi(2)) / (Phi(2) - Phi(-1))
        assert sorted(order) == list(range(64)) != list(order)
        assert uniform.min(0) == pytest.approx([0, 10], abs=0.1)
        assert uniform.max(0) == pytest.approx([20, 20], abs=0.1)
        assert (few.min(), few.max()) == (0, 255)
        assert np.std(parts, axis=1) == pytest.approx([0.5**0.5] * 2, rel=0.05)
        assert (words.min(), words.mean(), words.max()) == pytest.approx((0, 2**31, 2**32), abs=2**27)


def test_rows_of_a_convolution_that_get_another_name():
    """What a dense layer reads is named by its weights: rows of the image and of the result are two dims then."""

    def loss(p, x):
        h = convolved(x, p["kernel"], (2, 2), "SAME")
        return jnp.sum(jnp.tanh(h.reshape(4, -1) @ p["dense"]) ** 2)

    params = {"kernel": weights(3, 3, 4, 8), "dense": weights(4 * 4 * 8, 10)}
    names = {"x": "batch h w c", "p.dense": "(rows columns made) out"}
    layouts = [("p:2", "h:p"), ("p:2;q:2", "h:p;rows:q"), ("p:4", "h:p;rows:p")]
    compared(loss, params, weights(4, 8, 8, 4), names=names, layouts=layouts)


@pytest.mark.parametrize(("window", "layout"), [(1, "h:p;columns:q"), (3, "h:p;rows:q"), (3, "w:p;window_0:q")])
def test_such_a_convolution_and_its_gradients_on_devices(window, layout):
    """Each device's rows begin elsewhere, and so do its taps where the window is split."""

    def loss(p, x):
        h = convolved(x, p["kernel"], (2, 2), "SAME")
        return jnp.sum(jnp.tanh(h.reshape(4, -1) @ p["dense"]) ** 2)

    params = {"kernel": weights(window, window, 4, 8), "dense": weights(4 * 4 * 8, 10)}
    x = weights(4, 8, 8, 4)
    names = {"x": "batch h w c", "p.dense": "(rows columns made) out", "p.kernel": "window_0 window_1 c made"}
    graph = mtf.from_jax(loss, params, x, names=names)
    outputs = dict(graph.outputs)
    with graph:
        kernel, dense = (graph.variables[f"p/{n}"].output for n in params)
        outputs["kernel"], outputs["dense"] = mtf.gradients([graph.loss], [kernel, dense])
    mesh = f"p:2;q:{window if 'window' in layout else 2}"
    program = mtf.lower(outputs, mesh=mesh, layout=layout, precision="highest")
    feeds = graph.feeds(params, x)
    want, have = mtf.simulate(program).step(**feeds), mtf.on_jax(program).step(**feeds)
    for name in outputs:
        np.testing.assert_allclose(have[name], want[name], rtol=1e-4, atol=1e-4, err_msg=name)


ROLLS = {  # of [batch, time, features], time over four devices; and the rows that a device sends on the way forward
    "one on": (lambda x: jnp.roll(x, 1, 1), 1),
    "one back": (lambda x: jnp.roll(x, -1, 1), 1),
    "two axes": (lambda x: jnp.roll(x, (2, 3), (0, 1)), 3),
    "parts in order": (lambda x: jnp.concatenate([x[:, 5:9], x[:, 9:], x[:, :5]], 1), 4),
    "in a loop": (
        lambda x: lax.scan(lambda c, _: (jnp.tanh(jnp.roll(c, 2, 1) - jnp.roll(c, -1, 1)), None), x, None, 3)[0],
        3 * (2 + 1),
    ),
}


@pytest.mark.parametrize("name", some([*ROLLS], ["two axes", "parts in order", "in a loop"]))
def test_a_rotation_sends_what_passes_the_ends_of_blocks(name):
    """As many rows as it moves by, however often blocks are crossed; and back as many of the gradient."""
    roll, rows = ROLLS[name]
    x, scale = weights(2, 16, 3, scale=1.0), weights(16, scale=1.0)

    def loss(scale, x):
        return jnp.sum(roll(x * scale[:, None]) ** 2 * jnp.arange(16)[:, None])

    names, mesh, layout = {"x": "batch time features", "scale": "time"}, "m:4", "time:m"
    graph = compared(loss, scale, x, names=names, layouts=[(mesh, layout)], loss_close=2e-5)
    with graph:
        updates = mtf.optimize.SgdOptimizer(0.1).minimize(graph.loss)
    sent = mtf.lower(None, updates, mesh, layout).sent_bytes
    assert sent == 2 * rows * x.shape[0] * x.shape[2] * 4


@pytest.mark.parametrize("name", some([n for n in ROLLS if n != "parts in order"], ["two axes", "in a loop"]))
def test_the_gradient_of_a_rotation_as_jax_writes_it_is_one(name):
    """It cuts the gradient in two, pads both pieces with zeros and adds them up; as much is sent as forward."""
    roll, rows = ROLLS[name]
    x = weights(2, 16, 3, scale=1.0)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(roll(x) ** 2 * jnp.arange(16)[:, None])))
    graph = mtf.from_jax(gradient, x, names={"x": "batch time features"}, argnums=())
    program = mtf.lower(graph.outputs, mesh="m:4", layout="time:m")
    assert program.sent_bytes == 2 * rows * x.shape[0] * x.shape[2] * 4
    (made,) = mtf.simulate(program).step(**graph.feeds(x)).values()
    np.testing.assert_allclose(made, gradient(x), rtol=2e-2, atol=1e-5)


def test_draws_with_equal_keys_are_equal():
    def draw(w, key):
        normal = jax.random.normal
        halves = [normal(jax.random.split(key)[0], (4,)) for _ in range(2)]
        _, rows = lax.scan(lambda c, x: (c, x + normal(key, (4,))), 0.0, jnp.zeros((3, 4)))  # such as locked dropout
        _, others = lax.scan(
            lambda c, k: (c, normal(k, (4,)) + w), 0.0, jax.random.split(jax.random.fold_in(key, 7), 3)
        )
        return halves[0] - halves[1], rows - rows[:1], rows[0] - normal(key, (4,)), others

    graph = mtf.from_jax(draw, np.float32(0), jax.random.key(0))
    *zeros, others = mtf.simulate(mtf.lower(graph.outputs)).step().values()
    assert not any(np.abs(x).max() for x in zeros)
    assert len(np.unique(others)) == 12


def test_a_gradient_within_the_function_reads_the_mask_of_its_forward():
    def loss(w, x, key):
        for n in range(2):
            layer = jax.checkpoint(lambda x, w, k: jax.random.bernoulli(k, 0.5, x.shape) * jnp.tanh(x @ w))
            x = layer(x, w[n], jax.random.fold_in(key, n))
        return (x**2).sum()

    w, x, key = weights(2, 8, 8), weights(4, 8), jax.random.key(0)
    inside = mtf.from_jax(jax.grad(loss), w, x, key)
    outside = mtf.from_jax(loss, w, x, key)
    with outside:
        (slope,) = mtf.gradients([outside.loss], [v.output for v in outside.variables.values()])
    (want,) = mtf.simulate(mtf.lower([slope])).step(outside.feeds(w, x, key)).values()
    (have,) = mtf.simulate(mtf.lower(inside.outputs)).step(inside.feeds(w, x, key)).values()
    np.testing.assert_allclose(have, want, atol=1e-6)


def carried_keys(f, key, length=3):
    def trip(key, _):
        key, own = jax.random.split(key)
        return key, f(own)

    return lax.scan(trip, key, None, length=length)[1]


BODIES = {
    "checkpoint": lambda f, k: jax.checkpoint(f)(k),
    "slices": lambda f, k: lax.map(f, jax.random.split(k, 3)),
    "counter": lambda f, k: lax.map(lambda n: f(jax.random.fold_in(k, n)), jnp.arange(3)),
    "carry": carried_keys,
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_draws_with_equal_keys_in_two_bodies_are_equal(body):
    def draw(w, key):
        first = body(lambda k: w + jax.random.normal(k, (4,)), key)
        return first, first - body(lambda k: jax.random.normal(k, (4,)), key)

    graph = mtf.from_jax(draw, np.float32(0), jax.random.key(0))
    program = mtf.lower(graph.outputs)
    numbers, difference = mtf.simulate(program, executor="exact").step().values()
    assert len(np.unique(numbers)) == numbers.size
    assert not np.abs(difference).max()
    on_jax = mtf.on_jax(program).step()
    np.testing.assert_allclose(on_jax["output.0"], numbers, rtol=1e-6)
    assert not np.abs(on_jax["output.1"]).max()


def test_equal_keys_in_loops_of_different_lengths_are_refused():
    def draw(w, key):
        return w + sum(carried_keys(lambda k: jax.random.normal(k, (4,)), key, length).sum() for length in (3, 4))

    with pytest.raises(NotImported, match=r"normal \(test_rewrites.py:\d+\): a draw with a key that a loop"):
        mtf.from_jax(draw, np.float32(0), jax.random.key(0))


@jax.custom_vjp
def dropped(x, key):
    return x * jax.random.bernoulli(key, 0.5, x.shape)


dropped.defvjp(
    lambda x, key: (dropped(x, key), key), lambda key, dy: (dy * jax.random.bernoulli(key, 0.5, dy.shape), None)
)


def test_a_rule_that_draws_again_reads_the_mask_of_its_forward():
    graph = mtf.from_jax(lambda x, key: (dropped(x, key).sum(), dropped(x, key)), weights(4, 8), jax.random.key(0))
    with graph:
        (slope,) = mtf.gradients([graph.loss], [v.output for v in graph.variables.values()])
    simulation = mtf.simulate(mtf.lower(graph.outputs | {"slope": slope}))
    result = simulation.step()
    np.testing.assert_allclose(result["slope"] * simulation.state["x"], result["output.1"], rtol=1e-6)
    assert 0 < (result["slope"] == 0).sum() < 32


@pytest.mark.parametrize(
    "count",
    [
        lambda n: jnp.minimum(n, 3) - jnp.uint8(1),  # 255 for 0
        lambda n: n.astype(jnp.int32) % jnp.minimum(n, 5).astype(jnp.int32),  # n itself for 0
        lambda n: (jnp.minimum(n, 3).astype(jnp.int32) * 0 + 300).astype(jnp.uint8) + n,
    ],
    ids=["below_zero", "division_by_zero", "cast"],
)
def test_intervals_hold_what_wraps(count):
    from meshlib.jax.importing.intervals import results_within

    low, high = results_within(jax.make_jaxpr(count)(jnp.uint8(0)), [(0.0, 255.0)])[0]
    counts = jax.jit(jax.vmap(count))(jnp.arange(256, dtype=jnp.uint8))
    assert low <= int(counts.min()) <= int(counts.max()) <= high


def test_signs_of_zeros_and_infinities() -> None:
    x = np.array([-0.0, 0.0, -2, 3, np.inf, -np.inf], np.float32)
    y = np.array([1, -1, -0.0, 0.0, -3, 2], np.float32)
    compared(lambda x, y: (jnp.copysign(x, y)[:4].sum(), jnp.copysign(x, y), jnp.signbit(x) * 1), x, y)


@pytest.mark.parametrize("join", ["max", "min"])
def test_derivatives_of_pools_that_the_function_takes_itself(join):
    """Of training steps and of products with tangents, whose primitives select the elements of windows."""

    def pooled(w, x):
        begin = -np.inf if join == "max" else np.inf
        y = lax.reduce_window(x * w, begin, getattr(lax, join), (1, 3, 2), (1, 2, 1), "SAME")
        return (y**3).sum()

    def loss(w, x):
        w = w - 0.1 * jax.grad(pooled)(w, x)
        return pooled(w, x) + jax.jvp(pooled, (w, x), (w * 2, x[::-1]))[1]

    x = np.random.default_rng(4).normal(size=(2, 6, 4)).astype(np.float32)
    compared(loss, x[0] + 2, x, names={"x": "batch rows cols"}, layouts=[("m:2;n:2", "batch:m;cols:n")])
