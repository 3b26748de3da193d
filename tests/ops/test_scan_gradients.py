"""Gradients through scan, while_loop, recompute_grad and custom_gradient, against the same programs written out."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

import meshlib as mtf
from tests.effort import some

D = mtf.Dimension
B, W, LAYERS = D("batch", 4), D("d", 8), D("layers", 3)
OUT = D("d_out", 8)
LAYOUTS = (
    ("m:1;n:1", ""),
    ("m:2;n:2", "batch:m;d:n"),
    ("m:2;n:2", "d:m+n"),
    ("m:4;n:1", "batch:m;d:m?"),
    ("m:2;n:2", "batch:m;d_out:n"),
    ("m:2;n:2", "batch:m;variables/d:n"),
)
Built = tuple[dict[str, mtf.Tensor], list[mtf.Tensor]]


def layer(x: mtf.Tensor, w: mtf.Tensor, scale: mtf.Tensor) -> mtf.Tensor:
    y = mtf.tanh(mtf.einsum([x, w], [B, OUT], precision="highest"))
    return mtf.rename_dimension(y, "d_out", "d") * scale + x * 0.5


def leaves() -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
    x = mtf.input("x", [B, W], "float64")
    w = mtf.input("w", [LAYERS, W, OUT], "float64")
    return x, w, mtf.input("scale", [W], "float64")


def by_scan() -> Built:
    x, w, scale = leaves()
    (y,), (means,) = mtf.scan(
        lambda c, s: ((layer(c[0], s[0], scale * 2.0),), (mtf.reduce_mean(c[0], reduced_dim=W),)), [x], [w], LAYERS
    )
    return {"y": y, "means": means}, [x, w, scale]


def written_out() -> Built:
    x, w, scale = leaves()
    y, means = x, []
    for part in mtf.unstack(w, LAYERS):
        means.append(mtf.reduce_mean(y, reduced_dim=W))
        y = layer(y, part, scale * 2.0)
    return {"y": y, "means": mtf.stack(means, "layers")}, [x, w, scale]


def reversed_scan() -> Built:
    x, w, scale = leaves()
    (y,), (sums,) = mtf.scan(
        lambda c, s: ((layer(c[0], s[0], scale),), (mtf.reduce_sum(c[0], reduced_dim=W),)), [x], [w], LAYERS, True
    )
    return {"y": y, "sums": sums}, [x, w, scale]


def reversed_written_out() -> Built:
    x, w, scale = leaves()
    y, sums = x, []
    for part in reversed(mtf.unstack(w, LAYERS)):
        sums.append(mtf.reduce_sum(y, reduced_dim=W))
        y = layer(y, part, scale)
    return {"y": y, "sums": mtf.stack(sums[::-1], "layers")}, [x, w, scale]


def nested() -> Built:
    x, w, scale = leaves()

    def outer(c: tuple, s: tuple) -> tuple:
        (inner,) = mtf.while_loop(2, lambda v: layer(v, s[0], scale), [c[0]])
        return (inner,), ()

    (y,), _ = mtf.scan(outer, [x], [w], LAYERS)
    return {"y": y}, [x, w, scale]


def nested_written_out() -> Built:
    x, w, scale = leaves()
    y = x
    for part in mtf.unstack(w, LAYERS):
        y = layer(layer(y, part, scale), part, scale)
    return {"y": y}, [x, w, scale]


def loop_with_integers() -> Built:
    x, w, scale = leaves()

    def body(v: mtf.Tensor, n: mtf.Tensor) -> tuple[mtf.Tensor, mtf.Tensor]:
        part = mtf.gather(w, n, LAYERS)
        return layer(v, part, scale), n + 1

    y, _ = mtf.while_loop(3, body, [x, mtf.constant(0, dtype="int32")])
    return {"y": y}, [x, w, scale]


def plain_written_out() -> Built:
    x, w, scale = leaves()
    y = x
    for part in mtf.unstack(w, LAYERS):
        y = layer(y, part, scale)
    return {"y": y}, [x, w, scale]


def recomputed() -> Built:
    x, w, scale = leaves()
    y = x
    for part in mtf.unstack(w, LAYERS):
        y = mtf.recompute_grad(lambda v, p: layer(v, p, scale), [y, part])
    return {"y": y}, [x, w, scale]


def recomputed_inside_scan() -> Built:
    x, w, scale = leaves()
    (y,), _ = mtf.scan(
        lambda c, s: ((mtf.recompute_grad(lambda v: layer(v, s[0], scale), [c[0]]),), ()), [x], [w], LAYERS
    )
    return {"y": y}, [x, w, scale]


PAIRS: dict[str, tuple[Callable[[], Built], Callable[[], Built]]] = {
    "scan": (by_scan, written_out),
    "reversed": (reversed_scan, reversed_written_out),
    "nested": (nested, nested_written_out),
    "integers": (loop_with_integers, plain_written_out),
    "recompute": (recomputed, plain_written_out),
    "recompute in scan": (recomputed_inside_scan, plain_written_out),
}


@cache
def lowered(build: Callable[[], Built], mesh: str, layout: str, order: int = 1) -> mtf.Program:
    """Outputs and gradients (of the first or second order) of a random weighting of the outputs."""
    with mtf.Graph():
        outputs, wrt = build()
        loss = mtf.add_n([mtf.reduce_sum(mtf.square(y) * (n + 0.5)) for n, y in enumerate(outputs.values())])
        grads = mtf.gradients([loss], wrt)
        if order == 2:
            grads = mtf.gradients([mtf.add_n([mtf.reduce_sum(mtf.sin(g)) for g in grads if g is not None])], wrt)
        fetched = {**outputs, **{f"d{x.name}": g for x, g in zip(wrt, grads, strict=True) if g is not None}}
    return mtf.lower(fetched, mesh=mesh, layout=layout, precision="highest")


def run(build: Callable[[], Built], mesh: str, layout: str, executor: str, order: int = 1) -> dict[str, np.ndarray]:
    """What that program gives."""
    rng = np.random.default_rng(3)
    feeds = {"x": rng.normal(size=(4, 8)), "w": rng.normal(size=(3, 8, 8)), "scale": rng.normal(size=8)}
    return mtf.simulate(lowered(build, mesh, layout, order), executor=executor).step(feeds)


SPOTS = [(name, *place) for name in PAIRS for place in LAYOUTS]
# Each program in two places, each place with two programs.
USUAL = [spot for n, spot in enumerate(SPOTS) if (n // len(LAYOUTS) - n) % len(LAYOUTS) in (1, 4)]


@pytest.mark.parametrize(("name", "mesh", "layout"), some(SPOTS, USUAL))
def test_equals_the_program_written_out(name: str, mesh: str, layout: str) -> None:
    looped, plain = PAIRS[name]
    expected = run(plain, "m:1;n:1", "", "fast")
    for executor in ("exact", "fast"):
        found = run(looped, mesh, layout, executor)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_allclose(found[key], value, rtol=1e-9, atol=1e-12, err_msg=f"{key} {executor}")


@pytest.mark.parametrize("name", ["scan", "integers", "recompute"])
def test_second_derivatives(name: str) -> None:
    looped, plain = PAIRS[name]
    expected = run(plain, "m:1;n:1", "", "fast", order=2)
    found = run(looped, "m:2;n:2", "batch:m;d:n", "exact", order=2)
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-8, atol=1e-10, err_msg=key)


@pytest.mark.parametrize(
    "wrapped", [lambda f, x: mtf.recompute_grad(f, [x]), lambda f, x: mtf.while_loop(1, f, [x])[0]]
)
def test_random_numbers_are_the_same_when_computed_again(wrapped: Callable) -> None:
    with mtf.Graph():
        x = mtf.input("x", [D("n", 64)])
        y = wrapped(lambda v: mtf.dropout(mtf.sin(v), True, keep_prob=0.5), x)
        (dx,) = mtf.gradients([mtf.reduce_sum(y)], [x])
        program = mtf.lower({"y": y, "dx": dx}, mesh="m:4", layout="n:m")
    values = np.linspace(0.1, 1.4, 64)
    for executor in ("exact", "fast"):
        r = mtf.simulate(program, executor=executor).step(x=values)
        assert 10 < np.count_nonzero(r["y"]) < 54
        np.testing.assert_allclose(r["dx"], np.where(r["y"] == 0, 0, 2 * np.cos(values)), rtol=1e-5)


def mlp(recompute: bool) -> mtf.Program:
    b, d, f = D("batch", 1024), D("d", 32), D("f", 512)
    with mtf.Graph():
        y = mtf.input("x", [b, d])
        for n in range(4):
            w, v = mtf.variable(f"w{n}", [d, f]), mtf.variable(f"v{n}", [f, d])

            def block(x: mtf.Tensor, w: mtf.Tensor = w, v: mtf.Tensor = v) -> mtf.Tensor:
                return x + mtf.einsum([mtf.sin(mtf.einsum([x, w], [b, f])), v], [b, d])

            y = mtf.recompute_grad(block, [y]) if recompute else block(y)
        loss = mtf.reduce_mean(mtf.square(y))
        train = mtf.optimize.SgdOptimizer(0.1).minimize(loss)
        return mtf.lower({"loss": loss}, train, mesh="data:2", layout="batch:data;f:data?")


def test_recomputation_lowers_the_peak_and_repeats_work_and_gathers() -> None:
    plain, again = mlp(False), mlp(True)
    assert again.memory.peak_bytes < 0.75 * plain.memory.peak_bytes

    def matmuls(program: mtf.Program) -> int:
        return sum(i.opcode == "einsum" for i in program.instructions)

    assert matmuls(again) == matmuls(plain) + 4  # of each block the first product, which the second's gradient needs
    backward = [c for c in again.collectives if c.phase == "backward" and c.kind == "all_gather"]
    before = [c for c in plain.collectives if c.phase == "backward" and c.kind == "all_gather"]
    # Every block's first weight once more, except that three of them the backward gathers anyway.
    assert len(backward) == len(before) + 1
    x = np.random.default_rng(0).normal(size=(1024, 32))
    losses = [float(mtf.simulate(p, seed=1).step(x=x)["loss"]) for p in (plain, again)]
    assert losses[0] == losses[1]


def test_custom_gradient_replaces_the_rule() -> None:
    with mtf.Graph():
        x = mtf.input("x", [D("n", 4)], "float64")
        y = mtf.custom_gradient(
            lambda v: mtf.square(v) * 3.0, lambda inputs, outputs, dys: [dys[0] * 100.0 + inputs[0] + outputs[0]], [x]
        )
        (dx,) = mtf.gradients([mtf.reduce_sum(y * 2.0)], [x])
        program = mtf.lower({"y": y, "dx": dx}, mesh="m:2", layout="n:m")
    r = mtf.simulate(program).step(x=np.arange(1.0, 5.0))
    np.testing.assert_array_equal(r["y"], 3 * np.arange(1.0, 5.0) ** 2)
    np.testing.assert_array_equal(r["dx"], 200 + np.arange(1.0, 5.0) + 3 * np.arange(1.0, 5.0) ** 2)


def test_a_rule_of_ones_own_holds_when_computed_again() -> None:
    """Also where it is all that is computed again."""
    for around in (lambda v: v, mtf.sin):
        with mtf.Graph():
            x = mtf.input("x", [D("n", 4)], "float64")

            def own(v: mtf.Tensor, around: Callable = around) -> mtf.Tensor:
                return around(mtf.custom_gradient(mtf.square, lambda inputs, outputs, dys: [dys[0] * 7.0], [v]))

            y = mtf.recompute_grad(lambda v: mtf.recompute_grad(own, [v]), [x])
            (dx,) = mtf.gradients([mtf.reduce_sum(y)], [x])
            program = mtf.lower({"y": y, "dx": dx})
        values = np.arange(1.0, 5.0)
        expected = 7 * np.ones(4) if around is not mtf.sin else 7 * np.cos(values**2)
        np.testing.assert_allclose(mtf.simulate(program).step(x=values)["dx"], expected)


def test_several_results_and_unused_ones() -> None:
    with mtf.Graph():
        x = mtf.input("x", [D("n", 4)], "float64")
        a, b = mtf.recompute_grad(lambda v: (mtf.sin(v), mtf.square(v)), [x])
        (dx,) = mtf.gradients([mtf.reduce_sum(a + b)], [x])
        (only,) = mtf.gradients([mtf.reduce_sum(b)], [x])
        program = mtf.lower({"dx": dx, "only": only})
    r = mtf.simulate(program).step(x=np.arange(4.0))
    np.testing.assert_allclose(r["dx"], np.cos(np.arange(4.0)) + 2 * np.arange(4.0))
    np.testing.assert_allclose(r["only"], 2 * np.arange(4.0))


def test_bad_rewrites() -> None:
    with mtf.Graph():
        x = mtf.input("x", [D("n", 4)])
        with pytest.raises(mtf.GraphError, match="explicit_inputs must be a non-empty list"):
            mtf.recompute_grad(mtf.sin, [])
        with pytest.raises(mtf.GraphError, match="expected a function of tensors, got 3"):
            mtf.recompute_grad(3, [x])
        y = mtf.custom_gradient(mtf.sin, lambda inputs, outputs, dys: [], [x])
        with pytest.raises(mtf.GraphError, match="must return 1 cotangents, got 0"):
            mtf.gradients([mtf.reduce_sum(y)], [x])


def test_rules_do_not_reach_what_a_loop_stacks_for_its_gradient() -> None:
    """[time, c] is not a tensor of the user's: rules that lay both dims on one axis are legal."""
    time, c = D("time", 4), D("c", 4)
    with mtf.Graph():
        x, s = mtf.input("x", [c], "float64"), mtf.input("s", [time], "float64")
        (y,), _ = mtf.scan(lambda carry, part: ((mtf.sin(carry[0] * part[0]),), ()), [x], [s], time)
        grads = mtf.gradients([mtf.reduce_sum(y)], [x, s])
        programs = [mtf.lower(grads, mesh="m:2", layout=rules) for rules in ("", "time:m;c:m")]
        (z,) = mtf.while_loop(2, mtf.sin, [x])
        with pytest.raises(mtf.LayoutError, match="no dimension 'loop_trip'"):
            mtf.lower({"z": z}, mesh="m:2", layout="loop_trip:m")
    feeds = {"x": np.arange(1.0, 5.0), "s": np.array([0.3, 0.9, 1.4, 0.7])}
    plain, split = (list(mtf.simulate(p, executor="exact").step(feeds).values()) for p in programs)
    for ours, theirs in zip(split, plain, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def rnn(layout: str, mesh: str = "d:4") -> tuple[mtf.Program, mtf.Program]:
    """A recurrent network over 6 steps, its gradient, and the same unsharded."""
    batch, time, hidden = D("batch", 32), D("time", 6), D("hidden", 16)
    out = D("hidden_out", 16)
    with mtf.Graph():
        x = mtf.input("x", [time, batch, hidden])
        w = mtf.variable("w", [hidden, out])

        def body(c: tuple, s: tuple) -> tuple:
            y = mtf.rename_dimension(mtf.einsum([c[0], w], [batch, out]), "hidden_out", "hidden")
            return (mtf.tanh(y + s[0]),), ()

        (last,), _ = mtf.scan(body, [mtf.zeros([batch, hidden])], [x], time)
        loss = mtf.reduce_mean(mtf.square(last))
        train = mtf.optimize.SgdOptimizer(0.1).minimize(loss)
        where = ((mesh, layout), ("d:1", ""))
        split, alone = (mtf.lower({"loss": loss}, train, m, rules, precision="highest") for m, rules in where)
    return split, alone


@pytest.mark.parametrize(
    "layout", ["batch:d", "batch:d;slots/hidden:d", "batch:d;variables/hidden:d", "batch:d;hidden:d?"]
)
def test_a_gradient_that_every_trip_adds_to_is_reduced_once(layout: str) -> None:
    split, alone = rnn(layout)
    reductions = [c for c in split.collectives if c.kind in ("all_reduce", "reduce_scatter") and c.payload_bytes > 4]
    assert [(c.payload_bytes, c.count) for c in reductions] == [(16 * 16 * 4, 1)]
    assert "sums over 'batch'" in reductions[0].reason
    x = np.random.default_rng(0).normal(size=(6, 32, 16))
    for executor in ("exact", "fast"):
        sims = [mtf.simulate(p, seed=2, executor=executor) for p in (split, alone)]
        for _ in range(2):
            losses = [float(s.step(x=x)["loss"]) for s in sims]
            np.testing.assert_allclose(*losses, rtol=1e-5)
        np.testing.assert_allclose(sims[0].state["w"], sims[1].state["w"], rtol=1e-4, atol=1e-6)


def test_a_sum_that_is_read_before_the_end_is_reduced_in_every_trip() -> None:
    with mtf.Graph():
        n = D("n", 8)
        x = mtf.input("x", [n])
        (total, scaled) = mtf.while_loop(
            3, lambda t, s: (t + mtf.reduce_sum(x * s), s * 0.5 + t), [mtf.constant(0.0), mtf.constant(1.0)]
        )
        program = mtf.lower({"total": total, "scaled": scaled}, mesh="m:4", layout="n:m")
    assert [c.count for c in program.collectives] == [3]
    values = np.arange(8.0)
    t, s = 0.0, 1.0
    for _ in range(3):
        t, s = t + (values * s).sum(), s * 0.5 + t
    found = mtf.simulate(program, executor="exact").step(x=values)
    np.testing.assert_allclose([found["total"], found["scaled"]], [t, s], rtol=1e-6)


def shared_variable(how: str) -> dict[str, np.ndarray]:
    """Gradients, of first and second order, of a variable that a function declares and that is used outside too."""
    d, trips = mtf.Dimension("d", 3), mtf.Dimension("trips", 2)

    def f(x: mtf.Tensor) -> mtf.Tensor:
        known = x.graph.variables or graph.variables
        w = known["w"].output if "w" in known else mtf.variable("w", [d], dtype="float64")
        return mtf.tanh(x * w)

    def again(x: mtf.Tensor) -> mtf.Tensor:
        made: mtf.Tensor = mtf.recompute_grad(f, [x])
        return made

    def scanned(x: mtf.Tensor, body: Callable[[mtf.Tensor], mtf.Tensor]) -> mtf.Tensor:
        return mtf.scan(lambda c, s: ((body(c[0]),), ()), [x], dim=trips)[0][0]

    ways: dict[str, Callable[[mtf.Tensor], mtf.Tensor]] = {
        "written out": lambda x: f(f(x)),
        "recomputed": lambda x: again(again(x)),
        "recomputed in recomputed": lambda x: mtf.recompute_grad(lambda y: f(again(y)), [x]),
        "scan": lambda x: scanned(x, f),
        "recomputed in scan": lambda x: scanned(x, again),
        "scan in recomputed": lambda x: mtf.recompute_grad(lambda y: scanned(y, f), [x]),
    }
    with mtf.Graph() as graph:
        x, v = mtf.input("x", [d], "float64"), mtf.input("v", [d], "float64")
        y = ways[how](x)
        w = graph.variables["w"].output
        (first,) = mtf.gradients([mtf.reduce_sum(mtf.sin(y) * w * w)], [w])
        second, mixed = mtf.gradients([mtf.reduce_sum(first * v)], [w, x])
        program = mtf.lower({"first": first, "second": second, "mixed": mixed}, precision="highest")
    sim = mtf.simulate(program)
    sim.state["w"] = np.array([0.3, 0.5, -0.7])
    return sim.step(x=[1.0, 2.0, 3.0], v=[1.0, 2.0, -1.0])


@pytest.mark.parametrize(
    "how", ["recomputed", "recomputed in recomputed", "scan", "recomputed in scan", "scan in recomputed"]
)
def test_a_variable_declared_inside_counts_once(how: str) -> None:
    found, wanted = shared_variable(how), shared_variable("written out")
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, err_msg=name)


