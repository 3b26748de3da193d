"""Tasks of a search on a user's executor: estimates and closer bounds of candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from meshlib.searching.outcomes import Outcome
from meshlib.searching.programs import Objective, SearchProblem
from meshlib.searching.space import Candidate, Choices


@dataclass(frozen=True)
class Remote:
    """State that the executor's workers need: the problems, the candidates with their bounds, the user's objective."""

    problems: Mapping[Choices, SearchProblem]
    space: Sequence[Candidate]
    bounds: Sequence[float]
    given: object

    @cached_property
    def objective(self) -> Objective:
        """The objective."""
        return Objective.named(self.given)


def _remote_estimate(remote: Remote, n: int) -> Outcome:
    c = remote.space[n]
    return remote.problems[c.choices].estimated(c, remote.objective, remote.bounds[n])


def _remote_bound(remote: Remote, n: int) -> float:
    problem, closer = remote.problems[remote.space[n].choices], remote.objective.closer
    assert closer is not None
    return closer(problem.bounds, remote.space[n]) / problem.units


REMOTE = {"bound": _remote_bound, "estimate": _remote_estimate}
