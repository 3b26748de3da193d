"""Notebook cells for each type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import singledispatch

from meshlib.core.graph import Graph, Tensor
from meshlib.core.text import bytes_text, count_text, counted, seconds_text, usd_text
from meshlib.estimation import DeviceMemory, Estimate
from meshlib.estimation.views.profile import UNITS, Profile
from meshlib.lowering import Session
from meshlib.models import TransformerConfig
from meshlib.program.analysis.memory import KINDS, Live, Memory
from meshlib.program.records import Collectives, Program
from meshlib.program.views.listing import listing
from meshlib.report.alternatives import alternatives_of, ranking, scatter
from meshlib.report.collectives import causes_of
from meshlib.report.links import PageAnchors
from meshlib.report.markup import EXACT, MODELLED, asset, folded, folding_table, legend, paragraph, table, tag, text
from meshlib.report.memory import area, bar, device_bar, live_table
from meshlib.report.roofline import roofline_picture
from meshlib.report.svg import Picture, Scale
from meshlib.report.timeline import timeline
from meshlib.report.torus import torus_picture
from meshlib.report.verdict import verdict
from meshlib.searching import Found
from meshlib.searching.serving_result import Serving, ServingPoint
from meshlib.simulation import Simulation

ROWS, LINES = 12, 120


def cell(value: object) -> str:
    """HTML of a value, including its style."""
    return tag("div", f"<style>{asset('page.css')}</style>{content(value)}", class_="meshlib")


@singledispatch
def content(value: object) -> str:
    """HTML of a value without its style.

    Raises: TypeError for a type that has none.
    """
    raise TypeError(f"{type(value).__name__} has no cell")


# ------------------------------------------------------------ programs before lowering


@content.register
def _tensor(x: Tensor) -> str:
    op = x.operation
    size = x.shape.size
    rows = [
        ("dims", text(x.shape)),
        ("dtype", text(x.dtype.name)),
        ("elements", f"{size:,}, {text(bytes_text(x.dtype.size_bytes(size)))} on one device {EXACT}"),
        ("made by", f"{text(op.opdef.name)} '{text(op.name)}', {text(op.source)}"),
        ("of", text(", ".join(map(str, op.inputs)) or "nothing")),
    ]
    return table(("tensor", tag("code", text(x.name))), rows, long=(1,))


@content.register
def _graph(graph: Graph) -> str:
    counts: dict[str, int] = {}
    for op in graph.operations:
        counts[op.opdef.name] = counts.get(op.opdef.name, 0) + 1
    often = sorted(counts.items(), key=lambda item: -item[1])
    kinds = ", ".join(f"{count:,} {name}" for name, count in often[:ROWS])
    kinds += ", ..." if len(often) > ROWS else ""
    variables = [v.output for v in graph.variables.values()]
    stored = [(text(x.name), text(f"{x.dtype}{x.shape}"), f"{x.shape.size:,}") for x in variables]
    given = [(text(op.output.name), text(f"{op.output.dtype}{op.output.shape}")) for op in graph.inputs.values()]
    return "".join(
        [
            paragraph(text(repr(graph))),
            folded("inputs", table(("input", "type"), given), is_open=True) if given else "",
            folding_table(("variable", "type", "elements"), stored, ROWS, " variables", (2,)),
            paragraph(f"operations: {text(kinds)}"),
        ]
    )


@content.register
def _config(config: TransformerConfig) -> str:
    experts = f", {config.active_parameters:,} active" if config.experts is not None else ""
    per_token = config.flops_per_token(config.max_length or 8192)
    summary = f"{config.parameters:,} parameters{experts}; {count_text(per_token)} flops a token of a training step"
    rows = []
    for f in fields(config):
        value = getattr(config, f.name)
        if f.name != "name" and value != f.default:
            rows.append((text(f.name), text(value)))
    return paragraph(f"<b>{text(config.name)}</b>: {text(summary)} {EXACT}") + table(("field", "value"), rows)


# ------------------------------------------------------------ lowered programs


@content.register
def _program(program: Program) -> str:
    head = (
        f"mesh <code>{text(program.mesh)}</code>, layout <code>{text(program.layout or '(nothing is split)')}</code>; "
        f"each core sends {text(bytes_text(program.sent_bytes))} {EXACT} and holds "
        f"{text(bytes_text(program.memory.peak_bytes))} {EXACT} at the peak; "
        f"{text(count_text(program.work.mxu_flops))} flops {EXACT}"
    )
    notes = "".join(tag("li", text(note)) for note in program.notes)
    lines = listing(program).splitlines()
    shown = lines[:LINES]
    if lines[LINES:]:
        shown.append(f"... {counted(len(lines) - LINES, 'more line')}: print(program)")
    listed = folded("what each core runs", tag("div", tag("pre", text("\n".join(shown))), class_="scroll"))
    return paragraph(head) + (tag("ul", notes) if notes else "") + content(program.collectives) + listed


@content.register
def _collectives(collectives: Collectives) -> str:
    if not collectives:
        return paragraph("sends nothing")
    rows = []
    for cause in causes_of(collectives):
        c = cause.largest
        avoid = f"<br><span class='avoid'>avoid: {text(c.avoid)}</span>" if c.avoid else ""
        more = f" and {len(cause.members) - 1} more" if len(cause.members) > 1 else ""
        rows.append((
            f"{text(c.kind)} over {text('+'.join(c.axes))}", text(c.phase), text(bytes_text(cause.sent_bytes)),
            f"{text(c.tensor)}{more}, {text(c.source)}<br>{text(c.reason)}{avoid}",
        ))  # fmt: skip
    head = ("collective", "phase", f"sent {EXACT}", "largest, why, and how to avoid it")
    return folding_table(head, rows, ROWS, " causes", (2,), long=(3,))


@content.register
def _memory(memory: Memory) -> str:
    summary = f"peak {text(bytes_text(memory.peak_bytes))} {EXACT} on each device, at {text(memory.at)}"
    return paragraph(summary) + bar(memory.by_kind, memory.peak_bytes) + _kinds(memory.by_kind) + _live(memory.live)


@content.register
def _device_memory(memory: DeviceMemory) -> str:
    first = memory.message.splitlines()[0]
    return paragraph(text(first)) + device_bar(memory) + _kinds(memory.by_kind) + _live(memory.live)


def _kinds(by_kind: dict[str, int]) -> str:
    parts = [(n, kind, by_kind[kind]) for n, kind in enumerate(KINDS) if by_kind.get(kind)]
    return legend([(f"k-{n}", f"{kind} {bytes_text(size)}") for n, kind, size in parts])


def _live(live: Sequence[Live]) -> str:
    return folded("what is live at the peak", live_table(live, PageAnchors()))


# ------------------------------------------------------------ costs


@content.register
def _estimate(est: Estimate) -> str:
    waits = f"{seconds_text(est.exposed_comm_seconds)} of {seconds_text(est.step_seconds)}"
    parts = [
        ("memory over the step", area(est, linked=False)),
        (f"timeline: waits for collectives {waits}", timeline(est, PageAnchors())),
        ("roofline", roofline_picture(est, PageAnchors())),
        ("mesh on the torus", torus_picture(est)),
    ]
    title = paragraph(f"mesh <code>{text(est.program.mesh)}</code>, layout <code>{text(est.program.layout)}</code>")
    return title + verdict(est, linked=False) + "".join(folded(name, part) for name, part in parts if part)


@content.register
def _profile(profile: Profile) -> str:
    step = profile.step_seconds or 1.0
    used = [unit for unit in UNITS if profile.seconds[unit]]
    bars = "".join(
        f'<i class="u-{unit.lower()}" style="width:{100 * profile.seconds[unit] / step:.2f}%"></i>' for unit in used
    )
    keys = legend([(f"u-{unit.lower()}", f"{unit} {profile.seconds[unit] / step:.1%}") for unit in used])
    rows = [
        (
            text(p.name),
            text(p.kind),
            text(seconds_text(p.total_seconds)),
            f"{p.total_seconds / step:.1%}",
            text(p.source),
        )
        for p in profile.parts[:ROWS]
    ]
    summary = f"{seconds_text(profile.step_seconds)} a step {MODELLED}, by what bounds each moment; the MXU works "
    head = ("operation", "kind", f"time {MODELLED}", "of the step", "line")
    first = paragraph(f"{text(profile.title)}: {summary}{profile.mxu_share:.1%} of it")
    return first + tag("div", bars, class_="bar") + keys + table(head, rows, (2, 3), long=(0,))


@content.register
def _search(search: Found) -> str:
    options = alternatives_of(search)
    if not options:
        return tag("pre", text(search))
    best = next(option for option in options if option.chosen)
    capacity = search.best.candidate.slice.usable_hbm_bytes_per_device
    summary = paragraph(f"best: <b>{text(best.name)}</b> {text(best.choices)}") + paragraph(text(search.certificate))
    return summary + scatter(options, capacity, linked=False) + ranking(options[:ROWS], linked=False)


@content.register
def _serving(serving: Serving) -> str:
    rows = [_serving_row(p, p in serving.frontier) for p in serving.points]
    head = ("layout", "batch", f"a token {MODELLED}", f"tokens/s {MODELLED}", f"1 M tokens {MODELLED}",
            f"prefill {MODELLED}", f"needs {MODELLED}")  # fmt: skip
    summary = paragraph(f"{text(repr(serving).strip('<>'))}; bold is the frontier of latency and throughput")
    return summary + _latency_picture(serving) + folding_table(head, rows, ROWS, " points", range(1, 7))


def _serving_row(p: ServingPoint, best: bool) -> tuple[str, ...]:
    cost = p.usd_per_million_tokens
    name = f"<b>{text(p.name)}</b>" if best else text(p.name)
    return (name, f"{p.batch:,}", text(seconds_text(p.token_seconds)), f"{p.tokens_per_second:,.0f}",
            "" if cost is None else text(usd_text(cost)), text(seconds_text(p.prefill_seconds)),
            text(bytes_text(p.needed_bytes)))  # fmt: skip


def _latency_picture(serving: Serving) -> str:
    if not serving.points:
        return ""
    picture = Picture(460, 280, label="throughput over latency")
    across = Scale((0.0, max(p.token_seconds for p in serving.points) * 1.06), (picture.left, picture.right))
    up = Scale((0.0, max(p.tokens_per_second for p in serving.points) * 1.1), (picture.bottom, picture.top))
    picture.axis_below(across, lambda t: seconds_text(t) if t else "0", "time of a token ≈")
    picture.axis_left(up, lambda n: f"{count_text(n)}/s")
    line = [(across(p.token_seconds), up(p.tokens_per_second)) for p in serving.frontier]
    picture.path(line, "front", title="nothing is both faster and cheaper")
    for p in serving.points:
        class_ = "option chosen" if p in serving.frontier else "option"
        about = (
            f"{p.name}, batch {p.batch}: {seconds_text(p.token_seconds)}, {count_text(p.tokens_per_second)} tokens/s"
        )
        picture.circle(across(p.token_seconds), up(p.tokens_per_second), 4, class_, about)
    return str(picture)


@content.register
def _session(session: Session) -> str:
    rows = [
        (
            text(p.mesh),
            text(p.layout or "(nothing is split)"),
            text(bytes_text(p.sent_bytes)),
            f"{len(p.collectives):,}",
        )
        for p in session.programs
    ]
    summary = paragraph(text(repr(session)))
    return summary + folding_table(
        ("mesh", "layout", f"sent by a core {EXACT}", "collectives"), rows, ROWS, " programs", (2, 3)
    )


@content.register
def _simulation(sim: Simulation) -> str:
    rows = [
        (text(name), text(f"{v.tensor.dtype}{v.tensor.shape}"), text(v.sharding), text(bytes_text(v.local_bytes)))
        for name, v in sim.program.variables.items()
    ]
    head = ("variable", "type", "split", f"on each core {EXACT}")
    return paragraph(text(repr(sim))) + folding_table(head, rows, ROWS, " variables", (3,))
