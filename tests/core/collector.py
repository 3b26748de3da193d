"""Memory and the collector in a process of a user's, which has frozen nothing.

python -m tests.core.collector LOWERINGS SEARCHES STEPS

The process of the tests holds millions of objects, which each of these checks would go through.
"""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np

import meshlib as mtf
from meshlib.core.garbage import FEW_OBJECTS, LEAST_OBJECTS, uncollected


def planned(count: int) -> list[list[int]]:
    return [[n] for n in range(count)]


def large_constants_go_with_their_graphs() -> None:
    """Without a collection that anybody asks for: bytes count, however few objects hold them."""
    count = mtf.Dimension("n", 2**20)
    refs = []
    for n in range(24):
        with mtf.Graph() as graph:
            table = mtf.constant(np.full(count.size, n, np.float32), [count])
            mtf.lower([table * 2])
        refs.append(weakref.ref(graph))
        del graph, table
        uncollected(planned)(FEW_OBJECTS)  # enough to move the graph to the oldest generation
    assert sum(ref() is not None for ref in refs) <= 16


def nobody_pays_for_a_plan_at_the_next_allocation() -> None:
    """What a plan has made is not looked at by the first collections after it."""
    gc.collect()
    looked: list[tuple[int, float]] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            looked.append((info["generation"], time.process_time()))
        else:
            looked[-1] = looked[-1][0], time.process_time() - looked[-1][1]

    plan = uncollected(planned)(300_000)
    others, gc.callbacks[:] = gc.callbacks[:], [note]  # JAX has one, which takes longer
    try:
        allocated = [[n] for n in range(50_000)]
    finally:
        gc.callbacks[:] = others
    assert len(plan) == 300_000
    assert len(allocated) == 50_000
    assert looked
    assert all(generation < 2 for generation, _ in looked)
    assert max(seconds for _, seconds in looked) < 0.01  # 300,000 lists take more


def garbage_of_plans_is_collected_without_being_asked() -> None:
    class Knot:
        """An object that only the collector frees."""

        def __init__(self) -> None:
            self.own, self.more = self, planned(2 * FEW_OBJECTS)

    # A collection is due when as many have joined.
    count = 2 * max(LEAST_OBJECTS, len(gc.get_objects())) // (2 * FEW_OBJECTS)
    refs = []
    for _ in range(count):
        refs.append(weakref.ref(uncollected(Knot)()))
    assert sum(ref() is not None for ref in refs) < 0.7 * count


def what_the_user_froze_stays_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    uncollected(planned)(100_000)
    assert gc.get_freeze_count() > 0.9 * frozen
    assert gc.isenabled()


def a_user_who_paused_the_collector_finds_it_paused() -> None:
    gc.disable()
    try:
        uncollected(planned)(10)
        assert not gc.isenabled()
    finally:
        gc.enable()


CHECKS = (
    large_constants_go_with_their_graphs,
    nobody_pays_for_a_plan_at_the_next_allocation,
    garbage_of_plans_is_collected_without_being_asked,
    what_the_user_froze_stays_frozen,
    a_user_who_paused_the_collector_finds_it_paused,
)


def grown_megabytes(count: int, warm: int, run: Callable[[int], object]) -> float:
    """How much the process grows in `count` runs, after as many as `warm`; 0 without Linux's /proc."""
    for n in range(warm):
        run(n)
    before = _megabytes()
    for n in range(count):
        run(warm + n)
    return _megabytes() - before


def _megabytes() -> float:
    gc.collect()
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * 4096 / 2**20 if statm.exists() else 0.0


def main(lowerings: int, searches: int, steps: int) -> None:
    """Print how much lowerings, searches and steps make the process grow; then run the checks."""
    from tests.core.test_lifetimes import FEEDS, build, lowered

    sim = mtf.simulate(lowered())
    print(
        grown_megabytes(lowerings, lowerings // 10 + 5, lambda n: lowered(0.0)),
        grown_megabytes(
            searches, searches // 10 + 2, lambda n: mtf.search(build, "v5e-4", seconds=None, workers=1, axes=1)
        ),
        grown_megabytes(steps, steps // 10 + 50, lambda n: sim.step(FEEDS)),
    )
    for check in CHECKS:
        check()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
