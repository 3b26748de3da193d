"""Buffers: memory shared by values with disjoint live ranges, in the program's final order.

Rules: variables, slots and inputs are permanent. A value used only inside its fusion group takes no memory, and neither
does one that its consumers recompute (`meshlib.program.analysis.stored_values`). A value is freed after its last user;
all operands of a group after the group's last member, since one kernel reads them. A kernel reuses the buffer of an
operand of the same size that dies there, if each element of the result needs only the same element or row of it; so do
all_reduce and, for its carries, a loop. Renaming takes no memory; the new value of a variable reuses its buffer if no
later instruction reads the old value, likewise for carries, and stacked values of a loop are written into the stack.
Values on the host take no HBM.

A partial update of a value without later readers is in place, and only the part is written: a token into a cache. So is
an update of a slice in a loop, if the slice is stacked again in the same position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from meshlib.core.opdef import Kind, Storage
from meshlib.core.shown import Brief
from meshlib.program.analysis.stored_values import StoredValues, is_elementwise, keeps_rows
from meshlib.program.instructions import Compute, Instruction, Loop, Move, Resident, Value
from meshlib.program.records import Program

START = -1  # instruction number of the program's start


@dataclass(eq=False, slots=True, repr=False)
class Buffer(Brief):
    """Memory of one device for values with disjoint live ranges, and for aliases.

    Attributes:
      owner: the value for which it was allocated, which determines its size.
      begin, end: first and last instruction of its live range; START, and the number of instructions.
      shown: (instruction, value): the value that it has from this instruction on.
    """

    owner: Value
    begin: int
    end: int
    shown: list[tuple[int, Value]]

    def at(self, n: int) -> tuple[int, Value]:
        """The value in it after instruction `n`, preceded by the instruction that stored it."""
        return next((begin, v) for begin, v in reversed(self.shown) if begin <= n)


@dataclass(frozen=True, eq=False, repr=False)
class MemoryPlan(Brief):
    """The `buffers` in order of allocation; results of `update_slice` and stacks of loops that are updated `in_place`;
    and which values are `stored`, or how consumers recompute them."""

    buffers: tuple[Buffer, ...]
    in_place: frozenset[Value]
    stored: StoredValues


def fused_values(program: Program, written: frozenset[Value] = frozenset()) -> set[Value]:
    """Values used only inside their fusion group, or unused: they occupy no HBM.

    `written`: results of a body that are stacked outside.
    """
    users: dict[Value, set[int]] = {}
    for i in program.instructions:
        for x in i.inputs:
            users.setdefault(x, set()).add(i.group)
    results = {*program.outputs.values(), *program.updates.values()} - written
    groups_of_values = [(y, i.group) for i in program.instructions if not isinstance(i, Resident) for y in i.outputs]
    return {y for y, group in groups_of_values if users.get(y, set()) <= {group} and y not in results}


def stored_values(program: Program, loop: Loop | None = None) -> StoredValues:
    """Stored and recomputed values of a program, or of a body with its `loop`."""
    old = {v: program.variables[n] for n, v in program.updates.items() if n in program.variables}
    makers = {y: i for i in program.instructions for y in i.outputs}
    written: frozenset[Value] = frozenset()
    if loop is not None:
        carried = {program.outputs[end]: program.inputs[start] for start, end in loop.carries}
        written = frozenset(program.outputs[name] for name in loop.stacks) - carried.keys()
        given = {*program.inputs.values()}
        old |= {new: before for new, before in carried.items() if new not in given}
        old |= {program.outputs[end]: program.inputs[start] for end, start in loop.rewritten.items()}
    for new, before in [*old.items()]:
        chain = [*_update_chain(makers, new)]
        if before in chain:  # partial updates in sequence share one buffer
            old |= dict.fromkeys(chain[1 : chain.index(before)], before)
    return StoredValues(program, fused_values(program, written), old, written)


def _update_chain(makers: Mapping[Value, Instruction], v: Value) -> Iterator[Value]:
    """A value, and the values of which it is an alias or a partially updated copy."""
    yield v
    while (before := _updated_operand(makers.get(v), v)) is not None:
        yield before
        v = before


def _updated_operand(i: Instruction | None, v: Value) -> Value | None:
    """The value of which `v` is an alias or a partially updated copy, through its producer `i`."""
    if isinstance(i, Compute) and (i.operation.opdef.writes_part or i.operation.opdef.storage is Storage.ALIAS):
        return i.inputs[0]
    if not isinstance(i, Loop) or i.record.branch is None or v not in i.outputs[: len(i.carries)]:
        return None
    body = i.body
    begin, end = i.carries[i.outputs.index(v)]
    inside = {y: maker for maker in body.instructions for y in maker.outputs}
    if body.inputs[begin] not in _update_chain(inside, body.outputs[end]):
        return None
    return i.inputs[list(body.inputs).index(begin)]


def rewritten_slices(loop: Loop) -> dict[str, str]:
    """`Loop.rewritten`."""
    body, slice_of_carry = loop.body, dict[str, str]()
    makers = {y: i for i in body.instructions for y in i.outputs}
    slices = {body.inputs[name]: name for name in loop.slices if loop.slice_axis(name) == 0}
    for end in loop.stacks:
        v = body.outputs[end]
        for x in _update_chain(makers, v):
            alone = x in slices and loop.inputs.count(loop.inputs[[*body.inputs].index(slices[x])]) == 1
            if alone and x is not v and slices[x] not in slice_of_carry.values() and x.sharding == v.sharding:
                slice_of_carry[end] = slices[x]
    return slice_of_carry


def written_inside(loop: Loop, in_place: frozenset[Value]) -> frozenset[Value]:
    """Values updated in place in a trip of a loop, given the results of the loop that are `in_place`: other stacks
    are copied."""
    body, copied = loop.body, set[Value]()
    makers = {y: i for i in body.instructions for y in i.outputs}
    stacks = dict(zip(loop.stacks, loop.outputs[len(loop.carries) :], strict=True))
    for end in loop.rewritten:
        if stacks[end] not in in_place:
            copied.update(_update_chain(makers, body.outputs[end]))
    return loop.memory_plan.in_place - copied


def plan_buffers(program: Program, loop: Loop | None = None) -> MemoryPlan:
    """The memory plan of a program, or of a body with its `loop`."""
    planner = _Planner(program, loop)
    return MemoryPlan(tuple(planner.run()), frozenset(planner.in_place), planner.stored)


@dataclass(eq=False)
class _Planner:
    """A traversal of a program's order that allocates, shares and frees buffers."""

    program: Program
    loop: Loop | None = None
    buffers: list[Buffer] = field(default_factory=list)
    of: dict[Value, Buffer] = field(default_factory=dict)  # live values
    holders: dict[Buffer, int] = field(default_factory=dict)  # number of live values in each
    shared: dict[Buffer, list[Value]] = field(default_factory=dict)  # all values that each has had
    in_place: set[Value] = field(default_factory=set)

    def __post_init__(self) -> None:
        program = self.program
        self.ends = {i.group: n for n, i in enumerate(program.instructions)}
        self.begins = {i.group: n for n, i in reversed([*enumerate(program.instructions)])}
        groups: dict[int, list[Instruction]] = {}
        for i in program.instructions:
            groups.setdefault(i.group, []).append(i)
        self.groups = groups
        self.resident = {v for v in (*program.inputs.values(), *program.variables.values()) if not v.tensor.on_host}
        self.stored = stored_values(program, self.loop)
        self.old, self.last = self.stored.old, self.stored.last
        self.unstored = self.stored.unstored
        self.places: dict[int, list[Value]] = {}  # per group, operands whose buffers its results may reuse

    def run(self) -> list[Buffer]:
        program = self.program
        end = len(program.instructions)
        for v in (*program.inputs.values(), *program.variables.values()):
            if v in self.resident:
                self._allocate(START, v, end)
        leaving: dict[int, list[Value]] = {}
        for n, i in enumerate(program.instructions):
            for k, y in enumerate(i.outputs):
                leaving.setdefault(self.last.get(y, n), []).append(y)
                if not (isinstance(i, Resident) or y in self.unstored or y.tensor.on_host):
                    self._place(n, i, k)
            for y in leaving.pop(n, ()):
                self._release(n, y)
        return self.buffers

    def _place(self, n: int, i: Instruction, k: int) -> None:
        y = i.outputs[k]
        old = self.old.get(y)
        if old is not None and self._may_replace(i, k, old):
            shared = self.of[old]
        else:
            shared = next(self._reusable_buffers(i, k, y), None) or self._allocate(n, y, len(self.program.instructions))
        if self._is_partial_update(i, k) and any(self.of.get(x) is shared for x in self._reusable_operands(i, k)):
            self.in_place.add(y)
        if shared.owner is not y:
            self._share(n, y, shared)

    def _is_partial_update(self, i: Instruction, k: int) -> bool:
        """True if the result is a partial update of the operand whose buffer it reuses."""
        if isinstance(i, Loop):
            return k >= len(i.carries)
        return _writes_part(i)

    def _may_replace(self, i: Instruction, k: int, old: Value) -> bool:
        """True if a new value may reuse the buffer of an old one, which no later instruction reads."""
        buffer = self.of.get(old)
        if buffer is None or buffer.owner is not old:
            return False
        over = self._reusable_operands(i, k)
        lasts = ((self.last.get(v, START), v) for v in self.shared[buffer])
        return all(n < self.begins[i.group] or (n <= self.ends[i.group] and v in over) for n, v in lasts)

    def _reusable_operands(self, i: Instruction, k: int) -> list[Value]:
        """Operands whose buffers result `k` may reuse if they die."""
        if i.is_collective:
            return [i.inputs[k]] if isinstance(i, Move) and i.step_kind.sums_in_place else []
        if not isinstance(i, Loop):
            return self._overwritable(i.group)
        given = dict(zip(i.body.inputs, i.inputs, strict=True))
        if k < len(i.carries):
            return [given[i.carries[k][0]]]
        end = i.stacks[k - len(i.carries)]
        plan, v = i.memory_plan, i.body.outputs[end]
        within = v in plan.in_place or v in plan.stored.unstored  # written by a trip directly into the stack
        return [given[start] for name, start in i.rewritten.items() if name == end and within]

    def _reusable_buffers(self, i: Instruction, k: int, y: Value) -> Iterator[Buffer]:
        """Buffers that the result may reuse: that of the value it renames, or of a dying operand of its size."""
        if isinstance(i, Compute) and i.operation.opdef.storage is Storage.ALIAS and i.inputs[0] in self.of:
            yield self.of[i.inputs[0]]
        for x in self._reusable_operands(i, k):
            buffer = self.of.get(x)
            if buffer is None or buffer.owner in self.resident or self.holders[buffer] > 1:
                continue
            if self.last[x] <= self.ends[i.group] and buffer.owner.local_bytes == y.local_bytes:
                yield buffer

    def _overwritable(self, group: int) -> list[Value]:
        """Operands in memory that results may overwrite: elements need only the same element or row of them."""
        if group not in self.places:
            elsewhere: set[Value] = set()  # values read at positions other than the result's
            placed: dict[Value, bool] = {}
            for i in reversed(self.groups[group]):
                free = elsewhere.isdisjoint(i.outputs)
                aligned = is_elementwise(i) or _reduces_rows(i)
                for k, x in enumerate(i.inputs):
                    same = free and (aligned or (k == 0 and _writes_part(i)))
                    if not same:
                        elsewhere.add(x)
                    recomputed = self.stored.again.get(x)
                    for v, at_its_place in ({x: True} if recomputed is None else recomputed.of).items():
                        placed[v] = placed.get(v, True) and same and at_its_place
            self.places[group] = [v for v, same in placed.items() if same]
        return self.places[group]

    def _allocate(self, n: int, v: Value, end: int) -> Buffer:
        buffer = Buffer(v, n, end, [(n, v)])
        self.buffers.append(buffer)
        self.of[v], self.holders[buffer], self.shared[buffer] = buffer, 1, [v]
        return buffer

    def _share(self, n: int, v: Value, buffer: Buffer) -> None:
        self.of[v] = buffer
        self.holders[buffer] += 1
        self.shared[buffer].append(v)
        if v.local_bytes and buffer.owner not in self.resident:
            buffer.shown.append((n, v))

    def _release(self, n: int, v: Value) -> None:
        buffer = self.of.get(v)
        if buffer is None or buffer.owner in self.resident:
            return
        del self.of[v]
        self.holders[buffer] -= 1
        if not self.holders[buffer]:
            buffer.end = n


def _writes_part(i: Instruction) -> bool:
    """True for a partial update of operand 0."""
    return isinstance(i, Compute) and i.operation.opdef.writes_part


def _reduces_rows(i: Instruction) -> bool:
    """True for a reduction of each row."""
    return isinstance(i, Compute) and not i.exchanges and i.operation.opdef.kind is Kind.REDUCTION and keeps_rows(i)
