"""Chapters 3 and 10: what is inserted where, and what it takes.

Where a problem lays a mesh axis along a torus axis, so does the test: the best placement would often fold it into a
ring over two axes, which is faster than the book's line.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import meshlib as mtf
from hardware import CHIPS, Slice
from hardware.core import critical_intensity
from meshlib.lowering import Value
from tests.estimation.worked.common import Answers, collectives, gather, product, row_of, smallest, wire

BALANCE = mtf.Balance(critical_intensity(CHIPS["v5e"], "ici"))
CUBE = "X:4;Y:4;Z:4"
# Strategy 1 multiplies all of a weight that lies whole on every chip; strategy 2 reduces partial sums.
smm_02 = [product(8192, 2048, 32768, "v5p-4x4x4", CUBE, rules, along=True) for rules in ("", "J:X")]
smm_04 = product(8192, 8192, 8192, "v5e-4x4", "X:4;Y:4", "I:X;J:Y", along=True)
shd_01 = product(8, 2048, 8192, "v2-8", "X:4;Y:2", "I:X;activations/J:Y;variables/K:Y")
shd_04 = product(8, 2048, 8192, "v5e-4", "X:2;Y:2", "I:X;J:Y")


def local(value: Value) -> str:
    return "[" + ",".join(map(str, value.local.shape.sizes)) + "]"


def ring_of(n: int) -> float:
    return wire(gather(8192, 8192, f"v5p-{n}x{n}x{n}", f"X:{n};Y:{n};Z:{n}", "I:X"))


def wrapped() -> float:
    """The same gather on a v5e whose axes of 4 wrap."""
    chip = dataclasses.replace(CHIPS["v5e"], wrap_axis=4)
    return wire(gather(2048, 8192, Slice("v5e-8x4", chip), "X:8;Y:4", "I:Y"))


def inserted(layout: str, j: int = 4096, k: int = 8192, **lowering: Any) -> str:
    """What A[I, J] B[J, K] = C, I being 1024, needs over 8 chips, in the book's words."""
    est = product(1024, j, k, "v5e-8", "X:8", layout, **lowering)
    names = {"all_gather": "AllGather", "all_reduce": "AllReduce", "reduce_scatter": "ReduceScatter"}
    arrays = {"x": "A", "w": "B", "product": "C"}
    found = [(names[c.kind], "+".join(c.axes), arrays[c.tensor], c.dim) for c in est.program.collectives]
    if not found:
        return "none"
    ((kind, axes, array, _),) = found
    where = f" into {est.program.outputs['y'].sharding.shape.names[1]}" if kind == "ReduceScatter" else ""
    return f"{kind}_{axes} of {array}{where}"


def reducing_wins(d: int) -> bool:
    """Whether strategy 2 is faster for a contracted dim of d and many rows; the book adds up its times."""
    alone = {"along": True, "compiler": mtf.NO_OVERLAP}
    one, two = (product(65536, d, 65536, "v5p-4x4x4", CUBE, rules, **alone) for rules in ("", "J:X"))
    return two.step_seconds < one.step_seconds


ANSWERS: Answers = {
    ("shd-01", "local A"): (lambda: local(shd_01.program.inputs["x"]), ["[2,1024]"]),
    ("shd-01", "local B"): (lambda: local(shd_01.program.variables["w"]), ["[2048,4096]"]),
    ("shd-04", "local In"): (lambda: local(shd_04.program.inputs["x"]), ["[4,1024]"]),
    ("shd-04", "local W"): (lambda: local(shd_04.program.variables["w"]), ["[1024,8192]"]),
    ("shd-04", "collective"): (
        lambda: {"all_reduce Y product": "AllReduce over Y"}[collectives(shd_04)[0]], ["AllReduce over Y"]
    ),
    ("shd-04", "AllReduce operand per device"): (
        lambda: shd_04.program.collectives[0].payload_bytes, [65536, 65536]
    ),
    ("shd-05", "a"): (lambda: inserted("I:X"), ["none"]),
    # Where every chip may repeat work that costs it less than sending; else B is cut and C reduced, the other way.
    ("shd-05", "b"): (lambda: inserted("activations/J:X", j=1024, balance=BALANCE), ["AllGather_X of A"]),
    ("shd-05", "c"): (lambda: inserted("J:X"), ["AllReduce_X of C"]),
    ("shd-05", "d"): (lambda: inserted("J:X;activations/K:X"), ["ReduceScatter_X of C into K"]),
    ("shd-05", "e"): (
        lambda: inserted("activations/I:X;variables/K:X", k=512), ["AllGather_X of A", "AllGather_X of B"]
    ),
    ("col-01", "T (line of 4)"): (
        lambda: gather(2048, 8192, "v5e-8x4", "X:8;Y:4", "I:Y").seconds, [0.00052, 0.00062]
    ),
    ("col-01", "T if the axis did wrap (book's naive number)"): (wrapped, [0.00027, 0.0004]),
    ("col-03", "T (model)"): (lambda: wire(gather(256, 256, "v5e-8x4", "X:8;Y:4", "I:Y")), [2.2e-06, 5.5e-06]),
    ("col-03", "regime"): (
        lambda: {"latency": "latency-bound"}[gather(256, 256, "v5e-8x4", "X:8;Y:4", "I:Y").bound], ["latency-bound"]
    ),
    ("col-05", "T"): (
        lambda: wire(gather(1024, 4096, "v4-4x4x4", CUBE, "I:X;J:Y", "J:Y")), [1.6777216e-05, 2.5165824e-05]
    ),
    ("col-09", "T at 16"): (lambda: ring_of(16), [0.000686001721, 0.000805306368]),
    ("col-09", "T(16)/T(4)"): (lambda: ring_of(16) / ring_of(4), [0.95, 1.3]),
    ("smm-02", "S1 time"): (lambda: row_of(smm_02[0]).mxu_seconds, [0.00227567766, 0.00275476769]),
    ("smm-02", "S2 time"): (
        lambda: row_of(smm_02[1], "collective").seconds, [0.0042949673, 0.00656175559]
    ),
    ("smm-02", "faster"): (
        lambda: "strategy 1" if smm_02[0].step_seconds < smm_02[1].step_seconds else "strategy 2", ["strategy 1"]
    ),
    ("smm-02", "D above which S2 wins at large B"): (lambda: smallest(reducing_wins, 8192, 4), [4794, 5406]),
    ("smm-04", "collective"): (
        lambda: {"all_reduce Y product": "AllReduce_Y of C[I_X,K]"}[collectives(smm_04)[0]],
        ["AllReduce_Y of C[I_X,K]"],
    ),
    ("smm-04", "math per chip"): (lambda: row_of(smm_04).seconds, [0.00033138834, 0.000401154306]),
    ("smm-04", "comms"): (lambda: row_of(smm_04, "collective").seconds, [0.00100663296, 0.00150994944]),
    ("smm-04", "bound"): (lambda: {"ici": "comms-bound"}.get(smm_04.bound, "compute-bound"), ["comms-bound"]),
}  # fmt: skip
