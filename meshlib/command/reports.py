"""`meshlib report`: the plan as a page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshlib.command.commands import FAILED, GOOD, planned_of
from meshlib.command.plan import Plan
from meshlib.command.subject import slice_of
from meshlib.core.errors import GraphError

if TYPE_CHECKING:
    from meshlib.report.alternatives import Alternative


def report(args: argparse.Namespace) -> int:
    """Write the page about the best plan, with the others as alternatives."""
    from meshlib.report.page import page, write_page
    from meshlib.report.ranked import alternatives_of
    from meshlib.report.verdict import headline

    where = slice_of(args.slice)
    subject, plans, search = planned_of(args, where)
    best = plans[0] if plans else None
    if best is None or best.est is None:
        raise GraphError(f"{subject.name} on {where.name}: no layout could be estimated: {_faults(plans)}")
    options, certificate = (
        (_alternatives(plans), "") if search is None else (alternatives_of(search), search.certificate)
    )
    write_page(args.out, page(best.est, f"{subject.name} on {where.name}", options, certificate), "report")
    print(f"{args.out}: {headline(best.est)}")
    return GOOD if best.est.fits else FAILED


def _faults(plans: Sequence[Plan]) -> str:
    return plans[0].fault if plans else "see meshlib search for what was refused"


def _alternatives(plans: Sequence[Plan]) -> list[Alternative]:
    from meshlib.report.alternatives import Alternative

    options = []
    for n, plan in enumerate(plan for plan in plans if plan.est is not None):
        assert plan.est is not None
        choices = " ".join(f"{name} {value}" for name, value in plan.choices.items())
        step, peak = plan.est.step_seconds, plan.est.memory.peak_bytes
        options.append(Alternative(f"{plan.name} on {plan.mesh}", step, peak, plan.est.fits, n == 0, choices))
    return options
