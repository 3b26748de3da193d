"""The solver of factor graphs against all assignments, and what `Program.choice` says of its programs."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import meshlib as mtf
from meshlib.lowering import solving
from meshlib.lowering.dual_ascent import raise_bound
from meshlib.lowering.elimination import Elimination, FactorGraph
from meshlib.lowering.solving import solve
from tests.effort import draws, some


def drawn(seed: int, variables: int, density: float = 0.5) -> FactorGraph:
    """Random tables over one, two and three variables of two to four values; some combinations are impossible."""
    rng = np.random.default_rng(seed)
    graph = FactorGraph()
    for _ in range(variables):
        graph.add_variable(int(rng.integers(2, 5)))
    for _ in range(int(density * variables * 3)):
        scope = rng.choice(variables, size=min(variables, int(rng.integers(1, 4))), replace=False).tolist()
        table = rng.integers(0, 20, size=[graph.sizes[v] for v in scope]).astype(float)
        table[(rng.random(table.shape) < 0.1) & (table != table.min())] = np.inf
        graph.add(scope, table)
    return graph


def least(graph: FactorGraph) -> float:
    """The least cost of all assignments."""
    return min(graph.cost(values) for values in product(*map(range, graph.sizes)))


@pytest.mark.parametrize("seed", range(draws(60, 2000)))
def test_the_optimum_is_found_and_proved(seed: int) -> None:
    graph = drawn(seed, 2 + seed % 6)
    found, optimum = solve(graph), least(graph)
    assert found.cost == found.bound == optimum
    assert graph.cost(found.values) == optimum
    assert found.gap == 0


@pytest.mark.parametrize("seed", range(draws(25, 500)))
def test_bounds_and_pruning_lead_to_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tables so small that variables are bounded and pruned, not just eliminated."""
    monkeypatch.setattr(solving, "SMALL_TABLE", 4)
    monkeypatch.setattr(solving, "DIVE_TABLE", 4)
    graph = drawn(seed, 3 + seed % 5, density=0.8)
    found = solve(graph)
    assert found.cost == pytest.approx(least(graph))
    assert found.gap == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("seed", range(draws(25, 500)))
def test_where_tables_are_too_large_there_is_a_bound(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solving, "SMALL_TABLE", 2)
    monkeypatch.setattr(solving, "DIVE_TABLE", 2)
    graph = drawn(seed, 4 + seed % 4, density=0.9)
    found, optimum = solve(graph, limit=2), least(graph)
    assert found.bound <= optimum + 1e-9 <= found.cost + 2e-9
    assert graph.cost(found.values) == found.cost


