"""What lives as long as it is used: no cache holds a graph, and the collector runs as often as it must."""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from tests.effort import deep
from tests.paths import ROOT

D = mtf.Dimension
BATCH, INNER, HIDDEN = D("batch", 8), D("inner", 16), D("hidden", 32)
MESH, LAYOUT = "rows:2;cols:2", "batch:rows;hidden:cols"
FEEDS = {"x": np.ones((8, 16), np.float32)}


def build(tag: float = 0.0) -> tuple[dict[str, mtf.Tensor], list[mtf.Operation]]:
    """A training step with what is recomputed and shared: a mask, a scan, a tied table; `tag` makes it new."""
    x, w = mtf.input("x", [BATCH, INNER]), mtf.variable("w", [INNER, HIDDEN])
    mask = mtf.cast(mtf.less(mtf.range(HIDDEN), 20), "float32") + tag
    h = mtf.relu(mtf.einsum([x, w], [BATCH, HIDDEN])) * mask

    def trip(carries: Any, slices: Any) -> Any:
        return [mtf.tanh(carries[0]) * mask], []

    (h,), _ = mtf.scan(trip, [h], dim=D("layers", 3))
    loss = mtf.reduce_mean(mtf.square(mtf.einsum([h, w], [BATCH, INNER]) - x), name="loss")
    return {"loss": loss}, mtf.optimize.AdamOptimizer(0.1).minimize(loss)


def lowered(tag: float = 0.0) -> mtf.Program:
    with mtf.Graph():
        return mtf.lower(*build(tag), mesh=MESH, layout=LAYOUT)


def of_jax() -> mtf.Graph:
    import jax.numpy as jnp

    return mtf.from_jax(lambda w, x: jnp.tanh(x @ w).sum(), np.ones((4, 4), "float32"), np.ones((2, 4), "float32"))


def laid_out_several_times() -> object:
    with mtf.Graph():
        session = mtf.Session(*build())
    return session.lower(MESH, LAYOUT), session.lower("rows:4", "batch:rows"), session


def trained() -> object:
    data = mtf.data.arrays({"x": np.ones((16, 16), np.float32)}).batch(8).repeat()
    return mtf.train(lowered(), data, 3, progress=False)


USES: dict[str, Callable[[], object]] = {
    "lower": lowered,
    "a session of several layouts": laid_out_several_times,
    "simulate": lambda: mtf.simulate(lowered()).step(FEEDS),
    "exact": lambda: mtf.simulate(lowered(), executor="exact").step(FEEDS),
    "estimate": lambda: str(mtf.estimate(lowered(), "v5e-4")),
    "search": lambda: str(mtf.search(build, "v5e-4", seconds=None, workers=1, axes=1)),
    "verify": lambda: _verified(),
    "explain and compare": lambda: (mtf.explain(lowered()), str(mtf.compare(lowered(), lowered(1.0)))),
    "gradients twice": lambda: _second_derivatives(),
    "train": trained,
    "a model": lambda: _decoded(),
    "a fault": lambda: _failed(),
    "on_jax": lambda: mtf.on_jax(_on_one_device()).step(FEEDS),
    "from_jax": of_jax,
}
NEED_JAX = ("on_jax", "from_jax")


def _on_one_device() -> mtf.Program:
    with mtf.Graph():
        return mtf.lower(*build())


def _verified() -> object:
    with mtf.Graph():
        return mtf.verify(*build(), layouts=[(MESH, LAYOUT)])


def _second_derivatives() -> object:
    with mtf.Graph():
        w = mtf.variable("w", [HIDDEN])
        (once,) = mtf.gradients([mtf.reduce_sum(mtf.sin(w))], [w])
        return mtf.lower(mtf.gradients([mtf.reduce_sum(once)], [w]))


def _decoded() -> object:
    config = mtf.models.preset("gpt2").reduced()
    with mtf.Graph():
        return mtf.lower(*mtf.models.decode_step(config, 2, 8), mesh="data:2", layout="batch:data")


def _failed() -> None:
    with pytest.raises(mtf.FeedError):
        mtf.simulate(lowered()).step(x=np.ones(3))


@contextmanager
def noted_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[mtf.Graph]]]:
    """Weak references to all graphs that are made inside."""
    made: list[weakref.ref[mtf.Graph]] = []

    def noted_by(initialize: Any) -> Any:
        def noted(graph: mtf.Graph, *args: Any, **kwargs: Any) -> None:
            made.append(weakref.ref(graph))
            initialize(graph, *args, **kwargs)

        return noted

    with monkeypatch.context() as patch:
        for kind in (mtf.Graph, *mtf.Graph.__subclasses__()):
            if "__init__" in vars(kind):
                patch.setattr(kind, "__init__", noted_by(kind.__init__))
        yield made


@pytest.mark.parametrize("use", USES)
def test_no_graph_outlives_its_program(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if use in NEED_JAX and importlib.util.find_spec("jax") is None:
        pytest.skip("needs JAX")
    if use in NEED_JAX:
        getattr(mtf, use)  # imported functions are graphs of a class of their own, defined on first use
    gc.freeze()  # what other tests left is not looked at
    with noted_graphs(monkeypatch) as made:
        result = USES[use]()
        assert made
        del result
    gc.collect()
    alive = [graph for ref in made if (graph := ref()) is not None]
    holders = [type(h).__name__ for graph in alive for h in gc.get_referrers(graph) if h is not alive]
    assert not alive, f"{len(alive)} of {len(made)} graphs are held by {holders[:8]}"


def test_a_process_of_a_users_neither_grows_nor_collects_out_of_turn() -> None:
    """1,000 lowerings, 200 searches and 6,000 steps of one process grow by less than 5 MB each."""
    counts = (1000, 200, 6000) if deep() else (30, 2, 200)
    limits = (5.0, 5.0, 5.0) if deep() else (1.6, 2.5, 0.5)  # a graph that stays would be 0.07 MB a lowering
    command = [sys.executable, "-m", "tests.core.collector", *map(str, counts)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    growth = [float(word) for word in ended.stdout.split()]
    assert all(grown < most for grown, most in zip(growth, limits, strict=True)), growth
