"""Every fusion group and collective of the 784-1024-10 network by hand: counts exactly, time against the formulas.

A group is written down as what it reads, what it writes, and operations per element of which array; from that follow
bytes, tiles of (8, 128) and lane work. An exponential, logarithm or division counts 8 operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

import meshlib as mtf
from hardware import CHIPS, Matmul
from hardware.blocking import matmul_blocks
from meshlib.estimation import Physics
from tests.estimation.test_mnist_by_hand import DATA, F32, LAYOUTS, MODEL, SLICES, TWO_D, B, C, H, P, program, stored

Array = tuple[int, ...]
# MXUs, rate of rows into one of them (from peak over 2 x 128 x 128), HBM bytes/s, VPU clock; all of one core.
CORES = {
    "v2-8": (1, 45.9e12 / 2 / 2**15, 350e9, 700e6),
    "v3-8": (2, 123e12 / 4 / 2**15, 450e9, 940e6),
}


@dataclass(frozen=True)
class Group:
    """A kernel: `product` (m, k, n), arrays read and written, (operations per element, array), scalars among both."""

    reads: Sequence[Array]
    writes: Sequence[Array]
    ops: Sequence[tuple[int, Array]]
    product: tuple[int, int, int] | None = None
    scalars: int = 0
    scalar_ops: int = 0

    @property
    def flops(self) -> int:
        return 2 * math.prod(self.product) if self.product else 0

    @property
    def vpu_ops(self) -> int:
        return sum(n * math.prod(a) for n, a in self.ops) + self.scalar_ops

    @property
    def hbm_bytes(self) -> int:
        return F32 * (sum(math.prod(a) for a in (*self.reads, *self.writes)) + self.scalars)

    @property
    def traffic_bytes(self) -> int:
        return sum(padded(a) for a in (*self.reads, *self.writes)) + F32 * self.scalars

    def seconds(self, name: str) -> float:
        """1 us to launch; MXU, VPU and HBM at once; and what of the product's bytes nothing hides."""
        mxus, clock, rate, vpu_clock = CORES[name]
        lanes = sum(n * padded(a) / F32 for n, a in self.ops) + self.scalar_ops
        vpu = lanes / (vpu_clock * 8 * 128 * 2)
        hbm = self.traffic_bytes / (rate * 0.9)
        if self.product is None:
            return 1e-6 + max(vpu, hbm)
        mxu = ((cycles(*self.product, mxus) - 382) / 0.96 + 382) / clock
        # All of these fit VMEM; the first pieces of the operands and the last block of the result are exposed.
        blocks = matmul_blocks(CHIPS[name[:2]], Matmul(*self.product), F32)
        bare = min(blocks.exposed_bytes, self.traffic_bytes) / (rate * 0.9)
        assert blocks.read_bytes == F32 * self.product[1] * (self.product[0] + self.product[2])
        return 1e-6 + max(max(mxu, vpu) + bare, hbm)


def padded(array: Array) -> int:
    """Bytes in tiles, the denser way round; a vector takes tiles of its length, of 128 elements at least."""
    return stored(*array) if len(array) == 2 else F32 * max(128, array[0])


def cycles(m: int, k: int, n: int, mxus: int) -> int:
    """Either operand held in tiles of 128 x 128, the other streams in rows of 8; MXUs share tiles or rows."""
    ways = []
    for held, streamed in ((n, m), (m, n)):
        count = math.ceil(k / 128) * math.ceil(held / 128)
        ways.append((math.ceil(count / mxus), math.ceil(streamed / 8) * 8))
        ways.append((count, math.ceil(math.ceil(streamed / mxus) / 8) * 8))
    return min((count - 1) * max(rows, 128) + rows + 382 for count, rows in ways)


def groups(rows: int, cols: int) -> dict[str, Group]:
    """The kernels of a step for b examples and h hidden units on a core, by name."""
    b, h = B // rows, H // cols
    n, x, hidden, logits, w1, w2 = (b,), (b, P), (b, h), (b, C), (P, h), (h, C)
    one_hot = [(1, logits), (1, n), (2, logits)]
    found = {
        "ffn_in": Group([x, w1], [hidden], [(1, hidden)], (b, P, h)),  # and relu
        "ffn_out": Group([hidden, w2], [logits], [], (b, h, C)),
        # Labels as one-hot; 1/512 spread over examples and classes, times labels; summed over classes.
        "subtract_1/grad/reduce_sum": Group([n], [n], [*one_hot, (1, logits)], scalar_ops=3),
        # The loss and its gradient row by row, from logits, labels (again as one-hot, and times 1/512) and the sums.
        "ffn_out/grad/add_n": Group(
            [logits, n, n],
            [logits],
            [
                *one_hot,
                (1, logits),  # maximum
                (1 + 8, logits),  # exponential of logits minus maximum
                (1, logits),  # their sum
                (8 + 1, n),  # its logarithm plus the maximum
                (3, logits),  # minus logits, times labels, summed
                (1, n),  # the sum over examples
                (8, n),  # labels' sums divided
                (4, logits),  # spread, times exponentials; minus labels; both added
            ],
            scalars=1,
            scalar_ops=3 if rows > 1 else 4,
        ),
        "ffn_out/grad/einsum": Group([logits, w2], [hidden], [], (b, C, h)),
    }
    if rows > 1:  # the loss is a sum over cores, and its mean follows
        found["multiply_1"] = Group([], [], [], scalars=2, scalar_ops=2)
    if rows == 1:  # gradients are whole: the updates are fused with their products
        found["ffn_in/grad/einsum_1"] = Group(
            [hidden, hidden, x, w1], [w1], [(2, hidden), (2, w1)], (h, b, P), scalar_ops=1
        )
        found["ffn_out/grad/einsum_1"] = Group([logits, hidden, w2], [w2], [(2, w2)], (C, b, h), scalar_ops=1)
        return found
    found["ffn_in/grad/einsum_1"] = Group([hidden, hidden, x], [w1], [(2, hidden)], (h, b, P))
    found["ffn_out/grad/einsum_1"] = Group([logits, hidden], [w2], [], (C, b, h))
    found["w1/subtract"] = Group([w1, w1], [w1], [(2, w1)], scalar_ops=1)
    found["w2/subtract"] = Group([w2, w2], [w2], [(2, w2)], scalar_ops=1)
    return found


