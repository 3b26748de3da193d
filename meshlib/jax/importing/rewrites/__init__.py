"""Primitives that are others in other words: written in JAX itself, traced again, and brought in as those."""

from meshlib.jax.importing.rewrites import (  # the table's rows
    curves,
    draws,
    indices,
    loops,
    mapped,
    order,
    ragged,
    solves,
    windows,
)
from meshlib.jax.importing.rewrites.table import OWN_LINES as OWN_LINES
from meshlib.jax.importing.rewrites.table import REWRITES as REWRITES

_ROWS = (curves, draws, indices, loops, mapped, order, ragged, solves, windows)
