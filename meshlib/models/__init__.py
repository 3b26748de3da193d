"""Transformers from one frozen config, written in layers alone.

config   TransformerConfig: dimensions, parts and precision
presets  the published ones by name
counts   parameters and FLOPs in closed form
"""

from __future__ import annotations

from meshlib.models.config import TransformerConfig
from meshlib.models.layouts import LAYOUTS, layout
from meshlib.models.model import Transformer, transformer
from meshlib.models.presets import PRESETS, preset
from meshlib.models.train import OPTIMIZERS, train_step

__all__ = [
    "LAYOUTS",
    "OPTIMIZERS",
    "PRESETS",
    "Transformer",
    "TransformerConfig",
    "layout",
    "preset",
    "train_step",
    "transformer",
]
