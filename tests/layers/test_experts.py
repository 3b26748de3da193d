"""Mixtures of experts against a reference that routes token by token: values, losses, drops, gradients, layouts."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from meshlib.layers import Mixture, Routing
from tests.effort import draws, each, some
from tests.layers.experts_reference import mixture
from tests.oracle import Array, assert_close, draw_layout, needed, numeric_slope, run

D = mtf.Dimension
GROUPS, TOKENS, WIDE, FF = D("batch", 4), D("length", 12), D("d", 6), D("f", 8)
WHOLE = mtf.Numerics("float64")
NARROW = {"capacity_factor": 1.0, "min_expert_capacity": 1}

# name: experts, arguments of the layer, routing
CASES: dict[str, tuple[int, dict[str, Any], Routing]] = {
    "top 1": (4, {}, Routing(top_k=1, renormalise=False, **NARROW)),
    "top 2": (4, {}, Routing(top_k=2, **NARROW)),
    "top 3, not renormalised, scaled": (5, {}, Routing(top_k=3, renormalise=False, scale=2.5, **NARROW)),
    "all experts": (3, {}, Routing(top_k=3, capacity_factor=None)),
    "gated, shared": (4, {"gated": True, "activation": "silu", "shared_channels": D("f", 8)}, Routing(**NARROW)),
    "with biases": (4, {"gated": True, "use_bias": True, "shared_channels": D("f", 8)}, Routing(**NARROW)),
    "switch": (4, {}, Routing(gating="switch", **NARROW)),
    "switch, one place": (4, {}, Routing(gating="switch", capacity_factor=0.01, min_expert_capacity=1)),
    "switch, one expert": (1, {}, Routing(gating="switch", capacity_factor=1.0)),
    "switch, one expert with little room": (1, {}, Routing(gating="switch", capacity_factor=0.5)),
    "top 2 of Mesh TensorFlow": (4, {}, Routing(gating="top_2", **NARROW)),
    "second ones by threshold": (
        4, {}, Routing(gating="top_2", second_policy="threshold", second_threshold=0.4, **NARROW),
    ),
    "no second ones": (4, {}, Routing(gating="top_2", second_policy="none", **NARROW)),
    "none left behind": (4, {}, Routing(gating="ntlb", ntlb_top_k=3, **NARROW)),
    "expert choice": (4, {}, Routing(gating="expert_choice", top_k=1, **NARROW)),
    "expert choice by sigmoids": (3, {}, Routing(gating="expert_choice", scores="sigmoid", scale=2.0, **NARROW)),
    "DeepSeek-V3": (
        8, {"gated": True, "shared_channels": D("f", 8)},
        Routing(top_k=3, scores="sigmoid", bias=True, expert_groups=4, groups_per_token=2, scale=2.5, **NARROW),
    ),
    "DeepSeek-V2": (
        6, {},
        Routing(top_k=2, renormalise=False, expert_groups=3, groups_per_token=1, group_score="max", **NARROW),
    ),
    "small groups": (4, {}, Routing(top_k=2, group_size=6, **NARROW)),
    "large groups": (4, {}, Routing(top_k=2, group_size=24, **NARROW)),
}  # fmt: skip


def dropless(routing: Routing, shards: int) -> Routing:
    """The same choices with room for all."""
    return replace(routing, capacity_factor=None, expert_shards=shards)


def built(
    experts: int, arguments: dict[str, Any], routing: Routing, form: str, dtype: str = "float64", padded: bool = False
) -> tuple[Mixture, mtf.Tensor]:
    """The layer on variables, and a loss whose gradient sees every element."""
    numerics = mtf.Numerics(dtype)
    x = mtf.variable("x", [GROUPS, TOKENS, WIDE], dtype=dtype)
    mask = mtf.input("mask", [GROUPS, TOKENS], "bool") if padded else None
    y = mtf.layers.moe(
        x, D("e", experts), FF, routing, form=form, training=True, nonpadding=mask, numerics=numerics, **arguments
    )
    factors = mtf.input("factors", y.values.shape, dtype)
    return y, mtf.reduce_sum(y.values * factors) + mtf.reduce_mean(y.loss)


def drawn(graph: mtf.Graph, seed: int = 0) -> dict[str, Array]:
    """Values of all variables."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=op.output.shape.sizes) for name, op in graph.variables.items()}


