"""The verdict: whether it fits, step time, MFU, cost, bottleneck, and the estimated program and slice."""

from __future__ import annotations

from meshlib.core.slices import assumed_figures
from meshlib.core.text import PRICED, bytes_text, count_text, seconds_text, usd_text
from meshlib.estimation import Estimate
from meshlib.estimation.views.near_ties import near_tie
from meshlib.estimation.views.profile import UNIT_OF
from meshlib.estimation.views.whole_run import sizes_of
from meshlib.report.markup import EXACT, MODELLED, table, tag, text
from meshlib.report.memory import device_bar


def counted(est: Estimate) -> tuple[int, str] | None:
    """(count, "tokens" or "images") per step, from the inputs' dims "batch" and "length", or "height" and "width"."""
    examples, length = sizes_of(est.program)
    if examples and length:
        return examples * length, "tokens"
    pictures = any({"height", "width"} <= {*v.tensor.shape.names} for v in est.program.inputs.values())
    return (examples, "images") if examples and pictures else None


def headline(est: Estimate) -> str:
    """One sentence that says whether the program fits."""
    m = est.memory
    needs = f"needs {bytes_text(m.needed_bytes)} of {bytes_text(m.capacity_bytes)} on each device"
    if m.verdict == "tight":
        return f"Tight: {needs}, a whole run {bytes_text(m.run_bytes)}."
    if m.fits:
        return f"Fits: {needs}."
    return f"Does not fit: {needs}, {bytes_text(m.needed_bytes - m.capacity_bytes)} too much."


def verdict(est: Estimate, linked: bool = True) -> str:
    """Headline, memory bar and cards at the top; `linked`: cards link to the page's sections."""
    cards = []
    for name, value, more, href in _cards(est):
        inner = tag("span", text(name)) + tag("b", value) + tag("small", text(more))
        cards.append(tag("a" if linked else "div", inner, href=href if linked else None, class_="card"))
    words = tag("p", text(headline(est)), class_=f"verdict {'fits' if est.fits else 'over'}")
    return words + device_bar(est.memory) + tag("div", "".join(cards), class_="cards")


def _cards(est: Estimate) -> list[tuple[str, str, str, str]]:
    """(name, figure as HTML, caption, link) of each card."""
    m, shares = est.memory, sorted(est.bound_seconds.items(), key=lambda item: -item[1])
    step = est.step_seconds or 1.0
    percent = 100 * m.needed_bytes / m.capacity_bytes
    share = f"{percent:.{0 if percent >= 1 else 3}f}% {MODELLED}"
    sizes = f"needs {bytes_text(m.needed_bytes)} of {bytes_text(m.capacity_bytes)}"
    bound = ", ".join(f"{UNIT_OF[name]} {seconds / step:.0%}" for name, seconds in shares[:3] if seconds)
    bound += f"; at work: {at_work}" if (at_work := near_tie(est).replace("*", "")) else ""
    waits = f"{text(seconds_text(est.exposed_comm_seconds))} {MODELLED}"
    sent = f"sends {bytes_text(est.sent_bytes)} from each device"
    cards = [
        ("memory", share, sizes, "#memory"),
        ("step", f"{text(seconds_text(est.step_seconds))} {MODELLED}", _rate(est), "#timeline"),
        ("MFU", f"{est.mfu:.1%} {MODELLED}", _of_peak(est), "#roofline"),
        ("bound by", f"{text(UNIT_OF[shares[0][0]])} {MODELLED}", bound, "#timeline"),
        ("waits for collectives", waits, sent, "#collectives"),
    ]
    if est.slice.usd_per_hour is not None:
        price = f"for 1,000 steps at {usd_text(est.slice.usd_per_hour)} an hour{_price_of_work(est)}"
        cards.append(("cost", f"{text(usd_text(est.usd(1000)))} {MODELLED}", price, "#about"))
    return cards


def _of_peak(est: Estimate) -> str:
    return "of the bf16 peak" if est.hfu == est.mfu else f"{est.hfu:.1%} with recomputation"


def _rate(est: Estimate) -> str:
    between = f"between {seconds_text(est.lower_seconds)} and {seconds_text(est.upper_seconds)}"
    if (work := counted(est)) is None or not est.step_seconds:
        return between
    return f"{count_text(work[0] / est.step_seconds)} {work[1]}/s; {between}"


def _price_of_work(est: Estimate) -> str:
    if (work := counted(est)) is None:
        return ""
    size, many = PRICED[work[1]]
    return f", {usd_text(est.usd() / work[0] * size)} {many} {work[1]}"


def about(est: Estimate) -> str:
    """The subject of the estimate: slice, mesh, layout, compiler, exact counts."""
    program = est.program
    rows = [
        ("slice", text(est.slice)),
        ("mesh", f"<code>{text(program.mesh)}</code>"),
        ("layout", f"<code>{text(program.layout or '(nothing is split)')}</code>"),
        ("compiler", f"{text(est.compiler)}, overlap of collectives: {text(est.compiler.overlap)}"),
        *(("chip", text(line)) for line in assumed_figures([est.slice])),
        (f"flops of a device {EXACT}", f"{est.flops:,}"),
        (f"bytes over HBM {EXACT}", f"{est.hbm_bytes:,}"),
        (f"bytes sent by a device {EXACT}", f"{round(est.sent_bytes):,}"),
        (f"peak of memory, bytes {EXACT}", f"{est.memory.peak_bytes:,}"),
        (f"memory needed, bytes {MODELLED}", f"{est.memory.needed_bytes:,}"),
    ]
    return table(("", ""), rows)
