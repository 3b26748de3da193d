"""Rows for convolutions, pools and resizing, against plain loops. See `tests/cases.py`.

The loops know one thing only: a window of the result lies `stride` further than the last one, its elements `dilation`
apart, `before` elements of padding before the first; what lies outside the image is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np

import meshlib as mtf
from meshlib.core.graph import Tensor
from meshlib.ops.building import build
from meshlib.ops.images.reduce_window import EXTREME, PICK, SPREAD
from meshlib.ops.images.sliding import Slide
from tests.cases import Array, distinct, index, row, signed, whole

Along = Sequence[tuple[int, int, int]]  # per spatial dim: stride, dilation, elements of padding before


def convolved(x: Array, w: Array, along: Along, out: Sequence[int]) -> Array:
    """x[n, ..., c], w[..., c, o] -> y[n, ..., o], as a loop over taps."""
    y = np.zeros((len(x), *out, w.shape[-1]))
    for tap in product(*map(range, w.shape[:-2])):
        into, of = meeting(tap, along, out, x.shape[1:-1])
        y[into] += x[of] @ w[tap]
    return y


def spread_out(x: Array, w: Array, along: Along, out: Sequence[int]) -> Array:
    """The transposed one: x[n, ..., c], w[..., o, c]; every input adds its window to the result."""
    y = np.zeros((len(x), *out, w.shape[-2]))
    for tap in product(*map(range, w.shape[:-2])):
        of, into = meeting(tap, along, x.shape[1:-1], out)
        y[into] += x[of] @ w[tap].T
    return y


def meeting(tap: Sequence[int], along: Along, windows: Sequence[int], elements: Sequence[int]) -> tuple[Any, Any]:
    """Which windows have an element at this tap, and which elements those are: index arrays with the batch first."""
    pairs = [
        [(i, i * s + f * d - p) for i in range(count) if 0 <= i * s + f * d - p < size]
        for f, (s, d, p), count, size in zip(tap, along, windows, elements, strict=True)
    ]
    first, second = ([[ends[side] for ends in dim] for dim in pairs] for side in (0, 1))
    return tuple((slice(None), *np.ix_(*(np.array(n, int) for n in side))) for side in (first, second))  # type: ignore[return-value]


def in_groups(x: Array, w: Array, groups: int, along: Along, out: Sequence[int]) -> Array:
    """Each run of channels by itself."""
    parts = zip(np.split(x, groups, -1), np.split(w, groups, -1), strict=True)
    return np.concatenate([convolved(a, b, along, out) for a, b in parts], -1)


def by_channel(x: Array, w: Array, along: Along, out: Sequence[int]) -> Array:
    """x[n, ..., c], w[..., c, m] -> y[n, ..., c, m]."""
    parts = [convolved(x[..., c : c + 1], w[..., c : c + 1, :], along, out) for c in range(x.shape[-1])]
    return np.stack(parts, -2)


# ---------------------------------------------------------------- convolutions

IMAGE, WINDOW = "b:2;h:8;w:6;c:2", "kh:3;kw:3;c:2;o:4"
Build = Callable[..., Tensor]


def conv(variant: str, x: str, w: str, made: Build, reference: Callable[[Array, Array], Array], **more: Any) -> None:
    """A row of the operation, with its gradients."""
    inputs = {"x": signed(x), "w": signed(w)}
    row("convolution", variant, inputs, lambda f, x, w: made(x, w), reference, "xw", tolerance=1e-9, **more)


conv("same", IMAGE, WINDOW, lambda x, w: mtf.conv2d(x, w),
     lambda x, w: convolved(x, w, [(1, 1, 1)] * 2, (8, 6)))  # fmt: skip
conv("strided", "b:2;h:8;w:4;c:2", "kh:3;kw:3;c:2;o:2", lambda x, w: mtf.conv2d(x, w, 2),
     lambda x, w: convolved(x, w, [(2, 1, 0)] * 2, (4, 2)))  # fmt: skip
conv("inside only", "b:2;h:6;w:8;c:2", "kh:3;kw:5;c:2;o:2", lambda x, w: mtf.conv2d(x, w, padding="VALID"),
     lambda x, w: convolved(x, w, [(1, 1, 0)] * 2, (4, 4)))  # fmt: skip
conv("of one element, strided", "b:2;h:8;w:4;c:2", "kh:1;kw:1;c:2;o:4", lambda x, w: mtf.conv2d(x, w, 2),
     lambda x, w: x[:, ::2, ::2] @ w[0, 0])  # fmt: skip
conv("ragged", "b:2;h:12;w:9;c:1", "kh:2;kw:4;c:1;o:3",
     lambda x, w: mtf.conv2d(x, w, {"h": 2, "w": 3}, [(3, 1), (0, 2)], [2, 1]),
     lambda x, w: convolved(x, w, [(2, 2, 3), (3, 1, 0)], (7, 3)))  # fmt: skip
conv("with margins that differ from block to block", "b:2;h:12;c:2", "kh:5;c:2;o:2",
     lambda x, w: mtf.conv1d(x, w, 3, 4),
     lambda x, w: convolved(x, w, [(3, 1, 4)], (6,)))  # fmt: skip
conv("wider than a block", "b:2;h:8;c:2", "kh:7;c:2;o:2", lambda x, w: mtf.conv1d(x, w, dilation=2),
     lambda x, w: convolved(x, w, [(1, 2, 6)], (8,)))  # fmt: skip
conv("with taps further apart than a block is long", "b:2;h:8;c:2", "kh:3;c:2;o:2",
     lambda x, w: mtf.conv1d(x, w, dilation=3),
     lambda x, w: convolved(x, w, [(1, 3, 3)], (8,)))  # fmt: skip
conv("channels first", "b:2;c:2;h:4;w:6", "o:2;c:2;kh:3;kw:2",
     lambda x, w: mtf.conv2d(x, w, padding={"h": (1, 1)}, spatial={"h": "kh", "w": "kw"}),
     lambda x, w: convolved(
         x.transpose(0, 2, 3, 1), w.transpose(2, 3, 1, 0), [(1, 1, 1), (1, 1, 0)], (4, 5)
     ).transpose(0, 3, 1, 2))  # fmt: skip
conv("of volumes", "b:2;d:4;h:2;w:4;c:1", "kd:2;kh:3;kw:2;c:1;o:2",
     lambda x, w: mtf.conv3d(x, w, [2, 1, 2]),
     lambda x, w: convolved(x, w, [(2, 1, 0), (1, 1, 1), (2, 1, 0)], (2, 2, 2)))  # fmt: skip
conv("in groups", "b:2;h:4;w:2;c:4", "kh:3;kw:3;c:2;o:4", lambda x, w: mtf.conv2d(x, w, 1, 1, groups=2),
     lambda x, w: in_groups(x, w, 2, [(1, 1, 1)] * 2, (4, 2)))  # fmt: skip
conv("by channel", "b:2;h:4;w:8;c:2", "kh:3;kw:3;c:2", lambda x, w: mtf.depthwise_conv2d(x, w, {"h": 1, "w": 2}),
     lambda x, w: by_channel(x, w[..., None], [(1, 1, 1), (2, 1, 0)], (4, 4))[..., 0])  # fmt: skip
conv("by channel, several", "b:2;h:4;w:2;c:2", "kh:2;kw:3;c:2;m:2", lambda x, w: mtf.depthwise_conv2d(x, w),
     lambda x, w: by_channel(x, w, [(1, 1, 0), (1, 1, 1)], (4, 2)))  # fmt: skip
conv("transposed", "b:2;h:4;w:2;c:2", "kh:4;kw:4;o:2;c:2", lambda x, w: mtf.conv2d_transpose(x, w, 2),
     lambda x, w: spread_out(x, w, [(2, 1, 1)] * 2, (8, 4)))  # fmt: skip
conv("transposed, whole windows", "b:2;h:4;w:3;c:1", "kh:3;kw:2;o:2;c:1",
     lambda x, w: mtf.conv2d_transpose(x, w, [2, 3], "VALID"),
     lambda x, w: spread_out(x, w, [(2, 1, 0), (3, 1, 0)], (9, 9)))  # fmt: skip
conv("transposed, cut", "b:2;h:6;c:2", "kh:5;o:4;c:2", lambda x, w: mtf.conv1d_transpose(x, w, 2, (2, 1)),
     lambda x, w: spread_out(x, w, [(2, 1, 2)], (12,)))  # fmt: skip
conv("transposed, of volumes and in groups", "b:2;d:2;h:4;w:2;c:4", "kd:2;kh:3;kw:1;o:6;c:2",
     lambda x, w: mtf.conv3d_transpose(x, w, [2, 1, 2], groups=2),
     lambda x, w: np.concatenate([
         spread_out(a, b, [(2, 1, 0), (1, 1, 1), (2, 1, 0)], (4, 4, 4))
         for a, b in zip(np.split(x, 2, -1), np.split(w, 2, -2), strict=True)
     ], -1))  # fmt: skip


# ---------------------------------------------------------------- pools


def pooled(x: Array, windows: Sequence[int], along: Along, out: Sequence[int], reduce: Callable[..., Any]) -> Array:
    """x[n, ..., c] -> y[n, ..., c], each element `reduce` of what of its window lies inside."""
    y = np.zeros((len(x), *out, x.shape[-1]))
    for place in product(*map(range, out)):
        inside = [
            [j for k in range(w) if 0 <= (j := i * s + k * d - p) < size]
            for i, w, (s, d, p), size in zip(place, windows, along, x.shape[1:-1], strict=True)
        ]
        y[(slice(None), *place)] = reduce(x[(slice(None), *np.ix_(*inside))], axis=tuple(range(1, x.ndim - 1)))
    return y


row("reduce_window", "maximum", {"x": distinct("b:2;h:8;w:6;c:2")},
    lambda f, x: mtf.max_pool(x, {"h": 3, "w": 3}, 2, "SAME"),
    lambda x: pooled(x, (3, 3), [(2, 1, 0)] * 2, (4, 3), np.max), "x")  # fmt: skip
row("reduce_window", "minimum, gaps", {"x": distinct("b:2;h:8;c:2")},
    lambda f, x: mtf.pool(x, {"h": 2}, "min", 4),
    lambda x: pooled(x, (2,), [(4, 1, 0)], (2,), np.min), "x")  # fmt: skip
row("reduce_window", "maximum of integers", {"x": whole("b:2;h:8;c:2")},
    lambda f, x: mtf.max_pool(x, {"h": 3}, 1, "SAME"),
    lambda x: pooled(x, (3,), [(1, 1, 1)], (8,), np.max).astype(int))  # fmt: skip
row("reduce_window", "sum, ragged", {"x": signed("b:2;h:12;w:6;c:2")},
    lambda f, x: mtf.pool(x, {"h": 5, "w": 2}, "sum", {"h": 3, "w": 1}, padding=[(4, 3), (0, 1)], dilation=[1, 2]),
    lambda x: pooled(x, (5, 2), [(3, 1, 4), (1, 2, 0)], (5, 5), np.sum), "x")  # fmt: skip
row("reduce_window", "mean", {"x": signed("b:2;h:8;w:4;c:2")},
    lambda f, x: mtf.avg_pool(x, {"h": 3, "w": 3}, {"h": 2, "w": 1}, "SAME"),
    lambda x: pooled(x, (3, 3), [(2, 1, 0), (1, 1, 1)], (4, 4), np.mean), "x")  # fmt: skip
row("reduce_window", "mean with padding", {"x": signed("b:2;h:8;c:2")},
    lambda f, x: mtf.avg_pool(x, {"h": 3}, 1, 1, count_padding=True),
    lambda x: pooled(x, (3,), [(1, 1, 1)], (8,), np.sum) / 3, "x")  # fmt: skip
row("reduce_window", "a rest left out", {"x": signed("b:2;h:9;c:4")},
    lambda f, x: mtf.avg_pool(x, {"h": 2}, 2),
    lambda x: pooled(x, (2,), [(2, 1, 0)], (4,), np.mean), "x")  # fmt: skip

SLIDES = (("h", Slide(2, 1, 1, 1, 8, 3, 4)), ("w", Slide(1, 1, 1, 0, 4, 1, 4)))


# [windows, positions, elements]: whether an element has a position in a window
_AT = np.array([[[j == 2 * i - 1 + k for j in range(8)] for k in range(3)] for i in range(4)])


def _chosen(at: Array) -> Array:
    """[n, windows, elements, w, c]: whether an element is the one at the position that its window names."""
    return np.einsum("nikwc,ikj->nijwc", at[:, :, None] == np.arange(3)[:, None, None], _AT * 1)


def _first_extreme(x: Array, extreme: Callable[..., Any]) -> Array:
    """The position of the first element that is the extreme of 3 x 2 windows, read row by row."""
    at = np.zeros((2, 4, 3, 2), int)
    for n, i, j, c in np.ndindex(*at.shape):
        rows, columns = (2 * i - 1, 2 * i, 2 * i + 1), (j, j + 1)
        window = {k: x[n, r, s, c] for k, (r, s) in enumerate(product(rows, columns)) if 0 <= r < 8}
        at[n, i, j, c] = next(k for k, value in window.items() if value == extreme(window.values()))
    return at


_SLIDES_2D = (("h", Slide(2, 1, 1, 1, 8, 3, 4)), ("w", Slide(1, 1, 1, 0, 4, 2, 3)))
for _kind, _extreme in (("max", max), ("min", min)):
    row("window_extreme", _kind, {"x": whole("b:2;h:8;w:4;c:2", -1, 3)},
        lambda f, x, kind=_kind: build(EXTREME, [mtf.to_float(x)], {"slides": _SLIDES_2D, "reduction": kind}),
        lambda x, extreme=_extreme: _first_extreme(x, extreme))  # fmt: skip
row("window_pick", "plain", {"z": signed("b:2;h:8;w:4;c:2"), "at": index("b:2;h:4;w:4;c:2", 3)},
    lambda f, z, at: build(PICK, [z, at], {"slides": SLIDES}),
    lambda z, at: np.einsum("nijwc,njwc->niwc", _chosen(at), z), "z")  # fmt: skip
row("window_spread", "plain", {"d": signed("b:2;h:4;w:4;c:2"), "at": index("b:2;h:4;w:4;c:2", 3)},
    lambda f, d, at: build(SPREAD, [d, at], {"slides": SLIDES}),
    lambda d, at: np.einsum("nijwc,niwc->njwc", _chosen(at), d), "d")  # fmt: skip


# ---------------------------------------------------------------- resizing


def interpolated(x: Array, axis: int, new: int, nearest: bool) -> Array:
    """Each element at its centre, between the two elements of x whose centres are nearest."""
    old, parts = x.shape[axis], []
    for i in range(new):
        place = (i + 0.5) * old / new
        if nearest:
            parts.append(x.take(int(place), axis))
            continue
        low = int(np.floor(place - 0.5))
        share = place - 0.5 - low
        ends = [x.take(min(max(j, 0), old - 1), axis) for j in (low, low + 1)]
        parts.append((1 - share) * ends[0] + share * ends[1])
    return np.stack(parts, axis)


_SIZES = {"twice": ("b:2;h:4;c:2", 8), "half": ("b:2;h:8;c:2", 4), "larger": ("b:2;h:8;c:1", 12),
          "smaller": ("b:2;h:12;c:1", 4), "one": ("b:2;h:4;c:2", 1), "five": ("b:2;h:3;c:2", 5)}  # fmt: skip
for _name, (_old, _new) in _SIZES.items():
    for _method in ("nearest", "bilinear"):
        row("interpolate", f"{_method} {_name}", {"x": signed(_old)},
            lambda f, x, n=_new, m=_method: mtf.resize(x, {"h": n}, m),
            lambda x, n=_new, m=_method: interpolated(x, 1, n, m == "nearest"), "x")  # fmt: skip
row("interpolate", "two dims", {"x": signed("b:2;h:4;w:6")},
    lambda f, x: mtf.resize(x, {"h": 8, "w": 3}),
    lambda x: interpolated(interpolated(x, 1, 8, False), 2, 3, False), "x")  # fmt: skip
row("reshape", "squares as channels", {"x": signed("b:2;h:4;w:6;c:2")},
    lambda f, x: mtf.space_to_depth(x, 2),
    lambda x: np.concatenate([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], -1), "x")  # fmt: skip
row("reshape", "channels as squares", {"x": signed("b:2;c:8;h:2;w:3")},
    lambda f, x: mtf.depth_to_space(x, 2, ["h", "w"], "c"),
    lambda x: x.reshape(2, 2, 2, 2, 2, 3).transpose(0, 3, 4, 1, 5, 2).reshape(2, 2, 4, 6), "x")  # fmt: skip
