"""Textbook questions on time, bytes, FLOPs and bounds, asked of programs through the public face.

Problems and ranges are those of worked_problems.json, which takes them from jax-ml/scaling-book; they are copied by
value and compared with the file where present. Where a problem lays a mesh axis along a torus axis, so does the test:
the best placement would often fold it into a ring over two axes, which is faster than the book's line.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

import meshlib as mtf
from hardware import Placement, Slice, placements
from meshlib.estimate import Row
from meshlib.lower import Value

FILE = Path(__file__).resolve().parents[3] / "shared" / "reference" / "worked_problems.json"
D = mtf.Dimension


def straight(slice_: str, mesh: mtf.Mesh) -> Placement:
    """The placement with each mesh axis along one torus axis, in order."""
    found = placements(Slice(slice_), dict(mesh.sizes_by_axis))
    return next(p for p in found if [f.place for _, fs in p.factors for f in fs] == list(range(len(p.factors))))


def product(m: int, k: int, n: int, slice_: str, mesh: str, layout: str = "", along: bool = False) -> mtf.Estimate:
    """x[I, J] w[J, K] in bfloat16, w being a variable; `along`: mesh axes along torus axes."""
    rows, inner, columns = D("I", m), D("J", k), D("K", n)
    with mtf.Graph():
        x, w = mtf.input("x", [rows, inner], "bfloat16"), mtf.variable("w", [inner, columns], dtype="bfloat16")
        y = mtf.einsum([x, w], [rows, columns], name="product")
        program = mtf.lower({"y": y}, mesh=mesh, layout=layout)
    return mtf.estimate(program, slice_, placement=straight(slice_, program.mesh) if along else None)


def gather(i: int, j: int, slice_: str, mesh: str, layout: str) -> Row:
    """The row of an all_gather of bf16[I, J], mesh axes along torus axes; layouts "before|after"."""
    with mtf.Graph():
        x = mtf.input("x", [D("I", i), D("J", j)], "bfloat16")
        program = mtf.lower({"y": mtf.constrain(x, layout.partition("|")[2])}, mesh=mesh,
                            layout=layout.partition("|")[0])  # fmt: skip
    (row,) = mtf.estimate(program, slice_, placement=straight(slice_, program.mesh)).rows
    assert row.opcode == "all_gather"
    return row


def wire(row: Row) -> float:
    """Seconds on the network alone, which the book's formulas give."""
    return row.seconds - row.launch_seconds


def row_of(est: mtf.Estimate, kind: str = "compute") -> Row:
    (row,) = (r for r in est.rows if r.kind == kind)
    return row


def collectives(est: mtf.Estimate) -> list[str]:
    return [f"{c.kind} {'+'.join(c.axes)} {c.tensor}" for c in est.program.collectives]


def threshold(slice_: str, size: int) -> int:
    """The smallest batch that the roofline of the device lets compute at its peak."""
    low, high = 1, 4096
    while low < high:
        middle = (low + high) // 2
        est = product(middle, size, size, slice_, f"chips:{Slice(slice_).devices}")
        (point,) = est.roofline()
        peak = point.attainable_flops_per_second == est.slice.peak_flops_per_device
        low, high = (low, middle) if peak else (middle + 1, high)
    return low


def trained(build, width: int) -> int:
    """FLOPs of a training step of what `build` makes of x[T, D], gradients of x included."""
    with mtf.Graph():
        x = mtf.variable("x", [D("T", 8192), D("D", width)], dtype="bfloat16")
        loss = mtf.reduce_sum(mtf.sin(build(x)))
        program = mtf.lower({"loss": loss}, mtf.optimize.SgdOptimizer(1.0).minimize(loss), mesh="chips:1")
    return mtf.estimate(program, "v5e-1").flops


def weight(name: str, dims: Sequence[mtf.Dimension]) -> mtf.Tensor:
    return mtf.variable(name, dims, dtype="bfloat16")


def mlp(x: mtf.Tensor) -> mtf.Tensor:
    t, d = x.shape
    f = D("F", 32768)
    a, b = (mtf.einsum([x, weight(n, [d, f])], [t, f]) for n in ("gate", "up"))
    return mtf.einsum([mtf.sin(a) * b, weight("down", [f, d])], [t, d])


