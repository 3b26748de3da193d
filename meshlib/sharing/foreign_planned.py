"""Decoder families that are planned from their config.json, but whose weights are not read.

As in `foreign_families`, each function takes the fields of a file and returns the arguments of `TransformerConfig` in
which its family differs from Llama. What these models do beyond that costs little, and `planned_notes` says it.

Source: huggingface/transformers 4.57: src/transformers/models/<family>/configuration_<family>.py, names and defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from meshlib.core.arguments import at
from meshlib.core.documents import COUNT, FLAG, LIST, NUMBER, POSITIVE, SIZE, Schema
from meshlib.core.errors import GraphError
from meshlib.sharing.foreign_families import (
    SCHEMA,
    WHAT,
    dropless_experts,
    experts_of_deepseek,
    renormalised,
    windows_of,
)

Fields = Mapping[str, Any]
_SQUARED = "relu2"
_LOCAL = "num_local_experts", "intermediate_size"
_FACTORS = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale")
_FLAGS = (
    *("use_qk_norm", "alibi", "multi_query", "new_decoder_architecture", "parallel_attn", "bias", "use_bias"),
    *("use_parallel_residual", "qk_layernorm", "use_qkv_bias", "lm_head_bias"),
)
PLANNED_SCHEMA: Schema = {
    **SCHEMA,
    **{name: FLAG.optional() for name in _FLAGS},
    **{name: POSITIVE.optional() for name in ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")},
    **{name: NUMBER.optional() for name in ("attention_multiplier", *_FACTORS)},
    **{name: SIZE.optional() for name in ("moe_num_experts", "moe_k", "shared_expert_intermediate_size")},
    **{name: COUNT.optional() for name in ("moe_num_shared_experts", "moe_layer_start_index", "moe_layer_interval")},
    **{name: COUNT.optional() for name in ("num_kv_heads", "ffn_hidden_size", "num_ln_in_parallel_attn")},
    "no_rope_layers": LIST.optional(),
}


def completed(fields: Fields, kind: str) -> Fields:
    """The fields of a family under Llama's names, with the defaults that files leave out."""
    given = dict(fields)
    if kind == "falcon":
        grouped = given.get("num_kv_heads") if given.get("new_decoder_architecture") else 1
        if grouped == 1 and not given.get("multi_query", True):
            grouped = None
        given["num_key_value_heads"] = grouped
        given["intermediate_size"] = given.get("ffn_hidden_size") or 4 * int(given.get("hidden_size", 0))
    if kind == "gpt_neox":
        given["num_key_value_heads"] = None
    if kind in ("ernie4_5", "seed_oss"):
        given.setdefault("head_dim", 128)
    if given.get("hidden_act") == _SQUARED:
        given["hidden_act"] = "relu"
    return given


def _tied(fields: Fields) -> bool:
    """Whether the head shares the embedding's weights, which it does where a file is silent."""
    return fields.get("tie_word_embeddings") is not False


def _layer_norm(fields: Fields, key: str = "layer_norm_eps") -> dict[str, Any]:
    return {"norm": "layer", "norm_epsilon": fields.get(key) or 1e-5}


def _throughout(biased: object) -> dict[str, Any]:
    """Biases everywhere, or nowhere."""
    return {"bias": bool(biased), "attention_bias": bool(biased)}


def _biased(fields: Fields, key: str) -> dict[str, Any]:
    """Biases of queries, keys and values alone."""
    return {"attention_bias": bool(fields.get(key)), "attention_out_bias": False}


def _cohere(fields: Fields) -> dict[str, Any]:
    if fields.get("use_qk_norm"):
        raise GraphError(
            f"{at(WHAT)}: use_qk_norm is True: a layer norm of each head of queries and keys; here is none"
        )
    return {**_layer_norm(fields), "parallel": True, "tied": _tied(fields), **windows_of(fields)}


def _falcon(fields: Fields) -> dict[str, Any]:
    if fields.get("alibi"):
        raise GraphError(f"{at(WHAT)}: alibi is True: positions by linear biases; this library has no such layers")
    return {
        **_layer_norm(fields, "layer_norm_epsilon"), "gated": False, "activation": "gelu_exact", "tied": _tied(fields),
        "parallel": bool(fields.get("parallel_attn", True) or fields.get("new_decoder_architecture")),
        **_throughout(fields.get("bias")),
    }  # fmt: skip


def _gpt_neox(fields: Fields) -> dict[str, Any]:
    return {
        **_layer_norm(fields), "gated": False, "activation": "gelu_exact", **_throughout(True),
        "parallel": bool(fields.get("use_parallel_residual", True)),
    }  # fmt: skip


def _starcoder2(fields: Fields) -> dict[str, Any]:
    window = fields.get("sliding_window")
    return {
        **_layer_norm(fields, "norm_epsilon"), "gated": False, **_throughout(fields.get("use_bias", True)),
        "tied": _tied(fields), "windows": (window or None,),
    }  # fmt: skip


