"""What steps on JAX avoid so that the compiled program needs no more memory than the plan: read off the StableHLO.

How much each saves was measured with the TPU compiler, ahead of time: for GPT-2 XL on v5e-4 (fsdp) it needs 7.40 GiB
where the plan has 7.21, and 8.71 without these.
"""

# ruff: noqa: E402 (whatever needs JAX comes after a look whether it is there)

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs JAX: pip install -e '.[jax]'")

import meshlib as mtf
from meshlib.jax import step
from meshlib.jax.rows.index import _by_product, _selected
from meshlib.jax.rows.products import product
from meshlib.jax.step import Step
from tests.effort import deep

CASES = 200 if deep() else 20


def at_once(cases: list[tuple[Callable[..., jax.Array], list[np.ndarray]]]) -> list[jax.Array]:
    """The results of functions, each of operands of its own, compiled together."""
    functions, operands = zip(*cases, strict=True)
    return jax.jit(lambda all_of: [f(*xs) for f, xs in zip(functions, all_of, strict=True)])(operands)


def test_one_element_of_each_row_equals_a_gather() -> None:
    rng = np.random.default_rng(0)
    cases, expected = [], []
    for _ in range(CASES):
        rows = ["a", "b", "c"][: rng.integers(1, 4)]
        sizes = {n: int(rng.integers(1, 4)) for n in [*rows, "v"]}
        order = tuple(map(str, rng.permutation([*rows, "v"])))
        weights = rng.normal(size=[sizes[n] for n in order]).astype(np.float32)
        weights[rng.random(weights.shape) < 0.1] = np.inf
        chosen = rng.integers(0, sizes["v"], [sizes[n] for n in rows])
        out = tuple(map(str, rng.permutation(rows)))
        cases.append((partial(_selected, names=(order, tuple(rows)), dim="v", out=out), [weights, chosen]))
        moved = weights.transpose([order.index(n) for n in (*rows, "v")])
        wanted = np.take_along_axis(moved, chosen[..., None], -1)[..., 0]
        expected.append(wanted.transpose([rows.index(n) for n in out]))
    for result, wanted in zip(at_once(cases), expected, strict=True):
        np.testing.assert_array_equal(result, wanted)


def test_a_product_with_one_hots_looks_up_every_number_as_it_is() -> None:
    """Numbers of all sizes, those that only float32 has, infinities and NaN, which stay in their rows."""
    rng = np.random.default_rng(0)
    table = (rng.normal(size=(40, 3, 5)) * 2.0 ** rng.integers(-100, 126, (40, 3, 5))).astype(np.float32)
    table[3], table[7, 1, 2] = np.finfo(np.float32).max, -np.finfo(np.float32).max
    table[5, 0, 1], table[9, 2, 3], table[9, 2, 4] = np.inf, -np.inf, np.nan
    chosen = rng.integers(0, 40, (8, 60))
    np.testing.assert_array_equal(jax.jit(_by_product)(table, chosen), table[chosen])


def test_rows_of_small_tables_are_looked_up_by_a_product_on_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather stores T5's position biases in whole lanes: 128 MiB for 6 heads and 512 x 512 positions."""
    buckets, heads, q, k = (mtf.Dimension(*d) for d in (("buckets", 32), ("heads", 6), ("q", 16), ("k", 24)))
    with mtf.Graph():
        table, bucket = mtf.input("table", [buckets, heads]), mtf.input("bucket", [q, k], "int32")
        program = mtf.lower({"y": mtf.gather(table, bucket, buckets)}, mesh="m:2", layout="heads:m")
    given = np.random.default_rng(0).normal(size=(32, 6)), np.random.default_rng(1).integers(0, 32, (16, 24))
    feeds = dict(zip(("table", "bucket"), (given[0].astype(np.float32), given[1]), strict=True))
    for platform, gathers in (("cpu", True), ("tpu", False)):
        monkeypatch.setattr(step, "platform_of", lambda mesh, platform=platform: platform)
        assert ("stablehlo.gather" in str(Step(program, None, False).lowered().as_text())) == gathers
        y = mtf.on_jax(program, checked=False).step(**feeds)["y"]
        np.testing.assert_array_equal(y, feeds["table"][feeds["bucket"]])


