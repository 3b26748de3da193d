"""Hugging Face config.json files, read as a `TransformerConfig`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from meshlib.core.arguments import at
from meshlib.core.documents import FLAG, NUMBER, POSITIVE, RECORD, SIZE, TEXT, Schema, check_fields, read_json
from meshlib.core.errors import CheckpointError, GraphError, MeshlibError, nearest
from meshlib.layers.positions import RotaryScaling
from meshlib.models.config import TransformerConfig
from meshlib.sharing.foreign_families import ABSENT, FAMILIES, SCALINGS, SCHEMA, TEXT_MODELS, notes, rope_of
from meshlib.sharing.foreign_keys import FILES
from meshlib.sharing.foreign_params import NEEDED, as_hugging_face, check_params, is_params
from meshlib.sharing.foreign_planned import PLANNED, PLANNED_SCHEMA, completed, planned_notes

Fields = Mapping[str, Any]
WHAT, TEXT_MODEL = "read_config", "text_config"
IMAGES = ("convnext", "swin", "deit", "efficientnet", "mobilenet_v2")  # other types of classifiers
ACTIVATIONS = {
    **{"relu": "relu", "silu": "silu", "swish": "silu"},
    **{"gelu": "gelu_exact", "gelu_python": "gelu_exact"},
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu"),
}


def read_config(path: str | os.PathLike[str], name: str | None = None) -> TransformerConfig:
    """The model that a Hugging Face config.json describes, or Meta's or Mistral's params.json.

    Llama 2 to 4, Mistral, Mixtral, Gemma 1 to 4, Qwen 2 and 3 with their experts, DeepSeek 2 and 3, Kimi K2, GPT-OSS,
    OLMo 2 and 3, OLMoE, Phi 3 and 4, GPT-2 and T5; to be planned, but without their weights, the families of
    `meshlib.sharing.foreign_planned`: Baichuan, BART, BERT, BLOOM, Cohere, DBRX, ERNIE 4.5, EXAONE, Falcon, GLM 3
    and 4, GPT-J, GPT-Neo and NeoX, Granite, InternLM, M2M-100, Marian, mBART, MiniCPM, MiniMax M2, ModernBERT, MPT,
    Nemotron, OLMo 1, OPT, Pegasus, Phi 1 and 2, Phi-MoE, Qwen 1 and 2 with experts, RoBERTa, Seed-OSS, SmolLM 3,
    StableLM, StarCoder and others. Of multimodal models it is the text model, where that is of one of these families,
    with a name that ends in "-text". `config_notes` lists the features of a file that the result leaves out.

    Args:
      path: the file, or its folder.
      name: name of the model; by default that of the file, or of the folder of a `config.json`.
    Raises: CheckpointError for an invalid file; GraphError for an unsupported model_type, with the reason (linear
      attention, towers), and for a scaling of rotary positions other than "linear", "llama3" and "yarn".
    Example:
      >>> import json, tempfile
      >>> from pathlib import Path
      >>> import meshlib as mtf
      >>> written = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 99}
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     _ = Path(folder, "small.json").write_text(json.dumps(written))
      ...     config = mtf.sharing.read_config(f"{folder}/small.json")
      >>> config.name, config.layers, config.d_ff
      ('small', 2, 256)
    """
    return _read(path, name)[0]


def config_notes(path: str | os.PathLike[str]) -> list[str]:
    """The features of a config.json that the model of `read_config` lacks, and the effect of each.

    Raises: as `read_config`.
    Example:
      >>> import json, tempfile
      >>> from pathlib import Path
      >>> import meshlib as mtf
      >>> written = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 99}
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     _ = Path(folder, "small.json").write_text(json.dumps({**written, "resid_pdrop": 0.1}))
      ...     mtf.sharing.config_notes(f"{folder}/small.json")
      ['resid_pdrop=0.1: dropout while training; none here']
    """
    return _read(path, None)[1]


def _check_kind(kind: str, target: object) -> None:
    if kind in ABSENT:
        text = "its text model, a config.json of its own, or " if ABSENT[kind].endswith("tower") else ""
        raise GraphError(
            f"{at(WHAT)}: {target} has model_type {kind!r:.40}: {ABSENT[kind]}, which no config here expresses; plan "
            f"{text}a function that computes it in JAX: meshlib plan FILE.py:FUNCTION"
        )
    known = (*_KINDS, *FAMILIES, *PLANNED)
    if kind not in known:
        raise GraphError(
            f"{at(WHAT)}: {target} has model_type {kind!r:.40}, none of the {len(known)} that are read (help("
            f"mtf.sharing.read_config) names them){_remedy_of(kind, known)}"
        )


def _remedy_of(kind: str, known: Collection[str]) -> str:
    """What to do with a config of an unknown type."""
    if kind in ("vit", "resnet"):
        return "; it is a classifier of images: mtf.sharing.read_image_config reads it"
    if kind in IMAGES:
        return "; classifiers of images are presets whose sizes --set changes: meshlib plan vit-b-16, or resnet-50"
    return f"{nearest(kind, known)}; if it computes as one of them, give its type in a copy, with the fields of that"


def _fault_of_heads(given: Mapping[str, Any]) -> str | None:
    """Description of numbers of heads that do not divide; None if they do."""
    heads = given.get("num_attention_heads", 1)
    if heads % (given.get("num_key_value_heads") or heads):
        return f"num_key_value_heads {given['num_key_value_heads']} does not divide num_attention_heads {heads}"
    if not (given.get("head_dim") or given.get("kv_lora_rank")) and given.get("hidden_size", 0) % heads:
        return f"hidden_size {given['hidden_size']} is not divisible by num_attention_heads {heads}; give head_dim"
    return None


def model_file(path: str | os.PathLike[str]) -> object:
    """The file that describes a model, given by itself or by its folder."""
    place = Path(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(place, Path) or not place.is_dir():
        return place
    return next((file for name in FILES if (file := place / name).is_file()), place / FILES[0])


def model_name(target: Path) -> str:
    """The name of a file, or of the folder of a `config.json` or `params.json`."""
    return target.absolute().parent.name if target.stem in ("config", "params") else target.stem


def _read(path: str | os.PathLike[str], name: str | None) -> tuple[TransformerConfig, list[str]]:
    given, target = _fields_of(model_file(path))
    kind, called = given["model_type"], name or model_name(Path(target)) or str(given["model_type"])
    towers: list[str] = []
    if text_kind := _kind_of_text(given):
        towers = [
            f"{key}: left out; the text model alone" for key in given if key.endswith("_config") and key != TEXT_MODEL
        ]
        given, kind, called = _text_model(given, target), text_kind, name or f"{called}-text"
    _check_kind(kind, target)
    written, given = given, completed(given, kind) if kind in PLANNED else given
    if kind in _KINDS:
        _refuse(given, {"quantization_config": None})

    def fail(fault: str) -> NoReturn:
        raise CheckpointError(f"{WHAT}: {target}: {fault}")

    check_fields(given, PLANNED_SCHEMA if kind in PLANNED else SCHEMAS.get(kind, SCHEMA), fail)
    rope = {**(given.get("rope_parameters") or {}), **(given.get("rope_scaling") or {})}
    check_fields(rope, ROPE, fail)
    if kind not in ("gpt2", "t5", "mt5") and (fault_of_heads := _fault_of_heads(given)):
        fail(fault_of_heads)
    try:
        return TransformerConfig(name=called, **_fields(given, kind)), [*towers, *_left_out(given, written, kind)]
    except KeyError as fault:
        raise CheckpointError(f"{WHAT}: {target} has no {fault}") from None
    except (TypeError, ValueError, ArithmeticError) as fault:
        if isinstance(fault, GraphError) and fault.faults:  # all faults of the config itself
            raise GraphError(f"{at(WHAT)}: {target}: {'; '.join(fault.faults)}") from None
        if isinstance(fault, MeshlibError):
            raise
        raise CheckpointError(f"{WHAT}: {target} does not describe a model: {fault}") from None


def _fields_of(place: object) -> tuple[Fields, str]:
    """The fields of a file under Hugging Face's names, and its resolved path."""
    given, target = read_json(
        place, WHAT, CheckpointError, "Hugging Face's config.json with a model_type", {"model_type": TEXT.optional()}
    )

    def fail(fault: str) -> NoReturn:
        raise CheckpointError(f"{WHAT}: {target}: {fault}")

    if is_params(given):
        check_params(given, fail)
        return as_hugging_face(given, target), target
    if given.get("model_type") is None:
        there = ", ".join(list(given)[:4]) or "no fields"
        fail(
            f"no model_type: neither Hugging Face's config.json nor a params.json with {', '.join(NEEDED)}; it has "
            f"{there:.120}"
        )
    return given, target


