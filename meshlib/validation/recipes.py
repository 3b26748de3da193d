"""Attention kernels of published recipes, where they differ from the chip's default.

A row names the recipe that its time was read in; what is here stands in the same recipe (`sa_block_q`, `sa_block_kv`,
those of dkv and dq, `sa_use_fused_bwd_kernel`). It is looked up by that source, never by a row's name, and said in
`Run.assumed`. Source: AI-Hypercomputer/tpu-recipes @c8cfe2f.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hardware.chips import Chip
from hardware.slices import Slice

Row = Mapping[str, Any]
Tile = tuple[int, int]  # (queries, keys)

_JOINT: dict[str, int | Tile] = {
    "attention_backward_kernels": 1,
    "attention_tile": (2048, 2048),
    "attention_window_tile": (2048, 2048),
    "attention_backward_tile": (2048, 2048),
}
# (recipe folder, `Chip` fields that it sets); the first match counts.
_KERNELS: tuple[tuple[str, dict[str, int | Tile]], ...] = (
    (r"trillium/(Llama3\.1-(8|70)B|Mistral-7B)", _JOINT),
    (r"trillium/Mixtral-8x7B", {"attention_tile": (2048, 512)}),
    (r"trillium/Gemma3", {"attention_tile": (1024, 1024), "attention_backward_tile": (1024, 1024)}),
    (r"v5p/Llama4", _JOINT | {"attention_backward_kernels": 2}),
    (r"ironwood/gemma4-(26b|2b|4b)", {"attention_tile": (1024, 1024), "attention_backward_tile": (1024, 1024)}),
    (r"ironwood/gemma4-31b", {"attention_backward_tile": (1024, 2048)}),
    (r"ironwood/(gpt-oss|qwen3)", {"attention_tile": (1024, 1024)}),
    (r"ironwood/llama3\.1-405b/\w+-fp8", {"attention_tile": (1024, 2048)}),
    (r"ironwood/llama3\.1-70b/8k-fp8", {"attention_tile": (1024, 1024)}),
    (r"ironwood/llama3\.1-70b/128k", {"attention_backward_tile": (1024, 4096)}),
)


def with_kernels(row: Row, slice_: Slice) -> tuple[Slice, tuple[str, ...]]:
    """The slice of a row with the attention kernels of its recipe, and the note that says so.

    Example:
      >>> row = {"source": {"file": "training/trillium/Mistral-7B-MaxText/README.md"}}
      >>> with_kernels(row, Slice("v6e-8"))[0].chip.attention_backward_kernels
      1
      >>> with_kernels({"source": "a talk"}, Slice("v6e-8"))[0] == Slice("v6e-8")
      True
    """
    source = row.get("source")
    file = str(source.get("file") or "") if isinstance(source, Mapping) else ""
    kernels = next((figures for folder, figures in _KERNELS if re.search(folder, file)), None)
    if kernels is None:
        return slice_, ()
    chip: Chip = replace(slice_.chip, **kernels)  # type: ignore[arg-type]
    return Slice(slice_.name, chip), ("tiles of attention as its recipe sets them",)
