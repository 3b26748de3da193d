"""Names and orders of axes of Llama, GPT-2 and T5 tensors in Hugging Face's files.

A row maps a variable of the library to its stored name, with an einops pattern for its axes: theirs on the left, ours
on the right. PyTorch's `Linear` stores [out, in], GPT-2's `Conv1D` [in, out], with queries, keys and values
concatenated. Head h of the queries uses head h // group of the keys: our [key heads, group], flattened. Rotary
positions rotate halves of a head in both.

Sources of the names: huggingface/transformers, models/llama/modeling_llama.py, models/gpt2/modeling_gpt2.py,
models/t5/modeling_t5.py; `tests/sharing` has forward passes to their conventions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType

from meshlib.core.arguments import at
from meshlib.core.errors import GraphError
from meshlib.models.config import TransformerConfig

AS_IT_IS = ""
LINEAR = "out d_model -> d_model out"
QUERIES = "(heads group head_dim) d_model -> d_model group heads head_dim"
KEYS = "(heads head_dim) d_model -> d_model heads head_dim"
CONTEXT = "d_model (heads group head_dim) -> group heads head_dim d_model"
QUERY_BIAS = "(heads group head_dim) -> group heads head_dim"
KEY_BIAS = "(heads head_dim) -> heads head_dim"
FUSED = "d_model (part heads head_dim) -> part d_model heads head_dim"
FUSED_BIAS = "(part heads head_dim) -> part heads head_dim"
SPLIT = "(heads head_dim) d_model -> heads head_dim d_model"


@dataclass(frozen=True)
class NamedVariable:
    """The storage of one variable.

    Attributes:
      ours: its name in the library; `{layer}` stands for the scope of a layer.
      theirs: the name of the stored tensor; `{n}` stands for the number of the layer.
      pattern: einops pattern from their axes to ours; "" if they are the same.
      part: index of our variable along the pattern's dim `part`; None if the tensor holds it alone.
    """

    ours: str
    theirs: str
    pattern: str = AS_IT_IS
    part: int | None = None


@dataclass(frozen=True)
class Family:
    """The storage of the models of one family.

    Attributes:
      rows: config -> its variables.
      prefix: prefix of the names in some files.
      spare: name patterns of further tensors in a file: buffers, and second names of shared tensors.
      written: second names under which shared tensors are written, too.
    """

    rows: Callable[[TransformerConfig], Iterator[NamedVariable]]
    prefix: str
    spare: tuple[str, ...]
    written: tuple[tuple[str, str], ...] = ()


def _llama(c: TransformerConfig) -> Iterator[NamedVariable]:
    yield NamedVariable("embedding", "model.embed_tokens.weight")
    layer = "model.layers.{n}."
    yield NamedVariable("{layer}/attention_norm/scale", f"{layer}input_layernorm.weight")
    for part, pattern in (("q", QUERIES), ("k", KEYS), ("v", KEYS)):
        yield NamedVariable(f"{{layer}}/attention/{part}/kernel", f"{layer}self_attn.{part}_proj.weight", pattern)
    yield NamedVariable("{layer}/attention/out/kernel", f"{layer}self_attn.o_proj.weight", CONTEXT)
    if c.has_attention_bias:
        for part, pattern in (("q", QUERY_BIAS), ("k", KEY_BIAS), ("v", KEY_BIAS)):
            yield NamedVariable(f"{{layer}}/attention/{part}/bias", f"{layer}self_attn.{part}_proj.bias", pattern)
    if c.has_attention_out_bias:
        yield NamedVariable("{layer}/attention/out/bias", f"{layer}self_attn.o_proj.bias")
    if c.qk_norm:
        for part in "qk":
            yield NamedVariable(f"{{layer}}/attention/{part}_norm/scale", f"{layer}self_attn.{part}_norm.weight")
    yield NamedVariable("{layer}/feed_forward_norm/scale", f"{layer}post_attention_layernorm.weight")
    for ours, theirs in (("wi_gate", "gate"), ("wi", "up"), ("wo", "down")):
        yield NamedVariable(f"{{layer}}/feed_forward/{ours}/kernel", f"{layer}mlp.{theirs}_proj.weight", LINEAR)
    yield NamedVariable("final_norm/scale", "model.norm.weight")
    if not c.tied:
        yield NamedVariable("head/kernel", "lm_head.weight", LINEAR)


def _gpt2(c: TransformerConfig) -> Iterator[NamedVariable]:
    yield NamedVariable("embedding", "wte.weight")
    yield NamedVariable("positions", "wpe.weight")
    for ours, theirs in (("attention_norm", "ln_1"), ("feed_forward_norm", "ln_2")):
        yield NamedVariable(f"{{layer}}/{ours}/scale", f"h.{{n}}.{theirs}.weight")
        yield NamedVariable(f"{{layer}}/{ours}/bias", f"h.{{n}}.{theirs}.bias")
    for number, part in enumerate("qkv"):
        yield NamedVariable(f"{{layer}}/attention/{part}/kernel", "h.{n}.attn.c_attn.weight", FUSED, number)
        yield NamedVariable(f"{{layer}}/attention/{part}/bias", "h.{n}.attn.c_attn.bias", FUSED_BIAS, number)
    merged = "(heads head_dim) d_model -> heads head_dim d_model"
    yield NamedVariable("{layer}/attention/out/kernel", "h.{n}.attn.c_proj.weight", merged)
    yield NamedVariable("{layer}/attention/out/bias", "h.{n}.attn.c_proj.bias")
    for ours, theirs in (("wi", "c_fc"), ("wo", "c_proj")):
        yield NamedVariable(f"{{layer}}/feed_forward/{ours}/kernel", f"h.{{n}}.mlp.{theirs}.weight")
        yield NamedVariable(f"{{layer}}/feed_forward/{ours}/bias", f"h.{{n}}.mlp.{theirs}.bias")
    yield NamedVariable("final_norm/scale", "ln_f.weight")
    yield NamedVariable("final_norm/bias", "ln_f.bias")
    if not c.tied:
        yield NamedVariable("head/kernel", "lm_head.weight", LINEAR)


def _t5(c: TransformerConfig) -> Iterator[NamedVariable]:
    yield NamedVariable("embedding", "shared.weight")
    for stack in ("encoder", "decoder"):
        block = f"{stack}.block.{{n}}.layer."
        yield NamedVariable(
            f"{stack}/relative_position_bias",
            f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            "buckets heads -> heads buckets",
        )
        parts = [("attention", "SelfAttention")]
        parts += [("cross_attention", "EncDecAttention")] if stack == "decoder" else []
        for number, (ours, theirs) in enumerate(parts):
            inside = f"{block}{number}."
            yield NamedVariable(f"{stack}/{{layer}}/{ours}_norm/scale", f"{inside}layer_norm.weight")
            for part in "qkv":
                yield NamedVariable(f"{stack}/{{layer}}/{ours}/{part}/kernel", f"{inside}{theirs}.{part}.weight", KEYS)
            yield NamedVariable(f"{stack}/{{layer}}/{ours}/out/kernel", f"{inside}{theirs}.o.weight", CONTEXT)
        last = f"{block}{len(parts)}."
        yield NamedVariable(f"{stack}/{{layer}}/feed_forward_norm/scale", f"{last}layer_norm.weight")
        into = (("wi_gate", "wi_0"), ("wi", "wi_1")) if c.gated else (("wi", "wi"),)
        for ours, theirs in (*into, ("wo", "wo")):
            name = f"{last}DenseReluDense.{theirs}.weight"
            yield NamedVariable(f"{stack}/{{layer}}/feed_forward/{ours}/kernel", name, LINEAR)
        yield NamedVariable(f"{stack}/final_norm/scale", f"{stack}.final_layer_norm.weight")
    if not c.tied:
        yield NamedVariable("head/kernel", "lm_head.weight", LINEAR)


FAMILIES: MappingProxyType[str, Family] = MappingProxyType(
    {
        "llama": Family(_llama, "", ("model.layers.*.self_attn.rotary_emb.inv_freq", "lm_head.weight")),
        "gpt2": Family(_gpt2, "transformer.", ("h.*.attn.bias", "h.*.attn.masked_bias", "lm_head.weight")),
        "t5": Family(
            _t5,
            "",
            (
                "*coder.embed_tokens.weight",
                "lm_head.weight",
                "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
            ),
        ),
    }
)


def _strange_parts(config: TransformerConfig) -> list[str]:
    """Features of a model that no family has."""
    return [
        name
        for name, there in (
            ("experts", config.experts is not None),
            ("latent attention", config.latent is not None),
            ("norms after blocks", config.norm_position != "pre" or config.post_norms),
            ("a norm over all heads", config.qk_norm_over_heads),
            ("layers with a learned factor", config.layer_scale),
            ("parallel blocks", config.parallel),
            ("windows", set(config.windows) != {None}),
            ("kernels in few bits", config.numerics.kernel_dtype is not None),
            ("a norm of the embeddings", config.embedding_norm),
        )
        if there
    ]


def _family_like(config: TransformerConfig) -> str | None:
    """The family with this model's kind, positions and norms, if any."""
    architecture = (config.kind, config.position, config.norm)
    if architecture == ("decoder", "rotary", "rms") and config.gated:
        return "llama"
    if architecture == ("decoder", "learned", "layer") and config.bias:
        return "gpt2"
    return "t5" if architecture == ("encoder-decoder", "relative", "rms") else None


