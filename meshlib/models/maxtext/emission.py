"""A plan as MaxText's KEY=VALUE lines: the keys that differ from defaults, and what can't be expressed.

The written keys are read back and compared with the plan; every difference is reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

from hardware.slices import Slice
from layouts import Dimension, LayoutRules, Mesh, Rule, Shape
from layouts.errors import LayoutError
from meshlib.core.errors import GraphError, MeshlibError
from meshlib.layers.experts import EINSUM_TOKENS
from meshlib.layers.routing import Routing
from meshlib.models.config import TransformerConfig
from meshlib.models.config_parts import Experts
from meshlib.models.maxtext.keys import AXES, DEFAULT_RULES, PARTS, READ, LogicalRule
from meshlib.models.maxtext.model_keys import model_keys
from meshlib.models.maxtext.remat import POLICIES, named, policy
from meshlib.models.maxtext.rules import ACTIVATIONS, weights
from meshlib.models.maxtext.run import MaxTextRun
from meshlib.models.maxtext.settings import RULES, Settings
from meshlib.ops.control.remat import Policy

PLAN = "plan"
# Axis names of the library's layouts -> MaxText's.
NAMES: Mapping[str, str] = {"model": "tensor", "pipe": "stage"}


@dataclass(frozen=True)
class Emission:
    """Keys with their values, and the features of a plan that they do not express."""

    keys: Mapping[str, Any]
    missing: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """KEY=VALUE arguments of MaxText's command line."""
        return tuple(f"{key}={value_text(value)}" for key, value in self.keys.items())

    def __str__(self) -> str:
        return "\n".join([*self.lines, *(f"# not expressed: {what}" for what in self.missing)])


def value_text(value: Any) -> str:
    """A value in the syntax of MaxText's command line: lists without blanks.

    >>> value_text([["embed", ["fsdp"]]]), value_text(True), value_text(1e-6)
    ("[['embed',['fsdp']]]", 'true', '1e-06')
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ",".join(value_text(v) if isinstance(v, list | tuple) else repr(v) for v in value) + "]"
    return f"{value}"


def emission_of(
    config: TransformerConfig,
    mesh: Mesh,
    layout: LayoutRules,
    where: Slice,
    batch: int,
    length: int,
    remat: Policy = "full",
    across: Mapping[str, int] | None = None,
    max_norm: float | None = None,
    slots_on_host: bool = False,
) -> Emission:
    """MaxText's keys for a training step with AdamW in the dtype of the weights.

    Args:
      config, batch, length, remat, max_norm: as in `mtf.models.train_step`.
      mesh, layout: of the plan, with the library's axes or MaxText's.
      where: the slice. across: the part of each mesh axis across slices; by default the first axes.
      slots_on_host: whether AdamW's slots are in host memory.
    Returns: keys whose values differ from MaxText's defaults, and the features that they do not express.
    """
    sequence = {axis for rule in layout.rules if rule.dim == "length" and rule.optional for axis in rule.axes}
    renames = _renames(mesh, sequence, layout)
    theirs = Mesh({renames[axis]: size for axis, size in mesh.sizes_by_axis.items()})
    rules = LayoutRules([Rule(r.dim, tuple(renames.get(a, a) for a in r.axes), r.optional, r.scope, r.whole)
                         for r in layout.rules])  # fmt: skip
    config = _with_resolved_experts(config, length)
    keys, missing = model_keys(config)
    keys |= _mesh_keys(theirs, where, {renames[a]: n for a, n in (across or {}).items()})
    keys |= {"per_device_batch_size": _each(batch, where), "max_target_length": length}
    remat_keys = named(remat, config)
    if remat_keys is None:
        missing.append(f"recomputation {remat!r}")
    keys |= remat_keys or {}
    keys["gradient_clipping_threshold"] = max_norm or 0.0
    keys["optimizer_memory_host_offload"] = slots_on_host
    keys |= _numerics(config, missing)
    if any(rule.scope == "slots" for rule in rules.rules):
        keys["shard_optimizer_over_data"] = True
    keys |= _rule_keys(config, rules, theirs, keys, where, missing)
    kept_keys = {key: value for key, value in keys.items() if value != READ[key]}
    missing += _differences(kept_keys, config, theirs, rules, where, (batch, length), remat)
    return Emission(kept_keys, tuple(dict.fromkeys(missing)))


def _with_resolved_experts(config: TransformerConfig, length: int) -> TransformerConfig:
    """The config with defaults of experts resolved for this sequence length: the form, and no least capacity if that
    has no effect."""
    e = config.experts
    if e is None:
        return config
    tokens = e.routing.group_size or length
    routing = replace(e.routing, min_expert_capacity=1)
    if e.form != "grouped" and routing.places(e.count, tokens) != e.routing.places(e.count, tokens):
        routing = e.routing
    short = e.form is None and routing.capacity_factor is not None and tokens <= EINSUM_TOKENS
    return config.replace(experts=replace(e, routing=routing, form="einsum" if short else e.form))


def _renames(mesh: Mesh, sequence: set[str], layout: LayoutRules) -> dict[str, str]:
    """MaxText's axis for each mesh axis: by name, otherwise by the dims that it splits."""
    renames: dict[str, str] = {}
    for axis in mesh.axes:
        name = NAMES.get(axis, axis)
        if name == "tensor" and axis in sequence:
            name = "tensor_sequence"
        if name not in AXES:
            name = _by_role(axis, layout)
        if name in renames.values():
            name = next(other for other in AXES if other not in renames.values())
        renames[axis] = name
    return renames


