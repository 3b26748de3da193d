"""Measured seconds of a published row, from a time or a rate.

FLOPs per token are counted in three ways: causal attention by its half, in full (PaLM's utilisation, arXiv:2204.02311;
MaxText until its pull request 1988), and by windows as they are. A row says which in `flops_convention`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hardware.slices import Slice
from meshlib.validation.policies import NotExpressed

Row = Mapping[str, Any]

_BLOCKS = ("block_s_median", "block_s_mean", "block_s")
BERT_EVALUATION = 10_000  # BERT's evaluation sequences: mlcommons/training_policies training_rules.adoc


def parameters(model: Mapping[str, Any], held: bool = False) -> float:
    """Parameters that tokens are multiplied by: attention, feed-forward and head, without norms, biases and embeddings.

    Only the experts of a token count, or with `held` all.

    >>> gpt3 = dict(layers=96, d_model=12288, q_heads=96, head_dim=128, d_ff=49152, mlp_matrices=2, vocab=50304)
    >>> round(parameters(gpt3) / 1e9, 1)
    174.6
    >>> mixtral = dict(layers=32, d_model=4096, q_heads=32, kv_heads=8, head_dim=128, vocab=32000, d_ff=14336,
    ...                mlp_matrices=3, experts=8, top_k=2, moe_ff=14336)
    >>> round(parameters(mixtral) / 1e9, 2), round(parameters(mixtral, held=True) / 1e9, 1)
    (12.75, 46.6)
    """
    d, layers, matrices = model["d_model"], model["layers"], model.get("mlp_matrices") or 2
    total = layers * _attention(model) + d * model["vocab"]
    mixed = layers_with_experts(model)
    if mixed:
        experts = model["experts"] if held else model["top_k"]
        each = matrices * d * model["moe_ff"]
        total += mixed * (each * (experts + (model.get("shared_experts") or 0)) + d * model["experts"])
    return float(total + (layers - mixed) * matrices * d * model["d_ff"])


def layers_with_experts(model: Mapping[str, Any]) -> int:
    """Number of layers with experts: all but the leading dense ones, or every n-th."""
    if not model.get("experts"):
        return 0
    return int((model["layers"] - (model.get("dense_layers") or 0)) // (model.get("moe_every") or 1))


def _attention(model: Mapping[str, Any]) -> float:
    """Weights of one layer's attention."""
    d, heads = model["d_model"], model["q_heads"]
    if model.get("kv_lora"):
        queries = heads * model["head_dim"]
        query_weights = model["q_lora"] * (d + queries) if model.get("q_lora") else d * queries
        keys = model["kv_lora"] * heads * (model["qk_nope"] + model["v_head"])
        return float(query_weights + d * (model["kv_lora"] + model["qk_rope"]) + keys + heads * model["v_head"] * d)
    return float(2 * d * model["head_dim"] * (heads + (model.get("kv_heads") or heads)))


def local_layers(model: Mapping[str, Any]) -> int:
    """Windowed layers per global layer: 5 of "5 local : 1 global"; 1 if not stated."""
    if not model.get("local_window"):
        return 0
    match = re.search(r"\d+", str(model.get("pattern") or ""))
    return int(match[0]) if match else 1


def flops_per_token(model: Mapping[str, Any], length: int, spans: str = "causal") -> float:
    """FLOPs per token of a training step without recomputation: 6 per parameter, 12 per key feature attended to.

    `spans`: keys counted per query: "full" all, "causal" half of them, "windows" half or the window.
    """
    half = length if spans == "full" else length / 2
    keys = [half]
    if spans == "windows" and model.get("local_window"):
        keys += [min(half, float(model["local_window"]))] * local_layers(model)
    width = (model["head_dim"] + (model.get("v_head") or model["head_dim"])) / 2
    attention = 12 * model["layers"] * model["q_heads"] * width * sum(keys) / len(keys)
    return float(6 * parameters(model) + attention)


def measured(
    row: Row, batch: int, length: int, slice_: Slice, model: Mapping[str, Any]
) -> tuple[int, int, float, tuple[str, ...]]:
    """(training steps, evaluated sequences, seconds of both, assumptions).

    Raises: NotExpressed where no time follows from what the row gives.
    """
    given, derived = row.get("measured") or {}, row.get("derived") or {}
    seconds = next((float(given[key]) for key in _BLOCKS if given.get(key)), 0.0)
    block = _block(str(derived.get("block", "")), derived, batch, model) if seconds else None
    if block is not None:
        return (*block[:2], seconds, block[2])
    for where in (given, derived):
        for key, unit in (("step_time_s", 1.0), ("step_time_ms", 1e-3)):
            if where.get(key):
                return 1, 0, float(where[key]) * unit, ()
    rates = {
        "tokens_per_s_per_chip": batch * length / slice_.chips,
        "tokens_per_s": batch * length,
        "sequences_per_s": batch,
        "examples_per_s": batch,
        "steps_per_s": 1,
    }
    for key, work in rates.items():
        if given.get(key):
            return 1, 0, work / float(given[key]), ()
    return _from_flops(row, given, batch, length, slice_, model)


def _block(text: str, derived: Row, batch: int, model: Mapping[str, Any]) -> tuple[int, int, tuple[str, ...]] | None:
    """(training steps, evaluated sequences, assumptions) of one block between time stamps; None if not stated.

    >>> _block("12 training steps of 2048 + evaluation forward of 24,567 sequences", {}, 2048, {})
    (12, 24567, ())
    >>> _block("24,576 training sequences, evaluation of 24,567 included", {}, 2048, {})
    (12, 24567, ())
    """
    steps = re.match(r"([\d,]+) (?:training )?steps of", text)
    sequences = re.match(r"([\d,]+) (?:training )?(?:sequences|samples|examples)", text)
    if steps:
        count = _whole(steps[1])
    elif derived.get("train_steps_per_block"):
        count = round(float(derived["train_steps_per_block"]))
    elif sequences and _whole(sequences[1]) >= batch:
        count = round(_whole(sequences[1]) / batch)
    else:
        return None
    evaluated = re.search(r"evaluation\D*?([\d,]*\d)", text)
    if evaluated:
        return count, _whole(evaluated[1]), ()
    if "evaluation" in text and "bert" in str(model.get("name", "")).lower():
        return count, BERT_EVALUATION, (f"evaluation of {BERT_EVALUATION:,} sequences",)
    return count, 0, ()


def _whole(digits: str) -> int:
    return int(digits.replace(",", ""))


def _from_flops(
    row: Row, given: Row, batch: int, length: int, slice_: Slice, model: Mapping[str, Any]
) -> tuple[int, int, float, tuple[str, ...]]:
    rate = float(given.get("tflops_per_s_per_chip") or 0) * 1e12
    rate = rate or float(given.get("mfu") or 0) * slice_.peak_flops("bf16") / slice_.chips
    if rate <= 0:
        raise NotExpressed("it gives no step time, and no rate from which one follows")
    words = str(row.get("flops_convention") or "").lower()
    spans, assumed = "full", tuple[str, ...]()
    if "window" in words:
        spans = "windows"
    elif "halved" in words:
        spans = "causal"
    elif "full" not in words:
        assumed = ("FLOPs of attention counted in full",)
    flops = flops_per_token(model, length, spans) * batch * length
    return 1, 0, flops / slice_.chips / rate, assumed
