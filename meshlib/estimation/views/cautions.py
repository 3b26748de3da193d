"""Cautions about a plan: memory near the limit, weights that move, a chip's unpublished figures, unvalidated ranges.

The validated range is that of the training runs of `python -m meshlib validate` (bf16, unless a
program has products in eight bits). Outside it, the printed error of the model is unverified.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import prod

from layouts.step_kinds import STEP_KINDS
from meshlib.core.graph import Tensor
from meshlib.core.slices import assumed_figures
from meshlib.core.text import bytes_text, counted
from meshlib.estimation.result import Estimate
from meshlib.lowering.assigned import is_weight
from meshlib.program.instructions import Move
from meshlib.program.records import Program, walk

# Ranges over the judged training runs in `meshlib/validation/published_results.json`: minimum and maximum.
VALIDATED_MFU = {"bf16": 0.715, "int8": 1.061, "fp8": 0.805}  # highest measured
VALIDATED_CHIPS = (8, 4096)
VALIDATED_LENGTHS = (512, 131_072)  # tokens per sequence
VALIDATED_TOKENS_PER_CHIP = (1_024, 163_840)


def cautions(est: Estimate) -> list[str]:
    """Cautions before acting on an estimate, one line each.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [mtf.Dimension("batch", 4096), mtf.Dimension("inner", 4096)], "bfloat16")
      ...     w = mtf.variable("w", [mtf.Dimension("inner", 4096), mtf.Dimension("outer", 4096)], dtype="bfloat16")
      ...     program = mtf.lower({"y": mtf.einsum([x, w])}, mesh="a:4", layout="batch:a;inner:a?")
      >>> for line in cautions(mtf.estimate(program, "v5e-4")):
      ...     print(line)
      moves weights over a (4 devices): 24 MiB sent from each device in a step
      outside validated territory: 4 chips (validated: 8 to 4,096)
    """
    return [
        *_memory(est),
        *_gathered_weights(est.program),
        *(f"chip {line}" for line in assumed_figures([est.slice])),
        *_outside_validated(est),
    ]


def _memory(est: Estimate) -> Iterator[str]:
    memory = est.memory
    if memory.verdict == "tight":
        step, run, capacity = map(bytes_text, (memory.needed_bytes, memory.run_bytes, memory.capacity_bytes))
        yield f"memory is tight: the step takes {step} of {capacity} on each device, a whole run up to {run}"


def _gathered_weights(program: Program) -> Iterator[str]:
    """Mesh axes over which variables are gathered, with bytes."""
    sent: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for i, _, times in walk(program):
        for step, value, _ in i.transfers if isinstance(i, Move) else ():
            if STEP_KINDS[step.kind].gathers and is_weight(value.tensor):
                sent[step.axes] += times * step.sent_bytes
    for axes, size in sorted(sent.items(), key=lambda item: -item[1]):
        devices = prod(program.mesh.axis_size(axis) for axis in axes)
        where = f"{'+'.join(axes)} ({devices} devices)"
        yield f"moves weights over {where}: {bytes_text(size)} sent from each device in a step"


def _is_text(t: Tensor) -> bool:
    """True if an input is a batch of token sequences."""
    return t.dtype.kind == "integer" and len(t.shape) > 1


def _outside_validated(est: Estimate) -> Iterator[str]:
    """Respects in which an estimate is outside the range of validated runs."""
    outside = []
    dtypes = {row.mxu_dtype for row in est.rows if row.mxu_dtype} or {"bf16"}
    most = max(VALIDATED_MFU.get(dtype, VALIDATED_MFU["bf16"]) for dtype in dtypes)
    if est.mfu > most:
        outside.append(f"MFU {est.mfu:.1%} (validated: up to {most:.1%})")
    figures = [("chip", "", est.slice.chips, VALIDATED_CHIPS)]
    tokens = [t.tensor.shape for t in est.program.inputs.values() if _is_text(t.tensor)]
    if tokens:
        largest = max(tokens, key=lambda shape: shape.size)
        figures += [("token in a sequence", "tokens in a sequence", largest.sizes[-1], VALIDATED_LENGTHS)]
        figures += [("token per chip", "tokens per chip", largest.size // est.slice.chips, VALIDATED_TOKENS_PER_CHIP)]
    for one, several, value, (least, greatest) in figures:
        if not least <= value <= greatest:
            outside.append(f"{counted(value, one, several)} (validated: {least:,} to {greatest:,})")
    if outside:
        yield f"outside validated territory: {', '.join(outside)}"
