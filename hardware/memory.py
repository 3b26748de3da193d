"""Arrays in memory: padding by tiles, capacity, bandwidth.

An array in HBM is stored in tiles of 8 x 128 elements on its two minor dims, the register shape of the
vector unit; narrow types are packed within a tile (two bf16, four int8 or eight int4 rows in one of 32 bits). Hence a
minor dim of 1 costs 128 times its size. Arrays with fewer than 8 rows use a tile with fewer rows, and
one-dimensional ones a tile of 128 to 1024 elements, at least one full row of 32 bits in each of the 128 lanes:
128 float32, 256 bf16, 512 int8, 1024 int4.

For types of one byte XLA prints both T(8,128)(4,1) and T(32,128)(4,1), the choice being that of the program;
here it is the first, so up to 31 rows of padding may be missing in a 2-D int8 array.

Sources: openxla.org/xla/tiled_layout; tile shapes as XLA prints them for TPU programs, such as
`f32[4,256]{1,0:T(4,128)}`, `bf16[16,256]{1,0:T(8,128)(2,1)}`, `f32[300]{0:T(512)}`,
`bf16[128]{0:T(256)(128)(2,1)}`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from hardware.checks import HardwareError, amount, wholes
from hardware.chips import Chip

SUBLANES, LANES = 8, 128
PCIE_EFFICIENCY = 0.9


def tile_of(shape: Sequence[int], itemsize: float) -> tuple[int, ...]:
    """The tile of an array, over its minor dim or its two minor dims.

    Args:
      shape: sizes, minor dim last, each >= 0.
      itemsize: bytes per element, 0.5, 1, 2, 4 or 8.
    Raises: HardwareError for a negative size or another itemsize.
    Example:
      >>> tile_of((1024, 256), 4), tile_of((3, 256), 2), tile_of((300,), 4)
      ((8, 128), (4, 128), (512,))
      >>> tile_of((4,), 4), tile_of((4,), 2), tile_of((128,), 2), tile_of((4,), 1)
      ((128,), (256,), (256,), (512,))

    Source: module docstring.
    """
    sizes = wholes("shape", shape)
    if itemsize not in (0.5, 1, 2, 4, 8):
        raise HardwareError(f"itemsize must be 0.5, 1, 2, 4 or 8 bytes, not {itemsize!r}")
    packed = max(1, int(4 / itemsize))
    if len(sizes) < 2:
        return (min(1024, max(LANES * packed, _power_of_two(math.prod(sizes)))),)
    return (min(SUBLANES, max(packed, _power_of_two(sizes[-2]))), LANES)


def padded_shape(shape: Sequence[int], itemsize: float = 4, tile: Sequence[int] | None = None) -> tuple[int, ...]:
    """The shape that an array occupies: its minor dims rounded up to whole tiles.

    Args:
      shape: sizes, minor dim last; a scalar occupies one tile.
      itemsize: bytes per element.
      tile: another tile than `tile_of` gives.
    Raises: HardwareError as `tile_of`, and for a tile with more dims than the array.
    Example:
      >>> padded_shape((100, 1)), padded_shape((3, 5), tile=(2, 2)), padded_shape((7, 50, 130), itemsize=2)
      ((104, 128), (4, 6), (7, 56, 256))

    Source: module docstring; openxla.org/xla/tiled_layout for the second.
    """
    sizes = wholes("shape", shape) or (1,)
    blocks = tile_of(sizes, itemsize) if tile is None else wholes("tile", tile, low=1)
    if len(blocks) > len(sizes):
        raise HardwareError(f"tile {blocks} has more dims than the array {sizes}")
    major = len(sizes) - len(blocks)
    padded = (-(-size // block) * block for size, block in zip(sizes[major:], blocks, strict=True))
    return (*sizes[:major], *padded)


def padded_bytes(shape: Sequence[int], itemsize: float = 4, tile: Sequence[int] | None = None) -> int:
    """Bytes that an array occupies, padding included.

    Example:
      >>> padded_bytes((4096, 1), 4) // (4096 * 4)
      128
    """
    return math.ceil(math.prod(padded_shape(shape, itemsize, tile)) * itemsize)


@lru_cache(maxsize=1 << 16)
def densest_bytes(shape: tuple[int, ...], itemsize: float = 4) -> int:
    """Bytes that an array occupies if the best two of its dims are tiled.

    Compilers choose the layout of an array in memory; which dim is named last does not bind them.

    Example:
      >>> densest_bytes((4096, 1)) // 4096, densest_bytes((24576, 48)), 24576 * 48 * 4
      (4, 4718592, 4718592)
      >>> padded_bytes((24576, 48)) / densest_bytes((24576, 48))
      2.6666666666666665
    """
    sizes = wholes("shape", shape)
    if len(sizes) < 2 or 0 in sizes:
        return padded_bytes(sizes, itemsize)
    second, minor = tiled_dims(shape, itemsize)
    major = math.prod(size for n, size in enumerate(sizes) if n not in (second, minor))
    return major * padded_bytes((sizes[second], sizes[minor]), itemsize)


@lru_cache(maxsize=1 << 16)
def tiled_dims(shape: tuple[int, ...], itemsize: float = 4) -> tuple[int, int]:
    """The two dims, second-minor and minor, that are tiled in an array's densest layout; the last ones of equals.

    Example:
      >>> tiled_dims((64, 40, 33)), tiled_dims((256, 24, 640)), tiled_dims((2, 268, 640), 2)
      ((1, 0), (1, 2), (0, 2))
    """
    columns = [-(-size // LANES) * LANES for size in shape]
    rows = [padded_shape((size, 1), itemsize)[0] for size in shape]
    dims = range(len(shape) - 1, -1, -1)
    pairs = [(s, m) for m in dims for s in dims if s != m]
    return min(pairs, key=lambda pair: rows[pair[0]] * columns[pair[1]] / (shape[pair[0]] * shape[pair[1]]))


def hbm_seconds(chip: Chip, size_bytes: float) -> float:
    """Time for one device to move that many bytes to or from its HBM, at the rate that copies reach.

    Example:
      >>> from hardware.chips import CHIPS
      >>> f"{hbm_seconds(CHIPS['v5e'], 16e9):.4f}"
      '0.0217'
    """
    return amount("size_bytes", size_bytes) / (hbm_rate(chip) * chip.hbm_efficiency)


def pcie_seconds(chip: Chip, size_bytes: float) -> float:
    """Time for one device to move that many bytes to or from the memory of its host, one way.

    Devices of a chip share its lanes. Assumed: packet headers and the host's memory leave 90 % of the nominal rate.

    Example:
      >>> from hardware.chips import CHIPS
      >>> f"{pcie_seconds(CHIPS['v5e'], 14.4e9):.3f}"
      '1.000'
    """
    return amount("size_bytes", size_bytes) / (chip.pcie_bytes_per_second / chip.devices_per_chip * PCIE_EFFICIENCY)


def hbm_rate(chip: Chip) -> float:
    """Nominal HBM bytes per second of one device."""
    return chip.hbm_bytes_per_second / chip.devices_per_chip


def vmem_rate(chip: Chip) -> float:
    """VMEM bytes per second of one device: about 22 times its HBM.

    Source: jax-ml/scaling-book tpus.md.
    """
    return hbm_rate(chip) * chip.vmem_bandwidth_ratio


def vmem_bytes(chip: Chip) -> int:
    """VMEM of one device, bytes: that of its core or of both fused ones."""
    return chip.vmem_bytes_per_core * chip.cores_per_device


def _power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << max(0, size - 1).bit_length()
