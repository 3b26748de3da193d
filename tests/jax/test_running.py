"""The face of a simulation on JAX's devices: errors, state, prints, checkpoints, random numbers."""

# ruff: noqa: E402 (whatever needs JAX comes after a look whether it is there)

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs JAX: pip install -e '.[jax]'")
import jax.numpy as jnp

import meshlib as mtf
from meshlib.core.graph import TensorType
from meshlib.core.opdef import OPERATIONS, Kind, operation
from meshlib.jax.rows.sources import _positions
from meshlib.jax.table import ROWS, row
from meshlib.ops.building import build, named_factors, not_differentiable, vector_work
from tests.jax.lowered import in_program, in_text
from tests.jax.models import mlp, mlp_feeds, transformer
from tests.paths import ROOT

N, B = mtf.Dimension("n", 16), mtf.Dimension("b", 8)


# ---------------------------------------------------------------- random numbers

# Of the largest number drawn: what float32 loses where the simulator computes in float64 and rounds once.
DISTANCE = {"unit": 0.0, "bounds": 2**-23, "normal": 2**-21, "trips": 2**-23}


def test_random_numbers_are_the_simulators() -> None:
    long = mtf.Dimension("long", 4096)
    with mtf.Graph():
        trip = mtf.while_loop(3, lambda x: x + mtf.random_uniform([B], name="inside"), [mtf.zeros([B])])
        counted = mtf.assign_add(mtf.variable("v", [B], 0.0), 1.0)
        drawn = {
            "unit": mtf.random_uniform([B, long]),
            "bounds": mtf.random_uniform([B, long], -3.0, 5.0),
            "normal": mtf.random_normal([long, B], 0.5, 2.0),
            "trips": trip[0],
            "narrow": mtf.random_normal([long], dtype="bfloat16"),
        }
    program = mtf.lower(drawn, [counted], mesh="p:2;q:4", layout="long:q;b:p")
    sim, run = mtf.simulate(program, seed=5), mtf.on_jax(program, seed=5)
    assert run.compiled().drawing == sorted(run.compiled().drawing)
    for _ in range(2):  # the step is folded in
        wanted, found = sim.step(), run.step()
        for name, distance in DISTANCE.items():
            error = np.abs(found[name].astype(np.float64) - wanted[name]).max() / np.abs(wanted[name]).max()
            assert error <= distance, f"{name}: {error}"
        # Rounding to bfloat16 may tip over.
        far = np.abs(found["narrow"].astype(np.float64) - wanted["narrow"].astype(np.float64))
        assert (far > 0).mean() < 1e-3
        assert (far <= 2**-7 * np.abs(wanted["narrow"].astype(np.float64))).all()


@pytest.mark.parametrize(
    ("whole", "offsets"),
    [((2**20, 2**20), (2**19 + 1, 77)), ((3, 2**31 - 1, 5), (2, 2**30, 1)), ((2**16,) * 4, (9, 8, 7, 6))],
)
def test_positions_beyond_32_bits(whole: tuple[int, ...], offsets: tuple[int, ...]) -> None:
    sizes = (2,) * len(whole)
    high, low = jax.jit(lambda *at: _positions(at, sizes, whole))(*(jnp.int32(n) for n in offsets))
    for index in np.ndindex(*sizes):
        place = 0
        for n, k, o in zip(whole, index, offsets, strict=True):
            place = place * n + k + o
        assert (int(high[index]) << 32) + int(low[index]) == place % 2**64


# ---------------------------------------------------------------- errors


def looked_up(looped: bool) -> mtf.Program:
    """w[i], i split, and a state that changes; in a loop or not."""
    trips = mtf.Dimension("trips", 4)
    with mtf.Graph():
        w = mtf.variable("w", [N], np.arange(16.0))
        i = mtf.input("i", [trips, B], dtype="int32")
        if looped:
            _, (y,) = mtf.scan(lambda c, s: (c, (mtf.gather(w, s[0], N),)), [mtf.constant(0.0)], [i], trips)
        else:
            y = mtf.gather(w, i, N)
        return mtf.lower({"y": y}, [mtf.assign(w, w + 1.0)], mesh="p:2;q:4", layout="b:q;n:p")


