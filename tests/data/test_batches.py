"""Batches: remainder, order, positions, and a thread that never outlives its iterator."""

from __future__ import annotations

import gc
import threading
import time
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshlib as mtf
from meshlib.data.batches import Position
from tests.paths import ROOT


def threads() -> int:
    return sum(t.name == "meshlib.data" for t in threading.enumerate())


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Any:
    assert threads() == 0
    gc.freeze()  # what other tests left is not looked at
    yield
    if threads():  # of an iterator that nobody holds
        gc.collect()
    assert threads() == 0


def pairs(count: int) -> dict[str, np.ndarray]:
    """Two arrays whose rows tell their number."""
    index = np.arange(count)
    return {"x": np.repeat(index[:, None], 3, axis=1).astype(np.float32), "y": index.astype(np.int32)}


def rows(batch: dict[str, np.ndarray]) -> list[int]:
    """The numbers of the examples in a batch; all arrays must agree on them."""
    assert (batch["x"] == batch["y"][:, None]).all()
    return batch["y"].tolist()


# ---------------------------------------------------------------- remainder


def test_drop_and_pad() -> None:
    dropped = list(mtf.Batches(pairs(7), 3, epochs=2))
    assert [rows(b) for b in dropped] == [[0, 1, 2], [3, 4, 5]] * 2
    assert set(dropped[0]) == {"x", "y"}
    assert (dropped[0]["x"].dtype, dropped[0]["y"].dtype, dropped[0]["x"].shape) == (np.float32, np.int32, (3, 3))
    padded = list(mtf.Batches(pairs(7), 3, remainder="pad", epochs=1, mask="real"))
    assert [rows(b) for b in padded] == [[0, 1, 2], [3, 4, 5], [6, 0, 1]]
    assert [b["real"].tolist() for b in padded] == [[1, 1, 1], [1, 1, 1], [1, 0, 0]]
    assert all(b["real"].dtype == np.float32 for b in padded)


def test_padding_goes_round_the_data_as_often_as_it_must() -> None:
    (batch,) = mtf.Batches(pairs(2), 5, remainder="pad", epochs=1)
    assert rows(batch) == [0, 1, 0, 1, 0]
    assert batch["mask"].tolist() == [1, 1, 0, 0, 0]


