"""Products in eight bits: values and gradients against NumPy in float64, layouts, dtypes, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import ml_dtypes
import numpy as np
import pytest

import meshlib as mtf
from meshlib.estimation.work.products import matmul_of

D = mtf.Dimension
B, T, K, H, N = D("batch", 4), D("length", 8), D("k", 16), D("heads", 4), D("n", 8)
Array = np.ndarray
TO_GRID: dict[str, tuple[float, Callable[[Array], Array]]] = {
    "int8": (127.0, np.rint),
    "fp8": (448.0, lambda x: x.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)),
}
LAYOUTS = (
    ("p:2", "batch:p"),
    ("p:2", "k:p"),
    ("p:4", "k:p"),
    ("p:2;q:2", "k:p+q"),
    ("p:2;q:2", "batch:p;k:q"),
    ("p:2;q:2", "n:p;heads:q"),
    ("p:2;q:2;r:2", "length:p;k:q;n:r"),
    ("p:2;q:2;r:2", "batch:p;heads:q;k:r"),
    ("p:8", "length:p"),
)


def rounded(x: Array, axes: tuple[int, ...], dtype: str) -> Array:
    """`x` as the grid holds it: each row along `axes` in units of its largest magnitude over the grid's largest."""
    largest, to_grid = TO_GRID[dtype]
    unit = np.abs(x).max(axes, keepdims=True) / largest
    unit[unit == 0] = 1
    return to_grid(x / unit) * unit


def reference(x: Array, w: Array, dy: Array, dtype: str) -> dict[str, Array]:
    """y[b, t, h, n] = x[b, t, h, k] w[k, h, n] and both cotangents, each product of quantised operands."""
    return {
        "y": np.einsum("bthk,khn->bthn", rounded(x, (3,), dtype), rounded(w, (0,), dtype)),
        "dx": np.einsum("bthn,khn->bthk", rounded(dy, (3,), dtype), rounded(w, (2,), dtype)),
        "dw": np.einsum("bthn,bthk->khn", rounded(dy, (0, 1), dtype), rounded(x, (0, 1), dtype)),
    }


def operands(float_type: str = "float64") -> dict[str, mtf.Tensor]:
    shapes = {"x": [B, T, H, K], "w": [K, H, N], "dy": [B, T, H, N]}
    return {n: mtf.input(n, s, float_type) for n, s in shapes.items()}


def values(scale: float = 1.0) -> dict[str, Array]:
    rng = np.random.default_rng(7)
    x, w, dy = rng.normal(size=(4, 8, 4, 16)), rng.normal(size=(16, 4, 8)), rng.normal(size=(4, 8, 4, 8))
    x[1, 2, 3] = 0  # a row of nothing
    x[0, 0, 0, 5] = 1e4 * scale  # one that is far larger than the rest of its row
    return {"x": x, "w": w * scale, "dy": dy}


@cache
def lowered(dtype: str, mesh: str, layout: str, float_type: str) -> mtf.Program:
    with mtf.Graph():
        given = operands(float_type)
        y = mtf.quantized_einsum([given["x"], given["w"]], [B, T, H, N], dtype)
        dx, dw = mtf.gradients([y], [given["x"], given["w"]], [given["dy"]])
        return mtf.lower({"y": y, "dx": dx, "dw": dw}, mesh=mesh, layout=layout)


def results(
    dtype: str, mesh: str, layout: str, executor: str = "exact", float_type: str = "float64"
) -> dict[str, Array]:
    return mtf.simulate(lowered(dtype, mesh, layout, float_type), executor=executor).step(values())


@pytest.mark.parametrize("dtype", TO_GRID)
@pytest.mark.parametrize("executor", ["exact", "fast"])
def test_against_float64(dtype: str, executor: str) -> None:
    found, expected = results(dtype, "p:1", "", executor), reference(**values(), dtype=dtype)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-12 * np.abs(value).max(), err_msg=name)
    exact = np.einsum("bthk,khn->bthn", values()["x"], values()["w"])
    error = np.abs(found["y"] - exact).max() / np.abs(exact).max()
    assert 1e-4 < error < 0.05  # it is rounded


@pytest.mark.parametrize("dtype", TO_GRID)
@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS)
def test_layouts_change_nothing(dtype: str, mesh: str, layout: str) -> None:
    expected = results(dtype, "p:1", "")
    for executor in ("exact", "fast"):
        found = results(dtype, mesh, layout, executor)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-12 * np.abs(value).max(), err_msg=name)


