"""Gaps in the heap of a compiled step, beside a heap of single bytes, and what they come from."""

from __future__ import annotations

import random

import pytest

import meshlib as mtf
from meshlib.estimation.memory.compiled import FRAGMENTATION
from meshlib.estimation.memory.heap import LiveRange, gap_bytes, peak_bytes

D = mtf.Dimension


def test_a_large_buffer_does_not_fit_the_hole_of_a_smaller_one() -> None:
    """As in GPT-2 large on two slices: activations die beside the logits' gradient, before a gradient in float32."""
    activations, logits, stacks, rows = (180, 0, 4), (123, 2, 6), (225, 3, 9), (245, 5, 7)
    ranges = [LiveRange(*r) for r in (activations, logits, stacks, rows)]
    assert peak_bytes(ranges) == 123 + 225 + 245
    assert gap_bytes(ranges) == 180 == 180 + 123 + 225 + 245 - peak_bytes(ranges)
    assert gap_bytes(ranges, spare_bytes=180) == 180
    assert gap_bytes(ranges, spare_bytes=179) == 0, "short of memory: the largest first"
    assert gap_bytes([LiveRange(240 if r == ranges[0] else r.size_bytes, *r[1:]) for r in ranges[:-1]]) == 0


def by_single_bytes(ranges: list[LiveRange]) -> int:
    """Height of a heap in which every byte of every moment is marked when it is taken."""
    taken: list[set[int]] = [set() for _ in range(max(r.end for r in ranges))]
    for size, begin, end in ranges:
        used = set().union(*taken[begin:end])
        free = [n for n in range(max(used, default=-1) + 2) if n not in used]
        holes: list[list[int]] = []
        for n in free:
            if holes and holes[-1][-1] == n - 1:
                holes[-1].append(n)
            else:
                holes.append([n])
        fitting = [hole for hole in holes[:-1] if len(hole) >= size]
        place = min(fitting, key=len)[0] if fitting else holes[-1][0]
        for moment in taken[begin:end]:
            moment.update(range(place, place + size))
    return 1 + max(max(moment, default=-1) for moment in taken)


@pytest.mark.parametrize("seed", range(40))
def test_gaps_equal_those_of_a_heap_of_single_bytes(seed: int) -> None:
    rng = random.Random(seed)
    ranges = []
    for _ in range(rng.randint(2, 12)):
        begin = rng.randint(1, 8)
        ranges.append(LiveRange(rng.randint(1, 9), begin, rng.randint(begin + 1, 10)))
    orders = (lambda r: (r.begin, -r.size_bytes)), (lambda r: (r.begin - r.end, -r.size_bytes, r.begin))
    heights = [by_single_bytes(sorted(ranges, key=order)) for order in orders]
    held = [LiveRange(7, 0, 11), *ranges]
    gaps = min(heights) - peak_bytes(ranges)
    closed = by_single_bytes(sorted(ranges, key=lambda r: (-r.size_bytes, r.begin - r.end, r.begin)))
    assert gap_bytes(held) == gap_bytes(held, spare_bytes=gaps) == gaps
    assert gap_bytes(held, spare_bytes=gaps - 1) == min(gaps, closed - peak_bytes(ranges))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_are_added_in_float32(dtype: str) -> None:
    """The gradient of a table is 4 MiB in float32 while its consumer reads it, in whichever dtype it is handed on."""
    vocab, features, tokens = D("vocab", 1024), D("features", 1024), D("tokens", 512)
    with mtf.Graph():
        table = mtf.input("table", [vocab, features], dtype)
        weights = mtf.input("weights", [features, D("out", 128)], dtype)
        y = mtf.einsum([mtf.gather(table, mtf.input("at", [tokens], "int32"), vocab), weights], [tokens, "out"])
        (gradient,) = mtf.gradients([mtf.reduce_sum(mtf.square(y))], [table])
        program = mtf.lower({"z": mtf.einsum([gradient, weights], [vocab, "out"])})
    c = mtf.estimate(program, "v5e-1").memory.compiled
    assert c.layout_bytes == (1024 * 1024 * 2 if dtype == "bfloat16" else 0)
    share = FRAGMENTATION * (c.buffers_bytes + c.layout_bytes - c.state_bytes)
    assert c.fragmentation_bytes == pytest.approx(share, abs=2)
