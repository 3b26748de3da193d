"""Values stored in memory, and values that every consumer kernel recomputes.

A value that follows element by element from what is in memory anyway is not stored for its readers: the float32 copy of
bfloat16 logits, both exponentials of a softmax, what a norm makes between its statistics and its result, the cast of a
weight, an activation function whose argument the gradient needs as well. Storing it costs its bytes until its last
reader has run; making it again costs the bytes of what it is made of for as much longer as that has to stay. The
cheaper is chosen, value by value in program order; where both cost the same it is stored.

Somebody must be able to make it: products, reductions and element-wise kernels read through such work, collectives,
loops, copies to the host and kernels of their own find their operands in memory. But fused attention widens and scales
keys and values of few bits itself, as the kernels for caches of int8 and fp8 do.

Source: openxla/xla xla/service/instruction_fusion.cc, which duplicates producers into their consumers (from memory).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshlib.core.opdef import MOST_OPS, THROUGH, Kind, Storage
from meshlib.program.analysis.work import local_work
from meshlib.program.instructions import Compute, Instruction, Move, Value
from meshlib.program.records import Program

NEAR_BYTES = 2**20  # of the 16 MiB of VMEM that the smallest chips have
_DEEPEST = 32  # operations that follow each other

_READERS = (*THROUGH, Kind.REDUCTION, Kind.CONTRACTION)


@dataclass(frozen=True, slots=True)
class Recomputation:
    """How a value is made again: of which values in memory, with how many lane operations.

    `of` says of each whether all that is read of it lies where the result does: an element for an element.
    """

    of: Mapping[Value, bool]
    ops: int


@dataclass(eq=False)
class StoredValues:
    """For one order of a program: how values are made `again`; until when each other value is needed (`last`).

    `old` has, per new value, the one whose place it may take; `written` are results that lie outside: of a loop's body
    those that go into stacks.
    """

    program: Program
    fused: set[Value]
    old: Mapping[Value, Value]
    written: frozenset[Value] = frozenset()
    again: dict[Value, Recomputation] = field(default_factory=dict)
    inside: set[Value] = field(default_factory=set)  # of `fused`, those that are stored all the same
    last: dict[Value, int] = field(init=False)

    def __post_init__(self) -> None:
        program = self.program
        self.end = len(program.instructions)
        self.made = {y: (n, i) for n, i in enumerate(program.instructions) for y in i.outputs}
        self.residents = {*program.inputs.values(), *program.variables.values()}
        asked: set[Value] = {*program.updates.values()}  # somebody finds them in memory
        asked.update(y for y in program.outputs.values() if y not in self.written)
        users: dict[Value, int] = {}
        for n, i in enumerate(program.instructions):
            users.update(dict.fromkeys(i.inputs, n))
            asked.update(x for k, x in enumerate(i.inputs) if not (reads_through(i, k) or self._is_widened(i, k)))
        # One kernel reads all operands of a group.
        groups = {i.group: n for n, i in enumerate(program.instructions)}
        uses = {x: n for x, n in program.last_use.items() if x not in self.written}
        uses |= {x: n for x, n in users.items() if x in self.written}
        self.last = {x: groups[program.instructions[n].group] if n < self.end else n for x, n in uses.items()}
        self.asked = asked | self.written
        # The place of a variable or carry is its own until the new value may have it.
        self.free_until = dict.fromkeys(self.residents, self.end)
        for new, old in self.old.items():
            self.free_until[old] = min(self.free_until[old], self.made[new][0])
        for n, i in enumerate(program.instructions):
            if self._may_be_made_again(i):
                self._decide(n, i)

    def _is_widened(self, i: Instruction, n: int) -> bool:
        """Whether operand `n` is keys or values of attention that a cast or a scaling makes."""
        x = i.inputs[n]
        producer = self.made[x][1] if x in self.made else None
        kernel = isinstance(i, Compute) and not i.exchanges and i.operation.opdef.scores is not None
        return kernel and n in (1, 2) and isinstance(producer, Compute) and producer.operation.opdef.repeated

    def _may_be_made_again(self, i: Instruction) -> bool:
        return _is_through(i) and not (i.outputs[0] in self.fused or i.outputs[0] in self.asked)

    def _decide(self, n: int, i: Instruction) -> None:
        (y,) = i.outputs
        end = self.last.get(y, n)
        recomputation = self._by(i, end, {}, 0)
        if recomputation is None or recomputation.ops > MOST_OPS * y.local_size:
            return
        if self._cost(recomputation.of, end) < y.local_bytes * (end - n):
            self.again[y] = recomputation
            for x in recomputation.of:
                self.last[x] = max(self.last.get(x, 0), end)
                if x in self.fused:
                    self.inside.add(x)

    def _by(
        self, i: Instruction, end: int, known: dict[Value, Recomputation | None], depth: int
    ) -> Recomputation | None:
        """How to make the result of `i` again for a kernel that ends at `end`; None where that cannot be."""
        of: dict[Value, bool] = {}
        ops = local_work(self.program, i).vpu_ops
        same = is_elementwise(i)
        for x in i.inputs:
            if x not in known:
                known[x] = None  # while it is looked for
                known[x] = self._cheapest(x, end, known, depth)
            operand_cost = known[x]
            if operand_cost is None:
                return None
            ops += operand_cost.ops
            for v, placed in operand_cost.of.items():
                of[v] = of.get(v, True) and placed and same
        return Recomputation(of, ops)

    def _cheapest(
        self, x: Value, end: int, known: dict[Value, Recomputation | None], depth: int
    ) -> Recomputation | None:
        """An operand as it lies in memory, or as it is made of what does; whichever takes less."""
        if x in self.again:
            return self.again[x]
        cheapest = None if x.tensor.on_host else Recomputation({x: True}, 0)
        cost = None if cheapest is None else self._cost(cheapest.of, end)
        if cost == 0 or x not in self.made or depth == _DEEPEST:
            return cheapest
        _, i = self.made[x]
        if _is_through(i):
            other = self._by(i, end, known, depth + 1)
            short = other is not None and other.ops <= MOST_OPS * max(1, x.local_size)
            if other is not None and short and (cost is None or self._cost(other.of, end) < cost):
                return other
        return cheapest

    def _cost(self, of: Mapping[Value, bool], end: int) -> int:
        """Bytes times instructions for which these values have to stay longer."""
        return sum(v.local_bytes * max(0, end - self._until(v)) for v in of)

    def _until(self, v: Value) -> int:
        """Until when a value lies in memory without anything more."""
        last = self.last.get(v, 0)
        if v in self.residents:
            return max(last, self.free_until[v])
        if v in self.fused and v not in self.inside:
            return self.made[v][0]
        return last


def is_elementwise(i: Instruction) -> bool:
    """Whether each element of the result needs operands at its own position only, or what is made anew there."""
    if not isinstance(i, Compute) or i.exchanges:
        return False
    kind = i.operation.opdef
    return kind.kind is Kind.ELEMENTWISE or kind.storage is Storage.ALIAS or kind.remade


def keeps_rows(i: Instruction) -> bool:
    """Whether each row of the result needs one row of the operands: no reduction, or one over minor dims."""
    if i.operation.opdef.kind is not Kind.REDUCTION:
        return True
    names = i.inputs[0].tensor.shape.names
    kept = [n for n in names if n in i.outputs[0].tensor.shape]
    return list(names[: len(kept)]) == kept


def _is_through(i: Instruction) -> bool:
    """Whether a kernel that reads the result can make it on the way."""
    if isinstance(i, Move):
        return not i.is_collective and len(i.outputs) == 1
    if not isinstance(i, Compute) or i.exchanges or i.operation.opdef.show:
        return False
    return i.operation.opdef.kind in THROUGH or _looks_up_near(i)


def _looks_up_near(i: Compute) -> bool:
    """Whether it looks up in a table that fits VMEM with the rest: the token that a cache takes, say."""
    if i.operation.opdef.kind is not Kind.INDEXED or not i.operation.opdef.reads_part:
        return False
    table = i.inputs[0].local_bytes
    return table <= NEAR_BYTES and table < i.outputs[0].local_bytes


def reads_through(i: Instruction, n: int) -> bool:
    """Whether an instruction can make its operand `n` on the way."""
    if isinstance(i, Move):
        return not i.is_collective
    if not isinstance(i, Compute) or i.exchanges:
        return False
    kind = i.operation.opdef
    return kind.kind in _READERS or (n == 0 and kind.reads_part)
