"""Published models with mixtures of experts; dense ones are in `presets`.

Models since Mixtral were trained without dropping tokens: their experts are grouped products.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshlib.layers.numerics import DEFAULT
from meshlib.layers.routing import Routing
from meshlib.models.config import TransformerConfig
from meshlib.models.experts import Experts
from meshlib.models.latent import LatentAttention


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


FAMILIES = (_switch, _gshard, _mixtral, _deepseek, _qwen, _gpt_oss, _llama4)
