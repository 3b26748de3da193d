"""Values that are computed from nothing, where no device can compute its block of them alone."""

from __future__ import annotations

import numpy as np
import pytest

import meshlib as mtf

FIRST, SECOND, ROWS = (mtf.Dimension(*d) for d in (("first", 2), ("second", 8), ("rows", 16)))
WIDTH, TABLE = mtf.Dimension("width", 8), mtf.Dimension("table", 64)


def numbers() -> mtf.Tensor:
    """0, 1, ..., 7, 1, ..., 8: of rows in four parts, no part is a block of `first` by `second`."""
    both = mtf.add(mtf.range(FIRST, "int32"), mtf.range(SECOND, "int32"))
    return mtf.reshape(both, [ROWS])


@pytest.mark.parametrize("layout", ["rows:x;first:y?", "rows:x+y", "rows:x+y;first:x?", "width:x?;rows:x+y?"])
@pytest.mark.parametrize("gathered", [False, True])
def test_a_value_is_computed_whole_where_a_block_of_it_cannot_be(layout: str, gathered: bool) -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(TABLE.size if gathered else ROWS.size, WIDTH.size)).astype(np.float32)
    w = draw.normal(size=(ROWS.size, WIDTH.size)).astype(np.float32)
    with mtf.Graph():
        given, more = mtf.input("x", [TABLE if gathered else ROWS, WIDTH]), mtf.input("w", [ROWS, WIDTH])
        y = mtf.gather(given, numbers(), TABLE) if gathered else given * mtf.cast(numbers(), "float32")
        program = mtf.lower({"y": y + more}, mesh="x:2;y:2", layout=layout)
    index = (np.arange(2)[:, None] + np.arange(8)).reshape(-1)
    wanted = (x[index] if gathered else x * index[:, None].astype(np.float32)) + w
    np.testing.assert_allclose(mtf.simulate(program).step(x=x, w=w)["y"], wanted, rtol=1e-6)
