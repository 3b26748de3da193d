"""Parameters and FLOPs of the presets against published numbers, which stand here with their sources."""

from __future__ import annotations

import pytest

import meshlib as mtf
from meshlib.models import PRESETS, Experts, LatentAttention, preset

LATENT = LatentAttention(kv_rank=8, rope_dim=4, nope_dim=8, value_dim=8)

# Numbers of values in released checkpoints: what `model.num_parameters()` of Hugging Face transformers returns for
# GPT2LMHeadModel, BertForMaskedLM, T5ForConditionalGeneration and LlamaForCausalLM.
RELEASED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3.1-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.1-405b": 405_853_388_800,
}

# Values in released checkpoints with experts: `model.num_parameters()` of Hugging Face transformers, of
# SwitchTransformersForConditionalGeneration, MixtralForCausalLM, DeepseekV2ForCausalLM and Qwen3MoeForCausalLM.
RELEASED |= {
    "switch-base-8": 619_339_008,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}

# Released values, and those of them that the presets do not have: biases that choose experts, which are not trained;
# biases of gpt-oss's routers, and one logit for each of its heads.
RELEASED_BUT = {
    "deepseek-v3": (671_026_419_200, 58 * 256),
    "gpt-oss-20b": (20_914_757_184, 24 * (64 + 32)),
    "gpt-oss-120b": (116_829_156_672, 36 * (64 + 128)),
}

# Parameters that a token meets, in billions as printed, and whether the table that is only looked up in counts.
ACTIVE = {
    "mixtral-8x7b": (12.9, True),  # Jiang et al. 2024: "13B active"; mistral.ai, December 2023: 12.9B
    "mixtral-8x22b": (39, True),  # mistral.ai, April 2024: "39B active parameters out of 141B"
    "deepseek-v2-lite": (2.4, False),  # arXiv:2405.04434, appendix B
    "deepseek-v2": (21, True),  # arXiv:2405.04434, abstract
    "deepseek-v3": (37, False),  # arXiv:2412.19437, abstract
    "qwen3-30b-a3b": (3.3, True),  # model card: "3.3B activated"
    "qwen3-235b-a22b": (22, True),  # model card: "22B activated"
    "gpt-oss-20b": (3.6, False),  # model card, table 1: 3.61B, without the embedding
    "gpt-oss-120b": (5.1, False),  # model card, table 1: 5.13B
    "llama4-scout": (17, True),  # "17B active parameters"
    "llama4-maverick": (17, True),
}

# Without the table of the vocabulary, in millions: Gemma 3 Technical Report, 2025, table 1.
WITHOUT_TABLE = {"gemma3-4b": 3209, "gemma3-12b": 10_759, "gemma3-27b": 25_600}

# Weights of matrices and tables, norms, biases and positions apart (`params_total` of the rows of published results,
# from the dimensions in AI-Hypercomputer/maxtext).
MATRICES = {
    "maxtext-16b": 16_273_899_520,
    "maxtext-22b": 21_944_598_528,
    "maxtext-32b": 32_547_799_040,
    "maxtext-64b": 64_760_053_760,
    "maxtext-128b": 129_184_563_200,
    "maxtext-512b": 516_067_164_160,
    "maxtext-1024b": 1_031_463_239_680,
    "gpt3-175b": 174_564_311_040,
    "gemma3-12b": 11_765_022_720,
    "llama2-70b": 68_975_329_280,
    "llama3.1-8b": 8_029_995_008,
    "llama3.1-70b": 70_552_387_584,
    "llama3.1-405b": 405_849_243_648,
}

# The same without tables that are only looked up in (`params_matmul`).
MULTIPLIED = {
    "llama2-70b": 68_713_185_280,
    "llama3.1-8b": 7_504_658_432,
    "llama3.1-70b": 69_501_714_432,
    "llama3.1-405b": 403_747_897_344,
}

