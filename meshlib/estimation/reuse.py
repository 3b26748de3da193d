"""What a kernel reads that is still in VMEM: weights used before, what a loop takes from outside, its carries.

A compiler leaves a buffer in VMEM between two uses if it has the room. Here a use finds it there if all that was moved
since the use before, and the buffer itself, fit what a chip holds: the rule of a cache that forgets what was used least
recently. A small network, the weights of a recurrent one and the cache of a short decode so cost HBM once.

Of what only passes from kernel to kernel a chip's common memory (CMEM of v4) holds as much as what is moved in between
leaves room for: a compiler that knows the uses puts a part there where the whole does not fit. Of what all who read it
find there nothing is written to HBM.

In a loop the use before may be one of the trip before. What goes from trip to trip without being read or written in HBM
saves that in all trips but the first.

Source: Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal 9(2), 1970 (distances in a
stack); openxla/xla memory_space_assignment keeps buffers in the alternate memory by the same question.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from layouts import Sharding
from meshlib.estimation.kernels import Kernel
from meshlib.estimation.units import Unit
from meshlib.graph import Tensor
from meshlib.program.instructions import Loop

Buffer = tuple[Tensor, Sharding]
MOST_BYTES = 1 << 27  # no chip holds more: CMEM of v4


@dataclass(eq=False)
class Recent:
    """Bytes that a device has moved when it last touched each buffer, in the order of a program or a loop's body.

    Attributes:
      trips: of the loop; 1 of a program.
      stays: of a body's buffers, those that are the same in the next trip; a carry's result stands for its operand.
      moved_bytes: so far.
    """

    trips: int = 1
    stays: Mapping[Buffer, Buffer] = field(default_factory=dict)
    moved_bytes: int = 0
    _last: dict[Buffer, int] = field(default_factory=dict)
    _first: dict[Buffer, tuple[int, int, int]] = field(default_factory=dict)  # unit, bytes, room before it
    _passes: dict[Buffer, list[tuple[int, int, int, int]]] = field(
        default_factory=dict
    )  # unit, bytes, moved till, with it

    @classmethod
    def of(cls, loop: Loop) -> Recent:
        """Of the body of a loop: what it takes whole from outside is the same in each trip, carries are in place."""
        body, stays = loop.body, {}
        for name, v in body.inputs.items():
            if name not in loop.slices:
                stays[v.tensor, v.sharding] = (v.tensor, v.sharding)
        for begin, end in loop.carries:
            old, new = body.inputs[begin], body.outputs[end]
            stays[new.tensor, new.sharding] = (old.tensor, old.sharding)
        return cls(loop.trips, stays)

    def touch(
        self, unit: int, touched: Iterable[tuple[Buffer, int]], moved_bytes: int
    ) -> tuple[tuple[int, float], ...]:
        """What one unit finds again of what it touches: room that takes, in bytes, and bytes that it spares."""
        known: dict[Buffer, list[int]] = {}  # a carry may be read and written at once
        for buffer, size in touched:
            known.setdefault(self.stays.get(buffer, buffer), []).append(size)
        again = []
        for buffer, sizes in known.items():
            if buffer in self._last:
                room = self.moved_bytes - self._last[buffer] + max(sizes)
                if room <= MOST_BYTES:
                    again.append((room, float(sum(sizes))))
            elif buffer in self.stays and self.trips > 1:
                self._first[buffer] = unit, sum(sizes), self.moved_bytes + max(sizes)
        self.moved_bytes += moved_bytes
        self._last.update(dict.fromkeys(known, self.moved_bytes))
        return tuple(again)

    def pass_on(self, unit: int, passing: Iterable[tuple[Buffer, int, bool]], moved_bytes: int) -> None:
        """Note what one unit reads and writes of values that only pass, before what it moves is counted."""
        before = self.moved_bytes
        for buffer, size, written in passing:
            if written or buffer in self._passes:
                uses = [] if written else self._passes[buffer]
                self._passes[buffer] = [*uses, (unit, size, before, before + moved_bytes)]

    def leave(self, buffers: Iterable[Buffer]) -> None:
        """Note that something other than a kernel reads them, and so in HBM."""
        for buffer in buffers:
            self._passes.pop(buffer, None)

    def _kept(self) -> dict[int, list[tuple[int, float]]]:
        """For each unit, the values that pass: bytes moved since the use before, and of the value."""
        found: dict[int, list[tuple[int, float]]] = {}
        for uses in self._passes.values():
            between = [now - then for (_, _, _, then), (_, _, now, _) in pairwise(uses)]
            for (unit, size, _, _), moved in zip(uses, [max(between, default=MOST_BYTES), *between], strict=True):
                if moved < MOST_BYTES:
                    found.setdefault(unit, []).append((moved, float(size)))
        return found

    def close(self, units: Sequence[Unit]) -> None:
        """Add to the units what they keep of the values that pass, and to those of a body what the trip before left."""
        for place, kept in self._kept().items():
            kernel = units[place].kernel
            if kernel is not None:
                units[place].kernel = replace(kernel, kept=tuple(sorted(kept)))
        for buffer, (place, size, before) in self._first.items():
            room = self.moved_bytes - self._last[buffer] + before
            kernel = units[place].kernel
            if room <= MOST_BYTES and kernel is not None:
                spared = size * (self.trips - 1) / self.trips
                units[place].kernel = replace(kernel, again=(*kernel.again, (room, spared)))


def spared_bytes(kernel: Kernel, held_bytes: int) -> float:
    """Bytes that a kernel need not move where so much stays in VMEM."""
    return sum(size for room, size in kernel.again if room <= held_bytes)
