"""Simulation: the variables of a program, and steps of any program on them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np

from hardware.ring_steps import RingRun
from hardware.slices import Slice
from meshlib.core.arguments import at, choice, flag
from meshlib.core.arguments import whole as whole_number
from meshlib.core.engine import Engine
from meshlib.core.errors import FeedError, GraphError, NotFiniteError, nearest
from meshlib.core.shown import Shown
from meshlib.core.slices import slice_for
from meshlib.core.text import clipped, counted
from meshlib.ops.control.sources import STEP
from meshlib.program.instructions import Instruction, Value
from meshlib.program.records import Program, require_program
from meshlib.simulation.exact import Blocks, run_exact
from meshlib.simulation.fast import FastExecutor
from meshlib.simulation.shards import LastStep, intermediate, ring_of
from meshlib.simulation.state import State, fed_arrays

__all__ = ["Simulation", "State", "simulate"]

Array = np.ndarray[Any, Any]
EXECUTORS = ("fast", "exact")
READY_PROGRAMS = 4  # buffers are kept for this many programs; others are planned again for each run


def simulate(
    program: Program, slice: Any = None, seed: int = 0, executor: str = "fast", check_nan: bool = True
) -> Simulation:
    """Simulated cores that run `program`, with its variables at their initial values.

    Args:
      program: what `mtf.lower` returned.
      slice: a name like "v3-8" or a Slice; optional. Its devices must be as many as the mesh has.
      seed: of initial values and random numbers.
      executor: "fast" keeps all blocks of a value in one array; "exact" keeps each core's block apart, adds in ring
        order and in the MXU's own order, and is meant for proofs (up to about 16 cores).
      check_nan: raise NotFiniteError, naming the operation and core, when a fetched value or a variable becomes NaN.
    Raises: SliceError for an unknown slice or one of another size than the mesh.
    Example:
      >>> import numpy as np
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [mtf.Dimension("batch", 4)])
      ...     program = mtf.lower({"total": mtf.reduce_sum(x)}, mesh="rows:2", layout="batch:rows")
      >>> float(mtf.simulate(program).step(x=np.arange(4.0))["total"])
      6.0
    """
    require_program(program, "simulate")
    choice(executor, "simulate", "executor", EXECUTORS)
    check_nan = flag(check_nan, "simulate", "check_nan")
    on_slice = None if slice is None else slice_for("simulate", program.mesh, slice)
    return Simulation(program, on_slice, whole_number(seed, "simulate", "seed"), executor, check_nan)


class Simulation(Shown):
    """The variables of a program on simulated cores, and steps on them.

    `state` maps names to global arrays; `slice` is the named slice or None. Threads may share a simulation: each step,
    save or assignment waits until the one that runs has ended. A copy (of the module `copy`, or a pickle) is a
    simulation of its own that goes on from the same state, bit for bit.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     w = mtf.variable("w", "d:4", 1.0)
      ...     program = mtf.lower({"total": mtf.reduce_sum(w)}, [mtf.assign(w, w * 2)], mesh="data:2", layout="d:data")
      >>> sim = mtf.simulate(program)
      >>> float(sim.step()["total"]), sim.state["w"].tolist(), sim.shard("w", 0).tolist()
      (4.0, [2.0, 2.0, 2.0, 2.0], [2.0, 2.0])
    """

    runs_several = False  # whether `several` is faster than single steps
    intermediates = "once step has run"  # when `shard` has intermediate values
    _last: LastStep | None = None

    def __init__(self, program: Program, slice: Slice | None, seed: int, executor: str, check_nan: bool) -> None:
        self.program = program
        self.slice = slice
        self.seed = seed
        self.executor = executor
        self.check_nan = check_nan
        self.state = State(seed)
        # by id(program); each executor keeps its program alive
        self._ready: OrderedDict[int, FastExecutor] = OrderedDict()
        self._without_nan: dict[str, Array] = {}  # per variable, the value written by the last checked step
        self._stepping = False
        self._declare(program)

    def __repr__(self) -> str:
        mesh, variables = self.program.mesh, counted(len(self.program.variables), "variable")
        where = f"mesh {mesh} ({counted(mesh.size, 'core')})"
        return clipped(f"<Simulation: {variables}, {self.executor} executor; {where}>")

    def __getstate__(self) -> dict[str, Any]:
        # Buffers are not state: a copy plans its own.
        own = {"_ready": OrderedDict(), "_without_nan": {}, "_stepping": False, "_last": None}
        return {**vars(self), "state": copy(self.state), **own}

    def step(self, feeds: Mapping[str, Any] | None = None, /, **named: Any) -> dict[str, Array]:
        """Run the program once: feeds by name, fetched outputs back, updates committed together.

        Raises: FeedError for missing, unknown or unfit feeds; NotFiniteError when a NaN appears. The state is then
        what it was before the step.
        """
        return self.run(self.program, feeds, **named)

    def rows_here(self, program: Program | None = None) -> Array | None:
        """The rows of its inputs that a program reads in this process, bool [rows]; None where it may read all.

        `program`: that of the steps unless given. An input's rows are its first dim: of several processes each needs
        those that its devices hold.
        """
        return None

    def several(self, feeds: Sequence[Mapping[str, Any]]) -> list[dict[str, Array]] | None:
        """Run several steps in one call to the devices, where `runs_several`.

        Returns: their outputs; None, with the state unchanged, where steps must run one by one: for a program that
          prints, and for steps that fail, which report the fault when run singly.
        Raises: FeedError as `step`.
        """
        return None

    def run(self, program: Program, feeds: Mapping[str, Any] | None = None, /, **named: Any) -> dict[str, Array]:
        """Run another program once on the same variables: it may have its own batch size, mesh and layout.

        Raises: as `step`; GraphError if a step of this simulation calls it, as an initializer could.
        """
        require_program(program, "run")
        if feeds is not None and not isinstance(feeds, Mapping):
            raise FeedError(
                f"feeds are a dict of names to arrays, or named as in step(x=array); got {type(feeds).__name__}"
            )
        given = {**(feeds or {}), **named}
        with self.state.lock:
            if self._stepping:  # by this thread, which has the lock
                raise GraphError(
                    f"{at('run')}: called from within a step of the same simulation; call it when that step has ended, "
                    "or run a copy, copy.copy(sim)"
                )
            self._stepping = True
            try:
                return self._run(program, given)
            finally:
                self._stepping = False

    def shard(self, name: str, coordinate: int | Mapping[str, int] | tuple[int, ...], trip: int = 0) -> Array:
        """One core's block of a tensor: for a variable its current value, for any other tensor that of the last step.

        Args:
          name: of a variable, an input, or any tensor of the program, such as "ffn/relu"; the tensor itself; or "%3" as
            in the listing of the program, which has a name for partial sums and each copy under another sharding.
          coordinate: of the core: its number, a tuple in the order of the mesh's axes, or a dict of axis to index.
          trip: which of the times that loops compute the tensor, from 0.
        Returns: a copy of the block, local shape, in the tensor's dtype. Intermediate values are those of the last
          step, computed again from the arrays that were fed; these must still hold what they held.
        Raises: FeedError for an unknown name, or where no step has been run; LayoutError for a core outside the mesh.
        Example:
          >>> import numpy as np
          >>> import meshlib as mtf
          >>> with mtf.Graph():
          ...     x = mtf.input("x", [mtf.Dimension("batch", 4)])
          ...     program = mtf.lower({"y": mtf.reduce_sum(mtf.square(x))}, mesh="rows:2", layout="batch:rows")
          >>> sim = mtf.simulate(program)
          >>> _ = sim.step(x=np.arange(4.0))
          >>> sim.shard("square", 1), sim.shard("%2", 1), sim.shard("reduce_sum", 1)
          (array([4., 9.], dtype=float32), array(13., dtype=float32), array(14., dtype=float32))
        """
        core, name = self._core(coordinate), str(getattr(name, "name", name))
        if name in self.state:
            whole = self.state[name]
            value = self.program.variables.get(name)
            return whole if value is None else whole[value.sharding.slices(core)]
        with self.state.lock:
            return intermediate(self._last_step("shard", name, trip), name, self.program.mesh.device(core), trip)

    def ring(self, name: str, coordinate: int | Mapping[str, int] | tuple[int, ...] = 0, trip: int = 0) -> RingRun:
        """The collective that produced a tensor in the last step, step by step round the ring of its replica group.

        Args:
          name: of the tensor, or "%3" as in the listing of the program.
          coordinate: a core of the group, as for `shard`.
          trip: which of the times that loops compute it.
        Returns: `hardware.ring_steps.RingRun`: print it, show it in a notebook, `.plot(step)`, `.save("ring.gif")`.
        Raises: as `shard`; FeedError for a tensor that no collective brings.
        Example:
          >>> import numpy as np
          >>> import meshlib as mtf
          >>> with mtf.Graph():
          ...     x = mtf.input("x", [mtf.Dimension("batch", 4), mtf.Dimension("d", 2)])
          ...     y = mtf.reduce_sum(x, output_shape=[x.shape.dims[1]])
          ...     program = mtf.lower({"y": y}, mesh="rows:2", layout="batch:rows")
          >>> sim = mtf.simulate(program)
          >>> _ = sim.step(x=np.arange(8.0).reshape(4, 2))
          >>> print(sim.ring("reduce_sum").steps[1])
          step 1, reduce_scatter, receivers add blocks: 0 > 1: block 1, 1 > 0: block 0
            node 0   12*   .
            node 1   .     16*
        """
        core, name = self._core(coordinate), str(getattr(name, "name", name))
        with self.state.lock:
            return ring_of(self._last_step("ring", name, trip), name, self.program.mesh.device(core), trip)

    def _core(self, coordinate: Any) -> tuple[int, ...]:
        mesh = self.program.mesh
        return (
            mesh.coordinate(int(coordinate)) if isinstance(coordinate, int | np.integer) else mesh.checked(coordinate)
        )

    def _last_step(self, what: str, name: object, trip: int) -> LastStep:
        whole_number(trip, what, "trip", low=0)
        if not isinstance(name, str):
            raise FeedError(f"{at(what)}: name must be the name of a tensor, got {name!r:.80}")
        if self._last is None:
            hint = f"other tensors have values {self.intermediates}"
            raise FeedError(f"{at(what)}: '{name}' is not a variable; {hint}{nearest(name, self.state)}")
        return self._last

    def _run(self, program: Program, given: Mapping[str, Any]) -> dict[str, Array]:
        if program is not self.program:
            self._declare(program)
        fed = fed_arrays(program, given)
        step = self.state.arrays[STEP]
        engine = Engine(self.seed, int(step), program.precision == "highest", self.executor == "exact")
        last = LastStep(program, fed, dict(self.state.arrays), engine)
        self._last = None
        with np.errstate(all="ignore"):  # overflow and NaN are ordinary values here; the NaN report looks for them
            outputs, updates = self._execute(program, fed, engine)
            if self.check_nan:
                self._check_nan(program, fed, engine, outputs, updates)
        results = {
            name: np.array(y, dtype=program.outputs[name].tensor.dtype.public, copy=True) for name, y in outputs.items()
        }
        counted = {STEP: step + np.int32(1)} if program.counts_steps else {}
        for name, y in updates.items():
            self._without_nan.pop(name, None)
            if self.check_nan:
                self._without_nan[name] = y
        self.state.arrays.update({**updates, **counted})  # in one call, so that an interrupt leaves all or nothing
        self._last = last if program is self.program else None
        return results

    def _declare(self, program: Program) -> None:
        variables = {name: v.tensor.operation for name, v in program.variables.items() if name != STEP}
        self.state.declare(variables)

    def _execute(
        self, program: Program, feeds: Mapping[str, Array], engine: Engine
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        if self.executor == "exact":
            return run_exact(program, self.state.arrays, feeds, engine)
        if id(program) not in self._ready:
            self._ready[id(program)] = FastExecutor(program)
        if next(reversed(self._ready)) != id(program):
            self._ready[id(program)].forget()
        self._ready.move_to_end(id(program))
        while len(self._ready) > READY_PROGRAMS:
            self._ready.popitem(last=False)
        return self._ready[id(program)].step(self.state.arrays, feeds, engine)

    def _check_nan(
        self,
        program: Program,
        feeds: Mapping[str, Array],
        engine: Engine,
        outputs: Mapping[str, Array],
        updates: Mapping[str, Array],
    ) -> None:
        bad = [f"output '{n}'" for n, y in outputs.items() if _has_nan(y)]
        changed = {n: self._unchecked(program, n, y) for n, y in updates.items()}
        bad += [f"the new value of variable '{n}'" for n, parts in changed.items() if any(map(_has_nan, parts))]
        if bad:
            raise NotFiniteError(f"{bad[0]} became NaN: {self._find_nan(program, feeds, engine)}")

    def _unchecked(self, program: Program, name: str, new_value: Array) -> list[Array]:
        """The parts of a variable that a step wrote, if the rest was checked before; otherwise all of it."""
        before, executor = self.state.arrays[name], self._ready.get(id(program))
        if executor is None or self._without_nan.get(name) is not before:
            return [new_value]
        return executor.changed_parts(before, new_value)

    def _find_nan(self, program: Program, feeds: Mapping[str, Array], engine: Engine) -> str:
        """Run the step again, core by core, up to the first value that is not finite."""
        for what, arrays in (("feed", feeds), ("variable", self.state.arrays)):
            for name, x in arrays.items():
                if _has_nan(x):
                    where = np.argwhere(np.isnan(x))[0].tolist()
                    return f"{what} '{name}' holds a NaN, first at index {where}"
        reports: list[str] = []

        def watch(instruction: Instruction, value: Value, blocks: Blocks) -> None:
            if reports or not value.tensor.dtype.is_float:
                return
            for device, block in enumerate(blocks):
                if not np.isfinite(block).all():
                    at = program.mesh.coordinate(device)
                    core = ", ".join(f"{a}={i}" for a, i in zip(program.mesh.axes, at, strict=True))
                    kind = "a NaN" if np.isnan(block).any() else "an infinity"
                    reports.append(f"{instruction.operation} first makes {kind}, on core {device} ({core})")
                    return

        ordered = Engine(engine.seed, engine.step, engine.highest, in_order=False)
        run_exact(program, self.state.arrays, feeds, ordered, watch)
        return reports[0] if reports else "only in the fast executor's order of addition"


def _has_nan(x: Array) -> bool:
    # The sum of an array with a NaN is NaN; without one it rarely is (infinities of both signs).
    return x.dtype.kind == "f" and bool(np.isnan(np.add.reduce(x, axis=None))) and bool(np.isnan(x).any())
