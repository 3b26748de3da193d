"""A split length: attention to a split memory, windows, shifts, tokens taken out."""

from __future__ import annotations

import meshlib as mtf
from meshlib.core.graph import Tensor
from tests.lowering.minima.table import (
    F32,
    Case,
    D,
    all_gather,
    all_reduce,
    elements,
    given,
    half_square,
    product,
    reduce_scatter,
    row,
    sgd,
    weight,
    width,
)

N = 4
MESH = f"m:{N}"
B, L, H, K, WIDE = D("b", 2), D("l", 32), D("h", 4), D("k", 8), D("d", 16)
T = D("t", L.size)


def as_memory(x: Tensor) -> Tensor:
    return mtf.rename_dimension(x, "l", "t")


def heads(t: str, trained: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, each [b, l, h, k]."""
    return tuple((weight if trained else given)(name, [B, L, H, K], t) for name in "qkv")  # type: ignore[return-value]


# ---------------------------------------------------------------- attention


@row
def context_attention(t: str) -> Case:
    """Each device's queries see all keys and values, gathered or passed round a ring: the same bytes."""
    q, k, v = heads(t)
    y = mtf.attention(q, as_memory(k), as_memory(v), L, T, K)
    return Case({"y": y}, [], MESH, "l:m", 2 * all_gather(N, elements(k) * width(t)))


@row
def context_attention_step(t: str) -> Case:
    """Backward: the cotangents of keys and values are scattered.

    Keys and values of all positions are whole by the layout, which does not split `t`: the backward finds them.
    """
    q, k, v = heads(t, trained=True)
    y = mtf.attention(q, as_memory(k), as_memory(v), L, T, K)
    moved = elements(k, v) * width(t)
    least = all_gather(N, moved) + reduce_scatter(N, moved)
    return Case(None, sgd(half_square(y)), MESH, "l:m", least)


@row
def ring_attention(t: str) -> Case:
    """Queries and memory both split by the layout, over one axis: each block of the memory passes all devices."""
    q, k, v = heads(t)
    y = mtf.attention(q, as_memory(k), as_memory(v), L, T, K)
    return Case({"y": y}, [], MESH, "l:m;t:m?", 2 * all_gather(N, elements(k) * width(t)))


@row
def window_attention(t: str) -> Case:
    """A window of 5 reaches 4 keys back, which the neighbour before sends: of a block of 8, not the whole memory."""
    q, k, v = heads(t)
    window = 5
    y = mtf.attention(q, as_memory(k), as_memory(v), L, T, K, causal=True, window=window)
    row_bytes = B.size * H.size * K.size * width(t)
    return Case({"y": y}, [], MESH, "l:m;t:m?", 2 * (window - 1) * row_bytes)


def memory(t: str) -> tuple[Tensor, Tensor]:
    """Keys and values of a split cache."""
    return given("keys", [B, T, H, K], t), given("values", [B, T, H, K], t)


def merged(queries: int, t: str, statistics: int) -> int:
    """So many float32 statistics of each query's scores, and its context."""
    rows = B.size * H.size * queries
    return all_reduce(N, statistics * rows * F32) + all_reduce(N, rows * K.size * width(t))


@row
def decode_with_a_split_cache(t: str) -> Case:
    """One new token a sequence; softmax written out: its maximum, its sum and the context meet, no key moves."""
    keys, values = memory(t)
    q = given("q", [B, H, K], t)
    scores = mtf.cast(product(q, keys, B, H, T), "float32")
    y = product(mtf.cast(mtf.softmax(scores, T), t), values, B, H, K)
    return Case({"y": y}, [], MESH, "t:m", merged(1, t, 2), {"all_reduce": 3})


@row
def decode_with_a_split_cache_fused(t: str) -> Case:
    """The same by the kernel, each device on its part of the cache.

    The weight of a device's part is its share of the sum of exponentials: one logarithm of such a sum a query and head
    is all that devices tell each other before they sum the contexts.
    """
    keys, values = memory(t)
    q = given("q", [B, D("l", 1), H, K], t)
    y = mtf.attention(q, keys, values, "l", T, K)
    return Case({"y": y}, [], MESH, "t:m", merged(1, t, 1), {"all_reduce": 2})


@row
def attention_to_a_long_split_memory(t: str) -> Case:
    """Few queries, whole on every device, of a long memory in parts: as in decoding."""
    queries = 4
    keys, values = memory(t)
    q = given("q", [B, D("l", queries), H, K], t)
    y = mtf.attention(q, keys, values, "l", T, K)
    return Case({"y": y}, [], MESH, "t:m", merged(queries, t, 1), {"all_reduce": 2})


@row
def cache_that_stays_where_it_is(t: str) -> Case:
    """A new token is written into a split cache by the device that holds its place."""
    cache = mtf.variable("cache", [B, T, H, K], dtype="float32", trainable=False)
    new = mtf.cast(given("new", [B, D("t", 1), H, K], t), "float32")
    written = mtf.update_slice(cache, new, "t", given("at", [], "int32"))
    return Case(None, [mtf.assign(cache, written)], MESH, "variables/t:m", 0)


@row
def linear_attention(t: str) -> Case:
    """Sums over the split length of k v', [k, v], and of k, small beside keys and values; queries stay."""
    q, k, v = heads(t)
    q, k = mtf.exp(q), mtf.exp(k)
    value = D("value", K.size)
    state = product(k, mtf.rename_dimension(v, "k", "value"), B, H, K, value)
    total = mtf.reduce_sum(k, reduced_dim=L)
    y = product(q, state, B, L, H, value) / product(q, total, B, L, H)
    return Case({"y": y}, [], MESH, "l:m", all_reduce(N, elements(state, total) * width(t)), {"all_reduce": 2})


# ---------------------------------------------------------------- neighbours


def convolved(x: Tensor, taps: int, t: str) -> Tensor:
    """The sum of `taps` shifts of x, each with a weight for each channel."""
    return mtf.add_n([mtf.shift(x, n, L, wrap=False) * weight(f"w{n}", [WIDE], t) for n in range(taps)])


@row
def causal_convolution(t: str) -> Case:
    """Four taps reach three positions back: one halo of three rows, which the nearer taps share."""
    taps = 4
    x = given("x", [B, L, WIDE], t)
    halo = (taps - 1) * B.size * WIDE.size * width(t)
    return Case({"y": convolved(x, taps, t)}, [], MESH, "l:m", halo)


@row
def causal_convolution_step(t: str) -> Case:
    """Backward: one halo of the cotangent to the other side; a tap's gradient, [d], is a sum over the length.

    The shifted x are as large as x, so the forward's are kept. A device between two others sends both halos.
    """
    taps = 4
    x = weight("x", [B, L, WIDE], t)
    halo = (taps - 1) * B.size * WIDE.size * width(t)
    least = min(2, N - 1) * halo + all_reduce(N, taps * WIDE.size * width(t))
    return Case(None, sgd(half_square(convolved(x, taps, t))), MESH, "l:m", least)


@row
def difference_of_neighbours(t: str) -> Case:
    """Both neighbours: one row to each side; a device at an end has one neighbour."""
    x = given("x", [B, L, WIDE], t)
    y = mtf.shift(x, 1, L, wrap=False) - x * 2.0 + mtf.shift(x, -1, L, wrap=False)
    return Case({"y": y}, [], MESH, "l:m", min(2, N - 1) * B.size * WIDE.size * width(t))


def neighbourhood(x: Tensor, rows: mtf.Dimension, columns: mtf.Dimension) -> Tensor:
    """What the nine elements around each differ from it by, squashed: not linear, so no sums can go instead of them."""
    shifted = [mtf.shift(x, n, rows, wrap=False) for n in (-1, 0, 1)]
    around = [mtf.shift(y, n, columns, wrap=False) for y in shifted for n in (-1, 0, 1)]
    return mtf.add_n([mtf.tanh(y - x) for y in around])


@row
def neighbourhood_in_split_rows(t: str) -> Case:
    """A row to each side, whatever happens along the columns."""
    r, c = D("r", 16), D("c", 8)
    x = given("x", [r, c], t)
    return Case({"y": neighbourhood(x, r, c)}, [], MESH, "r:m", min(2, N - 1) * c.size * width(t))


@row
def neighbourhood_in_split_rows_and_columns(t: str) -> Case:
    """On 2 x 2 devices a row to one side, a column to one side, an element to the corner."""
    r, c = D("r", 16), D("c", 8)
    x = given("x", [r, c], t)
    least = (c.size // 2 + r.size // 2 + 1) * width(t)
    return Case({"y": neighbourhood(x, r, c)}, [], "a:2;e:2", "r:a;c:e", least)


# ---------------------------------------------------------------- tokens taken out


def token(x: Tensor, n: int) -> Tensor:
    """One token of a sequence, [b, d]; a dim of one can't be split, so it goes by another name."""
    one = mtf.slice(mtf.rename_dimension(x, "l", "token"), n, 1, "token")
    return mtf.reshape(one, [d for d in one.shape if d.name != "token"])


@row
def last_token(t: str) -> Case:
    """One device has it, the others zeros: a sum of [b, d], not a gather of the sequence."""
    y = token(given("x", [B, L, WIDE], t), L.size - 1)
    return Case({"y": y}, [], MESH, "l:m", all_reduce(N, elements(y) * width(t)))


@row
def token_by_index(t: str) -> Case:
    """The same by a lookup along the length."""
    y = mtf.gather(given("x", [B, L, WIDE], t), L.size - 1, L)
    return Case({"y": y}, [], MESH, "l:m", all_reduce(N, elements(y) * width(t)))


@row
def logits_of_the_last_token(t: str) -> Case:
    """The token goes to every part of a split vocabulary; the logits stay there."""
    v = D("v", 64)
    y = token(given("x", [B, L, WIDE], t), L.size - 1)
    logits = product(y, weight("w", [WIDE, v], t), B, v)
    return Case({"y": logits}, [], MESH, "l:m;v:m", all_reduce(N, elements(y) * width(t)))


@row
def class_of_the_first_token(t: str) -> Case:
    """A product with a whole weight is linear: the fewer classes are summed instead of the token."""
    c = D("c", 4)
    logits = product(token(given("x", [B, L, WIDE], t), 0), weight("w", [WIDE, c], t), B, c)
    return Case({"y": logits}, [], MESH, "l:m", all_reduce(N, elements(logits) * width(t)))


@row
def class_of_the_mean_token(t: str) -> Case:
    """The mean over the length waits for the product, too."""
    c = D("c", 4)
    mean = mtf.reduce_mean(given("x", [B, L, WIDE], t), reduced_dim=L)
    logits = product(mean, weight("w", [WIDE, c], t), B, c)
    return Case({"y": logits}, [], MESH, "l:m", all_reduce(N, elements(logits) * width(t)), {"all_reduce": 1})


@row
def class_of_the_attended_token(t: str) -> Case:
    """A mean weighted by a softmax over the length: two numbers a sequence, and the classes."""
    c = D("c", 4)
    x = given("x", [B, L, WIDE], t)
    weights = mtf.softmax(product(x, weight("query", [WIDE], t), B, L), L)
    logits = product(product(weights, x, B, WIDE), weight("w", [WIDE, c], t), B, c)
    least = all_reduce(N, 2 * B.size * width(t)) + all_reduce(N, elements(logits) * width(t))
    return Case({"y": logits}, [], MESH, "l:m", least, {"all_reduce": 3})
