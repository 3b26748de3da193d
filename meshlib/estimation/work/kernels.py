"""Fusion groups as work of one device: matrix products, vector operations, bytes at the boundary.

Counts are exact and without padding; `padded_bytes` and `padded_vpu_ops` include padding to tiles of (8, 128) in the
densest layout. Groups are those of the program; `stored` tells which values between them are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hardware.core import Matmul
from hardware.memory import SUBLANES
from meshlib.core.compiler import Compiler
from meshlib.core.dtypes import BFLOAT16
from meshlib.core.graph import FORWARD
from meshlib.core.opdef import Kind, Storage
from meshlib.estimation.work.hbm_traffic import Use, boundary_of
from meshlib.estimation.work.kernel_passes import Passes
from meshlib.estimation.work.products import (
    Attention,
    Quantised,
    at_hand,
    attention_of,
    is_matmul,
    matmul_of,
    operand_itemsizes,
    share_useful,
    useful_flops,
)
from meshlib.estimation.work.row_moves import NO_MOVES, RowMoves, row_moves_of
from meshlib.estimation.work.stored_values import Stored
from meshlib.estimation.work.tiles import padding_ratio
from meshlib.program.analysis.work import local_work
from meshlib.program.instructions import Commit, Compute, Instruction, Resident, Value
from meshlib.program.records import Program, walk


@dataclass(frozen=True)
class Kernel:
    """Work of one run of a fusion group on one device.

    Attributes:
      name, opcode, source, region: those of the group's main operation: its matrix product, else the last operation
        with a stored result.
      matmuls: the matrix product, with the bytes per element of its rows' and columns' operands in HBM; at most one.
      attention: the work of fused attention, if the group is one.
      mxu_flops: FLOPs that the MXU executes, including all passes of a product at higher precision. Exact.
      useful_flops: FLOPs of the model itself: one pass, without work duplicated on other devices. Exact.
      vpu_ops, hbm_bytes: vector operations and HBM traffic, including recomputation, without padding. Exact.
      padded_vpu_ops, padded_bytes: the same in whole tiles, which is what the engines process.
      narrow_vpu_ops: the part of `padded_vpu_ops` in bfloat16.
      free: whether no kernel runs: inputs, variables, aliases, constants of one element.
      uses: the buffers that the group reads and writes.
      kept: for each temporary that is used again soon: bytes moved between the two uses, and its own bytes.
      resident: for each temporary: peak live bytes of it and of smaller ones, bytes used here, whether it is read.
      quantised_bytes: padded traffic of quantising the operands of an eight-bit product that are not quantised yet.
      spared_bytes: how much less the product then reads.
      at_hand_bytes: padded bytes of operands that exist from the start: variables, inputs, slices of a loop's stacks.
      at_hand: for the product's rows and for its columns, whether their operand depends on such values alone.
      row_bytes: float32 bytes of a block of 8 rows along which the group reduces.
      sweeps: number of reductions whose complete result the group itself needs.
      read_bytes: padded bytes read.
      again: for each value in HBM that was used recently: bytes moved since then, its own bytes, and the bytes spared
        if it is still in VMEM.
      moves: rows that are looked up or added one by one.
      column_tiles: tiles of columns of a grouped product, which a kernel of its own divides among cores; 0 of others.
      passes: the compiler's passes over the group, if the group is the whole program.
    """

    name: str
    opcode: str
    source: str
    region: str
    matmuls: tuple[tuple[Matmul, tuple[float, float]], ...]
    mxu_flops: int
    useful_flops: float
    vpu_ops: int
    padded_vpu_ops: float
    narrow_vpu_ops: float  # the bfloat16 part of the padded ones
    hbm_bytes: int
    padded_bytes: int
    free: bool
    uses: tuple[Use, ...] = ()
    kept: tuple[tuple[int, float], ...] = ()
    resident: tuple[tuple[int, float, bool], ...] = ()
    attention: Attention | None = None
    quantised_bytes: int = 0
    spared_bytes: int = 0
    at_hand_bytes: int = 0
    at_hand: tuple[bool, bool] = (False, False)
    row_bytes: int = 0
    sweeps: int = 0
    read_bytes: int = 0
    again: tuple[tuple[int, int, float], ...] = ()
    moves: RowMoves = NO_MOVES
    column_tiles: int = 0
    passes: Passes | None = None

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Cache key of its time."""
        work = (self.matmuls, self.padded_vpu_ops, self.narrow_vpu_ops, self.padded_bytes)
        narrow = self.quantised_bytes, self.spared_bytes
        here = self.at_hand_bytes, self.at_hand, self.row_bytes, self.sweeps, self.read_bytes
        reuse = self.kept, self.resident, self.again, self.temporary_bytes
        return (*work, self.free, *reuse, self.attention, *narrow, *here, self.moves, self.column_tiles, self.passes)

    @property
    def has_constants(self) -> bool:
        """Whether its time depends on constants of `Physics`."""
        return bool(self.matmuls) or self.attention is not None or self.passes is not None

    @cached_property
    def temporary_bytes(self) -> int:
        """Padded bytes of the temporaries that it reads."""
        return sum(use.padded_bytes for use in self.uses if use.passes and not use.written)

    @cached_property
    def operand_bytes(self) -> float:
        """Bytes of its product's operands, each read once."""
        return sum(p.batch * p.k * (left * p.m + right * p.taps * p.n) for p, (left, right) in self.matmuls)


