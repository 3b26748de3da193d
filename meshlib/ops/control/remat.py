"""Rematerialisation: the forward values that a loop, or a function under `recompute_grad`, keeps.

All operations are copied for the gradient; a policy marks the values that are known. Copies whose results are known,
and the operations that only they need, are dead code. So a policy chooses among the values that the gradient reads;
others are never kept.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from meshlib.core.arguments import at, choice, flag, items
from meshlib.core.errors import GraphError, nearest
from meshlib.core.graph import Operation, Tensor, absolute_scope
from meshlib.core.opdef import MOST_OPS, RESIDENT, THROUGH, Array, Block, Home, Kind, Linear, OpDef, operation
from meshlib.ops.building import build, named_factors, no_work


def _local(block: Block, x: Array) -> Array:
    out = block.result()
    np.copyto(out, x)
    return out


def _define(name: str) -> OpDef:
    return operation(
        name,
        kind=Kind.COPY,
        shape=lambda types, attrs: types[0],
        roles=named_factors,
        local=_local,
        grad=lambda op, dy: [dy],
        linear=lambda op: Linear((0,)),
        work=no_work,
        home=Home.OPERAND,
        exact=True,
    )


TO_HOST, FROM_HOST = _define("to_host"), _define("from_host")


def to_host(x: Tensor) -> Tensor:
    """`x` copied to host memory."""
    with absolute_scope(x.operation.name):
        return build(TO_HOST, [x], {"on_host": True})


def from_host(x: Tensor) -> Tensor:
    """`x` copied from host memory to HBM."""
    with absolute_scope(x.operation.name):
        return build(FROM_HOST, [x], {})


POLICIES = ("full", "none", "matmuls")


@dataclass(frozen=True)
class Remat:
    """A policy that keeps values by name: `mtf.Remat(save=["q", "k", "v"], offload=["context"])`.

    An operation matches if the last part of its name in the listing, without the number of a repetition, is in the
    list: "q" matches "decoder/attention/q" and "decoder/attention/q_1". Its result is kept; if its only consumer
    constrains its sharding, as for tokens dispatched to experts, the resharded value is kept.

    Args:
      save: names of values kept in HBM.
      offload: names of values kept in host memory: copied there in the forward pass, and back before use.
      offload_carries: whether the carries before each trip of a loop are kept on the host.
    Raises: GraphError for an argument that is not a list of names, or a name in both lists.
    Example:
      >>> import meshlib as mtf
      >>> layers, d = mtf.Dimension("layers", 6), mtf.Dimension("d", 8)
      >>> with mtf.Graph():
      ...     x, w = mtf.input("x", [d]), mtf.variable("w", [layers, d])
      ...     body = lambda carries, slices: ([mtf.tanh(mtf.multiply(*carries, *slices), name="y")], [])
      ...     (y,), _ = mtf.scan(body, [x], [w], layers, remat=mtf.Remat(offload=["y"]))
      ...     program = mtf.lower(mtf.gradients([y], [w]))
      >>> program.to_host_bytes, program.from_host_bytes, 6 * 8 * 4
      (192, 192, 192)
    """

    save: Sequence[str] = ()
    offload: Sequence[str] = ()
    offload_carries: bool = False

    def __post_init__(self) -> None:
        for where in ("save", "offload"):
            names = items(getattr(self, where), "Remat", where)
            for name in names:
                if not isinstance(name, str) or not name or "/" in name:
                    raise GraphError(f"{at('Remat')}: {where} must be a list of last parts of names, got {name!r:.80}")
            object.__setattr__(self, where, tuple(names))
        flag(self.offload_carries, "Remat", "offload_carries")
        both = sorted({*self.save} & {*self.offload})
        if both:
            raise GraphError(f"{at('Remat')}: '{both[0]}' is in both save and offload; remove it from one")


@dataclass(eq=False)
class PartialPolicy:
    """Keeps everything, except in groups of operations with their own policies, such as functions in a loop body."""

    parts: list[tuple[set[Operation], str | Remat]] = field(default_factory=list)

    def add(self, operations: Sequence[Operation], remat: str | Remat) -> None:
        """Set the policy of a group of operations, replacing those of groups inside it."""
        whole = set(operations)
        self.parts = [(part, policy) for part, policy in self.parts if not part <= whole]
        self.parts.append((whole, remat))


Policy = str | Remat


def checked_policy(remat: object, what: str) -> Policy:
    """`remat`, which must be the name of a policy or a `Remat`."""
    if isinstance(remat, Remat):
        return remat
    if isinstance(remat, str):
        return choice(remat, what, "remat", POLICIES)
    raise GraphError(f"{at(what)}: remat must be {', '.join(map(repr, POLICIES))} or an mtf.Remat, got {remat!r:.80}")


def kept_values(
    operations: Sequence[Operation], remat: Policy | PartialPolicy, what: str
) -> list[tuple[Tensor, Tensor]]:
    """The values of these operations that `remat` keeps, each with its stored copy: itself, or a copy on the host.

    Raises: GraphError if no operation has a name of the policy.
    """
    if isinstance(remat, PartialPolicy):
        inside = {op for part, _ in remat.parts for op in part}
        values = [(y, y) for y in _expensive_values(operations) if y.operation not in inside]
        for part, policy in remat.parts:
            values += kept_values([op for op in operations if op in part], policy, what)
        return values
    if isinstance(remat, Remat):
        return _by_name(operations, remat, what)
    if remat == "none":
        return [(y, y) for y in _expensive_values(operations)]
    if remat == "matmuls":
        settled = _ConstrainedValues(operations)
        return [(y, y) for y in dict.fromkeys(settled.of(op.output) for op in operations if _is_plain_product(op))]
    return []


def _by_name(operations: Sequence[Operation], remat: Remat, what: str) -> list[tuple[Tensor, Tensor]]:
    named: dict[str, list[Operation]] = {}
    for op in operations:
        if op.opdef.kind in RESIDENT:
            continue  # available anyway
        last = op.name.rpartition("/")[2]
        for name in dict.fromkeys((last, re.sub(r"_\d+$", "", last))):
            named.setdefault(name, []).append(op)
    for name in (*remat.save, *remat.offload):
        if name not in named:
            raise GraphError(f"{at(what)}: no operation is named '{name}', which remat keeps{nearest(name, named)}")
    settled = _ConstrainedValues(operations)
    both = {"save": remat.save, "offload": remat.offload}
    wanted = [
        (how, y) for how, names in both.items() for name in names for op in named[name] for y in op.public_outputs
    ]
    chosen = {settled.of(y): how for how, y in wanted}
    return [(y, y if how == "save" else to_host(y)) for y, how in chosen.items()]


class _ConstrainedValues:
    """Values to keep in place of named ones: if the only consumer of a value constrains it, the constrained value."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.users: dict[Tensor, list[Operation]] = {}
        for op in operations:
            for x in op.inputs:
                self.users.setdefault(x, []).append(op)

    def of(self, y: Tensor) -> Tensor:
        """`y`, or the constrained value that replaces it."""
        users = self.users.get(y, [])
        return self.of(users[0].output) if len(users) == 1 and users[0].opdef.home is Home.GIVEN else y


