"""Settings of published recipes that rows leave out: kernels, parts of the loss, gradients of sorted tokens.

They are looked up by the source of a row, a folder of AI-Hypercomputer/tpu-recipes, never by its name; a row that has
some says so in `Run.assumed`.
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
# xla_tpu_scoped_vmem_limit_kib is 80 or 96 MiB, of which a core of v5p has 64.
_CORE: dict[str, int | Tile] = {"scoped_vmem_bytes": 64 << 20}
# (recipe folder, `Chip` fields that it sets); the first match counts.
_KERNELS: tuple[tuple[str, dict[str, int | Tile]], ...] = (
    (r"trillium/(Llama3\.1-(8|70)B|Mistral-7B)", _JOINT),
    (r"trillium/Mixtral-8x(7|22)B", {"attention_tile": (2048, 512)}),
    (r"trillium/Gemma3", {"attention_tile": (1024, 1024), "attention_backward_tile": (1024, 1024)}),
    (r"v5p/(Llama4|Llama3\.1|DeepSeek3)", _JOINT | _CORE | {"attention_backward_kernels": 2}),
    (r"v5p/Mixtral", _CORE),
    (r"ironwood/gemma4-(26b|2b|4b)", {"attention_tile": (1024, 1024), "attention_backward_tile": (1024, 1024)}),
    (r"ironwood/gemma4-31b", {"attention_backward_tile": (1024, 2048)}),
    (r"ironwood/(gpt-oss|qwen3)", {"attention_tile": (1024, 1024)}),
    (r"ironwood/llama3\.1-405b/\w+-fp8", {"attention_tile": (1024, 2048)}),
    (r"ironwood/llama3\.1-70b/8k-fp8", {"attention_tile": (1024, 1024)}),
    (r"ironwood/llama3\.1-70b/128k", {"attention_backward_tile": (1024, 4096)}),
)
# (recipe folder, `num_vocab_tiling`)
_LOSS_BLOCKS: tuple[tuple[str, int], ...] = (
    (r"trillium/Gemma3", 16),
    (r"ironwood/gemma4-(2b|4b|31b)", 8),
    (r"ironwood/llama3\.1-(405b/\w+-bf16|70b/128k)|v5p/Llama3\.1-405B", 4),
)
# Recipes with `act_` and `weight_quantization_calibration_method="fixed,-224,224"` (run_recipe.sh): all of v7 in fp8
# but the one of 128k tokens.
_BOUNDED = r"ironwood/[^/]+/[48]k-fp8"
# Recipes that leave the gradient of sorted tokens to JAX, without `use_custom_sort_vjp`.
_SORTED_BY_JAX = r"v5p/(Llama4|Mixtral)"
# Recipes with JAX 0.7.0, whose libtpu (0.0.19.1) sums blocks over a whole torus, and without a flag that keeps gathers.
_TORUS_SUMS = r"v5p/(DeepSeek3|Llama3\.1-405B|Llama4-Scout)"


def with_kernels(row: Row, slice_: Slice) -> tuple[Slice, tuple[str, ...]]:
    """The slice of a row with the attention kernels of its recipe, and the note that says so.

    Example:
      >>> row = {"source": {"file": "training/trillium/Mistral-7B-MaxText/README.md"}}
      >>> with_kernels(row, Slice("v6e-8"))[0].chip.attention_backward_kernels
      1
      >>> with_kernels({"source": "a talk"}, Slice("v6e-8"))[0] == Slice("v6e-8")
      True
    """
    file = _file(row)
    kernels = next((figures for folder, figures in _KERNELS if re.search(folder, file)), None)
    if kernels is None:
        return slice_, ()
    chip: Chip = replace(slice_.chip, **kernels)  # type: ignore[arg-type]
    return Slice(slice_.name, chip), ("kernels as its recipe sets them",)


def loss_blocks(row: Row) -> tuple[int, tuple[str, ...]]:
    """The number of parts in which the recipe of a row computes logits and loss, and the note that says so.

    >>> loss_blocks({"source": {"file": "training/trillium/Gemma3-12B-MaxText/v6e-256/README.md"}})
    (16, ('loss in 16 parts as its recipe sets them',))
    >>> loss_blocks({"source": "a talk"})
    (1, ())
    """
    blocks = next((parts for folder, parts in _LOSS_BLOCKS if re.search(folder, _file(row))), 1)
    return blocks, () if blocks == 1 else (f"loss in {blocks} parts as its recipe sets them",)


def row_sums(row: Row) -> str:
    """`Routing.row_sums` of the recipe of a row.

    >>> row_sums({"source": {"file": "training/v5p/Mixtral-8X7B-Maxtext"}}), row_sums({"source": "a talk"})
    ('scatter', 'gather')
    """
    return "scatter" if re.search(_SORTED_BY_JAX, _file(row)) else "gather"


def torus_sums(row: Row) -> bool:
    """`Compiler.torus_sums` of the recipe of a row.

    >>> torus_sums({"source": {"file": "training/v5p/DeepSeek3-671B-MaxText"}}), torus_sums({"source": "a talk"})
    (True, False)
    """
    return bool(re.search(_TORUS_SUMS, _file(row)))


def bound(row: Row) -> float | None:
    """`Numerics.bound` of the recipe of a row.

    >>> bound({"source": {"file": "training/ironwood/qwen3-235b-a22b/4k-fp8-tpu7x-4x8x8"}}), bound({"source": "a talk"})
    (224.0, None)
    """
    return 224.0 if re.search(_BOUNDED, _file(row)) else None


def _file(row: Row) -> str:
    """The file that a row's time was read in, or ""."""
    source = row.get("source")
    return str(source.get("file") or "") if isinstance(source, Mapping) else ""
