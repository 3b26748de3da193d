"""State, steps and buffers: what a simulation keeps between steps, and that no value is written over too early.

Numbers in the random programs are small integers, which float32 and bfloat16 hold exactly in any order of addition:
the two executors must agree in every bit.
"""

from __future__ import annotations

import re
from contextlib import nullcontext

import ml_dtypes
import numpy as np
import pytest

import meshlib as mtf
from tests.effort import draws
from tests.oracle import computed_by_part

A, B, C = mtf.Dimension("a", 4), mtf.Dimension("b", 4), mtf.Dimension("c", 2)
BATCH, IN, OUT = mtf.Dimension("batch", 8), mtf.Dimension("inner", 4), mtf.Dimension("outer", 6)
EXECUTORS = ("fast", "exact")


def counting(*sizes: int) -> np.ndarray:
    return np.arange(1, np.prod(sizes, dtype=int) + 1, dtype=np.float32).reshape(sizes)


# ---------------------------------------------------------------- reading and assigning


@pytest.mark.parametrize("executor", EXECUTORS)
def test_state_gives_and_takes_copies(executor):
    with mtf.Graph():
        w = mtf.variable("w", [A, C], counting(4, 2))
        program = mtf.lower({"w": w}, [mtf.assign(w, w + 1)], "r:2", "a:r")
    sim = mtf.simulate(program, executor=executor)
    read = sim.state["w"]
    read[:] = -1
    np.testing.assert_array_equal(sim.state["w"], counting(4, 2))
    mine = counting(4, 2) * 10
    sim.state["w"] = mine
    mine[:] = -1
    result = sim.step()["w"]
    np.testing.assert_array_equal(result, counting(4, 2) * 10)
    result[:] = -1
    np.testing.assert_array_equal(sim.state["w"], counting(4, 2) * 10 + 1)
    assert sorted(sim.state) == ["step", "w"]
    assert len(sim.state) == 2
    assert "w" in sim.state
    assert "v" not in sim.state


@pytest.mark.parametrize(
    ("dtype", "slice_dtype", "activation_dtype", "public", "value"),
    [
        ("float32", None, None, np.float32, 1.00390625),
        ("float32", "bfloat16", None, np.float32, 1.0),  # 1 + 2**-8 rounds to even
        ("bfloat16", None, None, ml_dtypes.bfloat16, 1.0),
        ("float32", None, "bfloat16", np.float32, 1.00390625),
        ("bfloat16", "float32", None, ml_dtypes.bfloat16, 1.0),
        ("float64", None, None, np.float64, 1.00390625),
    ],
)
def test_dtypes_of_a_variable(dtype, slice_dtype, activation_dtype, public, value):
    with mtf.Graph():
        w = mtf.variable("w", [A], 1.00390625, dtype, slice_dtype, activation_dtype)
        program = mtf.lower({"w": w})
    sim = mtf.simulate(program)
    assert w.dtype.name == (activation_dtype or slice_dtype or dtype)
    assert sim.state["w"].dtype == public
    assert sim.state["w"].astype(np.float64).tolist() == [value] * 4
    assert program.variables["w"].tensor.dtype.name == (slice_dtype or dtype)
    sim.state["w"] = np.full(4, 3.0)
    assert sim.state["w"].astype(np.float64).tolist() == [3.0] * 4
    assert sim.step()["w"].dtype == w.dtype.public


ODD = {  # arrays of the numbers 1 to 4, as they may come
    "big-endian": np.array([1, 2, 3, 4], ">f4"),
    "backwards": np.array([4, 3, 2, 1], np.float32)[::-1],
    "every other": np.arange(2, 10, dtype=np.float64)[::2] / 2,
    "repeated": np.broadcast_to(np.float32(1), 4) * [1, 2, 3, 4],
    "half": np.array([1, 2, 3, 4], np.float16),
    "long": np.array([1, 2, 3, 4], np.longdouble),
    "bfloat16": np.array([1, 2, 3, 4], ml_dtypes.bfloat16),
    "record": np.rec.array(np.array([1, 2, 3, 4], np.float32)),
    "read-only": np.frombuffer(np.array([1, 2, 3, 4], np.float32).tobytes(), np.float32),
    "unaligned": np.frombuffer(b"x" + np.array([1, 2, 3, 4], np.float32).tobytes(), np.float32, offset=1),
}
LARGE = 1e300
BAD = {  # and what no element may hold
    "masked": (np.ma.array([1.0, 2, 3, 4], mask=[0, 1, 0, 0]), "masked array"),
    "masked without a mask": (np.ma.array([1.0, 2, 3, 4]), "masked array"),
    "too large": (np.array([1, -LARGE, 3, 4]), r"-1e\+300 at index \[1\] does not fit"),
    "objects": (np.array([1, 2, None, 4]), "object"),
    "huge integers": (np.array([1, 2, 10**30, 4]), "object"),
    "complex": (np.array([1, 2, 3, 4j]), "complex128"),
    "structured": (np.zeros(4, [("a", "f4")]), "'a', '<f4'"),
    "dates": (np.zeros(4, "M8[s]"), "datetime64"),
    "spans": (np.zeros(4, "m8[s]"), "timedelta64"),
    "texts": (np.array(["1"] * 4), "<U1"),
    "bytes": (np.array([b"1"] * 4), "S1"),
    "nothing": (np.zeros(0, np.float32), r"\[0\]"),
    "no dims": (np.float32(1), r"\[\]|float32"),
}


