"""Fusion groups: which values never reach HBM.

A group runs as one kernel: at most one matmul with element-wise work before and after it, or element-wise work that
ends in a reduction. In reverse order, an instruction joins the group of its users if they are all in one group; it then
runs directly before them, which no dependency can forbid.

A product does not join users that wait for later products if its operands would then stay in memory for longer and are
larger than its result: the gradient of the head's weights runs before the layers' backward pass, even if its user, the
sum with a tied embedding's gradient, runs after it.

A group ends in a reduction, because a user may need the complete result. But a row of a softmax or a norm depends on
that row alone, and rows fit VMEM. So once the order is known, element-wise groups and reductions over minor dims that
read one another are joined: values between them never reach HBM either.

Sums over rows (of a batch norm, of a bias's gradient) need all rows, but nothing in the producing kernel waits for
them: they are accumulated before its blocks leave VMEM, also in a product. Sums of one value without such a producer
share one pass.

Source: openxla/xla multi_output_fusion (a producer with its reductions, and reductions that share an operand).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from meshlib.core.opdef import Kind
from meshlib.program.analysis.stored_values import keeps_rows
from meshlib.program.instructions import Compute, Instruction, Loop, Move, Value
from meshlib.program.records import Program

_FUSIBLE = (Kind.ELEMENTWISE, Kind.VIEW, Kind.SOURCE)
_BY_ROW = (*_FUSIBLE, Kind.REDUCTION)
_OPEN = (*_FUSIBLE, Kind.CONTRACTION, Kind.REDUCTION)  # groups that producers may join
_LIGHT = (*_BY_ROW, Kind.INDEXED)
_STREAMED = (*_BY_ROW, Kind.CONTRACTION)

Kinds: TypeAlias = Mapping[Instruction, Kind | None]  # see `kinds_of`


@dataclass(eq=False)
class FusionGroup:
    """Instructions that run as one kernel, in order."""

    members: list[Instruction] = field(default_factory=list)
    matmuls: int = 0
    reductions: int = 0
    open: bool = False  # whether producers may join


def fusion_groups(program: Program, kinds: Kinds) -> list[list[Instruction]]:
    """The program's instructions as groups, in the order of their last members."""
    pinned = {*program.outputs.values(), *program.updates.values()}
    users: dict[Value, set[int]] = {}
    groups: list[FusionGroup] = []
    rounds = _rounds(program, kinds)
    resident = {*program.inputs.values(), *program.variables.values()}
    for instruction in reversed(program.instructions):
        kind = kinds[instruction]
        joined = None if kind is None else _joinable(kind, instruction.outputs, users, groups, pinned)
        if joined is not None and kind is Kind.CONTRACTION:
            wait = max((rounds.get(x, 0) for i in groups[joined].members for x in i.inputs), default=0)
            read = sum(x.local_bytes for x in instruction.inputs if x not in users and x not in resident)
            if wait > rounds[instruction.outputs[0]] and read > sum(y.local_bytes for y in instruction.outputs):
                joined = None
        if joined is None:
            joined = len(groups)
            groups.append(FusionGroup(open=kind in _OPEN))
        group = groups[joined]
        group.members.append(instruction)
        if isinstance(instruction, Compute) and instruction.exchanges:
            group.open = False  # its operands must be complete before the exchange
        group.matmuls += kind is Kind.CONTRACTION
        group.reductions += kind is Kind.REDUCTION
        for x in instruction.inputs:
            if x in users:
                users[x].add(joined)
            else:
                users[x] = {joined}
    return [g.members[::-1] for g in reversed(groups)]


def _rounds(program: Program, kinds: Kinds) -> dict[Value, int]:
    """Number of consecutive products and loops up to and including the producer of each value."""
    round_of: dict[Value, int] = {}
    for i in program.instructions:
        latest = 0
        for x in i.inputs:
            latest = max(latest, round_of[x])
        latest += kinds[i] is Kind.CONTRACTION or isinstance(i, Loop)
        for y in i.outputs:
            round_of[y] = latest
    return round_of


