"""Mistakes that users make, and what the library says: names, both numbers, where, and what to do.

Every row of the table is one mistake: the code, the class of the error (all are `MeshlibError`), and what its text
must hold. Below it, every public function is called with junk, and steps that fail must leave the state as it was.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
import types
from collections.abc import Callable

import numpy as np
import pytest

import meshlib as mtf
from meshlib import layers, optimize
from meshlib.core import initializers
from tests.command.mistakes import assert_explained, in_graph
from tests.core.public import public_names
from tests.effort import draws, each, some

BATCH, INNER, HIDDEN, CLASSES = (mtf.Dimension(*d) for d in (("batch", 8), ("inner", 4), ("hidden", 6), ("classes", 5)))
VOCAB, OTHER_HIDDEN = mtf.Dimension("vocab", 10), mtf.Dimension("hidden", 7)
LINE = r"test_bad_input\.py:\d+"
IMAGES = np.ones((8, 4), np.float32)
LABELS = np.arange(8, dtype=np.int32) % 5


# ---------------------------------------------------------------- programs to make mistakes with


def x(*dims: mtf.Dimension, dtype: str = "float32", name: str = "x") -> mtf.Tensor:
    return mtf.input(name, list(dims) or [BATCH, INNER], dtype)


def ints(*dims: mtf.Dimension, name: str = "ids") -> mtf.Tensor:
    return x(*(dims or (BATCH,)), dtype="int32", name=name)


def training() -> tuple[dict[str, mtf.Tensor], list[mtf.Operation]]:
    images, labels = mtf.input("images", [BATCH, INNER]), mtf.input("labels", [BATCH], "int32")
    w1, w2 = mtf.variable("w1", [INNER, HIDDEN]), mtf.variable("w2", [HIDDEN, CLASSES])
    h = mtf.relu(mtf.einsum([images, w1], output_shape=[BATCH, HIDDEN], name="ffn_in"))
    logits = mtf.einsum([h, w2], output_shape=[BATCH, CLASSES], name="ffn_out")
    targets = mtf.one_hot(labels, CLASSES, name="targets")
    loss = mtf.reduce_mean(layers.softmax_cross_entropy_with_logits(logits, targets, CLASSES))
    return {"loss": loss}, optimize.MomentumOptimizer(0.1).minimize(loss)


def lowered(mesh: object = "device:1", layout: object = "", **options: object) -> mtf.Program:
    with mtf.Graph():
        return mtf.lower(*training(), mesh, layout, **options)


def simulated(**options: object) -> mtf.Simulation:
    return mtf.simulate(lowered(), **options)


def step(**feeds: object) -> object:
    return simulated().step({"images": IMAGES, "labels": LABELS, **feeds})


def two_graphs() -> object:
    with mtf.Graph():
        first = x(name="first")
    with mtf.Graph():
        return first + x(name="second")


def fetched_from_two_graphs() -> object:
    with mtf.Graph():
        first = x(name="first")
    with mtf.Graph():
        return mtf.lower([first, x(name="second")])


def twice_written() -> object:
    w = mtf.variable("w", [HIDDEN], 1.0)
    one = mtf.assign(w, w * 2)
    two = mtf.assign(w, w * 3)
    return mtf.lower(updates=[one, two])


def run_with_other_shape() -> object:
    with mtf.Graph():
        evaluation = mtf.lower([mtf.variable("w1", [INNER, OTHER_HIDDEN])])
    return simulated().run(evaluation)


def initial(value: object, dtype: str = "float32") -> Callable[[], object]:
    return in_graph(lambda: mtf.simulate(mtf.lower([mtf.variable("w", [HIDDEN], value, dtype)])))


def looked_up(index: int, executor: str, name: str) -> object:
    with mtf.Graph():
        ids = ints()
        y = mtf.one_hot(ids, VOCAB, name="hot") if name == "hot" else mtf.gather(table(), ids, VOCAB, name="look_up")
        program = mtf.lower([y], mesh="r:2", layout="vocab:r")
    return mtf.simulate(program, executor=executor).step(ids=np.array([0, 1, 2, index, 4, 5, 6, 7]))


def table() -> mtf.Tensor:
    return mtf.variable("table", [VOCAB, HIDDEN])


def logarithm(executor: str, **state: object) -> Callable[..., object]:
    def run(feed: object = IMAGES) -> object:
        with mtf.Graph():
            w = mtf.variable("w", [INNER], 1.0)
            y = mtf.log(x() * w, name="entropy")
            program = mtf.lower({"y": mtf.reduce_sum(y)}, [mtf.assign(w, w + 1)], "r:2;c:2", "batch:r;inner:c")
        sim = mtf.simulate(program, executor=executor)
        sim.state.update(state)
        return sim.step(x=feed)

    return run


def with_entry(value: float, *index: int) -> np.ndarray:
    array = IMAGES.copy()
    array[index] = value
    return array


class Odd:
    def __repr__(self) -> str:
        return "odd thing"


# ---------------------------------------------------------------- the table

MISTAKES: dict[str, tuple[Callable[[], object], type[Exception], list[str]]] = {
    # feeds
    "feed of the wrong shape": (
        lambda: step(images=np.ones((8, 3))),
        mtf.FeedError,
        ["'images'", LINE, r"\[8, 4\]", r"\[8, 3\]", r"\[batch:8, inner:4\]"],
    ),
    "feed of the wrong rank": (lambda: step(labels=np.ones((8, 1), int)), mtf.FeedError, [r"\[8\]", r"\[8, 1\]"]),
    "integers fed for floats": (
        lambda: step(images=np.ones((8, 4), int)),
        mtf.FeedError,
        ["'images'", "expected float32, got int64", r"astype\(np\.float32\)"],
    ),
    "floats fed for integers": (
        lambda: step(labels=np.ones(8)),
        mtf.FeedError,
        ["'labels'", "expected int32, got float64", r"astype\(np\.int32\)"],
    ),
    "integers fed that do not fit": (lambda: step(labels=np.full(8, 2**40)), mtf.FeedError, ["1099511627776", "int32"]),
    "complex numbers fed": (lambda: step(images=IMAGES * 1j), mtf.FeedError, ["float32", "complex"]),
    "objects fed": (lambda: step(images=np.full((8, 4), Odd())), mtf.FeedError, ["float32", "object"]),
    "nothing fed": (lambda: step(images=None), mtf.FeedError, ["'images'", "NoneType"]),
    "text fed": (lambda: step(images="cat.png"), mtf.FeedError, ["'images'", "NumPy array", "str"]),
    "ragged lists fed": (
        lambda: step(images=[[1.0, 2.0], [3.0]]),
        mtf.FeedError,
        ["'images'", r"\[8, 4\]", "rows differ"],
    ),
    "missing feed": (
        lambda: simulated().step(images=IMAGES),
        mtf.FeedError,
        ["missing feed 'labels'", r"int32\[batch:8\]", LINE, "images, labels"],
    ),
    "unknown feed": (
        lambda: step(image=IMAGES),
        mtf.FeedError,
        ["unknown feed 'image'", "did you mean 'images'"],
    ),
    "unknown and missing feeds together": (
        lambda: simulated().step(imags=IMAGES),
        mtf.FeedError,
        ["unknown feed 'imags'; did you mean 'images'", "missing feed 'images'", "missing feed 'labels'"],
    ),
    "array fed without a name": (lambda: simulated().step(IMAGES), mtf.FeedError, ["dict of names", "ndarray"]),
    "NaN fed": (
        lambda: step(images=with_entry(np.nan, 3, 1)),
        mtf.NotFiniteError,
        ["feed 'images' holds a NaN", r"\[3, 1\]"],
    ),
    # layouts and meshes
    "layout with an unknown dim": (
        lambda: lowered("rows:2", "bacth:rows"),
        mtf.LayoutError,
        ["bacth:rows", "'bacth'", "did you mean 'batch'", "mesh rows:2"],
    ),
    "layout with an unknown axis": (
        lambda: lowered("rows:2", "batch:row"),
        mtf.LayoutError,
        ["batch:row", "no axis 'row' in mesh rows:2", "did you mean 'rows'"],
    ),
    "layout with an unknown scope": (
        lambda: lowered("rows:2", "batch:rows;variable/hidden:rows"),
        mtf.LayoutError,
        ["'variable'", "variables, slots, activations", "did you mean 'variables'", r"\n +\^"],
    ),
    "layout without a colon": (
        lambda: lowered("rows:2", "batch:rows;hidden"),
        mtf.LayoutError,
        ["'hidden' has no ':'", r"\n  batch:rows;hidden\n {13}\^"],
    ),
    "layout with two colons": (
        lambda: lowered("rows:2", "batch:rows:cols"),
        mtf.LayoutError,
        ["two ':'", r"\n {12}\^"],
    ),
    "layout with a name that is none": (lambda: lowered("rows:2", "ba-tch:rows"), mtf.LayoutError, ["'ba-tch'", r"\^"]),
    "layout with an axis twice": (
        lambda: lowered("rows:2", "batch:rows+rows"),
        mtf.LayoutError,
        ["'rows' occurs twice", "'batch'", r"\^"],
    ),
    "two required rules for one dim": (
        lambda: lowered("rows:2;cols:2", "batch:rows;batch:cols"),
        mtf.LayoutError,
        ["'batch'", "batch:rows and batch:cols", "optional"],
    ),
    "layout that is a number": (lambda: lowered("rows:2", 3), mtf.LayoutError, ["batch:rows;hidden:cols", "not 3"]),
    "layout as a list of texts": (lambda: lowered("rows:2", ["batch:rows"]), mtf.LayoutError, ["pair", "'batch:rows'"]),
    "layout with a number for an axis": (
        lambda: lowered("rows:2", {"batch": 2}),
        mtf.LayoutError,
        ["'batch'", "not 2"],
    ),
    "dim that does not divide": (
        lambda: lowered("data:2;model:4", "batch:data;hidden:model"),
        mtf.LayoutError,
        [
            rf"^einsum 'ffn_in' \({LINE}\)|^variable 'w1' \({LINE}\)",
            "dim 'hidden' does not divide over axis 'model'",
            r"f32\[inner:4, hidden:6\]",
            "mesh data:2;model:4   layout batch:data;hidden:model",
            "6 % 4 = 2",
            r"Pad hidden to 8 \(\+33\.33 %\)",
            "remove hidden:model",
            rf"The same in .*einsum 'ffn_in' \({LINE}\)",
        ],
    ),
    "dim that does not divide, in an operation": (
        in_graph(
            lambda: mtf.lower(
                [mtf.einsum([x(), x(INNER, VOCAB, name="w")], name="scores")], mesh="r:3", layout="batch:r"
            )
        ),
        mtf.LayoutError,
        [rf"input 'x' \({LINE}\)", "8 % 3 = 2", "Pad batch to 9", rf"einsum 'scores' \({LINE}\)"],
    ),
    "dim that does not divide over two axes": (
        lambda: lowered("a:2;b:3", "batch:a+b"),
        mtf.LayoutError,
        ["'batch'", "'a' x 'b'", "8 % 6 = 2", "Pad batch to 12"],
    ),
    "two dims of one tensor on one axis": (
        lambda: lowered("rows:2", "batch:rows;hidden:rows"),
        mtf.LayoutError,
        [
            rf"einsum 'ffn_in' \({LINE}\): dims 'batch' and 'hidden' of one tensor are both split over axis 'rows'",
            r"images: f32\[batch:8, inner:4\]   w1: f32\[inner:4, hidden:6\]",
            "mesh rows:2   layout batch:rows;hidden:rows",
            r"optional \(hidden:rows\?\)",
        ],
    ),
    "several faults of a layout at once": (
        lambda: lowered("rows:3;cols:4", "batch:rows;hidden:cols;clases:rows;inner:col"),
        mtf.LayoutError,
        ["^4 faults", "8 % 3 = 2", "6 % 4 = 2", "'clases'.*'classes'", "no axis 'col'.*'cols'", r"\n1\. ", r"\n4\. "],
    ),
    "no axis at all": (lambda: lowered(""), mtf.LayoutError, ["at least one axis", "all:1"]),
    "empty mesh as a dict": (lambda: lowered({}), mtf.LayoutError, ["at least one axis"]),
    "axis of size 0": (lambda: lowered("rows:0"), mtf.LayoutError, ["'rows'", "'0'", r"\n {7}\^"]),
    "axis of negative size": (lambda: lowered({"rows": -2}), mtf.LayoutError, ["'rows'", "at least 1, not -2"]),
    "axis of size True": (lambda: lowered({"rows": True}), mtf.LayoutError, ["'rows'", "integer, not True"]),
    "axis of size 2.0": (lambda: lowered([("rows", 2.0)]), mtf.LayoutError, ["'rows'", "integer, not 2.0"]),
    "axis that occurs twice": (
        lambda: lowered("rows:2;rows:4"),
        mtf.LayoutError,
        ["'rows' occurs twice", "rows:2;rows:4"],
    ),
    "mesh that is a number": (lambda: lowered(8), mtf.LayoutError, ["a:2;b:4", "not 8"]),
    "constraint with an unknown dim": (
        in_graph(lambda: mtf.constrain(x(), "bacth:rows")),
        mtf.ShapeError,
        [LINE, r"x: f32\[batch:8, inner:4\]", "'bacth'", "did you mean 'batch'"],
    ),
    "constraint over an unknown axis": (
        in_graph(lambda: mtf.lower([mtf.constrain(x(), "batch:rows", name="pin")], mesh="cols:2")),
        mtf.LayoutError,
        [rf"constrain 'pin' \({LINE}\)", "no axis 'rows' in mesh cols:2", "layout batch:rows"],
    ),
    "constraint that does not divide": (
        in_graph(lambda: mtf.lower([mtf.constrain(x(), "batch:r", name="pin")], mesh="r:3")),
        mtf.LayoutError,
        [rf"constrain 'pin' \({LINE}\)", "8 % 3 = 2", "Pad batch to 9"],
    ),
    # dimensions and shapes
    "dim of size 0": (lambda: mtf.Dimension("batch", 0), mtf.LayoutError, ["'batch'", "at least 1, not 0"]),
    "dim of negative size": (lambda: mtf.Dimension("batch", -1), mtf.LayoutError, ["'batch'", "not -1"]),
    "dim of size True": (lambda: mtf.Dimension("batch", True), mtf.LayoutError, ["'batch'", r"True \(bool\)"]),
    "dim of size 8.0": (lambda: mtf.Dimension("batch", 8.0), mtf.LayoutError, ["'batch'", r"8\.0 \(float\)"]),
    "dim with white space": (lambda: mtf.Dimension("ba tch", 8), mtf.LayoutError, ["'ba tch'", "identifier"]),
    "dim twice in one shape": (
        in_graph(lambda: x(BATCH, INNER, BATCH)),
        mtf.ShapeError,
        [rf"input 'x' \({LINE}\)", "'batch' occurs twice", "rename one"],
    ),
    "shape of numbers": (in_graph(lambda: mtf.zeros([8, 4])), mtf.ShapeError, [LINE, "expected Dimensions, got int 8"]),
    # operations: sizes that clash
    "clash in einsum": (
        in_graph(lambda: mtf.einsum([x(HIDDEN), x(OTHER_HIDDEN, name="w")], output_shape=[], name="ffn")),
        mtf.ShapeError,
        [
            rf"einsum 'ffn' \({LINE}\)",
            "'hidden' has two sizes, 6 and 7",
            r"x: f32\[hidden:6\]",
            r"w: f32\[hidden:7\]",
            "rename",
        ],
    ),
    "clash with the output of einsum": (
        in_graph(lambda: mtf.einsum([x(HIDDEN)], output_shape=[OTHER_HIDDEN])),
        mtf.ShapeError,
        [LINE, "hidden:7", "hidden:6"],
    ),
    "clash in add": (
        in_graph(lambda: x(HIDDEN) + x(OTHER_HIDDEN, name="y")),
        mtf.ShapeError,
        [rf"add \({LINE}\)", "two sizes, 6 and 7", r"y: f32\[hidden:7\]"],
    ),
    "clash in a comparison": (
        in_graph(lambda: x(HIDDEN) < x(OTHER_HIDDEN, name="y")),
        mtf.ShapeError,
        ["^less", "6 and 7"],
    ),
    "clash in where": (
        in_graph(lambda: mtf.where(x(HIDDEN) > 0, 1.0 * x(OTHER_HIDDEN, name="y"), 0.0)),
        mtf.ShapeError,
        ["^where", "7 and 6", r"bool\[hidden:6\]"],
    ),
    "clash in add_n": (
        in_graph(lambda: mtf.add_n([x(HIDDEN), x(HIDDEN, name="y"), x(OTHER_HIDDEN, name="z")])),
        mtf.ShapeError,
        ["^add_n", "6 and 7", "z: "],
    ),
    "clash in gather": (
        in_graph(lambda: mtf.gather(x(VOCAB, HIDDEN), ints(OTHER_HIDDEN), VOCAB)),
        mtf.ShapeError,
        ["^gather", "6 and 7", "ids: i32"],
    ),
    "clash in scatter_add": (
        in_graph(lambda: mtf.scatter_add(x(HIDDEN), ints(OTHER_HIDDEN), VOCAB, [VOCAB])),
        mtf.ShapeError,
        ["^scatter_add", "6 and 7"],
    ),
    "clash in reduce_sum": (
        in_graph(lambda: mtf.reduce_sum(x(HIDDEN), reduced_dim=OTHER_HIDDEN)),
        mtf.GraphError,
        ["reduce_sum", LINE, "'hidden' has size 6", "7"],
    ),
    "clash with the output of reduce_max": (
        in_graph(lambda: mtf.reduce_max(x(BATCH, HIDDEN), output_shape=[OTHER_HIDDEN])),
        mtf.ShapeError,
        ["^reduce_max", "size 7, but 6"],
    ),
    "clash in broadcast": (
        in_graph(lambda: mtf.broadcast(x(HIDDEN), [BATCH, OTHER_HIDDEN])),
        mtf.ShapeError,
        ["^broadcast", r"\[batch:8, hidden:7\]", "lacks hidden:6"],
    ),
    "clash in transpose": (
        in_graph(lambda: mtf.transpose(x(BATCH, HIDDEN), [OTHER_HIDDEN, BATCH])),
        mtf.ShapeError,
        ["^transpose", "hidden:7", "hidden:6"],
    ),
    "clash in softmax": (in_graph(lambda: mtf.softmax(x(HIDDEN), OTHER_HIDDEN)), mtf.GraphError, ["size 6", "7"]),
    "clash in slice": (in_graph(lambda: mtf.slice(x(HIDDEN), 0, 2, OTHER_HIDDEN)), mtf.GraphError, ["size 6", "7"]),
    "clash in rename": (
        in_graph(lambda: mtf.rename_dimension(x(HIDDEN), OTHER_HIDDEN, "d")),
        mtf.GraphError,
        ["size 6", "7"],
    ),
    "clash in dense": (
        in_graph(lambda: layers.dense(x(BATCH, HIDDEN), [CLASSES], [OTHER_HIDDEN])),
        mtf.ShapeError,
        [rf"dense \({LINE}\)", "hidden:7", r"hidden:6\]"],
    ),
    "dense onto a dim that is there": (
        in_graph(lambda: layers.dense(x(BATCH, HIDDEN), [BATCH], [HIDDEN])),
        mtf.ShapeError,
        ["new_dims batch:8", "rename"],
    ),
    "clash in the loss": (
        in_graph(lambda: layers.softmax_cross_entropy_with_logits(x(BATCH, CLASSES), x(BATCH, name="y"), CLASSES)),
        mtf.ShapeError,
        ["same dims", r"x: f32\[batch:8, classes:5\]", r"y: f32\[batch:8\]"],
    ),
    # operations: other mistakes
    "output dim that einsum would invent": (
        in_graph(lambda: mtf.einsum([x(), x(INNER, HIDDEN, name="w")], output_shape=[BATCH, VOCAB], name="ffn")),
        mtf.ShapeError,
        [rf"einsum 'ffn' \({LINE}\)", "'vocab' is in no operand", "mtf.broadcast"],
    ),
    "reduced dim that is in no operand": (
        in_graph(lambda: mtf.einsum([x(), x(name="y")], reduced_dims=[VOCAB])),
        mtf.ShapeError,
        ["einsum", LINE, "vocab:10", r"\[batch:8, inner:4\]"],
    ),
    "einsum of one tensor, not a list": (
        in_graph(lambda: mtf.einsum(x())),
        mtf.ShapeError,
        [LINE, r"einsum\(\[x, w\]"],
    ),
    "einsum of nothing": (in_graph(lambda: mtf.einsum([])), mtf.ShapeError, [LINE, "at least one tensor"]),
    "einsum of flags": (
        in_graph(lambda: mtf.einsum([mtf.equal(ints(name="i"), 0), mtf.equal(ints(name="j"), 0)])),
        mtf.ShapeError,
        ["needs float operands .or int32", "got bool", "mtf.cast"],
    ),
    "unknown precision of einsum": (
        in_graph(lambda: mtf.einsum([x()], precision="high")),
        mtf.GraphError,
        ["'high'", "'highest'"],
    ),
    "mixed dtypes": (
        in_graph(lambda: x() * x(dtype="bfloat16", name="y")),
        mtf.ShapeError,
        [rf"multiply \({LINE}\)", "float32 and bfloat16", "mtf.cast", r"y: bf16\[batch:8, inner:4\]"],
    ),
    "unknown dtype": (
        in_graph(lambda: x(dtype="flaot32")),
        mtf.ShapeError,
        ["'flaot32'", LINE, "did you mean 'float32'"],
    ),
    "unsupported dtype": (in_graph(lambda: x(dtype=np.int64)), mtf.ShapeError, ["int64", "float32, bfloat16, int32"]),
    "no dtype": (in_graph(lambda: x(dtype=None)), mtf.ShapeError, ["None", "float32"]),
    "mean of integers": (in_graph(lambda: mtf.reduce_mean(ints())), mtf.ShapeError, [LINE, "ids: i32", "mtf.cast"]),
    "relu of integers": (
        in_graph(lambda: mtf.relu(ints(), name="r")),
        mtf.ShapeError,
        [rf"relu 'r' \({LINE}\)", "int32"],
    ),
    "quotient of integers": (in_graph(lambda: ints() / 2), mtf.ShapeError, ["divide", "float operands, got int32"]),
    "sum of truth values": (
        in_graph(lambda: mtf.reduce_sum(x() > 0)),
        mtf.ShapeError,
        ["reduce_sum", "numbers, got bool", "mtf.cast"],
    ),
    "difference of truth values": (
        in_graph(lambda: (x() > 0) - (x(name="y") > 0)),
        mtf.ShapeError,
        ["numbers, got bool"],
    ),
    "and of floats": (in_graph(lambda: mtf.logical_and(x(), x(name="y"))), mtf.ShapeError, ["bool", "mtf.greater"]),
    "fraction beside integers": (in_graph(lambda: ints() + 0.5), mtf.ShapeError, ["0.5", "int32", "ids: i32"]),
    "huge number beside integers": (in_graph(lambda: ints() * 10**12), mtf.ShapeError, ["1000000000000", "int32"]),
    "array beside a tensor": (
        in_graph(lambda: x() + np.ones(3)),
        mtf.ShapeError,
        [LINE, "ndarray", "mtf.input"],
    ),
    "fraction as an integer constant": (
        in_graph(lambda: mtf.constant(1.5, [], "int32")),
        mtf.ShapeError,
        ["1.5", "int32"],
    ),
    "text as a constant": (in_graph(lambda: mtf.constant("a")), mtf.ShapeError, ["number", "'a'", LINE]),
    "reshape to another size": (
        in_graph(lambda: mtf.reshape(x(), [mtf.Dimension("n", 30)])),
        mtf.ShapeError,
        [rf"reshape \({LINE}\)", "32 elements", "has 30"],
    ),
    "reshape of a list": (
        in_graph(lambda: mtf.reshape([x()], "batch")),  # type: ignore[arg-type]
        mtf.ShapeError,
        [rf"reshape \({LINE}\)", "list"],
    ),
    "compile an array without dims": (
        lambda: mtf.compile_for(np.array("x"), "v5e-4"),
        mtf.GraphError,
        ["compile_for: expected a program", "ndarray"],
    ),
    "rename onto a dim that is there": (
        in_graph(lambda: mtf.rename_dimension(x(), "inner", "batch")),
        mtf.ShapeError,
        [LINE, "already has a dim 'batch'", r"\[batch:8, inner:4\]"],
    ),
    "rename of a dim that is not there": (
        in_graph(lambda: mtf.rename_dimension(x(), "iner", "d")),
        mtf.GraphError,
        ["no dim 'iner'", "did you mean 'inner'"],
    ),
    "rename to a name that is none": (
        in_graph(lambda: mtf.rename_dimension(x(), "inner", "a b")),
        mtf.ShapeError,
        ["'a b'", LINE],
    ),
    "slice out of range": (
        in_graph(lambda: mtf.slice(x(), 2, 3, "inner", name="cut")),
        mtf.ShapeError,
        [rf"slice 'cut' \({LINE}\)", r"\[2, 5\)", "'inner'", "4 elements"],
    ),
    "slice from a negative start": (
        in_graph(lambda: mtf.slice(x(), -1, 2, "inner")),
        mtf.ShapeError,
        [r"\[-1, 1\)", "4"],
    ),
    "slice of no elements": (in_graph(lambda: mtf.slice(x(), 1, 0, "inner")), mtf.ShapeError, [r"\[1, 1\)", "4"]),
    "slice from a fraction": (
        in_graph(lambda: mtf.slice(x(), 1.5, 2, "inner")),
        mtf.GraphError,
        ["begin", "1.5", LINE],
    ),
    "negative padding": (
        in_graph(lambda: mtf.pad(x(), [-1, 2], "inner")),
        mtf.ShapeError,
        [r"\[-1, 2\]", "negative", LINE],
    ),
    "three paddings": (
        in_graph(lambda: mtf.pad(x(), [1, 2, 3], "inner")),
        mtf.ShapeError,
        [r"\[before, after\]", r"\[1, 2, 3\]"],
    ),
    "dropout without a probability": (
        in_graph(lambda: mtf.dropout(x(), True)),
        mtf.ShapeError,
        ["exactly one", "neither"],
    ),
    "dropout with both probabilities": (
        in_graph(lambda: mtf.dropout(x(), True, keep_prob=0.9, rate=0.2)),
        mtf.ShapeError,
        ["exactly one", "keep_prob=0.9 and rate=0.2"],
    ),
    "dropout of everything": (
        in_graph(lambda: mtf.dropout(x(), True, rate=1.0)),
        mtf.ShapeError,
        [r"rate must be in \[0, 1\)", "1.0"],
    ),
    "dropout with strange noise": (
        in_graph(lambda: mtf.dropout(x(), True, rate=0.5, noise_shape=[VOCAB])),
        mtf.ShapeError,
        ["vocab:10", r"\[batch:8, inner:4\]"],
    ),
    "reduction with a positional dim": (
        in_graph(lambda: mtf.reduce_sum(x(), BATCH)),
        mtf.ShapeError,
        ["reduced_dim=", LINE],
    ),
    "one_hot of floats": (
        in_graph(lambda: mtf.one_hot(x(), CLASSES)),
        mtf.ShapeError,
        ["int32, got float32", "mtf.cast"],
    ),
    "one_hot onto a dim that is there": (
        in_graph(lambda: mtf.one_hot(ints(), BATCH)),
        mtf.ShapeError,
        ["'batch'", "rename"],
    ),
    "name of an operation that is a number": (
        in_graph(lambda: mtf.relu(x(), name=3)),
        mtf.GraphError,
        ["relu", LINE, "got 3"],
    ),
    # values at run time
    "label out of range, one_hot": (
        lambda: looked_up(10, "fast", "hot"),
        mtf.FeedError,
        [rf"one_hot 'hot' \({LINE}\)", "index 10", "vocab:10", "0 to 9", "ids: i32"],
    ),
    "negative label, gather": (
        lambda: looked_up(-1, "fast", "look_up"),
        mtf.FeedError,
        [rf"gather 'look_up' \({LINE}\)", "index -1", "vocab:10", "0 to 9"],
    ),
    "label out of range, exact": (lambda: looked_up(99, "exact", "hot"), mtf.FeedError, ["'hot'", "99", "vocab:10"]),
    "label out of range, gather, exact": (
        lambda: looked_up(99, "exact", "look_up"),
        mtf.FeedError,
        ["'look_up'", "99"],
    ),
    "NaN made in the middle": (
        lambda: logarithm("fast")(with_entry(-1.0, 6, 1)),
        mtf.NotFiniteError,
        ["output 'y'", rf"log 'entropy' \({LINE}\) first makes a NaN", r"core 2 \(r=1, c=0\)"],
    ),
    "NaN made in the middle, exact": (
        lambda: logarithm("exact")(with_entry(-1.0, 6, 3)),
        mtf.NotFiniteError,
        [rf"log 'entropy' \({LINE}\)", r"core 3 \(r=1, c=1\)"],
    ),
    "NaN in a variable": (
        lambda: logarithm("fast", w=np.array([1, 1, np.nan, 1]))(),
        mtf.NotFiniteError,
        ["variable 'w' holds a NaN", r"\[2\]"],
    ),
    # graphs
    "variable twice": (
        in_graph(lambda: [mtf.variable("w", [HIDDEN]), mtf.variable("w", [HIDDEN])]),
        mtf.GraphError,
        ["'w' is declared twice", rf"{LINE} and at {LINE}", "mtf.scope"],
    ),
    "input twice": (in_graph(lambda: [x(), x()]), mtf.GraphError, ["'x' is declared twice", rf"{LINE} and at {LINE}"]),
    "variable named like the step": (in_graph(lambda: mtf.variable("step", [])), mtf.GraphError, [r"mtf\.step\(\)"]),
    "variable without a name": (in_graph(lambda: mtf.variable("", [])), mtf.GraphError, ["non-empty", "''"]),
    "input named by a number": (in_graph(lambda: mtf.input(3, [BATCH])), mtf.GraphError, ["non-empty string", "3"]),
    "scope with white space": (
        in_graph(lambda: mtf.scope("a b").__enter__()),
        mtf.GraphError,
        ["'a b'", "white space"],
    ),
    "two writes to one variable": (
        in_graph(twice_written),
        mtf.GraphError,
        ["'w' is written twice", rf"at {LINE} and at {LINE}"],
    ),
    "tensors of two graphs": (two_graphs, mtf.GraphError, ["first: f32", "another graph", LINE, r"mtf\.Graph\(\)"]),
    "outputs of two graphs": (fetched_from_two_graphs, mtf.GraphError, ["different graphs", r"mtf\.Graph\(\)"]),
    "source outside a graph": (
        lambda: mtf.variable("w", [HIDDEN]),
        mtf.GraphError,
        ["needs a graph", LINE, r"with mtf\.Graph\(\)"],
    ),
    "step counter outside a graph": (mtf.step, mtf.GraphError, ["step", "needs a graph"]),
    "truth value of a tensor": (
        in_graph(lambda: bool(x() > 0)),
        mtf.GraphError,
        ["'greater'", "truth value", "mtf.where"],
    ),
    "iteration over a tensor": (
        in_graph(lambda: list(x())),
        mtf.GraphError,
        ["'x'", "iterated", r"\[batch:8, inner:4\]"],
    ),
    "index of a tensor": (in_graph(lambda: x()[0]), mtf.GraphError, ["'x'", "mtf.slice"]),
    "array of a tensor": (in_graph(lambda: np.asarray(x())), mtf.GraphError, ["'x'", r"sim\.step\(\)"]),
    "tensor expected": (in_graph(lambda: mtf.relu("x")), mtf.ShapeError, ["relu", LINE, "str 'x'"]),
    # variables and state
    "text as initializer": (initial("glorot"), mtf.GraphError, ["'w'", LINE, "initializer", "'glorot'"]),
    "initial array of the wrong shape": (initial(np.ones(5)), mtf.GraphError, ["'w'", r"\[5\]", r"\[hidden:6\]"]),
    "initial array of texts": (initial(np.array(["a"] * 6)), mtf.GraphError, ["'w'", "<U1", "float32"]),
    "initial fraction of an integer": (initial(0.5, "int32"), mtf.ShapeError, ["'w'", "0.5", "int32"]),
    "integer variable without initial value": (
        initial(None, "int32"),
        mtf.GraphError,
        ["'w'", "int32", "number or an array"],
    ),
    "initializer that returns another shape": (
        initial(lambda key, shape, dtype: np.ones(3)),
        mtf.FeedError,
        ["'w'", LINE, r"\[6\]", r"\[3\]"],
    ),
    "initializer that takes nothing": (
        initial(lambda: 0),
        mtf.FeedError,
        ["initializer of variable 'w'", LINE, "argument"],
    ),
    "state of the wrong shape": (
        lambda: simulated().state.update(w1=np.ones((4, 5))),
        mtf.FeedError,
        ["'w1'", r"\[4, 6\]", r"\[4, 5\]", "hidden:6"],
    ),
    "state of the wrong dtype": (
        lambda: simulated().state.update(w1=np.ones((4, 6), int)),
        mtf.FeedError,
        ["'w1'", "float32, got int64"],
    ),
    "state of an unknown name": (
        lambda: simulated().state.update({"w1/momentun": np.ones((4, 6))}),
        mtf.FeedError,
        ["'w1/momentun'", "did you mean 'w1/momentum'", "w2"],
    ),
    "state read under an unknown name": (lambda: simulated().state["v"], mtf.FeedError, ["'v'", "w1"]),
    "state deleted": (lambda: simulated().state.pop("w1"), mtf.FeedError, ["'w1'", "deleted"]),
    "shard outside the mesh": (lambda: simulated().shard("w1", (1,)), mtf.LayoutError, [r"\(1,\)", "device:1"]),
    "shard of an unknown axis": (lambda: simulated().shard("w1", {"rows": 0}), mtf.LayoutError, ["rows", "device"]),
    "assignment to what is not a variable": (
        in_graph(lambda: mtf.assign(x(), x(name="y"))),
        mtf.GraphError,
        ["x: f32", "not a variable|is none", r"mtf\.variable"],
    ),
    "assignment of other dims": (
        in_graph(lambda: mtf.assign(mtf.variable("w", [HIDDEN]), x())),
        mtf.ShapeError,
        ["'w'", LINE, r"\[batch:8, inner:4\]", r"\[hidden:6\]"],
    ),
    "assignment of floats to integers": (
        in_graph(lambda: mtf.assign(mtf.variable("n", [BATCH, INNER], 0, "int32"), x())),
        mtf.ShapeError,
        ["'n'", "f32", "i32", "mtf.cast"],
    ),
    "program whose variable has another shape": (
        run_with_other_shape,
        mtf.FeedError,
        ["'w1'", r"\[inner:4, hidden:6\]", r"\[inner:4, hidden:7\]", LINE],
    ),
    # gradients and optimizers
    "loss without variables": (
        in_graph(lambda: optimize.SgdOptimizer(0.1).minimize(mtf.reduce_sum(x()))),
        mtf.GraphError,
        ["minimize", LINE, "reduce_sum: f32", "no trainable variable"],
    ),
    "loss that depends on no variable": (
        in_graph(lambda: (mtf.variable("w", []), optimize.SgdOptimizer(0.1).minimize(mtf.reduce_sum(x())))),
        mtf.GraphError,
        ["no trainable variable", "'w'"],
    ),
    "gradient of integers": (
        in_graph(lambda: mtf.gradients([ints()], [])),
        mtf.GraphError,
        ["ids: i32", LINE, "float"],
    ),
    "gradient of nothing": (in_graph(lambda: mtf.gradients([], [])), mtf.GraphError, [LINE, "at least one"]),
    "cotangent of the wrong type": (
        in_graph(lambda: mtf.gradients([x()], [], [x(HIDDEN, name="dy")])),
        mtf.ShapeError,
        [r"dy: f32\[hidden:6\]", r"x: f32\[batch:8, inner:4\]"],
    ),
    "learning rate as text": (
        lambda: optimize.SgdOptimizer("0.1"),
        mtf.GraphError,
        ["learning rate", "str '0.1'", LINE],
    ),
    "learning rate True": (lambda: optimize.AdamOptimizer(True), mtf.GraphError, ["learning rate", "True"]),
    "learning rate NaN": (lambda: optimize.AdamOptimizer(float("nan")), mtf.GraphError, ["learning rate", "nan"]),
    "learning rate with dims": (
        in_graph(lambda: optimize.SgdOptimizer(x())),
        mtf.GraphError,
        ["without dims", r"\[batch:8"],
    ),
    "schedule that returns text": (
        in_graph(lambda: optimize.SgdOptimizer(lambda n: "slow").minimize(mtf.reduce_sum(mtf.variable("w", [HIDDEN])))),
        mtf.GraphError,
        ["SgdOptimizer", LINE, "finite number", "'slow'"],
    ),
    "no warm-up": (lambda: optimize.warmup_then_decay(0.1, 0), mtf.GraphError, ["warmup_steps", "at least 1, got 0"]),
    "Adam that never forgets": (
        lambda: optimize.AdamOptimizer(0.1, beta_2=1.0),
        mtf.GraphError,
        ["beta_2", r"\[0, 1\)", "got 1"],
    ),
    "gradients for other variables": (
        in_graph(lambda: optimize.SgdOptimizer(0.1).apply_grads([x()], [mtf.variable("w", [HIDDEN])])),
        mtf.GraphError,
        [r"\[batch:8, inner:4\]", r"w: f32\[hidden:6\]"],
    ),
    # lowering and simulating
    "lowering of nothing": (mtf.lower, mtf.GraphError, ["nothing to lower", "outputs", "updates"]),
    "output that is not a tensor": (lambda: mtf.lower({"loss": 3.0}), mtf.GraphError, ["'loss'", "float 3.0"]),
    "updates that are tensors": (
        in_graph(lambda: mtf.lower(updates=[x()])),
        mtf.GraphError,
        ["updates", "mtf.assign", r"x: f32\[batch:8, inner:4\]"],
    ),
    "updates that are one update": (
        in_graph(lambda: mtf.lower(updates=mtf.assign(w := mtf.variable("w", []), w + 1))),
        mtf.GraphError,
        ["list", "assign"],
    ),
    "unknown precision": (lambda: lowered(precision="bf16"), mtf.GraphError, ["'default' or 'highest'", "'bf16'"]),
    "unknown executor": (lambda: simulated(executor="quick"), mtf.GraphError, ["'fast' or 'exact'", "'quick'"]),
    "seed that is not an integer": (lambda: simulated(seed=0.5), mtf.GraphError, ["seed", "integer", "0.5"]),
    "simulation of a tensor": (in_graph(lambda: mtf.simulate(x())), mtf.GraphError, ["mtf.lower", "Tensor"]),
    "step of what is not a program": (lambda: simulated().run("eval"), mtf.GraphError, ["mtf.lower", "str 'eval'"]),
    "unknown slice size": (
        lambda: simulated(slice="v3-9"),
        mtf.SliceError,
        ["'v3-9'", "cores", "v3-8, v3-16, v3-32"],
    ),
    "unknown chip": (lambda: simulated(slice="v99-8"), mtf.SliceError, ["'v99'", "v2, v3"]),
    "no name of a slice": (lambda: simulated(slice=8), mtf.SliceError, ["8", "'v3-8'"]),
    "slice of another size than the mesh": (
        lambda: mtf.simulate(lowered("rows:2;cols:2", "batch:rows"), "v3-8"),
        mtf.SliceError,
        ["rows:2;cols:2", "4 positions", "v3-8", "8 devices", "4 chips"],
    ),
    "explanation of a graph": (lambda: mtf.explain(mtf.Graph()), mtf.GraphError, ["mtf.lower", "Graph"]),
}


def test_there_are_mistakes_enough():
    assert len(MISTAKES) >= 50


@each("mistake", list(MISTAKES))
def test_a_mistake_is_explained(mistake):
    assert_explained(MISTAKES[mistake], mistake)


def test_a_report_holds_what_the_error_holds():
    with mtf.Graph():
        report = mtf.check(*training(), "rows:3;cols:4", "batch:rows;hidden:cols;clases:rows;inner:col")
    assert not report.ok
    assert len(report.faults) == 4


def test_an_error_is_also_of_its_builtin_kind():
    for kind, builtin in {
        mtf.FeedError: ValueError,
        mtf.GraphError: ValueError,
        mtf.ShapeError: ValueError,
        mtf.LayoutError: ValueError,
        mtf.SliceError: ValueError,
        mtf.NotFiniteError: ArithmeticError,
    }.items():
        assert issubclass(kind, mtf.MeshlibError)
        assert issubclass(kind, builtin)


# ---------------------------------------------------------------- junk

JUNK: list[Callable[[], object]] = [
    lambda: None,
    lambda: "",
    lambda: "x",
    lambda: "batch",
    lambda: "batch:r",
    lambda: "ä b\n",
    lambda: b"bytes",
    lambda: 0,
    lambda: 1,
    lambda: -3,
    lambda: 10**30,
    lambda: 1.5,
    lambda: float("nan"),
    lambda: float("inf"),
    lambda: 1j,
    lambda: True,
    lambda: np.float32(0.5),
    lambda: np.int64(3),
    lambda: np.bool_(True),
    lambda: np.str_("x"),
    lambda: np.ones(3),
    lambda: np.ones((8, 4)),
    lambda: np.array("x"),
    lambda: np.array([None]),
    lambda: [],
    lambda: [1],
    lambda: [None, "x"],
    lambda: ["batch:r"],
    lambda: (1, 2),
    lambda: [[1], [2, 3]],
    lambda: {},
    lambda: {"a": None},
    lambda: {3: "x"},
    lambda: {"batch"},
    lambda: object(),
    lambda: lambda *args: None,
    lambda: iter([1]),
    lambda: BATCH,
    lambda: [BATCH],
    lambda: OTHER_HIDDEN,
    lambda: mtf.Shape([BATCH, INNER]),
    lambda: mtf.Mesh("r:2"),
    lambda: mtf.LayoutRules("batch:r"),
    lambda: mtf.Graph(),
    lambda: x(name="junk"),
    lambda: [x(name="junk")],
    lambda: ints(name="junk_ids"),
    lambda: x(BATCH, name="junk") > 0,
    lambda: x(name="junk").operation,
    lambda: mtf.lower([x(name="junk")]),
]
DATA = (  # what the library makes; users read it
    "Collective", "Graph", "OnJax", "Operation", "Program", "Simulation", "Tensor",
)  # fmt: skip
MEASURED = ("measure_chip",)  # takes seconds to time the devices that are there


def public() -> dict[str, Callable[..., object]]:
    found = {}
    for prefix, module in (("", mtf), ("layers.", layers), ("optimize.", optimize), ("initializers.", initializers)):
        own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__]
        for name in own if module is initializers else public_names(module):
            thing = getattr(module, name)
            if isinstance(thing, types.ModuleType) or not callable(thing) or name.startswith("_"):
                continue
            if module is mtf and name in (*DATA, *MEASURED):
                continue
            if module is initializers and name in (
                "as_initializer",
                "draw",
                "fold",
                "limits",
                "make_key",
            ):  # for the library's own use
                continue
            if not (inspect.isclass(thing) and (issubclass(thing, BaseException) or inspect.isabstract(thing))):
                found[prefix + name] = thing
    return found


PUBLIC = public()


def parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    return [
        p for p in inspect.signature(function).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def volume() -> mtf.Tensor:
    """A batch of volumes, or of images with one dim more."""
    return mtf.input("volume", [BATCH, *(mtf.Dimension(d, 12) for d in ("depth", "height", "width")), CLASSES])


# Values that parameters take, in most functions, and in some.
SANE: dict[str, Callable[[], object]] = {
    "x": x, "x1": x, "a": x, "logits": x, "targets": lambda: x(name="targets"), "loss": x, "weights": x,
    "x2": lambda: x(name="x2"), "b": lambda: x(name="x2"), "condition": lambda: x(name="c") > 0,
    "if_true": lambda: x(name="t"), "if_false": lambda: 0.0, "updates": lambda: [], "indices": ints,
    "xs": lambda: [x(name="x1"), x(name="x2")], "ys": lambda: [x()],
    "variable": lambda: mtf.variable("w", [BATCH, INNER]),
    "value": lambda: 1.0, "shape": lambda: [BATCH, INNER], "dims": lambda: [BATCH], "name": lambda: "some",
    "size": lambda: 4, "dim": lambda: BATCH, "output_dim": lambda: CLASSES, "reduced_dim": lambda: BATCH,
    "vocab_dim": lambda: INNER, "new_dims": lambda: [CLASSES], "new_shape": lambda: [INNER, BATCH],
    "old_name": lambda: "batch", "new_name": lambda: "rows", "begin": lambda: 0, "slice_dim_name": lambda: "batch",
    "paddings": lambda: [1, 1], "dim_name": lambda: "batch", "dtype": lambda: "float32",
    "layout": lambda: "batch:r", "split_dim": lambda: BATCH, "num_or_size_splits": lambda: 2,
    "concat_dim_name": lambda: "batch", "stride": lambda: 1, "learning_rate": lambda: 0.1, "grads": lambda: [x()],
    "max_norm": lambda: 1.0, "decay_steps": lambda: 2,
    "mesh": lambda: "r:2", "axes": lambda: [("r",), ()], "rules": lambda: "batch:r", "lr": lambda: 0.1,
    "peak": lambda: 0.1, "warmup_steps": lambda: 2, "is_training": lambda: True, "rate": lambda: 0.5,
    "program": lambda: mtf.lower([x()]), "collectives": lambda: (), "outputs": lambda: [x()],
    "input_dims": lambda: [BATCH], "output_shape": lambda: [BATCH, INNER], "disable_positional_args": lambda: None,
    "trips": lambda: 2, "body": lambda: lambda v: v, "inputs": lambda: [x()],
}  # fmt: skip
BITWISE = [n for n in public_names(mtf) if n.startswith("bitwise_") or (n.endswith("_shift") and n != "dynamic_shift")]
CONVOLUTIONS = [n for n in public_names(mtf) if "conv" in n and "us_" not in n]


def filters(function: str) -> mtf.Tensor:
    """Filters for a `volume`."""
    count = 2 if "2d" in function else int(function[4])
    windows = [mtf.Dimension(n, 3) for n in ("fd", "fh", "fw")][-count:]
    ends = [HIDDEN, CLASSES] if "transpose" in function else [CLASSES, HIDDEN]
    return mtf.input("filters", [*windows, *(ends[:1] if "depthwise" in function else ends)])


SANE_FOR: dict[tuple[str, str], Callable[[], object]] = {
    ("assign", "value"): lambda: x(name="value"), ("gather", "weights"): lambda: x(VOCAB, HIDDEN),
    ("gather", "dim"): lambda: VOCAB, ("scatter_add", "updates"): x, ("scatter_add", "dim"): lambda: VOCAB,
    ("scatter_add", "output_shape"): lambda: [VOCAB], ("logical_not", "x"): lambda: x() > 0,
    ("logical_and", "x1"): lambda: x() > 0, ("logical_and", "x2"): lambda: x(name="x2") > 0,
    ("logical_or", "x1"): lambda: x() > 0, ("logical_or", "x2"): lambda: x(name="x2") > 0,
    **{(n, arg): lambda arg=arg: x(name=arg, dtype="int32") for n in BITWISE for arg in ("x1", "x2")},
    ("while_loop", "inputs"): lambda: [x()], ("shift", "dim"): lambda: BATCH, ("shift", "offset"): lambda: 1,
    ("shift", "wrap"): lambda: False,
    ("logical_xor", "x1"): lambda: x() > 0, ("logical_xor", "x2"): lambda: x(name="x2") > 0,
    ("reduce_all", "x"): lambda: x() > 0, ("reduce_any", "x"): lambda: x() > 0,
    ("cond", "pred"): lambda: mtf.reduce_any(x() > 0), ("cond", "true_fn"): lambda: lambda: x(name="t"),
    ("cond", "false_fn"): lambda: lambda: x(name="f"), ("clip_by_value", "clip_value_min"): lambda: 0,
    ("clip_by_value", "clip_value_max"): lambda: 0.5, ("pool", "windows"): lambda: {"batch": 2},
    ("dynamic_shift", "offset"): lambda: mtf.constant(1, [INNER], "int32"), ("dynamic_shift", "wrap"): lambda: True,
    ("replace_dimensions", "tensor_or_shape"): x, ("replace_dimensions", "old_dim_or_dims"): lambda: BATCH,
    ("replace_dimensions", "new_dim_or_dims"): lambda: mtf.Dimension("rows", BATCH.size),
    ("zeros_like", "t"): x, ("ones_like", "t"): x,
    ("max_pool", "windows"): lambda: {"batch": 2}, ("avg_pool", "windows"): lambda: {"batch": 2},
    ("resize", "sizes"): lambda: {"batch": 2}, ("space_to_depth", "block_size"): lambda: 2,
    ("depth_to_space", "block_size"): lambda: 1, ("space_to_depth", "x"): volume, ("depth_to_space", "x"): volume,
    **{(n, "x"): volume for n in CONVOLUTIONS}, **{(n, "filters"): lambda n=n: filters(n) for n in CONVOLUTIONS},
    **{(f"layers.{n}", "x"): volume for n in CONVOLUTIONS}, **{(f"layers.{n}", "output_dim"): lambda: HIDDEN
                                                             for n in CONVOLUTIONS},
    **{(f"layers.{how}_pool{n}d", "x"): volume for how in ("max", "avg") for n in (2, 3)},
}  # fmt: skip


def sane(function: str, name: str) -> object:
    """A value that the parameter takes, in most functions; junk for a name that is new here."""
    return SANE_FOR.get((function, name), SANE.get(name, lambda: None))()


def known(function: str, name: str) -> bool:
    """Whether `sane` has a value for the parameter."""
    with mtf.Graph():
        return sane(function, name) is not None or name == "disable_positional_args"


def call(function: Callable[..., object], given: dict[str, Callable[[], object]]) -> None:
    """Only a MeshlibError may come out; a TypeError only if Python itself refuses the call."""
    with mtf.Graph():
        arguments: dict[str, object] = {}
        try:
            arguments.update((name, make()) for name, make in given.items())
            function(**arguments)
        except mtf.MeshlibError as fault:
            if not 0 < len(str(fault)) < 4000:
                raise
        except Exception as fault:
            if not (isinstance(fault, TypeError) and re.search(r"missing \d+ required", str(fault))):
                raise AssertionError(f"{getattr(function, '__name__', function)}({arguments}): {fault!r}") from fault


@each("name", list(PUBLIC), parts=8)
def test_junk_gives_an_error_of_ours(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some functions write files
    function = PUBLIC[name]
    names = [p.name for p in parameters(function)]
    needed = [p.name for p in parameters(function) if p.default is p.empty]
    good: dict[str, Callable[[], object]] = {n: (lambda n=n: sane(name, n)) for n in needed}
    call(function, {})
    # One argument wrong, the others right; then everything wrong, in some combinations.
    for at, n in enumerate(names):
        for junk in some(JUNK, JUNK[at % 4 :: 4]):
            call(function, {**good, n: junk})
    rng = np.random.default_rng(len(name))
    for _ in range(draws(4, 200)):
        call(function, {n: JUNK[int(rng.integers(len(JUNK)))] for n in (needed or names)})


def test_the_junk_test_knows_what_is_right():
    """Of most functions; else one argument after the other would be blamed for what is wrong with another."""
    right = 0
    for name, function in PUBLIC.items():
        needed = [p.name for p in parameters(function) if p.default is p.empty]
        if all(known(name, n) for n in needed):
            with mtf.Graph(), contextlib.suppress(mtf.MeshlibError):
                function(**{n: sane(name, n) for n in needed})
                right += 1
    assert right >= 80


@each("junk", range(len(JUNK)))
def test_junk_beside_a_tensor(junk):
    operators = [
        lambda a, b: a + b, lambda a, b: b - a, lambda a, b: a * b, lambda a, b: b / a, lambda a, b: a**b,
        lambda a, b: a < b, lambda a, b: a >= b,
    ]  # fmt: skip
    for operator in operators:
        call(lambda a, b, operator=operator: operator(a, b), {"a": x, "b": JUNK[junk]})


@each("junk", range(len(JUNK)))
def test_junk_at_run_time(junk):
    with mtf.Graph():
        thing = JUNK[junk]()
    sim = simulated()
    for use in (
        lambda: sim.step(thing),
        lambda: sim.step(images=thing, labels=LABELS),
        lambda: sim.step(images=IMAGES, labels=thing),
        lambda: sim.run(thing) if not isinstance(thing, mtf.Program) else None,
        lambda: sim.state[thing],
        lambda: sim.state.__setitem__("w1", thing),
        lambda: sim.state.__setitem__(thing, IMAGES),
        lambda: sim.shard(thing, (0,)),
        lambda: sim.shard("w1", thing),
        lambda: thing in sim.state,
    ):
        before = {name: sim.state[name] for name in sim.state}
        try:
            use()
        except mtf.MeshlibError:
            for name, value in before.items():
                np.testing.assert_array_equal(sim.state[name], value)


# ---------------------------------------------------------------- a step that fails changes nothing


@pytest.mark.parametrize("executor", ["fast", "exact"])
@pytest.mark.parametrize("mesh", ["device:1", "r:2;c:2"])
def test_a_failed_step_changes_nothing(executor, mesh):
    program = lowered(mesh, "" if mesh == "device:1" else "batch:r;hidden:c")
    rng = np.random.default_rng(0)
    feeds = [{"images": rng.normal(size=(8, 4)), "labels": rng.integers(0, 5, 8)} for _ in range(6)]
    smooth, disturbed = (mtf.simulate(program, seed=4, executor=executor) for _ in range(2))
    bad = [
        ({"images": with_entry(np.nan, 0, 0), "labels": LABELS}, mtf.NotFiniteError),
        ({"images": with_entry(np.inf, 7, 3), "labels": LABELS}, mtf.NotFiniteError),
        ({"images": IMAGES, "labels": np.full(8, 5)}, mtf.FeedError),
        ({"images": IMAGES, "labels": np.full(8, -1)}, mtf.FeedError),
        ({"images": IMAGES}, mtf.FeedError),
    ]
    kinds = itertools.cycle(bad)
    for feed in feeds:
        before = {name: disturbed.state[name] for name in disturbed.state}
        for _ in range(2):
            spoiled, kind = next(kinds)
            with pytest.raises(kind):
                disturbed.step(spoiled)
            for name, value in before.items():
                assert disturbed.state[name].tobytes() == value.tobytes(), name
        assert smooth.step(feed)["loss"] == disturbed.step(feed)["loss"]
        for name in smooth.state:
            assert smooth.state[name].tobytes() == disturbed.state[name].tobytes(), name
    assert smooth.state["step"] == disturbed.state["step"] == len(feeds)


def test_names_from_elsewhere_are_told_what_stands_for_them() -> None:
    """What people bring along from NumPy, JAX and Mesh TensorFlow."""
    batch = mtf.Dimension("batch", 4)
    rows = {
        "np.exp takes no tensor": lambda x: np.exp(x),
        "write mtf.maximum": lambda x: np.maximum(x, 0),
        "mtf.reduce_sum": lambda x: x.sum(),
        "mtf.cast": lambda x: x.astype("int32"),
        "leave it out: operations know no mesh, which mtf.lower(": lambda x: x.mesh,
        "dims go by name": lambda x: mtf.reduce_sum(x, axis=0),
        "operations know no mesh": lambda x: mtf.relu(x, mesh="rows:2"),
        "did you mean 'reduced_dim'": lambda x: mtf.reduce_sum(x, reduce_dim=batch),
        "write mtf.variable": lambda x: mtf.get_variable,
        "is it a mesh": lambda x: mtf.lower(x, "rows:2", "batch:rows"),
        "use rows:8": lambda x: mtf.estimate(mtf.lower(x, mesh="rows:4", layout="batch:rows"), "v3-8"),
        "mtf.gather or mtf.one_hot": lambda x: mtf.einsum([x, mtf.input("ids", [batch], "int32")]),
    }
    for text, wrong in rows.items():
        with mtf.Graph(), pytest.raises((mtf.MeshlibError, AttributeError, TypeError)) as caught:
            wrong(mtf.input("x", [batch]))
        assert text in str(caught.value), text


def test_arrays_and_tensors_still_mix() -> None:
    with mtf.Graph():
        x = mtf.input("x", [])
        y = np.float32(2) * x - np.float64(1) + (1 / (np.float32(4) + x))
        sim = mtf.simulate(mtf.lower({"y": y}))
    assert float(sim.step(x=4.0)["y"]) == 7.125


def test_the_repr_of_a_program_is_a_line() -> None:
    with mtf.Graph():
        program = mtf.lower(mtf.reduce_sum(mtf.input("x", [mtf.Dimension("b", 4)])), mesh="r:2", layout="b:r")
    assert len(repr(program)) < 200
    assert "1 collective, " in repr(program)
