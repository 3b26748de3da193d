"""Collectives over several slices: ICI within slices, the data-centre network (DCN) between them, level by level.

Every chip has a share of its host's network cards, so a slice sends at the sum of its hosts' rates if all of its chips
take part. An all_reduce of S bytes in two levels

    reduce_scatter in each slice of n devices    2 of the 3 stages cross ICI
    all_reduce of S / n bytes between slices     each device with its peers in the other slices
    all_gather in each slice

sends 2 (k-1)/k S/n bytes from each of k slices' devices over DCN. One ring through the devices of all slices sends
2 S (N-1)/N from the host at the end of a slice, through one device's share of a card.

Cut in chunks, ICI works on one while DCN works on another: `hardware.chunks` has the closed forms.

Sources: Kumar et al., "Exploring the limits of concurrency in ML training on Google TPUs", arXiv:2011.03641 (two
levels); Cho et al., "BlueConnect", MLSys 2019 (hierarchical rings). No source states that a slice has less bandwidth to
the DCN than its hosts have together, and docs.cloud.google.com gives pods of v5e and v6e just that sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from hardware.checks import HardwareError, amount, whole
from hardware.chunks import CHUNKS, chunked_seconds
from hardware.network import collective_cost
from hardware.placement import DCN, Placement, PlacementFactor, places
from hardware.slices import Slice, as_slice


@dataclass(frozen=True)
class TwoLevels:
    """Cost of an all_reduce over several slices, level by level.

    Attributes:
      chunk_ici_seconds: one chunk within slices, one direction (its reduce_scatter, or its all_gather).
      chunk_dcn_seconds: one chunk between slices, one direction.
      chunks: number of chunks.
    """

    chunk_ici_seconds: float
    chunk_dcn_seconds: float
    chunks: int = 1

    @property
    def ici_seconds(self) -> float:
        """Total ICI seconds."""
        return 2 * self.chunks * self.chunk_ici_seconds

    @property
    def dcn_seconds(self) -> float:
        """Total DCN seconds."""
        return 2 * self.chunks * self.chunk_dcn_seconds

    @property
    def seconds(self) -> float:
        """Seconds from start to end, with ICI and DCN overlapped chunk by chunk.

        Example:
          >>> TwoLevels(1.0, 2.0).seconds, TwoLevels(0.25, 0.5, chunks=4).seconds
          (6.0, 4.5)
        """
        return chunked_seconds("all_reduce", self.chunk_ici_seconds, self.chunk_dcn_seconds, self.chunks)


def all_reduce_over(slices: Slice | str, payload_bytes: float, chunks: int | None = None) -> TwoLevels:
    """Cost of an all_reduce over all devices of several slices, in two levels.

    Args:
      slices: such as "4*v5e-256", or its `Slice`.
      payload_bytes: bytes of the operand on one device.
      chunks: number of chunks, so that ICI and DCN work at once (default: the best of `chunks.CHUNKS`).
    Returns: TwoLevels; by default `seconds` is that of `hardware.collective_cost`.
    Raises: HardwareError for a single slice, a negative size, or no chunks.
    Example:
      >>> whole, cut = (all_reduce_over("4*v5e-256", 4e9, chunks) for chunks in (1, None))
      >>> f"{whole.seconds * 1e3:.0f} ms, {cut.seconds * 1e3:.0f} ms in {cut.chunks} chunks"
      '59 ms, 44 ms in 2 chunks'
    """
    slice_ = _several(slices)
    amount("payload_bytes", payload_bytes)
    if chunks is not None:
        whole("chunks", chunks, low=1)
    inside = slice_.devices // slice_.slices
    rest = tuple(PlacementFactor(place, size, 1) for place, size in places(slice_) if place != DCN and size > 1)
    placement = Placement(slice_, (("slices", (PlacementFactor(DCN, slice_.slices, 1),)), ("inside", rest)))

    def cut(chunks: int) -> TwoLevels:
        ici = collective_cost(placement, "reduce_scatter", ["inside"], payload_bytes / chunks)
        dcn = collective_cost(placement, "reduce_scatter", ["slices"], payload_bytes / inside / chunks)
        return TwoLevels(ici.seconds, dcn.seconds, chunks)

    return min(map(cut, CHUNKS if chunks is None else (chunks,)), key=lambda levels: levels.seconds)


def one_ring_seconds(slices: Slice | str, payload_bytes: float) -> float:
    """Seconds of an all_reduce on one ring through all slices, each sending through one device's share of a card.

    Example:
      >>> levels = all_reduce_over("2*v5e-256", 4e9).seconds
      >>> round(one_ring_seconds("2*v5e-256", 4e9) / levels)
      115
    """
    slice_ = _several(slices)
    amount("payload_bytes", payload_bytes)
    n, chip = slice_.devices, slice_.chip
    rate = chip.dcn_bytes_per_second * chip.dcn_efficiency / chip.devices_per_chip
    return 2 * (n - 1) * (payload_bytes / n / rate + chip.dcn_hop_seconds)


def _several(slices: Slice | str) -> Slice:
    slice_ = as_slice(slices)
    if slice_.slices < 2:
        raise HardwareError(f"{slice_.name} is one slice; name several, such as 2*{slice_.name}")
    return slice_


def host_bytes_per_second(slices: Slice | str) -> float:
    """Achieved DCN bandwidth of one host: its chips' shares together.

    Example:
      >>> host_bytes_per_second("v5e-256") / 1e9  # 2 cards of 100 Gbit/s, 8 chips
      12.5
    """
    slice_ = as_slice(slices)
    chips = min(slice_.chip.chips_per_host, slice_.chips // slice_.slices)
    return chips * slice_.chip.dcn_bytes_per_second * slice_.chip.dcn_efficiency
