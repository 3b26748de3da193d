"""Meta's and Mistral's params.json, and classifiers of images, against published sizes and the library's presets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import meshlib as mtf
from meshlib.core.errors import CheckpointError, GraphError
from meshlib.sharing import config_notes, image_config_notes, read_config, read_image_config

META = {"dim": 4096, "n_layers": 32, "n_heads": 32, "norm_eps": 1e-5}
LLAMA3 = {**META, "n_kv_heads": 8, "vocab_size": 128_256, "rope_theta": 500_000.0}
MISTRAL = {
    **META, "head_dim": 128, "hidden_dim": 14_336, "n_kv_heads": 8, "vocab_size": 32_000,
}  # fmt: skip
# As published with the weights; parameters of the model cards or of Hugging Face's checkpoints.
TEXTS = {
    "llama2-7b": ({**META, "multiple_of": 256, "vocab_size": 32_000}, 6_738_415_616),
    "llama3-8b": ({**LLAMA3, "multiple_of": 1024, "ffn_dim_multiplier": 1.3}, 8_030_261_248),
    "llama3-70b": (
        {**LLAMA3, "dim": 8192, "n_layers": 80, "n_heads": 64, "multiple_of": 4096, "ffn_dim_multiplier": 1.3},
        70_553_706_496,
    ),
    "mistral-7b": ({**MISTRAL, "sliding_window": 4096}, 7_241_732_096),
    "mixtral-8x7b": ({**MISTRAL, "moe": {"num_experts": 8, "num_experts_per_tok": 2}}, 46_702_792_704),
}
VIT = {"model_type": "vit", "num_labels": 1000}
RESNET = {"model_type": "resnet", "num_labels": 1000}
BASIC = {"layer_type": "basic", "hidden_sizes": [64, 128, 256, 512]}
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
IMAGES = {
    "vit-b-16": VIT,
    "vit-l-16": {**VIT, **LARGE},
    "resnet-18": {**RESNET, **BASIC, "depths": [2, 2, 2, 2]},
    "resnet-34": {**RESNET, **BASIC, "depths": [3, 4, 6, 3]},
    "resnet-50": RESNET,
    "resnet-50-v1": {**RESNET, "downsample_in_bottleneck": True},
    "resnet-152": {**RESNET, "depths": [3, 8, 36, 3], "embedding_size": 64},
}


def written(folder: Path, fields: object, name: str = "params.json") -> Path:
    (folder / name).write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("name", TEXTS)
def test_a_params_json_has_the_published_parameters(name: str, tmp_path: Path) -> None:
    fields, parameters = TEXTS[name]
    config = read_config(written(tmp_path, fields), name)
    assert config.parameters == parameters
    assert config.windows == (4096 if name == "mistral-7b" else None,)


def test_the_width_of_a_feed_forward_block_is_metas(tmp_path: Path) -> None:
    fields = {**LLAMA3, "dim": 2048, "n_layers": 16, "ffn_dim_multiplier": 1.5, "use_scaled_rope": True}
    config = read_config(written(tmp_path, fields))
    assert config.d_ff == 8192  # Llama 3.2 1B
    assert config.rope_scaling is not None


@pytest.mark.parametrize("name", IMAGES)
def test_classifiers_are_the_presets(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, IMAGES[name], "config.json")
    own = mtf.models.image_preset(name)
    assert read_image_config(path, name) == own.replace(name=name)
    assert image_config_notes(path) == []


def test_a_file_of_images_is_named_after_its_folder_and_counts_its_labels(tmp_path: Path) -> None:
    labels = {str(n): f"kind {n}" for n in range(37)}
    path = written(tmp_path, {"model_type": "vit", "id2label": labels, "image_size": [224, 448]}, "config.json")
    config = read_image_config(path)
    assert (config.name, config.classes, config.width) == (tmp_path.name, 37, 448)
    assert image_config_notes(written(tmp_path, {"model_type": "resnet", "hidden_act": "gelu"}, "config.json")) == [
        "hidden_act=gelu: relu here", "no labels: 2 classes, Hugging Face's default; --set classes=N gives others"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "kind", "said"),
    [
        ({**META, "vocab_size": -1}, GraphError, "the tokenizer gives it; write the number"),
        ({**LLAMA3, "vision_chunk_size": 448}, GraphError, "params.json with vision_chunk_size, which are not read"),
        ({**LLAMA3, "use_biases": True}, GraphError, "params.json with use_biases, which are not read"),
        ({**LLAMA3, "n_kv_heads": "8"}, CheckpointError, "n_kv_heads"),
        ({**LLAMA3, "moe": {"num_experts": 8}}, CheckpointError, "moe: "),
        ({"zero_optimization": {}}, CheckpointError, "nor a params.json with dim, n_layers, n_heads; it has zero_opt"),
        ({}, CheckpointError, "it has no fields"),
    ],
)
def test_params_that_are_not_read_say_why(fields: object, kind: type, said: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=said):
        config_notes(written(tmp_path, fields))


@pytest.mark.parametrize(
    ("fields", "kind", "said"),
    [
        ({**VIT, "patch_size": [16, 8]}, GraphError, "patches here are square"),
        ({**VIT, "patch_size": 15}, GraphError, "height: 224 % 15"),
        ({**VIT, "image_size": [224]}, CheckpointError, "'image_size' must be"),
        ({**RESNET, "hidden_sizes": [256, 512, 1024]}, GraphError, r"so \[256, 512, 1024, 2048\]"),
        ({**RESNET, "hidden_sizes": ["a"], "depths": [1]}, CheckpointError, "'hidden_sizes' must be"),
        ({**RESNET, "downsample_in_first_stage": True}, GraphError, "the first stage here keeps rows"),
        ({**RESNET, "layer_type": "wide"}, GraphError, "layer_type is 'wide'; blocks here are 'bottleneck' or 'basic'"),
        ({"model_type": "swin"}, GraphError, "classifiers read are vit, resnet"),
    ],
)
def test_classifiers_that_are_not_read_say_why(fields: object, kind: type, said: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=said):
        read_image_config(written(tmp_path, fields, "config.json"))
