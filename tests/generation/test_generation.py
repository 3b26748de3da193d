"""Completions: against argmax of the whole forward, exhaustive search and Mesh TensorFlow's rules; on every mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from math import log
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from meshlib.generation.sampling import Beams, length_penalty
from meshlib.models import TransformerConfig, transformer
from tests.effort import some
from tests.models.common import Array, small, values, with_capacity

PROMPTS = [[7, 3, 11, 2], [5], [9, 1, 4]]


@cache
def trained(config: TransformerConfig, source: int = 0) -> dict[str, Array]:
    more = {"encoder_length": source} if source else {}
    with mtf.Graph() as graph:
        transformer(config, 1, 2, **more)
    return values(graph)


@cache
def forward(config: TransformerConfig, length: int, source: int = 0) -> tuple[mtf.Program, mtf.Simulation]:
    more = {"encoder_length": source} if source else {}
    with mtf.Graph():
        model = transformer(config, 1, length, **more)
        program = mtf.lower({"logits": model.logits}, precision="highest")
    sim = mtf.simulate(program)
    for name, value in trained(config, source).items():
        sim.state[name] = value
    return program, sim


def log_probs(config: TransformerConfig, tokens: list[int], source: list[int] | None = None) -> Array:
    """Of the token after these, by the training forward of the whole sequence."""
    _, sim = forward(config, len(tokens), len(source or ()))
    fed = {"tokens": [tokens], **({"sources": [source]} if source else {})}
    logits = sim.step(fed)["logits"][0, -1].astype(np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def greedy(config: TransformerConfig, prompt: list[int], count: int) -> list[int]:
    made: list[int] = []
    for _ in range(count):
        known = ([0, *made], prompt) if config.encoder_decoder else ([*prompt, *made], None)
        made.append(int(log_probs(config, *known).argmax()))
    return made


def test_experts_that_take_prompts_together_say_what_they_drop() -> None:
    config = with_capacity("mixtral-8x7b")
    assert config.experts is not None
    state = trained(config)

    def made(room: float, prompts: Any = ((3, 1), (3, 1)), **options: Any) -> mtf.Generated:
        routing = replace(config.experts.routing, capacity_factor_eval=room, min_expert_capacity=1)
        held = config.replace(experts=replace(config.experts, routing=routing))
        return mtf.generate(held, prompts, state, max_tokens=4, precision="highest", **options)

    alone, roomy, tight = made(8.0), made(8.0, group_size=2), made(1e-6, group_size=2)
    assert (alone.tokens, alone.dropped) == (roomy.tokens, roomy.dropped)
    assert alone.dropped == 0
    choices = config.layers * config.experts.routing.choices
    assert tight.dropped >= choices  # those of the second prompt, which wants what the first has taken
    assert tight.tokens[0] == alone.tokens[0]
    assert made(1e-6, [[3, 3, 3]]).dropped >= 2 * config.experts.routing.choices  # of the prompt, in the first layer


# ---------------------------------------------------------------- the likeliest tokens


@pytest.mark.parametrize("name", some(["gpt2", "gemma3-12b", "t5-11b", "llama3.1-405b"], ["t5-11b"]))
def test_the_likeliest_tokens_are_those_of_the_forward(name: str) -> None:
    """Windows of 4 are full after the prompt; each of the batch is completed as if it were alone."""
    config = small(name)
    prompts = [p + p[:1] * (4 - len(p)) for p in PROMPTS] if config.encoder_decoder else PROMPTS
    state = trained(config, 4 if config.encoder_decoder else 0)
    made = mtf.generate(config, prompts, state, max_tokens=6, precision="highest")
    assert [list(t) for t in made.tokens] == [greedy(config, p, 6) for p in prompts]
    assert not any(made.ended)
    (alone,) = mtf.generate(config, prompts[0], state, max_tokens=6, precision="highest").tokens
    assert alone == made.tokens[0]


WHERE = [
    {"mesh": "data:2;tensor:2", "layout": "batch:data;heads:tensor;d_ff:tensor;vocab:tensor"},
    {"mesh": "tensor:2", "layout": "group:tensor;vocab:tensor;cache_length:tensor", "executor": "exact"},
    {"mesh": "fsdp:4", "layout": "d_model:fsdp?;heads:fsdp?"},
]
WAYS: dict[str, dict[str, Any]] = {
    "likeliest": {},
    "drawn": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 5},
    "beams": {"beams": 3, "stop": [1]},
}


@pytest.mark.parametrize("way", some([*WAYS], ["drawn", "beams"]))
def test_the_same_tokens_on_every_mesh(way: str) -> None:
    config = small("llama3.1-405b")
    wanted = mtf.generate(config, PROMPTS, trained(config), max_tokens=6, precision="highest", **WAYS[way])
    for where in some(WHERE, WHERE[:2]):
        made = mtf.generate(config, PROMPTS, trained(config), max_tokens=6, precision="highest", **WAYS[way], **where)
        assert made.tokens == wanted.tokens
        np.testing.assert_allclose(made.scores, wanted.scores, rtol=1e-4)


def test_prompts_that_devices_do_not_divide_get_an_empty_row() -> None:
    config = small("llama3.1-405b")
    with pytest.raises(mtf.LayoutError, match=r"3 % 2 = 1\. Pad batch to 4"):  # a generator has its size as an argument
        mtf.Generator(config, trained(config), batch=3, length=4, **WHERE[0])
    assert len(mtf.generate(config, PROMPTS, trained(config), max_tokens=1, **WHERE[0]).tokens) == len(PROMPTS) == 3


def test_a_split_cache_of_an_uneven_length_gets_unused_positions() -> None:
    """Prompts of 4 tokens and 5 more are 9 positions, over 2 devices 10."""
    config = small("llama3.1-405b")
    wanted = mtf.generate(config, PROMPTS, trained(config), max_tokens=5, precision="highest")
    made = mtf.generate(config, PROMPTS, trained(config), max_tokens=5, precision="highest", **WHERE[1])
    assert made.tokens == wanted.tokens


def test_scores_are_log_probabilities_of_what_was_drawn() -> None:
    config = small("gpt2")
    made = mtf.generate(config, PROMPTS, trained(config), 4, temperature=1.0, precision="highest")
    for prompt, tokens, score in zip(PROMPTS, made.tokens, made.scores, strict=True):
        each = [log_probs(config, [*prompt, *tokens[:n]])[token] for n, token in enumerate(tokens)]
        assert score == pytest.approx(sum(each), rel=1e-4)


# ---------------------------------------------------------------- draws


DRAWN: dict[str, tuple[dict[str, Any], Callable[[Array], Array]]] = {
    "all": ({}, lambda p: p),
    "temperature": ({"temperature": 0.5}, lambda p: p**2),
    "top_k": ({"top_k": 3}, lambda p: np.where(p >= np.sort(p)[-3], p, 0)),
    "top_p": ({"top_p": 0.7}, lambda p: np.where(p >= 0.2, p, 0)),  # 0.35 + 0.25 + 0.2
    "top_p and temperature": ({"top_p": 0.6, "temperature": 0.5}, lambda p: np.where(p >= 0.25, p**2, 0)),
    "top_k, then top_p": ({"top_k": 3, "top_p": 0.5}, lambda p: np.where(p >= 0.25, p, 0)),  # of 0.8: 0.44 + 0.31
}


@pytest.mark.parametrize("about", DRAWN)
def test_draws_have_the_right_frequencies(about: str) -> None:
    options, wanted = DRAWN[about]
    chances = np.array([0.1, 0.35, 0.02, 0.25, 0.2, 0.08])
    rows, vocab = mtf.Dimension("rows", 4000), mtf.Dimension("vocab", 6)
    with mtf.Graph():
        x = mtf.broadcast(mtf.input("x", [vocab]), [rows, vocab])
        y = mtf.sample_with_temperature(x, vocab, **options)
        program = mtf.lower({"y": y}, mesh="p:2;q:2", layout="rows:p;vocab:q")
    drawn = mtf.simulate(program).step(x=np.log(chances) + 3)["y"]
    p = wanted(chances) / wanted(chances).sum()
    counts = np.bincount(drawn, minlength=6)
    assert (counts[p == 0] == 0).all()
    assert (np.abs(counts - 4000 * p) <= 4.5 * np.sqrt(4000 * p * (1 - p))).all()


# ---------------------------------------------------------------- beam search


def tiny(vocab: int) -> TransformerConfig:
    return small("llama2-7b").replace(vocab=vocab, name=f"toy-{vocab}")


def every(config: TransformerConfig, prompt: list[int], stop: int, most: int, alpha: float) -> list[tuple[float, Any]]:
    """All completions that end, by enumeration, the best first."""
    found = []
    for length in range(1, most + 1):
        for middle in product([t for t in range(config.vocab) if t != stop], repeat=length - 1):
            tokens = [*middle, stop]
            total = sum(log_probs(config, [*prompt, *tokens[:n]])[t] for n, t in enumerate(tokens))
            found.append((total / ((5 + length) / 6) ** alpha, tuple(middle)))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("alpha", some([0.0, 0.6, 2.0], [0.6]))
def test_wide_beams_are_exhaustive_search(alpha: float) -> None:
    config, prompt = tiny(4), [2, 0]
    best = every(config, prompt, 1, 3, alpha)[0]
    made = mtf.generate(config, prompt, trained(config), 3, beams=12, alpha=alpha, stop=1, precision="highest")
    assert made.tokens == (best[1],)
    assert made.scores[0] == pytest.approx(best[0], rel=1e-4)


def mesh_tensorflow(table: Callable[[tuple[int, ...]], Array], n: int, stop: int, alpha: float, most: int) -> Any:
    """One sequence by the rules of mesh_tensorflow/beam_search.py, in arrays of fixed size as there."""
    inf = 1e7
    alive, alive_log = [()] * n, np.array([0.0] + [-inf] * (n - 1))
    done, scores, flags = [()] * n, np.full(n, -inf), np.zeros(n, bool)
    for i in range(most):
        lowest = (scores * flags).min() + (0 if flags.any() else -inf)
        if lowest > alive_log[0] / ((5 + most) / 6) ** alpha:
            break
        penalty = ((5 + i + 1) / 6) ** alpha
        flat = np.concatenate([table(a) + p for a, p in zip(alive, alive_log, strict=True)]) / penalty
        top = np.argsort(-flat, kind="stable")[: 2 * n]
        vocab = len(flat) // n
        seqs = [(*alive[t // vocab], int(t % vocab)) for t in top]
        ended, top_scores = np.array([s[-1] == stop for s in seqs]), flat[top]
        order = np.argsort(-np.where(ended, top_scores - inf, top_scores), kind="stable")[:n]
        alive, alive_log = [seqs[k] for k in order], (top_scores * penalty)[order]
        both = np.concatenate([scores, np.where(ended, top_scores, top_scores - inf)])
        names, marks = [*done, *seqs], np.concatenate([flags, ended])
        order = np.argsort(-both, kind="stable")[:n]
        done, scores, flags = [names[k] for k in order], both[order], marks[order]
    if flags.any():
        return [(s, t) for s, t, f in zip(scores, done, flags, strict=True) if f]
    return list(zip(alive_log, alive, strict=True))


@pytest.mark.parametrize("seed", range(8))
def test_beams_follow_mesh_tensorflow(seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocab, n, most = int(rng.integers(4, 9)), int(rng.integers(1, 4)), int(rng.integers(1, 7))
    alpha, known = float(rng.choice([0.0, 0.6, 1.0])), {}

    def table(tokens: tuple[int, ...]) -> Array:
        if tokens not in known:
            drawn = np.exp(2 * np.random.default_rng([seed, *tokens]).normal(size=vocab))
            known[tokens] = np.log(drawn / drawn.sum())
        return known[tokens]

    search = Beams(n, frozenset([1]), alpha, most)
    while not search.done:
        rows = [table(a.tokens) for a in search.alive]
        order = [np.argsort(-row, kind="stable")[: min(vocab, 2 * n)] for row in rows]
        search.extend(np.stack([row[o] for row, o in zip(rows, order, strict=True)]), np.stack(order))
    wanted = mesh_tensorflow(table, n, 1, alpha, most)
    assert [h.tokens for h in search.best()] == [t for _, t in wanted]
    np.testing.assert_allclose([h.score for h in search.best()], [s for s, _ in wanted], rtol=1e-12)


def test_the_penalty() -> None:
    assert length_penalty(10, 0.6) == pytest.approx((15 / 6) ** 0.6)
    search = Beams(2, frozenset([0]), 1.0, 3)
    search.extend(np.log([[0.6, 0.3, 0.1]]), np.array([[0, 2, 1]]))
    assert search.ended[0].score == pytest.approx(log(0.6))


# ---------------------------------------------------------------- text, stops, checkpoints


def bytes_model() -> TransformerConfig:
    return small("gpt2").replace(vocab=256, max_length=64, name="bytes")


def test_text_in_text_out() -> None:
    config = bytes_model()
    seen: list[tuple[int, int]] = []
    made = mtf.generate(config, "to be", trained(config), 8, progress=lambda *at: seen.append(at), precision="highest")
    tokens = mtf.generate(config, [list(b"to be")], trained(config), 8, precision="highest").tokens
    assert made.text == bytes(tokens[0]).decode(errors="replace")
    assert seen == [(n, 8) for n in range(1, 9)]


class Letters:
    """Each token is a letter of its own."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 256 for c in text]

    def decode(self, tokens: Any) -> str:
        return "".join(chr(256 + t) for t in tokens)


