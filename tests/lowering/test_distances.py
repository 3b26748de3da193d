"""Costs between all placements at once against the reshards themselves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from layouts import Mesh, Sharding, reshard
from layouts.resharding import elements_sent
from meshlib.lowering import strategy_costs
from meshlib.lowering.balance import Balance
from meshlib.lowering.distances import COLLECTIVE, between, can_become, distances, least_distances
from meshlib.lowering.strategy_costs import Pricing, Strategy
from tests.effort import deep, each, some
from tests.lowering.pairs import pair


def placements(rng: random.Random, count: int) -> list[Sharding]:
    """Random placements of one shape, pending sums and maxima included."""
    mesh = Mesh({f"m{n}": rng.choice([2, 3, 4]) for n in range(rng.choice([1, 2, 3]))})
    dims = rng.choice([1, 2, 3])
    shape = ";".join(f"d{n}:{mesh.size * rng.choice([1, 2, 3])}" for n in range(dims))
    drawn: dict[Sharding, None] = {}
    for _ in range(count):
        axes: list[list[str]] = [[] for _ in range(dims)]
        pending, kind = {}, rng.choice(["sum", "sum", "sum", "max"])
        for axis in rng.sample(list(mesh.axes), len(mesh.axes)):
            target = rng.randrange(dims + 2)
            if target < dims:
                axes[target].append(axis)
            elif target == dims:
                pending[axis] = kind
        drawn.setdefault(Sharding(shape, mesh, axes, pending))
    return list(drawn)


@pytest.mark.parametrize("seed", some(range(60), range(12)))
@pytest.mark.parametrize("priced", [False, True], ids=["bytes", "axes of several prices"])
def test_costs_are_those_of_reshards(seed: int, priced: bool) -> None:
    rng = random.Random(seed)
    spots = placements(rng, 8)
    prices = tuple((a, rng.choice([1.0, 3.0])) for a in spots[0].mesh.axes) if priced else ()
    for few in (spots[:3], spots):  # the others join what is known of the first
        costs = distances(few, 4, Balance(axis_prices=prices))
        for a, source in enumerate(few):
            for b, target in enumerate(few):
                sent, collectives = between(source, target, 4, prices)
                assert costs[a, b] == pytest.approx(sent + COLLECTIVE * collectives, rel=1e-12)


@pytest.mark.parametrize("seed", some(range(60), range(12)))
@pytest.mark.parametrize("priced", [False, True], ids=["bytes", "axes of several prices"])
def test_reshards_that_are_not_asked_for_are_bounded_from_below(seed: int, priced: bool) -> None:
    rng = random.Random(seed)
    spots = placements(rng, 12)
    prices = tuple((a, rng.choice([0.5, 1.0, 3.0])) for a in spots[0].mesh.axes) if priced else ()
    balance = Balance(axis_prices=prices, collective_bytes=rng.choice([0.0, 5.0]))
    asked = np.array([[rng.random() < 0.1 for _ in spots] for _ in spots])
    least, is_known = least_distances(spots, 4, balance, asked)
    exact = distances(spots, 4, balance)
    assert (least <= exact * (1 + 1e-12)).all()
    assert (least[is_known] == exact[is_known]).all()
    assert is_known[asked].all()
    assert (least == 0).tolist() == (exact == 0).tolist()


@pytest.mark.parametrize("seed", some(range(60), range(12)))
def test_elements_sent_are_those_of_the_plan(seed: int) -> None:
    spots = placements(random.Random(seed), 8)
    for source in spots:
        for target in spots:
            if can_become(source, target):
                plan = reshard(source, target, 1)
                assert elements_sent(source, target) == (plan.sent_bytes, plan.collectives)


@each("number", range(300) if deep() else (20, 24, 39))
def test_strategies_stay_that_stay_by_all_reshards(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of random programs: as if no reshard were only bounded."""

    def exact(placements: Sequence[Sharding], itemsize: float, balance: Balance, asked: np.ndarray) -> tuple[Any, Any]:
        return distances(placements, itemsize, balance), np.ones_like(asked)

    undominated, kept = Pricing._undominated, list[object]()

    def noted(self: Pricing, strategies: list[Strategy]) -> list[Strategy]:
        staying = undominated(self, strategies)
        kept.append([s.choice.assignment for s in staying])
        return staying

    monkeypatch.setattr(Pricing, "_undominated", noted)
    drawn = pair(number)
    mtf.Session(drawn.outputs, drawn.updates).lower(drawn.mesh, drawn.layout)
    by_bounds = kept.copy()
    kept.clear()
    monkeypatch.setattr(strategy_costs, "least_distances", exact)
    mtf.Session(drawn.outputs, drawn.updates).lower(drawn.mesh, drawn.layout)
    assert by_bounds == kept
