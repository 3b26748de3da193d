"""Functions of the user: `slicewise` on blocks, for operations that the library lacks, and Print on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from layouts import Dimension, Shape
from meshlib.core.arguments import at, is_masked, items, number
from meshlib.core.dtypes import as_dtype
from meshlib.core.errors import GraphError, ProgramError, ShapeError
from meshlib.core.graph import Operation, Tensor, TensorType
from meshlib.core.opdef import Array, Block, Factor, Kind, Linear, Role, Storage, Work, operation
from meshlib.ops.building import as_dims, build, named_factors, no_work, tensor, union


def _shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    out: Shape = attrs["shape"]
    # A dim is the same in all operands; in the result its size may differ, unless it is split.
    everything = union([t.shape for t in types])
    for d in attrs["splittable"]:
        if d not in everything or d not in out:
            raise ShapeError(f"splittable dim {d} must be in the result {out} and in an operand, with that size")
    return TensorType(out, attrs["dtype"])


def _roles(op: Operation) -> tuple[Factor, ...]:
    names = dict.fromkeys(d.name for t in (*op.inputs, *op.outputs) for d in t.shape)
    splittable = {d.name for d in op.attrs["splittable"]}
    return named_factors(op, {n: Role.WHOLE for n in names if n not in splittable})


def _local(block: Block, *arrays: Array) -> Array:
    operands = [x.view() for x in arrays]
    for x in operands:
        x.flags.writeable = False
    try:
        given = block.attrs["fn"](*operands)
    except Exception as fault:
        fault.add_note(f"in the function of {block.operation}")
        raise
    if is_masked(given):
        raise ProgramError(
            f"{block.operation}: the function returned a masked array, which has elements without a value; give them "
            "one, as in array.filled(0)"
        )
    try:
        result = np.asarray(given)
    except ValueError:  # ragged rows
        result = np.asarray(given, dtype=object)
    out = block.result()
    if result.shape != out.shape or not np.can_cast(result.dtype, out.dtype, "same_kind"):
        taken = ", ".join(f"{x.dtype}{list(x.shape)}" for x in operands)
        raise ProgramError(
            f"{block.operation}: the function made {result.dtype}{list(result.shape)} of {taken}, "
            f"but the block of its result {block.operation.output} is {out.dtype}{list(out.shape)}"
        )
    np.copyto(out, result, casting="same_kind")
    return out


def _grad(op: Operation, dy: Tensor) -> Sequence[Tensor | None]:
    rule = op.attrs["grad_function"]
    if rule is None:
        raise GraphError(f"{op} has no gradient: NumPy functions are not differentiated; give it a grad_function")
    cotangents = items(rule(op, [dy]), f"{op}: grad_function", "what it returns")
    if len(cotangents) != len(op.inputs):
        raise GraphError(f"{op}: grad_function returned {len(cotangents)} cotangents for {len(op.inputs)} operands")
    for x, dx in zip(op.inputs, cotangents, strict=True):
        if dx is not None and tensor(dx, "grad_function").type != x.type:
            raise GraphError(f"{op}: grad_function returned the cotangent {dx} for the operand {x}; types must agree")
    return cotangents


def _work(ins: tuple[TensorType, ...], out: TensorType, attrs: Mapping[str, Any]) -> Work:
    if attrs["vpu_ops"] is not None:
        ops = int(number(attrs["vpu_ops"]([t.shape for t in ins], out.shape), "slicewise", "what vpu_ops returns"))
        if ops < 0:
            raise GraphError(f"{at('slicewise')}: what vpu_ops returns must not be negative, got {ops}")
    else:
        ops = sum(t.shape.size for t in ins) + out.shape.size
    return Work(0, ops)


SLICEWISE = operation(
    "slicewise",
    kind=Kind.INDEXED,  # access pattern unknown: a kernel of its own on the vector unit
    shape=_shape,
    roles=_roles,
    local=_local,
    grad=_grad,
    work=_work,
)


def slicewise(
    fn: Callable[..., Any],
    xs: Sequence[Tensor],
    output_shape: Shape | Sequence[Dimension] | None = None,
    output_dtype: object | None = None,
    splittable_dims: Sequence[Dimension] | None = None,
    grad_function: Callable[..., Sequence[Tensor | None]] | None = None,
    name: str | None = None,
    vpu_ops: Callable[[Sequence[Shape], Shape], int] | None = None,
) -> Tensor:
    """A NumPy function `fn` applied by each device to its blocks of `xs`.

    Args:
      fn: takes NumPy arrays, which it must not change; returns the block of the result. Axes follow each tensor's dims.
        Its result on a block must equal that part of its result on the whole array: blocks may have any size along
        `splittable_dims` (the fast executor calls it once on all blocks), and are unsplit along all others. bfloat16
        is passed as float32, and the result is rounded.
      xs: the operands.
      output_shape, output_dtype: shape and dtype of the result; by default those of the first operand.
      splittable_dims: dims of the result and an operand along which fn treats each index independently. All others
        are gathered on every device first; by default all are.
      grad_function: (operation, [cotangent of the result]) -> a cotangent or None per operand, as tensors;
        `operation.inputs` and `operation.outputs` are tensors. Without it, requesting a gradient is an error.
      name: of the operation, in listings.
      vpu_ops: (shapes of the operands' blocks, shape of the result's block) -> lane operations of one call; by default
        one per element of operands and result.
    Returns: the result.
    Raises: ShapeError for dims that do not fit; GraphError for a gradient without `grad_function`; ProgramError at run
      time for a result of another shape or kind of dtype than declared.
    Example:
      >>> import numpy as np
      >>> import meshlib as mtf
      >>> batch, n = mtf.Dimension("batch", 2), mtf.Dimension("n", 3)
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [batch, n])
      ...     y = mtf.slicewise(lambda x: np.median(x, axis=1), [x], [batch], splittable_dims=[batch])
      >>> program = mtf.lower({"y": y}, mesh="p:2", layout="batch:p")
      >>> mtf.simulate(program).step(x=[[1, 5, 2], [9, 7, 8]])["y"].tolist()
      [2.0, 8.0]
    """
    what = "slicewise"
    for function, argument in ((fn, "fn"), (grad_function, "grad_function"), (vpu_ops, "vpu_ops")):
        if not callable(function) and (function is not None or argument == "fn"):
            raise GraphError(f"{at(what)}: {argument} must be a function, got {function!r:.80}")
    operands = [tensor(x, what) for x in items(xs, what, "xs")]
    if not operands:
        raise ShapeError(f"{at(what)}: xs must be a non-empty list of tensors, got []")
    first = operands[0]
    attrs = {
        "fn": fn,
        "shape": first.shape if output_shape is None else Shape(as_dims(output_shape, f"{what} output_shape")),
        "dtype": first.dtype if output_dtype is None else as_dtype(output_dtype),
        "splittable": () if splittable_dims is None else as_dims(splittable_dims, f"{what} splittable_dims"),
        "grad_function": grad_function,
        "vpu_ops": vpu_ops,
    }
    return build(SLICEWISE, operands, attrs, name)


def _print_roles(op: Operation) -> tuple[Factor, ...]:
    x, *data = op.inputs
    return named_factors(op, {d.name: Role.WHOLE for t in data for d in t.shape if d.name not in x.shape})


def _show(op: Operation, data: Sequence[Array]) -> None:
    for t, value in zip(op.inputs[1:], data, strict=True):
        print(f"{op.attrs['message']}{t} = {value}", flush=True)


PRINT = operation(
    "print",
    kind=Kind.VIEW,
    shape=lambda types, attrs: types[0],
    roles=_print_roles,
    local=lambda block, x, *data: x,
    grad=lambda op, dy: [dy, *(None for _ in op.inputs[1:])],
    linear=lambda op: Linear((0,)),
    work=no_work,  # passes x through; the host's work is not counted
    storage=Storage.ALIAS,
    exact=True,
    show=_show,
)


def Print(x: Tensor, data: Sequence[Tensor], message: str = "", name: str | None = None) -> Tensor:
    """`x`, with the values of `data` printed to standard output whenever a simulation computes it.

    Both executors print each value unsharded, once per step (in a loop once per trip), whatever the layout. A line is
    the message, the tensor with its type, " = ", and the value as NumPy prints it. If `x` is unused nothing is printed;
    equal prints are merged. Gradients pass through without being printed, and recomputation does not print again.
    `mtf.verify` prints in each run. Estimates count only the resharding of `data`.

    Args:
      x: any tensor.
      data: the tensors to print. Their dims that x lacks are gathered on every device.
      message: the beginning of each line.
      name: of the operation, in listings.
    Returns: x.
    Raises: GraphError for a message that is not a str.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [mtf.Dimension("d", 4)])
      ...     y = mtf.Print(x * 2.0, [x, mtf.reduce_max(x, name="top")], "step: ")
      >>> program = mtf.lower({"y": y}, mesh="p:2", layout="d:p")
      >>> mtf.simulate(program).step(x=[1, 2, 3, 4])["y"].tolist()
      step: x: f32[d:4] = [1. 2. 3. 4.]
      step: top: f32[] = 4.0
      [2.0, 4.0, 6.0, 8.0]
    """
    if not isinstance(message, str):
        raise GraphError(f"{at('Print')}: message must be a text, got {type(message).__name__} {message!r:.80}")
    operands = [tensor(t, "Print") for t in (x, *items(data, "Print", "data"))]
    return build(PRINT, operands, {"message": message}, name)