# ---------------------------------------------------------------- a rule of one's own always applies


def ruled(function: Callable, rule: Callable, n: int = 1, looped: bool = False) -> dict[str, np.ndarray]:
    """Gradients of sum(weights * function(*xs)) with a rule, alone or in every trip of a loop over 3."""
    d = D("d", 4)
    names = [f"x{k}" for k in range(n)]
    with mtf.Graph():
        xs = [mtf.input(name, [d], "float64") for name in names]

        def loss(*inputs: mtf.Tensor) -> mtf.Tensor:
            made = mtf.custom_gradient(function, rule, list(inputs))
            results = [made] if isinstance(made, mtf.Tensor) else made
            return mtf.add_n([mtf.reduce_sum(y) * (k + 2.0) for k, y in enumerate(results)])

        if looped:
            total = mtf.constant(0.0, dtype="float64")
            (y,), _ = mtf.scan(lambda c, s: ([c[0] + loss(*xs)], []), [total], [mtf.zeros([LAYERS])], LAYERS)
        else:
            y = loss(*xs)
        found = mtf.gradients([y], xs)
        assert all(dx is not None for dx in found)
        used = mtf.add_n([mtf.reduce_sum(x) for x in xs])
        program = mtf.lower({**dict(zip(names, found, strict=True)), "used": used}, mesh="m:2", layout="d:m")
    made = {}
    for executor in ("exact", "fast"):
        made = mtf.simulate(program, executor=executor).step({name: np.arange(1.0, 5.0) for name in names})
        del made["used"]
    return made


