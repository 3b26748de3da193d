"""Blocking of a matrix product in VMEM: block sizes, operand re-reads, and transfers that nothing overlaps.

The product is computed in output blocks of `rows` x `columns`, each in steps of `depth`. VMEM holds the block's
float32 sums and two copies of the operand pieces (one arrives while the other is used). Left rows are read again for
every block column, right columns for every block row, unless an operand stays in VMEM whole. While the first pieces
arrive the MXU has nothing to do, and nothing covers the writing of the last block: those bytes are exposed.

Each step after the first adds its results to the float32 sums in VMEM, and the last one converts them: `SUM_CYCLES`
of a core for each register of a block and step, beside which the MXU waits.

Sources: Hong and Kung, "I/O complexity: the red-blue pebble game", STOC 1981 (traffic of blocks); jax-ml/jax
docs/pallas/tpu/matmul.md (the same pipeline written out). Assumed: half of VMEM serves a product, blocks are powers
of two up to 2048, steps are at most 1024 deep; of equal traffic the largest blocks, which take the fewest steps.
`SUM_CYCLES`: XLA states blocks, steps and cycles of products. Beyond whole tiles the 27 of a Transformer's layer with
its gradients (8,192 tokens, widths 4,096 and 11,008) take 2.2 cycles in the median on v5e, 2.4 on v5p and v6e, 2.3 on
v7 (libtpu 0.0.42.1, tests/benchmarks/block_sums.py); where much element-wise work is fused, up to 26.
`result_seconds`: XLA adds up the passes of a step inside the array, kernels of Pallas outside it: compiled by the same
libtpu for v7, a tile of a grouped product in fp8 takes 0.89 to 1.08 bundles for each register of results and 256 of its
depth, twice what the array needs (`tests/hardware/test_blocking.py`). In bfloat16 the array takes as long.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

from hardware.chips import Chip
from hardware.core import Matmul
from hardware.memory import vmem_bytes

DEPTHS = (1024, 512, 256, 128)
SUM_CYCLES = 2.0
_ACCUMULATOR_BYTES = 4


@dataclass(frozen=True)
class Blocks:
    """The blocking of a product [m, k] x [k, n] in VMEM.

    Attributes:
      rows, columns, depth: size of one block.
      read_bytes: HBM reads of both operands over all batches, re-reads included.
      exposed_bytes: the first operand pieces and the last output block, which nothing overlaps.
    """

    rows: int
    columns: int
    depth: int
    read_bytes: float
    exposed_bytes: float


def matmul_blocks(chip: Chip, product: Matmul, itemsize: float = 2, right_itemsize: float | None = None) -> Blocks:
    """The blocking with the least HBM traffic whose working set fits VMEM.

    Args:
      product: sizes of the product on one device.
      itemsize: bytes per element of operands and result in HBM; right_itemsize: of the right operand, if others.
    Example:
      >>> from hardware.chips import CHIPS
      >>> small, large = (matmul_blocks(CHIPS["v6e"], Matmul(n, n, n)) for n in (1024, 16384))
      >>> small.read_bytes / (2 * 2 * 1024**2), (large.rows, large.columns)
      (1.0, (2048, 2048))

    Source: module docstring.
    """
    sizes = itemsize, itemsize if right_itemsize is None else right_itemsize
    return _blocks(vmem_bytes(chip) // 2, product.m, product.k, product.n, product.batch, product.taps, *sizes)


@lru_cache(maxsize=65536)
def _blocks(budget_bytes: int, m: int, k: int, n: int, batch: int, taps: int, first: float, second: float) -> Blocks:
    best: tuple[tuple[float, float], Blocks] | None = None
    resident = min(2 * first * k * m, 2 * second * k * n) <= budget_bytes  # an operand stays in VMEM whole
    for depth in (d for d in DEPTHS if d < 2 * k or d == DEPTHS[-1]):
        for rows, columns in itertools.product(_edges(m), _edges(n)):
            needed = _ACCUMULATOR_BYTES * rows * columns + 2 * depth * (first * rows + second * columns)
            if needed > budget_bytes and (rows, columns, depth) != (_edges(m)[0], _edges(n)[0], DEPTHS[-1]):
                continue
            left = first * m * k * (1 if resident else -(-n // columns))
            right = taps * second * k * n * (1 if resident else -(-m // rows))
            bare = min(depth, k) * (first * rows + second * columns) + max(first, second) * rows * columns
            blocks = Blocks(rows, columns, min(depth, k), batch * (left + right), bare)
            if best is None or (blocks.read_bytes, -bare) < best[0]:
                best = (blocks.read_bytes, -bare), blocks
    assert best is not None
    return best[1]


def block_sum_seconds(chip: Chip, product: Matmul, edge: float) -> float:
    """Seconds in which a device's cores add up the float32 sums of a product's blocks, `edge` rows and columns each.

    A step is as deep as `Chip.scoped_vmem_bytes` allow: these hold the sums, and two copies of operand pieces and of
    the result's block, with two bytes per element, or one for products in eight bits.

    Example:
      >>> from hardware.chips import CHIPS
      >>> shallow, deep = (block_sum_seconds(CHIPS["v5e"], Matmul(8192, k, 8192), 1024) for k in (1024, 4096))
      >>> deep / shallow
      4.0

    Source: module docstring.
    """
    rows, columns = min(edge, product.m), min(edge, product.n)
    itemsize = 2 if product.dtype == "bf16" else 1
    budget = min(chip.scoped_vmem_bytes, chip.vmem_bytes_per_core)
    pieces = budget - (_ACCUMULATOR_BYTES + 2 * itemsize) * rows * columns
    depth = max(DEPTHS[-1], pieces / (2 * itemsize * (rows + columns)))
    steps = max(1.0, product.taps * product.k / depth)
    registers = product.batch * product.m * product.n / (chip.vpu_sublanes * chip.vpu_lanes)
    return product.passes * SUM_CYCLES * registers * steps / (chip.clock_hz * chip.cores_per_device)


def result_seconds(chip: Chip, product: Matmul) -> float:
    """Seconds in which a device's cores add the results of a kernel's product to float32 sums in VMEM.

    A kernel of a framework (Pallas) takes each register of results from the array once for each pass over its depth.

    Example:
      >>> from hardware.chips import CHIPS
      >>> tile = Matmul(512, 4096, 1536, dtype="fp8")
      >>> round(result_seconds(CHIPS["v7"], tile) * CHIPS["v7"].clock_hz)
      12288

    Source: module docstring.
    """
    registers = product.batch * product.m * product.n / (chip.vpu_sublanes * chip.vpu_lanes)
    depth = product.passes * product.taps * -(-product.k // chip.mxu_rows)
    return registers * depth / (chip.clock_hz * chip.cores_per_device)


def _edges(size: int) -> list[int]:
    """Block edges to try: powers of two from 128 to 2048, and a smaller `size` itself."""
    edges = [edge for edge in (128, 256, 512, 1024, 2048) if edge < size]
    return [*edges, size] if size <= 2048 else edges
