"""What stays in VMEM between kernels is not read again: by hand, for chips with and without room for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import meshlib as mtf
from hardware import CHIPS, Slice
from meshlib.estimation.time.kernel_times import Times
from meshlib.estimation.time.physics import Physics

D = mtf.Dimension
BATCH = 8
ONE = Slice("v4-1x1x1", replace(CHIPS["v4"], pod_shape=(1, 1, 1), wrap_cube=None))  # a chip of its own


def recurrent(size: int, trips: int, chip: str) -> mtf.Estimate:
    """h <- tanh(h w + x), the weights from outside the loop."""
    t, b, h = D("t", trips), D("b", BATCH), D("h", size)
    with mtf.Graph():
        w, xs = mtf.variable("w", [h, D("h2", size)], dtype="bfloat16"), mtf.input("xs", [t, b, h], "bfloat16")

        def body(c, s):
            y = mtf.rename_dimension(mtf.einsum([c[0], w]), "h2", "h")
            return (mtf.tanh(y + s[0]),), ()

        (y,), _ = mtf.scan(body, [mtf.zeros([b, h], "bfloat16")], [xs], t)
        return mtf.estimate(mtf.lower({"y": y}, mesh={"v4-8": "p:4"}.get(chip, "p:1")), chip)


@pytest.mark.parametrize(
    ("chip", "size", "stays"),
    [
        ("v5e-1", 2048, True),  # 8 MiB
        ("v5e-1", 4096, True),  # 32 MiB, and half of VMEM is 64
        ("v5e-1", 8192, False),  # 128 MiB
        ("v4-8", 4096, True),  # in CMEM
    ],
)
def test_the_weights_of_a_recurrent_network_are_read_once_if_they_fit(chip: str, size: int, stays: bool) -> None:
    trips = 50
    est = recurrent(size, trips, chip)
    (row,) = (r for r in est.rows if r.mxu_flops)
    once = 2 * size * size
    in_all = row.traffic_bytes * trips
    if stays:
        assert once <= in_all < 2 * once + trips * 4 * 2 * BATCH * size
    else:
        assert in_all >= trips * once


def test_a_table_is_read_again_where_too_much_lies_between() -> None:
    """The same weights at both ends of a chain: between them passes more, or less, than half of VMEM."""

    def traffic(between: int) -> float:
        b, d = D("b", BATCH), D("d", 2048)
        with mtf.Graph():
            x, w = mtf.input("x", [b, d], "bfloat16"), mtf.variable("w", [d, D("out", 2048)], dtype="bfloat16")

            def times(x: mtf.Tensor, w: mtf.Tensor) -> mtf.Tensor:
                return mtf.sin(mtf.rename_dimension(mtf.einsum([x, w]), "out", "d"))

            y = times(x, w)
            for n in range(between):
                y = times(y, mtf.variable(f"w{n}", [d, D("out", 2048)], dtype="bfloat16"))
            y = times(y, w)
            est = mtf.estimate(mtf.lower({"y": y}, mesh="p:1"), "v5e-1")
        return sum(r.traffic_bytes * r.count for r in est.rows) / (2 * 2048 * 2048)

    assert traffic(3) == pytest.approx(4, rel=0.05)  # 4 of 8 MiB each, the first used twice
    assert traffic(9) == pytest.approx(11, rel=0.05)  # 72 MiB between


def test_what_the_oldest_chips_have_is_a_kernels_own() -> None:
    held = {name: Times(CHIPS[name], Physics()).held_bytes >> 20 for name in ("v2", "v3", "v4", "v5e")}
    assert held == {"v2": 0, "v3": 0, "v4": 128, "v5e": 64}


@pytest.mark.parametrize(("batch", "left_mib"), [(2**13, 0), (2**16, 0), (2**17, 128)])
def test_what_passes_stays_in_common_memory_as_far_as_it_has_room(batch: int, left_mib: int) -> None:
    """Two products in a row on v4: of a result of 16 to 256 MiB passes HBM what 128 MiB of CMEM do not hold."""
    b, d = D("b", batch), D("d", 1024)
    with mtf.Graph():
        x, w = mtf.input("x", [b, d], "bfloat16"), mtf.variable("w", [d, D("e", 1024)], dtype="bfloat16")
        v = mtf.variable("v", [D("e", 1024), D("f", 1024)], dtype="bfloat16")
        program = mtf.lower({"z": mtf.einsum([mtf.tanh(mtf.einsum([x, w])), v])})
    est = mtf.estimate(program, ONE, physics=Physics().without_losses())
    size, weights = 2 * batch * 1024, 2 * 2**20
    for row in (r for r in est.rows if r.mxu_flops):
        assert row.hbm_bytes == 2 * size + weights
        assert size <= row.traffic_bytes - left_mib * 2**20 <= size + weights


@pytest.mark.parametrize(("batch", "spared_mib"), [(2**15, 64), (2**17, 128)])
def test_what_a_program_returns_is_read_from_common_memory(batch: int, spared_mib: int) -> None:
    """A result of 64 or 256 MiB goes out and into another product: it is written whole, and read in part."""
    b, d = D("b", batch), D("d", 1024)
    with mtf.Graph():
        x, w = mtf.input("x", [b, d], "bfloat16"), mtf.variable("w", [d, D("e", 1024)], dtype="bfloat16")
        v = mtf.variable("v", [D("e", 1024), D("f", 1024)], dtype="bfloat16")
        y = mtf.einsum([x, w])
        program = mtf.lower({"y": y, "z": mtf.einsum([y, v])})
    est = mtf.estimate(program, ONE, physics=Physics().without_losses())
    first, second = (row for row in est.rows if row.mxu_flops)
    assert first.traffic_bytes == first.hbm_bytes
    assert second.hbm_bytes - second.traffic_bytes == spared_mib * 2**20


def test_a_cache_of_which_a_part_was_written_is_read_from_memory() -> None:
    """16 KiB of 32 MiB are written in place, all of it is summed: the rest was never in VMEM."""
    length, d = D("length", 8192), D("d", 1024)
    with mtf.Graph():
        cache, x = mtf.variable("cache", [length, d]), mtf.input("x", [D("length", 4), d])
        new = mtf.update_slice(cache, x, length, mtf.input("at", [], "int32"))
        y = mtf.reduce_sum(mtf.square(new), reduced_dim=length)
        program = mtf.lower({"y": y}, [mtf.assign(cache, new)])
    est = mtf.estimate(program, "v5e-1")
    assert max(row.traffic_bytes for row in est.rows) >= 4 * (8192 - 4) * 1024
