"""A program with a single fusion group: the passes into which TPU compilers cut it, and their cost.

A reduction ends a fusion: users of its result need the whole row first. So a softmax runs as three fusions (the
maximum; the sum of exponentials; the quotient), a layer norm as three and two more over its row statistics. Each pays a
launch and reads the operands of the group again.

A pass keeps a float32 block of its intermediate: a reduction accumulates one as large as its operand, and a narrower
result is rounded from one. These blocks count like operands.

A pass of one instruction is no fusion. Where its operands exceed a window, its loop over registers of 8 x 128 does not
overlap with the copies of the next window (`Chip.vector_loop_cycles` each). Each core has windows of its own; blocks of
results that a chip computes in bfloat16 take no part of them.

A product starts when half of an operand that stays in VMEM has arrived. It overlaps with its traffic for no longer than
it outlasts that: where traffic takes longer, compilers add up the two. A result's float32 block is part of this sum
before v6e; a product of 1,024 rows on v7 would take 17 % longer with it than measured. Its launch is the start of its
first and of its last transfer; where operands or the result change their layout, see `relayouts`.

Scope: programs of one group, which compilers estimate. Measured training steps, which pipeline their groups, show none
of these costs (`meshlib.estimation.time.physics`); their groups are priced by the values that cross their boundaries.

Sources: fusions and cycles that XLA for TPUs reports for softmax, norms, reductions, casts, element-wise operations and
products alone, on v4, v5e, v5p and v6e; the names of these fusions (`convert_reduce_fusion`, `multiply_reduce_fusion`,
`add_rsqrt_fusion`) in profiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from hardware.chips import Chip
from hardware.core import Matmul, strength_reduced
from hardware.memory import LANES, hbm_seconds, vmem_bytes
from meshlib.core.opdef import Kind, Summary
from meshlib.estimation.work.hbm_traffic import row_looked_up
from meshlib.estimation.work.products import is_matmul
from meshlib.estimation.work.relayouts import REGISTER_BYTES, Relayout, relayouts_of
from meshlib.estimation.work.stored_values import Stored
from meshlib.estimation.work.tiles import tiled_bytes
from meshlib.program.instructions import Compute, Instruction, Value

WINDOW_BYTES = 10 << 20  # operands, result and float32 block of one window: measured cycles change at this size
_BLOCK_ITEMSIZE = 4


@dataclass(frozen=True, slots=True)
class Passes:
    """The passes of a program's only fusion group.

    Attributes:
      launches: number of fusions.
      sweeps: re-reads of the operands after the first pass.
      block_bytes: float32 blocks of all passes, in whole tiles.
      registers: float32 registers of the first pass, if that is a single instruction; else 0.
      rounded_bytes: blocks from which narrower results are rounded.
      relayouts: copies around a product.
    """

    launches: int
    sweeps: int
    block_bytes: int
    registers: int
    rounded_bytes: int = 0
    relayouts: tuple[Relayout, ...] = ()

    def loop_seconds(self, chip: Chip, traffic_bytes: float) -> float:
        """Loop seconds of a single instruction that do not overlap with copies, if it exceeds a window."""
        windowed = traffic_bytes - (self.rounded_bytes if chip.vpu_bf16 else 0)
        if windowed <= WINDOW_BYTES * chip.cores_per_device:
            return 0.0
        return self.registers * chip.vector_loop_cycles / (chip.clock_hz * chip.cores_per_device)


def passes_of(members: Sequence[Instruction], stored: Stored) -> Passes:
    """The passes of a program's only fusion group."""
    computed = [i for i in members if isinstance(i, Compute)]
    rows = max((_extent(i) for i in computed), default=0)
    level = _levels(computed)
    sweeping = [i for i in computed if 2 * _extent(i) > rows]
    statistics = {level[i] for i in computed if level[i] and 2 * _extent(i) <= rows}
    sweeps = 0 if any(map(is_matmul, computed)) else max(0, len({level[i] for i in sweeping}) - 1)
    rounded = sum(_rounded_bytes(i, stored) for i in sweeping)
    running = [(n, i.outputs[0]) for i in sweeping if (n := _running_passes(i))]
    passed_on = sum(2 * n * _block_bytes(y) for n, y in running)  # between passes
    anew = [v for i in computed for v in _laid_out_anew(i)]
    block_bytes = _accumulator_bytes(computed, level) + rounded + passed_on + sum(map(_block_bytes, anew))
    launches = 1 + sweeps + len(statistics) + sum(n for n, _ in running) + len(anew)
    relayouts = (relayouts_of(i, stored) for i in computed if is_matmul(i))
    return Passes(launches, sweeps, block_bytes, _registers(sweeping, level, rows), rounded, tuple(chain(*relayouts)))