def split(x: Array, routing: Routing) -> Array:
    """By groups."""
    return x if routing.group_size is None else x.reshape(-1, routing.group_size, x.shape[-1])


def expected(
    values: dict[str, Array], arguments: dict[str, Any], routing: Routing, real: Array | None = None
) -> dict[str, Array]:
    """What the reference makes of it."""
    weights = {name.removeprefix("moe/"): value for name, value in values.items()}
    x = values["x"]
    made, said = mixture(split(x, routing), weights, routing, arguments.get("activation", "relu"), real)
    return {
        "values": made.reshape(x.shape),
        "dropped": np.array([s.dropped for s in said], np.int32),
        "load": np.array([s.wanted for s in said], np.int32),
        "balance": np.array([s.balance for s in said]),
        "z": np.array([s.z for s in said]),
    }


def gradients(graph: mtf.Graph, loss: mtf.Tensor) -> dict[str, mtf.Tensor]:
    """Of all trained variables, by their names."""
    trained = graph.trainable_variables
    return {v.name: g for v, g in zip(trained, mtf.gradients([loss], trained), strict=True)}


def fetched(y: Mixture) -> dict[str, mtf.Tensor]:
    return {"values": y.values, "dropped": y.dropped, "load": y.load, "balance": y.balance_loss, "z": y.z_loss}


def as_drawn(values: dict[str, Array]) -> None:
    """Without ties."""


def all_alike(values: dict[str, Array]) -> None:
    """Scores of all experts tie, for every token."""
    values["moe/router/kernel"][:] = 0


def two_alike(values: dict[str, Array]) -> None:
    """Two experts tie, and tokens come in pairs of equals."""
    values["moe/router/kernel"][:, -1] = values["moe/router/kernel"][:, 0]
    values["x"][:, 1::2] = values["x"][:, ::2]


GROUPED = {
    f"{name}, {shards} shards": (experts, arguments, dropless(routing, shards))
    for name, (experts, arguments, routing) in CASES.items()
    for shards in (1, 2)
    if routing.gating not in ("ntlb", "expert_choice") and experts % shards == 0
}
CASES |= GROUPED
CASES["top 2, rows added"] = GROUPED["top 2, rows added"] = (
    *CASES["top 2, 2 shards"][:2],
    replace(CASES["top 2, 2 shards"][2], row_sums="scatter"),
)

# And the others in a deep run: routing is the same.
BY_MASKS = ("top 2", "gated, shared", "expert choice")
BY_ALL = ("top 2", "with biases", "none left behind", "expert choice", "all experts", "small groups")
OTHERS = [name for name in CASES if name not in GROUPED]
SHARDED = [name for name in GROUPED if not name.endswith(", 1 shards") or name == "top 2, 1 shards"]
FORMED = {
    "einsum": some(OTHERS, BY_MASKS),
    "dense": some(OTHERS, BY_ALL),
    "gather": OTHERS,
    "grouped": some([*GROUPED], SHARDED),
}


@each("name, form", [(name, form) for form, names in FORMED.items() for name in names])
def test_as_token_by_token(name: str, form: str) -> None:
    """Of ties the lower index wins."""
    experts, arguments, routing = CASES[name]
    with mtf.Graph() as graph:
        y, _ = built(experts, arguments, routing, form)
        program = mtf.lower(fetched(y))
    for change in (as_drawn, all_alike, two_alike):
        values = drawn(graph)
        change(values)
        (found,) = run(program, {}, "fast", state=values)
        assert_close(found, expected(values, arguments, routing), 1e-9, (name, change), floor=1.0)


