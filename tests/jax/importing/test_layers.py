"""Layers in a Python loop: their axes are one dim in all of them, unless a tensor would have it twice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import meshlib as mtf
from tests.jax.importing.checks import compared

S = jax.ShapeDtypeStruct


def decoder(params, x):
    for p in params["layers"]:
        scores = jnp.einsum("bqd,dh,bkd->bhqk", x, p["q"], x)
        x = x + jnp.einsum("bhqk,bkd,hd->bqd", jax.nn.softmax(scores / 8), x, p["o"])
        x = x + jnp.tanh(x @ p["wi"]) @ p["wo"]
    return jnp.mean((x @ params["head"]) ** 2)


def arrays(layers, wide=None):
    rng = np.random.default_rng(0)

    def weight(*sizes):
        return jnp.asarray(rng.normal(size=sizes) / 3, "float32")

    def layer(f):
        return {"q": weight(8, 4), "o": weight(4, 8), "wi": weight(8, f), "wo": weight(f, 8)}

    sizes = [24 if n == wide else 16 for n in range(layers)]
    return {"layers": [layer(f) for f in sizes], "head": weight(8, 6)}, weight(4, 6, 8)


def dims(graph):
    return {str(d) for op in graph.operations for y in op.outputs for d in y.shape}


def test_alike_layers_have_the_dims_of_one():
    one, three = (mtf.from_jax(decoder, *arrays(n)) for n in (1, 3))
    assert dims(one) == dims(three)
    assert str(three.variables["params/layers/2/wi"].output.shape) == "[head_0:8, wi_1:16]"


def test_one_rule_lays_out_all_layers():
    names = {"x": "batch length d_model", "params.layers.*.wi": "d_model d_ff"}
    layouts = [("rows:2;cols:2", "batch:rows;d_ff:cols;o_0:cols"), ("rows:2", "memory_length:rows")]
    graph = compared(decoder, *arrays(2), names=names, layouts=layouts)
    program = mtf.lower(graph.outputs, mesh="cols:4", layout="d_ff:cols")
    assert {s.sharding.axes[1] for n, s in program.variables.items() if n.endswith("wi")} == {("cols",)}


def test_a_layer_of_another_size_has_dims_of_its_own():
    graph = compared(decoder, *arrays(4, wide=1), layouts=[("m:2", "wi_1:m")])
    names = [str(graph.variables[f"params/layers/{n}/wi"].output.shape) for n in range(4)]
    assert names == ["[head_0:8, wi_1:16]", "[head_0:8, wi_1_2:24]", *2 * ["[head_0:8, wi_1:16]"]]


def test_what_the_user_calls_differently_stays_apart():
    given = {"params.layers.0.wi": "d_model one", "params.layers.1.wi": "d_model other"}
    graph = mtf.from_jax(decoder, *arrays(2), names=given)
    assert {"one:16", "other:16"} <= dims(graph)
    graph = mtf.from_jax(decoder, *arrays(2), names={"params.layers.0.wi": "d_model d_ff"})
    assert str(graph.variables["params/layers/1/wi"].output.shape) == "[d_model:8, d_ff:16]"


def test_axes_that_stand_side_by_side_stay_apart():
    def chain(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    graph = compared(
        chain, [jnp.eye(4) * n for n in (1.0, 2.0, 3.0)], jnp.ones((2, 4)), layouts=[("m:2", "params_1:m")]
    )
    for v in graph.variables.values():
        assert len({d.name for d in v.output.shape}) == 2

    def meeting(params):
        return jnp.sum(jnp.einsum("af,bf->ab", params["w"][0], params["w"][1]) ** 3)

    weights = [jnp.asarray(np.random.default_rng(n).normal(size=(4, 6)), "float32") for n in range(2)]
    graph = compared(meeting, {"w": weights}, layouts=[("m:2", "params_0:m")])
    first, second = (op.output.shape for op in graph.variables.values())
    assert first.dims[1] == second.dims[1]
    assert first.dims[0] != second.dims[0]
