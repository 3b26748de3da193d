"""`Physics`: losses that geometry, clocks and published rates do not explain, one set of constants for all chips.

`hardware` knows how fast an engine is when it does one thing. A training step runs hundreds of kernels beside
collectives, and reaches less. Each constant here is one such loss, with its unit, its cause, and where its value comes
from: "fitted" to published step times of training runs (`python -m meshlib validate` prints the errors with and without
each chip), or set by hand. None belongs to a chip, a model or a published row.

A program of a single kernel has its VMEM, its clocks and its HBM for itself: losses of kernels apply where a program
has several. Compilers report more than its bytes take (`lone_passes`). Benchmarks of HBM streams and training steps do
not show that: with softmaxes that read their scores in each pass, steps of BERT come out 15 to 21 % too long.

`meshlib.validation.calibrate` fits them to the training runs of Transformers in a file of published results (MaxText's
tables and recipes, MLPerf); `python -m meshlib validate --file F --refit` repeats the fit. Further terms were tried and
dropped because no measurement shows them: a share of chained collectives that pieces cannot hide, and traffic of
element-wise groups beyond that at their boundaries. The prior of `early_exposed` is the result of a simpler model of
the same rows, 0.79 to 0.84 of the gathers of weights; with a wide prior, neither it nor `product_rate` is determined
without the rows of v6e. The rows agree with the prior: if `early_exposed` is fixed and all others are fitted, the loss
is 76 at 0.2, 68 at 0.5, 66 at 0.8 and 70 at 1.0. It is not known which part of it is caused by the core, and which by
the links.
"""

from __future__ import annotations

import math
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any

from meshlib.core.arguments import number
from meshlib.core.errors import GraphError, nearest


def _constant(
    value: float, unit: str, cause: str, source: str, low: float, high: float, prior: float, spread: float
) -> Any:
    about: dict[str, object] = {"unit": unit, "cause": cause, "source": source, "fitted": source == FITTED}
    about |= {"range": (low, high), "prior": (prior, spread)}
    return field(default=value, metadata=about)


FITTED = "fitted to published training steps"


@dataclass(frozen=True, kw_only=True)
class Physics:
    """The constants of the time model; `Physics()` is the calibrated set.

    Raises: GraphError for a value outside its range.
    Example:
      >>> import meshlib as mtf
      >>> mtf.Physics().without_losses().product_rate, len(mtf.Physics.fitted()) <= 8
      (1.0, True)
    """

    product_rate: float = _constant(
        0.9027, "share of the rate of one product alone",
        "operands in other layouts, epilogues in the pipeline, clocks under sustained load",
        FITTED, 0.5, 1.1, 0.9, 0.1,
    )  # fmt: skip
    block_edge: float = _constant(
        861.8, "rows and columns of a product's block in VMEM",
        "VMEM is shared with what is fetched for the next kernel; operands are read again for each block "
        "(0: the best blocks that half of VMEM allows)",
        FITTED, 256.0, 8192.0, 900.0, 200.0,
    )  # fmt: skip
    score_vpu_ops: float = _constant(
        7.452, "lane operations per score of fused attention, forward",
        "scale, mask, maximum, exponential and sum of a softmax computed in pieces",
        FITTED, 1.0, 20.0, 7.0, 2.0,
    )  # fmt: skip
    early_exposed: float = _constant(
        0.735, "share of the time on the wire of a collective beside the core that the core loses",
        "the core starts transfers and adds what arrives; what they take of HBM is counted apart",
        FITTED, 0.0, 1.0, 0.8, 0.15,
    )  # fmt: skip
    slice_jitter: float = _constant(
        0.01181, "share of a step per doubling of the slices",
        "slices joined by DCN wait for the slowest of them",
        FITTED, 0.0, 0.1, 0.015, 0.01,
    )  # fmt: skip
    vector_overlap: float = _constant(
        0.5, "share of the shorter of MXU and VPU work in a kernel that the longer hides",
        "products of one block run while the softmax or the fused element-wise work of another is computed, in part",
        "assumed", 0.0, 1.0, 0.5, 0.2,
    )  # fmt: skip
    score_backward_ops: float = _constant(
        1.6, "lane operations per score backward, times those forward",
        "probabilities are computed again, then their cotangents",
        "assumed", 0.0, 4.0, 1.6, 0.3,
    )  # fmt: skip
    lone_passes: float = _constant(
        1.0, "share of what compilers report for a group alone in its program beyond what crosses its boundary",
        "operands read again by each pass, float32 blocks, loops without overlapped copies (`kernel_passes`)",
        "cycles that XLA reports for single operations", 0.0, 1.0, 1.0, 0.1,
    )  # fmt: skip

    def __post_init__(self) -> None:
        for f in fields(self):
            value = number(getattr(self, f.name), "Physics", f.name)
            low, high = f.metadata["range"]
            ideal = value == _IDEAL.get(f.name)
            if not (low <= value <= high or ideal):
                raise GraphError(
                    f"Physics: {f.name} must be in [{low:g}, {high:g}] ({f.metadata['unit']}), got {value:g}"
                )

    @staticmethod
    def fitted() -> tuple[str, ...]:
        """Names of the fitted constants, in order."""
        return tuple(f.name for f in fields(Physics) if f.metadata["fitted"])

    @staticmethod
    def field(name: str) -> Field[float]:
        """A constant's definition; `.metadata` has unit, cause, source, range, prior with its spread, fitted.

        Raises: GraphError with the nearest names for an unknown one.
        """
        field_of = {f.name: f for f in fields(Physics)}
        if name not in field_of:
            raise GraphError(f"Physics has no constant {name!r}{nearest(name, field_of)}")
        return field_of[name]

    def without_losses(self) -> Physics:
        """Ideal engines: kernels as fast as in micro-benchmarks, collectives hidden wherever possible."""
        return replace(self, **_IDEAL)

    @property
    def of_kernels(self) -> Physics:
        """The constants on which the times of kernels depend, with the others at 0."""
        return replace(self, early_exposed=0.0, slice_jitter=0.0)

    def jitter(self, slices: int) -> float:
        """Share of a step that slices joined by DCN wait for each other.

        >>> import meshlib as mtf
        >>> mtf.Physics(slice_jitter=0.01).jitter(16)
        0.04
        """
        return self.slice_jitter * math.log2(slices)

    def __str__(self) -> str:
        lines = []
        for f in fields(self):
            about, value = f.metadata, getattr(self, f.name)
            lines.append(f"{f.name} = {value:.4g} ({about['unit']}; {about['source']}): {about['cause']}")
        return "\n".join(lines)


_IDEAL = {
    "product_rate": 1.0, "block_edge": 0.0, "early_exposed": 0.0, "slice_jitter": 0.0, "vector_overlap": 1.0,
    "lone_passes": 0.0,
}  # fmt: skip


CALIBRATED = Physics()
"""The calibrated constants, the default of `mtf.estimate`."""
