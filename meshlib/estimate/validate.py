"""Predicted beside published: each measurement is written as a program, lowered and estimated through the public face.

What a row says decides what is built; nothing depends on its name. Expressed are products, copies over HBM and
collectives on one slice; every other row is listed with the reason why not.

    python -m meshlib validate                                  the set in the package
    python -m meshlib validate --file published_results.json    rows of that format
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardware.chips import get_chip
from hardware.errors import HardwareError
from hardware.placement import CORES, Placement, placements
from hardware.slices import Slice, legal_slices
from layouts import Dimension
from meshlib.errors import GraphError, MeshlibError
from meshlib.estimate import Estimate, estimate
from meshlib.estimate.published import ROWS
from meshlib.estimate.table import grid, seconds_text
from meshlib.graph import Graph, Tensor

_COLLECTIVES = {
    "all_gather": "all_gather", "allgather": "all_gather", "psum": "all_reduce", "all_reduce": "all_reduce",
    "allreduce": "all_reduce", "reduce_scatter": "reduce_scatter", "psum_scatter": "reduce_scatter",
    "all_to_all": "all_to_all", "alltoall": "all_to_all",
}  # fmt: skip
_BYTES = {"bf16": 2, "f32": 4, "float32": 4, "bfloat16": 2}


class NotExpressed(GraphError):
    """A row that no program of the library stands for yet, with the reason."""


@dataclass(frozen=True)
class Checked:
    """One published measurement: seconds predicted and measured, or why it could not be expressed."""

    name: str
    family: str
    predicted_seconds: float | None
    measured_seconds: float | None
    why_not: str = ""

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured."""
        if self.predicted_seconds is None or self.measured_seconds is None:
            return None
        return self.predicted_seconds / self.measured_seconds - 1


@dataclass(frozen=True)
class Validation:
    """All rows of a file, expressed or not."""

    rows: tuple[Checked, ...]

    def errors(self, family: str | None = None) -> list[float]:
        """Absolute relative errors of the expressed rows, of one family or of all."""
        return [abs(r.error) for r in self.rows if r.error is not None and family in (None, r.family)]

    @property
    def median_error(self) -> float:
        """Of all expressed rows; nan without any."""
        return statistics.median(self.errors()) if self.errors() else math.nan

    def __str__(self) -> str:
        cells = [("row", "family", "predicted", "measured", "error")]
        for r in self.rows:
            if r.error is not None and r.predicted_seconds is not None and r.measured_seconds is not None:
                times = (seconds_text(r.predicted_seconds), seconds_text(r.measured_seconds))
                cells.append((r.name, r.family, *times, f"{r.error:+.1%}"))
        lines = grid(cells, right=(2, 3, 4)) if len(cells) > 1 else []
        families = list(dict.fromkeys(r.family for r in self.rows if r.error is not None))
        for family in [*families, None]:
            errors = self.errors(family)
            if errors:
                lines.append(
                    f"{family or 'all'}: {len(errors)} rows, median error {statistics.median(errors):.1%}, "
                    f"90th percentile {percentile(errors, 0.9):.1%}"
                )
        missing = [r for r in self.rows if r.error is None]
        if missing:
            lines.append(f"not expressed: {len(missing)} rows")
            lines += [f"  {r.name}: {r.why_not}" for r in missing]
        return "\n".join(lines)


def validate(path: str | Path | None = None) -> Validation:
    """Predict every row of a file of published results, or of the set in the package.

    Args:
      path: JSON: {"rows": [...]} or a list; each row has `id`, `family`, `chip`, `model`, `measured`, `slice`.
    Raises: GraphError for a file that cannot be read or has no rows.
    Example:
      >>> validate().median_error < 0.08
      True
    """
    return Validation(tuple(check_row(row) for row in (ROWS if path is None else _load(path))))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed.

    >>> percentile([3, 1, 2, 10], 0.5), percentile([1, 2], 0.9)
    (2, 2)
    """
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _load(path: str | Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as fault:
        raise GraphError(f"validate: cannot read {path}: {fault}") from None
    rows = found.get("rows") if isinstance(found, dict) else found
    if not isinstance(rows, list) or not all(isinstance(r, dict) for r in rows):
        raise GraphError(f"validate: {path} holds no rows; expected {{'rows': [...]}} with an object for each")
    return rows


def check_row(row: Mapping[str, Any]) -> Checked:
    """Predict one row; a row that cannot be expressed says why."""
    name, model = str(row.get("id", "?")), row.get("model")
    op = str(model.get("op", "")) if isinstance(model, Mapping) else ""
    family = f"{row.get('family', '?')} {_kind(op) or 'other'}"
    try:
        with Graph():
            est, measured = _express(row, model if isinstance(model, Mapping) else {}, op)
    except NotExpressed as fault:
        return Checked(name, family, None, None, str(fault))
    except (MeshlibError, HardwareError, TypeError, ValueError, KeyError) as fault:
        return Checked(name, family, None, None, f"its figures make no program: {fault}".splitlines()[0])
    return Checked(name, family, est.step_seconds, measured)


def _kind(op: str) -> str:
    text = op.lower()
    if "matmul" in text or "gemm" in text:
        return "matmul"
    if "hbm" in text and ("copy" in text or "bandwidth" in text):
        return "HBM copy"
    return next((kind for word, kind in _COLLECTIVES.items() if word in text), "")


def _express(row: Mapping[str, Any], model: Mapping[str, Any], op: str) -> tuple[Estimate, float]:
    kind, measured = _kind(op), row.get("measured") or {}
    if not kind:
        raise NotExpressed("models of whole training runs are not in the library yet" if model and not op else
                           f"no program for {op or 'this row'!r}")  # fmt: skip
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
