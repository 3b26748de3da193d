"""PartitionSpecs of a program, for user code under plain `jit`; and the bytes that XLA's partitioner then sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import meshlib.jax.rows  # registers the library's rows  # noqa: F401
from meshlib.core.errors import GraphError, nearest
from meshlib.core.graph import FORWARD
from meshlib.core.text import bytes_text
from meshlib.jax.context import Array, Reported, TraceContext
from meshlib.jax.executor import Executor
from meshlib.jax.hlo import sent_bytes
from meshlib.jax.imported_specs import argument_shardings, compiled, graph_of, specs_of
from meshlib.jax.placing import device_mesh, spec_of
from meshlib.jax.settings import by_default
from meshlib.jax.step import platform_of
from meshlib.jax.table import storage
from meshlib.lowering import lower
from meshlib.ops.control.sources import STEP
from meshlib.program.instructions import Instruction, Loop, Value
from meshlib.program.records import Program, require_program, walk

Specs = dict[str, PartitionSpec]


@dataclass(frozen=True)
class PartitionSpecs:
    """The sharding of a program's arrays in JAX terms: by name, a PartitionSpec over the axes of the program's mesh.

    variables, inputs, outputs  by their names
    values                      results of forward operations, by the operations' names: see `constrain`
    unsaid                      for an imported program, split dims that no spec can express: see `note`

    For an imported program these are specs of the function's own arrays, and `shardings(*args)` returns them in the
    structure of its arguments; there are no `values`, since none has a name given by the user.
    """

    program: Program = field(repr=False)
    variables: Specs
    inputs: Specs
    outputs: Specs
    values: Specs
    unsaid: tuple[str, ...] = ()

    def mesh(self, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
        """The program's mesh over JAX devices."""
        return device_mesh(self.program.mesh, devices)

    def shardings(self, *args: Any, devices: Sequence[Any] | None = None) -> tuple[Any, ...]:
        """Shardings of an imported function's arguments, for `jax.device_put` and `jax.jit(in_shardings=...)`.

        Args:
          args: the arguments as `mtf.from_jax` took them, arrays or shapes.
          devices: JAX devices for the mesh; all that there are unless given.
        Returns: for each argument a tree of NamedShardings, of no axes where the program does not know the array.
        Raises: GraphError if the program was not imported.
        """
        graph = graph_of(self.program)
        if graph is None:
            raise GraphError("shardings: the program was not imported from JAX; use .variables, .inputs and .mesh()")
        return argument_shardings(graph, self.variables | self.inputs, self.mesh(devices), args)

    def constrain(self, name: str, x: Any) -> Any:
        """`jax.lax.with_sharding_constraint` with the spec of the value `name`, under the current mesh.

        Raises: GraphError for a name that forward does not compute.
        """
        if name not in self.values:
            raise GraphError(f"constrain: forward computes no '{name}'{nearest(name, self.values)}")
        return lax.with_sharding_constraint(x, self.values[name])

    def xla_sent_bytes(self, devices: Sequence[Any] | None = None) -> float:
        """Bytes that a device sends per step on rings if XLA partitions this program by these specs.

        Compiles the unsharded program with the specs on variables, inputs, outputs and values, and reads the
        collectives off the result: exact for the compiler at hand, which needs as many devices as the mesh has.
        Of an imported program it is the function itself, or it and its gradient, as the program's outputs are, under
        plain `jit` with the specs on arguments and results.
        """
        return sent_bytes(_compiled(self, devices).as_text())

    def note(self, devices: Sequence[Any] | None = None) -> str:
        """A sentence that compares the bytes sent by XLA with those of the program."""
        theirs, ours = self.xla_sent_bytes(devices), self.program.sent_bytes
        ratio = f", {theirs / ours:.2f} times as many" if ours else ""
        text = (
            f"under jit with these specs XLA sends {bytes_text(theirs)} a device and step{ratio} as the program "
            f"({bytes_text(ours)})"
        )
        return "; ".join((text, *self.unsaid))

    def __str__(self) -> str:
        parts = (("variables", self.variables), ("inputs", self.inputs), ("outputs", self.outputs))
        return "\n".join(f"{kind}\n" + "\n".join(f"  {n}: {s}" for n, s in specs.items()) for kind, specs in parts)


