"""What policies of rematerialisation do to a model: flops and gathers that come on top, memory that goes."""

from __future__ import annotations

import pytest

import meshlib as mtf
from meshlib.models import TransformerConfig, layout, train_step

LAYERS, BATCH, LENGTH = 4, 8, 1024
CONFIG = TransformerConfig(
    name="four", layers=LAYERS, d_model=256, heads=4, kv_heads=2, head_dim=64, d_ff=768, vocab=512, gated=True,
    activation="silu", norm="rms", position="rotary", tied=False,
)  # fmt: skip
TOKENS = BATCH * LENGTH
# Forward flops of one layer on one of four devices.
PRODUCTS = {
    part: 2 * TOKENS * size // 4
    for part, size in {
        "q": 256 * 256, "k": 256 * 128, "v": 256 * 128, "out": 256 * 256, "wi": 256 * 768, "wi_gate": 256 * 768,
    }.items()
}  # fmt: skip
# Two products for each pair of tiles of 512 that a causal query sees: 3 of 4.
ATTENTION = 2 * 2 * BATCH * LENGTH * LENGTH * 4 * 64 * 3 // 4 // 4


def estimate(remat: object, scan: bool = True) -> mtf.Estimate:
    with mtf.Graph():
        outputs, updates = train_step(CONFIG, BATCH, LENGTH, remat=remat, scan=scan)
        program = mtf.lower(outputs, updates, mesh="fsdp:4", layout=layout("fsdp", CONFIG, "fsdp:4"))
    return mtf.estimate(program, "v5p-8")


def kept_bytes(est: mtf.Estimate) -> int:
    return est.program.memory.peak_bytes


@pytest.fixture(scope="module")
def none() -> mtf.Estimate:
    return estimate("none")


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize(
    ("remat", "again"),
    [
        ("full", sum(PRODUCTS.values()) + ATTENTION),  # never the last product, wo: nothing needs its result
        ("matmuls", ATTENTION),
        (mtf.Remat(save=["q", "k", "v", "context"]), PRODUCTS["out"] + PRODUCTS["wi"] + PRODUCTS["wi_gate"]),
        (mtf.Remat(save=["out", "wi", "wi_gate"]), sum(PRODUCTS[p] for p in "qkv") + ATTENTION),
    ],
)
def test_exactly_what_is_not_kept_is_computed_again(none, remat, again, scan):
    found = estimate(remat, scan)
    assert found.flops - none.flops == LAYERS * again
    assert found.useful_flops == pytest.approx(none.useful_flops)
    assert kept_bytes(found) < kept_bytes(none)


def test_the_less_is_kept_the_less_memory_and_the_more_time_it_takes(none):
    estimates = [estimate("full"), estimate("matmuls"), none]
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
    assert kept_bytes(kept) - kept_bytes(moved) > 0.7 * size
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
