"""Sums of products in normal form: a number times outer factors times a sum of the remaining factors.

A factor without the summed dims moves out of the sum: the sum over b of x[b, d] z[b, d] q[d] is q times that of x z.
Two sums are equal if they sum the same product, in whatever order it was multiplied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import isfinite, prod
from typing import Any, TypeAlias

from layouts import Dimension
from meshlib.core.graph import BACKWARD, Operation, Tensor
from meshlib.core.opdef import RESIDENT, Combination, OpDef, PowerProduct, Total
from meshlib.lowering.simplification import Simplified

DEEPEST = 8  # maximum depth of operations expanded into a product


@dataclass(frozen=True)
class Sum:
    """A sum over some dims of a product of tensors that have them; for an einsum, of its two operands' products."""

    kind: OpDef
    attrs: tuple[tuple[str, Any], ...]  # except the result's shape
    operands: tuple[frozenset[tuple[Tensor, int]], ...]  # (tensor, power) pairs of each operand
    over: frozenset[str]
    parts: tuple[Mapping[Tensor, int], ...] = field(compare=False)  # the operands, in program order

    @cached_property
    def dims(self) -> tuple[Dimension, ...]:
        """Dims of the result."""
        dim_of_name = {d.name: d for part in self.parts for t in part for d in t.shape}
        return tuple(d for name, d in dim_of_name.items() if name not in self.over)

    @cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.attrs, self.operands, self.over))

    def __hash__(self) -> int:
        return self._hash


Factor: TypeAlias = Tensor | Sum
Powers: TypeAlias = dict[Factor, int]


@dataclass(frozen=True)
class Monomial:
    """A number times factors to integer powers."""

    number: float
    powers: Powers

    @property
    def key(self) -> frozenset[tuple[Factor, int]]:
        """The factors and powers, without the number."""
        return frozenset(self.powers.items())

    @property
    def sums(self) -> Iterator[Sum]:
        """The sums among its factors."""
        return (f for f in self.powers if isinstance(f, Sum))

    def times(self, other: Monomial, power: int = 1) -> Monomial:
        """This monomial times `other` to a power."""
        powers = dict(self.powers)
        for f, n in other.powers.items():
            powers[f] = powers.get(f, 0) + n * power
        return Monomial(self.number * other.number**power, {f: n for f, n in powers.items() if n})


ONE = Monomial(1.0, {})


