"""What the table of operations can't say of functions: accuracy, slopes at kinks, what is communicated, errors."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence

import numpy as np
import pytest

import meshlib as mtf
from meshlib.core.graph import Tensor, current_graph
from meshlib.core.numerics import erf
from tests.cases import Array, dims
from tests.oracle import run

A, B, N = dims("a:4;b:6;n:12")


def values(build: Callable[..., Tensor], *arrays: Sequence[float] | Array) -> Array:
    """What `build` makes of float64 vectors over dim a, b, ... and n."""
    with mtf.Graph():
        fed = {f"x{n}": np.asarray(v, float) for n, v in enumerate(arrays)}
        operands = [mtf.input(n, [mtf.Dimension("v", v.size)], "float64") for n, v in fed.items()]
        y = build(*operands)
    (out,) = run(mtf.lower({"y": y}), fed)
    return out["y"]


def slopes(function: Callable[[Tensor], Tensor], at: Sequence[float]) -> list[float]:
    """The derivative of an element-wise function at points."""

    def build(x: Tensor) -> Tensor:
        (dx,) = mtf.gradients([function(x)], [x])
        assert dx is not None
        return dx

    return values(build, at).tolist()  # type: ignore[no-any-return]


# ---------------------------------------------------------------- the error function


def test_erf_against_the_standard_library() -> None:
    """Python's math.erf is that of the C library, within 1 unit in the last place of the truth."""
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [
            rng.uniform(-6.5, 6.5, 20_000),
            rng.uniform(-0.02, 0.02, 5_000),
            rng.uniform(-1, 1, 5_000) * 10 ** rng.uniform(-300, 0, 5_000),
            (np.arange(-400, 401) + 0.5) / 64,  # half way between grid points
            [0.0, 1 / 128, np.nextafter(6, 0), 6.0, 7.0, 1e30, np.inf],
        ]
    )
    wanted = np.array([math.erf(v) for v in x])
    off = np.abs(erf(x) - wanted) / np.spacing(np.abs(wanted))
    assert off.max() <= 2
    assert np.mean(off > 1) < 1e-3
    assert np.array_equal(erf(-x), -erf(x))
    small = x.astype(np.float32)
    assert np.array_equal(erf(small), np.array([math.erf(v) for v in small.tolist()], np.float32))
    assert np.isnan(erf(np.array([np.nan]))).all()
    assert np.signbit(erf(np.array([-0.0]))).all()


def test_erf_writes_over_its_operand_and_takes_any_strides() -> None:
    x = np.random.default_rng(1).normal(size=(200, 300))
    wanted = erf(x)
    assert np.array_equal(erf(x.T), wanted.T)
    assert np.array_equal(erf(x[::3, 1::2]), wanted[::3, 1::2])
    assert erf(x, x) is x
    assert np.array_equal(x, wanted)


def test_gelu_forms_differ_by_5e_4() -> None:
    x = np.linspace(-6, 6, 2001)
    off = np.abs(values(mtf.gelu, x) - values(lambda v: mtf.gelu(v, approximate=False), x)).max()
    assert 4e-4 < off < 5e-4


def test_selu_keeps_mean_and_variance() -> None:
    """Klambauer et al. 2017, equation 14: (0, 1) is a fixed point. By the midpoint rule over the normal density."""
    x = (np.arange(-40_000, 40_000) + 0.5) / 4000
    weight = np.exp(-x * x / 2) / math.sqrt(2 * math.pi) / 4000
    y = values(mtf.selu, x)
    assert abs(np.sum(weight * y)) < 1e-7
    assert abs(np.sum(weight * y * y) - 1) < 1e-7


# ---------------------------------------------------------------- slopes at kinks and far out


