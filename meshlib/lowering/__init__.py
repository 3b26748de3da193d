"""Graph + Mesh + LayoutRules -> Program: the lowering, its rules and its passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from layouts import LayoutRules, Mesh, Report, Sharding
from meshlib.checks import choice
from meshlib.errors import GraphError
from meshlib.graph import Graph, Operation, Tensor
from meshlib.lowering.choose import Balance
from meshlib.lowering.homes import Homes, check_layout, refuse_faults
from meshlib.lowering.order import order_and_fuse
from meshlib.lowering.partition import Partitioner
from meshlib.lowering.passes import merge_small_collectives, remove_dead_code
from meshlib.lowering.simplification import Simplified, simplify
from meshlib.operation import Kind
from meshlib.ops.state import assigned
from meshlib.program.checker import check_program
from meshlib.program.instructions import Instruction, Value
from meshlib.program.listing import collectives_table, explain
from meshlib.program.records import Collective, Program

__all__ = [
    "Balance",
    "Collective",
    "Instruction",
    "Program",
    "Value",
    "check",
    "collectives_table",
    "explain",
    "lower",
]

Outputs = Mapping[str, Tensor] | Sequence[Tensor] | Tensor | None

MORE_SWEEPS = 3  # each knows what the one before it did
PASSES = (remove_dead_code, merge_small_collectives, order_and_fuse)


def lower(
    outputs: Outputs = None,
    updates: Sequence[Operation] = (),
    mesh: Any = "device:1",
    layout: Any = "",
    precision: str = "default",
    balance: Balance | None = None,
) -> Program:
    """What one core of `mesh` runs to compute `outputs` and write `updates`, under `layout`.

    Args:
      outputs: what a step returns: a dict of names to tensors, a list (named by the tensors), or one tensor.
      updates: what a step writes: `mtf.assign` or what an optimizer returned.
      mesh: "rows:2;cols:4", a dict, pairs or a Mesh; one core unless given.
      layout: "batch:rows;hidden:cols", a dict, pairs or LayoutRules; nothing is split unless given.
      precision: "default" rounds float32 operands to bfloat16 into the MXU; "highest" keeps float32 through.
      balance: what duplicated work is worth in bytes.
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
    choice(precision, "lower", "precision", ("default", "highest"))
    if balance is not None and not isinstance(balance, Balance):
        raise GraphError(f"lower: balance must be an mtf.Balance, got {type(balance).__name__} {balance!r:.80}")
    mesh, rules = Mesh(mesh), LayoutRules(layout)
    fetched, graph = _fetched(outputs, updates)
    written = assigned(updates)
    simple = simplify(graph, fetched.values(), written.values())
    report = check_layout(graph, simple.operations, mesh, rules)
    refuse_faults(report, simple.operations, mesh, rules)
    lowering = _Lowering(mesh, rules, precision, balance or Balance(), report.notes)
    return lowering.program(simple, fetched, counts_steps=bool(written))


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
    fetched, graph = _fetched(outputs, updates)
    simple = simplify(graph, fetched.values(), assigned(updates).values())
    return check_layout(graph, simple.operations, Mesh(mesh), LayoutRules(layout))


def _fetched(outputs: Outputs, updates: Sequence[Operation]) -> tuple[dict[str, Tensor], Graph]:
    if isinstance(outputs, Tensor):
        outputs = [outputs]
    if outputs is not None and not isinstance(outputs, Mapping):
        if not isinstance(outputs, list | tuple):
            raise GraphError(f"outputs must be a dict of names to tensors, a list or a tensor, got {outputs!r:.80}")
        for t in outputs:
            if not isinstance(t, Tensor):
                raise GraphError(f"outputs must be tensors, got {type(t).__name__} {t!r:.80}")
        outputs = {t.name: t for t in outputs}
    fetched = dict(outputs or {})
    for name, t in fetched.items():
        if not isinstance(name, str):
            raise GraphError(f"the names of outputs are strings, got {type(name).__name__} {name!r:.80}")
        if not isinstance(t, Tensor):
            raise GraphError(f"output {name!r} must be a tensor, got {type(t).__name__} {t!r:.80}")
    if isinstance(updates, Operation) or not isinstance(updates, Sequence):
        raise GraphError(f"updates must be a list of what mtf.assign or an optimizer returned, got {updates!r:.80}")
    assigned(updates)  # refuses what is no update, before its graph is looked at
    graphs = list(
        dict.fromkeys([*(t.graph for t in fetched.values()), *(u.graph for u in updates if isinstance(u, Operation))])
    )
    if not graphs:
        raise GraphError("nothing to lower: give outputs, updates or both")
    if len(graphs) > 1:
        raise GraphError("outputs and updates belong to different graphs; build them in one `with mtf.Graph()`")
    return fetched, graphs[0]


