"""What some arguments may be: known before anything else is loaded."""

from __future__ import annotations

import argparse

REMAT = ("full", "matmuls", "none")  # what a model's backward pass computes again; each keeps more than the one before
TARGETS = ("maxtext", "flax", "haliax", "specs", "python")  # what a plan can be printed for
OPTIMIZERS = ("adam", "sgd", "none")  # what trains a JAX function


def is_maxtext(args: argparse.Namespace) -> bool:
    """Whether a command is about a MaxText configuration."""
    return str(getattr(args, "program", "")).endswith((".yml", ".yaml"))
