"""Published runs of residual networks as programs: `mtf.models.image_step` under the run's mesh, and its time.

The constants are those that dense Transformers were fitted to; nothing is fitted to these runs. A run's program depends
on what it trains and where, so rows about the same machine share it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from hardware.slices import Slice
from layouts import Dimension
from meshlib.compiler import XLA_TPU
from meshlib.estimation.moves import Network, placed
from meshlib.estimation.physics import Physics
from meshlib.estimation.plan import plan_of
from meshlib.estimation.scheduling import schedule
from meshlib.estimation.times import Times
from meshlib.estimation.units import Plan
from meshlib.graph import Graph
from meshlib.lowering import lower
from meshlib.models.images.resnet import ResNetConfig
from meshlib.models.images.step import image_evaluation, image_step
from meshlib.optimize import LarsOptimizer, MomentumOptimizer
from meshlib.validation.images import REPLICAS, ImageRun

GROUP = "group"


@dataclass(frozen=True)
class PreparedImages:
    """A run whose programs are planned."""

    run: ImageRun
    step: Plan
    evaluation: Plan | None

    def seconds(self, physics: Physics) -> float:
        """Modelled time of what was measured: steps, evaluations, and what hosts do."""
        run = self.run
        step = self._once(self.step, physics)
        if run.host is not None:
            step = run.host.step_seconds(step, run.batch / run.slice.hosts)
        total = run.steps * step
        if self.evaluation is not None:
            one = self._once(self.evaluation, physics)
            total += math.ceil(run.evaluated / run.batch) * one
            if run.evaluation_seconds:  # training has been started as evaluation was
                total += max(0.0, run.evaluation_seconds - math.ceil(EVALUATED / run.batch) * one)
        return total * (1 + physics.jitter(run.slice.slices))

    def _once(self, plan: Plan, physics: Physics) -> float:
        return schedule(plan, Times(self.run.slice.chip, physics), XLA_TPU).seconds


EVALUATED = 50_000  # images of ImageNet's validation set


def prepare_images(run: ImageRun) -> PreparedImages:
    """Write, lower and plan the programs of a run.

    Raises: MeshlibError where the library cannot express or lay out the run.
    """
    step = _planned(run.config, run.dims, run.optimizer, run.slice)
    evaluates = run.evaluated or run.evaluation_seconds
    return PreparedImages(run, step, _planned(run.config, run.dims, "", run.slice) if evaluates else None)


@lru_cache(maxsize=16)
def _planned(config: ResNetConfig, dims: tuple[Dimension, Dimension], optimizer: str, slice_: Slice) -> Plan:
    """Of a training step by the optimizer of that name, or of an evaluation without one."""
    groups, _ = dims
    cores = slice_.devices // groups.size
    mesh = f"{REPLICAS}:{groups.size}" + (f";{GROUP}:{cores}" if cores > 1 else "")
    layout = f"{REPLICAS}:{REPLICAS}" + (f";batch:{GROUP}" if cores > 1 else "")
    with Graph():
        if optimizer:
            rule = LarsOptimizer(0.1) if optimizer == "lars" else MomentumOptimizer(0.1)
            outputs, updates = image_step(config.replace(groups=groups), dims, rule)
            program = lower(outputs, updates, mesh, layout)
        else:
            program = lower(image_evaluation(config, dims), [], mesh, layout)
    return plan_of(program, Network(placed(slice_, program, XLA_TPU.whole_torus_axes)))
