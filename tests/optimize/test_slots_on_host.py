"""Slots in the memory of the host: the same numbers, no HBM between updates, and copies that take time over PCIe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from hardware import CHIPS
from hardware.memory import pcie_seconds
from meshlib.core.opdef import Kind
from meshlib.optimize.base import Optimizer
from meshlib.program.records import Program
from tests.effort import deep, some

RATE = 0.01
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adam": lambda **given: mtf.optimize.AdamOptimizer(RATE, **given),
    "adafactor": lambda **given: mtf.optimize.AdafactorOptimizer(learning_rate=RATE, **given),
    "momentum": lambda **given: mtf.optimize.MomentumOptimizer(RATE, 0.9, **given),
    "narrow slots": lambda **given: mtf.optimize.AdamWOptimizer(RATE, slot_dtype="bfloat16", **given),
}


def lowered(name: str, on_host: bool, dtype: str = "float32", scaled: bool = False, wide: int = 1) -> Program:
    with mtf.Graph():
        x = mtf.input("x", "batch:8;d:16")
        w = mtf.variable("w", f"d:16;h:{32 * wide}", slice_dtype=dtype)
        v = mtf.variable("v", f"h:{32 * wide};d:16", slice_dtype=dtype)
        h = mtf.tanh(mtf.einsum([mtf.cast(x, dtype), w], output_shape=f"batch:8;h:{32 * wide}"))
        y = mtf.cast(mtf.einsum([h, v], output_shape="batch:8;d:16"), "float32")
        loss = mtf.reduce_mean(mtf.square(y - x))
        optimizer = OPTIMIZERS[name](slots_on_host=on_host)
        scale = mtf.optimize.DynamicLossScale() if scaled else None
        updates = optimizer.minimize(loss, max_norm=1.0, loss_scale=scale)
        return mtf.lower({"loss": loss}, updates, mesh="data:2;model:2", layout="batch:data;h:model;d:data?")


@pytest.mark.parametrize("name", some([*OPTIMIZERS], ["narrow slots"]))
def test_numbers_and_bytes_sent_are_those_of_slots_in_hbm(name: str) -> None:
    x = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
    for dtype, scaled in (("float32", False), ("bfloat16", True)):
        here, there = (lowered(name, on_host, dtype, scaled) for on_host in (False, True))
        assert here.sent_bytes == there.sent_bytes
        runs = [mtf.simulate(program, "v4-8", seed=0) for program in (here, there)]
        for _ in range(2):
            losses = [run.step(x=x)["loss"] for run in runs]
            assert losses[0] == losses[1]
        for slot in runs[0].state:
            assert np.array_equal(runs[0].state[slot], runs[1].state[slot]), slot


def slot_bytes(program: Program) -> int:
    return sum(v.local_bytes for v in program.variables.values() if v.tensor.operation.attrs["slot_of"])


def test_numbers_on_jax_are_those_of_slots_in_hbm() -> None:
    pytest.importorskip("jax", reason="needs JAX: pip install -e '.[jax]'")
    x = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
    runs = [mtf.on_jax(lowered("adam", on_host), seed=0) for on_host in (False, True)]
    for _ in range(2):
        losses = [run.step(x=x)["loss"] for run in runs]
        assert losses[0] == losses[1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slots_take_no_hbm_between_updates(name: str) -> None:
    program = lowered(name, True, wide=64)
    total = slot_bytes(program)
    assert program.memory.host_bytes == program.from_host_bytes == program.to_host_bytes == total
    assert program.memory.by_kind["slots"] == 0
    assert slot_bytes(lowered(name, False, wide=64)) == total


def test_one_variables_slots_are_in_hbm_at_a_time() -> None:
    program = lowered("adam", True)
    copies = [i for i in program.instructions if i.operation.opdef.kind is Kind.COPY]
    ways = [(i.opcode, i.operation.owner.name if i.operation.owner else "") for i in copies]
    per_variable = [("from_host", 2), ("to_host", 2)]
    assert ways == [(way, name) for name in ("w", "v") for way, count in per_variable for _ in range(count)]


def test_a_step_waits_for_its_copies() -> None:
    """In streams: in while the slots before go out, so the copies of all but the ends overlap."""
    here, there = (mtf.estimate(lowered("adam", on_host, wide=2048), "v4-8") for on_host in (False, True))
    copied = pcie_seconds(CHIPS["v4"], there.program.from_host_bytes)
    more = there.step_seconds - here.step_seconds
    assert copied < more < 2.01 * copied
    assert there.bound_seconds["pcie"] == pytest.approx(more, rel=0.2)


@pytest.mark.skipif(not deep(), reason="figures of the page: --hypothesis-profile=deep")
def test_llama_2_7b_saves_its_slots_and_waits_for_them() -> None:
    config, mesh = mtf.models.preset("llama2-7b"), "fsdp:16"
    here, there = (
        mtf.estimate(mtf.lower(*_step(config, on_host), mesh, mtf.models.layout("fsdp", config, mesh)), "v5e-16")
        for on_host in (False, True)
    )
    saved = here.memory.exact_peak_bytes - there.memory.exact_peak_bytes
    assert there.memory.host_bytes / 2**30 == pytest.approx(3.14, abs=0.01)
    assert saved == pytest.approx(there.memory.host_bytes, rel=0.01)
    assert here.step_seconds == pytest.approx(3.36, abs=0.02)
    assert there.step_seconds == pytest.approx(3.70, abs=0.02)


def _step(config: mtf.models.TransformerConfig, on_host: bool) -> Any:
    with mtf.Graph():
        optimizer = mtf.optimize.AdamWOptimizer(1e-3, slots_on_host=on_host)
        return mtf.models.train_step(config, 32, 4096, optimizer, max_norm=1.0)


def test_the_flag_is_checked() -> None:
    with pytest.raises(mtf.MeshlibError, match=r"AdamOptimizer.*slots_on_host.*'yes'"):
        mtf.optimize.AdamOptimizer(RATE, slots_on_host="yes")
