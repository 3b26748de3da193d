"""Training steps: presets against their graphs, layouts by name, updates, checkpoints."""

from __future__ import annotations

import numpy as np
import pytest

import meshlib as mtf
from meshlib.models import PRESETS, layout, preset, train_step, transformer
from tests.effort import some
from tests.models.common import BATCH, LENGTH, feeds, small, unstacked, values, with_capacity

MESHES = {
    "data": "data:2",
    "zero1": "data:4",
    "fsdp": "fsdp:4",
    "tensor": "tensor:4",
    "sequence": "tensor:2",
    "context": "context:2",
    "2d": "data:2;tensor:2",
    "fsdp+tensor": "fsdp:2;tensor:2",
    "zero1+sequence": "data:2;tensor:2",
    "fsdp+context": "fsdp:2;context:2",
    "data+fsdp+tensor": "data:2;fsdp:2;tensor:2",
    "data+fsdp+sequence": "data:2;fsdp:2;tensor:2",
}


def test_graphs_of_all_presets_have_the_variables_that_were_counted():
    for name, config in PRESETS.items():
        with mtf.Graph() as graph:
            transformer(config, batch=8, length=64)
        sizes = {v.name: v.shape.size for v in graph.trainable_variables}
        counts = config.parameter_counts
        assert sum(sizes.values()) == config.parameters == sum(counts.values()), name
        parts = {
            "attention": ("attention/",),
            "feed_forward": ("feed_forward/",),
            "experts": ("/experts/", "/shared/"),
            "router": ("/router/",),
        }
        for part, words in parts.items():
            found = sum(n for v, n in sizes.items() if any(w in v for w in words) and v.endswith("/kernel"))
            assert found == counts[part], (name, part)
        norms = sum(n for v, n in sizes.items() if v.rpartition("/")[0].endswith("norm") or v.endswith("layer_scale"))
        assert norms == counts["norms"], name
        assert len(graph.operations) < 1000, name  # a layer is written once, or once in a pattern


@pytest.mark.parametrize(
    "name",
    some(
        ["llama2-70b", "t5-11b", "gemma3-12b", "switch-base-8", "deepseek-v3"], ["t5-11b", "gemma3-12b", "deepseek-v3"]
    ),
)
def test_more_layers_are_no_more_operations(name):
    def operations(periods):
        with mtf.Graph() as graph:
            train_step(preset(name).reduced(periods), batch=8, length=8)
        return [len(g.operations) for g in (graph, *(op.loop.body for op in graph.operations if op.loop is not None))]

    assert operations(2) == operations(50)


def test_the_unrolled_graph_has_as_many_variables():
    for name in some(("gemma3-12b", "t5-small", "gpt2", "deepseek-v2-lite"), ("t5-small", "deepseek-v2-lite")):
        with mtf.Graph() as graph:
            transformer(preset(name), batch=8, length=64, scan=False)
        assert sum(v.shape.size for v in graph.trainable_variables) == preset(name).parameters


# Windows, norms on both sides, scaled embeddings; two stacks and parallel blocks are verified by name below.
FEW = ("gemma4-31b",)


def test_presets_of_every_architecture_lower_at_a_small_scale():
    same = {"name": "reduced", "dropout": 0.0, "attention_scale": None, "norm_epsilon": 1e-6, "rope_theta": 1e4}
    configs = {config.reduced(1).replace(**same): name for name, config in PRESETS.items()}
    assert len(configs) > 8
    for config in some(list(configs), [preset(name).reduced(1).replace(**same) for name in FEW]):
        with mtf.Graph():
            outputs, updates = train_step(config, batch=4, length=8, optimizer="sgd")
            program = mtf.lower(outputs, updates, "fsdp:2;tensor:2", layout("fsdp+tensor", config, "fsdp:2;tensor:2"))
        assert {c.kind for c in program.collectives} >= {"all_gather", "reduce_scatter"}, configs[config]


