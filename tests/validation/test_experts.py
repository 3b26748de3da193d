"""Published runs of models with experts: what rows say of them becomes a program, and how near its time comes."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

import meshlib as mtf
from hardware import CHIPS
from meshlib.estimation import CALIBRATED
from meshlib.models import preset
from meshlib.validation.measured import flops_per_token, parameters
from meshlib.validation.policies import NotExpressed
from meshlib.validation.runs import run_of
from meshlib.validation.training import compiler_of, config_of, prepare
from tests.effort import some
from tests.validation.rows import BY_NAME

PRESETS = {
    "rc-v6e-mixtral-8x7b": "mixtral-8x7b",
    "rc-v5p-llama4-scout": "llama4-scout",
    "iw-dsv3-128-bf16": "deepseek-v3",
    "iw-gptoss-64": "gpt-oss-120b",
    "iw-qwen235b-bf16": "qwen3-235b-a22b",
}


def products(program: mtf.Program, width: int) -> list[tuple[int, int, int, int]]:
    """(batch, m, k, n) of the products of a program, under a compiler with that width of ragged tiles."""
    est = mtf.estimate(program, "v5e-1", replace(mtf.XLA_TPU, ragged_tile_width=width))
    kernels = [u.kernel for u in est.plan.units if u.kernel is not None]
    return [(p.batch, p.m, p.k, p.n) for kernel in kernels for p, _ in kernel.matmuls]


@pytest.mark.parametrize(("row", "name"), PRESETS.items())
def test_rows_have_the_weights_and_flops_of_the_published_model(row: str, name: str) -> None:
    run = run_of(BY_NAME[row])
    found, wanted = config_of(run), preset(name)
    assert found.matmul_parameters == pytest.approx(wanted.matmul_parameters, rel=2e-3)
    assert parameters(run.model) == pytest.approx(found.matmul_parameters, rel=1e-4)
    table = found.parameter_counts["embedding"]
    assert parameters(run.model, held=True) == pytest.approx(found.parameters - table, rel=1e-3)
    half = flops_per_token(run.model, run.length, "windows")
    assert half == pytest.approx(found.flops_per_token(run.length), rel=2e-3)


def test_without_a_capacity_rows_are_sorted_by_expert() -> None:
    """As MaxText's `sparse_matmul` does with all tokens of a device."""
    run = run_of(BY_NAME["iw-dsv3-128-bf16"])
    assert run.experts is not None
    assert run.experts.form == "grouped"
    assert (run.experts.routing.capacity_factor, run.experts.routing.group_size) == (None, None)
    assert run.assumed == ("no token dropped",)
    stated = run_of(BY_NAME["rc-v6e-mixtral-8x7b"])
    assert stated.experts is not None
    assert (stated.experts.routing.capacity_factor, stated.experts.form) == (1.25, "einsum")
    assert stated.assumed == ("kernels as its recipe sets them",)


def test_a_tile_in_which_two_groups_meet_is_computed_for_both() -> None:
    """4,096 rows of 4 experts are 8 tiles of 512 and 3 more; widths of 1,536 are two tiles of 1,024."""
    rows, e, d, f = (mtf.Dimension(name, size) for name, size in (("r", 4096), ("e", 4), ("d", 640), ("f", 1536)))
    with mtf.Graph():
        x, w = mtf.input("x", [rows, d], "bfloat16"), mtf.variable("w", [e, d, f], dtype="bfloat16")
        y = mtf.ragged_dot(x, w, mtf.input("sizes", [e], "int32"), rows, e)
        (dw,) = mtf.gradients([mtf.reduce_sum(y)], [w])
        program = mtf.lower({"y": y, "dw": dw})
    assert products(program, 0) == [(1, 11 * 512, 640, 1536), (1, 640, 11 * 512, 1536)]
    assert products(program, 1024) == [(1, 11 * 512, 640, 2048), (1, 640, 11 * 512, 2048)]


@pytest.mark.parametrize("names", some([tuple(PRESETS), ("rc-v6e-mixtral-8x7b",)], [("rc-v6e-mixtral-8x7b",)]))
def test_predicted_within_a_tenth_in_the_median(names: tuple[str, ...]) -> None:
    errors = []
    for name in names:
        run = run_of(BY_NAME[name])
        errors.append(abs(prepare(run).seconds(CALIBRATED) / run.measured_seconds - 1))
    assert statistics.median(errors) < 0.1


def test_what_is_not_stated_is_said() -> None:
    row = BY_NAME["iw-dsv3-128-bf16"]
    for absent, words in (
        ("top_k", "not stated of its experts: top_k"),
        ("v_head", "not stated of its latent attention: v_head"),
    ):
        model = {key: value for key, value in row["model"].items() if key != absent}
        with pytest.raises(NotExpressed, match=words):
            run_of({**row, "model": model})


def bias_seconds(chip: str, width: int, **changes: bool) -> list[float]:
    """Vector seconds of 4,096 rows of biases of four experts: their lookup, then their gradient."""
    rows, e, f = (mtf.Dimension(name, size) for name, size in (("r", 4096), ("e", 4), ("f", width)))
    with mtf.Graph():
        biases = mtf.variable("b", [e, mtf.Dimension("one", 1), f], dtype="bfloat16")
        ones = mtf.input("ones", [rows, mtf.Dimension("one", 1)], "bfloat16")
        y = mtf.ragged_dot(ones, biases, mtf.input("sizes", [e], "int32"), rows, e)
        (db,) = mtf.gradients([y], [biases], [mtf.input("dy", [rows, f], "bfloat16")])
        program = mtf.lower({"y": y, "db": db})
    est = mtf.estimate(program, f"{chip}-1", replace(mtf.XLA_TPU, **changes))
    return [row.vpu_seconds for row in est.rows if row.opcode == "ragged_dot"]


def test_biases_looked_up_take_a_cycle_for_128_elements() -> None:
    """libtpu 0.0.42.1 compiles rows of 1,024 numbers for v5e to 9 bundles read and 12 added, of 2,880 to 25 and 27."""
    cycle = 1 / CHIPS["v5e"].clock_hz
    for width, registers in ((1024, 8), (2880, 23)):
        assert bias_seconds("v5e", width, bias_lookups=True) == pytest.approx([4096 * registers * cycle] * 2, rel=1e-2)
        assert max(bias_seconds("v5e", width)) < 1024 * registers * cycle


def test_runs_of_maxtext_look_up_biases_of_experts() -> None:
    looking = {name for name in PRESETS if compiler_of(run_of(BY_NAME[name])).bias_lookups}
    assert looking == {"iw-gptoss-64"}
