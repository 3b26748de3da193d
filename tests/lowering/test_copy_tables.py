"""The two ways to tabulate the copies of a tensor: trees of its uses, and sets of copies that a region shares."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

import meshlib.lowering.copies as tables
from layouts import Mesh, Shape, Sharding
from meshlib.lowering import Balance
from meshlib.lowering.elimination import FactorGraph
from meshlib.lowering.values import SharedValues

SHAPE, MESH = Shape("b:8;d:8"), Mesh("x:2;y:4")
PLACEMENTS = [
    Sharding(SHAPE, MESH, axes)
    for axes in [((), ()), (("x",), ()), (("y",), ()), ((), ("x",)), ((), ("y",)), (("x",), ("y",)), (("x", "y"), ())]
]
REGIONS = ("forward", "backward")


def drawn(rng: random.Random) -> tables.Copies:
    """A tensor that is computed in forward, by some values of its variable in backward too, and used in both."""
    interned = SharedValues()
    copies = tables.Copies(rng.choice(PLACEMENTS), 4, Balance(), regather=rng.random() < 0.5)
    makes: list[tuple[tuple[int, Sharding], ...]] = [((0, s),) for s in rng.sample(PLACEMENTS, 2)]
    makes += [((0, s), (1, rng.choice(PLACEMENTS))) for s in rng.sample(PLACEMENTS, 3)]
    copies.set_made(0, REGIONS, interned.makes(makes))
    for variable, region in enumerate(REGIONS, start=1):
        copies.add_use(variable, region, interned.needs([(s,) for s in rng.sample(PLACEMENTS, 4)]))
    return copies


def least(copies: tables.Copies) -> np.ndarray:
    """The least cost under each value of the producer and both users."""
    graph = FactorGraph([5, 4, 4])
    copies.enter(graph, {})
    others = [range(n) for n in graph.sizes[3:]]
    own = itertools.product(*map(range, graph.sizes[:3]))
    costs = [min(graph.cost((*values, *more)) for more in itertools.product(*others)) for values in own]
    return np.array(costs)


@pytest.mark.parametrize("seed", range(6))
def test_shared_sets_cost_what_trees_cost(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = drawn(random.Random(seed))
    trees = least(copies)
    monkeypatch.setattr(tables, "DIRECT_ENTRIES", 0)
    np.testing.assert_allclose(least(copies), trees)
