"""Collectives over several slices: two levels beside prices, beside events, and beside one ring."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware import HardwareError, Links, Slice, Torus, collective_cost
from hardware.chunks import chunked_seconds
from hardware.dcn import TwoLevels, all_reduce_over, host_bytes_per_second, one_ring_seconds
from hardware.events import Message, MessagePlan, simulate
from hardware.placement import DCN, Placement, PlacementFactor
from tests.effort import draws


@settings(max_examples=draws(40, 1000), deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9))
def test_chunks_take_what_events_do(ici, dcn, chunks):
    """A chunk crosses ICI, DCN and ICI again; each serves one chunk at a time, first come first served."""
    torus = Torus((2,), False)
    plan = MessagePlan([np.zeros(1), np.zeros(1)])
    ici_link, dcn_link = torus.link(0, 0, 1), torus.link(1, 0, -1)
    stages = [(ici_link, ici, ()), (dcn_link, dcn, (0,)), (ici_link, ici, (chunks,))]
    for number, (link, seconds, waits) in enumerate(stages):
        for chunk in range(chunks):
            after = tuple(first + chunk for first in waits)
            plan.messages.append(Message(0, 1, (link,), (0,), (0,), Fraction(seconds), after, stage=number))
    want = simulate(torus, Links(1.0, 0.0), [plan]).seconds
    assert TwoLevels(float(ici), dcn / 2, chunks).seconds == pytest.approx(want)


@settings(max_examples=draws(40, 1000), deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.booleans())
def test_two_stages_in_chunks_take_what_events_do(ici, dcn, chunks, gathers):
    """A gather crosses DCN, then ICI; a scatter ICI, then DCN."""
    torus = Torus((2,), False)
    plan = MessagePlan([np.zeros(1), np.zeros(1)])
    stages = [(torus.link(0, 0, 1), ici), (torus.link(1, 0, -1), dcn)][:: -1 if gathers else 1]
    for number, (link, seconds) in enumerate(stages):
        for chunk in range(chunks):
            after = (chunk,) if number else ()
            plan.messages.append(Message(0, 1, (link,), (0,), (0,), Fraction(seconds), after, stage=number))
    want = simulate(torus, Links(1.0, 0.0), [plan]).seconds
    kind = "all_gather" if gathers else "reduce_scatter"
    assert chunked_seconds(kind, float(ici), float(dcn), chunks) == pytest.approx(want)


@settings(max_examples=draws(15, 1000), deadline=None)
@given(
    st.sampled_from(["2*v5e-256", "4*v5p-1024", "3*v4-4x4x8_twisted", "2*v3-32", "8*v6e-64"]), st.integers(1, 10**10)
)
def test_the_best_chunks_cost_what_a_program_is_charged(name, size):
    slice_ = Slice(name)
    rest = tuple(PlacementFactor(axis, n, 1) for axis, n in enumerate(slice_.torus_shape) if n > 1)
    cores = (PlacementFactor(-1, slice_.chip.devices_per_chip, 1),) if slice_.chip.devices_per_chip > 1 else ()
    placement = Placement(slice_, (("slices", (PlacementFactor(DCN, slice_.slices, 1),)), ("inside", (*rest, *cores))))
    cost = collective_cost(placement, "all_reduce", ["slices", "inside"], float(size))
    levels = all_reduce_over(slice_, size)
    if not cores:  # cores of a chip take their part before chunks are cut
        assert (levels.seconds, levels.chunks) == (pytest.approx(cost.seconds, rel=1e-9), cost.chunks)
    assert cost.seconds <= all_reduce_over(slice_, size, 1).seconds * (1 + 1e-9)


@pytest.mark.parametrize("name", ["2*v5e-256", "4*v5p-1024", "2*v4-64"])
def test_levels_and_chunks_pay(name):
    two = all_reduce_over(name, 1e9, 1)
    assert 10 * two.seconds < one_ring_seconds(name, 1e9)
    cut = [all_reduce_over(name, 1e9, chunks).seconds for chunks in (1, 2, 8)]
    assert max(cut[1:]) < cut[0]
    assert min(cut) >= max(two.ici_seconds, two.dcn_seconds) * (1 - 1e-9)


def test_what_a_slice_sends_is_what_its_hosts_send():
    """6.4 Tbit/s per pod of v5e: docs.cloud.google.com/tpu/docs/v5e; half of it is reached."""
    slice_ = Slice("v5e-256")
    whole = slice_.hosts * host_bytes_per_second(slice_)
    assert whole / slice_.chip.dcn_efficiency * 8 == pytest.approx(6.4e12)
    wire = all_reduce_over("2*v5e-256", 1e9, 1)
    assert wire.dcn_seconds - 2 * slice_.chip.dcn_hop_seconds == pytest.approx(
        1e9 / whole
    )  # 2 (k-1)/k of two slices is 1
    assert host_bytes_per_second("v5e-4") == host_bytes_per_second("v5e-8") / 2


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: all_reduce_over("v5e-256", 1), "v5e-256 is one slice; name several, such as 2*v5e-256"),
        (lambda: all_reduce_over("2*v5e-256", -1), "payload_bytes must be a finite number >= 0, not -1"),
        (lambda: all_reduce_over("2*v5e-256", 1, 0), "chunks must be an integer >= 1, not 0"),
    ],
    ids=["one slice", "bytes", "chunks"],
)
def test_bad_input(call, part):
    with pytest.raises(HardwareError) as fault:
        call()
    assert part in str(fault.value)