def test_what_ends_a_completion_is_left_out() -> None:
    config = bytes_model()
    drawn = {"temperature": 3.0, "precision": "highest", "tokenizer": Letters()}
    whole = mtf.generate(config, [[5, 6]], trained(config), 6, **drawn)
    first, second, third, *_ = whole.tokens[0]
    assert len({first, second, third}) == 3  # or the test shows nothing
    for stop in (third, Letters().decode([third])):
        made = mtf.generate(config, [[5, 6]], trained(config), 6, stop=stop, **drawn)
        assert (made.tokens, made.ended, made.steps) == (((first, second),), (True,), 2)
        assert made.text == whole.text[:2]
    made = mtf.generate(config, [[5, 6]], trained(config), 6, stop=["never", whole.text[1:3]], **drawn)
    assert (made.tokens, made.text, made.ended) == (((first,),), whole.text[:1], (True,))


def test_a_checkpoint_of_another_mesh(tmp_path) -> None:
    config = small("llama3.1-405b")
    with mtf.Graph():
        outputs, updates = mtf.models.train_step(config, batch=2, length=8)
        layout = mtf.models.layout("fsdp", config, "fsdp:2")
        sim = mtf.simulate(mtf.lower(outputs, updates, mesh="fsdp:2", layout=layout))
    sim.step(tokens=np.ones((2, 8), int), targets=np.ones((2, 8), int))
    mtf.save(sim, tmp_path / "model.safetensors")
    here = mtf.generate(config, PROMPTS, sim, 4)
    there = mtf.generate(
        config, PROMPTS, tmp_path / "model.safetensors", 4, mesh="tensor:2", layout="heads:tensor;vocab:tensor"
    )
    assert here.tokens == there.tokens


