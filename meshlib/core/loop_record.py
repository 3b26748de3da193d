"""The record of a loop: body, carries, trips; read by gradients and lowering in place of attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from layouts import Dimension

if TYPE_CHECKING:
    from meshlib.core.graph import Graph, Tensor

T = TypeVar("T")


class LoopOperands(NamedTuple, Generic[T]):
    """One of something per operand of a loop: carries before the first trip, what is sliced, what else is taken."""

    inits: Sequence[T]
    slices: Sequence[T]
    captured: Sequence[T]


class LoopResults(NamedTuple, Generic[T]):
    """One of something per output of a loop: carries after the last trip and what the user stacks; then, stacked for
    gradients alone, the carries before each trip and what the policy of rematerialisation keeps."""

    finals: Sequence[T]
    stacks: Sequence[T]
    befores: Sequence[T]
    saved: Sequence[T]


@dataclass(frozen=True)
class Active:
    """Which indices of a dim the trips of a loop work on: the stages of a pipeline, of which some are idle.

    What a trip makes at other indices of `dim` is no part of any sum and of nothing that is used. Devices that hold
    such indices compute them all the same, since all run one program; who simulates need not.

    dim       name of the dim, which values of the body have
    indices   per index of the loop's dim those that work, in ascending order
    size      of the dim
    note      the same in words
    whole     numbers of the carries of which all indices count in every trip, as of what only passes through stages
    """

    dim: str
    indices: tuple[tuple[int, ...], ...]
    size: int
    note: str = ""
    whole: tuple[int, ...] = ()

    @property
    def share(self) -> float:
        """The part of all work that counts."""
        return sum(map(len, self.indices)) / (self.size * len(self.indices))

    def runs(self, trip: int) -> list[tuple[int, int]]:
        """The indices that work in a trip, as runs [begin, end).

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
    """What makes a loop of one trip a branch of the body around: a device leaves it out where it has nothing to do.

    The indices of `active.dim` that work in a trip of the loop around are those of which `LoopRecord.working` holds. A
    device that has none of them keeps the carries as they are, and stacks zeros; of what is computed at other indices
    nothing may be used.

    kind      what it computes, by the name that the loop's `Timing` knows
    active    which indices work in which trip of the loop around
    """

    kind: str
    active: Active

    @property
    def together(self) -> bool:
        """Whether in each trip all indices work or none: then all devices leave it out together."""
        return all(len(row) in (0, self.active.size) for row in self.active.indices)


class Timing(Protocol):
    """How long the trips of a loop take whose branches run on different devices at different times."""

    @property
    def summary(self) -> str:
        """The schedule in a line."""
        ...

    def loop_seconds(self, branches: Mapping[str, float], rest: float) -> tuple[float, float]:
        """Seconds of all trips, and how many of them a device is idle on average.

        Args:
          branches: seconds of one run of each branch, by its kind.
          rest: seconds of what else is in a trip.
        """
        ...


@dataclass(frozen=True, eq=False)
class LoopRecord:
    """A body that is run once per index of a dim: `op.loop` of a loop, None of every other operation.

    dim       what the loop goes over
    reverse   whether from the last index to the first
    body      the graph of one trip
    given     what stands in the body for each operand
    made      the values of the body behind each output
    kept      of `made.saved`, the values themselves, which may be copied to the host to be saved
    needs     which operands the body computes with, by number: the others led to what it is given, and matter to
              gradients alone
    active    which indices of a dim of the values inside count in which trip; None: all
    working   the same as a value of the body, a slice of a table
    going     the number of the carry that says whether another trip runs, where that is no matter of the dim alone
    branch    of a loop of one trip that devices may leave out
    timing    of a loop whose branches run at different times on different devices
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
        """How many values go from trip to trip."""
        return len(self.given.inits)

    @property
    def stand_ins(self) -> tuple[Tensor, ...]:
        """`given`, in the order of the operands."""
        return tuple(t for part in self.given for t in part)

    @property
    def results(self) -> tuple[Tensor, ...]:
        """The values of the body that the user returned: the carries after a trip, then what is stacked."""
        return (*self.made.finals, *self.made.stacks)

    @property
    def stacked(self) -> tuple[Tensor, ...]:
        """The values of the body that are stacked, for the user or for gradients, in the order of the outputs."""
        return (*self.made.stacks, *self.made.befores, *self.made.saved)

    @property
    def trip_order(self) -> range:
        """The indices of `dim` in the order of the trips."""
        return range(self.dim.size)[:: -1 if self.reverse else 1]

    def operands(self, parts: Sequence[T]) -> LoopOperands[T]:
        """One thing per operand, told apart by what the operand is to the loop."""
        count, stop = self.carries, self.carries + len(self.given.slices)
        return LoopOperands(parts[:count], parts[count:stop], parts[stop:])

    def outputs(self, parts: Sequence[T]) -> LoopResults[T]:
        """One thing per output, told apart by what the output is."""
        count, result_count = self.carries, len(self.results)
        return LoopResults(
            parts[:count],
            parts[count:result_count],
            parts[result_count : result_count + count],
            parts[result_count + count :],
        )