@pytest.mark.parametrize("seed", range(draws(8, 300)))
def test_branches_prove_what_elimination_cannot(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of a few entries and a poor incumbent: each value of some variable is tried, and the best is proved."""
    monkeypatch.setattr(solving, "SMALL_TABLE", 2)
    monkeypatch.setattr(solving, "DIVE_TABLE", 2)
    graph = drawn(seed, 5 + seed % 3, density=0.9)
    solved = solve(graph, limit=12)
    assert solved.cost == pytest.approx(least(graph))
    assert solved.gap == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("seed", range(draws(25, 500)))
def test_dual_ascent_bounds_costs_and_keeps_them(seed: int) -> None:
    graph = drawn(seed, 3 + seed % 4, density=0.8)
    problem, everything = Elimination(graph), list(product(*map(range, graph.sizes)))
    before = problem.lower_bound()
    bound = raise_bound(problem, 20)
    assert before - 1e-9 <= bound <= least(graph) + 1e-9
    costs = [
        problem.constant + sum(t[tuple([values[v] for v in scope])] for scope, t in problem.tables.items())
        for values in everything
    ]
    np.testing.assert_allclose(costs, [graph.cost(values) for values in everything], atol=1e-9)


@pytest.mark.parametrize("seed", range(draws(10, 200)))
def test_dual_ascent_solves_chains_in_one_round_trip(seed: int) -> None:
    """As numbered for programs: operations in order, and behind them the copies between each and the next."""
    rng, count = np.random.default_rng(seed), 4
    graph = FactorGraph([3] * (2 * count - 1))
    for n in range(count - 1):
        for op in (n, n + 1):
            graph.add([op, count + n], rng.integers(0, 20, size=(3, 3)).astype(float))
    assert raise_bound(Elimination(graph), 2) == pytest.approx(least(graph))


@pytest.mark.parametrize("seed", [0, 1, 3, 5, 8])
def test_extrapolation_meets_the_least_cost_where_sweeps_alone_creep(seed: int) -> None:
    """A long grid whose neighbours cost more the further apart their values are: bounds are tight in the limit."""
    rng, length, width = np.random.default_rng(seed), 60, 4
    graph = FactorGraph([4] * (length * width))
    apart = np.abs(np.arange(4.0)[:, None] - np.arange(4))
    for v in range(length * width):
        graph.add([v], rng.random(4) / 2)
        if v + width < length * width:
            graph.add([v, v + width], apart * rng.random())
        if v % width < width - 1:
            graph.add([v, v + 1], apart * rng.random())
    assert raise_bound(Elimination(graph), 40) == pytest.approx(solve(graph).cost, abs=1e-9)


@pytest.mark.parametrize("seed", range(draws(5, 100)))
def test_tight_bounds_need_no_dive(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain with costs that differ, so that one assignment alone meets the bound."""
    monkeypatch.setattr(solving, "SMALL_TABLE", 1)
    monkeypatch.setattr(solving, "_dive", None)
    rng, graph = np.random.default_rng(seed), FactorGraph([4] * 6)
    for n in range(5):
        graph.add([n, n + 1], rng.random((4, 4)))
    assert solve(graph).cost == pytest.approx(least(graph))


def test_many_neighbours_are_no_obstacle() -> None:
    """A variable that shares a table with more others than an array can have axes."""
    graph = FactorGraph()
    centre = graph.add_variable(3)
    for n in range(80):
        v = graph.add_variable(2)
        graph.add([centre, v], np.array([[n % 3, 1.0], [0.0, 2.0], [1.0, 1.0]]))
    assert solve(graph).cost == 0.0
    alone = FactorGraph([1, *[2] * 80])
    for v in range(1, 81):
        alone.add([0, v], np.array([[2.0, 1.0]]))
    assert solve(alone).cost == 80.0


def test_a_variable_is_eliminated_where_its_large_table_leaves_a_smaller_one() -> None:
    graph = FactorGraph()
    variables = [graph.add_variable(n) for n in (8, 30, 30)]
    table = np.arange(7200.0).reshape(8, 30, 30)
    graph.add(variables, table)
    problem = Elimination(graph)
    problem.eliminate_up_to(100)
    assert not problem.domain
    assert problem.constant == table.min()


def test_a_dense_graph_of_many_variables_has_a_solution_and_a_bound() -> None:
    """Every variable shares a table with more others than an array can have axes."""
    rng, graph = np.random.default_rng(0), FactorGraph([3] * 50)
    for a in range(50):
        for b in range(a):
            graph.add([b, a], rng.integers(0, 9, size=(3, 3)).astype(float))
    found = solve(graph, limit=1_000)
    assert found.bound <= found.cost < graph.cost([0] * 50)
    assert 0 < found.gap < 1


# ---------------------------------------------------------------- programs

USUAL = (
    ("fsdp+sequence", "fsdp:4;tensor:2"), ("data+tensor", "data:2;tensor:2"), ("zero1+sequence", "data:2;tensor:4"),
    ("fsdp+context", "fsdp:2;context:2"), ("fsdp+tensor", "fsdp:4;tensor:4"),
)  # fmt: skip


@pytest.mark.parametrize(("layout", "mesh"), some(USUAL, USUAL[:1]))
def test_the_choice_is_proved_for_presets(layout: str, mesh: str) -> None:
    config = mtf.models.preset("llama3-8b").reduced()
    with mtf.Graph():
        step = mtf.models.train_step(config, batch=8, length=16)
    program = mtf.lower(*step, mesh, mtf.models.layout(layout, config, mesh))
    assert program.choice.gap == 0
    assert "proved the least" in mtf.explain(program)


@pytest.mark.parametrize("name", some(tuple(mtf.models.PRESETS), ("t5-small",)))
def test_every_preset_is_proved_under_two_axes(name: str) -> None:
    config = mtf.models.preset(name)
    with mtf.Graph():
        step = mtf.models.train_step(config, batch=64, length=min(config.max_length or 2048, 2048))
    second = "expert" if config.experts else "tensor"
    proved = 0
    for mesh, layout in ((f"fsdp:16;{second}:4", f"fsdp+{second}"), ("data:16;tensor:4", "zero1+tensor")):
        try:
            program = mtf.lower(*step, mesh, mtf.models.layout(layout, config, mesh))
        except mtf.LayoutError:
            continue  # 30,522 words do not divide by 4
        assert program.choice.gap == 0, program.choice
        proved += 1
    assert proved or config.vocab % 4


def test_a_gap_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    d = mtf.Dimension
    with mtf.Graph():
        x = mtf.input("x", [d("b", 8), d("k", 8)])
        y = mtf.einsum([x, mtf.variable("w", [d("k", 8), d("n", 8)])], [d("b", 8), d("n", 8)])
    ways = {"mesh": "p:2", "layout": "b:p?;k:p?;n:p?"}
    assert mtf.lower({"y": y}, **ways).choice == (0, 0)
    monkeypatch.setattr("meshlib.lowering.problem.solve", lambda graph: solve(graph).__class__(
        solve(graph).values, solve(graph).cost, solve(graph).cost - 1.0))  # fmt: skip
    program = mtf.lower({"y": y}, **ways)
    assert program.choice.excess_bytes == 1.0
    assert program.choice.gap == 1.0 / max(program.sent_bytes, 1)
    assert "above the least" in mtf.explain(program)


@pytest.mark.parametrize("order", ["batch:p;d_model:p?;d_ff:p?", "batch:p;d_ff:p?;d_model:p?"])
def test_an_optional_rule_that_lost_its_axis_may_use_it(order: str) -> None:
    """Of few rows, moving activations sends less than gathering weights, whatever the order of the rules."""
    d = mtf.Dimension
    batch, d_model, d_ff = d("batch", 8), d("d_model", 256), d("d_ff", 1024)
    with mtf.Graph():
        x = mtf.input("x", [batch, d_model])
        h = mtf.relu(mtf.einsum([x, mtf.variable("wi", [d_model, d_ff])], [batch, d_ff]))
        y = mtf.einsum([h, mtf.variable("wo", [d_ff, d_model])], [batch, d_model])
    program = mtf.lower({"y": y}, mesh="p:4", layout=order)
    assert program.sent_bytes < 8 * (256 + 1024) * 4 * 4  # far below a weight, of a megabyte
