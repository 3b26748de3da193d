"""Slices: a named set of chips, its torus, its hosts; several of them over the data-centre network.

    v3-32          32 cores = 16 chips, a 4x4 mesh          v5e-16, v5litepod-16    16 chips
    v4-4x4x8       by shape, in chips                       2*v5e-256               two slices over DCN
    v4-4x4x8_twisted    the same chips on a twisted torus (`hardware.twisted`)

`hardware.shapes` says which shapes exist.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from hardware.cells import slice_cell
from hardware.checks import HardwareError, whole
from hardware.chips import CHIPS, Chip, as_chip, get_chip, true_name
from hardware.damage import Damage, Link, damage_of, read_damage, remains
from hardware.shapes import is_legal, shapes_of, wrap_of
from hardware.torus import Coordinates, Torus
from hardware.twisted import TwistedTorus, is_twistable
from hardware.unknown_names import Attributes

_NAME = re.compile(r"(?:([0-9]{1,9})\s*[*x]\s*)?([a-z][a-z0-9_]*)-([0-9]{1,9}(?:x[0-9]{1,9})*)(_twisted)?", re.ASCII)
_WITHOUT = " without "
_TWISTS = "shapes k x k x 2k and k x 2k x 2k of whole cubes do on v4 and v5p, such as v4-4x4x8_twisted"


@dataclass(frozen=True, repr=False)
class Slice(Attributes):
    """One or several equal slices of a chip kind, read from its name.

    Args:
      name: "v3-8" (a number of cores or chips, as the kind counts), "v4-4x4x8" (the shape in chips),
        "2*v5e-256" (two slices joined by DCN), "v4-4x4x8_twisted", "v5e-256 without 3x5,0x0-0x1" (a chip and a link
        that failed: `without`). Case and blanks around it do not matter and are not kept.
      chip: the chip to use instead of the published one; `name` begins with its name.
    Two slices are equal if they are the same chips in the same shape, whatever their names.
    Raises: HardwareError with the nearest legal names for a name that is not a slice, or another chip's.
    Example:
      >>> from hardware import Slice
      >>> print(Slice("v3-32"))
      v3-32: 16 chips (4x4, no wrap), 32 cores, 32 devices, 4 hosts
      >>> Slice("v5e-8x16").wrap, Slice("2*v5p-1024").chips
      ((False, True), 1024)

    Source: module docstring.
    """

    name: str = field(compare=False)
    chip: Chip = None  # type: ignore[assignment]  # the published one is filled in when made
    slices: int = field(init=False)
    torus_shape: tuple[int, ...] = field(init=False)
    wrap: tuple[bool, ...] = field(init=False)
    twisted: bool = field(init=False)
    failed: tuple[Coordinates, ...] = field(init=False, default=())
    failed_links: tuple[Link, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        count, kind, size, twisted, damage = _parse(self.name)
        given: object = self.chip
        if given is None:
            object.__setattr__(self, "chip", get_chip(kind))
        elif not isinstance(given, Chip):
            raise HardwareError(f"slice {self.name!r}: chip must be a Chip, not {given!r}")
        elif true_name(kind) != given.name.lower():
            raise HardwareError(
                f"slice {self.name!r} is one of {kind!r}, the chip given is {given.name!r}; write {given.name}-{size}"
            )
        object.__setattr__(self, "name", self.name.strip().lower())
        shape = _resolve_shape(self.chip, self.name, size)
        object.__setattr__(self, "slices", count)
        object.__setattr__(self, "torus_shape", shape)
        object.__setattr__(self, "wrap", wrap_of(self.chip, shape))
        object.__setattr__(self, "twisted", twisted)
        if twisted:
            if not self.twistable:
                raise HardwareError(f"slice {self.name!r} has no twist; {_TWISTS}")
            object.__setattr__(self, "wrap", tuple(side > min(shape) for side in shape))
        if damage:
            self._apply_damage(read_damage(damage))

    def _apply_damage(self, damage: Damage) -> None:
        """Replace the torus by what remains of it after damage."""
        if self.slices > 1:
            raise HardwareError(
                f"slice {self.name!r}: of {self.slices} slices one with a failed part is left out as a whole, which "
                f"leaves {self.slices - 1}: .without(slices=1)"
            )
        rest = remains(self.torus, damage)
        object.__setattr__(self, "name", f"{self.name.partition(_WITHOUT)[0]}{_WITHOUT}{damage}")
        object.__setattr__(self, "torus_shape", rest.shape)
        object.__setattr__(self, "wrap", rest.wrap)
        object.__setattr__(self, "twisted", self.twisted and rest.ring is None)
        object.__setattr__(self, "failed", rest.failed)
        object.__setattr__(self, "failed_links", damage.links)

    @property
    def ring(self) -> tuple[int, ...] | None:
        """Nodes of the remaining ring in order, as `single.torus` numbers them; None unless failures leave one ring.

        Example:
          >>> from hardware import Slice
          >>> Slice("v3-32 without 0x0").ring
          (2, 6, 10, 9, 8, 12, 13, 14, 15, 11, 7, 3)
        """
        damage = _damage(self.name)
        return remains(self.single.torus, read_damage(damage)).ring if damage else None

    def without(
        self,
        chips: Sequence[int] | Sequence[Sequence[int]] = (),
        links: Sequence[Sequence[Sequence[int]]] = (),
        slices: int = 0,
    ) -> Slice:
        """The slice that remains when parts fail; programs are placed and priced on it.

        A failed chip takes its tray of 2 x 2 chips with it; the rest is one ring. A failed link of an axis that wraps
        makes it a line. Of several slices, whole ones are left out. `hardware.damage` has the rules.

        Args:
          chips: coordinates of a failed chip, or a list of them.
          links: pairs of coordinates of the chips that a failed link joins.
          slices: how many of the slices failed.
        Raises: HardwareError for parts that it does not have, or where the rest forms no ring.
        Example:
          >>> from hardware import Slice
          >>> print(Slice("v5e-256").without(chips=(3, 5)))
          v5e-256 without 3x5: 252 chips (a ring around 4 failed ones), 252 cores, 252 devices, 32 hosts
          >>> print(Slice("v5e-256").without(links=[((0, 0), (0, 1))]).wrap, Slice("4*v5e-256").without(slices=1).name)
          (True, False) 3*v5e-16x16
        """
        damage = damage_of(chips, links)
        lost = whole("slices", slices)
        if lost >= self.slices and lost:
            raise HardwareError(f"{self.name} has {self.slices} slices, of which {lost} failed: none is left")
        name = f"{self.slices - lost}*{self.single.name}" if lost else self.name
        texts = [text for text in (_damage(self.name), str(damage)) if text]
        return Slice(f"{name.partition(_WITHOUT)[0]}{_WITHOUT}{','.join(texts)}" if texts else name, self.chip)

    @property
    def twistable(self) -> bool:
        """True if these chips can also be wired as a twisted torus of this shape.

        Example:
          >>> from hardware import Slice
          >>> Slice("v4-4x4x8").twistable, Slice("v4-4x4x4").twistable, Slice("v7-4x4x8").twistable
          (True, False, False)
        """
        whole = not self.failed and not self.failed_links
        return (
            whole and self.chip.twists and all(wrap_of(self.chip, self.torus_shape)) and is_twistable(self.torus_shape)
        )

    @property
    def torus(self) -> Torus:
        """The network of one slice, its nodes the chips.

        Example:
          >>> from hardware import Slice
          >>> Slice("v4-4x4x8_twisted").torus.diameter, Slice("v4-4x4x8").torus.diameter
          (6, 8)
        """
        return TwistedTorus(self.torus_shape) if self.twisted else Torus(self.torus_shape, self.wrap)

    @property
    def chips(self) -> int:
        """Chips in all slices together."""
        return self.slices * math.prod(self.torus_shape)

    @property
    def cores(self) -> int:
        """TensorCores in all slices together."""
        return self.chips * self.chip.cores_per_chip

    @property
    def devices(self) -> int:
        """Devices that a program sees: cores on v2, v3 and v7, chips (cores fused) elsewhere."""
        return self.chips * self.chip.devices_per_chip

    @property
    def hosts(self) -> int:
        """CPU hosts: chips over chips per host, rounded up in each slice."""
        return self.slices * -(-math.prod(self.torus_shape) // self.chip.chips_per_host)

    @property
    def hbm_bytes_per_device(self) -> int:
        """HBM of one device as built, bytes."""
        return self.chip.hbm_bytes_per_device

    @property
    def usable_hbm_bytes_per_device(self) -> int:
        """HBM of one device available to programs, bytes: `Chip.usable_hbm_bytes_per_device`."""
        return self.chip.usable_hbm_bytes_per_device

    @property
    def hbm_bytes(self) -> int:
        """HBM of all devices, bytes."""
        return self.chips * self.chip.hbm_bytes

    @property
    def hbm_bytes_per_second_per_device(self) -> float:
        """Nominal HBM bandwidth of one device, bytes/s."""
        return self.chip.hbm_bytes_per_second / self.chip.devices_per_chip

    @property
    def peak_flops_per_device(self) -> float:
        """Peak bf16 FLOP/s of one device (int8 operations on v1)."""
        return self.peak_flops() / self.devices

    def peak_flops(self, dtype: str | None = None) -> float:
        """Peak FLOP/s of all chips in `dtype`: "bf16" (default; "int8" on v1), "int8", "fp8", "int4"."""
        if dtype is None:
            dtype = "bf16" if self.chip.peak_bf16_flops is not None else "int8"
        return self.chips * self.chip.peak_flops(dtype)

    @property
    def usd_per_hour(self) -> float | None:
        """List price of all chips for an hour; None where none is published."""
        price = self.chip.usd_per_chip_hour
        return None if price is None else price * (self.chips + len(self.failed))  # failed chips are paid for too

    @property
    def single(self) -> Slice:
        """One of the slices, undamaged."""
        if self.failed or self.failed_links:
            return Slice(self.name.partition(_WITHOUT)[0], self.chip)
        return Slice(f"{self.chip.name}-{shape_name(self)}", self.chip)

    def __repr__(self) -> str:
        chip = "" if self.chip == CHIPS.get(self.chip.name) else f", {self.chip!r}"
        return f"Slice({self.name!r}{chip})"

    def _repr_html_(self) -> str:
        return slice_cell(self)

    def __str__(self) -> str:
        times = f"{self.slices} slices of " if self.slices > 1 else ""
        return (
            f"{self.name}: {_counted(self.chips, 'chip')} ({times}{self._wiring()}), {_counted(self.cores, 'core')}, "
            f"{_counted(self.devices, 'device')}, {_counted(self.hosts, 'host')}"
        )

    def _wiring(self) -> str:
        """Description of one slice's torus, for messages."""
        if self.failed:
            return f"a ring around {len(self.failed)} failed ones"
        if len(self.torus_shape) < len(self.chip.pod_shape):
            return "a ring past failed links"
        wrapped = [str(axis) for axis, has in enumerate(self.wrap) if has]
        if self.twisted:
            wrap = "twisted"
        elif not wrapped:
            wrap = "no wrap"
        elif len(wrapped) == len(self.wrap):
            wrap = "all axes wrap"
        else:
            wrap = f"axis {', '.join(wrapped)} wraps"
        return f"{'x'.join(map(str, self.torus_shape))}, {wrap}"


