"""Mixtures of experts and latent attention of published runs, from the fields of their rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meshlib.layers import Routing
from meshlib.models import Experts, LatentAttention
from meshlib.validation.policies import NotExpressed
from meshlib.validation.recipes import row_sums

Row = Mapping[str, Any]

_RANKS = ("kv_lora", "qk_nope", "qk_rope", "v_head")


def with_experts(model: dict[str, Any]) -> None:
    """Derive missing dimensions of a model with experts; gated, as in all models published since 2023.

    Raises: NotExpressed where the experts themselves are not stated.
    """
    missing = [name for name in ("experts", "top_k", "moe_ff") if not model.get(name)]
    if missing:
        raise NotExpressed(f"not stated of its experts: {', '.join(missing)}")
    model.setdefault("d_ff", model.get("dense_ff") or model["moe_ff"])
    model.setdefault("mlp_matrices", 3)
    model.setdefault("tied_embedding", False)
    if model.get("kv_lora"):
        absent = [name for name in _RANKS if not model.get(name)]
        if absent:
            raise NotExpressed(f"not stated of its latent attention: {', '.join(absent)}")
        model.setdefault("head_dim", model["qk_nope"] + model["qk_rope"])


def experts_of(row: Row, model: Mapping[str, Any]) -> tuple[Experts | None, tuple[str, ...]]:
    """The experts of a run, and the assumptions made about them.

    A capacity factor applies to each sequence. Without one, routing is dropless.
    """
    if not model.get("experts"):
        return None, ()
    notes = " ".join(str(part or "") for part in (row.get("note"), model.get("note"))).lower()
    stated = re.search(r"capacity[ _]factor\W*([\d.]*\d)", notes)
    masks = bool(re.search(r"dense dispatch|dispatch einsum|sparse_matmul (?:off|false)", notes))
    choices = int(model["top_k"])
    factor = float(stated[1]) if stated else None
    routing = Routing(top_k=choices, capacity_factor=factor, min_expert_capacity=1, row_sums=row_sums(row))
    experts = Experts(
        count=int(model["experts"]),
        d_ff=int(model["moe_ff"]),
        shared=int(model.get("shared_experts") or 0),
        first_dense=int(model.get("dense_layers") or 0),
        every=int(model.get("moe_every") or 1),
        form="einsum" if masks else "gather" if stated else "grouped",
        routing=routing,
    )
    return experts, () if stated else ("no token dropped",)


def latent_of(model: Mapping[str, Any]) -> LatentAttention | None:
    """The latent attention of a model, if it has one."""
    if not model.get("kv_lora"):
        return None
    return LatentAttention(
        kv_rank=int(model["kv_lora"]),
        rope_dim=int(model["qk_rope"]),
        nope_dim=int(model["qk_nope"]),
        value_dim=int(model["v_head"]),
        q_rank=int(model["q_lora"]) if model.get("q_lora") else None,
    )
