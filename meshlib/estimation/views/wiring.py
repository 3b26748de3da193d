"""The other wiring of a slice, twisted or not, and its effect on a step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hardware.slices import Slice, shape_name
from meshlib.core.text import seconds_text
from meshlib.estimation.time.placing import fastest_step
from meshlib.estimation.work.communication import priced_placements

if TYPE_CHECKING:
    from meshlib.estimation.result import Estimate

WORTH_SAYING = 0.01  # of the step


def other_wiring(est: Estimate) -> Estimate | None:
    """The estimate of the program on the same chips with the other wiring: twisted if `est` is not, and vice versa.

    Returns: with the best placement there; None for a slice whose shape or chip has no twist.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", "batch:1024;d:65536", "bfloat16")
      ...     swapped = mtf.constrain(x, "d:all") * 2
      ...     program = mtf.lower({"y": swapped}, mesh="all:128", layout="batch:all;d:all?")
      >>> est = mtf.estimate(program, "v4-4x4x8")
      >>> other = other_wiring(est)
      >>> other.slice.name, other.step_seconds < est.step_seconds
      ('v4-4x4x8_twisted', True)
    """
    here = est.slice
    if not here.twistable:
        return None
    times = f"{here.slices}*" if here.slices > 1 else ""
    shape = shape_name(here.single).removesuffix("_twisted") + "_twisted" * (not here.twisted)
    slice_ = Slice(f"{times}{here.chip.name}-{shape}", here.chip)
    among = priced_placements(slice_, est.program, est.compiler.whole_torus_axes)
    step = fastest_step(among, est.program, est.compiler, est.physics)
    return replace(est, slice=slice_, placement=step.placement, plan=step.plan, schedule=step.schedule)


def twisting(est: Estimate) -> str | None:
    """One line if the other wiring would shorten the step by a percent or more, otherwise None."""
    other = other_wiring(est) if est.comm_seconds else None
    if other is None or other.step_seconds > (1 - WORTH_SAYING) * est.step_seconds:
        return None
    saved = 1 - other.step_seconds / est.step_seconds
    return f"wiring: on {other.slice.name} a step takes {seconds_text(other.step_seconds)}, {saved:.1%} less (modelled)"
