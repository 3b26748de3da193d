"""A Transformer from its config: decoder-only, encoder-only or encoder-decoder, with scanned or unrolled layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from math import sqrt
from types import MappingProxyType
from typing import Any

from layouts import Dimension, Shape
from meshlib import layers
from meshlib.core import initializers
from meshlib.core.arguments import at, flag, whole
from meshlib.core.dtypes import FLOAT32
from meshlib.core.errors import GraphError
from meshlib.core.graph import Tensor, absolute_scope, current_scope, scope, scoped_name
from meshlib.core.initializers import Initializer
from meshlib.core.wording import setting
from meshlib.layers.projection import ACTIVATIONS
from meshlib.layers.router import real_share
from meshlib.models.blocks import StackBlocks, head_dims
from meshlib.models.caches import SLOTS, Caches
from meshlib.models.config import LayerKind, TransformerConfig
from meshlib.models.stages import MICROBATCH, STAGE, Pipeline
from meshlib.ops.control.custom_gradients import recompute_grad
from meshlib.ops.control.loops import scan
from meshlib.ops.control.remat import Policy
from meshlib.ops.control.sources import constant_shaped, input
from meshlib.ops.movement.indexing import gather
from meshlib.ops.movement.shape import rename_dimension, reshape, transpose
from meshlib.ops.pointwise.arithmetic import add_n, divide, maximum, multiply, not_equal, tanh
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.reductions import reduce_mean, reduce_sum

BLOCK = "loss_block"  # the dim of parts of a sequence whose losses are computed one after the other


@dataclass(frozen=True)
class Transformer:
    """A model in a graph.

    `inputs` by name, without the enclosing scope: "tokens" [batch, length] and "targets" with the same dims (or [batch,
    predictions]), int32; "sources" [batch, encoder length] for an encoder-decoder; "segments" [batch, length] and
    "positions" [batch, predictions] if the model has them. `logits` [batch, length, vocab] (or predictions in place of
    length); `loss` without dims: the mean over all targets, plus `auxiliary_loss` while training.

    For mixtures of experts: `auxiliary_loss`, the sum over layers of mean losses; `dropped`, the number of dropped
    choices in all layers; `loads` by scope of the router, the number of tokens that chose each expert.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     model = mtf.models.transformer(mtf.models.preset("gpt2").reduced(), batch=2, length=8)
      >>> print(model.logits.shape, sorted(model.inputs))
      [batch:2, length:8, vocab:64] ['targets', 'tokens']
    """

    config: TransformerConfig
    inputs: Mapping[str, Tensor]
    logits: Tensor
    loss: Tensor
    auxiliary_loss: Tensor | None = None
    dropped: Tensor | None = None
    loads: Mapping[str, Tensor] = field(default_factory=dict)


def transformer(
    config: TransformerConfig,
    batch: int,
    length: int,
    remat: Policy = "full",
    scan: bool = True,
    encoder_length: int | None = None,
    predictions: int | None = None,
    training: bool = False,
    pipeline: Pipeline | None = None,
    packed: bool = False,
    loss_blocks: int = 1,
) -> Transformer:
    """Build a model; call it inside a graph, in a separate `mtf.scope` if there are several.

    Dims, for layout rules, are batch, length, d_model, heads (of keys), group (query heads per key head), head_dim,
    d_ff, vocab and layers. `mtf.models.layout` has rules.

    Args:
      config: the model.
      batch, length: number of sequences, and tokens per sequence, all of which count unless `packed`.
      remat: rematerialisation policy per layer: "full" recomputes everything, "none" nothing, "matmuls" keeps the
        products with weights; or an `mtf.Remat` with names of q, k, v, context, out, wi, wi_gate, wo, residual.
      scan: one loop over stacked layers, whose variables have `layers` as their first dim, or unrolled layers under
        `layer_0`, `layer_1`, ... With a pattern of windows, one trip of the loop covers the whole pattern.
      encoder_length: tokens of the encoder's sequence; by default `length`.
      predictions: number of tokens per sequence that an encoder predicts, at the input "positions"; by default all.
      training: whether dropout is applied.
      pipeline: an `mtf.models.Pipeline`, which divides the layers into stages and the batch into microbatches: `logits`
        are then [microbatch, batch, length, vocab].
      packed: whether sequences have several texts and padding. Two more int32 inputs with the dims of "tokens":
        "segment_ids", equal for the tokens of one text, 0 for padding; and "segment_positions", 0, 1, ... within each.
        A token sees those of its own text, and `loss` is the mean over targets without padding. For an encoder-decoder
        also "source_segment_ids" and "source_positions": a text attends to the source with its id.
      loss_blocks: number of parts of each sequence for which logits and loss are computed one after the other, with the
        memory of one; recomputed for the gradient. `logits` are then those of the first part, with a shorter `length`.
    Raises: GraphError for arguments that do not apply to the config, and sequences longer than its positions.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph() as graph:
      ...     model = mtf.models.transformer(mtf.models.preset("llama2-7b"), batch=8, length=4096)
      >>> model.logits.shape
      Shape('batch:8;length:4096;vocab:32000')
      >>> print(graph.variables["layers/attention/q/kernel"].output.shape)
      [layers:32, d_model:4096, heads:32, head_dim:128]
    """
    sizes = {"batch": batch, "length": length, "encoder_length": encoder_length, "predictions": predictions}
    _check(config, sizes, {"scan": scan, "training": training, "packed": packed})
    if pipeline is not None and not isinstance(pipeline, Pipeline):
        raise GraphError(f"{at('transformer')}: pipeline must be an mtf.models.Pipeline, got {pipeline!r:.80}")
    builder = Builder(config, Dimension("batch", batch), remat, scan, training, pipeline, packed, loss_blocks)
    builder.check_blocks(length if predictions is None else predictions)
    return builder.build(length, encoder_length or length, predictions)


def _check(config: object, sizes: Mapping[str, int | None], flags: Mapping[str, bool]) -> None:
    what = "transformer"
    if not isinstance(config, TransformerConfig):
        raise GraphError(f"{at(what)}: expected a TransformerConfig, got {type(config).__name__} {config!r:.80}")
    for name, value in flags.items():
        flag(value, what, name)
    for name, size in sizes.items():
        if size is not None:
            whole(size, what, name, low=1)
    if sizes["encoder_length"] is not None and not config.encoder_decoder:
        raise GraphError(
            f"{at(what)}: encoder_length is for an encoder-decoder; {config.name} is of kind {config.kind!r}"
        )
    if sizes["predictions"] is not None and config.kind != "encoder":
        raise GraphError(f"{at(what)}: predictions is for an encoder; {config.name} is of kind {config.kind!r}")
    length = sizes["length"]
    check_positions(config, what, "the length", length or 0)


@dataclass(frozen=True)
class _ExpertStatistics:
    """Losses and loads of the experts of a layer, see `mtf.layers.Mixture`."""

    loss: Tensor
    dropped: Tensor
    load: Tensor


def check_positions(config: TransformerConfig, what: str, name: str, size: int) -> None:
    """Raise GraphError if a length exceeds the learned positions of a model."""
    if config.position == "learned" and config.max_length and size > config.max_length:
        raise GraphError(
            f"{at(what)}: {config.name} has {config.max_length} positions, but {name} is {size}; shorten it, or use "
            f"{setting('max_length', size)}"
        )


def _groups(loss: Tensor) -> list[Dimension]:
    """The dims of groups of tokens, without those of stacked layers and stages."""
    return [d for d in loss.shape if d.name not in ("layers", "dense_layers", STAGE)]


def _apply_layer(blocks: StackBlocks, kind: LayerKind, x: Tensor) -> tuple[Tensor, ...]:
    """A layer's result, followed by losses and loads of its experts, if any."""
    y, mixture = blocks.layer(x, kind)
    return (y,) if mixture is None else (y, mixture.loss, mixture.dropped, mixture.load)


