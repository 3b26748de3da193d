"""Values stored in memory, and values that every consumer kernel recomputes: one decision for memory and time.

A compiler duplicates cheap work into the kernels that read its result: the float32 copy of bfloat16 logits, the cast of
a weight, values of a norm between statistics and result, dequantised int8 values. A value is recomputed if

- each consumer can inline its producer: products, reductions and element-wise kernels can; collectives, loops, copies
  to the host and separate kernels read operands from memory, except that fused attention casts and scales narrow keys
  and values itself, as kernels for int8 and fp8 caches do;
- recomputing an element takes no longer than reading it: exponentials, divisions and error functions are recomputed,
  sines and cosines are not. Random numbers are drawn again at any cost, since the compiler counts each of their integer
  operations alone: no mask of dropout is stored;
- reading its sources, in each kernel that does not read them anyway, moves fewer bytes than writing the value once and
  reading it in each; a lookup of a few rows moves next to nothing.

Either all consumers recompute a value, or none.

Source: openxla/xla xla/service/instruction_fusion.cc, which duplicates producers into their consumers (from memory);
in training steps of Llama, BERT, T5 and gpt-oss compiled here for TPU, the sigmoid of a gated layer is computed in five
kernels, the exponential of a softmax in three to five, sines and cosines in one; nine of ten masks of dropout, of BERT
and of three layers without recomputation, in two kernels or more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from meshlib.core.opdef import MOST_OPS, THROUGH, Kind, Storage
from meshlib.program.analysis.work import local_work
from meshlib.program.instructions import Compute, Instruction, Move, Value
from meshlib.program.records import Program

NEAR_BYTES = 2**20  # share of the 16 MiB of VMEM of the smallest chips
SMALL = 64  # sources with fewer elements by this factor, such as scales of channels, are read almost for free

_READERS = (*THROUGH, Kind.REDUCTION, Kind.CONTRACTION)


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Recomputation of a value by its consumers: from stored values, by instructions.

    `of` tells of each value whether it is read elementwise, at the position of the result; `by` has the lane operations
    of each instruction, without draws of random numbers.
    """

    of: Mapping[Value, bool]
    by: Mapping[Instruction, int]

    @property
    def ops(self) -> int:
        """The number of lane operations."""
        return sum(self.by.values())


