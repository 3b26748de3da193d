"""Names of axes, arguments and their faults; what the graph knows of the function; specs as rules."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import meshlib as mtf
from layouts.errors import LayoutError
from meshlib.core.errors import GraphError
from tests.jax.importing.models import weights

S = jax.ShapeDtypeStruct


def attend(params, x):
    b, length, _ = x.shape
    q, k, v = ((x @ params[n]).reshape(b, length, 4, -1) for n in "qkv")
    p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.mean((x + jnp.einsum("bhqk,bkhd->bqhd", p, v).reshape(b, length, -1) @ params["o"]) ** 2)


PARAMS = {n: S((16, 16), "float32") for n in "qkvo"}
ARGS = PARAMS, S((4, 8, 16), "float32")


def shapes(graph):
    return {op.name: str(op.output.shape) for op in (*graph.variables.values(), *graph.inputs.values())}


def test_an_imported_graph_is_shown_in_a_line():
    assert repr(mtf.from_jax(attend, *ARGS)).startswith("<ImportedGraph of ")
    assert len(repr(mtf.from_jax(attend, *ARGS))) < 200


def test_an_axis_that_is_split_is_a_product():
    graph = mtf.from_jax(attend, *ARGS, names={"x": "batch length d_model", "params.q": "d_model (heads head_dim)"})
    assert shapes(graph) == {
        "params/q": "[d_model:16, heads:4, head_dim:4]",
        "params/k": "[d_model:16, heads:4, head_dim:4]",
        "params/v": "[d_model:16, heads:4, o_0_1:4]",
        "params/o": "[heads:4, o_0_1:4, d_model:16]",
        "x": "[batch:4, length:8, d_model:16]",
    }
    assert graph.arguments["params/q"].jax_shape == (16, 16)


def test_the_name_of_an_axis_that_is_cut_into_tiles_is_that_of_a_tile():
    def loss(params, x):
        gate, up = jnp.split(x @ params["wi"], 2, -1)
        return jnp.sum(((jax.nn.silu(gate) * up) @ params["wo"]) ** 2)

    arrays = {"wi": S((8, 32), "float32"), "wo": S((16, 8), "float32")}
    graph = mtf.from_jax(loss, arrays, S((4, 8), "float32"), names={"params.wi": "d_model d_ff"})
    assert shapes(graph)["params/wo"].startswith("[d_ff:16,")
    program = mtf.lower(graph.outputs, mesh="model:4", layout="d_ff:model")
    assert [c.kind for c in program.collectives] == ["all_reduce"]


def test_a_named_axis_whose_first_factor_does_not_divide():
    def loss(params, x):
        return jnp.sum(jnp.tanh(x.reshape(2, 4, 8).sum(1) @ params))

    graph = mtf.from_jax(loss, S((8, 8), "float32"), S((8, 8), "float32"), names={"x": "length d"})
    said = r"2 % 4 = 2. The function takes this axis of x, 8 long, as length:2 x x_0_1:4: split another of these"
    with pytest.raises(LayoutError, match=said):
        mtf.lower(graph.outputs, mesh="seq:4", layout="length:seq")


def test_names_that_nobody_gave_come_from_the_arguments():
    assert shapes(mtf.from_jax(attend, *ARGS))["x"] == "[x_0:4, x_1:8, k_0:16]"


def test_a_dim_that_meets_itself_is_renamed_by_documented_names():
    def gram(params, x):
        h = x @ params
        return jnp.sum(jnp.tanh(h @ h.T)) + jnp.sum(h + x)

    graph = mtf.from_jax(gram, S((8, 8), "float32"), S((4, 8), "float32"), names={"x": "batch d_model"})
    assert shapes(graph)["params"] == "[d_model:8, d_model_out:8]"
    assert {op.attrs["new"] for op in graph.operations if op.opdef.name == "rename_dimension"} == {
        "memory_batch", "d_model",
    }  # fmt: skip


def test_parts_of_an_axis_keep_its_name():
    def loss(w, x):
        return jnp.mean((x[:, 1:] - x[:, :-1]) * w)

    graph = mtf.from_jax(loss, S((), "float32"), S((4, 9), "float32"), names={"x": "batch length"})
    cuts = [op for op in graph.operations if op.opdef.name == "slice"]
    assert [str(op.output.shape) for op in cuts] == ["[batch:4, length:8]"] * 2


def test_equal_parts_of_a_product_with_weights_are_a_dim():
    def gated(params, x):
        gate, hidden = jnp.split(x @ params["wi"], 2, axis=-1)
        return jnp.mean(((jax.nn.silu(gate) * hidden) @ params["wo"]) ** 2)

    params = {"wi": S((16, 64), "float32"), "wo": S((32, 16), "float32")}
    graph = mtf.from_jax(gated, params, S((4, 16), "float32"), names={"params.wo": "d_ff d_model"})
    assert shapes(graph)["params/wi"] == "[wi_0:16, wi_1_0:2, d_ff:32]"
    program = mtf.lower(graph.outputs, mesh="model:4", layout="d_ff:model")
    assert [c.kind for c in program.collectives] == ["all_reduce"]  # of the product, not of its parts


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ({"y": "batch"}, r"no argument is called 'y'.*there are params\.k, params\.o, params\.q, params\.v, x"),
        ({"x": "batch length"}, r"'x' has 2 names, 'batch length', but x has 3 axes, \[4, 8, 16\]"),
        ({"x": "batch length batch"}, r"names: x \[4, 8, 16\] would have two axes 'batch', of 4 and 16"),
        ({"x": "batch 2length d"}, r"'2length' in 'x' is not a name of an axis"),
        (
            {"params.q": "d (heads:3 head_dim)"},
            r"of 16 can't be the product \(heads head_dim\), of which 3 is known: 16 % 3 = 1",
        ),
        (
            {"params.q": "d (a b c)"},
            r"params\.q: an axis of 16 is called \(a b c\), but the function takes it as 4 x 4",
        ),
        (["batch"], r"names must be a dict"),
        ({"x": 3}, r"'x' has 3; write 'batch length'"),
    ],
)
def test_bad_names(names, text):
    with pytest.raises(GraphError, match=text):
        mtf.from_jax(attend, *ARGS, names=names)


def test_bad_arguments():
    with pytest.raises(GraphError, match="expected a function, got 3"):
        mtf.from_jax(3)
    with pytest.raises(GraphError, match="argnums 2 must be in -2 to 1, of 2 arguments"):
        mtf.from_jax(attend, *ARGS, argnums=2)
    with pytest.raises(GraphError, match="the function returns no array"):
        mtf.from_jax(lambda x: None, S((3,), "float32"))
    graph = mtf.from_jax(lambda w: w * 2, S((3,), "float32"))
    with pytest.raises(GraphError, match="the function's first result, 'output', is not a number"):
        graph.loss  # noqa: B018
    with pytest.raises(GraphError, match="no result or argument is called 'outputs'; did you mean 'output'"):
        graph.to_jax({"outputs": 1})


def test_results_and_arguments_in_both_shapes():
    def fn(params, x):
        return {"out": (x @ params["w"]).reshape(4, 2, 6)[:, :, :, None], "count": x.sum()}

    w, x = weights(3, 12), weights(4, 3)
    graph = mtf.from_jax(fn, {"w": w}, x, names={"params.w": "inner (a b)"})
    assert list(graph.outputs) == ["count", "out"]
    sim = mtf.simulate(mtf.lower(graph.outputs, precision="highest"))
    found = graph.to_jax(sim.step(**graph.feeds(None, x)))
    np.testing.assert_allclose(found["out"], (x @ w).reshape(4, 2, 6, 1), rtol=1e-5)
    sim.state["params/w"] = graph.state({"w": 2 * w})["params/w"]
    np.testing.assert_allclose(graph.to_jax(sim.step(**graph.feeds(None, x)))["count"], x.sum(), rtol=1e-5)
    with pytest.raises(GraphError, match=r"'x' has shape \[4\], but \[4, 3\] was traced"):
        graph.feeds(None, x[:, 0])


def test_what_is_no_array_stays_and_what_is_not_used_is_not_there():
    def fn(params, x, act, times, unused):
        return act(x * params["w"]).sum() * times

    given = {"w": S((3,), "float32"), "b": S((3,), "float32")}, S((3,), "float32"), jnp.tanh, 2, S((2,), "float32")
    graph = mtf.from_jax(fn, *given)
    assert (list(graph.variables), list(graph.inputs)) == (["params/w"], ["x"])
    assert graph.unused == ("params/b", "unused")


def test_partition_specs_become_rules():
    graph = mtf.from_jax(attend, *ARGS, names={"x": "batch length d_model", "params.q": "d_model (heads head_dim)"})
    specs = {n: P(None, "model") for n in "qk"} | {"v": P(None, "model"), "o": P("model", None)}
    rules = graph.layout(specs, P("data", None))
    assert str(rules) == "d_model:;heads:model;head_dim:;o_0_1:;batch:data;length:"
    program = mtf.lower(graph.outputs, mesh="data:2;model:2", layout=rules)
    assert {c.axes for c in program.collectives} == {("model",), ("data",)}
    assert str(graph.layout(None, P(("data", "model")))) == "batch:data+model;length:;d_model:"
    with pytest.raises(LayoutError, match=r"is split over data in 'params/k'.*but over model"):
        graph.layout({"q": P("model"), "k": P("data"), "v": None, "o": None})
    with pytest.raises(LayoutError, match=r"4 entries for the 3 axes of x"):
        graph.layout(None, P("data", None, None, None))


def test_axes_that_a_spec_leaves_out_lie_as_others_say():
    """Flax gives biases and scales without a partitioning P(), also where the kernel's axis is split."""

    def loss(p, x):
        return ((jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"] + p["last"]) ** 2).mean()

    shapes = {"up": S((8, 32), "float32"), "bias": S((32,), "float32")}
    shapes |= {"down": S((32, 8), "float32"), "last": S((8,), "float32")}
    graph = mtf.from_jax(loss, shapes, S((16, 8), "float32"), names={"x": "batch d_in", "p.up": "d_in d_ff"})
    specs = {"up": P(None, "model"), "bias": P(), "down": P("model"), "last": P()}
    assert str(graph.layout(specs, P("data"))) == "d_in:;d_ff:model;down_1:;batch:data"
    with pytest.raises(LayoutError, match=r"'d_ff' is split over no axis in 'p/bias'.*but over model"):
        graph.layout(specs | {"bias": P(None)}, None)
    with pytest.raises(LayoutError, match=r"'d_ff' is split over model in 'p/up'.*but over data in 'p/down'"):
        graph.layout(specs | {"down": P("data")}, None)
    both = graph.layout({"up": P("data", "model"), "bias": P(), "down": P("model"), "last": P("data")}, None)
    assert str(both) == "down_1:data;d_in:data;d_ff:model"
    with pytest.raises(LayoutError, match=r"'d_in' is split over data.*but over no axis in 'x' \('data', None\)"):
        graph.layout({"up": P("data")}, P("data"))


def test_without_jax_one_error_says_what_to_install():
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "import meshlib as mtf\n"
        "try:\n    mtf.from_jax(lambda x: x, 1)\n"
        "except mtf.MissingError as fault:\n    print(fault)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "needs JAX, which is not installed: pip install 'meshlib-tpu[jax]'" in done.stdout, done.stderr


def test_a_run_of_a_dim_lies_as_its_length_allows():
    """What is cut out of an argument has its names, of other sizes: next tokens, one shorter, never forbid a layout."""

    def loss(table, tokens):
        return jnp.mean((table[tokens[:, :-1]] - table[tokens[:, 1:]]) ** 2)

    args = weights(8, 4), np.arange(32, dtype="int32").reshape(4, 8) % 8
    graph = mtf.from_jax(loss, *args, names={"tokens": "batch length"})
    program = mtf.lower(graph.outputs, mesh="data:2;seq:2", layout="batch:data;length:seq")
    assert any("7 % 2 = 1" in note for note in program.notes)
    found = mtf.simulate(program, seed=0).step(**graph.feeds(*args))
    assert float(found["output"]) == pytest.approx(float(loss(*args)), rel=1e-5)
    with pytest.raises(LayoutError, match="8 % 3 = 2"):
        mtf.lower(graph.outputs, mesh="seq:3", layout="length:seq")


def test_constraints_are_listed_and_bind_if_asked():
    mesh = jax.sharding.AbstractMesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def loss(params, x):
        def layer(x, w):
            return jax.lax.with_sharding_constraint(jnp.tanh(x @ w), jax.NamedSharding(mesh, P("data"))), None

        x, _ = jax.lax.scan(layer, x, params)
        x = jax.device_put(x.reshape(8, 2, 8), jax.NamedSharding(mesh, P(None, "model")))
        return jnp.mean(x**2)

    def sent(constraints):
        graph = mtf.from_jax(loss, *args, names={"x": "batch features"}, constraints=constraints)
        line = loss.__code__.co_firstlineno
        said = [(c.source, str(c.rules)) for c in graph.constraints]
        assert said == [
            (f"test_names.py:{line + 2}", "batch:data"),
            (f"test_names.py:{line + 5}", "features:model"),
        ]
        return {c.kind for c in mtf.lower(graph.outputs, mesh="data:2;model:2", layout="batch:data+model").collectives}

    args = S((3, 16, 16), "float32"), S((8, 16), "float32")
    assert sent(False) == {"all_reduce"}
    assert sent(True) > {"all_reduce"}
    bound = mtf.from_jax(loss, *args, names={"x": "batch features"}, constraints=True)
    with pytest.raises(LayoutError, match="rule batch:data: no axis 'data' in mesh rows:2"):
        mtf.lower(bound.outputs, mesh="rows:2", layout="batch:rows")


def _two_kernels(params, x):
    h = jnp.tanh(jnp.einsum("bxc,cd->bxd", x, params["first"]))
    return (jnp.einsum("bxc,cd->bxd", h, params["second"]) ** 2).mean()


class _Named:
    """An array that bears names of its axes, as in Haliax."""

    def __init__(self, array, axes):
        self.array, self.axes = array, tuple(type("Axis", (), {"name": name}) for name in axes)


jax.tree_util.register_pytree_node(
    _Named, lambda x: ((x.array,), tuple(a.name for a in x.axes)), lambda names, xs: _Named(xs[0], names)
)


def test_sizes_that_nobody_named_need_not_divide():
    """Three colours go by the name of channels, which the model gives; where the user gives it, it is his."""
    kernels = {"first": S((3, 8), "float32"), "second": S((8, 16), "float32")}
    names = {"first": ("fan_in", "fan_out"), "second": ("fan_out", "fan_in")}
    params = {n: _Named(k, names[n]) for n, k in kernels.items()}

    def loss(p, x):
        return _two_kernels({n: k.array for n, k in p.items()}, x)

    x = S((4, 6, 3), "float32")
    program = mtf.lower(mtf.from_jax(loss, params, x).outputs, mesh="m:2", layout="fan_in:m")
    (note,) = program.notes
    assert note.startswith("dim 'fan_in' does not divide over axis 'm': 3 % 2 = 1. Nobody named this size of these")
    assert sorted(str(v.sharding) for v in program.variables.values()) == [
        "[fan_in:3, fan_out:8]",
        "[fan_out:8, fan_in:16@m]",
    ]
    nowhere = mtf.lower(mtf.from_jax(loss, params, x).outputs, mesh="m:5", layout="fan_in:m")
    assert nowhere.notes[0].startswith("axis 'm' splits nothing")
    assert "3 % 5 = 3. Nobody named this size" in nowhere.notes[1]
    assert "16 % 5 = 1. Nobody named this size" in nowhere.notes[2]
    named = mtf.from_jax(loss, params, x, names={"*.first.*": "fan_in fan_out"})
    with pytest.raises(mtf.LayoutError, match=r"dim 'fan_in' does not divide over axis 'm'[\s\S]*3 % 2 = 1"):
        mtf.lower(named.outputs, mesh="m:2", layout="fan_in:m")
    with pytest.raises(mtf.LayoutError, match="both split over axis 'm'"):  # what divides is as strict as ever
        mtf.lower(mtf.from_jax(loss, params, x).outputs, mesh="m:2", layout="fan_in:m;fan_out:m")
