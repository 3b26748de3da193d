"""Policies of rematerialisation: the same numbers, other work, memory and moves, each derived by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

import meshlib as mtf
from meshlib.program.instructions import Loop
from tests.effort import some

D = mtf.Dimension
LAYERS, BATCH, LENGTH, MEMORY = D("layers", 3), D("batch", 4), D("length", 4), D("memory_length", 4)
HEADS, KEY, MODEL, FF = D("heads", 2), D("key", 4), D("d_model", 8), D("d_ff", 16)
WEIGHTS = {"wq": [MODEL, HEADS, KEY], "wk": [MODEL, HEADS, KEY], "wo": [HEADS, KEY, MODEL], "w1": [MODEL, FF],
           "w2": [FF, MODEL]}  # fmt: skip
POLICIES: dict[str, object] = {
    "full": "full",
    "none": "none",
    "matmuls": "matmuls",
    "saved": mtf.Remat(save=["q", "hidden"]),
    "offloaded": mtf.Remat(save=["q"], offload=["context", "hidden"], offload_carries=True),
}
PLACES = (
    ("a:1", ""),
    ("a:2", "batch:a"),
    ("a:4", "batch:a;d_model:a?"),
    ("a:2;b:2", "batch:a;heads:b;d_ff:b"),
    ("a:2;b:2", "batch:a+b;d_ff:b?;d_model:a?"),
    ("a:2;b:2;c:2", "batch:a;length:c;heads:b;d_ff:b"),
    ("a:2;b:2;c:2", "batch:a;variables/d_model:c;heads:b;d_ff:b"),
)
Weights = tuple[mtf.Tensor, ...]


def layer(x: mtf.Tensor, weights: Weights, training: bool) -> mtf.Tensor:
    """Attention with one kind of everything: casts, a norm, a mask of random numbers, integers, a constraint."""
    wq, wk, wo, w1, w2 = weights
    normed = x * mtf.rsqrt(mtf.reduce_mean(mtf.square(x), reduced_dim=MODEL) + 0.1)
    q = mtf.einsum([normed, wq], [BATCH, LENGTH, HEADS, KEY], name="q")
    k = mtf.rename_dimension(mtf.einsum([normed, wk], [BATCH, LENGTH, HEADS, KEY], name="k"), "length", "memory_length")
    scores = mtf.einsum([q, k], [BATCH, HEADS, LENGTH, MEMORY])
    later = mtf.greater_equal(mtf.range(LENGTH, "int32"), mtf.range(MEMORY, "int32"))
    shares = mtf.softmax(mtf.where(later, scores, -1e9), MEMORY)
    shares = mtf.dropout(shares, training, keep_prob=0.75)
    context = mtf.einsum([shares, k], [BATCH, LENGTH, HEADS, KEY], name="context")
    x = x + mtf.einsum([context, wo], [BATCH, LENGTH, MODEL], name="out")
    hidden = mtf.einsum([mtf.sin(x), w1], [BATCH, LENGTH, FF], name="hidden")
    return x + mtf.constrain(mtf.einsum([mtf.tanh(hidden), w2], [BATCH, LENGTH, MODEL]), "batch:a")


def shapes(how: str) -> dict[str, list[mtf.Dimension]]:
    """Of the inputs: a loop has a first, a middle and a last trip; of layers in a row each is a region of its own."""
    layers = LAYERS if how == "scan" else D("layers", 2)
    return {"x": [BATCH, LENGTH, MODEL], **{name: [layers, *dims] for name, dims in WEIGHTS.items()}}


def network(remat: object | None, how: str, training: bool) -> dict[str, mtf.Tensor]:
    """Outputs and gradients of two or three layers; with remat None they are written out."""
    x, *weights = (mtf.input(name, shape, "float64") for name, shape in shapes(how).items())
    layers = weights[0].shape.dim("layers")
    if how == "scan" and remat is not None:
        (y,), (norms,) = mtf.scan(
            lambda c, s: ((layer(c[0], s, training),), (mtf.reduce_sum(mtf.square(c[0]), reduced_dim=MODEL),)),
            [x],
            weights,
            layers,
            remat=remat,
        )
    else:
        y, sums = x, []
        for part in zip(*(mtf.unstack(w, layers) for w in weights), strict=True):
            sums.append(mtf.reduce_sum(mtf.square(y), reduced_dim=MODEL))
            if remat is None:
                y = layer(y, part, training)
            else:
                y = mtf.recompute_grad(lambda v, *w: layer(v, w, training), [y, *part], remat=remat)
        norms = mtf.stack(sums, "layers")
    loss = mtf.reduce_sum(mtf.sin(y)) + mtf.reduce_sum(norms) * 0.1
    grads = mtf.gradients([loss], [x, *weights])
    return {"y": y, "loss": loss, **{f"d{n}": g for n, g in zip(("x", *WEIGHTS), grads, strict=True)}}


@cache
def session(policy: str | None, how: str, training: bool) -> mtf.Session:
    """The network, to lower under many layouts."""
    with mtf.Graph():
        return mtf.Session(network(policy and POLICIES[policy], how, training))


def run(policy: str | None, how: str, training: bool, mesh: str, layout: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    feeds = {n: rng.normal(size=[d.size for d in dims]) * 0.5 for n, dims in shapes(how).items()}
    program = session(policy, how, training).lower(mesh, layout, "highest")
    return mtf.simulate(program, executor="exact", seed=3).step(feeds)


@cache
def on_one_core(policy: str | None, how: str, training: bool) -> dict[str, np.ndarray]:
    """What the others are compared with."""
    return run(policy, how, training, "a:1", "")


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-11, err_msg=name)


SPOTS = [(how, *place, policy) for how in ("scan", "recompute") for place in PLACES for policy in POLICIES]
# Each policy and each place, of a loop or of layers in a row.
POLICY_AT = dict(zip(PLACES, (*POLICIES, *POLICIES), strict=False))
USUAL = [spot for spot in SPOTS if spot[3] == POLICY_AT[spot[1:3]]]


@pytest.mark.parametrize(("how", "mesh", "layout", "policy"), some(SPOTS, USUAL[::2]))
def test_equals_the_layers_written_out(how: str, mesh: str, layout: str, policy: str) -> None:
    assert_equal(run(policy, how, False, mesh, layout), on_one_core(None, how, False))


DROPPING = [(how, policy) for how in ("scan", "recompute") for policy in POLICIES if policy != "full"]


@pytest.mark.parametrize(("how", "policy"), some(DROPPING, [("scan", "offloaded"), ("recompute", "none")]))
def test_dropout_is_the_same_under_every_policy(how: str, policy: str) -> None:
    expected = on_one_core("full", how, True)
    assert_equal(run(policy, how, True, *PLACES[-1]), expected)
    without = on_one_core("full", how, False)
    assert np.abs(without["y"] - expected["y"]).max() > 1e-3


# ---------------------------------------------------------------- work, memory and moves, by hand

N, B, M, F = LAYERS.size, 64, 8, 32
ROWS, WIDE = D("batch", B), D("d_ff", F)
F32 = 4


def block(x: mtf.Tensor, w1: mtf.Tensor, w2: mtf.Tensor) -> mtf.Tensor:
    """x + tanh(x w1) w2: the gradients of tanh and of the second product need tanh's result."""
    rows = x.shape.dim("batch")
    h = mtf.einsum([x, w1], [rows, WIDE], name="h")
    return x + mtf.einsum([mtf.tanh(h), w2], [rows, MODEL], name="out")


