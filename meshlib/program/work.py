"""What one core does in one instruction: the work of its operation on local shapes, at the program's precision."""

from __future__ import annotations

from dataclasses import replace

from meshlib.operation import ON_MXU, Work
from meshlib.ops.einsum import EIGHT_BIT
from meshlib.program.instructions import Compute, Instruction, Value
from meshlib.program.margins import Margin
from meshlib.program.records import Program


def local_work(program: Program, instruction: Instruction) -> Work:
    """The work of one run of an instruction on one core, without that of a loop's body. Exact.

    Moves do none; what they send is in `Program.collectives`.
    """
    if not isinstance(instruction, Compute):
        return Work(0, 0)
    op = instruction.operation
    attrs = dict(op.attrs)
    if op.kind.kind in ON_MXU and program.precision == "highest" and attrs.get("precision") not in EIGHT_BIT:
        attrs["precision"] = "highest"  # costed as the passes it takes
    out = instruction.outputs[0]
    # Of operands with margins what the result needs: its own margins, where it has any.
    taken = (replace(x, margins=_shared(x, out)) if x.margins else x for x in instruction.inputs)
    return op.kind.work(tuple(x.local for x in taken), out.local, attrs)


def _shared(x: Value, out: Value) -> tuple[Margin, ...]:
    return tuple(m for m in out.margins if m.dim in x.tensor.shape)
