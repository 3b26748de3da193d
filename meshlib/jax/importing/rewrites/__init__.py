"""Primitives rewritten as JAX functions of other primitives, and traced again."""

from meshlib.jax.importing.rewrites import (  # registers the rewrites
    bits,
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

_ROWS = (bits, curves, draws, indices, loops, mapped, order, ragged, solves, windows)
