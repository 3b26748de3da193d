"""Graph + Mesh + LayoutRules -> Program: the lowering, its rules and its passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from layouts import Report
from meshlib.graph import Operation
from meshlib.lowering.balance import Balance
from meshlib.lowering.session import Outputs, Session
from meshlib.program.instructions import Instruction, Value
from meshlib.program.listing import collectives_table, explain
from meshlib.program.records import Collective, Program

__all__ = [
    "Balance",
    "Collective",
    "Instruction",
    "Program",
    "Session",
    "Value",
    "check",
    "collectives_table",
    "explain",
    "lower",
]


def lower(
    outputs: Outputs = None,
    updates: Sequence[Operation] = (),
    mesh: Any = "device:1",
    layout: Any = "",
    precision: str = "default",
    balance: Balance | None = None,
    regather: bool = True,
) -> Program:
    """What one core of `mesh` runs to compute `outputs` and write `updates`, under `layout`.

    For many layouts of one program, `mtf.Session` does the same and keeps what it learns.

    Args:
      outputs: what a step returns: a dict of names to tensors, a list (named by the tensors), or one tensor.
      updates: what a step writes: `mtf.assign` or what an optimizer returned.
      mesh: "rows:2;cols:4", a dict, pairs or a Mesh; one core unless given.
      layout: "batch:rows;hidden:cols", a dict, pairs or LayoutRules; nothing is split unless given.
      precision: "default" rounds float32 operands to bfloat16 into the MXU; "highest" keeps float32 through.
      balance: what duplicated work is worth in bytes.
      regather: what forward brought somewhere is there for backward too where that takes no more memory than where the
        layout puts it; where it takes more, as a fully-sharded weight that was gathered, or a block of an image with
        the edges of its neighbours, it is fetched again. False keeps it: fewer bytes sent, more memory.
    Returns: a checked `Program`. Nothing is allocated; the time does not depend on the number of devices.
    Raises: LayoutError with all faults of the layout, GraphError for bad outputs or updates.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [mtf.Dimension("batch", 8)])
      ...     total = mtf.reduce_sum(x, name="total")
      >>> program = mtf.lower({"total": total}, mesh="rows:2", layout="batch:rows")
      >>> [(c.kind, c.axes, c.payload_bytes, c.sent_bytes) for c in program.collectives]
      [('all_reduce', ('rows',), 4, 4)]
    """
    return Session(outputs, updates).lower(mesh, layout, precision, balance, regather)


def check(
    outputs: Outputs = None, updates: Sequence[Operation] = (), mesh: Any = "device:1", layout: Any = ""
) -> Report:
    """All faults of a layout over a program at once, with notes on what it leaves unused; raises nothing for them.

    Returns: a Report with `.ok`, `.faults`, `.notes`.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [mtf.Dimension("batch", 6)])
      >>> mtf.check([x], mesh="rows:4", layout="batch:rows").ok
      False
    """
    return Session(outputs, updates).check(mesh, layout)