@pytest.mark.parametrize(
    ("function", "at", "wanted"),
    [
        (mtf.elu, [0, 800, -800], [1, 1, 0]),
        (mtf.selu, [0, 800, -800], [1.0507009873554805 * 1.6732632423543772, 1.0507009873554805, 0]),
        (mtf.leaky_relu, [0, 1, -1], [0.2, 1, 0.2]),
        (mtf.softplus, [0, 800, -800], [0.5, 1, 0]),
        (mtf.swish, [0, 800, -800], [0.5, 1, 0]),
        (mtf.gelu, [0, 800, -800], [0.5, 1, 0]),
        (lambda x: mtf.gelu(x, approximate=False), [0, 800, -800], [0.5, 1, 0]),
        (mtf.erf, [0, 800, -800], [2 / math.sqrt(math.pi), 0, 0]),
        (lambda x: mtf.clip_by_value(x, -1, 2), [-1.5, -1, 0, 2, 2.5], [0, 1, 1, 1, 0]),
        (lambda x: mtf.mod(x, 3), [0, 3, -4.5], [1, 1, 1]),
    ],
)
def test_slopes(function: Callable[[Tensor], Tensor], at: list[float], wanted: list[float]) -> None:
    assert slopes(function, at) == pytest.approx(wanted, abs=1e-15)