def test_float32_and_bfloat16_are_rounded_to_the_same_grid() -> None:
    """The MXU takes float32 operands through the grid alone, not through bfloat16 first."""
    expected = reference(**values(), dtype="int8")
    for executor in ("exact", "fast"):
        found = results("int8", "p:2", "k:p", executor, "float32")
        np.testing.assert_allclose(found["y"], expected["y"], rtol=1e-5, atol=1e-6 * np.abs(expected["y"]).max())
    narrow = {n: v.astype(ml_dtypes.bfloat16).astype(np.float64) for n, v in values().items()}
    expected = reference(**narrow, dtype="int8")
    found = results("int8", "p:1", "", "exact", "bfloat16")
    # The result is rounded to bfloat16 once, by at most 2^-8 of it. Where an operand lies half way between two numbers
    # of the grid, a scale in float32 may decide otherwise than one in float64.
    assert np.isclose(found["y"].astype(float), expected["y"], rtol=2**-8, atol=1e-6).mean() > 0.98


def test_a_row_over_cores_takes_one_maximum_of_all() -> None:
    with mtf.Graph():
        given = operands()
        y = mtf.quantized_einsum([given["x"], given["w"]], [B, T, H, N])
        program = mtf.lower({"y": y}, mesh="p:4", layout="k:p")
    maxima = [c for c in program.collectives if "max" in c.reason]
    size = 8  # float64
    # One per row of x and of w, and one sum of the product.
    assert sorted(c.payload_bytes for c in maxima) == sorted([4 * 8 * 4 * size, 4 * 8 * size])
    assert (
        sum(c.payload_bytes for c in program.collectives) == sum(c.payload_bytes for c in maxima) + 4 * 8 * 4 * 8 * size
    )


@pytest.mark.parametrize("dtype", TO_GRID)
def test_second_derivatives_are_those_of_quantised_products(dtype: str) -> None:
    """<c, y> is bilinear to its gradient: d/dw of <v, dx> is the quantised product of dy and v."""
    with mtf.Graph():
        given = operands()
        y = mtf.quantized_einsum([given["x"], given["w"]], [B, T, H, N], dtype)
        (dx,) = mtf.gradients([y], [given["x"]], [given["dy"]])
        (dw,) = mtf.gradients([dx], [given["w"]], [mtf.input("v", [B, T, H, K], "float64")])
        program = mtf.lower({"dw": dw})
    fed = values()
    v = np.random.default_rng(2).normal(size=fed["x"].shape)
    found = mtf.simulate(program).step(dy=fed["dy"], v=v)["dw"]
    expected = np.einsum("bthk,bthn->khn", rounded(v, (0, 1), dtype), rounded(fed["dy"], (0, 1), dtype))
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", TO_GRID)
def test_einsum_rounds_to_the_grid_what_is_not_on_it(dtype: str) -> None:
    x, w = np.array([0.4, 1.6, -200.0, 3.0]), np.array([100.0, 7.3, 1.0, 1000.0])
    expected = {
        "int8": 0 * 100 + 2 * 7 - 127 * 1 + 3 * 127,
        "fp8": 0.40625 * 96 + 1.625 * 7.5 - 192 * 1 + 3 * 448,
    }
    with mtf.Graph():
        k = D("k", 4)
        y = mtf.einsum([mtf.input("x", [k]), mtf.input("w", [k])], [], precision=dtype)
        programs = [mtf.lower({"y": y}, precision=p) for p in ("default", "highest")]
    for program in programs:
        for executor in ("exact", "fast"):
            assert float(mtf.simulate(program, executor=executor).step(x=x, w=w)["y"]) == expected[dtype]


def test_gradient_of_an_einsum_on_the_grid_is_not_rounded_to_it() -> None:
    with mtf.Graph():
        k = D("k", 4)
        x, w = mtf.input("x", [k], "float64"), mtf.input("w", [k], "float64")
        (dx,) = mtf.gradients([mtf.einsum([x, w], [], precision="int8") * 0.3], [x])
        program = mtf.lower({"dx": dx})
    found = mtf.simulate(program).step(w=np.array([1.0, 2.0, 3.0, 4.0]))["dx"]
    np.testing.assert_allclose(found, 0.3 * np.array([1, 2, 3, 4]), rtol=1e-15)


