"""Published figures of eight TPU generations: field -> (value, where it was read).

`hardware.chips` makes `Chip` objects of these. Figures are those against which utilisations are
published. Where sources disagree the choice is said in the source; "assumed" marks what no source says,
"from memory" what was recalled from the named source and not read again. Units are in the field names;
rates are per chip unless the name says otherwise, GB is 1e9 bytes and GiB is 2**30.
"""

from __future__ import annotations

from typing import Any

Figures = dict[str, tuple[Any, str]]

MIB, GIB = 2**20, 2**30

_DOCS = "docs.cloud.google.com/tpu/docs/"
_CACM = "Jouppi et al., CACM 63(7), 2020 (from memory)"
_TALK = "TPU pods talk, 2019"
_INFO = "jax-ml/jax jax/_src/pallas/mosaic/tpu_info.py @04c63627"
_BOOK = "jax-ml/scaling-book @0819a7d tpus.md"
_PRICE = "cloud.google.com/tpu/pricing (from memory)"
_RECIPES = "AI-Hypercomputer/tpu-recipes @c8cfe2f microbenchmarks/"
_TRILLIUM = "AI-Hypercomputer/tpu-recipes training/trillium"
_TRAINING = "AI-Hypercomputer/tpu-recipes training/ironwood"
# Stacks of HBM come in powers of two; the same docs print v3, v4, v5p and tpu7x in GiB.
_READ_AS_GIB = "read as GiB, as the docs print other kinds"
_APPLIED = "jax-ml/scaling-book applied-inference.md, February 2025"
# The rest is kept by the runtime: XLA reports "Used ... of 15.75G hbm", its allocator the same as bytes_limit.
_OFFERED = " GiB are offered to programs: out-of-memory messages of XLA and allocator limits in public threads"

COMMON: Figures = {
    "vpu_sublanes": (8, _INFO),
    "vpu_lanes": (128, _INFO),
    "vpu_alus_per_lane": (4, "4 from v5 on: " + _BOOK + "; assumed for v5e, v6e and v7"),
    "vpu_bf16": (False, "float32 lanes only before v6e: " + _BOOK),
    "vector_loop_cycles": (
        12.0,
        "cycles per register of 8 x 128 of a loop over one vector instruction, beside copies that do not overlap it: "
        "what XLA reports for exp and add alone on v5e, 12.3, and on v6e, 14.5; assumed for v5p and v7",
    ),
    "attention_backward_kernels": (
        2,
        "one kernel for the gradient of queries, one for those of keys and values, each of which computes the scores "
        "again: jax-ml/jax jax/experimental/pallas/ops/tpu/flash_attention.py",
    ),
    "attention_tile": ((512, 512), "sa_block_q, sa_block_kv: AI-Hypercomputer/maxtext src/MaxText/configs/base.yml"),
    "attention_window_tile": ((512, 512), "as attention_tile"),
    "attention_backward_tile": ((512, 512), "sa_block_q_dkv, sa_block_kv_dkv: ibid."),
    "vmem_bandwidth_ratio": (22.0, "VMEM is about 22 times HBM bandwidth (v5e): " + _BOOK),
    "cmem_bytes": (0, "only v4 has CMEM: " + _INFO),
    "hbm_reserved_bytes": (0, "not published"),
    "hbm_efficiency": (0.9, "copies reach 85-95 % of nominal; v7 measured 87 %"),
    "mxu_efficiency": (0.96, "large bf16 matmuls reach 95-97 % of peak on shipping chips"),
    "ici_efficiency": (0.9, "45/45/90/90 GB/s measured of 50/50/100/100: jax-ml/scaling-book sharding.md"),
    "ici_hop_seconds": (1e-6, "about 1 us per hop: jax-ml/scaling-book sharding.md"),
    "dcn_efficiency": (
        0.5,
        "between pods of v4 81 Tbit/s, 3.3 of 6.25 GB/s per chip: PaLM, arXiv:2204.02311; on v6e an all-reduce of "
        "606 MB at 4.1 of 12.5 GB/s, up to 8.2 by the number of slices: AI-Hypercomputer/tpu-recipes @c8cfe2f "
        "microbenchmarks/trillium/collectives",
    ),
    "dcn_hop_seconds": (10e-6, "assumed: one switch traversal and two host stacks"),
    "launch_seconds": (
        1e-6,
        "copies and small matmuls on v7 take 1.4-1.8 us more than their bytes: AI-Hypercomputer/tpu-recipes "
        "microbenchmarks/ironwood; 1 us of it per operation, the rest per program (assumed)",
    ),
    "collective_launch_seconds": (5e-6, "assumed: between v5e and v7, where it was measured"),
    "pcie_bytes_per_second": (16e9, "each way, v4-v6e: " + _BOOK),
    "peak_int8_flops": (None, "no published integer rate"),
    "peak_fp8_flops": (None, "no published fp8 rate"),
    "peak_int4_flops": (None, "no published int4 rate"),
    "wrap_axis": (None, "not this rule"),
    "wrap_cube": (None, "not this rule"),
    "twists": (False, "no twisted slices are offered"),
    "tdp_watts": (None, "not published"),
}

