"""A chip record from measured rates of JAX devices, for estimates beside the times of real steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from hardware.checks import HardwareError
from hardware.chips import CHIPS, Chip
from hardware.slices import Slice
from meshlib.jax.placing import checked_devices
from meshlib.jax.settings import by_default

REPEATS = 5
# JAX device kind -> name of the chip.
KINDS = {kind: chip for chip in CHIPS.values() for kind in chip.device_kinds}
_MATMUL = {"cpu": 256}  # rows and columns of the timed product; more on other platforms
_MEASURED = (
    "clock_hz",
    "peak_bf16_flops",
    "hbm_bytes_per_second",
    "ici_bytes_per_second",
    "ici_hop_seconds",
    "launch_seconds",
)
_TILE = 8  # for devices with an unknown matrix unit: products are rounded up to it


@by_default()
def measure_chip(devices: Sequence[Any] | None = None, name: str = "measured") -> Chip:
    """Measure the rates of JAX devices that all run at once, as a chip for `mtf.estimate`.

    Products, vector work, copies in memory, an all-gather over all devices and small operations are timed; each figure
    is the median of five runs. Takes a few seconds on a CPU.

    Args:
      devices: to measure; by default all.
      name: of the chip.
    Returns: a chip with one core; `Slice(f"{name}-{n}", chip)` is as many devices as were measured.
    Raises: GraphError for invalid devices; HardwareError for an invalid name.
    Example:
      >>> import meshlib as mtf
      >>> from hardware import Slice
      >>> with mtf.Graph():
      ...     program = mtf.lower({"y": mtf.exp(mtf.input("x", "batch:8"))}, mesh="data:8", layout="batch:data")
      >>> chip = mtf.measure_chip()  # doctest: +SKIP
      >>> mtf.estimate(program, Slice(f"measured-{program.mesh.size}", chip)).step_seconds  # doctest: +SKIP

    Source: measured by this call; figures that a device does not report (on-chip memory, tiles) are assumed, and
      `chip.source` says which.
    """
    there = checked_devices(devices, "measure_chip")
    timer = _Timer(there)
    count, platform = len(there), there[0].platform
    n = _MATMUL.get(platform, 4096)
    dtype = jnp.float32 if platform == "cpu" else jnp.bfloat16
    nothing = timer.seconds(lambda x: x + 1, (8,), jnp.float32)
    product = timer.seconds(lambda x: _products(x, 8), (n, n), dtype, nothing) / 8
    long = 1 << (19 if platform == "cpu" else 26)
    copied = timer.seconds(lambda x: lax.fori_loop(0, 16, lambda _, y: y + 1, x), (long,), jnp.float32, nothing) / 16
    elements, times = (1 << 14, 64) if platform == "cpu" else (1 << 24, 512)
    vector = timer.seconds(lambda x: _steps(x, times), (elements,), jnp.float32, nothing)
    launch = timer.seconds(lambda x: _chain(x, 64), (8, 8), jnp.float32, nothing) / 64
    links, link, hop = 0, 0.0, 1e-6
    if count > 1:
        part = 1 << (16 if platform == "cpu" else 22)
        gather = timer.seconds(lambda x: lax.all_gather(x, "d").sum(0), (part,), jnp.float32, nothing)
        hop = max(1e-9, timer.seconds(lambda x: lax.psum(x, "d"), (1,), jnp.float32) - nothing) / (2 * (count - 1))
        links, link = 2, (count - 1) * part * 4 / gather / 2
    alus = 8
    local = next((d for d in there if d.process_index == jax.process_index()), None)
    stats = (local and local.memory_stats()) or {}
    sources = dict.fromkeys(_MEASURED, f"measured on {count} {there[0].device_kind}")
    return Chip(
        name=name,
        cores_per_chip=1,
        devices_per_chip=1,
        clock_hz=elements * times * 2 / vector / alus,
        mxus_per_core=1,
        mxu_rows=_TILE,
        mxu_columns=_TILE,
        peak_bf16_flops=2.0 * n**3 / product,
        vpu_sublanes=1,
        vpu_lanes=alus,
        vpu_alus_per_lane=1,
        vmem_bytes_per_core=1 << 20,
        hbm_bytes=int(stats.get("bytes_limit", 16 << 30)),
        hbm_bytes_per_second=2 * 4 * long / copied,
        ici_links=links,
        ici_bytes_per_second=link,
        ici_hop_seconds=hop,
        pod_shape=(count,),
        max_slice_chips=count,
        wrap_axis=count if count > 2 else None,
        chips_per_host=count,
        launch_seconds=launch,
        sources=tuple(sources.items()),
    )


def known_slice(devices: Sequence[Any]) -> Slice | None:
    """The slice that these devices form, if they are TPUs of a known kind in the number of a slice."""
    chip = KINDS.get(devices[0].device_kind)
    if chip is None or len(devices) % chip.devices_per_chip:
        return None
    chips = len(devices) // chip.devices_per_chip
    try:
        return Slice(f"{chip.name}-{chips * chip.cores_per_chip if chip.name_counts == 'cores' else chips}")
    except HardwareError:
        return None


class _Timer:
    """Times a function of one block, run by all devices at once."""

    def __init__(self, devices: Sequence[Any]) -> None:
        self.mesh = jax.sharding.Mesh(np.array(devices, dtype=object), ("d",))

    def seconds(self, function: Callable[[Any], Any], shape: tuple[int, ...], dtype: Any, less: float = 0.0) -> float:
        """Median seconds of the runs, minus those of a step that does nothing."""
        spec = PartitionSpec("d")
        mapped = jax.jit(
            jax.shard_map(
                lambda x: function(x[0])[None], mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False
            )
        )
        sharding = jax.sharding.NamedSharding(self.mesh, spec)
        whole = (self.mesh.size, *shape)
        numbers = np.random.default_rng(0).standard_normal(4099) / shape[-1]  # units take less power for constants
        x = jax.make_array_from_callback(
            whole, sharding, lambda index: np.resize(numbers, (1, *shape)).astype(jnp.dtype(dtype))
        )
        jax.block_until_ready(mapped(x))
        taken = []
        for _ in range(REPEATS):
            begun = time.perf_counter()
            jax.block_until_ready(mapped(x))
            taken.append(time.perf_counter() - begun)
        return max(median(taken) - less, 0.05 * median(taken))


def _products(x: Any, times: int) -> Any:
    """A chain of dependent products."""
    return lax.fori_loop(0, times, lambda _, y: jnp.matmul(y, x, preferred_element_type=jnp.float32).astype(x.dtype), x)


def _steps(x: Any, times: int) -> Any:
    """Two vector operations per element and step, on data that stays in the fastest memory."""
    for _ in range(times):
        x = x * 0.999 + 0.001
    return x


def _chain(x: Any, times: int) -> Any:
    """A chain of small products, which measures launch overhead."""
    y = x
    for _ in range(times):
        y = jnp.matmul(y, x)
    return y
