"""A small set of published measurements, in the format that `python -m meshlib validate --file` reads."""

from __future__ import annotations

from math import prod
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


def _maxtext(
    name: str, dims: tuple[int, int, int, int], chip: str, topology: str, layout: dict[str, int], batch: int,
    remat: str, tflops: float, slices: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """A row of MaxText's tables; `dims` are layers, d_model, heads (of 256 features each), d_ff."""
    layers, d_model, heads, d_ff = dims
    chips = prod(int(side) for side in topology.split("x"))
    return {
        "id": name, "kind": "maxtext_readme", "family": "maxtext", "chip": chip, "n_chips": slices * chips,
        "n_slices": slices, "slice": {"chips": chips, "topology": topology},
        "model": {
            "arch": "decoder-only dense", "layers": layers, "d_model": d_model, "q_heads": heads, "kv_heads": heads,
            "head_dim": 256, "d_ff": d_ff, "mlp_matrices": 2, "vocab": 32768, "tied_embedding": True,
        },
        "layout": {**layout, "dcn_data": slices}, "batch": {"per_device_batch_size": batch, "seq": 2048},
        "precision": "bf16", "remat": remat, "measured": {"tflops_per_s_per_chip": tflops},
        "flops_convention": "causal-halved attention", "note": "" if chip == "v4" else "attention=flash",
        "source": {"repo": "AI-Hypercomputer/maxtext", "file": f"MaxText/configs/{chip}/README.md, *.sh @ ec9cdce19"},
    }  # fmt: skip


def _recipe(
    name: str, model: dict[str, Any], chip: str, topology: str, layout: dict[str, int], batch: tuple[float, int],
    precision: str, remat: str, seconds: float, file: str,
) -> dict[str, Any]:  # fmt: skip
    """A training recipe; `batch` is sequences on a device, and tokens of each."""
    chips = prod(int(side) for side in topology.split("x"))
    return {
        "id": name, "kind": "maxtext_recipe", "family": "maxtext", "chip": chip, "n_chips": chips, "n_slices": 1,
        "slice": {"chips": chips, "topology": topology}, "model": {"arch": "decoder-only dense", **model},
        "layout": layout, "batch": {"per_device_batch_size": batch[0], "seq": batch[1]}, "precision": precision,
        "remat": remat, "measured": {"step_time_s": seconds}, "source": {**_RECIPES, "file": f"training/{file}"},
    }  # fmt: skip


_LLAMA = {"head_dim": 128, "kv_heads": 8, "mlp_matrices": 3, "vocab": 128256, "tied_embedding": False}
_LLAMA_8B = {"name": "llama3.1-8b", "layers": 32, "d_model": 4096, "q_heads": 32, "d_ff": 14336, **_LLAMA}
_LLAMA_70B = {"name": "llama3.1-70b", "layers": 80, "d_model": 8192, "q_heads": 64, "d_ff": 28672, **_LLAMA}
_GPT3 = {
    "name": "gpt3-175b", "layers": 96, "d_model": 12288, "q_heads": 96, "kv_heads": 96, "head_dim": 128,
    "d_ff": 49152, "mlp_matrices": 2, "vocab": 50304, "tied_embedding": True,
}  # fmt: skip
_KEPT = "custom: decoder_layer_input, context, q,k,v,qkv kept on device"

TRAINING: tuple[dict[str, Any], ...] = (
    _maxtext("mt-v4-22b-1x", (48, 6144, 24, 24576), "v4", "4x4x4", {"ici_fsdp": 64}, 16, "full", 156),
    _maxtext("mt-v5e-16b-1x", (32, 5120, 32, 32768), "v5e", "16x16", {"ici_fsdp": 256}, 6, "full", 120),
    _maxtext("mt-v5e-16b-4x", (32, 5120, 32, 32768), "v5e", "16x16", {"ici_fsdp": 256}, 6, "full", 117, 4),
    _maxtext(
        "mt-v5e-128b-1x", (64, 10240, 64, 65536), "v5e", "16x16", {"ici_fsdp": 16, "ici_tensor": 16}, 1, "full", 110
    ),
    _maxtext(
        "mt-v5p-32b-1x128", (32, 10240, 32, 32768), "v5p", "4x4x4", {"ici_fsdp": 16, "ici_tensor": 4}, 8, "minimal", 328
    ),
    _maxtext(
        "mt-v5p-1024b-1x4096",
        (128, 20480, 128, 131072),
        "v5p",
        "8x16x16",
        {"ici_fsdp": 128, "ici_tensor": 16},
        2,
        "full",
        297,
    ),
    _recipe(
        "rc-v6e-gpt3-175b-bf16",
        _GPT3,
        "v6e",
        "16x16",
        {"ici_fsdp": 256},
        (3, 2048),
        "bf16",
        "full",
        17.182,
        "trillium/GPT3-175B-MaxText/bf16/README.md",
    ),
    _recipe(
        "rc-v6e-llama3.1-8b-8",
        _LLAMA_8B,
        "v6e",
        "2x4",
        {"ici_fsdp": 8},
        (3, 8192),
        "bf16",
        "custom: decoder_layer_input,out,q,k,v offloaded to host",
        3.443,
        "trillium/Llama3.1-8B-MaxText/v6e-8/README.md",
    ),
    _recipe(
        "rc-v5p-gpt3-175b-int8",
        _GPT3,
        "v5p",
        "8x8x8",
        {"ici_fsdp": 64, "ici_tensor": 8},
        (4, 2048),
        "int8 matmul training (AQT)",
        "full",
        22.197,
        "v5p/GPT3-175B-MaxText/README.md",
    ),
    _recipe(
        "iw-llama70b-64-bf16",
        _LLAMA_70B,
        "v7",
        "4x4x4",
        {"ici_fsdp": 128},
        (2.0, 8192),
        "bf16",
        _KEPT,
        12.2,
        "ironwood/llama3.1-70b/8k-bf16-tpu7x-4x4x4",
    ),
    _recipe(
        "iw-llama70b-64-fp8",
        _LLAMA_70B,
        "v7",
        "4x4x4",
        {"ici_fsdp": 128},
        (2.0, 8192),
        "fp8_full (qwix)",
        _KEPT,
        7.93,
        "ironwood/llama3.1-70b/8k-fp8-tpu7x-4x4x4",
    ),
    {
        "id": "mlp-v0.7-bert-v3-32",
        "kind": "mlperf",
        "family": "mlperf",
        "chip": "v3",
        "n_chips": 16,
        "n_slices": 1,
        "slice": {"chips": 16, "topology": "2-D mesh 4x4"},
        "model": {
            "name": "BERT-large (MLPerf)",
            "arch": "encoder",
            "layers": 24,
            "d_model": 1024,
            "q_heads": 16,
            "head_dim": 64,
            "d_ff": 4096,
            "vocab": 30522,
        },
        "layout": {"data": 32},
        "batch": {"global_examples": 448, "seq": 512},
        "precision": "bf16",
        "measured": {"block_s_median": 514.333},
        "derived": {"block": "1117 steps of 448 sequences (+ evaluation)"},
        "source": {
            "repo": "mlcommons/training_results_v0.7",
            "file": "Google/results/tpu-v3-32-TF2.0/bert",
        },
    },
)

ROWS: tuple[dict[str, Any], ...] = (
    *TRAINING,
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
