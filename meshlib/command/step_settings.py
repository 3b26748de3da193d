"""Settings of a model's training step on the command line: `--set`, and flags for memory remedies."""

from __future__ import annotations

from collections.abc import Mapping

from meshlib.estimation.memory.remedies import CARRIES, HALF, LOSS, MICROBATCHES, RECOMPUTE, SLOTS, microbatches

_TITLES = {"adamw": "AdamW", "sgd": "SGD"}  # of optimizers; the others are capitalised


def with_flag(remedy: str, batch: int, step: Mapping[str, object]) -> str:
    """A remedy in words, with the flag that applies it where there is one.

    Args:
      remedy: the words, as of `Remedy.parts`. batch: sequences of a step. step: settings of the training step.

    >>> with_flag("keep slots on the host (an optimizer's slots_on_host=True)", 8, {})
    'keep slots on the host (--set slots_on_host=True)'
    """
    accumulation, blocks = (int(str(step.get(name, 1))) for name in ("accumulation", "loss_blocks"))
    flags = {
        HALF: f"--batch {batch // 2}", LOSS: f"--set loss_blocks={8 * blocks}", SLOTS: "--set slots_on_host=True",
        RECOMPUTE: "--remat full", CARRIES: "--remat offload",
    }  # fmt: skip
    if (parts := microbatches(remedy)) is not None:
        return f"{parts * accumulation} {MICROBATCHES} 'batch' (--set accumulation={parts * accumulation})"
    flag = next((flag for start, flag in flags.items() if remedy.startswith(start)), None)
    return remedy if flag is None else f"{remedy.partition(' (')[0].partition(',')[0]} ({flag})"


def optimizer_title(step: Mapping[str, object]) -> str:
    """Name of the optimizer of a training step with these settings."""
    name = str(step.get("optimizer", "adamw"))
    return _TITLES.get(name, name.capitalize())
