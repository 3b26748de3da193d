"""`Program`: instructions on local shapes in their final order, with explicit collectives.

A `Program` is plain data. Every pass returns a new one, and `meshlib.program.checker` recomputes every type and
sharding of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import is_
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from layouts import LayoutRules, Mesh
from meshlib.core.compiler import XLA_TPU, Compiler
from meshlib.core.errors import GraphError
from meshlib.core.graph import Operation, Tensor
from meshlib.core.opdef import Kind, Work
from meshlib.core.shown import Brief, Shown
from meshlib.core.text import bytes_text, clipped, counted
from meshlib.program.exchanges import busiest_bytes
from meshlib.program.instructions import Compute, Instruction, Loop, Value

if TYPE_CHECKING:
    from meshlib.program.analysis.buffers import Buffer, MemoryPlan
    from meshlib.program.analysis.memory import Memory


T = TypeVar("T")


@dataclass(frozen=True, slots=True, repr=False)
class Collective(Brief):
    """One value's part in a collective. All figures are exact.

    `payload_bytes` is the operand on one device; `sent_bytes` are the bytes that a device sends on a ring (for a
    permute the busiest sender); both for one run, of `count` in a step. Merged small collectives share a `launch`.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.reduce_sum(mtf.input("x", "batch:8;d:4"), reduced_dim="batch")
      ...     program = mtf.lower({"y": y}, mesh="data:4", layout="batch:data")
      >>> c = program.collectives[0]
      >>> c.kind, c.axes, c.payload_bytes, c.sent_bytes, c.count
      ('all_reduce', ('data',), 16, 24, 1)
    """

    kind: str
    axes: tuple[str, ...]
    dim: str | None
    payload_bytes: int
    sent_bytes: int | float
    count: int
    phase: str
    op: str
    tensor: str
    dtype: str
    source: str
    reason: str
    avoid: str
    launch: int

    def __str__(self) -> str:
        over = "+".join(self.axes)
        return f"{self.kind} of {self.tensor} over {over}: {bytes_text(self.payload_bytes)} ({self.reason})"


class Collectives(Shown, tuple[Collective, ...]):
    """All collectives of a program, in order: a tuple that prints as a table.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     program = mtf.lower({"y": mtf.reduce_sum(mtf.input("x", "batch:64"))}, mesh="a:8", layout="batch:a")
      >>> program.collectives
      <1 collective: 7 B sent by each core>
    """

    def __repr__(self) -> str:
        sent = bytes_text(sum(c.sent_bytes * c.count for c in self))
        return f"<{counted(len(self), 'collective')}: {sent} sent by each core>"

    def __str__(self) -> str:
        from meshlib.program.views.listing import collectives_table

        return collectives_table(self)


@dataclass(frozen=True, eq=False, repr=False)
class Program(Shown):
    """The program of every core, for one mesh and layout.

    `inputs`, `variables` map names to values; `outputs` and `updates` name fetched and written-back values.
    `compiler` is the record for which it was lowered, the default of `mtf.estimate`.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.exp(mtf.input("x", "batch:8;d:4"))
      ...     program = mtf.lower({"y": y}, mesh="data:4", layout="batch:data")
      >>> print(program.outputs["y"].sharding, program.sent_bytes)
      [batch:8@data, d:4] 0
    """

    mesh: Mesh
    layout: LayoutRules
    precision: str
    instructions: tuple[Instruction, ...]
    inputs: Mapping[str, Value]
    variables: Mapping[str, Value]
    outputs: Mapping[str, Value]
    updates: Mapping[str, Value]
    counts_steps: bool = False
    notes: tuple[str, ...] = ()
    is_body: bool = False  # whether it is a loop body, whose carries may be pending sums
    excess_bytes: float = 0.0  # gap between the chosen strategies and their lower bound, without loop bodies
    compiler: Compiler = XLA_TPU
    # outputs and updates as they were given to `mtf.lower`; lowering may compute equal tensors in their place
    asked: tuple[Mapping[str, Tensor], Sequence[Operation]] = field(default_factory=lambda: ({}, []))

    @property
    def choice(self) -> Optimality:
        """Upper bound of the gap between the chosen strategies and the optimum, including loops."""
        excess = sum(times * body.excess_bytes for body, times in _bodies(self))
        return Optimality(excess, excess / max(self.sent_bytes, 1) if excess else 0.0)

    @property
    def headline(self) -> str:
        """Mesh and layout in one line."""
        return f"mesh {self.mesh} ({counted(self.mesh.size, 'core')}), layout {self.layout or '(none)'}"

    def given(self, state: Mapping[str, T], feeds: Mapping[str, T]) -> dict[Value, T]:
        """The array given for each input and variable, from the state and the feeds by name."""
        return {v: feeds[n] for n, v in self.inputs.items()} | {v: state[n] for n, v in self.variables.items()}

    def with_instructions(self, instructions: Sequence[Instruction]) -> Program:
        """The program with other instructions, as the result of a pass; itself if they are the same."""
        if len(instructions) == len(self.instructions) and all(map(is_, instructions, self.instructions)):
            return self
        return replace(self, instructions=tuple(instructions))

    @cached_property
    def collectives(self) -> Collectives:
        """All collectives, in order, with bytes and reasons."""
        return Collectives(_collectives(self))

    @cached_property
    def sent_bytes(self) -> int | float:
        """Bytes sent by the busiest device in one run of the program, over all collectives. Exact.

        May be less than the sum over collectives, if their busiest devices differ: for two blocks that exchange halos,
        each sends one.
        """
        rings = sum(times * i.sent_bytes for i, _, times in walk(self) if not i.uneven)
        return rings + busiest_bytes((e, times) for i, _, times in walk(self) for e in i.uneven)

    @cached_property
    def to_host_bytes(self) -> int:
        """Bytes that a device copies to host memory in one run, including loops. Exact."""
        return self._copied(to_host=True)

    @cached_property
    def from_host_bytes(self) -> int:
        """Bytes that a device copies from host memory in one run, including loops. Exact."""
        return self._copied(to_host=False)

    @cached_property
    def last_use(self) -> Mapping[Value, int]:
        """The number of the last instruction that uses each value; for fetched and written-back values the number of
        instructions. Unused values are absent."""
        last = {x: n for n, i in enumerate(self.instructions) for x in i.inputs}
        results = (*self.outputs.values(), *self.updates.values())
        return last | dict.fromkeys(results, len(self.instructions))

    @cached_property
    def dead_after(self) -> Sequence[Sequence[Value]]:
        """Per instruction the values of which it is the last user."""
        last = self.last_use
        return [[x for x in dict.fromkeys(i.inputs) if last[x] == n] for n, i in enumerate(self.instructions)]

    @cached_property
    def memory_plan(self) -> MemoryPlan:
        """Shared buffers with their live ranges, and in-place updates."""
        from meshlib.program.analysis.buffers import plan_buffers

        return plan_buffers(self)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """Shared buffers with their live ranges."""
        return self.memory_plan.buffers

    @cached_property
    def memory(self) -> Memory:
        """Peak bytes per device by kind, with the live values at the peak. Exact for this order."""
        from meshlib.program.analysis.memory import measure

        return measure(self)

    @cached_property
    def work(self) -> Work:
        """Work of one core in one run of the program, including duplicated work. Exact."""
        from meshlib.program.analysis.work import local_work

        done = [(times, local_work(program, i)) for i, program, times in walk(self)]
        return Work(sum(n * w.mxu_flops for n, w in done), sum(n * w.vpu_ops for n, w in done))

    def report(self, path: str | Path, slice: Any, title: str = "") -> None:
        """Write one self-contained HTML page about the program on a slice: `mtf.estimate(program, slice).report(path)`.

        Args:
          path: path of the file, such as "plan.html"; slice: a name like "v5e-256", or a `hardware.Slice`.
          title: title of the page; by default mesh and slice.
        Raises: SliceError for an unknown slice or one of another size than the mesh; GraphError if the path cannot be
          written.
        Example:
          >>> import meshlib as mtf, os, tempfile
          >>> with mtf.Graph():
          ...     program = mtf.lower({"y": mtf.reduce_sum(mtf.input("x", "batch:64"))}, mesh="a:8", layout="batch:a")
          >>> path = os.path.join(tempfile.mkdtemp(), "plan.html")
          >>> program.report(path, "v3-8")
          >>> os.path.getsize(path) < 1e6
          True
        """
        from meshlib.report.page import report_program

        report_program(self, path, slice, title)

    def _copied(self, to_host: bool) -> int:
        done = [(n, i) for i, _, n in walk(self) if isinstance(i, Compute) and i.operation.opdef.kind is Kind.COPY]
        return sum(n * i.outputs[0].local_bytes for n, i in done if i.outputs[0].tensor.on_host == to_host)

    def __repr__(self) -> str:
        sent = f"{counted(len(self.collectives), 'collective')}, {bytes_text(self.sent_bytes)} sent by each core"
        return clipped(f"<Program: {counted(len(self.instructions), 'instruction')}, {sent}; {self.headline}>")

    def __str__(self) -> str:
        from meshlib.program.views.listing import listing

        return listing(self)


class Optimality(NamedTuple):
    """Optimality of the chosen strategies, among programs with at most three copies of a tensor per region, and with
    the strategies for recomputation that `meshlib.lowering.problem` considers.

    excess_bytes  most bytes, of communication and duplicated work, that another choice could save; 0 if optimal
    gap           the same as a share of the bytes that the program sends
    """

    excess_bytes: float
    gap: float

    def __str__(self) -> str:
        return "proved the least" if not self.gap else f"at most {100 * self.gap:.2g} % above the least"


def _bodies(program: Program, times: int = 1) -> Iterator[tuple[Program, int]]:
    """A program and the bodies of its loops, with the number of runs of each."""
    yield program, times
    for i in program.instructions:
        if isinstance(i, Loop):
            yield from _bodies(i.body, i.runs(times))


class Visit(NamedTuple):
    """An instruction, the program or body that contains it, and its number of runs in a step."""

    instruction: Instruction
    program: Program
    times: int


def walk(program: Program, times: int = 1) -> Iterator[Visit]:
    """All instructions in order; those of a loop's body follow the loop, with their numbers of runs."""
    for instruction in program.instructions:
        yield Visit(instruction, program, times)
        if isinstance(instruction, Loop):
            yield from walk(instruction.body, instruction.runs(times))


def _collectives(program: Program) -> Iterator[Collective]:
    launch = 0
    for instruction, _, times in walk(program):
        for moved, x, reason in instruction.transfers:
            yield Collective(
                moved.kind,
                moved.axes,
                reason.dim,
                moved.payload_bytes,
                moved.sent_bytes,
                times,
                reason.phase,
                reason.op,
                x.tensor.name,
                x.tensor.dtype.name,
                reason.source,
                reason.why,
                reason.avoid,
                launch,
            )
            launch += not instruction.is_collective
        launch += instruction.is_collective


def require_program(value: object, what: str) -> None:
    """Raise GraphError, with `what` first, for anything but a `Program`."""
    if not isinstance(value, Program):
        own = getattr(value, "program", None)
        hint = "; write .program of it" if isinstance(own, Program) else ""
        raise GraphError(f"{what}: expected a program from mtf.lower, got {type(value).__name__} {value!r:.80}{hint}")