@given(
    count=st.integers(1, 20),
    size=st.integers(1, 25),
    remainder=st.sampled_from(["drop", "pad"]),
    seed=st.one_of(st.none(), st.integers(0, 2**64 - 1)),
    prefetch=st.integers(0, 3),
)
def test_every_epoch_has_each_example_once(
    count: int, size: int, remainder: str, seed: int | None, prefetch: int
) -> None:
    if remainder == "drop" and size > count:
        return
    batches = mtf.Batches(pairs(count), size, remainder=remainder, shuffle_seed=seed, epochs=2, prefetch=prefetch)
    assert batches.per_epoch == (count // size if remainder == "drop" else -(-count // size))
    for epoch in range(2):
        seen: list[int] = []
        for n in range(batches.per_epoch):
            assert batches.state == (epoch, n)
            batch = next(batches)
            assert len(rows(batch)) == size
            mask = batch.get("mask", np.ones(size))
            seen += [i for i, real in zip(rows(batch), mask, strict=True) if real]
        assert len(set(seen)) == len(seen) == (count if remainder == "pad" else count // size * size)
        if seed is None:
            assert seen == sorted(seen)
    assert batches.state == (2, 0)
    with pytest.raises(StopIteration):
        next(batches)


def test_a_mask_makes_the_mean_right_under_a_layout() -> None:
    batch = mtf.Dimension("batch", 4)
    with mtf.Graph():
        x, mask = mtf.input("x", [batch]), mtf.input("mask", [batch])
        program = mtf.lower({"sum": mtf.reduce_sum(x * mask)}, mesh="r:2", layout="batch:r")
    sim, values = mtf.simulate(program), np.arange(1, 11, dtype=np.float32)
    total = sum(float(sim.step(b)["sum"]) for b in mtf.Batches({"x": values}, 4, remainder="pad", epochs=1))
    assert total == 55


# ---------------------------------------------------------------- order


def test_the_order_is_that_of_the_raw_words_of_philox() -> None:
    batches = mtf.Batches(pairs(11), 11, shuffle_seed=7, epochs=3)
    orders = [rows(b) for b in batches]
    for epoch, order in enumerate(orders):
        words = np.random.Philox(key=7 + (epoch << 64)).random_raw(11)
        assert order == sorted(range(11), key=lambda i: words[i])
    assert orders[0] != orders[1] != orders[2]


def test_order_depends_on_seed_and_epoch_alone() -> None:
    def of(size: int, prefetch: int, seed: int = 3) -> list[int]:
        batches = mtf.Batches(pairs(12), size, shuffle_seed=seed, epochs=2, prefetch=prefetch)
        return [i for b in batches for i in rows(b)]

    assert of(1, 0) == of(4, 2) == of(6, 5) == of(12, 0)
    assert of(4, 0, seed=4) != of(4, 0)


def test_batches_are_copies() -> None:
    data = pairs(4)
    for batch in mtf.Batches(data, 2, epochs=1):
        batch["x"][:] = -1
    np.testing.assert_array_equal(data["x"], pairs(4)["x"])


# ---------------------------------------------------------------- positions


@pytest.mark.parametrize("prefetch", [0, 1, 4])
@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_going_on_from_any_position(prefetch: int, remainder: str) -> None:
    def made(ahead: int) -> mtf.Batches:
        return mtf.Batches(pairs(8), 3, remainder=remainder, shuffle_seed=1, epochs=3, prefetch=ahead)

    whole = [rows(b) for b in made(0)]
    first = made(prefetch)
    for n in range(len(whole)):
        state = first.state
        assert state == divmod(n, first.per_epoch)
        with made(prefetch) as other:
            other.seek(*state)
            assert [rows(b) for b in other] == whole[n:]
        assert rows(next(first)) == whole[n]
    first.seek(1)  # back
    assert rows(next(first)) == whole[first.per_epoch]
    first.seek(3, 0)
    assert list(first) == []


def test_a_run_goes_on_where_its_step_says(tmp_path: Any) -> None:
    batch = mtf.Dimension("batch", 3)
    with mtf.Graph():
        y, w = mtf.input("y", [batch], dtype="int32"), mtf.variable("w", [batch], 0.0)
        program = mtf.lower({"w": w}, [mtf.assign(w, w * 2 + mtf.cast(y, "float32"))])

    def fresh() -> tuple[mtf.Simulation, mtf.Batches]:
        arrays = {"y": np.arange(7, dtype=np.int32)}
        return mtf.simulate(program), mtf.Batches(arrays, 3, shuffle_seed=5, prefetch=2)

    sim, batches = fresh()
    for n, fed in enumerate(islice(batches, 9)):
        sim.step(fed)
        if n == 4:
            mtf.save(sim, tmp_path / "state")
    batches.close()
    again, batches = fresh()
    mtf.load(tmp_path / "state", again)
    with batches:
        batches.seek(*divmod(int(again.state["step"]), batches.per_epoch))
        for fed in islice(batches, 4):
            again.step(fed)
    np.testing.assert_array_equal(again.state["w"], sim.state["w"])


@pytest.mark.parametrize(
    ("position", "message"),
    [
        ((0, 2), "an epoch has batches 0 to 1, got batch 2"),
        ((-1, 0), "epoch must be an integer >= 0, got -1"),
        ((0, 1.0), r"batch must be an integer >= 0, got 1.0"),
        ((True, "0"), "epoch must be .*True; batch must be .*'0'"),
        ((2, 1), "2 epochs end at epoch 2, batch 0, got 2, 1"),
        ((3, 0), "2 epochs end at epoch 2, batch 0, got 3, 0"),
    ],
)
def test_wrong_positions(position: tuple[Any, Any], message: str) -> None:
    batches = mtf.Batches(pairs(6), 3, epochs=2)
    next(batches)
    with pytest.raises(mtf.FeedError, match=message):
        batches.seek(*position)
    assert batches.state == Position(0, 1)


# ---------------------------------------------------------------- the thread


class Watched(np.ndarray):
    """An array that counts the batches taken from it, and fails when the first row of one is `bad`."""

    taken = 0
    bad = -1

    def __getitem__(self, key: Any) -> Any:
        Watched.taken += 1
        found = np.asarray(self)[key]
        if Watched.bad in found:
            raise OSError(f"row {Watched.bad} can't be read")
        return found


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(Watched, "taken", 0)
    monkeypatch.setattr(Watched, "bad", -1)
    return np.arange(100).view(Watched)


def settled(expected: int) -> bool:
    """Whether the thread, given time, has taken that many batches and no more."""
    for _ in range(500):
        if Watched.taken >= expected:
            break
        time.sleep(0.002)
    time.sleep(0.02)
    return Watched.taken == expected


def test_the_queue_is_bounded_and_the_thread_starts_when_asked(watched: Watched) -> None:
    batches = mtf.Batches({"x": watched}, 10, prefetch=3)
    assert threads() == 0
    next(batches)
    assert threads() == 1
    assert settled(1 + 3 + 1)  # taken, queued, and one in the thread's hand
    next(batches)
    assert settled(6)
    assert batches.state == (0, 2)
    batches.close()
    assert threads() == 0


@pytest.mark.parametrize("how", ["close", "with", "drop", "end", "seek", "break", "error"])
def test_the_thread_ends(how: str, watched: Watched) -> None:
    batches = mtf.Batches({"x": watched}, 10, prefetch=2, epochs=1 if how == "end" else None)
    next(batches)
    assert threads() == 1
    if how == "close":
        batches.close()
        batches.close()
    elif how == "with":
        with batches:
            next(batches)
    elif how == "drop":
        del batches
        gc.collect()
    elif how == "end":
        assert len(list(batches)) == 9
        assert list(batches) == []
    elif how == "seek":
        batches.seek(0)
    elif how == "break":
        for _ in batches:
            break
        del batches, _
        gc.collect()
    else:
        Watched.bad = 70
        with pytest.raises(OSError, match="row 70"):
            list(batches)
    assert threads() == 0


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_what_goes_wrong_reaches_the_consumer_at_its_batch(prefetch: int, watched: Watched) -> None:
    Watched.bad = 35
    batches = mtf.Batches({"x": watched}, 10, prefetch=prefetch, epochs=1)
    assert [next(batches)["x"][0] for _ in range(3)] == [0, 10, 20]
    for _ in range(2):  # again, as long as the fault lasts
        with pytest.raises(OSError, match="row 35 can't be read"):
            next(batches)
        assert batches.state == (0, 3)
    Watched.bad = -1
    assert [b["x"][0] for b in batches] == [30, 40, 50, 60, 70, 80, 90]


def test_closed_is_an_error_not_an_end() -> None:
    for prefetch in (0, 2):
        batches = mtf.Batches(pairs(4), 2, prefetch=prefetch)
        next(batches)
        batches.close()
        with pytest.raises(mtf.FeedError, match="closed"):
            next(batches)


def test_closing_wakes_who_waits(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    go, slow = threading.Event(), mtf.Batches({"x": watched}, 10, prefetch=1)
    monkeypatch.setattr(Watched, "__getitem__", lambda self, key: go.wait(5) and np.asarray(self)[key])
    found: list[Exception] = []

    def consume() -> None:
        try:
            next(slow)
        except mtf.FeedError as fault:
            found.append(fault)

    waiting = threading.Thread(target=consume)
    waiting.start()
    while threads() == 0:
        time.sleep(0.001)
    time.sleep(0.01)
    closing = threading.Thread(target=slow.close)
    closing.start()
    waiting.join(5)
    go.set()
    closing.join(5)
    assert [str(fault) for fault in found] == ["Batches: closed while a batch was waited for"]


def test_an_interpreter_ends_while_the_thread_runs() -> None:
    import subprocess
    import sys

    code = (
        "import numpy as np, meshlib as mtf\n"
        "b = mtf.Batches({'x': np.arange(9)}, 2, prefetch=3)\n"
        "print(next(b)['x'].tolist())\n"
    )
    root = ROOT
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 1]\n", "")


# ---------------------------------------------------------------- wrong arguments

X = np.zeros((5, 2))


@pytest.mark.parametrize(
    ("arrays", "size", "more", "message"),
    [
        ({"x": X, "y": X[:4]}, 2, {}, "unequal numbers of examples: x 5, y 4"),
        ({"x": X[:0]}, 2, {}, "no examples in x"),
        ({}, 2, {}, r"expected a dict of names to arrays, got dict \{\}"),
        (X, 2, {}, "expected a dict of names to arrays, got ndarray"),
        ({"x": [1, 2]}, 2, {}, "'x' must be a NumPy array, got list; use np.asarray"),
        ({"x": np.float32(3)}, 2, {}, "'x' must be a NumPy array, got float32"),
        ({"x": np.array(3)}, 2, {}, "'x' needs a first dim that counts the examples"),
        ({3: X}, 2, {}, "names of arrays must be text, got 3"),
        ({"x": X}, 6, {}, "a batch of 6 is larger than the data of 5 examples"),
        ({"x": X}, 0, {}, "batch_size must be an integer >= 1, got 0"),
        ({"x": X}, 2.0, {}, r"batch_size must be an integer >= 1, got 2\.0"),
        ({"x": X}, True, {}, "batch_size must be an integer >= 1, got True"),
        ({"x": X}, 2, {"remainder": "pads"}, r"remainder must be 'drop' or 'pad', got 'pads'; did you mean 'pad'\?"),
        ({"x": X}, 2, {"remainder": None}, "remainder must be 'drop' or 'pad', got None"),
        ({"x": X}, 2, {"shuffle_seed": -1}, r"shuffle_seed must be None or an integer from 0 to 2\*\*64 - 1, got -1"),
        ({"x": X}, 2, {"shuffle_seed": 2**64}, "shuffle_seed must be None or"),
        ({"x": X}, 2, {"shuffle_seed": "a"}, "shuffle_seed must be None or"),
        ({"x": X}, 2, {"epochs": 0}, "epochs must be None or an integer >= 1, got 0"),
        ({"x": X}, 2, {"prefetch": -1}, "prefetch must be an integer >= 0, got -1"),
        ({"x": X}, 2, {"mask": ""}, "mask must be a name, got ''"),
        ({"mask": X}, 2, {"remainder": "pad"}, "the mask's name 'mask' is also that of an array; give another"),
        ({"x": X}, 0, {"epochs": -1, "remainder": "x"}, "remainder must .*; batch_size must .*; epochs must"),
    ],
)
def test_wrong_arguments(arrays: Any, size: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises(mtf.FeedError, match=f"^Batches: .*{message}"):
        mtf.Batches(arrays, size, **more)


def test_a_mask_named_like_an_array_is_fine_where_there_is_none() -> None:
    assert set(next(mtf.Batches({"mask": X}, 2))) == {"mask"}


def test_masks_are_not_dropped() -> None:
    with pytest.raises(mtf.FeedError, match=r"'x' is a masked array; .*filled"):
        mtf.Batches({"x": np.ma.array(np.arange(8.0))}, 2)