def kernel_of(
    program: Program,
    members: Sequence[Instruction],
    stored: Stored,
    quantised: Quantised,
    forward: frozenset[str],
    in_place: frozenset[Value],
    region: str | None,
    compiler: Compiler,
) -> Kernel:
    """The work of a fusion group.

    `stored`: storage of the program's values; `quantised`: operands available in eight bits, extended by those of this
    group. `forward`: names of the forward pass's operations, which identify recomputation in the backward pass, since
    copies keep their names. `in_place`: results that overwrite part of an existing buffer. `region`: that of an
    enclosing loop outside the forward pass: then no operation inside counts as forward.
    """
    products = [i for i in members if is_matmul(i)]
    main = products[0] if products else _main(members, stored)

    def is_recomputed(i: Instruction) -> bool:
        return i.operation.name in forward and (region or i.operation.region) != FORWARD

    ops, padded_ops, narrow = _vector_ops(program, members, stored)
    matmuls = [matmul_of(program, i) for i in products]
    flops = sum(local_work(program, i).mxu_flops for i in members)
    useful = sum(useful_flops(program, i, is_recomputed(i)) / m.passes for i, m in zip(products, matmuls, strict=True))
    attention = attention_of(program, main) if main.operation.opdef.scores and isinstance(main, Compute) else None
    if attention is not None and isinstance(main, Compute):
        useful += flops / attention.passes * attention.useful * share_useful(program, main, is_recomputed(main))
    passed, spared = quantised.moved(products[0], stored) if products else (0, 0)
    free = all(map(_is_free, members))
    uses = boundary_of(members, stored, in_place)
    read = [use for use in uses if not use.written]
    row_bytes, sweeps = _rows(members)
    return Kernel(
        name=main.operation.name,
        opcode=main.opcode,
        source=main.operation.source,
        region=region or main.region,
        matmuls=tuple((m, operand_itemsizes(i, stored.itemsize)) for i, m in zip(products, matmuls, strict=True)),
        mxu_flops=flops,
        useful_flops=useful,
        vpu_ops=ops,
        padded_vpu_ops=padded_ops,
        narrow_vpu_ops=narrow,
        hbm_bytes=0 if free else sum([use.exact_bytes for use in uses]),
        padded_bytes=0 if free else sum([use.padded_bytes for use in uses]),
        free=free,
        uses=() if free else tuple(uses),
        attention=attention,
        quantised_bytes=passed,
        spared_bytes=spared,
        at_hand_bytes=sum([use.padded_bytes for use in read if not use.passes]),
        at_hand=at_hand(products[0], members, stored.held) if products else (False, False),
        row_bytes=row_bytes,
        sweeps=sweeps,
        read_bytes=sum([use.padded_bytes for use in read]),
        moves=row_moves_of(members, compiler),
    )


