"""Convolutions and pools whose batch, channels or image is split: edges of blocks, sums of gradients, nothing else.

The image has 16 rows. Of a window of k rows at stride s a device needs k - s rows of its neighbours in all: those of
the input forward; those of dy for the cotangent of the input, which serve that of the filters, too. Filters are small,
so their gradients are all-reduced. A device in the middle has neighbours on both sides and gives rows to both.
"""

from __future__ import annotations

import meshlib as mtf
from meshlib.core.graph import Tensor
from tests.lowering.minima.table import Case, D, all_reduce, elements, given, row, weight, width

N = 4
MESH = f"m:{N}"
B, H, W, C, OUT = D("b", 8), D("h", 16), D("w", 8), D("c", 4), D("o", 8)
KH, KW = D("kh", 3), D("kw", 3)
IMAGE = [B, H, W, C]


def rows(x: Tensor, count: int, t: str) -> int:
    """Bytes of so many rows of an image."""
    return count * elements(x) // x.shape.dim("h").size * width(t)


def back(y: Tensor, wrt: list[Tensor], t: str) -> dict[str, Tensor]:
    """y and the gradients of a given cotangent."""
    found = mtf.gradients([y], wrt, [given("dy", list(y.shape), t)])
    return {"y": y, **{f"d{n}": dx for n, dx in enumerate(found)}}


@row
def conv_of_a_split_batch(t: str) -> Case:
    """The gradient of the filters is a sum over the batch; no edge moves."""
    x, w = given("x", IMAGE, t), weight("f", [KH, KW, C, OUT], t)
    return Case(back(mtf.conv2d(x, w), [x, w], t), [], MESH, "b:m", all_reduce(N, elements(w) * width(t)))


@row
def conv_of_split_channels_out(t: str) -> Case:
    """Filters lie with their channels; the cotangent of the input is a sum over them."""
    x, w = given("x", IMAGE, t), weight("f", [KH, KW, C, OUT], t)
    return Case(back(mtf.conv2d(x, w), [x, w], t), [], MESH, "o:m", all_reduce(N, elements(x) * width(t)))


@row
def conv_of_split_channels_in(t: str) -> Case:
    """The result is a sum over them."""
    x, w = given("x", IMAGE, t), weight("f", [KH, KW, C, OUT], t)
    y = mtf.conv2d(x, w)
    return Case(back(y, [x, w], t), [], MESH, "c:m", all_reduce(N, elements(y) * width(t)))


@row
def two_convs_by_channels_and_back(t: str) -> Case:
    """As Megatron's feed-forward layer: the channels between are split, one sum at the end; forward only."""
    x, middle = given("x", IMAGE, t), D("middle", 8)
    h = mtf.relu(mtf.conv2d(x, weight("f", [KH, KW, C, middle], t)))
    y = mtf.conv2d(h, weight("g", [KH, KW, middle, OUT], t))
    return Case({"y": y}, [], MESH, "middle:m", all_reduce(N, elements(y) * width(t)))


@row
def conv_of_split_rows(t: str) -> Case:
    """One row to each neighbour."""
    x, w = given("x", IMAGE, t), weight("f", [KH, KW, C, OUT], t)
    return Case({"y": mtf.conv2d(x, w)}, [], MESH, "h:m", rows(x, min(2, N - 1), t))


@row
def conv_of_split_rows_with_gradients(t: str) -> Case:
    """The edges of dy serve both gradients: those of x do not move again."""
    x, w = given("x", IMAGE, t), weight("f", [KH, KW, C, OUT], t)
    y = mtf.conv2d(x, w)
    edges = rows(x, min(2, N - 1), t) + rows(y, min(2, N - 1), t)
    return Case(back(y, [x, w], t), [], MESH, "h:m", edges + all_reduce(N, elements(w) * width(t)))


@row
def conv_of_one_element(t: str) -> Case:
    """Nobody needs a neighbour."""
    x, w = given("x", IMAGE, t), weight("f", [D("kh", 1), D("kw", 1), C, OUT], t)
    return Case(back(mtf.conv2d(x, w), [x, w], t), [], MESH, "h:m", all_reduce(N, elements(w) * width(t)))


@row
def strided_conv_of_split_rows(t: str) -> Case:
    """Of an even number of rows, 3 rows at stride 2 need one below each block only; backward the one of dy above it.

    Of two devices one sends the first, the other the second.
    """
    x, w = given("x", IMAGE, t), weight("f", [KH, KW, C, OUT], t)
    y = mtf.conv2d(x, w, 2)
    edges = rows(x, 1, t) + rows(y, 1, t) if N > 2 else max(rows(x, 1, t), rows(y, 1, t))
    return Case(back(y, [x, w], t), [], MESH, "h:m", edges + all_reduce(N, elements(w) * width(t)))


