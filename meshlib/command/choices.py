"""Choices of arguments, importable without loading anything else."""

from __future__ import annotations

import argparse

REMAT = ("full", "matmuls", "none")  # rematerialisation policies; each keeps more than the one before
ALL_REMAT = (*REMAT, "offload")  # plus the policy that offloads loop carries to the host
# Options of `transformer_builder` that --set accepts for a model, besides the fields of its config.
STEP_SETTINGS = (
    "accumulation", "loss_blocks", "max_norm", "optimizer", "slots_on_host", "stages", "microbatches", "schedule",
)  # fmt: skip
TARGETS = ("maxtext", "flax", "haliax", "specs", "python")  # targets of --emit
OPTIMIZERS = ("adam", "sgd", "none")  # optimizers for JAX functions


def is_maxtext(args: argparse.Namespace) -> bool:
    """True if a command's program is a MaxText configuration."""
    return str(getattr(args, "program", "")).endswith((".yml", ".yaml"))
