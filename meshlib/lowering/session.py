"""`Session`: lowerings of one program under many layouts, which share everything independent of the layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from layouts import LayoutRules, Mesh, Report
from meshlib.core.arguments import choice
from meshlib.core.compiler import XLA_TPU, Compiler, require_compiler
from meshlib.core.errors import GraphError
from meshlib.core.garbage import uncollected
from meshlib.core.graph import FORWARD, Graph, Operation, Tensor
from meshlib.core.laid_dims import ResolvedGraph, SizePlan, size_plans
from meshlib.core.replay import all_operations
from meshlib.core.shown import Shown
from meshlib.core.text import clipped, counted
from meshlib.lowering.assigned import Subjects, check_layout, refuse_faults
from meshlib.lowering.balance import Balance
from meshlib.lowering.graph_cache import Memos
from meshlib.lowering.one_layout import Lowering
from meshlib.lowering.simplification import simplify
from meshlib.ops.control.state import assigned
from meshlib.program.checker import Sound
from meshlib.program.instructions import Loop
from meshlib.program.records import Program

Outputs = Mapping[str, Tensor] | Sequence[Tensor] | Tensor | None
PROGRAMS = 32  # most recently used programs that a session keeps


class Session(Shown):
    """Lowerings of one program under varying layouts, meshes, precisions and balances, with shared caches.

    Every program is equal to the result of `mtf.lower`; the last `PROGRAMS` are cached. Analyses that do not depend on
    the layout run once; others are shared by layouts that split an operation alike. Operations added to the graph later
    are not part of the program, but may add names of dims and gradients: the session then analyses the graph again.

    Args:
      outputs: as for `mtf.lower`.
      updates: as for `mtf.lower`.
    Raises: GraphError for bad outputs or updates.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [mtf.Dimension("batch", 8), mtf.Dimension("d", 4)])
      ...     total = mtf.reduce_sum(mtf.square(x), name="total")
      >>> session = mtf.Session({"total": total})
      >>> for layout in ("batch:rows", "d:cols", "batch:rows;d:cols"):
      ...     print(layout, session.lower("rows:2;cols:4", layout).sent_bytes)
      batch:rows 4
      d:cols 6
      batch:rows;d:cols 7
      >>> session.check("rows:3", "batch:rows").ok
      False
    """

    def __init__(self, outputs: Outputs = None, updates: Sequence[Operation] = ()) -> None:
        self._outputs, self._graph = fetched_outputs(outputs, updates)
        self.asked = (dict(self._outputs), list(updates))  # the program's outputs and updates
        self._updates = assigned(updates)
        self._parts: list[Graph] = []  # the graph and those of its loops, as last analysed
        self._known: list[object] = []  # the state of each
        self._memos = Memos()
        self._size_notes: tuple[str, ...] = ()
        self._is_resolved = False

    def sibling(self, outputs: Outputs = None, updates: Sequence[Operation] = ()) -> Session:
        """The session of another program, such as the same model built with other arguments.

        Both share caches for alike operations; their programs are those of separate sessions.

        Args:
          outputs: as for `mtf.lower`.
          updates: as for `mtf.lower`.
        Raises: GraphError for bad outputs or updates.
        Example:
          >>> import meshlib as mtf
          >>> def total(size: int) -> mtf.Tensor:
          ...     x = mtf.input("x", [mtf.Dimension("batch", 8), mtf.Dimension("d", size)])
          ...     return mtf.reduce_sum(mtf.square(x), name="total")
          >>> with mtf.Graph():
          ...     session = mtf.Session(total(4))
          >>> with mtf.Graph():
          ...     other = session.sibling(total(6))
          >>> other.lower("rows:2", "batch:rows").sent_bytes
          4
        """
        other = Session(outputs, updates)
        self._learn()
        other._memos = self._memos.sibling()
        return other

    @uncollected
    def lower(
        self,
        mesh: Any = "device:1",
        layout: Any = "",
        precision: str = "default",
        balance: Balance | None = None,
        regather: bool = True,
        compiler: Compiler = XLA_TPU,
        told: Callable[[Loop], object] | None = None,
    ) -> Program:
        """The program that one device of `mesh` runs under `layout`: arguments, result and errors as in `mtf.lower`.

        told: called with each loop outside of others once its body is lowered. What it raises ends the lowering, which
          the next one with these arguments continues.
        """
        choice(precision, "lower", "precision", ("default", "highest"))
        if balance is not None and not isinstance(balance, Balance):
            raise GraphError(f"lower: balance must be an mtf.Balance, got {type(balance).__name__} {balance!r:.80}")
        if not isinstance(regather, bool):
            raise GraphError(f"lower: regather must be True or False, got {type(regather).__name__} {regather!r:.80}")
        require_compiler(compiler, "lower")
        if balance is None:
            balance = Balance(stationary=compiler.stationary_weights)
        elif balance.stationary != compiler.stationary_weights:
            compiler = replace(compiler, stationary_weights=balance.stationary)
        mesh, rules = Mesh(mesh), LayoutRules(layout)
        self._learn()
        key = (mesh, rules, precision, balance, regather, compiler)
        program = self._programs.pop(key, None) or self.under(mesh, rules)._lowered(*key, told)
        self._programs[key] = program  # most recently used last
        while len(self._programs) > PROGRAMS:
            del self._programs[next(iter(self._programs))]
        return program

    def _lowered(
        self,
        mesh: Mesh,
        rules: LayoutRules,
        precision: str,
        balance: Balance,
        regather: bool,
        compiler: Compiler,
        told: Callable[[Loop], object] | None,
    ) -> Program:
        report = check_layout(self._subjects, mesh, rules)
        refuse_faults(report, self._subjects, mesh, rules)
        memos = self._memos
        memos.trim()
        notes = (*report.notes, *self._size_notes, *self._bubble_notes)
        sound = Sound(memos.signatures, memos.computations)
        key = (mesh, rules, precision, balance, regather, compiler)
        begun = self._begun.pop(key, None) or Lowering(*key[:5], notes, memos, sound, compiler)
        try:
            program = replace(begun, told=told).program(self._simple, self._outputs, bool(self._updates))
        except BaseException:
            if told is not None:
                self._begun[key] = begun  # with the bodies lowered so far
            raise
        return replace(program, asked=self.asked)

    @property
    def programs(self) -> tuple[Program, ...]:
        """The cached programs, most recently used last."""
        self._learn()
        return tuple(self._programs.values())

    def __repr__(self) -> str:
        outputs, count = ", ".join(list(self._outputs)[:5]), len(self.programs)
        return clipped(f"<Session of {outputs or 'updates'}: {counted(count, 'program')} kept>")

    def check(self, mesh: Any = "device:1", layout: Any = "") -> Report:
        """All faults of a layout, and notes on what it leaves unused: as `mtf.check`."""
        mesh, rules = Mesh(mesh), LayoutRules(layout)
        return check_layout(self.under(mesh, rules)._subjects, mesh, rules)

    @property
    def subjects(self) -> Subjects:
        """The tensors against which layouts are checked, with shapes and scopes."""
        self._learn()
        return self._subjects

    def _learn(self) -> None:
        """Analyse the graph, unless it is unchanged."""
        if not self._known or self._known != [_state(g) for g in self._parts]:
            if self._known:
                self._memos = Memos()
            self._parts = _graphs(self._graph)
            self._known = [_state(g) for g in self._parts]
            self._programs: dict[object, Program] = {}
            self._begun: dict[object, Lowering] = {}  # those that were ended
            self._plans = size_plans(self._graph)
            self._resolved: dict[tuple[SizePlan, ...], Session] = {}
            self._simple = simplify(self._graph, self._outputs.values(), self._updates.values())
            self._subjects = Subjects(self._graph, self._simple.operations)
            self._bubble_notes = _bubble_notes(self._simple.operations)

    def under(self, mesh: Mesh, rules: LayoutRules) -> Session:
        """The session of this program with the sizes that follow from a layout: itself if none do.

        Args: as of `lower`.
        """
        self._learn()
        plans = tuple(plan.under(mesh, rules) for plan in self._plans)
        if self._is_resolved or not plans:
            return self
        session = self._resolved.get(plans)
        if session is None:
            graph = ResolvedGraph(self._graph, dict(zip(self._plans, plans, strict=True)))
            graph.copy()
            outputs, updates = self.asked
            session = Session(
                {name: graph.tensors[t] for name, t in outputs.items()}, [graph.operations[op] for op in updates]
            )
            session._memos, session._is_resolved = self._memos.sibling(), True
            session._learn()
            session._subjects.names |= self._subjects.names
            session._size_notes = tuple(dict.fromkeys(plan.note for plan in plans if plan.note))
            self._resolved[plans] = session
        return session


def _bubble_notes(operations: Sequence[Operation]) -> list[str]:
    """Notes on the bubbles of pipelines among operations; their gradients have the same."""
    notes: dict[str, None] = {}
    for op in all_operations(operations):
        if op.loop is not None and op.loop.active is not None and op.region == FORWARD:
            notes[f"{op}: {op.loop.active.note}"] = None
        if op.loop is not None and op.loop.timing is not None:
            notes[f"{op}: {op.loop.timing.summary}"] = None
    return list(notes)


def _state(graph: Graph) -> tuple[object, ...]:
    """What differs if a graph was extended."""
    return len(graph.operations), dict(graph.gradient_of), dict(graph.known)


def _graphs(graph: Graph) -> list[Graph]:
    """A graph and the graphs of its loop bodies."""
    bodies = [op.loop.body for op in graph.operations if op.loop is not None]
    return [graph, *(g for body in bodies for g in _graphs(body))]


def _named_outputs(outputs: Outputs) -> dict[str, Tensor]:
    """Outputs by name; GraphError for anything but tensors."""
    if isinstance(outputs, Tensor):
        outputs = [outputs]
    if outputs is None or isinstance(outputs, Mapping):
        fetched = dict(outputs or {})
        for name, t in fetched.items():
            if not isinstance(name, str):
                raise GraphError(f"the names of outputs must be strings, got {type(name).__name__} {name!r:.80}")
            if not isinstance(t, Tensor):
                raise GraphError(f"output {name!r} must be a tensor, got {type(t).__name__} {t!r:.80}")
        return fetched
    if not isinstance(outputs, list | tuple):
        hint = "; call it: mtf.lower(*build(), ...)" if callable(outputs) else ""
        raise GraphError(f"outputs must be a dict of names to tensors, a list or a tensor, got {outputs!r:.80}{hint}")
    for t in outputs:
        if not isinstance(t, Tensor):
            raise GraphError(f"outputs must be tensors, got {type(t).__name__} {t!r:.80}")
    return {t.name: t for t in outputs}


def fetched_outputs(outputs: Outputs, updates: Sequence[Operation]) -> tuple[dict[str, Tensor], Graph]:
    """A program's outputs by name, and its graph; GraphError for invalid outputs or updates."""
    fetched = _named_outputs(outputs)
    if isinstance(updates, str | Mesh | Operation) or not isinstance(updates, Sequence):
        is_mesh = isinstance(updates, str | Mesh)
        remedy = "; is it a mesh? Write mtf.lower(y, mesh=..., layout=...)" if is_mesh else ""
        raise GraphError(
            f"updates must be a list of those returned by mtf.assign or an optimizer, got {updates!r:.80}{remedy}"
        )
    assigned(updates)  # refuses invalid updates before looking at their graph
    ends = [*(t.operation for t in fetched.values()), *updates]
    for op in ends:
        if op.graph.parent is not None:
            raise GraphError(f"{op} belongs to the body of a loop; lower what the loop returns of it")
    graphs = list(dict.fromkeys(op.graph for op in ends))
    if not graphs:
        raise GraphError("nothing to lower: give outputs, updates or both")
    if len(graphs) > 1:
        raise GraphError("outputs and updates belong to different graphs; build them in one `with mtf.Graph()`")
    return fetched, graphs[0]
