"""Meta's and Mistral's params.json files, as the fields of Hugging Face's config.json.

Source: meta-llama/llama-models: models/llama3/args.py and model.py (the width of the feed-forward block, rotary
scaling); mistralai/mistral-inference: src/mistral_inference/args.py. Names and defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from meshlib.core.arguments import at
from meshlib.core.documents import COUNT, FLAG, POSITIVE, RECORD, SIZE, Fail, FieldKind, Schema, check_fields
from meshlib.core.errors import GraphError
from meshlib.sharing.foreign_families import WHAT

NEEDED = ("dim", "n_layers", "n_heads")
_SIZES = FieldKind("an integer of at least 1, or -1", lambda x: x == -1 or SIZE.accepts(x))
SCHEMA: Schema = {
    **dict.fromkeys(NEEDED, SIZE),
    **{name: SIZE.optional() for name in ("n_kv_heads", "head_dim", "hidden_dim", "multiple_of")},
    **{name: POSITIVE.optional() for name in ("ffn_dim_multiplier", "norm_eps", "rope_theta")},
    "vocab_size": _SIZES,
    "sliding_window": COUNT.optional(),
    "use_scaled_rope": FLAG.optional(),
    "moe": RECORD.optional(),
}
_EXPERTS = {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"}
_OF_A_RUN = ("max_batch_size", "max_seq_len", "model_parallel_size")  # they change no weight
_SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def is_params(given: Mapping[str, Any]) -> bool:
    """True for the fields of a params.json.

    >>> is_params({"dim": 4096, "n_layers": 32, "n_heads": 32}), is_params({"model_type": "llama"})
    (True, False)
    """
    return "model_type" not in given and all(name in given for name in NEEDED)


def as_hugging_face(given: Mapping[str, Any], target: str) -> dict[str, Any]:
    """The fields of a params.json under Hugging Face's names; `target` is the file in messages.

    Raises: GraphError for fields that are not read, and for a vocabulary whose size is the tokenizer's.
    >>> fields = {"dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 99, "multiple_of": 32}
    >>> as_hugging_face(fields, "params.json")["intermediate_size"]
    192
    """
    if unknown := [name for name, value in given.items() if name not in (*SCHEMA, *_OF_A_RUN) and value]:
        raise GraphError(
            f"{at(WHAT)}: {target} is a params.json with {', '.join(unknown)}, which are not read; give the "
            "config.json of this model that Hugging Face's files have"
        )
    if given["vocab_size"] == -1:
        raise GraphError(
            f"{at(WHAT)}: {target} has vocab_size -1: the tokenizer gives it; write the number in a copy (32000 for "
            "Llama 1 and 2)"
        )
    experts = {theirs: given["moe"].get(ours) for ours, theirs in _EXPERTS.items()} if given.get("moe") else {}
    return {
        "model_type": "mixtral" if experts else "mistral" if given.get("sliding_window") else "llama",
        "hidden_size": given["dim"],
        "num_hidden_layers": given["n_layers"],
        "num_attention_heads": given["n_heads"],
        "num_key_value_heads": given.get("n_kv_heads"),
        "head_dim": given.get("head_dim"),
        "intermediate_size": given.get("hidden_dim") or _width(given),
        "vocab_size": given["vocab_size"],
        "rms_norm_eps": given.get("norm_eps") or 1e-5,
        "rope_theta": given.get("rope_theta") or 10_000.0,
        "rope_scaling": _SCALING if given.get("use_scaled_rope") else None,
        "sliding_window": given.get("sliding_window"),
        **experts,
    }


def check_params(given: Mapping[str, Any], fail: Fail) -> None:
    """Call `fail` for the first field of a params.json that is missing or of another type."""

    def inside(fault: str) -> NoReturn:
        fail(f"moe: {fault}")

    check_fields(given, SCHEMA, fail)
    if given.get("moe"):
        check_fields(given["moe"], dict.fromkeys(_EXPERTS, SIZE), inside)


def _width(given: Mapping[str, Any]) -> int:
    """The width of Meta's feed-forward block: two thirds of 4 dim, times a factor, in whole multiples."""
    width = int((given.get("ffn_dim_multiplier") or 1.0) * int(8 * given["dim"] / 3))
    multiple = given.get("multiple_of") or 256
    return multiple * -(-width // multiple)
