"""The mesh of a MaxText configuration on a slice, and its logical axis rules as this library's layout rules.

MaxText names the dims of every weight and activation, and applies its rules in order: a rule gives its axes to a dim of
that name unless the dim already has axes or another dim of the tensor has one of them. Rules here apply to dims of all
tensors at once. So the axes of every tensor are computed as in MaxText, and rules are chosen that give the same axes to
each; if there are none, `Translation.differing` names the tensors.

Source: google/flax: flax/linen/spmd.py, _logical_to_mesh_axes; AI-Hypercomputer/maxtext: src/maxtext/layers for the
names of the dims of each weight, src/maxtext/configs/base.yml for the rules.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hardware.slices import Slice
from layouts import Dimension, LayoutRules, Mesh, Rule, Shape
from layouts.errors import LayoutError
from meshlib.core.errors import nearest
from meshlib.core.text import counted
from meshlib.models.config import TransformerConfig
from meshlib.models.layouts import with_unsplit
from meshlib.models.maxtext.keys import DEFAULT_RULES, PARTS, LogicalRule
from meshlib.models.maxtext.settings import RULES, Settings

UNUSED = "sequence"  # keys of axes that MaxText has removed and ignores
Named = tuple[tuple[str, str], ...]  # (dim here, MaxText's name) for each dim of a tensor
# Dims by which fully sharded weights are split: other dims take precedence.
YIELDING = ("d_model", "q_rank", "kv_rank")
WIDE = ("heads", "expert_d_ff", "d_ff", "vocab", "experts")


@dataclass(frozen=True)
class AxisSizes:
    """Sizes of all mesh axes in MaxText's order, within a slice and across slices."""

    ici: Mapping[str, int]
    dcn: Mapping[str, int]

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis, over all slices."""
        return {axis: self.ici[axis] * self.dcn[axis] for axis in self.ici}

    @property
    def mesh(self) -> Mesh:
        """The axes with more than one device; a single-device axis if there is none."""
        several = {axis: size for axis, size in self.sizes.items() if size > 1}
        return Mesh(several or {"data": 1})

    @property
    def across(self) -> dict[str, int]:
        """The part of each axis across slices, as `placement` of `mtf.estimate`."""
        return {axis: size for axis, size in self.dcn.items() if size > 1}


def axes_of(s: Settings, where: Slice) -> AxisSizes:
    """The mesh axes on a slice.

    Raises: GraphError for sizes whose product is not that of the slice, more than one -1, and axes without a MaxText
    key.
    """
    names = s["mesh_axes"]
    if not isinstance(names, list | tuple) or not names:
        s.fail("mesh_axes", "must be a list of axes")
    for axis in names:
        if axis not in PARTS:
            s.fail("mesh_axes", f"there is no axis {axis!r}{nearest(str(axis), PARTS)}; MaxText has {', '.join(PARTS)}")
    if len(set(names)) < len(names):
        s.fail("mesh_axes", "names an axis twice")
    for axis, part in PARTS.items():
        for kind in ("ici", "dcn"):
            size = s.size(f"{kind}_{part}_parallelism", -1)
            if not size:
                s.fail(f"{kind}_{part}_parallelism", "must be at least 1, or -1 for the rest")
            absent = axis not in names and part not in [PARTS[name] for name in names]
            if size != 1 and absent and axis != UNUSED and kind == "ici":
                s.fail(f"{kind}_{part}_parallelism", f"mesh_axes has no axis {axis!r}: it has {', '.join(names)}")
    within = where.devices // where.slices
    return AxisSizes(_filled(s, "ici", names, within, where), _filled(s, "dcn", names, where.slices, where))


def _filled(s: Settings, kind: str, names: Sequence[str], total: int, where: Slice) -> dict[str, int]:
    keys = {axis: f"{kind}_{PARTS[axis]}_parallelism" for axis in names}
    sizes = {axis: s.size(key, -1) for axis, key in keys.items()}
    what = f"{counted(total, 'device')} of a slice" if kind == "ici" else counted(total, "slice")
    left = [axis for axis, size in sizes.items() if size == -1]
    given = math.prod(size for size in sizes.values() if size > 0)
    if kind == "dcn" and total == 1:  # MaxText ignores them on one slice, unless more are requested
        most = max(sizes, key=lambda axis: sizes[axis])
        if given > 1:
            s.fail(keys[most], f"{where.name} is one slice: {_shown(sizes, keys)} asks for {given}")
        return dict.fromkeys(names, 1)
    if len(left) > 1:
        s.fail(keys[left[1]], f"only one {kind}_* may be -1, and {keys[left[0]]} is already")
    if left:
        if total % given:
            s.fail(
                keys[left[0]],
                f"{_shown(sizes, keys)} leaves {total} % {given} = {total % given} of the {what} of {where.name}",
            )
        sizes[left[0]] = total // given
    elif given != total:
        most = max(sizes, key=lambda axis: (sizes[axis], keys[axis] in s.values, axis == "data"))
        s.fail(
            keys[most],
            f"the product of {_shown(sizes, keys) or f'all {kind}_*'} is {given}, but {where.name} has {what}",
        )
    return sizes


def _shown(sizes: Mapping[str, int], keys: Mapping[str, str]) -> str:
    return ", ".join(f"{keys[axis]}={size}" for axis, size in sizes.items() if size > 1)


# Dims of activations -> MaxText's name.
ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "batch": "activation_batch", "heads": "activation_heads", "d_ff": "activation_mlp", "vocab": "activation_vocab",
        "expert_d_ff": "activation_mlp_moe", "experts": "activation_exp", "d_model": "activation_embed",
    }
)  # fmt: skip


def weights(config: TransformerConfig) -> dict[str, Named]:
    """The weights of a model: dims here, and MaxText's names. Norms and other biases follow them."""
    axes_of_weight: dict[str, Named] = {"embedding": (("vocab", "vocab"), ("d_model", "embed_vocab"))}
    if not config.tied:
        axes_of_weight["head"] = (("d_model", "embed_vocab"), ("vocab", "vocab"))
    if config.latent is None:
        axes_of_weight |= {
            "query": (("d_model", "embed"), ("heads", "q_heads"), ("head_dim", "kv")),
            "key and value": (("d_model", "embed"), ("heads", "kv_heads"), ("head_dim", "kv_head_dim")),
        }
        if config.memory_heads == 1 < config.heads:
            axes_of_weight["key and value"] = (("d_model", "embed"), ("", "kv_heads"), ("head_dim", "kv_head_dim"))
    else:
        axes_of_weight |= {
            "wkv_a": (("d_model", "embed"), ("kv_rank", "kv_lora_up_proj")),
            "wkv_b": (("kv_rank", "kv_lora"), ("heads", "kv_heads"), ("head_dim", "kv_head_dim")),
        }
        if config.latent.q_rank is None:
            axes_of_weight["query"] = (("d_model", "embed"), ("heads", "q_heads"), ("head_dim", "kv"))
        else:
            axes_of_weight["wq_a"] = (("d_model", "embed"), ("q_rank", "q_lora_up_proj"))
            axes_of_weight["wq_b"] = (("q_rank", "q_lora"), ("heads", "q_heads"), ("head_dim", "kv"))
    axes_of_weight["out"] = (("heads", "heads"), ("head_dim", "kv"), ("d_model", "embed"))
    kinds = {kind.experts for kind in config.kinds}
    if False in kinds or (config.experts is not None and config.experts.shared):
        axes_of_weight["mlp"] = (("d_model", "embed"), ("d_ff", "mlp"))
    if config.bias and "mlp" in axes_of_weight:
        axes_of_weight["mlp bias"] = (("d_ff", "mlp"),)
    if config.experts is not None:
        axes_of_weight["experts"] = (("experts", "exp"), ("d_model", "embed_moe"), ("expert_d_ff", "mlp_moe"))
        if config.bias:
            axes_of_weight["experts' bias"] = (("experts", "exp"), ("expert_d_ff", "activation_mlp"))
    return axes_of_weight


