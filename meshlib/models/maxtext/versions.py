"""Keys of other versions of MaxText: those renamed since, and those of a base.yml that this library does not know.

MaxText has no versions of its configuration: keys come, go and change their names with its commits. A file counts as a
base.yml of MaxText if it is based on no other and has its `logical_axis_rules` and `run_name`. What it has beyond the
keys known here is of another version; at the values of that file such a key is reported, not refused. Anywhere else an
unknown key is a mistake.

Source: AI-Hypercomputer/maxtext: all commits of base.yml from October 2023 to August 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

RENAMED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "base_num_heads": ("base_num_query_heads", "base_num_kv_heads"),
        "cosine_learning_rate_final_fraction": ("learning_rate_final_fraction",),
        "enable_flash_attention": ("attention",),
        "fsdp_shard_on_exp": ("shard_exp_on_fsdp",),
        "index_head_dim": ("indexer_head_dim",),
        "index_n_heads": ("indexer_n_heads",),
        "index_topk": ("indexer_topk",),
        "int8_training": ("quantization",),
        "moe_matmul": ("megablox",),
        "original_seq_len": ("original_max_position_embeddings",),
        "quantization_calibration_method": (
            "act_quantization_calibration_method",
            "weight_quantization_calibration_method",
            "bwd_quantization_calibration_method",
        ),
        "rms_norm_epsilon": ("normalization_layer_epsilon",),
        "rope_theta": ("rope_max_timescale",),
        "tile_activation_dim": ("tile_embed_dim",),
        "tile_weight_dim": ("tile_mlp_dim",),
        "use_sliced_mla_projections": ("use_sliced_mla_proj",),
        "use_sparse_indexer": ("use_indexer",),
        "use_te_comm_gemm_overlap": ("te_comm_gemm_overlap",),
    }
)
"""Earlier name of a key -> the keys that it has become."""
_WORDS: Mapping[str, Mapping[bool, str]] = MappingProxyType(
    {"enable_flash_attention": {True: "flash", False: "dot_product"}, "int8_training": {True: "int8", False: ""}}
)
"""What stands today for the true or false of a key."""
FIRST_BLOCK = "default"
"""The decoder block of a base.yml of 2023, which has no key for it."""


def renamed(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Entries with keys by their present names; a present name that is set itself takes precedence.

    Example:
      >>> renamed({"fsdp_shard_on_exp": True, "int8_training": True, "steps": 5})
      {'shard_exp_on_fsdp': True, 'quantization': 'int8', 'steps': 5}
    """
    present: dict[str, Any] = {}
    for key, value in entries.items():
        for name in RENAMED.get(key, (key,)):
            if name == key or name not in entries:
                present[name] = _WORDS[key][value is True] if key in _WORDS else value
    return present


def is_base(entries: Mapping[str, Any]) -> bool:
    """True for a base.yml of MaxText, of any version."""
    return not entries.get("base_config") and {"logical_axis_rules", "run_name"} <= entries.keys()
