"""The loop over the ticks of a pipeline training step: its branches, and the values passed between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from layouts import Dimension, Shape
from meshlib.core.arguments import at
from meshlib.core.dtypes import BOOL, INT32
from meshlib.core.errors import GraphError, ShapeError
from meshlib.core.graph import BACKWARD as BACKWARD_REGION
from meshlib.core.graph import Graph, Operation, Tensor, current_graph, innermost, region
from meshlib.core.loop_record import LoopBody
from meshlib.core.names import free_name
from meshlib.core.opdef import RESIDENT
from meshlib.core.replay import all_operations, needed, replay
from meshlib.layers.pipeline_task_schedule import BACKWARD, FORWARD, WEIGHTS
from meshlib.layers.pipeline_ticks import FIRST, FIRST_BACKWARD, LOSS, WHAT, CutFeatures, SlotBuffer, Ticks
from meshlib.layers.pipelines import loads_of
from meshlib.ops.building import tensor
from meshlib.ops.control.branches import BranchResults, branch, inner_carry
from meshlib.ops.control.deferred import Deferred, deferred, separate_weights
from meshlib.ops.control.loop_gradient import led_to, variable_gradients, wide
from meshlib.ops.control.loops import end_late, late_carry, make_loop
from meshlib.ops.control.remat import Policy, kept_values
from meshlib.ops.control.sources import _constant, constant_full
from meshlib.ops.gradients import gradients
from meshlib.ops.movement.runs import shift
from meshlib.ops.movement.shape import transpose
from meshlib.ops.movement.tables import table
from meshlib.ops.pointwise.arithmetic import add, where
from meshlib.ops.pointwise.reductions import reduce_mean, reduce_sum

Tensors = dict[str, Tensor]


@dataclass(eq=False)
class StepLoop:
    """One training step: state collected while the loop body is traced, and its results outside the loop."""

    first_fn: Callable[[Tensors], Tensor]
    stage_fn: Callable[..., Any]
    last_fn: Callable[[Tensor, Tensors], Tensor | Mapping[str, Tensor]]
    ticks: Ticks
    stage: Dimension
    cut: CutFeatures
    remat: Policy
    reduction: str
    sources: list[Tensor] = field(default_factory=list)  # with gradients, one per entry of `totals`
    totals: list[Tensor] = field(default_factory=list)  # carries that accumulate the gradients
    outputs: Tensors = field(default_factory=dict)  # carries that accumulate outputs

    def run(self) -> tuple[list[Tensor], Tensors]:
        """Build the loop and the operations after it."""
        features = [*self.cut.parts.values(), *self.cut.others.values()]
        graph = innermost(features, WHAT)
        if graph.parent is not None:
            raise GraphError(f"{at(WHAT)}: call it outside of loops")
        self.tick = Dimension(free_name("tick", {d.name for x in features for d in x.shape}), self.ticks.count)
        with graph:
            tables = self._tables(graph)
            self.names = list(tables)
            results, _ = make_loop(
                "pipeline", self._body, [], list(tables.values()), self.tick, False, "pipeline", timing=self.ticks
            )
        loop = results[0].operation
        assert loop.loop is not None
        of = dict(zip(loop.loop.given.inits, results, strict=True))
        totals = [of[t] for t in self.totals]
        with graph:
            outputs = {name: self._whole_batch(of[carry]) for name, carry in self.outputs.items()}
            if (of_last := outputs.pop("loss of the last stage", None)) is not None:
                outputs["loss"] = add(outputs["loss"], of_last)
        return variable_gradients(graph, loop, self.sources, totals, WHAT), outputs

    def _whole_batch(self, total: Tensor) -> Tensor:
        """An output of the whole batch from the sum over ticks, [stage, ...]."""
        y = reduce_sum(total, output_shape=[d for d in total.shape if d != self.stage])
        return y * (1 / self.cut.micro.size) if self.reduction == "mean" else y

    # ------------------------------------------------------------ tables

    def _tables(self, graph: Graph) -> Tensors:
        """The tables read by the body, per tick and stage."""
        ticks, plan = self.ticks, self.ticks.plan
        kinds = [FORWARD, BACKWARD, *([WEIGHTS] if plan.splits else [])]
        arrays = {f"{kind} microbatch": ticks.turns(kind, "microbatch") for kind in kinds}
        if plan.repeats > 1:
            arrays |= {f"{kind} repeat": ticks.turns(kind, "repeat") for kind in kinds}
        arrays |= {f"works {kind}": ticks.works(kind) for kind in (*kinds, FIRST, LOSS, FIRST_BACKWARD)}
        arrays |= {
            "read input": ticks.reads(FORWARD, ticks.inputs),
            "write first": ticks.writes(FIRST, ticks.inputs),
            "arrives": ticks.arrivals(FORWARD),
            "read input again": ticks.reads(BACKWARD, ticks.inputs),
            "write residual": ticks.writes(FORWARD, ticks.residuals),
            "read residual": ticks.reads(BACKWARD, ticks.residuals),
            "write loss": ticks.writes(LOSS, ticks.cotangents),
            "cotangent arrives": ticks.arrivals(BACKWARD),
            "read cotangent": ticks.reads(BACKWARD, ticks.cotangents),
        }
        if plan.splits:
            arrays["write operands"] = ticks.writes(BACKWARD, ticks.operands)
            arrays["read operands"] = ticks.reads(WEIGHTS, ticks.operands)
        shape = Shape([self.tick, self.stage])
        return {
            name: table(
                graph, np.ascontiguousarray(a), shape, BOOL if a.dtype == bool else INT32, name.replace(" ", "_")
            )
            for name, a in arrays.items()
        }

    # ------------------------------------------------------------ one tick

    def _body(self, _: Sequence[Tensor], slices: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        self.tables = t = dict(zip(self.names, slices, strict=True))
        self.graph = slices[0].graph
        first = self._branch(FIRST, self._write_first_input)
        forward = self._branch(FORWARD, self._forward)
        (y,) = forward.others
        self._refuse_random(first.operation, forward.operation)
        self.ticks.loads.extend(loads_of([forward.operation], self.stage.size))
        self._branch(LOSS, lambda: self._loss(y))
        with region(BACKWARD_REGION):
            (dx,) = self._branch(BACKWARD, lambda: self._backward(forward)).others
            if self.ticks.plan.splits:
                self._branch(WEIGHTS, self._weights)
            if self._has_gradient(first):
                self._branch(FIRST_BACKWARD, lambda: self._first_backward(first, dx))
        circle = self.ticks.plan.repeats > 1
        self.inputs.write(shift(y, 1, self.stage, circle, "to_next_stage"), t["arrives"])
        with region(BACKWARD_REGION):
            self.cotangents.write(shift(dx, -1, self.stage, circle, "to_previous_stage"), t["cotangent arrives"])
        return [], []

    def _branch(self, kind: str, body: Callable[[], list[Tensor]]) -> BranchResults:
        active = self.ticks.active(kind, self.stage.name)
        return branch(kind, lambda _: ([], body()), [], self.tables[f"works {kind}"], active)

    def _features_of(self, graph: Graph, kind: str) -> Tensors:
        """The features of the microbatches of a kind of task."""
        return self.cut.of_turn(graph, graph.adopt(self.tables[f"{kind} microbatch"]))

    def _write_first_input(self) -> list[Tensor]:
        """Write the input of the first stage to its slot."""
        graph = current_graph(WHAT)
        x = graph.adopt(tensor(self.first_fn(self._features_of(graph, FORWARD)), f"{WHAT}: what first_fn returns"))
        if self.stage not in x.shape or not x.dtype.is_float:
            raise ShapeError(f"{at(WHAT)}: first_fn must return a float tensor of the dim {self.stage}, got {x}")
        self.entering = transpose(x, [self.stage, *(d for d in x.shape if d != self.stage)])
        self.inputs = SlotBuffer.like(self.entering, self.graph, self.ticks.inputs[1], "inputs")
        self.inputs.write(self.entering, self.tables["write first"])
        return []

    def _forward(self) -> list[Tensor]:
        """The output of a stage; residuals for its backward go to slots, further outputs are accumulated."""
        graph = current_graph(WHAT)
        body = graph.loop_body
        assert body is not None
        self.stage_input = x = self.inputs.read(graph, self.tables["read input"])
        body.held = (self.stage,)
        if self.ticks.plan.repeats > 1:
            repeat = Dimension(free_name("repeat", x.shape.names), self.ticks.plan.repeats)
            body.held, body.chosen = (repeat, self.stage), (repeat, graph.adopt(self.tables[f"{FORWARD} repeat"]))
        begun = len(graph.operations)
        returned = self.stage_fn(x, self._features_of(graph, FORWARD))
        y, further = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
        if not isinstance(further, Mapping):
            raise GraphError(f"{at(WHAT)}: stage_fn must return a tensor, or that and a dict, got {returned!r:.80}")
        y = graph.adopt(tensor(y, f"{WHAT}: what stage_fn returns"))
        if set(y.shape) != set(x.shape) or y.dtype is not x.dtype:
            raise ShapeError(f"{at(WHAT)}: stage_fn turns {x.type} into {y.type}; types must stay the same")
        self.stage_output = transpose(y, x.shape)
        self.further_outputs = {name: self._per_stage(graph, z, f"stage_fn's {name!r}") for name, z in further.items()}
        self._store_residuals(graph.operations[begun:], set(body.choices.values()))
        self._add_outputs(self.further_outputs)
        return [self.stage_output]

    def _store_residuals(self, operations: Sequence[Operation], weights: Collection[Tensor]) -> None:
        """Write the forward values kept by the policy to slots, except those that all stages share."""
        live = needed(z.operation for z in (self.stage_output, *self.further_outputs.values()))
        values = [x for x, _ in kept_values([op for op in operations if op in live], self.remat, WHAT)]
        values = [x for x in values if self.stage in x.shape and x not in weights and x is not self.stage_input]
        self.kept: list[tuple[Tensor, SlotBuffer]] = []
        for x in self._read_backward(values):
            name, count = f"residual_{len(self.kept)}", self.ticks.residuals[1]
            self.kept.append((x, SlotBuffer.like(x, self.graph, count, name)))
            self.kept[-1][1].write(x, self.tables["write residual"])

    def _read_backward(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The forward values that the backward reads if all are available: determined by a trial gradient."""
        if not values:
            return []
        graph = values[0].graph
        body = graph.loop_body
        assert body is not None
        trial = Graph(loop_body=LoopBody(self.graph), scope=graph.scope)
        given = {inner: trial.adopt(outer) for outer, inner in body.captured.items()}
        stand_ins = [_constant(trial, 0, x.shape, x.dtype, None) for x in values]
        copies = replay(graph.operations, graph.rewrites, given, trial)
        trial.known.update((copies[x], y) for x, y in zip(values, stand_ins, strict=True))
        ys = [copies[y] for y in (self.stage_output, *(z for n, z in self.further_outputs.items() if n == "loss"))]
        sources = [x for _, x in self._sources(trial)]
        grads = [g for g in gradients(ys, [copies[self.stage_input], *sources]) if g is not None]
        read = needed(trial.known.get(g, g).operation for g in grads)
        return [x for x, y in zip(values, stand_ins, strict=True) if y.operation in read]

    def _loss(self, y: Tensor) -> list[Tensor]:
        """Write the cotangent of the last stage's output to its slot; accumulate gradients of the loss's operands."""
        graph = current_graph(WHAT)
        y = graph.adopt(y)
        returned = self.last_fn(y, self._features_of(graph, FORWARD))
        outputs = {"loss": returned} if isinstance(returned, Tensor) else returned
        if not isinstance(outputs, Mapping) or "loss" not in outputs:
            raise GraphError(f"{at(WHAT)}: last_fn must return a tensor, or a dict with 'loss', got {returned!r:.80}")
        reduced = {name: self._per_stage(graph, z, f"last_fn's {name!r}") for name, z in outputs.items()}
        inside, loss = self._sources(graph), reduced["loss"]
        with region(BACKWARD_REGION):
            dy, *others = gradients([loss], [y, *(x for _, x in inside)], [self._seed(loss)])
            if dy is None:
                raise GraphError(f"{at(WHAT)}: the loss does not depend on the output of the stages")
            self.cotangents = SlotBuffer.like(dy, self.graph, self.ticks.cotangents[1], "cotangents")
            self.cotangents.write(dy, self.tables["write loss"])
            self._add_gradients(inside, others)
        self._add_outputs(reduced)
        return []

    # ------------------------------------------------------------ backward

    def _recompute(
        self, graph: Graph, results: BranchResults, given: Mapping[Tensor, Tensor], mask: str
    ) -> dict[Tensor, Tensor]:
        """Recompute the body of a forward branch in a backward one, for the latter's microbatches."""
        loop = results.operation.loop
        assert loop is not None
        t, parts = self.tables, ("microbatch", "repeat")
        swapped = {t[f"{FORWARD} {p}"]: t[f"{BACKWARD} {p}"] for p in parts if f"{FORWARD} {p}" in t}
        swapped[results.operation.inputs[results.mask]] = t[f"works {mask}"]
        late = loop.body.loop_body.late if loop.body.loop_body is not None else {}
        inside = {
            inner: graph.adopt(swapped.get(outer, outer))
            for inner, outer in zip(loop.stand_ins, results.operation.inputs, strict=True)
            if inner not in late
        }
        slots = {*late, *(carry.end for carry in late.values())}
        run = [op for op in loop.body.operations if slots.isdisjoint((*op.inputs, *op.outputs))]
        return replay(run, loop.body.rewrites, {**inside, **given}, graph)

    def _backward(self, forward: BranchResults) -> list[Tensor]:
        """The cotangent of a stage's input; gradients of weights are accumulated, or their operands stored."""
        graph, t = current_graph(WHAT), self.tables
        x = self.inputs.read(graph, t["read input again"])
        dy = self._active_part(self.cotangents.read(graph, t["read cotangent"]))
        # Residuals are read before the operations that use them.
        residuals = [(y, transpose(b.read(graph, t["read residual"]), y.shape)) for y, b in self.kept]
        copies = self._recompute(graph, forward, {self.stage_input: x}, BACKWARD)
        graph.known.update((copies[y], value) for y, value in residuals)
        inside = self._sources(graph)
        ys, seeds = [copies[self.stage_output]], [dy]
        if "loss" in self.further_outputs:
            loss = copies[self.further_outputs["loss"]]
            ys, seeds = [*ys, loss], [*seeds, self._seed(loss)]
        splits = self.ticks.plan.splits
        with separate_weights() if splits else nullcontext():
            dx, *others = gradients(ys, [x, *(s for _, s in inside)], seeds)
        if dx is None:
            raise GraphError(f"{at(WHAT)}: the result of stage_fn does not depend on its input")
        dx = self._active_part(dx)
        if splits:
            self._store_operands(graph, dx, inside, others, [x, dy])
        else:
            self._add_gradients(inside, others)
        return [dx]

    def _store_operands(
        self,
        graph: Graph,
        dx: Tensor,
        inside: Sequence[tuple[Tensor, Tensor]],
        others: Sequence[Tensor | None],
        beside: Sequence[Tensor],
    ) -> None:
        """Write the operands of weight gradients to slots."""
        pairs = [(source, g) for (source, _), g in zip(inside, others, strict=True) if g is not None]
        grads = [g for _, g in pairs]
        later = deferred(graph, [dx], grads, lambda z: self.stage in z.shape, beside)
        self.later = LaterWeights(later, grads, graph, self.graph)
        self.of_stages = [(source, source) for source, _ in pairs]
        self.operands: list[SlotBuffer] = []
        for x in self.later.stored:
            name = f"operand_{len(self.operands)}"
            self.operands.append(SlotBuffer.like(x, self.graph, self.ticks.operands[1], name))
            self.operands[-1].write(x, self.tables["write operands"])

    def _weights(self) -> list[Tensor]:
        """Accumulate gradients of weights from the operands stored by their backward."""
        graph, t = current_graph(WHAT), self.tables
        read = [buffer.read(graph, t["read operands"]) for buffer in self.operands]
        parts = [p for p in ("microbatch", "repeat") if f"{WEIGHTS} {p}" in t]
        swapped = {t[f"{BACKWARD} {p}"]: t[f"{WEIGHTS} {p}"] for p in parts}
        self._add_gradients(self.of_stages, self.later.written(graph, read, swapped))
        return []

    def _first_backward(self, first: BranchResults, dx: Tensor) -> list[Tensor]:
        """Accumulate gradients of the variables of first_fn."""
        graph = current_graph(WHAT)
        x = self._recompute(graph, first, {}, FIRST_BACKWARD)[self.entering]
        inside = self._sources(graph)
        self._add_gradients(inside, gradients([x], [s for _, s in inside], [self._active_part(graph.adopt(dx))]))
        return []

    # ------------------------------------------------------------ sums

    def _sources(self, graph: Graph) -> list[tuple[Tensor, Tensor]]:
        """Captured float tensors of a branch that depend on trainable variables: (outer tensor, stand-in)."""
        body = graph.loop_body
        assert body is not None
        leads = led_to(graph.root)
        pairs = [(self.graph.outer_of(outer), inner) for outer, inner in body.captured.items()]
        return [(outer, x) for outer, x in pairs if outer in leads and outer is not None and x.dtype.is_float]

    def _has_gradient(self, results: BranchResults) -> bool:
        """True if an operand of a branch depends on trainable variables."""
        leads = led_to(self.graph.root)
        return any(self.graph.outer_of(x) in leads for x in results.operation.inputs)

    def _add_gradients(self, inside: Sequence[tuple[Tensor, Tensor]], grads: Sequence[Tensor | None]) -> None:
        for (source, _), g in zip(inside, grads, strict=True):
            if g is not None:
                self.sources.append(source)
                self.totals.append(self._accumulator(self._active_part(wide(g)), "gradient"))

    def _add_outputs(self, outputs: Mapping[str, Tensor]) -> None:
        for name, value in outputs.items():
            if name in self.outputs and name != "loss":
                raise GraphError(f"{at(WHAT)}: stage_fn and last_fn both return {name!r}")
            label = name if name not in self.outputs else f"{name} of the last stage"
            self.outputs[label] = self._accumulator(self._active_part(value), "output")

    def _accumulator(self, x: Tensor, name: str) -> Tensor:
        """A carry of the loop over ticks that accumulates `x` whenever a branch runs."""
        carry = late_carry(self.graph, x.type, name)
        before = inner_carry(carry, x.graph)
        end_late(before, add(before, x))
        return carry

    def _seed(self, loss: Tensor) -> Tensor:
        """The cotangent of the loss of one microbatch, for the active stages."""
        scale = 1 / self.cut.micro.size if self.reduction == "mean" else 1.0
        return self._active_part(constant_full(scale, loss, loss.dtype.of_cotangents))

    def _active_part(self, x: Tensor) -> Tensor:
        """A value of a branch with zeros for inactive stages."""
        body = x.graph.loop_body
        assert body is not None
        assert body.working is not None
        return where(body.working, x, 0, output_shape=x.shape) if self.stage in x.shape else x

    def _per_stage(self, graph: Graph, z: object, what: str) -> Tensor:
        """A loss, or another output, reduced per stage; float32 at least."""
        x = graph.adopt(tensor(z, f"{WHAT}: {what}"))
        if self.stage not in x.shape or not x.dtype.is_float:
            raise ShapeError(f"{at(WHAT)}: {what} must be float and have the dim {self.stage}, got {x}")
        reduce = reduce_mean if self.reduction == "mean" else reduce_sum
        return reduce(wide(x), output_shape=[self.stage])

    def _refuse_random(self, *operations: Operation) -> None:
        for op in all_operations(operations):
            if op.opdef.unique and op.opdef.kind not in RESIDENT:
                raise GraphError(
                    f"{at(WHAT)}: {op} draws random numbers, which would differ when its stage is recomputed; "
                    "use mtf.layers.pipeline, or a rate of 0"
                )


