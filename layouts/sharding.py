"""Sharding: the axes that split each dim of a tensor, and its pending reductions.

Each dimension has an ordered tuple of mesh axes, major first: with (a, b) a device at a = i, b = j has block
i * |b| + j of |a| * |b|. An axis in no dimension replicates, unless it is `pending`: then the true value is the sum (or
max, or min) of the blocks along it, still to be reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import NoReturn, TypeAlias

from layouts.cells import clipped, sharding_cell
from layouts.dims import Dimension, Shape, ShapeLike
from layouts.errors import LayoutError, nearest
from layouts.frozen import Interned
from layouts.mesh import Coordinate, Mesh, MeshLike

Axes: TypeAlias = tuple[str, ...]
Pending: TypeAlias = tuple[tuple[str, str], ...]

PENDING_KINDS = ("sum", "max", "min")


class Sharding(Interned):
    """The sharding of a shape over a mesh.

    Axes of size 1 are checked and then dropped, so that equivalent shardings are equal.
    All pending axes have one kind: a maximum of sums is not a sum of maxima.

    Args:
      shape: the global shape.
      mesh: the mesh.
      axes: per dimension the axes that split it, major first.
      pending: (axis, kind) pairs, kind one of "sum", "max", "min".

    >>> from layouts import Sharding
    >>> s = Sharding("batch:512;hidden:1024", "rows:2;cols:4", [("rows",), ()], [("cols", "sum")])
    >>> print(s, s.local_shape)
    [batch:512@rows, hidden:1024] {sum over cols} [batch:256, hidden:1024]
    >>> s.slices((1, 3))
    (slice(256, 512, None), slice(0, 1024, None))
    """

    __slots__ = (
        "_local", "_split", "axes", "block_counts", "local_size", "mesh", "pending", "pending_axes", "shape",
    )  # fmt: skip

    shape: Shape
    mesh: Mesh
    axes: tuple[Axes, ...]
    pending: Pending
    pending_axes: Axes  # axes with pending reductions, in mesh order
    block_counts: tuple[int, ...]  # per dim
    local_size: int  # the number of elements in one device's block
    _local: Shape | None
    _split: frozenset[str] | None

    def __init__(
        self,
        shape: ShapeLike,
        mesh: MeshLike,
        axes: Sequence[Sequence[str]],
        pending: Mapping[str, str] | Iterable[tuple[str, str]] = (),
    ) -> None:
        shape = shape if isinstance(shape, Shape) else Shape(shape)
        mesh = mesh if isinstance(mesh, Mesh) else Mesh(mesh)
        given, awaited = _names(axes, pending)
        sizes = mesh.sizes_by_axis
        used = [a for entry in given for a in entry] + [a for a, _ in awaited]
        counts = _block_counts(shape, sizes, given, used)
        if counts is None or not _is_one_kind(awaited):
            _refuse(shape, mesh, given, awaited)
        if any(sizes[a] == 1 for a in used):
            given = tuple(tuple(a for a in entry if sizes[a] > 1) for entry in given)
        if awaited:
            kinds = dict(awaited)
            awaited = tuple((a, kinds[a]) for a in mesh.axes if a in kinds and mesh.axis_size(a) > 1)
        key = shape, mesh, given, awaited
        self._fill(
            *key, shape=shape, mesh=mesh, axes=key[2], pending=awaited, pending_axes=tuple(a for a, _ in awaited),
            block_counts=tuple(counts), local_size=shape.size // prod(counts), _local=None, _split=None,
        )  # fmt: skip

    @classmethod
    def replicated(cls, shape: ShapeLike, mesh: MeshLike) -> Sharding:
        """The sharding with the whole tensor on every device.

        >>> from layouts import Sharding
        >>> print(Sharding.replicated("batch:512", "rows:2"))
        [batch:512]
        """
        shape = shape if isinstance(shape, Shape) else Shape(shape)
        return cls(shape, mesh, ((),) * shape.ndim)

    def of(self, dim: str | Dimension) -> Axes:
        """The axes that split a dimension, major first."""
        return self.axes[self.shape.index(dim)]

    @property
    def split_axes(self) -> frozenset[str]:
        """The axes that split any dimension."""
        split = self._split
        if split is None:
            split = frozenset([axis for entry in self.axes for axis in entry])
            object.__setattr__(self, "_split", split)
        return split

    @property
    def local_shape(self) -> Shape:
        """The shape of one device's block."""
        local = self._local
        if local is None:
            local = block(self.shape, self.block_counts)
            object.__setattr__(self, "_local", local)
        return local

    def block_index(self, coordinate: Coordinate) -> tuple[int, ...]:
        """The index, per dimension, of the block on the device at `coordinate`.

        >>> from layouts import Sharding
        >>> Sharding("n:8", "a:2;b:4", [("b", "a")]).block_index((1, 2))
        (5,)
        """
        mesh = self.mesh
        at = dict(zip(mesh.axes, mesh.checked(coordinate), strict=True))
        blocks = []
        for entry in self.axes:
            block = 0
            for axis in entry:
                block = block * mesh.sizes_by_axis[axis] + at[axis]
            blocks.append(block)
        return tuple(blocks)

    def offsets(self, coordinate: Coordinate) -> tuple[int, ...]:
        """First global index, per dimension, of the block on the device at `coordinate`."""
        blocks = self.block_index(coordinate)
        return tuple(i * d.size for i, d in zip(blocks, self.local_shape.dims, strict=True))

    def slices(self, coordinate: Coordinate) -> tuple[slice, ...]:
        """The slices of the global array for the device at `coordinate`."""
        offsets = self.offsets(coordinate)
        return tuple(slice(o, o + d.size) for o, d in zip(offsets, self.local_shape.dims, strict=True))

    def holders(self, block_index: Sequence[int]) -> tuple[int, ...]:
        """The devices that have a block, in order.

        >>> from layouts import Sharding
        >>> Sharding("n:8", "a:2;b:4", [("a",)]).holders((1,))
        (4, 5, 6, 7)
        """
        block = tuple(block_index)
        if len(block) != len(self.block_counts) or any(
            not 0 <= i < n for i, n in zip(block, self.block_counts, strict=True)
        ):
            raise LayoutError(f"no block {block} in {self}: it has {self.block_counts} blocks")
        devices = (d for d, c in enumerate(self.mesh.coordinates()) if self.block_index(c) == block)
        return tuple(devices)

    def with_axes(self, axes: Sequence[Sequence[str]]) -> Sharding:
        """A copy with other axes on the dimensions."""
        return Sharding(self.shape, self.mesh, axes, self.pending)

    def with_pending(self, pending: Mapping[str, str] | Iterable[tuple[str, str]]) -> Sharding:
        """A copy with other pending reductions."""
        return Sharding(self.shape, self.mesh, self.axes, pending)

    def drop_pending(self, axes: Iterable[str] | None = None) -> Sharding:
        """A copy with the reductions over `axes` (by default all) completed.

        >>> from layouts import Sharding
        >>> print(Sharding("n:8", "a:2;b:4", [()], {"a": "sum", "b": "sum"}).drop_pending(["a"]))
        [n:8] {sum over b}
        """
        if not self.pending:
            return self
        gone = self.pending_axes if axes is None else tuple(axes)
        return self.with_pending(pair for pair in self.pending if pair[0] not in gone)

    def _repr_html_(self) -> str:
        return sharding_cell(self)

    def __str__(self) -> str:
        entries = zip(self.shape.dims, self.axes, strict=True)
        text = ", ".join(f"{dim}@{'+'.join(axes)}" if axes else str(dim) for dim, axes in entries)
        if not self.pending:
            return f"[{text}]"
        by_kind = groupby(self.pending, key=lambda pair: pair[1])
        awaited = "; ".join(f"{kind} over {'+'.join(axis for axis, _ in pairs)}" for kind, pairs in by_kind)
        return f"[{text}] {{{awaited}}}"

    def __repr__(self) -> str:
        return clipped(f"Sharding({str(self)!r} on {self.mesh})")


