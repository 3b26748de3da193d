"""Sums made of others (`meshlib.lowering.shared_sums`) are those of the unsharded program, in which none is."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from meshlib.core.graph import Operation, Tensor
from meshlib.lowering import one_layout as layout
from meshlib.lowering import shared_sums
from meshlib.lowering.algebra import Algebra, Monomial
from meshlib.program.records import Program
from tests.effort import draws
from tests.lowering.minima.table import D
from tests.lowering.minima_tables import ROWS

A, B, C = D("a", 4), D("b", 8), D("c", 4)
LAYOUTS = (("m:2", "b:m"), ("m:2;n:2", "a:m;b:n"), ("m:2;n:2", "b:m;a:n?;c:n?"), ("m:4", "c:m?;a:m?"))


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """Sums are made of others wherever that can be, whatever it costs; the list has those programs."""
    made: list[Program] = []

    def pays(self: layout.Lowering, other: Program, than: Program) -> bool:
        made.append(other)
        return True

    monkeypatch.setattr(layout, "LITTLE", -1.0)
    monkeypatch.setattr(layout.Lowering, "_is_better", pays)
    return made


def drawn(rng: random.Random) -> tuple[dict[str, Tensor], list[Operation]]:
    """Products, quotients, differences and sums of variables over a few dims, with their gradients."""
    pool: list[Tensor] = []
    for n in range(rng.randint(2, 4)):
        dims = [d for d in (A, B, C) if rng.random() < 0.65]
        pool.append(mtf.variable(f"v{n}", dims, mtf.initializers.random_uniform(0.5, 2.0)))
    variables = len(pool)
    binary: list[Callable[[Tensor, Tensor], Tensor]] = [
        *(3 * [lambda x, y: x * y]),
        lambda x, y: x / y,
        lambda x, y: x + y,
        lambda x, y: x - y,
        lambda x, y: mtf.einsum([x, y], output_shape=[*x.shape, *(d for d in y.shape if d not in x.shape)]),
        lambda x, y: mtf.einsum([x, y], output_shape=[d for d in (A, B, C) if d in x.shape and rng.random() < 0.6]),
    ]
    unary: list[Callable[[Tensor], Tensor]] = [
        lambda x: -x,
        mtf.square,
        mtf.sin,
        lambda x: x * 3.0,
        lambda x: mtf.broadcast(x, [*x.shape, *(d for d in (A, B, C) if d not in x.shape and rng.random() < 0.7)]),
        lambda x: mtf.transpose(x, rng.sample(x.shape.dims, len(x.shape))),
        lambda x: x - mtf.reduce_mean(x, reduced_dim=rng.choice(x.shape.dims)) if x.shape.dims else x,
        lambda x: mtf.reduce_sum(x, reduced_dim=rng.choice(x.shape.dims)) if x.shape.dims else x,
    ]
    for _ in range(rng.randint(4, 10)):
        x, y = rng.choice(pool), rng.choice(pool)
        pool.append(rng.choice(binary)(x, y) if rng.random() < 0.65 else rng.choice(unary)(x))
    found = []
    for _ in range(rng.randint(2, 4)):
        x = rng.choice(pool[variables:]) * rng.choice(pool)
        if x.shape.dims:
            found.append(mtf.reduce_sum(x, reduced_dim=rng.choice(x.shape.dims)))
    outputs = {f"y{n}": mtf.tanh(x * 0.1) for n, x in enumerate(found)}
    loss = mtf.add_n([mtf.constant(0.0, []), *(mtf.reduce_sum(mtf.sin(x * 0.1)) for x in found)])
    return outputs, mtf.optimize.SgdOptimizer(0.1).minimize(loss) if found and rng.random() < 0.6 else []


def test_numbers_of_random_programs(always: list[Program]) -> None:
    for seed in range(draws(5, 1500)):
        rng = random.Random(seed)
        with mtf.Graph() as graph:
            outputs, updates = drawn(rng)
        mesh, rules = rng.choice(LAYOUTS)
        names = {d.name for op in graph.operations for d in op.output.shape}
        if outputs and {"a", "b", "c"} <= names:
            report = mtf.verify(outputs, updates, layouts=[(mesh, rules)], precision="highest")
            assert report.ok, f"seed {seed}\n{report}"
    assert always


def test_a_sum_of_what_has_more_dims_than_its_factors(always: list[Program]) -> None:
    """Written as the sum of its factors alone: not over the dim that it is repeated along too."""
    with mtf.Graph():
        x = mtf.input("x", [A, C])
        y = mtf.reduce_sum(-mtf.broadcast(x, [A, B, C]), reduced_dim=C)
    report = mtf.verify(y, layouts=[("m:4", "c:m")], precision="highest")
    assert report.ok, report
    assert always


# ---------------------------------------------------------------- sabotage


def verified(name: str) -> bool:
    with mtf.Graph():
        case = ROWS[name]("float32")
    report = mtf.verify(case.outputs, case.updates, layouts=[(case.mesh, case.layout)], precision="highest")
    return bool(report.ok)


def changed(**to: Callable[[Monomial], Any]) -> Callable[..., list[Monomial]]:
    """Products that are put into others, with other numbers or factors."""
    put = shared_sums._substitute
    return lambda *args: [replace(m, **{name: of(m) for name, of in to.items()}) for m in put(*args)]


def unrepeated(self: Algebra, kind: Any, attrs: Any, operands: Any, over: Any, written: Any) -> Monomial | None:
    """What lacks the summed dims counts once, not for each of their indices."""
    return SUMMED(self, kind, attrs, operands, over, [])


SUMMED = Algebra._summed
WRONG: dict[str, tuple[object, str, object]] = {
    "numbers": (shared_sums, "_substitute", changed(number=lambda m: 1.0)),
    "a factor": (shared_sums, "_substitute", changed(powers=lambda m: dict(list(m.powers.items())[1:]))),
    "powers": (shared_sums, "_substitute", changed(powers=lambda m: {f: abs(n) + 1 for f, n in m.powers.items()})),
    "repetitions": (Algebra, "_summed", unrepeated),
    "terms": (Algebra, "collected", lambda self, terms: []),
}


@pytest.mark.parametrize("fault", [None, *WRONG])
def test_a_wrong_sum_is_noticed(fault: str | None, always: list[Program], monkeypatch: pytest.MonkeyPatch) -> None:
    if fault is not None:
        monkeypatch.setattr(*WRONG[fault])
    assert all(map(verified, ("batch_norm_of_chosen_rows_step", "repeated_and_summed"))) == (fault is None)
    assert always


# ---------------------------------------------------------------- what the user sees


def lowered(name: str, mesh: str | None = None) -> Program:
    with mtf.Graph():
        case = ROWS[name]("float32")
    return mtf.lower(case.outputs, case.updates, mesh=mesh or case.mesh, layout=case.layout)


def test_names_lines_and_reasons_are_those_of_the_sums() -> None:
    names = {y.tensor.name for i in lowered("batch_norm_by_division_step", "m:1").instructions for y in i.outputs}
    program = lowered("batch_norm_by_division_step")
    for i in program.instructions:
        made_of_others = [y.tensor.name for y in i.outputs if y.tensor.name not in names]
        assert all(any(name.startswith(f"{own}/") for own in names) for name in made_of_others)
        assert i.operation.source.startswith(("factors.py", "table.py"))
    assert all(any(f"{c.op}/".startswith(f"{own}/") for own in names) for c in program.collectives)


def test_nothing_changes_without_a_split() -> None:
    """The gradient of a batch norm that lies whole on every core sums as it is written."""
    with mtf.Graph() as graph:
        case = ROWS["batch_norm_by_division_step"]("float32")
    before = len(graph.operations)
    for rules, alone in (("", True), ("c:m", True), ("b:m", False)):
        program = mtf.lower(case.outputs, case.updates, mesh=case.mesh, layout=rules)
        assert ({i.operation.graph for i in program.instructions} == {graph}) == alone
    assert len(graph.operations) == before


def test_no_digits_are_lost_to_a_difference() -> None:
    """The sum of a small difference is not made of the large sums beside it."""
    with mtf.Graph():
        x, y = mtf.input("x", [B]), mtf.input("y", [B])
        sums = {"x": mtf.reduce_sum(x), "y": mtf.reduce_sum(y), "difference": mtf.reduce_sum(x - y)}
    program = mtf.lower(sums, mesh="m:4", layout="b:m")
    large = np.full(8, 1e6, np.float32)
    result = mtf.simulate(program).step(x=large + np.float32(0.0625), y=large)
    assert result["difference"] == 0.5


def test_copies_of_programs_with_sums_made_of_others() -> None:
    program = lowered("batch_norm_by_division_step")
    for copied in (copy.deepcopy(program), pickle.loads(pickle.dumps(program))):
        assert str(copied) == str(program)
