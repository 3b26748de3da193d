"""Attention kernel blocks of a MaxText configuration, as figures of the chip.

Splash attention iterates over blocks of queries and keys, with separate sizes for the forward pass, for layers with a
window, and for the backward pass, which is one kernel or two. A block is never longer than the sequence.

Source: AI-Hypercomputer/maxtext: src/maxtext/layers/attention_op.py, tpu_flash_attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from hardware.chips import Chip
from meshlib.models.maxtext.settings import Settings

FORWARD, BACKWARD = ("sa_block_q", "sa_block_kv"), ("sa_block_q_dkv", "sa_block_kv_dkv")
FUSED = "sa_use_fused_bwd_kernel"
# Keys of further blocks -> the key whose value is estimated for them.
FOLLOWING: Mapping[str, str] = MappingProxyType(
    {
        "sa_block_kv_compute": "sa_block_kv", "sa_block_kv_dkv_compute": "sa_block_kv_dkv",
        "sa_block_q_dq": "sa_block_q_dkv", "sa_block_kv_dq": "sa_block_kv_dkv",
    }
)  # fmt: skip


def chip_of(s: Settings, chip: Chip, length: int) -> Chip:
    """The chip with the configured blocks, for sequences of this length.

    Raises: GraphError for a block that is not an integer.
    """
    windowed = tuple(local_block(s, key) for key in FORWARD)
    figures: dict[str, Any] = {
        "attention_tile": tuple(min(s.size(key), length) for key in FORWARD),
        "attention_window_tile": tuple(min(block, length) for block in windowed),
        "attention_backward_tile": tuple(min(s.size(key), length) for key in BACKWARD),
    }
    if s.flag(FUSED):
        figures["attention_backward_kernels"] = 1
    return replace(chip, **figures)


def local_block(s: Settings, key: str) -> int:
    """The block of layers with a window; by default that of other layers."""
    local = f"local_{key}"
    return s.size(key) if s.values.get(local) is None else s.size(local)
