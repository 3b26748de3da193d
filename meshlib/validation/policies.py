"""Rematerialisation policies of published runs by name, with defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshlib.core.errors import GraphError
from meshlib.models.maxtext.remat import POLICIES, PRODUCTS, VALUES

# Value names in published policies, beside MaxText's -> operation names in this library.
_NAMES = {
    **VALUES,
    **{"q": ("q",), "k": ("k",), "v": ("v",), "qkv": ("q", "k", "v"), "query": ("q",), "key": ("k",)},
    **{"value": ("v",), "out": ("out",)},
}


class NotExpressed(GraphError):
    """A row that the library cannot express as a program, with the reason."""


@dataclass(frozen=True)
class Policy:
    """Values kept for the backward pass, by name: those in HBM, and those offloaded to the host.

    `carries`: layer inputs are offloaded. Element-wise work is always recomputed: compilers fuse it into its users.
    """

    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    carries: bool = False


NOTHING_TWICE = Policy((*PRODUCTS, "context"))
"""Recomputes no product."""


def policy_of(text: str) -> Policy | None:
    """The policy that a text names or lists; None for an empty text.

    Raises: NotExpressed for one that is not known.
    Example:
      >>> policy_of("custom: decoder_layer_input,q offloaded to host; k,v on device")
      Policy(save=('k', 'v'), offload=('q',), carries=True)
      >>> policy_of("full"), policy_of("")
      (Policy(save=(), offload=(), carries=False), None)
    """
    text = text.strip().lower()
    if not text:
        return None
    if text == "none":
        return NOTHING_TWICE
    if text.startswith("custom"):
        return _custom(text.partition(":")[2])
    named = [policy for policy in POLICIES if re.search(rf"\b{policy}\b", text)]
    if not named:
        raise NotExpressed(f"its recomputation policy {text!r} is not known")
    return Policy(*POLICIES[max(named, key=len)])


def policy_in(note: str) -> str:
    """The name of a policy mentioned in a note, or "".

    >>> policy_in("config x: fsdp -1, remat save_dot_except_mlpwi (read)")
    'save_dot_except_mlpwi'
    """
    words = re.findall(r"[a-z_]+", note.lower())
    return next((w for w in words if w in POLICIES and "_" in w), "")


def lightest(model: Mapping[str, Any], state_bytes: float, tokens: float, hbm_bytes: float) -> tuple[str, Policy]:
    """The policy that recomputes least, among those under which state and kept values of a device fit its HBM.

    `tokens` are per device, with all activations split; values take two bytes.
    """
    widths = {"q": model["q_heads"] * model["head_dim"], "out": model["d_model"], "wo": model["d_model"]}
    widths["k"] = widths["v"] = (model.get("kv_heads") or model["q_heads"]) * model["head_dim"]
    widths["wi"] = model["d_ff"]
    widths["wi_gate"] = model["d_ff"] if (model.get("mlp_matrices") or 2) == 3 else 0
    for name in ("minimal", "save_dot_except_mlpwi", "save_qkv_proj"):
        stored_values = model["d_model"] + sum(widths[n] for n in POLICIES[name][0])
        if state_bytes + 2 * tokens * model["layers"] * stored_values < 0.95 * hbm_bytes:
            return name, Policy(*POLICIES[name])
    return "full", Policy()


def _custom(text: str) -> Policy:
    """A policy from lists of names with their storage: 'a,b offloaded to host; c on device'."""
    save: list[str] = []
    offload: list[str] = []
    carries = False
    for part in re.split(r"[;,]\s*(?=[^;,]*\bremat\b)|;", text):
        words = re.findall(r"[a-z_0-9]+", part)
        names = [n for w in words for n in _NAMES.get(w, ())]
        if "remat" in words:
            continue
        if "offloaded" in words or "host" in words:
            offload += names
            carries |= "decoder_layer_input" in words
        else:
            save += names
    return Policy(tuple(dict.fromkeys(save)), tuple(dict.fromkeys(offload)), carries)
