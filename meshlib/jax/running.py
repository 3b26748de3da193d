"""`on_jax`: the interface of a simulation on real devices."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from copy import copy
from statistics import median
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import meshlib.jax.rows  # registers the library's rows  # noqa: F401
from hardware.slices import Slice
from meshlib.core.arguments import at, flag
from meshlib.core.arguments import whole as whole_number
from meshlib.core.engine import Engine
from meshlib.core.errors import GraphError, NotFiniteError
from meshlib.core.slices import slice_for
from meshlib.core.text import seconds_text
from meshlib.estimation import estimate
from meshlib.estimation.views.profile import Measured
from meshlib.jax.asynchronous import Results, Stopwatch
from meshlib.jax.measuring import known_slice
from meshlib.jax.placing import HostArray, place, whole
from meshlib.jax.processes import JaxProcesses
from meshlib.jax.profiling import measure
from meshlib.jax.settings import by_default
from meshlib.jax.step import Prints, Step, StepResult
from meshlib.ops.control.sources import STEP
from meshlib.ops.movement.indexing import index_fault
from meshlib.program.records import Program, require_program
from meshlib.simulation import READY_PROGRAMS, Simulation, State
from meshlib.simulation.state import fed_arrays

TIMED_STEPS = 100  # steps whose median is the step time
EXACT_CORES = 16  # largest mesh on which the exact executor locates a NaN


def on_jax(
    program: Program,
    devices: Sequence[Any] | None = None,
    seed: int = 0,
    checked: bool = True,
    slice: Any = None,
    executable: Any = None,
) -> OnJax:
    """Run a program on JAX devices, with the interface of `simulate` and the same numbers up to rounding.

    One `shard_map` runs the program's instructions, with its own collectives. In several processes
    (`jax.distributed.initialize()` first) each makes the same calls with the same feeds.

    Args:
      program: a program returned by `mtf.lower`.
      devices: a list of JAX devices in the order of the mesh, the last axis fastest; by default all.
      seed: of initial values and random numbers, which are those of a simulation.
      checked: indices out of range and NaN raise an error and leave the state unchanged, for which two copies of it
        exist during a step. False donates the state to the step, does not detect NaN, and yields NaN for an index out
        of range, never another element. Steps then run asynchronously, and results are awaited when they are read,
        except for programs that print or call Python functions, and with several processes.
      slice: the devices as a slice (name or Slice), for the estimate beside the measured times (`print(run)`); by
        default as JAX describes them. `mtf.measure_chip` returns a chip for any devices.
      executable: a file of `mtf.compile_for(program, ...).save(path)` for these devices and this JAX, loaded instead of
        compiling. Such a step does not check, and needs `checked=False`. Like every executable that JAX loads it may
        run any code: load only files that you trust.
    Raises: ProgramError for too few devices, an executable of another program or device, float64 without JAX's own
      switch for it, or an operation without a row (see `meshlib.jax.row`); MissingError without JAX.
    Example:
      >>> import numpy as np
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [mtf.Dimension("batch", 4)])
      ...     program = mtf.lower({"total": mtf.reduce_sum(x)})
      >>> float(mtf.on_jax(program).step(x=np.arange(4.0))["total"])
      6.0
    """
    require_program(program, "on_jax")
    seed = whole_number(seed, "on_jax", "seed")
    slice_ = None if slice is None else slice_for("on_jax", program.mesh, slice)
    checked = flag(checked, "on_jax", "checked")
    if executable is not None and checked:
        raise GraphError(f"{at('on_jax')}: a compiled step checks neither NaN nor indices: also give checked=False")
    return OnJax(program, devices, seed, checked, slice_, executable)


class DeviceState(State):
    """Variables on devices, sharded as the program requires; read and assigned as whole arrays."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.places: dict[str, NamedSharding] = {}
        self._join()

    def _join(self) -> None:
        if jax.process_count() > 1:
            self.processes = JaxProcesses(self.arrays)

    def stored(self, name: str) -> HostArray:
        if name == STEP:
            return self.arrays[name]
        return whole(self.arrays[name]).astype(self.slots[name].dtype.storage)

    def copy_to(self, name: str, out: HostArray) -> None:
        np.copyto(out, whole(self.arrays[name]), casting="unsafe")

    def put(self, name: str, array: HostArray) -> None:
        if name in self.slots and name in self.places:
            self.arrays[name] = place(array, self.slots[name].dtype, self.places[name])
        else:
            self.arrays[name] = array

    def __getstate__(self) -> dict[str, Any]:
        with self.lock, by_default():
            arrays = {n: x.copy() for n, x in self.arrays.items()}
        return {"seed": self.seed, "arrays": arrays, "slots": dict(self.slots), "places": dict(self.places)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._join()


class OnJax(Simulation):
    """The variables of a program on JAX devices; see `on_jax`. `print(run)` shows measured and estimated step time.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     w = mtf.variable("w", "d:2", 1.0)
      ...     run = mtf.on_jax(mtf.lower({"w": w}, [mtf.assign(w, w * 2)]))
      >>> run.step()["w"].tolist(), run.state["w"].tolist()
      ([1.0, 1.0], [2.0, 2.0])
    """

    runs_several = True
    intermediates = "in mtf.simulate(program), not on devices"

    def __init__(
        self,
        program: Program,
        devices: Sequence[Any] | None,
        seed: int,
        checked: bool,
        slice: Slice | None,
        executable: Any = None,
    ) -> None:
        self.program, self.seed, self.checked = program, seed, checked
        self.executor, self.check_nan = "jax", checked
        self.devices = devices
        self.executable = executable
        self.seconds: dict[int, deque[float]] = {}  # by id of the program, for cached steps
        self.state: DeviceState = DeviceState(seed)
        self._steps: OrderedDict[int, Step] = OrderedDict()
        self._stepping = False
        self.stopwatch = Stopwatch()
        self._declare(program)
        self.slice = slice or known_slice(self.mesh_devices)

    def __str__(self) -> str:
        mesh = self.compiled().mesh
        first = mesh.devices.flat[0]
        there = f"{mesh.size} x {first.device_kind} ({first.platform}), mesh {self.program.mesh}"
        if self.step_seconds is None:
            return there
        lines = [f"{there}: {seconds_text(self.step_seconds)} a step, measured; median of {len(self._taken())}"]
        if self.slice is not None:
            est = estimate(self.program, self.slice)
            ratio = self.step_seconds / est.step_seconds
            lines.append(
                f"  {seconds_text(est.step_seconds)} modelled for {self.slice.name}; measured / modelled {ratio:.2f}"
            )
        return "\n".join(lines)

    @property
    def step_seconds(self) -> float | None:
        """Seconds per step of the run's own program, from host arrays to results on the host; None before the first.

        The median of the last steps, without compilation and the first step. Asynchronous steps (`checked=False`) count
        with their mean since the last reading, and reading waits for them.
        """
        seconds = self.stopwatch.seconds()
        if seconds is not None:
            self._timed(self.program, seconds)
        taken = self._taken()
        return median(taken) if taken else None

    @property
    def mesh_devices(self) -> list[Any]:
        """The devices of the program's mesh, the last axis fastest."""
        return list(self.compiled().mesh.devices.flat)

    def _taken(self) -> list[float]:
        return list(self.seconds.get(id(self.program), ()))

    def __copy__(self) -> OnJax:
        twin = object.__new__(OnJax)
        changed = {
            "state": copy(self.state),
            "seconds": {},
            "stopwatch": Stopwatch(),
            "_stepping": False,
            "_steps": self._steps.copy(),
        }
        vars(twin).update(vars(self) | changed)
        return twin

    def __deepcopy__(self, memo: object) -> OnJax:
        return copy(self)  # the program and its compiled steps are shared: they are immutable

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise GraphError(
            f"{at('on_jax')}: a run on devices can't be pickled with its arrays; mtf.save(run, path) writes "
            "them, and mtf.load(path, run) reads them into another run"
        )

    def compiled(self, program: Program | None = None) -> Step:
        """The compiled step of a program on these devices; by default the run's own program."""
        chosen = self.program if program is None else program
        if id(chosen) not in self._steps:
            given = self.executable if chosen is self.program else None
            self._steps[id(chosen)] = Step(chosen, self.devices, self.checked, given)
        self._steps.move_to_end(id(chosen))
        while len(self._steps) > READY_PROGRAMS:
            self.seconds.pop(self._steps.popitem(last=False)[0], None)
        return self._steps[id(chosen)]

    def profile(self, feeds: Mapping[str, Any], steps: int = 3) -> Measured:
        """Time the instructions of a step with JAX's profiler; the state stays as it is.

        Args:
          feeds: the inputs of a step, by name.
          steps: number of steps to profile, with the same feeds; the figures are means.
        Returns: a `Measured`: print it, or `est.profile(measured)` for a comparison with the estimate.
        Raises: GraphError for bad arguments, FeedError as a step, ProgramError where JAX's profiler does not run.
        Example:
          >>> import numpy as np
          >>> import meshlib as mtf
          >>> with mtf.Graph():
          ...     x = mtf.input("x", [mtf.Dimension("batch", 4), mtf.Dimension("d", 4)])
          ...     program = mtf.lower({"y": mtf.exp(x)})
          >>> mtf.on_jax(program).profile({"x": np.ones((4, 4))}).by("kind").keys()
          dict_keys(['exp'])
        """
        if not isinstance(feeds, Mapping):
            raise GraphError(f"{at('profile')}: feeds must be arrays by name, got {type(feeds).__name__} {feeds!r:.80}")
        count = whole_number(steps, "profile", "steps", low=1)
        twin = copy(self)
        twin._run(self.program, feeds)
        return measure(self.compiled(), lambda: twin._run(self.program, feeds), count)

    def rows_here(self, program: Program | None = None) -> HostArray | None:
        """As `Simulation.rows_here`."""
        of = self.program if program is None else program
        here: HostArray | None = None
        for name, sharding in self.compiled(of).inputs.items():
            sizes = of.inputs[name].tensor.shape.sizes
            if not sizes or (here is not None and len(here) != sizes[0]):
                return None
            here = np.zeros(sizes[0], bool) if here is None else here
            for index in sharding.addressable_devices_indices_map(sizes).values():
                if index is not None:
                    here[index[0]] = True
        return None if here is None or here.all() else here

    def several(self, feeds: Sequence[Mapping[str, Any]]) -> list[dict[str, HostArray]] | None:
        """As `Simulation.several`, with the steps in one `lax.scan`."""
        with self.state.lock, by_default():
            return self._scanned(feeds)

    def _declare(self, program: Program) -> None:
        for name, sharding in self.compiled(program).variables.items():
            self.state.places.setdefault(name, sharding)
        super()._declare(program)

    @by_default()
    def _run(self, program: Program, given: Mapping[str, Any]) -> dict[str, HostArray]:
        if program is not self.program:
            self._declare(program)
        fed = fed_arrays(program, {n: whole(x) if _has_numbers(x) else x for n, x in given.items()})
        step, arrays = self.compiled(program), self.state.arrays
        warm = step.compile_seconds > 0
        _ = step.compiled
        begun = time.perf_counter()
        number = int(arrays[STEP])
        feeds = {n: place(x, program.inputs[n].tensor.dtype, step.inputs[n]) for n, x in fed.items()}
        outputs = step(self._resharded_state(step), feeds, number, step.keys(self.seed))
        waits = self.checked or step.calls_host or jax.process_count() > 1
        if waits:
            jax.block_until_ready(outputs)
            step.raise_faults()
            self._check(program, step, outputs, fed)
            _show(step.prints, outputs.prints)
        # program order; JAX sorts by name
        dtypes = {n: v.tensor.dtype.public for n, v in program.outputs.items()}
        results: dict[str, HostArray] = Results({n: outputs.outputs[n] for n in dtypes}, dtypes)
        if waits:
            results = dict(results)
        counted = {STEP: np.asarray(number + 1, np.int32)} if program.counts_steps else {}
        back = {n: _moved(y, self.state.places[n]) for n, y in outputs.updates.items()}
        arrays.update({**back, **counted})
        if warm and waits:
            self._timed(program, time.perf_counter() - begun)
        elif warm and program is self.program:
            self.stopwatch.dispatched(begun, outputs.checks)
        return results

    def _timed(self, program: Program, seconds: float) -> None:
        self.seconds.setdefault(id(program), deque(maxlen=TIMED_STEPS)).append(seconds)

    def _scanned(self, feeds: Sequence[Mapping[str, Any]]) -> list[dict[str, HostArray]] | None:
        program, step, arrays = self.program, self.compiled(), self.state.arrays
        if step.prints:
            return None
        fed = [fed_arrays(program, {n: whole(x) if _has_numbers(x) else x for n, x in one.items()}) for one in feeds]
        stacked = {}
        for n, v in program.inputs.items():
            sharding = NamedSharding(step.mesh, PartitionSpec(None, *step.inputs[n].spec))
            stacked[n] = place(np.stack([one[n] for one in fed]), v.tensor.dtype, sharding)
        number = int(arrays[STEP])
        warm, begun = step.has_several(len(fed)), time.perf_counter()
        results = step.several(self._resharded_state(step), stacked, number, step.keys(self.seed), len(fed))
        results = jax.block_until_ready(results)
        wrong = (step.checks or step.watched) and whole(results.checks)[..., 0].any()
        if step.faults or wrong:
            step.faults.clear()
            return None
        outputs = {n: whole(results.outputs[n]).astype(v.tensor.dtype.public) for n, v in program.outputs.items()}
        counted = {STEP: np.asarray(number + len(fed), np.int32)} if program.counts_steps else {}
        arrays.update({n: _moved(y, self.state.places[n]) for n, y in results.updates.items()})
        arrays.update(counted)
        if warm:
            self._timed(program, (time.perf_counter() - begun) / len(fed))
        return [{n: y[k] for n, y in outputs.items()} for k in range(len(fed))]

    def _resharded_state(self, step: Step) -> dict[str, Any]:
        """The state, resharded for a step."""
        return {n: _moved(self.state.arrays[n], sharding) for n, sharding in step.variables.items()}

    def _check(self, program: Program, step: Step, results: StepResult, fed: Mapping[str, HostArray]) -> None:
        """Raise the error found by the checks of any device."""
        if not (step.checks or step.watched):
            return
        rows = whole(results.checks)
        wrong = rows[:, :, 0].max(axis=0)
        for n in np.flatnonzero(wrong):
            if n < len(step.checks):
                raise index_fault(step.checks[n], int(rows[:, n, 1].min()))
            what = step.watched[n - len(step.checks)]
            raise NotFiniteError(f"{what} became NaN: {self._origin(program, fed)}")

    def _origin(self, program: Program, fed: Mapping[str, HostArray]) -> str:
        """The operation with the first NaN, if the program is small enough to run again core by core."""
        if program.mesh.size > EXACT_CORES:
            return f"its {program.mesh.size} cores are too many to run one by one; simulate it on a smaller mesh"
        sim = Simulation(program, None, self.seed, "exact", True)
        sim.state.arrays.update({n: self.state.stored(n) for n in self.state.arrays})
        engine = Engine(self.seed, int(sim.state.arrays[STEP]), program.precision == "highest", False)
        with np.errstate(all="ignore"):
            return sim._find_nan(program, fed, engine)


def _has_numbers(x: Any) -> bool:
    """True if a value is a JAX array other than random keys."""
    return isinstance(x, jax.Array) and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)


def _moved(x: Any, sharding: NamedSharding) -> Any:
    """An array under another sharding; through the host if devices of other processes are involved."""
    if not isinstance(x, jax.Array) or x.sharding == sharding:
        return x
    if x.is_fully_addressable and sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    held = whole(x)
    return jax.make_array_from_callback(held.shape, sharding, lambda index: held[index])


def _show(prints: Sequence[Prints], printed: Sequence[Any]) -> None:
    """Print the program's output in program order."""
    for p, arrays in zip(prints, printed, strict=True):
        if p.inside:
            held = jax.tree.map(whole, arrays)
            for trip in p.order:
                _show(p.inside, jax.tree.map(lambda x, trip=trip: x[trip], held))
        else:
            assert p.operation.opdef.show is not None
            p.operation.opdef.show(
                p.operation, [whole(x).astype(v.tensor.dtype.storage) for x, v in zip(arrays, p.values, strict=True)]
            )
