"""Input bound: what hosts prepare in the time of a step, by hand."""

from __future__ import annotations

import pytest

import meshlib as mtf
from meshlib.core.graph import FORWARD

BATCH, WIDTH = 4096, 1024


def program(mesh="data:32", batch="batch"):
    with mtf.Graph():
        x = mtf.input("x", [mtf.Dimension(batch, BATCH), mtf.Dimension("width", WIDTH)])
        w = mtf.variable("w", [mtf.Dimension("width", WIDTH), mtf.Dimension("out", WIDTH)])
        loss = mtf.reduce_mean(mtf.relu(mtf.einsum([x, w])))
        train = mtf.optimize.SgdOptimizer(0.1).minimize(loss)
        return mtf.lower({"loss": loss}, train, mesh=mesh, layout=f"{batch}:data")


def test_a_step_lasts_as_long_as_its_input():
    plan = program()
    free = mtf.estimate(plan, "v3-32")  # 16 chips, 4 hosts
    bound = mtf.estimate(plan, "v3-32", input=mtf.HostInput(examples_per_second=1000))
    assert bound.step_seconds == pytest.approx(BATCH / (4 * 1000))
    assert bound.input_wait_seconds == pytest.approx(BATCH / 4000 - free.step_seconds)
    assert (free.input_wait_seconds, free.bound_seconds["input"]) == (0, 0)
    assert (bound.bound, bound.device_seconds) == ("input", free.step_seconds)
    assert sum(bound.bound_seconds.values()) == pytest.approx(bound.step_seconds)
    assert bound.usd(10) / free.usd(10) == pytest.approx(bound.step_seconds / free.step_seconds)
    assert bound.mfu / free.mfu == pytest.approx(free.step_seconds / bound.step_seconds)
    assert bound.lower_seconds == bound.step_seconds <= bound.upper_seconds
    assert "4,096 examples of 4 hosts, at 1,000 a second from each; the devices wait" in str(bound)
    assert "waiting for input" in free.compare(bound)
    assert not any(r.phase == FORWARD and r.name == "input" for r in bound.rows)


def test_hosts_that_are_fast_enough_cost_nothing():
    plan = program()
    free, fed = mtf.estimate(plan, "v3-32"), mtf.estimate(plan, "v3-32", input=mtf.HostInput(examples_per_second=1e9))
    assert (fed.step_seconds, fed.bound) == (free.step_seconds, free.bound)
    assert "ready before the devices" in str(fed)


def test_what_is_sent_to_the_devices_passes_pcie():
    """A core's 128 rows of 4 KiB over half of 12.5 GB/s at 90 %."""
    fed = mtf.estimate(program(), "v3-32", input=mtf.HostInput(examples_per_second=1e9))
    assert fed.input.pcie_seconds == pytest.approx(128 * 4 * WIDTH / (12.5e9 / 2 * 0.9))
    assert fed.input.seconds == fed.input.pcie_seconds


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (mtf.HostInput(decode_seconds=0.01, workers=20), BATCH / 4 / 2000),
        (mtf.HostInput(examples_per_second=2000, examples=3 * BATCH), 3 * BATCH / 4 / 2000),
    ],
)
def test_ways_to_say_it(given, seconds):
    assert mtf.estimate(program(), "v3-32", input=given).input.host_seconds == pytest.approx(seconds)


def test_scaling_waits_for_hosts():
    def build(slice_):
        return program(f"data:{slice_.devices}")

    found = mtf.scaling(build, ["v3-8", "v3-32"], input=mtf.HostInput(examples_per_second=100))
    assert found.estimates[0].step_seconds / found.estimates[1].step_seconds == pytest.approx(4)  # 1 host, then 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mtf.HostInput(), "give examples_per_second, or decode_seconds and workers"),
        (lambda: mtf.HostInput(examples_per_second=1, decode_seconds=1, workers=1), "give examples_per_second"),
        (lambda: mtf.HostInput(decode_seconds=1), "give examples_per_second"),
        (lambda: mtf.HostInput(examples_per_second=0), "examples_per_second must be positive, got 0"),
        (lambda: mtf.HostInput(examples_per_second="fast"), "examples_per_second must be a finite number"),
        (lambda: mtf.HostInput(examples_per_second=1, examples=0), "examples must be at least 1, got 0"),
        (lambda: mtf.HostInput(decode_seconds=0.1, workers=1.5), "workers must be an integer"),
        (lambda: mtf.estimate(program(), "v3-32", input=3000), "input must be an mtf.HostInput, got 3000"),
        (
            lambda: mtf.estimate(program(batch="rows"), "v3-32", input=mtf.HostInput(examples_per_second=1)),
            "no input of the program has a dim 'batch'",
        ),
    ],
)
def test_bad_input_is_refused(make, message):
    with pytest.raises(mtf.GraphError, match=message):
        make()