def doors(dtype="float32"):
    """Where arrays come in: each gives what arrives for [a:4]."""
    with mtf.Graph():
        x, w = mtf.input("x", [A], dtype), mtf.variable("w", [A], 0, dtype)
        program = mtf.lower({"x": x, "w": w})
    sim = mtf.simulate(program)

    def assigned(value):
        sim.state["w"] = value
        return sim.state["w"]

    def declared(value):
        with mtf.Graph():
            return mtf.simulate(mtf.lower({"w": mtf.variable("w", [A], value, dtype)})).state["w"]

    return {
        "feed": lambda value: sim.step(x=value)["x"],
        "state": assigned,
        "initial array": declared,
        "initializer": lambda value: declared(lambda key, shape, dtype: value),
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("odd", ODD)
def test_arrays_of_any_form_arrive(odd, dtype):
    for door in doors(dtype).values():
        assert door(ODD[odd]).astype(float).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("bad", BAD)
def test_what_no_element_can_hold_is_one_error(bad):
    value, message = BAD[bad]
    for name, door in doors().items():
        if bad == "no dims" and name == "initial array":
            continue  # a number for all
        with pytest.raises(mtf.MeshlibError, match=message) as caught:
            door(value)
        assert "\n" not in str(caught.value)
        assert caught.value.__cause__ is None


def test_numbers_beyond_the_range_of_a_dtype():
    for dtype, most, over in (("float32", 3.4e38, 3.5e38), ("bfloat16", 3.38e38, 3.4e38)):
        for door in doors(dtype).values():
            assert np.isfinite(door(np.full(4, most)).astype(float)).all()
            assert np.isinf(door(np.full(4, np.inf)).astype(float)).all()
            with pytest.raises(mtf.MeshlibError, match=rf"{over / 1e38:g}e\+38 at index \[0\] does not fit {dtype}"):
                door(np.full(4, over))
    for door in doors("int32").values():
        with pytest.raises(mtf.MeshlibError, match="1099511627776 does not fit int32"):
            door(np.full(4, 2**40, np.uint64))
    sim = doors()
    for value in ([1.0, LARGE, 3.0, 4.0], (1.0, np.ma.array(2.0), 3.0, 4.0), [np.ma.masked, 1.0, 2.0, 3.0]):
        with pytest.raises(mtf.FeedError, match=r"does not fit|masked"):
            sim["feed"](value)


@pytest.mark.parametrize("number", [LARGE, -LARGE, 10**400, 10**5000], ids=["large", "small", "400", "5000"])
def test_constants_beyond_the_range_of_a_dtype(number):
    with mtf.Graph():
        x = mtf.input("x", [A])
        for build in (
            lambda: mtf.constant(number),
            lambda: x * number,
            lambda: mtf.variable("v", [A], number),
            lambda: mtf.constant(number, dtype="int32"),
        ):
            with pytest.raises(mtf.GraphError, match=r"the number .* does not fit"):
                build()
        assert mtf.constant(float("inf")).dtype.name == "float32"
        with pytest.raises(mtf.GraphError, match="finite number, got int"):
            mtf.initializers.random_normal(10**5000)


def test_initializers_beyond_the_range_of_a_dtype():
    for start in (mtf.initializers.constant(LARGE), mtf.initializers.random_normal(0, LARGE)):
        with mtf.Graph():
            program = mtf.lower({"w": mtf.variable("w", [A], start)})
        with pytest.raises(mtf.FeedError, match=r"variable 'w'.*1e\+300 does not fit float32"):
            mtf.simulate(program)


def test_a_fed_array_does_not_become_the_state():
    with mtf.Graph():
        x, w = mtf.input("x", [A]), mtf.variable("w", [A], 0.0)
        program = mtf.lower(updates=[mtf.assign(w, x)])
    for executor in EXECUTORS:
        sim, mine = mtf.simulate(program, executor=executor), np.ones(4, np.float32)
        sim.step(x=mine)
        mine[:] = 9
        assert sim.state["w"].tolist() == [1] * 4


def test_updates_of_a_narrow_variable_are_rounded():
    with mtf.Graph():
        w = mtf.variable("w", [A], 1.0, "float32", slice_dtype="bfloat16")
        program = mtf.lower(updates=[mtf.assign(w, mtf.cast(w, "float32") + 0.01171875)])
    for executor in EXECUTORS:
        sim = mtf.simulate(program, executor=executor)
        sim.step()
        assert sim.state["w"].tolist() == [1.015625] * 4  # 1.01171875 lies between 1.0078125 and 1.015625, tie to even


def test_integer_and_boolean_variables():
    with mtf.Graph():
        n = mtf.variable("n", [A], 7, "int32")
        flag = mtf.variable("flag", [A], True, "bool")
        updates = [mtf.assign(n, n + 1), mtf.assign(flag, mtf.logical_not(flag))]
        program = mtf.lower(updates=updates, mesh="r:2", layout="a:r")
    for executor in EXECUTORS:
        sim = mtf.simulate(program, executor=executor)
        sim.step()
        assert (sim.state["n"].dtype, sim.state["n"].tolist()) == (np.int32, [8] * 4)
        assert (sim.state["flag"].dtype, sim.state["flag"].tolist()) == (np.bool_, [False] * 4)


def test_the_step_counter_can_be_set():
    with mtf.Graph():
        w = mtf.variable("w", [], 0.0)
        program = mtf.lower({"n": mtf.step()}, [mtf.assign(w, w + 1)])
    sim = mtf.simulate(program)
    sim.state["step"] = 41
    assert [int(sim.step()["n"]) for _ in range(2)] == [41, 42]
    assert sim.state["step"] == 43
    with pytest.raises(mtf.FeedError, match="int32"):
        sim.state["step"] = 1.5


# ---------------------------------------------------------------- other programs on the same variables


def network(batch: int) -> tuple[mtf.Tensor, list[mtf.Operation]]:
    rows = mtf.Dimension("batch", batch)
    x, y = mtf.input("x", [rows, IN]), mtf.input("y", [rows, OUT])
    w = mtf.variable("w", [IN, OUT])
    error = mtf.einsum([x, w], output_shape=[rows, OUT]) - y
    loss = mtf.reduce_mean(mtf.square(error))
    return loss, mtf.optimize.MomentumOptimizer(0.1, 0.5).minimize(loss)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_an_evaluation_program_of_another_batch_mesh_and_layout(executor):
    with mtf.Graph():
        loss, updates = network(8)
        training = mtf.lower({"loss": loss}, updates, "r:2;c:2", "batch:r;outer:c", "highest")
    with mtf.Graph():
        loss, _ = network(3)
        evaluation = mtf.lower({"loss": loss}, mesh="k:4", layout="inner:k", precision="highest")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 4)), rng.normal(size=(8, 6))
    x2, y2 = rng.normal(size=(3, 4)), rng.normal(size=(3, 6))
    sim = mtf.simulate(training, seed=3, executor=executor)
    losses = []
    for n in range(4):
        w = sim.state["w"].astype(np.float64)
        got = sim.run(evaluation, x=x2, y=y2)["loss"]
        np.testing.assert_allclose(got, np.mean((x2 @ w - y2) ** 2), rtol=1e-5)
        assert sim.state["step"] == n  # a program without updates does not count
        np.testing.assert_array_equal(sim.state["w"], w.astype(np.float32))
        losses.append(float(sim.step(x=x, y=y)["loss"]))
        np.testing.assert_allclose(losses[-1], np.mean((x @ w - y) ** 2), rtol=1e-5)
    assert losses == sorted(losses, reverse=True)


