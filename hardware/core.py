"""Roofline time of one local operation on one device, and the engine that bounds it.

An operation is plain numbers: matrix products as sizes, element operations, bytes over HBM. MXU, VPU and HBM
work at once, so the time is that of the slowest, plus a launch; their sum bounds it from above.

A product [m, k] x [k, n] keeps one operand stationary, in tiles, and streams the other through. Either operand may be
stationary, and the MXUs of a device split tiles or rows; the fastest of these is assumed. A tile costs at least as many
cycles as the array has rows, a ragged tile as many as a whole one. Matrices of a batch that are smaller than the array
are loaded in as many cycles as they have rows or columns, whichever are fewer: libtpu 0.0.42.1 states 3,840 cycles on
v5e for 128 products [16, 821] x [821, 16], which are 28,672 for whole tiles (tests/benchmarks/single_operations.py).

A convolution is one product per tap of its window. Assumed: taps of the last dim share the array where channels leave
rows of it free (3 of 128 in the first layer of an image network); groups of channels share it along its diagonal, as
XLA turns a grouped convolution into a dense one (convolution_group_converter).

The vector unit has 8 sublanes x 128 lanes, a few ALUs each, one float32 operation per ALU and cycle. From v6e on
bfloat16 runs natively, two values per lane; before, bf16 arithmetic is done in float32.

Sources: Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009; `hardware.mxu`; of the vector unit
jax-ml/scaling-book tpus.md and `hardware.chip_figures`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hardware.checks import HardwareError, amount, one_of, whole
from hardware.chips import DTYPES, Chip, as_chip
from hardware.memory import hbm_rate, hbm_seconds, vmem_rate
from hardware.mxu import MXU

VPU_DTYPES = ("float32", "bfloat16")
FLOAT32_PASSES = 6  # bf16 products that make one float32 product: jax.lax.Precision.HIGHEST


def vpu_rate(chip: Chip, dtype: str = "float32") -> float:
    """Element operations per second of one device.

    Args:
      chip: the chip.
      dtype: "float32" (also for integers) or "bfloat16".
    Raises: HardwareError for another dtype.
    Example:
      >>> from hardware.chips import CHIPS
      >>> vpu_rate(CHIPS["v5p"]) / 1e12  # two cores x 8 x 128 x 4 x 1.75 GHz
      14.336
    """
    one_of("dtype of the vector unit", dtype, VPU_DTYPES)
    per_cycle = chip.vpu_sublanes * chip.vpu_lanes * chip.vpu_alus_per_lane * chip.cores_per_device
    return chip.clock_hz * per_cycle * (2 if dtype == "bfloat16" and chip.vpu_bf16 else 1)


def vpu_seconds(chip: Chip, operations: float, dtype: str = "float32") -> float:
    """Seconds for that many element operations on one device.

    Example:
      >>> from hardware.chips import CHIPS
      >>> vpu_seconds(CHIPS["v5p"], 14.336e9)
      0.001
    """
    return amount("operations", operations) / vpu_rate(chip, dtype)


@dataclass(frozen=True)
class Matmul:
    """A (batched) matrix product [batch, m, k] x [batch, k, n] on one device.

    Attributes:
      dtype: dtype in which the MXU multiplies: "bf16", "int8", "fp8" or "int4".
      passes: number of passes through the MXU: 1, or 6 for float32 at highest precision.
      taps: number of window elements of a convolution. Each is a product [m, k] x [k, n] with weights of its own; the
        products are summed.
      beside: number of taps that may share the rows of the array, if they fit.
      packs: whether batch items may share the array along its diagonal, as in a grouped convolution.

    Example:
      >>> from hardware import Matmul
      >>> Matmul(8, 128, 128).flops
      262144
    """

    m: int
    k: int
    n: int
    batch: int = 1
    dtype: str = "bf16"
    passes: int = 1
    taps: int = 1
    beside: int = 1
    packs: bool = False

    def __post_init__(self) -> None:
        for name in ("m", "k", "n", "batch", "passes", "taps", "beside"):
            whole(f"Matmul {name}", getattr(self, name), low=1)
        one_of("MXU dtype", self.dtype, DTYPES)

    @property
    def flops(self) -> int:
        """Useful floating-point operations, two per multiply-add; passes not counted."""
        return 2 * self.batch * self.taps * self.m * self.k * self.n


@dataclass(frozen=True)
class Work:
    """Work of one operation or fusion group on one device.

    Attributes:
      matmuls: its matrix products.
      mxu_flops: further work of the MXU, of unknown shape and therefore at the full rate.
      vpu_ops: element operations of the vector unit.
      vpu_dtype: the dtype of these operations, "float32" or "bfloat16".
      hbm_bytes: bytes that the operation or group reads from HBM and writes to it.

    Raises: HardwareError for a negative or non-finite amount, an unknown dtype, or other matmuls than Matmul.
    Example:
      >>> from hardware import Matmul, Work
      >>> work = Work((Matmul(1024, 1024, 1024),), hbm_bytes=3 * 2 * 1024**2)  # a product in bfloat16, alone
      >>> sum(product.flops for product in work.matmuls) / work.hbm_bytes  # FLOPs a byte
      341.3333333333333
    """

    matmuls: tuple[Matmul, ...] = ()
    mxu_flops: float = 0.0
    vpu_ops: float = 0.0
    hbm_bytes: float = 0.0
    vpu_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("mxu_flops", "vpu_ops", "hbm_bytes"):
            amount(f"Work {name}", getattr(self, name))
        given: object = self.matmuls
        if not isinstance(given, (list, tuple)) or not all(isinstance(product, Matmul) for product in given):
            raise HardwareError(f"Work matmuls must be a tuple of Matmul(m, k, n), not {given!r}")
        object.__setattr__(self, "matmuls", tuple(given))
        one_of("dtype of the vector unit", self.vpu_dtype, VPU_DTYPES)


@dataclass(frozen=True)
class Time:
    """Modelled time of an operation: `seconds`, its bounds, its parts and the one that bounds it.

    Example:
      >>> from hardware import Work, time_of
      >>> from hardware.chips import CHIPS
      >>> time = time_of(CHIPS["v5e"], Work(hbm_bytes=8e8))
      >>> time.bound, f"{time.seconds * 1e3:.2f} ms"
      ('hbm', '1.09 ms')
    """

    mxu_seconds: float
    vpu_seconds: float
    hbm_seconds: float
    launch_seconds: float

    @property
    def lower_seconds(self) -> float:
        """Perfect overlap: the slowest part alone."""
        return max(self.mxu_seconds, self.vpu_seconds, self.hbm_seconds)

    @property
    def upper_seconds(self) -> float:
        """No overlap at all."""
        return self.mxu_seconds + self.vpu_seconds + self.hbm_seconds + self.launch_seconds

    @property
    def seconds(self) -> float:
        """Overlap within the operation, launched on its own."""
        return self.lower_seconds + self.launch_seconds

    @property
    def bound(self) -> str:
        """The slowest of "mxu", "vpu", "hbm", "launch"."""
        return max(("mxu", "vpu", "hbm", "launch"), key=lambda name: float(getattr(self, f"{name}_seconds")))


def time_of(chip: Chip | str, work: Work) -> Time:
    """Modelled time of `work` on one device of `chip` (a `Chip` or its name).

    Raises: HardwareError for an unknown chip, or a product in a dtype for which the chip has no rate.
    Example:
      >>> from hardware import Matmul, Work, time_of
      >>> from hardware.chips import CHIPS
      >>> big = time_of(CHIPS["v5e"], Work((Matmul(8192, 8192, 8192),), hbm_bytes=3 * 2 * 8192**2))
      >>> big.bound, f"{big.seconds * 1e3:.2f} ms"
      ('mxu', '5.82 ms')
      >>> time_of(CHIPS["v5e"], Work((Matmul(8, 8192, 8192),), hbm_bytes=2 * 8192**2)).bound
      'hbm'

    Source: module docstring.
    """
    chip = as_chip(chip)
    if not isinstance(work, Work):
        raise HardwareError(f"time_of needs a Work(matmuls, ...), not {work!r}")
    mxu, vpu_ops = 0.0, work.vpu_ops
    for product in work.matmuls:
        if strength_reduced(chip, product):
            vpu_ops += product.flops
        else:
            mxu += matmul_seconds(chip, product)
    if work.mxu_flops:
        rate = chip.peak_flops("bf16" if chip.peak_bf16_flops else "int8") / chip.devices_per_chip
        mxu += work.mxu_flops / (rate * chip.mxu_efficiency)
    return Time(
        mxu_seconds=mxu,
        vpu_seconds=vpu_seconds(chip, vpu_ops, work.vpu_dtype),
        hbm_seconds=hbm_seconds(chip, work.hbm_bytes),
        launch_seconds=chip.launch_seconds,
    )


def strength_reduced(chip: Chip, product: Matmul) -> bool:
    """True if a matrix-vector product runs as multiply and add on the vector unit because that is faster.

    An array of R rows takes R cycles per tile even for one row, so a matrix-vector product uses 1/R of it.

    Example:
      >>> from hardware.chips import CHIPS
      >>> strength_reduced(CHIPS["v2"], Matmul(4096, 8192, 1)), strength_reduced(CHIPS["v2"], Matmul(8, 8, 8))
      (True, False)

    Source: openxla/xla algebraic_simplifier, "dot strength reduction".
    """
    vector = 1 in (product.m, product.n)
    return vector and vpu_seconds(chip, product.flops) < matmul_seconds(chip, product)


def matmul_seconds(chip: Chip, product: Matmul) -> float:
    """MXU seconds of one product on one device: cycles over the rate at which rows enter the array.

    `Chip.mxu_efficiency` applies to the streaming of rows; filling and draining the array take their exact cycles.

    Example:
      >>> from hardware.chips import CHIPS
      >>> thin, wide = (matmul_seconds(CHIPS["v4"], Matmul(4096, 4096, n)) for n in (1, 128))
      >>> f"{thin / wide:.2f}"
      '0.99'
    """
    speed = chip.peak_flops(product.dtype) / (chip.peak_bf16_flops or chip.peak_flops("int8"))
    fill = _fill_cycles(chip)
    cycles = (matmul_cycles(chip, product) - fill) / chip.mxu_efficiency + fill
    return product.passes * cycles / (chip.mxu_clock_hz * speed)


def matmul_cycles(chip: Chip, product: Matmul) -> int:
    """Cycles of one pass on one device, under the best split of tiles and rows among its MXUs.

    Example:
      >>> from hardware.chips import CHIPS
      >>> round(matmul_cycles(CHIPS["v5e"], Matmul(8192, 8192, 8192)) / (8192**3 / (4 * 128 * 128)), 4)
      1.0
    """
    array = MXU(chip.mxu_rows, chip.mxu_columns)
    units = chip.mxus_per_core * chip.cores_per_device
    best = math.inf
    together = min(product.beside, max(1, array.rows // product.k))
    depth, slices = product.k * together, product.taps // product.beside * -(-product.beside // together)
    for streamed, held in ((product.m, product.n), (product.n, product.m)):
        shared = min(product.batch, array.columns // held) if product.packs else 1
        if depth <= array.rows:
            shared = min(shared, array.rows // depth)
            tiles = slices * array.tiles(depth * max(1, shared), held * max(1, shared))
        else:  # each batch item streams its own rows past the columns of all items
            streamed *= max(1, shared)
            tiles = slices * array.tiles(depth, held * max(1, shared))
        tiles *= -(-product.batch // max(1, shared))
        load = array.rows
        if product.batch > 1 and not product.packs:
            load = min(load, _whole_rows(chip, depth), _whole_rows(chip, held))
        for groups in (g for g in range(1, units + 1) if units % g == 0):
            # tiles are split among groups of MXUs, rows among the MXUs of a group
            rows = -(-streamed // (units // groups))
            rows = _whole_rows(chip, rows)
            share = -(-tiles // groups)
            best = min(best, (share - 1) * max(rows, load) + rows)
    return int(best) + _fill_cycles(chip)


def _whole_rows(chip: Chip, rows: int) -> int:
    """Rows rounded up to whole registers."""
    return -(-rows // chip.vpu_sublanes) * chip.vpu_sublanes


def _fill_cycles(chip: Chip) -> int:
    """Cycles to fill and drain the array: first weight to first row, and last row to last result."""
    return 2 * chip.mxu_rows + chip.mxu_columns - 2


def critical_intensity(chip: Chip, memory: str = "hbm", dtype: str = "bf16", axes: int = 1) -> float:
    """Arithmetic intensity, in operations per byte, above which a device is bound by compute; nominal rates.

    Args:
      memory: "hbm", "vmem", "pcie", "dcn", or "ici" (both directions of `axes` torus axes at once, at the
        share of the nominal rate that is reached).
      dtype: of the MXU.
      axes: wrapped torus axes for "ici".
    Raises: HardwareError for an unknown memory, or a chip without links.
    Example:
      >>> from hardware.chips import CHIPS
      >>> critical_intensity(CHIPS["v5p"], "ici"), round(critical_intensity(CHIPS["v5e"]))
      (2550.0, 241)

    Source: jax-ml/scaling-book roofline.md, sharding.md.
    """
    whole("axes", axes, low=1)
    per_device = chip.devices_per_chip
    rates = {
        "hbm": hbm_rate(chip),
        "vmem": vmem_rate(chip),
        "pcie": chip.pcie_bytes_per_second / per_device,
        "dcn": chip.dcn_bytes_per_second / per_device,
        "ici": 2 * axes * chip.ici_bytes_per_second * chip.ici_efficiency / per_device,
    }
    one_of("memory", memory, rates)
    if not rates[memory]:
        raise HardwareError(f"chip {chip.name!r} has no {memory}")
    return chip.peak_flops(dtype) / per_device / rates[memory]


def compute_bound_rows(
    k: int, n: int, intensity: float, left_bytes: float = 2, right_bytes: float = 2, out_bytes: float = 2
) -> float:
    """The number of rows m from which [m, k] x [k, n] is compute-bound: 2mkn / (bytes) exceeds `intensity`.

    Args:
      k, n: sizes, >= 1; left_bytes, right_bytes, out_bytes: bytes per element of each array.
      intensity: operations per byte, as `critical_intensity`.
    Returns: real-valued m, inf where no m suffices.
    Example:
      >>> round(compute_bound_rows(65536, 65536, 197e12 / 8.2e11), 1)
      242.0

    Source: jax-ml/scaling-book roofline.md.
    """
    k, n = whole("k", k, low=1), whole("n", n, low=1)
    amount("intensity", intensity, positive=True)
    spare = 2 * k * n / intensity - left_bytes * k - out_bytes * n
    return right_bytes * k * n / spare if spare > 0 else math.inf
