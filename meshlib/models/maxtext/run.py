"""A MaxText configuration as a training run: model, mesh, layout, rematerialisation, batch, optimizer, program."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from hardware.checks import HardwareError
from hardware.slices import Slice
from layouts import LayoutRules, Mesh
from meshlib import optimize
from meshlib.core.compiler import XLA_TPU, Compiler
from meshlib.core.errors import GraphError, LayoutError, SliceError
from meshlib.core.graph import Graph, Operation, Tensor
from meshlib.lowering import Session
from meshlib.models.config import TransformerConfig
from meshlib.models.maxtext.kernels import chip_of
from meshlib.models.maxtext.keys import PARTS
from meshlib.models.maxtext.model import FLOATS, config_of, noise_bytes, sorts_tokens
from meshlib.models.maxtext.remat import remat_of
from meshlib.models.maxtext.rules import AxisSizes, Translation, axes_of, translated
from meshlib.models.maxtext.settings import OVERRIDES, WHAT, Settings, settings_of
from meshlib.models.maxtext.unread import Unread, unread_keys
from meshlib.models.stages import Pipeline
from meshlib.models.train import train_step
from meshlib.ops.control.remat import Policy
from meshlib.optimize.base import Optimizer
from meshlib.program.records import Program

OPTIMIZERS = ("adamw", "adam_pax", "sgd")
RATE = 1e-3  # no effect on cost


def optimizer_of(s: Settings) -> Optimizer:
    """The optimizer for `mtf.models.train_step`: slots and master copies in the dtype of the weights, as in optax; the
    first moment in `mu_dtype` if set; on the host with `optimizer_memory_host_offload`.

    Raises: GraphError for an unsupported optimizer.
    """
    name = s["opt_type"]
    if name == "muon":
        s.fail("opt_type", "this library has no Muon, which multiplies each gradient by itself several times")
    s.choice("opt_type", OPTIMIZERS)
    weights = s.choice("weight_dtype", tuple(FLOATS))
    mean = s.choice("mu_dtype", tuple(FLOATS)) if s["mu_dtype"] else None
    on_host = s.flag("optimizer_memory_host_offload")
    if name == "sgd":
        return optimize.SgdOptimizer(RATE, master_dtype=weights, slots_on_host=on_host)
    return optimize.AdamWOptimizer(
        RATE, mean_dtype=mean, slot_dtype=weights, master_dtype=weights, slots_on_host=on_host
    )


def clipping_norm(s: Settings) -> float | None:
    """The global norm to which gradients are clipped; None for no clipping."""
    threshold = s.number("gradient_clipping_threshold")
    return threshold if threshold > 0 else None


@dataclass(frozen=True, eq=False)
class MaxTextRun:
    """Result of `read_maxtext`.

    Attributes:
      settings: all keys with their values and source files.
      config, remat, length, optimizer: arguments of `mtf.models.train_step`. accumulation: microbatches per step.
      unread: keys that differ from their defaults, change compute, memory or communication, and are not expressed.
    Example:
      >>> import meshlib as mtf
      >>> run = mtf.models.read_maxtext("base.yml", {"model_name": "llama3.1-8b"})  # doctest: +SKIP
      >>> print(run.config.parameters, run.length, run.unread)  # doctest: +SKIP
    """

    settings: Settings

    @cached_property
    def config(self) -> TransformerConfig:
        """The model."""
        return config_of(self.settings)

    @cached_property
    def remat(self) -> Policy:
        """The rematerialisation policy of the layers."""
        return remat_of(self.settings, self.config)

    @cached_property
    def optimizer(self) -> Optimizer:
        """The optimizer, with the dtypes of its state."""
        return optimizer_of(self.settings)

    @property
    def overrides(self) -> dict[str, Any]:
        """The overridden keys with their values."""
        s = self.settings
        return {key: s.values[key] for key, source in s.sources.items() if source == OVERRIDES}

    @property
    def length(self) -> int:
        """Tokens per sequence."""
        return self.settings.size("max_target_length")

    @property
    def accumulation(self) -> int:
        """Microbatches per step whose gradients are accumulated."""
        return self.settings.size("gradient_accumulation_steps")

    @property
    def parameters(self) -> int:
        """Parameters as MaxText counts them: including the untrained biases that choose experts."""
        c, e = self.config, self.config.experts
        biased = e is not None and e.routing.bias
        choosing = sum(e.count for n in range(c.layers) if e is not None and e.in_layer(n)) if biased else 0
        return c.parameters + choosing

    # ------------------------------------------------------------ on a slice

    def axes(self, slice: str | Slice) -> AxisSizes:
        """ICI and DCN sizes of all mesh axes, in MaxText's order."""
        return axes_of(self.settings, _slice(slice))

    def mesh(self, slice: str | Slice) -> Mesh:
        """The mesh axes of more than one device."""
        return self.axes(slice).mesh

    def placement(self, slice: str | Slice) -> dict[str, int] | None:
        """The part of each mesh axis across slices, for `mtf.estimate`; None on a single slice."""
        return self.axes(slice).across or None

    def translation(self, slice: str | Slice) -> Translation:
        """The layout on a slice, and the weights that it shards differently from MaxText."""
        return translated(self.settings, self.config, self.axes(slice), self._stages(slice) > 1)

    @cached_property
    def layout(self) -> LayoutRules:
        """The layout for the mesh of any slice: rules are optional for axes that may have a single device."""
        s = self.settings
        axes = [axis for axis in s["mesh_axes"] if isinstance(axis, str) and axis in PARTS]
        several = {axis: 2 if any(size != 1 for size in self._asked(axis)) else 1 for axis in axes}
        translation = translated(
            s, self.config, AxisSizes(several, dict.fromkeys(axes, 1)), several.get("stage", 1) > 1
        ).layout
        filled = {axis for axis in axes if -1 in self._asked(axis)}
        return LayoutRules([replace(r, optional=True) if filled & {*r.axes} else r for r in translation.rules])

    def slice(self, slice: str | Slice) -> Slice:
        """The slice with the attention kernels of the configuration: `mtf.estimate(run.program(s), run.slice(s))`."""
        where = _slice(slice)
        return Slice(where.name, chip_of(self.settings, where.chip, self.length))

    def layout_on(self, slice: str | Slice) -> LayoutRules:
        """The layout on a slice, with rules for the axes of its mesh."""
        return self.translation(slice).layout

    def batch(self, slice: str | Slice) -> int:
        """Global batch size of a step in sequences.

        Raises: GraphError unless devices and microbatches divide it.
        """
        s, where = self.settings, _slice(slice)
        each = s.number("per_device_batch_size")
        if each <= 0:
            s.fail("per_device_batch_size", "must be positive")
        micro = int(where.devices * each + 1e-9)
        if micro < 1:
            s.fail("per_device_batch_size", f"{where.devices} devices * {each:g} is less than one sequence")
        sizes = self.axes(where).sizes
        parts = 1
        for axis in next((r.axes for r in self.layout_on(where).rules if r.dim == "batch"), ()):
            parts *= sizes[axis]
        if micro % parts:
            axes = "+".join(next(r.axes for r in self.layout_on(where).rules if r.dim == "batch"))
            s.fail(
                "per_device_batch_size",
                f"{where.devices} devices * {each:g} = {micro} sequences don't divide over {axes}: {micro} % {parts} = "
                f"{micro % parts}",
            )
        return micro * self.accumulation

    def pipeline(self, slice: str | Slice) -> Pipeline | None:
        """The pipeline of the layers, if the mesh has stages.

        Raises: GraphError for stages, repeats and microbatches that do not divide layers and batch.
        """
        s, stages = self.settings, self._stages(slice)
        if stages < 2:
            return None
        layers = self.config.layers - self.config.dense_front
        of_stage = s.size("num_layers_per_pipeline_stage")
        asked = s.size("pipeline_parallel_layers", -1)
        if asked not in (-1, layers):
            s.fail("pipeline_parallel_layers", f"this library cuts all {layers} layers into stages, or none")
        repeats = s.size("num_pipeline_repeats", -1)
        if repeats == -1:
            repeats, rest = divmod(layers, stages * of_stage)
            if rest:
                s.fail("num_layers_per_pipeline_stage", f"{layers} layers % ({stages} stages * {of_stage}) = {rest}")
        if stages * repeats * of_stage != layers:
            s.fail(
                "num_pipeline_repeats", f"{stages} stages * {repeats} * {of_stage} layers of a stage are not {layers}"
            )
        micro = s.size("num_pipeline_microbatches", -1)
        micro = stages if micro == -1 else micro
        if micro < 1 or micro % stages:
            s.fail("num_pipeline_microbatches", f"must be a multiple of the {stages} stages")
        batch = self.batch(slice) // self.accumulation
        if batch % micro:
            s.fail("num_pipeline_microbatches", f"must divide the batch: {batch} % {micro} = {batch % micro}")
        whole = s.flag("set_remat_policy_on_pipeline_iterations")
        return Pipeline(stages=stages, microbatches=micro, repeats=repeats, remat=self.remat if whole else "none")

    def _stages(self, slice: str | Slice) -> int:
        return self.axes(slice).sizes.get("stage", 1)

    def _asked(self, axis: str) -> list[int]:
        """Configured sizes of an axis within and across slices, -1 for the remaining devices."""
        return [self.settings.size(f"{kind}_{PARTS[axis]}_parallelism", -1) for kind in ("ici", "dcn")]

    # ------------------------------------------------------------ the program

    def built(self, slice: str | Slice) -> tuple[Mapping[str, Tensor], list[Operation]]:
        """Outputs and updates of a training step in the current graph, for `mtf.lower`."""
        s, where = self.settings, _slice(slice)
        self._check_sizes(where)
        return train_step(
            self.config,
            self.batch(where),
            self.length,
            self.optimizer,
            self.remat,
            s.flag("scan_layers"),
            max_norm=clipping_norm(s),
            pipeline=self.pipeline(where),
            accumulation=self.accumulation,
            loss_blocks=s.size("num_vocab_tiling"),
        )

    def check(self, slice: str | Slice) -> None:
        """Raise GraphError for the first key because of which the run can't be laid out on a slice."""
        where = _slice(slice)
        self.batch(where)
        self.pipeline(where)
        self._check_sizes(where)

    def _check_sizes(self, where: Slice) -> None:
        """Raise GraphError for the first size that the axes of its dim do not divide."""
        s, c, e = self.settings, self.config, self.config.experts
        sizes = {"base_emb_dim": ("d_model", c.d_model), "base_mlp_dim": ("d_ff", c.d_ff)}
        sizes |= {"vocab_size": ("vocab", c.vocab), "max_target_length": ("length", self.length)}
        if e is not None:
            sizes |= {"num_experts": ("experts", e.count), "base_moe_mlp_dim": ("expert_d_ff", e.d_ff)}
        mesh = self.mesh(where)
        for key, (dim, size) in sizes.items():
            for rule in self.layout_on(where).rules:
                parts = mesh.group_size(rule.axes) if rule.dim == dim and rule.scope != "slots" else 1
                if size % parts:
                    s.fail(key, f"{dim} doesn't divide over {'+'.join(rule.axes)}: {size} % {parts} = {size % parts}")
        blocks = s.size("num_vocab_tiling")
        if self.length % blocks:
            rest = self.length % blocks
            s.fail("num_vocab_tiling", f"must divide max_target_length: {self.length} % {blocks} = {rest}")

    def compiler(self, compiler: Compiler = XLA_TPU) -> Compiler:
        """The compiler record, with the random bits that its quantisation reads, and what it does for sorted tokens."""
        noise = noise_bytes(self.settings) or compiler.rounding_noise_bytes
        if sorts_tokens(self.config):
            compiler = replace(compiler, bias_lookups=self.config.bias or compiler.bias_lookups)
        return replace(compiler, rounding_noise_bytes=noise)

    def program(self, slice: str | Slice, compiler: Compiler = XLA_TPU) -> Program:
        """The lowered training step on a slice.

        Raises: GraphError for sizes that do not divide, with the key at fault.
        """
        where = _slice(slice)
        with Graph():
            session = Session(*self.built(where))
        try:
            return session.lower(self.mesh(where), self.layout_on(where), compiler=self.compiler(compiler))
        except LayoutError as fault:
            raise LayoutError(f"{WHAT}: {os.path.basename(self.settings.path)} on {where.name}: {fault}") from None

    @cached_property
    def unread(self) -> tuple[Unread, ...]:
        """Keys that differ from their defaults, have a cost, and are not expressed."""
        return unread_keys(self.settings)

    def __str__(self) -> str:
        model = f"{self.config.name}: {self.config.parameters:,} parameters"
        return "\n".join([model, *(f"not expressed: {one}" for one in self.unread)])


