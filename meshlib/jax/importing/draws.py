"""Random numbers: the draws of `jax.random` as the library's random operations, which need no keys.

Each draw has numbers of its own, by its name and the step, the same under every layout; not those that JAX draws. Draws
with equal keys are one: see `meshlib.jax.importing.keyed`.
"""

from __future__ import annotations

from typing import Any

from meshlib.core.graph import Tensor
from meshlib.jax.importing.axes import Axes
from meshlib.jax.importing.code import DTYPES, CodeStep, Var
from meshlib.jax.importing.table import fresh, rule
from meshlib.jax.importing.writing import StepWriter
from meshlib.ops.control.sources import constant
from meshlib.ops.pointwise.arithmetic import floor, less, minimum
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.random import drawn_from

# Operands of draws with bounds. In a part of a differentiated function, known bounds are not operands.
OPERANDS = {"jit:_uniform": 3, "jit:_truncated_normal": 3, "jit:_bernoulli": 2, "jit:_randint": 3}
DRAWS = ("random_bits", "jit:_uniform", "jit:_normal", "jit:_normal_real", "jit:_bernoulli", "jit:_randint")
KEYS = "random_seed random_split random_fold_in random_wrap random_unwrap random_clone key_reuse_check threefry2x32"


def _bounds(step: CodeStep) -> tuple[Any, Any]:
    low, high = (x.number for x in step.ins[1:3])
    return low, high


def _numbers(
    w: StepWriter, step: CodeStep, law: str = "uniform", low: float = 0.0, high: float = 1.0, part: int = 0
) -> Tensor:
    """The random numbers of a step in its result's shape; `part` distinguishes several that it draws."""
    (out,) = step.outs
    stream, dtype = step.params.get("stream"), DTYPES[out.dtype]
    of = f"{stream} part {part}" if stream and part else stream
    wide = dtype if "float" in dtype else "float32"
    terms = [w.tensor(x) if isinstance(x, Var) else constant(x, [], "int32") for x in step.params.get("terms", ())]
    constant_over = tuple(range(out.level)) if terms else step.params.get("constant_over", ())
    return drawn_from(w.shape(out.axes), (law, low, high), wide, None, f"random_{law}", of, constant_over, terms)


def _draw_axes(axes: Axes, step: CodeStep) -> None:
    fresh(axes, step.outs[0])


def _no_axes(axes: Axes, step: CodeStep) -> None:
    for out in step.outs:
        if not out.key:
            fresh(axes, out)


rule(
    "jit:_uniform",
    axes=_draw_axes,
    write=lambda w, step: _numbers(w, step, "uniform", float(step.ins[1].number), float(step.ins[2].number)),
)
rule("jit:_normal jit:_normal_real", axes=_draw_axes, write=lambda w, step: _numbers(w, step, "normal"))


def _bernoulli(w: StepWriter, step: CodeStep) -> Tensor:
    return less(_numbers(w, step), w.operand(step.ins[1], step.outs[0].axes))


rule("jit:_bernoulli", axes=_draw_axes, write=_bernoulli)


def _integers(w: StepWriter, step: CodeStep) -> Tensor:
    """Uniform integers, from the 2^24 values of a float32 draw in [0, 1)."""
    axes = step.outs[0].axes
    low, high = (w.operand(x, axes) for x in step.ins[1:3])
    count = high - low
    drawn = _numbers(w, step) * (cast(count, "float32") if isinstance(count, Tensor) else float(count))
    return minimum(cast(floor(drawn), "int32") + low, high - 1)


rule("jit:_randint", axes=_draw_axes, write=_integers)


def _bits(w: StepWriter, step: CodeStep) -> Tensor:
    """Random bits; 32-bit words as signed integers of the same bits."""
    width = int(step.params["bit_width"])

    def below(count: int, part: int) -> Tensor:
        return cast(floor(_numbers(w, step, part=part) * float(count)), "int32")

    return below(2**width, 0) if width < 32 else (below(2**16, 0) - 2**15) * 2**16 + below(2**16, 1)


rule("random_bits", axes=_draw_axes, write=_bits)
rule(KEYS, axes=_no_axes, write=lambda w, step: [None] * len(step.outs))
