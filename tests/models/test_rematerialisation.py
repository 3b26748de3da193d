"""What policies of rematerialisation do to a model: flops and gathers that come on top, memory that goes."""

from __future__ import annotations

from functools import lru_cache

import pytest

import meshlib as mtf
from meshlib.models import TransformerConfig, layout, train_step
from tests.effort import some

LAYERS, BATCH, LENGTH = 3, 8, 1024
CONFIG = TransformerConfig(
    name="four", layers=LAYERS, d_model=256, heads=4, kv_heads=2, head_dim=64, d_ff=768, vocab=512, gated=True,
    activation="silu", norm="rms", position="rotary", tied=False,
)  # fmt: skip
TOKENS = BATCH * LENGTH
# Forward flops of one layer, on all devices.
PRODUCTS = {
    part: 2 * TOKENS * size
    for part, size in {
        "q": 256 * 256, "k": 256 * 128, "v": 256 * 128, "out": 256 * 256, "wi": 256 * 768, "wi_gate": 256 * 768,
    }.items()
}  # fmt: skip
# Two products for each pair of tiles of 512 that a causal query sees: 3 of 4.
ATTENTION = 2 * 2 * BATCH * LENGTH * LENGTH * 4 * 64 * 3 // 4


@lru_cache
def estimate(remat: str | mtf.Remat, scan: bool = True, devices: int = 4) -> mtf.Estimate:
    mesh = f"fsdp:{devices}"
    with mtf.Graph():
        outputs, updates = train_step(CONFIG, BATCH, LENGTH, remat=remat, scan=scan)
        program = mtf.lower(outputs, updates, mesh, layout("fsdp", CONFIG, mesh))
    return mtf.estimate(program, {4: "v5p-8", 1: "v5e-1"}[devices])


def kept_bytes(est: mtf.Estimate) -> int:
    return est.program.memory.peak_bytes


WAYS = [(True, 4), (False, 1), (True, 1), (False, 4)]
POLICIES = [
    ("full", sum(PRODUCTS.values()) + ATTENTION),  # never the last product, wo: nothing needs its result
    (mtf.Remat(save=["q", "k", "v", "context"]), PRODUCTS["out"] + PRODUCTS["wi"] + PRODUCTS["wi_gate"]),
    ("matmuls", ATTENTION),
    (mtf.Remat(save=["out", "wi", "wi_gate"]), sum(PRODUCTS[p] for p in "qkv") + ATTENTION),
]
KEPT = [(*policy, *way) for way in WAYS for policy in POLICIES]


@pytest.mark.parametrize(("remat", "again", "scan", "devices"), some(KEPT, [KEPT[0], KEPT[2], KEPT[3], KEPT[5]]))
def test_exactly_what_is_not_kept_is_computed_again(remat, again, scan, devices):
    found, none = (estimate(policy, scan, devices) for policy in (remat, "none"))
    assert found.flops - none.flops == LAYERS * again // devices
    assert found.useful_flops == pytest.approx(none.useful_flops)
    assert kept_bytes(found) < kept_bytes(none)


def test_the_less_is_kept_the_less_memory_and_the_more_time_it_takes():
    estimates = [estimate(remat) for remat in ("full", "matmuls", "none")]
    peaks = [kept_bytes(e) for e in estimates]
    assert peaks == sorted(peaks)
    assert peaks[0] < 0.7 * peaks[2], peaks
    flops = [e.flops for e in estimates]
    assert flops == sorted(flops, reverse=True)


def test_offloaded_values_are_on_the_host():
    kept, moved = (estimate(mtf.Remat(**{how: ["q", "k", "v", "wi"]})) for how in ("save", "offload"))
    size = 2 * TOKENS // 4 * (256 + 128 + 128 + 768) * LAYERS
    assert moved.program.memory.host_bytes == size
    assert kept.program.memory.host_bytes == 0
    assert kept_bytes(kept) - kept_bytes(moved) > 0.6 * size  # but for one layer, which is on its way
    assert kept.flops == moved.flops


def test_weights_are_gathered_once_forward_and_once_backward():
    for remat in ("full", "none"):
        found = estimate(remat)
        for part in ("q", "k", "v", "out", "wi", "wi_gate", "wo"):
            gathers = [c for c in found.program.collectives if c.kind == "all_gather" and f"/{part}/" in c.tensor]
            assert sum(c.count for c in gathers) == 2 * LAYERS, (remat, part)


def test_recomputing_repeats_the_sums_over_devices():
    """Tensor-parallel: the sum of `out` again in each layer, which the next block reads; not that of `wo`."""

    def reduced(remat: str) -> int:
        with mtf.Graph():
            outputs, updates = train_step(CONFIG, BATCH, LENGTH, remat=remat)
            program = mtf.lower(outputs, updates, mesh="tensor:2", layout=layout("tensor", CONFIG, "tensor:2"))
        return sum(c.payload_bytes * c.count for c in program.collectives)

    assert reduced("full") - reduced("none") == LAYERS * 2 * TOKENS * 256
