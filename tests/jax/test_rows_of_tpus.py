"""Rows that differ on TPUs, run on this machine's devices: sums of few terms, numbers selected or gathered."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

pytest.importorskip("jax", reason="needs JAX: pip install -e '.[jax]'")

import meshlib as mtf
import meshlib.jax.rows
from meshlib.jax import step
from meshlib.jax.step import Step
from tests.oracle import Array

D = mtf.Dimension


def lowered(monkeypatch: pytest.MonkeyPatch, program: mtf.Program, platform: str) -> str:
    monkeypatch.setattr(step, "platform_of", lambda mesh: platform)
    return str(Step(program, None, False).lowered().as_text())


@pytest.mark.parametrize(
    ("summed", "is_added"), [("a", True), ("ab", True), ("c", False), ("abc", False), ("b", True), ("d", False)]
)
def test_few_terms_of_whole_tiles_are_added(monkeypatch: pytest.MonkeyPatch, summed: str, is_added: bool) -> None:
    dims = [D("a", 3), D("b", 4), D("c", 5), D("d", 6)]
    with mtf.Graph():
        x = mtf.input("x", dims, "bfloat16")
        y = mtf.reduce_sum(x, output_shape=[d for d in reversed(dims) if d.name not in summed])
        program = mtf.lower({"y": y}, mesh="m:1")
    assert ("stablehlo.reduce(" not in lowered(monkeypatch, program, "tpu")) == is_added
    assert "stablehlo.reduce(" in lowered(monkeypatch, program, "cpu")
    given = np.random.default_rng(0).normal(size=(3, 4, 5, 6))
    monkeypatch.setattr(step, "platform_of", lambda mesh: "tpu")
    result = np.asarray(mtf.on_jax(program).step({"x": given})["y"], "float32")
    np.testing.assert_allclose(
        result, mtf.simulate(program).step({"x": given})["y"].astype("float32"), rtol=1e-2, atol=1e-2
    )


def looked_up(table: Sequence[int], index: Sequence[int]) -> tuple[mtf.Program, dict[str, Array]]:
    """A program that looks up one number for each index: the last dim of the table, others shared."""
    rows = [D("r", n) for n in table[:-1]]
    numbers, indices = D("n", table[-1]), [*rows, D("i", index[-1])] if len(index) > len(rows) else rows
    with mtf.Graph():
        x, at = mtf.input("x", [*rows, numbers]), mtf.input("at", indices, "int32")
        program = mtf.lower({"y": mtf.gather(x, at, numbers)}, mesh="m:1")
    rng = np.random.default_rng(0)
    return program, {"x": rng.normal(size=table).astype("float32"), "at": rng.integers(0, table[-1], index)}


@pytest.mark.parametrize(
    ("table", "index", "gathers"),
    [((2048,), (4096,), False), ((2, 4096), (2,), False), ((4096,), (64,), True), ((2, 4096), (2, 64), True)],
)
def test_numbers_are_selected_where_that_takes_less_time(
    monkeypatch: pytest.MonkeyPatch, table: tuple[int, ...], index: tuple[int, ...], gathers: bool
) -> None:
    """A number selected from n takes a TPU n/1,024 x 4 bundles, a gathered one 8, and its table is stored."""
    program, feeds = looked_up(table, index)
    assert ("stablehlo.gather" in lowered(monkeypatch, program, "tpu")) == gathers
    wanted = mtf.simulate(program).step(feeds)["y"]
    np.testing.assert_array_equal(mtf.on_jax(program).step(feeds)["y"], wanted)