@each("name", ("top 2", "switch", "none left behind", "expert choice", "gated, shared", "top 2, 2 shards"))
def test_padding_goes_nowhere_and_takes_no_room(name: str) -> None:
    experts, arguments, routing = CASES[name]
    real = np.random.default_rng(1).random((GROUPS.size, TOKENS.size)) < 0.6
    real[0] = False  # a group of nothing else
    with mtf.Graph() as graph:
        y, _ = built(experts, arguments, routing, "grouped" if name in GROUPED else "gather", padded=True)
        values = drawn(graph)
        (found,) = run(mtf.lower(fetched(y)), {"mask": real}, "fast", state=values)
    assert_close(found, expected(values, arguments, routing, real), 1e-9, name, floor=1.0)
    if "shared_channels" not in arguments:
        assert not found["values"][~real].any()


SLOPES = [(name, "gather") for name in ("top 2", "with biases", "none left behind", "DeepSeek-V3")]
SLOPES += [("with biases", "dense"), ("expert choice", "dense")]
SLOPES += [("with biases, 1 shards", "grouped"), ("gated, shared, 2 shards", "grouped")]


@each("name, form", some([*product(OTHERS, ("gather", "dense")), *product(GROUPED, ("grouped",))], SLOPES))
def test_gradients_against_differences_of_the_reference(name: str, form: str) -> None:
    experts, arguments, routing = CASES[name]
    routing = replace(routing, loss_coef=0.3, z_loss=0.2)
    with mtf.Graph() as graph:
        _, loss = built(experts, arguments, routing, form)
        program = mtf.lower(gradients(graph, loss))
        values = drawn(graph)
    rng = np.random.default_rng(2)
    factors = rng.normal(size=(GROUPS.size, TOKENS.size, WIDE.size))
    (found,) = run(program, {"factors": factors}, "fast", state=values)

    def reference(*arrays: Array) -> Array:
        made = expected(dict(zip(values, arrays, strict=True)), arguments, routing)
        return np.array((made["values"] * factors).sum() + (0.3 * made["balance"] + 0.2 * made["z"]).mean())

    for name in found:
        direction = rng.normal(size=values[name].shape)
        direction /= np.linalg.norm(direction)
        slope = numeric_slope(
            reference, list(values.values()), list(values).index(name), np.array(1.0), direction, step=1e-6
        )
        assert np.sum(found[name] * direction) == pytest.approx(slope, rel=1e-5, abs=1e-7), name


# ---------------------------------------------------------------- layouts

LAID = ("batch", "length", "d", "f", "e", "e", "e", "batch", "e_unsplit", "batch_unsplit", "expert_capacity")


FORMS_BY_DEFAULT = {
    "top 2": ("einsum",),
    "DeepSeek-V3": ("gather", "dense"),
    "none left behind": ("gather",),
    "expert choice": ("einsum", "dense"),
}


@pytest.mark.parametrize("name", FORMS_BY_DEFAULT)
def test_random_layouts_change_nothing(name: str) -> None:
    """Values, losses, drops and all gradients, core by core and at once."""
    _, arguments, routing = CASES[name]
    rng = np.random.default_rng(len(name))
    for form in some(("einsum", "gather", "dense"), FORMS_BY_DEFAULT[name]):
        with mtf.Graph() as graph:
            y, loss = built(8, {**arguments}, routing, form)
            outputs = fetched(y) | {f"gradient of {n}": g for n, g in gradients(graph, loss).items()}
            values, session = drawn(graph), mtf.Session(outputs)
        feeds = {"factors": rng.normal(size=y.values.shape.sizes)}
        shapes = [t.shape for t in needed(outputs.values())]
        (wanted,) = run(session.lower(), feeds, "fast", state=values)
        tried = 0
        while tried < draws(1, 30):
            layout = draw_layout(rng, LAID)
            if not layout.rules or not layout.allows(shapes):
                continue
            program = session.lower(layout.mesh_text, layout.rules_text)
            for executor in ("exact", "fast"):
                (found,) = run(program, feeds, executor, state=values)
                assert_close(found, wanted, 1e-10, (name, form, str(layout), executor), floor=1.0)
            tried += 1


