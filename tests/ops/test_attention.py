"""Fused attention beyond its rows in tests/cases_attention.py: tiles, work, memory, rounding, messages."""

from __future__ import annotations

import tracemalloc
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import meshlib as mtf
from layouts import Dimension
from meshlib.ops.fused_attention.attention import executed_share
from tests.effort import some
from tests.oracle import Array, assert_close, run

D = Dimension
BATCH, HEADS, SIZE = D("batch", 2), D("heads", 2), D("head_dim", 4)


def dense(q: Array, k: Array, v: Array, dy: Array, seen: Array) -> dict[str, Array]:
    """[batch, length, heads, dim] at once, in float64, with the gradients of <dy, y>."""
    q, k, v, dy = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (q, k, v, dy))
    s = np.where(seen, q @ k.swapaxes(2, 3) / np.sqrt(q.shape[3]), -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = dy @ v.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(q.shape[3])
    made = {"y": p @ v, "dq": ds @ k, "dk": ds.swapaxes(2, 3) @ q, "dv": p.swapaxes(2, 3) @ dy}
    return {n: x.swapaxes(1, 2) for n, x in made.items()}


def program(length: int, memory: int, mesh: str = "p:1", layout: str = "", dtype: str = "float64", **options):
    rows, keys = D("length", length), D("memory_length", memory)
    with mtf.Graph():
        q, dy = (mtf.input(n, [BATCH, rows, HEADS, SIZE], dtype) for n in ("q", "dy"))
        k, v = (mtf.input(n, [BATCH, keys, HEADS, SIZE], dtype) for n in ("k", "v"))
        y = mtf.attention(q, k, v, rows, keys, SIZE, **options)
        outputs = dict(zip(("y", "dq", "dk", "dv"), [y, *mtf.gradients([y], [q, k, v], [dy])], strict=True))
    return mtf.lower(outputs, mesh=mesh, layout=layout, precision="highest" if dtype == "float64" else "default")


def operands(length: int, memory: int) -> dict[str, Array]:
    rng = np.random.default_rng(length)
    shapes = {"q": length, "dy": length, "k": memory, "v": memory}
    return {n: rng.normal(size=(2, size, 2, 4)) for n, size in shapes.items()}


# Ragged, longer than a run of rows that the kernel computes at once, keys before and after the window left out.
@pytest.mark.parametrize(
    ("memory", "causal", "window"), [(530, True, None), (530, True, 70), (530, False, 70), (700, False, None)]
)
def test_long_sequences_run_by_run(memory, causal, window):
    i, j = np.arange(530)[:, None], np.arange(memory)
    seen = ((j <= i) | (not causal)) & (abs(i - j) < (window or 10_000))
    feeds = operands(530, memory)
    wanted = dense(feeds["q"], feeds["k"], feeds["v"], feeds["dy"], seen)
    for layout in ("", "length:p;batch:q"):
        made = program(530, memory, "p:2;q:2", layout, causal=causal, window=window)
        (found,) = run(made, feeds, "fast")
        assert_close(found, wanted, 1e-12, (layout, causal, window))


def test_a_split_sequence_knows_where_its_rows_are():
    """On the exact executor: every device has 3 of 12 rows, and the 3 keys before its own come to it."""
    feeds = operands(12, 12)
    i, j = np.arange(12)[:, None], np.arange(12)
    made = program(12, 12, "p:4", "length:p;memory_length:p", causal=True, window=4)
    (found,) = run(made, feeds)
    assert_close(found, dense(*(feeds[n] for n in ("q", "k", "v", "dy")), (j <= i) & (i - j < 4)), 1e-13, "split")
    row = 2 * 2 * 4 * 8
    sent = sorted((c.kind, c.phase, c.tensor, c.sent_bytes // row) for c in made.collectives)
    assert sent == [
        # Of the 3 queries that see a block's last key, and of all keys that these see, which dq needs in part.
        ("collective_permute", "backward", "dy", 3),
        ("collective_permute", "backward", "k", 6),
        ("collective_permute", "backward", "q", 3),
        ("collective_permute", "backward", "v", 6),
        ("collective_permute", "forward", "k", 3),
        ("collective_permute", "forward", "v", 3),
    ]
    assert made.sent_bytes == 24 * row


WINDOWS = [
    (window, causal, masked)
    for window in (1, 2, 4, 7, 30)
    for causal in (False, True)
    for masked in ((), ("memory_length",), ("batch", "length"), ("length", "memory_length"))
]


@pytest.mark.parametrize(("window", "causal", "masked"), some(WINDOWS, WINDOWS[::3]))
def test_a_window_along_a_split_sequence(window, causal, masked):
    """Narrower than a block, wider, wider than all; keys of one head, more heads of queries; masks of either dim."""
    rows, keys, group = D("length", 12), D("memory_length", 12), D("group", 3)
    rng = np.random.default_rng(window)
    sizes = {d.name: d for d in (BATCH, rows, keys)}
    shapes = {"q": [rows, BATCH, group, SIZE], "k": [BATCH, keys, SIZE], "v": [keys, BATCH, SIZE]}
    shapes["dy"] = shapes["q"]
    feeds = {n: rng.normal(size=[d.size for d in dims]) for n, dims in shapes.items()}
    with mtf.Graph():
        given = {n: mtf.input(n, dims, "float64") for n, dims in shapes.items()}
        mask = None
        if masked:
            feeds["mask"] = rng.random([sizes[n].size for n in masked]) < 0.7
            mask = mtf.input("mask", [sizes[n] for n in masked], "bool")
        q, k, v, dy = given.values()
        y = mtf.attention(q, k, v, rows, keys, SIZE, causal=causal, window=window, mask=mask)
        outputs = dict(zip(("y", "dq", "dk", "dv"), [y, *mtf.gradients([y], [q, k, v], [dy])], strict=True))
    (wanted,) = run(mtf.lower(outputs, precision="highest"), feeds)
    for mesh in ("p:2", "p:4", "p:2;q:6"):
        rules = "length:q;memory_length:q?;batch:p" if "q" in mesh else "length:p;memory_length:p?"
        split = mtf.lower(outputs, mesh=mesh, layout=rules, precision="highest")
        if masked != ("length", "memory_length"):  # of which no run tells what a block needs
            assert not [c for c in split.collectives if c.kind != "collective_permute"]
        for executor in ("exact", "fast"):
            (found,) = run(split, feeds, executor)
            assert_close(found, wanted, 1e-12, (mesh, executor))


@pytest.mark.parametrize("executor", ["exact", "fast"])
def test_a_window_on_keys_that_lie_everywhere_moves_nothing(executor):
    """Only queries are split: each device cuts what it needs of the keys that it has."""
    feeds = operands(12, 12)
    i, j = np.arange(12)[:, None], np.arange(12)
    made = program(12, 12, "p:4", "length:p", window=3)
    assert not [c for c in made.collectives if c.phase == "forward"]
    (found,) = run(made, feeds, executor)
    assert_close(found, dense(*(feeds[n] for n in ("q", "k", "v", "dy")), abs(i - j) < 3), 1e-13, executor)


def test_a_window_moves_keys_beside_a_block_whatever_the_length():
    """A window of 16: 15 keys before a block and 15 after it, of 128 or of 1024 rows."""
    for length in (128, 1024):
        rows, keys = D("length", length), D("memory_length", length)
        with mtf.Graph():
            q = mtf.input("q", [BATCH, rows, HEADS, SIZE])
            k, v = (mtf.input(n, [BATCH, keys, HEADS, SIZE]) for n in "kv")
            y = mtf.attention(q, k, v, rows, keys, SIZE, window=16)
        made = mtf.lower([y], mesh="p:4", layout="length:p;memory_length:p")
        assert [(c.tensor, c.sent_bytes) for c in made.collectives] == [(n, 30 * 2 * 2 * 4 * 4) for n in "kv"]


# Memory split over 4 cores; one number for each of 2 x 2 x 2 batches, heads and queries.
NUMBERS = 2 * 2 * 2 * 8


@pytest.mark.parametrize(
    ("gradients", "wanted"),
    [
        # Of every query and head one number, of the result 4: all_reduces of 2 * 3/4 of what there is.
        (False, {"k": 0, "v": 0, "q": 1.5 * NUMBERS, "attention": 1.5 * 4 * NUMBERS}),
        # Twice two numbers more, and the queries' cotangent. What goes to keys and values stays with them.
        (True, {"k": 0, "v": 0, "q": 1.5 * 5 * NUMBERS, "attention": 1.5 * 4 * NUMBERS, "query": 1.5 * 4 * NUMBERS}),
    ],
)
def test_split_keys_stay_where_they_are(gradients, wanted):
    """Decoding with a split cache: what moves does not depend on how many keys there are."""
    rows, keys = D("length", 2), D("memory_length", 400)
    with mtf.Graph():
        q = mtf.input("q", [BATCH, rows, HEADS, SIZE], "float64")
        k, v = (mtf.input(n, [BATCH, keys, HEADS, SIZE], "float64") for n in "kv")
        y = mtf.attention(q, k, v, rows, keys, SIZE)
        outputs = [y, *(mtf.gradients([y], [q, k, v]) if gradients else ())]
    made = mtf.lower(outputs, mesh="p:4", layout="memory_length:p")
    found = dict.fromkeys(wanted, 0)
    for c in made.collectives:
        assert c.kind == "all_reduce"
        found[c.tensor.rpartition("_")[2]] += c.sent_bytes
    assert found == wanted


def test_a_context_is_scattered_where_it_is_wanted_split():
    """Few queries, split like the many keys: they are gathered, and the result is reduced to where they were."""
    rows, keys = D("length", 4), D("memory_length", 400)
    with mtf.Graph():
        q = mtf.input("q", [BATCH, rows, HEADS, SIZE], "float64")
        k, v = (mtf.input(n, [BATCH, keys, HEADS, SIZE], "float64") for n in "kv")
        y = mtf.attention(q, k, v, rows, keys, SIZE)
    made = mtf.lower([y], mesh="p:4", layout="length:p;memory_length:p")
    sent = {(c.kind, c.tensor): c.sent_bytes for c in made.collectives}
    queries = 4 * 2 * NUMBERS  # bytes of q, and of y, in all
    number = 2 * NUMBERS  # of one for each query
    assert sent == {
        ("all_gather", "q"): queries * 3 / 4,
        ("all_reduce", "q"): 2 * number * 3 / 4,
        ("reduce_scatter", "attention"): queries * 3 / 4,
    }


SPLIT_KEYS = [
    (masked, *which)
    for masked in ("", "memory_length", "length memory_length", "batch memory_length")
    for which in ((False, None), (True, None), (False, 3), (True, 3))
]


@pytest.mark.parametrize(("masked", "causal", "window"), some(SPLIT_KEYS, SPLIT_KEYS[::3]))
def test_split_keys_give_the_same_numbers(masked, causal, window):
    """Blocks in which a query sees every key, some, none; a query that sees none at all."""
    rows, keys = D("length", 8), D("memory_length", 12)
    dims = {d.name: d for d in (BATCH, rows, keys)}
    feeds = operands(8, 12)
    with mtf.Graph():
        q, dy = (mtf.input(n, [BATCH, rows, HEADS, SIZE], "float64") for n in ("q", "dy"))
        k, v = (mtf.input(n, [BATCH, keys, HEADS, SIZE], "float64") for n in "kv")
        mask = None
        if masked:
            over = [dims[n] for n in masked.split()]
            feeds["mask"] = np.random.default_rng(3).random([d.size for d in over]) < 0.5
            mask = mtf.input("mask", over, "bool")
        y = mtf.attention(q, k, v, rows, keys, SIZE, causal=causal, window=window, mask=mask)
        outputs = dict(zip(("y", "dq", "dk", "dv"), [y, *mtf.gradients([y], [q, k, v], [dy])], strict=True))
    (wanted,) = run(mtf.lower(outputs, precision="highest"), feeds)
    layouts = {"memory_length:q": "q:4", "batch:p;memory_length:q": "p:2;q:4", "length:p;memory_length:q": "p:2;q:2"}
    for layout, mesh in layouts.items():
        split = mtf.lower(outputs, mesh=mesh, layout=layout, precision="highest", balance=mtf.Balance(1e-3, 1e-3))
        inside = [i for i in split.instructions if i.transfers and not i.is_collective]
        assert [i.opcode for i in inside] == ["attention", "attention_grad_query", "attention_grad_memory"]
        for executor in ("exact", "fast"):
            (found,) = run(split, feeds, executor)
            assert_close(found, wanted, 1e-12, (layout, executor))


@pytest.mark.parametrize("executor", ["exact", "fast"])
def test_attentions_of_the_same_operands_do_not_mix(executor):
    """Same q, k, v and cotangent, other windows and masks, inside and outside of a loop."""
    rows, keys, trips = D("length", 6), D("memory_length", 6), D("trips", 3)
    feeds = operands(6, 6)
    feeds["mask"] = np.array([[1, 0, 1, 1, 0, 1], [1, 1, 1, 0, 1, 1]], bool)
    feeds["scales"] = np.array([0.5, -1.5, 2.0])
    with mtf.Graph():
        q, dy = (mtf.input(n, [BATCH, rows, HEADS, SIZE], "float64") for n in ("q", "dy"))
        k, v = (mtf.input(n, [BATCH, keys, HEADS, SIZE], "float64") for n in ("k", "v"))
        mask, scales = mtf.input("mask", [BATCH, keys], "bool"), mtf.input("scales", [trips], "float64")

        def layer(q: mtf.Tensor) -> mtf.Tensor:
            return mtf.add_n(
                [
                    mtf.attention(q, k, v, rows, keys, SIZE, window=2),
                    mtf.attention(q, k, v, rows, keys, SIZE, window=3, causal=True),
                    mtf.attention(q, k, v, rows, keys, SIZE, mask=mask),
                ]
            )

        (y,), _ = mtf.scan(lambda c, s: ((layer(c[0]) * s[0],), ()), [q], [scales], trips)
        outputs = dict(zip(("y", "dq", "dk", "dv"), [y, *mtf.gradients([y], [q, k, v], [dy])], strict=True))
    found = run(mtf.lower(outputs, precision="highest"), feeds, executor)[0]

    i, j = np.arange(6)[:, None], np.arange(6)
    masks = [abs(i - j) < 2, (i - j < 3) & (j <= i), feeds["mask"][:, None, None, :]]
    states, (k, v) = [feeds["q"]], (feeds[n] for n in "kv")
    for scale in feeds["scales"]:
        states.append(sum(dense(states[-1], k, v, v, m)["y"] for m in masks) * scale)
    dx, total = feeds["dy"], {"dk": 0.0, "dv": 0.0}
    for scale, state in zip(feeds["scales"][::-1], states[-2::-1], strict=True):
        parts = [dense(state, k, v, dx * scale, m) for m in masks]
        total = {n: total[n] + sum(part[n] for part in parts) for n in total}
        dx = sum(part["dq"] for part in parts)
    assert_close(found, {"y": states[-1], "dq": dx, **total}, 1e-11, executor)


def test_what_one_gradient_leaves_is_not_taken_for_another_s():
    """The fast executor finds all gradients of the same operands at once: of this attention, in this trip only."""
    rows, keys, trips = D("length", 6), D("memory_length", 6), D("trips", 3)
    feeds = operands(6, 6)
    stop = mtf.stop_gradient
    with mtf.Graph():
        q, dy = (mtf.input(n, [BATCH, rows, HEADS, SIZE], "float64") for n in ("q", "dy"))
        k, v = (mtf.input(n, [BATCH, keys, HEADS, SIZE], "float64") for n in ("k", "v"))

        def layer(q: mtf.Tensor, k: mtf.Tensor, v: mtf.Tensor, **options) -> mtf.Tensor:
            return mtf.attention(q, k, v, rows, keys, SIZE, **options)

        y = layer(q, stop(k), stop(v), window=2) + layer(stop(q), k, v, window=3)
        y = y + layer(stop(q), stop(k), v, window=3, scale=2.0) + layer(stop(q * 1.5), k, v, window=2)
        outputs = dict(zip(("dq", "dk", "dv"), mtf.gradients([y], [q, k, v], [dy]), strict=True))
        (z,), _ = mtf.scan(lambda c, s: ((layer(mtf.tanh(c[0]), stop(k), stop(v)) * 2.0,), ()), [q], (), trips)
        outputs["looped"] = mtf.gradients([z], [q], [dy])[0]
    program = mtf.lower(outputs, precision="highest")
    exact, fast = run(program, feeds)[0], run(program, feeds, "fast")[0]
    assert_close(fast, exact, 1e-12, "left over")
    i, j = np.arange(6)[:, None], np.arange(6)
    q, k, v, dy = (feeds[n] for n in ("q", "k", "v", "dy"))
    assert_close({"dq": fast["dq"]}, {"dq": dense(q, k, v, dy, abs(i - j) < 2)["dq"]}, 1e-12, "window of 2")


def test_a_query_that_sees_nothing_gets_zeros_and_gives_none():
    rows, keys = D("length", 2), D("memory_length", 3)
    feeds = {n: operands(2, 3)[n] for n in "qkv"} | {"mask": np.array([[0, 0, 0], [1, 0, 1]], bool)}
    with mtf.Graph():
        q = mtf.input("q", [BATCH, rows, HEADS, SIZE], "float64")
        k, v = (mtf.input(n, [BATCH, keys, HEADS, SIZE], "float64") for n in "kv")
        y = mtf.attention(q, k, v, rows, keys, SIZE, mask=mtf.input("mask", [rows, keys], "bool"))
        grads = mtf.gradients([y], [q, k, v])
    out = run(mtf.lower({"y": y, **dict(zip("qkv", grads, strict=True))}, precision="highest"), feeds)[0]
    assert not out["y"][:, 0].any()
    assert out["y"][:, 1].any()
    assert not out["q"][:, 0].any()
    assert not out["k"][:, 1].any()  # the hidden key
    np.testing.assert_allclose(out["v"].sum(axis=1), 1.0)  # of one query's weights


# ---------------------------------------------------------------- rounding, memory, work


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("executor", ["exact", "fast"])
def test_rounding_of_what_enters_the_mxu(dtype, executor):
    """Operands and weights are rounded to bfloat16, scores and sums are not."""

    def rounded(x: Array) -> Array:
        return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)

    feeds = operands(8, 8)
    feeds = {n: rounded(x) if dtype == "bfloat16" else x.astype(np.float32) for n, x in feeds.items()}
    q, k, v = (rounded(feeds[n]).swapaxes(1, 2) for n in "qkv")
    s = q @ k.swapaxes(2, 3) / 2
    p = np.exp(s - s.max(-1, keepdims=True))
    wanted = (rounded(p) @ v / p.sum(-1, keepdims=True)).swapaxes(1, 2)
    made = run(program(8, 8, dtype=dtype), feeds, executor)[0]
    found = made["y"].astype(np.float64)
    exact = dense(*(feeds[n] for n in ("q", "k", "v", "dy")), np.ones((8, 8), bool))["y"]
    np.testing.assert_allclose(found, rounded(wanted) if dtype == "bfloat16" else wanted, rtol=1e-5, atol=1e-6)
    assert 1e-4 < abs(found - exact).max() < 0.02
    p, dy = p / p.sum(-1, keepdims=True), rounded(feeds["dy"]).swapaxes(1, 2)
    dp = dy @ v.swapaxes(2, 3)
    ds = (dp - (p * dp).sum(-1, keepdims=True)) * p / 2
    for name, wanted, unrounded in (
        ("dq", rounded(ds) @ k, ds @ k),
        ("dk", rounded(ds).swapaxes(2, 3) @ q, ds.swapaxes(2, 3) @ q),
        ("dv", rounded(p).swapaxes(2, 3) @ dy, p.swapaxes(2, 3) @ dy),
    ):
        found = made[name].astype(np.float64).swapaxes(1, 2)
        wanted, unrounded = (rounded(x) if dtype == "bfloat16" else x for x in (wanted, unrounded))
        # Where float32 and float64 disagree on a rounding a few elements are off.
        assert np.median(abs(found - wanted)) < 1e-6 < np.quantile(abs(found - unrounded), 0.8), name


def test_scores_are_never_held_at_once():
    """2 x 2 heads of 1024 x 1024 scores are 16 MiB in float32; the operands are 64 KiB each."""
    made = program(1024, 1024, dtype="float32", causal=True)
    feeds = operands(1024, 1024)
    sim = mtf.simulate(made)
    sim.step(feeds)
    tracemalloc.start()
    sim.step(feeds)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * 2**20


def test_hidden_tiles_cost_nothing():
    # 4 x 4 tiles of 512: causal leaves 1 + 2 + 3 + 4; a window of 512 the tile itself and the one before.
    assert executed_share(2048, 2048, True, None) == Fraction(10, 16)
    assert executed_share(2048, 2048, True, 512) == Fraction(1 + 2 + 2 + 2, 16)
    assert executed_share(2048, 2048, True, 514) == Fraction(1 + 2 + 3 + 3, 16)
    assert executed_share(2048, 2048, False, 1) == Fraction(4, 16)
    assert executed_share(4096, 4096, True, None, (2048, 2048)) == Fraction(3, 4)
    assert executed_share(4096, 4096, True, 128, (1024, 1024)) == Fraction(1 + 2 + 2 + 2, 16)
    assert executed_share(600, 600, True, None) == Fraction(512 * 512 + 88 * 600, 600 * 600)
    rows, keys, size, batch = D("length", 2048), D("memory_length", 2048), D("head_dim", 64), D("batch", 4)
    with mtf.Graph():
        q, k, v = (
            mtf.input("q", [batch, rows, size]),
            mtf.input("k", [batch, keys, size]),
            mtf.ones([batch, keys, size]),
        )
        y = mtf.attention(q, k, v, rows, keys, size, causal=True)
        outputs = [y, *mtf.gradients([y], [q, k])]
    made = mtf.lower(outputs, mesh="p:2;q:2", layout="batch:p;length:q")
    flops = {i.opcode: i for i in made.instructions if i.opcode.startswith("attention")}
    one = 2 * 4 * 2048 * 2048 * 64 * 10 // 16 // 4  # one product, on each of 4 cores
    products = {"attention": 2, "attention_grad_query": 3, "attention_grad_memory": 4}
    assert flops.keys() == products.keys()
    for opcode, i in flops.items():
        work = i.operation.opdef.work(tuple(x.local for x in i.inputs), i.outputs[0].local, i.operation.attrs)
        assert work.mxu_flops == products[opcode] * one
        assert work.vpu_ops > work.mxu_flops / 64 / 4  # something for every score


# ---------------------------------------------------------------- messages


def faulty(**changes) -> None:
    shapes = {
        "q": [BATCH, D("length", 4), HEADS, SIZE],
        "k": [BATCH, D("memory_length", 6), HEADS, SIZE],
        "v": [BATCH, D("memory_length", 6), HEADS, SIZE],
    }
    options = {"length": "length", "memory_length": "memory_length", "key_dim": "head_dim"}
    mask = changes.pop("mask", None)
    dtypes = changes.pop("dtypes", {})
    for name in [n for n in changes if n in shapes]:
        shapes[name] = changes.pop(name)
    with mtf.Graph():
        tensors = {n: mtf.input(n, dims, dtypes.get(n, "float32")) for n, dims in shapes.items()}
        if mask is not None:
            tensors["mask"] = mtf.input("mask", *mask)
        mtf.attention(**tensors, **{**options, **changes})


KEYS, ROWS = D("memory_length", 6), D("length", 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k": [BATCH, KEYS, ROWS, HEADS, SIZE]}, "k has the queries' dim 'length'; rename it with mtf"),
        ({"q": [BATCH, ROWS, KEYS, HEADS, SIZE]}, "q has the keys' dim 'memory_length'"),
        ({"k": [BATCH, KEYS, D("experts", 3), HEADS, SIZE]}, "k has experts:3, which q lacks"),
        ({"v": [BATCH, KEYS, SIZE]}, r"v must have the dims of k: k .*heads:2.*"),
        ({"v": [BATCH, D("memory_length", 5), HEADS, SIZE]}, "v must have the dims of k: .*memory_length:5"),
        ({n: [D("batch", 3), KEYS, HEADS, SIZE] for n in "kv"}, "'batch' has two sizes, 2 and 3"),
        ({"k": [BATCH, KEYS, HEADS, D("head_dim", 8)]}, "dim 'head_dim' has size 8 in k.*but 4 was given"),
        ({"length": "lenght"}, "q: .* has no dim 'lenght'; did you mean 'length'"),
        ({"memory_length": D("memory_length", 7)}, "dim 'memory_length' has size 6 in k.*but 7 was given"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"window": 1, **{n: [BATCH, D("memory_length", 2), HEADS, SIZE] for n in "kv"}},
         "the last of 4 queries sees none of 2 keys through a window of 1"),
        ({"dtypes": {"q": "bfloat16"}}, "dtypes bfloat16 and float32; cast one"),
        ({"dtypes": dict.fromkeys("qkv", "int32")}, "needs float operands, got int32"),
        ({"mask": ([BATCH, KEYS], "float32")}, "the mask must be bool, got float32"),
        ({"mask": ([D("segments", 2), KEYS], "bool")}, "the mask has segments:2, which q and k lack"),
        ({"causal": 1}, "causal must be True or False, got int 1"),
        ({"scale": float("nan")}, "scale must be a finite number"),
    ],
)  # fmt: skip
def test_messages(changes, words):
    with pytest.raises(mtf.MeshlibError, match=words) as caught:
        faulty(**changes)
    assert "test_attention.py:" in str(caught.value)
