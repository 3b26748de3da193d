"""Files of Hugging Face's that people train: parameters as published, parts that are there, refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import meshlib as mtf
from meshlib.core.errors import CheckpointError, GraphError
from meshlib.sharing import config_notes, read_config

Fields = dict[str, Any]


def dims(hidden: int, layers: int, heads: int, kv: int, inner: int, vocab: int, **more: Any) -> Fields:
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
        "intermediate_size": inner, "vocab_size": vocab, **more,
    }  # fmt: skip


DEEPSEEK = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": 1536,
    "moe_intermediate_size": 2048, "n_shared_experts": 1, "num_experts_per_tok": 8, "scoring_func": "sigmoid",
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "topk_method": "noaux_tc",
}  # fmt: skip
# model_type, fields as released, and values of the released checkpoint, without what is said.
# Source: config.json and the sizes in model.safetensors.index.json of the repositories named.
MODELS: dict[str, tuple[str, Fields, int]] = {
    # mistralai/Mistral-7B-v0.1, Mixtral-8x7B-v0.1
    "mistral-7b": ("mistral", dims(4096, 32, 32, 8, 14_336, 32_000, sliding_window=4096), 7_241_732_096),
    "mixtral-8x7b": (
        "mixtral", dims(4096, 32, 32, 8, 14_336, 32_000, num_local_experts=8, num_experts_per_tok=2), 46_702_792_704,
    ),
    # google/gemma-2b, gemma-2-2b, gemma-3-1b-it
    "gemma-2b": ("gemma", dims(2048, 18, 8, 1, 16_384, 256_000, head_dim=256), 2_506_172_416),
    "gemma-2-2b": (
        "gemma2",
        dims(2304, 26, 8, 4, 9216, 256_000, head_dim=256, sliding_window=4096, query_pre_attn_scalar=256,
             attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
        2_614_341_888,
    ),
    "gemma-3-1b": (
        "gemma3_text",
        dims(1152, 26, 4, 1, 6912, 262_144, head_dim=256, sliding_window=512, sliding_window_pattern=6,
             query_pre_attn_scalar=256),
        999_885_952,
    ),
    # Qwen/Qwen2.5-7B, Qwen3-0.6B, Qwen3-30B-A3B
    "qwen2.5-7b": (
        "qwen2", dims(3584, 28, 28, 4, 18_944, 152_064, sliding_window=131_072, use_sliding_window=False),
        7_615_616_512,
    ),
    "qwen3-0.6b": (
        "qwen3", dims(1024, 28, 16, 8, 3072, 151_936, head_dim=128, tie_word_embeddings=True), 596_049_920,
    ),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        dims(2048, 48, 32, 4, 6144, 151_936, head_dim=128, num_experts=128, num_experts_per_tok=8,
             moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1),
        30_532_122_624,
    ),
    # microsoft/Phi-3-mini-4k-instruct, phi-4, Phi-4-mini-instruct
    "phi-3-mini": ("phi3", dims(3072, 32, 32, 32, 8192, 32_064, sliding_window=2047), 3_821_079_552),
    "phi-4": ("phi3", dims(5120, 40, 40, 10, 17_920, 100_352, sliding_window=None), 14_659_507_200),
    "phi-4-mini": (
        "phi3",
        dims(3072, 32, 24, 8, 8192, 200_064, tie_word_embeddings=True, partial_rotary_factor=0.75,
             sliding_window=262_144, max_position_embeddings=131_072, original_max_position_embeddings=4096,
             rope_scaling={"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}),
        3_836_021_760,
    ),
    # allenai/Olmo-3-1025-7B, OLMoE-1B-7B-0924
    "olmo-3-7b": (
        "olmo3",
        dims(4096, 32, 32, 32, 11_008, 100_278, sliding_window=4096,
             layer_types=[*["sliding_attention"] * 3, "full_attention"] * 8),
        7_298_011_136,
    ),
    "olmoe-1b-7b": (
        "olmoe", dims(2048, 16, 16, 16, 1024, 50_304, num_experts=64, num_experts_per_tok=8), 6_919_161_856,
    ),
    # openai/gpt-oss-20b, without 24 * 64 sinks
    "gpt-oss-20b": (
        "gpt_oss",
        dims(2880, 24, 64, 8, 2880, 201_088, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
             attention_bias=True, sliding_window=128),
        20_914_757_184 - 24 * 64,
    ),
    # meta-llama/Llama-4-Scout-17B-16E, text model
    "llama-4-scout": (
        "llama4_text",
        dims(5120, 48, 40, 8, 8192, 202_048, head_dim=128, intermediate_size_mlp=16_384, num_local_experts=16,
             num_experts_per_tok=1, interleave_moe_layer_step=1),
        107_769_861_120,
    ),
    # deepseek-ai/DeepSeek-V3 without its 58 * 256 biases that choose experts; moonshotai/Kimi-K2-Base, 60 * 384
    "deepseek-v3": (
        "deepseek_v3",
        dims(7168, 61, 128, 128, 18_432, 129_280, n_routed_experts=256, first_k_dense_replace=3, n_group=8,
             topk_group=4, **DEEPSEEK),
        671_026_404_352,
    ),
    "kimi-k2": (
        "kimi_k2",
        dims(7168, 61, 64, 64, 18_432, 163_840, n_routed_experts=384, first_k_dense_replace=1, n_group=1,
             topk_group=1, **DEEPSEEK),
        1_026_408_232_448 - 60 * 384,
    ),
}  # fmt: skip


def saved(folder: Path, kind: str, fields: Fields) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({"model_type": kind, **fields}))
    return file


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_release(tmp_path: Path, name: str) -> None:
    kind, fields, count = MODELS[name]
    assert read_config(saved(tmp_path, kind, fields)).parameters == count


def test_windows_repeat_as_the_layers_do(tmp_path: Path) -> None:
    assert read_config(saved(tmp_path, *MODELS["olmo-3-7b"][:2])).windows == (4096, 4096, 4096, None)
    assert read_config(saved(tmp_path, *MODELS["gemma-3-1b"][:2])).windows == (*(512,) * 5, None)
    assert read_config(saved(tmp_path, *MODELS["qwen2.5-7b"][:2])).windows == (None,)
    assert read_config(saved(tmp_path, *MODELS["phi-3-mini"][:2])).windows == (2047,)
    assert read_config(saved(tmp_path, *MODELS["phi-4-mini"][:2])).windows == (None,)


def test_notes_say_what_is_not_expressed(tmp_path: Path) -> None:
    (note,) = config_notes(saved(tmp_path, *MODELS["gemma-2-2b"][:2]))
    assert note == "attn_logit_softcapping=50.0: a tanh of every attention score"
    assert "sinks" in config_notes(saved(tmp_path, *MODELS["gpt-oss-20b"][:2]))[0]
    scaled, partial = config_notes(saved(tmp_path, *MODELS["phi-4-mini"][:2]))
    assert "rope_scaling of type 'longrope': angles are not scaled" in scaled
    assert "partial_rotary_factor=0.75" in partial
    assert config_notes(saved(tmp_path, *MODELS["phi-4"][:2])) == []
    kind, fields, _ = MODELS["deepseek-v3"]
    assert len(config_notes(saved(tmp_path, kind, {**fields, "num_nextn_predict_layers": 1}))) == 1


def test_text_models_of_files_with_towers(tmp_path: Path) -> None:
    kind, fields, count = MODELS["llama-4-scout"]
    file = saved(tmp_path, "llama4", {"text_config": {"model_type": kind, **fields}, "vision_config": {}})
    config = read_config(file)
    assert (config.parameters, config.name) == (count, f"{tmp_path.name}-text")
    assert "vision_config: left out; the text model alone" in config_notes(file)


@pytest.mark.parametrize("kind", ["llava", "mistral3", "of_tomorrow"])
def test_the_text_model_of_any_multimodal_config_is_read(tmp_path: Path, kind: str) -> None:
    text_kind, fields, count = MODELS["qwen3-0.6b"]
    text = {"model_type": text_kind, **fields}
    file = saved(tmp_path, kind, {"text_config": text, "vision_config": {}, "audio_config": {}})
    config = read_config(file)
    assert (config.parameters, config.name) == (count, f"{tmp_path.name}-text")
    assert [note.partition(":")[0] for note in config_notes(file)] == ["vision_config", "audio_config"]
    unknown = saved(tmp_path, kind, {"text_config": {**text, "model_type": "unknown"}, "vision_config": {}})
    with pytest.raises(GraphError, match=f"model_type '{kind}'"):
        read_config(unknown)


REFUSED: dict[str, tuple[Fields, type[Exception], str]] = {
    "linear": ({"model_type": "qwen3_next"}, GraphError, "'qwen3_next': linear attention"),
    "vision": ({"model_type": "qwen3_vl"}, GraphError, "a vision tower, which no config here expresses; plan its text"),
    "near": ({"model_type": "mixtrall"}, GraphError, "names them); did you mean 'mixtral'?"),
    "far": ({"model_type": "wholly-unlike"}, GraphError, "if it computes as one of them, give its type in a copy"),
    "a ViT": ({"model_type": "vit"}, GraphError, "a classifier of images: mtf.sharing.read_image_config reads it"),
    "images": ({"model_type": "swin"}, GraphError, "presets whose sizes --set changes: meshlib plan vit-b-16"),
    "layers": (
        {**MODELS["qwen3-0.6b"][1], "model_type": "olmo3", "layer_types": ["linear_attention"], "sliding_window": 8},
        GraphError, "layer_types has linear attention",
    ),
    "gemma4": (
        {**MODELS["gemma-3-1b"][1], "model_type": "gemma4_text", "enable_moe_block": True},
        GraphError, "enable_moe_block",
    ),
    "no experts": ({**MODELS["qwen3-0.6b"][1], "model_type": "qwen3_moe"}, CheckpointError, "num_experts"),
    "heads": (
        {**MODELS["qwen3-0.6b"][1], "model_type": "qwen3", "head_dim": None, "num_attention_heads": 3,
         "num_key_value_heads": 3},
        CheckpointError, "is not divisible by num_attention_heads 3; give head_dim",
    ),
    "odd heads": (
        {**MODELS["qwen3-0.6b"][1], "model_type": "qwen3", "head_dim": 33}, mtf.GraphError, "head_dim must be even",
    ),
    "no text": ({"model_type": "llama4"}, CheckpointError, "text_config"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_one_line_that_names_the_reason(tmp_path: Path, name: str) -> None:
    fields, kind, text = REFUSED[name]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(fields))
    with pytest.raises(mtf.MeshlibError) as caught:
        read_config(file)
    assert type(caught.value) is kind
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "config.json" in str(caught.value) or "layer" in str(caught.value)