@pytest.mark.parametrize("looped", [False, True])
def test_a_rule_applies_whatever_its_function_does(looped: bool) -> None:
    d, times, data = D("d", 4), 3 if looped else 1, np.arange(1.0, 5.0)

    def check(found: dict[str, np.ndarray], *wanted: object) -> None:
        for dx, w in zip(found.values(), wanted, strict=True):
            np.testing.assert_allclose(dx, np.broadcast_to(np.multiply(times, w), 4), rtol=1e-12)

    # Gradient reversal: the function is the identity, the rule is not. The cotangent is 2.
    check(ruled(lambda v: v, lambda xs, ys, dys: [dys[0] * -1.0], looped=looped), -2)
    # A result that the input has no part in.
    check(ruled(lambda v: mtf.ones([d], "float64"), lambda xs, ys, dys: [dys[0] * xs[0]], looped=looped), 2 * data)
    # One input comes back, the other makes something; in the order in which they are returned.
    swapped = ruled(lambda a, b: (mtf.sin(b), a), lambda xs, ys, dys: [dys[0] * 10.0, dys[1] * xs[0]], 2, looped=looped)
    check(swapped, 20, 3 * data)
    # The same result twice: each place has its own cotangent, 2 and 3.
    twice = ruled(lambda v: [mtf.sin(v)] * 2, lambda xs, ys, dys: [dys[0] * 10.0 + dys[1] * 7.0], looped=looped)
    check(twice, 41)
    # An input twice.
    check(ruled(lambda v: (v, v), lambda xs, ys, dys: [dys[0] * 10.0 - dys[1]], looped=looped), 17)

    # Results are made in another order than they are returned in.
    def late_first(v: mtf.Tensor) -> tuple[mtf.Tensor, mtf.Tensor]:
        first = mtf.sin(v)
        return mtf.cos(first), first

    check(ruled(late_first, lambda xs, ys, dys: [dys[0] * 10.0 - dys[1]], looped=looped), 17)


