"""The verdict: whether it fits, step time, MFU, cost, bottleneck, and the estimated program and slice."""

from __future__ import annotations

from meshlib.core.slices import assumed_figures
from meshlib.core.text import bytes_text, count_text, seconds_text, usd_text
from meshlib.estimation import Estimate
from meshlib.program.analysis.memory import KINDS
from meshlib.report.markup import EXACT, MODELLED, table, tag, text


def tokens_of(est: Estimate) -> int | None:
    """Tokens per step: batch times length of the inputs that have both dims; None without such an input."""
    for value in est.program.inputs.values():
        sizes = {dim.name: dim.size for dim in value.tensor.shape.dims}
        if "batch" in sizes and "length" in sizes:
            return sizes["batch"] * sizes["length"]
    return None


def headline(est: Estimate) -> str:
    """One sentence that says whether the program fits."""
    m = est.memory
    if m.verdict == "tight":
        step, run = bytes_text(m.needed_bytes), bytes_text(m.run_bytes)
        return f"Tight: the step takes {step} of {bytes_text(m.capacity_bytes)} on each device, a whole run {run}."
    if m.fits:
        return f"Fits: {bytes_text(m.peak_bytes)} of {bytes_text(m.capacity_bytes)} on each device."
    over = bytes_text(m.needed_bytes - m.capacity_bytes)
    return (
        f"Does not fit: {bytes_text(m.needed_bytes)}, {over} more than the {bytes_text(m.capacity_bytes)} of a device."
    )


def verdict(est: Estimate, linked: bool = True) -> str:
    """Headline, memory bar and cards at the top; `linked`: cards link to the page's sections."""
    cards = []
    for name, value, more, href in _cards(est):
        inner = tag("span", text(name)) + tag("b", value) + tag("small", text(more))
        cards.append(tag("a" if linked else "div", inner, href=href if linked else None, class_="card"))
    words = tag("p", text(headline(est)), class_=f"verdict {'fits' if est.fits else 'over'}")
    return words + _bar(est) + tag("div", "".join(cards), class_="cards")


def _cards(est: Estimate) -> list[tuple[str, str, str, str]]:
    """(name, figure as HTML, caption, link) of each card."""
    m, shares = est.memory, sorted(est.bound_seconds.items(), key=lambda item: -item[1])
    step = est.step_seconds or 1.0
    percent = 100 * m.peak_bytes / m.capacity_bytes
    share = f"{percent:.{0 if percent >= 1 else 3}f}% {EXACT}"
    sizes = f"{bytes_text(m.peak_bytes)} of {bytes_text(m.capacity_bytes)}"
    bound = ", ".join(f"{name} {seconds / step:.0%}" for name, seconds in shares[:3] if seconds)
    waits = f"{text(seconds_text(est.exposed_comm_seconds))} {MODELLED}"
    sent = f"sends {bytes_text(est.sent_bytes)} from each device"
    cards = [
        ("memory", share, sizes, "#memory"),
        ("step", f"{text(seconds_text(est.step_seconds))} {MODELLED}", _rate(est), "#timeline"),
        ("MFU", f"{est.mfu:.1%} {MODELLED}", _of_peak(est), "#roofline"),
        ("bound by", f"{text(shares[0][0])} {MODELLED}", bound, "#timeline"),
        ("waits for collectives", waits, sent, "#collectives"),
    ]
    if est.slice.usd_per_hour is not None:
        price = f"for 1,000 steps at {usd_text(est.slice.usd_per_hour)} an hour{_token_cost(est)}"
        cards.append(("cost", f"{text(usd_text(est.usd(1000)))} {MODELLED}", price, "#about"))
    return cards


def _of_peak(est: Estimate) -> str:
    return "of the bf16 peak" if est.hfu == est.mfu else f"{est.hfu:.1%} with recomputation"


def _rate(est: Estimate) -> str:
    tokens = tokens_of(est)
    between = f"between {seconds_text(est.lower_seconds)} and {seconds_text(est.upper_seconds)}"
    return f"{count_text(tokens / est.step_seconds)} tokens/s; {between}" if tokens and est.step_seconds else between


def _token_cost(est: Estimate) -> str:
    tokens = tokens_of(est)
    return f", {usd_text(est.usd() / tokens * 1e9)} a billion tokens" if tokens else ""


def _bar(est: Estimate) -> str:
    """Memory at the peak by kind, relative to the memory of a device."""
    whole = max(est.memory.capacity_bytes, est.memory.peak_bytes)
    parts = "".join(
        f'<i class="k-{n}" style="width:{100 * est.memory.by_kind[kind] / whole:.2f}%" '
        f'title="{text(kind)} {text(bytes_text(est.memory.by_kind[kind]))}"></i>'
        for n, kind in enumerate(KINDS)
        if est.memory.by_kind.get(kind)
    )
    return tag("div", parts, class_="bar", role="img", aria_label="memory at the peak by kind")


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
        (f"peak of memory {EXACT}", f"{est.memory.peak_bytes:,}"),
    ]
    return table(("", ""), rows)
