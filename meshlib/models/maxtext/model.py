"""The model of a MaxText configuration as a `TransformerConfig`, by `decoder_block`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from meshlib.core.errors import GraphError
from meshlib.layers.numerics import Numerics
from meshlib.layers.positions import RotaryScaling
from meshlib.layers.routing import Routing
from meshlib.models.config import TransformerConfig
from meshlib.models.config_parts import Experts, LatentAttention
from meshlib.models.maxtext.settings import WHAT, Settings

Fields = dict[str, Any]
ACTIVATIONS = {"gelu": "gelu", "silu": "silu", "swish": "silu", "relu": "relu", "sigmoid": "silu"}
LLAMA_SCALING = RotaryScaling(8.0, original_length=8192)  # Llama 3.1's
FLOATS = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
# MaxText's quantization -> the precision of products.
QUANTIZATION: Mapping[str, str] = MappingProxyType(
    {"": "default", "int8": "int8", "fp8": "fp8", "nanoo_fp8": "fp8", "fp8_gpu": "fp8", "fp8_full": "fp8_full"}
)
# The rounding of a cotangent to int8 adds a float32 of `jax.random.uniform` to each element, once for each of the two
# products that take it: google/aqt aqt/jax/v2/config.py config_v3 (rng_type "jax.uniform", vjp_lhs_stochastic_rounding)
# and stochastic_rounding.py, as MaxText's quantizations.py calls them. Its bits are those of RngBitGenerator
# (jax_default_prng_impl "unsafe_rbg" in MaxText's train.py), which returns its state besides: they go through HBM and
# are not made within the kernel that rounds (from memory).
NOISE_BYTES = 4
KERNELS: Mapping[str, str] = MappingProxyType(
    {"autoselected": "flash", "flash": "flash", "dot_product": "materialised"}
)
SERVING_KERNELS: Mapping[str, str] = MappingProxyType(
    {**KERNELS, **dict.fromkeys(("paged", "vllm_rpa", "vllm_batched_rpa"), "flash")}
)
# Unsupported decoders, by `decoder_block`.
ABSENT: Mapping[str, str] = MappingProxyType(
    {
        "qwen3_next": "linear attention (Gated DeltaNet)",
        "qwen3_5": "linear attention (Gated DeltaNet)",
        "qwen3_custom_moe": "experts that work in another width than d_model",
        "deepseek4": "compressed attention and hyper-connections",
        "gemma4_small": "embeddings that every layer adds, and layers that share keys and values",
        "simple": "MaxText's SimpleDecoderLayer, one product",
        "simple_mlp": "MaxText's SimpleMlpDecoderLayer, two products without attention",
    }
)


# Fields of a `TransformerConfig` -> MaxText's key, for errors of its own checks.
KEYS: Mapping[str, str] = MappingProxyType(
    {
        "head_dim": "head_dim", "dropout": "dropout_rate", "logit_cap": "final_logits_soft_cap",
        "z_loss": "z_loss_multiplier", "rope_theta": "rope_max_timescale",
        "norm_epsilon": "normalization_layer_epsilon",
        "windows": "sliding_window_size", "vocab": "vocab_size", "d_model": "base_emb_dim", "d_ff": "base_mlp_dim",
        "layers": "base_num_decoder_layers", "heads": "base_num_query_heads", "max_length": "trainable_position_size",
    }
)  # fmt: skip
ATTENTION = ("global", "local_sliding", "chunk", "mla", "full", "compressed", "block_diffusion")


def scales(global_scale: int) -> dict[str, int]:
    """The powers of two by which `global_parameter_scale` multiplies width, heads, hidden width and layers.

    >>> scales(16)
    {'emb_dim': 2, 'heads': 4, 'mlp_dim': 4, 'layers': 2}

    Source: AI-Hypercomputer/maxtext: src/maxtext/configs/types.py, get_individual_scales.
    """
    third, rest = divmod(int(math.log2(global_scale)), 3)
    wide = third + (rest > 0)
    return {"emb_dim": 2 ** (third + (rest > 1)), "heads": 2**wide, "mlp_dim": 2**wide, "layers": 2**third}


def config_of(s: Settings) -> TransformerConfig:
    """The model described by the settings.

    Raises: GraphError for an unsupported decoder block or field, and sizes that do not fit.
    """
    block = s["decoder_block"]
    if block in ABSENT:
        s.fail("decoder_block", f"{ABSENT[block]}: this library has no such layers")
    s.choice("decoder_block", tuple(BLOCKS))
    s.choice("attention_type", ATTENTION)
    fields = {**_common_fields(s), **BLOCKS[block](s)}
    name = s.values.get("model_name") or "default"
    try:
        return TransformerConfig(name=f"{name}" if name != "default" else f"maxtext-{block}", **fields)
    except GraphError as fault:
        faults = "; ".join(fault.faults or (str(fault),))
        key = next((KEYS[word] for word in re.findall(r"\w+", faults) if word in KEYS), None)
        if key is not None:
            s.fail(key, faults)
        raise GraphError(f"{WHAT}: {os.path.basename(s.path)}: model_name={name}: {faults}") from None


def _common_fields(s: Settings) -> Fields:
    """The fields common to all decoder blocks."""
    scale = s.size("global_parameter_scale")
    if scale & (scale - 1):
        s.fail("global_parameter_scale", "must be a power of two")
    by = scales(scale)
    heads, kv_heads = by["heads"] * s.size("base_num_query_heads"), by["heads"] * s.size("base_num_kv_heads")
    if heads % kv_heads:
        s.fail("base_num_kv_heads", f"must divide base_num_query_heads: {heads} % {kv_heads} = {heads % kv_heads}")
    gated, activation = _activations(s)
    tied = s.flag("logits_via_embedding")
    return {
        "layers": by["layers"] * s.size("base_num_decoder_layers"),
        "d_model": by["emb_dim"] * s.size("base_emb_dim"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": s.size("head_dim"),
        "d_ff": by["mlp_dim"] * s.size("base_mlp_dim"),
        "vocab": s.size("vocab_size"),
        "gated": gated,
        "activation": activation,
        "norm": "rms",
        "norm_epsilon": s.number("normalization_layer_epsilon"),
        "position": "rotary",
        "rope_theta": s.number("rope_max_timescale"),
        "rope_scaling": _scaling(s),
        "tied": tied,
        "scale_logits": tied and s.flag("normalize_embedding_logits"),
        "logit_cap": s.number("final_logits_soft_cap"),
        "z_loss": s.number("z_loss_multiplier"),
        "dropout": s.number("dropout_rate") if s.flag("enable_dropout") else 0.0,
        "attention": _kernel(s),
        "numerics": numerics_of(s),
    }


def noise_bytes(s: Settings) -> int:
    """Random bytes read per rounded element of a cotangent: for AQT's int8, not for Qwix."""
    return NOISE_BYTES if s["quantization"] == "int8" and s.values.get("use_qwix_quantization") is not True else 0


