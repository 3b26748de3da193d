"""Memory of a program under another layout or batch, without lowering it again.

The live ranges are those of the program as lowered; each value has the block that the other layout assigns to it. The
figure is scaled by the factor by which it is too low for the program's own layout, of whose gathered copies it does not
know either. Modelled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from layouts import LayoutRules, Mesh
from layouts.errors import LayoutError
from meshlib.estimation.memory.device_memory import DeviceMemory
from meshlib.lowering.assigned import scope_of
from meshlib.program.analysis.memory import bytes_after
from meshlib.program.instructions import Value


@dataclass(frozen=True, eq=False)
class OtherLayouts:
    """Memory of other layouts of a lowered program.

    Attributes:
      memory: that of the program as lowered; batch: the name of its batch dim, and its size.
    """

    memory: DeviceMemory
    batch: tuple[str, int]

    def needed_bytes(self, layout: LayoutRules, mesh: Mesh, batch: int) -> float:
        """About the bytes that a device needs under another layout and batch size."""
        return self._missed * self._peak(layout, mesh, batch / self.batch[1])

    @cached_property
    def _missed(self) -> float:
        program = self.memory.program
        return self.memory.needed_bytes / max(1.0, self._peak(program.layout, program.mesh, 1.0))

    def _peak(self, layout: LayoutRules, mesh: Mesh, share: float) -> float:
        return max(bytes_after(self.memory.program, self._size(layout, mesh, share)))

    def _size(self, layout: LayoutRules, mesh: Mesh, share: float) -> Callable[[Value], int]:
        """The bytes of a value on one device, if `share` of the batch is left."""
        known: dict[object, int] = {}

        def size(v: Value) -> int:
            shape, scope, dtype = key = v.tensor.shape, scope_of(v.tensor), v.tensor.dtype
            if key not in known:
                try:
                    count = layout.fitting(shape, mesh, scope).local_size
                except LayoutError:
                    count = shape.size
                known[key] = round(dtype.size_bytes(count) * (share if self.batch[0] in shape.names else 1.0))
            return known[key]

        return size
