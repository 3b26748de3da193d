"""The vector unit: 8 sublanes x 128 lanes, a few ALUs each, one float32 operation per ALU and cycle.

From v6e on bfloat16 runs natively, two values per lane; before, bf16 arithmetic is done in float32.

Source: jax-ml/scaling-book tpus.md; `hardware.chip_figures`.
"""

from __future__ import annotations

from hardware.checks import amount, one_of
from hardware.chips import Chip

VPU_DTYPES = ("float32", "bfloat16")


def vpu_rate(chip: Chip, dtype: str = "float32") -> float:
    """Element operations per second of one device.

    Args:
      chip: the chip.
      dtype: "float32" (also for integers) or "bfloat16".
    Raises: HardwareError for another dtype.
    Example:
      >>> from hardware.chips import CHIPS
      >>> vpu_rate(CHIPS["v5p"]) / 1e12  # two cores x 8 x 128 x 4 x 1.75 GHz
      14.336
    """
    one_of("dtype of the vector unit", dtype, VPU_DTYPES)
    per_cycle = chip.vpu_sublanes * chip.vpu_lanes * chip.vpu_alus_per_lane * chip.cores_per_device
    return chip.clock_hz * per_cycle * (2 if dtype == "bfloat16" and chip.vpu_bf16 else 1)


def vpu_seconds(chip: Chip, operations: float, dtype: str = "float32") -> float:
    """Seconds for that many element operations on one device.

    Example:
      >>> from hardware.chips import CHIPS
      >>> vpu_seconds(CHIPS["v5p"], 14.336e9)
      0.001
    """
    return amount("operations", operations) / vpu_rate(chip, dtype)
