"""Operations that are left under their assigned shardings without a search: no choice for them would be cheaper."""

from __future__ import annotations

import pytest

import meshlib as mtf
from meshlib.lowering import problem
from meshlib.lowering.elimination import FactorGraph, Solution
from meshlib.lowering.solving import solve
from tests.effort import draws, some
from tests.lowering.pairs import pair

LAYOUTS = (("data:2;tensor:2", "data+tensor"), ("fsdp:2;tensor:2", "fsdp+sequence"))


def program() -> tuple[dict[str, mtf.Tensor], list[mtf.Operation], mtf.models.TransformerConfig]:
    """A training step of a small Transformer with AdamW, and its config."""
    config = mtf.models.preset("llama2-7b").reduced()
    with mtf.Graph():
        outputs, written = mtf.models.train_step(config, batch=8, length=16)
    return outputs, written, config


def searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every operation that could be split be searched."""
    monkeypatch.setattr(problem.Space, "axes", lambda self, op: frozenset(["no axis of the mesh"]))


@pytest.mark.parametrize(("mesh", "layout"), some(LAYOUTS, LAYOUTS[1:]))
def test_an_update_is_not_searched(mesh: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update of AdamW has fewer variables, and the programs are the same as if all had been searched."""
    outputs, updates, config = program()
    variables = []

    def counted(graph: FactorGraph) -> Solution:
        variables.append(len(graph.sizes))
        return solve(graph)

    monkeypatch.setattr(problem, "solve", counted)
    programs = []
    for every in (False, True):
        if every:
            searched(monkeypatch)
        programs.append(mtf.lower(outputs, updates, mesh, mtf.models.layout(layout, config, mesh)))
    half = len(variables) // 2
    assert sum(variables[:half]) < sum(variables[half:])
    assert programs[0].collectives == programs[1].collectives


@pytest.mark.parametrize("number", range(draws(12, 1000)))
def test_the_choice_costs_the_same_as_a_search(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random programs under random layouts."""
    subject = pair(number)
    costs = []

    def noted(graph: FactorGraph) -> Solution:
        solution = solve(graph)
        costs.append(solution.cost)
        return solution

    monkeypatch.setattr(problem, "solve", noted)
    for every in (False, True):
        if every:
            searched(monkeypatch)
        mtf.lower(subject.outputs, subject.updates, subject.mesh, subject.layout)
    half = len(costs) // 2
    assert sum(costs[:half]) == pytest.approx(sum(costs[half:]), abs=1e-3)
