"""Rotations along an axis, as in `jnp.roll` and its gradient: two parts of a value in swapped order.

Forward it is a concatenation of slices. The gradient cuts by `split`, pads both pieces with zeros and adds them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from meshlib.jax.importing.code import CodeStep, Var

Run: TypeAlias = tuple[int, int, int]  # (first index, count, stride)


def runs_of(step: CodeStep) -> list[Run]:
    """The range of each axis that a slice takes."""
    starts, limits = step.params["start_indices"], step.params["limit_indices"]
    strides = step.params["strides"] or [1] * len(starts)
    return [(int(a), -(-(int(b) - int(a)) // int(s)), int(s)) for a, b, s in zip(starts, limits, strides, strict=True)]


def rotated(pieces: Sequence[Var], at: int) -> tuple[Var, int] | None:
    """The value that pieces rotate along an axis, and the index that comes first; None if they are no rotation."""
    if len(pieces) < 2:
        return None
    origins = [_origin(x, at) for x in pieces]
    whole, first = origins[0] or (None, 0)
    end = first
    for x, origin in zip(pieces, origins, strict=True):
        if whole is None or origin is None or origin[0] is not whole or origin[1] != end % whole.shape[at]:
            return None
        end = origin[1] + x.shape[at]
    size = sum(x.shape[at] for x in pieces)
    return (whole, first) if whole is not None and size == whole.shape[at] and end == first else None


def padded_pieces(step: CodeStep) -> tuple[list[Var], int] | None:
    """Two zero-padded pieces that a sum places one after the other along an axis; None for other sums."""
    makers = [x.maker for x in step.ins if x.maker is not None and x.maker.kind == "pad"]
    if len(makers) != 2 or any(maker.ins[1].number != 0 for maker in makers):
        return None
    axes = {n for maker in makers for n, (low, high, _) in enumerate(pads_of(maker)) if low or high}
    if len(axes) != 1 or any(between for maker in makers for _, _, between in pads_of(maker)):
        return None
    (at,) = axes
    (first, low), (second, before) = sorted(
        ((maker.ins[0], pads_of(maker)[at][0]) for maker in makers), key=lambda piece: piece[1]
    )
    adjacent = low == 0 and before == first.shape[at] and before + second.shape[at] == step.ins[0].shape[at]
    return ([first, second], at) if adjacent else None


def pads_of(step: CodeStep) -> list[tuple[int, int, int]]:
    """(before, after, between elements) of each axis that a pad adds."""
    return [(int(low), int(high), int(between)) for low, high, between in step.params["padding_config"]]


def _origin(x: Var, at: int) -> tuple[Var, int] | None:
    """The value that a piece was sliced from along one axis, and where the piece begins."""
    maker = x.maker
    if maker is None:
        return None
    if maker.kind == "split" and int(maker.params["axis"]) == at:
        place = next(n for n, piece in enumerate(maker.outs) if piece is x)
        return maker.ins[0], sum(map(int, maker.params["sizes"][:place]))
    if maker.kind != "slice":
        return None
    whole, runs = maker.ins[0], runs_of(maker)
    begin, _, stride = runs[at]
    if stride != 1 or any(run != (0, whole.shape[n], 1) for n, run in enumerate(runs) if n != at):
        return None
    if whole.maker is not None and whole.maker.kind == "pad":  # the piece without its padding
        piece, pads = whole.maker.ins[0], pads_of(whole.maker)
        same = piece.shape == x.shape and begin == pads[at][0]
        return _origin(piece, at) if same else None
    return whole, begin
