"""Input of a step, prepared and sent by the hosts during the previous step.

    seconds = max(examples / (hosts * examples_per_second), bytes of the inputs of a device over its share of PCIe)

Hosts run one step ahead of their devices (prefetching, infeed), so a step takes as long as the longer of both.

Sources: Kumar et al., arXiv:1909.09756 and Ying et al., arXiv:1811.06992, section 3 (hosts that decode images bound
training on pods); tf.data, arXiv:2101.12127.
"""

from __future__ import annotations

from dataclasses import dataclass

from hardware.memory import pcie_seconds
from hardware.slices import Slice
from meshlib.core.arguments import POSITIVE, at, bounded, whole
from meshlib.core.errors import GraphError
from meshlib.program.records import Program

BATCH = "batch"


@dataclass(frozen=True, kw_only=True)
class HostInput:
    """Rate at which one host prepares examples; the hosts of a slice work in parallel.

    Args:
      examples_per_second: rate of one host; or
      decode_seconds: time of one worker per example, and workers, the number of parallel workers per host.
      examples: global examples per step; by default the dim "batch" of the program's inputs.
    Raises: GraphError for both or neither of the rates, and for figures that are not positive.
    The rate depends on machine and software, so there is no default. For comparison, hosts of MLPerf's ResNet-50 fed
    4,500 to 13,000 images/s each (mlcommons/training_results v0.5 to v1.0, images/s over hosts), those of Cloud TPUs in
    2018 more than 3,000 (tensorflow/tensorflow 62855222, "3rd gen input pipeline config").
    Example:
      >>> import meshlib as mtf
      >>> mtf.HostInput(decode_seconds=0.016, workers=48).rate
      3000.0
    """

    examples_per_second: float | None = None
    decode_seconds: float | None = None
    workers: int | None = None
    examples: int | None = None

    def __post_init__(self) -> None:
        what = "HostInput"
        given = self.examples_per_second is not None
        if given == (self.decode_seconds is not None) or given == (self.workers is not None):
            names = [n for n in ("examples_per_second", "decode_seconds", "workers") if getattr(self, n) is not None]
            got = ", ".join(names) or "none of them"
            raise GraphError(f"{at(what)}: give examples_per_second, or decode_seconds and workers; got {got}")
        for name in ("examples_per_second", "decode_seconds"):
            value = getattr(self, name)
            if value is not None:
                bounded(value, what, name, POSITIVE)
        for name in ("workers", "examples"):
            value = getattr(self, name)
            if value is not None:
                whole(value, what, name, low=1)

    @property
    def rate(self) -> float:
        """Examples per second of one host."""
        if self.examples_per_second is not None:
            return float(self.examples_per_second)
        assert self.decode_seconds is not None
        assert self.workers is not None
        return self.workers / self.decode_seconds


@dataclass(frozen=True)
class InputTime:
    """Modelled input time of one step: `host_seconds` to prepare, `pcie_seconds` to send; `examples` per step on
    `hosts` with `rate` examples per second each."""

    examples: int
    hosts: int
    rate: float
    host_seconds: float
    pcie_seconds: float

    @property
    def seconds(self) -> float:
        """The longer of both, which overlap."""
        return max(self.host_seconds, self.pcie_seconds)


def input_time(program: Program, slice_: Slice, given: object) -> InputTime:
    """Input time of one step of a program on a slice.

    Raises: GraphError for anything but a HostInput, or if the examples of a step are neither given nor a dim.
    """
    if not isinstance(given, HostInput):
        raise GraphError(f"estimate: input must be an mtf.HostInput, got {given!r:.80}")
    examples = given.examples
    if examples is None:
        dims = [v.tensor.shape.dim(BATCH).size for v in program.inputs.values() if BATCH in v.tensor.shape.names]
        if not dims:
            names = ", ".join(map(repr, program.inputs)) or "none"
            raise GraphError(
                f"estimate: no input of the program has a dim '{BATCH}' (its inputs: {names}); say how many examples a "
                "step takes: HostInput(examples=...)"
            )
        examples = max(dims)
    sent = sum(v.local_bytes for v in program.inputs.values())
    seconds = examples / (slice_.hosts * given.rate)
    return InputTime(examples, slice_.hosts, given.rate, seconds, pcie_seconds(slice_.chip, sent))
