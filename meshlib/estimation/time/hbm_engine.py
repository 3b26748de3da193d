"""HBM as an engine: prefetches for the next kernel, and serves collectives with the remaining bandwidth.

A kernel whose operands lie in HBM from the start (weights, a cache) finds as much of them in VMEM as HBM had time to
fetch since it was last wanted, up to half of VMEM. So of a chain of small products, as in a step of decoding, neither
launches nor first pieces add to the bytes: it takes as long as HBM needs.

What is sent is read and what arrives is written. That takes no time of a kernel that computes longer than it reads, and
the time of HBM of one that does not; it has to be done by the end.

Sources: openxla/xla memory_space_assignment (prefetches to the alternate memory); Pope et al., arXiv:2211.05102.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshlib.estimation.time.kernel_times import KernelTime


@dataclass(slots=True)
class Hbm:
    """HBM of one device beside its core.

    Attributes:
      most_seconds: what half of VMEM holds, in time of HBM.
      spare_seconds: time in which nobody wanted it, for what is fetched ahead; None before anything has run.
      owed_seconds: what collectives still want.
    """

    most_seconds: float
    spare_seconds: float | None = None
    owed_seconds: float = 0.0

    def owe(self, seconds: float) -> None:
        """A collective that has been started wants that much of it; what half of VMEM holds passes there."""
        if seconds > 2 * self.most_seconds:  # read and written
            self.owed_seconds += seconds

    def run(self, time: KernelTime, core: float, start: float) -> KernelTime:
        """A kernel that starts at `start`, the core being free since `core`: its time with what is fetched before."""
        launched = start + time.launch_seconds
        if self.spare_seconds is None:
            self.spare_seconds, begin, ahead = 0.0, launched, 0.0
        else:
            self.idle(start - core)
            begin, ahead = start, min(self.spare_seconds, time.early_seconds)
        wanted = time.hbm_seconds - ahead
        done = max(begin + wanted, launched + time.hbm_seconds - time.early_seconds)
        # The first pieces of what may be fetched early expose only what has not arrived by the launch.
        first = min(time.first_seconds, max(0.0, begin + time.first_seconds - ahead - launched))
        bare = time.exposed_seconds - time.first_seconds + first
        end = max(launched + max(time.mxu_seconds, time.vpu_seconds) + bare, done)
        self.spare_seconds -= ahead
        self.idle(end - begin - wanted)
        hidden_seconds = start + time.seconds - end
        return replace(time, hidden_seconds=hidden_seconds) if hidden_seconds > 0 else time

    def left(self, seconds: float) -> float:
        """What is still owed when collectives have been awaited for that long after the last kernel."""
        self.idle(seconds)
        return self.owed_seconds

    def idle(self, seconds: float) -> None:
        """Time in which no kernel wants it goes to collectives, then to what is fetched ahead."""
        served = min(self.owed_seconds, max(0.0, seconds))
        self.owed_seconds -= served
        if self.spare_seconds is not None:
            self.spare_seconds = min(self.most_seconds, self.spare_seconds + max(0.0, seconds - served))
