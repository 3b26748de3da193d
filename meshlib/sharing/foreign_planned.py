"""Families that are planned from their config.json, but whose weights are not read.

As in `foreign_families`, each function takes the fields of a file, under Llama's names (`foreign_keys`), and returns
the arguments of `TransformerConfig` in which its family differs from Llama. What these models do beyond that costs
little, and `planned_notes` says it.

Source: huggingface/transformers 4.57: src/transformers/models/<family>/configuration_<family>.py, names and defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from meshlib.core.arguments import at
from meshlib.core.documents import COUNT, FLAG, LIST, NUMBER, POSITIVE, RECORD, SIZE, Schema
from meshlib.core.errors import GraphError
from meshlib.sharing.foreign_families import (
    SCHEMA,
    WHAT,
    dropless_experts,
    experts_of_deepseek,
    latent_of_deepseek,
    renormalised,
    shortest,
    windows_of,
)
from meshlib.sharing.foreign_keys import under_names_of_llama

Fields = Mapping[str, Any]
_LOCAL = "num_local_experts", "intermediate_size"
_FACTORS = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "scale_emb", "scale_depth")
_FOUR_TIMES = ("falcon", "bloom", "mpt", "gptj", "codegen", "gpt_neo", "gpt_bigcode")  # d_ff over d_model
_UNBIASED_NORMS = ("cohere", "cohere2", "dbrx", "modernbert", "mpt", "olmo")
_TWO_STACKS = ("bart", "mbart", "marian", "m2m_100", "pegasus")
# Activations that this library lacks -> the nearest one, and what they are.
_NEAREST: Mapping[object, tuple[str, str]] = MappingProxyType(
    {
        "relu2": ("relu", "the square of a ReLU; a ReLU here"),
        "xielu": ("silu", "xIELU, with learned numbers; a SiLU here"),
        "gegelu": ("gelu", "a gated GELU with limits; a GELU here"),
        "quick_gelu": ("silu", "x sigmoid(1.702 x); a SiLU here"),
    }
)
_FLAGS = (
    *("use_qk_norm", "alibi", "multi_query", "new_decoder_architecture", "parallel_attn", "bias", "use_bias"),
    *("use_parallel_residual", "qk_layernorm", "use_qkv_bias", "lm_head_bias", "qkv_bias", "no_bias", "qk_norm"),
    *("add_qkv_bias", "do_layer_norm_before", "use_routing_bias"),
)
PLANNED_SCHEMA: Schema = {
    **SCHEMA,
    **{name: FLAG.optional() for name in _FLAGS},
    **{name: POSITIVE.optional() for name in ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")},
    **{name: NUMBER.optional() for name in ("attention_multiplier", *_FACTORS)},
    **{name: SIZE.optional() for name in ("moe_num_experts", "moe_k", "shared_expert_intermediate_size")},
    **{name: COUNT.optional() for name in ("moe_num_shared_experts", "moe_layer_start_index", "moe_layer_interval")},
    **{name: COUNT.optional() for name in ("num_kv_heads", "ffn_hidden_size", "num_ln_in_parallel_attn")},
    **{name: SIZE.optional() for name in ("word_embed_proj_dim", "window_size", "shared_intermediate_size")},
    **{name: SIZE.optional() for name in ("encoder_layers", "encoder_attention_heads", "encoder_ffn_dim")},
    **{name: SIZE.optional() for name in ("local_attention", "global_attn_every_n_layers")},
    **{name: POSITIVE.optional() for name in ("global_rope_theta", "local_rope_theta")},
    "type_vocab_size": COUNT.optional(),
    "clip_qkv": NUMBER.optional(),
    "attn_config": RECORD.optional(),
    "attention_types": LIST.optional(),
    "no_rope_layers": LIST.optional(),
}


def completed(fields: Fields, kind: str) -> Fields:
    """The fields of a family under Llama's names, with the defaults that files leave out."""
    given = under_names_of_llama(fields)
    if kind in _TWO_STACKS:
        given["num_hidden_layers"] = fields.get("decoder_layers")
    if kind == "falcon":
        grouped = given.get("num_kv_heads") if given.get("new_decoder_architecture") else 1
        if grouped == 1 and not given.get("multi_query", True):
            grouped = None
        given["num_key_value_heads"] = grouped
    if kind in _FOUR_TIMES and not given.get("intermediate_size"):
        given["intermediate_size"] = given.get("expansion_ratio", 4) * int(given.get("hidden_size", 0))
    if kind == "gpt_neox":
        given["num_key_value_heads"] = None
    if kind == "gpt_bigcode" and given.get("multi_query", True):
        given["num_key_value_heads"] = 1
    if kind == "qwen" and isinstance(width := given.get("intermediate_size"), int):
        given["intermediate_size"] = width // 2  # that of the gate and the input together
    if kind in ("ernie4_5", "seed_oss"):
        given.setdefault("head_dim", 128)
    given["hidden_act"] = _NEAREST.get(given.get("hidden_act"), (given.get("hidden_act"),))[0]
    return given


