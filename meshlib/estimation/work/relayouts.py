"""Relayouts around a batched product that is a program of its own.

Operands and results of a program have their densest layouts. If a dim of the batch is in the lanes of such a layout,
the array is copied to or from one that tiles two other dims. So is a result with such a dim in the sublanes; operands
with one there are read as they are.

Registers of float32 pass through a copy in windows. A window is read, computed and written in turn, and each of its
sides that is in HBM starts a transfer. The copy stays in VMEM where it fits, unless two cores share the work.

Source: layouts, windows and cycles that libtpu 0.0.42.1 states for products of v5e, v5p, v6e and v7
(tests/benchmarks/single_operations.py). On v5e a transposing window of 384 registers takes 5,098 cycles with one side
in HBM, 10,096 with two: on each side 1,800 for the start of the transfer, and 8.3 for each register, the rate of HBM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from hardware.chips import Chip
from hardware.memory import LANES, SUBLANES, hbm_seconds, tiled_dims, vmem_bytes
from meshlib.core.compiler import XLA_TPU
from meshlib.estimation.work.products import product_of
from meshlib.estimation.work.stored_values import Stored
from meshlib.estimation.work.tiles import tiled_bytes
from meshlib.program.instructions import Compute

REGISTER_BYTES = 4 * SUBLANES * LANES
TRANSPOSED_REGISTERS, MOVED_REGISTERS = 384, 1024  # of a window, if lanes change, or sublanes


@dataclass(frozen=True, slots=True)
class Relayout:
    """A copy of a product's operand or result from or to its densest layout.

    Attributes:
      dense, plain: float32 registers of the value in its densest layout, and in the product's.
      window: registers of a window.
      of_result: whether the product writes the value.
      copied_bytes: bytes of the value in the product's layout.
    """

    dense: int
    plain: int
    window: int
    of_result: bool
    copied_bytes: int

    def is_held(self, chip: Chip) -> bool:
        """True if the copy stays in VMEM."""
        return chip.cores_per_device == 1 and self.copied_bytes <= vmem_bytes(chip) // 2

    def seconds(self, chip: Chip) -> float:
        """Seconds of the copy."""
        sides = (self.dense,) if self.is_held(chip) else (self.dense, self.plain)
        starts = sum(-(-side // self.window) for side in sides) / chip.cores_per_device
        return starts * chip.transfer_seconds + hbm_seconds(chip, REGISTER_BYTES * sum(sides))


def relayouts_of(product: Compute, stored: Stored) -> Iterator[Relayout]:
    """The relayouts of a product's operands and result; none are known of windows."""
    values = (*product.inputs[:2], *product.outputs)
    batch = set.intersection(*(set(v.local_shape.names) for v in values))
    for v in values if batch and product_of(product).taps == 1 else ():
        names, sizes = v.local_shape.names, v.local_shape.sizes
        matrix = tuple(d.size for d in v.local_shape if d.name not in batch)
        if len(matrix) < 2:
            continue
        second, minor = (names[n] in batch for n in tiled_dims(sizes, stored.itemsize(v)))
        of_result = v in product.outputs
        if minor or (second and of_result):
            items, itemsize = prod(sizes) // prod(matrix), min(2, stored.itemsize(v))
            dense, plain = tiled_bytes(sizes, 4), items * tiled_bytes(matrix, 4)
            window = TRANSPOSED_REGISTERS if minor else MOVED_REGISTERS
            copied_bytes = items * tiled_bytes(matrix, itemsize)
            yield Relayout(dense // REGISTER_BYTES, plain // REGISTER_BYTES, window, of_result, copied_bytes)


def product_launch_seconds(chip: Chip, relayouts: Sequence[Relayout]) -> float:
    """Starts of the transfers before and after a product, beyond what its program costs; none of what stays in VMEM."""
    held = [copy.of_result for copy in relayouts if copy.is_held(chip)]
    transfers = (held.count(False) < 2) + (True not in held)
    return max(0.0, transfers * chip.transfer_seconds - XLA_TPU.step_overhead_seconds)
