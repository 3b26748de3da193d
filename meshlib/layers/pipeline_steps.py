"""A training step of a pipeline whose stages run forwards and backwards of different microbatches at the same time.

`mtf.layers.pipeline` is a loop that its gradient runs backwards: all forwards before the first backward. Here loss and
gradients are computed inside one loop over the ticks of a schedule (`meshlib.layers.pipeline_task_schedule`): in each
tick a stage runs the forward of one microbatch, or the backward of another, or gradients of weights, or nothing. What it
waits with is in buffers of as many slots as the schedule needs, whatever the number of microbatches.

The body of the loop has a branch for each kind of task, which a device leaves out in ticks in which its stage runs
another. Between ticks activations move on by one stage, and gradients back by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from layouts import Dimension, Shape
from meshlib.core.arguments import at, choice, whole
from meshlib.core.dtypes import BOOL, INT32
from meshlib.core.errors import GraphError, ShapeError
from meshlib.core.graph import BACKWARD as BACKWARD_REGION
from meshlib.core.graph import Graph, Operation, Tensor, TensorType, current_graph, innermost, region
from meshlib.core.names import free_name
from meshlib.core.opdef import RESIDENT
from meshlib.core.replay import all_operations, replay
from meshlib.layers.pipeline_orders import BACKWARD, FORWARD, KINDS, WEIGHTS
from meshlib.layers.pipeline_schedule import schedule
from meshlib.layers.pipeline_task_schedule import TaskSchedule
from meshlib.layers.pipeline_ticks import FIRST, FIRST_BACKWARD, LOSS, Ticks
from meshlib.ops.building import tensor
from meshlib.ops.control.branches import Taken, branch
from meshlib.ops.control.deferred import Deferred, deferred, separate_weights
from meshlib.ops.control.loops import late_carry, make_loop
from meshlib.ops.control.remat import Policy, Remat, checked_policy
from meshlib.ops.control.sources import constant_full
from meshlib.ops.control.summed_gradients import led_to, variable_gradients, wide
from meshlib.ops.gradients import gradients
from meshlib.ops.movement.dynamic_slices import update_slice
from meshlib.ops.movement.indexing import gather
from meshlib.ops.movement.runs import shift
from meshlib.ops.movement.shape import reshape, transpose
from meshlib.ops.movement.tables import table
from meshlib.ops.pointwise.elementwise import add, where
from meshlib.ops.pointwise.reductions import reduce_mean, reduce_sum

Tensors = dict[str, Tensor]
Features = Mapping[str, Tensor]
WHAT = "pipeline_training_step"


def pipeline_training_step(
    features: Features,
    first_fn: Callable[[Tensors], Tensor],
    stage_fn: Callable[..., Any],
    last_fn: Callable[[Tensor, Tensors], Tensor | Mapping[str, Tensor]],
    batch_dim: Dimension,
    stages: int | Dimension,
    microbatches: int,
    repeats: int = 1,
    schedule: str = "1f1b",
    remat: Policy = "full",
    reduction: str = "mean",
) -> tuple[list[Tensor], Tensors]:
    """Loss and gradients of a batch, computed in microbatches by the stages of a pipeline.

    Args:
      features: inputs of the model by name; those with `batch_dim` are cut into microbatches, others are passed on
        whole.
      first_fn: takes the features of a microbatch, returns what the first stage takes: an embedding.
      stage_fn: what one stage does, as of `mtf.layers.pipeline`: takes a microbatch and its features, returns a
        microbatch of the same type, or that and a dict of float tensors of the dim `stage`, of which "loss" is added to
        the loss.
      last_fn: takes what the last stage has made and the features; returns the loss, or a dict of tensors with "loss"
        in it. All keep the dim `stage`, which what is given to these functions has first; over other dims that they
        have, the mean is taken (or the sum, see `reduction`).
      batch_dim, microbatches: the dim to cut, and into how many parts; the cut is that of
        `mtf.serialize_training_step`.
      stages: how many, or the dim to call them by; "stage" unless given, which layout rules name: `stage:pipe`.
      repeats: how often each microbatch goes round, as of `mtf.layers.pipeline`.
      schedule: "1f1b" (with repeats: interleaved), "zb-h1", "zb-h2", "gpipe"; see `mtf.layers.schedule`.
      remat: what is kept of a forward for its backward beside its input, as of `mtf.scan`; nothing on the host.
      reduction: "mean" or "sum": how losses add up over examples.
    Returns: (grads, outputs), as `mtf.serialize_training_step`: gradients of all trainable variables of the graph, and
      the outputs of last_fn and stage_fn over the whole batch.
    Bytes: in each tick a microbatch to the next stage, and a gradient to the one before. Gradients are reduced over a
      split batch once.
    Memory: of inputs, and what `remat` keeps, as many microbatches as are in flight; gradients of weights once more
      while they are added up. `mtf.layers.schedule(..., kind=schedule).in_flight`.
    Time: modelled with transfers from stage to stage, for which nobody waits but the stage that takes them. Where a
      device has one stage; otherwise, and in the simulator, all branches run in each tick.
    Raises: GraphError, ShapeError for numbers that do not divide, functions that change types, or that draw random
      numbers, which would differ when they are computed again.
    Example:
      >>> import meshlib as mtf
      >>> batch, width = mtf.Dimension("batch", 8), mtf.Dimension("width", 16)
      >>> with mtf.Graph() as graph:
      ...     x = mtf.input("x", [batch, width])
      ...     grads, outputs = mtf.layers.pipeline_training_step(
      ...         {"x": x},
      ...         lambda features: features["x"],
      ...         lambda h, features: mtf.layers.dense(h, width, activation=mtf.tanh),
      ...         lambda h, features: mtf.square(h),
      ...         batch, stages=2, microbatches=4)
      ...     train = mtf.optimize.SgdOptimizer(0.1).apply_grads(grads, graph.trainable_variables)
      >>> program = mtf.lower(outputs, train, mesh="pipe:2", layout="stage:pipe")
      >>> print(graph.variables["dense/kernel"].output.shape, sorted(outputs))
      [stage:2, width:16, width_out:16] ['loss']
    """
    functions = {"first_fn": first_fn, "stage_fn": stage_fn, "last_fn": last_fn}
    for name, function in functions.items():
        if not callable(function):
            raise GraphError(f"{at(WHAT)}: {name} must be a function, got {function!r:.80}")
    policy = checked_policy(remat, WHAT)
    if isinstance(policy, Remat) and (policy.offload or policy.offload_carries):
        raise GraphError(f"{at(WHAT)}: remat keeps nothing on the host here; give save=, not offload=")
    choice(reduction, WHAT, "reduction", ("mean", "sum"))
    stage = stages if isinstance(stages, Dimension) else Dimension("stage", whole(stages, WHAT, "stages", low=1))
    counts = [whole(n, WHAT, name, low=1) for n, name in ((microbatches, "microbatches"), (repeats, "repeats"))]
    plan = _plan(stage.size, *counts, choice(schedule, WHAT, "schedule", tuple(KINDS)))
    cut = _Cut.of(features, batch_dim, counts[0], stage)
    step = _Step(first_fn, stage_fn, last_fn, Ticks(plan), stage, cut, policy, reduction)
    return step.run()


def _plan(stages: int, microbatches: int, repeats: int, kind: str) -> TaskSchedule:
    plan = schedule(stages, microbatches, repeats, kind)
    assert isinstance(plan, TaskSchedule)
    return plan


@dataclass(frozen=True)
class _Cut:
    """The features, cut: those of `parts` have the dim `micro`, those of `others` are as they were."""

    micro: Dimension
    parts: Features
    others: Features

    @classmethod
    def of(cls, features: Features, batch: Dimension, count: int, stage: Dimension) -> _Cut:
        """The features cut along `batch`, after all checks."""
        if not isinstance(features, Mapping) or not features:
            raise GraphError(f"{at(WHAT)}: features must be a dict of names to tensors, got {features!r:.80}")
        if not isinstance(batch, Dimension):
            raise GraphError(f"{at(WHAT)}: batch_dim must be a Dimension, got {batch!r:.80}")
        micro, parts, others = Dimension("microbatch", count), {}, {}
        for name, x in features.items():
            dims = list(tensor(x, f"{WHAT} feature {name!r}").shape)
            for taken in (micro, stage):
                if taken.name in x.shape:
                    raise ShapeError(f"{at(WHAT)}: feature {name!r}, {x}, has a dim '{taken.name}'; rename it")
            if batch not in dims:
                others[name] = x
                continue
            if batch.size % count:
                raise ShapeError(
                    f"{at(WHAT)}: {x} can't be cut into {count} equal microbatches: {batch.size} % {count} = "
                    f"{batch.size % count}"
                )
            place, small = dims.index(batch), Dimension(batch.name, batch.size // count)
            parts[name] = reshape(x, [*dims[:place], small, micro, *dims[place + 1 :]])
        if not parts:
            raise GraphError(f"{at(WHAT)}: no feature has the dim {batch}: {', '.join(map(str, features.values()))}")
        return cls(micro, parts, others)

    def of_turn(self, graph: Graph, which: Tensor) -> Tensors:
        """The features of the microbatch that each stage has: [stage, ...]."""
        given = {name: gather(graph.adopt(x), which, self.micro) for name, x in self.parts.items()}
        return {**given, **{name: graph.adopt(x) for name, x in self.others.items()}}


@dataclass(eq=False)
class _Buffer:
    """A value of several microbatches, in slots: [slot, stage, ...], a carry of the loop over ticks."""

    value: Tensor
    carry: Tensor
    slot: Dimension

    @classmethod
    def like(cls, x: Tensor, count: int, name: str) -> _Buffer:
        """Empty slots for values of the type of `x`."""
        slot = Dimension(free_name(f"{name}_slot", x.shape.names), count)
        carry = late_carry(x.graph, TensorType(Shape([slot, *x.shape]), x.dtype), name)
        return cls(carry, carry, slot)

    def read(self, slots: Tensor) -> Tensor:
        """What was there before this tick, of each stage in a slot of its own."""
        return gather(self.carry, slots, self.slot)

    def write(self, x: Tensor, slots: Tensor) -> None:
        """Put `x` there, where the slot is one."""
        self.value = update_slice(self.value, x, self.slot, slots, out_of_range="drop")
        body = self.carry.graph.loop_body
        assert body is not None
        body.late[self.carry] = self.value


@dataclass(eq=False)
class _Step:
    """One call: what the body of the loop finds out while it is written, and what follows from it outside."""

    first_fn: Callable[[Tensors], Tensor]
    stage_fn: Callable[..., Any]
    last_fn: Callable[[Tensor, Tensors], Tensor | Mapping[str, Tensor]]
    ticks: Ticks
    stage: Dimension
    cut: _Cut
    remat: Policy
    reduction: str
    sources: list[Tensor] = field(default_factory=list)  # of gradients, one for each of `totals`
    totals: list[Tensor] = field(default_factory=list)  # the carries that add them up
    outputs: Tensors = field(default_factory=dict)  # the carries that add outputs up

    def run(self) -> tuple[list[Tensor], Tensors]:
        """Write the loop and what comes after it."""
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
            outputs = {name: self._whole(of[carry]) for name, carry in self.outputs.items()}
            if (of_stages := outputs.pop("loss of stages", None)) is not None:
                outputs["loss"] = add(outputs["loss"], of_stages)
        return variable_gradients(graph, loop, self.sources, totals, WHAT), outputs

    def _whole(self, total: Tensor) -> Tensor:
        """An output of the whole batch, from the sum over ticks: [stage, ...]."""
        y = reduce_sum(total, output_shape=[d for d in total.shape if d != self.stage])
        return y * (1 / self.cut.micro.size) if self.reduction == "mean" else y

    # ------------------------------------------------------------ tables

    def _tables(self, graph: Graph) -> Tensors:
        """Per tick and stage, what the body reads."""
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
        t = dict(zip(self.names, slices, strict=True))
        self.graph = graph = slices[0].graph
        first = self._branch(FIRST, t, lambda _: self._first(t), [])
        (entering,) = first.made
        inputs = _Buffer.like(entering, self.ticks.inputs[1], "inputs")
        x = where(t[f"works {FIRST}"], entering, inputs.read(t["read input"]), output_shape=entering.shape)
        forward = self._branch(FORWARD, t, lambda carries: self._forward(carries[0], t), [x], self.remat)
        self._add_outputs(list(self.said), forward.made)
        (y,) = forward.ends
        self._refuse_random(first.operation, forward.operation)
        saved = [self._residual(n, value, t) for n, value in enumerate(forward.saved)]
        loss = self._branch(LOSS, t, lambda _: self._loss(y, t), [])
        self._add_outputs(list(self.said_last), loss.made[1 : 1 + len(self.said_last)])
        self._add_gradients(self.of_loss, loss.made[1 + len(self.said_last) :])
        cotangents = _Buffer.like(loss.made[0], self.ticks.cotangents[1], "cotangents")
        with region(BACKWARD_REGION):
            self._backwards(t, first, forward, (inputs, saved, cotangents))
        inputs.write(entering, t["write first"])
        circle = self.ticks.plan.repeats > 1
        inputs.write(shift(y, 1, self.stage, circle, "to_next_stage"), t["arrives"])
        with region(BACKWARD_REGION):
            cotangents.write(loss.made[0], t["write loss"])
            arriving = shift(self.dx, -1, self.stage, circle, "to_previous_stage")
            cotangents.write(arriving, t["cotangent arrives"])
        return [], []

    def _branch(
        self,
        kind: str,
        t: Tensors,
        body: Callable[[Sequence[Tensor]], Any],
        carries: Sequence[Tensor],
        remat: Policy = "full",
    ) -> Taken:
        return branch(kind, body, carries, t[f"works {kind}"], self.ticks.active(kind, self.stage.name), remat)

    def _first(self, t: Tensors) -> tuple[list[Tensor], list[Tensor]]:
        """What the first stage takes."""
        graph = current_graph(WHAT)
        x = self.first_fn(self.cut.of_turn(graph, graph.adopt(t[f"{FORWARD} microbatch"])))
        return [], [self._with_stage(tensor(x, f"{WHAT}: what first_fn returns"), "first_fn")]

    def _forward(self, x: Tensor, t: Tensors) -> tuple[list[Tensor], list[Tensor]]:
        """What a stage makes, and what it says besides."""
        graph = x.graph
        body = graph.loop_body
        assert body is not None
        body.held = (self.stage,)
        if self.ticks.plan.repeats > 1:
            repeat = Dimension(free_name("repeat", x.shape.names), self.ticks.plan.repeats)
            body.held, body.chosen = (repeat, self.stage), (repeat, graph.adopt(t[f"{FORWARD} repeat"]))
        returned = self.stage_fn(x, self.cut.of_turn(graph, graph.adopt(t[f"{FORWARD} microbatch"])))
        y, said = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
        if not isinstance(said, Mapping):
            raise GraphError(f"{at(WHAT)}: stage_fn must return a tensor, or that and a dict, got {returned!r:.80}")
        y = graph.adopt(tensor(y, f"{WHAT}: what stage_fn returns"))
        if set(y.shape) != set(x.shape) or y.dtype is not x.dtype:
            raise ShapeError(f"{at(WHAT)}: stage_fn turns {x.type} into {y.type}; types must stay the same")
        self.said = {name: self._of_stages(graph, z, f"stage_fn's {name!r}") for name, z in said.items()}
        return [transpose(y, x.shape)], [self._counted(graph, z) for z in self.said.values()]

    def _loss(self, y: Tensor, t: Tensors) -> tuple[list[Tensor], list[Tensor]]:
        """The cotangent of what the last stage made, what last_fn returns, and gradients of what it is computed with."""
        graph = current_graph(WHAT)
        y = graph.adopt(y)
        returned = self.last_fn(y, self.cut.of_turn(graph, graph.adopt(t[f"{FORWARD} microbatch"])))
        outputs = {"loss": returned} if isinstance(returned, Tensor) else returned
        if not isinstance(outputs, Mapping) or "loss" not in outputs:
            raise GraphError(
                f"{at(WHAT)}: last_fn must return a tensor, or a dict with 'loss' in it, got {returned!r:.80}"
            )
        self.said_last = {name: self._of_stages(graph, z, f"last_fn's {name!r}") for name, z in outputs.items()}
        inside = self._sources(graph)
        loss = self.said_last["loss"]
        with region(BACKWARD_REGION):
            dy, *others = gradients([loss], [y, *(x for _, x in inside)], [self._seed(graph, loss)])
            if dy is None:
                raise GraphError(f"{at(WHAT)}: the loss does not depend on what the stages make")
            self.of_loss, grads = _there(inside, others)
            dy = self._counted(graph, dy)
        return [], [dy, *(self._counted(graph, z) for z in self.said_last.values()), *grads]

    # ------------------------------------------------------------ backward

    def _again(
        self, graph: Graph, taken: Taken, carries: Sequence[Tensor], swapped: Mapping[Tensor, Tensor]
    ) -> Tensors:
        """The body of a branch written again, on other carries, and other tables in place of some."""
        loop = taken.operation.loop
        assert loop is not None
        _, _, outer = loop.operands(taken.operation.inputs)
        given = [*carries, graph.adopt(swapped[taken.operation.inputs[loop.carries - 1]])]
        given += [graph.adopt(swapped.get(x, x)) for x in outer]
        inside = dict(zip(loop.stand_ins, given, strict=True))
        return replay(loop.body.operations, loop.body.rewrites, inside, graph)

    def _backward(
        self, t: Tensors, forward: Taken, dy: Tensor, x: Tensor, residuals: Sequence[_Buffer | None]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The cotangent of what a stage took, and gradients of what it computes with."""
        graph, loop = dy.graph, forward.operation.loop
        assert loop is not None
        x = graph.adopt(x)
        again = self._again(graph, forward, [x], self._swapped(t, FORWARD, BACKWARD))
        for y, buffer in zip(loop.kept, residuals, strict=True):
            if buffer is not None:
                value = gather(graph.adopt(buffer.carry), graph.adopt(t["read residual"]), buffer.slot)
                graph.known[again[y]] = transpose(value, y.shape)
        inside = self._sources(graph)
        ys, seeds = [again[loop.made.finals[0]]], [self._counted(graph, dy)]
        if "loss" in self.said:
            loss = again[self.said["loss"]]
            ys, seeds = [*ys, loss], [*seeds, self._seed(graph, loss)]
        splits = self.ticks.plan.splits
        with separate_weights() if splits else nullcontext():
            dx, *others = gradients(ys, [x, *(s for _, s in inside)], seeds)
        if dx is None:
            raise GraphError(f"{at(WHAT)}: what stage_fn returns does not depend on what it takes")
        self.of_stages, grads = _there(inside, others)
        dx, grads = self._counted(graph, dx), [self._counted(graph, g) for g in grads]
        if not splits:
            return [dx], grads
        self.later = _Later(deferred(graph, [dx], grads, lambda z: self.stage in z.shape), grads, graph, self.graph)
        return [dx], self.later.stored

    def _first_backward(self, t: Tensors, first: Taken, dx: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients of what first_fn computes with."""
        graph, loop = current_graph(WHAT), first.operation.loop
        assert loop is not None
        again = self._again(graph, first, [], self._swapped(t, FORWARD, BACKWARD, FIRST, FIRST_BACKWARD))
        inside = self._sources(graph)
        x = again[loop.made.stacks[0]]
        others = gradients([x], [s for _, s in inside], [self._counted(graph, graph.adopt(dx))])
        self.of_first, grads = _there(inside, others)
        return [], grads

    def _backwards(
        self, t: Tensors, first: Taken, forward: Taken, buffers: tuple[_Buffer, Sequence[_Buffer | None], _Buffer]
    ) -> None:
        """The branches of a backward, and their sums."""
        inputs, residuals, cotangents = buffers
        dy, x = cotangents.read(t["read cotangent"]), inputs.read(t["read input again"])
        back = self._branch(BACKWARD, t, lambda carries: self._backward(t, forward, carries[0], x, residuals), [dy])
        (self.dx,) = back.ends
        if self.ticks.plan.splits:
            stored = [_Buffer.like(x, self.ticks.operands[1], f"operand_{n}") for n, x in enumerate(back.made)]
            weights = self._branch(WEIGHTS, t, lambda _: ([], self.later.written(t, stored)), [])
            self._add_gradients(self.of_stages, weights.made)
            for buffer, x in zip(stored, back.made, strict=True):
                buffer.write(x, t["write operands"])
        else:
            self._add_gradients(self.of_stages, back.made)
        if self._leads(first):
            last = self._branch(FIRST_BACKWARD, t, lambda _: self._first_backward(t, first, self.dx), [])
            self._add_gradients(self.of_first, last.made)

    def _swapped(self, t: Tensors, kind: str, by: str, mask: str | None = None, by_mask: str | None = None) -> Tensors:
        """Which tables stand for those of another kind of task."""
        pairs = [(f"{kind} {part}", f"{by} {part}") for part in ("microbatch", "repeat")]
        pairs.append((f"works {mask or kind}", f"works {by_mask or by}"))
        return {t[old]: t[new] for old, new in pairs if old in t}

    # ------------------------------------------------------------ sums

    def _sources(self, graph: Graph) -> list[tuple[Tensor, Tensor]]:
        """What the body of a branch takes from outside the loop and trainable variables lead to: outside, inside."""
        body = graph.loop_body
        assert body is not None
        leads = led_to(graph.root)
        pairs = [(self.graph.outer_of(outer), inner) for outer, inner in body.captured.items()]
        return [(outer, x) for outer, x in pairs if outer in leads and outer is not None and x.dtype.is_float]

    def _leads(self, taken: Taken) -> bool:
        """Whether trainable variables lead to what a branch takes."""
        loop = taken.operation.loop
        assert loop is not None
        leads = led_to(self.graph.root)
        return any(self.graph.outer_of(x) in leads for x in loop.operands(taken.operation.inputs).captured)

    def _add_gradients(self, sources: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        for source, g in zip(sources, grads, strict=True):
            self.sources.append(source)
            self.totals.append(self._add_up(g, "gradient"))

    def _add_up(self, x: Tensor, name: str) -> Tensor:
        """A carry of the loop over ticks to which `x` is added in each; the carry itself."""
        carry = late_carry(self.graph, x.type, name)
        body = self.graph.loop_body
        assert body is not None
        body.late[carry] = add(carry, x)
        return carry

    def _add_outputs(self, names: Sequence[str], values: Sequence[Tensor]) -> None:
        for name, value in zip(names, values, strict=True):
            if name in self.outputs and name != "loss":
                raise GraphError(f"{at(WHAT)}: stage_fn and last_fn both return {name!r}")
            label = name if name not in self.outputs else f"{name} of stages"
            self.outputs[label] = self._add_up(value, "output")

    def _seed(self, graph: Graph, loss: Tensor) -> Tensor:
        """The cotangent of a loss of one microbatch, of the stages that work."""
        scale = 1 / self.cut.micro.size if self.reduction == "mean" else 1.0
        return self._counted(graph, constant_full(scale, loss, loss.dtype.of_cotangents))

    def _counted(self, graph: Graph, x: Tensor) -> Tensor:
        """Of a value of a branch, what the stages that work have made; zeros of others. Wide enough to be added up."""
        body = graph.loop_body
        assert body is not None
        assert body.working is not None
        return where(body.working, x, 0, output_shape=x.shape) if self.stage in x.shape else x

    def _of_stages(self, graph: Graph, z: object, what: str) -> Tensor:
        """A loss, or another output, of each stage alone: float32 at least."""
        x = graph.adopt(tensor(z, f"{WHAT}: {what}"))
        if self.stage not in x.shape or not x.dtype.is_float:
            raise ShapeError(f"{at(WHAT)}: {what} must be float and have the dim {self.stage}, got {x}")
        reduce = reduce_mean if self.reduction == "mean" else reduce_sum
        return reduce(wide(x), output_shape=[self.stage])

    def _with_stage(self, x: Tensor, what: str) -> Tensor:
        if self.stage not in x.shape or not x.dtype.is_float:
            raise ShapeError(f"{at(WHAT)}: {what} must return a float tensor of the dim {self.stage}, got {x}")
        return transpose(x, [self.stage, *(d for d in x.shape if d != self.stage)])

    def _residual(self, number: int, value: Tensor, t: Tensors) -> _Buffer | None:
        """Slots for what a forward keeps; None for what is not of one stage, and is computed again."""
        if self.stage not in value.shape:
            return None
        buffer = _Buffer.like(value, self.ticks.residuals[1], f"residual_{number}")
        buffer.write(value, t["write residual"])
        return buffer

    def _refuse_random(self, *operations: Operation) -> None:
        for op in all_operations(operations):
            if op.opdef.unique and op.opdef.kind not in RESIDENT:
                raise GraphError(
                    f"{at(WHAT)}: {op} draws random numbers, which would be others when its stage is computed again; "
                    "take mtf.layers.pipeline, or a rate of 0"
                )


class _Later:
    """Gradients of weights that are a task of their own: what a backward stores for them, and how they are written."""

    def __init__(self, later: Deferred, results: Sequence[Tensor], graph: Graph, around: Graph) -> None:
        self.later, self.results = later, results
        body, outside = graph.loop_body, around.loop_body
        assert body is not None
        assert outside is not None
        self.mask = body.working
        fixed = set(outside.captured.values())  # the same in each tick
        self.outer = {x: y for x in later.taken if (y := graph.outer_of(x)) is not None}
        self.tables = [x for x, y in self.outer.items() if y not in fixed and not y.dtype.is_float]
        self.fixed = [x for x, y in self.outer.items() if y in fixed]
        elsewhere = {*self.tables, *self.fixed, self.mask}
        self.stored = [x for x in later.taken if x not in elsewhere]

    def written(self, t: Tensors, buffers: Sequence[_Buffer]) -> list[Tensor]:
        """The gradients, in the body of their own branch."""
        graph = current_graph(WHAT)
        body = graph.loop_body
        assert body is not None
        assert body.working is not None
        parts = ("microbatch", "repeat")
        swapped = {t[f"{BACKWARD} {part}"]: t[f"{WEIGHTS} {part}"] for part in parts if f"{WEIGHTS} {part}" in t}
        given = {x: graph.adopt(self.outer[x]) for x in self.fixed}
        given |= {x: graph.adopt(swapped[self.outer[x]]) for x in self.tables}
        slots = graph.adopt(t["read operands"])
        for x, buffer in zip(self.stored, buffers, strict=True):
            given[x] = transpose(gather(graph.adopt(buffer.carry), slots, buffer.slot), x.shape)
        if self.mask is not None:
            given[self.mask] = body.working
        return self.later.written(graph, given, self.results)


def _there(
    inside: Sequence[tuple[Tensor, Tensor]], cotangents: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor]]:
    """The sources that have a gradient, and their gradients in the dtype to sum in."""
    pairs = [(source, wide(g)) for (source, _), g in zip(inside, cotangents, strict=True) if g is not None]
    return [source for source, _ in pairs], [g for _, g in pairs]
