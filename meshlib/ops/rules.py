"""Rules shared by many operation records: factors by name, and work per element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import gcd, prod
from typing import Any

import numpy as np

from hardware.core import FLOAT32_PASSES
from layouts import Dimension, Shape
from meshlib.core.dtypes import BOOL, DType
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Operation, Tensor, TensorType
from meshlib.core.opdef import Array, Factor, Role, Work


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
