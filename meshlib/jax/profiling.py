"""Measured time of each instruction of a step, from JAX's profiler.

The profiler times the operations of the compiled module on each device. Operations carry the named scope that they come
from (`meshlib.jax.hlo.scopes`), and the executor names scopes after the instructions of the program's listing. A fusion
of XLA counts for the instruction of its root operation. A collective's time includes waiting for other devices.

On a CPU the operations are XLA's thunks, all devices share its cores, and profiling slows the step down.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from meshlib.core.errors import ProgramError
from meshlib.estimation.views.profile import Measured
from meshlib.jax.hlo.scopes import module_name, scope_in, scopes
from meshlib.jax.step import Step
from meshlib.program.instructions import Commit, Loop, Resident
from meshlib.program.records import Program, walk

Key = tuple[str, str, str, str]


class TimedOperation(NamedTuple):
    """One execution of an operation on one device; nanoseconds."""

    name: str
    begin: float
    end: float


def measure(step: Step, run: Callable[[], object], steps: int) -> Measured:
    """Run `steps` steps of a compiled program under the profiler.

    Raises: ProgramError where JAX's profiler runs already, or reports no operations of the devices.
    """
    text = step.compiled.as_text()
    with tempfile.TemporaryDirectory() as folder:
        try:
            jax.profiler.start_trace(folder, profiler_options=_options())
        except RuntimeError as fault:
            raise ProgramError(f"profile: JAX's profiler does not start: {fault}") from None
        begun = time.perf_counter()
        try:
            for _ in range(steps):
                run()
            taken = (time.perf_counter() - begun) / steps
        finally:
            jax.profiler.stop_trace()
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        with warnings.catch_warnings():
            # JAX 0.11 ends the process where this warning of its own is turned into an error.
            warnings.simplefilter("ignore", DeprecationWarning)
            lines = [list(_timed(*line, module_name(text))) for file in files for line in _lines(file)]
    if not any(lines):
        raise ProgramError(f"profile: JAX's profiler reports no operations of {step.mesh.devices.flat[0].device_kind}")
    own = len([d for d in step.mesh.devices.flat if d.process_index == jax.process_index()])
    paths, keys = scopes(text), _keys(step.program)
    seconds: dict[Key, float] = defaultdict(float)
    other = 0.0
    for line in lines:
        for name, nanoseconds in alone(line).items():
            if name not in paths:
                continue  # a loop, whose operations are timed separately
            share = nanoseconds * 1e-9 / own / steps
            scope = scope_in(paths[name], keys)
            if scope is None:
                other += share
            else:
                seconds[keys[scope]] += share
    first = step.mesh.devices.flat[0]
    return Measured(taken, dict(seconds), other, f"{step.mesh.size} x {first.device_kind}", steps)


def _options() -> Any:
    """Trace device operations only: tracing Python calls would slow the step."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    return options


def _lines(file: Path) -> Iterator[tuple[bool, Any]]:
    """(whether it lists XLA operations of a TPU, line) for every thread and stream of a trace."""
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            yield plane.name.startswith("/device:TPU") and line.name == "XLA Ops", line


def _timed(on_tpu: bool, line: Any, module: str) -> Iterator[TimedOperation]:
    """The module's operations on one thread or stream."""
    for event in line.events:
        if event.name.startswith("end: "):
            continue
        if on_tpu:
            yield TimedOperation(event.name.lstrip("%").partition(" = ")[0], event.start_ns, event.end_ns)
            continue
        about = dict(event.stats)
        if about.get("hlo_module") == module and "hlo_op" in about:
            yield TimedOperation(str(about["hlo_op"]), event.start_ns, event.end_ns)


def alone(events: Sequence[TimedOperation]) -> dict[str, float]:
    """Nanoseconds of each operation of a thread, without operations nested in it.

    >>> alone([TimedOperation("call", 0, 10), TimedOperation("dot", 2, 8), TimedOperation("add", 10, 11)])
    {'call': 4.0, 'dot': 6.0, 'add': 1.0}
    """
    taken: dict[str, float] = defaultdict(float)
    around: list[TimedOperation] = []
    for event in sorted(events, key=lambda e: (e.begin, -e.end)):
        while around and around[-1].end <= event.begin:
            around.pop()
        taken[event.name] += event.end - event.begin
        if around:
            taken[around[-1].name] -= min(event.end, around[-1].end) - event.begin
        around.append(event)
    return dict(taken)


def _keys(program: Program) -> dict[str, Key]:
    """Scope of an instruction -> (name, kind, line, phase)."""
    key_of: dict[str, Key] = {}
    for i, _, _ in walk(program):
        if not isinstance(i, Resident | Commit | Loop):
            source = i.transfers[0].reason.source if i.is_collective and i.transfers else i.operation.source
            key_of.setdefault(i.scope, (i.scope, i.opcode, source, i.region))
    return key_of
