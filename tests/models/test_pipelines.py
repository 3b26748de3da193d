"""Models as pipelines: the same steps as without, under every layout; on other meshes; errors that name remedies."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from hardware import Slice
from hardware.network import Demand
from hardware.placement import DCN
from meshlib.core.opdef import Kind
from meshlib.estimation.work.communication import priced_for
from meshlib.models import Pipeline, TransformerConfig, layout, preset, train_step
from meshlib.program.instructions import Loop
from meshlib.program.records import walk
from tests.effort import some
from tests.models.common import WIDE, small

LENGTH = 6
# model, patterns of layers (behind its dense ones), pipeline, mesh, layout
ROWS: list[tuple[str, int, Pipeline, str, str]] = [
    ("llama3.1-405b", 4, Pipeline(stages=2, microbatches=2), "pipe:2;fsdp:2;tensor:2", "pipeline+fsdp+tensor"),
    ("mixtral-8x7b", 2, Pipeline(stages=2, microbatches=2), "pipe:2;fsdp:2;expert:2", "pipeline+fsdp+expert"),
    ("deepseek-v3", 4, Pipeline(stages=2, microbatches=2, repeats=2), "pipe:2;expert:2", "pipeline+expert"),
    ("gpt2", 4, Pipeline(stages=2, microbatches=4, repeats=2), "pipe:2;data:2", "pipeline+data"),
    ("gemma3-12b", 2, Pipeline(stages=2, microbatches=2, remat="full"), "pipe:2;tensor:2", "pipeline+sequence"),
    ("bert-large", 4, Pipeline(stages=4, microbatches=4), "pipe:4;data:2", "pipeline+zero1"),
    ("palm-540b", 4, Pipeline(stages=4, microbatches=4), "pipe:4;context:2", "pipeline+context"),
    ("t5-11b", 4, Pipeline(stages=2, microbatches=2, repeats=2), "pipe:2;tensor:2", "pipeline+tensor"),
    ("switch-base-8", 2, Pipeline(stages=2, microbatches=2), "pipe:2;expert:2", "pipeline+expert"),
    ("transformer-base", 4, Pipeline(stages=4, microbatches=4), "pipe:4;fsdp:2", "pipeline+fsdp"),
]


def of_row(name: str, periods: int) -> TransformerConfig:
    config = small(name, periods)
    return config.replace(layers=config.dense_front + periods * config.period, numerics=WIDE)


def assert_as_without(
    name: str, periods: int, pipeline: Pipeline, mesh: str, rules: str, packed: bool = False
) -> mtf.Program:
    """Two steps in float64, as those of the scanned model: all that is returned, and all variables; the program."""
    config = of_row(name, periods)
    batch = 2 * 2 * pipeline.microbatches
    given: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.1, "packed": packed}
    if config.encoder_decoder:
        given["encoder_length"] = LENGTH + 2
    with mtf.Graph():
        plain = mtf.lower(*train_step(config, batch, LENGTH, **given), precision="highest")
    with mtf.Graph():
        made = train_step(config, batch, LENGTH, pipeline=pipeline, **given)
        piped = mtf.lower(*made, mesh=mesh, layout=layout(rules, config, mesh), precision="highest")
    reference, sim = mtf.simulate(plain), mtf.simulate(piped)
    assert sorted(reference.state) == sorted(sim.state)
    rng = np.random.default_rng(0)
    highest = {"segments": config.segments}
    fed = {
        name: rng.integers(0, highest.get(name, config.vocab), v.tensor.shape.sizes) for name, v in plain.inputs.items()
    }
    if packed:  # no two sequences, so no two microbatches, are packed alike
        for of in ("segment", "source_segment") if config.encoder_decoder else ("segment",):
            texts = np.sort(rng.integers(0, 4, fed[f"{of}_ids"].shape))
            places = np.arange(texts.shape[1]) - (texts[:, :, None] > texts[:, None, :]).sum(-1)
            fed[f"{of}_ids"] = texts
            fed["source_positions" if of == "source_segment" else "segment_positions"] = places
    for _ in range(2):
        found, wanted = sim.step(fed), reference.step(fed)
        assert sorted(found) == sorted(wanted)
        for what in wanted:
            assert float(found[what]) == pytest.approx(float(wanted[what]), rel=1e-12), what
    for variable, wanted_state in reference.state.items():
        ended = np.asarray(sim.state[variable])
        np.testing.assert_allclose(ended.ravel(), wanted_state.ravel(), rtol=1e-11, atol=1e-12, err_msg=variable)
    return piped


@pytest.mark.parametrize("row", some(ROWS, ROWS[:1]), ids=lambda row: f"{row[0]} {row[4]}")
def test_a_step_is_that_of_the_scanned_model(row: tuple[str, int, Pipeline, str, str]) -> None:
    piped = assert_as_without(*row)
    name, periods, pipeline, *_ = row
    config = of_row(name, periods)
    if config.period == 1 and not config.encoder_decoder:
        cut = piped.variables[f"layers/{'norm' if config.parallel else 'attention_norm'}/scale"]
        runs = [("repeat", pipeline.repeats)] * (pipeline.repeats > 1) + [("stage", pipeline.stages)]
        assert [(d.name, d.size) for d in cut.tensor.shape][: len(runs)] == runs
        assert cut.sharding.of("stage") == ("pipe",)


def test_stages_by_tasks_may_have_different_numbers_of_layers() -> None:
    """5 layers in 3 stages: 1, 2 and 2; each row of a variable that a stage has is that of the scanned model."""
    config, pipeline = of_row("llama3.1-405b", 5), Pipeline(stages=3, microbatches=3, schedule="1f1b")
    assert pipeline.split(config) == (1, 2, 2)
    rows = [0, 2, 3, 4, 5]
    step_of = partial(train_step, config, 6, LENGTH, optimizer="sgd", learning_rate=0.1)
    with mtf.Graph():
        plain = mtf.lower(*step_of(), precision="highest")
    with mtf.Graph():
        mesh = "pipe:3;fsdp:2;tensor:2"
        rules = layout("pipeline+fsdp+tensor", config, mesh)
        piped = mtf.lower(*step_of(pipeline=pipeline), mesh=mesh, layout=rules, precision="highest")
    assert all(i.splits_branch for i in (v.instruction for v in walk(piped)) if isinstance(i, Loop) and i.record.branch)
    assert any("1f1b: 3 stages, 3 microbatches" in note for note in piped.notes)
    reference, sim = mtf.simulate(plain), mtf.simulate(piped)

    def of_rows(name: str, value: Any) -> Any:
        return np.asarray(value).reshape(6, *reference.state[name].shape[1:])[rows] if "layers/" in name else value

    for name in [n for n in reference.state if n != "step"]:
        if "layers/" in name:
            cut = np.array(sim.state[name]).reshape(6, *reference.state[name].shape[1:])
            cut[rows] = reference.state[name]
            sim.state[name] = cut.reshape(sim.state[name].shape)
        else:
            sim.state[name] = reference.state[name]
    rng = np.random.default_rng(0)
    fed = {name: rng.integers(0, config.vocab, v.tensor.shape.sizes) for name, v in plain.inputs.items()}
    assert float(sim.step(fed)["loss"]) == pytest.approx(float(reference.step(fed)["loss"]), rel=1e-13)
    for name, value in reference.state.items():
        np.testing.assert_allclose(of_rows(name, sim.state[name]), value, rtol=1e-11, atol=1e-13, err_msg=name)


BY_TASKS: list[tuple[str, int, Pipeline, str, str]] = [
    ("gpt2", 4, Pipeline(stages=2, microbatches=4, repeats=2, schedule="1f1b"), "pipe:2;data:2", "pipeline+data"),
    ("gemma3-12b", 2, Pipeline(stages=2, microbatches=2, schedule="zb-h1"), "pipe:2;tensor:2", "pipeline+sequence"),
    ("palm-540b", 4, Pipeline(stages=4, microbatches=4, schedule="zb-h2"), "pipe:4;context:2", "pipeline+context"),
]


@pytest.mark.parametrize("row", some(BY_TASKS, BY_TASKS[:1]), ids=lambda row: f"{row[0]} {row[2].schedule}")
def test_a_step_by_tasks_is_that_of_the_scanned_model(row: tuple[str, int, Pipeline, str, str]) -> None:
    assert_as_without(*row)


PACKED: list[tuple[str, int, Pipeline, str, str]] = [
    ("mixtral-8x7b", 2, Pipeline(stages=2, microbatches=2), "pipe:2;tensor:2", "pipeline+tensor"),
    ("llama3.1-405b", 4, Pipeline(stages=2, microbatches=4, repeats=2), "pipe:2;fsdp:2", "pipeline+fsdp"),
    ("t5-11b", 2, Pipeline(stages=2, microbatches=2), "pipe:2;data:2", "pipeline+data"),
]


@pytest.mark.parametrize("row", some(PACKED, PACKED[::2]), ids=lambda row: row[0])
def test_each_stage_is_given_the_texts_of_its_microbatch(row: tuple[str, int, Pipeline, str, str]) -> None:
    assert_as_without(*row, packed=True)


@pytest.mark.parametrize("name", some(["llama3-8b", "mixtral-8x7b"], ["mixtral-8x7b"]))
def test_gradients_of_stages_cross_the_wire_once(name: str) -> None:
    """Layers are a loop in each stage; however many microbatches, each gradient is summed over the data once."""
    config = dataclasses.replace(preset(name).reduced(), layers=4)
    mesh = "pipe:2;data:2"
    rules = layout("pipeline+data", config, mesh)
    for microbatches in (2, 4):
        with mtf.Graph():
            pipeline = Pipeline(stages=2, microbatches=microbatches)
            outputs, updates = train_step(config, batch=8, length=16, optimizer="sgd", pipeline=pipeline)
        program = mtf.lower(outputs, updates, mesh, rules)
        sums = [c for c in program.collectives if c.axes == ("data",)]
        gradients = sum(v.local_bytes for v in program.variables.values() if "stage" in v.tensor.shape)
        once = sum(c.sent_bytes for c in sums if c.count == 1)
        assert once == gradients  # an all_reduce over two devices sends as much as there is
        # In every trip only what the losses of a router are computed from: two scalars and a number per expert.
        assert sum(c.sent_bytes for c in sums if c.count > 1) <= 4 * (2 + 2 * 8)


def test_tokens_change_sides_within_a_stage() -> None:
    """In each trip the layers of a stage exchange a microbatch's tokens: two forward, once again, and two back."""
    config, mesh, trips = preset("mixtral-8x7b"), "pipe:4;expert:8", 11
    assert config.experts is not None
    roomy = dataclasses.replace(config.experts.routing, shard_factor=1.25)
    config = config.replace(experts=dataclasses.replace(config.experts, routing=roomy))
    with mtf.Graph():
        made = train_step(config, 256, 4096, "sgd", pipeline=Pipeline(stages=4, microbatches=8))
        program = mtf.lower(*made, mesh=mesh, layout=layout("pipeline+expert", config, mesh))
    exchanged = [c for c in program.collectives if c.kind == "all_to_all" and c.sent_bytes > 2**20]
    # 4 of 32 sequences on a device, of 4,096 tokens, 2 experts of each, room for 1.25 as many; 4,096 bfloat16.
    places = 4 * 4096 * 2 * 1.25
    assert {c.sent_bytes for c in exchanged} == {places * 4096 * 2 * 7 / 8}
    assert sum(c.count for c in exchanged) == 5 * trips * config.layers // 4
    assert {c.axes for c in exchanged} == {("expert",)}


