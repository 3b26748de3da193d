"""Mistakes in searches, data, training and imports: what is said of each.

Each is an error of ours that says what is wrong, with both numbers, and what is right. `test_bad_calls` has more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from meshlib import models, optimize
from tests.command.mistakes import assert_told
from tests.effort import each

D = mtf.Dimension
B = D("batch", 8)
TINY = models.preset("gpt2").reduced()
A = {"x": np.ones(16, np.float32)}
HERE = Path(__file__).parent


def matmul() -> tuple[dict[str, mtf.Tensor], list[mtf.Operation]]:
    x, w = mtf.input("x", [B, D("k", 4)]), mtf.variable("w", [D("k", 4), D("n", 6)])
    loss = mtf.reduce_mean(mtf.einsum([x, w]))
    return {"loss": loss}, optimize.SgdOptimizer(0.1).minimize(loss)


def searched(**options: Any) -> object:
    return mtf.search(matmul, "v5e-8", seconds=None, workers=1, **options)


@cache
def loss_program() -> mtf.Program:
    with mtf.Graph():
        x, w = mtf.input("x", [B]), mtf.variable("w", [], 1.0)
        loss = mtf.reduce_mean(mtf.square(x - w), name="loss")
        return mtf.lower({"loss": loss}, optimize.SgdOptimizer(0.1).minimize(loss))


def batches() -> object:
    return mtf.data.arrays(A).batch(8).repeat()


def trained(data: object = None, steps: Any = 2, **options: Any) -> object:
    return mtf.train(loss_program(), batches() if data is None else data, steps, progress=False, **options)


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    # search
    "search build None": (
        lambda: mtf.search(None, "v5e-8"),
        "search: build must be a function that returns*a model's config (mtf.models.preset), got None",
    ),
    "search slice int": (
        lambda: mtf.search(matmul, 8),
        "search: 8 is not a slice name; write a TPU (v1, v2,*a size, e.g. 'v3-8', 'v4-4x4x8', '2*v5e-256'",
    ),
    "search axes str": (lambda: searched(axes="3"), "axes must be an integer, got str '3'"),
    "search workers 0": (lambda: mtf.search(matmul, "v5e-8", workers=0), "search: workers must be at least 1, got 0"),
    "search seconds nan": (
        lambda: mtf.search(matmul, "v5e-8", seconds=float("nan")),
        "seconds must be a finite number, got float nan",
    ),
    "a dim as a number": (lambda: 2 * B, "dimension batch:8 is a name and a size, not a number; take its .size"),  # type: ignore[operator]
    "axes in brackets": (
        lambda: mtf.LayoutRules("batch:(a,b)"),
        "several axes are joined by '+', as in batch:rows+cols",
    ),
    "a device as a text": (
        lambda: mtf.simulate(loss_program()).shard("w", "0"),
        "a device of mesh * must be its number, or a coordinate with an integer for each axis, got '0'",
    ),
    "an equation of einsum": (
        lambda: mtf.einsum("bk,kn->bn", B),  # type: ignore[arg-type]
        "dims go by name; write mtf.einsum([x, w], output_shape=...), not 'bk,kn->bn'",
    ),
    "a collective in no list": (
        lambda: mtf.testing.assert_collectives(loss_program(), "all_reduce over a"),  # type: ignore[arg-type]
        "must be a list, such as ['all_reduce over rows'], got 'all_reduce over a'",
    ),
    "a graph with a name": (
        lambda: mtf.Graph("net"),
        "Graph (*): it takes none by position, got 1; *mtf.Graph() as graph",
    ),
    "a balance in words": (
        lambda: mtf.Balance(stationary="no"),  # type: ignore[arg-type]
        "stationary must be True or False, got str 'no'",
    ),
    "a balance of nothing": (
        lambda: mtf.Balance(mxu_flops_per_byte=0.0),
        "mxu_flops_per_byte must be positive, got 0.0",
    ),
    "layout and mesh exchanged": (
        lambda: mtf.lower([mtf.ones("batch:8")], [], "batch:d", "d:8"),
        "axis 'batch': size 'd' is not an integer >= 1; is this a layout? A mesh is text like 'rows:2;cols:4'",
    ),
    "an estimate in place of its program": (
        lambda: mtf.explain(mtf.estimate(loss_program(), "v5e-1")),  # type: ignore[arg-type]
        "explain: expected a program from mtf.lower, got Estimate *; write .program of it",
    ),
    "a page as a picture": (
        lambda: mtf.estimate(loss_program(), "v5e-1").report("plan.pdf"),
        "Estimate.report: the path must end in .html, got 'plan.pdf'",
    ),
    "a builder in place of its program": (
        lambda: mtf.lower(lambda: None, mesh="d:8"),  # type: ignore[arg-type]
        "call it: mtf.lower(*build(), ...)",
    ),
    "search forbid unknown": (
        lambda: searched(forbid="btach"),
        "search: forbid has dim 'btach', which the program does not have; did you mean 'batch'?",
    ),
    "search per unknown": (
        lambda: searched(per="tokens"),
        "search: per has dim 'tokens', which the program does not have; there are batch, k, n",
    ),
    "search objective returns text": (
        lambda: searched(objective=lambda e: "fast"),
        "objective must be a finite number, got str 'fast'",
    ),
    "search objective nan": (
        lambda: searched(objective=lambda e: float("nan")),
        "objective must be a finite number, got float nan",
    ),
    "search choices empty": (
        lambda: searched(choices={"remat": []}),
        "search: choices['remat'] is empty; give at least one value, or leave it out",
    ),
    "search choices text": (
        lambda: mtf.search(lambda remat: matmul(), "v5e-8", choices={"remat": 3}, seconds=None, workers=1),
        "choices['remat'] must be a list, got int 3",
    ),
    "search resume dir": (
        lambda: searched(resume=HERE),
        "search: *tests/core can't be read: it is a folder; name a file in it",
    ),
    "search resume nowhere": (
        lambda: searched(resume="/nowhere/x.json"),
        "search: /nowhere/x.json can't be written: No such file or directory; there is no folder /nowhere: make",
    ),
    "search compiler": (
        lambda: searched(compiler="xla"),
        "compiler must be an mtf.Compiler, got str 'xla'; did you mean 'xla-tpu'?",
    ),
    "search config without batch": (
        lambda: mtf.search(TINY, "v5e-8", seconds=None, workers=1),
        "search: a model needs batch, at least 1, got None",
    ),
    "search also not mesh": (
        lambda: searched(also=[("data:0", "batch:data")]),
        "axis 'data': size '0' is not an integer >= 1",
    ),
    "search also dim": (
        lambda: searched(also=[("data:8", "bathc:data")]),
        "search: also has a rule for dim 'bathc', which the program does not have; did you mean 'batch'?",
    ),
    "search build returns one": (
        lambda: mtf.search(lambda: matmul()[0], "v5e-8", seconds=None, workers=1),
        "search: build must return (outputs, updates), as mtf.lower takes them, got {'loss': multiply: f32[]}",
    ),
    # data
    "data no fields": (lambda: mtf.data.arrays({}), "expected a dict of names to arrays, got dict {}"),
    "data scalar": (lambda: mtf.data.arrays({"x": 3.0}), "'x' must be a NumPy array, got float; use np.asarray"),
    "data batch float": (lambda: mtf.data.arrays(A).batch(2.5), "size must be an integer >= 1, got 2.5"),
    "data remainder": (
        lambda: mtf.data.arrays(A).batch(3, remainder="keep"),
        "remainder must be 'drop' or 'pad', got 'keep'",
    ),
    "data take negative": (lambda: mtf.data.arrays(A).take(-1), "count must be an integer >= 1, got -1"),
    "data skip text": (lambda: mtf.data.arrays(A).skip("2"), "count must be an integer >= 0, got '2'"),
    "data skip all": (
        lambda: list(mtf.data.arrays(A).skip(99).batch(2)),
        "count must be less than the 16 examples of arrays, got 99",
    ),
    "data repeat 0": (lambda: mtf.data.arrays(A).repeat(0), "epochs must be an integer >= 1, got 0"),
    "data prefetch negative": (lambda: mtf.data.arrays(A).prefetch(-1), "count must be an integer >= 0, got -1"),
    "data shuffle seed": (lambda: mtf.data.arrays(A).shuffle("x"), "seed must be an integer >= 0, got 'x'"),
    "data batch twice": (
        lambda: mtf.data.arrays(A).batch(2).batch(2),
        "the data have a batch already; start from the data without it",
    ),
    "data map None": (lambda: mtf.data.arrays(A).map(None), "expected a function of an example, got None"),
    "data filter all": (
        lambda: list(mtf.data.arrays(A).filter(lambda e: False).batch(2).repeat()),
        "data: arrays: 16 examples, filter(*), batch(2,*those of an epoch: filters leave too few;",
    ),
    "data ragged": (
        lambda: list(mtf.data.arrays({"i": np.arange(4)}).map(lambda e: {"x": np.ones(int(e["i"]) + 1)}).batch(2)),
        "batch: 'x' of example 0 is float64 [1], of example*batches need one shape: use a map, or pad= for sequences",
    ),
    "data field dtype": (
        lambda: mtf.data.Field("float33"),
        "dtype must be that of numbers, 'image', 'text' or 'bytes', got 'float33'; did you mean 'float32'?",
    ),
    "data field shape": (
        lambda: mtf.data.Field("float32", (-1,)),
        "shape must be a tuple of sizes, or None, got (-1,)",
    ),
    "data text missing": (lambda: mtf.data.text("/nowhere.txt"), "records: no file /nowhere.txt; check the path"),
    "data folder empty": (lambda: mtf.data.folder(HERE, 32), "data: * of class/name.png has no examples; check"),
    "data map raises": (
        lambda: list(mtf.data.arrays(A).map(lambda e: 1 / 0).batch(2)),
        "data: map(*) failed at example 0 of arrays: ZeroDivisionError: division by zero; see its traceback",
    ),
    "records write": (
        lambda: mtf.records.write(HERE / "t@0", [b"a"]),
        "records: '*t@0' has 0 files; there may be 1 to 99999",
    ),
    "records write text": (
        lambda: mtf.records.write(HERE / "t", "abc"),
        "records: expected several records, got str 'abc'",
    ),
    "records encode": (
        lambda: mtf.records.encode({"x": object()}),
        "records.encode: feature 'x' must be bytes, text,*of one of these, got object <object object at *",
    ),
    # train
    "train steps float": (lambda: trained(steps=2.5), "steps must be an integer, got float 2.5"),
    "train program": (
        lambda: mtf.train("p", batches(), 2),
        "run must be a run from mtf.simulate or mtf.on_jax, got 'p'",
    ),
    "train log_every": (lambda: trained(log_every=0), "log_every must be at least 1, got 0"),
    "train best unknown": (
        lambda: trained(best="acc"),
        "best='acc' needs evaluations; give evaluation=mtf.Evaluation(...)",
    ),
    "train on_nan": (lambda: trained(on_nan="ignore"), "on_nan must be 'stop' or 'skip', got 'ignore'"),
    "train save_every negative": (
        lambda: trained(folder=HERE / "r", save_every=-1),
        "save_every must be at least 1, got -1",
    ),
    "train patience 0": (lambda: trained(patience=0), "patience must be at least 1, got 0"),
    "train evaluation as program": (
        lambda: trained(evaluation=loss_program()),
        "evaluation must be an mtf.Evaluation, got <Program: ",
    ),
    "train evaluation every 0": (
        lambda: mtf.Evaluation(program=loss_program(), data=mtf.data.arrays(A).batch(8), every=0),
        "every must be an integer >= 1, got 0",
    ),
    "train data None": (
        lambda: mtf.train(loss_program(), None, 2),
        "data must be mtf.data, or an iterable of dicts, got None",
    ),
    "train feed missing": (
        lambda: trained(data=[{"y": np.ones(8, np.float32)}]),
        "missing feed 'x', float32[batch:8] (*); give the program's inputs: x",
    ),
    "train feed dtype": (
        lambda: trained(data=[{"x": np.ones(8, np.int32)}]),
        "expected float32, got int32; convert it yourself, as in array.astype(np.float32)",
    ),
    "train steps_per_run": (lambda: trained(steps_per_run=0), "steps_per_run must be at least 1, got 0"),
    "train report": (lambda: trained(report="print"), "report must be a function of a row, got 'print'"),
    "train folder is file": (
        lambda: trained(folder=__file__),
        "train: folder '*.py' can't be created: File exists; name another",
    ),
    "train seed": (lambda: mtf.simulate(loss_program(), seed="a"), "seed must be an integer, got str 'a'"),
    "train executor": (
        lambda: mtf.simulate(loss_program(), executor="slow"),
        "executor must be 'fast' or 'exact', got 'slow'",
    ),
    "save nowhere": (
        lambda: mtf.save(mtf.simulate(loss_program()), "/nowhere/x/y"),
        "save: /nowhere/x/y can't be written: No such file or directory; there is no folder /nowhere: make it",
    ),
    "save what": (
        lambda: mtf.save({}, HERE / "d"),
        "save: expected a simulation from mtf.simulate, got dict {}; write mtf.save(sim, path)",
    ),
    "state assign shape": (
        lambda: mtf.simulate(loss_program()).state.__setitem__("w", np.ones(3)),
        "state['w']: expected shape [] for [], got [3]",
    ),
    "state assign name": (
        lambda: mtf.simulate(loss_program()).state.__setitem__("v", 1.0),
        "no variable 'v'; known: step, w",
    ),
}


@each("code, text", MISTAKES)
def test_a_mistake_is_told(code: Callable[[], object], text: str) -> None:
    assert_told(code, text)


def imported(function: str, x: Any = None, **options: Any) -> Callable[[], object]:
    """The import of a function of JAX, as text, so that the table needs no JAX."""

    def run() -> object:
        import jax

        return mtf.from_jax(
            eval(function, {"jax": jax, "jnp": jax.numpy}), np.ones(4, "f") if x is None else x, **options
        )

    return run


OF_IMPORTS: dict[str, tuple[Callable[[], object], str]] = {
    "names of no argument": (
        imported("lambda w: w.sum()", names={"q": "batch"}),
        "names: no argument is called 'q'; there are w",
    ),
    "names without paths": (
        imported("lambda w: w.sum()", names=["a"]),
        "names must be a dict of paths to names of axes, got ['a']",
    ),
    "an argument before the first": (
        imported("lambda w: w.sum()", argnums=-3),
        "argnums -3 must be in -1 to 0, of 1 arguments",
    ),
    "an argument too few": (
        imported("lambda w, x: w.sum()"),
        "the function takes (w, x), got 1 arguments: missing a required argument: 'x'; give an array or a",
    ),
    "an unknown primitive": (
        imported("lambda w: jnp.linalg.eigh(w)[0].sum()", np.eye(4)),
        "no counterpart of eigh (*): an unknown primitive; use functions that have one",
    ),
    "a callback": (
        imported("lambda w: jax.pure_callback(abs, jax.ShapeDtypeStruct((4,), 'f'), w).sum()"),
        "pure_callback*: say what it computes, as a JAX function: from_jax(..., kernels=",
    ),
    "a word for float16": (
        imported("lambda w: w.sum()", float16="bf16"),
        "float16 must be 'bfloat16' or left out, got 'bf16'",
    ),
    "kernels without names": (
        imported("lambda w: w.sum()", kernels=[1]),
        "kernels must be a dict of names to JAX functions, got [1]",
    ),
    "a loop without bound": (
        imported("lambda w: jax.lax.while_loop(lambda c: c.sum() < 10, lambda c: c * 2, w).sum()"),
        "a loop whose number of trips depends on data; give it a bound*most_trips=100",
    ),
}


@each("code, text", OF_IMPORTS)
def test_a_mistake_in_an_import_is_told(code: Callable[[], object], text: str) -> None:
    pytest.importorskip("jax")
    assert_told(code, text)
