"""What a machine does: chips, slices, MXU, vector unit, memory, torus, collectives, arithmetic.

Usable on its own; it knows bytes, FLOPs, cycles and coordinates, and nothing of named dimensions.

    chips  slices            published figures with sources; `Slice("v3-8")`
    mxu  systolic            the matrix unit: closed form, and clocked register by register
    numerics  eight_bit      bfloat16, int8 and fp8 rounding, the orders of addition of an MXU and of a ring
    memory  vpu  core        padding, bandwidths, time of one operation and what bounds it
    torus  events            coordinates, links, routes; messages over links, event by event
    collectives              closed forms
    ring_plans  point_plans  the same collectives as messages
    placement  network       mesh axes on torus axes; price of collectives there, best placement
    snakes                   rings through several axes

Example:
  >>> from hardware import MXU, Slice, Torus
  >>> Slice("v3-8").devices, MXU(128, 128).cycles(m=100, k=784, n=10), Torus((8, 4)).diameter
  (8, 1250, 6)

Every bad argument raises `HardwareError`. Nothing here imports another package of this distribution.
"""

from hardware.chips import CHIPS, Chip, get_chip, load_chip
from hardware.core import Matmul, Time, Work, time_of
from hardware.errors import HardwareError
from hardware.events import Links
from hardware.mxu import MXU
from hardware.network import Cost, Demand, best_placement, collective_cost, together_seconds
from hardware.placement import Placement, placements
from hardware.slices import Slice, legal_slices
from hardware.torus import Torus

__all__ = [
    "CHIPS",
    "MXU",
    "Chip",
    "Cost",
    "Demand",
    "HardwareError",
    "Links",
    "Matmul",
    "Placement",
    "Slice",
    "Time",
    "Torus",
    "Work",
    "best_placement",
    "collective_cost",
    "get_chip",
    "legal_slices",
    "load_chip",
    "placements",
    "time_of",
    "together_seconds",
]
