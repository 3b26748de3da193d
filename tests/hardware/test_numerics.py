"""Rounding, the MXU's order of addition and the ring's, each against a loop that says the rule plainly."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from hardware import numerics
from hardware.checks import HardwareError
from hardware.numerics import mxu_matmul, ring_reduce_scatter, round_to_bfloat16
from tests.hardware.ring_reduction import ring_reduce

SPECIAL_BITS = [
    0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001,
    0x7F7FFFFF, 0x7F7F7FFF, 0x7F7F8000, 0xFF7F8000, 0x7F800000, 0xFF800000,
    0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000, 0xFFC12345, 0x00008000, 0x00018000,
]  # fmt: skip


def oracle(x):
    with np.errstate(invalid="ignore"):  # the cast reports signalling NaNs
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def same_bits(x, y):
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


@given(
    arrays(np.uint32, array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9)),
    st.sampled_from([0, 1 << 14]),
)
def test_rounding_equals_ml_dtypes(bits, small):
    x = bits.view(np.float32)
    before, numerics._ROUND_SMALL = numerics._ROUND_SMALL, small
    try:
        got = round_to_bfloat16(x)
    finally:
        numerics._ROUND_SMALL = before
    assert same_bits(got, oracle(x))


def test_rounding_special_values_every_upper_half_and_chunk_edges(monkeypatch):
    monkeypatch.setattr(numerics, "_ROUND_SMALL", 0)
    monkeypatch.setattr(numerics, "_ROUND_CHUNK", 1000)
    halves = np.arange(1 << 16, dtype=np.uint32) << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = (halves | low).view(np.float32)
        assert same_bits(round_to_bfloat16(x), oracle(x))
    x = np.array(SPECIAL_BITS, np.uint32).view(np.float32)
    assert same_bits(round_to_bfloat16(x), oracle(x))
    assert np.isnan(round_to_bfloat16(x)).sum() == 6


def test_rounding_in_place_strided_and_overlapping():
    x = np.random.default_rng(0).standard_normal((40, 50, 60)).astype(np.float32)
    want = oracle(x)
    for view in (
        lambda a: a[::2, 1:, ::-3],
        lambda a: a.transpose(2, 0, 1),
        lambda a: a[3],
        lambda a: a[..., 0],
    ):
        a = x.copy()
        assert same_bits(np.ascontiguousarray(round_to_bfloat16(view(a))), np.ascontiguousarray(view(want)))
        assert np.array_equal(a, x)
        assert round_to_bfloat16(view(a), out=view(a)).shape == view(a).shape
        assert np.array_equal(view(a), view(want))
    a = x.reshape(-1).copy()
    round_to_bfloat16(a[:-1], out=a[1:])
    assert np.array_equal(a[1:], want.reshape(-1)[:-1])
    a = x.copy()
    assert round_to_bfloat16(a, out=a) is a
    assert np.array_equal(a, want)


def test_rounding_refuses():
    with pytest.raises(HardwareError, match="x must be a float32 array, not float64"):
        round_to_bfloat16(np.zeros(3))
    with pytest.raises(HardwareError, match=r"out has shape \(4,\), x has shape \(3,\)"):
        round_to_bfloat16(np.zeros(3, np.float32), out=np.zeros(4, np.float32))
    frozen = np.zeros(3, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(HardwareError, match="read-only"):
        round_to_bfloat16(frozen, out=frozen)
    with pytest.raises(HardwareError, match="not list"):
        round_to_bfloat16([1.0])


def plain_matmul(a, b, rows):
    """The rule, one scalar at a time."""
    kind = a.dtype.type
    out = np.zeros((a.shape[0], b.shape[1]), a.dtype)
    for m in range(a.shape[0]):
        for n in range(b.shape[1]):
            total = kind(0)
            for tile in range(0, a.shape[1], rows):
                partial = kind(0)
                for k in range(tile, min(tile + rows, a.shape[1])):
                    partial = kind(partial + kind(a[m, k] * b[k, n]))
                total = kind(total + partial)
            out[m, n] = total
    return out


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 7), st.integers(0, 20), st.integers(1, 7), st.integers(1, 9),
    st.sampled_from([np.float32, np.float64]),
    st.sampled_from([1, 6, 64, 1 << 15]), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_matmul_is_the_plain_loop_bit_for_bit(m, k, n, rows, dtype, chunk, seed):
    rng = np.random.default_rng(seed)
    a = (rng.standard_normal((m, k)) * 10.0 ** rng.integers(-4, 4, (m, k))).astype(dtype)
    b = (rng.standard_normal((k, n)) * 10.0 ** rng.integers(-4, 4, (k, n))).astype(dtype)
    before = numerics._MATMUL_CHUNK, numerics._INNER_CHUNK
    numerics._MATMUL_CHUNK, numerics._INNER_CHUNK = chunk, max(1, chunk // 4)
    try:
        got = mxu_matmul(a, b, rows)
    finally:
        numerics._MATMUL_CHUNK, numerics._INNER_CHUNK = before
    assert same_bits(got, plain_matmul(a, b, rows))


def test_matmul_keeps_positive_zero_and_order_of_long_sums():
    minus = np.full((1, 3), -0.0, np.float32)
    assert not np.signbit(mxu_matmul(minus, np.ones((3, 2), np.float32))).any()  # 0 + (-0) = +0
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((1, 700)).astype(np.float32), rng.standard_normal((700, 1)).astype(np.float32)
    assert same_bits(mxu_matmul(a, b), plain_matmul(a, b, 128))
    a, b = rng.standard_normal((3, 300)).astype(np.float32), rng.standard_normal((300, 2)).astype(np.float32)
    assert same_bits(mxu_matmul(a, b), plain_matmul(a, b, 128))
    assert not same_bits(mxu_matmul(a, b), mxu_matmul(a, b, 256))


@pytest.mark.parametrize(
    ("left", "right"),
    [((5,), ()), ((2, 3), ()), ((2, 3), (1, 1)), ((2, 3), (2, 3)), ((2, 1), (1, 3)), ((), (4,)), ((0,), ())],
)  # fmt: skip
def test_matmul_broadcasts_batches_like_numpy(left, right):
    rng = np.random.default_rng(2)
    a = rng.standard_normal((*left, 4, 6)).astype(np.float32)
    b = rng.standard_normal((*right, 6, 3)).astype(np.float32)
    got = mxu_matmul(a, b, rows=4)
    assert got.shape == np.matmul(a, b).shape
    batch = got.shape[:-2]
    a, b = np.broadcast_to(a, (*batch, 4, 6)), np.broadcast_to(b, (*batch, 6, 3))
    for index in np.ndindex(*batch):
        assert same_bits(np.array(got[index]), plain_matmul(a[index], b[index], 4))


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 3), (2, 3, 0)])
def test_matmul_empty(shape):
    m, k, n = shape
    assert np.array_equal(mxu_matmul(np.ones((m, k)), np.ones((k, n))), np.zeros((m, n)))
    stacked = mxu_matmul(np.ones((3, m, k)), np.ones((3, k, n)))
    assert np.array_equal(stacked, np.zeros((3, m, n)))


def test_matmul_refuses():
    f = np.float32
    with pytest.raises(HardwareError, match=r"one K; got a \(2, 3\), b \(4, 5\)"):
        mxu_matmul(np.ones((2, 3), f), np.ones((4, 5), f))
    with pytest.raises(HardwareError, match="float32 and float64"):
        mxu_matmul(np.ones((2, 3), f), np.ones((3, 5)))
    with pytest.raises(HardwareError, match="do not broadcast"):
        mxu_matmul(np.ones((2, 2, 3), f), np.ones((3, 3, 5), f))
    with pytest.raises(HardwareError, match="rows must be an integer >= 1, not 0"):
        mxu_matmul(np.ones((2, 3), f), np.ones((3, 5), f), rows=0)
    with pytest.raises(HardwareError, match="one K"):
        mxu_matmul(np.ones(3, f), np.ones((3, 5), f))


def plain_ring(parts, op):
    """Chunks travel round the ring, one message per step."""
    k = len(parts)
    held = [list(np.array_split(np.array(part).reshape(-1), k)) for part in parts]
    combine = {"sum": np.add, "max": np.maximum, "min": np.minimum}[op]
    for step in range(k - 1):
        sent = [(member, (member - 1 - step) % k) for member in range(k)]
        messages = [(member, c, held[member][c].copy()) for member, c in sent]
        for member, c, data in messages:
            neighbour = (member + 1) % k
            held[neighbour][c] = combine(data, held[neighbour][c])
    return np.concatenate([held[c][c] for c in range(k)]).reshape(parts[0].shape)


@settings(deadline=None)
@given(
    st.integers(1, 7), array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6),
    st.sampled_from([np.float32, np.float64, np.int32, np.int64, np.uint8]),
    st.sampled_from(["sum", "max", "min"]),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_ring_reduce_is_the_travelling_sum(k, shape, dtype, op, seed):
    rng = np.random.default_rng(seed)
    parts = [np.asarray(100 * rng.standard_normal(shape)).astype(np.int64).astype(dtype) for _ in range(k)]
    if np.dtype(dtype).kind == "f":
        parts = [np.asarray(part * rng.standard_normal(shape), dtype) for part in parts]
    before = [part.copy() for part in parts]
    assert same_bits(ring_reduce(parts, op), plain_ring(parts, op))
    assert all(map(np.array_equal, parts, before))


@given(st.integers(1, 6), st.integers(0, 9), st.integers(0, 2**32 - 1))
def test_ring_reduce_of_flags_is_or_and_and(k, length, seed):
    parts = list(np.random.default_rng(seed).random((k, length)) < 0.6)
    for op, want in (("max", np.any(parts, axis=0)), ("min", np.all(parts, axis=0))):
        found = ring_reduce(parts, op)
        assert found.dtype == bool
        assert found.tolist() == want.tolist() == np.concatenate(ring_reduce_scatter(parts, 0, op)).tolist()


def test_ring_order_by_hand():
    # chunk 0 is added 1, 2, 0: (2**-24 + 2**-24) + 1 rounds up; chunk 1 is added 2, 0, 1; chunk 2, 0, 1, 2.
    parts = [np.float32([1, 1, 1]), np.float32([2**-24] * 3), np.float32([2**-24] * 3)]
    assert ring_reduce(parts).tolist() == [1 + 2**-23, 1, 1]


def test_ring_rounds_what_it_carries():
    """With a carry every partial result is rounded on its way; chunk c by hand, from member c + 1 on."""
    rng = np.random.default_rng(3)
    parts = [round_to_bfloat16(rng.standard_normal(9).astype(np.float32)) for _ in range(3)]
    want = np.empty(9, np.float32)
    for c in range(3):
        cut = slice(3 * c, 3 * c + 3)
        first, second, third = (parts[(c + step) % 3][cut] for step in (1, 2, 3))
        want[cut] = oracle(oracle(first + second) + third)
    assert same_bits(ring_reduce(parts, carry=round_to_bfloat16), want)
    chunks = ring_reduce_scatter(parts, 0, carry=round_to_bfloat16)
    assert same_bits(np.concatenate(chunks), want)
    assert not same_bits(ring_reduce(parts), want)


@given(st.integers(1, 5), st.integers(0, 2), st.integers(0, 9), st.integers(0, 2**32 - 1))
def test_ring_reduce_scatter_equals_ring_reduce_of_blocks(k, dim, length, seed):
    rng = np.random.default_rng(seed)
    shape = [2, 3, 2]
    shape[dim] = length
    parts = [rng.standard_normal(shape).astype(np.float32) for _ in range(k)]
    chunks = ring_reduce_scatter(parts, dim)
    for c, chunk in enumerate(chunks):
        pieces = [np.array_split(part, k, axis=dim)[c] for part in parts]
        want = pieces[(c + 1) % k]
        for step in range(2, k + 1):
            want = want + pieces[(c + step) % k]
        assert same_bits(np.ascontiguousarray(chunk), np.ascontiguousarray(want))


def test_ring_refuses():
    with pytest.raises(HardwareError, match="empty"):
        ring_reduce_scatter([], 0)
    with pytest.raises(HardwareError, match=r"\(2,\) float64; \(3,\) float64"):
        ring_reduce_scatter([np.ones(3), np.ones(2)], 0)
    with pytest.raises(HardwareError, match="'mean'; use one of sum, max, min"):
        ring_reduce_scatter([np.ones(3)], 0, "mean")
    with pytest.raises(HardwareError, match="dtype bfloat16"):
        ring_reduce_scatter([np.ones(3, ml_dtypes.bfloat16)], 0)
    with pytest.raises(HardwareError, match="bools have no sum"):
        ring_reduce_scatter([np.ones(3, bool)], 0)
    with pytest.raises(HardwareError, match="dim 2 is not one of the 2 dims"):
        ring_reduce_scatter([np.ones((2, 2))], 2)
