"""Texts packed into one sequence, with padding: losses and gradients are those of the texts apart."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from meshlib.models import TransformerConfig, train_step, transformer
from tests.effort import some
from tests.models.common import FAMILIES, Array, small, values
from tests.models.test_serving import decoder

LENGTH, SOURCE = 12, 8
TEXTS = [[5, 3], [3, 5, 3]]  # tokens of the texts of each sequence: texts as long share the program that each is for
SOURCES = [[4, 2], [2, 4, 2]]
KINDS = list(dict.fromkeys([*FAMILIES, "deepseek-v3"]))


def built(config: TransformerConfig, batch: int, length: int, source: int, packed: bool, **where: str) -> Any:
    more = {"encoder_length": source} if config.encoder_decoder else {}
    with mtf.Graph() as graph:
        model = transformer(config, batch, length, packed=packed, remat="none", **more)
        wanted = graph.trainable_variables
        grads = mtf.gradients([model.loss], wanted)
        outputs = {v.name: g for v, g in zip(wanted, grads, strict=True)}
        program = mtf.lower({"loss": model.loss, **outputs}, precision="highest", **where)
    return graph, model, program


def packing(lengths: list[list[int]], room: int) -> tuple[Array, Array]:
    """Numbers of texts, and positions in them; 0 behind the last."""
    ids, positions = np.zeros((2, len(lengths), room), np.int32)
    for row, texts in enumerate(lengths):
        at = 0
        for number, count in enumerate(texts, start=1):
            ids[row, at : at + count], positions[row, at : at + count] = number, np.arange(count)
            at += count
    return ids, positions


def run(
    program: mtf.Program, held: dict[str, Array], fed: dict[str, Array], executor: str = "fast"
) -> dict[str, Array]:
    sim = mtf.simulate(program, executor=executor)
    for name, value in held.items():
        sim.state[name] = value
    return sim.step(fed)


def check(config: TransformerConfig, executor: str = "fast", **where: str) -> None:
    graph, model, program = built(config, 2, LENGTH, SOURCE, True, **where)
    held, rng = values(graph), np.random.default_rng(0)
    fed = {n: rng.integers(0, max(1, config.segments or config.vocab), t.shape.sizes) for n, t in model.inputs.items()}
    for name in ("tokens", "targets", "sources"):
        if name in fed:
            fed[name] = rng.integers(0, config.vocab, fed[name].shape)
    fed["segment_ids"], fed["segment_positions"] = packing(TEXTS, LENGTH)
    if config.encoder_decoder:
        fed["source_segment_ids"], fed["source_positions"] = packing(SOURCES, SOURCE)
    found = run(program, held, fed, executor)
    total = {name: np.zeros(np.shape(y)) for name, y in found.items()}
    alone = cache(lambda length, source: built(config, 1, length, source, False)[2])
    count = sum(map(sum, TEXTS))
    for row, texts in enumerate(TEXTS):
        for number, length in enumerate(texts, start=1):
            mine = fed["segment_ids"][row] == number
            apart = {n: x[row : row + 1, mine] for n, x in fed.items() if x.shape[1] == LENGTH and "segment_" not in n}
            source = 0
            if config.encoder_decoder:
                theirs = fed["source_segment_ids"][row] == number
                source, apart["sources"] = int(theirs.sum()), fed["sources"][row : row + 1, theirs]
            made = run(alone(length, source), held, apart)
            for name, y in made.items():
                total[name] += y * (length / count)
    for name, y in total.items():
        np.testing.assert_allclose(found[name], y, rtol=2e-3, atol=2e-5 * max(1.0, np.abs(y).max()), err_msg=name)


@pytest.mark.parametrize("name", some(KINDS, ["gpt2", "t5-11b"]))
def test_a_packed_batch_is_its_texts_apart(name: str) -> None:
    config = decoder(name)
    check(config.replace(max_length=16) if config.max_length else config)


LAYOUTS = [
    ("gemma3-12b", "data:2;tensor:2", "batch:data;heads:tensor;d_ff:tensor;vocab:tensor"),
    ("llama2-7b", "context:2", "length:context;memory_length:context"),  # halos and summaries of split keys
    ("gemma3-12b", "context:2", "length:context;memory_length:context"),
]


@pytest.mark.parametrize("row", some(LAYOUTS, LAYOUTS[2:]), ids=lambda row: f"{row[0]} {row[2]}")
def test_layouts(row: tuple[str, str, str]) -> None:
    name, mesh, layout = row
    check(decoder(name), "exact", mesh=mesh, layout=layout)


def test_padding_counts_for_nothing() -> None:
    """Neither what padding holds nor what is predicted of it."""
    config = decoder("llama2-7b")
    graph, model, program = built(config, 2, LENGTH, 0, True)
    rng, ids = np.random.default_rng(0), packing(TEXTS, LENGTH)
    fed = {n: rng.integers(0, config.vocab, (2, LENGTH)) for n in model.inputs}
    fed["segment_ids"], fed["segment_positions"] = ids
    other = {n: np.where(ids[0] == 0, (x + 7) % config.vocab, x) if n in ("tokens", "targets") else x
             for n, x in fed.items()}  # fmt: skip
    one, two = (run(program, values(graph), given) for given in (fed, other))
    for name, y in one.items():
        np.testing.assert_allclose(two[name], y, rtol=1e-6, atol=1e-9, err_msg=name)


MIXTURES = ["mixtral-8x7b", "deepseek-v3", "switch-base-8", "gshard-12b"]


def mixture(name: str) -> TransformerConfig:
    """Without chance, with experts that have less room than what is asked of them, and losses that show."""
    config = small(name)
    assert config.experts is not None
    routing = dataclasses.replace(config.experts.routing, capacity_factor=1.0, min_expert_capacity=1)
    routing = dataclasses.replace(routing, second_policy="all", group_size=None)
    return config.replace(experts=dataclasses.replace(config.experts, form=None, routing=routing))


def steps_of(config: TransformerConfig, fed: dict[str, Array], length: int, packed: bool) -> dict[str, Array]:
    """A training step: loss, the experts' losses, what they dropped, all variables after it."""
    more = {"encoder_length": length} if config.encoder_decoder else {}
    with mtf.Graph() as graph:
        made = train_step(config, 2, length, "sgd", packed=packed, learning_rate=0.1, **more)
        program = mtf.lower(*made, precision="highest")
    sim = mtf.simulate(program)
    for name, value in values(graph).items():
        sim.state[name] = value
    out = sim.step({name: fed[name] for name in program.inputs})
    return {**out, **{n: sim.state[n] for n in sim.state}}


