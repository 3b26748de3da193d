"""Outcomes of candidates: estimated, refused, or bounded, each with its reason."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from meshlib.core.text import bytes_text, seconds_text
from meshlib.estimation import Estimate
from meshlib.searching.space import Candidate

ESTIMATED, REFUSED, TOO_LARGE, BOUNDED, ALIKE, NEEDLESS, OPEN = (
    "estimated", "refused", "cannot fit", "bounded", "alike", "fit with less recomputed", "not reached",
)  # fmt: skip
CAUSES = 3  # collectives named in an outcome


@dataclass(frozen=True)
class Figures:
    """Figures of an estimate for a ranking. Modelled except `sent_bytes`; `peak_bytes` is that of the compiled step."""

    step_seconds: float
    mfu: float
    exposed_comm_seconds: float
    peak_bytes: float
    capacity_bytes: float
    sent_bytes: float
    usd_per_step: float | None
    bound_seconds: Mapping[str, float]
    collectives: Mapping[str, float]  # the slowest: description -> seconds on the wire
    largest: tuple[str, ...]  # the largest buffers at the peak

    @property
    def fits(self) -> bool:
        """True if the compiled step fits the HBM of a device."""
        return self.peak_bytes <= self.capacity_bytes

    @staticmethod
    def of(est: Estimate) -> Figures:
        """The figures of an estimate."""
        sent: defaultdict[str, float] = defaultdict(float)
        for row in est.rows:
            if row.kind == "collective":
                sent[f"{row.opcode} of {row.name} over {'+'.join(row.axes)}"] += row.total_seconds
        price = est.slice.usd_per_hour
        return Figures(
            est.step_seconds,
            est.mfu,
            est.exposed_comm_seconds,
            est.memory.needed_bytes,
            est.memory.capacity_bytes,
            est.sent_bytes,
            None if price is None else price * est.step_seconds / 3600,
            dict(est.bound_seconds),
            dict(sorted(sent.items(), key=lambda item: -item[1])[:CAUSES]),
            tuple(str(live) for live in est.memory.live[:CAUSES]),
        )


@dataclass(frozen=True)
class Outcome:
    """A candidate with its result.

    `bound` is a lower bound on the objective; `value` its value, if estimated.
    """

    candidate: Candidate
    state: str
    bound: float
    value: float = float("inf")
    figures: Figures | None = None
    why: str = ""

    @property
    def fits(self) -> bool:
        """True if it was estimated and fits memory."""
        return self.figures is not None and self.figures.fits

    def against(self, best: Outcome) -> str:
        """Why it loses, in one line."""
        if self.figures is None:
            return self.why
        if not self.figures.fits:
            over = self.figures.peak_bytes - self.figures.capacity_bytes
            held = f"; largest: {self.figures.largest[0]}" if self.figures.largest else ""
            return f"does not fit: {bytes_text(over)} too much{held}"
        if best.figures is None or self is best:
            return ""
        if self.value <= best.value:
            return "as good"
        behind = f"{self.value / best.value - 1:.1%} worse" if best.value > 0 else "worse"
        return f"{behind}: {_cause(self.figures, best.figures)}"


def _cause(own: Figures, best: Figures) -> str:
    """The part of the step that takes longer than in the best candidate; if none does, that the step is no longer."""
    more = {name: s - best.bound_seconds.get(name, 0.0) for name, s in own.bound_seconds.items()}
    name = max(more, key=lambda name: more[name])
    if more[name] <= 0:
        return f"a step of {seconds_text(own.step_seconds)} in place of {seconds_text(best.step_seconds)}"
    text = f"{name} +{seconds_text(more[name])}"
    if name in ("ici", "dcn", "latency") and own.collectives:
        text += f", {next(iter(own.collectives))}"
    return text
