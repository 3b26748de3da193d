"""Graph + Mesh + LayoutRules -> Program: the lowering, its rules and its passes.

How each operation is split is chosen for the whole graph at once: the least bytes sent, plus duplicated work at the
`Balance`. The choice is the minimum of a sum of small tables over discrete variables (a min-plus factor graph):

    strategies    an operation's variable: which mesh axis splits which of its dims, and which pending sums pass
                  through. The space is static: an axis may split a dim where a rule names it (optional rules that lost
                  the axis included), where an assigned sharding has it, or where an operation before had it. Priced
                  with what moves inside the operation, and with work beyond that of the assigned sharding. Strategies
                  no cheaper than another one with reshards around it are dropped           strategies, strategy_costs
    values        a value of the variable is a strategy. What may be computed again (made of nothing, or of less) may
                  also run in two ways, and once more in a later region. Operations that are alike, in this layer and
                  every other, share their values, and by identity the tables that follow from them              values
    copies        a tensor's tables: the cheapest tree of reshards from where it is made to where it is used, pending
                  sums included. A copy that takes more memory than the assigned sharding serves one region. A tensor
                  of many users has a variable per region: the copies that its users share             copies, distances
    elimination   values that another one is never worse than are dropped; a variable's tables are added up and
                  minimised over it, the smallest result first. The two take turns, which solves most graphs with small
                  tables. For the others dual ascent bounds what each value can lead to, and those above the incumbent
                  are pruned. Where tables would grow beyond a limit, each value of a variable that many others depend
                  on is tried, and the rest eliminated. `Program.choice` has the gap to the lower bound: 0 unless there
                  were too many branches                                                           elimination, solving
    problem       enters a graph's operations and tensors; the bodies of loops are problems of their own. What runs
                  under assigned shardings for nothing, as an optimizer's update does, is not searched           problem
    accumulators  the gradients that loops add up stay pending sums until the last trip of the outermost loop, as far as
                  memory allows it; one trial of each such body says how its terms are made          accumulators, loops

Ties go to fewer collectives, then to the plain reading of the layout. With all strategies known, `partition` writes the
program in one sweep, and `passes`, `halos`, `fuse` and `order` finish it; the checker follows each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from layouts import Report
from meshlib.core.compiler import XLA_TPU, Compiler
from meshlib.core.graph import Operation
from meshlib.lowering.balance import Balance
from meshlib.lowering.session import Outputs, Session
from meshlib.program.instructions import Instruction, Value
from meshlib.program.records import Collective, Program
from meshlib.program.views.listing import collectives_table, explain

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
    compiler: Compiler = XLA_TPU,
) -> Program:
    """Lower outputs and updates to the program that one device of `mesh` runs under `layout`.

    For many layouts of one program, `mtf.Session` does the same and keeps what it learns.

    Args:
      outputs: what a step returns: a dict of names to tensors, a list (named by the tensors), or one tensor.
      updates: what a step writes: `mtf.assign` or what an optimizer returned.
      mesh: "rows:2;cols:4", a dict, pairs or a Mesh; one core unless given.
      layout: "batch:rows;hidden:cols", a dict, pairs or LayoutRules; nothing is split unless given.
      precision: "default" rounds float32 operands to bfloat16 into the MXU; "highest" keeps float32 through.
      balance: what duplicated work is worth in bytes, and whether weights move; by default as `compiler` has it.
      regather: a copy made in forward serves backward too if it takes no more memory than the assigned
        sharding; a larger one, such as a gathered fully-sharded weight or an image block with its neighbours' edges, is
        fetched again. False keeps it: fewer bytes sent, more memory.
      compiler: the compiler that runs the program, by default `mtf.XLA_TPU`: it decides whether weights are stationary,
        and how `mtf.estimate` schedules the program.
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
    return Session(outputs, updates).lower(mesh, layout, precision, balance, regather, compiler)


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