def two_products(
    remat: object,
    mesh: str = "a:1",
    layout: str = "",
    how: str = "scan",
    body: Callable = block,
    balance: mtf.Balance | None = None,
    rows: mtf.Dimension = ROWS,
) -> mtf.Program:
    with mtf.Graph():
        x = mtf.input("x", [rows, MODEL])
        w1, w2 = mtf.variable("w1", [LAYERS, MODEL, WIDE]), mtf.variable("w2", [LAYERS, WIDE, MODEL])
        if how == "scan":
            (y,), _ = mtf.scan(lambda c, s: ((body(c[0], *s),), ()), [x], [w1, w2], LAYERS, remat=remat)
        else:
            y = x
            for part in zip(mtf.unstack(w1, LAYERS), mtf.unstack(w2, LAYERS), strict=True):
                y = mtf.recompute_grad(body, [y, *part], remat=remat)
        d1, d2 = mtf.gradients([mtf.reduce_sum(mtf.square(y))], [w1, w2])
        return mtf.lower({"d1": d1, "d2": d2}, mesh=mesh, layout=layout, balance=balance)


FORWARD = N * 2 * (2 * B * M * F)
KEPT = {"none": 1, "matmuls": 1, "full": 0}  # values of [batch, d_ff] a layer: tanh's operand


