"""Factors of operations that rules for slots may split.

A rule brings an axis to operations along a dim of one of their own tensors, or of one to which an earlier operation has
brought it (`meshlib.lowering.strategies`). So an axis that splits the model in slots alone (ZeRO-1) splits no product
of a forward pass along the model's dims.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from meshlib.core.graph import Operation, Tensor
from meshlib.core.opdef import Factor, Role
from meshlib.lowering.assigned import scope_of
from meshlib.lowering.simplification import Simplified, simplify
from meshlib.lowering.strategies import UNSPLIT

Dims: TypeAlias = defaultdict[Tensor, set[str]]  # those along which rules for slots may bring an axis


class SlotSplits:
    """The factors of a program's operations that rules for slots may split."""

    def __init__(self, outputs: Iterable[Tensor], updates: Sequence[Operation]) -> None:
        outputs = [*outputs]
        graph = (updates[0] if updates else outputs[0].operation).graph
        self._factors: dict[Operation, set[int]] = {}  # the numbers of these factors
        self._follow(simplify(graph, outputs, updates), {})

    def may_split(self, op: Operation, number: int) -> bool:
        """True unless no rule for slots brings an axis to a factor."""
        return number in self._factors.get(op, (number,))

    def _follow(self, simple: Simplified, given: Mapping[Tensor, Iterable[str]]) -> Dims:
        """Take the operations of a graph in order, as a lowering does; `given`: dims of its tensors from outside."""
        dims: Dims = defaultdict(set, {t: {*names} for t, names in given.items()})
        for op in simple.operations:
            for y in op.outputs:
                dims[y].update(y.shape.names if scope_of(y) == "slots" else ())
            if op.loop is not None:
                self._enter(op, simple.inputs[op], dims)
            elif op.opdef.kind not in UNSPLIT:
                self._split(op, (*simple.inputs[op], *op.outputs), dims)
        for op in reversed(simple.operations):  # what is computed again is split as its users are
            if op.outputs and op.output in simple.again:
                for n, f in enumerate(op.opdef.roles(op)):
                    if f.role is Role.PARALLEL and f.outputs[0] in dims[op.output]:
                        self._factors[op].add(n)
                        _bring(f, simple.inputs[op], dims)
        return dims

    def _split(self, op: Operation, tensors: Sequence[Tensor], dims: Dims) -> None:
        factors = self._factors.setdefault(op, set())
        for n, f in enumerate(op.opdef.roles(op)):
            if any(name in dims[x] for x, name in zip(tensors, (*f.operands, *f.outputs), strict=True)):
                factors.add(n)
                _bring(f, tensors, dims)

    def _enter(self, op: Operation, operands: Sequence[Tensor], dims: Dims) -> None:
        """Follow the body of a loop until its carries have no further dims."""
        loop = op.loop
        assert loop is not None
        ends = (*loop.made.finals, *loop.stacked)
        simple = simplify(loop.body, ends, ())
        results = [simple.of(t) for t in ends]
        given: Dims = defaultdict(set)
        for x, inside in (*zip(operands, loop.stand_ins, strict=True), *zip(op.outputs, results, strict=True)):
            given[inside] |= dims[x]
        grows = True
        while grows:
            inner, grows = self._follow(simple, given), False
            for inside, t in zip(loop.given.inits, results, strict=False):
                grows |= not inner[t] <= given[inside]
                given[inside] |= inner[t]
        for y, t in zip(op.outputs, results, strict=True):
            dims[y] |= inner[t]


def _bring(f: Factor, tensors: Sequence[Tensor], dims: Dims) -> None:
    """Let an axis that splits a factor split the dims of these tensors that it consists of."""
    for x, name in zip(tensors, (*f.operands, *f.outputs), strict=False):
        if name is not None:
            dims[x].add(name)
