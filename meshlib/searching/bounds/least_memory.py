"""Lower bound of a layout's memory from the graph alone: state, and the values that are certainly live at some moment.

Variables, slots and inputs are resident, sharded as the layout says; other values are divided by all axes that could
split them; what a product reads and writes, by those that split it along a factor of it. Values whose sizes follow from
the layout, such as the tokens sent to experts, count for nothing unless the program is that of the layout
(`Session.under`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from types import MappingProxyType

from layouts import LayoutRules, Mesh, Shape
from meshlib.core.compiler import Compiler
from meshlib.core.graph import Operation, Tensor
from meshlib.core.opdef import RESIDENT, Kind
from meshlib.core.replay import all_operations
from meshlib.estimation.memory.compiled import CODE_BYTES, FRAGMENTATION
from meshlib.lowering.assigned import scope_of
from meshlib.lowering.simplification import simplify
from meshlib.program.instructions import Loop
from meshlib.searching.bounds.live_values import Along, LiveSets, Names, whole_bytes
from meshlib.searching.renamed_dims import Passages

NOTHING: Mapping[Operation, Loop] = MappingProxyType({})


@dataclass(frozen=True)
class LeastMemory:
    """Lower bounds on a device's peak bytes for all layouts of one program.

    Attributes:
      resident: number of variables, slots and inputs of each shape, scope and width in bytes.
      live: values that are live at once.
    """

    resident: Counter[tuple[Shape, str, float]]
    live: LiveSets
    passages: Passages

    @staticmethod
    def of(outputs: Sequence[Tensor], updates: Sequence[Operation]) -> LeastMemory:
        """Bounds of the program with these outputs and updates."""
        graph = (updates[0] if updates else outputs[0].operation).graph
        simple = simplify(graph, outputs, updates)
        resident: Counter[tuple[Shape, str, float]] = Counter()
        for op in simple.operations:
            if op.opdef.kind in RESIDENT and not op.output.on_host:
                resident[op.output.shape, scope_of(op.output), op.output.dtype.itemsize] += 1
        written = [x for op in simple.operations if op.opdef.kind is Kind.COMMIT for x in op.inputs]
        passages = Passages.of(all_operations(simple.operations), settled=False)
        stored = {t: t for op in simple.operations if op.opdef.kind in RESIDENT for t in op.outputs}
        return LeastMemory(resident, LiveSets.of(simple, [*outputs, *written], stored), passages)

    def state_bytes(self, layout: LayoutRules, mesh: Mesh, gradients: bool = False) -> float:
        """Bytes of variables, slots and inputs on one device; `gradients`: and as much for gradients as for variables.

        Raises: LayoutError if the layout cannot shard one of them.
        """
        return sum(
            (1 + (gradients and scope == "variables")) * count * width * layout.sharding(shape, mesh, scope).local_size
            for (shape, scope, width), count in self.resident.items()
        )

    def peak_bytes(
        self, layout: LayoutRules, mesh: Mesh, inside: bool = True, lowered: Mapping[Operation, Loop] = NOTHING
    ) -> float:
        """Lower bound on the peak of one device.

        inside: whether to count what is live within a trip of a loop, which depends on what the backward pass computes
        again; other values are as many or more with less rematerialisation. lowered: loops as the layout lowers them.
        Raises: LayoutError if the layout cannot shard a variable, slot or input.
        """
        shards = ShardBytes(layout, mesh, self.passages, NOTHING if self.live.derives else lowered)
        return self.state_bytes(layout, mesh) + self.live.least_bytes(shards, inside)

    def needed_bytes(
        self,
        layout: LayoutRules,
        mesh: Mesh,
        compiler: Compiler,
        inside: bool = True,
        lowered: Mapping[Operation, Loop] = NOTHING,
    ) -> float:
        """Lower bound on what the compiled step needs: the peak, the share that is lost between buffers, and the code
        of products, each in a kernel of its own. Modelled.

        Args, errors: as of `peak_bytes`.
        """
        lost = FRAGMENTATION if compiler.partitioner != "gspmd" else 0.0  # plain jit loses nothing between stacks
        peak = self.peak_bytes(layout, mesh, inside, lowered)
        return peak + lost * (peak - self.state_bytes(layout, mesh)) + CODE_BYTES * self.live.products


@dataclass
class ShardBytes:
    """Bytes of the shards of tensors under one layout."""

    layout: LayoutRules
    mesh: Mesh
    passages: Passages
    lowered: Mapping[Operation, Loop] = field(default_factory=dict)
    _parts: dict[Tensor, float] = field(default_factory=dict)

    @cached_property
    def axes(self) -> dict[str, Names]:
        """The dims that each axis of several devices may split."""
        sizes = self.mesh.sizes_by_axis
        return {a: frozenset(r.dim for r in self.layout.rules if a in r.axes) for a, size in sizes.items() if size > 1}

    def part_bytes(self, t: Tensor) -> float:
        """The fewest: all axes split a tensor that can."""
        if t not in self._parts:
            self._parts[t] = self.bytes_along(t, self.axes)
        return self._parts[t]

    def splits(self, op: Operation) -> Iterator[Along]:
        """Along what axes may split a product."""
        factors = [frozenset(d for d in (*f.operands, *f.outputs) if d is not None) for f in op.opdef.roles(op)]
        able = [[f for f in factors if self._meets(f, own)] or [frozenset()] for own in self.axes.values()]
        return (dict(zip(self.axes, chosen, strict=True)) for chosen in product(*able))

    def bytes_along(self, t: Tensor, along: Along) -> float:
        """Those of an operand or result of a product that axes split so."""
        splitting = [a for a, names in along.items() if self._meets(t.shape.names, names)]
        return whole_bytes(t) / self.mesh.group_size(splitting)

    def is_gathered(self, stored: Tensor, along: Along) -> bool:
        """True if the shard of a variable or input in memory cannot be the operand of a product split so."""
        home = self.layout.sharding(stored.shape, self.mesh, scope_of(stored))
        return any(
            a in along and not self._meets((d.name,), along[a])
            for d, axes in zip(home.shape, home.axes, strict=True)
            for a in axes
        )

    def _meets(self, dims: Iterable[str], names: Names) -> bool:
        """True if an axis that splits dims of these names may come to some of `dims`."""
        reached = self.passages.reached(dims)
        return reached is None or not reached.isdisjoint(names)
