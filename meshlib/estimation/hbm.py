"""HBM beside the core: it fetches for the next kernel while one computes, and serves collectives in what is left.

A kernel whose operands lie in HBM from the start (weights, a cache) finds as much of them in VMEM as HBM had time to
fetch since it was last wanted, up to half of VMEM. So of a chain of small products, as in a step of decoding, neither
launches nor first pieces add to the bytes: it takes as long as HBM needs.

What is sent is read and what arrives is written. That takes no time of a kernel that computes longer than it reads, and
the time of HBM of one that does not; it has to be done by the end.

Sources: openxla/xla memory_space_assignment (prefetches to the alternate memory); Pope et al., arXiv:2211.05102.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshlib.estimation.times import KernelTime


@dataclass(slots=True)
class Hbm:
    """HBM of one device: until when it is busy (None before the first kernel), and what it owes to collectives."""

    until: float | None = None
    owed_seconds: float = 0.0

    def owe(self, seconds: float) -> None:
        """A collective that has been started wants that much of it."""
        self.owed_seconds += seconds

    def run(self, time: KernelTime, core: float, start: float) -> KernelTime:
        """A kernel that starts at `start`, the core being free since `core`: its time with what is fetched before."""
        launched = start + time.launch_seconds
        if self.until is None:
            self.until = begin = launched
        else:
            self._serve(max(core, self.until), start)
            begin = max(self.until, start - time.early_seconds)
        done = max(begin + time.hbm_seconds, launched + time.hbm_seconds - time.early_seconds)
        # The first pieces of what may be fetched early expose only what has not arrived by the launch.
        first = min(time.first_seconds, max(0.0, begin + time.first_seconds - launched))
        bare = time.exposed_seconds - time.first_seconds + first
        end = max(launched + max(time.mxu_seconds, time.vpu_seconds) + bare, done)
        self.until = done
        self._serve(max(start, done), end)
        return replace(time, hidden_seconds=max(0.0, start + time.seconds - end))

    def left(self, core: float, end: float) -> float:
        """What is still owed when the last collective has ended, the core being free since `core`."""
        self._serve(core if self.until is None else max(core, self.until), end)
        return self.owed_seconds

    def _serve(self, begin: float, end: float) -> None:
        """Time in which no kernel wants it goes to collectives."""
        served = min(self.owed_seconds, max(0.0, end - begin))
        self.owed_seconds -= served
        if served and self.until is not None:
            self.until = begin + served