@dataclass(eq=False)
class StoredValues:
    """Storage decisions for one order of a program: recomputations (`again`), and the last use of each stored value
    (`last`).

    `old` maps a new value to the one whose buffer it may reuse; `written` are results of a loop's body that are stacked
    outside.
    """

    program: Program
    fused: set[Value]
    old: Mapping[Value, Value]
    written: frozenset[Value] = frozenset()
    again: dict[Value, Recomputation] = field(default_factory=dict)
    inside: set[Value] = field(default_factory=set)  # values of `fused` that are stored nevertheless
    last: dict[Value, int] = field(init=False)

    def __post_init__(self) -> None:
        program = self.program
        self._producers = {y: i for i in program.instructions for y in i.outputs}
        self._read_by: dict[int, set[Value]] = {}  # values read by each group
        self._users: dict[Value, list[Instruction]] = {}
        asked: set[Value] = {*program.updates.values()}  # values that must be in memory
        asked.update(y for y in program.outputs.values() if y not in self.written)
        users: dict[Value, int] = {}
        for n, i in enumerate(program.instructions):
            users.update(dict.fromkeys(i.inputs, n))
            asked.update(x for k, x in enumerate(i.inputs) if not (reads_through(i, k) or self._is_widened(i, k)))
            self._read_by.setdefault(i.group, set()).update(i.inputs)
            for x in i.inputs:
                self._users.setdefault(x, []).append(i)
        self.last = self._last_uses(users)
        self._asked = asked | self.written
        for n, i in enumerate(program.instructions):
            if _is_through(i) and not (i.outputs[0] in self.fused or i.outputs[0] in self._asked):
                self._decide(n, i)

    @property
    def unstored(self) -> set[Value]:
        """Values without memory: those used only inside their group, and recomputed ones."""
        return (self.fused - self.inside) | self.again.keys()

    def _is_widened(self, i: Instruction, n: int) -> bool:
        """True if operand `n` is keys or values of attention computed by a cast or scaling."""
        producer = self._producers.get(i.inputs[n])
        kernel = isinstance(i, Compute) and not i.exchanges and i.operation.opdef.scores is not None
        return kernel and n in (1, 2) and isinstance(producer, Compute) and producer.operation.opdef.repeated

    def _last_uses(self, users: Mapping[Value, int]) -> dict[Value, int]:
        """The last use of each value: the last instruction of that group, since one kernel reads all its operands."""
        program = self.program
        groups = {i.group: n for n, i in enumerate(program.instructions)}
        uses = {x: n for x, n in program.last_use.items() if x not in self.written}
        uses |= {x: n for x, n in users.items() if x in self.written}
        end = len(program.instructions)
        return {x: groups[program.instructions[n].group] if n < end else n for x, n in uses.items()}

    def _decide(self, n: int, i: Instruction) -> None:
        (y,) = i.outputs
        readers = {u.group for u in self._users.get(y, ()) if not _reads_part(u, y)} - {i.group}
        recomputation = self._recomputation(i)
        if recomputation is None or recomputation.ops > MOST_OPS * y.local_size:
            return
        sources = [x for x in recomputation.of if x.local_size * SMALL > y.local_size]
        stored_bytes, recomputed_bytes = self._traffic(y, recomputation, sources, readers)
        if recomputed_bytes >= stored_bytes > 0:
            return
        self.again[y] = recomputation
        for g in readers:
            self._read_by[g].update(sources)
        for x in recomputation.of:
            self.last[x] = max(self.last.get(x, 0), self.last.get(y, n))
            if x in self.fused:
                self.inside.add(x)

    def _traffic(
        self, y: Value, recomputation: Recomputation, sources: Sequence[Value], readers: Collection[int]
    ) -> tuple[int, int]:
        """Bytes of HBM traffic if `y` is stored, and if its consumers recompute it from `sources`."""
        inside = [x for x in sources if x in self.fused and x not in self.inside]  # would have to be stored
        recomputed_bytes = sum(x.local_bytes for g in readers for x in sources if x not in self._read_by[g])
        recomputed_bytes += sum(x.local_bytes for x in inside)
        stored_bytes = y.local_bytes * (1 + len(readers))
        if self._runs_alone(y, recomputation):
            stored_bytes += sum(x.local_bytes for x in sources if x not in inside)  # read for it alone
        return stored_bytes, recomputed_bytes

    def _runs_alone(self, y: Value, recomputation: Recomputation) -> bool:
        """True if no other member of the group of `y` needs its sources or producers, except for small values."""
        group = self._producers[y].group
        needed = {y, *recomputation.of, *(v for i in recomputation.by for v in i.outputs)}
        users = (u for v in needed if v.local_size * SMALL > y.local_size for u in self._users.get(v, ()))
        return not any(u.group == group and u not in recomputation.by for u in users)

    def _recomputation(self, i: Instruction) -> Recomputation | None:
        """The recomputation of the result of `i` from stored values; None if impossible."""
        of: dict[Value, bool] = {}
        by: dict[Instruction, int] = {}
        same = is_elementwise(i)
        for x in i.inputs:
            producer = self._producers.get(x)
            if x in self.again:
                operand: Recomputation | None = self.again[x]
            else:
                operand = None if x.tensor.on_host else Recomputation({x: True}, {})
                if producer is not None and x in self.fused and x not in self.inside and _is_through(producer):
                    within = self._recomputation(producer)
                    operand = operand if within is None or within.ops > MOST_OPS * x.local_size else within
            if operand is None:
                return None
            by.update(operand.by)
            for v, placed in operand.of.items():
                of[v] = of.get(v, True) and placed and same
        by[i] = 0 if i.operation.opdef.unique else local_work(self.program, i).vpu_ops
        return Recomputation(of, by)


def is_elementwise(i: Instruction) -> bool:
    """True if each element of the result needs operands only at its own position, or generated there."""
    if not isinstance(i, Compute) or i.exchanges:
        return False
    kind = i.operation.opdef
    return kind.kind is Kind.ELEMENTWISE or kind.storage is Storage.ALIAS or kind.remade


def keeps_rows(i: Instruction) -> bool:
    """True if each row of the result needs one row of the operands: no reduction, or one over minor dims."""
    if i.operation.opdef.kind is not Kind.REDUCTION:
        return True
    names = i.inputs[0].tensor.shape.names
    left = [n for n in names if n in i.outputs[0].tensor.shape]
    return list(names[: len(left)]) == left


def _is_through(i: Instruction) -> bool:
    """True if a consuming kernel can inline this instruction."""
    if isinstance(i, Move):
        return not i.is_collective and len(i.outputs) == 1
    if not isinstance(i, Compute) or i.exchanges or i.operation.opdef.show:
        return False
    return i.operation.opdef.kind in THROUGH or _is_vmem_lookup(i)


def _is_vmem_lookup(i: Compute) -> bool:
    """True for a lookup in a table that fits VMEM with the rest, such as that of the cached token."""
    if i.operation.opdef.kind is not Kind.INDEXED or not i.operation.opdef.reads_part:
        return False
    table = i.inputs[0].local_bytes
    return table <= NEAR_BYTES and table < i.outputs[0].local_bytes


def _reads_part(i: Instruction, x: Value) -> bool:
    """True if an instruction reads only part of its operand `x`."""
    return isinstance(i, Compute) and i.operation.opdef.reads_part and not i.exchanges and x is i.inputs[0]


def reads_through(i: Instruction, n: int) -> bool:
    """True if an instruction can inline the producer of its operand `n`."""
    if isinstance(i, Move):
        return not i.is_collective
    if not isinstance(i, Compute) or i.exchanges:
        return False
    kind = i.operation.opdef
    return kind.kind in _READERS or (n == 0 and kind.reads_part)
