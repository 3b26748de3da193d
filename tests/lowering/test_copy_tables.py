"""Tables of the copies of a tensor against all sequences of reshards."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

import numpy as np
import pytest

import meshlib as mtf
import meshlib.lowering.copies as tables
from layouts import Mesh, Shape, Sharding
from meshlib.lowering import Balance
from meshlib.lowering.bindings import stored
from meshlib.lowering.copy_trees import Copy
from meshlib.lowering.distances import COLLECTIVE, distances
from meshlib.lowering.elimination import Elimination, FactorGraph, Solution
from meshlib.lowering.partition import Partitioner
from meshlib.lowering.problem import Chosen, Problem
from meshlib.lowering.solving import solve
from meshlib.lowering.values import SharedValues
from meshlib.program.instructions import Move
from tests.effort import draws
from tests.lowering.pairs import pair

SHAPE, MESH = Shape("b:8;d:8"), Mesh("x:2;y:4")
PLACEMENTS = [
    Sharding(SHAPE, MESH, axes)
    for axes in [((), ()), (("x",), ()), (("y",), ()), ((), ("x",)), ((), ("y",)), (("x",), ("y",)), (("x", "y"), ())]
]
REGIONS = ("forward", "backward")


USED = {  # regions of the users
    "both regions": ("forward", "backward"),
    "two before one": ("forward", "forward", "backward"),
    "one before two": ("forward", "backward", "backward"),
    "three at once": ("forward", "forward", "forward"),
    "two at once": ("forward", "forward"),
}
ALONE = "two at once"  # each use is of one placement: their table has no variable for shared copies


def drawn(rng: random.Random, regather: bool, used: str) -> tables.Copies:
    """A tensor that is computed in forward, possibly again in backward, and used under 3 placements or none."""
    interned = SharedValues()
    copies = tables.Copies(rng.choice(PLACEMENTS), 4, Balance(), regather)
    own = interned.makes([(s,) for s in rng.sample(PLACEMENTS, 2)])
    again = interned.makes([(), (rng.choice(PLACEMENTS),)])
    copies.set_made((0, 1), REGIONS, (own, again))
    for variable, region in enumerate(USED[used], start=2):
        last = rng.sample(PLACEMENTS, 1 if used == ALONE else 2)
        rows = [(), *[(s,) for s in rng.sample(PLACEMENTS, 2)], tuple(last)]
        copies.add_use(variable, region, interned.needs(rows))
    return copies


def least_of_tables(copies: tables.Copies, count: int) -> np.ndarray:
    """The least cost under each value of the producer's variables and those of its users."""
    graph = FactorGraph([2, 2, *[4] * count])
    copies.enter(graph, {})
    first = len(graph.sizes) - count - 2
    problem = Elimination(graph)
    for v in range(len(graph.sizes) - first, len(graph.sizes)):
        problem.eliminate(v)
    total = np.zeros(graph.sizes[: 2 + count])
    for scope, table in problem.tables.items():
        total = total + table.reshape([n if v in scope else 1 for v, n in enumerate(total.shape)])
    return total


def least_of_sequences(copies: tables.Copies, used: Sequence[str], values: Sequence[int]) -> float:
    """The least cost of all sequences of reshards: Dijkstra's algorithm over the sets of copies in each region."""
    home, row = copies.home, lambda rows, value: rows.classes[rows.of[value]]
    own, again = (row(rows, value) for rows, value in zip(copies.made, values, strict=False))
    needed = {region: set() for region in REGIONS}
    for (_, region, rows), value in zip(copies.uses, values[2:], strict=True):
        needed[region] |= {*row(rows, value)}
    universe = list(dict.fromkeys([*copies.placements(), home]))
    universe = list(dict.fromkeys([*universe, *[stored(s, home) for s in universe]]))
    costs = distances(universe, copies.itemsize, copies.balance)
    between = {(a, b): costs[n, m] for n, a in enumerate(universe) for m, b in enumerate(universe)}
    queue, settled = [(0.0, 0, 0, frozenset(own))], set()
    while queue:
        cost, _, region, there = heappop(queue)
        if (region, there) in settled:
            continue
        settled.add((region, there))
        following = []
        if needed[REGIONS[region]] <= there:
            if region:
                return cost
            lasting = [s for s in there if not copies.regather or s.local_size <= home.local_size]
            following.append((cost, 1, frozenset([*lasting, *again])))
        for s in universe:
            if s not in there and there:
                following.append((cost + min(between[a, s] for a in there), region, there | {s}))
        for entry in following:
            heappush(queue, (entry[0], len(settled) * 100 + len(queue), *entry[1:]))
    return np.inf


@pytest.mark.parametrize("regather", [False, True], ids=["copies of any size last", "small copies last"])
@pytest.mark.parametrize("used", USED)
def test_shared_copies_cost_what_the_cheapest_sequence_of_reshards_costs(used: str, regather: bool) -> None:
    for seed in range(draws(2, 12)):
        rng = random.Random(f"{used} {regather} {seed}")
        copies = drawn(rng, regather, used)
        least = least_of_tables(copies, len(USED[used]))
        for _ in range(draws(6, 40)):
            values = [rng.randrange(n) for n in least.shape]
            exact = least_of_sequences(copies, USED[used], values)
            assert least[tuple(values)] == pytest.approx(exact, abs=1e-3), values