def test_stages_of_a_decoder_are_given_what_was_encoded_once() -> None:
    """Gathered ahead of the loop, its gradient scattered after it: 3/4 of all microbatches each."""
    config, mesh, sources = preset("t5-11b"), "pipe:4;tensor:8", 256
    with mtf.Graph():
        made = train_step(config, 64, 128, "sgd", encoder_length=sources, pipeline=Pipeline(stages=4, microbatches=8))
        program = mtf.lower(*made, mesh=mesh, layout=layout("pipeline+tensor", config, mesh))
    encoded = 64 * sources * config.d_model * 2  # bytes of bfloat16
    over = [c for c in program.collectives if c.axes == ("pipe",) and c.sent_bytes == encoded * 3 / 4]
    # What the encoder has made is divided by microbatches, and each stage of the decoder gets all of its own.
    assert sorted((c.phase, c.kind, c.count) for c in over) == [
        ("backward", "reduce_scatter", 1),
        ("forward", "all_gather", 1),
    ]
    repeated = {c.sent_bytes for c in program.collectives if c.axes == ("pipe",) and c.count > 1}
    assert repeated == {8 * sources * config.d_model * 2, 8 * 128 * config.d_model * 2}  # a microbatch of each stack


@pytest.mark.parametrize("schedule", some(["gpipe", "1f1b"], ["1f1b"]))
def test_the_pipeline_goes_over_dcn(schedule: str) -> None:
    """Only microbatches, and what is summed once a step, go from slice to slice; of a small model anything may."""
    config = preset("llama2-7b")
    mesh = "pipe:2;fsdp:256"
    with mtf.Graph():
        made = train_step(config, 2048, 1024, "sgd", pipeline=Pipeline(stages=2, microbatches=8, schedule=schedule))
        program = mtf.lower(*made, mesh=mesh, layout=layout("pipeline+fsdp", config, mesh))
    est = mtf.estimate(program, "2*v5e-256")
    over = [r for r in est.rows if r.dcn_seconds]
    assert over
    assert all("pipe" in r.axes for r in over)


