"""A verification job: the unsharded run, each layout compared with it, and the first operation that differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from layouts import LayoutRules, Mesh
from meshlib.core.dtypes import INT32
from meshlib.core.engine import Engine
from meshlib.core.errors import FeedError, LayoutError, MeshlibError
from meshlib.core.graph import Graph, Tensor
from meshlib.lowering.session import Session
from meshlib.ops.control.sources import STEP
from meshlib.program.instructions import Compute, Instruction, Move, Resident, Value
from meshlib.program.records import Program
from meshlib.simulation.exact import Blocks, run_exact
from meshlib.simulation.fast import FastExecutor
from meshlib.verification.candidates import draw_feeds, initial_state
from meshlib.verification.report import Divergence, LayoutRow
from meshlib.verification.rounding import SAFETY, SAMPLES, Key, TripCounts, Wide, accumulated, difference, largest

Array = np.ndarray[Any, Any]

FAULTS = (MeshlibError, ValueError, IndexError, TypeError, AssertionError, KeyError)
WEAK = 0.25  # tolerance, relative to the largest magnitude, above which a comparison proves little
NARROWINGS = 12  # retries with half the range for drawn indices that are out of range


class Diverged(Exception):
    """Ends a run at the first wrong value."""

    def __init__(self, divergence: Divergence) -> None:
        self.divergence = divergence


@dataclass(eq=False)
class DivergenceSearch:
    """Compares every value of a run with the unsharded one, and stops at the first wrong one."""

    program: Program
    values: Mapping[Key, Array]
    allowed: Mapping[Key, float]
    trips: TripCounts = field(default_factory=TripCounts)

    def watch(self, instruction: Instruction, value: Value, blocks: Blocks) -> None:
        """Callback of `run_exact` for every value."""
        trip = self.trips.next(value)
        key = (value.tensor, trip)
        if key not in self.values or isinstance(instruction, Resident):
            return
        wanted, limit = self.values[key], self.allowed[key]
        sharding = value.sharding
        kinds = {kind for _, kind in sharding.pending}
        merge = {"sum": np.add, "max": np.maximum, "min": np.minimum}[kinds.pop() if kinds else "sum"]
        for group in sharding.mesh.groups(sharding.pending_axes):
            at = sharding.mesh.coordinate(group[0])
            block = np.asarray(merge.reduce([np.asarray(blocks[d], np.float64) for d in group]))
            expected = wanted[sharding.slices(at)]
            if block.shape != expected.shape:
                return  # the run itself reports more
            off = difference(block, expected)
            if off.max(initial=0.0) > limit:
                index = np.unravel_index(int(off.argmax()), off.shape)
                numbers = float(block[index]), float(expected[index]), limit
                raise Diverged(self._report(instruction, value, group, index, numbers, trip))

    def _report(
        self,
        instruction: Instruction,
        value: Value,
        group: Sequence[int],
        index: tuple[Any, ...],
        numbers: tuple[float, float, float],
        trip: int,
    ) -> Divergence:
        sharding, op = value.sharding, instruction.operation
        mesh = sharding.mesh
        coordinate = mesh.coordinate(group[0])
        summed = sharding.pending_axes
        start = sharding.offsets(coordinate)
        what = str(op)
        if isinstance(instruction, Move):
            producer, over = value.tensor.operation, "+".join(a for s in instruction.steps[:1] for a in s.axes)
            what = f"{instruction.opcode} of {producer} over {over}"
            what, op = (what if producer is op else f"{what}, for {op}"), producer
        split = instruction.assignment if isinstance(instruction, Compute) else ()
        return Divergence(
            op.name,
            instruction.opcode,
            op.source,
            instruction.region,
            value.tensor.name,
            str(value),
            ", ".join(f"{f}@{a}" for a, f in split),
            what,
            str(mesh),
            str(self.program.layout),
            tuple(group),
            {a: c for a, c in zip(mesh.axes, coordinate, strict=True) if a not in summed},
            {d.name: int(o + i) for d, o, i in zip(sharding.shape, start, index, strict=True)},
            *numbers,
            trip if op.graph.parent is not None else None,
        )


@dataclass(frozen=True)
class ReferenceStep:
    """One step of the unsharded program: its initial state, all values, and the tolerance of each."""

    state: dict[str, Array]
    values: dict[Key, Array]
    allowed: dict[Key, float]
    ends: dict[str, tuple[Array, float]]  # compared arrays by name, with tolerances


@dataclass(eq=False)
class Job:
    """The unsharded program with its results, and everything needed to run and compare a layout."""

    graph: Graph
    session: Session
    own: Session | None  # without the gradients added for verification; None if there are none
    precision: str
    executor: str
    seed: int
    rtol: float | None
    program: Program = field(init=False)
    feeds: dict[str, Array] = field(init=False)
    reference: list[ReferenceStep] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @np.errstate(all="ignore")  # overflow and NaN are values here; `weaknesses` reports them
    def prepare(self, meshes: Sequence[Mesh], inputs: Mapping[str, Any], state: Mapping[str, Any], steps: int) -> None:
        """Lower and run the unsharded program (on a mesh with all axes, of size 1, that constraints may name)."""
        alone = ";".join(f"{a}:1" for a in dict.fromkeys(a for m in meshes for a in m.axes))
        self.program = self.session.lower(alone, "", self.precision)
        drawn = [v for n, v in self.program.inputs.items() if n not in inputs and v.tensor.dtype is INT32]
        for narrow in range(NARROWINGS):
            self.feeds = draw_feeds(self.program, self.graph.inputs, inputs, self.seed, narrow)
            self.reference = []
            arrays = initial_state(self.program, state, self.seed)
            try:
                for number in range(steps):
                    arrays = self._run_reference(arrays, number, max(m.size for m in meshes))
                return
            except FeedError as fault:  # an index out of range
                if not drawn or narrow == NARROWINGS - 1:
                    raise FeedError(f"verify: the unsharded program refuses its inputs; give others\n{fault}") from None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of compared arrays."""
        return tuple(self.reference[0].ends)

    def engine(self, step: Mapping[str, Array], in_order: bool) -> Engine:
        """The arithmetic of one step."""
        return Engine(self.seed, int(step[STEP]), self.precision == "highest", in_order)

    def _run_reference(self, state: dict[str, Array], number: int, parts: int) -> dict[str, Array]:
        """Run one unsharded step in its precision, in float64, and in float64 with perturbations; returns the next
        state."""
        program, trips = self.program, TripCounts()
        values: dict[Key, Array] = {}

        def watch(instruction: Instruction, value: Value, blocks: Blocks) -> None:
            values.setdefault((value.tensor, trips.next(value)), np.array(blocks[0]))

        outputs, updates = run_exact(program, state, self.feeds, self.engine(state, True), watch)
        given = program.given(state, self.feeds)
        runs = []
        for sample in range(SAMPLES + 1):
            rng = np.random.default_rng([self.seed, 2, number, sample]) if sample else None
            wide = Wide(self.precision == "highest", parts, rng)
            wide.run(program, given, self.engine(state, False))
            runs.append(wide.values)
        allowed = {key: self._allowed(key[0], x, [r[key] for r in runs]) for key, x in values.items()}
        ends = {n: (y, allowed[program.outputs[n].tensor, 0]) for n, y in outputs.items()}
        ends |= {f"new {n}": (y, allowed[program.updates[n].tensor, 0]) for n, y in updates.items()}
        self.reference.append(ReferenceStep(state, values, allowed, ends))
        after = {**state, **updates}
        if program.counts_steps:
            after[STEP] = np.asarray(after[STEP] + np.int32(1), np.int32)
        return after

    def _allowed(self, t: Tensor, x: Array, runs: Sequence[Array]) -> float:
        if self.rtol is not None:
            return self.rtol * (largest(x) or 1.0)
        plain, changed = runs[0], runs[1:]
        rounding = 4 * accumulated(t.dtype) * largest(x)
        return SAFETY * max(float(difference(c, plain).max(initial=0.0)) for c in changed) + rounding

    def weaknesses(self) -> list[str]:
        """Limits of what the unsharded numbers can prove."""
        notes = []
        for name in self.names:
            arrays = [step.ends[name][0] for step in self.reference]
            if any(x.dtype.kind == "f" and not np.isfinite(x).all() for x in arrays):
                notes.append(f"'{name}' is not finite in the unsharded program; give inputs within its domain")
            elif all(x.size and not x.any() for x in arrays):
                notes.append(f"'{name}' is zero everywhere in the unsharded program, which hides faults")
            share = max(step.ends[name][1] / (largest(step.ends[name][0]) or 1.0) for step in self.reference)
            if share > WEAK:
                notes.append(f"'{name}' proves little: rounding alone may change it by {share:.2g} of its magnitude")
        return notes

    # ------------------------------------------------------------ one layout

    @np.errstate(all="ignore")
    def row(self, mesh: Mesh, rules: LayoutRules, searched: bool) -> LayoutRow | str:
        """Lower, run and compare one layout; the reason as text if it was searched and the lowering refuses it."""
        row = LayoutRow(str(mesh), str(rules), False, float("inf"), 0.0, "", 0, 0.0)
        try:
            program = self._lowered(mesh, rules)
        except LayoutError as fault:
            if not searched:
                raise
            return f"{rules}: {str(fault).splitlines()[0]}"
        except FAULTS as fault:
            return replace(row, fault=f"the lowering fails: {type(fault).__name__}: {fault}")
        row = replace(row, collectives=len(program.collectives), sent_bytes=float(program.sent_bytes))
        run = self._runner(program)
        error = allowed = 0.0
        nearness, worst, wrong = -1.0, "", []
        first: int | None = None  # step with a wrong value
        for number, step in enumerate(self.reference):
            try:
                outputs, updates = run(step)
            except FAULTS as fault:
                text = f"step {number}: {type(fault).__name__}: {fault}"
                return replace(row, fault=text, divergence=self._first_divergence(program, number))
            results = {**outputs, **{f"new {n}": y for n, y in updates.items()}}
            for name, (wanted, limit) in step.ends.items():
                if name not in results:  # a gradient that this layout can't shard
                    continue
                off = difference(results[name], wanted)
                most, scale = float(off.max(initial=0.0)), largest(wanted) or 1.0
                near = most / limit if limit else float("inf") if most else 0.0
                if near > nearness:
                    nearness, worst, error, allowed = near, name, most / scale, limit / scale
                if most > limit:
                    first = number if first is None else first
                    wrong.append(self._wrong(name, number, results[name], wanted, off, limit))
        divergence = None if first is None else self._first_divergence(program, first)
        row = replace(row, ok=first is None, error=error, allowed=allowed, worst=worst)
        return replace(row, wrong=tuple(wrong), divergence=divergence)

    def _lowered(self, mesh: Mesh, rules: LayoutRules) -> Program:
        """The program; without the gradients added here if a layout supports all but them."""
        try:
            return self.session.lower(mesh, rules, self.precision)
        except LayoutError as fault:
            if self.own is None:
                raise
            program = self.own.lower(mesh, rules, self.precision)
            self.notes.append(f"gradients are not compared under {rules}: {str(fault).splitlines()[0]}")
            return program

    def _runner(self, program: Program) -> Callable[[ReferenceStep], tuple[dict[str, Array], dict[str, Array]]]:
        if self.executor == "exact":
            return lambda step: run_exact(program, step.state, self.feeds, self.engine(step.state, True))
        fast = FastExecutor(program)

        def run(step: ReferenceStep) -> tuple[dict[str, Array], dict[str, Array]]:
            outputs, updates = fast.step(step.state, self.feeds, self.engine(step.state, False))
            return {n: y.copy() for n, y in outputs.items()}, updates

        return run

    @staticmethod
    def _wrong(name: str, number: int, computed: Array, wanted: Array, off: Array, limit: float) -> str:
        at = np.unravel_index(int(off.argmax()), off.shape)
        place_ = f"[{', '.join(map(str, map(int, at)))}]" if at else ""
        bad = int((off > limit).sum())
        share = f", {bad} of {off.size} elements" if off.size > 1 else ""
        return (
            f"'{name}'{place_} in step {number} is {float(computed[at]):.9g}, not {float(wanted[at]):.9g} "
            f"(allowed: {limit:.2g}{share})"
        )

    # ------------------------------------------------------------ localisation of a divergence

    def _first_divergence(self, program: Program, number: int) -> Divergence | None:
        """Rerun a step in the exact executor, up to the first value that differs from the unsharded one."""
        step = self.reference[number]
        search = DivergenceSearch(program, step.values, step.allowed)
        try:
            run_exact(program, step.state, self.feeds, self.engine(step.state, True), search.watch)
        except Diverged as end:
            return end.divergence
        except FAULTS:
            return None
        return None
