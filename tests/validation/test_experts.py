"""Published runs of models with experts: what rows say of them becomes a program, and how near its time comes."""

from __future__ import annotations

import statistics

import pytest

from meshlib.estimation.physics import CALIBRATED
from meshlib.models import preset
from meshlib.validation.experts import TILE_ROWS
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
