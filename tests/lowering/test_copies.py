"""Programs and simulations as plain data: pickled, copied, shared by threads, and the same whatever the hash seed."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from meshlib.simulation.fast import FastExecutor
from tests.effort import some
from tests.paths import ROOT

BATCH, IN, OUT, LAYERS = (mtf.Dimension(*d) for d in (("batch", 8), ("inner", 4), ("outer", 4), ("layers", 3)))
X = np.random.default_rng(7).normal(size=(8, 4)).astype(np.float32)
EXECUTORS = ("fast", "exact")

COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "pickle in Python": lambda x: pickle._loads(pickle._dumps(x)),
    "deepcopy": copy.deepcopy,
}
INITIALIZERS = {
    "none": None,
    "number": 0.5,
    "array": np.arange(16.0).reshape(4, 4),
    "constant": mtf.initializers.constant(2),
    "zeros": mtf.initializers.zeros(),
    "ones": mtf.initializers.ones(),
    "uniform": mtf.initializers.random_uniform(-1, 2),
    "normal": mtf.initializers.random_normal(1, 2),
    "glorot": mtf.initializers.glorot_uniform([IN]),
    "scaled": mtf.initializers.scaled_normal([IN], 2.0),
    "truncated": mtf.initializers.truncated_normal(1, 2),
    "fan": mtf.initializers.variance_scaling(2.0, "fan_avg", "uniform"),
}


def training() -> mtf.Program:
    """Stacked variables, a loop with what its gradient keeps, dropout, slots: three steps tell any difference."""

    def body(carries: tuple[mtf.Tensor, ...], slices: tuple[mtf.Tensor, ...]) -> Any:
        (h,) = carries
        w = mtf.variable("w", [IN, OUT], mtf.initializers.random_normal())
        y = mtf.tanh(mtf.rename_dimension(mtf.einsum([h, w], reduced_dims=[IN]), "outer", "inner"), name="y")
        return (mtf.dropout(y, True, rate=0.25),), ()

    with mtf.Graph():
        x = mtf.input("x", [BATCH, IN])
        (h,), _ = mtf.scan(body, [x], [], LAYERS, stack_variables=True, remat=mtf.Remat(save=["y"]))
        for n, start in enumerate((None, 0.5, mtf.initializers.scaled_normal([IN]))):
            w = mtf.variable(f"v{n}", [IN, OUT], start)
            h = h + mtf.rename_dimension(mtf.einsum([h, w], reduced_dims=[IN]), "outer", "inner") * 0.01
        loss = mtf.reduce_mean(mtf.square(h))
        updates = mtf.optimize.AdamOptimizer(0.1).minimize(loss)
        return mtf.lower({"loss": loss, "h": h}, updates, "rows:2;cols:2", "batch:rows;inner:cols?")


@pytest.fixture(scope="module")
def program() -> mtf.Program:
    return training()


def described(program: mtf.Program) -> str:
    estimate = mtf.estimate(program, "v3-8" if program.mesh.size == 8 else "v5e-4")
    parts = [program, mtf.explain(program), mtf.collectives_table(program.collectives), program.memory, program.notes]
    parts += [estimate.table(None), estimate.memory, *estimate.memory.remedies, program.work]
    parts += [f"{v} {v.bytes}" for v in (*program.memory.live, *estimate.memory.live)]
    return "\n".join(map(str, parts))


def bits(sim: mtf.Simulation, made: dict[str, np.ndarray] | None = None) -> list[tuple[str, str, bytes]]:
    return [(n, str(x.dtype), x.tobytes()) for n, x in {**sim.state, **(made or {})}.items()]


# ---------------------------------------------------------------- programs


@cache
def described_apart() -> str:
    """Of another one: nothing is kept in the first that its copy could take over."""
    return described(training())


@pytest.mark.parametrize("how", some([*COPIES], ["pickle", "deepcopy"]))
def test_a_copied_program_is_the_same_program(how: str, program: mtf.Program) -> None:
    made = COPIES[how](program)
    assert described(made) == described_apart()
    assert described(COPIES[how](made)) == described_apart()  # with everything kept that was asked for
    for executor in EXECUTORS:
        sims = [mtf.simulate(p, seed=3, executor=executor) for p in (program, made)]
        for _ in range(3):
            first, second = (bits(sim, sim.step(x=X)) for sim in sims)
            assert first == second


@pytest.mark.parametrize("name", INITIALIZERS)
def test_every_initializer_survives(name: str) -> None:
    with mtf.Graph():
        w = mtf.variable("w", [IN, OUT], INITIALIZERS[name], "bfloat16")
        program = mtf.lower({"w": w})
    for made in (f(program) for f in COPIES.values()):
        assert bits(mtf.simulate(made)) == bits(mtf.simulate(program))


@pytest.mark.parametrize("how", COPIES)
def test_layers_with_a_gradient_of_their_own_survive(how: str) -> None:
    with mtf.Graph():
        x = mtf.input("x", [BATCH, IN])
        (dx,) = mtf.gradients([mtf.layers.clip_activation_gradient(x, 0.5) * 3.0], [x])
        program = mtf.lower({"dx": dx})
    np.testing.assert_allclose(mtf.simulate(COPIES[how](program)).step()["dx"], 0.5, rtol=1e-6)


def test_initializers_are_plain_data() -> None:
    made = mtf.initializers.random_normal
    assert made(0, 2) == made(0.0, 2.0) != made(0, 1)
    assert len({made(), made(), made(1.0)}) == 2
    assert "normal" in repr(made(0, 2))
    assert mtf.initializers.glorot_uniform([IN]) == mtf.initializers.glorot_uniform(IN)


@pytest.fixture(scope="module")
def chain() -> tuple[mtf.Tensor, mtf.Program]:
    with mtf.Graph():
        y = mtf.input("x", [BATCH, IN])
        for _ in range(400):  # by recursion, 1000 calls would not do
            y = mtf.relu(y) - 0.001
        return y, mtf.lower({"y": y}, mesh="rows:2", layout="batch:rows")


@pytest.mark.parametrize("how", COPIES)
def test_a_long_chain_is_copied_from_any_part_of_it(how: str, chain: tuple[mtf.Tensor, mtf.Program]) -> None:
    y, program = chain
    made = COPIES[how](program)
    assert str(made) == str(program)
    np.testing.assert_array_equal(*(mtf.simulate(p).step(x=X)["y"] for p in (made, program)))
    last = COPIES[how](y)  # goes to its operand, that to its own, ...
    assert last.graph.operations[-1].output is last
    assert list(map(str, last.graph.operations)) == list(map(str, y.graph.operations))


@pytest.mark.parametrize("how", COPIES)
def test_any_part_of_a_program_brings_its_graph(how: str) -> None:
    with mtf.Graph() as graph:
        x = mtf.input("x", [BATCH, IN])
        y = mtf.relu(x)
        program = mtf.lower({"y": y})
        parts = [
            COPIES[how](part) for part in (graph, y, y.operation, program, program.outputs["y"])
        ]  # inside the `with`
    made, tensor, op, copied, value = parts
    graphs = [made, tensor.graph, op.graph, copied.outputs["y"].tensor.graph, value.tensor.graph]
    assert len({id(g) for g in (graph, *graphs)}) == 6
    for g in graphs:
        assert list(map(str, g.operations)) == list(map(str, graph.operations))
        assert g.inputs["x"] is g.operations[0]
        assert all(o.graph is g and all(t.operation is o for t in o.outputs) for o in g.operations)


@pytest.mark.parametrize("how", COPIES)
def test_a_copied_graph_can_be_written_on(how: str) -> None:
    with mtf.Graph():
        x = mtf.input("x", [BATCH, IN])
        w = mtf.variable("w", [IN, OUT])
        kept, given = COPIES[how]((mtf.tanh(mtf.einsum([x, w], reduced_dims=[IN])), w))
    with kept.graph:
        (dw,) = mtf.gradients([mtf.reduce_sum(kept)], [given])
    with x.graph:
        y = mtf.tanh(mtf.einsum([x, w], reduced_dims=[IN]))
        (expected,) = mtf.gradients([mtf.reduce_sum(y)], [w])
    made, wanted = (mtf.simulate(mtf.lower({"dw": g})).step(x=X)["dw"] for g in (dw, expected))
    np.testing.assert_array_equal(made, wanted)


def test_what_a_shallow_copy_is(program: mtf.Program) -> None:
    tensor = program.outputs["loss"].tensor
    assert copy.copy(tensor.operation) is tensor.operation
    assert str(copy.copy(program)) == str(program)
    with pytest.raises(mtf.GraphError, match=r"copy\.deepcopy"):
        copy.copy(tensor.graph)


# ---------------------------------------------------------------- simulations


GOING_ON = [(how, executor) for how in (*COPIES, "copy") for executor in EXECUTORS]


@pytest.mark.parametrize(
    ("how", "executor"), some(GOING_ON, [row for n, row in enumerate(GOING_ON) if n % 4 in (0, 3)])
)
def test_a_copied_simulation_goes_on_by_itself(how: str, executor: str, program: mtf.Program) -> None:
    sim, alone = (mtf.simulate(program, seed=3, executor=executor) for _ in range(2))
    for s in (sim, alone):
        s.step(x=X)
        s.step(x=X)
    made = copy.copy(sim) if how == "copy" else COPIES[how](sim)
    before = bits(made)
    assert before == bits(alone)
    assert (made.seed, made.executor, made.slice, made.check_nan) == (3, executor, None, True)
    for _ in range(3):
        sim.step(x=-X)  # writes over every buffer, and must not reach the copy
    assert bits(made) == before
    for _ in range(3):
        first, second = (bits(s, s.step(x=X)) for s in (made, alone))
        assert first == second


def test_copies_carry_no_buffers() -> None:
    with mtf.Graph():
        x = mtf.input("x", [mtf.Dimension("batch", 4096), IN])
        w = mtf.variable("w", [IN, OUT])
        loss = mtf.reduce_sum(mtf.tanh(mtf.einsum([x, w], reduced_dims=[IN])))
        program = mtf.lower({"loss": loss}, mtf.optimize.SgdOptimizer(0.1).minimize(loss))
    sim = mtf.simulate(program)
    fresh = len(pickle.dumps(sim))
    sim.step(x=np.ones((4096, 4), np.float32))
    assert any(isinstance(e, FastExecutor) for e in sim._ready.values())
    assert len(pickle.dumps(sim)) < fresh + 1000
    for made in (copy.copy(sim), copy.deepcopy(sim), pickle.loads(pickle.dumps(sim))):
        assert not made._ready
        assert all(a.base is None for a in made.state.arrays.values() if isinstance(a, np.ndarray))


def test_a_state_can_be_copied(program: mtf.Program) -> None:
    sim = mtf.simulate(program)
    for made in (copy.copy(sim.state), *(f(sim.state) for f in COPIES.values())):
        made["v1"] = np.zeros((4, 4), np.float32)
        assert sim.state["v1"].tolist() == np.full((4, 4), 0.5).tolist()


# ---------------------------------------------------------------- threads


def together(*jobs: Callable[[], object]) -> None:
    """Run all of them at once, in a thread each; the first fault is raised here."""
    faults: list[BaseException] = []
    barrier = threading.Barrier(len(jobs))

    def run(job: Callable[[], object]) -> None:
        try:
            barrier.wait()
            job()
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for fault in faults:
        raise fault


def repeated(times: int, job: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            job()

    return run


@pytest.mark.parametrize("executor", EXECUTORS)
def test_steps_of_one_simulation_in_many_threads_run_one_after_another(executor: str, program: mtf.Program) -> None:
    sim, alone = (mtf.simulate(program, seed=3, executor=executor) for _ in range(2))
    together(*[repeated(3, lambda: sim.step(x=X))] * 3)
    repeated(9, lambda: alone.step(x=X))()
    assert bits(sim) == bits(alone)


def test_state_read_saved_and_copied_beside_steps_is_that_of_one_step(tmp_path: Any) -> None:
    size = mtf.Dimension("size", 200_000)
    with mtf.Graph():
        w, v = (mtf.variable(n, [size], 0.0) for n in "wv")
        program = mtf.lower(updates=[mtf.assign(w, w + 1.0), mtf.assign(v, v + 1.0)])
    sim = mtf.simulate(program)

    def whole(s: mtf.Simulation) -> None:
        found = {float(n) for name in ("w", "v", "step") for n in np.unique(s.state[name])}
        assert len(found) == 1

    def read() -> None:
        assert len(np.unique(sim.state["w"])) == 1

    def save() -> None:
        other = mtf.simulate(program)
        mtf.save(sim, tmp_path / "w")
        mtf.load(tmp_path / "w", other)
        whole(other)

    together(repeated(60, sim.step), repeated(60, read), repeated(5, save), repeated(10, lambda: whole(copy.copy(sim))))


def test_two_simulations_of_one_program_run_beside_each_other(program: mtf.Program) -> None:
    sims = [mtf.simulate(program, seed=n) for n in range(3)]
    together(*(repeated(5, partial(sim.step, x=X)) for sim in sims))
    for n, sim in enumerate(sims):
        alone = mtf.simulate(program, seed=n)
        repeated(5, partial(alone.step, x=X))()
        assert bits(sim) == bits(alone)


def test_a_step_within_a_step_is_refused_and_does_not_hang() -> None:
    sims: list[mtf.Simulation] = []

    def steps(key: object, shape: mtf.Shape, dtype: object) -> np.ndarray:
        sims[0].step(x=X)
        return np.zeros(shape.sizes)

    with mtf.Graph():
        x, w = mtf.input("x", [BATCH, IN]), mtf.variable("w", [IN], 1.0)
        program = mtf.lower({"y": x * w}, [mtf.assign(w, w * 2.0)])
        v = mtf.variable("v", [IN], steps)
        second = mtf.lower({"y": x * v})
    sims.append(mtf.simulate(program))
    before = bits(sims[0])
    with pytest.raises(mtf.MeshlibError, match=r"within a step of the same simulation"):
        sims[0].run(second, x=X)
    assert bits(sims[0]) == before
    sims[0].step(x=X)
    assert sims[0].state["w"].tolist() == [2.0] * 4


# ---------------------------------------------------------------- the order of what is printed


def report() -> str:
    """Everything that is printed about programs with many ties: equal sizes, equal bytes, several faults."""
    parts = [described(training())]
    for mesh, layout in (("rows:2;cols:2", "batch:rows;inner:cols?"), ("a:2;b:2;c:2", "batch:a+b;outer:c?;nobody:c")):
        with mtf.Graph():
            x = mtf.input("x", [BATCH, IN])
            w = [mtf.variable(f"w{n}", [IN, OUT]) for n in range(5)]
            ys = [mtf.einsum([x, v], reduced_dims={IN}) for v in w]
            both = mtf.einsum([x, x], output_shape={IN, BATCH}, name="both")
            loss = mtf.reduce_sum(mtf.add_n(ys)) + mtf.reduce_sum(both)
            updates = mtf.optimize.AdamOptimizer(0.1).minimize(loss)
            outputs = {f"y{n}": y for n, y in enumerate(ys)}
            parts.append(str(mtf.check(outputs, updates, mesh, layout)))
            parts.append(described(mtf.lower(outputs, updates, mesh, layout.removesuffix(";nobody:c"))))
    parts.append(mtf.verify({"loss": loss}, (), layouts=3, mesh="a:2;b:2").table())
    return "\n".join(parts)


def test_nothing_that_is_printed_depends_on_hashes_or_addresses() -> None:
    # Sets of names are in the order of their hashes, sets of objects in that of their addresses, which what ran here
    # before has moved.
    script = "from tests.lowering.test_copies import report; import sys; sys.stdout.write(report())"
    environment = {**os.environ, "PYTHONHASHSEED": "2", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    elsewhere = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert len(elsewhere) > 10_000
    assert elsewhere == report()