def test_a_program_with_updates_counts_and_one_without_does_not():
    with mtf.Graph():
        w = mtf.variable("w", [], 0.0)
        n = mtf.step()
        writing, reading = mtf.lower({"n": n}, [mtf.assign(w, w + 1)]), mtf.lower({"n": n})
    for executor in EXECUTORS:
        sim = mtf.simulate(writing, executor=executor)
        seen = [int(sim.step()["n"]), int(sim.run(reading)["n"]), int(sim.run(reading)["n"]), int(sim.step()["n"])]
        assert seen == [0, 1, 1, 1]
        assert sim.state["step"] == 2


def test_a_program_may_bring_new_variables():
    with mtf.Graph():
        w = mtf.variable("w", [A], 1.0)
        first = mtf.lower({"w": w})
    with mtf.Graph():
        w = mtf.variable("w", [A], 5.0)
        v = mtf.variable("v", [A], 2.0)
        second = mtf.lower({"sum": w + v}, [mtf.assign(v, v + w)], "r:4", "a:r")
    sim = mtf.simulate(first)
    assert sim.run(second)["sum"].tolist() == [3.0] * 4  # w keeps the value it has in this simulation
    assert sim.run(second)["sum"].tolist() == [4.0] * 4
    assert sim.state["v"].tolist() == [4.0] * 4


