"""Mistakes in MaxText configurations: each is answered by one line that names file, key, value and rule."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("yaml")

import meshlib as mtf
from meshlib.models import read_maxtext
from meshlib.models.maxtext.settings import parsed

OWN = "base.yml (an override)"
# The overrides, and what the line says; all on v5e-16, or 2*v5e-16 where "DCN" begins the name.

MISTAKES: dict[str, tuple[str, list[str]]] = {
    "unknown key": ("per_device_batchsize=2", [OWN, "per_device_batchsize=2", "did you mean 'per_device_batch_size'"]),
    "unknown axis key": ("ici_tensors_parallelism=2", ["ici_tensors_parallelism=2", "ici_tensor_parallelism"]),
    "unknown model": ("model_name=mine2", [OWN, "model_name=mine2", "no file mine2.yml", "did you mean 'mine'"]),
    "unknown policy": ("remat_policy=ful", [OWN, "remat_policy=ful", "did you mean 'full'"]),
    "unknown place": ("remat_policy=custom mlpwo=host", ["mlpwo=host", "remat, device, offload"]),
    "input again": ("remat_policy=custom decoder_layer_input=remat", ["decoder_layer_input=remat", "'offload'"]),
    "two places": ("remat_policy=custom query_proj=device qkv_proj=offload", ["qkv_proj=offload", "same place"]),
    "unknown block": ("decoder_block=lama2", [OWN, "decoder_block=lama2", "did you mean 'llama2'"]),
    "linear attention": ("decoder_block=qwen3_next", ["decoder_block=qwen3_next", "linear attention"]),
    "indexer": ("use_indexer=true", [OWN, "use_indexer=True", "indexer"]),
    "towers": ("use_multimodal=true", [OWN, "use_multimodal=True", "vision tower"]),
    "too many ICI": ("ici_fsdp_parallelism=32", ["ici_fsdp_parallelism=32", "is 32", "v5e-16 has 16 devices"]),
    "too few ICI": (
        "ici_fsdp_parallelism=4 ici_tensor_parallelism=2", ["ici_fsdp_parallelism=4", "is 8", "16 devices"],
    ),
    "no rest": ("ici_tensor_parallelism=3", ["ici_fsdp_parallelism=-1", "16 % 3 = 1", "v5e-16"]),
    "two rests": ("ici_data_parallelism=-1", ["ici_fsdp_parallelism=-1", "only one ici_* may be -1", "ici_data"]),
    "no devices": ("ici_tensor_parallelism=0", [OWN, "ici_tensor_parallelism=0", "at least 1, or -1"]),
    "half a device": ("ici_tensor_parallelism=1.5", ["ici_tensor_parallelism=1.5", "whole number"]),
    "DCN on one slice": ("dcn_fsdp_parallelism=2", ["dcn_fsdp_parallelism=2", "v5e-16 is one slice"]),
    "heads": ("base_num_kv_heads=2 ici_tensor_parallelism=4", ["ici_tensor_parallelism=4", "2 % 4 = 2"]),
    "key heads": ("base_num_kv_heads=3", [OWN, "base_num_kv_heads=3", "16 % 3 = 1"]),
    "width": ("base_emb_dim=100", [OWN, "base_emb_dim=100", "d_model", "100 % 16 = 4"]),
    "scale": ("global_parameter_scale=3", [OWN, "global_parameter_scale=3", "power of two"]),
    "fraction": ("per_device_batch_size=0.3", ["per_device_batch_size=0.3", "4 % 16 = 4"]),
    "no sequence": ("per_device_batch_size=0.01", ["per_device_batch_size=0.01", "less than one sequence"]),
    "negative batch": ("per_device_batch_size=-1", ["per_device_batch_size=-1", "must be positive"]),
    "batch as text": ("per_device_batch_size=two", [OWN, "per_device_batch_size=two", "must be a number"]),
    "flag as text": ("scan_layers=yess", [OWN, "scan_layers=yess", "true or false"]),
    "dtype": ("dtype=bf16", [OWN, "dtype=bf16", "bfloat16"]),
    "scales of operands": (
        "weight_quantization_calibration_method=fixed,-1,2",
        [OWN, "weight_quantization_calibration_method=fixed,-1,2", "must be that of activations, absmax"],
    ),
    "quantization": ("quantization=int5", [OWN, "quantization=int5", "did you mean 'int8'"]),
    "optimizer": ("opt_type=adam", [OWN, "opt_type=adam", "adamw"]),
    "muon": ("opt_type=muon", [OWN, "opt_type=muon", "no Muon"]),
    "rule's axis": (
        "logical_axis_rules=[['embed',['fspd']]]", ["logical_axis_rules=['embed', ['fspd']]", "'fspd'", "'fsdp'"],
    ),
    "rule's form": ("logical_axis_rules=[['embed']]", [OWN, "logical_axis_rules=[['embed']]", "[name, axes] pairs"]),
    "missing axis": (
        "mesh_axes=['data','fsdp'] logical_axis_rules=[['mlp',['tenso']]]", ["no axis 'tenso'", "'tensor'"],
    ),
    "axes twice": ("mesh_axes=['fsdp','fsdp']", ["mesh_axes=['fsdp', 'fsdp']", "twice"]),
    "no axis for a size": (
        "mesh_axes=['fsdp'] ici_tensor_parallelism=2", ["ici_tensor_parallelism=2", "no axis 'tensor'"],
    ),
    "custom mesh": ("custom_mesh_and_rule=pure", [OWN, "custom_mesh_and_rule=pure", "no file pure.yml"]),
    "stages": (
        "ici_pipeline_parallelism=4 num_layers_per_pipeline_stage=3", ["num_layers_per_pipeline_stage=3", "= 4"],
    ),
    "microbatches": (
        "ici_pipeline_parallelism=4 num_pipeline_microbatches=6", ["num_pipeline_microbatches=6", "4 stages"],
    ),
    "model's own key": (
        "model_name=mine base_emb_dim=32", ["base_emb_dim=32", "mine.yml has 64", "override_model_config"],
    ),
    "experts": ("decoder_block=mixtral", ["num_experts=1", "must be at least 2"]),
    "choices": (
        "decoder_block=mixtral num_experts=4 num_experts_per_tok=5", ["num_experts_per_tok=5", "num_experts=4"],
    ),
    "window": ("decoder_block=gemma2", ["sliding_window_size=0", "must be at least 1"]),
    "activation": ("mlp_activations=['tanh','linear']", [OWN, "mlp_activations=['tanh', 'linear']", "gelu"]),
    "given twice": ("steps=1 steps=2", ["steps", "twice", "1 and 2"]),
    "no equals sign": ("steps", ["KEY=VALUE", "'steps'"]),
    "hardware": ("hardware=gpu", [OWN, "hardware=gpu", "other than TPUs"]),
    "loss blocks": ("num_vocab_tiling=7", [OWN, "num_vocab_tiling=7", "2048 % 7 = 4"]),
    "vocabulary": ("vocab_size=30 ici_tensor_parallelism=4", [OWN, "vocab_size=30", "30 % 4 = 2"]),
    "length": ("max_target_length=30 ici_context_parallelism=4", [OWN, "max_target_length=30", "30 % 4 = 2"]),
    "distillation": ("teacher_overrides={'model_name':'mine'}", ["teacher_overrides=", "a teacher beside the student"]),
    "reinforcement": ("trainer_devices_fraction=0.5", ["trainer_devices_fraction=0.5", "samples beside training"]),
    "GRPO": ("use_grpo=true", ["use_grpo=True", "plan its training from base.yml", "meshlib serve"]),
    "sampling": ("return_log_prob=true", [OWN, "return_log_prob=True", "of inference", "meshlib serve"]),
    "vLLM": ("model_call_mode=inference", [OWN, "model_call_mode=inference", "meshlib serve"]),
    "decoding axes": ("ici_autoregressive_parallelism=4", [OWN, "ici_autoregressive_parallelism=4", "meshlib serve"]),
    "rules of caches": (
        "logical_axis_rules=[['cache_batch',['data']]]", [OWN, "logical_axis_rules=['cache_batch', ['data']]", "serve"],
    ),
    "odd head": ("head_dim=127", [OWN, "head_dim=127", "must be even"]),
    "dropout": ("dropout_rate=2", [OWN, "dropout_rate=2", "[0, 1)"]),
    "cap": ("final_logits_soft_cap=-3", [OWN, "final_logits_soft_cap=-3", "not be negative"]),
    "kind of attention": ("attention_type=mlaa", [OWN, "attention_type=mlaa", "did you mean 'mla'"]),
    "no value": ("per_device_batch_size=", [OWN, "per_device_batch_size=:", "has no value", "12.0"]),
    "loss without blocks": ("num_vocab_tiling=0", [OWN, "num_vocab_tiling=0", "at least 1"]),
    "repeats": ("num_pipeline_repeats=5 ici_pipeline_parallelism=4", ["num_pipeline_repeats=5", "are not 16"]),
    "towers of Qwen": ("use_audio=true", ["use_audio=True", "use_audio=false override_model_config=true plans"]),
    "no YAML": ("mesh_axes=[fsdp", ["mesh_axes=[fsdp", "not valid YAML"]),
}  # fmt: skip


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.yml").write_text("base_emb_dim: 64\n")
    file = tmp_path / "base.yml"
    file.write_text("run_name: ''\n")
    return file


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_that_names_key_value_and_file(base: Path, name: str) -> None:
    lines, wanted = MISTAKES[name]
    with pytest.raises(mtf.MeshlibError) as caught:
        read_maxtext(base, parsed(lines.split())).program("v5e-16")
    text = str(caught.value)
    assert "\n" not in text
    for part in wanted:
        assert part in text, text
    assert "Traceback" not in text


def test_thirty_mistakes_at_least() -> None:
    assert len(MISTAKES) >= 30


FILES: dict[str, tuple[str, list[str]]] = {
    "typing error": ("base_emb_dimm: 64\n", ["base.yml: base_emb_dimm=64", "did you mean 'base_emb_dim'"]),
    "no mapping": ("- 1\n- 2\n", ["base.yml", "keys and values"]),
    "no YAML": ("base_emb_dim: [1\n", ["base.yml:2", "is not valid YAML"]),
    "a key twice": ("steps: 1\nsteps: 2\n", ["base.yml:1", "'steps' occurs twice"]),
    "based on nothing": ("base_config: other.yml\n", ["base_config=other.yml", "no such file"]),
    "based on itself": ("base_config: base.yml\n", ["base_config=base.yml", "based on each other"]),
    "an alias within itself": (
        "mesh_axes: &a [fsdp, *a]\n",
        ["read_maxtext: base.yml: has more than", "within itself"],
    ),
    "not text": ("\x00\x01", ["base.yml", "is not valid YAML"]),
}


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_refused_in_one_line(base: Path, name: str) -> None:
    content, wanted = FILES[name]
    base.write_text(content)
    with pytest.raises(mtf.MeshlibError) as caught:
        read_maxtext(base)
    assert all(part in str(caught.value) for part in wanted), str(caught.value)
    assert "\n" not in str(caught.value)


INFERENCE: dict[str, str] = {
    "rules": "base_config: base.yml\nlogical_axis_rules: [['decode_batch', ['data']]]\n",
    "base": "base_config: inference/serving.yml\n",
    "key": "base_config: base.yml\nstack_prefill_result_cache: true\n",
}


@pytest.mark.parametrize("name", INFERENCE)
def test_files_of_inference_are_sent_to_serve(base: Path, name: str) -> None:
    (base.parent / "inference").mkdir()
    (base.parent / "inference" / "serving.yml").write_text("base_config: base.yml\n")
    base.write_text(
        "logical_axis_rules: [['decode_batch', ['data']], ['cache_batch', []]]\nuse_chunked_prefill: false\n"
    )
    child = base.parent / "mine.yml"
    child.write_text(INFERENCE[name])
    with pytest.raises(mtf.MeshlibError, match=r"^read_maxtext: mine\.yml: .* price it with meshlib serve .*mine\.yml"):
        read_maxtext(child)
    assert read_maxtext(child, serving=True).config.parameters == read_maxtext(base).config.parameters


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(mtf.MeshlibError, match=r"nothing\.yml can't be read: No such file"):
        read_maxtext(tmp_path / "nothing.yml")