def test_kernels_of_eight_bits_choose_nearly_the_same() -> None:
    config = small("llama2-7b")
    narrow = config.replace(numerics=mtf.Numerics(kernel_dtype="int8"))
    exact = mtf.Generator(config, trained(config), 3, 4, precision="highest")
    eight = mtf.Generator(narrow, trained(config), 3, 4, precision="highest", cache_dtype="int8")
    a, b = exact(PROMPTS).scores, eight(PROMPTS).scores
    kernels = [n for n, v in eight.prefill.variables.items() if n.endswith("kernel") and "layers/" in n]
    assert len(kernels) == 7
    assert {eight.prefill.variables[n].tensor.dtype.name for n in kernels} == {"int8"}
    w, scale = trained(config)[kernels[0]], eight.sim.state[f"{kernels[0]}_scale"]
    back = eight.sim.state[kernels[0]] * scale[:, None]
    np.testing.assert_allclose(back, w, atol=float(scale.max()) / 2 * 1.001)
    assert np.abs(np.subtract(a, b)).max() < 0.1 * np.abs(a).max()


def test_scores_of_a_bfloat16_model_are_in_float32() -> None:
    """Logarithms rounded to 8 bits would tie hypotheses that differ: here they are those of the logits to 1e-5."""
    config = small("llama2-7b").replace(numerics=mtf.Numerics(activation_dtype="bfloat16"))
    made = mtf.generate(config, PROMPTS, trained(config), max_tokens=1)
    with mtf.Graph():
        read = mtf.lower(*mtf.models.prefill(config, len(PROMPTS), 4, 5))
    sim = mtf.simulate(read)
    for name, value in trained(config).items():
        sim.state[name] = value
    rows = [prompt + [0] * (4 - len(prompt)) for prompt in PROMPTS]
    logits = sim.step(tokens=rows, lengths=[len(p) for p in PROMPTS])["logits"].astype(np.float64)
    wanted = logits.max(1) - np.log(np.exp(logits).sum(1))
    np.testing.assert_allclose(made.scores, wanted, atol=1e-5)


