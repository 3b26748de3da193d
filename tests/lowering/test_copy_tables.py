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


def drawn(rng: random.Random, regather: bool) -> tables.Copies:
    """A tensor that is computed in forward, possibly again in backward, and used in both."""
    interned = SharedValues()
    copies = tables.Copies(rng.choice(PLACEMENTS), 4, Balance(), regather)
    own = interned.makes([(s,) for s in rng.sample(PLACEMENTS, 3)])
    again = interned.makes([(), *[(s,) for s in rng.sample(PLACEMENTS, 2)]])
    copies.set_made((0, 1), REGIONS, (own, again))
    for variable, region in enumerate(REGIONS, start=2):
        copies.add_use(variable, region, interned.needs([(s,) for s in rng.sample(PLACEMENTS, 4)]))
    return copies


def least(copies: tables.Copies) -> np.ndarray:
    """The least cost under each value of the producer's variables and those of both users."""
    graph = FactorGraph([3, 3, 4, 4])
    copies.enter(graph, {})
    others = [range(n) for n in graph.sizes[4:]]
    own = itertools.product(*map(range, graph.sizes[:4]))
    costs = [min(graph.cost((*values, *more)) for more in itertools.product(*others)) for values in own]
    return np.array(costs)


@pytest.mark.parametrize("regather", [False, True], ids=["copies of any size last", "small copies last"])
@pytest.mark.parametrize("seed", range(6))
def test_shared_sets_cost_what_trees_cost(seed: int, regather: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = drawn(random.Random(seed), regather)
    trees = least(copies)
    monkeypatch.setattr(tables, "DIRECT_ENTRIES", 0)
    sets = least(copies)
    if regather:  # a set may have a small copy of a large one, for later regions; a tree has free slices alone
        assert (sets <= trees + 1e-6).all()
    else:
        np.testing.assert_allclose(sets, trees)


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
