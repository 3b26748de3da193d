"""Blocks of Transformer layers: attention and feed-forward, with norms and residual sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from layouts import Dimension
from meshlib import layers
from meshlib.core.graph import Tensor, scope
from meshlib.layers.attention import Cache
from meshlib.layers.experts import Mixture
from meshlib.models.caches import Caches
from meshlib.models.config import Heads, LayerKind, TransformerConfig
from meshlib.ops.pointwise.arithmetic import add, multiply, not_equal
from meshlib.ops.pointwise.random import dropout


def head_dims(heads: Heads) -> tuple[list[Dimension], list[Dimension]]:
    """`heads` and `memory_heads` of `mtf.layers.multihead_attention`; a single key head has no dim."""
    if heads.memory == 1 < heads.query:
        return [Dimension("heads", heads.query)], []
    shared = [Dimension("heads", heads.memory)]
    return [*([Dimension("group", heads.group)] if heads.group > 1 else []), *shared], shared


@dataclass(frozen=True)
class StackBlocks:
    """Blocks shared by the layers of one stack.

    Attributes:
      bias: added to the scores of self-attention (relative positions).
      memory: the sequence that cross-attention attends to; memory_mask: its visible tokens.
      positions: positions of the tokens, in place of 0, 1, ...; mask: keys of their own sequence that they see.
      segments: segment id of each token of a packed sequence, 0 for padding; memory_segments: those of the memory.
      nonpadding: bool mask of tokens, if there are no segments: padding is routed to no expert.
      caches: caches to which keys and values are written, and from which decoding reads.
      source_length: slots of the cache of the encoder's sequence.
    """

    config: TransformerConfig
    causal: bool
    training: bool
    bias: Tensor | None = None
    memory: Tensor | None = None
    memory_mask: Tensor | None = None
    positions: Tensor | None = None
    mask: Tensor | None = None
    segments: Tensor | None = None
    memory_segments: Tensor | None = None
    nonpadding: Tensor | None = None
    caches: Caches | None = None
    source_length: int | None = None

    def layer(self, x: Tensor, kind: LayerKind) -> tuple[Tensor, Mixture | None]:
        """One layer, [batch, length, d_model] to the same type, and the `Mixture` of its experts, if any."""
        mixtures: list[Mixture] = []

        def feed_forward(h: Tensor) -> Tensor:
            if not kind.experts:
                return self._feed_forward(h)
            mixtures.append(self._experts(h))
            return mixtures[0].values

        if self.config.parallel:
            h = self.norm(x, "norm")
            x = add(x, self.dropped(self._attention(h, kind.window) + feed_forward(h)), name="residual")
        else:
            x = self._residual(x, "attention", lambda h: self._attention(h, kind.window))
            if self.memory is not None or self.source_length is not None:
                x = self._residual(x, "cross_attention", self._cross_attention)
            x = self._residual(x, "feed_forward", feed_forward)
        if self.config.layer_scale:
            scale = self.config.numerics.variable("layer_scale", [], 1.0, x.dtype)
            x = multiply(x, scale, x.shape)
        return x, mixtures[0] if mixtures else None

    def norm(self, x: Tensor, name: str) -> Tensor:
        """A norm over the features."""
        c = self.config
        d_model = x.shape.dim("d_model")
        if c.norm == "rms":
            return layers.rms_norm(x, d_model, c.norm_epsilon, c.numerics, name)
        return layers.layer_norm(x, d_model, c.norm_epsilon, c.bias, c.numerics, name)

    # ------------------------------------------------------------ blocks

    def _residual(self, x: Tensor, name: str, block: Callable[[Tensor], Tensor]) -> Tensor:
        """x + block(norm(x)), norm(x + block(x)), or x + norm(block(x))."""
        if self.config.norm_position == "post":
            return self.norm(add(x, self.dropped(block(x)), name="residual"), f"{name}_norm")
        if self.config.norm_position == "output":
            return add(x, self.dropped(self.norm(block(x), f"{name}_norm")), name="residual")
        y = block(self.norm(x, f"{name}_norm"))
        if self.config.post_norms and (self.config.attention_post_norm or name == "feed_forward"):
            y = self.norm(y, f"{name}_post_norm")
        return add(x, self.dropped(y), name="residual")

    def dropped(self, x: Tensor) -> Tensor:
        """`x` with dropout while training."""
        c = self.config
        return dropout(x, self.training, rate=c.dropout) if c.dropout else x

    def _attention(self, x: Tensor, window: int | None) -> Tensor:
        c = self.config
        if c.latent is not None:
            return layers.latent_attention(
                x, c.latent.dims(c.heads), self.causal, c.rope_theta, c.attention_scale, c.norm_epsilon, c.numerics,
                "attention", self.positions, None if self.caches is None else self.caches.of(None), self.segments,
            )  # fmt: skip
        base = scaling = None
        if c.position == "rotary":
            local = window is not None and c.local_rope_theta is not None
            base = c.local_rope_theta if local else c.rope_theta
            scaling = None if local else c.rope_scaling
        scores = layers.Scores(
            self.causal, window, c.attention_scale, self.bias, base, c.qk_norm, self._kernel(), self.positions,
            None if self.segments is None else (self.segments, self.segments), scaling, c.qk_norm_over_heads,
        )  # fmt: skip
        cache = None if self.caches is None else self.caches.of(window)
        return self._attend(x, None, self.mask, window, scores, cache, "attention")

    def _cross_attention(self, x: Tensor) -> Tensor:
        c, name = self.config, "cross_attention"
        pair = None
        if self.segments is not None and self.memory_segments is not None:
            pair = self.segments, self.memory_segments
        scores = layers.Scores(
            scale=c.attention_scale, qk_norm=c.qk_norm, kernel=self._kernel(), segments=pair,
            qk_norm_over_heads=c.qk_norm_over_heads,
        )  # fmt: skip
        memory: Tensor | layers.Held | None = self.memory
        cache = None if self.caches is None else self.caches.of_sources
        if self.source_length is not None:
            assert self.caches is not None
            heads = c.attention_of(None)
            dims = [x.shape[0], *head_dims(heads)[1], Dimension("head_dim", heads.dim)]
            with scope(name):
                memory = self.caches.held_sources(x, dims, self.source_length)
        return self._attend(x, memory, self.memory_mask, None, scores, cache, name)

    def _kernel(self) -> str:
        """The attention kernel: fused for decoding, where no gradient needs the scores."""
        decoding = self.caches is not None and self.caches.decoding
        return "flash" if decoding else self.config.attention

    def _attend(
        self,
        x: Tensor,
        memory: Tensor | layers.Held | None,
        mask: Tensor | None,
        window: int | None,
        scores: layers.Scores,
        cache: Cache | None,
        name: str,
    ) -> Tensor:
        c = self.config
        heads = c.attention_of(window)
        dims, memory_dims = head_dims(heads)
        return layers.multihead_attention(
            x,
            memory,
            mask,
            Dimension("head_dim", heads.dim),
            dims,
            dropout=c.dropout if self.training and c.attention == "materialised" else 0.0,
            memory_heads=memory_dims,
            share_kv=heads.shared,
            scores=scores,
            use_bias=c.has_attention_bias,
            use_out_bias=c.has_attention_out_bias,
            numerics=c.numerics,
            name=name,
            cache=cache,
        )

    def _experts(self, x: Tensor) -> Mixture:
        c, e = self.config, self.config.experts
        assert e is not None
        shared = Dimension("d_ff", e.shared * e.d_ff) if e.shared else None
        return layers.moe(
            x,
            Dimension("experts", e.count),
            Dimension("expert_d_ff", e.d_ff),
            e.routing,
            c.activation,
            c.gated,
            c.bias,
            shared,
            training=self.training,
            nonpadding=self.real,
            form=e.form,
            numerics=c.numerics,
        )

    @property
    def real(self) -> Tensor | None:
        """Bool mask of non-padding tokens; None if there is no padding."""
        return not_equal(self.segments, 0) if self.segments is not None else self.nonpadding

    def _feed_forward(self, x: Tensor) -> Tensor:
        c = self.config
        return layers.feed_forward(x, Dimension("d_ff", c.d_ff), c.activation, c.gated, c.bias, numerics=c.numerics)
