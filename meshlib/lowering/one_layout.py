"""Lowering of a program under one mesh and layout: partitioning of graph and loop bodies, then the passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from layouts import LayoutRules, Mesh, Sharding
from meshlib.core.compiler import Compiler
from meshlib.core.graph import Graph, Operation, Tensor
from meshlib.core.opdef import Kind
from meshlib.lowering.accumulators import bind_terms
from meshlib.lowering.assigned import Homes
from meshlib.lowering.balance import Balance
from meshlib.lowering.distances import axes_price
from meshlib.lowering.expected_halos import Near, near_shifts
from meshlib.lowering.graph_cache import Memos
from meshlib.lowering.halos import share_halos
from meshlib.lowering.loops import Body, Makers
from meshlib.lowering.ordering import order_and_fuse
from meshlib.lowering.partition import Partitioner
from meshlib.lowering.passes import join_gathers, merge_small_collectives, remove_dead_code
from meshlib.lowering.problem import Chosen, Problem, best_choices
from meshlib.lowering.repeated_choice import repeated_choices
from meshlib.lowering.repetition import Irregular, Repetition
from meshlib.lowering.shared_sums import split_sums
from meshlib.lowering.simplification import Simplified
from meshlib.lowering.unrolling import unrolled
from meshlib.program.checker import Sound, check_program
from meshlib.program.instructions import Loop, Value
from meshlib.program.records import Program

Nears: TypeAlias = Mapping[Operation, Near]  # see `near_shifts`
Choose: TypeAlias = Callable[[Problem], Chosen]
Trial: TypeAlias = Callable[[Tensor], tuple[Sharding, Makers]]
Start: TypeAlias = Callable[[Simplified, Homes, Nears], Partitioner]  # choices only
Finish: TypeAlias = Callable[[Partitioner, bool], Program]  # whether halos are shared across phases
PASSES = (remove_dead_code, share_halos, join_gathers, merge_small_collectives, order_and_fuse)
LITTLE = 1e-3  # of the bytes sent: smaller savings are not worth a second search
MOST_MEMORY = 1.125  # largest acceptable increase of memory for sending less


@dataclass(frozen=True)
class Lowering:
    """State of one lowering, shared by the program and its loop bodies."""

    mesh: Mesh
    rules: LayoutRules
    precision: str
    balance: Balance
    regather: bool
    notes: tuple[str, ...]
    memos: Memos
    sound: Sound
    compiler: Compiler
    told: Callable[[Loop], object] | None = None  # called with each loop outside of others once its body is lowered
    choose: Choose = best_choices
    shares: bool = True  # whether sums may be derived from other sums
    # Over the program without its loops.
    passes: Sequence[Callable[[Program], Program]] = field(default_factory=lambda: PASSES)
    # Alike loops are lowered once.
    _bodies: dict[object, Program] = field(default_factory=dict)
    _trials: dict[object, Trial] = field(default_factory=dict)

    def program(self, simple: Simplified, fetched: Mapping[str, Tensor], counts_steps: bool) -> Program:
        """The whole program, after all passes."""
        layers = self.memos.repetition(simple, [simple.of(t) for t in fetched.values()])
        if layers is not None:
            with contextlib.suppress(Irregular):
                return self._unrolled(layers, fetched, counts_steps)
        return self._whole(simple, fetched, counts_steps)

    def _unrolled(self, layers: Repetition, fetched: Mapping[str, Tensor], counts_steps: bool) -> Program:
        """The whole program, with alike layers lowered once. Raises: Irregular where that is impossible."""

        def choose(problem: Problem) -> Chosen:
            return repeated_choices(problem, layers) if problem.graph is layers.short else best_choices(problem)

        *passes, order = PASSES
        short = replace(self, told=None, choose=choose, shares=False, passes=tuple(passes))._whole(
            layers.short, fetched, counts_steps
        )
        try:
            program = unrolled(check_program(order(short), order.__name__, before=short, sound=self.sound), layers)
        except Irregular:  # the order depends on the number of layers
            program = unrolled(short, layers)
            program = order(check_program(program, "unrolling", sound=self.sound))
        return check_program(program, "ordering", sound=self.sound)

    def _whole(self, simple: Simplified, fetched: Mapping[str, Tensor], counts_steps: bool) -> Program:
        """The whole program, every operation lowered separately."""
        homes = Homes(simple.graph, self.mesh, self.rules, self.regather, known_traits=self.memos.traits)

        def start(simple: Simplified, homes: Homes, near: Nears) -> Partitioner:
            return self._sweep(simple, homes, [simple.of(t) for t in fetched.values()], near)

        def finish(sweep: Partitioner, across: bool) -> Program:
            sweep.run()
            outputs = {name: sweep.at_home(sweep.graph.of(t)) for name, t in fetched.items()}
            return self._finished(sweep, sweep.inputs, outputs, counts_steps, self.notes, across)

        return self._cheapest(simple, homes, fetched.values(), start, finish)

    def body(
        self,
        graph: Graph,
        homes: Homes,
        results: Sequence[Tensor],
        ends: Sequence[Sharding | None],
        names: Sequence[str],
    ) -> Program:
        """The body of a loop with results under the given shardings; None: as computed."""
        key = (graph, tuple(results), tuple(ends), *self._inherited(graph, homes))
        if key in self._bodies:
            return self._bodies[key]
        simple = self.memos.simplified(graph, results, taken=True)

        def start(simple: Simplified, homes: Homes, near: Nears) -> Partitioner:
            bound = {simple.of(t): end for t, end in zip(results, ends, strict=True) if end is not None}
            for t, end in bound.items():
                if t.operation.opdef.kind is not Kind.INPUT:
                    homes.bind(t, end)
            return self._sweep(simple, homes, bound, near)

        def finish(sweep: Partitioner, across: bool) -> Program:
            sweep.run()
            returned = [sweep.graph.of(t) for t in results]
            placed = [sweep.as_is(t) if s is None else sweep.at(t, s) for t, s in zip(returned, ends, strict=True)]
            outputs = {f"{v.tensor.name} ({n})": v for n, v in enumerate(placed)}
            for name in names:
                if name not in sweep.inputs:  # a carry that the body ignores
                    sweep.resident(graph.inputs[name])
            inputs = {name: sweep.inputs[name] for name in names}
            return self._finished(sweep, inputs, outputs, False, (), across, is_body=True)

        program = self._bodies[key] = self._cheapest(simple, homes, results, start, finish)
        return program

    def trial(self, graph: Graph, homes: Homes, results: Sequence[Tensor], bound: Sequence[Tensor]) -> Trial:
        """A loop body partitioned without passes: a function from a tensor to its sharding and pending makers."""
        key = (graph, tuple(results), tuple(bound), *self._inherited(graph, homes))
        if key not in self._trials:
            simple = self.memos.simplified(graph, results, taken=False)
            sweep = self._sweep(simple, homes, [simple.of(t) for t in bound])
            sweep.run()
            places = sweep.places
            made = {t: (places.made(t).sharding, places.makers.get(t, {})) for t in places.instances}
            self._trials[key] = lambda t: made[simple.of(t)]
        return self._trials[key]

    @staticmethod
    def _inherited(graph: Graph, homes: Homes) -> Sequence[object]:
        """Everything that a loop's body inherits from the outer graph."""
        return [*(homes.of(op.output) for op in graph.inputs.values()), *homes.destinations.items()]

    def _cheapest(
        self, simple: Simplified, homes: Homes, fetched: Iterable[Tensor], start: Start, finish: Finish
    ) -> Program:
        """The graph as written, or with derived sums if that is cheaper and takes little more memory."""
        best = self._with_best_halos(simple, homes, start, finish)
        sharing = self.memos.sharing(simple, split_sums(simple, homes), [simple.of(t) for t in fetched])
        if sharing is not None and 2 * sharing.bytes > LITTLE * best.sent_bytes:
            if not self.shares:
                raise Irregular
            other = self._with_best_halos(sharing.graph, replace(homes, graph=sharing.graph.graph), start, finish)
            best = other if self._is_better(other, best) else best
        return best

    def _is_better(self, other: Program, than: Program) -> bool:
        """True if another program sends less at the balance's prices, also counting work, for little more memory."""
        if other.memory.peak_bytes > than.memory.peak_bytes * MOST_MEMORY:
            return False
        sent, before = self._priced(other), self._priced(than)
        works, worked = (self.balance.bytes_of(p.work) for p in (other, than))
        return sent < before and sent + works < before + worked

    def _priced(self, program: Program) -> float:
        """Price of the bytes that a program sends, by axis, and of its launches."""
        prices, start = self.balance.axis_prices, self.balance.collective_bytes
        if not prices and not start:
            return program.sent_bytes
        return sum(c.count * (c.sent_bytes * axes_price(c.axes, prices) + start) for c in program.collectives)

    def _with_best_halos(self, simple: Simplified, homes: Homes, start: Start, finish: Finish) -> Program:
        """The program that sends less: with shifts priced separately, or as sharing their halos.

        Forward's halos serve backward, too, if they are kept: that takes a copy with margins.
        """
        first = start(simple, homes, {})
        best = finish(first, False)
        tried: Nears = {}
        for across in (False, *([] if self.regather else [True])):
            near = near_shifts(simple, homes, self.memos.signatures, across)
            if near != tried and (across or first.problem.depends_on(near)):
                sweep = start(simple, homes, near)
                if across or not sweep.chosen.is_same(first.chosen):
                    other = finish(sweep, across)
                    best = other if other.sent_bytes < best.sent_bytes else best
            tried = near
        return best

    def _sweep(
        self, simple: Simplified, homes: Homes, fetched: Iterable[Tensor], near: Nears | None = None
    ) -> Partitioner:
        memos, fetched = self.memos, set(fetched)
        bind_terms(simple, homes, fetched)
        body = Body(self.body, self.trial, self.told if simple.graph.parent is None else None)
        return Partitioner(
            simple, homes, memos.prices(self.balance), memos.signatures, fetched, body, near or {}, self.choose
        )

    def _finished(
        self,
        sweep: Partitioner,
        inputs: Mapping[str, Value],
        outputs: Mapping[str, Value],
        counts_steps: bool,
        notes: tuple[str, ...],
        across: bool,
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
            sweep.chosen.excess,
            self.compiler,
        )
        check_program(program, "partitioning", sound=self.sound)
        for run in PASSES if is_body else self.passes:
            rewritten = share_halos(program, across) if run is share_halos else run(program)
            program = check_program(rewritten, run.__name__, before=program, sound=self.sound)
        return program