def _tied(fields: Fields) -> bool:
    """Whether the head shares the embedding's weights, which it does where a file is silent."""
    return fields.get("tie_word_embeddings") is not False


def _layer_norm(fields: Fields) -> dict[str, Any]:
    return {"norm": "layer", "norm_epsilon": fields.get("layer_norm_eps") or fields.get("rms_norm_eps") or 1e-5}


def _throughout(biased: object) -> dict[str, Any]:
    """Biases everywhere, or nowhere."""
    return {"bias": bool(biased), "attention_bias": bool(biased)}


def _biased(fields: Fields, key: str) -> dict[str, Any]:
    """Biases of queries, keys and values alone."""
    return {"attention_bias": bool(fields.get(key)), "attention_out_bias": False}


def _cohere(fields: Fields) -> dict[str, Any]:
    types = fields.get("layer_types") or [
        "full_attention" if (n + 1) % (fields.get("sliding_window_pattern") or 4) == 0 else "sliding_attention"
        for n in range(fields["num_hidden_layers"])
    ]
    return {
        **_layer_norm(fields), "parallel": True, "tied": _tied(fields), "qk_norm": bool(fields.get("use_qk_norm")),
        **windows_of(fields, types),
    }  # fmt: skip


def _falcon(fields: Fields) -> dict[str, Any]:
    return {
        **({"position": "none"} if fields.get("alibi") else {}),
        **_layer_norm(fields), "gated": False, "activation": "gelu_exact", "tied": _tied(fields),
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
        **_layer_norm(fields), "gated": False, **_throughout(fields.get("use_bias", True)),
        "tied": _tied(fields), "windows": (window or None,),
    }  # fmt: skip


def _stablelm(fields: Fields) -> dict[str, Any]:
    normed = {"parallel": bool(fields.get("use_parallel_residual")), "qk_norm": bool(fields.get("qk_layernorm"))}
    return {**_layer_norm(fields), **_biased(fields, "use_qkv_bias"), **normed}


def _granite(fields: Fields) -> dict[str, Any]:
    return {"attention_scale": fields.get("attention_multiplier")}


def _gpt(fields: Fields, **more: Any) -> dict[str, Any]:
    """GPT-2 under other names: layer norms, biases, learned positions."""
    learned = {"position": "learned", "max_length": fields.get("max_position_embeddings")}
    return {**_layer_norm(fields), **_throughout(True), "gated": False, **learned, "tied": _tied(fields), **more}


def _opt(fields: Fields) -> dict[str, Any]:
    if fields.get("word_embed_proj_dim", fields["hidden_size"]) != fields["hidden_size"]:
        raise GraphError(
            f"{at(WHAT)}: word_embed_proj_dim is {fields['word_embed_proj_dim']} beside a hidden_size of "
            f"{fields['hidden_size']}: embeddings in another width; this library has none"
        )
    position = {"norm_position": "pre" if fields.get("do_layer_norm_before", True) else "post"}
    return _gpt(fields, **position, max_length=fields["max_position_embeddings"] + 2)


def _gptj(fields: Fields) -> dict[str, Any]:
    rotary = {"position": "rotary", "max_length": None, "parallel": True, "attention_bias": False}
    return {**_gpt(fields, **rotary), "tied": bool(fields.get("tie_word_embeddings"))}


def _gpt_neo(fields: Fields) -> dict[str, Any]:
    kinds = [kind for kinds, times in fields.get("attention_types") or () for _ in range(times) for kind in kinds]
    windows = [fields.get("window_size", 256) if kind == "local" else None for kind in kinds or ("global", "local")]
    return _gpt(fields, attention_bias=False, attention_out_bias=True, attention_scale=1.0, windows=shortest(windows))


def _linear_biases(fields: Fields, biased: bool = True, **more: Any) -> dict[str, Any]:
    """Positions by linear biases of the scores (ALiBi), which are left out."""
    return {**_gpt(fields, position="none", max_length=None, **_throughout(biased)), **more}


def _mpt(fields: Fields) -> dict[str, Any]:
    attention = fields.get("attn_config") or {}
    for name, usual in (("attn_type", "multihead_attention"), ("alibi", True), ("qk_ln", False), ("prefix_lm", False)):
        if attention.get(name, usual) != usual:
            value = attention[name]
            raise GraphError(f"{at(WHAT)}: {name} in attn_config is {value!r:.60}; only {usual!r} is supported")
    return _linear_biases(fields, not fields.get("no_bias", True), activation="gelu_exact")


