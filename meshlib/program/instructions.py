"""The instructions of a program: resident values, computations, collectives, loops, commits.

All devices run the same instructions: only offsets differ. A computation names its operation, a move the operation that
needs it. Bytes sent by any instruction are in `transfers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from layouts import Shape, Sharding
from layouts.plan import Step
from layouts.step_kinds import STEP_KINDS, StepKind
from meshlib.core.graph import Operation, Tensor, TensorType
from meshlib.core.loop_record import LoopRecord
from meshlib.core.opdef import Work
from meshlib.core.text import clipped
from meshlib.program.exchanges import Exchange, Margin, busiest_bytes

if TYPE_CHECKING:
    from meshlib.program.analysis.buffers import Buffer, MemoryPlan
    from meshlib.program.records import Program


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Value:
    """A tensor under one sharding: the result of an instruction. Compared by identity.

    `margins`: halo rows that each block stores besides its own elements.
    """

    tensor: Tensor
    sharding: Sharding
    margins: tuple[Margin, ...] = ()

    @property
    def local_shape(self) -> Shape:
        """The shape of one device's block, margins included."""
        shape = self.sharding.local_shape
        if not self.margins:
            return shape
        for m in self.margins:
            shape = shape.resize(m.dim, shape.dim(m.dim).size + m.before + m.after)
        return shape

    @property
    def local(self) -> TensorType:
        """Shape and dtype of one device's block."""
        return TensorType(self.local_shape, self.tensor.dtype)

    @property
    def local_size(self) -> int:
        """Elements of one device's block."""
        return prod(self.local_shape.sizes) if self.margins else self.sharding.local_size

    @property
    def local_bytes(self) -> int:
        """Bytes of one device's block, without padding. Exact."""
        return self.tensor.dtype.size_bytes(self.local_size)

    def plot(self, ax: Any = None, device: int = 0) -> Any:
        """Plot the blocks of the tensor, of any rank, with that of one device filled; needs matplotlib.

        Args:
          ax: matplotlib Axes, or the path of a file (.png, .svg, .pdf); by default a new figure.
          device: number of the device in the mesh.
        Returns: the Axes.
        Raises: GraphError if matplotlib is missing or the file cannot be written; LayoutError for an invalid device.
        """
        from meshlib.report.plots import plot_sharding

        return plot_sharding(self.sharding, ax, device, "Value.plot")

    def __str__(self) -> str:
        beside = f" with {', '.join(map(str, self.margins))}" if self.margins else ""
        return f"{self.tensor.dtype}{self.sharding}{beside}"

    def __repr__(self) -> str:
        return clipped(f"<Value {self.tensor.name}: {self}>")


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a value is resharded: for which operation, because of which dim, and how to avoid it."""

    op: str
    dim: str | None
    why: str
    avoid: str
    source: str
    phase: str


class Transfer(NamedTuple):
    """One value's part in the bytes sent by an instruction: figures, tensor, and reason."""

    sent: Step | Exchange
    value: Value
    reason: Reason


@dataclass(frozen=True, eq=False, repr=False)
class Instruction:
    """One instruction. `group` is its fusion group: values used only inside one group never reach HBM."""

    operation: Operation
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    region: str
    group: int = field(default=-1, kw_only=True)

    def __repr__(self) -> str:
        operands, results = (", ".join(v.tensor.name for v in values) for values in (self.inputs, self.outputs))
        return clipped(f"<{type(self).__name__} {self.opcode}: {operands} -> {results or self.scope}>")

    @property
    def opcode(self) -> str:
        """The operation's name, the kind of a collective, or "slice" or "mask" for a local step of a reshard."""
        return self.operation.opdef.name

    @property
    def scope(self) -> str:
        """Its name in a profile of a real device, which is its name in the listing."""
        return self.operation.name

    @property
    def is_collective(self) -> bool:
        """True for pure collectives; computations may also contain exchanges."""
        return False

    @property
    def content(self) -> object:
        """Everything on which its validity depends, given valid operands: neither its group nor reasons."""
        return self

    @property
    def transfers(self) -> Sequence[Transfer]:
        """The bytes that devices send each other here."""
        return ()

    @property
    def uneven(self) -> tuple[Exchange, ...]:
        """The transfers of which some devices send more than others."""
        return ()

    @property
    def sent_bytes(self) -> int | float:
        """Bytes sent by the busiest device in one run. Exact."""
        return sum(t.sent.sent_bytes for t in self.transfers)

    def with_group(self, group: int) -> Self:
        """A copy in another fusion group."""
        if group == self.group:
            return self
        copy = object.__new__(type(self))
        vars(copy).update(vars(self), group=group)  # like dataclasses.replace, in a tenth of the time
        return copy


