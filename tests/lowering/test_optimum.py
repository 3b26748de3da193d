"""The search for the optimum on programs whose least is known, and the library's programs against it.

`tests/benchmarks/optimum.py` does the latter for any number of pairs.
"""

from __future__ import annotations

import pytest

import meshlib as mtf
from meshlib.core.graph import Tensor
from tests.effort import each, some
from tests.lowering.optimum import Subject, compare, least, search
from tests.lowering.optimum.steps import Done, Steps
from tests.lowering.pairs import FAMILIES, pair

SAME = 1.0001


def dim(name: str, size: int) -> mtf.Dimension:
    return mtf.Dimension(name, size)


def product(x: Tensor, w: Tensor) -> Tensor:
    """A matrix product over the dims that both have."""
    shared = [d for d in x.shape if d in w.shape]
    return mtf.einsum([x, w], output_shape=[d for d in (*x.shape, *w.shape) if d not in shared])


B, D_, H, K, R = dim("b", 16), dim("d", 8), dim("h", 32), dim("k", 4), dim("r", 2)


def megatron() -> dict[str, Tensor]:
    """One all_reduce of [b, d]: 2 * 3/4 * 16 * 8 * 4 bytes."""
    x = mtf.input("x", [B, D_])
    return {"y": product(mtf.relu(product(x, mtf.variable("w1", [D_, H]))), mtf.variable("w2", [H, D_]))}


def late() -> dict[str, Tensor]:
    """A sum over h that passes another product: one all_reduce of [b, k], not of [b, d]."""
    x = mtf.input("x", [B, H])
    return {"y": product(product(x, mtf.variable("w1", [H, D_])), mtf.variable("w2", [D_, K]))}


def twice() -> dict[str, Tensor]:
    """A sum over h with two users, which take it pending: two all_reduces of [b, r], less than one of [b, d]."""
    x = mtf.input("x", [B, H])
    y = product(x, mtf.variable("w", [H, D_]))
    return {n: product(y, mtf.variable(n, [D_, dim(f"r{n}", 2)])) for n in ("p", "q")}


def once() -> dict[str, Tensor]:
    """The same with two large users: one all_reduce of [b, k] for both."""
    x = mtf.input("x", [B, H])
    y = product(x, mtf.variable("w", [H, K]))
    return {n: product(y, mtf.variable(n, [K, dim(f"r{n}", 64)])) for n in ("p", "q")}


def adapter() -> dict[str, Tensor]:
    """Both products pending over h: their sum is reduced, one all_reduce of [b, d]."""
    x = mtf.input("x", [B, H])
    low = product(product(x, mtf.variable("down", [H, R])), mtf.variable("up", [R, D_]))
    return {"y": product(x, mtf.variable("w", [H, D_])) + low}


def terms() -> dict[str, Tensor]:
    """A whole term of a sum counts on one device: one all_reduce of [b, r], behind a product."""
    x, c = mtf.input("x", [B, H]), mtf.input("c", [B, D_])
    y = mtf.add_n([c, product(x, mtf.variable("w", [H, D_]))])
    return {"y": product(y, mtf.variable("v", [D_, R]))}


def largest() -> dict[str, Tensor]:
    """A pending maximum passes nothing: an all_reduce of [b], and one of [b] for the sum behind it."""
    x = mtf.input("x", [B, H])
    return {"y": mtf.reduce_sum(x - mtf.reduce_max(x, reduced_dim=H), reduced_dim=H)}


def gathered() -> dict[str, Tensor]:
    """Weights split as the batch is: gathered for each region that needs them, gradients scattered; the loss.

    w1 forward, w2 forward and backward: 3 * 3 * 32 bytes; two gradients 3/4 * 128; one number 2 * 3/4 * 4.
    """
    d, h, n = dim("d", 4), dim("h", 8), dim("n", 4)
    w1, w2 = mtf.variable("w1", [d, h]), mtf.variable("w2", [h, n])
    loss = mtf.reduce_sum(product(mtf.relu(product(mtf.input("x", [dim("b", 64), d]), w1)), w2))
    grads = mtf.gradients([loss], [w1, w2])
    return {"loss": loss, "g1": grads[0], "g2": grads[1]}


