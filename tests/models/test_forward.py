"""Losses and gradients of every architecture against NumPy in float64, scanned and unrolled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import meshlib as mtf
from meshlib.models import preset, transformer
from meshlib.program.records import walk
from tests.effort import some
from tests.models import reference
from tests.models.common import BATCH, FAMILIES, LENGTH, feeds, small, unstacked, values


def built(config, scan=True, remat="full", **more):
    """Graph, model, and program of its loss and all gradients."""
    with mtf.Graph() as graph:
        model = transformer(config, BATCH, LENGTH, remat=remat, scan=scan, **more)
        wanted = graph.trainable_variables
        grads = mtf.gradients([model.loss], wanted)
        outputs = {v.name: g for v, g in zip(wanted, grads, strict=True)}
        assert all(g is not None for g in grads), [n for n, g in outputs.items() if g is None]
        program = mtf.lower({"loss": model.loss, **outputs}, precision="highest")
    return graph, model, program


def run(program, held, fed):
    sim = mtf.simulate(program)
    for name, value in held.items():
        sim.state[name] = value
    return sim.step(fed)


MORE = {
    "t5-11b": {"encoder_length": 4},
    "switch-base-8": {"encoder_length": 4},
    "transformer-base": {"encoder_length": 4},
    "bert-large": {"predictions": 3},
}


@pytest.mark.parametrize("name", some(FAMILIES, [n for n in FAMILIES if n not in ("t5-11b", "gemma3-12b")]))
def test_loss_and_gradients_equal_the_reference(name):
    config = small(name).replace(z_loss=0.01, label_smoothing=0.1)
    more = MORE.get(name, {})
    graph, model, program = built(config, training=True, **more)
    held, fed = values(graph), feeds(config, model.inputs)
    found = run(program, held, fed)

    def loss(changed):
        return reference.forward(config, changed, fed, training=True)

    assert found["loss"] == pytest.approx(loss(held), rel=2e-5)
    rng = np.random.default_rng(1)
    exact = {n: v.astype(np.float64) for n, v in held.items()}
    for variable, gradient in found.items():
        if variable == "loss":
            continue
        # along a random direction: every element of every gradient counts
        direction = rng.normal(size=gradient.shape)
        h = 1e-4 / np.sqrt(gradient.size)
        ahead = loss({**exact, variable: exact[variable] + h * direction})
        behind = loss({**exact, variable: exact[variable] - h * direction})
        slope = float((gradient.astype(np.float64) * direction).sum())
        scale = float(np.linalg.norm(gradient) * np.linalg.norm(direction) / np.sqrt(gradient.size))
        assert slope == pytest.approx((ahead - behind) / (2 * h), rel=2e-3, abs=2e-3 * scale + 1e-6), variable


# Parts of decoders that no preset has: OLMo's norms, Qwen 2's biases, gpt-oss's router, one norm after a block.
PARTS = {
    "norms of outputs": {"norm_position": "output"},
    "a norm over heads": {"qk_norm": True, "qk_norm_over_heads": True},
    "a norm after one block": {"post_norms": True, "attention_post_norm": False},
    "factors of layers": {"layer_scale": True},
    "biases of q, k, v": {"attention_bias": True, "attention_out_bias": False},
}


@pytest.mark.parametrize("part", [*PARTS, "a bias of the router"])
def test_parts_of_other_decoders_equal_the_reference(part):
    config = small("llama3.1-405b").replace(**PARTS.get(part, {}))
    if part not in PARTS:
        experts = small("mixtral-8x7b").experts
        config = config.replace(experts=replace(experts, routing=replace(experts.routing, logit_bias=True)))
    graph, model, program = built(config, training=True)
    held, fed = values(graph), feeds(config, model.inputs)
    found = run(program, held, fed)
    exact = {n: v.astype(np.float64) for n, v in held.items()}
    rng = np.random.default_rng(1)
    directions = {n: rng.normal(size=g.shape) for n, g in found.items() if n != "loss"}

    def loss(step):
        moved = {n: v + step * directions.get(n, 0.0) for n, v in exact.items()}
        return reference.forward(config, moved, fed, training=True)

    assert found["loss"] == pytest.approx(loss(0.0), rel=2e-5)
    slope = sum(float((found[n].astype(np.float64) * d).sum()) for n, d in directions.items())
    assert slope == pytest.approx((loss(1e-5) - loss(-1e-5)) / 2e-5, rel=5e-3)
    assert sum(v.size for v in held.values()) == config.parameters


@pytest.mark.parametrize("packed", some([False, True], [True]))
def test_relative_positions_by_either_kernel(packed: bool) -> None:
    """The bias inside the fused kernel, and its gradient, are those of scores that are written."""
    config = small("t5-11b")
    graph, model, program = built(config, encoder_length=4, packed=packed)
    held, fed = values(graph), feeds(config, model.inputs)
    _, _, fused = built(config.replace(attention="flash"), encoder_length=4, packed=packed)
    kernels = [{i.operation.opdef.name for i, _, _ in walk(p)} & {"attention"} for p in (program, fused)]
    assert kernels == [set(), {"attention"}]
    wanted, found = run(program, held, fed), run(fused, held, fed)
    assert any("relative_position_bias" in name for name in wanted)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5 * np.abs(value).max(), err_msg=name)


@pytest.mark.parametrize(
    "name",
    some(
        ["gpt2", "t5-11b", "palm-540b", "gemma3-12b", "switch-base-8", "deepseek-v3"],
        ["gemma3-12b", "deepseek-v3"],
    ),
)
def test_scanned_layers_are_the_unrolled_ones(name):
    config = small(name)
    graph, model, program = built(config)
    held, fed = values(graph), feeds(config, model.inputs)
    found = run(program, held, fed)
    flat, _, unrolled = built(config, scan=False)
    norm = "norm" if config.parallel else "feed_forward_norm"
    assert f"layer_1/{norm}/scale" in {n.removeprefix("decoder/") for n in flat.variables}
    wanted = run(unrolled, unstacked(held, [v.name for v in flat.trainable_variables], config), fed)
    assert found.pop("loss") == pytest.approx(wanted.pop("loss"), rel=1e-6)
    for variable, gradient in unstacked(found, wanted, config).items():
        np.testing.assert_allclose(gradient, wanted[variable], rtol=1e-3, atol=1e-5, err_msg=variable)


NAMED = mtf.Remat(save=["q", "k", "v", "wi_gate"], offload=["context"], offload_carries=True)
KEPT = [(remat, scan) for remat in ("none", "matmuls", NAMED) for scan in (True, False)]


@pytest.mark.parametrize(("remat", "scan"), some(KEPT, [("none", True), ("matmuls", False), (NAMED, True)]))
def test_what_is_kept_changes_nothing(remat, scan):
    config = small("llama3.1-405b")
    graph, model, program = built(config, scan)
    held, fed = values(graph), feeds(config, model.inputs)
    wanted = run(program, held, fed)
    found = run(built(config, scan, remat)[2], held, fed)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}])
@pytest.mark.parametrize("name", some(FAMILIES, FAMILIES[::2]))
def test_values_have_the_names_that_policies_keep(name, changes):
    if changes and small(name).latent is not None:
        pytest.skip("latent attention has norms of its own")
    config = small(name).replace(**changes)
    names = ["q", "k", "v", "context", "out", "wi", "wo", "residual", *(["wi_gate"] if config.gated else [])]
    with mtf.Graph() as graph:
        transformer(config, BATCH, LENGTH, remat=mtf.Remat(save=names))
    assert all(op.loop.kept for op in graph.operations if op.loop is not None)


@pytest.mark.parametrize("scan", some([True, False], [True]))
def test_gradients_of_gradients_are_their_slopes(scan):
    config = small("llama3.1-405b").replace(numerics=mtf.Numerics("float64"))
    with mtf.Graph() as graph:
        model = transformer(config, BATCH, LENGTH, remat="matmuls", scan=scan)
        wanted = graph.trainable_variables
        ahead = [mtf.input(f"ahead_{n}", v.shape, "float64") for n, v in enumerate(wanted)]
        grads = mtf.gradients([model.loss], wanted)
        along = mtf.add_n([mtf.reduce_sum(g * t) for g, t in zip(grads, ahead, strict=True)])
        second = dict(zip(graph.variables, mtf.gradients([along], wanted), strict=True))
        first = dict(zip(graph.variables, grads, strict=True))
        programs = [mtf.lower(outputs, precision="highest") for outputs in (first, second)]
    rng = np.random.default_rng(2)
    held = {n: v.astype(np.float64) for n, v in values(graph).items()}
    step = {n: rng.normal(size=v.shape) for n, v in held.items()}
    fed = {**feeds(config, model.inputs)}
    slopes = [run(programs[0], {n: v + h * step[n] for n, v in held.items()}, fed) for h in (1e-5, -1e-5)]
    found = run(programs[1], held, {**fed, **{f"ahead_{n}": step[v] for n, v in enumerate(held)}})
    for name, value in found.items():
        slope = (slopes[0][name] - slopes[1][name]) / 2e-5
        np.testing.assert_allclose(value, slope, rtol=1e-4, atol=1e-5 * np.abs(slope).max(), err_msg=name)


def test_angles_of_positions_are_not_kept():
    with mtf.Graph() as graph:
        transformer(small("llama3.1-405b"), BATCH, LENGTH, remat="none")
    loop = next(op.loop for op in graph.operations if op.loop is not None)
    kept = [y for y in loop.kept if "batch" not in y.shape]
    assert all(set(y.shape.names) <= {"d_model", "d_ff", "heads", "group", "head_dim"} for y in kept), kept
    assert any(y.name.endswith("/wo") for y in loop.kept)


def test_a_pattern_that_does_not_fill_the_last_trip_goes_on_unrolled():
    config = small("gemma3-12b").replace(windows=(4, None, 3), layers=5)  # one trip of three, and two
    graph, model, program = built(config)
    names = {f"{scope}/attention/q/kernel" for scope in ("layers/layer_2", "layer_3", "layer_4")}
    assert names <= set(graph.variables)
    held, fed = values(graph), feeds(config, model.inputs)
    assert run(program, held, fed)["loss"] == pytest.approx(reference.forward(config, held, fed), rel=2e-5)


def test_groups_of_query_heads_have_relative_positions_of_their_own():
    config = small("t5-small", 1).replace(kv_heads=4)  # two query heads share a head of keys
    graph, model, program = built(config)
    held, fed = values(graph), feeds(config, model.inputs)
    assert held["encoder/relative_position_bias"].shape == (2, 4, 8)  # group, heads, buckets
    assert sum(v.size for v in held.values()) == config.parameters

    def repeated(name, value):
        """The same with a head of keys and values for each query."""
        if "/attention/" not in name and "/cross_attention/" not in name and "relative" not in name:
            return value
        first = value.ndim - 3 if "relative" not in name else 0  # where the heads are
        if "/k/" in name or "/v/" in name:
            return np.concatenate([value, value], axis=-2)
        if "/out/" in name:
            first -= 1
        if "/q/" in name:
            first = value.ndim - 3
        return value.reshape(*value.shape[:first], 8, *value.shape[first + 2 :])

    graph, _, plain = built(config.replace(kv_heads=None))
    spread = {name: repeated(name, value) for name, value in held.items()}
    assert {n: v.shape for n, v in spread.items()} == {n: v.shape for n, v in values(graph).items()}
    assert run(program, held, fed)["loss"] == pytest.approx(float(run(plain, spread, fed)["loss"]), rel=1e-5)


def test_two_models_in_one_graph():
    with mtf.Graph():
        losses = {}
        for name in ("teacher", "student"):
            with mtf.scope(name):
                model = transformer(small("t5-small", 1), BATCH, LENGTH)
                losses[name] = model.loss
        program = mtf.lower(losses)
    assert set(model.inputs) == {"sources", "tokens", "targets"}
    assert set(program.inputs) == {f"{a}/{b}" for a in ("teacher", "student") for b in model.inputs}


def test_dropout_drops_while_training_alone():
    config = small("gpt2").replace(dropout=0.5)
    losses = []
    for training in (False, True):
        with mtf.Graph() as graph:
            model = transformer(config, BATCH, LENGTH, training=training)
            program = mtf.lower({"loss": model.loss}, precision="highest")
        sim = mtf.simulate(program)
        for name, value in values(graph).items():
            sim.state[name] = value
        losses.append([float(sim.step(feeds(config, model.inputs))["loss"]) for _ in range(2)])
    wanted = reference.forward(config, values(graph), feeds(config, model.inputs))
    assert losses[0] == [pytest.approx(wanted, rel=2e-5)] * 2
    assert abs(losses[1][0] - wanted) > 1e-3


def test_products_are_bfloat16_and_statistics_float32():
    with mtf.Graph() as graph:
        model = transformer(preset("llama3.1-405b").reduced(), BATCH, LENGTH)
    assert {op.output.dtype.name for op in graph.variables.values()} == {"float32"}
    loop = next(op.loop for op in graph.operations if op.loop is not None)
    kinds = {(op.opdef.name, op.output.dtype.name) for op in loop.body.operations}
    assert {dtype for kind, dtype in kinds if kind in ("einsum", "attention")} == {"bfloat16"}
    assert {dtype for kind, dtype in kinds if kind in ("rsqrt", "reduce_sum")} == {"float32"}
    assert (model.logits.dtype.name, model.loss.dtype.name) == ("bfloat16", "float32")


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("gpt2", {"length": 2048}, "gpt2 has 1024 positions, but the length is 2048"),
        ("gpt2", {"encoder_length": 8}, "encoder_length is for an encoder-decoder; gpt2 is of kind 'decoder'"),
        ("t5-small", {"predictions": 8}, "predictions is for an encoder; t5-small is of kind 'encoder-decoder'"),
        ("gpt2", {"batch": 0}, "batch must be at least 1, got 0"),
        ("gpt2", {"scan": 1}, "scan must be True or False"),
        ("gpt2", {"remat": "some"}, "remat must be"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(name, arguments, words):
    with mtf.Graph(), pytest.raises(mtf.GraphError, match=words):
        transformer(preset(name), **{"batch": 2, "length": 8, **arguments})


def test_a_config_is_needed():
    with mtf.Graph(), pytest.raises(mtf.GraphError, match="expected a TransformerConfig, got str 'gpt2'"):
        transformer("gpt2", 2, 8)
