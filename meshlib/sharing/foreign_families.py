"""Decoder families beyond Llama, GPT-2 and T5, from the fields of their config.json.

Each function takes the fields of a file and returns the arguments of `TransformerConfig` in which its family differs
from Llama. Unsupported features are listed in `notes` if they cost little, and refused otherwise.

Source: huggingface/transformers: src/transformers/models/<family>/configuration_<family>.py, names and defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from meshlib.core.arguments import at
from meshlib.core.documents import COUNT, FLAG, LIST, NUMBER, POSITIVE, RECORD, SIZE, TEXT, Schema
from meshlib.core.errors import GraphError
from meshlib.layers.routing import Routing
from meshlib.models.config_parts import Experts, LatentAttention

Fields = Mapping[str, Any]
WHAT = "read_config"
# Multimodal model types of which only the text model is read -> type of that text model.
TEXT_MODELS: Mapping[str, str] = MappingProxyType(
    {"llama4": "llama4_text", "gemma3": "gemma3_text", "gemma4": "gemma4_text"}
)
_STATE_SPACE = "a state-space model"
# Refused families, with the unsupported feature of each.
ABSENT: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear", "minimax"), "linear attention"),
        **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llava", "mllama"), "a vision tower"),
        **dict.fromkeys(("paligemma", "idefics3", "mistral3", "internvl", "kimi_vl", "pixtral"), "a vision tower"),
        **dict.fromkeys(("qwen2_audio", "qwen3_omni_moe", "qwen2_5_omni", "whisper"), "an audio tower"),
        **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "zamba", "zamba2"), _STATE_SPACE),
        **dict.fromkeys(("falcon_h1", "granitemoehybrid", "nemotron_h", "plamo2"), _STATE_SPACE),
        **dict.fromkeys(("rwkv", "rwkv5", "rwkv6", "rwkv7", "recurrent_gemma", "xlstm"), "recurrent layers"),
        **dict.fromkeys(("nemotron-nas", "deci", "openelm"), "layers of different sizes"),
        **dict.fromkeys(("deberta", "deberta-v2"), "scores of relative positions with contents"),
        **dict.fromkeys(("deepseek_v32", "deepseek_v4"), "sparse attention by an indexer"),
        **dict.fromkeys(("lfm2", "lfm2_moe"), "short convolutions between tokens"),
        "bitnet": "weights of three values",
        "diffllama": "differential attention",
        "jetmoe": "experts of attention",
        "gemma3n": "embeddings that every layer adds",
        **dict.fromkeys(("big_bird", "bigbird_pegasus", "led", "longformer", "longt5"), "sparse attention"),
        "t5gemma": "two stacks of different sizes, with windows",
        "albert": "layers that share their weights",
        "electra": "a head that finds replaced tokens",
        **dict.fromkeys(("clip", "siglip"), "two towers, of images and texts"),
        **dict.fromkeys(("wav2vec2", "hubert", "wavlm"), "convolutions of sound"),
        "arctic": "a dense block beside the experts",
        "phi3small": "block-sparse attention",
        "umt5": "relative positions of every layer",
    }
)

SCALINGS = ("default", "linear", "llama3", "yarn")  # of rotary positions
DROPOUTS = (
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout", "dropout", "hidden_dropout"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob"),
)

_SIZES = (
    *("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size_mlp", "global_head_dim"),
    *("num_global_key_value_heads", "decoder_sparse_step", "interleave_moe_layer_step", "sliding_window_pattern"),
)
SCHEMA: Schema = {
    **dict.fromkeys(("num_attention_heads", "num_hidden_layers", "hidden_size", "intermediate_size"), SIZE),
    "vocab_size": SIZE,
    **{n: SIZE.optional() for n in ("num_key_value_heads", "head_dim", "max_position_embeddings", *_SIZES)},
    **{n: COUNT.optional() for n in ("q_lora_rank", "n_shared_experts", "first_k_dense_replace", "sliding_window")},
    **{n: COUNT.optional() for n in ("n_group", "topk_group", "num_nextn_predict_layers", "attention_chunk_size")},
    **{n: COUNT.optional() for n in ("num_kv_shared_layers", "hidden_size_per_layer_input", "max_window_layers")},
    **{n: FLAG.optional() for n in ("tie_word_embeddings", "attention_bias", "norm_topk_prob", "enable_moe_block")},
    **{n: FLAG.optional() for n in ("use_sliding_window", "attention_k_eq_v", "mlp_bias")},
    **{n: POSITIVE.optional() for n in ("rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar")},
    **{n: NUMBER.optional() for n in ("attn_logit_softcapping", "final_logit_softcapping", "routed_scaling_factor")},
    **{n: NUMBER.optional() for n in ("router_aux_loss_coef", "aux_loss_alpha", "partial_rotary_factor", *DROPOUTS)},
    **{n: RECORD.optional() for n in ("rope_parameters", "rope_scaling")},
    **{n: TEXT.optional() for n in ("hidden_act", "hidden_activation", "scoring_func", "topk_method")},
    **{n: LIST.optional() for n in ("layer_types", "mlp_only_layers")},
}


def _refuse(fields: Fields, name: str, reason: str) -> None:
    raise GraphError(f"{at(WHAT)}: {name} is {fields[name]!r:.60}: {reason}; this library has no such layers")


def windows_of(fields: Fields, default: Sequence[str] = ()) -> dict[str, Any]:
    """The attention window of each layer, as the shortest repeating pattern.

    >>> windows_of({"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 128})
    {'windows': (128, None)}
    """
    types = fields.get("layer_types") or [*default]
    window = fields.get("sliding_window")
    if not types or not window:
        return {}
    known = {"sliding_attention": window, "full_attention": None}
    for kind in types:
        if kind not in known:
            what = "linear attention" if "linear" in str(kind) else f"layers of kind {kind!r:.40}"
            raise GraphError(f"{at(WHAT)}: layer_types has {what}; this library has no such layers")
    return {"windows": shortest([known[kind] for kind in types])}


def shortest(windows: Sequence[int | None]) -> tuple[int | None, ...]:
    """The shortest pattern that repeats to these windows."""
    sizes = range(1, len(windows) + 1)
    period = next(n for n in sizes if all(x == windows[i % n] for i, x in enumerate(windows)))
    return tuple(windows[:period])


def _scale(fields: Fields) -> dict[str, Any]:
    scalar = fields.get("query_pre_attn_scalar")
    return {} if scalar is None else {"attention_scale": scalar**-0.5}


def dropless_experts(
    fields: Fields, count: str, width: str, routing: dict[str, Any], choices: str = "num_experts_per_tok", **more: Any
) -> dict[str, Any]:
    """A dropless mixture of experts; `count`, `width`, `choices`: the names of its sizes in a file."""
    loss = fields.get("router_aux_loss_coef") or 0.0
    dropless = Routing(top_k=fields[choices], capacity_factor=None, **{"loss_coef": loss, **routing})
    return {"experts": Experts(count=fields[count], d_ff=fields[width], form="grouped", routing=dropless, **more)}


def renormalised(fields: Fields) -> dict[str, Any]:
    """Routing that renormalises the weights of the chosen experts, if the file says so."""
    return {"renormalise": bool(fields.get("norm_topk_prob"))}


def _plain(fields: Fields) -> dict[str, Any]:
    """Windows of families in which every layer may have one."""
    window = fields.get("sliding_window")
    if window and not fields.get("layer_types") and fields.get("use_sliding_window", True):
        return {"windows": (window,)}
    return windows_of(fields) if fields.get("use_sliding_window", True) else {}


def _mixtral(fields: Fields) -> dict[str, Any]:
    return {**_plain(fields), **dropless_experts(fields, "num_local_experts", "intermediate_size", {})}


def _gemma(fields: Fields) -> dict[str, Any]:
    return {"scale_embedding": True, "tied": fields.get("tie_word_embeddings", True) is not False}


def _gemma2(fields: Fields) -> dict[str, Any]:
    alternating = ["sliding_attention", "full_attention"] * fields["num_hidden_layers"]
    return {
        **_gemma(fields), **_scale(fields), **windows_of(fields, alternating[: fields["num_hidden_layers"]]),
        "post_norms": True, "logit_cap": float(fields.get("final_logit_softcapping") or 0.0),
    }  # fmt: skip


def _gemma3(fields: Fields) -> dict[str, Any]:
    layers, period = fields["num_hidden_layers"], fields.get("sliding_window_pattern") or 6
    types = ["full_attention" if (n + 1) % period == 0 else "sliding_attention" for n in range(layers)]
    several = windows_of(fields, types)
    local = {"local_rope_theta": float(fields.get("rope_local_base_freq") or 10_000.0)}
    both = len({w is None for w in several.get("windows", (None,))}) == 2
    return {**_gemma2(fields), **several, **(local if both else {}), "qk_norm": True}


def _gemma4(fields: Fields) -> dict[str, Any]:
    for name, reason in (
        ("enable_moe_block", "experts added to a feed-forward block, with norms of their own"),
        ("hidden_size_per_layer_input", "embeddings that every layer adds"),
        ("num_kv_shared_layers", "layers that reuse the keys and values of others"),
    ):
        if fields.get(name):
            _refuse(fields, name, reason)
    return {
        **_gemma3(fields), "layer_scale": True, "share_kv": bool(fields.get("attention_k_eq_v")),
        "global_head_dim": fields.get("global_head_dim"), "global_kv_heads": fields.get("num_global_key_value_heads"),
    }  # fmt: skip


def _qwen2(fields: Fields) -> dict[str, Any]:
    sliding = windows_of(fields) if fields.get("use_sliding_window") else {}
    return {"attention_bias": True, "attention_out_bias": False, **sliding}


def _qwen3(fields: Fields) -> dict[str, Any]:
    return {"qk_norm": True, **(windows_of(fields) if fields.get("use_sliding_window") else {})}


def _qwen3_moe(fields: Fields) -> dict[str, Any]:
    if fields.get("mlp_only_layers"):
        _refuse(fields, "mlp_only_layers", "layers without experts at places of their own")
    experts = "num_experts", "moe_intermediate_size", renormalised(fields)
    return {**_qwen3(fields), **dropless_experts(fields, *experts, every=fields.get("decoder_sparse_step") or 1)}


def _olmo2(fields: Fields) -> dict[str, Any]:
    return {"norm_position": "output", "qk_norm": True, "qk_norm_over_heads": True, **windows_of(fields)}


def _olmoe(fields: Fields) -> dict[str, Any]:
    normed = {"qk_norm": True, "qk_norm_over_heads": True}
    return {**normed, **dropless_experts(fields, "num_experts", "intermediate_size", renormalised(fields))}


def _phi3(fields: Fields) -> dict[str, Any]:
    """Phi 3 and 4: Llama whose kernels of queries, keys and values, and of gate and input, are stored as one."""
    return _plain(fields) if (fields.get("sliding_window") or 0) < fields.get("max_position_embeddings", 2**63) else {}


def _gpt_oss(fields: Fields) -> dict[str, Any]:
    alternating = ["sliding_attention", "full_attention"] * fields["num_hidden_layers"]
    return {
        "bias": True, **windows_of(fields, alternating[: fields["num_hidden_layers"]]),
        **dropless_experts(fields, "num_local_experts", "intermediate_size", {"logit_bias": True}),
    }  # fmt: skip


def _llama4(fields: Fields) -> dict[str, Any]:
    routing = {"scores": "sigmoid", "renormalise": False}
    step = fields.get("interleave_moe_layer_step") or 1
    return {
        "d_ff": fields.get("intermediate_size_mlp") or fields["intermediate_size"],
        **dropless_experts(fields, "num_local_experts", "intermediate_size", routing, shared=1, every=step),
    }


def experts_of_deepseek(fields: Fields, third: bool) -> dict[str, Any]:
    """The experts of DeepSeek 2, or as in its third version: sigmoid scores, and biases that choose."""
    groups = fields.get("n_group") or 1
    grouped = groups > 1 and fields.get("topk_method") not in ("greedy",)
    routing = {
        "scores": "sigmoid" if third else "softmax",
        "bias": third,
        "renormalise": bool(fields.get("norm_topk_prob", third)),
        "scale": float(fields.get("routed_scaling_factor") or 1.0),
        "expert_groups": groups if grouped else 1,
        "groups_per_token": (fields.get("topk_group") or 1) if grouped else 1,
        "group_score": "top_2" if third else "max",
        "loss_coef": fields.get("aux_loss_alpha") or 0.0,
    }
    shared, front = fields.get("n_shared_experts") or 0, fields.get("first_k_dense_replace") or 0
    sizes = "n_routed_experts", "moe_intermediate_size"
    return dropless_experts(fields, *sizes, routing, shared=shared, first_dense=front)


def latent_of_deepseek(fields: Fields) -> dict[str, Any]:
    """Latent attention; its rotary positions are not scaled here."""
    latent = LatentAttention(
        kv_rank=fields["kv_lora_rank"], rope_dim=fields["qk_rope_head_dim"], nope_dim=fields["qk_nope_head_dim"],
        value_dim=fields["v_head_dim"], q_rank=fields.get("q_lora_rank") or None,
    )  # fmt: skip
    return {"latent": latent, "head_dim": latent.head_dim, "kv_heads": None, "rope_scaling": None}


def _deepseek(fields: Fields) -> dict[str, Any]:
    third = fields.get("scoring_func") == "sigmoid" or fields.get("topk_method") == "noaux_tc"
    return {**latent_of_deepseek(fields), **experts_of_deepseek(fields, third)}


FAMILIES: Mapping[str, Callable[[Fields], dict[str, Any]]] = MappingProxyType(
    {
        "mistral": _plain, "mixtral": _mixtral, "gemma": _gemma, "gemma2": _gemma2, "gemma3_text": _gemma3,
        "gemma4_text": _gemma4, "qwen2": _qwen2, "qwen3": _qwen3, "qwen3_moe": _qwen3_moe, "olmo2": _olmo2,
        "olmo3": _olmo2, "olmoe": _olmoe, "phi3": _phi3, "gpt_oss": _gpt_oss, "llama4_text": _llama4,
        "deepseek_v2": _deepseek, "deepseek_v3": _deepseek, "kimi_k2": _deepseek,
    }
)  # fmt: skip


def rope_of(fields: Fields) -> Fields:
    """The settings of rotary positions; of models with one entry for each kind of layer those of full attention."""
    rope = {**(fields.get("rope_parameters") or {}), **(fields.get("rope_scaling") or {})}
    full = rope.get("full_attention")
    return full if isinstance(full, dict) else rope


def _rotary_notes(fields: Fields) -> list[str]:
    """Differences in the angles of rotary positions, which change logits but no costs."""
    rope = rope_of(fields)
    kind = rope.get("rope_type", rope.get("type", "default"))
    share = rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
    out = [] if kind in SCALINGS else [f"rope_scaling of type {kind!r:.40}: angles are not scaled here, at equal cost"]
    if share != 1.0:
        out.append(f"partial_rotary_factor={share}: all features of queries and keys rotate here, at about equal cost")
    return out


def notes(fields: Fields, kind: str) -> list[str]:
    """Costs of a model that this library does not express."""
    out = _rotary_notes(fields)
    out += [f"{name}={fields[name]}: dropout while training; none here" for name in DROPOUTS if fields.get(name)]
    if fields.get("attn_logit_softcapping"):
        out.append(f"attn_logit_softcapping={fields['attn_logit_softcapping']}: a tanh of every attention score")
    if kind == "gpt_oss":
        out.append("attention sinks: one more logit for each head, and its parameter")
    if kind == "llama4_text" and fields.get("attention_chunk_size"):
        chunk = fields["attention_chunk_size"]
        out.append(f"attention_chunk_size={chunk}: three of four layers see chunks of that size; all tokens here")
    if fields.get("num_nextn_predict_layers"):
        count = fields["num_nextn_predict_layers"]
        out.append(f"num_nextn_predict_layers={count}: layers that predict further tokens, with their parameters")
    if fields.get("quantization_config"):
        out.append("quantization_config: how the released weights are stored; trained in bfloat16 here")
    return out
