"""Graph + Mesh + LayoutRules -> Program: the lowering, its rules and its passes.

Shardings are chosen for the whole graph at once, to minimise bytes sent plus duplicated work at the `Balance`: the
minimum of a sum of small tables over discrete variables (a min-plus factor graph).

    strategies    an operation's variable: which mesh axis splits which of its dims, and which pending sums pass
                  through. The space is static: an axis may split a dim where a rule names it (including optional rules
                  that lost the axis), where an assigned sharding has it, or where an earlier operation had it. The
                  price is internal communication, and work beyond that of the assigned sharding. Strategies no cheaper
                  than another one with reshards around it are dropped                        strategies, strategy_costs
    values        a value of the variable is a strategy. Cheap operations (without operands, or with smaller ones) may
                  also run under two strategies, and have a variable for each later region that may compute the result
                  again. Equal operations, of all layers, share their values, and by identity the tables derived from
                  them                                                                                            values
    copies        a tensor's tables: the cheapest tree of reshards from its producer to its users, pending sums
                  included. A copy that takes more memory than the assigned sharding serves one region. In each region
                  users share up to three copies; a tensor of many users has a variable for them. The program makes the
                  copies of the tree that was priced                                  copies, copy_trees, distances
    elimination   dominated values are dropped; a variable's tables are added and minimised over it, the smallest
                  result first. Alternating both solves most graphs with small tables. For the others dual ascent bounds
                  each value, and those above the incumbent are pruned, in turn, until little is left to eliminate.
                  Where tables would exceed a limit even so, the search branches on a variable that many others depend
                  on. `Program.choice` has the gap to the lower bound: 0 unless there were too many branches
                                                                      elimination, cost_tables, dual_ascent, solving
    problem       collects a graph's operations and tensors; loop bodies are problems of their own. Operations that cost
                  nothing under assigned shardings, such as an optimizer's update, are not searched              problem
    accumulators  gradients accumulated by loops stay pending sums until the last trip of the outermost loop, if memory
                  allows; a trial lowering of each such body finds how its terms are computed       accumulators, loops

Ties go to fewer collectives, then to the literal reading of the layout. With all strategies known, `partition` writes
the program in one sweep, and `passes`, `halos`, `fusion` and `ordering` finish it; the checker verifies each.
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

    To lower one program under many layouts, use `mtf.Session`, which caches what they share.

    Args:
      outputs: tensors that a step returns: a dict of names to tensors, a list (named by the tensors), or one tensor.
      updates: the operations that write variables: results of `mtf.assign`, or of an optimizer.
      mesh: "rows:2;cols:4", a dict, pairs or a Mesh; by default one device.
      layout: "batch:rows;hidden:cols", a dict, pairs or LayoutRules; by default nothing is split.
      precision: "default" rounds float32 operands of the MXU to bfloat16; "highest" multiplies them in float32.
      balance: prices of duplicated work and of bytes, and whether weights are stationary; by default the nominal prices
        of `mtf.Balance`, with stationary weights if `compiler` has them.
      regather: whether copies larger than the assigned sharding, such as a gathered fully sharded weight or an image
        block with its neighbours' edges, are gathered again for backward. False keeps forward's: fewer bytes sent, more
        memory. Smaller copies always serve backward too.
      compiler: the compiler that runs the program; it decides whether weights are stationary, and how `mtf.estimate`
        schedules the program.
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