def _by_role(axis: str, layout: LayoutRules) -> str:
    dims = {rule.dim for rule in layout.rules if axis in rule.axes}
    for dim, name in (("experts", "expert"), ("stage", "stage")):
        if dim in dims:
            return name
    if "batch" in dims:
        return "fsdp" if "d_model" in dims else "data"
    return "context" if dims == {"length"} else "tensor_sequence" if "length" in dims else "tensor"


def _each(batch: int, where: Slice) -> float | int:
    each = batch / where.devices
    return int(each) if each.is_integer() else each


def _mesh_keys(mesh: Mesh, where: Slice, across: Mapping[str, int]) -> dict[str, Any]:
    """Axis sizes within and across slices; the order of the axes if it is not MaxText's."""
    sizes, left = dict(mesh.sizes_by_axis), where.slices
    joining = dict(across)
    if not joining:
        for axis, size in sizes.items():
            part = max(n for n in range(1, left + 1) if left % n == 0 and size % n == 0)
            joining, left = joining | {axis: part}, left // part
    keys: dict[str, Any] = {}
    for axis, size in sizes.items():
        part = joining.get(axis, 1)
        if axis != "fsdp":
            keys[f"ici_{PARTS[axis]}_parallelism"] = size // part
        if axis != "data":
            keys[f"dcn_{PARTS[axis]}_parallelism"] = part
    several = [axis for axis, size in sizes.items() if size > 1]
    if several != [axis for axis in AXES if axis in several]:
        keys["mesh_axes"] = [*several, *(axis for axis in AXES if axis not in several)]
    return keys


def _numerics(config: TransformerConfig, missing: list[str]) -> dict[str, Any]:
    n = config.numerics
    if n.slice_dtype is not None and n.slice_dtype != n.variable_dtype:
        missing.append(f"devices store variables in {n.slice_dtype}, which are {n.variable_dtype} otherwise")
    precision = {"default": "", "highest": ""}.get(n.precision, n.precision)
    limits = "absmax" if n.bound is None else f"fixed,-{n.bound:g},{n.bound:g}"
    return {
        "weight_dtype": n.variable_dtype,
        "dtype": n.activation_dtype or n.variable_dtype,
        "quantization": precision,
        **dict.fromkeys(("act_quantization_calibration_method", "weight_quantization_calibration_method"), limits),
    }


# ------------------------------------------------------------ rules


def _rule_keys(
    config: TransformerConfig, rules: LayoutRules, mesh: Mesh, keys: Mapping[str, Any], where: Slice, missing: list[str]
) -> dict[str, Any]:
    """`logical_axis_rules` if the default ones do not give the layout."""
    try:
        if _same(_read({**keys}).layout_on(where), rules):
            return {}
    except MeshlibError:
        pass  # the default rules do not divide
    wanted = _required_axes(config, rules, mesh, missing)
    several = set(mesh.axes)
    default: dict[str, list[tuple[str, ...]]] = {}
    for name, axes in DEFAULT_RULES:
        default.setdefault(name, []).append(tuple(axis for axis in axes if axis in several))
    changed = [
        [name, [*axes]]
        for name, options in wanted.items()
        if _options(options) != _options(default.get(name, []))
        for axes in _options(options)
    ]
    return {RULES: changed} if changed else {}


Wanted: TypeAlias = dict[str, list[tuple[str, ...]]]  # by name of MaxText's dim


def _required_axes(config: TransformerConfig, rules: LayoutRules, mesh: Mesh, missing: list[str]) -> Wanted:
    """The axes of each of MaxText's logical dims in the plan, the longest alternatives first."""
    wanted: Wanted = {}
    _want_weights(wanted, config, rules, mesh, missing)
    _want_activations(wanted, config, rules, mesh)
    _want(wanted, "activation_kv_heads", wanted["activation_heads"][0])
    _want(wanted, "activation_batch_moe", wanted["activation_batch"][0])
    _want(wanted, "activation_embed_and_logits_batch", wanted["activation_batch"][0])
    length = [r for r in rules.for_dim("length") if r.dim == "length"]
    whole = length[0].axes if length else ()
    _want(wanted, "activation_norm_length", whole)
    in_context = tuple(a for a in whole if not length[0].optional or a.startswith("context"))
    _want(wanted, "activation_length", in_context)
    return wanted


def _want(wanted: Wanted, name: str, axes: tuple[str, ...]) -> None:
    options = wanted.setdefault(name, [])
    if axes not in options:
        options.append(axes)
        options.sort(key=len, reverse=True)