def _fields(given: Fields, kind: str) -> dict[str, Any]:
    """The arguments of `TransformerConfig` but the name."""
    if kind in _KINDS:
        return _KINDS[kind](given)
    return {**_llama(_as_llama(given)), **(PLANNED if kind in PLANNED else FAMILIES)[kind](given)}


def _left_out(given: Fields, written: Fields, kind: str) -> list[str]:
    """The features that the model lacks; `written` are the fields as in the file."""
    return [*notes(given, kind), *(planned_notes(written, kind) if kind in PLANNED else [])]


def _kind_of_text(given: Fields) -> str:
    """The type of a multimodal config's text model, if that is one which is read; otherwise ""."""
    if given["model_type"] in TEXT_MODELS:
        return TEXT_MODELS[given["model_type"]]
    text = given.get(TEXT_MODEL)
    kind = text.get("model_type") if isinstance(text, dict) else None
    return kind if kind in {*_KINDS, *FAMILIES, *PLANNED} else ""


def _text_model(given: Fields, target: str) -> Fields:
    """The text model of a multimodal config."""
    text = given.get(TEXT_MODEL)
    if not isinstance(text, dict):
        raise CheckpointError(f"{WHAT}: {target}: it has no 'text_config', which must be an object")
    return {"tie_word_embeddings": given.get("tie_word_embeddings"), **text}