def projections(x: mtf.Tensor) -> mtf.Tensor:
    t, d = x.shape
    heads = [D("N", 64), D("H", 128)]
    q, k, v = (mtf.einsum([x, weight(n, [d, *heads])], [t, *heads]) for n in "qkv")
    return mtf.einsum([mtf.sin(q) + mtf.sin(k) + v, weight("o", [*heads, d])], [t, d])


def core(x: mtf.Tensor) -> mtf.Tensor:
    """Scores and values of 64 heads of 128; q, k and v are x by other names."""
    t, d = x.shape
    n, h, m = D("N", 64), D("H", 128), D("M", 8192)
    q = mtf.reshape(x, [t, n, h])
    k, v = (mtf.rename_dimension(mtf.sin(y), "T", "M") for y in (q, mtf.sin(q)))
    scores = mtf.einsum([q, k], [n, t, m])
    return mtf.reshape(mtf.einsum([mtf.sin(scores), v], [t, n, h]), [t, d])


def five_letters() -> float:
    sizes = dict(zip("ijklmno", (2, 3, 5, 7, 11, 13, 17), strict=True))
    with mtf.Graph():
        a, b = (mtf.input(n, [D(c, sizes[c]) for c in n]) for n in ("ijkl", "ijmno"))
        c = mtf.einsum([a, b], [D(c, sizes[c]) for c in "klmno"])
        return mtf.estimate(mtf.lower({"c": c}, mesh="chips:1"), "v5e-1").flops


def loaded() -> float:
    """Reading 200e9 bfloat16 weights spread over 32 chips, at the nominal rate."""
    with mtf.Graph():
        w = mtf.variable("w", [D("a", 200_000), D("b", 1_000_000)], dtype="bfloat16")
        est = mtf.estimate(mtf.lower({"y": mtf.reduce_max(w)}, mesh="chips:32", layout="a:chips"), "v4-64")
    return max(r.hbm_bytes for r in est.rows) / est.slice.hbm_bytes_per_second_per_device


CUBE = "X:4;Y:4;Z:4"
# Strategy 1 gathers w while every chip multiplies all of it; strategy 2 reduces partial sums.
smm_02 = [product(8192, 2048, 32768, "v5p-4x4x4", CUBE, rules, along=True) for rules in ("", "J:X")]
smm_04 = product(8192, 8192, 8192, "v5e-4x4", "X:4;Y:4", "I:X;J:Y", along=True)
shd_01 = product(8, 2048, 8192, "v2-8", "X:4;Y:2", "I:X;activations/J:Y;variables/K:Y")
shd_04 = product(8, 2048, 8192, "v5e-4", "X:2;Y:2", "I:X;J:Y")
prf_05 = row_of(product(2048, 8192, 32768, "v5e-4", "data:2;model:2", "I:data;K:model"))
prf_01 = row_of(product(32768, 8192, 32768, "v2-8", "data:4;model:2", "I:data;K:model"))
prf_08 = gather(1024, 8192, "v5e-4", "data:2;model:2", "I:model|")
prf_10 = product(4096, 8192, 1, "v2-8", "copies:8")


def ring(n: int) -> float:
    return wire(gather(8192, 8192, f"v5p-{n}x{n}x{n}", f"X:{n};Y:{n};Z:{n}", "I:X|"))


def local(value: Value) -> str:
    return "[" + ",".join(map(str, value.local.shape.sizes)) + "]"


