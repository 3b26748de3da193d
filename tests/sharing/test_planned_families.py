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
from tests.effort import some

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


def _two(layers: int, width: int, vocab: int) -> Fields:
    """A model of two stacks; `num_hidden_layers` is that of the encoder, which a pruned model has more of."""
    each = {"layers": layers, "attention_heads": width // 64, "ffn_dim": 4 * width}
    stacks = {f"{stack}_{name}": size for name, size in each.items() for stack in ("encoder", "decoder")}
    return {"d_model": width, "vocab_size": vocab, "num_hidden_layers": layers, **stacks}


_BERT = {"max_position_embeddings": 514, "type_vocab_size": 1, "hidden_act": "gelu"}
# model_type: the fields of a published model, its number of parameters as its weights have them (of the last five by
# hand, from the shapes of their classes), and how many of them are not expressed here.
PUBLISHED: dict[str, tuple[Fields, int, int]] = {
    # swiss-ai/Apertus-8B: two numbers of each activation
    "apertus": ({"hidden_act": "xielu", "hidden_size": 4096, "intermediate_size": 21504, "num_attention_heads": 32,
                 "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 131072}, 8_053_338_176, 64),
    # baichuan-inc/Baichuan2-7B
    "baichuan": ({"hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096,
                  "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 125696}, 7_505_973_248, 0),
    # google-bert/bert-large-uncased, with the head that predicts masked tokens
    "bert": ({"hidden_act": "gelu", "hidden_size": 1024, "intermediate_size": 4096, "max_position_embeddings": 512,
              "num_attention_heads": 16, "num_hidden_layers": 24, "type_vocab_size": 2, "vocab_size": 30522},
             335_174_458, 0),
    # bigscience/bloom-560m
    "bloom": ({"n_embed": 1024, "n_layer": 24, "num_attention_heads": 16, "vocab_size": 250880, "seq_length": 2048},
              559_214_592, 0),
    # THUDM/chatglm3-6b
    "chatglm": ({"add_qkv_bias": True, "ffn_hidden_size": 13696, "hidden_size": 4096, "kv_channels": 128,
                 "multi_query_group_num": 2, "num_attention_heads": 32, "num_layers": 28, "padded_vocab_size": 65024},
                6_243_584_000, 0),
    # Salesforce/codegen-350M: the bias of the head
    "codegen": ({"activation_function": "gelu_new", "n_embd": 1024, "n_head": 16, "n_layer": 20, "n_positions": 2048,
                 "vocab_size": 51200, "tie_word_embeddings": False}, 356_712_448, 51200),
    # databricks/dbrx-base
    "dbrx": ({"attn_config": {"kv_n_heads": 8, "clip_qkv": 8}, "d_model": 6144, "n_heads": 48, "n_layers": 40,
              "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}, "vocab_size": 100352},
             131_596_523_520, 0),
    # deepseek-ai/deepseek-moe-16b-base
    "deepseek": ({"first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10944, "n_routed_experts": 64,
                  "moe_intermediate_size": 1408, "n_shared_experts": 2, "num_experts_per_tok": 6,
                  "num_attention_heads": 16, "num_hidden_layers": 28, "vocab_size": 102400}, 16_375_728_128, 0),
    # distilbert/distilbert-base-uncased
    "distilbert": ({"activation": "gelu", "dim": 768, "hidden_dim": 3072, "n_heads": 12, "n_layers": 6,
                    "max_position_embeddings": 512, "vocab_size": 30522}, 66_985_530, 0),
    # LGAI-EXAONE/EXAONE-3.5-7.8B
    "exaone": ({"activation_function": "silu", "hidden_size": 4096, "intermediate_size": 14336, "num_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 102400}, 7_818_448_896, 0),
    # bigcode/starcoder
    "gpt_bigcode": ({"activation_function": "gelu", "multi_query": True, "n_embd": 6144, "n_head": 48, "n_inner": 24576,
                     "n_layer": 40, "n_positions": 8192, "vocab_size": 49152}, 15_517_456_384, 0),
    # EleutherAI/gpt-neo-2.7B
    "gpt_neo": ({"activation_function": "gelu_new", "attention_types": [[["global", "local"], 16]], "num_layers": 32,
                 "hidden_size": 2560, "intermediate_size": None, "num_heads": 20, "max_position_embeddings": 2048,
                 "vocab_size": 50257}, 2_651_307_520, 0),
    # EleutherAI/gpt-j-6b: the bias of the head
    "gptj": ({"activation_function": "gelu_new", "n_embd": 4096, "n_head": 16, "n_layer": 28, "n_positions": 2048,
              "vocab_size": 50400, "tie_word_embeddings": False}, 6_050_882_784, 50400),
    # internlm/internlm2-20b, internlm3-8b-instruct
    "internlm2": ({"bias": False, "hidden_size": 6144, "intermediate_size": 16384, "num_attention_heads": 48,
                   "num_hidden_layers": 48, "num_key_value_heads": 8, "vocab_size": 92544}, 19_861_149_696, 0),
    "internlm3": ({"bias": False, "qkv_bias": False, "head_dim": 128, "hidden_size": 4096, "intermediate_size": 10240,
                   "num_attention_heads": 32, "num_hidden_layers": 48, "num_key_value_heads": 2, "vocab_size": 128512},
                  8_804_241_408, 0),
    # openbmb/MiniCPM-2B
    "minicpm": ({"hidden_size": 2304, "intermediate_size": 5760, "num_attention_heads": 36, "num_hidden_layers": 40,
                 "vocab_size": 122753, "scale_emb": 12}, 2_724_880_896, 0),
    # MiniMaxAI/MiniMax-M2
    "minimax_m2": ({"head_dim": 128, "hidden_size": 3072, "intermediate_size": 1536, "num_attention_heads": 48,
                    "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8, "use_qk_norm": True,
                    "num_local_experts": 256, "use_routing_bias": True, "vocab_size": 200064}, 228_689_748_992, 0),
    # mistralai/Ministral-8B-Instruct-2410
    "ministral": ({"head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
                   "num_hidden_layers": 36, "num_key_value_heads": 8, "vocab_size": 131072}, 8_019_808_256, 0),
    # mosaicml/mpt-7b
    "mpt": ({"d_model": 4096, "expansion_ratio": 4, "max_seq_len": 2048, "n_heads": 32, "n_layers": 32, "no_bias": True,
             "vocab_size": 50432}, 6_649_286_656, 0),
    # allenai/OLMo-7B-hf: its norms have no parameters
    "olmo": ({"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_hidden_layers": 32,
              "vocab_size": 50304}, 6_888_095_744, -65 * 4096),
    # facebook/opt-6.7b
    "opt": ({"activation_function": "relu", "ffn_dim": 16384, "hidden_size": 4096, "max_position_embeddings": 2048,
             "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 50272}, 6_658_473_984, 0),
    # Qwen/Qwen-7B
    "qwen": ({"hidden_size": 4096, "intermediate_size": 22016, "kv_channels": 128, "num_attention_heads": 32,
              "num_hidden_layers": 32, "vocab_size": 151936}, 7_721_324_544, 0),
    # answerdotai/ModernBERT-base; the first layer has one norm, and the head's product no bias
    "modernbert": ({"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "hidden_activation": "gelu",
                    "hidden_size": 768, "intermediate_size": 1152, "local_attention": 128, "local_rope_theta": 10000.0,
                    "norm_eps": 1e-5, "num_attention_heads": 12, "num_hidden_layers": 22, "vocab_size": 50368},
                   149_655_232, -2 * 768),
    # facebook/bart-large, mbart-large-50, m2m100_418M; google/pegasus-large; Helsinki-NLP/opus-mt-en-de
    "bart": (_two(12, 1024, 50265), 406_291_456, 2 * 1026 * 1024),
    "mbart": (_two(12, 1024, 250054), 610_879_488, 2 * 1026 * 1024),
    "m2m_100": (_two(12, 1024, 128112), 483_905_536, 0),
    "pegasus": (_two(16, 1024, 96103), 568_699_904, 0),
    "marian": (_two(6, 512, 58101), 73_886_208, 0),
    # FacebookAI/roberta-large, xlm-roberta-base; almanach/camembert-base
    "roberta": ({**_BERT, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
                 "num_hidden_layers": 24, "vocab_size": 50265}, 355_412_057, 0),
    "xlm-roberta": ({**_BERT, "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12,
                     "num_hidden_layers": 12, "vocab_size": 250002}, 278_295_186, 0),
    "camembert": ({**_BERT, "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12,
                   "num_hidden_layers": 12, "vocab_size": 32005}, 110_655_493, 0),
    # By hand: a small one, tencent/Hunyuan-7B, MiniCPM3-4B, OrionStarAI/Orion-14B (without 81 biases of norms),
    # adept/persimmon-8b (without biases of the norms of queries and keys).
    "granitemoeshared": ({**DIMS, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 192},
                         2 * 128 * 64 + 64 + 4 * (64 * 192 + 4 * 64 + (4 + 2) * 3 * 64 * 96 + 2 * 64), 0),
    "hunyuan_v1_dense": ({"head_dim": 128, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
                          "num_hidden_layers": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
                          "vocab_size": 128167},
                         128167 * 4096 + 4096 + 32 * (4096 * 10240 + 3 * 4096 * 14336 + 2 * 4096 + 2 * 128), 0),
    "minicpm3": ({"hidden_size": 2560, "intermediate_size": 6400, "kv_lora_rank": 256, "num_attention_heads": 40,
                  "num_hidden_layers": 62, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
                  "vocab_size": 73448},
                 73448 * 2560 + 2560 + 62 * (
                     2560 * 768 + 768 + 768 * 40 * 96 + 2560 * 288 + 256 + 256 * 40 * 128 + 40 * 64 * 2560
                     + 3 * 2560 * 6400 + 2 * 2560), 0),
    "orion": ({"hidden_size": 5120, "intermediate_size": 15360, "num_attention_heads": 40, "num_hidden_layers": 40,
               "tie_word_embeddings": False, "vocab_size": 84608},
              2 * 84608 * 5120 + 40 * (4 * 5120**2 + 3 * 5120 * 15360) + 81 * 2 * 5120, 81 * 5120),
    "persimmon": ({"hidden_act": "relu2", "hidden_size": 4096, "intermediate_size": 16384, "num_attention_heads": 64,
                   "num_hidden_layers": 36, "qk_layernorm": True, "vocab_size": 262144},
                  2 * 262144 * 4096 + 8192 + 36 * (4 * (4096**2 + 4096) + 2 * 4096 * 16384 + 5 * 4096 + 4 * 4096 + 256),
                  36 * 2 * 64),
}  # fmt: skip


def saved(folder: Path, kind: str, **more: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({"model_type": kind, **DIMS, **more}))
    return file


@pytest.mark.parametrize("kind", PLANNED)
def test_parameters_are_those_of_the_classes_of_their_library(tmp_path: Path, kind: str) -> None:
    fields, count, absent = {**COUNTED, **PUBLISHED}[kind]
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": kind, **(DIMS if kind in COUNTED else {}), **fields}))
    assert count - read_config(file).parameters == absent
    assert absent == 0 or config_notes(file) or kind == "ernie4_5_moe"


STEPPED = (
    "cohere2", "glm4_moe", "falcon", "opt", "bert", "bloom", "gpt_bigcode", "internlm3", "modernbert", "bart",
)  # fmt: skip


def test_a_planned_model_is_lowered_and_estimated(tmp_path: Path) -> None:
    for kind in some(STEPPED, ("cohere2", "glm4_moe", "bloom", "modernbert", "bart")):
        more = COUNTED[kind][0] if kind in COUNTED else {"max_position_embeddings": 64}
        more |= _two(2, 64, 128) if kind == "bart" else {}
        config = read_config(saved(tmp_path, kind, **more))
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
    normed = ["queries and keys have a layer norm of each head; an RMS norm here, with one weight for all heads"]
    assert config_notes(saved(tmp_path, "cohere", use_qk_norm=True)) == normed
    assert config_notes(saved(tmp_path, "falcon", alibi=True))[0] == "norms have biases; none here"
    for kind in ("bloom", "mpt", "baichuan"):  # files of Baichuan 13B have no max_position_embeddings
        assert config_notes(saved(tmp_path, kind))[0].startswith("positions by linear biases of the scores (ALiBi)")
    assert config_notes(
        saved(tmp_path, "dbrx", attn_config={"clip_qkv": 8}, num_local_experts=4, num_experts_per_tok=2)
    ) == ["clip_qkv=8: a clamp of queries, keys and values; none here"]


def test_windows_of_a_family_are_those_of_its_layers(tmp_path: Path) -> None:
    assert read_config(saved(tmp_path, "cohere2", sliding_window=32)).windows == (32, 32, 32, None)
    local = {"attention_types": [[["global", "local"], 2]], "window_size": 8, "max_position_embeddings": 64}
    assert read_config(saved(tmp_path, "gpt_neo", **local)).windows == (None, 8)
    # Four tokens on each side of a query, and its own.
    encoder = read_config(saved(tmp_path, "modernbert", local_attention=8, num_key_value_heads=None))
    assert (encoder.windows, encoder.kind, encoder.gated) == ((None, 5, 5), "encoder", True)


def test_stacks_of_bart_and_its_kin(tmp_path: Path) -> None:
    for kind, position, after_embedding in (("bart", "post", True), ("mbart", "pre", True), ("marian", "post", False),
                                            ("m2m_100", "pre", False), ("pegasus", "pre", False)):  # fmt: skip
        fields = {**_two(3, 64, 128), "encoder_layers": 5, "num_hidden_layers": 5, "max_position_embeddings": 512}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **fields}))
        config = read_config(tmp_path)
        assert (config.encoder_layers, config.layers, config.max_length) == (5, 3, 512)
        assert (config.norm_position, config.embedding_norm, config.heads) == (position, after_embedding, 1)


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("opt", {"max_position_embeddings": 64, "word_embed_proj_dim": 32}, "embeddings in another width"),
        (
            "granitemoeshared",
            {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64},
            "width 64 beside experts of 96",
        ),
        ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, "only 'multihead_attention' is supported"),
        ("ernie4_5_moe", {**COUNTED["ernie4_5_moe"][0], "moe_layer_interval": 2}, "only 1 is supported"),
        (
            "qwen2_moe",
            {**COUNTED["qwen2_moe"][0], "shared_expert_intermediate_size": 48},
            "width 48 beside experts of 32",
        ),
        ("nemotron_h", {}, "state-space"),
        ("albert", {}, r"share their weights.*plan a function that computes it in JAX: meshlib plan FILE.py:FUNCTION"),
        ("whisper", {}, r"an audio tower.*plan its text model, a config.json of its own, or a function"),
        ("bart", {**_two(2, 64, 128), "encoder_ffn_dim": 128}, "encoder_ffn_dim is 128, decoder_ffn_dim 256"),
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
