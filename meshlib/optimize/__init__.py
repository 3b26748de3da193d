"""Optimizers, learning rates, clipping, microbatches and loss scaling, composed of operations alone."""

import typing as _typing

if _typing.TYPE_CHECKING:
    from meshlib.optimize.adafactor import AdafactorOptimizer as AdafactorOptimizer
    from meshlib.optimize.adafactor import adafactor_decay_rate_adam as adafactor_decay_rate_adam
    from meshlib.optimize.adafactor import adafactor_decay_rate_pow as adafactor_decay_rate_pow
    from meshlib.optimize.averages import averaged as averaged
    from meshlib.optimize.averages import moving_averages as moving_averages
    from meshlib.optimize.base import Optimizer as Optimizer
    from meshlib.optimize.base import Update as Update
    from meshlib.optimize.base import clip_by_global_norm as clip_by_global_norm
    from meshlib.optimize.loss_scale import DynamicLossScale as DynamicLossScale
    from meshlib.optimize.microbatch import serialize_training_step as serialize_training_step
    from meshlib.optimize.rules import NORMS_AND_BIASES as NORMS_AND_BIASES
    from meshlib.optimize.rules import AdamOptimizer as AdamOptimizer
    from meshlib.optimize.rules import AdamWeightDecayOptimizer as AdamWeightDecayOptimizer
    from meshlib.optimize.rules import AdamWOptimizer as AdamWOptimizer
    from meshlib.optimize.rules import LambOptimizer as LambOptimizer
    from meshlib.optimize.rules import LarsOptimizer as LarsOptimizer
    from meshlib.optimize.rules import LionOptimizer as LionOptimizer
    from meshlib.optimize.rules import MomentumOptimizer as MomentumOptimizer
    from meshlib.optimize.rules import SgdOptimizer as SgdOptimizer
    from meshlib.optimize.schedules import constant as constant
    from meshlib.optimize.schedules import cosine_decay as cosine_decay
    from meshlib.optimize.schedules import exponential_decay as exponential_decay
    from meshlib.optimize.schedules import inverse_square_root as inverse_square_root
    from meshlib.optimize.schedules import linear_decay as linear_decay
    from meshlib.optimize.schedules import linear_scaling as linear_scaling
    from meshlib.optimize.schedules import linear_warmup as linear_warmup
    from meshlib.optimize.schedules import piecewise as piecewise
    from meshlib.optimize.schedules import polynomial_decay as polynomial_decay
    from meshlib.optimize.schedules import product as product
    from meshlib.optimize.schedules import warmup_then_decay as warmup_then_decay
else:
    from meshlib.core.explained_calls import explained_calls as _explained_calls
    from meshlib.core.foreign_names import of_module as _of_module
    from meshlib.core.lazy_imports import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(__name__, _explained_calls(__name__), _of_module)
