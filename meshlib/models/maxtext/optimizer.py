"""The optimizer of a MaxText configuration, with the dtypes of its state."""

from __future__ import annotations

from meshlib import optimize
from meshlib.models.maxtext.model import FLOATS
from meshlib.models.maxtext.settings import Settings
from meshlib.optimize.base import Optimizer

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