def sorts_tokens(config: TransformerConfig) -> bool:
    """True if MaxText sorts tokens by expert: their gradients are lookups, biases of experts are looked up by row."""
    return config.experts is not None and config.experts.form == "grouped"


def _kernel(s: Settings) -> str:
    """The attention kernel."""
    kernels = KERNELS if s.serving is None else SERVING_KERNELS
    return kernels[s.choice("attention", tuple(kernels))]


def numerics_of(s: Settings) -> Numerics:
    """Dtypes of weights and activations, and quantisation of products."""
    dtype, weights = (s.choice(key, tuple(FLOATS)) for key in ("dtype", "weight_dtype"))
    s.choice("grad_dtype", tuple(FLOATS))
    return Numerics(
        variable_dtype=weights,
        activation_dtype=dtype,
        precision=QUANTIZATION[s.choice("quantization", tuple(QUANTIZATION))],
        bound=_bound(s),
    )


def _bound(s: Settings) -> float | None:
    """The magnitude for which scales of quantised operands are fixed; None: they follow the operands."""
    keys = ("act_quantization_calibration_method", "weight_quantization_calibration_method")
    of_activations, of_weights = (str(s[key]) for key in keys)
    if of_activations != of_weights:
        s.fail(keys[1], f"must be that of activations, {of_activations}")
    if of_weights == "absmax":
        return None
    limits = re.fullmatch(r"fixed,-(\d+(?:\.\d+)?),(\d+(?:\.\d+)?)", of_weights)
    if limits is None or limits[1] != limits[2] or not float(limits[1]):
        s.fail(keys[1], "must be absmax, or fixed with limits of one magnitude, such as fixed,-224,224")
    return float(limits[1])


def _activations(s: Settings) -> tuple[bool, str]:
    """Whether feed-forward blocks are gated, and their activation."""
    given = s["mlp_activations"]
    names = [given] if isinstance(given, str) else [*given]
    if not 1 <= len(names) <= 2 or names[0] not in ACTIVATIONS or names[1:] not in ([], ["linear"]):
        known = ", ".join(name for name in ACTIVATIONS)
        s.fail("mlp_activations", f"must be one of {known}, alone or with 'linear' for a gated block")
    return len(names) == 2, ACTIVATIONS[names[0]]


