"""The table of collectives in terminals of any width."""

from __future__ import annotations

import meshlib as mtf
from meshlib.core.text import fitted_to


def test_long_names_of_collectives_go_below_their_figures_where_lines_are_short() -> None:
    with mtf.Graph(), mtf.scope("a_model_of_many/layers_with/long_names"):
        x = mtf.input("x", "batch:64;d:4")
        total = mtf.reduce_sum(x, output_shape="d:4", name="total_over_the_batch")
    collectives = mtf.lower({"y": total}, mesh="rows:2", layout="batch:rows").collectives
    (c,) = collectives
    wide = mtf.collectives_table(collectives)
    assert [c.tensor in line and c.source in line for line in wide.splitlines()[:2]] == [False, True]
    with fitted_to(80):
        head, row, below, *_ = mtf.collectives_table(collectives).splitlines()
    assert "sent a core" in head
    assert c.tensor not in row
    assert below == f"    of {c.tensor}, {c.source}"
