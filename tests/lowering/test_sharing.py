"""What the lowering shares between operations, one small program each, with the bytes derived by hand.

The partitioner chooses operation by operation; these programs need it to look further: at what later operations bring
about anyway, at sums that others have reduced anyway, at values that can be had for nothing, and into loops.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

import meshlib as mtf
from tests.lowering.test_rules import (
    BF16,
    F32,
    D,
    Moved,
    assert_moves_what_was_derived,
    assert_numbers_equal_the_unsharded_program,
)


def lookup_in_a_table_that_the_logits_gather() -> tuple[tuple, Moved]:
    """Moving the looked-up rows would send 256 bytes less than the table, which the logits need whole anyway. k = 2."""
    b, v, d = D("b", 64), D("v", 512), D("d", 4)
    table = mtf.variable("table", [v, d])
    x = mtf.gather(table, mtf.input("tokens", [b], "int32"), v)
    logits = mtf.einsum([mtf.tanh(x), table], [b, v])
    return (({"logits": logits}, []), "m:2", "b:m;d:m?"), [("all_gather", "m", 512 * 2 * F32, 4096)]


def product_that_joins_a_sum() -> tuple[tuple, Moved]:
    """The third product alone would rather exchange operands (512 bytes) than reduce [n, d]; the others reduce it.

    k = 2: one reduce_scatter of 64 x 32, half of which is sent.
    """
    n, d, wide, narrow = D("n", 64), D("d", 32), D("wide", 256), D("narrow", 4)
    terms = []
    for name, inner in (("a", wide), ("b", wide), ("c", narrow)):
        x, w = mtf.input(f"x_{name}", [n, inner]), mtf.variable(f"w_{name}", [inner, d])
        terms.append(mtf.einsum([x, w], [n, d]))
    return (({"y": mtf.add_n(terms)}, []), "m:2", "wide:m;narrow:m;n:m?"), [
        ("reduce_scatter", "m", 64 * 32 * F32, 4096)
    ]


def number_in_every_place() -> tuple[tuple, Moved]:
    """A number spread over a dim is made where it is wanted; only the number itself is reduced. k = 2."""
    b, v = D("b", 8), D("v", 6)
    total = mtf.broadcast(mtf.reduce_sum(mtf.input("x", [b])), [b])
    return (({"total": total, "y": total * mtf.input("u", [b, v])}, []), "m:2", "v:m;b:m?"), [
        ("all_reduce", "m", F32, 4)
    ]


def maximum_that_passes_on_its_way_home() -> tuple[tuple, Moved]:
    """An all_reduce leaves all of the maxima everywhere; that they live split does not send them again. k = 2."""
    b, v = D("b", 8), D("v", 6)
    x = mtf.input("x", [b, v])
    peak = mtf.stop_gradient(mtf.reduce_max(x, reduced_dim=v))
    return (({"peak": peak, "y": mtf.exp(x - peak)}, []), "m:2", "v:m;b:m?"), [("all_reduce", "m", 8 * F32, 32)]


def renamed_input_of_several_products() -> tuple[tuple, Moved]:
    """The input is gathered under its own name: the product of the renamed one and the other share it. k = 2."""
    n, memory, d, h = D("n", 32), D("memory", 32), D("d", 4), D("h", 64)
    x = mtf.input("x", [n, d])
    z = mtf.einsum([mtf.rename_dimension(x, "n", "memory"), mtf.variable("v", [d, h])], [memory, h])
    y = mtf.einsum([x, mtf.variable("w", [d, h])], [n, h])
    return (({"y": y, "z": z}, []), "m:2", "h:m;n:m?"), [("all_gather", "m", 16 * 4 * F32, 256)]


def gradients_of_stacked_weights() -> tuple[tuple, Moved]:
    """Two scanned layers, fully sharded: each trip gathers its weight, and scatters its gradient. k = 2, 2 trips.

    The forward gathers, and so does the backward: once for the layer computed again and its input's gradient.
    """
    b, layers, d, e = D("b", 64), D("layers", 2), D("d", 8), D("e", 8)
    w = mtf.variable("w", [layers, d, e])

    def body(carries: tuple[mtf.Tensor, ...], slices: tuple[mtf.Tensor, ...]) -> tuple:
        (x,), (w,) = carries, slices
        return (mtf.rename_dimension(mtf.tanh(mtf.einsum([x, w], [b, e])), "e", "d"),), ()

    (y,), _ = mtf.scan(body, [mtf.input("x", [b, d])], [w], layers)
    train = mtf.optimize.SgdOptimizer(0.1).minimize(mtf.reduce_sum(mtf.square(y)))
    return ((None, train), "m:2", "b:m;variables/d:m;slots/d:m"), [
        ("all_gather", "m", 4 * 8 * F32, 128),
        ("all_gather", "m", 4 * 8 * F32, 128),
        ("reduce_scatter", "m", 8 * 8 * F32, 128),
    ]


def gradients_of_weights_cast_before_they_are_stacked() -> tuple[tuple, Moved]:
    """The same in bfloat16, cast outside the loop, whose gradients leave it in bfloat16: scattered in every trip."""
    b, layers, d, e = D("b", 64), D("layers", 2), D("d", 8), D("e", 8)
    w = mtf.cast(mtf.variable("w", [layers, d, e]), "bfloat16")

    def body(carries: tuple[mtf.Tensor, ...], slices: tuple[mtf.Tensor, ...]) -> tuple:
        (x,), (w,) = carries, slices
        return (mtf.rename_dimension(mtf.tanh(mtf.einsum([x, w], [b, e])), "e", "d"),), ()

    (y,), _ = mtf.scan(body, [mtf.input("x", [b, d], "bfloat16")], [w], layers)
    train = mtf.optimize.SgdOptimizer(0.1).minimize(mtf.reduce_sum(mtf.square(y)))
    return ((None, train), "m:2", "b:m;variables/d:m;slots/d:m"), [
        ("all_gather", "m", 4 * 8 * BF16, 64),
        ("all_gather", "m", 4 * 8 * BF16, 64),
        ("reduce_scatter", "m", 8 * 8 * BF16, 64),
    ]


CASES: tuple[Callable[[], tuple[tuple, Moved]], ...] = (
    lookup_in_a_table_that_the_logits_gather,
    product_that_joins_a_sum,
    number_in_every_place,
    maximum_that_passes_on_its_way_home,
    renamed_input_of_several_products,
    gradients_of_stacked_weights,
    gradients_of_weights_cast_before_they_are_stacked,
)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_bytes_derived_by_hand(case: Callable[[], tuple[tuple, Moved]]) -> None:
    assert_moves_what_was_derived(case)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_numbers_equal_the_unsharded_program(case: Callable[[], tuple[tuple, Moved]]) -> None:
    assert_numbers_equal_the_unsharded_program(case)
