"""The mesh of a MaxText configuration on a slice: ICI and DCN sizes of each axis, with one -1 of each resolved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hardware.slices import Slice
from layouts import Mesh
from meshlib.core.errors import nearest
from meshlib.models.maxtext.keys import PARTS
from meshlib.models.maxtext.settings import Settings

UNUSED = "sequence"  # keys of axes that MaxText has removed and ignores


@dataclass(frozen=True)
class AxisSizes:
    """Sizes of all mesh axes in MaxText's order, within a slice and across slices."""

    ici: Mapping[str, int]
    dcn: Mapping[str, int]

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis, over all slices."""
        return {axis: self.ici[axis] * self.dcn[axis] for axis in self.ici}

    @property
    def mesh(self) -> Mesh:
        """The axes with more than one device; a single-device axis if there is none."""
        several = {axis: size for axis, size in self.sizes.items() if size > 1}
        return Mesh(several or {"data": 1})

    @property
    def across(self) -> dict[str, int]:
        """The part of each axis across slices, as `placement` of `mtf.estimate`."""
        return {axis: size for axis, size in self.dcn.items() if size > 1}


def axes_of(s: Settings, where: Slice) -> AxisSizes:
    """The mesh axes on a slice.

    Raises: GraphError for sizes whose product is not that of the slice, more than one -1, and axes without a MaxText
    key.
    """
    names = s["mesh_axes"]
    if not isinstance(names, list | tuple) or not names:
        s.fail("mesh_axes", "must be a list of axes")
    for axis in names:
        if axis not in PARTS:
            s.fail("mesh_axes", f"there is no axis {axis!r}{nearest(str(axis), PARTS)}; MaxText has {', '.join(PARTS)}")
    if len(set(names)) < len(names):
        s.fail("mesh_axes", "names an axis twice")
    for axis, part in PARTS.items():
        for kind in ("ici", "dcn"):
            size = s.size(f"{kind}_{part}_parallelism", -1)
            if not size:
                s.fail(f"{kind}_{part}_parallelism", "must be at least 1, or -1 for the rest")
            absent = axis not in names and part not in [PARTS[name] for name in names]
            if size != 1 and absent and axis != UNUSED and kind == "ici":
                s.fail(f"{kind}_{part}_parallelism", f"mesh_axes has no axis {axis!r}: it has {', '.join(names)}")
    within = where.devices // where.slices
    return AxisSizes(_filled(s, "ici", names, within, where), _filled(s, "dcn", names, where.slices, where))


def _filled(s: Settings, kind: str, names: Sequence[str], total: int, where: Slice) -> dict[str, int]:
    keys = {axis: f"{kind}_{PARTS[axis]}_parallelism" for axis in names}
    sizes = {axis: s.size(key, -1) for axis, key in keys.items()}
    what = f"{total} devices of a slice" if kind == "ici" else f"{total} slice{'s' if total > 1 else ''}"
    left = [axis for axis, size in sizes.items() if size == -1]
    given = math.prod(size for size in sizes.values() if size > 0)
    if kind == "dcn" and total == 1:  # MaxText ignores them on one slice, unless more are requested
        most = max(sizes, key=lambda axis: sizes[axis])
        if given > 1:
            s.fail(keys[most], f"{where.name} is one slice: {_shown(sizes, keys)} asks for {given}")
        return dict.fromkeys(names, 1)
    if len(left) > 1:
        s.fail(keys[left[1]], f"only one {kind}_* may be -1, and {keys[left[0]]} is already")
    if left:
        if total % given:
            s.fail(
                keys[left[0]],
                f"{_shown(sizes, keys)} leaves {total} % {given} = {total % given} of the {what} of {where.name}",
            )
        sizes[left[0]] = total // given
    elif given != total:
        most = max(sizes, key=lambda axis: (sizes[axis], keys[axis] in s.values, axis == "data"))
        s.fail(
            keys[most],
            f"the product of {_shown(sizes, keys) or f'all {kind}_*'} is {given}, but {where.name} has {what}",
        )
    return sizes


def _shown(sizes: Mapping[str, int], keys: Mapping[str, str]) -> str:
    return ", ".join(f"{keys[axis]}={size}" for axis, size in sizes.items() if size > 1)