@lru_cache(maxsize=256)
def _named(name: str) -> Slice:
    try:
        return Slice(name)
    except HardwareError as fault:
        raise SliceError(f"{WHAT}: {fault}") from None


def _slice(slice: str | Slice) -> Slice:
    return slice if isinstance(slice, Slice) else _named(slice)


def read_maxtext(
    path: str | os.PathLike[str],
    overrides: Mapping[str, Any] | None = None,
    models: str | os.PathLike[str] | None = None,
    serving: bool = False,
) -> MaxTextRun:
    """A training run from a MaxText configuration.

    Args:
      path: base.yml, a file with `base_config`, or a folder with base.yml.
      overrides: values by key, as on MaxText's command line; text is read as YAML.
      models: the folder of model files for `model_name`; by default `models` beside the file.
      serving: also read a configuration of inference, for its model: `mtf.serving(run.config, slice)`.
    Returns: a `MaxTextRun`: `.config`, `.mesh(slice)`, `.layout`, `.remat`, `.batch(slice)`, `.length`, `.optimizer`,
      `.program(slice)` and `.unread`, the keys with a cost that are not expressed.
    Raises: GraphError, one line that names file, key, value and rule: unknown keys, models and policies, values of the
      wrong type, models with unsupported layers, configurations of inference unless `serving`;
      MissingError without PyYAML.
    Example:
      >>> import pathlib, tempfile
      >>> import meshlib as mtf
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     file = pathlib.Path(folder, "base.yml")
      ...     _ = file.write_text("base_num_decoder_layers: 4\\nici_tensor_parallelism: 4\\n")
      ...     run = mtf.models.read_maxtext(file, {"per_device_batch_size": 2, "remat_policy": "save_qkv_proj"})
      >>> print(run.mesh("v5e-16"), run.batch("v5e-16"), run.remat.save)
      fsdp:4;tensor:4 32 ('q', 'k', 'v')
      >>> print(run.layout)
      batch:data+fsdp?;variables/d_model:fsdp?;activations/d_model:tensor?;heads:tensor;d_ff:tensor;vocab:tensor

    Source: AI-Hypercomputer/maxtext: src/maxtext/configs (pyconfig.py, types.py, base.yml).
    """
    run = MaxTextRun(settings_of(path, overrides, models))
    sign = run.settings.serving
    if sign is not None and not serving:
        file, key, value = sign
        name = os.path.basename(run.settings.path)
        raise GraphError(
            f"{WHAT}: {file or f'{name} (an override)'}: {key}={value}: a configuration of inference, not of training; "
            f"price it with meshlib serve {run.settings.path} KEY=VALUE ... --slice SLICE"
        )
    _ = (run.config, run.remat, run.optimizer)  # reports faults early
    return run
