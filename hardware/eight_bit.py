"""Eight-bit numbers of the MXU: int8, and fp8 with four exponent and three mantissa bits (e4m3).

Gradients may take the wider range of fp8 with five bits of exponent. All are exact in bfloat16 and float32, where they
are simulated; their products are exact in float32.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from hardware.checks import one_of

Array = NDArray[Any]

# Largest magnitude of each format; int8 without -128, so that it is symmetric.
LARGEST = {"int8": 127.0, "fp8": 448.0, "fp8_e5m2": 57344.0}
_FLOATS = {"fp8": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}


def round_to_eight_bits(x: Array, dtype: str) -> Array:
    """Round every element to the nearest number of the format (ties to even), saturating at its largest; NaN stays.

    Args:
      x: float32 or float64 array of any shape.
      dtype: "int8", whole numbers from -127 to 127, "fp8" or "fp8_e5m2", e4m3 and e5m2 of the Open Compute
        Project's specification.
    Returns: an array of x's shape and dtype.
    Raises: HardwareError for another dtype.
    Example:
      >>> round_to_eight_bits(np.array([0.5, 1.5, 2.6, 300.0]), "int8").tolist()
      [0.0, 2.0, 3.0, 127.0]
      >>> round_to_eight_bits(np.array([1.0625, 1.1, 300.0, 1e9]), "fp8").tolist()
      [1.0, 1.125, 288.0, 448.0]

    Source: OCP 8-bit floating point specification (OFP8), revision 1.0; jax-ml/ml_dtypes.
    """
    largest = LARGEST[one_of("eight-bit dtype", dtype, tuple(LARGEST))]
    near: Array = np.clip(x, -largest, largest)
    if dtype == "int8":
        return np.rint(near)
    with np.errstate(invalid="ignore"):
        return near.astype(_FLOATS[dtype]).astype(x.dtype)
