"""int8, int4 and fp8 as types of values: what moves and what it weighs, numbers against NumPy, gradients, files."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import meshlib as mtf
from meshlib.core.dtypes import BY_NAME, as_dtype, kind_of
from meshlib.program.instructions import Move
from tests.oracle import draw_layout

D = mtf.Dimension
Array = np.ndarray[Any, Any]
NARROW = ("int8", "int4", "float8_e4m3fn", "float8_e5m2")
B, K, F = D("b", 8), D("k", 16), D("f", 24)


def numbers(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Array:
    """Numbers all over the range that a type holds exactly, as its NumPy array."""
    rng, kind = np.random.default_rng(seed), as_dtype(dtype)
    if kind.kind == "integer":
        low, high = kind.bounds
        return rng.integers(low, high + 1, shape).astype(kind.public)
    return rng.normal(size=shape).astype(kind.public)


# ---------------------------------------------------------------- the types


@pytest.mark.parametrize("name", BY_NAME)
def test_a_type_is_found_by_every_name(name: str) -> None:
    dtype = as_dtype(name)
    assert as_dtype(dtype.public) is dtype
    assert as_dtype(np.zeros(1, dtype.public).dtype) is dtype
    assert dtype.size_bytes(7) == int(np.ceil(7 * dtype.itemsize))
    assert {"f": "float", "i": "integer", "b": "flag"}[kind_of(dtype.public)] == dtype.kind


def test_an_odd_count_of_int4_takes_a_whole_byte() -> None:
    with mtf.Graph():
        w = mtf.variable("w", [D("a", 5), D("c", 3)], dtype="int4")
        x = mtf.input("x", [D("d", 6), D("c", 3)], "int4")
        bound = mtf.constrain(x, "d:")
        program = mtf.lower({"w": mtf.cast(w, "int8"), "x": mtf.cast(bound, "int8")}, mesh="p:2", layout="d:p")
    assert program.memory.by_kind["variables"] == 8  # 15 of them
    assert program.memory.by_kind["inputs"] == 5  # 9 on each core
    (gather,) = (c for c in program.collectives if c.kind == "all_gather")
    assert (gather.dtype, gather.payload_bytes, gather.sent_bytes) == ("int4", 5, 5)


# ---------------------------------------------------------------- weights that are cast


def dequantised(how: str, x: mtf.Tensor, w: mtf.Tensor, s: mtf.Tensor) -> mtf.Tensor:
    """A product with quantised weights, written in different ways."""
    wide = mtf.cast(w, x.dtype)
    if how == "after":
        return mtf.einsum([x, wide], precision="highest") * s
    if how == "before":
        return mtf.einsum([x, wide * s], precision="highest")
    turned = mtf.rename_dimension(mtf.transpose(wide, [F, K]), "k", "inner")
    return mtf.einsum([mtf.rename_dimension(x, "k", "inner"), turned], precision="highest") * s


@given(st.sampled_from(NARROW), st.sampled_from(["after", "before", "turned"]), st.integers(0, 10**6))
@example("int8", "turned", 146204)  # required rules split both the weight's dim and the new name
def test_weights_move_as_they_are(dtype: str, how: str, seed: int) -> None:
    """Under any layout: the numbers of NumPy, and nothing of the size of the weights moves in a wider type."""
    layout = draw_layout(np.random.default_rng(seed), ["b", "k", "f", "inner"])
    with mtf.Graph():
        x, w = mtf.input("x", [B, K]), mtf.variable("w", [K, F], numbers(dtype, (16, 24)), dtype)
        s = mtf.variable("s", [F], np.linspace(0.5, 2, 24, dtype=np.float32))
        y = dequantised(how, x, w, s)
        if not mtf.check({"y": y}, mesh=layout.mesh_text, layout=layout.rules_text).ok:
            return
        program = mtf.lower({"y": y}, mesh=layout.mesh_text, layout=layout.rules_text)
    for i in program.instructions:
        if isinstance(i, Move) and i.is_collective:
            before = i.inputs[0]
            if {"k", "f"} <= set(before.tensor.shape.names) or {"inner", "f"} <= set(before.tensor.shape.names):
                assert before.tensor.dtype.name == dtype, f"{dtype} {how} {layout}: {i}"
    fed = np.random.default_rng(1).normal(size=(8, 16)).astype(np.float32)
    wanted = fed @ numbers(dtype, (16, 24)).astype(np.float64) * np.linspace(0.5, 2, 24)
    for executor in ("exact", "fast"):
        found = mtf.simulate(program, executor=executor).step(x=fed)["y"]
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("dtype", NARROW)
def test_stacked_weights_of_a_scan_are_gathered_narrow(dtype: str) -> None:
    layers, wide = D("layers", 3), D("b", 64)
    with mtf.Graph():
        x, w = mtf.input("x", [wide, K]), mtf.variable("w", [layers, K, D("k_out", 16)], dtype=dtype)

        def body(c: tuple[mtf.Tensor, ...], s: tuple[mtf.Tensor, ...]) -> tuple[Any, Any]:
            y = mtf.einsum([c[0], mtf.cast(s[0], "float32")])
            return (mtf.rename_dimension(mtf.tanh(y), "k_out", "k"),), ()

        (y,), _ = mtf.scan(body, [x], [w], layers)
        program = mtf.lower({"y": y}, mesh="p:4", layout="b:p;variables/k_out:p")
    (gather,) = program.collectives
    assert (gather.kind, gather.dtype, gather.count) == ("all_gather", dtype, 3)
    assert gather.payload_bytes == as_dtype(dtype).size_bytes(16 * 4)
    report = mtf.verify({"y": y}, layouts=[("p:4", "b:p;variables/k_out:p"), ("p:2;q:2", "k:p;k_out:q")])
    report.raise_for_failures()


def test_a_table_of_bytes_is_looked_up_where_it_lies() -> None:
    words = D("words", 32)
    for dtype in NARROW:
        with mtf.Graph():
            table, ids = mtf.variable("w", [words, K], numbers(dtype, (32, 16)), dtype), mtf.input("ids", [B], "int32")
            y = mtf.cast(mtf.gather(table, ids, words), "float32")
            program = mtf.lower({"y": y}, mesh="p:4", layout="words:p")
        # Each core has some of the rows, the others are zero: their sum is taken in the narrow type.
        assert {c.dtype for c in program.collectives} == {dtype}
        at = np.arange(8, dtype=np.int32) * 3
        for executor in ("exact", "fast"):
            found = mtf.simulate(program, executor=executor).step(ids=at)["y"]
            np.testing.assert_array_equal(found, numbers(dtype, (32, 16))[at].astype(np.float32))


# ---------------------------------------------------------------- products of narrow operands


@given(st.sampled_from(NARROW), st.sampled_from(NARROW), st.integers(0, 10**6))
def test_products_of_narrow_operands(first: str, second: str, seed: int) -> None:
    """Of integers exact in int32, of fp8 in float32, under any layout; of both together an error."""
    layout = draw_layout(np.random.default_rng(seed), ["b", "k", "f"])
    with mtf.Graph():
        x, w = mtf.input("x", [B, K], first), mtf.variable("w", [K, F], numbers(second, (16, 24), 2), second)
        if as_dtype(first).is_float is not as_dtype(second).is_float:
            with pytest.raises(mtf.ShapeError, match=f"dtypes {first} and {second}; cast one"):
                mtf.einsum([x, w])
            return
        y = mtf.einsum([x, w])
        if not mtf.check({"y": y}, mesh=layout.mesh_text, layout=layout.rules_text).ok:
            return
        program = mtf.lower({"y": y}, mesh=layout.mesh_text, layout=layout.rules_text)
    fed = numbers(first, (8, 16), 1)
    wanted = fed.astype(np.float64) @ numbers(second, (16, 24), 2).astype(np.float64)
    for executor in ("exact", "fast"):
        found = mtf.simulate(program, executor=executor).step(x=fed)["y"]
        if found.dtype == np.int32:
            np.testing.assert_array_equal(found, wanted)
        else:
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def test_sums_of_integers_wrap() -> None:
    long = D("long", 1 << 18)
    with mtf.Graph():
        x = mtf.constant(-128, [long], "int8")
        y = mtf.einsum([x, mtf.constant(-128, [long], "int8")], [])
        program = mtf.lower({"y": y}, mesh="p:2", layout="long:p")
    assert int(mtf.simulate(program).step()["y"]) == (2**14 * 2**18 + 2**31) % 2**32 - 2**31


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_gradients_pass_a_cast_to_fp8_as_if_nothing_were_rounded(dtype: str) -> None:
    rng = np.random.default_rng(3)
    fed = {"x": rng.normal(size=(8, 16)), "w": rng.normal(size=(16, 24)), "dy": rng.normal(size=(8, 24))}
    with mtf.Graph():
        x, w, dy = mtf.input("x", [B, K]), mtf.input("w", [K, F]), mtf.input("dy", [B, F])
        y = mtf.einsum([mtf.cast(x, dtype), mtf.cast(w, dtype)])
        dx, dw = mtf.gradients([y], [x, w], [dy])
        program = mtf.lower({"y": y, "dx": dx, "dw": dw}, mesh="p:2;q:2", layout="b:p;k:q")
    found = mtf.simulate(program).step(fed)
    to = as_dtype(dtype).public
    at = {n: v.astype(np.float32).astype(to).astype(np.float64) for n, v in fed.items() if n != "dy"}
    half = fed["dy"].astype(ml_dtypes.bfloat16).astype(np.float64)
    for name, wanted in {"y": at["x"] @ at["w"], "dx": half @ at["w"].T, "dw": at["x"].T @ half}.items():
        np.testing.assert_allclose(found[name], wanted, rtol=0, atol=2**-7 * np.abs(wanted).max(), err_msg=name)
        assert found[name].dtype == np.float32


def test_cotangents_of_fp8_are_bfloat16() -> None:
    with mtf.Graph():
        x, w = mtf.input("x", [B, K], "float8_e4m3fn"), mtf.variable("w", [K, F], dtype="float8_e5m2")
        y = mtf.einsum([x, mtf.where(mtf.greater(w, 0), w, -1)])
        found = mtf.gradients([mtf.reduce_sum(y)], [x, w])
        assert [g.dtype.name for g in found if g is not None] == ["bfloat16", "bfloat16"]
        with pytest.raises(mtf.ShapeError, match="does not have the type"):
            mtf.gradients([x], [x], [mtf.zeros([B, K], "float8_e4m3fn")])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_variable_in_fp8_trains(dtype: str) -> None:
    """Small steps add up in the float32 master weights beside it."""
    rng = np.random.default_rng(4)
    fed, target = rng.normal(size=(8, 16)), rng.normal(size=(8, 24))
    with mtf.Graph():
        x, t = mtf.input("x", [B, K]), mtf.input("t", [B, F])
        w = mtf.variable("w", [K, F], dtype=dtype)
        loss = mtf.reduce_mean(mtf.square(mtf.einsum([x, mtf.cast(w, "float32")]) - t))
        train = mtf.optimize.AdamOptimizer(0.02).minimize(loss)
        sim = mtf.simulate(mtf.lower({"loss": loss}, train, mesh="p:4", layout="b:p;k:p?"))
    assert sim.state["w/master"].dtype == np.float32
    losses = [float(sim.step(x=fed, t=target)["loss"]) for _ in range(40)]
    assert losses[-1] < 0.4 * losses[0]
    np.testing.assert_array_equal(sim.state["w"], sim.state["w/master"].astype(as_dtype(dtype).public))


# ---------------------------------------------------------------- quantising


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("layout", ["", "k:p", "f:p", "k:p;f:q"])
def test_quantised_by_channel(dtype: str, layout: str) -> None:
    given_ = np.random.default_rng(5).normal(size=(16, 24)) * np.geomspace(0.01, 100, 24)
    given_[:, 3] = 0
    with mtf.Graph():
        x = mtf.input("x", [K, F], "float64")
        q, s = mtf.quantize(x, K, dtype)
        program = mtf.lower({"q": q, "s": s}, mesh="p:2;q:2", layout=layout)
    found = mtf.simulate(program).step(x=given_)
    most = {"int8": 127, "int4": 7, "float8_e4m3fn": 448, "float8_e5m2": 57344}[dtype]
    unit = np.abs(given_).max(0) / most
    unit[3] = 1
    np.testing.assert_allclose(found["s"], unit, rtol=1e-15)
    near = given_ / unit
    wanted = np.rint(near) if dtype.startswith("int") else near.astype(np.float32).astype(as_dtype(dtype).public)
    np.testing.assert_array_equal(found["q"].astype(np.float64), wanted.astype(np.float64))


# ---------------------------------------------------------------- files


def test_checkpoints_hold_narrow_types(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    codes = {"int8": "I8", "int4": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
    with mtf.Graph():
        made = {t: mtf.variable(t, [D("odd", 7), K], numbers(t, (7, 16)), t) for t in NARROW}
        kept = {t: mtf.identity(v) for t, v in made.items()}
        sim = mtf.simulate(mtf.lower(kept, mesh="p:2", layout="k:p"))
        blank = {t: mtf.variable(f"other/{t}", [D("odd", 7), K], 0, t) for t in NARROW}
        other = mtf.simulate(mtf.lower({**kept, **{f"o_{t}": mtf.identity(v) for t, v in blank.items()}}), seed=9)
    mtf.save(sim, path)
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    for t in NARROW:  # read by hand, as any reader of the format would
        entry = header[t]
        assert (entry["dtype"], entry["shape"]) == (codes[t], [7, 16])
        begin, end = entry["data_offsets"]
        seen = np.frombuffer(raw[8 + size + begin : 8 + size + end], np.int8 if "int" in t else as_dtype(t).public)
        np.testing.assert_array_equal(seen.reshape(7, 16).astype(float), numbers(t, (7, 16)).astype(float))
        other.state[t] = np.zeros((7, 16), np.int8 if "int" in t else np.float32)
    mtf.load(path, other, only=list(NARROW))
    for t in NARROW:
        np.testing.assert_array_equal(other.state[t], numbers(t, (7, 16)))
    with mtf.Graph():  # a file of int8 for a variable of int4
        wide = mtf.variable("int4", [D("odd", 7), K], numbers("int8", (7, 16)), "int8")
        mtf.save(mtf.simulate(mtf.lower({"y": mtf.identity(wide)})), path)
    with pytest.raises(mtf.CheckpointError, match=r"element \d+ of int4 variable 'int4' is -?\d+"):
        mtf.load(path, other, only=["int4"])


# ---------------------------------------------------------------- what it costs


@pytest.mark.parametrize("dtype", ["bfloat16", *NARROW])
def test_a_step_of_decoding_reads_the_bytes_of_its_weights(dtype: str) -> None:
    d, f, b = D("d", 8192), D("f", 8192), D("batch", 8)
    with mtf.Graph():
        x = mtf.input("x", [b, d], "bfloat16")
        w, s = mtf.variable("w", [d, f], dtype=dtype), mtf.variable("s", [f], dtype="bfloat16")
        y = mtf.einsum([x, mtf.cast(w, "bfloat16")]) * s
        est = mtf.estimate(mtf.lower({"y": y}, mesh="p:1"), "v5e-1")
    size = as_dtype(dtype).itemsize * 8192**2
    assert est.program.memory.by_kind["variables"] == size + 2 * 8192
    assert est.slice.hbm_bytes_per_second_per_device * est.engine_seconds["hbm"] * est.slice.chip.hbm_efficiency == (
        pytest.approx(size, rel=0.02)
    )
    assert est.memory.peak_bytes == pytest.approx(size, rel=0.02)


@pytest.mark.parametrize(("dtype", "rate"), [("int8", "int8"), ("int4", "int4"), ("float8_e4m3fn", "fp8")])
def test_products_run_at_the_rate_of_the_type(dtype: str, rate: str) -> None:
    n = D("n", 8192)
    with mtf.Graph():
        x, w = mtf.input("x", [n, D("k", 8192)], dtype), mtf.input("w", [D("k", 8192), D("m", 8192)], dtype)
        program = mtf.lower({"y": mtf.einsum([x, w])}, mesh="p:1")
    slice_ = {"fp8": "v6e-1"}.get(rate, "v5e-1")
    est = mtf.estimate(program, slice_)
    least = program.work.mxu_flops / est.slice.peak_flops(rate)
    assert least <= est.engine_seconds["mxu"] < 1.2 * least
    (row,) = (r for r in est.rows if r.mxu_dtype)
    assert row.mxu_dtype == rate
    with pytest.raises(mtf.SliceError, match=f"no published {rate} rate; it has bf16"):
        mtf.estimate(mtf.lower({"y": mtf.einsum([x, w])}, mesh="p:8"), "v3-8")


# ---------------------------------------------------------------- what can't be


def _x(dtype: str) -> mtf.Tensor:
    return mtf.input("x", [B, K], dtype)


@pytest.mark.parametrize(
    ("build", "pattern"),
    [
        (lambda: _x("int8") + mtf.zeros([K], "int8"), "add .*needs numbers, got int8; cast them"),
        (lambda: _x("int4") * 2, "needs numbers, got int4"),
        (lambda: mtf.exp(_x("float8_e4m3fn")), "needs a float operand, got float8_e4m3fn; cast it with mtf.cast"),
        (lambda: mtf.reduce_sum(_x("float8_e5m2")), r"got float8_e5m2; cast first, as in mtf.cast\(x, 'float32'\)"),
        (lambda: mtf.reduce_sum(_x("int8")), r"got int8; cast first, as in mtf.cast\(x, 'int32'\)"),
        (lambda: mtf.cumsum(_x("int8"), K), "got int8; cast first"),
        (lambda: mtf.einsum([_x("int8"), mtf.input("w", [K, F])]), "dtypes int8 and float32; cast one"),
        (lambda: mtf.einsum([_x("int8"), mtf.input("w", [K, F], "int8")], precision="int8"), "precision 'int8' is for"),
        (
            lambda: mtf.einsum([_x("int8"), mtf.input("w", [K, F], "int8")], dtype="float32"),
            "the result's dtype must be int32, as every sum of integers is; cast it after, got float32",
        ),
        (
            lambda: mtf.einsum([_x("float32"), mtf.input("w", [K, F])], dtype="int8"),
            "the result's dtype must be a float dtype to compute in, got int8",
        ),
        (lambda: mtf.quantized_einsum([_x("int8"), mtf.input("w", [K, F], "int8")], [B, F]), "needs float operands"),
        (lambda: mtf.quantize(_x("int8"), K), "quantize .*needs a float tensor"),
        (lambda: mtf.quantize(_x("float32"), K, "bfloat16"), "dtype must be int8, int4, .* got bfloat16"),
        (lambda: mtf.quantize(_x("float32"), F), "reduced dims f:24 are not in x"),
        (lambda: mtf.constant(200, [K], "int8"), "the number 200 does not fit int8"),
        (lambda: mtf.constant(500.0, [K], "float8_e4m3fn"), "the number 500.0 does not fit float8_e4m3fn"),
        (lambda: mtf.constant(np.array([1, 9]), [D("two", 2)], "int4"), "the number 9 of the array does not fit int4"),
        (lambda: mtf.random_normal([K], dtype="float8_e4m3fn"), "needs a float dtype to compute in"),
        (lambda: mtf.variable("w", [K], dtype="fp8"), "unknown dtype 'fp8'"),
        (lambda: mtf.variable("w", [K], np.full(16, 300), "int8"), "value 300 does not fit int8"),
        (
            lambda: mtf.Numerics(activation_dtype="float8_e4m3fn"),
            "activation_dtype must be a float dtype to",
        ),
        (
            lambda: mtf.optimize.SgdOptimizer(0.1).apply_grads(
                [mtf.zeros([K])], [mtf.variable("w", [K], dtype="int8")]
            ),
            "is not a float variable and can't be trained",
        ),
    ],
)
def test_a_mistake_is_explained(build: Any, pattern: str) -> None:
    with mtf.Graph(), pytest.raises(mtf.MeshlibError, match=pattern):
        build()


@pytest.mark.parametrize(
    ("dtype", "value", "pattern"),
    [
        ("int8", np.full((8, 16), 128), "value 128 does not fit int8"),
        ("int4", np.full((8, 16), -9), "value -9 does not fit int4"),
        ("int4", np.zeros((8, 16)), "expected int4, got float64"),
        ("float8_e4m3fn", np.full((8, 16), 1000.0), "the number 1000 .* does not fit float8_e4m3fn"),
        ("float8_e4m3fn", np.zeros((8, 16), int), "expected float8_e4m3fn, got int64"),
    ],
)
def test_what_is_fed_must_fit(dtype: str, value: Array, pattern: str) -> None:
    with mtf.Graph():
        sim = mtf.simulate(mtf.lower({"y": mtf.cast(_x(dtype), "float32")}))
    with pytest.raises(mtf.FeedError, match=pattern):
        sim.step(x=value)


# ---------------------------------------------------------------- rings


def hop_by_hop(parts: np.ndarray, dtype: Any) -> np.ndarray:
    """The sum over the first dim as a ring makes it, cut into as many chunks as there are parts: chunk c starts at part
    c + 1, and each next part adds its own in float32 and rounds before it sends on.
    """
    count = len(parts)
    chunks = np.split(parts.astype(np.float32), count, axis=1)
    made = []
    for c, chunk in enumerate(chunks):
        total = chunk[(c + 1) % count]
        for hop in range(2, count + 1):
            total = (total + chunk[(c + hop) % count]).astype(dtype).astype(np.float32)
        made.append(total)
    return np.concatenate(made)


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("cores", [2, 3, 8])
def test_a_ring_rounds_at_each_hop(cores: int, kind: str) -> None:
    part, n = mtf.Dimension("part", cores), mtf.Dimension("n", 8 * cores)
    x = np.random.default_rng(cores).normal(size=(cores, n.size)).astype(ml_dtypes.bfloat16)
    x[:, 0] = np.resize([8.0, 0.03125], cores)  # what is added last would not show in a sum that is rounded once
    with mtf.Graph():
        y = mtf.reduce_sum(mtf.input("x", [part, n], "bfloat16"), reduced_dim=part)
        if kind == "reduce_scatter":
            y = mtf.constrain(y, "n:m")
        program = mtf.lower({"y": y}, mesh=f"m:{cores}", layout="part:m")
    assert [c.kind for c in program.collectives] == [kind]
    found = np.asarray(mtf.simulate(program, executor="exact").step(x=x)["y"], np.float32)
    wanted = hop_by_hop(x, ml_dtypes.bfloat16)
    np.testing.assert_array_equal(found, wanted)
    if cores > 2:
        once = x.astype(np.float32).sum(0).astype(ml_dtypes.bfloat16).astype(np.float32)
        assert (found != once).any()


@pytest.mark.parametrize(
    ("dtype", "low", "high"), [("int32", -(2**31), 2**31 - 1), ("int8", -128, 127), ("int4", -8, 7)]
)
def test_casts_to_integers_take_the_nearest_and_no_number_is_zero(dtype: str, low: int, high: int) -> None:
    """As XLA does; NumPy makes the least number of all that does not fit."""
    x = np.array([np.inf, -np.inf, np.nan, 3e10, -3e10, 2.7, -2.7, 0.0], np.float32)
    with mtf.Graph():
        y = mtf.cast(mtf.input("x", [mtf.Dimension("n", 8)]), dtype)
        program = mtf.lower({"y": y}, mesh="a:2", layout="n:a")
    expected = [high, low, 0, high, low, 2, -2, 0]
    for executor in ("fast", "exact"):
        sim = mtf.simulate(program, executor=executor, check_nan=False)
        assert sim.step(x=x)["y"].tolist() == expected
    if importlib.util.find_spec("jax") is not None:
        assert np.asarray(mtf.on_jax(program, checked=False).step(x=x)["y"]).tolist() == expected