def _strange_of_family(config: TransformerConfig, family: str | None) -> list[str]:
    """Features of a model that its family lacks."""
    shares_keys = config.memory_heads != config.heads
    if family == "llama" and config.bias:
        return ["biases of feed-forward blocks"]
    if family == "gpt2" and (config.gated or shares_keys):
        return ["gates, or heads of keys that queries share"]
    if family == "t5" and (config.bias or shares_keys):
        return ["biases, or heads of keys that queries share"]
    return []


def family_of(config: TransformerConfig, what: str) -> tuple[str, Family]:
    """Name and `Family` of the files that hold a model of this config.

    Raises: GraphError for a config of no family, with the supported ones.
    """
    if not isinstance(config, TransformerConfig):
        raise GraphError(f"{at(what)}: expected a TransformerConfig, got {type(config).__name__} {config!r:.80}")
    family = _family_like(config)
    strange = [*_strange_parts(config), *_strange_of_family(config, family)]
    if family is None or strange:
        has = f"has {' and '.join(strange)}" if strange else "is of another architecture"
        raise GraphError(
            f"{at(what)}: {config.name} {has}; weights by Hugging Face's names are those of Llama (rotary, gated, RMS "
            "norms), GPT-2 (learned positions, biases) and T5 (encoder-decoder, relative positions)"
        )
    return family, FAMILIES[family]
