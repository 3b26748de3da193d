"""Published training runs as programs: `mtf.models.train_step` on the run's mesh and layout, with its predicted time.

A run's programs are built, lowered and estimated once; `Prepared.seconds` prices them with any constants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from layouts import LayoutRules, Mesh, Rule
from meshlib.core.compiler import XLA_TPU, Compiler
from meshlib.core.graph import Graph
from meshlib.core.source_lines import written_at
from meshlib.estimation import Estimate, Physics, estimate
from meshlib.lowering import lower
from meshlib.models import PRESETS, TransformerConfig, train_step, transformer
from meshlib.models.layouts import layout as model_layout
from meshlib.models.layouts import with_unsplit
from meshlib.models.maxtext.model import NOISE_BYTES
from meshlib.ops.control.remat import Remat
from meshlib.optimize import AdamWOptimizer
from meshlib.program.records import Program
from meshlib.validation.experts import latent_of
from meshlib.validation.runs import BATCH_AXES, Run, known_model

VOCAB_MULTIPLE = 128


@dataclass(frozen=True)
class Prepared:
    """A run with its estimates: a training step, and a forward pass if evaluations are part of it."""

    run: Run
    step: Estimate
    evaluation: Estimate | None

    def seconds(self, physics: Physics) -> float:
        """Predicted seconds of the measured work: training steps, and forward passes of evaluations."""
        total = self.run.steps * self.step.with_physics(physics).step_seconds
        if self.evaluation is not None:
            total += self.run.evaluations * self.evaluation.with_physics(physics).step_seconds
        return total


def prepare(run: Run, compiler: Compiler = XLA_TPU) -> Prepared:
    """Build, lower and estimate the programs of a run, for the compiler adapted to the run.

    Raises: MeshlibError where the library cannot express or lay out the run.
    """
    evaluated = replace(run, batch=run.evaluation_batch)
    own = compiler_of(run, compiler)
    evaluation = _estimated(evaluated, False, own) if run.evaluation else None
    return Prepared(run, _estimated(run, True, own), evaluation)


def compiler_of(run: Run, compiler: Compiler = XLA_TPU) -> Compiler:
    """The compiler of a run: TensorFlow's layers are unrolled, JAX's are a loop."""
    return replace(
        compiler,
        unrolled_loops=compiler.unrolled_loops or run.encoder,
        rounding_noise_bytes=NOISE_BYTES if run.noisy else 0,
        row_sums=run.row_sums,
        torus_sums=run.torus_sums,
        bias_lookups=compiler.bias_lookups or run.looks_up_biases,
    )


def _estimated(run: Run, training: bool, compiler: Compiler) -> Estimate:
    return estimate(lowered(run, training, compiler), run.slice, placement=dict(run.across) or None)


def lowered(run: Run, training: bool = True, compiler: Compiler | None = None) -> Program:
    """The lowered training step of a run, or the forward pass of its evaluation, for `compiler_of` the run."""
    compiler = compiler or compiler_of(run)
    config = config_of(run)
    mesh = Mesh(";".join(f"{axis}:{size}" for axis, size in run.mesh))
    with Graph(), written_at(config.name):  # no line of a user to look for
        if training:
            adamw = AdamWOptimizer(1e-3, slot_dtype=run.state_dtype, master_dtype=run.state_dtype)
            outputs, updates = train_step(
                config, run.padded_batch, run.length, adamw, remat_of(run, config),
                predictions=run.predictions, loss_blocks=run.loss_blocks,
            )  # fmt: skip
            return lower(outputs, updates, mesh, layout_of(run, config, mesh), compiler=compiler)
        model = transformer(config, run.padded_batch, run.length, predictions=run.predictions)
        return lower({"loss": model.loss}, [], mesh, layout_of(run, config, mesh), compiler=compiler)


def config_of(run: Run) -> TransformerConfig:
    """The row's dimensions, in the style of the published model that its name contains or of its kind.

    Decoders are as in MaxText's base configuration (RMS norms, rotary positions), encoders as BERT.
    """
    m = run.model
    base = known_model(str(m.get("name", ""))) or PRESETS["bert-large" if run.encoder else "maxtext-16b"]
    multiple = math.lcm(VOCAB_MULTIPLE, run.axis("tensor"))
    gated = int(m.get("mlp_matrices") or (3 if base.gated else 2)) == 3
    # Where the update is sharded, float32 weights stay so between steps, and what the passes use is gathered. That it
    # is gathered in bfloat16 is not verified: Xu et al., arXiv:2004.13336, could not be read beyond its abstract.
    activations = "float32" if run.precision == "float32" else "bfloat16"
    narrow = "shard" in dict(run.mesh) and not run.submission.wide_gradients
    changes: dict[str, Any] = {
        "name": str(m.get("name") or "model"),
        "layers": m["layers"],
        "d_model": m["d_model"],
        "heads": m["q_heads"],
        "kv_heads": m.get("kv_heads"),
        "head_dim": m["head_dim"],
        "d_ff": m["d_ff"],
        "vocab": -(-m["vocab"] // multiple) * multiple,
        "gated": gated,
        "activation": base.activation if gated == base.gated else "silu" if gated else "relu",
        "tied": bool(m.get("tied_embedding", base.tied)),
        "attention": run.attention,
        # Published runs of encoders are TensorFlow's, which keep the weights of attention in bfloat16 unless their
        # submission says otherwise.
        "numerics": replace(
            base.numerics,
            variable_dtype=activations if narrow else run.state_dtype,
            activation_dtype=activations,
            precision=run.precision if run.eight_bit else "default",
            bound=run.bound if run.eight_bit else None,
            softmax_dtype=run.submission.softmax_dtype if run.encoder else base.numerics.softmax_dtype,
        ),
        "dropout": 0.0,
    }
    if run.experts is not None:
        changes |= {"experts": run.experts, "latent": latent_of(m)}
    if m.get("local_window"):
        changes["windows"] = (*(m["local_window"],) * run.locals, None)
    if base.position == "learned":
        changes["max_length"] = run.length
    return base.replace(**changes)


def layout_of(run: Run, config: TransformerConfig, mesh: Mesh) -> LayoutRules:
    """The run's axes as rules: the batch over slices, data and fully sharded axes, models by the library's presets."""
    named = [axis for axis in ("fsdp", "tensor", "context", "expert") if axis in mesh]
    if run.length % run.axis("tensor") == 0:  # activations between layers are split along length
        named = [{"tensor": "sequence"}.get(axis, axis) for axis in named]
    rules = list(model_layout("+".join(named), config, mesh).rules) if named else []
    batch = tuple(axis for axis in BATCH_AXES if axis in mesh)
    rules = [r for r in rules if r.dim != "batch"]
    if batch:
        rules.insert(0, Rule("batch", batch))
    if "shard" in mesh:
        rules.append(Rule("d_model", ("shard",), optional=True, scope="slots"))
    if "context" in mesh and "fsdp" in mesh:  # weights are split over both axes
        rules = [r for r in rules if not (r.dim == "d_model" and r.optional)]
        rules.append(Rule("d_model", ("fsdp", "context"), optional=True))
    return with_unsplit(LayoutRules([r for r in rules if r.dim != "batch_unsplit"]), config)


def remat_of(run: Run, config: TransformerConfig) -> Any:
    """The run's rematerialisation policy, as `train_step` takes it."""
    policy = run.policy
    if not (policy.save or policy.offload or policy.carries):
        return "full"
    absent = () if config.gated else ("wi_gate",)
    save, offload = (tuple(n for n in names if n not in absent) for names in (policy.save, policy.offload))
    return Remat(save=save, offload=offload, offload_carries=policy.carries)
