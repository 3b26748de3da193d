"""Mixtures of experts on two levels against a reference that routes token by token, forward, backward and laid out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from meshlib.layers import Routing
from tests.effort import draws, each, some
from tests.layers.experts_reference import two_levels
from tests.layers.test_experts import FF, GROUPS, NARROW, TOKENS, WIDE, drawn, fetched, gradients
from tests.oracle import Array, assert_close, draw_layout, needed, numeric_slope, run

D = mtf.Dimension
EXPERTS = D("ex", 4), D("ey", 2)
TOP_2 = Routing(top_k=2, **NARROW)
# name: arguments of the layer, routing of the first level and of the second
CASES: dict[str, tuple[dict[str, Any], Routing, Routing]] = {
    "top 2 of top 2": ({}, TOP_2, TOP_2),
    "Mesh TensorFlow's": ({}, Routing(gating="top_2", **NARROW), Routing(gating="top_2", **NARROW)),
    "top 1 of top 1": ({}, Routing(gating="switch", **NARROW), Routing(gating="switch", **NARROW)),
    "one place each": ({}, Routing(gating="switch", capacity_factor=0.01, min_expert_capacity=1), TOP_2),
    "experts choose, then tokens": ({}, Routing(gating="expert_choice", top_k=2, **NARROW), TOP_2),
    "sigmoids with a bias": (
        {"gated": True, "use_bias": True, "shared_channels": D("f", 8)},
        Routing(scores="sigmoid", bias=True, **NARROW),
        Routing(top_k=1, renormalise=False, scores="sigmoid", bias=True, **NARROW),
    ),
}


def built(name: str, form: str | None, **changes: float) -> tuple[mtf.layers.Mixture, mtf.Tensor]:
    """The layer on variables, and a loss whose gradient sees every element."""
    arguments, *routings = CASES[name]
    x = mtf.variable("x", [GROUPS, TOKENS, WIDE], dtype="float64")
    y = mtf.layers.moe(
        x, EXPERTS, FF, [replace(r, **changes) for r in routings], form=form, training=True,
        numerics=mtf.Numerics("float64"), **arguments,
    )  # fmt: skip
    factors = mtf.input("factors", y.values.shape, "float64")
    return y, mtf.reduce_sum(y.values * factors) + mtf.reduce_mean(y.loss)


def expected(name: str, values: dict[str, Array]) -> dict[str, Array]:
    """What the reference makes of it."""
    _, outer, inner = CASES[name]
    weights = {key.removeprefix("moe/"): value for key, value in values.items()}
    made, said = two_levels(values["x"], weights, outer, inner)
    return {
        "values": made,
        "dropped": np.array([s.dropped for s in said], np.int32),
        "load": np.array([s.wanted for s in said], np.int32),
        "balance": np.array([s.balance for s in said]),
        "z": np.array([s.z for s in said]),
    }


@each("name, form", [(name, form) for name in CASES for form in ("einsum", "gather")])
def test_as_token_by_token(name: str, form: str) -> None:
    with mtf.Graph() as graph:
        y, _ = built(name, form)
        program, values = mtf.lower(fetched(y)), drawn(graph)
    (found,) = run(program, {}, "fast", state=values)
    assert_close(found, expected(name, values), 1e-9, name, floor=1.0)
    assert found["load"].shape == (4, 4, 2)


def test_tokens_are_dropped_on_both_levels() -> None:
    """The reference sees some dropped before the second level, and some in it."""
    with mtf.Graph() as graph:
        built("Mesh TensorFlow's", "gather")
        values = drawn(graph)
    assert np.all(expected("one place each", values)["dropped"] >= TOKENS.size - EXPERTS[0].size)
    values["x"] = np.abs(values["x"])
    values["moe/inner/router/kernel"][:] = [0.0, 9.0]  # all want the second of the second level
    first, second = CASES["top 1 of top 1"][1:]
    roomy = replace(second, capacity_factor=None)
    weights = {key.removeprefix("moe/"): value for key, value in values.items()}
    tight, wide = (
        sum(s.dropped for s in two_levels(values["x"], weights, first, inner)[1]) for inner in (second, roomy)
    )
    assert tight > wide > 0


@each("name", some(list(CASES), ["Mesh TensorFlow's", "sigmoids with a bias"]))
def test_gradients_against_differences_of_the_reference(name: str) -> None:
    with mtf.Graph() as graph:
        _, loss = built(name, "gather", loss_coef=0.3, z_loss=0.2)
        program = mtf.lower(gradients(graph, loss))
        values = drawn(graph)
    rng = np.random.default_rng(2)
    factors = rng.normal(size=(GROUPS.size, TOKENS.size, WIDE.size))
    (found,) = run(program, {"factors": factors}, "fast", state=values)

    def reference(*arrays: Array) -> Array:
        made = expected(name, dict(zip(values, arrays, strict=True)))
        return np.array((made["values"] * factors).sum() + (0.3 * made["balance"] + 0.2 * made["z"]).mean())

    for n, key in enumerate(values):
        if key not in found:
            continue
        direction = rng.normal(size=values[key].shape)
        direction /= np.linalg.norm(direction)
        slope = numeric_slope(reference, list(values.values()), n, np.array(1.0), direction, step=1e-6)
        assert np.sum(found[key] * direction) == pytest.approx(slope, rel=1e-5, abs=1e-7), key


LAID = ("batch", "length", "d", "f", "ex", "ex", "ey", "ey", "batch_unsplit", "batch_inner", "ex_unsplit")


def test_random_layouts_change_nothing() -> None:
    rng = np.random.default_rng(3)
    for name, form, count in (
        ("Mesh TensorFlow's", "einsum", draws(2, 30)),
        ("top 2 of top 2", "gather", draws(2, 30)),
    ):
        with mtf.Graph() as graph:
            y, loss = built(name, form)
            outputs = fetched(y) | {f"gradient of {n}": g for n, g in gradients(graph, loss).items()}
            values, session = drawn(graph), mtf.Session(outputs)
        feeds = {"factors": rng.normal(size=y.values.shape.sizes)}
        shapes = [t.shape for t in needed(outputs.values())]
        (wanted,) = run(session.lower(), feeds, "fast", state=values)
        tried = 0
        while tried < count:
            layout = draw_layout(rng, LAID)
            if not layout.rules or not layout.allows(shapes):
                continue
            (found,) = run(session.lower(layout.mesh_text, layout.rules_text), feeds, state=values)
            assert_close(found, wanted, 1e-10, (name, form, str(layout)), floor=1.0)
            tried += 1


@pytest.mark.parametrize("tensor", [1, 2])
def test_tokens_change_sides_over_one_axis_after_the_other(tensor: int) -> None:
    """On each level two exchanges forward and two backward, each of what a device has for the others of the axis."""
    batch, length, wide, inner = D("batch", 8), D("length", 64), D("d", 32), D("f", 128)
    full = Routing(top_k=1, renormalise=False, capacity_factor=1.0)
    with mtf.Graph():
        x = mtf.input("x", [batch, length, wide])
        w = mtf.variable("w", [wide, D("e", wide.size)])  # so that tokens have gradients
        h = mtf.rename_dimension(mtf.einsum([x, w], output_shape=[batch, length, D("e", wide.size)]), "e", "d")
        y = mtf.layers.moe(h, [D("ex", 4), D("ey", 4)], inner, full)
        loss = mtf.reduce_sum(mtf.square(y.values)) + mtf.reduce_mean(y.loss)
        step = mtf.optimize.SgdOptimizer(0.1).minimize(loss)
    layout = f"batch:y+x;ex:x;ey:y;batch_unsplit:y{';f:t' if tensor > 1 else ''}"
    program = mtf.lower({"loss": loss}, step, mesh=f"x:2;y:4;t:{tensor}", layout=layout)
    moved = [c for c in program.collectives if c.kind == "all_to_all" and c.payload_bytes > 64 * 32]
    assert Counter((c.axes, c.phase) for c in moved) == {
        ((axis,), phase): 2 for axis in "xy" for phase in ("forward", "backward")
    }
    own = 8 * 64 * 32 * 4 / 8  # of the tokens, as many as there are places; some move as the parts of a sum
    assert all(
        c.sent_bytes in (full, full / tensor) for c in moved for full in [own * {"x": 1 / 2, "y": 3 / 4}[c.axes[0]]]
    )
    assert not [c for c in program.collectives if c.kind == "collective_permute"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"experts": []}, "experts must be one dim, or two for two levels, got 0"),
        ({"experts": [D("a", 2), D("b", 2), D("c", 2)]}, "experts must be one dim, or two for two levels, got 3"),
        ({"routing": [TOP_2]}, "there are 2 dims, but 1 routings"),
        ({"routing": [TOP_2, replace(TOP_2, group_size=4)]}, "group_size is for the first of two levels"),
        ({"routing": "switch"}, "routing must be an mtf.layers.Routing, got str 'switch'"),
        ({"form": "dense"}, "form must be 'einsum' or 'gather', got 'dense'"),
        ({"experts": [D("ex", 4), D("ey", 1)]}, r"each token chooses 2 experts \(top_k\), but there are only 1"),
        ({"experts": [D("ex", 4), D("ex", 4)]}, "'ex' occurs twice|already has a dim 'ex'"),
    ],
)
def test_levels_that_make_no_sense(arguments: dict[str, Any], words: str) -> None:
    given = {"experts": EXPERTS, "routing": TOP_2, **arguments}
    with mtf.Graph(), pytest.raises(mtf.MeshlibError, match=words):
        mtf.layers.moe(mtf.input("x", [GROUPS, TOKENS, WIDE]), given.pop("experts"), FF, **given)
