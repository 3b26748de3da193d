"""`TransformerConfig`: dimensions, parts and numerics of a Transformer in one frozen record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import groupby
from math import lcm
from typing import Any

from meshlib.core.arguments import at, choice, flag, number, whole
from meshlib.core.errors import GraphError
from meshlib.core.shown import Shown
from meshlib.core.text import counted
from meshlib.layers.numerics import MIXED, Numerics, as_numerics
from meshlib.layers.positions import RotaryScaling, check_scaling
from meshlib.layers.routing import Routing
from meshlib.models.config_parts import Config, Experts, LatentAttention

KINDS = ("decoder", "encoder", "encoder-decoder")
ACTIVATIONS = ("gelu", "gelu_exact", "relu", "silu")
_CHOICES: dict[str, tuple[str, ...]] = {
    "kind": KINDS,
    "activation": ACTIVATIONS,
    "norm": ("layer", "rms"),
    "norm_position": ("pre", "post", "output"),
    "position": ("learned", "rotary", "sinusoidal", "relative", "none"),
    "attention": ("flash", "materialised"),
    "head": ("linear", "transform"),
}
_KINDS: dict[str, Callable[[object, str, str], object]] = {"int": whole, "float": number, "bool": flag}
MOST_LAYERS = 100_000  # parameters are counted layer by layer
_COUNTS = ("encoder_layers", "segments")  # may be 0, unlike other integers


@dataclass(frozen=True, kw_only=True, repr=False)
class TransformerConfig(Shown, Config):
    """Configuration of a Transformer; `mtf.models.preset(name)` has published ones.

    Dimensions:
      layers: number of layers of the decoder, or of an encoder without decoder.
      encoder_layers: number of layers of the encoder in an encoder-decoder.
      d_model, d_ff, vocab: features, hidden features of the feed-forward block, size of the vocabulary.
      heads, kv_heads, head_dim: query heads, key and value heads (by default as many), features of a head.
      max_length: number of positions with learned embeddings.
      segments: number of segment types with an embedding (two in BERT).
    Blocks:
      kind: "decoder" (causal), "encoder" (bidirectional, predicts masked tokens) or "encoder-decoder".
      gated, activation: the feed-forward block computes (act(x Wg) * (x Wi)) Wo if gated, else act(x Wi) Wo.
      norm: "layer" or "rms".
      norm_position: "pre": before each block; "post": after the residual sum; "output": on a block's output before it
        is added (OLMo 2 and 3).
      norm_epsilon: added to the variance of a norm.
      bias: whether products and layer norms have biases.
      attention_bias: the same for attention, if different; attention_out_bias for its last product (Qwen 2).
      parallel: whether attention and feed-forward share a norm, and their results are added at once (PaLM).
      post_norms: whether each block's result has a norm before the residual sum (Gemma 3); with
        attention_post_norm=False only that of the feed-forward block.
      qk_norm: whether queries and keys have an RMS norm per head; with qk_norm_over_heads over all heads (OLMo).
      embedding_norm: whether a norm follows the embeddings.
      layer_scale: whether each layer multiplies its result by a learned number.
    Attention:
      windows: attention window of each layer (None: global), a pattern that repeats over the layers.
      attention: "flash" keeps the scores on chip (the gradient of relative positions recomputes them in memory),
        "materialised" writes them to memory.
      attention_scale: factor of the scores; by default head_dim ** -0.5.
      global_head_dim, global_kv_heads: sizes in global layers, if other layers have windows.
      share_kv: whether the values of global layers are their keys before norm and rotation (Gemma 4).
      latent: keys and values from a low-rank vector per token, see `LatentAttention` (DeepSeek).
    Experts:
      experts: mixtures of experts in place of the feed-forward blocks of some layers, see `Experts`.
    Positions:
      position: "learned", "sinusoidal", "rotary", "relative" or "none".
      rope_theta, rope_scaling: base and scaling of rotary positions, see `mtf.layers.RotaryScaling`;
        local_rope_theta: the base in layers with a window, which are not scaled.
      relative_buckets, relative_max_distance: buckets of T5's relative positions, and the distance that they reach.
    Head:
      tied: whether the logits use the embedding table.
      head: "linear", or "transform", which adds a dense layer, activation, norm and bias (BERT).
      scale_embedding, scale_logits: whether embeddings are multiplied by d_model ** 0.5, logits by d_model ** -0.5.
      logit_cap: logits are cap * tanh(x / cap), unless 0.
    Training:
      dropout: rate of dropout, applied to attention weights only if they are materialised.
      label_smoothing, z_loss: of the loss.
    Numerics:
      numerics: by default float32 variables and bfloat16 activations; int8 or fp8 products leave out the head.

    Raises: GraphError with all faults at once.
    Example:
      >>> import meshlib as mtf
      >>> tiny = mtf.models.TransformerConfig(
      ...     name="tiny", layers=2, d_model=64, heads=4, head_dim=16, d_ff=256, vocab=512, position="rotary"
      ... )
      >>> tiny.parameters
      131392
    """

    name: str
    layers: int
    d_model: int
    heads: int
    head_dim: int
    d_ff: int
    vocab: int
    kind: str = "decoder"
    encoder_layers: int = 0
    kv_heads: int | None = None
    max_length: int | None = None
    segments: int = 0
    gated: bool = False
    activation: str = "gelu"
    norm: str = "layer"
    norm_position: str = "pre"
    norm_epsilon: float = 1e-6
    bias: bool = False
    attention_bias: bool | None = None
    attention_out_bias: bool | None = None
    parallel: bool = False
    post_norms: bool = False
    attention_post_norm: bool = True
    qk_norm: bool = False
    qk_norm_over_heads: bool = False
    layer_scale: bool = False
    embedding_norm: bool = False
    windows: tuple[int | None, ...] = (None,)
    attention: str = "flash"
    attention_scale: float | None = None
    global_head_dim: int | None = None
    global_kv_heads: int | None = None
    share_kv: bool = False
    latent: LatentAttention | None = None
    experts: Experts | None = None
    position: str = "learned"
    rope_theta: float = 10_000.0
    local_rope_theta: float | None = None
    rope_scaling: RotaryScaling | None = None
    relative_buckets: int = 32
    relative_max_distance: int = 128
    tied: bool = True
    head: str = "linear"
    scale_embedding: bool = False
    scale_logits: bool = False
    logit_cap: float = 0.0
    dropout: float = 0.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    numerics: Numerics = MIXED

    def __post_init__(self) -> None:
        self._check_types()
        faults = [*self._size_faults(), *self._faults()]
        if faults:
            raise GraphError.listing(f"{at('TransformerConfig')} {self.name!r}", faults)

    # ------------------------------------------------------------ derived

    @property
    def memory_heads(self) -> int:
        """The number of key and value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def encoder_decoder(self) -> bool:
        """True if there are two stacks."""
        return self.kind == "encoder-decoder"

    @property
    def has_attention_bias(self) -> bool:
        """True if the projections of attention have biases."""
        return self.bias if self.attention_bias is None else self.attention_bias

    @property
    def has_attention_out_bias(self) -> bool:
        """True if the output projection of attention has a bias."""
        return self.has_attention_bias if self.attention_out_bias is None else self.attention_out_bias

    def attention_of(self, window: int | None) -> Heads:
        """Heads and sizes of a layer with this window."""
        if window is None and set(self.windows) != {None}:
            return Heads(
                self.heads,
                self.memory_heads if self.global_kv_heads is None else self.global_kv_heads,
                self.head_dim if self.global_head_dim is None else self.global_head_dim,
                self.share_kv,
            )
        return Heads(self.heads, self.memory_heads, self.head_dim, False)

    @property
    def pattern(self) -> tuple[int | None, ...]:
        """The window of each layer of the decoder, or of the only stack."""
        return tuple(self.windows[n % len(self.windows)] for n in range(self.layers))

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind (window, experts) of each layer of the decoder, or of the only stack."""
        return tuple(self.kind_of(n) for n in range(self.layers))

    def kind_of(self, number: int) -> LayerKind:
        """The kind of layer `number` of either stack."""
        experts = self.experts is not None and self.experts.in_layer(number)
        return LayerKind(self.windows[number % len(self.windows)], experts)

    @property
    def parameter_counts(self) -> dict[str, int]:
        """Trained parameters by part: see `meshlib.models.counts`."""
        from meshlib.models.counts import parameter_counts

        return parameter_counts(self)

    def replace(self, **changes: Any) -> TransformerConfig:
        """A copy with other values of some fields, of `numerics`, or of the `Routing` of its experts.

        Raises: GraphError for a field of `Routing` if the model has no experts.
        Example:
          >>> import meshlib as mtf
          >>> mtf.models.preset("mixtral-8x7b").replace(shard_factor=2.0, vocab=32768).experts.routing.shard_factor
          2.0
          >>> mtf.models.preset("gpt2").replace(precision="int8").numerics.precision
          'int8'
        """
        own = {f.name for f in fields(self)}
        if of_numerics := {f.name: changes.pop(f.name) for f in fields(Numerics) if f.name in changes}:
            changes["numerics"] = replace(changes.get("numerics", self.numerics), **of_numerics)
        routing = {f.name: changes.pop(f.name) for f in fields(Routing) if f.name in changes and f.name not in own}
        if routing:
            experts = changes.get("experts", self.experts)
            if experts is None:
                raise GraphError(f"{at('replace')}: {', '.join(routing)}: a field of experts, which {self.name} lacks")
            changes["experts"] = replace(experts, routing=replace(experts.routing, **routing))
        return super().replace(**changes)

    def __repr__(self) -> str:
        sizes = f"{counted(self.layers, 'layer')}, d_model {self.d_model}, {self.parameters:,} parameters"
        return f"<TransformerConfig {self.name}: {sizes}>"

    @property
    def parameters(self) -> int:
        """The number of trained parameters.

        >>> import meshlib as mtf
        >>> mtf.models.preset("llama3.1-405b").parameters
        405853388800
        """
        return sum(self.parameter_counts.values())

    @property
    def active_parameters(self) -> int:
        """The number of trained parameters used per token: of experts only the chosen ones.

        >>> import meshlib as mtf
        >>> round(mtf.models.preset("mixtral-8x7b").active_parameters / 1e9, 1)
        12.9
        """
        from meshlib.models.counts import active_parameters

        return active_parameters(self)

    @property
    def matmul_parameters(self) -> int:
        """Weights by which each token is multiplied, without norms, biases and lookup tables."""
        from meshlib.models.counts import matmul_parameters

        return sum(matmul_parameters(self))

    def flops_per_token(
        self, length: int, causal: bool = True, encoder_length: int | None = None, predictions: int | None = None
    ) -> float:
        """FLOPs per token of a training step: see `meshlib.models.counts`.

        >>> import meshlib as mtf
        >>> mtf.models.preset("llama2-70b").flops_per_token(4096)
        428385239040.0
        """
        from meshlib.models.counts import flops_per_token

        return flops_per_token(self, length, causal, encoder_length, predictions)

    @property
    def period(self) -> int:
        """The period of the pattern of layer kinds."""
        return lcm(len(self.windows), self.experts.every if self.experts is not None else 1)

    @property
    def dense_front(self) -> int:
        """The number of dense layers at the front of a model with experts."""
        return 0 if self.experts is None else min(self.experts.first_dense, self.layers)

    def reduced(self, periods: int = 2) -> TransformerConfig:
        """A model of the same architecture for a laptop: small dims, few layers.

        Equal adjacent layers of the window pattern are reduced to one; there are `periods` repetitions of the pattern.

        >>> import meshlib as mtf
        >>> mtf.models.preset("llama3.1-405b").reduced().parameters
        28832
        """
        periods = whole(periods, "reduced", "periods", low=1)
        windows = tuple(next(run) for _, run in groupby(None if w is None else 4 for w in self.windows))
        few = {self.heads: 8, 1: 1}  # as many as queries, or one; otherwise groups of two
        experts = None if self.experts is None else self.experts.reduced()
        latent = None if self.latent is None else self.latent.reduced()
        interval, front = (1, 0) if experts is None else (experts.every, experts.first_dense)
        return self.replace(
            name=f"{self.name}-reduced",
            layers=front + periods * lcm(len(windows), interval),
            encoder_layers=periods * interval if self.encoder_layers else 0,
            d_model=32,
            heads=8,
            kv_heads=None if self.kv_heads is None else few.get(self.kv_heads, 4),
            head_dim=8 if latent is None else latent.head_dim,
            latent=latent,
            experts=experts,
            d_ff=64,
            vocab=64,
            max_length=None if self.max_length is None else 16,
            relative_buckets=8,
            relative_max_distance=6,
            windows=windows,
            global_head_dim=None if self.global_head_dim is None else 16,
            global_kv_heads=None if self.global_kv_heads is None else 2,
        )

    # ------------------------------------------------------------ checks

    def _check_types(self) -> None:
        what = "TransformerConfig"
        if not isinstance(self.name, str) or not self.name:
            raise GraphError(f"{at(what)}: name must be a non-empty string, got {self.name!r:.80}")
        for name, allowed in _CHOICES.items():
            choice(getattr(self, name), what, name, allowed)
        for f in fields(self):
            kind, _, optional = str(f.type).partition(" | ")
            if kind in _KINDS and not (optional and getattr(self, f.name) is None):
                _KINDS[kind](getattr(self, f.name), what, f.name)
        if not isinstance(self.windows, tuple) or not self.windows:
            raise GraphError(f"{at(what)}: windows must be a tuple such as (1024, None), got {self.windows!r:.80}")
        for window in self.windows:
            if window is not None:
                whole(window, what, "windows")
        for name, record in (("experts", Experts), ("latent", LatentAttention)):
            if not isinstance(getattr(self, name), record | None):
                raise GraphError(
                    f"{at(what)}: {name} must be an mtf.models.{record.__name__}, got {getattr(self, name)!r:.80}"
                )
        check_scaling(self.rope_scaling, what, "rope_scaling")
        as_numerics(self.numerics, what)

    def _size_faults(self) -> list[str]:
        whole_numbers = {f.name: getattr(self, f.name) for f in fields(self) if str(f.type).startswith("int")}
        sizes = [(name, size, name not in _COUNTS) for name, size in whole_numbers.items() if size is not None]
        sizes += [("windows", window, True) for window in self.windows if window is not None]
        faults = [f"{name} must be at least {int(one)}, got {size}" for name, size, one in sizes if size < one]
        deep = [name for name in ("layers", "encoder_layers") if getattr(self, name) > MOST_LAYERS]
        return faults + [f"{name} must be at most {MOST_LAYERS:,}, got {getattr(self, name):,}" for name in deep]

    def _faults(self) -> list[str]:
        """Incompatible fields and numbers out of range."""
        faults = [*self._attention_faults(), *self._position_faults(), *self._expert_faults()]
        if self.encoder_decoder != bool(self.encoder_layers):
            wanted = "needs encoder_layers" if self.encoder_decoder else "has no encoder_layers beside its layers"
            faults.append(f"kind {self.kind!r} {wanted}, got {self.encoder_layers}")
        if self.encoder_decoder and self.segments:
            faults.append(f"segments are for models of one stack, got {self.segments}")
        if self.parallel and (self.norm_position != "pre" or self.encoder_decoder):
            faults.append("parallel blocks read one norm before them: they need norm_position='pre' and one stack")
        if self.post_norms and (self.parallel or self.norm_position != "pre"):
            faults.append("post_norms come on top of a norm before each block: norm_position='pre', parallel=False")
        if not self.attention_post_norm and not self.post_norms:
            faults.append("attention_post_norm=False takes one of two post_norms away: it needs post_norms=True")
        if self.qk_norm_over_heads and not self.qk_norm:
            faults.append("qk_norm_over_heads says over what qk_norm is taken: it needs qk_norm=True")
        for name in ("dropout", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                faults.append(f"{name} must be in [0, 1), got {getattr(self, name)}")
        for name in ("norm_epsilon", "logit_cap", "z_loss"):
            if getattr(self, name) < 0:
                faults.append(f"{name} must not be negative, got {getattr(self, name)}")
        return faults

    def _attention_faults(self) -> list[str]:
        faults = []
        for name in ("kv_heads", "global_kv_heads"):
            held = getattr(self, name)
            if held and self.heads % held:
                faults.append(f"heads must be a multiple of {name}: {self.heads} % {held} = {self.heads % held}")
        if self.windows != (None,) and self.encoder_decoder:
            faults.append(f"windows {self.windows} are for models of one stack")
        special = ("global_head_dim", "global_kv_heads", "share_kv", "local_rope_theta")
        if len({window is None for window in self.windows}) == 1:
            faults += [f"{n} is for windows of both kinds, got {self.windows}" for n in special if getattr(self, n)]
        return faults

    def _expert_faults(self) -> list[str]:
        faults = []
        if self.experts is not None and not any(self.experts.in_layer(n) for n in range(self.layers)):
            faults.append(f"experts: none of {self.layers} layers has any")
        if self.experts is not None and self.experts.first_dense and self.encoder_decoder:
            faults.append("first_dense layers are for models of one stack")
        if self.latent is None:
            return faults
        if self.head_dim != self.latent.head_dim:
            faults.append(f"head_dim must be nope_dim + rope_dim = {self.latent.head_dim}, got {self.head_dim}")
        if self.position != "rotary":
            faults.append(f"latent attention rotates its queries: position must be 'rotary', got {self.position!r}")
        unlike = {"kv_heads": self.kv_heads not in (None, self.heads), "windows": self.windows != (None,)}
        unlike |= {"qk_norm": self.qk_norm, "encoder_layers": self.encoder_decoder, "bias": self.has_attention_bias}
        faults += [f"latent attention does not combine with {name}" for name, given in unlike.items() if given]
        return faults

    def _position_faults(self) -> list[str]:
        faults = []
        if self.position == "learned" and self.max_length is None:
            faults.append("learned positions need max_length")
        if self.position == "learned" and self.encoder_decoder:
            faults.append("learned positions are for models of one stack")
        if self.position == "relative" and self.global_kv_heads:
            faults.append("relative positions are the same in all layers: they need equal heads, not global_kv_heads")
        if self.position == "sinusoidal" and self.d_model % 2:
            faults.append(f"sinusoidal positions are sines and cosines: d_model must be even, got {self.d_model}")
        if self.position == "rotary":
            for name in ("head_dim", "global_head_dim"):
                if (getattr(self, name) or 0) % 2:
                    faults.append(
                        f"rotary positions rotate pairs of features: {name} must be even, got {getattr(self, name)}"
                    )
        if self.rope_scaling is not None and (self.position != "rotary" or self.latent is not None):
            faults.append("rope_scaling is of rotary positions, without latent attention")
        for name in ("rope_theta", "local_rope_theta"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                faults.append(f"{name} must be positive, got {getattr(self, name)}")
        return faults


@dataclass(frozen=True)
class LayerKind:
    """Attention window of a layer, and whether it has experts."""

    window: int | None
    experts: bool


@dataclass(frozen=True)
class Heads:
    """Head counts and sizes of one layer's attention; `shared`: values use the weights of the keys."""

    query: int
    memory: int
    dim: int
    shared: bool

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.query // self.memory