def _want_weights(
    wanted: Wanted, config: TransformerConfig, rules: LayoutRules, mesh: Mesh, missing: list[str]
) -> None:
    """Add the axes of the dims of all weights; faults of weights that can't be split so are added to `missing`."""
    for tensor in weights(config).values():
        shape = Shape([Dimension(dim, mesh.size) for dim, _ in tensor if dim])
        try:
            sharding = rules.sharding(shape, mesh, "variables")
        except LayoutError as fault:
            missing.append(str(fault).splitlines()[0])
            continue
        for dim, name in tensor:
            _want(wanted, name, sharding.of(dim) if dim else ())


def _want_activations(wanted: Wanted, config: TransformerConfig, rules: LayoutRules, mesh: Mesh) -> None:
    """Add the axes of the dims of activations that the model has."""
    dims = {dim for tensor in weights(config).values() for dim, _ in tensor} | {"batch"}
    for dim, name in ((dim, name) for dim, name in ACTIVATIONS.items() if dim in dims):
        beside = "batch_unsplit" if dim in ("experts", "expert_d_ff") else "batch"
        shape = Shape([Dimension(d, mesh.size) for d in dict.fromkeys((beside, dim))])
        _want(wanted, name, rules.fitting(shape, mesh, "activations").of(dim))


def _options(options: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Distinct alternatives for a dim; unsplit only if there is no other."""
    return [axes for axes in dict.fromkeys(options) if axes] or [()]


def _same(one: LayoutRules, other: LayoutRules) -> bool:
    """True if both have the same rules, ignoring optional ones shadowed by a required one."""

    def used(rules: LayoutRules) -> set[str]:
        required = {(r.dim, r.scope) for r in rules.rules if not r.optional}
        return {str(r) for r in rules.rules if not r.optional or (r.dim, r.scope) not in required}

    return used(one) == used(other)


# ------------------------------------------------------------ reading back


def _read(keys: Mapping[str, Any]) -> MaxTextRun:
    """The run that these keys describe, over MaxText's defaults."""
    rules: tuple[LogicalRule, ...] = DEFAULT_RULES
    if RULES in keys:
        names = {name for name, _ in keys[RULES]}
        rules = (
            *(rule for rule in DEFAULT_RULES if rule[0] not in names),
            *((name, tuple(axes)) for name, axes in keys[RULES]),
        )
    return MaxTextRun(Settings(PLAN, {**keys}, {}, rules))


def _differences(
    keys: Mapping[str, Any],
    config: TransformerConfig,
    mesh: Mesh,
    rules: LayoutRules,
    where: Slice,
    sizes: tuple[int, int],
    remat: Policy,
) -> list[str]:
    """Differences between the run read back and the plan."""
    try:
        run = _read(keys)
        read_back = run.config
        out = [
            f"{_ABOUT.get(name, '')}{name}: {ours!r:.60} in the plan, {theirs!r:.60} in MaxText"
            for (name, ours), (_, theirs) in zip(_plain(config), _plain(read_back), strict=True)
            if ours != theirs
        ]
        if run.mesh(where) != mesh and mesh.size > 1:
            out.append(f"mesh: {mesh} in the plan, {run.mesh(where)} in MaxText")
        if not _same(run.layout_on(where), rules):
            out.append(f"layout: {rules} in the plan, {run.layout_on(where)} in MaxText")
        out += [f"weights laid out in another way: {', '.join(w)}" for w in [run.translation(where).differing] if w]
        if (run.batch(where), run.length) != sizes:
            out.append(f"batch: {sizes[0]} sequences in the plan, {run.batch(where)} in MaxText")
        ours = policy(config, *POLICIES["minimal"]) if remat == "matmuls" else remat
        if run.remat != ours:
            out.append(f"recomputation: {ours!r} in the plan, {run.remat!r} in MaxText")
    except GraphError as fault:
        return [str(fault)]
    return out


# Descriptions of fields whose names are unclear.
_ABOUT = {"experts.form": "how tokens reach experts (None: products with masks for short groups, else look-ups), "}


# Fields that affect neither the computation's cost nor storage: angles, constants of losses and norms.
FREE = (
    *("name", "norm_epsilon", "attention_scale", "rope_theta", "local_rope_theta"),
    *("label_smoothing", "relative_buckets", "relative_max_distance", "segments", "experts.routing.loss_coef"),
    *("experts.routing.group_score", "experts.routing.renormalise"),
)


def _plain(config: TransformerConfig) -> list[tuple[str, Any]]:
    """Fields for comparison: derived defaults resolved, and those of experts one by one."""
    derived: dict[str, Any] = {
        "kv_heads": config.memory_heads,
        "attention_bias": config.has_attention_bias,
        "attention_out_bias": config.has_attention_out_bias,
        "max_length": config.max_length if config.position == "learned" else None,
        "experts": config.experts is not None,
    }
    pairs = [(f.name, derived.get(f.name, getattr(config, f.name))) for f in fields(config)]
    experts = config.experts or Experts(count=1, d_ff=1, routing=Routing(top_k=1))
    for prefix, record in (("experts", experts), ("experts.routing", experts.routing)):
        pairs += [(f"{prefix}.{f.name}", getattr(record, f.name)) for f in fields(record) if f.name != "routing"]
    return [(name, value) for name, value in pairs if name not in FREE]
