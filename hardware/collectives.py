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

Sources: Chan et al., "Collective communication: theory, practice, and experience", 2007 (rings);
jax-ml/scaling-book sharding.md (rates on TPU axes); Jain and Sabharwal, "Optimal bucket algorithms for large
MPI collectives on torus interconnects", ICS 2010 (rotated parts).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

from hardware.checks import amount, whole
from hardware.errors import HardwareError
from hardware.events import Links

Axis = tuple[int, bool]
Algorithm = Literal["oneway", "halves", "shortest"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)


def ring_stage_seconds(own_bytes: float, axis: Axis, links: Links, algorithm: Algorithm = "shortest") -> float:
    """One all_gather (or reduce_scatter) along one axis.

    Args:
      own_bytes: bytes that each node contributes (or keeps).
      axis: (size, wrap); without wrap every algorithm is the line's.
      links: rates of a link.
      algorithm: for a wrapped axis, "oneway", "halves" or "shortest".
    Returns: seconds; 0 for one node.
    Example:
      >>> ring_stage_seconds(45e3, (4, True), Links(45e9), "oneway")
      6e-06
      >>> ring_stage_seconds(45e3, (4, True), Links(45e9)), ring_stage_seconds(45e3, (4, False), Links(45e9))
      (3.5e-06, 6e-06)

    Source: module docstring.
    """
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
    """Every node of a group obtains the blocks of all.

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
    sizes = _check(gathered_bytes, axes, algorithm)
    parts = count_parts(parts, len(axes))
    total = 0.0
    for stage in range(len(axes)):
        slowest = 0.0
        for part in range(parts):
            order = [(part + j) % len(axes) for j in range(len(axes))]
            later = math.prod(sizes[axis] for axis in order[stage:])
            own = gathered_bytes / parts / later
            slowest = max(slowest, ring_stage_seconds(own, axes[order[stage]], links, algorithm))
        total += slowest
    return total


def reduce_scatter_seconds(
    input_bytes: float,
    axes: Sequence[Axis],
    links: Links,
    algorithm: Algorithm = "shortest",
    parts: int | None = None,
) -> float:
    """Sum the operands of all nodes and leave each one block: the all_gather run backwards.

    Args:
      input_bytes: size of the operand on one node; it keeps 1/N of it.
      axes, links, algorithm, parts: as `all_gather_seconds`.
    Example:
      >>> reduce_scatter_seconds(100663296, [(8, True), (4, True)], Links(45e9), "halves")
      0.0006256693333333333

    Source: module docstring.
    """
    sizes = _check(input_bytes, axes, algorithm)
    parts = count_parts(parts, len(axes))
    total = 0.0
    for stage in range(len(axes)):
        slowest = 0.0
        for part in range(parts):
            order = [(part + j) % len(axes) for j in range(len(axes))]
            own = input_bytes / parts / math.prod(sizes[axis] for axis in order[: stage + 1])
            slowest = max(slowest, ring_stage_seconds(own, axes[order[stage]], links, algorithm))
        total += slowest
    return total


def all_reduce_seconds(
    payload_bytes: float,
    axes: Sequence[Axis],
    links: Links,
    algorithm: Algorithm = "shortest",
    parts: int | None = None,
) -> float:
    """Sum the operands of all nodes and leave all of it everywhere: reduce_scatter, then all_gather.

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


def all_to_all_seconds(payload_bytes: float, axes: Sequence[Axis], links: Links) -> float:
    """Every node sends a different block to every other, in phases along one axis after the other.

    In phase j a node passes on, each way, all blocks that travel at least j hops. On a ring of even n with
    b bytes per pair: n/2 L + n^2 b / (8B). On a line, where blocks for all later nodes go one way:
    (n-1) L + n (n-1) b / (2B).

    Args:
      payload_bytes: what one node sends in all, its own block included: N blocks.
      axes, links: as `all_gather_seconds`.
    Example:
      >>> all_to_all_seconds(2**25, [(4, True)], Links(45e9))
      0.0003748270222222222

    Source: module docstring; the bound of busiest links is `all_to_all_bound_seconds`.
    """
    sizes = _check(payload_bytes, axes)
    total = 0.0
    for n, (_, wrap) in zip(sizes, axes, strict=True):
        block = payload_bytes / n / links.bytes_per_second
        if wrap:
            total += n // 2 * links.hop_seconds + n * n // 4 * block / 2
        else:
            total += (n - 1) * links.hop_seconds + n * (n - 1) / 2 * block
    return total