# Printed in papers, in units of the last digit printed. transformer-base comes 3 % below its paper's 65 M, whose
# vocabulary is "about 37000"; transformer-big agrees.
PRINTED = {
    "transformer-big": (213, 1e6, 1.2),  # Vaswani et al. 2017, table 3
    "transformer-base": (65, 1e6, 2.0),
    "mtf-lm-0.14b": (0.14, 1e9, 0.005),  # tensor2tensor: models/mtf_transformer.py, mtf_transformer_paper_lm
    "mtf-lm-0.22b": (0.22, 1e9, 0.005),
    "mtf-lm-0.37b": (0.37, 1e9, 0.005),
    "mtf-lm-0.67b": (0.67, 1e9, 0.005),
    "mtf-lm-1.28b": (1.28, 1e9, 0.005),
    "mtf-lm-2.48b": (2.48, 1e9, 0.005),
    "mtf-lm-4.9b": (4.90, 1e9, 0.005),
    "gpt3-175b": (174_600, 1e6, 50),  # Brown et al. 2020, table D.1
    "palm-8b": (8.63, 1e9, 0.005),  # Chowdhery et al. 2022, table 1
    "palm-62b": (62.50, 1e9, 0.005),
    "palm-540b": (540.35, 1e9, 0.01),
    "maxtext-52b": (52, 1e9, 0.5),  # maxtext: MaxText/configs/v4/52b.sh, "52B parameter model"
    "gemma4-31b": (30.7, 1e9, 0.05),  # model card of Gemma 4, text model
    # Fedus et al. 2021, table 9, and the model cards of google/switch-*
    "switch-base-16": (1.07, 1e9, 0.01),
    "switch-base-32": (1.98, 1e9, 0.01),
    "switch-base-64": (3.8, 1e9, 0.05),
    "switch-base-128": (7.4, 1e9, 0.05),
    "switch-base-256": (14.7, 1e9, 0.05),
    "switch-large-128": (26.3, 1e9, 0.05),
    "switch-xxl-128": (395, 1e9, 0.5),
    "switch-c-2048": (1571, 1e9, 0.5),
    # Lepikhin et al. 2020, table 1, in round numbers
    "gshard-12b": (12.5, 1e9, 0.8),
    "gshard-37b": (37, 1e9, 2.5),
    "gshard-50b": (50, 1e9, 2.5),
    "gshard-150b": (150, 1e9, 6),
    "gshard-200b": (200, 1e9, 7),
    "gshard-600b": (600, 1e9, 20),
    "llama4-scout": (107.8, 1e9, 0.05),  # 109 with the vision encoder
    "llama4-maverick": (400.7, 1e9, 0.05),  # 402 with the vision encoder
}


def matrices(config: mtf.models.TransformerConfig) -> int:
    counts = config.parameter_counts
    return sum(counts[part] for part in ("embedding", "head", "attention", "feed_forward"))


def test_every_preset_is_held_against_a_published_count():
    assert set(PRESETS) == set(RELEASED) | set(RELEASED_BUT) | set(MATRICES) | set(PRINTED) | set(WITHOUT_TABLE)


@pytest.mark.parametrize(("name", "count"), RELEASED.items())
def test_released_checkpoints_to_the_digit(name, count):
    assert preset(name).parameters == count


@pytest.mark.parametrize(("name", "counts"), RELEASED_BUT.items())
def test_released_checkpoints_but_for_what_is_named(name, counts):
    count, beside = counts
    assert preset(name).parameters == count - beside


@pytest.mark.parametrize(("name", "printed"), ACTIVE.items())
def test_active_parameters(name, printed):
    billions, with_table = printed
    config = preset(name)
    active = config.active_parameters - (0 if with_table else config.parameter_counts["embedding"])
    assert active / 1e9 == pytest.approx(billions, abs=0.06 if isinstance(billions, float) else 0.6)


def test_experts_count_as_active_where_tokens_go():
    """Mixtral's by hand: attention, two of eight experts, the router, head and norms."""
    config = preset("mixtral-8x7b")
    attention, expert, router = 4096 * 128 * (2 * 32 + 2 * 8), 3 * 4096 * 14_336, 4096 * 8
    assert config.matmul_parameters == 32 * (attention + 2 * expert + router) + 32_000 * 4096
    assert config.active_parameters - config.matmul_parameters == 32_000 * 4096 + (2 * 32 + 1) * 4096
    assert config.flops_per_token(4096) == 6 * config.matmul_parameters + 6 * 32 * 4096 * 32 * 128
    dense = preset("llama2-7b")
    assert dense.active_parameters == dense.parameters


def test_latent_attention_counts_keys_and_values_of_their_own_width():
    config = preset("deepseek-v3")
    pairs = config.flops_per_token(4096) - 6 * config.matmul_parameters
    assert pairs == 3 * 61 * 4096 / 2 * 128 * (2 * 192 + 2 * 128)