def _as_llama(given: Fields) -> Fields:
    """A family's fields as Llama's reader expects them: name of the activation, rope settings of full attention."""
    plain = {k: v for k, v in given.items() if k not in ("rope_scaling", "rope_parameters", *_ANGLES)}
    rope = rope_of(given)
    # Rotary angles cost nothing: unknown settings are dropped, and named by `notes`.
    known = rope.get("rope_type", rope.get("type", "default")) in SCALINGS
    plain["rope_parameters"] = {k: v for k, v in rope.items() if known and k not in _ANGLES}
    plain["hidden_act"] = given.get("hidden_activation") or given.get("hidden_act") or "silu"
    return plain


_ANGLES = ("truncate", "partial_rotary_factor")
ROPE: Schema = {
    **{name: TEXT.optional() for name in ("rope_type", "type")},
    **{
        name: POSITIVE.optional()
        for name in ("factor", "rope_theta", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
    },
    **{name: NUMBER.optional() for name in ("attention_factor", "mscale", "mscale_all_dim")},
    "original_max_position_embeddings": SIZE.optional(),
    "truncate": FLAG.optional(),
}
_T5: Schema = {
    **dict.fromkeys(("num_layers", "d_model", "num_heads", "d_kv", "d_ff", "vocab_size"), SIZE),
    **{f"relative_attention_{name}": SIZE.optional() for name in ("num_buckets", "max_distance")},
    "num_decoder_layers": SIZE.optional(),
    "tie_word_embeddings": FLAG.optional(),
    "layer_norm_epsilon": POSITIVE.optional(),
    "feed_forward_proj": TEXT.optional(),
}
SCHEMAS: Mapping[str, Schema] = {
    "llama": {
        **dict.fromkeys(("num_attention_heads", "num_hidden_layers", "hidden_size", "intermediate_size"), SIZE),
        "vocab_size": SIZE,
        **{name: SIZE.optional() for name in ("num_key_value_heads", "head_dim", "max_position_embeddings")},
        **{name: FLAG.optional() for name in ("tie_word_embeddings", "attention_bias", "mlp_bias")},
        **{name: POSITIVE.optional() for name in ("rms_norm_eps", "rope_theta")},
        **{name: RECORD.optional() for name in ("rope_parameters", "rope_scaling")},
        "hidden_act": TEXT.optional(),
    },
    "gpt2": {
        **dict.fromkeys(("n_embd", "n_head", "n_layer", "vocab_size", "n_positions"), SIZE),
        "n_inner": SIZE.optional(),
        **{name: FLAG.optional() for name in ("tie_word_embeddings", "scale_attn_weights", "add_cross_attention")},
        "scale_attn_by_inverse_layer_idx": FLAG.optional(),
        "layer_norm_epsilon": POSITIVE.optional(),
        "activation_function": TEXT.optional(),
    },
    **dict.fromkeys(("t5", "mt5"), _T5),
}  # fmt: skip


def _llama(fields: Fields) -> dict[str, Any]:
    rope: Fields = {**(fields.get("rope_parameters") or {}), **(fields.get("rope_scaling") or {})}
    _refuse({**fields, **rope}, {"mlp_bias": False, "partial_rotary_factor": 1.0})
    heads = fields["num_attention_heads"]
    return {
        "layers": fields["num_hidden_layers"],
        "d_model": fields["hidden_size"],
        "heads": heads,
        "kv_heads": fields.get("num_key_value_heads") or heads,
        "head_dim": fields.get("head_dim") or fields["hidden_size"] // heads,
        "d_ff": fields["intermediate_size"],
        "vocab": fields["vocab_size"],
        "gated": True,
        "activation": _activation(fields.get("hidden_act", "silu")),
        "norm": "rms",
        "norm_epsilon": fields.get("rms_norm_eps", 1e-6),
        "position": "rotary",
        "rope_theta": float(rope.get("rope_theta", fields.get("rope_theta", 10_000.0))),
        "rope_scaling": _scaling(rope, fields),
        "attention_bias": bool(fields.get("attention_bias")),
        "tied": bool(fields.get("tie_word_embeddings")),
    }


def _scaling(rope: Fields, fields: Fields) -> RotaryScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RotaryScaling(rope["factor"])
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return RotaryScaling(*(rope[name] for name in names))
    if kind == "yarn":
        return _yarn(rope, fields)
    raise GraphError(
        f"{at(WHAT)}: the rotary positions are scaled ({kind!r:.40}) in a way that this library lacks; supported: "
        "default, linear, llama3, yarn. Without it logits differ beyond the length that the model was first trained on"
    )


def _yarn(rope: Fields, fields: Fields) -> RotaryScaling:
    _refuse(rope, {"truncate": True})
    length = rope.get("original_max_position_embeddings") or fields["max_position_embeddings"]
    factor = rope.get("factor") or fields["max_position_embeddings"] / length
    amplitude = rope.get("attention_factor")
    if amplitude is None:
        over, under = rope.get("mscale"), rope.get("mscale_all_dim")
        amplitude = _magnitude(factor, over) / _magnitude(factor, under) if over and under else _magnitude(factor, 1.0)
    low, high = rope.get("beta_slow") or 1.0, rope.get("beta_fast") or 32.0
    return RotaryScaling(factor, low, high, length, "pairs", amplitude)


def _magnitude(factor: float, weight: float) -> float:
    """YaRN's factor on queries and keys, for a context extended by `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _refuse(fields: Fields, usual: Fields) -> None:
    """Raise GraphError for fields of which the library supports only the usual value."""
    for name, value in usual.items():
        if fields.get(name, value) not in (value, None):
            raise GraphError(f"{at(WHAT)}: {name} is {fields[name]!r:.80}; only {value} is supported")


def _gpt2(fields: Fields) -> dict[str, Any]:
    _refuse(fields, {"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False})
    d_model, heads = fields["n_embd"], fields["n_head"]
    return {
        "layers": fields["n_layer"],
        "d_model": d_model,
        "heads": heads,
        "head_dim": d_model // heads,
        "d_ff": fields.get("n_inner") or 4 * d_model,
        "vocab": fields["vocab_size"],
        "max_length": fields["n_positions"],
        "attention_scale": None if fields.get("scale_attn_weights", True) else 1.0,
        "activation": _activation(fields.get("activation_function", "gelu_new")),
        "norm_epsilon": fields.get("layer_norm_epsilon", 1e-5),
        "bias": True,
        "tied": bool(fields.get("tie_word_embeddings", True)),
    }


def _t5(fields: Fields) -> dict[str, Any]:
    gate, _, word = fields.get("feed_forward_proj", "relu").rpartition("-")
    tied = bool(fields.get("tie_word_embeddings", True))
    return {
        "kind": "encoder-decoder",
        "layers": fields.get("num_decoder_layers") or fields["num_layers"],
        "encoder_layers": fields["num_layers"],
        "d_model": fields["d_model"],
        "heads": fields["num_heads"],
        "head_dim": fields["d_kv"],
        "d_ff": fields["d_ff"],
        "vocab": fields["vocab_size"],
        "gated": gate == "gated",
        "activation": "gelu" if (gate, word) == ("gated", "gelu") else _activation(word),
        "norm": "rms",
        "norm_epsilon": fields.get("layer_norm_epsilon", 1e-6),
        "position": "relative",
        "relative_buckets": fields.get("relative_attention_num_buckets", 32),
        "relative_max_distance": fields.get("relative_attention_max_distance", 128),
        "attention": "materialised",
        "attention_scale": 1.0,
        "scale_logits": tied,
        "tied": tied,
    }


def _activation(word: object) -> str:
    if word not in ACTIVATIONS:
        raise GraphError(f"{at(WHAT)}: no activation {word!r:.40}; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[str(word)]


_KINDS: MappingProxyType[str, Callable[[Fields], dict[str, Any]]] = MappingProxyType(
    {
        "llama": _llama,
        "gpt2": _gpt2,
        "t5": _t5,
        "mt5": lambda f: _t5({"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu", **f}),
    }
)