def test_a_rule_holds_for_what_it_is_given_alone() -> None:
    """A value from outside that the function uses without naming it gets no gradient; a variable read in it, none."""
    d = D("d", 4)
    with mtf.Graph():
        x, w = mtf.input("x", [d]), mtf.variable("w", [d])
        y = mtf.custom_gradient(lambda v: v * w, lambda xs, ys, dys: [dys[0] * 5.0], [x])
        z = mtf.custom_gradient(lambda v: w, lambda xs, ys, dys: [dys[0] * 7.0], [x])
        dx, dw = mtf.gradients([mtf.reduce_sum(y) + mtf.reduce_sum(z)], [x, w])
        assert dw is None
        program = mtf.lower({"dx": dx})
    np.testing.assert_array_equal(mtf.simulate(program).step()["dx"], np.full(4, 12.0))


def test_reversal_under_recomputation_and_in_a_second_derivative() -> None:
    """d = -cos(x) x after the rule; its own derivative goes through the rule's operations."""
    d, data = D("d", 4), np.arange(1.0, 5.0)

    def reverse(v: mtf.Tensor) -> mtf.Tensor:
        made = mtf.custom_gradient(lambda u: u, lambda xs, ys, dys: [mtf.negative(dys[0])], [v])
        return mtf.sin(made)

    with mtf.Graph():
        x = mtf.input("x", [d], "float64")
        y = mtf.recompute_grad(reverse, [x])
        (first,) = mtf.gradients([mtf.reduce_sum(y)], [x])
        (second,) = mtf.gradients([mtf.reduce_sum(first)], [x])
        r = mtf.simulate(mtf.lower({"first": first, "second": second})).step(x=data)
    np.testing.assert_allclose(r["first"], -np.cos(data), rtol=1e-12)
    np.testing.assert_allclose(r["second"], -np.sin(data), rtol=1e-12)  # reversed once more


