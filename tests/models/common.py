"""What tests of models share: one small model of each architecture, feeds and values for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import meshlib as mtf
from meshlib.layers import Routing
from meshlib.models import TransformerConfig, preset

Array = np.ndarray[Any, Any]

# One of each architecture, in float32, without dropout.
WIDE = mtf.Numerics(variable_dtype="float64", activation_dtype="float64")
FAMILIES = (
    "transformer-base", "bert-large", "mtf-lm-4.9b", "gpt2", "t5-11b", "llama2-7b", "llama3.1-405b", "palm-540b",
    "maxtext-16b", "gemma3-12b", "gemma4-31b", "switch-base-8", "deepseek-v3",
)  # fmt: skip
BATCH, LENGTH = 2, 6


def small(name: str, periods: int = 2) -> TransformerConfig:
    """A reduced preset in float32, without chance."""
    config = preset(name).reduced(periods).replace(numerics=mtf.Numerics(), dropout=0.0)
    if config.experts is None:
        return config
    routing = replace(config.experts.routing, jitter=0.0, loss_coef=0.1, z_loss=0.01)
    return config.replace(experts=replace(config.experts, routing=routing))


def with_capacity(name: str) -> TransformerConfig:
    """`small`, whose experts have room for as many tokens as `Routing` gives them unless told otherwise."""
    config = small(name)
    assert config.experts is not None
    routing = replace(config.experts.routing, capacity_factor=Routing().capacity_factor)
    return config.replace(experts=replace(config.experts, form=None, routing=routing))


def feeds(config: TransformerConfig, inputs: Any, seed: int = 0) -> dict[str, Array]:
    """Random tokens for the inputs of a model."""
    rng = np.random.default_rng(seed)
    highest = {"segments": config.segments, "positions": LENGTH}
    return {
        name: rng.integers(0, highest.get(name, config.vocab), t.shape.sizes).astype(np.int32)
        for name, t in inputs.items()
    }


def values(graph: mtf.Graph, seed: int = 0) -> dict[str, Array]:
    """Random values for all variables: neither ones in norms nor zeros in biases, which hide what is wrong."""
    rng = np.random.default_rng(seed)
    made = {}
    for variable in graph.trainable_variables:
        name, shape = variable.name, variable.shape.sizes
        kind = name.rpartition("/")[2]
        if kind == "scale":
            made[name] = 1 + 0.2 * rng.normal(size=shape)
        elif kind == "bias":
            made[name] = 0.3 * rng.normal(size=shape)
        else:
            inner = shape[1:] if name.startswith(("layers/", "encoder/layers/", "decoder/layers/")) else shape
            made[name] = rng.normal(size=shape) * (np.prod(inner) / max(inner, default=1)) ** -0.25
    return {name: value.astype(np.float32) for name, value in made.items()}


def unstacked(values: dict[str, Array], names: Any, config: TransformerConfig) -> dict[str, Array]:
    """Values of scanned variables under the names of unrolled ones."""
    period, front = config.period, 0 if config.experts is None else config.experts.first_dense
    made = {}
    for name in names:
        before, found, rest = name.partition("layer_")
        if not found:
            made[name] = values[name]
            continue
        number, _, rest = rest.partition("/")
        if name in values:  # one before those that are scanned
            made[name] = values[name]
            continue
        trip, place = divmod(int(number) - front, period)
        one = f"layer_{place}/" if period > 1 else ""
        made[name] = values[f"{before}layers/{one}{rest}"][trip]
    return made
