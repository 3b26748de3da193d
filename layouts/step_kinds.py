"""The kinds of reshard steps, one record each: effect on a sharding, bytes on a ring, reason in words.

A mesh axis splits a dim, or is pending (a reduction over it is outstanding), or is free (blocks are replicated along
it). A step moves its axes from one of these places to another. With k devices in a group and a payload of b bytes, a
device sends on a ring

                        takes     puts      bytes
    all_gather          split     free      (k-1) b
    reduce_scatter      pending   split     (k-1)/k b
    all_reduce          pending   free      2 (k-1)/k b
    all_to_all          split     split     (k-1)/k b
    collective_permute  -         -         b: blocks change devices, numbers of blocks do not
    slice               free      split     0
    mask                free      pending   0

Planner, checker, executors, estimates and tables use these records. Timing is in `hardware.collective_kinds`, the JAX
implementation in `meshlib.jax.collectives`.

Source: Chan et al., "Collective communication: theory, practice, and experience", 2007 (bytes of rings).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType

from layouts.errors import LayoutError
from layouts.sharding import Axes, Sharding, laid


class Place(Enum):
    """The role of a mesh axis in a sharding."""

    SPLIT = "split"
    PENDING = "pending"
    FREE = "free"


@dataclass(frozen=True, slots=True)
class Wording:
    """Reason of a step and how to avoid it: templates over the names of tensor, user, maker, dims and axes."""

    why: str
    avoid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKind:
    """A kind of step: a collective or a local operation.

    Attributes:
      name: such as "all_gather".
      takes, puts: places of its axes before and after; None for a kind that moves whole blocks.
      ring_parts: group size k -> amount that a device sends on a ring, in k-ths of its operand; 0 for local steps.
      wording: reason of a necessary step.
      optional_wording: reason of a step that the consumer could do without at the cost of more bytes in total.
      compiled_why: reason of a step in a compiled program.
      aliases: other names in compiled programs.
    Example:
      >>> ALL_REDUCE.sent_bytes(1024, 4), ALL_GATHER.sent_bytes(1024, 4)
      (1536, 3072)
    """

    name: str
    takes: Place | None
    puts: Place | None
    ring_parts: Callable[[int], int]
    wording: Wording
    optional_wording: Wording | None = None
    compiled_why: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def is_local(self) -> bool:
        """True if devices do not communicate: the axes were free."""
        return self.takes is Place.FREE

    @property
    def reduces(self) -> bool:
        """True if it reduces pending axes."""
        return self.takes is Place.PENDING

    @property
    def scatters(self) -> bool:
        """True if it reduces, and leaves each device a part."""
        return self.reduces and self.puts is Place.SPLIT

    @property
    def sums_in_place(self) -> bool:
        """True if it reduces, and leaves each device a block of the operand's size."""
        return self.reduces and self.puts is Place.FREE

    @property
    def gathers(self) -> bool:
        """True if blocks become larger, so that the result is the larger side."""
        return self.takes is Place.SPLIT and self.puts is Place.FREE

    @property
    def exchanges(self) -> bool:
        """True if axes move from one dim to another."""
        return self.takes is Place.SPLIT and self.puts is Place.SPLIT

    @property
    def permutes(self) -> bool:
        """True if whole blocks change devices."""
        return self.takes is None

    @property
    def rearranges(self) -> bool:
        """True if elements change devices and blocks keep their size."""
        return self.exchanges or self.permutes

    def sent_bytes(self, payload_bytes: int, group: int) -> int | float:
        """Bytes that a device sends on a ring of `group` devices for an operand of `payload_bytes`. Exact."""
        numerator = self.ring_parts(group) * payload_bytes
        return numerator / group if numerator % group else numerator // group

    def larger_bytes(self, payload_bytes: int, group: int) -> int:
        """Bytes of the larger of operand and result, which determines network cost."""
        return payload_bytes * group if self.gathers else payload_bytes

    def check(self, before: Sharding, after: Sharding, axes: Axes, dim: str | None, to_dim: str | None) -> None:
        """Check that a step of this kind leads from one sharding to another.

        Raises: LayoutError if its axes are not in the place that it takes them from, or the result differs.
        Example:
          >>> here = Sharding("n:8", "x:4", [("x",)])
          >>> ALL_GATHER.check(here, here.with_axes([()]), ("x",), "n", None)
          >>> ALL_REDUCE.check(here, here, ("x",), None, None)
          Traceback (most recent call last):
          layouts.errors.LayoutError: all_reduce over ('x',), but pending is ()
        """
        if self.permutes:
            if (before.block_counts, before.pending) != (after.block_counts, after.pending):
                raise LayoutError(f"{self.name} can't turn {before} into {after}: blocks or pending axes differ")
            return
        splits, pending = self._taken(before, axes, dim)
        if self.puts is Place.SPLIT:
            at = before.shape.index((to_dim if self.takes is Place.SPLIT else dim) or "")
            splits = (*splits[:at], splits[at] + axes, *splits[at + 1 :])
        elif self.puts is Place.PENDING:
            pending = (*pending, *((a, "sum") for a in axes))
        expected = laid(before.shape, before.mesh, splits, pending)
        if expected != after:
            raise LayoutError(f"{self.name} over {axes} yields {expected}, not {after}")

    def _taken(self, s: Sharding, axes: Axes, dim: str | None) -> tuple[tuple[Axes, ...], tuple[tuple[str, str], ...]]:
        """The axes of each dim and the pending ones, without those that the step takes."""
        if self.takes is Place.FREE:
            if not s.split_axes.isdisjoint(axes) or not {*s.pending_axes}.isdisjoint(axes):
                raise LayoutError(f"{self.name} over {axes}, over which {s} is not whole")
            return s.axes, s.pending
        if self.takes is Place.PENDING:
            if not set(axes) <= {*s.pending_axes}:
                raise LayoutError(f"{self.name} over {axes}, but pending is {s.pending}")
            return s.axes, tuple([pair for pair in s.pending if pair[0] not in axes])
        if dim is None:
            return self._without_minor(s, axes), s.pending
        at = s.shape.index(dim)
        if s.axes[at][-len(axes) :] != axes:
            raise LayoutError(f"{self.name} takes the minor-most axes {axes} of '{dim}', which has {s.axes[at]}")
        return (*s.axes[:at], s.axes[at][: -len(axes)], *s.axes[at + 1 :]), s.pending

    def _without_minor(self, s: Sharding, axes: Sequence[str]) -> tuple[Axes, ...]:
        """The axes of each dim without these, which must be the minor-most ones of their dims."""
        left = tuple([tuple([a for a in entry if a not in axes]) for entry in s.axes])
        gone = [entry[len(rest) :] for entry, rest in zip(s.axes, left, strict=True)]
        minor = all(entry[: len(rest)] == rest for entry, rest in zip(s.axes, left, strict=True))
        if not minor or sorted(a for entry in gone for a in entry) != sorted(axes) or sum(map(bool, gone)) < 2:
            raise LayoutError(f"{self.name} takes the minor-most axes {tuple(axes)} of several dims of {s}")
        return left


