"""int8, int4 and fp8 on JAX's devices: the simulator's numbers, and collectives that carry the narrow type."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax", reason="needs JAX: pip install -e '.[jax]'")

import meshlib as mtf
from meshlib.core.dtypes import as_dtype
from tests.effort import some
from tests.jax.lowered import in_program, in_text
from tests.ops.test_narrow_types import NARROW, numbers

D = mtf.Dimension
B, K, F, W = D("b", 64), D("k", 16), D("f", 24), D("words", 8)


@pytest.mark.parametrize("dtype", some(NARROW, ["int4", "float8_e4m3fn"]))
def test_numbers_and_bytes_are_the_simulators(dtype: str, tmp_path: Path) -> None:
    with mtf.Graph():
        x, ids = mtf.input("x", [B, K], dtype), mtf.input("ids", [D("i", 4)], "int32")
        w, s = mtf.variable("w", [K, F], numbers(dtype, (16, 24)), dtype), mtf.variable("s", [F])
        table = mtf.variable("table", [W, F], numbers(dtype, (8, 24), 2), dtype)
        wide = mtf.cast(x, "float32")
        q, scale = mtf.quantize(wide * 0.25, K, dtype)
        made = {
            "product": mtf.einsum([x, w]),
            "weights": mtf.einsum([wide, mtf.cast(w, "float32")]) * s,
            "rows": mtf.gather(table, ids, W),
            "most": mtf.reduce_max(w, reduced_dim=K),
            "best": mtf.argmax(w, F),
            "chosen": mtf.where(mtf.greater(x, mtf.zeros([], dtype)), x, 1),
            "quantised": q,
            "scale": scale,
        }
        new = mtf.assign(w, mtf.cast(mtf.cast(w, "float32") * 0.5, dtype))
        program = mtf.lower(made, [new], mesh="p:4;q:2", layout="b:p;variables/k:p;words:q")
    fed = {"x": numbers(dtype, (64, 16), 1), "ids": np.array([7, 0, 3, 3], np.int32)}
    sim, run = mtf.simulate(program), mtf.on_jax(program)
    for _ in range(2):
        wanted, found = sim.step(fed), run.step(fed)
        for name, value in wanted.items():
            assert found[name].dtype == value.dtype, name
            a, b = found[name].astype(np.float64), value.astype(np.float64)
            close = name in ("weights", "product", "scale")
            np.testing.assert_allclose(a, b, rtol=1e-6 if close else 0, atol=1e-6 * np.abs(b).max() if close else 0)
    np.testing.assert_array_equal(run.state["w"], sim.state["w"])
    if dtype != "int4":  # which crosses as a byte where JAX packs none
        assert in_text(run.compiled()) == in_program(program)
    path = tmp_path / "state.safetensors"
    mtf.save(run, path)
    other = mtf.on_jax(program, seed=5)
    mtf.load(path, other)
    np.testing.assert_array_equal(other.state["w"].astype(float), sim.state["w"].astype(float))
    assert any(c.dtype == dtype and c.payload_bytes == as_dtype(dtype).size_bytes(4 * 24) for c in program.collectives)


def test_gradients_of_quantised_products_in_e5m2() -> None:
    with mtf.Graph():
        x, w = mtf.input("x", [B, K]), mtf.variable("w", [K, F])
        y = mtf.quantized_einsum([x, w], [B, F], "fp8", gradient_dtype="fp8_e5m2")
        (dx,) = mtf.gradients([y], [x], [mtf.input("dy", [B, F])])
        program = mtf.lower({"y": y, "dx": dx}, mesh="p:4", layout="b:p")
    rng = np.random.default_rng(0)
    fed = {"x": rng.normal(size=(64, 16)), "dy": rng.normal(size=(64, 24))}
    wanted, found = mtf.simulate(program).step(fed), mtf.on_jax(program).step(fed)
    for name in wanted:  # one number in a thousand may lie half way between two of the grid
        far = np.abs(found[name] - wanted[name]) > 1e-5 * np.abs(wanted[name]).max()
        assert far.mean() < 0.01
