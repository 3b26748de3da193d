"""MaxText's `remat_policy` as names of values kept in each layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from meshlib.models.config import TransformerConfig
from meshlib.models.maxtext.keys import LOCATIONS, REMAT_KEYS
from meshlib.models.maxtext.settings import Settings
from meshlib.ops.control.remat import Policy, Remat

# MaxText's name of a value -> names of values here.
VALUES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "query_proj": ("q",), "key_proj": ("k",), "value_proj": ("v",), "kv_proj": ("k", "v"),
        "qkv_proj": ("q", "k", "v"), "context": ("context",), "attention_out": ("context",), "out_proj": ("out",),
        "mlpwi": ("wi", "wi_gate"), "mlpwi_0": ("wi_gate",), "mlpwi_1": ("wi",), "mlpwo": ("wo",),
        "moe_mlpwi_0": ("wi_gate",), "moe_mlpwi_1": ("wi",), "moe_mlpwo": ("wo",),
        "query_wa_proj": ("q_latent",), "mla_q": ("q_latent",), "kv_wa_proj": ("latent",), "mla_kv": ("latent",),
    }
)  # fmt: skip
ATTENTION = ("q", "k", "v", "out")
PRODUCTS = (*ATTENTION, "wi", "wi_gate", "wo")
# Policies by name: (kept in HBM, kept by the host).
# Source: AI-Hypercomputer/maxtext: src/maxtext/layers/nnx_decoders.py, get_remat_policy.
POLICIES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = MappingProxyType(
    {
        "full": ((), ()),
        "minimal": (PRODUCTS, ()),
        "minimal_with_context": ((*PRODUCTS, "context"), ()),
        "minimal_flash": ((*PRODUCTS, "context"), ()),
        "save_dot_except_mlp": (ATTENTION, ()),
        "save_dot_except_mlpwi": ((*ATTENTION, "wo"), ()),
        "save_dot_with_context_except_mlp": ((*ATTENTION, "context"), ()),
        "save_qkv_proj": (("q", "k", "v"), ()),
        "save_out_proj": (("out",), ()),
        "qkv_proj_offloaded": ((), ("q", "k", "v")),
        "minimal_offloaded": ((), PRODUCTS),
    }
)
# Policies that also keep quantised operands -> the policy without these.
WITH_QUANTISED: Mapping[str, str] = MappingProxyType(
    {"minimal_with_quantization": "minimal", "minimal_with_context_and_quantization": "minimal_with_context"}
)
_LATENT = ("latent", "q_latent")


def remat_of(s: Settings, config: TransformerConfig) -> Policy:
    """The policy for `mtf.models.train_step`.

    Raises: GraphError for an unknown policy, and an unknown placement of a value.
    """
    if s.values.get("remat_policy", "full") in (None, "none"):  # YAML reads "none" as None
        return "none"
    name = s.choice("remat_policy", (*POLICIES, *WITH_QUANTISED, "custom"))
    if name != "custom":
        return policy(config, *POLICIES[WITH_QUANTISED.get(name, name)])
    places = {key: s.choice(key, LOCATIONS) for key in REMAT_KEYS}
    if places["decoder_layer_input"] == "remat":
        s.fail("decoder_layer_input", "the input of a layer can't be recomputed: 'device' or 'offload'")
    save, offload = (_values(key for key in REMAT_KEYS if places[key] == where) for where in ("device", "offload"))
    both = [name for name in save if name in offload]
    if both:
        keys = [key for key in REMAT_KEYS if places[key] == "offload" and both[0] in VALUES.get(key, ())]
        s.fail(keys[0], f"another key of the same value, {both[0]}, is on the device; give both the same place")
    return policy(config, save, offload, places["decoder_layer_input"] == "offload")


def _values(keys: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for key in keys for name in VALUES.get(key, ())))


def policy(
    config: TransformerConfig, save: Iterable[str] = (), offload: Iterable[str] = (), carries: bool = False
) -> Policy:
    """The policy that keeps those of these values that a model has; "full" if it has none.

    >>> import meshlib as mtf
    >>> policy(mtf.models.preset("gpt3-175b"), ["wi", "wi_gate"])
    Remat(save=('wi',), offload=(), offload_carries=False)
    """
    absent = set() if config.gated else {"wi_gate"}
    absent |= set(_LATENT) if config.latent is None else set()
    if config.latent is not None and config.latent.q_rank is None:
        absent.add("q_latent")
    saved = tuple(name for name in save if name not in absent)
    moved = tuple(name for name in offload if name not in absent)
    return Remat(save=saved, offload=moved, offload_carries=carries) if saved or moved or carries else "full"


def named(remat: Policy, config: TransformerConfig) -> dict[str, Any] | None:
    """MaxText's keys for a policy: its name, or "custom" with the placement of values; None if MaxText has no such
    policy."""
    if remat in ("full", "none"):
        return {"remat_policy": remat}
    if remat == "matmuls":
        return {"remat_policy": "minimal"}
    if not isinstance(remat, Remat):
        return None
    for name, (save, offload) in POLICIES.items():
        if policy(config, save, offload) == remat:
            return {"remat_policy": name}
    keys: dict[str, Any] = {"remat_policy": "custom"}
    keys |= {"decoder_layer_input": "offload"} if remat.offload_carries else {}
    single = {"q": "query_proj", "k": "key_proj", "v": "value_proj", "context": "context", "out": "out_proj",
              "wo": "mlpwo", "latent": "mla_kv", "q_latent": "mla_q",
              "wi_gate": "mlpwi_0", "wi": "mlpwi_1" if config.gated else "mlpwi"}  # fmt: skip
    for names, where in ((remat.save, "device"), (remat.offload, "offload")):
        for name in names:
            if name not in single:
                return None
            keys[single[name]] = where
    return keys
