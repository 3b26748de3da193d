"""Gradient accumulation over microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from layouts import Dimension, Shape
from meshlib.core.arguments import at, whole
from meshlib.core.dtypes import BOOL, INT32
from meshlib.core.errors import GraphError
from meshlib.core.graph import BACKWARD, Graph, Tensor, innermost, region
from meshlib.ops.building import tensor
from meshlib.ops.control.loop_gradient import led_to, variable_gradients, wide
from meshlib.ops.control.loops import while_loop
from meshlib.ops.control.sources import _constant, scalar
from meshlib.ops.gradients import gradients
from meshlib.ops.movement.indexing import gather, range
from meshlib.ops.movement.shape import broadcast, replace_dimensions
from meshlib.ops.pointwise.arithmetic import equal, where
from meshlib.ops.pointwise.casts import cast

MICROBATCH = "microbatch"

Tensors = dict[str, Tensor]


def serialize_training_step(
    features: Mapping[str, Tensor],
    model_fn: Callable[[Tensors], Mapping[str, Tensor]],
    batch_dim: Dimension,
    num_splits: int,
    reduction: str = "mean",
) -> tuple[list[Tensor], Tensors]:
    """Loss and gradients of a batch, computed in `num_splits` sequential microbatches.

    The batch is cut as [batch / num_splits, microbatch], with microbatches the minor part, so that the dim keeps its
    name and sharding: no example of a split batch is sent. Each microbatch runs forward and backward; results are
    accumulated in float32 (float64 for float64 gradients). They equal those of the whole batch up to rounding, except
    that random numbers (dropout) are drawn for each microbatch.

    Args:
      features: inputs of the model by name; those with `batch_dim` are cut, others are passed on unchanged.
      model_fn: takes features of the smaller batch, returns a dict of tensors with "loss". Variables may be declared in
        it, or outside.
      batch_dim: the dim to cut.
      num_splits: number of microbatches; divides the size of batch_dim.
      reduction: "mean" if the loss is a mean over the batch, "sum" if it is a sum (or if model_fn has divided it by
        num_splits, as is usual with Mesh TensorFlow).
    Returns: (grads, outputs). `grads` are those of all trainable variables of the graph, in order, for
      `Optimizer.apply_grads`. `outputs` are those of model_fn: outputs with the batch dim are concatenated in batch
      order, other float outputs follow `reduction`, and all others are summed.
    Bytes: gradients are reduced over a split batch once per step, after the last microbatch, even for scanned layers.
      For fully sharded weights in `mtf.scan`, each microbatch scatters each layer's gradient.
    Raises: GraphError if num_splits does not divide, model_fn returns no loss, or the loss does not depend on a
      trainable variable.
    Source: the function of this name in Mesh TensorFlow.
    Example:
      >>> import meshlib as mtf
      >>> batch = mtf.Dimension("batch", 8)
      >>> with mtf.Graph() as graph:
      ...     x = mtf.input("x", [batch])
      ...     w = mtf.variable("w", [], 2.0)
      ...     model = lambda features: {"loss": mtf.reduce_mean(features["x"] * w)}
      ...     grads, outputs = mtf.serialize_training_step({"x": x}, model, batch, num_splits=4)
      ...     train = mtf.optimize.SgdOptimizer(1.0).apply_grads(grads, graph.trainable_variables)
      >>> sim = mtf.simulate(mtf.lower(outputs, train, mesh="data:2", layout="batch:data"))
      >>> float(sim.step(x=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])["loss"]), float(sim.state["w"])
      (9.0, -2.5)
    """
    step = _Step(model_fn, _cut(features, batch_dim, num_splits), reduction)
    return step.run(features)


def _cut(features: Mapping[str, Tensor], batch_dim: Dimension, num_splits: int) -> tuple[Dimension, Dimension]:
    """The two dims into which the batch dim is split, after all checks of the arguments."""
    what = "serialize_training_step"
    if not isinstance(features, Mapping) or not features:
        raise GraphError(f"{at(what)}: features must be a dict of names to tensors, got {features!r:.80}")
    for name, x in features.items():
        if not isinstance(x, Tensor):
            raise GraphError(f"{at(what)}: feature {name!r} must be a tensor, got {type(x).__name__} {x!r:.80}")
        if innermost([x], what).parent is not None:
            raise GraphError(f"{at(what)}: feature {name!r}, {x}, is used inside a loop; call it outside")
    if not isinstance(batch_dim, Dimension):
        raise GraphError(f"{at(what)}: batch_dim must be a Dimension, got {batch_dim!r:.80}")
    if not any(batch_dim in x.shape for x in features.values()):
        shown = ", ".join(map(str, features.values()))
        raise GraphError(f"{at(what)}: no feature has the dim {batch_dim}: {shown}")
    splits = whole(num_splits, what, "num_splits")
    if splits < 1 or batch_dim.size % splits:
        raise GraphError(
            f"{at(what)}: num_splits must divide the batch: {batch_dim.size} examples can't be cut into {splits} equal "
            "microbatches"
        )
    for name, x in features.items():
        if MICROBATCH in x.shape:
            raise GraphError(f"{at(what)}: feature {name!r}, {x}, has a dim '{MICROBATCH}'; rename it")
    return Dimension(batch_dim.name, batch_dim.size // splits), Dimension(MICROBATCH, splits)


class _Step:
    """One call: state collected while the loop body is traced, and its results outside the loop."""

    def __init__(
        self, model_fn: Callable[[Tensors], Mapping[str, Tensor]], dims: tuple[Dimension, Dimension], reduction: str
    ) -> None:
        what = "serialize_training_step"
        if not callable(model_fn):
            raise GraphError(f"{at(what)}: model_fn must be a function of a dict of features, got {model_fn!r:.80}")
        if reduction not in ("mean", "sum"):
            raise GraphError(f"{at(what)}: reduction must be 'mean' or 'sum', got {reduction!r:.80}")
        self.model_fn = model_fn
        self.small, self.micro = dims
        self.batch = Dimension(self.small.name, self.small.size * self.micro.size)
        self.scale = 1 / self.micro.size if reduction == "mean" else 1.0
        self.outputs: Tensors = {}
        self.sources: list[Tensor] = []  # captured tensors that affect the loss and depend on variables

    def run(self, features: Mapping[str, Tensor]) -> tuple[list[Tensor], Tensors]:
        """Build the loop and the operations after it."""
        graph = next(iter(features.values())).graph
        self.features = {n: self._expanded(x) if self.batch in x.shape else x for n, x in features.items()}
        index = _constant(graph, 0, Shape([]), INT32, "first_microbatch")
        _, *sums = while_loop(self.micro.size, self._body, [index], "microbatches", has_accumulators=True)
        loop = sums[0].operation
        outputs = {n: self._whole(y, total) for (n, y), total in zip(self.outputs.items(), sums, strict=False)}
        totals = sums[len(self.outputs) :]
        return variable_gradients(graph, loop, self.sources, totals, "serialize_training_step", self.scale), outputs

    # ------------------------------------------------------------ inside the loop

    def _body(self, index: Tensor) -> list[Tensor]:
        body = index.graph
        given = {n: gather(x, index, self.micro) if self.micro in x.shape else x for n, x in self.features.items()}
        model_outputs = self.model_fn(given)
        self.outputs = _checked_outputs(model_outputs, body)
        loss = self.outputs["loss"]
        grads = self._source_gradients(body, loss)
        return [index + 1, *(self._scattered(y, index) for y in self.outputs.values()), *grads]

    def _source_gradients(self, body: Graph, loss: Tensor) -> list[Tensor]:
        """Gradients of the loss for all captured tensors that depend on trainable variables."""
        leads = led_to(body.root)
        captured = {} if body.loop_body is None else body.loop_body.captured
        known = {outer: inner for outer, inner in captured.items() if outer in leads and inner.dtype.is_float}
        source_gradients = gradients([loss], list(known.values()))
        grads = []
        for outer, g in zip(known, source_gradients, strict=True):
            if g is not None:
                self.sources.append(outer)
                with region(BACKWARD):
                    grads.append(wide(g))
        return grads

    def _scattered(self, y: Tensor, index: Tensor) -> Tensor:
        """The contribution of one microbatch to an output: its examples at their positions, zeros elsewhere."""
        if y.dtype is BOOL:
            y = cast(y, "int32")
        if self.small not in y.shape:
            return wide(y)
        is_current = equal(range(self.micro), index)
        shape = replace_dimensions(y.shape, self.small, [self.small, self.micro])
        return where(is_current, broadcast(y, shape), scalar(0, y))

    # ------------------------------------------------------------ outside

    def _expanded(self, x: Tensor) -> Tensor:
        return replace_dimensions(x, self.batch, [self.small, self.micro])

    def _whole(self, y: Tensor, total: Tensor) -> Tensor:
        """An output of the whole batch from the sum over microbatches."""
        if self.micro in total.shape:
            total = replace_dimensions(total, [self.small, self.micro], self.batch)
        elif y.dtype.is_float:
            total = total if self.scale == 1 else total * self.scale
        return cast(total, y.dtype)


def _checked_outputs(returned: object, body: Graph) -> Tensors:
    what = "serialize_training_step"
    if not isinstance(returned, Mapping) or "loss" not in returned:
        raise GraphError(f"{at(what)}: model_fn must return a dict with a tensor 'loss' in it, got {returned!r:.80}")
    outputs = {name: body.adopt(tensor(y, f"{what} output {name!r}")) for name, y in returned.items()}
    loss = outputs["loss"]
    if len(loss.shape) or not loss.dtype.is_float:
        raise GraphError(f"{at(what)}: the loss must be a float without dims, got {loss}; reduce it over the batch")
    return outputs