@pytest.mark.parametrize("name", some(MIXTURES, MIXTURES[:1]))
def test_padding_goes_to_no_expert(name: str) -> None:
    """Whatever token stands for padding, nothing changes: losses, balance, drops, updates."""
    config, rng = mixture(name), np.random.default_rng(0)
    fed = {n: rng.integers(0, config.vocab, (2, LENGTH)) for n in ("tokens", "targets", "sources")}
    fed["segment_ids"], fed["segment_positions"] = packing(TEXTS, LENGTH)
    fed["source_segment_ids"], fed["source_positions"] = fed["segment_ids"], fed["segment_positions"]
    padding, made = fed["segment_ids"] == 0, []
    for token in (0, 5, 9):
        held = {n: np.where(padding, token, x) if n in ("tokens", "targets", "sources") else x for n, x in fed.items()}
        made.append(steps_of(config, held, LENGTH, True))
    for other in made[1:]:
        for what, y in made[0].items():
            np.testing.assert_allclose(other[what], y, rtol=1e-6, atol=1e-7, err_msg=what)


@pytest.mark.parametrize("name", some(MIXTURES, MIXTURES[:1]))
def test_padding_has_no_weight_in_the_losses_of_experts(name: str) -> None:
    """Rows of 6 tokens are the same step as these in rows of 12, where all tokens find room."""
    config, rng = decoder(name), np.random.default_rng(0)
    config = config.replace(
        experts=dataclasses.replace(
            config.experts, routing=dataclasses.replace(config.experts.routing, second_policy="all")
        )
    )
    short = {n: rng.integers(0, config.vocab, (2, 6)) for n in ("tokens", "targets", "sources")}
    wide = {n: np.pad(x, ((0, 0), (0, 6))) for n, x in short.items()}
    for of in ("segment", "source_segment"):
        wide[f"{of}_ids"], positions = packing([[6], [6]], 12)
        wide["source_positions" if of == "source_segment" else "segment_positions"] = positions
    wanted, found = steps_of(config, short, 6, False), steps_of(config, wide, 12, True)
    for what, y in wanted.items():
        np.testing.assert_allclose(found[what], y, rtol=1e-5, atol=1e-6, err_msg=what)


