"""The placement of a program's mesh under which its step takes least, with its schedule.

Collectives hidden behind work cost nothing, so the placement with the least time of all collectives in sequence may not
be the fastest. It is scheduled first. From each scheduled step, those under other placements are predicted by the
exposed seconds and the prices of each kind of collective (`PricedPlacements.least_change`): at the best, so that of
several predictions the slowest counts. Placements predicted to be faster are scheduled, the best prediction first.
"""

from __future__ import annotations

from typing import NamedTuple

from hardware.placement import Placement
from meshlib.core.compiler import Compiler
from meshlib.estimation.time.attribution import exposed
from meshlib.estimation.time.physics import Physics
from meshlib.estimation.time.scheduling import StepSchedule, scheduled
from meshlib.estimation.work.communication import CompiledCollectives, KindOverAxes, PricedPlacements
from meshlib.estimation.work.plan import plan_of
from meshlib.estimation.work.units import UnitPlan
from meshlib.program.records import Program

WORTHWHILE = 0.0005  # of a step: placements predicted to save less are not scheduled


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
    plan, number = plan_of(program, compiler, compiled), among.cheapest
    others = dict.fromkeys(sorted(among.cheaper_for_some(number)), 0.0)  # with the predicted seconds of their steps
    best: PlacedStep | None = None
    while best is None or (others and others[number] < best.schedule.seconds * (1 - WORTHWHILE)):
        others.pop(number, None)
        schedule = scheduled(plan, among.placements[number], physics, compiler)
        if best is None or schedule.seconds < best.schedule.seconds:
            best = PlacedStep(among.placements[number], plan, schedule)
        exposed_seconds = _exposed_seconds(schedule) if others else {}
        for other, seconds in others.items():
            change = among.least_change(exposed_seconds, number, other)
            others[other] = max(seconds, schedule.seconds + change)
        number = min(others, key=others.__getitem__, default=number)
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
