"""Tasks of a search, which forked processes or a user's executor run.

Workers are forked once, after the first candidates have been estimated, and inherit the caches of the session. A task
is the number of a candidate, or those of a batch, and its answer depends on nothing else: results are independent of
which worker computes them, and when.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from meshlib.searching.outcomes import Outcome
from meshlib.searching.programs import Objective, SearchProblem
from meshlib.searching.space import Candidate, Choices


class CandidateBatch(NamedTuple):
    """Candidates of one problem that are bounded together.

    limit    the value above which their bounds may be loose
    numbers  their places in the space
    """

    limit: float
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class SearchTasks:
    """The tasks of a search, as methods, with what they need; `given`: the user's objective."""

    problems: Mapping[Choices, SearchProblem]
    space: Sequence[Candidate]
    bounds: Sequence[float]
    given: object

    @cached_property
    def objective(self) -> Objective:
        """The objective."""
        return Objective.named(self.given)

    def __reduce__(self) -> tuple[type[SearchTasks], tuple[object, ...]]:
        return SearchTasks, (self.problems, self.space, self.bounds, self.given)  # each process names its own objective

    def estimate(self, n: int) -> Outcome:
        """Lower and estimate one candidate."""
        return self._problem(n).estimated(self.space[n], self.objective, self.bounds[n])

    def bound(self, n: int) -> float:
        """A candidate's closer bound."""
        return self._problem(n).closer_bound(self.space[n], self.objective)

    def together(self, batch: CandidateBatch) -> list[tuple[float, float]]:
        """Bounds of candidates, and on their bytes."""
        candidates = [self.space[n] for n in batch.numbers]
        return self._problem(batch.numbers[0]).bounds_together(candidates, self.objective, batch.limit)

    def _problem(self, n: int) -> SearchProblem:
        return self.problems[self.space[n].choices]