def _weighted_by_tokens(loss: Tensor, blocks: StackBlocks) -> Tensor:
    """A loss of experts times the share of non-padding tokens, per stage."""
    if blocks.real is None:
        return loss
    share = real_share(blocks.real, loss.dtype, [d for d in blocks.real.shape if d.name == STAGE])
    return multiply(loss, share, loss.shape)


@dataclass
class Builder:
    """Builder of the parts of a model."""

    config: TransformerConfig
    batch: Dimension
    remat: Policy
    scan: bool
    training: bool
    pipeline: Pipeline | None = None
    packed: bool = False
    loss_blocks: int = 1
    given: Mapping[str, Tensor] = field(default_factory=dict)  # replacements for inputs of these names
    inputs: dict[str, Tensor] = field(default_factory=dict)
    expert_stats: dict[str, _ExpertStatistics] = field(default_factory=dict)  # by scope of the router
    scope_around: tuple[str, ...] = field(default_factory=current_scope)

    def build(self, length: int, encoder_length: int, predictions: int | None) -> Transformer:
        """Inputs, stacks, head and loss."""
        c = self.config
        if self.pipeline is not None:
            self.pipeline.check(c, self.batch.size)  # before any operation is added
        if c.encoder_decoder:
            with scope("encoder"):
                sources = self._input("sources", Dimension("length", encoder_length))
                of_source = self._packing("source_segment_ids", "source_positions", sources)
                memory = self.stack(sources, c.encoder_layers, causal=False, **of_source)
            with scope("decoder"):
                tokens = self._input("tokens", Dimension("length", length))
                packing = self._packing("segment_ids", "segment_positions", tokens)
                if self.packed:
                    packing["memory_segments"] = of_source["segments"]
                x = self.stack(tokens, c.layers, causal=True, memory=memory, **packing)
        else:
            tokens = self._input("tokens", Dimension("length", length))
            packing = self._packing("segment_ids", "segment_positions", tokens)
            x = self.stack(tokens, c.layers, causal=c.kind == "decoder", **packing)
        targets = tokens.shape.dim("length")
        if predictions is not None:
            targets = Dimension("predictions", predictions)
            x = gather(x, self._input("positions", targets), x.shape.dim("length"))
        count = packing.get("segments") if predictions is None else None
        wanted = self._input("targets", targets)
        if self.loss_blocks > 1:
            logits, loss = self._loss_in_blocks(x, wanted)
        else:
            logits = self.logits(x)
            loss = self._loss(logits, wanted, count)
        if not self.expert_stats:
            return Transformer(c, MappingProxyType(self.inputs), logits, loss)
        with scope("experts"):
            losses = [reduce_sum(stats.loss, output_shape=_groups(stats.loss)) for stats in self.expert_stats.values()]
            auxiliary = add_n([reduce_mean(one) for one in losses])
            dropped = add_n([reduce_sum(stats.dropped) for stats in self.expert_stats.values()])
            total = loss + auxiliary if self.training else loss
        loads = {name: stats.load for name, stats in self.expert_stats.items()}
        return Transformer(c, MappingProxyType(self.inputs), logits, total, auxiliary, dropped, MappingProxyType(loads))

    def _packing(self, segments: str, positions: str, tokens: Tensor) -> dict[str, Tensor]:
        """Segment ids and positions of packed sequences."""
        if not self.packed:
            return {}
        length = tokens.shape[-1]
        return {"segments": self._input(segments, length), "positions": self._input(positions, length)}

    @cached_property
    def table(self) -> Tensor:
        """The embedding table, which both stacks share."""
        vocab = Dimension("vocab", self.config.vocab)
        with absolute_scope("/".join(self.scope_around)):
            return layers.embedding_weights(vocab, self._d_model, self.config.numerics, self._table_initializer())

    @property
    def _d_model(self) -> Dimension:
        return Dimension("d_model", self.config.d_model)

    def _table_initializer(self) -> Initializer:
        """Initializer of the table: for tied tables the scale of a product, for the logits."""
        tied = self.config.tied and not self.config.scale_logits
        return initializers.random_normal(0.0, self.config.d_model**-0.5 if tied else 1.0)

    def _input(self, name: str, dim: Dimension) -> Tensor:
        with absolute_scope("/".join(self.scope_around)):  # outside the scopes of encoder and decoder
            given = self.given.get(name)
            input_tensor = self.inputs[name] = input(name, [self.batch, dim], "int32") if given is None else given
        return input_tensor if self.pipeline is None else self.pipeline.cut(input_tensor)

    def stack(self, tokens: Tensor, count: int, causal: bool, memory: Tensor | None = None, **more: Any) -> Tensor:
        """Embeddings followed by `count` layers; `more` has further fields of `StackBlocks`."""
        bias = self.position_bias(tokens.shape[-1], causal, **more) if self.config.position == "relative" else None
        blocks = StackBlocks(self.config, causal, self.training, bias, memory, **more)
        return self._layers_of(blocks, self.embedded(tokens, blocks), count)

    def position_bias(
        self,
        length: Dimension,
        causal: bool,
        caches: Caches | None = None,
        positions: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """The bias of relative positions for attention scores."""
        c = self.config
        memory, behind = Dimension("memory_length", length.size), None
        if positions is not None:
            behind = rename_dimension(positions, length.name, memory.name)
        if caches is not None and caches.decoding:
            memory, behind = Dimension(SLOTS, caches.length), None
        return layers.relative_position_bias(
            length,
            memory,
            head_dims(c.attention_of(None))[0],
            c.relative_buckets,
            c.relative_max_distance,
            causal,
            replace(c.numerics, activation_dtype=None),  # the scores it is added to are wider than activations
            positions=positions,
            memory_positions=behind,
        )

    def _layers_of(self, blocks: StackBlocks, x: Tensor, count: int) -> Tensor:
        """`count` layers, and the norm after them."""
        c = self.config
        front = min(c.dense_front, count)
        x = self.run_of_layers(blocks, x, range(front), "dense_layers", trips_from=2)
        if self.pipeline is None:
            x = self.run_of_layers(blocks, x, range(front, count), "layers", trips_from=1)
        else:
            x = self._pipelined(self.pipeline, blocks, x, range(front, count))
        return blocks.norm(x, "final_norm") if c.norm_position != "post" else x

    def _pipelined(self, pipeline: Pipeline, blocks: StackBlocks, x: Tensor, numbers: range) -> Tensor:
        """These layers as pipeline stages; losses and loads of experts are summed over microbatches, losses of packed
        sequences weighted by their share of non-padding tokens.
        """
        run = numbers[: pipeline.layers_of(len(numbers))]
        before, names = self.expert_stats, list[str]()
        # Each stage takes per-sequence tensors of its own microbatch.
        given = {f.name: getattr(blocks, f.name) for f in fields(blocks)}
        beside = {n: t for n, t in given.items() if isinstance(t, Tensor) and MICROBATCH in t.shape}

        def stage(h: Tensor, *own: Tensor) -> Tensor | tuple[Tensor, list[Tensor]]:
            self.expert_stats = {}
            changes: dict[str, Any] = dict(zip(beside, own, strict=True))
            of_stage = replace(blocks, **changes)
            y = self.run_of_layers(of_stage, h, run, "layers", trips_from=1)
            names.extend(self.expert_stats)
            sums = [
                t for stats in self.expert_stats.values()
                for t in pipeline.sums(_weighted_by_tokens(stats.loss, of_stage), stats.dropped, stats.load)
            ]  # fmt: skip
            return (y, sums) if sums else y

        x, sums = pipeline.run(stage, x, list(beside.values()))
        self.expert_stats = before
        stacked_values = iter(sums)
        for name in names:
            loss, dropped, load = next(stacked_values), next(stacked_values), next(stacked_values)
            loss = loss * (1 / pipeline.microbatches)
            if blocks.real is not None:
                loss = divide(loss, real_share(blocks.real, loss.dtype))
            self.expert_stats[name] = _ExpertStatistics(loss, cast(dropped, "int32"), cast(load, "int32"))
        return x

    def run_of_layers(self, blocks: StackBlocks, x: Tensor, numbers: range, name: str, trips_from: int) -> Tensor:
        """These layers: whole patterns of them as trips of a loop, the rest unrolled."""
        c = self.config
        trips = len(numbers) // c.period if self.scan else 0
        trips = trips if trips >= trips_from else 0
        if trips:
            x = self._scanned(blocks, x, [c.kind_of(n) for n in numbers[: c.period]], Dimension(name, trips))
        for n in numbers[trips * c.period :]:
            with scope(f"layer_{n}"):
                layer = partial(_apply_layer, blocks, c.kind_of(n))
                x, *stats = recompute_grad(layer, [x], self.remat) if blocks.caches is None else layer(x)
                if stats:
                    self._record_experts(_ExpertStatistics(*stats))
            if blocks.caches is not None:
                blocks.caches.commit(blocks.caches.take())
        return x

    def _scanned(self, blocks: StackBlocks, x: Tensor, kinds: Sequence[LayerKind], dim: Dimension) -> Tensor:
        """Layers as trips of a loop, with one layer of each of these kinds per trip."""
        scopes = [f"layer_{n}" if len(kinds) > 1 else "" for n in range(len(kinds))]
        caches: list[Tensor] = []  # variables written in a trip

        def trip(carries: tuple[Tensor, ...], slices: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
            (h,), stats = carries, []
            for one, kind in zip(scopes, kinds, strict=True):
                with scope(one) if one else nullcontext():
                    h, *more = _apply_layer(blocks, kind, h)
                    stats += more
            written = [] if blocks.caches is None else blocks.caches.take()
            caches.extend(held for held, _ in written)
            return [h], [*stats, *(value for _, value in written)]

        with scope(dim.name):
            (x,), stacks = scan(trip, [x], dim=dim, remat=self.remat, stack_variables=True)
            stacked_values = iter(stacks)
            for one, kind in zip(scopes, kinds, strict=True):
                if kind.experts:
                    with scope(one) if one else nullcontext():
                        self._record_experts(
                            _ExpertStatistics(*(next(stacked_values) for _ in fields(_ExpertStatistics)))
                        )
        if blocks.caches is not None:
            blocks.caches.commit(list(zip(caches, stacked_values, strict=True)))
        return x

    def _record_experts(self, stats: _ExpertStatistics) -> None:
        """Record losses and loads of the experts of a layer, or of stacked ones, under their scope."""
        self.expert_stats[scoped_name("moe/router")] = stats

    def embedded(self, tokens: Tensor, blocks: StackBlocks) -> Tensor:
        """The first layer's input for tokens [..., length]: [..., length, d_model]."""
        c, table = self.config, self.table
        length = tokens.shape[-1]
        x = layers.embedding(tokens, table.shape.dim("vocab"), self._d_model, weights=table)
        if c.scale_embedding:
            x = x * sqrt(c.d_model)
        if c.position == "learned":
            x = x + layers.learned_positions(
                length, self._d_model, c.max_length, c.numerics, positions=blocks.positions
            )
        if c.position == "sinusoidal":
            x = x + layers.sinusoidal_positions(length, self._d_model, x.dtype, positions=blocks.positions)
        if c.segments:
            kinds = Dimension("segments", c.segments)
            segments = self._input("segments", length)
            x = x + layers.embedding(segments, kinds, self._d_model, c.numerics, name="segment_embedding")
        if c.embedding_norm:
            x = blocks.norm(x, "embedding_norm")
        return blocks.dropped(x)

    def logits(self, x: Tensor) -> Tensor:
        """Logits of the last layer's result: [..., d_model] to [..., vocab]."""
        c, table = self.config, self.table
        vocab = table.shape.dim("vocab")
        transformed = c.head == "transform"
        with scope("head"):
            if transformed:
                x = self._bert_transform(x)
            if c.scale_logits:
                x = x * c.d_model**-0.5
            weights = table if c.tied else self._head_kernel
            logits = c.numerics.unquantised.product(x, weights, Shape([*x.shape[:-1], vocab]), "logits")
            if transformed:
                logits = logits + c.numerics.variable("bias", [vocab], 0.0)
            return tanh(logits * (1 / c.logit_cap)) * c.logit_cap if c.logit_cap else logits

    @cached_property
    def _head_kernel(self) -> Tensor:
        """The weights of the logits unless tied."""
        vocab = self.table.shape.dim("vocab")
        return self.config.numerics.variable(
            "kernel", [self._d_model, vocab], initializers.scaled_normal([self._d_model])
        )

    def _bert_transform(self, x: Tensor) -> Tensor:
        """BERT's dense layer before the logits."""
        c = self.config
        renamed = Dimension("d_model_out", c.d_model)
        x = layers.dense(x, renamed, [self._d_model], numerics=c.numerics.unquantised, name="transform")
        x = rename_dimension(ACTIVATIONS[c.activation](x), renamed.name, "d_model")
        return StackBlocks(c, False, self.training).norm(x, "norm")

    def check_blocks(self, length: int) -> None:
        """Raise GraphError unless the loss can be computed in this many blocks."""
        blocks = whole(self.loss_blocks, "transformer", "loss_blocks", 1)
        if blocks > 1 and (self.packed or self.pipeline is not None):
            raise GraphError(f"{at('transformer')}: loss_blocks is for whole batches without packing; got {blocks}")
        if length % blocks:
            raise GraphError(
                f"{at('transformer')}: loss_blocks must divide the length: {length} % {blocks} = {length % blocks}"
            )

    def _loss_in_blocks(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the first block of each sequence, and the mean loss; blocks are the minor part of the length."""
        batch, length = targets.shape
        block = Dimension(BLOCK, self.loss_blocks)
        small = Dimension(length.name, length.size // block.size)
        rest = [d for d in x.shape if d not in (batch, length)]
        xs = transpose(reshape(x, [batch, small, block, *rest]), [block, batch, small, *rest])
        wanted = transpose(reshape(targets, [batch, small, block]), [block, batch, small])
        logits = self.logits(gather(xs, 0, block))  # creates its weights outside the loop that shares them

        def body(carries: tuple[Tensor, ...], slices: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
            return [carries[0] + self._loss(self.logits(slices[0]), slices[1], None)], []

        zero = constant_shaped(0.0, Shape([]), cast(x, FLOAT32))
        (total,), _ = scan(body, [zero], [xs, wanted], block, name="loss_blocks", remat="full")
        return logits, total * (1 / block.size)

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss per target."""
        c = self.config
        smoothing = c.label_smoothing if self.training else 0.0
        vocab = logits.shape.dim("vocab")
        return layers.softmax_cross_entropy_with_logits(logits, targets, vocab, c.z_loss, smoothing)

    def _loss(self, logits: Tensor, targets: Tensor, segments: Tensor | None) -> Tensor:
        with scope("loss"):
            losses = self.losses(logits, targets)
            if segments is None:
                return reduce_mean(losses, name="mean")
            counted = cast(not_equal(segments, 0), losses.dtype)
            return divide(reduce_sum(losses * counted), maximum(reduce_sum(counted), 1.0), name="mean")
