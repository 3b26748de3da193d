"""The price of bytes and work on a slice, for lowerings that minimise time."""

from __future__ import annotations

from typing import Any

from hardware.checks import HardwareError
from hardware.collectives import ring_sent_bytes
from hardware.core import vpu_seconds
from hardware.network import Demand, best_placement, collective_cost
from layouts import Mesh
from meshlib.core.errors import SliceError
from meshlib.core.slices import slice_for
from meshlib.lowering import Balance

PAYLOAD_BYTES = 64 << 20  # large enough to be limited by bandwidth
HEAVIER = 16  # assumed ratio of traffic between consecutive axes: layouts put the axis that sends least first, over DCN
EXPOSED = 0.5  # exposed share of a collective's time; products hide the rest, while nothing hides a product. Assumed


def balance(slice: Any, mesh: Any) -> Balance:
    """The `Balance` of a slice, by which `mtf.lower(..., balance=...)` weighs choices instead of a generic machine.

    A byte along each mesh axis costs the time of an all_gather along it per byte sent, relative to the cheapest axis:
    an axis over the slow links between slices is expensive. The placement is the best one if each axis sends much more
    than the one before it, so the first goes over the slow links. Work is priced at the peak rates of matrix and vector
    unit, with half of each collective hidden behind products. A launch costs a one-byte collective along the fastest
    axis.

    Args:
      slice: a name like "v5e-256", or a `hardware.Slice`.
      mesh: "rows:2;cols:4", a dict, pairs or a Mesh, with as many positions as the slice has devices.
    Returns: a Balance.
    Raises: SliceError for an unknown slice or one of another size.
    Example:
      >>> import meshlib as mtf
      >>> mtf.balance("v5e-256", "data:16;model:16").axis_prices
      (('data', 1.0), ('model', 1.0))

    Rates: `hardware.chips`; times of collectives: `hardware.network`. Modelled.
    """
    mesh = Mesh(mesh)
    slice_ = slice_for("balance", mesh, slice)
    sizes = {axis: n for axis, n in mesh.sizes_by_axis.items() if n > 1}
    try:
        placement, _ = best_placement(
            slice_,
            mesh.sizes_by_axis,
            [Demand("all_gather", (axis,), PAYLOAD_BYTES * HEAVIER**n) for n, axis in enumerate(sizes)],
        )
        seconds = {
            axis: collective_cost(placement, "all_gather", (axis,), PAYLOAD_BYTES).seconds
            / ring_sent_bytes("all_gather", PAYLOAD_BYTES, n)
            for axis, n in sizes.items()
        }
        flops_per_second = slice_.chip.peak_flops("bf16") / slice_.chip.devices_per_chip
    except HardwareError as fault:
        raise SliceError(f"balance: mesh {mesh} on {slice_.name}: {fault}") from None
    if not seconds:
        return Balance()
    byte_seconds = min(seconds.values())
    start_seconds = min(collective_cost(placement, "all_gather", (axis,), 1).seconds for axis in sizes)
    return Balance(
        mxu_flops_per_byte=EXPOSED * flops_per_second * byte_seconds,
        vpu_ops_per_byte=byte_seconds / vpu_seconds(slice_.chip, 1.0),
        axis_prices=tuple((axis, round(s / byte_seconds, 3)) for axis, s in seconds.items()),
        collective_bytes=start_seconds / byte_seconds,
    )
