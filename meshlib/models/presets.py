"""Transformers with published dimensions, by name.

Each function is a family, with a row per member of the fields in which it differs. Tests compare parameter counts with
the published ones. Models since Mixtral were trained without dropping tokens: their experts are grouped products.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from meshlib.core.arguments import at
from meshlib.core.errors import GraphError, nearest
from meshlib.layers.numerics import DEFAULT
from meshlib.layers.positions import RotaryScaling
from meshlib.layers.routing import Routing
from meshlib.models.config import TransformerConfig
from meshlib.models.config_parts import Experts, LatentAttention


def _switch() -> Iterator[TransformerConfig]:
    """Fedus et al., "Switch Transformers", 2021, table 9, in the sizes of the released checkpoints (google/switch-*).

    Experts in every second layer, in Switch-C in all. XXL has 128 experts: the 64 of the paper's table account for only
    half of its 395 billion parameters.
    """
    base = [(f"switch-base-{n}", 12, 768, 12, 3072, n, 2, False) for n in (8, 16, 32, 64, 128, 256)]
    rows = (
        *base,
        ("switch-large-128", 24, 1024, 16, 4096, 128, 2, False),
        ("switch-xxl-128", 24, 4096, 64, 10_240, 128, 2, True),
        ("switch-c-2048", 15, 2080, 32, 6144, 2048, 1, False),
    )
    for name, layers, d_model, heads, d_ff, count, every, gated in rows:
        yield TransformerConfig(
            name=name, kind="encoder-decoder", layers=layers, encoder_layers=layers, d_model=d_model, heads=heads,
            head_dim=64, d_ff=d_ff, vocab=32_128, gated=gated, activation="gelu" if gated else "relu", norm="rms",
            position="relative", attention="materialised", attention_scale=1.0, scale_logits=not gated, tied=not gated,
            dropout=0.1, z_loss=1e-4,
            experts=Experts(count=count, d_ff=d_ff, every=every, routing=Routing(gating="switch", jitter=0.01)),
        )  # fmt: skip


def _gshard() -> Iterator[TransformerConfig]:
    """Lepikhin et al., "GShard", 2020, table 1 and appendix A.2: experts in every second layer, two for each token.

    Layers are divided equally between the stacks. The paper's two vocabularies, 64,000 and 32,000, are one here.
    """
    rows = (
        ("gshard-12b", 12, 128), ("gshard-37b", 36, 128), ("gshard-50b", 12, 512), ("gshard-150b", 36, 512),
        ("gshard-200b", 12, 2048), ("gshard-600b", 36, 2048),
    )  # fmt: skip
    for name, layers, count in rows:
        routing = Routing(gating="top_2", second_policy="random", capacity_factor=1.0)
        yield TransformerConfig(
            name=name, kind="encoder-decoder", layers=layers // 2, encoder_layers=layers // 2, d_model=1024, heads=16,
            head_dim=128, d_ff=8192, vocab=64_000, activation="relu", position="sinusoidal", attention="materialised",
            scale_embedding=True, dropout=0.1, numerics=DEFAULT,
            experts=Experts(count=count, d_ff=8192, every=2, routing=routing),
        )  # fmt: skip


def _mixtral() -> Iterator[TransformerConfig]:
    """Jiang et al., "Mixtral of Experts", 2024, table 1; config.json of mistralai/Mixtral-8x7B-v0.1 and 8x22B-v0.1."""
    rows = (("mixtral-8x7b", 32, 4096, 32, 14_336), ("mixtral-8x22b", 56, 6144, 48, 16_384))
    for name, layers, d_model, heads, d_ff in rows:
        yield TransformerConfig(
            name=name, layers=layers, d_model=d_model, heads=heads, kv_heads=8, head_dim=128, d_ff=d_ff, vocab=32_000,
            gated=True, activation="silu", norm="rms", norm_epsilon=1e-5, position="rotary", rope_theta=1e6, tied=False,
            experts=Experts(
                count=8, d_ff=d_ff, form="grouped", routing=Routing(top_k=2, loss_coef=0.02, capacity_factor=None)
            ),
        )  # fmt: skip


def _deepseek() -> Iterator[TransformerConfig]:
    """DeepSeek-V2, arXiv:2405.04434, and V3, arXiv:2412.19437; config.json of deepseek-ai/DeepSeek-V2, V2-Lite, V3.

    Not modelled: V3's module that predicts a second token, and the scaling of positions to longer contexts (YaRN).
    """
    plain = Routing(top_k=6, renormalise=False, loss_coef=0.001, capacity_factor=None)
    grouped = Routing(
        top_k=6,
        renormalise=False,
        scale=16.0,
        expert_groups=8,
        groups_per_token=3,
        group_score="max",
        loss_coef=0.001,
        capacity_factor=None,
    )
    unbiased = Routing(
        top_k=8,
        scores="sigmoid",
        bias=True,
        scale=2.5,
        expert_groups=8,
        groups_per_token=4,
        loss_coef=1e-4,
        capacity_factor=None,
    )
    rows = (
        ("deepseek-v2-lite", 27, 2048, 16, None, 10_944, 102_400, 64, 1408, 2, 1, plain),
        ("deepseek-v2", 60, 5120, 128, 1536, 12_288, 102_400, 160, 1536, 2, 1, grouped),
        ("deepseek-v3", 61, 7168, 128, 1536, 18_432, 129_280, 256, 2048, 1, 3, unbiased),
    )
    for name, layers, d_model, heads, q_rank, d_ff, vocab, count, inner, shared, dense, routing in rows:
        yield TransformerConfig(
            name=name, layers=layers, d_model=d_model, heads=heads, head_dim=192, d_ff=d_ff, vocab=vocab, gated=True,
            activation="silu", norm="rms", position="rotary", tied=False,
            latent=LatentAttention(kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128, q_rank=q_rank),
            experts=Experts(
                count=count, d_ff=inner, shared=shared, first_dense=dense, form="grouped", routing=routing
            ),
        )  # fmt: skip


def _qwen() -> Iterator[TransformerConfig]:
    """Qwen3 Technical Report, 2025, table 2; config.json of Qwen/Qwen3-30B-A3B and Qwen3-235B-A22B."""
    rows = (("qwen3-30b-a3b", 48, 2048, 32, 6144, 768), ("qwen3-235b-a22b", 94, 4096, 64, 12_288, 1536))
    for name, layers, d_model, heads, d_ff, inner in rows:
        yield TransformerConfig(
            name=name, layers=layers, d_model=d_model, heads=heads, kv_heads=4, head_dim=128, d_ff=d_ff, vocab=151_936,
            gated=True, activation="silu", norm="rms", qk_norm=True, position="rotary", rope_theta=1e6, tied=False,
            experts=Experts(
                count=128, d_ff=inner, form="grouped",
                routing=Routing(top_k=8, loss_coef=0.001, capacity_factor=None),
            ),
        )  # fmt: skip


def _gpt_oss() -> Iterator[TransformerConfig]:
    """OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025, table 1; config.json of openai/gpt-oss-120b.

    Not modelled: the bias of the router, the learned sink logit of each head, the limits of activations.
    """
    for name, layers, count in (("gpt-oss-20b", 24, 32), ("gpt-oss-120b", 36, 128)):
        yield TransformerConfig(
            name=name, layers=layers, d_model=2880, heads=64, kv_heads=8, head_dim=64, d_ff=2880, vocab=201_088,
            gated=True, activation="silu", norm="rms", norm_epsilon=1e-5, bias=True, windows=(128, None),
            position="rotary", rope_theta=150_000.0, tied=False,
            experts=Experts(
                count=count, d_ff=2880, form="grouped",
                routing=Routing(top_k=4, loss_coef=0.0, capacity_factor=None),
            ),
        )  # fmt: skip


def _llama4() -> Iterator[TransformerConfig]:
    """config.json of meta-llama/Llama-4-Scout-17B-16E and Llama-4-Maverick-17B-128E, the text models.

    Not modelled: chunked attention of 8,192 tokens, and layers without rotary positions; gates scale the output of an
    expert instead of its input.
    """
    for name, count, every in (("llama4-scout", 16, 1), ("llama4-maverick", 128, 2)):
        yield TransformerConfig(
            name=name, layers=48, d_model=5120, heads=40, kv_heads=8, head_dim=128, d_ff=16_384, vocab=202_048,
            gated=True, activation="silu", norm="rms", norm_epsilon=1e-5, position="rotary", rope_theta=500_000.0,
            tied=False,
            experts=Experts(
                count=count, d_ff=8192, shared=1, every=every, form="grouped",
                routing=Routing(
                    top_k=1, scores="sigmoid", renormalise=False, loss_coef=0.001, capacity_factor=None
                ),
            ),
        )  # fmt: skip


def _transformer() -> Iterator[TransformerConfig]:
    """Vaswani et al., "Attention Is All You Need", 2017, table 3; one table of 37,000 byte pairs, used three times."""
    for name, d_model, heads in (("transformer-base", 512, 8), ("transformer-big", 1024, 16)):
        yield TransformerConfig(
            name=name, kind="encoder-decoder", layers=6, encoder_layers=6, d_model=d_model, heads=heads, head_dim=64,
            d_ff=4 * d_model, vocab=37_000, activation="relu", norm_position="post", position="sinusoidal", bias=True,
            attention_bias=False, scale_embedding=True, dropout=0.1 if d_model == 512 else 0.3, label_smoothing=0.1,
            attention="materialised",
        )  # fmt: skip


def _bert() -> Iterator[TransformerConfig]:
    """Devlin et al., "BERT", 2018; the released uncased vocabulary."""
    for name, layers, d_model in (("bert-base", 12, 768), ("bert-large", 24, 1024)):
        yield TransformerConfig(
            name=name, kind="encoder", layers=layers, d_model=d_model, heads=d_model // 64, head_dim=64,
            d_ff=4 * d_model, vocab=30_522, max_length=512, segments=2, norm_position="post", norm_epsilon=1e-12,
            bias=True, embedding_norm=True, head="transform", activation="gelu_exact", dropout=0.1,
            attention="materialised",
        )  # fmt: skip


def _mesh_tensorflow() -> Iterator[TransformerConfig]:
    """Shazeer et al., "Mesh-TensorFlow", 2018, table 3; dimensions as in tensor2tensor's `mtf_transformer_paper_lm`."""
    for billions, size in zip(("0.14", "0.22", "0.37", "0.67", "1.28", "2.48", "4.9"), range(-1, 6), strict=True):
        yield TransformerConfig(
            name=f"mtf-lm-{billions}b", layers=6, d_model=1024, heads=int(8 * 2**size), head_dim=256,
            d_ff=int(8192 * 2**size), vocab=32_768, max_length=256, activation="relu", norm="rms", tied=False,
            attention="materialised",
        )  # fmt: skip


