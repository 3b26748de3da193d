"""Program: what one core runs. Instructions on local shapes, in their final order, collectives explicit.

A `Program` is plain data. Every pass returns a new one, and `meshlib.program.checker` recomputes every type and
sharding of it. One device's instructions are every device's instructions: only offsets differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from layouts import LayoutRules, Mesh, Sharding
from layouts.plan import Step
from meshlib.graph import Operation, Tensor, TensorType
from meshlib.operation import Work
from meshlib.program.exchange import Exchange, busiest_bytes

if TYPE_CHECKING:
    from meshlib.program.memory import Memory

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "collective_permute")


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """A tensor under one sharding: what an instruction makes. Compared by identity."""

    tensor: Tensor
    sharding: Sharding

    @property
    def local(self) -> TensorType:
        """Shape and dtype of one device's block."""
        return TensorType(self.sharding.local_shape, self.tensor.dtype)

    @property
    def local_bytes(self) -> int:
        """Bytes of one device's block, without padding. Exact."""
        return self.sharding.local_size * self.tensor.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.tensor.dtype}{self.sharding}"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why data moves: on whose behalf, because of which dim, and how it could be avoided."""

    op: str
    dim: str | None
    why: str
    avoid: str
    source: str
    phase: str


@dataclass(frozen=True, eq=False, slots=True)
class Instruction:
    """One step of the program.

    opcode      the operation's name, or that of a collective, or "slice" for a local cut by a reshard
                "to_host" and "from_host" copy their operand's block between the device and its host's memory:
                `outputs[0].local_bytes` over PCIe, sums of which are `Program.to_host_bytes` and `from_host_bytes`
    operation   what it computes, or on whose behalf it moves data
    assignment  computations: (axis, factor) for each mesh axis that splits the work
    steps       reshards: one per operand (a merged collective has several), with one Reason each
    exchanges   what moves inside a computation along a split dim, with one Reason each
    group       fusion group: values used inside one group only never reach HBM
    body        a Program run `trips` times on the operands; `carries` are (body input, body output) names: after
                each trip the output becomes the input; `slices` are body inputs that take one index of the loop's dim
                of their operand, `stacks` body outputs that are stacked along it; `body.inputs` has the operands' order
    """

    opcode: str
    operation: Operation
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    region: str
    assignment: tuple[tuple[str, str], ...] = ()
    steps: tuple[Step, ...] = ()
    reasons: tuple[Reason, ...] = ()
    group: int = -1
    body: Program | None = None
    trips: int = 1
    carries: tuple[tuple[str, str], ...] = ()
    slices: tuple[str, ...] = ()
    stacks: tuple[str, ...] = ()
    exchanges: tuple[Exchange, ...] = ()

    @property
    def trip_order(self) -> range:
        """The indices of the loop's dim in the order of the trips."""
        return range(self.trips)[:: -1 if self.operation.attrs["reverse"] else 1]

    def slice_axis(self, name: str) -> int:
        """Where the loop's dim stands in the operand that the body input `name` takes slices of."""
        assert self.body is not None
        operand = self.inputs[list(self.body.inputs).index(name)]
        return operand.tensor.shape.index(self.operation.attrs["dim"].name)

    @property
    def is_collective(self) -> bool:
        """Whether devices talk to each other here."""
        return self.opcode in COLLECTIVES

    @property
    def is_reshard(self) -> bool:
        """Whether this moves or cuts a value instead of computing one."""
        return bool(self.steps)

    def with_group(self, group: int) -> Instruction:
        """The same in a fusion group."""
        return replace(self, group=group)