def shape_name(slice_: Slice) -> str:
    """The shape of one slice as written in its name.

    Example:
      >>> shape_name(Slice("v4-256_twisted"))
      '4x4x8_twisted'
    """
    return "x".join(map(str, slice_.torus_shape)) + "_twisted" * slice_.twisted


def as_slice(given: Slice | str) -> Slice:
    """A `Slice` as it is, or the slice of that name.

    Raises: HardwareError as `Slice`.
    Example:
      >>> as_slice("v3-8") == as_slice(Slice("v3-8"))
      True
    """
    return given if isinstance(given, Slice) else Slice(given)


def legal_slices(kind: str | Chip) -> tuple[str, ...]:
    """Every legal name by number, smallest first: `v5e-1 ... v5e-256`.

    Names by shape (`v4-4x4x8`) are the same shapes and, on 3-D kinds, every other arrangement of cubes.

    Raises: HardwareError for an unknown chip.
    Example:
      >>> from hardware import legal_slices
      >>> legal_slices("v3")
      ('v3-8', 'v3-16', 'v3-32', 'v3-64', 'v3-128', 'v3-256', 'v3-512', 'v3-1024', 'v3-2048')
    """
    chip = as_chip(kind)
    per = chip.cores_per_chip if chip.name_counts == "cores" else 1
    return tuple(f"{chip.name}-{chips * per}" for chips in sorted(shapes_of(chip)))


