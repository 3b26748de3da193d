"""Memory per device over the program's final order, in exact bytes without tile padding.

Sharing and live ranges are those of the program's plan (`meshlib.program.analysis.buffers`); the size of a buffer is
chosen by the caller: the bytes of its block, or those of the tiles that it fills. While a loop runs, its body's own
buffers are added; its operands are counted outside. `host_bytes` is the peak of host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from meshlib.core.explained_calls import explain_module
from meshlib.core.folding import alike, name_pattern, times_text
from meshlib.core.graph import FORWARD
from meshlib.core.opdef import Kind
from meshlib.core.shown import Shown
from meshlib.core.text import bytes_text
from meshlib.program.analysis.buffers import START, Buffer
from meshlib.program.instructions import Instruction, Loop, Value
from meshlib.program.records import Program

KINDS = ("variables", "slots", "inputs", "activations", "gradients", "collective buffers", "temporaries")

Size = Callable[[Value], int]  # size of a buffer


@dataclass(frozen=True)
class Live:
    """One buffer at the peak: its tensor, kind, bytes on one device, and source line."""

    name: str
    type: str
    kind: str
    bytes: int
    source: str

    def __str__(self) -> str:
        return f"{bytes_text(self.bytes):>10}  {self.kind:<18} {self.name}: {self.type}  ({self.source})"


@dataclass(frozen=True, repr=False)
class Memory(Shown):
    """Peak memory of one device in bytes. All figures are exact for the program's order.

    `by_kind` sums `live`, the buffers at the peak, largest first; `at` is the instruction of the peak; `timeline_bytes`
    has one figure per instruction. `host_bytes` is the peak of this device's values in host memory, not included
    elsewhere.
    """

    peak_bytes: int
    by_kind: dict[str, int]
    live: tuple[Live, ...]
    at: str
    timeline_bytes: tuple[int, ...]
    host_bytes: int = 0

    def plot(self, ax: Any = None) -> Any:
        """Plot memory over the program's instructions; needs matplotlib.

        Args:
          ax: matplotlib Axes, or the path of a file (.png, .svg, .pdf); by default a new figure.
        Returns: the Axes.
        Raises: GraphError where matplotlib is missing, or the file cannot be written.
        """
        from meshlib.report.plots import plot_memory

        return plot_memory(self, ax)

    def __repr__(self) -> str:
        return f"<Memory: peak {bytes_text(self.peak_bytes)} on each core>"

    def __str__(self) -> str:
        lines = [f"memory per core: peak {bytes_text(self.peak_bytes)} ({self.peak_bytes} bytes, exact) at {self.at}"]
        lines += [f"  {kind:<18} {bytes_text(n):>10}" for kind, n in self.by_kind.items() if n]
        lines += ["  live at the peak:"]
        groups = alike(self.live, likeness)
        lines += [f"    {times_text(str(group[0]), len(group))}" for group in groups]
        if self.host_bytes:
            lines.append(f"  on the host: {bytes_text(self.host_bytes)} ({self.host_bytes} bytes, exact)")
        return "\n".join(lines)


def likeness(v: Live) -> Hashable:
    """Grouping key of buffers of unrolled layers: all except the numbers in their names."""
    return (name_pattern(v.name), v.type, v.kind, v.bytes, name_pattern(v.source))


def exact_size(v: Value) -> int:
    """Bytes of a value's block on one device, without padding."""
    return v.local_bytes


def measure(program: Program, size: Size = exact_size) -> Memory:
    """The memory of a device whose buffers take `size` bytes."""
    usage = bytes_after(program, size)
    peak = max(usage)
    n = usage.index(peak) - 1
    live = [_live(program, *b.at(n), size(b.owner)) for b in live_buffers(program, n)]
    at = "the start" if n == START else moment(program.instructions[n])
    inside = peak - sum(v.bytes for v in live)
    if inside:
        live.append(Live(at, "inside the loop", "temporaries", inside, at))
    live.sort(key=lambda v: (-v.bytes, v.name))
    by_kind = {k: sum(v.bytes for v in live if v.kind == k) for k in KINDS}
    return Memory(peak, by_kind, tuple(live), at, tuple(usage[1:]), host_bytes(program))


