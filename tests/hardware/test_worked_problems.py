"""Textbook problems on topology, rooflines, collectives, padding and point-to-point, in accepted ranges.

Problems and ranges are those of worked_problems.json, which takes them from jax-ml/scaling-book and says why
each range is as wide as it is; they are copied here by value, and compared with the file where present.
Questions that only count parameters or shards belong to other floors.
"""

import dataclasses

import pytest

from hardware import core, memory
from hardware.chips import CHIPS
from hardware.collectives import all_gather_seconds, all_reduce_seconds
from hardware.core import Matmul, Work, time_of
from hardware.memory import hbm_rate, padded_bytes, padded_shape
from hardware.mxu import MXU
from hardware.network import ici_links
from hardware.placement import DCN, placements
from hardware.shapes import wrap_of
from hardware.slices import Slice, legal_slices
from tests.hardware import reference

FILE = reference.load("worked_problems.json")
V2, V4, V5E, V5P, V6E = (CHIPS[name] for name in ("v2", "v4", "v5e", "v5p", "v6e"))
E_LINKS, P_LINKS, V4_LINKS = (ici_links(Slice(name)) for name in ("v5e-256", "v5p-128", "v4-128"))


def nominal(chip, size_bytes):
    """Time over HBM at the nominal rate, which the problems use."""
    return size_bytes / hbm_rate(chip)


def roof_07():
    """int8 [128, 8192] x [8192, 32768]."""
    size = 128 * 8192 + 8192 * 32768 + 128 * 32768
    return time_of(V5E, Work((Matmul(128, 8192, 32768, dtype="int8"),), hbm_bytes=size))


def mxu_rate():
    """Rows per cycle in the steady state, as FLOP/s."""
    mxu = MXU(V5E.mxu_rows, V5E.mxu_columns)
    rows_per_cycle = 8 / (mxu.cycles(1008, 128, 128) - mxu.cycles(1000, 128, 128))
    return rows_per_cycle * 2 * mxu.rows * mxu.columns * V5E.clock_hz


def lists(wrap):
    return "[" + ",".join(str(flag).lower() for flag in wrap) + "]"


def gather_ring(n):
    return all_gather_seconds(2 * 8192 * 8192, [(n, True)], P_LINKS)


def line_of_4(size_bytes):
    return all_gather_seconds(size_bytes, [(4, Slice("v5e-8x4").wrap[1])], E_LINKS)


def smallest_slice(chip, size_bytes):
    names = [Slice(name) for name in legal_slices(chip)]
    shape = next(s.torus_shape for s in names if s.hbm_bytes >= size_bytes)
    return "x".join(map(str, sorted(shape, reverse=True)))


ici = core.critical_intensity(V5P, "ici")
s1, s2 = (
    core.matmul_seconds(V5P, Matmul(8192, 2048, 32768)),
    all_reduce_seconds(2 * 8192 * 32768, [(4, True)], P_LINKS),
)
fast_pcie = dataclasses.replace(V6E, pcie_bytes_per_second=1.5e10)
tp_math = core.matmul_seconds(V5E, Matmul(2048, 2048, 8192))
tp_comms = all_reduce_seconds(2 * 2048 * 8192, [(4, False)], E_LINKS)
prf_05 = core.matmul_seconds(V5E, Matmul(1024, 8192, 16384))
prf_08 = all_gather_seconds(16777216, [(2, False)], E_LINKS)
matvec = time_of(V2, Work((Matmul(4096, 8192, 1),), hbm_bytes=67133440))