BYTES = 2 * 3 / 4 * 4  # of an all_reduce of one float32 over four devices


@pytest.mark.parametrize(
    ("program", "layout", "expected"),
    [
        (megatron, "h:x", 16 * 8 * BYTES),
        (megatron, "b:x", 0),
        (late, "h:x", 16 * 4 * BYTES),
        (twice, "h:x", 2 * 16 * 2 * BYTES),
        (once, "h:x", 16 * 4 * BYTES),
        (adapter, "h:x", 16 * 8 * BYTES),
        (terms, "h:x", 16 * 2 * BYTES),
        (largest, "h:x", 2 * 16 * BYTES),
        (gathered, "b:x;variables/h:x", 9 * 32 + 2 * 96 + 6),
    ],
)
def test_known_minima(program, layout, expected):
    with mtf.Graph():
        outputs = program()
    found = least(outputs, mesh="x:4", layout=layout)
    assert found is not None
    assert found.bytes == pytest.approx(expected)


def test_nothing_is_cheaper_than_the_least():
    p = pair(5)
    subject = Subject(p.outputs, p.updates, p.mesh, p.layout)
    found = least(p.outputs, p.updates, p.mesh, p.layout)
    assert found is not None
    assert found.bytes > 0
    assert subject.best(subject.ways(), found.cost - 1) is None
    again = subject.best(subject.ways(), found.cost)
    assert again is not None
    assert again.cost == found.cost


KEPT_WHOLE = (20_001, 20_006, 20_007, 20_012, 20_019, 20_022, 20_025, 20_041)


@pytest.mark.parametrize("number", some(KEPT_WHOLE, KEPT_WHOLE[::3]))
def test_states_are_dropped_without_loss(number, monkeypatch):
    p = pair(number)
    found = least(p.outputs, p.updates, p.mesh, p.layout)

    def every(self: Steps, op: object, done: list[Done]) -> list[Done]:
        return [d for d in done if d.bytes < float("inf")]

    monkeypatch.setattr(Steps, "_best", every)
    monkeypatch.setattr(search, "PRUNERS", 0)
    assert found is not None
    subject = Subject(p.outputs, p.updates, p.mesh, p.layout)
    slow = subject.best(subject.ways(), found.cost * 1.01 + 1)
    assert slow is not None
    assert slow.cost == pytest.approx(found.cost)


def test_a_number_makes_the_same_pair_again():
    made = [pair(n) for n in range(20_000, 20_020)]
    assert [p.text for p in made[:10]] == [pair(p.number).text for p in made[:10]]
    assert {p.family for p in made} == set(FAMILIES)
    assert 2 < sum("?" in p.layout for p in made) < 18


# ---------------------------------------------------------------- the library

PAIRS = [
    10_000, 10_001, 10_004, 10_006, 10_007, 10_008, 10_009, 10_010, 10_011, 10_013, 10_015, 10_016, 10_017, 10_018,
    10_019, 10_020, 10_021, 10_024, 10_025, 10_026, 10_027, 10_028, 10_029, 10_030, 10_031, 10_032, 10_034, 10_035,
    10_036, 10_037, 10_038, 10_039, 10_041, 10_042, 10_043, 10_045, 10_046, 10_047, 10_048, 10_049,
    # what forward has of a tensor serves backward by a slice that is kept, in whatever order of axes
    7_700_000, 7_700_008, 7_700_121, 7_700_151,
]  # fmt: skip


@each("number", some(PAIRS, [*PAIRS[:-4:3], *PAIRS[-4:]]), parts=4)
def test_the_library_against_the_least(number):
    p = pair(number)
    found = compare(p.outputs, p.updates, p.mesh, p.layout)
    assert not found.beaten, "the library does what the search does not know of"
    assert found.known
    assert found.bytes_ratio <= SAME
    assert found.cost_ratio <= SAME
