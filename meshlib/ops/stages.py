"""What loops over the stages of a pipeline share: which of them work in which trip, as a tensor."""

from __future__ import annotations

import numpy as np

from layouts import Dimension, Shape
from meshlib.dtypes import BOOL
from meshlib.graph import Tensor, current_graph
from meshlib.loop_record import Active
from meshlib.ops.table import table


def active_mask(active: Active, trips: Dimension) -> Tensor:
    """Whether each index works in each trip: bool [trips, active.dim]."""
    works = np.zeros((trips.size, active.size), np.bool_)
    for trip, indices in enumerate(active.indices):
        works[trip, list(indices)] = True
    shape = Shape([trips, Dimension(active.dim, active.size)])
    return table(current_graph("pipeline"), works, shape, BOOL, "works")