@pytest.mark.parametrize("how", ["scan", "recompute"])
@pytest.mark.parametrize(("remat", "times"), [("none", 3), ("full", 3.5), ("matmuls", 3), (mtf.Remat(save=["h"]), 3)])
def test_executed_flops(remat: object, times: float, how: str) -> None:
    # Backward: two products for each. Under "full" the first of the two again; the last nobody needs.
    for mesh, layout, cores in (("a:1", "", 1), ("a:2", "batch:a", 2), ("a:2;b:2", "batch:a;d_ff:b", 4)):
        program = two_products(remat, mesh, layout, how)
        # Without a scan the first layer's input gets no gradient.
        first = 0 if how == "scan" else 2 * B * M * F
        assert program.work.mxu_flops * cores == times * FORWARD - first


@pytest.mark.parametrize("remat", ["none", "matmuls"])
def test_peak_of_kept_values(remat: str) -> None:
    wide, narrow, weights = B * F * F32, B * M * F32, 2 * M * F * F32
    stacks = N * (narrow + KEPT[remat] * wide)  # the carry before each trip, and what is kept of it
    # In the backward's last products: the cotangent of h. The weights' gradients of a trip are written where those of
    # all trips are, the next carry where the last was, and tanh's result is made again.
    inside = wide
    resident = N * weights + narrow
    gradients = N * weights + narrow  # and the carry
    memory = two_products(remat).memory
    assert memory.peak_bytes == resident + gradients + stacks + inside
    assert memory.host_bytes == 0


def test_less_kept_is_less_memory() -> None:
    for how in ("scan", "recompute"):
        full, matmuls, none = (two_products(r, how=how).memory.peak_bytes for r in ("full", "matmuls", "none"))
        assert full < matmuls == none  # tanh's result is made again whatever is said


def kept_types(program: mtf.Program) -> list[tuple[tuple[str, ...], str]]:
    """Dims and dtypes of what the forward's loop stacks after its one carry."""
    (forward,) = (i for i in program.instructions if isinstance(i, Loop) and i.region == "forward")
    return [(y.tensor.shape.names, y.tensor.dtype.name) for y in forward.outputs[1:]]


@pytest.mark.parametrize("function", ["exp", "tanh"])
def test_only_what_the_gradient_uses_is_kept(function: str) -> None:
    """A product, not its widening cast, nor what follows element by element: exp or tanh is
    made again from the product."""

    def body(x: mtf.Tensor, w1: mtf.Tensor, w2: mtf.Tensor) -> mtf.Tensor:
        h = mtf.einsum([mtf.cast(x, "bfloat16"), mtf.cast(w1, "bfloat16")], [ROWS, WIDE])
        wide = mtf.cast(mtf.rename_dimension(h, "d_ff", "f"), "float32")
        activated = mtf.rename_dimension(mtf.cast(getattr(mtf, function)(wide), "bfloat16"), "f", "d_ff")
        return x + mtf.cast(mtf.einsum([activated, mtf.cast(w2, "bfloat16")], [ROWS, MODEL]), "float32")

    before, h = (("layers", "batch", "d_model"), "float32"), (("layers", "batch", "d_ff"), "bfloat16")
    assert kept_types(two_products("none", body=body)) == [before, h]


