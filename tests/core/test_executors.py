"""Searches, verifications and sweeps on executors: the same results as in this process, and clear ends."""

from __future__ import annotations

import operator
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

import meshlib as mtf
from hardware.slices import Slice
from meshlib.core.errors import GraphError
from meshlib.core.executors import Tasks


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed", reason="needs Dask: pip install -e '.[test]'")
    own = f":{20_000 + os.getpid() % 20_000}"  # Dask leaves a socket open where another process has its usual port
    with (
        distributed.LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=own) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.fixture(scope="module", params=["processes", "dask"])
def pool(request: pytest.FixtureRequest) -> Iterator[Executor]:
    if request.param == "processes":
        with ProcessPoolExecutor(2, get_context("spawn")) as processes:
            yield processes
        return
    yield request.getfixturevalue("client").get_executor()


def build(batch: int = 64) -> Any:
    b, k, h = mtf.Dimension("batch", batch), mtf.Dimension("k", 32), mtf.Dimension("hidden", 128)
    y = mtf.relu(mtf.einsum([mtf.input("x", [b, k]), mtf.variable("w", [k, h])], reduced_dims=[k]))
    loss = mtf.reduce_mean(mtf.square(y))
    return {"loss": loss}, mtf.optimize.SgdOptimizer(0.1).minimize(loss)


def on_slice(slice: Slice) -> mtf.Program:
    with mtf.Graph():
        outputs, updates = build(8 * slice.devices)
        return mtf.lower(outputs, updates, mesh=f"data:{slice.devices}", layout="batch:data")


def test_a_search_gives_the_same(pool: Executor) -> None:
    here = mtf.search(build, "v5e-8", seconds=None, workers=1, axes=1)
    there = mtf.search(build, "v5e-8", seconds=None, workers=pool, axes=1)
    assert [(str(o.candidate), o.state, o.value) for o in here.ranking] == [
        (str(o.candidate), o.state, o.value) for o in there.ranking
    ]
    assert (here.gap, len(here.ranking)) == (there.gap, len(there.ranking))


def test_a_verification_gives_the_same(pool: Executor) -> None:
    with mtf.Graph():
        outputs, updates = build(8)
        layouts = [("p:2;q:2", rules) for rules in ("", "batch:p", "batch:p;hidden:q", "k:p;hidden:q")]
        here = mtf.verify(outputs, updates, layouts=layouts)
        there = mtf.verify(outputs, updates, layouts=layouts, workers=pool)
    assert here.rows == there.rows
    assert len(there.rows) == len(layouts)
    assert there.ok


def test_a_sweep_gives_the_same(pool: Executor) -> None:
    slices = ["v5e-4", "v5e-8", "v5e-16"]
    here, there = (mtf.scaling(on_slice, slices, workers=w) for w in (None, pool))
    assert [e.step_seconds for e in here.estimates] == [e.step_seconds for e in there.estimates]
    assert [e.memory.peak_bytes for e in here.estimates] == [e.memory.peak_bytes for e in there.estimates]


def ends(payload: Any, n: int) -> None:
    os._exit(3)


def fails(payload: Any, n: int) -> int:
    if n > 1:
        raise GraphError(f"task {n} of {payload}")
    return n


def test_faults_of_tasks_and_of_workers() -> None:
    with ThreadPoolExecutor(2) as threads:
        tasks = Tasks("search", threads, "job")
        with pytest.raises(GraphError, match="task 2 of job"):
            tasks.answers(fails, [0, 3, 2][::-1])
    with pytest.raises(GraphError, match="search: the executor is shut down"):
        tasks.answers(fails, [0])
    with (
        ProcessPoolExecutor(1, get_context("spawn")) as processes,
        pytest.raises(GraphError, match="gave up: BrokenProcessPool"),
    ):
        Tasks("search", processes, 0).answers(ends, [0])


def test_tasks_that_somebody_else_cancels() -> None:
    with ThreadPoolExecutor(1) as threads:
        threads.submit(time.sleep, 0.2)
        threading.Timer(0.1, lambda: threads.shutdown(wait=False, cancel_futures=True)).start()
        with pytest.raises(GraphError, match="verify: the executor gave up: CancelledError: a task was cancelled"):
            Tasks("verify", threads, "job").answers(fails, [0, 1])


_running, _released = threading.Event(), threading.Event()


def _held(payload: Any, n: int) -> int:
    _running.set()
    assert _released.wait(60)
    return n


def test_tasks_that_somebody_cancels_while_they_run(client: Any) -> None:
    """Dask gives up tasks at once, also those that a worker computes: whoever waits for them gets one error."""
    import distributed

    executing: list[str] = []

    def cancel() -> None:
        _running.wait(60)
        (worker,) = client.cluster.workers.values()
        executing.extend(task.key for task in worker.state.executing)
        client.cancel([distributed.Future(key, client) for key in executing])

    threading.Thread(target=cancel).start()
    try:
        with pytest.raises(GraphError, match="search: the executor gave up: CancelledError: a task was cancelled"):
            Tasks("search", client.get_executor(), "job").answers(_held, [0, 1])
        assert executing, "none had begun"
        assert not _released.is_set()
    finally:
        _released.set()
    assert Tasks("search", client.get_executor(), "job").answers(_held, [2]) == {2: 2}


def test_payloads_are_sent_once_to_a_process() -> None:
    sent = []

    class Counting(ThreadPoolExecutor):
        def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            sent.append(args[1] is not None)
            return super().submit(function, *args, **kwargs)

    with Counting(1) as threads:
        assert Tasks("sum", threads, ("once", 1)).answers(_second, range(5)) == dict.fromkeys(range(5), 1)
        again = Tasks("sum", threads, ("once", 1)).answers(_second, [7])
    assert again == {7: 1}
    assert 1 <= sum(sent) <= 5
    assert not sent[-1]


def _second(payload: tuple[str, int], n: int) -> int:
    return operator.getitem(payload, 1)


@pytest.mark.parametrize("workers", [0, "four", 2.5], ids=str)
def test_what_are_no_workers(workers: Any) -> None:
    with pytest.raises(mtf.GraphError, match="workers must be"):
        mtf.search(build, "v5e-8", workers=workers)
    with mtf.Graph(), pytest.raises(mtf.GraphError, match=r"workers must be a concurrent\.futures\.Executor"):
        mtf.verify(*build(8), layouts=[("p:2", "batch:p")], workers=workers)


def test_functions_that_cannot_be_sent() -> None:
    with (
        ThreadPoolExecutor(1) as threads,
        pytest.raises(mtf.GraphError, match="scaling: what the workers need can't be sent"),
    ):
        mtf.scaling(lambda slice: on_slice(slice), ["v5e-4"], workers=threads)
