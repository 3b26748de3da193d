"""Parameters and FLOPs of a Transformer in closed form, tested against the graph and published numbers.

FLOPs follow the convention of the literature (Kaplan et al. 2020, PaLM appendix B): 2 per weight and token, and 4 per
visible pair of query and key and per feature of all heads; three times that for a training step. Norms, activations,
softmax and recomputation do not count.
"""

from __future__ import annotations

from meshlib.core.arguments import flag, whole
from meshlib.models.config import Heads, TransformerConfig

PASSES = 3  # forward, and backward with respect to activations and to weights


def parameter_counts(config: TransformerConfig) -> dict[str, int]:
    """Trained parameters by part.

    "embedding" (the vocabulary table), "head" (logits, unless tied, and BERT's transform), "attention", "feed_forward"
    (of layers without experts), "experts" (including shared ones) and "router" are matrices; "positions" (learned,
    relative, segments), "biases" and "norms" are the rest. Biases that only affect the choice of experts are not
    trained.
    """
    encoder = config.encoder_layers
    plain, mixed = _layers_without_experts(config), _layers_with_experts(config)
    return {
        "embedding": config.vocab * config.d_model,
        "head": _head(config) - (config.vocab * config.d_model if config.tied else 0),
        "attention": encoder * _attention(config, config.attention_of(None)) + _decoder_attention(config),
        "feed_forward": plain * _feed_forward(config),
        "experts": mixed * _expert(config) * _experts_per_layer(config),
        "router": mixed * _router(config),
        "positions": _positions(config),
        "biases": _biases(config),
        "norms": _norms(config),
    }


def active_parameters(config: TransformerConfig) -> int:
    """Trained parameters used per token: all except those of experts that it is not routed to."""
    if config.experts is None:
        return config.parameters
    idle = config.experts.count - config.experts.routing.choices
    return config.parameters - _layers_with_experts(config) * idle * (_expert(config) + _expert_biases(config))


def matmul_parameters(config: TransformerConfig) -> tuple[int, int]:
    """Weights by which each token of an encoder beside a decoder, and each other token, is multiplied.

    Keys and values of cross-attention are computed from the encoder's tokens. Only chosen experts count.
    """
    encoder, decoder = config.encoder_layers, config.layers
    attention = _attention(config, config.attention_of(None))
    cross = decoder * attention // 2 if encoder else 0
    own = encoder * attention + cross + _feed_forward_weights(config, encoder)
    rest = _decoder_attention(config) - cross + _feed_forward_weights(config, decoder) + _head(config)
    return own, rest


def flops_per_token(
    config: TransformerConfig,
    length: int,
    causal: bool = True,
    encoder_length: int | None = None,
    predictions: int | None = None,
) -> float:
    """FLOPs of a training step per token of the decoder, or of the only stack.

    Args:
      config: the model.
      length: tokens in a sequence.
      causal: count only visible pairs in causal attention, half of all; False counts all pairs. In an encoder all pairs
        are visible.
      encoder_length: tokens in the encoder's sequence; by default `length`.
      predictions: tokens per sequence for which logits are computed; by default all.
    Raises: GraphError for a length below 1.
    """
    beside = length if encoder_length is None else encoder_length
    predicted = length if predictions is None else predictions
    for name, size in (("length", length), ("encoder_length", beside), ("predictions", predicted)):
        whole(size, "flops_per_token", name, low=1)
    encoder_weights, weights = matmul_parameters(config)
    halved = flag(causal, "flops_per_token", "causal") and config.kind != "encoder"
    pairs = 0.0
    for window in config.pattern:
        heads = config.attention_of(window)
        values = heads.dim if config.latent is None else config.latent.value_dim
        pairs += heads.query * (heads.dim + values) / 2 * _visible_pairs(length, window, halved)
    if config.encoder_decoder:
        width = config.heads * config.head_dim
        pairs += width * (config.layers * length * beside + config.encoder_layers * beside * beside)
    weights -= _head(config)
    per_sequence = weights * length + encoder_weights * beside + _head(config) * predicted
    return PASSES * (2 * per_sequence + 4 * pairs) / length


def _visible_pairs(length: int, window: int | None, causal: bool) -> float:
    """Visible pairs of query and key, with the diagonal counted half, as in published counts."""
    reach = length if window is None else min(window, length)
    if causal:
        return reach * length - reach * reach / 2
    return length * length if window is None else min(2 * window, length) * length


def _attention(config: TransformerConfig, heads: Heads) -> int:
    if config.latent is not None:
        return config.latent.weights(config.d_model, config.heads)
    sides = 1 if heads.shared else 2
    return config.d_model * heads.dim * (2 * heads.query + sides * heads.memory)