def test_what_is_smaller_than_what_it_is_made_of_is_kept() -> None:
    """Of a sum of two products that nobody needs alone, the sum; of a wide product, its narrow cast; of dropout, what
    was drawn as flags."""

    def body(x: mtf.Tensor, w1: mtf.Tensor, w2: mtf.Tensor) -> mtf.Tensor:
        wide = mtf.rename_dimension(mtf.einsum([x, w1], [ROWS, WIDE]), "d_ff", "f")
        both = wide + mtf.rename_dimension(mtf.einsum([mtf.tanh(x), w1], [ROWS, WIDE]), "d_ff", "f")
        h = mtf.dropout(mtf.tanh(mtf.cast(both, "bfloat16")), True, 0.5)
        narrow = mtf.rename_dimension(mtf.cast(h, "float32"), "f", "d_ff")
        return x + mtf.einsum([narrow, w2], [ROWS, MODEL])

    before = (("layers", "batch", "d_model"), "float32")
    wide = ("layers", "batch", "f")
    assert kept_types(two_products("none", body=body)) == [before, (wide, "bfloat16"), (wide, "bool")]


def test_what_is_made_of_constants_alone_is_not_kept() -> None:
    def body(x: mtf.Tensor, w1: mtf.Tensor, w2: mtf.Tensor) -> mtf.Tensor:
        table = mtf.cos(mtf.cast(mtf.range(WIDE, "int32"), "float32") * 0.1)
        return x + mtf.einsum([mtf.einsum([x, w1], [ROWS, WIDE]) * table, w2], [ROWS, MODEL])

    wide, narrow = (("layers", "batch", d) for d in ("d_ff", "d_model"))
    assert kept_types(two_products("none", body=body)) == [(narrow, "float32"), (wide, "float32")]


def test_products_with_weights_are_kept_by_the_policy_matmuls() -> None:
    """Not those of queries with keys and of shares with values; not the last one, which the gradient has no use for."""
    with mtf.Graph():
        program = mtf.lower(network("matmuls", "scan", True), mesh="a:1")
    heads = ("layers", "batch", "length", "heads", "key")
    found = [names for names, _ in kept_types(program)[1:]]  # after the norms, which the user stacks
    before, out, hidden = (("layers", "batch", "length", d) for d in ("d_model", "d_model", "d_ff"))
    assert found == [before, heads, heads, out, hidden]


def collectives(program: mtf.Program, phase: str) -> dict[str, float]:
    """Bytes that a core sends in a phase, by kind."""
    found: dict[str, float] = {}
    for c in program.collectives:
        if c.phase == phase:
            found[c.kind] = found.get(c.kind, 0) + c.count * c.sent_bytes
    return found


def test_what_is_kept_is_told_by_name() -> None:
    with mtf.Graph():
        outputs = network(mtf.Remat(save=["q", "hidden"]), "scan", training=False)
        program = mtf.lower(outputs, mesh="a:1")
    names = {live.name for live in program.memory.live}
    assert {"scan:carry_0", "scan:q", "scan:hidden"} <= names, names


def test_a_repeated_sum_over_cores_is_repeated() -> None:
    """Two blocks a layer: under "full" the first one's sum is made again, as the second needs it; the last is not."""

    def body(x: mtf.Tensor, w1: mtf.Tensor, w2: mtf.Tensor) -> mtf.Tensor:
        return block(block(x, w1, w2), w1, w2)

    summed = 2 * (2 - 1) / 2 * B * M * F32
    kinds = {r: collectives(two_products(r, "a:2", "d_ff:a", body=body), "backward") for r in KEPT}
    assert kinds["none"] == kinds["matmuls"] == {"all_reduce": 2 * N * summed}
    assert kinds["full"] == {"all_reduce": 3 * N * summed}


