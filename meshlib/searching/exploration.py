"""The order in which candidates are examined: neighbours of the best, then the best bounds.

A round of a fixed size takes known layouts first, then neighbours of the leaders (one axis with another role, a factor
moved, one argument changed), and candidates of the smallest bound scaled by how far those with the same roles and
arguments have exceeded theirs. The rest, more than half, are those of the smallest bounds, since these decide the gap;
after a few rounds without a better candidate, all are.
Those are bounded together first, with communication, at a fiftieth of the cost of lowering. Before a candidate is
lowered, its critical path is computed, too, as long as that improves bounds. Candidates left at the end are bounded
below, or named as not reached: the certificate says which.

Rounds do not depend on the number of processes (`workers`), so the same space gives the same result. Several processes
estimate a round's candidates in parallel, and compute more closer bounds than are needed next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

from meshlib.core.errors import LayoutError
from meshlib.core.executors import Tasks, executor_of
from meshlib.core.forks import Workers, usual_workers
from meshlib.core.text import bytes_text, seconds_text
from meshlib.searching.bounds.candidate import BATCH
from meshlib.searching.outcomes import ALIKE, BOUNDED, ESTIMATED, NEEDLESS, OPEN, REFUSED, TOO_LARGE, Figures, Outcome
from meshlib.searching.programs import Build, Objective, SearchProblem
from meshlib.searching.result import Found, plainness
from meshlib.searching.resume_file import KeptEstimates
from meshlib.searching.roles import AxisRole
from meshlib.searching.space import Candidate, Choices
from meshlib.searching.workers import CandidateBatch, SearchTasks

BAND = 2  # times the model's error: candidates expected within this of the best are equally promising
FIRST, ROUND = 2, 8  # candidates in the first round, when no bound excludes anything yet, and in later ones
PATIENCE = 3  # rounds without a better candidate, after which bounds alone count
POOL = 2  # closer bounds are computed for this many times the candidates needed
LEADERS = 3  # the best so far, whose neighbours are examined
PAYS_SECONDS = 0.1  # work in seconds for which forking processes pays off
AHEAD = 8  # closer bounds per process and batch
FRUITLESS = 2 * ROUND  # critical paths in a row after which they are not worth their time
TOGETHER = 512  # candidates bounded together, in batches: those of the least bounds
Progress = Callable[[int, int, str], object]


class SearchInterrupted(KeyboardInterrupt):
    """An interrupted search; `result` is its result so far, as if time had run out."""

    def __init__(self, result: Found) -> None:
        super().__init__("the search was interrupted")
        self.result = result


class Search:
    """One search, run once."""

    def __init__(
        self,
        build: Build,
        problems: Mapping[Choices, SearchProblem],
        space: Sequence[Candidate],
        first: int,
        lighter: Mapping[int, Sequence[int]],
        objective: Objective,
        seconds: float | None,
        workers: int | Executor | None,
        progress: Progress | None,
        kept: KeptEstimates | None,
        begun: float,
    ) -> None:
        self.build = build
        self.problems, self.space, self.objective = problems, space, objective
        self.first = first  # the leading candidates of the space are layouts known to be good
        self.known: dict[object, list[int]] = {}  # (slice, mesh, layout) -> their numbers, one per choice of arguments
        for n, c in enumerate(space[:first]):
            self.known.setdefault((c.slice, c.mesh, c.layout), []).append(n)
        self.until = None if seconds is None else begun + seconds
        self.progress, self.kept = progress, kept
        self.executor = executor_of(workers)
        self.count = min(workers, ROUND) if isinstance(workers, int) else 1  # more would be idle
        if workers is None:
            self.count = usual_workers(ROUND)
        self.workers: Workers | None = None
        self.tasks: Tasks | None = None  # on the executor
        self.took: dict[str, float] = {}  # seconds per task, by its name
        self.outcomes: dict[int, Outcome] = dict(self._too_large())
        self.bounds = [0.0 if n in self.outcomes else self._bound(c) for n, c in enumerate(space)]
        self.work = SearchTasks(problems, space, self.bounds, objective.given)
        self.order = sorted(range(len(space)), key=lambda n: (self.bounds[n], len(space[n].parts), n))
        self.least = min([self.bounds[n] for n in self.order if n not in self.outcomes], default=0.0)
        self.plain: dict[int, tuple[int, ...]] = {}  # plainness of the most promising candidates
        self.ranks = {n: rank for rank, n in enumerate(self.order)}
        self.best = float("inf")  # among those that fit
        self.idle = 0  # rounds since one was better than all before
        numbers: dict[AxisRole, int] = {}  # numbers of roles, because comparing roles is slow
        self.axes = [frozenset((numbers.setdefault(p.role, len(numbers)), p.size) for p in c.parts) for c in space]
        self.roles = [frozenset(role for role, _ in axes) for axes in self.axes]
        self.traits = [(*roles, *c.choices, c.slice) for roles, c in zip(self.roles, space, strict=True)]
        self.values: dict[object, list[float]] = {}
        self.means: dict[object, float] = {}
        self.bare: dict[int, float] = {}  # original bounds of candidates that have closer ones
        self.closer: dict[int, float] = {}  # closer bounds, including those computed in advance
        self.tightened: set[int] = set()  # candidates bounded together
        self.fruitless = 0  # critical paths in a row that were no closer than bounds computed together
        self.seen: dict[object, int] = {}
        self.lighter = lighter  # candidate -> same candidates with less recomputation
        self.deferred = False  # whether a candidate was postponed until a lighter one is known
        self.begun = begun

    def run(self) -> Found:
        """Run rounds until all candidates are accounted for or time runs out."""
        try:
            while not self._ends():
                chosen = self._round()
                if not chosen or self._ends():
                    break
                fresh = [n for n in chosen if not self._is_known(n)]
                estimated = self._estimated(fresh)  # fewer if time runs out
                chosen = [n for n in chosen if n in estimated or n not in fresh]
                for n in chosen:
                    self.outcomes[n] = estimated[n] if n in estimated else self._recalled(n)
                best = self.best
                self._learn(chosen)
                self.idle = self.idle + 1 if self.best == best else 0
                if fresh:
                    self._write()
                if self.progress is not None:
                    self.progress(len(self.outcomes), len(self.space), self._text())
        except KeyboardInterrupt:
            raise SearchInterrupted(self._found()) from None
        finally:
            if self.workers is not None:
                self.workers.close()
        return self._found()

    def _too_large(self) -> Iterator[tuple[int, Outcome]]:
        """Candidates that cannot fit under any lowering, decided before anything is lowered."""
        for n, c in enumerate(self.space):
            bounds = self.problems[c.choices].bounds
            held = bounds.least_bytes(c)
            if not self._exceeds(c, held):
                held = bounds.placed_bytes(c)
            if self._exceeds(c, held):
                yield n, Outcome(c, TOO_LARGE, 0.0, why=_too_large(c, held))

    # ------------------------------------------------------------ rounds

    def _round(self) -> list[int]:
        """The next candidates; [] once all are accounted for."""
        chosen: list[int] = []
        while not self._is_late():
            chosen = self._choose()
            if chosen or not self.deferred:
                return chosen
        return chosen or self._known_left()[:1]

    def _known_left(self) -> list[int]:
        """Known layouts not estimated yet; all are, so that the result is at least as good."""
        left: dict[int, None] = {}
        for numbers in self.known.values():
            variants = [self._representative(m) for n in numbers for m in (*self.lighter.get(n, ()), n)]
            outcomes = [self.outcomes.get(n) for n in variants]
            if not any(o is not None and o.fits for o in outcomes):
                left.update(dict.fromkeys(variants))
        return [n for n in left if n not in self.outcomes and self._may_win(n) and self._needs_estimate(n)]

    def _choose(self) -> list[int]:
        """Known layouts and neighbours of the leaders first, then by promise; the rest by bound, to close the gap."""
        self.deferred = False
        self._tighten()
        chosen: list[int] = []
        left = [n for n in self.order if n not in self.outcomes and self._may_win(n)]
        most = ROUND if self.values else FIRST
        self._extend(chosen, [n for n in left if n < self.first], most // 2)
        if self.idle < PATIENCE:
            self._extend_by_promise(chosen, left, most)
        self._extend(chosen, sorted(left, key=self.bounds.__getitem__), most)
        return chosen

    def _extend_by_promise(self, chosen: list[int], left: Sequence[int], most: int) -> None:
        """Add neighbours of the leaders, then candidates by promise, up to half of a round of `most`."""
        promising = sorted(left, key=self._promise)
        self._extend(chosen, self._neighbours_of_leaders(promising), most // 4)
        near = self._first_that_may_win(promising, chosen, POOL * most // 4)
        self._extend(chosen, sorted(near, key=self._promise), most // 2)

    def _extend(self, chosen: list[int], among: Iterable[int], most: int) -> None:
        """Add up to `most` candidates that need an estimate."""
        for n in among:
            if len(chosen) >= most or self._is_late():
                break
            if n not in chosen and self._needs_estimate(n) and self._may_win_by_closer_bound(n):
                chosen.append(n)

    def _first_that_may_win(self, order: Sequence[int], chosen: Sequence[int], most: int) -> list[int]:
        """The first `most` candidates of an order that could win by their closer bounds."""
        candidates: list[int] = []
        for place, n in enumerate(order):
            if len(candidates) == most or self._is_late():
                break
            if n not in chosen and self._needs_estimate(n):
                self._look_ahead(order, place)
                if self._may_win_by_closer_bound(n):
                    candidates.append(n)
        return candidates

    def _may_win(self, n: int) -> bool:
        """True if a candidate can be the fastest, or for a known layout, tie with it."""
        tie = self.best * (1 + self.objective.error)
        return self.bounds[n] < (tie if n < self.first else self.best)

    def _tighten(self) -> None:
        """Bound candidates together until those of the least bounds are, once one is known that fits, and at least one
        round of known layouts, so that fewer need a closer bound."""
        if self.objective.together is None or self.best == float("inf") or len(self.bare) < FIRST + ROUND:
            return
        while not self._is_late():
            left = [n for n in self.order if n not in self.outcomes and self._may_win(n)]
            left.sort(key=self.bounds.__getitem__)
            if self.tightened.issuperset(left[:ROUND]):
                return
            numbers = [*islice((n for n in left if n not in self.tightened), TOGETHER)]
            for batch, pairs in self._task_results("together", self._batches(numbers)).items():
                for n, (bound, held) in zip(batch.numbers, pairs, strict=True):
                    self.tightened.add(n)
                    self.bounds[n] = max(self.bounds[n], bound)
                    self._fits(n, held)

    def _batches(self, numbers: Sequence[int]) -> list[CandidateBatch]:
        """Candidates in batches that can be bounded together."""
        families: dict[object, list[int]] = {}
        for n in numbers:
            c = self.space[n]
            sizes = self.problems[c.choices].settled(c)
            families.setdefault((sizes, c.slice, sum(size > 1 for _, size in c.splits)), []).append(n)
        return [
            CandidateBatch(self.best, tuple(own[at : at + BATCH]))
            for own in families.values()
            for at in range(0, len(own), BATCH)
        ]

    def _fits(self, n: int, held: float) -> bool:
        """True if a candidate that holds so many bytes may fit; if not, its outcome is recorded."""
        c = self.space[n]
        if self._exceeds(c, held):
            self.outcomes[n] = Outcome(c, TOO_LARGE, self.bounds[n], why=_too_large(c, held))
        return n not in self.outcomes

    def _may_win_by_closer_bound(self, n: int) -> bool:
        """True if a candidate could win by its critical path, too; not computed if it has been no closer lately."""
        if self.objective.closer is not None and n not in self.bare:
            self.bare[n] = self.bounds[n]
            if self.fruitless < FRUITLESS:
                if n not in self.closer:
                    self.closer |= self._task_results("bound", [n])
                if n in self.tightened:
                    self.fruitless = 0 if self.closer[n] > self.bounds[n] else self.fruitless + 1
                self.bounds[n] = max(self.bounds[n], self.closer[n])
        return self._may_win(n)

    def _look_ahead(self, order: Sequence[int], place: int) -> None:
        """With several processes, compute the closer bounds of the candidates that follow in one batch."""
        if self.objective.closer is None or self.count == 1 or self.fruitless >= FRUITLESS:
            return
        if order[place] in self.closer:
            return
        following = (n for n in order[place:] if n not in self.closer and n not in self.outcomes and self._may_win(n))
        self.closer |= self._task_results("bound", [*islice(following, AHEAD * self.count)])

    def _promise(self, n: int) -> tuple[float, tuple[int, ...], float, int]:
        """Sort key: the bound times the mean ratio of value to bound of candidates with the same traits.

        Within the model's error, the simplest of the most promising candidates come first, so that a closer bound for
        some of them does not put all others first.
        """
        c = self.space[n]
        known = [self.means[part] for part in self.traits[n] if part in self.means]
        expected = (sum(known) / len(known) if known else 1.0) * self.bounds[n]
        if expected > self.least * (1 + BAND * self.objective.error):
            return expected, (len(c.parts),), expected, self.ranks[n]
        if n not in self.plain:
            self.plain[n] = plainness(c.mesh, c.layout, self.problems[c.choices].batch)
        return self.least, self.plain[n], expected, self.ranks[n]

    def _learn(self, fresh: Sequence[int]) -> None:
        """Update the mean ratio of value to bound for each trait; candidates that do not fit count as worse."""
        for n in fresh:
            o = self.outcomes[n]
            if o.fits:
                self.best = min(self.best, o.value)
            if o.figures is not None:
                excess = 1.0 if o.fits else max(2.0, o.figures.peak_bytes / o.figures.capacity_bytes)
                value = o.value / (o.bound or 1.0) * excess
                for part in self.traits[n]:
                    self.values.setdefault(part, []).append(value)
                    self.means[part] = sum(self.values[part]) / len(self.values[part])

    def _neighbours_of_leaders(self, left: Sequence[int]) -> Iterator[int]:
        leaders = sorted((o.value, n) for n, o in self.outcomes.items() if o.fits)[:LEADERS]
        for _, leader in leaders:
            yield from (n for n in left if self._are_neighbours(n, leader))

    def _are_neighbours(self, m: int, n: int) -> bool:
        """True if two candidates differ in one thing: an argument, an axis's role, a moved factor, an extra axis."""
        a, b = self.space[m], self.space[n]
        if a.slice != b.slice:
            return False
        differing = sum(x != y for x, y in zip(a.choices, b.choices, strict=True))
        mine, other = self.axes[m], self.axes[n]
        if differing:
            return differing == 1 and mine == other and a.given == b.given
        if self.roles[m] == self.roles[n]:
            return len(mine - other) <= 2
        if len(mine) == len(other):
            return len(mine - other) == 1
        return abs(len(mine) - len(other)) == 1 and len(mine & other) >= min(len(mine), len(other)) - 1

    def _needs_estimate(self, n: int) -> bool:
        """True if a candidate needs an estimate; if not, its outcome is recorded."""
        if n in self.outcomes:
            return False
        c, problem, bound = self.space[n], self.problems[self.space[n].choices], self.bounds[n]
        for lighter in self.lighter.get(n, ()):
            known = self.outcomes.get(self._representative(lighter))
            if known is not None and known.fits:
                self.outcomes[n] = Outcome(c, NEEDLESS, bound, why=f"fits with less recomputed: {known.candidate}")
                return False
            if known is None and self._may_win(lighter):
                self.deferred = True
                return False
        try:
            held = problem.bounds.held_bytes(c)
        except LayoutError as fault:
            self.outcomes[n] = Outcome(c, REFUSED, bound, why=str(fault).splitlines()[-1].strip())
            return False
        if not (self._fits(n, held) and self._fits(n, problem.needed_bytes(c))):
            return False
        first = self.seen.setdefault(problem.alike(c), n)
        if first != n:
            self.outcomes[n] = Outcome(c, ALIKE, bound, why=f"lies as {self.space[first]}")
            return False
        return True

    def _representative(self, n: int) -> int:
        """A candidate, or the one that it is equivalent to."""
        outcome, c = self.outcomes.get(n), self.space[n]
        if outcome is None or outcome.state != ALIKE:
            return n
        return self.seen[self.problems[c.choices].alike(c)]

    def _exceeds(self, c: Candidate, held: float) -> bool:
        """True if a candidate cannot fit, unless the objective is memory itself."""
        return held > c.slice.usable_hbm_bytes_per_device and self.objective.name != "peak memory"

    def _bound(self, c: Candidate) -> float:
        problem = self.problems[c.choices]
        return self.objective.bound(problem.bounds, c) / problem.units

    # ------------------------------------------------------------ tasks

    def _is_late(self) -> bool:
        """True if time has run out, after at least one estimate."""
        return bool(self.values) and self.until is not None and time.monotonic() > self.until

    def _ends(self) -> bool:
        """True if time has run out and all known layouts are estimated."""
        return self._is_late() and not self._known_left()

    def _estimated(self, chosen: Sequence[int]) -> dict[int, Outcome]:
        outcomes = self._task_results("estimate", chosen)
        # An outcome from another process contains a copy of the candidate.
        return {n: replace(o, candidate=self.space[n], bound=self.bounds[n]) for n, o in outcomes.items()}

    def _task_results(self, task: str, numbers: Sequence[Any]) -> dict[Any, Any]:
        """A task's result for each candidate, or batch of candidates; for fewer if time runs out."""
        if self.executor is not None and self.values and len(numbers) > 1:
            return self._answers_of_executor(task, numbers)
        expected = len(numbers) * self.took.get(task, 0.0)
        if self.workers is None and self.count > 1 and self.values and len(numbers) > 1 and expected > PAYS_SECONDS:
            self.workers = Workers(self.count, self.work, "search")
        if self.workers is not None and len(numbers) > 1:
            return self.workers.answers(task, numbers, self.until)
        answers: dict[Any, Any] = {}
        for n in numbers:
            begun = time.monotonic()
            answers[n] = getattr(self.work, task)(n)
            self.took[task] = time.monotonic() - begun
            if task != "bound" and self.until is not None and time.monotonic() > self.until:
                break
        return answers

    def _answers_of_executor(self, task: str, numbers: Sequence[Any]) -> dict[Any, Any]:
        assert self.executor is not None
        if self.tasks is None:
            self.tasks = Tasks("search", self.executor, self.work)
        return self.tasks.answers(getattr(SearchTasks, task), numbers, self.until if task != "bound" else None)

    # ------------------------------------------------------------ result

    def _found(self) -> Found:
        best = self.best
        for n, c in enumerate(self.space):
            if n not in self.outcomes:
                state = BOUNDED if self.bounds[n] >= best else OPEN
                why = "time ran out" if state == OPEN else self._why_behind(n, best)
                self.outcomes[n] = Outcome(c, state, self.bounds[n], why=why)
        outcomes = [self.outcomes[n] for n in range(len(self.space))]
        return Found(tuple(outcomes), self.objective, self.problems, self.build, time.monotonic() - self.begun)

    def _why_behind(self, n: int, best: float) -> str:
        """Why a candidate cannot be the best, according to its bound."""
        bound, bare = self.bounds[n], self.bare.get(n, self.bounds[n])
        if best <= 0:
            return "not better by its bound"
        what = "by its products"
        if bare < best:
            what = f"by what it has to send; by its products alone {bare / best - 1:+.1%}"
        return f"at least {bound / best - 1:.1%} worse {what}"

    def _text(self) -> str:
        fitting = [o for o in self.outcomes.values() if o.fits]
        if not fitting:
            return "nothing fits yet"
        best = min(fitting, key=lambda o: o.value)
        value = seconds_text(best.value) if self.objective.name == "step" else f"{best.value:.4g} {self.objective.name}"
        return f"{best.candidate.mesh}, {value}"

    # ------------------------------------------------------------ resuming

    def _write(self) -> None:
        if self.kept is None:
            return
        for o in self.outcomes.values():
            if o.state == ESTIMATED and o.figures is not None:
                self.kept.estimates[o.candidate.identity] = {"value": o.value, "figures": asdict(o.figures)}
            elif o.state == REFUSED:
                self.kept.estimates[o.candidate.identity] = {"why": o.why}
        self.kept.write()

    def _is_known(self, n: int) -> bool:
        return self.kept is not None and self.space[n].identity in self.kept.estimates

    def _recalled(self, n: int) -> Outcome:
        assert self.kept is not None
        c, entry = self.space[n], self.kept.estimates[self.space[n].identity]
        if "figures" not in entry:
            return Outcome(c, REFUSED, self.bounds[n], why=str(entry["why"]))
        figures = dict(entry["figures"])
        figures["largest"] = tuple(figures["largest"])
        return Outcome(c, ESTIMATED, self.bounds[n], float(entry["value"]), Figures(**figures))


def _too_large(c: Candidate, held: float) -> str:
    capacity = c.slice.usable_hbm_bytes_per_device
    return f"does not fit: needs at least {bytes_text(held)}, HBM has {bytes_text(capacity)}"
