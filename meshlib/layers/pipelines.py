"""Pipelines: stages of layers on different devices, each working on its own microbatch.

The stages are a dim. In each trip of one loop all of them run at once, each on its current microbatch: inputs and
weights have the dim. Between trips activations are shifted by one stage along the dim. If a rule splits the dim over an
axis (`stage:pipe`), each device has the weights of its stages, and an equal share of the microbatches that wait for the
first stage or have left the last (`meshlib.layers.pipeline_schedule`). Stages may have different numbers of layers.

All devices run one program and can't be idle: in a bubble they compute on zeros and stale values. These never reach a
result: they are excluded from the output and from the sums of gradients and losses.

Sources: Xu et al., "GSPMD", arXiv:2105.04663, section 3.3 (a pipeline as a shift of a buffer of all stages);
google/praxis `layers/pipeline.py`, AI-Hypercomputer/maxtext `layers/pipeline.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from layouts import Dimension, Shape
from meshlib.core.arguments import at, divisors_near, items, whole
from meshlib.core.dtypes import BOOL, FLOAT32, FLOAT64, INT32
from meshlib.core.errors import GraphError, ShapeError
from meshlib.core.graph import Operation, Tensor, current_graph, find_dim, innermost
from meshlib.core.loop_record import Active
from meshlib.core.names import free_name
from meshlib.core.replay import all_operations
from meshlib.layers.pipeline_schedule import Schedule, Stream
from meshlib.ops.building import tensor
from meshlib.ops.control.branches import branch
from meshlib.ops.control.loops import make_loop, scan, works_table
from meshlib.ops.control.remat import Policy, Remat, checked_policy
from meshlib.ops.movement.indexing import gather
from meshlib.ops.movement.runs import shift
from meshlib.ops.movement.shape import replace_dimensions, transpose
from meshlib.ops.movement.tables import table
from meshlib.ops.pointwise.arithmetic import add, where
from meshlib.ops.pointwise.casts import cast

WHAT = "stage_layers"
LAYER = "layer"  # the kind of the branch
StageFn = Callable[..., Any]


def split_layers(layers: int, stages: int, first: int = 1, last: int = 1) -> tuple[int, ...]:
    """The number of layers per stage, with the extra work of the first and last stage counted as layers.

    Args:
      layers: layers of the whole model.
      first, last: cost of the embedding and the head, in layers.
    Raises: GraphError if a stage would have none.
    Example: Llama 3.1 405B, in 16 stages (arXiv:2407.21783, section 3.3.2).
      >>> import meshlib as mtf
      >>> mtf.layers.split_layers(126, 16)
      (7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7)
    """
    what = "split_layers"
    whole(layers, what, "layers", low=1)
    whole(stages, what, "stages", low=1)
    base, more = divmod(layers + whole(first, what, "first", low=0) + whole(last, what, "last", low=0), stages)
    counts = [base + (stage >= stages - more) for stage in range(stages)]
    counts[0] -= first
    counts[-1] -= last
    if min(counts) < 1:
        raise GraphError(
            f"{at(what)}: {layers} layers in {stages} stages, of which the first and the last have {first} and {last} "
            f"fewer, leave a stage without any: {counts}; use fewer stages"
        )
    return tuple(counts)


def stage_layers(
    layer_fn: Callable[[Tensor], Tensor], x: Tensor, counts: Sequence[int], remat: Policy = "full"
) -> Tensor:
    """The layers of a pipeline stage, `counts` of them: a loop whose last trips some stages skip.

    Args:
      layer_fn: one layer, as for `mtf.scan` with `stack_variables`: [stage, ...] to the same type.
      x: the stages' input; its first dim is that of the stages.
      counts: number of layers per stage. Variables are allocated for the largest; unused parts keep their
        initial values.
      remat: rematerialisation policy per layer, as in `mtf.scan`.
    Returns: the type of x.
    Time: a device with one stage skips the trips beyond its count.
    Raises: GraphError for counts below 1; ShapeError unless there is one per stage.
    Example: three layers in two stages.
      >>> import meshlib as mtf
      >>> batch, width = mtf.Dimension("batch", 8), mtf.Dimension("width", 16)
      >>> layer = lambda h: mtf.layers.dense(h, width, activation=mtf.tanh)
      >>> with mtf.Graph() as graph:
      ...     x = mtf.input("x", [batch, width])
      ...     grads, outputs = mtf.layers.pipeline_training_step(
      ...         {"x": x}, lambda f: f["x"], lambda h, f: mtf.layers.stage_layers(layer, h, [1, 2]),
      ...         lambda h, f: mtf.square(h), batch, stages=2, microbatches=4)
      >>> print(graph.variables["dense/kernel"].output.shape)
      [stage:2, layers:2, width:16, width_out:16]
    """
    policy = checked_policy(remat, WHAT)
    sizes = [whole(n, WHAT, "counts", low=1) for n in items(counts, WHAT, "counts")]
    stage = tensor(x, WHAT).shape[0] if len(tensor(x, WHAT).shape) else None
    if stage is None or stage.size != len(sizes):
        raise ShapeError(f"{at(WHAT)}: the first dim of {x} must be the {len(sizes)} stages that counts has")
    dim = Dimension("layers", max(sizes))
    has = np.array([[n < count for count in sizes] for n in range(dim.size)])
    if has.all():
        (y,), _ = scan(
            lambda carries, _: ((layer_fn(carries[0]),), ()), [x], dim=dim, stack_variables=True, remat=policy
        )
        return y
    active = Active(stage.name, tuple(tuple(map(int, np.nonzero(row)[0])) for row in has), stage.size)
    masks = table(x.graph, has, Shape([dim, stage]), BOOL, "has_layer")

    def body(carries: Sequence[Tensor], slices: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[()]]:
        (mask,) = slices

        def layer(given: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            (h,) = given
            return [where(h.graph.adopt(mask), layer_fn(h), h, output_shape=h.shape)], []

        return branch(LAYER, layer, carries, mask, active, policy).carries, ()

    # Values of a layer that the policy keeps are results of the branch.
    keeps = isinstance(policy, Remat) or policy != "full"
    (y,), _ = scan(body, [x], [masks], dim, stack_variables=True, remat="none" if keeps else "full")
    return y


def loads_of(operations: Iterable[Operation], stages: int) -> list[float]:
    """The work of each stage relative to the largest, from its number of layers; empty if all are equal."""
    for op in all_operations(operations):
        record = None if op.loop is None else op.loop.branch
        if record is not None and record.kind == LAYER:
            counts = [sum(stage in row for row in record.active.indices) for stage in range(stages)]
            return [count / max(counts) for count in counts]
    return []


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
    """Apply `stages * repeats` groups of layers in sequence, with all stages working on different microbatches at once.

    Args:
      stage_fn: one stage: takes a microbatch and returns one of the same type, or that and a list of tensors (such as
        auxiliary losses). It is traced once for all stages: its inputs have the dim `stage` first, which layers pass
        through, and variables created in it get it as their first dim (after `repeat`, if there are several). Captured
        tensors are shared by all stages. It may contain loops, dropout, rematerialisation.
      x: [batch, ...]: input of the first stage.
      stages: number of stages, or their dim; by default named "stage", for layout rules: `stage:pipe`.
      microbatches: number of parts of the first dim of x, cut as in `serialize_training_step`: on the minor part of the
        dim, so that nothing is sent for a split batch. Or a dim of microbatches that x already has: if a rule splits it
        over the axis of the stages, work before and after the pipeline is divided among them, and memory grows by one
        microbatch of activations per microbatch, and by 1 / stages of the values before and after.
      repeats: rounds of each microbatch. A stage then has this many groups of layers; in model order they are assigned
        to stage 0, 1, ..., then stage 0 again. Best if microbatches are a multiple of stages.
      beside: other tensors cut like x, such as masks or encoder outputs, of which each stage gets the part of its
        microbatch: `stage_fn(x, *beside)`. They are gathered by the stages before the loop.
      remat: policy for values of each trip kept for the gradient besides stage inputs, as in `mtf.scan`: with "full"
        each stage is recomputed. Loops in a stage have their own policies.
      name: name of the loop, and scope of its operations.
    Returns: y, of the type of x. If stage_fn returns further tensors: y, and a list of their sums over all microbatches
      (and repeats), each with the dim `stage`, in float32 at least.
    Bytes: each trip sends a microbatch to the next stage, and, if one enters, a microbatch of the stream of inputs and
      results to the previous stage; backward their gradients the other way. Results end in equal shares on the stages,
      and are gathered unless a rule splits the microbatches over the axis of the stages. `beside` is gathered once, and
      its gradient scattered.
    Memory: weights, gradients and slots divided by stages. For the gradient, each device keeps the inputs of its stage
      for all microbatches and repeats, and the values kept by `remat`; during the loop also 1 / stages of all
      microbatches, and `beside` for all microbatches and repeats.
    Time: (1 + `mtf.layers.schedule(...).bubble`) times that of the work.
    Random numbers: different for each stage, microbatch and repeat, the same under every layout, but not those of the
      same layers without a pipeline.
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
    stage = stages if isinstance(stages, Dimension) else Dimension("stage", whole(stages, "pipeline", "stages", low=1))
    cut = _MicrobatchCut.of(tensor(x, what), microbatches)
    plan = Schedule(stage.size, cut.micro.size, whole(repeats, "pipeline", "repeats", low=1))
    for t in (x, *others):
        if stage.name in t.shape:
            raise ShapeError(f"{at(what)}: {t} has a dim '{stage.name}'; rename it, or give stages another")
    run = _PipelineLoop(stage_fn, plan, stage, cut.micro, [cut.split(t) for t in others])
    y, sums = run.loop(cut.split(x), policy, name)
    y = cut.merge(y)
    return (y, sums) if run.returns_sums else y


