"""The order of a source as a function of seed and epoch, so that a position is one number.

Draw g is example g % count of epoch g // count. The order of an epoch sorts its examples by the raw words of NumPy's
Philox generator with key (seed, epoch), as in `mtf.Batches`: word i belongs to example i. With a buffer the examples
are divided into runs of that size, each sorted separately: the content of a run is known in advance, so that resuming
in the middle needs no stored buffer. Runs of odd epochs begin half a buffer earlier, so that examples get new
neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]


@dataclass
class Order:
    """The order of `count` examples; without a seed that of the source. `buffer`: size of shuffled runs, by default
    all.

    >>> Order(5, seed=1).places(0, 10).tolist()
    [3, 2, 0, 1, 4, 0, 3, 4, 2, 1]
    >>> Order(6, seed=1, buffer=2).places(0, 6).tolist()
    [0, 1, 3, 2, 5, 4]
    """

    count: int
    seed: int | None = None
    buffer: int | None = None
    _run: tuple[int, int, Places] | None = field(default=None, repr=False)  # epoch, begin, examples

    def places(self, begin: int, end: int) -> Places:
        """The examples of draws [begin, end)."""
        if self.seed is None:
            return (begin % self.count + np.arange(end - begin)) % self.count
        parts, at = [], begin
        while at < end:
            epoch, n = divmod(at, self.count)
            start, run = self._run_of(epoch, n)
            part = run[n - start : n - start + end - at]
            parts.append(part)
            at += len(part)
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _run_of(self, epoch: int, n: int) -> tuple[int, Places]:
        """The run with draw n of an epoch: its begin, and its examples in order."""
        start, stop = 0, self.count
        if self.buffer is not None and self.buffer < self.count:
            shift = self.buffer // 2 if epoch % 2 else 0
            first = (n + shift) // self.buffer * self.buffer - shift
            start, stop = max(first, 0), min(first + self.buffer, self.count)
        if self._run is None or self._run[:2] != (epoch, start):
            random = np.random.Philox(key=np.array([self.seed, epoch], np.uint64))
            random.advance(start // 4)  # each generator state yields four words
            words = random.random_raw(stop - start // 4 * 4)[start % 4 :]
            self._run = (epoch, start, start + np.argsort(words, kind="stable"))
        return start, self._run[2]