def kinds_of(program: Program) -> Kinds:
    """The kind of each instruction, local slices counting as views; None for those that are no kernel of their own."""
    return {i: _kind(i) for i in program.instructions}


def _kind(instruction: Instruction) -> Kind | None:
    if isinstance(instruction, Move) and not instruction.is_collective:
        return Kind.VIEW
    if not isinstance(instruction, Compute):
        return None
    kind = instruction.operation.opdef.kind
    # A product with exchanges of its operands is a kernel that others may join.
    return None if instruction.exchanges and kind is not Kind.CONTRACTION else kind


def _joinable(
    kind: Kind, outputs: Sequence[Value], users: Mapping[Value, set[int]], groups: list[FusionGroup], pinned: set[Value]
) -> int | None:
    """The group that contains all users of an instruction's results, if the instruction may join it."""
    if not pinned.isdisjoint(outputs):
        return None
    into = {g for y in outputs if y in users for g in users[y]}
    if len(into) != 1:
        return None
    (number,) = into
    group = groups[number]
    joins = kind in _FUSIBLE or (kind is Kind.CONTRACTION and group.matmuls == group.reductions == 0)
    return number if group.open and joins else None


def numbered(groups: Sequence[Sequence[Instruction]]) -> list[Instruction]:
    """Instructions in group order, each with the number of its group's first instruction."""
    order: list[Instruction] = []
    for group in groups:
        number = len(order)
        order += [i.with_group(number) for i in group]
    return order


def join_rows(groups: Sequence[Sequence[Instruction]], kinds: Kinds) -> list[Sequence[Instruction]]:
    """Merge groups that run row by row together, at the position of the first.

    Independent groups in between that read the same values run first, so that the merged kernel may overwrite these.
    """
    return [group for group in _RowJoiner(groups, kinds).run() if group]


def _totals(group: Sequence[Instruction]) -> set[Value]:
    """Sums over rows, and values of the group that depend on them."""
    totals: set[Value] = set()
    for i in group:
        if not keeps_rows(i) or not totals.isdisjoint(i.inputs):
            totals.update(i.outputs)
    return totals


def _broadcasts_totals(group: Sequence[Instruction], totals: set[Value]) -> bool:
    """True if a group broadcasts its totals, and so reads the summed values a second time."""
    largest = max((y.local_size for i in group if not keeps_rows(i) for y in i.outputs), default=0)
    return any(y in totals and y.local_size > largest for i in group for y in i.outputs)


