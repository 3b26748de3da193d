"""Common layouts of Transformers, with meshes for them."""

from __future__ import annotations

from math import gcd

from meshlib.core.arguments import divisors_near, whole
from meshlib.core.errors import GraphError
from meshlib.models.config import TransformerConfig

TENSOR = 8  # most devices over which heads are split, since they communicate in every block
EXPERTS = 32  # most devices over which experts are split


def usual_layouts(config: TransformerConfig, devices: int, batch: int, stages: int = 1) -> list[tuple[str, str]]:
    """Common layouts of a model as starting points: (name, mesh), as arguments of `mtf.models.layout`.

    Args:
      config: the model. devices: number of devices. batch: sequences per step; if there are fewer than devices, several
        devices share a sequence. stages: of a pipeline, each with its share of the devices; then `batch` is the
        number of sequences in a microbatch.
    Returns: fully sharded data parallelism, alone or with an axis for sequences that devices share, and with an axis
      for the heads, or for heads and sequence, or for experts (and sequences that devices share); without duplicates.
    Raises: GraphError for sizes below 1, and for stages that do not divide the devices.
    Example:
      >>> import meshlib as mtf
      >>> mtf.models.usual_layouts(mtf.models.preset("llama3.1-8b"), 16, 16)
      [('fsdp', 'fsdp:16'), ('fsdp+tensor', 'fsdp:2;tensor:8'), ('fsdp+sequence', 'fsdp:2;tensor:8')]
    """
    devices, batch = whole(devices, "usual_layouts", "devices", 1), whole(batch, "usual_layouts", "batch", 1)
    if devices % whole(stages, "usual_layouts", "stages", 1):
        rest = f"{devices} % {stages} = {devices % stages}; use {divisors_near(devices, stages)}"
        raise GraphError(f"usual_layouts: {devices} devices can't be divided into {stages} stages: {rest}")
    if stages > 1:
        of_stage = usual_layouts(config, devices // stages, batch)
        return [(f"pipeline+{name}", f"pipe:{stages};{mesh}") for name, mesh in of_stage]
    of_layers = [config.attention_of(window) for window in config.windows]
    kv_heads = [heads.query if heads.memory == 1 else heads.memory for heads in of_layers]
    tensor = largest_power(devices, *kv_heads, config.d_ff, config.vocab, most=TENSOR)
    context = devices // gcd(devices, batch)  # devices per sequence, if there are fewer sequences than devices
    layouts_and_meshes = []
    usual = [("context", context), ("tensor", tensor), ("sequence", tensor)]
    if config.experts is not None:
        usual[1:] = [("expert", largest_power(devices, config.experts.count, most=EXPERTS))]
    for axis, size in usual:
        several = context if axis == "expert" else 1  # an axis for experts splits the batch, which must be large enough
        size = gcd(size, devices // several)
        rows = devices // (size * several)
        fsdp = largest_power(rows, config.d_model)
        axes = {"data": rows // fsdp, "fsdp": fsdp, "tensor" if axis == "sequence" else axis: size}
        if several > 1:
            axes["context"] = several
        named = dict.fromkeys(("data", "fsdp", axis, *(["context"] if several > 1 else [])))
        parts = [part for part in named if axes["tensor" if part == "sequence" else part] > 1]
        layouts_and_meshes.append(
            ("+".join(parts) or "fsdp", ";".join(f"{a}:{n}" for a, n in axes.items() if n > 1) or "fsdp:1")
        )
    return list(dict.fromkeys(layouts_and_meshes))


def largest_power(number: int, *others: int, most: int | None = None) -> int:
    """The largest power of two that divides all numbers, at most `most`."""
    common = gcd(number, *others)
    power = common & -common
    return power if most is None else min(power, most)