def _gpt2() -> Iterator[TransformerConfig]:
    """Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, table 2."""
    rows = (("gpt2", 12, 768), ("gpt2-medium", 24, 1024), ("gpt2-large", 36, 1280), ("gpt2-xl", 48, 1600))
    for name, layers, d_model in rows:
        yield TransformerConfig(
            name=name, layers=layers, d_model=d_model, heads=d_model // 64, head_dim=64, d_ff=4 * d_model,
            vocab=50_257, max_length=1024, norm_epsilon=1e-5, bias=True,
        )  # fmt: skip


def _gpt3() -> Iterator[TransformerConfig]:
    """Brown et al., "Language Models are Few-Shot Learners", 2020, table 2.1, all of its attention dense.

    The vocabulary of 50,257 is padded to 50,304, as MaxText and MLPerf do, so that 2 to 128 devices can split it.
    """
    yield TransformerConfig(
        name="gpt3-175b", layers=96, d_model=12_288, heads=96, head_dim=128, d_ff=49_152, vocab=50_304,
        max_length=2048, norm_epsilon=1e-5, bias=True,
    )  # fmt: skip


def _t5() -> Iterator[TransformerConfig]:
    """Raffel et al., "Exploring the Limits of Transfer Learning", 2019, section 3.7; the released checkpoints."""
    rows = (
        ("t5-small", 6, 512, 8, 64, 2048),
        ("t5-base", 12, 768, 12, 64, 3072),
        ("t5-large", 24, 1024, 16, 64, 4096),
        ("t5-3b", 24, 1024, 32, 128, 16_384),
        ("t5-11b", 24, 1024, 128, 128, 65_536),
    )
    for name, layers, d_model, heads, head_dim, d_ff in rows:
        yield TransformerConfig(
            name=name, kind="encoder-decoder", layers=layers, encoder_layers=layers, d_model=d_model, heads=heads,
            head_dim=head_dim, d_ff=d_ff, vocab=32_128, activation="relu", norm="rms", position="relative",
            attention="materialised", attention_scale=1.0, scale_logits=True, dropout=0.1, z_loss=1e-4,
        )  # fmt: skip