def test_a_repeated_product_gathers_its_weights_again() -> None:
    """Fully sharded; the operand of the product gets no gradient, which alone would need the weight.

    The batch is so large that a weight is cheaper to gather than the product's operand.
    """

    def body(x: mtf.Tensor, w1: mtf.Tensor, w2: mtf.Tensor) -> mtf.Tensor:
        return block(mtf.stop_gradient(x), w1, w2) + x

    gathered = N * (2 - 1) * M * F * F32 / 2  # one weight, once a layer
    rows = D("batch", 2 * B)
    programs = {r: two_products(r, "a:2", "batch:a;variables/d_ff:a", body=body, rows=rows) for r in KEPT}
    for remat, program in programs.items():
        assert collectives(program, "forward")["all_gather"] == 2 * gathered
        # The second weight for the cotangent of its operand; the first only to compute h again.
        assert collectives(program, "backward")["all_gather"] == (2 if remat == "full" else 1) * gathered


def test_what_is_known_is_known_at_second_order_too() -> None:
    def flops(remat: str) -> int:
        with mtf.Graph():
            x, w1 = mtf.input("x", [ROWS, MODEL]), mtf.input("w1", [LAYERS, MODEL, WIDE])
            w2 = mtf.input("w2", [LAYERS, WIDE, MODEL])
            (y,), _ = mtf.scan(lambda c, s: ((block(c[0], *s),), ()), [x], [w1, w2], LAYERS, remat=remat)
            (first,) = mtf.gradients([mtf.reduce_sum(mtf.square(y))], [w1])
            (second,) = mtf.gradients([mtf.reduce_sum(mtf.sin(first))], [w2])
            return mtf.lower([second]).work.mxu_flops

    # h again in the backward loop, in the gradient of that, and in the second gradient of the loop itself.
    assert flops("full") - flops("none") == 3 * FORWARD // 2


@pytest.mark.parametrize("remat", ["full", "none", "matmuls", mtf.Remat(save=["out"])])
def test_keeping_a_value_moves_nothing_in_the_forward(remat: object) -> None:
    """A sum over cores that is constrained to parts is kept in parts: not made whole first.

    With the weights gathered, the second block would send less. But then its hidden values lie by batch: where they are
    kept, the backward would have to exchange them.
    """

    def body(x: mtf.Tensor, w1: mtf.Tensor, w2: mtf.Tensor) -> mtf.Tensor:
        h = mtf.sin(mtf.einsum([x, w1], [ROWS, WIDE]))
        inner = mtf.constrain(mtf.einsum([h, w2], [ROWS, MODEL], name="out"), "batch:a")
        return x + mtf.einsum([mtf.sin(mtf.einsum([mtf.sin(inner), w1], [ROWS, WIDE])), w2], [ROWS, MODEL])

    scattered, gathered, weights = B * M * F32 / 2, B * M * F32 / 2, 2 * M * F * F32 / 2
    # The last product, too, is scattered: it is added to x in parts, and their sum is gathered for the next trip.
    stay = {"reduce_scatter": 2 * N * scattered, "all_gather": 2 * N * gathered}
    held = two_products(remat, "a:2", "d_ff:a", body=body, balance=mtf.Balance(stationary=True))
    assert collectives(held, "forward") == stay
    come = {"reduce_scatter": N * scattered, "all_gather": N * (weights + gathered)}
    sent = collectives(
        two_products(remat, "a:2", "d_ff:a", body=body, balance=mtf.Balance(stationary=False)), "forward"
    )
    assert sent == (stay if remat in KEPT and KEPT[str(remat)] else come)