def test_whole_torus_axes_are_no_reason_to_split_another_axis_over_dcn() -> None:
    """fsdp:8 and context:2 cut a torus of 4x4; a compiler that prefers whole axes still sends only stages over DCN."""
    demands = (
        *(Demand("all_gather", (axis,), 1e8, 100) for axis in ("fsdp", "context")),
        Demand("collective_permute", ("pipe",), 1e7, 10),
    )
    mesh = (("pipe", 4), ("fsdp", 8), ("context", 2))
    for whole_axes in (True, False):
        priced = priced_for(Slice("4*v5e-16"), mesh, demands, whole_axes)
        placement = priced.placements[priced.cheapest]
        over = {axis for axis, factors in placement.factors for factor in factors if factor.place == DCN}
        assert over == {"pipe"}


def test_products_that_matmuls_keeps_are_kept_in_stages_too() -> None:
    """The dim of the stages is not a batch dim of a product: what a layer keeps does not depend on pipelines."""

    def recomputed(remat: str, **given: Any) -> set[str]:
        with mtf.Graph():
            outputs, updates = train_step(small("llama2-7b", 4), 8, LENGTH, "sgd", remat, **given)
            program = mtf.lower(outputs, updates, mesh="pipe:2", layout="")
        names = [i.operation.name for i, _, _ in walk(program) if i.operation.opdef.kind is Kind.CONTRACTION]
        again = [name for name in set(names) if names.count(name) > 1]
        return {name.rpartition("layers/scan/")[2] for name in again if "/grad/" not in name}

    pipeline = Pipeline(stages=2, microbatches=4)
    assert recomputed("matmuls", pipeline=pipeline) == recomputed("matmuls")
    assert recomputed("full", pipeline=pipeline) == recomputed("full") > recomputed("matmuls")