class LaterWeights:
    """Operands that a backward stores for weight gradients, and the deferred operations that compute these."""

    def __init__(self, later: Deferred, results: Sequence[Tensor], graph: Graph, around: Graph) -> None:
        self.later, self.results = later, results
        outside = around.loop_body
        assert outside is not None
        fixed = set(outside.captured.values())  # the same in each tick
        self.outer = {x: y for x in later.inputs if (y := graph.outer_of(x)) is not None}
        self.tables = [x for x, y in self.outer.items() if y not in fixed and not y.dtype.is_float]
        self.fixed = [x for x, y in self.outer.items() if y in fixed]
        elsewhere = {*self.tables, *self.fixed}
        self.stored = [x for x in later.inputs if x not in elsewhere]

    def written(self, graph: Graph, read: Sequence[Tensor], swapped: Mapping[Tensor, Tensor]) -> list[Tensor]:
        """The gradients, in the body of their branch, from stored operands, with tables swapped for their task's."""
        given = {x: graph.adopt(self.outer[x]) for x in self.fixed}
        given |= {x: graph.adopt(swapped[self.outer[x]]) for x in self.tables}
        given |= {x: transpose(y, x.shape) for x, y in zip(self.stored, read, strict=True)}
        return self.later.written(graph, given, self.results)
