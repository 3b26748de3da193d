"""JAX rows of the library's operations; importing this package registers them."""

import meshlib.ops.catalogue as _catalogue
from meshlib.jax.rows import along_dims as _along_dims
from meshlib.jax.rows import attention as _attention
from meshlib.jax.rows import elementwise as _elementwise
from meshlib.jax.rows import index as _index
from meshlib.jax.rows import products as _products
from meshlib.jax.rows import ragged as _ragged
from meshlib.jax.rows import shape as _shape
from meshlib.jax.rows import sources as _sources
from meshlib.jax.rows import windows as _windows

_ = (_catalogue, _along_dims, _attention, _elementwise, _index, _products, _ragged, _shape, _sources, _windows)
