"""HBM as an engine: prefetches for the next kernel, and serves collectives with the remaining bandwidth.

A kernel whose operands are in HBM from the start (weights, a cache) finds in VMEM what HBM had spare time to prefetch,
up to half of VMEM. So in a chain of small products, as in decoding, neither launches nor first pieces add to the time:
it takes as long as HBM needs for the bytes.

Collectives read what they send and write what arrives. That costs a kernel nothing if it computes longer than it reads;
otherwise it competes for HBM. It must be finished by the end of the step.

Sources: openxla/xla memory_space_assignment (prefetches to the alternate memory); Pope et al., arXiv:2211.05102.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshlib.estimation.time.kernel_times import KernelTime


@dataclass(slots=True)
class Hbm:
    """HBM of one device beside its core.

    Attributes:
      most_seconds: HBM time to fill half of VMEM.
      spare_seconds: idle time usable for prefetching; None before the first kernel.
      owed_seconds: outstanding traffic of collectives.
    """

    most_seconds: float
    spare_seconds: float | None = None
    owed_seconds: float = 0.0

    def owe(self, seconds: float) -> None:
        """Account for the HBM traffic of a collective; payloads that fit half of VMEM need none."""
        if seconds > 2 * self.most_seconds:  # read and write
            self.owed_seconds += seconds

    def run(self, time: KernelTime, core: float, start: float) -> KernelTime:
        """Time of a kernel at `start`, with the core free since `core`, after prefetching in the meantime."""
        launched = start + time.launch_seconds
        if self.spare_seconds is None:
            self.spare_seconds, begin, prefetched = 0.0, launched, 0.0
        else:
            self.idle(start - core)
            begin, prefetched = start, min(self.spare_seconds, time.early_seconds)
        wanted = time.hbm_seconds - prefetched
        done = max(begin + wanted, launched + time.hbm_seconds - time.early_seconds)
        # Prefetchable first pieces are exposed only as far as they have not arrived by the launch.
        first = min(time.first_seconds, max(0.0, begin + time.first_seconds - prefetched - launched))
        bare = time.exposed_seconds - time.first_seconds + first
        end = max(launched + max(time.mxu_seconds, time.vpu_seconds) + bare, done)
        self.spare_seconds -= prefetched
        self.idle(end - begin - wanted)
        hidden_seconds = start + time.seconds - end
        return time._replace(hidden_seconds=hidden_seconds) if hidden_seconds > 0 else time

    def idle(self, seconds: float) -> None:
        """Use idle time for owed collective traffic first, then for prefetching."""
        if seconds <= 0.0:
            return
        served = min(self.owed_seconds, seconds)
        self.owed_seconds -= served
        if self.spare_seconds is not None:
            self.spare_seconds = min(self.most_seconds, self.spare_seconds + (seconds - served))
