"""Detection of MaxText configurations for inference, from their files."""

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
