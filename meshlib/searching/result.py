"""`Found`, the result of a search: ranking, Pareto front, reasons against the others, and the certificate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from layouts import LayoutRules, Mesh
from meshlib.core.arguments import items, whole
from meshlib.core.compiler import Compiler
from meshlib.core.errors import GraphError
from meshlib.core.shown import Shown
from meshlib.core.text import bytes_text, clipped, counted, grid, seconds_text
from meshlib.estimation import Estimate
from meshlib.estimation.views.cautions import cautions
from meshlib.program.records import Program
from meshlib.searching.outcomes import ALIKE, BOUNDED, ESTIMATED, NEEDLESS, OPEN, REFUSED, TOO_LARGE, Outcome
from meshlib.searching.programs import MODEL_ERROR, Build, Objective, SearchProblem
from meshlib.searching.sensitivity import Sensitivity, sensitivity
from meshlib.searching.space import Choices


def plainness(mesh: Mesh, layout: LayoutRules, batch: str | None) -> tuple[int, ...]:
    """Sort key that is lower for layouts people would write: few axes, batch split by a required rule, few rules.

    Example:
      >>> from layouts import LayoutRules, Mesh
      >>> usual = plainness(Mesh("fsdp:64"), LayoutRules("batch:fsdp;d_model:fsdp?"), "batch")
      >>> odd = plainness(Mesh("model:64"), LayoutRules("vocab:model;d_ff:model;batch:model?"), "batch")
      >>> usual < odd
      True
    """
    axes = sum(size > 1 for size in mesh.sizes_by_axis.values())
    of_batch = [rule.optional for rule in layout.rules if rule.dim == batch]
    unusual = bool(of_batch) and all(of_batch)
    optional = sum(rule.optional for rule in layout.rules)
    return axes, int(unusual), len(layout.rules), optional


SHOWN = 8  # rows of the ranking shown


@dataclass(frozen=True, eq=False, repr=False)
class Found(Shown):
    """Result of a search: all candidates with their outcomes. Created by `mtf.search`.

    Example:
      >>> import meshlib as mtf
      >>> def build():
      ...     x, w = mtf.input("x", "batch:4096;d:1024"), mtf.variable("w", "d:1024;n:1024")
      ...     return {"y": mtf.einsum([x, w], output_shape="batch:4096;n:1024")}, []
      >>> result = mtf.search(build, "v5e-4", axes=1, seconds=None, workers=1)
      >>> str(result.best.candidate.mesh), str(result.best.candidate.layout), result.gap
      ('data:4', 'batch:data', 0.0)
    """

    outcomes: tuple[Outcome, ...]
    objective: Objective
    problems: Mapping[Choices, SearchProblem]
    build: Build
    seconds: float
    left_out: Mapping[Choices, str] = field(default_factory=dict)  # choices refused by the builder, with reasons
    space: str = ""  # description of the declared space
    stopped: bool = False  # whether the user interrupted it

    @cached_property
    def ranking(self) -> tuple[Outcome, ...]:
        """Estimated candidates, best first; those that do not fit come last."""
        estimated = [o for o in self.outcomes if o.figures is not None]
        return tuple(
            sorted(estimated, key=lambda o: (not o.fits, o.value if o.fits else _peak(o), len(o.candidate.mesh)))
        )

    @property
    def fastest(self) -> Outcome:
        """First of the ranking: best by the objective among those that fit.

        Raises: GraphError where nothing was estimated: everything was refused, or too large.
        """
        if not self.ranking:
            raise GraphError(f"search: no candidate could be estimated: {self._tally}; {self._advice()}")
        return self.ranking[0]

    @cached_property
    def best(self) -> Outcome:
        """The winner: the simplest layout among those within the model's error of the fastest.

        Raises: GraphError where nothing was estimated: everything was refused, or too large.
        """
        return min(self.tied, key=self._plainness)

    @cached_property
    def tied(self) -> tuple[Outcome, ...]:
        """The fastest, and those within the model's error of it with the same choices on the same slice."""
        first = self.fastest
        most = first.value * (1 + self.objective.error)
        mine = (first.candidate.choices, first.candidate.slice)
        others = (o for o in self.ranking[1:] if o.fits and o.value <= most)
        same = (o for o in others if (o.candidate.choices, o.candidate.slice) == mine)
        return (first, *(same if first.fits else ()))

    def _plainness(self, o: Outcome) -> tuple[tuple[int, ...], float]:
        c = o.candidate
        return plainness(c.mesh, c.layout, self.problems[c.choices].batch), o.value

    @property
    def fits(self) -> bool:
        """True if any candidate fits."""
        return bool(self.ranking) and self.ranking[0].fits

    @cached_property
    def pareto(self) -> tuple[Outcome, ...]:
        """Estimated candidates that fit and that no other beats in both objective and peak memory, by objective."""
        front: list[Outcome] = []
        for o in self.ranking:
            if o.fits and (not front or _peak(o) < _peak(front[-1])):
                front.append(o)
        return tuple(front)

    # ------------------------------------------------------------ the certificate

    @cached_property
    def _tally(self) -> str:
        counts = Counter(o.state for o in self.outcomes)
        order = (ESTIMATED, TOO_LARGE, REFUSED, ALIKE, NEEDLESS, BOUNDED, OPEN)
        return ", ".join(f"{counts[state]:,} {state}" for state in order if counts[state])

    @property
    def gap(self) -> float:
        """The share by which the fastest could still be beaten within the declared space; 0 if it is proved optimal."""
        left = [o.bound for o in self.outcomes if o.state == OPEN]
        if not left or not self.fits:
            return 0.0 if not left else float("inf")
        best, least = self.fastest.value, max(0.0, min(left))
        return max(0.0, 1 - least / best) if best > 0 else 0.0

    @property
    def exact(self) -> bool:
        """True if every candidate is accounted for."""
        return not any(o.state == OPEN for o in self.outcomes)

    @property
    def certificate(self) -> str:
        """The certificate in words: what is proved, over which space."""
        head = f"{counted(len(self.outcomes), 'candidate')}: {self._tally}."
        if self.exact:
            proved = "All are accounted for: within this space nothing is better by the model."
        else:
            why = "Interrupted" if self.stopped else "Time ran out"
            proved = f"{why}: unexamined candidates could be better by at most {self.gap:.1%}."
        return "\n".join([f"{head} {proved}", *self._chosen(), f"The space: {self.space}."])

    def _chosen(self) -> Iterator[str]:
        """Why the winner is not the fastest."""
        if self.fits and self.best is not self.fastest:
            behind = self.best.value / self.fastest.value - 1
            yield (
                f"The winner is the simplest of {len(self.tied)} that are a tie within the model's error "
                f"({self.objective.error:.1%}), {behind:.1%} behind the fastest."
            )

    # ------------------------------------------------------------ the winner

    @property
    def compiler(self) -> Compiler:
        """The compiler for which all candidates were lowered and scheduled."""
        return next(iter(self.problems.values())).compiler

    def program(self, outcome: Outcome | None = None) -> Program:
        """The program of a candidate; by default the best."""
        return self.estimate(outcome).program

    def estimate(self, outcome: Outcome | None = None) -> Estimate:
        """The full estimate of a candidate; by default the best."""
        candidate = (outcome or self.best).candidate
        return self.problems[candidate.choices].estimate(candidate)

    def why(self, outcome: Outcome) -> str:
        """Why a candidate loses, in one line; "" for the winner, and a tie for those within the model's error."""
        if outcome is not self.best and self.fits and outcome in self.tied:
            return f"a tie within the model's error: {outcome.value / self.best.value - 1:+.1%}, not as simple"
        return outcome.against(self.best)

    def sensitivity(self, leaders: int = 6, **changes: Iterable[Any]) -> Sensitivity:
        """Effect of other changes on the winner: the best candidates are estimated again.

        Args:
          leaders: number of best candidates that fit.
          changes: `links` or `flops`: factors on the rates of the links, or of the MXU; `slice`: names of slices of as
            many devices; all others: arguments of the builder, such as batch=[64, 256].
        Returns: a Sensitivity; print it.
        Raises: GraphError where nothing fits, for a number of leaders below 1, or a change without values.
        """
        fitting = [o for o in self.ranking if o.fits][: whole(leaders, "sensitivity", "leaders", low=1)]
        if not fitting:
            raise GraphError("sensitivity: no candidate of the search fits, so there is none to try under changes")
        given = {name: items(values, "sensitivity", name) for name, values in changes.items()}
        if not given or not all(given.values()):
            raise GraphError("sensitivity: say what changes, such as links=[0.5, 2] or batch=[64, 256]")
        return sensitivity(self.build, self.objective, fitting, given, self.compiler)

    # ------------------------------------------------------------ text

    def plot(self, ax: Any = None) -> Any:
        """Draw step time against memory of all estimated candidates, with the Pareto front; needs matplotlib.

        Args:
          ax: matplotlib Axes, or the path of a file (.png, .svg, .pdf); by default a new figure.
        Returns: the Axes.
        Raises: GraphError where nothing was estimated, matplotlib is missing, or the file cannot be written.
        """
        from meshlib.report.alternatives import alternatives_of
        from meshlib.report.plots import plot_alternatives

        capacity = self.best.candidate.slice.usable_hbm_bytes_per_device
        return plot_alternatives(alternatives_of(self), capacity, ax, "Found.plot")

    def report(self, path: str | Path, title: str = "") -> None:
        """Write a self-contained HTML page on the winner's estimate, with the other estimated candidates.

        Args:
          path: path of the file, such as "plan.html"; title: title of the page; by default mesh and slice.
        Raises: GraphError where nothing was estimated, or the path cannot be written.
        """
        from meshlib.report.alternatives import alternatives_of
        from meshlib.report.page import page, write_page

        write_page(path, page(self.estimate(), title, alternatives_of(self), self.certificate), "Found.report")

    def as_json(self) -> dict[str, Any]:
        """Ranking and certificate as JSON."""
        return {
            "objective": self.objective.name,
            "compiler": str(self.compiler),
            "fits": self.fits,
            "exact": self.exact,
            "gap": self.gap if self.gap != float("inf") else None,
            "certificate": self.certificate,
            "cautions": list(self.cautions) if self.ranking else [],
            "best": self.ranking.index(self.best) if self.ranking else None,  # its rank
            "left_out": self._without(),
            "ranking": [
                {
                    **{name: str(value) for name, value in o.candidate.choices},
                    "slice": o.candidate.slice.name,
                    "mesh": str(o.candidate.mesh),
                    "layout": str(o.candidate.layout),
                    "value": o.value,
                    "fits": o.fits,
                    "why": self.why(o),
                    **(asdict(o.figures) if o.figures is not None else {}),
                }
                for o in self.ranking
            ],
        }

    def _advice(self) -> str:
        whys = Counter(o.why for o in self.outcomes if o.why)
        return whys.most_common(1)[0][0] if whys else "use a larger slice"

    def _verdict(self) -> str:
        if not self.ranking and not any(o.state == TOO_LARGE for o in self.outcomes):
            return f"nothing could be estimated: {self._advice()}"
        if not self.fits:
            return f"nothing fits{self._smallest_memory()}"
        best = self.best
        chosen = "".join(f" {name}={value}" for name, value in best.candidate.choices)
        lines = [f"best: mesh {best.candidate.mesh}", f"      layout {best.candidate.layout or '(nothing is split)'}"]
        if chosen or self._several:
            lines.append(f"      on {best.candidate.slice.name}{',' if chosen else ''}{chosen}")
        return "\n".join([*lines, *self._second(), *(f"      {text}" for text in self.cautions)])

    @cached_property
    def cautions(self) -> tuple[str, ...]:
        """Cautions about the winner: see `meshlib.estimation.views.cautions`."""
        return tuple(cautions(self.estimate()))

    def _smallest_memory(self) -> str:
        """The memory of the smallest candidate."""
        if self.ranking:
            return f"; the least that was found is {bytes_text(_peak(self.ranking[0]))}"
        large = [o.candidate for o in self.outcomes if o.state == TOO_LARGE]
        if not large:
            return ""
        needed, capacity = min(
            (self.problems[c.choices].bounds.least_bytes(c), c.slice.usable_hbm_bytes_per_device) for c in large
        )
        return f"; every layout takes at least {bytes_text(needed)} of each device, which has {bytes_text(capacity)}"

    def _second(self) -> list[str]:
        """Distance to the next candidate that is no tie, and to those that are only bounded."""
        best = self.best.value
        others = [o for o in self.ranking if o.fits and o not in self.tied]
        passed = [o.bound for o in self.outcomes if o.state == BOUNDED and o.bound != float("-inf")]
        if best <= 0 or not (len(self.tied) > 1 or others or passed):
            return []
        lines = []
        if len(self.tied) > 1:
            count = len(self.tied) - 1
            are = f"{count} others are" if count > 1 else "1 other is"
            lines.append(f"      {are} a tie within the model's error, {self.objective.error:.1%}")
        if others:
            distance = others[0].value / best - 1
            side = "ahead" if distance < 0 else "behind"  # a tie with the winner, under other choices
            lines.append(f"      the next is {abs(distance):.1%} {side}; the model's median error is {MODEL_ERROR:.1%}")
        if passed and (not others or min(passed) < others[0].value):
            least = min(passed) / best - 1
            # Bounds are compared to the fastest, which may be ahead of the winner, a tie with it.
            proved = "no better" if self.best is self.fastest else "no faster than the fastest"
            text = f"at least {least:.1%} behind" if round(least, 3) > 0 else f"{proved} by their bounds"
            lines.append(f"      ({len(passed):,} that were not estimated are {text})")
        return lines

    def _row(self, rank: int, o: Outcome) -> tuple[str, ...]:
        c, f = o.candidate, o.figures
        assert f is not None
        own = (f"{o.value:.4g}",) if self._shows_objective else ()
        fits = "" if f.fits else " !"
        chosen = (str(value) for _, value in c.choices)
        where = (c.slice.name,) if self._several else ()
        return (f"{rank}", *own, seconds_text(f.step_seconds), f"{f.mfu:.1%}", bytes_text(f.peak_bytes) + fits,
                *chosen, *where, str(c.mesh))  # fmt: skip

    @property
    def _several(self) -> bool:
        """True if there are several slices."""
        return len({o.candidate.slice for o in self.outcomes}) > 1

    @property
    def _shows_objective(self) -> bool:
        return self.objective.name not in ("step", "peak memory") or any(p.units != 1 for p in self.problems.values())

    def table(self, rows: int | None = SHOWN) -> str:
        """The ranking as text, the best `rows` or all: figures and mesh, then the layout and why it loses."""
        names = [name for name, _ in self.outcomes[0].candidate.choices]
        own = (self.objective.name,) if self._shows_objective else ()
        shown = self.ranking if rows is None else self.ranking[:rows]
        where = ("slice",) if self._several else ()
        head = ("", *own, "step*", "MFU*", "needs*", *names, *where, "mesh")
        right = range(len(own) + 4)
        lines = grid([head, *(self._row(n, o) for n, o in enumerate(shown, start=1))], right=right)
        margin = " " * (len(f"{len(shown)}") + 2)
        text = lines[:1]
        for line, o in zip(lines[1:], shown, strict=True):
            text += [line, f"{margin}{o.candidate.layout or '(nothing is split)'}"]
            text += [f"{margin}{why}"] if (why := self.why(o)) else []
        return "\n".join(text)

    def __str__(self) -> str:
        parts = [self._verdict()]
        if self.ranking:
            parts += [self.table(), "* modelled; all others exact. ! does not fit"]
        end = [f"{self.certificate} ({self.seconds:.0f} s)", f"compiler: {self.compiler}", *self._without()]
        return "\n\n".join([*parts, "\n".join(end)])

    def _without(self) -> list[str]:
        """Refused choices, grouped by reason."""
        reasons: dict[str, list[str]] = {}
        for chosen, why in self.left_out.items():
            reasons.setdefault(why, []).append(" ".join(f"{name}={value}" for name, value in chosen))
        return [
            f"left out: {chosen[0]}{f' and {len(chosen) - 1} more' if len(chosen) > 1 else ''}: {why}"
            for why, chosen in reasons.items()
        ]

    def __repr__(self) -> str:
        best = f"{self.best.candidate}" if self.ranking else "nothing"
        return clipped(f"<Found among {counted(len(self.outcomes), 'candidate')}: {best}>")


def _peak(o: Outcome) -> float:
    assert o.figures is not None
    return o.figures.peak_bytes
