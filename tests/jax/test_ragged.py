"""Grouped products against `lax.ragged_dot`: values and gradients under random sizes and layouts, and on JAX."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest

import meshlib as mtf
from tests.effort import draws

jax = pytest.importorskip("jax", reason="needs JAX: pip install -e '.[jax]'")

from meshlib.jax.rows import ragged as rows_of_jax  # noqa: E402

D = mtf.Dimension
Array = np.ndarray[Any, Any]
MESH = "a:2;b:2"
ROWS, GROUPS, IN, OUT = D("rows", 16), D("groups", 4), D("d_in", 4), D("d_out", 6)
LAYOUTS = [
    ";".join(f"{dim}:{axes}" for dim, axes in of.items())
    for of in (
        {}, {"rows": "a"}, {"groups": "a+b"}, {"groups": "a", "rows": "b"}, {"groups": "b", "d_out": "a"},
        {"d_in": "a", "rows": "b"}, {"d_in": "a+b"}, {"d_out": "a", "d_in": "b?"}, {"groups": "a", "d_in": "b?"},
    )
]  # fmt: skip


@cache
def session() -> mtf.Session:
    with mtf.Graph():
        x, w = mtf.input("x", [ROWS, IN]), mtf.input("w", [GROUPS, IN, OUT])
        y = mtf.ragged_dot(x, w, mtf.input("sizes", [GROUPS], "int32"), ROWS, GROUPS)
        dx, dw = mtf.gradients([y], [x, w], [mtf.input("dy", y.shape)])
        return mtf.Session({"y": y, "dx": dx, "dw": dw})


@cache
def lowered(layout: str) -> mtf.Program:
    return session().lower(MESH, layout, precision="highest")


@jax.jit
def reference(x: Any, w: Any, sizes: Any, dy: Any) -> Any:
    y, back = jax.vjp(lambda x, w: jax.lax.ragged_dot(x, w, sizes, precision=jax.lax.Precision.HIGHEST), x, w)
    return (y, *back(dy))


def drawn(rng: np.random.Generator) -> dict[str, Array]:
    """Operands; sizes of any kind: all rows in one group, none, empty groups at either end, rows left over."""
    filled = rng.integers(0, ROWS.size + 1) if rng.random() < 0.5 else ROWS.size
    shares = rng.dirichlet(np.full(GROUPS.size, rng.choice([0.1, 1.0, 20.0])))
    shapes = {"x": [ROWS, IN], "w": [GROUPS, IN, OUT], "dy": [ROWS, OUT]}
    arrays = {n: rng.normal(size=[d.size for d in dims]).astype(np.float32) for n, dims in shapes.items()}
    return {**arrays, "sizes": rng.multinomial(filled, shares).astype(np.int32)}


def test_values_and_gradients_are_those_of_ragged_dot() -> None:
    rng = np.random.default_rng(0)
    for n in range(draws(100, 1000)):
        feeds, layout = drawn(rng), LAYOUTS[n % len(LAYOUTS)]
        executor = "exact" if n % 3 == 0 else "fast"
        found = mtf.simulate(lowered(layout), executor=executor).step(feeds)
        for name, wanted in zip(
            ("y", "dx", "dw"), reference(*(feeds[k] for k in ("x", "w", "sizes", "dy"))), strict=True
        ):
            np.testing.assert_allclose(found[name], wanted, atol=2e-5, err_msg=f"{name} {layout!r} {feeds['sizes']}")


def test_gradients_of_narrow_matrices_by_the_kernel_of_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows of three senders, whose products a loop adds up: several tiles, empty groups, rows of no group."""
    monkeypatch.setattr(rows_of_jax, "INTERPRETED", True)
    senders, rows = D("senders", 3), D("rows", 600)
    with mtf.Graph():
        x, w = mtf.input("x", [senders, rows, IN], "bfloat16"), mtf.input("w", [GROUPS, IN, OUT], "bfloat16")
        y = mtf.ragged_dot(x, w, mtf.input("sizes", [senders, GROUPS], "int32"), rows, GROUPS)
        (dw,) = mtf.gradients([y], [w], [mtf.input("dy", y.shape, "bfloat16")])
        program = mtf.lower({"dw": dw}, mesh="a:2", layout="groups:a")
    rng = np.random.default_rng(2)
    feeds = {"sizes": np.array([[300, 260, 0, 20], [0, 5, 530, 65], [0, 0, 0, 0]], np.int32)}
    feeds |= {name: rng.normal(size=program.inputs[name].tensor.shape.sizes) for name in ("x", "dy")}
    with mock.patch.object(rows_of_jax, "summed_by_group", side_effect=rows_of_jax.summed_by_group) as kernel:
        on_jax = mtf.on_jax(program).step(feeds)["dw"]
    assert [call.args[3] is None for call in kernel.call_args_list] == [True, False]
    np.testing.assert_allclose(on_jax, mtf.simulate(program).step(feeds)["dw"], rtol=0.02, atol=0.1)


