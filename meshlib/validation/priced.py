"""A measured row beside the estimate of its program, and beside the roofline: what a rule without a model would say."""

from __future__ import annotations

from dataclasses import dataclass

from meshlib.estimation import Estimate, Physics


@dataclass(frozen=True)
class Priced:
    """A row that measures one program.

    Attributes:
      estimate: of the program; count: how often it ran in the measured time.
      measured_seconds: of all of that.
      only_collectives: whether the row measures the program's collectives alone.
    """

    estimate: Estimate
    measured_seconds: float
    count: int = 1
    only_collectives: bool = False

    @property
    def predicted_seconds(self) -> float:
        """Modelled, by the constants of the estimate."""
        return self.seconds(self.estimate.physics)

    def seconds(self, physics: Physics) -> float:
        """Modelled, by other constants."""
        est = self.estimate.with_physics(physics)
        beside = sum(r.total_seconds for r in est.rows if r.kind == "compute") if self.only_collectives else 0.0
        return self.count * (est.step_seconds - beside)

    @property
    def roofline_seconds(self) -> float:
        """The naive rule: FLOPs, bytes over HBM or bytes over one link at nominal rates, whichever takes longest."""
        est = self.estimate
        chip, devices = est.slice.chip, est.slice.chip.devices_per_chip
        times = [est.sent_bytes / chip.ici_bytes_per_second] if est.sent_bytes else []
        if not self.only_collectives:
            times += [est.hbm_bytes / (chip.hbm_bytes_per_second / devices)]
            dtype = next((r.mxu_dtype for r in est.rows if r.mxu_flops), "bf16")
            times += [est.flops / (chip.peak_flops(dtype) / devices)]
        return self.count * max(times, default=0.0)