# (problem, quantity): (our answer, accepted range or list)
ANSWERS = {
    ("roof-04", "B_crit"): (
        core.compute_bound_rows(65536, 65536, core.critical_intensity(V5E)), [227.493478, 256.535199]
    ),
    ("roof-07", "T_math"): (roof_07().mxu_seconds, [0.00016569417, 0.000200577153]),
    ("roof-07", "T_hbm"): (roof_07().hbm_seconds, [0.000320980764, 0.000388555662]),
    ("roof-07", "T_lower (perfect overlap)"): (roof_07().lower_seconds, [0.000320980764, 0.000388555662]),
    ("roof-07", "T_upper (no overlap)"): (roof_07().upper_seconds, [0.000486674934, 0.000589132815]),
    ("roof-07", "bound"): ({"hbm": "memory-bound"}.get(roof_07().bound), ["memory-bound"]),
    ("roof-08", "B_crit"): (
        core.compute_bound_rows(2**24, 2**24, core.critical_intensity(V5E), right_bytes=1),
        [112.9128, 127.3272],
    ),
    ("roof-12", "B_crit (HBM)"): (core.critical_intensity(V5P), [155.732143, 172.125]),
    ("roof-12", "C/W_ici, one axis"): (ici, [2422.5, 2677.5]),
    ("tpu-01", "FLOP/s per MXU"): (mxu_rate(), [47677440000000, 50626560000000]),
    ("tpu-01", "FLOP/s per chip (bf16)"): (
        mxu_rate() * V5E.mxus_per_core, [190709760000000, 202506240000000]
    ),
    ("tpu-03", "T_load"): (nominal(V4, 200e9 * 2 / Slice("v4-64").devices), [0.0096, 0.0112]),
    ("tpu-04", "hosts"): (Slice("v5e-16x16").hosts, [32, 32]),
    ("tpu-04", "TensorCores"): (Slice("v5e-16x16").cores, [256, 256]),
    ("tpu-04", "bf16 FLOP/s"): (Slice("v5e-16x16").peak_flops(), [4.891904e16, 5.194496e16]),
    ("tpu-04", "HBM"): (Slice("v5e-16x16").hbm_bytes, [3768320000000, 4423680000000]),
    ("tpu-06", "v5e 16x16"): (lists(Slice("v5e-16x16").wrap), ["[true,true]"]),
    ("tpu-06", "v5e 8x16"): (lists(Slice("v5e-8x16").wrap), ["[false,true]"]),
    ("tpu-06", "v5e 4x4"): (lists(Slice("v5e-4x4").wrap), ["[false,false]"]),
    ("tpu-06", "v6e 4x8"): (lists(wrap_of(V6E, (4, 8))), ["[false,false]"]),
    ("tpu-08", "B_crit"): (core.critical_intensity(fast_pcie, "pcie"), [57653.3333, 65013.3333]),
    ("tpu-10", "B_crit"): (
        core.compute_bound_rows(4096, 16384, core.critical_intensity(V5E, "vmem", "int8"), 1, 1, 1), [9.5, 21]
    ),
    ("col-01", "T (line of 4)"): (line_of_4(2 * 2048 * 8192), [0.00052, 0.00062]),
    ("col-01", "T if the axis did wrap (book's naive number)"): (
        all_gather_seconds(2 * 2048 * 8192, [(4, True)], E_LINKS), [0.00027, 0.0004]
    ),
    ("col-03", "T (model)"): (line_of_4(2 * 256 * 256), [2.2e-06, 5.5e-06]),
    ("col-03", "regime"): (
        "latency-bound" if 3 * E_LINKS.hop_seconds > line_of_4(2 * 256 * 256) / 2 else "", ["latency-bound"]
    ),
    ("col-05", "T"): (
        all_gather_seconds(2 * 1024 * 4096 / 4, [(4, True)], V4_LINKS), [1.6777216e-05, 2.5165824e-05]
    ),
    ("col-09", "T at 16"): (gather_ring(16), [0.000686001721, 0.000805306368]),
    ("col-09", "T(16)/T(4)"): (gather_ring(16) / gather_ring(4), [0.95, 1.3]),
    ("smm-02", "S1 time"): (s1, [0.00227567766, 0.00275476769]),
    ("smm-02", "S2 time"): (s2, [0.0042949673, 0.00656175559]),
    ("smm-02", "faster"): ("strategy 1" if s1 < s2 else "strategy 2", ["strategy 1"]),
    ("smm-02", "D above which S2 wins at large B"): (2 * ici, [4794, 5406]),
    ("smm-04", "math per chip"): (tp_math, [0.00033138834, 0.000401154306]),
    ("smm-04", "comms"): (tp_comms, [0.00100663296, 0.00150994944]),
    ("smm-04", "bound"): ("comms-bound" if tp_comms > tp_math else "compute-bound", ["comms-bound"]),
    ("trn-01", "1 axis"): (core.critical_intensity(V5P, "ici"), [2397, 2703]),
    ("trn-01", "3 axes"): (core.critical_intensity(V5P, "ici", axes=3), [799, 901]),
    ("trn-01", "pod"): (8960 * core.critical_intensity(V5P, "ici", axes=3), [7159040, 8072960]),
    ("trn-04", "LLaMA 3-70B limit"): (28672 / ici, [10.5692863, 11.9185569]),
    ("trn-04", "Gemma-7B limit"): (49152 / ici, [18.1187765, 20.4318118]),
    ("trn-04", "8-way"): ("compute-bound" if 28672 / ici > 8 else "comms-bound", ["compute-bound"]),
    ("trn-04", "16-way"): ("compute-bound" if 28672 / ici > 16 else "comms-bound", ["comms-bound"]),
    ("trn-04", "F needed for 8-way"): (8 * ici, [19176, 21624]),
    ("trn-11", "tokens per pod"): (core.critical_intensity(V5P, "dcn"), [69033.6, 77846.4]),
    ("tim-03", "time per token"): (6 * 70e9 / V5P.peak_flops(), [0.00088, 0.00102]),
    ("imm-04", "slice"): (smallest_slice("v5e", 112949672960), ["4x2"]),
    ("lat-01", "step"): (nominal(V5E, (4 * 8192 * 1e5 + 30e9) / 16), [0.0024, 0.003]),
    ("lat-04", "step B=8"): (nominal(V5E, (8 * 1.34e9 + 26e9) / 8), [0.00542963415, 0.00615731707]),
    ("lat-04", "step B=64"): (nominal(V5E, (64 * 1.34e9 + 26e9) / 8), [0.0165254878, 0.0187402439]),
    ("lat-04", "batch 64 fits"): ("yes" if Slice("v5e-8").hbm_bytes > 64 * 1.34e9 + 26e9 else "no", ["yes"]),
    ("lat-07", "step"): (nominal(V5E, 16e9), [0.0183414634, 0.0206829268]),
    ("lat-07", "512 tokens"): (512 * nominal(V5E, 16e9), [9, 10.8]),
    ("ish-01", "ways"): (
        16384 / 32 / (core.critical_intensity(V5E, "ici") / core.critical_intensity(V5E)), [52, 68]
    ),
    ("lay-01", "padded"): (str(list(padded_shape((3, 5), 4, (2, 2)))).replace(" ", ""), ["[4,6]"]),
    ("lay-01", "expansion"): (padded_bytes((3, 5), 4, (2, 2)) / (3 * 5 * 4), [1.568, 1.632]),
    ("prf-01", "roofline"): (core.matmul_seconds(V2, Matmul(8192, 8192, 16384)), [0.0908292214, 0.109951163]),
    ("prf-01", "measured"): (core.matmul_seconds(V2, Matmul(8192, 8192, 16384)), [0.093, 0.108]),
    ("prf-05", "roofline"): (prf_05, [0.00132555336, 0.00160461722]),
    ("prf-05", "measured"): (prf_05, [0.00136, 0.00162]),
    ("prf-08", "model"): (prf_08, [0.0001752287, 0.000197598322]),
    ("prf-08", "measured"): (prf_08, [0.000165, 0.00022]),
    ("prf-10", "measured"): (matvec.hbm_seconds, [0.000175, 0.00025]),
    ("prf-10", "bound"): ({"hbm": "memory-bound"}.get(matvec.bound), ["memory-bound"]),
}  # fmt: skip