@pytest.mark.parametrize("looped", [False, True])
def test_an_index_out_of_range_is_an_error_and_changes_nothing(looped: bool) -> None:
    program = looked_up(looped)
    good = np.arange(32).reshape(4, 8) % 16
    bad = good.copy()
    bad[2, 5] = 16
    sim, run = mtf.simulate(program), mtf.on_jax(program)
    np.testing.assert_array_equal(run.step(i=good)["y"], good)
    faults = []
    for runner in (sim, run):
        with pytest.raises(mtf.FeedError, match="index 16 is out of range for dim n:16") as fault:
            runner.step(i=bad)
        faults.append(str(fault.value))
    assert faults[0] == faults[1]
    np.testing.assert_array_equal(run.state["w"], np.arange(16.0) + 1)
    np.testing.assert_array_equal(run.step(i=jnp.asarray(good, jnp.int32))["y"], good + 1)
    if not looped:
        y = mtf.on_jax(program, checked=False).step(i=bad)["y"]
        assert np.isnan(y[2, 5])  # no clamping to another element
        assert np.isnan(y).sum() == 1


def test_nan_is_an_error_that_names_its_origin() -> None:
    with mtf.Graph():
        x = mtf.input("x", [B])
        y = mtf.log(x, name="bad_log")
        program = mtf.lower({"y": y}, [mtf.assign(mtf.variable("v", [B], 2.0), y)], mesh="p:8", layout="b:p")
    run = mtf.on_jax(program)
    with pytest.raises(mtf.NotFiniteError, match=r"output 'y' became NaN: .*bad_log.* first makes a NaN, on core 3"):
        run.step(x=np.where(np.arange(8) == 3, -1.0, 1.0))
    assert (run.state["v"] == 2).all()


def test_too_few_devices_float64_and_an_operation_without_a_row() -> None:
    with mtf.Graph():
        x = mtf.input("x", [N])
        large = mtf.lower({"y": x + 1.0}, mesh="p:16", layout="n:p")
        wide = mtf.lower({"y": mtf.cast(x, "float64")})
    with pytest.raises(mtf.ProgramError, match=r"mesh p:16 has 16 cores, but there are 8 cpu devices.*count=16"):
        mtf.on_jax(large)
    with pytest.raises(mtf.ProgramError, match="are float64, which JAX has only after"):
        mtf.on_jax(wide)
    with pytest.raises(mtf.GraphError, match=r"on_jax: expected a program from mtf\.lower"):
        mtf.on_jax(x)  # type: ignore[arg-type]
    for junk in (3, "cpu", [], [None]):
        for function in (lambda x: mtf.on_jax(large, x), mtf.measure_chip):
            with pytest.raises(mtf.GraphError, match="devices must be a list of JAX devices"):
                function(junk)
    with pytest.raises(mtf.GraphError, match=r"device .* is 2 times in the list; give each once"):
        mtf.on_jax(large, jax.devices()[:1] * 2)
    with pytest.raises(mtf.GraphError, match="seed must be an integer"):
        mtf.on_jax(large, seed=1.5)  # type: ignore[arg-type]
    with mtf.Graph():
        small = mtf.on_jax(mtf.lower({"y": mtf.input("x", [N]) * 2.0}))
    with pytest.raises(mtf.FeedError, match=r"expected a NumPy array of float32\[n:16\], got PRNGKeyArray"):
        small.step(x=jax.random.key(0))


def test_a_function_of_the_users_that_raises_leaves_the_state() -> None:
    def root(x: np.ndarray) -> np.ndarray:
        if (x < 0).any():
            raise ValueError("a root of less than nothing")
        return np.sqrt(x)

    with mtf.Graph():
        x, v = mtf.input("x", [B]), mtf.variable("v", [B], 2.0)
        program = mtf.lower(
            {}, [mtf.assign(v, mtf.slicewise(root, [x], splittable_dims=[B]))], mesh="p:8", layout="b:p"
        )
    run = mtf.on_jax(program)
    run.compiled().lowered()  # traced once more
    for _ in range(2):
        with pytest.raises(ValueError, match="less than nothing") as fault:
            run.step(x=np.arange(8.0) - 1)
        assert any("in the function of slicewise" in note for note in fault.value.__notes__)
        assert (run.state["v"] == 2).all()
    run.step(x=np.full(8, 9.0))
    assert (run.state["v"] == 3).all()


