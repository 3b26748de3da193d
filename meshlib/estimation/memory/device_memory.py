"""Device memory over time in whole tiles, whether the program fits, and remedies.

The buffers are those of the program (`meshlib.program.analysis.buffers`), each padded to whole tiles in its densest
layout; `program.memory` has the same buffers without padding, for any machine. Whether a program fits, here and in
`mtf.testing.assert_fits`, is decided by the memory of its compiled step (`compiled`), under plain jit if the program
was lowered for `mtf.GSPMD`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hardware.slices import Slice
from meshlib.core.arguments import whole
from meshlib.core.compiler import GSPMD, Compiler
from meshlib.core.shown import Shown
from meshlib.core.text import bytes_text, grid
from meshlib.estimation.memory.compiled import FILE_BYTES, CompiledStepMemory, compiled_memory
from meshlib.estimation.memory.remedies import Remedy, remedies
from meshlib.estimation.work.tiles import tiled_value_bytes
from meshlib.program.analysis.memory import KINDS, Live, kinds_after, measure
from meshlib.program.records import Program

STATE = ("variables", "slots", "gradients")  # the `KINDS` whose size does not depend on the batch


@dataclass(frozen=True, repr=False)
class DeviceMemory(Shown):
    """Memory of one device in one step. Bytes are exact for the program's order.

    Attributes:
      capacity_bytes: HBM that is available to programs.
      built_bytes: HBM as built.
      peak_bytes: peak with tile padding.
      exact_peak_bytes: peak without padding, as `program.memory.peak_bytes`.
      by_kind: padded bytes at the peak, by kind.
      timeline_bytes, moments: padded bytes at each instruction, and the instructions in words.
      live: the buffers at the peak with their source lines, `bytes` padded, largest first.
      at: the instruction at the peak.
      notes: notes of the program, such as a mesh axis that splits nothing.
      host_bytes: peak bytes in host memory.
      compiler: the compiler of the step.
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
    moments: tuple[str, ...]
    built_bytes: int
    compiler: Compiler
    program: Program = field(compare=False)

    @cached_property
    def remedies(self) -> tuple[Remedy, ...]:
        """Remedies that lower the peak, best first, evaluated for this order of the program, alone or combined."""
        return remedies(self.program, self.capacity_bytes - (self.needed_bytes - self.peak_bytes))

    @cached_property
    def timeline_by_kind(self) -> tuple[tuple[int, ...], ...]:
        """Padded bytes by kind: one tuple per instruction."""
        return tuple(zip(*kinds_after(self.program, tiled_value_bytes).values(), strict=True))

    @cached_property
    def state_bytes(self) -> int:
        """Peak padded bytes of variables, slots and gradients together: a lower bound for every batch."""
        return max(sum(dict(zip(KINDS, sizes, strict=True))[kind] for kind in STATE) for sizes in self.timeline_by_kind)

    @cached_property
    def compiled(self) -> CompiledStepMemory:
        """Memory of the compiled step and of a whole run, by cause. Modelled."""
        return compiled_memory(self.program, self.compiler, self.peak_bytes, self.capacity_bytes)

    @property
    def needed_bytes(self) -> int:
        """Memory that the compiled step needs. Modelled."""
        return self.compiled.step_bytes

    @property
    def run_bytes(self) -> int:
        """Memory of a whole run, including exports of float32 weights in files of 5 GB. Modelled."""
        return self.compiled.run_bytes

    @property
    def plain_jit_bytes(self) -> int:
        """Memory of the same step under plain `jit` with sharding annotations (`mtf.GSPMD`). Modelled."""
        return compiled_memory(self.program, GSPMD, self.peak_bytes, self.capacity_bytes).step_bytes

    @property
    def fits(self) -> bool:
        """True if the compiled step fits the device; for whole runs see `verdict`."""
        return self.needed_bytes <= self.capacity_bytes

    @property
    def verdict(self) -> str:
        """ "yes"; "tight" if the step fits but a whole run may not; "no"."""
        if not self.fits:
            return "no"
        return "yes" if self.run_bytes <= self.capacity_bytes else "tight"

    @property
    def message(self) -> str:
        """One line if it fits (two if padding is large); otherwise sizes, the largest tensors, notes, remedies."""
        needs, capacity = bytes_text(self.needed_bytes), bytes_text(self.capacity_bytes)
        share = f"{self.needed_bytes / self.capacity_bytes:.1%}"
        if self.fits:
            line = f"fits: needs {needs}* of {capacity} on each device of {self.slice_name} ({share})"
            return "\n".join([line, *self._tight(), *self._padding()])
        over = bytes_text(self.needed_bytes - self.capacity_bytes)
        lines = [
            f"does not fit: each device of {self.slice_name} has {capacity} ({self.capacity_bytes} bytes) and needs "
            f"{needs}* ({share}), {over}* too much; the peak, {bytes_text(self.peak_bytes)} ({self.peak_bytes} bytes "
            f"in tiles), is at {self.at}",
            *self._padding(),
            "  largest tensors:",
            *(f"    {v}" for v in self.live[:5]),
            *(f"  note: {note}" for note in self.notes),
        ]
        if self.remedies:
            lines += [
                "  what would help (for this order of the program, each alone unless stated):",
                *(f"    {r}" for r in self.remedies),
            ]
        return "\n".join(lines)

    def _tight(self) -> list[str]:
        """The parts of a whole run that may not fit beside the step."""
        if self.verdict != "tight":
            return []
        over = bytes_text(self.run_bytes - self.capacity_bytes)
        return [f"  tight: a whole run needs {bytes_text(self.run_bytes)}*, {over}* too much"]

    def three_ways(self) -> list[str]:
        """Memory of the step, of plain jit and of a whole run, one line each; memory offered and built."""
        c = self.compiled
        offered = f"{bytes_text(self.capacity_bytes)} offered to programs of {bytes_text(self.built_bytes)}"
        adds = {
            "attention's layout and sums": c.layout_bytes,
            "casts": c.casts_bytes,
            "products in loops": c.loops_bytes,
        }
        adds |= {"code": c.code_bytes, "fragmentation": c.fragmentation_bytes}
        causes = ", ".join(f"{name} {bytes_text(size)}" for name, size in adds.items() if size)
        lines = [f"fits: {self.verdict} ({offered})"]
        lines.append(f"  compiled step*     {bytes_text(self.needed_bytes):>10}  with {causes}")
        if self.compiler.partitioner != GSPMD.partitioner:
            lines.append(f"  plain jit (GSPMD)* {bytes_text(self.plain_jit_bytes):>10}")
        export = f"; an export in files of {bytes_text(FILE_BYTES)} counts" if c.export_bytes else ""
        return [*lines, f"  a whole run*       {bytes_text(self.run_bytes):>10}  of several programs{export}"]

    def _padding(self) -> list[str]:
        """The cost of tile padding, where it is significant."""
        added, exact = self.peak_bytes - self.exact_peak_bytes, bytes_text(self.exact_peak_bytes)
        if added < 0.05 * self.peak_bytes:
            return []
        return [
            f"  the peak, {bytes_text(self.peak_bytes)}, takes {exact} without padding: blocks that do not fill tiles "
            "of 8 x 128, in any order of dims, take whole tiles; split another dim"
        ]

    def over_time(self, rows: int = 16) -> str:
        """Memory over the step as text, in `rows` intervals with the peak of each by kind.

        Raises: GraphError unless rows is a whole number of at least 1.
        """
        whole(rows, "over_time", "rows", low=1)
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
        return f"<DeviceMemory: needs {bytes_text(self.needed_bytes)}* of {bytes_text(self.capacity_bytes)}>"

    def __str__(self) -> str:
        lines = [
            self.message,
            f"peak per device at {self.at}: {self.peak_bytes} bytes in tiles, {self.exact_peak_bytes} without padding "
            "(both exact)",
        ]
        lines += [f"  {kind:<18} {bytes_text(n):>10}" for kind, n in self.by_kind.items() if n]
        if self.host_bytes:
            lines.append(f"  on the host, besides {bytes_text(self.host_bytes):>8}")
        lines += [*self.three_ways(), "* modelled; all others exact"]
        return "\n".join(lines)


def memory_on(program: Program, slice_: Slice, compiler: Compiler | None = None) -> DeviceMemory:
    """Memory of one device of `slice_` running `program`, by default with the compiler it was lowered for."""
    padded = measure(program, tiled_value_bytes)
    return DeviceMemory(
        slice_.name,
        slice_.usable_hbm_bytes_per_device,
        padded.peak_bytes,
        program.memory.peak_bytes,
        padded.by_kind,
        tuple(sorted(padded.live, key=lambda v: v.type == "inside the loop")),  # the rest stays sorted by size
        padded.at,
        program.notes,
        padded.host_bytes,
        padded.timeline_bytes,
        tuple(f"{i.opcode} {i.operation.name}" for i in program.instructions),
        slice_.chip.hbm_bytes_per_device,
        compiler or program.compiler,
        program,
    )