# ---------------------------------------------------------------- reads and writes of one step


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("layout", ["", "a:r", "a:r;b:c"])
def test_reads_see_the_state_before_the_step(executor, layout):
    with mtf.Graph():
        v, w = mtf.variable("v", [A, B], counting(4, 4)), mtf.variable("w", [A, B], -counting(4, 4))
        swap = [mtf.assign(v, w), mtf.assign(w, v)]
        program = mtf.lower({"v": v, "w": w, "difference": v - w}, swap, "r:2;c:2", layout)
    sim = mtf.simulate(program, executor=executor)
    for n in range(5):
        sign = 1 if n % 2 == 0 else -1
        result = sim.step()
        np.testing.assert_array_equal(result["v"], sign * counting(4, 4))
        np.testing.assert_array_equal(result["w"], -sign * counting(4, 4))
        np.testing.assert_array_equal(result["difference"], 2 * sign * counting(4, 4))
        np.testing.assert_array_equal(sim.state["v"], -sign * counting(4, 4))
        np.testing.assert_array_equal(sim.state["w"], sign * counting(4, 4))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_three_variables_turn_in_a_ring_and_one_value_is_written_twice(executor):
    with mtf.Graph():
        x, y, z, k = (mtf.variable(n, [A], float(i)) for i, n in enumerate("xyzk"))
        total = x + y + z
        updates = [mtf.assign(x, y), mtf.assign(y, z), mtf.assign(z, total), mtf.assign(k, total)]
        program = mtf.lower({"total": total}, updates, "r:2", "a:r")
    sim = mtf.simulate(program, executor=executor)
    state = [0.0, 1.0, 2.0]
    for _ in range(6):
        total = sum(state)
        assert sim.step()["total"].tolist() == [total] * 4
        state = [state[1], state[2], total]
        assert [sim.state[n][0] for n in "xyzk"] == [*state, total]
    sim.state["k"] = np.zeros(4)
    assert sim.state["z"].tolist() == [state[2]] * 4


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_failed_step_leaves_state_that_is_a_view_of_its_buffer(executor):
    with mtf.Graph():
        w, x = mtf.variable("w", [A, B], counting(4, 4)), mtf.input("x", [A, B])
        program = mtf.lower({"s": mtf.reduce_sum(w)}, [mtf.assign(w, swapped(w * 2 + x))])
    sim = mtf.simulate(program, executor=executor)
    sim.step(x=np.ones((4, 4)))
    before = sim.state["w"]
    with pytest.raises(mtf.NotFiniteError):
        sim.step(x=np.full((4, 4), np.nan))
    np.testing.assert_array_equal(sim.state["w"], before)
    assert sim.state["step"] == 1
    sim.step(x=np.zeros((4, 4)))
    np.testing.assert_array_equal(sim.state["w"], before.T * 2)


# ---------------------------------------------------------------- seeds


def test_a_seed_decides_every_bit():
    with mtf.Graph():
        w = mtf.variable("w", [A, B])
        noise = mtf.random_normal([A, B])
        kept = mtf.dropout(w, True, keep_prob=0.5)
        updates = [mtf.assign(w, w + noise)]
        outputs = {"noise": noise, "kept": kept, "w": w}
        programs = [mtf.lower(outputs, updates), mtf.lower(outputs, updates, "r:2;c:2", "a:r;b:c")]

    def run(seed: int, executor: str, which: int) -> list[bytes]:
        sim = mtf.simulate(programs[which], seed=seed, executor=executor)
        return [x.tobytes() for _ in range(3) for x in sim.step().values()] + [sim.state["w"].tobytes()]

    first = run(1, "fast", 0)
    assert len(set(first)) == len(first)  # every step draws anew
    assert all(run(1, executor, which) == first for executor in EXECUTORS for which in (0, 1))
    assert run(np.int64(1), "fast", 0) == first
    assert not set(run(2, "fast", 0)) & set(first)
    assert not set(run(-1, "fast", 0)) & set(first)


# ---------------------------------------------------------------- shards


def test_shards_are_the_blocks_of_the_state():
    with mtf.Graph():
        w = mtf.variable("w", [A, C], counting(4, 2))
        program = mtf.lower({"w": w}, mesh="r:2;c:2", layout="a:c")
    sim = mtf.simulate(program)
    whole = counting(4, 2)
    for r in range(2):
        for c in range(2):
            np.testing.assert_array_equal(sim.shard("w", (r, c)), whole[2 * c : 2 * c + 2])
            np.testing.assert_array_equal(sim.shard("w", {"c": c, "r": r}), whole[2 * c : 2 * c + 2])
    sim.shard("w", (0, 0))[:] = -1
    np.testing.assert_array_equal(sim.state["w"], whole)
    assert sim.shard("step", (0, 0)) == 0