# ---------------------------------------------------------------- outer tensors that have the loop's dim


def table_loss(x: np.ndarray, table: np.ndarray, s: np.ndarray) -> float:
    """sum of c after c <- tanh(c + s[t] sum over time of sin(table c) + table[t])."""
    for t in range(4):
        x = np.tanh(x + s[t] * np.sum(np.sin(table * x), axis=0) + table[t])
    return float(x.sum())


def table_scan(second: bool) -> dict[str, mtf.Tensor]:
    time, c = D("time", 4), D("c", 8)
    x, table = mtf.input("x", [c], "float64"), mtf.input("table", [time, c], "float64")
    s = mtf.input("s", [time], "float64")

    def body(carries: tuple, parts: tuple) -> tuple:
        added = mtf.reduce_sum(mtf.sin(table * carries[0]), reduced_dim=time) * parts[0] + parts[1]
        return [mtf.tanh(carries[0] + added)], []

    (y,), _ = mtf.scan(body, [x], [s, table], time)
    grads = mtf.gradients([mtf.reduce_sum(y)], [x, table, s])
    if second:
        weights = mtf.input("weights", [time, c], "float64")
        grads = mtf.gradients([mtf.reduce_sum(grads[1] * weights)], [x, table, s])
    return dict(zip(("x", "table", "s"), grads, strict=True))