def _block_counts(
    shape: Shape, sizes: Mapping[str, int], axes: tuple[Axes, ...], used: Sequence[str]
) -> list[int] | None:
    """Number of blocks of each dim; None if an axis is unknown, used twice, or does not divide its dim."""
    if len(axes) != len(shape.dims) or len(set(used)) != len(used) or any(a not in sizes for a in used):
        return None
    counts = [prod([sizes[a] for a in entry]) if entry else 1 for entry in axes]
    return None if any(d.size % n for d, n in zip(shape.dims, counts, strict=True)) else counts


def _is_one_kind(pending: Pending) -> bool:
    """True if all pending reductions have the same known kind."""
    if not pending:
        return True
    first = pending[0][1]
    return first in PENDING_KINDS and all(kind == first for _, kind in pending)


def _names(
    axes: Sequence[Sequence[str]], pending: Mapping[str, str] | Iterable[tuple[str, str]]
) -> tuple[tuple[Axes, ...], Pending]:
    """Axes of each dim and pending pairs as tuples of names; LayoutError for anything else."""
    try:
        given = tuple([(a,) if isinstance(a, str) else tuple(a) for a in axes])
        awaited = tuple(pending.items()) if isinstance(pending, Mapping) else tuple([(a, k) for a, k in pending])
        if all(isinstance(a, str) for entry in (*given, *awaited) for a in entry):
            return given, awaited
    except (TypeError, ValueError):
        pass
    raise LayoutError(
        f"axes are names per dimension and pending (axis, kind) pairs, not {axes!r:.80} and {pending!r:.80}"
    )


