"""meshlib: plan, prove and price model-parallel programs before you rent a pod.

Write a program once in named dimensions; say how the dimensions are laid over a mesh of TPU cores; see what each core
runs, which collectives were inserted and why, what they cost, and the numbers, computed shard by shard.
"""

from __future__ import annotations

from pathlib import Path as _Path

import hardware as _hardware
import layouts as _layouts


def _check_own_packages() -> None:
    # `hardware` and `layouts` are common names; a stray module on the path would otherwise fail in odd ways.
    root = _Path(__file__).resolve().parent.parent
    for package in (_hardware, _layouts):
        found = _Path(package.__file__ or "(namespace package)").resolve()
        if found != root / package.__name__ / "__init__.py":
            raise ImportError(
                f"meshlib needs its own package '{package.__name__}', but {found} shadows it; "
                "rename that file or take its folder off the path"
            )


_check_own_packages()

from layouts import (  # noqa: E402
    Dimension,
    LayoutRules,
    Mesh,
    Shape,
    Sharding,
)
from meshlib import initializers, layers, models, optimize, testing  # noqa: E402
from meshlib.batches import Batches  # noqa: E402
from meshlib.checkpoint import load, save  # noqa: E402
from meshlib.differentiation import gradients  # noqa: E402
from meshlib.errors import (  # noqa: E402
    CheckpointError,
    FeedError,
    GraphError,
    LayoutError,
    MeshlibError,
    NotFiniteError,
    ProgramError,
    ShapeError,
    SliceError,
)
from meshlib.estimation import Estimate, Physics, estimate  # noqa: E402
from meshlib.estimation.sweep import Scaling, scaling  # noqa: E402
from meshlib.graph import Graph, Operation, Tensor, scope  # noqa: E402
from meshlib.lowering import (  # noqa: E402
    Balance,
    Collective,
    Program,
    Session,
    check,
    collectives_table,
    explain,
    lower,
)
from meshlib.ops.activations import elu, gelu, leaky_relu, selu, silu, softplus, swish  # noqa: E402
from meshlib.ops.attention import attention  # noqa: E402
from meshlib.ops.cumulative import cumprod, cumsum  # noqa: E402
from meshlib.ops.dims import anonymize, anonymous_shape, combined_dimension, replace_dimensions  # noqa: E402
from meshlib.ops.einsum import einsum, matmul  # noqa: E402
from meshlib.ops.elementwise import (  # noqa: E402
    abs,
    add,
    add_n,
    cast,
    ceil,
    clip_by_value,
    cos,
    divide,
    equal,
    erf,
    exp,
    expm1,
    floor,
    floordiv,
    greater,
    greater_equal,
    less,
    less_equal,
    log,
    logical_and,
    logical_not,
    logical_or,
    maximum,
    minimum,
    mod,
    multiply,
    negative,
    not_equal,
    pow,
    reciprocal,
    relu,
    round,
    rsqrt,
    sigmoid,
    sign,
    sin,
    sqrt,
    square,
    squared_difference,
    sub,
    subtract,
    tanh,
    to_bfloat16,
    to_float,
    to_int32,
    where,
)
from meshlib.ops.index import dynamic_shift, gather, one_hot, range, scatter_add  # noqa: E402
from meshlib.ops.logic import cond, logical_xor  # noqa: E402
from meshlib.ops.loop import scan, while_loop  # noqa: E402
from meshlib.ops.pooling import pool  # noqa: E402
from meshlib.ops.quantized import quantized_einsum  # noqa: E402
from meshlib.ops.ranking import (  # noqa: E402
    argmax,
    argsort,
    nth_largest_element,
    nth_smallest_element,
    sort,
    top_1,
    top_k,
)
from meshlib.ops.reduce import (  # noqa: E402
    log_softmax,
    reduce_all,
    reduce_any,
    reduce_logsumexp,
    reduce_max,
    reduce_mean,
    reduce_min,
    reduce_sum,
    softmax,
)
from meshlib.ops.remat import Remat  # noqa: E402
from meshlib.ops.rewrite import custom_gradient, recompute_grad  # noqa: E402
from meshlib.ops.sampling import sample_with_temperature  # noqa: E402
from meshlib.ops.shape import broadcast, rename_dimension, reshape, transpose  # noqa: E402
from meshlib.ops.sources import (  # noqa: E402
    constant,
    dropout,
    input,
    ones,
    ones_like,
    random_normal,
    random_uniform,
    step,
    variable,
    zeros,
    zeros_like,
)
from meshlib.ops.stacking import dynamic_slice, stack, unstack, update_slice  # noqa: E402
from meshlib.ops.state import assign, assign_add, assign_sub, constrain, identity, stop_gradient  # noqa: E402
from meshlib.ops.window import (  # noqa: E402
    concat,
    halo_exchange,
    left_halo_exchange,
    pad,
    shift,
    slice,
    split,
    strided_slice,
)
from meshlib.optimize import serialize_training_step  # noqa: E402
from meshlib.program.comparison import Comparison, compare  # noqa: E402
from meshlib.simulation import Simulation, simulate  # noqa: E402
from meshlib.verification import Verification, verify  # noqa: E402

