"""Collectives that share links: fluid beside events and beside what an estimate's schedule makes of it."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware import HardwareError, Links, Torus, collectives, ring_plans
from hardware.network import Cost
from hardware.sharing import POLICIES, SharedLinks, shared
from meshlib.estimation.time import link_sharing
from tests.effort import draws

costs = st.lists(
    st.tuples(st.dictionaries(st.integers(-2, 2), st.integers(1, 20), min_size=1, max_size=3), st.integers(0, 5)),
    min_size=1, max_size=5,
).map(
    lambda drawn: [
        Cost(max(busy.values()) + latency, tuple((p, float(b)) for p, b in sorted(busy.items())), 1, "-")
        for busy, latency in drawn
    ]
)  # fmt: skip


@settings(max_examples=draws(60, 1000), deadline=None)
@given(costs, st.sampled_from(POLICIES), st.data())
def test_no_place_is_beyond_its_rate_and_none_idles_while_it_has_work(costs, policy, data):
    starts = [float(data.draw(st.integers(0, 30))) for _ in costs]
    result = shared(costs, starts, policy)
    done, sent = [0.0] * len(costs), [dict.fromkeys(dict(cost.busy_seconds), 0.0) for cost in costs]
    for span in result.spans:
        seconds = span.end_seconds - span.begin_seconds
        loads = {p: sum(dict(c.busy_seconds).get(p, 0) * v for c, v in zip(costs, span.progress, strict=True))
                 for p in range(-2, 3)}  # fmt: skip
        assert max(loads.values()) <= 1 + 1e-6
        for n, (cost, v) in enumerate(zip(costs, span.progress, strict=True)):
            active = starts[n] <= span.begin_seconds and result.ends[n] >= span.end_seconds
            assert (v > 0) == active or (active and policy == "in turn")
            if active:  # as fast as alone, or held up at a place that is full
                assert v == pytest.approx(1 / cost.seconds) or any(loads[p] > 1 - 1e-6 for p, _ in cost.busy_seconds)
            assert v <= (1 + 1e-9) / cost.seconds
            done[n] += v * seconds
            for place, busy in cost.busy_seconds:
                sent[n][place] += busy * v * seconds
    assert done == pytest.approx([1.0] * len(costs))
    for own, cost in zip(sent, costs, strict=True):
        assert own == pytest.approx(dict(cost.busy_seconds))  # bytes are conserved
    for end, start, cost in zip(result.ends, starts, costs, strict=True):
        assert end >= (start + cost.seconds) * (1 - 1e-9)


@settings(max_examples=draws(25, 1000), deadline=None)
@given(
    st.integers(2, 8), st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]),
    st.sampled_from(["oneway", "halves"]), st.lists(st.integers(1, 50), min_size=2, max_size=4), st.integers(0, 1),
)  # fmt: skip
def test_rings_in_step_share_as_the_fluid_does(n, op, algorithm, sizes, hop):
    """Each ends in the round of messages in which the fluid ends; the last one exactly there, but for the hops."""
    torus, links = Torus((n,)), Links(1.0, hop)
    data = [np.zeros(2 if op == "all_gather" else (n, 2)) for _ in range(n)]
    seconds_of = getattr(collectives, f"{op}_seconds")
    plans, alone = [], []
    for size in sizes:  # bytes of a message
        options = {"algorithm": algorithm, "element_bytes": size, "barrier": False}
        plans.append(getattr(ring_plans, op)(torus, data, **options))
        wire = seconds_of(2 * size * n, [(n, True)], Links(1.0, 0), algorithm)
        alone.append(Cost(wire, ((0, wire),), 1, "-"))
    traffic = ring_plans.run_together(links, plans)
    fluid = shared(alone)
    rounds = (n - 1) * (2 if op == "all_reduce" else 1)
    one_round = fluid.seconds / rounds
    rounding = 1e-9 * fluid.seconds
    assert fluid.seconds - rounding <= traffic.seconds <= fluid.seconds + hop * rounds + rounding
    for end, flow in zip(traffic.plan_seconds, fluid.ends, strict=True):
        assert flow - one_round - rounding <= end <= flow + hop * rounds + rounding
    assert traffic.max_link_bytes == pytest.approx(fluid.seconds)


@pytest.mark.parametrize(("policy", "small", "large"), [("proportional", 12.0, 12.0), ("equal", 4.0, 12.0)])
def test_two_at_one_place(policy, small, large):
    two = [Cost(busy, ((0, busy),), 1, "-") for busy in (2.0, 10.0)]
    assert shared(two, policy=policy).ends == pytest.approx((small, large))
    late = shared(two[::-1], [0.0, 3.0], policy)  # the small one comes while the large one is on its way
    assert max(late.ends) == pytest.approx(12.0)


def test_who_cannot_use_its_share_leaves_it():
    """One is held up at place 1 by two others; at place 0 the fourth takes what it leaves."""
    four = [
        Cost(3.0, ((0, 3.0), (1, 3.0)), 1, "-"),
        *[Cost(3.0, ((1, 3.0),), 1, "-")] * 2,
        Cost(3.0, ((0, 3.0),), 1, "-"),
    ]
    first = shared(four, policy="equal").spans[0].progress
    assert first == pytest.approx((1 / 9, 1 / 9, 1 / 9, 2 / 9))


@settings(max_examples=draws(60, 1000), deadline=None)
@given(costs, st.data())
def test_events_of_a_schedule_leave_room_for_all_that_is_sent(costs, data):
    """Whatever the order of issue: of what begins and ends within a time, no place sends more than it can in it."""
    links, events = link_sharing.LinkTimes(), []
    ready = [float(data.draw(st.integers(0, 30))) for _ in costs]
    for n, (cost, at) in enumerate(zip(costs, ready, strict=True)):
        begin, end, delayed = links.send(n, cost, at)
        events.append([begin, end])
        for moved in delayed:
            events[moved.event] = [moved.begin, events[moved.event][1] + moved.late_seconds]
    for (begin, end), cost, at in zip(events, costs, ready, strict=True):
        assert begin >= at
        assert end - begin >= cost.seconds * (1 - 1e-6)
    for begin, end in itertools.product({b for b, _ in events}, {e for _, e in events}):
        for place in range(-2, 3):
            within = [dict(cost.busy_seconds).get(place, 0.0) for cost, (b, e) in zip(costs, events, strict=True)
                      if begin <= b + 1e-6 and e <= end + 1e-6]  # fmt: skip
            assert sum(within) <= max(end - begin, 0.0) + 1e-5
    wires = [replace(cost, seconds=max(dict(cost.busy_seconds).values())) for cost in costs]
    want = [end + cost.seconds - wire.seconds
            for end, cost, wire in zip(shared(wires, ready, "in turn").ends, costs, wires, strict=True)]  # fmt: skip
    assert [end for _, end in events] == pytest.approx(want)


@settings(max_examples=draws(40, 1000), deadline=None)
@given(costs, st.sampled_from(POLICIES), st.data())
def test_one_after_the_other_is_as_all_at_once(costs, policy, data):
    ready = [float(data.draw(st.integers(0, 30))) for _ in costs]
    one_by_one, at_once = SharedLinks(policy), SharedLinks(policy)
    for cost, at in zip(costs, ready, strict=True):
        one_by_one.issue(cost, at)
    at_once.begins, at_once.ends = [math.inf] * len(costs), [*ready]
    at_once._ready, at_once._seconds = ready, [cost.seconds for cost in costs]
    at_once._busy = [dict(cost.busy_seconds) for cost in costs]
    at_once._run(min(ready), {}, frozenset(), sorted(range(len(costs)), key=ready.__getitem__))
    assert one_by_one.ends == pytest.approx(at_once.ends)
    assert one_by_one.begins == pytest.approx(at_once.begins)


@settings(max_examples=draws(40, 1000), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=6), st.sampled_from(POLICIES))
def test_a_schedule_keeps_links_busy_for_as_long_as_the_fluid(given_, policy):
    given_ = sorted(given_, key=lambda pair: pair[1])
    links = link_sharing.LinkTimes()
    flows = [Cost(float(busy), ((0, float(busy)),), 1, "-") for busy, _ in given_]
    for n, (flow, (_, ready)) in enumerate(zip(flows, given_, strict=True)):
        links.send(n, flow, float(ready))
    assert links.free(0) == pytest.approx(shared(flows, [float(ready) for _, ready in given_], policy).seconds)


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 10))
def test_a_schedule_lets_a_small_one_pass_as_equal_shares_do(small, more, late):
    large = 2 * small + more + late
    links = link_sharing.LinkTimes()
    flows = [Cost(float(busy), ((0, float(busy)),), 1, "-") for busy in (large, small)]
    links.send(0, flows[0], 0.0)
    _, end, _ = links.send(1, flows[1], float(late))
    ends = shared(flows, [0.0, float(late)], "equal").ends
    assert end == pytest.approx(ends[1] if large - late > small else ends[0] + small)
    assert links.free(0) == pytest.approx(max(ends))


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: shared([1.0]), "costs must be a list of Cost"),
        (lambda: shared([], [0.0]), "has 0 collectives and 1 starts"),
        (lambda: shared([Cost(1.0, (), 1, "-")], [-1]), "starts must be a finite number >= 0, not -1"),
        (
            lambda: shared([], policy="first"),
            "unknown policy of shared links 'first'; use one of proportional, equal, in turn",
        ),
    ],
    ids=["costs", "starts", "negative", "policy"],
)
def test_bad_input(call, part):
    with pytest.raises(HardwareError) as fault:
        call()
    assert part in str(fault.value)
    assert shared([]).seconds == 0.0