@dataclass(frozen=True)
class _Lowering:
    """What the lowering of a program and of the loop bodies in it have in common."""

    mesh: Mesh
    rules: LayoutRules
    precision: str
    balance: Balance
    notes: tuple[str, ...]
    # A second sweep over a program meets its loops again.
    _bodies: dict[object, Program] = field(default_factory=dict)
    _trials: dict[object, Partitioner] = field(default_factory=dict)
    _sound: set[object] = field(default_factory=set)

    def program(self, simple: Simplified, fetched: Mapping[str, Tensor], counts_steps: bool) -> Program:
        """The whole program, through all passes."""
        kept = {name: simple.of(t) for name, t in fetched.items()}
        sweep = self._sweep(simple, Homes(simple.graph, self.mesh, self.rules), kept.values())
        outputs = {name: sweep.at_home(t) for name, t in kept.items()}
        return self._finished(sweep, sweep.inputs, outputs, counts_steps, self.notes)

    def body(
        self,
        graph: Graph,
        homes: Homes,
        results: Sequence[Tensor],
        ends: Sequence[Sharding | None],
        names: Sequence[str],
    ) -> Program:
        """The body of a loop, whose results lie as given; with None where the body has them anyway."""
        key = (graph, tuple(results), tuple(ends), *(homes.of(op.output) for op in graph.inputs.values()))
        if key in self._bodies:
            return self._bodies[key]
        simple = simplify(graph, results, ())
        kept = [simple.of(t) for t in results]
        bound = {t: end for t, end in zip(kept, ends, strict=True) if end is not None}
        for t, end in bound.items():
            if t.operation.kind.kind is not Kind.INPUT:
                homes.bind(t, end)
        simple.taken.update(kept)
        sweep = self._sweep(simple, homes, bound)
        placed = [sweep.as_it_lies(t) if s is None else sweep.at(t, s) for t, s in zip(kept, ends, strict=True)]
        outputs = {f"{v.tensor.name} ({n})": v for n, v in enumerate(placed)}
        for name in names:
            if name not in sweep.inputs:  # a carry that the body ignores
                sweep.resident(graph.inputs[name])
        inputs = {name: sweep.inputs[name] for name in names}
        program = self._bodies[key] = self._finished(sweep, inputs, outputs, False, (), is_body=True)
        return program

    def trial(self, graph: Graph, homes: Homes, results: Sequence[Tensor]) -> Partitioner:
        """The body of a loop partitioned, not finished."""
        key = (graph, tuple(results), *(homes.of(op.output) for op in graph.inputs.values()))
        if key not in self._trials:
            simple = simplify(graph, results, ())
            self._trials[key] = self._sweep(simple, homes, [simple.of(t) for t in results])
        return self._trials[key]

    def _sweep(self, simple: Simplified, homes: Homes, fetched: Iterable[Tensor]) -> Partitioner:
        """Partition; again with what that taught, as long as that matters, and keep what sends least."""
        kept = list(dict.fromkeys(fetched))
        needed = [*kept, *simple.taken]
        best = Partitioner(simple, homes, self.balance, set(kept), self.body, self.trial)
        best.run()
        if not best.places.learnt.missed:
            return best
        for _ in range(MORE_SWEEPS):
            learnt, chosen = best.places.learnt, best.chosen
            sweep = Partitioner(simple, homes, self.balance, set(kept), self.body, self.trial, learnt, chosen)
            sweep.run()
            if sweep.places.sent_bytes(needed) >= best.places.sent_bytes(needed):
                break
            best = sweep
        return best

    def _finished(
        self,
        sweep: Partitioner,
        inputs: Mapping[str, Value],
        outputs: Mapping[str, Value],
        counts_steps: bool,
        notes: tuple[str, ...],
        is_body: bool = False,
    ) -> Program:
        program = Program(
            self.mesh,
            self.rules,
            self.precision,
            tuple(sweep.places.instructions),
            inputs,
            sweep.variables,
            outputs,
            sweep.updates,
            counts_steps,
            notes,
            is_body,
        )
        check_program(program, "partitioning", sound=self._sound)
        for run in PASSES:
            program = check_program(run(program), run.__name__, before=program, sound=self._sound)
        return program
