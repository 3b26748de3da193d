"""Decode equals prefill equals the training forward, token by token; what a step of decoding moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

import meshlib as mtf
from meshlib.models import TransformerConfig, decode_step, prefill, preset, transformer
from tests.effort import some
from tests.models.common import FAMILIES, WIDE, Array, small, values, with_capacity

BATCH, LENGTH, PROMPT, SOURCE = 3, 12, 6, 8
DECODERS = [name for name in FAMILIES if preset(name).kind != "encoder"]
DECODERS += [name for name in ("deepseek-v3", "mixtral-8x7b") if name not in DECODERS]
TRIED = ["gpt2", "t5-11b", "palm-540b", "deepseek-v3"]  # others under layouts, below
PROMPTS = np.array([6, 3, 1])  # of sequences of different length
SOURCES = np.array([8, 2, 5])


def decoder(name: str, numerics: mtf.Numerics = WIDE) -> TransformerConfig:
    """A small decoder whose experts have room for all: what is dropped depends on who else is there."""
    config = small(name).replace(numerics=numerics)
    if config.experts is None:
        return config
    routing = dataclasses.replace(config.experts.routing, capacity_factor=None)
    return config.replace(experts=dataclasses.replace(config.experts, routing=routing))


@cache
def forward(config: TransformerConfig, scan: bool) -> tuple[dict[str, Array], Array, Array, Array]:
    """Values, tokens, sources, and the logits of the training forward for each sequence apart, without padding."""
    rng = np.random.default_rng(1)
    tokens, sources = rng.integers(0, config.vocab, (BATCH, LENGTH)), rng.integers(0, config.vocab, (BATCH, SOURCE))
    found = []
    for b in range(BATCH):
        more = {"encoder_length": int(SOURCES[b])} if config.encoder_decoder else {}
        with mtf.Graph() as graph:
            model = transformer(config, 1, LENGTH, scan=scan, **more)
            program = mtf.lower({"logits": model.logits}, precision="highest")
        sim, held = mtf.simulate(program), values(graph)
        for name, value in held.items():
            sim.state[name] = value
        fed = {"tokens": tokens[b : b + 1]}
        if more:
            fed["sources"] = sources[b : b + 1, : SOURCES[b]]
        found.append(sim.step(fed)["logits"][0])
    return held, tokens, sources, np.stack(found)


def steps(config: TransformerConfig, scan: bool = True, executor: str = "fast", **where: str) -> Iterator[float]:
    """How far logits of the prefill, then of each token decoded after it, are from those of the forward."""
    held, tokens, sources, wanted = forward(config, scan)
    kind = where.pop("cache_dtype", None)
    more = {"encoder_length": SOURCE} if config.encoder_decoder else {}
    with mtf.Graph():
        made = prefill(config, BATCH, PROMPT, LENGTH, cache_dtype=kind, scan=scan, **more)
        read = mtf.lower(*made, precision="highest", **where)
    with mtf.Graph():
        made = decode_step(config, BATCH, LENGTH, cache_dtype=kind, scan=scan, **more)
        add = mtf.lower(*made, precision="highest", **where)
    sim, rows = mtf.simulate(read, executor=executor), np.arange(BATCH)
    for name, value in held.items():
        sim.state[name] = value
    fed = {"tokens": tokens[:, :PROMPT], "lengths": PROMPTS}
    if more:
        fed |= {"sources": sources, "source_lengths": SOURCES}
    at = PROMPTS - 1
    found = sim.step(fed)["logits"]
    while True:
        yield float(np.abs(found - wanted[rows, at]).max() / np.abs(wanted).max())
        at = at + 1
        if at.max() == LENGTH:
            return
        found = sim.run(add, tokens=tokens[rows, at])["logits"]


SPLIT = "heads:tensor;d_ff:tensor;vocab:tensor"
LENGTHS = "cache_length:tensor?"


@pytest.mark.parametrize("name", some(DECODERS, TRIED))
def test_decode_equals_prefill_equals_forward(name: str) -> None:
    assert max(steps(decoder(name))) < 1e-12


UNROLLED = ["gemma3-12b", "t5-11b", "deepseek-v3"]


@pytest.mark.parametrize("name", some(UNROLLED, ["gemma3-12b"]))
def test_without_a_loop_of_layers(name: str) -> None:
    assert max(steps(decoder(name), scan=False)) < 1e-12


LAYOUTS = [
    ("llama2-7b", "data:3;tensor:2", f"batch:data;{SPLIT}"),
    ("llama3.1-405b", "tensor:4", f"{SPLIT};{LENGTHS}"),
    ("llama3.1-405b", "tensor:2", f"group:tensor;d_ff:tensor;vocab:tensor;{LENGTHS}"),  # the cache by its length
    ("llama3.1-405b", "tensor:2", "group:tensor;d_ff:tensor;vocab:tensor"),  # keys and values replicated
    ("palm-540b", "tensor:4", f"{SPLIT};{LENGTHS}"),
    ("gemma3-12b", "data:3;tensor:2", f"batch:data;{SPLIT};d_model:tensor?"),
    ("gemma3-12b", "tensor:2", f"group:tensor;d_ff:tensor;vocab:tensor;{LENGTHS}"),
    ("gpt2", "fsdp:2;tensor:4", "d_model:fsdp?;heads:tensor;d_ff:tensor;vocab:tensor;cache_length:fsdp"),
    ("t5-11b", "tensor:2", SPLIT),
    ("transformer-base", "data:3;tensor:4", f"batch:data;{SPLIT};{LENGTHS};source_length:tensor?"),
    ("deepseek-v3", "tensor:2", f"heads:tensor;d_ff:tensor;experts:tensor;{LENGTHS}"),
]


RUNS = [(row, executor) for row in LAYOUTS for executor in ("fast", "exact")]


@pytest.mark.parametrize(("row", "executor"), some(RUNS, [(LAYOUTS[2], "fast"), (LAYOUTS[5], "exact")]), ids=str)
def test_no_layout_changes_what_is_decoded(row: tuple[str, str, str], executor: str) -> None:
    name, mesh, layout = row
    assert max(steps(decoder(name), executor=executor, mesh=mesh, layout=layout)) < 1e-12


@pytest.mark.parametrize(("dtype", "most"), [("int8", 0.05), ("float8_e4m3fn", 0.25), ("bfloat16", 0.04)])
def test_narrow_caches_are_near(dtype: str, most: float) -> None:
    first, *others = steps(decoder("llama2-7b"), cache_dtype=dtype)
    assert first < 1e-12  # prompts attend to what is not rounded
    assert 1e-5 < max(others) < most


def test_the_same_steps_on_jax() -> None:
    pytest.importorskip("jax")
    config = decoder("gemma3-12b", mtf.Numerics())
    held, tokens, _, wanted = forward(config, True)
    with mtf.Graph():
        read = mtf.lower(*prefill(config, BATCH, PROMPT, LENGTH), precision="highest")
    with mtf.Graph():
        add = mtf.lower(*decode_step(config, BATCH, LENGTH), precision="highest")
    run, rows = mtf.on_jax(read), np.arange(BATCH)
    for name, value in held.items():
        run.state[name] = value
    found = run.step(tokens=tokens[:, :PROMPT], lengths=PROMPTS)["logits"]
    np.testing.assert_allclose(found, wanted[rows, PROMPTS - 1], rtol=1e-4, atol=1e-4)
    for at in (PROMPTS, PROMPTS + 1):
        found = run.run(add, tokens=tokens[rows, at])["logits"]
        np.testing.assert_allclose(found, wanted[rows, at], rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- what a step moves


FIGURES = [
    ("llama2-7b", 8, 2048, None, None),
    ("llama2-7b", 8, 2048, "int8", "int8"),
    ("llama3.1-405b", 32, 8192, None, None),
    ("palm-540b", 64, 2048, "float8_e4m3fn", None),
    ("gemma3-12b", 8, 8192, None, None),
    ("gpt2", 16, 1024, None, None),
    ("mixtral-8x7b", 64, 4096, None, None),
    ("deepseek-v3", 64, 4096, None, None),
    ("gpt-oss-20b", 32, 4096, "int8", "int8"),
]


@pytest.mark.parametrize("row", some(FIGURES, FIGURES[:3]), ids=lambda row: f"{row[0]} {row[3]}")
def test_a_step_moves_weights_and_caches_once(row: tuple[str, int, int, str | None, str | None]) -> None:
    name, batch, length, caches, kernels = row
    numerics = mtf.Numerics("bfloat16", activation_dtype="bfloat16", kernel_dtype=kernels)
    config = preset(name).replace(numerics=numerics)
    with mtf.Graph():
        program = mtf.lower(*decode_step(config, batch, length, cache_dtype=caches))
    held = {n: v.local_bytes for n, v in program.variables.items()}
    moved = sum(r.hbm_bytes * r.count for r in mtf.estimate(program, "v5e-1").rows)
    looked_up = 0 if config.tied else held["embedding"]  # a row for each token, and of positions
    looked_up += held.get("positions", 0)
    assert sum(held.values()) - looked_up <= moved <= 1.02 * sum(held.values())
    assert program.memory.peak_bytes <= 1.02 * sum(held.values())
    if config.latent is not None:
        return
    heads = sum(config.attention_of(w).memory * config.attention_of(w).dim * min(length, w or length)
                for w in config.pattern)  # fmt: skip
    width = {None: 2, "int8": 1, "float8_e4m3fn": 1}[caches]
    kept = sum(n for name, n in held.items() if name.endswith(("cache/keys", "cache/values")))
    assert kept == 2 * batch * heads * width


@pytest.mark.parametrize(
    ("name", "batch"), some([("t5-11b", 64), ("t5-3b", 8), ("switch-base-8", 8)], [("t5-11b", 64)])
)
@pytest.mark.parametrize("narrow", [None, "int8"])
def test_scores_with_a_bias_never_reach_memory(name: str, batch: int, narrow: str | None) -> None:
    """In int8, where a cache is small, they would be another 2 to 6 % of what is moved."""
    numerics = mtf.Numerics("bfloat16", activation_dtype="bfloat16", kernel_dtype=narrow)
    config = preset(name).replace(numerics=numerics)
    with mtf.Graph():
        program = mtf.lower(*decode_step(config, batch, 2048, encoder_length=2048, cache_dtype=narrow))
    held = sum(v.local_bytes for v in program.variables.values())
    moved = sum(r.hbm_bytes * r.count for r in mtf.estimate(program, "v5e-1").rows)
    assert 0.98 * held <= moved <= 1.02 * held
    assert program.memory.peak_bytes <= 1.02 * held


# ---------------------------------------------------------------- room for tokens of several sequences


@pytest.mark.parametrize("name", some(["mixtral-8x7b", "deepseek-v3"], ["mixtral-8x7b"]))
def test_sequences_that_are_routed_together(name: str) -> None:
    """With room for all the logits are those of each by itself; with one place an expert drops what comes after."""
    config, batch = with_capacity(name), 6
    assert config.experts is not None
    experts, rng = config.experts, np.random.default_rng(0)

    def program(group_size: int | None, **room: object) -> mtf.Program:
        routing = dataclasses.replace(experts.routing, **room)
        held = config.replace(experts=dataclasses.replace(experts, routing=routing))
        with mtf.Graph() as graph:
            made = decode_step(held, batch, LENGTH, group_size=group_size)
            drawn.update(values(graph))
            return mtf.lower(*made, precision="highest")

    drawn: dict[str, Array] = {}
    apart = program(None)
    tokens = rng.integers(0, config.vocab, batch)
    tokens[1] = tokens[0]  # goes where the first goes

    def step(one: mtf.Program, ended: tuple[int, ...] = ()) -> dict[str, Array]:
        sim = mtf.simulate(one)
        for variable, value in drawn.items():
            sim.state[variable] = value
        live = np.array([n not in ended for n in range(batch)])
        return sim.step(tokens=tokens, **({"live": live} if "live" in one.inputs else {}))

    wanted = step(apart)["logits"]
    roomy = step(program(3, capacity_factor_eval=float(experts.count)))
    np.testing.assert_allclose(roomy["logits"], wanted, rtol=1e-4, atol=1e-4)
    assert roomy["dropped"] == 0
    alone = step(program(1, capacity_factor_eval=1e-6, min_expert_capacity=1))
    np.testing.assert_allclose(alone["logits"], wanted, rtol=1e-4, atol=1e-4)
    assert alone["dropped"] == 0
    tight = step(program(3, capacity_factor_eval=1e-6, min_expert_capacity=1))
    assert tight["dropped"] >= experts.routing.choices  # all choices of the second sequence in the first layer
    assert tight["dropped"].dtype == np.int32
    assert np.abs(tight["logits"][1] - wanted[1]).max() > 1e-2
    # Sequences that have ended take no room: the second finds the first's.
    beside = step(program(3, capacity_factor_eval=1e-6, min_expert_capacity=1), ended=(0, 2, 3, 4, 5))
    np.testing.assert_allclose(beside["logits"][1], wanted[1], rtol=1e-4, atol=1e-4)
    assert beside["dropped"] == 0


# ---------------------------------------------------------------- the end of the cache


def decoding(config: TransformerConfig, prompt: int, room: int) -> tuple[mtf.Simulation, mtf.Program]:
    """After a prefill of one prompt; and the program of a step."""
    with mtf.Graph():
        read = mtf.lower(*prefill(config, 1, prompt, room))
    with mtf.Graph():
        add = mtf.lower(*decode_step(config, 1, room))
    sim = mtf.simulate(read)
    sim.step(tokens=np.ones((1, prompt), int), lengths=[prompt])
    return sim, add


@pytest.mark.parametrize("name", ["llama2-7b", "deepseek-v3", "gemma3-12b"])
def test_no_token_is_decoded_past_the_end_of_the_cache(name: str) -> None:
    sim, add = decoding(small(name), 4, 6)
    for _ in range(2):
        sim.run(add, tokens=[1])
    before = {n: sim.state[n] for n in sim.state}
    with pytest.raises(mtf.FeedError, match=r"position 6 would be written into dim cache_length:6.*0 to 5; make"):
        sim.run(add, tokens=[1])
    assert all(np.array_equal(before[n], sim.state[n]) for n in before)


@pytest.mark.parametrize("window", [3, 6])
def test_windows_roll_past_the_end_of_the_cache(window: int) -> None:
    """Where all layers have windows that fit, 6 slots decode what 12 do."""
    config = small("llama2-7b").replace(windows=(window,))
    (sim, add), (wide, wide_add) = decoding(config, 4, 6), decoding(config, 4, 12)
    for token in range(1, 9):
        made, wanted = (s.run(p, tokens=[token])["logits"] for s, p in ((sim, add), (wide, wide_add)))
        np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=1e-5)


def test_a_window_wider_than_the_cache_does_not_roll() -> None:
    sim, add = decoding(small("llama2-7b").replace(windows=(7,)), 4, 5)
    sim.run(add, tokens=[1])
    with pytest.raises(mtf.FeedError, match=r"position 5 .* dim cache_length:5"):
        sim.run(add, tokens=[1])


def test_generators_asked_for_more_tokens_than_they_have_room_for() -> None:
    config = small("llama2-7b")
    with mtf.Graph() as graph:
        transformer(config, 1, 4)
        state = values(graph)
    generator = mtf.Generator(config, state, batch=1, length=4, max_tokens=2)
    generator.max_tokens = 8
    with pytest.raises(mtf.FeedError, match=r"position 6 would be written into dim cache_length:6"):
        generator([[1, 2, 3, 4]])


# ---------------------------------------------------------------- bad input


BAD = {
    "a model that predicts no token": (lambda: prefill(preset("bert-large"), 1, 4, 8), "is an encoder"),
    "no room": (lambda: prefill(small("gpt2"), 1, 9, 8), "length 9 is longer than cache_length 8"),
    "positions": (lambda: decode_step(small("gpt2"), 1, 64), "has 16 positions, but cache_length is 64"),
    "no encoder": (lambda: decode_step(small("gpt2"), 1, 8, encoder_length=4), "has no encoder"),
    "an encoder": (lambda: decode_step(small("t5-11b"), 1, 8), "needs encoder_length"),
    "a dtype": (lambda: decode_step(small("gpt2"), 1, 8, cache_dtype="int32"), "cache_dtype must be .* 'int32'"),
    "a group": (lambda: decode_step(with_capacity("mixtral-8x7b"), 6, 8, group_size=4), "batch 6: 6 % 4 = 2"),
    "a group of beams": (
        lambda: decode_step(with_capacity("mixtral-8x7b"), 6, 8, beams=2, group_size=3),
        "beams 2: 2 % 3 = 2",
    ),
    "no experts": (lambda: decode_step(small("gpt2"), 2, 8, group_size=2), "is for models with experts"),
    "an empty group": (
        lambda: decode_step(with_capacity("mixtral-8x7b"), 6, 8, group_size=0),
        "must be at least 1, got 0",
    ),
    "a group of dropless experts": (
        lambda: decode_step(small("mixtral-8x7b"), 6, 8, group_size=2),
        r"group_size is for experts with a capacity; .* leave it out",
    ),
    "a size": (lambda: decode_step(small("gpt2"), 0, 8), "batch must be at least 1, got 0"),
}


@pytest.mark.parametrize("about", BAD)
def test_bad_input(about: str) -> None:
    build, message = BAD[about]
    with mtf.Graph(), pytest.raises(mtf.MeshlibError, match=message):
        build()