def _bert(fields: Fields) -> dict[str, Any]:
    """An encoder that predicts masked tokens."""
    return _gpt(
        fields, kind="encoder", segments=fields.get("type_vocab_size", 0), norm_position="post", embedding_norm=True,
        head="transform", attention="materialised",
    )  # fmt: skip


def _modernbert(fields: Fields) -> dict[str, Any]:
    near = (fields.get("local_attention") or 128) // 2 + 1  # tokens on each side, and the token itself
    return {
        **_layer_norm(fields), **_throughout(fields.get("attention_bias")), "kind": "encoder", "tied": _tied(fields),
        "embedding_norm": True, "head": "transform", "rope_theta": float(fields.get("global_rope_theta") or 160_000),
        "local_rope_theta": float(fields.get("local_rope_theta") or 10_000),
        "windows": (None, *[near] * ((fields.get("global_attn_every_n_layers") or 3) - 1)),
    }  # fmt: skip


def _encoder_decoder(fields: Fields, norm_position: str, embedding_norm: bool) -> dict[str, Any]:
    """BART and its kin: two stacks with layer norms, biases, and positions that are added to the embeddings."""
    for name in ("attention_heads", "ffn_dim"):
        if (own := fields.get(f"encoder_{name}")) != (other := fields[f"decoder_{name}"]):
            raise GraphError(
                f"{at(WHAT)}: encoder_{name} is {own}, decoder_{name} {other}; this library has one for both"
            )
    return _gpt(
        fields, kind="encoder-decoder", encoder_layers=fields["encoder_layers"], position="sinusoidal",
        norm_position=norm_position, embedding_norm=embedding_norm, scale_embedding=bool(fields.get("scale_embedding")),
    )  # fmt: skip


def _dense_latent(fields: Fields) -> dict[str, Any]:
    """Latent attention as in DeepSeek 2, and no experts (MiniCPM 3)."""
    value_dim = fields.get("v_head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    return {**latent_of_deepseek({**fields, "v_head_dim": value_dim}), "tied": _tied(fields)}


def _minimax(fields: Fields) -> dict[str, Any]:
    routing = {"scores": "sigmoid", "bias": bool(fields.get("use_routing_bias", True))}
    normed = {"qk_norm": bool(fields.get("use_qk_norm", True)), "qk_norm_over_heads": True}
    return {**normed, **dropless_experts(fields, *_LOCAL, routing)}


def _shared(fields: Fields, own: int, width: int) -> dict[str, Any]:
    """A shared expert of width `own` beside experts of `width`, as so many of them."""
    if own % width or fields.get("mlp_only_layers"):
        raise GraphError(
            f"{at(WHAT)}: a shared expert of width {own} beside experts of {width}, or mlp_only_layers "
            f"{fields.get('mlp_only_layers')!r:.60}; this library has no such layers"
        )
    return {"shared": own // width}


def _qwen2_moe(fields: Fields) -> dict[str, Any]:
    shared = _shared(fields, fields["shared_expert_intermediate_size"], fields["moe_intermediate_size"])
    parts = {**shared, "every": fields.get("decoder_sparse_step") or 1}
    experts = dropless_experts(fields, "num_experts", "moe_intermediate_size", renormalised(fields), **parts)
    return {"attention_bias": True, "attention_out_bias": False, **experts}


def _granite_shared(fields: Fields) -> dict[str, Any]:
    shared = _shared(fields, fields.get("shared_intermediate_size") or 0, fields["intermediate_size"])
    return {**_granite(fields), **dropless_experts(fields, *_LOCAL, {}, **shared)}


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
        "apertus": lambda f: {"gated": False, "qk_norm": bool(f.get("qk_norm", True))},
        "arcee": lambda f: {"gated": False},
        "baichuan": lambda f: {} if f.get("max_position_embeddings") else {"position": "none"},  # 7B, 13B
        **dict.fromkeys(("bert", "camembert", "distilbert", "roberta", "xlm-roberta"), _bert),
        "bart": lambda f: _encoder_decoder(f, "post", True), "mbart": lambda f: _encoder_decoder(f, "pre", True),
        "marian": lambda f: _encoder_decoder(f, "post", False), "modernbert": _modernbert,
        **dict.fromkeys(("m2m_100", "pegasus"), lambda f: _encoder_decoder(f, "pre", False)),
        "bloom": lambda f: _linear_biases(f, embedding_norm=True),
        "chatglm": lambda f: _biased(f, "add_qkv_bias"), "codegen": _gptj, "cohere": _cohere, "cohere2": _cohere,
        "dbrx": lambda f: {**_layer_norm(f), **dropless_experts(f, *_LOCAL, {})},
        "deepseek": lambda f: experts_of_deepseek(f, third=False),
        "dots1": lambda f: {**_like_deepseek(f), "qk_norm": True},
        "ernie4_5": lambda f: {**_throughout(f.get("use_bias")), "tied": _tied(f)}, "ernie4_5_moe": _ernie_moe,
        "exaone": lambda f: {},
        "exaone4": lambda f: {"norm_position": "output", "qk_norm": True, **windows_of(f)}, "falcon": _falcon,
        "glm": lambda f: _biased(f, "attention_bias"),
        "glm4": lambda f: {**_biased(f, "attention_bias"), "post_norms": True},
        "glm4_moe": lambda f: {**_like_deepseek(f), "qk_norm": bool(f.get("use_qk_norm"))},
        "gpt_bigcode": _gpt, "gpt_neo": _gpt_neo, "gpt_neox": _gpt_neox, "gptj": _gptj, "granite": _granite,
        "granitemoe": lambda f: {**_granite(f), **dropless_experts(f, *_LOCAL, {})},
        "granitemoeshared": _granite_shared, "helium": lambda f: {},
        "hunyuan_v1_dense": lambda f: {"qk_norm": True, "tied": bool(f.get("tie_word_embeddings"))},
        "internlm2": lambda f: {"attention_bias": f.get("bias") is not False},
        "internlm3": lambda f: {**_throughout(f.get("bias")), "attention_bias": bool(f.get("qkv_bias")),
                                "attention_out_bias": bool(f.get("bias"))},
        "minicpm": lambda f: {"tied": _tied(f)}, "minicpm3": _dense_latent, "minimax_m2": _minimax,
        "ministral": windows_of, "mpt": _mpt,
        "nemotron": lambda f: {**_layer_norm(f), "gated": False},
        "olmo": _layer_norm, "opt": _opt,
        "orion": _layer_norm,
        "persimmon": lambda f: {**_gpt_neox(f), "parallel": False, "qk_norm": bool(f.get("qk_layernorm", True))},
        "phi": lambda f: {**_gpt_neox(f), "activation": "gelu"},
        "phimoe": lambda f: {**_layer_norm(f), **dropless_experts(f, *_LOCAL, {})},
        "qwen": lambda f: {"attention_bias": True, "attention_out_bias": False},
        "qwen2_moe": _qwen2_moe, "seed_oss": lambda f: _biased(f, "attention_bias"),
        "smollm3": lambda f: {"tied": _tied(f)}, "stablelm": _stablelm, "starcoder2": _starcoder2,
    }
)  # fmt: skip
"""model_type -> the arguments of `TransformerConfig` in which it differs from Llama."""


