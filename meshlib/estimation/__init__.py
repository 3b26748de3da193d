"""Estimates: time and memory of a step on a slice, without allocating an array.

No loop runs over devices: every device does the same, so an estimate for 2,048 cores takes as long as for 8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hardware.checks import HardwareError
from hardware.placement import Placement
from hardware.slices import Slice
from meshlib.core.compiler import Compiler, require_compiler
from meshlib.core.errors import GraphError, SliceError
from meshlib.core.garbage import uncollected
from meshlib.core.slices import slice_for
from meshlib.estimation.memory.device_memory import DeviceMemory
from meshlib.estimation.memory.remedies import Remedy
from meshlib.estimation.result import Estimate, RooflinePoint
from meshlib.estimation.time.balance import balance
from meshlib.estimation.time.host_input import HostInput, input_time
from meshlib.estimation.time.physics import CALIBRATED, Physics
from meshlib.estimation.time.placing import fastest_step
from meshlib.estimation.views.rows import Row
from meshlib.estimation.work.communication import CompiledCollectives, PricedPlacements, priced_placements
from meshlib.estimation.work.expert_load import ExpertLoad, ExpertReport, grouped_products, under_load
from meshlib.program.records import Program, require_program

__all__ = [
    "CALIBRATED", "DeviceMemory", "Estimate", "HostInput", "Physics", "Remedy", "RooflinePoint", "Row", "balance",
    "estimate",
]  # fmt: skip


@uncollected
def estimate(
    program: Program,
    slice: Any,
    compiler: Compiler | None = None,
    placement: Placement | Mapping[str, int] | None = None,
    physics: Physics = CALIBRATED,
    input: HostInput | None = None,
    compiled: Any = None,
    expert_load: object = None,
) -> Estimate:
    """Time and memory of one step on a slice. Nothing is allocated; the cost of an estimate is independent of devices.

    Args:
      program: the result of `mtf.lower`.
      slice: a name like "v3-8", or a `hardware.Slice` (for a custom chip), with as many devices as the mesh.
      compiler: the scheduling and placement rules: which collectives overlap, whether loops are unrolled, overhead per
        step. By default the compiler that the program was lowered for, `mtf.XLA_TPU` unless specified; stationary
        weights are always those of the lowering.
      placement: the position of the mesh on the torus; by default the one with the shortest step found among those
        that the compiler allows. A dict like {"data": 4} gives the factor of each axis that spans slices, as
        `create_hybrid_device_mesh` of JAX does: the best of those placements.
      physics: efficiency losses against ideal engines; `Physics().without_losses()` is a machine without losses.
      input: the rate at which hosts prepare examples, `mtf.HostInput(examples_per_second=...)`; a step takes at least
        as long as its input. By default input is never the bottleneck.
      compiled: the result of `mtf.compile_for` for this program: prices the collectives that the compiler emitted
        instead of the planned ones. `.sent_bytes` remains that of the plan.
      expert_load: the load of grouped experts: "balanced" (the default), the ratio of the busiest expert to the mean,
        such as 1.5, or a measured count per expert. Where experts are split the step waits for the busiest device;
        `.experts` has its load, the fraction of dropped choices, and the step time in the worst case.
    Returns: an Estimate: `.step_seconds .mfu .fits .memory .exposed_comm_seconds .bound .rows .table()`.
    Raises: SliceError for an unknown slice, one of another size than the mesh, or a placement of another mesh;
      GraphError for other bad arguments.
    Cost model: `meshlib.estimation.time.scheduling` for the formulas, `hardware` for rates and their sources.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [mtf.Dimension("batch", 8192), mtf.Dimension("inner", 8192)], "bfloat16")
      ...     w = mtf.variable("w", [mtf.Dimension("inner", 8192), mtf.Dimension("outer", 8192)], dtype="bfloat16")
      ...     program = mtf.lower({"y": mtf.einsum([x, w])}, mesh="cores:8", layout="batch:cores")
      >>> est = mtf.estimate(program, "v3-8")
      >>> est.bound, est.fits, est.flops == 2 * 1024 * 8192 * 8192
      ('mxu', True, True)
    """
    require_program(program, "estimate")
    if expert_load is not None:
        more = {"placement": placement, "physics": physics, "input": input}
        return _under_load(program, slice, compiler, compiled, expert_load, more)
    compiler = _scheduling(compiler, program.compiler)
    if not isinstance(physics, Physics):
        raise GraphError(f"estimate: physics must be an mtf.Physics, got {physics!r:.80}")
    slice_ = slice_for("estimate", program.mesh, slice)
    across = _over_dcn(program, slice_, placement) if isinstance(placement, Mapping) else ()
    if placement is not None and not isinstance(placement, Mapping):
        _check_placement(program, slice_, placement)
    try:
        moves = None if compiled is None else _compiled_moves(program, compiled)
        if isinstance(placement, Placement):
            among = PricedPlacements((), (placement,), ((),))
        else:
            among = priced_placements(slice_, program, compiler.whole_torus_axes, across)
        step = fastest_step(among, program, compiler, physics, moves)
    except HardwareError as fault:  # a chip without links between chips, without a bfloat16 rate, ...
        raise SliceError(f"estimate: program on mesh {program.mesh} cannot run on {slice_.name}: {fault}") from None
    fed = None if input is None else input_time(program, slice_, input)
    return Estimate(program, slice_, compiler, step.placement, physics, step.plan, step.schedule, fed)


def _under_load(
    program: Program, slice: Any, compiler: Compiler | None, compiled: Any, given: object, more: Mapping[str, Any]
) -> Estimate:
    """The estimate under a load of experts, with the step time under the worst load."""
    load = ExpertLoad.of(given)
    products = list(grouped_products(program))
    if not products:
        raise GraphError(
            "estimate: expert_load is for grouped experts, mtf.layers.moe(form='grouped'), and the program has none"
        )
    if compiled is not None:
        raise GraphError("estimate: give expert_load, or compiled, not both")
    busiest, dropped = max((p.busiest(load), p.dropped(load)) for p in products)
    expected = estimate(under_load(program, load), slice, compiler, **more)
    worst = estimate(under_load(program, None), slice, compiler, **more)
    return replace(expected, experts=ExpertReport(load, busiest, dropped, worst.step_seconds))


def _compiled_moves(program: Program, compiled: Any) -> CompiledCollectives:
    """The collectives of a compiled program; GraphError for anything else, and for another program."""
    if not callable(getattr(compiled, "kept_moves", None)):
        raise GraphError(f"estimate: compiled must be what mtf.compile_for returned, got {compiled!r:.80}")
    if compiled.program is not program:
        raise GraphError("estimate: compiled is of another program; compile this one: mtf.compile_for(program, slice)")
    compiled_moves: CompiledCollectives = compiled.kept_moves()
    return compiled_moves


def _scheduling(given: object, of_program: Compiler) -> Compiler:
    """The compiler whose schedule is estimated, with the weight-stationary choice of the lowering."""
    if given is None:
        return of_program
    compiler = require_compiler(given, "estimate")
    if compiler.stationary_weights == of_program.stationary_weights:
        return compiler
    return replace(compiler, stationary_weights=of_program.stationary_weights)


def _over_dcn(program: Program, slice_: Slice, sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """The part of each mesh axis that spans slices, validated."""
    mesh = program.mesh.sizes_by_axis
    for axis, size in sizes.items():
        if axis not in mesh:
            raise SliceError(f"estimate: placement has axis {axis!r}; mesh {program.mesh} has {', '.join(mesh)}")
        if not isinstance(size, int) or size < 1 or mesh[axis] % size:
            raise SliceError(
                f"estimate: placement gives {size!r} of axis {axis!r} to slices; it must divide its size, {mesh[axis]}"
            )
    if math.prod(sizes.values()) != slice_.slices:
        raise SliceError(
            f"estimate: placement joins {math.prod(sizes.values())} slices, {dict(sizes)}, but {slice_.name} has "
            f"{slice_.slices}"
        )
    return tuple((axis, size) for axis, size in sizes.items() if size > 1)


def _check_placement(program: Program, slice_: Slice, placement: object) -> None:
    if not isinstance(placement, Placement):
        raise SliceError(f"estimate: placement must be a hardware.Placement, got {placement!r:.80}")
    mesh = dict(program.mesh.sizes_by_axis)
    if placement.mesh != mesh or placement.slice != slice_:
        raise SliceError(
            f"estimate: the placement lays mesh {placement.mesh} over {placement.slice.name}, but the program has "
            f"mesh {mesh} and the slice is {slice_.name}"
        )