_LOOP = "4.1 in what XLA reports for exp and add alone on v4; assumed for v2 and v3"
_WRAP_FULL = "sub-slices have no wrap on partial axes: mlcommons/training_results_v0.7 systems, and from memory"
_WRAP_16 = "a 2-D axis wraps only if it has 16 chips: " + _BOOK
_WRAP_CUBES = "wrap-around only on slices of whole 4x4x4 cubes: " + _BOOK + "; " + _DOCS + "v4"
_NIC = "assumed: one 100 Gbit/s NIC per host of 4 chips"

FIGURES: dict[str, Figures] = {
    "v1": {
        "year": (2015, "Jouppi et al., ISCA 2017, arXiv:1704.04760"),
        "cores_per_chip": (1, "ISCA 2017, figure 1"),
        "devices_per_chip": (1, "one PCIe card"),
        "clock_hz": (700e6, "ISCA 2017, table 2"),
        "mxus_per_core": (1, "ISCA 2017, section 2"),
        "mxu_rows": (256, "ISCA 2017, section 2"),
        "mxu_columns": (256, "ISCA 2017, section 2"),
        "peak_bf16_flops": (None, "8-bit integers only"),
        "peak_int8_flops": (91.75e12, "92 TOPS = 2 x 65,536 x 700 MHz: ISCA 2017, table 2"),
        "vpu_lanes": (256, "assumed: the activation unit is as wide as the accumulators"),
        "vpu_sublanes": (1, "assumed, as vpu_lanes"),
        "vpu_alus_per_lane": (1, "assumed, as vpu_lanes"),
        "vmem_bytes_per_core": (28 * MIB, "24 MiB unified buffer + 4 MiB accumulators: ISCA 2017, table 2"),
        "hbm_bytes": (8 * GIB, "weight memory, DDR3: ISCA 2017, section 2"),
        "hbm_bytes_per_second": (34e9, "DDR3: ISCA 2017, table 2"),
        "ici_links": (0, "no interconnect"),
        "ici_bytes_per_second": (0.0, "no interconnect"),
        "pod_shape": ((1,), "single cards"),
        "max_slice_chips": (1, "single cards"),
        "chips_per_host": (4, "4 dies per server: ISCA 2017, table 2"),
        "name_counts": ("chips", "own convention"),
        "dcn_bytes_per_second": (3.125e9, _NIC),
        "pcie_bytes_per_second": (12.5e9, "PCIe Gen3 x16: ISCA 2017, section 2"),
        "usd_per_chip_hour": (None, "never sold"),
        "tdp_watts": (75.0, "ISCA 2017, table 2"),
    },
    "v2": {
        "year": (2017, "TPU training talk, 2018"),
        "cores_per_chip": (2, "TPU training talk, 2018; " + _DOCS + "v3"),
        "devices_per_chip": (2, "each core is a device with its own HBM"),
        "clock_hz": (700e6, _CACM),
        "mxus_per_core": (1, _TALK),
        "mxu_rows": (128, "TPU talks; " + _INFO),
        "mxu_columns": (128, "TPU talks; " + _INFO),
        "peak_bf16_flops": (
            45.9e12,
            "geometry x clock; 45: ImageNet is the new MNIST talk, 2018; 46: " + _INFO,
        ),
        "vpu_alus_per_lane": (2, _BOOK + " (v4); assumed for v2"),
        "vector_loop_cycles": (4.0, _LOOP),
        "vmem_bytes_per_core": (16 * MIB, _INFO),
        "hbm_bytes": (16 * GIB, "16 GB: ImageNet is the new MNIST talk, 2018; read as GiB"),
        "hbm_reserved_bytes": (2 * int(0.52 * GIB), "of each device's 8 GiB, 7.48" + _OFFERED),
        "hbm_bytes_per_second": (700e9, _CACM + "; 600: ImageNet talk; 716: tpu_info"),
        "ici_links": (4, _CACM),
        "ici_bytes_per_second": (62e9, _CACM + ": 496 Gbit/s per link and direction"),
        "pod_shape": ((16, 16), "ImageNet is the new MNIST talk, 2018"),
        "max_slice_chips": (256, "ImageNet is the new MNIST talk, 2018"),
        "chips_per_host": (4, _TALK + " (4 chips per board)"),
        "name_counts": ("cores", _DOCS + "v3"),
        "wrap_axis": (16, _WRAP_FULL),
        "dcn_bytes_per_second": (3.125e9, _NIC),
        "pcie_bytes_per_second": (12.5e9, "assumed: PCIe Gen3 x16"),
        "usd_per_chip_hour": (1.125, "v2-8 at $4.50: " + _PRICE + "; v2-32 slice 1.50: " + _TALK),
        "tdp_watts": (280.0, _CACM),
    },
    "v3": {
        "year": (2018, _DOCS + "v3"),
        "cores_per_chip": (2, _DOCS + "v3"),
        "devices_per_chip": (2, "each core is a device with its own HBM"),
        "clock_hz": (940e6, _CACM),
        "mxus_per_core": (2, _DOCS + "v3"),
        "mxu_rows": (128, _TALK),
        "mxu_columns": (128, _TALK),
        "peak_bf16_flops": (123e12, _DOCS + "v3; 140 in scaling-book and tpu_info"),
        "vpu_alus_per_lane": (2, _BOOK + " (v4); assumed for v3"),
        "vector_loop_cycles": (4.0, _LOOP),
        "vmem_bytes_per_core": (16 * MIB, _INFO),
        "hbm_bytes": (32 * GIB, _DOCS + "v3"),
        "hbm_reserved_bytes": (2 * int(0.52 * GIB), "of each device's 16 GiB, 15.48" + _OFFERED),
        "hbm_bytes_per_second": (900e9, _DOCS + "v3; 825: tpu_info"),
        "ici_links": (4, _CACM),
        "ici_bytes_per_second": (82e9, _CACM + ": 656 Gbit/s per link; scaling-book prints 100"),
        "pod_shape": ((32, 32), _DOCS + "v3"),
        "max_slice_chips": (1024, _DOCS + "v3"),
        "chips_per_host": (4, _TALK + "; Cloud v3-8. MLPerf pods list 8 accelerators per node"),
        "name_counts": ("cores", _DOCS + "v3"),
        "wrap_axis": (32, _WRAP_FULL),
        "dcn_bytes_per_second": (3.125e9, _NIC),
        "pcie_bytes_per_second": (12.5e9, "assumed: PCIe Gen3 x16"),
        "usd_per_chip_hour": (2.0, "v3-32 slice at $32: " + _TALK + "; v3-8 at $8.00: " + _PRICE),
        "tdp_watts": (450.0, _CACM),
    },
    "v4": {
        "year": (2020, _DOCS + "v4"),
        "cores_per_chip": (2, _DOCS + "v4"),
        "devices_per_chip": (1, "two cores fused as a megacore: " + _DOCS + "v4"),
        "clock_hz": (1050e6, "Jouppi et al., ISCA 2023, arXiv:2304.01433 (from memory)"),
        "mxus_per_core": (4, _DOCS + "v4"),
        "mxu_rows": (128, _INFO),
        "mxu_columns": (128, _INFO),
        "peak_bf16_flops": (275e12, _DOCS + "v4"),
        "peak_int8_flops": (275e12, _DOCS + "v4 (bf16 or int8)"),
        "vpu_alus_per_lane": (2, _BOOK),
        "vector_loop_cycles": (4.0, _LOOP),
        "vmem_bytes_per_core": (16 * MIB, _INFO),
        "cmem_bytes": (128 * MIB, _INFO),
        "hbm_bytes": (32 * GIB, _DOCS + "v4"),
        "hbm_reserved_bytes": (int(1.25 * GIB), "of 32 GiB, 30.75" + _OFFERED),
        "hbm_bytes_per_second": (1200e9, _DOCS + "v4; 1230: tpu_info"),
        "ici_links": (6, _BOOK),
        "ici_bytes_per_second": (50e9, "ISCA 2023: 6 x 50 GB/s (from memory)"),
        "pod_shape": ((16, 16, 16), _DOCS + "v4"),
        "max_slice_chips": (4096, _DOCS + "v4"),
        "chips_per_host": (4, "MLPerf v1.0 system json"),
        "name_counts": ("cores", _DOCS + "v4"),
        "wrap_cube": (4, _WRAP_CUBES),
        "twists": (True, _DOCS + "v4: twisted torus topologies of 4x4x8, 4x8x8, 12x12x24"),
        "dcn_bytes_per_second": (6.25e9, "assumed as v5p"),
        "usd_per_chip_hour": (3.22, _PRICE),
    },
    "v5e": {
        "year": (2023, _DOCS + "v5e"),
        "cores_per_chip": (1, _DOCS + "v5e"),
        "devices_per_chip": (1, _DOCS + "v5e"),
        "clock_hz": (1500e6, _BOOK),
        "mxus_per_core": (4, _DOCS + "v5e"),
        "mxu_rows": (128, _INFO),
        "mxu_columns": (128, _INFO),
        "peak_bf16_flops": (197e12, _DOCS + "v5e"),
        "peak_int8_flops": (393e12, _DOCS + "v5e"),
        "peak_int4_flops": (788e12, _INFO),
        "collective_launch_seconds": (
            3e-6,
            "a gather of 128 KiB over a line of 4 takes 8 us, wire and hops 5.2: jax-ml/scaling-book sharding.md",
        ),
        "vmem_bytes_per_core": (128 * MIB, _INFO),
        "hbm_bytes": (16 * GIB, "16 GB: " + _DOCS + "v5e; " + _READ_AS_GIB),
        "hbm_reserved_bytes": (int(0.25 * GIB), "of 16 GiB, 15.75" + _OFFERED),
        "hbm_bytes_per_second": (819e9, _DOCS + "v5e"),
        "ici_links": (4, _DOCS + "v5e"),
        "ici_bytes_per_second": (50e9, _DOCS + "v5e: 400 GB/s both ways / 4 ports / 2"),
        "pod_shape": ((16, 16), _DOCS + "v5e"),
        "max_slice_chips": (256, _DOCS + "v5e"),
        "chips_per_host": (8, _DOCS + "v5e (machines of 1, 4 or 8)"),
        "name_counts": ("chips", _DOCS + "v5e"),
        "wrap_axis": (16, _WRAP_16),
        "dcn_bytes_per_second": (3.125e9, _DOCS + "v5e: 6.4 Tbit/s per pod, 2 x 100 Gbit/s per host of 8"),
        "usd_per_chip_hour": (1.2, _APPLIED),
    },
    "v5p": {
        "year": (2023, _DOCS + "v5p"),
        "cores_per_chip": (2, _DOCS + "v5p-training"),
        "devices_per_chip": (1, "two cores fused as a megacore: " + _DOCS + "v5p-training"),
        "clock_hz": (1750e6, "derived: 8 x 16,384 x 2 x 1.751e9 = 459e12"),
        "mxus_per_core": (4, _DOCS + "v5p"),
        "mxu_rows": (128, _INFO),
        "mxu_columns": (128, _INFO),
        "peak_bf16_flops": (459e12, _DOCS + "v5p"),
        "peak_int8_flops": (918e12, _BOOK + "; " + _INFO),
        "peak_fp8_flops": (459e12, _DOCS + "v5p-training"),
        "peak_int4_flops": (1840e12, _INFO),
        "vmem_bytes_per_core": (64 * MIB, _INFO),
        "hbm_bytes": (96 * GIB, "six stacks of 16 GiB, of which 95.74 are offered; 95 GiB: " + _DOCS + "v5p"),
        "hbm_reserved_bytes": (int(0.26 * GIB), "of 96 GiB, 95.74" + _OFFERED),
        "hbm_bytes_per_second": (2765e9, _DOCS + "v5p; 2460: tpu_info, 2800: scaling-book"),
        "ici_links": (6, _BOOK),
        "ici_bytes_per_second": (100e9, _DOCS + "v5p: 1200 GB/s both ways / 6 / 2"),
        "pod_shape": ((16, 20, 28), _BOOK),
        "max_slice_chips": (8960, "the pod; " + _DOCS + "v5p offers slices up to 6144 (16x16x24)"),
        "chips_per_host": (4, "MLPerf v4.0 json; " + _DOCS + "v5p"),
        "name_counts": ("cores", _DOCS + "v5p"),
        "wrap_cube": (4, _WRAP_CUBES),
        "twists": (True, _DOCS + "v5p, column Supports Twisted: 4x4x8, 4x8x8, 8x8x16, 8x16x16"),
        "dcn_bytes_per_second": (6.25e9, _DOCS + "v5p-training: 50 Gbit/s per chip"),
        "usd_per_chip_hour": (4.2, _APPLIED),
    },
    "v6e": {
        "year": (2024, _DOCS + "v6e"),
        "cores_per_chip": (1, _DOCS + "v6e"),
        "devices_per_chip": (1, _DOCS + "v6e"),
        "clock_hz": (
            1750e6,
            "derived, uncertain: two 256x256 arrays reach 459e12, half of the published peak",
        ),
        "mxus_per_core": (2, _DOCS + "v6e"),
        "mxu_rows": (256, _DOCS + "v6e"),
        "mxu_columns": (256, _DOCS + "v6e"),
        "mxu_efficiency": (0.91, "0.90 measured at 8192, start and end included: " + _RECIPES + "README.md"),
        "peak_bf16_flops": (918e12, _DOCS + "v6e"),
        "peak_int8_flops": (1836e12, _DOCS + "v6e"),
        "peak_fp8_flops": (918e12, _DOCS + "tpu7x table"),
        "vpu_bf16": (True, "bf16 lanes from v6e on: " + _BOOK),
        "attention_tile": ((1024, 512), "sa_block_q of GPT-3 and Llama 2: " + _TRILLIUM),
        "attention_window_tile": ((1024, 1024), "sa_block_q, sa_block_kv of Gemma 3: " + _TRILLIUM),
        "attention_backward_tile": ((2048, 512), "sa_block_q_dkv, sa_block_q_dq of GPT-3, Llama 2: " + _TRILLIUM),
        "vmem_bytes_per_core": (128 * MIB, _INFO),
        "hbm_bytes": (32 * GIB, "32 GB: " + _DOCS + "v6e; " + _READ_AS_GIB),
        "hbm_reserved_bytes": (int(0.75 * GIB), "of 32 GiB, 31.25" + _OFFERED),
        "hbm_bytes_per_second": (1638e9, _DOCS + "v6e"),
        "ici_links": (4, _DOCS + "v6e"),
        "ici_bytes_per_second": (100e9, _DOCS + "v6e: 800 GB/s both ways / 4 / 2"),
        "pod_shape": ((16, 16), _DOCS + "v6e"),
        "max_slice_chips": (256, _DOCS + "v6e"),
        "chips_per_host": (8, _DOCS + "v6e; MLPerf v4.1 ran 4 per node"),
        "name_counts": ("chips", _DOCS + "v6e"),
        "wrap_axis": (16, _WRAP_16),
        "dcn_bytes_per_second": (12.5e9, "100 Gbit/s per chip: " + _DOCS + "tpu7x, column v6e"),
        "pcie_bytes_per_second": (32e9, "PCIe Gen5: " + _DOCS + "v6e; eight lanes per chip are assumed"),
        "usd_per_chip_hour": (2.7, _PRICE),
    },
    "v7": {
        "year": (2025, _DOCS + "tpu7x"),
        "cores_per_chip": (2, _DOCS + "tpu7x (two dies)"),
        "devices_per_chip": (2, "JAX shows two devices per chip: " + _DOCS + "tpu7x"),
        "clock_hz": (2200e6, "derived from the peak with the assumed geometry"),
        "mxus_per_core": (4, "assumed; not published"),
        "mxu_rows": (256, "by analogy with v6e; not published"),
        "mxu_columns": (256, "by analogy with v6e; not published"),
        "mxu_efficiency": (0.824, "0.8237 measured at 16384: " + _RECIPES + "ironwood/README.md"),
        "hbm_efficiency": (0.87, "copies of 256 MiB and more: " + _RECIPES + "ironwood/hbm/hbm.md"),
        "collective_launch_seconds": (
            10e-6,
            "an all_gather of 256 KiB on four chips takes 21.9 us, wire and hops 11 of them; three sizes agree: "
            + _RECIPES
            + "ironwood/collectives/all_gather.md",
        ),
        "peak_bf16_flops": (2307e12, _DOCS + "tpu7x"),
        "peak_fp8_flops": (4614e12, _DOCS + "tpu7x"),
        "vpu_bf16": (True, "bf16 lanes from v6e on: " + _BOOK),
        "attention_backward_kernels": (
            1,
            "both gradients from scores that are computed once, sa_use_fused_bwd_kernel: " + _TRAINING,
        ),
        "attention_tile": ((2048, 2048), "sa_block_q, sa_block_kv: " + _TRAINING),
        "attention_window_tile": (
            (1024, 1024),
            "local_sa_block_q of gemma4-31b, sa_block_q of gpt-oss-120b: " + _TRAINING,
        ),
        "attention_backward_tile": ((2048, 2048), "sa_block_q_dkv, sa_block_kv_dkv: " + _TRAINING),
        "vmem_bytes_per_core": (64 * MIB, "uncertain, from memory"),
        "hbm_bytes": (192 * GIB, _DOCS + "tpu7x"),
        "hbm_reserved_bytes": (2 * int(1.3 * GIB), "of each device's 96 GiB, 94.7" + _OFFERED),
        "hbm_bytes_per_second": (7380e9, _DOCS + "tpu7x"),
        "ici_links": (6, "a 3-D torus as v5p: " + _DOCS + "tpu7x"),
        "ici_bytes_per_second": (100e9, "1200 GB/s both ways per chip, over six links: " + _DOCS + "tpu7x"),
        "pod_shape": ((16, 24, 24), "9216 chips: " + _DOCS + "tpu7x; the shape is assumed"),
        "max_slice_chips": (9216, _DOCS + "tpu7x: chips per pod"),
        "chips_per_host": (4, "GKE docs: 4 chips and 2 NICs per machine"),
        "name_counts": ("cores", _DOCS + "tpu7x (from memory)"),
        "wrap_cube": (4, _WRAP_CUBES + "; assumed for v7"),
        "dcn_bytes_per_second": (12.5e9, "100 Gbit/s per chip: " + _DOCS + "tpu7x"),
        "pcie_bytes_per_second": (32e9, "assumed as v6e"),
        "usd_per_chip_hour": (12.0, "pricing page (from memory, low confidence)"),
        "tdp_watts": (1085.0, "about 10 MW per pod of 9216 chips: Hot Chips 2025 summaries"),
    },
}
