"""Pipelines: stages of layers on different devices, each working on its own microbatch.

The stages are a dim. In a trip of one loop all of them run at once, each on the microbatch that has got to it: what
they read has the dim, their weights have it, and named dims do the rest. Between trips everything moves on by one
stage, which is a shift along the dim. Where a rule lays the dim over an axis (`stage:pipe`), each device holds the
weights of its stages, and an equal share of the microbatches that wait for the first stage or have left the last
(`meshlib.layers.pipeline_stream`). `meshlib.layers.pipeline_schedule` says who does what when.

A device is a part of one program and can't sit idle: it computes in a bubble too, on zeros and on what is left. None of
that reaches a result: it is no part of what is cut out at the end, nor of the sums of gradients and losses.

Sources: Xu et al., "GSPMD", arXiv:2105.04663, section 3.3 (a pipeline as a shift of a buffer of all stages);
google/praxis `layers/pipeline.py`, AI-Hypercomputer/maxtext `layers/pipeline.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from layouts import Dimension, Shape
from meshlib.core.arguments import at, divisors_near, items, whole
from meshlib.core.dtypes import FLOAT32, FLOAT64, INT32
from meshlib.core.errors import GraphError, ShapeError
from meshlib.core.graph import Tensor, current_graph, find_dim, innermost
from meshlib.core.names import free_name
from meshlib.layers.pipeline_schedule import Schedule
from meshlib.layers.pipeline_stream import Stream
from meshlib.ops.building import tensor
from meshlib.ops.control.loops import make_loop, works_table
from meshlib.ops.control.remat import Policy, checked_policy
from meshlib.ops.movement.indexing import gather
from meshlib.ops.movement.runs import shift
from meshlib.ops.movement.shape import reshape, transpose
from meshlib.ops.movement.tables import table
from meshlib.ops.pointwise.binary import add
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.selection import where

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
        over the axis of the stages too, what comes before and after the pipeline is divided among them, and memory
        grows by one microbatch of activations per microbatch, and by 1 / stages of what comes before and after.
      repeats: how often each microbatch goes round. A stage then holds as many runs of layers, of which the layers of
        the whole model take turns: stage 0, 1, ..., then stage 0 again. Wants a multiple of stages in microbatches.
      beside: other tensors that are cut like x, of which each stage is given the part of its microbatch: masks, what an
        encoder has made. `stage_fn(x, *beside)`. They are brought to the stages ahead of the loop.
      remat: what is kept of each trip for the gradient beside the inputs of the stages, as of `mtf.scan`: with "full"
        each stage is computed again. Loops in a stage have their own.
      name: of the loop, and the scope of its operations.
    Returns: y, of the type of x. If stage_fn returns tensors besides: y, and a list of their sums over all microbatches
      (and repeats), each still with the dim `stage`, in float32 at least.
    Bytes: each trip sends a microbatch to the next stage, and where one enters then, one of the stream, of inputs or
      results, to the stage before; backward their gradients the other way. Results end in equal shares on the stages,
      and are gathered unless a rule lays the microbatches over the axis of the stages. What is `beside` is gathered
      once, and backward its gradient scattered.
    Memory: of weights, gradients and slots 1 / stages. For the gradient, on each device, the inputs of its stage for
      all microbatches and repeats and what `remat` keeps; while the loop runs, 1 / stages of all microbatches as well,
      and what is `beside` for all microbatches and repeats.
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
      [('collective_permute', 5, 128), ('collective_permute', 5, 128), ('all_gather', 1, 256)]
    """
    what = "pipeline"
    if not callable(stage_fn):
        raise GraphError(f"{at(what)}: stage_fn must be a function of a tensor, got {stage_fn!r:.80}")
    policy = checked_policy(remat, what)
    others = [tensor(t, what) for t in items(beside, what, "beside")]
    stage = stages if isinstance(stages, Dimension) else Dimension("stage", _least_one(stages, "stages"))
    cut = _Cut.of(tensor(x, what), microbatches)
    plan = Schedule(stage.size, cut.micro.size, _least_one(repeats, "repeats"))
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
                f"{batch.size % count}; take {divisors_near(batch.size, count)}"
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
        self.active = replace(self.plan.active(self.stage.name), whole=(1,))
        self.stream = Stream(self.plan, self.stage, self.micro, self.trip)
        with graph:
            carries = self.stream.begin(graph.adopt(x))
            tables = self.stream.tables()
            self.exchanged = len(tables)
            slices = [*tables, *self._turns(), *self._beside()]
            finals, _ = make_loop(
                "pipeline", self._body, carries, slices, self.trip, False, name, True, remat=policy, active=self.active
            )
            return self.stream.end(finals[1]), list(finals[2:])

    # ------------------------------------------------------------ one trip

    def _body(self, carries: Sequence[Tensor], slices: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        x, slots = carries
        tables, others = slices[: self.exchanged], list(slices[self.exchanged :])
        of_loop = x.graph.loop_body
        assert of_loop is not None
        assert of_loop.working is not None
        of_loop.held = (self.stage,)
        if self.plan.repeats > 1:
            of_loop.held, of_loop.chosen = (self.repeat, self.stage), (self.repeat, others.pop(0))
        y, sums = self._stages(x, others)
        entering, slots = self.stream.exchange(slots, y, tables)
        takes, gives, *_ = tables
        circle = self.plan.repeats > 1
        sent = where(gives, 0, y, output_shape=y.shape) if circle else y
        moved = shift(sent, 1, self.stage, wrap=circle, name="to_next_stage")
        following = add(where(takes, entering, 0, output_shape=y.shape), moved)
        return [following, slots, *(where(of_loop.working, t, 0, output_shape=t.shape) for t in sums)], []

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

    def _turns(self) -> list[Tensor]:
        """Per trip and stage, which repeat it is, where there are several."""
        if self.plan.repeats == 1:
            return []
        turns = [[0 if turn is None else turn.repeat for turn in row] for row in self.plan.turns]
        shape = Shape([self.trip, self.stage])
        return [table(current_graph("pipeline"), np.array(turns, np.int32), shape, INT32, "turns")]

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