@pytest.mark.parametrize(("name", "count"), MATRICES.items())
def test_matrices_to_the_digit(name, count):
    assert matrices(preset(name)) == count


@pytest.mark.parametrize(("name", "count"), MULTIPLIED.items())
def test_weights_that_tokens_meet_to_the_digit(name, count):
    assert preset(name).matmul_parameters == count


@pytest.mark.parametrize(("name", "millions"), WITHOUT_TABLE.items())
def test_printed_counts_without_the_table(name, millions):
    counts = preset(name).parameter_counts
    assert (sum(counts.values()) - counts["embedding"]) / 1e6 == pytest.approx(millions, abs=0.5)


@pytest.mark.parametrize(("name", "printed"), PRINTED.items())
def test_printed_counts(name, printed):
    value, unit, tolerance = printed
    assert preset(name).parameters / unit == pytest.approx(value, abs=tolerance)


def test_gemma4_row_counts_global_layers_as_local_ones():
    # The row of published results (params_total) takes the local head dims for all 60 layers.
    alike = preset("gemma4-31b").replace(global_head_dim=None, global_kv_heads=None, share_kv=False)
    assert matrices(alike) == 30_145_511_424


# model_flops_per_token_causal of the rows of published results: 6 N + 6 L T N H.
@pytest.mark.parametrize(
    ("name", "length", "flops"),
    [
        ("maxtext-22b", 2048, 135_291_469_824),
        ("maxtext-16b", 2048, 100_864_622_592),
        ("maxtext-32b", 2048, 198_508_019_712),
        ("maxtext-64b", 2048, 395_002_773_504),
        ("maxtext-128b", 2048, 787_992_281_088),
        ("maxtext-512b", 2048, 3_122_172_788_736),
        ("maxtext-1024b", 2048, 6_240_319_045_632),
        ("gpt3-175b", 2048, 1_061_881_380_864),
        ("llama2-70b", 4096, 428_385_239_040),
        ("llama3.1-70b", 8192, 449_222_541_312),
        ("llama3.1-8b", 8192, 51_470_401_536),
        ("llama3.1-405b", 8192, 2_523_955_986_432),
    ],
)
def test_training_flops_to_the_digit(name, length, flops):
    assert preset(name).flops_per_token(length) == flops


def test_arguments_of_the_wrong_type_are_refused():
    config = preset("gpt2")
    with pytest.raises(mtf.GraphError, match=r"expected the name of a model such as 'llama2-70b', got \['gpt2'\]"):
        preset(["gpt2"])
    with pytest.raises(mtf.GraphError, match="causal must be True or False, got str 'no'"):
        config.flops_per_token(8, causal="no")
    with pytest.raises(mtf.GraphError, match="periods must be an integer, got NoneType None"):
        config.reduced(None)
    with pytest.raises(mtf.GraphError, match=r"reduced \(test_counts.py:\d+\): periods must be at least 1, got 0"):
        config.reduced(0)


def test_counting_all_pairs_doubles_attention_alone():
    config = preset("llama2-70b")
    weights = 6 * config.matmul_parameters
    halved, full = (config.flops_per_token(4096, causal) - weights for causal in (True, False))
    assert full == 2 * halved == 12 * 80 * 4096 * 64 * 128


def test_bert_counts_logits_of_the_masked_tokens():
    # The row "mlp-v0.7-bert-v3-32" of published results: 1.0193e12 FLOPs of a sequence of 512 with 76 predictions.
    found = 512 * preset("bert-large").flops_per_token(512, predictions=76)
    assert found == pytest.approx(1_019_326_211_328, rel=1e-3)


def test_windows_count_what_they_see():
    config = preset("gemma3-12b")
    weights = 6 * config.matmul_parameters
    length, window, width = 32_768, 1024, 16 * 256
    seen = sum(min(n, window) - 0.5 for n in range(1, length + 1))  # the diagonal counts half
    wanted = 12 * width * (40 * seen + 8 * length * length / 2) / length
    assert config.flops_per_token(length) - weights == pytest.approx(wanted, rel=1e-3)


