"""The slice that a program is to run on."""

from __future__ import annotations

from typing import Any

from hardware.errors import HardwareError
from hardware.slices import Slice
from layouts import Mesh
from meshlib.errors import SliceError


def slice_for(what: str, mesh: Mesh, slice: Any) -> Slice:
    """The slice of that name, or the slice itself, checked to have a device for each core of the mesh.

    Raises: SliceError with both numbers.
    """
    try:
        found = slice if isinstance(slice, Slice) else Slice(slice)
    except HardwareError as fault:
        raise SliceError(f"{what}: {fault}") from None
    if found.devices != mesh.size:
        raise SliceError(
            f"{what}: mesh {mesh} has {mesh.size} cores, but slice {found.name} has {found.devices} "
            f"devices ({found.chips} chips, {found.cores} cores); make their numbers equal"
        )
    return found