@pytest.mark.parametrize(
    ("family", "names", "first"),
    [
        # "fsdp" and "2d" by default of the two models below that add something to them
        ("llama2-70b", tuple(MESHES), ("zero1", "sequence", "context")),
        ("bert-large", ("zero1", "fsdp+tensor", "sequence"), ("fsdp+tensor",)),
        ("palm-8b", ("tensor", "fsdp+context", "2d"), ("2d",)),
        ("t5-small", ("fsdp", "data+fsdp+sequence", "context"), ("fsdp",)),
    ],
)
def test_layouts_by_name_change_nothing(family, names, first):
    config, names = small(family, 1), some(names, first)
    with mtf.Graph():
        model = transformer(config, batch=8, length=8)
        pairs = [(MESHES[name], layout(name, config, MESHES[name])) for name in names]
        found = mtf.verify(model.loss, inputs=feeds(config, model.inputs), layouts=pairs, executor="exact")
    assert found.ok, found


def test_heads_too_few_for_the_axis_are_split_by_groups():
    config = small("llama3.1-405b", 1).replace(heads=8, kv_heads=2)
    rules = layout("fsdp+tensor", config, "fsdp:2;tensor:4")
    assert "group:tensor" in str(rules)
    with mtf.Graph():
        model = transformer(config, batch=4, length=8)
        assert mtf.verify(model.loss, layouts=[("fsdp:2;tensor:4", rules)], executor="exact").ok


def trained(config, steps, scan=True, held=None, **more):
    with mtf.Graph() as graph:
        outputs, updates = train_step(config, BATCH, LENGTH, scan=scan, **more)
        program = mtf.lower(outputs, updates, precision="highest")
    sim = mtf.simulate(program)
    for name, value in (held or {}).items():
        sim.state[name] = value
    fed = feeds(config, inputs_of(program))
    return graph, sim, [float(sim.step(fed)["loss"]) for _ in range(steps)]


def inputs_of(program):
    return {name: value.tensor for name, value in program.inputs.items()}


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "sgd", mtf.optimize.MomentumOptimizer(0.1)])
def test_steps_lower_the_loss(optimizer):
    rate = {"sgd": 0.3, "adamw": 0.01}.get(optimizer if isinstance(optimizer, str) else "", 0.05)
    config = small("llama2-7b", 1)
    _, _, losses = trained(config, 6, optimizer=optimizer, learning_rate=rate, max_norm=1.0)
    assert losses[-1] < losses[0] - 0.1, losses


def test_scanned_and_unrolled_steps_update_alike():
    config = small("gpt2")
    graph, sim, found = trained(config, 0)
    held = values(graph)
    graph, sim, found = trained(config, 3, held=held, learning_rate=0.01)
    flat, other, wanted = trained(config, 0, scan=False)
    names = list(values(flat))
    flat, other, wanted = trained(config, 3, scan=False, held=unstacked(held, names, config), learning_rate=0.01)
    assert found == pytest.approx(wanted, rel=1e-5)
    for name, value in unstacked(dict(sim.state), names, config).items():
        np.testing.assert_allclose(value, other.state[name], rtol=2e-3, atol=2e-4, err_msg=name)


def test_checkpoints_go_from_one_layout_to_another(tmp_path):
    config = small("llama2-70b", 1)

    def simulation(mesh, name):
        with mtf.Graph():
            outputs, updates = train_step(config, 4, LENGTH, remat="matmuls")
            return mtf.simulate(mtf.lower(outputs, updates, mesh, layout(name, config, mesh), precision="highest"))

    one, other = simulation("fsdp:2;tensor:2", "fsdp+tensor"), simulation("data:4", "zero1")
    fed = feeds(config, inputs_of(one.program))
    one.step(fed)
    mtf.save(one, tmp_path / "model.safetensors")
    mtf.load(tmp_path / "model.safetensors", other)
    assert float(one.step(fed)["loss"]) == pytest.approx(float(other.step(fed)["loss"]), rel=1e-5)


