"""Memory of one device over time, in whole tiles, whether it fits, and what would help where it does not.

The buffers are those of the program (`meshlib.program.analysis.buffers`); here each takes the tiles that its block
fills, the densest way round. That is the figure that decides whether a program fits, here and in
`mtf.testing.assert_fits`; `program.memory` has the same buffers without padding, for any machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from hardware.slices import Slice
from meshlib.core.arguments import at, whole
from meshlib.core.errors import GraphError
from meshlib.core.shown import Shown
from meshlib.core.text import bytes_text, grid
from meshlib.estimation.memory.remedies import Remedy, remedies
from meshlib.estimation.work.tiles import tiled_value_bytes
from meshlib.program.analysis.memory import KINDS, Live, kinds_after, measure
from meshlib.program.records import Program


@dataclass(frozen=True, repr=False)
class DeviceMemory(Shown):
    """Memory of one device in one step. Bytes are exact for the program's order.

    Attributes:
      capacity_bytes: HBM of the device.
      peak_bytes: with tile padding; exact_peak_bytes: without, the `program.memory.peak_bytes`.
      by_kind: padded bytes at the peak; timeline_bytes: padded, one figure per instruction; timeline_by_kind: the
        same, divided; moments: these instructions.
      live: the buffers at the peak with their source lines, `bytes` padded, largest first.
      at: where the peak is.
      notes: of the program, such as that an axis of the mesh splits nothing.
      host_bytes: what lies in the memory of the host at most, besides.
    """

    slice_name: str
    capacity_bytes: int
    peak_bytes: int
    exact_peak_bytes: int
    by_kind: dict[str, int]
    live: tuple[Live, ...]
    at: str
    notes: tuple[str, ...]
    host_bytes: int
    timeline_bytes: tuple[int, ...]
    timeline_by_kind: tuple[tuple[int, ...], ...]
    moments: tuple[str, ...]
    find_remedies: Callable[[], tuple[Remedy, ...]] = field(compare=False)

    @cached_property
    def remedies(self) -> tuple[Remedy, ...]:
        """What would lower the peak, best first, worked out for this order of the program; each alone, or together."""
        return self.find_remedies()

    @property
    def fits(self) -> bool:
        """Whether the peak, padding included, is no more than the HBM of the device."""
        return self.peak_bytes <= self.capacity_bytes

    @property
    def message(self) -> str:
        """One line where it fits, and one if tiles add much; otherwise both sizes, the largest tensors, notes of the
        program and what would help."""
        peak, capacity = bytes_text(self.peak_bytes), bytes_text(self.capacity_bytes)
        share = f"{self.peak_bytes / self.capacity_bytes:.1%}"
        if self.fits:
            line = f"fits: peak {peak} of {capacity} on each device of {self.slice_name} ({share}; in tiles)"
            return "\n".join([line, *self._padding()])
        over = bytes_text(self.peak_bytes - self.capacity_bytes)
        lines = [
            f"does not fit: each device of {self.slice_name} has {capacity} ({self.capacity_bytes} bytes), "
            f"the peak takes {peak} ({self.peak_bytes} bytes, {share}; in tiles), {over} too much, at {self.at}",
            *self._padding(),
            "  largest tensors:",
            *(f"    {v}" for v in self.live[:5]),
            *(f"  note: {note}" for note in self.notes),
        ]
        if self.remedies:
            lines += [
                "  what would help (for this order of the program, each alone unless it says so):",
                *(f"    {r}" for r in self.remedies),
            ]
        return "\n".join(lines)

    def _padding(self) -> list[str]:
        """What tiles add, where it is worth a line."""
        added, exact = self.peak_bytes - self.exact_peak_bytes, bytes_text(self.exact_peak_bytes)
        if added < 0.05 * self.peak_bytes:
            return []
        return [
            f"  without padding it takes {exact}: blocks that do not fill tiles of 8 x 128, "
            "however they lie, take whole ones; split another dim"
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

    def plot(self, ax: Any = None) -> Any:
        """Draw memory over the program's instructions, stacked by kind; needs matplotlib.

        Args:
          ax: matplotlib Axes, or the path of a file (.png, .svg, .pdf); by default a new figure.
        Returns: the Axes.
        Raises: GraphError where matplotlib is missing, or the file cannot be written.
        """
        from meshlib.report.plots import plot_device_memory

        return plot_device_memory(self, ax)

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
    padded = measure(program, tiled_value_bytes)
    kinds = kinds_after(program, tiled_value_bytes)
    return DeviceMemory(
        slice_.name,
        slice_.usable_hbm_bytes_per_device,
        padded.peak_bytes,
        program.memory.peak_bytes,
        padded.by_kind,
        tuple(sorted(padded.live, key=lambda v: v.type == "inside the loop")),  # the others stay largest first
        padded.at,
        program.notes,
        padded.host_bytes,
        padded.timeline_bytes,
        tuple(zip(*kinds.values(), strict=True)),
        tuple(f"{i.opcode} {i.operation.name}" for i in program.instructions),
        partial(remedies, program, slice_.usable_hbm_bytes_per_device),
    )
