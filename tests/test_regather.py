"""Weights that are split for their memory: gathered again for the backward pass, or kept."""

from __future__ import annotations

import numpy as np
import pytest

import meshlib as mtf

LAYOUT = "batch:data; variables/d:data"
BATCH, D, H = mtf.Dimension("batch", 1024), mtf.Dimension("d", 64), mtf.Dimension("h", 64)


def _step() -> tuple[dict[str, mtf.Tensor], list[mtf.Operation]]:
    with mtf.Graph():
        h = mtf.input("x", [BATCH, D])
        for name in ("first", "second", "third"):
            w = mtf.variable(name, [D, H])
            h = mtf.rename_dimension(mtf.relu(mtf.einsum([h, w], [BATCH, H])), "h", "d")
        loss = mtf.reduce_mean(mtf.square(h))
        return {"loss": loss}, mtf.optimize.SgdOptimizer(lr=0.1).minimize(loss)


def _gathers(program: mtf.Program) -> list[str]:
    return [c.phase for c in program.collectives if c.kind == "all_gather" for _ in range(c.count)]


def test_gathered_once_or_twice() -> None:
    again = mtf.lower(*_step(), mesh="data:8", layout=LAYOUT)
    kept = mtf.lower(*_step(), mesh="data:8", layout=LAYOUT, regather=False)
    # The first layer's weight is needed once: x has no gradient.
    assert _gathers(again) == ["forward"] * 3 + ["backward"] * 2
    assert _gathers(kept) == ["forward"] * 3
    gathered = 64 * 64 * 4 * 7 // 8
    assert again.sent_bytes - kept.sent_bytes == 2 * gathered
    assert kept.memory.peak_bytes > again.memory.peak_bytes


def test_same_numbers() -> None:
    x = np.random.default_rng(0).normal(size=(BATCH.size, D.size)).astype(np.float32)
    losses = []
    for mesh, regather in (("data:1", True), ("data:8", True), ("data:8", False)):
        simulation = mtf.simulate(mtf.lower(*_step(), mesh=mesh, layout=LAYOUT, regather=regather))
        losses.append([float(simulation.step({"x": x})["loss"]) for _ in range(3)])
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-5)


def test_refuses_what_is_no_bool() -> None:
    with pytest.raises(mtf.GraphError, match="regather must be True or False, got str 'no'"):
        mtf.lower(*_step(), mesh="data:8", layout=LAYOUT, regather="no")  # type: ignore[arg-type]
