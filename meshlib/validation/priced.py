"""A measured row beside the estimate of its program, and beside the plain roofline."""

from __future__ import annotations

from dataclasses import dataclass

from meshlib.estimation import Estimate, Physics


@dataclass(frozen=True)
class Priced:
    """The estimate of a row that measures one program.

    Attributes:
      estimate: estimate of the program; count: number of its runs in the measured time.
      measured_seconds: time of all runs.
      only_collectives: whether the row measures the program's collectives alone.
    """

    estimate: Estimate
    measured_seconds: float
    count: int = 1
    only_collectives: bool = False

    @property
    def predicted_seconds(self) -> float:
        """Predicted seconds, with the constants of the estimate."""
        return self.seconds(self.estimate.physics)

    def seconds(self, physics: Physics) -> float:
        """Predicted seconds, with other constants."""
        est = self.estimate.with_physics(physics)
        beside = sum(r.total_seconds for r in est.rows if r.kind == "compute") if self.only_collectives else 0.0
        return self.count * (est.step_seconds - beside)

    @property
    def roofline_seconds(self) -> float:
        """The naive rule, at nominal rates: the longest of FLOPs, bytes over HBM, and bytes over one link."""
        est = self.estimate
        chip, devices = est.slice.chip, est.slice.chip.devices_per_chip
        times = [est.sent_bytes / chip.ici_bytes_per_second] if est.sent_bytes else []
        if not self.only_collectives:
            times += [est.hbm_bytes / (chip.hbm_bytes_per_second / devices)]
            dtype = next((r.mxu_dtype for r in est.rows if r.mxu_flops), "bf16")
            times += [est.flops / (chip.peak_flops(dtype) / devices)]
        return self.count * max(times, default=0.0)
