"""Sensitivity of the winner to sizes, slices and link rates.

Only the best candidates of the search are estimated again, so a winner here is the best of these: a layout that was
poor for the program as searched is not found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hardware.checks import HardwareError
from hardware.slices import Slice
from layouts import LayoutRules, Mesh
from meshlib.core.compiler import Compiler
from meshlib.core.errors import GraphError, LayoutError, SliceError
from meshlib.core.text import grid, seconds_text
from meshlib.estimation import Estimate, estimate
from meshlib.searching.outcomes import Outcome
from meshlib.searching.programs import Build, Objective, problem_of

LINKS, RATE, SLICE = "links", "flops", "slice"


@dataclass(frozen=True)
class Change:
    """One change: the best candidate under it, and by how much the previous winner is slower."""

    what: str
    mesh: Mesh | None
    layout: LayoutRules | None
    step_seconds: float
    behind: float

    @property
    def same(self) -> bool:
        """True if the winner stays the same."""
        return self.behind == 0.0


@dataclass(frozen=True, repr=False)
class Sensitivity:
    """Result of `Found.sensitivity`: one `Change` per value of each changed quantity, for one compiler."""

    changes: tuple[Change, ...]
    compiler: Compiler

    def __str__(self) -> str:
        cells = [("change", "best step*", "of the candidates", "the winner of before*")]
        for c in self.changes:
            if c.mesh is None:
                cells.append((c.what, "-", "none of them fits", "-"))
                continue
            word = "stays" if c.same else "does not fit" if c.behind == float("inf") else f"{c.behind:.1%} slower"
            cells.append((c.what, seconds_text(c.step_seconds), f"{c.mesh} {c.layout}", word))
        return "\n".join([*grid(cells, right=(1,)), "* modelled", f"compiler: {self.compiler}"])

    def __repr__(self) -> str:
        return f"<Sensitivity to {len(self.changes)} changes>"


def sensitivity(
    build: Build,
    objective: Objective,
    leaders: Sequence[Outcome],
    changes: Mapping[str, Sequence[Any]],
    compiler: Compiler,
) -> Sensitivity:
    """Estimate the leaders of a search again under each change, the winner first.

    Args:
      changes: "links" or "flops": factors on the rates of the links, or of the MXU; "slice": names; all others:
        values of the builder's arguments.
    """
    changed = []
    for name, values in changes.items():
        for value in values:
            changed.append(_changed(f"{name} {value}", build, objective, leaders, name, value, compiler))
    return Sensitivity(tuple(changed), compiler)


def _changed(
    what: str,
    build: Build,
    objective: Objective,
    leaders: Sequence[Outcome],
    name: str,
    value: Any,
    compiler: Compiler,
) -> Change:
    where = _slice(name, value) if name in (LINKS, RATE, SLICE) else (lambda s: s)
    costs: list[tuple[float, int, Estimate]] = []
    problems: dict[object, Any] = {}
    for n, leader in enumerate(leaders):
        c = leader.candidate
        choices = dict(c.choices) if name in (LINKS, RATE, SLICE) else dict(c.choices) | {name: value}
        key = tuple(choices.items())
        if key not in problems:
            problems[key] = problem_of(build, key, (), (), compiler, next(iter(problems.values()), None))
        slice_ = where(c.slice)
        try:
            est = estimate(problems[key].session.lower(c.mesh, c.layout, compiler=compiler), slice_)
        except LayoutError:  # a size that no longer divides
            continue
        if est.fits:
            costs.append((objective.of(est), n, est))
    if not costs:
        return Change(what, None, None, float("inf"), float("inf"))
    cost, n, est = min(costs, key=lambda entry: entry[:2])
    before = next((c for c, k, _ in costs if k == 0), float("inf"))
    best = leaders[n].candidate
    return Change(what, best.mesh, best.layout, est.step_seconds, before / cost - 1 if cost else 0.0)


def _slice(name: str, value: Any) -> Callable[[Slice], Slice]:
    """The modification of a slice by a change."""

    def changed(s: Slice) -> Slice:
        try:
            if name == SLICE:
                return value if isinstance(value, Slice) else Slice(value)
            chip, factor = s.chip, float(value)
            if name == LINKS:
                rates = {n: getattr(chip, n) * factor for n in ("ici_bytes_per_second", "dcn_bytes_per_second")}
            else:
                peaks = ("peak_bf16_flops", "peak_int8_flops", "peak_int4_flops", "peak_fp8_flops")
                known = {n: getattr(chip, n, None) for n in peaks}
                rates = {n: peak * factor for n, peak in known.items() if peak is not None}
            return Slice(s.name, replace(chip, **rates))
        except HardwareError as fault:
            raise SliceError(f"sensitivity: {fault}") from None
        except (TypeError, ValueError):
            raise GraphError(f"sensitivity: {name} must be factors, got {value!r:.80}") from None

    return changed
