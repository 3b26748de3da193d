"""Construction of operations: arguments of public functions are checked and become operands and dims."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from layouts import Dimension, Shape
from meshlib.core.errors import LayoutError, ShapeError, nearest
from meshlib.core.graph import Graph, Operation, Tensor, checked_op_name, innermost
from meshlib.core.opdef import OpDef
from meshlib.core.source_lines import source_line


def build(kind: OpDef, inputs: Sequence[Tensor], attrs: Mapping[str, Any], name: str | None = None) -> Tensor:
    """Check the operands, add the operation to their graph and return its first output."""
    return build_all(kind, inputs, attrs, name)[0]


def build_all(
    kind: OpDef, inputs: Sequence[Tensor], attrs: Mapping[str, Any], name: str | None = None
) -> tuple[Tensor, ...]:
    """Check the operands, add the operation to their graph and return its outputs."""
    checked_op_name(name, kind.name)
    types = tuple(x.type for x in inputs)
    try:
        output_types = kind.shape(types, attrs)
    except (ShapeError, LayoutError) as fault:
        where = f"{kind.name}{f' {name!r}' if name else ''} ({source_line()})"
        raise ShapeError(f"{where}: {fault}", *inputs) from None
    graph = innermost(inputs, kind.name)
    outs = output_types if isinstance(output_types, tuple) else (output_types,)
    return graph.add(kind, [graph.adopt(x) for x in inputs], outs, attrs, name).outputs


def build_source(
    graph: Graph, kind: OpDef, attrs: Mapping[str, Any], name: str | None = None, exact_name: str | None = None
) -> Operation:
    """Add an operation without operands to `graph`."""
    output_types = kind.shape((), attrs)
    return graph.add(
        kind, (), output_types if isinstance(output_types, tuple) else (output_types,), attrs, name, exact_name
    )


def as_tensor(x: object, like: Tensor | None, what: str) -> Tensor:
    """`x` if it is a tensor, else a constant of the dtype of the tensor beside it."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, bool | int | float | np.generic) and like is not None:
        from meshlib.ops.control.sources import scalar

        return scalar(x, like)
    wanted = "a tensor" if like is None else "a tensor or a number"
    hint = "; make it a tensor by mtf.constant or mtf.input" if isinstance(x, np.ndarray | list) else ""
    if isinstance(getattr(x, "values", None), Tensor):  # of a mixture of experts
        hint = "; write its tensor, x.values"
    shown = f"{x.dtype.name}{list(x.shape)}" if isinstance(x, np.ndarray) else " ".join(f"{x!r:.80}".split())
    raise ShapeError(f"{what} ({source_line()}): expected {wanted}, got {type(x).__name__} {shown}{hint}")


def tensor(x: object, what: str) -> Tensor:
    """`x`, which must be a tensor."""
    return as_tensor(x, None, what)


def floats(x: object, what: str) -> Tensor:
    """`x`, which must be a float tensor."""
    operand = tensor(x, what)
    if not operand.dtype.is_wide_float:
        raise ShapeError(f"{what} ({source_line()}): needs a float tensor, got {operand}; cast it with mtf.cast")
    return operand


def as_dims(dims: object, what: str, among: Iterable[Tensor] = ()) -> tuple[Dimension, ...]:
    """Dims from a Dimension, a Shape, a list of Dimensions, or text: "batch:8;d:4" or names of dims of `among`."""
    if isinstance(dims, Dimension):
        return (dims,)
    if isinstance(dims, Shape):
        return tuple(dims)
    if isinstance(dims, str):
        dims = [part for part in dims.replace(",", ";").split(";") if part.strip()]
    if isinstance(dims, Sequence | set | frozenset):
        given = [_named_dim(d, what, among) if isinstance(d, str) else d for d in dims]
        for d in given:
            if not isinstance(d, Dimension):
                raise ShapeError(f"{what} ({source_line()}): expected Dimensions, got {type(d).__name__} {d!r:.80}")
        # The order of a set may change from run to run.
        ordered = given if isinstance(dims, Sequence) else sorted(given, key=lambda d: d.name)
        try:
            return tuple(Shape(tuple(ordered)))
        except LayoutError as fault:
            raise ShapeError(f"{what} ({source_line()}): {fault}") from None
    raise ShapeError(
        f"{what} ({source_line()}): expected a Dimension or a list of them, got {type(dims).__name__} {dims!r:.80}"
        + (f'; write mtf.Dimension("name", {dims})' if isinstance(dims, int) else "")
    )


def as_dim(dim: object, what: str) -> Dimension:
    """`dim` as one Dimension, from a Dimension or text such as "d:4"."""
    if isinstance(dim, Dimension):
        return dim
    if isinstance(dim, str):
        return _named_dim(dim, what, ())
    raise ShapeError(f"{what} ({source_line()}): expected a Dimension, got {type(dim).__name__} {dim!r:.80}")


def _named_dim(text: str, what: str, among: Iterable[Tensor]) -> Dimension:
    """A new dim from "name:size", or the dim of that name in `among`."""
    if ":" in text:
        try:
            (new_dim,) = Shape(text)
            return new_dim
        except (LayoutError, ValueError) as fault:
            raise ShapeError(f"{what} ({source_line()}): {text!r} is not a dim such as 'batch:8': {fault}") from None
    dim_of = {d.name: d for x in among for d in tensor(x, what).shape}
    known_dim = dim_of.get(text.strip())
    if known_dim is None:
        hint = nearest(text, dim_of) if dim_of else f"; give its size too, such as '{text}:8'"
        raise ShapeError(f"{what} ({source_line()}): no dim {text!r}{hint}")
    return known_dim
