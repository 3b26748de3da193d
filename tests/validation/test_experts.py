"""Published runs of models with experts: what rows say of them becomes a program, and how near its time comes."""

from __future__ import annotations

import statistics

import pytest

import meshlib as mtf
from hardware.slices import as_slice
from meshlib.estimation.moves import Network, placed
from meshlib.estimation.physics import CALIBRATED
from meshlib.estimation.plan import plan_of
from meshlib.models import Experts, preset
from meshlib.validation.experts import TILE_ROWS, in_tiles
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


def test_ragged_products_multiply_whole_tiles_of_weights() -> None:
    """1,536 of a width are two tiles of 1,024, 640 are a tile of their own; rows stay as many as they are."""
    e, r, d, f = (mtf.Dimension(name, size) for name, size in (("e", 4), ("r", 1280), ("d", 640), ("f", 1536)))
    with mtf.Graph():
        x, w = mtf.input("x", [e, r, d], "bfloat16"), mtf.variable("w", [e, d, f], dtype="bfloat16")
        program = mtf.lower({"y": mtf.einsum([x, w], output_shape=[e, r, f])})
    one = as_slice("v5e-1")
    plan = plan_of(program, Network(placed(one, program)))
    tiled = in_tiles(plan, Experts(count=4, d_ff=1536), 640)
    before, after = (u.kernel.matmuls[0][0] for p in (plan, tiled) for u in p.units if u.kernel and u.product)
    assert (before.m, before.k, before.n, before.batch) == (1280, 640, 1536, 4)
    assert (after.m, after.k, after.n, after.batch) == (1280, 640, 2048, 4)


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


def test_without_a_capacity_each_expert_but_one_takes_a_tile_more() -> None:
    run = run_of(BY_NAME["iw-dsv3-128-bf16"])
    assert run.experts is not None
    tokens = 8 * 4096  # of a device
    factor = (tokens * 8 + 255 * TILE_ROWS) / (tokens * 8)
    assert run.experts.routing.capacity_factor == pytest.approx(factor)
    assert run.assumed == ("nothing dropped, ragged products in tiles of 512 rows, 1024 inputs and outputs",)
    stated = run_of(BY_NAME["rc-v6e-mixtral-8x7b"])
    assert stated.experts is not None
    assert (run.ragged, stated.ragged) == (True, False)
    assert (stated.experts.routing.capacity_factor, stated.experts.form) == (1.25, "einsum")
    assert stated.assumed == ()


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