@dataclass(frozen=True, eq=False, repr=False)
class Resident(Instruction):
    """A value that exists before the first instruction: an input or a variable."""


@dataclass(frozen=True, eq=False, repr=False)
class Compute(Instruction):
    """An operation on local blocks.

    assignment  (axis, factor) for each mesh axis that splits the work
    exchanges   exchanges along split dims, with one Reason each

    "to_host" and "from_host" copy their operand's block between the device and its host's memory:
    `outputs[0].local_bytes` over PCIe, sums of which are `Program.to_host_bytes` and `from_host_bytes`.
    """

    assignment: tuple[tuple[str, str], ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    reasons: tuple[Reason, ...] = ()
    work: dict[str, Work] = field(default_factory=dict, init=False, repr=False)  # by precision: see `local_work`

    @property
    def factor_axes(self) -> dict[str, tuple[str, ...]]:
        """Factor -> the mesh axes that split it, major first."""
        axes: dict[str, tuple[str, ...]] = {}
        for axis, factor in self.assignment:
            axes[factor] = (*axes.get(factor, ()), axis)
        return axes

    @property
    def content(self) -> object:
        return self.operation, self.inputs, self.outputs, self.assignment, self.exchanges

    @property
    def uneven(self) -> tuple[Exchange, ...]:
        return self.exchanges

    @property
    def transfers(self) -> Sequence[Transfer]:
        """The exchanges; a summary, computed from all operands, is listed under the first."""
        if not self.exchanges:
            return ()
        pairs = zip(self.exchanges, self.reasons, strict=True)
        return [Transfer(e, self.inputs[max(e.operand, 0)], reason) for e, reason in pairs]

    @property
    def sent_bytes(self) -> int | float:
        """Bytes sent by the busiest device in one run, over all exchanges. Exact."""
        return busiest_bytes((e, 1) for e in self.exchanges) if self.exchanges else 0


@dataclass(frozen=True, eq=False, repr=False)
class Move(Instruction):
    """A step of a reshard: a collective or a local slice, with one step and one Reason per operand.

    A merged collective has several operands. `early`: issued one product earlier, to overlap with that.
    """

    steps: tuple[Step, ...]
    reasons: tuple[Reason, ...]
    early: bool = field(default=False, kw_only=True)

    @property
    def content(self) -> object:
        return self.operation, self.inputs, self.outputs, self.steps

    @property
    def opcode(self) -> str:
        """The kind of the steps."""
        return self.steps[0].kind

    @property
    def step_kind(self) -> StepKind:
        """The record of their kind."""
        return STEP_KINDS[self.steps[0].kind]

    @property
    def scope(self) -> str:
        return f"{self.opcode}:{self.operation.name}"

    @property
    def is_collective(self) -> bool:
        """True if devices communicate, False for a local slice."""
        return not self.steps[0].is_local

    @property
    def transfers(self) -> Sequence[Transfer]:
        """One per operand of a collective."""
        if not self.is_collective:
            return ()
        return [Transfer(*part) for part in zip(self.steps, self.inputs, self.reasons, strict=True)]


@dataclass(frozen=True, eq=False, repr=False)
class Widen(Move):
    """Adds a margin along one dim to the blocks of its operand, for all consumers that need a halo there.

    `by_block` are the bytes that each device along the step's axes sends: blocks at the ends have fewer neighbours.
    """

    by_block: tuple[int, ...] = field(kw_only=True)

    @property
    def content(self) -> object:
        return self

    @property
    def uneven(self) -> tuple[Exchange, ...]:
        (step,) = self.steps
        assert step.dim is not None
        return (Exchange(step.kind, step.axes, step.dim, 0, step.payload_bytes, self.by_block),)


@dataclass(frozen=True, eq=False, repr=False)
class Loop(Instruction):
    """A Program run `trips` times, or while `going` is true; `body.inputs` are in the order of the operands.

    carries  (body input, body output) names: after each trip the output becomes the input
    slices   body inputs that take one index of the loop's dim of their operand
    stacks   body outputs that are stacked along it
    """

    body: Program
    trips: int
    carries: tuple[tuple[str, str], ...]
    slices: tuple[str, ...]
    stacks: tuple[str, ...]

    @property
    def record(self) -> LoopRecord:
        """The loop record of its operation."""
        assert self.operation.loop is not None
        return self.operation.loop

    @property
    def going(self) -> str | None:
        """The body input that is true while the loop continues; None: all `trips` run."""
        return None if self.record.going is None else self.carries[self.record.going][0]

    @cached_property
    def splits_branch(self) -> bool:
        """True if devices skip this branch individually instead of together.

        Individually if each device has one index of the dim and sends nothing to devices with others.
        """
        record = self.record
        if record.branch is None or record.working is None:
            return False
        if record.branch.together:
            return True
        mask = self.body.inputs[record.working.operation.name]
        axes = set(mask.sharding.of(record.branch.active.dim))
        return mask.local_size == 1 and axes.isdisjoint(_axes_of(self.body))

    @cached_property
    def share(self) -> Fraction:
        """The share of trips of the enclosing loop in which the busiest device runs this branch; 1 for other loops."""
        if not self.splits_branch:
            return Fraction(1)
        counts = self._runs_of_indices
        return Fraction(max(counts), len(self.record.branch.active.indices)) if self.record.branch else Fraction(1)

    @property
    def active_share(self) -> float:
        """The useful share of all executed work: for a pipeline, that outside bubbles."""
        record = self.record
        if record.branch is None:
            return 1.0 if record.active is None else record.active.share
        if not self.splits_branch:
            return record.branch.active.share
        counts = self._runs_of_indices
        return sum(counts) / (len(counts) * max(counts)) if max(counts) else 1.0

    @cached_property
    def _runs_of_indices(self) -> list[int]:
        """For a branch, the number of trips of the enclosing loop in which each index of its dim is active."""
        assert self.record.branch is not None
        active = self.record.branch.active
        return [sum(n in row for row in active.indices) for n in range(active.size)]

    def runs(self, times: int) -> int:
        """The number of runs of the body, given that of the enclosing program."""
        return int(times * self.trips * self.share)

    @cached_property
    def memory_plan(self) -> MemoryPlan:
        """Shared buffers with their live ranges during a trip, and in-place updates."""
        from meshlib.program.analysis.buffers import plan_buffers

        return plan_buffers(self.body, self)

    @cached_property
    def rewritten(self) -> dict[str, str]:
        """Stacks that may share the memory of slices: result of the body -> slice that it partially updates."""
        from meshlib.program.analysis.buffers import rewritten_slices

        return rewritten_slices(self)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """Shared buffers with their live ranges during a trip."""
        return self.memory_plan.buffers

    @property
    def trip_order(self) -> range:
        """The indices of the loop's dim in trip order."""
        return range(self.trips)[:: -1 if self.record.reverse else 1]

    def slice_axis(self, name: str) -> int:
        """The axis of the loop's dim in the operand that the body input `name` slices."""
        operand = self.inputs[list(self.body.inputs).index(name)]
        return operand.tensor.shape.index(self.record.dim.name)


def _axes_of(body: Program) -> set[str]:
    """The mesh axes over which a body communicates, including its loops."""
    axes = {axis for i in body.instructions for t in i.transfers for axis in t.sent.axes}
    return axes.union(*(_axes_of(i.body) for i in body.instructions if isinstance(i, Loop)))


@dataclass(frozen=True, eq=False, repr=False)
class Commit(Instruction):
    """Writes the new value of a variable to the state at the end of the step."""

    @property
    def variable(self) -> str:
        """The name of the variable."""
        name: str = self.operation.attrs["variable"]
        return name