@dataclass(frozen=True, slots=True)
class Collective:
    """One value's part in one collective. All figures are exact.

    `payload_bytes` is the operand on one device; `sent_bytes` what a device sends on a ring (for a permute the
    busiest sender); both for one run, of which there are `count` in a step. Small collectives that were merged
    share a `launch`.
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


@dataclass(frozen=True, eq=False)
class Program:
    """What every core runs, for one mesh and layout.

    `inputs`, `variables` map names to their values; `outputs` and `updates` name what is fetched and written back.
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
    is_body: bool = False  # of a loop: its carries may be pending sums

    def with_instructions(self, instructions: list[Instruction]) -> Program:
        """The same program with other instructions: what a pass returns."""
        return replace(self, instructions=tuple(instructions))

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective, in order, with its bytes and its reason."""
        return tuple(_collectives(self.instructions, 1, itertools.count()))

    @property
    def sent_bytes(self) -> int | float:
        """Bytes that the busiest device sends in one run of the program, all collectives together. Exact.

        Less than those of the collectives add up to where different devices are the busiest: of two blocks that send
        each other their margins, each sends one.
        """
        moving = list(_moving(self.instructions, 1))
        rings = sum(step.sent_bytes * times for i, times in moving for step in i.steps)
        return rings + busiest_bytes((e, times) for i, times in moving for e in i.exchanges)

    @cached_property
    def to_host_bytes(self) -> int:
        """Bytes that a device copies to the memory of its host in one run, loops included. Exact."""
        return _copied(self, "to_host")

    @cached_property
    def from_host_bytes(self) -> int:
        """Bytes that a device copies back from the memory of its host in one run, loops included. Exact."""
        return _copied(self, "from_host")

    @cached_property
    def memory(self) -> Memory:
        """Peak bytes per device, by kind, with the values live at the peak. Exact for this order."""
        from meshlib.program.memory import measure

        return measure(self)

    @cached_property
    def work(self) -> Work:
        """What one core does in one run of the program, duplicates included. Exact."""
        from meshlib.program.work import local_work

        all_work = [local_work(self, i) for i in self.instructions]
        return Work(
            sum(w.mxu_flops for w in all_work),
            sum(w.vpu_ops for w in all_work),
            sum(w.hbm_bytes for w in all_work),
        )

    def __str__(self) -> str:
        from meshlib.program.listing import listing

        return listing(self)


def _copied(program: Program, opcode: str) -> int:
    total = 0
    for i in program.instructions:
        if i.opcode == opcode:
            total += i.outputs[0].local_bytes
        elif i.body is not None:
            total += i.trips * _copied(i.body, opcode)
    return total


def _moving(instructions: tuple[Instruction, ...], times: int) -> Iterator[tuple[Instruction, int]]:
    """The instructions of a program and of its loops, with how often they run."""
    for i in instructions:
        yield i, times
        if i.body is not None:
            yield from _moving(i.body.instructions, times * i.trips)


def _collectives(instructions: tuple[Instruction, ...], times: int, launches: Iterator[int]) -> Iterator[Collective]:
    for instruction in instructions:
        if instruction.body is not None:
            yield from _collectives(instruction.body.instructions, times * instruction.trips, launches)
        for exchange, reason in zip(
            instruction.exchanges, instruction.reasons if instruction.exchanges else (), strict=True
        ):
            x = instruction.inputs[max(exchange.operand, 0)]
            yield _collective(exchange, reason, x, times, next(launches))
        if not instruction.is_collective:
            continue
        launch = next(launches)
        for value, step, reason in zip(instruction.inputs, instruction.steps, instruction.reasons, strict=True):
            yield _collective(step, reason, value, times, launch)


def _collective(moved: Step | Exchange, reason: Reason, x: Value, times: int, launch: int) -> Collective:
    return Collective(
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


def bytes_text(n: int | float) -> str:
    """Bytes for people: 1536 -> '1.5 KiB'.

    >>> bytes_text(512), bytes_text(1536), bytes_text(3 * 2**20)
    ('512 B', '1.5 KiB', '3 MiB')
    """
    size = float(n)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.4g} {unit}"
        size /= 1024
    raise AssertionError("unreachable")