@LAYOUTS
@SLICES
def test_every_group(name, mesh, layout, rows, cols):
    est = mtf.estimate(program(mesh, layout), name, physics=Physics().without_losses())
    made = {r.name: r for r in est.rows if r.kind == "compute"}
    wanted = groups(rows, cols)
    assert made.keys() == wanted.keys()
    for key, group in wanted.items():
        row = made[key]
        assert (row.mxu_flops, row.vpu_ops, row.hbm_bytes) == (group.flops, group.vpu_ops, group.hbm_bytes), key
        assert row.traffic_bytes == group.traffic_bytes, key
        assert row.seconds + row.hidden_seconds == pytest.approx(group.seconds(name)), key
        assert 0 <= row.hidden_seconds <= row.seconds + row.hidden_seconds - max(row.mxu_seconds, row.vpu_seconds), key
        assert row.useful_flops == row.mxu_flops
    assert est.flops == sum(g.flops for g in wanted.values())
    assert est.vpu_ops == sum(g.vpu_ops for g in wanted.values())
    assert est.hbm_bytes == sum(g.hbm_bytes for g in wanted.values())
    hidden = sum(r.hidden_seconds for r in made.values())
    assert est.compute_seconds + hidden == pytest.approx(sum(g.seconds(name) for g in wanted.values()))


def reduction(size: int, axes: str, name: str) -> float:
    """An all_reduce of `size` bytes on each core: 5 us to start, then over the chip and over 2 x 2 chips."""
    hbm, link = {"v2-8": (700e9, 62e9), "v3-8": (900e9, 82e9)}[name]
    within = 2 * (size / 2) / (hbm / 2 / 2)
    # Each core has half of each link, of which 90 % are reached; 3/8 of the bytes cross each link, each way twice.
    if axes == "rows":
        return 5e-6 + within
    share, before = (size / 2, within) if axes == "cores" else (size, 0.0)
    return 5e-6 + before + 2 * (2 * 1e-6 + 3 / 8 * share / (link * 0.9 / 2))


@pytest.mark.parametrize("case", [DATA, MODEL, TWO_D])
@SLICES
def test_every_collective(name, case):
    mesh, layout, rows, cols = case
    b, h = B // rows, H // cols
    wanted = {
        "ffn_out": (b * C, "cores" if rows == 1 else "cols"),
        "reduce_sum_2": (1, "cores" if cols == 1 else "rows"),
        "ffn_in/grad/einsum_1": (P * h, "cores" if cols == 1 else "rows"),
        "ffn_out/grad/einsum_1": (h * C, "cores" if cols == 1 else "rows"),
    }
    if cols == 1:  # hidden is whole: logits are
        del wanted["ffn_out"]
    if rows == 1:  # the batch is whole: losses and gradients are
        wanted = {"ffn_out": wanted["ffn_out"]}
    est = mtf.estimate(program(mesh, layout), name)
    made = [r for r in est.rows if r.kind == "collective"]
    # What is small goes together over the same axes: the loss and dw2.
    found = {key: [key] for key in wanted}
    if rows > 1:
        found["reduce_sum_2"] += found.pop("ffn_out/grad/einsum_1")
    assert len(made) == len(found)
    for members in found.values():
        elements, axes = sum(wanted[m][0] for m in members), wanted[members[0]][1]
        k = {"cores": 8, "rows": 2, "cols": 4}[axes]
        (row,) = (r for r in made if r.payload_bytes == F32 * elements)
        assert (row.opcode, row.axes) == ("all_reduce", (axes,))
        assert row.name.endswith(f" and {len(members) - 1} more") == (len(members) > 1)
        assert row.sent_bytes == pytest.approx(2 * (k - 1) * F32 * elements / k)
        assert row.seconds == pytest.approx(reduction(F32 * elements, axes, name)), members


@LAYOUTS
@SLICES
def test_the_step_is_bounded_by_its_parts(name, mesh, layout, rows, cols):
    est = mtf.estimate(program(mesh, layout), name, physics=Physics().without_losses())
    kernels = sum(g.seconds(name) for g in groups(rows, cols).values()) - sum(r.hidden_seconds for r in est.rows)
    sent = sum(r.seconds for r in est.rows if r.kind == "collective")
    assert kernels + 0.5e-6 <= est.step_seconds <= kernels + sent + 0.5e-6
    assert est.step_seconds == pytest.approx(kernels + est.exposed_comm_seconds + 0.5e-6)
    none = mtf.estimate(program(mesh, layout), name, compiler=mtf.NO_OVERLAP, physics=Physics().without_losses())
    kernels = sum(r.seconds for r in none.rows if r.kind == "compute")
    assert none.step_seconds == pytest.approx(kernels + sent + 0.5e-6)
