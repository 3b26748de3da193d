"""What is planned of an import is what is planned of the library's own model."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshlib as mtf
from examples.plans import plan_jax
from tests.effort import some
from tests.jax.importing.checks import compared
from tests.jax.importing.models import LLAMA_NAMES, llama, llama_params

LAYOUTS = [
    ("data:8", "batch:data"),
    ("fsdp:8", "batch:fsdp;d_model:fsdp?"),
    ("data:2;tensor:4", "batch:data;d_model:data?;heads:tensor;d_ff:tensor;vocab:tensor"),
]


def imported(config, batch, length, dtype="bfloat16"):
    """A Llama in JAX of a config's sizes."""
    heads = config.attention_of(None)
    params = llama_params(
        lambda *sizes: jax.ShapeDtypeStruct(sizes, dtype), config.layers, config.d_model, heads.query, heads.memory,
        heads.dim, config.d_ff, config.vocab,
    )  # fmt: skip
    ids = jax.ShapeDtypeStruct((batch, length), "int32")
    return mtf.from_jax(llama(heads.query, heads.memory), params, ids, ids, names=LLAMA_NAMES)


@pytest.mark.parametrize("name", some(["llama3.1-8b", "llama3.1-405b"], ["llama3.1-405b"]))
def test_flops_are_those_of_the_librarys_model_and_bytes_nearly(name):
    config, batch, length = mtf.models.preset(name), 16, 8192
    graph = imported(config, batch, length)
    with graph:
        updates = mtf.optimize.AdamWOptimizer(1e-3).minimize(graph.loss)
    with mtf.Graph():
        outputs, own_updates = mtf.models.train_step(config, batch, length, optimizer="adamw", remat="full")
    ours, theirs = mtf.Session(graph.outputs, updates), mtf.Session(outputs, own_updates)
    for mesh, layout in some(LAYOUTS, LAYOUTS[-1:]):
        found, wanted = ours.lower(mesh, layout), theirs.lower(mesh, layout)
        assert found.work.mxu_flops == wanted.work.mxu_flops
        # It keeps the scales of its norms in bfloat16, the library in float32.
        assert found.sent_bytes == pytest.approx(wanted.sent_bytes, rel=1e-4)
        times = [mtf.estimate(program, "v5p-16").step_seconds for program in (found, wanted)]
        assert times[0] == pytest.approx(times[1], rel=0.05)


def test_shapes_are_imported_at_once():
    # 405 B parameters would not fit this machine, nor would their tracing with arrays.
    begun = time.process_time()
    graph = imported(mtf.models.preset("llama3.1-405b"), 16, 8192)
    assert time.process_time() - begun < 20  # about 0.2 s where nothing else runs
    assert sum(x.shape.size for x in graph.trainable_variables) == 405_853_388_800


def test_the_order_of_axes_costs_nothing():
    """Weights and activations the other way round: the same program in other words."""
    import jax.numpy as jnp

    def usual(params, x):
        h = jnp.einsum("bld,df->blf", x, params["up"])
        return jnp.mean(jnp.einsum("blf,fd->bld", jnp.tanh(h), params["down"]) ** 2)

    def turned(params, x):
        h = jnp.einsum("fd,dlb->fbl", params["up"], x.transpose(2, 1, 0)).transpose(2, 1, 0).swapaxes(0, 1)
        return jnp.mean((jnp.tanh(h) @ params["down"].T).T ** 2)

    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, "float32")

    x, names = shape(64, 128, 512), {"x": "batch length d_model"}
    found = []
    for fn, params, of_up in (
        (usual, {"up": shape(512, 2048), "down": shape(2048, 512)}, "d_model d_ff"),
        (turned, {"up": shape(2048, 512), "down": shape(512, 2048)}, "d_ff d_model"),
    ):
        graph = mtf.from_jax(fn, params, x, names={**names, "params.up": of_up})
        assert not [op for op in graph.operations if op.opdef.name in ("transpose", "reshape", "rename_dimension")]
        with graph:
            updates = mtf.optimize.SgdOptimizer(0.1).minimize(graph.loss)
        program = mtf.lower(graph.outputs, updates, mesh="data:4;model:2", layout="batch:data;d_ff:model")
        found.append((program.work.mxu_flops, program.sent_bytes, program.memory.peak_bytes))
    assert found[0] == found[1]


def test_checkpoints_keep_what_their_policies_say():
    import jax.numpy as jnp

    def loss(policy):
        def block(x, w):
            return jnp.sin(jnp.tanh(x @ w["a"]) @ w["b"]), None

        def fn(params, x):
            body = block if policy == "none" else jax.checkpoint(block, policy=policy)
            return jnp.sum(jax.lax.scan(body, x, params)[0])

        return fn

    def memory(policy):
        shape = jax.ShapeDtypeStruct
        params = {"a": shape((8, 64, 256), "float32"), "b": shape((8, 256, 64), "float32")}
        graph = mtf.from_jax(loss(policy), params, shape((1024, 64), "float32"))
        with graph:
            made = mtf.gradients([graph.loss], list(graph.trainable_variables))
        program = mtf.lower(made)
        return program.memory.peak_bytes, program.work.mxu_flops

    policies = jax.checkpoint_policies
    all_again, products, nothing = map(memory, (None, policies.dots_with_no_batch_dims_saveable, "none"))
    assert all_again[0] < min(products[0], nothing[0])
    assert all_again[1] > products[1] == nothing[1]
    assert memory(policies.dots_saveable) == products
    assert memory(policies.nothing_saveable) == all_again


