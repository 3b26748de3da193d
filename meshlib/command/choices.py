"""Choices of arguments, importable without loading anything else."""

from __future__ import annotations

import argparse

REMAT = ("full", "matmuls", "none")  # rematerialisation policies; each keeps more than the one before
TARGETS = ("maxtext", "flax", "haliax", "specs", "python")  # targets of --emit
OPTIMIZERS = ("adam", "sgd", "none")  # optimizers for JAX functions


def is_maxtext(args: argparse.Namespace) -> bool:
    """Whether a command's program is a MaxText configuration."""
    return str(getattr(args, "program", "")).endswith((".yml", ".yaml"))