def test_an_unknown_optimizer_is_refused():
    with mtf.Graph(), pytest.raises(mtf.GraphError, match="got 'adamww'; did you mean 'adamw'"):
        train_step(preset("gpt2"), 2, 8, optimizer="adamww")


@pytest.mark.parametrize("dtype", some(["int8", "fp8"], ["int8"]))
def test_products_of_eight_bits_are_close_and_are_those_of_layers_alone(dtype):
    config = small("llama2-70b", 1)
    eight = config.replace(numerics=mtf.Numerics(precision=dtype))
    graph, sim, (loss,) = trained(eight, 1, held=(held := values(trained(config, 0)[0])), optimizer="sgd")
    _, exact, (wanted,) = trained(config, 1, held=held, optimizer="sgd")
    assert loss == pytest.approx(wanted, rel=0.05)
    assert loss != wanted
    change = [np.concatenate([(s.state[n] - held[n]).ravel() for n in held]) for s in (sim, exact)]
    assert np.corrcoef(change[0], change[1])[0, 1] > 0.95
    loop = next(op.loop for op in graph.operations if op.loop is not None)
    kinds = [op.opdef.name for op in loop.body.operations]
    assert kinds.count("quantized_einsum") == 7  # q, k, v, out, wi_gate, wi, wo
    assert "einsum" not in kinds


def test_collectives_are_of_values_that_listings_name():
    config = small("llama2-70b").replace(numerics=mtf.Numerics(activation_dtype="bfloat16"))
    mesh = "fsdp:2;tensor:2"
    with mtf.Graph():
        outputs, updates = train_step(config, 32, LENGTH, optimizer="sgd")
        program = mtf.lower(outputs, updates, mesh, layout("fsdp+tensor", config, mesh))
    named = {c.tensor for c in program.collectives if c.phase == "forward"}
    # With so many tokens the weights move over fsdp, and the table to the tokens.
    assert {"embedding/cast", "layers/scan/attention/q/kernel/cast", "layers/scan/feed_forward/wo"} <= named, named
    assert all("/" in name or name in program.inputs for name in named), named  # none is only called what it does


@pytest.mark.parametrize(("remat", "count"), [("none", 4), ("full", 6)])
def test_a_layer_with_experts_exchanges_twice_each_way(remat: str, count: int) -> None:
    """What is computed again is sent again."""
    config = with_capacity("mixtral-8x7b")
    with mtf.Graph():
        program = mtf.lower(*train_step(config, 8, 8, "sgd", remat), "data:4", "batch:data;experts:data")
    exchanges = [c for c in program.collectives if c.kind == "all_to_all"]
    assert len(exchanges) == count
    places = 8 * 8 * 4 * config.d_model * 4  # experts, sequences, places in each
    assert {c.sent_bytes for c in exchanges} == {places // 4 * 3 // 4}  # each trip of the loop


def test_a_step_moves_the_biases_that_choose_experts() -> None:
    """By the signs of what each of the stacked layers' experts lack, not by a gradient."""
    config = small("deepseek-v3")
    with mtf.Graph():
        outputs, updates = train_step(config, batch=4, length=8)
        program = mtf.lower(outputs, updates, mesh="data:2", layout="batch:data;experts:data")
    sim = mtf.simulate(program)
    tokens = np.random.default_rng(0).integers(0, 64, (4, 8)).astype(np.int32)
    found = sim.step(tokens=tokens, targets=tokens)
    assert set(found) == {"loss", "auxiliary_loss", "dropped"}
    assert 0 < found["auxiliary_loss"] < found["loss"]
    bias = sim.state["layers/moe/router/bias"]
    assert bias.shape == (2, 8)
    np.testing.assert_allclose(np.abs(bias)[bias != 0], 1e-3, rtol=1e-6)
    assert (bias > 0).any(1).all()
    assert (bias < 0).any(1).all()
