"""Closed forms for the time of collectives along one axis of a torus.

Every axis is (size n, wrap). Links are full duplex with B bytes/s each way and L seconds per hop. Along one
axis, with w bytes that each node contributes (all_gather) or keeps (reduce_scatter):

    oneway     (n-1)(L + w/B)              whole blocks, all in one direction of a ring
    halves     (n-1)(L + w/2B)             half of each block each way round
    shortest   floor(n/2) L + (n-1) w/2B   whole blocks both ways, the antipode's split
    line       (n-1)(L + w/B)              no wrap: whole blocks both ways

Several axes: the data is cut in one part per axis and each part takes the axes in another rotation, so
that all links work at once; stages end together, hence each lasts as long as its slowest part. An
all_reduce is a reduce_scatter and the all_gather that undoes it. `hardware.ring_plans` and
`hardware.point_plans` make the same algorithms of messages, and `hardware.events` runs them: the times
agree exactly.

An all_to_all moves along its axes in the same way; along one axis, b being the bytes for one node of it:

    ring       floor(n/2) L + floor(n^2/4) b/2B             blocks for further on travel together
    line       max over k of (n-1-k) L + (k+1)(n-1-k) b/B   each block by itself, the farthest first

On the line, link k carries (k+1)(n-1-k) blocks without a pause, and the last of them then has n-2-k hops to
go; k = n/2 - 1, the middle, gives the n^2/4 of the busiest link.

Sources: Chan et al., "Collective communication: theory, practice, and experience", 2007 (rings);
jax-ml/scaling-book sharding.md (rates on TPU axes); Jain and Sabharwal, "Optimal bucket algorithms for large
MPI collectives on torus interconnects", ICS 2010 (rotated parts).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hardware.checks import HardwareError, amount, one_of, whole
from hardware.collective_kinds import COLLECTIVE_KINDS
from hardware.events import Links, check_links

Axis = tuple[int, bool]
Algorithm = Literal["oneway", "halves", "shortest"]
Exchange = Literal["rotated", "phased"]


@dataclass(frozen=True)
class StagedTime:
    """Stages in sequence, each of parallel parts that take a + b * bytes seconds.

    Attributes:
      name: of the algorithm; hops: longest chain of links that a byte travels in sequence.
      stages: (a, b) of every part of each stage.
      busy: torus axis -> seconds per byte for which its busiest link is occupied.
    """

    name: str
    hops: int
    stages: tuple[tuple[tuple[float, float], ...], ...]
    busy: tuple[tuple[int, float], ...]

    def seconds(self, size: float) -> float:
        """Time for `size` bytes: every stage lasts as long as its slowest part.

        Example:
          >>> StagedTime("in turn", 2, (((1.0, 0.5), (2.0, 0.25)), ((1.0, 0.0),)), ()).seconds(8.0)
          6.0
        """
        return sum(max([a + b * size for a, b in parts]) for parts in self.stages)


ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
EXCHANGES: tuple[str, ...] = get_args(Exchange)


def ring_stage_seconds(own_bytes: float, axis: Axis, links: Links, algorithm: Algorithm = "shortest") -> float:
    """Seconds of one all_gather (or reduce_scatter) along one axis.

    Args:
      own_bytes: bytes that each node contributes (or keeps).
      axis: (size, wrap); without wrap every algorithm is the line's.
      links: rates of a link.
      algorithm: for a wrapped axis, "oneway", "halves" or "shortest".
    Returns: seconds; 0 for one node.
    Raises: HardwareError for a negative or non-finite size, an axis below 1, or an unknown algorithm.
    Example:
      >>> ring_stage_seconds(45e3, (4, True), Links(45e9), "oneway")
      6e-06
      >>> ring_stage_seconds(45e3, (4, True), Links(45e9)), ring_stage_seconds(45e3, (4, False), Links(45e9))
      (3.5e-06, 6e-06)

    Source: module docstring.
    """
    amount("bytes", own_bytes)
    check_links(links)
    one_of("ring algorithm", algorithm, ALGORITHMS)
    n, wire = check_axis(axis), own_bytes / links.bytes_per_second
    if not axis[1] or algorithm == "oneway":
        return (n - 1) * (links.hop_seconds + wire)
    if algorithm == "halves":
        return (n - 1) * (links.hop_seconds + wire / 2)
    return n // 2 * links.hop_seconds + (n - 1) * wire / 2


def exchange_paths(axis: Axis) -> tuple[tuple[int, float], ...]:
    """(hops, blocks) pairs of an all_to_all along one axis; its time is the maximum of hops * L + blocks * b/B.

    Raises: HardwareError as `check_axis`.
    Example:
      >>> exchange_paths((8, True)), exchange_paths((8, False))
      (((4, 8.0),), ((7, 7), (6, 12), (5, 15), (4, 16)))

    Source: module docstring.
    """
    n = check_axis(axis)
    if axis[1]:
        return ((n // 2, n * n // 4 / 2),)
    return tuple((n - 1 - k, (k + 1) * (n - 1 - k)) for k in range(n // 2))


def permute_seconds(payload_bytes: float, hops: int, links: Links, chunks: int = 1) -> float:
    """Seconds of a permute: every node sends its payload `hops` links away, all in the same direction.

    With one chunk: k (L + S/B). In P chunks over a free path: (P+k-1) S/(PB) + k L; but a
    shift of a whole ring by k > 1 shares each link k ways, for which the form with one chunk is exact.

    Example:
      >>> permute_seconds(2**24, 2, Links(45e9))
      0.0007476540444444445

    Source: store and forward; pipelining in P chunks is a textbook result.
    """
    amount("payload_bytes", payload_bytes)
    check_links(links)
    amount("hops", whole("hops", hops))
    amount("chunks", whole("chunks", chunks, low=1))
    if hops == 0:
        return 0.0
    wire = payload_bytes / links.bytes_per_second
    return (chunks + hops - 1) * wire / chunks + hops * links.hop_seconds


def ring_sent_bytes(kind: str, payload_bytes: float, n: int) -> float:
    """Bytes that one device sends for a collective over n devices in a ring.

    Args:
      kind: all_gather and reduce_scatter count the larger side (result, operand); the others the operand.
    Example:
      >>> ring_sent_bytes("all_reduce", 1024, 4), ring_sent_bytes("all_gather", 1024, 4)
      (1536.0, 768.0)
      >>> ring_sent_bytes("all_to_all", 1024, 4), ring_sent_bytes("collective_permute", 1024, 4)
      (768.0, 1024.0)

    Source: module docstring.
    """
    amount("payload_bytes", payload_bytes)
    whole("n", n, low=1)
    return COLLECTIVE_KINDS[one_of("collective", kind, COLLECTIVE_KINDS)].ring_share(n) * payload_bytes


def check_axis(axis: object) -> int:
    """The size of an axis (size, wrap).

    Raises: HardwareError for anything else, or a size below 1.
    """
    if not isinstance(axis, tuple) or len(axis) != 2 or not isinstance(axis[1], bool):
        raise HardwareError(f"an axis is (size, wrap), such as (16, True), not {axis!r}")
    size = whole("axis size", axis[0], low=1)
    if size > 2**31:
        raise HardwareError(f"axis size must be at most 2**31, not {size}")
    return size


def count_parts(parts: int | None, axes: int) -> int:
    """Number of parts in which the data is cut: as requested, by default one per axis.

    Raises: HardwareError for anything but 1, one per axis, or None.
    Example:
      >>> count_parts(None, 3), count_parts(1, 3)
      (3, 1)
    """
    if parts is None:
        return max(axes, 1)
    if type(parts) is not int or parts not in (1, axes):
        raise HardwareError(f"parts must be 1, or one per axis ({axes}), not {parts!r}")
    return parts
