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
# Words that are tried as commands -> the command that answers them.
WORDS = {
    "plan": "cost costs fit fits mfu money predict price prices run simulate size speed throughput train",
    "search": "auto auto_mtf best find layout layouts mesh optimise optimize",
    "report": "dashboard draw html page plot visualise visualize view",
    "init": "assert budget ci guard regression test",
    "serve": "decode generate infer inference latency sample serving",
    "explain": "collectives comm communication hlo lower show",
    "estimate": "memory operations ops time timing",
    "profile": "bottleneck breakdown roofline",
    "compare": "changes diff vs",
    "check": "faults lint",
    "trace": "perfetto timeline",
    "slices": "chips devices hardware machines topologies topology tpu tpus",
    "models": "config configs list ls model presets",
}
COMMAND_FOR = {word: command for command, words in WORDS.items() for word in words.split()}
OPTIMIZERS = ("adam", "sgd", "none")  # optimizers for JAX functions


def is_configuration(program: object) -> bool:
    """True for the name of a MaxText configuration."""
    return str(program).endswith((".yml", ".yaml"))


def is_maxtext(args: argparse.Namespace) -> bool:
    """True if a command's program is a MaxText configuration."""
    return is_configuration(getattr(args, "program", ""))
