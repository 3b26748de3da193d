"""Collectives of a program grouped by cause, with bytes, time, reason and how to avoid them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshlib.core.text import bytes_text, seconds_text
from meshlib.estimation import Estimate
from meshlib.estimation.time.scheduling import StepSchedule
from meshlib.program.records import Collective
from meshlib.report.links import PageAnchors
from meshlib.report.markup import EXACT, MODELLED, folded, paragraph, section, table, text

MEMBERS = 40  # collectives listed per cause


@dataclass(frozen=True)
class Cause:
    """Collectives of one kind, axes, phase and reason (apart from operation names in it).

    Attributes:
      members: in descending order of bytes; sent_bytes: total per step, exact.
      seconds: total on the wire per step, hidden or not, modelled; None without an estimate.
    """

    kind: str
    axes: tuple[str, ...]
    phase: str
    members: tuple[Collective, ...]
    sent_bytes: float
    seconds: float | None

    @property
    def largest(self) -> Collective:
        """The member that sends most."""
        return self.members[0]

    @property
    def launches(self) -> int:
        """Launches per step of all members together."""
        return sum(c.count for c in self.members)


def causes_of(collectives: Sequence[Collective], est: Estimate | None = None) -> list[Cause]:
    """Causes in descending order of time, or of bytes sent if nothing was estimated.

    Args:
      collectives: `program.collectives`.
      est: an estimate of the program, for seconds.
    """
    groups: dict[tuple[object, ...], list[Collective]] = {}
    for c in collectives:
        groups.setdefault((c.kind, c.axes, c.phase, _pattern(c.reason)), []).append(c)
    seconds = None if est is None else _seconds(collectives, est)
    causes = []
    for members in groups.values():
        ranked = sorted(members, key=lambda c: -c.sent_bytes * c.count)
        first = ranked[0]
        taken = None if seconds is None else sum(seconds[id(c)] for c in ranked)
        sent = sum(c.sent_bytes * c.count for c in ranked)
        causes.append(Cause(first.kind, first.axes, first.phase, tuple(ranked), sent, taken))
    return sorted(causes, key=lambda cause: (-(cause.seconds or 0.0), -cause.sent_bytes))


def _pattern(reason: str) -> str:
    """A reason with the names of operations and tensors blanked; these have a scope or a number."""
    return re.sub(r"'[^']*[/_0-9][^']*'", "''", reason)


Key = tuple[str, tuple[str, ...], str]  # kind, axes, reason; "" for all reasons


def _seconds(collectives: Sequence[Collective], est: Estimate) -> Mapping[int, float]:
    """Wire time of each collective per step, by `id`.

    The moves of a schedule may be several collectives that go together under the reason of the first. So the time of a
    kind over the same axes is shared out by bytes, at the rates of moves with the same reason where there are any.
    """
    seconds, sent = _totals(est)
    weights = {}
    for c in collectives:
        key = (c.kind, c.axes, c.reason)
        key = key if sent.get(key) else (c.kind, c.axes, "")
        rate = seconds.get(key, 0.0) / sent[key] if sent.get(key) else 0.0
        weights[id(c)] = rate * c.sent_bytes * c.count
    shares: dict[Key, float] = defaultdict(float)
    for c in collectives:
        shares[c.kind, c.axes, ""] += weights[id(c)]
    own = {}
    for c in collectives:
        total = shares[c.kind, c.axes, ""]
        own[id(c)] = weights[id(c)] * seconds[c.kind, c.axes, ""] / total if total else 0.0
    return own


def _totals(est: Estimate) -> tuple[dict[Key, float], dict[Key, float]]:
    """Wire seconds and sent bytes per step of a schedule's collectives."""
    seconds: dict[Key, float] = defaultdict(float)
    sent: dict[Key, float] = defaultdict(float)

    def visit(schedule: StepSchedule, times: int) -> None:
        for e in schedule.events:
            if e.loop is not None:
                visit(e.loop, e.runs(times))
            elif e.move is not None and e.cost is not None:
                for reason in (e.move.reason, ""):
                    seconds[e.move.kind, e.move.axes, reason] += times * e.cost.seconds
                    sent[e.move.kind, e.move.axes, reason] += times * e.move.sent_bytes

    visit(est.schedule, 1)
    return seconds, sent


def collectives(est: Estimate, anchors: PageAnchors) -> str:
    """The section of collectives."""
    program = est.program
    if not program.collectives:
        return section("collectives", "Collectives", paragraph("The program sends nothing."))
    causes = causes_of(program.collectives, est)
    head = paragraph(
        f"A device sends {text(bytes_text(program.sent_bytes))} {EXACT} in a step, "
        f"{text(program.choice)} under this layout."
    )
    rows, ids = [], []
    for n, cause in enumerate(causes):
        c = cause.largest
        for member in cause.members:
            anchors.show(member.tensor, "collectives", f"cause-{n}")
        href = anchors.href(c.tensor)
        name = f'<a href="{href}">{text(c.tensor)}</a>' if href else text(c.tensor)
        avoid = f'<br><span class="avoid">avoid: {text(c.avoid)}</span>' if c.avoid else ""
        explanation = f"{name}, {text(c.source)}<br>{text(c.reason)}{avoid}{_members(cause)}"
        rows.append((
            f"{text(c.kind)}<br>over {text('+'.join(c.axes))}", text(c.phase), f"{cause.launches:,}",
            text(bytes_text(cause.sent_bytes)), text(seconds_text(cause.seconds or 0.0)), explanation,
        ))  # fmt: skip
        ids.append(f"cause-{n}")
    titles = (
        "what",
        "phase",
        f"runs {EXACT}",
        f"sent {EXACT}",
        f"on the wire {MODELLED}",
        "largest, why, and how to avoid it",
    )
    return section("collectives", "Collectives by cause", head, table(titles, rows, (2, 3, 4), ids, True, (5,), (0, 1)))


def _members(cause: Cause) -> str:
    if len(cause.members) == 1:
        return ""
    lines = [
        f"{text(bytes_text(c.sent_bytes))} \u00d7{c.count:,} of {text(c.tensor)}, {text(c.source)}"
        for c in cause.members[:MEMBERS]
    ]
    rest = len(cause.members) - MEMBERS
    lines += [f"and {rest:,} more"] if rest > 0 else []
    return folded(f"all {len(cause.members)} of this cause", "<br>".join(lines))