def test_a_value_with_the_dim_of_the_loop() -> None:
    """By name it is an error; by policy it is computed again."""

    def body(carries: tuple, slices: tuple) -> tuple:
        wide = mtf.sin(mtf.broadcast(carries[0], [LAYERS, MODEL]), name="wide")
        return (mtf.reduce_sum(mtf.square(wide) * slices[0], reduced_dim=LAYERS),), ()

    found = {}
    with mtf.Graph():
        x, w = mtf.input("x", [MODEL], "float64"), mtf.input("w", [LAYERS], "float64")
        for remat in ("full", "none"):
            (y,), _ = mtf.scan(body, [x], [w], LAYERS, remat=remat)
            found[remat] = mtf.gradients([mtf.reduce_sum(y)], [x])[0]
        with pytest.raises(mtf.ShapeError, match=r"has the dim layers:3 of the loop already; rename it"):
            mtf.scan(body, [x], [w], LAYERS, remat=mtf.Remat(save=["wide"]))
        program = mtf.lower(found)
    result = mtf.simulate(program).step(x=np.linspace(0.1, 1, 8), w=[0.3, 0.5, 0.7])
    np.testing.assert_allclose(result["none"], result["full"], rtol=1e-12)


# ---------------------------------------------------------------- host memory


@pytest.mark.parametrize("how", ["scan", "recompute"])
@pytest.mark.parametrize(("mesh", "layout", "cores"), [("a:1", "", 1), ("a:2;b:2", "batch:a;d_ff:b", 4)])
def test_bytes_of_the_host(mesh: str, layout: str, cores: int, how: str) -> None:
    h = N * B * F * F32 // cores
    program = two_products(mtf.Remat(offload=["h"]), mesh, layout, how)
    assert (program.to_host_bytes, program.from_host_bytes, program.memory.host_bytes) == (h, h, h)
    assert (program.work.mxu_flops * cores) % FORWARD == (0 if how == "scan" else FORWARD - 2 * B * M * F)
    kept = two_products(mtf.Remat(save=["h"]), mesh, layout, how)
    assert (kept.to_host_bytes, kept.from_host_bytes, kept.memory.host_bytes) == (0, 0, 0)
    assert program.memory.peak_bytes < kept.memory.peak_bytes
    text = str(program)
    assert f", copies {h // N // 1024} KiB to the host" in text
    assert f", copies {h // N // 1024} KiB from the host" in text
    assert f"on the host: {h // 1024} KiB ({h} bytes, exact)" in str(program.memory)


def test_carries_on_the_host() -> None:
    narrow, wide, weights = B * M * F32, B * F * F32, 2 * M * F * F32
    program = two_products(mtf.Remat(offload=["h"], offload_carries=True))
    assert program.to_host_bytes == program.from_host_bytes == N * (narrow + wide)
    # Of the stacks nothing is left. In the backward one trip's h and carry are back; the cotangent of h is written over
    # h, of which the activation is made again for the gradient of the weights.
    resident, gradients = N * weights + narrow, N * weights + narrow
    assert program.memory.peak_bytes == resident + gradients + narrow + wide


def test_what_nobody_needs_stays_away() -> None:
    """The last product is no use to the gradient, so nothing goes to the host for it."""
    program = two_products(mtf.Remat(offload=["out"]))
    assert (program.to_host_bytes, program.memory.host_bytes) == (0, 0)
    only_forward = two_products(mtf.Remat(offload=["h"], offload_carries=True))
    with mtf.Graph():
        x = mtf.input("x", [ROWS, MODEL])
        w1, w2 = mtf.input("w1", [LAYERS, MODEL, WIDE]), mtf.input("w2", [LAYERS, WIDE, MODEL])
        remat = mtf.Remat(offload=["h"], offload_carries=True)
        (y,), _ = mtf.scan(lambda c, s: ((block(c[0], *s),), ()), [x], [w1, w2], LAYERS, remat=remat)
        inference = mtf.lower({"y": y})
    assert only_forward.to_host_bytes > 0
    assert (inference.to_host_bytes, inference.from_host_bytes) == (0, 0)


# ---------------------------------------------------------------- second order, nesting, errors