def planned_notes(fields: Fields, kind: str) -> list[str]:
    """What a planned family does that this library does not express."""
    factors = [f"{name}={fields[name]}" for name in _FACTORS if fields.get(name) not in (None, 1.0)]
    out = [f"{', '.join(factors)}: factors of values, at no cost"] if factors else []
    own = PLANNED[kind](completed(fields, kind))
    if own.get("norm") == "layer" and not own.get("bias") and kind not in _UNBIASED_NORMS:
        out.append("norms have biases; none here")
    if own.get("qk_norm") and own.get("norm") == "layer":
        out.append("queries and keys have a layer norm of each head; an RMS norm here, with one weight for all heads")
    if own.get("position") == "none":
        out.append("positions by linear biases of the scores (ALiBi), at little cost; none here")
    if kind in ("bart", "mbart"):
        out.append("learned positions of both stacks, at little cost; sinusoidal ones here")
    if kind == "modernbert":
        out.append("the first layer has no norm before its attention, and the head's product no bias; both do here")
    if kind == "olmo":
        out.append("norms have no parameters; here each has d_model")
    if clip := under_names_of_llama(fields).get("clip_qkv"):
        out.append(f"clip_qkv={clip}: a clamp of queries, keys and values; none here")
    if kind in ("gpt_neox", "falcon") and fields.get("num_ln_in_parallel_attn", 2) == 2:
        out.append("attention and feed-forward block have a norm each, here one for both")
    if (act := fields.get("hidden_act")) in _NEAREST:
        out.append(f"hidden_act={act}: {_NEAREST[act][1]}")
    if kind == "smollm3" and 0 in (fields.get("no_rope_layers") or ()):
        out.append("no_rope_layers: some layers do not rotate queries and keys; all do here")
    if kind == "qwen2_moe":
        out.append("the output of the shared experts is weighted by a gate, with d_model parameters a layer; not here")
    if kind in ("phi", "gptj", "codegen") or fields.get("lm_head_bias"):
        out.append("the head has a bias; none here")
    return out