def test_precision_is_asked_for_of_wide_operands_alone() -> None:
    """The TPU's kernel for grouped products does not compile otherwise."""
    from meshlib.jax.rows.ragged import _one

    def said(dtype: Any) -> str:
        x, w, bounds = jax.numpy.zeros((8, 4), dtype), jax.numpy.zeros((2, 4, 4), dtype), np.array([0, 4], np.int32)
        return str(jax.make_jaxpr(lambda x, w: _one(x, w, bounds, bounds + 4, False, False))(x, w))

    assert "HIGHEST" in said("float32")
    assert "HIGHEST" not in said("bfloat16")


def test_work_is_that_of_the_rows() -> None:
    """Not that of a product for each group; of split groups each device counts its share."""
    product = 2 * ROWS.size * IN.size * OUT.size
    for layout, parts in (("", 1), ("groups:a+b", 4), ("rows:a", 2), ("d_in:a", 2)):
        program = lowered(layout)
        rows = mtf.estimate(program, "v5e-4").rows
        flops = [r.mxu_flops for r in rows if "ragged_dot" in r.name]
        assert sum(flops) == 3 * 6 * product // parts, layout  # three products, six passes of float32


def test_tiles_are_counted_for_each_group() -> None:
    """16,384 rows in tiles of 512: 32, and 7 in which two of 8 groups meet are computed twice."""
    rows, groups, d = D("rows", 16_384), D("groups", 8), D("d", 1024)

    def seconds(groups: mtf.Dimension) -> float:
        with mtf.Graph():
            x, w = mtf.input("x", [rows, d], "bfloat16"), mtf.input("w", [groups, d, D("f", 4096)], "bfloat16")
            y = mtf.ragged_dot(x, w, mtf.input("sizes", [groups], "int32"), rows, groups)
            estimate = mtf.estimate(mtf.lower({"y": y}), "v5e-1")
        (row,) = [r for r in estimate.rows if r.mxu_flops]
        assert row.mxu_flops == 2 * rows.size * d.size * 4096
        return row.mxu_seconds

    assert seconds(groups) / seconds(D("groups", 1)) == pytest.approx(39 / 32, rel=0.01)


MISTAKES = {
    "sizes of floats": (lambda x, w, n: mtf.ragged_dot(x, w, mtf.cast(n, "float32"), ROWS, GROUPS), "must be int32"),
    "no such rows": (lambda x, w, n: mtf.ragged_dot(x, w, n, "row", GROUPS), "rows 'row' is not a dim of"),
    "another size": (lambda x, w, n: mtf.ragged_dot(x, w, n, D("rows", 8), GROUPS), "rows:8 has size 16"),
    "no groups": (lambda x, w, n: mtf.ragged_dot(x, mtf.reduce_sum(w, reduced_dim=GROUPS), n, ROWS, GROUPS),
                  "w must have the groups groups:4"),
    "a result without rows": (lambda x, w, n: mtf.ragged_dot(x, w, n, ROWS, GROUPS, [OUT]), "it lacks rows:16"),
    "a result with groups": (lambda x, w, n: mtf.ragged_dot(x, w, n, ROWS, GROUPS, [ROWS, GROUPS, OUT]),
                             "groups:4 can't be in it"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake: str) -> None:
    call, words = MISTAKES[mistake]
    with mtf.Graph():
        x, w = mtf.input("x", [ROWS, IN]), mtf.input("w", [GROUPS, IN, OUT])
        sizes = mtf.input("sizes", [GROUPS], "int32")
        with pytest.raises(mtf.ShapeError, match=words) as raised:
            call(x, w, sizes)
    assert "test_ragged.py:" in str(raised.value)