@pytest.mark.parametrize("executor", ["fast", "exact"])
def test_shards_of_intermediates_are_blocks_of_the_last_step(executor: str) -> None:
    with mtf.Graph():
        x, w = mtf.input("x", [A, B]), mtf.variable("w", [B, C], counting(4, 2) / 10)
        with mtf.scope("ffn"):
            h = mtf.relu(mtf.einsum([x, w], output_shape=[A, C], name="in"), name="out")
        loss = mtf.reduce_sum(mtf.square(h), name="loss")
        updates = mtf.optimize.SgdOptimizer(0.01).minimize(loss)
        program = mtf.lower({"loss": loss}, updates, mesh="r:2;c:2", layout="a:r;c:c", precision="highest")
    sim = mtf.simulate(program, executor=executor)
    given = counting(4, 4) - 5
    for _ in range(3):  # the values are those of the last step, whose variables have changed since
        before = sim.state["w"]
        sim.step(x=given)
    inner = given @ before
    for core, (r, c) in enumerate(program.mesh.coordinates()):
        block = np.s_[2 * r : 2 * r + 2, c : c + 1]
        np.testing.assert_allclose(sim.shard("ffn/in", core), inner[block], rtol=1e-5)
        np.testing.assert_allclose(sim.shard("ffn/out", {"r": r, "c": c}), np.maximum(inner, 0)[block], rtol=1e-5)
        np.testing.assert_array_equal(sim.shard("x", core), given[2 * r : 2 * r + 2])
        np.testing.assert_allclose(sim.shard("loss", core), np.square(np.maximum(inner, 0)).sum(), rtol=1e-5)
    (partial,) = re.findall(r"(%\d+) +loss: f32\[\] \{sum", str(program))
    parts = [sim.shard(partial, core) for core in range(4)]
    np.testing.assert_allclose(sum(parts), sim.shard("loss", 0), rtol=1e-6)
    assert len({float(part) for part in parts}) > 1


def test_shards_of_loops_are_named_by_trip() -> None:
    with mtf.Graph():
        x, turns = mtf.input("x", [A]), mtf.input("turns", [mtf.Dimension("turns", 5)])
        (out,), _ = mtf.scan(
            lambda carries, _: ([mtf.multiply(carries[0], 2.0, name="twice")], []), [x], [turns], turns.shape[0]
        )
        program = mtf.lower({"y": out}, mesh="r:2", layout="a:r")
    sim = mtf.simulate(program)
    with pytest.raises(mtf.FeedError, match="once step has run"):
        sim.shard("twice", 0)
    sim.step(x=counting(4))
    (name,) = set(re.findall(r"[\w/]*twice", str(program)))
    for trip in range(5):
        np.testing.assert_array_equal(sim.shard(name, 1, trip=trip), counting(4)[2:] * 2.0 ** (trip + 1))
    np.testing.assert_array_equal(sim.shard("y", 1), counting(4)[2:] * 2.0**5)  # by the name of an output
    with pytest.raises(mtf.FeedError, match=r"computed 5 times in a step; trip must be under 5, got 5"):
        sim.shard(name, 1, trip=5)
    with pytest.raises(mtf.FeedError, match=r"no tensor '.*twic'.*did you mean"):
        sim.shard(name[:-1], 1)


# ---------------------------------------------------------------- programs without computations


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("layout", ["", "a:r;b:c"])
def test_outputs_that_are_variables_inputs_or_constants(executor, layout):
    with mtf.Graph():
        w, x = mtf.variable("w", [A, B], counting(4, 4)), mtf.input("x", [A, B])
        fresh = mtf.variable("fresh", [A, B], 1.0)
        outputs = {"w": w, "x": x, "again": w, "seven": mtf.constant(7.0, [A, B]), "n": mtf.range(A)}
        outputs["one"] = mtf.ones([])
        updates = [mtf.assign(fresh, x), mtf.assign(w, mtf.constant(3.0, [A, B]))]
        program = mtf.lower(outputs, updates, "r:2;c:2", layout)
    sim = mtf.simulate(program, executor=executor)
    feed = np.full((4, 4), 5, np.float32)
    for n in range(3):
        result = sim.step(x=feed)
        expected = counting(4, 4) if n == 0 else np.full((4, 4), 3.0)
        np.testing.assert_array_equal(result["w"], expected)
        np.testing.assert_array_equal(result["again"], expected)
        np.testing.assert_array_equal(result["x"], feed)
        assert result["seven"].tolist() == [[7.0] * 4] * 4
        assert result["n"].tolist() == [0, 1, 2, 3]
        assert result["one"] == 1
        result["w"][:], result["x"][:] = -1, -1
        assert (feed == 5).all()
        np.testing.assert_array_equal(sim.state["fresh"], feed)
        feed[:] = 5  # the fed array stays the caller's
    kept = sim.state["fresh"]
    feed[:] = -9
    np.testing.assert_array_equal(sim.state["fresh"], kept)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_variable_written_but_never_read(executor):
    with mtf.Graph():
        log, x = mtf.variable("log", [A], 0.0, trainable=False), mtf.input("x", [A])
        program = mtf.lower(updates=[mtf.assign(log, x * 2)], mesh="r:2", layout="a:r")
    sim = mtf.simulate(program, executor=executor)
    assert sim.step(x=counting(4)) == {}
    assert sim.state["log"].tolist() == [2.0, 4.0, 6.0, 8.0]


# ---------------------------------------------------------------- buffers