def _scaling(s: Settings) -> RotaryScaling | None:
    kind = s.choice("rope_type", ("default", "llama3.1", "yarn"))
    original = s.size("original_max_position_embeddings")
    if kind == "llama3.1":
        return LLAMA_SCALING if s.flag("rope_use_scale") else None
    if kind == "default":
        factor = s.number("rope_linear_scaling_factor")
        return None if factor == 1.0 else RotaryScaling(factor)
    factor, slow, fast = (s.number(key) for key in ("rope_factor", "beta_slow", "beta_fast"))
    amplitude = 0.1 * math.log(factor) + 1 if s.flag("rope_attention_scaling") and factor > 1 else 1.0
    if factor <= 1 or slow >= fast:
        return None
    return RotaryScaling(factor, slow, fast, original, "pairs", amplitude)


def _windows(s: Settings, local: int, period: int) -> Fields:
    """`local` layers with a window in each `period`, the others global."""
    window = s.size("sliding_window_size", 0)
    if not window:
        s.fail(
            "sliding_window_size", f"decoder_block={s['decoder_block']} has layers with a window: must be at least 1"
        )
    return {"windows": (*(window,) * local, *(None,) * (period - local))}


def _local_theta(s: Settings) -> float | None:
    theta = s.number("local_rope_max_timescale")
    return theta if theta > 0 else None


# ------------------------------------------------------------ decoder blocks


def _qwen2(s: Settings) -> Fields:
    bias = s.flag("attention_bias")
    return {"attention_bias": bias, "attention_out_bias": False, "qk_norm": s.flag("use_qk_norm")}


def _qwen3(s: Settings) -> Fields:
    return {"qk_norm": s.flag("use_qk_norm")}


def _gemma2(s: Settings) -> Fields:
    layers = 2 * s.size("base_num_decoder_layers") * scales(s.size("global_parameter_scale"))["layers"]
    return {"scale_embedding": True, "layers": layers, **_post_norms(s), **_windows(s, 1, 2)}


def _gemma3(s: Settings) -> Fields:
    return {
        "scale_embedding": True, "qk_norm": True, **_post_norms(s), **_windows(s, 5, 6),
        "local_rope_theta": _local_theta(s),
    }  # fmt: skip


def _gemma4(s: Settings) -> Fields:
    if s.size("num_experts") > 1:
        s.fail(
            "num_experts",
            "Gemma 4 adds experts to a feed-forward block, with norms of their own: this library has no such layer",
        )
    kv_heads, dim = s.size("global_num_kv_heads", 0), s.size("global_head_dim", 0)
    return {
        **_gemma3(s), "layer_scale": True, "share_kv": s.flag("share_kv_projections"),
        "global_head_dim": dim or None, "global_kv_heads": kv_heads or None, "rope_scaling": None,
    }  # fmt: skip


def _post_norms(s: Settings) -> Fields:
    """Norms of the blocks' results: both, or the feed-forward block's alone."""
    attention, feed_forward = s.flag("use_post_attn_norm"), s.flag("use_post_ffw_norm")
    if attention and not feed_forward:
        s.fail(
            "use_post_ffw_norm",
            "a norm after attention alone (use_post_attn_norm=True): this library has no such layer",
        )
    return {"post_norms": feed_forward, **({"attention_post_norm": False} if feed_forward and not attention else {})}


def _gpt3(s: Settings) -> Fields:
    length = s.size("trainable_position_size", -1)
    if length < 1:
        s.fail("trainable_position_size", "decoder_block=gpt3 looks positions up: must be at least 1")
    return {
        "norm": "layer", "bias": True, "position": "learned", "max_length": length, "rope_scaling": None,
        "rope_theta": 10_000.0,
    }  # fmt: skip


def _olmo3(s: Settings) -> Fields:
    normed = s.flag("use_qk_norm")
    return {"norm_position": "output", "qk_norm": normed, "qk_norm_over_heads": normed, **_windows(s, 3, 4)}


def _gpt_oss(s: Settings) -> Fields:
    bias = s.flag("attention_bias")
    return {"bias": s.flag("mlp_bias"), "attention_bias": bias, **_windows(s, 1, 2), **_experts(s, router_bias=True)}


