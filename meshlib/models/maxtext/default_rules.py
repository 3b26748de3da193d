"""MaxText's default logical axis rules, for configurations without their own.

Source: AI-Hypercomputer/maxtext: src/maxtext/configs/base.yml, August 2026; rules for training, without those for
caches.
"""

from __future__ import annotations

LogicalRule = tuple[str, tuple[str, ...]]

_BATCH = ("data", "fsdp", "fsdp_transpose", "expert")
_LENGTH = ("context", "context_usp_ulysses")
_TENSOR = ("tensor", "tensor_sequence")
_HEADS = (*_TENSOR, "autoregressive")
_WEIGHTS = ("fsdp", "fsdp_transpose", *_LENGTH)
DEFAULT_RULES: tuple[LogicalRule, ...] = (
    ("activation_embed_and_logits_batch", ("data", "stage", "fsdp", "fsdp_transpose", "expert")),
    ("activation_vocab", _TENSOR), ("activation_vocab", ("tensor",)), ("activation_vocab", ("tensor_sequence",)),
    ("vocab", _HEADS), ("embed_vocab", (*_WEIGHTS, "expert")),
    ("activation_batch_attn", _BATCH), ("activation_heads", _HEADS), ("activation_kv_heads", _TENSOR),
    ("activation_length_attn", _LENGTH), ("activation_q_length", _LENGTH), ("activation_kv_length", ()),
    ("heads", _HEADS), ("q_heads", _HEADS), ("kv_heads", _HEADS), ("qkv", ()), ("kv", ()), ("kv_head_dim", ()),
    ("q_lora", (*_WEIGHTS, "expert")), ("q_lora", ("fsdp", *_LENGTH, "expert")), ("q_lora_up_proj", ()),
    ("kv_lora", (*_WEIGHTS, "expert")), ("kv_lora", ("fsdp", *_LENGTH, "expert")), ("kv_lora_up_proj", ()),
    ("activation_batch_moe", _BATCH), ("activation_length_moe", _LENGTH), ("activation_mlp_moe", _TENSOR),
    ("activation_exp", ("expert",)), ("exp", ("expert",)), ("mlp_moe", ("fsdp_transpose", *_HEADS)),
    ("embed_moe", _WEIGHTS), ("embed_moe", ("fsdp", *_LENGTH)), ("activation_mlp", _TENSOR),
    ("activation_batch", _BATCH), ("activation_length", _LENGTH),
    ("activation_norm_length", ("tensor_sequence", *_LENGTH)), ("activation_embed", ("tensor",)),
    ("activation_stage", ("stage",)), ("mlp", ("fsdp_transpose", *_HEADS)), ("embed", (*_WEIGHTS, "expert")),
    ("embed", ("fsdp", *_LENGTH, "expert")), ("norm", ("tensor",)), ("layers", ("stage",)),
)  # fmt: skip
