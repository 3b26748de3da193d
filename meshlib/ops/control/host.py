"""Copies to and from host memory, inserted by rematerialisation policies: see `mtf.Remat`.

A value on the host takes no HBM. It has the sharding that it has on devices; nothing is computed or resharded there.
"""

from __future__ import annotations

import numpy as np

from meshlib.core.graph import Tensor, absolute_scope
from meshlib.core.opdef import Array, Block, Home, Kind, Linear, OpDef, operation
from meshlib.ops.building import build
from meshlib.ops.rules import named_factors, no_work


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