@row
def windows_that_tile(t: str) -> Case:
    """A patch embedding: 2 rows at stride 2."""
    x, w = given("x", IMAGE, t), weight("f", [D("kh", 2), D("kw", 2), C, OUT], t)
    return Case(back(mtf.conv2d(x, w, 2), [x, w], t), [], MESH, "h:m", all_reduce(N, elements(w) * width(t)))


@row
def dilated_conv_of_split_rows(t: str) -> Case:
    """Taps that lie two rows apart reach two rows to each side."""
    x, w = given("x", IMAGE, t), weight("f", [KH, KW, C, OUT], t)
    return Case({"y": mtf.conv2d(x, w, dilation=2)}, [], MESH, "h:m", rows(x, 2 * min(2, N - 1), t))


@row
def dilated_conv_that_reaches_past_its_neighbours(t: str) -> Case:
    """Taps 12 rows apart, in blocks of 8: a block in the middle gives 4 rows to each neighbour and 4 to the one after.

    Rows between the taps are read by nobody. Two blocks of 16 rows give each other 12.
    """
    x = given("x", [D("b", 2), D("h", 8 * N if N > 2 else 32), D("w", 4), C], t)
    w = weight("f", [KH, KW, C, OUT], t)
    return Case({"y": mtf.conv2d(x, w, dilation=[12, 1])}, [], MESH, "h:m", rows(x, 12, t))


@row
def two_convs_of_one_image(t: str) -> Case:
    """The wider window's edges serve the narrower one."""
    x = given("x", IMAGE, t)
    first = mtf.conv2d(x, weight("f", [KH, KW, C, OUT], t))
    second = mtf.conv2d(x, weight("g", [D("lh", 5), D("lw", 1), C, OUT], t))
    return Case({"y": first + second}, [], MESH, "h:m", rows(x, 2 * min(2, N - 1), t))


@row
def depthwise_conv_of_split_channels(t: str) -> Case:
    """Every channel is by itself."""
    x, w = given("x", IMAGE, t), weight("f", [KH, KW, C], t)
    return Case(back(mtf.depthwise_conv2d(x, w), [x, w], t), [], MESH, "c:m", 0)


@row
def grouped_conv_of_split_channels(t: str) -> Case:
    """Whole groups lie on a device, in and out."""
    many = D("c", 8)
    x, w = given("x", [B, H, W, many], t), weight("f", [KH, KW, D("c", 2), OUT], t)
    return Case({"y": mtf.conv2d(x, w, groups=4)}, [], MESH, "o:m;c:m?", 0)


@row
def conv_of_rows_and_columns(t: str) -> Case:
    """On 2 x 2 devices: rows to one neighbour, then columns of what is there with them, a corner included."""
    x, w = given("x", IMAGE, t), weight("f", [KH, KW, C, OUT], t)
    block = B.size * C.size * width(t)  # of one element of the image
    edges = block * (W.size // 2) + block * (H.size // 2 + 1)
    return Case({"y": mtf.conv2d(x, w)}, [], "m:2;n:2", "h:m;w:n", edges)


@row
def conv_of_rows_and_channels(t: str) -> Case:
    """Edges of a device's own channels, and one sum of its block of rows."""
    x, w = given("x", IMAGE, t), weight("f", [KH, KW, C, OUT], t)
    y = mtf.conv2d(x, w)
    edges = rows(x, 1, t) // 2
    return Case({"y": y}, [], "m:2;n:2", "h:m;c:n", edges + all_reduce(2, elements(y) // 2 * width(t)))


@row
def max_pool_of_split_rows(t: str) -> Case:
    """3 rows at stride 2: one row below each block."""
    x = given("x", IMAGE, t)
    return Case({"y": mtf.max_pool(x, {"h": 3, "w": 3}, 2, "SAME")}, [], MESH, "h:m", rows(x, 1, t))


@row
def mean_of_windows_with_its_gradient(t: str) -> Case:
    """The shares of windows at the ends are numbers that every device has."""
    x = given("x", IMAGE, t)
    y = mtf.avg_pool(x, {"h": 3}, 1, "SAME")
    return Case(back(y, [x], t), [], MESH, "h:m", 2 * rows(x, min(2, N - 1), t))


@row
def image_twice_as_large(t: str) -> Case:
    """Between the last row of a block and the first of the next lie two new ones, half of which each needs."""
    x = given("x", IMAGE, t)
    return Case({"y": mtf.resize(x, {"h": 32, "w": 16})}, [], MESH, "h:m", rows(x, min(2, N - 1), t))


@row
def squares_as_channels(t: str) -> Case:
    """They lie inside a block."""
    x = given("x", IMAGE, t)
    return Case({"y": mtf.space_to_depth(x, 2)}, [], MESH, "h:m", 0)
