"""Constant arrays."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from layouts import Shape
from meshlib.core.arguments import at
from meshlib.core.dtypes import DType, kind_of
from meshlib.core.errors import ShapeError
from meshlib.core.garbage import held
from meshlib.core.graph import Graph, Tensor, TensorType
from meshlib.core.opdef import Array, Block, Kind, operation
from meshlib.ops.building import build_source, named_factors, vector_work

# A table is part of the program and on every device; larger arrays should be inputs or variables.
LARGEST_BYTES = 16 * 2**20


@dataclass(frozen=True, eq=False)
class FrozenArray:
    """An array compared and hashed by its contents, for attributes of operations."""

    array: Array
    digest: bytes

    @classmethod
    def of(cls, array: Array) -> FrozenArray:
        """A read-only copy."""
        copied = np.array(array, order="C")
        copied.flags.writeable = False
        about = f"{copied.dtype} {copied.shape}".encode()
        return cls(copied, hashlib.blake2b(about + copied.tobytes(), digest_size=16).digest())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FrozenArray) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"FrozenArray({self.array.dtype}{list(self.array.shape)})"


def _local(block: Block) -> Array:
    starts, out = (block.offsets[d.name] for d in block.out.shape), block.result()
    np.copyto(out, block.attrs["value"].array[tuple(np.s_[n : n + k] for n, k in zip(starts, out.shape, strict=True))])
    return out


# Unlike numbers, tables are not sources: reading elements takes memory and a separate kernel. But every device has the
# whole table, so that each slices out its block.
TABLE = operation(
    "table",
    kind=Kind.INDEXED,
    shape=lambda types, attrs: TensorType(attrs["shape"], attrs["dtype"]),
    roles=named_factors,
    local=_local,
    grad=lambda op, dy: [],
    work=vector_work,
    remade=True,
    exact=True,
)


def table(graph: Graph, value: Array, shape: Shape, dtype: DType, name: str | None) -> Tensor:
    """A constant array that must fit its dims and dtype."""
    if value.shape != shape.sizes:
        raise ShapeError(
            f"{at('constant')}: the array has shape {list(value.shape)}, but its dims are {shape}; give a dim of that "
            "size for each axis"
        )
    count = dtype.size_bytes(shape.size)
    if count > LARGEST_BYTES:
        raise ShapeError(
            f"{at('constant')}: the array {dtype}{shape} takes {count} bytes, more than the {LARGEST_BYTES} of a "
            "constant; feed it through mtf.input, or give it to mtf.variable as its initial value"
        )
    frozen = FrozenArray.of(_stored(value, dtype))
    held(frozen, count)
    attrs = {"value": frozen, "shape": shape, "dtype": dtype}
    return build_source(graph, TABLE, attrs, "constant" if name is None else name).output


def _stored(value: Array, dtype: DType) -> Array:
    kinds = {"flag": "b", "integer": "iu", "float": "iuf"}[dtype.kind]
    if kind_of(value.dtype) not in kinds or isinstance(value, np.ma.MaskedArray):
        what = "masked array" if isinstance(value, np.ma.MaskedArray) else "array"
        raise ShapeError(f"{at('constant')}: {dtype.name} can't hold the {what} of {value.dtype}; convert it first")
    with np.errstate(all="ignore"):
        stored = dtype.rounded(value.astype(dtype.storage))
        wide = value.astype(np.float64)
    if dtype.kind == "integer":
        low, high = dtype.bounds
        lost = (wide < low) | (wide > high)
    else:
        lost = ~np.isfinite(stored) & np.isfinite(wide)
    if lost.any():
        raise ShapeError(f"{at('constant')}: the number {value[lost].flat[0]} of the array does not fit {dtype.name}")
    return stored