@dataclass(eq=False)
class Algebra:
    """Normal forms of the sums of one graph."""

    graph: Simplified
    # factors that all have summed dims -> tensor that is their product, without further dims
    products: dict[frozenset[tuple[Factor, int]], Tensor] = field(default_factory=dict)

    def total(self, op: Operation, within: Collection[str] | None = None) -> Monomial | None:
        """Normal form of an operation's result: factors, and at most one Sum; None if the operation sums nothing.

        With `within`, only these of its dims are summed; the others are left to sum afterwards.
        """
        if not isinstance(op.opdef.form(op), Total) or not op.output.dtype.is_float:
            return None
        inputs = self.graph.inputs[op]
        sizes = {d.name: d.size for x in inputs for d in x.shape if d.name not in op.output.shape}
        over = frozenset(sizes if within is None else within)
        whole = [self._monomial(x, over, op.region) for x in inputs]
        attrs = tuple((name, value) for name, value in op.attrs.items() if name != "shape")
        summed = self._summed(op.opdef, attrs, whole, over, inputs)
        if summed is None or within is None:
            return summed
        has = over.union(*(_names(f) for f in summed.powers))
        return Monomial(summed.number * prod(size for name, size in sizes.items() if name not in has), summed.powers)

    def parts(self, total: Sum, region: str) -> list[Monomial] | None:
        """A sum of a sum, distributed over its terms; equal terms are merged, and vanishing ones dropped.

        Only without loss of precision: a difference may be much smaller than its terms, so it is distributed only where
        cotangents meet, or where the whole sum vanishes, as that of values centred on their mean.
        """
        if len(total.parts) != 1:
            return None
        (product,) = total.parts
        for x, power in product.items():
            op = x.operation
            form = op.opdef.form(op)
            if power != 1 or not isinstance(form, Combination):
                continue
            rest: Powers = {f: n for f, n in product.items() if f is not x}
            monomials = []
            for y, number in zip(self.graph.inputs[op], form.numbers, strict=True):
                term = Monomial(number, rest).times(self._monomial(y, total.over, region))
                monomials.append(self._summed(total.kind, total.attrs, [term], total.over, [x, *rest_of(rest)]))
            left = self.collected([m for m in monomials if m is not None])
            meet = op.region == BACKWARD and op not in op.graph.again and self._is_available(op, region)
            if not left or meet:
                return left
        return None

    # ------------------------------------------------------------ products

    def _monomial(self, t: Tensor, over: frozenset[str], region: str, depth: int = 0) -> Monomial:
        """A tensor as a product of the factors that matter to a sum over these dims."""
        whole, op = Monomial(1.0, {t: 1}), t.operation
        form = op.opdef.form(op)
        if not isinstance(form, PowerProduct) or depth == DEEPEST or not t.dtype.is_float:
            return whole
        inputs = self.graph.inputs[op]
        inside = not over.isdisjoint(t.shape.names)
        if inside and not self._is_available(op, region):
            return whole
        product = Monomial(form.number, {})
        met: set[Factor] = set()
        for x, power in zip(inputs, form.powers, strict=True):
            part = self._monomial(x, over, region, depth + 1)
            if part.number == 0 and power < 0:
                return whole
            met.update(part.powers)
            product = product.times(part, power)
        if product.number == 0 or not isfinite(product.number) or len(met) > len(product.powers):
            return whole  # factors that cancel may be zero
        names = [_names(f) for f in product.powers]
        plain = product.number == 1 and not any(map(over.isdisjoint, names))
        if inside and plain and {*t.shape.names} <= {*chain(*names)}:
            self.products.setdefault(product.key, t)
        # A product outside the sum is used as it is, except for its scaling number.
        return product if inside or list(product.powers.values()) in ([], [1]) else whole

    def _is_available(self, op: Operation, region: str) -> bool:
        """True if all operands of an operation are available in a region anyway."""
        return op.region == region or all(
            x.operation.region == region
            or x.operation.opdef.kind in RESIDENT
            or not x.shape
            or any(user.region == region for user, _ in self.graph.uses.get(x, ()))
            for x in self.graph.inputs[op]
        )

    def _summed(
        self,
        kind: OpDef,
        attrs: tuple[tuple[str, Any], ...],
        operands: Sequence[Monomial],
        over: frozenset[str],
        written: Sequence[Tensor],
    ) -> Monomial | None:
        """Normal form of a sum over dims of a product of monomials; None if one of several operands has no summed dim.

        `written`: tensors that have all the summed dims.
        """
        outside, inside = ONE, []
        for m in operands:
            parts = [{f: n for f, n in m.powers.items() if over.isdisjoint(_names(f)) is out} for out in (True, False)]
            outside = outside.times(Monomial(m.number, parts[0]))
            inside.append(parts[1])
        if len(inside) > 1 and not all(inside):
            return None
        sizes = {d.name: d.size for x in written for d in x.shape if d.name in over}
        has = {name for part in inside for f in part for name in _names(f)}
        repeated = prod(size for name, size in sizes.items() if name not in has)
        monomial = Monomial(float(repeated), {}).times(outside)
        if not any(inside):
            return monomial
        tensor_parts = tuple({f: n for f, n in part.items() if isinstance(f, Tensor)} for part in inside)
        total = Sum(kind, attrs, tuple(frozenset(part.items()) for part in tensor_parts), over & has, tensor_parts)
        return monomial.times(Monomial(1.0, {total: 1}))

    def collected(self, terms: Iterable[Monomial]) -> list[Monomial]:
        """The terms with equal ones added up."""
        sums_of_keys: dict[object, tuple[float, float, Monomial]] = {}
        for m in terms:
            known = self._expanded(m)
            number, most, first = sums_of_keys.get(known.key, (0.0, 0.0, m))
            sums_of_keys[known.key] = number + known.number, max(most, abs(known.number)), first
        left = []
        for number, most, m in sums_of_keys.values():
            if abs(number) > 1e-9 * most:
                left.append(Monomial(m.number * number / self._expanded(m).number, m.powers))
        return left

    def _expanded(self, m: Monomial) -> Monomial:
        """A monomial with the tensors among its factors expanded into their own sums."""
        expanded = Monomial(m.number, {})
        for f, n in m.powers.items():
            expanded = expanded.times(self._expansion(f), n)
        return expanded

    def _expansion(self, f: Factor, depth: int = 0) -> Monomial:
        whole = Monomial(1.0, {f: 1})
        if isinstance(f, Sum) or depth == DEEPEST:
            return whole
        form, product = f.operation.opdef.form(f.operation), ONE
        if not isinstance(form, PowerProduct):
            return self.total(f.operation) or whole
        for x, power in zip(self.graph.inputs[f.operation], form.powers, strict=True):
            product = product.times(self._expansion(x, depth + 1), power)
        return Monomial(product.number * form.number, product.powers)


def rest_of(powers: Powers) -> list[Tensor]:
    """The tensors among the factors."""
    return [f for f in powers if isinstance(f, Tensor)]


def _names(f: Factor) -> tuple[str, ...]:
    return f.shape.names if isinstance(f, Tensor) else tuple(d.name for d in f.dims)
