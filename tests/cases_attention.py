"""Rows for fused attention and its two gradients, and for the quarter turn of rotary positions. See `tests/cases.py`.

The reference goes head by head; it knows no batches, tiles or maxima.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import meshlib as mtf
from meshlib.core.graph import Tensor
from meshlib.ops.fused_attention.rotate import rotate_half
from tests.cases import Array, dims, flags, index, row, signed

D, E = dims("d:3;e:5")


def weights(
    q: Array, k: Array, scale: float, causal: bool, window: int | None, seen: Array, bias: Array | float = 0
) -> Array:
    """softmax of the scores of each query, by the definition: zeros where every key is hidden."""
    query, key = np.indices(seen.shape)
    hidden = ~seen
    if causal:
        hidden = hidden | (key > query)
    if window:
        hidden = hidden | (abs(query - key) >= window)
    e = np.where(hidden, 0, np.exp(scale * (q @ k.T) + bias))
    total = e.sum(axis=1, keepdims=True)
    return e / np.where(total > 0, total, 1)


def reference(
    q: Array,
    k: Array,
    v: Array,
    dy: Array | None = None,
    mask: Array | None = None,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
) -> tuple[Array, ...]:
    """One head: y; with its cotangent dq, dk and dv, too."""
    scale = 1 / np.sqrt(q.shape[1]) if scale is None else scale
    seen = np.ones((len(q), len(k)), bool) if mask is None else mask
    p = weights(q, k, scale, causal, window, seen)
    if dy is None:
        return (p @ v,)
    dp = dy @ v.T
    ds = scale * p * (dp - (p * dp).sum(axis=1, keepdims=True))
    return ds @ k, ds.T @ q, p.T @ dy


def plain(which: int | None, **options: Any) -> Any:
    """b h i d, b h j d, b h j e, b h i e: the result, or one of the gradients (0: q, 1: k, 2: v)."""

    def apply(q: Array, k: Array, v: Array, dy: Array | None = None) -> Array:
        cotangents = np.zeros(q.shape[:2]) if dy is None else dy
        made = [
            [reference(q[b, h], k[b, h], v[b, h], None if dy is None else cotangents[b, h], **options)[which or 0]
             for h in range(q.shape[1])]
            for b in range(q.shape[0])
        ]  # fmt: skip
        return np.array(made)

    return apply


def grouped(which: int | None, **options: Any) -> Any:
    """i b g h d, h j b d, b j h d (one name for the elements of keys and values), dims in no order; mask b j."""

    def apply(q: Array, k: Array, v: Array, *more: Array) -> Array:
        dy, mask = more[:2] if which is not None else (None, more[0])
        (_, batch, group, heads, _) = q.shape
        total = [np.zeros(x.shape) for x in (q, k, v)]
        for b, g, h in np.ndindex(batch, group, heads):
            if len(more) > (which is not None) + 1:  # numbers of segments, of queries and keys
                seen = more[-2][b][:, None] == more[-1][b]
            else:
                seen = np.broadcast_to(mask[b], (len(q), k.shape[1]))
            part = None if dy is None else dy[:, b, g, h]
            made = reference(q[:, b, g, h], k[h, :, b], v[b, :, h], part, seen, **options)
            places = (np.s_[:, b, g, h], np.s_[h, :, b], np.s_[b, :, h])
            for x, at, y in zip(total, places, made, strict=False):
                x[at] += y
        return total[which or 0]

    return apply


def gradient(y: Tensor, x: Tensor, dy: Tensor) -> Tensor:
    """dx, which must be there."""
    (dx,) = mtf.gradients([y], [x], [dy])
    assert dx is not None
    return dx


PLAIN = {"q": signed("b:2;h:2;i:4;d:3"), "k": signed("b:2;h:2;j:4;d:3"), "v": signed("b:2;h:2;j:4;e:5")}
OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "causal window": {"causal": True, "window": 2, "scale": 0.75},
    "window": {"window": 2},
}


def operation_name(which: int | None, window: bool) -> str:
    """Of the operation that makes the result, or one of the gradients."""
    return f"attention{'_window' * window}{'' if which is None else ('_grad_query', *['_grad_memory'] * 2)[which]}"


for _name, _options in OPTIONS.items():
    row(
        operation_name(None, "window" in _options),
        _name,
        PLAIN,
        lambda f, q, k, v, o=_options: mtf.attention(q, k, v, "i", "j", "d", "e", **o),
        plain(None, **_options),
        "qkv",
    )
for _which, _x, _variant in (
    (0, "q", "causal window"),
    (1, "k", "causal window"),
    (2, "v", "causal window"),
    (0, "q", "window"),
    (1, "k", "window"),
    (0, "q", "causal"),
    (1, "k", "all"),
    (2, "v", "causal"),
):
    _options = OPTIONS[_variant]
    row(
        operation_name(_which, "window" in _options),
        f"of {_x}, {_variant}",
        {**PLAIN, "c": signed("b:2;h:2;i:4;e:5")},
        lambda f, q, k, v, c, x=_which, o=_options: gradient(
            mtf.attention(q, k, v, "i", "j", "d", "e", **o), (q, k, v)[x], c
        ),
        plain(_which, **_options),
        "qkvc" if _x != "v" else "qkc",
    )

GROUPED = {"q": signed("i:4;b:2;g:2;h:1;d:3"), "k": signed("h:1;j:6;b:2;d:3"), "v": signed("b:2;j:6;h:1;d:3")}
row(
    "attention",
    "grouped with mask",
    {**GROUPED, "m": flags("b:2;j:6")},
    lambda f, q, k, v, m: mtf.attention(q, k, v, "i", "j", "d", causal=True, mask=m),
    grouped(None, causal=True),
    "qkv",
)
for _which, _x in enumerate("qkv"):
    row(
        operation_name(_which, window=False),
        f"grouped with mask of {_x}",
        {**GROUPED, "c": signed("i:4;b:2;g:2;h:1;d:3"), "m": flags("b:2;j:6")},
        lambda f, q, k, v, c, m, x=_which: gradient(
            mtf.attention(q, k, v, "i", "j", "d", causal=True, mask=m), (q, k, v)[x], c
        ),
        grouped(_which, causal=True),
        "qkvc" if _x != "v" else "qkc",
    )

BAND = {"q": signed("i:6;b:2;g:2;h:1;d:3"), "k": signed("h:1;j:6;b:2;d:3"), "v": signed("b:2;j:6;h:1;d:3")}
row(
    "attention_window",
    "grouped with mask",
    {**BAND, "m": flags("b:2;j:6")},
    lambda f, q, k, v, m: mtf.attention(q, k, v, "i", "j", "d", window=3, mask=m),
    grouped(None, window=3),
    "qkv",
)
for _which, _x in enumerate("qkv"):
    row(
        operation_name(_which, window=True),
        f"grouped with mask of {_x}",
        {**BAND, "c": signed("i:6;b:2;g:2;h:1;d:3"), "m": flags("b:2;j:6")},
        lambda f, q, k, v, c, m, x=_which: gradient(
            mtf.attention(q, k, v, "i", "j", "d", window=3, mask=m), (q, k, v)[x], c
        ),
        grouped(_which, window=3),
        "qkvc" if _x != "v" else "qkc",
    )

row(
    "attention",
    "segments",
    {**GROUPED, "s": index("b:2;i:4", 3), "t": index("b:2;j:6", 3)},
    lambda f, q, k, v, s, t: mtf.attention(q, k, v, "i", "j", "d", causal=True, segments=(s, t)),
    grouped(None, causal=True),
    "qkv",
)
for _which, _x in enumerate("qkv"):
    for _window in (None, 3):
        _shapes = GROUPED if _window is None else BAND
        _rows = "i:4" if _window is None else "i:6"
        row(
            operation_name(_which, window=_window is not None),
            f"segments of {_x}",
            {
                **_shapes,
                "c": signed(f"{_rows};b:2;g:2;h:1;d:3"),
                "s": index(f"b:2;{_rows}", 2),
                "t": index("b:2;j:6", 2),
            },
            lambda f, q, k, v, c, s, t, x=_which, w=_window: gradient(
                mtf.attention(q, k, v, "i", "j", "d", causal=True, window=w, segments=(s, t)), (q, k, v)[x], c
            ),
            grouped(_which, causal=True, window=_window),
            "qkvc" if _x != "v" else "qkc",
        )


def biased(which: int | None, **options: Any) -> Any:
    """As GROUPED with mask b j (before it, of a gradient, the cotangent) and bias j g i, or j g."""

    def apply(q: Array, k: Array, v: Array, *more: Array) -> Array:
        dy, mask, bias = (None, *more) if which is None else more
        (_, batch, group, heads, _) = q.shape
        made = np.zeros((q, k, v)[which or 0].shape)
        for b, g, h in np.ndindex(batch, group, heads):
            one, keys, values = q[:, b, g, h], k[h, :, b], v[b, :, h]
            seen = np.broadcast_to(mask[b], (len(one), len(keys)))
            p = weights(one, keys, 3**-0.5, options["causal"], options.get("window"), seen, bias[:, g].T)
            if dy is None:
                made[:, b, g, h] = p @ values
                continue
            dp = dy[:, b, g, h] @ values.T
            ds = p * (dp - (p * dp).sum(axis=1, keepdims=True))
            places = (np.s_[:, b, g, h], np.s_[h, :, b], np.s_[b, :, h])
            found = (ds @ keys * 3**-0.5, ds.T @ one * 3**-0.5, p.T @ dy[:, b, g, h])
            made[places[which or 0]] += found[which or 0]
        return made

    return apply


for _window in (None, 3):
    _shapes, _rows = (GROUPED, "i:4") if _window is None else (BAND, "i:6")
    row(
        operation_name(None, window=False),  # of a bias with both dims no run of either tells what a block needs
        f"bias, window {_window}",
        {**_shapes, "m": flags("b:2;j:6"), "z": signed(f"j:6;g:2;{_rows}")},
        lambda f, q, k, v, m, z, w=_window: mtf.attention(
            q, k, v, "i", "j", "d", causal=w is not None, mask=m, bias=z, window=w
        ),
        biased(None, causal=_window is not None, window=_window),
        "qkvz",
    )
    for _which, _x in enumerate("qkv"):
        row(
            operation_name(_which, window=False),
            f"of {_x}, bias, window {_window}",
            {
                **_shapes,
                "c": signed(f"{_rows};b:2;g:2;h:1;d:3"),
                "m": flags("b:2;j:6"),
                "z": signed(f"j:6;g:2;{_rows}"),
            },
            lambda f, q, k, v, c, m, z, x=_which, w=_window: gradient(
                mtf.attention(q, k, v, "i", "j", "d", causal=w is not None, mask=m, bias=z, window=w), (q, k, v)[x], c
            ),
            biased(_which, causal=_window is not None, window=_window),
            "qkvcz" if _x != "v" else "qkcz",
        )

for _which, _x in ((None, ""), (0, "q"), (1, "k")):
    row(
        operation_name(_which, window=True),
        f"{f'of {_x}, ' if _x else ''}bias of keys",
        {
            **BAND,
            **({} if _which is None else {"c": signed("i:6;b:2;g:2;h:1;d:3")}),
            "m": flags("b:2;j:6"),
            "z": signed("j:6;g:2"),
        },
        lambda f, q, k, v, *more, x=_which: (
            mtf.attention(q, k, v, "i", "j", "d", mask=more[-2], bias=more[-1], window=3)
            if x is None
            else gradient(
                mtf.attention(q, k, v, "i", "j", "d", mask=more[-2], bias=more[-1], window=3), (q, k, v)[x], more[0]
            )
        ),
        biased(_which, causal=False, window=3),
        "qkvz" if _which is None else "qkvcz",
    )

row(
    "rotate_half",
    "plain",
    {"x": signed("a:4;n:6;b:2")},
    lambda f, x: rotate_half(x, "n"),
    lambda x: np.concatenate([-x[:, 3:], x[:, :3]], axis=1),
    "x",
)
