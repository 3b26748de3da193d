"""Slices: a named set of chips, its torus, its hosts; several of them over the data-centre network.

    v3-32          32 cores = 16 chips, a 4x4 mesh          v5e-16, v5litepod-16    16 chips
    v4-4x4x8       by shape, in chips                       2*v5e-256               two slices over DCN
    v4-4x4x8_twisted    the same chips on a twisted torus (`hardware.twisted`)

Which shapes exist:

* 2-D kinds (v2, v3, v5e, v6e): both sides powers of two, one at most twice the other (v5e-2 and such
  do not exist), up to the pod. An axis wraps only where it has the full pod length (16, or 32 on v3).
* 3-D kinds (v4, v5p, v7): 2x2x1, 2x2x2, 2x2x4, 2x4x4 without wrap, or sides that are multiples of 4, every
  axis wrapped, within the pod (v4 16x16x16, v5p 16x20x28, v7 16x24x24) in some order of its axes, and longer
  boxes that are in use: v4 12x12x24, v5p 12x24x24. A number alone means the most compact such shape. On v5p
  everything up to the whole pod of 8960 chips is a slice here (v5p-17920); what is offered for rent ends at
  6144 (v5p-12288). On v4 and v5p, shapes k x k x 2k and k x 2k x 2k may be twisted: then only the long axes close to
  rings of their own.
* A chip of your own, or a published one with another `pod_shape`, follows the rule of its `wrap_cube`;
  otherwise any shape within its pod is legal, and numbers alone mean powers of two. So a multipod of
  2020 is `Slice("v3-128x32", replace(CHIPS["v3"], pod_shape=(128, 32), max_slice_chips=4096))`.

Sources: docs.cloud.google.com/tpu/docs (v3, v4, v5e, v5p, v6e); jax-ml/scaling-book tpus.md;
Kumar et al., arXiv:1909.09756 and arXiv:2011.03641 for v3 shapes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import lru_cache

from hardware.cells import slice_cell
from hardware.chips import CHIPS, Chip, as_chip, get_chip, true_name
from hardware.errors import HardwareError
from hardware.torus import Torus
from hardware.twisted import TwistedTorus, is_twistable

_NAME = re.compile(r"(?:([0-9]{1,9})\s*[*x]\s*)?([a-z][a-z0-9_]*)-([0-9]{1,9}(?:x[0-9]{1,9})*)(_twisted)?", re.ASCII)
_TWISTS = "shapes k x k x 2k and k x 2k x 2k of whole cubes do on v4 and v5p, such as v4-4x4x8_twisted"
_CUBE_PARTS = ((1, 2, 2), (2, 2, 2), (2, 2, 4), (2, 4, 4))


@dataclass(frozen=True, repr=False)
class Slice:
    """One or several equal slices of a chip kind, read from its name.

    Args:
      name: "v3-8" (a number of cores or chips, as the kind counts), "v4-4x4x8" (the shape in chips),
        "2*v5e-256" (two slices joined by DCN), "v4-4x4x8_twisted". Case and blanks around it do not matter and are
        not kept.
      chip: the chip to use instead of the published one; `name` begins with its name.
    Two slices are equal if they are the same chips in the same shape, whatever their names.
    Raises: HardwareError with the nearest legal names for a name that is no slice, or another chip's.
    Example:
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

    def __post_init__(self) -> None:
        count, kind, size, twisted = _parse(self.name)
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

    @property
    def twistable(self) -> bool:
        """Whether these chips can also be wired as a twisted torus of this shape.

        Example:
          >>> Slice("v4-4x4x8").twistable, Slice("v4-4x4x4").twistable, Slice("v7-4x4x8").twistable
          (True, False, False)
        """
        return self.chip.twists and all(wrap_of(self.chip, self.torus_shape)) and is_twistable(self.torus_shape)

    @property
    def torus(self) -> Torus:
        """The network of one slice, its nodes the chips.

        Example:
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
        """What a program sees: cores on v2, v3 and v7, chips (cores fused) elsewhere."""
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
        """HBM of one device that programs are offered, bytes: `Chip.usable_hbm_bytes_per_device`."""
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
        return None if price is None else price * self.chips

    @property
    def single(self) -> Slice:
        """One of the slices."""
        return Slice(f"{self.chip.name}-{shape_name(self)}", self.chip)

    def __repr__(self) -> str:
        chip = "" if self.chip is CHIPS.get(self.chip.name) else f", {self.chip!r}"
        return f"Slice({self.name!r}{chip})"

    def _repr_html_(self) -> str:
        return slice_cell(self)

    def __str__(self) -> str:
        shape = "x".join(map(str, self.torus_shape))
        wrapped = [str(axis) for axis, has in enumerate(self.wrap) if has]
        if self.twisted:
            wrap = "twisted"
        elif not wrapped:
            wrap = "no wrap"
        elif len(wrapped) == len(self.wrap):
            wrap = "all axes wrap"
        else:
            wrap = f"axis {', '.join(wrapped)} wraps"
        times = f"{self.slices} slices of " if self.slices > 1 else ""
        return (
            f"{self.name}: {self.chips} chips ({times}{shape}, {wrap}), {self.cores} cores, "
            f"{self.devices} devices, {self.hosts} host{'s' * (self.hosts > 1)}"
        )


def shape_name(slice_: Slice) -> str:
    """The shape of one slice as its name has it.

    Example:
      >>> shape_name(Slice("v4-256_twisted"))
      '4x4x8_twisted'
    """
    return "x".join(map(str, slice_.torus_shape)) + "_twisted" * slice_.twisted


def as_slice(given: Slice | str) -> Slice:
    """The slice, or the one of that name.

    Raises: HardwareError as `Slice`.
    Example:
      >>> as_slice("v3-8") == as_slice(Slice("v3-8"))
      True
    """
    return given if isinstance(given, Slice) else Slice(given)


def wrap_of(chip: Chip, shape: tuple[int, ...]) -> tuple[bool, ...]:
    """Which axes of a slice of `shape` have wrap-around links.

    Example:
      >>> wrap_of(CHIPS["v4"], (4, 4, 8)), wrap_of(CHIPS["v4"], (2, 2, 4)), wrap_of(CHIPS["v6e"], (4, 8))
      ((True, True, True), (False, False, False), (False, False))
    """
    if chip.wrap_cube is not None:
        whole_cubes = all(size % chip.wrap_cube == 0 for size in shape)
        return (whole_cubes,) * len(shape)
    return tuple(chip.wrap_axis is not None and size == chip.wrap_axis for size in shape)


def legal_slices(kind: str | Chip) -> tuple[str, ...]:
    """Every legal name by number, smallest first: `v5e-1 ... v5e-256`.

    Names by shape (`v4-4x4x8`) are the same shapes and, on 3-D kinds, every other arrangement of cubes.

    Raises: HardwareError for an unknown chip.
    Example:
      >>> legal_slices("v3")
      ('v3-8', 'v3-16', 'v3-32', 'v3-64', 'v3-128', 'v3-256', 'v3-512', 'v3-1024', 'v3-2048')
    """
    chip = as_chip(kind)
    per = chip.cores_per_chip if chip.name_counts == "cores" else 1
    return tuple(f"{chip.name}-{chips * per}" for chips in sorted(_shapes(chip)))


def _parse(name: object) -> tuple[int, str, str, bool]:
    match = _NAME.fullmatch(name.strip().lower()) if isinstance(name, str) else None
    if match is None:
        raise HardwareError(
            f"{name!r} is no slice name; write a TPU ({', '.join(CHIPS)}) and a size, "
            "e.g. 'v3-8', 'v4-4x4x8', '2*v5e-256'"
        )
    count = int(match[1]) if match[1] else 1
    if count < 1:
        raise HardwareError(f"slice {name!r}: the number of slices must be at least 1, not {count}")
    return count, match[2], match[3], bool(match[4])


def _resolve_shape(chip: Chip, name: str, size: str) -> tuple[int, ...]:
    if "x" in size:
        shape = tuple(int(side) for side in size.split("x"))
        if not _is_legal(chip, shape):
            raise HardwareError(f"{name!r} is no slice of {chip.name}; {_nearest_shapes(chip, shape)}")
        return shape
    per = chip.cores_per_chip if chip.name_counts == "cores" else 1
    chips, odd = divmod(int(size), per)
    shapes = _shapes(chip)
    if odd or chips not in shapes:
        near = sorted(shapes, key=lambda legal: (abs(legal * per - int(size)), legal))[:3]
        names = ", ".join(f"{chip.name}-{legal * per}" for legal in sorted(near))
        unit = f"the number counts {chip.name_counts}"
        raise HardwareError(f"{name!r} is no slice of {chip.name} ({unit}); the nearest are {names}")
    return shapes[chips]


def _nearest_shapes(chip: Chip, shape: tuple[int, ...]) -> str:
    rank = len(chip.pod_shape)
    if len(shape) != rank:
        example = "x".join(map(str, min(_shapes(chip).values(), key=lambda s: abs(math.prod(s) - math.prod(shape)))))
        return f"its torus has {rank} axes, not {len(shape)}; e.g. {chip.name}-{example}"
    target = math.prod(shape)
    near = sorted(_shapes(chip).values(), key=lambda s: (abs(math.log(math.prod(s) / max(target, 1))), s))[:3]
    return "the nearest are " + ", ".join(f"{chip.name}-{'x'.join(map(str, s))}" for s in near)


def _is_legal(chip: Chip, shape: tuple[int, ...]) -> bool:
    if len(shape) != len(chip.pod_shape) or min(shape) < 1 or math.prod(shape) > chip.max_slice_chips:
        return False
    ordered = tuple(sorted(shape))
    if chip.wrap_cube is not None:
        if all(side % chip.wrap_cube == 0 for side in shape):
            return _is_box(chip, shape)
        return chip.wrap_cube == 4 and len(shape) == 3 and ordered in _CUBE_PARTS
    published = CHIPS.get(chip.name)
    if published is None or published.pod_shape != chip.pod_shape:
        return all(side <= limit for side, limit in zip(ordered, sorted(chip.pod_shape), strict=True))
    return ordered in {tuple(sorted(legal)) for legal in _shapes(chip).values()}


@lru_cache(maxsize=64)
def _shapes(chip: Chip) -> dict[int, tuple[int, ...]]:
    """Chips -> the shape that a number alone means."""
    if chip.wrap_cube is not None and len(chip.pod_shape) == 3:
        return _cube_shapes(chip)
    if len(chip.pod_shape) == 1:
        return {n: (n,) for n in range(1, chip.pod_shape[0] + 1)}
    least = 1 if chip.name_counts == "chips" else 4  # a v2 or v3 device is a board of four chips
    shapes = {}
    for power in range(chip.max_slice_chips.bit_length()):
        sides = [2 ** (power // len(chip.pod_shape)) for _ in chip.pod_shape]
        for i in range(power % len(sides)):
            sides[-1 - i] *= 2
        fits = all(side <= limit for side, limit in zip(sorted(sides), sorted(chip.pod_shape), strict=True))
        if fits and least <= math.prod(sides) <= chip.max_slice_chips:
            shapes[math.prod(sides)] = tuple(sides)
    for chips in chip.not_offered_chips:
        shapes.pop(chips, None)
    return shapes


def _cube_shapes(chip: Chip) -> dict[int, tuple[int, ...]]:
    """The most compact box of whole cubes for every number of cubes, and the parts of one cube."""
    edge = chip.wrap_cube
    assert edge is not None
    shapes: dict[int, tuple[int, ...]] = {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)} if edge == 4 else {}
    cubes = chip.max_slice_chips // edge**3
    for a in range(1, round(cubes ** (1 / 3)) + 2):
        for b in range(a, math.isqrt(cubes // a) + 1):
            for c in range(b, cubes // (a * b) + 1):
                sides = (a * edge, b * edge, c * edge)
                chips = math.prod(sides)
                if _is_box(chip, sides) and sum(sides) < sum(shapes.get(chips, (chip.max_slice_chips,) * 3)):
                    shapes[chips] = sides
    return shapes


def _is_box(chip: Chip, sides: tuple[int, ...]) -> bool:
    """Whether whole cubes make a slice of these sides."""
    longer = tuple(sorted(sides)) in chip.longer_boxes and math.prod(sides) <= math.prod(chip.pod_shape)
    return longer or _within(sides, chip.pod_shape)


def _within(sides: tuple[int, ...], pod: tuple[int, ...]) -> bool:
    return all(side <= limit for side, limit in zip(sorted(sides), sorted(pod), strict=True))