STACKS_AWAY = mtf.Remat(save=["wide"], offload=["y"], offload_carries=True)
NESTED = [(n, inner, p) for n in (1, 2) for inner in ("scan", "recompute") for p in ("none", "matmuls", STACKS_AWAY)]
FIRST = [(1, "scan", STACKS_AWAY), (1, "recompute", "matmuls"), (2, "scan", "none"), (2, "recompute", STACKS_AWAY)]


@pytest.mark.parametrize(("order", "inner", "remat"), some(NESTED, FIRST))
def test_nested_and_second_order(order: int, inner: str, remat: object) -> None:
    steps, d, out = D("steps", 2), D("d", 8), D("out", 8)

    def cell(v: mtf.Tensor, w: mtf.Tensor) -> mtf.Tensor:
        wide = mtf.sin(mtf.einsum([v, w], [BATCH, out], name="wide"))
        return mtf.rename_dimension(mtf.tanh(wide) * wide, "out", "d", name="y") + v * 0.5

    def results(policy: object | None) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(1)
        feeds = {"x": rng.normal(size=(4, 8)), "w": rng.normal(size=(3, 8, 8)) * 0.5, "s": rng.normal(size=(2, 8))}
        with mtf.Graph():
            x, w = mtf.input("x", [BATCH, d], "float64"), mtf.input("w", [LAYERS, d, out], "float64")
            s = mtf.input("s", [steps, d], "float64")

            def layer(c: tuple, parts: tuple) -> tuple:
                if policy is not None and inner == "recompute":
                    return (mtf.recompute_grad(lambda v, p: cell(v, p) * 0.9, [c[0], *parts], remat=policy),), ()
                if policy is None and inner == "recompute":
                    return (cell(c[0], parts[0]) * 0.9,), ()
                (y,), _ = mtf.scan(
                    lambda i, o: ((cell(i[0], parts[0]) + o[0],), ()), c, [s], steps, remat=policy or "full"
                )
                return (y,), ()

            outer = "none" if policy is not None and inner == "scan" else policy or "full"
            (y,), _ = mtf.scan(layer, [x], [w], LAYERS, remat=outer if inner == "scan" else "full")
            grads = mtf.gradients([mtf.reduce_sum(mtf.square(y))], [x, w])
            if order == 2:
                total = mtf.add_n([mtf.reduce_sum(mtf.sin(g)) for g in grads])
                grads = mtf.gradients([total], [x, w])
            program = mtf.lower(
                {"y": y, "dx": grads[0], "dw": grads[1], "s": s}, mesh="a:2", layout="batch:a;d:a?", precision="highest"
            )
        return mtf.simulate(program, executor="exact").step(feeds)

    assert_equal(results(remat), results(None))


def test_bad_policies() -> None:
    with pytest.raises(mtf.GraphError, match="save must be a list of last parts of names, got 3"):
        mtf.Remat(save=[3])  # type: ignore[list-item]
    with pytest.raises(mtf.GraphError, match="offload must be a list of last parts of names, got 'a/b'"):
        mtf.Remat(offload=["a/b"])
    with pytest.raises(mtf.ShapeError, match="save must be a list, got str 'q'"):
        mtf.Remat(save="q")
    with pytest.raises(mtf.GraphError, match="'q' is in both save and offload; remove it from one"):
        mtf.Remat(save=["q"], offload=["q"])
    with pytest.raises(mtf.GraphError, match="offload_carries must be True or False, got int 1"):
        mtf.Remat(offload_carries=1)  # type: ignore[arg-type]
    for how in ("scan", "recompute"):
        with pytest.raises(mtf.GraphError, match=r"remat must be 'full' or 'none' or 'matmuls', got 'fulll'; .*'full'"):
            two_products("fulll", how=how)
        with pytest.raises(mtf.GraphError, match=r"remat must be 'full', 'none', 'matmuls' or an mtf.Remat, got 7"):
            two_products(7, how=how)
        with pytest.raises(mtf.GraphError, match=r"no operation is named 'outt', which remat keeps; .*'out'"):
            two_products(mtf.Remat(save=["outt"]), how=how)
