"""Closed forms for the time of collectives on the axes of a torus.

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

import math
from collections.abc import Sequence
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
    Raises: HardwareError as `all_gather_seconds`.
    Example:
      >>> ring_stage_seconds(45e3, (4, True), Links(45e9), "oneway")
      6e-06
      >>> ring_stage_seconds(45e3, (4, True), Links(45e9)), ring_stage_seconds(45e3, (4, False), Links(45e9))
      (3.5e-06, 6e-06)

    Source: module docstring.
    """
    _check(own_bytes, [axis], links, algorithm)
    return _ring_stage(own_bytes, axis, links, algorithm)


def _ring_stage(own_bytes: float, axis: Axis, links: Links, algorithm: str) -> float:
    n, wrap = axis
    wire = own_bytes / links.bytes_per_second
    if not wrap or algorithm == "oneway":
        return (n - 1) * (links.hop_seconds + wire)
    if algorithm == "halves":
        return (n - 1) * (links.hop_seconds + wire / 2)
    return n // 2 * links.hop_seconds + (n - 1) * wire / 2


def all_gather_seconds(
    gathered_bytes: float,
    axes: Sequence[Axis],
    links: Links,
    algorithm: Algorithm = "shortest",
    parts: int | None = None,
) -> float:
    """Seconds of an all_gather: every node of a group obtains the blocks of all.

    Args:
      gathered_bytes: size of the result on one node; each contributes 1/N of it.
      axes: the axes of the group, each (size, wrap).
      parts: 1, or one per axis (default) with rotated orders.
    Returns: seconds.
    Raises: HardwareError for a negative or non-finite size, an axis below 1, an unknown algorithm, or
      other parts.
    Example:
      >>> all_gather_seconds(2**26, [(4, True)], Links(45e9), "oneway")  # torus_cases.json, case 0
      0.0011214810666666667
      >>> all_gather_seconds(100663296, [(4, True), (4, True)], Links(45e9))
      0.000528288

    Source: module docstring.
    """
    return _staged(gathered_bytes, axes, links, algorithm, parts, gathers=True)


def reduce_scatter_seconds(
    input_bytes: float, axes: Sequence[Axis], links: Links, algorithm: Algorithm = "shortest", parts: int | None = None
) -> float:
    """Seconds of a reduce_scatter: sum the operands of all nodes, one block on each. It is an all_gather run backwards.

    Args:
      input_bytes: size of the operand on one node; it keeps 1/N of it.
      axes, links, algorithm, parts: as `all_gather_seconds`.
    Example:
      >>> reduce_scatter_seconds(100663296, [(8, True), (4, True)], Links(45e9), "halves")
      0.0006256693333333333

    Source: module docstring.
    """
    return _staged(input_bytes, axes, links, algorithm, parts, gathers=False)


def _staged(
    size_bytes: float, axes: Sequence[Axis], links: Links, algorithm: str, parts: int | None, gathers: bool
) -> float:
    """Sum over stages of the slowest part's time. A node's share shrinks as it scatters and grows as it gathers."""
    sizes = _check(size_bytes, axes, links, algorithm)
    parts, count, total = count_parts(parts, len(sizes)), len(sizes), 0.0
    own = [size_bytes / parts / (math.prod(sizes) if gathers else 1)] * parts
    for stage in range(count):
        slowest = 0.0
        for part in range(parts):
            axis = (part + stage) % count
            if not gathers:
                own[part] /= sizes[axis]
            slowest = max(slowest, _ring_stage(own[part], axes[axis], links, algorithm))
            if gathers:
                own[part] *= sizes[axis]
        total += slowest
    return total


def all_reduce_seconds(
    payload_bytes: float,
    axes: Sequence[Axis],
    links: Links,
    algorithm: Algorithm = "shortest",
    parts: int | None = None,
) -> float:
    """Seconds of an all_reduce: a reduce_scatter, then an all_gather.

    Equal wrapped axes, halves: 2d(n-1)L + (N-1)S/(NdB) for d axes of n.

    Args:
      payload_bytes: size of the operand, and of the result, on one node.
      axes, links, algorithm, parts: as `all_gather_seconds`.
    Example:
      >>> all_reduce_seconds(98304, [(4, True), (4, True)], Links(45e9), "halves")
      1.3024e-05

    Source: module docstring.
    """
    return 2 * reduce_scatter_seconds(payload_bytes, axes, links, algorithm, parts)