@lru_cache(maxsize=1 << 16)
def block(shape: Shape, counts: tuple[int, ...]) -> Shape:
    """The shape of one block, with `counts` equal blocks along each dimension.

    >>> print(block(Shape("batch:512;hidden:1024"), (2, 1)))
    [batch:256, hidden:1024]
    """
    cut = zip(shape.dims, counts, strict=True)
    return Shape(d if n == 1 else Dimension(d.name, d.size // n) for d, n in cut)


@lru_cache(maxsize=1 << 16)
def laid(shape: Shape, mesh: Mesh, axes: tuple[Axes, ...], pending: Pending = ()) -> Sharding:
    """The `Sharding` of exactly these arguments, checked once."""
    return Sharding(shape, mesh, axes, pending)


def _refuse(shape: Shape, mesh: Mesh, axes: tuple[Axes, ...], pending: Pending) -> NoReturn:
    """Raise LayoutError with all faults; called when the constructor has detected one."""
    if len(axes) != shape.ndim:
        raise LayoutError(f"{len(axes)} entries of axes for the {shape.ndim} dimensions of {shape}")
    faults = []
    uses: dict[str, list[str]] = {}
    for dim, entry in zip(shape.dims, axes, strict=True):
        for axis in entry:
            uses.setdefault(axis, []).append(f"dim {dim.name!r}")
        known = [a for a in entry if a in mesh]
        blocks = mesh.group_size(known)
        if dim.size % blocks:
            faults.append(
                f"dim {dim.name!r} does not divide over {'+'.join(known)}: {dim.size} % {blocks} = {dim.size % blocks}"
            )
    for axis, kind in pending:
        uses.setdefault(axis, []).append(f"a pending {kind}")
        if kind not in PENDING_KINDS:
            faults.append(f"pending kind {kind!r} is not one of {', '.join(PENDING_KINDS)}")
    for axis, users in uses.items():
        if axis not in mesh:
            faults.append(f"no axis {axis!r} in the mesh{nearest(axis, mesh.axes)}")
        if len(users) > 1:
            faults.append(f"axis {axis!r} is used {len(users)} times: by {' and by '.join(users)}")
    if len({kind for _, kind in pending}) > 1:
        mixed = ", ".join(f"{kind} over {axis}" for axis, kind in pending)
        faults.append(f"pending reductions of several kinds have no defined value: {mixed}; reduce one first")
    raise LayoutError.listing(f"impossible sharding of {shape} on mesh {mesh}", faults)