def _damage(name: str) -> str:
    """The failed parts in a slice name, as text."""
    return name.partition(_WITHOUT)[2]


def _parse(name: object) -> tuple[int, str, str, bool, str]:
    text, _, damage = name.strip().lower().partition(_WITHOUT) if isinstance(name, str) else ("", "", "")
    match = _NAME.fullmatch(text.strip())
    if match is None:
        remedy = _with_a_hyphen(text) or (
            f"write a TPU ({', '.join(CHIPS)}) and a size, e.g. 'v3-8', 'v4-4x4x8', '2*v5e-256'"
        )
        raise HardwareError(f"{name!r} is not a slice name; {remedy}")
    count = int(match[1]) if match[1] else 1
    if count < 1:
        raise HardwareError(f"slice {name!r}: the number of slices must be at least 1, not {count}")
    return count, match[2], match[3], bool(match[4]), damage.strip()


def _with_a_hyphen(text: str) -> str:
    """A suggestion for a slice name without its hyphen; "" for other names."""
    for chip in sorted(CHIPS, key=len, reverse=True):
        before, named, size = text.rpartition(chip)
        meant = f"{before.replace('tpu', '').strip(' -_')}{chip}-{size.strip(' -_')}"
        if named and _NAME.fullmatch(meant):
            return f"did you mean {meant!r}?"
    return ""