def swapped(x: mtf.Tensor) -> mtf.Tensor:
    """x transposed: its dims `a` and `b` exchange names. Nothing is computed, so it may stay a view."""
    for old, new in (("a", "t"), ("b", "a"), ("t", "b")):
        x = mtf.rename_dimension(x, old, new)
    return mtf.transpose(x, [A, B])


def reread(x: mtf.Tensor) -> mtf.Tensor:
    """x through one dim and back."""
    return mtf.reshape(mtf.reshape(x, [mtf.Dimension("all", 16)]), [A, B])


def check_both(build, mesh="device:1", layout="", steps=3):
    """Both executors, and parts of chains, agree in every bit on outputs and state, over steps of small integers."""
    with mtf.Graph():
        outputs, updates = build()
    program = mtf.lower(outputs, updates, mesh, layout)
    exact, fast, parts = (mtf.simulate(program, executor=e, check_nan=False) for e in ("exact", "fast", "fast"))
    rng = np.random.default_rng(5)
    for _ in range(steps):
        feeds = {n: rng.integers(-4, 5, v.tensor.shape.sizes).astype(np.float32) for n, v in program.inputs.items()}
        wanted = exact.step(feeds)
        for sim in (fast, parts):
            with computed_by_part() if sim is parts else nullcontext():
                results = sim.step(feeds)
            for name in outputs:
                np.testing.assert_array_equal(results[name], wanted[name], err_msg=f"{name}\n{program}")
            for name in sim.state:
                np.testing.assert_array_equal(sim.state[name], exact.state[name], err_msg=f"{name}\n{program}")
    return fast


def inputs(*names: str) -> list[mtf.Tensor]:
    return [mtf.input(n, [A, B]) for n in names]


def repeated_operand():
    x, y = inputs("x", "y")
    z = x + 1
    return {"sum": mtf.add_n([z, y, z]), "other": mtf.add_n([y, x * 2, x * 2])}, []


def repeated_view():
    x, y = inputs("x", "y")
    z = x * 3
    return {"sum": mtf.add_n([z, y, swapped(z), reread(z)])}, []


def own_transpose():
    (x,) = inputs("x")
    z = x * 2
    return {"sum": z + swapped(z), "product": mtf.maximum(swapped(z), x)}, []


def transposed_unary():
    (x,) = inputs("x")
    return {"y": mtf.relu(swapped(x * 2)), "z": mtf.sign(swapped(reread(x + 1)))}, []


def used_much_later():
    (x,) = inputs("x")
    early = x * 2
    late = early
    for n in range(12):
        late = mtf.minimum(late + n, 8) * -1
    return {"late": late + early, "view": swapped(late) + swapped(early), "early": early}, []


def views_of_outputs():
    (x,) = inputs("x")
    y = x + 1
    part = mtf.slice(y, 1, 2, "a")
    return {"y": y, "turned": swapped(y), "part": part, "wide": mtf.broadcast(part, [C, *part.shape]), "again": y}, []


def outputs_that_are_updates():
    (x,) = inputs("x")
    w = mtf.variable("w", [A, B], counting(4, 4) % 5)
    new = mtf.minimum(w + x, 9)
    return {"new": new, "turned": swapped(new), "more": new + 1, "old": w}, [mtf.assign(w, new)]


def views_as_updates():
    (x,) = inputs("x")
    w, v = mtf.variable("w", [A, B], counting(4, 4)), mtf.variable("v", [A, B], 2.0)
    new = mtf.minimum(w + x, 9)
    row = mtf.reduce_sum(mtf.minimum(v, 3), reduced_dim=A)
    return {"w": w}, [mtf.assign(w, swapped(new)), mtf.assign(v, mtf.broadcast(row, [A, B]))]


def one_value_for_two_variables():
    (x,) = inputs("x")
    w, v = mtf.variable("w", [A, B], 1.0), mtf.variable("v", [A, B], 2.0)
    new = mtf.minimum(w + swapped(v) + x, 9)
    return {"gap": w - v}, [mtf.assign(w, new), mtf.assign(v, swapped(new))]


def matmul_of_a_value_with_itself():
    (x,) = inputs("x")
    y = x + 1
    t = mtf.rename_dimension(y, "b", "k")
    return {"square": mtf.einsum([t, mtf.rename_dimension(y, "a", "k")], output_shape=[A, B]) + y}, []


@pytest.mark.parametrize("layout", ["", "a:r", "b:c", "a:r;b:c"])
@pytest.mark.parametrize(
    "build",
    [
        repeated_operand,
        repeated_view,
        own_transpose,
        transposed_unary,
        used_much_later,
        views_of_outputs,
        outputs_that_are_updates,
        views_as_updates,
        one_value_for_two_variables,
        matmul_of_a_value_with_itself,
    ],
)
def test_no_value_is_written_over_before_its_last_use(build, layout):
    check_both(build, "r:2;c:2", layout)