def _llama() -> Iterator[TransformerConfig]:
    """Touvron et al., "Llama 2", 2023; "The Llama 3 Herd of Models", 2024, table 3; meta-llama/llama-models."""
    rows = (
        (("llama2-7b",), 32, 4096, 32, 32, 11_008),
        (("llama2-13b",), 40, 5120, 40, 40, 13_824),
        (("llama2-70b",), 80, 8192, 64, 8, 28_672),
        (("llama3-8b", "llama3.1-8b"), 32, 4096, 32, 8, 14_336),
        (("llama3-70b", "llama3.1-70b"), 80, 8192, 64, 8, 28_672),
        (("llama3-405b", "llama3.1-405b"), 126, 16_384, 128, 8, 53_248),
    )
    for names, layers, d_model, heads, kv_heads, d_ff in rows:
        for name in names:
            third = name.startswith("llama3")
            yield TransformerConfig(
                name=name, layers=layers, d_model=d_model, heads=heads, kv_heads=kv_heads, head_dim=128, d_ff=d_ff,
                vocab=128_256 if third else 32_000, gated=True, activation="silu", norm="rms", norm_epsilon=1e-5,
                position="rotary", rope_theta=500_000.0 if third else 10_000.0, tied=False,
                rope_scaling=RotaryScaling(8.0, original_length=8192) if name.startswith("llama3.1") else None,
            )  # fmt: skip


