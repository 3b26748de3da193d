"""Micro-benchmarks as programs: products, streams over HBM, and collectives on one slice.

Each is written, lowered and estimated through the public face; every device of the smallest slice does the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hardware.chips import Chip, get_chip
from hardware.placement import CORES, Placement, placements
from hardware.slices import Slice, legal_slices
from layouts import Dimension
from layouts.step_kinds import ALL_REDUCE, COLLECTIVE_PERMUTE, COLLECTIVES, REDUCE_SCATTER, STEP_KINDS
from meshlib.core.compiler import XLA_TPU, Compiler
from meshlib.core.graph import Graph, Tensor
from meshlib.estimation import CALIBRATED, Estimate, Physics, estimate
from meshlib.lowering import lower
from meshlib.ops.contraction.einsum import EIGHT_BIT, einsum
from meshlib.ops.control.sources import input as input_
from meshlib.ops.control.sources import zeros
from meshlib.ops.control.state import constrain
from meshlib.ops.movement.runs import shift
from meshlib.ops.pointwise.arithmetic import relu
from meshlib.ops.pointwise.reductions import reduce_sum
from meshlib.validation.machine import shape_of
from meshlib.validation.policies import NotExpressed
from meshlib.validation.priced import Priced

# Operation names without spaces, hyphens and underscores -> collective; the first match counts.
_COLLECTIVES = {
    **{name.replace("_", ""): name for name in COLLECTIVES},
    "psumscatter": REDUCE_SCATTER.name, "psum": ALL_REDUCE.name, "permute": COLLECTIVE_PERMUTE.name,
}  # fmt: skip
# Memory operation -> arrays moved, each read or written once.
_STREAMS = {"copy": 2, "bandwidth": 2, "read": 1, "write": 1, "add": 3, "triad": 3}
_BYTES = {"bf16": 2, "f32": 4, "float32": 4, "bfloat16": 2}


def kind_of(row: Mapping[str, Any]) -> str:
    """The measured quantity: "matmul", "HBM copy" (or read, write, add, triad), or a collective; "" for others.

    >>> kind_of({"model": {"op": "psum over a group of 4"}}), kind_of({"model": {"layers": 3}})
    ('all_reduce', '')
    """
    text = _op(row).lower()
    if "matmul" in text or "gemm" in text:
        return "matmul"
    if "hbm" in text or "stream" in text:
        stream = next((word for word in _STREAMS if re.search(rf"\b{word}", text)), "")
        return f"HBM {stream}".replace("bandwidth", "copy") if stream else ""
    plain = re.sub(r"[\s_-]", "", text)
    return next((kind for word, kind in _COLLECTIVES.items() if word in plain), "")


def priced(row: Mapping[str, Any], compiler: Compiler = XLA_TPU) -> Priced:
    """The estimate of a row's operation beside its measured time; for a collective, without producing its operand.

    Raises: NotExpressed, with the reason.
    """
    kind = kind_of(row)
    with Graph():
        est, measured = _express(row, row["model"], _op(row), kind, compiler)
    return Priced(est, measured, only_collectives=kind in _COLLECTIVES.values())


def _op(row: Mapping[str, Any]) -> str:
    model = row.get("model")
    return str(model.get("op", "")) if isinstance(model, Mapping) else ""


def _express(
    row: Mapping[str, Any], model: Mapping[str, Any], op: str, kind: str, compiler: Compiler
) -> tuple[Estimate, float]:
    measured = row.get("measured") or {}
    if "dcn" in op.lower():
        raise NotExpressed("the number of slices behind the printed figure is not stated")
    chip = get_chip(str(row["chip"]))
    dtype = "bfloat16" if "bf16" in str(row.get("precision") or op).lower() else "float32"
    if kind == "matmul":
        m, k, n = _sizes(model, op)
        words = str(row.get("precision") or op).lower()
        precision = next((p for p in EIGHT_BIT if p in words), "default")
        if precision != "default":
            dtype = "bfloat16"
        return _alone(chip.name, _product(m, k, n, dtype, precision), compiler), _measured(
            measured, chip, 2 * m * k * n, 0
        )
    if kind.startswith("HBM"):
        if not model.get("bytes"):
            raise NotExpressed("its size is not stated")
        size, stream = int(model["bytes"]), kind.split()[1]
        # These benchmarks stream, so no extra pass over the arrays is charged.
        est = _alone(chip.name, _streamed(stream, size), compiler, Physics().without_losses())
        return est, _measured(measured, chip, 0, _STREAMS[stream] * size)
    return _collective(row, model, op, kind, dtype, compiler), _measured(measured, chip, 0, 0)


def _sizes(model: Mapping[str, Any], op: str) -> tuple[int, int, int]:
    """m, k, n of a product: as given, one n for all, or from the operand shapes in the operation's text."""
    sizes = [int(model.get(d) or model.get("n") or 0) for d in "mkn"]
    shapes = re.findall(r"\[(\d+),\s*(\d+)\]", op)
    if not all(sizes) and len(shapes) >= 2 and shapes[0][1] == shapes[1][0]:
        sizes = [int(shapes[0][0]), int(shapes[0][1]), int(shapes[1][1])]
    if not all(sizes):
        raise NotExpressed("the sizes of its product are not stated")
    m, k, n = sizes
    return m, k, n


