"""A running batch gives each request what it would get alone: layouts, chunks, pages, shared beginnings, drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from meshlib.generation.sampling import Sampling, repeated
from meshlib.generation.server import Pages
from tests.effort import some
from tests.models.common import Array, small, values

PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7], [3, 1, 4, 1, 5, 8], [1], [3, 1, 4, 1, 5, 9, 2, 6, 7])
COUNTS = (4, 7, 5, 3, 6)


@cache
def state(name: str) -> dict[str, Array]:
    with mtf.Graph() as graph:
        mtf.models.transformer(small(name), 1, 4, training=False)
        held = values(graph)
    rng = np.random.default_rng(1)
    others = {name: op.output.shape.sizes for name, op in graph.variables.items() if name not in held}
    return held | {name: rng.normal(size=shape).astype(np.float32) for name, shape in others.items()}


def served(name: str, prompts: Sequence[list[int]] = PROMPTS, **options: Any) -> mtf.Server:
    options = {"batch": 2, "cache_length": 16, "precision": "highest", **options}
    server = mtf.Server(small(name), state(name), **options)
    for n, prompt in enumerate(prompts):
        server.submit(prompt, COUNTS[n])
    return server


@cache
def alone(name: str, temperature: float = 0.0) -> tuple[tuple[int, ...], ...]:
    """Each request by a greedy completion of its own; or, where tokens are drawn, in a batch of one."""
    if temperature:
        made = [served(name, PROMPTS, batch=1, temperature=temperature, chunk=16).run()]
        return tuple(done.tokens for done in made[0])
    complete = mtf.Generator(small(name), state(name), 1, max(map(len, PROMPTS)), max(COUNTS), precision="highest")
    return tuple(complete([prompt]).tokens[0][:count] for prompt, count in zip(PROMPTS, COUNTS, strict=True))


WAYS: dict[str, dict[str, Any]] = {
    "in chunks": {"chunk": 3},
    "in pages": {"chunk": 4, "page_size": 4, "pages": 8},
    "few pages": {"batch": 3, "chunk": 16, "page_size": 2, "pages": 9},
    "drafts": {"chunk": 5, "draft_tokens": 3},
    "drafts in pages": {"chunk": 5, "draft_tokens": 2, "page_size": 4, "pages": 9},
    "over the batch": {"chunk": 3, "mesh": "data:2", "layout": "batch:data"},
    "over heads, in pages": {"page_size": 4, "pages": 8, "mesh": "tensor:2", "layout": "heads:tensor;vocab:tensor"},
    "over pages": {"page_size": 4, "pages": 8, "chunk": 4, "mesh": "p:2", "layout": "pages:p"},
    "over pages and heads": {"page_size": 4, "pages": 8, "mesh": "p:2;t:2", "layout": "pages:p;heads:t;batch:p?"},
    "over positions": {"chunk": 4, "mesh": "p:2", "layout": "cache_length:p"},
}
NAMES = ("llama2-7b", "gemma3-12b", "deepseek-v3", "mixtral-8x7b", "gpt2")
ROWS = [(name, way) for name in NAMES for way in WAYS]
FEW = [("llama2-7b", way) for way in WAYS] + [
    ("gemma3-12b", "drafts in pages"),
    ("deepseek-v3", "over pages"),
    ("mixtral-8x7b", "in pages"),
    ("gpt2", "few pages"),
]


@pytest.mark.parametrize(("name", "way"), some(ROWS, FEW))
def test_each_request_gets_what_it_would_get_alone(name: str, way: str) -> None:
    server = served(name, **WAYS[way])
    done = server.run()
    assert [d.request for d in done] == list(range(len(PROMPTS)))
    assert tuple(d.tokens for d in done) == alone(name)
    assert server.running == server.waiting == ()


def test_drawn_tokens_depend_on_the_request_alone() -> None:
    for way in ({"chunk": 3}, {"batch": 4, "page_size": 4, "pages": 16}, {"mesh": "t:2", "layout": "heads:t"}):
        done = served("llama2-7b", temperature=1.0, **way).run()
        assert tuple(d.tokens for d in done) == alone("llama2-7b", 1.0)


def test_sequences_join_a_running_batch_and_leave_it() -> None:
    server = served("llama2-7b", PROMPTS[:1], chunk=4)
    server.step()
    assert server.running == (0,)
    server.submit(PROMPTS[1], COUNTS[1])
    late = server.submit(PROMPTS[2], COUNTS[2])
    server.step()
    assert (server.running, server.waiting) == ((0, 1), (late,))
    done = server.run()
    assert tuple(d.tokens for d in done) == alone("llama2-7b")[:3]
    # Two chunks, and a step for each token but the first.
    assert done[0].steps == 2 + COUNTS[0] - 1


def test_what_prompts_share_is_read_once() -> None:
    """The first two pages of 4 hold the beginning of the fifth prompt, as of the first; the third shares one page."""
    server = served("llama2-7b", batch=1, chunk=16, page_size=4, pages=12)
    done = server.run()
    assert [d.shared for d in done] == [0, 0, 4, 0, 8]
    assert tuple(d.tokens for d in done) == alone("llama2-7b")


def test_right_drafts_save_steps() -> None:
    """Drafts that the model itself would write are all accepted; wrong ones cost nothing but their check."""
    (wanted,) = alone("llama2-7b")[1:2]
    told = [*PROMPTS[1], *wanted]

    def knowing(tokens: Sequence[int], count: int) -> Sequence[int]:
        return told[len(tokens) : len(tokens) + count]

    def wrong(tokens: Sequence[int], count: int) -> Sequence[int]:
        return [(t + 1) % 64 for t in knowing(tokens, count)]

    for drafts, accepted, steps in ((knowing, 4, 3), (wrong, 0, COUNTS[1])):
        server = mtf.Server(
            small("llama2-7b"), state("llama2-7b"), 1, 16, 8, draft_tokens=3, drafts=drafts, precision="highest"
        )
        server.submit(PROMPTS[1], COUNTS[1])
        (done,) = server.run()
        assert done.tokens == wanted
        assert (done.accepted, done.steps) == (accepted, steps), drafts


@pytest.mark.parametrize("draft", [0, 2])
def test_drafts_leave_the_distribution_as_it_is(draft: int) -> None:
    """Two tokens after a draft, likely or not: pairs have the chances of two draws, by a chi-squared test."""
    logits = np.log([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]])
    sampling, random = Sampling(1.0), np.random.default_rng(draft)
    pairs: Counter[tuple[int, ...]] = Counter()
    for _ in range(draws := 4_000):
        made = sampling.verified(logits, [draft], random)
        pairs[tuple(made)] += 1
    first, second = np.exp(logits)
    expected = {(x,): first[x] for x in range(3) if x != draft}
    expected |= {(draft, x): first[draft] * second[x] for x in range(3)}
    assert pairs.keys() <= expected.keys()
    chi = sum((pairs[pair] - draws * p) ** 2 / (draws * p) for pair, p in expected.items())
    assert chi < 18.5  # of 4 degrees of freedom, with a chance of 0.001


def test_pages_are_shared_while_somebody_has_them_and_after() -> None:
    pages = Pages(4, 2)
    one, known = pages.take([1, 2, 3, 4], 4) or ([], 0)
    assert (len(one), known, pages.free) == (2, 0, 2)
    pages.filled(one, [1, 2, 3, 4])
    two, known = pages.take([1, 2, 3, 4], 6) or ([], 0)
    assert (two[0], known) == (one[0], 2)  # never all of the prompt: its last token has to be read
    assert pages.take([9], 2) is None
    pages.give_back(one)
    pages.give_back(two)
    assert pages.free == 4
    again, known = pages.take([1, 2, 3], 4) or ([], 0)
    assert (again[0], known) == (one[0], 2)
    pages.give_back(again)
    other, known = pages.take([5] * 8, 8) or ([], 0)  # needs them all
    assert (len(other), known) == (4, 0)
    pages.give_back(other)
    assert (pages.take([1, 2, 3], 4) or ([], 1))[1] == 0


def test_repeated_tokens_are_drafts() -> None:
    assert repeated([1, 2, 3, 4, 1, 2], 3) == [3, 4, 1]
    assert repeated([5, 5], 2) == [5]
    assert repeated([1], 2) == []


BAD: dict[str, tuple[Any, str]] = {
    "an encoder": (lambda: mtf.models.extend_step(small("t5-11b"), 1, 1, 8), "is of kind 'encoder-decoder'"),
    "half of pages": (lambda: mtf.models.extend_step(small("gpt2"), 1, 1, 8, 4), "page_size and pages, or neither"),
    "pages": (lambda: mtf.models.extend_step(small("llama2-7b"), 1, 1, 9, 4, 4), "9 % 4 = 1; use cache_length=12"),
    "a chunk": (lambda: mtf.models.extend_step(small("llama2-7b"), 1, 9, 8), "length 9 is more than cache_length 8"),
    "a long prompt": (
        lambda: served("llama2-7b", ()).submit([1] * 14, 3), "14 tokens and max_tokens 3 need 17 positions, .* is 16"
    ),
    "few pages": (
        lambda: served("llama2-7b", (), page_size=4, pages=2).submit([1] * 8, 3), "11 positions take 3 pages, .* are 2"
    ),
    "a draft": (
        lambda: served("llama2-7b", draft_tokens=1, drafts=lambda *_: [99]).run(), "draft 99 is not in 0 to 63"
    ),
    "a state": (lambda: mtf.Server(small("llama2-7b"), {}, 1, 8), "the state is not that of llama2-7b-reduced"),
    "no prompt": (lambda: served("llama2-7b", ()).submit([]), "is empty"),
}  # fmt: skip


@pytest.mark.parametrize("about", BAD)
def test_bad_input(about: str) -> None:
    build, message = BAD[about]
    with mtf.Graph(), pytest.raises(mtf.GraphError, match=message):
        build()
