"""What the questions share: ideal chips, rings, products, gathers, bisection, bytes as the book counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import meshlib as mtf
from hardware import CHIPS, Chip, Placement, Slice
from hardware.core import critical_intensity
from hardware.placement import factorings
from meshlib.estimation import Physics, Row

D = mtf.Dimension
Answer = Callable[[], object]
Answers = dict[tuple[str, str], tuple[Answer, list[object]]]  # (problem, quantity) -> (answer, accepted)

# One byte an element. The MXU multiplies it in bfloat16 after a cast, as the problems on 8-bit weights say.
BYTE = "bool"


def ideal(kind: str, **figures: object) -> Chip:
    """A chip that reaches its nominal rates and launches for nothing: what the book's rooflines assume."""
    return dataclasses.replace(
        CHIPS[kind], mxu_efficiency=1.0, hbm_efficiency=1.0, dcn_efficiency=1.0, launch_seconds=0.0, **figures
    )


def ring(kind: str, n: int, **figures: object) -> Slice:
    """`n` ideal chips on one torus axis that wraps, whatever `n`."""
    axis = {"pod_shape": (n,), "max_slice_chips": n, "wrap_axis": n, "wrap_cube": None, "name_counts": "chips"}
    return Slice(f"{kind}-{n}", ideal(kind, **axis, **figures))


def estimate(program: mtf.Program, slice_: str | Slice, **options: Any) -> mtf.Estimate:
    """Of engines that lose nothing when they work together: what the book's rooflines assume."""
    return mtf.estimate(program, slice_, physics=Physics().without_losses(), **options)


def straight(slice_: str | Slice, mesh: mtf.Mesh) -> Placement:
    """The placement with each mesh axis along one torus axis, in order."""
    slice_ = slice_ if isinstance(slice_, Slice) else Slice(slice_)
    found = factorings(slice_, dict(mesh.sizes_by_axis))
    return Placement(slice_, next(p for p in found if [f.place for _, fs in p for f in fs] == list(range(len(p)))))


def product(
    m: int, k: int, n: int, slice_: str | Slice, mesh: str, layout: str = "", along: bool = False, **lowering: Any
) -> mtf.Estimate:
    """x[I, J] w[J, K] in bfloat16, w being a variable; `along`: mesh axes along torus axes."""
    rows, inner, columns = D("I", m), D("J", k), D("K", n)
    with mtf.Graph():
        x, w = mtf.input("x", [rows, inner], "bfloat16"), mtf.variable("w", [inner, columns], dtype="bfloat16")
        y = mtf.einsum([x, w], [rows, columns], name="product")
        program = mtf.lower({"y": y}, mesh=mesh, layout=layout, **lowering)
    return estimate(program, slice_, placement=straight(slice_, program.mesh) if along else None)


def gather(i: int, j: int, slice_: str | Slice, mesh: str, before: str, after: str = "") -> Row:
    """The row of an all_gather of bf16[I, J] from one layout to another, mesh axes along torus axes."""
    with mtf.Graph():
        x = mtf.input("x", [D("I", i), D("J", j)], "bfloat16")
        program = mtf.lower({"y": mtf.constrain(x, after)}, mesh=mesh, layout=before)
    (row,) = estimate(program, slice_, placement=straight(slice_, program.mesh)).rows
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


def smallest(reached: Callable[[int], bool], high: int = 4096, step: int = 1) -> int:
    """The smallest multiple of `step` that reaches something, if larger ones do."""
    low, high = 1, high // step
    assert reached(high * step)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle * step) else (middle + 1, high)
    return low * step


def at_peak(est: mtf.Estimate) -> bool:
    """Whether the roofline of the device lets the product compute at its peak."""
    (point,) = est.roofline()
    return point.attainable_flops_per_second == est.slice.peak_flops_per_device


def whole_bytes(est: mtf.Estimate, axes: str | None = None) -> float:
    """Bytes of the collectives as the book counts them: the whole array, an all_reduce twice.

    A ring of n moves (n-1)/n of that, which the estimate's seconds say; the book's thresholds leave it out.
    """
    total = 0.0
    for c in est.program.collectives:
        if axes is None or "+".join(c.axes) == axes:
            group = est.program.mesh.group_size(c.axes)
            times = {"all_gather": group, "reduce_scatter": 1, "all_reduce": 2}[c.kind]
            total += times * c.payload_bytes * c.count
    return total


def hides(est: mtf.Estimate, axes: int = 1, memory: str = "ici") -> bool:
    """Whether the flops of the program take longer than its collectives, both at nominal rates."""
    return est.flops / whole_bytes(est) >= critical_intensity(est.slice.chip, memory, axes=axes)