def test_integers_divide_as_in_python() -> None:
    with mtf.Graph():
        x, y = mtf.input("x", [A], "int32"), mtf.input("y", [A], "int32")
        program = mtf.lower({"q": x // y, "r": x % y, "from": 7 // y, "left": -7 % y})
    a, b = [7, -7, 7, -7], [2, 2, -2, -3]
    (out,) = run(program, {"x": np.array(a, np.int32), "y": np.array(b, np.int32)})
    assert out["q"].tolist() == [i // j for i, j in zip(a, b, strict=True)]
    assert out["r"].tolist() == [i % j for i, j in zip(a, b, strict=True)]
    assert out["from"].tolist() == [7 // j for j in b]
    assert out["left"].tolist() == [-7 % j for j in b]


# ---------------------------------------------------------------- what is communicated


def collectives(y: Tensor, mesh: str, layout: str) -> list[tuple[str, int]]:
    """Kind and payload of each."""
    return [(c.kind, c.payload_bytes) for c in mtf.lower({"y": y}, mesh=mesh, layout=layout).collectives]


def test_flags_travel_as_one_byte_each() -> None:
    with mtf.Graph():
        x = mtf.input("x", [A, N], "bool")
        alls, anys = mtf.reduce_all(x, reduced_dim=N), mtf.reduce_any(x, output_shape=[A])
    assert collectives(alls, "p:4", "n:p") == [("all_reduce", 4)]
    assert collectives(anys, "p:4", "n:p") == [("all_reduce", 4)]
    assert collectives(anys, "p:4", "a:p") == []


def test_pooling_a_split_dim_communicates_only_where_windows_are_cut() -> None:
    with mtf.Graph():
        x = mtf.input("x", [mtf.Dimension("batch", 4), mtf.Dimension("height", 16), mtf.Dimension("channels", 2)])
        y = mtf.pool(x, {"height": 4})
    assert collectives(y, "p:4", "height:p") == []
    assert collectives(y, "p:2;q:2", "height:p;batch:q") == []
    with pytest.raises(mtf.LayoutError, match=r"4 .*8|8 .*4"):
        mtf.lower({"y": y}, mesh="p:8", layout="height:p")


def test_both_branches_are_computed() -> None:
    with mtf.Graph():
        x, chosen = mtf.input("x", [A]), mtf.input("chosen", [], "bool")
        y = mtf.cond(chosen, lambda: mtf.exp(x), lambda: mtf.sin(x), name="either")
        assert isinstance(y, Tensor)
        program = mtf.lower({"y": y})
    assert {"exp", "sin", "where"} <= {i.opcode for i in program.instructions}
    assert y.name == "either"
    data = np.arange(4, dtype=np.float32)
    for flag, wanted in ((True, np.exp(data)), (False, np.sin(data))):
        (out,) = run(program, {"x": data, "chosen": np.array(flag)})
        assert np.array_equal(out["y"], wanted)


def test_a_branch_that_assigns_nothing() -> None:
    """How a variable changes in one branch only."""
    with mtf.Graph():
        chosen = mtf.input("chosen", [], "bool")
        v = mtf.variable("v", [A], 1.0)
        new = mtf.cond(chosen, lambda: v * 3, lambda: v)
        assert isinstance(new, Tensor)
        program = mtf.lower({}, [mtf.assign(v, new)])
    sim = mtf.simulate(program)
    for flag in (False, True, False, True):
        sim.step(chosen=np.array(flag))
    assert sim.state["v"].tolist() == [9.0] * 4


def test_updates_read_the_state_before_the_step() -> None:
    with mtf.Graph():
        v = mtf.variable("v", [A], 1.0, slice_dtype="bfloat16", activation_dtype="float32")
        w = mtf.variable("w", [A, B], 1.0)
        updates = [mtf.assign_add(v, 2), mtf.assign_sub(w, v)]
        program = mtf.lower({}, updates, mesh="p:2", layout="a:p")
    sim = mtf.simulate(program)
    for _ in range(2):
        sim.step()
    assert np.asarray(sim.state["v"], float).tolist() == [5.0] * 4
    assert (sim.state["w"] == 1 - 1 - 3).all()


def test_samples_follow_the_softmax() -> None:
    """20,000 draws of 4: the frequency is off by 0.02 with probability below 1e-7."""
    logits = np.array([0.0, 1.0, -1.0, 2.0])
    with mtf.Graph():
        x = mtf.broadcast(mtf.input("x", [A]), [mtf.Dimension("draw", 20_000), A])
        program = mtf.lower({t: mtf.sample_with_temperature(x, A, float(t)) for t in ("1", "0.5", "0")})
    (out,) = run(program, {"x": logits.astype(np.float32)}, "fast")
    assert (out["0"] == 3).all()
    for t in ("1", "0.5"):
        p = np.exp(logits / float(t))
        assert np.bincount(out[t], minlength=4) / 20_000 == pytest.approx(p / p.sum(), abs=0.02)


def test_names_of_mesh_tensorflow() -> None:
    """Same arguments, other names for what is there."""
    with mtf.Graph():
        x = mtf.input("x", [A])
        assert mtf.sub is mtf.subtract
        assert [f(x).dtype.name for f in (mtf.to_float, mtf.to_int32, mtf.to_bfloat16)] == [
            "float32",
            "int32",
            "bfloat16",
        ]
        assert [str(y) for y in (mtf.zeros_like(x).shape, mtf.ones_like(x > 0).dtype)] == ["[a:4]", "bool"]
        assert mtf.replace_dimensions(x, A, [mtf.Dimension("u", 2), mtf.Dimension("v", 2)]).shape.names == ("u", "v")
        assert mtf.combined_dimension([A, B]) == mtf.Dimension("a", 24)


# ---------------------------------------------------------------- errors


def errors() -> dict[str, tuple[Callable[[], object], str]]:
    """What is wrong, and what the message says."""

    def x(*over: mtf.Dimension, dtype: str = "float32") -> Tensor:
        return mtf.input(f"x{len(current_graph('test').inputs)}", over or (A, B), dtype)

    def flag() -> Tensor:
        return mtf.reduce_any(x() > 0)

    c, d = mtf.Dimension("c", 5), mtf.Dimension("d", 2)
    return {
        "gelu of integers": (lambda: mtf.gelu(x(dtype="int32")), r"gelu \(test_.*needs a float tensor.*i32.*cast"),
        "erf of integers": (lambda: mtf.erf(x(dtype="int32")), r"erf \(test_.*float operand, got int32"),
        "mod of flags": (lambda: mtf.mod(x() > 0, x() > 0), "needs numbers, got bool"),
        "xor of floats": (lambda: mtf.logical_xor(x(), x()), r"logical_xor .*needs a bool.*f32"),
        "all of floats": (lambda: mtf.reduce_all(x()), r"reduce_all .*needs bool, got float32.*mtf.not_equal"),
        "any, positional": (lambda: mtf.reduce_any(x() > 0, [A]), "name the second argument"),  # type: ignore[arg-type]
        "empty range": (lambda: mtf.clip_by_value(x(), 2, 1), "clip_value_min is 2.0, but clip_value_max 1.0"),
        "pred with dims": (lambda: mtf.cond(x() > 0, x, x), r"cond .*no dims.*bool\[a:4, b:6\].*mtf.where"),
        "pred of floats": (lambda: mtf.cond(mtf.reduce_sum(x()), x, x), "needs a bool"),
        "branch without lambda": (lambda: mtf.cond(flag(), x(), x), "true_fn must be a function.*lambda"),  # type: ignore[arg-type]
        "branches of two shapes": (
            lambda: mtf.cond(flag(), x, lambda: x(B, A)),
            r"different types(.|\n)*a:4, b:6(.|\n)*b:6, a:4",
        ),
        "branches of two dtypes": (lambda: mtf.cond(flag(), x, lambda: x(dtype="int32")), r"types(.|\n)*f32(.|\n)*i32"),
        "branches of two lengths": (
            lambda: mtf.cond(flag(), lambda: [x()], lambda: [x(), x()]),
            "true_fn returns a list of 1, but false_fn a list of 2",
        ),
        "branch of nothing": (lambda: mtf.cond(flag(), x, lambda: None), r"false_fn\(\).*NoneType"),  # type: ignore[arg-type, return-value]
        "window that leaves a rest": (
            lambda: mtf.pool(x(A, c), {"c": 2}),
            r"pool .*2 does not divide dim 'c' of size 5; pad it to 6 or slice it to 4",
        ),
        "two windows wrong": (
            lambda: mtf.pool(x(A, c), {"a": 0, "c": 3}),
            "window of dim 'a' must be at least 1, got 0",
        ),
        "window too large": (
            lambda: mtf.pool(x(), {"b": 7}, strides={"b": 2}),
            "no window of 7 fits dim 'b' of size 6",
        ),
        "padding only": (
            lambda: mtf.max_pool(x(), {"b": 2}, 1, (2, 0)),
            "max_pool .*some windows of 2 along dim 'b' of size 6 see padding only",
        ),
        "padding without end": (
            lambda: mtf.max_pool(x(), {"b": 2}, 1, (0, 10**12)),
            "padding of dim 'b' must be at most 2147483647",
        ),
        "stride without window": (
            lambda: mtf.pool(x(), {"b": 2}, strides={"b": 2, "a": 2}),
            "stride names a; the dims with windows are 'b'",
        ),
        "unknown dim": (lambda: mtf.pool(x(), {"bb": 2}), "no dim 'bb'; did you mean 'b'"),
        "unknown reduction": (lambda: mtf.pool(x(), {"b": 2}, "median"), "'max' or 'min' or 'avg' or 'sum'"),
        "mean of integers": (lambda: mtf.pool(x(dtype="int32"), {"b": 2}, "avg"), "needs a float tensor"),
        "image without channels": (lambda: mtf.layers.max_pool2d(x()), "max_pool2d .*2 dims before the last"),
        "window of three dims": (lambda: mtf.layers.max_pool2d(x(A, B, d), (2, 2, 2)), "ksize must have 2 numbers"),
        "dims apart": (lambda: mtf.replace_dimensions(x(A, c, B), [A, B], [N]), "a:4, b:6 do not follow one another"),
        "dims reversed": (lambda: mtf.replace_dimensions(x(), [B, A], [N]), "b:6, a:4 do not follow one another"),
        "dim missing": (lambda: mtf.replace_dimensions(x(), c, d), "c:5 do not follow one another in .a:4, b:6."),
        "too few elements": (lambda: mtf.replace_dimensions(x(), [A, B], [N]), "24 elements in all, but n:12 have 12"),
        "name there already": (lambda: mtf.replace_dimensions(x(), A, mtf.Dimension("b", 4)), "'b'"),
        "offset along the shifted dim": (
            lambda: mtf.dynamic_shift(x(), x(B, dtype="int32"), B, True),
            "offset dims b:6",
        ),
        "offset of floats": (lambda: mtf.dynamic_shift(x(), x(A), B, True), "offset must be int32"),
        "added to other dims": (lambda: mtf.assign_add(mtf.variable("v", [A]), x()), r"assign_add.*'v'.*other dims"),
        "temperature below 0": (lambda: mtf.sample_with_temperature(x(), A, -1), "must not be negative, got -1"),
    }


@pytest.mark.parametrize("what", errors())
def test_errors(what: str) -> None:
    wrong, message = errors()[what]
    with mtf.Graph(), pytest.raises(mtf.MeshlibError, match=message):
        wrong()


def test_operators_of_python() -> None:
    n = mtf.Dimension("n", 4)
    with mtf.Graph():
        x, y = mtf.input("x", [n]), mtf.input("y", [n])
        p, q = x > 0, y > 0
        outputs = {"abs": abs(x), "not": ~p, "and": p & q, "or": p | q, "pick": mtf.where(p, 0.0, -1e9)}
        with pytest.raises(mtf.GraphError, match=r"dims are matched by name.*mtf\.einsum\(\[x, y\]"):
            x @ y
        program = mtf.lower(outputs, mesh="m:2", layout="n:m")
    r = mtf.simulate(program).step(x=[1, -2, 3, -4], y=[1, 1, -1, -1])  # lists of Python numbers are taken as they are
    assert r["abs"].tolist() == [1, 2, 3, 4]
    assert r["not"].tolist() == [False, True, False, True]
    assert r["and"].tolist() == [True, False, False, False]
    assert r["or"].tolist() == [True, True, True, False]
    assert r["pick"].tolist() == [0, -1e9, 0, -1e9]


def test_a_result_that_does_not_divide_says_which_would() -> None:
    with mtf.Graph():
        x = mtf.input("x", [mtf.Dimension("n", 8)])
        for y in (mtf.slice(x, 1, 3, "n"), mtf.pad(x, [0, 3], "n")):
            with pytest.raises(
                mtf.LayoutError, match=r"% 2 = 1\. Make the result (2 or 4|10 or 12) long, or rename 'n'"
            ):
                mtf.lower({"y": y}, mesh="m:2", layout="n:m")


def test_results_of_several_operations_have_the_name_that_was_given() -> None:
    d = mtf.Dimension("d", 4)
    with mtf.Graph():
        x = mtf.input("x", [d])
        made = [
            mtf.reduce_mean(x, name="y1"),
            mtf.reduce_mean(x, reduced_dim=d, name="y2"),
            mtf.log_softmax(x, d, name="y3"),
            mtf.softmax(x, d, name="y4"),
            mtf.reduce_logsumexp(x, d, name="y5"),
        ]
    assert [y.name for y in made] == ["y1", "y2", "y3", "y4", "y5"]


def test_a_number_that_a_name_already_has_is_passed_over() -> None:
    with mtf.Graph() as graph:
        names = [mtf.ones([], name=name).operation.name for name in ("a", "a_1", "a", "a", "b", "b", "b_1", "a_1")]
    assert names == ["a", "a_1", "a_2", "a_3", "b", "b_1", "b_1_1", "a_1_1"]
    assert len({op.name for op in graph.operations}) == len(graph.operations)


def test_einsum_of_integers_wraps_around_at_32_bits_under_every_layout() -> None:
    rng = np.random.default_rng(5)
    x, y = (rng.integers(-(2**31), 2**31, shape).astype(np.int32) for shape in ((4, 8), (8, 4)))
    rows, inner, cols = dims("rows:4;inner:8;cols:4")
    with mtf.Graph():
        a, b = mtf.input("a", [rows, inner], "int32"), mtf.input("b", [inner, cols], "int32")
        c = mtf.einsum([a, b], output_shape=[rows, cols], name="product")
    assert (c.name, c.dtype.name) == ("product", "int32")
    exact = np.array([[sum(int(p) * int(q) for p, q in zip(r, k, strict=True)) for k in y.T] for r in x], object)
    wanted = ((exact + 2**31) % 2**32 - 2**31).astype(np.int32)
    for layout in ("", "rows:p", "inner:p+q", "rows:q;inner:p", "cols:p;inner:q"):
        program = mtf.lower({"c": c}, mesh="p:2;q:2", layout=layout)
        for executor in ("exact", "fast"):
            (out,) = run(program, {"a": x, "b": y}, executor)
            np.testing.assert_array_equal(out["c"], wanted)
        assert program.work.mxu_flops == 0


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda i, w: mtf.einsum([i, w]), r"dtypes int32 and float32"),
        (lambda i, w: mtf.einsum([i, i], precision="int8"), r"\(or int32 without a precision\), got int32"),
        (lambda i, w: mtf.einsum([i > 0, i > 0]), r"got bool; cast them"),
        (lambda i, w: mtf.einsum([i, i], [N]), r"einsum \(test_.*:\d+\): output dim 'n' is in no operand(.|\n)*i: i32"),
        (lambda i, w: mtf.gather(w, i, N, out_of_range="zeros"), r"must be 'error' or 'zero'.*did you mean 'zero'"),
        (lambda i, w: mtf.one_hot(i, N, out_of_range=0), r"one_hot .*out_of_range must be 'error' or 'zero', got 0"),
        (lambda i, w: mtf.scatter_add(w, i, A, N, out_of_range=""), r"scatter_add .*out_of_range must be"),
    ],
)  # fmt: skip
def test_what_integers_and_indices_are_refused(build: Callable[[Tensor, Tensor], Tensor], words: str) -> None:
    with mtf.Graph(), pytest.raises(mtf.MeshlibError, match=words):
        build(mtf.input("i", [A], "int32"), mtf.input("w", [N]))


def test_an_index_out_of_range_is_an_error_unless_zeros_are_asked_for() -> None:
    with mtf.Graph():
        i, w = mtf.input("i", [A], "int32"), mtf.input("w", [N, B])
        plain = mtf.layers.embedding(i, N, B, weights=w)
        zeros = mtf.layers.embedding(i, N, B, weights=w, out_of_range="zero")
    feeds = {"i": [0, -1, 12, 11], "w": np.arange(72.0).reshape(12, 6) + 1}
    for layout in ("", "n:p"):
        with pytest.raises(mtf.FeedError, match=r"index -1 is out of range for dim n:12 .*out_of_range='zero'"):
            run(mtf.lower({"y": plain}, mesh="p:4", layout=layout), feeds)
        (out,) = run(mtf.lower({"y": zeros}, mesh="p:4", layout=layout), feeds)
        assert out["y"].sum(axis=1).tolist() == [21.0, 0.0, 0.0, 417.0]


# ---------------------------------------------------------------- constants that are arrays


def test_an_array_moves_nowhere_since_every_device_holds_the_program() -> None:
    held = np.random.default_rng(0).normal(size=(12, 6))
    with mtf.Graph():
        c = mtf.constant(held, [N, B], "float64")
        x, u = mtf.input("x", [N], "float64"), mtf.input("u", [B], "float64")
        outputs = {"split": c * x, "whole": mtf.sort(c, N) + u}
    program = mtf.lower(outputs, mesh="p:2", layout="n:p")
    assert not [k for k in program.collectives if k.tensor == c.name]
    (out,) = run(program, {"x": np.arange(12.0), "u": np.zeros(6)})
    np.testing.assert_allclose(out["split"], held * np.arange(12.0)[:, None])
    np.testing.assert_allclose(out["whole"], np.sort(held, axis=0))


def test_an_array_is_a_constant_under_every_layout_and_takes_memory() -> None:
    held = np.random.default_rng(3).normal(size=(12, 6)).astype(np.float32)
    with mtf.Graph() as graph:
        c = mtf.constant(held, [N, B], name="weights")
        again = mtf.constant(held.copy(), [N, B])
        narrow = mtf.constant(held, [N, B], "bfloat16")
        y = mtf.reduce_sum(c * again, reduced_dim=B)
    wanted = (held.astype(float) ** 2).sum(axis=1)
    held[:] = 0  # what was given is copied
    for layout in ("", "n:p", "n:p+q", "n:q+p"):
        program = mtf.lower({"y": y, "narrow": narrow}, mesh="p:2;q:3", layout=layout)
        assert [i.operation.name for i in program.instructions if i.opcode == "table"] == ["weights", "constant_1"]
        for executor in ("exact", "fast"):
            (out,) = run(program, {}, executor)
            np.testing.assert_allclose(out["y"], wanted, rtol=1e-6)
        parts = {"": 1, "n:p": 2}.get(layout, 6)
        assert any((v.name, v.bytes) == ("weights", 288 // parts) for v in program.memory.live), program.memory
    assert graph.operations[0].attrs["value"] == graph.operations[1].attrs["value"]
    assert graph.operations[0].attrs["value"] != graph.operations[2].attrs["value"]
    copied = pickle.loads(pickle.dumps(graph.operations[0].attrs["value"]))
    assert (copied, hash(copied)) == (graph.operations[0].attrs["value"], hash(graph.operations[0].attrs["value"]))


@pytest.mark.parametrize(
    ("value", "dtype", "words"),
    [
        (np.zeros(4), "float32", r"the array has shape \[4\], but its dims are \[b:6\]"),
        (np.full(6, 1e300), "float32", r"the number 1e\+300 of the array does not fit float32"),
        (np.full(6, 2**40), "int32", r"the number 1099511627776 of the array does not fit int32"),
        (np.zeros(6), "int32", r"int32 can't hold the array of float64; convert it first"),
        (np.arange(6), "bool", r"bool can't hold the array of int64"),
        (np.array(["x"] * 6), "float32", r"float32 can't hold the array of <U1"),
        (np.ma.masked_array(np.zeros(6), [True] * 6), "float32", r"can't hold the masked array of float64"),
    ],
)  # fmt: skip
def test_arrays_that_are_no_constants(value: Array, dtype: str, words: str) -> None:
    with mtf.Graph(), pytest.raises(mtf.ShapeError, match=rf"constant \(test_functions.py:\d+\): .*{words}"):
        mtf.constant(value, [B], dtype)


def test_a_large_array_is_no_constant() -> None:
    rows = mtf.Dimension("rows", 2**22 + 1)
    with mtf.Graph(), pytest.raises(mtf.ShapeError, match="takes 16777220 bytes, more than the 16777216 of a constant"):
        mtf.constant(np.zeros(2**22 + 1, np.float32), rows)


def test_constants_from_lists() -> None:
    """As Mesh TensorFlow's, which hands them to tf.constant."""
    rows = [[1, 2, 3], (4, 5, 6)]
    with mtf.Graph():
        y = {"y": mtf.constant(rows, "a:2;b:3"), "n": mtf.constant(7, "b:3", "int32")}
        program = mtf.lower(y, mesh="p:3", layout="b:p")
    outputs = mtf.simulate(program).step()
    assert outputs["y"].tolist() == np.array(rows).tolist()
    assert outputs["n"].tolist() == [7, 7, 7]
    for value, text in (
        ([1, [2]], r"lists in a list must be of one length, got \[1, \[2\]\]"),
        ([1, 2], r"the array has shape \[2\], but its dims are \[a:3\]; give a dim of that size"),
        (["a"] * 3, "float32 can't hold the array of <U1"),
    ):
        with mtf.Graph(), pytest.raises(mtf.ShapeError, match=text):
            mtf.constant(value, "a:3")
