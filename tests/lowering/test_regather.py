"""Weights that are split for their memory, edges of split images: fetched again for the backward pass, or kept."""

from __future__ import annotations

import numpy as np
import pytest

import meshlib as mtf

LAYOUT = "batch:data; variables/d:data"
BATCH, D, H = mtf.Dimension("batch", 256), mtf.Dimension("d", 64), mtf.Dimension("h", 64)


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


def _image_step(stride: int) -> tuple[dict[str, mtf.Tensor], dict[str, np.ndarray]]:
    """A stem of 7 x 7, whose image has no gradient, and maxima of windows that overlap."""
    rng = np.random.default_rng(1)
    with mtf.Graph():
        x = mtf.input("x", mtf.Shape("batch:2;height:64;width:8;rgb:3").dims, "float64")
        w = mtf.input("w", mtf.Shape("kh:7;kw:7;rgb:3;channels:16").dims, "float64")
        y = mtf.max_pool(mtf.conv2d(x, w, stride), {"height": 3, "width": 3}, 2, "SAME")
        (dw,) = mtf.gradients([mtf.reduce_sum(mtf.square(y))], [w])
    assert dw is not None
    return {"y": y, "dw": dw}, {t.name: rng.normal(size=t.shape.sizes) for t in (x, w)}


def _edges(program: mtf.Program) -> list[tuple[str, float]]:
    return [(c.tensor, c.sent_bytes) for c in program.collectives if c.kind == "collective_permute"]


@pytest.mark.parametrize("stride", [1, 2])
def test_edges_of_blocks_fetched_once_or_twice(stride: int) -> None:
    """Kept, the stem's gradient needs none of dy: it has rows of the image."""
    outputs, feeds = _image_step(stride)
    again, kept = (
        mtf.lower(outputs, mesh="p:4", layout="height:p", precision="highest", regather=r) for r in (True, False)
    )
    element, width = 2 * 8, 8 // stride  # bytes of an element of each example, columns of what the stem makes
    image, row = 8 * 3 * element, width * 16 * element
    forward = [("x", (7 - stride) * image), ("conv2d", row)]
    # Of the maxima: their cotangent, and positions in their windows, a byte each.
    backward = _edges(kept)[len(forward) :]
    assert [sent for _, sent in backward] == [row // 2, row // 2 // 8]
    assert _edges(kept) == [*forward, *backward]
    assert sum(sent for _, sent in _edges(again)) > sum(sent for _, sent in _edges(kept)) + row
    wanted = mtf.simulate(mtf.lower(outputs, precision="highest"), executor="exact").step(feeds)
    for executor in ("exact", "fast"):
        found = mtf.simulate(kept, executor=executor).step(feeds)
        for name in wanted:
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-9, atol=1e-9)


def test_refuses_what_is_no_bool() -> None:
    with pytest.raises(mtf.GraphError, match="regather must be True or False, got str 'no'"):
        mtf.lower(*_step(), mesh="data:8", layout=LAYOUT, regather="no")  # type: ignore[arg-type]