def accepted(value, accept):
    if isinstance(accept[0], str):
        return value in accept
    return accept[0] <= value <= accept[1]


@pytest.mark.parametrize("key", ANSWERS, ids=" ".join)
def test_answer_in_accepted_range(key):
    value, accept = ANSWERS[key]
    assert accepted(value, accept), (value, accept)


def test_ranges_are_those_of_the_file_and_hardware_problems_are_complete():
    problems = {problem["id"]: problem for problem in reference.need(FILE, "worked_problems.json")}
    for (number, quantity), (_, accept) in ANSWERS.items():
        answer = next(a for a in problems[number]["answers"] if a["quantity"] == quantity)
        assert answer["accept"] == accept, (number, quantity)
    ours = {"topology_counting", "collective", "matmul_roofline", "layout_padding", "host_and_p2p"}
    for number, problem in problems.items():
        if problem["kind"] in ours:
            for answer in problem["answers"]:
                assert (number, answer["quantity"]) in ANSWERS, (number, answer["quantity"])


def test_pod_of_two_slices_over_dcn():
    """trn-11 again, from a slice: a pod's chips over its DCN."""
    slice_ = Slice("2*v5p-17920")
    found = placements(slice_, {"pods": 2, "rest": 8960})
    assert any(placement.of(["pods"])[0].place == DCN for placement in found)
    assert slice_.hosts / 2 * 25e9 == pytest.approx(8960 * slice_.chip.dcn_bytes_per_second)
    assert memory.vmem_bytes(slice_.chip) == 128 * 2**20
