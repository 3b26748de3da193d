"""What a session keeps never shows: every program is the one that a lowering of its own makes, to the last byte."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import meshlib as mtf
from meshlib.core.graph import Operation, Tensor
from meshlib.lowering import graph_cache
from meshlib.lowering.one_layout import Lowering
from meshlib.lowering.strategies import Question
from meshlib.lowering.strategy_costs import Pricing
from meshlib.program.instructions import Instruction, Loop, Value
from meshlib.program.records import Program
from meshlib.program.signature import Signatures
from tests.effort import draws, some
from tests.lowering.minima_tables import ROWS
from tests.oracle import draw_layout, needed
from tests.simulation.test_property_programs import Written, programs

D = mtf.Dimension
# (mesh, layout, precision, balance)
Way = tuple[str, str, str, mtf.Balance | None]
DENSER = mtf.Balance(mxu_flops_per_byte=500.0, vpu_ops_per_byte=50.0)


def told(x: object, numbers: dict[Value, int]) -> object:
    """All that a program says, loops included, as plain data: values by the order in which they occur."""
    if isinstance(x, Value):
        return numbers.setdefault(x, len(numbers)), x.tensor.name, str(x), x.local_bytes
    if isinstance(x, Tensor | Operation):
        return str(x)
    if isinstance(x, Program | Instruction):
        return [(f.name, told(getattr(x, f.name), numbers)) for f in fields(x)]
    if isinstance(x, Mapping):
        return [(name, told(y, numbers)) for name, y in x.items()]
    if isinstance(x, tuple | list):
        return [told(y, numbers) for y in x]
    return repr(x)


def outcome(lower: Callable[[], Program]) -> object:
    """What a lowering makes, or why it refuses to."""
    try:
        program = lower()
    except mtf.LayoutError as fault:
        return str(fault)
    return told(program, {})


Alone = Mapping[Way, object]


def alone(outputs: Any, updates: list[Operation], ways: Iterable[Way]) -> Alone:
    """What a lowering of its own makes of each way."""
    return {way: outcome(lambda way=way: mtf.lower(outputs, updates, *way)) for way in ways}


def assert_nothing_shows(outputs: Any, updates: list[Operation], wanted: Alone, seed: int = 0) -> None:
    """Lower in all ways in one session, in a random order, and in some of them again."""
    session, order = mtf.Session(outputs, updates), random.Random(seed)
    ways = list(wanted)
    for way in (*order.sample(ways, len(ways)), *order.sample(ways, min(2, len(ways)))):
        assert outcome(lambda way=way: session.lower(*way)) == wanted[way], way


# ---------------------------------------------------------------- programs


@settings(max_examples=draws(4, 2500))
@given(programs())
def test_random_programs(p: Written) -> None:
    of, rng = (p.outputs, p.updates), np.random.default_rng(len(repr(p)))
    dims = list(dict.fromkeys(d.name for t in needed([*p.outputs.values(), *p.updates]) for d in t.shape))
    axes = [a.split(":")[0] for a in p.mesh.split(";")]
    ways: list[Way] = [(p.mesh, p.layout, "highest", None), (p.mesh, p.layout, "default", DENSER)]
    for size in (2, 3):
        mesh = ";".join(f"{a}:{size}" for a in axes)
        drawn = (draw_layout(rng, dims) for _ in range(60))
        legal = (x.rules_text for x in drawn if len(x.mesh) <= len(axes) and mtf.check(*of, mesh, x.rules_text).ok)
        ways += [(mesh, rules, "default", None) for rules in islice(legal, draws(1, 3))]
        ways.append((mesh, p.layout, "default", None))  # legal or not
    assert_nothing_shows(p.outputs, p.updates, alone(p.outputs, p.updates, ways))


MESHES = {
    "data": "data:2", "zero1": "data:4", "fsdp": "fsdp:4", "tensor": "tensor:2", "sequence": "tensor:2",
    "context": "context:2", "fsdp+tensor": "fsdp:2;tensor:2", "data+fsdp+sequence": "data:2;fsdp:2;tensor:2",
}  # fmt: skip


def step(name: str, **options: Any) -> tuple[tuple[Any, list[Operation]], list[Way]]:
    """A training step of a small model, and the ways to lower it."""
    config = mtf.models.preset(name).reduced()
    with mtf.Graph():
        program = mtf.models.train_step(config, batch=8, length=16, **options)
    layouts = {n: str(mtf.models.layout(n, config, mesh)) for n, mesh in MESHES.items()}
    ways: list[Way] = [(MESHES[n], layout, "default", None) for n, layout in layouts.items()]
    ways += [("fsdp:4;tensor:2", layouts["fsdp+tensor"], "default", b) for b in (None, DENSER)]
    ways += [("fsdp:4;tensor:2", layouts["fsdp"], "highest", mtf.Balance(stationary=False))]
    return program, ways


STEPS = [("none", True), ("none", False), ("full", True), ("full", False)]


@pytest.mark.parametrize(("remat", "scan"), some(STEPS, [("full", True)]))
def test_transformers(remat: str, scan: bool) -> None:
    (outputs, updates), ways = step("llama2-7b", remat=remat, scan=scan)
    assert_nothing_shows(outputs, updates, alone(outputs, updates, some(ways, ways[6::8])))


def small_step() -> tuple[Any, list[Operation], list[Way]]:
    """A step of two products, and four ways to lower it."""
    batch, d, hidden = D("batch", 8), D("d", 4), D("hidden", 16)
    with mtf.Graph():
        x = mtf.input("x", [batch, d])
        h = mtf.tanh(mtf.layers.dense(x, hidden, name="in"))
        loss = mtf.reduce_mean(mtf.square(mtf.layers.dense(h, d, name="out") - x))
        train = mtf.optimize.AdamOptimizer(0.1).minimize(loss)
    layouts = ("batch:p", "batch:p;d:p?", "hidden:p", "batch:p;slots/hidden:p")
    return {"loss": loss}, train, [way(layout) for layout in layouts]


def test_memos_that_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_cache, "MOST", 3)
    outputs, updates, ways = small_step()
    assert_nothing_shows(outputs, updates, alone(outputs, updates, ways))


def test_sums_follow_from_others_under_one_layout_and_not_another() -> None:
    with mtf.Graph():
        case = ROWS["batch_norm_by_division_step"]("float32")
    ways: list[Way] = [(case.mesh, rules, "default", None) for rules in ("b:m", "c:m", "")]
    assert_nothing_shows(case.outputs, list(case.updates), alone(case.outputs, list(case.updates), ways))


def test_check_is_that_of_a_program_alone() -> None:
    (outputs, updates), ways = step("llama2-7b")
    session = mtf.Session(outputs, updates)
    for mesh, layout in [
        *(way[:2] for way in ways),
        ("rows:3", "batch:rows;heads:rows"),
        ("rows:2", "vocabulary:rows"),
    ]:
        assert session.check(mesh, layout) == mtf.check(outputs, updates, mesh, layout)


# ---------------------------------------------------------------- stale memos


def kinds() -> tuple[dict[str, Tensor], list[Way]]:
    """A sum and a maximum of values that lie alike, with homes that lie alike."""
    a, b = D("a", 8), D("b", 8)
    x, y = (mtf.input(name, [a, b]) for name in "xy")
    return {"sum": mtf.reduce_sum(x, reduced_dim=b), "most": mtf.reduce_max(y, reduced_dim=b)}, [way("b:p")]


def homes() -> tuple[dict[str, Tensor], list[Way]]:
    """A value that moves to where two results are wanted, or stays where they are wanted whole."""
    x = mtf.variable("x", [D("a", 8), D("b", 8)])
    return {"y": mtf.tanh(x), "z": mtf.sin(x)}, [way("variables/a:p;activations/b:p"), way("variables/a:p")]


def ends() -> tuple[dict[str, Tensor], list[Way]]:
    """A sum that is fetched, and one that only has to be a number; both are summed up on."""
    a, b = D("a", 8), D("b", 8)
    total, other = (mtf.reduce_sum(mtf.input(name, [a, b]), reduced_dim=b) for name in "xy")
    return {"total": total, "one": mtf.reduce_sum(total), "two": mtf.reduce_sum(other)}, [way("b:p")]


def chains() -> tuple[dict[str, Tensor], list[Way]]:
    """A sum that nobody takes as it waits, and one that is summed up on."""
    a, b = D("a", 8), D("b", 8)
    whole, other = (-mtf.reduce_sum(mtf.input(name, [a, b]), reduced_dim=b) for name in "xy")
    return {"whole": mtf.tanh(whole), "number": mtf.reduce_sum(other)}, [way("b:p")]


def places() -> tuple[dict[str, Tensor], list[Way]]:
    """Operands under two layouts that agree on where the result lies."""
    x, w = mtf.input("x", [D("a", 8), D("b", 8)]), mtf.variable("w", [D("b", 8), D("c", 8)])
    return {"y": mtf.einsum([x, w], [D("a", 8), D("c", 8)])}, [way("variables/b:p"), way("variables/c:p"), way("b:p")]


def sums() -> tuple[dict[str, Tensor], list[Way]]:
    """What is a pending sum over one axis under one layout and over the other under the other, at home alike."""
    x, w = mtf.input("x", [D("a", 8), D("b", 8)]), mtf.variable("w", [D("b", 8), D("c", 8)])
    product = mtf.einsum([x, w], [D("a", 8), D("c", 8)])
    return {"y": mtf.einsum([product, mtf.variable("v", [D("c", 8), D("d", 2)])], [D("a", 8), D("d", 2)])}, [
        ("p:2;q:2", layout, "default", None) for layout in ("b:p", "b:q")
    ]


def wanted_split() -> tuple[dict[str, Tensor], list[Way]]:
    """A pending sum that one layout would have split, of which the maximum is taken."""
    x, w = mtf.input("x", [D("a", 8), D("b", 8)]), mtf.variable("w", [D("b", 8), D("c", 8)])
    product = mtf.einsum([x, w], [D("a", 8), D("c", 8)])
    return {"y": mtf.reduce_max(product, reduced_dim=D("c", 8))}, [way("b:p"), way("b:p;c:p?")]


def squares() -> tuple[dict[str, Tensor], list[Way]]:
    """A value that is moved for both operands at once, and two that lie as it does."""
    u, v, w = (mtf.variable(name, [D("a", 8), D("b", 8)]) for name in "uvw")
    return {"square": u * u, "product": v * w}, [way("variables/a:p;activations/b:p")]


def weights() -> tuple[dict[str, Tensor], list[Way]]:
    """A small variable that must not move, and an input as small that does."""
    a, b, c = D("a", 256), D("b", 8), D("c", 8)
    x, y, z = mtf.input("x", [a, b]), mtf.input("y", [a, b]), mtf.input("z", [b, c])
    outputs = {"stays": mtf.einsum([x, mtf.variable("w", [b, c])], [a, c]), "comes": mtf.einsum([y, z], [a, c])}
    return outputs, [("p:2", "c:p;a:p?", "default", None)]


def recomputed() -> tuple[dict[str, Tensor], list[Way]]:
    """Rows of a value that may be recomputed whole, instead of sending their sums, and of one that may not."""
    a, b = D("a", 64), D("b", 128)
    product = mtf.input("x", [a]) * mtf.variable("y", [b])
    once, again = (mtf.reduce_sum(mtf.relu(z), reduced_dim=b) for z in (mtf.input("z", [a, b]), product))
    return {"once": once, "again": again}, [way("activations/b:p")]


def way(layout: str) -> Way:
    return "p:2", layout, "default", None


class Forgetful(dict[object, Any]):
    """Strategies under keys that lack some of their parts."""

    def __init__(self, lost: Callable[[Any], object]) -> None:
        super().__init__()
        self.lost = lost

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self.lost(key), default)

    def __setitem__(self, key: Any, found: Any) -> None:
        super().__setitem__(self.lost(key), found)


OF_OPERATIONS = ("signature", "home", "binding", "near", "again")  # the keys of `graph_cache.Prices`


def lacking(part: str, key: tuple[Any, ...]) -> object:
    """A key of `graph_cache.Prices`, or of the strategies of one `Pricing`, without one of its parts."""
    if not isinstance(key[0], Question):
        return tuple(x for name, x in zip(OF_OPERATIONS, key, strict=True) if name != part)
    asked, *held = key
    if part == "held":
        return asked
    return (asked._replace(**{part: ()}) if part in Question._fields else asked, *held)


KEYS = {
    "signature": kinds,
    "home": homes,
    "binding": ends,
    "splits": places,
    "sums": sums,
    "held": weights,
    "again": recomputed,
}


@pytest.mark.parametrize("part", KEYS)
def test_strategies_kept_by_too_little_are_seen(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations that must not share strategies: programs differ, or the checker refuses one."""
    with mtf.Graph():
        outputs, ways = KEYS[part]()
    wanted = alone(outputs, [], ways)
    made = Pricing.__init__

    def keep_under(lost: Callable[[Any], object]) -> None:
        def prices(self: graph_cache.Memos, balance: mtf.Balance) -> graph_cache.Prices:
            return self._prices.setdefault(balance, graph_cache.Prices(balance, Forgetful(lost)))

        def init(self: Pricing, *args: Any) -> None:
            made(self, *args)
            self._strategies = Forgetful(lost)

        monkeypatch.setattr(graph_cache.Memos, "prices", prices)
        monkeypatch.setattr(Pricing, "__init__", init)

    keep_under(lambda key: key)
    assert_nothing_shows(outputs, [], wanted)
    keep_under(lambda key: lacking(part, key))
    with pytest.raises((AssertionError, StopIteration, LookupError, mtf.MeshlibError)):
        assert_nothing_shows(outputs, [], wanted)