def refused(match: str, **given: Any) -> None:
    config = small("llama2-7b", 6)
    with mtf.Graph(), pytest.raises(mtf.GraphError, match=match):
        train_step(config, 8, LENGTH, pipeline=Pipeline(**given))


def test_what_does_not_divide_is_told_with_remedies() -> None:
    refused(
        r"6 layers can't be cut into 4 stages \* 1 repeats: 6 % 4 = 2; .* may be 1, 2, 3, 6", stages=4, microbatches=2
    )
    refused(r"config.replace\(layers=8\)", stages=4, microbatches=2)
    refused(r"6 % 9 = 6", stages=3, microbatches=2, repeats=3)
    refused(r"a batch of 8 can't be cut into 3 microbatches: 8 % 3 = 2", stages=2, microbatches=3)
    refused(r"stages must be at least 1, got 0", stages=0, microbatches=3)
    odd = small("t5-11b").replace(layers=6, encoder_layers=3)
    with mtf.Graph(), pytest.raises(mtf.GraphError) as both:
        train_step(odd, 8, LENGTH, pipeline=Pipeline(stages=4, microbatches=2))
    assert "6 layers can't be cut into 4 stages * 1 repeats: 6 % 4 = 2" in str(both.value)
    assert "3 layers of the encoder can't be cut into 4 stages * 1 repeats: 3 % 4 = 3" in str(both.value)
    assert "config.replace(encoder_layers=4)" in str(both.value)
    with pytest.raises(mtf.LayoutError, match=r"encoder_layers: 3 % 2 = 1; use 1 stage, or .*\(encoder_layers=4\)"):
        layout("pipeline+data", odd, "pipe:2;data:2")
    with mtf.Graph(), pytest.raises(mtf.GraphError, match=r"pipeline must be an mtf\.models\.Pipeline, got 4"):
        train_step(small("gpt2"), 8, LENGTH, pipeline=4)  # type: ignore[arg-type]
    llama = preset("llama3.1-405b")
    assert "stage:pipe" in str(
        layout("pipeline+fsdp", llama, "pipe:4;fsdp:64")
    )  # of stages of 31, 31, 32 and 32 layers
    refused("or schedule='1f1b', whose stages may differ", stages=4, microbatches=2)
    refused("6 layers, or patterns of them, are fewer than 8 stages", stages=8, microbatches=2, schedule="1f1b")
    refused("schedule must be .*'1f1b'", stages=2, microbatches=2, schedule="2f2b")
    for name, wrong in (("mixtral-8x7b", "experts"), ("bert-large", "kind 'encoder'")):
        with mtf.Graph(), pytest.raises(mtf.GraphError, match=f"decoders without experts and dropout; .* has {wrong}"):
            train_step(of_row(name, 2), 8, LENGTH, pipeline=Pipeline(stages=2, microbatches=2, schedule="1f1b"))
    pipeline = Pipeline(stages=2, microbatches=2, schedule="1f1b")
    with mtf.Graph(), pytest.raises(mtf.GraphError, match="schedule='1f1b' has no packed; leave it out"):
        train_step(small("llama2-7b", 6), 8, LENGTH, pipeline=pipeline, packed=True)
    with pytest.raises(mtf.LayoutError, match="'pipeline' needs an axis 'pipe' or 'stage'"):
        layout("pipeline+fsdp", llama, "fsdp:64;data:2")
