"""Published inference as programs: a prefill, or decoding with a cache.

A row has model, batch, phase ("prefill 2048 tokens", "decode 64 tokens after 2048 context"), precision of the weights
and layout of the feed-forward part and of attention, in the terms of Pope et al., arXiv:2211.05102: "weight-stationary
1D" splits d_ff over all chips, "weight-stationary 2D" d_model over X and d_ff over the rest, X being half the root of
the number of chips (section 3.2.2); attention is split by heads or by sequences, with heads padded as in the paper.
Weight-gathered layouts are not supported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from hardware.chips import get_chip
from meshlib.core.compiler import XLA_TPU, Compiler
from meshlib.core.graph import Graph
from meshlib.estimation import Estimate, balance, estimate
from meshlib.layers.numerics import Numerics
from meshlib.lowering import lower
from meshlib.models import TransformerConfig, decode_step, prefill
from meshlib.validation.machine import slice_of
from meshlib.validation.policies import NotExpressed
from meshlib.validation.priced import Priced
from meshlib.validation.runs import dimensions, known_model

Row = Mapping[str, Any]
# (paper, model) -> (chips, heads): on this many or more the model was given more heads, which are padding, so that they
# split evenly: Pope et al., section 4 (18 billion parameters more).
_PADDED_HEADS = {("2211.05102", "palm-540b"): (64, 64)}
_NARROW = {"int8": "int8", "fp8": "float8_e4m3fn", "int4": "int4"}


def phase_of(row: Row) -> str:
    """ "prefill" or "decode"; "" for rows that are not inference.

    >>> phase_of({"batch": {"phase": "decode 64 tokens after 2048 context"}}), phase_of({"kind": "inference"})
    ('decode', 'decode')
    """
    phase = str((row.get("batch") or {}).get("phase", "")) if isinstance(row.get("batch"), Mapping) else ""
    if "inference" not in str(row.get("kind")) and not phase:
        return ""
    return "prefill" if "prefill" in phase.lower() else "decode"


def priced(row: Row, compiler: Compiler = XLA_TPU) -> Priced:
    """The estimate of a prefill, or of decoding all tokens, beside the measured time.

    Raises: NotExpressed, with the reason.
    """
    est, count = estimated(row, compiler)
    return Priced(est, _measured(row, count), count)


def estimated(row: Row, compiler: Compiler = XLA_TPU) -> tuple[Estimate, int]:
    """The estimate of a step, and the number of steps that the row measures."""
    batch, phase = row.get("batch") or {}, phase_of(row)
    sequences = batch.get("sequences") or batch.get("global_sequences")
    if not sequences:
        raise NotExpressed("it does not say how many sequences there are")
    tokens, context = _lengths(str(batch.get("phase", "")), phase)
    slice_, _ = slice_of(row, get_chip(str(row["chip"])))
    mesh, layout = _layout(row.get("layout") or {}, slice_.devices)
    config = _padded(_config(row), row, slice_.chips)
    with Graph():
        if phase == "prefill":
            outputs_and_updates = prefill(config, int(sequences), tokens, tokens)
        else:
            outputs_and_updates = decode_step(config, int(sequences), context + tokens)
        program = lower(
            *outputs_and_updates, mesh=mesh, layout=layout, balance=balance(slice_, mesh), compiler=compiler
        )
    return estimate(program, slice_), 1 if phase == "prefill" else tokens


def _lengths(said: str, phase: str) -> tuple[int, int]:
    """(tokens read or decoded, tokens of context before them)."""
    counts = [int(n) for n in re.findall(r"\d+", said)]
    if phase == "prefill" and len(counts) == 1:
        return counts[0], 0
    if phase == "decode" and len(counts) == 2:
        return (counts[0], counts[1]) if re.search(r"\d+ tokens? after", said) else (counts[1], counts[0])
    raise NotExpressed(
        f"its phase {said!r} does not say how many tokens are {'read' if phase == 'prefill' else 'decoded'}"
    )


def _layout(layout: Mapping[str, Any], devices: int) -> tuple[dict[str, int], str]:
    weights, attention = (str(layout.get(part, "")).lower() for part in ("ffn", "attention"))
    if "stationary" not in weights:
        raise NotExpressed(f"its layout of the feed-forward part, {weights or 'not stated'!r}, is not expressed")
    features = 1 << max(0, round(math.log2(math.sqrt(devices) / 2))) if "2d" in weights else 1
    mesh = {"features": features, "tensor": devices // features}
    rules = "d_model:features;d_ff:tensor;heads:tensor;vocab:tensor"
    return mesh, f"{rules};batch:(features+tensor)?" if "batch" in attention else rules


def _config(row: Row) -> TransformerConfig:
    """The published model of that name if its dimensions agree, otherwise a decoder of the row's dimensions."""
    model, _ = dimensions(row)
    words = str(row.get("precision", "")).lower()
    weights = words.partition("weights")[0] if "weights" in words else words
    kernel = next((dtype for word, dtype in _NARROW.items() if word in weights), None)
    numerics = Numerics("bfloat16", activation_dtype="bfloat16", kernel_dtype=kernel)
    known = known_model(str(model.get("name", "")))
    if known is not None and (known.layers, known.d_model, known.d_ff) == tuple(
        model[k] for k in ("layers", "d_model", "d_ff")
    ):
        return known.replace(numerics=numerics)
    gated = model.get("mlp_matrices") == 3
    return TransformerConfig(
        name=str(model.get("name") or "model"), layers=model["layers"], d_model=model["d_model"],
        heads=model["q_heads"], kv_heads=model.get("kv_heads"), head_dim=model["head_dim"], d_ff=model["d_ff"],
        vocab=model["vocab"], gated=gated, activation="silu" if gated else "gelu", norm="rms" if gated else "layer",
        position="rotary", tied=bool(model.get("tied_embedding", True)), numerics=numerics,
    )  # fmt: skip


def _padded(config: TransformerConfig, row: Row, chips: int) -> TransformerConfig:
    """The model as it was run, with padded heads."""
    for (paper, name), (least, heads) in _PADDED_HEADS.items():
        if paper in str(row.get("source")) and config.name == name and chips >= least:
            return config.replace(heads=heads)
    return config


def _measured(row: Row, count: int) -> float:
    measured = row.get("measured") or {}
    if measured.get("latency_s"):
        return float(measured["latency_s"])
    if measured.get("ms_per_token"):
        return float(measured["ms_per_token"]) * 1e-3 * count
    raise NotExpressed("it states neither a latency nor a time for each token")
