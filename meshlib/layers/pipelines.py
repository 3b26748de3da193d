"""Pipelines: stages of layers on different devices, each working on its own microbatch.

The stages are a dim. In a trip of one loop all of them run at once, each on the microbatch that has got to it: what
they read has the dim, their weights have it, and named dims do the rest. Between trips everything moves on by one
stage, which is a shift along the dim. Where a rule lays the dim over an axis (`stage:pipe`), each device holds the
weights of its stages, and the shift is the only thing that is sent. `meshlib.layers.pipeline_schedule` says who does
what when.

A device is a part of one program and can't sit idle: it computes in a bubble too, on zeros and on what is left. None of
that reaches a result: it is no part of what is cut out at the end, nor of the sums of gradients and losses.

Sources: Xu et al., "GSPMD", arXiv:2105.04663, section 3.3 (a pipeline as a shift of a buffer of all stages);
google/praxis `layers/pipeline.py`, AI-Hypercomputer/maxtext `layers/pipeline.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from layouts import Dimension, Shape
from meshlib.core.arguments import at, items, whole
from meshlib.core.dtypes import BOOL, FLOAT32, FLOAT64, INT32
from meshlib.core.errors import GraphError, ShapeError
from meshlib.core.graph import Tensor, current_graph, find_dim, innermost
from meshlib.core.names import free_name
from meshlib.layers.pipeline_schedule import Schedule, schedule
from meshlib.ops.building import tensor
from meshlib.ops.control.loops import make_loop, works_table
from meshlib.ops.control.remat import Policy, checked_policy
from meshlib.ops.control.sources import constant_like
from meshlib.ops.movement.indexing import gather, scatter_add
from meshlib.ops.movement.runs import pad, shift, slice
from meshlib.ops.movement.shape import rename_dimension, reshape, transpose
from meshlib.ops.movement.tables import table
from meshlib.ops.pointwise.elementwise import add, cast, where

StageFn = Callable[..., Any]


def pipeline(
    stage_fn: StageFn,
    x: Tensor,
    stages: int | Dimension,
    microbatches: int | Dimension,
    repeats: int = 1,
    beside: Sequence[Tensor] = (),
    remat: Policy = "full",
    name: str | None = None,
) -> Any:
    """Apply `stages * repeats` runs of layers one after the other, each stage on its own microbatch at a time.

    Args:
      stage_fn: what one stage does: takes a microbatch and returns one of the same type, or that and a list of tensors
        (losses of its own). It is written once, for all stages: what it takes has the dim `stage` first, which layers
        carry along, and the variables that it makes get it as their first dim (before it `repeat`, if there are
        several). What it takes from outside all stages share. It may hold loops, dropout, rematerialisation.
      x: [batch, ...]: what the first stage takes.
      stages: how many, or the dim to call them by; "stage" unless given, which layout rules name: `stage:pipe`.
      microbatches: into how many parts to cut the first dim of x, as `serialize_training_step` does: on the minor part
        of the dim, so that a split batch moves nothing. Or a dim of x that counts them already: where a rule lays that
        over the axis of the stages too, what comes before and after the pipeline is divided among them.
      repeats: how often each microbatch goes round. A stage then holds as many runs of layers, of which the layers of
        the whole model take turns: stage 0, 1, ..., then stage 0 again. Wants a multiple of stages in microbatches.
      beside: other tensors that are cut like x, of which each stage is given the part of its microbatch: masks, what an
        encoder has made. `stage_fn(x, *beside)`. They are brought to the stages ahead of the loop.
      remat: what is kept of each trip for the gradient beside the inputs of the stages, as of `mtf.scan`: with "full"
        each stage is computed again. Loops in a stage have their own.
      name: of the loop, and the scope of its operations.
    Returns: y, of the type of x. If stage_fn returns tensors besides: y, and a list of their sums over all microbatches
      (and repeats), each still with the dim `stage`, in float32 at least.
    Bytes: each trip sends a microbatch to the next stage, and backward its gradient to the one before. Besides, once,
      what it takes to bring x to the first stage and y from the last to where the layout wants them: nothing, and an
      all_reduce over the axis of the stages, or an all_gather and a reduce_scatter where a rule lays the microbatches
      over it. Of what is `beside` the first, and backward the other way round.
    Memory: of weights, gradients and slots 1 / stages. For the gradient, on each device, the inputs of its stage for
      all microbatches and repeats and what `remat` keeps; while the loop runs, what goes in and what comes out in each
      trip as well, and what is `beside` for all microbatches and repeats.
    Time: (1 + `mtf.layers.schedule(...).bubble`) of what the work takes.
    Random numbers: each stage, microbatch and repeat has its own, under every layout the same, but they are others than
      of the same layers without a pipeline.
    Raises: GraphError, ShapeError for numbers that do not divide, or a stage_fn that changes types.
    Example:
      >>> import meshlib as mtf
      >>> batch, width = mtf.Dimension("batch", 8), mtf.Dimension("width", 16)
      >>> with mtf.Graph() as graph:
      ...     x = mtf.input("x", [batch, width])
      ...     layer = lambda h: mtf.layers.dense(h, width, activation=mtf.tanh)
      ...     y = mtf.layers.pipeline(layer, x, stages=2, microbatches=4)
      ...     program = mtf.lower({"y": y}, mesh="pipe:2", layout="stage:pipe")
      >>> print(graph.variables["dense/kernel"].output.shape)
      [stage:2, width:16, width_out:16]
      >>> [(c.kind, c.count, c.sent_bytes) for c in program.collectives]
      [('collective_permute', 5, 128), ('all_reduce', 1, 512)]
    """
    what = "pipeline"
    if not callable(stage_fn):
        raise GraphError(f"{at(what)}: stage_fn must be a function of a tensor, got {stage_fn!r:.80}")
    policy = checked_policy(remat, what)
    others = [tensor(t, what) for t in items(beside, what, "beside")]
    stage = stages if isinstance(stages, Dimension) else Dimension("stage", _least_one(stages, "stages"))
    cut = _Cut.of(tensor(x, what), microbatches)
    plan = schedule(stage.size, cut.micro.size, _least_one(repeats, "repeats"))
    for t in (x, *others):
        if stage.name in t.shape:
            raise ShapeError(f"{at(what)}: {t} has a dim '{stage.name}'; rename it, or give stages another")
    run = _Run(stage_fn, plan, stage, cut.micro, [cut.apart(t) for t in others])
    y, sums = run.loop(cut.apart(x), policy, name)
    y = cut.together(y)
    return (y, sums) if run.returns_sums else y


def _least_one(count: object, argument: str) -> int:
    checked_count = whole(count, "pipeline", argument)
    if checked_count < 1:
        raise GraphError(f"{at('pipeline')}: {argument} must be at least 1, got {count}")
    return checked_count


@dataclass(frozen=True)
class _Cut:
    """How a batch is cut into microbatches: `whole` into `small` and `micro`, or not at all."""

    micro: Dimension
    whole: Dimension | None = None
    small: Dimension | None = None

    @classmethod
    def of(cls, x: Tensor, microbatches: int | Dimension) -> _Cut:
        """How `x` is cut."""
        what = "pipeline"
        if isinstance(microbatches, Dimension):
            return cls(find_dim(x, microbatches, what))
        count = _least_one(microbatches, "microbatches")
        if not len(x.shape):
            raise ShapeError(f"{at(what)}: {x} has no dim to cut into microbatches")
        batch = x.shape[0]
        if batch.size % count:
            raise ShapeError(
                f"{at(what)}: {x} can't be cut into {count} equal microbatches: {batch.size} % {count} = "
                f"{batch.size % count}"
            )
        if batch.name == "microbatch":
            raise ShapeError(f"{at(what)}: {x} counts microbatches already; give the dim: microbatches={batch!r}")
        return cls(Dimension("microbatch", count), batch, Dimension(batch.name, batch.size // count))

    def apart(self, t: Tensor) -> Tensor:
        """[microbatch, ...] of one tensor."""
        if self.whole is not None and self.small is not None:
            batch = find_dim(t, self.whole, "pipeline")
            at_dim, dims = t.shape.index(batch.name), list(t.shape)
            if self.micro.name in t.shape:
                raise ShapeError(f"{at('pipeline')}: {t} has a dim '{self.micro.name}'; rename it")
            t = reshape(t, [*dims[:at_dim], self.small, self.micro, *dims[at_dim + 1 :]])
        find_dim(t, self.micro, "pipeline")
        return transpose(t, [self.micro, *(d for d in t.shape if d != self.micro)])

    def together(self, y: Tensor) -> Tensor:
        """The other way round, of a result [microbatch, batch, ...]."""
        if self.whole is None or self.small is None:
            return y
        rest = list(y.shape)[2:]
        return reshape(transpose(y, [self.small, self.micro, *rest]), [self.whole, *rest])


class _Run:
    """The loop over the trips of one pipeline."""

    def __init__(
        self, stage_fn: StageFn, plan: Schedule, stage: Dimension, micro: Dimension, beside: Sequence[Tensor]
    ) -> None:
        self.stage_fn, self.plan, self.stage, self.micro, self.beside = stage_fn, plan, stage, micro, beside
        self.returns_sums = False
        self.sums: list[Tensor] = []  # while the body is written: what it adds up, of one trip

    def loop(self, x: Tensor, policy: Policy, name: str | None) -> tuple[Tensor, list[Tensor]]:
        """All microbatches through all stages: [microbatch, ...] to the same, and the sums."""
        graph = innermost([x, *self.beside], "pipeline")
        taken = {d.name for t in (x, *self.beside) for d in t.shape} | {self.stage.name}
        self.trip = Dimension(free_name("trip", taken), self.plan.trips)
        self.repeat = Dimension(free_name("repeat", taken), self.plan.repeats)
        self.active = self.plan.active(self.stage.name)
        with graph:
            fed = self._fed(graph.adopt(x))
            first = reshape(slice(fed, 0, 1, self.trip.name), fed.shape.dims[1:])
            slices = [shift(fed, -1, self.trip, wrap=False), *self._tables(), *self._beside()]
            body = self._body
            finals, (ys,) = make_loop(
                "pipeline", body, [first], slices, self.trip, False, name, True, remat=policy, active=self.active
            )
            return self._out(ys, x), list(finals[1:])

    # ------------------------------------------------------------ one trip

    def _body(self, carries: Sequence[Tensor], slices: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        (x,), (following, *others) = carries, slices
        graph, plan = x.graph, self.plan
        of_loop = graph.loop_body
        assert of_loop is not None
        assert of_loop.working is not None
        rest = iter(others)
        of_loop.held = (self.stage,)
        if plan.repeats > 1:
            goes_on, turns = next(rest), next(rest)
            of_loop.held, of_loop.chosen = (self.repeat, self.stage), (self.repeat, turns)
        y, sums = self._stages(x, list(rest))
        sent = y if plan.repeats == 1 else where(goes_on, y, 0, output_shape=y.shape)
        moved = shift(sent, 1, self.stage, wrap=plan.repeats > 1, name="to_next_stage")
        return [add(following, moved), *(where(of_loop.working, t, 0, output_shape=t.shape) for t in sums)], [y]

    def _stages(self, x: Tensor, beside: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """What all stages make, and what is to be summed, both checked."""
        what = "pipeline"
        returned = self.stage_fn(x, *beside)
        self.returns_sums = not isinstance(returned, Tensor)
        if self.returns_sums and (not isinstance(returned, tuple | list) or len(returned) != 2):
            raise GraphError(
                f"{at(what)}: stage_fn must return a tensor, or a pair of it and a list of tensors to sum, "
                f"got {returned!r:.80}"
            )
        y, others = (returned, []) if isinstance(returned, Tensor) else returned
        sums = [x.graph.adopt(tensor(t, what)) for t in items(others, what, "what stage_fn returns to sum")]
        y = x.graph.adopt(tensor(y, what))
        if set(y.shape) != set(x.shape) or y.dtype is not x.dtype:
            raise ShapeError(f"{at(what)}: stage_fn turns {x.type} into {y.type}; types must stay the same")
        for t in sums:
            if self.stage not in t.shape or not t.dtype.is_float:
                raise ShapeError(
                    f"{at(what)}: what stage_fn returns to sum must be float and have the dim {self.stage}, got {t}; "
                    "reduce over the other dims only"
                )
        return transpose(y, x.shape), [t if t.dtype is FLOAT64 else cast(t, FLOAT32) for t in sums]

    # ------------------------------------------------------------ what goes in and out

    def _tables(self) -> list[Tensor]:
        """Per trip and stage, where they are needed: whether the microbatch goes on, and which repeat it is.

        The last stage sends nothing to the first once a microbatch has come round for the last time: so what the first
        stage gets is what is sent to it, or enters, and their sum in any case.
        """
        plan, graph = self.plan, current_graph("pipeline")
        shape = Shape([self.trip, self.stage])
        tables = []
        if plan.repeats > 1:
            goes_on = np.ones(shape.sizes, np.bool_)
            goes_on[:, -1] = [row[-1] is not None and row[-1].repeat < plan.repeats - 1 for row in plan.turns]
            tables.append(table(graph, goes_on, shape, BOOL, "goes_on"))
            turns = [[0 if turn is None else turn.repeat for turn in row] for row in plan.turns]
            tables.append(table(graph, np.array(turns, np.int32), shape, INT32, "turns"))
        return tables

    def _beside(self) -> list[Tensor]:
        """What is read beside x, of each trip's and stage's microbatch: [trip, stage, ...].

        All stages are given all of theirs ahead of the loop: that sends each microbatch once, and its gradient, which
        else were added in every trip to that of all microbatches, is summed once, after the loop.
        """
        if not self.beside:
            return []
        places = [[0 if turn is None else turn.microbatch for turn in row] for row in self.plan.turns]
        shape = Shape([self.trip, self.stage])
        which = table(current_graph("pipeline"), np.array(places, np.int32), shape, INT32, "places")
        given = [gather(t, which, self.micro) for t in self.beside]
        works = works_table(self.active, self.trip)  # where one is idle nothing it makes of a microbatch is a gradient
        return [where(works, t, 0, output_shape=t.shape) if t.dtype.is_float else t for t in given]

    def _fed(self, x: Tensor) -> Tensor:
        """What enters in each trip: [trip, stage, ...], zeros but where the first stage takes a new microbatch."""
        plan, trip = self.plan, self.trip
        rest = x.shape.dims[1:]
        x = rename_dimension(x, self.micro.name, trip.name)
        if plan.repeats > 1:
            groups, round_ = self._rounds()
            x = pad(x, [0, groups.size * plan.stages - plan.microbatches], trip.name)
            x = reshape(x, [groups, Dimension(round_.name, plan.stages), *rest])
            x = pad(x, [0, round_.size - plan.stages], round_.name)
            x = reshape(x, [Dimension(trip.name, groups.size * round_.size), *rest])
        held = x.shape.dim(trip.name).size
        x = slice(pad(x, [0, max(0, plan.trips - held)], trip.name), 0, plan.trips, trip.name)
        first = constant_like(0, x, INT32)
        return scatter_add(x, first, self.stage, Shape([trip, self.stage, *rest]))

    def _out(self, ys: Tensor, like: Tensor) -> Tensor:
        """What the last stage has made of each microbatch when it came round for the last time."""
        plan, trip = self.plan, self.trip
        rest = like.shape.dims[1:]
        y = gather(ys, plan.stages - 1, self.stage)
        begin = plan.repeats * plan.stages - 1
        y = slice(y, begin, plan.trips - begin, trip.name)
        if plan.repeats > 1:
            groups, round_ = self._rounds()
            y = pad(y, [0, groups.size * round_.size - y.shape[0].size], trip.name)
            y = slice(reshape(y, [groups, round_, *rest]), 0, plan.stages, round_.name)
            y = reshape(y, [Dimension(trip.name, groups.size * plan.stages), *rest])
            y = slice(y, 0, plan.microbatches, trip.name)
        return rename_dimension(y, trip.name, self.micro.name, "out")

    def _rounds(self) -> tuple[Dimension, Dimension]:
        """How many groups of microbatches there are, and the trips that a stage takes with each."""
        plan = self.plan
        taken = self.trip.name
        return (
            Dimension(f"{taken}_group", -(-plan.microbatches // plan.stages)),
            Dimension(f"{taken}_round", plan.repeats * plan.stages),
        )