def partition_specs(program: Program) -> PartitionSpecs:
    """The layout of a program as PartitionSpecs, for unchanged models under plain `jit`.

    Args:
      program: a program returned by `mtf.lower`.
    Returns: specs by name, with `constrain(name, x)` for values, and `note()` on the bytes that XLA will send: its
      partitioner may choose other collectives than the program.
    Raises: GraphError if `program` is not a program; MissingError without JAX.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [mtf.Dimension("batch", 8), mtf.Dimension("k", 4)])
      ...     w = mtf.variable("w", [mtf.Dimension("k", 4), mtf.Dimension("hidden", 6)])
      ...     y = mtf.einsum([x, w], name="y")
      >>> specs = mtf.partition_specs(mtf.lower({"y": y}, mesh="rows:2;cols:2", layout="batch:rows;hidden:cols"))
      >>> tuple(specs.variables["w"]), tuple(specs.values["y"])
      ((None, 'cols'), ('rows', 'cols'))
    """
    require_program(program, "partition_specs")
    values: Specs = {}
    for i, _, _ in walk(program):
        if i.operation.region == FORWARD:
            for y in i.outputs:
                if not y.sharding.pending and not y.margins and y.tensor.name not in program.variables:
                    values.setdefault(y.tensor.name, spec_of(y.sharding))

    def of(named: Mapping[str, Value]) -> Specs:
        return {n: spec_of(v.sharding) for n, v in named.items()}

    graph = graph_of(program)
    if graph is None:
        return PartitionSpecs(program, of(program.variables), of(program.inputs), of(program.outputs), values)
    shardings_by_kind = specs_of(graph, program)
    specs = {kind: {name: s.spec for name, s in named.items()} for kind, named in shardings_by_kind.items()}
    unsaid = [
        f"{name}: no spec says that {', '.join(s.unsaid)} {'is' if len(s.unsaid) == 1 else 'are'} split within an axis"
        for named in shardings_by_kind.values()
        for name, s in named.items()
        if s.unsaid
    ]
    return PartitionSpecs(program, specs["variables"], specs["inputs"], specs["outputs"], {}, tuple(unsaid))


class _Constrained(Executor):
    """Interprets the unsharded program, with each value constrained to its sharding."""

    def __init__(self, context: TraceContext, specs: PartitionSpecs, mesh: jax.sharding.Mesh) -> None:
        super().__init__(context)
        self.specs, self.jax_mesh = specs, mesh

    def results(
        self,
        program: Program,
        i: Instruction,
        inputs: Sequence[Array],
        values: Mapping[Value, Array],
        context: TraceContext,
    ) -> list[Array]:
        outputs = list(super().results(program, i, inputs, values, context))
        if isinstance(i, Loop):
            return outputs
        return [self._bound(y.tensor.name, x) for y, x in zip(i.outputs, outputs, strict=True)]

    def _bound(self, name: str, x: Array) -> Array:
        spec = self.specs.values.get(name)
        if spec is None or len(spec) > x.ndim:
            return x
        return lax.with_sharding_constraint(x, NamedSharding(self.jax_mesh, spec))


@by_default()
def _compiled(specs: PartitionSpecs, devices: Sequence[Any] | None) -> Any:
    program, mesh = specs.program, specs.mesh(devices)
    graph = graph_of(program)
    by_kind = {"variables": specs.variables, "inputs": specs.inputs, "outputs": specs.outputs}
    own = None if graph is None else compiled(graph, program, by_kind, mesh)
    if own is not None:
        return own
    whole = lower(*program.asked, precision=program.precision)
    platform = platform_of(mesh)

    def step(state: dict[str, Array], feeds: dict[str, Array]) -> Any:
        keys = {i.operation.name: np.zeros(2, np.uint32) for i, _, _ in walk(whole)}
        number = state.get(STEP, np.int32(0))
        context = TraceContext(whole.mesh, platform, program.precision == "highest", number, keys, Reported())
        values = _Constrained(context, specs, mesh).run(whole, whole.given(state, feeds), context)
        return {n: values[v] for n, v in whole.outputs.items()}, {n: values[v] for n, v in whole.updates.items()}

    def placed(named: Mapping[str, Value], among: Mapping[str, Value]) -> dict[str, NamedSharding]:
        return {n: NamedSharding(mesh, spec_of(among[n].sharding) if n in among else PartitionSpec()) for n in named}

    def shaped(named: Mapping[str, Value], among: Mapping[str, Value]) -> dict[str, Any]:
        where = placed(named, among)
        return {
            n: jax.ShapeDtypeStruct(v.tensor.shape.sizes, storage(v.tensor.dtype), sharding=where[n])
            for n, v in named.items()
        }

    out = placed(whole.outputs, program.outputs), placed(whole.updates, program.variables)
    arguments = shaped(whole.variables, program.variables), shaped(whole.inputs, program.inputs)
    return jax.jit(step, out_shardings=out).lower(*arguments).compile()