def test_a_balance_must_not_share_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = D("a", 8), D("b", 8), D("c", 64)
    with mtf.Graph():
        x, w = mtf.variable("x", [a, b]), mtf.variable("w", [b, c])
        outputs = {"y": mtf.einsum([x, w], [a, c])}
    split, gather = (mtf.Balance(mxu_flops_per_byte=f) for f in (1.0, 1e6))
    wanted = alone(outputs, [], [("p:2", "variables/a:p", "default", balance) for balance in (split, gather)])
    assert_nothing_shows(outputs, [], wanted)
    for_all = lambda self, balance: self._prices.setdefault("any", graph_cache.Prices(balance))  # noqa: E731
    monkeypatch.setattr(graph_cache.Memos, "prices", for_all)
    with pytest.raises(AssertionError):
        assert_nothing_shows(outputs, [], wanted)


def test_operations_alike_but_for_attributes_must_not_share_a_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = D("a", 8), D("b", 8)
    with mtf.Graph():
        x = mtf.input("x", [a, b])
        outputs = {"near": mtf.shift(x, 1, a, False), "far": mtf.shift(x, 3, a, False)}
    wanted = alone(outputs, [], [way("a:p")])
    of = Signatures.of
    monkeypatch.setattr(Signatures, "of", lambda self, op: self._alike.setdefault(op.opdef, of(self, op)))
    with pytest.raises((AssertionError, mtf.MeshlibError)):
        assert_nothing_shows(outputs, [], wanted)


