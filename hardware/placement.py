"""Placements of mesh axes on the axes of a slice.

A slice offers *places* for mesh axes: its torus axes, the devices of a chip (where a chip shows two), and the
slices themselves where several are joined by DCN. Each place of size n is cut in factors, each factor belongs
to one mesh axis, and a mesh axis is the product of its factors: part of a torus axis, one, or several.

On one torus axis the last factor has stride 1, the one before it the size of the last, and so on. Of a factor
of size f and stride s on an axis of n nodes:

    f = n           the axis itself, wrapped if it is
    s f = n, wrap   a ring whose neighbours are s hops apart
    otherwise       a line without wrap, s hops apart

A link on the way carries the traffic of s interleaved groups, and of all devices of a chip, so each has that
share of it. `hardware.network` prices collectives on a placement and chooses among all of them.

Source: jax-ml/jax jax/experimental/mesh_utils.py assigns whole axes; the rest is counted out here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from hardware.checks import HardwareError, names, whole
from hardware.slices import Slice, as_slice

CORES, DCN = -1, -2  # places that are not torus axes


class PlacementFactor(NamedTuple):
    """A part of a place: `size` positions, `stride` apart, on place `place` (a torus axis, CORES or DCN)."""

    place: int
    size: int
    stride: int


Factors: TypeAlias = tuple[tuple[str, tuple[PlacementFactor, ...]], ...]  # of each mesh axis by name


@dataclass(frozen=True)
class Placement:
    """Position of a mesh on a slice: of each axis by name the factors, the major one first.

    Raises: HardwareError unless there is a slice, or its name, and the factors of every place tile it exactly.
    Example:
      >>> from hardware import Slice, placements
      >>> placement = next(placements(Slice("v3-32"), {"data": 8, "model": 4}))
      >>> placement.device({"data": 0, "model": 0})
      (0, (0, 0), 0)
    """

    slice: Slice
    factors: Factors

    def __post_init__(self) -> None:
        object.__setattr__(self, "slice", as_slice(self.slice))
        self._check_types()
        spots = places(self.slice)
        lies: dict[int, list[PlacementFactor]] = {place: [] for place, _ in spots}
        for factor in self.all_factors():
            if factor.place not in lies:
                raise HardwareError(f"{factor} is on no torus axis, cores or DCN of {self.slice}")
            lies[factor.place].append(factor)
        for place, size in spots:
            mine, stride = sorted(lies[place], key=lambda f: f.stride), 1
            for factor in mine:
                if factor.stride != stride:
                    raise HardwareError(f"factors {mine} do not tile {place_name(place)} of size {size}")
                stride *= factor.size
            if stride != size:
                raise HardwareError(f"factors {mine} cover {stride} of the {size} positions of {place_name(place)}")

    def _check_types(self) -> None:
        """Check that axes are pairs of a unique name and its factors, and factors whole numbers."""
        given: object = self.factors
        for pair in given if isinstance(given, tuple) else (given,):
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
                raise HardwareError(f"factors of a placement are ((name, (PlacementFactor, ...)), ...): {given!r}")
            if not isinstance(pair[1], tuple) or not all(isinstance(factor, PlacementFactor) for factor in pair[1]):
                raise HardwareError(f"axis {pair[0]!r} must be placed on a tuple of PlacementFactor, not {pair[1]!r}")
            for factor in pair[1]:
                if any(type(number) is not int for number in factor) or factor.size < 1 or factor.stride < 1:
                    raise HardwareError(f"{factor} must be three integers, size and stride at least 1")
        if len(dict(self.factors)) < len(self.factors):
            raise HardwareError(f"every mesh axis is placed once; got {[name for name, _ in self.factors]}")

    def __hash__(self) -> int:
        return hash((self.slice.chip.name, self.slice.torus_shape, self.slice.twisted, self.factors))

    @property
    def mesh(self) -> dict[str, int]:
        """Axis name -> size, in order."""
        return {name: math.prod(f.size for f in factors) for name, factors in self.factors}

    def all_factors(self) -> Iterator[PlacementFactor]:
        """The factors of all axes."""
        return itertools.chain.from_iterable(factors for _, factors in self.factors)

    def of(self, axes: Sequence[str]) -> tuple[PlacementFactor, ...]:
        """Factors of several mesh axes together; neighbours on one place are joined.

        Raises: HardwareError for an unknown or repeated axis.
        """
        axes, table = names("axes", axes), dict(self.factors)
        unknown = [axis for axis in axes if axis not in table]
        if unknown or len(set(axes)) != len(axes):
            raise HardwareError(f"axes {list(axes)} are not distinct axes of the mesh {self.mesh}")
        return join(factor for axis in axes for factor in table[axis])

    def wraps(self, factor: PlacementFactor) -> bool:
        """True if the positions of a factor on a torus axis close to a ring."""
        return wraps(self.slice, factor)

    def device(self, coordinates: Mapping[str, int]) -> tuple[int, tuple[int, ...], int]:
        """(slice, torus coordinates, device of the chip) of a position in the mesh.

        Args:
          coordinates: mesh axis name -> index.
        Raises: HardwareError for other axes than those of the mesh, or an index outside.
        """
        mesh = self.mesh
        if set(coordinates) != set(mesh):
            raise HardwareError(f"coordinates {dict(coordinates)} must name the axes of the mesh {mesh}")
        at = dict.fromkeys([place for place, _ in places(self.slice)], 0)
        for name, factors in self.factors:
            index = whole(f"coordinate {name!r}", coordinates[name])
            if index >= mesh[name]:
                raise HardwareError(f"coordinate {name!r} = {index} is outside an axis of {mesh[name]}")
            for factor in reversed(factors):
                index, digit = divmod(index, factor.size)
                at[factor.place] += digit * factor.stride
        torus = tuple(at[axis] for axis in range(len(self.slice.torus_shape)))
        return at[DCN], torus, at[CORES]

    def __str__(self) -> str:
        lines = [f"mesh {';'.join(f'{n}:{s}' for n, s in self.mesh.items())} on {self.slice}"]
        for name, factors in self.factors:
            parts = [self._describe(factor) for factor in factors] or ["nowhere (size 1)"]
            lines.append(f"  {name}: " + " x ".join(parts))
        return "\n".join(lines)

    def _describe(self, factor: PlacementFactor) -> str:
        if factor.place < 0:
            return f"{factor.size} {place_name(factor.place)}"
        size = self.slice.torus_shape[factor.place]
        share = factor.stride * self.slice.chip.devices_per_chip
        part = "" if factor.size == size else f" of {size}"
        shape = "ring" if self.wraps(factor) else "line"
        where = f"{factor.size}{part} on {place_name(factor.place)}"
        return f"{where} ({shape}, hops {factor.stride}, link load {share})"


def wraps(slice_: Slice, factor: PlacementFactor) -> bool:
    """True if the positions of a factor on a torus axis of `slice_` close to a ring."""
    if factor.place < 0:
        return False
    return slice_.wrap[factor.place] and factor.size * factor.stride == slice_.torus_shape[factor.place]


def join(factors: Iterable[PlacementFactor]) -> tuple[PlacementFactor, ...]:
    """Sort factors by place, and merge those that are adjacent on one place.

    Example:
      >>> join([PlacementFactor(0, 2, 4), PlacementFactor(0, 4, 1)])
      (PlacementFactor(place=0, size=8, stride=1),)
    """
    joined: list[PlacementFactor] = []
    for factor in sorted(factors, key=lambda f: (f.place, f.stride)):
        before = joined[-1] if joined else None
        if before and before.place == factor.place and before.stride * before.size == factor.stride:
            joined[-1] = PlacementFactor(factor.place, before.size * factor.size, before.stride)
        else:
            joined.append(factor)
    return tuple(joined)


def places(slice_: Slice) -> list[tuple[int, int]]:
    """(place, size) of every place that mesh axes can be mapped to, outermost first.

    Example:
      >>> places(Slice("v3-8"))
      [(-2, 1), (0, 2), (1, 2), (-1, 2)]
    """
    torus = list(enumerate(slice_.torus_shape))
    return [(DCN, slice_.slices), *torus, (CORES, slice_.chip.devices_per_chip)]


def place_name(place: int) -> str:
    """Name for messages, such as "torus axis 0"."""
    return {CORES: "devices of a chip", DCN: "slices over DCN"}.get(place, f"torus axis {place}")


def check_mesh(slice_: Slice, mesh: Mapping[str, int]) -> dict[str, int]:
    """Check that the mesh has as many positions as the slice has devices; return it as a dict.

    Raises: HardwareError with both numbers.
    """
    if not isinstance(mesh, Mapping) or not all(isinstance(name, str) for name in mesh):
        raise HardwareError(f"a mesh is a mapping of axis name -> size, not {mesh!r}")
    sizes = {name: whole(f"mesh axis {name!r}", size, low=1) for name, size in mesh.items()}
    total = math.prod(sizes.values())
    if total != slice_.devices:
        listing = ";".join(f"{name}:{size}" for name, size in sizes.items())
        raise HardwareError(f"mesh {listing} has {total} positions, {slice_}: they must be equal")
    return sizes


def placements(slice_: Slice | str, mesh: Mapping[str, int]) -> Iterator[Placement]:
    """Every placement of a mesh on a slice: all ways to cut places in factors, in all orders.

    Within one mesh axis the factors nest in the order DCN, torus axes, devices of a chip; other nestings
    number the devices differently but use the same links.

    Args:
      slice_: the slice, or its name.
      mesh: axis name -> size.
    Raises: HardwareError if the product of the sizes is not the number of devices.
    Example:
      >>> from hardware import Slice, placements
      >>> len(list(placements(Slice("v5e-16"), {"data": 4, "model": 4})))
      6

    Source: module docstring.
    """
    slice_ = as_slice(slice_)
    for factors in factorings(slice_, mesh):
        yield Placement(slice_, factors)


def factorings(slice_: Slice, mesh: Mapping[str, int]) -> Iterator[Factors]:
    """The factors of each of `placements`, unchecked and without the slice.

    Raises: HardwareError as `placements`.
    """
    sizes = check_mesh(slice_, mesh)
    large = [name for name, size in sizes.items() if size > 1]
    spots = places(slice_)
    for cuts in _cuts(spots, tuple(sizes[name] for name in large)):
        per_place = [_ordered(place, cut) for (place, _), cut in zip(spots, cuts, strict=True)]
        for choice in itertools.product(*per_place):
            lies: dict[str, tuple[PlacementFactor, ...]] = dict.fromkeys(sizes, ())
            for placed in choice:
                for axis, factor in placed:
                    lies[large[axis]] += (factor,)
            yield tuple(lies.items())


def _cuts(spots: list[tuple[int, int]], sizes: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """Every split of all places among the axes, as one tuple of factors per place."""
    if not spots:
        if all(size == 1 for size in sizes):
            yield []
        return
    for cut in _shares(spots[0][1], sizes):
        rest = tuple(size // share for size, share in zip(sizes, cut, strict=True))
        for others in _cuts(spots[1:], rest):
            yield [cut, *others]


def _shares(total: int, sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Tuples of one divisor of each size whose product is `total`."""
    if not sizes:
        if total == 1:
            yield ()
        return
    for share in range(1, total + 1):
        if total % share == 0 and sizes[0] % share == 0:
            for others in _shares(total // share, sizes[1:]):
                yield (share, *others)


def _ordered(place: int, cut: tuple[int, ...]) -> list[list[tuple[int, PlacementFactor]]]:
    """The factors of one place in every order, with their strides."""
    present = [axis for axis, share in enumerate(cut) if share > 1]
    orders = []
    for order in itertools.permutations(present):
        stride, placed = 1, []
        for axis in order:
            placed.append((axis, PlacementFactor(place, cut[axis], stride)))
            stride *= cut[axis]
        orders.append(placed)
    return orders
