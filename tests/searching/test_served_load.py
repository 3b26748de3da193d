"""A server under load: closed forms of queues, a simulator that goes step by step, and what users may ask."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import meshlib as mtf
from meshlib.searching.served_load import ServedLoad, StepSeconds, between, serve_load
from meshlib.searching.serving_result import _soonest
from tests.command.test_command import run

ONE = StepSeconds(decode=((1, 0.01),), prefill=((100, 0.5),))


def drawn(rate: float, requests: int = 20_000, **more: object) -> mtf.Arrivals:
    return mtf.Arrivals(rate=rate, requests=requests, **{"prompts": 100, "outputs": 1, **more})  # type: ignore[arg-type]


# ---------------------------------------------------------------- closed forms


@pytest.mark.parametrize("load", [0.2, 0.5, 0.8])
def test_prompts_alone_wait_as_in_a_queue_with_constant_service(load: float) -> None:
    """M/D/1: the mean wait is rho D / (2 (1 - rho)), by Pollaczek and Khinchine; the server is busy for rho of time."""
    found = serve_load("one", ONE, drawn(load / 0.5))
    assert found.wait_seconds == pytest.approx(load * 0.5 / (2 * (1 - load)), rel=0.08)
    assert sum(found.utilisation) == pytest.approx(load, rel=0.03)
    assert found.first_token_seconds(0) == pytest.approx(0.5)


def test_the_queue_is_as_long_as_little_says() -> None:
    """L = lambda W, counted by the clock."""
    found = serve_load("one", ONE, drawn(1.6, 5_000))
    times = np.linspace(found.arrivals.seconds[0], found.last.max(), 200_001)
    waiting = np.searchsorted(found.arrivals.seconds, times, "right") - np.searchsorted(found.started, times, "right")
    assert found.queue_length == pytest.approx(waiting.mean(), rel=0.01)
    assert found.queue_length == pytest.approx(found.requests_per_second * found.wait_seconds, rel=1e-6)
    assert found.longest_queue == waiting.max()


def test_at_equal_distances_nobody_waits() -> None:
    found = serve_load("one", ONE, drawn(1.0, 50, outputs=11, steady=True))
    assert found.queue_length == 0
    assert found.first_token_seconds(100) == pytest.approx(0.5)
    assert found.token_seconds(50) == pytest.approx(0.01)


def test_more_than_it_serves_fills_the_batch() -> None:
    """All slots full: a token for each in every step, less the time in which prompts are read."""
    steps = StepSeconds(decode=((1, 0.02), (16, 0.04)), prefill=((100, 0.001),))
    found = serve_load("many", steps, drawn(1e4, 2_000, outputs=100))
    assert not found.keeps_up
    per_request = 0.001 + 99 * 0.04 / 16  # a sixteenth of each step
    assert found.requests_per_second == pytest.approx(1 / per_request, rel=0.05)


# ---------------------------------------------------------------- step by step


def stepped(steps: StepSeconds, arrivals: mtf.Arrivals, chunk: int | None) -> tuple[list[float], list[float]]:
    """First and last tokens, one step of the server after the other."""
    come, prompts, outputs = (x.tolist() for x in (arrivals.seconds, arrivals.prompts_drawn, arrivals.outputs_drawn))
    first, last, left = [0.0] * len(come), [0.0] * len(come), dict[int, int]()
    now, queue, reading, position = 0.0, list(range(len(come))), list[int](), 0
    while queue or reading or left:
        if not reading and len(left) < steps.slots:
            ready = [n for n in queue if come[n] <= now][: min(steps.together, steps.slots - len(left))]
            reading, position = ready, 0
            queue = [n for n in queue if n not in ready]
        whole = False
        if reading:
            longest = max(prompts[n] for n in reading)
            until = min(longest, position + (chunk or longest))
            now += between(steps.prefill, until) - between(steps.prefill, position)
            position = until
            if whole := position == longest:
                for n in reading:
                    first[n] = last[n] = now
                    if outputs[n] > 1:
                        left[n] = outputs[n] - 1
                reading = []
        if left and not whole:
            now += steps.decoding(len(left))
            left = {n: count - 1 for n, count in left.items()}
            for n in [n for n, count in left.items() if not count]:
                last[n] = now
                del left[n]
        elif not left and not reading and queue and come[queue[0]] > now:
            now = come[queue[0]]
    return first, last


@pytest.mark.parametrize("seed", range(6))
def test_as_step_by_step(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots, together = int(rng.integers(1, 9)), int(rng.integers(1, 4))
    steps = StepSeconds(((1, 0.01), (slots + 1, 0.03)), ((64, 0.05), (256, 0.3)), together)
    load = mtf.Arrivals(rate=float(rng.uniform(1, 12)), prompts="30-300", outputs="1-20", requests=60, seed=seed)
    chunk = None if seed % 2 else int(rng.integers(20, 200))
    found = serve_load("any", steps, load, chunk)
    first, last = stepped(steps, load, chunk)
    np.testing.assert_allclose(found.first, first, rtol=1e-9)
    np.testing.assert_allclose(found.last, last, rtol=1e-9)


def test_slices_of_their_own_decode_beside_prompts() -> None:
    """Nobody's tokens wait for a prompt; the first token comes before the caches are sent, the second after."""
    steps = StepSeconds(decode=((1, 0.01), (64, 0.01)), prefill=((100, 0.5),), transfer=0.002)
    load = drawn(1.5, 300, outputs=11)
    apart, shared = (serve_load("two", steps, load, separate=separate) for separate in (True, False))
    assert apart.slices == 2
    assert apart.token_seconds(0) >= (0.2 + 10 * 0.01) / 10 - 1e-9
    assert apart.token_seconds(99) < 0.035 < shared.token_seconds(50)
    assert apart.wait_seconds < shared.wait_seconds


