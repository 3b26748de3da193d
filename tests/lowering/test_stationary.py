"""Axes over which variables stay: activations come to the weights even where gathering a weight would send less."""

from __future__ import annotations

import numpy as np
import pytest

import meshlib as mtf
from tests.compilers import FREE_WEIGHTS

D = mtf.Dimension
BATCH, LENGTH, MODEL, HEADS = D("batch", 16), D("length", 64), D("d_model", 64), D("heads", 64)


def program(compiler: mtf.Compiler) -> mtf.Program:
    """A small weight and large activations, split by heads inside and by length outside."""
    with mtf.Graph():
        x = mtf.input("x", [BATCH, LENGTH, MODEL], "bfloat16")
        w = mtf.variable("w", [MODEL, HEADS], activation_dtype="bfloat16")
        y = mtf.einsum([x, w], [BATCH, LENGTH, HEADS], name="product")
        outputs = {"y": mtf.sin(y)}
        return mtf.lower(
            outputs, mesh="data:2;tensor:4", layout="batch:data;heads:tensor;length:tensor?", compiler=compiler
        )


def test_weights_move_unless_told_to_stay():
    free, held = program(FREE_WEIGHTS), program(mtf.XLA_TPU)
    assert {(c.kind, c.tensor) for c in held.collectives} == {("all_gather", "x")}
    assert "w/cast" in {c.tensor for c in free.collectives}  # the weight, in bfloat16
    assert free.sent_bytes < held.sent_bytes


def test_inside_loops_too():
    layers = D("layers", 3)

    def build(compiler: mtf.Compiler) -> mtf.Program:
        with mtf.Graph():
            x = mtf.input("x", [BATCH, LENGTH, MODEL], "bfloat16")
            w = mtf.variable("w", [layers, MODEL, HEADS], activation_dtype="bfloat16")

            def body(carries, slices):
                y = mtf.einsum([carries[0], slices[0]], [BATCH, LENGTH, HEADS])
                return [carries[0] + mtf.reduce_sum(y, reduced_dim=HEADS)], []

            (y,), _ = mtf.scan(body, [x], [w], layers)
            layout = "batch:data;heads:tensor;length:tensor?"
            return mtf.lower({"y": y}, mesh="data:2;tensor:4", layout=layout, compiler=compiler)

    free, held = build(FREE_WEIGHTS), build(mtf.XLA_TPU)
    weight = 64 * 64 // 4 * 2  # one device's part of a layer's, in bfloat16
    assert ("all_gather", weight) in {(c.kind, c.payload_bytes) for c in free.collectives}
    assert ("all_gather", weight) not in {(c.kind, c.payload_bytes) for c in held.collectives}
    assert {c.kind for c in held.collectives} == {"all_gather", "reduce_scatter"}


def test_results_are_the_same():
    values = np.random.default_rng(0).standard_normal((16, 64, 64)).astype(np.float32)
    results = []
    for compiler in (FREE_WEIGHTS, mtf.XLA_TPU):
        sim = mtf.simulate(program(compiler), seed=1)
        results.append(np.asarray(sim.step(x=values)["y"], np.float32))
    assert results[0] == pytest.approx(results[1], abs=1e-2)
