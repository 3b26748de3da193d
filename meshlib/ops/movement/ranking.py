"""Ranking along a dim: top_k, argmax, n-th largest and smallest, argsort, sort.

Ties go to the lowest index, everywhere. Along a split dim top_k and argmax select candidates in each block and rank
these: only candidates are sent, to the device that ranks their row if rows can be split, otherwise to all.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, log2
from typing import Any

import numpy as np

from layouts import Dimension, Shape
from meshlib.core.arguments import at, flag, whole
from meshlib.core.dtypes import BOOL, INT32
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Operation, Tensor, TensorType, find_dim
from meshlib.core.laid_dims import size_of
from meshlib.core.opdef import Array, Block, Factor, Kind, Role, Summary, Work, operation
from meshlib.ops.building import build, build_all, named_factors, not_differentiable, tensor
from meshlib.ops.control.sources import constant_like
from meshlib.ops.movement.indexing import gather, scatter_add
from meshlib.ops.movement.shape import rename_dimension, reshape, transpose
from meshlib.ops.pointwise.arithmetic import negative


def _descending_order(x: Array, axis: int) -> Array:
    """Indices that sort `x` in descending order, ties by index; NaNs last."""
    if x.dtype.kind == "f":
        return np.argsort(-x, axis=axis, kind="stable")
    return np.argsort(-x.astype(np.int64), axis=axis, kind="stable")


def _k_largest(x: Array, indices: Array, axis: int, k: int) -> tuple[Array, Array]:
    """The k largest elements along `axis`, NaNs first, and their entries of `indices`, with that axis moved last."""
    chosen = _descending_order(x, axis)
    if x.dtype.kind == "f" and (wrong := np.isnan(x)).any():
        first = np.argsort(~np.take_along_axis(wrong, chosen, axis), axis=axis, kind="stable")
        chosen = np.take_along_axis(chosen, first, axis)
    chosen = chosen[(np.s_[:],) * axis + (np.s_[:k],)]
    values = np.take_along_axis(x, chosen, axis)
    best_indices = np.take_along_axis(indices, chosen, axis)
    return np.moveaxis(values, axis, -1), np.moveaxis(best_indices, axis, -1)


def _top_k_shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    (x,) = types
    k: Dimension = attrs["k_dim"]
    d = x.shape.dim(attrs["dim"])
    if k.size > d.size:
        raise ShapeError(f"the {k.size} largest of dim {d} were asked for; it has only {d.size}")
    if k.name != d.name and k.name in x.shape:
        raise ShapeError(f"{x.shape} already has a dim '{k.name}'; give the new dim another name")
    return _ranked_types(x, d, k)


def _ranked_types(x: TensorType, dim: Dimension, k: Dimension) -> tuple[TensorType, TensorType]:
    """Types of the `k` largest elements along `dim`, and of their indices."""
    shape = Shape([*(d for d in x.shape if d != dim), k])
    return TensorType(shape, x.dtype), TensorType(shape, INT32)


def _ranking_factors(op: Operation) -> tuple[Factor, ...]:
    """Factors of ranking: the ranked dim, in which devices select candidates, alone and with each row dim."""
    dim, count = op.attrs["dim"], len(op.outputs)
    d, rows = op.inputs[0].shape.dim(dim), [e.name for e in op.inputs[0].shape if e.name != dim]
    alone = Factor(dim, d.size, (dim,), (None,) * count, Role.SUMMARY)
    return (alone, *(Factor(f"{dim} to {n}", d.size, (dim,), (n,) * count, Role.SUMMARY) for n in rows))


def _argmax_roles(op: Operation) -> tuple[Factor, ...]:
    rows = tuple(f for f in named_factors(op) if f.name != op.attrs["dim"])
    return (*rows, *_ranking_factors(op))


def _top_k_roles(op: Operation) -> tuple[Factor, ...]:
    k, dim = op.attrs["k_dim"], op.attrs["dim"]
    rows = tuple(f for f in named_factors(op) if f.name not in (k.name, dim))
    # The result's dim may have the name of the ranked one; they are still different.
    name = k.name + "'" if k.name == dim else k.name
    return (*rows, *_ranking_factors(op), Factor(name, k.size, (None,), (k.name, k.name), Role.WHOLE))


def _candidates(block: Block, x: Array, k: int) -> tuple[Array, Array]:
    dim = block.attrs["dim"]
    axis = block.inputs[0].shape.index(dim)
    start = sum(block.offsets[f.name] for f in _ranking_factors(block.operation))  # at most one of them is split
    shape = [-1 if a == axis else 1 for a in range(x.ndim)]
    indices = np.arange(x.shape[axis], dtype=np.int32).reshape(shape) + np.int32(start)
    return _k_largest(x, np.broadcast_to(indices, x.shape), axis, min(k, x.shape[axis]))


def _best_of(gathered: tuple[Array, ...], k: int) -> tuple[Array, Array]:
    # Candidates are in the order of their blocks: a stable sort keeps ties in index order.
    values, indices = (np.concatenate(list(g), axis=-1) for g in gathered)
    return _k_largest(values, indices, values.ndim - 1, k)


def _candidate_types(x: TensorType, dim: str, k: int) -> tuple[TensorType, ...]:
    d = x.shape.dim(dim)
    return _ranked_types(x, d, Dimension("candidates_", min(k, d.size)))


def _top_k_local(block: Block, x: Array) -> tuple[Array, Array]:
    return _candidates(block, x, block.attrs["k_dim"].size)


def _sort_work(ins: tuple[TensorType, ...], out: TensorType, attrs: Mapping[str, Any]) -> Work:
    # A bitonic sort of the whole dim has log2(n)^2 / 2 stages that each compare every element; modelled, not published.
    depth = ceil(log2(max(2, attrs["size"])))
    return Work(0, max(1, depth * depth // 2) * ins[0].shape.size)


TOP_K = operation(
    "top_k",
    kind=Kind.INDEXED,
    shape=_top_k_shape,
    roles=_top_k_roles,
    local=_top_k_local,
    grad=lambda op, dy, _: [_top_k_grad(op, dy)],
    work=_sort_work,
    lower=Summary(
        _top_k_local,
        lambda block, gathered, index, x: _best_of(gathered, block.attrs["k_dim"].size),
        lambda types, attrs: _candidate_types(types[0], attrs["dim"], attrs["k_dim"].size),
    ),
    exact=True,
)


def _top_k_grad(op: Operation, dy: Tensor | None) -> Tensor | None:
    if dy is None:
        return None
    x, indices, k = op.inputs[0], op.outputs[1], op.attrs["k_dim"]
    if k.name == op.attrs["dim"]:
        free = f"{k.name}_k"
        dy, indices = (rename_dimension(t, k.name, free) for t in (dy, indices))
    return scatter_add(dy, indices, x.shape.dim(op.attrs["dim"]), x.shape)


def top_k(x: Tensor, reduced_dim: Dimension, k_dim: Dimension, name: str | None = None) -> tuple[Tensor, Tensor]:
    """The `k_dim.size` largest elements along `reduced_dim`, largest first, and their int32 indices.

    Both have the other dims of x, then `k_dim`. Ties go to the lowest index. NaN ranks above all numbers, so that it is
    never lost.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.top_k(mtf.input("x", "d:4"), mtf.Dimension("d", 4), mtf.Dimension("k", 2))[0]
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 1.0, 2.0, 0.0])["y"])
      [3. 2.]
    """
    d = find_dim(tensor(x, "top_k"), reduced_dim, "top_k")
    if not isinstance(k_dim, Dimension):
        raise ShapeError(f"{at('top_k')}: expected a Dimension as k_dim, got {k_dim!r:.80}")
    if x.dtype is BOOL:
        raise ShapeError(f"{at('top_k')}: needs numbers, got {x}; cast it with mtf.cast")
    values, indices = build_all(TOP_K, [x], {"dim": d.name, "size": d.size, "k_dim": k_dim}, name)
    return values, indices


def top_1(x: Tensor, reduced_dim: Dimension, name: str | None = None) -> tuple[Tensor, Tensor]:
    """The largest element along `reduced_dim` and its int32 index, without that dim.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.top_1(mtf.input("x", "d:4"), mtf.Dimension("d", 4))[0]
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 1.0, 2.0, 0.0])["y"])
      3.0
    """
    d = find_dim(tensor(x, "top_1"), reduced_dim, "top_1")
    values, indices = top_k(x, d, Dimension(f"{d.name}_k", 1), name)
    rest = [e for e in x.shape if e != d]
    return reshape(values, rest), reshape(indices, rest)


ARGMAX = operation(
    "argmax",
    kind=Kind.INDEXED,
    shape=lambda types, attrs: TensorType(Shape([d for d in types[0].shape if d.name != attrs["dim"]]), INT32),
    roles=_argmax_roles,
    local=lambda block, x: _candidates(block, x, 1)[1][..., 0],
    grad=not_differentiable,
    # Each element is compared with the running maximum; value and index are selected.
    work=lambda ins, out, attrs: Work(0, 3 * ins[0].shape.size),
    lower=Summary(
        lambda block, x: _candidates(block, x, 1),
        lambda block, gathered, index, x: _best_of(gathered, 1)[1][..., 0],
        lambda types, attrs: _candidate_types(types[0], attrs["dim"], 1),
    ),
    exact=True,
)


def argmax(x: Tensor, reduced_dim: Dimension, name: str | None = None) -> Tensor:
    """The int32 index of the largest element along `reduced_dim`; ties go to the lowest. NaN ranks above all numbers.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.argmax(mtf.input("x", "d:4"), mtf.Dimension("d", 4))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 1.0, 2.0, 0.0])["y"])
      0
    """
    d = find_dim(tensor(x, "argmax"), reduced_dim, "argmax")
    if x.dtype is BOOL:
        raise ShapeError(f"{at('argmax')}: needs numbers, got {x}; cast it with mtf.cast")
    return build(ARGMAX, [x], {"dim": d.name}, name)


def nth_largest_element(x: Tensor, n: int, reduced_dim: Dimension, name: str | None = None) -> Tensor:
    """The n-th largest element along `reduced_dim`, counted from 0.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.nth_largest_element(mtf.input("x", "d:4"), 1, mtf.Dimension("d", 4))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 1.0, 2.0, 0.0])["y"])
      2.0
    """
    d = find_dim(tensor(x, "nth_largest_element"), reduced_dim, "nth_largest_element")
    n = whole(n, "nth_largest_element", "n")
    if not 0 <= n < d.size:
        raise ShapeError(f"{at('nth_largest_element')}: n = {n} is not in 0 to {d.size - 1}, the indices of dim {d}")
    k = Dimension(f"{d.name}_k", n + 1)
    values, _ = top_k(x, d, k)
    return gather(values, constant_like(n, values, "int32"), k, name=name)


def nth_smallest_element(x: Tensor, n: int, reduced_dim: Dimension, name: str | None = None) -> Tensor:
    """The n-th smallest element along `reduced_dim`, counted from 0.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.nth_smallest_element(mtf.input("x", "d:4"), 1, mtf.Dimension("d", 4))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 1.0, 2.0, 0.0])["y"])
      1.0
    """
    return negative(nth_largest_element(negative(x), n, reduced_dim), name)


# ---------------------------------------------------------------- sorting


def _argsort_local(block: Block, x: Array) -> Array:
    axis = block.inputs[0].shape.index(block.attrs["dim"])
    if block.attrs["descending"]:
        return _descending_order(x, axis).astype(np.int32)
    return np.argsort(x, axis=axis, kind="stable").astype(np.int32)


ARGSORT = operation(
    "argsort",
    kind=Kind.INDEXED,
    shape=lambda types, attrs: TensorType(types[0].shape, INT32),
    roles=lambda op: named_factors(op, {op.attrs["dim"]: Role.WHOLE}),
    local=_argsort_local,
    grad=not_differentiable,
    work=_sort_work,
)


def argsort(x: Tensor, dim: Dimension, descending: bool = False, name: str | None = None) -> Tensor:
    """The int32 indices that sort `x` along `dim`; ties keep their order. The dim is gathered.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.argsort(mtf.input("x", "d:4"), mtf.Dimension("d", 4))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 1.0, 2.0, 0.0])["y"])
      [3 1 2 0]
    """
    d = find_dim(tensor(x, "argsort"), dim, "argsort")
    down = flag(descending, "argsort", "descending")
    return build(ARGSORT, [x], {"dim": d.name, "size": size_of(d), "descending": down}, name)


def sort(x: Tensor, dim: Dimension, descending: bool = False, name: str | None = None) -> Tensor:
    """`x` sorted along `dim`.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.sort(mtf.input("x", "d:4"), mtf.Dimension("d", 4))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 1.0, 2.0, 0.0])["y"])
      [0. 1. 2. 3.]
    """
    d = find_dim(tensor(x, "sort"), dim, "sort")
    order = rename_dimension(argsort(x, d, descending), d.name, f"{d.name}_sorted")
    in_order = gather(x, order, d)
    shape = x.shape.rename(d.name, f"{d.name}_sorted")
    return rename_dimension(transpose(in_order, shape), f"{d.name}_sorted", d.name, name)
