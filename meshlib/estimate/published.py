"""A small set of published measurements, in the format that `python -m meshlib validate --file` reads."""

from __future__ import annotations

from typing import Any

_RECIPES = {"repo": "AI-Hypercomputer/tpu-recipes @ c8cfe2f (2026-08-07)"}
_GEMM = {**_RECIPES, "file": "microbenchmarks/ironwood/README.md (gemm_multiple_run)"}
_HBM = {**_RECIPES, "file": "microbenchmarks/ironwood/hbm/hbm.md"}
_GATHER = {**_RECIPES, "file": "microbenchmarks/ironwood/collectives/all_gather.md"}


def _gemm(n: int, tflops: float) -> dict[str, Any]:
    return {
        "id": f"mb-v7-gemm-{n}", "family": "microbench", "chip": "v7", "precision": "bf16",
        "model": {"op": "matmul m=n=k", "n": n}, "measured": {"tflops_per_s_per_device": tflops}, "source": _GEMM,
    }  # fmt: skip


def _copy(size_bytes: int, gbytes: float) -> dict[str, Any]:
    return {
        "id": f"mb-v7-hbm-{size_bytes}", "family": "microbench", "chip": "v7",
        "model": {"op": "HBM copy", "bytes": size_bytes}, "measured": {"gbytes_per_s_per_core": gbytes}, "source": _HBM,
    }  # fmt: skip


def _gather(elements: int, gbytes: float) -> dict[str, Any]:
    return {
        "id": f"mb-v7-ag-2x2x1-{elements}", "family": "microbench", "chip": "v7", "slice": {"topology": "2x2x1"},
        "model": {
            "op": "all_gather over a group of 4 devices, f32",
            "input_elements": elements,
            "output_bytes": 16 * elements,
        },
        "measured": {"gbytes_per_s": gbytes, "transferred_gb": 24 * elements / 1e9}, "source": _GATHER,
    }  # fmt: skip


ROWS: tuple[dict[str, Any], ...] = (
    _gemm(256, 18.28645367),
    _gemm(1024, 349.7270639),
    _gemm(4096, 892.9445127),
    _gemm(16384, 950.1286983),
    _copy(2097152, 1379.335021),
    _copy(16777216, 2757.308985),
    _copy(268435456, 3167.144485),
    _copy(2147483648, 3203.486119),
    _gather(65536, 71.7703034),
    _gather(1048576, 161.9040742),
    _gather(16777216, 178.7714158),
    {
        "id": "mb-v6e-gemm-8192", "family": "microbench", "chip": "v6e", "precision": "bf16",
        "model": {"op": "matmul", "n": 8192}, "measured": {"time_ms": 1.328756094, "tflops_per_s": 827.474},
        "source": {**_RECIPES, "file": "microbenchmarks/README.md"},
    },
    {
        "id": "mb-v5e-ag-34MB", "family": "microbench", "chip": "v5e",
        "slice": {"topology": "8x4 mesh, gather over axis of 4, no wrap"},
        "model": {"op": "all_gather bf16[2048,8192] sharded 4 ways", "output_bytes": 33554432},
        "measured": {"time_us": 680},
        "source": {"repo": "jax-ml/scaling-book @0819a7d", "file": "sharding.md pop quiz 2"},
    },
)  # fmt: skip