class _RowJoiner:
    def __init__(self, groups: Sequence[Sequence[Instruction]], kinds: Kinds) -> None:
        self.groups, self.kinds = groups, kinds
        self.joined: list[list[Instruction]] = []
        self.spans: list[tuple[int, int]] = []  # (first, last) original positions of each joined group
        self.open: list[bool] = []  # whether others may join
        self.sums: dict[Value, int] = {}  # value read by a standalone sum -> position of that sum's group
        self.totals: set[Value] = set()  # sums over rows, and dependent values in their groups
        self.maker: dict[Value, tuple[int, Instruction]] = {}
        self.sources: dict[Value, Sequence[Instruction]] = {}  # value -> its group, for groups of sources alone

    def run(self) -> list[Sequence[Instruction]]:
        for n, group in enumerate(self.groups):
            if all(self.kinds[i] is Kind.SOURCE and not i.inputs for i in group):
                # Sources delay nothing: they run right before their first user.
                self.sources.update((y, group) for i in group for y in i.outputs)
                continue
            by_row = all(isinstance(i, Compute) and self.kinds[i] in _BY_ROW for i in group)
            totals = _totals(group) if by_row else set()
            place = self._place(group) if by_row else None
            if totals and not _broadcasts_totals(group, totals):
                place = self._summed_at(group, place)
            if place is None:
                place = len(self.joined)
                self.joined.append([])
                self.spans.append((n, n))
                self.open.append(by_row)
            self.totals |= totals
            self._put(group, place)
            self.spans[place] = self.spans[place][0], n
        return list(self._with_sources())

    def _readers_first(self) -> Iterator[Sequence[Instruction]]:
        """The joined groups in order, each preceded by later groups that read the same values and are independent."""
        groups: list[Sequence[Instruction]] = [*self.joined]
        reads = [{x for i in group for x in i.inputs} for group in groups]
        makes = [[y for i in group for y in i.outputs] for group in groups]
        light = [all(isinstance(i, Compute) and self.kinds[i] in _LIGHT for i in group) for group in groups]
        for place, (_, end) in enumerate(self.spans):
            if not groups[place]:
                continue
            behind = {*makes[place]}
            for later in range(place + 1, len(groups)):
                if self.spans[later][0] > end:
                    break
                alike = light[later] and not reads[later].isdisjoint(reads[place])
                if alike and groups[later] and reads[later].isdisjoint(behind):
                    yield groups[later]
                    groups[later] = []
                elif groups[later]:
                    behind.update(makes[later])
            yield groups[place]

    def _put(self, group: Sequence[Instruction], place: int) -> None:
        self.joined[place] += group
        self.maker.update({y: (place, i) for i in group for y in i.outputs})

    def _place(self, group: Sequence[Instruction]) -> int | None:
        """The group of a group's last operand, if both can run row by row together."""
        read = [self.maker[x] for i in group for x in i.inputs if x in self.maker]
        last = max((place for place, _ in read), default=-1)
        if last < 0 or not self.open[last]:
            return None
        whole = any(place == last and not keeps_rows(i) for place, i in read)
        return None if whole else last

    def _summed_at(self, group: Sequence[Instruction], beside: int | None) -> int | None:
        """Position for sums: in the kernel of the product that they reduce, else `beside` others or sums of one value.

        Operations recomputed by each reader anyway, such as a cast to float32, move with the sums.
        """
        between = [] if beside is None else self.joined[beside]
        if not all(i.operation.opdef.repeated or i.outputs[0] in self.totals for i in between):
            return beside
        place = self._streamed_at([*between, *group])
        if place is not None and beside is not None:
            self.joined[beside] = []
            self._put(between, place)
        if place is not None or beside is not None:
            return beside if place is None else place
        read = [x for i in group for x in i.inputs if x in self.maker]
        last = max((self.maker[x][0] for x in read), default=-1)
        place = max((self.sums[x] for x in read if x in self.sums), default=-1)
        joins = place > last
        self.sums.update((x, place if joins else len(self.joined)) for x in read if x not in self.sums)
        return place if joins else None

    def _streamed_at(self, group: Sequence[Instruction]) -> int | None:
        """The product kernel of a group's last operand, if any."""
        own = {y for i in group for y in i.outputs}
        read = {x: self.maker[x][0] for i in group for x in i.inputs if x in self.maker and x not in own}
        last = max(read.values(), default=-1)
        kinds = {self.kinds[i] for i in self.joined[last]} if last >= 0 else set()
        if Kind.CONTRACTION not in kinds or not kinds <= {*_STREAMED}:
            return None
        return None if any(place == last and x in self.totals for x, place in read.items()) else last

    def _with_sources(self) -> Iterator[Sequence[Instruction]]:
        """The groups, with source groups right before their first user; unused ones at the end."""
        waiting = dict(self.sources)
        for group in self._readers_first():
            for source in [waiting[x] for i in group for x in i.inputs if x in waiting]:
                if source[0].outputs[0] in waiting:
                    yield self._taken(source, waiting)
            yield group
        for source in [*waiting.values()]:
            if source[0].outputs[0] in waiting:
                yield self._taken(source, waiting)

    @staticmethod
    def _taken(source: Sequence[Instruction], waiting: dict[Value, Sequence[Instruction]]) -> Sequence[Instruction]:
        for i in source:
            for y in i.outputs:
                del waiting[y]
        return source