def _accumulator_bytes(computed: Sequence[Compute], level: dict[Compute, int]) -> int:
    """Accumulator blocks of all passes; reductions in one pass share their operands."""
    blocks: dict[int, int] = {}
    for i in computed:
        if _reduces(i):
            blocks[level[i]] = max(blocks.get(level[i], 0), _block_bytes(i.inputs[0]))
    return sum(blocks.values())


def idle_seconds(
    chip: Chip, product: Matmul, sizes: tuple[float, float], mxu_seconds: float, traffic_seconds: float
) -> float:
    """Seconds of a lone product's HBM traffic during which the MXU waits; 0 if no operand stays in VMEM.

    Args:
      sizes: bytes per element of both operands.
      mxu_seconds, traffic_seconds: MXU and HBM time of the product, either alone.
    """
    left = sizes[0] * product.m * product.k
    right = sizes[1] * product.taps * product.k * product.n
    larger = product.batch * max(left, right)
    if larger > vmem_bytes(chip) // 2:
        return 0.0
    start_seconds = hbm_seconds(chip, larger / 2)
    if product.taps > 1:  # convolutions alone were not compared with compilers
        return start_seconds
    return max(start_seconds, min(traffic_seconds, 2 * traffic_seconds - mxu_seconds))


def summed_block_bytes(chip: Chip, product: Matmul) -> int:
    """Float32 accumulator block of a matrix-vector product on the vector unit; 0 for other products."""
    if not strength_reduced(chip, product):
        return 0
    return _BLOCK_ITEMSIZE * product.batch * product.taps * product.k * max(product.m, product.n)


def _levels(members: Sequence[Compute]) -> dict[Compute, int]:
    """Number of sequential reductions before each instruction."""
    level: dict[Compute, int] = {}
    after: dict[Value, int] = {}
    for i in members:
        level[i] = max((after.get(x, 0) for x in i.inputs), default=0)
        after.update(dict.fromkeys(i.outputs, level[i] + _reduces(i)))
    return level


def _registers(sweeping: Sequence[Compute], level: dict[Compute, int], rows: int) -> int:
    """Float32 registers of the first pass, if it is a single unfused instruction; otherwise 0."""
    first = [i for i in sweeping if level[i] == 0]
    if len(first) != 1 or not _is_plain(first[0]):
        return 0
    (only,) = first
    if any(2 * x.local_size <= rows for x in only.inputs):  # a broadcast operand makes it a fusion
        return 0
    values = only.outputs if only.operation.opdef.reads_part else (*only.inputs, *only.outputs)
    return max(map(_block_bytes, values)) // REGISTER_BYTES


def _is_plain(i: Compute) -> bool:
    """True if an operation is a single instruction that moves each element through a register: rounding arithmetic, a
    reduction, a slice."""
    kind = i.operation.opdef
    if kind.reads_part:
        return kind.indices is None
    return kind.kind is Kind.REDUCTION or (kind.kind is Kind.ELEMENTWISE and not kind.exact)


def _running_passes(i: Compute) -> int:
    """Extra passes of a running sum or other recurrence: XLA relayouts rows into blocks of lanes, sums within blocks,
    adds the sums of previous blocks, and relayouts the result."""
    kind = i.operation.opdef
    running = kind.kind is Kind.INDEXED and isinstance(kind.lower, Summary) and kind.indices is None
    return 3 if running and i.inputs[-1].local_size == i.outputs[0].local_size else 0


def _laid_out_anew(i: Compute) -> tuple[Value, ...]:
    """Table and result of a gather of rows that do not fill whole lanes, which need a float32 relayout."""
    whole = row_looked_up(i, i.inputs[0]) % LANES == 0 if i.operation.opdef.reads_part else True
    return () if whole else (i.inputs[0], i.outputs[0])


def _extent(i: Instruction) -> int:
    """Elements that an instruction processes."""
    return max(v.local_size for v in (*i.inputs, *i.outputs))


def _reduces(i: Compute) -> bool:
    kind = i.operation.opdef
    over_rows = kind.kind is Kind.REDUCTION or (kind.kind is Kind.INDEXED and not kind.reads_part)
    return over_rows and kind.indices is None and 2 * i.outputs[0].local_size <= i.inputs[0].local_size


def _rounded_bytes(i: Compute, stored: Stored) -> int:
    """Blocks of computed results that are stored in a narrower float type than they were computed in."""
    if i.operation.opdef.kind is Kind.SOURCE or i.operation.opdef.indices is not None or _reduces(i):
        return 0
    dtypes = ((y, y.tensor.dtype) for y in i.outputs if stored.is_written(y))
    return sum(_block_bytes(y) for y, dtype in dtypes if dtype.is_float and dtype.itemsize < _BLOCK_ITEMSIZE)


def _block_bytes(v: Value) -> int:
    return tiled_bytes(v.local_shape.sizes, _BLOCK_ITEMSIZE)