@pytest.mark.parametrize("name", some(MIXTURES, MIXTURES[:1]))
def test_what_follows_a_prompt_changes_nothing(name: str) -> None:
    config, rng = mixture(name), np.random.default_rng(0)
    more = {"encoder_length": 8} if config.encoder_decoder else {}
    with mtf.Graph() as graph:
        program = mtf.lower(*mtf.models.prefill(config, 2, 8, 12, **more), precision="highest")
        held = values(graph)
    lengths, made = np.array([3, 5]), []
    prompts = rng.integers(0, config.vocab, (2, 8))
    for token in (0, 5, 9):
        rows = np.where(np.arange(8) < lengths[:, None], prompts, token)
        fed = {"tokens": rows, "lengths": lengths, "sources": rows, "source_lengths": lengths}
        made.append(run(program, held, {n: fed[n] for n in program.inputs})["logits"])
    for other in made[1:]:
        np.testing.assert_allclose(other, made[0], rtol=1e-6, atol=1e-6)


def test_what_packing_costs() -> None:
    """A kernel reads two numbers for each token; it computes, and skips, the tiles that it does without them."""
    config = mtf.models.preset("llama2-7b").replace(layers=2)
    estimates = {}
    for packed in (False, True):
        with mtf.Graph():
            program = mtf.lower(*mtf.models.train_step(config, 1, 4096, packed=packed))
        estimates[packed] = mtf.estimate(program, "v5e-1")
    plain, packed = ([r for r in estimates[p].rows if r.opcode.startswith("attention")] for p in (False, True))
    assert len(plain) == len(packed) == 4  # forward, again, and the gradients of queries and of keys
    for a, b in zip(plain, packed, strict=True):
        assert a.mxu_flops == b.mxu_flops
        assert a.vpu_ops == b.vpu_ops
        assert b.hbm_bytes - a.hbm_bytes in (4096 * 4, 2 * 4096 * 4)
    assert estimates[True].step_seconds < 1.01 * estimates[False].step_seconds
    assert estimates[True].memory.peak_bytes < 1.01 * estimates[False].memory.peak_bytes


def test_segments_that_do_not_fit() -> None:
    length, memory, d = mtf.Dimension("length", 4), mtf.Dimension("memory_length", 4), mtf.Dimension("d", 2)
    with mtf.Graph():
        q, k = mtf.zeros([length, d]), mtf.zeros([memory, d])
        ids, there = mtf.zeros([length], dtype="int32"), mtf.zeros([memory], dtype="int32")
        with pytest.raises(mtf.ShapeError, match=r"segments must be int32 of dims of .*'length' among them"):
            mtf.attention(q, k, k, length, memory, d, segments=(there, there))
        with pytest.raises(mtf.ShapeError, match=r"segments must be int32 of dims of"):
            mtf.attention(q, k, k, length, memory, d, segments=(mtf.zeros([length]), there))
        with pytest.raises(mtf.ShapeError, match="a pair, of queries and of keys, got 1"):
            mtf.attention(q, k, k, length, memory, d, segments=[ids])