def test_updates_of_small_tables_are_added_by_masked_sums_on_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scatter-add stores updates of T5's position biases in whole lanes: 2 GiB for 8 heads and 2,048 x 2,048."""
    buckets, heads, q, k = (mtf.Dimension(*d) for d in (("buckets", 32), ("heads", 6), ("q", 16), ("k", 24)))
    with mtf.Graph():
        table, bucket = mtf.input("table", [buckets, heads]), mtf.input("bucket", [q, k], "int32")
        y = mtf.gather(table, bucket, buckets)
        scale = mtf.input("scale", [heads, q, k])
        (gradient,) = mtf.gradients([mtf.reduce_sum(y * scale)], [table])
        outputs = {"gradient": gradient}
        programs = [mtf.lower(outputs, mesh="m:2", layout=layout) for layout in ("heads:m", "buckets:m", "q:m")]
    rng = np.random.default_rng(0)
    feeds = {"bucket": rng.integers(0, 30, (16, 24)), "scale": rng.normal(size=(6, 16, 24)).astype(np.float32)}
    feeds["scale"][3, 5, 7] = np.inf  # stays in its row
    wanted = np.zeros((32, 6))
    np.add.at(wanted, feeds["bucket"], feeds["scale"].transpose(1, 2, 0).astype(np.float64))
    for program in programs:
        for platform, scatters in (("cpu", True), ("tpu", False)):
            monkeypatch.setattr(step, "platform_of", lambda mesh, platform=platform: platform)
            assert ("stablehlo.scatter" in str(Step(program, None, False).lowered().as_text())) == scatters
            sums = mtf.on_jax(program, checked=False).step(**feeds)["gradient"]
            np.testing.assert_allclose(sums, wanted, rtol=1e-5, atol=1e-5)


def test_products_of_joined_dims_are_einsums() -> None:
    """Random names and orders: whichever dims are joined, the result is NumPy's."""
    rng = np.random.default_rng(1)
    cases, expected = [], []
    for _ in range(CASES):
        names = list("abcdef")
        a, b = (tuple(map(str, rng.permutation(rng.choice(names, rng.integers(1, 6), replace=False)))) for _ in "ab")
        both = [n for n in names if n in a or n in b]
        out = tuple(map(str, rng.permutation(rng.choice(both, rng.integers(0, len(both) + 1), replace=False))))
        sizes = {n: int(rng.integers(1, 4)) for n in names}
        x, y = (rng.integers(-3, 4, [sizes[n] for n in ns]).astype(np.float32) for ns in (a, b))
        cases.append((lambda x, y, a=a, b=b, out=out: product(x, y, a, b, out), [x, y]))
        expected.append(np.einsum(f"{''.join(a)},{''.join(b)}->{''.join(out)}", x, y))
    for result, wanted in zip(at_once(cases), expected, strict=True):
        np.testing.assert_array_equal(result, wanted)


@pytest.fixture(scope="module")
def text() -> str:
    """The StableHLO of a training step of a small decoder whose weights are sharded along d_model."""
    config = mtf.models.preset("gpt2-xl").reduced()
    with mtf.Graph():
        outputs, updates = mtf.models.train_step(config, batch=16, length=16)
        program = mtf.lower(
            outputs, updates, mesh="fsdp:4", layout=mtf.models.layout("fsdp", config, "fsdp:4")
        )  # fmt: skip
    return str(Step(program, None, False).lowered().as_text())


def test_weights_of_heads_are_gathered_and_multiplied_as_matrices(text: str) -> None:
    gathers = re.findall(r"stablehlo.all_gather.*?: \(tensor<([0-9x]+)x\w+>\)", text, re.DOTALL)
    assert gathers
    assert all(len(sizes.split("x")) == 3 for sizes in gathers)
    weights = [line for line in text.splitlines() if "stablehlo.dot_general" in line and "batching_dims" not in line]
    assert weights
    assert all(len(sizes.split("x")) == 2 for line in weights for sizes in re.findall(r"tensor<([0-9x]+)x\w+>", line))


def test_gradients_of_heads_are_scattered_as_matrices(text: str) -> None:
    """A TPU's compiler makes an all-reduce of a scatter whose dim it lays in lanes that the blocks do not fill."""
    scatters = re.findall(r"stablehlo.reduce_scatter.*?\}\) : \(tensor<([0-9x]+)xf", text, re.DOTALL)
    assert len(scatters) > 4
    assert all(len(sizes.split("x")) <= 2 for sizes in scatters)


def test_rows_of_several_tables_are_looked_up_as_rows() -> None:
    """The indices are those of rows, not of their elements: of experts' tokens they would take gigabytes."""
    groups, rows, wide, n = (mtf.Dimension(*d) for d in (("groups", 2), ("rows", 8), ("wide", 16), ("n", 4)))
    with mtf.Graph():
        tables, at = mtf.input("tables", [groups, rows, wide]), mtf.input("at", [groups, n], "int32")
        program = mtf.lower({"y": mtf.gather(tables, at, rows)})
    text = str(Step(program, None, False).lowered().as_text())
    (indices,) = re.findall(r'"stablehlo.gather".*: \(tensor<\w+>, tensor<(\w+)>\)', text)
    assert indices == "2x4x2xi32"