def _envy(s: Settings) -> Fields:
    fields = {**_qwen3(s), **_post_norms(s)}
    return fields if s.size("num_experts") == 1 else {**fields, **_experts(s)}


def _deepseek(s: Settings) -> Fields:
    fields = _experts(s, renormalise=s["routed_score_func"] == "sigmoid") if s.size("num_experts") > 1 else {}
    if s["attention_type"] != "mla":
        return fields
    rank = s.size("q_lora_rank", 0)
    latent = LatentAttention(
        kv_rank=s.size("kv_lora_rank"), rope_dim=s.size("qk_rope_head_dim"), nope_dim=s.size("qk_nope_head_dim"),
        value_dim=s.size("v_head_dim"), q_rank=rank or None,
    )  # fmt: skip
    return {**fields, "latent": latent, "head_dim": latent.head_dim, "kv_heads": None, "rope_scaling": None}


def _experts(
    s: Settings, scores: str | None = None, renormalise: bool | None = None, router_bias: bool = False
) -> Fields:
    """The mixture of experts; dropless ones have unlimited capacity."""
    count, top_k = s.size("num_experts"), s.size("num_experts_per_tok")
    if count < 2:
        s.fail("num_experts", f"decoder_block={s['decoder_block']} has experts: must be at least 2")
    if top_k > count:
        s.fail("num_experts_per_tok", f"must be at most num_experts={count}")
    by = scales(s.size("global_parameter_scale"))["mlp_dim"]
    inner = s.size("base_moe_mlp_dim", -1)
    width = by * (inner if inner > 0 else s.size("base_mlp_dim"))
    groups, chosen = s.size("n_routing_groups", -1), s.size("topk_routing_group", -1)
    function = s.choice("routed_score_func", ("", "softmax", "sigmoid"))
    if groups > 0 and (count % groups or not 1 <= chosen <= groups):
        s.fail(
            "n_routing_groups", f"must divide num_experts={count}, with topk_routing_group={chosen} of them for a token"
        )
    normed = s.flag("norm_topk_prob") if function == "" and s["decoder_block"] != "mixtral" else True
    sparse = s.flag("sparse_matmul")
    room = s.number("ragged_buffer_factor")
    factor = -1.0 if sparse else s.number("capacity_factor")  # no effect on sorted tokens
    routing = Routing(
        top_k=top_k,
        scores=scores or function or "softmax",
        renormalise=renormalise if renormalise is not None else normed,
        scale=s.number("routed_scaling_factor"),
        logit_bias=router_bias and s.flag("routed_bias"),
        bias=s.flag("routed_bias") and not router_bias,
        expert_groups=max(1, groups),
        groups_per_token=max(1, chosen) if groups > 0 else 1,
        group_score="top_2" if count // max(1, groups) > 1 else "max",
        capacity_factor=factor if factor > 0 else None,
        min_expert_capacity=1,
        shard_factor=room if sparse and room > 0 else None,
        row_sums="gather" if s.flag("use_custom_sort_vjp") else "scatter",
        loss_coef=s.number("load_balance_loss_weight"),
    )
    interval = s.size("interleave_moe_layer_step")
    experts = Experts(
        count=count, d_ff=width, routing=routing, shared=s.size("shared_experts", 0),
        first_dense=s.size("first_num_dense_layers", 0), every=interval, form=_form(sparse, factor),
    )  # fmt: skip
    return {"experts": experts}


def _form(sparse: bool, factor: float) -> str:
    """The form of dispatch: grouped products, products with masks if capacity is limited, or dense.

    Source: AI-Hypercomputer/maxtext: src/maxtext/layers/moe.py, RoutedMoE.__call__ and dense_matmul.
    """
    if sparse:
        return "grouped"
    return "einsum" if factor > 0 else "dense"


BLOCKS: Mapping[str, Callable[[Settings], Fields]] = MappingProxyType(
    {
        "default": lambda s: {"parallel": True}, "llama2": lambda s: {}, "mistral": lambda s: {},
        "gemma": lambda s: {"scale_embedding": True},
        "gemma2": _gemma2, "gemma3": _gemma3, "gemma4": _gemma4, "gpt3": _gpt3, "olmo3": _olmo3, "qwen2": _qwen2,
        "qwen3": _qwen3, "qwen3_moe": lambda s: {**_qwen3(s), **_experts(s)}, "mixtral": _experts,
        "llama4": lambda s: _experts(s, scores="sigmoid", renormalise=False), "deepseek": _deepseek,
        "gpt_oss": _gpt_oss, "envy": _envy,
    }
)  # fmt: skip
