"""Named layouts of Transformers: parts joined by `+`, each with the rules for one axis; common ones with meshes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import gcd, prod
from types import MappingProxyType

from layouts import (
    LayoutRules,
    Mesh,
    Rule,
    context_parallel,
    data_parallel,
    fully_sharded,
    joined,
    model_parallel,
    sequence_parallel,
    zero1,
)
from layouts.errors import LayoutError
from layouts.mesh import MeshLike
from meshlib.core.arguments import at, divisors_near, whole
from meshlib.core.errors import GraphError, nearest
from meshlib.core.text import counted
from meshlib.core.wording import setting
from meshlib.models.config import TransformerConfig
from meshlib.models.stages import stacks

# The parts, each with its axes in order of preference.
PARTS: MappingProxyType[str, tuple[str, ...]] = MappingProxyType(
    {
        "data": ("data",),
        "fsdp": ("fsdp", "data"),
        "zero1": ("data", "fsdp"),
        "tensor": ("tensor", "model"),
        "sequence": ("tensor", "model"),
        "context": ("context",),
        "pipeline": ("pipe", "stage"),
        "expert": ("expert", "data", "fsdp"),
        "cache": ("cache", "tensor", "model", "context"),
    }
)
LAYOUTS: MappingProxyType[str, str] = MappingProxyType(
    {
        "data": "data-parallel: the batch is split, every device has all weights",
        "zero1": "data-parallel, each device keeps and updates its part of the optimizer's slots (ZeRO-1)",
        "fsdp": "fully sharded: batch, weights and slots are split over one axis, weights gathered when used (ZeRO-3); "
        "weights and slots over the axes of experts and context, too",
        "tensor": "heads, d_ff and vocabulary are split over one axis (Megatron)",
        "sequence": "tensor, and between the blocks the sequence is split over the same axis",
        "context": "the sequence is split throughout, keys and values are gathered",
        "pipeline": "layers are split into stages over one axis, of which each holds its own; microbatches of the rest",
        "expert": "experts are split, over an axis that splits the batch too, or over that of the data",
        "cache": "caches of decoding are split by positions, where the axis does not split their heads",
        "2d": "data+tensor",
    }
)
_SHARING = ("zero1", "expert", "cache")  # parts that may share the axis of another part
_JOINED = {"2d": "data+tensor"}
_OF_OTHERS = {
    "dp": "data",
    "ddp": "data",
    "zero2": "zero1",
    "zero3": "fsdp",
    "tp": "tensor",
    "megatron": "tensor",
    "sp": "sequence",
    "cp": "context",
    "pp": "pipeline",
    "ep": "expert",
}  # names elsewhere -> here
TENSOR = 8  # most devices over which heads are split, since they communicate in every block
EXPERTS = 32  # most devices over which experts are split


def layout(name: str, config: TransformerConfig, mesh: MeshLike) -> LayoutRules:
    """The layout rules of a model on a mesh.

    Args:
      name: a name of `LAYOUTS`, or several joined by "+", such as "fsdp+tensor", "data+fsdp+tensor", "zero1+sequence".
        Each part uses the axis of its name; "sequence" uses "tensor". If the mesh lacks it, "fsdp" uses "data",
        "tensor" and "sequence" use "model", "expert" uses the axis of the data, as in "fsdp+expert" on "fsdp:64";
        "pipeline" uses "pipe", for models with `mtf.models.Pipeline`, whose microbatches the axis must divide. On a
        mesh of one axis a single part uses that, whatever its name. "cache" is for `prefill` and `decode_step`; it may
        share the axis of "tensor", and then heads take precedence.
      config: the model: its sizes decide whether key and value heads or the groups of query heads are split, and which
        biases are.
      mesh: the mesh.
    Returns: `LayoutRules`, which can be printed.
    Raises: LayoutError for an unknown name, a mesh without the axis, and dims that do not divide, with the remedy.
    Example:
      >>> import meshlib as mtf
      >>> llama = mtf.models.preset("llama3.1-405b")
      >>> print(mtf.models.layout("data+fsdp+tensor", llama, "data:6;fsdp:64;tensor:8"))
      batch:data+fsdp;d_model:fsdp?;heads:tensor;d_ff:tensor;vocab:tensor
      >>> print(mtf.models.layout("tensor", llama, "tensor:16"))  # 8 heads of keys, each of which 16 queries share
      group:tensor;d_ff:tensor;vocab:tensor
      >>> print(mtf.models.layout("fsdp+expert", mtf.models.preset("mixtral-8x7b"), "fsdp:32;expert:8"))
      batch:fsdp+expert;d_model:fsdp+expert?;experts:expert;batch_unsplit:fsdp
      >>> print(mtf.models.layout("fsdp+context", llama, "fsdp:64;context:4"))
      batch:fsdp;d_model:fsdp+context?;length:context
      >>> print(mtf.models.layout("tensor+cache", llama, "tensor:16"))  # caches are split by positions
      group:tensor;d_ff:tensor;vocab:tensor;cache_length:tensor?
    """
    mesh = mesh if isinstance(mesh, Mesh) else Mesh(mesh)
    if not isinstance(config, TransformerConfig):
        raise LayoutError(f"{at('layout')}: expected a TransformerConfig, got {type(config).__name__} {config!r:.80}")
    parts = _parts(name)
    axes = dict(zip(parts, _axes(name, parts, mesh), strict=True))
    rules_of_parts = [
        _RULES[part](config, axis, mesh.axis_size(axis)) for part, axis in axes.items() if part != "expert"
    ]
    rules = joined(*rules_of_parts, *(_expert_rules(config, axes, mesh) if "expert" in axes else ()))
    return with_unsplit(_over_axes(rules, config, axes, mesh), config)


def with_unsplit(rules: LayoutRules, config: TransformerConfig) -> LayoutRules:
    """`rules` with rules for `batch_unsplit` and `length_unsplit`, over the axes that experts do not take.

    Grouped products need them only if experts are split; then also for the blocks of a split sequence.
    """
    e = config.experts
    experts = next((r.axes for r in rules.rules if r.dim == "experts"), ())
    if e is None or (e.form == "grouped" and not experts):
        return rules
    more = []
    for dim in ("batch", "length") if e.form == "grouped" else ("batch",):
        axes = next((r.axes for r in rules.rules if r.dim == dim and not r.optional and r.scope is None), ())
        remaining_axes = tuple(axis for axis in axes if axis not in experts)
        more += [Rule(f"{dim}_unsplit", remaining_axes)] if remaining_axes else []
    return LayoutRules([*rules.rules, *more]) if more else rules


def _parts(name: object) -> list[str]:
    if not isinstance(name, str):
        raise LayoutError(f"{at('layout')}: expected a name such as 'fsdp+tensor', got {name!r:.80}")
    parts = [inner for part in name.split("+") for inner in _JOINED.get(part.strip(), part.strip()).split("+")]
    for part in parts:
        if part not in PARTS:
            hint = layout_hint(part, LAYOUTS) or f"; there are {', '.join(LAYOUTS)}, and any joined by '+'"
            raise LayoutError(f"{at('layout')}: no layout {part!r}{hint}")
    for one, other in (("tensor", "sequence"), ("fsdp", "zero1"), ("sequence", "context")):
        if one in parts and other in parts:
            raise LayoutError(f"{at('layout')} {name!r}: {one!r} and {other!r} exclude each other; name one of them")
    return list(dict.fromkeys(parts))


def layout_hint(part: str, names: Collection[str]) -> str:
    """The end of an error about an unknown layout: the one that is meant, or "".

    >>> layout_hint("fsdp,tensor", LAYOUTS), layout_hint("TP", LAYOUTS)
    ("; join them by '+': fsdp+tensor", "; did you mean 'tensor'?")
    """
    if "," in part:
        return f"; join them by '+': {part.replace(',', '+').replace(' ', '')}"
    return nearest(_OF_OTHERS.get(part.lower(), part), names)


def _axes(name: str, parts: list[str], mesh: Mesh) -> list[str]:
    """The mesh axis of each part."""
    if len(parts) == 1 and len(mesh) == 1:
        return list(mesh.axes)
    chosen_axes: list[str] = []
    for part in parts:
        free = [axis for axis in PARTS[part] if axis in mesh and axis not in chosen_axes]
        shared = [axis for axis in chosen_axes if part in _SHARING and axis in PARTS[part]]
        if not free and not shared:
            raise LayoutError(
                f"{at('layout')} {name!r}: {part!r} needs an axis {' or '.join(map(repr, PARTS[part]))}, "
                f"but the mesh is {mesh}"
            )
        own = [axis for axis in free if part != "expert" or axis == part]
        chosen_axes.append((own or shared or free)[0])
    return chosen_axes


def _tensor_dims(config: TransformerConfig, axis: str, size: int) -> list[str]:
    """The dims split over the tensor axis: key heads, or groups of query heads if there are too few key heads."""
    heads = {config.attention_of(window) for window in config.windows}
    memory = {h.query if h.memory == 1 else h.memory for h in heads}
    groups = {h.group for h in heads if 1 < h.memory < h.query}
    dims = []
    faults = []
    if all(n % size == 0 for n in memory):
        dims.append("heads")
    elif len(groups) == len(heads) and all(n % size == 0 for n in groups):
        dims.append("group")
    else:
        counts = [f"{n} % {size} = {n % size}" for n in sorted(memory)]
        counts += [f"groups of {n} queries, {n} % {size} = {n % size}" for n in sorted(groups)]
        faults.append(f"heads: {'; '.join(counts)}; use a size that divides one of them")
    for dim, held in _wide_dims(config):
        dims += [dim] if dim not in dims else []
        if held % size:
            padded = -(-held // size) * size
            faults.append(f"{dim}: {held} % {size} = {held % size}; use {setting(dim, padded)}")
    if faults:
        raise LayoutError.listing(f"{at('layout')}: {config.name} does not divide over axis {axis!r} of {size}", faults)
    return dims


def _wide_dims(config: TransformerConfig) -> list[tuple[str, int]]:
    """Hidden features of feed-forward blocks and experts, and the vocabulary."""
    e = config.experts
    wide = [("d_ff", config.d_ff)] if e is None or not all(kind.experts for kind in config.kinds) else []
    if e is not None:
        wide += [("expert_d_ff", e.d_ff), *([("d_ff", e.shared * e.d_ff)] if e.shared else [])]
    return [*wide, ("vocab", config.vocab)]


def _expert_rules(config: TransformerConfig, axes: Mapping[str, str], mesh: Mesh) -> list[LayoutRules]:
    """Rules that split experts over their axis, which also splits the batch."""
    axis, e = axes["expert"], config.experts
    size = mesh.axis_size(axis)
    if e is None:
        raise LayoutError(f"{at('layout')}: {config.name} has no experts to lay on axis {axis!r}")
    if e.count % size:
        raise LayoutError(
            f"{at('layout')}: {config.name} does not divide over axis {axis!r} of {size}\n"
            f"  experts: {e.count} % {size} = {e.count % size}; use an axis whose size divides {e.count}"
        )
    rules = LayoutRules(f"experts:{axis}")
    shared = axis in (other for part, other in axes.items() if part != "expert")
    return [rules] if shared else [data_parallel(axis=axis), rules]


def _over_axes(rules: LayoutRules, config: TransformerConfig, axes: Mapping[str, str], mesh: Mesh) -> LayoutRules:
    """`rules` with fully sharded weights split over the axes of experts and of the sequence as well."""
    if "fsdp" not in axes:
        return rules
    sharded = [axes["fsdp"]]
    for axis in dict.fromkeys(axes[part] for part in ("expert", "context") if part in axes):
        if axis not in sharded and config.d_model % prod(map(mesh.axis_size, [*sharded, axis])) == 0:
            sharded.append(axis)
    over = Rule("d_model", tuple(sharded), optional=True)
    return LayoutRules([over if r.dim == "d_model" and r.optional else r for r in rules.rules])


def _weight_dims(config: TransformerConfig, axis: str, size: int) -> list[str]:
    """The dims of fully sharded weights: d_model, and the dims of biases and latent vectors that the axis divides."""
    if config.d_model % size:
        raise LayoutError(
            f"{at('layout')}: {config.name} does not divide over axis {axis!r} of {size}: "
            f"d_model: {config.d_model} % {size} = {config.d_model % size}; use a smaller axis and a 'data' axis "
            f"beside it"
        )
    biased = {"vocab": config.head == "transform", "d_ff": config.bias, "expert_d_ff": config.bias}
    others = {dim: held for dim, held in _wide_dims(config) if biased[dim]}
    if config.latent is not None:
        others |= {"kv_rank": config.latent.kv_rank}
        others |= {"q_rank": config.latent.q_rank} if config.latent.q_rank is not None else {}
    return ["d_model", *(dim for dim, held in others.items() if held % size == 0)]


def _stage_rules(config: TransformerConfig, axis: str, size: int) -> LayoutRules:
    """Rules for pipeline stages, of equal or different numbers of layers, and for microbatches around them."""
    front, faults = config.dense_front, []
    uneven = config.kind == "decoder" and config.experts is None and config.layers >= size
    for name, count in stacks(config):
        count -= front
        if count % size and not uneven:
            fitting = [n for n in range(1, size + 1) if count % n == 0]
            which = f"{name} behind {front} dense ones" if front else name
            faults.append(
                f"{which}: {count} % {size} = {count % size}; use {counted(fitting[-1], 'stage')}, or "
                f"{setting(name, front + -(-count // size) * size)}"
            )
    if faults:
        where = f"{at('layout')}: {config.name} does not divide over axis {axis!r} of {size}"
        raise LayoutError.listing(where, faults)
    return LayoutRules([("stage", axis), ("microbatch", axis)])


def _slots(config: TransformerConfig) -> list[str]:
    """The dims of cache slots."""
    return ["cache_length", *(["source_length"] if config.encoder_decoder else [])]


_RULES: dict[str, Callable[[TransformerConfig, str, int], LayoutRules]] = {
    "data": lambda config, axis, size: data_parallel(axis=axis),
    "fsdp": lambda config, axis, size: fully_sharded(dims=_weight_dims(config, axis, size), axis=axis),
    "zero1": lambda config, axis, size: zero1(dims=_weight_dims(config, axis, size), axis=axis),
    "tensor": lambda config, axis, size: model_parallel(_tensor_dims(config, axis, size), axis),
    "sequence": lambda config, axis, size: sequence_parallel(_tensor_dims(config, axis, size), axis=axis),
    "context": lambda config, axis, size: context_parallel(axis=axis),
    "pipeline": lambda config, axis, size: _stage_rules(config, axis, size),
    "cache": lambda config, axis, size: LayoutRules({f"{dim}": f"{axis}?" for dim in _slots(config)}),
}


def usual_layouts(config: TransformerConfig, devices: int, batch: int, stages: int = 1) -> list[tuple[str, str]]:
    """Common layouts of a model as starting points: (name, mesh), as arguments of `mtf.models.layout`.

    Args:
      config: the model. devices: number of devices. batch: sequences per step; if there are fewer than devices, several
        devices share a sequence. stages: of a pipeline, each with its share of the devices; then `batch` is the
        number of sequences in a microbatch.
    Returns: fully sharded data parallelism, alone or with an axis for sequences that devices share, and with an axis
      for the heads or experts (and sequences that devices share), or for heads and sequence; without duplicates.
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
        if config.experts.form != "grouped":  # others gather the weights of all experts, unless these are split
            usual.reverse()
    for axis, size in usual:
        several = context if axis == "expert" else 1  # an axis for experts splits the batch, which must be large enough
        size = gcd(size, devices // several)
        if axis in ("tensor", "sequence"):
            several = devices // size // gcd(devices // size, batch)
        if axis == "sequence" and several > 1:  # it excludes "context"
            continue
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
