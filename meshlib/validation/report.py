"""Validation report: training runs, ResNets, micro-benchmarks, misses, rows left out, the constants."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from meshlib.core.text import counted, grid, seconds_text
from meshlib.validation.rankings import TIE, RankedPair, share_right
from meshlib.validation.validating import Checked, Validation, absolute, percentile

MISS = 0.1  # larger errors get a line on what is not modelled
_PREDICTIONS = {
    "predicted_seconds": "model",
    "left_out_seconds": "model, each chip left out of the fit",
    "naive_seconds": "naive rule",
    "naive_left_out_seconds": "naive rule, each chip left out",
}


def report(v: Validation) -> str:
    """`str` of a Validation."""
    lines = [*_training(v), *_images(v), *_measurements("micro-benchmark", v.benchmarks)]
    lines += [*_measurements("inference", v.inference), *_rankings(v.pairs)]
    lines.append(f"compiler: {v.compiler}, with what rows say of theirs")
    if v.scored:
        lines.append(_group_line("all", v.scored))
    apart = [r for r in v.rows if r.apart and r.error is not None]
    if apart:
        lines += ["", f"predicted, but no measure of the model: {counted(len(apart), 'row')}"]
        lines += [f"  {r.name}: {r.error:+.1%}; {r.apart}" for r in apart]
    missing = [r for r in v.rows if r.error is None]
    if missing:
        lines += ["", f"not expressed: {counted(len(missing), 'row')}"]
        lines += [f"  {r.name}: {r.why_not}" for r in missing]
    return "\n".join(lines)


def _training(v: Validation) -> list[str]:
    if not v.training:
        return []
    cells: list[tuple[str, ...]] = [
        ("training run", "chip", "predicted", "measured", "error", "chip left out", "naive", "naive, left out")
    ]
    for r in v.training:
        cells.append((r.name, r.chip, *_times(r), *(_percent(r.error_of(what)) for what in _PREDICTIONS)))
    lines = [*grid(cells, right=tuple(range(2, 8)), spare=(7, 5)), ""]
    for what, title in _PREDICTIONS.items():
        errors = absolute(v.training, what)
        if errors:
            lines.append(f"training, {title}: {_error_summary(errors)}")
    lines.append(
        "the naive rule knows what it predicts: each run is among those whose median it takes, and a chip with one run "
        "is predicted by itself; without the chip it is as blind as the model"
    )
    lines += _groups("models", v.training, lambda r: "with experts" if "experts" in r.family else "dense")
    lines += _groups("family", v.training, lambda r: r.family)
    lines += _groups("chip", v.training, lambda r: r.chip)
    misses = [r for r in v.training if abs(r.error or 0.0) > MISS]
    if misses:
        lines += ["", f"misses beyond {MISS:.0%}, and what is not modelled:"]
        lines += [f"  {r.name} {_percent(r.error)}: {unmodelled(r)}" for r in misses]
    return [*lines, "", "constants:", *(f"  {line}" for line in str(v.physics).splitlines()), ""]


def _images(v: Validation) -> list[str]:
    if not v.images:
        return []
    head = ("residual network", "chip", "predicted", "measured", "error", "chip left out", "naive", "naive, left out")
    cells = [(r.name, r.chip, *_times(r), *(_percent(r.error_of(what)) for what in _PREDICTIONS)) for r in v.images]
    lines = grid([head, *cells], right=tuple(range(2, 8)), spare=(7, 5))
    lines += ["", _group_line("residual networks, by the constants above, which were not fitted to them", v.images)]
    for r in v.images:
        if r.images is not None and r.images.assumed:
            lines.append(f"  left open by {r.name}: {'; '.join(r.images.assumed)}")
    return [*lines, ""]


def _measurements(title: str, rows: Sequence[Checked]) -> list[str]:
    if not rows:
        return []
    head = (title, "family", "predicted", "measured", "error", "roofline")
    cells = [(r.name, r.family, *_times(r), *map(_percent, (r.error, r.error_of("naive_seconds")))) for r in rows]
    lines = grid([head, *cells], right=(2, 3, 4, 5))
    for family in dict.fromkeys(r.family for r in rows):
        lines.append(_group_line(family, [r for r in rows if r.family == family]))
    return [*lines, _group_line(f"{title}s" if title.endswith("k") else title, rows), ""]


def _rankings(pairs: Sequence[RankedPair]) -> list[str]:
    """The share of pairs in the measured order, and the pairs in the wrong order."""
    if not pairs:
        return []
    lines = ["rankings: pairs of runs of one model on one kind of chip, by what a chip does in a second"]
    for title, same in (("on the same machine", True), ("on different numbers of chips", False)):
        group = [pair for pair in pairs if pair.same_machine is same]
        if group:
            right = sum(pair.is_right for pair in group)
            lines.append(f"  {title}: {right} of {len(group)} in the measured order ({share_right(group):.0%})")
            lines += [f"    not {pair}" for pair in group if not pair.is_right]
    return [*lines, f"  pairs measured within {TIE:.0%} of each other are left out", ""]


def _times(r: Checked) -> tuple[str, str]:
    assert r.predicted_seconds is not None
    assert r.measured_seconds is not None
    return seconds_text(r.predicted_seconds), seconds_text(r.measured_seconds)


def _groups(kind: str, rows: Sequence[Checked], key: Callable[[Checked], str]) -> list[str]:
    names = dict.fromkeys(map(key, rows))
    return [f"  {kind} {_group_line(name, [r for r in rows if key(r) == name])}" for name in names]


def _group_line(title: str, rows: Sequence[Checked]) -> str:
    """Errors of a group, with the medians of other predictions beside them."""
    line = f"{title}: {_error_summary(absolute(rows))}"
    left, naive = absolute(rows, "left_out_seconds"), absolute(rows, "naive_seconds")
    others = [f"chip left out {statistics.median(left):.1%}"] if left else []
    others += [f"naive {statistics.median(naive):.1%}"] if naive else []
    return f"{line}; {', '.join(others)}" if others else line


def _error_summary(errors: Sequence[float]) -> str:
    median, most = statistics.median(errors), percentile(errors, 0.9)
    return f"{counted(len(errors), 'row')}, median error {median:.1%}, 90th percentile {most:.1%}"


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{error:+.1%}"


def unmodelled(r: Checked) -> str:
    """Likely causes of a run's error: what the model does not know about such runs."""
    run, slow = r.run, (r.error or 0.0) < 0  # slow: slower than predicted
    assert run is not None
    causes = []
    if run.encoder:
        causes.append("age of the software, what dropout draws" if slow else "sequences batched by their length")
        if slow and run.evaluation:
            causes.append("input, evaluation and host time in a block")
    if run.slice.slices > 1 and slow:
        causes.append("what several slices lose beyond their gradients on DCN and the jitter")
    if run.locals:
        causes.append("VPU work of the additional norms")
    if run.experts is not None and slow:
        causes.append("how tokens are sorted and weighted around their experts, the host's copies of what is kept")
    if run.eight_bit:
        causes.append("how quantisation fuses with what is around it")
    if run.evaluation:
        causes.append("flags and kernels tuned for the submission" if not slow else "start and end of an evaluation")
    causes += [f"left open by the row: {what}" for what in run.assumed]
    if not causes:
        causes.append("compiler version and flags" if not slow else "time on the host, input, other flags")
    return "; ".join(causes)