# ---------------------------------------------------------------- bad input


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a text without a tokenizer": ({"prompts": "a"}, "give a tokenizer"),
    "a token that is none": ({"prompts": [[64]]}, "token 64, which is not in 0 to 63"),
    "an empty prompt": ({"prompts": [[1], []]}, "prompt 1 is empty"),
    "no prompts": ({"prompts": []}, "non-empty list"),
    "another model's state": ({"state": {}}, "'embedding' .* is missing"),
    "no state": ({"state": 3}, "state must be arrays by name"),
    "beams that draw": ({"beams": 2, "temperature": 1.0}, "beam search draws no samples"),
    "a stop that is none": ({"stop": [99]}, "token 99"),
    "alpha": ({"alpha": -1.0}, "alpha must not be negative, got -1"),
    "top_p": ({"top_p": 1.5, "temperature": 1.0}, r"top_p must be in \(0, 1\], got 1.5"),
    "top_p without a temperature": ({"top_p": 0.9}, "at temperature 0 the likeliest token is taken, .* top_p"),
    "top_k without a temperature": ({"top_k": 5}, "at temperature 0 the likeliest token is taken, .* top_k"),
    "a progress that is none": ({"progress": 3}, "progress must be a function .* got 3"),
    "an encoder": ({"config": small("bert-large")}, "is an encoder"),
    "too long a completion": (
        {"config": small("gpt2"), "state": {}, "max_tokens": 100},
        r"gpt2.* has 16 positions, but prompts of 1 tokens and max_tokens 100 need 101",
    ),
    "room": ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
}


@pytest.mark.parametrize("about", BAD)
def test_bad_input(about: str) -> None:
    given, message = BAD[about]
    config = small("llama2-7b")
    arguments = {"config": config, "prompts": [[1]], "state": trained(config), "max_tokens": 2, **given}
    with pytest.raises(mtf.MeshlibError, match=message):
        mtf.generate(**arguments)
