"""Rows of micro-benchmarks in the words that they come in: what is built, and its time against bandwidths by hand."""

from __future__ import annotations

import pytest

from meshlib.validation.micro import kind_of, priced
from meshlib.validation.policies import NotExpressed

V5E_LINK = 0.9 * 50e9  # bytes per second and direction
V5P_HBM = 2765e9


def seconds_of(given):
    """(predicted, measured) seconds of a row."""
    found = priced(given)
    return found.predicted_seconds, found.measured_seconds


def row(op, measured=None, chip="v5e", topology=None, precision=None, **model):
    found = {"chip": chip, "model": {"op": op, **model}, "measured": measured or {"time_us": 1000}}
    return found | ({"slice": {"topology": topology}} if topology else {}) | ({"precision": precision or ""})


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("psum_scatter over a group of 4", "reduce_scatter"),
        ("All-gather over a group of 4", "all_gather"),
        ("all-reduce", "all_reduce"),
        ("ppermute to the next", "collective_permute"),
        ("HBM triad", "HBM triad"),
        ("HBM bandwidth", "HBM copy"),
        ("gemm", "matmul"),
        ("broadcast", ""),
    ],
)
def test_kinds(op, kind):
    assert kind_of(row(op)) == kind


@pytest.mark.parametrize(("stream", "arrays"), [("read", 1), ("write", 1), ("copy", 2), ("add", 3), ("triad", 3)])
def test_streams_move_as_many_bytes_as_the_rate_counts(stream, arrays):
    size = 1 << 28
    predicted, measured = seconds_of(row(f"HBM {stream}", {"gbytes_per_s": 2400.0}, "v5p", bytes=size))
    assert measured == pytest.approx(arrays * size / 2400e9)
    assert arrays * size / V5P_HBM < predicted < arrays * size / V5P_HBM / 0.85


def test_rates_of_a_chip_are_those_of_its_devices():
    for key, rate in (("gbytes_per_s_per_chip", 6400.0), ("gbytes_per_s_per_core", 3200.0)):
        assert seconds_of(row("HBM copy", {key: rate}, "v7", bytes=1 << 28))[1] == pytest.approx(2**29 / 3200e9)
    given = {"tflops_per_s_per_chip": 1600.0}
    assert seconds_of(row("matmul", given, "v7", precision="bf16", n=4096))[1] == pytest.approx(2 * 4096**3 / 800e12)


def test_products_by_their_sizes_and_by_their_text():
    by_size = seconds_of(row("matmul", m=1024, k=4096, n=8192, precision="bf16"))
    by_text = seconds_of(row("matmul bf16[1024,4096] x bf16[4096,8192]", precision="bf16"))
    assert by_size == by_text
    with pytest.raises(NotExpressed, match="sizes of its product are not stated"):
        seconds_of(row("matmul"))


def test_products_in_eight_bits_take_half_the_time():
    plain, _ = seconds_of(row("matmul", precision="bf16", n=8192))
    small, _ = seconds_of(row("matmul", precision="int8 in, int32 accumulate", n=8192))
    assert small / plain == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize(
    ("op", "links"),
    # On a ring of 4 chips through 2 x 2, both ways round: 3/4 of the bytes each pass; a block of 1/1 to the next chip.
    [("psum", 1.5), ("reduce_scatter", 0.75), ("all_gather", 0.75)],
)
def test_collectives_take_what_their_bytes_take(op, links):
    size = 1 << 27
    predicted, _ = seconds_of(row(f"{op} over a group of 4, bf16", topology="2x2", bytes=size))
    assert predicted == pytest.approx(links * size / (2 * V5E_LINK), rel=0.02)


def test_a_permutation_alone():
    """One block to the next chip; the copy of what arrived is not part of it."""
    size = 1 << 26
    predicted, _ = seconds_of(row("ppermute over a group of 4, f32", topology=[2, 2], input_bytes=size))
    assert size / (2 * V5E_LINK) < predicted < 1.05 * size / V5E_LINK


def test_sizes_of_collectives():
    same = [
        {"input_bytes": 1 << 24},
        {"output_bytes": 1 << 26},
        {"bytes": 1 << 26},
        {"input_elements": 1 << 23},
        {"output_elements": 1 << 25},
    ]
    times = {seconds_of(row("all_gather bf16 over 4", topology="2x2", **size))[0] for size in same}
    assert len(times) == 1
    # All devices, where no group is stated.
    assert seconds_of(row("all_gather bf16", topology="2x2", bytes=1 << 26))[0] in times


def test_the_naive_rule_is_the_roofline():
    size = 1 << 28
    copied, gathered = row("HBM copy", bytes=size), row("all_gather over 4, bf16", topology="2x2", bytes=size)
    assert priced(copied).roofline_seconds == pytest.approx(2 * size / 819e9)
    assert priced(gathered).roofline_seconds == pytest.approx(0.75 * size / 50e9)
    product = row("matmul", chip="v7", precision="bf16", n=8192)
    assert priced(product).roofline_seconds == pytest.approx(2 * 8192**3 / (2307e12 / 2))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (row("psum over 4", topology="2x2"), "its size is not stated"),
        (row("HBM copy"), "its size is not stated"),
        (row("psum over 4", bytes=1), "its topology is not stated"),
        (row("psum bf16", chip="v7", topology="2x2x1", bytes=1 << 20), "size of its group is not stated"),
        (row("psum over 3", topology="2x2", bytes=1), "groups of 3 do not divide the 4 devices"),
        (row("psum over 4", {"gbytes_per_s": 9}, topology="2x2", bytes=1 << 20), "which bytes its rate counts"),
        (row("psum over 4", {"algbw": 9}, topology="2x2", bytes=1 << 20), "no time, and no rate"),
    ],
)
def test_what_is_not_stated(given, why):
    with pytest.raises(NotExpressed, match=why):
        seconds_of(given)