# ---------------------------------------------------------------- a graph that grows


def test_what_is_added_later_is_no_part_of_the_program() -> None:
    batch, d, classes = D("batch", 8), D("d", 4), D("classes", 6)
    with mtf.Graph() as graph:
        x = mtf.input("x", [batch, d])
        loss = mtf.reduce_sum(mtf.square(mtf.einsum([x, mtf.variable("w", [d])], [batch])))
        session = mtf.Session({"loss": loss})
        before = session.lower("p:2", "batch:p")
        assert not session.check("p:2", "classes:p").ok
        mtf.einsum([x, mtf.variable("v", [d, classes])], [batch, classes])
        train = mtf.optimize.SgdOptimizer(0.1).minimize(loss)
        after = session.lower("p:2", "batch:p")
    assert "classes" in str(session.check("p:2", "classes:p").notes)  # a name that the graph knows by now
    assert told(before, {}) == told(after, {})
    assert not after.updates
    names = {i.operation.name for i in after.instructions}
    assert not any(op.name in names for op in (graph.variables["v"], *train))
    assert_nothing_shows({"loss": loss}, train, alone({"loss": loss}, train, [way("batch:p")]))


def test_a_gradient_declared_later_binds_what_the_session_lowers() -> None:
    """A value that becomes the gradient of a variable gets that variable's home: with or without a session."""
    batch, d = D("batch", 8), D("d", 4)
    with mtf.Graph() as graph:
        w = mtf.variable("w", [d])
        y = mtf.einsum([mtf.input("x", [batch, d]), w], [batch])
        (dw,) = mtf.gradients([mtf.reduce_sum(mtf.square(y))], [w])
        twice = dw * 2.0
        session = mtf.Session({"twice": twice})
        there = ("p:2;q:2", "batch:p;slots/d:q;activations/d:p?")
        before = outcome(lambda: session.lower(*there))
        assert before == outcome(lambda: mtf.lower({"twice": twice}, [], *there))
        graph.gradient_of[twice] = w.operation
        after = outcome(lambda: session.lower(*there))
        assert after == outcome(lambda: mtf.lower({"twice": twice}, [], *there))
        assert before != after


