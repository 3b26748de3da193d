"""The machine of a published run: its slice and mesh.

What a row leaves open is said beside: a slice whose shape is not stated is the most compact one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import Any

from hardware.checks import HardwareError
from hardware.chips import Chip
from hardware.slices import Slice
from meshlib.validation.policies import NotExpressed

Row = Mapping[str, Any]

_AXES = {
    "data": "data", "fsdp": "fsdp", "fsdp_transpose": "fsdp", "tensor": "tensor", "tensor_transpose": "tensor",
    "tensor_sequence": "tensor", "model": "tensor", "mdl": "tensor", "context": "context", "sequence": "context",
    "expert": "expert",
}  # fmt: skip
MOST_CHIPS = 10**9
_REST = -1  # a size in a layout: all remaining devices


@dataclass(frozen=True)
class MeshAxes:
    """Mesh of a run.

    Attributes:
      sizes: axis -> size, devices in all; across: factor of each axis that spans slices, if stated.
      assumed: assumptions where the row is silent.
    """

    sizes: tuple[tuple[str, int], ...]
    across: tuple[tuple[str, int], ...] = ()
    assumed: tuple[str, ...] = ()


def slice_of(row: Row, chip: Chip) -> tuple[Slice, tuple[str, ...]]:
    """The slices of a row as one `Slice`, and the assumptions made.

    Raises: NotExpressed where the number of chips is not stated or no multiple of that of the slices.
    """
    shape = shape_of(row.get("slice")) or _pod_of(row.get("slice"), chip)
    slices, chips = _counts(row, chip, shape)
    if slices < 1 or chips % slices or not 0 < chips <= MOST_CHIPS:
        raise NotExpressed(
            f"its {f'{chips:,}':.40} chips make no {slices} equal slices; a machine has 1 to {MOST_CHIPS:,} chips"
        )
    each, assumed = chips // slices, tuple[str, ...]()
    if math.prod(shape) == each:
        size = "x".join(map(str, shape))
    else:
        size, assumed = _compact(each, len(chip.pod_shape), chip), ("shape of the slice",)
    name = f"{slices}*{chip.name}-{size}" if slices > 1 else f"{chip.name}-{size}"
    try:
        return Slice(name, chip), assumed
    except HardwareError:
        # Not a slice on offer: the same chips in a torus of their own.
        sides = tuple(sorted(map(int, size.split("x"))))
        own = replace(chip, pod_shape=sides, max_slice_chips=math.prod(sides))
        if chip.wrap_cube and any(side % chip.wrap_cube for side in sides):
            own = replace(own, wrap_cube=None)
        return Slice(name, own), (*assumed, "a torus of that shape")


def shape_of(where: object) -> tuple[int, ...]:
    """Slice sides as stated in a row, in digits or words; () if not stated.

    >>> shape_of({"topology": "2-D mesh, 4x4, no wrap"}), shape_of([4, 4, 8]), shape_of(None)
    ((4, 4), (4, 4, 8), ())
    >>> shape_of("a torus of 8 by 16"), shape_of("4 \u00d7 4 \u00d7 4"), shape_of("cube of 4"), shape_of("ring of 16")
    ((8, 16), (4, 4, 4), (4, 4, 4), (16,))
    """
    topology = where.get("topology") if isinstance(where, Mapping) else where
    if isinstance(topology, list | tuple):
        return tuple(int(side) for side in topology)
    words = re.sub(r"(?<=\d)\s*(?:by|x|\*|\u00d7)\s*(?=\d)", "x", str(topology or "").lower())
    shape = re.search(r"\d+(?:x\d+)+", words)
    if shape:
        return tuple(map(int, shape[0].split("x")))
    sides = {"ring": 1, "line": 1, "square": 2, "cube": 3}
    named = re.search(rf"({'|'.join(sides)}) of (\d+)(?! *(?:chip|core|device))", words)
    return (int(named[2]),) * sides[named[1]] if named else ()


def _pod_of(where: object, chip: Chip) -> tuple[int, ...]:
    """Sides of a whole pod, if a row says that it is one."""
    topology = where.get("topology") if isinstance(where, Mapping) else where
    return chip.pod_shape if re.search(r"\b(?:full|whole|entire) pod\b", str(topology or "").lower()) else ()


def _counts(row: Row, chip: Chip, shape: tuple[int, ...]) -> tuple[int, int]:
    """(number of slices, chips in all)."""
    layout, where = row.get("layout"), row.get("slice")
    across = [int(n) for key, n in stated_sizes(layout).items() if key.startswith("dcn_") and n > 0]
    slices = int(row.get("n_slices") or math.prod(across))
    if row.get("n_chips"):
        return slices, int(row["n_chips"])
    if row.get("n_cores"):
        return slices, int(row["n_cores"]) // chip.cores_per_chip
    each = math.prod(shape) if shape else int(where.get("chips") or 0) if isinstance(where, Mapping) else 0
    if not each:
        raise NotExpressed("the number of its chips is not stated")
    return slices, slices * each


def _compact(chips: int, rank: int, chip: Chip) -> str:
    """The most compact box of that many chips, made of whole cubes where the chip's slices are."""
    edge = chip.wrap_cube if chip.wrap_cube and chips % chip.wrap_cube**rank == 0 else 1
    boxes = _boxes(chips // edge**rank, rank)
    best = min(boxes, key=lambda sides: (sum(sides), sides))
    return "x".join(str(side * edge) for side in best)


def _boxes(volume: int, rank: int) -> Iterator[tuple[int, ...]]:
    """Sides of all boxes of a volume, ascending."""
    if rank == 1:
        yield (volume,)
        return
    for side in takewhile(lambda side: side**rank <= volume, count(1)):
        if volume % side == 0:
            yield from ((side, *rest) for rest in _boxes(volume // side, rank - 1) if side <= rest[0])


def stated_sizes(layout: object) -> dict[str, int]:
    """Axes of a layout that have a size.

    >>> stated_sizes({"ici_fsdp": 64.0, "dcn_data": "2", "note": "data between slices"})
    {'ici_fsdp': 64, 'dcn_data': 2}
    >>> stated_sizes("data:2 (DCN); fsdp:256; tensor:12")
    {'data': 2, 'fsdp': 256, 'tensor': 12}
    """
    size_of = {}
    texts = [layout] if isinstance(layout, str) else []
    if isinstance(layout, Mapping):
        texts = [text for key, text in layout.items() if key in ("mesh", "axes") and isinstance(text, str)]
    for text in texts:
        size_of.update({axis: int(n) for axis, n in re.findall(r"([A-Za-z_]+)\s*[:=]\s*(\d+)", text)})
    for key, size in layout.items() if isinstance(layout, Mapping) else ():
        if not isinstance(size, bool) and re.fullmatch(r"-?\d+(\.0*)?", str(size).strip()):
            size_of[str(key)] = int(float(size))
    return size_of


def axes_of(row: Row, slice_: Slice, d_model: int) -> MeshAxes:
    """The mesh of a row's layout.

    Raises: NotExpressed where there is no layout, or one that the library has no counterpart of.
    """
    layout, slices = row.get("layout") or {}, slice_.slices
    stated = stated_sizes(layout)
    inside, across = _by_network(stated)
    if not stated:
        across["slices"], inside["fsdp"] = _from_words(layout, slice_)
    if math.prod(inside.values()) != slice_.devices:  # otherwise axes span slices as they are
        if math.prod(across.values()) == 1:
            across["slices"] = slices
        _fill(inside, slice_.devices // slices)
        _fill(across, slices)
    sizes = {axis: size * across[axis] for axis, size in inside.items()}
    if math.prod(sizes.values()) != slice_.devices:
        raise NotExpressed(f"its layout {stated or layout} does not make {slice_.devices} devices")
    assumed = _divided(sizes, d_model)
    used_axes = tuple((axis, size) for axis, size in sizes.items() if size > 1)
    joined = tuple((axis, size) for axis, size in across.items() if size > 1)
    return MeshAxes(used_axes or (("data", 1),), joined if math.prod(across.values()) == slices else (), assumed)


def _by_network(stated: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes of axes within slices and across them."""
    inside = dict.fromkeys(("slices", "data", "shard", "fsdp", "expert", "context", "tensor"), 1)
    across = dict(inside)
    for key, size in stated.items():
        network, _, rest = key.partition("_")
        axis = _AXES.get(rest if network in ("ici", "dcn") else key)
        if axis is None and size != 1:
            raise NotExpressed(f"axis '{key}' of its layout has no counterpart here")
        if network == "dcn":
            across["slices" if axis == "data" else axis or "data"] *= size
        else:
            inside[axis or "data"] *= size
    return inside, across


def _fill(sizes: dict[str, int], devices: int) -> None:
    """Give the remaining devices to the axis marked for the rest."""
    for axis, size in sizes.items():
        if size < 0:
            others = math.prod(sizes.values()) // _REST
            sizes[axis] = devices // others * abs(size) if others > 0 else 0


def _divided(sizes: dict[str, int], d_model: int) -> tuple[str, ...]:
    """Limit weight sharding to d_model: the rest of an axis holds copies. Returns the assumptions made."""
    if sizes["fsdp"] == sizes["tensor"] == 1 and sizes["data"] > 1:
        sizes["shard"] = math.gcd(sizes["data"], d_model)
        sizes["data"] //= sizes["shard"]
    fully = sizes["fsdp"]
    if d_model % fully == 0:
        return ()
    sizes["fsdp"] = math.gcd(fully, d_model)
    sizes["data"] *= fully // sizes["fsdp"]
    return (f"weights split in {sizes['fsdp']} parts, not {fully}",)


def _from_words(layout: object, slice_: Slice) -> tuple[int, int]:
    """(slices, fsdp) of a layout in words: fully sharded within slices, data-parallel between them."""
    note = str(layout.get("note", "")) if isinstance(layout, Mapping) else str(layout)
    text = note.lower()
    if "fsdp" in text and "slice" in text:
        return slice_.slices, slice_.devices // slice_.slices
    raise NotExpressed("its layout is not stated" + (f": {note}" if note else ""))