def moment(i: Instruction) -> str:
    """The position of an instruction, in words."""
    return f"{i.opcode} '{i.operation.name}' ({i.operation.source})"


def bytes_after(program: Program, size: Size, loop: Loop | None = None) -> list[int]:
    """Allocated bytes at the start, then during each instruction.

    Args:
      program: the program, or a body with the `loop` that runs it.
      size: bytes of a buffer by its owner.
    """
    end = len(program.instructions)
    change = [0] * (end + 2)
    for b in program.buffers if loop is None else loop.buffers:
        taken_bytes = size(b.owner)
        change[b.begin + 1] += taken_bytes
        if b.end < end:
            change[b.end + 2] -= taken_bytes
    totals = [*accumulate(change)][:-1]
    for n, inner in inside_loops(program, size):
        totals[n + 1] += inner
    return totals


def inside_loops(program: Program, size: Size) -> Iterator[tuple[int, int]]:
    """Per loop its number and the peak of its body beyond its operands."""
    for n, i in enumerate(program.instructions):
        if isinstance(i, Loop):
            yield n, inside_bytes(i, size)


def inside_bytes(loop: Loop, size: Size = exact_size) -> int:
    """The peak of a loop's body beyond its operands."""
    outside = sum(size(v) for v in loop.body.inputs.values() if not v.tensor.on_host)
    return max(bytes_after(loop.body, size, loop)) - outside


def kinds_after(program: Program, size: Size) -> Mapping[str, list[int]]:
    """The result of `bytes_after` by kind, without the start."""
    end = len(program.instructions)
    change = {kind: [0] * (end + 2) for kind in KINDS}
    for b in program.buffers:
        until = [*(n for n, _ in b.shown[1:]), b.end + 1 if b.end < end else end]
        for (begin, v), stop in zip(b.shown, until, strict=True):
            kind = change[kind_of(program, v, begin)]
            kind[begin + 1] += size(b.owner)
            kind[stop + 1] -= size(b.owner)
    bytes_by_kind = {kind: [*accumulate(steps)][1:-1] for kind, steps in change.items()}
    for n, inner in inside_loops(program, size):
        bytes_by_kind["temporaries"][n] += inner
    return bytes_by_kind


def kind_of(program: Program, v: Value, made_at: int) -> str:
    """The kind, of `KINDS`, of a value in memory; `made_at` is the number of its instruction."""
    op = v.tensor.operation
    if made_at == START:
        if op.opdef.kind is Kind.INPUT:
            return "inputs"
        return "slots" if op.attrs["slot_of"] else "variables"
    if v.tensor in op.graph.gradient_of:
        return "gradients"
    if program.instructions[made_at].is_collective:
        return "collective buffers"
    return "activations" if op.region == FORWARD else "temporaries"


def live_buffers(program: Program, n: int) -> list[Buffer]:
    """The buffers that are live during instruction `n`."""
    return [b for b in program.buffers if b.begin <= n <= b.end]


def _live(program: Program, made_at: int, v: Value, size: int) -> Live:
    t = v.tensor
    return Live(t.name, str(v), kind_of(program, v, made_at), size, t.operation.source)


def host_bytes(program: Program) -> int:
    """Peak of host memory; operands and results of a loop's body are counted outside.

    The new value of a variable on the host replaces the old one.
    """
    outside = {*program.inputs.values(), *(program.outputs.values() if program.is_body else ())}
    stored = [v for v in program.variables.values() if v.tensor.on_host]
    outside.update(stored, program.updates.values())
    ends: dict[int, int] = {}  # by instruction, bytes of which it is the last user
    peak = now = sum(v.local_bytes for v in stored)
    for n, i in enumerate(program.instructions):
        for y in i.outputs:
            if y.tensor.on_host and y not in outside:
                now += y.local_bytes
                last = program.last_use.get(y, n)
                ends[last] = ends.get(last, 0) + y.local_bytes
        peak = max(peak, now + (host_bytes(i.body) if isinstance(i, Loop) else 0))
        now -= ends.get(n, 0)
    return peak


explain_module(__name__)
