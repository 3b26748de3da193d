"""What operations are written with: construction from checked arguments, and rules shared by many records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import gcd, prod
from typing import Any

import numpy as np

from hardware.core import FLOAT32_PASSES
from layouts import Dimension, Shape
from meshlib.core.dtypes import BOOL, DType
from meshlib.core.errors import LayoutError, ShapeError, nearest
from meshlib.core.graph import Graph, Operation, Tensor, TensorType, checked_op_name, innermost
from meshlib.core.opdef import Array, Factor, OpDef, Role, Work
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


def no_work(ins: Sequence[TensorType], out: TensorType, attrs: Mapping[str, Any]) -> Work:
    """Work of operations that no core executes: inputs, variables, aliases, renames, and copies to or from the host."""
    return Work(0, 0)


def mxu_passes(ins: Sequence[TensorType], attrs: Mapping[str, Any]) -> int:
    """Bfloat16 passes of a product: 1, or 6 for wide operands at "highest" precision, as XLA's HIGHEST does (the 3
    largest products of 3-way split operands, doubled for accuracy)."""
    return FLOAT32_PASSES if attrs["precision"] == "highest" and ins[0].dtype.itemsize >= 4 else 1


def vector_work(ins: Sequence[TensorType], out: TensorType, attrs: Mapping[str, Any]) -> Work:
    """Work of one lane operation per element of the result."""
    return Work(0, out.shape.size)


def not_differentiable(op: Operation, dy: Tensor) -> Sequence[Tensor | None]:
    """The gradient rule of operations that pass no gradient: comparisons, indices, random numbers."""
    return [None] * len(op.inputs)


def union(shapes: Sequence[Shape]) -> Shape:
    """The dims of all shapes, in order of first appearance, or in the order of a shape that has all of them.

    Raises: ShapeError if one name has two sizes.
    """
    dims: dict[str, Dimension] = {}
    for s in shapes:
        for d in s:
            if dims.setdefault(d.name, d).size != d.size:
                raise ShapeError(
                    f"dim '{d.name}' has two sizes, {dims[d.name].size} and {d.size}; "
                    "rename one with mtf.rename_dimension, or make them equal"
                )
    for s in shapes:
        if len(s) == len(dims):
            return s
    return Shape(list(dims.values()))


def same_dtype(types: Sequence[TensorType]) -> DType:
    """The common dtype; mixed dtypes are an error, because a silent cast would hide its cost."""
    dtypes = list(dict.fromkeys(t.dtype for t in types))
    if len(dtypes) > 1:
        names = " and ".join(d.name for d in dtypes)
        floats = [d for d in dtypes if d.is_float]
        whole = "; positions go into mtf.gather or mtf.one_hot" if floats and len(floats) < len(dtypes) else ""
        raise ShapeError(
            f"operands have dtypes {names}; cast one, as in mtf.cast(x, '{(floats or dtypes)[0].name}'){whole}"
        )
    return dtypes[0]


def check_adds(dtype: DType) -> None:
    """Raise ShapeError for a dtype that the vector unit cannot add."""
    if not dtype.computes:
        why = "numbers" if dtype is BOOL else "numbers to compute with"
        wide = "float32" if dtype.is_float else "int32"
        raise ShapeError(f"needs {why}, got {dtype.name}; cast first, as in mtf.cast(x, '{wide}')")


def named_factors(op: Operation, special: Mapping[str, Role] | None = None) -> tuple[Factor, ...]:
    """Factors by name: dims of one name are one factor; PARALLEL unless `special` gives another role."""
    inputs, outputs = tuple([x.shape for x in op.inputs]), tuple([y.shape for y in op.outputs])
    return _named_factors(inputs, outputs, tuple(special.items()) if special else ())


def reducing_factors(op: Operation, role: Role = Role.SUM) -> tuple[Factor, ...]:
    """Factors by name, with those that the result lacks reduced."""
    out = op.output.shape
    return named_factors(op, {d.name: role for x in op.inputs for d in x.shape if d.name not in out})


@lru_cache(maxsize=65536)
def _named_factors(
    inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], special: tuple[tuple[str, Role], ...]
) -> tuple[Factor, ...]:
    roles = dict(special)
    # A dim whose size changes (slice, concat, ...) can only be split by a number that divides all its sizes.
    sizes: dict[str, int] = {}
    for s in (*inputs, *outputs):
        for d in s:
            sizes[d.name] = gcd(sizes.get(d.name, 0), d.size)
    return tuple(
        Factor(
            n,
            size,
            tuple(n if n in s else None for s in inputs),
            tuple(n if n in s else None for s in outputs),
            roles.get(n, Role.PARALLEL),
        )
        for n, size in sizes.items()
    )


def align(x: Array, names: Sequence[str], to: Sequence[str]) -> Array:
    """View of `x` with dims in the order `to`, and length-1 axes for missing dims: broadcasting by name."""
    names, to = tuple(names), tuple(to)
    if names == to:
        return x
    order, axes = _alignment(names, to)
    return x.transpose(order)[axes]


@lru_cache(maxsize=65536)
def _alignment(names: tuple[str, ...], to: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[slice | None, ...]]:
    """The transposition of `align`, and its index: None adds a length-1 axis."""
    return tuple(names.index(n) for n in to if n in names), tuple(np.s_[:] if n in names else None for n in to)


def size_of(dims: Sequence[Dimension]) -> int:
    """Product of the sizes."""
    return prod(d.size for d in dims)
