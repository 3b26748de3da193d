"""Micro-benchmarks as programs: products, copies over HBM, and collectives on one slice.

Each is written, lowered and estimated through the public face; every device of the smallest slice does the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hardware.chips import get_chip
from hardware.placement import CORES, Placement, placements
from hardware.slices import Slice, legal_slices
from layouts import Dimension
from meshlib.estimate import Estimate, estimate
from meshlib.estimate.policies import NotExpressed
from meshlib.graph import Graph, Tensor

_COLLECTIVES = {
    "all_gather": "all_gather", "allgather": "all_gather", "psum": "all_reduce", "all_reduce": "all_reduce",
    "allreduce": "all_reduce", "reduce_scatter": "reduce_scatter", "psum_scatter": "reduce_scatter",
    "all_to_all": "all_to_all", "alltoall": "all_to_all",
}  # fmt: skip
_BYTES = {"bf16": 2, "f32": 4, "float32": 4, "bfloat16": 2}


def kind_of(row: Mapping[str, Any]) -> str:
    """What a row measures, "matmul", "HBM copy" or a collective; "" where it is no micro-benchmark.

    >>> kind_of({"model": {"op": "psum over a group of 4"}}), kind_of({"model": {"layers": 3}})
    ('all_reduce', '')
    """
    text = _op(row).lower()
    if "matmul" in text or "gemm" in text:
        return "matmul"
    if "hbm" in text and ("copy" in text or "bandwidth" in text):
        return "HBM copy"
    return next((kind for word, kind in _COLLECTIVES.items() if word in text), "")


def seconds_of(row: Mapping[str, Any]) -> tuple[float, float]:
    """(predicted, measured) seconds.

    Raises: NotExpressed, with the reason.
    """
    with Graph():
        est, measured = _express(row, row["model"], _op(row), kind_of(row))
    return est.step_seconds, measured


def _op(row: Mapping[str, Any]) -> str:
    model = row.get("model")
    return str(model.get("op", "")) if isinstance(model, Mapping) else ""


def _express(row: Mapping[str, Any], model: Mapping[str, Any], op: str, kind: str) -> tuple[Estimate, float]:
    measured = row.get("measured") or {}
    if "dcn" in op.lower():
        raise NotExpressed("the number of slices behind the printed figure is not stated")
    chip = get_chip(str(row["chip"]))
    dtype = "bfloat16" if "bf16" in str(row.get("precision", op)).lower() else "float32"
    if "int8" in str(row.get("precision", "")).lower() or "fp8" in str(row.get("precision", "")).lower():
        raise NotExpressed("8-bit products are not in the library yet")
    if kind == "matmul":
        m, k, n = (int(model.get(d, model.get("n", 0))) for d in "mkn")
        return _alone(chip.name, _product(m, k, n, dtype)), _measured(measured, 2 * m * k * n, 0)
    if kind == "HBM copy":
        size = int(model["bytes"])
        return _alone(chip.name, _copy(size)), _measured(measured, 0, 2 * size)
    return _collective(row, model, op, kind, dtype), _measured(measured, 0, 0)


def _measured(measured: Mapping[str, Any], flops: float, moved_bytes: float) -> float:
    """Seconds, from a time, or from a rate and what it counts."""
    for key, unit in (("time_us", 1e-6), ("time_ms", 1e-3), ("time_s", 1.0)):
        if key in measured:
            return float(measured[key]) * unit
    for key in ("tflops_per_s_per_device", "tflops_per_s"):
        if key in measured and flops:
            return flops / (float(measured[key]) * 1e12)
    if "transferred_gb" in measured:
        return float(measured["transferred_gb"]) / float(measured["gbytes_per_s"])
    for key in ("gbytes_per_s_per_core", "gbytes_per_s"):
        if key in measured and moved_bytes:
            return moved_bytes / (float(measured[key]) * 1e9)
    raise NotExpressed("it gives no time, and no rate from which one follows")


def _product(m: int, k: int, n: int, dtype: str) -> Tensor:
    from meshlib.ops.einsum import einsum
    from meshlib.ops.sources import input as input_

    rows, depth, columns = Dimension("rows", m), Dimension("depth", k), Dimension("columns", n)
    return einsum([input_("x", [rows, depth], dtype), input_("y", [depth, columns], dtype)])


def _copy(size_bytes: int) -> Tensor:
    from meshlib.ops.elementwise import relu
    from meshlib.ops.sources import input as input_

    rows = max(1, size_bytes // 4096)
    return relu(input_("x", [Dimension("rows", rows), Dimension("columns", size_bytes // rows // 4)]))


def _alone(chip: str, made: Tensor) -> Estimate:
    """Every device of the smallest slice does the same."""
    from meshlib.lower import lower

    name = legal_slices(chip)[0]
    return estimate(lower({"y": made}, mesh=f"copies:{Slice(name).devices}"), name)


def _collective(row: Mapping[str, Any], model: Mapping[str, Any], op: str, kind: str, dtype: str) -> Estimate:
    """A collective over a group of devices of one slice, one of each chip where it has as many as chips."""
    from meshlib.lower import lower

    where = row.get("slice")
    text = str(where.get("topology", "") if isinstance(where, Mapping) else where or "")
    shape = re.match(r"\s*(\d+(?:x\d+)+)", text)
    size = re.search(r"(?:group of|axis of|sharded|over)\s+(\d+)", f"{op} {text}")
    if shape is None or size is None:
        raise NotExpressed("its topology or the size of its group is not stated")
    slice_ = Slice(f"{row['chip']}-{shape[1]}")
    group = int(size[1])
    if slice_.devices % group:
        raise NotExpressed(f"groups of {group} do not divide the {slice_.devices} devices of {slice_.name}")
    if "f32" in op:
        dtype = "float32"
    larger = model.get("output_bytes" if kind == "all_gather" else "input_bytes", model.get("bytes"))
    if larger is None:
        times = group if kind == "all_gather" else 1
        larger = int(model["input_elements"]) * times * _BYTES[dtype]
    made, layout = _moved(kind, int(larger) // _BYTES[dtype], group, dtype)
    mesh = {"group": group, "rest": slice_.devices // group}
    program = lower({"y": made}, mesh=";".join(f"{a}:{n}" for a, n in mesh.items()), layout=layout)
    if kind not in {c.kind for c in program.collectives}:
        raise NotExpressed(f"the lowering does not choose {kind} for it")
    return estimate(program, slice_, placement=_over_chips(slice_, mesh, group))


def _moved(kind: str, elements: int, group: int, dtype: str) -> tuple[Tensor, str]:
    """A tensor that takes one collective to make, and the layout under which it does."""
    from meshlib.ops.reduce import reduce_sum
    from meshlib.ops.sources import input as input_
    from meshlib.ops.state import constrain

    rows, columns = Dimension("rows", max(1, elements // 1024)), Dimension("columns", 1024)
    if kind in ("all_gather", "all_to_all"):
        times = 1 if kind == "all_gather" else group
        x = input_("x", [Dimension("rows", rows.size * times), columns], dtype)
        return constrain(x, "" if kind == "all_gather" else "columns:group"), "rows:group"
    parts = Dimension("parts", group)
    total = reduce_sum(input_("x", [parts, rows, columns], dtype), reduced_dim=parts)
    return constrain(total, "" if kind == "all_reduce" else "rows:group"), "parts:group"


def _over_chips(slice_: Slice, mesh: Mapping[str, int], group: int) -> Placement | None:
    """The placement with the group on links between chips only, whole axes first; None: the best."""
    found = [p for p in placements(slice_, mesh) if all(f.place != CORES for f in p.of(["group"]))]
    whole = [p for p in found if all(f.stride == 1 for f in p.of(["group"]))]
    return next(iter(whole or found), None)
