"""A plan emitted for other libraries: Flax's logical axis rules, Haliax's axis mappings, PartitionSpecs, Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from hardware.slices import Slice
from layouts import LayoutRules, Sharding
from meshlib.core.errors import GraphError
from meshlib.models.config import TransformerConfig
from meshlib.models.images.presets import IMAGE_PRESETS
from meshlib.models.images.step import ImageConfig
from meshlib.models.maxtext.run import MaxTextRun
from meshlib.models.presets import PRESETS
from meshlib.models.train import source_texts
from meshlib.program.records import Program


@dataclass(frozen=True)
class Emitted:
    """Lines for a target, and the parts of the plan that the target cannot express."""

    lines: tuple[str, ...]
    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([*self.lines, *(f"# not expressed: {what}" for what in self.missing)])


def flax_rules(program: Program) -> Emitted:
    """Logical axis rules for `flax.linen.logical_axis_rules`, by this library's dim names.

    Flax goes through rules in order, and takes the first whose axes are free: required rules come first. One list is
    for parameters, one for activations, where they differ.

    >>> import meshlib as mtf
    >>> with mtf.Graph():
    ...     x = mtf.input("x", [mtf.Dimension("batch", 8), mtf.Dimension("d_model", 4)])
    ...     program = mtf.lower({"y": mtf.relu(x)}, mesh="data:2", layout="batch:data;d_model:data?")
    >>> print(flax_rules(program))
    mesh = jax.make_mesh((2,), ('data',))
    rules = (('batch', 'data'), ('d_model', 'data'))
    """
    layout = program.layout
    lists = {scope: _flax(layout, scope) for scope in ("variables", "activations", "slots")}
    lines = [_mesh(program)]
    if lists["variables"] == lists["activations"]:
        lines.append(f"rules = {lists['variables']!r}")
    else:
        lines += [f"parameter_rules = {lists['variables']!r}", f"activation_rules = {lists['activations']!r}"]
    if lists["slots"] != lists["variables"]:
        lines.append(f"optimizer_state_rules = {lists['slots']!r}")
    partial = [r for r in layout.rules if r.optional and len(r.axes) > 1 and not r.whole]
    missing = [f"{rule}: of several axes it takes those that are free; Flax takes all or none" for rule in partial
               if _conflicts(layout, rule.dim, rule.axes)]  # fmt: skip
    return Emitted(tuple(lines), tuple(missing))


def _flax(layout: LayoutRules, scope: str) -> tuple[tuple[str, str | tuple[str, ...] | None], ...]:
    rules = [r for dim in layout.dims for r in layout.for_dim(dim, scope)]
    ordered = sorted(rules, key=lambda rule: (rule.optional, layout.rules.index(rule)))
    return tuple((r.dim, None if not r.axes else r.axes[0] if len(r.axes) == 1 else r.axes) for r in ordered)


def _conflicts(layout: LayoutRules, dim: str, axes: tuple[str, ...]) -> bool:
    """True if another dim may have some, but not all, of the axes."""
    others = [{*r.axes} & {*axes} for r in layout.rules if r.dim != dim and r.dim != "batch"]
    return any(0 < len(shared) < len(axes) for shared in others)


def _mapping(scope: str, shardings: list[Sharding], missing: list[str]) -> dict[str, object]:
    """Dim -> the most axes that split it in any of these shardings; other splits of it are added to `missing`."""
    axes_of: dict[str, tuple[str, ...]] = {}
    of_dims = [(sharding, dim, sharding.of(dim)) for sharding in shardings for dim in sharding.shape.names]
    for _, dim, axes in of_dims:
        if axes and len(axes) > len(axes_of.get(dim, ())):
            axes_of[dim] = axes
    missing += [
        f"{scope}: {dim} of {sharding} is split over {'+'.join(axes) or 'nothing'}"
        for sharding, dim, axes in of_dims
        if axes != axes_of.get(dim, ())
    ]
    return {dim: axes[0] if len(axes) == 1 else axes for dim, axes in axes_of.items()}


def haliax_mappings(program: Program) -> Emitted:
    """Haliax `axis_mapping`s: one for parameters, one for activations; each axis of an array appears once.

    Haliax has no optional rules: where dims of one array share a mesh axis, the parameter mapping names one.
    """
    layout = program.layout
    missing: list[str] = []

    of_parameters = _mapping("parameters", [v.sharding for v in program.variables.values()], missing)
    compute = {dim: layout.for_dim(dim, "activations") for dim in layout.dims}
    of_values = {dim: r[0].axes[0] if len(r[0].axes) == 1 else r[0].axes for dim, r in compute.items()
                 if r and r[0].axes and not r[0].optional}  # fmt: skip
    batch = {axis for rule in layout.for_dim("batch", "activations") for axis in rule.axes}
    missing += [
        f"compute: {rule} yields to other dims of an array, which a mapping can't"
        for dim in layout.dims for rule in layout.for_dim(dim, "activations")
        if rule.optional and not {*rule.axes} <= batch
    ]  # fmt: skip
    lines = (_mesh(program), f"param_mapping = {of_parameters!r}", f"compute_mapping = {of_values!r}")
    return Emitted(lines, tuple(dict.fromkeys(missing)))


def partition_specs(program: Program) -> Emitted:
    """A `jax.sharding.PartitionSpec` for each parameter and optimizer slot, by its name in this library."""
    lines = [_mesh(program), "from jax.sharding import PartitionSpec as P", "specs = {"]
    for name, variable in program.variables.items():
        sharding = variable.sharding
        entries = [sharding.of(dim) for dim in sharding.shape.names]
        while entries and not entries[-1]:
            entries.pop()
        inner = ", ".join("None" if not e else repr(e[0]) if len(e) == 1 else repr(e) for e in entries)
        lines.append(f"    {name!r}: P({inner}),  # {', '.join(sharding.shape.names)}")
    return Emitted((*lines, "}"))


def _mesh(program: Program) -> str:
    sizes, axes = program.mesh.sizes, program.mesh.axes
    return f"mesh = jax.make_mesh({tuple(sizes)!r}, {tuple(axes)!r})"


def python_lines(
    program: Program,
    where: Slice,
    config: TransformerConfig | ImageConfig | None = None,
    sizes: Mapping[str, int] | None = None,
    run: MaxTextRun | None = None,
    options: Mapping[str, object] | None = None,
) -> Emitted:
    """Python lines that build the plan's program with this library and estimate it; options as of `step_arguments`."""
    lines = ["import meshlib as mtf", ""]
    if run is not None:
        given = ", ".join(f"{key!r}: {value!r}" for key, value in run.overrides.items())
        lines += [
            f"run = mtf.models.read_maxtext({run.settings.path!r}, {{{given}}})",
            f"program = run.program({where.name!r})",
            f"print(mtf.estimate(program, run.slice({where.name!r}), placement=run.placement({where.name!r})).table())",
        ]
        return Emitted(tuple(lines))
    if config is None or sizes is None:
        raise GraphError("python_lines: give a config with its sizes, or a run")
    model, missing = _config_text(config)
    step = ", ".join(["config", *source_texts({**sizes, **(options or {})})])
    called = f"train_step({step})"
    if not isinstance(config, TransformerConfig):
        called = f"image_step({step}, optimizer=mtf.optimize.MomentumOptimizer(0.1))"
    lines += [
        f"config = {model}",
        "with mtf.Graph():",
        f"    outputs, updates = mtf.models.{called}",
        f"    program = mtf.lower(outputs, updates, mesh={str(program.mesh)!r}, layout={str(program.layout)!r})",
        f"print(mtf.estimate(program, {where.name!r}).table())",
    ]
    return Emitted(tuple(lines), missing)


def _config_text(config: TransformerConfig | ImageConfig) -> tuple[str, tuple[str, ...]]:
    """A preset plus the fields that differ from it; without a preset, all fields that differ from their defaults."""
    presets, preset = (PRESETS, "preset") if isinstance(config, TransformerConfig) else (IMAGE_PRESETS, "image_preset")
    base = presets.get(config.name)
    if base is None:
        given = {f.name: getattr(config, f.name) for f in fields(config) if getattr(config, f.name) != f.default}
        start = f"mtf.models.{type(config).__name__}("
    else:
        given = {f.name: getattr(config, f.name) for f in fields(config)
                 if getattr(config, f.name) != getattr(base, f.name)}  # fmt: skip
        start = f"mtf.models.{preset}({config.name!r})"
        if not given:
            return start, ()
        start += ".replace("
    plain = {k: v for k, v in given.items() if isinstance(v, str | int | float | tuple | None | bool)}
    missing = tuple(f"{k}={v!r:.80}" for k, v in given.items() if k not in plain)
    return start + ", ".join(f"{k}={v!r}" for k, v in plain.items()) + ")", missing
