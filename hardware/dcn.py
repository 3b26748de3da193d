"""Collectives over several slices: within them by ICI, between them by the data-centre network (DCN), level by level.

Every chip has a share of its host's network cards, so a slice sends at the sum of its hosts' rates if all of its chips
take part. An all_reduce of S bytes in two levels

    reduce_scatter in each slice of n devices    2 of the 3 stages cross ICI
    all_reduce of S / n bytes between slices     each device with its peers in the other slices
    all_gather in each slice

sends 2 (k-1)/k S/n bytes from each of k slices' devices over DCN. One ring through the devices of all slices sends
2 S (N-1)/N from the host at the end of a slice, through one device's share of a card.

Cut in P chunks, ICI works on one while DCN works on another. With a seconds of ICI per chunk and stage (twice), and d
seconds of DCN per chunk, all reduce_scatters before the first all_gather:

    max(2a + P d, 2 P a)

Sources: Kumar et al., "Exploring the limits of concurrency in ML training on Google TPUs", arXiv:2011.03641 (two
levels); Cho et al., "BlueConnect", MLSys 2019 (hierarchical rings). No source states that a slice has less bandwidth to
the DCN than its hosts have together, and docs.cloud.google.com gives pods of v5e and v6e just that sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from hardware.checks import amount, whole
from hardware.errors import HardwareError
from hardware.network import collective_cost
from hardware.placement import DCN, Placement, PlacementFactor, places
from hardware.slices import Slice, as_slice


@dataclass(frozen=True)
class TwoLevels:
    """An all_reduce over several slices.

    Attributes:
      ici_seconds: of one stage within slices, for all of the data: a reduce_scatter, or the all_gather.
      dcn_seconds: of the all_reduce between slices, for all of the data.
      chunks: in which the data is cut.
      ici_fixed_seconds, dcn_fixed_seconds: of the above the hops, which every chunk takes.
    """

    ici_seconds: float
    dcn_seconds: float
    chunks: int = 1
    ici_fixed_seconds: float = 0.0
    dcn_fixed_seconds: float = 0.0

    @property
    def chunk_seconds(self) -> tuple[float, float]:
        """(a, d): of one chunk, one stage of ICI and the stage of DCN."""
        a = self.ici_fixed_seconds + (self.ici_seconds - self.ici_fixed_seconds) / self.chunks
        return a, self.dcn_fixed_seconds + (self.dcn_seconds - self.dcn_fixed_seconds) / self.chunks

    @property
    def seconds(self) -> float:
        """From start to end.

        Example:
          >>> TwoLevels(1.0, 4.0).seconds, TwoLevels(1.0, 4.0, chunks=4).seconds
          (6.0, 4.5)
        """
        a, d = self.chunk_seconds
        return max(2 * a + self.chunks * d, 2 * self.chunks * a)


def all_reduce_over(slices: Slice | str, payload_bytes: float, chunks: int = 1) -> TwoLevels:
    """An all_reduce over all devices of several slices, in two levels.

    Args:
      slices: such as "4*v5e-256", or its `Slice`.
      payload_bytes: the operand on one device.
      chunks: in which the data is cut so that ICI and DCN work at once.
    Returns: TwoLevels; with one chunk `seconds` is that of `hardware.collective_cost`.
    Raises: HardwareError for a single slice, a negative size, or no chunks.
    Example:
      >>> whole, cut = (all_reduce_over("4*v5e-256", 4e9, chunks) for chunks in (1, 16))
      >>> f"{whole.seconds * 1e3:.0f} ms, {cut.seconds * 1e3:.0f} ms"
      '59 ms, 45 ms'
    """
    slice_ = as_slice(slices)
    amount("payload_bytes", payload_bytes)
    whole("chunks", chunks, low=1)
    if slice_.slices < 2:
        raise HardwareError(f"{slice_.name} is one slice; name several, such as 2*{slice_.name}")
    inside = slice_.devices // slice_.slices
    rest = tuple(PlacementFactor(place, size, 1) for place, size in places(slice_) if place != DCN and size > 1)
    placement = Placement(slice_, (("slices", (PlacementFactor(DCN, slice_.slices, 1),)), ("inside", rest)))

    def stages(size: float) -> tuple[float, float]:
        return (
            collective_cost(placement, "reduce_scatter", ["inside"], size).seconds,
            collective_cost(placement, "all_reduce", ["slices"], size / inside).seconds,
        )

    (a, d), (fixed_a, fixed_d) = stages(payload_bytes), stages(0.0)
    return TwoLevels(a, d, chunks, fixed_a, fixed_d)


def one_ring_seconds(slices: Slice | str, payload_bytes: float) -> float:
    """An all_reduce round one ring through all devices of all slices: slices send through one device's share.

    Example:
      >>> levels = all_reduce_over("2*v5e-256", 4e9).seconds
      >>> round(one_ring_seconds("2*v5e-256", 4e9) / levels)
      94
    """
    slice_ = as_slice(slices)
    amount("payload_bytes", payload_bytes)
    n, chip = slice_.devices, slice_.chip
    rate = chip.dcn_bytes_per_second * chip.dcn_efficiency / chip.devices_per_chip
    return 2 * (n - 1) * (payload_bytes / n / rate + chip.dcn_hop_seconds)


def host_bytes_per_second(slices: Slice | str) -> float:
    """What one host sends over DCN, as reached: its chips' shares together.

    Example:
      >>> host_bytes_per_second("v5e-256") / 1e9  # 2 cards of 100 Gbit/s, 8 chips
      12.5
    """
    slice_ = as_slice(slices)
    chips = min(slice_.chip.chips_per_host, slice_.chips // slice_.slices)
    return chips * slice_.chip.dcn_bytes_per_second * slice_.chip.dcn_efficiency