def all_to_all_bound_seconds(payload_bytes: float, axes: Sequence[Axis], links: Links) -> float:
    """No all_to_all is faster: bytes over the busiest link, if every block takes a shortest way.

    Wrapped, even n_i: max N b n_i / (8B); without wrap twice that.

    Example:
      >>> all_to_all_bound_seconds(65536, [(8, False), (4, False)], Links(45e9))
      2.912711111111111e-06

    Source: Dally and Towles, "Principles and Practices of Interconnection Networks", section 3.3.
    """
    sizes = _check(payload_bytes, axes)
    worst = 0.0
    for n, (_, wrap) in zip(sizes, axes, strict=True):
        pairs = n * n // 4 / 2 if wrap else n // 2 * ((n + 1) // 2)
        worst = max(worst, pairs * payload_bytes / n / links.bytes_per_second)
    return worst


def permute_seconds(payload_bytes: float, hops: int, links: Links, chunks: int = 1) -> float:
    """Every node sends its payload `hops` links away, all in the same direction.

    With one chunk: k (L + S/B). In P chunks over a free path: (P+k-1) S/(PB) + k L; but a
    shift of a whole ring by k > 1 shares each link k ways, for which the form with one chunk is exact.

    Example:
      >>> permute_seconds(2**24, 2, Links(45e9))
      0.0007476540444444445

    Source: store and forward; pipelining in P chunks is a textbook result.
    """
    amount("payload_bytes", payload_bytes)
    whole("hops", hops)
    whole("chunks", chunks, low=1)
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
    """One node's payload to all, in P chunks: (P+D-1) S/(PB) + D L.

    "tree": axis after axis, both ways; D is the diameter (n-1 on a line, root at its end). "halves": one half
    of the payload each way round all rings; D is the sum of n-1 and S is halved. Needs wraps.

    Example:
      >>> broadcast_seconds(2**24, [(4, True)], Links(45e9), "tree", chunks=1)
      0.0007476540444444445
      >>> broadcast_seconds(2**24, [(4, True), (4, True)], Links(45e9), "halves")
      0.00025066773333333334

    Source: as `permute_seconds`.
    """
    sizes = _check(payload_bytes, axes)
    whole("chunks", chunks, low=1)
    if algorithm == "tree":
        depth = sum(n // 2 if wrap else n - 1 for n, (_, wrap) in zip(sizes, axes, strict=True))
    elif algorithm == "halves":
        if not all(wrap or n == 1 for n, wrap in axes):
            raise HardwareError(f"broadcast by halves goes round rings; these axes do not all wrap: {list(axes)}")
        depth, payload_bytes = sum(sizes) - len(sizes), payload_bytes / 2
    else:
        raise HardwareError(f"unknown broadcast algorithm {algorithm!r}; use tree or halves")
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
    share = (whole("n", n, low=1) - 1) / n
    times = {"all_gather": share, "reduce_scatter": share, "all_reduce": 2 * share, "all_to_all": share}
    times |= {"collective_permute": float(n > 1), "broadcast": float(n > 1)}
    if kind not in times:
        raise HardwareError(f"unknown collective {kind!r}; use one of {', '.join(times)}")
    return times[kind] * payload_bytes


def _check(size_bytes: float, axes: Sequence[Axis], algorithm: str = "shortest") -> list[int]:
    """The sizes of the axes of a legal call."""
    amount("bytes", size_bytes)
    if algorithm not in ALGORITHMS:
        raise HardwareError(f"unknown ring algorithm {algorithm!r}; use one of {', '.join(ALGORITHMS)}")
    sizes = []
    for axis in axes:
        if not isinstance(axis, tuple) or len(axis) != 2 or not isinstance(axis[1], bool):
            raise HardwareError(f"an axis is (size, wrap), such as (16, True), not {axis!r}")
        sizes.append(whole("axis size", axis[0], low=1))
    return sizes


def count_parts(parts: int | None, axes: int) -> int:
    """Parts in which data is cut for that many axes: as asked, or one per axis.

    Raises: HardwareError for anything but 1, one per axis, or None.
    Example:
      >>> count_parts(None, 3), count_parts(1, 3)
      (3, 1)
    """
    if parts is None:
        return max(axes, 1)
    if parts not in (1, axes) or isinstance(parts, bool):
        raise HardwareError(f"parts must be 1, or one per axis ({axes}), not {parts!r}")
    return parts
