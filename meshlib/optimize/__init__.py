"""Optimizers, learning rates, clipping, microbatches and loss scaling, written in operations alone."""

from __future__ import annotations

from meshlib.optimize.adafactor import AdafactorOptimizer, adafactor_decay_rate_adam, adafactor_decay_rate_pow
from meshlib.optimize.base import Optimizer, Update, clip_by_global_norm
from meshlib.optimize.loss_scale import DynamicLossScale
from meshlib.optimize.microbatch import serialize_training_step
from meshlib.optimize.rules import (
    AdamOptimizer,
    AdamWeightDecayOptimizer,
    AdamWOptimizer,
    LarsOptimizer,
    LionOptimizer,
    MomentumOptimizer,
    SgdOptimizer,
)
from meshlib.optimize.schedules import (
    constant,
    cosine_decay,
    exponential_decay,
    inverse_square_root,
    linear_decay,
    linear_warmup,
    piecewise,
    product,
    warmup_then_decay,
)

__all__ = [
    "AdafactorOptimizer",
    "AdamOptimizer",
    "AdamWOptimizer",
    "AdamWeightDecayOptimizer",
    "DynamicLossScale",
    "LarsOptimizer",
    "LionOptimizer",
    "MomentumOptimizer",
    "Optimizer",
    "SgdOptimizer",
    "Update",
    "adafactor_decay_rate_adam",
    "adafactor_decay_rate_pow",
    "clip_by_global_norm",
    "constant",
    "cosine_decay",
    "exponential_decay",
    "inverse_square_root",
    "linear_decay",
    "linear_warmup",
    "piecewise",
    "product",
    "serialize_training_step",
    "warmup_then_decay",
]
