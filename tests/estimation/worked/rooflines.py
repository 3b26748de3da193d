"""Chapters 1, 2 and 9: products, rates of machines, tiles, profiles."""

from __future__ import annotations

import math

import meshlib as mtf
from hardware import CHIPS, MXU, Chip, Slice
from hardware.core import compute_bound_rows, critical_intensity
from hardware.memory import padded_bytes, padded_shape
from tests.estimation.worked.common import (
    BYTE,
    Answers,
    D,
    at_peak,
    estimate,
    gather,
    ideal,
    product,
    row_of,
    smallest,
    wire,
)


def threshold(slice_: str, size: int) -> int:
    """The smallest batch at which a product from HBM can compute at the peak of the device."""
    return smallest(lambda batch: at_peak(product(batch, size, size, slice_, f"chips:{Slice(slice_).devices}")))


def expert_threshold(experts: int, active: int, size: int = 32768) -> int:
    """The same for one-byte weights that are multiplied in bfloat16, each token using some of many experts."""

    def reached(tokens: int) -> bool:
        e, c, d, f = D("experts", experts), D("tokens", tokens * active // experts), D("D", size), D("F", size)
        with mtf.Graph():
            x, w = mtf.input("x", [e, c, d], "bfloat16"), mtf.variable("w", [e, d, f], 0, BYTE, trainable=False)
            y = mtf.einsum([x, mtf.cast(w, "bfloat16")], [e, c, f])
            return at_peak(estimate(mtf.lower({"y": y}, mesh="chips:1"), "v5e-1"))

    return smallest(reached, 8192, experts // active)


def eight_bit() -> mtf.Estimate:
    """int8[128, 8192] x int8[8192, 32768] from HBM on a chip without losses."""
    b, d, f = D("B", 128), D("D", 8192), D("F", 32768)
    with mtf.Graph():
        x, w = (mtf.variable(n, s, 0, BYTE, trainable=False) for n, s in (("x", [b, d]), ("w", [d, f])))
        y = mtf.einsum([mtf.cast(x, "bfloat16"), mtf.cast(w, "bfloat16")], [b, f], precision="int8")
        return estimate(mtf.lower({"y": y}, mesh="chips:1"), Slice("v5e-1", ideal("v5e")))


def mxu_rate(clock: float) -> float:
    """FLOP/s of one 128 x 128 array, from the cycles that more rows cost."""
    array, rows = MXU(128, 128), 8
    cycles = array.cycles(1024 + rows, 128, 128) - array.cycles(1024, 128, 128)
    return 2 * rows * 128 * 128 / cycles * clock


def loaded() -> float:
    """Reading 200e9 bfloat16 weights spread over 32 chips, at the nominal rate."""
    with mtf.Graph():
        w = mtf.variable("w", [D("a", 200_000), D("b", 1_000_000)], dtype="bfloat16")
        est = estimate(mtf.lower({"y": mtf.reduce_max(w)}, mesh="chips:32", layout="a:chips"), "v4-64")
    return max(r.hbm_bytes for r in est.rows) / est.slice.hbm_bytes_per_second_per_device


def from_vmem() -> float:
    """Rows from which [B, 4096] x [4096, 16384] in int8 computes longer than VMEM delivers."""
    assert CHIPS["v5e"].vmem_bytes_per_core > 4096 * 16384
    return compute_bound_rows(4096, 16384, critical_intensity(ideal("v5e"), "vmem", "int8"), 1, 1, 1)


def over_pcie() -> float:
    """The problem gives PCIe 1.5e10 B/s; weights alone count, which is the ratio of the rates."""
    import dataclasses

    chip: Chip = dataclasses.replace(CHIPS["v6e"], pcie_bytes_per_second=1.5e10)
    return critical_intensity(chip, "pcie")


def wraps(name: str) -> str:
    return "[" + ",".join(str(w).lower() for w in Slice(name).wrap) + "]"


def model_ways() -> str:
    """On how many ways 32768 rows are split, for a core to hold 4096 of them."""
    found = [w for w in (1, 2, 4, 8) if _local_rows(w) == 4096]
    return "/".join(map(str, found))


def _local_rows(ways: int) -> int:
    est = product(32768, 8192, 1, "v2-8", f"copies:{8 // ways};model:{ways}", "I:model")
    return est.program.outputs["y"].local.shape.sizes[0]


pod = Slice("v5e-16x16")
roof_07 = eight_bit()
prf_05 = row_of(product(2048, 8192, 32768, "v5e-4", "data:2;model:2", "I:data;K:model"))
prf_01 = row_of(product(32768, 8192, 32768, "v2-8", "data:4;model:2", "I:data;K:model"))
prf_08 = gather(1024, 8192, "v5e-4", "data:2;model:2", "I:model")
prf_10 = product(4096, 8192, 1, "v2-8", "copies:8")

ANSWERS: Answers = {
    ("roof-04", "B_crit"): (lambda: threshold("v5e-1", 65536), [227.493478, 256.535199]),
    ("roof-07", "T_math"): (lambda: row_of(roof_07).mxu_seconds, [0.00016569417, 0.000200577153]),
    ("roof-07", "T_hbm"): (lambda: row_of(roof_07).hbm_seconds, [0.000320980764, 0.000388555662]),
    ("roof-07", "T_lower (perfect overlap)"): (lambda: roof_07.lower_seconds, [0.000320980764, 0.000388555662]),
    ("roof-07", "T_upper (no overlap)"): (lambda: roof_07.upper_seconds, [0.000486674934, 0.000589132815]),
    ("roof-07", "bound"): (lambda: {"hbm": "memory-bound"}.get(roof_07.bound), ["memory-bound"]),
    ("roof-08", "B_crit"): (lambda: expert_threshold(1, 1, 65536), [112.9128, 127.3272]),
    ("roof-12", "B_crit (HBM)"): (lambda: threshold("v5p-8", 65536), [155.732143, 172.125]),
    ("roof-12", "C/W_ici, one axis"): (lambda: critical_intensity(CHIPS["v5p"], "ici"), [2422.5, 2677.5]),
    ("tpu-01", "FLOP/s per MXU"): (lambda: mxu_rate(1.5e9), [47677440000000, 50626560000000]),
    ("tpu-01", "FLOP/s per chip (bf16)"): (
        lambda: CHIPS["v5e"].mxus_per_core * mxu_rate(CHIPS["v5e"].clock_hz), [190709760000000, 202506240000000]
    ),
    ("tpu-03", "T_load"): (loaded, [0.0096, 0.0112]),
    ("tpu-04", "hosts"): (lambda: pod.hosts, [32, 32]),
    ("tpu-04", "TensorCores"): (lambda: pod.cores, [256, 256]),
    ("tpu-04", "bf16 FLOP/s"): (pod.peak_flops, [4.891904e+16, 5.194496e+16]),
    ("tpu-04", "HBM"): (lambda: pod.hbm_bytes, [3768320000000, 4423680000000]),
    ("tpu-06", "v5e 16x16"): (lambda: wraps("v5e-16x16"), ["[true,true]"]),
    ("tpu-06", "v5e 8x16"): (lambda: wraps("v5e-8x16"), ["[false,true]"]),
    ("tpu-06", "v5e 4x4"): (lambda: wraps("v5e-4x4"), ["[false,false]"]),
    ("tpu-06", "v6e 4x8"): (lambda: wraps("v6e-4x8"), ["[false,false]"]),
    ("tpu-08", "B_crit"): (over_pcie, [57653.3333, 65013.3333]),
    ("tpu-10", "B_crit"): (from_vmem, [9.5, 21]),
    ("moe-03", "B_crit"): (lambda: expert_threshold(256, 8), [3648, 4032]),
    ("lay-01", "padded"): (lambda: str(list(padded_shape((3, 5), 4, (2, 2)))).replace(" ", ""), ["[4,6]"]),
    ("lay-01", "expansion"): (lambda: padded_bytes((3, 5), 4, (2, 2)) / (4 * math.prod((3, 5))), [1.568, 1.632]),
    ("prf-01", "roofline"): (lambda: prf_01.mxu_seconds, [0.0908292214, 0.109951163]),
    ("prf-01", "measured"): (lambda: prf_01.seconds, [0.093, 0.108]),
    ("prf-05", "roofline"): (lambda: prf_05.mxu_seconds, [0.00132555336, 0.00160461722]),
    ("prf-05", "measured"): (lambda: prf_05.seconds, [0.00136, 0.00162]),
    ("prf-08", "model"): (lambda: wire(prf_08), [0.0001752287, 0.000197598322]),
    ("prf-08", "measured"): (lambda: prf_08.seconds, [0.000165, 0.00022]),
    ("prf-10", "bytes"): (lambda: row_of(prf_10).hbm_bytes, [66797772.8, 67469107.2]),
    ("prf-10", "measured"): (lambda: prf_10.step_seconds, [0.000175, 0.00025]),
    ("prf-10", "bound"): (lambda: {"hbm": "memory-bound"}.get(prf_10.bound), ["memory-bound"]),
    ("prf-10", "TP ways"): (model_ways, ["8"]),
}  # fmt: skip
