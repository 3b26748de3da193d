"""Replica groups of a compiled collective, and the mesh axes that they span.

A compiled module numbers devices in the order of its mesh, the last axis fastest. It writes groups in four notations:
lists, `{{0,1},{2,3}}`; an iota, `[2,4]<=[4,2]T(1,0)`; axes of a mesh of its own, `mesh['a'=4,'b'=2] {'b'}`; pairs.
Part of an axis is written as Shardy writes it: `x:(2)4` is an axis of size 4 that has 2 steps of `x` before it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

import numpy as np

from layouts import Mesh
from meshlib.core.errors import ProgramError

Groups = tuple[tuple[int, ...], ...]

_LISTS = re.compile(r"replica_groups=\{(\{[\d,{}\s]*\})?\}")
_LIST = re.compile(r"\{([\d,\s]*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=@?mesh\[([^\]]*)\](?:,?\s*device_ids=\(([^)]*\)?)\))?\s*\{([^}]*)\}")
_AXIS = re.compile(r"'([^']+)'=(\d+)")
_USED = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
PAIRS = "source_target_pairs"
_PAIRS = re.compile(PAIRS + r"=\"?\{((?:\{\d+,\d+\},?)*)\}")
_PAIR = re.compile(r"\{(\d+),(\d+)\}")
_ORDER = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")


@dataclass(frozen=True, slots=True)
class PartOfAxis:
    """A part of a mesh axis: a factor `size` of its size; `before` is the product of the more major factors."""

    axis: str
    before: int
    size: int
    whole: bool

    def __str__(self) -> str:
        return self.axis if self.whole else f"{self.axis}:({self.before}){self.size}"


def replica_groups(attributes: str, devices: int) -> Groups:
    """The device groups of a collective other than a permute.

    Raises: ProgramError for an unknown notation, instead of counting nothing.

    >>> replica_groups(", replica_groups=[2,2]<=[2,2]T(1,0), ...", 4)
    ((0, 2), (1, 3))
    >>> replica_groups(", replica_groups=mesh['a'=2,'b'=2] {'b'}, ...", 4)
    ((0, 1), (2, 3))
    >>> replica_groups(", replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}, ...", 4)
    ((0, 2), (1, 3))
    """
    lists = _LISTS.search(attributes)
    if lists is not None:
        groups = tuple(_integers(g) for g in _LIST.findall(lists[1] or ""))
        return tuple(g for g in groups if g) or (tuple(range(devices)),)
    iota = _IOTA.search(attributes)
    if iota is not None:
        return _rows(_iota(iota[2], iota[3]).reshape(_integers(iota[1])))
    named = _MESH.search(attributes)
    if named is not None:
        return _of_mesh(named[1], named[2], named[3])
    begin = attributes.find("replica_groups")
    raise ProgramError(f"explain: replica groups in an unknown notation: {attributes[max(begin, 0) :][:120]}")


def permute_pairs(attributes: str) -> Groups:
    """The (source, target) pairs of a collective-permute.

    >>> permute_pairs(", source_target_pairs={{0,1},{1,0}}, ...")
    ((0, 1), (1, 0))
    """
    match = _PAIRS.search(attributes)
    if match is None:
        raise ProgramError(f"explain: a collective-permute without source_target_pairs: {attributes[:120]}")
    return tuple((int(a), int(b)) for a, b in _PAIR.findall(match[1]))


def axes_of(groups: Groups, mesh: Mesh) -> tuple[PartOfAxis, ...] | None:
    """The mesh axes, or parts of axes, along which the devices of each group differ; None if groups are no such set.

    >>> [str(p) for p in axes_of(((0, 2), (1, 3), (4, 6), (5, 7)), Mesh("x:8"))]
    ['x:(2)2']
    """
    size = len(groups[0]) if groups else 0
    if any(len(g) != size for g in groups) or sum(map(len, groups)) != mesh.size:
        return None
    wanted = {frozenset(g) for g in groups}
    factors = _factors(mesh)
    for whole in (True, False):
        parts = [PartOfAxis(a, 1, n, True) for a, n in mesh.sizes_by_axis.items() if n > 1] if whole else factors
        for count in range(len(parts) + 1):
            for chosen in combinations(parts, count):
                if prod(p.size for p in chosen) == size and _groups_of(chosen, mesh) == wanted:
                    return _joined(chosen, mesh)
    return None


def permuted_axes(pairs: Groups, mesh: Mesh) -> tuple[PartOfAxis, ...]:
    """The mesh axes along which sources and targets differ.

    >>> [str(p) for p in permuted_axes(((0, 1), (1, 0), (2, 3), (3, 2)), Mesh("x:2;y:2"))]
    ['y']
    """
    moved = set()
    for a, b in pairs:
        if max(a, b) < mesh.size:
            here, there = mesh.coordinate(a), mesh.coordinate(b)
            moved |= {axis for axis, p, q in zip(mesh.axes, here, there, strict=True) if p != q}
    return tuple(PartOfAxis(a, 1, mesh.axis_size(a), True) for a in mesh.axes if a in moved)


def _factors(mesh: Mesh) -> list[PartOfAxis]:
    """The axes as prime factors, major first."""
    parts = []
    for axis, size in mesh.sizes_by_axis.items():
        before, rest, p = 1, size, 2
        while rest > 1:
            while rest % p:
                p += 1
            parts.append(PartOfAxis(axis, before, p, p == size))
            before, rest = before * p, rest // p
    return parts


def _joined(parts: Sequence[PartOfAxis], mesh: Mesh) -> tuple[PartOfAxis, ...]:
    """Merge adjacent factors of one axis into parts."""
    joined: list[PartOfAxis] = []
    for p in parts:
        last = joined[-1] if joined else None
        if last is not None and last.axis == p.axis and last.before * last.size == p.before:
            size = last.size * p.size
            joined[-1] = PartOfAxis(p.axis, last.before, size, size == mesh.axis_size(p.axis))
        else:
            joined.append(p)
    return tuple(joined)


def _groups_of(parts: Sequence[PartOfAxis], mesh: Mesh) -> set[frozenset[int]]:
    ids = np.arange(mesh.size).reshape([p.size for p in _refined(parts, mesh)])
    chosen = [n for n, p in enumerate(_refined(parts, mesh)) if p in parts]
    rest = [n for n in range(ids.ndim) if n not in chosen]
    table = ids.transpose([*rest, *chosen]).reshape(-1, prod(p.size for p in parts))
    return {frozenset(map(int, row)) for row in table}


def _refined(parts: Sequence[PartOfAxis], mesh: Mesh) -> list[PartOfAxis]:
    """All parts of the mesh, major first: whole axes where `parts` are whole, otherwise prime factors."""
    if all(p.whole and p.size == mesh.axis_size(p.axis) for p in parts):
        return [PartOfAxis(a, 1, n, True) for a, n in mesh.sizes_by_axis.items()]
    return _factors(mesh)


def _of_mesh(sizes: str, order: str | None, used: str) -> Groups:
    mesh = Mesh([(a, int(n)) for a, n in _AXIS.findall(sizes)])
    ids = _device_order(order) if order else np.arange(mesh.size)
    shape: list[int] = []
    chosen: list[int] = []
    wanted = {(a, int(b) if b else 1, int(n) if n else mesh.axis_size(a)) for a, b, n in _USED.findall(used)}
    for axis, size in mesh.sizes_by_axis.items():
        at = 1
        for before, count in sorted((b, n) for a, b, n in wanted if a == axis):
            shape += [before // at] if before > at else []
            chosen.append(len(shape))
            shape.append(count)
            at = before * count
        shape += [size // at] if size > at else []
    rest = [n for n in range(len(shape)) if n not in chosen]
    count = prod(shape[n] for n in chosen)
    return _rows(ids.reshape(shape or [1]).transpose([*rest, *chosen] or [0]).reshape(-1, count))


def _device_order(order: str) -> np.ndarray:
    """Numbers of the devices of a mesh: a list, or an iota."""
    match = _ORDER.search(order)
    if match is None:
        raise ProgramError(f"explain: device order in an unknown notation: {order[:80]}")
    listed = not match[2] and not match[3]
    return np.array(_integers(match[1])) if listed else _iota(match[2] or match[1], match[3])


def _iota(shape: str, order: str | None) -> np.ndarray:
    sizes = _integers(shape)
    ids = np.arange(prod(sizes)).reshape(sizes)
    return (ids.transpose(_integers(order)) if order else ids).reshape(-1)


def _integers(text: str | None) -> tuple[int, ...]:
    return tuple(int(n) for n in (text or "").split(",") if n.strip())


def _rows(table: np.ndarray) -> Groups:
    return tuple(tuple(int(n) for n in row) for row in table)