def test_an_encoder_decoder_counts_both_stacks():
    config = preset("t5-11b")
    width, attention, block = 128 * 128, 4 * 1024 * 128 * 128, 2 * 1024 * 65_536
    source = 24 * (attention + block) + 24 * attention // 2  # keys and values of the cross attention too
    target = 24 * (attention + attention // 2 + block) + 32_128 * 1024
    pairs = 24 * (100 * 100 / 2 + 100 * 300 + 300 * 300)
    wanted = (6 * (source * 300 + target * 100) + 12 * width * pairs) / 100
    assert config.flops_per_token(100, encoder_length=300) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"heads": 6, "kv_heads": 4}, "6 % 4 = 2"),
        ({"kind": "encoder-decoder"}, "needs encoder_layers, got 0"),
        ({"position": "rotary", "head_dim": 15}, "even, got 15"),
        ({"share_kv": True}, "windows of both kinds"),
        ({"layers": 0, "vocab": -1}, "layers must be at least 1, got 0\n  vocab must be at least 1, got -1"),
        ({"numerics": "bfloat16"}, "numerics must be an mtf.Numerics .*got str 'bfloat16'"),
        ({"activation": "glu"}, "activation must be"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"windows": (8, "x")}, "windows must be an integer"),
        ({"d_modell": 8}, r"test_counts.py:\d+\): no field 'd_modell'; did you mean 'd_model'"),
        ({"heads": 0}, r"TransformerConfig \(test_counts.py:\d+\) 'gpt2'"),
        ({"attention_bias": 0}, "attention_bias must be True or False, got int 0"),
        ({"norm_epsilon": -1e-6}, "norm_epsilon must not be negative, got -1e-06"),
        ({"z_loss": -1.0, "logit_cap": -2.0}, "logit_cap must not be negative, got -2.0\n  z_loss must not be"),
        ({"position": "rotary", "rope_theta": 0.0}, "rope_theta must be positive, got 0.0"),
        ({"position": "rotary", "windows": (8, None), "global_head_dim": 7}, "global_head_dim must be even, got 7"),
        ({"position": "rotary", "local_rope_theta": 1e4}, "local_rope_theta is for windows of both kinds"),
        ({"position": "sinusoidal", "d_model": 31}, "d_model must be even, got 31"),
        ({"post_norms": True, "norm_position": "post"}, "post_norms come on top"),
        ({"experts": 8}, "experts must be an mtf.models.Experts, got 8"),
        ({"experts": Experts(count=8, d_ff=64, first_dense=12)}, "none of 12 layers has any"),
        ({"latent": LATENT}, "(?s)head_dim must be nope_dim . rope_dim = 12, got 64.*must be 'rotary', got 'learned'"),
        (
            {"latent": LATENT, "head_dim": 12, "position": "rotary", "qk_norm": True, "kv_heads": 4},
            "latent attention does not combine with kv_heads\n  latent attention does not combine with qk_norm",
        ),
        ({"post_norms": True, "parallel": True}, "post_norms come on top"),
        (
            {"position": "none", "kind": "encoder-decoder", "encoder_layers": 2, "segments": 2},
            "segments are for models of one stack, got 2",
        ),
        (
            {"position": "relative", "attention": "materialised", "windows": (8, None), "global_kv_heads": 4},
            "equal heads, not global_kv_heads",
        ),
    ],
)
def test_configs_that_make_no_sense_are_refused(changes, words):
    with pytest.raises(mtf.GraphError, match=words):
        preset("gpt2").replace(**changes)


@pytest.mark.parametrize("name", ["length", "encoder_length", "predictions"])
def test_lengths_are_checked(name):
    with pytest.raises(mtf.GraphError, match=f"{name} must be at least 1, got 0"):
        preset("gpt2").flops_per_token(**{"length": 8, name: 0})


def test_experts_and_ranks_that_make_no_sense_are_refused():
    with pytest.raises(mtf.GraphError, match="d_ff must be at least 1, got 0\n  every must be at least 1, got 0"):
        Experts(count=8, d_ff=0, every=0)
    with pytest.raises(
        mtf.GraphError, match=r"each token chooses 2 experts \(top_k\), but there are only 1 to choose from"
    ):
        Experts(count=1, d_ff=8)
    with pytest.raises(mtf.GraphError, match="form must be 'einsum' or 'gather' or 'dense' or 'grouped', got 'sparse'"):
        Experts(count=4, d_ff=8, form="sparse")
    with pytest.raises(mtf.GraphError, match=r"kv_rank must be at least 1, got 0\n  .*rope_dim must be even, got 3"):
        LatentAttention(kv_rank=0, rope_dim=3, nope_dim=8, value_dim=8)