def _decoder_attention(config: TransformerConfig) -> int:
    total = sum(_attention(config, config.attention_of(window)) for window in config.pattern)
    return 2 * total if config.encoder_decoder else total


def _feed_forward(config: TransformerConfig) -> int:
    return (3 if config.gated else 2) * config.d_model * config.d_ff


def _layers_with_experts(config: TransformerConfig, layers: int | None = None) -> int:
    """Layers with experts among the first `layers`, or in both stacks."""
    if layers is None:
        return _layers_with_experts(config, config.encoder_layers) + _layers_with_experts(config, config.layers)
    return 0 if config.experts is None else sum(config.experts.in_layer(n) for n in range(layers))


def _layers_without_experts(config: TransformerConfig) -> int:
    return config.encoder_layers + config.layers - _layers_with_experts(config)


def _feed_forward_weights(config: TransformerConfig, layers: int) -> int:
    """Weights used per token in the feed-forward blocks and experts of the first `layers`."""
    mixed = _layers_with_experts(config, layers)
    active = 0 if config.experts is None else config.experts.active
    return (layers - mixed) * _feed_forward(config) + mixed * (_expert(config) * active + _router(config))


def _expert(config: TransformerConfig) -> int:
    return 0 if config.experts is None else (3 if config.gated else 2) * config.d_model * config.experts.d_ff


def _expert_biases(config: TransformerConfig) -> int:
    if config.experts is None or not config.bias:
        return 0
    return (2 if config.gated else 1) * config.experts.d_ff + config.d_model


def _experts_per_layer(config: TransformerConfig) -> int:
    """Experts per layer, including shared ones."""
    return 0 if config.experts is None else config.experts.count + config.experts.shared


def _router(config: TransformerConfig) -> int:
    return 0 if config.experts is None else config.d_model * config.experts.count


def _head(config: TransformerConfig) -> int:
    transform = config.d_model * config.d_model if config.head == "transform" else 0
    return config.vocab * config.d_model + transform


def _positions(config: TransformerConfig) -> int:
    learned = (config.max_length or 0) * config.d_model if config.position == "learned" else 0
    stacks = 2 if config.encoder_decoder else 1
    relative = stacks * config.relative_buckets * config.heads if config.position == "relative" else 0
    return learned + relative + config.segments * config.d_model


def _biases(config: TransformerConfig) -> int:
    encoder, decoder = config.encoder_layers, config.layers
    total = 0
    if config.has_attention_bias:
        for window in (*(None,) * encoder, *config.pattern, *((None,) * decoder if encoder else ())):
            heads = config.attention_of(window)
            total += heads.dim * (heads.query + (1 if heads.shared else 2) * heads.memory)
    if config.has_attention_out_bias:
        total += (encoder + (2 * decoder if encoder else decoder)) * config.d_model
    if config.bias:
        inner = (2 if config.gated else 1) * config.d_ff
        total += _layers_without_experts(config) * (inner + config.d_model)
        if config.experts is not None:
            shared = (2 if config.gated else 1) * config.experts.shared * config.experts.d_ff + config.d_model
            each = config.experts.count * _expert_biases(config) + (shared if config.experts.shared else 0)
            total += _layers_with_experts(config) * each
    if config.experts is not None and config.experts.routing.logit_bias:
        total += _layers_with_experts(config) * config.experts.count
    return total + (config.d_model + config.vocab if config.head == "transform" else 0)


def _norms(config: TransformerConfig) -> int:
    encoder, decoder = config.encoder_layers, config.layers
    each = config.d_model * (2 if config.norm == "layer" and config.bias else 1)
    blocks = 2 * encoder + (3 if encoder else 1 if config.parallel else 2) * decoder
    if config.post_norms:
        of_both = (3 if encoder else 2) * decoder + 2 * encoder
        blocks += of_both if config.attention_post_norm else encoder + decoder
    stacks = (2 if encoder else 1) if config.norm_position != "post" else 0
    whole_model = stacks + config.embedding_norm * (2 if encoder else 1) + (config.head == "transform")
    queries = 0
    if config.qk_norm:
        others = (config.attention_of(None),) * (encoder + (decoder if encoder else 0))
        queries = sum(_qk_norm_scales(config, h) for h in (*map(config.attention_of, config.pattern), *others))
    if config.latent is not None:
        queries = decoder * config.latent.norm_scales
    scales = encoder + decoder if config.layer_scale else 0
    return each * (blocks + whole_model) + queries + scales


def _qk_norm_scales(config: TransformerConfig, heads: Heads) -> int:
    """Parameters of the query and key norms of a layer."""
    return heads.dim * (heads.query + heads.memory if config.qk_norm_over_heads else 2)
