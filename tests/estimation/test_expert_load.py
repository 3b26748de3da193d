"""The load of experts as an argument of an estimate: the busiest device, choices without room, the worst case."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from meshlib.estimation.work.expert_load import ExpertLoad, grouped_products, under_load

D = mtf.Dimension
EXPERTS = 8


def lowered(layout: str, factor: float | None = None, mesh: str = "data:4", experts: int = EXPERTS) -> mtf.Program:
    routing = mtf.layers.Routing(top_k=2, capacity_factor=None, shard_factor=factor)
    with mtf.Graph():
        x = mtf.input("x", [D("batch", 16), D("length", 512), D("d_model", 1024)], "bfloat16")
        numerics = mtf.Numerics(activation_dtype="bfloat16")
        y = mtf.layers.moe(x, D("experts", experts), D("d_ff", 4096), routing, form="grouped", numerics=numerics)
        return mtf.lower({"y": y.values}, mesh=mesh, layout=layout)


SPLIT = "batch:data;experts:data"
MEASURED = [30, 30, 10, 10, 5, 5, 5, 5]  # in fours of two: 60, 20, 10 and 10 %


def flops(est: mtf.Estimate) -> float:
    return sum(r.mxu_flops for r in est.rows if "/w" in r.name)


def test_the_busiest_device_has_the_rows_of_its_experts() -> None:
    program = lowered(SPLIT)
    plain, loaded = mtf.estimate(program, "v5e-4"), mtf.estimate(program, "v5e-4", expert_load=MEASURED)
    assert loaded.experts is not None
    assert loaded.experts.busiest == pytest.approx(4 * 0.6)
    assert loaded.experts.dropped == 0
    assert flops(loaded) == pytest.approx(2.4 * flops(plain), rel=1e-6)
    assert plain.step_seconds < loaded.step_seconds < loaded.experts.worst_seconds
    assert plain.experts is None
    assert "2.40x  times the mean on the busiest device: measured counts of 8 experts" in str(loaded)


def test_alike_is_what_is_estimated_without_a_load() -> None:
    program = lowered(SPLIT)
    assert mtf.estimate(program, "v5e-4", expert_load="balanced").step_seconds == pytest.approx(
        mtf.estimate(program, "v5e-4").step_seconds
    )


def test_choices_without_room_are_told() -> None:
    """Room for 1.5 times the mean: of 60, 20, 10 and 10 per cent 22.5 find none."""
    est = mtf.estimate(lowered(SPLIT, factor=1.5), "v5e-4", expert_load=MEASURED)
    assert est.experts is not None
    assert est.experts.dropped == pytest.approx(0.6 - 1.5 / 4, rel=1e-3)
    assert est.experts.worst_seconds == pytest.approx(est.step_seconds)


def test_where_no_rule_splits_experts_all_devices_have_the_same_rows() -> None:
    program = lowered("batch:data")
    est = mtf.estimate(program, "v5e-4", expert_load=4.0)
    assert est.experts is not None
    assert est.experts.busiest == pytest.approx(1.0)
    assert est.step_seconds == pytest.approx(mtf.estimate(program, "v5e-4").step_seconds)


def test_every_product_knows_its_experts_forward_and_back() -> None:
    config = mtf.models.preset("deepseek-v3").reduced()
    mesh = "fsdp:2;expert:4"
    with mtf.Graph():
        step = mtf.models.train_step(config, 8, 16)
        program = mtf.lower(*step, mesh=mesh, layout=mtf.models.layout("fsdp+expert", config, mesh))
    shares = list(grouped_products(program))
    assert len(shares) >= 9  # three products, their operands' gradients, and the kernels'
    assert {(s.experts, s.blocks) for s in shares} == {(8, 4)}
    assert len(list(grouped_products(under_load(program, ExpertLoad(2.0))))) == len(shares)


@pytest.mark.parametrize("skew", [1.0, 1.5, 4.0, 8.0])
def test_skews(skew: float) -> None:
    shares = ExpertLoad(skew).shares(EXPERTS)
    assert shares.sum() == pytest.approx(1)
    assert shares.max() * EXPERTS == pytest.approx(skew, rel=1e-6)


def test_few_tokens_of_a_skewed_load_read_fewer_experts() -> None:
    """Where one expert takes all first choices, the others are read less often."""
    config = mtf.models.preset("mixtral-8x7b").replace(layers=1, vocab=128)
    with mtf.Graph():
        program = mtf.lower(*mtf.models.decode_step(config, 4, 128))
    read = [
        sum(r.hbm_bytes for r in mtf.estimate(program, "v5e-1", expert_load=load).rows if "/experts/w" in r.name)
        for load in ("balanced", 3.0)
    ]
    chances = np.minimum(1.0, ExpertLoad(3.0).shares(8) * 8 * 2 / 8)
    expected = np.mean(1 - (1 - chances) ** 4) / (1 - (1 - 2 / 8) ** 4)
    assert read[1] / read[0] == pytest.approx(expected, rel=0.02)


BAD: dict[str, tuple[Any, str]] = {
    "text": ("even", "expert_load must be 'balanced', .* got 'even'"),
    "below 1": (0.5, r"\(1 or more\), or a count for each expert, not all 0; got 0.5"),
    "zeros": ([0, 0], r"not all 0; got \[0, 0\]"),
    "another number": ([1, 2, 3], "has 3 counts, but the program's experts are 8"),
    "too much": (9.0, "must be at most 8, the program's experts"),
}


@pytest.mark.parametrize("about", BAD)
def test_bad_loads(about: str) -> None:
    load, message = BAD[about]
    with pytest.raises(mtf.GraphError, match=message):
        mtf.estimate(lowered(SPLIT), "v5e-4", expert_load=load)


def test_a_program_without_grouped_experts() -> None:
    with mtf.Graph():
        program = mtf.lower({"y": mtf.exp(mtf.input("x", "d:8"))})
    with pytest.raises(mtf.GraphError, match="and the program has none"):
        mtf.estimate(program, "v5e-1", expert_load=2.0)
