"""Slices as the TPU compiler names them: topologies of devices that need not be present."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from typing import Any

from hardware.chips import CHIPS
from hardware.slices import Slice
from meshlib.core.errors import MissingError, SliceError

# Machine description for libtpu, so that it asks no metadata server; set in the compiling process alone.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v4-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes may compile at once: none touches a device
}


@dataclass(frozen=True)
class Topology:
    """Arguments of `jax.experimental.topologies.get_topology_desc` for a slice: a name and keyword arguments."""

    name: str
    options: dict[str, Any]


def topology_of(slice_: Slice) -> Topology:
    """The topology of a slice.

    Raises: SliceError for a chip of your own, one that the compiler has no name for, a twisted slice,
    or one with failed parts.

    >>> topology_of(Slice("v5e-16")), topology_of(Slice("2*v4-4x4x8")).options["num_slices"]
    (Topology(name='v5e:4x4', options={}), 2)
    """
    chip = slice_.chip
    if slice_.failed or slice_.failed_links:
        raise SliceError(
            f"compile_for: the compiler's topologies have no name for {slice_.name!r}: use {slice_.single.name}"
        )
    if not chip.compiler_name or chip != Slice(f"{chip.name}-{'x'.join(map(str, slice_.torus_shape))}").chip:
        raise SliceError(
            f"compile_for: the TPU compiler knows {', '.join(c.name for c in CHIPS.values() if c.compiler_name)}, "
            f"not chip {chip.name!r} with these figures"
        )
    if slice_.twisted:
        raise SliceError(
            f"compile_for: slice {slice_.name!r} is twisted, for which the compiler's topologies have no name: "
            "leave out '_twisted'"
        )
    options: dict[str, Any] = {"chip_config_name": chip.compiler_config} if chip.compiler_config else {}
    chips = prod(slice_.torus_shape)
    if chips < 4:  # a host with fewer chips than usual
        options["chips_per_host_bounds"] = (*slice_.torus_shape, *(1,) * (3 - len(slice_.torus_shape)))
    if slice_.slices > 1:
        options["num_slices"] = slice_.slices
    return Topology(f"{chip.compiler_name}:{'x'.join(map(str, slice_.torus_shape))}", options)


def require_tpu_compiler() -> None:
    """Raise MissingError, with what to install, where libtpu is missing."""
    if find_spec("libtpu") is None:
        raise MissingError(
            "compile_for needs the TPU compiler, which is not installed: pip install libtpu (it comes under its own "
            "terms and is not part of this library); backend='cpu' compiles for CPUs instead"
        )