@pytest.mark.parametrize("dtype", TO_GRID)
def test_trains(dtype: str) -> None:
    """A small network learns as well as it does in float32."""
    batch, width, hidden, classes = D("batch", 32), D("width", 16), D("hidden", 32), D("classes", 4)
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(4, 16)) * 2
    labels = np.arange(32) % 4
    images = centres[labels] + rng.normal(size=(32, 16)) * 0.5

    def last_loss(quantised: bool) -> float:
        def product(x: mtf.Tensor, w: mtf.Tensor, shape: list[mtf.Dimension]) -> mtf.Tensor:
            return mtf.quantized_einsum([x, w], shape, dtype) if quantised else mtf.einsum([x, w], shape)

        with mtf.Graph():
            x, y = mtf.input("x", [batch, width]), mtf.input("y", [batch], "int32")
            h = mtf.relu(product(x, mtf.variable("w", [width, hidden]), [batch, hidden]))
            logits = product(h, mtf.variable("v", [hidden, classes]), [batch, classes])
            loss = mtf.reduce_mean(
                mtf.layers.softmax_cross_entropy_with_logits(logits, mtf.one_hot(y, classes), classes)
            )
            train = mtf.optimize.SgdOptimizer(0.1).minimize(loss)
            sim = mtf.simulate(mtf.lower({"loss": loss}, train, mesh="p:4", layout="hidden:p"), seed=1)
        losses = [float(sim.step(x=images, y=labels)["loss"]) for _ in range(30)]
        assert losses[-1] < 0.2 * losses[0]
        return losses[-1]

    assert abs(last_loss(True) - last_loss(False)) < 0.05


def test_cost_is_that_of_the_rate_of_eight_bits() -> None:
    n = D("rows", 4096)
    k, c = D("inner", 4096), D("columns", 4096)

    def mxu_seconds(how: str) -> float:
        with mtf.Graph():
            x, w = mtf.input("x", [n, k], "bfloat16"), mtf.input("w", [k, c], "bfloat16")
            if how == "bf16":
                y = mtf.einsum([x, w], [n, c])
            elif how == "quantised":
                y = mtf.quantized_einsum([x, w], [n, c])
            else:
                y = mtf.einsum([x, w], [n, c], precision=how)
            program = mtf.lower({"y": y})
        assert program.work.mxu_flops == 2 * 4096**3
        (product,) = (i for i in program.instructions if i.opcode in ("einsum", "quantized_einsum"))
        assert matmul_of(program, product).dtype == {"quantised": "int8"}.get(how, how)
        return mtf.estimate(program, "v5e-1").engine_seconds["mxu"]

    plain = mxu_seconds("bf16")
    # v5e: 394 int8 operations to 197 in bfloat16; what does not depend on the rate keeps it from twice as fast.
    for how in ("int8", "quantised"):
        assert 1.6 < plain / mxu_seconds(how) <= 2


def test_fewer_passes_for_nobody() -> None:
    """At highest precision a product in eight bits is still one."""
    with mtf.Graph():
        given = operands("float32")
        y = mtf.quantized_einsum([given["x"], given["w"]], [B, T, H, N])
        flops = {p: mtf.lower({"y": y}, precision=p).work.mxu_flops for p in ("default", "highest")}
    assert flops["default"] == flops["highest"] == 2 * 4 * 8 * 4 * 16 * 8


def test_remat_takes_it_for_a_product() -> None:
    layers, wide = D("layers", 3), D("k_out", 16)
    with mtf.Graph():
        x, w = mtf.input("x", [B, K]), mtf.input("w", [layers, K, wide])

        def body(c: tuple, s: tuple) -> tuple:
            y = mtf.quantized_einsum([c[0], s[0]], [B, wide], name="y")
            return (mtf.sin(mtf.rename_dimension(y, "k_out", "k")),), ()

        flops = {}
        for remat in ("full", "matmuls", mtf.Remat(save=["y"])):
            (y,), _ = mtf.scan(body, [x], [w], layers, remat=remat)
            (dw,) = mtf.gradients([mtf.reduce_sum(y)], [w])
            flops[str(remat)] = mtf.lower({"dw": dw}).work.mxu_flops
    once = 3 * 2 * 4 * 16 * 16
    assert list(flops.values()) == [4 * once, 3 * once, 3 * once]