@pytest.mark.parametrize("shards", [1, 2, 8])
def test_random_layouts_of_grouped_products_change_nothing(shards: int) -> None:
    """Equal to the product with masks that has room for all, under layouts of experts, rows, tokens and features."""
    arguments, routing = {"use_bias": shards == 2, "gated": True}, dropless(Routing(top_k=3), shards)
    rng, sessions = np.random.default_rng(shards), {}
    for form in ("einsum", "grouped"):
        with mtf.Graph() as graph:
            y, loss = built(8, arguments, routing, form)
            outputs = fetched(y) | {f"gradient of {n}": g for n, g in gradients(graph, loss).items()}
            values, sessions[form] = drawn(graph), mtf.Session(outputs)
    feeds = {"factors": rng.normal(size=y.values.shape.sizes)}
    shapes = [t.shape for t in needed(outputs.values())]
    laid = [d for d in LAID if any(d in shape for shape in shapes)]
    (wanted,) = run(sessions["einsum"].lower(), feeds, "fast", state=values)
    tried = 0
    while tried < draws(2, 100):
        layout = draw_layout(rng, laid)
        if not layout.rules or not layout.allows(shapes):
            continue
        program = sessions["grouped"].lower(layout.mesh_text, layout.rules_text)
        (found,) = run(program, feeds, ("exact", "fast")[tried % 2], state=values)
        assert_close(found, wanted, 1e-10, (shards, str(layout)), floor=1.0)
        tried += 1


def test_overflow_of_a_shard_is_counted() -> None:
    """Room for half the mean: what finds none goes nowhere, the experts that come first in a shard first."""
    routing = replace(dropless(Routing(top_k=2), 4), shard_factor=0.5)
    room = TOKENS.size * 2 // 4 // 2
    with mtf.Graph() as graph:
        y, _ = built(8, {}, routing, "grouped")
        values, program = drawn(graph), mtf.lower(fetched(y))
    (found,) = run(program, {}, "fast", state=values)
    loads = found["load"].reshape(GROUPS.size, 4, 2).sum(-1)
    np.testing.assert_array_equal(found["dropped"], np.maximum(loads - room, 0).sum(-1))
    assert (found["dropped"] > 0).all()
    whole = expected(values, {}, dropless(routing, 1))["values"]
    same = np.isclose(found["values"], whole, rtol=1e-9).all(-1)
    assert 0 < same.mean() < 1  # tokens none of whose choices are dropped


def test_grouped_products_do_the_work_of_the_choices() -> None:
    """16 experts, 2 for each token: an eighth of what a product for each expert takes, sent tokens by their room."""
    routing = Routing(top_k=2, capacity_factor=None)

    def planned(form: str, routing: Routing) -> mtf.Estimate:
        with mtf.Graph():
            x = mtf.input("x", [D("batch", 16), D("length", 256), D("d_model", 128)], "bfloat16")
            y = mtf.layers.moe(x, D("experts", 16), D("d_ff", 512), routing, form=form)
            program = mtf.lower({"y": y.values}, mesh="data:8", layout="batch:data;experts:data")
        return mtf.estimate(program, "v5e-8")

    def products(estimate: mtf.Estimate) -> float:
        return sum(r.mxu_flops for r in estimate.rows if "/w" in r.name)

    dense, local = planned("dense", routing), planned("grouped", replace(routing, expert_shards=8))
    assert products(local) * 8 == products(dense) == 2 * 2 * 16 * 256 * 128 * 512 * 16 / 8
    tight = planned("grouped", replace(routing, expert_shards=8, shard_factor=1.25))
    assert products(tight) == products(local)
    for estimate, rows in ((local, 512), (tight, 80)):  # 2 x 256 choices: all, and 1.25 x an eighth
        sent = [c.sent_bytes for c in estimate.program.collectives if c.kind == "all_to_all" and c.sent_bytes > 10_000]
        assert set(sent) == {2 * 8 * rows * 128 * 2 * 7 / 8}  # two sequences, 8 shards, bfloat16; 7 of 8 to others