OVER_TIME = [
    (*place, executor)
    for place in (("m:1", ""), ("m:2;n:2", "time:m;c:n"), ("m:4", "c:m"), ("m:4", "time:m"))
    for executor in ("fast", "exact")
]


@pytest.mark.parametrize(("mesh", "layout", "executor"), some(OVER_TIME, [OVER_TIME[0], OVER_TIME[3], OVER_TIME[7]]))
def test_gradient_of_an_outer_tensor_with_the_dim_of_the_loop(mesh: str, layout: str, executor: str) -> None:
    rng = np.random.default_rng(8)
    feeds = {"x": rng.normal(size=8), "table": 0.5 * rng.normal(size=(4, 8)), "s": rng.normal(size=4)}
    weights = rng.normal(size=(4, 8))

    def numeric(of: Callable[[dict[str, np.ndarray]], float], name: str) -> np.ndarray:
        found = np.zeros_like(feeds[name])
        for at in np.ndindex(found.shape):
            step = np.zeros_like(found)
            step[at] = 1e-6
            above, below = ({**feeds, name: feeds[name] + way * step} for way in (1, -1))
            found[at] = (of(above) - of(below)) / 2e-6
        return found

    with mtf.Graph():
        program = mtf.lower(table_scan(False), mesh=mesh, layout=layout)
    first = mtf.simulate(program, executor=executor)
    for name, dx in first.step(feeds).items():
        np.testing.assert_allclose(dx, numeric(lambda f: table_loss(**f), name), rtol=1e-6, atol=1e-8)
    with mtf.Graph():
        program = mtf.lower(table_scan(True), mesh=mesh, layout=layout)
    found = mtf.simulate(program, executor=executor).step({**feeds, "weights": weights})
    for name in ("s", "x"):
        wanted = numeric(lambda f: float((first.step(f)["table"] * weights).sum()), name)
        np.testing.assert_allclose(found[name], wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("executor", ["exact", "fast"])
def test_a_carry_that_has_the_dim_of_the_loop(executor: str) -> None:
    """c <- c * x[t] over time, where c has time itself: the product of all x in every place."""
    time = D("time", 3)
    with mtf.Graph():
        c, x = mtf.input("c", [time], "float64"), mtf.input("x", [time], "float64")
        (y,), _ = mtf.scan(lambda carries, parts: ([mtf.sin(carries[0]) * parts[0]], []), [c], [x], time)
        dc, dx = mtf.gradients([mtf.reduce_sum(y)], [c, x])
        (ddx,) = mtf.gradients([mtf.reduce_sum(dx)], [c])
        program = mtf.lower({"y": y, "dc": dc, "dx": dx, "ddx": ddx}, mesh="m:3", layout="time:m")

    def wanted(start: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        before = [start]
        for part in x:
            before.append(np.sin(before[-1]) * part)
        up, dx = np.ones(3), np.zeros(3)
        for t in reversed(range(3)):
            dx[t] = np.sum(up * np.sin(before[t]))
            up = up * np.cos(before[t]) * x[t]
        return before[-1], up, dx

    c0, x0 = np.array([0.3, 0.7, 1.1]), np.array([0.9, 1.3, 0.8])
    found = mtf.simulate(program, executor=executor).step(c=c0, x=x0)
    for name, value in zip(("y", "dc", "dx"), wanted(c0, x0), strict=True):
        np.testing.assert_allclose(found[name], value, rtol=1e-12)
    step = 1e-6 * np.eye(3)
    slope = [(wanted(c0 + e, x0)[2].sum() - wanted(c0 - e, x0)[2].sum()) / 2e-6 for e in step]
    np.testing.assert_allclose(found["ddx"], slope, rtol=1e-7)


def test_what_forward_alone_has_is_made_again() -> None:
    """A search that expects nothing to come home once lost all its states where something cannot."""
    a, b, c, n = (mtf.Dimension(*d) for d in (("a", 4), ("b", 6), ("c", 2), ("n", 6)))
    with mtf.Graph():
        v = mtf.variable("v", [a, b, c], 1.0)
        part = mtf.tanh(mtf.reduce_logsumexp(mtf.tanh(v), a))
        stacked = mtf.rename_dimension(mtf.concat([part, part, mtf.sin(part)], "c"), "c", "n")
        begin = mtf.reduce_mean(stacked, output_shape=[b])
        (last,), _ = mtf.scan(lambda carries, slices: ([mtf.tanh(carries[0]) + slices[0]], []), [begin], [stacked], n)
        loss = mtf.reduce_mean(mtf.sin(mtf.tanh(last))) + mtf.reduce_mean(mtf.sin(v))
        train = mtf.optimize.SgdOptimizer(0.05).minimize(loss)
    report = mtf.verify({"loss": loss}, train, layouts=[("p:2;q:3", "n:q;variables/b:p")])
    assert report.ok, report
