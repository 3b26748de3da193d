"""Draws with equal keys, which give equal numbers in JAX: the draws of the library would be independent.

A step that reads a key is the earlier one with an equal key where that is visible, and leaves loops that do not
determine its key. In another body it draws from the same stream, if it is in loops of equal length. Otherwise the
second draw is refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.interpreters.partial_eval import dce_jaxpr

from meshlib.jax.importing.code import CodeStep, Var, scan_sizes
from meshlib.jax.importing.trips import elements_of

AGAIN = (
    "a draw with a key that another loop has drawn with, of another length or for another distribution, which gives "
    "the same numbers in JAX; draw once outside and pass the numbers, and import a loss without its gradient"
)


@dataclass(eq=False)
class Level:
    """The steps of a body being traced, which a loop runs `trips` times; 0 for other bodies."""

    trips: int = 0
    steps: list[CodeStep] = field(default_factory=list)
    keyed: dict[Hashable, list[Var]] = field(default_factory=dict)


@dataclass(eq=False)
class Keyed:
    """Identities of random keys, and the draws so far."""

    identities: dict[Var, Hashable] = field(default_factory=dict)
    drawn: dict[Hashable, frozenset[str]] = field(default_factory=dict)  # bits -> kinds of their draws
    # identity -> the first draw, and the trips of the loops around it
    first: dict[Hashable, tuple[CodeStep, tuple[int, ...]]] = field(default_factory=dict)
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
        sums = {e.outvars[0]: e.invars for e in jaxpr.eqns if e.primitive.name == "add"}
        for x, first, v, result in zip(own[:carries], given, inside, jaxpr.outvars, strict=False):
            a, b = (None, None) if hasattr(result, "val") else sums.get(result, (None, None))
            if x.key and (following := _following(jaxpr, inside.index(v), len(inside))) is not None:
                self.identities[x] = ("carry", self.identity(first), following)
            elif a is v and hasattr(b, "val") and not x.shape:
                self.identities[x] = ("counter", self.identity(first), p["length"], p["reverse"], str(b))

    def stack(self, bodys: Sequence[Var], stacks: Sequence[Any]) -> None:
        """Identify the stacks of a body's results."""
        for y, whole in zip(bodys, stacks, strict=False):
            if isinstance(whole, Var):
                self.identities[whole] = ("stack", self.identity(y))

    def add(self, step: CodeStep, levels: Sequence[Level]) -> list[Var] | None:
        """Results of a step that reads keys: of an equal one, or of this one, which is added; None if refused."""
        params = () if step.kind.startswith("jit:") else tuple((k, str(v)) for k, v in sorted(step.params.items()))
        types = tuple((out.shape, out.dtype) for out in step.outs)
        identity = self._number(step.kind, types, params, *map(self.identity, step.ins))
        for level in levels:
            if identity in level.keyed:
                return level.keyed[identity]
        depth = len(levels) - 1
        while levels[depth].trips and all(x.const is not None or x.level < depth for x in step.ins):
            depth -= 1
        if not all(out.key for out in step.outs) and not self._add_draw(step, identity, levels[: depth + 1]):
            return None
        for n, out in enumerate(step.outs):
            out.level, out.maker, self.identities[out] = depth, step, (identity, n)
        levels[depth].steps.append(step)
        levels[depth].keyed[identity] = step.outs
        return step.outs

    def _add_draw(self, step: CodeStep, identity: int, levels: Sequence[Level]) -> bool:
        """Record the draws of a step; False where they may repeat others with the same keys."""
        # Parts of a differentiated function may contain the bits of a distribution without its name.
        keys = (self.identity(x) for x in step.ins if x.key)
        bits = (step.params.get("bit_width", 32), step.outs[0].shape, *keys)
        kinds = self.drawn.get(bits, frozenset())
        around = tuple(level.trips for level in levels if level.trips)
        first, like = self.first.setdefault(identity, (step, around))
        if first is not step and around == like:
            first.params = step.params = {**first.params, "stream": f"key {identity}"}
        elif step.kind in kinds or (kinds and "random_bits" in {step.kind, *kinds}):
            return False
        self.drawn[bits] = kinds | {step.kind}
        return True


def _following(jaxpr: Any, at: int, carries_and_slices: int) -> str | None:
    """How a loop computes a carry from its own value alone; None if other values determine it."""
    consts = len(jaxpr.invars) - carries_and_slices
    part, used = dce_jaxpr(jaxpr, [n == at for n in range(len(jaxpr.outvars))])
    return str(part) if [n for n, read in enumerate(used) if read] == [consts + at] else None