EIGHT_BITS = [("int8", None), ("fp8", None), ("fp8", 4.0)]


@pytest.mark.parametrize(("precision", "bound"), some(EIGHT_BITS, EIGHT_BITS[::2]))
def test_grouped_products_in_eight_bits(precision: str, bound: float | None) -> None:
    """Rounded as products of each expert are; in the gradient of the kernels columns share scales over all experts."""
    found = {}
    for form in ("gather", "grouped"):
        with mtf.Graph() as graph:
            numerics = mtf.Numerics(precision=precision, bound=bound)
            x = mtf.variable("x", [GROUPS, TOKENS, WIDE])
            y = mtf.layers.moe(
                x, D("e", 4), FF, Routing(top_k=2, capacity_factor=None), form=form, training=True, numerics=numerics
            )
            loss = mtf.reduce_sum(y.values * mtf.input("factors", y.values.shape))
            outputs = {"y": y.values} | gradients(graph, loss)
            values, session = drawn(graph), mtf.Session(outputs)
        feeds = {"factors": np.random.default_rng(1).normal(size=y.values.shape.sizes)}
        for mesh, layout in (
            (("p:2", "batch:p;e:p"), ("p:2;q:2", "batch:p;e:p;f:q")) if form == "grouped" else (("", ""),)
        ):
            (made,) = run(session.lower(mesh or "device:1", layout), feeds, "fast", state=values)
            found[form, layout] = made
    wanted = found.pop(("gather", ""))
    for made in found.values():
        for name, value in made.items():
            close = 1e-4 if "experts" not in name else 0.1
            np.testing.assert_allclose(made[name], wanted[name], atol=close * np.abs(value).max(), err_msg=name)


def test_few_tokens_read_the_experts_that_they_choose() -> None:
    """One token reads 2 of 16 experts; three tokens 1 - (7/8)^3 of them on the mean; 64 tokens all."""
    wide, hidden, experts = D("d_model", 512), D("d_ff", 2048), D("experts", 16)
    weights = 2 * experts.size * wide.size * hidden.size * 2
    for batch, share in ((1, 2 / 16), (3, 1 - (7 / 8) ** 3), (64, 1.0)):
        with mtf.Graph():
            x = mtf.input("x", [D("batch", batch), D("length", 1), wide], "bfloat16")
            numerics = mtf.Numerics("bfloat16", activation_dtype="bfloat16")
            y = mtf.layers.moe(x, experts, hidden, Routing(top_k=2, capacity_factor=None), numerics=numerics)
            estimate = mtf.estimate(mtf.lower({"y": y.values}), "v5e-1")
        read = sum(r.hbm_bytes for r in estimate.rows if "/w" in r.name)
        assert read == pytest.approx(share * weights, rel=0.15), batch  # and activations


# ---------------------------------------------------------------- chance, balance, mistakes


def routed(routing: Routing, training: bool = True, **values: Array) -> dict[str, Array]:
    """What is fetched of a layer with eight experts."""
    with mtf.Graph() as graph:
        x = mtf.variable("x", [GROUPS, TOKENS, WIDE])
        y = mtf.layers.moe(x, D("e", 8), FF, routing, training=training, numerics=mtf.Numerics())
        state = {**drawn(graph), **values}
    return run(mtf.lower(fetched(y)), {}, "fast", state=state)[0]


def test_jitter_changes_choices_in_training_alone() -> None:
    plain, jittered = Routing(gating="switch", **NARROW), Routing(gating="switch", jitter=0.9, **NARROW)
    still, moved = routed(plain), routed(jittered)
    assert np.any(still["load"] != moved["load"])
    assert_close(routed(jittered, training=False), routed(plain, training=False), 0, "not training")


