"""Prices of bytes and work that come from a slice."""

from __future__ import annotations

import pytest

import meshlib as mtf


def test_axes_alike_cost_alike() -> None:
    found = mtf.balance("v5e-256", "data:16; model:16")
    assert found.axis_prices == (("data", 1.0), ("model", 1.0))


def test_an_axis_between_slices_is_dear() -> None:
    prices = dict(mtf.balance("2*v5e-256", "slices:2; data:16; model:16").axis_prices)
    assert prices["data"] == prices["model"] == 1.0
    assert prices["slices"] > 10


def test_products_count_half_of_the_time_of_a_byte() -> None:
    # v5e: 197 Tflop/s in bfloat16 and, on a ring of 16, two directions of 45 GB/s of which a gather uses both.
    found = mtf.balance("v5e-256", "data:16; model:16")
    assert found.mxu_flops_per_byte == pytest.approx(0.5 * 197e12 / 90e9, rel=0.1)


def test_one_device_is_the_plain_balance() -> None:
    assert mtf.balance("v5e-1", "data:1") == mtf.Balance()


def test_a_dear_axis_sends_less() -> None:
    b, k, h = mtf.Dimension("b", 64), mtf.Dimension("k", 64), mtf.Dimension("h", 256)
    with mtf.Graph():
        outputs = {"y": mtf.einsum([mtf.input("x", [b, k]), mtf.variable("w", [k, h])], [b, h])}
    layout = "b:slow?; k:slow?; h:fast?"

    def sent(balance: mtf.Balance) -> int:
        program = mtf.lower(outputs, mesh="slow:2; fast:4", layout=layout, balance=balance)
        return sum(c.sent_bytes * c.count for c in program.collectives if "slow" in c.axes)

    assert sent(mtf.Balance(axis_prices=(("slow", 1000.0), ("fast", 1.0)))) <= sent(mtf.Balance())


@pytest.mark.parametrize(("slice_", "mesh"), [("v5e-256", "data:8"), ("v9-8", "data:8")])
def test_refuses_other_slices(slice_: str, mesh: str) -> None:
    with pytest.raises(mtf.SliceError):
        mtf.balance(slice_, mesh)