def _main(members: Sequence[Instruction], stored: Stored) -> Instruction:
    """The operation that names a group without a product: its last one with a stored result of several elements."""
    writers = [i for i in reversed(members) if any(map(stored.is_written, i.outputs))] or members[::-1]
    large = (i for i in writers if any(y.local_size > 1 for y in i.outputs))
    return next(large, members[-1])


def _vector_ops(program: Program, members: Sequence[Instruction], stored: Stored) -> tuple[int, float, float]:
    """Vector operations of a group's kernel: exact, on padded values, and the bfloat16 part of the padded ones."""
    exact, padded, narrow = 0, 0.0, 0.0
    for i in _executed(members, stored):
        ops = local_work(program, i).vpu_ops
        if ops:
            exact += ops
            stretched = ops * _stretch(i)
            padded += stretched
            narrow += stretched if i.outputs[0].tensor.dtype is BFLOAT16 else 0.0
    return exact, padded, narrow


def _executed(members: Sequence[Instruction], stored: Stored) -> Iterator[Instruction]:
    """Instructions that a group's kernel runs: members, except those whose results only other kernels recompute, and
    recomputations of its operands."""
    inside = {y for i in members for y in i.outputs}
    needed: dict[Value, None] = {}
    run: dict[Instruction, None] = {}
    for i in reversed(members):
        if i.outputs and not any(y in needed or stored.is_written(y) for y in i.outputs):
            continue
        needed.update(dict.fromkeys(i.inputs))
        run[i] = None
    for x in needed:
        if x not in inside and x in stored.recomputed:
            run.update(dict.fromkeys(stored.recomputed[x].by))
    return iter(run)


def _rows(members: Sequence[Instruction]) -> tuple[int, int]:
    """Bytes of a block of rows that a group reduces, and the number of reductions that its own members wait for."""
    used = {x for i in members for x in i.inputs}
    row = sweeps = 0
    for i in members:
        if isinstance(i, Compute) and i.operation.opdef.kind is Kind.REDUCTION and i.outputs[0] in used:
            length = i.inputs[0].local_size // max(1, i.outputs[0].local_size)
            if length > 1:
                row, sweeps = max(row, 4 * SUBLANES * length), sweeps + 1
    return row, sweeps


def forward_names(program: Program) -> frozenset[str]:
    """Names of the forward pass's operations, those in loops included."""
    return frozenset(i.operation.name for i, _, _ in walk(program) if i.operation.region == FORWARD)


def _is_free(i: Instruction) -> bool:
    kind = i.operation.opdef
    if isinstance(i, Resident | Commit):
        return True
    if not isinstance(i, Compute):
        return False
    if kind.storage is Storage.ALIAS:
        return True
    if kind.remade:
        return all(y.local_bytes <= 8 for y in i.outputs)
    if kind.storage is Storage.RESHAPED or (
        kind.kind is Kind.REDUCTION and i.inputs[0].sharding.local_size == i.outputs[0].sharding.local_size
    ):
        # Tiles are unchanged if the two minor dims are; a sum over dims of size 1 is its operand.
        return i.inputs[0].local_shape.sizes[-2:] == i.outputs[0].local_shape.sizes[-2:]
    return False


def _stretch(i: Instruction) -> float:
    """Ratio of padded to actual elements of the largest value, which scales vector work."""
    largest = max((*i.inputs, *i.outputs), key=lambda v: v.local_size)
    return padding_ratio(largest.local_shape.sizes, largest.tensor.dtype)
