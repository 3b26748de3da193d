"""Families that are planned from their config.json: parameters as in the models of transformers, notes, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from meshlib.sharing import config_notes, read_config, read_weights
from meshlib.sharing.foreign_families import FAMILIES
from meshlib.sharing.foreign_planned import PLANNED
from meshlib.storage.safetensors import write_tensors

Fields = dict[str, Any]
DIMS: Fields = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 128,
}  # fmt: skip
EIGHT = {"n_routed_experts": 8, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
         "n_shared_experts": 1}  # fmt: skip
# model_type: fields beside DIMS, the parameters that its class in transformers 4.57 has at these sizes
# (`AutoModelForCausalLM.from_config` on the device "meta"), and how many of them are not expressed here.
COUNTED: dict[str, tuple[Fields, int, int]] = {
    "arcee": ({"head_dim": 16, "hidden_act": "relu2", "tie_word_embeddings": False}, 115_264, 0),
    "cohere": ({"logit_scale": 0.0625}, 131_392, 0),
    "cohere2": ({"head_dim": 16, "sliding_window": 32,
                 "layer_types": [*["sliding_attention"] * 3, "full_attention"]}, 131_392, 0),
    "dots1": ({**EIGHT, "tie_word_embeddings": False}, 252_096, 0),
    "ernie4_5": ({}, 475_712, 0),
    # the biases that choose experts
    "ernie4_5_moe": ({"moe_num_experts": 8, "moe_intermediate_size": 32, "moe_k": 2, "moe_layer_start_index": 1,
                      "moe_num_shared_experts": 2}, 262_232, 3 * 8),
    "exaone4": ({"tie_word_embeddings": False}, 139_968, 0),
    # biases of nine norms, and a second norm in each layer
    "falcon": ({"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96}, 107_648, (9 + 4) * 64),
    "glm": ({"head_dim": 16, "attention_bias": True, "tie_word_embeddings": False}, 140_352, 0),
    "glm4": ({"head_dim": 16, "attention_bias": True, "tie_word_embeddings": False}, 140_864, 0),
    "glm4_moe": ({**EIGHT, "head_dim": 16, "use_qk_norm": True, "tie_word_embeddings": False}, 252_096, 0),
    # a second norm with its biases in each layer
    "gpt_neox": ({"hidden_act": "gelu_fast", "tie_word_embeddings": False}, 133_888, 4 * 2 * 64),
    "granite": ({"tie_word_embeddings": False}, 139_840, 0),
    "granitemoe": ({"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}, 362_048, 0),
    "helium": ({"head_dim": 16, "tie_word_embeddings": False}, 139_840, 0),
    "nemotron": ({"head_dim": 16, "hidden_act": "relu2", "tie_word_embeddings": False}, 115_840, 9 * 64),
    "phi": ({"tie_word_embeddings": False}, 116_864, 128),
    "phimoe": ({"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}, 362_624, 9 * 64),
    # the gate of the shared experts in each layer
    "qwen2_moe": ({"num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
                   "num_experts_per_tok": 2, "tie_word_embeddings": False}, 314_688, 4 * 64),
    "seed_oss": ({"attention_bias": True, "tie_word_embeddings": False}, 488_000, 0),
    "smollm3": ({"no_rope_layers": [1, 1, 1, 0]}, 131_648, 0),
    "stablelm": ({"tie_word_embeddings": False}, 140_416, 9 * 64),
    "starcoder2": ({}, 109_056, 0),
}  # fmt: skip


def saved(folder: Path, kind: str, **more: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({"model_type": kind, **DIMS, **more}))
    return file


@pytest.mark.parametrize("kind", PLANNED)
def test_parameters_are_those_of_the_classes_of_their_library(tmp_path: Path, kind: str) -> None:
    fields, count, absent = COUNTED[kind]
    file = saved(tmp_path, kind, **fields)
    assert count - read_config(file).parameters == absent
    assert absent == 0 or config_notes(file) or kind == "ernie4_5_moe"


def test_a_planned_model_is_lowered_and_estimated(tmp_path: Path) -> None:
    for kind in ("cohere2", "glm4_moe", "falcon"):
        config = read_config(saved(tmp_path, kind, **COUNTED[kind][0]))
        with mtf.Graph():
            step = mtf.models.train_step(config, batch=8, length=16)
            program = mtf.lower(*step, mesh="fsdp:4", layout=mtf.models.layout("fsdp", config, "fsdp:4"))
        assert mtf.estimate(program, "v5e-4").step_seconds > 0


def test_notes_name_what_a_file_sets(tmp_path: Path) -> None:
    notes = config_notes(saved(tmp_path, "granite", embedding_multiplier=12.0, logits_scaling=8.0))
    assert notes == ["embedding_multiplier=12.0, logits_scaling=8.0: factors of values, at no cost"]
    assert read_config(saved(tmp_path, "granite", attention_multiplier=0.25)).attention_scale == 0.25
    assert config_notes(saved(tmp_path, "arcee", hidden_act="relu2")) == [
        "hidden_act=relu2: the square of a ReLU; a ReLU here"
    ]
    assert config_notes(saved(tmp_path, "ernie4_5")) == []


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("falcon", {"alibi": True}, "alibi is True"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm is True"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm is True"),
        ("ernie4_5_moe", {**COUNTED["ernie4_5_moe"][0], "moe_layer_interval": 2}, "only 1 is supported"),
        (
            "qwen2_moe",
            {**COUNTED["qwen2_moe"][0], "shared_expert_intermediate_size": 48},
            "width 48 beside experts of 32",
        ),
        ("bloom", {}, "ALiBi"),
    ],
)
def test_refusals_name_the_reason(tmp_path: Path, kind: str, fields: Fields, reason: str) -> None:
    with pytest.raises(mtf.GraphError, match=reason):
        read_config(saved(tmp_path, kind, **fields))


def test_weights_of_planned_families_are_refused(tmp_path: Path) -> None:
    """Granite's tensors have Llama's names, and without its factors their values would be wrong."""
    config = read_config(saved(tmp_path, "granite", embedding_multiplier=12.0))
    with (tmp_path / "model.safetensors").open("wb") as file:
        write_tensors(file, {"x": np.zeros(1, np.float32)}, "test")
    with pytest.raises(mtf.GraphError, match=r"'granite', whose models are planned here but not run: embedding_mult"):
        read_weights(tmp_path, config)
    assert not {*PLANNED} & {*FAMILIES}