def _palm() -> Iterator[TransformerConfig]:
    """Chowdhery et al., "PaLM", 2022, table 1: parallel layers, multi-query attention, SwiGLU, no biases."""
    rows = (("palm-8b", 32, 4096, 16), ("palm-62b", 64, 8192, 32), ("palm-540b", 118, 18_432, 48))
    for name, layers, d_model, heads in rows:
        yield TransformerConfig(
            name=name, layers=layers, d_model=d_model, heads=heads, kv_heads=1, head_dim=256, d_ff=4 * d_model,
            vocab=256_000, gated=True, activation="silu", parallel=True, position="rotary", scale_logits=True,
            z_loss=1e-4,
        )  # fmt: skip


def _maxtext() -> Iterator[TransformerConfig]:
    """AI-Hypercomputer/maxtext: MaxText/configs/{v4,v5e,v5p}/*.sh over base.yml, in the versions its tables are of."""
    rows = (
        ("maxtext-16b", 32, 5120, 32, 32_768),
        ("maxtext-22b", 48, 6144, 24, 24_576),
        ("maxtext-32b", 32, 10_240, 32, 32_768),
        ("maxtext-52b", 32, 12_288, 32, 49_152),
        ("maxtext-64b", 64, 10_240, 32, 32_768),
        ("maxtext-128b", 64, 10_240, 64, 65_536),
        ("maxtext-512b", 128, 20_480, 64, 65_536),
        ("maxtext-1024b", 128, 20_480, 128, 131_072),
    )
    for name, layers, d_model, heads, d_ff in rows:
        yield TransformerConfig(
            name=name, layers=layers, d_model=d_model, heads=heads, head_dim=256, d_ff=d_ff, vocab=32_768,
            activation="relu", norm="rms", position="rotary",
        )  # fmt: skip


def _gemma() -> Iterator[TransformerConfig]:
    """maxtext: src/maxtext/configs/models/gemma{3-4b,3-12b,3-27b,4-31b}.yml: five layers with a window, one global.

    Not modelled for Gemma 4: rotation of only a quarter of the features, and the norm of values; neither has weights.
    """
    rows = (
        ("gemma3-4b", 34, 2560, 8, 4, 256, 10_240),
        ("gemma3-12b", 48, 3840, 16, 8, 256, 15_360),
        ("gemma3-27b", 62, 5376, 32, 16, 128, 21_504),
        ("gemma4-31b", 60, 5376, 32, 16, 256, 21_504),
    )
    for name, layers, d_model, heads, kv_heads, head_dim, d_ff in rows:
        fourth = name == "gemma4-31b"
        yield TransformerConfig(
            name=name, layers=layers, d_model=d_model, heads=heads, kv_heads=kv_heads, head_dim=head_dim, d_ff=d_ff,
            vocab=262_144, gated=True, norm="rms", post_norms=True, qk_norm=True, windows=(*(1024,) * 5, None),
            position="rotary", rope_theta=1e6, local_rope_theta=1e4, scale_embedding=True,
            attention_scale=(d_model / heads) ** -0.5 if name == "gemma3-27b" else None,
            global_head_dim=512 if fourth else None, global_kv_heads=4 if fourth else None, share_kv=fourth,
            logit_cap=30.0 if fourth else 0.0, layer_scale=fourth,
        )  # fmt: skip


_FAMILIES = (
    *(_transformer, _bert, _mesh_tensorflow, _gpt2, _gpt3, _t5, _llama, _palm, _maxtext, _gemma),
    *(_switch, _gshard, _mixtral, _deepseek, _qwen, _gpt_oss, _llama4),  # with experts
)
PRESETS: MappingProxyType[str, TransformerConfig] = MappingProxyType(
    {config.name: config for family in _FAMILIES for config in family()}
)


def preset(name: str) -> TransformerConfig:
    """The model with that name; `replace` changes fields of it.

    Raises: GraphError for an unknown name, with the nearest one.
    Example:
      >>> import meshlib as mtf
      >>> mtf.models.preset("palm-540b").parameters
      540356474880
      >>> mtf.models.preset("lama2-70b")
      Traceback (most recent call last):
      meshlib.core.errors.GraphError: preset (...): no model 'lama2-70b'; did you mean 'llama2-70b'?
    """
    if not isinstance(name, str):
        raise GraphError(f"{at('preset')}: expected the name of a model such as 'llama2-70b', got {name!r:.80}")
    if name not in PRESETS:
        hint = nearest(name, PRESETS) or f"; there are {', '.join(PRESETS)}"
        raise GraphError(f"{at('preset')}: no model {name!r}{hint}")
    return PRESETS[name]
