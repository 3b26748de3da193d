"""A constraint holds for what is the same value under other names or in another order of dims."""

from __future__ import annotations

import pytest

import meshlib as mtf
from layouts import Dimension
from meshlib.core.graph import Tensor
from meshlib.program.records import Program

B, D, D2, E = (Dimension(*x) for x in (("b", 8), ("d", 16), ("d2", 16), ("e", 8)))
MESH = "p:4;q:2"


def used(y: Tensor, w: Tensor, last: Dimension) -> dict[str, Tensor]:
    """Users that would rather have `y` elsewhere."""
    return {
        "product": mtf.einsum([y, w], output_shape=[B, E]),
        "sums": mtf.reduce_sum(mtf.sin(y), output_shape=[last]),
    }


def renamed(layout: str, again: bool, transposed: bool = False, dtype: str = "bfloat16") -> Program:
    """Users of a constrained, cast and renamed value; `again`: it is constrained once more under its new name."""
    with mtf.Graph():
        x, w = mtf.input("x", [B, D]), mtf.input("w", [D2, E])
        y = mtf.cast(mtf.constrain(mtf.tanh(x), "d:p;b:q"), dtype)
        y = mtf.rename_dimension(y, "d", "d2")
        if transposed:
            y = mtf.transpose(y, [D2, B])
        if again:
            y = mtf.constrain(y, "d2:p;b:q")
        return mtf.lower(used(y, mtf.cast(w, dtype), D2), mesh=MESH, layout=layout)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("layout", ["", "e:p", "b:p", "b:q", "d:q", "b:p;e:q"])
def test_a_constraint_goes_along_with_renamed_dims(layout: str, transposed: bool) -> None:
    once, twice = (renamed(layout, again, transposed) for again in (False, True))
    assert once.sent_bytes == twice.sent_bytes
    (turned,) = (i for i in once.instructions if i.opcode == "rename_dimension")
    assert str(turned.outputs[0].sharding) == "[b:8@q, d2:16@p]"


def test_a_wider_value_is_made_again_of_the_constrained_one() -> None:
    """The constraint holds; nobody has to send what it is cast to, unless it is constrained itself."""
    once, twice = (renamed("e:p", again, dtype="float64") for again in (False, True))
    # The sums over b: each core has 4 numbers of 8 bytes, adds them over q and gathers them over p and q.
    sums = 4 * 8 // 2 + 7 * 4 * 8 // 2
    # The product: 3 blocks of 4 x 4 float32 gathered over p, made by [b@q, e@p], gathered over q.
    assert once.sent_bytes == 3 * 4 * 4 * 4 + 4 * 2 * 8 + sums
    # Else the other operand comes to it, as float32 from e to d2, and a sum of [b@q, e] is scattered.
    assert twice.sent_bytes == 3 * 16 * 2 * 4 // 4 + 3 * 4 * 8 * 8 // 4 + 4 * 2 * 8 + sums
    (sine,) = (i for i in once.instructions if i.opcode == "sin")
    assert str(sine.inputs[0].sharding) == "[b:8@q, d2:16@p]"


def test_a_rule_for_the_new_name_lays_it_elsewhere() -> None:
    with mtf.Graph():
        x = mtf.input("x", [B, D])
        y = mtf.rename_dimension(mtf.constrain(mtf.tanh(x), "d:p"), "d", "d2")
    program = mtf.lower({"y": y}, mesh=MESH, layout="d2:q")
    assert str(program.outputs["y"].sharding) == "[b:8, d2:16@q]"
    assert str(mtf.lower({"y": y}, mesh=MESH, layout="b:q").outputs["y"].sharding) == "[b:8, d2:16@p]"


def test_an_axis_that_a_constraint_splits_over_is_not_said_to_split_nothing() -> None:
    with mtf.Graph():
        y = mtf.constrain(mtf.input("x", [B, D]), "d:p")
    assert mtf.lower({"y": y}, mesh=MESH).notes == ("axis 'q' splits nothing: every tensor is held 2 times over",)