def assigned(rules: Iterable[LogicalRule], names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each dim of a tensor under MaxText's rules.

    >>> assigned([("mlp", ("tensor",)), ("embed", ("fsdp", "tensor")), ("embed", ("fsdp",))], ["embed", "mlp"])
    (('fsdp',), ('tensor',))
    """
    axes_of_place: dict[int, tuple[str, ...]] = {}
    for name, axes in rules:
        if name in names:
            place = names.index(name)
            used_axes = {axis for other in axes_of_place.values() for axis in other}
            if place not in axes_of_place and not used_axes & {*axes}:
                axes_of_place[place] = axes
    return tuple(axes_of_place.get(n, ()) for n in range(len(names)))


@dataclass(frozen=True)
class Translation:
    """Layout rules, and the weights that they shard differently from MaxText."""

    layout: LayoutRules
    differing: tuple[str, ...] = ()


def _longest(per_weight: Iterable[Mapping[str, tuple[str, ...]]]) -> dict[str, tuple[str, ...]]:
    """The most axes that any weight gives to each dim."""
    longest: dict[str, tuple[str, ...]] = {}
    for axes_of_dim in per_weight:
        for dim, axes in axes_of_dim.items():
            if dim and len(axes) >= len(longest.get(dim, ())):
                longest[dim] = axes
    return longest


def translated(s: Settings, config: TransformerConfig, axes: AxisSizes, pipelined: bool) -> Translation:
    """The layout of a configuration on a mesh.

    Raises: GraphError for rules with axes that the mesh lacks, and heads that do not divide.
    """
    rules = _checked(s, axes)
    sizes = axes.sizes
    several = {axis for axis, size in sizes.items() if size > 1}

    def used(axes_of_dim: Sequence[str]) -> tuple[str, ...]:
        return tuple(axis for axis in axes_of_dim if axis in several)

    per_weight = {
        what: {dim: used(got) for (dim, _), got in zip(named, assigned(rules, [n for _, n in named]), strict=True)}
        for what, named in weights(config).items()
    }
    _check_heads(s, config, per_weight, sizes)
    variables = _longest(per_weight.values())
    activations = {dim: used(assigned(rules, [name])[0]) for dim, name in ACTIVATIONS.items()}
    length = used(assigned(rules, ["activation_length"])[0])
    normed = used(assigned(rules, ["activation_norm_length"])[0])
    yielding = {
        dim
        for axes_of_dim in per_weight.values()
        for dim, got in axes_of_dim.items()
        if dim and len(got) < len(variables[dim])
    }
    layout_rules = _rules(variables, activations, yielding, (length, normed))
    if s.flag("shard_optimizer_over_data") and "data" in several:
        layout_rules.append(Rule("d_model", ("data", *variables.get("d_model", ())), optional=True, scope="slots"))
    if pipelined and "stage" in several:
        layout_rules += [Rule("stage", ("stage",)), Rule("microbatch", ("stage",))]
    layout = with_unsplit(LayoutRules(_used_by(config, layout_rules)), config)
    return Translation(layout, tuple(_differing(layout, per_weight, axes.mesh)))


def _rules(
    variables: Mapping[str, tuple[str, ...]],
    activations: Mapping[str, tuple[str, ...]],
    yielding: Collection[str],
    lengths: tuple[tuple[str, ...], tuple[str, ...]],
) -> list[Rule]:
    """One rule per dim if weights and activations agree, otherwise one for each; optional if other dims take
    precedence."""
    length, normed = lengths
    layout_rules = [Rule("batch", activations["batch"])] if activations["batch"] else []
    for dim in (*YIELDING, *(d for d in WIDE if d in yielding)):
        of_weights, of_values = variables.get(dim, ()), activations.get(dim, ())
        if of_weights == of_values:
            layout_rules += [Rule(dim, of_weights, optional=True)] if of_weights else []
            continue
        scope = "variables" if of_values else None
        layout_rules += [Rule(dim, of_weights, optional=True, scope=scope)] if of_weights else []
        layout_rules += [Rule(dim, of_values, optional=True, scope="activations")] if of_values else []
    for dim in (d for d in WIDE if d not in yielding):
        of_weights, of_values = variables.get(dim, ()), activations.get(dim, ())
        if of_weights == of_values:
            layout_rules += [Rule(dim, of_weights)] if of_weights else []
            continue
        layout_rules += [Rule(dim, of_weights, scope="variables")] if of_weights else []
        layout_rules += [Rule(dim, of_values, scope="activations")] if of_values else []
    if normed == length:
        return [*layout_rules, *([Rule("length", length)] if length else [])]
    both = tuple(dict.fromkeys((*normed, *length)))
    return [*layout_rules, Rule("length", both, optional=True)]


def _used_by(config: TransformerConfig, rules: list[Rule]) -> list[Rule]:
    """The rules for dims that the model has."""
    dims = {dim for named in weights(config).values() for dim, _ in named}
    always = {"batch", "length", "d_model", "stage", "microbatch"}
    return [rule for rule in rules if rule.dim in dims | always]


def _differing(layout: LayoutRules, per_weight: Mapping[str, Mapping[str, tuple[str, ...]]], mesh: Mesh) -> list[str]:
    """The weights whose axes differ between the layout and MaxText, with both."""
    out = []
    for what, wanted in per_weight.items():
        shape = Shape([Dimension(dim, mesh.size) for dim in wanted if dim])
        try:
            sharding = layout.sharding(shape, mesh, "variables")
        except LayoutError:
            out.append(what)
            continue
        if any({*sharding.of(dim)} != {*got} for dim, got in wanted.items() if dim):
            out.append(what)
    return out


def _checked(s: Settings, axes: AxisSizes) -> tuple[LogicalRule, ...]:
    default = set(DEFAULT_RULES)
    own = s["mesh_axes"] != [*PARTS][: len(s["mesh_axes"])]
    for name, given in s.rules:
        for axis in given:
            if axis not in PARTS or (axis not in axes.ici and (name, given) not in default and not own):
                known = axes.ici if axis in PARTS else PARTS
                s.fail(
                    RULES, f"the mesh has no axis {axis!r}{nearest(axis, known)}; it has {', '.join(axes.ici)}",
                    [name, [*given]],
                )  # fmt: skip
    return s.rules


def _check_heads(
    s: Settings,
    config: TransformerConfig,
    axes_of_dim: Mapping[str, Mapping[str, tuple[str, ...]]],
    sizes: Mapping[str, int],
) -> None:
    """Raise GraphError if key heads can't be split as the rules require, which MaxText refuses too."""
    if config.latent is not None:
        return
    over = axes_of_dim["key and value"].get("heads", axes_of_dim["key and value"].get("", ()))
    parts = 1
    for axis in over:
        parts *= sizes[axis]
    for held in {config.attention_of(window).memory for window in config.windows}:
        if held % parts:
            key = f"ici_{PARTS[over[0]]}_parallelism"
            s.fail(
                key, f"{held} heads of keys and values don't divide over {'+'.join(over)}: {held} % {parts} = "
                f"{held % parts}; use a size that divides {held}", sizes[over[0]],
            )  # fmt: skip
