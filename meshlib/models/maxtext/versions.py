"""Kinds of MaxText configurations: for inference, and of other versions.

MaxText has no versions of its configuration: keys come, go and change their names with its commits. A file counts as a
base.yml of MaxText if it is based on no other and has its `logical_axis_rules` and `run_name`. What it has beyond the
keys known here is of another version; at the values of that file such a key is reported, not refused. Anywhere else an
unknown key is a mistake.

Source: AI-Hypercomputer/maxtext: all commits of base.yml from October 2023 to August 2026.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

# Keys that only inference reads: their defaults. Other values ask for decoding.
# Source: AI-Hypercomputer/maxtext: src/maxtext/configs/base.yml, inference/*.yml and post_train/rl_mt_jt.yml.
SERVING: Mapping[str, Any] = MappingProxyType(
    {
        "model_call_mode": "", "quantize_kvcache": False, "return_log_prob": False, "checkpoint_is_quantized": False,
        "stack_prefill_result_cache": False, "use_chunked_prefill": False, "load_from_prefill_dir": False,
        "prefill_cache_dir": "", "inference_server": "MaxtextInterleavedServer", "inference_benchmark_test": False,
        "enable_prefix_caching": False, "enable_llm_inference_pool": False, "autoregressive_decode_assert": "",
        "save_quantized_params_path": "", "prefill_cache_axis_order": "1,2,0,3", "ar_cache_axis_order": "1,2,0,3",
        "ici_autoregressive_parallelism": 1, "dcn_autoregressive_parallelism": 1,
        "ici_context_autoregressive_parallelism": 1, "dcn_context_autoregressive_parallelism": 1,
    }
)  # fmt: skip
RULES = "logical_axis_rules"
_OF_CACHES = ("cache_", "decode_", "prefill_", "activation_prefill_", "paged_")  # dims of caches and decoding
_FOLDER = "inference"
FIRST_BLOCK = "default"


def serving_sign(
    chain: Sequence[tuple[Path, Mapping[str, Any]]], given: Mapping[str, Any]
) -> tuple[str, str, Any] | None:
    """The first (file, key, value) that requests inference; None for a training configuration.

    Args:
      chain: the file and its base files, with their entries. base.yml itself, the last, has rules for caches.
      given: overrides, with "" as their file.

    >>> base = (Path("base.yml"), {"quantize_kvcache": False})
    >>> serving_sign([base], {})
    >>> serving_sign([(Path("mine.yml"), {"quantize_kvcache": True}), base], {})
    ('mine.yml', 'quantize_kvcache', True)
    """
    entries = [("", given), *((file.name, of_file) for file, of_file in chain)]
    for key, default in SERVING.items():
        for name, of_file in entries:
            if key in of_file:  # a file takes precedence over its base
                if of_file[key] not in (default, None):
                    return name, key, of_file[key]
                break
    for name, of_file in [*entries[:1], *entries[1:-1]]:
        for rule in _rules(of_file):
            if str(rule[0]).startswith(_OF_CACHES):
                return name, RULES, rule
    for name, of_file in entries[1:-1]:
        base = str(of_file.get("base_config", ""))
        if _FOLDER in base:
            return name, "base_config", base
        if name.startswith(_FOLDER):
            return name, "file", name
    return None


def _rules(entries: Mapping[str, Any]) -> list[Any]:
    rules = entries.get(RULES)
    pairs = rules if isinstance(rules, list) else []
    return [rule for rule in pairs if isinstance(rule, list | tuple) and len(rule) == 2]


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
