"""Collective times as stages that are affine in the number of bytes."""

from __future__ import annotations

from dataclasses import dataclass


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
