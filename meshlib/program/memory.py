"""Memory per device: liveness over the program's final order. Exact bytes of that order, without tile padding.

Rules: variables, slots and inputs stay. A value used inside its fusion group only takes nothing. A value is freed
after its last user. Element-wise work and all_reduce write over an operand of the same size that dies there; renaming
takes nothing; the new value of a variable takes its place if no later instruction reads the old one. What lies on the
host takes no HBM; `host_bytes` is the most that does at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshlib.graph import FORWARD
from meshlib.operation import Kind, Storage
from meshlib.ops.sources import INPUT
from meshlib.program.records import Instruction, Program, Value, bytes_text

KINDS = ("variables", "slots", "inputs", "activations", "gradients", "collective buffers", "temporaries")


@dataclass(frozen=True)
class Live:
    """One buffer at the peak: the tensor it holds, its kind, its bytes on one device, its source line."""

    name: str
    type: str
    kind: str
    bytes: int
    source: str

    def __str__(self) -> str:
        return f"{bytes_text(self.bytes):>10}  {self.kind:<18} {self.name}: {self.type}  ({self.source})"


@dataclass(frozen=True)
class Memory:
    """Peak bytes of one device. All figures are exact for the program's order.

    `by_kind` sums `live`, the buffers at the peak; `at` says where the peak is; `timeline_bytes` has one figure per
    instruction. `host_bytes` is the peak of what this device keeps in the memory of its host, apart from the rest.
    """

    peak_bytes: int
    by_kind: dict[str, int]
    live: tuple[Live, ...]
    at: str
    timeline_bytes: tuple[int, ...]
    host_bytes: int = 0

    def __str__(self) -> str:
        lines = [f"memory per core: peak {bytes_text(self.peak_bytes)} ({self.peak_bytes} bytes, exact) at {self.at}"]
        lines += [f"  {kind:<18} {bytes_text(n):>10}" for kind, n in self.by_kind.items() if n]
        lines += ["  live at the peak:"]
        lines += [f"    {v}" for v in sorted(self.live, key=lambda v: -v.bytes)]
        if self.host_bytes:
            lines.append(f"  on the host: {bytes_text(self.host_bytes)} ({self.host_bytes} bytes, exact)")
        return "\n".join(lines)


def measure(program: Program) -> Memory:
    """Walk the order, allocate and free."""
    return Liveness(program).run()


class Liveness:
    """One walk over a program's order that allocates, shares and frees buffers; `run` gives the `Memory`."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.last = _last_uses(program)
        self.inside = fused_values(program)
        self.ends: dict[int, list[Value]] = {}  # per instruction the values that nobody needs after it
        for n, i in enumerate(program.instructions):
            for y in i.outputs:
                self.ends.setdefault(self.last.get(y, n), []).append(y)
        self.groups: dict[int, list[tuple[int, Instruction]]] = {}
        for n, i in enumerate(program.instructions):
            self.groups.setdefault(i.group, []).append((n, i))
        self.buffer: dict[Value, Value] = {}  # value -> the value that owns its memory
        self.holders: dict[Value, int] = {}  # owner -> live values in its memory
        self.resident = {v for v in (*program.inputs.values(), *program.variables.values()) if not v.tensor.on_host}
        self.old = {v: program.variables.get(n) for n, v in program.updates.items()}
        self.owned: dict[Value, Value] = {}  # owners that are live, and the value they show
        self.now = 0
        self.made_by = {y: i for i in program.instructions for y in i.outputs}

    def run(self) -> Memory:
        for v in self.resident:
            self._allocate(v)
        peak, at, live = self.now, "the start", dict(self.owned)
        timeline = []
        for n, i in enumerate(self.program.instructions):
            if i.opcode not in ("input", "variable"):
                for k, y in enumerate(i.outputs):
                    if y not in self.inside and not y.tensor.on_host:
                        self._place(n, i, y, i.inputs[k] if i.is_collective else None)
            # While a loop runs, its body's own buffers lie on top; its operands are counted outside.
            inner = 0
            if i.body is not None:
                inputs = i.body.inputs.values()
                inner = i.body.memory.peak_bytes - sum(v.local_bytes for v in inputs if not v.tensor.on_host)
            if self.now + inner > peak:
                peak, at, live = (
                    self.now + inner,
                    f"{i.opcode} '{i.operation.name}' ({i.operation.source})",
                    dict(self.owned),
                )
            timeline.append(self.now + inner)
            for v in self.ends.get(n, ()):
                self._release(v)
        shown = [self._live(owner, value) for owner, value in live.items()]
        loop = peak - sum(v.bytes for v in shown)
        if loop:
            shown.append(Live(at, "inside the loop", "temporaries", loop, at))
        by_kind = {k: sum(v.bytes for v in shown if v.kind == k) for k in KINDS}
        return Memory(peak, by_kind, tuple(shown), at, tuple(timeline), self._host_bytes())

    def _host_bytes(self) -> int:
        """The most that lies on the host at once; what the body of a loop takes and returns is counted outside."""
        program = self.program
        outside = {*program.inputs.values(), *(program.outputs.values() if program.is_body else ())}

        def held(values: Iterable[Value]) -> int:
            return sum(v.local_bytes for v in values if v.tensor.on_host and v not in outside)

        peak = now = 0
        for n, i in enumerate(program.instructions):
            now += held(i.outputs)
            peak = max(peak, now + (i.body.memory.host_bytes if i.body is not None else 0))
            now -= held(self.ends.get(n, ()))
        return peak

    def _allocate(self, v: Value) -> None:
        self.buffer[v] = v
        self.holders[v] = 1
        self.owned[v] = v
        self.now += v.local_bytes

    def _share(self, v: Value, owner: Value) -> None:
        self.buffer[v] = owner
        self.holders[owner] += 1
        if v.local_bytes and owner not in self.resident:
            self.owned[owner] = v

    def _place(self, n: int, i: Instruction, y: Value, moved: Value | None) -> None:
        group = self.groups[i.group]
        begin, end = group[0][0], group[-1][0]
        in_place = all(_is_elementwise(member) for _, member in group)
        old = self.old.get(y)
        if old is not None and self.buffer.get(old) is old:
            last = self.last.get(old, -1)
            if last < begin or (in_place and last <= end):
                self._share(y, old)
                return
        if not i.is_reshard and i.operation.kind.storage is Storage.ALIAS and i.inputs[0] in self.buffer:
            self._share(y, self.buffer[i.inputs[0]])
            return
        candidates: Iterable[Value] = ()
        if moved is not None:
            candidates = (moved,) if i.opcode == "all_reduce" else ()
        elif in_place:
            candidates = (x for _, member in group for x in member.inputs)
        for x in candidates:
            owner = self.buffer.get(x)
            if owner is None or owner in self.resident or self.holders[owner] > 1:
                continue
            if self.last[x] <= end and owner.local_bytes == y.local_bytes:
                self._share(y, owner)
                return
        self._allocate(y)

    def _release(self, v: Value) -> None:
        owner = self.buffer.pop(v, None)
        if owner is None or owner in self.resident:
            if owner is not None:
                self.buffer[v] = owner
            return
        self.holders[owner] -= 1
        if self.holders[owner] == 0:
            self.now -= owner.local_bytes
            del self.owned[owner]

    def _live(self, owner: Value, value: Value) -> Live:
        t = value.tensor
        return Live(t.name, str(value), self._kind(value), owner.local_bytes, t.operation.source)

    def _kind(self, v: Value) -> str:
        op = v.tensor.operation
        if v in self.resident:
            if op.kind is INPUT:
                return "inputs"
            return "slots" if op.attrs["slot_of"] else "variables"
        if v.tensor in op.graph.gradient_of:
            return "gradients"
        if self.made_by[v].is_collective:
            return "collective buffers"
        return "activations" if op.region == FORWARD else "temporaries"


