"""Loops: the state of a graph that is a body, and the record of a loop, which gradients and lowering read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from layouts import Dimension

if TYPE_CHECKING:
    from meshlib.core.graph import Graph, Tensor
from dataclasses import field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layouts import Dimension
    from meshlib.core.graph import Graph, Tensor


T = TypeVar("T")


class LoopOperands(NamedTuple, Generic[T]):
    """One value per operand of a loop: initial carries, sliced tensors, captured tensors."""

    inits: Sequence[T]
    slices: Sequence[T]
    captured: Sequence[T]


class LoopResults(NamedTuple, Generic[T]):
    """One value per output of a loop: final carries and the user's stacked values; then, stacked for gradients alone,
    the carries before each trip and the values that the rematerialisation policy keeps."""

    finals: Sequence[T]
    stacks: Sequence[T]
    befores: Sequence[T]
    saved: Sequence[T]


@dataclass(frozen=True)
class Active:
    """The indices of a dim on which each trip of a loop works: the pipeline stages that are not idle.

    Values that a trip computes at other indices of `dim` are never used. Devices that hold such indices compute them
    anyway, since all run one program; a simulation may skip them.

    dim       name of the dim, of values of the body
    indices   per index of the loop's dim the active indices, in ascending order
    size      size of the dim
    note      description in words
    whole     numbers of the carries whose indices are all used in every trip, such as values passed through stages
    """

    dim: str
    indices: tuple[tuple[int, ...], ...]
    size: int
    note: str = ""
    whole: tuple[int, ...] = ()

    @property
    def share(self) -> float:
        """The active share of all work."""
        return sum(map(len, self.indices)) / (self.size * len(self.indices))

    def runs(self, trip: int) -> list[tuple[int, int]]:
        """The active indices of a trip, as runs [begin, end).

        >>> Active("stage", ((0, 1, 3),), 4).runs(0)
        [(0, 2), (3, 4)]
        """
        joined: list[tuple[int, int]] = []
        for n in self.indices[trip]:
            if joined and joined[-1][1] == n:
                joined[-1] = (joined[-1][0], n + 1)
            else:
                joined.append((n, n + 1))
        return joined


@dataclass(frozen=True)
class Branch:
    """Marks a loop of one trip as a branch of the enclosing body: a device skips it when it has no active index.

    `LoopRecord.working` tells which indices of `active.dim` are active in a trip of the enclosing loop. A device
    without an active index keeps the carries unchanged and stacks zeros; values computed at inactive indices must not
    be used.

    kind      name of its computation in the loop's `Timing`
    active    active indices per trip of the enclosing loop
    """

    kind: str
    active: Active

    @property
    def together(self) -> bool:
        """True if in each trip either all indices are active or none: then all devices skip it together."""
        return all(len(row) in (0, self.active.size) for row in self.active.indices)


class StageTask(NamedTuple):
    """One forward or backward run of a pipeline stage on a microbatch in its `repeat`-th round."""

    kind: str
    microbatch: int
    repeat: int = 0


class TimedTask(NamedTuple):
    """A task of one stage, from `start` to `end` in seconds."""

    task: StageTask
    start: float
    end: float


class Timing(Protocol):
    """Duration of a loop whose branches run on different devices in different trips."""

    @property
    def summary(self) -> str:
        """The schedule in one line."""

    def stage_runs(self, branches: Mapping[str, float], rest: float) -> Sequence[Sequence[TimedTask]]:
        """Per stage, its tasks in order of time, from 0 at the start of the loop.

        Args:
          branches: seconds of one run of each branch, by its kind.
          rest: seconds of the remaining work of a trip.
        """


@dataclass(frozen=True, eq=False)
class LoopRecord:
    """A body that runs once per index of a dim: `op.loop` of a loop, None for every other operation.

    dim       the dim that the loop iterates over
    reverse   whether it iterates from the last index to the first
    body      the graph of one trip
    given     the body's stand-in for each operand
    made      the body's value for each output
    kept      the values saved in `made.saved`, before copies to the host
    needs     numbers of the operands that the body computes with: the others matter to gradients alone
    active    active indices of a dim per trip; None: all
    working   `active` as a value of the body, a slice of a table
    going     number of the carry that is true while the loop continues, for loops with a condition
    branch    set for a loop of one trip that devices may skip
    timing    set for a loop whose branches run at different times on different devices
    """

    dim: Dimension
    reverse: bool
    body: Graph
    given: LoopOperands[Tensor]
    made: LoopResults[Tensor]
    kept: tuple[Tensor, ...]
    needs: tuple[int, ...]
    active: Active | None = None
    working: Tensor | None = None
    going: int | None = None
    branch: Branch | None = None
    timing: Timing | None = None

    @property
    def carries(self) -> int:
        """The number of carries."""
        return len(self.given.inits)

    @property
    def stand_ins(self) -> tuple[Tensor, ...]:
        """`given` as one tuple, in operand order."""
        return tuple(t for part in self.given for t in part)

    @property
    def results(self) -> tuple[Tensor, ...]:
        """The body's values that the user returned: carries after a trip, then stacked values."""
        return (*self.made.finals, *self.made.stacks)

    @property
    def stacked(self) -> tuple[Tensor, ...]:
        """The body's values that are stacked, for the user or for gradients, in output order."""
        return (*self.made.stacks, *self.made.befores, *self.made.saved)

    @property
    def trip_order(self) -> range:
        """The indices of `dim` in trip order."""
        return range(self.dim.size)[:: -1 if self.reverse else 1]

    def operands(self, per_operand: Sequence[T]) -> LoopOperands[T]:
        """One value per operand, grouped by the operand's role in the loop."""
        count, stop = self.carries, self.carries + len(self.given.slices)
        return LoopOperands(per_operand[:count], per_operand[count:stop], per_operand[stop:])

    def outputs(self, per_output: Sequence[T]) -> LoopResults[T]:
        """One value per output, grouped by the output's role in the loop."""
        count, result_count = self.carries, len(self.results)
        return LoopResults(
            per_output[:count],
            per_output[count:result_count],
            per_output[result_count : result_count + count],
            per_output[result_count + count :],
        )