def all_to_all_seconds(
    payload_bytes: float, axes: Sequence[Axis], links: Links, algorithm: Exchange = "rotated"
) -> float:
    """Seconds of an all_to_all, in which every node sends a different block to every other, one axis after the other.

    "rotated": one part per axis (of more than one node), each part in another rotation of the axes. "phased": all
    data takes the axes in turn, and on a line too all blocks that go further travel together, which makes
    (n-1) L + n (n-1) b / (2B) of it.

    Args:
      payload_bytes: what one node sends in all, its own block included: N blocks.
      axes, links: as `all_gather_seconds`.
      algorithm: "rotated" or "phased".
    Example:
      >>> all_to_all_seconds(2**25, [(4, True)], Links(45e9))
      0.0003748270222222222
      >>> axes = [(4, False), (4, False)]
      >>> [f"{all_to_all_seconds(2**22, axes, Links(45e9), way) * 1e6:.0f} us" for way in EXCHANGES]
      ['97 us', '286 us']

    Source: module docstring; the bound of busiest links is `all_to_all_bound_seconds`.
    """
    sizes = _check(payload_bytes, axes, links)
    one_of("all_to_all algorithm", algorithm, EXCHANGES)
    moving = [(n, wrap) for n, (_, wrap) in zip(sizes, axes, strict=True) if n > 1]
    parts = max(len(moving), 1) if algorithm == "rotated" else 1
    times = []
    for n, wrap in moving:
        block = payload_bytes / parts / n / links.bytes_per_second
        paths = exchange_paths((n, wrap)) if wrap or algorithm == "rotated" else ((n - 1, n * (n - 1) / 2),)
        times.append(max([hops * links.hop_seconds + blocks * block for hops, blocks in paths]))
    return parts * max(times, default=0.0) if algorithm == "rotated" else sum(times)


def exchange_paths(axis: Axis) -> tuple[tuple[int, float], ...]:
    """(hops, blocks) pairs of an all_to_all along one axis; its time is the maximum of hops * L + blocks * b/B.

    Raises: HardwareError as `all_gather_seconds`.
    Example:
      >>> exchange_paths((8, True)), exchange_paths((8, False))
      (((4, 8.0),), ((7, 7), (6, 12), (5, 15), (4, 16)))

    Source: module docstring.
    """
    n = check_axis(axis)
    if axis[1]:
        return ((n // 2, n * n // 4 / 2),)
    return tuple((n - 1 - k, (k + 1) * (n - 1 - k)) for k in range(n // 2))


def all_to_all_bound_seconds(payload_bytes: float, axes: Sequence[Axis], links: Links) -> float:
    """Lower bound on the time of an all_to_all: bytes over the busiest link when every block takes a shortest path.

    Wrapped, even n_i: max N b n_i / (8B); without wrap twice that.

    Example:
      >>> all_to_all_bound_seconds(65536, [(8, False), (4, False)], Links(45e9))
      2.912711111111111e-06

    Source: Dally and Towles, "Principles and Practices of Interconnection Networks", section 3.3.
    """
    sizes = _check(payload_bytes, axes, links)
    worst = 0.0
    for n, (_, wrap) in zip(sizes, axes, strict=True):
        pairs = n * n // 4 / 2 if wrap else n // 2 * ((n + 1) // 2)
        worst = max(worst, pairs * payload_bytes / n / links.bytes_per_second)
    return worst


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


def broadcast_seconds(
    payload_bytes: float,
    axes: Sequence[Axis],
    links: Links,
    algorithm: Literal["tree", "halves"] = "tree",
    chunks: int = 16,
) -> float:
    """Seconds of a broadcast of one node's payload in P chunks: (P+D-1) S/(PB) + D L.

    "tree": axis after axis, both ways; D is the diameter (n-1 on a line, root at its end). "halves": one half
    of the payload each way round all rings; D is the sum of n-1 and S is halved. Needs wraps.

    Example:
      >>> broadcast_seconds(2**24, [(4, True)], Links(45e9), "tree", chunks=1)
      0.0007476540444444445
      >>> broadcast_seconds(2**24, [(4, True), (4, True)], Links(45e9), "halves")
      0.00025066773333333334

    Source: as `permute_seconds`.
    """
    sizes = _check(payload_bytes, axes, links)
    whole("chunks", chunks, low=1)
    one_of("broadcast algorithm", algorithm, ("tree", "halves"))
    if algorithm == "tree":
        depth = sum(n // 2 if wrap else n - 1 for n, (_, wrap) in zip(sizes, axes, strict=True))
    else:
        if not all(wrap or n == 1 for n, wrap in axes):
            raise HardwareError(f"broadcast by halves needs rings; these axes do not all wrap: {list(axes)}")
        depth, payload_bytes = sum(sizes) - len(sizes), payload_bytes / 2
    return permute_seconds(payload_bytes, depth, links, chunks)


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


def _check(size_bytes: float, axes: Sequence[Axis], links: Links, algorithm: str = "shortest") -> list[int]:
    """Validate the arguments; return the sizes of the axes."""
    amount("bytes", size_bytes)
    check_links(links)
    one_of("ring algorithm", algorithm, ALGORITHMS)
    if not isinstance(axes, (list, tuple)):
        raise HardwareError(f"axes are a list of (size, wrap), such as [(16, True)], not {axes!r}")
    return [check_axis(axis) for axis in axes]


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
