"""The slice for a program: from a name or a Slice, with as many devices as the mesh."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hardware.checks import HardwareError
from hardware.slices import Slice
from layouts import Mesh
from meshlib.core.errors import SliceError
from meshlib.core.text import counted

# Chip figures on which all modelled times depend.
ESSENTIAL = (
    "clock_hz", "mxus_per_core", "mxu_rows", "mxu_columns", "vmem_bytes_per_core", "hbm_bytes_per_second",
    "ici_bytes_per_second", "pod_shape", "wrap_cube",
)  # fmt: skip


def assumed_figures(slices: Iterable[Slice]) -> list[str]:
    """One line per chip whose essential figures are partly without a public source.

    >>> assumed_figures([Slice("v5e-16"), Slice("v7-8"), Slice("v7-16")])
    ['v7, assumed, derived or recalled: clock_hz, mxu_rows, pod_shape, wrap_cube']
    """
    chips = {slice_.chip.name: slice_.chip for slice_ in slices}
    names = {name: [f for f in chip.unpublished if f in ESSENTIAL] for name, chip in chips.items()}
    return [f"{name}, assumed, derived or recalled: {', '.join(given)}" for name, given in names.items() if given]


def slice_for(what: str, mesh: Mesh, slice: Any) -> Slice:
    """The slice of that name, or the slice itself, with as many devices as the mesh has positions.

    Raises: SliceError with both numbers.
    """
    try:
        slice_ = slice if isinstance(slice, Slice) else Slice(slice)
    except HardwareError as fault:
        raise SliceError(f"{what}: {fault}") from None
    if slice_.devices != mesh.size:
        raise SliceError(
            f"{what}: mesh {mesh} has {counted(mesh.size, 'position')}, but slice {slice_.name} has "
            f"{counted(slice_.devices, 'device')} ({counted(slice_.chips, 'chip')}, {counted(slice_.cores, 'core')}); "
            f"{_remedy(mesh, slice_)}"
        )
    return slice_


def _remedy(mesh: Mesh, slice_: Slice) -> str:
    """A mesh of the right size: the difference goes to the largest axis that can take it."""
    for axis, size in sorted(mesh.sizes_by_axis.items(), key=lambda item: -item[1]):
        if size * slice_.devices % mesh.size == 0:
            sizes = {**mesh.sizes_by_axis, axis: size * slice_.devices // mesh.size}
            return f"use {';'.join(f'{name}:{n}' for name, n in sizes.items())}"
    return "make their numbers equal"
