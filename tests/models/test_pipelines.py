"""Models as pipelines: the same steps as without, under every layout; on other meshes; errors that name remedies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from meshlib.models import Pipeline, TransformerConfig, layout, preset, train_step
from tests.effort import some
from tests.models.common import small

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
]


def of_row(name: str, periods: int) -> TransformerConfig:
    config = small(name, periods)
    return config.replace(layers=config.dense_front + periods * config.period)


def assert_as_without(
    name: str, periods: int, pipeline: Pipeline, mesh: str, rules: str, packed: bool = False
) -> mtf.Program:
    """Two steps, as those of the scanned model: all that is returned, and all variables; the program."""
    config = of_row(name, periods)
    batch = 2 * 2 * pipeline.microbatches
    given: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.1, "packed": packed}
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
        texts = np.sort(rng.integers(0, 4, (batch, LENGTH)))
        fed["segment_ids"] = texts
        fed["segment_positions"] = np.arange(LENGTH) - (texts[:, :, None] > texts[:, None, :]).sum(-1)
    for _ in range(2):
        found, wanted = sim.step(fed), reference.step(fed)
        assert sorted(found) == sorted(wanted)
        for what in wanted:
            assert float(found[what]) == pytest.approx(float(wanted[what]), rel=1e-5), what
    for variable, wanted_state in reference.state.items():
        ended = np.asarray(sim.state[variable])
        np.testing.assert_allclose(ended.ravel(), wanted_state.ravel(), rtol=1e-4, atol=2e-5, err_msg=variable)
    return piped


@pytest.mark.parametrize("row", some(ROWS, [ROWS[0], ROWS[2]]), ids=lambda row: f"{row[0]} {row[4]}")
def test_a_step_is_that_of_the_scanned_model(row: tuple[str, int, Pipeline, str, str]) -> None:
    piped = assert_as_without(*row)
    name, periods, pipeline, *_ = row
    config = of_row(name, periods)
    if config.period == 1:
        cut = piped.variables["layers/attention_norm/scale"]
        runs = [("repeat", pipeline.repeats)] * (pipeline.repeats > 1) + [("stage", pipeline.stages)]
        assert [(d.name, d.size) for d in cut.tensor.shape][: len(runs)] == runs
        assert cut.sharding.of("stage") == ("pipe",)


PACKED: list[tuple[str, int, Pipeline, str, str]] = [
    ("mixtral-8x7b", 2, Pipeline(stages=2, microbatches=2), "pipe:2;tensor:2", "pipeline+tensor"),
    ("llama3.1-405b", 4, Pipeline(stages=2, microbatches=4, repeats=2), "pipe:2;fsdp:2", "pipeline+fsdp"),
]


@pytest.mark.parametrize("row", some(PACKED, PACKED[:1]), ids=lambda row: row[0])
def test_each_stage_is_given_the_texts_of_its_microbatch(row: tuple[str, int, Pipeline, str, str]) -> None:
    assert_as_without(*row, packed=True)


def test_tokens_change_sides_within_a_stage() -> None:
    """In each trip the layers of a stage exchange a microbatch's tokens: two forward, and two again, and two back."""
    config, mesh, trips = preset("mixtral-8x7b"), "pipe:4;expert:8", 11
    with mtf.Graph():
        made = train_step(config, 256, 4096, "sgd", pipeline=Pipeline(stages=4, microbatches=8))
        program = mtf.lower(*made, mesh=mesh, layout=layout("pipeline+expert", config, mesh))
    exchanged = [c for c in program.collectives if c.kind == "all_to_all"]
    # 4 of 32 sequences on a device, of 4,096 tokens, 2 experts of each, room for 1.25 as many; 4,096 bfloat16.
    places = 4 * 4096 * 2 * config.experts.routing.capacity_factor  # type: ignore[union-attr]
    assert {c.sent_bytes for c in exchanged} == {places * 4096 * 2 * 7 / 8}
    assert sum(c.count for c in exchanged) == 6 * trips * config.layers // 4
    assert {c.axes for c in exchanged} == {("expert",)}


def test_the_pipeline_goes_over_dcn() -> None:
    """Only microbatches, and what is summed once a step, go from slice to slice."""
    config = preset("gpt2")
    mesh = "pipe:2;fsdp:256"
    with mtf.Graph():
        made = train_step(config, 2048, 1024, "sgd", pipeline=Pipeline(stages=2, microbatches=8))
        program = mtf.lower(*made, mesh=mesh, layout=layout("pipeline+fsdp", config, mesh))
    est = mtf.estimate(program, "2*v5e-256")
    over = [r for r in est.rows if r.dcn_seconds]
    assert over
    assert all("pipe" in r.axes for r in over)


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
    with mtf.Graph(), pytest.raises(mtf.GraphError, match="a pipeline is for models of one stack"):
        train_step(small("t5-11b"), 8, LENGTH, pipeline=Pipeline(stages=2, microbatches=2))
    with mtf.Graph(), pytest.raises(mtf.GraphError, match=r"pipeline must be an mtf\.models\.Pipeline, got 4"):
        train_step(small("gpt2"), 8, LENGTH, pipeline=4)  # type: ignore[arg-type]
    llama = preset("llama3.1-405b")
    with pytest.raises(mtf.LayoutError, match=r"layers: 126 % 4 = 2; take 3 stages, or config.replace\(layers=128\)"):
        layout("pipeline+fsdp", llama, "pipe:4;fsdp:64")
    with pytest.raises(mtf.LayoutError, match="'pipeline' needs an axis 'pipe' or 'stage'"):
        layout("pipeline+fsdp", llama, "fsdp:64;data:2")
