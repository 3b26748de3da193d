"""What one instruction sends between blocks of a dim, by where each element of the result was before."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

import meshlib as mtf
from layouts import Dimension
from meshlib.core.graph import Tensor
from meshlib.program.exchanges import busiest_bytes
from meshlib.program.instructions import Compute
from tests.oracle import Array, run

ITEMSIZE = 8
Draw = Callable[[int, int], int]  # a random int from, below


def sliced(xs: list[Tensor], blocks: int, draw: Draw) -> Tensor:
    size = xs[0].shape.dim("n").size
    kept = blocks * draw(1, size // blocks + 1)
    return mtf.slice(xs[0], draw(0, size - kept + 1), kept, "n")


def padded(xs: list[Tensor], blocks: int, draw: Draw) -> Tensor:
    more = blocks * draw(0, 4)
    before = draw(0, more + 1)
    return mtf.pad(xs[0], [before, more - before], "n", -1.0)


def shifted(xs: list[Tensor], blocks: int, draw: Draw) -> Tensor:
    return mtf.shift(xs[0] + 1.0, draw(-7, 8), "n", wrap=bool(draw(0, 2))) - 1.0  # 0 comes in


def joined(xs: list[Tensor], blocks: int, draw: Draw) -> Tensor:
    return mtf.concat(xs[: draw(2, 4)], "n")


def busiest(result: Array, before: Array, blocks: int) -> int:
    """Bytes given away by the device that gives most; `before` says per number which device held it."""
    sent = [0] * blocks
    for device, block in enumerate(np.split(result, blocks)):
        for number in block[block >= 0].astype(int):
            if before[number] != device:
                sent[before[number]] += ITEMSIZE
    return max(sent)


@pytest.mark.parametrize("blocks", [2, 3, 4])
@pytest.mark.parametrize("build", [sliced, padded, shifted, joined])
def test_an_instruction_sends_what_its_busiest_device_gives_away(build: Callable[..., Tensor], blocks: int) -> None:
    rng = np.random.default_rng([blocks, *build.__name__.encode()])
    seen = 0
    for _ in range(25):
        sizes = [blocks * int(rng.integers(1, 5)) for _ in range(3)]
        starts = np.cumsum([0, *sizes])
        with mtf.Graph():
            xs = [mtf.input(f"x{n}", [Dimension("n", size)], "float64") for n, size in enumerate(sizes)]
            y = build(xs, blocks, lambda low, high: int(rng.integers(low, high)))
        program = mtf.lower({"y": y}, mesh=f"p:{blocks}", layout="n:p")
        feeds = {f"x{n}": np.arange(a, b, dtype=float) for n, (a, b) in enumerate(pairwise(starts))}
        before = np.concatenate([np.repeat(np.arange(blocks), size // blocks) for size in sizes])
        moving = [i for i in program.instructions if isinstance(i, Compute) and i.exchanges]
        if not moving:
            continue
        (instruction,) = moving
        (out,) = run(program, feeds)
        wanted = busiest(out["y"], before, blocks)
        assert busiest_bytes((e, 1) for e in instruction.exchanges) == wanted == program.sent_bytes
        seen += 1
    assert seen > 5


@pytest.mark.parametrize("blocks", [2, 3, 4])
def test_margins_to_both_sides(blocks: int) -> None:
    """A device between two others sends both margins; of two devices each sends one."""
    rows, size = Dimension("rows", blocks), Dimension("size", 6)
    with mtf.Graph():
        x = mtf.input("x", [rows, size], "float64")
        y = mtf.halo_exchange(x, rows, size, 2)
    program = mtf.lower({"y": y}, mesh=f"p:{blocks}", layout="rows:p")
    margin = 2 * ITEMSIZE
    assert [c.sent_bytes for c in program.collectives] == [margin, margin]
    assert program.sent_bytes == (margin if blocks == 2 else 2 * margin)
