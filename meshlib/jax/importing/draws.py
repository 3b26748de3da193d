"""Random numbers: the draws of `jax.random` as the library's random operations, which need no keys.

Each draw has numbers of its own, by its name and the step, the same under every layout; not those that JAX draws. Draws
with equal keys are one: see `meshlib.jax.importing.keyed`.
"""

from __future__ import annotations

from typing import Any

from layouts import Shape
from meshlib.core.graph import Tensor
from meshlib.jax.importing.axes import Axes
from meshlib.jax.importing.code import DTYPES, CodeStep
from meshlib.jax.importing.table import fresh, rule
from meshlib.jax.importing.writing import StepWriter
from meshlib.ops.pointwise.binary import less, minimum
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.random import random_normal, random_uniform
from meshlib.ops.pointwise.unary import floor

# Operands of draws with bounds. In a part of a differentiated function, known bounds are no operands.
OPERANDS = {"jit:_uniform": 3, "jit:_truncated_normal": 3, "jit:_bernoulli": 2, "jit:_randint": 3}
DRAWS = ("random_bits", "jit:_uniform", "jit:_normal", "jit:_normal_real", "jit:_bernoulli", "jit:_randint")
KEYS = "random_seed random_split random_fold_in random_wrap random_unwrap random_clone key_reuse_check threefry2x32"


def _bounds(step: CodeStep) -> tuple[Any, Any]:
    low, high = (x.number for x in step.ins[1:3])
    return low, high


def _uniform(w: StepWriter, step: CodeStep) -> Tensor:
    low, high = _bounds(step)
    out = step.outs[0]
    return random_uniform(w.shape(out.axes), float(low), float(high), DTYPES[out.dtype])


def _draw_axes(axes: Axes, step: CodeStep) -> None:
    fresh(axes, step.outs[0])


def _no_axes(axes: Axes, step: CodeStep) -> None:
    for out in step.outs:
        if not out.key:
            fresh(axes, out)


rule("jit:_uniform", axes=_draw_axes, write=_uniform)
rule(
    "jit:_normal jit:_normal_real",
    axes=_draw_axes,
    write=lambda w, step: random_normal(w.shape(step.outs[0].axes), dtype=DTYPES[step.outs[0].dtype]),
)


def _bernoulli(w: StepWriter, step: CodeStep) -> Tensor:
    shape = w.shape(step.outs[0].axes)
    drawn = random_uniform(shape)
    return less(drawn, w.operand(step.ins[1], step.outs[0].axes))


rule("jit:_bernoulli", axes=_draw_axes, write=_bernoulli)


def _integers(w: StepWriter, step: CodeStep) -> Tensor:
    """Uniform integers, from the 2^24 values of a float32 draw in [0, 1)."""
    axes = step.outs[0].axes
    low, high = (w.operand(x, axes) for x in step.ins[1:3])
    count = high - low
    drawn = random_uniform(w.shape(axes)) * (cast(count, "float32") if isinstance(count, Tensor) else float(count))
    return minimum(cast(floor(drawn), "int32") + low, high - 1)


rule("jit:_randint", axes=_draw_axes, write=_integers)


def _bits(w: StepWriter, step: CodeStep) -> Tensor:
    """Random bits; 32-bit words as signed integers of the same bits."""
    shape, width = w.shape(step.outs[0].axes), int(step.params["bit_width"])
    if width < 32:
        return _drawn_below(shape, 2**width)
    return (_drawn_below(shape, 2**16) - 2**15) * 2**16 + _drawn_below(shape, 2**16)


def _drawn_below(shape: Shape, count: int) -> Tensor:
    return cast(floor(random_uniform(shape) * float(count)), "int32")


rule("random_bits", axes=_draw_axes, write=_bits)
rule(KEYS, axes=_no_axes, write=lambda w, step: [None] * len(step.outs))