__all__ = [
    "Balance",
    "Batches",
    "CheckpointError",
    "Collective",
    "Comparison",
    "Dimension",
    "Estimate",
    "FeedError",
    "Graph",
    "GraphError",
    "LayoutError",
    "LayoutRules",
    "Mesh",
    "MeshlibError",
    "NotFiniteError",
    "Operation",
    "Physics",
    "Program",
    "ProgramError",
    "Remat",
    "Scaling",
    "Session",
    "Shape",
    "ShapeError",
    "Sharding",
    "Simulation",
    "SliceError",
    "Tensor",
    "Verification",
    "abs",
    "add",
    "add_n",
    "anonymize",
    "anonymous_shape",
    "argmax",
    "argsort",
    "assign",
    "assign_add",
    "assign_sub",
    "attention",
    "broadcast",
    "cast",
    "ceil",
    "check",
    "clip_by_value",
    "collectives_table",
    "combined_dimension",
    "compare",
    "concat",
    "cond",
    "constant",
    "constrain",
    "cos",
    "cumprod",
    "cumsum",
    "custom_gradient",
    "divide",
    "dropout",
    "dynamic_shift",
    "dynamic_slice",
    "einsum",
    "elu",
    "equal",
    "erf",
    "estimate",
    "exp",
    "explain",
    "expm1",
    "floor",
    "floordiv",
    "gather",
    "gelu",
    "gradients",
    "greater",
    "greater_equal",
    "halo_exchange",
    "identity",
    "initializers",
    "input",
    "layers",
    "leaky_relu",
    "left_halo_exchange",
    "less",
    "less_equal",
    "load",
    "log",
    "log_softmax",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "lower",
    "matmul",
    "maximum",
    "minimum",
    "mod",
    "models",
    "multiply",
    "negative",
    "not_equal",
    "nth_largest_element",
    "nth_smallest_element",
    "one_hot",
    "ones",
    "ones_like",
    "optimize",
    "pad",
    "pool",
    "pow",
    "quantized_einsum",
    "random_normal",
    "random_uniform",
    "range",
    "reciprocal",
    "recompute_grad",
    "reduce_all",
    "reduce_any",
    "reduce_logsumexp",
    "reduce_max",
    "reduce_mean",
    "reduce_min",
    "reduce_sum",
    "relu",
    "rename_dimension",
    "replace_dimensions",
    "reshape",
    "round",
    "rsqrt",
    "sample_with_temperature",
    "save",
    "scaling",
    "scan",
    "scatter_add",
    "scope",
    "selu",
    "serialize_training_step",
    "shift",
    "sigmoid",
    "sign",
    "silu",
    "simulate",
    "sin",
    "slice",
    "softmax",
    "softplus",
    "sort",
    "split",
    "sqrt",
    "square",
    "squared_difference",
    "stack",
    "step",
    "stop_gradient",
    "strided_slice",
    "sub",
    "subtract",
    "swish",
    "tanh",
    "testing",
    "to_bfloat16",
    "to_float",
    "to_int32",
    "top_1",
    "top_k",
    "transpose",
    "unstack",
    "update_slice",
    "variable",
    "verify",
    "where",
    "while_loop",
    "zeros",
    "zeros_like",
]