def _stablelm(fields: Fields) -> dict[str, Any]:
    if fields.get("qk_layernorm"):
        raise GraphError(
            f"{at(WHAT)}: qk_layernorm is True: a layer norm of each head of queries and keys; here is none"
        )
    parallel = bool(fields.get("use_parallel_residual"))
    return {**_layer_norm(fields), **_biased(fields, "use_qkv_bias"), "parallel": parallel}


def _granite(fields: Fields) -> dict[str, Any]:
    return {"attention_scale": fields.get("attention_multiplier")}


def _qwen2_moe(fields: Fields) -> dict[str, Any]:
    width, own = fields["moe_intermediate_size"], fields["shared_expert_intermediate_size"]
    if own % width or fields.get("mlp_only_layers"):
        raise GraphError(
            f"{at(WHAT)}: a shared expert of width {own} beside experts of {width}, or mlp_only_layers "
            f"{fields.get('mlp_only_layers')!r:.60}; this library has no such layers"
        )
    parts = {"shared": own // width, "every": fields.get("decoder_sparse_step") or 1}
    experts = dropless_experts(fields, "num_experts", "moe_intermediate_size", renormalised(fields), **parts)
    return {"attention_bias": True, "attention_out_bias": False, **experts}


def _like_deepseek(fields: Fields) -> dict[str, Any]:
    """Experts as in DeepSeek 3, with plain heads."""
    return {**_biased(fields, "attention_bias"), **experts_of_deepseek(fields, third=True)}


def _ernie_moe(fields: Fields) -> dict[str, Any]:
    if (fields.get("moe_layer_interval") or 1) != 1:
        raise GraphError(f"{at(WHAT)}: moe_layer_interval is {fields['moe_layer_interval']!r:.20}; only 1 is supported")
    shared, front = fields.get("moe_num_shared_experts") or 0, fields.get("moe_layer_start_index") or 0
    sizes = "moe_num_experts", "moe_intermediate_size"
    experts = dropless_experts(fields, *sizes, {"bias": True}, choices="moe_k", shared=shared, first_dense=front)
    return {**_throughout(fields.get("use_bias")), "tied": _tied(fields), **experts}


PLANNED: Mapping[str, Callable[[Fields], dict[str, Any]]] = MappingProxyType(
    {
        "arcee": lambda f: {"gated": False}, "cohere": _cohere, "cohere2": _cohere,
        "dots1": lambda f: {**_like_deepseek(f), "qk_norm": True},
        "ernie4_5": lambda f: {**_throughout(f.get("use_bias")), "tied": _tied(f)}, "ernie4_5_moe": _ernie_moe,
        "exaone4": lambda f: {"norm_position": "output", "qk_norm": True, **windows_of(f)}, "falcon": _falcon,
        "glm": lambda f: _biased(f, "attention_bias"),
        "glm4": lambda f: {**_biased(f, "attention_bias"), "post_norms": True},
        "glm4_moe": lambda f: {**_like_deepseek(f), "qk_norm": bool(f.get("use_qk_norm"))},
        "gpt_neox": _gpt_neox, "granite": _granite,
        "granitemoe": lambda f: {**_granite(f), **dropless_experts(f, *_LOCAL, {})}, "helium": lambda f: {},
        "nemotron": lambda f: {**_layer_norm(f, "norm_eps"), "gated": False},
        "phi": lambda f: {**_gpt_neox(f), "activation": "gelu"},
        "phimoe": lambda f: {**_layer_norm(f, "rms_norm_eps"), **dropless_experts(f, *_LOCAL, {})},
        "qwen2_moe": _qwen2_moe, "seed_oss": lambda f: _biased(f, "attention_bias"),
        "smollm3": lambda f: {"tied": _tied(f)}, "stablelm": _stablelm, "starcoder2": _starcoder2,
    }
)  # fmt: skip
"""model_type -> the arguments of `TransformerConfig` in which it differs from Llama."""


def planned_notes(fields: Fields, kind: str) -> list[str]:
    """What a planned family does that this library does not express."""
    factors = [f"{name}={fields[name]}" for name in _FACTORS if fields.get(name) not in (None, 1.0)]
    out = [f"{', '.join(factors)}: factors of values, at no cost"] if factors else []
    own = PLANNED[kind](fields)
    if own.get("norm") == "layer" and not own.get("bias") and "cohere" not in kind:
        out.append("norms have biases; none here")
    if kind in ("gpt_neox", "falcon") and fields.get("num_ln_in_parallel_attn", 2) == 2:
        out.append("attention and feed-forward block have a norm each, here one for both")
    if fields.get("hidden_act") == _SQUARED:
        out.append(f"hidden_act={_SQUARED}: the square of a ReLU; a ReLU here")
    if kind == "smollm3" and 0 in (fields.get("no_rope_layers") or ()):
        out.append("no_rope_layers: some layers do not rotate queries and keys; all do here")
    if kind == "qwen2_moe":
        out.append("the output of the shared experts is weighted by a gate, with d_model parameters a layer; not here")
    if kind == "phi" or fields.get("lm_head_bias"):
        out.append("the head has a bias; none here")
    return out
