"""Data of the loop over the ticks of a pipeline step: features cut into microbatches, and buffers of slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from layouts import Dimension, Shape
from meshlib.core.arguments import at
from meshlib.core.errors import GraphError, ShapeError
from meshlib.core.graph import Graph, Tensor, TensorType
from meshlib.core.text import free_name
from meshlib.ops.building import tensor
from meshlib.ops.control.branches import inner_carry
from meshlib.ops.control.loops import end_late, late_carry
from meshlib.ops.movement.dynamic_slices import update_slice
from meshlib.ops.movement.indexing import gather
from meshlib.ops.movement.shape import rename_dimension, reshape

WHAT = "pipeline_training_step"
# Rules may split microbatches over the stages, as those of models do; each stage gathers its own from all.
MICROBATCH, TURN = "microbatch", "microbatch_unsplit"
Features = Mapping[str, Tensor]


@dataclass(frozen=True)
class CutFeatures:
    """Features cut into microbatches: those of `parts` have the dim `micro`, those of `others` are not cut."""

    micro: Dimension
    parts: Features
    others: Features

    @classmethod
    def of(cls, features: Features, batch: Dimension, count: int, stage: Dimension) -> CutFeatures:
        """The features cut along `batch`, with all checks."""
        if not isinstance(features, Mapping) or not features:
            raise GraphError(f"{at(WHAT)}: features must be a dict of names to tensors, got {features!r:.80}")
        if not isinstance(batch, Dimension):
            raise GraphError(f"{at(WHAT)}: batch_dim must be a Dimension, got {batch!r:.80}")
        micro, parts, others = Dimension(TURN, count), {}, {}
        for name, x in features.items():
            dims = list(tensor(x, f"{WHAT} feature {name!r}").shape)
            for taken in (MICROBATCH, TURN, stage.name):
                if taken in x.shape:
                    raise ShapeError(f"{at(WHAT)}: feature {name!r}, {x}, has a dim '{taken}'; rename it")
            if batch not in dims:
                others[name] = x
                continue
            if batch.size % count:
                raise ShapeError(
                    f"{at(WHAT)}: {x} can't be cut into {count} equal microbatches: {batch.size} % {count} = "
                    f"{batch.size % count}"
                )
            place, small = dims.index(batch), Dimension(batch.name, batch.size // count)
            cut = reshape(x, [*dims[:place], small, Dimension(MICROBATCH, count), *dims[place + 1 :]])
            parts[name] = rename_dimension(cut, MICROBATCH, TURN)
        if not parts:
            raise GraphError(f"{at(WHAT)}: no feature has the dim {batch}: {', '.join(map(str, features.values()))}")
        return cls(micro, parts, others)

    def of_turn(self, graph: Graph, which: Tensor) -> dict[str, Tensor]:
        """The features of the current microbatch of each stage: [stage, ...]."""
        given = {name: gather(graph.adopt(x), which, self.micro) for name, x in self.parts.items()}
        return {**given, **{name: graph.adopt(x) for name, x in self.others.items()}}


@dataclass(frozen=True, eq=False)
class SlotBuffer:
    """Slots for a value of several microbatches: [slot, stage, ...], a carry of the loop over ticks."""

    carry: Tensor
    slot: Dimension

    @classmethod
    def like(cls, x: Tensor, graph: Graph, count: int, name: str) -> SlotBuffer:
        """Empty slots for values of the type of `x`; `graph` is the body of the loop over ticks."""
        slot = Dimension(free_name(f"{name}_slot", x.shape.names), count)
        return cls(late_carry(graph, TensorType(Shape([slot, *x.shape]), x.dtype), name), slot)

    @property
    def value(self) -> Tensor:
        """The current value of the carry within a tick."""
        body = self.carry.graph.loop_body
        assert body is not None
        return body.late[self.carry].end

    def read(self, graph: Graph, slots: Tensor) -> Tensor:
        """The value in one slot of each stage, read in the body of a branch: [stage, ...]."""
        return gather(graph.adopt(self.value), graph.adopt(slots), self.slot)

    def write(self, x: Tensor, slots: Tensor) -> None:
        """Write `x`, from the body of a branch or of the loop over ticks, to slots; out-of-range slots are skipped."""
        graph = x.graph
        inside = graph is not self.carry.graph
        value = inner_carry(self.carry, graph) if inside else self.value
        after = update_slice(value, x, self.slot, graph.adopt(slots), out_of_range="drop")
        end_late(value if inside else self.carry, after)
