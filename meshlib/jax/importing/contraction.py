"""dot_general: products, and recognition of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from layouts import Dimension, Shape
from meshlib.core.dtypes import DType, as_dtype
from meshlib.core.graph import Tensor
from meshlib.jax.importing.axes import Axes, Axis
from meshlib.jax.importing.code import DTYPES, Code, CodeStep, Var
from meshlib.jax.importing.scores import fused
from meshlib.jax.importing.table import RULES, give, rule
from meshlib.jax.importing.writing import StepWriter
from meshlib.ops.contraction.einsum import einsum
from meshlib.ops.pointwise.arithmetic import multiply
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.reductions import reduce_sum


@dataclass(frozen=True)
class _Positions:
    """Positions of the operands' axes in the index space of a product: batch, free axes of each side, contracted."""

    batch: tuple[tuple[int, int], ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    contracted: tuple[tuple[int, int], ...]


def _positions(step: CodeStep) -> _Positions:
    (lc, rc), (lb, rb) = step.params["dimension_numbers"]
    x, y = step.ins
    return _Positions(
        tuple(zip(lb, rb, strict=True)),
        tuple(n for n in range(len(x.shape)) if n not in {*lc, *lb}),
        tuple(n for n in range(len(y.shape)) if n not in {*rc, *rb}),
        tuple(zip(lc, rc, strict=True)),
    )


def _dot_axes(axes: Axes, step: CodeStep) -> None:
    at = _positions(step)
    x, y = step.ins
    batch = [axes.new(x.shape[a]) for a, _ in at.batch]
    left, right = [axes.new(x.shape[n]) for n in at.left], [axes.new(y.shape[n]) for n in at.right]
    contracted = [axes.new(x.shape[a]) for a, _ in at.contracted]
    axes.hold(axes.space(), [*batch, *left, *right, *contracted])
    of_x = [*zip(batch, [x.axes[a] for a, _ in at.batch], strict=True)]
    of_x += zip([*left, *contracted], [x.axes[n] for n in (*at.left, *(a for a, _ in at.contracted))], strict=True)
    of_y = [*zip(batch, [y.axes[b] for _, b in at.batch], strict=True)]
    of_y += zip([*right, *contracted], [y.axes[n] for n in (*at.right, *(b for _, b in at.contracted))], strict=True)
    first, second = (of_x, of_y) if _clashes(axes, of_x, of_y) <= _clashes(axes, of_y, of_x) else (of_y, of_x)
    # In attention scores, the keys' dim is the one renamed.
    if step.memory is not None and _clashes(axes, of_x, of_y) == _clashes(axes, of_y, of_x):
        keys_left = step.memory < len(batch) + len(left)
        first, second = (of_y, of_x) if keys_left else (of_x, of_y)
    for label, axis in (*first, *second):
        axes.tie(label, axis)
    give(axes, step.outs[0], [*batch, *left, *right])
    step.labels = contracted


Pairs = Sequence[tuple[Axis, Axis]]


def _clashes(axes: Axes, first: Pairs, second: Pairs) -> int:
    """Number of axes that would stay separate if one operand's axes were unified first."""
    taken: dict[Axis, Axis] = {}
    count = 0
    for label, axis in (*first, *second):
        for d in axes.dims(axis):
            if label not in taken:
                count += d in taken.values()
                taken[label] = d
            elif taken[label] is not d:
                count += d in taken.values() or not axes.may_be_one(taken[label], d)
    return count


def _dot(w: StepWriter, step: CodeStep) -> Tensor:
    at = _positions(step)
    x, y = step.ins
    (out,) = step.outs
    batch, left = out.axes[: len(at.batch)], out.axes[len(at.batch) : len(at.batch) + len(at.left)]
    right, contracted = out.axes[len(at.batch) + len(at.left) :], step.labels
    a, b = (
        _operand(w, x, [a for a, _ in at.batch], at.left, [a for a, _ in at.contracted], batch, left, contracted),
        (_operand(w, y, [b for _, b in at.batch], at.right, [b for _, b in at.contracted], batch, right, contracted)),
    )
    summed = list(w.shape(contracted))
    if len(summed) == 1:
        for p, v in ((a, b), (b, a)):
            if summed[0] in p.shape and (result := fused(p, v, _dtype_read(out))) is not None:
                return result
    # bfloat16 factors of a float32 product are exact in float32; the MXU sees the same operands.
    dtype = max((a.dtype, b.dtype, as_dtype(DTYPES[out.dtype])), key=lambda t: (t.is_float, t.itemsize))
    a, b = cast(a, dtype), cast(b, dtype)
    nowhere = prod(d.size for d in summed if d not in a.shape and d not in b.shape)
    result = _summed_product(a, b, summed, w.shape(out.axes), precision_of(step))
    return result if nowhere == 1 else multiply(result, nowhere)


def _dtype_read(x: Var) -> DType:
    """The dtype in which a float is read: its own, or a smaller one to which all uses cast it, once moved."""
    own = as_dtype(DTYPES[x.dtype])
    read = [own] * (not x.users)
    for user in x.users:
        if user.kind in ("transpose", "reshape", "squeeze"):
            read.append(_dtype_read(user.outs[0]))
        else:
            read.append(as_dtype(DTYPES[user.outs[0].dtype]) if user.kind == "convert_element_type" else own)
    widest = max(read, key=lambda d: d.itemsize)
    return widest if widest.itemsize < own.itemsize and all(d.is_float for d in read) else own


def _summed_product(a: Tensor, b: Tensor, summed: Sequence[Dimension], out: Shape, precision: str) -> Tensor:
    """The product of two operands, summed over those of the dims `summed` that either has."""
    there = {*a.shape, *b.shape}
    here, both = [d for d in summed if d in there], [d for d in summed if d in a.shape and d in b.shape]
    if here != both:  # one operand is constant along a contracted dim
        a, b = (
            reduce_sum(t, output_shape=[d for d in t.shape if d not in here or d in o.shape])
            for t, o in ((a, b), (b, a))
        )
    return einsum([a, b], [d for d in out if d in there], precision=precision) if both else multiply(a, b)


def _operand(
    w: StepWriter, x: Var, batch: Sequence[int], free: Sequence[int], contracted: Sequence[int], *labels: Sequence[Axis]
) -> Tensor:
    """An operand under the dims of the product's index space."""
    order = [*batch, *free, *contracted]
    axis_of: dict[int, Axis] = dict(zip(order, [a for part in labels for a in part], strict=True))
    return w.under(x, [axis_of[n] for n in range(len(x.shape))])


def precision_of(step: CodeStep) -> str:
    """The precision that a product requests."""
    given = step.params.get("precision")
    several = given if isinstance(given, tuple) else (given,)
    return "highest" if any("HIGHEST" in str(p) for p in several) else "default"


rule("dot_general", axes=_dot_axes, write=_dot)


def mark_scores(code: Code) -> None:
    """Mark products as attention scores if, after element-wise steps, a maximum is taken over one axis of them."""
    marks: dict[Var, int] = {}
    for step in reversed([*code.walk()]):
        out = step.outs[0] if step.outs else None
        if step.kind == "reduce_max" and len(step.params["axes"]) == 1:
            marks[step.ins[0]] = int(step.params["axes"][0])
        elif out not in marks:
            continue
        elif step.kind == "dot_general":
            step.memory = marks[out]
        elif step.kind == "transpose":
            marks[step.ins[0]] = int(step.params["permutation"][marks[out]])
        elif step.kind in RULES and RULES[step.kind].by_element:
            marks.update({x: marks[out] for x in step.ins if len(x.shape) == len(out.shape)})
