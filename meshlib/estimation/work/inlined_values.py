"""Values that are recomputed inside every consumer kernel instead of being written to HBM.

A compiler copies cheap element-wise work into the kernels that read its result. One that follows from a single value
no wider is never worth storing (`meshlib.estimation.work.stored_values`). One that follows from several, as the
gradient of a norm from that of its result and from what it normalised, is stored if reading its sources in each kernel
takes more than writing it once and reading it. Either all who read it make it, or none.

Source: openxla/xla instruction_fusion.cc (a producer is duplicated if it fuses into its users on all paths); that bytes
over HBM decide is the cost model of the TPU backend (from memory).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshlib.core.opdef import MOST_OPS
from meshlib.program.analysis.stored_values import is_elementwise, reads_through
from meshlib.program.analysis.work import local_work
from meshlib.program.instructions import Instruction, Resident, Value
from meshlib.program.records import Program

Sources = tuple[Value, ...]
SMALL = 64  # times fewer elements: scales of channels, which cost their readers next to nothing


def made_by_readers(
    program: Program, fused: set[Value], held: set[Value], size_bytes: Callable[[Value], int]
) -> Mapping[Value, Sources]:
    """Values that their readers make, each with the values in memory of which they make it.

    `fused`: values that never leave their groups; `held`: those that have to be in memory; `size_bytes`: of what is
    stored for a value.
    """
    return _Search(program, fused, held, size_bytes).found


class _Search:
    def __init__(
        self, program: Program, fused: set[Value], held: set[Value], size_bytes: Callable[[Value], int]
    ) -> None:
        self.program, self.fused, self.size_bytes = program, fused, size_bytes
        self.maker: dict[Value, Instruction] = {}
        self.users: dict[Value, list[tuple[Instruction, int]]] = {}
        self.read: dict[int, set[Value]] = {}  # by group, what it reads
        self.written: dict[int, list[Value]] = {}  # by group, what it writes
        for i in program.instructions:
            self.maker.update(dict.fromkeys(i.outputs, i))
            self.read.setdefault(i.group, set()).update(i.inputs)
            self.written.setdefault(i.group, []).extend(y for y in i.outputs if y not in fused)
            for n, x in enumerate(i.inputs):
                self.users.setdefault(x, []).append((i, n))
        self.found: dict[Value, Sources] = {}
        inside = fused | held
        for i in program.instructions:
            if len(i.outputs) == 1 and i.outputs[0] not in inside and is_elementwise(i):
                self._decide(i, i.outputs[0])

    def _decide(self, i: Instruction, y: Value) -> None:
        readers = self.users.get(y, [])
        if not all(reads_through(u, n) for u, n in readers):
            return
        sources: dict[Value, None] = {}
        ops = self._collect(i, y, sources)
        if ops is None or len(sources) < 2 or ops > MOST_OPS * y.local_size:
            return
        groups = {u.group for u, _ in readers}
        again = sum(self.size_bytes(x) for g in groups for x in sources if x not in self.read[g])
        stored = self.size_bytes(y) * (1 + len(groups))
        if not any(v is not y and v.local_size * SMALL > y.local_size for v in self.written[i.group]):
            # Nobody else needs the sources there.
            stored += sum(map(self.size_bytes, sources))
        if again < stored:
            self.found[y] = tuple(sources)
            self.written[i.group].remove(y)
            for g in groups:
                self.read[g].update(sources)

    def _collect(self, i: Instruction, y: Value, sources: dict[Value, None]) -> int | None:
        """Adds what `i` makes its part of `y` of; its operations, or None where it is not made element by element."""
        total = local_work(self.program, i).vpu_ops
        for x in i.inputs:
            producer = self.maker.get(x)
            if x in self.found:
                sources.update(dict.fromkeys(self.found[x]))
            elif producer is None or isinstance(producer, Resident) or x not in self.fused or producer.group != i.group:
                if x.local_size * SMALL > y.local_size:
                    sources[x] = None
            elif not is_elementwise(producer):
                return None
            else:
                ops = self._collect(producer, y, sources)
                if ops is None:
                    return None
                total += ops
        return total