def test_whole_numbers_over_zero_are_the_simulators() -> None:
    with mtf.Graph():
        a, b = (mtf.input(name, [B], dtype="int32") for name in "ab")
        program = mtf.lower({"quotient": a // b, "rest": a % b, "again": a + b}, mesh="p:4", layout="b:p")
    feeds = {"a": np.array([-7, 7, -(2**31), 5, 0, 1, -1, 3]), "b": np.array([2, -2, 3, 0, 0, 1, 0, -3])}
    wanted, found = mtf.simulate(program).step(feeds), mtf.on_jax(program).step(feeds)
    assert list(found) == list(wanted) == ["quotient", "rest", "again"]  # not sorted
    for name, y in wanted.items():
        np.testing.assert_array_equal(found[name], y)


def test_operations_of_ones_own() -> None:
    record = operation(
        "cube",
        kind=Kind.ELEMENTWISE,
        shape=lambda types, attrs: TensorType(types[0].shape, types[0].dtype),
        roles=named_factors,
        local=lambda block, x: x * x * x,
        grad=not_differentiable,
        work=vector_work,
    )
    try:
        with mtf.Graph():
            x = mtf.input("x", [N])
            program = mtf.lower({"y": build(record, [x], {})}, mesh="p:4", layout="n:p")
        with pytest.raises(mtf.ProgramError, match=r"'cube' has no row for JAX; give it one, as in @meshlib.jax.row"):
            mtf.on_jax(program)
        row("cube")(lambda part, x: x**3)
        np.testing.assert_allclose(mtf.on_jax(program).step(x=np.arange(16.0))["y"], np.arange(16.0) ** 3)
    finally:
        OPERATIONS.pop("cube")
        ROWS.pop("cube", None)


def test_without_jax_one_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['jax'] = None\nimport meshlib as mtf\n"
        "try:\n    mtf.on_jax\nexcept mtf.MissingError as fault:\n    print(fault)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "on_jax needs JAX, which is not installed: pip install 'meshlib-tpu[jax]'", (
        done.stderr
    )


# ---------------------------------------------------------------- state


def test_state_moves_between_simulator_and_devices(tmp_path: Path) -> None:
    feeds = mlp_feeds()
    sim = mtf.simulate(mlp("data:2", "batch:data"), seed=1)
    program = mlp("rows:2;cols:4", "batch:rows;hidden:cols")
    run = mtf.on_jax(program, seed=2)
    sim.step(feeds[0])
    mtf.save(sim, tmp_path / "a")
    mtf.load(tmp_path / "a", run)
    assert run.seed == 1
    twin, other = copy.copy(run), copy.deepcopy(run)
    with pytest.raises(mtf.GraphError, match="a run on devices can't be pickled"):
        pickle.dumps(run)
    wanted = float(sim.step(feeds[1])["loss"])
    loss = float(run.step(feeds[1])["loss"])
    assert loss == pytest.approx(wanted, rel=2e-6)
    mtf.save(run, tmp_path / "b")
    back = mtf.simulate(mlp("data:4", "batch:data"))
    mtf.load(tmp_path / "b", back)
    for name in back.state:
        np.testing.assert_array_equal(back.state[name], run.state[name])
    assert int(twin.state["step"]) == 1
    assert float(twin.step(feeds[1])["loss"]) == float(other.step(feeds[1])["loss"]) == loss
    assert int(run.state["step"]) == 2
    name = next(n for n in program.variables if n.endswith("kernel"))
    run.state[name] = np.full(run.state[name].shape, 0.5)
    assert (run.shard(name, (1, 3)) == 0.5).all()
    assert run.shard(name, (1, 3)).shape == program.variables[name].sharding.local_shape.sizes
    for use in (run.shard, run.ring):
        with pytest.raises(
            mtf.FeedError, match=r"other tensors have values in mtf.simulate\(program\), not on devices"
        ):
            use("loss", 0)
    with pytest.raises(mtf.FeedError, match="expected shape"):
        run.state[name] = np.zeros(3)
    with pytest.raises(mtf.FeedError, match="unknown feed 'y'"):
        run.step(y=1)
    assert run.step_seconds is None  # of a first step nobody tells
    run.step(feeds[2])
    assert run.step_seconds is not None
    assert "a step, measured" in str(run)


def test_another_program_on_the_same_variables() -> None:
    programs = []
    for size, mesh, layout in ((8, "p:8", "b:p"), (4, "q:2;r:2", "n:r"), (4, "one:1", "")):
        with mtf.Graph():
            x, w = mtf.input("x", [mtf.Dimension("b", size), N]), mtf.variable("w", [N], np.arange(16.0))
            y = mtf.einsum([x, w], precision="highest", output_shape=[mtf.Dimension("b", size)])
            updates = [mtf.assign(w, w * 2.0)] if size == 8 else []
            programs.append(mtf.lower({"y": y}, updates, mesh=mesh, layout=layout))
    run = mtf.on_jax(programs[0])
    for n in range(2):
        run.step(x=np.ones((8, 16)))
        for other in programs[1:]:
            np.testing.assert_allclose(run.run(other, x=np.ones((4, 16)))["y"], 120 * 2 ** (n + 1))


def test_what_users_set_in_jax_for_code_of_their_own_changes_nothing() -> None:
    program, feeds = mlp("p:2;q:2", "batch:p;hidden:q"), mlp_feeds()
    sim = mtf.simulate(program)
    wanted = [sim.step(fed)["loss"] for fed in feeds]
    with ExitStack() as stack:
        stack.enter_context(jax.set_mesh(jax.make_mesh((8,), ("another",))))
        stack.enter_context(jax.numpy_rank_promotion("raise"))
        stack.enter_context(jax.numpy_dtype_promotion("strict"))
        stack.enter_context(jax.disable_jit())
        run = mtf.on_jax(program)
        first, rest = run.step(feeds[0]), run.several(feeds[1:])
        copy.copy(run).state["first/bias"] += 1.0
        assert "1.00 times as many" in mtf.partition_specs(program).note()
    assert rest is not None
    np.testing.assert_allclose([made["loss"] for made in (first, *rest)], wanted, rtol=1e-6)


def test_prints_are_the_simulators(capsys: pytest.CaptureFixture[str]) -> None:
    trips = mtf.Dimension("trips", 3)
    with mtf.Graph():
        x = mtf.input("x", [trips, B])

        def body(c: tuple[mtf.Tensor, ...], s: tuple[mtf.Tensor, ...]) -> tuple[tuple[mtf.Tensor], tuple[mtf.Tensor]]:
            y = mtf.Print(c[0] + s[0], [s[0], mtf.reduce_max(s[0])], "in: ")
            return (y,), (y * 2.0,)

        (last,), (ys,) = mtf.scan(body, [mtf.zeros([B])], [x], trips, reverse=True)
        program = mtf.lower({"ys": ys, "last": mtf.Print(last, [last], "end: ")}, mesh="p:2;q:2", layout="b:q")
    values = np.arange(24.0).reshape(3, 8)
    mtf.simulate(program).step(x=values)
    wanted = capsys.readouterr().out
    mtf.on_jax(program).step(x=values)
    assert capsys.readouterr().out == wanted
    assert wanted.count("in: ") == 6


# ---------------------------------------------------------------- what the compiler is given


def test_state_is_donated_and_gathers_stay_apart() -> None:
    program = transformer("fsdp:8", "fsdp", scan=False)
    text = mtf.on_jax(program, checked=False).compiled().lowered().as_text()
    assert text.count("jax.buffer_donor") + text.count("tf.aliasing_output") == len(program.updates)
    seen = [tuple(i.inputs) for i in program.instructions if i.opcode == "all_gather"]
    again = len(seen) - len(set(seen))
    assert again > 0  # weights are gathered again for the backward pass
    assert text.count("stablehlo.optimization_barrier") >= again


def test_halos_send_no_more_than_the_program() -> None:
    with mtf.Graph():
        x = mtf.input("x", [mtf.Dimension("n", 32), B])
        windows = [mtf.shift(mtf.tanh(x), k, "n", wrap=False) * float(k + 3) for k in (-2, -1, 1, 3)]
        around = [mtf.shift(x * x, k, "n", wrap=True) * float(k + 4) for k in (-3, 2)]
        padded = mtf.concat([mtf.pad(mtf.slice(x, 3, 24, "n"), [5, 3], "n"), mtf.slice(x, 1, 8, "n")], "n")
        outputs = {"y": mtf.add_n(windows), "z": mtf.add_n(around), "p": padded}
        program = mtf.lower(outputs, mesh="p:4;q:2", layout="n:p;b:q")
    run = mtf.on_jax(program)
    values = np.random.default_rng(0).normal(size=(32, 8))
    wanted, found = mtf.simulate(program, executor="exact").step(x=values), run.step(x=values)
    for name, y in wanted.items():
        np.testing.assert_allclose(found[name], y, rtol=1e-5, atol=1e-6, err_msg=name)
    sent = sum(size * times for (kind, _, size), times in in_text(run.compiled()).items())
    most = sum(c.sent_bytes * c.count for c in program.collectives)
    assert {kind for kind, *_ in in_text(run.compiled())} == {"collective_permute"}
    assert sent <= 1.5 * most  # runs that differ from block to block travel in the longest one's length


@pytest.mark.parametrize(("mesh", "layout"), [("a:2;c:2;e:2", "b:a+c;j:e"), ("a:4;c:2", "j:c;b:a")])
def test_a_gather_of_several_dims_is_one(mesh: str, layout: str) -> None:
    with mtf.Graph():
        x = mtf.input("x", [B, mtf.Dimension("j", 4)])
        y = mtf.constrain(mtf.sin(x), "")
    program = mtf.lower({"y": y}, mesh=mesh, layout=layout)
    run = mtf.on_jax(program)
    values = np.random.default_rng(0).normal(size=(8, 4))
    np.testing.assert_allclose(run.step(x=values)["y"], np.sin(values), rtol=1e-5, atol=1e-6)
    assert in_text(run.compiled()) == in_program(program)
    assert [c.kind for c in program.collectives] == ["all_gather"]
