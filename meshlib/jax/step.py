"""One step of a program as a compiled JAX function: one jit of one shard_map."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding, PartitionSpec

from meshlib.core.errors import ProgramError
from meshlib.core.graph import Operation
from meshlib.core.initializers import make_key
from meshlib.jax.context import Array, Reported, TraceContext
from meshlib.jax.executables import jax_versions, read_executable
from meshlib.jax.executor import Executor
from meshlib.jax.placing import between_steps, device_mesh, spec_of
from meshlib.jax.settings import by_default
from meshlib.jax.table import row_of, storage
from meshlib.ops.control.sources import STEP
from meshlib.ops.pointwise.random import NUMBERED, RANDOM, stream_of
from meshlib.program.instructions import Compute, Loop, Value
from meshlib.program.records import Program, walk


class Prints(NamedTuple):
    """Values printed by a program, in program order: arrays of an operation, or the prints of a loop's body."""

    operation: Operation
    values: tuple[Value, ...]
    inside: tuple[Prints, ...]
    order: range


class StepResult(NamedTuple):
    """Result of a step: fetched outputs, new values of variables, values to print, and checks of each device."""

    outputs: dict[str, Array]
    updates: dict[str, Array]
    prints: list[Any]
    checks: Array


class Step:
    """A program, its devices, and the compiled function.

    checked  whether NaN is detected, and old arrays of variables survive until the caller drops them; otherwise the
              arrays of updated variables are donated to the step
    executable  a file of the compiled step, as `Compiled.save` writes it; it is compiled unless given
    """

    def __init__(
        self,
        program: Program,
        devices: Sequence[jax.Device] | None,
        checked: bool,
        executable: str | os.PathLike[str] | None = None,
    ) -> None:
        self.program, self.checked, self.executable = program, checked, executable
        self.mesh = device_mesh(program.mesh, devices)
        self.variables = {n: self.sharding(v) for n, v in program.variables.items() if n != STEP}
        self.inputs = {n: self.sharding(v) for n, v in program.inputs.items()}
        self.drawing = sorted(
            {
                stream_of(i.operation)
                for i, _, _ in walk(program)
                if isinstance(i, Compute) and i.operation.opdef in (RANDOM, NUMBERED)
            }
        )
        self.prints = _prints(program)
        self.calls_host = bool(self.prints) or any(
            isinstance(i, Compute) and i.operation.opdef.name == "slicewise" for i, _, _ in walk(program)
        )
        # subjects of the rows of `StepResult.checks`: operations that check indices, then values watched for NaN
        self.checks: list[Operation] = []
        self.watched: list[str] = []
        self.faults: list[Exception] = []  # exceptions of user functions during a step
        self.compile_seconds = 0.0
        self._lowered: Any = None
        self._compiled: Any = None
        self._several: dict[int, Any] = {}
        self._check_types()

    def sharding(self, v: Value) -> NamedSharding:
        """The JAX sharding of a value: its blocks in the memory of devices or of their hosts."""
        if v.tensor.on_host and platform_of(self.mesh) != "cpu":  # whose memory is the host's
            return NamedSharding(self.mesh, spec_of(v.sharding), memory_kind="pinned_host")
        return NamedSharding(self.mesh, spec_of(v.sharding))

    def keys(self, seed: int) -> np.ndarray[Any, Any]:
        """The random keys of a seed: uint32 [operations that draw, 2]."""
        return np.array([make_key(seed, name) for name in self.drawing], np.uint32).reshape(-1, 2)

    @by_default()
    def lowered(self) -> Any:
        """JAX's lowering of the step, whose `as_text()` shows the compiler's input. Cached until compilation."""
        if self._lowered is None:
            # By platform name, because a process with CPUs alone may compile for a TPU topology.
            named = {"lowering_platforms": ("tpu",)} if platform_of(self.mesh) == "tpu" else {}
            self._lowered = self._jitted().trace(*self._arguments()).lower(**named)
        return self._lowered

    @property
    def compiled(self) -> Any:
        """The compiled step."""
        if self._compiled is None:
            begun = time.perf_counter()
            lowered = self.lowered()
            self._compiled = lowered.compile() if self.executable is None else self._loaded(lowered)
            self._lowered = None
            self.compile_seconds = time.perf_counter() - begun
        return self._compiled

    def __call__(
        self, state: Mapping[str, Array], feeds: Mapping[str, Array], number: int, keys: np.ndarray[Any, Any]
    ) -> StepResult:
        """Run the step; state arrays are sharded as in `variables`, feeds as in `inputs`."""
        changed = {n: state[n] for n in self.program.updates if n != STEP}
        constant = {n: state[n] for n in self.variables if n not in changed}
        outputs, updates, prints, checks = self.compiled(changed, constant, dict(feeds), np.int32(number), keys)
        return StepResult(outputs, updates, prints, checks)

    def has_several(self, count: int) -> bool:
        """True if the function for `count` steps is compiled."""
        return count in self._several

    def several(
        self,
        state: Mapping[str, Array],
        feeds: Mapping[str, Array],
        number: int,
        keys: np.ndarray[Any, Any],
        count: int,
    ) -> StepResult:
        """Run `count` steps without returning to the host; feeds, outputs and checks are stacked."""
        changed = {n: state[n] for n in self.program.updates if n != STEP}
        constant = {n: state[n] for n in self.variables if n not in changed}
        if count not in self._several:
            mapped = self._mapped()

            def run(
                changed: dict[str, Array],
                constant: dict[str, Array],
                feeds: dict[str, Array],
                number: Array,
                keys: Array,
            ) -> tuple[Any, ...]:
                def one(carry: tuple[dict[str, Array], Array], fed: dict[str, Array]) -> tuple[Any, Any]:
                    before, at = carry
                    outputs, updates, _, checks = mapped(before, constant, fed, at, keys)
                    return (updates, at + self.program.counts_steps), (outputs, checks)

                (updates, _), (outputs, checks) = jax.lax.scan(one, (changed, number), feeds, length=count)
                return outputs, updates, [], checks

            self._several[count] = jax.jit(run, donate_argnums=() if self.checked else (0,), **self._results())
        return StepResult(*self._several[count](changed, constant, dict(feeds), np.int32(number), keys))

    def raise_faults(self) -> None:
        """Raise the exception of a user function in the finished step, if any."""
        if self.faults:
            first = self.faults[0]
            self.faults.clear()
            raise first

    def _loaded(self, lowered: Any) -> Any:
        """The executable in the file, loaded on the devices of the mesh."""
        assert self.executable is not None
        devices = list(self.mesh.devices.flat)
        body = read_executable(self.executable, self.program, str(devices[0].device_kind), jax_versions())
        try:
            return serialize_executable.deserialize_and_load(
                body, lowered.in_tree, lowered.out_tree, backend=devices[0].client, execution_devices=devices
            )
        except Exception as fault:
            reason = str(fault).strip().split("\n", 1)[0][:200]
            raise ProgramError(f"on_jax: the devices do not load executable {self.executable}: {reason}") from None

    def _arguments(self) -> tuple[Any, ...]:
        def shaped(v: Value) -> jax.ShapeDtypeStruct:
            place = self.sharding(v)
            return jax.ShapeDtypeStruct(v.tensor.shape.sizes, between_steps(v.tensor.dtype, place), sharding=place)

        variables, updates = self.program.variables, self.program.updates
        changed = {n: shaped(variables[n]) for n in updates if n != STEP}
        constant = {n: shaped(v) for n, v in variables.items() if n != STEP and n not in changed}
        feeds = {n: shaped(v) for n, v in self.program.inputs.items()}
        return changed, constant, feeds, np.int32(0), self.keys(0)

    def _jitted(self) -> Any:
        return jax.jit(self._mapped(), donate_argnums=() if self.checked else (0,), **self._results())

    def _results(self) -> dict[str, Any]:
        """Output shardings, needed if variables are on the host: jit leaves results in device memory."""
        variables = {n: self.program.variables[n] for n in self.program.updates if n != STEP}
        if not any(v.tensor.on_host for v in variables.values()):
            return {}
        return {"out_shardings": (None, {n: self.sharding(v) for n, v in variables.items()}, None, None)}

    def _mapped(self) -> Any:
        p = self.program
        nowhere = PartitionSpec()
        changed = {n: spec_of(p.variables[n].sharding) for n in p.updates if n != STEP}
        constant = {n: spec_of(v.sharding) for n, v in p.variables.items() if n != STEP and n not in changed}
        feeds = {n: spec_of(v.sharding) for n, v in p.inputs.items()}
        outputs = {n: spec_of(v.sharding) for n, v in p.outputs.items()}
        specs_out = (outputs, changed, _print_specs(self.prints, 0), PartitionSpec(tuple(p.mesh.axes)))
        return jax.shard_map(
            self._local,
            mesh=self.mesh,
            in_specs=(changed, constant, feeds, nowhere, nowhere),
            out_specs=specs_out,
            check_vma=False,
        )

    def _local(
        self, changed: dict[str, Array], constant: dict[str, Array], feeds: dict[str, Array], number: Array, keys: Array
    ) -> tuple[Any, ...]:
        """The function that one device runs."""
        p, notes = self.program, Reported(faults=self.faults)
        drawn = {name: keys[n] for n, name in enumerate(self.drawing)}
        platform = platform_of(self.mesh)
        context = TraceContext(p.mesh, platform, p.precision == "highest", number, drawn, notes, self.checked)
        state = {STEP: number, **changed, **constant}
        given = {v: x.astype(storage(v.tensor.dtype)) for v, x in p.given(state, feeds).items()}
        values = Executor(context).run(p, given, context)
        outputs = {n: values[v] for n, v in p.outputs.items()}
        updates = {
            n: values[v].astype(between_steps(v.tensor.dtype, self.sharding(v)))
            for n, v in p.updates.items()
            if n != STEP
        }
        self.checks, self.watched, checks = notes.checked, [], list(notes.checks)
        if self.checked:
            fetched = {f"output '{n}'": y for n, y in outputs.items()}
            fetched |= {f"the new value of variable '{n}'": y for n, y in updates.items()}
            for what, y in fetched.items():
                if jnp.issubdtype(y.dtype, jnp.floating):
                    self.watched.append(what)
                    checks.append(jnp.stack([jnp.any(jnp.isnan(y)).astype(jnp.int32), jnp.int32(0)]))
        rows = jnp.stack(checks) if checks else jnp.zeros((0, 2), jnp.int32)
        return outputs, updates, notes.prints, rows[None]

    def _check_types(self) -> None:
        """Raise an error that lists all dtypes and operations that JAX does not support."""
        faults = []
        if not jax.config.jax_enable_x64:
            wide = {y.tensor.name for i, _, _ in walk(self.program) for y in i.outputs if y.tensor.dtype.itemsize > 4}
            if wide:
                faults.append(
                    f"{', '.join(sorted(wide)[:3])} are float64, which JAX has only after "
                    "jax.config.update('jax_enable_x64', True)"
                )
        for i, _, _ in walk(self.program):
            if isinstance(i, Compute | Loop):
                try:
                    row_of(i.operation)
                except ProgramError as fault:
                    faults.append(str(fault))
        if faults:
            raise ProgramError.listing("on_jax", [*dict.fromkeys(faults)])


def platform_of(mesh: jax.sharding.Mesh) -> str:
    """ "cpu", "gpu" (NVIDIA's), "rocm" or "tpu"."""
    device = mesh.devices.flat[0]
    rocm = "rocm" in str(getattr(device.client, "platform_version", "")).lower()
    return "rocm" if rocm else str(device.platform)


def _prints(program: Program) -> tuple[Prints, ...]:
    prints = []
    for i in program.instructions:
        if isinstance(i, Loop):
            inside = _prints(i.body)
            if inside:
                prints.append(Prints(i.operation, (), inside, i.trip_order))
        elif isinstance(i, Compute) and i.operation.opdef.show is not None and len(i.inputs) > 1:
            prints.append(Prints(i.operation, i.inputs[1:], (), range(1)))
    return tuple(prints)


def _print_specs(prints: Sequence[Prints], loops: int) -> list[Any]:
    return [
        _print_specs(p.inside, loops + 1)
        if p.inside
        else [PartitionSpec(*(None,) * loops, *spec_of(v.sharding)) for v in p.values]
        for p in prints
    ]
