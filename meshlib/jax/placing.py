"""Placement of arrays: program meshes as JAX meshes, shardings as PartitionSpecs, transfers to devices and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding, PartitionSpec

from layouts import Mesh, Sharding
from layouts.parsing import is_iterable
from meshlib.core.dtypes import INT4, DType
from meshlib.core.errors import GraphError, ProgramError

HostArray = np.ndarray[Any, Any]


def spec_of(sharding: Sharding) -> PartitionSpec:
    """The PartitionSpec of a sharding: the axes of each dim, major first.

    >>> tuple(spec_of(Sharding("batch:8;hidden:4", "rows:2;cols:2", [("rows", "cols"), ()])))
    (('rows', 'cols'),)
    """
    entries: list[Any] = [a[0] if len(a) == 1 else a or None for a in sharding.axes]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def checked_devices(devices: Any, what: str) -> list[Any]:
    """JAX devices as given; all devices for None.

    Raises: GraphError, which begins with `what`, for anything else.
    """
    if devices is None:
        return list(jax.devices())
    device_list = list(devices) if is_iterable(devices) and not isinstance(devices, str) else [devices]
    if not device_list or not all(isinstance(d, jax.Device) for d in device_list):
        raise GraphError(f"{what}: devices must be a list of JAX devices, as of jax.devices(), got {devices!r:.80}")
    twice = next((d for n, d in enumerate(device_list) if d in device_list[:n]), None)
    if twice is not None:
        raise GraphError(f"{what}: device {twice} is {device_list.count(twice)} times in the list; give each once")
    return device_list


def device_mesh(mesh: Mesh, devices: Sequence[jax.Device] | None) -> jax.sharding.Mesh:
    """The program's mesh over the given devices in their order; by default over all, on TPUs ordered by the torus.

    With several processes, a mesh over fewer than all devices must fit one process: each process runs it alone.
    Raises: ProgramError if there are too few, with both numbers and a remedy; GraphError for invalid devices.
    """
    there = checked_devices(devices, "on_jax")
    if len(there) < mesh.size:
        raise ProgramError(
            f"on_jax: mesh {mesh} has {mesh.size} cores, but there are {len(there)} {there[0].platform} devices; lower "
            "for a smaller mesh, or on a CPU set XLA_FLAGS=--xla_force_host_platform_device_count="
            f"{mesh.size} before JAX is imported"
        )
    if len(there) > mesh.size:
        local = [d for d in there if d.process_index == jax.process_index()]
        if len({d.process_index for d in there}) > 1 and len(local) < mesh.size:
            raise ProgramError(
                f"on_jax: mesh {mesh} has {mesh.size} cores, but there are {len(there)} devices, {len(local)} of them "
                "in this process; lower for all of them, or for as many as a process has"
            )
        there = local[: mesh.size] if len(local) >= mesh.size else there[: mesh.size]
    elif devices is None and there[0].platform == "tpu":
        from jax.experimental import mesh_utils

        return jax.sharding.Mesh(mesh_utils.create_device_mesh(mesh.sizes, there), mesh.axes)
    return jax.sharding.Mesh(np.array(there, dtype=object).reshape(mesh.sizes), mesh.axes)


def between_steps(dtype: DType, sharding: NamedSharding) -> np.dtype:
    """Dtype of arrays passed to and from a compiled step: JAX 0.10 on CPUs does not accept int4."""
    first = sharding.mesh.devices.flat[0]
    return dtype.storage if dtype is INT4 and first.platform == "cpu" else dtype.public


def in_rows(x: jax.Array) -> jax.Array:
    """A block in row-major layout, in which a TPU stores whole tiles of (8, 128); other arrays unchanged.

    A loop's product may ask for another layout of its weight. XLA propagates that to the stack and copies all layers'
    before the loop; so it copies the one layer's instead.
    """
    tile = 8 * max(1, 4 // x.dtype.itemsize), 128
    if x.ndim < 2 or any(size % n for size, n in zip(x.shape[-2:], tile, strict=True)):
        return x
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def place(array: HostArray, dtype: DType, sharding: NamedSharding) -> jax.Array:
    """An array in storage form on the devices; each process supplies the blocks of its own devices."""
    held = between_steps(dtype, sharding)

    def block(index: Any) -> HostArray:
        return np.asarray(array[index]).astype(held)  # a copy, since devices may keep a reference

    return jax.make_array_from_callback(array.shape, sharding, block, dtype=held)


def whole(x: Any) -> HostArray:
    """The whole array on the host of every process."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(x, tiled=True))
