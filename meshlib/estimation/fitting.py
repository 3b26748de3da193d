"""Memory of one device over time, in whole tiles, whether it fits, and what would help where it does not.

The liveness is that of `meshlib.program.memory` over the same order; here each buffer takes the tiles that its block
fills. Both figures are given: without padding exact, with padding exact for dims in their named order (a compiler
may choose a denser order).

Sources: `hardware.memory` for tiles; `meshlib.program.memory` for who is live when.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from hardware.slices import Slice
from meshlib.checks import at, whole
from meshlib.errors import GraphError
from meshlib.estimation.kernels import padded_value_bytes
from meshlib.estimation.remedies import Remedy, Size, remedies
from meshlib.estimation.table import grid
from meshlib.program.instructions import Loop, Resident, Value
from meshlib.program.memory import KINDS, Live, Liveness
from meshlib.program.records import Program, bytes_text


@dataclass(frozen=True, repr=False)
class DeviceMemory:
    """Memory of one device in one step. Bytes are exact for the order and the dims as named.

    Attributes:
      capacity_bytes: HBM of the device.
      peak_bytes: with tile padding; exact_peak_bytes: without, the `program.memory.peak_bytes`.
      by_kind: padded bytes at the peak; timeline_bytes: padded, one figure per instruction; timeline_by_kind: the
        same, divided; moments: these instructions.
      live: the buffers at the peak with their source lines, `bytes` padded, largest first.
      at: where the peak is.
      host_bytes: what lies in the memory of the host at most, besides.
    """

    slice_name: str
    capacity_bytes: int
    peak_bytes: int
    exact_peak_bytes: int
    by_kind: dict[str, int]
    live: tuple[Live, ...]
    at: str
    host_bytes: int
    timeline_bytes: tuple[int, ...]
    timeline_by_kind: tuple[tuple[int, ...], ...]
    moments: tuple[str, ...]
    find_remedies: Callable[[], tuple[Remedy, ...]] = field(compare=False)

    @cached_property
    def remedies(self) -> tuple[Remedy, ...]:
        """What would lower the peak, best first; each alone, worked out for this order of the program."""
        return self.find_remedies()

    @property
    def fits(self) -> bool:
        """Whether the peak, padding included, is no more than the HBM of the device."""
        return self.peak_bytes <= self.capacity_bytes

    @property
    def message(self) -> str:
        """One line where it fits; otherwise both sizes, the largest tensors and what would help."""
        peak, capacity = bytes_text(self.peak_bytes), bytes_text(self.capacity_bytes)
        share = f"{self.peak_bytes / self.capacity_bytes:.1%}"
        if self.fits:
            return f"fits: peak {peak} of {capacity} on each device of {self.slice_name} ({share}; exact)"
        over = bytes_text(self.peak_bytes - self.capacity_bytes)
        lines = [
            f"does not fit: each device of {self.slice_name} has {capacity} ({self.capacity_bytes} bytes), "
            f"the peak takes {peak} ({self.peak_bytes} bytes, {share}; exact), {over} too much, at {self.at}",
            *self._padding(),
            "  largest tensors:",
            *(f"    {v}" for v in self.live[:5]),
        ]
        if self.remedies:
            lines += [
                "  what would help (for this order of the program, each alone):",
                *(f"    {r}" for r in self.remedies),
            ]
        return "\n".join(lines)

    def _padding(self) -> list[str]:
        """What tiles add, where it is worth a line."""
        added = self.peak_bytes - self.exact_peak_bytes
        if added < 0.05 * self.peak_bytes:
            return []
        return [
            f"  without padding the peak takes {bytes_text(self.exact_peak_bytes)}: blocks whose last dim is no "
            "multiple of 128 fill their tiles up; split another dim, or name a longer one last (a compiler may do that)"
        ]

    def over_time(self, rows: int = 16) -> str:
        """Memory over the step as text: the order in that many parts, of each the moment that takes most, by kind.

        Raises: GraphError for another number than of rows.
        """
        if whole(rows, "over_time", "rows") < 1:
            raise GraphError(f"{at('over_time')}: rows must be at least 1, got {rows}")
        count = len(self.timeline_bytes)
        shown = [n for n, kind in enumerate(KINDS) if any(kinds[n] for kinds in self.timeline_by_kind)]
        cells = [("order", "total", *(KINDS[n] for n in shown), "", "largest at")]
        for part in range(min(rows, count)):
            span = range(part * count // min(rows, count), (part + 1) * count // min(rows, count))
            n = max(span, key=lambda n: self.timeline_bytes[n])
            bar = "#" * round(20 * self.timeline_bytes[n] / max(1, self.peak_bytes))
            kinds = (bytes_text(b) if b else "-" for b in (self.timeline_by_kind[n][k] for k in shown))
            moment = f"{100 * n / count:.0f} %", bytes_text(self.timeline_bytes[n])
            cells.append((*moment, *kinds, f"{bar:<20}", self.moments[n]))
        text = grid(cells, right=range(2 + len(shown)))
        return "\n".join([*text, f"bytes of one device of {self.slice_name} in tiles, exact for the program's order"])

    def __repr__(self) -> str:
        return f"<DeviceMemory: peak {bytes_text(self.peak_bytes)} of {bytes_text(self.capacity_bytes)}>"

    def __str__(self) -> str:
        lines = [
            self.message,
            f"peak per device at {self.at}: {self.peak_bytes} bytes in tiles, {self.exact_peak_bytes} without padding "
            "(both exact)",
        ]
        lines += [f"  {kind:<18} {bytes_text(n):>10}" for kind, n in self.by_kind.items() if n]
        if self.host_bytes:
            lines.append(f"  on the host, besides {bytes_text(self.host_bytes):>8}")
        return "\n".join(lines)


def memory_on(program: Program, slice_: Slice) -> DeviceMemory:
    """The memory of one device of `slice_` that runs `program`."""
    walk = _PaddedWalk(program, padded_value_bytes)
    walk.trace()
    live = tuple(sorted((walk.shown(*pair) for pair in walk.peak_live), key=lambda v: (-v.bytes, v.name)))
    inside = walk.peak - sum(v.bytes for v in live)
    if inside:
        live = (*live, Live(walk.at, "inside the loop", "temporaries", inside, walk.at))
    by_kind = {k: sum(v.bytes for v in live if v.kind == k) for k in KINDS}
    return DeviceMemory(
        slice_.name,
        slice_.hbm_bytes_per_device,
        walk.peak,
        walk.exact_peak,
        by_kind,
        live,
        walk.at,
        program.memory.host_bytes,
        tuple(walk.timeline),
        tuple(walk.by_kind_timeline),
        tuple(f"{i.opcode} {i.operation.name}" for i in program.instructions),
        lambda: remedies(program, [v for _, v in walk.peak_live], walk.kind, lambda size: _peak(program, size)),
    )


def _peak(program: Program, size: Size) -> int:
    walk = _PaddedWalk(program, size)
    walk.trace()
    return walk.peak


class _PaddedWalk(Liveness):
    """The walk of the liveness with buffers of other sizes, and what is live by kind after each instruction."""

    def __init__(self, program: Program, size: Size) -> None:
        super().__init__(program)
        self.size = size
        self.padded = 0
        self.kinds: dict[Value, int] = {}  # owner -> index of the kind that it counts as
        self.sums = [0] * len(KINDS)
        self.peak = self.exact_peak = 0
        self.at = "the start"
        self.peak_live: list[tuple[Value, Value]] = []
        self.timeline: list[int] = []
        self.by_kind_timeline: list[tuple[int, ...]] = []

    def trace(self) -> None:
        """As `run`, with padding."""
        for v in self.resident:
            self._allocate(v)
        self._note("the start", 0, 0)
        for n, i in enumerate(self.program.instructions):
            if not isinstance(i, Resident):
                for k, y in enumerate(i.outputs):
                    if y not in self.inside and not y.tensor.on_host:
                        self._place(n, i, y, i.inputs[k] if i.is_collective else None)
            inner = exact_inner = 0
            if isinstance(i, Loop):
                body = _PaddedWalk(i.body, self.size)
                body.trace()
                taken = {v for v in i.body.inputs.values() if not v.tensor.on_host}
                inner = body.peak - sum(self.size(v) for v in taken)
                exact_inner = body.exact_peak - sum(v.local_bytes for v in taken)
            self._note(f"{i.opcode} '{i.operation.name}' ({i.operation.source})", inner, exact_inner)
            self.timeline.append(self.padded + inner)
            sums = list(self.sums)
            sums[KINDS.index("temporaries")] += inner
            self.by_kind_timeline.append(tuple(sums))
            for v in self.ends.get(n, ()):
                self._release(v)

    def kind(self, v: Value) -> str:
        """Of a value of this program; nothing for one inside a loop."""
        return self._kind(v) if v in self.made_by or v in self.resident else ""

    def shown(self, owner: Value, value: Value) -> Live:
        """A buffer as a user sees it, with the tiles that it takes."""
        found = self._live(owner, value)
        return Live(found.name, found.type, found.kind, self.size(owner), found.source)

    def _note(self, at: str, inner: int, exact_inner: int) -> None:
        self.exact_peak = max(self.exact_peak, self.now + exact_inner)
        if self.padded + inner > self.peak:
            self.peak, self.at, self.peak_live = self.padded + inner, at, list(self.owned.items())

    def _allocate(self, v: Value) -> None:
        super()._allocate(v)
        self.padded += self.size(v)
        self._count(v, v)

    def _share(self, v: Value, owner: Value) -> None:
        super()._share(v, owner)
        if self.owned.get(owner) is v:
            self._count(owner, v)

    def _release(self, v: Value) -> None:
        owner = self.buffer.get(v)
        super()._release(v)
        if owner is not None and owner not in self.owned and owner in self.kinds:
            size = self.size(owner)
            self.padded -= size
            self.sums[self.kinds.pop(owner)] -= size

    def _count(self, owner: Value, shown: Value) -> None:
        size, kind = self.size(owner), KINDS.index(self._kind(shown))
        if owner in self.kinds:
            self.sums[self.kinds[owner]] -= size
        self.kinds[owner] = kind
        self.sums[kind] += size
