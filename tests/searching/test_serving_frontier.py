"""Serving on a slice: points are programs, the largest batch is the largest, the frontier is one."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import cache

import pytest

import meshlib as mtf

CONFIG = mtf.models.TransformerConfig(
    name="served", layers=4, d_model=2048, heads=16, kv_heads=4, head_dim=128, d_ff=8192, vocab=32000,
    position="rotary", norm="rms", gated=True, numerics=mtf.Numerics("bfloat16", activation_dtype="bfloat16"),
)  # fmt: skip
CONTEXT = 16384


@cache
def found() -> mtf.Serving:
    return mtf.serving(CONFIG, "v5e-4", CONTEXT, layouts=[("data:4", "batch:data"), ("tensor:4", SPLIT)])


SPLIT = "heads:tensor;d_ff:tensor;vocab:tensor"


def step(batch: int, mesh: str, layout: str) -> mtf.Estimate:
    with mtf.Graph():
        program = mtf.lower(*mtf.models.decode_step(CONFIG, batch, CONTEXT), mesh=mesh, layout=layout)
    return mtf.estimate(program, "v5e-4")


def test_points_are_estimates_of_the_steps() -> None:
    point = next(p for p in found().points if p.name.startswith("tensor:4") and p.batch == 32)
    est = step(32, "tensor:4", SPLIT)
    assert point.token_seconds == est.step_seconds
    assert point.tokens_per_second == 32 / est.step_seconds
    assert point.usd_per_million_tokens == pytest.approx(est.usd() * 1e6 / 32)
    assert point.prefill.program.inputs["tokens"].tensor.shape.sizes == (1, CONTEXT // 2)


def test_tables_name_the_weights_which_are_those_that_models_are_served_with() -> None:
    """Of a preset, whose numerics are those of training, in bfloat16; of narrower ones as they are."""
    where = {"slice": "v5e-1", "context": 64, "batches": [1], "layouts": [("data:1", "")]}
    trained, peaks = CONFIG.replace(layers=1, numerics=mtf.Numerics(activation_dtype="bfloat16")), []
    narrow = CONFIG.replace(layers=1, numerics=mtf.Numerics("bfloat16", None, "bfloat16", kernel_dtype="int4"))
    for config, weight_dtype, named in [
        (trained, "float32", "float32"), (trained, None, "bfloat16"), (CONFIG.replace(layers=1), None, "bfloat16"),
        (trained, "int8", "int8"), (narrow, None, "int4"), (narrow, "bfloat16", "bfloat16"),
    ]:  # fmt: skip
        found = mtf.serving(config, **where, weight_dtype=weight_dtype)
        assert str(found).startswith(f"served on v5e-1: weights in {named}, 64 positions of cache in bfloat16, prompts")
        peaks.append(found.points[0].peak_bytes)
    assert peaks[0] > 1.9 * peaks[1] == 1.9 * peaks[2] == 1.9 * peaks[5]
    assert peaks[1] > 1.3 * peaks[3] > 1.3 * peaks[4]  # the table stays in bfloat16


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    assert [p.batch for p in found().points if p.name.startswith("data:4")][:3] == [4, 8, 16]
    for name, most in found().largest.items():
        mesh, layout = name.split(" ")
        group = 4 if mesh == "data:4" else 1
        assert most % group == 0
        assert max(p.batch for p in found().points if p.name == name) == most
        assert step(most, mesh, layout).fits
        assert not step(most + group, mesh, layout).fits


def test_experts_that_take_sequences_together_compute_less() -> None:
    """Room for what is chosen, at least four places an expert, in place of every expert for every sequence."""
    config = mtf.models.preset("mixtral-8x7b").replace(layers=1, vocab=4096)
    assert config.experts is not None
    routing = replace(config.experts.routing, capacity_factor=1.25)
    config = config.replace(experts=replace(config.experts, form=None, routing=routing))

    def points(group_size: int | None) -> list[mtf.Estimate]:
        where = [("tensor:4", "experts:tensor")]
        sizes = {"batches": [12, 64], "group_size": group_size}
        served = mtf.serving(config, "v5e-4", 64, layouts=where, weight_dtype="float32", **sizes)
        return [p.decode for p in served.points]

    def flops(est: mtf.Estimate) -> float:
        return est.program.work.mxu_flops

    alone, together = points(None), points(8)
    assert [flops(t) < 0.8 * flops(a) for a, t in zip(alone, together, strict=True)] == [True, True]
    for est, batch, size in zip(together, (12, 64), (6, 8), strict=True):
        with mtf.Graph():
            made = mtf.models.decode_step(config, batch, 64, group_size=size)
            assert (
                est.step_seconds
                == mtf.estimate(mtf.lower(*made, mesh="tensor:4", layout="experts:tensor"), "v5e-4").step_seconds
            )
    with pytest.raises(mtf.GraphError, match="group_size must be at least 1, got 0"):
        points(0)


def test_nothing_is_faster_and_cheaper_than_the_frontier() -> None:
    frontier = found().frontier
    for p in found().points:
        beaten = [
            q for q in found().points if q.token_seconds < p.token_seconds and q.tokens_per_second > p.tokens_per_second
        ]
        assert bool(beaten) == (p not in frontier)
    slow = frontier[-1].token_seconds
    assert found().within(slow) is frontier[-1]
    assert found().within(frontier[0].token_seconds / 2) is None


def test_what_is_printed_and_drawn(tmp_path) -> None:
    text = str(found())
    assert f"served on v5e-4: weights in bfloat16, {CONTEXT} positions of cache" in text
    assert text.count("->") == len(found().frontier) + 1
    if importlib.util.find_spec("matplotlib"):
        found().plot(tmp_path / "serving.png")
        assert (tmp_path / "serving.png").read_bytes().startswith(b"\x89PNG")


def test_layouts_of_its_own() -> None:
    own = mtf.serving(CONFIG.replace(layers=1), "v5e-8", 256, batches=[4, 6])
    assert {p.name for p in own.points} == {"data:4;tensor:2", "data:2;tensor:4", "features:2;tensor:4"}
    assert {p.batch for p in own.points if p.name == "data:4;tensor:2"} == {4}  # 6 does not divide
    assert own.largest["data:8"] >= 8
    assert f"data:8: none of the batches fits and divides; the largest that does is {own.largest['data:8']}" in str(own)
    assert "groups of 4 queries, 4 % 8 = 4" in own.skipped["tensor:8"]


def test_what_fits_nowhere() -> None:
    large = mtf.serving(mtf.models.preset("llama2-70b"), "v5e-4", 2048, layouts=[("data:4", "batch:data")])
    assert not large.points
    assert not large.frontier
    assert "data:4 batch:data: fits with no batch" in str(large)


BAD = {
    "a slice": ({"slice": "v5e-3"}, "v5e-3"),
    "a model": ({"config": "llama"}, "expected a TransformerConfig"),
    "an encoder": ({"config": mtf.models.preset("bert-large")}, "is an encoder"),
    "a prompt": ({"prompt": 99, "context": 64}, "prompt must be in 1 to 64, the context, got 99"),
    "batches": ({"batches": [0]}, "batches must be a non-empty list"),
    "layouts": ({"layouts": ["data:4"]}, "layouts must be .mesh, layout. pairs"),
    "no layouts": ({"layouts": []}, "layouts must be a non-empty list of .mesh, layout. pairs"),
    "no legal layout": ({"layouts": [("data:4", "d_ff:other")]}, "no layout of served on v5e-4 is legal"),
}


@pytest.mark.parametrize("about", BAD)
def test_bad_input(about: str) -> None:
    given, message = BAD[about]
    arguments = {"config": CONFIG, "slice": "v5e-4", "context": 64, **given}
    with pytest.raises(mtf.MeshlibError, match=message):
        mtf.serving(**arguments)


def test_experts_are_split_over_axes_of_the_batch() -> None:
    """Beside each split of the batch there is one in which each device reads its own experts alone."""
    experts = mtf.models.Experts(count=4, d_ff=8192, routing=mtf.layers.Routing(top_k=2))
    mixture = CONFIG.replace(layers=1, experts=experts, name="mixture", heads=1, kv_heads=1, d_ff=8191, vocab=31_999)
    points = {p.name: p for p in mtf.serving(mixture, "v5e-4", 65_536, batches=[4]).points}
    assert [*points] == ["data:4", "expert:4"]  # heads are not split
    whole, split = (sum(r.hbm_bytes * r.count for r in point.decode.rows) for point in points.values())
    weights = 3 * 2048 * 8192 * 2  # of an expert: three kernels in bfloat16
    assert whole - split == pytest.approx(3 * weights, rel=0.05)
    assert points["expert:4"].token_seconds < points["data:4"].token_seconds
