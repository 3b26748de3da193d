"""Published ResNet training runs as programs: `mtf.models.image_step` on the run's mesh, with its predicted time.

The constants are those that dense Transformers were fitted to; nothing is fitted to these runs. A run's program depends
on what it trains and where, so rows about the same machine share it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from hardware.slices import Slice
from layouts import Dimension
from meshlib.core.compiler import XLA_TPU, Compiler
from meshlib.core.graph import Graph
from meshlib.estimation import Estimate, Physics, estimate
from meshlib.lowering import Program, lower
from meshlib.models.images.resnet import ResNetConfig
from meshlib.models.images.step import image_evaluation, image_step
from meshlib.optimize import LarsOptimizer, MomentumOptimizer
from meshlib.validation.images import REPLICAS, ImageRun

GROUP = "group"


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
    groups, _ = dims
    return estimate(_lowered(config, dims, optimizer, slice_.devices // groups.size, compiler), slice_)


@lru_cache(maxsize=16)
def _lowered(
    config: ResNetConfig, dims: tuple[Dimension, Dimension], optimizer: str, cores: int, compiler: Compiler
) -> Program:
    """The program, shared by all chips on which a replica has that many cores."""
    groups, _ = dims
    mesh = f"{REPLICAS}:{groups.size}" + (f";{GROUP}:{cores}" if cores > 1 else "")
    layout = f"{REPLICAS}:{REPLICAS}" + (f";batch:{GROUP}" if cores > 1 else "")
    with Graph():
        if optimizer:
            rule = LarsOptimizer(0.1) if optimizer == "lars" else MomentumOptimizer(0.1)
            outputs, updates = image_step(config.replace(groups=groups), dims, rule)
            return lower(outputs, updates, mesh, layout, compiler=compiler)
        return lower(image_evaluation(config, dims), [], mesh, layout, compiler=compiler)
