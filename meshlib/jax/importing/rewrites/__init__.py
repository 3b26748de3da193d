"""Primitives that are others in other words: written in JAX itself, traced again, and brought in as those."""

from meshlib.jax.importing.rewrites import (
    curves,
    draws,
    indices,
    loops,
    order,
    ragged,
    solves,
    windows,
)  # the table's rows
from meshlib.jax.importing.rewrites.table import OWN_LINES as OWN_LINES
from meshlib.jax.importing.rewrites.table import REWRITES as REWRITES

_ROWS = (curves, draws, indices, loops, order, ragged, solves, windows)
