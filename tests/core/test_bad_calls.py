"""Mistakes in calls of layers, models, optimizers, searches, imports, data and training: a line with names and numbers.

As `test_bad_input`, whose rows are mistakes in single operations, graphs, layouts and steps.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from inspect import Parameter, getattr_static, isabstract, isclass, isfunction, signature

import numpy as np
import pytest

import meshlib as mtf
from meshlib import optimize
from meshlib.core import explained_calls
from meshlib.core.errors import ArgumentError
from meshlib.core.source_lines import OWN
from tests.command.mistakes import Mistake, assert_explained, in_graph
from tests.core.public import public_names
from tests.effort import each

D = mtf.Dimension
BATCH, INNER, ROWS = D("batch", 8), D("inner", 4), D("rows", 6)
LINE = r"test_bad_calls\.py:\d+"


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


HEIGHT, WIDTH, CHANNELS = D("height", 8), D("width", 8), D("c", 3)
TINY = mtf.models.preset("gpt2").reduced()
ARRAYS = {"x": np.ones(16, np.float32)}
R = mtf.layers.Routing


def image() -> mtf.Tensor:
    return mtf.input("image", [BATCH, HEIGHT, WIDTH, CHANNELS])


def taps(c: int = 3, size: int = 3) -> mtf.Tensor:
    return mtf.input("taps", [D("fh", size), D("fw", size), D("c", c), D("out", 4)])


def tokens() -> mtf.Tensor:
    return mtf.input("x", [BATCH, D("length", 6), D("d", 4)])


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
        ["search: layout batch:dat in also=", "no axis 'dat' in mesh data:8; did you mean 'data'"],
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
    # conv, moe, pipelines, decoding, searches, imports, data, training
    "filters of other channels": (
        in_graph(lambda: mtf.conv2d(image(), taps(5))),
        mtf.ShapeError,
        ["conv2d", "c:3", "c:5"],
    ),
    "a stride of zero": (in_graph(lambda: mtf.conv2d(image(), taps(), stride=0)), mtf.ShapeError, ["stride", "0"]),
    "a padding that is none": (
        in_graph(lambda: mtf.conv2d(image(), taps(), padding="SAYM")),
        mtf.GraphError,
        ["padding", "SAYM"],
    ),
    "groups that do not divide": (
        in_graph(lambda: mtf.conv2d(image(), taps(), groups=2)),
        mtf.ShapeError,
        ["groups", "2"],
    ),
    "a dilation below one": (
        in_graph(lambda: mtf.conv2d(image(), taps(), dilation=-1)),
        mtf.ShapeError,
        ["dilation", r"\-1"],
    ),
    "a window larger than the picture": (
        in_graph(lambda: mtf.max_pool(image(), {"height": 9})),
        mtf.ShapeError,
        ["9", "height"],
    ),
    "a window over no dim": (
        in_graph(lambda: mtf.max_pool(image(), {"hieght": 2})),
        mtf.GraphError,
        ["hieght", "height"],
    ),
    "more choices than experts": (
        in_graph(lambda: mtf.layers.moe(tokens(), D("e", 2), D("f", 4), R(top_k=3))),
        mtf.GraphError,
        ["3 experts", "only 2"],
    ),
    "no experts chosen": (lambda: R(top_k=0), mtf.GraphError, ["top_k must be at least 1, got 0"]),
    "no capacity": (lambda: R(capacity_factor=0), mtf.GraphError, ["capacity_factor must be positive, got 0"]),
    "a jitter of one": (lambda: R(jitter=1.0), mtf.GraphError, ["jitter", "1"]),
    "a gating that is none": (lambda: R(gating="topk"), mtf.GraphError, ["gating", "topk"]),
    "three levels of experts": (
        in_graph(lambda: mtf.layers.moe(tokens(), [D("a", 2), D("b", 2), D("e", 2)], D("f", 4))),
        mtf.GraphError,
        ["got 3"],
    ),
    "groups of tokens that do not divide": (
        in_graph(lambda: mtf.layers.moe(tokens(), D("e", 4), D("f", 4), R(group_size=5))),
        mtf.ShapeError,
        ["48 % 5 = 3"],
    ),
    "no stages": (
        lambda: mtf.models.Pipeline(stages=0, microbatches=2),
        mtf.GraphError,
        ["stages must be at least 1, got 0"],
    ),
    "a batch that microbatches do not divide": (
        in_graph(lambda: mtf.models.train_step(TINY, 6, 8, pipeline=mtf.models.Pipeline(stages=2, microbatches=4))),
        mtf.GraphError,
        ["6 % 4 = 2"],
    ),
    "a policy that is none": (
        lambda: mtf.models.Pipeline(stages=2, microbatches=2, remat="some"),
        mtf.GraphError,
        ["some"],
    ),
    "a prompt longer than the cache": (in_graph(lambda: mtf.models.prefill(TINY, 1, 9, 8)), mtf.GraphError, ["9", "8"]),
    "a cache of a type that is none": (
        in_graph(lambda: mtf.models.decode_step(TINY, 1, 8, cache_dtype="int3")),
        mtf.GraphError,
        ["cache_dtype", "int3"],
    ),
    "groups without experts": (
        in_graph(lambda: mtf.models.decode_step(TINY, 2, 8, group_size=2)),
        mtf.GraphError,
        ["group_size", "has none"],
    ),
    "no beams": (
        in_graph(lambda: mtf.models.decode_step(TINY, 2, 8, beams=0)),
        mtf.GraphError,
        ["beams must be at least 1, got 0"],
    ),
    "tokens beyond the vocabulary": (lambda: mtf.generate(TINY, [[999]], {}), mtf.GraphError, ["999"]),
    "an option of generate that is none": (
        lambda: mtf.generate(TINY, [[1]], {}, temprature=1.0),
        mtf.GraphError,
        ["temprature", "temperature"],
    ),
    "fewer axes than none": (lambda: searched(axes=-1), mtf.GraphError, [r"axes must not be negative, got \-1"]),
    "no seconds": (
        lambda: mtf.search(matmul, "v5e-8", seconds=0),
        mtf.GraphError,
        ["seconds must be more than 0", "0"],
    ),
    "an objective that is none": (
        lambda: searched(objective="step_second"),
        mtf.GraphError,
        ["step_second", "step_seconds"],
    ),
    "a graph before a dim": (
        in_graph(lambda: mtf.range(mtf.Graph(), mtf.Dimension("d", 4), "int32")),
        ArgumentError,
        [r"operations know no mesh.*leave it out: range\("],
    ),
    "a number of experts": (
        in_graph(lambda: mtf.layers.moe(mtf.input("x", "batch:8;d:4"), 16, mtf.Dimension("hidden", 8))),
        mtf.ShapeError,
        [r'write mtf.Dimension\("name", 16\)'],
    ),
    "a fixed dim that is none": (lambda: searched(fix="bacth:data"), mtf.GraphError, ["bacth", "batch"]),
    "a mesh of another size": (
        lambda: searched(also=[("data:4", "batch:data")]),
        mtf.GraphError,
        ["4 devices", "has 8"],
    ),
    "a choice that build has not": (lambda: searched(choices={"remat": ["full"]}), mtf.GraphError, ["remat"]),
    "no function": (lambda: mtf.from_jax(3), mtf.GraphError, ["from_jax", "3"]),
    "an argument that is none": (
        lambda: mtf.from_jax(lambda w: w.sum(), np.ones(3, np.float32), argnums=2),
        mtf.GraphError,
        ["argnums 2", "1 arguments"],
    ),
    "no trips": (
        lambda: mtf.from_jax(lambda w: w.sum(), np.ones(3, np.float32), most_trips=0),
        mtf.GraphError,
        ["most_trips must be at least 1, got 0"],
    ),
    "a batch of none": (lambda: mtf.data.arrays(ARRAYS).batch(0), mtf.FeedError, ["0"]),
    "a buffer of none": (lambda: mtf.data.arrays(ARRAYS).shuffle(0, buffer=0), mtf.FeedError, ["buffer", "0"]),
    "workers of no kind": (lambda: mtf.data.arrays(ARRAYS).parallel(2, "fibres"), mtf.FeedError, ["fibres", "threads"]),
    "fewer workers than none": (lambda: mtf.data.arrays(ARRAYS).parallel(-1), mtf.FeedError, [r"\-1"]),
    "arrays of other lengths": (
        lambda: mtf.data.arrays({"x": np.ones(3), "y": np.ones(4)}),
        mtf.FeedError,
        ["x 3", "y 4"],
    ),
    "no steps": (lambda: mtf.train(loss_program(), [], 0), mtf.GraphError, ["steps", "at least 1, got 0"]),
    "a side that is neither": (
        lambda: mtf.train(loss_program(), [], 1, better="less"),
        mtf.GraphError,
        ["better", "less"],
    ),
    "patience without evaluation": (
        lambda: mtf.train(loss_program(), [], 1, patience=2),
        mtf.GraphError,
        ["patience", "evaluation"],
    ),
    "saving nowhere": (
        lambda: mtf.train(loss_program(), [], 1, save_every=2),
        mtf.GraphError,
        ["save_every", "folder"],
    ),
    "keeping none": (lambda: mtf.train(loss_program(), [], 1, keep=0), mtf.GraphError, ["keep", "0"]),
    "no data": (lambda: mtf.train(loss_program(), [], 3), mtf.FeedError, ["train", "data yielded no batch"]),
    "a misspelt way out of damage": (
        lambda: mtf.train(loss_program(), [], 3, on_damage="ignore"),
        mtf.GraphError,
        ["on_damage must be 'error' or 'previous', got 'ignore'"],
    ),
    "objects as examples": (
        lambda: mtf.data.arrays({"x": np.array([{}, {}])}),
        mtf.FeedError,
        ["'x' has Python objects as elements"],
    ),
    "an array for a tensor": (
        in_graph(lambda: mtf.conv2d(np.ones((8, 8, 8, 3)), taps())),
        mtf.ShapeError,
        [r"conv2d .*expected a tensor, got ndarray float64\[8, 8, 8, 3\]; make it a tensor"],
    ),
    "objects for a JAX function": (
        lambda: mtf.from_jax(lambda x: x, np.array([object()])),
        mtf.GraphError,
        ["from_jax", LINE, r"an array of object \[1\]; give numbers or flags"],
    ),
    # names that no argument has
    "a schedule of a pipeline": (
        lambda: mtf.models.Pipeline(stages=2, microbatches=2, order="1f1b"),
        ArgumentError,
        [f"Pipeline .{LINE}.: no argument 'order'", "it has stages"],
    ),
    "a misspelt capacity": (
        lambda: R(capcity_factor=2.0),
        ArgumentError,
        [f"Routing .{LINE}", "'capcity_factor'; did you mean 'capacity_factor'"],
    ),
    "a beta of another library": (
        lambda: optimize.AdamOptimizer(0.1, beta1=0.9),
        ArgumentError,
        [f"AdamOptimizer .{LINE}", "'beta1'; did you mean 'beta_1'"],
    ),
    "a misspelt interval of evaluation": (
        lambda: mtf.Evaluation(program=loss_program(), data=[], evry=2),
        ArgumentError,
        ["'evry'; did you mean 'every'"],
    ),
    "a misspelt interval of saving": (
        lambda: mtf.train(loss_program(), [], 1, folder="run", save_evry=2),
        ArgumentError,
        [f"train .{LINE}", "'save_evry'; did you mean 'save_every'"],
    ),
    "a misspelt limit of a search": (
        lambda: searched(worker=2),
        ArgumentError,
        [f"search .{LINE}", "'worker'; did you mean 'workers'"],
    ),
    "a misspelt name of an import": (
        lambda: mtf.from_jax(lambda w: w.sum(), np.ones(3, np.float32), argnum=0),
        ArgumentError,
        ["from_jax", "'argnum'; did you mean 'argnums'"],
    ),
    "a misspelt remainder": (
        lambda: mtf.data.arrays(ARRAYS).batch(4, remaindr="pad"),
        ArgumentError,
        ["batch", "'remaindr'; did you mean 'remainder'"],
    ),
    # convolutions and pooling
    "a picture without channels": (
        in_graph(lambda: mtf.conv2d(mtf.input("image", [BATCH, HEIGHT]), taps())),
        mtf.ShapeError,
        ["2 spatial dims before its last", r"batch:8, height:8\]", "spatial="],
    ),
    "a filter larger than the picture": (
        in_graph(
            lambda: mtf.conv2d(
                image(), mtf.input("f", [D("fh", 9), D("fw", 9), CHANNELS, D("out", 4)]), padding="VALID"
            )
        ),
        mtf.ShapeError,
        ["'height' .8 long, window 9.", "'width'", "padding='SAME'"],
    ),
    "a stride for a third dim": (
        in_graph(lambda: mtf.conv2d(image(), taps(), stride=(1, 2, 3))),
        mtf.ShapeError,
        ["stride must have 2 entries", r"got \(1, 2, 3\)"],
    ),
    "a picture of integers": (
        in_graph(lambda: mtf.conv2d(mtf.input("i", [BATCH, HEIGHT, WIDTH, CHANNELS], dtype="int32"), taps())),
        mtf.ShapeError,
        ["float tensor", "i32", "mtf.cast"],
    ),
    "no groups": (
        in_graph(lambda: mtf.conv2d(image(), taps(), groups=0)),
        mtf.ShapeError,
        ["groups must be at least 1, got 0"],
    ),
    "a filter of no height": (
        in_graph(lambda: mtf.layers.conv2d(image(), D("out", 4), filter_size=(0, 3))),
        mtf.ShapeError,
        ["filter_size must have 2 numbers from 1 on", r"\[0, 3\]"],
    ),
    "a window of nothing": (
        in_graph(lambda: mtf.max_pool(image(), {"height": 0})),
        mtf.ShapeError,
        ["window of dim 'height' must be at least 1, got 0"],
    ),
    # experts and pipelines
    "experts as a number": (
        in_graph(lambda: mtf.layers.moe(tokens(), 4, D("f", 4))),
        mtf.ShapeError,
        ["expected a Dimension", "int 4"],
    ),
    "a routing as a dict": (
        in_graph(lambda: mtf.layers.moe(tokens(), D("e", 2), D("f", 4), {"top_k": 2})),
        mtf.GraphError,
        ["mtf.layers.Routing, got dict"],
    ),
    "padding of other dims": (
        in_graph(lambda: mtf.layers.moe(tokens(), D("e", 2), D("f", 4), nonpadding=mtf.input("m", [D("q", 3)]))),
        mtf.ShapeError,
        ["nonpadding must be bool", r"\[batch:8, length:6\]", r"f32\[q:3\]"],
    ),
    "experts of a dim of the tokens": (
        in_graph(lambda: mtf.layers.moe(tokens(), D("length", 6), D("f", 4))),
        mtf.ShapeError,
        ["already has a dim 'length'"],
    ),
    "a capacity that is not a number": (
        lambda: R(capacity_factor=float("nan")),
        mtf.GraphError,
        ["capacity_factor must be a finite number, got float nan"],
    ),
    "more stages than layers": (
        in_graph(lambda: mtf.models.train_step(TINY, 4, 8, pipeline=mtf.models.Pipeline(stages=3, microbatches=2))),
        mtf.GraphError,
        ["2 layers can't be cut into 3 stages", "2 % 3 = 2", "layers=3"],
    ),
    "no microbatches": (
        lambda: mtf.models.Pipeline(stages=2, microbatches=0),
        mtf.GraphError,
        ["microbatches must be at least 1, got 0"],
    ),
    # decoding
    "a cache of more positions than the model": (
        in_graph(lambda: mtf.models.decode_step(TINY, 2, 99)),
        mtf.GraphError,
        ["has 16 positions, but cache_length is 99"],
    ),
    "sources for a decoder": (
        in_graph(lambda: mtf.models.decode_step(TINY, 2, 8, encoder_length=4)),
        mtf.GraphError,
        ["encoder_length, got 4"],
    ),
    "an empty prompt": (lambda: mtf.generate(TINY, [[1], []], {}), mtf.GraphError, ["prompt 1 is empty"]),
    "a text without a tokenizer": (
        lambda: mtf.generate(TINY, ["to be"], {}),
        mtf.GraphError,
        ["prompt 0 is a text", "ByteTokenizer"],
    ),
    "more tokens than positions": (
        lambda: mtf.generate(TINY, [[1]], {}, max_tokens=64),
        mtf.GraphError,
        ["16 positions", "max_tokens 64 need 65"],
    ),
    # searches, data, training
    "a chip that is none": (lambda: mtf.search(matmul, "v9-8"), mtf.SliceError, ["unknown chip 'v9'", "v5e"]),
    "a layout without a mesh": (
        lambda: searched(also=["batch:data"]),
        mtf.GraphError,
        ["pairs of a mesh and a layout, got 'batch:data'"],
    ),
    "a batch larger than the data": (
        lambda: mtf.data.arrays(ARRAYS).batch(17),
        mtf.FeedError,
        ["17 is larger than the 16", "remainder='pad'"],
    ),
    "lengths that descend": (
        lambda: mtf.data.arrays(ARRAYS).batch(2, buckets={"x": [8, 4]}),
        mtf.FeedError,
        ["ascending", r"\[8, 4\]"],
    ),
    "shuffled batches": (
        lambda: mtf.data.arrays(ARRAYS).batch(2).shuffle(1),
        mtf.FeedError,
        ["shuffle", "before batch"],
    ),
    "a map that returns no dict": (
        lambda: list(mtf.data.arrays(ARRAYS).map(len)),
        mtf.DataError,
        [r"map\(len\) must return a dict.*returned int at example 0"],
    ),
    "records that are not there": (
        lambda: mtf.data.records("/nowhere/t@2"),
        mtf.DataError,
        ["no file /nowhere/t-00000-of-00002"],
    ),
    "an evaluation without an end": (
        lambda: mtf.Evaluation(program=loss_program(), data=mtf.data.arrays(ARRAYS).batch(8).repeat(), every=1),
        mtf.FeedError,
        ["repeat forever", r"batch\(8"],
    ),
    "examples for batches": (
        lambda: mtf.train(loss_program(), mtf.data.arrays(ARRAYS), 1),
        mtf.FeedError,
        ["examples, not batches", r"data.batch\(size\)"],
    ),
    "a batch of another size": (
        lambda: mtf.train(loss_program(), [{"x": np.ones(3, np.float32)}], 1),
        mtf.FeedError,
        [r"feed 'x'.*shape \[8\].*got \[3\]"],
    ),
    "nothing to train": (
        in_graph(lambda: mtf.train(mtf.lower({"x": mtf.reduce_sum(mtf.input("x", [BATCH]))}), [], 1)),
        mtf.GraphError,
        ["updates no variable", "minimize"],
    ),
    "as many values as boundaries": (
        lambda: optimize.piecewise([2, 3], [0.1, 0.2]),
        mtf.GraphError,
        ["one value more", "2 values for 2"],
    ),
}


@each("mistake", list(MISTAKES))
def test_a_mistake_is_explained(mistake: str) -> None:
    if MISTAKES[mistake][2][0] in ("from_jax", "argnums 2", r"most_trips must be at least 1, got 0"):
        pytest.importorskip("jax")
    assert_explained(MISTAKES[mistake], mistake)


PACKAGES = (mtf, mtf.layers, mtf.optimize, mtf.models, mtf.data, mtf.records, mtf.sharing, mtf.detection)


def public_callables() -> dict[str, Callable[..., object]]:
    """Functions and classes that users call, by name; errors are theirs to catch."""
    named = {
        f"{package.__name__}.{name}": getattr(package, name) for package in PACKAGES for name in public_names(package)
    }
    named |= {f"initializers.{name}": getattr(mtf.initializers, name) for name in ("constant", "random_normal", "ones")}
    return {
        name: value
        for name, value in named.items()
        if callable(value)
        and not (isclass(value) and (issubclass(value, Exception) or isabstract(value) or "__new__" in vars(value)))
    }


def test_calls_that_fit_no_signature_are_explained() -> None:
    """Of every public function and class: names that it has not, and more arguments than it takes."""
    calls = public_callables()
    assert len(calls) > 300
    for call in calls.values():
        kinds = {p.kind for p in signature(call).parameters.values()}
        with mtf.Graph():
            if not {Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL} & kinds:
                with pytest.raises(mtf.GraphError, match=r"(argument|field) 'nonsense'"):
                    call(nonsense=1)
            if Parameter.VAR_POSITIONAL not in kinds:
                with pytest.raises(mtf.GraphError, match=r"takes .*, got 40"):
                    call(*[1] * 40)


CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "an argument is missing": (lambda: mtf.Dimension("b"), r"Dimension \(.*\): 'size' must be given; it has name, siz"),
    "arguments are missing": (lambda: mtf.search(), r"search \(.*\): 'build' and 'slice' must be given"),
    "an argument of a base class is missing": (
        lambda: optimize.AdamWOptimizer(weight_decay=0.1),
        r"AdamWOptimizer \(.*\): 'lr' must be given; it has lr, beta_1, beta_2, epsilon, weight_decay",
    ),
    "an argument is given twice": (
        lambda: optimize.SgdOptimizer(0.1, lr=0.2),
        r"SgdOptimizer \(.*\): 'lr' is given twice, by position (\S+) and by name",
    ),
    "operands are given one by one": (
        in_graph(lambda: mtf.einsum(mtf.input("x", [ROWS]), mtf.input("y", [ROWS]), output_shape=[ROWS])),
        r"einsum \(.*\): 'output_shape' is given twice.*; tensors go in one list: einsum\(\[x, y\], \.\.\.\)",
    ),
    "there is one too many": (
        lambda: mtf.LayoutRules("batch:rows", "rows:2"),
        r"LayoutRules \(test_bad_calls\.py:\d+\): it takes at most 1 argument by position \(rules\), got 2",
    ),
    "there are too many": (
        lambda: mtf.Dimension("b", 8, 9),
        r"Dimension \(.*\): it takes at most 2 arguments by position \(name, size\), got 3",
    ),
    "all go by name": (
        lambda: mtf.models.Pipeline(2, 4),
        r"Pipeline \(.*\): it takes none by position, got 2; stages, microbatches",
    ),
    "of a method": (
        lambda: mtf.data.arrays(ARRAYS).batch(8, remander="pad"),
        r"Data\.batch \(.*\): no argument 'remander'; did you mean 'remainder'",
    ),
    "of a class method": (lambda: mtf.BytePairs.load(), r"BytePairs\.load \(.*\): 'path' must be given"),
    "of a wrapped function": (
        lambda: mtf.models.train_step(TINY, 2, 8, optimiser="adam"),
        r"train_step \(.*\): no argument 'optimiser'; did you mean 'optimizer'",
    ),
}


@each("code, pattern", CALLS)
def test_misfit_of(code: Callable[[], object], pattern: str) -> None:
    with pytest.raises(ArgumentError, match=pattern) as caught:
        code()
    assert "\n" not in str(caught.value)


def test_errors_within_calls_stay_what_they_are() -> None:
    def fails(carries: object, slices: object) -> None:
        raise TypeError("fails() missing 1 required positional argument: 'y'")

    with mtf.Graph(), pytest.raises(TypeError, match="missing 1 required") as caught:
        mtf.scan(fails, [mtf.constant(1.0)], dim=ROWS)
    assert not isinstance(caught.value, ArgumentError)


def raising(*args: object) -> None:
    raise AttributeError("'Estimate' object has no attribute 'stepseconds'\nand more")


USERS: dict[str, tuple[Callable[[], object], str]] = {
    "an objective": (
        lambda: searched(objective=raising),
        r"search: objective failed at test_bad_calls\.py:\d+: AttributeError: 'Estimate' object has no",
    ),
    "a builder": (
        lambda: mtf.search(raising, "v5e-8", seconds=None, workers=1),
        r"search: build failed at test_bad_calls\.py:\d+: AttributeError: ",
    ),
    "a JAX function": (
        lambda: mtf.from_jax(lambda x: x if x.sum() > 0 else -x, np.ones(3, np.float32)),
        r"from_jax .*: JAX's trace of the function failed at test_bad_calls\.py:\d+: TracerBoolConversionError: ",
    ),
}


@each("code, pattern", USERS)
def test_what_users_functions_raise_is_told_in_a_line(code: Callable[[], object], pattern: str) -> None:
    if "from_jax" in pattern:
        pytest.importorskip("jax")
    with pytest.raises(mtf.GraphError, match=pattern) as caught:
        code()
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is not None


def public_classes() -> list[type]:
    """The classes that users name, and those of the attributes of what they get."""
    named = [value for value in public_callables().values() if isclass(value)]
    return list(dict.fromkeys([*named, *explained_calls._MET]))


def test_methods_called_with_other_arguments_are_explained() -> None:
    """Of every public class, each method with an argument that it lacks, with too many, and with too few."""
    methods = {
        (kind, name): method
        for kind in public_classes()
        if kind.__module__.partition(".")[0] in OWN and not isabstract(kind) and kind.__new__ is object.__new__
        for name in dir(kind)
        if not name.startswith("_") and isfunction(method := getattr(kind, name))
    }
    assert len(methods) > 200
    for (kind, name), method in methods.items():
        own = [] if isinstance(getattr_static(kind, name), staticmethod) else [object.__new__(kind)]
        parameters = [*signature(method).parameters.values()][len(own) :]
        kinds = {p.kind for p in parameters}
        title = rf"({kind.__name__}\.)?{method.__name__}" if own else re.escape(method.__qualname__)
        if not {Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL} & kinds:
            with pytest.raises(mtf.GraphError, match=rf"^{title} \(test_bad_calls\.py:\d+\): no argument 'nonsense'"):
                method(*own, nonsense=1)
        if Parameter.VAR_POSITIONAL not in kinds:
            with pytest.raises(mtf.GraphError, match=rf"^{title} \(.*\): it takes .*, got 4\d"):
                method(*own, *[1] * 40)
        if any(p.default is Parameter.empty and p.kind is Parameter.POSITIONAL_OR_KEYWORD for p in parameters):
            with pytest.raises(mtf.GraphError, match=rf"^{title} \(.*\): '.*' must be given"):
                method(*own)


UNNAMED = """
import meshlib as mtf
with mtf.Graph():
    y = mtf.exp(mtf.input("x", "batch:8"), name="y")
    program = mtf.lower({"y": y}, mesh="rows:4", layout="batch:rows")
est, sim = mtf.estimate(program, "v5e-4"), mtf.simulate(program)
for call in (
    lambda: sim.shard("x", core=1), lambda: program.report(), lambda: est.memory.over_time(row=1),
    lambda: est.slice.chip.source("a", "b", "c"), lambda: program.mesh.axis_size("rows", 2),
    lambda: program.outputs["y"].sharding.of(), lambda: est.placement.device(),
    lambda: program.memory.plot(1, 2, 3),
    lambda: program.buffers[0].at(1, 2, 3),
):
    try:
        call()
    except mtf.GraphError as fault:
        print(fault)
"""


def test_classes_need_not_be_named() -> None:
    done = subprocess.run([sys.executable, "-c", UNNAMED], capture_output=True, text=True, check=True)
    heads = [line.partition(" (")[0] for line in done.stdout.splitlines()]
    methods = "Simulation.shard Program.report DeviceMemory.over_time Chip.source Mesh.axis_size Sharding.of"
    assert heads == [*methods.split(), "Placement.device", "Memory.plot", "Buffer.at"]