def test_a_session_runs() -> None:
    """The numbers of two layouts of one session are those of the program."""
    batch, d = D("batch", 8), D("d", 4)
    with mtf.Graph():
        x = mtf.input("x", [batch, d])
        session = mtf.Session({"y": mtf.reduce_sum(mtf.square(x), reduced_dim=d)})
    fed = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    for layout in ("batch:p", "d:p"):
        assert np.array_equal(mtf.simulate(session.lower("p:2", layout)).step(x=fed)["y"], (fed**2).sum(1))


@pytest.mark.parametrize("bad", [{"precision": "low"}, {"balance": 3.0}, {"layout": "d:rows"}, {"mesh": "p:0"}])
def test_bad_arguments_are_refused(bad: dict[str, Any]) -> None:
    with mtf.Graph():
        session = mtf.Session([mtf.input("x", [D("d", 4)])])
    with pytest.raises(mtf.MeshlibError):
        session.lower(**{"mesh": "p:2", **bad})


def test_the_same_candidate_again_is_the_same_program(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs, updates, ways = small_step()
    session = mtf.Session(outputs, updates)
    first = [session.lower(*one) for one in ways]
    assert all(session.lower(*one) is program for one, program in zip(ways, first, strict=True))
    assert session.lower(*ways[0][:2], "default", mtf.Balance()) is first[0]
    assert session.lower(*ways[0][:2], regather=False) is not first[0]
    monkeypatch.setattr("meshlib.lowering.session.PROGRAMS", 2)
    session.lower(*ways[1])
    session.lower(*ways[2])
    assert session.lower(*ways[0]) is not first[0]


@pytest.mark.parametrize("name", ["megatron_mlp_step", "scanned_layers_of_microbatches_step", "chain_of_additions"])
def test_nothing_is_left_to_the_garbage_collector(name: str) -> None:
    """A search lowers thousands of candidates: what one leaves in a cycle stays until all objects are traversed."""

    def garbage() -> int:
        with mtf.Graph():
            case = ROWS[name]("float32")
        session = mtf.Session(case.outputs, case.updates)
        session.lower()
        gc.collect()
        session.lower(case.mesh, case.layout)
        return gc.collect()

    gc.disable()
    gc.freeze()  # what other tests have left takes seconds to traverse
    try:
        garbage()  # what is imported or cached for the first time may leave cycles
        assert garbage() == 0
    finally:
        gc.enable()


def test_a_lowering_that_was_ended_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bodies that it has, to the program of a lowering of its own."""
    config, (mesh, layout) = mtf.models.preset("gpt2").replace(layers=2), ("fsdp:8", "batch:fsdp;d_model:fsdp?")
    with mtf.Graph():
        asked = mtf.models.train_step(config, 8, 128, remat="full")
    session, bodies = mtf.Session(*asked), list[str]()
    whole = mtf.lower(*asked, mesh=mesh, layout=layout)
    plain = Lowering.body

    def body(self: Lowering, graph: mtf.Graph, *args: Any) -> Program:
        begun = {*self._bodies}
        program = plain(self, graph, *args)
        bodies.extend(str(graph) for _ in {*self._bodies} - begun)
        return program

    monkeypatch.setattr(Lowering, "body", body)
    loops = [i for i in whole.instructions if isinstance(i, Loop)]

    def ended(loop: Loop) -> None:
        raise InterruptedError(loop.operation.name)

    for _ in range(2):  # the first loop is told each time
        with pytest.raises(InterruptedError, match=loops[0].operation.name):
            session.lower(mesh, layout, told=ended)
    assert len(session._begun) == 1
    told: list[Loop] = []
    assert str(session.lower(mesh, layout, told=told.append)) == str(whole)
    assert not session._begun
    assert [loop.operation for loop in told] == [loop.operation for loop in loops]
    assert [loop.body for loop in told] == [
        i.body for i in session.lower(mesh, layout).instructions if isinstance(i, Loop)
    ]
    assert len(bodies) == len(loops) == 2, "no body is lowered again"


def test_siblings_are_sessions_of_their_own() -> None:
    """A model built with other arguments gets the programs of a session apart, and shares strategies with the first."""
    config = mtf.models.preset("llama3-8b").reduced()
    mesh = "fsdp:4;tensor:2"
    layout = mtf.models.layout("fsdp+sequence", config, mesh)

    def step(remat: str) -> Any:
        with mtf.Graph():
            return mtf.models.train_step(config, batch=8, length=128, remat=remat)

    first = mtf.Session(*step("full"))
    first.lower(mesh, layout)
    beside, apart = first.sibling(*step("matmuls")), mtf.Session(*step("matmuls"))
    known = len(first._memos.prices(mtf.Balance(stationary=True)))
    assert outcome(lambda: beside.lower(mesh, layout)) == outcome(lambda: apart.lower(mesh, layout))
    alone = len(apart._memos.prices(mtf.Balance(stationary=True)))
    both = len(first._memos.prices(mtf.Balance(stationary=True)))
    assert known < both < known + alone
    assert beside.programs != first.programs


def test_a_lowering_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search lowers thousands of candidates, some of which are refused."""
    with mtf.Graph():
        session = mtf.Session({"y": mtf.exp(mtf.input("x", "batch:8"))})

    def refused(*_: Any) -> Program:
        raise mtf.LayoutError("refused")

    monkeypatch.setattr(Lowering, "program", refused)
    with pytest.raises(mtf.LayoutError, match="refused"):
        session.lower("data:8", "batch:data")
    assert not session._begun
