"""Published ResNet training runs as programs: `mtf.models.image_step` on the run's mesh, with its predicted time.

The constants are those that dense Transformers were fitted to; nothing is fitted to these runs. A run's program depends
on what it trains and where, so rows about the same machine share it. Replicas run the same program whatever their
number, and meet in the sums of gradients alone: a program is lowered for at most `REPLICAS_LOWERED`, and its
collectives are priced over all replicas of the run. Steps of the published rows are within 0.11 % of those of programs
lowered for all replicas, which send the same in another order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from hardware.slices import Slice
from layouts import Dimension, Mesh
from meshlib.core.compiler import XLA_TPU, Compiler
from meshlib.core.graph import Graph
from meshlib.core.source_lines import written_at
from meshlib.estimation import Estimate, Physics, estimate
from meshlib.lowering import Program, Session
from meshlib.models.images.resnet import ResNetConfig
from meshlib.models.images.step import image_evaluation, image_step
from meshlib.optimize import LarsOptimizer, MomentumOptimizer
from meshlib.validation.images import REPLICAS, ImageRun

GROUP = "group"
REPLICAS_LOWERED = 8  # on a ring of more, a device sends up to 1/7 more


@dataclass(frozen=True)
class PreparedImages:
    """A run with estimates of its programs."""

    run: ImageRun
    step: Estimate
    evaluation: Estimate | None

    def seconds(self, physics: Physics) -> float:
        """Predicted seconds of the measured work: steps, evaluations, and hosts."""
        run = self.run
        total = run.steps * self.step_seconds(physics) + (run.host.run_seconds if run.host else 0.0)
        if self.evaluation is not None:
            one = self.evaluation.with_physics(physics).step_seconds
            total += math.ceil(run.evaluated / run.batch) * one
            if run.evaluation_seconds:  # training has the start of an evaluation once
                total += max(0.0, run.evaluation_seconds - math.ceil(EVALUATED / run.batch) * one)
        return total

    def step_seconds(self, physics: Physics) -> float:
        """Predicted seconds of a training step, hosts included."""
        step, host = self.step.with_physics(physics).step_seconds, self.run.host
        return step if host is None else host.step_seconds(step, self.run.batch / self.run.slice.hosts)

    @property
    def utilisation(self) -> float:
        """FLOPs of the training steps per measured second, over the bf16 peak of the slice."""
        flops = self.run.steps * self.step.useful_flops
        return flops / self.run.measured_seconds / self.run.slice.peak_flops_per_device


EVALUATED = 50_000  # ImageNet validation images


def prepare_images(run: ImageRun, compiler: Compiler = XLA_TPU) -> PreparedImages:
    """Build, lower and estimate the programs of a run.

    Raises: MeshlibError where the library cannot express or lay out the run.
    """
    step = _estimated(run.config, run.dims, run.optimizer, run.slice, compiler)
    evaluates = run.evaluated or run.evaluation_seconds
    evaluation = _estimated(run.config, run.dims, "", run.slice, compiler) if evaluates else None
    return PreparedImages(run, step, evaluation)


@lru_cache(maxsize=16)
def _estimated(
    config: ResNetConfig, dims: tuple[Dimension, Dimension], optimizer: str, slice_: Slice, compiler: Compiler
) -> Estimate:
    """Estimate of a training step with that optimizer, or of an evaluation if it is ""."""
    replicas, batch = dims[0].size, dims[1].size
    cores = slice_.devices // replicas
    program = _lowered(config, min(replicas, REPLICAS_LOWERED), batch, optimizer, cores, compiler)
    return estimate(_on(_mesh(replicas, cores), program), slice_)


def _on(mesh: Mesh, program: Program) -> Program:
    """The program of a device on a mesh with another number of replicas, which its memory does not depend on."""
    repeated = replace(program, mesh=mesh)
    vars(repeated)["memory_plan"] = program.memory_plan
    return repeated


def _mesh(replicas: int, cores: int) -> Mesh:
    return Mesh(f"{REPLICAS}:{replicas}" + (f";{GROUP}:{cores}" if cores > 1 else ""))


@lru_cache(maxsize=16)
def _lowered(
    config: ResNetConfig, replicas: int, batch: int, optimizer: str, cores: int, compiler: Compiler
) -> Program:
    """The program of a device, shared by all chips on which a replica has that many cores."""
    layout = f"{REPLICAS}:{REPLICAS}" + (f";batch:{GROUP}" if cores > 1 else "")
    return _session(config, replicas, batch, optimizer).lower(_mesh(replicas, cores), layout, compiler=compiler)


@lru_cache(maxsize=16)
def _session(config: ResNetConfig, replicas: int, batch: int, optimizer: str) -> Session:
    """The lowerings of a program on replicas of any number of cores."""
    dims = Dimension(REPLICAS, replicas), Dimension("batch", batch)
    with Graph(), written_at(config.name):  # no line of a user to look for
        if not optimizer:
            return Session(image_evaluation(config, dims))
        rule = LarsOptimizer(0.1) if optimizer == "lars" else MomentumOptimizer(0.1)
        return Session(*image_step(config.replace(groups=dims[0]), dims, rule))
