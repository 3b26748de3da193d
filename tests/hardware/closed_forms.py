"""Closed forms for the time of collectives on tori: what prices and events are compared with."""

from __future__ import annotations

import itertools
import math

import numpy as np

from hardware import collectives
from hardware.numerics import ring_reduce_scatter
from hardware.snakes import hop_length
from hardware.twisted import ring_lengths, total_distance


def all_gather_seconds(gathered_bytes, axes, links, algorithm="shortest", parts=None):
    """Seconds until every node of a group has the blocks of all: rings on each axis, in `parts` rotated orders.

    >>> from hardware import Links
    >>> all_gather_seconds(2**26, [(4, True)], Links(45e9), "oneway")  # torus_cases.json, case 0
    0.0011214810666666667
    >>> all_gather_seconds(100663296, [(4, True), (4, True)], Links(45e9))
    0.000528288
    """
    return _staged(gathered_bytes, axes, links, algorithm, parts, gathers=True)


def reduce_scatter_seconds(input_bytes, axes, links, algorithm="shortest", parts=None):
    """Seconds of a reduce_scatter: an all_gather run backwards.

    >>> from hardware import Links
    >>> reduce_scatter_seconds(100663296, [(8, True), (4, True)], Links(45e9), "halves")
    0.0006256693333333333
    """
    return _staged(input_bytes, axes, links, algorithm, parts, gathers=False)


def _staged(size_bytes, axes, links, algorithm, parts, gathers):
    """Sum over stages of the slowest part's time. A node's share shrinks as it scatters and grows as it gathers."""
    sizes = [n for n, _ in axes]
    parts, count, total = collectives.count_parts(parts, len(sizes)), len(sizes), 0.0
    own = [size_bytes / parts / (math.prod(sizes) if gathers else 1)] * parts
    for stage in range(count):
        slowest = 0.0
        for part in range(parts):
            axis = (part + stage) % count
            if not gathers:
                own[part] /= sizes[axis]
            slowest = max(slowest, collectives.ring_stage_seconds(own[part], axes[axis], links, algorithm))
            if gathers:
                own[part] *= sizes[axis]
        total += slowest
    return total


def all_reduce_seconds(payload_bytes, axes, links, algorithm="shortest", parts=None):
    """Seconds of a reduce_scatter and an all_gather; d equal wrapped axes of n, halves: 2d(n-1)L + (N-1)S/(NdB).

    >>> from hardware import Links
    >>> all_reduce_seconds(98304, [(4, True), (4, True)], Links(45e9), "halves")
    1.3024e-05
    """
    return 2 * reduce_scatter_seconds(payload_bytes, axes, links, algorithm, parts)


def all_to_all_seconds(payload_bytes, axes, links, algorithm="rotated"):
    """Seconds of an all_to_all, one axis after the other.

    "rotated": one part per axis (of more than one node), each part in another rotation of the axes. "phased": all
    data takes the axes in turn, and on a line too all blocks that go further travel together, which makes
    (n-1) L + n (n-1) b / (2B) of it.

    >>> from hardware import Links
    >>> all_to_all_seconds(2**25, [(4, True)], Links(45e9))
    0.0003748270222222222
    """
    moving = [(n, wrap) for n, wrap in axes if n > 1]
    parts = max(len(moving), 1) if algorithm == "rotated" else 1
    times = []
    for n, wrap in moving:
        block = payload_bytes / parts / n / links.bytes_per_second
        joined = ((n - 1, n * (n - 1) / 2),)
        paths = collectives.exchange_paths((n, wrap)) if wrap or algorithm == "rotated" else joined
        times.append(max([hops * links.hop_seconds + blocks * block for hops, blocks in paths]))
    return parts * max(times, default=0.0) if algorithm == "rotated" else sum(times)


