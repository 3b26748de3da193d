"""Where one value is to be had, and what it costs to have it elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from layouts import Sharding, reshard
from meshlib.core.graph import Tensor

INFINITE = float("inf")


class Held(NamedTuple):
    """One place where a value is to be had; `region`: the only one that it serves, None: all."""

    sharding: Sharding
    region: str | None


@dataclass(frozen=True)
class Spot:
    """All places where a value is; none if it is yet to be made."""

    held: frozenset[Held] = frozenset()


def pairs(s: Sharding) -> Iterator[tuple[str, str]]:
    """Each dim with each axis that splits it."""
    return ((d.name, a) for d, entry in zip(s.shape, s.axes, strict=True) for a in entry)


def is_slice(whole: Sharding, part: Sharding) -> bool:
    """Whether every device has its block of `part` in that of `whole`."""
    entries = zip(whole.axes, part.axes, strict=True)
    return whole.pending == part.pending and all(b[: len(a)] == a for a, b in entries)


class Whereabouts:
    """The spots in which one tensor can be, numbered, and what it costs to get from one to another.

    Args:
      bound: whether it must end at home.
      budget: bytes above which nobody is interested in a move.
    """

    def __init__(self, t: Tensor, home: Sharding, bound: bool, budget: float) -> None:
        self.t, self.home, self.bound, self.budget = t, home, bound, budget
        self.spots: list[Spot] = []
        self._numbers: dict[Spot, int] = {}
        self._brought: dict[object, list[tuple[float, int]]] = {}
        self._shorts: dict[tuple[int, int], float] = {}
        self._moves: dict[tuple[Sharding, Sharding], tuple[float, tuple[Sharding, ...]]] = {}

    def number(self, spot: Spot) -> int:
        """The number of a spot, without what is at hand for nothing."""
        if spot not in self._numbers:
            held = set(spot.held)
            for h in spot.held:
                others = (x for x in held if x != h and x.region in (None, h.region))
                if any(is_slice(x.sharding, h.sharding) for x in others):
                    held.discard(h)
            least = Spot(frozenset(held))
            if least not in self._numbers:
                self._numbers[least] = len(self.spots)
                self.spots.append(least)
            self._numbers[spot] = self._numbers[least]
        return self._numbers[spot]

    def made(self, sharding: Sharding, region: str | None) -> int:
        """The number of the spot of a value as its operation made it."""
        return self.number(Spot(frozenset([self._held(sharding, region)])))

    def unmade(self) -> int:
        """The number of the spot of a value that is made where it is wanted, later."""
        return self.number(Spot())

    def made_again(self, number: int, sharding: Sharding, region: str | None, lasts: bool) -> int:
        """The spot after it was made besides; if it `lasts`, it is there from then on, and need not be made again."""
        spot = self.spots[number]
        held = {self._held(sharding, region)} if lasts else set[Held]()
        return self.number(Spot(spot.held | held))

    def move(self, source: Sharding, target: Sharding) -> tuple[float, tuple[Sharding, ...]]:
        """Bytes of a reshard, and what it leaves on the way: the value with all sums taken."""
        found = self._moves.get((source, target))
        if found is None:
            found = self._moves[source, target] = self._move(source, target)
        return found

    def _move(self, source: Sharding, target: Sharding) -> tuple[float, tuple[Sharding, ...]]:
        if not set(target.pending) <= set(source.pending):
            return INFINITE, ()
        itemsize = self.t.dtype.itemsize
        if (target.local_size - source.local_size) * itemsize > self.budget:  # a block grows by what is gathered
            return INFINITE, ()
        plan = reshard(source, target, itemsize)
        summed = [s.after for s in plan.steps if s.before.pending and not s.after.pending]
        return float(plan.sent_bytes), tuple(s for s in summed if s != target)

    def nearest(self, have: Iterable[Held], target: Sharding) -> float:
        """Bytes to `target` from the nearest of what there is, whatever it serves."""
        return min((self.move(x.sharding, target)[0] for x in have), default=INFINITE)

    def bring(self, number: int, wanted: Sharding, region: str, again: bool) -> list[tuple[float, int]]:
        """Ways to have it at `wanted` in a region: bytes and new spot. Straight; by way of its home if wanted again."""
        key = (number, wanted, region, again)
        found = self._brought.get(key)
        if found is None:
            found = self._brought[key] = self._bring(self.spots[number], number, wanted, region, again)
        return found

    def _bring(self, spot: Spot, number: int, wanted: Sharding, region: str, again: bool) -> list[tuple[float, int]]:
        cost, added = self._straight(spot.held, wanted, region)
        if cost == INFINITE:
            return []
        found = [(cost, self._with(spot, added, wanted))]
        if again and cost > 0 and wanted != self.home:
            to_home, first = self._straight(spot.held, self.home, region)
            onward, then = self._straight(spot.held | first, wanted, region)
            if to_home + onward < INFINITE:
                found.append((to_home + onward, self._with(spot, first | then, wanted)))
        return found

    def _with(self, spot: Spot, added: frozenset[Held], wanted: Sharding) -> int:
        return self.number(Spot(spot.held | added))

    def _straight(self, held: frozenset[Held], wanted: Sharding, region: str) -> tuple[float, frozenset[Held]]:
        """The cheapest way from what there is: its bytes, and what is there then."""
        best: tuple[float, int, frozenset[Held]] = (INFINITE, 0, frozenset())
        here = self._held(wanted, region)
        ends = (*(h.sharding for h in held), wanted)
        for h in sorted(held, key=_order):
            for kept in self._serving(h, wanted, region):
                if kept is None:
                    cost, summed = self.move(h.sharding, wanted)
                    added = [here, *(self._held(s, h.region or region) for s in summed if not parks(s, ends))]
                else:
                    (first, early), (then, late) = self.move(h.sharding, kept), self.move(kept, wanted)
                    cost = first + then
                    added = [Held(kept, None), here]
                    added += [self._held(s, h.region) for s in early if not parks(s, (*ends, kept))]
                    added += [self._held(s, region) for s in late if not parks(s, (*ends, kept))]
                if (cost, -len(added)) < best[:2]:
                    best = (cost, -len(added), frozenset(added))
        return best[0], best[2]

    def _serving(self, h: Held, wanted: Sharding, region: str) -> Iterator[Sharding | None]:
        """How `h` serves a region: itself (None), or by what of it is kept, which must be no larger than the home."""
        if h.region in (None, region) or self.is_small(wanted):
            yield None
            return
        yield self.home
        taken = {*h.sharding.split_axes, *h.sharding.pending_axes}
        entries = zip(h.sharding.axes, self.home.axes, strict=True)
        cut = [(*entry, *(a for a in at_home if a not in taken)) for entry, at_home in entries]
        fits = zip(self.t.shape, cut, strict=True)
        if all(d.size % self.home.mesh.group_size(entry) == 0 for d, entry in fits):
            part = h.sharding.with_axes(cut)
            if self.is_small(part):
                yield part

    def is_small(self, s: Sharding) -> bool:
        """Whether keeping it so takes no more memory than at home."""
        return s.local_size <= self.home.local_size

    def _held(self, s: Sharding, region: str | None) -> Held:
        return Held(s, None if self.is_small(s) else region)

    def short(self, a: int, b: int) -> float:
        """Bytes that surely suffice to have at spot `a` all that is at hand at `b`."""
        if a == b:
            return 0.0
        found = self._shorts.get((a, b))
        if found is None:
            found = self._shorts[a, b] = self._short(self.spots[a], self.spots[b])
        return found

    def _short(self, a: Spot, b: Spot) -> float:
        have, total = a.held, 0.0
        for h in sorted(b.held - a.held, key=lambda h: (-len(h.sharding.pending), -h.sharding.local_size, _order(h))):
            total += self.nearest(have, h.sharding) if h.region is None else self._straight(have, *h)[0]
            if total == INFINITE:
                break
            have = have | {h}
        return total


def parks(s: Sharding, ends: Iterable[Sharding]) -> bool:
    """Whether it has an axis on a dim where none of `ends` has it: only a step of a reshard, and no place to be."""
    known = {p for end in ends for p in pairs(end)}
    return any(p not in known for p in pairs(s))


def _order(h: Held) -> object:
    """The same in every run."""
    return h.sharding.axes, h.sharding.pending, h.region or ""