def test_second_choices_are_dropped_at_random_in_training_alone() -> None:
    """The more the less their gates weigh: with a threshold above all gates, about gate / threshold of them stay."""
    policy = Routing(gating="top_2", second_policy="random", second_threshold=2.0, capacity_factor=None)
    tokens = GROUPS.size * TOKENS.size
    kept = routed(policy)["load"].sum() - tokens
    assert 0 < kept < tokens / 2
    assert routed(policy, training=False)["load"].sum() == tokens  # by the threshold: no gate is above it
    assert routed(replace(policy, second_threshold=1e-6))["load"].sum() == 2 * tokens


def test_room_when_not_training() -> None:
    tight = Routing(gating="switch", capacity_factor=0.25, capacity_factor_eval=8.0, min_expert_capacity=1)
    assert routed(tight)["dropped"].sum() > 0
    assert routed(tight, training=False)["dropped"].sum() == 0


def test_a_group_of_its_own_size_keeps_its_dims() -> None:
    routing = Routing(top_k=2, group_size=TOKENS.size, **NARROW)
    assert routed(routing)["load"].shape == (GROUPS.size, 8)


def test_the_bias_follows_the_load() -> None:
    """Where fewer tokens than the mean chose an expert it rises, and balance comes of it."""
    with mtf.Graph() as graph:
        x = mtf.input("x", [GROUPS, TOKENS, WIDE])
        routing = Routing(top_k=1, scores="sigmoid", renormalise=False, bias=True, capacity_factor=None)
        y = mtf.layers.moe(x, D("e", 4), FF, routing)
        bias = graph.variables["moe/router/bias"].output
        update = mtf.assign(bias, mtf.layers.balanced_bias(bias, y.load, rate=0.02))
        program = mtf.lower({"load": y.load}, [update])
    sim = mtf.simulate(program)
    feeds = {"x": np.random.default_rng(0).normal(size=(GROUPS.size, TOKENS.size, WIDE.size)) + 0.5}
    loads = [sim.step(feeds)["load"].sum(0) for _ in range(60)]
    first = 0.02 * np.sign(loads[0].mean() - loads[0])
    sim.run(program, feeds)
    assert np.ptp(loads[-1]) < np.ptp(loads[0]) / 3
    again = mtf.simulate(program)
    again.step(feeds)
    np.testing.assert_allclose(again.state["moe/router/bias"], first, rtol=1e-6)


def test_the_form_goes_by_the_tokens_of_a_group() -> None:
    for tokens, form in ((512, "einsum"), (513, "gather")):
        with mtf.Graph() as graph:
            mtf.layers.moe(mtf.input("x", [D("batch", 1), D("length", tokens), WIDE]), D("e", 4), FF)
        kinds = {op.opdef.name for op in graph.operations if op.name.rpartition("/")[2] == "dispatch"}
        assert kinds == {form}


@pytest.mark.parametrize("form", ["gather", "grouped"])
def test_rows_are_added_at_positions_where_experts_choose_or_the_routing_says_so(form: str) -> None:
    """Else sums over a token's choices look rows up, forward and backward."""
    capacity = None if form == "grouped" else 1.25
    for arguments, count in (({}, 0), ({"row_sums": "scatter"}, 2), ({"gating": "expert_choice"}, 2)):
        if form == "grouped" and "gating" in arguments:
            continue
        with mtf.Graph() as graph:
            x = mtf.variable("x", [D("batch", 2), D("length", 8), WIDE])
            y = mtf.layers.moe(x, D("e", 4), FF, Routing(capacity_factor=capacity, **arguments), form=form)
            gradients(graph, mtf.reduce_sum(y.values))
        adds = [op for op in graph.operations if op.opdef.name == "scatter_add" and WIDE in op.output.shape]
        assert len(adds) == count, arguments


