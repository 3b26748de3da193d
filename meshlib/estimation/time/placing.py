"""The placement of a program's mesh under which its step takes least, with its schedule.

Collectives hidden behind work cost nothing, so the placement with the least time of all collectives in sequence may not
be the fastest. Starting from it, a step under another placement is predicted from the exposed seconds and the prices of
each kind of collective (`PricedPlacements.least_change`). Placements predicted to be faster are scheduled, the best
prediction first, and predictions start anew from each that is faster.
"""

from __future__ import annotations

from typing import NamedTuple

from hardware.placement import Placement
from meshlib.core.compiler import Compiler
from meshlib.estimation.time.attribution import exposed
from meshlib.estimation.time.physics import Physics
from meshlib.estimation.time.scheduling import StepSchedule, scheduled
from meshlib.estimation.work.communication import CompiledCollectives, KindOverAxes, Network, PricedPlacements
from meshlib.estimation.work.plan import plan_of, repriced
from meshlib.estimation.work.units import UnitPlan
from meshlib.program.records import Program


class PlacedStep(NamedTuple):
    """A step under a placement: its plan and schedule."""

    placement: Placement
    plan: UnitPlan
    schedule: StepSchedule


def fastest_step(
    among: PricedPlacements, program: Program, compiler: Compiler, physics: Physics,
    compiled: CompiledCollectives | None = None,
) -> PlacedStep:  # fmt: skip
    """The step of a program under the fastest of these placements, as far as predicted; others as of `plan_of`."""
    number = among.cheapest
    placement = among.placements[number]
    chip = placement.slice.chip
    plan = plan_of(program, Network(placement), compiler, compiled)
    best = PlacedStep(placement, plan, scheduled(plan, chip, physics, compiler))
    others = among.cheaper_for_some(number)
    exposed_seconds = _exposed_seconds(best.schedule) if others else {}
    while others:
        changes = {n: among.least_change(exposed_seconds, number, n) for n in others}
        other = min(others, key=lambda n: changes[n])
        if changes[other] >= 0:
            break
        others.remove(other)
        placement = among.placements[other]
        plan = repriced(best.plan, Network(placement))
        schedule = scheduled(plan, chip, physics, compiler)
        if schedule.seconds < best.schedule.seconds:
            best, number = PlacedStep(placement, plan, schedule), other
            exposed_seconds = _exposed_seconds(schedule)
    return best


def _exposed_seconds(schedule: StepSchedule) -> dict[KindOverAxes, float]:
    """Seconds for which the core waits for collectives, by their kind and mesh axes; loops included."""
    totals: dict[KindOverAxes, float] = {}
    loops = [(schedule, 1.0)]
    for body, times in loops:
        loops += [(event.loop, times * event.trips) for event in body.events if event.loop is not None]
        for begin, end, event in exposed(body):
            if event.move is not None:
                key = event.move.kind, event.move.axes
                totals[key] = totals.get(key, 0.0) + times * (end - begin)
    return totals