@pytest.mark.parametrize("scanned", [True, False])
def test_checkpoints_keep_by_name_on_device_or_host(scanned):
    import jax.numpy as jnp
    from jax.ad_checkpoint import checkpoint_name

    def program(policy):
        def block(x, w):
            return jnp.sin(jnp.tanh(checkpoint_name(x @ w, "hidden")) @ w.T), None

        def fn(w, x):
            body = jax.checkpoint(block, policy=policy)
            if scanned:
                return jnp.sum(jax.lax.scan(body, x, w)[0])
            for n in range(4):
                x, _ = body(x, w[n])
            return jnp.sum(x)

        shape = jax.ShapeDtypeStruct
        graph = mtf.from_jax(fn, shape((4, 64, 256), "float32"), shape((1024, 64), "float32"))
        with graph:
            return mtf.lower(mtf.gradients([graph.loss], list(graph.trainable_variables)))

    policies, bytes_kept = jax.checkpoint_policies, 4 * 1024 * 256 * 4
    again, kept = program(None), program(policies.save_only_these_names("hidden"))
    assert again.work.mxu_flops > kept.work.mxu_flops
    moved = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["hidden"], offload_src="device",
        offload_dst="pinned_host",
    )  # fmt: skip
    assert program(moved).to_host_bytes == bytes_kept
    assert kept.to_host_bytes == 0


def test_each_checkpoint_in_a_loop_keeps_what_it_says():
    """FLOPs of what is computed again: of nothing, of one of two branches, of both; of all, if one is around them."""
    import jax.numpy as jnp

    def program(first, second, around):
        def branch(x, w):
            return jnp.sin(jnp.tanh(x @ w["a"]) @ w["b"])

        def body(x, w):
            x = x + (jax.checkpoint(branch) if first else branch)(x, w)
            return x + (jax.checkpoint(branch) if second else branch)(x, w)

        def fn(params, x):
            layer = jax.checkpoint(body) if around else body
            return jnp.sum(jax.lax.scan(lambda x, w: (layer(x, w), None), x, params)[0])

        shape = jax.ShapeDtypeStruct
        params = {"a": shape((8, 64, 256), "float32"), "b": shape((8, 256, 64), "float32")}
        graph = mtf.from_jax(fn, params, shape((1024, 64), "float32"))
        with graph:
            made = mtf.lower(mtf.gradients([graph.loss], list(graph.trainable_variables)))
        return made.memory.peak_bytes, made.work.mxu_flops

    branch_flops = 8 * 2 * 2 * 1024 * 64 * 256  # two products of 1024 x 64 x 256 in each of 8 trips
    kinds = [(False, False, False), (True, False, False), (True, True, False), (True, False, True)]
    memory, flops = zip(*(program(*kind) for kind in kinds), strict=True)
    assert [n - flops[0] for n in flops] == [0, branch_flops, 2 * branch_flops, 2 * branch_flops]
    assert memory[0] > memory[1] > memory[2] >= memory[3]


def test_the_example(capsys):
    small = ["--plain", "--slice", "v5e-16", "--layers", "2", "--batch", "32", "--d-model", "256", "--d-ff", "512"]
    assert plan_jax.main([*small, "--vocab", "1024", "--length", "256"]) == 0
    text = capsys.readouterr().out
    assert text.count("collectives send") == 3
    assert "sharded and tensor parallel: mesh fsdp:2;tensor:8" in text
    assert "plan_jax.py:" in text
    assert "because einsum 'scan/einsum" in text
    assert plan_jax.main(["--slice", "v5e-17"]) == 2


def test_beams_over_a_split_vocabulary_exchange_candidates_alone():
    """Ties among values, and the smallest value of all, which argmin reads, included."""
    batch, beams, vocab = 4, 3, 16
    rng = np.random.default_rng(0)
    w = rng.integers(-2, 3, (6, vocab)).astype(np.float32)
    h, before = rng.integers(-2, 3, (batch, beams, 6)).astype(np.float32), np.zeros((batch, beams), np.float32)

    def step(w, h, before):
        scores = (h @ w + before[..., None]).reshape(batch, beams * vocab)
        values, at = jax.lax.top_k(scores, beams)
        return values, at // vocab, at % vocab, jnp.argmax(scores, -1), jnp.argmin(scores, -1)

    names, layouts = {"w": "d vocab", "h": "batch beam d"}, [("m:4", "vocab:m")]
    graph = compared(step, w, h, before, names=names, layouts=layouts, gradients=False)
    program = mtf.lower(graph.outputs, mesh="m:4", layout="vocab:m")
    assert max(c.payload_bytes for c in program.collectives) == batch * beams * beams * 8  # a value and its index
