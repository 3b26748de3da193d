"""Draws with equal keys, which give equal numbers in JAX: the draws of the library would be independent.

A step that reads a key is the earlier one with an equal key where that is visible, and leaves loops that do not
determine its key. In another body it draws from the same stream, if the loops that determine its key are of equal
length; over the other loops around it the numbers are constant. A draw whose key may equal that of another, in some
trip or for some argument (`meshlib.jax.importing.key_forms`), draws from the same stream by the numbers in its key:
`fold_in(key, n)` with n an argument, and `fold_in(key, 3)`. Where these are not known the second draw is refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax.interpreters.partial_eval import dce_jaxpr

from meshlib.jax.importing.code import CodeStep, Var, scan_sizes
from meshlib.jax.importing.key_forms import Ancestor, Forms, Numbers, Terms, meet
from meshlib.jax.importing.trips import elements_of

AGAIN = (
    "a draw with a key that a loop has drawn with, of another length, in one of its trips or for another "
    "distribution, which gives the same numbers in JAX; draw once outside and pass the numbers, and import a loss "
    "without its gradient"
)


class Draw(NamedTuple):
    """A draw: its kind, the identities and the derivation of its keys, and the numbers in these."""

    kind: str
    keys: tuple[Hashable, ...]
    derivation: Hashable
    numbers: Numbers
    terms: Terms
    identity: int

    def repeats(self, other: Draw) -> bool:
        """True if it may give the numbers of another draw, whose keys are equal or derived alike."""
        return self.is_like(other) and (self.keys == other.keys or meet(self.numbers, other.numbers))

    def is_like(self, other: Draw) -> bool:
        """True if both give equal numbers for equal keys."""
        return self.kind == other.kind or "random_bits" in (self.kind, other.kind)

    def joins(self, other: Draw) -> bool:
        """True if both can draw from one stream by the numbers in their keys."""
        same = (self.kind, self.derivation) == (other.kind, other.derivation)
        return same and self.terms is not None and other.terms is not None


@dataclass(eq=False)
class Level:
    """The steps of a body being traced, which a loop runs `trips` times; 0 for other bodies."""

    trips: int = 0
    steps: list[CodeStep] = field(default_factory=list)
    keyed: dict[Hashable, list[Var]] = field(default_factory=dict)  # (identity, levels that decide) -> results


@dataclass(eq=False)
class Keyed:
    """Identities of random keys, and the draws so far."""

    identities: dict[Var, Hashable] = field(default_factory=dict)
    forms: Forms = field(default_factory=Forms)
    drawn: dict[Hashable, frozenset[Draw]] = field(default_factory=dict)  # bits -> their draws
    # identity -> its draws, and the trips of the loops that determine the key of the first
    draws: dict[Hashable, tuple[list[CodeStep], tuple[int, ...]]] = field(default_factory=dict)
    lines: dict[Hashable, list[tuple[Draw, Ancestor]]] = field(default_factory=dict)  # bits -> ancestors of draws' keys
    _numbers: dict[Hashable, int] = field(default_factory=dict)

    def _number(self, *identity: Hashable) -> int:
        """A number that stands for an identity: a chain of splits would otherwise hold those of all splits before."""
        return self._numbers.setdefault(identity, len(self._numbers))

    def identity(self, x: Var) -> Hashable:
        """Equal for values that are equal by construction."""
        if x not in self.identities:
            elements, maker = None if x.key else elements_of(x), x.maker
            if elements is not None:
                self.identities[x] = (x.shape, x.dtype, elements.tobytes())
            elif maker is None or x.shape or maker.bodies:
                self.identities[x] = x
            else:
                operands = map(self.identity, maker.ins)
                self.identities[x] = self._number(maker.kind, x.dtype, str(maker.params), *operands)
        return self.identities[x]

    def identify(self, eqn: Any, own: Sequence[Var], given: Sequence[Var]) -> None:
        """Identify the slices and counters among a scan body's arguments `own`; the scan's operands are `given`."""
        p, jaxpr = eqn.params, eqn.params["jaxpr"].jaxpr
        consts, carries = scan_sizes(p)
        inside = jaxpr.invars[consts:]
        for x, stack in zip(own[carries:], given[carries:], strict=True):
            whole = self.identity(stack)
            self.identities[x] = whole[1] if isinstance(whole, tuple) and whole[0] == "stack" else ("slice", whole)
            self.forms.slice(x, stack)
        sums = {e.outvars[0]: e.invars for e in jaxpr.eqns if e.primitive.name == "add"}
        for x, first, v, result in zip(own[:carries], given, inside, jaxpr.outvars, strict=False):
            a, b = (None, None) if hasattr(result, "val") else sums.get(result, (None, None))
            if x.key and (following := _following(jaxpr, inside.index(v), len(inside))) is not None:
                self.identities[x] = ("carry", self.identity(first), str(following))
                self.forms.carry(x, first, following)
            elif a is v and b is not None and hasattr(b, "val") and not x.shape:
                self.identities[x] = ("counter", self.identity(first), p["length"], p["reverse"], str(b))
                self.forms.counter(x, first, b.val, p["length"])

    def stack(self, bodys: Sequence[Var], stacks: Sequence[Any]) -> None:
        """Identify the stacks of a body's results."""
        for y, whole in zip(bodys, stacks, strict=False):
            if isinstance(whole, Var):
                self.identities[whole] = ("stack", self.identity(y))
                self.forms.stack(whole, y)

    def add(self, step: CodeStep, levels: Sequence[Level]) -> list[Var] | None:
        """Results of a step that reads keys: of an equal one, or of this one, which is added; None if refused."""
        params = () if step.kind.startswith("jit:") else tuple((k, str(v)) for k, v in sorted(step.params.items()))
        types = tuple((out.shape, out.dtype) for out in step.outs)
        identity = self._number(step.kind, types, params, *map(self.identity, step.ins))
        deciding = frozenset[int]().union(*map(self.forms.levels, step.ins))
        for level in levels:
            if (identity, deciding) in level.keyed:
                return level.keyed[identity, deciding]
        depth = len(levels) - 1
        while levels[depth].trips and all(x.const is not None or x.level < depth for x in step.ins):
            depth -= 1
        if not all(out.key for out in step.outs) and not self._add_draw(step, identity, levels[: depth + 1]):
            return None
        for n, out in enumerate(step.outs):
            out.level, out.maker, self.identities[out] = depth, step, (identity, n)
            if out.key and (exact := self.forms.exact(out)) is not None:
                self.identities[out] = exact
        levels[depth].steps.append(step)
        levels[depth].keyed[identity, deciding] = step.outs
        return step.outs

    def _add_draw(self, step: CodeStep, identity: int, levels: Sequence[Level]) -> bool:
        """Record the draws of a step; False where they may repeat others with the same keys."""
        keys = [x for x in step.ins if x.key]
        loops = [n for n, level in enumerate(levels) if level.trips > 1]
        deciding = frozenset[int]().union(*map(self.forms.levels, keys))
        around = tuple([levels[n].trips for n in loops if n in deciding])
        constant_over = tuple([n for n, level in enumerate(reversed(loops)) if level not in deciding])
        if constant_over:
            step.params = {**step.params, "constant_over": constant_over}
        steps, like = self.draws.setdefault(identity, ([], around))
        steps.append(step)
        if len(steps) == 1 or around != like:
            return self._add_keys(step, keys, identity)
        stream = steps[0].params.get("stream", f"key {identity}")
        for draw in (steps[0], step):
            draw.params = {**draw.params, "stream": stream}
        if "terms" in steps[0].params:
            self._join(step, stream)
        return True

    def _add_keys(self, step: CodeStep, keys: Sequence[Var], identity: int) -> bool:
        """Record the keys of a draw; False, and nothing recorded, if others with these numbers may have been drawn."""
        # Parts of a differentiated function may contain the bits of a distribution without its name.
        bits = (step.params.get("bit_width", 32), step.outs[0].shape)
        whats, numbers, terms = self.forms.of(keys)
        equal, alike = (*bits, *map(self.identity, keys)), ("alike", *bits, *whats)
        own = Draw(step.kind, equal, alike, numbers, terms, identity)
        repeated = {d for of in (equal, alike) for d in self.drawn.get(of, ()) if own.repeats(d)}
        lines = self.lines.setdefault(bits, [])
        ancestors = [a for a in map(self.forms.ancestors, keys) if a is not None]
        if not all(map(own.joins, repeated)) or any(
            own.is_like(draw) and a.may_meet(b) for a in ancestors for draw, b in lines
        ):
            return False
        if repeated:
            for draw in (step, *(s for d in repeated for s in self.draws[d.identity][0])):
                self._join(draw, f"keys {self._number(*alike)}")
        lines += [(own, a) for a in ancestors]
        for of in (equal, alike):
            self.drawn[of] = self.drawn.get(of, frozenset()) | {own}
        return True

    def _join(self, step: CodeStep, stream: str) -> None:
        """Let a step draw from a stream by the numbers in its keys."""
        terms = self.forms.of([x for x in step.ins if x.key])[2] or ()
        step.ins += [x for x in terms if isinstance(x, Var) and x not in step.ins]
        step.params = {**step.params, "stream": stream, "terms": terms}


def _following(jaxpr: Any, at: int, carries_and_slices: int) -> Any:
    """A loop's computation of a carry from its own value alone; None if other values determine it."""
    consts = len(jaxpr.invars) - carries_and_slices
    part, used = dce_jaxpr(jaxpr, [n == at for n in range(len(jaxpr.outvars))])
    return part if [n for n, read in enumerate(used) if read] == [consts + at] else None
