"""Mistakes in calls of layers, models, optimizers, searches, imports, data and training: a line with names and numbers.

As `test_bad_input`, whose rows are mistakes in single operations, graphs, layouts and steps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import meshlib as mtf
from meshlib import optimize
from tests.effort import each
from tests.mistakes import Mistake, assert_explained

D = mtf.Dimension
BATCH, INNER, ROWS = D("batch", 8), D("inner", 4), D("rows", 6)
LINE = r"test_bad_calls\.py:\d+"


def in_graph(build: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with mtf.Graph():
            return build()

    return run


def loss_program(lr: object = 0.1) -> mtf.Program:
    """A step that trains one variable."""
    with mtf.Graph():
        x, w = mtf.input("x", [BATCH]), mtf.variable("w", [], 1.0)
        loss = mtf.reduce_mean(mtf.square(x - w), name="loss")
        return mtf.lower({"loss": loss}, optimize.SgdOptimizer(lr).minimize(loss))


def matmul() -> tuple[dict[str, mtf.Tensor], list[mtf.Operation]]:
    x, w = mtf.input("x", [BATCH, INNER]), mtf.variable("w", [INNER, ROWS])
    loss = mtf.reduce_mean(mtf.einsum([x, w]))
    return {"loss": loss}, optimize.SgdOptimizer(0.1).minimize(loss)


def with_nan(make: Callable[[mtf.Tensor], object]) -> Callable[[], object]:
    """A NaN that arises in the program, where `make` alone sees it."""

    def run() -> object:
        with mtf.Graph():
            made = make(mtf.log(mtf.input("x", [INNER])))
        outputs = {f"y{n}": y for n, y in enumerate(made if isinstance(made, tuple) else (made,))}
        return mtf.simulate(mtf.lower(outputs)).step(x=np.array([-1.0, 1, 2, 3]))

    return run


def searched(**options: object) -> object:
    return mtf.search(matmul, "v5e-8", seconds=None, workers=1, **options)


MISTAKES: dict[str, Mistake] = {
    # optimizers and schedules
    "SGD that climbs": (
        lambda: optimize.SgdOptimizer(-0.1),
        mtf.GraphError,
        ["SgdOptimizer", LINE, "the learning rate must not be negative, got -0.1"],
    ),
    "Adam that climbs": (
        lambda: optimize.AdamOptimizer(lr=-1),
        mtf.GraphError,
        ["AdamOptimizer", "not be negative, got -1"],
    ),
    "Lion that climbs": (
        lambda: optimize.LionOptimizer(-1e-4),
        mtf.GraphError,
        ["LionOptimizer", "not be negative, got -0.0001"],
    ),
    "Adafactor that climbs": (
        lambda: optimize.AdafactorOptimizer(learning_rate=-0.5),
        mtf.GraphError,
        ["AdafactorOptimizer", "negative, got -0.5"],
    ),
    "a model's step that climbs": (
        in_graph(lambda: mtf.models.train_step(mtf.models.preset("gpt2").reduced(), 2, 8, learning_rate=-1e-3)),
        mtf.GraphError,
        ["not be negative, got -0.001"],
    ),
    "schedule that turns negative": (
        in_graph(lambda: optimize.SgdOptimizer(lambda t: -0.5).minimize(mtf.reduce_sum(mtf.variable("w", [ROWS])))),
        mtf.GraphError,
        ["the schedule's result must not be negative, got -0.5"],
    ),
    "warm-up to below zero": (
        lambda: optimize.linear_warmup(-1.0, 10),
        mtf.GraphError,
        ["linear_warmup", "peak must not be negative, got -1"],
    ),
    "cosine from below zero": (
        lambda: optimize.cosine_decay(-1.0, 10),
        mtf.GraphError,
        ["cosine_decay", "lr must not be negative, got -1"],
    ),
    "cosine to below zero": (
        lambda: optimize.cosine_decay(1.0, 10, -0.1),
        mtf.GraphError,
        ["alpha must not be negative, got -0.1"],
    ),
    "a piece below zero": (
        lambda: optimize.piecewise([2], [0.1, -0.1]),
        mtf.GraphError,
        ["piecewise", "each of values.*not be negative, got -0.1"],
    ),
    "a decay that grows": (
        lambda: optimize.warmup_then_decay(0.1, 10, -0.5),
        mtf.GraphError,
        ["decay must not be negative, got -0.5"],
    ),
    "weight decay below zero": (
        lambda: optimize.AdamWOptimizer(0.1, weight_decay=-0.01),
        mtf.GraphError,
        ["weight_decay must not be negative, got -0.01"],
    ),
    "momentum of one": (
        lambda: optimize.MomentumOptimizer(0.1, 1.0),
        mtf.GraphError,
        [r"momentum must be in \[0, 1\), got 1"],
    ),
    "averages before the first step": (
        in_graph(
            lambda: optimize.moving_averages(
                optimize.SgdOptimizer(0.1).minimize(mtf.reduce_sum(mtf.variable("w", [ROWS]))), 0.9, -1
            )
        ),
        mtf.GraphError,
        ["moving_averages", "start_step must be at least 0, got -1"],
    ),
    "no dim is that small": (
        lambda: optimize.AdafactorOptimizer(min_dim_size_to_factor=0),
        mtf.GraphError,
        ["min_dim_size_to_factor must be at least 1, got 0"],
    ),
    # NaN
    "NaN quantised": (with_nan(lambda x: mtf.quantize(x, INNER)), mtf.NotFiniteError, ["'y1' became NaN", "log", LINE]),
    "NaN quantised and widened": (
        with_nan(lambda x: (lambda q, s: mtf.cast(q, "float32") * s)(*mtf.quantize(x, INNER))),
        mtf.NotFiniteError,
        ["became NaN", "log"],
    ),
    "NaN quantised to fp8": (
        with_nan(lambda x: mtf.quantize(x, INNER, "float8_e4m3fn")[1]),
        mtf.NotFiniteError,
        ["became NaN", "log"],
    ),
    "NaN among the largest": (
        with_nan(lambda x: mtf.top_k(x, INNER, D("k", 2))),
        mtf.NotFiniteError,
        ["'y0' became NaN", "log"],
    ),
    "NaN among the smallest": (
        with_nan(lambda x: mtf.nth_smallest_element(x, 0, INNER)),
        mtf.NotFiniteError,
        ["became NaN", "log"],
    ),
    # searching
    "a misspelt axis of a known layout": (
        lambda: searched(also=[("data:8", "batch:dat")]),
        mtf.LayoutError,
        ["search: also has layout batch:dat", "no axis 'dat' in mesh data:8; did you mean 'data'"],
    ),
    "a misspelt axis beside a right one": (
        lambda: searched(also=[("data:4;model:2", "batch:data;rows:modle")]),
        mtf.LayoutError,
        ["rows:modle", "'modle'.*did you mean 'model'"],
    ),
    "a misspelt axis that may be left out": (
        lambda: searched(also=[("data:8", "batch:data;rows:dta?")]),
        mtf.LayoutError,
        ["'dta'.*did you mean 'data'"],
    ),
    "a misspelt dim of a known layout": (
        lambda: searched(also=[("data:8", "bacth:data")]),
        mtf.GraphError,
        ["'bacth'.*did you mean 'batch'"],
    ),
    # training
    "a folder without a name": (
        lambda: mtf.train(loss_program(), [{"x": np.ones(8, np.float32)}], 1, folder=""),
        mtf.CheckpointError,
        ["train: folder must be the path of one, got ''", "working directory is '.'"],
    ),
}


@each("mistake", list(MISTAKES))
def test_a_mistake_is_explained(mistake: str) -> None:
    assert_explained(MISTAKES[mistake], mistake)
