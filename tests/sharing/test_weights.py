"""Weights by Hugging Face's names: made-up tensors of the right names and shapes, against forwards by their rules."""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import meshlib as mtf
from meshlib.storage.safetensors import Tensors, write_tensors
from tests.sharing import reference

Array = np.ndarray[Any, Any]
EXACT = mtf.Numerics(precision="highest")
LENGTH = 11


SLOWED = {  # of four pairs one is left as it is, one in between, two are slowed
    **{"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 64,
}

YARN = {  # likewise one of four is left, one in between
    **{"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5},
    "original_max_position_embeddings": 64,
}


def llama_config(**more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 20, "vocab_size": 50, "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0, "tie_word_embeddings": False, **more,
    }  # fmt: skip


def gpt2_config() -> dict[str, Any]:
    return {
        "model_type": "gpt2", "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 16, "vocab_size": 50,
        "layer_norm_epsilon": 1e-5,
    }  # fmt: skip


def t5_config(**more: Any) -> dict[str, Any]:
    return {
        "model_type": "t5", "d_model": 24, "num_layers": 2, "num_heads": 3, "d_kv": 8, "d_ff": 20, "vocab_size": 50,
        "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6, **more,
    }  # fmt: skip


def llama_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, f, v = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    q, k = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not c["tie_word_embeddings"]:
        found["lm_head.weight"] = (v, d)
    for n in range(c["num_hidden_layers"]):
        p = f"model.layers.{n}."
        found |= {p + "input_layernorm.weight": (d,), p + "post_attention_layernorm.weight": (d,)}
        found |= {p + f"self_attn.{x}_proj.weight": (size, d) for x, size in (("q", q), ("k", k), ("v", k))}
        found |= {p + "self_attn.o_proj.weight": (d, q), p + "mlp.down_proj.weight": (d, f)}
        found |= {p + f"mlp.{x}_proj.weight": (f, d) for x in ("gate", "up")}
        if c.get("attention_bias"):
            found |= {p + f"self_attn.{x}_proj.bias": (size,) for x, size in (("q", q), ("k", k), ("v", k), ("o", d))}
    return found


def gpt2_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, f = c["n_embd"], 4 * c["n_embd"]
    found: dict[str, tuple[int, ...]] = {"wte.weight": (c["vocab_size"], d), "wpe.weight": (c["n_positions"], d)}
    found |= {"ln_f.weight": (d,), "ln_f.bias": (d,)}
    for n in range(c["n_layer"]):
        for name, size in (("ln_1", d), ("ln_2", d)):
            found |= {f"h.{n}.{name}.weight": (size,), f"h.{n}.{name}.bias": (size,)}
        for name, a, b in (("attn.c_attn", d, 3 * d), ("attn.c_proj", d, d), ("mlp.c_fc", d, f), ("mlp.c_proj", f, d)):
            found |= {f"h.{n}.{name}.weight": (a, b), f"h.{n}.{name}.bias": (b,)}
    return found


def t5_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, f, v = c["d_model"], c["d_ff"], c["vocab_size"]
    inner, buckets = c["num_heads"] * c["d_kv"], c["relative_attention_num_buckets"]
    found: dict[str, tuple[int, ...]] = {"shared.weight": (v, d)}
    if not c.get("tie_word_embeddings", True):
        found["lm_head.weight"] = (v, d)
    for stack in ("encoder", "decoder"):
        found[f"{stack}.final_layer_norm.weight"] = (d,)
        found[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = (buckets, c["num_heads"])
        kinds = ["SelfAttention"] + ["EncDecAttention"] * (stack == "decoder")
        for n in range(c["num_layers"]):
            for place, kind in enumerate(kinds):
                p = f"{stack}.block.{n}.layer.{place}."
                found |= {p + "layer_norm.weight": (d,), p + f"{kind}.o.weight": (d, inner)}
                found |= {p + f"{kind}.{x}.weight": (inner, d) for x in "qkv"}
            p = f"{stack}.block.{n}.layer.{len(kinds)}."
            into = ("wi_0", "wi_1") if "gated" in c.get("feed_forward_proj", "") else ("wi",)
            found |= {p + "layer_norm.weight": (d,), p + "DenseReluDense.wo.weight": (d, f)}
            found |= {p + f"DenseReluDense.{x}.weight": (f, d) for x in into}
    return found


CASES = {
    "llama": (llama_config(), llama_shapes),
    "llama, every head its own keys": (llama_config(num_key_value_heads=6), llama_shapes),
    "llama, one head of keys": (llama_config(num_key_value_heads=1), llama_shapes),
    "llama, tied, with biases": (llama_config(tie_word_embeddings=True, attention_bias=True), llama_shapes),
    "llama, slowed positions": (llama_config(rope_scaling=SLOWED), llama_shapes),
    "llama, positions by YaRN": (llama_config(rope_scaling=YARN), llama_shapes),
    "llama, all positions slowed": (llama_config(rope_scaling={"type": "linear", "factor": 3.0}), llama_shapes),
    "llama, parameters of positions": (
        llama_config(rope_parameters={**SLOWED, "rope_theta": 5000.0, "factor": 9.0}),
        llama_shapes,
    ),
    "gpt2": (gpt2_config(), gpt2_shapes),
    "t5": (t5_config(), t5_shapes),
    "t5 v1.1": (t5_config(feed_forward_proj="gated-gelu", tie_word_embeddings=False), t5_shapes),
}


def tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, Array]:
    rng = np.random.default_rng(7)
    return {
        n: (rng.normal(size=s) * (0.5 if len(s) == 2 else 1) + (len(s) == 1)).astype("f4") for n, s in shapes.items()
    }


def to_file(path: Path, arrays: dict[str, Any]) -> None:
    with path.open("wb") as file:
        write_tensors(file, arrays, "test")


def saved(folder: Path, found: dict[str, Any], arrays: dict[str, Array], name: str = "model.safetensors") -> Path:
    (folder / "config.json").write_text(json.dumps(found))
    to_file(folder / name, arrays)
    return folder


def theirs(found: dict[str, Any], arrays: dict[str, Array], sources: Array, tokens: Array) -> Array:
    w = {n: x.astype(np.float64) for n, x in arrays.items()}
    if found["model_type"] == "llama":
        scaling = found.get("rope_scaling") or found.get("rope_parameters")
        sizes = (found["num_hidden_layers"], found["num_attention_heads"], found["num_key_value_heads"])
        return reference.llama(w, tokens, *sizes, found["rope_theta"], found["rms_norm_eps"], scaling)
    if found["model_type"] == "gpt2":
        return reference.gpt2(w, tokens, found["n_layer"], found["n_head"])
    tied = found.get("tie_word_embeddings", True)
    return reference.t5(w, sources, tokens, found["num_layers"], found["num_heads"], 8, 6, tied)


def test_published_periods_of_llama_3_2() -> None:
    """1 / frequency of some pairs of a head of 64: those that transformers makes of its config.json."""
    scaling = {**SLOWED, "factor": 32.0, "original_max_position_embeddings": 8192}
    known = {0: 1.0, 1: 1.506929, 10: 60.384865, 15: 774.864624, 20: 116682.632812, 24: 601696.5, 31: 10617620.0}
    found = {n: 1 / reference.slowed(500_000.0 ** (-n / 32), scaling) for n in known}
    assert found == pytest.approx(known, rel=1e-5)
    head, length = mtf.Dimension("head_dim", 64), mtf.Dimension("length", 3)
    with mtf.Graph():
        ones = mtf.ones([length, head])
        turned = mtf.layers.rotary(ones, length, head, 500_000.0, scaling=mtf.layers.RotaryScaling(32.0, 1, 4, 8192))
        y = mtf.simulate(mtf.lower({"y": turned}, precision="highest")).step()["y"]
    angles = np.arctan2(y[:, 32:], y[:, :32]) - np.pi / 4  # ones lie at 45 degrees
    for n, period in known.items():
        np.testing.assert_allclose(angles[:, n], np.arange(3) / period, atol=2e-7)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, (2.0, 0.1 * np.log(2.0) + 1)),  # the factor is that of the lengths
        ({"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}, (40.0, 1.0)),  # as DeepSeek-V3's
        ({"factor": np.e, "mscale": 2.0, "mscale_all_dim": 1.0}, (np.e, 1.2 / 1.1)),
        ({"factor": 4.0, "attention_factor": 1.5, "beta_fast": None}, (4.0, 1.5)),
    ],
)
def test_what_a_config_leaves_out_of_yarn(given: dict[str, Any], wanted: tuple[float, float], tmp_path: Path) -> None:
    rope = {"type": "yarn", "original_max_position_embeddings": 4096, **given}
    found = llama_config(rope_scaling=rope, max_position_embeddings=8192)
    (tmp_path / "config.json").write_text(json.dumps(found))
    scaling = mtf.sharing.read_config(tmp_path).rope_scaling
    assert scaling is not None
    assert astuple(scaling) == (wanted[0], 1.0, 32.0, 4096, "pairs", pytest.approx(wanted[1]))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_their_conventions(case: str, tmp_path: Path) -> None:
    found, shapes = CASES[case]
    arrays = tensors(shapes(found))
    folder = saved(tmp_path, found, arrays)
    config = mtf.sharing.read_config(folder).replace(numerics=EXACT)
    state = mtf.sharing.read_weights(folder, config)
    rng = np.random.default_rng(1)
    tokens, sources = rng.integers(0, 50, (2, 1, LENGTH))
    with mtf.Graph():
        model = mtf.models.transformer(config, 1, LENGTH)
        program = mtf.lower({"logits": model.logits}, mesh="t:2", layout="d_ff:t", precision="highest")
    sim = mtf.simulate(program)
    for name in state:
        sim.state[name] = state[name]
    fed = {"tokens": tokens, "sources": sources, "targets": tokens}
    made = sim.step({n: x.astype(np.int32) for n, x in fed.items() if n in program.inputs})["logits"][0]
    wanted = theirs(found, arrays, sources[0], tokens[0])
    assert np.abs(wanted).max() > 0.5
    assert np.abs(made - wanted).max() < 2e-4 * np.abs(wanted).max()
    # and back, to the last bit
    names = mtf.sharing.write_weights(state, config, tmp_path / "back")
    assert names == ["model.safetensors"]
    again = Tensors(tmp_path / "back" / names[0], "test")
    assert dict(again).keys() == arrays.keys()
    assert all(np.array_equal(again[n], arrays[n]) for n in arrays)
    # layers one by one are written as stacked ones are
    flat: dict[str, Array] = {}
    for name, x in state.items():
        if "layers/" in name:
            flat |= {name.replace("layers/", f"layer_{n}/"): x[n] for n in range(len(x))}
        else:
            flat[name] = x
    mtf.sharing.write_weights(flat, config, tmp_path / "flat")
    assert (tmp_path / "flat/model.safetensors").read_bytes() == (tmp_path / "back/model.safetensors").read_bytes()


def test_files_with_prefixes_buffers_and_second_names(tmp_path: Path) -> None:
    found, shapes = CASES["gpt2"]
    arrays = tensors(shapes(found))
    plain = mtf.sharing.read_weights(saved(tmp_path, found, arrays), mtf.sharing.read_config(tmp_path))
    buffers = {"transformer.h.0.attn.bias": np.ones((1, 1, 16, 16), np.uint8), "lm_head.weight": arrays["wte.weight"]}
    with_prefix = {f"transformer.{n}": x for n, x in arrays.items()}
    file = tmp_path / "other.safetensors"
    to_file(file, with_prefix | buffers)
    again = mtf.sharing.read_weights(file, mtf.sharing.read_config(tmp_path / "config.json"))
    assert all(np.array_equal(plain[n], again[n]) for n in plain)


def test_several_files_in_half_precision(tmp_path: Path) -> None:
    found, shapes = CASES["llama"]
    folder = saved(tmp_path, found, tensors(shapes(found)))
    config = mtf.sharing.read_config(folder)
    state = mtf.sharing.read_weights(folder, config)
    names = mtf.sharing.write_weights(state, config, tmp_path / "parts", "bfloat16", shard_bytes=4000)
    assert len(names) > 3
    assert all((tmp_path / "parts" / n).stat().st_size < 8000 for n in names)
    table = json.loads((tmp_path / "parts/model.safetensors.index.json").read_text())
    assert table["metadata"]["total_size"] == sum(2 * x.size for x in state.values())
    again = mtf.sharing.read_weights(tmp_path / "parts", config)
    for name, x in state.items():
        assert np.array_equal(again[name], x.astype(ml_dtypes.bfloat16).astype(np.float32)), name
    (tmp_path / "parts" / names[1]).unlink()
    with pytest.raises(mtf.CheckpointError, match=names[1]):
        mtf.sharing.read_weights(tmp_path / "parts", config)


def test_presets_have_the_shapes_of_their_files() -> None:
    """Names and shapes of the published files, of which some stand here: nothing is read."""
    from meshlib.sharing.names import family_of
    from meshlib.sharing.programs import variables_of
    from meshlib.sharing.weights import _expected, _places

    published = {
        ("llama3.1-8b", "model.layers.31.self_attn.k_proj.weight"): (1024, 4096),
        ("llama3.1-8b", "model.layers.0.mlp.down_proj.weight"): (4096, 14336),
        ("llama2-7b", "model.layers.31.self_attn.o_proj.weight"): (4096, 4096),
        ("gpt2", "h.11.attn.c_attn.weight"): (768, 2304),
        ("gpt2-xl", "h.47.mlp.c_fc.weight"): (1600, 6400),
        ("t5-small", "decoder.block.5.layer.2.DenseReluDense.wo.weight"): (512, 2048),
        ("t5-11b", "encoder.block.23.layer.0.SelfAttention.q.weight"): (16384, 1024),
        ("t5-3b", "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"): (32, 32),
    }
    for (name, tensor), shape in published.items():
        config = mtf.models.preset(name)
        wanted = variables_of(config)
        rows = list(_places(config, family_of(config, "test")[1], wanted))
        assert {row[1] for row in rows} == set(wanted)
        (row, ours, index, _) = next(r for r in rows if r[3] == tensor)
        assert _expected(row, wanted[ours] if index is None else wanted[ours][1:], config) == shape


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    found, shapes = CASES["llama"]
    arrays = tensors(shapes(found))
    config = mtf.sharing.read_config(saved(tmp_path, found, arrays))
    arrays["model.layers.1.mlp.up_proj.weight"] = arrays["model.layers.1.mlp.up_proj.weight"].T
    arrays["stranger"] = arrays.pop("model.norm.weight")
    arrays["model.layers.0.mlp.up_proj.weight"] = np.ones((20, 24), np.int8)
    to_file(tmp_path / "model.safetensors", arrays)
    with pytest.raises(mtf.CheckpointError) as fault:
        mtf.sharing.read_weights(tmp_path, config)
    for text in (
        "4 faults",
        "'model.layers.0.mlp.up_proj.weight' is I8; weights are F64, F32, F16, BF16",
        "'model.norm.weight' is missing",
        r"has shape [24, 20], the model [20, 24]",
        "'stranger' [24]",
    ):
        assert text in str(fault.value)
    (tmp_path / "empty").mkdir()
    for call, kind, text in (
        (lambda: mtf.sharing.read_weights(tmp_path / "empty", config), mtf.CheckpointError, "holds neither"),
        (lambda: mtf.sharing.read_weights(3, config), mtf.CheckpointError, "path must be text"),
        (lambda: mtf.sharing.read_weights(tmp_path, "llama"), mtf.GraphError, "expected a TransformerConfig"),
        (lambda: mtf.sharing.read_weights(tmp_path, mtf.models.preset("mixtral-8x7b")), mtf.GraphError, "has experts"),
        (
            lambda: mtf.sharing.read_weights(tmp_path, mtf.models.preset("bert-base")),
            mtf.GraphError,
            "norms after blocks",
        ),
        (lambda: mtf.sharing.write_weights({}, config, tmp_path), mtf.GraphError, "'embedding' .* is missing"),
        (lambda: mtf.sharing.write_weights({}, config, tmp_path, "int8"), mtf.GraphError, "dtype must be 'float32'"),
        (lambda: mtf.sharing.read_config(tmp_path / "empty"), mtf.CheckpointError, "No such file"),
    ):
        with pytest.raises(kind, match=text):
            call()
    for wrong, kind, text in (
        ({"model_type": "wholly-unlike"}, mtf.GraphError, "model_type 'wholly-unlike', none of the"),
        ({"model_type": "gpt2"}, mtf.CheckpointError, "has no 'n_embd'"),
        (llama_config(rope_scaling={"rope_type": "dynamic"}), mtf.GraphError, "scaled .'dynamic'. in a way"),
        (llama_config(rope_scaling={"rope_type": "yarn"}), mtf.CheckpointError, "no 'max_position_embeddings'"),
        (llama_config(rope_scaling={**YARN, "truncate": False}), mtf.GraphError, "truncate is False; only True"),
        (llama_config(rope_scaling={**YARN, "attention_factor": 0.0}), mtf.GraphError, "amplitude must be positive"),
        (llama_config(rope_scaling={"rope_type": "llama3"}), mtf.CheckpointError, "has no 'factor'"),
        (llama_config(rope_scaling={**SLOWED, "factor": 0.5}), mtf.GraphError, "factor must be at least 1 .* 0.5"),
        (llama_config(rope_scaling={**SLOWED, "high_freq_factor": 1}), mtf.GraphError, "low < high, got .* high 1"),
        (
            llama_config(rope_scaling="x"),
            mtf.CheckpointError,
            "'rope_scaling' must be an object, or missing, got str 'x'",
        ),
        (llama_config(rope_theta=None), mtf.CheckpointError, "does not describe a model"),
        (
            llama_config(head_dim=None, num_attention_heads=0),
            mtf.CheckpointError,
            "'num_attention_heads' must be an integer of at least 1, got int 0",
        ),
        (llama_config(num_key_value_heads=0), mtf.CheckpointError, "'num_key_value_heads' .* at least 1.*got int 0"),
        (llama_config(tie_word_embeddings="false"), mtf.CheckpointError, "must be true or false.*got str 'false'"),
        (llama_config(vocab_size=True), mtf.CheckpointError, "'vocab_size' must be an integer .*got bool True"),
        (llama_config(rms_norm_eps="1e-5"), mtf.CheckpointError, "'rms_norm_eps' must be a positive number"),
        (llama_config(vocab_size=None), mtf.CheckpointError, "'vocab_size' must be an integer"),
        (
            llama_config(partial_rotary_factor=0.5),
            mtf.GraphError,
            "partial_rotary_factor is 0.5; only 1.0 is supported",
        ),
        (llama_config(mlp_bias=True), mtf.GraphError, "mlp_bias is True"),
        (llama_config(quantization_config={"bits": 4}), mtf.GraphError, "quantization_config is {'bits': 4}"),
        ({**gpt2_config(), "add_cross_attention": True}, mtf.GraphError, "add_cross_attention is True"),
        ({**gpt2_config(), "scale_attn_by_inverse_layer_idx": True}, mtf.GraphError, "only False is supported"),
        (llama_config(hidden_act="mish"), mtf.GraphError, "no activation 'mish'"),
        ([], mtf.CheckpointError, "is not Hugging Face's config.json with a model_type"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(wrong))
        with pytest.raises(kind, match=text):
            mtf.sharing.read_config(tmp_path)
    for table in ("{}", '{"weight_map": {"a": "../../b"}}', "nonsense"):
        (tmp_path / "empty/model.safetensors.index.json").write_text(table)
        with pytest.raises(mtf.CheckpointError, match=r"not an index|outside of its folder"):
            mtf.sharing.read_weights(tmp_path / "empty", config)
