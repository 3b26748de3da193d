"""`Balance`: the price of duplicated work in bytes, and of bytes on each axis."""

from __future__ import annotations

from dataclasses import dataclass

from meshlib.core.arguments import at, flag, number
from meshlib.core.errors import GraphError
from meshlib.core.opdef import Work


@dataclass(frozen=True)
class Balance:
    """Price of duplicated work, in bytes sent per device.

    The default is nominal, far below a chip's real balance (TPU v3: about 800 MXU flops per ICI byte): with the real
    one, a step with a small batch would gather its activations and compute whole gradients on every device, which is
    not what a user who splits the batch expects. So work that a layout divides stays divided unless duplicating it is
    almost free. `mtf.balance` derives the prices from a slice.

    Attributes:
      mxu_flops_per_byte: MXU flops that cost as much as sending one byte.
      vpu_ops_per_byte: VPU operations that cost as much as sending one byte.
      stationary: whether weights never move over an axis that a required rule gives to one of their dims, if that rule
        also applies to activations. These then move to the weight, as in Megatron, even where gathering the weight
        would send less. An optional rule, or one for variables alone, only says where a weight is stored.
      axis_prices: (axis, price of a byte sent along it) pairs; 1 for other axes.
      collective_bytes: price of launching a collective, in bytes; at 0 the fewest bytes are sent.
    Example:
      >>> import meshlib as mtf
      >>> balance = mtf.balance("v5e-8", "data:8")  # from the slice's links and MXU
      >>> balance.collective_bytes > mtf.Balance().collective_bytes
      True
    """

    mxu_flops_per_byte: float = 1.0
    vpu_ops_per_byte: float = 32.0
    stationary: bool = True
    axis_prices: tuple[tuple[str, float], ...] = ()
    collective_bytes: float = 0.0

    def __post_init__(self) -> None:
        flag(self.stationary, "Balance", "stationary")
        for name in ("mxu_flops_per_byte", "vpu_ops_per_byte", "collective_bytes"):
            value = number(getattr(self, name), "Balance", name)
            if value < 0 or (value == 0 and name != "collective_bytes"):
                raise GraphError(f"{at('Balance')}: {name} must be positive, got {value}")

    def bytes_of(self, work: Work) -> float:
        """The price of a device's work, in bytes."""
        return work.mxu_flops / self.mxu_flops_per_byte + work.vpu_ops / self.vpu_ops_per_byte
