"""Names of fields in the config.json files of other families, and Llama's names for the same sizes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

FILES = ("config.json", "params.json")  # that describe the model of a folder: Hugging Face's, Meta's or Mistral's
# Llama's name -> names in other families, most common first; with a point: of a record inside.
OTHER_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "hidden_size": ("n_embd", "n_embed", "d_model", "dim"),
        "num_hidden_layers": ("n_layer", "num_layers", "n_layers", "decoder_layers"),
        "num_attention_heads": ("n_head", "num_heads", "n_heads", "decoder_attention_heads"),
        "num_key_value_heads": ("multi_query_group_num", "attn_config.kv_n_heads"),
        "head_dim": ("kv_channels",),
        "intermediate_size": (
            *("ffn_dim", "ffn_hidden_size", "n_inner", "hidden_dim", "decoder_ffn_dim", "ffn_config.ffn_hidden_size"),
        ),
        "vocab_size": ("padded_vocab_size",),
        "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length"),
        "rms_norm_eps": ("layernorm_epsilon", "layer_norm_epsilon"),
        "layer_norm_eps": ("layer_norm_epsilon", "norm_epsilon", "norm_eps"),
        "hidden_act": ("activation_function", "activation"),
        "rope_theta": ("rotary_emb_base", "attn_config.rope_theta"),
        "num_local_experts": ("ffn_config.moe_num_experts",),
        "num_experts_per_tok": ("ffn_config.moe_top_k",),
        "router_aux_loss_coef": ("ffn_config.moe_loss_weight",),
        "clip_qkv": ("attn_config.clip_qkv",),
    }
)


def under_names_of_llama(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, and under Llama's names those that the file has under others.

    >>> under_names_of_llama({"n_embd": 64, "attn_config": {"kv_n_heads": 2}})["num_key_value_heads"]
    2
    """
    given = dict(fields)
    for name, others in OTHER_NAMES.items():
        values = (_value(fields, other) for other in others if given.get(name) is None)
        if (value := next((v for v in values if v is not None), None)) is not None:
            given[name] = value
    return given


def _value(fields: Mapping[str, Any], name: str) -> Any:
    record, _, inner = name.rpartition(".")
    inside = fields.get(record) if record else fields
    return inside.get(inner) if isinstance(inside, Mapping) else None
