"""Work of one core in one instruction, on local shapes at the program's precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshlib.core.graph import Operation, TensorType
from meshlib.core.opdef import ON_MXU, Work
from meshlib.ops.contraction.einsum import EIGHT_BIT
from meshlib.program.exchanges import Margin
from meshlib.program.instructions import Compute, Instruction, Value
from meshlib.program.records import Program

_NONE = Work(0, 0)


def local_work(program: Program, instruction: Instruction) -> Work:
    """The work of one run of an instruction on one core, without that of a loop's body. Exact.

    Moves have none; their bytes are in `Program.collectives`.
    """
    if not isinstance(instruction, Compute):
        return _NONE
    work = instruction.work.get(program.precision)
    if work is None:
        op = instruction.operation
        work = op.opdef.work(*local_types(instruction), attributes(program, op))
        instruction.work[program.precision] = work
    return work


def local_types(instruction: Compute) -> tuple[tuple[TensorType, ...], TensorType]:
    """The local types of operands and results: operands with the halos that the result needs, results with their
    margins."""
    out = instruction.outputs[0]
    operands = (replace(x, margins=_shared_margins(x, out)) if x.margins else x for x in instruction.inputs)
    return tuple(x.local for x in operands), out.local


def attributes(program: Program, op: Operation) -> Mapping[str, Any]:
    """An operation's attributes with the program's precision, which determines the number of passes."""
    if op.opdef.kind in ON_MXU and program.precision == "highest" and op.attrs.get("precision") not in EIGHT_BIT:
        return {**op.attrs, "precision": "highest"}
    return op.attrs


def _shared_margins(x: Value, out: Value) -> tuple[Margin, ...]:
    return tuple(m for m in out.margins if m.dim in x.tensor.shape)