def _measured(measured: Mapping[str, Any], chip: Chip, flops: float, moved_bytes: float) -> float:
    """Measured seconds, from a time or from a rate in FLOPs or bytes."""
    for key, unit in (("time_us", 1e-6), ("time_ms", 1e-3), ("time_s", 1.0)):
        if measured.get(key):
            return float(measured[key]) * unit
    devices = chip.devices_per_chip
    for key, count in (("tflops_per_s_per_device", 1), ("tflops_per_s", 1), ("tflops_per_s_per_chip", devices)):
        if measured.get(key) and flops:
            return count * flops / (float(measured[key]) * 1e12)
    rates = (("gbytes_per_s_per_core", 1), ("gbytes_per_s", 1), ("gbytes_per_s_per_chip", devices))
    for key, count in rates:
        if measured.get(key) and measured.get("transferred_gb"):
            return float(measured["transferred_gb"]) / float(measured[key])
        if measured.get(key) and moved_bytes:
            return count * moved_bytes / (float(measured[key]) * 1e9)
    if any(measured.get(key) for key, _ in rates):
        raise NotExpressed("it does not say which bytes its rate counts")
    raise NotExpressed("it gives no time, and no rate from which one follows")


def _product(m: int, k: int, n: int, dtype: str, precision: str) -> Tensor:
    rows, depth, columns = Dimension("rows", m), Dimension("depth", k), Dimension("columns", n)
    return einsum([input_("x", [rows, depth], dtype), input_("y", [depth, columns], dtype)], precision=precision)


def _streamed(stream: str, size_bytes: int) -> Tensor:
    """Copy y = x, read y = sum x, write y = 0, add y = a + b, or triad y = a + 3 b, over arrays of that size."""
    rows = max(1, size_bytes // 4096)
    dims = [Dimension("rows", rows), Dimension("columns", max(1, size_bytes // rows // 4))]
    if stream == "write":
        return zeros(dims)
    x = input_("x", dims)
    if stream in ("copy", "read"):
        return relu(x) if stream == "copy" else reduce_sum(x)
    y = input_("z", dims)
    return x + (y if stream == "add" else 3.0 * y)


def _alone(chip: str, result: Tensor, compiler: Compiler, physics: Physics = CALIBRATED) -> Estimate:
    """Estimate of the same program on every device of the smallest slice."""
    name = legal_slices(chip)[0]
    program = lower({"y": result}, mesh=f"copies:{Slice(name).devices}", compiler=compiler)
    return estimate(program, name, physics=physics)


def _collective(
    row: Mapping[str, Any], model: Mapping[str, Any], op: str, kind: str, dtype: str, compiler: Compiler
) -> Estimate:
    """Estimate of a collective over a group of devices of one slice, one per chip if the group has as many as chips."""
    where = row.get("slice")
    text = str(where.get("topology", "") if isinstance(where, Mapping) else where or "")
    shape = "x".join(map(str, shape_of(where)))
    size = re.search(r"(?:group of|axis of|sharded|over|across)\s+(\d+)", f"{op} {text}")
    if not shape:
        raise NotExpressed("its topology is not stated")
    slice_ = Slice(f"{row['chip']}-{shape}")
    if size is None and slice_.devices > slice_.chips:
        raise NotExpressed("the size of its group is not stated")
    group = int(size[1]) if size else slice_.devices
    if slice_.devices % group:
        raise NotExpressed(f"groups of {group} do not divide the {slice_.devices} devices of {slice_.name}")
    if "f32" in op:
        dtype = "float32"
    larger = _larger_bytes(model, kind, group, _BYTES[dtype])
    moved, layout = _moved(kind, larger // _BYTES[dtype], group, dtype)
    mesh = {"group": group, "rest": slice_.devices // group}
    program = lower({"y": moved}, mesh=";".join(f"{a}:{n}" for a, n in mesh.items()), layout=layout, compiler=compiler)
    if kind not in {c.kind for c in program.collectives}:
        raise NotExpressed(f"the lowering does not choose {kind} for it")
    return estimate(program, slice_, placement=_over_chips(slice_, mesh, group))


def _larger_bytes(model: Mapping[str, Any], kind: str, group: int, itemsize: int) -> int:
    """Bytes on one device, of operand and result the larger; all that is stated as "bytes" is that."""
    grows, shrinks = STEP_KINDS[kind].gathers, STEP_KINDS[kind].scatters
    given = {
        "input_bytes": group if grows else 1,
        "output_bytes": group if shrinks else 1,
        "bytes": 1,
        "input_elements": itemsize * (group if grows else 1),
        "output_elements": itemsize * (group if shrinks else 1),
    }
    for key, times in given.items():
        if model.get(key):
            return int(model[key]) * times
    raise NotExpressed("its size is not stated")


def _moved(kind: str, elements: int, group: int, dtype: str) -> tuple[Tensor, str]:
    """A tensor that takes one collective to make, and the layout under which it does."""
    record = STEP_KINDS[kind]
    rows, columns = Dimension("rows", max(1, elements // 1024)), Dimension("columns", 1024)
    if record.permutes:
        x = input_("x", [Dimension("rows", rows.size * group), columns], dtype)
        return shift(x, rows.size, "rows", wrap=True), "rows:group"
    if record.gathers or record.exchanges:
        times = 1 if record.gathers else group
        x = input_("x", [Dimension("rows", rows.size * times), columns], dtype)
        return constrain(x, "" if record.gathers else "columns:group"), "rows:group"
    parts = Dimension("parts", group)
    total = reduce_sum(input_("x", [parts, rows, columns], dtype), reduced_dim=parts)
    return constrain(total, "rows:group" if record.scatters else ""), "parts:group"


def _over_chips(slice_: Slice, mesh: Mapping[str, int], group: int) -> Placement | None:
    """The placement that puts the group on links between chips alone, whole axes first; None: the default."""
    over_chips = [p for p in placements(slice_, mesh) if all(f.place != CORES for f in p.of(["group"]))]
    whole = [p for p in over_chips if all(f.stride == 1 for f in p.of(["group"]))]
    return next(iter(whole or over_chips), None)
