"""Caches that take a token a step: the executors agree in every bit, whatever comes between two steps."""

from __future__ import annotations

import numpy as np
import pytest

import meshlib as mtf
from meshlib.core import arrays
from meshlib.core.spare_arrays import SpareArrays

LAYERS, BATCH, LENGTH, KEY, QUERY = (
    mtf.Dimension(*d) for d in [("layers", 3), ("batch", 2), ("length", 5), ("key", 4), ("query", 2)]
)


@pytest.fixture(autouse=True)
def unpoisoned(monkeypatch):
    """Poisoned arrays hold no values of earlier steps; nothing is known of them."""
    monkeypatch.setattr(arrays, "poisoned", False)


def programs(looped: bool) -> tuple[mtf.Program, mtf.Program]:
    """A step that writes a row of each batch and multiplies with all rows; one that changes all variables."""
    with mtf.Graph():
        rng = np.random.default_rng(0)
        cache = mtf.variable("cache", [LAYERS, BATCH, LENGTH, KEY], rng.normal(size=(3, 2, 5, 4)).astype(np.float32))
        w = mtf.variable("w", [LAYERS, QUERY, KEY], rng.normal(size=(3, 2, 4)).astype(np.float32))
        new, start = mtf.input("new", [BATCH, KEY]), mtf.input("start", [BATCH], "int32")

        def body(carries, slices):
            layer = mtf.update_slice(slices[0], new, LENGTH, start)
            product = mtf.einsum([layer, slices[1]], [BATCH, LENGTH, QUERY])
            return [carries[0] + mtf.reduce_sum(product, reduced_dim=LENGTH)], [layer]

        if looped:
            (result,), (updated,) = mtf.scan(body, [mtf.zeros([BATCH, QUERY])], [cache, w], LAYERS)
        else:
            updated = mtf.update_slice(cache, mtf.stack([new, 2 * new, 3 * new], LAYERS.name), LENGTH, start)
            result = mtf.einsum([updated, w], [BATCH, QUERY])
        step = mtf.lower({"result": result}, [mtf.assign(cache, updated)])
        shift = mtf.input("shift", [])
        other = mtf.lower({"w": w}, [mtf.assign(cache, cache + shift), mtf.assign(w, w * shift)])
    return step, other


@pytest.mark.parametrize("looped", [True, False], ids=["looped", "unrolled"])
def test_steps_agree_in_every_bit_whatever_comes_between(looped):
    step, other = programs(looped)
    rng = np.random.default_rng(1)
    sims = [mtf.simulate(step, executor=executor) for executor in ("fast", "exact")]
    for n in range(40):
        feeds = {"new": rng.normal(size=(2, 4)).astype(np.float32), "start": rng.integers(0, 5, 2).astype(np.int32)}
        event = rng.integers(0, 8) if n > 3 else 7
        value = rng.normal(size=(3, 2, 5, 4)).astype(np.float32)
        for sim in sims:
            if event == 0:
                sim.run(other, shift=np.float32(0.5))
                sim.run(other, shift=np.float32(2.5))
            elif event == 1:
                sim.state["cache"] = value
            elif event == 2:
                with pytest.raises(mtf.FeedError):
                    sim.step({**feeds, "start": np.int32([0, 5])})
            elif event == 3:
                with pytest.raises(mtf.NotFiniteError):
                    sim.step({**feeds, "new": np.full((2, 4), np.nan, np.float32)})
        fresh = mtf.simulate(step)  # which knows of no step before
        fresh.state.update({name: sims[0].state[name] for name in ("cache", "w")})
        result, exact, expected = (sim.step(feeds)["result"] for sim in (*sims, fresh))
        np.testing.assert_allclose(result, exact, rtol=1e-4, atol=1e-4)
        assert np.array_equal(result, expected)
        for sim in (sims[1], fresh):
            assert np.array_equal(sims[0].state["cache"], sim.state["cache"])


def test_only_rows_that_differ_are_copied(monkeypatch):
    """From the third step on: the first two read arrays that the executor did not make."""
    copies: list[bool] = []
    original = SpareArrays.differing_rows

    def counted(self, key, x, out):
        rows = original(self, key, x, out)
        copies.append(rows is None)
        return rows

    monkeypatch.setattr(SpareArrays, "differing_rows", counted)
    for looped, layers in ((True, 3), (False, 1)):
        sim = mtf.simulate(programs(looped)[0])
        copies.clear()
        for _ in range(5):
            sim.step(new=np.ones((2, 4), np.float32), start=np.zeros(2, np.int32))
        assert copies == [True] * 2 * layers + [False] * 3 * layers


@pytest.mark.parametrize("looped", [True, False], ids=["looped", "unrolled"])
def test_a_nan_is_reported_in_rows_of_every_step(looped):
    """In the rows that a step writes; in others where the value before was assigned, or made without a check."""
    sim = mtf.simulate(programs(looped)[0])
    first, last = np.zeros(2, np.int32), np.full(2, 4, np.int32)
    new, bad = np.ones((2, 4), np.float32), np.full((2, 4), np.nan, np.float32)
    for _ in range(4):
        sim.step(new=new, start=first)
    with pytest.raises(mtf.NotFiniteError):
        sim.step(new=bad, start=last)
    sim.step(new=new, start=first)
    sim.check_nan = False
    sim.step(new=bad, start=last)
    sim.step(new=new, start=first)
    sim.check_nan = True
    with pytest.raises(mtf.NotFiniteError, match="'cache'"):
        sim.step(new=new, start=first)
    sim.step(new=new, start=last)  # over the NaN
    assigned = sim.state["cache"]
    assigned[0, 0, 2, 0] = np.nan
    sim.state["cache"] = assigned
    with pytest.raises(mtf.NotFiniteError, match="'cache'"):
        sim.step(new=new, start=last)
