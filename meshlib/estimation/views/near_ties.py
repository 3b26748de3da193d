"""Engines at work nearly as long as the one that bounds a step, and why HBM is."""

from __future__ import annotations

from meshlib.estimation.result import Estimate

CLOSE = 0.8  # of the busy time of the engine that bounds most of the step


def near_tie(est: Estimate) -> str:
    """The shares of the step in which the two busiest engines work, if they are close; otherwise "".

    MXU and HBM work at the same time: the longer of the two bounds a product, by whatever margin. HBM is busy with
    large products since they read their operands again for each block (`Physics.block_edge`).

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     config = mtf.models.preset("llama3-8b").replace(layers=4)
      ...     outputs, updates = mtf.models.train_step(config, batch=8, length=4096)
      >>> near_tie(mtf.estimate(mtf.lower(outputs, updates), "v6e-1"))
      'hbm 81%*, mxu 73%* of the step; 67%* of HBM traffic is operands that products read again, block by block'
    """
    bounds, busy = est.bound_seconds, est.engine_seconds
    first = max(bounds, key=lambda name: bounds[name])
    second = max((name for name in busy if name != first), key=lambda name: busy[name], default=first)
    if first not in busy or second == first or busy[second] < CLOSE * busy[first]:
        return ""
    works = ", ".join(f"{name} {busy[name] / est.step_seconds:.0%}*" for name in (first, second))
    return f"{works} of the step{_read_again(est) if first == 'hbm' else ''}"


def _read_again(est: Estimate) -> str:
    """The share of HBM traffic that products read again, if it is most of it."""
    traffic = sum(r.traffic_bytes * r.count for r in est.rows)
    again = sum((r.traffic_bytes - r.hbm_bytes) * r.count for r in est.rows if r.mxu_flops)
    share = f"; {again / max(1.0, traffic):.0%}* of HBM traffic is operands that products read again, block by block"
    return share if 2 * again > traffic else ""