_REDUCTION = "{maker} {reduces} {dims}, split over {axes}: every core holds a partial {noun}{gradient}"
_COMPILED_REDUCTION = "partial {sums} of {maker}, which {reduces} a dim that is split over {axes}"

ALL_GATHER = StepKind(
    name="all_gather",
    takes=Place.SPLIT,
    puts=Place.FREE,
    ring_parts=lambda k: (k - 1) * k,
    wording=Wording(
        "{user} needs all of dim '{dim}' of '{tensor}', which is split over {axes}",
        "split '{dim}' over other axes ({rules}), or use it as it is split",
    ),
    optional_wording=Wording(
        "{user} could run split by '{dim}', as '{tensor}' is over {axes}; gathering it sends the fewest bytes overall",
        "split '{dim}' over other axes ({rules}), or mtf.constrain its result",
    ),
    compiled_why="{tensor} is split over {axes}{along}; {user} needs all of it",
)
REDUCE_SCATTER = StepKind(
    name="reduce_scatter",
    takes=Place.PENDING,
    puts=Place.SPLIT,
    ring_parts=lambda k: k - 1,
    wording=Wording(
        _REDUCTION + "; '{dim}' is wanted split over {axes}, so each core keeps its part of the {noun}",
        "leave {dims} unsplit over {axes} ({rules})",
    ),
    compiled_why=_COMPILED_REDUCTION + "; each device keeps its slice",
)
ALL_REDUCE = StepKind(
    name="all_reduce",
    takes=Place.PENDING,
    puts=Place.FREE,
    ring_parts=lambda k: 2 * (k - 1),
    wording=Wording(_REDUCTION, "leave {dims} unsplit over {axes} ({rules})"),
    compiled_why=_COMPILED_REDUCTION,
)
ALL_TO_ALL = StepKind(
    name="all_to_all",
    takes=Place.SPLIT,
    puts=Place.SPLIT,
    ring_parts=lambda k: k - 1,
    wording=Wording(
        "{user} needs '{tensor}' split by '{to_dim}' over {axes}, where it is split by '{dim}'",
        "keep one of '{dim}' and '{to_dim}' on {axes} throughout ({rules})",
    ),
    compiled_why="{tensor} changes the dim that is split over {axes}, for {user}",
    aliases=("ragged_all_to_all",),
)
COLLECTIVE_PERMUTE = StepKind(
    name="collective_permute",
    takes=None,
    puts=None,
    ring_parts=lambda k: k,
    wording=Wording(
        "{user} needs the blocks of '{tensor}' in the order of {after}, not {before}",
        "name the axes of its dims in one order everywhere ({rules})",
    ),
    compiled_why="blocks of {tensor} pass between devices along {axes}, for {user}",
    aliases=("collective_broadcast", "one_to_one"),
)
_PART = Wording("{user} needs a part of '{tensor}' only; each core keeps its own", "costs nothing")
SLICE = StepKind(name="slice", takes=Place.FREE, puts=Place.SPLIT, ring_parts=lambda _: 0, wording=_PART)
MASK = StepKind(name="mask", takes=Place.FREE, puts=Place.PENDING, ring_parts=lambda _: 0, wording=_PART)

# By name, in the order in which the planner lists moves; ties go to the first.
STEP_KINDS: Mapping[str, StepKind] = MappingProxyType({
    kind.name: kind
    for kind in (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL, COLLECTIVE_PERMUTE, SLICE, MASK)
})  # fmt: skip
COLLECTIVES = tuple([name for name, kind in STEP_KINDS.items() if not kind.is_local])


@cache
def kinds_from(takes: Place | None, puts: Place | None) -> tuple[StepKind, ...]:
    """The kinds that move axes from one place to another.

    >>> [kind.name for kind in kinds_from(Place.PENDING, Place.FREE)]
    ['all_reduce']
    """
    return tuple([kind for kind in STEP_KINDS.values() if (kind.takes, kind.puts) == (takes, puts)])
