"""Graphs with alike layers are lowered as a short graph, and nothing of the program tells."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

import meshlib as mtf
from meshlib.lowering import one_layout, repetition, unrolling
from meshlib.lowering.repetition import Irregular
from tests.effort import draws, some

LAYERS = 13
BATCH, D = mtf.Dimension("batch", 8), mtf.Dimension("d", 8)

Built = tuple[dict[str, mtf.Tensor], list[mtf.Operation]]


def chain(
    width: Callable[[int], int] = lambda n: 16,
    middle: bool = False,
    layers: int = LAYERS,
    sums: bool = False,
    units: bool = False,
) -> Built:
    """Dense layers with norms and dropout, one after another, and their update by Adam."""
    with mtf.Graph():
        x = mtf.input("x", [BATCH, D])
        mask = mtf.input("mask", [BATCH])
        h, outputs, units_written = x, {}, []
        for n in range(layers):
            f = mtf.Dimension("f", width(n))
            if sums:
                first, second = (mtf.reduce_sum(f(h), output_shape=[D]) for f in (mtf.relu, mtf.square))
                h = h + mtf.sigmoid(first) * mtf.tanh(second)
            normal = h * mtf.rsqrt(mtf.reduce_mean(mtf.square(h), output_shape=[BATCH]) + 1e-5) * mask
            wi = mtf.variable(f"layer_{n}/wi", [D, f])
            if units:  # linked to other operations by the weight alone, which has no choice
                unit = wi * mtf.rsqrt(mtf.reduce_mean(mtf.square(wi)))
                units_written.append(mtf.assign(mtf.variable(f"layer_{n}/unit", [D, f], trainable=False), unit))
            inner = mtf.relu(mtf.einsum([normal, wi], output_shape=[BATCH, f]))
            inner = mtf.dropout(inner, is_training=True, keep_prob=0.9)
            h = h + mtf.einsum([inner, mtf.variable(f"layer_{n}/wo", [f, D])], output_shape=[BATCH, D])
            h = h + mtf.variable(f"layer_{n}/bias", [D])
            if middle and n == LAYERS // 2:
                outputs["middle"] = mtf.reduce_sum(h, name="middle")
        outputs["loss"] = mtf.reduce_mean(mtf.square(h), name="loss")
        updates = mtf.optimize.AdamOptimizer(1e-2).minimize(outputs["loss"])
    return outputs, [*updates, *units_written]


def random_layers(seed: int) -> Built:
    """Layers of random parts, with random skips over several layers, under a random optimizer or none."""
    rng = random.Random(seed)
    parts = rng.sample(["norm", "batch norm", "bias", "softmax", "gate", "dropout", "sum", "global", "statistic"], 2)
    back, reads, f = rng.choice([0, 0, 1, 2]), rng.random() < 0.5, mtf.Dimension("f", 16)
    with mtf.Graph():
        h, weights = mtf.input("x", [BATCH, D]), mtf.input("weights", [D])
        states, aside, statistics = [h] * 3, mtf.reduce_mean(weights), []
        for n in range(rng.randint(12, 20)):
            inner = mtf.relu(mtf.einsum([h, mtf.variable(f"layer_{n}/wi", [D, f])], output_shape=[BATCH, f]))
            r = mtf.einsum([inner, mtf.variable(f"layer_{n}/wo", [f, D])], output_shape=[BATCH, D])
            for part in parts:
                match part:
                    case "norm":
                        r = r * mtf.rsqrt(mtf.reduce_mean(mtf.square(r), output_shape=[BATCH]) + 1e-3)
                    case "batch norm":
                        r = r - mtf.reduce_mean(r, output_shape=[D])
                        r = r * mtf.rsqrt(mtf.reduce_mean(mtf.square(r), output_shape=[D]) + 1e-3)
                    case "bias":
                        r = r + mtf.variable(f"layer_{n}/bias", [D])
                    case "softmax":
                        r = mtf.softmax(r, D)
                    case "gate":
                        r = r * mtf.sigmoid(mtf.reduce_sum(r, output_shape=[D]))
                    case "dropout":
                        r = mtf.dropout(r, is_training=True, keep_prob=0.8)
                    case "sum":
                        aside = aside + mtf.reduce_mean(mtf.square(r))
                    case "global":
                        r = r * weights
                    case "statistic":
                        mean = mtf.variable(f"layer_{n}/mean", [D], trainable=False)
                        new = mtf.reduce_mean(r, output_shape=[D]) + (0.9 * mean if reads else 0)
                        statistics.append(mtf.assign(mean, new))
            h = h + r + states[-back] if back else h + r
            states.append(h)
        loss = mtf.reduce_mean(mtf.square(h), name="loss") + 0.1 * aside
        optimizer = rng.choice([None, mtf.optimize.SgdOptimizer(0.1), mtf.optimize.AdamOptimizer(1e-2)])
        updates = [] if optimizer is None else optimizer.minimize(loss)
    return {"loss": loss}, [*updates, *statistics]


def content(program: mtf.Program) -> Counter[object]:
    """The instructions by name, with what they take and make, in whatever order."""

    def values(some: tuple[object, ...]) -> object:
        return tuple([(v.tensor.name, v.sharding, v.margins) for v in some])

    launches = Counter(
        (i.opcode, frozenset(values(i.inputs)), frozenset(i.steps), i.region)
        for i in program.instructions
        if len(i.outputs) > 1
    )
    return launches + Counter(
        (type(i), i.opcode, i.operation.name, i.region, values(i.inputs), values(i.outputs))
        for i in program.instructions
        if len(i.outputs) < 2
    )


def both(monkeypatch: pytest.MonkeyPatch, built: Built, layout: str) -> tuple[mtf.Program, mtf.Program, int]:
    """The program as it is lowered, the one lowered operation by operation, and how often layers were inserted."""
    expanded = []
    run = unrolling._Unroller.run
    with monkeypatch.context() as patch:
        patch.setattr(repetition, "LEAST_LAYERS", 7)
        patch.setattr(unrolling._Unroller, "run", lambda self: expanded.append(run(self)) or expanded[-1])
        short = mtf.lower(*built, mesh="rows:2;cols:2", layout=layout)
        patch.setattr(one_layout, "unrolled", None)
        patch.setattr(repetition, "LEAST_LAYERS", 1000)
        whole = mtf.lower(*built, mesh="rows:2;cols:2", layout=layout)
    return short, whole, len(expanded)


LAYOUTS = ["batch:rows;f:cols", "batch:rows;d:rows?;f:cols", "batch:rows", "variables/d:rows;batch:cols"]


@pytest.mark.parametrize("layout", some(LAYOUTS, LAYOUTS[:2]))
def test_the_program_is_that_of_the_whole_graph(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    if layout == LAYOUTS[1]:  # the order is determined once layers are inserted
        monkeypatch.setattr(unrolling, "FLOPS_PER_START", 1e20)
    short, whole, inserted = both(monkeypatch, chain(), layout)
    assert inserted == 1
    assert content(short) == content(whole)
    assert Counter(short.collectives) - Counter(whole.collectives) == Counter()
    assert short.sent_bytes == whole.sent_bytes
    assert short.memory.peak_bytes <= whole.memory.peak_bytes
    assert [*short.variables] == [*whole.variables]
    assert [*short.updates] == [*whole.updates]
    assert short.choice == whole.choice
    x = np.random.default_rng(0).normal(size=(8, 8)).astype("float32")
    losses = []
    for program in (short, whole):
        simulation = mtf.simulate(program)
        losses.append([simulation.step(x=x, mask=x[:, 0])["loss"] for _ in range(2)])
    np.testing.assert_array_equal(*losses)


@pytest.mark.parametrize("seed", range(draws(1, 200)))
def test_random_layers(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    layout = LAYOUTS[seed % len(LAYOUTS)]
    monkeypatch.setattr(repetition, "LEAST_SAVED", 20)
    short, whole, _ = both(monkeypatch, random_layers(seed), layout)
    assert content(short) == content(whole)
    assert short.sent_bytes == whole.sent_bytes
    assert short.memory.peak_bytes <= whole.memory.peak_bytes


def test_layers_that_alternate_are_one_period(monkeypatch: pytest.MonkeyPatch) -> None:
    short, whole, inserted = both(
        monkeypatch, chain(lambda n: 32 if n % 2 else 16, layers=16), "batch:rows;d:rows?;f:cols"
    )
    assert inserted == 1
    assert content(short) == content(whole)


def test_launches_of_several_sums_of_one_layer_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    short, whole, inserted = both(monkeypatch, chain(sums=True), "batch:rows;f:cols")
    assert len([i for i in whole.instructions if len(i.outputs) > 1]) >= LAYERS
    assert inserted == 1
    assert content(short) == content(whole)


def test_operations_without_links_are_priced_in_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    short, whole, inserted = both(monkeypatch, chain(units=True), "variables/d:rows;batch:cols")
    assert inserted == 1
    assert content(short) == content(whole)
    assert short.choice == whole.choice


@pytest.mark.parametrize("seed", [3, 50])
def test_ends_that_change_a_neighbours_choice_leave_layers_alike(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(repetition, "LEAST_SAVED", 20)
    short, whole, inserted = both(monkeypatch, random_layers(seed), LAYOUTS[seed % len(LAYOUTS)])
    assert inserted == 1
    assert content(short) == content(whole)
    assert short.choice == whole.choice


@pytest.mark.parametrize("middle", [True, False], ids=["fetched", "too few alike"])
def test_what_is_not_alike_is_lowered_one_by_one(monkeypatch: pytest.MonkeyPatch, middle: bool) -> None:
    built = chain(lambda n: 32 if n in (4, 9) and not middle else 16, middle)
    short, whole, inserted = both(monkeypatch, built, "batch:rows;f:cols")
    assert inserted == 0
    assert str(short) == str(whole)


def test_where_layers_would_choose_differently_all_are_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise Irregular

    monkeypatch.setattr(one_layout, "repeated_choices", refuse)
    short, whole, inserted = both(monkeypatch, chain(), "batch:rows;f:cols")
    assert inserted == 0
    assert str(short) == str(whole)
