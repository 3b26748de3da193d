"""Coordinates, links and routes of a torus; the event engine."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware.checks import HardwareError
from hardware.events import Links, Message, MessagePlan, simulate
from hardware.torus import Torus

tori = st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=3).map(
    lambda axes: Torus(tuple(n for n, _ in axes), tuple(wrap for _, wrap in axes))
)


@given(tori)
def test_numbers_and_coordinates_are_inverse_and_row_major(torus):
    places = [torus.coordinates(node) for node in range(torus.nodes)]
    assert places == sorted(places)
    assert [torus.node(place) for place in places] == list(range(torus.nodes))


@given(tori)
def test_links_come_in_pairs_and_name_their_ends(torus):
    links = list(torus.links())
    expected = sum(
        2 * (n if wrap else n - 1) * torus.nodes // n for n, wrap in zip(torus.shape, torus.wrap, strict=True) if n > 1
    )
    assert len(links) == len(set(links)) == expected
    ends = [torus.ends(link) for link in links]
    assert sorted(ends) == sorted((target, source) for source, target in ends)
    assert all(torus.distance(*pair) == 1 for pair in ends)


@given(tori, st.data(), st.booleans())
def test_routes_are_shortest_and_connected(torus, data, backward):
    source, target = (data.draw(st.integers(0, torus.nodes - 1)) for _ in range(2))
    route = torus.route(source, target, backward)
    here = source
    for link in route:
        start, here = torus.ends(link)
        assert start != here
    assert here == target
    assert len(route) == torus.distance(source, target) <= torus.diameter
    # an oracle: breadth-first search
    reached, steps = {source}, 0
    while target not in reached:
        reached |= {end for link in torus.links() for start, end in [torus.ends(link)] if start in reached}
        steps += 1
    assert steps == len(route)


def test_ties_go_round_either_way():
    torus = Torus((4, 5))
    forth, back = (torus.route(0, torus.node((2, 1)), backward_ties=tie) for tie in (False, True))
    assert [torus.ends(link)[1] for link in forth] == [5, 10, 11]
    assert [torus.ends(link)[1] for link in back] == [15, 10, 11]
    assert torus.route(0, 5) == torus.route(0, 5, backward_ties=True)  # no tie


def test_bisection_of_a_wrapped_axis_is_twice_that_of_a_line():
    def crossing(torus):
        pairs = map(torus.ends, torus.links())
        return sum((torus.coordinates(a)[0] < 4) != (torus.coordinates(b)[0] < 4) for a, b in pairs)

    assert crossing(Torus((8, 2))) == 2 * crossing(Torus((8, 2), (False, True))) == 8


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: Torus(()), "at least one axis"),
        (lambda: Torus((4, 0)), "torus shape[1] of (4, 0) must be an integer >= 1, not 0"),
        (lambda: Torus(4), "sequence of integers"),
        (lambda: Torus((4, 2.0)), "not 2.0"),
        (lambda: Torus((4, 2), (True,)), "has 1 entries, shape (4, 2) has 2 axes"),
        (lambda: Torus((4, 2), (1, 0)), "one bool per axis"),
        (lambda: Torus((4,)).coordinates(4), "node 4 is not in a torus of 4 nodes"),
        (lambda: Torus((4,)).coordinates(-1), "node must be an integer >= 0, not -1"),
        (lambda: Torus((4, 4)).node((1,)), "coordinates (1,) are not in a torus of shape (4, 4)"),
        (lambda: Torus((4, 4)).node((1, 4)), "(1, 4)"),
        (lambda: Torus((4,), False).link(3, 0, 1), "no link leaves node 3 (3,) along axis 0 by +1"),
        (lambda: Torus((4,)).link(3, 0, 2), "step must be 1 or -1, not 2"),
        (lambda: Torus((4,)).neighbour(0, 0, 2), "step must be 1 or -1, not 2"),
        (lambda: Torus((4,)).neighbour(0, 0, 9), "step must be 1 or -1, not 9"),
        (lambda: Torus((4,)).neighbour(3, 1, 1), "axis 1 is not one of the 1 axes"),
        (lambda: Torus((4,), False).ends(1), "link 1 does not exist"),
        (lambda: Links(0), "bytes_per_second must be a finite number > 0, not 0"),
        (lambda: Links(float("inf")), "not inf"),
        (lambda: Links(1e9, -1), "hop_seconds must be a finite number >= 0, not -1"),
        (lambda: Links("fast"), "not 'fast'"),
    ],
)
def test_bad_input(call, part):
    with pytest.raises(HardwareError) as fault:
        call()
    assert part in str(fault.value)


def line(*sizes, links=None):
    """Messages over one link, all ready at once."""
    torus = Torus((2,), False)
    plan = MessagePlan([np.zeros(len(sizes)), np.zeros(len(sizes))])
    plan.memory[0][:] = np.arange(len(sizes)) + 1
    for i, size in enumerate(sizes):
        plan.messages.append(Message(0, 1, torus.route(0, 1), (i,), (i,), Fraction(size)))
    return plan, simulate(torus, links or Links(10.0, 1.0), [plan])


def test_a_link_carries_one_message_at_a_time():
    plan, traffic = line(10, 20, 30)
    assert traffic.exact_seconds == 7  # 60 bytes at 10 per second, and one hop
    assert (traffic.total_link_bytes, traffic.max_link_bytes, traffic.messages) == (60, 60, 3)
    assert plan.memory[1].tolist() == [1, 2, 3]


def test_decimal_rates_are_exact():
    _, traffic = line(1, links=Links(0.1, 1e-6))
    assert traffic.exact_seconds == 10 + Fraction(1, 10**6)


def test_store_and_forward_and_first_come_first_served():
    torus = Torus((3,), False)
    plan = MessagePlan([np.zeros(2) for _ in range(3)])
    plan.memory[0][0], plan.memory[1][1] = 5, 6
    plan.messages = [
        Message(0, 2, torus.route(0, 2), (0,), (0,), Fraction(10)),
        Message(1, 2, torus.route(1, 2), (1,), (1,), Fraction(15)),
    ]
    traffic = simulate(torus, Links(10.0, 0.0), [plan])
    assert traffic.exact_seconds == Fraction(5, 2)  # the first waits 0.5 s for the second link
    assert plan.memory[2].tolist() == [5, 6]


def test_both_directions_of_a_link_are_independent():
    torus = Torus((2,), False)
    plan = MessagePlan([np.array([1.0, 0.0]), np.array([2.0, 0.0])])
    for node in (0, 1):
        plan.messages.append(Message(node, 1 - node, torus.route(node, 1 - node), (0,), (1,), Fraction(10)))
    assert simulate(torus, Links(10.0, 1.0), [plan]).exact_seconds == 2
    assert [memory[1] for memory in plan.memory] == [2.0, 1.0]


def test_messages_that_wait_for_each_other():
    torus = Torus((2,), False)
    plan = MessagePlan([np.zeros(1), np.zeros(1)])
    for node in (0, 1):
        route = torus.route(node, 1 - node)
        plan.messages.append(Message(node, 1 - node, route, (0,), (0,), Fraction(1), after=(1 - node,)))
    with pytest.raises(HardwareError, match="2 messages wait for each other"):
        simulate(torus, Links(1.0), [plan])
    plan.messages = [Message(0, 1, torus.route(0, 1), (0,), (0,), Fraction(-1))]
    with pytest.raises(HardwareError, match="negative number of bytes"):
        simulate(torus, Links(1.0), [plan])
