"""Values that only pass between kernels stay in VMEM while they and smaller ones fit, whatever streams past them."""

from __future__ import annotations

import pytest

import meshlib as mtf

D = mtf.Dimension
MIB = 1 << 20


def passed(rows: int, slice_: str = "v5e-1", wide: int = 0) -> tuple[mtf.Estimate, int]:
    """Two products with weights of 32 MiB; bytes of what passes between them. `wide`: rows of another value beside."""
    b, d, f = D("rows", rows), D("d", 4096), D("f", 4096)
    with mtf.Graph():
        x = mtf.input("x", [b, d], "bfloat16")
        h = mtf.einsum([x, mtf.variable("w", [d, f], dtype="bfloat16")], output_shape=[b, f], name="first")
        outputs = {}
        if wide:
            tall = D("tall", wide)
            u = mtf.variable("u", [d, f], dtype="bfloat16")
            z = mtf.einsum([mtf.input("z", [tall, d], "bfloat16"), u], [tall, f])
            outputs["z"] = mtf.einsum([z, mtf.variable("t", [f, d], dtype="bfloat16")], [tall, d])
        v = mtf.variable("v", [f, d], dtype="bfloat16")
        outputs["y"] = mtf.einsum([h, v], output_shape=[b, d], name="second")
        program = mtf.lower(outputs, mesh=f"p:{slice_.partition('-')[2]}")
    return mtf.estimate(program, slice_), rows * 4096 * 2


def traffic(est: mtf.Estimate, *names: str) -> float:
    return sum(r.traffic_bytes for r in est.rows if r.name in names)


def held(rows: int) -> int:
    """Weights, input and result of the two products."""
    return 2 * 32 * MIB + 2 * rows * 4096 * 2


@pytest.mark.parametrize("rows", [128, 256])
def test_a_small_value_passes_on_the_chip_while_weights_stream(rows: int) -> None:
    est, _ = passed(rows)
    read_again = traffic(est, "first") - 32 * MIB - rows * 4096 * 2  # of x, by blocks of the result
    assert traffic(est, "second") == pytest.approx(32 * MIB + rows * 4096 * 2, rel=1e-6)
    assert 0 <= read_again <= 4 * rows * 4096 * 2
    assert est.hbm_bytes == held(rows) + 2 * rows * 4096 * 2  # at the boundaries of kernels, as ever


def test_what_does_not_fit_half_of_vmem_goes_through_hbm() -> None:
    est, size = passed(16_384)  # 128 MiB
    assert traffic(est, "second") >= 32 * MIB + 2 * size


def test_a_chip_whose_vmem_its_kernels_fill_keeps_none() -> None:
    est, size = passed(128, "v3-8")
    assert traffic(est, "second") >= 32 * MIB + 2 * size


def test_the_smaller_value_stays() -> None:
    """48 and 32 MiB live at once beside each other in 64."""
    both, _ = passed(4096, wide=6144)
    alone, _ = passed(4096)
    assert traffic(alone, "second") == pytest.approx(traffic(both, "second"), rel=1e-6)
    taller, _ = passed(6144, wide=4096)
    beside, _ = passed(6144)
    assert traffic(taller, "second") >= traffic(beside, "second") + 48 * MIB


def test_a_step_of_decoding_moves_weights_and_caches() -> None:
    numerics = mtf.Numerics("bfloat16", activation_dtype="bfloat16", kernel_dtype="int8")
    config = mtf.models.preset("llama2-70b").replace(numerics=numerics, layers=4)
    mesh = "data:2;tensor:8"
    with mtf.Graph():
        step = mtf.models.decode_step(config, 256, 2048, cache_dtype="int8")
        program = mtf.lower(*step, mesh=mesh, layout=mtf.models.layout("data+tensor+cache", config, mesh))
    est = mtf.estimate(program, "v5e-16")
    layers = [r for r in est.rows if r.name.startswith("layers/")]
    variables = {n: v.local_bytes for n, v in program.variables.items() if n.startswith("layers/")}
    moved = sum(r.traffic_bytes * r.count for r in layers)
    assert moved <= 1.12 * sum(variables.values())
    assert sum(r.hbm_bytes * r.count for r in layers) >= 1.15 * sum(variables.values())  # with what passes
