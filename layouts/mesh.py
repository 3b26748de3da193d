"""The mesh: named axes of devices.

Devices are numbered row-major, the last axis fastest. A mesh has no topology; its placement on hardware is
decided elsewhere.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import prod
from types import MappingProxyType
from typing import TypeAlias, Union

from layouts.cells import clipped, mesh_cell
from layouts.dims import DimensionLike
from layouts.errors import LayoutError, nearest
from layouts.frozen import Interned
from layouts.parsing import is_iterable, named_sizes

Coordinate: TypeAlias = Sequence[int] | Mapping[str, int]
MeshLike: TypeAlias = Union["Mesh", str, Mapping[str, int], Iterable[DimensionLike]]


class Mesh(Interned):
    """Ordered axis names with their sizes.

    Args:
      axes: text like "rows:2;cols:4", a dict, (name, size) pairs, or another mesh.

    >>> from layouts import Mesh
    >>> mesh = Mesh("rows:2;cols:4")
    >>> mesh.size, mesh.axis_size("cols"), mesh.coordinate(6)
    (8, 4, (1, 2))
    >>> mesh.groups(["rows"])
    [[0, 4], [1, 5], [2, 6], [3, 7]]
    """

    __slots__ = ("_strides", "axes", "size", "sizes", "sizes_by_axis")

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    size: int
    sizes_by_axis: Mapping[str, int]
    _strides: tuple[int, ...]

    def __init__(self, axes: MeshLike) -> None:
        pairs = list(axes.sizes_by_axis.items()) if isinstance(axes, Mesh) else named_sizes(axes, "axis")
        if not pairs:
            raise LayoutError("a mesh needs at least one axis, for example 'all:1' for a single device")
        table = dict(pairs)
        if len(table) != len(pairs):
            twice = next(name for name, _ in pairs if sum(name == other for other, _ in pairs) > 1)
            raise LayoutError(f"axis {twice!r} occurs twice in one mesh: {';'.join(f'{n}:{s}' for n, s in pairs)}")
        sizes = tuple(table.values())
        strides = tuple(prod(sizes[i + 1 :]) for i in range(len(sizes)))
        by_axis = MappingProxyType(table)
        self._fill(
            tuple(pairs), axes=tuple(table), sizes=sizes, size=prod(sizes), sizes_by_axis=by_axis, _strides=strides
        )

    def axis_size(self, axis: str) -> int:
        """Number of devices along an axis.

        >>> from layouts import Mesh
        >>> Mesh("rows:2;cols:4").axis_size("column")
        Traceback (most recent call last):
        layouts.errors.LayoutError: no axis 'column' in mesh rows:2;cols:4; did you mean 'cols'?
        """
        size = self.sizes_by_axis.get(axis)
        if size is None:
            raise LayoutError(f"no axis {axis!r} in mesh {self}{nearest(axis, self.axes)}")
        return size

    def index(self, axis: str) -> int:
        """Position of an axis."""
        self.axis_size(axis)
        return self.axes.index(axis)

    def coordinates(self) -> list[tuple[int, ...]]:
        """The coordinates of all devices, in device order."""
        return list(product(*map(range, self.sizes)))

    def coordinate(self, device: int) -> tuple[int, ...]:
        """The coordinate of a device."""
        if not 0 <= device < self.size:
            raise LayoutError(f"no device {device} in mesh {self}; there are 0 to {self.size - 1}")
        return tuple(device // stride % size for stride, size in zip(self._strides, self.sizes, strict=True))

    def device(self, coordinate: Coordinate) -> int:
        """Number of the device at a coordinate, given in axis order or as {axis: index}.

        >>> from layouts import Mesh
        >>> Mesh("rows:2;cols:4").device({"cols": 2, "rows": 1})
        6
        """
        return sum(c * stride for c, stride in zip(self.checked(coordinate), self._strides, strict=True))

    def checked(self, coordinate: Coordinate) -> tuple[int, ...]:
        """A coordinate in axis order, checked for length and range."""
        if isinstance(coordinate, Mapping):
            if set(coordinate) != set(self.axes):
                wrong = ", ".join(map(repr, sorted(set(coordinate) ^ set(self.axes), key=str)))
                raise LayoutError(f"coordinate {dict(coordinate)} does not name the axes of mesh {self}: {wrong}")
            coordinate = [coordinate[axis] for axis in self.axes]
        point = tuple(coordinate) if is_iterable(coordinate) else (coordinate,)
        try:
            point = tuple(map(operator.index, point))
        except TypeError:
            point = ()
        if len(point) != len(self.sizes):
            raise LayoutError(
                f"a device of mesh {self} must be its number, or a coordinate with an integer for each axis, got "
                f"{coordinate!r:.80}"
            )
        if any(not 0 <= c < size for c, size in zip(point, self.sizes, strict=True)):
            raise LayoutError(f"coordinate {point} is outside mesh {self}")
        return point

    def group_size(self, axes: Iterable[str]) -> int:
        """Number of devices in a replica group over `axes`."""
        return prod(map(self.axis_size, axes))

    def groups(self, axes: Sequence[str]) -> list[list[int]]:
        """Replica groups: the devices that take part together in a collective over `axes`.

        Members are ordered by their coordinates on `axes`, first axis major; groups by the remaining
        coordinates.

        >>> from layouts import Mesh
        >>> Mesh("rows:2;cols:2").groups(["cols", "rows"])
        [[0, 2, 1, 3]]
        """
        axes = tuple(axes)
        if len(set(axes)) != len(axes):
            raise LayoutError(f"an axis occurs twice in {axes}")
        inner = [0]
        for axis in axes:
            stride = self._strides[self.index(axis)]
            inner = [base + i * stride for base in inner for i in range(self.sizes_by_axis[axis])]
        outer = [0]
        for axis, size, stride in zip(self.axes, self.sizes, self._strides, strict=True):
            if axis not in axes:
                outer = [base + i * stride for base in outer for i in range(size)]
        return [[base + member for member in inner] for base in outer]

    def __len__(self) -> int:
        return len(self.axes)

    def __contains__(self, axis: object) -> bool:
        return axis in self.sizes_by_axis

    def _repr_html_(self) -> str:
        return mesh_cell(self)

    def __str__(self) -> str:
        return ";".join(f"{axis}:{size}" for axis, size in self.sizes_by_axis.items())

    def __repr__(self) -> str:
        return clipped(f"Mesh({str(self)!r})")
