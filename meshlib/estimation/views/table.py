"""Estimates as text: totals, the slowest operations, comparisons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hardware.chips import Chip
from meshlib.core.errors import GraphError
from meshlib.core.folding import alike, name_pattern, times_text
from meshlib.core.graph import FORWARD
from meshlib.core.text import bytes_text, count_text, counted, grid, seconds_text, usd_text, width, wrapped
from meshlib.estimation.views.rows import Row, names_of_forward
from meshlib.estimation.views.wiring import twisting

if TYPE_CHECKING:
    from meshlib.estimation.result import Estimate
    from meshlib.estimation.work.expert_load import ExpertReport


def table(est: Estimate, rows: int | None) -> str:
    """`Estimate.table`."""
    if rows is not None and (not isinstance(rows, int) or isinstance(rows, bool) or rows < 0):
        raise GraphError(f"Estimate.table: rows must be a number of rows or None, got {rows!r:.80}")
    lines = [*_head(est), "", *_rows(est, rows), "", est.memory.message]
    lines += [f"note: {note}" for note in est.program.notes] if est.fits else []  # otherwise the message includes them
    lines += [
        "",
        *_bounds(est),
        f"compiler: {est.compiler}; overlap of collectives: {est.compiler.overlap}",
        *str(est.placement).splitlines(),
        *filter(None, [twisting(est)]),
        *_unpublished(est),
    ]
    return "\n".join(lines)


def _head(est: Estimate) -> list[str]:
    program = est.program
    passed = ", which products in fewer bits exceed" if est.hfu > 1 else ""
    lines = [
        f"one step on {est.slice.name}, mesh {program.mesh}, layout {program.layout or '(none)'}, "
        f"precision {program.precision}",
        f"  step time        {seconds_text(est.step_seconds):>10}  modelled; between {seconds_text(est.lower_seconds)} "
        f"(busiest engine) and {seconds_text(est.upper_seconds)} (no overlap)",
        f"  bound            {est.bound:>10}  modelled",
        f"  MFU              {est.mfu:>10.2%}  modelled, of the bf16 peak{passed}; {est.hfu:.2%} with repeated work",
        f"  exposed comm     {seconds_text(est.exposed_comm_seconds):>10}  modelled; of "
        f"{seconds_text(est.comm_seconds)} in all",
        *_bubble(est),
        f"  MXU flops        {count_text(est.flops):>10}  exact, per device",
        f"  HBM bytes        {bytes_text(est.hbm_bytes):>10}  exact, per device, at the boundaries of fusion groups",
        f"  sent bytes       {bytes_text(est.sent_bytes):>10}  exact, per device, in "
        + counted(len(program.collectives), "value"),
    ]
    if est.experts is not None:
        lines.append(_experts(est.experts))
    if est.input is not None:
        lines.append(_input_line(est))
    if est.slice.usd_per_hour is not None:
        lines.append(
            f"  cost             {usd_text(est.usd(1000)):>10}  modelled, for 1,000 steps at the list price of "
            f"${est.slice.usd_per_hour:,.2f} an hour{_recalled(est.slice.chip, 'usd_per_chip_hour')}"
        )
    return lines


def _input_line(est: Estimate) -> str:
    """The input rate of the hosts, and whether devices wait for it."""
    given = est.input
    assert given is not None
    hosts = f"{given.hosts} host{'s' * (given.hosts > 1)}"
    how = "over PCIe" if given.pcie_seconds > given.host_seconds else f"at {given.rate:,.0f} a second from each"
    text = f"  input            {seconds_text(given.seconds):>10}  modelled; "
    return f"{text}{counted(given.examples, 'example')} of {hosts}, {how}; " + (
        f"the devices wait {seconds_text(est.input_wait_seconds)} a step"
        if est.input_wait_seconds
        else f"ready before the devices, which take {seconds_text(est.device_seconds)}"
    )


def _experts(report: ExpertReport) -> str:
    """Imbalance of the expert load, and its worst case."""
    lost = f", {report.dropped:.1%} of choices dropped" if report.dropped else ""
    return (
        f"  experts          {report.busiest:>9.2f}x  times the mean on the busiest device: {report.load}{lost}; "
        f"at worst a step takes {seconds_text(report.worst_seconds)}, modelled"
    )


def _bubble(est: Estimate) -> list[str]:
    """The bubble of a pipeline, if there is one."""
    if not est.bubble_seconds:
        return []
    seconds = seconds_text(est.bubble_seconds)
    return [f"  pipeline bubble  {seconds:>10}  modelled, {est.bubble_share:.1%} of the step: work on no microbatch"]


def _recalled(chip: Chip, figure: str) -> str:
    """A remark if a figure was recalled and not checked against its source."""
    return " (from memory)" if "from memory" in chip.source(figure) else ""


def _rows(est: Estimate, limit: int | None) -> list[str]:
    forward = names_of_forward(est.schedule)
    order = _folded(est, forward)
    shown = order if limit is None else order[:limit]
    head = ("operation", "kind", "phase", "count", "each*", "total*", "share*", "bound*", "util*", "flops",
            "HBM or sent", "line")  # fmt: skip
    right = [head.index(name) for name in ("count", "each*", "total*", "share*", "util*", "flops", "HBM or sent")]
    spare = [head.index(name) for name in ("flops", "HBM or sent", "util*", "kind", "each*", "phase")]
    cells = [head, *(_cells(est, group, forward) for group in shown)]
    lines = grid(cells, right, spare)
    rest = order[len(shown) :]
    if rest:
        total = sum(r.total_seconds for group in rest for r in group)
        lines.append(f"... {counted(len(rest), 'more row')}, {seconds_text(total)} together*")
    note = "; again: runs a second time, for the backward pass" if any(c[2] == "again" for c in cells) else ""
    lines.append(f"* modelled; all others exact, for one run on one device{note}")
    return lines


def _folded(est: Estimate, forward: frozenset[str]) -> list[list[Row]]:
    """Groups of rows, slowest first; rows whose names differ only in a number, as in unrolled layers, are one."""

    def shown(r: Row) -> tuple[str, ...]:
        name, *rest = _cells(est, [r], forward)
        return (name_pattern(name), *rest)

    return sorted(alike(est.rows, shown), key=lambda group: -sum(r.total_seconds for r in group))


def _cells(est: Estimate, group: Sequence[Row], forward: frozenset[str]) -> tuple[str, ...]:
    r, total = group[0], sum(r.total_seconds for r in group)
    name = r.name if r.kind == "compute" else f"{r.opcode} of {r.name}"
    share = total / est.step_seconds if est.step_seconds else 0.0
    moved = {"compute": r.hbm_bytes, "collective": r.sent_bytes, "copy": r.payload_bytes}[r.kind]
    return (
        times_text(name, len(group)),
        {"compute": r.opcode, "collective": "+".join(r.axes), "copy": "pcie"}[r.kind],
        "again" if r.phase != FORWARD and name in forward else r.phase,
        str(r.count),
        seconds_text(r.seconds),
        seconds_text(total),
        f"{share:.1%}",
        r.bound,
        f"{r.utilisation:.0%}" if r.bound != "latency" else "-",
        count_text(r.mxu_flops) if r.mxu_flops else "-",
        bytes_text(moved),
        r.source,
    )


def _bounds(est: Estimate) -> list[str]:
    parts = [f"{name} {seconds_text(s)}" for name, s in est.bound_seconds.items() if s]
    engines = [f"{name} {seconds_text(s)}" for name, s in est.engine_seconds.items() if s]
    return ["what bounds the step (modelled): " + ", ".join(parts), "busy engines (modelled): " + ", ".join(engines)]


def _unpublished(est: Estimate) -> list[str]:
    """The chip figures that affect times and have no public source."""
    names = [
        name for name in est.slice.chip.unpublished if name not in ("name_counts", "tdp_watts", "usd_per_chip_hour")
    ]
    head = f"chip {est.slice.chip.name}, assumed or recalled: "
    return wrapped(", ".join(names), head, ",") if names else []


LEAST_RATIO = 1e-6  # second over first: smaller figures are rounding errors of sums, shown as gone


def comparison(a: Estimate, b: Estimate) -> str:
    """`Estimate.compare`."""
    kinds = [k for k in a.memory.by_kind if a.memory.by_kind[k] or b.memory.by_kind[k]]
    figures: list[tuple[str, str, float, float, str]] = [
        ("step time", "seconds", a.step_seconds, b.step_seconds, "modelled"),
        ("  lower bound", "seconds", a.lower_seconds, b.lower_seconds, "modelled"),
        ("  upper bound", "seconds", a.upper_seconds, b.upper_seconds, "modelled"),
        ("computation", "seconds", a.compute_seconds, b.compute_seconds, "modelled"),
        ("communication", "seconds", a.comm_seconds, b.comm_seconds, "modelled"),
        ("waiting for input", "seconds", a.input_wait_seconds, b.input_wait_seconds, "modelled"),
        ("exposed comm", "seconds", a.exposed_comm_seconds, b.exposed_comm_seconds, "modelled"),
        ("pipeline bubble", "seconds", a.bubble_seconds, b.bubble_seconds, "modelled"),
        ("MFU", "share", a.mfu, b.mfu, "modelled"),
        ("MXU flops", "count", a.flops, b.flops, "exact"),
        ("HBM bytes", "bytes", a.hbm_bytes, b.hbm_bytes, "exact"),
        ("sent bytes", "bytes", a.sent_bytes, b.sent_bytes, "exact"),
        ("memory needed", "bytes", a.memory.needed_bytes, b.memory.needed_bytes, "modelled"),
        ("  in a whole run", "bytes", a.memory.run_bytes, b.memory.run_bytes, "modelled"),
        ("peak memory", "bytes", a.memory.peak_bytes, b.memory.peak_bytes, "exact"),
        *((f"  {k}", "bytes", a.memory.by_kind[k], b.memory.by_kind[k], "exact") for k in kinds),
    ]
    texts: dict[str, Callable[[float], str]] = {
        "seconds": seconds_text,
        "count": count_text,
        "bytes": bytes_text,
        "share": "{:.2%}".format,
    }
    cells = [("of one device", "first", "second", "ratio", "")]
    for name, unit, x, y, sure in figures:
        if not (x or y):
            continue  # neither has any
        ratio = "new" if not x else "gone" if y < LEAST_RATIO * x else f"{y / x:.3g}x"
        cells.append((name, texts[unit](x), texts[unit](y), ratio, sure))
    cells.append(("bound", a.bound, b.bound, "", "modelled"))
    cells.append(("compiler", str(a.compiler), str(b.compiler), "", "assumed"))
    cells.append(("overlap", a.compiler.overlap, b.compiler.overlap, "", "assumed"))
    cells.append(("fits", a.memory.verdict, b.memory.verdict, "", "modelled"))
    titles = [
        line for name, e in (("first:  ", a), ("second: ", b)) for line in wrapped(_title(e), name, ";", width())
    ]  # fmt: skip
    return "\n".join([*titles, *grid(cells, right=(1, 2, 3))])


def _title(est: Estimate) -> str:
    return f"{est.slice.name} {est.program.mesh} {est.program.layout or '(none)'}"