def test_a_weight_that_a_loop_slices_stays_as_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it fills whole tiles: a product that asks for another layout has one layer copied, not the stack."""
    monkeypatch.setattr(step, "platform_of", lambda mesh: "tpu")
    layers, rows, wide, odd = (mtf.Dimension(*d) for d in (("layers", 2), ("rows", 4), ("wide", 128), ("odd", 64)))

    def layer(carries: tuple[mtf.Tensor, ...], slices: tuple[()]) -> tuple[tuple[mtf.Tensor, ...], tuple[()]]:
        (x,) = carries
        narrow, filled = mtf.variable("narrow", [wide, odd]), mtf.variable("filled", [odd, wide])
        return (mtf.einsum([mtf.einsum([x, narrow], [rows, odd]), filled], [rows, wide]),), ()

    with mtf.Graph():
        (y,), _ = mtf.scan(layer, [mtf.input("x", [rows, wide])], dim=layers, stack_variables=True)
        program = mtf.lower({"y": y})
    found = re.findall(r"@LayoutConstraint\(.*tensor<(\w+)>\) ->", str(Step(program, None, False).lowered().as_text()))
    assert found == ["64x128xf32"]


def test_what_the_plan_keeps_over_a_loop_is_computed_before_it(text: str) -> None:
    """The gradient of the tied embedding, of which the logits' cotangent is an operand, is there before the layers'."""
    lines = text.splitlines()
    carry, gradient = "tensor<4x16x32x", "tensor<64x32x"  # of the layers, and of the embedding
    tied = [
        n for n, line in enumerate(lines)
        if "stablehlo.optimization_barrier" in line and carry in line and gradient in line
    ]  # fmt: skip
    loops = [n for n, line in enumerate(lines) if "stablehlo.while" in line]
    assert any(loops[0] < n < loops[-1] for n in tied)


def test_updates_that_the_plan_has_by_then_are_computed_before_a_large_gradient() -> None:
    """The rows of an embedding's gradient are added in float32, when other gradients have been applied."""
    vocab, n, wide, out = (mtf.Dimension(*d) for d in (("vocab", 48), ("n", 8), ("wide", 16), ("out", 32)))
    with mtf.Graph():
        table, weights = mtf.variable("table", [vocab, wide]), mtf.variable("weights", [wide, out])
        rows = mtf.gather(table, mtf.input("at", [n], "int32"), vocab)
        loss = mtf.reduce_sum(mtf.square(mtf.einsum([rows, weights], [n, out])))
        program = mtf.lower({"loss": loss}, mtf.optimize.SgdOptimizer(0.1).minimize(loss))
    before, _, _ = str(Step(program, None, False).lowered().as_text()).partition('"stablehlo.scatter"')
    tied = [line for line in before.splitlines() if "stablehlo.optimization_barrier" in line]
    assert any(line.endswith("tensor<8x16xf32>, tensor<16x32xf32>") for line in tied)


@pytest.mark.parametrize(
    ("sizes", "sent"),
    [
        ("c:4;r:8192", [(256, 128), (128, 128)]),  # rows that fill no tile
        ("r:256;c:512", [(1024, 128), (512, 128)]),  # a column of tiles for each device
        ("r:64;c:1024", [(64, 1024), (64, 512)]),
        ("r:1;c:1024;q:64", [(1024, 64), (512, 64)]),  # a matrix, whatever dims of size 1 it has
        ("a:3;c:12;b:1000", [(3, 12, 1000), (3, 6, 1000)]),  # blocks that fill no whole tiles
    ],
    ids=["rows", "columns", "whole", "dim of 1", "other sizes"],
)
def test_large_scatters_on_tpus_send_whole_tiles(
    sizes: str, sent: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all four devices of a mesh, in two stages; the blocks add up to the sum."""
    monkeypatch.setattr(step, "platform_of", lambda mesh: "tpu")
    with mtf.Graph():
        x = mtf.input("x", f"k:8;{sizes}")
        program = mtf.lower({"y": mtf.reduce_sum(x, output_shape=sizes)}, mesh="p:4", layout="k:p;c:p?")
    given = np.random.default_rng(0).integers(-9, 9, x.shape.sizes).astype(np.float32)
    text = str(Step(program, None, False).lowered().as_text())
    scatters = re.findall(r"stablehlo.reduce_scatter.*?\}\) : \(tensor<([0-9x]+)xf", text, re.DOTALL)
    assert [tuple(map(int, shape.split("x"))) for shape in scatters] == sent
    np.testing.assert_array_equal(mtf.on_jax(program, checked=False).step(x=given)["y"], given.sum(0))


def test_gradients_of_max_pools_compare_and_interleave_images_in_their_dtype() -> None:
    """A compiler stores what is sliced and interleaved: ResNet's stem took 1.49 of the plan in float32."""
    with mtf.Graph():
        x = mtf.variable("x", "b:2;h:8;w:8;c:4", dtype="bfloat16")
        y = mtf.pool(x, {"h": 3, "w": 3}, "max", {"h": 2, "w": 2}, padding="SAME")
        (dx,) = mtf.gradients([mtf.reduce_sum(mtf.square(y))], [x])
        program = mtf.lower({"dx": dx})
    text = str(Step(program, None, False).lowered().as_text())
    images = re.findall(r"stablehlo.(?:compare|concatenate|slice|pad) .*?tensor<2x\d+x\d+x[0-9x]*4x(f32|bf16)>", text)
    assert set(images) == {"bf16"}
