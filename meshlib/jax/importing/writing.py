"""Translation of a traced function into operations: each value becomes a tensor with the dims of its axes.

A tensor may lack dims of its value's axes, along which all elements are equal: broadcasts are materialised only where
an operation needs them. Transposes, and reshapes that split or merge axes, emit no operations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from layouts import Dimension, Shape
from meshlib.core.graph import Tensor, current_graph, scope
from meshlib.core.public_calls import public
from meshlib.core.source_lines import written_at
from meshlib.jax.importing.axes import Axes, Axis, equal_groups
from meshlib.jax.importing.code import DTYPES, Code, CodeStep, SourcePlace, Var
from meshlib.jax.importing.constraints import Constraints
from meshlib.jax.importing.integers import in_range, same_bits
from meshlib.jax.importing.masks import known
from meshlib.jax.importing.table import RULES, Operand
from meshlib.ops.control.remat import PartialPolicy
from meshlib.ops.control.sources import constant
from meshlib.ops.control.state import identity
from meshlib.ops.movement.indexing import RANGE
from meshlib.ops.movement.indexing import range as positions
from meshlib.ops.movement.runs import slice
from meshlib.ops.movement.shape import broadcast, rename_dimension, reshape, transpose
from meshlib.ops.pointwise.casts import cast


class StepWriter:
    """Writes steps into the current graph; `tensors` are the values written so far.

    `constraints` records the shardings that the function requests; `parts`, for a loop's body, the policies of the
    checkpoints in it.
    """

    def __init__(
        self, axes: Axes, tensors: Mapping[Var, Tensor], constraints: Constraints, parts: PartialPolicy | None = None
    ) -> None:
        self.axes, self.constraints, self.parts = axes, constraints, parts
        self.tensors = dict(tensors)

    # ------------------------------------------------------------ steps

    def run(self, code: Code) -> None:
        """Write all steps."""
        for step in code.steps:
            if not all(out.key for out in step.outs):
                with self.at(step.place):
                    self._write(step)

    @contextlib.contextmanager
    def at(self, place: SourcePlace) -> Iterator[None]:
        """Operations created inside get this source line and these scopes."""
        with contextlib.ExitStack() as around:
            around.enter_context(written_at(place.line))
            if place.scope:
                around.enter_context(scope("/".join(place.scope)))
            yield

    def _write(self, step: CodeStep) -> None:
        results = public(RULES[step.kind].write)(self, step)
        for out, tensor in zip(step.outs, [results] if isinstance(results, Tensor) else results, strict=True):
            if tensor is not None:
                dtype = DTYPES[out.dtype]
                tensor = in_range(tensor, step)
                tensor = tensor if tensor.dtype.name == dtype else cast(tensor, dtype)
                strange = set(tensor.shape) - set(self.shape(out.axes))
                assert not strange, (step.kind, step.place, tensor, self.shape(out.axes))
                self.tensors[out] = tensor if step.saved is None else identity(tensor, step.saved)

    # ------------------------------------------------------------ dims

    def dim(self, axis: Axis) -> Dimension:
        """The dim of an axis that is not a product."""
        assert axis.name is not None
        return Dimension(axis.name, axis.size)

    def shape(self, axes: Iterable[Axis]) -> Shape:
        """The dims of axes, in row-major order."""
        return Shape([self.dim(d) for d in self.axes.flat(axes)])

    def whole_dim(self, axis: Axis) -> Dimension:
        """One dim for an axis, even if it is a product of several dims or none."""
        dims = self.axes.dims(axis)
        return (
            self.dim(dims[0]) if len(dims) == 1 else Dimension("_".join(d.name or "" for d in dims) or "one", axis.size)
        )

    # ------------------------------------------------------------ values

    def tensor(self, x: Var) -> Tensor:
        """The value as a tensor; constants are written where they are used."""
        if x.const is None:
            return self.tensors[x]
        if x.number is not None:
            return constant(_plain(x), [], DTYPES[x.dtype])
        return known(_elements(x), self.shape(x.axes), DTYPES[x.dtype])

    def as_tensor(self, x: Operand, like: Var) -> Tensor:
        """A tensor; numbers become constants in the dtype of `like`."""
        return x if isinstance(x, Tensor) else constant(x, [], DTYPES[like.dtype])

    def operands(self, step: CodeStep) -> list[Operand]:
        """Operands of an element-wise step: numbers, and tensors under the dims of the result."""
        return [self.operand(x, step.outs[0].axes) for x in step.ins]

    def operand(self, x: Var, axes: Sequence[Axis]) -> Operand:
        """A number, or a tensor under the dims of other axes, which agree in length or broadcast."""
        if x.number is not None:
            return _plain(x)
        return self.under(x, [a if a.size == 1 else b for a, b in zip(x.axes, axes, strict=False)])

    def operand_tensor(self, step: CodeStep, number: int) -> Tensor:
        """One of `operands`, as a tensor."""
        return self.as_tensor(self.operands(step)[number], step.ins[number])

    def under(self, x: Var, axes: Sequence[Axis]) -> Tensor:
        """The value under the dims of other axes with the same number of elements in row-major order."""
        return self.rename(self.tensor(x), self.axes.flat(x.axes), self.axes.flat(axes))

    def full(self, t: Tensor, axes: Iterable[Axis]) -> Tensor:
        """Broadcast to all dims of these axes, in order."""
        return broadcast(t, self.shape(axes))

    # ------------------------------------------------------------ renaming dims

    def rename(self, t: Tensor, old: Sequence[Axis], new: Sequence[Axis]) -> Tensor:
        """`t`, whose dims are among `old`, under dims `new` of the same row-major elements: renamed or reshaped."""
        if [*old] == [*new]:
            return t
        if [d.size for d in old] == [d.size for d in new]:
            pairs = [(self.dim(a), self.dim(b)) for a, b in zip(old, new, strict=True)]
            return renamed(t, {a.name: b.name for a, b in pairs if a != b and a in t.shape})
        groups = list(equal_groups(old, new))
        reshaped = {d for left, right in groups if len(left) != 1 or len(right) != 1 for d in left}
        held = [self.dim(d) for d in old if d in reshaped or self.dim(d) in t.shape]
        new_dims = [
            self.dim(d) for left, right in groups for d in right if reshaped & {*left} or self.dim(left[0]) in t.shape
        ]
        return reshape(broadcast(t, held), new_dims)

    def whole(self, x: Var, axes: Sequence[Axis], *positions: int) -> Tensor:
        """The value under other axes' dims, with a single dim for each of the axes at `positions`; see `whole_dim`."""
        t = self.under(x, axes)
        for n in positions:
            t = self.merge(t, axes[n])
        return t

    def merge(self, t: Tensor, axis: Axis) -> Tensor:
        """Merge an axis's dims, broadcasting missing ones, into one last dim; see `whole_dim`."""
        dims, one = [self.dim(d) for d in self.axes.dims(axis)], self.whole_dim(axis)
        if dims == [one] and one in t.shape:
            return t
        rest = [d for d in t.shape if d not in dims]
        return reshape(broadcast(t, [*rest, *dims]), [*rest, one])

    def element(self, t: Tensor, axis: Axis, index: int) -> Tensor:
        """One element along an axis, which is removed."""
        one = self.whole_dim(axis)
        cut = slice(self.merge(t, axis), index, 1, one.name)
        return reshape(cut, [d for d in cut.shape if d.name != one.name])

    def rename_apart(self, x: Var, axes: Sequence[Axis], at: int, name: str) -> Tensor:
        """The value under other axes' dims, but with one dim of this name for axis `at`, unless its length is 1."""
        t = self.under(x, [a if n == at else b for n, (a, b) in enumerate(zip(x.axes, axes, strict=True))])
        if x.shape[at] == 1 or x.number is not None:  # a number has no dims, whatever its shape
            return t
        t, one = self.merge(t, x.axes[at]), self.whole_dim(x.axes[at])
        return renamed(t, {one.name: name}) if one.name != name else t

    def apart(self, t: Tensor, axis: Axis) -> Tensor:
        """Split `whole_dim` of an axis into the axis's dims; the inverse of `merge`."""
        one = self.whole_dim(axis)
        if one not in t.shape:
            return t
        return reshape(
            t, [e for d in t.shape for e in ([self.dim(a) for a in self.axes.dims(axis)] if d == one else [d])]
        )


def renamed(t: Tensor, names: Mapping[str, str]) -> Tensor:
    """`t` with several dims renamed simultaneously; names may be swapped."""
    if t.operation.opdef is RANGE and names:
        with current_graph("range"):
            (d,) = t.shape
            return positions(Dimension(names[d.name], d.size), t.dtype)
    left = dict(names)
    while left:
        old = next((a for a, b in left.items() if b not in t.shape), None)
        if old is None:  # cyclic renaming
            old = next(iter(left))
            aside = f"{old}_aside"
            t, left[aside] = rename_dimension(t, old, aside), left.pop(old)
            continue
        t = rename_dimension(t, old, left.pop(old))
    return t


def dims_of(t: Tensor, order: Sequence[Dimension]) -> Tensor:
    """`t` with its dims in this order."""
    return transpose(t, order)


def _elements(x: Var) -> np.ndarray[Any, Any]:
    """Known elements; those of uint32 as int32 of the same bits."""
    return same_bits(np.asarray(x.const, "uint32" if x.dtype == "uint32" else None))


def _plain(x: Var) -> bool | int | float:
    value = _elements(x).item()
    assert isinstance(value, bool | int | float)
    return value
