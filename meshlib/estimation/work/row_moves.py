"""Rows that a kernel looks up or adds up, and the cycles that they take the cores of a device.

A gather starts a copy for each row and unpacks what arrives, 32-bit words of 128 lanes, a register at a time:
`START_CYCLES` and one cycle for each register of a row. Cores share the rows; on v7 SparseCores copy them.

A scatter-add sorts its rows by destination and adds them on one core, a block of rows at a time, to float32 sums of a
block of destinations; a block of rows is taken once for every block of destinations that it touches. Rows and sums
share the VMEM of a kernel: a row takes 8 bytes for each number (two copies in flight, and one in float32), a sum 4.
Blocks of rows are multiples of 128, at most 384; sums take at most a quarter of that VMEM for each core.

Updates of a small table, such as that of position biases, are masked sums on TPUs (`meshlib.jax.rows.index`): for each
of its rows a select and an addition for each register of updates. By libtpu these take 2.1 to 2.4 cycles of a core on
v5e and v5p and 1.6 on v6e, for 6 and 16 heads and 512 x 512 positions.

Against the bundles of libtpu 0.0.42.1 with 16 MiB for a kernel (rows of 1,024 to 7,168 bfloat16 numbers, as many
destinations as rows), gathers are within 14 % on v5e and v5p, and 31 to 39 % above those of v6e; scatter-adds are 18 %
below to 6 % above those of v5e and 8 to 30 % below those of v5p. By libtpu 0.0.19.1, of 2025, a row that is added takes
3.3 cycles for each register, and sums of both cores of v5p share a quarter.

Source: code that the compiler dumps (`tests/benchmarks/row_moves.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from hardware.chips import Chip
from hardware.memory import LANES, SUBLANES
from meshlib.core.compiler import Compiler
from meshlib.estimation.work.hbm_traffic import row_looked_up
from meshlib.program.instructions import Compute, Instruction

START_CYCLES = 9
ROW_BLOCK, LEAST_BLOCK = 384, 128
ROW_BYTES, SUM_BYTES = 8, 4  # for each number
MASKED_CYCLES = 2  # for each register of updates and row of the table
FOR_ROWS, FOR_SUMS = 23 / 32, 1 / 4  # of the VMEM of a kernel
OLD_CYCLES = 3.3


class RowSums(NamedTuple):
    """Rows of `width` numbers that are added to `destinations`; `old`: by compilers until 2025."""

    rows: int
    width: int
    destinations: int
    old: bool

    def cycles(self, chip: Chip) -> float:
        """Cycles of the core that adds them.

        >>> from hardware import CHIPS
        >>> [round(RowSums(1, n, 1, False).cycles(CHIPS["v5e"])) for n in (1024, 2048, 4096, 7168)]
        [23, 44, 111, 373]
        """
        registers = -(-self.width // LANES)
        vmem = min(chip.scoped_vmem_bytes, chip.vmem_bytes_per_core)
        for_sums = FOR_SUMS * vmem * (1 if self.old else chip.cores_per_device)
        together = FOR_ROWS * vmem + for_sums
        fitting = together // (ROW_BYTES * self.width) // LEAST_BLOCK * LEAST_BLOCK
        block = min(ROW_BLOCK, max(LEAST_BLOCK, fitting))
        left = together - ROW_BYTES * self.width * block
        sums = max(8, min(left, for_sums) // (SUM_BYTES * self.width))
        taken = 1 + block * self.destinations / (sums * self.rows)
        return self.rows * taken * (OLD_CYCLES * registers if self.old else START_CYCLES + registers)


class RowMoves(NamedTuple):
    """Rows that a kernel moves one by one.

    Attributes:
      vmem_cycles: of rows in VMEM, and of masked sums.
      copy_cycles: of rows that are copied from HBM.
      sums: rows that are added up.
    """

    vmem_cycles: int = 0
    copy_cycles: int = 0
    sums: tuple[RowSums, ...] = ()

    def cycles(self, chip: Chip) -> float:
        """Cycles of a core, if all cores of a device took the same time."""
        copied = 0 if chip.sparse_core_gathers else self.copy_cycles
        return self.vmem_cycles + copied + chip.cores_per_device * sum(s.cycles(chip) for s in self.sums)


NO_MOVES = RowMoves()


def is_small_table(rows: int, width: int) -> bool:
    """Whether a TPU looks up rows by products with one-hots and adds updates by masked sums: few rows, none of which
    fills lanes."""
    return rows <= LANES and width < LANES


def row_moves_of(members: Sequence[Instruction], compiler: Compiler) -> RowMoves:
    """The rows that a fusion group looks up and adds up."""
    vmem_cycles, copy_cycles, sums, plain = 0, 0, list[RowSums](), compiler.partitioner == "gspmd"
    for i in members:
        if not isinstance(i, Compute) or i.operation.opdef.indices != 1:
            continue
        (x, indices, *_), (y, *_) = i.inputs, i.outputs
        rows, index_dims, dims = indices.local_size, indices.tensor.shape.names, y.tensor.shape.names
        if i.operation.opdef.reads_part:
            width = row_looked_up(i, x)
            copy_cycles += rows * (START_CYCLES + -(-width // LANES)) if width >= LANES else 0
            continue
        width = prod(d.size for d in y.local_shape if d.name not in (*index_dims, i.operation.attrs["dim"].name))
        if width >= LANES:
            sums.append(RowSums(rows, width, y.local_size // width, compiler.row_sums == "scatter 2025"))
        elif is_small_table(y.local_size // width, width) and not {*index_dims} & {*dims} and not plain:
            vmem_cycles += MASKED_CYCLES * (y.local_size // width) * -(-x.local_size // (SUBLANES * LANES))
    return RowMoves(vmem_cycles, copy_cycles, tuple(sums))
