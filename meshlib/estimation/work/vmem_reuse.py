"""Operands still in VMEM from an earlier use: weights, values from outside a loop, carries.

A compiler leaves a buffer in VMEM between two uses if there is room. The model: a use finds its buffer if all bytes
moved since the previous use, plus the buffer itself, fit on the chip, as in an LRU cache. So the weights of a small or
recurrent network, and the cache of a short decode, cost HBM traffic once.

Values that only pass between kernels stay in VMEM while they live, smallest first, while weights stream past them: the
activations of a decoding step never reach HBM. A compiler assigns buffers to VMEM by live ranges, so this rule uses
live ranges instead of reuse distances: a value stays if it fits together with all smaller live values.

The common memory of a chip (CMEM of v4) can hold a part of a value, as much as intervening traffic leaves room for: a
compiler that knows the uses places a part there. A value that only passes between kernels and is found by all its
readers is never written to HBM.

In a loop the previous use may be in the previous trip. Values that persist over trips without HBM traffic save it in
all trips but the first.

Source: Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal 9(2), 1970 (stack
distances); openxla/xla memory_space_assignment keeps buffers in the alternate memory by the same criterion.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from hardware.chips import Chip
from meshlib.estimation.work.kernels import Kernel
from meshlib.estimation.work.units import Unit
from meshlib.program.instructions import Loop, Value

MOST_BYTES = 1 << 27  # the largest on-chip memory: CMEM of v4


@dataclass(eq=False)
class Recent:
    """Bytes moved by a device up to its last use of each buffer, in program or loop-body order.

    Attributes:
      trips: of the loop; 1 for a program.
      stays: buffers of a body that persist to the next trip; a carry's result maps to its operand.
      moved_bytes: total so far.
    """

    trips: int = 1
    stays: Mapping[Value, Value] = field(default_factory=dict)
    moved_bytes: int = 0
    _last: dict[Value, tuple[int, int]] = field(default_factory=dict)  # (bytes moved until then, bytes used)
    # (unit, total bytes, largest use, bytes moved before)
    _first: dict[Value, tuple[int, int, int, int]] = field(default_factory=dict)
    # (unit, bytes, bytes moved before, bytes moved until then)
    _passes: dict[Value, list[tuple[int, int, int, int]]] = field(default_factory=dict)
    _again: dict[int, list[tuple[int, int, float]]] = field(default_factory=dict)  # unit -> `Kernel.again`

    @classmethod
    def of(cls, loop: Loop) -> Recent:
        """State for a loop body: whole operands persist over trips, and carries are updated in place."""
        body = loop.body
        stays = {v: v for name, v in body.inputs.items() if name not in loop.slices}
        stays |= {body.outputs[end]: body.inputs[begin] for begin, end in loop.carries}
        return cls(loop.trips, stays)

    def run(self, unit: int, kernel: Kernel) -> None:
        """Count a kernel's traffic."""
        known: dict[Value, list[int]] = {}  # a carry may be read and written at once
        before, after = self.moved_bytes, self.moved_bytes + kernel.padded_bytes
        for use in kernel.uses:
            if not use.passes:
                known.setdefault(self.stays.get(use.buffer, use.buffer), []).append(use.padded_bytes)
            elif use.written or use.buffer in self._passes:
                uses = [] if use.written else self._passes[use.buffer]
                self._passes[use.buffer] = [*uses, (unit, use.padded_bytes, before, after)]
        for buffer, sizes in known.items():
            if buffer in self._last:
                then, used = self._last[buffer]
                if before - then < MOST_BYTES:
                    spared_bytes = float(sum(min(used, size) for size in sizes))
                    self._again.setdefault(unit, []).append((before - then, max(sizes), spared_bytes))
            elif buffer in self.stays and self.trips > 1:
                self._first[buffer] = unit, sum(sizes), max(sizes), before
        self.moved_bytes = after
        self._last.update({buffer: (after, max(sizes)) for buffer, sizes in known.items()})

    def leave(self, buffers: Iterable[Value]) -> None:
        """Record that these buffers are read by something other than a kernel, and so from HBM."""
        for buffer in buffers:
            self._passes.pop(buffer, None)

    def _reuse_distances(self) -> dict[int, list[tuple[int, float]]]:
        """For each unit, its temporaries: (bytes moved since the previous use, for a first use the most; own bytes)."""
        sizes_of_unit: dict[int, list[tuple[int, float]]] = {}
        for uses in self._passes.values():
            between = [now - then for (_, _, _, then), (_, _, now, _) in pairwise(uses)]
            for (unit, size, _, _), moved in zip(uses, [max(between, default=MOST_BYTES), *between], strict=True):
                if moved < MOST_BYTES:
                    sizes_of_unit.setdefault(unit, []).append((moved, float(size)))
        return sizes_of_unit

    def _resident(self, units: Sequence[Unit]) -> dict[int, list[tuple[int, float, bool]]]:
        """For each unit, its temporaries: (peak bytes of the value with smaller live ones, bytes used, whether read).
        Values live across a loop are excluded."""
        spans = []
        loops = np.cumsum([unit.body is not None for unit in units])
        for uses in self._passes.values():
            (first, size, *_), (last, *_) = uses[0], uses[-1]
            if last > first and size < MOST_BYTES and loops[last] == loops[first]:
                spans.append((size, first, last, uses))
        live = np.zeros(len(units) + 1)
        resident: dict[int, list[tuple[int, float, bool]]] = {}
        for size, first, last, uses in sorted(spans, key=lambda span: span[:3]):
            live[first : last + 1] += size
            most = int(live[first : last + 1].max())
            if most < MOST_BYTES:
                for n, (unit, used, *_) in enumerate(uses):
                    resident.setdefault(unit, []).append((most, float(used), n > 0))
        return resident

    def close(self, units: Sequence[Unit]) -> None:
        """Annotate the units with temporaries that stay on the chip, and for a body, buffers of the previous trip."""
        for buffer, (place, size, largest, before) in self._first.items():
            then, used = self._last[buffer]
            between = self.moved_bytes - then + before
            if between < MOST_BYTES:
                spared = size * min(1.0, used / max(1, largest)) * (self.trips - 1) / self.trips
                self._again.setdefault(place, []).append((between, largest, spared))
        kept, resident = self._reuse_distances(), self._resident(units)
        for place in {*kept, *resident, *self._again}:
            kernel = units[place].kernel
            if kernel is not None:
                units[place].kernel = replace(
                    kernel,
                    kept=tuple(sorted(kept.get(place, ()))),
                    resident=tuple(sorted(resident.get(place, ()))),
                    again=tuple(self._again.get(place, ())),
                )


def kept_bytes(kernel: Kernel, chip: Chip, held_bytes: int) -> float:
    """Bytes of temporaries that stay on the chip if it can hold `held_bytes`.

    In the common memory of a chip that has one (CMEM of v4) a part of a value may stay.
    """
    if chip.cmem_bytes:
        return sum(min(size, max(0, held_bytes - between)) for between, size in kernel.kept)
    return sum(size for most, size, _ in kernel.resident if most <= held_bytes)


def finds_operand(kernel: Kernel, held_bytes: int) -> bool:
    """True if all temporaries that a kernel reads are still on the chip if it can hold `held_bytes`."""
    on_chip_bytes = sum(size for most, size, read in kernel.resident if read and most <= held_bytes)
    return on_chip_bytes >= kernel.temporary_bytes


def found_bytes(kernel: Kernel, chip: Chip, held_bytes: int) -> float:
    """HBM operand bytes of a kernel that are still on the chip if it can hold `held_bytes`."""
    total = 0.0
    for between, size, spared in kernel.again:
        share = max(0.0, min(1.0, (held_bytes - between) / max(1, size)))
        total += spared * (share if chip.cmem_bytes else float(share == 1.0))
    return total
