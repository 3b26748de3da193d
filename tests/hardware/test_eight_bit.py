"""Grids of eight bits, against their definitions written out."""

from __future__ import annotations

import numpy as np
import pytest

from hardware import HardwareError
from hardware.eight_bit import LARGEST, round_to_eight_bits


def fp8_grid() -> np.ndarray:
    """Every finite e4m3 number: sign, 4 bits of exponent (bias 7), 3 of mantissa; the last code is no number."""
    found = []
    for code in range(127):
        exponent, mantissa = code >> 3, code & 7
        found.append(mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.array(found)


def grid(dtype: str) -> np.ndarray:
    """The numbers that are not negative, in order; the code of each is its place."""
    return fp8_grid() if dtype == "fp8" else np.arange(128.0)


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("storage", [np.float32, np.float64])
def test_every_number_and_what_lies_between(dtype: str, storage: type) -> None:
    numbers = grid(dtype)
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
        numbers = grid(dtype)
        exact = np.multiply.outer(numbers, numbers)
        np.testing.assert_array_equal(np.multiply.outer(*(numbers.astype(np.float32),) * 2).astype(np.float64), exact)


def test_another_dtype() -> None:
    with pytest.raises(HardwareError, match="unknown eight-bit dtype 'int4'; use one of int8, fp8"):
        round_to_eight_bits(np.zeros(2), "int4")
