"""Primitives that do not change values: casts, and annotations for compilers and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshlib.core.dtypes import as_dtype
from meshlib.core.graph import Tensor
from meshlib.jax.importing.axes import Axes
from meshlib.jax.importing.code import DTYPES, NARROW, CodeStep, Var
from meshlib.jax.importing.integers import converted
from meshlib.jax.importing.masks import hot
from meshlib.jax.importing.table import rule, same_axes
from meshlib.jax.importing.writing import StepWriter
from meshlib.ops.control.state import identity, stop_gradient
from meshlib.ops.pointwise.arithmetic import left_shift, not_equal, right_shift
from meshlib.ops.pointwise.casts import CAST, bitcast, cast


def _convert(w: StepWriter, step: CodeStep) -> Tensor:
    (x,) = w.operands(step)
    (out,) = step.outs
    if not isinstance(x, Tensor):
        return w.as_tensor(x, out)
    to = out.dtype if x.dtype.is_float and out.dtype in NARROW else DTYPES[out.dtype]  # floats saturate
    if to == "bool":
        return not_equal(x, 0)
    one_hot = hot(x, to)
    if one_hot is not None:
        return one_hot
    stored = x.operation.inputs[0] if x.operation.opdef is CAST else x
    # An eight-bit or four-bit argument is cast from its stored dtype.
    return cast(stored if stored.dtype.is_narrow_integer and not as_dtype(to).is_narrow_integer else x, to)


rule(
    "convert_element_type",
    axes=same_axes,
    write=_convert,
    fold=lambda step, x: converted(x, step.outs[0].dtype),
    by_element=True,
)


_BITS = {"float32": 32, "bfloat16": 16, **{f"{sign}int{n}": n for sign in ("", "u") for n in (8, 16, 32)}}


def _reread_fault(step: CodeStep) -> str | None:
    old, new = step.ins[0].dtype, step.outs[0].dtype
    same = old in _BITS and _BITS[old] == _BITS.get(new)
    return None if same else f"from {old} to {new}; both must have 8, 16 or 32 bits"


def _reread(w: StepWriter, step: CodeStep) -> Tensor:
    """The bits of values as another dtype; those of bfloat16 are the upper half of float32's."""
    x, old, new = w.operand_tensor(step, 0), step.ins[0].dtype, step.outs[0].dtype
    if ("float" in old) == ("float" in new):
        return x  # integers are brought into the range of the new dtype
    if old == "bfloat16":
        return right_shift(bitcast(cast(x, "float32")), 16)
    return cast(bitcast(left_shift(x, 16)), "bfloat16") if new == "bfloat16" else bitcast(x)


rule("bitcast_convert_type", axes=same_axes, write=_reread, fault=_reread_fault, by_element=True)


def _pass(w: StepWriter, step: CodeStep) -> list[Tensor | None]:
    return [w.tensor(x) for x in step.ins]


def _pass_axes(axes: Axes, step: CodeStep) -> None:
    for x, out in zip(step.ins, step.outs, strict=True):
        same_axes(axes, CodeStep(step.kind, [x], [out], {}, step.place))


rule(
    "copy copy_p optimization_barrier mesh_cast layout_constraint pvary pcast",
    axes=_pass_axes,
    write=_pass,
    fold=lambda step, *xs: xs[0],
    by_element=True,
)


def _constraint(w: StepWriter, step: CodeStep) -> Tensor:
    sharding = step.params["dst_sharding" if step.kind == "reshard" else "sharding"]
    return split_by(w, step, getattr(sharding, "spec", ()))


def split_by(w: StepWriter, step: CodeStep, spec: Sequence[Any]) -> Tensor:
    """The operand of a step that constrains its sharding by this spec."""
    return _split(w, step, step.ins[0], step.outs[0], spec)


def _split(w: StepWriter, step: CodeStep, x: Var, out: Var, spec: Sequence[Any]) -> Tensor:
    parts = [w.shape([a]) for a in out.axes]
    return w.constraints.record(w.full(w.under(x, out.axes), out.axes), parts, spec, step.place.line)


def _put(w: StepWriter, step: CodeStep) -> list[Tensor | None]:
    specs = [getattr(place, "spec", None) for place in step.params["devices"]]
    return [
        w.tensor(x) if spec is None else _split(w, step, x, out, spec)
        for x, out, spec in zip(step.ins, step.outs, specs, strict=True)
    ]


def _elsewhere(step: CodeStep) -> str | None:
    kinds = [str(getattr(place, "memory_kind", place)) for place in step.params["devices"]]
    host = any(kind.lower().endswith("host") for kind in kinds)
    return "to the host's memory; leave it out, and name values for mtf.Remat(offload=[...])" if host else None


rule("sharding_constraint reshard", axes=same_axes, write=_constraint, fold=lambda step, x: x, by_element=True)
rule("device_put", axes=_pass_axes, write=_put, fold=lambda step, *xs: xs[0], fault=_elsewhere, by_element=True)
rule(
    "stop_gradient",
    axes=same_axes,
    write=lambda w, step: stop_gradient(w.tensor(step.ins[0])),
    fold=lambda step, x: x,
    by_element=True,
)
rule(
    "name",
    axes=same_axes,
    write=lambda w, step: identity(w.tensor(step.ins[0]), "".join(str(step.params["name"]).split())),
    by_element=True,
)


def _precision(step: CodeStep) -> tuple[int, int]:
    return int(step.params["exponent_bits"]), int(step.params["mantissa_bits"])


def _reduce_precision(w: StepWriter, step: CodeStep) -> Tensor:
    x = w.tensor(step.ins[0])
    return cast(cast(x, "bfloat16"), x.dtype) if _precision(step) == (8, 7) else x


rule(
    "reduce_precision",
    axes=same_axes,
    write=_reduce_precision,
    fault=lambda step: None if _precision(step) in ((8, 7), (8, 23)) else f"to {_precision(step)} bits",
    by_element=True,
)
