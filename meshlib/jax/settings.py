"""JAX's default settings, whatever a user set for code of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import jax


@contextmanager
def by_default() -> Iterator[None]:
    """Default settings inside the block: no mesh, functions compiled, rank and dtype promotion allowed.

    A mesh that is set (`jax.set_mesh`) would have to be the program's, and a strict promotion would refuse its rows.

    >>> with jax.numpy_rank_promotion("raise"), by_default():
    ...     (jax.numpy.ones((2, 3)) + jax.numpy.ones(3)).shape
    (2, 3)
    """
    with ExitStack() as stack:
        if not jax.sharding.get_abstract_mesh().empty:
            stack.enter_context(jax.set_mesh(None))
        stack.enter_context(jax.disable_jit(False))
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        yield
