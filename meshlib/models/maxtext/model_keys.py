"""A `TransformerConfig` as MaxText's keys: the decoder block with its layers, and its fields."""

from __future__ import annotations

from typing import Any

from meshlib.layers.positions import RotaryScaling
from meshlib.models.config import TransformerConfig
from meshlib.models.maxtext.model import KERNELS, LLAMA_SCALING

Keys = dict[str, Any]


def model_keys(config: TransformerConfig) -> tuple[Keys, list[str]]:
    """MaxText's keys for a model, and the features that MaxText lacks.

    >>> import meshlib as mtf
    >>> keys, missing = model_keys(mtf.models.preset("llama2-7b"))
    >>> keys["decoder_block"], keys["base_emb_dim"], missing
    ('llama2', 4096, [])
    """
    missing = _missing(config)
    gate = ["linear"] if config.gated else []
    block = _block(config)
    scale = 2 if block == "gemma2" else 1
    keys: Keys = {
        "decoder_block": block,
        "base_emb_dim": config.d_model,
        "base_num_query_heads": config.heads,
        "base_num_kv_heads": config.memory_heads,
        "head_dim": config.head_dim if config.latent is None else 128,
        "base_mlp_dim": config.d_ff,
        "base_num_decoder_layers": config.layers // scale,
        "vocab_size": config.vocab,
        "mlp_activations": [config.activation.replace("gelu_exact", "gelu"), *gate],
        "logits_via_embedding": config.tied,
        "normalize_embedding_logits": config.scale_logits or not config.tied,
        "normalization_layer_epsilon": config.norm_epsilon,
        "final_logits_soft_cap": config.logit_cap,
        "z_loss_multiplier": config.z_loss,
        "dropout_rate": config.dropout,
        "attention": "autoselected" if config.attention == KERNELS["autoselected"] else "dot_product",
        "rope_max_timescale": config.rope_theta,
        "use_qk_norm": config.qk_norm,
        "use_post_attn_norm": config.post_norms and config.attention_post_norm,
        "use_post_ffw_norm": config.post_norms,
    }
    if set(config.windows) != {None}:
        keys["sliding_window_size"] = next(w for w in config.windows if w is not None)
    return keys | _rope(config) | _block_keys(config, block), missing


def _rope(c: TransformerConfig) -> Keys:
    """Keys of the scaling of rotary positions."""
    scaling = c.rope_scaling
    if scaling is None:
        return {}
    if scaling == LLAMA_SCALING:
        return {"rope_type": "llama3.1"}
    if scaling == RotaryScaling(scaling.factor):
        return {"rope_linear_scaling_factor": scaling.factor}
    keys: Keys = {
        "rope_type": "yarn", "rope_factor": scaling.factor, "beta_slow": scaling.low, "beta_fast": scaling.high,
        "original_max_position_embeddings": scaling.original_length,
    }  # fmt: skip
    return keys | ({"rope_attention_scaling": True} if scaling.amplitude != 1 else {})


def _block(c: TransformerConfig) -> str:
    """The decoder block nearest to a model; differences show when the keys are read back."""
    if c.latent is not None:
        return "deepseek"
    if c.experts is not None:
        if c.windows != (None,):
            return "gpt_oss"
        if c.experts.shared or c.experts.every > 1:
            return "envy" if c.qk_norm else "llama4"
        return "qwen3_moe" if c.qk_norm else "mixtral"
    if c.norm == "layer":
        return "gpt3"
    if c.parallel:
        return "default"
    if c.norm_position == "output":
        return "olmo3"
    if len(c.windows) == 2:
        return "gemma2"
    if len(c.windows) == 6:
        return "gemma4" if c.layer_scale or c.share_kv else "gemma3"
    if c.has_attention_bias:
        return "qwen2"
    if c.scale_embedding:
        return "gemma"
    return "qwen3" if c.qk_norm else "llama2"


def _block_keys(c: TransformerConfig, block: str) -> Keys:
    """Additional keys of single decoder blocks."""
    keys: Keys = {}
    if block == "gpt3":
        keys["trainable_position_size"] = c.max_length or -1
    if block in ("qwen2", "gpt_oss"):
        keys["attention_bias"] = c.has_attention_bias
    if block in ("gemma3", "gemma4"):
        keys["local_rope_max_timescale"] = c.local_rope_theta or -1
    if block == "gemma4":
        keys |= {"global_head_dim": c.global_head_dim or 0, "global_num_kv_heads": c.global_kv_heads or 0}
        keys["share_kv_projections"] = c.share_kv
    if (latent := c.latent) is not None:
        keys |= {
            "attention_type": "mla", "q_lora_rank": latent.q_rank or 0, "kv_lora_rank": latent.kv_rank,
            "qk_nope_head_dim": latent.nope_dim, "qk_rope_head_dim": latent.rope_dim, "v_head_dim": latent.value_dim,
        }  # fmt: skip
    if (e := c.experts) is not None:
        r = e.routing
        keys |= {
            "num_experts": e.count, "num_experts_per_tok": r.choices, "base_moe_mlp_dim": e.d_ff,
            "shared_experts": e.shared, "first_num_dense_layers": e.first_dense, "interleave_moe_layer_step": e.every,
            "norm_topk_prob": r.renormalise, "routed_scaling_factor": r.scale, "routed_bias": r.bias or r.logit_bias,
            "routed_score_func": r.scores if block == "deepseek" else "", "mlp_bias": c.bias,
            "n_routing_groups": r.expert_groups if r.expert_groups > 1 else -1,
            "topk_routing_group": r.groups_per_token if r.expert_groups > 1 else -1,
            "load_balance_loss_weight": r.loss_coef, "capacity_factor": r.capacity_factor or -1.0,
            "sparse_matmul": e.form == "grouped", "ragged_buffer_factor": r.shard_factor or -1.0,
            "use_custom_sort_vjp": r.row_sums == "gather",
        }  # fmt: skip
    return keys


def _missing(c: TransformerConfig) -> list[str]:
    """Features that no decoder block of MaxText has."""
    parts = {
        f"a model of kind {c.kind!r}": c.kind != "decoder",
        "parallel blocks of this kind": c.parallel and _block(c) != "default",
        f"positions of kind {c.position!r}": c.position not in ("rotary", "learned"),
        "a norm of the embeddings": c.embedding_norm,
        "a head with a transform": c.head == "transform",
        "label smoothing": c.label_smoothing > 0,
        f"the activation {c.activation!r}": c.activation == "gelu_exact",
    }
    return [what for what, is_present in parts.items() if is_present]
