"""MaxText configurations, from small files of our own: facts of base.yml and of its model files, not copies."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml")

import meshlib as mtf
from layouts import Mesh
from meshlib.core.errors import GraphError
from meshlib.models import MaxTextRun, read_maxtext
from meshlib.models.maxtext.keys import EFFECTS, IGNORED, KNOWN, READ, REFUSED, UNREAD
from meshlib.models.maxtext.rules import assigned
from meshlib.models.maxtext.settings import parsed
from meshlib.models.maxtext.versions import RENAMED

BASE = "run_name: ''\nbase_output_directory: ''\nsteps: 150_001\nlearning_rate: 3.e-5\nprofiler: ''\n"
LLAMA: Mapping[str, Any] = {
    "base_emb_dim": 8192, "base_num_query_heads": 64, "base_num_kv_heads": 8, "base_mlp_dim": 28_672,
    "base_num_decoder_layers": 80, "vocab_size": 32_000,
}  # fmt: skip
MIXTRAL: Mapping[str, Any] = {
    "base_emb_dim": 4096, "base_num_query_heads": 32, "base_num_kv_heads": 8, "base_mlp_dim": 14_336,
    "base_num_decoder_layers": 32, "vocab_size": 32_000, "decoder_block": "mixtral", "num_experts": 8,
    "num_experts_per_tok": 2, "base_moe_mlp_dim": 14_336,
}  # fmt: skip
DEEPSEEK: Mapping[str, Any] = {
    "base_emb_dim": 7168, "base_num_query_heads": 128, "base_num_kv_heads": 128, "base_mlp_dim": 18_432,
    "base_num_decoder_layers": 61, "vocab_size": 129_280, "decoder_block": "deepseek", "attention_type": "mla",
    "q_lora_rank": 1536, "num_experts": 256, "num_experts_per_tok": 8, "base_moe_mlp_dim": 2048, "shared_experts": 1,
    "first_num_dense_layers": 3, "routed_bias": True, "routed_score_func": "sigmoid", "routed_scaling_factor": 2.5,
}  # fmt: skip
# What MaxText's own modules hold (nnx.eval_shape of its Transformer, August 2026), by the fields that decide it.
COUNTED: dict[str, tuple[Mapping[str, Any], int]] = {
    "llama2-70b": (LLAMA, 68_976_648_192),
    "mixtral-8x7b": (MIXTRAL, 46_702_792_704),
    "deepseek3-671b": (DEEPSEEK, 671_026_419_200),
    "deepseek2-16b": (
        {**DEEPSEEK, "base_emb_dim": 2048, "base_num_query_heads": 16, "base_num_kv_heads": 16, "base_mlp_dim": 10_944,
         "base_moe_mlp_dim": 1408, "base_num_decoder_layers": 27, "first_num_dense_layers": 1, "vocab_size": 102_400,
         "num_experts": 64, "num_experts_per_tok": 6, "shared_experts": 2, "routed_score_func": "softmax",
         "routed_bias": False, "q_lora_rank": 0},
        15_706_484_224,
    ),
    "gpt3-6b": (
        {"decoder_block": "gpt3", "base_emb_dim": 3072, "base_num_query_heads": 12, "base_num_kv_heads": 12,
         "base_mlp_dim": 12_288, "base_num_decoder_layers": 48, "head_dim": 256, "trainable_position_size": 16_384,
         "mlp_activations": ["gelu"], "vocab_size": 32_768, "logits_via_embedding": True},
        5_588_736_000,
    ),
    "gemma2-2b": (
        {"decoder_block": "gemma2", "base_emb_dim": 2304, "base_num_query_heads": 8, "base_num_kv_heads": 4,
         "base_mlp_dim": 9216, "base_num_decoder_layers": 13, "head_dim": 256, "vocab_size": 256_128,
         "mlp_activations": ["gelu", "linear"], "logits_via_embedding": True, "sliding_window_size": 4096,
         "use_post_attn_norm": True, "use_post_ffw_norm": True},
        2_614_636_800,
    ),
    "gemma4-31b": (
        {"decoder_block": "gemma4", "base_emb_dim": 5376, "base_num_query_heads": 32, "base_num_kv_heads": 16,
         "base_mlp_dim": 21_504, "base_num_decoder_layers": 60, "head_dim": 256, "global_head_dim": 512,
         "global_num_kv_heads": 4, "vocab_size": 262_144, "mlp_activations": ["gelu", "linear"],
         "logits_via_embedding": True, "sliding_window_size": 1024, "use_post_attn_norm": True,
         "use_post_ffw_norm": True, "share_kv_projections": True, "local_rope_max_timescale": 10_000},
        30_697_345_340,
    ),
    "qwen2.5-7b": (
        {"decoder_block": "qwen2", "base_emb_dim": 3584, "base_num_query_heads": 28, "base_num_kv_heads": 4,
         "base_mlp_dim": 18_944, "base_num_decoder_layers": 28, "vocab_size": 152_064, "attention_bias": True},
        7_615_616_512,
    ),
    "qwen3-30b-a3b": (
        {"decoder_block": "qwen3_moe", "base_emb_dim": 2048, "base_num_query_heads": 32, "base_num_kv_heads": 4,
         "base_num_decoder_layers": 48, "vocab_size": 151_936, "use_qk_norm": True, "num_experts": 128,
         "num_experts_per_tok": 8, "base_moe_mlp_dim": 768, "norm_topk_prob": True},
        30_532_122_624,
    ),
    "llama4-17b-128e": (
        {"decoder_block": "llama4", "base_emb_dim": 5120, "base_num_query_heads": 40, "base_num_kv_heads": 8,
         "base_mlp_dim": 16_384, "base_moe_mlp_dim": 8192, "base_num_decoder_layers": 48, "vocab_size": 202_048,
         "num_experts": 128, "shared_experts": 1, "interleave_moe_layer_step": 2},
        400_711_848_960,
    ),
    "olmo3-7b": (
        {"decoder_block": "olmo3", "base_emb_dim": 4096, "base_num_query_heads": 32, "base_num_kv_heads": 32,
         "base_mlp_dim": 11_008, "base_num_decoder_layers": 32, "vocab_size": 100_278, "use_qk_norm": True,
         "sliding_window_size": 4096},
        7_298_011_136,
    ),
    "envy-test": (
        {"decoder_block": "envy", "base_emb_dim": 8, "base_num_query_heads": 4, "base_num_kv_heads": 2,
         "base_mlp_dim": 16, "base_moe_mlp_dim": 16, "base_num_decoder_layers": 4, "vocab_size": 32, "num_experts": 8,
         "use_qk_norm": True, "use_post_ffw_norm": True, "logits_via_embedding": True, "interleave_moe_layer_step": 2},
        57_576,
    ),
}  # fmt: skip


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    file = tmp_path / "base.yml"
    file.write_text(BASE)
    return file


def run_of(base: Path, *lines: str, **values: Any) -> MaxTextRun:
    return read_maxtext(base, {**parsed(lines), **values})


@pytest.mark.parametrize("name", COUNTED)
def test_parameters_are_those_of_maxtexts_modules(base: Path, name: str) -> None:
    fields, count = COUNTED[name]
    assert run_of(base, **fields).parameters == count


def test_scales_go_to_heads_and_inner_width_first(base: Path) -> None:
    config = run_of(base, global_parameter_scale=16).config  # 2^4: a third each, the rest to heads and inner width
    assert (config.d_model, config.heads, config.d_ff, config.layers) == (4096, 64, 28_672, 32)


def test_every_key_is_of_one_kind() -> None:
    assert len(KNOWN) == len(READ) + len(UNREAD) + len(REFUSED) + len(IGNORED)
    assert sum(len(effect.defaults) for effect in EFFECTS) == len(UNREAD)


# ---------------------------------------------------------------- other versions of MaxText

OF_MAXTEXT = "logical_axis_rules: []\n"  # what makes a file a base.yml of MaxText


def other(base: Path, text: str, *lines: str) -> MaxTextRun:
    base.write_text(f"{BASE}{OF_MAXTEXT}decoder_block: llama2\n{text}")
    return read_maxtext(base, parsed(lines))


def test_keys_of_another_version_are_reported_at_the_values_of_its_base_file(base: Path) -> None:
    run = other(base, "key_of_tomorrow: 3\nanother: none\n")
    assert [str(u) for u in run.unread] == [
        "another, key_of_tomorrow=as in base.yml: of another version of MaxText, taken to have no effect"
    ]
    (anew, left) = other(base, "key_of_tomorrow: 3\nanother: [1]\n", "key_of_tomorrow=4").unread
    assert (anew.key, anew.value, anew.default, left.key) == ("key_of_tomorrow", 4, 3, "another")
    with pytest.raises(mtf.GraphError, match="key_of_tomorow=4: MaxText has no key 'key_of_tomorow'"):
        other(base, "key_of_tomorrow: 3\n", "key_of_tomorow=4")


@pytest.mark.parametrize("old", [*RENAMED])
def test_renamed_keys_are_those_that_they_have_become(base: Path, old: str) -> None:
    assert {*RENAMED[old]} <= KNOWN
    assert old not in KNOWN
    flags = {"int8_training": "int8", "enable_flash_attention": "flash"}
    value = old in flags or {**READ, **UNREAD}.get(RENAMED[old][0], 1)
    became = flags.get(old, value)
    settings = other(base, "", f"{old}={value}").settings
    assert [settings.values[new] for new in RENAMED[old]] == [became] * len(RENAMED[old])
    assert other(base, f"{old}: {value}\n").settings.values[RENAMED[old][0]] == became


def test_a_base_file_before_decoder_blocks_has_parallel_layers(base: Path) -> None:
    base.write_text(BASE + OF_MAXTEXT)
    assert read_maxtext(base).config.parallel
    assert read_maxtext(base, {"decoder_block": "default"}).config.parallel
    assert not other(base, "").config.parallel


# ---------------------------------------------------------------- mesh, batch


def test_the_mesh_fills_one_axis_within_and_one_across_slices(base: Path) -> None:
    run = run_of(base, "ici_tensor_parallelism=4", **LLAMA)
    assert run.mesh("2*v5e-256") == Mesh("data:2;fsdp:64;tensor:4")
    assert run.placement("2*v5e-256") == {"data": 2}
    assert run.mesh("v5e-256") == Mesh("fsdp:64;tensor:4")
    assert run.batch("2*v5e-256") == 12 * 512
    both = run_of(base, "dcn_fsdp_parallelism=2", "dcn_data_parallelism=1", **LLAMA)
    assert both.mesh("2*v5e-16") == Mesh("fsdp:32")
    assert both.placement("2*v5e-16") == {"fsdp": 2}


def test_batches_may_be_fractions_of_a_device(base: Path) -> None:
    run = run_of(
        base, "per_device_batch_size=0.5", "ici_tensor_parallelism=4", "gradient_accumulation_steps=3", **LLAMA
    )
    assert run.batch("v5e-16") == 8 * 3
    with pytest.raises(GraphError, match=r"per_device_batch_size=0.5: 16 devices \* 0.5 = 8 sequences .* fsdp: 8 % 16"):
        run_of(base, "per_device_batch_size=0.5", **LLAMA).batch("v5e-16")


# ---------------------------------------------------------------- rules


def test_the_first_free_rule_wins() -> None:
    rules = [("mlp", ("a", "b")), ("embed", ("c", "a")), ("embed", ("c",)), ("norm", ())]
    assert assigned(rules, ["embed", "mlp"]) == (("c",), ("a", "b"))
    assert assigned(rules, ["embed", "norm"]) == (("c", "a"), ())
    assert assigned(rules, ["heads"]) == ((),)


def test_rules_agree_with_flax_on_random_tensors() -> None:
    linen = pytest.importorskip("flax.linen")
    draw = random.Random(0)
    axes, names = "abcd", ["embed", "mlp", "heads", "vocab"]
    for _ in range(200):
        rules = [(draw.choice(names), tuple(draw.sample(axes, draw.randint(0, 2)))) for _ in range(6)]
        tensor = draw.sample(names, draw.randint(1, 3))
        theirs = linen.logical_to_mesh_axes(tensor, rules)
        shown = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in theirs]
        shown += [()] * (len(tensor) - len(shown))
        assert [*assigned(rules, tensor)] == shown


LAYOUTS: dict[str, tuple[Mapping[str, Any], list[str], str]] = {
    "fully sharded": (LLAMA, [], "batch:fsdp;d_model:fsdp?"),
    "tensor": (
        LLAMA, ["ici_tensor_parallelism=4"],
        "batch:fsdp;variables/d_model:fsdp?;activations/d_model:tensor?;heads:tensor;d_ff:tensor;vocab:tensor",
    ),
    "sequence": (
        LLAMA, ["ici_tensor_sequence_parallelism=4"],
        "batch:fsdp;d_model:fsdp?;heads:tensor_sequence;d_ff:tensor_sequence;vocab:tensor_sequence;"
        "length:tensor_sequence?",
    ),
    "transposed": (
        LLAMA, ["ici_fsdp_transpose_parallelism=4"],
        "batch:fsdp+fsdp_transpose;d_model:fsdp+fsdp_transpose?;variables/d_ff:fsdp_transpose",
    ),
    "context": (LLAMA, ["ici_context_parallelism=4"], "batch:fsdp;d_model:fsdp+context?;length:context"),
    "experts": (
        MIXTRAL, ["ici_expert_parallelism=4"],
        "batch:fsdp+expert;d_model:fsdp+expert?;experts:expert;batch_unsplit:fsdp",
    ),
    "zero": (
        LLAMA, ["ici_data_parallelism=-1", "ici_fsdp_parallelism=1", "shard_optimizer_over_data=true"],
        "batch:data;slots/d_model:data?",
    ),
    "own rules": (
        LLAMA, ["ici_tensor_parallelism=4", "logical_axis_rules=[['activation_embed',[]],['vocab',[]]]"],
        "batch:fsdp;d_model:fsdp?;heads:tensor;d_ff:tensor;activations/vocab:tensor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_rules_become_layouts(base: Path, name: str) -> None:
    fields, lines, text = LAYOUTS[name]
    run = run_of(base, *lines, **fields)
    assert str(run.layout_on("v5p-128")) == text
    assert run.translation("v5p-128").differing == ()


def test_rules_of_a_model_replace_those_of_the_same_name(base: Path) -> None:
    (base.parent / "models" / "mine.yml").write_text("vocab_size: 64\nlogical_axis_rules: [['mlp', 'fsdp']]\n")
    run = run_of(base, "model_name=mine", "ici_tensor_parallelism=4")
    assert "d_ff:tensor" not in str(run.layout_on("v5e-16")).split(";")
    assert ("mlp", ("fsdp",)) in run.settings.rules
    assert sum(name == "mlp" for name, _ in run.settings.rules) == 1
    assert ("q_heads", ("tensor", "tensor_sequence", "autoregressive")) in run.settings.rules


def test_custom_meshes_replace_axes_and_rules(base: Path) -> None:
    folder = base.parent / "custom_mesh_and_rule"
    folder.mkdir()
    (folder / "pure.yml").write_text(
        "mesh_axes: ['fsdp']\n"
        "logical_axis_rules: [['activation_batch', 'fsdp'], ['embed', 'fsdp'], ['embed_vocab', 'fsdp']]\n"
    )
    run = run_of(base, "custom_mesh_and_rule=pure", **LLAMA)
    assert (str(run.mesh("v5e-16")), str(run.layout_on("v5e-16"))) == ("fsdp:16", "batch:fsdp;d_model:fsdp?")


# ---------------------------------------------------------------- recomputation, files


def test_scales_may_be_fixed(base: Path) -> None:
    fixed = [f"{x}_quantization_calibration_method=fixed,-224,224" for x in ("act", "weight")]
    assert run_of(base, "quantization=fp8_full", *fixed).config.numerics.bound == 224
    assert run_of(base, "quantization=fp8_full").config.numerics.bound is None
    torn = [f"{x}_quantization_calibration_method=fixed,-2.2.4,2.2.4" for x in ("act", "weight")]
    with pytest.raises(mtf.GraphError, match="must be absmax, or fixed with limits of one magnitude"):
        run_of(base, "quantization=fp8_full", *torn)


def test_policies_keep_values_by_name(base: Path) -> None:
    assert run_of(base).remat == "full"
    assert run_of(base, "remat_policy=qkv_proj_offloaded").remat == mtf.Remat(offload=["q", "k", "v"])
    custom = run_of(base, "remat_policy=custom", "decoder_layer_input=offload", "mlpwo=device", "context=offload")
    assert custom.remat == mtf.Remat(save=["wo"], offload=["context"], offload_carries=True)
    assert run_of(base, "remat_policy=none").remat == "none"
    kept = run_of(base, "remat_policy=minimal_with_context_and_quantization", "quantization=int8")
    assert kept.remat == run_of(base, "remat_policy=minimal_with_context").remat
    assert "quantised operands are kept" in str(kept.unread[-1])
    gpt = {**COUNTED["gpt3-6b"][0], "remat_policy": "minimal"}
    assert run_of(base, **gpt).remat == mtf.Remat(save=["q", "k", "v", "out", "wi", "wo"])


def test_files_are_based_on_others_and_overrides_come_last(base: Path) -> None:
    child = base.parent / "child.yml"
    child.write_text("base_config: base.yml\nper_device_batch_size: 3\nmax_target_length: 1024\n")
    run = run_of(child, "max_target_length=4096")
    assert (run.batch("v5e-16"), run.length, run.overrides) == (48, 4096, {"max_target_length": 4096})


def test_a_file_far_inside_finds_what_it_is_based_on_and_its_model(base: Path) -> None:
    (base.parent / "models" / "mine.yml").write_text("base_emb_dim: 64\n")
    (base.parent / "shared").mkdir()
    (base.parent / "shared" / "serving.yml").write_text("base_config: base.yml\nmax_target_length: 512\n")
    child = base.parent / "tpu" / "v5e" / "child.yml"
    child.parent.mkdir(parents=True)
    child.write_text("base_config: shared/serving.yml\nmodel_name: mine\n")
    run = run_of(child)
    assert (run.config.d_model, run.length) == (64, 512)


def test_models_give_way_to_overrides_where_they_may(base: Path) -> None:
    (base.parent / "models" / "mine.yml").write_text("base_emb_dim: 64\nnormalization_layer_epsilon: 1e-6\n")
    assert run_of(base, "model_name=mine").config.norm_epsilon == 1e-6
    run = run_of(base, "model_name=mine", "base_emb_dim=128", "override_model_config=true")
    assert run.config.d_model == 128


def test_keys_that_count_for_nothing_are_said(base: Path) -> None:
    run = run_of(base, "query_proj=device", "logical_axis_rules=[['emb',['fsdp']],['mlp',[]]]")
    assert [str(one) for one in run.unread] == [
        "query_proj=device: counts with remat_policy=custom alone, not with full",
        "logical_axis_rules=emb: no tensor here has a dim of that name; did you mean 'embed'?",
    ]
    assert not run_of(base, "query_proj=device", "remat_policy=custom").unread


def test_blocks_of_attention_are_figures_of_the_chip(base: Path) -> None:
    run = run_of(
        base, "sa_block_q=1024", "sa_block_q_dkv=4096", "local_sa_block_kv=256", "sa_use_fused_bwd_kernel=true"
    )
    chip = run.slice("2*v6e-256").chip
    assert chip.attention_tile == (1024, 512)
    assert chip.attention_window_tile == (1024, 256)
    assert chip.attention_backward_tile == (2048, 512)  # a sequence is 2,048 tokens
    assert chip.attention_backward_kernels == 1
    assert not run.unread
    assert run_of(base).slice("v6e-256").chip.attention_tile == (512, 512)  # whatever recipes of the chip set
    uneven = run_of(base, "sa_block_q_dq=1024", "sa_block_kv_compute=256").unread
    assert [one.key for one in uneven] == ["sa_block_kv_compute", "sa_block_q_dq"]


def test_larger_blocks_of_attention_compute_more_of_what_is_masked(base: Path) -> None:
    long = {**TINY, "max_target_length": 8192, "per_device_batch_size": 1, "base_num_decoder_layers": 1}
    program = run_of(base, **long).program("v5e-4")
    small, large = (
        mtf.estimate(program, run_of(base, **long, sa_block_q=n, sa_block_kv=n).slice("v5e-4")) for n in (256, 2048)
    )
    assert large.step_seconds > 1.02 * small.step_seconds


def test_what_is_not_expressed_is_said(base: Path) -> None:
    run = run_of(
        base, "use_iota_embed=true", "profiler=xplane", "fused_qkv=true", "wi_tile_fwd_batch_seq=64", "steps=3"
    )
    assert [one.key for one in run.unread] == ["fused_qkv", "use_iota_embed"]  # tiles of experts matter with them alone
    assert str(run.unread[1]).startswith("use_iota_embed=True: a product with the table")
    tiles = run_of(base, "wi_tile_fwd_batch_seq=64", **MIXTRAL)
    assert [one.key for one in tiles.unread] == ["wi_tile_fwd_batch_seq"]


# ---------------------------------------------------------------- programs

TINY: Mapping[str, Any] = {
    "base_emb_dim": 64, "base_num_query_heads": 4, "base_num_kv_heads": 4, "base_mlp_dim": 128, "head_dim": 16,
    "base_num_decoder_layers": 4, "vocab_size": 256, "max_target_length": 32, "per_device_batch_size": 2,
}  # fmt: skip


def test_accumulation_and_blocks_of_the_loss_need_less_memory(base: Path) -> None:
    wide = {**TINY, "vocab_size": 32_768, "max_target_length": 512, "per_device_batch_size": 4}
    plain, blocks, steps = (
        run_of(base, **{**wide, **more}).program("v5e-4").memory.peak_bytes
        for more in ({}, {"num_vocab_tiling": 8}, {"per_device_batch_size": 1, "gradient_accumulation_steps": 4})
    )
    assert blocks < 0.6 * plain
    assert steps < 0.6 * plain


def test_pipelines_have_stages_repeats_and_microbatches(base: Path) -> None:
    run = run_of(base, "ici_pipeline_parallelism=2", "num_pipeline_microbatches=4", **TINY)
    pipeline = run.pipeline("v5e-4")
    assert pipeline is not None
    assert (pipeline.stages, pipeline.repeats, pipeline.microbatches) == (2, 2, 4)
    assert any(c.kind == "collective_permute" for c in run.program("v5e-4").collectives)


def test_state_in_host_memory_takes_no_hbm(base: Path) -> None:
    run = run_of(base, "optimizer_memory_host_offload=true", **TINY)
    here, there = run_of(base, **TINY).program("v5e-4"), run.program("v5e-4")
    assert not run.unread
    assert there.memory.host_bytes == there.to_host_bytes > 0
    assert here.memory.by_kind["slots"] == there.memory.host_bytes
    assert there.memory.by_kind["slots"] == 0


def test_state_has_the_dtype_of_the_weights(base: Path) -> None:
    run = run_of(base, "weight_dtype=bfloat16", **TINY)
    assert {v.tensor.dtype.name for n, v in run.program("v5e-4").variables.items() if n != "step"} == {"bfloat16"}
    sgd = run_of(base, "opt_type=sgd", **TINY).program("v5e-4")
    assert not [name for name in sgd.variables if "adam" in name]