def all_to_all_bound_seconds(payload_bytes, axes, links):
    """Bytes over the busiest link when every block takes a shortest path: wrapped, even n_i, max N b n_i / (8B).

    Source: Dally and Towles, "Principles and Practices of Interconnection Networks", section 3.3.
    """
    pairs = [n * n // 4 / 2 / n if wrap else n // 2 * ((n + 1) // 2) / n for n, wrap in axes]
    return max([0.0, *pairs]) * payload_bytes / links.bytes_per_second


def broadcast_seconds(payload_bytes, axes, links, algorithm="tree", chunks=16):
    """Seconds of a broadcast of one node's payload in P chunks: (P+D-1) S/(PB) + D L.

    "tree": axis after axis, both ways; D is the diameter (n-1 on a line, root at its end). "halves": one half of
    the payload each way round all rings; D is the sum of n-1 and S is halved.
    """
    if algorithm == "tree":
        depth = sum(n // 2 if wrap else n - 1 for n, wrap in axes)
        return collectives.permute_seconds(payload_bytes, depth, links, chunks)
    return collectives.permute_seconds(payload_bytes / 2, sum(n - 1 for n, _ in axes), links, chunks)


def twisted_all_gather_seconds(gathered_bytes, shape, links, algorithm="shortest"):
    """Seconds of an all_gather on a twisted torus: one part per axis, in rotated orders."""
    own, total = gathered_bytes / len(shape) / math.prod(shape), 0.0
    for n in ring_lengths(shape):
        total += collectives.ring_stage_seconds(own, (n, True), links, algorithm)
        own *= n
    return total


def twisted_all_to_all_seconds(payload_bytes, shape, links):
    """Seconds of an all_to_all on a twisted torus: one part per axis, in rotated orders."""
    return sum(
        all_to_all_seconds(payload_bytes / len(shape), [(n, True)], links, "phased") for n in ring_lengths(shape)
    )


def twisted_all_to_all_bound_seconds(payload_bytes, shape, links):
    """Lower bound on a twisted torus: all hops spread over all links equally. Jouppi et al. 2023, figure 6.

    >>> from hardware import Links
    >>> plain = all_to_all_bound_seconds(2**28, [(4, True), (4, True), (8, True)], Links(45e9))
    >>> f"{plain / twisted_all_to_all_bound_seconds(2**28, (4, 4, 8), Links(45e9)):.2f}"  # TPU v4 reached 1.63
    '1.75'
    """
    block = payload_bytes / math.prod(shape)
    return total_distance(shape) * block / (2 * len(shape)) / links.bytes_per_second


def snake_orders(sizes):
    """All snake orders of a box: every nesting of its axes, plain and with a column for the way back.

    >>> next(snake_orders([2, 2]))
    ((0, 0), (0, 1), (1, 1), (1, 0))
    """
    for order in itertools.permutations(range(len(sizes))):
        nested = [sizes[axis] for axis in order]
        paths = [_snake(nested)]
        if len(nested) > 1 and nested[0] > 1 and nested[-1] > 2 and math.prod(nested[:-1]) % 2 == 0:
            paths.append(_with_way_back(nested))
        for path in paths:
            yield tuple(tuple(place[order.index(axis)] for axis in range(len(order))) for place in path)


def snake_ring(axes):
    """The first snake order of a box, of axes (size, wrap), whose ends are neighbours; None where no snake closes.

    >>> snake_ring([(2, False), (3, False)])
    ((0, 0), (0, 1), (0, 2), (1, 2), (1, 1), (1, 0))
    >>> snake_ring([(3, False), (3, False)]) is None
    True
    """
    return next((path for path in snake_orders([n for n, _ in axes]) if hop_length(path[-1], path[0], axes) <= 1), None)


def _snake(sizes):
    """Boustrophedon order: the last axis runs fastest and reverses at its ends."""
    path = [()]
    for size in reversed(sizes):
        path = [(i, *rest) for i in range(size) for rest in (path if i % 2 == 0 else reversed(path))]
    return path


def _with_way_back(sizes):
    """A snake over all but position 0 of the last axis, then back along position 0; an even number of rows."""
    *outer, last = sizes
    rows, path = _snake(outer), []
    for i, row in enumerate(rows):
        path += [(*row, j) for j in (range(1, last) if i % 2 == 0 else range(last - 1, 0, -1))]
    return path + [(*row, 0) for row in reversed(rows)]


def ring_reduce(parts, op="sum", carry=None):
    """The result of an all_reduce of arrays in ring order: the flattened data in k chunks, each in its own order.

    >>> ring_reduce([np.int32([1, 2, 3]), np.int32([10, 20, 30])]).tolist()
    [11, 22, 33]
    """
    chunks = ring_reduce_scatter([np.reshape(part, -1) for part in parts], 0, op, carry)
    return np.concatenate(chunks).reshape(np.shape(parts[0]))


def young_seconds(checkpoint_seconds, mean_time_between_failures):
    """Young's estimate of the work between checkpoints that takes the least time: sqrt(2 d M)."""
    return math.sqrt(2 * checkpoint_seconds * mean_time_between_failures)


def host_bytes_per_second(slice_):
    """Achieved DCN bandwidth of one host: its chips' shares together."""
    chips = min(slice_.chip.chips_per_host, slice_.chips // slice_.slices)
    return chips * slice_.chip.dcn_bytes_per_second * slice_.chip.dcn_efficiency
