"""Transformers with published dimensions, by name.

Each function is a family, with a row per member of the fields in which it differs. Tests compare parameter counts with
the published ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from meshlib.core.arguments import at
from meshlib.core.errors import GraphError, nearest
from meshlib.layers.positions import RotaryScaling
from meshlib.models.config import TransformerConfig
from meshlib.models.expert_presets import FAMILIES as WITH_EXPERTS


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


_FAMILIES = (_transformer, _bert, _mesh_tensorflow, _gpt2, _gpt3, _t5, _llama, _palm, _maxtext, _gemma, *WITH_EXPERTS)
PRESETS: MappingProxyType[str, TransformerConfig] = MappingProxyType(
    {config.name: config for family in _FAMILIES for config in family()}
)


def preset(name: str) -> TransformerConfig:
    """The model with that name; `replace` changes fields of it.

    Raises: GraphError for an unknown name, with the nearest one.
    Example:
      >>> preset("palm-540b").parameters
      540356474880
      >>> preset("lama2-70b")
      Traceback (most recent call last):
      meshlib.core.errors.GraphError: preset (...): no model 'lama2-70b'; did you mean 'llama2-70b'?
    """
    if not isinstance(name, str):
        raise GraphError(f"{at('preset')}: expected the name of a model such as 'llama2-70b', got {name!r:.80}")
    if name not in PRESETS:
        hint = nearest(name, PRESETS) or f"; there are {', '.join(PRESETS)}"
        raise GraphError(f"{at('preset')}: no model {name!r}{hint}")
    return PRESETS[name]