def test_mistakes() -> None:
    with mtf.Graph():
        given = operands("float32")
        x, w = given["x"], given["w"]
        with pytest.raises(mtf.GraphError, match="dtype must be 'int8' or 'fp8', got 'int9'"):
            mtf.quantized_einsum([x, w], [B, T, H, N], "int9")
        with pytest.raises(mtf.ShapeError, match="takes two tensors, got 3"):
            mtf.quantized_einsum([x, w, w], [B, T, H, N])
        with pytest.raises(mtf.ShapeError, match="inputs must be a list, got str 'xw'"):
            mtf.quantized_einsum("xw", [B, T, H, N])
        with pytest.raises(mtf.ShapeError, match=r"needs float operands, got x_: i32\[k:16\]; cast it"):
            mtf.quantized_einsum([mtf.input("x_", [K], "int32"), w], [H, N])
        with pytest.raises(mtf.ShapeError, match="operands have dtypes bfloat16 and float32; cast one"):
            mtf.quantized_einsum([mtf.cast(x, "bfloat16"), w], [B, T, H, N])
        with pytest.raises(mtf.ShapeError, match="output dim 'z' is in no operand"):
            mtf.quantized_einsum([x, w], [D("z", 3)])
        with pytest.raises(mtf.GraphError, match="must be 'default' or 'highest' or 'int8' or 'fp8', got 'int4'"):
            mtf.einsum([x, w], [B, T, H, N], precision="int4")


def test_cotangents_may_take_the_wider_range() -> None:
    """fp8 as MaxText trains in full: forward in e4m3, and the cotangent, not what it is multiplied with, in e5m2."""

    def to_e5m2(v: Array, axes: tuple[int, ...]) -> Array:
        unit = np.abs(v).max(axes, keepdims=True) / 57344
        return (v / unit).astype(ml_dtypes.float8_e5m2).astype(np.float64) * unit

    with mtf.Graph():
        given = operands()
        y = mtf.quantized_einsum([given["x"], given["w"]], [B, T, H, N], "fp8", gradient_dtype="fp8_e5m2")
        dx, dw = mtf.gradients([y], [given["x"], given["w"]], [given["dy"]])
        program = mtf.lower({"y": y, "dx": dx, "dw": dw}, mesh="p:2;q:2", layout="batch:p;k:q")
        with pytest.raises(mtf.GraphError, match="gradient_dtype must be 'int8', got 'fp8_e5m2'"):
            mtf.quantized_einsum([given["x"], given["w"]], [B, T, H, N], "int8", gradient_dtype="fp8_e5m2")
    fed = values()
    x, w, dy = fed["x"], fed["w"], fed["dy"]
    expected = {
        "y": reference(**fed, dtype="fp8")["y"],
        "dx": np.einsum("bthn,khn->bthk", to_e5m2(dy, (3,)), rounded(w, (2,), "fp8")),
        "dw": np.einsum("bthn,bthk->khn", to_e5m2(dy, (0, 1)), rounded(x, (0, 1), "fp8")),
    }
    for executor in ("exact", "fast"):
        found = mtf.simulate(program, executor=executor).step(fed)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-12 * np.abs(value).max(), err_msg=name)
    full = mtf.Numerics(precision="fp8_full")
    with mtf.Graph():
        y = mtf.layers.dense(mtf.input("x", [B, K]), N, numerics=full)
    assert y.operation.opdef.name != "einsum"


def test_scales_of_bounded_operands_are_fixed() -> None:
    """No maximum of operands is taken, across devices neither; the cotangent keeps its own scales."""
    bound = 2.0

    def clipped(v: Array) -> Array:
        largest, to_grid = TO_GRID["fp8"]
        unit = bound / largest
        return to_grid(np.clip(v, -bound, bound) / unit) * unit

    with mtf.Graph():
        given = operands()
        y = mtf.quantized_einsum([given["x"], given["w"]], [B, T, H, N], "fp8", bound=bound)
        dx, dw = mtf.gradients([y], [given["x"], given["w"]], [given["dy"]])
        forward = mtf.lower({"y": y}, mesh="p:4", layout="k:p")
        program = mtf.lower({"y": y, "dx": dx, "dw": dw}, mesh="p:2;q:2", layout="batch:p;k:q")
        with pytest.raises(mtf.GraphError, match="bound must be positive, got 0"):
            mtf.quantized_einsum([given["x"], given["w"]], [B, T, H, N], bound=0)
    assert not any(i.opcode == "reduce_max" for i in forward.instructions)
    assert len(forward.collectives) == 1  # the sum over k
    fed = values()
    x, w, dy = fed["x"], fed["w"], fed["dy"]
    expected = {
        "y": np.einsum("bthk,khn->bthn", clipped(x), clipped(w)),
        "dx": np.einsum("bthn,khn->bthk", rounded(dy, (3,), "fp8"), clipped(w)),
        "dw": np.einsum("bthn,bthk->khn", rounded(dy, (0, 1), "fp8"), clipped(x)),
    }
    for executor in ("exact", "fast"):
        for name, value in mtf.simulate(program, executor=executor).step(fed).items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-12, atol=1e-12 * np.abs(value).max())
