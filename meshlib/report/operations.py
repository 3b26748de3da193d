"""The table of operations: time, bottleneck, and links to the pictures."""

from __future__ import annotations

from collections.abc import Sequence

from meshlib.core.folding import times_text
from meshlib.core.text import bytes_text, count_text, seconds_text
from meshlib.estimation import Estimate
from meshlib.estimation.views.profile import UNITS, ProfilePart
from meshlib.report.links import PageAnchors
from meshlib.report.markup import EXACT, MODELLED, folding_table, paragraph, scoped, section, tag, text

SHOWN, MOST = 25, 400  # rows that are not folded away, and rows in all


def operations(est: Estimate, anchors: PageAnchors) -> str:
    """The section of operations, one row per group of unrolled layers; call it last, after all pictures."""
    by_name: dict[str, list[ProfilePart]] = {}
    for part in est.profile().parts:
        by_name.setdefault(part.name, []).append(part)
    work = work_by_name(est)
    rows, ids = [], []
    for names in anchors.rows[:MOST]:
        members = [part for name in names for part in by_name[name]]
        flops, moved = map(sum, zip(*(work.get(name, (0, 0.0)) for name in names), strict=True))
        rows.append(_row(est, names, members, flops, moved, anchors))
        ids.append(anchors.op(names[0]))
    head = (
        "operation", "kind", "phase", f"time {MODELLED}", f"of the step {MODELLED}", "bound by", f"flops {EXACT}",
        f"HBM or sent {EXACT}", "line",
    )  # fmt: skip
    of_all = f" of {len(anchors.rows) - SHOWN:,}" if len(anchors.rows) > MOST else ""
    listed = folding_table(head, rows, SHOWN, f" operations{of_all}", (3, 4, 6, 7), ids, sortable=True, long=(0,))
    caption = paragraph("Every second of the step is attributed to one operation, so the column adds up to the step.")
    return section("operations", "Operations", caption, listed)


def work_by_name(est: Estimate) -> dict[str, tuple[int, float]]:
    """(FLOPs, bytes over HBM or sent) per step of each operation, by its name in the profile. Exact."""
    work: dict[str, tuple[int, float]] = {}
    for row in est.rows:
        name = f"{row.opcode} of {row.name}" if row.kind == "collective" else row.name
        flops, moved = work.get(name, (0, 0.0))
        moved += (row.hbm_bytes or row.sent_bytes or row.payload_bytes) * row.count
        work[name] = flops + row.mxu_flops * row.count, moved
    return work


def _row(
    est: Estimate, names: Sequence[str], parts: Sequence[ProfilePart], flops: int, moved: float, anchors: PageAnchors
) -> tuple[str, ...]:
    seconds = sum(p.total_seconds for p in parts)
    by_unit = {unit: sum(p.seconds.get(unit, 0.0) for p in parts) for unit in UNITS}
    bound = max(by_unit, key=lambda unit: by_unit[unit]) if seconds else ""
    share = seconds / est.step_seconds if est.step_seconds else 0.0
    shown = dict.fromkeys(place for name in names for place in anchors.shown.get(name, ()))
    also = ", ".join(tag("a", text(what), href=f"#{anchor}") for what, anchor in shown)
    key = f'<i class="key u-{bound.lower()}"></i>{bound}' if bound else ""
    named = tag("span", scoped(times_text(names[0], len(names))), data_op=anchors.op(names[0])) + (
        f"<br><small>in {also}</small>" if also else ""
    )
    return (
        named,
        _joined(p.kind for p in parts), _joined(p.phase for p in parts), text(seconds_text(seconds)),
        f"{share:.1%}", key,
        text(count_text(flops)) if flops else "", text(bytes_text(moved)) if moved else "",
        _joined(p.source for p in parts),
    )  # fmt: skip


def _joined(values: object) -> str:
    assert hasattr(values, "__iter__")
    return ", ".join(tag("span", text(v), class_="word") for v in dict.fromkeys(str(v) for v in values if v))
