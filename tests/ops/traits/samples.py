"""Uses of every operation with their numbers, on which its record is tried: each check returns what is wrong.

A check takes a record and samples of its operation, which come from the rows of `tests/cases.py`. It asks `local` and
never for a name, so a new operation is checked by its row. What a check would find and is meant so is in `EXCUSED`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from hardware.numerics import round_to_bfloat16
from meshlib.core.dtypes import BFLOAT16
from meshlib.core.engine import Engine
from meshlib.core.graph import Operation
from meshlib.core.opdef import RESIDENT, Block, Kind, OpDef
from tests.cases import CASES, Array
from tests.ops.test_operations import built, round_to

# (record, trait or attribute that names a dim): why it is not what the numbers alone would say.
EXCUSED = {
    ("attention", "value_dim"): "a kernel streams whole heads",
    ("attention_grad_query", "value_dim"): "a kernel streams whole heads",
    ("attention_window", "value_dim"): "a kernel streams whole heads",
    ("attention_window_grad_query", "value_dim"): "a kernel streams whole heads",
    ("rotate_half", "dim"): "the dim of a head is short, and both halves need each other whole",
    ("constrain", "linear"): "it binds its operand where it stands",
    ("assign", "linear"): "what stays after a step is whole",
    ("slicewise", "linear"): "nobody knows what a function of the user's own does to other numbers",
    ("print", "a dim"): "what is shown is shown whole",
}
STRUCTURE = (*RESIDENT, Kind.COMMIT, Kind.LOOP)  # have no numbers of their own
TRIES = 4
ENGINE = Engine(0, 0, highest=True, in_order=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """One use of an operation: its operands' arrays, as they are stored."""

    op: Operation
    arrays: tuple[Array, ...]

    def __str__(self) -> str:
        return str(self.op)

    @property
    def rng(self) -> np.random.Generator:
        """Random numbers of its own, the same each time."""
        return np.random.default_rng([len(self.op.name), *self.op.name.encode()])

    def floats(self) -> list[int]:
        """The float operands, by number."""
        return [n for n, x in enumerate(self.op.inputs) if x.dtype.is_float]


def apply(
    record: OpDef, op: Operation, arrays: Sequence[Array], buffer: Array | None = None, **more: Any
) -> tuple[Array, ...]:
    """The results of `local`; `more` are fields of the block."""
    zeros = {f.name: 0 for f in record.roles(op)}
    types, out = tuple(x.type for x in op.inputs), op.output.type
    fields = {"inputs": types, "out": out, "offsets": zeros, "engine": ENGINE, **more}
    with np.errstate(all="ignore"):
        made = record.local(Block(op, buffer=buffer, **fields), *arrays)
    return made if isinstance(made, tuple) else (made,)


@cache
def samples(dtype: str = "float64") -> Mapping[str, tuple[Sample, ...]]:
    """Per record its uses in the rows that are about it."""
    found: dict[str, list[Sample]] = {}
    for case in CASES:
        b = built(case, dtype)
        roots = [*b.outputs.values(), *(x for u in b.updates for x in u.inputs)]
        values: dict[Any, Array] = {}
        for op in roots[0].graph.operations:
            made = _evaluated(op, values, b.feeds, dtype)
            if op.opdef.name == case.op and all(x in values for x in op.inputs):
                found.setdefault(case.op, []).append(Sample(op, tuple(values[x] for x in op.inputs)))
            values.update(zip(op.outputs, made, strict=False))
    return {name: tuple(uses) for name, uses in found.items()}


def _evaluated(op: Operation, values: Mapping[Any, Array], feeds: Mapping[str, Array], dtype: str) -> Sequence[Array]:
    if op.opdef.kind in RESIDENT:
        whole = feeds[op.name] if op.name in feeds else np.full(op.output.shape.sizes, 1.25)
        return [np.asarray(round_to(np.asarray(whole), dtype), op.output.dtype.storage)]
    if op.opdef.kind in STRUCTURE or any(x not in values for x in op.inputs):
        return []
    return stored(op, apply(op.opdef, op, [values[x] for x in op.inputs]))


def stored(op: Operation, made: Sequence[Array]) -> list[Array]:
    """Results as a core keeps them."""
    return [round_to_bfloat16(y) if t.dtype is BFLOAT16 else y for t, y in zip(op.outputs, made, strict=True)]


def same(a: Sequence[Array], b: Sequence[Array], tolerance: float = 0.0) -> bool:
    """Whether results are equal, up to a share of the largest magnitude."""
    if len(a) != len(b) or any(x.shape != y.shape for x, y in zip(a, b, strict=True)):
        return False
    for x, y in zip(a, b, strict=True):
        wide, other = np.asarray(x, np.float64), np.asarray(y, np.float64)
        scale = np.max(np.abs(other), initial=0.0, where=np.isfinite(other))
        if not np.allclose(wide, other, rtol=0, atol=tolerance * scale, equal_nan=True):
            return False
    return True