def _expensive_values(operations: Sequence[Operation]) -> list[Tensor]:
    """Values worth keeping: results that a fusing compiler does not recompute inside consumers, unless loop-invariant.

    This excludes constants, and values computed elementwise, in few lane operations, from kept or available ones. But
    if the gradient reads such a value, and it is no larger than those of its sources that are needed for nothing else,
    it is kept itself: the sum of two products, a narrowing cast.
    """
    constant = _constants(operations)
    needed = _needed(operations, constant)
    sources_of: dict[Tensor, tuple[frozenset[Tensor], int]] = {}  # kept sources, lane operations
    expensive: list[Tensor] = []
    for op in operations:
        if op.opdef.kind in RESIDENT or op in constant:
            continue  # available anyway
        if not _is_inlined(op):
            expensive += op.outputs
            sources_of.update((y, (frozenset((y,)), 0)) for y in op.outputs)
            continue
        y, sources = op.output, [sources_of[x] for x in op.inputs if x in sources_of]
        of = frozenset[Tensor]().union(*(values for values, _ in sources))
        work = op.opdef.work(tuple(x.type for x in op.inputs), y.type, op.attrs)
        ops = work.vpu_ops + sum(n for _, n in sources)
        alone = sum(_size(x) for x in of if x not in needed)
        # Random numbers are expensive, but comparisons with them are narrower.
        if (op.inputs and ops > MOST_OPS * y.shape.size) or (y in needed and alone >= _size(y)):
            expensive.append(y)
            of, ops = frozenset((y,)), 0
        elif y in needed:
            needed |= of
        sources_of[y] = of, ops
    return expensive


def _constants(operations: Sequence[Operation]) -> set[Operation]:
    """The operations with the same results in every trip."""
    constants: set[Operation] = set()
    for op in operations:
        resident = op.opdef.kind in RESIDENT
        if not resident and not op.opdef.unique and all(x.operation in constants for x in op.inputs):
            constants.add(op)
    return constants


def _needed(operations: Sequence[Operation], constant: set[Operation]) -> set[Tensor]:
    """The values that gradients read: operands of nonlinear operations, and of products with other tensors."""
    needed: set[Tensor] = set()
    for op in operations:
        linear = op.opdef.linear(op)
        for n, x in enumerate(op.inputs):
            beside = (*op.inputs[:n], *op.inputs[n + 1 :])
            others = any(z.dtype.is_float and z.operation not in constant for z in beside)
            passed = op.opdef.home is Home.OPERAND or (n in linear.operands and (linear.together or not others))
            if not passed:
                needed.add(x)
    return needed


def _is_inlined(op: Operation) -> bool:
    """True if consumers can recompute the result inside their kernels, from values on the same device."""
    kind = op.opdef
    return kind.kind in THROUGH and kind.home is not Home.GIVEN and kind.lower is None and kind.show is None


def _size(x: Tensor) -> int:
    return x.dtype.size_bytes(x.shape.size)


def _is_plain_product(op: Operation) -> bool:
    """An einsum without batch dims except those of stacked variables, such as stages: a product with weights."""
    if op.opdef.kind is not Kind.CONTRACTION:
        return False
    a, b, *_ = op.inputs
    stacking = op.output.graph.stacking
    return not any(d in a.shape and d in b.shape and d not in stacking for d in op.output.shape)