def _resolve_shape(chip: Chip, name: str, size: str) -> tuple[int, ...]:
    if "x" in size:
        shape = tuple(int(side) for side in size.split("x"))
        if not is_legal(chip, shape):
            raise HardwareError(f"{name!r} is not a slice of {chip.name}; {_nearest_shapes(chip, shape)}")
        return shape
    per = chip.cores_per_chip if chip.name_counts == "cores" else 1
    chips, odd = divmod(int(size), per)
    shapes = shapes_of(chip)
    if odd or chips not in shapes:
        near = sorted(shapes, key=lambda legal: (abs(legal * per - int(size)), legal))[:3]
        names = ", ".join(f"{chip.name}-{legal * per}" for legal in sorted(near))
        unit = f"the number counts {chip.name_counts}"
        raise HardwareError(f"{name!r} is not a slice of {chip.name} ({unit}); the nearest are {names}")
    return shapes[chips]


def _nearest_shapes(chip: Chip, shape: tuple[int, ...]) -> str:
    rank = len(chip.pod_shape)
    if len(shape) != rank:
        example = "x".join(map(str, min(shapes_of(chip).values(), key=lambda s: abs(math.prod(s) - math.prod(shape)))))
        return f"its torus has {rank} axes, not {len(shape)}; e.g. {chip.name}-{example}"
    target = math.prod(shape)
    near = sorted(shapes_of(chip).values(), key=lambda s: (abs(math.log(math.prod(s) / max(target, 1))), s))[:3]
    return "the nearest are " + ", ".join(f"{chip.name}-{'x'.join(map(str, s))}" for s in near)


def _counted(n: int, one: str) -> str:
    return f"{n} {one}{'s' * (n != 1)}"