def test_nothing_moves_where_experts_have_room_for_all() -> None:
    """Tokens are gathered for the experts, 3/4 of them and their gates, and what these make is summed."""
    wide, inner, routing = D("d", 64), D("f", 128), Routing(capacity_factor=None)
    with mtf.Graph():
        x = mtf.input("x", [D("batch", 8), D("length", 1), wide])
        y = mtf.layers.moe(x, D("experts", 16), inner, routing, training=False)
        program = mtf.lower({"y": y.values}, mesh="data:4", layout="batch:data;experts:data")
    tokens = 8 * 64 * 4  # bytes in float32
    sent = sorted((c.kind, c.sent_bytes) for c in program.collectives if c.sent_bytes >= tokens / 4)
    assert sent == [("all_gather", tokens * 3 / 4), ("reduce_scatter", tokens * 3 / 4)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"gating": "best"}, r"Routing \(test_experts.py:\d+\): gating must be 'top_k' or .*got 'best'"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_k": 1.5}, "top_k must be an integer, got float 1.5"),
        ({"capacity_factor": 0.0, "jitter": 1.0}, r"capacity_factor must be positive, got 0.0\n  jitter must be in"),
        ({"groups_per_token": 3, "expert_groups": 2}, "groups_per_token must be at most expert_groups, 2, got 3"),
        ({"gating": "expert_choice", "bias": True}, "'expert_choice' has neither"),
        ({"loss_coef": -1.0}, "loss_coef must not be negative, got -1.0"),
        ({"capacity_factor_eval": "much"}, "capacity_factor_eval must be a finite number"),
    ],
)
def test_routings_that_make_no_sense(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(mtf.GraphError, match=words):
        Routing(**arguments)


@pytest.mark.parametrize(
    ("experts", "arguments", "words"),
    [
        (
            2,
            {"routing": Routing(top_k=3)},
            r"moe \(test_experts.py:\d+\): each token chooses 3 experts \(top_k\), but there are",
        ),
        (6, {"routing": Routing(expert_groups=4)}, "6 % 4 = 2"),
        (4, {"routing": Routing(expert_groups=4, groups_per_token=2)}, "use 'max'"),
        (4, {"routing": Routing(group_size=7)}, "48 % 7 = 6"),
        (4, {"routing": "switch"}, "routing must be an mtf.layers.Routing, got str 'switch'"),
        (4, {"form": "sparse"}, "form must be 'einsum' or 'gather' or 'dense' or 'grouped', got"),
        (4, {"form": "grouped", "routing": Routing()}, r"no capacity by expert, .* capacity_factor=1.25; give Routing"),
        (4, {"form": "grouped", "routing": Routing(gating="ntlb", capacity_factor=None)}, "the capacity of experts"),
        (4, {"form": "grouped", "routing": dropless(Routing(), 3)}, r"4 % 3 = 1"),
        (4, {"numerics": "float32"}, "numerics must be an mtf.Numerics"),
        (4, {"activation": "swish_"}, "activation must be"),
        (4, {"training": 1}, "training must be True or False"),
    ],
)
def test_layers_that_make_no_sense(experts: int, arguments: dict[str, Any], words: str) -> None:
    with mtf.Graph(), pytest.raises(mtf.MeshlibError, match=words):
        mtf.layers.moe(mtf.input("x", [GROUPS, TOKENS, WIDE]), D("e", experts), FF, **arguments)


def test_gates_of_other_dims() -> None:
    """Of experts that x has itself, or that they lack, or of what is none of x."""
    many = D("e", 4)
    with mtf.Graph():
        x, apart = mtf.input("x", [GROUPS, TOKENS, WIDE]), mtf.input("apart", [many, GROUPS, TOKENS, WIDE])
        for taken, dims in ((apart, [many, GROUPS, TOKENS]), (x, [GROUPS, TOKENS]), (x, [many, GROUPS, D("z", 2)])):
            gates = mtf.ones(dims)
            with pytest.raises(mtf.ShapeError, match=r"gates must have the dims \[e:4\] of the experts, which x lacks"):
                mtf.layers.feed_forward(taken, FF, expert_dims=[many], gates=gates)
        with pytest.raises(mtf.ShapeError, match=r"expert_dims e:4 are not in x"):
            mtf.layers.feed_forward(x, FF, expert_dims=[many])


def test_dims_and_masks_that_do_not_fit() -> None:
    with mtf.Graph():
        x = mtf.input("x", [GROUPS, TOKENS, WIDE])
        with pytest.raises(mtf.ShapeError, match=r"already has a dim 'length'; rename the dim of the experts"):
            mtf.layers.moe(x, D("length", 4), FF)
        with pytest.raises(mtf.ShapeError, match=r"already has a dim 'expert_capacity'; rename it"):
            mtf.layers.moe(mtf.input("z", [GROUPS, D("expert_capacity", 4), WIDE]), D("e", 4), FF)
        with pytest.raises(mtf.ShapeError, match=r"nonpadding must be bool and have the dims of x but the last"):
            mtf.layers.moe(x, D("e", 4), FF, nonpadding=mtf.input("mask", [GROUPS, TOKENS]))
        with pytest.raises(mtf.ShapeError, match=r"needs \[groups..., tokens, features\]"):
            mtf.layers.moe(mtf.input("y", [WIDE]), D("e", 4), FF)
        load = mtf.input("load", [GROUPS, D("e", 4)], "int32")
        with pytest.raises(mtf.ShapeError, match="load must have the dims of bias, e:8 too"):
            mtf.layers.balanced_bias(mtf.variable("bias", [D("e", 8)]), load)


def test_what_is_kept_of_an_exchange_is_its_result() -> None:
    """Computed again a layer exchanges its tokens once more, for the experts; not if the result is kept by name."""
    config = mtf.models.preset("mixtral-8x7b")
    config = config.replace(shard_factor=1.25)
    counts: dict[str | mtf.Remat, dict[str, int]] = {}
    for remat in ("full", mtf.Remat(save=["dispatched"])):
        with mtf.Graph():
            step = mtf.models.train_step(config, 32, 4096, "sgd", remat=remat)
            program = mtf.lower(*step, mesh="expert:8", layout=mtf.models.layout("expert", config, "expert:8"))
        moved = [c for c in program.collectives if c.kind == "all_to_all"]
        exchanged = [(c.phase, c.count) for c in moved if c.sent_bytes > 2**20]  # not how many rows there are
        counts[remat] = {p: sum(n for phase, n in exchanged if phase == p) for p in ("forward", "backward")}
    full, kept = counts.values()
    assert full == {"forward": 2 * config.layers, "backward": 3 * config.layers}
    assert kept == {"forward": 2 * config.layers, "backward": 2 * config.layers}


def test_rows_for_the_worst_case_are_noted_with_what_limits_them() -> None:
    """A shard of one of 8 experts may be chosen by every token, where 2 / 8 of them choose it on the mean."""
    config = mtf.models.preset("mixtral-8x7b").reduced()

    def notes(config: mtf.models.TransformerConfig, layout: str, mesh: str) -> list[str]:
        with mtf.Graph():
            loss = mtf.models.transformer(config, 8, 16).loss
        program = mtf.lower(loss, mesh=mesh, layout=mtf.models.layout(layout, config, mesh))
        return [note for note in program.notes if "worst case" in note]

    (note,) = notes(config, "expert", "expert:8")
    assert "each of 8 shards of 'experts' has rows for the worst case, 4 times the mean" in note
    assert "shard_factor=2.0" in note
    assert not notes(config.replace(shard_factor=2.0), "expert", "expert:8")
    assert not notes(config, "expert", "expert:2")  # twice the mean at most
    assert not notes(config, "data", "data:8")
    with pytest.raises(mtf.GraphError, match="shard_factor: a field of experts, which gpt2 lacks"):
        mtf.models.preset("gpt2").replace(shard_factor=2.0)