# ---------------------------------------------------------------- loads


def test_lengths_are_drawn_as_they_are_told() -> None:
    load = drawn(3.0, prompts="200~1500", outputs={10: 3.0, 50: 1.0})
    assert np.median(load.prompts_drawn) == pytest.approx(200, rel=0.03)
    assert np.percentile(load.prompts_drawn, 99) == pytest.approx(1500, rel=0.06)
    assert np.mean(load.outputs_drawn == 10) == pytest.approx(0.75, abs=0.01)
    assert len(load.seconds) / load.seconds[-1] == pytest.approx(3.0, rel=0.03)
    uniform = drawn(1.0, prompts="100-103").prompts_drawn
    assert {*uniform.tolist()} == {100, 101, 102, 103}
    twice = load.scaled(2.0)
    np.testing.assert_array_equal(twice.prompts_drawn, load.prompts_drawn)
    np.testing.assert_allclose(twice.seconds, load.seconds / 2)


def test_traces(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("seconds,prompt,output\n0,10,5\n1.5,20,7\n2,1,1\n")
    load = mtf.Arrivals.trace(file)
    assert (load.rate, load.prompts_drawn.tolist(), load.longest) == (1.0, [10, 20, 1], 27)
    assert mtf.Arrivals.trace([(0.0, 10, 5), (1.5, 20, 7), (2.0, 1, 1)]) == load
    np.testing.assert_allclose(load.scaled(2.0).seconds, [0, 0.75, 1])


MISTAKES = {
    "no rate": (lambda: mtf.Arrivals(0), "rate must be above 0 requests a second, got 0"),
    "a rate that is text": (lambda: mtf.Arrivals("2"), "rate must be a finite number"),  # type: ignore[arg-type]
    "a range backwards": (lambda: mtf.Arrivals(1, prompts="9-2"), "the smaller number first, got '9-2'"),
    "no lengths": (lambda: mtf.Arrivals(1, outputs=[]), r"outputs must be a number, .* got \[\]"),
    "a length of 0": (lambda: mtf.Arrivals(1, outputs=0), "outputs must be 1 to 4,194,304 tokens, got 0"),
    "weights": (lambda: mtf.Arrivals(1, outputs={3: -1.0}), "weights of outputs must not be negative"),
    "too many": (lambda: mtf.Arrivals(1, requests=10**7), "requests must be at most 1,000,000, got 10,000,000"),
    "one request": (lambda: mtf.Arrivals.trace([(0, 1, 1)]), "needs at least 2 requests, got 1"),
    "a row": (lambda: mtf.Arrivals.trace([(0, 1, 1), (1, 2)]), r"request 2 of a trace must be \(seconds,"),  # type: ignore[list-item]
    "time": (lambda: mtf.Arrivals.trace([(1, 1, 1), (0, 2, 2)]), "in order of time .* see request 2"),
    "no file": (lambda: mtf.Arrivals.trace("/nowhere.csv"), "the trace '/nowhere.csv' can't be read"),
    "no load": (
        lambda: mtf.serving(mtf.models.preset("gpt2"), "v5e-1", chunk=8),
        "chunk is for a load; give arrivals=",
    ),
    "no arrivals": (
        lambda: mtf.serving(mtf.models.preset("gpt2"), "v5e-1", arrivals=3.0),  # type: ignore[arg-type]
        "arrivals must be an mtf.Arrivals, got 3.0",
    ),
    "too short": (
        lambda: mtf.serving(mtf.models.preset("gpt2"), "v5e-1", context=64, arrivals=mtf.Arrivals(1, 100, 10)),
        "context 64 is less than the longest request, 110 tokens",
    ),
}


@pytest.mark.parametrize("about", MISTAKES)
def test_mistakes(about: str) -> None:
    call, message = MISTAKES[about]
    with pytest.raises(mtf.GraphError, match=message):
        call()


# ---------------------------------------------------------------- models


def served(rate: float, **more: object) -> mtf.Serving:
    load = mtf.Arrivals(rate, prompts="60~200", outputs=40, requests=300)
    return mtf.serving(mtf.models.preset("gpt2"), "v5e-1", batches=[1, 16, 64], arrivals=load, **more)  # type: ignore[arg-type]


def test_serving_simulates_the_load_with_its_own_estimates() -> None:
    found = served(20.0)
    (load,) = found.loads
    assert load.slots == 64
    assert [seconds for _, seconds in load.steps.decode] == [p.token_seconds for p in found.points]
    assert load.steps.prefill[-1][1] == found.points[0].prefill_seconds
    assert found.context == -(-load.arrivals.longest // 128) * 128
    assert found.load_within() is load
    assert found.load_within(token_seconds=1e-9) is None
    assert "first token*" in str(found)
    # Of 12 layers keys and values of 768 features in float32, at 3.125 GB/s of DCN.
    apart = served(20.0, separate=True).loads[0]
    assert apart.steps.transfer == pytest.approx(12 * 2 * 768 * 4 / 3.125e9)


def test_the_best_layout_completes_requests_soonest() -> None:
    load = mtf.Arrivals(5.0, prompts=4, outputs=40, requests=50)
    quick, slow = (serve_load("", StepSeconds(((1, t), (8, t)), ((4, 0.05),)), load) for t in (0.01, 0.04))
    assert quick.request_seconds == np.mean(quick.last - load.seconds) < slow.request_seconds
    assert _soonest([slow, quick], None, None) is quick
    assert _soonest([slow, quick], None, 0.001) is None


def test_a_fleet_is_the_fewest_slices_that_are_fast_enough() -> None:
    found = served(2_000.0)
    goals = {"first_token_seconds": 0.2, "token_seconds": 0.01}
    assert found.load_within(**goals) is None
    fleet = found.fleet(**goals)
    assert fleet is not None
    (load,) = found.loads
    within: Sequence[bool] = [load.scaled(1 / n).within(**goals) for n in (fleet.slices, fleet.slices - 1)]
    assert within == [True, False]
    assert isinstance(fleet.load, ServedLoad)
    assert fleet.load.arrivals.rate == pytest.approx(2_000.0 / fleet.slices)
    assert fleet.chips == fleet.slices


def test_the_command_says_how_many_slices(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "serve gpt2 --slice v5e-1 --batch 16 --rate 300 --prompts 100 --outputs 20 --requests 200 --first-token 500"
    )
    code, out, _ = run(*arguments.split(), capsys=capsys)
    assert code == 0
    verdict = "gpt2 on v5e-1: 300 requests/s, prompts of 100 tokens, outputs of 20, first tokens within 500 ms"
    assert out.replace("\n    ", " ").startswith(verdict)
    assert max(map(len, out.splitlines())) <= 80
    assert " x v5e-1 = " in out
    code, _, err = run("serve", "gpt2", "--slice", "v5e-1", "--prompts", "100", capsys=capsys)
    assert code != 0
    assert "--prompts needs a load; give --rate or --trace" in err
