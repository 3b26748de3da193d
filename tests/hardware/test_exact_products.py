"""Products through BLAS have the bits of the ordered loop, or are left to it."""

from __future__ import annotations

import numpy as np
import pytest

from hardware import exact_products, numerics
from hardware.checks import HardwareError
from hardware.exact_products import multiply_exactly
from hardware.numerics import mxu_matmul, round_to_bfloat16
from tests.effort import draws


def in_order(a: np.ndarray, b: np.ndarray, rows: int) -> np.ndarray:
    """The definition, one product and one addition at a time."""
    out = np.zeros((*a.shape[:2], b.shape[2]), np.float32)
    for k0 in range(0, a.shape[2], rows):
        partial = np.zeros_like(out)
        for k in range(k0, min(k0 + rows, a.shape[2])):
            partial = partial + a[:, :, k, None] * b[:, None, k]
        out = out + partial
    return out


def operands(rng: np.random.Generator, batch: int, m: int, k: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    scale = 2.0 ** rng.integers(-60, 60)
    a = round_to_bfloat16((rng.normal(size=(batch, m, k)) * scale).astype(np.float32))
    b = round_to_bfloat16((rng.normal(size=(batch, k, n)) / scale).astype(np.float32))
    a[rng.random(a.shape) < 0.1] *= np.float32(-0.0)
    return a, b


def test_random_products_have_the_bits_of_the_definition() -> None:
    rng, through_blas = np.random.default_rng(5), 0
    for _ in range(draws(12, 200)):
        batch, m, k, n = (int(rng.integers(1, most)) for most in (3, 160, 300, 160))
        rows = int(rng.choice([8, 100, 128, 256]))
        a, b = operands(rng, batch, m, k, n)
        out = np.zeros((batch, m, n), np.float32)
        expected = in_order(a, b, rows)
        if multiply_exactly(a, b, out, rows, numerics._matmul_in_order):
            through_blas += 1
            np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))
        np.testing.assert_array_equal(mxu_matmul(a, b, rows).view(np.uint32), expected.view(np.uint32))
    assert through_blas > 0


@pytest.mark.parametrize(
    ("name", "change"),
    {
        "not bfloat16": lambda a: np.nextafter(a, np.float32(2)),
        "infinite": lambda a: np.where(a == a.max(), np.float32(np.inf), a),
        "NaN": lambda a: np.where(a == a.max(), np.float32(np.nan), a),
        "products overflow": lambda a: a * np.float32(2.0**127),
        "products underflow": lambda a: a * np.float32(2.0**-120),
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_may_not_be_exact_is_left_to_the_loop(name: str, change: object) -> None:
    rng = np.random.default_rng(1)
    a, b = (round_to_bfloat16(rng.uniform(0.5, 1, (1, 96, 96)).astype(np.float32)) for _ in range(2))
    b[0, 0, 0] = 2.0**-20 if name == "products underflow" else 4.0
    a = np.asarray(change(a), np.float32)  # type: ignore[operator]
    out = np.zeros((1, 96, 96), np.float32)
    assert not multiply_exactly(a, b, out, 128, numerics._matmul_in_order)
    assert not out.any()
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(mxu_matmul(a, b), in_order(a, b, 128))


def pairwise(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> np.ndarray:
    """A product that adds the halves of the depth separately, as some kernels do at ragged edges."""
    half = a.shape[1] // 2
    return np.add(a[:, :half] @ b[:half], a[:, half:] @ b[half:], out=out)


def test_a_blas_that_adds_in_another_order_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new shape is compared with the ordered loop."""
    a, b = operands(np.random.default_rng(2), 1, 96, 128, 96)
    expected = in_order(a, b, 128)
    exact_products._is_exact.cache_clear()
    monkeypatch.setattr(exact_products.np, "matmul", pairwise)
    try:
        assert not multiply_exactly(a, b, np.zeros((1, 96, 96), np.float32), 128, numerics._matmul_in_order)
        np.testing.assert_array_equal(mxu_matmul(a, b), expected)
    finally:
        exact_products._is_exact.cache_clear()


def test_coarse_panels_where_fine_ones_are_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """A BLAS with register tiles of 48 rows and columns."""
    matmul, shapes = np.matmul, set()

    def tiles_of_48(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> np.ndarray:
        whole = a.shape[0] % 48 == 0 and b.shape[1] % 48 == 0
        shapes.add((*a.shape, b.shape[1]))
        return matmul(a, b, out=out) if whole else pairwise(a, b, out)

    a, b = operands(np.random.default_rng(3), 1, 70, 140, 100)
    out = np.zeros((1, 70, 100), np.float32)
    exact_products._is_exact.cache_clear()
    monkeypatch.setattr(exact_products.np, "matmul", tiles_of_48)
    try:
        assert multiply_exactly(a, b, out, 128, numerics._matmul_in_order)
    finally:
        exact_products._is_exact.cache_clear()
    np.testing.assert_array_equal(out.view(np.uint32), in_order(a, b, 128).view(np.uint32))
    assert {(96, 128, 96), (96, 16, 48)} <= shapes  # 70 rows; 128 and 12 deep; 100 columns


def test_a_result_array_of_the_caller() -> None:
    a, b = operands(np.random.default_rng(4), 2, 5, 40, 7)
    out = np.full((2, 5, 7), np.float32(np.nan))
    assert mxu_matmul(a, b, out=out) is out
    np.testing.assert_array_equal(out, mxu_matmul(a, b))
    short, turned = np.zeros((2, 5, 8), np.float32), out[:, :, ::-1]
    for array, reason in ((short, r"\[2, 5, 8\]"), (turned, "not C-contiguous"), (out.astype(float), "float64")):
        with pytest.raises(HardwareError, match=reason):
            mxu_matmul(a, b, out=array)
