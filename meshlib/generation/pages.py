"""Allocation of cache pages on the host, with sharing of common prefixes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Pages:
    """Pages allocated to sequences; those of a common prefix are shared.

    Free pages keep their content until they are reused, least recently used first.

    >>> pages = Pages(count=4, size=2)
    >>> first = pages.take([1, 2, 3, 4, 5], positions=6)
    >>> pages.filled(first[0], [1, 2, 3, 4, 5])
    >>> second = pages.take([1, 2, 9], positions=4)
    >>> second[0][:1] == first[0][:1], second[1], pages.free
    (True, 2, 0)
    >>> pages.take([7], positions=2) is None
    True
    """

    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self._users = [0] * count
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        self._beginning: dict[int, tuple[int, ...]] = {}  # for a full page, all tokens up to its end
        self._holding: dict[tuple[int, ...], int] = {}

    @property
    def free(self) -> int:
        """Free pages."""
        return len(self._free)

    def take(self, prompt: Sequence[int], positions: int) -> tuple[list[int], int] | None:
        """Pages for `positions` of a sequence that begins with `prompt`, or None if too few are free.

        Returns: the pages in order, and the number of prompt tokens already in them; never all of them.
        """
        shared: list[int] = []
        while (end := (len(shared) + 1) * self.size) < len(prompt):
            page = self._holding.get(tuple(prompt[:end]))
            if page is None:
                break
            shared.append(page)
        more = -(-positions // self.size) - len(shared)
        if more > len(self._free) - sum(page in self._free for page in shared):
            return None
        for page in shared:
            self._free.pop(page, None)
            self._users[page] += 1
        own = [self._free.popitem(last=False)[0] for _ in range(more)]
        for page in own:
            self._users[page] = 1
            beginning = self._beginning.pop(page, None)
            if beginning is not None and self._holding.get(beginning) == page:
                del self._holding[beginning]
        return [*shared, *own], len(shared) * self.size

    def filled(self, pages: Sequence[int], tokens: Sequence[int]) -> None:
        """Record that a sequence's pages contain these tokens, for later sequences with the same prefix."""
        for n, page in enumerate(pages[: len(tokens) // self.size]):
            if page not in self._beginning:
                beginning = tuple(tokens[: (n + 1) * self.size])
                self._beginning[page] = beginning
                self._holding.setdefault(beginning, page)

    def give_back(self, pages: Sequence[int]) -> None:
        """Free the pages of a finished sequence."""
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                self._free[page] = None
