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
CAUSES = 3  # collectives that an outcome names


@dataclass(frozen=True)
class Figures:
    """Of an estimate, what a ranking needs. Modelled, but `sent_bytes`; `peak_bytes`: what the compiled step takes."""

    step_seconds: float
    mfu: float
    exposed_comm_seconds: float
    peak_bytes: float
    capacity_bytes: float
    sent_bytes: float
    usd_per_step: float | None
    bound_seconds: Mapping[str, float]
    collectives: Mapping[str, float]  # the longest: what and why, with the seconds on the wire
    largest: tuple[str, ...]  # what holds most at the peak

    @property
    def fits(self) -> bool:
        """Whether the compiled step fits the HBM of a device."""
        return self.peak_bytes <= self.capacity_bytes

    @staticmethod
    def of(est: Estimate) -> Figures:
        """Of an estimate."""
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
    """A candidate with what became of it.

    `bound` is the least that the objective can be; `value` what it is, of those that were estimated.
    """

    candidate: Candidate
    state: str
    bound: float
    value: float = float("inf")
    figures: Figures | None = None
    why: str = ""

    @property
    def fits(self) -> bool:
        """Estimated, and within memory."""
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
    """What of a step takes longer than in the best; where nothing does, that the step is no longer."""
    more = {name: s - best.bound_seconds.get(name, 0.0) for name, s in own.bound_seconds.items()}
    name = max(more, key=lambda name: more[name])
    if more[name] <= 0:
        return f"a step of {seconds_text(own.step_seconds)} in place of {seconds_text(best.step_seconds)}"
    text = f"{name} +{seconds_text(more[name])}"
    if name in ("ici", "dcn", "latency") and own.collectives:
        text += f", {next(iter(own.collectives))}"
    return text