@dataclass(frozen=True)
class _MicrobatchCut:
    """A cut of a batch into microbatches: `whole` into `small` and `micro`, or none."""

    micro: Dimension
    whole: Dimension | None = None
    small: Dimension | None = None

    @classmethod
    def of(cls, x: Tensor, microbatches: int | Dimension) -> _MicrobatchCut:
        """The cut of `x`."""
        what = "pipeline"
        if isinstance(microbatches, Dimension):
            return cls(find_dim(x, microbatches, what))
        count = whole(microbatches, "pipeline", "microbatches", low=1)
        if not len(x.shape):
            raise ShapeError(f"{at(what)}: {x} has no dim to cut into microbatches")
        batch = x.shape[0]
        if batch.size % count:
            raise ShapeError(
                f"{at(what)}: {x} can't be cut into {count} equal microbatches: {batch.size} % {count} = "
                f"{batch.size % count}; use {divisors_near(batch.size, count)}"
            )
        if batch.name == "microbatch":
            raise ShapeError(f"{at(what)}: {x} counts microbatches already; give the dim: microbatches={batch!r}")
        return cls(Dimension("microbatch", count), batch, Dimension(batch.name, batch.size // count))

    def split(self, t: Tensor) -> Tensor:
        """A tensor cut into microbatches: [microbatch, ...]."""
        if self.whole is not None and self.small is not None:
            batch = find_dim(t, self.whole, "pipeline")
            if self.micro.name in t.shape:
                raise ShapeError(f"{at('pipeline')}: {t} has a dim '{self.micro.name}'; rename it")
            t = replace_dimensions(t, batch, [self.small, self.micro])
        find_dim(t, self.micro, "pipeline")
        return transpose(t, [self.micro, *(d for d in t.shape if d != self.micro)])

    def merge(self, y: Tensor) -> Tensor:
        """The inverse of `split`, for a result [microbatch, batch, ...]."""
        if self.whole is None or self.small is None:
            return y
        rest = list(y.shape)[2:]
        return replace_dimensions(transpose(y, [self.small, self.micro, *rest]), [self.small, self.micro], self.whole)


class _PipelineLoop:
    """The loop over the trips of one pipeline."""

    def __init__(
        self, stage_fn: StageFn, plan: Schedule, stage: Dimension, micro: Dimension, beside: Sequence[Tensor]
    ) -> None:
        self.stage_fn, self.plan, self.stage, self.micro, self.beside = stage_fn, plan, stage, micro, beside
        self.returns_sums = False
        self.sums: list[Tensor] = []  # while the body is traced: its summed outputs of one trip

    def loop(self, x: Tensor, policy: Policy, name: str | None) -> tuple[Tensor, list[Tensor]]:
        """All microbatches passed through all stages, [microbatch, ...] to the same type, and the sums."""
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
        reads, writes, *_ = tables
        circle = self.plan.repeats > 1
        sent = where(writes, 0, y, output_shape=y.shape) if circle else y
        moved = shift(sent, 1, self.stage, wrap=circle, name="to_next_stage")
        following = add(where(reads, entering, 0, output_shape=y.shape), moved)
        return [following, slots, *(where(of_loop.working, t, 0, output_shape=t.shape) for t in sums)], []

    def _stages(self, x: Tensor, beside: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The checked outputs of all stages, and the tensors to sum."""
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
                    f"{at(what)}: tensors that stage_fn returns for summing must be float and have the dim "
                    f"{self.stage}, got {t}; reduce over the other dims only"
                )
        return transpose(y, x.shape), [t if t.dtype is FLOAT64 else cast(t, FLOAT32) for t in sums]

    # ------------------------------------------------------------ inputs and outputs

    def _turns(self) -> list[Tensor]:
        """The repeat of each trip and stage, if there are several."""
        if self.plan.repeats == 1:
            return []
        turns = [[0 if turn is None else turn.repeat for turn in row] for row in self.plan.turns]
        shape = Shape([self.trip, self.stage])
        return [table(current_graph("pipeline"), np.array(turns, np.int32), shape, INT32, "turns")]

    def _beside(self) -> list[Tensor]:
        """The tensors `beside` x per trip and stage, sent once before the loop; gradients are summed once after it."""
        if not self.beside:
            return []
        places = [[0 if turn is None else turn.microbatch for turn in row] for row in self.plan.turns]
        shape = Shape([self.trip, self.stage])
        which = table(current_graph("pipeline"), np.array(places, np.int32), shape, INT32, "places")
        given = [gather(t, which, self.micro) for t in self.beside]
        works = works_table(self.active, self.trip)  # values of idle stages have no gradient
        return [where(works, t, 0, output_shape=t.shape) if t.dtype.is_float else t for t in given]
