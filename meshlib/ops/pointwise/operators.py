"""Operators of tensors: `x + y`, `-x`, `x < y`. Importing this module attaches them."""

from __future__ import annotations

from collections.abc import Callable

from meshlib.core.arguments import at
from meshlib.core.errors import GraphError
from meshlib.core.graph import Tensor
from meshlib.ops.pointwise.arithmetic import (
    abs,
    add,
    divide,
    floordiv,
    greater,
    greater_equal,
    less,
    less_equal,
    logical_and,
    logical_not,
    logical_or,
    mod,
    multiply,
    negative,
    pow,
    subtract,
)
from meshlib.ops.pointwise.elementwise import Binary


def _no_matmul(x: Tensor, y: object) -> Tensor:
    raise GraphError(
        f"{at('@')}: dims are matched by name, so name the remaining ones: mtf.einsum([x, y], output_shape=...)"
    )


def _swapped(function: Binary) -> Callable[[Tensor, float], Tensor]:
    return lambda x, y: function(y, x)


for _name, _function in {
    "add": add,
    "sub": subtract,
    "mul": multiply,
    "truediv": divide,
    "floordiv": floordiv,
    "mod": mod,
    "pow": pow,
}.items():
    setattr(Tensor, f"__{_name}__", _function)
    setattr(Tensor, f"__r{_name}__", _swapped(_function))

for _name, _method in {
    "abs": abs,
    "invert": logical_not,
    "and": logical_and,
    "or": logical_or,
    "matmul": _no_matmul,
    "neg": negative,
    "lt": less,
    "le": less_equal,
    "gt": greater,
    "ge": greater_equal,
}.items():
    setattr(Tensor, f"__{_name}__", _method)
