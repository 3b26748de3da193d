"""Definition of element-wise operations: dtype rules, broadcasting by name, and docstrings with examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from layouts import Dimension, Shape
from meshlib.core.dtypes import BOOL, INT32, DType
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Tensor, TensorType
from meshlib.core.opdef import EVERY, Array, Block, GradRule, Kind, OpDef, ShapeRule, Work, operation
from meshlib.ops.building import align, named_factors, same_dtype, union


class Unary(Protocol):
    """A public operation of one tensor."""

    def __call__(self, x: Tensor, name: str | None = None) -> Tensor: ...


class Binary(Protocol):
    """A public operation of two tensors, or of one and a number."""

    def __call__(
        self,
        x1: Tensor | float,
        x2: Tensor | float,
        output_shape: Shape | Sequence[Dimension] | None = None,
        name: str | None = None,
    ) -> Tensor: ...


def reduce_to(dy: Tensor, shape: Shape) -> Tensor:
    """The cotangent of an operand that was broadcast: sum over the dims it lacks."""
    from meshlib.ops.pointwise.reductions import reduce_sum

    return dy if dy.shape == shape else reduce_sum(dy, output_shape=shape)


def dtype_rule(fits: Callable[[DType], bool], needed: str, result_dtype: DType | None = None) -> ShapeRule:
    """The rule of a result with all dims of the operands, in their dtype, which must fit, or in `result_dtype`."""

    def shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
        out, dtype = union([t.shape for t in types]), same_dtype(types)
        if not fits(dtype):
            raise ShapeError(f"needs {needed.format(dtype.name)}")
        return TensorType(out, result_dtype or dtype)

    return shape


# The dtypes that operations take, with the words of their errors.
FLOAT = dtype_rule(lambda dtype: dtype.is_wide_float, "a float operand, got {}; cast it with mtf.cast")
NUMBER = dtype_rule(lambda dtype: dtype.computes, "a number operand, got {}; cast it with mtf.cast")
FLAG = dtype_rule(lambda dtype: dtype is BOOL, "a bool operand, got {}; cast it with mtf.cast")
FLOATS = dtype_rule(lambda dtype: dtype.is_wide_float, "float operands, got {}; cast them with mtf.cast")
NUMBERS = dtype_rule(lambda dtype: dtype.computes, "numbers, got {}; cast them, or use mtf.logical_and, mtf.logical_or")
ORDERED = dtype_rule(lambda dtype: dtype is not BOOL, "numbers, got {}; use mtf.logical_and, mtf.logical_or")
INTEGERS = dtype_rule(lambda dtype: dtype is INT32, "int32 operands, got {}; cast them with mtf.cast")
FLAGS = dtype_rule(lambda dtype: dtype is BOOL, "bool operands, got {}; compare first, as in mtf.greater(x, 0)")
ANY = dtype_rule(lambda dtype: True, "")
COMPARED = dtype_rule(lambda dtype: True, "", result_dtype=BOOL)


def define(
    name: str, function: Callable[..., Any], grad: GradRule, shape: ShapeRule, ops: int = 1, **traits: Any
) -> OpDef:
    """Register an element-wise operation; further `traits` are fields of its `OpDef`.

    `function` takes the operands' blocks, broadcast by name, and `out`; `ops` are its lane operations per element.
    """

    def local(block: Block, *arrays: Array) -> Array:
        to, out = block.out.shape.names, block.result()
        views = [
            x if (names := t.shape.names) == to else align(x, names, to)
            for x, t in zip(arrays, block.inputs, strict=True)
        ]
        function(*views, out=out)
        return out

    def work(ins: tuple[TensorType, ...], out: TensorType, attrs: Mapping[str, Any]) -> Work:
        return Work(0, ops * max(1, len(ins) - 1) * out.shape.size)

    fields: dict[str, Any] = {"roles": named_factors, "overwrites": EVERY, "local": local, **traits}
    return operation(name, kind=Kind.ELEMENTWISE, shape=shape, grad=grad, work=work, **fields)


def described(
    doc: str, name: str, function: Callable[..., Any], operands: Mapping[str, Sequence[object]], arguments: str
) -> str:
    """The docstring of an operation, with an example whose result its own function gives."""
    dtypes = {bool: "bool", int: "int32", float: "float32"}
    arrays = [np.array(x, dtypes[type(x[0])]) for x in operands.values()]
    out = np.empty_like(function(*arrays) if isinstance(function, np.ufunc) else arrays[0])
    function(*arrays, out=out)
    dtype = "" if arrays[0].dtype == np.float32 else f', "{arrays[0].dtype}"'
    inputs = ", ".join(f'mtf.input("{x}", "d:2"{dtype})' for x in operands)
    feeds = ", ".join(f"{x}={list(values)}" for x, values in operands.items())
    text = f"""{doc}.

Args:
{arguments}
  name: of the operation.
Returns: a tensor with the dims of {" and ".join(operands)}.
Example:
  >>> import meshlib as mtf
  >>> with mtf.Graph():
  ...     y = mtf.{name}({inputs})
  >>> print(mtf.simulate(mtf.lower({{"y": y}})).step({feeds})["y"]{".round(4)" * (out.dtype.kind == "f")})
  {out.round(4) if out.dtype.kind == "f" else out}"""
    return text.replace("\n", "\n    ")


def broadcast_to(y: Tensor, output_shape: Shape | Sequence[Dimension] | None) -> Tensor:
    """`y` with the dims of `output_shape`, if given."""
    from meshlib.ops.movement.shape import broadcast

    return y if output_shape is None else broadcast(y, output_shape)