@dataclass(eq=False)
class LateCarry:
    """A carry added while the body is traced: its initial value, None for zeros, and its value after a trip.

    around: for a branch, the late carry of the enclosing loop whose new value it computes.
    """

    begin: Tensor | None
    end: Tensor
    around: Tensor | None = None


@dataclass(eq=False)
class LoopBody:
    """State of a graph that is a loop's body.

    Attributes:
      parent: the graph of the loop operation.
      scope_around: the scope around the loop, in which variables created in the body are named: they belong to the
        program, not to the loop.
      captured: outer tensor -> its stand-in in the body.
      outside: stand-in, of a captured or sliced tensor -> the outer tensor.
      late: carries added while the body was traced (`late_carry`), by their stand-ins.
      working: for each index of the dim of `LoopRecord.active`, whether it is active in this trip.
      stacks, stacked: for a loop with a separate variable per trip, the loop's dim, and stacked variable -> its slice
        in the body.
      held, chosen, choices: for a loop over pipeline stages, the leading dims of variables created in the body; each
        trip sees all of them, except for a dim in `chosen`, of which it sees the index given per stage; and variable ->
        its part in a trip.
    """

    parent: Graph
    scope_around: tuple[str, ...] = ()
    captured: dict[Tensor, Tensor] = field(default_factory=dict)
    outside: dict[Tensor, Tensor] = field(default_factory=dict)
    late: dict[Tensor, LateCarry] = field(default_factory=dict)
    working: Tensor | None = None
    stacks: Dimension | None = None
    stacked: dict[Tensor, Tensor] = field(default_factory=dict)
    held: tuple[Dimension, ...] = ()
    chosen: tuple[Dimension, Tensor] | None = None
    choices: dict[Tensor, Tensor] = field(default_factory=dict)

    @property
    def first_dims(self) -> tuple[Dimension, ...]:
        """The leading dims that this loop gives to variables created in its body."""
        return self.held if self.stacks is None else (self.stacks, *self.held)
