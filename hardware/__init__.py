"""The machine: chips, slices, MXU, vector unit, memory, torus, collectives, arithmetic.

Usable on its own; it knows bytes, FLOPs, cycles and coordinates, and nothing of named dimensions.

Example:
  >>> from hardware import MXU, Slice, Torus
  >>> Slice("v3-8").devices, MXU(128, 128).cycles(m=100, k=784, n=10), Torus((8, 4)).diameter
  (8, 1250, 6)

Every bad argument raises `HardwareError`. Nothing here imports another package of this distribution.
"""

import typing as _typing
from pathlib import Path as _Path

from hardware.checks import HardwareError as HardwareError
from hardware.chip_files import load_chip as load_chip
from hardware.chips import CHIPS as CHIPS
from hardware.chips import Chip as Chip
from hardware.chips import get_chip as get_chip
from hardware.core import Matmul as Matmul
from hardware.core import Time as Time
from hardware.core import Work as Work
from hardware.core import time_of as time_of
from hardware.events import Links as Links
from hardware.mxu import MXU as MXU
from hardware.network import Cost as Cost
from hardware.network import Demand as Demand
from hardware.network import best_placement as best_placement
from hardware.network import collective_cost as collective_cost
from hardware.placement import Placement as Placement
from hardware.placement import placements as placements
from hardware.sharing import together_seconds as together_seconds
from hardware.slices import Slice as Slice
from hardware.slices import legal_slices as legal_slices
from hardware.torus import Torus as Torus


def _check_own_packages() -> None:
    # The three packages are installed together. `meshlib` (3-D geometry) and `hardware` on the package index are other
    # projects, which would write into the same folders.
    root = _Path(__file__).resolve().parent.parent
    for name in ("meshlib", "layouts"):
        file = root / name / "__init__.py"
        if file.is_file() and b"meshlib-tpu" not in file.read_bytes():
            raise ImportError(
                f"hardware belongs to meshlib-tpu, but another distribution has written {file}; "
                "install meshlib-tpu in an environment of its own"
            )


_check_own_packages()

if not _typing.TYPE_CHECKING:

    def __getattr__(name):
        from importlib import import_module
        from importlib.util import find_spec

        from hardware.unknown_names import elsewhere

        if not name.startswith("_") and find_spec(f"hardware.{name}") is not None:
            return import_module(f"hardware.{name}")
        raise AttributeError(f"module 'hardware' has no attribute '{name}'{elsewhere(name)}")
