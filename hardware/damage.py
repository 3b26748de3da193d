"""Failed chips and links of a slice: the chips that remain in use, and the torus that they form.

A failed chip takes its tray of 2 x 2 chips with it, which one host serves. All other chips form one ring, neighbour to
neighbour (`hardware.detours`): a torus of one axis. A failed link costs no chip. If all failed links of a wrapped axis
are at one position of its rings, the axis becomes a line and all others stay; otherwise the chips form one ring that
avoids them.

A ring uses two of a chip's links; the bandwidth of the others is ignored, so times are upper bounds.

Source: as `hardware.detours`; chips of a host: docs.cloud.google.com/tpu/docs/system-architecture-tpu-vm.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral

from hardware.checks import HardwareError, wholes
from hardware.detours import link_between, ring_around
from hardware.torus import Coordinates, Torus
from hardware.twisted import TwistedTorus

_ITEM = re.compile(r"([0-9]{1,4}(?:x[0-9]{1,4})*)(?:-([0-9]{1,4}(?:x[0-9]{1,4})*))?", re.ASCII)
Link = tuple[Coordinates, Coordinates]


@dataclass(frozen=True)
class Damage:
    """Failed parts: `chips` by coordinates, `links` by the coordinates of the two chips that they join."""

    chips: tuple[Coordinates, ...] = ()
    links: tuple[Link, ...] = ()

    def __str__(self) -> str:
        """The damage as written in a slice's name.

        >>> str(Damage(((3, 5),), (((0, 0), (0, 1)),)))
        '3x5,0x0-0x1'
        """
        return ",".join([*map(_text, self.chips), *(f"{_text(a)}-{_text(b)}" for a, b in self.links)])


@dataclass(frozen=True)
class Remains:
    """A damaged torus: that of the remaining chips, the chips left out, and the ring of nodes, if any."""

    shape: tuple[int, ...]
    wrap: tuple[bool, ...]
    failed: tuple[Coordinates, ...]
    ring: tuple[int, ...] | None


def read_damage(text: str) -> Damage:
    """Parse damage from the text in a slice's name.

    Raises: HardwareError for any other text.
    Example:
      >>> read_damage("3x5, 0x0-0x1")
      Damage(chips=((3, 5),), links=(((0, 0), (0, 1)),))
    """
    chips, links = [], []
    for item in text.split(","):
        match = _ITEM.fullmatch(item.strip())
        if match is None:
            raise HardwareError(
                f"failed part {item.strip()!r:.80}: write a chip by its coordinates, such as 3x5, or a link by its "
                "two chips, such as 0x0-0x1"
            )
        if match[2]:
            links.append((_coordinates(match[1]), _coordinates(match[2])))
        else:
            chips.append(_coordinates(match[1]))
    return _distinct(chips, links)


def _distinct(chips: Iterable[Coordinates], links: Iterable[Link]) -> Damage:
    """Damage with each failed part once, in order."""
    ends = {(min(link), max(link)) for link in links}
    return Damage(tuple(sorted({*chips})), tuple(sorted(ends)))


def damage_of(chips: Sequence[int] | Iterable[Sequence[int]], links: Iterable[Sequence[Sequence[int]]]) -> Damage:
    """Damage from coordinates: one chip or a list of chips, and pairs of neighbours for links.

    Raises: HardwareError for anything else.
    Example:
      >>> str(damage_of((3, 5), [])), str(damage_of([(3, 5), (0, 0)], [((0, 0), (0, 1))]))
      ('3x5', '0x0,3x5,0x0-0x1')
    """
    try:
        given, pairs = list(chips), list(links)
        if given and all(isinstance(part, Integral) for part in given):
            given = [given]
        places = [wholes("coordinates of a failed chip", place) for place in given]
        ends = [(wholes("ends of a failed link", a), wholes("ends of a failed link", b)) for a, b in pairs]
    except (TypeError, ValueError):
        raise HardwareError(
            "failed chips are coordinates such as (3, 5), or a list of them; failed links are pairs such as "
            f"[((0, 0), (0, 1))]; got {chips!r:.60} and {links!r:.60}"
        ) from None
    return _distinct(places, ends)


@lru_cache(maxsize=128)
def remains(torus: Torus, damage: Damage) -> Remains:
    """The part of a torus that remains in use after damage.

    Raises: HardwareError for chips or links that it does not have, or where the rest forms no ring.
    Example:
      >>> rest = remains(Torus((16, 16)), Damage(((3, 5),)))
      >>> rest.shape, rest.failed
      ((252,), ((2, 4), (2, 5), (3, 4), (3, 5)))
      >>> remains(Torus((16, 16)), Damage((), (((0, 0), (0, 1)),))).wrap
      (True, False)
    """
    links = [_link(torus, *ends) for ends in damage.links]
    trays = sorted({chip for place in damage.chips for chip in _tray(torus, place)})
    if not trays and _one_cut_for_each_axis(torus, links):
        cut = {link // 2 % torus.rank for link in links}
        return Remains(torus.shape, tuple(w and a not in cut for a, w in enumerate(torus.wrap)), (), None)
    ring = ring_around(torus, trays, links)
    left = torus.nodes - len(trays)
    if ring is None or len(ring) != left or left < 4:
        raise HardwareError(
            f"without {damage} the {left} remaining chips of a torus of {'x'.join(map(str, torus.shape))} form no "
            "ring; use a smaller slice that has none of the failed parts (hardware.faults.slices_left counts them)"
        )
    return Remains((left,), (True,), tuple(torus.coordinates(node) for node in trays), ring)


def _tray(torus: Torus, place: Coordinates) -> list[int]:
    """The nodes of the 2 x 2 tray around a chip, along the first two axes longer than 1."""
    torus.node(place)
    sides = [axis for axis, size in enumerate(torus.shape) if size > 1][:2]
    spans = [
        (c - c % 2, min(c - c % 2 + 1, torus.shape[axis] - 1)) if axis in sides else (c,)
        for axis, c in enumerate(place)
    ]
    return [torus.node(at) for at in itertools.product(*spans)]


def _link(torus: Torus, a: Coordinates, b: Coordinates) -> int:
    """The number of the link from a to b."""
    source, target = torus.node(a), torus.node(b)
    try:
        return link_between(torus, source, target)
    except HardwareError:
        shape = "x".join(map(str, torus.shape))
        raise HardwareError(f"chips {_text(a)} and {_text(b)} share no link in a torus of {shape}") from None


def _one_cut_for_each_axis(torus: Torus, links: Sequence[int]) -> bool:
    """True if all failed links of an axis are at one position of its rings, so that the axis can become a line."""
    if isinstance(torus, TwistedTorus):
        return False
    cuts: dict[int, set[int]] = {}
    for link in links:
        axis = link // 2 % torus.rank
        here, there = (torus.coordinates(node)[axis] for node in torus.ends(link))
        cuts.setdefault(axis, set()).add(here if (here + 1) % torus.shape[axis] == there else there)
    return all(torus.wrap[axis] and torus.shape[axis] > 2 and len(at) == 1 for axis, at in cuts.items())


def _coordinates(text: str) -> Coordinates:
    return tuple(int(part) for part in text.split("x"))


def _text(place: Coordinates) -> str:
    return "x".join(map(str, place))
