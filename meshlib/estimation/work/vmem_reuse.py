"""Operands that are still in VMEM: weights used before, values from outside a loop, carries.

A compiler leaves a buffer in VMEM between two uses if it has the room. Here a use finds it there if all that was moved
since the use before, and the buffer itself, fit what a chip holds: the rule of a cache that forgets what was used least
recently. A small network, the weights of a recurrent one and the cache of a short decode so cost HBM once.

Values that only pass between kernels stay in VMEM as long as they live, the smallest first, while weights stream past
them: the activations of a step of decoding never reach HBM. A compiler assigns buffers to VMEM by their live ranges, so
the rule is one of live ranges, too, and no distance: a value stays if it and all smaller ones fit together, whenever it
lives.

Of what does not fit whole a chip's common memory (CMEM of v4) holds as much as what is moved in between leaves room
for: a compiler that knows the uses puts a part there. Of what only passes from kernel to kernel, and all who read it
find there, nothing is written to HBM.

In a loop the use before may be one of the trip before. What goes from trip to trip without being read or written in HBM
saves that in all trips but the first.

Source: Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal 9(2), 1970 (distances in a
stack); openxla/xla memory_space_assignment keeps buffers in the alternate memory by the same question.
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

MOST_BYTES = 1 << 27  # no chip holds more: CMEM of v4


@dataclass(eq=False)
class Recent:
    """Bytes that a device has moved when it last used each buffer, in the order of a program or a loop's body.

    Attributes:
      trips: of the loop; 1 of a program.
      stays: of a body's buffers, those that are the same in the next trip; a carry's result stands for its operand.
      moved_bytes: so far.
    """

    trips: int = 1
    stays: Mapping[Value, Value] = field(default_factory=dict)
    moved_bytes: int = 0
    _last: dict[Value, tuple[int, int]] = field(default_factory=dict)  # moved till then, bytes used of it
    _first: dict[Value, tuple[int, int, int, int]] = field(default_factory=dict)  # unit, all, largest, moved before
    _passes: dict[Value, list[tuple[int, int, int, int]]] = field(
        default_factory=dict
    )  # unit, bytes, moved before, till

    @classmethod
    def of(cls, loop: Loop) -> Recent:
        """Of the body of a loop: what it takes whole from outside is the same in each trip, carries are in place."""
        body = loop.body
        stays = {v: v for name, v in body.inputs.items() if name not in loop.slices}
        stays |= {body.outputs[end]: body.inputs[begin] for begin, end in loop.carries}
        return cls(loop.trips, stays)

    def run(self, unit: int, kernel: Kernel) -> Kernel:
        """A kernel with what it finds again of what lies in HBM; what it moves is counted."""
        known: dict[Value, list[int]] = {}  # a carry may be read and written at once
        before, after = self.moved_bytes, self.moved_bytes + kernel.padded_bytes
        for use in kernel.uses:
            if not use.passes:
                known.setdefault(self.stays.get(use.buffer, use.buffer), []).append(use.padded_bytes)
            elif use.written or use.buffer in self._passes:
                uses = [] if use.written else self._passes[use.buffer]
                self._passes[use.buffer] = [*uses, (unit, use.padded_bytes, before, after)]
        again = []
        for buffer, sizes in known.items():
            if buffer in self._last:
                then, used = self._last[buffer]
                if before - then < MOST_BYTES:
                    again.append((before - then, max(sizes), float(sum(min(used, size) for size in sizes))))
            elif buffer in self.stays and self.trips > 1:
                self._first[buffer] = unit, sum(sizes), max(sizes), before
        self.moved_bytes = after
        self._last.update({buffer: (after, max(sizes)) for buffer, sizes in known.items()})
        return replace(kernel, again=tuple(again)) if again else kernel

    def leave(self, buffers: Iterable[Value]) -> None:
        """Note that something other than a kernel reads them, and so in HBM."""
        for buffer in buffers:
            self._passes.pop(buffer, None)

    def _kept(self) -> dict[int, list[tuple[int, float]]]:
        """For each unit, the values that pass: bytes moved since the use before, and of the value."""
        sizes_of_unit: dict[int, list[tuple[int, float]]] = {}
        for uses in self._passes.values():
            between = [now - then for (_, _, _, then), (_, _, now, _) in pairwise(uses)]
            for (unit, size, _, _), moved in zip(uses, [max(between, default=MOST_BYTES), *between], strict=True):
                if moved < MOST_BYTES:
                    sizes_of_unit.setdefault(unit, []).append((moved, float(size)))
        return sizes_of_unit

    def _resident(self, units: Sequence[Unit]) -> dict[int, list[tuple[int, float, bool]]]:
        """For each unit, the values that pass: the most that is live at once of each and of smaller ones, its bytes
        that are used, and whether they are read. What is live beside a loop is not among them.
        """
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
        """Add to the units what they keep of the values that pass, and to those of a body what the trip before left."""
        for place, kept in self._kept().items():
            kernel = units[place].kernel
            if kernel is not None:
                units[place].kernel = replace(kernel, kept=tuple(sorted(kept)))
        for place, resident in self._resident(units).items():
            kernel = units[place].kernel
            if kernel is not None:
                units[place].kernel = replace(kernel, resident=tuple(sorted(resident)))
        for buffer, (place, size, largest, before) in self._first.items():
            then, used = self._last[buffer]
            between = self.moved_bytes - then + before
            kernel = units[place].kernel
            if between < MOST_BYTES and kernel is not None:
                spared = size * min(1.0, used / max(1, largest)) * (self.trips - 1) / self.trips
                units[place].kernel = replace(kernel, again=(*kernel.again, (between, largest, spared)))


def kept_bytes(kernel: Kernel, chip: Chip, held_bytes: int) -> float:
    """Bytes that only pass from kernel to kernel and stay on the chip where so much stays there.

    In the common memory of a chip that has one (CMEM of v4) a part of a value may stay.
    """
    if chip.cmem_bytes:
        return sum(min(size, max(0, held_bytes - between)) for between, size in kernel.kept)
    return sum(size for most, size, _ in kernel.resident if most <= held_bytes)


def finds_operand(kernel: Kernel, held_bytes: int) -> bool:
    """Whether all that a kernel reads of other kernels' results is still on the chip, where so much stays there."""
    found = sum(size for most, size, read in kernel.resident if read and most <= held_bytes)
    return found >= sum(use.padded_bytes for use in kernel.uses if use.passes and not use.written)


def found_bytes(kernel: Kernel, chip: Chip, held_bytes: int) -> float:
    """Of what a kernel reads in HBM, the bytes that are still on the chip where so much stays there."""
    total = 0.0
    for between, size, spared in kernel.again:
        share = max(0.0, min(1.0, (held_bytes - between) / max(1, size)))
        total += spared * (share if chip.cmem_bytes else float(share == 1.0))
    return total
