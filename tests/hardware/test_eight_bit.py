"""Grids of eight bits, against their definitions written out."""

from __future__ import annotations

import numpy as np
import pytest

from hardware import HardwareError
from hardware.numerics import LARGEST, round_to_eight_bits


def fp8_grid(mantissa_bits: int, codes: int) -> np.ndarray:
    """Every finite number: sign, exponent with a bias of half its range, mantissa; the last codes are not numbers."""
    found, ones, bias = [], 1 << mantissa_bits, 2 ** (6 - mantissa_bits) - 1
    for code in range(codes):
        exponent, mantissa = code // ones, code % ones
        found.append(
            mantissa / ones * 2.0 ** (1 - bias) if exponent == 0 else (1 + mantissa / ones) * 2.0 ** (exponent - bias)
        )
    return np.array(found)


GRIDS = {"int8": np.arange(128.0), "fp8": fp8_grid(3, 127), "fp8_e5m2": fp8_grid(2, 124)}  # e5m2 has infinity and NaNs


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("storage", [np.float32, np.float64])
def test_every_number_and_what_lies_between(dtype: str, storage: type) -> None:
    numbers = GRIDS[dtype]
    assert numbers[-1] == LARGEST[dtype]
    between = (numbers[:-1] + numbers[1:]) / 2
    even = np.where(np.arange(len(between)) % 2 == 0, numbers[:-1], numbers[1:])
    nudge = (numbers[1:] - numbers[:-1]) / 1000
    for sign in (1, -1):
        for x, expected in (
            (numbers, numbers),
            (between, even),
            (between + nudge, numbers[1:]),
            (between - nudge, numbers[:-1]),
            (numbers[-1] * np.array([1.01, 2, 1e6, np.inf]), np.full(4, numbers[-1])),
        ):
            given = (sign * x).astype(storage)
            kept = given.copy()
            found = round_to_eight_bits(given, dtype)
            assert found.dtype == storage
            np.testing.assert_array_equal(found, sign * expected)
            np.testing.assert_array_equal(given, kept)
    assert np.isnan(round_to_eight_bits(np.array([np.nan], storage), dtype)).all()


def test_products_are_exact_in_float32() -> None:
    for dtype in LARGEST:
        numbers = GRIDS[dtype]
        exact = np.multiply.outer(numbers, numbers)
        np.testing.assert_array_equal(np.multiply.outer(*(numbers.astype(np.float32),) * 2).astype(np.float64), exact)


def test_another_dtype() -> None:
    with pytest.raises(HardwareError, match="unknown eight-bit dtype 'int4'; use one of int8, fp8"):
        round_to_eight_bits(np.zeros(2), "int4")