def _is_elementwise(i: Instruction) -> bool:
    """Whether each element of the result needs operands at its own position only, or what is made anew there."""
    if i.is_reshard or i.exchanges or i.body is not None:
        return False
    kind = i.operation.kind
    return kind.kind is Kind.ELEMENTWISE or kind.storage is Storage.ALIAS or kind.remade


def _last_uses(program: Program) -> dict[Value, int]:
    """The last instruction that needs each value; what is fetched or written back is needed to the end."""
    last = {x: n for n, i in enumerate(program.instructions) for x in i.inputs}
    # Inside a fusion group all operands are read by one kernel: they live until its last member.
    ends = {i.group: n for n, i in enumerate(program.instructions)}
    for i in program.instructions:
        for x in i.inputs:
            last[x] = max(last[x], ends[i.group])
    end = len(program.instructions)
    last.update(dict.fromkeys(program.outputs.values(), end))
    last.update(dict.fromkeys(program.updates.values(), end))
    return last


def fused_values(program: Program) -> set[Value]:
    """Values that are made and used inside one fusion group only: they occupy no HBM."""
    users: dict[Value, set[int]] = {}
    for i in program.instructions:
        for x in i.inputs:
            users.setdefault(x, set()).add(i.group)
    kept = {*program.outputs.values(), *program.updates.values()}
    kept |= {*program.inputs.values(), *program.variables.values()}
    return {y for i in program.instructions for y in i.outputs if y not in kept and users.get(y, set()) <= {i.group}}
