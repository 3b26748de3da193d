"""Expert load: how often each expert is chosen, and the work of the busiest device.

A program has the shapes of any load; its grouped products state the mean filled share of their rows, under uniform
choice. Under another load the device with the most popular experts has more rows than the mean, and all others wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from meshlib.core.arguments import at, items, number
from meshlib.core.errors import GraphError
from meshlib.program.instructions import Compute, Instruction, Loop
from meshlib.program.records import Program

WHAT = "estimate"


@dataclass(frozen=True)
class ExpertLoad:
    """Popularity of each expert.

    Args:
      skew: ratio of the most popular expert to the mean; the others decay geometrically, in a fixed random order.
      counts: measured count per expert, instead of skew.
    """

    skew: float = 1.0
    counts: tuple[float, ...] | None = None

    @classmethod
    def of(cls, given: object) -> ExpertLoad:
        """A load from the user's argument: "balanced", a skew, or counts. Raises: GraphError for anything else."""
        if isinstance(given, str):
            if given == "balanced":
                return cls()
        elif isinstance(given, int | float) and not isinstance(given, bool):
            if number(given, WHAT, "expert_load") >= 1:
                return cls(float(given))
        elif isinstance(given, Sequence | np.ndarray):
            counts = tuple(number(n, WHAT, "each count of expert_load") for n in items(given, WHAT, "expert_load"))
            if counts and min(counts) >= 0 and sum(counts) > 0:
                return cls(counts=counts)
        raise GraphError(
            f"{at(WHAT)}: expert_load must be 'balanced', how many times the mean the most chosen expert is chosen "
            f"(1 or more), or a count for each expert, not all 0; got {given!r:.80}"
        )

    def shares(self, experts: int) -> np.ndarray[Any, Any]:
        """Share of all choices for each of this many experts.

        >>> ExpertLoad(2.0).shares(4).round(3).tolist(), ExpertLoad(counts=(3.0, 1.0)).shares(2).tolist()
        ([0.148, 0.5, 0.272, 0.08], [0.75, 0.25])

        Raises: GraphError where it has counts of another number of experts, or a skew beyond one expert for all.
        """
        if self.counts is not None:
            if len(self.counts) != experts:
                raise GraphError(
                    f"{at(WHAT)}: expert_load has {len(self.counts)} counts, but the program's experts are {experts}"
                )
            return np.array(self.counts) / sum(self.counts)
        if self.skew > experts:
            raise GraphError(
                f"{at(WHAT)}: expert_load must be at most {experts}, the program's experts, of which one that takes "
                f"all choices is chosen {experts} times the mean; got {self.skew:g}"
            )
        low, high = 0.0, 1.0  # of the ratio between consecutive experts' shares
        for _ in range(60):
            middle = (low + high) / 2
            falling = middle ** np.arange(experts)
            low, high = (middle, high) if experts / falling.sum() > self.skew else (low, middle)
        falling = high ** np.arange(experts)
        return np.asarray(np.random.default_rng(0).permutation(falling / falling.sum()))

    def __str__(self) -> str:
        if self.counts is not None:
            return f"measured counts of {len(self.counts)} experts"
        return "all experts alike" if self.skew == 1 else f"the most chosen expert {self.skew:g} times the mean"


@dataclass(frozen=True)
class ExpertReport:
    """Effect of an expert load on a step.

    Attributes:
      load: the popularity of each expert.
      busiest: load of the busiest device's experts relative to the mean; dropped: share of all choices beyond capacity.
      worst_seconds: step time with the busiest device filled to capacity. Modelled.
    """

    load: ExpertLoad
    busiest: float
    dropped: float
    worst_seconds: float


@dataclass(frozen=True)
class ExpertShare:
    """The experts of one grouped product on one device."""

    instruction: Compute

    @cached_property
    def experts(self) -> int:
        """Experts on all devices."""
        return self._experts(local=False)

    @property
    def blocks(self) -> int:
        """Number of parts into which the experts are split."""
        return self.experts // self._experts(local=True)

    def _experts(self, local: bool) -> int:
        """Product of the expert dims: dims of the group bounds that matrices (or results of summed rows) have, too."""
        i = self.instruction
        bounds = i.inputs[-2].tensor.shape.names
        held = next(v for v in (i.inputs[1], *i.outputs) if i.operation.attrs["groups"] in v.tensor.shape.names)
        shape = held.local_shape if local else held.tensor.shape
        return prod(d.size for d in shape if d.name in bounds and _is_of_experts(i, d.name))

    def busiest(self, load: ExpertLoad) -> float:
        """Load of the busiest device's experts relative to the mean."""
        shares = load.shares(self.experts).reshape(self.blocks, -1).sum(1)
        return float(shares.max() * self.blocks)

    def dropped(self, load: ExpertLoad) -> float:
        """Share of all choices without room in the shards of busy devices."""
        filled = float(self.instruction.operation.attrs["filled"])
        rows = load.shares(self.experts).reshape(self.blocks, -1).sum(1) * self.blocks * filled
        return float(np.maximum(rows - 1, 0).sum() / rows.sum())

    def under(self, load: ExpertLoad | None) -> Compute:
        """The instruction with the rows of a load; None: the worst case, with all rows filled."""
        i = self.instruction
        attrs = i.operation.attrs
        if load is None:
            changed = {"filled": 1.0 if self.blocks > 1 else attrs["filled"], "loads": None}
        else:
            times_mean = tuple((load.shares(self.experts) * self.experts).tolist())
            changed = {"filled": min(1.0, float(attrs["filled"]) * self.busiest(load)), "loads": times_mean}
        return replace(i, operation=replace(i.operation, attrs={**attrs, **changed}))


def _is_of_experts(i: Compute, name: str) -> bool:
    """True if a dim of the bounds is an expert dim: the groups, and shards that matrices have, too."""
    attrs = i.operation.attrs
    rows = next(v for v in i.inputs[:2] if attrs["rows"] in v.tensor.shape.names)
    matrices = [v for v in (*i.inputs[:2], *i.outputs) if v is not rows and attrs["rows"] not in v.tensor.shape.names]
    return name == attrs["groups"] or all(name in v.tensor.shape.names for v in matrices)


def grouped_products(program: Program) -> Iterator[ExpertShare]:
    """The grouped products of a program and its loops."""
    for i in program.instructions:
        if isinstance(i, Loop):
            yield from grouped_products(i.body)
        elif isinstance(i, Compute) and "filled" in i.operation.attrs:
            yield ExpertShare(i)


def under_load(program: Program, load: ExpertLoad | None) -> Program:
    """The program with the busiest device's rows under a load; None: the worst load that has room."""

    def changed(i: Instruction) -> Instruction:
        if isinstance(i, Loop):
            body = under_load(i.body, load)
            return i if body is i.body else replace(i, body=body)
        return ExpertShare(i).under(load) if isinstance(i, Compute) and "filled" in i.operation.attrs else i

    return program.with_instructions([changed(i) for i in program.instructions])
