"""What one core does in one instruction: the work of its operation on local shapes, at the program's precision."""

from __future__ import annotations

from meshlib.operation import ON_MXU, Work
from meshlib.ops.einsum import EIGHT_BIT
from meshlib.program.instructions import Compute, Instruction
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
    return op.kind.work(tuple(x.local for x in instruction.inputs), instruction.outputs[0].local, attrs)