def test_regions_follow_one_another() -> None:
    """What the update computes again serves neither forward nor backward."""
    forward, other, needed = PLACEMENTS[1], PLACEMENTS[4], PLACEMENTS[0]
    interned = SharedValues()
    copies = tables.Copies(needed, 4, Balance(), regather=False)
    again = interned.makes([(), (needed,)])
    copies.set_made((None, 0, 1), (*REGIONS, "update"), (interned.makes([(forward,)]), again, again))
    copies.add_use(2, "backward", interned.needs([(needed,), (other,)]))
    graph = FactorGraph([2, 2, 2])
    copies.enter(graph, {})
    in_backward, in_update = graph.cost((1, 0, 0)), graph.cost((0, 1, 0))
    assert in_backward == 0 < in_update == graph.cost((0, 0, 0))


def test_one_gather_serves_slices_in_every_region() -> None:
    """Though only a later region's user has a value that needs the whole tensor."""
    whole, home, made = PLACEMENTS[0], PLACEMENTS[2], PLACEMENTS[1]
    forward, backward = (home, PLACEMENTS[3]), (PLACEMENTS[4], PLACEMENTS[6])
    interned = SharedValues()
    copies = tables.Copies(home, 4, Balance(), regather=True)
    copies.set_made((None,), REGIONS[:1], (interned.makes([(made,)]),))
    copies.add_use(None, "forward", interned.needs([forward]))
    copies.add_use(0, "backward", interned.needs([backward, (whole,)]))
    graph = FactorGraph([2])
    copies.enter(graph, {})
    least = min(graph.cost((0, *hubs)) for hubs in np.ndindex(*graph.sizes[1:]))
    assert least == 4 * SHAPE.size / 2 + COLLECTIVE  # an all_gather over x; each region slices the result


def root(copy: Copy, parents: Mapping[Copy, Copy]) -> Copy:
    """The copy from which all others on the path to this one are made."""
    while copy in parents:
        copy = parents[copy]
    return copy


@pytest.mark.parametrize("regather", [False, True], ids=["copies of any size last", "small copies last"])
@pytest.mark.parametrize("used", USED)
def test_trees_reach_all_users_at_the_price_of_the_tables(used: str, regather: bool) -> None:
    for seed in range(draws(4, 40)):
        rng = random.Random(f"trees {used} {regather} {seed}")
        copies = drawn(rng, regather, used)
        graph = FactorGraph([2, 2, *[4] * len(USED[used])])
        copies.enter(graph, {})
        values = [rng.randrange(size) for size in graph.sizes[: 2 + len(USED[used])]]
        for v, value in enumerate(values):
            graph.add((v,), np.where(np.arange(graph.sizes[v]) == value, 0, np.inf))
        solution = solve(graph)
        parents = copies.tree(solution.values).parents

        made = [
            (region, s)
            for region, rows, value in zip(copies.regions, copies.made, values, strict=False)
            for s in rows.classes[rows.of[value]]
        ]
        for (_, region, rows), value in zip(copies.uses, values[2:], strict=True):
            assert all(root((region, s), parents) in made for s in rows.classes[rows.of[value]])
        for (region, _), (before, source) in parents.items():
            assert before == region or not regather or source.local_size <= copies.home.local_size
        ends = [(source, s) for (_, s), (_, source) in parents.items()]
        cost = sum(float(distances(pair, copies.itemsize, copies.balance)[0, 1]) for pair in ends)
        assert cost <= solution.cost + 1e-9


def test_programs_send_what_was_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reshards of each tensor with tables against these and its binding; large copies serve their region alone."""
    solved: list[tuple[Problem, Solution, Chosen]] = []
    swept: list[Partitioner] = []
    chosen, run = Problem.chosen, Partitioner.run

    def noted(self: Problem, solution: Solution) -> Chosen:
        solved.append((self, solution, chosen(self, solution)))
        return solved[-1][2]

    monkeypatch.setattr(Problem, "chosen", noted)
    monkeypatch.setattr(Partitioner, "run", lambda self: (run(self), swept.append(self)))
    for n in (*range(draws(20, 300)), 301336, 301991, 301997):
        p = pair(n)
        mtf.lower(p.outputs, p.updates, p.mesh, p.layout)
    for sweep in swept:
        problem, solution = next((p, s) for p, s, chosen in solved if chosen is sweep.chosen)
        sent = dict.fromkeys(problem.copies, 0.0)
        region = {y: i.operation.region for i in sweep.places.instructions for y in i.outputs}
        for i in sweep.places.instructions:
            if isinstance(i, Move) and i.inputs[0].tensor in sent:
                (x,) = i.inputs
                sent[x.tensor] += i.steps[0].sent_bytes
                assert sweep.homes.reach(x.tensor, x.sharding, region[x]) in (None, i.operation.region)
        for t, copies in problem.copies.items():
            if copies.tables is None:
                continue
            priced = copies.tables.graph.cost([solution.values[v] for v in copies.variables])
            results = [choice.out for choice in sweep.chosen.runs.get(t.operation, [()])[0]]
            priced += sum(problem._settled(t, s)[0] for s in results if len(t.operation.outputs) == 1)
            assert sent[t] <= priced + 1e-9
