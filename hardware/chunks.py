"""Collectives over ICI and DCN in chunks: one chunk crosses ICI while another crosses DCN.

With a seconds of ICI and d seconds of DCN per chunk and direction, P chunks take

    all_reduce                   max(2a + 2 P d, 2 P a)   all chunks are scattered before the first is gathered
    all others, two stages       a + d + (P-1) max(a, d)

Programs are priced with the fastest number in `CHUNKS`; each chunk pays the latency of the hops again.

Source: Cho et al., "BlueConnect", MLSys 2019, and Kumar et al., arXiv:2011.03641 (two levels); the closed forms are
those of pipelines of two and three stages, tested against events.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hardware import collectives
from hardware.chips import Chip
from hardware.collective_kinds import COLLECTIVE_KINDS
from hardware.collectives import StagedTime

CHUNKS = (1, 2, 4, 8, 16)


def chunked_seconds(kind: str, ici_seconds: float, dcn_seconds: float, chunks: int) -> float:
    """Seconds of a collective over two levels in chunks; `ici_seconds` and `dcn_seconds` are of one chunk, one way.

    Example:
      >>> [chunked_seconds(kind, 1.0, 2.0, 4) for kind in ("all_reduce", "all_gather")]
      [18.0, 9.0]

    Source: module docstring.
    """
    if len(COLLECTIVE_KINDS[kind].phases) > 1:
        return max(2 * ici_seconds + 2 * chunks * dcn_seconds, 2 * chunks * ici_seconds)
    return ici_seconds + dcn_seconds + (chunks - 1) * max(ici_seconds, dcn_seconds)


def best_chunks(
    chip: Chip, kind: str, ways: Sequence[StagedTime], group: tuple[int, int], size: float
) -> tuple[int, float]:
    """(number of chunks, seconds) of the fastest chunked collective over ICI and DCN.

    Args:
      ways: alternative stage times of one direction within a slice.
      group: (devices within a slice, slices).
      size: payload bytes on one device.
    """

    def seconds(chunks: int) -> float:
        part = size / chunks
        ici = min(staged.seconds(part) for staged in ways)
        between = part if COLLECTIVE_KINDS[kind].moves_all else part / group[0]
        return chunked_seconds(kind, ici, dcn_seconds(chip, group[1], between), chunks)

    return min(((chunks, seconds(chunks)) for chunks in CHUNKS), key=lambda pair: pair[1])


def dcn_rate(chip: Chip) -> float:
    """Achieved DCN bandwidth of one device, bytes per second."""
    return chip.dcn_bytes_per_second * chip.dcn_efficiency / chip.devices_per_chip


def dcn_wire_seconds(chip: Chip, slices: int, size: float) -> float:
    """Seconds on the wire for one direction of a collective between slices, with `size` bytes on each device."""
    return collectives.ring_sent_bytes("all_gather", 1.0, slices) * size / dcn_rate(chip)


def dcn_seconds(chip: Chip, slices: int, size: float) -> float:
    """`dcn_wire_seconds` plus the latency of its hops."""
    return dcn_wire_seconds(chip, slices, size) + chip.dcn_hop_seconds * math.ceil(math.log2(slices))
