"""Chip records: one per TPU generation, each figure with its source; custom chips.

`CHIPS["v5e"]` is a published chip. `dataclasses.replace(CHIPS["v5e"], hbm_bytes_per_second=8e11)` overrides a figure;
`Chip(...)` or a TOML file read by `load_chip` defines another machine.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from types import MappingProxyType

from hardware.cells import chip_cell
from hardware.checks import HardwareError, UnknownChipError, amount, one_of, whole, wholes
from hardware.chip_figures import COMMON, FIGURES
from hardware.unknown_names import Attributes, nearest

_NAME = re.compile("[A-Za-z][A-Za-z0-9_]*")
DTYPES = ("bf16", "int8", "fp8", "int4")


@dataclass(frozen=True, kw_only=True, repr=False)
class Chip(Attributes):
    """Figures of one chip. Rates and sizes are per chip unless the name says otherwise.

    Attributes:
      name_counts: whether the number in a slice's name counts "cores" or "chips".
      wrap_axis: the axis length at which the ends of an axis are linked into a ring; None if no length is.
      wrap_cube: edge of a cube of chips; in slices that are built of whole cubes, every axis is a ring.
      twists: whether slices of k x k x 2k and k x 2k x 2k chips can be twisted.
      *_efficiency: share of the nominal rate that programs reach.
      hbm_bytes: HBM as built; the runtime reserves hbm_reserved_bytes of it.
      not_offered_chips: numbers of chips that fit the pod, but are not offered as slices.
      longer_boxes: offered slices of whole cubes with a side longer than the pod's.
      aliases: other names of the chip.
      device_kinds: JAX's names of its devices.
      compiler_name, compiler_config: names of the chip in the TPU compiler.
      sparse_cores_per_chip: SparseCores, for collectives beside the program; with sparse_core_gathers for gathers, too.
      scoped_vmem_bytes: VMEM of one core that a single kernel may take; the rest holds what later kernels read.
      attention_backward_kernels: number of kernels in the backward pass of fused attention.
      attention_tile, attention_window_tile, attention_backward_tile: (queries, keys): forward, with a window, back.

    Raises: HardwareError on a size that is not a positive integer, or a rate that is not finite.
    Example:
      >>> from hardware import CHIPS
      >>> v3 = CHIPS["v3"]
      >>> v3.peak_flops("bf16") / v3.cores_per_chip
      61500000000000.0
      >>> v3.source("clock_hz")
      'Jouppi et al., CACM 63(7), 2020 (from memory)'

    Source: `chip.source(field)`.
    """

    name: str
    year: int = 0
    cores_per_chip: int
    devices_per_chip: int
    clock_hz: float
    mxus_per_core: int
    mxu_rows: int
    mxu_columns: int
    peak_bf16_flops: float | None
    peak_int8_flops: float | None = None
    peak_fp8_flops: float | None = None
    peak_int4_flops: float | None = None
    mxu_efficiency: float = 1.0
    sparse_cores_per_chip: int = 0
    vpu_sublanes: int = 8
    vpu_lanes: int = 128
    vpu_alus_per_lane: int = 4
    vpu_bf16: bool = False
    sparse_core_gathers: bool = False
    vector_loop_cycles: float = 12.0
    attention_backward_kernels: int = 2
    attention_tile: tuple[int, int] = (512, 512)
    attention_window_tile: tuple[int, int] = (512, 512)
    attention_backward_tile: tuple[int, int] = (512, 512)
    vmem_bytes_per_core: int
    scoped_vmem_bytes: int = 16 << 20
    vmem_bandwidth_ratio: float = 22.0
    cmem_bytes: int = 0
    hbm_bytes: int
    hbm_reserved_bytes: int = 0
    hbm_bytes_per_second: float
    hbm_efficiency: float = 1.0
    ici_links: int
    ici_bytes_per_second: float
    ici_efficiency: float = 1.0
    ici_hop_seconds: float = 1e-6
    pod_shape: tuple[int, ...]
    max_slice_chips: int
    wrap_axis: int | None = None
    wrap_cube: int | None = None
    twists: bool = False
    chips_per_host: int
    name_counts: str = "chips"
    dcn_bytes_per_second: float = 6.25e9
    dcn_efficiency: float = 1.0
    dcn_hop_seconds: float = 10e-6
    pcie_bytes_per_second: float = 16e9
    launch_seconds: float = 1e-6
    transfer_seconds: float = 1.2e-6
    collective_launch_seconds: float = 5e-6
    usd_per_chip_hour: float | None = None
    tdp_watts: float | None = None
    not_offered_chips: tuple[int, ...] = ()
    longer_boxes: tuple[tuple[int, int, int], ...] = ()
    aliases: tuple[str, ...] = ()
    device_kinds: tuple[str, ...] = ()
    compiler_name: str = ""
    compiler_config: str = ""
    sources: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise HardwareError(f"chip name must be a letter, then letters, digits and _, not {self.name!r:.80}")
        where = f"chip {self.name!r:.80}: "
        for name in _COUNTS:
            whole(where + name, getattr(self, name), low=1)
        for name in ("year", "sparse_cores_per_chip", "cmem_bytes", "hbm_reserved_bytes", "ici_links"):
            whole(where + name, getattr(self, name))
        for name in (*_RATES, *(name for name in _OPTIONAL if getattr(self, name) is not None)):
            amount(where + name, getattr(self, name), positive=True)
        for name in ("vector_loop_cycles", "ici_bytes_per_second", "ici_hop_seconds", "dcn_hop_seconds", *_LAUNCHES):
            amount(where + name, getattr(self, name))
        if (count := self.attention_backward_kernels) > 2:
            raise HardwareError(f"{where}attention_backward_kernels must be 1 or 2, not {count!r:.80}")
        for name in ("vpu_bf16", "sparse_core_gathers", "twists"):
            if not isinstance(getattr(self, name), bool):
                raise HardwareError(f"{where}{name} must be true or false, not {getattr(self, name)!r:.80}")
        self._check_names(where)
        self._check_sources(where)
        self._check_relations(where)

    def _check_names(self, where: str) -> None:
        for name in ("aliases", "device_kinds"):
            texts: object = getattr(self, name)
            if not isinstance(texts, tuple) or not all(isinstance(text, str) for text in texts):
                raise HardwareError(f"{where}{name} must be texts, not {texts!r:.80}")
        for name in ("compiler_name", "compiler_config"):
            if not isinstance(getattr(self, name), str):
                raise HardwareError(f"{where}{name} must be a text, not {getattr(self, name)!r:.80}")

    def _check_sources(self, where: str) -> None:
        given: object = self.sources
        pairs = given if isinstance(given, tuple) else (given,)
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise HardwareError(f"{where}sources must be pairs ((figure, text), ...), not {given!r:.80}")
        for figure, text in pairs:
            if not isinstance(figure, str) or figure not in FIELDS:
                raise HardwareError(f"{where}sources name no figure {figure!r:.80}{nearest(figure, FIELDS)}")
            if not isinstance(text, str):
                raise HardwareError(f"{where}the source of {figure} must be a text, not {text!r:.80}")

    def _check_relations(self, where: str) -> None:
        for name in ("pod_shape", "not_offered_chips", *_TILES):
            object.__setattr__(self, name, wholes(where + name, getattr(self, name), low=1))
        for name in _TILES:
            if len(getattr(self, name)) != 2:
                raise HardwareError(f"{where}{name} must be (queries, keys), not {getattr(self, name)}")
        boxes: object = self.longer_boxes
        if not isinstance(boxes, tuple):
            raise HardwareError(f"{where}longer_boxes must be boxes ((a, b, c), ...), not {boxes!r:.80}")
        object.__setattr__(self, "longer_boxes", tuple(wholes(where + "longer_boxes", box, low=1) for box in boxes))
        self._check_figures(where)

    def _check_figures(self, where: str) -> None:
        if all(self.peak(dtype) is None for dtype in DTYPES):
            raise HardwareError(where + "at least one of peak_bf16_flops, peak_int8_flops, ... must be given")
        if self.hbm_reserved_bytes >= self.hbm_bytes:
            both = f"hbm_bytes is {self.hbm_bytes}, hbm_reserved_bytes {self.hbm_reserved_bytes}"
            raise HardwareError(f"{where}nothing is left for programs: {both}; give both figures")
        if self.cores_per_chip % self.devices_per_chip:
            counts = f"devices_per_chip {self.devices_per_chip}, cores_per_chip {self.cores_per_chip}"
            raise HardwareError(f"{where}the devices must share the cores equally; got {counts}")
        if not isinstance(self.name_counts, str) or self.name_counts not in ("cores", "chips"):
            raise HardwareError(f"{where}name_counts must be 'cores' or 'chips', not {self.name_counts!r:.80}")
        if self.ici_links and not self.ici_bytes_per_second:
            raise HardwareError(where + "ici_bytes_per_second must be > 0 where there are links")
        for name in ("mxu_efficiency", "hbm_efficiency", "ici_efficiency", "dcn_efficiency"):
            if getattr(self, name) > 1:
                raise HardwareError(f"{where}{name} must be at most 1, not {getattr(self, name)!r:.80}")
        if self.wrap_axis is not None and self.wrap_cube is not None:
            raise HardwareError(where + "give wrap_axis or wrap_cube, not both")
        for name in ("wrap_axis", "wrap_cube"):
            if getattr(self, name) is not None:
                whole(where + name, getattr(self, name), low=1)

    def __repr__(self) -> str:
        known = ((d, self.peak(d)) for d in DTYPES)
        rates = ", ".join(f"{rate / 1e12:.4g} T{'FLOP' if d[0] in 'bf' else 'OP'}/s {d}" for d, rate in known if rate)
        hbm = f"HBM {self.hbm_bytes / 2**30:.4g} GiB at {self.hbm_bytes_per_second / 1e9:.4g} GB/s"
        return f"<Chip {self.name}: {rates}, {hbm}>"

    def _repr_html_(self) -> str:
        return chip_cell(self)

    def peak(self, dtype: str = "bf16") -> float | None:
        """Peak operations per second of the chip in `dtype`, None where no rate is published."""
        one_of("MXU dtype", dtype, DTYPES)
        value: float | None = getattr(self, f"peak_{dtype}_flops")
        return value

    def peak_flops(self, dtype: str = "bf16") -> float:
        """As `peak`, but a HardwareError that lists the published dtypes where there is no rate."""
        if (value := self.peak(dtype)) is None:
            known = ", ".join(kind for kind in DTYPES if self.peak(kind) is not None)
            raise HardwareError(
                f"chip {self.name!r:.80} has no published {dtype} rate; it has {known}: multiply in one of these"
            )
        return value

    @property
    def mxu_clock_hz(self) -> float:
        """The rate at which rows enter each MXU: peak / (2 x rows x columns x MXUs).

        This is `clock_hz` (within rounding) where geometry times clock gives the published peak (v1-v5p),
        and the effective rate where it does not (v6e: twice the clock that is supposed).
        """
        per_cycle = 2 * self.mxu_rows * self.mxu_columns * self.mxus_per_core * self.cores_per_chip
        return (self.peak_bf16_flops or self.peak_flops("int8")) / per_cycle

    @property
    def cores_per_device(self) -> int:
        """Cores fused into one device: 1 on v2 and v3, 2 (megacore) on v4 and v5p."""
        return self.cores_per_chip // self.devices_per_chip

    @property
    def hbm_bytes_per_device(self) -> int:
        """HBM of one device as built, bytes."""
        return self.hbm_bytes // self.devices_per_chip

    @property
    def usable_hbm_bytes_per_device(self) -> int:
        """HBM of one device that programs are offered, bytes: without what the runtime keeps.

        Example:
          >>> from hardware import CHIPS
          >>> CHIPS["v5e"].usable_hbm_bytes_per_device / 2**30
          15.75
        """
        return (self.hbm_bytes - self.hbm_reserved_bytes) // self.devices_per_chip

    @property
    def unpublished(self) -> tuple[str, ...]:
        """Names of the figures without a public source: assumed, derived by analogy, or recalled and not read again.

        Example:
          >>> from hardware import CHIPS
          >>> CHIPS["v7"].unpublished[:3], CHIPS["v5e"].unpublished[:1]
          (('clock_hz', 'mxu_rows', 'vpu_alus_per_lane'), ('vpu_alus_per_lane',))
        """
        return tuple(f for f in FIELDS if any(word in dict(self.sources).get(f, "") for word in _UNSURE))

    def source(self, name: str) -> str:
        """The source of the figure `name`; "not given" for a chip of your own without sources."""
        if not isinstance(name, str) or name not in FIELDS:
            raise HardwareError(f"a chip has no figure {name!r:.80}{nearest(name, FIELDS)}")
        return dict(self.sources).get(name, "not given")


_COUNTS = (
    "cores_per_chip", "devices_per_chip", "mxus_per_core", "mxu_rows", "mxu_columns", "vpu_sublanes",
    "vpu_lanes", "vpu_alus_per_lane", "vmem_bytes_per_core", "scoped_vmem_bytes", "hbm_bytes", "max_slice_chips",
    "chips_per_host", "attention_backward_kernels",
)  # fmt: skip
_UNSURE = ("from memory", "assumed", "not published")
_TILES = ("attention_tile", "attention_window_tile", "attention_backward_tile")
_RATES = (
    "clock_hz", "mxu_efficiency", "vmem_bandwidth_ratio", "hbm_bytes_per_second", "hbm_efficiency",
    "ici_efficiency", "dcn_efficiency", "dcn_bytes_per_second", "pcie_bytes_per_second",
)  # fmt: skip
_LAUNCHES = ("launch_seconds", "transfer_seconds", "collective_launch_seconds")
_OPTIONAL = (
    "peak_bf16_flops", "peak_int8_flops", "peak_fp8_flops", "peak_int4_flops", "usd_per_chip_hour", "tdp_watts",
)  # fmt: skip
FIELDS = tuple(f.name for f in dataclasses.fields(Chip))
REQUIRED = {f.name for f in dataclasses.fields(Chip) if f.default is dataclasses.MISSING}


def _explained(init: Callable[..., None]) -> Callable[..., None]:
    """The constructor of a chip; calls that do not match it are told where chips with figures are."""

    @wraps(init)
    def __init__(self: Chip, *given: object, **figures: object) -> None:
        try:
            init(self, *given, **figures)
        except TypeError as fault:
            name = given[0] if given and isinstance(given[0], str) and given[0] in FIGURES else "v3"
            raise HardwareError(
                f"a Chip of your own takes all its figures by name ({fault!s:.200}); hardware.CHIPS['{name}'] is a "
                f"published chip, and dataclasses.replace(hardware.CHIPS['{name}'], name='mine', ...) changes figures"
            ) from None

    return __init__


Chip.__init__ = _explained(Chip.__init__)  # type: ignore[method-assign]


def _published(name: str) -> Chip:
    figures = {**COMMON, **FIGURES[name]}
    values = {key: value for key, (value, _) in figures.items()}
    return Chip(name=name, sources=tuple((key, source) for key, (_, source) in figures.items()), **values)


class _Chips(dict[str, Chip]):
    """Chips by name; a name that is no key is an alias, or an error that names the chips."""

    def __missing__(self, name: str) -> Chip:
        return get_chip(name)


CHIPS: Mapping[str, Chip] = MappingProxyType(_Chips({name: _published(name) for name in FIGURES}))
"""The published chips by name, such as "v5e"."""

_ALIASES = {alias: chip.name for chip in CHIPS.values() for alias in chip.aliases}


def get_chip(name: str) -> Chip:
    """The published chip of that name; also v5litepod, trillium, tpu7x, v7x, ironwood.

    Raises: HardwareError with the nearest names for an unknown chip.
    Example:
      >>> from hardware import get_chip
      >>> get_chip("v5litepod").name
      'v5e'
    """
    if not isinstance(name, str):
        raise HardwareError(f"a chip is named by a string such as 'v3', not {name!r:.80}")
    key = true_name(name)
    if key not in CHIPS:
        raise UnknownChipError(f"unknown chip {name!r:.80}; known chips are {', '.join(CHIPS)}")
    return CHIPS[key]


def true_name(name: str) -> str:
    """The name in lower case, with an alias replaced by the chip's own name.

    Example:
      >>> true_name("TPU7x"), true_name("Mine")
      ('v7', 'mine')
    """
    return _ALIASES.get(name.lower(), name.lower())


def as_chip(given: Chip | str) -> Chip:
    """A `Chip` as it is, or the published chip of that name.

    Raises: HardwareError as `get_chip`.
    Example:
      >>> as_chip("v3") is as_chip(CHIPS["v3"])
      True
    """
    return given if isinstance(given, Chip) else get_chip(given)
