"""ragged_dot: grouped matrix products over rows sorted by group, as for experts."""

from __future__ import annotations

from dataclasses import dataclass

from layouts import Dimension
from meshlib.core.graph import Tensor
from meshlib.jax.importing.axes import Axes, Axis
from meshlib.jax.importing.code import CodeStep
from meshlib.jax.importing.contraction import precision_of
from meshlib.jax.importing.table import give, rule
from meshlib.jax.importing.writing import StepWriter
from meshlib.ops.contraction.ragged import ragged_dot
from meshlib.ops.pointwise.casts import cast


@dataclass(frozen=True)
class _RaggedAxes:
    """Positions of both operands' axes: batch, free axes of each side, contracted axes, rows, and the groups of w."""

    batch: tuple[tuple[int, int], ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    contracted: tuple[tuple[int, int], ...]
    rows: int
    groups: int | None  # None: rows are contracted, and the result has a group axis

    @classmethod
    def of(cls, step: CodeStep) -> _RaggedAxes:
        numbers = step.params["ragged_dot_dimension_numbers"]
        (contract, other), (batch, of_other) = numbers.dot_dimension_numbers
        x, y = step.ins[:2]
        groups = tuple(numbers.rhs_group_dimensions)
        return cls(
            tuple(zip(batch, of_other, strict=True)),
            tuple(n for n in range(len(x.shape)) if n not in {*contract, *batch}),
            tuple(n for n in range(len(y.shape)) if n not in {*other, *of_other, *groups}),
            tuple(zip(contract, other, strict=True)),
            numbers.lhs_ragged_dimensions[0],
            groups[0] if groups else None,
        )


def _fault(step: CodeStep) -> str | None:
    numbers = step.params["ragged_dot_dimension_numbers"]
    if len(step.ins) != 3 or len(step.ins[2].shape) != 1:
        return "groups of their own for each index of a batch"
    if numbers.lhs_ragged_dimensions[0] in numbers.dot_dimension_numbers[1][0]:
        return "groups of a batch"
    return None


def _axes(axes: Axes, step: CodeStep) -> None:
    """Set `labels`: groups and contracted axes."""
    (x, y, sizes), at = step.ins, _RaggedAxes.of(step)
    batch, contracted = ([axes.new(x.shape[n]) for n, _ in pairs] for pairs in (at.batch, at.contracted))
    left, right = [axes.new(x.shape[n]) for n in at.left], [axes.new(y.shape[n]) for n in at.right]
    groups = axes.new(sizes.shape[0])
    axes.hold(axes.space(), [*batch, *left, *right, *contracted, groups])
    for label, (n, m) in zip([*batch, *contracted], [*at.batch, *at.contracted], strict=True):
        axes.tie(label, x.axes[n])
        axes.tie(label, y.axes[m])
    for labels, positions, operand in ((left, at.left, x), (right, at.right, y)):
        for label, n in zip(labels, positions, strict=True):
            axes.tie(label, operand.axes[n])
    if at.groups is not None:
        axes.tie(groups, y.axes[at.groups])
    axes.tie(groups, sizes.axes[0])
    first = [groups] if at.groups is None else []
    give(axes, step.outs[0], [*first, *batch, *left, *right])
    step.labels = [groups, *contracted]


def _write(w: StepWriter, step: CodeStep) -> Tensor:
    (x, y, sizes), (out,), at = step.ins, step.outs, _RaggedAxes.of(step)
    groups, *contracted = step.labels
    result_axes = [*out.axes][at.groups is None :]
    batch, rest = result_axes[: len(at.batch)], result_axes[len(at.batch) :]
    left, right = rest[: len(at.left)], rest[len(at.left) :]
    of_x: dict[int, Axis] = {n: a for (n, _), a in zip(at.batch + at.contracted, batch + contracted, strict=True)}
    of_y: dict[int, Axis] = {m: a for (_, m), a in zip(at.batch + at.contracted, batch + contracted, strict=True)}
    of_x |= dict(zip(at.left, left, strict=True))
    of_y |= dict(zip(at.right, right, strict=True))
    if at.groups is not None:
        of_y[at.groups] = groups
    rows = of_x[at.rows]

    def whole(t: Tensor, place: dict[int, Axis], *single: Axis) -> Tensor:
        """An operand with all its dims, and a single dim each for rows and groups."""
        t = w.full(t, [place[n] for n in range(len(place))])
        for axis in single:
            t = w.merge(t, axis)
        return t

    a = whole(w.under(x, [of_x[n] for n in range(len(of_x))]), of_x, rows)
    b = whole(w.under(y, [of_y[n] for n in range(len(of_y))]), of_y, rows if at.groups is None else groups)
    count = w.merge(w.under(sizes, [groups]), groups)
    dtype = max((a.dtype, b.dtype), key=lambda t: t.itemsize)
    one = {rows: w.whole_dim(rows), groups: w.whole_dim(groups)}
    dims: list[Dimension] = [d for axis in out.axes for d in ([one[axis]] if axis in one else w.shape([axis]))]
    product = ragged_dot(
        cast(a, dtype), cast(b, dtype), cast(count, "int32"), one[rows], one[groups], dims, precision=precision_of(step)
    )
    return w.apart(product, groups if at.groups is None else rows)


rule("ragged_dot_general", axes=_axes, write=_write, fault=_fault)
