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
from meshlib import initializers, layers, optimize  # noqa: E402
from meshlib.errors import (  # noqa: E402
    FeedError,
    GraphError,
    LayoutError,
    MeshlibError,
    NotFiniteError,
    ProgramError,
    ShapeError,
    SliceError,
)
from meshlib.gradients import gradients  # noqa: E402
from meshlib.graph import Graph, Operation, Tensor, scope  # noqa: E402
from meshlib.lower import Balance, Collective, Program, check, collectives_table, explain, lower  # noqa: E402
from meshlib.ops.einsum import einsum, matmul  # noqa: E402
from meshlib.ops.elementwise import (  # noqa: E402
    abs,
    add,
    add_n,
    cast,
    cos,
    divide,
    equal,
    exp,
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
    multiply,
    negative,
    not_equal,
    pow,
    reciprocal,
    relu,
    rsqrt,
    sigmoid,
    sign,
    sin,
    sqrt,
    square,
    subtract,
    tanh,
    where,
)
from meshlib.ops.index import gather, one_hot, range, scatter_add  # noqa: E402
from meshlib.ops.loop import while_loop  # noqa: E402
from meshlib.ops.reduce import (  # noqa: E402
    log_softmax,
    reduce_logsumexp,
    reduce_max,
    reduce_mean,
    reduce_min,
    reduce_sum,
    softmax,
)
from meshlib.ops.shape import broadcast, pad, rename_dimension, reshape, slice, transpose  # noqa: E402
from meshlib.ops.sources import (  # noqa: E402
    constant,
    dropout,
    input,
    ones,
    random_normal,
    random_uniform,
    step,
    variable,
    zeros,
)
from meshlib.ops.state import assign, constrain, identity, stop_gradient  # noqa: E402
from meshlib.simulate import Simulation, simulate  # noqa: E402

__all__ = [
    "Balance",
    "Collective",
    "Dimension",
    "FeedError",
    "Graph",
    "GraphError",
    "LayoutError",
    "LayoutRules",
    "Mesh",
    "MeshlibError",
    "NotFiniteError",
    "Operation",
    "Program",
    "ProgramError",
    "Shape",
    "ShapeError",
    "Sharding",
    "Simulation",
    "SliceError",
    "Tensor",
    "abs",
    "add",
    "add_n",
    "assign",
    "broadcast",
    "cast",
    "check",
    "collectives_table",
    "constant",
    "constrain",
    "cos",
    "divide",
    "dropout",
    "einsum",
    "equal",
    "exp",
    "explain",
    "gather",
    "gradients",
    "greater",
    "greater_equal",
    "identity",
    "initializers",
    "input",
    "layers",
    "less",
    "less_equal",
    "log",
    "log_softmax",
    "logical_and",
    "logical_not",
    "logical_or",
    "lower",
    "matmul",
    "maximum",
    "minimum",
    "multiply",
    "negative",
    "not_equal",
    "one_hot",
    "ones",
    "optimize",
    "pad",
    "pow",
    "random_normal",
    "random_uniform",
    "range",
    "reciprocal",
    "reduce_logsumexp",
    "reduce_max",
    "reduce_mean",
    "reduce_min",
    "reduce_sum",
    "relu",
    "rename_dimension",
    "reshape",
    "rsqrt",
    "scatter_add",
    "scope",
    "sigmoid",
    "sign",
    "simulate",
    "sin",
    "slice",
    "softmax",
    "sqrt",
    "square",
    "step",
    "stop_gradient",
    "subtract",
    "tanh",
    "transpose",
    "variable",
    "where",
    "while_loop",
    "zeros",
]
