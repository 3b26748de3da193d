"""Which part of a mesh axis joins slices, as a caller says it."""

from __future__ import annotations

import pytest

import meshlib as mtf

D = mtf.Dimension
SLICES = "2*v5e-4"


@pytest.fixture(scope="module")
def program() -> mtf.Program:
    batch, model, hidden = D("batch", 4096), D("d_model", 1024), D("hidden", 4096)
    with mtf.Graph():
        x = mtf.input("x", [batch, model], "bfloat16")
        h = mtf.einsum([x, mtf.variable("w1", [model, hidden], dtype="bfloat16")], [batch, hidden])
        y = mtf.einsum([h, mtf.variable("w2", [hidden, model], dtype="bfloat16")], [batch, model])
        return mtf.lower({"y": y}, mesh="data:2;tensor:4", layout="batch:data;hidden:tensor")


def test_the_axis_that_is_named_joins_the_slices(program: mtf.Program) -> None:
    free, data, tensor = (mtf.estimate(program, SLICES, placement=p) for p in (None, {"data": 2}, {"tensor": 2}))
    assert data.step_seconds == free.step_seconds < tensor.step_seconds
    assert "dcn" not in data.engine_seconds
    assert tensor.engine_seconds["dcn"] > 0
    assert mtf.estimate(program, SLICES, placement=tensor.placement).step_seconds == tensor.step_seconds


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"rows": 2}, "placement has axis 'rows'; mesh .* has data, tensor"),
        ({"tensor": 3}, "gives 3 of axis 'tensor' to slices; it must divide its size, 4"),
        ({"data": 2, "tensor": 2}, r"joins 4 slices, .* but 2\*v5e-4 has 2"),
        ({}, r"joins 1 slices, .* but 2\*v5e-4 has 2"),
    ],
)
def test_what_does_not_join_the_slices_is_refused(program: mtf.Program, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(mtf.SliceError, match=message):
        mtf.estimate(program, SLICES, placement=sizes)
