"""Which values share memory, and from when to when: the plan of a program's buffers, made once for its final order.

Rules: variables, slots and inputs stay. A value used inside its fusion group only takes nothing. A value is freed
after its last user, all operands of a group after the group's last member: one kernel reads them. Element-wise work
and all_reduce write over an operand of the same size that dies there; renaming takes nothing; the new value of a
variable takes its place if no later instruction reads the old one. What lies on the host takes no HBM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from meshlib.operation import Kind, Storage
from meshlib.program.instructions import Compute, Instruction, Resident, Value
from meshlib.program.records import Program

START = -1  # in place of the number of an instruction: before the first


@dataclass(eq=False, slots=True)
class Buffer:
    """Memory of one device for values that follow each other, or that are other names of each other.

    Attributes:
      owner: the value that it was made for, whose size it has.
      begin, end: the first and the last instruction during which it is needed; START, and the number of instructions.
      shown: (instruction, value): which value it holds from when.
    """

    owner: Value
    begin: int
    end: int
    shown: list[tuple[int, Value]]

    def at(self, n: int) -> tuple[int, Value]:
        """What it holds after instruction `n`, and since when."""
        return next((begin, v) for begin, v in reversed(self.shown) if begin <= n)


def fused_values(program: Program) -> set[Value]:
    """Values that are used inside the fusion group that makes them only, or by nobody: they occupy no HBM."""
    users: dict[Value, set[int]] = {}
    for i in program.instructions:
        for x in i.inputs:
            users.setdefault(x, set()).add(i.group)
    kept = {*program.outputs.values(), *program.updates.values()}
    made = [(y, i.group) for i in program.instructions if not isinstance(i, Resident) for y in i.outputs]
    return {y for y, group in made if users.get(y, set()) <= {group} and y not in kept}


def plan_buffers(program: Program) -> tuple[Buffer, ...]:
    """The buffers in the order in which they are taken."""
    return tuple(_Planner(program).run())


@dataclass(eq=False)
class _Planner:
    """One walk over a program's order that allocates, shares and frees."""

    program: Program
    found: list[Buffer] = field(default_factory=list)
    of: dict[Value, Buffer] = field(default_factory=dict)  # live values
    holders: dict[Buffer, int] = field(default_factory=dict)  # live values in each

    def __post_init__(self) -> None:
        program = self.program
        self.ends = ends = {i.group: n for n, i in enumerate(program.instructions)}
        self.begins = {i.group: n for n, i in reversed([*enumerate(program.instructions)])}
        # One kernel reads all operands of a group.
        lasting = len(program.instructions)
        use = program.last_use
        self.last = {x: ends[program.instructions[n].group] if n < lasting else n for x, n in use.items()}
        groups: dict[int, list[Instruction]] = {}
        for i in program.instructions:
            groups.setdefault(i.group, []).append(i)
        self.groups = groups
        self.in_place = {g for g, members in groups.items() if all(map(_is_elementwise, members))}
        self.resident = {v for v in (*program.inputs.values(), *program.variables.values()) if not v.tensor.on_host}
        self.old = {v: program.variables[n] for n, v in program.updates.items() if n in program.variables}

    def run(self) -> list[Buffer]:
        program, inside = self.program, fused_values(self.program)
        end = len(program.instructions)
        for v in (*program.inputs.values(), *program.variables.values()):
            if v in self.resident:
                self._allocate(START, v, end)
        leaving: dict[int, list[Value]] = {}
        for n, i in enumerate(program.instructions):
            for k, y in enumerate(i.outputs):
                leaving.setdefault(self.last.get(y, n), []).append(y)
                if not (isinstance(i, Resident) or y in inside or y.tensor.on_host):
                    self._place(n, i, k)
            for y in leaving.pop(n, ()):
                self._release(n, y)
        return self.found

    def _place(self, n: int, i: Instruction, k: int) -> None:
        y = i.outputs[k]
        old = self.old.get(y)
        if old is not None and self._replaces(i.group, old):
            shared = self.of[old]
        else:
            shared = next(self._dying(i, k, y), None) or self._allocate(n, y, len(self.program.instructions))
        if shared.owner is not y:
            self._share(n, y, shared)

    def _replaces(self, group: int, old: Value) -> bool:
        """Whether a new value may take the place of an old one: nobody reads that later."""
        buffer, last = self.of.get(old), self.last.get(old, START)
        if buffer is None or buffer.owner is not old:
            return False
        return last < self.begins[group] or (group in self.in_place and last <= self.ends[group])

    def _dying(self, i: Instruction, k: int, y: Value) -> Iterator[Buffer]:
        """Buffers that the result may take over: that of what it renames, or of an operand of its size that dies."""
        if isinstance(i, Compute) and i.operation.kind.storage is Storage.ALIAS and i.inputs[0] in self.of:
            yield self.of[i.inputs[0]]
        if i.is_collective:
            candidates = [i.inputs[k]] if i.opcode == "all_reduce" else []
        else:
            candidates = [x for m in self.groups[i.group] for x in m.inputs] if i.group in self.in_place else []
        for x in candidates:
            buffer = self.of.get(x)
            if buffer is None or buffer.owner in self.resident or self.holders[buffer] > 1:
                continue
            if self.last[x] <= self.ends[i.group] and buffer.owner.local_bytes == y.local_bytes:
                yield buffer

    def _allocate(self, n: int, v: Value, end: int) -> Buffer:
        buffer = Buffer(v, n, end, [(n, v)])
        self.found.append(buffer)
        self.of[v], self.holders[buffer] = buffer, 1
        return buffer

    def _share(self, n: int, v: Value, buffer: Buffer) -> None:
        self.of[v] = buffer
        self.holders[buffer] += 1
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


def _is_elementwise(i: Instruction) -> bool:
    """Whether each element of the result needs operands at its own position only, or what is made anew there."""
    if not isinstance(i, Compute) or i.exchanges:
        return False
    kind = i.operation.kind
    return kind.kind is Kind.ELEMENTWISE or kind.storage is Storage.ALIAS or kind.remade
