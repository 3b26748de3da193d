"""Kernels that a row's recipe sets are those of its chip; nothing else about the machine changes."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from hardware import CHIPS
from meshlib.validation.runs import run_of
from tests.validation.rows import BY_NAME


@pytest.mark.parametrize(
    ("name", "kernels", "forward", "backward"),
    [
        ("rc-v6e-gpt3-175b-bf16", 2, (1024, 512), (2048, 512)),
        ("rc-v6e-llama3.1-8b-8", 1, (2048, 2048), (2048, 2048)),
        ("rc-v6e-gemma3-12b-1x", 2, (1024, 1024), (1024, 1024)),
        ("iw-llama70b-64-bf16", 1, (2048, 2048), (2048, 2048)),
        ("iw-gemma4-31b", 1, (2048, 2048), (1024, 2048)),
        ("mt-v5e-16b-1x", 2, (512, 512), (512, 512)),
    ],
)
def test_tiles_of_recipes(name: str, kernels: int, forward: tuple[int, int], backward: tuple[int, int]) -> None:
    run = run_of(BY_NAME[name])
    chip = run.slice.chip
    assert (chip.attention_backward_kernels, chip.attention_tile, chip.attention_backward_tile) == (
        kernels, forward, backward,
    )  # fmt: skip
    own = CHIPS[run.chip]
    others = [f.name for f in fields(own) if not f.name.startswith("attention_") and f.name != "sources"]
    assert all(getattr(chip, figure) == getattr(own, figure) for figure in others)
    assert ("kernels as its recipe sets them" in run.assumed) == (chip != own)


def test_a_recipe_is_known_by_its_source_not_by_the_name_of_a_row() -> None:
    row = {**BY_NAME["rc-v6e-llama3.1-8b-8"], "id": "other"}
    assert run_of(row).slice.chip.attention_backward_kernels == 1
    assert run_of({**row, "source": "a measurement of one's own"}).slice.chip == CHIPS["v6e"]
    assert replace(run_of(row), name="x").slice == run_of(row).slice