ANSWERS = {
    ("roof-04", "B_crit"): (lambda: threshold("v5e-1", 65536), [227.493478, 256.535199]),
    ("roof-12", "B_crit (HBM)"): (lambda: threshold("v5p-8", 65536), [155.732143, 172.125]),
    ("tpu-03", "T_load"): (loaded, [0.0096, 0.0112]),
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
    ("col-01", "T (line of 4)"): (
        lambda: gather(2048, 8192, "v5e-8x4", "X:8;Y:4", "I:Y|").seconds, [0.00052, 0.00062]
    ),
    ("col-03", "T (model)"): (lambda: wire(gather(256, 256, "v5e-8x4", "X:8;Y:4", "I:Y|")), [2.2e-06, 5.5e-06]),
    ("col-03", "regime"): (
        lambda: {"latency": "latency-bound"}[gather(256, 256, "v5e-8x4", "X:8;Y:4", "I:Y|").bound], ["latency-bound"]
    ),
    ("col-05", "T"): (
        lambda: wire(gather(1024, 4096, "v4-4x4x4", CUBE, "I:X;J:Y|J:Y")), [1.6777216e-05, 2.5165824e-05]
    ),
    ("smm-02", "S1 time"): (lambda: row_of(smm_02[0]).mxu_seconds, [0.00227567766, 0.00275476769]),
    ("smm-02", "S2 time"): (
        lambda: row_of(smm_02[1], "collective").seconds, [0.0042949673, 0.00656175559]
    ),
    ("smm-02", "faster"): (
        lambda: "strategy 1" if smm_02[0].step_seconds < smm_02[1].step_seconds else "strategy 2", ["strategy 1"]
    ),
    ("smm-04", "collective"): (
        lambda: {"all_reduce Y product": "AllReduce_Y of C[I_X,K]"}[collectives(smm_04)[0]],
        ["AllReduce_Y of C[I_X,K]"],
    ),
    ("smm-04", "math per chip"): (lambda: row_of(smm_04).seconds, [0.00033138834, 0.000401154306]),
    ("smm-04", "comms"): (lambda: row_of(smm_04, "collective").seconds, [0.00100663296, 0.00150994944]),
    ("smm-04", "bound"): (lambda: {"ici": "comms-bound"}.get(smm_04.bound, "compute-bound"), ["comms-bound"]),
    ("cnt-03", "FLOP"): (five_letters, [1019998.98, 1022041.02]),
    ("cnt-09", "MLP"): (lambda: trained(mlp, 8192), [39186594400000.0, 39978242800000.0]),
    ("cnt-09", "QKVO"): (lambda: trained(projections, 8192), [13062198100000.0, 13326080900000.0]),
    ("cnt-09", "attention core"): (lambda: trained(core, 8192), [6531099070000.0, 6663040460000.0]),
    ("prf-01", "roofline"): (lambda: prf_01.mxu_seconds, [0.0908292214, 0.109951163]),
    ("prf-01", "measured"): (lambda: prf_01.seconds, [0.093, 0.108]),
    ("prf-05", "roofline"): (lambda: prf_05.mxu_seconds, [0.00132555336, 0.00160461722]),
    ("prf-05", "measured"): (lambda: prf_05.seconds, [0.00136, 0.00162]),
    ("prf-08", "model"): (lambda: wire(prf_08), [0.0001752287, 0.000197598322]),
    ("prf-08", "measured"): (lambda: prf_08.seconds, [0.000165, 0.00022]),
    ("prf-10", "bytes"): (lambda: row_of(prf_10).hbm_bytes, [66797772.8, 67469107.2]),
    ("prf-10", "measured"): (lambda: prf_10.step_seconds, [0.000175, 0.00025]),
    ("prf-10", "bound"): (lambda: {"hbm": "memory-bound"}.get(prf_10.bound), ["memory-bound"]),
    ("col-09", "T at 16"): (lambda: ring(16), [0.000686001721, 0.000805306368]),
    ("col-09", "T(16)/T(4)"): (lambda: ring(16) / ring(4), [0.95, 1.3]),
}  # fmt: skip


@pytest.mark.parametrize("key", ANSWERS, ids=" ".join)
def test_answer_in_accepted_range(key):
    answer, accept = ANSWERS[key]
    value = answer()
    assert value in accept if isinstance(accept[0], str) else accept[0] <= value <= accept[1], (value, accept)


def test_ranges_are_those_of_the_file():
    if not FILE.exists():
        pytest.skip(f"{FILE.name} is not beside this checkout ({FILE.parent})")
    problems = json.loads(FILE.read_text())
    if isinstance(problems, dict):
        problems = problems["problems"]
    asked = {(p["id"], a["quantity"]): a["accept"] for p in problems for a in p["answers"]}
    for key, (_, accept) in ANSWERS.items():
        assert asked[key] == accept, key
