"""Published runs of models with experts: what rows say of them becomes a program, and how near its time comes."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

import meshlib as mtf
from meshlib.estimation import CALIBRATED
from meshlib.models import preset
from meshlib.validation.measured import flops_per_token, parameters
from meshlib.validation.policies import NotExpressed
from meshlib.validation.runs import run_of
from meshlib.validation.training import config_of, prepare
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


def test_ragged_products_multiply_whole_tiles_of_weights() -> None:
    """1,536 of a width are two tiles of 1,024, 640 are a tile of their own; rows stay as many as they are."""
    e, r, d, f = (mtf.Dimension(name, size) for name, size in (("e", 4), ("r", 1280), ("d", 640), ("f", 1536)))
    with mtf.Graph():
        x, w = mtf.input("x", [e, r, d], "bfloat16"), mtf.variable("w", [e, d, f], dtype="bfloat16")
        y = mtf.einsum([x, w], output_shape=[e, r, f])
        (dw,) = mtf.gradients([mtf.reduce_sum(y)], [w])
        program = mtf.lower({"y": y, "dw": dw})
    assert products(program, 0)[0] == (4, 1280, 640, 1536)
    assert products(program, 1024)[0] == (4, 1280, 640, 2048)
    assert sorted(products(program, 1024)[1][1:]) == [640, 1280, 2048]


def test_products_of_other_weights_and_of_attention_have_no_ragged_tiles() -> None:
    b, h, t, m, k = (mtf.Dimension(*d) for d in (("b", 2), ("h", 4), ("t", 1280), ("m", 1536), ("k", 1152)))
    with mtf.Graph():
        w = mtf.variable("w", [h, k], dtype="bfloat16")  # heads are a dim of a weight
        q, key = mtf.input("q", [b, h, t, k], "bfloat16") * w, mtf.input("key", [b, h, m, k], "bfloat16")
        plain = mtf.einsum([mtf.input("x", [t, k], "bfloat16"), mtf.variable("v", [k, m], dtype="bfloat16")], [t, m])
        program = mtf.lower({"scores": mtf.einsum([q, key], [b, h, t, m]), "plain": plain})
    assert products(program, 1024) == products(program, 0)


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
    """All tokens of a device together: 8 sequences of 4,096, which MaxText's `sparse_matmul` sorts as one."""
    run = run_of(BY_NAME["iw-dsv3-128-bf16"])
    assert run.experts is not None
    assert run.experts.form == "grouped"
    assert (run.experts.routing.capacity_factor, run.experts.routing.group_size) == (None, 8 * 4096)
    assert run.assumed == ("nothing dropped, ragged products in tiles of 512 rows, 1024 inputs and outputs",)
    stated = run_of(BY_NAME["rc-v6e-mixtral-8x7b"])
    assert stated.experts is not None
    assert (run.ragged, stated.ragged) == (True, False)
    assert (stated.experts.routing.capacity_factor, stated.experts.form) == (1.25, "einsum")
    assert stated.assumed == ("tiles of attention as its recipe sets them",)


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
    for absent, words in (("top_k", "its experts' top_k is not stated"), ("v_head", "its latent attention's v_head")):
        model = {key: value for key, value in row["model"].items() if key != absent}
        with pytest.raises(NotExpressed, match=words):
            run_of({**row, "model": model})
