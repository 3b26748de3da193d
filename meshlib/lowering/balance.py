"""`Balance`: the price of duplicated work in bytes, and of bytes on each axis."""

from __future__ import annotations

from dataclasses import dataclass

from meshlib.core.opdef import Work
from meshlib.lowering.materialisation import Prices


@dataclass(frozen=True)
class Balance:
    """Price of duplicated work, in bytes sent per device.

    Nominal: one operation a byte, far below a chip's real balance (TPU v3: about 800 MXU flops per ICI byte). At the
    real one a step of a small batch would gather its activations and compute whole gradients on every core: cheaper
    on paper, but not what somebody who splits the batch means. So work that a layout divides stays divided unless
    duplicating it is next to free.

    `axis_prices` are what a byte sent along an axis is worth, where they differ: (axis, price) pairs, 1 for the others.
    `collective_bytes` is what starting a collective is worth, whatever it sends; at 0, the default, the fewest
    bytes are sent. `mtf.balance` makes all that of a slice.

    `stationary`: a variable never moves over an axis that a required rule gives to one of its dims, if the rule holds
    for activations too: these come to the weight, as in Megatron, even where gathering the weight would send less. An
    optional rule, or one for variables alone, says where a weight is stored; it moves where that sends less.

    Example:
      >>> import meshlib as mtf
      >>> balance = mtf.balance("v5e-8", "data:8")  # what the links and the MXU of a slice make of it
      >>> balance.collective_bytes > mtf.Balance().collective_bytes
      True
    """

    mxu_flops_per_byte: float = 1.0
    vpu_ops_per_byte: float = 32.0
    stationary: bool = True
    axis_prices: Prices = ()
    collective_bytes: float = 0.0

    def bytes_of(self, work: Work) -> float:
        """The price of a device's work, in bytes."""
        return work.mxu_flops / self.mxu_flops_per_byte + work.vpu_ops / self.vpu_ops_per_byte