class Writer:
    """A random program over [a, b] of small integers: every value stays within -9 .. 9."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.values = [*inputs("x", "y"), mtf.variable("w", [A, B], counting(4, 4) % 7 - 3)]
        self.values.append(mtf.variable("v", [A, B], 2.0))
        self.variables = self.values[2:]

    def pick(self) -> mtf.Tensor:
        # Old values too, so that some live long.
        last = self.rng.random() < 0.5
        return self.values[-1 if last else int(self.rng.integers(len(self.values)))]

    def small(self, x: mtf.Tensor) -> mtf.Tensor:
        return mtf.maximum(mtf.minimum(x, 9), -9)

    def grow(self) -> None:
        x, y, z = self.pick(), self.pick(), self.pick()
        made = [
            lambda: self.small(x + y),
            lambda: self.small(x - y),
            lambda: self.small(x * y),
            lambda: mtf.maximum(x, y),
            lambda: mtf.relu(x),
            lambda: mtf.negative(x),
            lambda: mtf.abs(x),
            lambda: mtf.where(mtf.greater(x, y), z, x),
            lambda: self.small(mtf.add_n([x, y, x])),
            lambda: self.small(mtf.add_n([x, swapped(x), z, y, x])),
            lambda: swapped(x),
            lambda: reread(x),
            lambda: self.small(mtf.pad(mtf.slice(x, 1, 2, "b"), [0, 2], "b")),
            lambda: mtf.transpose(mtf.broadcast(mtf.reduce_max(x, reduced_dim=A), [A, B]), [A, B]),
            lambda: self.small(mtf.broadcast(mtf.reduce_sum(x, reduced_dim=B), [A, B]) + y),
            lambda: self.small(
                mtf.einsum([mtf.rename_dimension(x, "b", "k"), mtf.rename_dimension(y, "a", "k")], output_shape=[A, B])
            ),
            lambda: mtf.cast(mtf.cast(x, "bfloat16"), "float32"),
            lambda: mtf.cast(mtf.cast(x, "int32"), "float32"),
        ]
        self.values.append(made[int(self.rng.integers(len(made)))]())

    def __call__(self):
        for _ in range(int(self.rng.integers(4, 14))):
            self.grow()
        count = int(self.rng.integers(1, 4))
        outputs = {f"o{i}": self.pick() for i in range(count)}
        return outputs, [mtf.assign(w, self.pick()) for w in self.variables if self.rng.random() < 0.7]


@pytest.mark.parametrize("chunk", range(10))
def test_random_programs_agree_in_every_bit(chunk):
    for seed in range(30 * chunk, 30 * chunk + draws(4, 30)):
        rng = np.random.default_rng(10_000 + seed)
        mesh = ("device:1", "r:2", "r:2;c:2")[int(rng.integers(3))]
        layouts = {"device:1": [""], "r:2": ["a:r", "b:r", ""], "r:2;c:2": ["a:c;b:r", "a:r+c", "b:c", "a:r;b:c"]}[mesh]
        layout = layouts[int(rng.integers(len(layouts)))]
        check_both(lambda seed=seed: Writer(seed)(), mesh, layout, steps=2)


# ---------------------------------------------------------------- optimizers against NumPy in float64


def problem(optimizer):
    rows = mtf.Dimension("batch", 8)
    x, y = mtf.input("x", [rows, IN]), mtf.input("y", [rows, OUT])
    w, b = mtf.variable("w", [IN, OUT]), mtf.variable("b", [OUT], 0.25)
    error = mtf.einsum([x, w], output_shape=[rows, OUT]) + b - y
    loss = mtf.reduce_sum(mtf.square(error))
    return loss, optimizer.minimize(loss)


def warmup(peak: float, steps: int, decay: float):
    return lambda n: peak * min((n + 1) / steps, max(n + 1, 1) ** -decay * steps**decay)


RULES = {
    "momentum": (lambda: mtf.optimize.MomentumOptimizer(0.01, 0.8), lambda n: 0.01),
    "momentum, schedule": (
        lambda: mtf.optimize.MomentumOptimizer(mtf.optimize.warmup_then_decay(0.02, 5, 0.5), 0.8),
        warmup(0.02, 5, 0.5),
    ),
    "adam": (lambda: mtf.optimize.AdamOptimizer(0.03, 0.8, 0.95, 1e-6), lambda n: 0.03),
    "adam, schedule": (
        lambda: mtf.optimize.AdamOptimizer(mtf.optimize.warmup_then_decay(0.1, 4, 1.0), 0.8, 0.95, 1e-6),
        warmup(0.1, 4, 1.0),
    ),
    "sgd": (lambda: mtf.optimize.SgdOptimizer(mtf.optimize.constant(0.01)), lambda n: 0.01),
}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("rule", RULES)
def test_optimizers_follow_their_papers_over_20_steps(rule, executor):
    make, rate = RULES[rule]
    with mtf.Graph():
        loss, updates = problem(make())
        program = mtf.lower({"loss": loss}, updates, "r:2;c:2", "batch:r;outer:c", "highest")
    sim = mtf.simulate(program, seed=1, executor=executor)
    rng = np.random.default_rng(2)
    values = [sim.state["w"].astype(np.float64), sim.state["b"].astype(np.float64)]
    first, second = [np.zeros_like(v) for v in values], [np.zeros_like(v) for v in values]
    for n in range(20):
        x, y = rng.normal(size=(8, 4)), rng.normal(size=(8, 6))
        x, y = x.astype(np.float32).astype(np.float64), y.astype(np.float32).astype(np.float64)
        error = x @ values[0] + values[1] - y
        np.testing.assert_allclose(sim.step(x=x, y=y)["loss"], np.sum(error**2), rtol=1e-4)
        for i, g in enumerate((2 * x.T @ error, 2 * error.sum(0))):
            if rule.startswith("sgd"):
                values[i] = values[i] - rate(n) * g
            elif rule.startswith("momentum"):
                first[i] = 0.8 * first[i] + g
                values[i] = values[i] - rate(n) * first[i]
            else:  # algorithm 1 of Kingma and Ba, 2015
                first[i] = 0.8 * first[i] + 0.2 * g
                second[i] = 0.95 * second[i] + 0.05 * g**2
                m, v = first[i] / (1 - 0.8 ** (n + 1)), second[i] / (1 - 0.95 ** (n + 1))
                values[i] = values[i] - rate(n) * m / (np.sqrt(v) + 1e-6)
        np.testing.assert_allclose(sim.state["w"], values[0], rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(sim.state["b"], values[1], rtol=2e-4, atol=2e-5)


def test_warm_up_then_decay():
    with mtf.Graph():
        w = mtf.variable("w", [], 0.0)
        rate = mtf.optimize.warmup_then_decay(0.5, 4, 0.5)(mtf.step())
        program = mtf.lower({"rate": rate}, [mtf.assign(w, w + rate)])
    sim = mtf.simulate(program)
    rates = [float(sim.step()["rate"]) for _ in range(16)]
    expected = [0.125, 0.25, 0.375, 0.5] + [0.5 * (4 / n) ** 0.5 for n in range(5, 17)]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)
    assert rates[15] == pytest.approx(0.25)


# ---------------------------------------------------------------- collectives, step by step


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
def test_the_ring_of_a_collective_ends_with_the_block_that_follows(kind: str) -> None:
    layouts = {"all_reduce": "a:r;b:c", "reduce_scatter": "b:c;c:c?", "all_gather": "a:r;b:c?"}
    with mtf.Graph():
        x, w = mtf.input("x", [A, B]), mtf.variable("w", [B, C], counting(4, 2))
        y = mtf.einsum([x, w], output_shape=[A, C], name="y")
        outputs = {"y": y} if kind != "all_gather" else {"y": mtf.constrain(x, "", name="whole")}
        program = mtf.lower(outputs, mesh="r:2;c:2", layout=layouts[kind], precision="highest")
    sim = mtf.simulate(program)
    sim.step(x=counting(4, 4))
    name = "x" if kind == "all_gather" else "y"
    for core in range(4):
        run, block = sim.ring(name, core), sim.shard(name, core)
        assert run.kind == kind
        own = run.results[core if kind == "all_gather" else core % 2]
        if kind == "all_gather":  # blocks of a 2x2 mesh, row by row
            own = own.reshape(2, 2, 2, 2).swapaxes(1, 2)
        np.testing.assert_allclose(own.reshape(-1), (block.T if kind == "reduce_scatter" else block).reshape(-1))
    with pytest.raises(mtf.FeedError, match=r"ring .*'%0' is not the result of a collective on a ring"):
        sim.ring("%0")


@pytest.mark.parametrize("executor", ["fast", "exact"])
def test_stacks_of_loops_become_the_state_without_writing_over_it(executor):
    """A variable that a loop stacks anew in each step: earlier values stay as they were read."""
    layers, d = mtf.Dimension("layers", 3), mtf.Dimension("d", 4)
    with mtf.Graph():
        cache = mtf.variable("cache", [layers, d], 1.0)
        bad = mtf.input("bad", [d])

        def body(carries, slices):
            y = slices[0] + carries[0] + mtf.reduce_sum(cache)  # all of the state, while the stack is written
            return [carries[0]], [y]

        (_, stacked) = mtf.scan(body, [bad], [cache], layers)
        program = mtf.lower({"sum": mtf.reduce_sum(stacked[0])}, updates=[mtf.assign(cache, stacked[0])])
    sim = mtf.simulate(program, executor=executor)
    expected, seen = np.ones((3, 4), np.float32), []
    for step in range(5):
        feed = np.full(4, step, np.float32)
        before = np.array(sim.state["cache"])
        assert np.array_equal(before, expected)
        result = sim.step(bad=feed)
        expected = expected + step + expected.sum()
        assert result["sum"] == pytest.approx(expected.sum())
        seen.append((sim.state["cache"], expected))
    for array, value in seen:  # what was read stays as it was
        assert np.array_equal(array, value)
