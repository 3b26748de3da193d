"""A small change of size never changes the plan for the worse.

Along sweeps of batch, length and width, bytes sent per token never rise by more than a tenth from one size to the next,
unless the step predicted on that slice takes less time per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import pytest

import meshlib as mtf
from tests.effort import deep, some

JUMP = 1.1

Plan: TypeAlias = tuple[str, str, str, str]
Size: TypeAlias = tuple[mtf.models.TransformerConfig, int, int]  # with batch and length

# preset, layout, mesh, slice
PLANS = (
    ("llama3-70b", "fsdp+sequence", "fsdp:32;tensor:8", "v5e-256"),
    ("llama2-7b", "fsdp", "fsdp:64", "v5e-64"),
    ("llama2-7b", "zero1+sequence", "data:16;tensor:4", "v5e-64"),
    ("llama2-7b", "data+fsdp+tensor", "data:4;fsdp:4;tensor:4", "v5e-64"),
    ("llama2-7b", "fsdp+context", "fsdp:8;context:8", "v5e-64"),
    ("llama2-7b", "sequence", "tensor:8", "v5e-8"),
    ("llama2-7b", "fsdp+sequence", "fsdp:8;tensor:8", "v5e-64"),
    ("t5-11b", "fsdp+tensor", "fsdp:16;tensor:4", "v5e-64"),
    ("llama2-7b", "data+tensor", "data:16;tensor:4", "v5e-64"),
    ("llama3.1-405b", "fsdp+sequence", "fsdp:32;tensor:8", "v5e-256"),
)
BATCHES = (64, 128, 192, 256, 320, 512)
LENGTHS = (1024, 2048, 4096, 8192)


@pytest.mark.parametrize("plan", some(PLANS, PLANS[:1]), ids=lambda p: f"{p[0]} {p[1]}")
def test_over_batches(plan: Plan):
    batches = BATCHES if deep() else (192, 224)  # between which a greedy choice began to shuttle
    config = mtf.models.preset(plan[0])
    assert_steady(plan, [(config, batch, 4096) for batch in batches])


@pytest.mark.parametrize("plan", some(PLANS, PLANS[1:2]), ids=lambda p: f"{p[0]} {p[1]}")
def test_over_lengths(plan: Plan):
    config = mtf.models.preset(plan[0])
    lengths = [n for n in (LENGTHS if deep() else LENGTHS[:2]) if not config.max_length or n <= config.max_length]
    assert_steady(plan, [(config, 256, n) for n in lengths])


@pytest.mark.parametrize("plan", some(PLANS, PLANS[1:2]), ids=lambda p: f"{p[0]} {p[1]}")
def test_over_widths(plan: Plan):
    """A wider layer sends more, but no more per column of it."""
    config = mtf.models.preset(plan[0])
    widths = [config.replace(d_ff=config.d_ff * n // 4) for n in ((2, 3, 4, 6) if deep() else (4, 6))]
    assert_steady(plan, [(c, 256, 1024) for c in widths])


ALIKE = (  # preset, layout, mesh, and the sizes that grow: batches, or widths of the feed-forward layers
    ("llama3-8b", "fsdp+sequence", "fsdp:16;tensor:4", "batch", (160, 176, 144, 192, 208)),
    ("llama3-8b", "fsdp+sequence", "fsdp:16;tensor:4", "d_ff", (10_752, 12_544, 9_216, 14_336)),
    ("llama3-8b", "fsdp+tensor", "fsdp:8;tensor:8", "batch", (64, 72, 80, 256)),
    ("t5-11b", "zero1+sequence", "data:16;tensor:4", "batch", (128, 144, 160)),
)


@pytest.mark.parametrize("row", some(ALIKE, ALIKE[:1]), ids=lambda r: f"{r[0]} {r[1]} {r[3]}")
def test_bytes_grow_with_sizes_and_no_faster(row: tuple[str, str, str, str, tuple[int, ...]]) -> None:
    """In both directions: an optimum of plans whose bytes grow linearly never falls, and never outgrows the size."""
    name, layout, mesh, what, sizes = row
    config, sent = mtf.models.preset(name), {}
    for size in sorted(some(sizes, sizes[:2])):
        wide = config.replace(d_ff=size) if what == "d_ff" else config
        with mtf.Graph():
            step = mtf.models.train_step(wide, batch=size if what == "batch" else 160, length=4096)
        program = mtf.lower(*step, mesh, mtf.models.layout(layout, wide, mesh))
        assert program.choice.gap == 0
        sent[size] = program.sent_bytes
    for a, b in pairwise(sent):
        assert sent[a] * 0.999 <= sent[b] <= sent[a] * b / a * 1.001, f"{what} {a}: {sent[a]} bytes, {b}: {sent[b]}"


def assert_steady(plan: Plan, sizes: Sequence[Size]) -> None:
    rows = [measured(plan, size) for size in sizes]
    for (before, seconds, text, a), (after, later, now, b) in pairwise(rows):
        steady = after <= before * JUMP or later < seconds
        assert steady, "\n".join([f"{text}: {before}; {now}: {after} bytes a token", *mtf.compare(a, b).notes])


def measured(plan: Plan, size: Size) -> tuple[float, float, str, mtf.Program]:
    """Bytes and seconds per token and column of the feed-forward layers; the program."""
    (_, name, mesh, slice_), (config, batch, length) = plan, size
    with mtf.Graph():
        outputs, updates = mtf.models.train_step(config, batch=batch, length=length)
    program = mtf.lower(outputs, updates, mesh, mtf.models.layout(name, config, mesh))
    parts = batch * length * config.d_ff
    seconds = mtf.estimate(program, slice_).step_seconds
    return program.sent_bytes / parts, seconds / parts, f"batch {batch}, length {length}, d_ff {config.d_ff}", program
